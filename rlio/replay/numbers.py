"""`Numbers`: integers in one array, added at the end and dropped at the front.

Example:
    >>> numbers = Numbers([3, 5])
    >>> numbers.extend(np.array([9, 12]))
    >>> numbers.drop(1)
    >>> numbers.insert(np.array([13, 7]))
    >>> numbers.values.tolist()
    [5, 7, 9, 12, 13]
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

__all__ = ["Numbers"]

Ids: TypeAlias = NDArray[np.int64]

# Smallest array to allocate.
_LEAST = 64


class Numbers:
    """A queue of int64 numbers in one array, with spare room for half of them.

    Adding and dropping take time in proportion to the numbers added or dropped, on average, however many
    numbers are kept.

    Args:
        values: The first numbers.
    """

    def __init__(self, values: npt.ArrayLike = ()) -> None:
        self._array: Ids = np.array(values, np.int64)
        self._start, self._stop = 0, len(self._array)

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def values(self) -> Ids:
        """The numbers: a view that is valid until the next change."""
        return self._array[self._start : self._stop]

    def extend(self, values: Ids) -> None:
        """Add numbers at the end."""
        stop = self._stop + len(values)
        if stop > len(self._array):
            kept = self.values
            needed = len(kept) + len(values)
            self._array = np.empty(max(needed + needed // 2, _LEAST), np.int64)
            self._array[: len(kept)] = kept
            self._start, self._stop, stop = 0, len(kept), needed
        self._array[self._stop : stop] = values
        self._stop = stop

    def insert(self, values: Ids) -> None:
        """Add numbers, in any order, to ascending ones; takes time for these and for kept ones above."""
        if not len(values):
            return
        kept = self.values
        above = kept[kept.searchsorted(values.min()) :]
        self._stop -= len(above)
        # A stable sort is Timsort, which merges the existing runs at almost no cost.
        self.extend(np.sort(np.concatenate([above, values]), kind="stable"))

    def drop(self, count: int) -> None:
        """Drop the first ``count`` numbers."""
        self._start += count

    def drop_below(self, least: int) -> None:
        """Drop the numbers below ``least``; the numbers must be ascending."""
        self._start += int(self.values.searchsorted(least))
