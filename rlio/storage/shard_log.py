"""One writer's side of the commit: its id, its row numbers, its log, and its shards on their way.

What encodes rows (`rlio.writers`) logs them here and hands whole shards over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlio.errors import LedgerError, OptionError, PublishError, RlioError, SchemaConflict, StoreError
from rlio.schemas.schema import Schema
from rlio.storage.clients import within
from rlio.storage.failures import is_permanent
from rlio.storage.filesystem import Storage
from rlio.storage.journal import Journal
from rlio.storage.local import PendingFile
from rlio.storage.markers import claim, disclaim, seal
from rlio.storage.names import check_writer_id, make_writer_id, writer_dir
from rlio.storage.publish import put_header
from rlio.storage.publisher import NewShard, Publisher
from rlio.storage.schema_files import check_agreement, read_schemas
from rlio.storage.spool import LogFolder, Spool, spool_of
from rlio.storage.wal import Buffer

__all__ = ["ShardLog", "WriteLedger", "check_schema"]

logger = logging.getLogger("rlio")

# How long opening a writer waits until it can be seen, and until the root is there.
_CLAIM_SECONDS = 2.0
_OPEN_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class WriteLedger:
    """Where the rows are that a writer was given.

    Attributes:
        received: Rows that `write()` accepted.
        logged: Rows that went through the write-ahead log; None without one.
        published: Rows that every reader can see.
        waited: Seconds that `write()` has waited for room in the log.
    """

    received: int
    logged: int | None
    published: int
    waited: float = 0.0

    @property
    def waiting(self) -> int:
        """Rows that are not published yet."""
        return self.received - self.published

    def check(self, *, uri: str) -> None:
        """Raise unless every row received was logged and published.

        Raises:
            LedgerError: One was not.
        """
        if self.published != self.received or self.logged not in (None, self.received):
            raise LedgerError(
                f"the writer's ledger does not add up: {self}; do not trust this data set before "
                "`rlio verify` has seen it, and report this",
                uri=uri,
            )


def check_schema(storage: Storage, schema: Schema, *, again: bool = False) -> None:
    """Refuse a schema that gives a column another type than the root's other writers do.

    A writer that begins at the same moment is not seen here; then readers refuse.

    Args:
        storage: The root.
        schema: Of rows that are to be stored there.
        again: Take one that is stored there already, whatever the others are: rows that follow rows of the
            same schema make nothing worse.

    Raises:
        SchemaConflict: It does; the message names both schemas.
        CorruptData: A schema file there is damaged.
        StoreError: The store cannot be asked.
    """
    known = read_schemas(storage, torn="skip")
    if not (again and schema.hash in known):
        check_agreement({**known, schema.hash: schema}, uri=storage.uri)


class ShardLog:
    """Numbers a writer's rows, logs them, and stores its shards in order.

    Args:
        root: Folder of the data set, on any filesystem.
        writer_id: None draws a fresh one; a given one must have no rows there yet.
        worker_index: Goes into a drawn id.
        storage_options: For fsspec.
        spool: How rows are logged; None: not at all.
        resume_at: Go on with the given writer, which is dead, at this row.
        conflicting: Store rows whose schema does not fit those of the root, too.

    A store that is down, or hangs, refuses a writer unless its rows can wait: in a log that lies elsewhere,
    under an id that was drawn. (Whether a given id is free only the store knows.) The root is then made in
    the background, before the first shard. What no repetition can change (rights, a bucket that is not there,
    another format version) refuses every writer.

    Raises:
        OptionError: The given id is illegal, or has rows; or the root is in another format version.
        CorruptData: The root's header is damaged.
        PublishError: Nothing can be stored, or logged, there.
        UnsafeData: The spool belongs to another user.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        writer_id: str | None = None,
        worker_index: int = 0,
        storage_options: dict[str, object] | None = None,
        spool: Spool | None = None,
        resume_at: int | None = None,
        conflicting: bool = False,
    ) -> None:
        self.storage = (
            root if isinstance(root, Storage) else Storage.open(root, storage_options=storage_options)
        )
        self.writer_id = make_writer_id(worker_index) if writer_id is None else check_writer_id(writer_id)
        self._claims = resume_at is None
        self._conflicting = conflicting
        self._pid = os.getpid()
        spooled = None if spool is None else spool_of(self.storage, spool)
        #: Whether the log and the root share a disk, so that asking the root is asking the log's disk.
        self._beside = spooled is not None and self.storage.is_local and _is_below(spooled, self.storage.root)
        if writer_id is not None and resume_at is None:
            self._check_free()
        try:
            # A root that cannot be written, or is in another format, is found out before rows are taken.
            can_wait = spooled is not None and not self._beside and writer_id is None
            self._has_root = self._make_root(can_wait=can_wait)
            claiming = self._claim(given=writer_id is not None) if self._claims else None
            self.journal = self._open_journal(spool, spooled)
            if claiming is not None:
                claiming.join(_CLAIM_SECONDS)
        except BaseException as error:
            if self._claims and writer_id is not None:
                # So that the same id can be given again; where that fails too, it cannot.
                with contextlib.suppress(OSError, RlioError):
                    disclaim(self.storage, self.writer_id)
            if not isinstance(error, OSError) or (
                isinstance(error, RlioError) and not isinstance(error, StoreError)
            ):
                raise
            raise PublishError(
                f"nothing can be stored there: {type(error).__name__}: {error}; repair access, then open the "
                "writer again",
                uri=self.storage.uri,
            ) from error
        self._accepted: set[str] = set()
        self._publisher = Publisher(self.storage, self.writer_id, self.journal, accept=self._accept)
        #: Number of the first row of the next shard.
        self.next_row = resume_at or 0
        #: Rows that were taken: those of a `write()` that was interrupted just before it returned, too.
        self.received = 0
        #: Whether a `write()` was interrupted, so that nobody knows how much of it is in memory.
        self.interrupted = False
        #: Rows that were stored from the log, since memory was in doubt.
        self.rows_recovered = 0

    def _check_free(self) -> None:
        try:
            used = self.storage.list(writer_dir(self.writer_id))
        except OSError as error:
            raise PublishError(
                f"nobody can tell whether writer_id={self.writer_id!r} is free there: {error}; repair "
                "access, or leave writer_id out, so that rows can wait for the store in a log",
                uri=self.storage.uri,
            ) from error
        if used:
            raise OptionError(
                f"writer {self.writer_id!r} was used there already: take another writer_id, or None for a "
                "new one",
                uri=self.storage.uri,
            )

    def _make_root(self, *, can_wait: bool) -> bool:
        """Make the root, if it is not there; whether it is now.

        Args:
            can_wait: Whether the rows can wait, in a log, for a store that does not answer now.
        """
        if not can_wait:
            put_header(self.storage)
            return True
        try:
            within(_OPEN_SECONDS, lambda: put_header(self.storage))
        except OSError as error:
            # What could not be stored says so; why, and whether that passes, is in its cause.
            if is_permanent(error.__cause__ or error if isinstance(error, PublishError) else error):
                raise
            logger.warning(
                "%s does not answer: rows wait in the log until it does (%s)", self.storage.uri, error
            )
            return False
        return True

    def _accept(self, schema: Schema) -> None:
        """Refuse, in the background, what must not be stored; and make the root if opening could not."""
        if not self._has_root:
            put_header(self.storage)
            self._has_root = True
        if self._conflicting or schema.hash in self._accepted:
            return
        try:
            check_schema(self.storage, schema, again=not self._claims)
        except SchemaConflict as error:
            if self.journal is None:
                raise
            found = SchemaConflict(
                f"{error}; what was taken before this was seen cannot be stored there: it stays in the log "
                f"{self.journal.path}, which `rlio recover --conflicting` stores all the same"
            )
            found.uri, found.column = error.uri, error.column
            raise found from error
        self._accepted.add(schema.hash)

    def _claim(self, *, given: bool) -> threading.Thread | None:
        """Be seen, now or once the thread that is given has ended.

        A drawn id needs no claim to be safe: a store that hangs does not hold up its writer.
        """
        if given:
            claim(self.storage, self.writer_id)
            return None

        def attempt() -> None:
            try:
                claim(self.storage, self.writer_id)
            except (RlioError, OSError) as error:
                logger.warning("followers will not see this writer before its first shard: %s", error)

        thread = threading.Thread(target=attempt, name="rlio-claim", daemon=True)
        thread.start()
        return thread

    def _open_journal(self, spool: Spool | None, where: str | None) -> Journal | None:
        if spool is None or where is None:
            return None
        path = os.path.join(where, self.writer_id)
        folder = LogFolder.create(path, root=self.storage.uri, writer=self.writer_id)
        return Journal(folder, spool=spool)

    @property
    def is_durable(self) -> bool:
        """Whether rows are logged."""
        return self.journal is not None

    @property
    def rows_published(self) -> int:
        """Rows that are stored."""
        return self._publisher.rows_published + self.rows_recovered

    @property
    def bytes_published(self) -> int:
        """Bytes of the shards that are stored."""
        return self._publisher.bytes_published

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the shards in memory that are not stored yet."""
        return self._publisher.waiting_bytes

    @property
    def ledger(self) -> WriteLedger:
        """Where the rows are that were received."""
        journal = self.journal
        return WriteLedger(
            received=self.received,
            logged=None if journal is None else journal.end,
            published=self.rows_published,
            waited=0.0 if journal is None else journal.waited,
        )

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Rows of one `write()` are logged and collected within: what interrupts that ends the writer.

        A ``KeyboardInterrupt`` may strike between any two steps, and what is logged and what is collected
        must never part. Our own errors refuse a batch whole.
        """
        try:
            yield
        except RlioError:
            raise
        except BaseException:
            self.interrupted = True
            raise

    def check_whole(self) -> None:
        """Raise where no more rows can be taken.

        Raises:
            PublishError: This is a forked child, or an earlier `write()` was interrupted.
            SchemaConflict: The store said, meanwhile, that the rows do not fit those of other writers.
        """
        self.check_process()
        self._publisher.check()
        if self.interrupted:
            raise PublishError(
                "an earlier write() was interrupted, which ends this writer: close() stores every row that "
                "was taken; open another writer",
                uri=self.storage.uri,
            )

    def on_log_failure(self, act: Callable[[], object]) -> None:
        """Call ``act`` when a sync has failed: logged rows are then safe only once they are published."""
        if self.journal is not None:
            self.journal.on_failure = act

    def check_interrupted(self) -> None:
        """Say what an interrupted writer without a log has lost.

        Raises:
            LedgerError: Rows that it had taken are not stored.
        """
        lost = self.received - self.rows_published
        if lost > 0:
            raise LedgerError(
                f"a write() was interrupted, and {lost} rows that were taken before it are lost: with a log "
                "(spool='auto') they would not be",
                uri=self.storage.uri,
            )

    def check_process(self) -> None:
        """Raise in a forked child, which has none of the threads.

        Raises:
            PublishError: This is not the process that opened the writer.
        """
        if self._pid != os.getpid():
            raise PublishError(
                f"this writer was opened by process {self._pid}, of which this one is a fork: "
                "open a writer of your own in each process",
                uri=self.storage.uri,
            )

    def check_schema(self, schema: Schema) -> None:
        """Refuse a schema that does not fit the root, before rows of it are taken; see `check_schema`.

        Where there is a log, and it is not on the root's disk, the store is asked in the background: the
        rows are safe meanwhile, and a conflict is raised by `check_whole` and `publish`.

        Raises:
            SchemaConflict: It does not fit.
        """
        if self.journal is not None and not self._beside:
            self._publisher.announce(schema)
            return
        check_schema(self.storage, schema)
        self._accepted.add(schema.hash)

    def log(
        self, frames: Sequence[tuple[Sequence[Buffer], int]], schema: Schema, *, header: Mapping[str, Any]
    ) -> None:
        """Log the rows of one `write()`, all or none of them; see `Journal.append`.

        Args:
            frames: Buffers and rows of each.
            schema: Of the rows.
            header: What recovery must know to make the same shards again.
        """
        if self.journal is not None and frames:
            self.journal.append(frames, header={**header, "schema": schema.text})
            # Rows of it will follow: its file can be there by then.
            self._publisher.expect(schema)

    def cut(self, *, begins_shard: bool) -> None:
        """Begin a new segment of the log; see `Journal.cut`."""
        if self.journal is not None:
            self.journal.cut(begins_shard=begins_shard)

    def start(self) -> None:
        """Start the thread that stores shards."""
        self._publisher.start()

    def pending_file(self) -> PendingFile | None:
        """A file at a local root to which a shard's bytes may go while they are made; None elsewhere."""
        if not self.storage.is_local:
            return None
        try:
            return PendingFile(self.storage.root)
        except OSError:
            return None  # Then storing the whole shard will say what is wrong.

    def append(self, shard: NewShard) -> None:
        """Number a shard's rows and queue it to be stored in the background."""
        first, self.next_row = self.next_row, self.next_row + shard.rows
        self._publisher.submit(first, shard)

    def wait(self, timeout: float) -> None:
        """Wait until all queued shards are stored, but not longer than ``timeout`` seconds."""
        self._publisher.wait(timeout)

    def overdue(self, what: str, timeout: float | None) -> PublishError:
        """The error of a flush whose time is over: what was not done, and where its rows are."""
        return PublishError(
            f"{what} within {timeout or 0:.3g} s: {self._publisher.safe()}", uri=self.storage.uri
        )

    def wait_for_room(self) -> None:
        """Wait until the log is within its bound again; see `Journal.wait_for_room`."""
        if self.journal is not None:
            self._publisher.hurry()  # The pause between two attempts may be longer than this wait.
            self.journal.wait_for_room()

    def publish(self, timeout: float | None = None) -> None:
        """Return once every queued shard is stored.

        Raises:
            PublishError: One could not be stored, or not in time; it and those after it stay queued.
        """
        self._publisher.flush(timeout)

    def close(self, *, seal_at: int | None, timeout: float | None = None) -> None:
        """Release everything.

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
                self._publisher.finish(lambda: self._say_closed(seal_at), timeout=timeout)
                keep = False
        finally:
            self._publisher.stop()
            if self.journal is not None:
                self.journal.close(keep=keep)

    def _say_closed(self, rows: int) -> None:
        if rows:
            seal(self.storage, self.writer_id, rows)
        if self._claims:
            disclaim(self.storage, self.writer_id)


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder.rstrip("/")
