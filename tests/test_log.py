"""A live writer's log: segments go once their rows are stored, and its bound holds."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from crash_child import batch_of, rows_of
from crash_shim import Call, failing, intercepted

from rlio import JsonWriter, ParquetWriter, Roll
from rlio.errors import CorruptData, PublishError
from rlio.log.log import Log
from rlio.log.spool import LogFolder, Spool
from rlio.log.wal import read_segment
from rlio.storage.filesystem import Storage


def _open(folder: Path, **options: Any) -> Log:
    options.setdefault("sync", "never")
    return Log(LogFolder.create(str(folder / "w"), root="r", writer="w"), spool=Spool(**options))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    found = _open(tmp_path)
    yield found
    found.close(keep=True)


def _append(log: Log, *payloads: bytes) -> None:
    log.append([([payload], 2) for payload in payloads], header={"kind": "test", "schema": "text"})


def _logged(folder: Path) -> list[tuple[int, bool, list[bytes]]]:
    """First row, whether a shard begins there, and payloads of each segment."""
    found = [read_segment(str(path)) for path in sorted((folder / "w").glob("*.wal"))]
    return [(one.first, one.header["begins_shard"], [frame.payload for frame in one.frames]) for one in found]


def test_a_cut_begins_a_segment_and_says_whether_a_shard_begins(tmp_path: Path, log: Log) -> None:
    _append(log, b"a", b"b")
    log.cut(begins_shard=False)
    _append(log, b"c")
    log.cut(begins_shard=True)
    log.cut(begins_shard=False)
    _append(log, b"d")
    assert _logged(tmp_path) == [(0, True, [b"a", b"b"]), (4, False, [b"c"]), (6, True, [b"d"])]
    assert log.end == 8


def test_segments_go_once_all_their_rows_are_stored(tmp_path: Path, log: Log) -> None:
    for payload in (b"a", b"b", b"c"):
        _append(log, payload)
        log.cut(begins_shard=True)
    log.release(3)
    assert [first for first, _, _ in _logged(tmp_path)] == [2, 4]
    log.release(6)
    assert _logged(tmp_path) == []
    assert log.bytes == 0
    _append(log, b"d")
    assert [first for first, _, _ in _logged(tmp_path)] == [6]


def test_a_write_is_logged_whole_or_not_at_all(tmp_path: Path, log: Log) -> None:
    _append(log, b"a")
    with (
        intercepted(failing(lambda name, number: name == "writev" and number > 1, errno.ENOSPC)),
        pytest.raises(PublishError, match="nothing of this write"),
    ):
        _append(log, b"b" * 100, b"c" * 100)
    assert _logged(tmp_path) == [(0, True, [b"a"])]
    _append(log, b"d", b"e")
    assert _logged(tmp_path) == [(0, True, [b"a", b"d", b"e"])]
    assert log.end == 6


def test_where_a_frame_cannot_be_taken_back_the_log_goes_on_in_another_segment(
    tmp_path: Path, log: Log
) -> None:
    _append(log, b"a")
    with (
        intercepted(failing(lambda name, number: name in ("writev", "ftruncate"), errno.ENOSPC)),
        pytest.raises(PublishError),
    ):
        _append(log, b"b" * 100)
    _append(log, b"c")
    assert _logged(tmp_path) == [(0, True, [b"a"]), (2, False, [b"c"])]


def test_a_segment_whose_first_write_failed_half_way_makes_way_for_another(tmp_path: Path, log: Log) -> None:
    """Both segments have one name: releasing the first must not remove the file of the second."""
    written: list[str] = []

    def fails(name: str, number: int) -> bool:
        written.extend([name] * (name == "writev"))
        return name == "ftruncate" or (name == "writev" and len(written) > 2)

    with intercepted(failing(fails, errno.ENOSPC)), pytest.raises(PublishError):
        _append(log, b"a", b"b")
    assert len(written) == 3, "the header, and a frame of two"
    _append(log, b"c")
    _append(log, b"d")
    log.release(2)
    assert _read(log, 2, 4) == [(2, b"d")]
    assert _logged(tmp_path) == [(0, True, [b"c", b"d"])]


def test_a_segment_that_replaces_one_without_rows_begins_the_same_shard(tmp_path: Path) -> None:
    log = _open(tmp_path, sync="always")
    _append(log, b"a")
    log.cut(begins_shard=True)
    with (
        intercepted(failing(lambda name, number: name == "fdatasync", errno.EIO)),
        pytest.raises(PublishError, match="synced"),
    ):
        _append(log, b"b")
    _append(log, b"c")
    assert _logged(tmp_path) == [(0, True, [b"a"]), (2, True, [b"c"])]
    log.close(keep=True)


@pytest.mark.parametrize("call", ["open", "fsync", "writev"])
def test_a_segment_that_cannot_be_begun_is_begun_by_the_next_write(tmp_path: Path, call: str) -> None:
    log = _open(tmp_path, sync="always")
    for broken in (lambda name: name == call, lambda name: name in (call, "unlink")):
        with (
            intercepted(failing(lambda name, number, broken=broken: broken(name), errno.EIO)),
            pytest.raises(PublishError),
        ):
            _append(log, b"a")
    _append(log, b"b")
    assert _logged(tmp_path) == [(0, True, [b"b"])]
    log.close(keep=True)


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
        log = _open(tmp_path, sync="interval", sync_interval=0.02)
        _append(log, b"a")
        assert synced.wait(60)
        log.close(keep=True)


@pytest.mark.parametrize("kind", [ParquetWriter, JsonWriter])
def test_after_a_sync_that_failed_in_the_background_the_next_write_publishes(
    tmp_path: Path, kind: type[ParquetWriter] | type[JsonWriter]
) -> None:
    writer = kind(tmp_path, spool=Spool(sync_interval=0.01))
    log = writer._publisher.log
    assert log is not None
    log.on_failure = lambda: None  # Else it is published at once, and the failure is over.
    with intercepted(failing(lambda name, number: name == "fdatasync", errno.EIO)):
        writer.write(batch_of(0, 3))
        _wait(lambda: log.failure is not None)
    assert writer.rows_published == 0
    writer.write(batch_of(3, 2))
    assert writer.rows_published >= 3
    assert log.failure is None
    writer.close()
    assert rows_of(tmp_path) == list(range(5))


@pytest.mark.parametrize("kind", [ParquetWriter, JsonWriter])
def test_after_a_sync_that_failed_in_the_background_rows_are_published_without_a_write(
    tmp_path: Path, kind: type[ParquetWriter] | type[JsonWriter]
) -> None:
    writer = kind(tmp_path, spool=Spool(sync_interval=0.01), roll=Roll(max_seconds=None))
    with intercepted(failing(lambda name, number: name == "fdatasync", errno.EIO)):
        writer.write(batch_of(0, 3))
        _wait(lambda: writer.rows_published == 3)
    writer.close()
    assert rows_of(tmp_path) == list(range(3))


def _wait(until: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end
        time.sleep(0.002)


def _read(log: Log, first: int, end: int) -> list[tuple[int, bytes]]:
    return [(frame.first, frame.payload) for frame in log.frames(first, end)]


def test_any_frames_are_read_again_across_segments_and_while_the_last_is_open(log: Log) -> None:
    payloads = [bytes([number]) * (1 + 900 * (number % 2)) for number in range(7)]
    for number, payload in enumerate(payloads):
        _append(log, payload)
        if number in (1, 4):
            log.cut(begins_shard=number == 1)
    whole = [(2 * number, payload) for number, payload in enumerate(payloads)]
    for first in range(7):
        for end in range(first, 8):
            assert _read(log, 2 * first, 2 * end) == whole[first:end]


def test_rows_that_were_never_acknowledged_are_not_read_again(log: Log) -> None:
    """A frame of a write() whose second frame failed, in a segment that could not be cut back."""
    _append(log, b"a")
    with (
        intercepted(
            failing(lambda name, number: name == "ftruncate" or (name == "writev" and number > 1), 28)
        ),
        pytest.raises(PublishError),
    ):
        _append(log, b"b", b"c" * 100)
    assert _read(log, 0, 2) == [(0, b"a")]
    _append(log, b"d")
    assert _read(log, 0, 4) == [(0, b"a"), (2, b"d")]


def test_damage_in_frames_that_are_not_wanted_leaves_the_others_readable(tmp_path: Path, log: Log) -> None:
    for payload in (b"a" * 50, b"b" * 50, b"c" * 50):
        _append(log, payload)
    path = tmp_path / "w" / "000000000000.wal"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"bbb", b"bxb", 1))
    assert _read(log, 0, 2) == [(0, b"a" * 50)]
    assert _read(log, 4, 6) == [(4, b"c" * 50)]
    byte = whole.index(b"rlw0", whole.index(b"aaa"))
    with pytest.raises(
        CorruptData, match=rf"before row 4 is damaged, at byte {byte} \[in .*000000000000\.wal"
    ):
        _read(log, 2, 4)


def test_frames_that_are_damaged_cut_off_or_gone_are_errors(tmp_path: Path, log: Log) -> None:
    for payload in (b"a" * 50, b"b" * 50, b"c" * 50):
        _append(log, payload)
        log.cut(begins_shard=True)
    path = tmp_path / "w" / "000000000002.wal"
    whole = path.read_bytes()
    for damaged in (whole.replace(b"bbb", b"bxb", 1), whole[:-1], b""):
        path.write_bytes(damaged)
        with pytest.raises(CorruptData):
            _read(log, 0, 6)
        with pytest.raises(CorruptData):
            _read(log, 2, 4)
        assert len(_read(log, 4, 6)) == 1
    path.write_bytes(whole)
    log.release(2)
    with pytest.raises(CorruptData):
        _read(log, 0, 6)
    with pytest.raises(CorruptData):
        _read(log, 4, 8)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        _read(log, 2, 6)


def test_rows_that_the_log_alone_will_hold_are_synced_and_leave_no_file_open(
    tmp_path: Path, log: Log
) -> None:
    def is_open(first: int) -> bool:
        path = str(tmp_path / "w" / f"{first:012d}.wal")
        return any(os.path.realpath(fd) == path for fd in Path("/proc/self/fd").iterdir())

    for payload in (b"a", b"b"):
        _append(log, payload)
        log.cut(begins_shard=True)
    _append(log, b"c")
    synced: list[str] = []

    def note(call: Call) -> Any:
        if call.name == "fdatasync":
            synced.append(os.readlink(f"/proc/self/fd/{call.args[0]}")[-5:])
        return call.go()

    with intercepted(note):
        log.secure(3)
    assert synced == ["0.wal", "2.wal"], "although sync='never'"
    assert [is_open(first) for first in (0, 2, 4)] == [False, False, True]
    assert _read(log, 0, 6) == [(0, b"a"), (2, b"b"), (4, b"c")]
    with intercepted(note):
        log.secure(6)
    _append(log, b"d")
    assert _read(log, 4, 8) == [(4, b"c"), (6, b"d")]


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
    monkeypatch.setattr("rlio.log.publisher.PendingFile", _no_file)
    monkeypatch.setattr("rlio.log.publisher._FIRST_DELAY", 0.02)
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
        assert writer.seconds_waited >= 0.4
        assert writer._publisher.received == writer._publisher.log.end == taken
        gone.clear()
        writer.write(batch_of(taken, 50))
    assert rows_of(root) == list(range(taken + 50))


def _no_file(*args: Sequence[object]) -> None:
    raise OSError("no unfinished files: the store is remote")
