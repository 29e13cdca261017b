"""`Ahead`: loads the next item in a background thread while the caller uses this one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from rlio.support.forks import BackgroundThread

__all__ = ["Ahead"]

T = TypeVar("T")


class Ahead(Generic[T]):
    """Loads the next wanted item in a background thread, one item ahead.

    The calls bring what loads an item: often a method of the owner, which is so freed once it is dropped.
    """

    def __init__(self) -> None:
        self._thread = BackgroundThread("rlio-ahead")
        #: The announced key, and its future result.
        self._announced: tuple[Hashable, Future[T]] | None = None

    def get(self, key: Any, load: Callable[[Any], T]) -> T:
        """Return the item of ``key``, from the background if it was announced."""
        announced = self._take()
        if announced is not None:
            if announced[0] == key:
                return announced[1].result()
            wait([announced[1]])  # The loader must not run in two threads at once.
        return load(key)

    def _take(self) -> tuple[Hashable, Future[T]] | None:
        announced, self._announced = self._announced, None
        return None if self._thread.was_forked() else announced

    def announce(self, key: Any, load: Callable[[Any], T]) -> None:
        """Start to load the item of ``key``."""
        self._announced = key, self._thread.submit(load, key)

    def forget(self) -> None:
        """Drop the announced item after it is loaded, because it is no longer wanted."""
        announced = self._take()
        if announced is not None:
            wait([announced[1]])

    def close(self) -> None:
        """End the thread."""
        self._announced = None
        self._thread.close()
