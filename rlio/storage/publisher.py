"""Storing a writer's shards in the background, the oldest first, again and again until they are stored.

Where there is a log, the bytes of shards that wait behind one that cannot be stored are dropped, so that
memory does not grow with a backlog. They are made again from the log when their turn comes.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rlio.errors import LedgerError, PublishError, RlioError, SchemaConflict, StoreError
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.journal import Journal
from rlio.storage.local import PendingFile
from rlio.storage.names import ShardName, Suffix, schema_path, shard_path
from rlio.storage.publish import put_shard
from rlio.storage.wal import Frame

__all__ = ["NewShard", "Publisher"]

logger = logging.getLogger("rlio")

# Seconds between attempts to store the oldest shard; `Storage` has tried several times in each.
_FIRST_DELAY = 0.5
_MAX_DELAY = 30.0
# How long a finished shard waits, in memory, for the one before it before its bytes are dropped.
_PATIENCE = 1.0


@dataclass(frozen=True, kw_only=True)
class NewShard:
    """An encoded shard.

    Attributes:
        data: Its bytes, to be left unchanged until ``release`` is called.
        rows: Rows in it.
        suffix: What the bytes are.
        footer_crc32: See `ShardName`.
        schema: Of the rows.
        crc32: Of ``data``, where known.
        pending: A file at the root that holds ``data`` already.
        release: Called, once, when ``data`` is not needed any more.
        remake: Makes the shard again from the log's frames of its rows. None: ``data`` is kept until it is
            stored.
    """

    data: bytes | memoryview
    rows: int
    suffix: Suffix
    footer_crc32: int
    schema: Schema
    crc32: int | None = None
    pending: PendingFile | None = None
    release: Callable[[], object] = field(default=lambda: None)
    remake: Callable[[Iterable[Frame]], NewShard] | None = None

    def name(self, first: int) -> ShardName:
        """Its name, given the number of its first row."""
        return ShardName(
            first=first,
            rows=self.rows,
            size=memoryview(self.data).nbytes,
            crc32=zlib.crc32(self.data) if self.crc32 is None else self.crc32,
            footer_crc32=self.footer_crc32,
            suffix=self.suffix,
        )


@dataclass(eq=False)
class _Waiting:
    """A shard on its way into the data set: its schema is stored before it; see `NewShard`."""

    name: ShardName
    schema: Schema
    #: None while its rows are in the log alone.
    data: memoryview | None
    release: Callable[[], object]
    pending: PendingFile | None
    remake: Callable[[Iterable[Frame]], NewShard] | None


class Publisher:
    """Stores the shards of one writer, in order, from a thread of its own.

    Args:
        storage: The data set's root.
        writer_id: Whose shards they are.
        journal: The writer's log.
        accept: Called, in the thread, before a schema is stored: raises where it must not be.
    """

    def __init__(
        self,
        storage: Storage,
        writer_id: str,
        journal: Journal | None,
        *,
        accept: Callable[[Schema], object] = lambda schema: None,
    ) -> None:
        self._storage = storage
        self._writer_id = writer_id
        self._journal = journal
        self._accept = accept
        #: Schemas of which no row is here yet.
        self._announced: deque[Schema] = deque()
        #: The schema of the last rows, and whether it is to be stored before they are.
        self._expected: Schema | None = None
        self._is_new = False
        #: Hash of the schema that must not be stored, and why; its rows wait until it may.
        self._conflict: tuple[str, SchemaConflict] | None = None
        self._changed = threading.Condition()
        #: The first one has its bytes, from its first attempt on.
        self._queue: deque[_Waiting] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._schemas: set[str] = set()
        #: Attempts begun so far, the last one that failed, and why.
        self._attempts = 0
        self._failed = 0
        self._error: Exception | None = None
        self._delay = 0.0
        self._retry_at = 0.0
        self._urgent = 0
        #: What ended the thread, if it did not end as it should.
        self._died: BaseException | None = None
        #: Whether the store keeps shards waiting: then nobody waits for it a second time.
        self._slow = False
        self._last: Callable[[], object] | None = None
        self._last_error: Exception | None = None
        #: Rows and bytes that are stored.
        self.rows_published = 0
        self.bytes_published = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the shards in memory that are not stored yet."""
        with self._changed:
            return sum(len(shard.data) for shard in self._queue if shard.data is not None)

    def start(self) -> None:
        """Start the thread, unless it runs: too late once the interpreter has begun to exit."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rlio-publish", daemon=True)
            self._thread.start()

    def announce(self, schema: Schema) -> None:
        """Ask the store, in the background, whether a schema may be stored; see `check`."""
        with self._changed:
            self._announced.append(schema)
            self._changed.notify_all()

    def expect(self, schema: Schema) -> None:
        """Store a schema, in the background, of which rows are logged: a shard then need not wait for it."""
        if schema is not self._expected:
            with self._changed:
                self._expected, self._is_new = schema, True
                self._changed.notify_all()

    def check(self) -> None:
        """Raise where rows of an announced schema must not be stored: then none is to follow them.

        Raises:
            SchemaConflict: The store's other writers have another.
        """
        conflict = self._conflict
        if conflict is not None:
            raise conflict[1]

    def submit(self, first: int, new: NewShard) -> None:
        """Queue a shard whose first row has the number ``first``.

        Where those before it are slow, or cannot be stored, its bytes are dropped if its rows are logged.
        """
        self.start()
        shard = _Waiting(
            new.name(first),
            new.schema,
            memoryview(new.data).cast("B"),
            new.release,
            new.pending,
            new.remake,
        )
        with self._changed:
            self._queue.append(shard)
            self._changed.notify_all()
            patience = 0.0 if self._slow else _PATIENCE
            self._changed.wait_for(lambda: len(self._queue) <= 1 or self._error is not None, patience)
            self._slow = len(self._queue) > 1 or self._error is not None
        if self._slow:
            self._drop(shard)

    def wait(self, timeout: float) -> None:
        """Wait until everything is stored, but not longer than ``timeout`` seconds, nor for a slow store."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._error is not None or self._slow, timeout)

    def hurry(self) -> None:
        """Try at once what has failed and waits to be tried again."""
        with self._changed:
            self._retry_at = 0.0
            self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> None:
        """Return once every queued shard is stored.

        Raises:
            PublishError: An attempt that began after this call failed, or ``timeout`` seconds have passed;
                what is queued stays so.
        """
        with self._changed:
            if not self._queue:
                return
            self._urgent += 1
            first = self._attempts + 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: not self._queue or self._failed >= first or self._died is not None, timeout
                )
            finally:
                self._urgent -= 1
            self._check_alive()
            if not self._queue:
                return
            rows = sum(shard.name.rows for shard in self._queue)
            if self._failed >= first and self._error is not None:
                raise self._told(self._error, rows)
        raise PublishError(
            f"the store did not take {rows} rows within {timeout} s: {self.safe()}", uri=self._storage.uri
        )

    def finish(self, last: Callable[[], object], *, timeout: float | None) -> None:
        """Call ``last`` in the thread, when everything is stored, and end the thread.

        Raises:
            PublishError: It is not done within ``timeout`` seconds.
        """
        if self._stopped:
            last()
            return
        self.start()
        with self._changed:
            self._last = last
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._last is None or self._died is not None, timeout)
            self._check_alive()
            failure, pending = self._last_error, self._last is not None
        if failure is not None:
            raise failure
        if pending:
            raise PublishError(
                "every row is stored, but not that the writer is closed: the store did not answer within "
                f"{timeout} s; the next writer there, or `rlio recover`, says so",
                uri=self._storage.uri,
            )

    def stop(self) -> None:
        """End the thread, which does not wait for a store that hangs."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            idle = not self._queue and self._last is None
            # What is not stored lies in the log, if there is one; unfinished files are of no use any more.
            unused = [_take_pending(shard) for shard in self._queue]
        for pending in unused:
            if pending is not None:
                pending.discard()
        if idle and self._thread is not None:
            self._thread.join()

    def _told(self, error: Exception, rows: int) -> Exception:
        """What whoever flushes is told of a failed attempt: where the rows are, if their log keeps them."""
        failed = isinstance(error, PublishError | StoreError) or not isinstance(error, RlioError)
        if self._journal is None or not failed:
            return error
        told = PublishError(f"{rows} rows are not stored yet: {error}; {self.safe()}", uri=self._storage.uri)
        told.__cause__ = error
        return told

    def safe(self) -> str:
        """Where rows are that are not stored yet, and what stores them, for messages."""
        if self._journal is None:
            return "they are in memory, and lost when this process ends; close() tries again"
        return self._journal.promise(self._storage.uri)

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            # A defect of ours: whoever waits for this thread must not wait for ever.
            logger.exception("the thread that stores shards has died")
            with self._changed:
                self._died = error
                self._changed.notify_all()

    def _check_alive(self) -> None:
        if self._died is not None:
            raise PublishError(
                f"the thread that stores shards has died ({self._died!r}), with rows that are not stored: "
                f"{self.safe()}; report this",
                uri=self._storage.uri,
            ) from self._died

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()
        if self._last is not None and not self._stopped:
            self._do_last(self._last)

    def _try(self, shard: _Waiting) -> None:
        try:
            self._store(shard)
        except Exception as error:
            # Told to whoever flushes; until then it is tried again.
            self._note_failure(shard, error)
            for waiting in list(self._queue):
                self._drop(waiting)
        else:
            self._note_success(shard)

    def _look_at(self, schema: Schema) -> None:
        try:
            self._accept_schema(schema)
        except SchemaConflict:
            return  # Raised by the next call of the writer.
        except Exception as error:
            # Looked at again before its first shard is stored; whoever flushes is told then.
            logger.info(
                "whether schema %s fits %s is not known yet: %s", schema.hash, self._storage.uri, error
            )

    def _store_early(self, schema: Schema) -> None:
        try:
            self._store_schema(schema)
        except Exception as error:
            # Tried again with its first shard, whose error is told.
            logger.info("schema %s is not stored in %s yet: %s", schema.hash, self._storage.uri, error)

    def _accept_schema(self, schema: Schema) -> None:
        try:
            self._accept(schema)
        except SchemaConflict as error:
            self._conflict = (schema.hash, error)
            raise
        if self._conflict is not None and self._conflict[0] == schema.hash:
            self._conflict = None  # Who was in the way is gone.

    def _do_last(self, last: Callable[[], object]) -> None:
        try:
            last()
        except Exception as error:
            self._last_error = error
        with self._changed:
            self._last = None
            self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Wait for a shard and the time to store it; None: stop, or nothing is left but the last job."""
        with self._changed:
            while not self._stopped and (self._queue or self._last is None):
                if self._announced:
                    schema = self._announced.popleft()
                    return lambda: self._look_at(schema)
                if self._expected is not None and self._is_new and not self._queue:
                    expected, self._is_new = self._expected, False
                    return lambda: self._store_early(expected)
                if self._queue:
                    delay = self._retry_at - time.monotonic()
                    if self._urgent or delay <= 0:
                        self._attempts += 1
                        shard = self._queue[0]
                        return lambda: self._try(shard)
                    self._changed.wait(delay)
                else:
                    self._changed.wait()
            return None

    def _store(self, shard: _Waiting) -> None:
        self._store_schema(shard.schema)
        with self._changed:
            pending = _take_pending(shard)
        if pending is not None:
            try:
                pending.commit(shard_path(self._writer_id, shard.name))
                return
            except OSError as error:
                logger.warning("a shard must be written anew: %s", error)
        put_shard(self._storage, self._writer_id, shard.name, self._data_of(shard))

    def _store_schema(self, schema: Schema) -> None:
        if schema.hash not in self._schemas:
            self._accept_schema(schema)
            self._storage.put(schema_path(schema.hash), schema.text.encode())
            self._schemas.add(schema.hash)

    def _data_of(self, shard: _Waiting) -> memoryview:
        """The bytes of the first shard, made again if they were dropped."""
        if shard.data is None:
            assert self._journal is not None
            assert shard.remake is not None
            made = shard.remake(self._journal.frames(shard.name.first, shard.name.end))
            if made.name(shard.name.first) != shard.name:
                made.release()
                raise LedgerError(
                    f"the log gives the shard {made.name(shard.name.first).format()} where it was "
                    f"{shard.name.format()} before: the log stays, and `rlio recover` stores its rows once "
                    "this process has ended; report this",
                    uri=self._journal.path,
                )
            with self._changed:
                shard.data, shard.release = memoryview(made.data).cast("B"), made.release
        return shard.data

    def _note_failure(self, shard: _Waiting, error: Exception) -> None:
        with self._changed:
            self._failed, self._error = self._attempts, error
            self._delay = min(2 * self._delay or _FIRST_DELAY, _MAX_DELAY)
            self._retry_at = time.monotonic() + self._delay
            self._changed.notify_all()
        logger.warning("%d rows wait to be stored: %s", shard.name.rows, error)

    def _note_success(self, shard: _Waiting) -> None:
        shard.release()
        if self._journal is not None:
            self._journal.release(shard.name.end)
        with self._changed:
            self._queue.popleft()
            self.rows_published += shard.name.rows
            self.bytes_published += shard.name.size
            self._error, self._delay, self._retry_at, self._slow = None, 0.0, 0.0, False
            self._changed.notify_all()
        logger.info("stored %s: %d rows", shard_path(self._writer_id, shard.name), shard.name.rows)

    def _drop(self, shard: _Waiting) -> None:
        """Drop the bytes of a shard whose rows are logged, but not of the first: it is tried again soon."""
        if self._journal is None or shard.remake is None or shard.data is None:
            return
        try:
            self._journal.secure(shard.name.end)
        except PublishError as error:
            logger.warning("a shard that cannot be stored stays in memory: %s", error)
            return
        with self._changed:
            # In the meantime it may have been stored, dropped, or become the first.
            if shard.data is None or shard not in self._queue or shard is self._queue[0]:
                return
            shard.data = None
            pending = _take_pending(shard)
        shard.release()
        if pending is not None:
            pending.discard()


def _take_pending(shard: _Waiting) -> PendingFile | None:
    """The shard's unfinished file, which is then the caller's to name or to discard."""
    pending, shard.pending = shard.pending, None
    return pending
