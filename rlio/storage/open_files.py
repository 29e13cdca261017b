"""`OpenFiles`: keeps the most recently used files open.

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
    """Open files by key, least recently used first.

    Args:
        most: Most files to keep open.
        close: Closes a file; None: files need no closing.
    """

    def __init__(self, most: int, *, close: Callable[[T], object] | None = None) -> None:
        self._most = most
        self._close = close
        self._open: OrderedDict[K, T] = OrderedDict()

    def get(self, key: K) -> T | None:
        """The file of ``key``; None if it is not open."""
        if key in self._open:
            self._open.move_to_end(key)
        return self._open.get(key)

    def peek(self, key: K) -> T | None:
        """`get`, without a use of the file. For any thread."""
        return self._open.get(key)

    def add(self, key: K, file: T) -> T:
        """Keep a file open; closes the least recently used file if there are too many."""
        self._open[key] = file
        if len(self._open) > self._most:
            self._close_first()
        return file

    def drop(self, key: K) -> None:
        """Close a file, if it is open."""
        if key in self._open:
            self._open.move_to_end(key, last=False)
            self._close_first()

    def __iter__(self) -> Iterator[T]:
        """Iterate over the open files."""
        return iter(self._open.values())

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._close_first()

    def _close_first(self) -> None:
        file = self._open.popitem(last=False)[1]
        if self._close is not None:
            self._close(file)
