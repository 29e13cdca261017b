"""Encoding and storing in the background, so that `write()` costs a copy of the rows.

One thread a writer encodes row groups and stores shards, in the order in which they were handed over: what is
written depends on the rows alone, never on timing. At most two row groups of rows and one encoded shard are
in memory; a second shard where the store is slow, and more only where it fails and there is no log.
"""

from __future__ import annotations

# pyarrow imports pandas at its first array, where there is one, and pandas imports this, which fails once the
# interpreter begins to exit: that is when the first array of a writer that was left open is made.
import concurrent.futures.thread  # noqa: F401
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlio.schemas.group_arrays import ReadyGroup, ready_group
from rlio.schemas.parquet import Compression, ShardEncoder
from rlio.schemas.row_groups import GroupBuffer
from rlio.schemas.schema import Schema
from rlio.storage.local import PendingFile
from rlio.storage.shard_log import NewShard, ShardLog
from rlio.writers.background import Jobs, Worker
from rlio.writers.roll import Roll

__all__ = ["ShardBuilder"]

# How long the encoding of a shard waits for the memory of the one before it, in seconds.
_SHORTLY = 0.2
# More than this is given back to the system: a shard of few, very large rows may need any amount.
_MOST_KEPT = 256 << 20
# Room for the row group that fills a shard and for the footer. Memory that is not written to costs nothing.
_SPARE_BYTES = 96 << 20
_NOTHING = np.empty(0, np.uint8)


class ShardBuilder:
    """Turns full buffers into stored Parquet shards. Called under the writer's lock.

    Args:
        log: Numbers and stores the shards.
        roll: Its ``max_bytes`` ends a shard here; rows and age are the writer's to watch.
        compression: Of the pages.
        provenance: JSON text for every footer.
        on_end: Called, in the background, when ``max_bytes`` has ended a shard.
    """

    def __init__(
        self,
        log: ShardLog,
        *,
        roll: Roll,
        compression: Compression,
        provenance: str,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._log = log
        self._roll = roll
        self._compression = compression
        self._provenance = provenance
        self._on_end = on_end
        self._encoder: ShardEncoder | None = None
        self._jobs = Jobs("rlio-encode")
        # Of its own, so that encoding need not wait: it checksums, and writes what is encoded to the disk.
        self._checksummer = Worker("rlio-checksum")
        self._spare: GroupBuffer | None = None
        #: The memory of which the encoder uses a part.
        self._whole = _NOTHING
        self._pending: PendingFile | None = None

    def start(self) -> None:
        """Start the threads, unless they run: too late once the interpreter has begun to exit."""
        self._jobs.start()
        self._checksummer.start()
        self._log.start()

    def add(self, buffer: GroupBuffer) -> GroupBuffer:
        """Encode the rows of a buffer, and give an empty buffer of the same schema to go on with."""
        group = buffer.take()
        try:
            self._wait()
        finally:
            # Also where the wait is interrupted: the rows have left their buffer, and are nowhere else.
            self._jobs.submit(lambda: self._encode(ready_group(group, buffer.schema), buffer.schema))
        spare, self._spare = self._spare, buffer
        return spare if spare is not None and spare.schema is buffer.schema else GroupBuffer(buffer.schema)

    def finish(self) -> None:
        """End the open shard, which is then stored in the background."""
        self._wait()
        self._jobs.submit(self._end_shard)

    def store(self, timeout: float | None = None) -> None:
        """End the open shard and return once everything handed over is stored.

        Raises:
            PublishError: Something could not be stored, or not within ``timeout`` seconds; it is kept.
        """
        until = None if timeout is None else time.monotonic() + timeout
        self._wait(timeout)
        self.finish()
        self._wait(_left(until))
        self._log.publish(_left(until))

    def close(self) -> None:
        """End the threads; what is handed over must be stored."""
        self._wait()
        self.abandon()

    def abandon(self) -> None:
        """End the threads; the open shard is dropped, and its rows are in the log."""
        self._jobs.stop()
        self._checksummer.stop()
        if self._pending is not None:
            self._pending.discard()

    def check(self) -> None:
        """Raise the error of an earlier encoding, so that no row is taken after it."""
        self._jobs.check()

    def _wait(self, timeout: float | None = None) -> None:
        """Wait for the job handed over last, so that no third buffer is needed.

        Rows that could not be encoded are gone from memory, so that such an error is raised by every later
        call; where there is a log they are still in it.
        """
        if not self._jobs.wait(timeout):
            raise self._log.overdue(
                "rows were not encoded, since an earlier shard is still being stored,", timeout
            )

    # ---- in the thread ----

    def _encode(self, ready: ReadyGroup, schema: Schema) -> None:
        if self._encoder is not None and (
            self._encoder.schema is not schema or not self._encoder.has_room(ready)
        ):
            self._end_shard()
            self._on_end()
        if self._encoder is None:
            self._encoder = self._new_encoder(ready, schema)
        self._encoder.add(ready)
        if self._encoder.encoded_bytes >= self._roll.max_bytes:
            self._end_shard()
            self._on_end()

    def _new_encoder(self, ready: ReadyGroup, schema: Schema) -> ShardEncoder:
        """An encoder whose memory has room for the group."""
        # The shard before still has the memory that has been used already; a local disk soon takes it.
        self._log.wait(_SHORTLY)
        self._pending = self._log.pending_file()
        size = self._roll.max_bytes + _SPARE_BYTES
        while True:
            self._whole = _memory.take(size)
            encoder = ShardEncoder(
                schema,
                compression=self._compression,
                provenance=self._provenance,
                # As much as fresh memory would have: what was used before may be larger, and where a shard
                # ends must not depend on that.
                memory=self._whole[:size],
                submit=self._checksummer.submit,
                tee=None if self._pending is None else self._pending.write,
            )
            if encoder.has_room(ready):
                return encoder
            size *= 2

    def _end_shard(self) -> None:
        encoder, self._encoder = self._encoder, None
        pending, self._pending = self._pending, None
        whole, self._whole = self._whole, _NOTHING
        if encoder is None:
            return
        shard = encoder.finish()
        self._log.append(
            NewShard(
                data=shard.data,
                rows=shard.rows,
                suffix="parquet",
                footer_crc32=shard.footer_crc32,
                crc32=shard.crc32,
                schema=encoder.schema,
                pending=pending,
                release=lambda: _memory.give_back(whole),
            )
        )


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)


class _Memory:
    """Memory in which shards are encoded, kept for the next: fresh memory costs a page fault every 4 KiB.

    At most one piece is kept for all writers of the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: NDArray[np.uint8] | None = None

    def take(self, size: int) -> NDArray[np.uint8]:
        """At least ``size`` bytes that nobody else has."""
        with self._lock:
            kept, self._kept = self._kept, None
        return kept if kept is not None and len(kept) >= size else np.empty(size, np.uint8)

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        """Keep ``memory`` for the next shard, if nothing as large is kept."""
        with self._lock:
            if self._kept is None or len(self._kept) < len(memory) <= _MOST_KEPT:
                self._kept = memory


_memory = _Memory()
