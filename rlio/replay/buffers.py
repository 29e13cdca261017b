"""Memory that is used again: an array comes back as soon, and only when, nobody can see it any more.

Fresh memory costs a page fault every 4 KiB, more than a copy into memory that was used before. NumPy's views
hold a reference to the array that owns their memory (and so do tensors made of them), so that the number of
references to the owner says whether a user still has any of it.

Example:
    >>> buffers = Buffers()
    >>> first = buffers.empty((4, 2), "f4")
    >>> kept = first[1:]
    >>> del first
    >>> buffers.empty((4, 2), "f4").base is kept.base      # A view of it is alive.
    False
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

__all__ = ["Buffers", "batch_dtype"]


def _first_is_held(owners: deque[NDArray[np.uint8]]) -> int:
    """References to the first of some owners, the deque's own and those of this call included."""
    return sys.getrefcount(owners[0])


# References to an owner that nobody else holds. Measured: which of its own an interpreter counts differs
# (from 3.14 on, local variables lend theirs to calls), and one too many would be a batch in two hands.
_FREE = _first_is_held(deque([np.empty(1, np.uint8)]))
# Columns begin at multiples of as many bytes.
_ROUND = 64
# Sizes that are asked for are rounded up by an eighth at most: batches of like sizes share memory, and those
# of ever other sizes (whole episodes) do not leave arrays of each behind. Untouched memory is free.
_SIZE_BITS = 4
# Bytes that are remembered, at most, or as many arrays of the size that is asked for.
_MOST_BYTES = 128 << 20
_LEAST_ARRAYS = 4
# Below this, malloc has memory at hand and asking it is quicker than looking for a free array.
_LEAST = 4096


#: Those of this process.
_all: weakref.WeakSet[Buffers] = weakref.WeakSet()


class Buffers:
    """Gives arrays whose memory is used again. Thread-safe.

    Args:
        keep: How many arrays of one size are remembered, at most; further ones are plain fresh arrays.
        most: Bytes of all that are remembered, at most: arrays of the size that was not asked for the longest
            are forgotten first.
    """

    def __init__(self, keep: int = 32, *, most: int = _MOST_BYTES) -> None:
        self._keep = keep
        self._most = most
        self._lock = threading.Lock()
        #: Size -> arrays of it; the size that was asked for last comes last.
        self._owners: OrderedDict[int, deque[NDArray[np.uint8]]] = OrderedDict()
        self._bytes = 0
        _all.add(self)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
        """An array of any content, writable, of which nobody else can see the memory.

        Args:
            shape: As for `numpy.empty`.
            dtype: Likewise; no objects.
        """
        kind = np.dtype(dtype)
        wanted = (shape,) if isinstance(shape, int) else shape
        size = math.prod(wanted) * kind.itemsize
        if size < _LEAST or kind.hasobject:
            return np.empty(wanted, kind)
        return self._owner(size)[:size].view(kind).reshape(wanted)

    def columns(self, columns: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """The columns of one batch, each contiguous, in one piece of memory: quicker than one by one.

        Args:
            columns: A structured dtype whose fields are the columns, rows included: see `batch_dtype`.
        """
        size = columns.itemsize
        owner = np.empty(size, np.uint8) if size < _LEAST else self._owner(size)
        record = owner[:size].view(columns).reshape(())
        return {name: record[name] for name in columns.names or ()}

    def _owner(self, least: int) -> NDArray[np.uint8]:
        """Memory of at least so many bytes that nobody else can see."""
        size = _rounded(least)
        with self._lock:
            owners = self._owners.get(size)
            if owners is None:
                owners = self._owners[size] = deque()
            self._owners.move_to_end(size)
            for _ in range(len(owners)):
                # The one that was used last, if it is free: it may still be in the processor's cache.
                if _first_is_held(owners) == _FREE:
                    return owners[0]
                owners.rotate(-1)
            fresh = np.empty(size, np.uint8)
            self._remember(fresh, owners)
            return fresh

    def _remember(self, fresh: NDArray[np.uint8], owners: deque[NDArray[np.uint8]]) -> None:
        """Keep one more array, in place of those of sizes that are not asked for any more."""
        if len(owners) >= self._keep:
            return
        size = len(fresh)
        most = max(self._most, _LEAST_ARRAYS * size)
        while self._bytes + size > most and len(self._owners) > 1:
            forgotten = next(iter(self._owners))
            self._bytes -= forgotten * len(self._owners.pop(forgotten))
        if self._bytes + size <= most:
            owners.append(fresh)
            self._bytes += size


def _let_go_in_child() -> None:
    """Free what threads held that a fork has left behind; what they had in hand is given to nobody else."""
    for buffers in _all:
        buffers._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def _rounded(size: int) -> int:
    """The size of the array in which so many bytes are given."""
    step = max(size.bit_length() - _SIZE_BITS, _ROUND.bit_length() - 1)
    return -(-size >> step) << step


def batch_dtype(rows: int, columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> np.dtype[Any]:
    """The dtype of `Buffers.columns` for as many rows: every column begins at a multiple of 64 bytes.

    Args:
        rows: Of the batch.
        columns: Name -> (dtype, shape of a row).
    """
    offsets, formats, end = [], [], 0
    for kind, shape in columns.values():
        offsets.append(end)
        formats.append((kind, (rows, *shape)))
        end += -(-rows * math.prod(shape) * kind.itemsize // _ROUND) * _ROUND
    return np.dtype({"names": list(columns), "formats": formats, "offsets": offsets, "itemsize": max(end, 1)})
