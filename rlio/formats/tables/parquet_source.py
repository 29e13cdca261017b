"""Parquet files from other programs as a source: one row a step, or one row a batch.

One row a step is the common form, also of RLlib's new recordings and of any data frame: numbers, lists,
structs and text become columns. RLlib's older dataset writer wrote one row a batch; such rows are records, as
in its JSON (`rlio.formats.rllib.decoder`).

The files are untrusted: row groups are read one at a time and within limits, and extension types run no code
(`rlio.formats.files.parquet_footer`).
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from rlio.batch import Batch, SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.errors import (
    CorruptData,
    DataNotFound,
    MissingColumn,
    OptionError,
    RlioError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
    excerpt,
    raise_at,
)
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.arrow_columns import (
    ANY_LENGTH,
    TIMES,
    UnequalLists,
    is_lists,
    is_pickled,
    load_pickled,
    no_items,
    to_column,
    to_lists,
    to_times,
)
from rlio.formats.files.inputs import Failures, FileOptions, Guard, find_files, in_column
from rlio.formats.files.json_files import parse_json
from rlio.formats.files.parquet_files import ParquetFiles
from rlio.formats.files.parquet_footer import Extension, ForeignFile, registered_extensions
from rlio.formats.files.partitions import partitions_of, with_partitions
from rlio.formats.files.space_arrays import fit_space, space_of
from rlio.formats.files.step_columns import check_step_columns
from rlio.formats.format import format_of_columns
from rlio.formats.rllib.decoder import STEP_NUMBERS, RllibDecoder, wanted_columns
from rlio.formats.rllib.record_source import DecoderOf, RecordFiles, Records, decoders
from rlio.limits import Limits
from rlio.read_options import ReadOptions
from rlio.schemas.arrow_tables import arrow_times
from rlio.schemas.leaves import RESERVED
from rlio.schemas.schema import Schema
from rlio.source.files import GroupFiles
from rlio.source.uniform import Agreed
from rlio.storage import InputFile, InputFiles, Span, each_file
from rlio.storage.filesystem import StrPath
from rlio.support.calls import closing_on_error
from rlio.support.spaces import Spaces

__all__ = ["SUFFIXES", "BatchRows", "RowGroups", "StepRows", "open_row_groups", "open_rows"]

logger: logging.Logger = logging.getLogger("rlio")

#: Endings of the names of the files.
SUFFIXES: Final = (".parquet",)
# Ends of episodes that are remembered at once.
_MOST_ENDS: Final = 100_000
# Rows of which the schema is made.
_SAMPLE_ROWS: Final = 64
# Bytes of rows that are read at once, and their least number, whatever a footer says.
_GROUP_BYTES: Final = 64 << 20
_GROUP_ROWS: Final = 64
#: Columns that are lists where a row is a batch.
_RECORD_LISTS = (*STEP_NUMBERS, Columns.ACTIONS)


def open_rows(inputs: StrPath | Sequence[StrPath], how: FileOptions) -> GroupFiles:
    """Parquet files as a source, as `ForeignParquetReader` reads them without options."""
    options = ReadOptions(on_error=how.on_error)
    groups, decoder_of = open_row_groups(inputs, options, how, refuse=True)
    with closing_on_error(groups):
        if groups.rows_are_batches:
            return RecordFiles(BatchRows(groups), groups.files, decoder_of, options, columns=None)
        return StepRows(groups, options, how.spaces, decoder_of(None), {}, columns=None)


def open_row_groups(
    inputs: StrPath | Sequence[StrPath],
    options: ReadOptions,
    how: FileOptions,
    *,
    refuse: bool,
    **decoding: Any,
) -> tuple[RowGroups, DecoderOf]:
    """The row groups of Parquet files, and what makes decoders.

    Args:
        inputs: The files.
        options: The columns that are read, and what to do with damage.
        how: Spaces, options of RLlib's records, storage options and limits.
        refuse: See `RowGroups`.
        decoding: Further options of `RllibDecoder`.
    """
    files = find_files(inputs, how, suffixes=SUFFIXES)
    decoder_of = decoders(files, how, **decoding)
    decoder_of(None)  # Raises before a file is opened.
    groups = RowGroups(files, how.limits, options.columns, refuse=refuse)
    with closing_on_error(groups):
        groups.index(Failures(options.on_error))
    return groups, decoder_of


class RowGroups:
    """The row groups of all files, read one at a time and within limits.

    Args:
        files: The files.
        limits: What they may ask for.
        columns: The requested columns; None: all.
        refuse: Whether columns of registered extension types are refused.
        mapped: Whether the user says what the columns mean, so that their names do not.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        limits: Limits,
        columns: list[str] | None,
        *,
        refuse: bool,
        mapped: bool = False,
    ) -> None:
        self.files = files
        self._parquet = ParquetFiles(files, limits)
        self.limits = limits
        self._asked = columns
        self._refuse = refuse
        self._mapped = mapped
        self.rows_are_batches: bool = False
        #: Of each file: the columns in the names of its folders. A mapped table adds them by itself.
        self._partitions: list[dict[str, Any]] = [{} for _ in files] if mapped else partitions_of(files)
        #: (file, row group in it, number of the group's first row in the file).
        self.places: list[tuple[int, int, int]] = []
        self.rows: list[int] = []
        self.sizes: list[int] = []
        #: For each row group: the names and types of its file's columns.
        self.kinds: list[tuple[tuple[str, ...], Hashable]] = []
        #: Of each row group: its first byte, and the one after its last, if it is read whole; otherwise 0, 0.
        self._extents = array("q")
        #: Columns of lists that differ in length -> shape of an item, if it is stated.
        self.unequal: dict[str, tuple[int, ...]] = {}
        #: Those of them that a file states -> an array of no items.
        self.stated_lists: dict[str, np.ndarray[Any, Any]] = {}
        #: Of each file: columns of times -> their dtype, if it is stated.
        self.times_of: dict[int, dict[str, np.dtype[Any]]] = {}

    def index(self, failures: Failures) -> None:
        """Read the footers; ``failures`` handles files that cannot be opened."""
        self.failures: Failures = failures
        self.places, self.rows, self.sizes, self.kinds, self._extents = [], [], [], [], array("q")
        kinds: set[bool] = set()
        for number in each_file(self.files):
            try:
                with self._parquet.guarded(number):
                    kind = self._index(number)
            except (CorruptData, SchemaError) as error:
                failures.handle(error)
                continue
            if kinds and kind not in kinds:
                raise SchemaError(
                    "some files have one row a step and others one row a batch: read them with two readers",
                    uri=self.files[number].uri,
                )
            kinds.add(kind)
        self.rows_are_batches = True in kinds

    def _index(self, number: int) -> bool:
        """Add the row groups of a file; returns whether its rows are batches."""
        file = self._parquet.file(number)
        self._check_extensions(file.extensions)
        schema, metadata = file.arrow.schema_arrow, file.arrow.metadata
        if b"rlio.format" in (metadata.metadata or {}) and "_next" in schema.names:
            raise OptionError(
                "this file is a shard of a data set of rlio, and most of its new_obs are in other rows: "
                "open the data set's root with DatasetReader",
                uri=self.files[number].uri,
            )
        if len(set(schema.names)) < len(schema.names):
            raise SchemaError("found two columns of one name: expected each name once")
        found = None if self._mapped else format_of_columns(schema.names)
        if found is not None and found.name != "rllib-parquet":
            raise found.refusal(uri=self.files[number].uri)
        if not self._mapped:  # A column that the file itself has is read there.
            own = set(schema.names)
            stated = {name: value for name, value in self._partitions[number].items() if name not in own}
            self._partitions[number] = stated
        lists = _stated_lists(metadata.metadata or {}, self.files[number].uri, self.limits)
        self.times_of[number] = _stated_times(metadata.metadata or {}, self.files[number].uri, self.limits)
        for name in lists.keys() & {*schema.names}:
            self.unequal[name] = lists[name]
            if is_lists(schema.field(name).type):
                self.stated_lists[name] = no_items(schema.field(name).type, lists[name])
        names = tuple(self.names(number))
        first, columns = 0, (names, tuple(map(str, schema.types)))
        for group in range(metadata.num_row_groups):
            info = metadata.row_group(group)
            if info.num_rows:
                self.places.append((number, group, first))
                self.rows.append(info.num_rows)
                self.sizes.append(max(info.total_byte_size, 1))
                self.kinds.append(columns)
                self._extents.extend(_extent(file, group))
                self._compare_lengths(info, schema)
            first += info.num_rows
        if self._mapped:
            return False
        rows_are_batches = _rows_are_batches(schema)
        if not rows_are_batches and self._asked is None:
            check_step_columns(names, uri=self.files[number].uri)
        return rows_are_batches

    def _compare_lengths(self, info: Any, schema: Any) -> None:
        """Note columns of lists whose number of values is not that of lists of one length.

        Lists that have one length in each row group, but another in another, are a mistake more often.
        """
        for place in range(info.num_columns):
            chunk = info.column(place)
            name = chunk.path_in_schema.partition(".")[0]
            known = name in schema.names  # Names may have dots.
            if known and chunk.num_values % info.num_rows and is_lists(schema.field(name).type):
                self.unequal.setdefault(name, ())

    def times(self, group: int, name: str) -> np.dtype[Any] | None:
        """The dtype of a column that rlio wrote as times; None: of others."""
        return self.times_of[self.places[group][0]].get(name)

    def names(self, number: int) -> list[str]:
        """The columns of a file."""
        return [*self._parquet.file(number).arrow.schema_arrow.names, *self._partitions[number]]

    def _check_extensions(self, extensions: Mapping[str, Extension]) -> None:
        if not self._refuse or not extensions:
            return
        registered = registered_extensions()
        for path, extension in extensions.items():
            # Pickled objects are read from their storage in any case, by rlio's own interpreter.
            if extension.name in registered and not is_pickled(extension):
                raise UnsafeData(
                    f"the extension type {excerpt(extension.name)} is registered in this process, and its "
                    "code is not run on files: pass extension_types='storage' to read the stored values",
                    column=path,
                )

    def read(self, group: int, start: int, stop: int, columns: frozenset[str] | None) -> Any:
        """The Arrow table of some rows of a group; see `guarded`."""
        number, index, _ = self.places[group]
        stated = self._partitions[number]
        mine = {name: value for name, value in stated.items() if columns is None or name in columns}
        stored = None if columns is None else columns - mine.keys()
        if mine and stored is not None and not stored.intersection(self.names(number)):
            return with_partitions(None, mine, stop - start)
        table = self._parquet.rows(number, index, start, stop, stored)
        return with_partitions(table, mine, stop - start) if mine else table

    @property
    def inputs(self) -> InputFiles:
        """What opens the files."""
        return self._parquet.inputs

    def open(self, group: int) -> None:
        """Open the file of a group, so that its `spans` are known."""
        with self.guarded(group):
            self._parquet.file(self.places[group][0])

    def spans(self, group: int, columns: frozenset[str] | None, rows: int | None = None) -> Iterator[Span]:
        """The bytes of columns of a group (None: of all), or of its first rows, as far as they are known."""
        number, index, _ = self.places[group]
        start, stop = self._extents[2 * group : 2 * group + 2]
        if start < stop and (columns is None or columns.issuperset(self.kinds[group][0])):
            yield number, start, stop
        else:
            share = 1.0 if rows is None else rows / self.rows[group]
            yield from self._parquet.spans(number, index, columns, share)

    def whole(self, group: int) -> Any:
        """The Arrow table of all rows of a group. The last one is kept."""
        number, index, _ = self.places[group]
        with self.guarded(group):
            return self._parquet.group(number, index)

    def guarded(self, group: int) -> Guard:
        """Name the file and the group in errors of a block."""
        number, index, _ = self.places[group]
        return self._parquet.guarded(number, index)

    def allowance(self, group: int, columns: frozenset[str] | None) -> Allowance:
        """The memory allowance for all packed columns of the group together."""
        number, index, _ = self.places[group]
        found = self._parquet.file(number).columns(index, columns)
        return Allowance(self.limits, packed=sum(chunk.total_compressed_size for _, chunk in found))

    def extensions(self, group: int) -> Mapping[str, Extension]:
        """Extension types of the group's file."""
        return self._parquet.file(self.places[group][0]).extensions

    def firsts(self, first_of: Callable[[int], Batch]) -> Iterator[tuple[str, Batch]]:
        """URI and first readable batch, ``first_of`` a row group, of each kind of file that has one."""
        seen: set[Hashable] = set()
        for group, kind in enumerate(self.kinds):
            # Damage is reported when the rows are served.
            with contextlib.suppress(CorruptData, SchemaError):
                if kind not in seen and len(batch := first_of(group)):
                    seen.add(kind)
                    yield self.place(group, 0)[0], batch

    def place(self, group: int, row: int) -> tuple[str, int]:
        """URI of the file, and the number of the row in it."""
        number, _, first = self.places[group]
        return self.files[number].uri, first + row

    def close(self) -> None:
        self._parquet.close()


