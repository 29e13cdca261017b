"""The files of the write-ahead log: segments of checked frames, which survive the process that wrote them.

A frame is acknowledged once one unbuffered write has passed it to the operating system. It then survives
``kill -9``, and, once synced, a power failure. Reading always returns an exact prefix of the written frames.
`rlio.writers` knows what a frame holds, and `rlio.log.spool` where logs are.

Layout, little-endian: ``magic "rlw0", flags u32, first row u64, rows u64, stored bytes u64, plain bytes u64,
CRC-32 of these u32, CRC-32 of these and the payload u32``, then the payload. The first frame of a segment is
its header, JSON. The fields have their own CRC, because a flipped length must not look like a torn end.

Example:
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> segment = SegmentWriter(f"{folder}/0.wal", header={"writer": "w"}, first=0)
    >>> segment.append([b"three rows"], rows=3)
    >>> segment.close()
    >>> found = read_segment(f"{folder}/0.wal")
    >>> found.header, [(frame.first, frame.rows, frame.payload) for frame in found.frames], found.end
    ({'writer': 'w'}, [(0, 3, b'three rows')], 3)
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import stat
import struct
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import zstandard

from rlio.catalog.names import MAX_ROW
from rlio.errors import CorruptData, PublishError, UnsafeData
from rlio.storage.local import sync_descriptor, sync_folder

__all__ = [
    "Buffer",
    "Damage",
    "Frame",
    "SegmentReader",
    "SegmentWriter",
    "Sync",
    "count_whole_rows",
    "logged_rows",
    "read_frames",
    "read_plain",
    "read_segment",
    "whole_rows",
]

Sync: TypeAlias = Literal["interval", "always", "never"]
Buffer: TypeAlias = "bytes | bytearray | memoryview"

_MAGIC: Final = b"rlw0"
_FRAME: Final = struct.Struct("<4sIQQQQII")
_FIELDS: Final = struct.Struct("<4sIQQQQ")
_CRCS: Final = struct.Struct("<II")
_ZSTD: Final = 1
_HEADER: Final = 2
#: Bytes that one frame may hold. A `write()` is cut into row groups of at most 8 MiB (more for one long row).
MAX_PAYLOAD: Final = 1 << 31
_MAX_WINDOW: Final = 1 << 27
#: Buffers that one gathering write may take (IOV_MAX is 1024 on Linux and macOS).
_MAX_PARTS: Final = 1024

# Levels below zero trade ratio for speed. At -5, frames of float vectors cost a third of level 1 (both save
# little there), and frames of images still shrink to a fraction.
_LEVEL: Final = -5
# How often compression is retried after it did not pay, and the largest ratio that counts as paying.
_TRIAL_EVERY: Final = 32
_WORTHWHILE: Final = 0.75

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class SegmentWriter:
    """Appends frames to a new file. Not thread-safe, except `sync` and `close`.

    Args:
        path: Path of the file; it must not exist.
        header: JSON that recovery needs.
        first: Row number of the first row.

    Raises:
        PublishError: The file could not be made.
    """

    def __init__(self, path: str, *, header: Mapping[str, Any], first: int) -> None:
        self.path = path
        self.first = first
        #: The row after the last one logged.
        self.end: int = first
        self.bytes: int = 0
        self._synced = 0
        #: Whether the file's name is durable too.
        self._named = False
        self._broken: str | None = None
        #: Whether the file ends with a whole frame.
        self._whole = True
        self._closing = threading.Lock()
        self._frames = 0
        self._pays = True
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600)
        except OSError as error:
            raise PublishError(f"the log could not be opened: {error}", uri=path) from error
        try:
            self._put([json.dumps(header).encode()], rows=0, flags=_HEADER)
        except BaseException:
            # Report the first error. The rest of the file has no rows.
            with contextlib.suppress(OSError):
                self.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    @property
    def is_broken(self) -> bool:
        """Whether the file can take no more frames; its frames are still good."""
        return self._broken is not None

    @property
    def is_dirty(self) -> bool:
        """Whether frames wait to be synced."""
        return self.bytes > self._synced

    def append(self, payload: Sequence[Buffer], *, rows: int) -> None:
        """Log one frame. After the return, the frame survives the process.

        Args:
            payload: Buffers that form the frame, in order.
            rows: Number of rows in the frame, at least 1.

        Raises:
            PublishError: The frame could not be logged; no part of it was.
        """
        if self._broken is not None:
            raise PublishError(f"the log is broken: {self._broken}", uri=self.path)
        self._put(payload, rows=rows, flags=0)

    def take_back(self, size: int, end: int) -> None:
        """Truncate the file to an earlier ``bytes`` and `end`. If that fails, the segment is broken."""
        # Wait for a running sync: it would count rewritten bytes as synced.
        with self._closing:
            if size == self.bytes and self._whole:
                return
            try:
                os.ftruncate(self._fd, size)
                os.lseek(self._fd, size, os.SEEK_SET)
            except OSError as error:
                self._broken = f"a frame could not be taken back: {error}"
                return
            self.bytes, self.end, self._whole = size, end, True
            self._synced = min(self._synced, size)

    def sync(self) -> None:
        """Return once every frame logged so far survives a power failure. Any thread may call this.

        Raises:
            PublishError: The sync failed. The kernel may then have dropped the data and report success next
                time. The segment takes no more frames, and its rows must be published.
        """
        with self._closing:
            size = self.bytes
            if self._broken is not None or size <= self._synced or self._fd < 0:
                return
            try:
                _fdatasync(self._fd)
                if not self._named:
                    sync_folder(os.path.dirname(self.path))
                    self._named = True
            except OSError as error:
                self._broken = f"a sync failed: {error}"
                raise PublishError(f"the log could not be synced: {error}", uri=self.path) from error
            self._synced = size

    def close(self) -> None:
        """Close the file. Any thread may call this, more than once."""
        with self._closing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _put(self, payload: Sequence[Buffer], *, rows: int, flags: int) -> None:
        plain = sum(len(part) for part in payload)
        if plain > MAX_PAYLOAD:
            raise PublishError(f"a frame of {plain} bytes: expected at most {MAX_PAYLOAD}; write fewer rows")
        packed = None if flags else self._compressed(payload, plain)
        if packed is not None:
            payload, flags = [packed], _ZSTD
        stored = sum(len(part) for part in payload)
        fields = _FIELDS.pack(_MAGIC, flags, self.end, rows, stored, plain)
        crc32 = fields_crc32 = zlib.crc32(fields)
        for part in payload:
            crc32 = zlib.crc32(part, crc32)
        start, end = self.bytes, self.end
        try:
            self._whole = False
            _write_all(self._fd, [fields + _CRCS.pack(fields_crc32, crc32), *payload])
            self._whole = True
        except OSError as error:
            self.take_back(start, end)
            raise PublishError(
                f"{stored} bytes could not be logged: {error}; nothing of this write() was taken: "
                "make room or repair the disk, then write again",
                uri=self.path,
            ) from error
        self.bytes = start + _FRAME.size + stored
        self.end += rows

    def _compressed(self, payload: Sequence[Buffer], plain: int) -> bytes | None:
        """Return the payload as a zstd frame if that pays. Retries now and then if it did not."""
        self._frames += 1
        if not self._pays and self._frames % _TRIAL_EVERY:
            return None
        packed = self._compressor.compress(payload[0] if len(payload) == 1 else b"".join(payload))
        self._pays = len(packed) < _WORTHWHILE * plain
        return packed if self._pays else None


class Frame(NamedTuple):
    """One frame; it holds the writer's rows ``[first, first + rows)``."""

    first: int
    rows: int
    payload: bytes


