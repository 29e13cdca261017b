"""A store that is down, slow or hangs for a while: writing goes on, and all arrives, in order, once."""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from further import first, further

from rlio import (
    DatasetReader,
    JsonWriter,
    ParquetWriter,
    Roll,
    SampleBatch,
    concat_samples,
    open_dataset,
)
from rlio.catalog.listing import list_shards
from rlio.catalog.markers import trim
from rlio.errors import CorruptData, LedgerError, OptionError, PublishError, SchemaConflict
from rlio.log.publisher import Publisher
from rlio.log.spool import Spool, find_logs
from rlio.storage.filesystem import Retry
from rlio.testing import FaultyFileSystem
from rlio.testing.filesystem import Call, Fault
from rlio.writers.recovery import recover

WRITERS = {"parquet": ParquetWriter, "json": JsonWriter}
kinds = pytest.mark.parametrize("kind", WRITERS)
#: Of both formats, `make test` runs the first: what is tested is alike in both.
first_kind = pytest.mark.parametrize("kind", first(1, WRITERS))
hows = pytest.mark.parametrize("how", ["down", "hangs"])
ROWS = 100


class Store:
    """An object store that is ``down`` (every put fails) or ``hangs`` (none returns) while that is set.

    With ``altogether`` that goes for every other call, too.
    """

    def __init__(self, folder: Path) -> None:
        self.down = False
        self.altogether = False
        self.hangs = threading.Event()
        self.mended = threading.Event()
        self.hung = 0  # Calls that were given up unanswered, after a minute.
        self.stored: list[str] = []
        self.root = f"outage:///{uuid.uuid4().hex}/run"
        self.options: dict[str, Any] = {"target": MemoryFileSystem(), "choose": self._choose}
        self.folder = folder / "spool"

    def _choose(self, call: Call) -> Fault | None:
        if call.operation != "pipe_file" and not self.altogether:
            return None
        if self.hangs.is_set():
            self.hung += not self.mended.wait(60)
        if self.down:
            return "before"
        if "/data/" in call.path and "_sealed" not in call.path:
            self.stored.append(call.path)
        return None

    def writer(self, kind: str, **options: Any) -> Any:
        spool = Spool(folder=self.folder, **{"sync": "never", **options.pop("spool", {})})
        options.setdefault("roll", Roll(max_rows=ROWS, max_seconds=None))
        return WRITERS[kind](self.root, spool=spool, storage_options=self.options, **options)

    def rows(self, **options: Any) -> list[int]:
        with DatasetReader(self.root, epochs=1, storage_options=self.options, **options) as reader:
            rows = [t for batch in reader for t in batch["t"].tolist()]
            self.skipped = reader.skipped
        return rows

    def fail(self, how: str, *, altogether: bool = True) -> None:
        self.mended.clear()
        self.altogether = altogether
        self.down = how == "down"
        if how == "hangs":
            self.hangs.set()

    def mend(self) -> None:
        self.down = False
        self.hangs.clear()
        self.mended.set()


class OutageFileSystem(FaultyFileSystem):
    protocol = "outage"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    fsspec.register_implementation("outage", OutageFileSystem, clobber=True)
    monkeypatch.setattr(Retry, "wait", lambda self, attempt, path: None)
    made = Store(tmp_path)
    yield made
    made.mend()
    MemoryFileSystem.store.clear()


def steps(first: int, rows: int = ROWS) -> SampleBatch:
    t = np.arange(first, first + rows)
    noise = np.random.default_rng(first).normal(size=(rows, 64)).astype(np.float32)
    return SampleBatch(t=t, obs=noise)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.few(1)
@pytest.mark.each_value_once
@kinds
@pytest.mark.parametrize("how", ["down", "hangs"])
def test_writing_goes_on_while_the_store_does_not_and_all_arrives_in_order_once(
    store: Store, kind: str, how: str
) -> None:
    writer = store.writer(kind)
    writer.write(steps(0))
    writer.flush()
    if how == "down":
        store.down = True
    else:
        store.hangs.set()
    shard = writer.bytes_published
    most = 0
    for number in range(1, 40):
        writer.write(steps(number * ROWS))
        most = max(most, writer._publisher.waiting_bytes)
    until(lambda: writer._publisher.waiting_bytes <= 3 * shard)
    # The backlog of 39 shards is on the disk: in memory are the one being stored and the one being made.
    assert most <= 6 * shard
    assert (writer.rows_received, writer._publisher.log.end, writer.rows_published) == (4000, 4000, 100)
    store.mend()
    writer.close()
    assert writer.rows_published == 4000
    assert store.rows() == list(range(4000))
    shards = [path.rpartition("/")[2] for path in store.stored if not path.rpartition("/")[2].startswith("_")]
    names = [int(name.split("-")[0]) for name in shards]
    assert names == [n * ROWS for n in range(40)], "in order, each once"
    assert find_logs(str(store.folder)) == []


