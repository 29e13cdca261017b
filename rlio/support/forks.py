"""Helpers for what does not survive a fork: threads, child processes, and locks held by another thread.

A forked child has its parent's objects, but none of its threads. `Owner` names the process of an object. A
child starts its own `BackgroundThread`; the thread of a `ReadAhead` stays with the parent.

Example:
    >>> thread = BackgroundThread("example")
    >>> thread.submit(divmod, 7, 2).result()
    (3, 1)
    >>> thread.was_forked()
    False
    >>> thread.close()
    >>> numbers = iter(range(10))
    >>> ahead = ReadAhead(lambda: next(numbers), 2, name="example")
    >>> ahead.get(), ahead.get()
    (0, 1)
    >>> _ = ahead.halt()
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar

from rlio.errors import ClosedError, RlioError
from rlio.support.turns import awaited

__all__ = ["BackgroundThread", "Owner", "ReadAhead", "cached_property"]

# Seconds to wait for the thread of a dropped `ReadAhead`: its call may wait for rows.
_LAST_SECONDS: Final = 5.0

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property  # noqa: TID251
else:

    class cached_property(functools.cached_property):  # noqa: N801, TID251
        """`functools.cached_property` without the lock that it has before Python 3.12.

        All instances of a class share that lock. A child would hang if it is forked while a thread of its
        parent computes the property of any instance. Without the lock, two threads may compute a value twice.
        """

        def __get__(self, instance: object | None, owner: type[Any] | None = None) -> Any:
            if instance is None:
                return self
            name = self.attrname
            assert name is not None
            if name not in instance.__dict__:
                instance.__dict__[name] = self.func(instance)
            return instance.__dict__[name]


class Owner:
    """The process that owns an object: the one that made this `Owner`."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the owner process, not a fork of it."""
        return self._pid == os.getpid()

    def check(self, what: str, *, error: type[RlioError] = ClosedError, uri: str | None = None) -> None:
        """Raise in a forked process.

        Args:
            what: Name of the object, for the message.
            error: Class of the error.
            uri: For the message.

        Raises:
            RlioError: This is a fork; of the class ``error``.
        """
        if not self.is_here:
            raise error(
                f"this {what} belongs to process {self._pid}, and this process is a fork of it, without its "
                "threads and connections: open one in each process",
                uri=uri,
            )


class BackgroundThread:
    """An executor with one thread, which starts with the first job; a forked child starts another.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = Owner()
        self._pool: ThreadPoolExecutor | None = None

    def was_forked(self) -> bool:
        """Whether this process is a fork, where earlier jobs never end; True only once in each fork."""
        if self._owner.is_here:
            return False
        self._owner, pool, self._pool = Owner(), self._pool, None
        return pool is not None

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a job after the earlier ones."""
        self.was_forked()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._pool.submit(job, *args, **kwargs)

    def close(self) -> None:
        """End the thread after the running job. May be called again; a later job starts a new thread."""
        self.was_forked()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


