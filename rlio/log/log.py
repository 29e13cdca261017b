"""A live writer's log: it appends rows, and releases them once they are published.

It cuts the log into segments, syncs them, drops those that are published, and keeps the whole within its
bound. Rows that cannot be published for a while are read from here again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlio.errors import CorruptData, PublishError
from rlio.log.spool import LogFolder, Spool
from rlio.log.wal import Buffer, Frame, SegmentWriter, read_frames

__all__ = ["Log"]

logger = logging.getLogger("rlio")


class Log:
    """The log of one writer. Thread-safe.

    Args:
        folder: Where it lies; locked by this process.
        spool: How it is kept.
    """

    def __init__(self, folder: LogFolder, *, spool: Spool) -> None:
        self._folder = folder
        self._spool = spool
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: Segments with rows that are not published yet, the oldest first.
        self._segments: list[SegmentWriter] = []
        self._open: SegmentWriter | None = None
        #: Whether the next segment begins a shard, and whether the open one does.
        self._begins_shard = True
        self._open_begins = False
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
        """Bytes of the log."""
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

    def append(self, frames: Sequence[tuple[Sequence[Buffer], int]], *, header: Mapping[str, Any]) -> None:
        """Log the frames of one `write()`, all or none.

        Args:
            frames: Buffers and rows of each.
            header: Goes into the header of a new segment; call `cut` when it changes, but for ``shard_rows``.

        Raises:
            PublishError: They could not be logged.
        """
        with self._lock:
            if self._open is not None and self._open.is_broken:
                self._abandon(self._open)
            segment = self._open or self._begin(header)
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

    def secure(self, row: int) -> None:
        """Sync the rows below ``row``, whatever `Spool.sync` says: nothing else needs to hold them then.

        Raises:
            PublishError: A segment with such rows could not be synced, or had failed before.
        """
        with self._lock:
            segments = [segment for segment in self._segments if segment.first < row]
            still_open = self._open
        for segment in segments:
            self._sync(segment)
            if segment.is_broken:
                raise PublishError("a write to this part of the log has failed", uri=segment.path)
            if segment is not still_open:
                _close(segment)  # In an outage there may be thousands.

    def frames(self, first: int, end: int) -> Iterator[Frame]:
        """The logged rows ``[first, end)``, none of which is released, in frames of which each lies within.

        Raises:
            CorruptData: They are not all there, or damaged.
            OSError: The log cannot be read.
        """
        with self._lock:
            found = [(part.path, part.first, part.end, part.bytes) for part in self._segments]
        # Where a segment broke, the next one begins with rows that were never acknowledged in it.
        limits = [*(begin for _, begin, _, _ in found[1:]), end]
        for (path, begin, stop, size), limit in zip(found, limits, strict=True):
            if begin >= end or min(stop, limit) <= first:
                continue
            for frame in read_frames(path, first=first, end=min(limit, end), size=size):
                if frame.first != first:
                    raise CorruptData(f"row {first} is missing", uri=path)
                first = frame.first + frame.rows
                yield frame
        if first != end:
            raise CorruptData(f"rows {first} to {end - 1} are missing", uri=self.path)

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
        return sum(segment.bytes for segment in self._segments)

    def _begin(self, about: Mapping[str, Any]) -> SegmentWriter:
        kept = {"sync": self._spool.sync, "begins_shard": self._begins_shard}
        header = {**self._folder.owner, **about, **kept}
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
        # The next one takes the place, and the name, of one without rows that were acknowledged.
        empty = self.end == segment.first
        self._cut(begins_shard=empty and self._open_begins)
        if empty:
            self._segments.remove(segment)
            _drop(segment)

    def _cut(self, *, begins_shard: bool) -> None:
        self._open = None
        self._begins_shard |= begins_shard

    # ---- in the threads ----

    def _sync_loop(self) -> None:
        """Bound what a power failure costs, also when no further write comes."""
        while not self._stop.wait(self._spool.sync_interval):
            with self._lock:
                dirty = [segment for segment in self._segments if segment.is_dirty]
            for segment in dirty:
                with contextlib.suppress(PublishError):  # `failure` has it.
                    self._sync(segment)

    def _sync(self, segment: SegmentWriter) -> None:
        """Sync a segment; where that fails, its rows must be published.

        Raises:
            PublishError: It failed.
        """
        try:
            segment.sync()
        except PublishError as error:
            logger.error("%s", str(error))
            self._failure = error
            # Publishing takes the writer's lock, which close() holds while it waits for our threads. No
            # thread starts once the interpreter has begun to exit; every writer is closed then anyway.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.on_failure, name="rlio-rescue", daemon=True).start()
            raise


def _drop(segment: SegmentWriter) -> None:
    """Close and remove a segment whose rows are stored elsewhere, or that has none."""
    _close(segment)
    _remove(segment.path)


def _close(segment: SegmentWriter) -> None:
    try:
        segment.close()
    except OSError as error:  # The descriptor is gone all the same, and what it had to say a sync has said.
        logger.warning("closing %s: %s", segment.path, error)


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
