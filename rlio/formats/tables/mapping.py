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

import logging
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import to_numpy, zero_leaf
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves, map_structure
from rlio.batch.ragged import Ragged, item_type
from rlio.errors import (
    CorruptData,
    DataNotFound,
    MissingColumn,
    OptionError,
    RlioError,
    SchemaError,
    StoreError,
    UnknownLayout,
    excerpt,
)
from rlio.formats.files.inputs import Failures
from rlio.formats.files.value_arrays import flags_in, one_a_row
from rlio.formats.sink import Origin
from rlio.formats.tables.described import describe, described_lists
from rlio.formats.tables.doubts import (
    EDGE_NAMES,
    ENV_NAMES,
    STEP_NAMES,
    TIME_NAMES,
    Followed,
    Restarts,
    break_in,
    check_cut,
    check_edges,
    check_env,
    check_followed,
    check_missing,
    check_one_step,
    check_times,
    cut_paths,
)
from rlio.formats.tables.episode_rows import EpisodeRows
from rlio.formats.tables.final_rows import FinalRows
from rlio.formats.tables.mapped_columns import Flag, is_cut, spelled
from rlio.formats.tables.mapped_episodes import MappedEpisodes
from rlio.formats.tables.own_names import OwnNames, own_map
from rlio.formats.tables.paths import paths_in, paths_of, resolved
from rlio.formats.tables.sorted_rows import SortedRows
from rlio.formats.tables.table import Rows, Table
from rlio.mapping import DERIVE, Mapping, nested
from rlio.storage import InputFile, InputFiles, Span

__all__ = ["MappedSource", "by_own_names"]

logger: logging.Logger = logging.getLogger("rlio")

# Rows whose obs and new_obs are compared.
_COMPARED_ROWS: Final = 4096
_COMPARED_BYTES: Final = 16 << 20


