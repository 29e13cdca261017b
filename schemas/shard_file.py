"""A stored Parquet shard, opened: pyarrow receives no byte before a CRC that covers it has matched.

The footer is checked against the CRC in the shard's name. Each row group is checked against the footer's list
when it is read. The schema, and the sizes that the footer declares, are checked against limits before a page
is decoded. The rest depends on pyarrow: a file forged with right CRCs is as safe as pyarrow makes it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.batch.encoded_picture import EncodedPicture, is_encoded
from rlio.errors import CorruptData, UnsafeData, excerpt, raise_at
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.arrow import expanded_bytes, from_arrow
from rlio.schemas.column import ColumnSpec, Nullable, object_rows
from rlio.schemas.frame_pools import Frames, StackPool
from rlio.schemas.group_arrays import (
    BATCH,
    NEXT,
    OLDER,
    STREAM,
    check_stacks,
    file_fields,
    linked_columns,
    nullable_columns,
    stack_specs,
)
from rlio.schemas.info_columns import absent
from rlio.schemas.leaves import Leaf, is_named
from rlio.schemas.nested import nested_leaves
from rlio.schemas.number_arrays import with_nat
from rlio.schemas.observations import MISSING, STORED, SplitStack, own_rows, resolve_links, successors
from rlio.schemas.parquet import GroupInfo
from rlio.schemas.parquet_metadata import MAGIC, read_footer
from rlio.schemas.parquet_statistics import Bounds, bounded_columns, read_bounds
from rlio.schemas.schema import Schema, canonical_json
from rlio.schemas.streams import Streams
from rlio.schemas.text_columns import check_nested, check_texts
from rlio.schemas.zstd_frames import inflate
from rlio.support.forks import cached_property

__all__ = ["DecodedGroup", "ShardFile"]

# Exceptions that a forged file with right CRCs can cause in pyarrow, json and NumPy.
_MALFORMED = (
    pa.ArrowException,
    OSError,
    LookupError,
    ValueError,
    TypeError,
    OverflowError,
    AttributeError,
    RecursionError,
)


# Bytes of a decoded value of fixed size.
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}

# Schemas of at most this many bytes are kept, because most shards of a root have the same one.
_KNOWN_BYTES: Final = 1 << 16


class _Form(NamedTuple):
    """What a footer's schema says of the file; do not modify.

    Attributes:
        schema: The schema.
        fields: Its columns in the file.
        bounded: Number -> name of the columns of Parquet that may have bounds.
        places: Name of a column -> the numbers of its columns of Parquet: a struct has several.
        partial: Columns of which some rows have no value.
        texts: Those that may hold texts.
        is_plain: Whether the rows are of one agent, in no sequences, and without frames that rows share.
    """

    schema: Schema
    fields: pa.Schema
    bounded: Mapping[int, str]
    places: Mapping[str, range]
    partial: Collection[str]
    texts: frozenset[str]
    is_plain: bool


def _form_of(text: bytes, limits: Limits) -> _Form:
    schema = Schema.from_text(text, limits=limits)
    check_stacks(schema)
    fields = pa.schema(file_fields(schema))
    ends = [0, *accumulate(len([*nested_leaves(each)]) for each in fields)]
    places = {each.name: range(*ends[n : n + 2]) for n, each in enumerate(fields)}
    plain = len(schema.policies) == 1 and not (schema.multi_agent or schema.stacked or schema.has_pictures)
    plain = plain and not any(policy.has_sequences for policy in schema.policies.values())
    kinds = {name: spec.kind for name, spec in schema.columns.items()} | {BATCH: "text"}
    texts = frozenset(name for name, kind in kinds.items() if kind in ("text", "json", "nested"))
    bounded, partial = bounded_columns(schema, places), nullable_columns(schema)
    return _Form(schema, fields, bounded, places, partial, texts, plain)


_known_form = lru_cache(maxsize=32)(_form_of)


@lru_cache(maxsize=32)
def _checked_provenance(text: bytes, limits: Limits) -> bytes:
    """The text of a provenance, which is JSON and may be parsed. Most shards of a root have the same one."""
    limits.check_json(text, "a provenance")
    json.loads(text)
    return text


@lru_cache(maxsize=32)
def _canonical(text: bytes) -> str:
    return canonical_json(json.loads(text))


def _reader(source: Any, *, texts: list[str], metadata: Any = None) -> Any:
    """A reader of Parquet. Of columns of ``texts``, it decodes each distinct value once.

    The size of their values over all rows is measured before they are expanded.
    """
    return pq.ParquetFile(source, metadata=metadata, read_dictionary=texts, pre_buffer=False)


@dataclass(frozen=True)
class DecodedGroup:
    """A row group in memory; it owns its arrays, which are writable and not shared.

    Attributes:
        schema: The shard's schema.
        info: Its place in the file, and its counts.
        columns: Physical column -> (values of the rows that have one, mask of these rows or None for all).
        stream: Stream number of each row, shape (rows,).
        policy: Policy id of each stream of the shard.
        distance: The ``_next`` column.
        batches: JSON texts of the written batches that begin here; empty if not requested.
        begins: The first row of each of these batches.
        frames: Physical column of stacks -> their frames; `columns` then holds indices into these frames, see
            `rlio.schemas.folded`.
    """

    schema: Schema
    info: GroupInfo
    columns: dict[str, Nullable]
    stream: NDArray[np.int32]
    policy: Sequence[str]
    distance: NDArray[np.int32]
    batches: list[str]
    begins: NDArray[np.int64]
    frames: dict[str, Frames] = field(default_factory=dict)

    def policies(self) -> dict[str, NDArray[np.int64] | None]:
        """Return the policies with rows here, and the rows of each (None: all)."""
        if len(self.schema.policies) == 1:
            return {next(iter(self.schema.policies)): None}
        known = {pid: number for number, pid in enumerate(sorted(self.schema.policies))}
        number = np.array([known.get(pid, -1) for pid in self.policy], np.int64)[self.stream]
        if len(number) and int(number.min()) < 0:
            raise CorruptData("rows belong to a policy that the schema does not have")
        return {pid: np.flatnonzero(number == known[pid]) for pid in known if (number == known[pid]).any()}

    def values(self, leaf: Leaf, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        """Return the values of one leaf for a policy's rows (or for all its sequences).

        For stacks, returns indices into `frames`.
        """
        if leaf.column == Columns.NEXT_OBS_VALID:
            present = self.distance != MISSING
            return np.asarray(present if rows is None else present[rows], leaf.spec.numpy)
        if leaf.spec.kind == "none":
            count = self.info.rows if rows is None else len(rows)
            return np.empty((count, *leaf.spec.shape), leaf.spec.numpy)
        values, valid = self.columns[leaf.physical]
        if valid is None:
            return values if rows is None else values[rows]
        if rows is None:
            return values
        chosen = np.zeros(self.info.rows, bool)
        chosen[rows] = True
        return values[chosen[valid]]


class ShardFile:
    """An open shard. Not thread-safe.

    Args:
        fetch: Returns the bytes [start, stop) of the shard.
        size: Bytes of the shard, from its name.
        footer_crc32: CRC-32 of its footer, from its name.
        uri: The shard's URI, for messages.
        limits: The most that the shard may ask for.

    Attributes:
        groups: Place and counts of each row group.
        rows, units: Rows, and steps, sequences or joint steps, of each row group.

    Raises:
        CorruptData: The footer is damaged or does not describe a shard.
        UnsafeData: It holds an Arrow schema. rlio never writes one, and its extensions could run code.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], bytes],
        *,
        size: int,
        footer_crc32: int,
        uri: str,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.uri = uri
        self._streams_problem: tuple[type[CorruptData], str] | None = None
        self._limits = limits
        self._fetch = fetch
        self._size = size
        # All bytes of a small shard, which came with its footer, until its rows are decoded.
        self._whole: bytes | None = None
        # Reads the row group of such a shard, if it has one.
        self._reader: Any = None
        footer = self._read_footer(footer_crc32)
        self._footer_start = size - len(footer)
        if b"ARROW:schema" in footer or b"ARROW:extension" in footer:
            raise UnsafeData("the footer holds an Arrow schema, which no shard of rlio has", uri=uri)
        try:
            self._read_metadata(footer)
        except _MALFORMED as error:
            if isinstance(error, MemoryError):
                raise
            if isinstance(error, CorruptData):
                raise_at(error, uri=uri)
            raise CorruptData(
                f"the footer does not describe a shard: {excerpt(repr(error))}", uri=uri
            ) from error

    def _read_metadata(self, footer: bytes) -> None:
        """Read the contents of a checked footer."""
        limits = self._limits
        if self._whole is None:
            self._metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
        else:  # Decodes the footer, which is the checked one, and no page.
            self._reader = _reader(pa.BufferReader(self._whole), texts=[BATCH])
            self._metadata = self._reader.metadata
        written = self._metadata.metadata or {}
        text = written[b"rlio.schema"]
        known = _known_form if len(text) <= _KNOWN_BYTES else _form_of
        self._form = known(text, limits)
        self.schema: Schema = self._form.schema
        self._fields = self._form.fields
        self.groups: list[GroupInfo] = _group_infos(written[b"rlio.groups"], self._metadata.num_row_groups)
        self.rows: list[int] = [info.rows for info in self.groups]
        self.units: list[int] = [info.units for info in self.groups]
        self._provenance = _checked_provenance(written[b"rlio.provenance"], limits)
        self._packed_streams = written[b"rlio.streams"]
        self._check_groups()
        if len(self.groups) != 1:  # Of several groups, pyarrow may have only the bytes of the one it decodes.
            self._reader = None
        found = self._metadata.schema.to_arrow_schema()
        if not found.equals(self._fields):
            raise CorruptData(f"its columns do not match its schema: {excerpt(str(found))}")

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """What made the data; see `rlio.schemas.provenance`."""
        found: dict[str, Any] = json.loads(self._provenance)
        return found

    @property
    def provenance_text(self) -> str:
        """The JSON text of `provenance`, the same however it was written."""
        return _canonical(self._provenance)

    @cached_property
    def _bounds(self) -> list[Mapping[str, Bounds]]:
        return read_bounds(self._metadata, self.schema, self._form.bounded)

    def bounds(self, index: int) -> Mapping[str, Bounds]:
        """Return the least and greatest values of a row group; see `rlio.schemas.parquet_statistics`."""
        return self._bounds[index]

    @cached_property
    def streams(self) -> Streams:
        """The table of streams.

        Raises:
            CorruptData: The table is damaged or unreasonably large.
        """
        if self._streams_problem is not None:  # Do not unpack it again for every row group.
            raise self._streams_problem[0](self._streams_problem[1], uri=self.uri)
        try:
            packed = base64.b64decode(self._packed_streams, validate=True)
            return Streams.from_text(
                inflate(packed, most=self._limits.streams_bytes, limits=self._limits), rows=sum(self.rows)
            )
        except (ValueError, RecursionError) as error:
            kind = type(error) if isinstance(error, CorruptData) else CorruptData
            text = str(error) if isinstance(error, CorruptData) else excerpt(repr(error))
            self._streams_problem = kind, f"the table of streams is damaged: {text}"
        # Outside the handler, so the error does not keep the unpacked bytes alive.
        raise self._streams_problem[0](self._streams_problem[1], uri=self.uri)

    def read_group(
        self, index: int, *, columns: Sequence[str] | None = None, batches: bool = False
    ) -> DecodedGroup:
        """Check and decode one row group.

        Args:
            index: Number of the group.
            columns: Logical columns, or parts of them (``obs/camera``), to decode; None: all.
            batches: Whether to decode the starts of written batches.

        Raises:
            CorruptData: Its bytes fail their CRC or do not fit the schema; ``record`` is the group's number.
            MissingColumn: No policy of this shard has one of ``columns``.
        """
        info, wanted = self.groups[index], self._wanted(columns)
        table = self._table(index, wanted, batches)
        with self._damage_of(index):
            arrays = _arrays(table)
            _check_streams(arrays[STREAM].to_numpy(), len(self.streams))
            return self._assemble(info, arrays, wanted, self.streams.policy)

    @property
    def form(self) -> object | None:
        """What shards must share to be decoded together, see `read_joined`; None: this one cannot be."""
        return self._form if self._form.is_plain and self._reader is not None else None

    @property
    def held(self) -> bytes:
        """All bytes of a small shard, which came with its footer, until they are decoded; else none."""
        return self._whole or b""

    @property
    def held_bytes(self) -> int:
        """Bytes of the shard that this object keeps until they are decoded."""
        return len(self.held)

    @staticmethod
    def read_joined(files: Sequence[ShardFile], *, columns: Sequence[str] | None = None) -> DecodedGroup:
        """Decode the rows of shards of one `form` as one group: each group costs as much as many rows.

        Raises:
            CorruptData: One of them is damaged: read them one by one.
            MissingColumn: See `read_group`.
        """
        first = files[0]
        wanted = first._wanted(columns)
        tables = [file._table(0, wanted, True) for file in files]
        infos = [file.groups[0] for file in files]
        with first._damage_of(0):
            rows = np.array([info.rows for info in infos])
            policies = [file.streams.policy for file in files]
            known = np.array([len(each) for each in policies])
            arrays = _arrays(pa.concat_tables(tables))
            stream, distance = arrays[STREAM].to_numpy(), arrays[NEXT].to_numpy()
            _check_streams(stream, np.repeat(known, rows))
            ends = np.repeat(np.cumsum(rows), rows)
            if (np.arange(len(ends)) + distance >= ends).any():
                raise CorruptData("a link in _next leaves its row group")
            arrays[STREAM] = pa.array(stream + np.repeat(np.cumsum(known) - known, rows).astype(np.int32))
            units, env_steps = sum(info.units for info in infos), sum(info.env_steps for info in infos)
            info = GroupInfo(0, 0, 0, len(ends), units, env_steps)
            return first._assemble(info, arrays, wanted, [*chain.from_iterable(policies)])

    def _bytes_of(self, info: GroupInfo) -> bytes:
        """The bytes of a row group, which are checked and not kept.

        Raises:
            CorruptData: They do not match their CRC-32.
        """
        whole, self._whole = self._whole, None
        # Failures of the store are not damage: they pass through unchanged.
        data = self._fetch(info.start, info.stop) if whole is None else whole[info.start : info.stop]
        if len(data) != info.stop - info.start or zlib.crc32(data) != info.crc32:
            raise CorruptData(
                f"the bytes of the row group do not match their CRC-32; its {info.rows} rows are lost",
                uri=self.uri,
                record=self.groups.index(info),
            )
        return data

    @contextlib.contextmanager
    def _damage_of(self, index: int) -> Iterator[None]:
        """Name the row group in errors, and make those of a forged one `CorruptData`."""
        try:
            yield
        except _MALFORMED as error:
            if isinstance(error, MemoryError) or (isinstance(error, CorruptData) and error.uri):
                raise
            kind = UnsafeData if isinstance(error, UnsafeData) else CorruptData
            text = str(error) if isinstance(error, CorruptData) else excerpt(str(error))
            raise kind(f"the row group is damaged: {text}", uri=self.uri, record=index) from error

    def _read_footer(self, footer_crc32: int) -> bytes:
        """Return the footer's bytes, checked: metadata, its length, and the closing magic."""

        def fetch(start: int, stop: int) -> bytes:
            data = self._fetch(start, stop)
            self._whole = data if start == 0 else None
            return data

        try:
            footer = read_footer(fetch, self._size, limits=self._limits)
        except CorruptData as error:
            raise_at(error, uri=self.uri)
        if zlib.crc32(footer) != footer_crc32:
            raise CorruptData(
                "the footer does not match the CRC-32 in the shard's name; none of its rows can be trusted",
                uri=self.uri,
            )
        return footer

    def _check_groups(self) -> None:
        """Check that the row groups tile the file, and match the metadata and the schema."""
        position, limits = 0, self._limits
        row_bytes = self.schema.group_row_bytes
        for index, info in enumerate(self.groups):
            rows = self._metadata.row_group(index).num_rows
            if info.start != position or info.stop <= info.start or rows != info.rows:
                raise CorruptData(f"the list of row groups does not fit the file, from group {index} on")
            if not 0 < info.units <= info.rows or info.env_steps < 0:
                raise CorruptData(f"{info.units} units and {info.env_steps} env steps in {info.rows} rows")
            if info.rows * row_bytes > limits.group_bytes or info.rows > limits.group_rows:
                raise UnsafeData(
                    f"a row group of {info.rows} rows and {info.rows * row_bytes} bytes: at most "
                    f"{limits.group_rows} and {limits.group_bytes}"
                )
            position = info.stop
        if position != self._footer_start:
            raise CorruptData("some bytes belong to no row group")

    def _wanted(self, columns: Sequence[str] | None) -> list[Leaf]:
        """Return the leaves to decode, of every policy."""
        leaves = [leaf for policy in self.schema.policies.values() for leaf in policy.leaves]
        if columns is None:
            return leaves
        self.schema.check_columns(columns, uri=self.uri)
        names = frozenset(columns)
        return [leaf for leaf in leaves if is_named(leaf, names)]

    def _table(self, index: int, wanted: list[Leaf], batches: bool) -> Any:
        """Check and decode the bytes of one group: the columns that the leaves need."""
        info = self.groups[index]
        # It decodes the bytes that came with the footer, which are checked now; later calls fetch others.
        reader, self._reader = self._reader, None
        data = self._bytes_of(info)
        with self._damage_of(index):
            chosen = self._chosen(wanted, batches)
            texts = self._checked_chunks(index, chosen)
            if reader is None or texts != [BATCH]:
                file = pa.PythonFile(_GroupBytes(data, info.start, self._size), mode="r")
                reader = _reader(file, texts=texts, metadata=self._metadata)
            table = reader.read_row_group(
                index,
                columns=None if len(chosen) == len(self._fields) else chosen,
                # A thread of Arrow may drop its buffers after the table is returned. It cannot free Python's
                # memory while the interpreter exits: the process would abort.
                use_threads=False,
            )
            if table.num_rows != info.rows:
                raise CorruptData(f"found {table.num_rows} rows, the footer lists {info.rows}")
            # Forged pages may decode to arrays that break Arrow's rules, and all later code relies on these.
            table.validate(full=True)
            return table

    def _chosen(self, wanted: list[Leaf], batches: bool) -> list[str]:
        """The columns of the file to decode."""
        names = {leaf.physical for leaf in wanted}
        links = {new.physical: obs.physical for p in self.schema.policies.values() for obs, new in p.linked}
        names |= {links[name] for name in names if name in links}
        names |= {name + OLDER for name in names}
        names |= {NEXT, STREAM} | ({BATCH} if batches else set())
        return [name for name in self._fields.names if name in names]

    def _checked_chunks(self, index: int, names: Sequence[str]) -> list[str]:
        """Refuse columns of a group that exceed the limits; returns those with a dictionary of texts.

        A dictionary has one value once, however many lists have it.
        """
        group, limits = self._metadata.row_group(index), self._limits
        unpacked = decoded = stored = 0
        texts = []
        for name in names:
            has_texts = name in self._form.texts
            for number in self._form.places[name]:
                chunk = group.column(number)
                kind = chunk.physical_type
                unpacked += chunk.total_uncompressed_size
                decoded += _WIDTHS.get(kind, 0) * chunk.num_values
                stored += chunk.total_compressed_size
                if has_texts and kind == "BYTE_ARRAY" and chunk.has_dictionary_page:
                    texts.append(chunk.path_in_schema)
        if decoded > limits.group_bytes:
            raise UnsafeData(f"values of {decoded} bytes in one row group, more than {limits.group_bytes}")
        if unpacked > limits.group_bytes:
            raise UnsafeData(
                f"columns of {unpacked} bytes in one row group, more than {limits.group_bytes}; raise "
                "Limits.group_bytes if the data are yours"
            )
        limits.check_inflation(stored, unpacked, "a row group")
        return texts

    def _is_text(self, name: str) -> bool:
        spec = self.schema.columns.get(name)
        return name == BATCH if spec is None else spec.kind in ("text", "json")

    def _measured_text(self, name: str, array: pa.Array) -> pa.DictionaryArray:
        """Measure a column of texts before each value is expanded over the rows that have it."""
        if not pa.types.is_dictionary(array.type):
            array = array.dictionary_encode()
        spec = self.schema.columns.get(name)
        if spec is not None:
            check_texts(array, spec, name, self._limits)
        elif (size := expanded_bytes(array)) > self._limits.group_bytes:
            raise UnsafeData(f"a column of {size} bytes of text", uri=self.uri, column=name)
        return array

    def _assemble(
        self, info: GroupInfo, decoded: dict[str, pa.Array], wanted: list[Leaf], policy: Sequence[str]
    ) -> DecodedGroup:
        """Build the columns from the decoded arrays, with observations rebuilt."""
        texts = {name: self._measured_text(name, decoded[name]) for name in decoded if self._is_text(name)}
        decoded = {**decoded, **texts}
        stream, distance = decoded[STREAM].to_numpy(), decoded[NEXT].to_numpy()
        for name, spec in self.schema.columns.items():
            if name in decoded and spec.structure is not None:
                padding = 4 if spec.structure.has_padding else 0
                check_nested(decoded[name], name, self._limits, padding=padding)
        columns: dict[str, Nullable] = {}
        frames: dict[str, Frames] = {}
        if self.schema.stacked:
            columns, frames = _read_stacks(decoded, self.schema, successors(stream))
        partial = self._form.partial
        for name, spec in self.schema.columns.items():
            if name in decoded and name not in columns:
                array = decoded[name]
                columns[name] = from_arrow(array if name in partial else with_nat(array, spec), spec)
        _add_masks(columns, self.schema, info.rows)
        group = DecodedGroup(
            self.schema,
            info,
            columns,
            stream,
            policy,
            distance,
            *_batches(decoded.get(BATCH)),
            frames,
        )
        linked = set(linked_columns(self.schema)) & {leaf.physical for leaf in wanted}
        return _with_next_observations(group, linked) if linked else group