def _extent(file: ForeignFile, group: int) -> tuple[int, int]:
    """See `RowGroups`."""
    spans = sorted(file.spans(group, None))
    is_whole = not file.reads_parts and all(before[1] == after[0] for before, after in pairwise(spans))
    return (spans[0][0], spans[-1][1]) if spans and is_whole else (0, 0)


def _stated_lists(metadata: Mapping[bytes, bytes], uri: str, limits: Limits) -> dict[str, tuple[int, ...]]:
    """The columns that rlio wrote as lists of any length, and the shape of an item."""
    found = parse_json(metadata.get(ANY_LENGTH.encode(), b"{}"), ANY_LENGTH, uri=uri, limits=limits)
    try:
        return {name: np.empty((0, *shape)).shape[1:] for name, shape in found.items()}
    except (AttributeError, ValueError, TypeError) as error:
        raise CorruptData(f"{ANY_LENGTH} in the metadata states no shapes", uri=uri) from error


def _stated_times(metadata: Mapping[bytes, bytes], uri: str, limits: Limits) -> dict[str, np.dtype[Any]]:
    """The columns that rlio wrote as times, and their dtypes."""
    found = parse_json(metadata.get(TIMES.encode(), b"{}"), TIMES, uri=uri, limits=limits)
    try:
        dtypes = {name: np.dtype(dtype) for name, dtype in found.items()}
        for dtype in dtypes.values():
            arrow_times(np.zeros(0, dtype))
    except (AttributeError, ValueError, TypeError) as error:
        raise CorruptData(f"{TIMES} in the metadata states no dtypes", uri=uri) from error
    if any(dtype.kind not in "mM" for dtype in dtypes.values()):
        raise CorruptData(f"{TIMES} in the metadata states other dtypes than those of times", uri=uri)
    return dtypes


