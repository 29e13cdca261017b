"""`Table`: columns by name that a mapping reads (`rlio.formats.tables.mapping`), and tables in memory.

Example:
    >>> table = ArrayTable("arrays", {"x": [1.0, 2.0], "y": [3.0, 4.0]})
    >>> table.names, table.rows, table.read(Rows(0, 1, 2), ["y"])
    (['x', 'y'], [2], {'y': array([4.])})
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import as_column, concat_leaves, table_columns, to_numpy
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves, map_structure
from rlio.batch.other_names import did_you_mean
from rlio.batch.ragged import Ragged
from rlio.errors import CorruptData, MissingColumn, OptionError, SchemaError, excerpt
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.arrow_columns import UnequalLists, to_column, to_times
from rlio.formats.files.parquet_footer import Extension, plain_schema
from rlio.formats.files.partitions import partitions_of, with_partitions
from rlio.formats.files.step_columns import suggested_mapping
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.mapping import Mapping as ColumnMapping
from rlio.storage import InputFile, InputFiles, Span

__all__ = [
    "KEPT_BYTES",
    "SCAN_ROWS",
    "ArrayTable",
    "Lists",
    "Pieces",
    "Rows",
    "Table",
    "TableAround",
    "cut_text",
    "table_in_memory",
]

#: Bytes of decoded pieces, or files, that a table keeps: one that has no more is decoded once.
KEPT_BYTES: Final = 256 << 20
#: Rows that are read at once where all of a table are looked through.
SCAN_ROWS: Final = 65_536
_PIECE_ROWS: Final = 16_384
_OWN_LISTS: Final = (
    "the file itself says which rows have any number of items (HDF5 of variable length, the offsets of NPZ); "
    "leave it out"
)


class Rows(NamedTuple):
    """Rows of a file of a table.

    Attributes:
        file: Number of the file.
        start: First row.
        stop: Row after the last.
        keep: Which of these are needed; None: all.
        fills: Whether nulls among whole numbers and flags are 0; otherwise they are refused.
        flag: Keys below the one column that is read, of a flag that objects may lack: it is False there, and
            other parts are not looked at. Objects may be texts, see `cut_text`. (): the whole column.
    """

    file: int
    start: int
    stop: int
    keep: NDArray[np.bool_] | None = None
    fills: bool = False
    flag: tuple[str, ...] = ()


class Lists(NamedTuple):
    """The cells of a column.

    Attributes:
        lengths: Items of the list in each cell; None: each cell has one value.
        values: All items, one list after the other, or the value of each cell; may be nested.
    """

    lengths: NDArray[np.int64] | None
    values: Any


class Table:
    """Columns of one or several files, which can be read from any row on; a base class.

    Attributes:
        uri: What it is, for messages.
        files: Its files; part of a reader's state. (): it is in memory.
        names: The columns that every file has.
        uneven: The columns that only some of the files have.
        rows: Rows of each file.
        continues: Whether the files are one table in pieces; None: not known.
        lengths: Steps of the episodes; None: the table does not state them.
        allowance: That of the files.
        of_episodes: Columns that have one value an episode, which `array` gives.
        together: Columns that the caller will read for the same rows; they are decoded at once.
        ragged: Columns whose cells are lists of any number of items -> an array of no such items.
        inputs: The files whose bytes `spans` states; None: it states none.
    """

    inputs: InputFiles | None = None
    continues: bool | None = None
    lengths: Sequence[int] | None = None
    #: Whether ``lengths`` are those of the mapping's episodes.
    is_cut: bool = False
    #: Whether `array` gives any column whole, as NPZ and arrays in memory do.
    holds_arrays: bool = False
    #: Whether `lists` gives cells of any length, so that there may be ``ragged`` columns.
    has_lists: bool = False
    of_episodes: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()
    ragged: Mapping[str, NDArray[Any]] = MappingProxyType({})

    def __init__(self, uri: str, files: Sequence[InputFile] = (), limits: Limits = DEFAULT_LIMITS) -> None:
        self.uri: str = uri
        self.files: Sequence[InputFile] = files
        self.allowance: Allowance = Allowance.of(files, limits)
        self.names: Sequence[str] = ()
        self.uneven: frozenset[str] = frozenset()
        self.rows: Sequence[int] = []
        #: Of each file: the columns in the names of its folders, with their value.
        self.partitions: list[Mapping[str, Any]] = [*partitions_of(files)]

    def add_file(self, names: Sequence[str], rows: int) -> None:
        """Take in the next file: its columns, and its rows, which are claimed."""
        self.allowance.claim(rows)
        if len(set(names)) < len(names):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise SchemaError(f"found two columns {excerpt(twice)}: expected each name once", column=twice)
        if self.files and names:  # A column that the file itself has is read there.
            number, stored = len(self.rows), set(names)
            stated = {key: one for key, one in self.partitions[number].items() if key not in stored}
            self.partitions[number], names = stated, [*names, *stated]
        if not (self.names or self.uneven):
            self.names = list(names)
        elif names:  # An empty file names no column.
            self.uneven |= {*self.names} ^ {*names}
            self.names = [name for name in self.names if name in names]
        self.rows = [*self.rows, rows]

    def arranged(self, mapping: ColumnMapping) -> ColumnMapping:
        """The mapping by which the table is read; a table whose rows depend on it finds them here."""
        return mapping

    def described(self) -> str | None:
        """What the table holds, for messages; None: its columns with dtype and values say it."""
        return None

    def suggested(self) -> str:
        """The mapping that the table may need, as code for a message."""
        ends = None if self.lengths is None else ""
        return f"{suggested_mapping(list(self.names), ends=ends)} (docs/mapping.md)"

    def read(self, rows: Rows, names: Collection[str]) -> dict[str, Any]:
        """Read rows of some columns of a file.

        Returns:
            Arrays, nested where columns are, which may be views. ``infos`` are objects. A column without a
            value in any row is None.

        Raises:
            CorruptData: The file is damaged.
            SchemaError: A column cannot become an array.
        """
        raise NotImplementedError

    def spans(self, rows: Rows, names: Collection[str]) -> Iterable[Span]:
        """The bytes that `read` will fetch, about in this order, as far as they are known; see `inputs`."""
        return ()

    def ensure_open(self, file: int) -> None:
        """Open a file, if `spans` knows no more than that before."""

    def stretches(
        self, names: Collection[str], files: Iterable[int] | None = None, *, rows: int | None = None
    ) -> Iterator[Rows]:
        """Rows of some files (None: of all) in their order, none over two files, for a caller that reads some
        columns of each: these are ``together`` meanwhile, if others are, and their bytes are requested ahead.

        Raises:
            CorruptData, StoreError: A file cannot be opened.
        """
        files, rows = range(len(self.rows)) if files is None else files, rows or SCAN_ROWS
        found = [
            Rows(file, start, min(start + rows, self.rows[file]))
            for file in files
            for start in range(0, self.rows[file], rows)
        ]
        before, file = self.together, -1
        if not before.issuperset(names):
            self.together = frozenset(names)
        inputs = self.inputs if self.inputs is not None and self.inputs.are_far else None
        try:
            for number, one in enumerate(found):
                if inputs is not None and file != one.file:
                    self.ensure_open(file := one.file)
                    inputs.expect(self._spans_of(found[number:], names))
                yield one
        finally:
            self.together = before
            if inputs is not None:
                inputs.close()  # What was stated; the files stay open.

    def _spans_of(self, coming: Iterable[Rows], names: Collection[str]) -> Iterator[Span]:
        for rows in coming:
            with contextlib.suppress(CorruptData, SchemaError):  # Raised where the rows are read.
                yield from self.spans(rows, names)

    def lists(self, rows: Rows, name: str) -> Any:
        """The cells of some rows of a column as `Lists`, which may differ in length; nested where it is.

        Raises:
            SchemaError: A cell is null, or its items cannot become an array.
        """
        return _lists_of_arrays(self.read(rows, [name])[name])

    def state_ragged(self, name: str) -> None:
        """State that the cells of a column are lists of any number of items.

        Raises:
            OptionError: The files themselves say which columns are.
            SchemaError: They are not, or no cell has an item, which shows their dtype.
        """
        if not self.has_lists:
            raise OptionError(f"ragged={excerpt(name)}: {_OWN_LISTS}")
        for file, rows in enumerate(self.rows):
            step = max(1, rows) if self.holds_arrays else _PIECE_ROWS
            for start in range(0, rows, step):
                found = self.lists(Rows(file, start, min(rows, start + step)), name)
                if not isinstance(found, Lists) or found.lengths is None:
                    raise SchemaError("ragged: found no lists, expected one a row", column=name)
                if not found.lengths.any():
                    continue
                if not isinstance(found.values, np.ndarray) or found.values.dtype.kind not in "biuf":
                    raise SchemaError("ragged: found other items than numbers of one shape", column=name)
                self.ragged = {**self.ragged, name: found.values[:0].copy()}
                return
        raise SchemaError("ragged: no list has an item, which shows their dtype", column=name)

    def _ragged_rows(self, found: Any, name: str) -> NDArray[Any]:
        """The cells of a ragged column as rows."""
        items = self.ragged[name]
        values = found.values if found.lengths.any() else items
        if values.shape[1:] != items.shape[1:] or not np.can_cast(values.dtype, items.dtype, "safe"):
            raise SchemaError(
                f"ragged: found items of {values.dtype} and the shape {values.shape[1:]}, expected "
                f"{items.dtype} and {items.shape[1:]} as in the first rows",
                column=name,
            )
        return Ragged(values.astype(items.dtype, copy=False), np.cumsum([0, *found.lengths])).rows()

    @property
    def as_stored(self) -> Table:
        """The table whose columns messages show."""
        return self

    def uri_of(self, file: int) -> str:
        """Where a file is, for messages."""
        return self.files[file].uri if self.files else self.uri

    def count(self, file: int, name: str) -> int:
        """Rows of a column of a file: the number of rows, unless it is an array beside the rows."""
        return self.rows[file]

    def array(self, file: int, name: str) -> NDArray[Any]:
        """An array of a file that need not have a value a row, such as the lengths of episodes.

        Raises:
            MissingColumn: There is none of this name.
            SchemaError: All columns have a value a row.
        """
        if name not in self.names:
            raise MissingColumn(
                f"the table has no column {excerpt(name)}{did_you_mean(name, self.names)}", column=name
            )
        raise SchemaError(
            f"found {self.rows[file]} values, one a row: expected an array of one number an episode, which "
            "NPZ, HDF5 and arrays in memory may have; if the number is that of the row's episode, pass "
            "episode="
        )

    def close(self) -> None:
        """Close all files."""

    def _check_rows(self, file: int, name: str, rows: int) -> None:
        """Refuse a column that has not as many rows as most columns of its file."""
        if rows != self.rows[file]:
            raise SchemaError(
                f"found {rows} rows, expected {self.rows[file]} as in other columns"
                + "; if it belongs to the file as an episode, pass per_file=True" * (rows == 1)
                + "; if each file is one step, load all, and pass their stacked arrays to rlio.from_arrays"
                * (rows > 1 and len(self.files) > 1 and self.holds_arrays),
                column=name,
            )


class TableAround(Table):
    """A table with the rows of another one, cut or ordered otherwise; a base class.

    Args:
        table: The other table; owned by this one.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table.uri, table.files)
        self._table = table
        self.inputs: InputFiles | None = table.inputs
        self.names: Sequence[str] = table.names
        self.uneven: frozenset[str] = table.uneven

    @property
    def as_stored(self) -> Table:
        """See `Table`."""
        return self._table

    def ensure_open(self, file: int) -> None:
        """See `Table`."""
        self._table.ensure_open(file)

    def close(self) -> None:
        """Close the other table."""
        self._table.close()


