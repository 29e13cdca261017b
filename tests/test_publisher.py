"""Shards are stored in order, the oldest first, again and again until they are stored."""

from __future__ import annotations

import errno
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from crash_shim import failing, impatient, intercepted

from rlio import ParquetWriter, SampleBatch
from rlio.catalog.commit import put_header
from rlio.catalog.names import ShardName, schema_path
from rlio.errors import CorruptData, LedgerError, PublishError
from rlio.log.log import Log
from rlio.log.publisher import NewShard, Publisher
from rlio.log.spool import LogFolder, Spool
from rlio.log.wal import Frame
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.writer import _written_writers

_SCHEMA = Schema.of(SampleBatch(t=np.arange(3)))


class _Store:
    """Lets puts of shards through, or not, and notes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored: list[int] = []
        self.tried: list[int] = []
        self.fails = False
        self.fails_from: int | None = None
        self.opens = threading.Event()
        self.opens.set()
        self.hanging = 0
        put = Storage.put

        def shim(storage: Storage, path: str, data: bytes) -> None:
            name = ShardName.parse(path.rpartition("/")[2])
            if name is not None:
                self.tried.append(name.first)
                self.hanging += 1
                opens = self.opens.wait(60)
                self.hanging -= 1
                assert opens
                if self.fails or (self.fails_from is not None and name.first >= self.fails_from):
                    raise PublishError("the store is gone")
            put(storage, path, data)
            if name is not None:
                self.stored.append(name.first)

        monkeypatch.setattr(Storage, "put", shim)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> _Store:
    return _Store(monkeypatch)


class _Data(bytearray):
    """Bytes of which it is seen when they are freed."""


def _submit(publisher: Publisher, first: int, released: list[int] | None = None) -> None:
    """Queue a shard of two rows."""
    publisher.submit(_made(first, [] if released is None else released))


def _made(
    first: int, released: list[int], remake: Callable[[Iterable[Frame]], NewShard] | None = None
) -> NewShard:
    data = _Data(f"shard {first}".encode())
    weakref.finalize(data, released.append, first)
    return NewShard(
        data=data,
        rows=2,
        suffix="jsonl",
        footer_crc32=0,
        schema=_SCHEMA,
        remake=remake,
    )


def _publisher(root: Path) -> Publisher:
    return Publisher(Storage.open(root), "w", has_root=False)


class _Logged:
    """A publisher with a log of shards of one frame each, and what was given back and made again."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "_wal" / "w"
        folder = LogFolder.create(str(self.folder), root="r", writer="w")
        self.log = Log(folder, spool=Spool(sync="never"))
        self.released: list[int] = []
        self.remade: list[int] = []
        self.publisher = Publisher(Storage.open(root), "w", log=self.log, has_root=False)

    def _remake(self, frames: Iterable[Frame]) -> NewShard:
        (frame,) = frames
        assert frame.payload == f"shard {frame.first}".encode()
        self.remade.append(frame.first)
        return _made(frame.first, self.released)

    def write(self, first: int) -> None:
        """Log two rows, and queue the shard of them."""
        self.log.append([([f"shard {first}".encode()], 2)], header={})
        self.log.cut(begins_shard=True)
        self.submit(first)

    def submit(self, first: int) -> None:
        """Queue a shard that can be made again."""
        self.publisher.submit(_made(first, self.released, lambda frames: self._remake(frames)))

    def segments(self) -> list[int]:
        """First rows of the log's segments."""
        return sorted(int(path.stem) for path in self.folder.glob("*.wal"))

    def close(self) -> None:
        self.publisher.close(seal_at=None)
        self.log.close(keep=False)


