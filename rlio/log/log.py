"""The log of a live writer: appends rows, and releases them once they are published.

The log is cut into segments. It syncs them, removes the published ones, and keeps the total size within its
limit. Rows whose publishing is delayed are read from here again.
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

logger: logging.Logger = logging.getLogger("rlio")


class Log:
    """The log of one writer. Thread-safe.

    Args:
        folder: The log's folder; locked by this process.
        spool: The options of the log.
    """

    def __init__(self, folder: LogFolder, *, spool: Spool) -> None:
        self._folder = folder
        self._spool = spool
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: Segments with rows that are not published yet, oldest first.
        self._segments: list[SegmentWriter] = []
        self._open: SegmentWriter | None = None
        #: Whether the next segment starts a shard, and whether the open one does.
        self._begins_shard = True
        self._open_begins = False
        self._failure: PublishError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        #: Called in a separate thread when the log no longer protects its rows and they must be published.
        self.on_failure: Callable[[], object] = lambda: None
        #: The row after the last one logged.
        self.end: int = 0
        #: Seconds that `write()` has waited for space in the log.
        self.waited: float = 0.0

    @property
    def path(self) -> str:
        """The log's folder."""
        return self._folder.path

    @property
    def bytes(self) -> int:
        """Size of the log in bytes."""
        with self._lock:
            return self._bytes()

    @property
    def failure(self) -> PublishError | None:
        """Why the log no longer protects its rows; None again once they are published."""
        return self._failure

    def promise(self, uri: str, *, again: bool = True) -> str:
        """Return the message that says where unstored rows are and what stores them.

        Args:
            uri: The data set's root.
            again: Whether `close` tries again.
        """
        folder = self._spool.folder
        command = f"rlio recover {uri}" + ("" if folder is None else f" --spool {os.fspath(folder)}")
        retry = "close() tries again, and " if again else ""
        return (
            f"they are safe in the log {self.path}; {retry}after this process has ended "
            f"the next writer there, or `{command}`, stores them"
        )

    def append(self, frames: Sequence[tuple[Sequence[Buffer], int]], *, header: Mapping[str, Any]) -> None:
        """Log the frames of one `write()`, all or none of them.

        Args:
            frames: For each frame, its buffers and its number of rows.
            header: Goes into the header of a new segment. Call `cut` when anything in it except
                ``shard_rows`` changes.

        Raises:
            PublishError: The frames could not be logged.
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
        """Whether the log is below its size limit."""
        with self._lock:
            return self._bytes() < self._spool.max_bytes

    def wait_for_room(self) -> None:
        """Wait until publishing brings the log below its size limit.

        Raises:
            PublishError: The log is still full after ``block_seconds``.
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
                    "was taken, all earlier rows are safe; repair access to the store, then write again",
                    uri=self.path,
                )

    def cut(self, *, begins_shard: bool) -> None:
        """Start a new segment at the next frame; with ``begins_shard``, recovery starts a new shard there."""
        with self._lock:
            self._cut(begins_shard=begins_shard)

    def release(self, row: int) -> None:
        """Remove the segments whose rows are all below ``row``: these rows are stored."""
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
        """Sync the rows below ``row``, regardless of `Spool.sync`. The caller can then drop its copy of them.

        Raises:
            PublishError: A segment with such rows could not be synced, or had failed earlier.
        """
        with self._lock:
            segments = [segment for segment in self._segments if segment.first < row]
            still_open = self._open
        for segment in segments:
            self._sync(segment)
            if segment.is_broken:
                raise PublishError("a write to this part of the log has failed", uri=segment.path)
            if segment is not still_open:
                _close(segment)  # Frees the descriptor: an outage may leave thousands of segments.

    def frames(self, first: int, end: int) -> Iterator[Frame]:
        """Yield the logged rows ``[first, end)``, none of them released, as frames that lie within the range.

        Raises:
            CorruptData: Rows are missing or damaged.
            OSError: The log cannot be read.
        """
        with self._lock:
            found = [(part.path, part.first, part.end, part.bytes) for part in self._segments]
        # After a broken segment, the next one starts with the rows that the broken one never acknowledged.
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
        """Stop the thread. Remove the log if none of its rows are needed; else leave it to recovery."""
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
            logger.warning("the log %s is no longer needed, but could not be removed: %s", self.path, error)
        finally:
            self._folder.release()

    # ---- under the lock ----

    def _bytes(self) -> int:
        return sum(segment.bytes for segment in self._segments)

    def _begin(self, about: Mapping[str, Any]) -> SegmentWriter:
        kept = {"sync": self._spool.sync, "begins_shard": self._begins_shard}
        header = {**self._folder.owner, **about, **kept}
        path = self._folder.segment_path(self.end)
        if os.path.lexists(path):  # Left by a failed attempt; it has no rows.
            _remove(path)
        segment = SegmentWriter(path, header=header, first=self.end)
        self._segments.append(segment)
        self._open, self._begins_shard, self._open_begins = segment, False, self._begins_shard
        if self._spool.sync == "interval" and self._thread is None:
            self._thread = threading.Thread(target=self._sync_loop, name="rlio-sync", daemon=True)
            self._thread.start()
        return segment

    def _abandon(self, segment: SegmentWriter) -> None:
        """Log the following rows in another segment; this one stays until its rows are published."""
        # If no row of the segment was acknowledged, the next one takes its place and its name.
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
        """Sync at intervals, also without further writes, to limit what a power failure costs."""
        while not self._stop.wait(self._spool.sync_interval):
            with self._lock:
                dirty = [segment for segment in self._segments if segment.is_dirty]
            for segment in dirty:
                with contextlib.suppress(PublishError):  # `failure` holds it.
                    self._sync(segment)

    def _sync(self, segment: SegmentWriter) -> None:
        """Sync a segment. If that fails, its rows must be published.

        Raises:
            PublishError: The sync failed.
        """
        try:
            segment.sync()
        except PublishError as error:
            logger.error("%s", str(error))
            self._failure = error
            # Publishing takes the writer's lock, which close() holds while it waits for the threads here. No
            # thread can start once the interpreter exits; every writer is closed by then anyway.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.on_failure, name="rlio-rescue", daemon=True).start()
            raise


def _drop(segment: SegmentWriter) -> None:
    """Close and remove a segment that has no rows or whose rows are all stored."""
    _close(segment)
    _remove(segment.path)


def _close(segment: SegmentWriter) -> None:
    try:
        segment.close()
    except OSError as error:  # The descriptor is closed anyway, and an earlier sync reported any data loss.
        logger.warning("closing %s: %s", segment.path, error)


def _remove(path: str) -> None:
    """Remove a file that is no longer needed. If that fails, it stays until the log is removed.

    Recovery then finds that its rows are stored. An error here must not stop the storing of shards.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s is no longer needed, but could not be removed: %s", path, error)