def _lists_of_arrays(column: Any) -> Any:
    """Arrays of the shape (rows, items, ...) as `Lists`; other arrays have one value a row."""

    def listed(leaf: NDArray[Any]) -> Lists:
        if leaf.ndim < 2:
            return Lists(None, leaf)
        rows, items, *shape = leaf.shape
        return Lists(np.full(rows, items, np.int64), leaf.reshape(rows * items, *shape))

    return Lists(None, None) if column is None else map_structure(listed, column)


class ArrayTable(Table):
    """Arrays, lists, or the columns of a data frame, in memory; a `Table`.

    Args:
        uri: What it is, for messages.
        columns: Columns by name, nested where values are dicts. Arrays are not copied.
        lengths: See `Table`.
    """

    holds_arrays = True
    has_lists = True

    def __init__(self, uri: str, columns: Mapping[str, Any], *, lengths: Sequence[int] | None = None) -> None:
        super().__init__(uri)
        self.lengths = lengths
        self._given = columns
        self._columns: dict[str, Any] = {}
        if wrong := [name for name in columns if not isinstance(name, str)]:
            raise SchemaError(f"found the columns {excerpt(wrong)}, expected names of text: rename them")
        counts = [count for column in columns.values() if (count := _count(column)) is not None]
        #: The length that most columns have: others are refused when they are read.
        self.add_file(tuple(columns), max(counts, key=counts.count, default=0))

    def read(self, rows: Rows, names: Collection[str]) -> dict[str, Any]:
        """See `Table`."""
        for name in names:
            if name not in self._columns:
                column = (
                    self._ragged_rows(self.lists(Rows(0, 0, self.rows[0]), name), name)
                    if name in self.ragged
                    else as_column(name, self._given[name])
                )
                for _, leaf in leaves(column):
                    self._check_rows(0, name, len(leaf))
                self._columns[name] = map_structure(to_numpy, column)

        def cut(leaf: NDArray[Any]) -> NDArray[Any]:
            found = leaf[rows.start : rows.stop]
            return found if rows.keep is None else found[rows.keep]

        return {name: map_structure(cut, self._columns[name]) for name in names}

    def lists(self, rows: Rows, name: str) -> Any:
        """See `Table`."""
        given = self._given[name]
        cells = given if isinstance(given, list) else np.asarray(given, object) if _has_cells(given) else None
        here = [] if cells is None else cells[rows.start : rows.stop]
        if cells is None or not all(isinstance(one, list | tuple | np.ndarray) for one in here):
            return super().lists(rows, name)
        self._check_rows(0, name, len(cells))
        parts = [as_column(name, [*one]) for one in here]
        full = [part for part in parts if len(part)]
        lengths = np.array([len(part) for part in parts], np.int64)
        return Lists(lengths, concat_leaves(full) if full else np.zeros(0))

    def count(self, file: int, name: str) -> int:
        """See `Table`."""
        count = _count(self._given[name])
        return self.rows[file] if count is None else count

    def array(self, file: int, name: str) -> NDArray[Any]:
        """See `Table`."""
        if name not in self._given or isinstance(self._given[name], Mapping):
            return super().array(file, name)
        return to_numpy(as_column(name, self._given[name]))


