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
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

__all__ = ["Buffers", "batch_dtype"]

# References to an owner that nobody else has: the deque's, the local variable's, and getrefcount's own.
_FREE = 3
# Sizes that are asked for are rounded up to a multiple of this, so that batches of like sizes share memory.
_ROUND = 64
# Below this, malloc has memory at hand and asking it is quicker than looking for a free array.
_LEAST = 4096


class Buffers:
    """Gives arrays whose memory is used again. Thread-safe.

    Args:
        keep: How many arrays of one size are remembered, at most; further ones are plain fresh arrays.
    """

    def __init__(self, keep: int = 32) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._owners: dict[int, deque[NDArray[np.uint8]]] = {}

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
        rounded = -(-size // _ROUND) * _ROUND
        return self._owner(rounded)[:size].view(kind).reshape(wanted)

    def columns(self, columns: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """The columns of one batch, each contiguous, in one piece of memory: quicker than one by one.

        Args:
            columns: A structured dtype whose fields are the columns, rows included: see `batch_dtype`.
        """
        size = columns.itemsize
        owner = np.empty(size, np.uint8) if size < _LEAST else self._owner(-(-size // _ROUND) * _ROUND)
        record = owner[:size].view(columns).reshape(())
        return {name: record[name] for name in columns.names or ()}

    def _owner(self, size: int) -> NDArray[np.uint8]:
        with self._lock:
            owners = self._owners.setdefault(size, deque())
            for _ in range(len(owners)):
                owner = owners[0]
                owners.rotate(-1)
                if sys.getrefcount(owner) == _FREE:
                    return owner
            fresh = np.empty(size, np.uint8)
            if len(owners) < self._keep:
                owners.append(fresh)
            return fresh


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
