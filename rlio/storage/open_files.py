"""`OpenFiles`: the few files that were used last stay open.

Example:
    >>> from io import BytesIO
    >>> files = OpenFiles(1, close=BytesIO.close)
    >>> first = files.add("a", BytesIO())
    >>> second = files.add("b", BytesIO())
    >>> first.closed, files.get("a"), files.get("b") is second
    (True, None, True)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["OpenFiles"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class OpenFiles(Generic[K, T]):
    """Files by key, the one used last at the end.

    Args:
        most: How many stay open.
        close: Closes one; None: there is nothing to close.
    """

    def __init__(self, most: int, *, close: Callable[[T], object] | None = None) -> None:
        self._most = most
        self._close = close
        self._open: OrderedDict[K, T] = OrderedDict()

    def get(self, key: K) -> T | None:
        """The file of ``key``; None: it is not open."""
        if key in self._open:
            self._open.move_to_end(key)
        return self._open.get(key)

    def add(self, key: K, file: T) -> T:
        """Keep a file open, and close the one that was not used for longest if they are too many."""
        self._open[key] = file
        if len(self._open) > self._most:
            self._close_first()
        return file

    def __iter__(self) -> Iterator[T]:
        """Those that are open."""
        return iter(self._open.values())

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._close_first()

    def _close_first(self) -> None:
        file = self._open.popitem(last=False)[1]
        if self._close is not None:
            self._close(file)
