"""Stores one writer's shards in the background, oldest first, and retries until they are stored.

A `Publisher` numbers the rows of the shards that `rlio.writers` encodes. It stores each shard, and tells the
writer's `Log` which rows to release. If there is a log, it drops the bytes of shards that wait behind one
that cannot be stored, so memory does not grow with a backlog. It encodes these shards again from the log when
their turn comes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlio.catalog.commit import put_header, put_shard
from rlio.catalog.markers import disclaim, seal
from rlio.catalog.names import HEADER, ShardName, Suffix, schema_path, shard_path
from rlio.catalog.schema_files import read_schemas
from rlio.errors import LedgerError, PublishError, RlioError, SchemaConflict, StoreError
from rlio.log.log import Log
from rlio.log.wal import Frame
from rlio.schemas.agreement import check_agreement
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.local import PendingFile
from rlio.support.forks import Owner

__all__ = ["NewShard", "Publisher", "check_schema"]

logger: logging.Logger = logging.getLogger("rlio")

# Seconds between attempts to store the oldest shard; in each attempt `Storage` retries several times.
_FIRST_DELAY = 0.5
_MAX_DELAY = 30.0
# Seconds that a finished shard waits in memory for the shard before it. Then its bytes are dropped.
_PATIENCE = 1.0


@dataclass(eq=False, kw_only=True)
class NewShard:
    """An encoded shard.

    Attributes:
        data: The bytes of the shard, which no longer change. Empty while only the log has its rows.
        rows: Rows in the shard.
        suffix: The file format.
        footer_crc32: See `ShardName`.
        schema: Schema of the rows.
        crc32: CRC-32 of ``data``, if known.
        pending: A file at the root that already holds ``data``.
        remake: Encodes the shard again from the log's frames of its rows. None: ``data`` is kept until it is
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
        """Return the shard's name, given the number of its first row."""
        return ShardName(
            first=first,
            rows=self.rows,
            size=memoryview(self.data).nbytes,
            crc32=zlib.crc32(self.data) if self.crc32 is None else self.crc32,
            footer_crc32=self.footer_crc32,
            suffix=self.suffix,
        )


def check_schema(storage: Storage, schema: Schema, *, again: bool = False) -> None:
    """Refuse a schema that gives a column another type than the root's other writers do.

    Does not see a writer that starts at the same moment; readers then refuse the data.

    Args:
        storage: The root.
        schema: Schema of rows to be stored there.
        again: Accept a schema that is already stored there, regardless of the others, because more rows of
            the same schema make nothing worse.

    Raises:
        SchemaConflict: A column has another type; the message names both schemas.
        CorruptData: A schema file of the root is damaged.
        StoreError: The schemas of the root cannot be read.
    """
    known = read_schemas(storage, torn="skip")
    if not (again and schema.hash in known):
        check_agreement({**known, schema.hash: schema}, uri=storage.uri)


