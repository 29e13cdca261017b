"""Writers and readers over stores that fail: what was acknowledged is there, once; errors are clean."""

from __future__ import annotations

import itertools
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from further import further

from rlio import DatasetReader, JsonWriter, ParquetWriter, Roll, SampleBatch, concat_samples
from rlio.errors import CorruptData, EndOfData, OptionError, PublishError, RlioError
from rlio.log.spool import Spool
from rlio.maintenance import compact
from rlio.maintenance.compact import CompactReport
from rlio.storage.filesystem import Retry
from rlio.testing import FaultyFileSystem, FaultyRenamingFileSystem
from rlio.testing.filesystem import Call, Fault
from rlio.writer import OutputWriter

FAILURES: tuple[Fault, ...] = ("before", "after", "torn", "slow", "stale", "unordered")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stores that fail have URLs, and there is no delay between two attempts."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    fsspec.register_implementation("faulty-renaming", FaultyRenamingFileSystem, clobber=True)
    monkeypatch.setattr(Retry, "wait", lambda self, attempt, path: None)
    # They are in this process and do not hang: a thread a call would be most of the time.
    monkeypatch.setattr("rlio.storage.clients._IN_PROCESS", {"memory", "faulty", "faulty-renaming"})
    yield
    MemoryFileSystem.store.clear()


class Store:
    """A folder in memory whose calls fail as ``choose`` says; the attribute may be set at any time."""

    def __init__(self, *, renames: bool = False) -> None:
        self.choose: Callable[[Call], Fault | None] = lambda call: None
        self.count = 0
        self.root = f"faulty{'-renaming' if renames else ''}:///{uuid.uuid4().hex}/run"
        self.options: dict[str, Any] = {
            "target": MemoryFileSystem(),
            "choose": self._choose,
            "history": {},
            "delay": 0.002,
        }

    def _choose(self, call: Call) -> Fault | None:
        numbered = call._replace(number=self.count)
        self.count += 1
        return self.choose(numbered)

    def writer(
        self, index: int, *, json: bool = False, rows: int = 7, spool: Spool | None = None
    ) -> OutputWriter:
        kind = JsonWriter if json else ParquetWriter
        roll = Roll(max_rows=rows, max_seconds=None)
        name = f"w{index:05d}-00000000"
        return kind(self.root, spool=spool, roll=roll, writer_id=name, storage_options=self.options)

    def compact(self) -> CompactReport:
        return compact(self.root, storage_options=self.options)

    def leftovers(self) -> list[str]:
        """Unfinished uploads."""
        return [path for path in MemoryFileSystem.store if "/_tmp/" in path]

    def rows(self, **options: Any) -> list[tuple[int, int]]:
        """(writer, number) of every row, as a reader of one epoch gives them."""
        with DatasetReader(self.root, epochs=1, storage_options=self.options, **options) as reader:
            batches = list(reader)
        if not batches:
            return []
        joined = concat_samples(batches)
        return list(zip(joined["who"].tolist(), joined["t"].tolist(), strict=True))


def batch_of(who: int, first: int, rows: int) -> SampleBatch:
    t = np.arange(first, first + rows)
    return SampleBatch(t=t, who=np.full(rows, who), obs=t.astype(np.float32))


