"""Requests side by side, on stores where each takes a round trip: one pool of a process for all that read.

`each` does many small ones. A `Plan` requests what a reader reads next; `Storage` then answers its calls from
there. Both only save time: order, errors and retries are those of the calls without them. A local disk has
neither threads nor plans.

The threads of the pool end when there is nothing to do. A fork begins with a pool and plans of its own. A
call never waits for a request that has not begun: it makes it itself, so calls within the pool cannot wait
for each other.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from rlio.storage.filesystem import Storage

__all__ = ["REQUESTS", "Plan", "Range", "busy_plans", "each"]

T = TypeVar("T")
S = TypeVar("S")

#: Requests that object stores accept from one client without throttling it: the threads of the pool.
REQUESTS: Final = 16

# A thread without work ends after this time.
_IDLE_SECONDS: Final = 1.0
# The most that a plan requests before it is read: ranges, and bytes. The first range may be larger.
_RANGES: Final = 4 * REQUESTS
_BYTES: Final = 32 << 20
# The bytes of all plans of a process, of which each has an equal part.
_BYTES_OF_ALL: Final = 4 * _BYTES


class Store(Protocol):
    """Where ranges are: a `Storage`, or what stands for one."""

    @property
    def at_once(self) -> int:
        """How many requests to make side by side."""

    def hold(self, plan: Plan) -> None:
        """Answer reads from a plan that has ranges of it."""

    def fetch(self, path: str, start: int, stop: int) -> bytes:
        """Make the request for the bytes ``[start, stop)``; fewer at the end of the object."""


class Range(NamedTuple):
    """Bytes ``[start, stop)`` of an object."""

    storage: Store
    path: str
    start: int
    stop: int


class _Pool:
    """Runs jobs in at most `REQUESTS` threads, first come, first served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads = self._idle = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run a job. If no thread can be started, the call that needs the result runs it: see `_result`."""
        future: Future[T] = Future()
        with self._changed:
            self._jobs.append((future, work))
            if len(self._jobs) > self._idle and self._threads < REQUESTS:
                # A daemon, because a store that hangs must not keep the process from ending.
                thread = threading.Thread(target=self._run, name="rlio-requests", daemon=True)
                try:
                    thread.start()
                    self._threads += 1
                except RuntimeError:  # The interpreter is exiting, or the system has no more threads.
                    pass
            self._changed.notify()
        return future

    def _run(self) -> None:
        while (job := self._next()) is not None:
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # Raised where the result is needed.
                    future.set_exception(error)
            del future, work, job  # They may hold the bytes of a reader that is closed.

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            came = self._changed.wait_for(lambda: bool(self._jobs), _IDLE_SECONDS)
            self._idle -= 1
            if came:
                return self._jobs.popleft()
            self._threads -= 1
            return None


_pool = _Pool()


def _after_fork() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _result(future: Future[T], work: Callable[[], T]) -> T:
    """The result of a job, which runs here if it has not begun."""
    return work() if future.cancel() else future.result()


def each(
    storage: Storage, work: Callable[[S], T], items: Sequence[S], *, ahead: int | None = None
) -> Iterator[T]:
    """The results of ``work`` for each item, in order; remote stores handle several items at once.

    The first error is raised in its turn. Later items that have been started are finished.

    Args:
        storage: Where the requests go.
        work: Makes the request for one item.
        items: The items.
        ahead: Most results to prepare before they are needed: for results that take much memory.
    """
    most = storage.at_once if ahead is None else min(ahead, storage.at_once)
    if storage.at_once == 1 or len(items) < 2:
        yield from map(work, items)
        return
    # The first item runs alone: it makes connections, and does look-ups that are needed only once.
    yield work(items[0])
    coming: deque[tuple[Future[T], Callable[[], T]]] = deque()
    try:
        for item in items[1:]:
            job = partial(work, item)
            coming.append((_pool.submit(job), job))
            if len(coming) > most:
                yield _result(*coming.popleft())
        while coming:
            yield _result(*coming.popleft())
    finally:
        begun = [future for future, _ in coming if not future.cancel()]
        for future in begun:
            future.exception()  # Wait: its effect must not come after the caller went on.


#: The future result of a request, and what makes the request.
_Job: TypeAlias = "tuple[Future[bytes], Callable[[], bytes]]"


#: The plans that have requested something. A reader that is dropped takes its own along.
busy_plans: weakref.WeakSet[Plan] = weakref.WeakSet()


class Plan:
    """The bytes that a reader reads next, requested before it asks for them. Thread-safe.

    A plan is only a hint: what it does not have is read as without it. It has a range until a later one is
    read. An error is raised in its turn, and the range then requested again. Its reader holds it.
    """

    def __init__(self) -> None:
        self._most = _RANGES
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._coming: dict[Range, _Job] = {}
        self._ranges: Iterator[Range] = iter(())

    def _here(self) -> threading.Lock:
        """The lock. In a fork the plan begins again, as the threads are the parent's."""
        if self._pid != os.getpid():
            self._begin()
        return self._lock

    def expect(self, ranges: Iterable[Range]) -> None:
        """State everything that is read next, in this order; what is not in it is dropped.

        Args:
            ranges: Taken as far as there is room, also by later calls of `take`.
        """
        with self._here():
            before, self._coming, self._ranges = self._coming, {}, iter(ranges)
            self._take_more(before)
        for wanted, (future, _) in before.items():
            if wanted not in self._coming:
                future.cancel()

    def leads(self, ranges: Sequence[Range]) -> bool:
        """Whether ranges are requested, and more than half of what a plan may have: no need to `expect`."""
        with self._here():
            return len(self._coming) > self._most // 2 and all(wanted in self._coming for wanted in ranges)

    def _take_more(self, before: Mapping[Range, _Job] = MappingProxyType({})) -> None:
        """Request further ranges while there is room; ``before`` has been requested already."""
        busy_plans.add(self)
        size = sum(wanted.stop - wanted.start for wanted in self._coming)
        # What was requested before other plans came stays until it is read.
        most = min(_BYTES, _BYTES_OF_ALL // len(busy_plans))
        while not self._coming or (size < most and len(self._coming) < self._most):
            wanted = next(self._ranges, None)
            if wanted is None:
                if not self._coming:
                    busy_plans.discard(self)
                return
            if wanted in self._coming:  # It is read twice.
                continue
            self._coming[wanted] = before.get(wanted) or self._request(wanted)
            size += wanted.stop - wanted.start

    def _request(self, wanted: Range) -> _Job:
        storage = wanted.storage
        storage.hold(self)
        if storage.at_once < REQUESTS:  # Each request has a connection of its own: of no more than these.
            self._most = min(self._most, storage.at_once)
        job = partial(storage.fetch, *wanted[1:])
        return _pool.submit(job), job

    def take(self, storage: Store, path: str, start: int, stop: int) -> bytes | None:
        """The bytes ``[start, stop)``, if they were expected; fewer at the end of the object.

        Raises:
            Exception: The request failed.
        """
        with self._here():
            found = next(
                (
                    known
                    for known in self._coming
                    if known.path == path and known.start <= start and stop <= known.stop
                    if known.storage is storage
                ),
                None,
            )
            if found is None:
                return None
            future, job = self._coming[found]
            for earlier in [*takewhile(found.__ne__, self._coming)]:  # They were passed over, or are read.
                if earlier.path or earlier.storage is storage:  # Larger files are read in turn with others.
                    self._coming.pop(earlier)[0].cancel()
            self._take_more()
        try:
            data = _result(future, job)
        except BaseException:
            with self._lock:  # The next call tries again.
                self._coming.pop(found, None)
            raise
        if future.cancelled():  # It was made here; its other parts may be asked for, too.
            done: Future[bytes] = Future()
            done.set_result(data)
            with self._lock:
                if found in self._coming:
                    self._coming[found] = done, job
        return data if found[2:] == (start, stop) else data[start - found.start : stop - found.start]

    def take_around(self, storage: Store, at: int) -> tuple[int, bytes] | None:
        """The expected range of a store of one object that has byte ``at``: its first byte, and its bytes.

        Unlike `take`, it leaves the ranges before it, which another thread may read next.

        Raises:
            Exception: The request failed.
        """
        with self._here():
            found = next(
                (one for one in self._coming if one.storage is storage and one.start <= at < one.stop), None
            )
            if found is None:
                return None
            future, job = self._coming.pop(found)
            self._take_more()
        return found.start, _result(future, job)

    def forget(self) -> None:
        """Drop everything."""
        self.expect(())