class ReadAhead(Generic[T]):
    """A bounded queue of coming items, filled by a separate thread; for one consumer.

    `get` raises an error of ``make`` in its turn. The thread has then ended; a later `get` starts a new
    one. A forked child of a process with a running thread cannot continue.

    Args:
        make: Makes the next item; called in the thread. It must not reference the owner of this queue, so the
            owner may be dropped without `halt`.
        depth: Maximum number of waiting items, at least 1 (0 with ``on_full``); one more is being made.
        name: Name of the thread, and of the queue in errors.
        on_full: Called with an item that finds the queue full; the item is dropped. None: the thread waits.
    """

    def __init__(
        self, make: Callable[[], T], depth: int, *, name: str, on_full: Callable[[T], None] | None = None
    ) -> None:
        self._name = name
        self._queue = _Queue(make, depth, on_full)
        self._thread: threading.Thread | None = None
        self._interrupted = False
        self._owner = Owner()
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread is running, or was running when this process was forked."""
        return self._thread is not None

    @property
    def is_lost(self) -> bool:
        """Whether the thread belongs to the parent of this process."""
        return self.is_running and not self._owner.is_here

    @property
    def is_empty(self) -> bool:
        """Whether no item waits."""
        return not self._queue.items

    def check(self) -> None:
        """Raise a ClosedError in a fork."""
        if self.is_running:
            self._owner.check(self._name)

    def start(self) -> None:
        """Start the thread, unless it is running, or was interrupted."""
        with self._queue.changed:  # An `interrupt` comes before this, or ends the new thread.
            if self._thread is not None or self._interrupted:
                return
            self._owner = Owner()
            self._queue.stopped = False
            # A daemon, because the interpreter waits for other threads before any code can end them.
            thread = threading.Thread(target=self._queue.fill, name=self._name, daemon=True)
            # First, so that a child which is forked meanwhile waits neither for the thread nor for this lock.
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:  # The system has no more threads.
                self._thread = None
                raise
            self._finalizer = weakref.finalize(self, _end, self._queue, thread, self._owner, _LAST_SECONDS)

    def get(self) -> T:
        """Wait for the next item.

        Raises:
            ClosedError: `interrupt` was called while this call waited; or this process is a fork.
            BaseException: An error of ``make``.
        """
        self.check()
        self.start()
        item = self._queue.get()
        if isinstance(item, _Raised):
            self._end_thread()
            raise item.error
        return item

    def interrupt(self) -> None:
        """End the thread permanently, and a waiting `get` with a ClosedError; `halt` follows."""
        if not self.is_lost:
            with self._queue.changed:
                self._interrupted = True
                self._queue.stop()

    def halt(self, wake: Callable[[], None] | None = None) -> list[T]:
        """End the thread after the current item, and return the waiting items; nothing in a fork.

        Args:
            wake: Called if the current item is not made within some seconds: makes ``make`` return or raise.
        """
        if self.is_lost:
            return []
        self._end_thread(wake)
        return self._queue.clear()

    def _end_thread(self, wake: Callable[[], None] | None = None) -> None:
        thread, self._thread = self._thread, None
        if thread is None or self._finalizer is None:
            return
        self._finalizer.detach()
        if wake is not None:
            _end(self._queue, thread, self._owner, _LAST_SECONDS)
            if thread.is_alive():
                wake()
        _end(self._queue, thread, self._owner, None)


class _Raised:
    """An error in place of an item."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Queue(Generic[T]):
    """The state that the thread of a `ReadAhead` shares with its consumer."""

    def __init__(self, make: Callable[[], T], depth: int, on_full: Callable[[T], None] | None) -> None:
        self.items: deque[T | _Raised] = deque()
        self.changed = threading.Condition()
        self.stopped = False
        self._make = make
        self._depth = depth
        self._on_full = on_full

    def fill(self) -> None:
        """Make items until ``make`` raises or the queue is stopped; runs in the thread."""
        with awaited():
            self._fill()

    def _fill(self) -> None:
        while not self.stopped:
            try:
                item = self._make()
            # The consumer raises it in place of the item.
            except BaseException as error:
                self._put(_Raised(error))
                return
            if self._on_full is not None and len(self.items) >= self._depth:
                self._on_full(item)
            else:
                self._put(item)
            del item  # Frees its memory for the next item.

    def _put(self, item: T | _Raised) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or len(self.items) < max(self._depth, 1))
            self.items.append(item)
            self.changed.notify_all()

    def get(self) -> T | _Raised:
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or bool(self.items))
            if not self.items:
                raise ClosedError("it was closed while this thread waited for a batch")
            item = self.items.popleft()
            self.changed.notify_all()
            return item

    def clear(self) -> list[T]:
        with self.changed:
            found = [item for item in self.items if not isinstance(item, _Raised)]
            self.items.clear()
            self.changed.notify_all()
            return found

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()


def _end(queue: _Queue[Any], thread: threading.Thread, owner: Owner, timeout: float | None) -> None:
    if not owner.is_here:
        return  # A fork has no such thread, and the queue's lock may never be released there.
    queue.stop()
    if thread is not threading.current_thread():  # Any thread may run the garbage collector.
        thread.join(timeout)
