"""A live writer's log: segments go once their rows are stored, and its bound holds."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_child import batch_of, rows_of
from crash_shim import Call, failing, intercepted

from rlio import JsonWriter, ParquetWriter, Roll, SampleBatch
from rlio.errors import PublishError
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.journal import Journal
from rlio.storage.names import ShardName
from rlio.storage.spool import LogFolder, Spool
from rlio.storage.wal import read_segment

_SCHEMA = Schema.of(SampleBatch(t=np.arange(3)))


def _journal(folder: Path, **options: Any) -> Journal:
    options.setdefault("sync", "never")
    log = LogFolder.create(str(folder / "w"), root="r", writer="w")
    return Journal(log, spool=Spool(**options), about={"kind": "test"})


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    found = _journal(tmp_path)
    yield found
    found.close(keep=True)


def _append(journal: Journal, *payloads: bytes) -> None:
    journal.append([([payload], 2) for payload in payloads], schema={"schema": "text"})


def _logged(folder: Path) -> list[tuple[int, bool, list[bytes]]]:
    """First row, whether a shard begins there, and payloads of each segment."""
    found = [read_segment(str(path)) for path in sorted((folder / "w").glob("*.wal"))]
    return [(one.first, one.header["begins_shard"], [frame.payload for frame in one.frames]) for one in found]


def test_a_cut_begins_a_segment_and_says_whether_a_shard_begins(tmp_path: Path, journal: Journal) -> None:
    _append(journal, b"a", b"b")
    journal.cut(begins_shard=False)
    _append(journal, b"c")
    journal.cut(begins_shard=True)
    journal.cut(begins_shard=False)
    _append(journal, b"d")
    assert _logged(tmp_path) == [(0, True, [b"a", b"b"]), (4, False, [b"c"]), (6, True, [b"d"])]
    assert journal.end == 8


def test_segments_go_once_all_their_rows_are_stored(tmp_path: Path, journal: Journal) -> None:
    for payload in (b"a", b"b", b"c"):
        _append(journal, payload)
        journal.cut(begins_shard=True)
    journal.release(3)
    assert [first for first, _, _ in _logged(tmp_path)] == [2, 4]
    journal.release(6)
    assert _logged(tmp_path) == []
    assert journal.bytes == 0
    _append(journal, b"d")
    assert [first for first, _, _ in _logged(tmp_path)] == [6]


def test_a_write_is_logged_whole_or_not_at_all(tmp_path: Path, journal: Journal) -> None:
    _append(journal, b"a")
    with (
        intercepted(failing(lambda name, number: name == "writev" and number > 1, errno.ENOSPC)),
        pytest.raises(PublishError, match="nothing of this write"),
    ):
        _append(journal, b"b" * 100, b"c" * 100)
    assert _logged(tmp_path) == [(0, True, [b"a"])]
    _append(journal, b"d", b"e")
    assert _logged(tmp_path) == [(0, True, [b"a", b"d", b"e"])]
    assert journal.end == 6


def test_where_a_frame_cannot_be_taken_back_the_log_goes_on_in_another_segment(
    tmp_path: Path, journal: Journal
) -> None:
    _append(journal, b"a")
    with (
        intercepted(failing(lambda name, number: name in ("writev", "ftruncate"), errno.ENOSPC)),
        pytest.raises(PublishError),
    ):
        _append(journal, b"b" * 100)
    _append(journal, b"c")
    assert _logged(tmp_path) == [(0, True, [b"a"]), (2, False, [b"c"])]


def test_a_segment_that_replaces_one_without_rows_begins_the_same_shard(tmp_path: Path) -> None:
    journal = _journal(tmp_path, sync="always")
    _append(journal, b"a")
    journal.cut(begins_shard=True)
    with (
        intercepted(failing(lambda name, number: name == "fdatasync", errno.EIO)),
        pytest.raises(PublishError, match="synced"),
    ):
        _append(journal, b"b")
    _append(journal, b"c")
    assert _logged(tmp_path) == [(0, True, [b"a"]), (2, True, [b"c"])]
    journal.close(keep=True)


@pytest.mark.parametrize("call", ["open", "fsync", "writev"])
def test_a_segment_that_cannot_be_begun_is_begun_by_the_next_write(tmp_path: Path, call: str) -> None:
    journal = _journal(tmp_path, sync="always")
    for broken in (lambda name: name == call, lambda name: name in (call, "unlink")):
        with (
            intercepted(failing(lambda name, number, broken=broken: broken(name), errno.EIO)),
            pytest.raises(PublishError),
        ):
            _append(journal, b"a")
    _append(journal, b"b")
    assert _logged(tmp_path) == [(0, True, [b"b"])]
    journal.close(keep=True)


def test_a_file_that_cannot_be_removed_stops_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with (
        ParquetWriter(root, roll=Roll(max_rows=4)) as writer,
        intercepted(failing(lambda name, number: name == "unlink", errno.EACCES)),
    ):
        for first in range(0, 40, 4):
            writer.write(batch_of(first, 4))
        writer.flush()
    assert rows_of(root) == list(range(40))
    assert not (root / "_wal").exists()


def test_rows_are_synced_while_nobody_writes(tmp_path: Path) -> None:
    synced = threading.Event()

    def handle(call: Call) -> Any:
        found = call.go()
        if call.name == "fdatasync":
            synced.set()
        return found

    with intercepted(handle):
        journal = _journal(tmp_path, sync="interval", sync_interval=0.02)
        _append(journal, b"a")
        assert synced.wait(20)
        journal.close(keep=True)


@pytest.mark.parametrize("kind", [ParquetWriter, JsonWriter])
def test_after_a_sync_that_failed_in_the_background_the_next_write_publishes(
    tmp_path: Path, kind: type[ParquetWriter] | type[JsonWriter]
) -> None:
    writer = kind(tmp_path, spool=Spool(sync_interval=0.01))
    with intercepted(failing(lambda name, number: name == "fdatasync", errno.EIO)):
        writer.write(batch_of(0, 3))
        until = time.monotonic() + 20
        while writer._log.journal is not None and writer._log.journal.failure is None:
            assert time.monotonic() < until
            time.sleep(0.002)
    writer.write(batch_of(3, 2))
    assert writer.rows_published >= 3
    assert writer._log.journal is not None
    assert writer._log.journal.failure is None
    writer.close()
    assert rows_of(tmp_path) == list(range(5))


def test_a_spilled_shard_is_whole_and_has_its_schema(tmp_path: Path, journal: Journal) -> None:
    name = ShardName(first=0, rows=2, size=5, crc32=1, footer_crc32=0, suffix="jsonl")
    path = journal.spill(name, memoryview(b"bytes"), schema=_SCHEMA)
    assert Path(path).read_bytes() == b"bytes"
    assert (tmp_path / "w" / f"schema-{_SCHEMA.hash}.json").read_text() == _SCHEMA.text
    assert journal.bytes == 5
    journal.unspill(path)
    assert journal.bytes == 0
    assert not Path(path).exists()


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_a_shard_that_cannot_be_spilled_leaves_nothing(tmp_path: Path, journal: Journal, call: str) -> None:
    name = ShardName(first=0, rows=2, size=5, crc32=1, footer_crc32=0, suffix="jsonl")
    journal.spill(name, memoryview(b"bytes"), schema=_SCHEMA)
    other = ShardName(first=2, rows=2, size=5, crc32=1, footer_crc32=0, suffix="jsonl")
    before = sorted(os.listdir(tmp_path / "w"))
    with (
        intercepted(failing(lambda called, number: called == call, errno.ENOSPC)),
        pytest.raises(OSError, match="No space"),
    ):
        journal.spill(other, memoryview(b"other"), schema=_SCHEMA)
    assert sorted(os.listdir(tmp_path / "w")) == before
    journal.spill(other, memoryview(b"other"), schema=_SCHEMA)


def test_a_full_log_waits_and_then_refuses_what_it_was_given_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is gone: the log fills to its bound; once the store is back all is there."""
    root, gone = tmp_path / "root", threading.Event()
    put = Storage.put

    def fail(self: Storage, path: str, data: bytes) -> None:
        if gone.is_set():
            raise PublishError("the store is gone")
        put(self, path, data)

    monkeypatch.setattr(Storage, "put", fail)
    monkeypatch.setattr("rlio.storage.shard_log.PendingFile", _no_file)
    monkeypatch.setattr("rlio.storage.publisher._FIRST_DELAY", 0.02)
    bound = Spool(max_bytes=30_000, block_seconds=0.2)
    with JsonWriter(root, spool=bound, roll=Roll(max_rows=50)) as writer:
        gone.set()
        taken, refusals = 0, list[str]()
        while len(refusals) < 2:
            try:
                writer.write(batch_of(taken, 50))
                taken += 50
            except PublishError as error:
                refusals.append(str(error))
        assert all("allowed" in refusal for refusal in refusals)
        assert 300 <= taken <= 1000
        assert writer.ledger.waited >= 0.4
        assert writer.ledger.received == writer.ledger.logged == taken
        gone.clear()
        writer.write(batch_of(taken, 50))
    assert rows_of(root) == list(range(taken + 50))


def _no_file(*args: Sequence[object]) -> None:
    raise OSError("no unfinished files: the store is remote")