def _add_masks(columns: dict[str, Nullable], schema: Schema, rows: int) -> None:
    """Give columns of infos a value for every row, and add their masks."""
    for name, mask in schema.masks.items():
        if name not in columns:
            continue
        values, valid = columns[name]
        if valid is not None:
            every = absent(schema.columns[name], rows)
            every[valid] = values
            columns[name] = every, None
        has = np.ones(rows, np.bool_) if valid is None else valid
        # Policies with values of several types share the mask.
        before, _ = columns.get(mask, (None, None))
        columns[mask] = has if before is None else before | has, None
    for name in schema.rests & columns.keys():
        values, valid = columns[name]
        if valid is not None:
            left = np.full(rows, None, object)
            left[valid] = values
            columns[name] = left, None
        for value in values.tolist():
            if not isinstance(value, dict | tuple):
                raise CorruptData(f"found {excerpt(value)} as what is left of an info", column=name)


def _group_infos(written: bytes, count: int) -> list[GroupInfo]:
    """Return the footer's list of row groups, which must have ``count`` entries."""
    if written.count(b"[") > count + 1 or written.count(b",") > 6 * count + 6 or written.count(b"{"):
        raise CorruptData(f"{count} row groups, but the footer lists {excerpt(written)}")
    listed = json.loads(written)
    if not isinstance(listed, list) or len(listed) != count:
        raise CorruptData(f"{count} row groups, but the footer lists {excerpt(written)}")
    infos = [GroupInfo(*entry) for entry in listed]
    if not all(type(value) is int for info in infos for value in info):
        raise CorruptData(f"the list of row groups holds other values than integers: {excerpt(written)}")
    return infos