def run_seed(seed: int, folder: Path) -> Counter[str]:
    """Writers, readers and compaction over a store that fails at random; gives what happened how often.

    Half of the seeds write with a log, which lies in ``folder``.
    """
    draw = random.Random(seed)
    store = Store(renames=bool(seed % 2))
    share = draw.choice((0.02, 0.1, 0.3))
    happened: Counter[str] = Counter()

    # Of each kind of call in each folder, the n-th: whatever order the writers' threads run in.
    seen: Counter[tuple[str, str]] = Counter()

    def choose(call: Call) -> Fault | None:
        kind = (call.operation, call.path.partition("/run/")[2].rpartition("/")[0])
        seen[kind] += 1
        decide = random.Random(f"{seed} {kind} {seen[kind]}")
        if decide.random() >= share:
            return None
        fault = decide.choice(FAILURES)
        happened[fault] += 1
        return fault

    count = draw.choice((1, 1, 2))
    spool = Spool(folder=folder, sync="never") if seed % 4 < 2 else None
    kinds = [draw.random() < 0.3 for _ in range(count)]
    writers = [store.writer(i, json=json, spool=spool) for i, json in enumerate(kinds)]
    written, acknowledged = [0] * count, [0] * count
    store.choose = choose
    for _ in range(draw.randrange(4, 9)):
        i = draw.randrange(count)
        what = draw.random()
        if what < 0.55:
            rows = draw.randrange(1, 9)
            writers[i].write(batch_of(i, written[i], rows))
            written[i] += rows
        elif what < 0.8:
            try:
                writers[i].flush()
                acknowledged[i] = written[i]
            except PublishError:
                happened["flush refused"] += 1
        elif what < 0.95:
            _read_amid_faults(store, written, acknowledged, happened)
        elif not any(kinds):  # A data set with JSON shards is not compacted.
            _compact_amid_faults(store, happened)
    store.choose = lambda call: None
    _check(store, written, acknowledged, "as if the writers had died here")
    died_with = list(acknowledged)
    for i, writer in enumerate(writers):
        writer.close()
        acknowledged[i] = written[i]
    assert logs_in(folder) == []
    if draw.random() < 0.2 and sum(written) and not any(kinds):
        happened["merged"] += len(store.compact().runs)
        died_with = []
    if acknowledged != died_with:
        _check(store, written, acknowledged, "once the store works again")
    return happened


def logs_in(folder: Path) -> list[Path]:
    """Segments and shards that wait in a spool."""
    return [path for path in folder.rglob("*") if path.suffix in (".wal", ".parquet", ".jsonl")]


def _compact_amid_faults(store: Store, happened: Counter[str]) -> None:
    """It merges what it finds, or raises an error that says what it is."""
    try:
        happened["merged"] += len(store.compact().runs)
    except (RlioError, OSError) as error:
        happened[f"compaction refused: {type(error).__name__}"] += 1


def _read_amid_faults(
    store: Store, written: list[int], acknowledged: list[int], happened: Counter[str]
) -> None:
    """A reader either raises an error that says what it is, or gives whole prefixes of what was written."""
    stale = happened["stale"]
    try:
        rows = store.rows()
    except (RlioError, OSError) as error:
        happened[f"read refused: {type(error).__name__}"] += 1
        return
    happened["read"] += 1
    # Only where the store itself lists what was true before may a reader not see what was acknowledged.
    least = acknowledged if happened["stale"] == stale else [0] * len(written)
    _check_prefixes(rows, least, written)


def _check(store: Store, written: list[int], acknowledged: list[int], when: str) -> None:
    if not sum(acknowledged):
        return
    try:
        rows = store.rows()
    except RlioError as error:
        raise AssertionError(f"{when}, reading fails") from error
    _check_prefixes(rows, acknowledged, written)


def _check_prefixes(rows: list[tuple[int, int]], least: list[int], most: list[int]) -> None:
    assert {who for who, _ in rows} <= set(range(len(most)))
    for i in range(len(most)):
        numbers = [number for who, number in rows if who == i]
        assert numbers == list(range(len(numbers))), "rows are lost, doubled or out of order"
        assert least[i] <= len(numbers) <= most[i]


def run_seeds(seeds: range, folder: Path) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            happened += run_seed(seed, folder)
        except BaseException as error:
            error.add_note(f"run_seed({seed}, folder) repeats it")
            raise
        MemoryFileSystem.store.clear()
    return happened


@pytest.mark.parametrize(
    "seeds", [range(24), *further(*(range(first, first + 64) for first in range(0, 1024, 64)))]
)
def test_over_1000_seeds_of_faults_every_acknowledged_row_is_there_once(seeds: range, tmp_path: Path) -> None:
    happened = run_seeds(seeds, tmp_path)
    assert all(happened[fault] > 5 for fault in FAILURES)
    assert happened["read"] > 5, "the readers amid faults read something too"
    assert happened["merged"] > 2, "compaction had something to do"


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
@pytest.mark.timeout(3600)
def test_over_20000_seeds_of_faults_every_acknowledged_row_is_there_once(part: int, tmp_path: Path) -> None:
    run_seeds(range(1000 * (part + 1), 1000 * (part + 2)), tmp_path)