def _has_cells(column: Any) -> bool:
    """Whether the cells of a column of a data frame, or of an array, are objects."""
    return getattr(column, "dtype", None) == np.dtype(object)


def _count(column: Any) -> int | None:
    """Rows of a column, by its first part; None: it has no length."""
    while isinstance(column, Mapping) and column:
        column = next(iter(column.values()))
    return len(column) if hasattr(column, "__len__") else None


class Pieces(Table):
    """A table of Arrow data that is decoded in pieces: row groups, record batches, blocks of text.

    The decoded pieces that were used last are kept, 256 MiB of them.

    Args:
        uri: What it is, for messages.
        files: Its files.
        limits: Bounds on them.
    """

    has_lists = True

    def __init__(self, uri: str, files: Sequence[InputFile] = (), limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(uri, files, limits)
        #: Of each file: rows before each piece, and all rows.
        self._starts: list[list[int]] = []
        self._kept: OrderedDict[tuple[int, int, frozenset[str]], Any] = OrderedDict()
        self._bytes = 0

    def add_pieces(self, names: Sequence[str], pieces: Iterable[int]) -> None:
        """Take in the next file: its columns, and the rows of its pieces."""
        self._starts.append([0, *accumulate(pieces)])
        self.add_file(names, self._starts[-1][-1])

    def piece_rows(self, file: int) -> list[int]:
        """The rows of each piece of a file."""
        return [stop - start for start, stop in pairwise(self._starts[file])]

    def decode(self, file: int, piece: int, names: Sequence[str]) -> Any:
        """Decode some columns of a piece as a table or record batch of Arrow."""
        raise NotImplementedError

    def places(self, file: int, piece: int, names: Collection[str]) -> Iterable[tuple[int, int]]:
        """The bytes ``[start, stop)`` of some columns of a piece; see `spans`."""
        return ()

    def spans(self, rows: Rows, names: Collection[str]) -> Iterator[Span]:
        """See `Table`. Pieces that are kept are fetched no more."""
        asked = self._asked(names)
        for piece in self._pieces_of(rows):
            if (rows.file, piece, asked) not in self._kept:
                yield from ((rows.file, *place) for place in self.places(rows.file, piece, asked))

    def _pieces_of(self, rows: Rows) -> Iterator[int]:
        """The pieces that have some rows of those that are needed; at least one, if there are any."""
        starts, is_none = self._starts[rows.file], True
        for piece in range(max(0, bisect_right(starts, rows.start) - 1), len(starts) - 1):
            if starts[piece] >= rows.stop and not is_none:
                return
            part = slice(max(0, starts[piece] - rows.start), max(0, starts[piece + 1] - rows.start))
            is_last = starts[piece + 1] >= rows.stop
            # Rows that are far apart: of some pieces, no row is wanted.
            if rows.keep is None or (is_last and is_none) or rows.keep[part].any():
                is_none = False
                yield piece

    @property
    def keeps_all(self) -> bool:
        """Whether all pieces are kept; otherwise those that are may be dropped before they are read again."""
        return len(self._kept) >= sum(len(starts) - 1 for starts in self._starts)

    def extensions(self, file: int) -> Mapping[str, Extension]:
        """Extension types of a file's columns."""
        return {}

    def times(self, file: int) -> Mapping[str, np.dtype[Any]]:
        """The columns of a file that it states to be times -> their dtype."""
        return {}

    def read(self, rows: Rows, names: Collection[str]) -> dict[str, Any]:
        """See `Table`."""
        parts, extensions, times = self._parts(rows, names), self.extensions(rows.file), self.times(rows.file)
        found: dict[str, Any] = {}
        for name in names:
            values = _joined(name, parts)
            if name in self.ragged and values is not None:
                found[name] = self._ragged_rows(_lists(name, values, extensions, rows), name)
            elif name in times and values is not None:
                found[name] = to_times(name, values, times[name])
            else:
                found[name] = _column(name, values, extensions, rows)
        return found

    def lists(self, rows: Rows, name: str) -> Any:
        """See `Table`."""
        values, extensions = _joined(name, self._parts(rows, [name])), self.extensions(rows.file)
        return Lists(None, None) if values is None else _lists(name, values, extensions, rows)

    def _parts(self, rows: Rows, names: Collection[str]) -> list[Any]:
        """Tables of Arrow with some rows."""
        starts, parts = self._starts[rows.file], list[Any]()
        for piece in self._pieces_of(rows):
            table = self.piece(rows.file, piece, names)
            if len(table) != starts[piece + 1] - starts[piece]:
                raise CorruptData("the file has changed since it was opened", uri=self.files[rows.file].uri)
            low = max(0, rows.start - starts[piece])
            part = table.slice(low, max(0, min(len(table), rows.stop - starts[piece]) - low))
            if rows.keep is not None:
                at = starts[piece] + low - rows.start
                part = part.filter(rows.keep[at : at + len(part)])
            parts.append(part)
        return parts

    def piece(self, file: int, piece: int, names: Collection[str]) -> Any:
        """A piece with some columns, as a table or record batch; the last ones are kept, see `Pieces`."""
        asked = self._asked(names)
        key = (file, piece, asked)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        table = self._decoded_piece(file, piece, asked)
        self._kept[key] = table
        self._bytes += table.get_total_buffer_size()
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].get_total_buffer_size()
        return table

    def _asked(self, names: Collection[str]) -> frozenset[str]:
        """The columns that are decoded where some are needed."""
        return self.together if self.together.issuperset(names) else frozenset(names)

    def _decoded_piece(self, file: int, piece: int, names: frozenset[str]) -> Any:
        stated = self.partitions[file] if self.files else {}
        mine, starts = {name: stated[name] for name in names if name in stated}, self._starts[file]
        stored = sorted(names - mine.keys())
        table = self.decode(file, piece, stored) if stored or not mine else None
        if not mine:
            return table
        return with_partitions(
            table, mine, starts[piece + 1] - starts[piece] if table is None else len(table)
        )

    def close(self) -> None:
        """Drop the decoded pieces."""
        self._kept.clear()


