"""Encoding and storing in the background, so that `write()` costs a copy of the rows.

One thread a writer encodes row groups and stores shards, in the order in which they were handed over: what is
written depends on the rows alone, never on timing. At most two row groups of rows and one encoded shard are
in memory; a second shard where the store is slow or fails, and more only where it fails and there is no log.
"""

from __future__ import annotations

# pyarrow imports pandas at its first array, where there is one, and pandas imports this, which fails once the
# interpreter begins to exit: that is when the first array of a writer that was left open is made.
import concurrent.futures.thread  # noqa: F401
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from rlio.errors import LedgerError
from rlio.schemas.parquet import Compression, ShardEncoder
from rlio.schemas.row_groups import GroupBuffer, RowGroup
from rlio.schemas.schema import Schema
from rlio.storage.local import PendingFile
from rlio.storage.publisher import NewShard
from rlio.storage.shard_log import ShardLog
from rlio.writers.background import Jobs, Worker, done_at_once
from rlio.writers.roll import Roll

__all__ = ["ShardBuilder", "ShardMaker"]

# How long the encoding of a shard waits for the memory of the one before it, in seconds.
_SHORTLY = 0.2
# More than this is given back to the system: a shard of few, very large rows may need any amount.
_MOST_KEPT = 256 << 20
# Room for the row group that fills a shard and for the footer. Memory that is not written to costs nothing.
_SPARE_BYTES = 96 << 20


class ShardMaker:
    """Encodes row groups, in the calling thread, and hands over whole Parquet shards.

    Args:
        put: Given each shard.
        roll: Its ``max_bytes`` ends a shard here.
        compression: Of the pages.
        provenance: JSON text for every footer.
        begin: Called before a shard is begun; gives a file that its bytes go to, too, or None.
        on_end: Called when ``max_bytes`` has ended a shard.
        checksum: Runs a function, perhaps in another thread, one after the other.
    """

    def __init__(
        self,
        put: Callable[[NewShard], object],
        *,
        roll: Roll,
        compression: Compression,
        provenance: str,
        begin: Callable[[], PendingFile | None] = lambda: None,
        on_end: Callable[[], object] = lambda: None,
        checksum: Callable[[Callable[[], int]], Future[int]] = done_at_once,
    ) -> None:
        self._put = put
        self._begin = begin
        self._roll = roll
        self._compression = compression
        self._provenance = provenance
        self._on_end = on_end
        self._checksum = checksum
        self._encoder: ShardEncoder | None = None
        #: The memory of which the encoder uses a part.
        self._loan: _Loan | None = None
        self._pending: PendingFile | None = None

    def add(self, buffer: GroupBuffer) -> GroupBuffer:
        """Encode the rows of a buffer, and give it back, empty."""
        self.encode(buffer.take(), buffer.schema)
        return buffer

    def encode(self, group: RowGroup, schema: Schema) -> None:
        """Encode a group, ending the open shard before and after as needed."""
        if self._encoder is not None and (
            self._encoder.schema is not schema or not self._encoder.has_room(group)
        ):
            self.finish()
            self._on_end()
        if self._encoder is None:
            self._encoder = self._new_encoder(group, schema)
        self._encoder.add(group)
        if self._encoder.encoded_bytes >= self._roll.max_bytes:
            self.finish()
            self._on_end()

    def finish(self) -> None:
        """End the open shard, if there is one, and hand it over."""
        encoder, self._encoder = self._encoder, None
        pending, self._pending = self._pending, None
        loan, self._loan = self._loan, None
        if encoder is None or loan is None:
            return
        shard = encoder.finish()
        self._put(
            NewShard(
                data=shard.data,
                rows=shard.rows,
                suffix="parquet",
                footer_crc32=shard.footer_crc32,
                crc32=shard.crc32,
                schema=encoder.schema,
                pending=pending,
                release=lambda: _memory.give_back(loan),
            )
        )

    def abandon(self) -> None:
        """Drop the open shard."""
        if self._pending is not None:
            self._pending.discard()

    def _new_encoder(self, group: RowGroup, schema: Schema) -> ShardEncoder:
        """An encoder whose memory has room for the group."""
        self._pending = self._begin()
        size = self._roll.max_bytes + _SPARE_BYTES
        while True:
            self._loan = _memory.take(size)
            encoder = ShardEncoder(
                schema,
                compression=self._compression,
                provenance=self._provenance,
                # As much as fresh memory would have: what was used before may be larger, and where a shard
                # ends must not depend on that.
                memory=self._loan.memory[:size],
                submit=self._checksum,
                tee=None if self._pending is None else self._pending.write,
            )
            if encoder.has_room(group):
                return encoder
            size *= 2


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
        self._jobs = Jobs("rlio-encode")
        # Of its own, so that encoding need not wait: it checksums, and writes what is encoded to the disk.
        self._checksummer = Worker("rlio-checksum")
        self._maker = ShardMaker(
            log.append,
            roll=roll,
            compression=compression,
            provenance=provenance,
            begin=self._begin,
            on_end=on_end,
            checksum=self._checksummer.submit,
        )
        self._spare: GroupBuffer | None = None

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
            self._jobs.submit(lambda: self._maker.encode(group, buffer.schema))
        spare, self._spare = self._spare, buffer
        return spare if spare is not None and spare.schema is buffer.schema else GroupBuffer(buffer.schema)

    def finish(self) -> None:
        """End the open shard, which is then stored in the background."""
        self._wait()
        self._jobs.submit(self._maker.finish)

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
        self._maker.abandon()

    def check(self) -> None:
        """Raise the error of an earlier encoding, so that no row is taken after it."""
        self._jobs.check()

    def _begin(self) -> PendingFile | None:
        # The shard before still has the memory that has been used already; a local disk soon takes it.
        self._log.wait(_SHORTLY)
        return self._log.pending_file()

    def _wait(self, timeout: float | None = None) -> None:
        """Wait for the job handed over last, so that no third buffer is needed.

        Rows that could not be encoded are gone from memory, so that such an error is raised by every later
        call; where there is a log they are still in it.
        """
        if not self._jobs.wait(timeout):
            raise self._log.overdue(
                "rows were not encoded, since an earlier shard is still being stored,", timeout
            )


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)


class _Loan:
    """Memory that one encoder has until it is given back."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.is_over = False


class _Memory:
    """Memory in which shards are encoded, kept for the next: fresh memory costs a page fault every 4 KiB.

    At most one piece is kept for all writers of the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: NDArray[np.uint8] | None = None

    def take(self, size: int) -> _Loan:
        """At least ``size`` bytes that nothing else uses."""
        with self._lock:
            kept, self._kept = self._kept, None
        return _Loan(kept if kept is not None and len(kept) >= size else np.empty(size, np.uint8))

    def give_back(self, loan: _Loan) -> None:
        """Keep the memory for the next shard, if it is not too large and nothing as large is kept.

        Raises:
            LedgerError: It was given back before. Two shards in one memory would damage each other.
        """
        with self._lock:
            if loan.is_over:
                raise LedgerError(
                    "the memory of an encoded shard was given back twice, which would damage another shard: "
                    "it was not taken the second time; report this"
                )
            loan.is_over = True
            size = len(loan.memory)
            if size <= _MOST_KEPT and (self._kept is None or len(self._kept) < size):
                self._kept = loan.memory


_memory = _Memory()
