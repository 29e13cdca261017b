"""`Ahead`: loads the next item in a background thread while the caller uses this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from typing import Any, Final, Generic, TypeVar

from rlio.support.forks import BackgroundThread

__all__ = ["Ahead"]

T = TypeVar("T")

#: From this time of the caller on, as a part of what an item takes to load, the next one is loaded meanwhile.
#: Below, little is hidden, and Python's lock passes to and fro: with h5py, which never releases it, an epoch
#: took a seventh longer.
_WORTH_A_THREAD: Final = 1 / 4


class Ahead(Generic[T]):
    """Loads the next wanted item in a background thread, one item ahead.

    The calls bring what loads an item: often a method of the owner, which is so freed once it is dropped.

    Args:
        holds_gil: Whether loading keeps Python's lock: it is then done ahead only if the caller is likely to
            be busy meanwhile.
    """

    def __init__(self, *, holds_gil: bool = False) -> None:
        self._least = _WORTH_A_THREAD if holds_gil else 0.0
        self._thread = BackgroundThread("rlio-ahead")
        #: The announced key, and its future result.
        self._announced: tuple[Hashable, Future[T]] | None = None
        #: Seconds that the last item took, and that the caller was busy before it; when it got that item.
        self._took, self._busy = 0.0, 0.0
        self._got: float | None = None

    def get(self, key: Any, load: Callable[[Any], T]) -> T:
        """Return the item of ``key``, from the background if it was loaded there."""
        if self._got is not None:
            self._busy = time.perf_counter() - self._got
        try:
            announced = self._take()
            if announced is not None:
                if announced[0] == key:
                    return announced[1].result()
                wait([announced[1]])  # The loader must not run in two threads at once.
            return self._timed(key, load)
        finally:
            self._got = time.perf_counter()

    def _timed(self, key: Any, load: Callable[[Any], T]) -> T:
        begun = time.perf_counter()
        try:
            return load(key)
        finally:
            self._took = time.perf_counter() - begun

    def _take(self) -> tuple[Hashable, Future[T]] | None:
        announced, self._announced = self._announced, None
        return None if self._thread.was_forked() else announced

    def announce(self, key: Any, load: Callable[[Any], T]) -> None:
        """Start to load the item that `get` wants next."""
        if self._busy >= self._least * self._took:
            self._announced = key, self._thread.submit(self._timed, key, load)

    def forget(self) -> None:
        """Drop the announced item after it is loaded, because it is no longer wanted."""
        announced = self._take()
        if announced is not None:
            wait([announced[1]])

    def close(self) -> None:
        """End the thread."""
        self._announced = None
        self._thread.close()