def _read_stacks(
    decoded: dict[str, pa.Array], schema: Schema, following: NDArray[np.int64]
) -> tuple[dict[str, Nullable], dict[str, Frames]]:
    """Return the indices of stacks, for every row (obs) and for stored ones (new_obs), and their frames."""
    columns: dict[str, Nullable] = {}
    frames: dict[str, Frames] = {}
    for name, (new_name, stack) in schema.stacked.items():
        if name not in decoded:
            continue
        split, _ = _split(decoded, schema, name)
        following_split, valid = _split(decoded, schema, new_name) if new_name in decoded else (None, None)
        stored = np.arange(len(following)) if valid is None else np.flatnonzero(valid)
        pool = StackPool.of_split(split, following_split, stack=stack, following=following, stored=stored)
        columns[name], frames[name] = (pool.obs, None), pool.frames
        if following_split is not None:
            columns[new_name], frames[new_name] = (pool.new_obs, valid), pool.frames
    return columns, frames


def _split(
    decoded: dict[str, pa.Array], schema: Schema, name: str
) -> tuple[SplitStack, NDArray[np.bool_] | None]:
    """Return a stacked column as stored, and a mask of rows with a value, or None for all."""
    newest_spec, older_spec = stack_specs(schema.columns[name])
    newest, valid = from_arrow(decoded[name], newest_spec)
    older, full = from_arrow(decoded[name + OLDER], older_spec)
    full = np.ones(len(decoded[name]), bool) if full is None else full
    return SplitStack(newest, older, full if valid is None else full[valid]), valid


