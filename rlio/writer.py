"""`OutputWriter`: the contract of all sinks of batches. Open writers are closed at exit.

Authors write `_write`, and `_flush` and `_close` as needed. The base owns checks, counters, locking and
context management. `rlio.testing.WriterTests` tests an implementation.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its hook at exit must be registered before ours
import contextlib
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol, Self

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.errors import ClosedError, PublishError, SchemaError, excerpt
from rlio.support.described import Described
from rlio.support.words import counted

__all__ = ["ClosedByWith", "OutputWriter", "close_after"]

logger: logging.Logger = logging.getLogger("rlio")


class ClosedByWith(Described, ABC):
    """An object that is closed at the end of its ``with`` block, whose exception is never replaced."""

    @abstractmethod
    def close(self) -> None:
        """Release what the object holds. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(self, error)


class _Closable(Protocol):
    def close(self) -> None: ...


def close_after(closable: _Closable, error: BaseException | None) -> None:
    """Close at the end of a ``with`` block that raised ``error``, or None.

    The caller's exception is the one that matters: an error of `close` is logged, and added to it as a note.
    """
    if error is None:
        closable.close()
        return
    try:
        with _leaving():
            closable.close()
    except Exception as failure:
        error.add_note(f"closing {type(closable).__name__} failed too: {failure!r}")
        logger.error("closing %s failed: %r", type(closable).__name__, failure)