def _rows_are_batches(schema: Any) -> bool:
    """Whether each row is an RLlib record."""
    import pyarrow as pa

    fields = {field.name: field.type for field in schema}
    if fields.keys() == {"value"} and pa.types.is_struct(fields["value"]):
        return True
    if "type" not in fields:
        return False
    return "policy_batches" in fields or any(
        pa.types.is_list(fields[name]) or pa.types.is_large_list(fields[name])
        for name in _RECORD_LISTS
        if name in fields
    )


class BatchRows(Records):
    """Rows that are batches."""

    def __init__(self, groups: RowGroups) -> None:
        self._groups = groups
        self.files: Sequence[InputFile] = groups.files
        self.failures: Failures = groups.failures
        self.inputs: InputFiles | None = groups.inputs
        self._ends = list(accumulate(groups.rows))
        self.numbers: list[int] = []
        counts = [0] * len(self.files)
        for (file, _, first), rows in zip(groups.places, groups.rows, strict=True):
            self.numbers += range(first, first + rows)
            counts[file] += rows
        self.ends: list[int] = list(accumulate(counts))

    def has(self, index: int) -> bool:
        return index < len(self.numbers)

    def spans(self, indices: range) -> Iterator[Span]:
        first, last = (bisect_right(self._ends, index) for index in (indices[0], indices[-1]))
        for group in range(first, last + 1):
            yield from self._groups.spans(group, None)

    def close(self) -> None:
        self._groups.close()

    def firsts(self, decoder: RllibDecoder) -> Iterator[tuple[str, Batch]]:
        return self._groups.firsts(lambda group: self._decode(group, 0, decoder))

    def load(self, index: int, decoder: RllibDecoder) -> Batch:
        group = bisect_right(self._ends, index)
        row = index - (self._ends[group - 1] if group else 0)
        try:
            return self._decode(group, row, decoder)
        except (CorruptData, SchemaError, UnknownLayout) as error:
            raise_at(error, uri=self.uri_of(index), record=self.numbers[index])

    def _decode(self, group: int, row: int, decoder: RllibDecoder) -> Batch:
        record = self._record(group, row)
        return decoder.decode_record(record, following=partial(self._next_record, group, row))

    def _record(self, group: int, row: int) -> dict[str, Any]:
        """A row as Python values, pickled objects interpreted."""
        table = self._groups.whole(group).slice(row, 1)
        record: dict[str, Any] = table.to_pylist()[0]
        extensions, allowance = self._groups.extensions(group), self._groups.allowance(group, None)
        for name in table.column_names:
            if is_pickled(extensions.get(name)):
                with in_column(name):
                    record[name] = load_pickled(record[name], allowance)
        return record

    def _next_record(self, group: int, row: int) -> dict[str, Any] | None:
        """The row after a row; None: there is none, or it is damaged, which is reported when it is served."""
        group, row = (group, row + 1) if row + 1 < self._groups.rows[group] else (group + 1, 0)
        with contextlib.suppress(CorruptData, SchemaError):
            return self._record(group, row) if group < len(self._groups.rows) else None
        return None


