"""`FinalRows`: arrays of which those of ``obs`` have a row more in each episode, as a table.

An array of N + episodes observations has those after the last steps; arrays of N actions have none. ::

    obs      o0 o1 o2 | o3 o4          obs      o0 o1 o2 | o3 o4
    actions  a0 a1    | a2        ->   actions  a0 a1 -  | a2 -

Example:
    >>> from rlio.formats.tables.table import ArrayTable
    >>> table = ArrayTable("log", {"x": np.arange(5.0), "a": np.array([7, 8, 9]), "indices": np.array([2])})
    >>> rows = FinalRows.of(table, Mapping({"obs": "x", "actions": "a"}, ends="indices"))
    >>> rows.lengths, rows.read(Rows(0, 0, 5), ["a"])["a"].tolist()
    ([3, 2], [7, 8, 8, 9, 9])
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.formats.tables.cuts import lengths_in
from rlio.formats.tables.paths import paths_in
from rlio.formats.tables.table import Rows, Table, TableAround
from rlio.mapping import DERIVE, Mapping, nested
from rlio.storage import Span

__all__ = ["FinalRows", "with_final_row"]


def with_final_row(mapping: Mapping, by: str) -> Mapping:
    """The mapping of a table whose episodes have a final row each; ``by``: what has the final observations.

    Raises:
        OptionError: ``next_obs`` names other ones.
    """
    if mapping.next_obs not in (None, DERIVE):
        raise OptionError(f"next_obs: {by} already give it: leave it out")
    return replace(mapping, next_obs=DERIVE, final_row=True)


class FinalRows(TableAround):
    """A table with final rows, from arrays; a `Table`. `of` makes one.

    The other table gives arrays whole (`Table.array`). In final rows, columns without a value repeat the one
    before, which is not used.

    Args:
        table: The other table; owned by this one.
        steps: Of each file: the steps of each episode.
    """

    is_cut = True

    def __init__(self, table: Table, steps: Sequence[Sequence[int]]) -> None:
        super().__init__(table)
        self.of_episodes: frozenset[str] = table.of_episodes
        self._steps = steps
        self.lengths: Sequence[int] = [count + 1 for each in steps for count in each]
        self.rows: Sequence[int] = [sum(each) + len(each) for each in steps]

    @classmethod
    def of(cls, table: Table, mapping: Mapping) -> FinalRows | None:
        """The table, if the arrays of ``obs`` have a row more in each episode of ``mapping``; or None."""
        tops = {
            path[0]: name == Columns.OBS
            for name in nested(mapping.columns)
            for path in paths_in(table, mapping.columns, of=name)
        }
        obs, others = (
            [name for name, is_obs in tops.items() if is_obs == wanted] for wanted in (True, False)
        )
        array = mapping.lengths or mapping.ends
        if not table.holds_arrays or not obs or not others or not (array or mapping.per_file):
            return None
        steps: list[list[int]] = []
        for file in range(len(table.rows)):
            rows, longer = (table.count(file, names[0]) for names in (others, obs))
            if longer <= rows:
                return None
            if array is None:
                steps.append([rows])
                continue
            values = table.array(file, array)
            # Lengths and ends may count the final rows, or not.
            last = values.sum() if mapping.lengths else values.max(initial=0)
            counted = longer if last == longer else rows
            try:
                found = lengths_in(values, counted, is_ends=mapping.ends is not None, episodes=longer - rows)
            except SchemaError:
                return None  # The rows of obs, which are as many as the lengths say, are told apart later.
            steps.append([length - 1 for length in found] if counted == longer else found)
        if any(
            table.count(file, name) != sum(each) + len(each)
            for file, each in enumerate(steps)
            for name in obs
        ) or any(table.count(file, name) != sum(each) for file, each in enumerate(steps) for name in others):
            return None
        return cls(table, steps)

    @staticmethod
    def mapping(mapping: Mapping) -> Mapping:
        """The mapping of the table with final rows.

        Raises:
            OptionError: ``next_obs`` names columns, or rows are to be sorted, and final rows have no place.
        """
        if mapping.sort:
            raise OptionError(
                f"sort={excerpt(mapping.sort)}: the arrays of obs have a row more in each episode, which has "
                "no value to be sorted by: sort the arrays, and leave out sort="
            )
        return with_final_row(mapping, "the arrays of obs, which have a row more in each episode,")

    def read(self, rows: Rows, names: Collection[str]) -> dict[str, Any]:
        """See `Table`."""
        steps = np.array(self._steps[rows.file], np.int64)
        ends = np.cumsum(steps + 1)
        here = (
            np.arange(rows.start, rows.stop) if rows.keep is None else np.flatnonzero(rows.keep) + rows.start
        )
        episode = np.searchsorted(ends, here, side="right")
        # Of a final row: the step before it, whose flags are those of the episode.
        stored = np.clip(here - episode - (here + 1 == ends[episode]), 0, max(0, int(steps.sum()) - 1))
        found = {}
        for name in names:
            array = self._table.array(rows.file, name)
            self._check_rows(
                rows.file, name, len(array) + (len(steps) if len(array) != self.rows[rows.file] else 0)
            )
            found[name] = array[here if len(array) == self.rows[rows.file] else stored]
        return found

    def spans(self, rows: Rows, names: Collection[str]) -> Iterable[Span]:
        """See `Table`. Arrays are read whole."""
        return self._table.spans(Rows(rows.file, 0, self._table.rows[rows.file]), names)

    def count(self, file: int, name: str) -> int:
        """See `Table`."""
        count, steps = self._table.count(file, name), self._steps[file]
        return self.rows[file] if count == sum(steps) else count

    def array(self, file: int, name: str) -> NDArray[Any]:
        """See `Table`."""
        return self._table.array(file, name)
