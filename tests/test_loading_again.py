"""A store whose loading failed, because the object store did for a while, loads its rows at a later call."""

from __future__ import annotations

import gc
import io
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crash_child import fork, wait_for
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from threads import THREADS, in_a_thread, together

import rlio
import rlio.torch
from rlio import DatasetReader, ParquetWriter, ReplayStore, Roll, SampleBatch
from rlio.errors import ClosedError, CorruptData, EndOfData, StoreError
from rlio.opening import open_source
from rlio.replay.rows import StoreRows
from rlio.source.source import FileSource
from rlio.storage.filesystem import Retry
from rlio.testing import FaultyFileSystem
from rlio.testing.filesystem import Call, Fault

ROWS, SHARDS = 7, 12
EVERY = ROWS * SHARDS


class FaultyRanges(FaultyFileSystem):
    """Its files request ranges, as those of object stores do."""

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return AbstractBufferedFile(self, path, mode)


class Bucket:
    """Files in memory that cannot be read during an outage. It begins in a build, after some requests."""

    def __init__(self) -> None:
        self.root = f"faulty:///{uuid.uuid4().hex}/run"
        self.memory = self.root.replace("faulty://", "memory://")
        #: Requests until the outage, for each build to come; builds after these meet none.
        self.outages: list[int] = []
        #: What was raised. They are kept: what they refer to must not disturb what is loaded next.
        self.errors: list[StoreError] = []
        self.left: int | None = None
        self.options: dict[str, Any] = {"target": MemoryFileSystem(), "choose": self._choose}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """A build begins."""
        with self._lock:
            if self.outages:
                self.left = self.outages.pop(0)

    def mend(self) -> None:
        with self._lock:
            self.left = None

    def _choose(self, call: Call) -> Fault | None:
        rows = "/data/" in call.path or "others" in call.path
        if not rows or call.operation not in ("cat_file", "open"):
            return None
        with self._lock:
            if self.left is None:
                return None
            self.left -= 1
            return "before" if self.left < 0 else None


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    fsspec.register_implementation("faulty", FaultyRanges, clobber=True)
    monkeypatch.setattr(Retry, "wait", lambda self, attempt, path: None)
    # Shards are not fetched far ahead of their turn, so that an outage can come in the middle.
    monkeypatch.setattr("rlio.storage.parallel._RANGES", 2)
    for name, size in {
        "storage.input_files._WHOLE_BYTES": 100,
        "storage.input_files.GAP": 64,
        "storage.far_file.GAP": 64,
        "storage.far_file._PIECE": 1024,
        "storage.far_file._RUN_BYTES": 4096,
        "storage.far_file._KEPT_BYTES": 8192,
        "formats.tables.table.KEPT_BYTES": 0,
    }.items():
        monkeypatch.setattr(f"rlio.{name}", size)
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))
    made, build = Bucket(), ReplayStore._build

    def begun(self: ReplayStore, *args: Any) -> None:
        made.begin()
        build(self, *args)

    monkeypatch.setattr(ReplayStore, "_build", begun)
    with ParquetWriter(made.memory, roll=Roll(max_rows=ROWS, max_seconds=None)) as writer:
        t = np.arange(EVERY)
        writer.write(SampleBatch(t=t, eps_id=t // 9, obs=np.random.default_rng(0).random((EVERY, 3))))
    wide = pa.FixedSizeListArray.from_arrays(np.random.default_rng(1).random(EVERY * 256), 256)
    table = pa.table({"obs": wide, "rewards": np.arange(EVERY) / 3, "episode": t // 9})
    data = io.BytesIO()
    pq.write_table(table, data, row_group_size=ROWS)
    MemoryFileSystem().pipe_file(made.memory.replace("run", "others.parquet"), data.getvalue())
    yield made
    MemoryFileSystem.store.clear()


def epochs(bucket: Bucket) -> Any:
    """Making the reader waits for the rows, as it refuses an illegal draw."""
    store = kept(bucket)
    for _ in range(3):
        try:
            return store.epochs(batch_size=5, seed=0)
        except StoreError as error:
            bucket.errors.append(error)
            bucket.mend()
    raise AssertionError("no reader")


def kept(bucket: Bucket, **how: Any) -> ReplayStore:
    return ReplayStore.open(bucket.root, wait=False, storage_options=bucket.options, **how)


def read(bucket: Bucket, cache: str, **how: Any) -> DatasetReader:
    given: dict[str, Any] = {"shuffle": True, "epochs": 1, "seed": 3, "batch_size": 5, **how}
    return DatasetReader(bucket.root, cache=cache, storage_options=bucket.options, **given)  # type: ignore[arg-type]


MAPPING = rlio.Mapping({"obs": "obs", "rewards": "rewards"}, episode="episode")


def others(bucket: Bucket) -> Any:
    """A file of another library: it is opened for the store, and closed once the rows are loaded."""
    root = bucket.root.replace("run", "others.parquet")
    store = ReplayStore.open(root, mapping=MAPPING, wait=False, storage_options=bucket.options)
    return store.uniform(batch_size=5, seed=0)


def others_epochs(bucket: Bucket) -> Any:
    root = bucket.root.replace("run", "others.parquet")
    return rlio.read(
        root,
        mapping=MAPPING,
        cache="memory",
        batch_size=5,
        epochs=1,
        shuffle=True,
        seed=3,
        storage_options=bucket.options,
    )


def others_source(bucket: Bucket) -> FileSource:
    root = bucket.root.replace("run", "others.parquet")
    own = {"mapping": MAPPING, "format": None, "format_options": None, "spaces": None}
    how: dict[str, Any] = {"on_error": "raise", "limits": rlio.Limits()}
    source = open_source(root, at=None, own=own, storage_options=bucket.options, **how)
    assert isinstance(source, FileSource)
    return source


def tensors(bucket: Bucket) -> Any:
    return rlio.torch.ReplayDataset(
        bucket.root,
        batch_size=5,
        cache="memory",
        shuffle=True,
        epochs=1,
        seed=3,
        transform=lambda batch: batch,
        storage_options=bucket.options,
    ).loader()


#: Readers of stores, and whether they have one store, which is loaded at once.
READERS: dict[str, Callable[[Bucket], Any]] = {
    "uniform": lambda bucket: kept(bucket).uniform(batch_size=5, seed=0),
    "uniform, on disk": lambda bucket: kept(bucket, cache="disk").uniform(batch_size=5, seed=0),
    "prioritised": lambda bucket: kept(bucket).prioritised(batch_size=5, seed=0),
    "sequences": lambda bucket: kept(bucket).uniform(batch_size=5, seed=0, draw=rlio.Sequences(4)),
    "epochs": epochs,
    "a data set in memory": lambda bucket: read(bucket, "memory"),
    "a data set on disk": lambda bucket: read(bucket, "disk"),
    "a shuffle": lambda bucket: rlio.ShuffledInput(read(bucket, "memory"), 4, seed=0),
    "asynchronous": lambda bucket: rlio.AsyncInput(read(bucket, "memory")),
    "a mixture": lambda bucket: rlio.MixedInput(
        [(read(bucket, "memory"), 2), (read(bucket, "disk"), 1)], batch_size=6
    ),
    "a store of others' files": others,
    "others' files": others_epochs,
    "tensors": tensors,
}
OUTAGES = {"at first": [0], "in the middle": [3], "twice": [0, 3]}


def content(batch: Any) -> tuple[bytes, ...]:
    return tuple(batch[name].tobytes() for name in sorted(batch))


def batches(reader: Any, bucket: Bucket) -> list[Any]:
    """Ten batches; the outage is over after an error."""
    take = reader.sample if hasattr(reader, "sample") else lambda: next(reader)
    found: list[Any] = []
    while len(found) < 10:
        try:
            found.append(content(take()))
        except StoreError as error:
            bucket.errors.append(error)
            assert len(bucket.errors) < 10
            bucket.mend()
    return found


def builders() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name in ("rlio-build", "rlio-decode")]


@pytest.mark.each_value_once
@pytest.mark.parametrize("when", OUTAGES)
@pytest.mark.parametrize("name", READERS)
def test_a_store_is_loaded_by_a_call_after_an_outage(
    name: str, when: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first error was raised by every call: whoever trained had to begin again."""
    reader = READERS[name](bucket)
    expected = batches(reader, bucket)
    reader.close()
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "another"))
    bucket.outages = list(OUTAGES[when])
    reader = READERS[name](bucket)
    assert batches(reader, bucket) == expected
    assert not bucket.outages
    # The two stores of a mixture may meet one outage.
    assert len(bucket.errors) == len(OUTAGES[when]) or (name == "a mixture" and bucket.errors)
    assert all("call again" in str(error) for error in bucket.errors)
    reader.close()
    gc.collect()
    assert not builders()


class Builds:
    """Builds that fail while ``error`` is set, and otherwise wait for `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: BaseException | None = StoreError("the store is down; call again")
        self.go_on = threading.Event()
        self.begun = threading.Event()
        self.count = 0
        build = ReplayStore._build

        def waiting(store: ReplayStore, *args: Any) -> None:
            self.count += 1
            if self.error is not None:
                raise self.error
            self.begun.set()
            self.go_on.wait(60)
            build(store, *args)

        monkeypatch.setattr(ReplayStore, "_build", waiting)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, bucket: Bucket) -> Iterator[Builds]:
    made = Builds(monkeypatch)
    yield made
    made.go_on.set()


def failed(store: ReplayStore) -> ReplayStore:
    with pytest.raises(StoreError):
        store.wait()
    return store


def test_nothing_is_loaded_before_a_call_has_raised_the_error(bucket: Bucket, builds: Builds) -> None:
    """A call that finds a failure does not wait for another build, and properties begin none."""
    with kept(bucket) as store:
        while not store.ready:
            pass
        builds.error = None
        reader = store.uniform(batch_size=5, seed=0)
        with pytest.raises(StoreError):
            reader.sample()
        assert store.wait_ended()
        assert (store.ready, builds.count) == (True, 1)
        assert not store.wait(0.01)
        assert (store.ready, builds.count) == (False, 2)
        assert not store.wait(0.01)
        builds.go_on.set()
        assert reader.sample().count == 5
        assert (len(store), store.ready, builds.count) == (EVERY, True, 2)


@pytest.mark.parametrize("error", [CorruptData("damage"), EndOfData("the end"), ValueError("a bug")])
def test_an_error_that_is_not_the_object_stores_is_raised_for_good(
    bucket: Bucket, builds: Builds, error: Exception
) -> None:
    builds.error = error
    with kept(bucket) as store:
        for _ in range(3):
            with pytest.raises(type(error)):
                store.wait()
        assert builds.count == 1


def test_threads_that_call_after_an_error_share_one_build(bucket: Bucket, builds: Builds) -> None:
    with failed(kept(bucket)) as store:
        builds.error = None
        builds.go_on.set()
        calls = [store.wait, store.__len__, store.uniform(seed=0, batch_size=3).sample]
        results = together(*calls * (THREADS // 2))
        assert not [result for result in results if isinstance(result, BaseException)]
        assert builds.count == 2


def test_a_thread_that_waits_takes_the_error_or_waits_for_the_next_build(
    bucket: Bucket, builds: Builds
) -> None:
    """A thread that woke late took the second build, which had not ended, for the end of the first."""
    with kept(bucket) as store:

        def persistent() -> int:
            for _ in range(1000):
                try:
                    return len(store)
                except StoreError:
                    builds.error = None if builds.count > 20 else builds.error
            raise AssertionError("no rows")

        builds.go_on.set()
        assert together(*[persistent] * THREADS) == [EVERY] * THREADS


def test_a_store_that_is_closed_after_an_error_is_not_loaded(bucket: Bucket, builds: Builds) -> None:
    store = failed(kept(bucket))
    builds.error = None
    store.close()
    for call in (store.wait, store.__len__, store.uniform(seed=0).sample):
        with pytest.raises(ClosedError):
            call()
    assert builds.count == 1


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_closing_ends_a_store_that_is_loaded_again(bucket: Bucket, builds: Builds, cache: str) -> None:
    reader = read(bucket, cache)
    with pytest.raises(StoreError):
        reader.sample()
    builds.error = None
    waiting = in_a_thread(reader.sample)
    assert builds.begun.wait(60)
    closing = in_a_thread(reader.close)
    assert isinstance(waiting.result(), ClosedError)
    assert closing.is_running(0.05)
    builds.go_on.set()
    assert closing.result() is None
    assert not builders()


@pytest.mark.parametrize("end", ["loaded", "damaged", "closed", "not waited for", "forked"])
def test_the_files_stay_open_until_the_rows_are_loaded_or_given_up(
    bucket: Bucket, builds: Builds, end: str
) -> None:
    source = others_source(bucket)
    closed: list[None] = []
    builds.go_on.set()
    how: dict[str, Any] = {"then": lambda: closed.append(None)}
    if end == "not waited for":
        with pytest.raises(StoreError):
            ReplayStore.of(source, **how)
        assert len(closed) == 1
        return
    with failed(ReplayStore.of(source, wait=False, **how)) as store:
        assert not closed
        builds.error = CorruptData("damage") if end == "damaged" else None
        if end == "loaded":
            assert len(store) == EVERY
        elif end == "damaged":
            with pytest.raises(CorruptData):
                store.wait()
        elif end == "forked":
            assert wait_for(fork(lambda: loads(store, EVERY))) == 0
            assert not closed
            assert len(store) == EVERY
        if end != "closed":
            assert len(closed) == 1
    assert len(closed) == 1


def loads(store: ReplayStore, rows: int) -> None:
    assert len(store) == rows
    store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("name", ["uniform", "uniform, on disk", "a data set in memory", "others' files"])
def test_a_fork_loads_what_its_parent_could_not(name: str, bucket: Bucket) -> None:
    reader = READERS[name](bucket)
    expected = batches(reader, bucket)
    reader.close()
    os.environ["RLIO_CACHE"] += "-2"
    bucket.outages = [0]
    reader = READERS[name](bucket)
    with pytest.raises(StoreError):
        reader.sample()
    bucket.mend()

    def child() -> None:
        assert batches(reader, bucket) == expected
        reader.close()

    assert wait_for(fork(child)) == 0
    assert batches(reader, bucket) == expected
    reader.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_while_a_store_is_loaded_again_says_that_its_builder_is_the_parents(
    bucket: Bucket, builds: Builds
) -> None:
    """The builder may be using the files, and hold their locks: the child does not close them."""
    closed: list[None] = []
    store = failed(ReplayStore.of(others_source(bucket), wait=False, then=lambda: closed.append(None)))
    builds.error = None
    assert not store.wait(0)

    def child() -> None:
        for _ in range(2):
            with pytest.raises(ClosedError, match="forked"):
                store.wait()
        store.close()
        assert not closed

    assert wait_for(fork(child)) == 0
    builds.go_on.set()
    assert len(store) == EVERY
    store.close()


def test_places_that_a_failed_build_found_damaged_are_not_counted(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard was missing, the store failed, and the shard was put back before the rows were loaded."""
    shards = sorted(path for path in MemoryFileSystem.store if f"{bucket.memory[9:]}/data/" in path)
    pieces = iter([StoreError("the store is down; call again")])
    plain = ReplayStore._read

    def partly(self: ReplayStore, given: Any, progress: Any) -> None:
        for error in pieces:
            given.damage.add(CorruptData("damage", uri=shards[1], record=0))
            raise error
        plain(self, given, progress)

    monkeypatch.setattr(ReplayStore, "_read", partly)
    with failed(kept(bucket, on_error="skip")) as store:
        assert (len(store), store.skipped, store.damage.count) == (EVERY, 0, 0)


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_rows_of_a_failed_build_are_freed_at_once(
    bucket: Bucket, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error referred to its frames, and so to the rows, which the next build loads beside them."""
    made: list[weakref.ref[StoreRows]] = []

    def recorded(*args: Any, **kwargs: Any) -> StoreRows:
        rows = StoreRows(*args, **kwargs)
        made.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(f"rlio.replay.{'store' if cache == 'memory' else 'cached'}.StoreRows", recorded)
    bucket.outages = [3]
    gc.collect()
    gc.disable()
    try:
        with kept(bucket, cache=cache) as store:
            with pytest.raises(StoreError) as _:
                store.wait()
            assert [rows() for rows in made] == [None]
            bucket.mend()
            assert len(store) == EVERY
    finally:
        gc.enable()
