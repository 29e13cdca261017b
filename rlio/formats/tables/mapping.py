"""`MappedSource`: the episodes of a table, by a `rlio.Mapping` that states what its columns mean.

Row t has the observation, the action, and the reward and the flags that followed it. Rows of an episode are
adjacent. An episode ends where its id changes, where a flag is true, or with its file.

Example:
    >>> from rlio.formats.tables.table import ArrayTable
    >>> table = ArrayTable("log", {"trip": [7, 7, 9], "x": [0.0, 1.0, 5.0], "y": [0, 1, 5], "a": [1, 0, 1]})
    >>> source = MappedSource(
    ...     table, Mapping({"obs": ["x", "y"], "actions": "a"}, episode="trip", next_obs="derive")
    ... )
    >>> rows = source.load(0, None)
    >>> source.lengths, rows["new_obs"].tolist(), rows["new_obs_valid"].tolist()
    ([2, 1], [[1.0, 1.0], [0.0, 0.0]], [True, False])
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections import abc
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import concat_leaves, to_numpy, zero_leaf
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.nested import leaves, map_structure
from rlio.errors import (
    CorruptData,
    DataNotFound,
    MissingColumn,
    OptionError,
    RlioError,
    SchemaError,
    UnknownLayout,
    excerpt,
)
from rlio.formats.files.inputs import raise_at
from rlio.formats.files.step_columns import check_other_names
from rlio.formats.files.value_arrays import flags_in, one_a_row, standard_dtype
from rlio.formats.sink import Origin
from rlio.formats.tables.cuts import stated_lengths
from rlio.formats.tables.described import describe, described_lists, hint_of, kind_of
from rlio.formats.tables.doubts import (
    ENV_NAMES,
    NOT,
    STEP_NAMES,
    Followed,
    Restarts,
    advice_of_flags,
    check_env,
    check_first,
    check_flagged,
    check_followed,
    check_one_step,
    check_starts,
    mask_ends,
)
from rlio.formats.tables.episode_rows import EpisodeRows
from rlio.formats.tables.final_rows import FinalRows
from rlio.formats.tables.paths import paths_in, paths_of, resolved, walk
from rlio.formats.tables.sorted_rows import SortedRows
from rlio.formats.tables.table import Rows, Table
from rlio.mapping import DERIVE, Mapping, dotted, nested
from rlio.storage import InputFile

__all__ = ["MappedSource", "by_own_names", "own_map"]

_SCAN_ROWS: Final = 65_536
_SHOWN_CODES: Final = 50
#: A column of more values has no categories.
_MOST_CODES: Final = 4096
# Rows whose obs and new_obs are compared.
_COMPARED_ROWS: Final = 4096
_COMPARED_BYTES: Final = 16 << 20
_NUMBERS: Final = (Columns.OBS, Columns.NEXT_OBS, Columns.ACTIONS, Columns.REWARDS, Columns.T)
#: A flag that is true where a column is 0, and what may be another expression.
_NOT: Final = re.compile(r"not\s+(\S.*)")
_EXPRESSION: Final = re.compile(r"[~!=<>&|()*+-]|\b(not|and|or)\b")
_NUMBERED: Final = re.compile(r"(obs|new_obs|actions)_([0-9]+)")


#: What may be meant by a flag in the middle of an episode, with ids and with rows that are episodes.
_WAY_OF_FLAGS: Final = (
    "leave out episode= if the flags alone say where episodes end, and rows are in their order; if an id has "
    "several episodes, number them, such as done = log[flag].astype(int), log['part'] = "
    "done.groupby(log[id]).cumsum() - done, and name both in episode=[id, 'part']"
)
_WAY_OF_ROWS: Final = (
    "if arrays have the shape (steps, environments, ...), or a row has several episodes, load the file, and "
    "pass one long array a column to rlio.from_arrays, such as obs.swapaxes(0, 1).reshape(-1, *obs.shape[2:])"
)


@dataclass(frozen=True)
class _OwnNames(Mapping):
    """The mapping of a table whose columns have rlio's names: ``eps_id`` and ``new_obs`` are columns, too."""

    instead: ClassVar[abc.Mapping[str, str]] = MappingProxyType({})

    def _check_meant(self, name: str, tops: set[str]) -> None:
        """The file has these names: one that rlio does not know is a further column."""


class _Flag(NamedTuple):
    """A column of flags: its path, and whether a flag is where the column is 0."""

    path: tuple[str, ...]
    is_inverted: bool


