"""Processes learn as one over a reader that is shared out, are stopped, and others go on: each row once.

Policies average their gradients by themselves, and PyTorch's own DistributedDataParallel does it for other
modules. As a script, this file is the parent of the processes, which are forked and meet in a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from further import further
from gymnasium.spaces import Box, Discrete
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from rlio import DatasetReader, ParquetWriter, SampleBatch
from rlio.policies import BehaviourCloning
from rlio.policies.checkpoint import load_state, save_state
from rlio.policies.data_parallel import in_step, setup_torch_data_parallel
from rlio.policies.torch_arrays import arrays_of, load_arrays, state_of, state_to
from rlio.torch import ReplayDataset

pytestmark = pytest.mark.xdist_group("data_parallel_reader")  # One process begins the others once.

# At the end of the epoch, two rows are left for three processes: one has none.
ROWS, STEP = 98, 12
OPTIONS: dict[str, Any] = {"epochs": 1, "shuffle": True, "seed": 5}
# Processes, and how many steps they take; None: as many as there are.
PHASES: list[tuple[int, int | None]] = [(2, 3), (1, 2), (3, None)]
RUNS = {"elastic": PHASES, "alone": [(1, None)]}


def record(root: Path) -> None:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(ROWS, 3)).astype(np.float32)
    with ParquetWriter(root) as writer:
        writer.write(SampleBatch(obs=obs, actions=(obs[:, 0] > 0).astype(np.int64), t=np.arange(ROWS)))


def learn_policy(rank: int, world: int, folder: Path, steps: int | None) -> Iterator[tuple[Any, Any]]:
    """The rows and the weights of each step."""
    policy = BehaviourCloning(hidden=(8,), learning_rate=0.01)
    policy.bind(Box(-10.0, 10.0, (3,), np.float32), Discrete(2), seed=rank)
    setup_torch_data_parallel([policy], f"file://{folder}/meeting-{world}", rank, world, timeout=120)
    with DatasetReader(
        folder.parent / "data", batch_size=STEP // world, shard=(rank, world), **OPTIONS
    ) as reader:
        if (folder / "checkpoint").exists():
            state = load_state(folder / "checkpoint")
            policy.set_state(state["policy"])
            reader.load_state_dict(state["reader"])
        for batch in islice(in_step(reader), steps):
            policy.learn_on_batch(batch)
            yield batch["t"].tolist() if batch else [], policy.get_weights()
        if rank == 0:
            save_state(folder / "checkpoint", {"policy": policy.get_state(), "reader": reader.state_dict()})


def learn_module(rank: int, world: int, folder: Path, steps: int | None) -> Iterator[tuple[Any, Any]]:
    """The same with a module and an optimizer of one's own."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting-{world}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    torch.manual_seed(7)
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    dataset = ReplayDataset(folder.parent / "data", batch_size=STEP // world, **OPTIONS)
    with dataset.loader() as loader:
        if (folder / "checkpoint").exists():
            state = load_state(folder / "checkpoint")
            load_arrays(module, state["module"], "weights")
            optimizer.load_state_dict(state_to(state["optimizer"]))
            loader.load_state_dict(state["reader"])
        model = DistributedDataParallel(module)
        with Join([model]):
            for batch in islice(loader, steps):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(batch["obs"]), batch["actions"]).backward()
                optimizer.step()
                yield batch["t"].tolist(), arrays_of(module)
        if rank == 0:
            parts = {"module": arrays_of(module), "optimizer": state_of(optimizer.state_dict())}
            save_state(folder / "checkpoint", {**parts, "reader": loader.state_dict()})


LEARN = {"policy": learn_policy, "module": learn_module}


def process(rank: int, kind: str, world: int, folder: Path, steps: int | None, name: str) -> None:
    """One of ``world``: write down what it was given, and the weights that came of it."""
    torch.set_num_threads(1)
    found = list(LEARN[kind](rank, world, folder, steps))
    torch.distributed.destroy_process_group()
    text = [[rows, {key: value.tolist() for key, value in weights.items()}] for rows, weights in found]
    (folder / f"{name}-{rank}.json").write_text(json.dumps(text))