def _joined(name: str, parts: Sequence[Any]) -> Any:
    """A column of several tables as an array of Arrow; None: there are no tables."""
    import pyarrow as pa

    chunks: list[Any] = []
    for part in parts:
        column = part.column(name)
        chunks += column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    chunks = [chunk.storage if isinstance(chunk.type, pa.BaseExtensionType) else chunk for chunk in chunks]
    return None if not chunks else chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def _lists(name: str, values: Any, extensions: Mapping[str, Extension], rows: Rows) -> Any:
    """The cells of a column as `Lists`, nested where there are structs."""
    import pyarrow as pa

    kind = values.type
    is_list = isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
    if (is_list or (pa.types.is_struct(kind) and not rows.flag)) and values.null_count:
        raise SchemaError(f"{values.null_count} of {len(values)} rows are null", column=name)
    if pa.types.is_struct(kind) and (name != Columns.INFOS or rows.flag):
        key = _key_in(kind, rows.flag)
        below = rows._replace(flag=rows.flag[key.count(".") + 1 :])
        parts = zip(kind, values.flatten(), strict=True)
        return {
            field.name: _lists(name, part, {}, below)
            for field, part in parts
            if not rows.flag or field.name == key
        }
    if not is_list or any(path == name for path in extensions):
        return _lists_of_arrays(_column(name, values, extensions, rows))
    fixed = isinstance(kind, pa.FixedSizeListType)
    lengths = np.full(len(values), kind.list_size) if fixed else np.asarray(values.value_lengths())
    return Lists(lengths.astype(np.int64), _column(name, values.flatten(), {}, rows))


