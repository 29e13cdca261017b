"""Shards are stored in order, the oldest first, again and again until they are stored."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from crash_shim import impatient

from rlio import ParquetWriter, SampleBatch
from rlio.errors import PublishError
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.journal import Journal
from rlio.storage.names import ShardName, schema_path
from rlio.storage.publisher import Publisher, WaitingShard
from rlio.storage.spool import LogFolder, Spool

_SCHEMA = Schema.of(SampleBatch(t=np.arange(3)))


class _Store:
    """Lets puts of shards through, or not, and notes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored: list[int] = []
        self.tried: list[int] = []
        self.fails = False
        self.opens = threading.Event()
        self.opens.set()
        put = Storage.put

        def shim(storage: Storage, path: str, data: bytes) -> None:
            name = ShardName.parse(path.rpartition("/")[2])
            if name is not None:
                self.tried.append(name.first)
                assert self.opens.wait(30)
                if self.fails:
                    raise PublishError("the store is gone")
            put(storage, path, data)
            if name is not None:
                self.stored.append(name.first)

        monkeypatch.setattr(Storage, "put", shim)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> _Store:
    return _Store(monkeypatch)


def _shard(first: int, released: list[int]) -> WaitingShard:
    data = f"shard {first}".encode()
    name = ShardName(
        first=first, rows=2, size=len(data), crc32=zlib.crc32(data), footer_crc32=0, suffix="jsonl"
    )
    return WaitingShard(name, _SCHEMA, memoryview(data), release=lambda: released.append(first))


def _publisher(root: Path, *, journal: bool = False) -> tuple[Publisher, Journal | None]:
    kept = None
    if journal:
        folder = LogFolder.create(str(root / "_wal" / "w"), root="r", writer="w")
        kept = Journal(folder, spool=Spool(sync="never"), about={})
    return Publisher(Storage.open(root), "w", kept), kept


