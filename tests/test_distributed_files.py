"""Ray Data reads the files of other libraries and tables in memory: the same rows, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from further import first
from tabular_problems import PROBLEMS
from test_every_option import FORMATS, ROWS, meaning, opened, roots

import rlio
from rlio.errors import OptionError
from rlio.evaluation import evaluate_offline

ray = pytest.importorskip("ray")

from rlio.distributed import evaluate_offline as evaluate_on_ray  # noqa: E402 - needs Ray only when it is used
from rlio.distributed import read_dataset  # noqa: E402

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]

__all__ = ["roots"]  # A fixture.


def rows_of(dataset: Any) -> dict[str, Any]:
    """All rows of a Ray Data dataset, in order."""
    dataset.context.execution_options.preserve_order = True
    blocks = list(dataset.iter_batches(batch_size=None, batch_format="numpy"))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", first(2, ["d4rl", "mapped.csv", *sorted({*FORMATS} - {"d4rl", "mapped.csv"})])
)
def test_ray_data_reads_every_format_in_parts(roots: dict[str, Path], name: str) -> None:
    data = opened(roots[name])
    expected = data.to_arrow()
    # A path is enough where no mapping is needed.
    root = data if meaning(roots[name]) else roots[name]
    for tasks in (1, 4):
        found = read_dataset(root, tasks=tasks)
        assert found.count() == ROWS
        rows = rows_of(found)
        for column in expected.column_names:
            ours, theirs = rows[column], expected[column]
            assert ours.tolist() == theirs.to_pylist(), column
    some = read_dataset(root, columns=["rewards"], filter="rewards > 20", tasks=3)
    assert rows_of(some)["rewards"].tolist() == list(range(21, ROWS))


@pytest.mark.further
def test_groups_of_one_file_are_read_by_several_tasks_and_evaluated_as_in_one_process(tmp_path: Path) -> None:
    chain = PROBLEMS["chain"]
    batch = chain.simulate(150, seed=0)
    pq.write_table(pa.table(dict(batch.items())), tmp_path / "rows.parquet", row_group_size=64)
    dataset = read_dataset(tmp_path / "rows.parquet", tasks=5)
    assert dataset.materialize().num_blocks() == 5
    rows = rows_of(dataset)
    for name in ("eps_id", "t", "rewards", "actions"):
        assert rows[name].tolist() == batch[name].tolist()
    for bandit in (False, True):
        options: Any = {"gamma": chain.gamma, "estimators": ["is", "pdis", "wis", "wpdis"], "bandit": bandit}
        expected = evaluate_offline(tmp_path / "rows.parquet", chain.target, **options)
        assert evaluate_on_ray(tmp_path / "rows.parquet", chain.target, tasks=5, **options) == expected


def test_a_table_in_memory_is_kept_once_and_read_in_parts() -> None:
    data = rlio.open_dataset(
        pa.table(
            {
                "obs": np.arange(40.0),
                "actions": np.arange(40) % 7,
                "rewards": np.ones(40),
                "eps_id": np.arange(40) // 10,
            }
        )
    )
    rows = rows_of(read_dataset(data, tasks=3))
    assert rows["obs"].ravel().tolist() == list(range(40))
    assert rows["eps_id"].tolist() == [number // 10 for number in range(40)]


@pytest.mark.further
def test_damaged_rows_raise_in_a_task_or_are_left_out(roots: dict[str, Path], tmp_path: Path) -> None:
    rlio.convert(roots["rlio"], tmp_path / "damaged", to="minari")
    with h5py.File(tmp_path / "damaged/data/main_data.hdf5", "r+") as file:
        short = file["episode_4/observations"][:-1]
        del file["episode_4/observations"]
        file["episode_4/observations"] = short
    with pytest.raises(Exception, match="episode 4 of 4 steps"):
        rows_of(read_dataset(tmp_path / "damaged", tasks=3))
    rows = rows_of(read_dataset(tmp_path / "damaged", on_error="skip", tasks=3))["rewards"]
    assert rows.tolist() == [number for number in range(ROWS) if not 16 <= number < 20]


def test_files_that_change_after_the_call_are_refused_by_the_tasks(
    roots: dict[str, Path], tmp_path: Path
) -> None:
    path, other = tmp_path / "rows.csv", tmp_path / "other.csv"
    path.write_bytes(roots["mapped.csv"].read_bytes())
    dataset = read_dataset(opened(path))
    other.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    other.replace(path)
    with pytest.raises(Exception, match="changed since they were opened"):
        rows_of(dataset)


def test_read_dataset_refuses_options_that_need_data_of_rlio(roots: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match="writers=True"):
        read_dataset(roots["d4rl"], writers=True)
    with pytest.raises(OptionError, match="at= is a snapshot"):
        read_dataset(opened(roots["d4rl"]), at={"w": 3})
    with pytest.raises(OptionError, match="limits="):
        read_dataset(opened(roots["d4rl"]), limits=rlio.Limits(columns=5))
