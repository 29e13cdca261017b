"""Encoding and storing in the background, so that `write()` costs a copy of the rows.

One thread a writer encodes row groups and stores shards, in the order in which they were handed over: what is
written depends on the rows alone, never on timing. At most two row groups of rows and one encoded shard are
in memory, unless a shard cannot be stored.
"""

from __future__ import annotations

# pyarrow imports pandas at its first array, where there is one, and pandas imports this, which fails once the
# interpreter begins to exit: that is when the first array of a writer that was left open is made.
import concurrent.futures.thread  # noqa: F401
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlio.errors import PublishError
from rlio.schemas.group_arrays import ReadyGroup, ready_group
from rlio.schemas.parquet import Compression, ShardEncoder
from rlio.schemas.row_groups import GroupBuffer
from rlio.schemas.schema import Schema
from rlio.storage.shard_log import ShardLog
from rlio.writers.roll import Roll

__all__ = ["ShardBuilder"]

T = TypeVar("T")

# Room for the row group that fills a shard and for the footer. Memory that is not written to costs nothing.
_SPARE_BYTES = 96 << 20


class ShardBuilder:
    """Turns full buffers into stored Parquet shards. Called under the writer's lock.

    Args:
        log: Numbers and stores the shards.
        roll: Its ``max_bytes`` ends a shard here; rows and age are the writer's to watch.
        compression: Of the pages.
        provenance: JSON text for every footer.
    """

    def __init__(self, log: ShardLog, *, roll: Roll, compression: Compression, provenance: str) -> None:
        self._log = log
        self._roll = roll
        self._compression = compression
        self._provenance = provenance
        self._encoder: ShardEncoder | None = None
        self._worker = _Worker("rlio-encode")
        # Of its own, so that encoding need not wait for it: it takes a tenth of the time that encoding does.
        self._checksummer = _Worker("rlio-checksum")
        self._busy: Future[None] | None = None
        self._spare: GroupBuffer | None = None
        self._failure: BaseException | None = None
        self._memory: NDArray[np.uint8] | None = None

    def add(self, buffer: GroupBuffer) -> GroupBuffer:
        """Encode the rows of a buffer, and give an empty buffer of the same schema to go on with."""
        # Here and not in the background, which has more to do: encoding takes twice the rest of a write.
        ready = ready_group(buffer.take(), buffer.schema)
        self._wait()
        spare, self._spare = self._spare, buffer
        self._busy = self._worker.submit(lambda: self._encode(ready, buffer.schema))
        return spare if spare is not None and spare.schema is buffer.schema else GroupBuffer(buffer.schema)

    def finish(self) -> None:
        """End the open shard; storing it is tried, and tried again by `store` if it fails."""
        self._wait()
        self._busy = self._worker.submit(self._finish)

    def store(self) -> None:
        """End the open shard and return once everything handed over is stored.

        Raises:
            PublishError: Something could not be stored; it is kept.
        """
        self._wait()
        self._busy = self._worker.submit(self._store)
        self._wait()

    def close(self) -> None:
        """End the thread; what is not stored by then is lost, so `store` comes first."""
        self._worker.stop()
        self._checksummer.stop()

    def _wait(self) -> None:
        """Wait for the job before, so that its error surfaces and no third buffer is needed.

        Rows that could not be encoded are gone, so that such an error is raised by every later call; rows
        that could not be stored are kept, and `store` tries again.
        """
        if self._failure is not None:
            raise self._failure
        busy, self._busy = self._busy, None
        if busy is not None:
            try:
                busy.result()
            except PublishError:
                raise
            except BaseException as error:
                self._failure = error
                raise

    # ---- in the thread ----

    def _encode(self, ready: ReadyGroup, schema: Schema) -> None:
        if self._encoder is not None and (
            self._encoder.schema is not schema or not self._encoder.has_room(ready)
        ):
            self._finish()
        if self._encoder is None:
            self._encoder = self._new_encoder(ready, schema)
        self._encoder.add(ready)
        if self._encoder.encoded_bytes >= self._roll.max_bytes:
            self._finish()

    def _new_encoder(self, ready: ReadyGroup, schema: Schema) -> ShardEncoder:
        """An encoder whose memory has room for the group; the same memory shard after shard, where it has."""
        size = self._roll.max_bytes + _SPARE_BYTES
        while True:
            if self._memory is None or len(self._memory) < size:
                self._memory = np.empty(size, np.uint8)
            encoder = ShardEncoder(
                schema,
                compression=self._compression,
                provenance=self._provenance,
                memory=self._memory,
                submit=self._checksummer.submit,
            )
            if encoder.has_room(ready):
                return encoder
            size = 2 * len(self._memory)

    def _finish(self) -> None:
        self._end_shard()
        self._log.try_publish()
        self._release()

    def _store(self) -> None:
        self._end_shard()
        try:
            self._log.publish()
        finally:
            self._release()

    def _release(self) -> None:
        """Leave the memory to a shard that waits in it to be stored."""
        if self._log.waiting_bytes:
            self._memory = None

    def _end_shard(self) -> None:
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            shard = encoder.finish()
            self._log.append(
                shard.data,
                rows=shard.rows,
                suffix="parquet",
                footer_crc32=shard.footer_crc32,
                crc32=shard.crc32,
                schema=encoder.schema,
            )


class _Worker:
    """A daemon thread that runs jobs in order.

    Not an executor of the standard library: those refuse jobs once the interpreter begins to exit, which is
    when writers that were left open publish their last rows.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Any: jobs of every result wait in one queue.
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its error is in the future."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def stop(self) -> None:
        """End the thread after the jobs that are queued."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                result = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # The thread must not keep a job's rows alive while it waits for the next one.
            del item, job, future
