"""Large files of other libraries on remote stores: ranges ahead, and the rows of the file."""

from __future__ import annotations

import gc
import io
import itertools
import json
import random
import threading
import time
import traceback
import tracemalloc
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import h5py
import kinds
import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import test_known_kinds
from far_layouts import LAYOUTS, OF_HDF5, put, rows_of
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from further import further
from test_requests import (
    ALL_STEPS,
    FILES,
    KINDS,
    ROWS,
    Watch,
    faults,
    file_of,
    files_of,
    no_fault,
    opened_files,
    options,
    read_steps,
    request_threads,
    requests_of_threads,
    wait_until,
)

import rlio
from rlio import ReplayStore
from rlio.batch.nested import leaves
from rlio.errors import EndOfData, StoreError, StoreTimeout, UnsafeData
from rlio.formats.files.hdf5_files import Hdf5Files
from rlio.formats.format import Look, recognise
from rlio.formats.tables.mapped_episodes import MappedEpisodes
from rlio.formats.tables.mapping import MappedSource
from rlio.formats.tables.table import Pieces, Rows, Table
from rlio.source.files import GroupFiles
from rlio.storage import InputFile, InputFiles, expand_inputs, open_input
from rlio.storage.clients import Clients
from rlio.storage.far_file import FarFile, far_file, joined, pieces
from rlio.storage.filesystem import Retry
from rlio.storage.input_files import _by_file
from rlio.storage.parallel import REQUESTS, Plan, busy_plans
from rlio.testing import FaultyFileSystem
from rlio.testing.filesystem import Call, Fault


class FaultyRanges(FaultyFileSystem):
    """Its files request ranges, as those of object stores do."""

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return AbstractBufferedFile(self, path, mode)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some kilobytes are large, and a piece has some hundred bytes."""
    fsspec.register_implementation("faulty", FaultyRanges, clobber=True)
    monkeypatch.setattr(Retry, "wait", lambda self, attempt, path: None)
    monkeypatch.setattr("rlio.storage.input_files._WHOLE_BYTES", 100)
    monkeypatch.setattr("rlio.storage.far_file._PIECE", 1024)
    monkeypatch.setattr("rlio.storage.far_file.GAP", 64)
    monkeypatch.setattr("rlio.storage.input_files.GAP", 64)
    monkeypatch.setattr("rlio.storage.far_file._RUN_BYTES", 4096)
    monkeypatch.setattr("rlio.storage.far_file._KEPT_BYTES", 8192)
    monkeypatch.setattr("rlio.storage.inputs._BUFFER_BYTES", 2048)


def stored(size: int) -> tuple[str, bytes]:
    path, data = f"/{uuid.uuid4().hex}/data/f.bin", np.random.default_rng(size).bytes(size)
    MemoryFileSystem().pipe_file(path, data)
    return path, data


def opened(path: str, choose: Callable[[Call], Fault | None] = no_fault, *, scans: bool = False) -> FarFile:
    found = far_file(FaultyRanges(**options(choose)), path, scans=scans)
    assert isinstance(found, FarFile)
    return found


def state(file: FarFile, spans: list[tuple[int, int]]) -> Plan:
    """A plan of what is read next, as that of `InputFiles`; the file takes from it while it is held."""
    plan = Plan()
    file.requests.state(plan)
    ranges = (pieces(file.requests, file.size, *span, file.kept) for span in spans)
    plan.expect(itertools.chain.from_iterable(ranges))
    return plan


@pytest.mark.parametrize("scans", [True, *further(False)])
@pytest.mark.parametrize(
    "seeds",
    [range(12), *further(range(12, 240)), pytest.param(range(240, 1000), marks=pytest.mark.soak)],
)
def test_reads_anywhere_give_the_bytes_of_the_file(seeds: range, scans: bool) -> None:
    path, data = stored(20_011)
    for seed in seeds:
        draw = random.Random(seed)
        with opened(path, faults(seed), scans=scans) as file:
            at, plan = 0, state(file, [])
            for _ in range(100):
                if draw.random() < 0.1:  # True or not.
                    spans = [sorted(draw.choices(range(-10, 21_000), k=2)) for _ in range(draw.randrange(5))]
                    plan = state(file, [(start, stop) for start, stop in spans])
                if draw.random() < 0.5:
                    at = file.seek(draw.choice((draw.randrange(21_000), max(0, at - draw.randrange(500)))))
                size = draw.choice((1, 64, 500, 5000))
                try:
                    found = file.read(size)
                except OSError:
                    assert file.tell() == at
                    continue
                assert found == data[at : at + len(found)]
                assert found or at >= len(data)
                at += len(found)
            plan.forget()


def test_a_scan_requests_every_byte_once_and_side_by_side() -> None:
    path, data = stored(40_000)
    watch = Watch()
    asked: list[Call] = []

    def choose(call: Call) -> Fault | None:
        asked.append(call)
        return watch(call)

    with opened(path, choose, scans=True) as file:
        assert b"".join(iter(lambda: file.read(512), b"")) == data
    assert 8 < watch.most <= REQUESTS + 1  # One that has not begun is made by the reader itself.
    assert sum(call.operation == "cat_file" for call in asked) == -(-len(data) // 1024)


def test_a_file_requests_stated_ranges_side_by_side_and_nothing_else() -> None:
    path, data = stored(40_000)
    watch = Watch()
    spans = [(number, number + 1500) for number in range(0, 40_000, 4000)]
    with opened(path, watch) as file:
        plan = state(file, [*spans, (-5, 10), (39_000, 50_000), (7, 7)])
        # Not in their order: readers of columns take turns.
        for start, stop in (*spans[5:], *spans[:5]):
            assert whole(file, start, stop - start) == data[start:stop]
        assert watch.most > 8
        assert watch.seen[path] == sum(-(-stop // 1024) - start // 1024 for start, stop in spans)
        plan.forget()


def test_closed_files_drop_stated_ranges_that_were_not_read() -> None:
    path, _ = stored(2_000_000)
    wait_until(lambda: not request_threads())
    gc.collect()
    before = len(busy_plans)
    files = InputFiles(expand_inputs(f"faulty://{path}", storage_options=options(no_fault)))
    with files.open(0) as file:
        files.expect([(0, 0, 2_000_000)])
        assert file.read(10)
        assert len(busy_plans) == before + 1
        files.close()
        wait_until(lambda: not request_threads())
        assert len(busy_plans) == before


def whole(file: FarFile, at: int, size: int) -> bytes:
    """Bytes from a place on, of several pieces."""
    file.seek(at)
    found = b""
    while len(found) < size and (piece := file.read(size - len(found))):
        found += piece
    return found


def requested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which the bytes of each request will be added."""
    sizes: list[int] = []
    own = AbstractBufferedFile._fetch_range

    def fetch(self: Any, start: int, end: int) -> bytes:
        sizes.append(end - start)
        return own(self, start, end)

    monkeypatch.setattr(AbstractBufferedFile, "_fetch_range", fetch)
    return sizes


def test_reads_far_from_each_other_request_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = stored(200_000)
    sizes = requested(monkeypatch)
    with opened(path) as file:
        for at in range(0, 200_000, 10_000):
            assert whole(file, at, 100) == data[at : at + 100]
    assert sizes == [100] * 20


def test_places_that_are_read_in_turn_are_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.far_file._RUN_BYTES", 32_768)
    path, data = stored(320_000)
    sizes = requested(monkeypatch)
    with opened(path) as file:
        for at in range(0, 32_000, 100):
            for begin in range(0, 320_000, 40_000):
                assert whole(file, begin + at, 100) == data[begin + at : begin + at + 100]
    assert sum(sizes) <= 1.3 * 8 * 32_000
    assert len(sizes) < 8 * 32_000 / 500