def run_all(root: Path, kind: str) -> None:
    import torch._dynamo  # Optimizers import it, for a second: once, and not in each process.

    record(root / "data")
    for run, phases in RUNS.items():
        folder = root / run
        folder.mkdir()
        for number, (world, steps) in enumerate(phases):
            torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call] # torch does not type it
                process,
                args=(kind, world, folder, steps, str(number)),
                nprocs=world,
                start_method="fork",
            )


class Learned:
    """What the processes of a run were given and learned.

    Attributes:
        rows: Of each global step, those of all processes, in their order.
        weights: Of each process after each step.
        steps: How many each process took in each phase.
    """

    def __init__(self, folder: Path, phases: list[tuple[int, int | None]]) -> None:
        self.rows: list[list[list[int]]] = []
        self.weights: list[list[dict[str, Any]]] = []
        self.steps: list[list[int]] = []
        for number, (world, _) in enumerate(phases):
            each = [json.loads((folder / f"{number}-{rank}.json").read_text()) for rank in range(world)]
            self.steps.append([len(said) for said in each])
            for step in range(max(self.steps[-1])):
                there = [said[step] for said in each if step < len(said)]
                self.rows.append([rows for rows, _ in there])
                self.weights.append([weights for _, weights in there])


@pytest.fixture(scope="module", params=further("policy", "module"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def root(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sys.platform != "linux":
        pytest.skip("the processes are forked, and meet at an interface that is called lo")
    folder = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [sys.executable, __file__, str(folder), kind],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_two_processes_then_one_then_three_read_each_row_once_in_the_order_of_one(
    root: Path, kind: str
) -> None:
    elastic = Learned(root / "elastic", PHASES)
    alone = Learned(root / "alone", [(1, None)])
    assert [list(chain(*step)) for step in elastic.rows] == [step[0] for step in alone.rows]
    assert sorted(chain(*(step[0] for step in alone.rows))) == list(range(ROWS))
    assert [[len(rows) for rows in step] for step in elastic.rows[:6]] == [
        *[[6, 6]] * 3,
        *[[12]] * 2,
        [4] * 3,
    ]
    # All take equally many steps; where PyTorch's Join stands in for a process, that one takes none.
    assert elastic.steps == [[3, 3], [2], [4, 4, 4] if kind == "policy" else [3, 4, 4]]


def test_what_they_learn_is_what_one_process_learns(root: Path, kind: str) -> None:
    """Also from the last rows, of which one process has none, and with the optimizer's state as it was."""
    elastic = Learned(root / "elastic", PHASES)
    alone = Learned(root / "alone", [(1, None)])
    steps = list(zip(elastic.weights, alone.weights, strict=True))
    # Join counts a process without rows as one with gradients of 0.
    for of_all, (expected,) in steps if kind == "policy" else steps[:-1]:
        for weights in of_all:
            assert weights == of_all[0], "weights are equal in all processes"
            assert weights.keys() == expected.keys()
            for name, value in weights.items():
                np.testing.assert_allclose(value, expected[name], atol=1e-5)
    first, last = steps[0][1][0], steps[-1][1][0]
    assert any(np.abs(np.subtract(first[name], last[name])).max() > 0.01 for name in first), "it learns"


def test_a_checkpoint_is_arrays_and_text(root: Path) -> None:
    folder = root / "elastic" / "checkpoint"
    files = {file.name for file in folder.rglob("*") if file.is_file()}
    assert files == {"arrays.npz", "state.json"}
    with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
        assert all(arrays[name].dtype != object for name in arrays)
    json.loads((folder / "state.json").read_text())


def test_one_process_alone_gets_its_batches_as_they_are() -> None:
    batches = [SampleBatch(t=np.arange(3)), SampleBatch(t=np.arange(2))]
    assert list(in_step(batches)) == batches


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), sys.argv[2])
