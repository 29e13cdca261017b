"""A store in memory whose requests are late: it counts them, and how long readers stand still for them.

Requests take a time, whatever they ask for, and any number may be under way: what is counted does not depend
on a network. rlio makes them as on an object store.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from rlio.storage import parallel

__all__ = ["FarStore", "Traffic", "one_at_a_time"]

# A shorter wait is one for a processor.
_SECONDS = 0.005
# Threads that make requests for a reader, which goes on or waits for them itself.
_HELPERS = ("rlio-requests", "rlio-storage-call")


class Traffic:
    """What passed since `clear`. Thread-safe.

    Attributes:
        requests: Of all kinds, also listings and those that found nothing.
        bytes: That files were asked for and gave.
        waits: Seconds of each time that a reader stood still for a request, longer than 5 ms.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        with self._lock:
            self.requests = self.bytes = 0
            self.waits = list[float]()

    def passed(self, data: object, seconds: float) -> None:
        """Count a request, and a wait if a reader made it itself."""
        with self._lock:
            self.requests += 1
            self.bytes += len(data) if isinstance(data, bytes) else 0
        self._waited(seconds)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count waits for other threads, too."""
        own = threading.Condition.wait

        def wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            if not _is_for_storage(sys._getframe(1)):
                return own(condition, timeout)
            begun = time.perf_counter()
            try:
                return own(condition, timeout)
            finally:
                self._waited(time.perf_counter() - begun)

        # Futures and events wait for a condition, too.
        with mock.patch.object(threading.Condition, "wait", wait):
            yield

    def _waited(self, seconds: float) -> None:
        if seconds > _SECONDS and not threading.current_thread().name.startswith(_HELPERS):
            with self._lock:
                self.waits.append(seconds)


def _is_for_storage(frame: FrameType | None) -> bool:
    """Whether rlio's storage waits, and not zarr for what it decodes, nor a queue for its reader."""
    waiting = (threading.__name__, concurrent.futures._base.__name__)
    while frame is not None and frame.f_globals["__name__"] in waiting:
        if frame.f_code is threading.Thread.start.__code__:  # It waits until the thread runs.
            return False
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"].startswith("rlio.storage")


class FarStore(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no type information
    """fsspec's store in memory, far away: ``far:///path`` is its ``/path``.

    Args:
        traffic: What counts the requests.
        seconds: Of each request.
    """

    protocol = "far"
    root_marker = "/"
    cachable = False
    # As of object stores: rlio reads a whole file by one request.
    async_impl = True

    def __init__(self, traffic: Traffic, seconds: float) -> None:
        super().__init__()
        self._traffic, self._seconds, self._target = traffic, seconds, MemoryFileSystem()

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self._late(lambda: self._target.ls(path, detail=detail))

    def info(self, path: str, **options: Any) -> Any:
        return self._late(lambda: self._target.info(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        return self._late(lambda: self._target.cat_file(path, start=start, end=end))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return AbstractBufferedFile(self, path, mode)  # Reads ranges, as files of object stores do.

    def _late(self, answer: Callable[[], Any]) -> Any:
        begun, found = time.perf_counter(), None
        time.sleep(self._seconds)
        try:
            found = answer()
        finally:
            self._traffic.passed(found, time.perf_counter() - begun)
        return found


fsspec.register_implementation("far", FarStore, clobber=True)


class _NoThreads:
    """In place of the pool of requests: who needs the result of a job that has not begun does it."""

    def submit(self, work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        return concurrent.futures.Future()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Readers make the same requests, each when it needs the answer."""
    with mock.patch.object(parallel, "_pool", _NoThreads()):
        yield