class MappedSource(MappedEpisodes):
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
    #: The files that were left out because they are damaged; None: they raise.
    failures: Failures | None = None

    def __init__(self, table: Table, mapping: Mapping) -> None:
        self.uri: str = table.uri
        self.notes: list[str] = []
        self._table, self._of_episodes, self._codes = table, {}, {}
        try:
            mapping = self._map = table.arranged(mapping)
            _state_ragged(table, mapping)
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
        if isinstance(error, (CorruptData, UnknownLayout, StoreError)):
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
            self.notes.append(
                "The mapping names no column that states how episodes end: all ends are truncations."
            )

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
                            f"row is an episode, or ragged={excerpt(path[0])} if each step has such a list",
                            column=path[0],
                        ) from None

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

    # ---- the episodes ----

    def _check_doubts(self) -> None:
        """Refuse what says that the mapping means something else than the table."""
        if not isinstance(self._map, OwnNames) and Columns.NEXT_OBS in self._specs:
            self._check_next_obs()
        if not isinstance(self._map, OwnNames):
            for name in self._table.names:
                if name.lower() in ENV_NAMES and (name,) not in self._ids:
                    self._check_env(name)
            if self._map.lengths is None and self._map.ends is None and self._table.lengths is None:
                for name in self._table.names:
                    if name.lower() in EDGE_NAMES and (name,) not in self._paths():
                        self._check_edges(name)
            if self._map.terminated:
                for path in sorted({*cut_paths(self._table.names)} - self._paths()):
                    self._check_cut(path)
            if not (self._map.final_row or self._map.shifted):
                self._check_missing()
            if not self._map.sort:
                for name in self._table.names:
                    if name.lower() in TIME_NAMES and (name,) not in self._paths():
                        self._check_times(name)
        for path, is_needed in self._step_paths():
            self._check_restarts(path, is_needed=is_needed)

    def _looked(
        self, path: tuple[str, ...], *, fills: bool = False, is_needed: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """The first row and the values of each stretch of a column, as far as it can be read.

        A column that the mapping does not name may hold anything; one that ``is_needed`` must be readable.
        """
        for start, stop in self._stretches([path]):
            try:
                values = self._read(start, stop, [path], fills=fills)[path]
            except RlioError as error:
                if is_needed or isinstance(error, StoreError):
                    raise
                return
            yield start, values

    def _check_edges(self, name: str) -> None:
        """Refuse a flag of first or last rows that is not named, and would cut an episode.

        One that is true in last rows only, and may say that they are terminal, is named in a warning.
        """
        mapping, field = self._map, EDGE_NAMES[name.lower()]
        may_end, count = field == "terminated" and mapping.terminated is None, 0
        edges = np.array(self._starts, np.int64)
        if field != "starts":  # A final row may have the flag, or the row before it.
            edges = np.concatenate([edges - 1 - before for before in range(1 + mapping.final_row)])
            field = "truncated" if mapping.terminated else field
        way = (
            "name the columns in episode= that tell the episodes of one id apart"
            if self._ids
            else f"pass {field}={excerpt(name)}"
        )
        for start, values in self._looked((name,), fills=mapping.final_row):
            try:
                flagged = flags_in(name, values)
            except RlioError:
                return  # No flags.
            check_edges(name, flagged, np.isin(start + np.arange(len(flagged)), edges), start, way)
            count += int(np.count_nonzero(flagged))
        if count and may_end:
            note = (
                f"{excerpt(name)}, which the mapping does not name, is true in the last rows of {count} "
                "episodes, none of which counts as terminated: if it marks terminal states, pass "
                f"terminated={excerpt(name)}"
            )
            self.notes.append(f"{note}.")
            logger.warning("%s: %s", self.uri, note)

    def _check_cut(self, path: tuple[str, ...]) -> None:
        """Refuse a flag of time limits that is not named, in an episode that is to be terminated."""
        ended, cut = self._flags
        for start, stop in self._stretches([path, *(flag.path for flag in (ended, cut) if flag is not None)]):
            try:
                flags = self._read_cuts(start, stop, Flag(path, False))
            except StoreError:
                raise
            except RlioError:
                return  # A column that the mapping does not name may hold anything.
            rows = start + np.flatnonzero(flags)
            if not len(rows):
                continue
            if ended is not None:
                rows = rows[self._are_in_flagged(rows, ended, start, stop)]
            if is_cut(cut):  # Such episodes are truncated.
                assert cut is not None
                rows = rows[~self._are_in_flagged(rows, cut, start, stop)]
            check_cut(".".join(path), rows, str(self._map.terminated))

    def _are_in_flagged(
        self, rows: NDArray[np.int64], flag: Flag, start: int, stop: int
    ) -> NDArray[np.bool_]:
        """Which rows of a stretch belong to an episode that has a flag there."""
        after = np.array(self._starts[1:], np.int64)
        episodes = np.searchsorted(after, rows, side="right")
        if flag.path in self._of_episodes:
            return self._of_episodes[flag.path][episodes]
        flagged = start + np.flatnonzero(self._read_flags(start, stop, [flag])[1][0])
        return np.isin(episodes, np.searchsorted(after, flagged, side="right"))

    def _check_missing(self) -> None:
        """Refuse actions that some rows around the first end show to be missing at an edge of episodes."""
        edges = np.array(self._starts, np.int64)
        rows = max(4, min(_COMPARED_ROWS, _COMPARED_BYTES // self.row_bytes))
        start = max(0, int(edges[1]) - rows // 2)
        here = np.arange(start, min(start + rows, self._rows))
        if Columns.ACTIONS not in self._specs:
            return
        found = self._built(Columns.ACTIONS, start, start + len(here))
        floats = [leaf for _, leaf in leaves(found) if leaf.dtype.kind == "f" and leaf.size]
        if floats:
            missing = [np.isnan(leaf.reshape(len(leaf), -1)).all(axis=1) for leaf in floats]
            is_missing = np.logical_and.reduce(missing)
            check_missing(is_missing, np.isin(here, edges), np.isin(here + 1, edges), start)

    def _check_times(self, name: str) -> None:
        back, later = [np.zeros(0, np.int64)], 0
        before, starts = None, np.array(self._starts, np.int64)
        for start, values in self._looked((name,), fills=self._map.final_row):
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iufM":
                return
            rows = start + np.arange(len(values))
            others = np.concatenate([values[:1] if before is None else before, values[:-1]])
            goes_on = ~np.isin(rows, starts)
            back.append(rows[goes_on & (values < others)])
            later += int((goes_on & (values > others)).sum())
            before = values[-1:]
        in_order = self._map.next_obs == DERIVE
        if found := check_times(name, np.concatenate(back), later, in_order=in_order):
            self.notes.append(found)

    def _check_env(self, name: str) -> None:
        before, starts = None, np.array(self._starts, np.int64)
        for start, values in self._looked((name,)):
            if not isinstance(values, np.ndarray) or values.ndim != 1:
                return
            check_env(name, values, before, np.isin(start + np.arange(len(values)), starts), start)
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
        names = self._flag_names() if self._first is None else [spelled(self._first)]
        cuts = not self._ids and self._table.lengths is None and not self._map.lengths
        if found := check_followed(compared, names, cuts=cuts):
            self.notes.append(found)
        elif (
            cuts
            and self._first is None
            and not self._map.per_file
            and (row := break_in(compared)) is not None
        ):
            raise SchemaError(
                f"the new_obs of row {row} is not the obs of row {row + 1}, and no flag ends an episode "
                "there: two episodes would be one, such as those that a time limit cut; add that flag, such "
                "as cut = np.append((new_obs[:-1] != obs[1:]).any(axis=1), True) & ~terminated, and name it "
                "in truncated=; or name the column of ids in episode=",
                column=Columns.NEXT_OBS,
            )

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
        for start, values in self._looked(path, fills=final, is_needed=is_needed):
            if isinstance(values, np.ndarray):
                values = one_a_row(Columns.T, values)
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iuf":
                return
            restarts.look(start, values)
        restarts.finish()
        is_checked = path == self._specs.get(Columns.T)  # By `_check_steps`, and by the report.
        if not is_checked and (found := restarts.check_even()):
            self.notes.append(found)

    def _in_memory(self) -> InputFile:
        """Stands for a table in memory: its checksum is part of a reader's state."""
        cut = self._flags[1]
        cuts = [cut] if cut is not None and is_cut(cut) else []
        crc, paths = 0, sorted(self._paths() - {flag.path for flag in cuts})
        for start, stop in self._stretches(paths):
            columns = [*self._read(start, stop, paths, fills=True).values()]
            for column in (*columns, *(self._read_cuts(start, stop, flag) for flag in cuts)):
                for _, leaf in leaves(column) if column is not None else ():
                    crc = zlib.crc32(_content_of(leaf), crc)
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

    @property
    def inputs(self) -> InputFiles | None:
        """See `SpanSource`."""
        return self._table.inputs

    def spans(
        self, first: int, stop: int, start: int, rows: int, columns: frozenset[str] | None
    ) -> Iterator[Span]:
        """See `SpanSource`."""
        begin, end = self._starts[first], self._starts[stop]
        if rows < self.lengths[first]:  # A part of an episode; see `load_part`.
            begin += start
            end = min(begin + rows + (self._map.next_obs == DERIVE), end)
        names = self._names_of(columns)
        file = bisect_right(self._file_starts, begin) - 1
        while begin < end:
            base, after = self._file_starts[file : file + 2]
            yield from self._table.spans(Rows(file, begin - base, min(end, after) - base), names)
            file, begin = file + 1, after

    def _names_of(self, columns: frozenset[str] | None) -> list[str]:
        """The columns of the table that `_loaded` reads, about in its order."""
        follow = {Columns.NEXT_OBS, Columns.NEXT_OBS_VALID} if self._map.next_obs == DERIVE else set[str]()
        names: list[str] = []
        for name, spec in self._specs.items():
            if columns is None or name in columns or (name == Columns.OBS and not columns.isdisjoint(follow)):
                names += sorted(path[0] for path in paths_of(spec))
        flags = [flag.path for flag in self._flags if flag is not None and flag.path not in self._of_episodes]
        return [
            *dict.fromkeys(names + [path[0] for path in (*flags, *(() if self._numbers_ids else self._ids))])
        ]

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
        if is_cut(self._flags[1]):  # Of Gym's done, which is also true there.
            terminated &= ~truncated
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


def _state_ragged(table: Table, mapping: Mapping) -> None:
    """State the columns whose cells are lists of any number of items."""
    mapped = {path for top in nested(mapping.columns) for path in paths_in(table, mapping.columns, of=top)}
    if mapping.next_obs not in (None, DERIVE):
        mapped |= {*paths_in(table, {Columns.NEXT_OBS: mapping.next_obs}, of=Columns.NEXT_OBS)}
    for name in mapping.ragged:
        if (path := resolved(table, name, "ragged")) not in mapped or len(path) > 1:
            raise OptionError(
                f"ragged={excerpt(name)}: expected a column of the table that columns= names, not a part of "
                "one"
            )
        table.state_ragged(name)


def _content_of(leaf: NDArray[Any]) -> bytes:
    """The values of an array as bytes, for a checksum."""
    if leaf.dtype != object:
        return np.ascontiguousarray(leaf).tobytes()
    if item_type(leaf) is None:
        return repr(leaf.tolist()).encode()
    rows = Ragged.of(leaf)
    return rows.offsets.tobytes() + np.ascontiguousarray(rows.values).tobytes()


def _note_of_ties(table: SortedRows, mapping: Mapping) -> list[str]:
    if not table.ties:
        return []
    names = ", ".join(mapping.sort)
    return [
        f"{table.ties} rows have the same {names} as another row of their episode: they keep the order of "
        "the table. A further column in sort= would part them."
    ]


def _shifted(leaf: Any, last: NDArray[np.bool_]) -> Any:
    """The row after each, and zeros after the last of an episode."""
    found = np.concatenate([leaf[1:], zero_leaf(leaf, min(1, len(leaf)))])
    found[last] = zero_leaf(leaf, int(last.sum()))
    return found


# ---- tables whose columns have rlio's names ----


def by_own_names(table: Table) -> MappedSource:
    """The episodes of a table whose columns have rlio's names, see `own_map`."""
    return MappedSource(table, own_map(table))
