"""Storing a writer's shards in the background, the oldest first, again and again until they are stored.

A shard that cannot be stored moves into the log's folder, where there is one, so that memory does not grow
with a backlog.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rlio.errors import CorruptData, PublishError, RlioError, SchemaConflict
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.journal import Journal
from rlio.storage.local import PendingFile
from rlio.storage.names import ShardName, schema_path, shard_path
from rlio.storage.publish import put_shard

__all__ = ["Publisher", "WaitingShard"]

logger = logging.getLogger("rlio")

# Seconds between attempts to store the oldest shard; `Storage` has tried several times in each.
_FIRST_DELAY = 0.5
_MAX_DELAY = 30.0
# How long a finished shard waits, in memory, for the one before it before it moves into the log.
_PATIENCE = 1.0


@dataclass
class WaitingShard:
    """An encoded shard on its way into the data set.

    Attributes:
        name: Says what it is.
        schema: Of its rows; stored before it.
        data: Its bytes; None once they are in the log.
        pending: A file at the root that has these bytes already and only lacks its name.
        release: Called once ``data`` is not needed any more.
        path: Where it lies in the log; None while it does not.
    """

    name: ShardName
    schema: Schema
    data: memoryview | None
    pending: PendingFile | None = None
    release: Callable[[], object] = field(default=lambda: None)
    path: str | None = None
    #: Whether somebody reads ``data``, to store it or to move it into the log.
    busy: bool = False


class Publisher:
    """Stores the shards of one writer, in order, from a thread of its own.

    Args:
        storage: The data set's root.
        writer_id: Whose shards they are.
        journal: The writer's log; None: what cannot be stored stays in memory.
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
        self._queue: deque[WaitingShard] = deque()
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

    def submit(self, shard: WaitingShard) -> None:
        """Queue a shard. Where those before it are slow or cannot be stored, it moves into the log."""
        self.start()
        with self._changed:
            self._queue.append(shard)
            self._changed.notify_all()
            patience = 0.0 if self._slow else _PATIENCE
            self._changed.wait_for(lambda: len(self._queue) <= 1 or self._error is not None, patience)
            self._slow = len(self._queue) > 1 or self._error is not None
        if self._slow:
            self._spill(shard)

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
            unused = [shard.pending for shard in self._queue if not shard.busy and shard.pending is not None]
        for pending in unused:
            pending.discard()
        if idle and self._thread is not None:
            self._thread.join()

    def _told(self, error: Exception, rows: int) -> Exception:
        """What whoever flushes is told of a failed attempt: where the rows are, if their log keeps them."""
        if self._journal is None or (isinstance(error, RlioError) and not isinstance(error, PublishError)):
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

    def _try(self, shard: WaitingShard) -> None:
        try:
            self._store(shard)
        except Exception as error:
            # Told to whoever flushes; until then it is tried again.
            self._note_failure(shard, error)
            for waiting in list(self._queue):
                self._spill(waiting)
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
                if self._queue and not self._queue[0].busy:
                    delay = self._retry_at - time.monotonic()
                    if self._urgent or delay <= 0:
                        self._attempts += 1
                        shard = self._queue[0]
                        shard.busy = True
                        return lambda: self._try(shard)
                    self._changed.wait(delay)
                else:
                    self._changed.wait()
            return None

    def _store(self, shard: WaitingShard) -> None:
        self._store_schema(shard.schema)
        pending, shard.pending = shard.pending, None
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

    def _data_of(self, shard: WaitingShard) -> memoryview:
        if shard.data is not None:
            return shard.data
        assert shard.path is not None
        with open(shard.path, "rb", opener=_no_follow) as file:
            data = memoryview(file.read())
        if zlib.crc32(data) != shard.name.crc32:
            raise CorruptData("a shard that waited in the log is damaged", uri=shard.path)
        return data

    def _note_failure(self, shard: WaitingShard, error: Exception) -> None:
        with self._changed:
            shard.busy = False
            self._failed, self._error = self._attempts, error
            self._delay = min(2 * self._delay or _FIRST_DELAY, _MAX_DELAY)
            self._retry_at = time.monotonic() + self._delay
            self._changed.notify_all()
        logger.warning("%d rows wait to be stored: %s", shard.name.rows, error)

    def _note_success(self, shard: WaitingShard) -> None:
        shard.release()
        if self._journal is not None:
            try:
                self._journal.release(self._safe_end(shard.name.end))
                if shard.path is not None:
                    self._journal.unspill(shard.path)
            except OSError as error:
                # What stays in the log although it is stored is found so by recovery.
                logger.warning("the log keeps rows that are stored: %s", error)
        with self._changed:
            self._queue.popleft()
            self.rows_published += shard.name.rows
            self.bytes_published += shard.name.size
            self._error, self._delay, self._retry_at, self._slow = None, 0.0, 0.0, False
            self._changed.notify_all()
        logger.info("stored %s: %d rows", shard_path(self._writer_id, shard.name), shard.name.rows)

    def _spill(self, shard: WaitingShard) -> None:
        """Move a shard from memory into the log, unless somebody has it in hand or there is no log."""
        if self._journal is None:
            return
        with self._changed:
            if shard.busy or shard.data is None or shard not in self._queue:
                return
            shard.busy = True
        path = None
        try:
            path = self._journal.spill(shard.name, shard.data, schema=shard.schema)
        except OSError as error:
            logger.warning("a shard that cannot be stored stays in memory: %s", error)
        finally:
            with self._changed:
                shard.busy = False
                if path is not None:
                    shard.path, shard.data = path, None
                self._changed.notify_all()
        if path is not None:
            if shard.pending is not None:
                shard.pending.discard()
                shard.pending = None
            shard.release()
            self._journal.release(self._safe_end(0))

    def _safe_end(self, stored: int) -> int:
        """The row below which every row is stored, or in the log as part of an encoded shard."""
        with self._changed:
            for shard in self._queue:
                if shard.path is None and shard.name.end > stored:
                    return shard.name.first
                stored = max(stored, shard.name.end)
        return stored


def _no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
