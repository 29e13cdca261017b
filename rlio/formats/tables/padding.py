"""Padding in rows that are episodes: signs that steps are padding, or that what counts as padding has steps.

Example:
    >>> lists = PaddedLists(np.array([[1.0], [2.0], [np.nan]]), np.array([3]), np.array([3]), np.array([0]))
    >>> lists.is_lost()
    array([ True])
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.errors import SchemaError

__all__ = ["PaddedLists", "padding_error"]

Marks: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = NDArray[np.int64]


def padding_error(row: int, lengths: str | None) -> SchemaError:
    """The error of a row with padding that the mapping does not name; ``lengths``: its column of lengths."""
    if lengths:
        return SchemaError(
            f"lengths: the steps of row {row} begin with padding, and values follow its last step: expected "
            "the steps first; load the file, and pass a mask of the steps with its arrays to "
            "rlio.from_arrays, such as mask = np.arange(T) >= T - lengths[:, None], valid='mask'",
            column=lengths,
        )
    return SchemaError(
        f"the first or last steps of row {row} have no values in any column, or zeros in all, as padding "
        "has: name the column of the number of steps in lengths=, or the mask of steps in valid= (without "
        "one, load the file, and pass mask = ~np.isnan(obs).all(axis=-1), or one of ones if these are steps, "
        "with its arrays to rlio.from_arrays); if the last row of each episode has its final observation "
        "only, pass final_row=True"
    )


class PaddedLists(NamedTuple):
    """A column of lists that may have padding.

    Attributes:
        values: All items, (items, numbers).
        lengths: Items of each list.
        steps: How many of each are steps.
        skips: How many precede the steps.
    """

    values: NDArray[Any]
    lengths: Counts
    steps: Counts
    skips: Counts

    def is_lost(self) -> Marks:
        """Of each list, whether its first or last step is NaN, and others are not."""
        lost, stops = np.isnan(self.values).all(axis=1), np.cumsum(self.lengths)
        begins, some = stops - self.lengths, (self.steps > 0) & (self.lengths > 0)
        last = begins + np.minimum(self.lengths, self.steps) - 1
        found = np.zeros(len(self.lengths), np.bool_)
        found[some] = lost[begins[some]] | lost[last[some]]
        return found & (_counts(lost, begins, stops) < self.lengths)

    def is_left(self) -> Marks:
        """Of each list, whether it begins with equal items, as many as follow its steps, which differ."""
        stops, rest = np.cumsum(self.lengths), np.maximum(self.lengths - self.steps, 0)
        begins = stops - self.lengths
        return np.asarray((self._moves(begins, begins + rest) == 0) & self._all_move(stops - rest, stops))

    def is_inverted(self) -> Marks:
        """Of each list, whether its steps are equal, and the items before or after them differ."""
        stops = np.cumsum(self.lengths)
        begins, first = stops - self.lengths, stops - self.lengths + self.skips
        others = self._all_move(begins, first) | self._all_move(first + self.steps, stops)
        return np.asarray((self._moves(first, first + self.steps) == 0) & others)

    def _all_move(self, first: Counts, stop: Counts) -> Marks:
        return np.asarray((stop - first > 1) & (self._moves(first, stop) == stop - first - 1))

    def _moves(self, first: Counts, stop: Counts) -> Counts:
        """How many items in stretches are unlike the one before."""
        moves = np.ones(len(self.values), np.bool_)
        now, before = self.values[1:], self.values[:-1]
        moves[1:] = ((now != before) & ((now == now) | (before == before))).any(axis=1)
        return _counts(moves, np.minimum(first + 1, stop), stop)

    def ends_with_zeros(self) -> Marks:
        """Of each list, whether its last two items are zeros, and others are not."""
        stops, some = np.cumsum(self.lengths), self.lengths > 2
        blank: Marks = ~np.asarray(self.values.any(axis=1))
        found = np.zeros(len(self.lengths), np.bool_)
        found[some] = blank[stops[some] - 1] & blank[stops[some] - 2]
        return found & (_counts(blank, stops - self.lengths, stops) < self.lengths)


def _counts(marks: Marks, first: Counts, stop: Counts) -> Counts:
    """How many marks there are between places."""
    total = np.concatenate([[0], np.cumsum(marks)])
    return np.asarray(total[stop] - total[np.minimum(first, stop)])
