"""Storing one writer's shards in the background, the oldest first, again and again until they are stored.

A `Publisher` numbers the rows of the shards that `rlio.writers` encodes, stores each shard, and tells the
writer's `Log` which rows to release. Where there is a log, the bytes of shards that wait behind one that
cannot be stored are dropped, so that memory does not grow with a backlog. They are made again from the log
when their turn comes.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlio.dataset.commit import put_header, put_shard
from rlio.dataset.markers import disclaim, seal
from rlio.dataset.names import ShardName, Suffix, schema_path, shard_path
from rlio.dataset.schema_files import check_agreement, read_schemas
from rlio.errors import LedgerError, PublishError, RlioError, SchemaConflict, StoreError
from rlio.log.log import Log
from rlio.log.wal import Frame
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.local import PendingFile
from rlio.support.forks import Owner

__all__ = ["NewShard", "Publisher", "check_schema"]

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
        data: Its bytes, which nothing changes any more.
        rows: Rows in it.
        suffix: What the bytes are.
        footer_crc32: See `ShardName`.
        schema: Of the rows.
        crc32: Of ``data``, where known.
        pending: A file at the root that holds ``data`` already.
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
    pending: PendingFile | None
    remake: Callable[[Iterable[Frame]], NewShard] | None


def check_schema(storage: Storage, schema: Schema, *, again: bool = False) -> None:
    """Refuse a schema that gives a column another type than the root's other writers do.

    A writer that begins at the same moment is not seen here; then readers refuse.

    Args:
        storage: The root.
        schema: Of rows that are to be stored there.
        again: Accept a schema that is stored there already, whatever the others are: rows that follow rows of
            the same schema make nothing worse.

    Raises:
        SchemaConflict: It does; the message names both schemas.
        CorruptData: A schema file there is damaged.
        StoreError: The store cannot be asked.
    """
    known = read_schemas(storage, torn="skip")
    if not (again and schema.hash in known):
        check_agreement({**known, schema.hash: schema}, uri=storage.uri)


class Publisher:
    """Numbers a writer's rows and stores its shards in order, from a thread of its own.

    `rlio.log.new_writer.open_publisher` opens one for a new writer.

    Args:
        storage: The data set's root.
        writer_id: Whose shards they are.
        log: The writer's log. None: what cannot be stored stays in memory.
        first: Number of the first row.
        is_new: Whether this writer put its claim, so that closing it removes the claim. False: it stores the
            rows of a dead writer.
        has_root: Whether the root was made. False: it is made before the first shard.
        asks_first: Whether the store is asked about a schema before rows of it are taken. False: in the
            background, since the rows are safe in the log meanwhile.
        conflicting: Store rows whose schema does not fit those of the root, too.
    """

    def __init__(
        self,
        storage: Storage,
        writer_id: str,
        *,
        log: Log | None = None,
        first: int = 0,
        is_new: bool = True,
        has_root: bool = True,
        asks_first: bool = True,
        conflicting: bool = False,
    ) -> None:
        self.storage = storage
        self.writer_id = writer_id
        self.log = log
        self._is_new = is_new
        self._has_root = has_root
        self._asks_first = asks_first
        self._conflicting = conflicting
        self._owner = Owner()
        self._changed = threading.Condition()
        #: The first one has its bytes, from its first attempt on.
        self._queue: deque[_Waiting] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False
        #: Schemas to be stored before there is a shard of them, and the last one of these.
        self._expected: deque[Schema] = deque()
        self._last_expected: Schema | None = None
        #: Hashes of the schemas that may be stored, and of those that are.
        self._accepted: set[str] = set()
        self._schemas: set[str] = set()
        #: Hash of the schema that must not be stored, and why; its rows wait until it may.
        self._conflict: tuple[str, SchemaConflict] | None = None
        #: Attempts begun so far, the last one that failed, and why.
        self._attempts = 0
        self._failed = 0
        self._error: Exception | None = None
        self._delay = 0.0
        self._retry_at = 0.0
        self._urgent = 0
        #: What ended the thread, if it did not end as it should.
        self._died: BaseException | None = None
        #: Whether the store keeps shards waiting: then `submit` does not wait for it a second time.
        self._slow = False
        #: What the thread does after the last shard, and its error.
        self._last: Callable[[], object] | None = None
        self._last_error: Exception | None = None
        #: Number of the first row of the next shard.
        self.next_row = first
        #: Rows that were taken: those of a `write()` that was interrupted just before it returned, too.
        self.received = 0
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

    # ---- what may be taken ----

    def check_process(self) -> None:
        """Raise in a forked child, which has none of the threads.

        Raises:
            PublishError: This is not the process that opened the writer.
        """
        self._owner.check("writer", error=PublishError, uri=self.storage.uri)

    def check(self) -> None:
        """Raise where no more rows may be taken.

        Raises:
            PublishError: This is a forked child.
            SchemaConflict: The store said, meanwhile, that the rows do not fit those of other writers.
        """
        self.check_process()
        conflict = self._conflict
        if conflict is not None:
            raise conflict[1]

    def check_schema(self, schema: Schema) -> None:
        """Refuse a schema that does not fit the root, before rows of it are taken; see `check_schema`.

        Without ``asks_first`` the store is asked after `expect`; `check` and `flush` raise a conflict.

        Raises:
            SchemaConflict: It does not fit.
        """
        if self._asks_first:
            check_schema(self.storage, schema)
            self._accepted.add(schema.hash)

    def expect(self, schema: Schema) -> None:
        """Store a schema in the background, of which rows are logged: a shard then need not wait for it."""
        if schema is not self._last_expected:
            with self._changed:
                self._expected.append(schema)
                self._last_expected = schema
                self._changed.notify_all()

    def check_counts(self) -> None:
        """Raise unless every row received was logged, where there is a log, and stored.

        Raises:
            LedgerError: One was not, or one was counted twice.
        """
        logged = self.received if self.log is None else self.log.end
        if not self.received == logged == self.rows_published:
            raise LedgerError(
                f"the writer's rows do not add up: {self.received} received, {logged} logged, "
                f"{self.rows_published} published; do not trust this data set before `rlio verify` has seen "
                "it, and report this",
                uri=self.storage.uri,
            )

    # ---- shards ----

    def pending_file(self) -> PendingFile | None:
        """A file at a local root to which a shard's bytes may go while they are made; None elsewhere."""
        if not self.storage.is_local:
            return None
        try:
            return PendingFile(self.storage.root)
        except OSError:
            return None  # Then storing the whole shard will say what is wrong.

    def submit(self, new: NewShard) -> None:
        """Number a shard's rows and queue it.

        Where those before it are slow, or cannot be stored, its bytes are dropped if its rows are logged.
        """
        self.start()
        shard = _Waiting(
            new.name(self.next_row),
            new.schema,
            memoryview(new.data).cast("B"),
            new.pending,
            new.remake,
        )
        self.next_row += new.rows
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

    def wait_for_room(self) -> None:
        """Wait until the log is within its bound again; see `Log.wait_for_room`."""
        with self._changed:  # The pause between two attempts may be longer than this wait.
            self._retry_at = 0.0
            self._changed.notify_all()
        if self.log is not None:
            self.log.wait_for_room()

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
        raise self.overdue(f"the store did not take {rows} rows", timeout)

    def close(self, *, seal_at: int | None, timeout: float | None = None) -> None:
        """End the thread, which does not wait for a store that hangs, and release the log.

        Args:
            seal_at: Say that the writer is closed for good after as many rows, all of them stored, and
                remove its log; None leaves the log to recovery.
            timeout: Seconds that saying so may take; None: as long as it takes.

        Raises:
            PublishError: It could not be said; the log stays, for recovery to do so.
        """
        keep = True
        try:
            if seal_at is not None:
                self._finish(lambda: self._seal(seal_at), timeout=timeout)
                keep = False
        finally:
            self._stop()
            if self.log is not None:
                self.log.close(keep=keep)

    def overdue(self, what: str, timeout: float | None) -> PublishError:
        """The error of a flush whose time is over: what was not done, and where its rows are."""
        return PublishError(f"{what} within {timeout or 0:.3g} s: {self._safe()}", uri=self.storage.uri)

    def _finish(self, last: Callable[[], object], *, timeout: float | None) -> None:
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
                uri=self.storage.uri,
            )

    def _stop(self) -> None:
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

    def _seal(self, rows: int) -> None:
        if rows:
            seal(self.storage, self.writer_id, rows)
        if self._is_new:
            disclaim(self.storage, self.writer_id)

    def _told(self, error: Exception, rows: int) -> Exception:
        """The error that a flush raises for a failed attempt: where the rows are, if their log keeps them."""
        failed = isinstance(error, PublishError | StoreError) or not isinstance(error, RlioError)
        if self.log is None or not failed:
            return error
        told = PublishError(f"{rows} rows are not stored yet: {error}; {self._safe()}", uri=self.storage.uri)
        told.__cause__ = error
        return told

    def _safe(self) -> str:
        """Where rows are that are not stored yet, and what stores them, for messages."""
        if self.log is None:
            return "they are in memory, and lost when this process ends; close() tries again"
        return self.log.promise(self.storage.uri)

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
                del job  # It holds the bytes of a shard.
            if self._last is not None and not self._stopped:
                self._do_last(self._last)
        except BaseException as error:
            # A defect of ours: callers that wait for this thread must not hang.
            with self._changed:
                self._died = error
                self._changed.notify_all()
            logger.exception("the thread that stores shards has died")  # A handler may raise.

    def _check_alive(self) -> None:
        if self._died is not None:
            raise PublishError(
                f"the thread that stores shards has died ({self._died!r}), with rows that are not stored: "
                f"{self._safe()}; report this",
                uri=self.storage.uri,
            ) from self._died

    def _next(self) -> Callable[[], None] | None:
        """Wait for a shard and the time to store it; None: stop, or nothing is left but the last job."""
        with self._changed:
            while not self._stopped and (self._queue or self._last is None):
                if self._expected:
                    schema = self._expected.popleft()
                    return lambda: self._store_early(schema)
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

    def _try(self, shard: _Waiting) -> None:
        try:
            self._store(shard)
        except Exception as error:
            # The next flush raises it; until then it is tried again.
            self._note_failure(shard, error)
            for waiting in list(self._queue):
                self._drop(waiting)
        else:
            self._note_success(shard)

    def _store_early(self, schema: Schema) -> None:
        try:
            self._store_schema(schema)
        except SchemaConflict:
            return  # Raised by the next call of the writer.
        except Exception as error:
            # Tried again with its first shard, whose error the next flush raises.
            logger.info("schema %s is not stored in %s yet: %s", schema.hash, self.storage.uri, error)

    def _do_last(self, last: Callable[[], object]) -> None:
        try:
            last()
        except Exception as error:
            self._last_error = error
        with self._changed:
            self._last = None
            self._changed.notify_all()

    def _store(self, shard: _Waiting) -> None:
        self._store_schema(shard.schema)
        with self._changed:
            pending = _take_pending(shard)
        if pending is not None:
            try:
                pending.commit(shard_path(self.writer_id, shard.name))
                return
            except OSError as error:
                logger.warning("a shard must be written again: %s", error)
        put_shard(self.storage, self.writer_id, shard.name, self._data_of(shard))

    def _store_schema(self, schema: Schema) -> None:
        """Store a schema, and before it the root, unless they are; refuse what must not be stored.

        Raises:
            SchemaConflict: It does not fit those of other writers.
        """
        if schema.hash in self._schemas:
            return
        if not self._has_root:
            put_header(self.storage)
            self._has_root = True
        if not self._conflicting and schema.hash not in self._accepted:
            try:
                check_schema(self.storage, schema, again=not self._is_new)
            except SchemaConflict as error:
                found = self._with_log(error)
                self._conflict = (schema.hash, found)
                raise found  # noqa: B904 - its cause is set, but where it is the error itself
            self._accepted.add(schema.hash)
        if self._conflict is not None and self._conflict[0] == schema.hash:
            self._conflict = None  # What was in the way is gone.
        self.storage.put(schema_path(schema.hash), schema.text.encode())
        self._schemas.add(schema.hash)

    def _with_log(self, error: SchemaConflict) -> SchemaConflict:
        """A conflict that was found after rows were taken: it says where they are."""
        if self.log is None:
            return error
        found = SchemaConflict(
            f"{error}; what was taken before this was seen cannot be stored there: it stays in the log "
            f"{self.log.path}, which `rlio recover --conflicting` stores all the same"
        )
        found.uri, found.column, found.__cause__ = error.uri, error.column, error
        return found

    def _data_of(self, shard: _Waiting) -> memoryview:
        """The bytes of the first shard, made again if they were dropped."""
        if shard.data is None:
            assert self.log is not None
            assert shard.remake is not None
            made = shard.remake(self.log.frames(shard.name.first, shard.name.end))
            if made.name(shard.name.first) != shard.name:
                raise LedgerError(
                    f"the log gives the shard {made.name(shard.name.first).format()} where it was "
                    f"{shard.name.format()} before: the log stays, and `rlio recover` stores its rows once "
                    "this process has ended; report this",
                    uri=self.log.path,
                )
            with self._changed:
                shard.data = memoryview(made.data).cast("B")
        return shard.data

    def _note_failure(self, shard: _Waiting, error: Exception) -> None:
        with self._changed:
            self._failed, self._error = self._attempts, error
            self._delay = min(2 * self._delay or _FIRST_DELAY, _MAX_DELAY)
            self._retry_at = time.monotonic() + self._delay
            self._changed.notify_all()
        # As text: handlers may keep the error, whose traceback holds the bytes of the shard.
        logger.warning("%d rows wait to be stored: %s", shard.name.rows, str(error))

    def _note_success(self, shard: _Waiting) -> None:
        if self.log is not None:
            self.log.release(shard.name.end)
        with self._changed:
            self._queue.popleft()
            self.rows_published += shard.name.rows
            self.bytes_published += shard.name.size
            self._error, self._delay, self._retry_at, self._slow = None, 0.0, 0.0, False
            self._changed.notify_all()
        logger.info("stored %s: %d rows", shard_path(self.writer_id, shard.name), shard.name.rows)

    def _drop(self, shard: _Waiting) -> None:
        """Drop the bytes of a shard whose rows are logged, but not of the first: it is tried again soon."""
        if self.log is None or shard.remake is None or shard.data is None:
            return
        try:
            self.log.secure(shard.name.end)
        except PublishError as error:
            logger.warning("a shard that cannot be stored stays in memory: %s", str(error))
            return
        with self._changed:
            # In the meantime it may have been stored, dropped, or become the first.
            if shard.data is None or shard not in self._queue or shard is self._queue[0]:
                return
            shard.data = None
            pending = _take_pending(shard)
        if pending is not None:
            pending.discard()


def _take_pending(shard: _Waiting) -> PendingFile | None:
    """The shard's unfinished file, which the caller must then commit or discard."""
    pending, shard.pending = shard.pending, None
    return pending
