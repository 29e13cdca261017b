"""Sums and samples of which statistics are made, in one pass over the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["QUANTILES", "SAMPLE_ROWS", "LeafStats", "Moments", "Sample"]

#: Name -> the share of the values below it.
QUANTILES: Final = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
#: Rows from which quantiles are computed, at most; fewer if rows are wide.
SAMPLE_ROWS: Final = 1 << 16
_SAMPLE_BYTES: Final = 64 << 20
# Values that are processed at once: they fit the processor's cache.
_CHUNK_VALUES: Final = 1 << 17


@dataclass(frozen=True)
class LeafStats:
    """Statistics of one array of a column, for each of its values in a row (shape (): one value a row).

    Attributes:
        count: Finite values, int64. The other statistics are of these, float64; NaN if there are none.
        mean, std: Mean and standard deviation (divided by ``count``).
        min, max: Least and greatest value.
        q01, q10, q50, q90, q99: Quantiles. Exact for up to 65,536 rows (fewer if a row is wider than 1 KiB).
            Otherwise from a random sample of as many rows: their rank then errs by 0.2 % (one standard
            deviation) at the median, and by 0.04 % at q01 and q99.
        nan: NaN values, int64.
    """

    count: NDArray[np.int64]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]
    q01: NDArray[np.float64]
    q10: NDArray[np.float64]
    q50: NDArray[np.float64]
    q90: NDArray[np.float64]
    q99: NDArray[np.float64]
    nan: NDArray[np.int64]


class Moments:
    """Count, mean, squared differences, least and greatest of the finite values so far, of each column.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979), for joining parts.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        width = int(np.prod(shape, dtype=np.int64))
        self.count: NDArray[np.int64] = np.zeros(width, np.int64)
        self._nan = np.zeros(width, np.int64)
        self._mean, self._squares = np.zeros(width), np.zeros(width)
        self._min, self._max = np.full(width, np.inf), np.full(width, -np.inf)

    def add(self, values: NDArray[Any]) -> None:
        """Add rows, shape (n, width)."""
        step = max(_CHUNK_VALUES // max(values.shape[1], 1), 1)
        for start in range(0, len(values), step):
            self._add(np.array(values[start : start + step].T, np.float64, order="C"))

    def _add(self, values: NDArray[np.float64]) -> None:
        """Add values, shape (width, n), of which it takes ownership."""
        n = np.full(len(values), values.shape[1])
        least, most = values.min(axis=1), values.max(axis=1)
        total = values.sum(axis=1)
        if np.isfinite(total).all():
            mean = total / n
            values -= mean[:, None]
        else:
            finite = np.isfinite(values)
            n = finite.sum(axis=1)
            self._nan += np.isnan(values).sum(axis=1)
            least = values.min(axis=1, where=finite, initial=np.inf)
            most = values.max(axis=1, where=finite, initial=-np.inf)
            # Each divided first, because the sum of large values may not be finite.
            each = np.maximum(n, 1)[:, None]
            mean = np.divide(values, each, out=np.zeros_like(values), where=finite).sum(axis=1)
            values = np.where(finite, values - mean[:, None], 0.0)
        squares = np.einsum("ij,ij->i", values, values)
        count = self.count + n
        share = n / np.maximum(count, 1)
        delta = mean - self._mean
        self._squares += squares + np.where(n > 0, delta * delta * self.count * share, 0.0)
        self._mean += np.where(n > 0, delta * share, 0.0)
        self.count = count
        np.minimum(self._min, least, out=self._min)
        np.maximum(self._max, most, out=self._max)

    def stats(self, quantiles: NDArray[np.float64]) -> LeafStats:
        """The statistics, with the quantiles of shape (len(QUANTILES), width)."""
        empty = self.count == 0
        std = np.sqrt(self._squares / np.maximum(self.count, 1))
        found = [np.where(empty, np.nan, values) for values in (self._mean, std, self._min, self._max)]
        found = [self.count, *found, *quantiles, self._nan]
        return LeafStats(*(values.reshape(self._shape) for values in found))


class Sample:
    """A random sample of whole rows, of bounded size, that depends on the rows' positions only.

    Each row draws a key, and the rows with the smallest keys are kept.
    """

    def __init__(self, row_bytes: int) -> None:
        self._most = max(min(SAMPLE_ROWS, _SAMPLE_BYTES // max(row_bytes, 1)), 64)
        self._random = np.random.default_rng(0)
        self._highest = 1.0
        self._keys = np.empty(0)
        self._parts: list[dict[str, NDArray[Any]]] = []

    @property
    def rows(self) -> int:
        """Rows in the sample."""
        return len(self._keys)

    def add(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Add the next rows."""
        keys = self._random.random(len(next(iter(arrays.values()))))
        kept = np.flatnonzero(keys <= self._highest)
        self._keys = np.append(self._keys, keys[kept])
        self._parts.append({name: values[kept] for name, values in arrays.items()})
        if self.rows > 2 * self._most:
            self._thin()

    def _thin(self) -> None:
        """Drop the rows with the largest keys, if there are too many."""
        if self.rows > self._most:
            self._highest = float(np.partition(self._keys, self._most - 1)[self._most - 1])
        chosen = self._keys <= self._highest
        self._keys = self._keys[chosen]
        self._parts = [{name: self._joined(name)[chosen] for name in self._parts[0]}]

    def _joined(self, name: str) -> NDArray[Any]:
        return np.concatenate([part[name] for part in self._parts])

    def quantiles(self) -> dict[str, NDArray[np.float64]]:
        """Name -> quantiles of the finite values, shape (len(QUANTILES), width)."""
        self._thin()
        wanted = list(QUANTILES.values())
        found = {}
        for name, rows in self._parts[0].items():
            values = rows.T.astype(np.float64)
            if np.isfinite(values).all():
                found[name] = np.quantile(values, wanted, axis=1)
                continue
            finite = [row[np.isfinite(row)] for row in values]
            none = np.full(len(wanted), np.nan)
            found[name] = np.stack([np.quantile(r, wanted) if len(r) else none for r in finite], axis=1)
        return found
