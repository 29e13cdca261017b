"""Threads of a writer: a `Worker` makes its shards, `AgeTimer` limits the age of rows only in memory.

Example:
    >>> jobs = Worker("example")
    >>> future = jobs.submit(lambda: None)
    >>> jobs.wait()
    True
    >>> jobs.stop()
    >>> import threading
    >>> fired = threading.Event()
    >>> timer = AgeTimer(0.001, fired.set)
    >>> timer.start()
    >>> fired.wait(10)
    True
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["AgeTimer", "Worker", "done_at_once"]

T = TypeVar("T")


class Worker:
    """A daemon thread that runs jobs in order. After a failed job it runs none, and they fail like that one.

    An exception that interrupts a waiting caller (``KeyboardInterrupt``) is not a failure of a job.

    The standard library's executors are unsuitable: they refuse jobs once the interpreter begins to exit, and
    at that time writers that were left open publish their last rows.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Any: jobs of all result types wait in one queue.
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread, unless it is running."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; the future holds its result or error."""
        self.start()
        future: Future[T] = Future()
        self._jobs.put((job, future))
        self._last = future
        return future

    def check(self) -> None:
        """Raise the error of the failed job, if one failed."""
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout: float | None = None) -> bool:
        """Whether every job is done within ``timeout`` seconds (None: no limit); raises as `check`."""
        if self._last is not None:
            if not concurrent.futures.wait([self._last], timeout).done:
                return False
            self._last = None
        self.check()
        return True

    def stop(self) -> None:
        """End the thread after the queued jobs."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                self.check()
                result = job()
            except BaseException as error:
                self._failure = error
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # The thread must not keep a job's rows alive while it waits for the next one.
            del item, job, future


def done_at_once(job: Callable[[], T]) -> Future[T]:
    """Run a job in the calling thread, in place of a `Worker`."""
    future: Future[T] = Future()
    future.set_result(job())
    return future


class AgeTimer:
    """Calls ``act`` in a separate thread, ``seconds`` after the first `start` since the last `stop`.

    Args:
        seconds: None: never.
        act: Must acquire its own lock, because a `stop` may come too late to prevent a call.
    """

    def __init__(self, seconds: float | None, act: Callable[[], object]) -> None:
        self._seconds = seconds
        self._act = act
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Start the timer, unless it is running."""
        if self._timer is None and self._seconds is not None:
            self._timer = threading.Timer(self._seconds, self._act)
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """Stop the timer until the next `start`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
