"""Requests side by side: rows, order and errors are those of requests one after the other."""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
import tracemalloc
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from crash_child import fork, wait_for
from fsspec.implementations.memory import MemoryFileSystem
from further import further

import rlio
from rlio import (
    DatasetReader,
    FollowReader,
    JsonWriter,
    ParquetWriter,
    ReplayStore,
    Roll,
    SampleBatch,
)
from rlio.errors import CorruptData, DataNotFound, EndOfData, StoreError
from rlio.maintenance import compact
from rlio.query.filter_pushdown import matches
from rlio.query.filters import RowFilter
from rlio.schemas.shard_file import ShardFile
from rlio.source.shards import ranges_of
from rlio.source.snapshot import DatasetSnapshot
from rlio.storage import InputFile, InputFiles, expand_inputs, open_input, parallel
from rlio.storage.filesystem import Retry, Storage
from rlio.storage.parallel import REQUESTS, Plan, Range, each
from rlio.testing import FaultyFileSystem
from rlio.testing.filesystem import Call, Fault

DEADLINE = 60.0
ROWS = 7
SHARDS = 24


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that fail have URLs, and there is no delay between two attempts."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    monkeypatch.setattr(Retry, "wait", lambda self, attempt, path: None)


def root_of(path: str) -> str:
    return f"faulty:///{path}"


def options(choose: Callable[[Call], Fault | None], **more: Any) -> dict[str, Any]:
    return {"target": MemoryFileSystem(), "choose": choose, "delay": 0.002, **more}


def no_fault(call: Call) -> Fault | None:
    return None


def reads_shard(call: Call) -> bool:
    """Whether it fetches bytes of a shard: a range, or from the first byte on."""
    return call.operation in ("cat_file", "open") and "/data/" in call.path


