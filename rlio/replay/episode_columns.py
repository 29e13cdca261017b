"""Columns derived from whole episodes: returns to go, discounted returns, episode returns and lengths.

An episode is all of its rows in the store, across fragments and shards. Sums are in float64. A truncated
episode has ended: its sums are those of its recorded rewards, without a value of the state after the last one
(no bootstrap). NaN marks unknown values: ``returns_to_go`` and ``mc_return`` in an episode whose end was not
recorded; ``episode_return`` and ``episode_length`` also in one whose first rows were not (``t`` does not
begin at 0; without ``t``, any episode of a writer that was trimmed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.discounting import discount_cumsum
from rlio.errors import MissingColumn
from rlio.query.derived_columns import EPISODE_LENGTH, EPISODE_RETURN, MC_RETURN, RETURNS_TO_GO
from rlio.replay.sequences import chain_rows
from rlio.replay.table import RowTable
from rlio.schemas.column import ColumnSpec
from rlio.schemas.leaves import Leaf

__all__ = ["EpisodeValues", "episode_leaf"]

Ids = NDArray[np.int64]


def episode_leaf(name: str) -> Leaf:
    """The leaf that a derived column would have."""
    return Leaf(name, (), name, ColumnSpec("<f8", (), "scalar"))


class EpisodeValues:
    """Derived columns of the rows of a store.

    Args:
        table: Holds the rows.
        rows: Logical numbers of the rows that are seen.
        head: Ignore rows from this logical number on.
        flat: Logical name -> physical name, of the columns with one number a row.
        trimmed: Whether rows of the writers of some rows were trimmed, by their logical numbers.

    Attributes:
        firsts: Logical number of the first row of each episode.
    """

    def __init__(
        self,
        table: RowTable,
        rows: Ids,
        *,
        head: int,
        flat: dict[str, str],
        trimmed: Callable[[Ids], NDArray[np.bool_]],
    ) -> None:
        self._table, self._head, self._flat = table, head, flat
        self.firsts: Ids = rows[table.places(rows) == 0]
        self._rows, self._lengths = chain_rows(table, self.firsts, np.full(len(self.firsts), head), head=head)
        last = self._rows[np.cumsum(self._lengths) - 1]
        self._ended = self._is_done(last)
        self._whole = self._ended.copy()
        if Columns.T in flat:
            self._whole &= table.values(flat[Columns.T], self.firsts) == 0
        else:
            self._whole &= ~trimmed(self.firsts)

    def _is_done(self, rows: Ids) -> NDArray[np.bool_]:
        flags = [name for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS) if name in self._flat]
        if not flags:
            raise MissingColumn(
                "derived columns need the ends of episodes: terminateds or truncateds",
                column=Columns.TERMINATEDS,
            )
        ended: NDArray[np.bool_] = np.zeros(len(rows), bool)
        for name in flags:
            ended |= np.asarray(self._table.values(self._flat[name], rows), bool)
        return ended

    def of(self, name: str, gamma: float) -> NDArray[np.float64]:
        """A derived column, by logical number; NaN for rows that are not seen.

        Raises:
            MissingColumn: There are no rewards.
        """
        lengths = self._lengths
        known = np.repeat(self._ended if name in (RETURNS_TO_GO, MC_RETURN) else self._whole, lengths)
        values: NDArray[Any]
        if name == EPISODE_LENGTH:
            values = np.repeat(lengths, lengths)
        else:
            if Columns.REWARDS not in self._flat:
                raise MissingColumn(f"{name} needs one reward a row", column=Columns.REWARDS)
            rewards = self._table.values(self._flat[Columns.REWARDS], self._rows)
            values = discount_cumsum(rewards, gamma if name == MC_RETURN else 1.0, lengths=lengths)
            if name == EPISODE_RETURN:
                values = np.repeat(values[np.cumsum(lengths) - lengths], lengths)
        found = np.full(self._head, np.nan)
        found[self._rows] = np.where(known, values, np.nan)
        return found
