"""`ForeignParquetReader`: Parquet files from other programs, with one row a step or one row a batch.

One row a step is the common form, also of RLlib's new recordings and of any data frame: numbers, lists,
structs and text become columns. RLlib's older dataset writer wrote one row a batch; such rows are records, as
in its JSON (`rlio.readers.rllib_json`).

The files are untrusted: row groups are read one at a time and within limits, and extension types run no code
(`rlio.readers.parquet_footer`). rlio's own data sets have another reader (`rlio.readers.dataset_reader`).

Example:
    >>> import io
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> from rlio.storage import Storage
    >>> stream = io.BytesIO()
    >>> pq.write_table(pa.table({"obs": [[0.5, 1.0], [1.5, 2.0]], "dones": [False, True]}), stream)
    >>> Storage.open("memory://foreign-example").put("a.parquet", stream.getvalue())
    >>> with ForeignParquetReader("memory://foreign-example", epochs=1) as reader:
    ...     reader.sample()
    SampleBatch(2 steps: obs float64 (2, 2), terminateds bool (2,))
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar, Unpack

import numpy as np

from rlio.batch import Batch, SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.dataset.step_columns import check_step_columns
from rlio.errors import (
    CorruptData,
    MissingColumn,
    OptionError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
    excerpt,
)
from rlio.formats.format import format_of_columns
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.arrow_columns import is_pickled, load_pickled, to_column
from rlio.readers.inputs import (
    Cursor,
    Failures,
    RecordCursor,
    StoredReader,
    TableCursor,
    find_files,
    in_column,
    raise_at,
)
from rlio.readers.packed import Allowance
from rlio.readers.parquet_files import ParquetFiles
from rlio.readers.parquet_footer import Extension, registered_extensions
from rlio.readers.read_options import ReadKeywords, ReadOptions
from rlio.readers.rllib_json import (
    STEP_NUMBERS,
    RllibDecoder,
    check_asked,
    wanted_columns,
)
from rlio.readers.space_arrays import Spaces, fit_space, space_of
from rlio.source.uniform import Agreed
from rlio.storage import InputFile
from rlio.storage.filesystem import StrPath
from rlio.support.options import check_choice, checked_keywords

__all__ = ["ForeignParquetReader", "RowGroups"]

logger: logging.Logger = logging.getLogger("rlio")

T = TypeVar("T")

_SUFFIXES = (".parquet",)
# Ends of episodes that are remembered at once.
_MOST_ENDS = 100_000
_FIRST_ROWS = 64
#: Columns that are lists where a row is a batch.
_RECORD_LISTS = (*STEP_NUMBERS, Columns.ACTIONS)


class ForeignParquetReader(StoredReader):
    """Reads Parquet files that rlio did not write.

    Lists of one length become arrays, and structs nested columns. RLlib's packed text becomes the arrays in
    it; other text and ``infos`` become object arrays. Columns of Arrow's type null are left out. Nulls among
    floats become NaN, as pandas writes them. Legacy ``dones`` become ``terminateds``. Without ``batch_size``,
    `sample` serves a row group (a rank's share of it), or a record, if rows are batches.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        inputs: A file, folder, glob or URI, or a list of those. In folders, every ``*.parquet`` is read.
        spaces: (observation space, action space), or policy id -> such a pair: gives obs, new_obs, actions
            and prev_actions their structure and dtypes.
        unnormalise_actions: As for `rlio.JsonReader`.
        format_options: As for `rlio.JsonReader`. ``{"infos": "obs"}`` needs rows that are batches.
        extension_types: What to do with columns of an Arrow extension type that a library (Ray, for example)
            has registered in this process. ``"refuse"`` them, because that library may read more out of them
            than is stored; or read their ``"storage"``, as for types that are not registered. The library's
            code never runs.
        limits: Limits on the files' demands.
        storage_options: Keywords of the fsspec filesystem.
        keywords: ``batch_size``, ``epochs``, ``shuffle``, ``seed``, ``shard``, ``columns``, ``on_error`` and
            ``drop_last``: see `ReadOptions`.

    Raises:
        DataNotFound: ``inputs`` name no file, or the files hold no row.
        OptionError: An option is illegal, or a file is a shard of one of rlio's own data sets.
        CorruptData: A file is not a Parquet file. (UnsafeData: it asks for more than data may.)
        SchemaError: A column cannot become a batch column, or differs from that of the first file.
    """

    @checked_keywords
    def __init__(
        self,
        inputs: StrPath | Sequence[StrPath],
        *,
        spaces: Spaces | None = None,
        unnormalise_actions: bool | None = None,
        format_options: Mapping[str, Any] | None = None,
        extension_types: Literal["refuse", "storage"] = "refuse",
        limits: Limits = DEFAULT_LIMITS,
        storage_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> None:
        options = ReadOptions.of(keywords)
        check_choice("extension_types", extension_types, ("refuse", "storage"))
        files = find_files(inputs, suffixes=_SUFFIXES, storage_options=storage_options, limits=limits)
        self._groups = RowGroups(files, limits, options.columns, refuse=extension_types == "refuse")
        decoder = RllibDecoder(
            options.columns,
            spaces=spaces,
            limits=limits,
            unnormalise_actions=unnormalise_actions,
            format_options=format_options,
            source=files[0].uri,
        )

        def make_cursor(seed: int, failures: Failures) -> Cursor:
            self._groups.index(failures)
            if self._groups.rows_are_batches:
                records = _BatchRows(self._groups, options, decoder)
                return RecordCursor(records, options, seed=seed, failures=failures)
            if decoder.infos.given == "obs":
                raise OptionError(
                    "format_options={'infos': 'obs'}: rows are single steps, whose infos the reader does not "
                    "move to other rows: leave it out, and move them in a function (rlio.MappedInput)",
                    uri=files[0].uri,
                )
            steps = _StepRows(self._groups, options, spaces, decoder)
            return TableCursor(steps, options, seed=seed, failures=failures)

        details = {
            **decoder.details,
            "extension_types": extension_types,
            "max_group_bytes": limits.group_bytes,
        }
        try:
            super().__init__(options, files, make_cursor, details=details)
        except BaseException:
            self._groups.close()
            raise

    def _close(self) -> None:
        super()._close()
        self._groups.close()


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
        self._parquet = ParquetFiles(files, limits)
        self._limits = limits
        self._asked = columns
        self._refuse = refuse
        self._mapped = mapped
        self.rows_are_batches: bool = False
        #: (file, row group in it, number of the group's first row in the file).
        self.places: list[tuple[int, int, int]] = []
        self.rows: list[int] = []
        self.sizes: list[int] = []
        #: For each row group: the names and types of its file's columns.
        self.kinds: list[Hashable] = []

    def index(self, failures: Failures) -> None:
        """Read the footers."""
        self.places, self.rows, self.sizes, self.kinds = [], [], [], []
        kinds: set[bool] = set()
        for number in range(len(self._parquet.files)):
            try:
                kind = self._parquet.guarded(number, None, partial(self._index, number))
            except (CorruptData, SchemaError) as error:
                failures.handle(error)
                continue
            if kinds and kind not in kinds:
                raise SchemaError(
                    "some files have one row a step and others one row a batch: read them with two readers",
                    uri=self._parquet.files[number].uri,
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
                uri=self._parquet.files[number].uri,
            )
        if len(set(schema.names)) < len(schema.names):
            raise SchemaError("found two columns of one name: expected each name once")
        found = None if self._mapped else format_of_columns(schema.names)
        if found is not None and found.name != "rllib-parquet":
            raise found.refusal(uri=self._parquet.files[number].uri)
        first, columns = 0, (tuple(schema.names), tuple(map(str, schema.types)))
        for group in range(metadata.num_row_groups):
            info = metadata.row_group(group)
            if info.num_rows:
                self.places.append((number, group, first))
                self.rows.append(info.num_rows)
                self.sizes.append(max(info.total_byte_size, 1))
                self.kinds.append(columns)
            first += info.num_rows
        if self._mapped:
            return False
        rows_are_batches = _rows_are_batches(schema)
        if not rows_are_batches and self._asked is None:
            check_step_columns(schema.names, uri=self._parquet.files[number].uri)
        return rows_are_batches

    def names(self, number: int) -> list[str]:
        """The columns of a file."""
        names: list[str] = self._parquet.file(number).arrow.schema_arrow.names
        return names

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

    def read(
        self, group: int, start: int, stop: int, columns: frozenset[str] | None, use: Callable[[Any], T]
    ) -> T:
        """Apply ``use`` to the Arrow table of some rows of a group; errors name the file and group."""
        number, index, _ = self.places[group]
        rows = partial(self._parquet.rows, number, index, start, stop, columns)
        return self._parquet.guarded(number, index, lambda: use(rows()))

    def whole(self, group: int) -> Any:
        """The Arrow table of all rows of a group. The last one is kept."""
        number, index, _ = self.places[group]
        return self._parquet.guarded(number, index, partial(self._parquet.group, number, index))

    def allowance(self, group: int, columns: frozenset[str] | None) -> Allowance:
        """The memory allowance for all packed columns of the group together."""
        number, index, _ = self.places[group]
        found = self._parquet.file(number).columns(index, columns)
        return Allowance(self._limits, stored=sum(chunk.total_compressed_size for _, chunk in found))

    def extensions(self, group: int) -> Mapping[str, Extension]:
        """Extension types of the group's file."""
        return self._parquet.file(self.places[group][0]).extensions

    def agreed(self, options: ReadOptions, first_of: Callable[[int], Batch]) -> Agreed:
        """The common columns of batches, of which ``first_of`` gives the first of a row group."""

        def firsts() -> Iterator[tuple[str, Batch]]:
            seen: set[Hashable] = set()
            for group, kind in enumerate(self.kinds):
                # Damage is reported when the rows are served.
                with contextlib.suppress(CorruptData, SchemaError):
                    if kind not in seen and len(batch := first_of(group)):
                        seen.add(kind)
                        yield self.place(group, 0)[0], batch

        return Agreed(options, firsts, several=len(set(self.kinds)) > 1)

    def place(self, group: int, row: int) -> tuple[str, int]:
        """URI of the file, and the number of the row in it."""
        number, _, first = self.places[group]
        return self._parquet.files[number].uri, first + row

    def close(self) -> None:
        self._parquet.close()


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


class _BatchRows:
    """Rows that are batches; a `RecordSource`."""

    def __init__(self, groups: RowGroups, options: ReadOptions, decoder: RllibDecoder) -> None:
        self._groups = groups
        self._decoder = decoder
        self._ends = list(accumulate(groups.rows))
        self._agreed = groups.agreed(options, partial(self._decode, row=0))

    def has(self, index: int) -> bool:
        return index < self.count()

    def count(self) -> int:
        return self._ends[-1] if self._ends else 0

    def close(self) -> None:
        """Do nothing: the row groups are the reader's."""

    def load(self, index: int) -> Batch:
        group = bisect_right(self._ends, index)
        row = index - (self._ends[group - 1] if group else 0)
        try:
            return self._agreed.conform(self._decode(group, row))
        except (CorruptData, SchemaError) as error:
            uri, record = self._groups.place(group, row)
            raise_at(error, uri=uri, record=record)

    def _decode(self, group: int, row: int) -> Batch:
        try:
            record = self._record(group, row)
            return self._decoder.decode_record(record, following=partial(self._next_record, group, row))
        except UnknownLayout as error:
            uri, number = self._groups.place(group, row)
            raise_at(error, uri=uri, record=number)

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


class _StepRows:
    """Rows that are steps; a `TableSource`."""

    def __init__(
        self, groups: RowGroups, options: ReadOptions, spaces: Spaces | None, decoder: RllibDecoder
    ) -> None:
        self._groups = groups
        self._asked = options.columns
        self._wanted = wanted_columns(options.columns)
        self._spaces = space_of(spaces, DEFAULT_POLICY_ID)
        self._decoder = decoder
        self.rows: Sequence[int] = groups.rows
        self.sizes: Sequence[int] = groups.sizes
        self._agreed = groups.agreed(options, self._first_of)
        # Where the episodes end; None: it is known that rows are stored twice.
        self._ends: dict[Hashable, tuple[str, int]] | None = {}

    def load(self, group: int, start: int, stop: int) -> SampleBatch:
        def use(table: Any) -> SampleBatch:
            batch = self._batch(table, group)
            self._agreed.conform(batch)
            if "module_id" in batch:
                self._look_for_copies(batch, group, start)
            return batch

        return self._groups.read(group, start, stop, self._wanted, use)

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
            id_, place = batch[Columns.EPS_ID][row], self._groups.place(group, start + int(row))
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

    def _first_of(self, group: int) -> SampleBatch:
        """Decode the first rows of a row group."""
        use = partial(self._batch, group=group)
        return self._groups.read(group, 0, min(self.rows[group], _FIRST_ROWS), self._wanted, use)

    def _batch(self, table: Any, group: int) -> SampleBatch:
        columns = {}
        extensions, allowance = self._groups.extensions(group), self._groups.allowance(group, self._wanted)
        for name in table.column_names:
            with in_column(name):
                column = to_column(name, table.column(name).combine_chunks(), extensions, allowance)
                if column is not None and name in self._spaces:
                    column = fit_space(column, self._spaces[name], lambda leaf: leaf)
            if column is not None:
                columns[name] = column
        self._decoder.flags.settle(columns)
        is_rllibs = "module_id" in table.column_names
        self._decoder.scaling.scale(columns, DEFAULT_POLICY_ID, is_rllibs=is_rllibs)
        check_asked(self._asked, columns)
        if not columns:
            raise MissingColumn("the file has none of the requested columns, or only null ones")
        return SampleBatch(columns)