def _wait(until: Callable[[], object], *, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_shards_are_stored_in_order_and_their_memory_is_given_back(tmp_path: Path, store: _Store) -> None:
    publisher, _ = _publisher(tmp_path)
    released: list[int] = []
    for first in range(0, 20, 2):
        publisher.submit(_shard(first, released))
    publisher.flush()
    assert store.stored == released == list(range(0, 20, 2))
    assert (publisher.rows_published, publisher.waiting_bytes) == (20, 0)
    publisher.stop()


def test_a_failure_is_told_to_whoever_flushes_and_nothing_overtakes(tmp_path: Path, store: _Store) -> None:
    publisher, _ = _publisher(tmp_path)
    store.fails = True
    with impatient():
        for first in (0, 2, 4):
            publisher.submit(_shard(first, []))
        for _ in range(2):
            with pytest.raises(PublishError, match="gone"):
                publisher.flush()
        assert set(store.tried) == {0}
        store.fails = False
        publisher.flush()
    assert store.stored == [0, 2, 4]
    publisher.stop()


def test_what_failed_is_tried_again_unasked_and_less_and_less_often(
    tmp_path: Path, store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.storage.publisher._FIRST_DELAY", 0.005)
    monkeypatch.setattr("rlio.storage.publisher._MAX_DELAY", 0.04)
    publisher, _ = _publisher(tmp_path)
    store.fails = True
    publisher.submit(_shard(0, []))
    _wait(lambda: len(store.tried) >= 5)
    assert publisher._delay == 0.04
    store.fails = False
    _wait(lambda: store.stored == [0])
    publisher.submit(_shard(2, []))
    _wait(lambda: store.stored == [0, 2])
    assert publisher._delay == 0.0
    publisher.stop()


def test_a_backlog_moves_into_the_log_and_memory_does_not_grow(tmp_path: Path, store: _Store) -> None:
    publisher, journal = _publisher(tmp_path, journal=True)
    assert journal is not None
    store.fails = True
    released: list[int] = []
    with impatient():
        for first in range(0, 12, 2):
            journal.append([([b"rows"], 2)], schema={})
            journal.cut(begins_shard=True)
            publisher.submit(_shard(first, released))
        _wait(lambda: publisher.waiting_bytes == 0)
        waiting = list((tmp_path / "_wal" / "w").glob("*.jsonl"))
        assert len(waiting) == 6
        # A shard in the log has taken the place of its rows.
        _wait(lambda: not list((tmp_path / "_wal" / "w").glob("*.wal")))
        assert sorted(released) == list(range(0, 12, 2))
        store.fails = False
        publisher.flush()
    assert store.stored == list(range(0, 12, 2))
    assert not list((tmp_path / "_wal" / "w").glob("*.jsonl"))
    publisher.stop()
    journal.close(keep=False)


def test_a_shard_that_was_damaged_in_the_log_is_never_stored(tmp_path: Path, store: _Store) -> None:
    publisher, journal = _publisher(tmp_path, journal=True)
    assert journal is not None
    store.fails = True
    with impatient():
        publisher.submit(_shard(0, []))
        _wait(lambda: publisher.waiting_bytes == 0)
        (waiting,) = (tmp_path / "_wal" / "w").glob("*.jsonl")
        waiting.write_bytes(b"shArd 0")
        store.fails = False
        with pytest.raises(ValueError, match="damaged"):
            publisher.flush()
    assert store.stored == []
    publisher.stop()
    journal.close(keep=True)


def test_a_store_that_hangs_holds_up_neither_flush_nor_stop(tmp_path: Path, store: _Store) -> None:
    publisher, _ = _publisher(tmp_path)
    store.opens.clear()
    with impatient():
        publisher.submit(_shard(0, []))
        publisher.submit(_shard(2, []))
        begun = time.monotonic()
        with pytest.raises(PublishError, match="4 rows within"):
            publisher.flush(0.05)
        publisher.wait(0.05)
        publisher.stop()
        assert time.monotonic() - begun < 10
    store.opens.set()
    _wait(lambda: publisher._thread is None or not publisher._thread.is_alive())
    assert store.stored == [0]


def test_a_flush_with_nothing_to_store_returns_at_once(tmp_path: Path) -> None:
    publisher, _ = _publisher(tmp_path)
    publisher.flush()
    publisher.stop()


def test_a_thread_that_dies_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in the background is an error of the next call, not a wait for ever."""

    def defect(self: Journal, row: int) -> None:
        raise TypeError("planted")

    writer = ParquetWriter(tmp_path)
    writer.write(SampleBatch(t=np.arange(3)))
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "release", defect)
        for act in (writer.flush, writer.flush):
            with pytest.raises(PublishError, match=r"has died.*planted"):
                act()


def test_a_schema_of_logged_rows_is_stored_before_the_first_shard_is_made(tmp_path: Path) -> None:
    writer = ParquetWriter(tmp_path)
    writer.write(SampleBatch(t=np.arange(3)))
    _wait(lambda: [*tmp_path.glob("_schema/*.json")])
    assert writer.rows_published == 0
    writer.close()
    assert writer.rows_published == 3


def test_a_schema_that_could_not_be_stored_early_is_stored_with_its_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    put = Storage.put

    def shim(storage: Storage, path: str, data: bytes) -> None:
        tried.append(path)
        if len(tried) == 1:
            raise PublishError("the store is gone")
        put(storage, path, data)

    monkeypatch.setattr(Storage, "put", shim)
    publisher, _ = _publisher(tmp_path)
    publisher.start()
    publisher.expect(_SCHEMA)
    _wait(lambda: tried)
    publisher.expect(_SCHEMA)  # With each write(); it is tried once.
    publisher.submit(_shard(0, []))
    publisher.flush()
    assert tried[0] == tried[1] == schema_path(_SCHEMA.hash)
    assert len(tried) == 3
    publisher.stop()
