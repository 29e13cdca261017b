"""What survives no fork: threads, child processes, and locks that another thread holds.

A forked child has the objects of its parent, and none of its threads. `Owner` says whose an object is;
`BackgroundThread` is a thread that a child starts for itself; that of a `ReadAhead` stays the parent's.

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

__all__ = ["BackgroundThread", "Owner", "ReadAhead", "cached_property"]

# How long the thread of a `ReadAhead` that was dropped is waited for: its call may wait for rows.
_LAST_SECONDS: Final = 5.0

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property  # noqa: TID251
else:

    class cached_property(functools.cached_property):  # noqa: N801, TID251
        """`functools.cached_property` without the lock that it has before Python 3.12.

        All instances of a class share that lock: a child that is forked while a thread of its parent
        calculates the property of any of them would hang. Two threads may calculate a value twice.
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
    """The process that an object belongs to: the one that made this."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and no fork of it."""
        return self._pid == os.getpid()

    def check(self, what: str, *, error: type[RlioError] = ClosedError, uri: str | None = None) -> None:
        """Raise in a fork.

        Args:
            what: The object, for the message.
            error: What is raised.
            uri: For the message.

        Raises:
            RlioError: ``error``.
        """
        if not self.is_here:
            raise error(
                f"this {what} belongs to process {self._pid}, and this process is a fork of it, without its "
                "threads and connections: open one in each process",
                uri=uri,
            )


class BackgroundThread:
    """An executor of one thread, which starts with the first job; a forked child starts its own.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = Owner()
        self._pool: ThreadPoolExecutor | None = None

    def was_forked(self) -> bool:
        """Whether this process is a fork, where jobs submitted before never end; True once a fork."""
        if self._owner.is_here:
            return False
        self._owner, pool, self._pool = Owner(), self._pool, None
        return pool is not None

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a job behind those before it."""
        self.was_forked()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._pool.submit(job, *args, **kwargs)

    def close(self) -> None:
        """End the thread, after the job that runs. May be called again; a later job starts another one."""
        self.was_forked()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


class ReadAhead(Generic[T]):
    """A bounded queue of what comes next, which a thread of its own fills; for one consumer.

    What ``make`` raises is raised in its place, by `get`. The thread has ended by then; a later `get` starts
    another one. A forked child of a process with a running thread cannot go on.

    Args:
        make: Makes the next item; called in the thread. It holds no reference to the owner of this, so that
            the owner may be dropped without `halt`.
        depth: Items that wait at most, at least 1 (0 with ``on_full``); one more is in the making.
        name: Of the thread; and of this, in errors.
        on_full: Called with an item that finds the queue full, which is dropped. None: the thread waits.
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
        """Whether the thread runs, or ran when this process was forked."""
        return self._thread is not None

    @property
    def is_lost(self) -> bool:
        """Whether the thread is that of the process that forked."""
        return self.is_running and not self._owner.is_here

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._queue.items

    def check(self) -> None:
        """Raise a ClosedError in a fork."""
        if self.is_running:
            self._owner.check(self._name)

    def start(self) -> None:
        """Start the thread, unless it runs, or was interrupted."""
        with self._queue.changed:  # An `interrupt` comes before, or ends the thread that starts here.
            if self._thread is not None or self._interrupted:
                return
            self._owner = Owner()
            self._queue.stopped = False
            # A daemon: the interpreter waits for other threads before anybody could tell them to end.
            thread = threading.Thread(target=self._queue.fill, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
            self._finalizer = weakref.finalize(self, _end, self._queue, thread, self._owner, _LAST_SECONDS)

    def get(self) -> T:
        """Wait for the next item.

        Raises:
            ClosedError: `interrupt` was called while this waited; or this process is a fork.
            BaseException: What ``make`` raised.
        """
        self.check()
        self.start()
        item = self._queue.get()
        if isinstance(item, _Raised):
            self._end_thread()
            raise item.error
        return item

    def interrupt(self) -> None:
        """End the thread for good, and `get` with a ClosedError where nothing waits; `halt` follows."""
        if not self.is_lost:
            with self._queue.changed:
                self._interrupted = True
                self._queue.stop()

    def halt(self) -> list[T]:
        """End the thread, after the item that is in the making, and give what waits; nothing in a fork."""
        if self.is_lost:
            return []
        self._end_thread()
        return self._queue.clear()

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and self._finalizer is not None:
            self._finalizer.detach()
            _end(self._queue, thread, self._owner, None)


class _Raised:
    """An error in the place of an item."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Queue(Generic[T]):
    """What the thread of a `ReadAhead` and its consumer share."""

    def __init__(self, make: Callable[[], T], depth: int, on_full: Callable[[T], None] | None) -> None:
        self.items: deque[T | _Raised] = deque()
        self.changed = threading.Condition()
        self.stopped = False
        self._make = make
        self._depth = depth
        self._on_full = on_full

    def fill(self) -> None:
        """Make items until one raises, or it is stopped; what the thread does."""
        while not self.stopped:
            try:
                item = self._make()
            # Whatever it is, it is raised where the item would have been.
            except BaseException as error:
                self._put(_Raised(error))
                return
            if self._on_full is not None and len(self.items) >= self._depth:
                self._on_full(item)
            else:
                self._put(item)
            del item  # Its memory may be used again while the next one is made.

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
    if thread is not threading.current_thread():  # Garbage is collected in any thread.
        thread.join(timeout)
