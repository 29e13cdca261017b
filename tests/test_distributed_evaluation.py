"""Off-policy evaluation in Ray's tasks: the numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from further import further
from tabular_problems import PROBLEMS
from typer.testing import CliRunner

import rlio
from rlio.errors import DataNotFound, MissingColumn, OptionError, SchemaError
from rlio.evaluation import FittedQ, evaluate_offline
from rlio.policies.torch_policy import TorchPolicy

ray = pytest.importorskip("ray")

from rlio.distributed import evaluate_offline as evaluate_on_ray  # noqa: E402 - needs Ray only when it is used

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]

CHAIN = PROBLEMS["chain"]
OPTIONS: dict[str, Any] = {"gamma": CHAIN.gamma, "estimators": ["is", "pdis", "wis", "wpdis"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two writers who gave their episodes the same ids, in shards of 64 rows that cut them anywhere."""
    found = tmp_path_factory.mktemp("data")
    for number in range(2):
        with rlio.ParquetWriter(
            found, writer_id=f"w0000{number}-00000000", roll=rlio.Roll(max_rows=64)
        ) as writer:
            for part in CHAIN.simulate(150, seed=number).timeslices(37):
                writer.write(part)
    assert len(rlio.open_dataset(found).files()) > 8
    return found


@pytest.mark.parametrize("tasks", [5, *further(1, 100)])
def test_parts_that_cut_episodes_give_the_numbers_of_one_process_to_the_last_bit(
    root: Path, tasks: int
) -> None:
    expected = evaluate_offline(root, CHAIN.target, **OPTIONS)
    assert expected["is"].episodes == 300
    assert evaluate_on_ray(root, CHAIN.target, tasks=tasks, **OPTIONS) == expected


@pytest.mark.further
def test_a_model_is_fitted_to_what_the_tasks_send(root: Path) -> None:
    options = OPTIONS | {
        "estimators": ["dm", "dr", "wdr"],
        "q_model": FittedQ(hidden=(), iterations=30, batch_size=64),
    }
    expected = evaluate_offline(root, CHAIN.target, **options)
    found = evaluate_on_ray(rlio.open_dataset(root), CHAIN.target, tasks=3, **options)
    for name, estimate in expected.items():
        assert found[name].v_target.value == pytest.approx(estimate.v_target.value, rel=1e-6)


def test_rows_that_are_episodes_by_themselves_stay_in_their_order(root: Path) -> None:
    options = OPTIONS | {"bandit": True}
    expected = evaluate_offline(root, CHAIN.target, **options)
    assert evaluate_on_ray(root, CHAIN.target, tasks=4, **options) == expected


@pytest.mark.further
def test_blocks_of_a_ray_dataset_give_the_same_numbers() -> None:
    """Rows of tables, blocks that cut episodes; shuffled blocks too, as ids say what belongs together."""
    batch = CHAIN.simulate(200, seed=3)
    tables = [pa.table(dict(part.items())) for part in batch.timeslices(50)]
    dataset = ray.data.from_arrow(tables)
    for options in (OPTIONS, OPTIONS | {"bandit": True}):
        assert evaluate_on_ray(dataset, CHAIN.target, **options) == evaluate_offline(
            batch, CHAIN.target, **options
        )
    shuffled = ray.data.from_arrow([tables[number] for number in (3, 0, 5, 1, *range(6, len(tables)), 4, 2)])
    assert evaluate_on_ray(shuffled, CHAIN.target, **OPTIONS) == evaluate_offline(
        batch, CHAIN.target, **OPTIONS
    )


@pytest.mark.further
def test_a_network_is_sent_to_the_tasks(tmp_path: Path) -> None:
    policy = TorchPolicy(hidden=(8,))
    with rlio.RolloutWorker("CartPole-v1", policy, output=tmp_path, seed=0) as worker:
        for _ in range(5):
            worker.sample()
    options: dict[str, Any] = {"gamma": 1.0, "incomplete": "drop"}
    expected = evaluate_offline(tmp_path, policy, **options)
    found = evaluate_on_ray(tmp_path, policy, tasks=2, **options)
    for name, estimate in expected.items():
        assert found[name].v_target.value == pytest.approx(estimate.v_target.value, rel=1e-4)
        assert found[name].left_out == estimate.left_out


def test_the_command_runs_there_too(root: Path) -> None:
    from rlio.cli.main import app

    arguments = [
        "evaluate",
        str(root),
        "--gamma",
        "0.9",
        "--policy",
        "tabular_problems:judged_in_the_chain",
        "--json",
    ]
    here = CliRunner().invoke(app, arguments)
    there = CliRunner().invoke(app, [*arguments, "--ray"])
    assert here.exit_code == there.exit_code == 0, there.output
    assert json.loads(there.output) == json.loads(here.output)


def test_what_is_refused_in_a_task_is_refused_here(root: Path, tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "bare") as writer:
        writer.write(rlio.SampleBatch(obs=[0, 1], actions=[0, 1], rewards=[1.0, 2.0]))
    with pytest.raises(MissingColumn, match="how likely"):
        evaluate_on_ray(tmp_path / "bare", CHAIN.target, **OPTIONS)
    unnumbered = CHAIN.simulate(20, seed=1)
    del unnumbered["t"]  # Parts that are read side by side have no order.
    with rlio.ParquetWriter(tmp_path / "unnumbered") as writer:
        writer.write(unnumbered)
    with pytest.raises(MissingColumn) as raised:
        evaluate_on_ray(tmp_path / "unnumbered", CHAIN.target, tasks=2, **OPTIONS)
    assert raised.value.column == "t"
    with rlio.ParquetWriter(tmp_path / "cut") as writer:
        writer.write(CHAIN.simulate(20, seed=1)[:-1])
    with pytest.raises(SchemaError, match="1 episode is incomplete: episode 19 has"):
        evaluate_on_ray(tmp_path / "cut", CHAIN.target, **OPTIONS)
    with pytest.raises(OptionError, match="tasks=0"):
        evaluate_on_ray(root, CHAIN.target, tasks=0, **OPTIONS)
    with pytest.raises(DataNotFound):
        evaluate_on_ray(tmp_path / "nowhere", CHAIN.target, **OPTIONS)
