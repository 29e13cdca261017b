"""A live writer's log: rows are in it from `write()` until they are published.

It cuts the log into segments, syncs them, drops those that are published, and keeps the whole within its
bound. Encoded shards that cannot be stored wait here too, as the files that they are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlio.errors import PublishError
from rlio.schemas.schema import Schema
from rlio.storage.local import sync_descriptor, write_whole
from rlio.storage.names import ShardName
from rlio.storage.spool import LogFolder, Spool, sync_folder
from rlio.storage.wal import Buffer, SegmentWriter

__all__ = ["Journal"]

logger = logging.getLogger("rlio")


class Journal:
    """The log of one writer. Thread-safe.

    Args:
        folder: Where it lies; locked by this process.
        spool: How it is kept.
        about: What the header of every segment says, beside the schema.
    """

    def __init__(self, folder: LogFolder, *, spool: Spool, about: Mapping[str, Any]) -> None:
        self._folder = folder
        self._spool = spool
        self._about = {**folder.owner, **about}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: Segments with rows that are not published yet, the oldest first.
        self._segments: list[SegmentWriter] = []
        self._open: SegmentWriter | None = None
        #: Whether the next segment begins a shard, and whether the open one does.
        self._begins_shard = True
        self._open_begins = False
        self._spilled: dict[str, int] = {}
        self._failure: PublishError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        #: Called, in a thread of its own, when the log protects its rows no longer: they must be published.
        self.on_failure: Callable[[], object] = lambda: None
        #: The row after the last one logged.
        self.end = 0
        #: Seconds that `write()` has waited for room.
        self.waited = 0.0

    @property
    def path(self) -> str:
        """The log's folder."""
        return self._folder.path

    @property
    def bytes(self) -> int:
        """Bytes of the log, shards that wait here included."""
        with self._lock:
            return self._bytes()

    @property
    def failure(self) -> PublishError | None:
        """Why the log protects its rows no longer; it does again once they are published."""
        return self._failure

    def promise(self, uri: str) -> str:
        """Where rows are that could not be stored yet, and what stores them, for messages.

        Args:
            uri: The data set's root.
        """
        folder = self._spool.folder
        command = f"rlio recover {uri}" + ("" if folder is None else f" --spool {os.fspath(folder)}")
        return (
            f"they are safe in the log {self.path}; close() tries again, and once this process has ended the "
            f"next writer there, or `{command}`, stores them"
        )

    def append(self, frames: Sequence[tuple[Sequence[Buffer], int]], *, schema: Mapping[str, Any]) -> None:
        """Log the frames of one `write()`, all or none.

        Args:
            frames: Buffers and rows of each.
            schema: Goes into the header of a new segment; call `cut` when it changes.

        Raises:
            PublishError: They could not be logged, or this is a forked child.
        """
        self._folder.check_owned()
        with self._lock:
            if self._open is not None and self._open.is_broken:
                self._abandon(self._open)
            segment = self._open or self._begin(schema)
            size, end = segment.bytes, segment.end
            try:
                for payload, rows in frames:
                    segment.append(payload, rows=rows)
                if self._spool.sync == "always":
                    segment.sync()
            except PublishError:
                segment.take_back(size, end)
                raise
            self.end = segment.end

    def has_room(self) -> bool:
        """Whether the log is within its bound."""
        with self._lock:
            return self._bytes() < self._spool.max_bytes

    def wait_for_room(self) -> None:
        """Wait until something was published and the log is within its bound again.

        Raises:
            PublishError: It is not, after ``block_seconds``.
        """
        begun = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: self._bytes() < self._spool.max_bytes, timeout=self._spool.block_seconds
            )
            self.waited += time.monotonic() - begun
            if self._bytes() >= self._spool.max_bytes:
                raise PublishError(
                    f"the log holds {self._bytes()} bytes that cannot be stored, of {self._spool.max_bytes} "
                    f"allowed, and {self._spool.block_seconds} s brought no room: nothing of this write() "
                    "was taken, all before it is safe; repair access to the store, then write again",
                    uri=self.path,
                )

    def cut(self, *, begins_shard: bool) -> None:
        """Let the next frame begin a new segment, and, if so, a new shard when it is recovered."""
        with self._lock:
            self._cut(begins_shard=begins_shard)

    def release(self, row: int) -> None:
        """Drop the segments of which every row is below ``row``: they are stored elsewhere."""
        with self._changed:
            while self._segments and self._segments[0].end <= row:
                segment = self._segments.pop(0)
                if segment is self._open:
                    self._open = None
                _drop(segment)
            if not any(segment.is_broken for segment in self._segments):
                self._failure = None
            self._changed.notify_all()

    def spill(self, name: ShardName, data: memoryview, *, schema: Schema) -> str:
        """Keep an encoded shard here, durably, until it can be stored; and its schema, which comes first.

        Raises:
            OSError: It could not be written; nothing of it is left.
        """
        described = self._folder.schema_path(schema.hash)
        if not os.path.exists(described):
            _write_durably(described, memoryview(schema.text.encode()))
        path = os.path.join(self.path, name.format())
        _write_durably(path, data)
        sync_folder(self.path)
        with self._lock:
            self._spilled[path] = len(data)
        return path

    def unspill(self, path: str) -> None:
        """Drop a shard that is stored now."""
        with self._changed:
            self._spilled.pop(path, None)
            _remove(path)
            self._changed.notify_all()

    def close(self, *, keep: bool) -> None:
        """Stop; remove the log if nothing in it is needed any more, else leave it to recovery."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            for segment in self._segments:
                segment.close()
            self._segments, self._open = [], None
        try:
            if not keep:
                self._folder.remove()
        except OSError as error:
            logger.warning("the log %s is done with, but could not be removed: %s", self.path, error)
        finally:
            self._folder.release()

    # ---- under the lock ----

    def _bytes(self) -> int:
        return sum(segment.bytes for segment in self._segments) + sum(self._spilled.values())

    def _begin(self, schema: Mapping[str, Any]) -> SegmentWriter:
        about = {**self._about, "sync": self._spool.sync}
        header = {**about, "begins_shard": self._begins_shard, **schema}
        path = self._folder.segment_path(self.end)
        if os.path.lexists(path):  # Of an attempt that failed, which was not removed then; it has no rows.
            _remove(path)
        segment = SegmentWriter(path, header=header, first=self.end)
        self._segments.append(segment)
        self._open, self._begins_shard, self._open_begins = segment, False, self._begins_shard
        if self._spool.sync == "interval" and self._thread is None:
            self._thread = threading.Thread(target=self._sync_loop, name="rlio-sync", daemon=True)
            self._thread.start()
        return segment

    def _abandon(self, segment: SegmentWriter) -> None:
        """Log what follows elsewhere; what the segment holds stays until it is published."""
        # The next one takes the place, and the name, of one without rows.
        empty = segment.end == segment.first
        self._cut(begins_shard=empty and self._open_begins)
        if empty:
            self._segments.remove(segment)
            _drop(segment)

    def _cut(self, *, begins_shard: bool) -> None:
        self._open = None
        self._begins_shard |= begins_shard

    # ---- in the thread ----

    def _sync_loop(self) -> None:
        """Bound what a power failure costs, also when no further write comes."""
        while not self._stop.wait(self._spool.sync_interval):
            with self._lock:
                dirty = [segment for segment in self._segments if segment.is_dirty]
            for segment in dirty:
                try:
                    segment.sync()
                except PublishError as error:
                    # Publishing takes the writer's lock, which close() holds while it waits for this thread.
                    logger.error("%s", error)
                    self._failure = error
                    threading.Thread(target=self.on_failure, name="rlio-rescue", daemon=True).start()


def _write_durably(path: str, data: memoryview) -> None:
    """Write a file that is whole as soon as it has its name."""
    temporary = f"{path}.tmp"
    # What an attempt before this one may have left: nobody else writes here.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            write_whole(fd, data)
            sync_descriptor(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _drop(segment: SegmentWriter) -> None:
    """Close and remove a segment whose rows are stored elsewhere, or that has none."""
    try:
        segment.close()
    except OSError as error:  # The descriptor is gone all the same.
        logger.warning("closing %s: %s", segment.path, error)
    _remove(segment.path)


def _remove(path: str) -> None:
    """Remove a file that is not needed any more; where that fails it stays until the log is removed.

    Recovery finds that its rows are stored. An error here must not stop what is being stored.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s is not needed any more, but could not be removed: %s", path, error)