class StepRows(GroupFiles):
    """Rows that are steps, all of one writer: an episode may continue in the next file.

    Args:
        groups: The row groups.
        options: What to do with files with different columns.
        spaces: See the reader.
        decoder: Settles flags, and scales actions.
        about: Options that change the rows, as JSON values.
        columns: The columns that are read; None: all. Others are left out where they cannot be read.
    """

    def __init__(
        self,
        groups: RowGroups,
        options: ReadOptions,
        spaces: Spaces | None,
        decoder: RllibDecoder,
        about: Mapping[str, Any],
        *,
        columns: Sequence[str] | None,
    ) -> None:
        if decoder.infos.given == "obs":
            raise OptionError(
                "format_options={'infos': 'obs'}: rows are single steps, whose infos the reader does not "
                "move to other rows: leave it out, and move them in a function (rlio.MappedInput)",
                uri=groups.files[0].uri,
            )
        super().__init__(groups.files, {**decoder.details, **about})
        self._row_groups, self._decoder = groups, decoder
        self.failures: Failures = groups.failures
        for name in decoder.lists:
            groups.unequal.setdefault(name, ())
        self._asked = None if columns is None else frozenset(columns)
        self._spaces = space_of(spaces, DEFAULT_POLICY_ID)
        # Files may have different columns: all are decoded, and then dropped or filled.
        self._decodes_all = options.unlike != "error"
        #: Row group -> first row of each part that was read -> bytes and values of its packed columns.
        self._spent: dict[int, dict[int, tuple[int, int]]] = {}
        # Where the episodes end; None: it is known that rows are stored twice.
        self._ends: dict[Hashable, tuple[str, int]] | None = {}
        if not groups.rows:
            raise DataNotFound("found no row in the files: expected at least one", uri=self.uri)
        self._agreed = Agreed(
            options, lambda: groups.firsts(self._first_of), several=len(set(groups.kinds)) > 1
        )
        row_bytes = self._find_schema()
        #: (row group, first row in it, row after the last) of each group.
        self._groups: list[tuple[int, int, int]] = []
        part = min(_GROUP_BYTES, groups.limits.group_bytes // 2)
        ends = [0] * len(groups.files)
        for group, rows in enumerate(groups.rows):
            most = max(_GROUP_ROWS, part // max(1, row_bytes, groups.sizes[group] // rows))
            self._groups += [(group, at, min(at + most, rows)) for at in range(0, rows, most)]
            ends[groups.places[group][0]] = len(self._groups)
        of_files = zip(groups.files, pairwise(accumulate(ends, max, initial=0)), strict=True)
        segments = [(file.uri, range(first, stop)) for file, (first, stop) in of_files if stop > first]
        self._state([stop - start for _, start, stop in self._groups], segments, row_bytes=row_bytes)

    def _find_schema(self) -> int:
        """Find the schema, by the first readable row group; returns the bytes of a row."""
        failure: RlioError | None = None
        for group in range(len(self._row_groups.rows)):
            try:
                batch = self._agreed.conform(self._first_of(group))
            except (CorruptData, SchemaError) as error:
                failure = failure or error
                continue
            self._adopt(Schema.of(batch, is_written=False))
            return batch.size_bytes() // len(batch)
        assert failure is not None
        raise failure

    def _first_of(self, group: int) -> SampleBatch:
        """The first rows of a row group, with the columns that can be read."""
        rows = min(self._row_groups.rows[group], _SAMPLE_ROWS)
        names = self._row_groups.names(self._row_groups.places[group][0])
        if self._asked is not None:
            names = [name for name in names if name not in RESERVED or name in self._asked]
        try:
            return self._batch(group, 0, rows, frozenset(names))
        except (CorruptData, SchemaError):
            if self._asked is None:
                raise
        found: dict[str, Any] = {}
        for name in names:
            try:
                with self._row_groups.guarded(group):
                    table = self._row_groups.read(group, 0, rows, frozenset([name]))
                    found |= self._decoded(table, group, 0)
            except (CorruptData, SchemaError) as error:
                if name in self._asked:
                    raise
                logger.info("a column that is not requested is left out: %s", error)
        with self._row_groups.guarded(group):
            return self._settled(found)

    @property
    def inputs(self) -> InputFiles:
        """See `GroupFiles`."""
        return self._row_groups.inputs

    def _open_group(self, group: int) -> None:
        self._row_groups.open(self._groups[group][0])

    def _spans(self, groups: range, columns: frozenset[str] | None) -> Iterator[Span]:
        stored = self._stored_of(columns)[1]
        rows = {number: stop for number, _, stop in (self._groups[group] for group in groups)}
        for number, stop in rows.items():
            yield from self._row_groups.spans(number, stored, stop)

    def _stored_of(
        self, columns: frozenset[str] | None
    ) -> tuple[frozenset[str] | None, frozenset[str] | None]:
        """The columns that are wanted, and those of the file that they are made of; None: all."""
        wanted = self._columns if columns is None and self._asked is not None else columns
        wanted = None if self._decodes_all else wanted
        return wanted, None if wanted is None else wanted_columns([*wanted])

    def _read(self, group: int, columns: frozenset[str] | None) -> SampleBatch:
        wanted, stored = self._stored_of(columns)
        number, start, stop = self._groups[group]
        batch = self._batch(number, start, stop, stored)
        for name in () if wanted is None else batch.keys() - wanted:
            del batch[name]
        try:
            self._agreed.conform(batch, wanted)
        except SchemaError as error:
            file, index, _ = self._row_groups.places[number]
            raise_at(error, uri=self._files[file].uri, record=index)
        if "module_id" in batch:
            self._look_for_copies(batch, number, start)
        return batch

    def _batch(self, group: int, start: int, stop: int, stored: frozenset[str] | None) -> SampleBatch:
        """Some rows of a row group, of the columns ``stored``; None: all."""
        with self._row_groups.guarded(group):
            table = self._row_groups.read(group, start, stop, stored)
            return self._settled(self._decoded(table, group, start))

    def _decoded(self, table: Any, group: int, start: int) -> dict[str, Any]:
        columns, names = {}, table.column_names
        extensions = self._row_groups.extensions(group)
        # What packed columns may ask for is shared by all parts of a row group, in any order of reading.
        allowance, spent = self._row_groups.allowance(group, frozenset(names)), self._spent.get(group, {})
        allowance.spend(sum(size for at, (size, _) in spent.items() if at != start))
        allowance.count(sum(values for at, (_, values) in spent.items() if at != start))
        before = allowance.bytes, allowance.values
        try:
            for name in names:
                with in_column(name):
                    values, times = table.column(name).combine_chunks(), self._row_groups.times(group, name)
                    column = (
                        self._column(name, values, extensions, allowance)
                        if times is None
                        else to_times(name, values, times)
                    )
                    if column is not None and name in self._spaces:
                        column = fit_space(column, self._spaces[name], lambda leaf: leaf)
                if column is not None:
                    columns[name] = column
        finally:
            used = before[0] - allowance.bytes, before[1] - allowance.values
            if any(used):
                self._spent.setdefault(group, {})[start] = used
        return columns

    def _column(
        self, name: str, values: Any, extensions: Mapping[str, Extension], allowance: Allowance
    ) -> Any:
        """One column; of lists that differ in length, if the footers or the first rows show that."""
        can_differ = is_lists(values.type) and name != Columns.INFOS and name not in extensions
        if can_differ and name in self._row_groups.unequal:
            return to_lists(name, values, allowance, self._row_groups.unequal[name])
        if name in self._decoder.lists:
            raise SchemaError(f"format_options lists: found {values.type}, expected lists of numbers")
        try:
            return to_column(name, values, extensions, allowance)
        except UnequalLists:
            if self._schemas or not can_differ:
                raise
            self._row_groups.unequal.setdefault(name, ())
            return to_lists(name, values, allowance)

    def _settled(self, columns: dict[str, Any]) -> SampleBatch:
        self._decoder.flags.settle(columns)
        self._decoder.scaling.scale(columns, DEFAULT_POLICY_ID, is_rllibs="module_id" in columns)
        if not columns:
            raise MissingColumn("the file has none of the requested columns, or only null ones")
        return SampleBatch(columns)

    def close(self) -> None:
        """Close all files."""
        self._row_groups.close()

    def _look_for_copies(self, batch: SampleBatch, group: int, start: int) -> None:
        """Warn, once, if an episode ends at two places; RLlib's ids are unique.

        With its defaults, RLlib's recorder writes the rows of earlier calls again.
        """
        if self._ends is None or Columns.EPS_ID not in batch:
            return
        ended = np.zeros(len(batch), np.bool_)
        for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS):
            if name in batch:
                ended |= np.asarray(batch[name], np.bool_)
        for row in np.flatnonzero(ended):
            id_, place = batch[Columns.EPS_ID][row], self._row_groups.place(group, start + int(row))
            first = self._ends.setdefault(id_, place)
            if first != place:
                logger.warning(
                    "episode %s ends in %s, row %d, and in %s, row %d: rows are stored and read twice. "
                    "RLlib's recorder writes earlier rows again; rlio.integrations.rllib does not",
                    *(excerpt(id_), *first, *place),
                )
                self._ends = None
                return
            if len(self._ends) >= _MOST_ENDS:
                self._ends.clear()