@pytest.mark.few(2)
@kinds
@hows
def test_no_write_waits_for_a_store_not_even_the_first(store: Store, kind: str, how: str) -> None:
    """Whether its schema fits those of other writers is asked in the background."""
    writer = store.writer(kind)
    store.fail(how)
    writing = threading.Thread(target=lambda: [writer.write(steps(n * 10, 10)) for n in range(15)])
    writing.start()
    writing.join(60)
    assert not writing.is_alive()
    assert writer._publisher.received == writer._publisher.log.end == 150
    store.mend()
    writer.close()
    assert store.rows() == list(range(150))


@pytest.mark.each_value_once
@kinds
@hows
def test_a_store_that_is_away_when_a_writer_opens_gets_its_rows_once_it_is_back(
    store: Store, kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("new_writer._OPEN_SECONDS", "new_writer._CLAIM_SECONDS"):
        monkeypatch.setattr(f"rlio.log.{name}", 0.2)
    store.fail(how)
    writer = store.writer(kind)
    writer.write(steps(0))
    assert writer._publisher.log.end == ROWS
    store.mend()
    writer.close()
    assert store.rows() == list(range(ROWS)), "a root, with its header"
    assert find_logs(str(store.folder)) == []


@kinds
def test_a_writer_whose_rows_cannot_wait_or_whose_id_may_be_taken_needs_the_store_to_open(
    store: Store, kind: str
) -> None:
    writer = store.writer(kind, writer_id="mine")
    store.fail("down")
    with pytest.raises(PublishError, match=r"whether writer_id='mine' is free.*leave writer_id out"):
        store.writer(kind, writer_id="mine")
    with pytest.raises(PublishError, match="nothing can be stored there"):
        WRITERS[kind](store.root, spool=None, storage_options=store.options)
    store.mend()
    with pytest.raises(OptionError, match="used there already"):
        store.writer(kind, writer_id="mine")
    writer.close()


@pytest.mark.each_value_once
@kinds
@hows
def test_flush_and_close_end_in_an_outage_and_say_where_the_rows_are_and_what_stores_them(
    store: Store, kind: str, how: str
) -> None:
    writer = store.writer(kind, spool={"publish_seconds": 0.3})
    writer.write(steps(0))
    writer.write(steps(ROWS, 30))
    store.fail(how, altogether=False)
    log = find_logs(str(writer._publisher.log.path.rpartition("/")[0]))[0].path
    for act in (writer.flush, writer.close):
        with pytest.raises(PublishError, match="safe in the log") as caught:
            act()
        assert f"{log};" in str(caught.value)
        assert f"`rlio recover {store.root} --spool {store.folder}`" in str(caught.value)
    store.mend()
    writer.close()
    assert store.rows() == list(range(130))


def test_a_with_block_that_ends_in_an_outage_raises_and_leaves_the_rows_to_recovery(store: Store) -> None:
    def run() -> None:
        with store.writer("parquet", spool={"publish_seconds": 0.3}) as writer:
            writers.append(writer)
            writer.write(steps(0))
            store.fail("hangs", altogether=False)

    writers: list[Any] = []
    with pytest.raises(PublishError, match="safe in the log"):
        run()
    leave(writers[0])
    store.mend()
    report = recover(store.root, spool=store.folder, storage_options=store.options)
    assert report.is_clean
    assert store.rows() == list(range(ROWS))


def test_publish_seconds_is_a_time_or_none() -> None:
    with pytest.raises(OptionError, match=r"publish_seconds=0: expected seconds > 0, or None"):
        Spool(publish_seconds=0)
    assert Spool(publish_seconds=None).publish_seconds is None


def leave(writer: Any) -> None:
    """Leave a writer's log as a dead process does: locks gone, nothing closed."""
    writer._publisher.log._folder.release()
    writer._publisher._stopped = True
    writer._interrupted = True  # Nothing of it is to be stored when the interpreter exits.


@pytest.mark.few(1)
@kinds
def test_rows_that_do_not_fit_other_writers_end_the_writer_stay_in_its_log_and_spoil_no_root(
    store: Store, kind: str
) -> None:
    with store.writer("parquet") as first:
        first.write(steps(0))
    writer = store.writer(kind)
    other = SampleBatch(t=np.arange(ROWS), obs=np.zeros((ROWS, 3), np.float32))
    writer.write(other)  # The store is asked meanwhile.
    until(lambda: writer._publisher._conflict is not None)
    for act in (lambda: writer.write(other), writer.flush, writer.close):
        with pytest.raises(SchemaConflict, match=r"<f4 \(3,\).*stay in the log.*--conflicting") as caught:
            act()
        assert caught.value.column == "obs"
    assert store.rows() == list(range(ROWS)), "what was stored can be read"
    leave(writer)
    where = {"spool": store.folder, "storage_options": store.options}
    (log,) = recover(store.root, **where).logs
    assert log.outcome == "failed"
    assert "<f4 (3,)" in str(log.error)
    assert store.rows() == list(range(ROWS))
    report = recover(store.root, conflicting=True, **where)
    assert (report.is_clean, report.rows) == (True, ROWS)
    assert sorted(store.rows(columns=["t"])) == sorted([*range(ROWS), *range(ROWS)])


def test_recovery_puts_back_a_header_that_was_lost_and_counts_only_what_it_stored(store: Store) -> None:
    writer = store.writer("parquet")
    writer.write(steps(0))
    writer.flush()
    store.down = True
    for number in range(1, 5):
        writer.write(steps(number * ROWS))
    publisher = writer._publisher
    until(lambda: len(publisher._queue) == 4)
    # Of the third shard the answer was lost: it is stored, and in the log.
    name, shard = publisher._queue[1]
    made = shard.remake(publisher.log.frames(name.first, name.end))
    leave(writer)
    store.mend()
    fs = store.options["target"]
    folder = store.root.removeprefix("outage://")
    fs.pipe_file(f"{folder}/data/{writer.writer_id}/{name.format()}", bytes(made.data))
    fs.rm_file(f"{folder}/_rlio.json")
    report = recover(store.root, spool=store.folder, storage_options=store.options)
    assert (report.is_clean, report.rows) == (True, 3 * ROWS)
    assert store.rows() == list(range(5 * ROWS))


@pytest.mark.further
@first_kind
def test_a_store_that_hangs_adds_no_pause_to_write(store: Store, kind: str) -> None:
    """The first shard is waited for, in the background; those behind it go to the disk."""
    writer = store.writer(kind)
    writer.write(steps(0))
    writer.flush()
    store.hangs.set()
    pauses = []
    for number in range(10, 310):
        begun = time.perf_counter()
        writer.write(steps(number * 10, 10))
        pauses.append(time.perf_counter() - begun)
    assert store.hung == 0
    assert sum(pauses) < 5, "30 shards, none of which is waited for"
    assert sorted(pauses)[int(0.9 * len(pauses))] < 0.1
    store.mend()
    writer.close()
    assert store.rows() == list(range(3100))


@pytest.mark.few(1)
@kinds
def test_a_full_spool_makes_write_wait_and_then_raise_and_nothing_of_it_is_taken(
    store: Store, kind: str
) -> None:
    writer = store.writer(kind, spool={"max_bytes": 600_000, "block_seconds": 0.2})
    store.down = True
    taken = 0
    with pytest.raises(PublishError, match=r"600000 allowed, and 0\.2 s brought no room") as caught:  # noqa: PT012
        for _ in range(200):
            writer.write(steps(taken))
            taken += ROWS
    assert 5 * ROWS < taken < 100 * ROWS
    assert writer._publisher.received == writer._publisher.log.end == taken
    assert 0.2 <= writer.seconds_waited < 10
    assert str(store.folder) in str(caught.value)
    with pytest.raises(PublishError, match="no room"):
        writer.write(steps(taken))
    store.mend()
    writer.flush()
    writer.write(steps(taken))
    writer.close()
    assert store.rows() == list(range(taken + ROWS))


@first_kind
def test_a_write_that_waits_for_room_goes_on_as_soon_as_the_store_is_back(store: Store, kind: str) -> None:
    writer = store.writer(kind, spool={"max_bytes": 300_000, "block_seconds": 100})
    store.down = True
    log = writer._publisher.log
    with pytest.MonkeyPatch.context() as patch:
        wait_for_room = log.wait_for_room

        def mended_soon() -> None:
            threading.Timer(0.1, store.mend).start()
            wait_for_room()

        patch.setattr(log, "wait_for_room", mended_soon)
        for number in range(40):
            writer.write(steps(number * ROWS))
    assert 0 < writer.seconds_waited < 60
    writer.close()
    assert store.rows() == list(range(40 * ROWS))


@pytest.mark.few(1)
@kinds
def test_a_process_that_dies_in_an_outage_leaves_rows_that_recovery_stores_in_order_once(
    store: Store, kind: str
) -> None:
    writer = store.writer(kind)
    writer.write(steps(0))
    writer.flush()
    store.down = True
    for number in range(1, 8):
        writer.write(steps(number * 70, 70) if number > 1 else steps(100, 40))
    until(lambda: writer._publisher.waiting_bytes == 0 or writer._publisher.log.bytes > 0)
    leave(writer)
    assert recover(store.root, spool=store.folder, storage_options=store.options).is_clean is False
    store.mend()
    report = recover(store.root, spool=store.folder, storage_options=store.options)
    assert report.is_clean
    assert [log.outcome for log in report.logs] == ["recovered"]
    assert store.rows() == [*range(140), *range(140, 560)]


def test_somebody_who_removes_the_log_stops_no_publishing(store: Store) -> None:
    writer = store.writer("parquet")
    writer.write(steps(0))
    writer.write(steps(ROWS, 50))
    until(lambda: writer.rows_published == ROWS)
    shutil.rmtree(store.folder)
    writer.write(steps(150, 50))  # Into the open file, which has no name any more.
    writer.flush()
    assert store.rows() == list(range(2 * ROWS))
    with pytest.raises(PublishError, match="log could not be opened"):
        writer.write(steps(2 * ROWS))
    writer.close()
    assert store.rows() == list(range(2 * ROWS))


def test_a_seal_that_cannot_be_stored_is_an_error_and_recovery_stores_it(store: Store) -> None:
    writer = store.writer("json")
    writer.write(steps(0))
    writer.flush()
    store.down = True
    with pytest.raises(PublishError, match="could not be stored"):
        writer.close()
    store.mend()
    report = recover(store.root, spool=store.folder, storage_options=store.options)
    assert report.is_clean
    assert report.rows == 0
    storage = open_dataset(store.root, storage_options=store.options).storage
    assert list(list_shards(storage).sealed.values()) == [ROWS]


def test_logs_of_two_servers_that_have_a_bucket_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    from rlio.log.spool import spool_of
    from rlio.storage.filesystem import Storage

    def where(endpoint: str, key: str) -> str | None:
        options = {"endpoint_url": endpoint, "key": key, "secret": "s"}
        return spool_of(Storage.open("s3://bucket/run", storage_options=options), Spool(folder=tmp_path))

    pytest.importorskip("s3fs")
    assert where("http://a:9000", "k") != where("http://b:9000", "k")
    assert where("http://a:9000", "k") == where("http://a:9000", "another key")


# ---- stores that come and go ----


class Weather:
    """A store that is up for some puts, down for some, and fails at times while it is up: all by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._left = 0
        self._up = True
        self.calm = True

    def choose(self, call: Call) -> Fault | None:
        if call.operation != "pipe_file" or self.calm:
            return None
        with self._lock:
            if not self._left:
                self._up, self._left = not self._up, self._random.randrange(1, 40)
            self._left -= 1
            faults: list[Fault | None] = ["after", "torn", "before", *[None] * 5]
            return self._random.choice(faults) if self._up else "before"


def drawn_rows(who: int, first: int, rows: int) -> SampleBatch:
    """Rows of which each has 32 bytes of its own."""
    obs = np.random.default_rng([who, first]).normal(size=(rows, 8)).astype(np.float32)
    return SampleBatch(who=np.full(rows, who), t=np.arange(first, first + rows), obs=obs)


def run_through_outages(folder: Path, seed: int) -> None:
    """Writers of one process write through outages; then every byte is compared with what they were given."""
    fsspec.register_implementation("outage", OutageFileSystem, clobber=True)
    weather = Weather(seed)
    root = f"outage:///{uuid.uuid4().hex}/run"
    options = {"target": MemoryFileSystem(), "choose": weather.choose}
    # Most often those that share memory, and shards that are ended by their rows: they end soonest.
    makers: list[Any] = [ParquetWriter, ParquetWriter, JsonWriter if seed % 4 == 3 else ParquetWriter]
    roll = Roll(max_bytes=1500, max_seconds=None) if seed % 4 == 2 else Roll(max_rows=12, max_seconds=None)
    spool = Spool(folder=folder, sync="never")
    writers = [make(root, roll=roll, spool=spool, storage_options=options) for make in makers]
    given: list[list[SampleBatch]] = [[] for _ in writers]

    def write(who: int) -> None:
        draw, first = random.Random(f"{seed} {who}"), 0
        for _ in range(draw.randrange(30, 80)):
            batch = drawn_rows(who, first, draw.randrange(1, 12))
            writers[who].write(batch)
            given[who].append(batch)
            first += len(batch)
            if draw.random() < 0.1:
                with contextlib.suppress(PublishError):
                    writers[who].flush()
            if draw.random() < 0.3:
                time.sleep(0.002)  # Time for the store to answer.

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Retry, "wait", lambda self, attempt, path: None)
        patch.setattr("rlio.log.publisher._FIRST_DELAY", 0.002)
        patch.setattr("rlio.log.publisher._MAX_DELAY", 0.01)
        patch.setattr("rlio.log.publisher._PATIENCE", 0.01)
        weather.calm = False
        with ThreadPoolExecutor(len(writers)) as pool:
            list(pool.map(write, range(len(writers))))
        weather.calm = True
        for writer in writers:
            writer.close()
    with DatasetReader(root, epochs=1, batch_size=10_000, storage_options=options) as reader:
        (found,) = reader
    for who, batches in enumerate(given):
        own, expected = found["who"] == who, concat_samples(batches)
        assert found["t"][own].tolist() == expected["t"].tolist(), (seed, who)
        assert found["obs"][own].tobytes() == expected["obs"].tobytes(), (seed, who)
    assert len(found) == sum(map(len, [batch for batches in given for batch in batches]))
    assert find_logs(str(folder)) == []


@pytest.mark.further
@pytest.mark.parametrize("seeds", [range(1), *further(range(1, 4), range(4, 8))])
def test_no_byte_is_lost_or_changed_by_stores_that_come_and_go(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        run_through_outages(tmp_path / str(seed), seed)


@pytest.mark.soak
def test_no_byte_is_lost_or_changed_by_two_hundred_stores_that_come_and_go(tmp_path: Path) -> None:
    for seed in range(8, 200):
        run_through_outages(tmp_path / str(seed), seed)


# ---- counts ----


@kinds
def test_a_loss_and_a_duplicate_are_errors_of_close(store: Store, kind: str, monkeypatch: Any) -> None:
    for planted in (-1, +1):
        writer = store.writer(kind)
        writer.write(steps(0))
        submit = Publisher.submit

        def miscount(self: Publisher, shard: Any, submit: Any = submit, planted: int = planted) -> None:
            submit(self, shard)
            self.rows_published += planted

        with monkeypatch.context() as patch:
            patch.setattr(Publisher, "submit", miscount)
            writer.flush()
        with pytest.raises(LedgerError):
            writer.close()
        writer._publisher.close(seal_at=None)


def test_a_row_that_was_logged_twice_is_an_error_of_close(store: Store) -> None:
    writer = store.writer("json")
    writer.write(steps(0))
    writer._publisher.log.end += 1
    with pytest.raises(LedgerError):
        writer.close()
    writer._publisher.close(seal_at=None)


@pytest.mark.few(1)
@kinds
def test_over_a_whole_run_the_counts_of_writers_and_readers_agree(store: Store, kind: str) -> None:
    """Rolls, a writer that dies, its recovery, and a reader that skips a shard that was lost."""
    received = 0
    first = store.writer(kind)
    for number in range(5):
        first.write(steps(number * 70, 70))
    first.close()
    assert first.rows_published == first.rows_received
    received += first.rows_received
    dead = store.writer(kind)
    dead.write(steps(0, 130))
    until(lambda: dead.rows_published == ROWS)
    published = dead.rows_published
    dead._interrupted = True
    dead._publisher.log._folder.release()
    report = recover(store.root, spool=store.folder, storage_options=store.options)
    assert published + report.rows == dead._publisher.received == dead._publisher.log.end == 130
    received += 130
    assert (len(store.rows()), store.skipped) == (received, 0)
    storage = open_dataset(store.root, storage_options=store.options).storage
    shard = list_shards(storage).shards[first.writer_id][1]
    storage.remove(shard.path)
    assert len(store.rows(on_error="skip")) == received - shard.name.rows
    assert store.skipped == shard.name.rows
    with pytest.raises(CorruptData):
        store.rows()
    trim(storage, first.writer_id, shard.name.end)
    assert len(store.rows()) == received - shard.name.end