def _with_next_observations(group: DecodedGroup, linked: set[str]) -> DecodedGroup:
    """Replace the stored rows of new_obs with the values of all rows, following the links."""
    columns, frames = dict(group.columns), dict(group.frames)
    rows_of = group.policies()
    if len(group.schema.policies) > 1:
        columns |= {name: _joint_next(group, name, rows_of) for name in linked}
        return replace(group, columns=columns)
    own = group.distance == STORED
    for obs, new_obs in next(iter(group.schema.policies.values())).linked:
        name = new_obs.physical
        if name not in linked:
            continue
        values, valid = group.columns[name]
        if not (own.all() if valid is None else np.array_equal(own, valid)):
            raise CorruptData("an observation is stored where _next says it is not, or the reverse")
        blank: Any = _blank(obs.spec, group.columns[obs.physical][0])
        if name in frames and (group.distance == MISSING).any():
            blank = len(frames[name])
            frames[name] = frames[name].with_blank()
        columns[name] = (
            resolve_links(group.distance, group.columns[obs.physical][0], values, blank=blank),
            None,
        )
    return replace(group, columns=columns, frames=frames)


def _blank(spec: ColumnSpec, *columns: NDArray[Any]) -> Any:
    """Return the value of an observation that is missing: zeros, no picture, or no items."""
    if spec.kind in ("ragged", "nested"):
        return spec.empty_row
    return next((column[0].none() for column in columns if is_encoded(column)), 0)