def test_a_last_shard_that_is_half_uploaded_is_not_there_yet_and_of_a_closed_writer_it_is_torn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store()
    writer = store.writer(0)
    writer.write(batch_of(0, 0, 7))
    writer.flush()
    store.choose = lambda call: "torn" if call.operation == "pipe_file" else None
    writer.write(batch_of(0, 7, 7))
    with pytest.raises(PublishError):
        writer.flush()
    with caplog.at_level("WARNING", "rlio"):
        assert store.rows() == [(0, i) for i in range(7)], (
            "where puts are not atomic, a reader comes any time"
        )
    assert "rows 7 to 13 of writer w00000-00000000" in caplog.text
    store.choose = lambda call: None
    writer.close()
    assert store.rows() == [(0, i) for i in range(14)]
    folder = store.root.partition("://")[2]
    (last,) = (path for path in MemoryFileSystem.store if folder in path and "/000000000007-" in path)
    MemoryFileSystem().pipe_file(last, MemoryFileSystem().cat_file(last)[:-1])
    with pytest.raises(CorruptData, match="torn"):
        store.rows()


# ---- the n-th call fails, n = 1, 2, 3 ... until none is left ----


def threads_of_ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rlio")]


def settled(before: list[threading.Thread]) -> bool:
    """Whether the threads that were started since have ended; those of other tests may end meanwhile."""
    for _ in range(100):
        if all(thread in before for thread in threads_of_ours()):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.few(1)
@pytest.mark.parametrize("json", [False, True], ids=["parquet", "json"])
@pytest.mark.parametrize("renames", [False, True], ids=["put", "rename"])
@pytest.mark.parametrize("fault", ["before", "after", "torn"])
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.each_value_once
def test_whatever_call_of_a_writer_fails_its_error_is_clean_and_trying_again_stores_every_row_once(
    json: bool, renames: bool, fault: Fault, sticky: bool
) -> None:
    before = threads_of_ours()
    refused = 0
    for n in itertools.count():
        store = Store(renames=renames)
        store.choose = lambda call: fault if call.number == n or (sticky and call.number > n) else None  # noqa: B023
        writer: OutputWriter | None = None
        try:
            writer = store.writer(0, json=json)
            for first in range(0, 20, 10):
                writer.write(batch_of(0, first, 10))
                writer.flush()
        except (RlioError, OSError):
            refused += 1
        used = store.count
        store.choose = lambda call: None
        if writer is None:
            try:
                writer = store.writer(0, json=json)
            except OptionError:  # The failed attempt has claimed the id, and could not give it back.
                writer = store.writer(1, json=json)
        done = writer.rows_received
        for first in range(done, 20, 10):
            writer.write(batch_of(0, first, 10))
        writer.close()
        assert store.rows() == [(0, i) for i in range(20)], f"call {n}"
        if renames and not sticky and fault != "after":
            # The call that removes what is unfinished may be the one that fails: gc's to find.
            assert len(store.leftovers()) <= 1
        assert settled(before), threads_of_ours()
        if n >= used:
            break
    assert n > 5
    assert refused > 0 if sticky else refused < n, "one failure is repaired by the next attempt, mostly"


@pytest.mark.few(1)
@pytest.mark.parametrize("json", [False, True], ids=["parquet", "json"])
@pytest.mark.parametrize("fault", ["before", "after"])
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.each_value_once
def test_whatever_call_of_a_reader_fails_it_gives_the_rows_or_a_clean_error_and_then_goes_on(
    json: bool, fault: Fault, sticky: bool
) -> None:
    store = Store()
    with store.writer(0, json=json) as writer:
        for first in range(0, 30, 5):
            writer.write(batch_of(0, first, 5))
    before = threads_of_ours()
    refused = 0
    for n in itertools.count():
        store.count = 0
        store.choose = lambda call: fault if call.number == n or (sticky and call.number > n) else None  # noqa: B023
        rows: list[int] = []
        reader: DatasetReader | None = None
        while True:
            try:
                if reader is None:
                    reader = DatasetReader(store.root, epochs=1, batch_size=4, storage_options=store.options)
                rows += reader.sample()["t"].tolist()
            except EndOfData:
                break
            except (RlioError, OSError):
                refused += 1
                store.choose = lambda call: None
        reader.close()
        assert rows == list(range(30)), f"call {n}"
        assert settled(before), threads_of_ours()
        if n >= store.count:
            break
    assert n > 5
    assert refused > 0 if sticky else refused == 0, "one failure is repaired by the next attempt"
