"""Data sets in and out of Ray Data, on a real cluster: the same rows, each once, whatever is killed."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from further import further
from golden_data import cartpole_like, frames, sequences, two_policies
from stored_batches import assert_identical, load, numbered, store
from test_distributed_data_blocks import alike, columns_of, with_types

import rlio
from rlio.catalog.listing import list_shards
from rlio.catalog.names import part_of
from rlio.distributed import read_dataset, write_dataset
from rlio.errors import OptionError, SchemaError
from rlio.storage.filesystem import Storage

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]


def cheetah(rows: int = 3000, seed: int = 0) -> rlio.SampleBatch:
    """Rows like those of HalfCheetah: vectors, new_obs that is the next obs, episodes of 100 rows."""
    rng = np.random.default_rng(seed)
    t = np.arange(rows) % 100
    obs = rng.normal(size=(rows + 1, 17)).astype(np.float32)
    return rlio.SampleBatch(
        obs=obs[:-1],
        new_obs=obs[1:],
        actions=rng.uniform(-1, 1, (rows, 6)).astype(np.float32),
        rewards=rng.normal(size=rows),
        terminateds=np.zeros(rows, bool),
        truncateds=t == 99,
        eps_id=np.arange(rows) // 100 + 1000 * seed,
        t=t,
    )


MADE: dict[str, Callable[[], Any]] = {
    "cheetah": cheetah,
    "cartpole_like": cartpole_like,
    "frames": frames,
    "sequences": sequences,
    "alike": alike,
    "with_types": with_types,
}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    """Ray Data tells of each run, and writes it into what pytest shows of a failure."""
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(before)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "data")


def several(name: str, root: str, writers: int = 3) -> str:
    """Writers that have recorded the same kind of rows, a few shards each."""
    for n in range(writers):
        batch = cheetah(seed=n) if name == "cheetah" else MADE[name]()
        store(batch, root=root, writer_id=f"w{n}", roll=rlio.Roll(max_rows=1000), spool=None)
    return root


def totals(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """Name -> (rows, dtype, shape of a row, sum or all texts)."""
    return {
        name: (
            len(values),
            values.dtype.str,
            values.shape[1:],
            values.tolist() if values.dtype.kind == "O" else _sum(values),
        )
        for name, values in columns.items()
    }


def _sum(values: np.ndarray) -> Any:
    if values.dtype.kind == "M":
        return values.astype("i8").sum()
    if values.dtype.kind == "f":  # Exact, as blocks may come in any order.
        return math.fsum(values[~np.isnan(values)].tolist())
    return int(values.sum())


def gathered(ds: Any) -> dict[str, np.ndarray]:
    """All rows, as `iter_batches` gives them."""
    parts = list(ds.iter_batches(batch_size=None, batch_format="numpy"))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["frames", "alike", *further("cheetah", "cartpole_like", "sequences", "with_types")]
)
def test_totals_and_rows_are_those_of_the_data_set(name: str, root: str) -> None:
    several(name, root)
    found, expected = gathered(read_dataset(root, tasks=3)), columns_of(root)
    if name == "alike":  # Blocks may come in any order, and here all are of one task's kind.
        found, expected = _sorted(found), _sorted(expected)
    assert totals(found) == totals(expected)
    # And what the data set's own reader gives, where it has the same columns.
    batch = load(root)
    for column in ("obs", "new_obs", "rewards", "t", "truncateds"):
        if not isinstance(batch, rlio.MultiAgentBatch) and column in batch:
            assert found[column].dtype == batch[column].dtype.newbyteorder("=")
            assert found[column].shape == batch[column].shape
            assert _sum(found[column]) == _sum(batch[column])


def _sorted(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    order = np.lexsort((columns["policy_id"].astype(str), columns["t"], columns["eps_id"]))
    return {name: values[order] for name, values in columns.items()}


@pytest.mark.further
@pytest.mark.parametrize(
    "name", ["with_types", *further("cartpole_like", "sequences", "cheetah", "frames", "alike")]
)
def test_what_is_written_from_what_is_read_reads_the_same(name: str, root: str, tmp_path: Path) -> None:
    several(name, root, writers=2)
    report = write_dataset(read_dataset(root, tasks=2), tmp_path / "copy", job="copy")
    assert report.rows == len(rlio.open_dataset(root))
    assert [part.written for part in report.parts] == [True, True]
    assert_identical(load(str(tmp_path / "copy")), load(root))
    assert rlio.verify(tmp_path / "copy").ok


def test_one_policy_of_several_comes_as_its_rows(root: str, tmp_path: Path) -> None:
    store(two_policies(), root=root, spool=None)
    found = gathered(read_dataset(root, policy="flyer", filter="t > 0"))
    assert found["obs"].tolist() == [[3.0, 4.0, 5.0]]
    with pytest.raises(SchemaError, match="policy="):
        read_dataset(root)


def test_columns_filters_and_snapshots_are_pushed_down(root: str) -> None:
    several("cheetah", root)
    snapshot = rlio.open_dataset(root).snapshot()
    store(cheetah(seed=7), root=root, writer_id="w7", spool=None)
    ds = read_dataset(root, columns=["t", "rewards"], filter="t == 5", at=snapshot)
    assert ds.columns() == ["rewards", "t"], "in the order of the data"
    found = gathered(ds)
    assert len(found["t"]) == 90
    assert set(found["t"]) == {5}
    assert read_dataset(root).select_columns(["t"]).count() == 12_000
    assert set(gathered(read_dataset(root).select_columns(["rewards"]))) == {"rewards"}
    assert read_dataset(root).limit(7).count() == 7


def test_functions_of_batches_go_between_reading_and_writing(root: str, tmp_path: Path) -> None:
    several("with_types", root, writers=1)

    def plus_one(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**batch, "u8": batch["u8"] + 1}

    ds = read_dataset(root).map_batches(plus_one)
    write_dataset(ds, tmp_path / "copy", like=root)
    expected = load(root)
    expected["u8"] = expected["u8"] + 1
    assert_identical(load(str(tmp_path / "copy")), expected)


def test_datasets_of_others_are_written(root: str) -> None:
    report = write_dataset(
        ray.data.range_tensor(100, shape=(2, 3), override_num_blocks=2), root, job="others"
    )
    batch = load(root)
    assert report.rows == len(batch) == 100
    assert batch["data"].shape == (100, 2, 3)


def test_nothing_is_a_data_set_without_rows(root: str) -> None:
    store(numbered(3), root=root, spool=None)
    report = write_dataset(read_dataset(root, filter="t > 5"), root + "-copy")
    assert report.rows == 0
    assert [part.writer for part in report.parts] == [None]
    assert len(rlio.open_dataset(root + "-copy")) == 0
    ds = read_dataset(root, filter="t > 5", columns=["obs"])
    assert ds.count() == 0
    assert ds.schema().names == ["obs"]


@pytest.mark.further
def test_columns_without_any_value_are_left_out_with_one_warning(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As RLlib's agent_id of one agent: of a type, or of none."""
    table = pa.table({"t": np.arange(6), "agent_id": pa.array([None] * 6, pa.string()), "x": pa.nulls(6)})
    caplog.set_level(logging.WARNING, "rlio")
    report = write_dataset(ray.data.from_arrow([table, table.slice(2)]), root)
    assert report.left_out == ("agent_id", "x")
    assert report.rows == 10
    (told,) = caplog.records
    assert "agent_id" in told.getMessage()
    found = rlio.concat_samples(list(rlio.DatasetReader(root, epochs=1)))
    assert sorted(found) == ["t"]
    assert sorted(found["t"]) == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_a_column_with_values_in_some_parts_alone_is_an_error(root: str) -> None:
    empty = pa.table({"t": [0, 1], "x": pa.array([None, None], pa.float64())})
    full = pa.table({"t": [2, 3], "x": [1.0, 2.0]})
    for tables in ([empty, full], [full, empty]):
        with pytest.raises(SchemaError) as caught:
            write_dataset(ray.data.from_arrow(tables), root)
        assert caught.value.column == "x"