@dataclass(frozen=True)
class Damage:
    """Damage that ends the valid prefix of a segment before the end of the file.

    Attributes:
        start: First byte after the prefix.
        bytes: Bytes from ``start`` to the end of the file.
        reason: What was found there.
        torn: Whether these bytes are only the beginning of a frame, as a crash within a `write()` leaves it.
            No acknowledged row is then missing.
        rows: Rows of whole frames behind the damage; the prefix does not include them.
    """

    start: int
    bytes: int
    reason: str
    torn: bool
    rows: int


class SegmentReader:
    """The valid prefix of a segment; see `read_segment`.

    Attributes:
        header: The header that the writer gave.
        first, end: The rows of the prefix.
        damage: The damage that ends the prefix; None if the prefix is the whole file.
    """

    def __init__(self, data: bytes | mmap.mmap, path: str) -> None:
        self._data = data
        self.path = path
        head = _parse(data, 0)
        if head is None or head.flags != _HEADER or head.rows:
            raise CorruptData(f"the log's header is damaged; the file has {len(data)} bytes", uri=path)
        try:
            self.header: dict[str, Any] = dict(json.loads(data[head.start : head.stop]))
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptData(f"the log's header is not a JSON object: {error}", uri=path) from error
        self.first: int = head.first
        self.end: int = head.first
        self._found: list[_Raw] = []
        self.damage: Damage | None = None
        position = head.stop
        while position < len(data):
            raw = _parse(data, position, row=self.end)
            if raw is None:
                self.damage = _damage(data, position, self.end)
                break
            self._found.append(raw)
            self.end += raw.rows
            position = raw.stop

    @property
    def frames(self) -> Iterator[Frame]:
        """Yield the frames of the prefix, in order; payloads are copies.

        Raises:
            CorruptData: A frame does not inflate, although its CRC is right.
            UnsafeData: A frame inflates to another size than it states.
        """
        return (_frame_of(self._data, raw, self.path) for raw in self._found)


