"""`OutputWriter`: the contract of whatever takes batches, and how open writers are closed at exit.

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

__all__ = ["OutputWriter", "close_after"]

logger = logging.getLogger("rlio")


class OutputWriter(ABC):
    """A sink for experience. To write one, implement `_write`, and `_flush` and `_close` as needed.

    An exception inside ``with`` still publishes what `write` accepted, and is never replaced.
    """

    #: Whether rows survive ``kill -9`` once `write` has returned.
    durable: bool = False

    #: Seconds that `flush` and `close` may take in all, where rows survive without them (`durable`); None: as
    #: long as it takes.
    patience: float | None = None

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # When the `flush` or `close` that runs has had its patience.
        self._until: float | None = None
        self._closed = False
        #: Rows that `write` has accepted.
        self.rows_received = 0
        self._rows_flushed = 0
        # Whether it had its time to close while the process was on its way out.
        self._gave_up = False
        _open_writers.add(self)

    # ---- hooks for authors: called under the lock ----

    @abstractmethod
    def _write(self, batch: Batch) -> None:
        """Take ``batch``. It is the caller's: copy what is kept after returning."""

    def _flush(self) -> None:  # noqa: B027 - optional hook
        """Make every row taken so far visible to readers."""

    def _close(self) -> None:  # noqa: B027 - optional hook
        """Release files and threads; called once, after a last `_flush`."""

    # ---- the contract ----

    @property
    def closed(self) -> bool:
        """Whether `close` has been called, and has succeeded."""
        return self._closed

    @property
    def rows_published(self) -> int:
        """Rows that every reader can see, at least so many.

        The base counts those before the last `flush`. Writers that publish on their own override it.
        """
        return self._rows_flushed

    @property
    def seconds_waited(self) -> float:
        """Seconds that `write` has waited, such as for room in a log."""
        return 0.0

    def write(self, batch: Batch) -> None:
        """Take a batch; thread-safe. The writer keeps no reference to it.

        Raises:
            SchemaError: A column's dtype or shape is not that of the rows before, or ``batch`` is no batch;
                nothing is taken.
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
            PublishError: The store did not take them, or not within `patience`; where they are safe is said.
        """
        with self._held():
            if not self._closed:
                self._flush()
                self._rows_flushed = self.rows_received

    def close(self) -> None:
        """Flush and release; may be called again. Also called when the interpreter exits.

        If the flush raises, the writer stays open and keeps its rows: calling again tries again.

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
        """Seconds that a `_flush` may take; None: as long as it takes.

        They are bounded where the rows are safe without it: by `patience`, and where an exception, or the end
        of the interpreter, closes the writer.
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
        """The lock, for which `patience` ends too: a `write` in another thread may wait for a full log."""
        until = None if self.patience is None else time.monotonic() + self.patience
        left = self._seconds_left()
        if self.durable and self.patience is not None:
            left = min(self.patience if left is None else left, self.patience)
        try:
            if not self._lock.acquire(timeout=-1 if left is None else left):
                raise PublishError(
                    f"{type(self).__name__} could not be closed, since another thread is still in a call of "
                    "it: rows are in its log; close() tries again, and once this process has ended the next "
                    "writer there, or `rlio recover`, publishes them"
                )
            try:
                self._until = until
                yield
            finally:
                self._until = None
                self._lock.release()
        except Exception:  # Raised again: here only the end of the deadline is noted.
            self._gave_up = _exit_deadline.get() is not None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(self, error)


class _Closable(Protocol):
    def close(self) -> None: ...


# When a writer that is being closed gives up and leaves its rows to their log; None: it does not.
_exit_deadline: ContextVar[float | None] = ContextVar("rlio_exit_deadline", default=None)

# How long a process on its way out, by an exception or at its end, waits for a store.
_EXIT_SECONDS = 3.0


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Let whatever is closed in this thread be closed in `_EXIT_SECONDS`, counted from the outermost call."""
    deadline = _exit_deadline.get()
    token = _exit_deadline.set(time.monotonic() + _EXIT_SECONDS if deadline is None else deadline)
    try:
        yield
    finally:
        _exit_deadline.reset(token)


def close_after(thing: _Closable, error: BaseException | None) -> None:
    """Close what a ``with`` block is left by, with ``error`` if it raised."""
    if error is None:
        thing.close()
        return
    try:
        with _leaving():
            thing.close()
    except Exception as failure:
        # The caller's exception is the cause that matters; ours travels with it as a note.
        error.add_note(f"closing {type(thing).__name__} failed too: {failure!r}")
        logger.error("closing %s failed: %r", type(thing).__name__, failure)


_open_writers: weakref.WeakSet[OutputWriter] = weakref.WeakSet()

# Writers with rows are kept alive: the rows of a writer that was dropped without close() are stored too.
_written_writers: set[OutputWriter] = set()


def _close_open_writers() -> None:
    """Publish what is still buffered when the interpreter exits, the log being the only place for errors."""
    with _leaving():
        for writer in list(_open_writers):
            if writer.durable and writer._gave_up:
                continue  # It has had its time; its rows are in the log.
            try:
                writer.close()
            except Exception:  # Logged: at exit there is no caller, and other writers are to be closed.
                logger.exception("closing %s at exit failed", type(writer).__name__)


def _disown_writers() -> None:
    """A forked child has none of its parent's threads: the writers stay the parent's, to close too."""
    for writer in list(_open_writers):
        writer._lock = threading.RLock()  # Another thread may have held it.
    _open_writers.clear()
    _written_writers.clear()


# Clients of object stores use thread pools, which refuse work once the interpreter has begun to exit: before
# what atexit runs, and in the reverse order of registration, so that those of the import above come later.
getattr(threading, "_register_atexit", atexit.register)(_close_open_writers)
atexit.register(_close_open_writers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_writers)