def _wait(until: Callable[[], object], *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_shards_are_stored_in_order_and_their_memory_is_given_back(tmp_path: Path, store: _Store) -> None:
    publisher = _publisher(tmp_path)
    released: list[int] = []
    for first in range(0, 20, 2):
        _submit(publisher, first, released)
    publisher.flush()
    assert store.stored == list(range(0, 20, 2))
    _wait(lambda: released == store.stored)
    assert (publisher.rows_published, publisher.waiting_bytes) == (20, 0)
    publisher.close(seal_at=None)


def test_a_failure_is_told_to_whoever_flushes_and_nothing_overtakes(tmp_path: Path, store: _Store) -> None:
    publisher = _publisher(tmp_path)
    store.fails = True
    with impatient():
        for first in (0, 2, 4):
            _submit(publisher, first)
        for _ in range(2):
            with pytest.raises(PublishError, match="gone"):
                publisher.flush()
        assert set(store.tried) == {0}
        store.fails = False
        publisher.flush()
    assert store.stored == [0, 2, 4]
    publisher.close(seal_at=None)


def test_what_failed_is_tried_again_unasked_and_less_and_less_often(
    tmp_path: Path, store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.log.publisher._FIRST_DELAY", 0.005)
    monkeypatch.setattr("rlio.log.publisher._MAX_DELAY", 0.04)
    publisher = _publisher(tmp_path)
    store.fails = True
    _submit(publisher, 0)
    _wait(lambda: len(store.tried) >= 5)
    assert publisher._delay == 0.04
    store.fails = False
    _wait(lambda: store.stored == [0])
    _submit(publisher, 2)
    _wait(lambda: store.stored == [0, 2])
    assert publisher._delay == 0.0
    publisher.close(seal_at=None)


def test_the_bytes_of_a_backlog_are_dropped_and_made_again_from_the_log(
    tmp_path: Path, store: _Store
) -> None:
    logged = _Logged(tmp_path)
    publisher = logged.publisher
    store.fails = True
    with impatient():
        for first in range(0, 12, 2):
            logged.write(first)
        _wait(lambda: publisher.waiting_bytes == len("shard 0"))
        # The first keeps its bytes, which are tried again; of the others the log has the rows.
        _wait(lambda: sorted(logged.released) == [2, 4, 6, 8, 10])
        assert logged.segments() == list(range(0, 12, 2))
        assert sorted(path.suffix for path in logged.folder.iterdir() if path.name != "owner") == [".wal"] * 6
        store.fails = False
        publisher.flush()
    assert store.stored == list(range(0, 12, 2))
    assert logged.remade == [2, 4, 6, 8, 10], "each once"
    _wait(lambda: sorted(logged.released) == sorted([*range(0, 12, 2), *range(2, 12, 2)]))
    assert logged.segments() == []
    assert publisher.rows_published == 12
    logged.close()


def test_a_shard_that_is_made_again_is_not_dropped_again_while_it_is_tried(
    tmp_path: Path, store: _Store
) -> None:
    logged = _Logged(tmp_path)
    store.fails = True
    with impatient():
        for first in (0, 2, 4):
            logged.write(first)
        _wait(lambda: logged.publisher.waiting_bytes == len("shard 0"))
        store.fails_from = 2
        store.fails = False
        for _ in range(3):
            with pytest.raises(PublishError, match="gone"):
                logged.publisher.flush()
        assert (store.stored, logged.remade) == ([0], [2])
        store.fails_from = None
        logged.publisher.flush()
    assert (store.stored, logged.remade) == ([0, 2, 4], [2, 4])
    logged.close()


def test_rows_that_were_damaged_in_the_log_are_never_stored(tmp_path: Path, store: _Store) -> None:
    logged = _Logged(tmp_path)
    store.fails = True
    with impatient():
        for first in (0, 2):
            logged.write(first)
        _wait(lambda: logged.publisher.waiting_bytes == len("shard 0"))
        segment = logged.folder / "000000000002.wal"
        segment.write_bytes(segment.read_bytes().replace(b"shard 2", b"shArd 2"))
        store.fails = False
        with pytest.raises(CorruptData):
            logged.publisher.flush()
    assert store.stored == [0]
    logged.publisher.close(seal_at=None)
    logged.log.close(keep=True)


def test_a_shard_that_is_not_the_same_when_it_is_made_again_is_never_stored(
    tmp_path: Path, store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = _Logged(tmp_path)
    monkeypatch.setattr(logged, "_remake", lambda frames: _made(9, logged.released))
    store.fails = True
    with impatient():
        for first in (0, 2):
            logged.write(first)
        _wait(lambda: logged.publisher.waiting_bytes == len("shard 0"))
        store.fails = False
        with pytest.raises(LedgerError):
            logged.publisher.flush()
    assert store.stored == [0]
    assert logged.segments() == [2], "its rows stay in the log"
    logged.publisher.close(seal_at=None)
    logged.log.close(keep=True)


@pytest.mark.parametrize("place", ["sync", "broken"])
def test_bytes_of_rows_that_the_log_may_not_hold_stay_in_memory(
    tmp_path: Path, store: _Store, place: str
) -> None:
    logged = _Logged(tmp_path)
    store.fails = True
    with impatient():
        logged.write(0)
        with intercepted(failing(lambda name, number: name == "fdatasync", errno.EIO)):
            if place == "broken":
                logged.log.append([([b"shard 2"], 2)], header={})
                with pytest.raises(PublishError):
                    logged.log.secure(4)
                assert logged.log.failure is not None
                logged.log.cut(begins_shard=True)
                logged.submit(2)
            else:
                logged.write(2)
            _wait(lambda: len(store.tried) > 5)
            assert logged.publisher.waiting_bytes == 2 * len("shard 0")
        store.fails = False
        logged.publisher.flush()
    assert (store.stored, logged.remade) == ([0, 2], [])
    _wait(lambda: sorted(logged.released) == [0, 2])
    logged.close()


def test_a_store_that_hangs_holds_up_neither_flush_nor_stop(tmp_path: Path, store: _Store) -> None:
    publisher = _publisher(tmp_path)
    store.opens.clear()
    with impatient():
        _submit(publisher, 0)
        _submit(publisher, 2)
        _wait(lambda: store.hanging)
        with pytest.raises(PublishError, match="4 rows within"):
            publisher.flush(0.05)
        publisher.wait(0.05)
        publisher.close(seal_at=None)
        assert store.hanging == 1, "it hangs for a minute, and was not waited for"
    store.opens.set()
    _wait(lambda: publisher._thread is None or not publisher._thread.is_alive())
    assert store.stored == [0]


def test_a_flush_with_nothing_to_store_returns_at_once(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path)
    publisher.flush()
    publisher.close(seal_at=None)


def test_a_thread_that_dies_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in the background is an error of the next call, not a wait for ever."""

    def defect(self: Log, row: int) -> None:
        raise TypeError("planted")

    writer = ParquetWriter(tmp_path)
    writer.write(SampleBatch(t=np.arange(3)))
    with monkeypatch.context() as patch:
        patch.setattr(Log, "release", defect)
        for act in (writer.flush, writer.flush):
            with pytest.raises(PublishError, match=r"has died.*planted.*after this process") as caught:
                act()
            assert "close() tries again" not in str(caught.value), "no thread is left that could"
    _written_writers.remove(writer)  # Nothing can close it.


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

    publisher = _publisher(tmp_path)
    put_header(publisher.storage)
    publisher._has_root = True
    monkeypatch.setattr(Storage, "put", shim)
    publisher.start()
    publisher.expect(_SCHEMA)
    _wait(lambda: tried)
    publisher.expect(_SCHEMA)  # With each write(); it is tried once.
    _submit(publisher, 0)
    publisher.flush()
    assert tried[0] == tried[1] == schema_path(_SCHEMA.hash)
    assert len(tried) == 3
    publisher.close(seal_at=None)
