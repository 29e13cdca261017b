"""`MappedEpisodes`: where the episodes of a mapped table begin, by ids, flags, lengths or files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.errors import SchemaError, excerpt
from rlio.formats.files.value_arrays import one_a_row
from rlio.formats.tables.cuts import stated_lengths
from rlio.formats.tables.doubts import advice_of_flags, check_first, check_flagged, check_starts
from rlio.formats.tables.mapped_columns import (
    WAY_OF_ROWS,
    Flag,
    MappedColumns,
    as_flags,
    is_cut,
    spelled,
)
from rlio.formats.tables.own_names import OwnNames

__all__ = ["MappedEpisodes"]

logger: logging.Logger = logging.getLogger("rlio")

#: What may be meant by a flag in the middle of an episode, with ids.
_WAY_OF_FLAGS: Final = (
    "leave out episode= if the flags alone say where episodes end, and rows are in their order; if an id has "
    "several episodes, number them, such as done = log[flag].astype(int), log['part'] = "
    "done.groupby(log[id]).cumsum() - done, and name both in episode=[id, 'part']"
)


class MappedEpisodes(MappedColumns):
    """The episodes of a table; a base class, which `MappedSource` fills."""

    _id_names: tuple[str, ...]
    #: Whether ``eps_id`` numbers the episodes.
    _numbers_ids: bool
    #: Whether the last episode is known to be complete.
    _is_closed: bool
    #: First row of each episode, and the number of rows.
    _starts: list[int]

    def _find_starts(self) -> list[int]:
        """First row of each episode."""
        mapping, ids = self._map, self._ids
        stated = stated_lengths(self._table, mapping)
        #: Rows at which an episode begins, independent of the columns.
        forced = list(accumulate(stated or ()))
        forced += self._file_starts if mapping.per_file else []
        begin_rows = np.unique(np.array([0, *forced], np.int64))
        self._numbers_ids = not ids
        if stated is None and mapping.per_file and not ids:  # Its flags are those of files.
            self._take_flags_of_episodes(self._table.rows)
        elif stated is not None or self._table.of_episodes:
            self._take_flags_of_episodes(stated)
        #: Whether the last episode is known to be complete.
        self._is_closed = bool(ids or forced)
        if not (ids or self._first or self._flags_of_rows()):
            begin_rows = begin_rows[begin_rows < self._rows]
            self._note_both(begin_rows, {})
            return [int(row) for row in begin_rows]
        # A final row has no flag, unless all that belongs to a step is a row later.
        has_no_flag = mapping.final_row and not mapping.shifted
        cuts = not (ids or stated is not None or self._first or has_no_flag)
        starts, of_flags = self._scan(begin_rows, cuts=cuts)
        flagged = np.unique(np.concatenate([np.zeros(0, np.int64), *of_flags.values()]))
        if cuts and not isinstance(mapping, OwnNames):
            check_flagged(flagged, self._rows, self._flag_names())
        if self._first is not None:
            check_starts(len(starts), self._rows, spelled(self._first))
        if not self._is_closed:
            self._is_closed = bool(len(flagged)) and int(flagged[-1]) == self._rows - 1
        # No flag in the middle of an episode.
        after = np.append(starts, self._rows)[np.searchsorted(starts, flagged, side="right")]
        wrong = flagged + 1 + mapping.final_row < after
        if wrong.any():
            raise SchemaError(
                f"row {int(flagged[wrong.argmax()])} ends an episode, and more rows of it follow: expected "
                f"a flag on the last row of each; {WAY_OF_ROWS if mapping.per_row else _WAY_OF_FLAGS}; "
                f"{advice_of_flags(self._flag_names())}"
            )
        self._note_both(starts, of_flags)
        if ids and self._numbers_ids:
            names = ", ".join(self._id_names)
            self.notes.append(f"eps_id numbers the episodes in their order, not as {names} does.")
        return [int(row) for row in starts]

    def _take_flags_of_episodes(self, lengths: Sequence[int] | None) -> None:
        """Take in flags of which an array has one an episode, not one a row."""
        table = self._table
        if lengths is None:
            raise SchemaError(
                f"found one flag in {excerpt(sorted(table.of_episodes)[0])}, expected one a row: pass "
                "per_file=True if each file is an episode, or say in lengths= or ends= where episodes end"
            )
        counts = [*accumulate(lengths, initial=0)]
        # Episodes of each file, and which of all have rows.
        of_files = np.diff(np.searchsorted(counts, self._file_starts, side="left"))
        has_rows = np.array(lengths, np.int64) > 0
        for flag in self._flags:
            if flag is None or (
                flag.path[0] not in table.of_episodes
                and all(table.count(file, flag.path[0]) == rows for file, rows in enumerate(table.rows))
            ):
                continue
            found = [table.array(file, flag.path[0]) for file in range(len(table.rows))]
            if [len(one) for one in found] != of_files.tolist():
                raise SchemaError(
                    f"found {sum(map(len, found))} flags of {len(lengths)} episodes, expected one a row, or "
                    "one an episode",
                    column=flag.path[0],
                )
            flags = as_flags(np.concatenate(found), flag, fills=False)
            self._of_episodes[flag.path] = flags[has_rows]

    def _flags_of_rows(self) -> list[Flag]:
        """The flags that have a value a row."""
        return [flag for flag in self._flags if flag is not None and flag.path not in self._of_episodes]

    def _note_both(self, starts: NDArray[np.int64], of_flags: dict[Flag, NDArray[np.int64]]) -> None:
        """Say how episodes count that have the flags of both terminated and truncated ones.

        Args:
            starts: First row of each episode.
            of_flags: Flags with a value a row -> the rows where they are true.
        """
        if None in self._flags:
            return
        both = np.ones(len(starts), np.bool_)
        for flag in self._flags:
            assert flag is not None
            if flag.path in self._of_episodes:
                both &= self._of_episodes[flag.path]
            else:
                both &= np.isin(np.arange(len(starts)), np.searchsorted(starts, of_flags[flag], "right") - 1)
        if not both.any():
            return
        first, last = self._flag_names()
        found = f"{first} and {last} are both true at the end of {both.sum()} of {len(both)} episodes"
        if is_cut(self._flags[1]):
            self.notes.append(
                f"{found}, which count as truncated: TimeLimit.truncated is Gym's sign that done is no "
                "terminal state."
            )
            return
        self.notes.append(
            f"{found}, which count as terminated, as in Gymnasium. If {first} is also true at time limits, "
            "as Gym's done was, name a flag that is not."
        )
        if not isinstance(self._map, OwnNames):  # rlio's own columns are those of Gymnasium.
            logger.warning("%s: %s", self.uri, self.notes[-1])

    def _scan(
        self, begin_rows: NDArray[np.int64], *, cuts: bool
    ) -> tuple[NDArray[np.int64], dict[Flag, NDArray[np.int64]]]:
        """First rows of episodes, and rows with each flag. ``cuts``: whether a flag ends an episode."""
        flags, firsts = self._flags_of_rows(), [] if self._first is None else [self._first]
        starts = [np.zeros(0, np.int64)]
        flagged: dict[Flag, list[NDArray[np.int64]]] = {flag: [] for flag in flags}
        seen: set[tuple[Any, ...]] = set()
        before: tuple[Any, ...] = ()
        ended = True  # The row before is the last of its episode.
        for start, stop in self._stretches([*self._ids, *(flag.path for flag in (*flags, *firsts))]):
            found, marks = self._read_flags(start, stop, [*flags, *firsts], self._ids)
            ids = [self._id_column(found[path], path) for path in self._ids]
            end = np.logical_or.reduce([np.zeros(stop - start, np.bool_), *marks[: len(flags)]])
            new = np.zeros(stop - start, np.bool_)
            for values in ids:
                new[1:] |= values[1:] != values[:-1]
            low, high = np.searchsorted(begin_rows, (start, stop))
            new[begin_rows[low:high] - start] = True
            if firsts:
                check_first(marks[-1][0], new[0], start, spelled(firsts[0]))
                new |= marks[-1]
            else:
                new[0] |= before != tuple(values.item(0) for values in ids)
            if cuts:
                new[1:] |= end[:-1]
                new[0] |= ended
            if start in self._file_starts:
                if self._map.per_file and ids:
                    seen.clear()
                    self._numbers_ids = True
                if not new[0]:
                    self._refuse_boundary(start)
            begins = np.flatnonzero(new)
            for row in begins.tolist() if ids else ():
                key = tuple(values.item(row) for values in ids)
                if key in seen:
                    self._refuse_return(key, start + row)
                seen.add(key)
            starts.append(begins + start)
            for flag, mark in zip(flags, marks, strict=False):
                flagged[flag].append(np.flatnonzero(mark) + start)
            before, ended = tuple(values.item(-1) for values in ids), bool(end[-1])
        return np.concatenate(starts), {flag: np.concatenate(rows) for flag, rows in flagged.items()}

    def _flag_names(self) -> list[str]:
        return [spelled(flag) for flag in self._flags if flag is not None]

    def _refuse_boundary(self, row: int) -> None:
        """Refuse an episode that may continue in the next file, unless an option states whether it does."""
        if self._table.continues or self._map.per_file is False:
            return
        file = self._file_starts.index(row)
        raise SchemaError(
            f"file {file} begins with the id of the unfinished episode that ends the file before it: pass "
            "per_file=True if each file has its own ids, per_file=False if an episode continues in the next "
            "file",
            uri=self._table.files[file].uri,
        )

    def _refuse_return(self, key: tuple[Any, ...], row: int) -> NoReturn:
        name = ", ".join(self._id_names)
        raise SchemaError(
            f"row {row}: the episode {excerpt(key[0] if len(key) == 1 else key)} begins again after another "
            f"one: expected its rows together; sort the table by {name} and time, name further columns in "
            "episode=[...], or pass per_file=True if ids are those of one file",
            column=self._id_names[0],
        )

    def _id_column(self, values: Any, path: tuple[str, ...]) -> NDArray[Any]:
        name = ".".join(path)
        values = one_a_row(Columns.EPS_ID, values) if isinstance(values, np.ndarray) else values
        if not isinstance(values, np.ndarray) or values.ndim != 1:
            raise SchemaError("an id must be one value a row", column=name)
        is_text = values.dtype.kind in "OU"
        is_null = np.array([value in ("", None) for value in values]) if is_text else values != values
        if is_null.any():
            raise SchemaError("an id is missing in some rows", column=name)
        if values.dtype.kind == "f":
            digits = np.finfo(values.dtype).nmant + 1
            if np.abs(values).max(initial=0) >= 2.0**digits:
                raise SchemaError(
                    f"found ids of 2**{digits} or more as {values.dtype}, in which two ids may have become "
                    "one: write whole numbers below 2**63, or text with a letter",
                    column=name,
                )
            if (fractions := values[values % 1 != 0]).size:
                raise SchemaError(
                    f"found the id {fractions[0]}: texts such as 3.1 and 3.10 are one number; write whole "
                    "numbers, or text with a letter",
                    column=name,
                )
        is_whole = values.dtype.kind in "iu" and values.max(initial=0) <= np.iinfo(np.int64).max
        if not is_whole or len(self._ids) > 1:
            self._numbers_ids = True
        return values

    def _check_stored_ids(self) -> None:
        """Number the episodes of a table with `Table.lengths` whose ``eps_id`` is that of several."""
        path = self._specs.get(Columns.EPS_ID)
        if not isinstance(path, tuple):
            return
        begins, ids = np.array(self._starts[:-1]), list[Any]()
        for start, stop in self._stretches([path]):
            low, high = np.searchsorted(begins, (start, stop))
            values = self._id_column(self._read(start, stop, [path])[path], path)
            ids += values[begins[low:high] - start].tolist()
        if len(set(ids)) < len(ids):
            del self._specs[Columns.EPS_ID]
            self.notes.append("eps_id numbers the episodes in their order: several have the same stored id.")
