"""Rows of the steps of an episode, as many layouts have them: ranges of rows, flags of ends, numbers.

Example:
    >>> flags_of(range(2, 4), 4, terminated=True, truncated=False)["terminateds"].tolist()
    [False, True]
    >>> ranges_of(np.array([5, 6, 0, 1, 2])), cut_ranges([(5, 7), (0, 3)], range(1, 4))
    ([(5, 7), (0, 3)], [(6, 7), (0, 2)])
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns

__all__ = ["cut_ranges", "flags_of", "flat", "one_more", "ranges_of"]


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """One number a row, also where the file has (N, 1)."""
    return array.reshape(len(array)) if array.ndim == 2 and array.shape[1] == 1 else array


def one_more(rows: range) -> range:
    """Rows of a part, and the one after it, whose observation is the last row's next one."""
    return range(rows.start, rows.stop + 1)


def flags_of(
    rows: range | int, steps: int | None = None, *, terminated: bool, truncated: bool
) -> dict[str, NDArray[np.bool_]]:
    """The ends of an episode, on its last row: of all rows, or of some of its ``steps``."""
    count, stop = (rows, rows) if isinstance(rows, int) else (len(rows), rows.stop)
    ends = np.zeros((2, count), np.bool_)
    if steps is None or stop == steps:
        ends[:, -1:] = [[terminated], [truncated]]
    return {Columns.TERMINATEDS: ends[0], Columns.TRUNCATEDS: ends[1]}


def ranges_of(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Rows as ranges (start, stop) of rows that follow each other."""
    cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(int(rows[a]), int(rows[b - 1]) + 1) for a, b in pairwise(cuts) if a < b]


def cut_ranges(ranges: Sequence[tuple[int, int]], rows: range) -> list[tuple[int, int]]:
    """Those of ``rows``, counted through the ranges."""
    found, at = [], 0
    for start, stop in ranges:
        low, high = max(rows.start - at, 0), min(rows.stop - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return found