class OutputWriter(ClosedByWith):
    """A sink for experience. To write one, implement `_write`, and `_flush` and `_close` as needed.

    An exception inside ``with`` still publishes the rows that `write` accepted. The exception is never
    replaced.

    Several threads may call a writer: their calls take turns. A `write` after a `close` of another thread
    raises a ClosedError.
    """

    #: Whether rows survive ``kill -9`` once `write` has returned.
    durable: bool = False

    #: Seconds that `flush` and `close` may take in total, if rows survive without them (`durable`); None: no
    #: limit.
    patience: float | None = None

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Deadline of the running `flush` or `close`, from `patience`.
        self._until: float | None = None
        self._closed = False
        #: Rows that `write` has accepted.
        self.rows_received: int = 0
        self._rows_flushed = 0
        # Whether a close at process exit already failed.
        self._gave_up = False
        _open_writers.add(self)

    # ---- hooks for authors: called under the lock ----

    @abstractmethod
    def _write(self, batch: Batch) -> None:
        """Take ``batch``. The caller owns it: copy what you keep after returning."""

    def _flush(self) -> None:
        """Make every row taken so far visible to readers."""

    def _close(self) -> None:
        """Release files and threads. Called once, after a last `_flush`."""

    # ---- the contract ----

    @property
    def closed(self) -> bool:
        """Whether `close` was called and succeeded."""
        return self._closed

    def _describe(self) -> Iterator[str]:
        yield f"{counted(self.rows_received, 'row')} received, {self.rows_published:,} published"

    @property
    def rows_published(self) -> int:
        """A lower bound on the rows that every reader can see.

        The base counts the rows before the last `flush`. Writers that publish in the background override
        this.
        """
        return self._rows_flushed

    @property
    def seconds_waited(self) -> float:
        """Seconds that `write` has waited, for example for room in a log."""
        return 0.0

    def write(self, batch: Batch) -> None:
        """Take a batch; thread-safe. The writer keeps no reference to it.

        Raises:
            SchemaError: ``batch`` is not a batch; the dtype or shape of a column differs from the rows
                before; or, in a data set, a value cannot be stored, or an episode comes again after its end.
                Nothing is taken.
            ClosedError: After `close`.
        """
        if not isinstance(batch, (SampleBatch, MultiAgentBatch)):
            raise SchemaError(
                f"write() was given {excerpt(batch)}: expected a SampleBatch or MultiAgentBatch, such as "
                "rlio.SampleBatch(columns)"
            )
        with self._lock:
            if self._closed:
                raise ClosedError(f"{type(self).__name__} is closed: write before close(), or open a new one")
            _written_writers.add(self)
            self._write(batch)
            self.rows_received += batch.agent_steps()

    def flush(self) -> None:
        """Return once every row taken so far is visible to every reader.

        Raises:
            PublishError: The store did not take the rows, or not within `patience`; the message says where
                the rows are safe.
        """
        with self._held():
            if not self._closed:
                self._flush()
                self._rows_flushed = self.rows_received

    def close(self) -> None:
        """Flush and release; may be called again. Also called when the interpreter exits.

        If the flush raises, the writer stays open and keeps its rows; call again to retry.

        Raises:
            PublishError: As `flush`.
        """
        with self._held():
            if self._closed:
                return
            self._flush()
            self._rows_flushed = self.rows_received
            self._closed = True
            _open_writers.discard(self)
            _written_writers.discard(self)
            self._close()

    def _seconds_left(self) -> float | None:
        """Seconds that a `_flush` may take; None: no limit.

        The time is limited if the rows are safe without the flush. The limit is `patience`, and a few seconds
        if an exception or the end of the interpreter closes the writer.
        """
        leaving = _exit_deadline.get()
        if not self.durable:
            return None
        if leaving is not None and self._gave_up:
            return 0.0
        deadlines = [deadline for deadline in (leaving, self._until) if deadline is not None]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock, waiting at most `patience`: a `write` in another thread may wait for a full log."""
        until = None if self.patience is None else time.monotonic() + self.patience
        left = self._seconds_left()
        if self.durable and self.patience is not None:
            left = min(self.patience if left is None else left, self.patience)
        try:
            if not self._lock.acquire(timeout=-1 if left is None else left):
                raise PublishError(
                    f"{type(self).__name__} could not be closed, because another thread is still in one of "
                    "its calls: its rows are in its log; call close() to retry, or end this process: the "
                    "next writer there, or `rlio recover`, then publishes them"
                )
            try:
                self._until = until
                yield
            finally:
                self._until = None
                self._lock.release()
        except Exception:  # Raised again: only the missed deadline is noted here.
            self._gave_up = _exit_deadline.get() is not None
            raise


# Deadline at which a writer that is being closed gives up and leaves its rows in its log; None: no deadline.
_exit_deadline: ContextVar[float | None] = ContextVar("rlio_exit_deadline", default=None)

# Seconds that a process waits for a store while it leaves by an exception or ends.
_EXIT_SECONDS = 3.0


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Limit every close in this thread to `_EXIT_SECONDS`, counted from the outermost call."""
    deadline = _exit_deadline.get()
    token = _exit_deadline.set(time.monotonic() + _EXIT_SECONDS if deadline is None else deadline)
    try:
        yield
    finally:
        _exit_deadline.reset(token)


_open_writers: weakref.WeakSet[OutputWriter] = weakref.WeakSet()

# Keeps writers with rows alive: rows of a writer that was dropped without close() are stored too.
_written_writers: set[OutputWriter] = set()


def _close_open_writers() -> None:
    """Publish buffered rows when the interpreter exits. Errors can only be logged."""
    with _leaving():
        for writer in list(_open_writers):
            if writer.durable and writer._gave_up:
                continue  # Its time is over; its rows are in the log.
            try:
                writer.close()
            except Exception:  # Logged: at exit there is no caller, and the other writers must be closed too.
                logger.exception("closing %s at exit failed", type(writer).__name__)


def _disown_writers() -> None:
    """Leave the writers to the parent after a fork: the child has none of the parent's threads."""
    for writer in list(_open_writers):
        writer._lock = threading.RLock()  # Another thread of the parent may hold it.
    _open_writers.clear()
    _written_writers.clear()


# Clients of object stores use thread pools, which refuse work as soon as the interpreter begins to exit.
# These hooks run before atexit's, in reverse order of registration: ours must come after the import above.
getattr(threading, "_register_atexit", atexit.register)(_close_open_writers)
atexit.register(_close_open_writers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_writers)