def record(*, lines: bool = False, shards: int = SHARDS, width: int = 3) -> str:
    """A data set of two writers in memory: row t of a writer has t in all columns."""
    path = f"{uuid.uuid4().hex}/run"
    kind = JsonWriter if lines else ParquetWriter
    for index in range(2):
        roll = Roll(max_rows=ROWS, max_seconds=None)
        with kind(f"memory://{path}", roll=roll, writer_id=f"w{index:05d}-00000000") as writer:
            for number in range(shards // 2):
                t = np.arange(number * ROWS, (number + 1) * ROWS)
                obs = np.random.default_rng(number).random((ROWS, width))
                writer.write(SampleBatch(t=t, who=np.full(ROWS, index), obs=obs))
    return path


def numbers_of(batch: Any) -> list[tuple[int, int]]:
    return list(zip(batch["who"].tolist(), batch["t"].tolist(), strict=True))


def read_through(reader: Any) -> list[tuple[int, int]]:
    """Every row; a call that failed because the store did is made again."""
    rows: list[tuple[int, int]] = []
    for _ in range(10_000):
        try:
            rows += numbers_of(reader.sample())
        except StoreError:
            continue
        except EndOfData:
            return rows
    raise AssertionError("no end")


def opened(kind: str, path: str, given: dict[str, Any]) -> Any:
    if kind == "follow":
        return FollowReader(root_of(path), batch_size=5, idle_timeout=0, storage_options=given)
    how: dict[str, Any] = {"shuffle": False} if kind == "in order" else {"shuffle": True, "seed": 3}
    return DatasetReader(root_of(path), batch_size=5, epochs=2, cache="none", storage_options=given, **how)


def faults(seed: int, shares: tuple[float, ...] = (0.0, 0.02, 0.2, 0.6)) -> Callable[[Call], Fault | None]:
    """Some requests for bytes of shards fail, before or after the store did them, or are late."""
    draw, lock = random.Random(seed), threading.Lock()
    share = draw.choice(shares)

    def choose(call: Call) -> Fault | None:
        if not reads_shard(call):
            return None
        with lock:
            return draw.choice(("before", "after", "slow", "torn")) if draw.random() < share else None

    return choose


#: 1,000 seeds in all, over the four kinds.
_SEEDS = [
    range(2),
    *further(*(range(n, n + 31) for n in (2, 33))),
    *(pytest.param(range(n, n + 31), marks=pytest.mark.soak) for n in range(64, 250, 31)),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("seeds", _SEEDS)
@pytest.mark.parametrize("kind", ["in order", "shuffled", "follow", "store"])
def test_requests_that_fail_or_are_late_change_no_row_and_no_order(
    kind: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lines = record(), record(lines=True)
    expected: dict[Any, list[tuple[int, int]]] = {}
    for seed in seeds:
        # Shards that are fetched whole, or footer and row groups by themselves.
        monkeypatch.setattr("rlio.source.shards._WHOLE_BYTES", 1 << 22 if seed % 2 else 0)
        root = lines if seed % 5 == 4 else path
        # Opening reads footers, and raises; so faults begin later.
        switch: list[Callable[[Call], Fault | None]] = [no_fault]
        given = options(lambda call: switch[-1](call))  # noqa: B023
        if kind == "store":
            assert _rows_of_store(root, given, switch, seed) == SHARDS * ROWS
            continue
        with opened(kind, root, given) as reader:
            switch.append(faults(seed))
            rows = read_through(reader)
        if (root, kind) not in expected:
            with opened(kind, root, options(no_fault)) as reader:
                expected[root, kind] = read_through(reader)
        assert rows == expected[root, kind]


def _rows_of_store(
    root: str, given: dict[str, Any], switch: list[Callable[[Call], Fault | None]], seed: int
) -> int:
    switch.append(faults(seed))
    for _ in range(1000):
        try:
            with ReplayStore.open(root_of(root), progress=False, storage_options=given) as store:
                return len(store)
        except StoreError:
            continue
    raise AssertionError("no store")


def test_a_request_that_answers_after_its_time_is_made_again_and_answers_once() -> None:
    path, late = record(shards=8), itertools.count()

    def choose(call: Call) -> Fault | None:
        return "slow" if reads_shard(call) and next(late) % 5 == 1 else None

    given = options(choose, delay=1.0)
    with opened("in order", path, {**given, "rlio_timeout": 0.25}) as reader:
        rows = read_through(reader)
    with opened("in order", path, options(no_fault)) as reader:
        assert rows == read_through(reader)


def test_a_damaged_shard_that_is_mended_is_read_by_the_next_call() -> None:
    path = record()
    shard = sorted(name for name in MemoryFileSystem.store if path in name and "/data/" in name)[2]
    intact = MemoryFileSystem.store[shard].getvalue()
    MemoryFileSystem().pipe_file(shard, bytes([intact[0] ^ 1, *intact[1:]])[:4] + b"?" * 40 + intact[44:])
    with opened("in order", path, options(no_fault)) as reader:
        rows: list[tuple[int, int]] = []
        with pytest.raises(CorruptData):  # noqa: PT012
            while True:
                rows += numbers_of(reader.sample())
        MemoryFileSystem().pipe_file(shard, intact)
        rows += read_through(reader)
    with opened("in order", path, options(no_fault)) as reader:
        assert rows == read_through(reader)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["in order", "follow"])
def test_shards_that_are_compacted_away_meanwhile_are_read_where_their_rows_are(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record()
    with opened(kind, path, options(no_fault)) as reader:
        expected = read_through(reader)
    monkeypatch.setattr("rlio.storage.parallel._RANGES", 2)
    with opened(kind, path, options(no_fault)) as reader:
        rows = numbers_of(reader.sample())
        small = [name for name in MemoryFileSystem.store if path in name and "/data/" in name]
        compact(f"memory://{path}")
        assert len([name for name in MemoryFileSystem.store if path in name and "/data/" in name]) > len(
            small
        )
        for name in small:
            if name.endswith(".parquet"):
                del MemoryFileSystem.store[name]
        assert rows + read_through(reader) == expected


def request_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rlio-requests"]


@contextmanager
def requests_of_threads() -> Iterator[list[str]]:
    """Counts what the pool is given meanwhile: its threads may have ended before somebody looks for them."""
    given: list[str] = []
    submit = parallel._Pool.submit

    def counted(pool: Any, work: Any) -> Any:
        given.append("a request")
        return submit(pool, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel._Pool, "submit", counted)
        yield given


def traced() -> int:
    """Bytes that are traced, those of the store in memory left out: listing it copies what is being read."""
    gc.collect()  # A thread that decodes may still have what it was given.
    others = tracemalloc.Filter(False, "*/fsspec/implementations/memory.py")
    found = tracemalloc.take_snapshot().filter_traces([others])
    return sum(trace.size for trace in found.traces)


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["in order", *further("shuffled", "follow")])
@pytest.mark.parametrize("closes", [True, False])
def test_a_reader_that_is_left_in_the_middle_keeps_no_thread_and_no_memory(kind: str, closes: bool) -> None:
    path = record(width=4000)
    read_some(kind, path, closes=True)  # Imports, and what is remembered of schemas.
    tracemalloc.start()
    try:
        before = traced()
        read_some(kind, path, closes=closes)
        gc.collect()
        wait_until(lambda: not request_threads())
        wait_until(lambda: traced() - before < 1 << 19)  # A shard has 220 KB.
    finally:
        tracemalloc.stop()


def read_some(kind: str, path: str, *, closes: bool) -> None:
    reader = opened(kind, path, options(no_fault))
    with requests_of_threads() as requests:
        reader.sample()
    assert requests
    if closes:
        reader.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("kind", ["in order", *further("shuffled", "follow")])
def test_a_forked_child_goes_on_with_requests_of_its_own(kind: str) -> None:
    path = record()
    with opened(kind, path, options(no_fault)) as reader:
        everything = read_through(reader)
    numbers = itertools.count()

    def choose(call: Call) -> Fault | None:
        late = reads_shard(call) and 4 < next(numbers) < 9
        return "slow" if late and kind == "in order" else None  # These are under way at the fork.

    with opened(kind, path, options(choose, delay=2.0)) as reader:
        begun = numbers_of(reader.sample())

        def act() -> None:
            assert begun + read_through(reader) == everything

        assert wait_for(fork(act), seconds=DEADLINE) == 0
        assert begun + read_through(reader) == everything


def test_close_does_not_wait_for_requests_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.source.together.RUN_ROWS", ROWS)  # A first batch needs one shard, not all.
    path, hold, held = record(), threading.Event(), threading.Event()

    def choose(call: Call) -> Fault | None:
        # The first batch needs a first shard of a writer; the requests for later ones hang.
        if reads_shard(call) and int(call.path.rpartition("/")[2].partition("-")[0]) >= 3 * ROWS:
            held.set()
            hold.wait(DEADLINE)
        return None

    try:
        reader = opened("in order", path, options(choose))
        reader.sample()
        assert held.wait(DEADLINE)
        with ThreadPoolExecutor(1) as other:
            other.submit(reader.close).result(DEADLINE / 2)
    finally:
        hold.set()


def test_a_process_ends_although_requests_hang(tmp_path: Path) -> None:
    """The threads of the pool do not keep the interpreter."""
    program = (
        "import threading\n"
        "from rlio.storage.parallel import Plan, Range\n"
        "class Hangs:\n"
        "    at_once = 16\n"
        "    def hold(self, plan): pass\n"
        "    def fetch(self, path, start, stop): threading.Event().wait(600)\n"
        "plan, storage = Plan(), Hangs()\n"
        "plan.expect([Range(storage, 'a', 0, 1), Range(storage, 'b', 0, 1)])\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE, check=True, cwd=tmp_path)


class Counted(Storage):
    """A store that counts its requests; they wait for `go`."""

    at_once = REQUESTS

    def __init__(self) -> None:
        self.go = threading.Event()
        self.lock = threading.Lock()
        self.begun: list[str] = []
        self.now = self.most = 0

    def hold(self, plan: Plan) -> None:
        pass

    def fetch(self, path: str, start: int, stop: int | None) -> bytes:
        with self.lock:
            self.begun.append(path)
            self.now += 1
            self.most = max(self.most, self.now)
        self.go.wait(DEADLINE)
        with self.lock:
            self.now -= 1
        return bytes(10)[start:stop]


def test_at_most_16_requests_are_made_at_once_and_64_ahead() -> None:
    store, plan = Counted(), Plan()
    plan.expect(Range(store, str(number), 0, 10) for number in range(1000))
    wait_until(lambda: store.now == REQUESTS)
    store.go.set()
    wait_until(lambda: len(store.begun) == 4 * REQUESTS and not store.now)
    assert store.most == REQUESTS
    assert plan.take(store, "0", 3, 5) == b"\0\0"
    assert plan.take(store, "7", 0, 10) == bytes(10)  # Those before it are given up.
    wait_until(lambda: len(store.begun) == 4 * REQUESTS + 7)
    assert plan.take(store, "3", 0, 10) is None
    assert plan.take(Counted(), "8", 0, 10) is None


def test_a_plan_requests_no_more_bytes_than_it_may_hold() -> None:
    store, plan = Counted(), Plan()
    store.go.set()
    plan.expect(Range(store, str(number), 0, 20 << 20) for number in range(50))
    wait_until(lambda: len(store.begun) == 2)
    plan.expect([Range(store, "large", 0, 1 << 40), Range(store, "next", 0, 1)])
    wait_until(lambda: len(store.begun) == 3)
    time.sleep(0.1)
    assert sorted(store.begun) == ["0", "1", "large"]


def test_the_plans_of_a_process_share_the_bytes_that_they_request_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = weakref.WeakSet[Plan]()  # Without those of readers that other tests have left.
    monkeypatch.setattr(parallel, "busy_plans", busy)
    store, size = Counted(), 4 << 20
    store.go.set()
    plans = [Plan() for _ in range(16)]

    def ahead(plan: Plan) -> int:
        return sum(wanted.stop for wanted in plan._coming)

    for number, plan in enumerate(plans):
        plan.expect(Range(store, f"{number} {place}", 0, size) for place in range(100))
    assert ahead(plans[0]) == 32 << 20  # It was alone.
    assert len(busy) == 16
    for place in range(20):
        for number, plan in enumerate(plans):
            assert plan.take(store, f"{number} {place}", 0, size) is not None
    assert sum(map(ahead, plans)) <= (128 << 20) + 16 * size
    for plan in plans[1:]:
        plan.forget()
    assert plans[0].take(store, "0 20", 0, size) is not None
    assert ahead(plans[0]) == 32 << 20
    del plans, plan
    gc.collect()
    assert len(busy) == 0


def test_a_request_that_failed_raises_once() -> None:
    class Fails(Counted):
        def fetch(self, path: str, start: int, stop: int | None) -> bytes:
            raise StoreError("it fails")

    store, plan = Fails(), Plan()
    plan.expect([Range(store, "a", 0, 10), Range(store, "b", 0, 10)])
    for path in "ab":
        with pytest.raises(StoreError):
            plan.take(store, path, 0, 10)
        assert plan.take(store, path, 0, 10) is None  # It is read as without a plan.


def test_a_plan_is_dropped_with_its_reader() -> None:
    storage = Storage.on(FaultyFileSystem(MemoryFileSystem(), no_fault), "/nothing")
    plan = storage.plan()
    assert plan is not None
    plan.expect([Range(storage, "a", 0, 1)])
    assert len(storage._plans) == 1
    known = weakref.ref(plan)
    del plan
    gc.collect()
    assert known() is None
    assert not storage._plans


def test_several_roots_are_requested_side_by_side_and_read_in_order() -> None:
    paths = [record(shards=6), record(shards=4)]
    seen: list[int] = []

    def choose(call: Call) -> Fault | None:
        seen.append(len(request_threads()))
        return None

    roots = list(map(root_of, paths))
    with DatasetReader(
        roots, batch_size=5, epochs=1, shuffle=False, cache="none", storage_options=options(choose)
    ) as reader:
        rows = read_through(reader)
    both = []
    for path in paths:
        with DatasetReader(f"memory://{path}", epochs=1, shuffle=False, cache="none") as reader:
            both += read_through(reader)
    assert rows == both
    assert max(seen) > 1


def test_calls_within_the_pool_do_not_wait_for_each_other() -> None:
    storage = Storage.on(FaultyFileSystem(MemoryFileSystem(), no_fault), "/nothing")

    def outer(number: int) -> list[int]:
        return list(each(storage, lambda inner: number * inner, range(40)))

    with ThreadPoolExecutor(1) as other:
        found = other.submit(lambda: list(each(storage, outer, range(40)))).result(DEADLINE)
    assert found == [[number * inner for inner in range(40)] for number in range(40)]


@pytest.mark.parametrize("uri", ["local", "memory://no-plans"])
def test_a_local_disk_and_memory_have_no_plans_and_no_threads(uri: str, tmp_path: Path) -> None:
    root = str(tmp_path / "run") if uri == "local" else f"memory://{uuid.uuid4().hex}"
    wait_until(lambda: not request_threads())
    with ParquetWriter(root, roll=Roll(max_rows=10, max_seconds=None)) as writer:
        writer.write(SampleBatch(t=np.arange(100)))
    assert Storage.open(root).plan() is None
    with DatasetReader(root, epochs=1, shuffle=False, cache="none") as reader:
        assert sum(map(len, reader)) == 100
        assert not request_threads()


@pytest.mark.further
@pytest.mark.parametrize("seeds", [range(2), *further(*(range(n, n + 33) for n in range(2, 101, 33)))])
def test_rows_that_pass_a_filter_are_the_same_whatever_requests_do(seeds: range) -> None:
    path = record(width=2000)  # Larger than what comes with a footer.
    for seed in seeds:
        choose = faults(seed)
        for _ in range(1000):
            try:
                reader = opened_filtered(path, options(choose))
                break
            except StoreError:
                continue
        else:
            raise AssertionError("it does not open")
        with reader:
            assert read_through(reader) == [(who, t) for who in range(2) for t in range(30, 60)]


def opened_filtered(path: str, given: dict[str, Any]) -> Any:
    how: dict[str, Any] = {"shuffle": False, "cache": "none", "epochs": 1, "batch_size": 5}
    return DatasetReader(root_of(path), filter="t >= 30 and t < 60", storage_options=given, **how)


class Watch:
    """Counts requests for the bytes of shards, and how many are under way.

    Each takes until no other begins for a while: on a busy machine the threads of the pool start late.

    ``operation``: only these: "open" fetches from the first byte on, "cat_file" other ranges.
    """

    def __init__(self, operation: str | None = None) -> None:
        self._operation = operation
        self._changed, self._now = threading.Condition(), 0
        self.most = 0
        self.seen = Counter[str]()

    def __call__(self, call: Call) -> Fault | None:
        if reads_shard(call) and self._operation in (None, call.operation):
            with self._changed:
                self._now += 1
                self.most = max(self._now, self.most)
                self.seen[call.path] += 1
                self._changed.notify_all()
                while self._changed.wait(0.05):
                    pass
                self._now -= 1
        return None


def test_groups_that_a_filter_may_let_pass_are_requested_side_by_side_and_no_others() -> None:
    path, watch = record(width=2000), Watch("open")  # Each shard has one group, which begins the file.
    source = DatasetSnapshot.listed(Storage.open(root_of(path), storage_options=options(watch)))
    passing = [len(each.positions) for each in matches(source, RowFilter.parse("t >= 30 and t < 60"))]
    assert sum(passing) == 60
    assert passing.count(0) == SHARDS - 10
    assert list(watch.seen.values()) == [1] * 10
    assert 2 < watch.most <= REQUESTS


def test_shards_without_rows_that_pass_a_filter_are_not_read() -> None:
    path, watch = record(width=2000), Watch()
    with opened_filtered(path, options(watch)) as reader:
        rows = read_through(reader)
    assert rows == [(who, t) for who in range(2) for t in range(30, 60)]
    # Each footer; the rows of ten shards, to find those that pass; and those shards again, to read them.
    shards = {name: count for name, count in watch.seen.items() if name.endswith(".parquet")}
    assert len(shards) == SHARDS
    assert sum(shards.values()) <= SHARDS + 2 * 10


# ---- followers ----


def follow_run(path: str, watch: Watch) -> tuple[FollowReader, ParquetWriter]:
    """A follower of a data set that grows, and its writer."""
    reader = FollowReader(root_of(path), poll_seconds=0.001, storage_options=options(watch))
    return reader, ParquetWriter(f"memory://{path}", roll=Roll(max_rows=ROWS, max_seconds=None))


def test_a_follower_requests_each_shard_once_however_it_came() -> None:
    path, watch = f"{uuid.uuid4().hex}/run", Watch()
    reader, writer = follow_run(path, watch)
    with reader, writer:
        rows = 0
        for count in (1, 1, 3, 1, 30, 1, 1):  # Shards that come between two looks.
            for _ in range(count):
                t = np.arange(rows, rows + ROWS)
                writer.write(SampleBatch(t=t))
                rows += ROWS
            writer.flush()
            while rows > sum(reader.state_dict()["position"]["rows"].values()):
                reader.sample()
    shards = {name: count for name, count in watch.seen.items() if name.endswith(".parquet")}
    assert len(shards) == rows // ROWS == 38
    assert set(shards.values()) == {1}


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [3, 2000])
def test_a_follower_decodes_short_shards_together_and_serves_each_by_itself(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, together, read_joined = record(shards=60, width=width), list[int](), ShardFile.read_joined

    def counted(files: Any, **how: Any) -> Any:
        together.append(len(files))
        return read_joined(files, **how)

    monkeypatch.setattr(ShardFile, "read_joined", staticmethod(counted))
    with FollowReader(root_of(path), idle_timeout=0, storage_options=options(no_fault)) as reader:
        batches = list(reader)
    assert [len(batch) for batch in batches] == [ROWS] * 60
    assert [row for batch in batches for row in numbers_of(batch)] == [
        (who, t) for who in range(2) for t in range(30 * ROWS)
    ]
    # Of large shards, each is decoded by itself.
    assert sum(together) == (60 if width == 3 else 0)


def test_a_damaged_shard_among_short_ones_is_lost_alone_to_a_follower() -> None:
    path = record()
    shard = sorted(name for name in MemoryFileSystem.store if path in name and "/data/" in name)[3]
    intact = MemoryFileSystem.store[shard].getvalue()
    MemoryFileSystem().pipe_file(shard, intact[:4] + b"?" * 40 + intact[44:])
    with FollowReader(
        root_of(path), idle_timeout=0, on_error="skip", storage_options=options(no_fault)
    ) as reader:
        rows = read_through(reader)
        assert reader.skipped == ROWS
    assert rows == [
        (who, t) for who in range(2) for t in range(SHARDS // 2 * ROWS) if (who, t // ROWS) != (0, 3)
    ]


@pytest.mark.further
@pytest.mark.parametrize("kind", ["in order", *further("follow")])
def test_a_reader_plans_few_requests_anew_at_each_shard(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, asked = 160, list[Any]()
    path = record(shards=shards, width=2000)

    def counted(*about: Any) -> Any:
        asked.append(about)
        return ranges_of(*about)

    monkeypatch.setattr("rlio.source.snapshot.ranges_of", counted)
    with opened(kind, path, options(no_fault, delay=0)) as reader:
        rows = read_through(reader)
    epochs = len(rows) // (shards * ROWS)
    assert len(asked) < 16 * epochs * shards  # All that is ahead, for each: 59 times.


# ---- files of other libraries, many of them ----

FILES = 24


def steps_of(number: int, width: int) -> dict[str, Any]:
    t, obs = np.arange(ROWS), np.random.default_rng(number).random((ROWS, width))
    ends = {"terminateds": t == ROWS - 1, "truncateds": t < 0}
    return {"eps_id": np.full(ROWS, number), "t": t, "obs": obs, "actions": t % 2, "rewards": t * 1.0, **ends}


def file_of(kind: str, number: int, width: int) -> bytes:
    """An episode of `ROWS` steps, by rlio's names."""
    columns, stream = steps_of(number, width), io.BytesIO()
    listed = {name: values.tolist() for name, values in columns.items()}
    if kind == "parquet":
        pq.write_table(pa.table(listed), stream)
    elif kind == "feather":
        feather.write_feather(pa.table(listed), stream, compression="uncompressed")
    elif kind == "npz":
        np.savez(stream, **columns)
    elif kind == "hdf5":
        with pytest.importorskip("h5py").File(stream, "w") as file:
            file.update(columns)
    elif kind == "csv":
        listed["obs"] = [values[0] for values in listed["obs"]]
        csv.write_csv(pa.table(listed), stream)
    else:
        stream.write(json.dumps({"type": "SampleBatch", **listed}).encode() + b"\n")
    return stream.getvalue()


KINDS = ["parquet", "feather", "npz", "hdf5", "csv", "json"]


def files_of(kind: str, *, width: int = 3) -> str:
    """A folder in memory of `FILES` files, each with an episode."""
    path = uuid.uuid4().hex
    for number in range(FILES):
        MemoryFileSystem().pipe_file(f"/{path}/data/f-{number}.{kind}", file_of(kind, number, width))
    return path


def opened_files(path: str, given: dict[str, Any]) -> Any:
    how: dict[str, Any] = {"shuffle": False, "cache": "none", "epochs": 2, "batch_size": 5}
    return rlio.read(f"faulty:///{path}/data", storage_options=given, **how)


def read_steps(reader: Any) -> list[tuple[int, int]]:
    """Episode and number of every step; a call that failed because the store did is made again."""
    steps: list[tuple[int, int]] = []
    for _ in range(10_000):
        try:
            batch = reader.sample()
        except StoreError:
            continue
        except EndOfData:
            return steps
        steps += zip(batch["eps_id"].tolist(), batch["t"].tolist(), strict=True)
    raise AssertionError("no end")


ALL_STEPS = [(number, t) for number in range(FILES) for t in range(ROWS)] * 2


#: 1,035 seeds in all, which take hours; of HDF5, which takes longest, fewer.
SEEDS = [
    *((kind, range(1)) for kind in KINDS[:3]),
    *further(*((kind, range(int(number < 3), 5)) for number, kind in enumerate(KINDS))),
    *(
        pytest.param(kind, range(n, n + 33), marks=pytest.mark.soak)
        for kind in KINDS
        for n in range(2, 3 if kind == "hdf5" else 200, 33)
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "seeds"), SEEDS)
def test_files_of_others_whose_requests_fail_or_are_late_give_the_same_rows(kind: str, seeds: range) -> None:
    path = files_of(kind)
    for seed in seeds:
        # Opening reads the files, and raises; so faults begin later.
        switch: list[Callable[[Call], Fault | None]] = [no_fault]
        with opened_files(path, options(lambda call: switch[-1](call))) as reader:  # noqa: B023
            # Short episodes are read together: a call fails if one of their files does.
            switch.append(faults(seed, (0.0, 0.02, 0.1)))
            assert read_steps(reader) == ALL_STEPS


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_others_are_fetched_side_by_side(kind: str) -> None:
    path, watch = files_of(kind), Watch()
    with opened_files(path, options(watch)) as reader:
        assert 8 < watch.most <= REQUESTS + 1  # Opening looks into each.
        watch.most = 0
        assert read_steps(reader) == ALL_STEPS
        # Tables of so few rows stay decoded.
        assert watch.most == 0 if kind in ("feather", "csv") else 8 < watch.most <= REQUESTS + 1


@pytest.mark.further
@pytest.mark.parametrize("kind", ["parquet", *further("feather", "npz", "hdf5", "csv", "json")])
@pytest.mark.parametrize("closes", [True, False])
def test_a_reader_of_files_that_is_left_in_the_middle_keeps_no_thread_and_no_memory(
    kind: str, closes: bool
) -> None:
    path = files_of(kind, width=1 if kind == "csv" else 4000)

    def read_begin() -> Any:
        with requests_of_threads() as requests:
            reader = opened_files(path, options(no_fault))  # Tables of so few rows stay decoded.
            for _ in range(4):  # So far that files are fetched ahead.
                reader.sample()
        assert requests
        if closes:
            reader.close()
            return reader  # It has nothing, although it is still there.
        return None

    read_begin()
    tracemalloc.start()
    try:
        before = traced()
        kept_reader = read_begin()
        wait_until(lambda: not request_threads())
        # A file has 220 KB, and 20 of them are fetched ahead.
        wait_until(lambda: traced() - before < 1 << 20)
        del kept_reader
    finally:
        tracemalloc.stop()


@pytest.mark.further
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("kind", ["npz", *further("parquet", "json")])
def test_a_forked_child_goes_on_with_files_of_its_own(kind: str) -> None:
    path, numbers = files_of(kind), itertools.count()

    def choose(call: Call) -> Fault | None:
        return "slow" if reads_shard(call) and 4 < next(numbers) < 9 else None

    switch: list[Callable[[Call], Fault | None]] = [no_fault]
    with opened_files(path, options(lambda call: switch[-1](call), delay=2.0)) as reader:
        switch.append(choose)
        begun = [*zip(*(reader.sample()[name].tolist() for name in ("eps_id",)), strict=True)]
        count = len(begun)

        def act() -> None:
            assert read_steps(reader) == ALL_STEPS[count:]

        assert wait_for(fork(act), seconds=DEADLINE) == 0
        act()


def listed_files(path: str, given: dict[str, Any]) -> list[InputFile]:
    return expand_inputs(f"faulty:///{path}/data", storage_options=given)


def test_a_file_that_was_replaced_or_removed_after_the_listing_is_read_as_it_is() -> None:
    path, store = files_of("json"), MemoryFileSystem()
    files = listed_files(path, options(no_fault))
    opened = InputFiles(files)
    grown, cut, gone = (f"/{path}/data/f-{number}.json" for number in (5, 6, 7))
    store.pipe_file(grown, store.cat_file(grown) + b"more")
    store.pipe_file(cut, b"less")
    store.rm_file(gone)
    for number, file in enumerate(files):
        if number == 7:
            with pytest.raises(DataNotFound, match="gone since it was found"):
                opened.open(number)
            continue
        with opened.open(number) as stream:
            assert stream.read() == store.cat_file(file.path)
    opened.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_a_file_that_is_mended_after_an_error_is_read_by_the_next_call(kind: str) -> None:
    path, store = files_of(kind), MemoryFileSystem()
    name = f"/{path}/data/f-5.{kind}"
    intact = store.cat_file(name)
    with opened_files(path, options(no_fault)) as reader:
        damaged = bytearray(intact)
        damaged[10:-10] = b"?" * len(damaged[10:-10])
        store.pipe_file(name, bytes(damaged))
        with pytest.raises(CorruptData):  # noqa: PT012
            for _ in range(20):
                reader.sample()
        store.pipe_file(name, intact)
        state = reader.state_dict()
        steps = read_steps(reader)
    assert steps == ALL_STEPS[-len(steps) :]
    with opened_files(path, options(no_fault)) as again:
        again.load_state_dict(state)
        assert read_steps(again) == steps


def test_a_file_that_is_opened_again_is_fetched_again() -> None:
    path, store = files_of("json"), MemoryFileSystem()
    opened = InputFiles(listed_files(path, options(no_fault)))
    for number in range(4):
        opened.open(number).close()
    store.pipe_file(f"/{path}/data/f-3.json", b"mended")
    with opened.open(3) as stream:
        assert stream.read() == b"mended"
    with opened.open(4) as stream:
        assert stream.read() == store.cat_file(f"/{path}/data/f-4.json")


def test_files_that_are_opened_out_of_turn_request_nothing_else() -> None:
    path = files_of("json")
    calls: list[str] = []

    def choose(call: Call) -> Fault | None:
        calls.append(call.path)
        return None

    files = listed_files(path, options(choose))
    opened = InputFiles(files)
    wait_until(lambda: not request_threads())
    for number in (3, 9, 2, 17):
        calls.clear()
        with opened.open(number) as stream:
            stream.read()
        assert calls == [files[number].path]
    assert not request_threads()
    for number in (18, 19):  # In turn: those after them are fetched ahead.
        opened.open(number).close()
    wait_until(lambda: len(set(calls)) == FILES - 17)
    opened.open(2).close()
    assert opened._plan is None


def test_a_large_file_is_not_fetched_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.input_files._WHOLE_BYTES", 100)
    path = files_of("json")
    wait_until(lambda: not request_threads())
    opened = InputFiles(listed_files(path, options(no_fault)))
    for number in range(4):
        with opened.open(number) as stream:
            assert stream.read(5) == b'{"typ'
    assert not request_threads()


def test_footers_of_large_parquet_files_are_fetched_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.storage.input_files._WHOLE_BYTES", 100)
    path, watch = files_of("parquet", width=2000), Watch("cat_file")
    opened = Watch("open")

    def choose(call: Call) -> Fault | None:
        return watch(call) or opened(call)

    with opened_files(path, options(choose)) as reader:
        # What opening reads: the footers, and the rows of the first file.
        assert 8 < watch.most <= REQUESTS + 1
        assert len(watch.seen) == FILES
        assert len(opened.seen) <= 2
        assert read_steps(reader) == ALL_STEPS
    assert len(opened.seen) == FILES


@pytest.mark.further
@pytest.mark.parametrize("seeds", [range(2), *further(range(2, 40))])
def test_large_parquet_files_whose_requests_fail_give_the_same_rows(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.storage.input_files._WHOLE_BYTES", 100)
    path = files_of("parquet", width=2000)
    for seed in seeds:
        switch: list[Callable[[Call], Fault | None]] = [no_fault]
        with opened_files(path, options(lambda call: switch[-1](call))) as reader:  # noqa: B023
            switch.append(faults(seed, (0.0, 0.02, 0.1)))
            assert read_steps(reader) == ALL_STEPS


def test_a_file_whose_end_was_fetched_reads_as_the_file_itself() -> None:
    path, store = uuid.uuid4().hex, MemoryFileSystem()
    data = np.random.default_rng(0).bytes(5 << 20)
    for number in range(3):
        store.pipe_file(f"/{path}/data/f-{number}.bin", data)
    opened = InputFiles(listed_files(path, options(no_fault)), tail=1000)
    draw = random.Random(0)
    for number in range(3):
        with opened.open(number) as stream:
            assert stream.seek(0, os.SEEK_END) == len(data)
            for _ in range(50):
                at, size = (
                    draw.choice((len(data) - draw.randrange(1, 3000), draw.randrange(len(data)))),
                    draw.randrange(2000),
                )
                stream.seek(at)
                assert stream.read(size) == data[at : at + size]
    stream = opened.open(2)
    for number in (1, 2):
        store.rm_file(f"/{path}/data/f-{number}.bin")
    with stream, pytest.raises(DataNotFound, match="gone since it was found"):
        stream.read(5)
    with opened.open(0), pytest.raises(DataNotFound, match="gone since it was found"):
        opened.open(1)


def test_local_files_are_opened_without_threads(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.json").write_bytes(file_of("json", number, 3))
    wait_until(lambda: not request_threads())
    with rlio.read(tmp_path, epochs=1, shuffle=False, cache="none") as reader:
        assert sum(map(len, reader)) == 4 * ROWS
    opened = InputFiles(expand_inputs(tmp_path))
    for number in range(4):
        opened.open(number).close()
    assert opened._plan is None
    assert not request_threads()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_reads_local_files_at_places_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "f.bin").write_bytes(data := np.random.default_rng(0).bytes(1 << 20))
    (file,) = expand_inputs(tmp_path)
    with open_input(file) as stream:
        assert stream.read(1000) == data[:1000]

        def act() -> None:
            assert stream.read() == data[1000:]

        assert wait_for(fork(act), seconds=DEADLINE) == 0
        act()
        assert stream.seek(-5, os.SEEK_END) == len(data) - 5
        assert stream.read() == data[-5:]