def read_segment(path: str) -> SegmentReader:
    """Read a segment. Damage ends the valid prefix and is described, never raised.

    Raises:
        CorruptData: The segment's header is damaged.
        UnsafeData: ``path`` is a link or not a regular file.
        FileNotFoundError: ``path`` does not exist.
    """
    with _open_plain(path) as fd:
        # Mapped, since a segment may be larger than what its reader should hold in memory.
        data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if os.fstat(fd).st_size else b""
        return SegmentReader(data, path)


def logged_rows(path: str) -> tuple[range, int]:
    """The rows of a segment, as the headers of its frames say, and the bytes behind the last whole frame.

    Payloads are neither read nor checked. The segment may grow, shrink or be removed meanwhile. Bytes behind
    the last frame are a frame that is being written, one that was cut by a crash, or damage.

    Raises:
        UnsafeData: It is a link or no regular file.
        FileNotFoundError: It is not there.
    """
    with _open_plain(path) as fd, open(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        raw = _fields_of(file.read(_FRAME.size), 0, size)
        if raw is None or raw.flags != _HEADER or raw.rows:
            return range(0), size
        first = end = raw.first
        position = raw.stop
        while position < size:
            file.seek(position)
            raw = _fields_of(file.read(_FRAME.size), position, size, row=end)
            if raw is None:
                break
            end, position = end + raw.rows, raw.stop
        return range(first, end), size - position


def read_frames(path: str, *, first: int, end: int, size: int) -> Iterator[Frame]:
    """Yield the frames with rows in ``[first, end)`` of a segment that may still grow; payloads are copies.

    Args:
        path: The segment.
        first: First wanted row. Frames that end before it are skipped unread.
        end: Row after the last wanted one.
        size: Bytes that are certain to stay: those of the `SegmentWriter.append` calls that have returned.

    Raises:
        CorruptData: A frame is damaged, or the file is shorter than ``size``.
        UnsafeData: ``path`` is a link or not a regular file.
        OSError: The file cannot be read.
    """
    with _open_plain(path) as fd:
        if os.fstat(fd).st_size < size:
            raise CorruptData(f"the log is shorter than the {size} bytes that were written", uri=path)
        data = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    position = 0
    with data:
        while position < size:
            raw = _fields_at(data, position)
            wanted = raw is not None and raw.rows > 0 and raw.first < end and raw.first + raw.rows > first
            if raw is None or (wanted and not _is_intact(data, raw)):
                raise CorruptData(f"a frame before row {end} is damaged, at byte {position}", uri=path)
            if raw.first >= end:
                return
            if wanted:
                yield _frame_of(data, raw, path)
            position = raw.stop


def read_plain(path: str) -> bytes:
    """Return the content of a file of a log. Never follows a link.

    Raises:
        UnsafeData: The file is a link or not a regular file.
        OSError: It cannot be read.
    """
    with _open_plain(path) as fd, open(fd, "rb", closefd=False) as file:
        return file.read()


@contextlib.contextmanager
def _open_plain(path: str) -> Iterator[int]:
    """A descriptor of a file of a log, for reading."""
    try:
        fd = os.open(path, os.O_RDONLY | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeData("a file of the log is a symbolic link", uri=path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnsafeData("a file of the log is not a regular file", uri=path)
        yield fd
    finally:
        os.close(fd)


def whole_rows(path: str) -> list[range]:
    """Return the rows of all whole frames in a file, also where its header is damaged.

    Raises:
        UnsafeData: It is a link or not a regular file.
        OSError: It cannot be read.
    """
    data = read_plain(path)
    return [range(raw.first, raw.first + raw.rows) for raw in _whole_frames(data, 0) if raw.rows]


def count_whole_rows(path: str) -> int:
    """Return how many rows `whole_rows` finds."""
    return sum(map(len, whole_rows(path)))


# ---- frames ----


class _Raw(NamedTuple):
    """A frame as its fields describe it; its payload is the bytes ``[start, stop)`` of the file."""

    flags: int
    first: int
    rows: int
    start: int
    stop: int
    plain: int
    fields_crc32: int
    crc32: int


def _parse(data: bytes | mmap.mmap, position: int, *, row: int | None = None) -> _Raw | None:
    """Return the frame at ``position``; None if no valid frame starts there, or not the one of ``row``."""
    raw = _fields_at(data, position, row=row)
    return raw if raw is not None and _is_intact(data, raw) else None


def _fields_at(data: bytes | mmap.mmap, position: int, *, row: int | None = None) -> _Raw | None:
    """Parse like `_parse`, without a check of the payload."""
    return _fields_of(data[position : position + _FRAME.size], position, len(data), row=row)


def _is_intact(data: bytes | mmap.mmap, raw: _Raw) -> bool:
    with memoryview(data) as view:
        return zlib.crc32(view[raw.start : raw.stop], raw.fields_crc32) == raw.crc32


def _frame_of(data: bytes | mmap.mmap, raw: _Raw, path: str) -> Frame:
    payload = data[raw.start : raw.stop]
    return Frame(raw.first, raw.rows, _inflated(payload, raw, path) if raw.flags else payload)


def _fields_of(head: bytes, position: int, size: int, *, row: int | None = None) -> _Raw | None:
    """Return the frame whose fields are ``head``, at ``position`` of ``size`` bytes; as in `_parse`."""
    if len(head) < _FRAME.size:
        return None
    magic, flags, first, rows, stored, plain, fields_crc32, crc32 = _FRAME.unpack(head)
    start = position + _FRAME.size
    fits = (
        magic == _MAGIC
        and zlib.crc32(head[: _FIELDS.size]) == fields_crc32
        and flags in ((0, _ZSTD, _HEADER) if row is None else (0, _ZSTD))
        and (row is None or (first == row and rows > 0))
        and first + rows <= MAX_ROW
        and stored <= min(MAX_PAYLOAD, size - start)
        and plain <= MAX_PAYLOAD
        and (stored == plain or flags == _ZSTD)
    )
    return _Raw(flags, first, rows, start, start + stored, plain, fields_crc32, crc32) if fits else None


def _inflated(stored: bytes, raw: _Raw, path: str) -> bytes:
    try:
        if zstandard.frame_content_size(stored) == raw.plain:
            return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompress(stored)
    except zstandard.ZstdError as error:
        raise CorruptData(f"row {raw.first}: the frame is not zstd: {error}", uri=path) from error
    raise UnsafeData(f"row {raw.first}: the frame inflates to another size than it states", uri=path)


def _damage(data: bytes | mmap.mmap, start: int, row: int) -> Damage:
    """Describe what follows the valid prefix; searches for whole frames behind the damage."""
    torn = _is_torn(data, start, row)
    rows = sum(raw.rows for raw in _whole_frames(data, start + 1) if raw.first >= row)
    reason = f"the frame of row {row} " + ("is incomplete" if torn else "is damaged")
    return Damage(start, len(data) - start, reason, torn and not rows, rows)


def _whole_frames(data: bytes | mmap.mmap, start: int) -> Iterator[_Raw]:
    """Yield the whole frames from ``start`` on, whatever lies before and between them."""
    position = data.find(_MAGIC, start)
    while position >= 0:
        raw = _parse(data, position)
        if raw is not None:
            yield raw
        position = data.find(_MAGIC, position + 1 if raw is None else raw.stop)


def _is_torn(data: bytes | mmap.mmap, start: int, row: int) -> bool:
    """Whether the bytes from ``start`` on are the beginning of an incomplete frame."""
    rest = len(data) - start
    if rest < _FRAME.size:
        return _MAGIC.startswith(data[start : start + min(rest, len(_MAGIC))])
    magic, flags, first, _, stored, _, fields_crc32, _ = _FRAME.unpack_from(data, start)
    known = magic == _MAGIC and flags in (0, _ZSTD) and first == row
    whole = zlib.crc32(data[start : start + _FIELDS.size]) == fields_crc32
    return bool(known and whole and rest - _FRAME.size < stored <= MAX_PAYLOAD)


def _write_all(fd: int, parts: list[Buffer]) -> None:
    """Write all parts: usually in one call, in more only if the kernel takes less."""
    missing = sum(len(part) for part in parts)
    written = os.writev(fd, parts) if len(parts) <= _MAX_PARTS else 0
    if written < missing:
        rest = memoryview(b"".join(parts))[written:]
        while rest:
            rest = rest[os.write(fd, rest) :]


def _fdatasync(fd: int) -> None:
    """Make the file's data durable."""
    if sys.platform == "darwin":
        sync_descriptor(fd)  # macOS has no fdatasync(), and its fsync() leaves the data in the drive.
    else:
        os.fdatasync(fd)
