"""Reusable memory: an array is reused as soon as no reference to it remains, and never earlier.

Fresh memory costs a page fault every 4 KiB, more than a copy into memory that was used before. NumPy views
(and tensors made of them) hold a reference to the array that owns their memory. The owner's reference count
therefore tells whether a user still holds any part of the array.

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
    """References to the first owner, including the deque's and those of this call."""
    return sys.getrefcount(owners[0])


# Reference count of a free owner. It is measured, because interpreters count different references of their
# own (from 3.14 on, calls borrow the references of local variables), and one too many would give one batch
# to two users.
_FREE = _first_is_held(deque([np.empty(1, np.uint8)]))
# Columns begin at multiples of this many bytes.
_ROUND = 64
# Requested sizes are rounded up by an eighth at most. Batches of similar sizes then share memory, and sizes
# that always differ (whole episodes) do not leave arrays of each size behind. Untouched memory is free.
_SIZE_BITS = 4
# Most bytes to remember; or this many arrays of the requested size, if that is more.
_MOST_BYTES = 128 << 20
_LEAST_ARRAYS = 4
# Below this size, malloc has memory ready, and asking malloc is quicker than looking for a free array.
_LEAST = 4096


#: All `Buffers` of this process.
_all: weakref.WeakSet[Buffers] = weakref.WeakSet()


class Buffers:
    """Gives arrays whose memory is reused. Thread-safe.

    Args:
        keep: Most arrays of one size to remember; further arrays are fresh ones.
        most: Most bytes to remember in all: arrays of the size least recently requested are forgotten first.
    """

    def __init__(self, keep: int = 32, *, most: int = _MOST_BYTES) -> None:
        self._keep = keep
        self._most = most
        self._lock = threading.Lock()
        #: Size -> its arrays; the most recently requested size comes last.
        self._owners: OrderedDict[int, deque[NDArray[np.uint8]]] = OrderedDict()
        self._bytes = 0
        _all.add(self)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
        """A writable array with undefined content, whose memory no other array shares.

        Args:
            shape: As for `numpy.empty`.
            dtype: As for `numpy.empty`; no objects.
        """
        kind = np.dtype(dtype)
        wanted = (shape,) if isinstance(shape, int) else shape
        size = math.prod(wanted) * kind.itemsize
        if size < _LEAST or kind.hasobject:
            return np.empty(wanted, kind)
        return self._owner(size)[:size].view(kind).reshape(wanted)

    def columns(self, columns: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """The columns of one batch, each contiguous, in one block of memory: quicker than one by one.

        Args:
            columns: A structured dtype whose fields are the columns, rows included: see `batch_dtype`.
        """
        size = columns.itemsize
        owner = np.empty(size, np.uint8) if size < _LEAST else self._owner(size)
        record = owner[:size].view(columns).reshape(())
        return {name: record[name] for name in columns.names or ()}

    def _owner(self, least: int) -> NDArray[np.uint8]:
        """Memory of at least this many bytes that no other array shares."""
        size = _rounded(least)
        with self._lock:
            owners = self._owners.get(size)
            if owners is None:
                owners = self._owners[size] = deque()
            self._owners.move_to_end(size)
            for _ in range(len(owners)):
                # Prefer the array used last, if it is free: it may still be in the processor's cache.
                if _first_is_held(owners) == _FREE:
                    return owners[0]
                owners.rotate(-1)
            fresh = np.empty(size, np.uint8)
            self._remember(fresh, owners)
            return fresh

    def _remember(self, fresh: NDArray[np.uint8], owners: deque[NDArray[np.uint8]]) -> None:
        """Remember one more array; forget arrays of sizes that were not requested for the longest time."""
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
    """Replace locks that threads of the parent held. Arrays that those threads used are not reused."""
    for buffers in _all:
        buffers._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def _rounded(size: int) -> int:
    """Size of the array that serves a request of this many bytes."""
    step = max(size.bit_length() - _SIZE_BITS, _ROUND.bit_length() - 1)
    return -(-size >> step) << step


def batch_dtype(rows: int, columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> np.dtype[Any]:
    """The dtype for `Buffers.columns`: every column begins at a multiple of 64 bytes.

    Args:
        rows: Rows of the batch.
        columns: Name -> (dtype, shape of a row).
    """
    offsets, formats, end = [], [], 0
    for kind, shape in columns.values():
        offsets.append(end)
        formats.append((kind, (rows, *shape)))
        end += -(-rows * math.prod(shape) * kind.itemsize // _ROUND) * _ROUND
    return np.dtype({"names": list(columns), "formats": formats, "offsets": offsets, "itemsize": max(end, 1)})
