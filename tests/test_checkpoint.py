"""`save_checkpoint` and `load_checkpoint`: one folder from which a training run goes on."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crash_shim import DIED, dying_at, intercepted
from further import first
from gymnasium.spaces import Box, Discrete
from saved_stores import STORES, sampler_of

import rlio
from rlio.errors import CorruptData, DataNotFound, OptionError, StateError
from rlio.testing import assert_same

SPACES = Box(-9.0, 9.0, (3,)), Discrete(2)


def steps(start: int, count: int) -> rlio.SampleBatch:
    rng = np.random.default_rng(start)
    return rlio.SampleBatch(
        obs=rng.random((count, 3), np.float32),
        new_obs=rng.random((count, 3), np.float32),
        actions=rng.integers(0, 2, count),
        rewards=rng.random(count, np.float32),
        terminateds=np.zeros(count, bool),
        truncateds=np.zeros(count, bool),
        eps_id=np.full(count, start),
        t=np.arange(count),
    )


class Run:
    """A training run of one's own: a policy of rlio's, a torch module, stored rows, a replay buffer."""

    def __init__(self, root: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = rlio.policies.DQN()
        self.policy.bind(*SPACES, seed=seed)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.reader = rlio.DatasetReader(root, batch_size=8, shuffle=True, seed=0)
        self.store = rlio.ReplayStore(100)
        self.sampler = self.store.prioritised(batch_size=8, seed=seed)
        self.rng = np.random.default_rng(seed)
        self.step = 0

    def train(self, count: int) -> list[Any]:
        seen: list[Any] = []
        for _ in range(count):
            self.step += 1
            self.store.append(steps(100 + self.step, 20))
            stored, drawn = self.reader.sample(), self.sampler.sample()
            self.policy.learn_on_batch(stored)
            errors = self.model(torch.as_tensor(drawn["obs"])).squeeze(1)
            self.optimizer.zero_grad()
            errors.square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.sampler.update_priorities(drawn["batch_indexes"], errors.detach().numpy())
            seen.append(
                [stored["t"], drawn["batch_indexes"], drawn["weights"], errors.tolist(), self.rng.random()]
            )
        seen.append(self.policy.get_weights())
        return seen

    def parts(self) -> dict[str, Any]:
        names = ("policy", "model", "optimizer", "scheduler", "reader", "store", "sampler", "rng", "step")
        return {name: getattr(self, name) for name in names}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with rlio.ParquetWriter(tmp_path / "data", writer_id="w00000-00000000") as writer:
        for start in range(5):
            writer.write(steps(start, 20))
    return tmp_path / "data"


def test_a_loop_of_ones_own_goes_on_to_the_bit(root: Path, tmp_path: Path) -> None:
    run = Run(root, seed=0)
    run.train(6)
    rlio.save_checkpoint(tmp_path / "checkpoint", **run.parts())
    expected = run.train(6)

    other = Run(root, seed=1)
    parts = {**other.parts(), "store": rlio.ReplayStore}
    del parts["step"], parts["sampler"]
    found = rlio.load_checkpoint(tmp_path / "checkpoint", **parts)
    assert found.keys() == {"step", "store"}
    other.step, other.store = found["step"], found["store"]
    other.sampler = other.store.prioritised(batch_size=8)
    rlio.load_checkpoint(tmp_path / "checkpoint", sampler=other.sampler)
    np.testing.assert_equal(other.train(6), expected)


def test_a_worker_and_a_reader_go_on(root: Path, tmp_path: Path) -> None:
    def make() -> tuple[rlio.RolloutWorker, rlio.InputReader]:
        worker = rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), seed=3)
        return worker, rlio.DatasetReader(root, batch_size=7, shuffle=True, seed=1)

    worker, reader = make()
    with worker, reader:
        worker.sample()
        reader.sample()
        rlio.save_checkpoint(tmp_path / "checkpoint", worker=worker, reader=reader)
        expected, counted = reader.sample(), worker.get_state()["metrics"]
    worker, reader = make()
    with worker, reader:
        assert rlio.load_checkpoint(tmp_path / "checkpoint", worker=worker, reader=reader) == {}
        assert_same(reader.sample(), expected)
        assert worker.get_state()["metrics"] == counted
        worker.sample()


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = {
        "best": -math.inf,
        "nothing": None,
        "by_step": {10: 0.5, 20: [1, 2]},
        "array": np.arange(3, dtype=np.int16),
        "tensor": torch.arange(2),
        "nested": {"$array": "a name that is used inside", "deep": {"x": True}},
        "empty": {},
    }
    rlio.save_checkpoint(tmp_path, **values)
    found = rlio.load_checkpoint(tmp_path)
    assert torch.equal(found.pop("tensor"), values.pop("tensor"))
    assert found["array"].dtype == np.int16
    np.testing.assert_equal(found, values)


def test_a_remote_folder_holds_all_but_stores() -> None:
    uri = "memory://checkpoint-remote"
    for step in range(3):
        rlio.save_checkpoint(uri, rng=np.random.default_rng(step), step=step)
    rng = np.random.default_rng(9)
    assert rlio.load_checkpoint(uri, rng=rng) == {"step": 2}
    assert rng.random() == np.random.default_rng(2).random()
    with pytest.raises(OptionError):
        rlio.save_checkpoint(uri, store=rlio.ReplayStore(10), step=4)
    assert rlio.load_checkpoint(uri) == {"step": 2}


def test_one_checkpoint_is_kept_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for step in range(3):
        rlio.save_checkpoint(tmp_path, step=step)
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 3
    assert {"notes", "checkpoint.json"} < names
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


@pytest.mark.parametrize("remainder", first(1, range(6)))
def test_whenever_a_process_dies_one_whole_checkpoint_is_there(tmp_path: Path, remainder: int) -> None:
    store = rlio.ReplayStore(50)
    store.append(steps(1, 20))
    before = tmp_path / "before"
    before.mkdir()
    rlio.save_checkpoint(before, store=store, step=1)
    store.append(steps(2, 20))

    def save(folder: Path) -> None:
        rlio.save_checkpoint(folder, store=store, step=2)

    def dies(folder: Path, point: int) -> bool:
        shutil.copytree(before, folder)
        child = os.fork()
        if not child:
            with intercepted(dying_at(point)):
                save(folder)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == DIED

    seen, point = set(), 1 + remainder
    while dies(folder := tmp_path / str(point), point):
        found = rlio.load_checkpoint(folder, store=rlio.ReplayStore)
        assert len(found["store"]) == 20 * found["step"]
        seen.add(found["step"])
        rlio.save_checkpoint(folder, step=3)
        assert rlio.load_checkpoint(folder) == {"step": 3}
        assert sum(path.is_dir() for path in folder.iterdir() if path.name != "_tmp") == 1
        point += 6
    assert seen == {1, 2}
    assert point > 10


def without_newest(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


def flip(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (path,) = folder.rglob(name)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return change


def elsewhere(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"newest": "../../etc"}))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (without_newest, DataNotFound),
        (flip("arrays.npz"), CorruptData),
        (flip("store.json"), CorruptData),
        (elsewhere, CorruptData),
        (lambda folder: (folder / "checkpoint.json").write_text("{"), CorruptData),
    ],
    ids=["no pointer", "arrays", "store", "a path elsewhere", "half a pointer"],
)
def test_damage_is_an_error_before_a_part_is_changed(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception]
) -> None:
    store = rlio.ReplayStore(10)
    store.append(steps(0, 5))
    rlio.save_checkpoint(tmp_path, rng=np.random.default_rng(0), store=store, weights=np.ones(500))
    damage(tmp_path)
    rng = np.random.default_rng(7)
    with pytest.raises(error):
        rlio.load_checkpoint(tmp_path, rng=rng, store=rlio.ReplayStore)
    assert rng.random() == np.random.default_rng(7).random()


def test_what_does_not_fit_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    store = rlio.ReplayStore(10)
    store.append(steps(0, 5))
    with rlio.DatasetReader(root) as reader:
        rlio.save_checkpoint(tmp_path / "c", reader=reader, store=store, step=1)
    for parts in (
        {"policy": reader},
        {"store": store},
        {"step": 1},
        {"reader": np.random.default_rng(0)},
        {"reader": 3},
    ):
        with pytest.raises(StateError):
            rlio.load_checkpoint(tmp_path / "c", **parts)
    with pytest.raises(StateError):
        rlio.save_checkpoint(tmp_path / "c", thing=object())
    with pytest.raises(StateError):
        rlio.save_checkpoint(tmp_path / "c", policy=rlio.RandomPolicy)
    with pytest.raises(OptionError):
        rlio.save_checkpoint(tmp_path / "c")
    with pytest.raises(OptionError):
        rlio.save_checkpoint(tmp_path / "c", store=rlio.ReplayStore.open(root))
    # None of these took the place of what is there.
    assert rlio.load_checkpoint(tmp_path / "c", store=rlio.ReplayStore).keys() == {"step", "store"}
    with pytest.raises(StateError):
        rlio.load_checkpoint(tmp_path / "c", reader=rlio.DatasetReader(root, shuffle=True))


def test_a_checkpoint_of_format_1_is_loaded_and_replaced(tmp_path: Path) -> None:
    """As commit dd0ca8f saved it: the folder of a store has the name of the part."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(Path(__file__).with_name("golden") / "checkpoint-1", folder)
    rng = np.random.default_rng(0)
    found = rlio.load_checkpoint(folder, buffer=rlio.ReplayStore, rng=rng)
    assert rng.random() == np.random.default_rng(3).random()
    store, expected = found.pop("buffer"), STORES["whole_episodes"]()
    assert_same(
        store.uniform(batch_size=50, seed=1).sample(), expected.uniform(batch_size=50, seed=1).sample()
    )
    sampler, twin = store.prioritised(batch_size=8), sampler_of(expected)
    rlio.load_checkpoint(folder, sampler=sampler)
    assert_same(sampler.sample(), twin.sample())
    assert torch.equal(found.pop("tensor"), torch.arange(2))
    np.testing.assert_equal(found, {"step": 7, "array": np.arange(4.0)})
    (before,) = (path for path in folder.iterdir() if path.is_dir())
    rlio.save_checkpoint(folder, step=8)
    assert rlio.load_checkpoint(folder) == {"step": 8}
    assert not before.exists()