def test_a_file_that_was_read_requests_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = stored(6000)
    with opened(path, scans=True) as file:
        assert file.readall() == data
        sizes = requested(monkeypatch)
        for at in range(0, 5900, 100):
            assert whole(file, at, 100) == data[at : at + 100]
    assert not sizes


def test_stated_bytes_that_are_here_are_not_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = stored(4000)
    with opened(path, scans=True) as file:
        assert file.readall() == data
        sizes = requested(monkeypatch)
        plan = state(file, [(100, 200), (900, 1100), (3000, 4000)])
        assert whole(file, 3000, 1000) == data[3000:]
        wait_until(lambda: not request_threads())
        del plan
    assert not sizes


def test_a_file_keeps_no_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = stored(60_000)
    files = [opened(path, scans=True) for _ in range(3)]
    for file in files:
        assert file.readall() == data
        # It is alone until the next one is read.
        held = {id(piece): len(piece) for piece in file._kept.values()}
        held |= {id(run.data): len(run.data) for run in file._runs}
        assert sum(held.values()) <= 8192 // 3 + 4096
    for file in files:
        file.close()


def test_a_seek_elsewhere_keeps_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = stored(100_000)
    with opened(path) as file:
        for at in range(0, 100_000, 1000):
            file.seek(at)
            file.read(10)
        assert len(file._runs) <= 16


def test_a_request_without_an_answer_fails_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.far_file.TIMEOUT", 0.1)
    path, data = stored(20_000)
    hold, numbers = threading.Event(), iter(range(10_000))

    def choose(call: Call) -> Fault | None:
        if call.operation == "cat_file" and next(numbers) == 3:
            hold.wait(60)
        return None

    fs = FaultyRanges(**options(choose))
    try:
        with open_input(InputFile(fs, path, path, len(data)), scans=True) as stream:
            found = b""
            with pytest.raises(StoreTimeout):  # noqa: PT012
                while piece := stream.read(512):
                    found += piece
            stream.seek(len(found))
            assert found + stream.read() == data
    finally:
        hold.set()


def test_a_file_that_became_shorter_is_an_error() -> None:
    path, data = stored(20_000)
    fs = FaultyRanges(**options(no_fault))
    with open_input(InputFile(fs, path, path, len(data))) as stream:
        assert stream.read(100) == data[:100]
        MemoryFileSystem().pipe_file(path, data[:5000])
        stream.seek(10_000)
        with pytest.raises(StoreError, match="replaced"):
            stream.read(100)


def test_files_of_one_connection_are_read_by_the_filesystem() -> None:
    path, _ = stored(20_000)

    class Connecting(FaultyRanges):
        protocol = "sftp"

    found = far_file(Connecting(**options(no_fault)), path)
    assert type(found) is AbstractBufferedFile
    memory = MemoryFileSystem()
    assert not isinstance(far_file(memory, path), FarFile)
    assert Clients(memory, timeout=None).at_once == 1