def _flag_of_structs(values: Any, keys: tuple[str, ...]) -> Any:
    """Structs with nothing but a flag, without nulls, see `Rows`; False if they have no such part."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not keys:
        is_flag = pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)
        return values.fill_null(pa.scalar(0).cast(values.type)) if is_flag else values
    texts = values.dictionary if pa.types.is_dictionary(values.type) else values
    if pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type):
        flags = pc.match_substring_regex(texts, cut_text(keys))
        flags = (flags if texts is values else flags.take(values.indices)).fill_null(False)
        return pa.StructArray.from_arrays([flags], [".".join(keys)])
    key = _key_in(values.type, keys)
    if not key or pa.types.is_null(values.type.field(key).type):
        return pa.repeat(False, len(values))
    part = values.flatten()[values.type.get_field_index(key)]  # A null row has nulls in all parts.
    return pa.StructArray.from_arrays([_flag_of_structs(part, keys[key.count(".") + 1 :])], [key])


def cut_text(keys: Sequence[str]) -> str:
    """What is in infos that are texts of JSON or Python where Gym's wrapper ``TimeLimit`` cut: a pattern.

    Args:
        keys: Where in the infos the flag is; the last two are ``"TimeLimit", "truncated"``.
    """
    above = "".join(rf"""["']{re.escape(key)}["'][\s\S]*""" for key in keys[:-2])
    return above + r"""["']TimeLimit(?:\.|["']\s*:\s*\{\s*["'])truncated["']\s*:\s*(?:np\.)?[Tt]rue"""


def _key_in(kind: Any, keys: tuple[str, ...]) -> str:
    """The longest key of a struct that begins ``keys``; "": there is none."""
    import pyarrow as pa

    tried = [".".join(keys[:end]) for end in range(len(keys), 0, -1)] if pa.types.is_struct(kind) else []
    return next((key for key in tried if kind.get_field_index(key) >= 0), "")


def _column(name: str, values: Any, extensions: Mapping[str, Extension], rows: Rows) -> Any:
    import pyarrow as pa

    if values is None:
        return None
    if rows.flag:
        values = _flag_of_structs(values, rows.flag)
    if rows.fills and (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        values = values.fill_null(pa.scalar(0).cast(values.type))
    # Infos become objects. The meaning of other columns is the mapping's, not that of their names.
    kept = Columns.INFOS if name == Columns.INFOS and not rows.flag else ""
    own = {path: one for path, one in extensions.items() if path.partition(".")[0] == name}
    try:
        return to_column(kept, values, {kept + path.removeprefix(name): one for path, one in own.items()})
    except (CorruptData, SchemaError) as error:
        sparse = pa.types.is_struct(values.type) and " null" in str(error)
        way = "; if only some objects have a key, give it to all, as a column or with a value" * sparse
        if isinstance(error, UnequalLists):
            way = f"; if each step has such a list, name the column in the mapping: ragged={excerpt(name)}"
        raise type(error)(f"{error}{way}", column=name) from error


class _ArrowTable(Pieces):
    """A table of Arrow, or one that gives its rows as such, in memory; a `Table`."""

    def __init__(self, uri: str, schema: Any, rows: int, take: Callable[[int, int, list[str]], Any]) -> None:
        super().__init__(uri)
        self._take = take
        self._extensions = plain_schema(schema.serialize().to_pybytes())[1]
        full, rest = divmod(rows, _PIECE_ROWS)
        self.add_pieces(schema.names, [*[_PIECE_ROWS] * full, *([rest] if rest else [])])

    def decode(self, file: int, piece: int, names: Sequence[str]) -> Any:
        """See `Pieces`."""
        return self._take(piece * _PIECE_ROWS, (piece + 1) * _PIECE_ROWS, list(names))

    def extensions(self, file: int) -> Mapping[str, Extension]:
        """See `Pieces`."""
        return self._extensions


def table_in_memory(value: Any) -> Table:
    """The `Table` of a value for which `rlio.batch.arrays.is_table` is true.

    Raises:
        OptionError: It has no rows to choose from yet (a LazyFrame), or has several splits.
    """
    import pyarrow as pa

    owner, kind = type(value).__module__.partition(".")[0], type(value).__name__
    uri = f"{owner}.{kind}"
    if kind.endswith("DatasetDict"):
        raise OptionError(f"found the splits {excerpt(list(value))}, expected one: pass dataset[name]")
    if kind in ("LazyFrame", "IterableDataset"):
        how = "frame.collect()" if kind == "LazyFrame" else "datasets.Dataset.from_generator(...)"
        raise OptionError(f"found a {uri}, whose rows cannot be chosen: pass what {how} gives")
    if owner == "datasets":
        return _ArrowTable(
            f"{uri} {value._fingerprint}",
            value.features.arrow_schema,
            len(value),
            lambda start, stop, names: value.select_columns(names).with_format("arrow")[start:stop],
        )
    if owner == "pandas":
        return ArrayTable(uri, table_columns(value))
    if kind != "Table":
        value = value.to_arrow() if owner == "polars" else pa.Table.from_batches([value])
    return _ArrowTable(
        uri,
        value.schema,
        len(value),
        lambda start, stop, names: value.slice(start, stop - start).select(names),
    )