class Publisher:
    """Numbers a writer's rows and stores its shards in order, in its own thread.

    `rlio.log.new_writer.open_publisher` opens one for a new writer.

    Args:
        storage: The data set's root.
        writer_id: The writer of the shards.
        log: The writer's log. None: shards that cannot be stored stay in memory.
        first: Number of the first row.
        is_new: Whether this writer put its claim; closing it then removes the claim. False: it stores the
            rows of a dead writer.
        has_root: Whether the root exists. False: it is made before the first shard.
        asks_first: Whether to check a schema against the store before rows with it are accepted. False: check
            in the background, because the log keeps the rows safe meanwhile.
        conflicting: Whether to store rows whose schema conflicts with the root's.
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
        #: From its first attempt on, the first shard has its bytes.
        self._queue: deque[tuple[ShardName, NewShard]] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False
        #: Schemas to store before they have a shard, and the last one added.
        self._expected: deque[Schema] = deque()
        self._last_expected: Schema | None = None
        #: Hashes of the schemas that may be stored, and of those that are stored.
        self._accepted: set[str] = set()
        self._schemas: set[str] = set()
        #: Hash of the schema that must not be stored, and why; its rows wait until it may be stored.
        self._conflict: tuple[str, SchemaConflict] | None = None
        #: Attempts started so far, the last one that failed, and its error.
        self._attempts = 0
        self._failed = 0
        self._error: Exception | None = None
        self._delay = 0.0
        self._retry_at = 0.0
        self._urgent = 0
        #: The error that ended the thread, if it died.
        self._died: BaseException | None = None
        #: Whether the store keeps shards waiting: `submit` then does not wait for it again.
        self._slow = False
        #: The job that the thread does after the last shard, and its error.
        self._last: Callable[[], object] | None = None
        self._last_error: Exception | None = None
        #: Number of the first row of the next shard.
        self.next_row: int = first
        #: Accepted rows, including those of a `write()` that was interrupted right before its return.
        self.received = 0
        #: Stored rows and bytes.
        self.rows_published: int = 0
        self.bytes_published: int = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the shards in memory that are not stored yet."""
        with self._changed:
            return sum(memoryview(shard.data).nbytes for _, shard in self._queue)

    def start(self) -> None:
        """Start the thread unless it runs. It cannot start once the interpreter exits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rlio-publish", daemon=True)
            self._thread.start()

    # ---- checks before rows are accepted ----

    def check_process(self) -> None:
        """Raise in a forked child, because it has none of the threads.

        Raises:
            PublishError: This is not the process that opened the writer.
        """
        self._owner.check("writer", error=PublishError, uri=self.storage.uri)

    def check(self) -> None:
        """Raise if no more rows can be accepted.

        Raises:
            PublishError: This is a forked child.
            SchemaConflict: The store reported, in the background, that the rows conflict with other writers.
        """
        self.check_process()
        conflict = self._conflict
        if conflict is not None:
            raise conflict[1]

    def check_schema(self, schema: Schema) -> None:
        """Refuse a schema that conflicts with the root before its rows are accepted; see `check_schema`.

        Without ``asks_first`` the check runs after `expect`, and `check` and `flush` raise the conflict.

        Raises:
            SchemaConflict: The schema conflicts with the root.
        """
        if self._asks_first:
            check_schema(self.storage, schema)
            self._accepted.add(schema.hash)

    def expect(self, schema: Schema) -> None:
        """Store the schema of logged rows in the background, before their first shard needs it."""
        if schema is not self._last_expected:
            with self._changed:
                self._expected.append(schema)
                self._last_expected = schema
                self._changed.notify_all()

    def check_counts(self) -> None:
        """Raise unless every received row was stored, and logged if there is a log.

        Raises:
            LedgerError: A row was lost, or counted twice.
        """
        logged = self.received if self.log is None else self.log.end
        if not self.received == logged == self.rows_published:
            raise LedgerError(
                f"the writer's rows do not add up: {self.received} received, {logged} logged, "
                f"{self.rows_published} published; run `rlio verify` before you trust this data set, and "
                "report this",
                uri=self.storage.uri,
            )

    # ---- shards ----

    def pending_file(self) -> PendingFile | None:
        """Return a file at a local root into which a shard can be encoded; None on other filesystems."""
        # (It makes its folders: not in place of a root that has vanished.)
        if not self.storage.is_local or not os.path.isdir(self.storage.root):
            return None
        try:
            return PendingFile(self.storage.root)
        except OSError:
            return None  # The put of the whole shard will report the cause.

    def submit(self, new: NewShard) -> None:
        """Number a shard's rows and queue it.

        If earlier shards are slow or cannot be stored, its bytes are dropped, provided its rows are logged.
        """
        self.start()
        waiting = (new.name(self.next_row), new)
        self.next_row += new.rows
        with self._changed:
            self._queue.append(waiting)
            self._changed.notify_all()
            patience = 0.0 if self._slow else _PATIENCE
            self._changed.wait_for(lambda: len(self._queue) <= 1 or self._error is not None, patience)
            self._slow = len(self._queue) > 1 or self._error is not None
        if self._slow:
            self._drop(waiting)

    def wait(self, timeout: float) -> None:
        """Wait until everything is stored, at most ``timeout`` seconds. Does not wait for a slow store."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._error is not None or self._slow, timeout)

    def wait_for_room(self) -> None:
        """Wait until the log is below its size limit; see `Log.wait_for_room`."""
        with self._changed:  # Retry now: the delay between two attempts may be longer than this wait.
            self._retry_at = 0.0
            self._changed.notify_all()
        if self.log is not None:
            self.log.wait_for_room()

    def flush(self, timeout: float | None = None) -> None:
        """Return once every queued shard is stored.

        Raises:
            PublishError: An attempt that started after this call failed, or ``timeout`` seconds passed. The
                shards stay queued.
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
            rows = sum(name.rows for name, _ in self._queue)
            if self._failed >= first and self._error is not None:
                raise self._told(self._error, rows)
        raise self.overdue(f"the store did not take {rows} rows", timeout)

    def close(self, *, seal_at: int | None, timeout: float | None = None) -> None:
        """End the thread and release the log. Does not wait for a store that hangs.

        Args:
            seal_at: Mark the writer as closed for good after this many rows, all of them stored, and remove
                its log. None leaves the log to recovery.
            timeout: Seconds to wait for that mark; None: without limit.

        Raises:
            PublishError: The mark could not be stored; the log stays, and recovery stores the mark.
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
        """Return the error for a flush that timed out: what was not done, and where the rows are."""
        return PublishError(f"{what} within {timeout or 0:.3g} s: {self._safe()}", uri=self.storage.uri)

    def _finish(self, last: Callable[[], object], *, timeout: float | None) -> None:
        """Call ``last`` in the thread after everything is stored, then end the thread.

        Raises:
            PublishError: ``last`` did not finish within ``timeout`` seconds.
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
                "every row is stored, but the writer is not marked as closed: the store did not answer "
                f"within {timeout} s; the next writer there, or `rlio recover`, marks it",
                uri=self.storage.uri,
            )

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            idle = not self._queue and self._last is None
            # The log, if there is one, has the rows that are not stored; unfinished files are useless.
            unused = [_take_pending(shard) for _, shard in self._queue]
        for pending in unused:
            if pending is not None:
                pending.discard()
        if idle and self._thread is not None:
            self._thread.join()

    def _seal(self, rows: int) -> None:
        if rows:
            self._check_root()
            seal(self.storage, self.writer_id, rows)
        if self._is_new:
            disclaim(self.storage, self.writer_id)

    def _told(self, error: Exception, rows: int) -> Exception:
        """Return the error that a flush raises for a failed attempt. It says where the log keeps the rows."""
        failed = isinstance(error, PublishError | StoreError) or not isinstance(error, RlioError)
        if self.log is None or not failed:
            return error
        told = PublishError(f"{rows} rows are not stored yet: {error}; {self._safe()}", uri=self.storage.uri)
        told.__cause__ = error
        return told

    def _safe(self, *, again: bool = True) -> str:
        """Return the message that says where unstored rows are and what stores them.

        Args:
            again: Whether `close` tries again, which takes a living thread.
        """
        if self.log is None or not os.path.isdir(self.log.path):
            retry = "; close() tries again" if again else ""
            return f"they are only in memory, and lost when this process ends{retry}"
        return self.log.promise(self.storage.uri, again=again)

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
                del job  # Frees the bytes of the shard.
            if self._last is not None and not self._stopped:
                self._do_last(self._last)
        except BaseException as error:
            # A defect of rlio: callers that wait for this thread must not hang.
            with self._changed:
                self._died = error
                self._changed.notify_all()
            logger.exception("the thread that stores shards has died")  # A handler may raise.

    def _check_alive(self) -> None:
        if self._died is not None:
            raise PublishError(
                f"the thread that stores shards has died ({self._died!r}), with rows that are not stored: "
                f"{self._safe(again=False)}; report this",
                uri=self.storage.uri,
            ) from self._died

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next job and its time; None: stop, or only the last job remains."""
        with self._changed:
            while not self._stopped and (self._queue or self._last is None):
                if self._expected:
                    schema = self._expected.popleft()
                    return lambda: self._store_early(schema)
                if self._queue:
                    delay = self._retry_at - time.monotonic()
                    if self._urgent or delay <= 0:
                        self._attempts += 1
                        name, shard = self._queue[0]
                        return lambda: self._try(name, shard)
                    self._changed.wait(delay)
                else:
                    self._changed.wait()
            return None

    def _try(self, name: ShardName, shard: NewShard) -> None:
        try:
            self._store(name, shard)
        except Exception as error:
            # The next flush raises the error; until then the thread tries again.
            self._note_failure(name, error)
            for waiting in list(self._queue):
                self._drop(waiting)
        else:
            self._note_success(name)

    def _store_early(self, schema: Schema) -> None:
        try:
            self._store_schema(schema)
        except SchemaConflict:
            return  # The next call of the writer raises it.
        except Exception as error:
            # Retried with the first shard of the schema; the next flush raises that error.
            logger.info("schema %s is not stored in %s yet: %s", schema.hash, self.storage.uri, error)

    def _do_last(self, last: Callable[[], object]) -> None:
        try:
            last()
        except Exception as error:
            self._last_error = error
        with self._changed:
            self._last = None
            self._changed.notify_all()

    def _store(self, name: ShardName, shard: NewShard) -> None:
        self._store_schema(shard.schema)
        with self._changed:
            pending = _take_pending(shard)
        if pending is not None:
            try:
                pending.commit(shard_path(self.writer_id, name))
                return
            except OSError as error:
                logger.warning("a shard must be written again: %s", error)
        put_shard(self.storage, self.writer_id, name, memoryview(self._data_of(name, shard)).cast("B"))

    def _store_schema(self, schema: Schema) -> None:
        """Store a schema, after the root, unless they are already stored. Refuses a conflicting schema.

        Raises:
            SchemaConflict: The schema conflicts with those of other writers.
            PublishError: The root has vanished.
        """
        if schema.hash in self._schemas and self._has(schema_path(schema.hash)):
            return
        if not self._has_root:
            put_header(self.storage)
            self._has_root = True
        self._check_root()
        if not self._conflicting and schema.hash not in self._accepted:
            try:
                check_schema(self.storage, schema, again=not self._is_new)
            except SchemaConflict as error:
                found = self._with_log(error)
                self._conflict = (schema.hash, found)
                raise found  # noqa: B904 - its cause is set, except where it is the error itself
            self._accepted.add(schema.hash)
        if self._conflict is not None and self._conflict[0] == schema.hash:
            self._conflict = None  # The conflicting schema is gone.
        self.storage.put(schema_path(schema.hash), schema.text.encode())
        self._schemas.add(schema.hash)

    def _check_root(self) -> None:
        """Raise if the root has vanished: what is stored in its place would be no data set.

        Raises:
            PublishError: The root has no header any more.
        """
        if not self._has(HEADER):
            raise PublishError(
                f"the data set has vanished: {HEADER}, which was there when the writer was opened, is gone. "
                "Nothing is stored until it is there again: bring the folder back (is it mounted?), then "
                "call close() again",
                uri=self.storage.uri,
            )

    def _has(self, path: str) -> bool:
        try:
            return self.storage.exists(path)
        except StoreError as error:
            raise PublishError(f"nothing can be stored: {error}", uri=self.storage.uri) from error

    def _with_log(self, error: SchemaConflict) -> SchemaConflict:
        """Add to a conflict that was found after rows were accepted where these rows are."""
        if self.log is None:
            return error
        found = SchemaConflict(
            f"{error}; rows accepted before this was found cannot be stored there: they stay in the log "
            f"{self.log.path}; `rlio recover --conflicting` stores them anyway"
        )
        found.uri, found.column, found.__cause__ = error.uri, error.column, error
        return found

    def _data_of(self, name: ShardName, shard: NewShard) -> bytes | memoryview:
        """Return the bytes of the first shard; encode it again if they were dropped."""
        if not shard.data:
            assert self.log is not None
            assert shard.remake is not None
            made = shard.remake(self.log.frames(name.first, name.end))
            if made.name(name.first) != name:
                raise LedgerError(
                    f"the log gives the shard {made.name(name.first).format()}, expected {name.format()}: "
                    "the log stays, and `rlio recover` stores its rows after this process has ended; "
                    "report this",
                    uri=self.log.path,
                )
            with self._changed:
                shard.data = made.data
        return shard.data

    def _note_failure(self, name: ShardName, error: Exception) -> None:
        with self._changed:
            self._failed, self._error = self._attempts, error
            self._delay = min(2 * self._delay or _FIRST_DELAY, _MAX_DELAY)
            self._retry_at = time.monotonic() + self._delay
            self._changed.notify_all()
        # As text: a handler may keep the error, and its traceback holds the bytes of the shard.
        logger.warning("%d rows wait to be stored: %s", name.rows, str(error))

    def _note_success(self, name: ShardName) -> None:
        if self.log is not None:
            self.log.release(name.end)
        with self._changed:
            self._queue.popleft()
            self.rows_published += name.rows
            self.bytes_published += name.size
            self._error, self._delay, self._retry_at, self._slow = None, 0.0, 0.0, False
            self._changed.notify_all()
        logger.info("stored %s: %d rows", shard_path(self.writer_id, name), name.rows)

    def _drop(self, waiting: tuple[ShardName, NewShard]) -> None:
        """Drop the bytes of a shard whose rows are logged, except the first shard: its retry is soon."""
        name, shard = waiting
        if self.log is None or shard.remake is None or not shard.data:
            return
        try:
            self.log.secure(name.end)
        except PublishError as error:
            logger.warning("a shard that cannot be stored stays in memory: %s", str(error))
            return
        with self._changed:
            # It may have been stored, dropped, or become the first meanwhile.
            if not shard.data or waiting not in self._queue or waiting is self._queue[0]:
                return
            shard.data = b""
            pending = _take_pending(shard)
        if pending is not None:
            pending.discard()


def _take_pending(shard: NewShard) -> PendingFile | None:
    """Take the shard's unfinished file. The caller must commit or discard it."""
    pending, shard.pending = shard.pending, None
    return pending