@pytest.mark.further
@pytest.mark.parametrize("closes", [True, False])
def test_a_file_that_is_left_in_the_middle_keeps_no_thread_and_no_plan(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.storage.far_file._PIECE", 1 << 18)
    path, data = stored(8_000_000)

    def begin() -> FarFile | None:
        file = opened(path, scans=True)
        with requests_of_threads() as requests:
            assert file.read(1024) == data[:1024]
        assert requests
        if not closes:
            return None
        file.close()
        return file

    begin()
    wait_until(lambda: not request_threads())
    gc.collect()
    others = set(busy_plans)
    tracemalloc.start()
    try:
        at_first = tracemalloc.get_traced_memory()[0]
        kept = begin()
        wait_until(lambda: not request_threads())
        gc.collect()
        assert set(busy_plans) <= others
        assert tracemalloc.get_traced_memory()[0] - at_first < 1 << 18
        del kept
    finally:
        tracemalloc.stop()


def few(choose: Callable[[Call], Fault | None]) -> Callable[[Call], Fault | None]:
    """The first six faults. A call fails if one of its many requests does, and makes all of them again."""
    seen: list[Fault] = []

    def chosen(call: Call) -> Fault | None:
        fault = choose(call) if len(seen) < 6 else None
        if fault not in (None, "slow"):
            seen.append(fault)
        return fault

    return chosen


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "seeds", [range(1), *further(range(1, 5)), pytest.param(range(5, 12), marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "csv", *further(*sorted({*KINDS} - {"parquet", "csv"}))])
@pytest.mark.each_value_once
def test_large_files_whose_requests_fail_or_are_late_give_the_same_rows(
    kind: str, shuffle: bool, seeds: range
) -> None:
    path = files_of(kind, width=1 if kind == "csv" else 60)
    how: dict[str, Any] = {"shuffle": shuffle, "seed": 3, "cache": "none", "epochs": 2, "batch_size": 5}
    with rlio.read(f"memory:///{path}/data", **how) as reader:
        expected = read_steps(reader)
    assert sorted(expected) == sorted(ALL_STEPS)
    for seed in seeds:
        # Opening reads the files, and raises; so faults begin later.
        switch: list[Callable[[Call], Fault | None]] = [no_fault]
        given = options(lambda call: switch[-1](call))  # noqa: B023
        with rlio.read(f"faulty:///{path}/data", storage_options=given, **how) as reader:
            switch.append(few(faults(seed, (0.02,))))
            assert read_steps(reader) == expected


@pytest.mark.further
@pytest.mark.parametrize("kind", ["csv", *further("json", "feather")])
def test_opening_a_file_of_lines_or_batches_requests_side_by_side(kind: str) -> None:
    path, watch = uuid.uuid4().hex, Watch()
    MemoryFileSystem().pipe_file(f"/{path}/data/f.{kind}", large(kind))
    with opened_files(path, options(watch)) as reader:
        assert 4 < watch.most <= REQUESTS + 1
        assert sum(1 for _ in reader) > 0


@pytest.mark.further
def test_reading_does_not_fetch_again_the_bytes_that_opening_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.far_file._KEPT_BYTES", 1 << 20)
    path, size = uuid.uuid4().hex, 0
    for number in range(3):
        size += len(data := large("csv", first=3000 * number))
        MemoryFileSystem().pipe_file(f"/{path}/data/f-{number}.csv", data)
    sizes = requested(monkeypatch)
    with opened_files(path, options(no_fault)) as reader:
        assert sum(1 for _ in reader) > 0
    assert sum(sizes) == size


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_of_a_file_are_fetched_once(shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.far_file._KEPT_BYTES", 8 << 20)
    path, size = uuid.uuid4().hex, 0
    for number in range(3):
        size += len(data := file_of("npz", number, 10_000))
        MemoryFileSystem().pipe_file(f"/{path}/data/f-{number}.npz", data)
    sizes = requested(monkeypatch)
    how: dict[str, Any] = {"shuffle": shuffle, "cache": "none", "epochs": 1, "batch_size": 5}
    with rlio.read(f"faulty:///{path}/data", storage_options=options(no_fault), **how) as reader:
        assert sum(map(len, reader)) == 3 * 7
    assert sum(sizes) <= 1.1 * size


def large(kind: str, *, first: int = 0) -> bytes:
    """A file of one episode after the other; ``first``: of CSV, the number of the first."""
    if kind == "json":
        return b"".join(file_of(kind, number, 300) for number in range(8))
    if kind == "feather":
        return file_of(kind, 0, 4000)
    lines = file_of(kind, 0, 1).splitlines(keepends=True)
    rows = [lines[1].replace(b"0,", f"{number},".encode(), 1) for number in range(first, first + 3000)]
    return b"".join([lines[0], *rows])


@pytest.fixture
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece has several row groups of `rows_in_groups`, and a window half of them."""
    monkeypatch.setattr("rlio.storage.far_file._PIECE", 1 << 14)
    monkeypatch.setattr("rlio.storage.far_file._RUN_BYTES", 1 << 17)
    monkeypatch.setattr("rlio.storage.far_file._KEPT_BYTES", 1 << 18)
    monkeypatch.setattr("rlio.source.files._WINDOW_ROWS", 1000)


def rows_in_groups(groups: int, *, width: int) -> bytes:
    """A Parquet file of an episode in row groups of 50 rows."""
    rows, stream = 50 * groups, io.BytesIO()
    obs = np.random.default_rng(0).random((rows, width))
    t = np.arange(rows)
    columns = {"eps_id": t * 0, "t": t, "obs": obs.tolist(), "rewards": t * 1.0, "terminateds": t == rows - 1}
    pq.write_table(pa.table(columns), stream, row_group_size=50, compression="none")
    return stream.getvalue()


@pytest.mark.few(1)
@pytest.mark.usefixtures("_wide")
@pytest.mark.parametrize("shuffle", [False, True])
def test_row_groups_of_a_large_file_are_requested_side_by_side_and_once(
    shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # Open files share what is kept.
    path, watch, data = uuid.uuid4().hex, Watch(), rows_in_groups(40, width=30)
    MemoryFileSystem().pipe_file(f"/{path}/data/f.parquet", data)
    how: dict[str, Any] = {"shuffle": shuffle, "seed": 3, "cache": "none", "epochs": 1, "batch_size": 64}
    with rlio.read(f"faulty:///{path}/data", storage_options=options(watch), **how) as reader:
        watch.most, sizes = 0, requested(monkeypatch)
        rows = [t for batch in reader for t in batch["t"].tolist()]
    assert sorted(rows) == list(range(2000))
    assert (rows != sorted(rows)) == shuffle
    assert 8 < watch.most <= REQUESTS + 1
    assert sum(sizes) <= len(data)


@pytest.mark.usefixtures("_wide")
def test_an_export_requests_row_groups_of_a_large_file_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # Open files share what is kept.
    path, watch, data = uuid.uuid4().hex, Watch(), rows_in_groups(40, width=30)
    MemoryFileSystem().pipe_file(f"/{path}/data/f.parquet", data)
    dataset = rlio.open_dataset(f"faulty:///{path}/data", storage_options=options(watch))
    stream = dataset.to_arrow_batches()
    watch.most, sizes = 0, requested(monkeypatch)
    assert stream.read_all()["t"].to_pylist() == list(range(2000))
    assert 8 < watch.most <= REQUESTS + 1
    assert sum(sizes) <= len(data)


@pytest.mark.usefixtures("_wide")
@pytest.mark.parametrize("shuffle", [False, True])
def test_records_of_a_large_file_of_lines_are_requested_side_by_side(
    shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.source.files._WINDOW_ROWS", FILES // 2 * ROWS)
    gc.collect()  # Open files share what is kept.
    path, watch = uuid.uuid4().hex, Watch()
    data = b"".join(file_of("json", number, 60) for number in range(FILES))
    MemoryFileSystem().pipe_file(f"/{path}/data/f.json", data)
    how: dict[str, Any] = {"shuffle": shuffle, "seed": 3, "cache": "none", "epochs": 1, "batch_size": 5}
    with rlio.read(f"faulty:///{path}/data", storage_options=options(watch), **how) as reader:
        watch.most, sizes = 0, requested(monkeypatch)
        assert sorted(read_steps(reader)) == ALL_STEPS[: FILES * ROWS]
    assert 4 < watch.most <= REQUESTS + 1
    assert sum(sizes) <= 1.1 * len(data)


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_large_file_that_was_damaged_since_it_was_opened_is_lost_alone(shuffle: bool) -> None:
    path = files_of("parquet", width=60)
    how: dict[str, Any] = {"shuffle": shuffle, "cache": "none", "epochs": 1, "batch_size": 5}
    given = options(no_fault)
    with rlio.read(f"faulty:///{path}/data", on_error="skip", storage_options=given, **how) as reader:
        MemoryFileSystem().pipe_file(f"/{path}/data/f-5.parquet", b"?" * 5000)
        assert sorted(read_steps(reader)) == [
            (number, t) for number, t in ALL_STEPS[: FILES * ROWS] if number != 5
        ]
        assert reader.skipped == 1  # A row group.


@pytest.mark.usefixtures("_wide")
def test_a_large_file_requests_only_the_columns_that_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, watch, data = uuid.uuid4().hex, Watch(), rows_in_groups(40, width=300)
    MemoryFileSystem().pipe_file(f"/{path}/data/f.parquet", data)
    how: dict[str, Any] = {"shuffle": True, "cache": "none", "epochs": 1, "columns": ["t", "rewards"]}
    with rlio.read(f"faulty:///{path}/data", storage_options=options(watch), batch_size=64, **how) as reader:
        watch.most, sizes = 0, requested(monkeypatch)
        assert sum(map(len, reader)) == 2000
    assert watch.most > 8
    assert sum(sizes) < len(data) / 20


@pytest.mark.usefixtures("_wide")
def test_row_groups_that_a_filter_leaves_out_are_not_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = uuid.uuid4().hex, rows_in_groups(40, width=300)
    MemoryFileSystem().pipe_file(f"/{path}/data/f.parquet", data)
    how: dict[str, Any] = {"shuffle": False, "cache": "none", "epochs": 1, "filter": "t >= 500 and t < 600"}
    given = options(no_fault)
    with rlio.read(f"faulty:///{path}/data", storage_options=given, batch_size=64, **how) as reader:
        sizes = requested(monkeypatch)
        assert sum(map(len, reader)) == 100
    assert sum(sizes) < len(data) / 10


def test_a_reader_that_holds_a_lock_waits_for_no_thread_of_the_pool() -> None:
    path, data = stored(20_000)
    wait_until(lambda: not request_threads())
    was = gc.isenabled()
    enabled: list[bool] = []

    def choose(call: Call) -> Fault | None:
        if call.operation == "cat_file":
            enabled.append(gc.isenabled() or threading.current_thread() is not threading.main_thread())
        return None

    with far_file(FaultyRanges(**options(choose)), path, locks=True) as file:
        assert file.readall() == data
    assert enabled
    assert not any(enabled)
    assert gc.isenabled() == was
    assert not request_threads()


def test_files_listed_without_a_size_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = stored(5000)
    (file,) = expand_inputs(f"faulty://{path}", storage_options=options(no_fault))
    with open_input(file._replace(size=None)) as stream:
        assert stream.read() == data


def test_h5py_opens_no_file_whose_requests_wait_for_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that waits for another thread while h5py holds its lock never ends."""
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["observations"], file["actions"] = np.ones((60, 3), np.float32), np.ones((60, 1), np.float32)
        file["rewards"], file["timeouts"] = np.ones(60, np.float32), np.arange(60) % 20 == 19
        file["terminals"] = np.zeros(60, bool)
    path = f"/{uuid.uuid4().hex}/a.hdf5"
    MemoryFileSystem().pipe_file(path, (tmp_path / "a.hdf5").read_bytes())
    reads: list[tuple[bool, bool]] = []  # Of each: whether h5py asked for it, and whether it needs a thread.
    whole = FarFile.read

    def read(self: FarFile, size: int = -1) -> bytes:
        callers = {
            frame.name for frame in traceback.extract_stack() if frame.filename.endswith("hdf5_files.py")
        }
        recognises = any(frame.name == "_paths_of_hdf5" for frame in traceback.extract_stack())
        reads.append((bool(callers) or recognises, not self._locks))
        return whole(self, size)

    monkeypatch.setattr(FarFile, "read", read)
    with rlio.read(f"faulty://{path}", epochs=1, storage_options=options(no_fault)) as reader:
        assert sum(len(batch) for batch in reader) == 60
    of_h5py = [in_threads for is_h5py, in_threads in reads if is_h5py]
    assert of_h5py
    assert not any(of_h5py)


@pytest.fixture
def _several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has fifteen pieces, a window the rows of one and a half files, and hardly anything is kept."""
    monkeypatch.setattr("rlio.storage.far_file._PIECE", 1 << 14)
    monkeypatch.setattr("rlio.storage.far_file._RUN_BYTES", 1 << 17)
    monkeypatch.setattr("rlio.storage.far_file._KEPT_BYTES", 1 << 14)
    monkeypatch.setattr("rlio.storage.input_files._HELD_BYTES", 1 << 17)
    monkeypatch.setattr("rlio.storage.input_files._SORTED_BYTES", 1 << 15)
    monkeypatch.setattr("rlio.storage.far_file._WINDOW_BYTES", 1 << 17)
    monkeypatch.setattr("rlio.source.files._WINDOW_ROWS", 1500)
    monkeypatch.setattr("rlio.source.episodes._GROUP_ROWS", 250)
    monkeypatch.setattr("rlio.formats.tables.table.KEPT_BYTES", 1 << 18)
    monkeypatch.setattr("rlio.formats.tables.npz.KEPT_BYTES", 1 << 19)
    monkeypatch.setattr("rlio.formats.tables.text_table._BLOCK_BYTES", 1 << 14)


def long_file(kind: str, number: int, *, rows: int = 1000, width: int = 30) -> bytes:
    """Two episodes, in pieces of 50 rows where files have such."""
    t, stream = np.arange(rows) % (rows // 2), io.BytesIO()
    columns = {
        "eps_id": np.repeat([2 * number, 2 * number + 1], rows // 2),
        "t": t,
        "obs": np.random.default_rng(number).random((rows, width)),
        "rewards": t * 1.0,
        "terminateds": t == rows // 2 - 1,
    }
    listed = pa.table({name: values.tolist() for name, values in columns.items()})
    if kind == "parquet":
        pq.write_table(listed, stream, row_group_size=50, compression="none")
    elif kind == "feather":
        feather.write_feather(listed, stream, compression="uncompressed", chunksize=50)
    elif kind == "npz":
        np.savez(stream, **columns)
    elif kind == "hdf5":
        with h5py.File(stream, "w") as file:
            file.update(columns)
    elif kind == "chunked":
        with h5py.File(stream, "w") as file:
            for name, values in columns.items():
                file.create_dataset(name, data=values, chunks=(50, *values.shape[1:]))
    elif kind == "csv":
        flat = {f"obs_{part}": columns["obs"][:, part] for part in range(width)}
        csv.write_csv(pa.table({**{k: v for k, v in columns.items() if k != "obs"}, **flat}), stream)
    elif kind == "jsonl":
        for row in listed.to_pylist():
            stream.write(json.dumps(row).encode() + b"\n")
    else:
        for start in range(0, rows, 50):
            record = {name: values[start : start + 50].tolist() for name, values in columns.items()}
            stream.write(json.dumps({"type": "SampleBatch", **record}).encode() + b"\n")
    return stream.getvalue()


class Crowd:
    """Notes how many requests for ranges were under way at once, and of how many files.

    Until nine were, each waits a while for others, which begin late on a busy machine.
    """

    def __init__(self) -> None:
        self._joined, self._now = threading.Condition(), list[str]()
        self.most = self.files = 0

    def __call__(self, call: Call) -> Fault | None:
        if call.operation == "cat_file":
            with self._joined:
                self._now.append(call.path)
                self.most = max(self.most, len(self._now))
                self.files = max(self.files, len({*self._now}))
                self._joined.notify_all()
                self._joined.wait_for(lambda: self.most > 8, timeout=0.05)
            time.sleep(0.01)
            with self._joined:
                self._now.remove(call.path)
        return None


LONG = ["parquet", "feather", "npz", "chunked", *further("hdf5", "csv", "jsonl", "json")]


def long_files(kind: str, count: int = 4, **more: int) -> tuple[str, int]:
    """A folder in memory, and the bytes of its files."""
    path, size, ending = uuid.uuid4().hex, 0, {"chunked": "hdf5"}.get(kind, kind)
    for number in range(count):
        data = long_file(kind, number, **more)
        MemoryFileSystem().pipe_file(f"/{path}/data/f-{number}.{ending}", data)
        size += len(data)
    return path, size


def read_long(kind: str, path: str, **how: Any) -> Any:
    """A reader of `long_files`."""
    if kind in ("csv", "jsonl"):
        obs: Any = [f"obs_{part}" for part in range(30)] if kind == "csv" else "obs"
        columns = {"obs": obs, "rewards": "rewards"}
        how["mapping"] = rlio.Mapping(columns, episode="eps_id", terminated="terminateds")
    elif kind in ("feather", "npz", "hdf5", "chunked"):
        how["mapping"] = rlio.Mapping(
            {"obs": "obs", "rewards": "rewards"}, episode="eps_id", terminated="terminateds"
        )
    return rlio.read(path, **{"cache": "none", "epochs": 1, "batch_size": 64, "seed": 3, **how})


@pytest.mark.few(1)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", LONG)
@pytest.mark.each_value_once
def test_windows_of_several_large_files_are_requested_side_by_side_and_once(
    kind: str, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, size = long_files(kind)
    with read_long(kind, f"memory:///{path}/data", shuffle=shuffle) as reader:
        expected = [(batch["obs"].tobytes(), batch["t"].tobytes()) for batch in reader]
    gc.collect()  # Open files share what is kept.
    crowd = Crowd()
    given = options(crowd)
    with read_long(kind, f"faulty:///{path}/data", shuffle=shuffle, storage_options=given) as reader:
        crowd.most = crowd.files = 0
        sizes = requested(monkeypatch)
        found = [(batch["obs"].tobytes(), batch["t"].tobytes()) for batch in reader]
    assert found == expected
    assert 4 < crowd.most <= REQUESTS + 1
    assert sum(sizes) <= 1.15 * size
    # HDF5 is not opened ahead, because that waits under h5py's lock.
    assert crowd.files > 1 or kind in ("hdf5", "chunked")


@pytest.mark.few(1)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("kind", ["parquet", "npz", "feather"])
def test_the_next_window_in_another_file_is_requested_ahead(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.source.files._WINDOW_ROWS", 1000)  # A file.
    monkeypatch.setattr("rlio.source.episodes._GROUP_ROWS", 1000)
    monkeypatch.setattr("rlio.formats.tables.npz.KEPT_BYTES", 0)
    path, _ = long_files(kind)
    gc.collect()
    crowd = Crowd()
    with read_long(kind, f"faulty:///{path}/data", shuffle=True, storage_options=options(crowd)) as reader:
        crowd.files = 0
        for _ in range(2000 // 64):  # The first file may be known from opening.
            assert len(reader.sample()) == 64
        assert crowd.files > 1


@pytest.mark.usefixtures("_several")
def test_the_last_epoch_requests_nothing_of_a_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    path, size = long_files("npz")
    monkeypatch.setattr("rlio.formats.tables.npz.KEPT_BYTES", 0)
    monkeypatch.setattr("rlio.source.files._WINDOW_ROWS", 1000)
    monkeypatch.setattr("rlio.source.episodes._GROUP_ROWS", 1000)
    gc.collect()
    given = options(no_fault)
    with read_long("npz", f"faulty:///{path}/data", shuffle=True, epochs=2, storage_options=given) as reader:
        sizes = requested(monkeypatch)
        assert sum(map(len, reader)) == 8000
        wait_until(lambda: not request_threads())
    assert sum(sizes) <= 2.1 * size


@pytest.mark.further
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("kind", ["parquet", *further("npz", "feather")])
def test_every_epoch_in_order_is_requested_side_by_side(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.formats.tables.npz.KEPT_BYTES", 0)
    path, _ = long_files(kind)
    gc.collect()
    crowd = Crowd()
    given = options(crowd)
    with read_long(kind, f"faulty:///{path}/data", shuffle=False, epochs=2, storage_options=given) as reader:
        for _ in range(57):  # Almost the first epoch, of which the last group is read already.
            reader.sample()
        wait_until(lambda: not request_threads())
        crowd.most = crowd.files = 0
        assert sum(map(len, reader)) == 8000 - 57 * 64
        assert crowd.most > 8
        assert crowd.files > 1


@pytest.mark.few(1)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("kind", ["feather", "parquet"])
def test_a_reader_that_goes_on_in_a_file_requests_nothing_before_its_place(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, size = long_files(kind, count=1)
    with read_long(kind, f"memory:///{path}/data", shuffle=False) as reader:
        for _ in range(12):
            reader.sample()
        state = reader.state_dict()
    gc.collect()
    given = options(no_fault)
    with read_long(kind, f"faulty:///{path}/data", shuffle=False, storage_options=given) as reader:
        reader.load_state_dict(state)
        sizes = requested(monkeypatch)
        assert sum(map(len, reader)) == 1000 - 12 * 64
    assert sum(sizes) <= 0.4 * size


@pytest.mark.few(1)
@pytest.mark.skipif(
    int(pa.__version__.partition(".")[0]) < 19, reason="pyarrow before 19 reads columns whole"
)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("shuffle", [True, False])
def test_row_groups_that_are_read_in_parts_are_requested_side_by_side(
    shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.formats.files.parquet_footer._LARGE_GROUP", 1000)
    monkeypatch.setattr("rlio.formats.files.parquet_footer._BUFFER", 1 << 15)
    monkeypatch.setattr("rlio.formats.tables.parquet_source._GROUP_BYTES", 1 << 16)
    path, stream = uuid.uuid4().hex, io.BytesIO()
    t = np.arange(4000)
    wide = {f"x{part}": np.random.default_rng(part).random(4000) for part in range(6)}
    columns = {"eps_id": t * 0, "t": t, "rewards": t * 1.0, "terminateds": t == 3999, **wide}
    table = pa.table({"obs": np.random.default_rng(9).random((4000, 8)).tolist(), **columns})
    pages = {"data_page_size": 2048, "write_batch_size": 50, "use_dictionary": False}
    pq.write_table(table, stream, row_group_size=4000, compression="none", **pages)
    MemoryFileSystem().pipe_file(f"/{path}/data/f.parquet", stream.getvalue())
    monkeypatch.setattr("rlio.source.files._WINDOW_ROWS", 4000)
    gc.collect()
    crowd = Crowd()
    given = options(crowd)
    with read_long("parquet", f"faulty:///{path}/data", shuffle=shuffle, storage_options=given) as reader:
        crowd.most, sizes = 0, requested(monkeypatch)
        assert sorted(one for batch in reader for one in batch["t"].tolist()) == t.tolist()
    assert crowd.most > 8
    assert sum(sizes) <= 1.2 * len(stream.getvalue())


@pytest.mark.usefixtures("_several")
def test_windows_that_take_turns_among_files_of_arrays_fetch_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlio.formats.tables.npz.KEPT_BYTES", 1 << 22)
    monkeypatch.setattr("rlio.source.files._WINDOW_ROWS", 500)  # Half a file.
    path, size = long_files("npz", count=6)
    gc.collect()
    given = options(no_fault)
    with read_long("npz", f"faulty:///{path}/data", shuffle=True, storage_options=given) as reader:
        sizes = requested(monkeypatch)
        assert sum(map(len, reader)) == 6000
    assert sum(sizes) <= 1.1 * size


@pytest.mark.few(1)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("kind", ["hdf5", "chunked"])
def test_h5py_reads_only_while_no_request_is_under_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread with a request may collect garbage, and wait for h5py's lock."""
    path, _ = long_files(kind)
    gc.collect()
    now: list[int] = []
    under_way: list[int] = []
    lock = threading.Lock()

    def choose(call: Call) -> Fault | None:
        with lock:
            now.append(1)
        time.sleep(0.01)
        with lock:
            now.pop()
        return None

    own = Hdf5Files.read

    def read(self: Hdf5Files, *args: Any) -> Any:
        under_way.append(len(now))
        return own(self, *args)

    with read_long(kind, f"faulty:///{path}/data", shuffle=True, storage_options=options(choose)) as reader:
        monkeypatch.setattr(Hdf5Files, "read", read)
        assert sum(map(len, reader)) == 4000
    assert len(under_way) > 40
    assert not any(under_way)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", LONG)
@pytest.mark.usefixtures("_several")
def test_a_local_disk_is_told_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, spans: Any) -> None:
        raise AssertionError("a local file takes no round trip")

    monkeypatch.setattr(InputFiles, "expect", refuse)
    monkeypatch.setattr(InputFiles, "hold", refuse)
    monkeypatch.setattr(GroupFiles, "_spans_of", refuse)
    ending = {"chunked": "hdf5"}.get(kind, kind)
    (tmp_path / f"f.{ending}").write_bytes(long_file(kind, 0))
    wait_until(lambda: not request_threads())
    with read_long(kind, str(tmp_path), shuffle=True) as reader:
        assert sum(map(len, reader)) == 1000
    assert not request_threads()


def test_stated_bytes_that_follow_each_other_are_whole_pieces() -> None:
    spans = [
        (0, 0, 0),
        (0, 300, 1500),
        (0, 1500, 1600),
        (0, 1500, 1600),
        (0, 1600, 3100),
        (1, 5, 9),
        (1, 9, 12),
    ]
    assert [*joined(spans)] == [(0, 0, 0), (0, 300, 1024), (0, 1024, 3072), (0, 3072, 3100), (1, 5, 12)]


def test_a_range_that_is_stated_twice_is_requested_once() -> None:
    path, data = stored(4000)
    calls: list[Call] = []

    def choose(call: Call) -> Fault | None:
        calls.append(call)
        return None

    with opened(path, choose) as file:
        plan = state(file, [(0, 1000), (1100, 2000), (0, 1000)])
        assert whole(file, 0, 1000) == data[:1000]
        assert whole(file, 1100, 900) == data[1100:2000]
        plan.forget()
    assert sum(call.operation == "cat_file" for call in calls) == 2


# ---- opening a table by a mapping ----

BY_IDS = rlio.Mapping({"obs": "obs", "rewards": "rewards"}, episode="eps_id", terminated="terminateds")


@pytest.mark.few(1)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("kind", ["parquet", "chunked", *further("feather", "npz", "hdf5", "csv", "jsonl")])
@pytest.mark.each_value_once
def test_the_episodes_of_a_table_are_found_by_requests_side_by_side(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.formats.tables.table.SCAN_ROWS", 100)
    monkeypatch.setattr("rlio.formats.tables.table.KEPT_BYTES", 0)
    monkeypatch.setattr("rlio.formats.tables.npz.KEPT_BYTES", 0)
    how = {"mapping": BY_IDS} if kind == "parquet" else {}
    path, _ = long_files(kind)
    gc.collect()
    alone, crowd, finds = list[str](), Crowd(), [False]
    scan, go_on = MappedEpisodes._scan, FarFile._go_on

    def found(self: MappedEpisodes, *args: Any, **how: Any) -> Any:
        finds[0], crowd.most = True, 0
        try:
            return scan(self, *args, **how)
        finally:
            finds[0] = False
            sides.append(crowd.most)
            assert self.inputs is not None
            assert self.inputs._plan is self.inputs._coming is None  # Nothing stays requested.

    def lone(self: FarFile, *args: Any) -> None:
        alone.extend([f"at {self._at}, which nothing stated"] * finds[0])
        go_on(self, *args)

    sides = list[int]()
    monkeypatch.setattr(MappedEpisodes, "_scan", found)
    monkeypatch.setattr(FarFile, "_go_on", lone)
    with read_long(kind, f"faulty:///{path}/data", shuffle=False, storage_options=options(crowd), **how) as r:
        assert sum(map(len, r)) == 4000
    assert len(sides) == 1
    assert sides[0] > 2
    assert not alone


@pytest.mark.few(1)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize(
    "seeds", [range(1), *further(range(1, 3)), pytest.param(range(3, 30), marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("kind", ["parquet", "chunked", *further("feather", "npz", "hdf5", "csv", "jsonl")])
@pytest.mark.each_value_once
def test_a_table_that_is_opened_again_after_requests_failed_has_the_same_rows(
    kind: str, seeds: range
) -> None:
    how: dict[str, Any] = {"shuffle": False, **({"mapping": BY_IDS} if kind == "parquet" else {})}
    path, _ = long_files(kind)
    with read_long(kind, f"memory:///{path}/data", **how) as reader:
        expected = content(reader)
    for seed in seeds:
        given = options(few(faults(seed, (0.02, 0.1))))
        for attempt in range(20):
            try:
                reader = read_long(kind, f"faulty:///{path}/data", storage_options=given, **how)
            except StoreError:
                assert attempt < 10
                continue
            break
        with reader:
            assert content(reader) == expected


def test_only_the_pieces_of_rows_that_are_far_apart_are_stated() -> None:
    class Tens(Pieces):
        def places(self, file: int, piece: int, names: Any) -> Any:
            yield 10 * piece, 10 * piece + 10

    table, wanted = Tens("tens"), np.zeros(16, np.bool_)
    table.add_pieces(["x"], [5, 5, 5, 5])
    wanted[[1, 14]] = True  # Rows 3 and 16.
    assert [*table.spans(Rows(0, 2, 18, wanted), ["x"])] == [(0, 0, 10), (0, 30, 40)]
    assert [*table.spans(Rows(0, 2, 18, wanted & False), ["x"])] == [(0, 30, 40)]
    assert [*table.spans(Rows(0, 5, 10), ["x"])] == [(0, 10, 20)]


def odd_files(kind: str, order: str) -> tuple[str, int, dict[str, Any]]:
    """A folder of four files in memory, their bytes, and how they are read.

    ``order``: "sorted": each second row of an episode comes after all others; "episodes": a row is one.
    """
    path, size = uuid.uuid4().hex, 0
    for number in range(4):
        table, per = pq.read_table(io.BytesIO(long_file("parquet", number))), 50
        t = np.arange(1000)
        if order == "sorted":
            table = table.take(np.lexsort([t, t % 2, t // 200]))
        else:
            parts = np.arange(0, 1001, 50, dtype=np.int32)
            names = ("obs", "rewards")
            lists = [pa.ListArray.from_arrays(parts, table[name].combine_chunks()) for name in names]
            table, per = pa.table(lists, names), 1
        stream = io.BytesIO()
        if kind == "parquet":
            pq.write_table(table, stream, row_group_size=per, compression="none")
        else:
            feather.write_feather(table, stream, compression="uncompressed", chunksize=per)
        MemoryFileSystem().pipe_file(f"/{path}/data/f-{number}.{kind}", stream.getvalue())
        size += len(stream.getvalue())
    more: Any = {"episode": "eps_id", "sort": "t"} if order == "sorted" else {"per_row": True}
    columns = {"obs": "obs", "rewards": "rewards"}
    how = {"cache": "none", "epochs": 1, "batch_size": 64, "seed": 3}
    return path, size, {"mapping": rlio.Mapping(columns, **more), **how}


@pytest.mark.few(1)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("shuffle", [True, *further(False)])
@pytest.mark.parametrize("order", ["sorted", "episodes"])
@pytest.mark.parametrize("kind", ["parquet", *further("feather")])
@pytest.mark.each_value_once
def test_rows_that_are_sorted_or_are_episodes_are_requested_side_by_side_and_once(
    kind: str, order: str, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.formats.tables.table.SCAN_ROWS", 100)
    monkeypatch.setattr("rlio.formats.tables.episode_rows._SCAN_ROWS", 2)
    monkeypatch.setattr("rlio.formats.tables.table.KEPT_BYTES", 1 << 20)  # More than a window.
    # pyarrow reads columns with a gap of up to 8 KB between them at once.
    monkeypatch.setattr("rlio.storage.far_file.GAP", 1024)
    monkeypatch.setattr("rlio.storage.input_files.GAP", 1024)
    path, size, how = odd_files(kind, order)
    with rlio.read(f"memory:///{path}/data", shuffle=shuffle, **how) as reader:
        expected = content(reader)
    gc.collect()
    crowd, alone, scans = Crowd(), list[str](), [False]
    stretches, go_on = Table.stretches, FarFile._go_on

    def looked_through(self: Table, *args: Any, **how: Any) -> Any:
        scans[0] = True
        yield from stretches(self, *args, **how)
        scans[0] = False

    def lone(self: FarFile, *args: Any) -> None:
        alone.extend([f"at {self._at}, which nothing stated"] * scans[0])
        go_on(self, *args)

    monkeypatch.setattr(Table, "stretches", looked_through)
    monkeypatch.setattr(FarFile, "_go_on", lone)
    given = options(crowd)
    with rlio.read(f"faulty:///{path}/data", shuffle=shuffle, storage_options=given, **how) as reader:
        assert crowd.most > 2
        crowd.most, sizes, scans[0] = 0, requested(monkeypatch), True
        assert content(reader) == expected
    assert (
        len(alone) <= 2
    )  # The end of a file was kept when all was stated, and is dropped before it is read.
    assert crowd.most > 4
    assert sum(sizes) <= 1.3 * size


@pytest.mark.few(1)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize(
    "seeds", [range(1), *further(range(1, 4)), pytest.param(range(4, 30), marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("order", ["sorted", "episodes"])
def test_rows_that_are_sorted_or_are_episodes_are_the_same_whatever_requests_do(
    order: str, seeds: range
) -> None:
    path, _, how = odd_files("parquet", order)
    with rlio.read(f"memory:///{path}/data", shuffle=True, **how) as reader:
        expected = content(reader)
    for seed in seeds:
        switch: list[Callable[[Call], Fault | None]] = [no_fault]
        given = options(lambda call: switch[-1](call))  # noqa: B023
        with rlio.read(f"faulty:///{path}/data", shuffle=True, storage_options=given, **how) as reader:
            switch.append(few(faults(seed, (0.02, 0.1))))
            assert content(reader) == expected


@pytest.mark.usefixtures("_several")
def test_a_column_that_a_mapping_does_not_name_is_looked_at_or_the_store_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that failed is no reason to pass over what the column says."""
    path, _ = long_files("parquet")
    looks, looked = [False], MappedSource._looked

    def look(self: MappedSource, path: Any, **how: Any) -> Any:
        looks[0] = path == ("t",)
        yield from looked(self, path, **how)

    def choose(call: Call) -> Fault | None:
        return "before" if looks[0] and call.operation == "cat_file" else None

    monkeypatch.setattr(MappedSource, "_looked", look)
    with pytest.raises(StoreError):
        read_long("parquet", f"faulty:///{path}/data", mapping=BY_IDS, storage_options=options(choose))
    assert looks[0]


# ---- layouts with a reader of their own ----


def read_layout(path: str, **how: Any) -> Any:
    return rlio.read(path, **{"cache": "none", "epochs": 1, "batch_size": 64, "seed": 3, **how})


def content(batches: Any) -> list[tuple[bytes, ...]]:
    """What the batches of a reader hold; a call that failed because the store did is made again."""
    found = []
    for _ in range(10_000):
        try:
            batch = batches.sample()
        except StoreError:
            continue
        except EndOfData:
            return found
        found.append(tuple(leaf.tobytes() for name in sorted(batch) for _, leaf in leaves(batch[name])))
    raise AssertionError("no end")


_FIRST = ["d4rl", "robomimic", "lerobot", "zarr", "zarr-shards", "imitation", "minari-arrow"]


@pytest.mark.few(2)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize(
    "seeds", [range(1), *further(range(1, 6)), pytest.param(range(6, 30), marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", [*_FIRST, *further(*(kind for kind in LAYOUTS if kind not in _FIRST))])
@pytest.mark.each_value_once
def test_layouts_whose_requests_fail_or_are_late_give_the_same_rows(
    kind: str, shuffle: bool, seeds: range
) -> None:
    path = uuid.uuid4().hex
    put(kind, path)
    how: dict[str, Any] = {"shuffle": shuffle, "epochs": 2}
    with read_layout(f"memory:///{path}/data", **how) as reader:
        expected = content(reader)
    for seed in seeds:
        # Opening reads the files, and raises; so faults begin later.
        switch: list[Callable[[Call], Fault | None]] = [no_fault]
        given = options(lambda call: switch[-1](call))  # noqa: B023
        with read_layout(f"faulty:///{path}/data", storage_options=given, **how) as reader:
            switch.append(few(faults(seed, (0.02, 0.1))))
            assert content(reader) == expected


@pytest.mark.few(2)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", [*_FIRST, *further(*(kind for kind in LAYOUTS if kind not in _FIRST))])
@pytest.mark.each_value_once
def test_layouts_are_requested_side_by_side_and_about_once(
    kind: str, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = uuid.uuid4().hex
    size, rows = put(kind, path)
    gc.collect()  # Open files share what is kept.
    crowd = Crowd()
    given = options(crowd)
    with read_layout(f"faulty:///{path}/data", shuffle=shuffle, storage_options=given) as reader:
        crowd.most, sizes = 0, requested(monkeypatch)
        alone, own = list[int](), FarFile._go_on  # Requests of a reader that nothing has stated.

        def go_on(self: FarFile, *args: Any) -> None:
            alone.append(len(sizes))
            own(self, *args)

        monkeypatch.setattr(FarFile, "_go_on", go_on)
        assert sum(map(len, reader)) == rows
    # Groups are found by reading, as batches of a large file are; all else was stated.
    found = ("robomimic", "minari", "d3rlpy-2", "minari-arrow-long")
    assert len(alone) <= (len(sizes) / 2 if kind in found else 0)
    # A file of Minari's here is known from opening, but for its end.
    assert 4 < crowd.most <= REQUESTS + 1 or (kind == "minari" and sum(sizes) < size / 2)
    # HDF5 reads 64 KB of data without chunks where an episode has less: here, half of what is held.
    assert sum(sizes) <= (6 if kind in ("d3rlpy-1", "tianshou") else 1.3) * size


@pytest.mark.further
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("kind", ["robomimic", *further(*(kind for kind in OF_HDF5 if kind != "robomimic"))])
def test_h5py_reads_layouts_only_while_no_request_is_under_way(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = uuid.uuid4().hex
    _, rows = put(kind, path)
    gc.collect()
    crowd, under_way = Crowd(), list[int]()
    own = Hdf5Files.guarded

    def guarded(self: Hdf5Files, *args: Any) -> Any:
        under_way.append(len(crowd._now))
        return own(self, *args)

    with read_layout(f"faulty:///{path}/data", shuffle=True, storage_options=options(crowd)) as reader:
        monkeypatch.setattr(Hdf5Files, "guarded", guarded)
        assert sum(map(len, reader)) == rows
    assert len(under_way) > 5
    assert not any(under_way)


@pytest.mark.few(1)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize(
    "kind", ["robomimic", "zarr", *further("torchrl", "lerobot", "imitation", "minari-arrow")]
)
def test_layouts_on_a_local_disk_are_told_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, spans: Any) -> None:
        raise AssertionError("a local file takes no round trip")

    monkeypatch.setattr(InputFiles, "expect", refuse)
    monkeypatch.setattr(InputFiles, "hold", refuse)
    for name, data in LAYOUTS[kind](1).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with read_layout(str(tmp_path), shuffle=True) as reader:
        assert sum(map(len, reader)) == 1000


_FEW = ["lerobot", "minari"]
_OPENED = ["robomimic", "maniskill", "minari"]


@pytest.mark.parametrize(
    "kind", ["lerobot", "minari", *further(*sorted(LAYOUTS.keys() - {"lerobot", "minari"}))]
)
def test_a_store_that_fails_is_not_taken_for_one_with_another_format(kind: str) -> None:
    path, calls = uuid.uuid4().hex, list[Call]()
    put(kind, path)
    place = f"faulty:///{path}/data"
    expected = recognise(place, storage_options=options(calls.append))
    assert expected is not None
    failed = 0
    for name in sorted({call.path for call in calls}):
        choose = lambda call, name=name: "before" if call.path == name else None  # noqa: E731
        try:
            assert recognise(place, storage_options=options(choose)) == expected
        except StoreError:
            failed += 1
    assert failed > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("opens", ["reader", "data set", "store"])
@pytest.mark.parametrize("kind", [*_OPENED, *further(*sorted({*LAYOUTS, *kinds.KINDS} - {*_OPENED}))])
@pytest.mark.each_value_once
def test_files_are_recognised_once(
    kind: str, opens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looked, own, root = uuid.uuid4().hex, list[str](), Look._at, ""
    if kind in LAYOUTS:
        put(kind, path)
    else:
        place = kinds.made(kind, test_known_kinds.rows_of(), tmp_path)
        root = f"/{place.name}" if place.is_dir() else ""
        for file in tmp_path.rglob("*"):
            if file.is_file():
                name = f"/{path}/data/{file.relative_to(tmp_path).as_posix()}"
                MemoryFileSystem().pipe_file(name, file.read_bytes())

    def at(self: Look, name: str, look: Any) -> Any:
        looked.append(name)
        return own(self, name, look)

    monkeypatch.setattr(Look, "_at", at)
    uri, how = f"faulty:///{path}/data{root}", {"storage_options": options(no_fault)}
    if opens == "reader":
        rlio.read(uri, cache="none", **how).close()
    elif opens == "data set":
        rlio.open_dataset(uri, **how)
    else:
        ReplayStore.open(uri, progress=False, **how).close()
    assert sorted(looked) == sorted({*looked})


@pytest.mark.usefixtures("_several")
def test_a_group_that_is_in_itself_is_refused_on_a_remote_store_as_soon_as_on_a_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, visits = uuid.uuid4().hex, list[str]()
    put("minari", path)
    stored = f"/{path}/data/main_data.hdf5"
    stream = io.BytesIO(MemoryFileSystem().cat_file(stored))
    with h5py.File(stream, "r+") as file:
        del file["episode_3/observations"]
        group = file.create_group("episode_3/observations")
        for number in range(4):
            group[f"self-{number}"] = group
    MemoryFileSystem().pipe_file(stored, stream.getvalue())
    own = Hdf5Files.visit

    def visit(self: Hdf5Files) -> None:
        visits.append(path)
        own(self)

    with read_layout(f"faulty:///{path}/data", storage_options=options(no_fault)) as reader:
        monkeypatch.setattr(Hdf5Files, "visit", visit)
        with pytest.raises(UnsafeData, match="nests more than"):
            list(reader)
    assert len(visits) < 1000


@pytest.mark.few(1)
@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("scheme", ["faulty", "memory"])
@pytest.mark.parametrize("kind", ["zarr", "zarr-shards"])
def test_rows_of_chunks_that_no_read_ends_with_are_those_that_were_stored(kind: str, scheme: str) -> None:
    path = uuid.uuid4().hex
    put(kind, path)
    given = {"storage_options": options(no_fault)} if scheme == "faulty" else {}
    with read_layout(f"{scheme}:///{path}/data", shuffle=False, epochs=2, **given) as reader:
        found = rlio.concat_samples(list(reader))
    stored = [rows_of(number) for _ in range(2) for number in range(3)]
    for column, values in (("obs", found["obs"]["state"]), ("actions", found["actions"])):
        np.testing.assert_array_equal(values, np.concatenate([rows[column] for rows in stored]))


def grouped(groups: int) -> str:
    """A file of HDF5 in memory, whose groups lie between 2 KB of data each."""
    path, stream = f"/{uuid.uuid4().hex}/f.hdf5", io.BytesIO()
    with h5py.File(stream, "w") as file:
        for number in range(groups):
            file[f"g{number}/x"] = np.random.default_rng(number).random(256)
    MemoryFileSystem().pipe_file(path, stream.getvalue())
    return path


def windowed(path: str) -> tuple[FarFile, h5py.File]:
    """A file whose reader locks, after all of its groups were looked at."""
    far = far_file(FaultyRanges(**options(no_fault)), path, locks=True)
    file = h5py.File(io.BufferedReader(far, 512), "r")
    assert all("x" in file[name] for name in file)
    return far, file


def test_groups_all_over_a_file_are_fetched_at_once_after_some_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.far_file.GAP", 1024)
    path, sizes = grouped(60), requested(monkeypatch)
    far, file = windowed(path)
    with far, file:
        assert far.size > 60 * 2048
        assert len(sizes) <= 25
        assert sizes[-1] == far.size  # What was read before is within.
        assert (file["g59/x"][()] == np.random.default_rng(59).random(256)).all()


@pytest.mark.further
def test_a_file_has_a_window_where_it_is_read_as_do_the_last_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.far_file.GAP", 1024)
    monkeypatch.setattr("rlio.storage.far_file._WINDOW_BYTES", 1 << 17)
    gc.collect()
    files = [windowed(grouped(60)) for _ in range(6)]
    assert [len(far._window[1]) for far, _ in files] == [0, 0, *[1 << 17] * 4]
    for far, file in files:
        file.close()
        far.close()
        assert far._window == (0, b"")


def test_a_file_beside_one_that_had_a_window_has_one_after_few_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.far_file.GAP", 1024)
    monkeypatch.setattr("rlio.storage.far_file._window_folder", None)
    first = grouped(60)
    data = MemoryFileSystem().cat_file(first)
    paths = [first, first.replace("f.hdf5", "g.hdf5"), f"/{uuid.uuid4().hex}/f.hdf5"]
    waits = list[int]()
    for path in paths:
        MemoryFileSystem().pipe_file(path, data)
        sizes = requested(monkeypatch)
        far, file = windowed(path)
        with far, file:
            waits.append(len(sizes))
            assert sizes[-1] == far.size
    assert waits[1] < 8 < waits[0] == waits[2]


def test_a_file_that_is_read_has_no_window_after_few_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = stored(400_000)
    monkeypatch.setattr("rlio.storage.far_file._window_folder", path.rpartition("/")[0])
    sizes, far = requested(monkeypatch), far_file(FaultyRanges(**options(no_fault)), path, locks=True)
    with far:
        far.hold({}, [])
        for at in range(0, 200_000, 10_000):
            whole(far, at, 50)
    assert sizes == [50] * 20


def test_a_file_whose_last_read_was_in_its_window_does_not_keep_the_window() -> None:
    path, data = stored(100_000)
    files = [far_file(FaultyRanges(**options(no_fault)), path, locks=True) for _ in range(5)]
    for far in files:
        for at in range(0, 24 * 200, 200):
            assert whole(far, at, 3) == data[at : at + 3]
    assert [len(far._window[1]) for far in files] == [0, *[100_000] * 4]
    assert all(len(run.data) == 3 for far in files for run in far._runs)


def test_the_window_at_the_end_of_a_file_has_its_last_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.far_file._WINDOW_BYTES", 1 << 14)
    path, data = stored((1 << 16) + 5)
    sizes = requested(monkeypatch)
    with far_file(FaultyRanges(**options(no_fault)), path, locks=True) as far:
        for at in (*range(len(data) - 24 * 200, len(data), 200), len(data) - 3):
            assert whole(far, at, 3) == data[at : at + 3]
    assert len(sizes) == 24
    assert sizes[-1] > 24 * 200


def test_small_reads_far_from_each_other_fetch_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.far_file._WINDOW_BYTES", 1 << 14)
    path, data = stored(400_000)
    sizes = requested(monkeypatch)
    far = far_file(FaultyRanges(**options(no_fault)), path, locks=True)
    with far:
        for at in range(0, 400_000, 10_000):
            assert whole(far, at, 50) == data[at : at + 50]
    assert sizes == [50] * 40


def test_stated_bytes_are_joined_across_gaps_that_are_no_larger_than_what_is_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [*joined([(0, 0, 100), (0, 8292, 8293), (0, 20_000, 20_001)], gap=1 << 18)] == [
        (0, 0, 8293 - 8293 % 1024),
        (0, 8293 - 8293 % 1024, 8293),
        (0, 20_000, 20_001),
    ]
    monkeypatch.setattr("rlio.storage.far_file._HOLE", 0)
    spans = [(0, 0, 100), (0, 150, 250), (0, 600, 700), (0, 1000, 1001), (1, 1050, 1060)]
    assert [*joined(spans, gap=300)] == [(0, 0, 250), (0, 600, 700), (0, 1000, 1001), (1, 1050, 1060)]
    assert [*joined(spans, gap=49)] == [*joined(spans)] == spans
    assert [*joined([(0, 0, 2000), (0, 2400, 2500)], gap=400)] == [
        (0, 0, 1024),
        (0, 1024, 2048),
        (0, 2048, 2500),
    ]


def test_columns_of_several_files_are_stated_by_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.input_files._SORTED_BYTES", 60)
    spans = [(2, 0, 10), (1, 0, 10), (2, 10, 20), (1, 10, 20), (2, 20, 30), (1, 20, 30), (2, 30, 40)]
    assert [*_by_file(iter(spans))] == [*spans[0:6:2], *spans[1:6:2], spans[6]]