def test_errors_of_tasks_are_ours(root: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"^1 of 2 rows have no value") as caught:
        write_dataset(ray.data.from_items([{"a": 1}, {"a": None}], override_num_blocks=1), root)
    assert type(caught.value) is SchemaError
    assert caught.value.column == "a"
    assert "pass job=" in caught.value.__notes__[-1]
    store(numbered(3), root=root, spool=None)
    with pytest.raises(rlio.errors.SchemaConflict):
        write_dataset(ray.data.from_items([{"t": 1.5}], override_num_blocks=1), root)
    assert list_shards(Storage.open(root)).passed_over == {}
    with pytest.raises(OptionError, match="memory://"):
        write_dataset(ray.data.range(3), "memory://nowhere")


# ---- what is killed ----


def kill_once(flag: Path) -> None:
    """Kill this process as the OOM killer would; the next one that comes here lives on."""
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.further
def test_a_task_that_is_killed_while_it_writes_loses_and_repeats_nothing(root: str, tmp_path: Path) -> None:
    several("cheetah", root, writers=1)
    flag = tmp_path / "killed"

    def kills_before_the_seal(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        from rlio.distributed.ray_data.part_writer import PartWriter

        real = PartWriter._check_stored

        def check_stored(self: PartWriter, log: Any) -> None:
            real(self, log)
            kill_once(flag)

        if not flag.exists():
            PartWriter._check_stored = check_stored  # type: ignore[method-assign]
        return batch

    ds = read_dataset(root, tasks=1).map_batches(kills_before_the_seal)
    copy = str(tmp_path / "copy")
    report = write_dataset(ds, copy, roll=rlio.Roll(max_rows=500), job="killed")
    assert flag.exists()
    assert report.rows == 3000
    assert_identical(load(copy), load(root))
    attempts = sorted({Path(entry.path).parent.name for entry in Storage.open(copy).list("data")})
    assert len(attempts) == 2
    assert len(list_shards(Storage.open(copy)).passed_over[attempts[0]].shards) == 6
    assert report.parts[0].writer == attempts[1]
    assert [f.code for f in rlio.verify(copy).findings if f.code == "attempt"] == ["attempt"]
    assert rlio.verify(copy).ok
    rlio.maintenance.gc(copy, grace=0)
    assert list_shards(Storage.open(copy)).passed_over == {}
    assert_identical(load(copy), load(root))


@pytest.mark.further
def test_a_task_that_is_killed_after_it_sealed_its_part_is_not_written_again(
    root: str, tmp_path: Path
) -> None:
    several("cheetah", root, writers=1)
    flag = tmp_path / "killed"

    def kills_after_sealing(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        from rlio.distributed.ray_data.part_writer import PartWriter

        real = PartWriter.finish

        def finish(self: PartWriter) -> Any:
            sealed = real(self)
            kill_once(flag)
            return sealed

        if not flag.exists():
            PartWriter.finish = finish  # type: ignore[method-assign]
        return batch

    copy = str(tmp_path / "copy")
    report = write_dataset(read_dataset(root, tasks=1).map_batches(kills_after_sealing), copy)
    assert flag.exists()
    assert report.rows == 3000
    assert [part.written for part in report.parts] == [False]
    assert_identical(load(copy), load(root))
    assert len({Path(entry.path).parent.name for entry in Storage.open(copy).list("data")}) == 1


# ---- a job that is run again ----


def test_a_job_that_is_run_again_writes_nothing_twice(root: str, tmp_path: Path) -> None:
    several("cartpole_like", root)
    copy = str(tmp_path / "copy")
    ds = read_dataset(root, tasks=3)
    first = write_dataset(ds, copy, job="nightly")
    before = Storage.open(copy).list("data")
    again = write_dataset(ds, copy, job="nightly")
    assert [part.written for part in again.parts] == [False] * 3
    assert [part.writer for part in again.parts] == [part.writer for part in first.parts]
    assert Storage.open(copy).list("data") == before
    write_dataset(ds, copy, job="other")
    assert len(rlio.open_dataset(copy)) == 2 * first.rows


def test_a_job_that_was_interrupted_is_completed(root: str, tmp_path: Path) -> None:
    several("cartpole_like", root)
    copy = str(tmp_path / "copy")
    ds = read_dataset(root, tasks=3)
    first = write_dataset(ds, copy, job="nightly")
    storage = Storage.open(copy)
    for entry in storage.list("data"):  # As if its driver had died before the second task was done.
        if part_of(entry.path.split("/")[1]) == "xnightly-000001":
            storage.remove(entry.path)
    again = write_dataset(ds, copy, job="nightly")
    assert [part.written for part in again.parts] == [False, True, False]
    assert again.rows == first.rows
    assert_identical(load(copy), load(root))


def test_a_job_with_other_rows_is_refused(root: str, tmp_path: Path) -> None:
    several("cheetah", root, writers=1)
    copy = str(tmp_path / "copy")
    write_dataset(read_dataset(root, tasks=2), copy, job="nightly")
    before = Storage.open(copy).list("data")
    with pytest.raises(OptionError, match=r"differ from the new ones in .*obs"):
        write_dataset(read_dataset(root, tasks=2, filter="t > 0"), copy, job="nightly")
    with pytest.raises(OptionError, match=r"differ|does not have"):
        write_dataset(read_dataset(root, tasks=1), copy, job="nightly")
    assert Storage.open(copy).list("data") == before


def test_a_job_with_fewer_parts_than_before_is_refused(root: str) -> None:
    write_dataset(ray.data.range(30, override_num_blocks=3), root, job="nightly")
    with pytest.raises(OptionError, match="1 parts that this one does not have"):
        write_dataset(ray.data.range(20, override_num_blocks=2), root, job="nightly")
    assert len(rlio.open_dataset(root)) == 30


# ---- ranks ----


def ranked(data: Any, rank: int) -> rlio.DatasetReader:
    return rlio.DatasetReader(data, shard=(rank, 2), batch_size=64, epochs=1, shuffle=True, seed=7)


@ray.remote
def read_rank(data: Any, rank: int) -> list[int]:
    """As a worker of a training does."""
    return [int(t) for batch in ranked(data, rank) for t in batch["t"]]


def test_each_rank_reads_its_part_and_together_all(root: str) -> None:
    store(numbered(1000), root=root, spool=None)
    data = rlio.open_dataset(root)
    store(numbered(10, first=5000), root=root, writer_id="zz", spool=None)  # Came later: nobody reads it.
    found = ray.get([read_rank.remote(data, rank) for rank in range(2)])
    assert sorted(found[0] + found[1]) == list(range(1000))
    assert abs(len(found[0]) - len(found[1])) <= 1
    assert found[0] != sorted(found[0])
    local = [[int(t) for batch in ranked(data, rank) for t in batch["t"]] for rank in range(2)]
    assert local == found


@pytest.mark.further
def test_streaming_split_shares_rows_out_too(root: str) -> None:
    store(numbered(1000), root=root, roll=rlio.Roll(max_rows=100), spool=None)
    parts = read_dataset(root, tasks=2).streaming_split(2, equal=True)

    def consume(part: Any) -> list[int]:
        return [int(t) for batch in part.iter_batches(batch_size=64) for t in batch["t"]]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(consume, parts))
    assert sorted(found[0] + found[1]) == list(range(1000))
