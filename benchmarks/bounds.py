"""What bounds random batches: NumPy's own gathering, and copying memory.

Indices are drawn beforehand: a bound does nothing but move rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.data import Columns

__all__ = ["Copied", "Packed", "Taken", "packed_rows", "random_indices"]

# Drawings that are made beforehand and used in turn: enough for none of their rows to be in a cache.
_DRAWINGS = 64


def random_indices(rows: int, size: int) -> itertools.cycle[NDArray[np.int64]]:
    """Endless drawings of ``size`` rows."""
    drawn = np.random.default_rng(0).integers(0, rows, (max(_DRAWINGS, 2**18 // size), size))
    return itertools.cycle(list(drawn))


class Taken:
    """`numpy.take`, column by column, into fresh arrays or into arrays that are used again."""

    def __init__(self, columns: Columns, size: int, *, reuse: bool) -> None:
        self._columns = columns
        self._indices = random_indices(len(next(iter(columns.values()))), size)
        self._out: Mapping[str, NDArray[Any] | None] = {
            name: np.empty((size, *values.shape[1:]), values.dtype) if reuse else None
            for name, values in columns.items()
        }

    def sample(self) -> Columns:
        at = next(self._indices)
        # mode="clip": with "raise", NumPy gathers into a copy of `out`.
        return {
            name: np.take(values, at, axis=0, out=self._out[name], mode="clip")
            for name, values in self._columns.items()
        }


class Packed:
    """One `numpy.take` of rows whose columns lie side by side, into memory that is used again."""

    def __init__(self, packed: NDArray[np.void], size: int) -> None:
        # As plain bytes: NumPy gathers structured values field by field.
        self._rows = packed.view(np.dtype((np.void, packed.dtype.itemsize)))
        self._indices = random_indices(len(packed), size)
        self._out = np.empty(size, self._rows.dtype)

    def sample(self) -> NDArray[np.void]:
        return np.take(self._rows, next(self._indices), out=self._out, mode="clip")


class Copied:
    """As many bytes as a batch has, copied from one place that no cache holds."""

    def __init__(self, packed: NDArray[np.void], size: int) -> None:
        self._rows = packed.view(np.dtype((np.void, packed.dtype.itemsize)))
        size = min(size, len(packed))
        starts = np.random.default_rng(0).permutation(len(packed) - size + 1)[:4096]
        self._starts = itertools.cycle(starts.tolist())
        self._out = np.empty(size, self._rows.dtype)

    def sample(self) -> NDArray[np.void]:
        start = next(self._starts)
        np.copyto(self._out, self._rows[start : start + len(self._out)])
        return self._out


def packed_rows(columns: Columns) -> NDArray[np.void]:
    """The columns side by side, one structured value a row."""
    kinds = [(name, values.dtype, values.shape[1:]) for name, values in columns.items()]
    rows = np.empty(len(next(iter(columns.values()))), np.dtype(kinds))
    for name, values in columns.items():
        rows[name] = values
    return rows
