"""`OpenFiles`: keeps the most recently used files open.

A forked child opens its files anew. A thread of the parent may have held the lock of an open file at the
fork, such as that of an `io.BufferedReader`, or of Arrow: who reads, closes or frees that file in the child
waits for ever.

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
from typing import Any, Final, Generic, TypeVar

from rlio.support.forks import Owner

__all__ = ["OpenFiles"]

#: Files that the parent of this process had open: they are never freed.
_PARENTS: Final[list[Any]] = []

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
        self._owner = Owner()
        self._files: OrderedDict[K, T] = OrderedDict()

    @property
    def _open(self) -> OrderedDict[K, T]:
        """The files that this process has open."""
        if not self._owner.is_here:
            _PARENTS.append(self._files)
            self._owner, self._files = Owner(), OrderedDict()
        return self._files

    def get(self, key: K) -> T | None:
        """The file of ``key``; None if it is not open."""
        files = self._open
        if key in files:
            files.move_to_end(key)
        return files.get(key)

    def peek(self, key: K) -> T | None:
        """`get`, without a use of the file. For any thread."""
        return self._open.get(key)

    def add(self, key: K, file: T) -> T:
        """Keep a file open; closes the least recently used file if there are too many."""
        self._open[key] = file
        if len(self._files) > self._most:
            self._close_first()
        return file

    def drop(self, key: K) -> None:
        """Close a file, if it is open."""
        files = self._open
        if key in files:
            files.move_to_end(key, last=False)
            self._close_first()

    def __iter__(self) -> Iterator[T]:
        """Iterate over the open files."""
        return iter(self._open.values())

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._close_first()

    def _close_first(self) -> None:
        file = self._files.popitem(last=False)[1]
        if self._close is not None:
            self._close(file)