def _joint_next(group: DecodedGroup, name: str, rows_of: dict[str, NDArray[np.int64] | None]) -> Nullable:
    """Return ``new_obs`` of the rows of all policies that have this physical column, linked or not."""
    rows = group.info.rows
    has, linked = np.zeros(rows, bool), np.zeros(rows, bool)
    obs_values, obs_valid = np.empty(0), None
    for pid, own in rows_of.items():
        policy = group.schema.policies[pid]
        has[own] |= name in {leaf.physical for leaf in policy.leaves}
        for obs, target_leaf in policy.linked:
            if target_leaf.physical == name:
                linked[own] = True
                obs_values, obs_valid = group.columns[obs.physical]
    stored = has & ~(linked & (group.distance != STORED))
    values, valid = group.columns[name]
    if not np.array_equal(stored, np.ones(rows, bool) if valid is None else valid):
        raise CorruptData("an observation is stored where _next says it is not, or the reverse")
    blank = _blank(group.schema.columns[name], values, obs_values)
    if values.dtype == object and not isinstance(blank, EncodedPicture):
        new_obs = object_rows([own_copy(blank) for _ in range(rows)])
    else:
        new_obs = np.full((rows, *values.shape[1:]), blank, values.dtype)
    new_obs[stored] = values
    elided = np.flatnonzero(linked & (group.distance > 0))
    if len(elided):
        target = elided + group.distance[elided]
        known = np.ones(rows, bool) if obs_valid is None else obs_valid
        if int(target.max()) >= rows or not known[target].all():
            raise CorruptData("a link in _next leads to a row without that observation")
        new_obs[elided] = obs_values[(np.cumsum(known) - 1)[target]]
        new_obs = own_rows(new_obs, linked & (group.distance > 0))
    return new_obs[has], has