class MappedSource:
    """The episodes of a table; an `EpisodeSource` that reads many short ones at once, and long ones in parts.

    Opening reads the columns that show where episodes end.

    Args:
        table: The table; owned by the source.
        mapping: What its columns mean.

    Raises:
        MissingColumn: The table has no such column.
        SchemaError: For example, a column is not numeric, or rows of an episode are not adjacent. The message
            shows the columns of the table.
        OptionError: Nothing shows where episodes end.
    """

    spaces: tuple[Any, Any] | None = None
    reads_parts = True
    #: See `EpisodeSource`: a format that knows the meaning of its columns states them.
    origin: Origin | None = None
    left_out: Sequence[str] = ()
    beside: Sequence[InputFile] = ()

    def __init__(self, table: Table, mapping: Mapping) -> None:
        self.uri: str = table.uri
        self._table = table
        #: Flags with one value an episode.
        self._of_episodes: dict[tuple[str, ...], NDArray[np.bool_]] = {}
        self.notes: list[str] = []
        #: Of columns of categories: the code of each.
        self._codes: dict[tuple[str, ...], dict[Any, int]] = {}
        try:
            mapping = self._map = table.arranged(mapping)
            self._id_names = tuple(mapping.episode or ())
            _settle_rows(table, mapping)
            if mapping.per_row:
                steps = EpisodeRows(table, mapping)
                self._table, self._map = table, mapping = steps, steps.mapping()
            elif (longer := FinalRows.of(table, mapping)) is not None:
                self._table, self._map = table, mapping = longer, longer.mapping(mapping)
            if mapping.sort:
                self._table = table = SortedRows(table, mapping)
                self.notes += _note_of_ties(table, mapping)
            self._file_starts = [0, *accumulate(table.rows)]
            self._rows = self._file_starts[-1]
            if not self._rows:
                raise DataNotFound("found no rows")
            columns = nested(mapping.columns)
            if mapping.next_obs is not None and mapping.next_obs != DERIVE:
                columns[Columns.NEXT_OBS] = mapping.next_obs
            self._specs = {name: self._resolved(spec, name) for name, spec in columns.items()}
            self._ids = [self._path(name, "episode") for name in self._id_names]
            self._flags = [self._flag_of(option) for option in ("terminated", "truncated")]
            self._first = self._flag_of("starts")
            self._check_options()
            self._codes = self._codes_of(mapping.codes)
            self._check_cells()
            #: First row of each episode, and the number of rows.
            self._starts = [*self._find_starts(), self._rows]
            self._check_stored_ids()
            counts = [stop - start for start, stop in pairwise(self._starts)]
            self.lengths: Sequence[int] = [count - 1 for count in counts] if mapping.final_row else counts
            table.together = frozenset(path[0] for path in self._paths())
            self.row_bytes: int = self._try()
            self._check_doubts()
            self.files: Sequence[InputFile] = table.files or (self._in_memory(),)
        except BaseException as error:
            try:
                if isinstance(error, RlioError):
                    self._explain(error)
                raise
            finally:
                table.close()

    # ---- the mapping and the table ----

    def _explain(self, error: RlioError) -> NoReturn:
        """Raise an error of the mapping with the columns of the table."""
        if isinstance(error, (CorruptData, UnknownLayout)):
            raise error
        text = str(error).rpartition(" [")[0] if error.column or error.uri else str(error)
        raise type(error)(
            f"{text}; {describe(self._table.as_stored)}{self._suggested(error)}",
            uri=error.uri or self.uri,
            record=error.record,
            column=error.column,
        ) from error

    def _suggested(self, error: RlioError) -> str:
        """The mapping that the table may need, if one of its names is wrong, to be appended to a message."""
        is_name = isinstance(error, (MissingColumn, OptionError))
        return f"; it may need {self._table.as_stored.suggested()}" if is_name else ""

    def _path(self, name: object, option: str) -> tuple[str, ...]:
        """Top-level column, and the keys below it."""
        return resolved(self._table, name, option)

    def _flag_of(self, option: str) -> _Flag | None:
        """The column of flags that an option names; ``"not x"``: the flags are where x is 0."""
        name = getattr(self._map, option)
        if not isinstance(name, str):
            return None
        negated = None if name in self._table.names else _NOT.fullmatch(name)
        text = name if negated is None else negated[1]
        try:
            return _Flag(self._path(text, option), is_inverted=negated is not None)
        except MissingColumn as error:
            if _EXPRESSION.search(text) is None:
                raise
            raise MissingColumn(
                f"{str(error).rpartition(' [')[0]}; besides a column, 'not COLUMN' is the only expression: "
                "compute any other, and add it to the table as a column",
                column=name,
            ) from error

    def _resolved(self, spec: Any, name: str) -> Any:
        """The spec with paths for names."""
        if isinstance(spec, abc.Mapping) and spec:
            return {key: self._resolved(part, f"{name}.{key}") for key, part in spec.items()}
        if isinstance(spec, Sequence) and not isinstance(spec, str) and spec:
            return [self._path(part, name) for part in spec]
        return self._path(spec, name)

    def _check_options(self) -> None:
        mapping, table = self._map, self._table
        is_known = (
            self._ids or mapping.per_file or self._first or mapping.lengths or mapping.ends or mapping.per_row
        )
        if not is_known and table.lengths is None:
            if not any(self._flags):
                raise OptionError(
                    "nothing shows where an episode ends: pass episode=, the column of its id; terminated= "
                    "or truncated=, the flag of its last row; starts=, the flag of its first row; lengths= "
                    "or ends=, an array of one number an episode; or per_file=True, if each file is an "
                    "episode"
                )
            if mapping.final_row and not mapping.shifted:
                raise OptionError(
                    "final_row=True needs episode=, starts=, lengths=, ends= or per_file=True: no flag marks "
                    "that row"
                )
        if self._ids and mapping.terminated is None and mapping.truncated is None:
            self.notes.append("No column states how episodes end: all ends are truncations.")

    def _check_cells(self) -> None:
        """Refuse rows of lists of different lengths, which are episodes, before their flags are looked at."""
        first = Rows(0, 0, min(3, self._table.rows[0]))
        try:  # All at once: a block of text is parsed as a whole.
            self._table.read(first, {path[0] for path in self._paths()})
        except SchemaError:
            for name, spec in self._specs.items():
                for path in paths_of(spec):
                    if shown := described_lists(self._table, first, path[0]):
                        raise SchemaError(
                            f"found {shown} for {name}, expected one step a row: pass per_row=True if each "
                            "row is an episode",
                            column=path[0],
                        ) from None

    def _paths(self) -> set[tuple[str, ...]]:
        """All that is read."""
        mapped = {path for spec in self._specs.values() for path in paths_of(spec)}
        flags = {flag.path for flag in (*self._flags, self._first) if flag is not None}
        return mapped | {*self._ids, *(flags - self._of_episodes.keys())}

    def _try(self) -> int:
        """Read the first rows, so that a wrong mapping is found at once; gives the bytes of a row."""
        rows = min(3, self._rows)
        starts = np.array(self._starts)
        first, last = (np.isin(np.arange(rows), ends) for ends in (starts[:-1], starts[1:] - 1))
        columns = {name: self._built(name, 0, rows, self._keep(name, first, last)) for name in self._specs}
        now, after = (
            {path: leaf.shape[1:] for path, leaf in leaves(columns[name])} if name in columns else None
            for name in (Columns.OBS, Columns.NEXT_OBS)
        )
        if now is not None and after is not None and now != after:
            raise SchemaError(
                f"found rows of the shapes {excerpt(after)}, expected {excerpt(now)} as in obs",
                column=Columns.NEXT_OBS,
            )
        check_one_step(columns, has_flags=any(self._flags))
        size = sum(to_numpy(leaf).nbytes for column in columns.values() for _, leaf in leaves(column))
        return max(1, size // max(1, rows))

    def _read(
        self,
        start: int,
        stop: int,
        paths: Collection[tuple[str, ...]],
        *,
        keep: NDArray[np.bool_] | None = None,
        fills: bool = False,
    ) -> dict[tuple[str, ...], Any]:
        """Columns of a stretch of rows, over all files. None: no row has a value."""
        names = sorted({path[0] for path in paths})
        parts: list[Any] = []
        file = max(0, min(bisect_right(self._file_starts, start) - 1, len(self._table.rows) - 1))
        while file < len(self._table.rows) and (self._file_starts[file] < stop or not parts):
            base = self._file_starts[file]
            low, high = max(start - base, 0), min(stop - base, self._table.rows[file])
            if low < high or not parts:
                try:
                    at = base + low - start
                    mask = None if keep is None else keep[at : at + high - low]
                    parts.append(self._table.read(Rows(file, low, max(low, high), mask, fills), names))
                except RlioError as error:
                    raise_at(error, uri=self._table.files[file].uri if self._table.files else self.uri)
            file += 1
        found = {path: _joined([walk(part[path[0]], path) for part in parts], path) for path in paths}
        for path in found.keys() & self._codes.keys():
            found[path] = _coded(found[path], self._codes[path], path, fills=fills)
        return found

    def _codes_of(self, given: Any) -> dict[tuple[str, ...], dict[Any, int]]:
        """The categories of columns, with their codes."""
        found = {self._path(name, "codes"): values for name, values in given.items()}
        if unused := [".".join(path) for path in found if path not in self._paths()]:
            raise OptionError(
                f"codes={excerpt(unused)}: expected columns of the table that the mapping names, such as "
                "those in columns="
            )
        codes = {}
        for path, values in found.items():
            listed = self._categories(path) if values is None else values
            codes[path] = {value: code for code, value in enumerate(listed)}
            shown = ", ".join(f"{code} = {value!r}" for code, value in enumerate(listed[:_SHOWN_CODES]))
            more = f", and {len(listed) - _SHOWN_CODES} more" if len(listed) > _SHOWN_CODES else ""
            self.notes.append(f"Codes of {'.'.join(path)}: {shown}{more}.")
        return codes

    def _categories(self, path: tuple[str, ...]) -> list[Any]:
        """The values of a column of categories, sorted."""
        name, values = ".".join(path), set[Any]()
        for start, stop in _stretches(self._file_starts):
            column = _as_texts(self._read(start, stop, [path], fills=self._map.final_row)[path])
            if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "OUiub":
                raise SchemaError(
                    f"codes: found {kind_of(column)}, expected texts or whole numbers", column=name
                )
            values.update(column.tolist())
            if len(values) > _MOST_CODES:
                raise SchemaError(f"codes: found more than {_MOST_CODES} categories", column=name)
        values -= {None, ""}  # A row that needs a value is refused when it is read.
        if len({type(value) for value in values} - {bool}) > 1 or any(
            not isinstance(v, str | int) for v in values
        ):
            raise SchemaError(
                "codes: found values of several types, expected texts or whole numbers", column=name
            )
        return sorted(values)

    def _keep(self, name: str, first: NDArray[np.bool_], last: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Which rows have the values of a column; None: all. ``first``, ``last``: those rows of episodes.

        A final row has an observation only::

            row                   0    1    2 = last
            obs                   o0   o1   o2
            actions               a0   a1   -          keep: not the last
            actions, if shifted   -    a0   a1         keep: not the first
        """
        if not self._map.final_row or name == Columns.OBS:
            return None
        return ~first if name in self._map.shifted else ~last

    def _built(self, name: str, start: int, stop: int, keep: NDArray[np.bool_] | None = None) -> Any:
        """A column of rlio. ``keep``: which of the rows; None: all."""
        spec = self._specs[name]
        found = self._read(start, stop, list(paths_of(spec)), keep=keep)
        return self._made(spec, found, name)

    def _made(self, spec: Any, found: abc.Mapping[tuple[str, ...], Any], name: str) -> Any:
        top = name.partition(".")[0]
        if isinstance(spec, dict):
            return {key: self._made(part, found, f"{name}.{key}") for key, part in spec.items()}
        if isinstance(spec, list):
            parts = [_numbers(found[path], path, top, is_flat=True) for path in spec]
            return self._cast(np.stack(parts, axis=1), name)
        value = found[spec]
        if value is None and top != Columns.INFOS:
            raise SchemaError("no row has a value", column=".".join(spec))
        if top in _NUMBERS:
            value = map_structure(lambda leaf: _numbers(leaf, spec, top), value)
        return map_structure(lambda leaf: self._cast(leaf, name), value)

    def _cast(self, array: NDArray[Any], name: str) -> NDArray[Any]:
        """Return the array in the requested dtype, as a copy."""
        own = name.replace(Columns.NEXT_OBS, Columns.OBS, 1) if name.startswith(Columns.NEXT_OBS) else name
        dtypes = {dotted(key): dtype for key, dtype in (self._map.dtypes or {}).items()}
        wanted = next((dtypes[key] for key in (name, own, own.partition(".")[0]) if key in dtypes), None)
        array = one_a_row(name, array)
        if wanted is None:
            try:
                return standard_dtype(name, array.astype(array.dtype.newbyteorder("="), order="C"))
            except SchemaError as error:
                raise SchemaError(str(error), column=name) from error
        try:
            kind = np.dtype(wanted)
            with np.errstate(all="ignore"):
                cast = array.astype(kind)
        except (TypeError, ValueError) as error:
            raise SchemaError(f"dtypes: {excerpt(wanted)}: {excerpt(str(error))}", column=name) from error
        is_whole = kind.kind in "biu" or array.dtype.kind in "biu"
        with np.errstate(all="ignore"):
            is_kept = cast.astype(array.dtype) == array if is_whole else np.isinf(cast) == np.isinf(array)
        if not np.all(is_kept):
            raise SchemaError(f"dtypes: {kind} does not hold all values of the column", column=name)
        return cast

    # ---- the episodes ----

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
            return [int(row) for row in begin_rows if row < self._rows]
        # A final row has no flag, unless all that belongs to a step is a row later.
        has_no_flag = mapping.final_row and not mapping.shifted
        cuts = not (ids or stated is not None or self._first or has_no_flag)
        starts, flagged = self._scan(begin_rows, cuts=cuts)
        if cuts and not isinstance(mapping, _OwnNames):
            check_flagged(flagged, self._rows, self._flag_names())
        if self._first is not None:
            check_starts(len(starts), self._rows, _spelled(self._first))
        if not self._is_closed:
            self._is_closed = bool(len(flagged)) and int(flagged[-1]) == self._rows - 1
        # No flag in the middle of an episode.
        after = np.append(starts, self._rows)[np.searchsorted(starts, flagged, side="right")]
        wrong = flagged + 1 + mapping.final_row < after
        if wrong.any():
            raise SchemaError(
                f"row {int(flagged[wrong.argmax()])} ends an episode, and more rows of it follow: expected "
                f"a flag on the last row of each; {_WAY_OF_ROWS if mapping.per_row else _WAY_OF_FLAGS}; "
                f"{advice_of_flags(self._flag_names())}"
            )
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
            flags = _flag(np.concatenate(found), flag, fills=False)
            self._of_episodes[flag.path] = flags[has_rows]

    def _flags_of_rows(self) -> list[_Flag]:
        """The flags that have a value a row."""
        return [flag for flag in self._flags if flag is not None and flag.path not in self._of_episodes]

    def _scan(
        self, begin_rows: NDArray[np.int64], *, cuts: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First rows of episodes, and rows with a flag. ``cuts``: whether a flag ends an episode."""
        flags, firsts = self._flags_of_rows(), [] if self._first is None else [self._first]
        starts, flagged = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        seen: set[tuple[Any, ...]] = set()
        before: tuple[Any, ...] = ()
        ended = True  # The row before is the last of its episode.
        both = 0
        for start, stop in _stretches(self._file_starts):
            found, marks = self._read_flags(start, stop, [*flags, *firsts], self._ids)
            ids = [self._id_column(found[path], path) for path in self._ids]
            end = np.logical_or.reduce([np.zeros(stop - start, np.bool_), *marks[: len(flags)]])
            both += int((marks[0] & marks[1]).sum()) if len(flags) == 2 else 0
            new = np.zeros(stop - start, np.bool_)
            for values in ids:
                new[1:] |= values[1:] != values[:-1]
            low, high = np.searchsorted(begin_rows, (start, stop))
            new[begin_rows[low:high] - start] = True
            if firsts:
                check_first(marks[-1][0], new[0], start, _spelled(firsts[0]))
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
            flagged.append(np.flatnonzero(end) + start)
            before, ended = tuple(values.item(-1) for values in ids), bool(end[-1])
        if both:
            self.notes.append(
                f"{both} rows are terminated and truncated: they count as terminal states. If the column in "
                "terminated= is also set at time limits, as Gym's done was, name one without them."
            )
        return np.concatenate(starts), np.concatenate(flagged)

    def _read_flags(
        self, start: int, stop: int, flags: Sequence[_Flag], others: Sequence[tuple[str, ...]] = ()
    ) -> tuple[dict[tuple[str, ...], Any], list[NDArray[np.bool_]]]:
        """Other columns of a stretch of rows, and flags."""
        fills = self._map.final_row
        # A mask that is missing in a final row must not become 0, which is an end.
        strict = [flag.path for flag in flags if flag.is_inverted]
        loose = [*others, *(flag.path for flag in flags if not flag.is_inverted)]
        found = self._read(start, stop, loose, fills=fills) if loose else {}
        if strict:
            found |= self._read(start, stop, strict)
        return found, [_flag(found[flag.path], flag, fills=fills) for flag in flags]

    def _flag_names(self) -> list[str]:
        return [_spelled(flag) for flag in self._flags if flag is not None]

    def _check_doubts(self) -> None:
        """Refuse what says that the mapping means something else than the table."""
        if not isinstance(self._map, _OwnNames) and Columns.NEXT_OBS in self._specs:
            self._check_next_obs()
        if not isinstance(self._map, _OwnNames):
            for name in self._table.names:
                if name.lower() in ENV_NAMES and (name,) not in self._ids:
                    self._check_env(name)
        for path, is_needed in self._step_paths():
            self._check_restarts(path, is_needed=is_needed)

    def _check_env(self, name: str) -> None:
        before, starts = None, np.array(self._starts, np.int64)
        for start, stop in _stretches(self._file_starts):
            try:
                values = self._read(start, stop, [(name,)])[name,]
            except RlioError:
                return  # A column that nobody asked for may be anything.
            if not isinstance(values, np.ndarray) or values.ndim != 1:
                return
            check_env(name, values, before, np.isin(np.arange(start, stop), starts), start)
            before = values[-1]

    def _check_next_obs(self) -> None:
        """Compare the obs of some rows, around the first end, with the new_obs of the rows before."""
        ends = np.array(self._starts[1:], np.int64) - 1
        rows = max(4, min(_COMPARED_ROWS, _COMPARED_BYTES // self.row_bytes))
        file = bisect_right(self._file_starts, int(ends[0])) - 1
        start = max(self._file_starts[file], int(ends[0]) - rows // 2)
        stop = min(start + rows, self._file_starts[file + 1])
        if stop - start < 2 or Columns.OBS not in self._specs:
            return
        episodes = range(int(np.searchsorted(ends, stop - 1)) + 1)
        flags = self._loaded(episodes, start, stop, frozenset((Columns.TERMINATEDS,)))
        compared = Followed(
            self._built(Columns.OBS, start, stop),
            self._built(Columns.NEXT_OBS, start, stop),
            ends=np.isin(np.arange(start, stop), ends),
            terminated=flags[Columns.TERMINATEDS],
            row=start,
        )
        names = self._flag_names() if self._first is None else [_spelled(self._first)]
        cuts = not self._ids and self._table.lengths is None and not self._map.lengths
        if found := check_followed(compared, names, cuts=cuts):
            self.notes.append(found)

    def _step_paths(self) -> Iterator[tuple[tuple[str, ...], bool]]:
        """Columns that count steps, and whether they are mapped."""
        mapped = {path: name for name, spec in self._specs.items() for path in paths_of(spec)}
        for path, name in mapped.items():
            if name == Columns.T or {name.lower(), path[-1].lower()} <= STEP_NAMES:
                yield path, True
        for name in self._table.names:
            if name.lower() in STEP_NAMES and (name,) not in self._paths():
                yield (name,), False

    def _check_restarts(self, path: tuple[str, ...], *, is_needed: bool) -> None:
        final = self._map.final_row
        in_order = self._map.next_obs == DERIVE
        starts = np.array(self._starts, np.int64)
        restarts = Restarts(".".join(path), starts, in_order=in_order, skips_last=final)
        for start, stop in _stretches(self._file_starts):
            try:
                values = self._read(start, stop, [path], fills=final)[path]
            except RlioError:
                if is_needed:
                    raise
                return  # A column that nobody asked for may be anything.
            if isinstance(values, np.ndarray):
                values = one_a_row(Columns.T, values)
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iuf":
                return
            restarts.look(start, values)
        restarts.finish()

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
        for start, stop in _stretches(self._file_starts):
            low, high = np.searchsorted(begins, (start, stop))
            values = self._id_column(self._read(start, stop, [path])[path], path)
            ids += values[begins[low:high] - start].tolist()
        if len(set(ids)) < len(ids):
            del self._specs[Columns.EPS_ID]
            self.notes.append("eps_id numbers the episodes in their order: several have the same stored id.")

    def _in_memory(self) -> InputFile:
        """Stands for a table in memory: its checksum is part of a reader's state."""
        crc, paths = 0, sorted(self._paths())
        for start, stop in _stretches(self._file_starts):
            for _, column in self._read(start, stop, paths, fills=True).items():
                for _, leaf in leaves(column) if column is not None else ():
                    is_plain = leaf.dtype != object
                    data = np.ascontiguousarray(leaf).tobytes() if is_plain else repr(leaf.tolist()).encode()
                    crc = zlib.crc32(data, crc)
        mapping = self._map
        if mapping.lengths or mapping.ends or mapping.valid:  # Arrays beside the rows.
            for beside in (np.array(self._starts, np.int64), *self._of_episodes.values()):
                crc = zlib.crc32(beside.tobytes(), crc)
        uri = f"{self.uri} of {self._rows} rows with the checksum {crc:08x}"
        return InputFile(None, "", uri, self._rows * self.row_bytes)

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode; see `EpisodeSource`."""
        return self.load_run(episode, episode + 1, columns)

    def load_run(self, first: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read several episodes; see `RunSource`."""
        return self._loaded(range(first, stop), self._starts[first], self._starts[stop], columns)

    def load_part(self, episode: int, start: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read some steps of an episode; see `PartSource`."""
        row, steps = self._starts[episode] + start, stop - start
        # The row after the last one has the observation that follows it.
        end = min(row + steps + (self._map.next_obs == DERIVE), self._starts[episode + 1])
        found: SampleBatch = self._loaded(range(episode, episode + 1), row, end, columns)[:steps]
        return found

    def _loaded(self, episodes: range, start: int, end: int, columns: frozenset[str] | None) -> SampleBatch:
        """Rows of some episodes, or of a part of one, as the table has them, final rows included."""
        bounds = np.array(self._starts[episodes.start : episodes.stop + 1], np.int64)
        cut = bounds.clip(start, end)
        is_whole = (bounds[1:] <= end) & (np.diff(cut) > 0)
        mapping = self._map
        last = np.zeros(end - start, np.bool_)
        last[bounds[1:][is_whole] - start - 1] = True
        first = np.zeros(end - start, np.bool_)
        first[cut[:-1][np.diff(cut) > 0] - start] = True
        keep = ~last if mapping.final_row else None

        def is_wanted(*names: str) -> bool:
            return columns is None or not columns.isdisjoint(names)

        found: dict[str, Any] = {}
        derives = mapping.next_obs == DERIVE
        for name in self._specs:
            also = (Columns.NEXT_OBS, Columns.NEXT_OBS_VALID) if name == Columns.OBS and derives else ()
            if is_wanted(name, *also):
                found[name] = self._built(name, start, end, self._keep(name, first, last))
                if name in mapping.shifted and not is_whole.all():  # A part; its last row is cut off.
                    found[name] = map_structure(lambda leaf: np.concatenate([leaf, leaf[-1:]]), found[name])
        if derives and is_wanted(Columns.NEXT_OBS, Columns.NEXT_OBS_VALID):
            found[Columns.NEXT_OBS] = map_structure(lambda leaf: _shifted(leaf, last), found[Columns.OBS])
            if not mapping.final_row:
                found[Columns.NEXT_OBS_VALID] = ~last
        if keep is not None:
            for name in found.keys() & {Columns.OBS, Columns.NEXT_OBS}:
                found[name] = map_structure(lambda leaf: leaf[keep], found[name])
        is_complete = self._is_closed or episodes.stop < len(self.lengths)
        found |= self._ends_of(episodes, start, end, last, is_whole, is_complete=is_complete)
        steps = np.diff(cut) - is_whole.astype(np.int64) * mapping.final_row
        starts = np.cumsum(steps) - steps
        if not self._numbers_ids:
            values = one_a_row(Columns.EPS_ID, self._read(start, end, self._ids, keep=keep)[self._ids[0]])
            found[Columns.EPS_ID] = values.astype(np.int64) if values.dtype.kind == "u" else values
        elif Columns.EPS_ID not in self._specs:
            found[Columns.EPS_ID] = np.repeat(np.array(episodes), steps)
        if Columns.T not in self._specs:
            found[Columns.T] = np.arange(steps.sum()) - np.repeat(starts + bounds[:-1] - cut[:-1], steps)
        elif derives:
            self._check_steps(start, self._built(Columns.T, start, end, keep), starts)
        return SampleBatch({name: column for name, column in found.items() if column is not None})

    def _check_steps(self, row: int, t: NDArray[Any], starts: NDArray[np.int64]) -> None:
        """Refuse a step that is not the next one of the row before: its observation is not the next one."""
        wrong = np.diff(t, prepend=t[:1]) != 1
        wrong[starts[starts < len(t)]] = False
        if wrong.any():
            at = int(wrong.argmax())
            raise SchemaError(
                f"found the step {t[at]} after {t[at - 1]} in the episodes from row {row}: expected the "
                "next one, to derive new_obs; sort the table, or name the column of the next observation in "
                "next_obs=",
                column=Columns.T,
            )

    def _ends_of(
        self,
        episodes: range,
        start: int,
        end: int,
        last: NDArray[np.bool_],
        is_whole: NDArray[np.bool_],
        *,
        is_complete: bool,
    ) -> dict[str, NDArray[np.bool_]]:
        """The flags of rows. ``last`` marks the last ones of those ``episodes`` that are ``is_whole``."""
        found = []
        for option, flag in zip((self._map.terminated, self._map.truncated), self._flags, strict=True):
            flags = last.copy() if option is True else np.zeros(len(last), np.bool_)
            if flag is not None and flag.path in self._of_episodes:
                flags[last] = self._of_episodes[flag.path][episodes.start : episodes.stop][is_whole]
            elif flag is not None:
                flags = self._read_flags(start, end, [flag])[1][0]
            found.append(flags)
        ends = last.copy()
        if not is_complete:
            ends[-1:] = False
        if self._map.final_row:  # Its flags, if any, are those of the last step.
            for flags in found:
                flags[:-1] |= flags[1:] & last[1:]
            ends = np.append(last[1:], np.zeros(min(1, len(last)), np.bool_))
            found, ends = [flags[~last] for flags in found], ends[~last]
        terminated, truncated = found
        if self._map.truncated is None or self._map.truncated is True:
            truncated = ends & ~terminated
        return {Columns.TERMINATEDS: terminated, Columns.TRUNCATEDS: truncated}

    def close(self) -> None:
        """Close all files."""
        self._table.close()


def _settle_rows(table: Table, mapping: Mapping) -> None:
    """State the rows that most mapped columns have: arrays with a value an episode may be more than those."""
    names = {path[0] for top in nested(mapping.columns) for path in paths_in(table, mapping.columns, of=top)}
    rows = []
    for file in range(len(table.rows)):
        counts = [table.count(file, name) for name in names]
        rows.append(max(counts, key=lambda count: (counts.count(count), count)))
    table.rows = rows


def _note_of_ties(table: SortedRows, mapping: Mapping) -> list[str]:
    if not table.ties:
        return []
    names = ", ".join(mapping.sort)
    return [
        f"{table.ties} rows have the same {names} as another row of their episode: they keep the order of "
        "the table. A further column in sort= would part them."
    ]


def _stretches(starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of rows, none over two files."""
    for base, end in pairwise(starts):
        for start in range(base, end, _SCAN_ROWS):
            yield start, min(start + _SCAN_ROWS, end)


def _joined(parts: list[Any], path: tuple[str, ...]) -> Any:
    """The column of a stretch over several files."""
    parts = [part for part in parts if part is not None and len(leaves(part)[0][1])] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    try:
        return map_structure(lambda *each: concat_leaves(each), *parts)
    except SchemaError as error:
        raise SchemaError(f"the files differ: {error}", column=".".join(path)) from error


def _numbers(value: Any, path: tuple[str, ...], top: str, *, is_flat: bool = False) -> NDArray[Any]:
    name = ".".join(path)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise SchemaError(f"{top} needs numbers, found {kind_of(value)}{hint_of(value, name)}", column=name)
    if is_flat and value.size != len(value):
        raise SchemaError(f"columns side by side have one number a row, found {value.shape[1:]}", column=name)
    return value.reshape(len(value)) if is_flat else value


def _as_texts(values: Any) -> Any:
    """Fixed bytes, as NumPy and HDF5 have texts, as texts."""
    is_bytes = isinstance(values, np.ndarray) and values.dtype.kind == "S"
    return np.char.decode(values, "utf-8") if is_bytes else values


def _coded(
    values: Any, codes: abc.Mapping[Any, int], path: tuple[str, ...], *, fills: bool
) -> NDArray[np.int64]:
    """The codes of a column of categories."""
    name = ".".join(path)
    values = _as_texts(values)
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise SchemaError(f"codes: found {kind_of(values)}, expected a category a row", column=name)
    listed = values.tolist()
    found = [codes.get(value) for value in listed]
    if fills:  # A final row has no category.
        found = [0 if code is None and listed[row] in ("", None) else code for row, code in enumerate(found)]
    if None in found:
        raise SchemaError(
            f"codes: found {excerpt(listed[found.index(None)])}, expected one of {excerpt([*codes], 200)}",
            column=name,
        )
    return np.array(found, np.int64)


def _spelled(flag: _Flag) -> str:
    """The flag as a mapping names it."""
    return NOT * flag.is_inverted + ".".join(flag.path)


def _flag(value: Any, flag: _Flag, *, fills: bool) -> NDArray[np.bool_]:
    name = ".".join(flag.path)
    if not isinstance(value, np.ndarray):
        raise SchemaError(f"a flag is one value a row, found {kind_of(value)}", column=name)
    value = one_a_row(Columns.TERMINATEDS, value)
    if value.ndim > 1:
        raise SchemaError(
            f"a flag is one value a row, found rows of the shape {value.shape[1:]}; {_WAY_OF_ROWS}",
            column=name,
        )
    if flag.is_inverted:
        return mask_ends(name, value, fills=fills)
    if fills and value.dtype.kind == "f":  # A final row has no flag.
        value = np.nan_to_num(value, nan=0.0)
    elif fills and value.dtype.kind in "OU":
        value = np.array([one if one not in ("", None) else False for one in value.tolist()], object)
    return np.array(flags_in(name, value), np.bool_)


def _shifted(leaf: Any, last: NDArray[np.bool_]) -> Any:
    """The row after each, and zeros after the last of an episode."""
    found = np.concatenate([leaf[1:], zero_leaf(leaf, min(1, len(leaf)))])
    found[last] = 0
    return found


# ---- tables whose columns have rlio's names ----


def by_own_names(table: Table) -> MappedSource:
    """The episodes of a table whose columns have rlio's names, see `own_map`."""
    return MappedSource(table, own_map(table))


def own_map(table: Table) -> Mapping:
    """The mapping of a table whose columns have rlio's names.

    ``obs_0``, ``obs_1``, ... are one column, and ``obs/position`` is a part of one. The table needs obs,
    actions and rewards (none if rlio wrote it: with new_obs_valid), and eps_id, terminateds, truncateds, or
    the lengths of its episodes.

    Raises:
        UnknownLayout: The table has other columns; the message shows them.
    """
    try:
        columns = _own_columns(table)
        flags = [columns.pop(name, None) for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS)]
        ids = [columns.pop(Columns.EPS_ID)] if table.lengths is None and Columns.EPS_ID in columns else []
        return _OwnNames(columns, episode=ids, terminated=flags[0], truncated=flags[1])
    except RlioError as error:
        found, shown, way = str(error).partition(":")[0], describe(table), table.suggested()
        table.close()
        raise UnknownLayout(f"{found}; say what the columns mean: {way}; {shown}", uri=table.uri) from error


def _own_columns(table: Table) -> dict[str, Any]:
    if table.uneven:
        raise SchemaError(f"only some of the files have the columns {excerpt(sorted(table.uneven))}")
    stacks: dict[str, dict[int, str]] = {}
    columns: dict[str, Any] = {}
    for name in table.names:
        if match := _NUMBERED.fullmatch(name):
            stack = stacks.setdefault(match[1], {})
            if int(match[2]) in stack:
                raise SchemaError(f"{stack[int(match[2])]} and {name} have the same number")
            stack[int(match[2])] = name
            continue
        *parents, last = name.split("/")
        inner = columns
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise SchemaError(f"the column {excerpt(name)} is a part of another column")
        if last in inner:
            raise SchemaError(f"the column {excerpt(name)} is also the parent of other columns")
        inner[last] = name
    for name, parts in stacks.items():
        if name in columns or sorted(parts) != list(range(len(parts))):
            raise SchemaError(f"{name} is not numbered from 0, each number once: {excerpt(sorted(parts))}")
        columns[name] = [parts[number] for number in range(len(parts))]
    check_other_names(columns)
    if refused := sorted(name for name in columns if name == Columns.DONES or is_per_sequence(name)):
        raise SchemaError(f"{excerpt(refused)} are no columns of steps")
    # A conversion by rlio writes data without rewards; of other tables, they may have another name.
    needed = [Columns.REWARDS] * (Columns.NEXT_OBS_VALID not in columns)
    missing = [name for name in (Columns.OBS, Columns.ACTIONS, *needed) if name not in columns]
    if missing:
        raise SchemaError(f"found no column {missing[0]}")
    ends = (Columns.EPS_ID, Columns.TERMINATEDS, Columns.TRUNCATEDS)
    if table.lengths is None and not any(isinstance(columns.get(name), str) for name in ends):
        raise SchemaError(f"found none of {', '.join(ends)}, which say where an episode ends")
    return columns