class _GroupBytes:
    """One row group's bytes at their place in a file, with the methods that `pyarrow.PythonFile` calls."""

    def __init__(self, data: bytes, start: int, size: int) -> None:
        self._data = memoryview(data)
        self._start = start
        self._size = size
        self._position = 0
        self.closed = False

    def read(self, size: int = -1) -> memoryview:
        first = self._position - self._start
        last = len(self._data) if size < 0 else first + size
        if first < 0 or last > len(self._data):
            raise OSError("the footer refers to bytes outside the row group")
        self._position += last - first
        return self._data[first:last]

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self.closed = True


def _batches(array: Any) -> tuple[list[str], NDArray[np.int64]]:
    """Return the texts of the written batches that begin in a group, and their rows; empty for None."""
    if array is None:
        return [], np.empty(0, np.int64)
    has = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool)
    return array.drop_null().to_pylist(), np.flatnonzero(has)


def _check_streams(stream: NDArray[np.int32], known: NDArray[np.int64] | int) -> None:
    """Check that each row belongs to one of the ``known`` streams."""
    if ((stream < 0) | (stream >= known)).any():
        raise CorruptData("a row belongs to no stream")


def _arrays(table: Any) -> dict[str, pa.Array]:
    return {name: _one_chunk(table.column(name)) for name in table.column_names}


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.unify_dictionaries().chunks)
