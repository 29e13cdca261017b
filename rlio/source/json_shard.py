"""Stored JSON shards, opened: each line is a group, and damage costs only its own line.

A ``.jsonl`` shard is lines. A ``.jsonl.zst`` shard has one zstd frame per line, including the line end;
``zstd -d`` turns it into the same lines. Opening reads the shard once and remembers where its lines are.
Reading fetches the wanted lines and checks each line's own CRC.

Example:
    >>> shard = JsonShard(storage, ref, schema_lookup(storage))              # doctest: +SKIP
    >>> shard.read(0)                                                        # doctest: +SKIP
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import numpy as np
import zstandard

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.catalog.listing import ShardRef, load_shard
from rlio.catalog.names import schema_path
from rlio.catalog.rows import cut_rows
from rlio.errors import CorruptData, DataNotFound, UnsafeData, raise_at
from rlio.schemas.batches import pictures_decoded
from rlio.schemas.folded import Folded
from rlio.schemas.json_lines import (
    LineHead,
    SchemaLookup,
    decode_line,
    is_intact,
    is_provenance,
    parse_head,
    parse_provenance,
    written_at,
)
from rlio.schemas.parquet_statistics import Bounds
from rlio.schemas.schema import Schema
from rlio.schemas.streams import TABLE_COLUMNS, Streams, StreamTable, Times
from rlio.schemas.zstd_frames import begin, inflate
from rlio.source.videos import Videos
from rlio.storage.filesystem import Storage

__all__ = ["MAX_JSON_SHARD_BYTES", "JsonShard", "schema_lookup"]

#: Opening a shard holds it in memory, so writers make none that readers refuse by default.
MAX_JSON_SHARD_BYTES: Final = 1 << 30

_MAX_LINES = 4_000_000
_FREE_LINES = 1000
# How many lines of a fully unreadable shard are examined for the reason.
_LOOKED_AT = 10
# A small shard stays in memory. From a large one, this much is fetched at once, so consecutive remote lines
# cost one request.
_HELD_BYTES = 8 << 20
_BLOCK_BYTES = 4 << 20
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_HEAD_BYTES = 512


def schema_lookup(storage: Storage) -> SchemaLookup:
    """Return a function from hash to schema for the data set at ``storage``; it reads each schema once.

    The function raises CorruptData if the schema's file is damaged or missing.
    """
    return cache(partial(_read_schema, storage))


def _read_schema(storage: Storage, name: str) -> Schema:
    path = schema_path(name)
    uri = storage.uri_of(path)
    try:
        text = storage.read(path, limit=storage.limits.schema_bytes)
        schema = Schema.from_text(text, uri=uri, limits=storage.limits)
    except DataNotFound as error:
        raise CorruptData("a line needs this schema, which is not there: restore it", uri=uri) from error
    if schema.hash != name:
        raise CorruptData(f"the schema's hash is {schema.hash}: the file is damaged", uri=uri)
    return schema


@dataclass(frozen=True)
class _Line:
    """The place and the content of a line.

    Attributes:
        number: Number of the line in its file, from 0.
        start, stop: Byte range, including the line end or zstd frame.
        head: The parsed beginning of the line; None if it is unreadable.
        is_damaged: Whether its CRC is known to fail.
    """

    number: int
    start: int
    stop: int
    head: LineHead | None
    is_damaged: bool = False


class JsonShard:
    """A JSON shard; see `rlio.source.shards.OpenShard`.

    Args:
        storage: The data set's root.
        ref: The shard.
        schemas: Returns the schema of a hash; see `schema_lookup`.
        keeps_pictures: See `rlio.source.source.Source`.
        videos: Those of the root; None: the shard has its own.

    Raises:
        CorruptData: No line is readable, or the shard holds other rows than its name says.
        UnsafeData: The shard is too large to open.
    """

    def __init__(
        self,
        storage: Storage,
        ref: ShardRef,
        schemas: SchemaLookup,
        *,
        keeps_pictures: bool = False,
        videos: Videos | None = None,
    ) -> None:
        self.keeps_pictures: bool = keeps_pictures
        self._videos = videos or Videos(storage)
        self.uri: str = storage.uri_of(ref.path)
        self._storage = storage
        self._limits = storage.limits
        self._ref = ref
        self._packed = ref.name.suffix == "jsonl.zst"
        if ref.name.size > self._limits.shard_bytes:
            raise UnsafeData(
                f"a JSON shard of {ref.name.size} bytes, more than {self._limits.shard_bytes}", uri=self.uri
            )
        data = load_shard(storage, ref)
        # Bytes of the shard in memory, and their first position.
        self._block = data if len(data) <= _HELD_BYTES else b""
        self._block_start = 0
        lines = list(self._scan(data))
        if zlib.crc32(data) != ref.name.crc32:
            # It has changed since it was written.
            lines = [
                replace(line, is_damaged=not is_intact(self._unpacked(data[line.start : line.stop])))
                for line in lines
            ]
        self._provenance_line = None
        if lines and not lines[0].is_damaged and is_provenance(self._beginning(data, lines[0])):
            self._provenance_line = lines.pop(0)
        self.schema: Schema = self._find_schema(lines, schemas)
        lines = [self._checked(line) for line in lines]
        self.rows: list[int] = self._settle_rows(lines)
        self.units: list[int] = [self._units(line, rows) for line, rows in zip(lines, self.rows, strict=True)]
        self._lines = lines

    @property
    def provenance(self) -> dict[str, Any]:
        """The origin of the data; see `rlio.schemas.provenance`.

        Raises:
            CorruptData: The provenance is damaged or missing.
        """
        line = self._provenance_line
        return parse_provenance(b"" if line is None else self._line_bytes(line), uri=self.uri)

    def read(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> SampleBatch | MultiAgentBatch:
        """See `OpenShard`."""
        line = self._lines[index]
        if line.is_damaged:
            raise self._lost(line, self.rows[index])
        batch = decode_line(
            self._line_bytes(line),
            self._schema_of,
            columns=columns,
            uri=self.uri,
            record=line.number,
            limits=self._limits,
        )
        batch = batch if rows is None else cut_rows(batch, rows, None, uri=self.uri)
        if self.schema.has_videos:
            batch = self._videos.known(batch)
        if self.keeps_pictures or not self.schema.has_pictures:
            return batch
        return pictures_decoded(batch, self.uri, line.number)

    def read_folded(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> Folded:
        """See `OpenShard`: lines hold no stacks."""
        return Folded(self.read(index, columns=columns, rows=rows))

    def check_line(self, index: int) -> None:
        """Compare a line of rows with its CRC, without decoding it.

        Raises:
            CorruptData: The line is damaged.
        """
        line = self._lines[index]
        if line.is_damaged or not is_intact(self._line_bytes(line)):
            raise self._lost(line, self.rows[index])

    def bounds(self, index: int) -> Mapping[str, Bounds]:
        """See `OpenShard`: a line has no bounds."""
        return {}

    @property
    def streams(self) -> Streams:
        """See `OpenShard`. Reads every line, because a JSON shard stores no such table; decodes few columns.

        Raises:
            CorruptData: A line is damaged.
        """
        table = StreamTable()
        known = {name for policy in self.schema.policies.values() for name in policy.columns}
        columns = [name for name in TABLE_COLUMNS if name in known]
        for index in range(len(self._lines)):
            when = written_at(self._line_bytes(self._lines[index]))
            for pid, part in self.read(index, columns=columns or None).policies().items():
                flat = {name: part[name] for name in TABLE_COLUMNS if isinstance(part.get(name), np.ndarray)}
                table.assign(pid, flat, len(part), times=[(0, Times(when, part.episode_starts))])
        return table.streams

    # ---- the index ----

    def _scan(self, data: bytes) -> Iterator[_Line]:
        """Yield the lines in order, without checks."""
        # If the limits allow larger shards, they allow proportionally more lines.
        most = _MAX_LINES * max(self._limits.shard_bytes, MAX_JSON_SHARD_BYTES) // MAX_JSON_SHARD_BYTES
        for number, (start, stop) in enumerate(_frames(data) if self._packed else _ranges(data)):
            # A line without rows is an empty batch.
            if number >= min(most, 2 * self._ref.name.rows + _FREE_LINES):
                raise UnsafeData(
                    f"more than {number} lines in a shard of {self._ref.name.rows} rows", uri=self.uri
                )
            line = _Line(number, start, stop, None)
            head = parse_head(self._beginning(data, line))
            if head is not None and head.rows > self._limits.group_rows:
                raise UnsafeData(
                    f"a line of {head.rows} rows, more than {self._limits.group_rows}",
                    uri=self.uri,
                    record=number,
                )
            yield replace(line, head=head)

    def _beginning(self, data: bytes, line: _Line) -> bytes:
        """Return the first bytes of a line; none if they are unreadable."""
        if not self._packed:
            return data[line.start : min(line.stop, line.start + _HEAD_BYTES)]
        return begin(data[line.start : line.stop], _HEAD_BYTES, limits=self._limits)

    def _find_schema(self, lines: list[_Line], schemas: SchemaLookup) -> Schema:
        """Return the one schema of the lines."""
        hashes = Counter(line.head.schema for line in lines if line.head and not line.is_damaged)
        if not hashes:
            for line in lines[:_LOOKED_AT]:
                self._line_bytes(line)  # Raises if a frame is not damaged but asks for too much.
            raise CorruptData(f"no line can be read: all {self._ref.name.rows} rows are lost", uri=self.uri)
        return schemas(hashes.most_common(1)[0][0])

    def _schema_of(self, name: str) -> Schema:
        if name != self.schema.hash:
            raise CorruptData(f"a line of schema {name} in a shard of {self.schema.hash}", uri=self.uri)
        return self.schema

    def _checked(self, line: _Line) -> _Line:
        """Return the line, marked as damaged if it is unreadable."""
        is_ours = line.head is not None and line.head.schema == self.schema.hash
        return line if is_ours or line.is_damaged else replace(line, is_damaged=True)

    def _settle_rows(self, lines: list[_Line]) -> list[int]:
        """Return the rows of each line: as stated in intact lines, the rest for damaged ones."""
        said = [line.head.rows if line.head else 0 for line in lines]
        kept = sum(rows for rows, line in zip(said, lines, strict=True) if not line.is_damaged)
        damaged = [index for index, line in enumerate(lines) if line.is_damaged]
        lost = self._ref.name.rows - kept
        if lost < 0 or (lost and not damaged):
            raise CorruptData(
                f"the lines hold {kept} rows and the shard's name says {self._ref.name.rows}", uri=self.uri
            )
        if sum(said[index] for index in damaged) != lost:
            # The heads of damaged lines are damaged too: the first of these lines counts all lost rows.
            for index in damaged:
                said[index] = 0
            if damaged:
                said[damaged[0]] = lost
        return said

    def _units(self, line: _Line, rows: int) -> int:
        """Return the units of a line. A damaged line with rows has at least one, so that readers meet it."""
        policies = self.schema.policies.values()
        if not self.schema.multi_agent and not any(policy.has_sequences for policy in policies):
            return rows
        if line.head is not None and line.head.rows == rows and 0 < line.head.units <= rows:
            return line.head.units
        return min(rows, 1)

    # ---- lines ----

    def _line_bytes(self, line: _Line) -> bytes:
        """Return the bytes of a line; none if it is damaged."""
        packed = self._stored_bytes(line)
        try:
            return self._inflated(packed)
        except UnsafeData as error:
            raise_at(error, uri=self.uri, record=line.number)
        except CorruptData:
            return b""

    def _stored_bytes(self, line: _Line) -> bytes:
        """Return the bytes of a line with its end or frame; fetches some following lines with it."""
        offset = line.start - self._block_start
        if offset < 0 or offset + line.stop - line.start > len(self._block):
            stop = min(max(line.stop, line.start + _BLOCK_BYTES), self._ref.name.size)
            self._block = self._storage.read_range(self._ref.path, line.start, stop)
            self._block_start, offset = line.start, 0
        return self._block[offset : offset + line.stop - line.start]

    def _unpacked(self, packed: bytes) -> bytes:
        """Return a line without its end; nothing if it is unreadable."""
        try:
            return self._inflated(packed)
        except CorruptData:
            return b""

    def _inflated(self, packed: bytes) -> bytes:
        """Return a line without its end.

        Raises:
            CorruptData: It is not a zstd frame. (UnsafeData: it asks for too much.)
        """
        if self._packed:
            packed = inflate(packed, most=self._limits.line_bytes + 1, limits=self._limits)
        return packed.removesuffix(b"\n")

    def _lost(self, line: _Line, rows: int) -> CorruptData:
        return CorruptData(
            f"bytes {line.start} to {line.stop - 1} hold no line that matches its CRC-32: "
            f"{rows} rows are lost; restore the shard, or read with on_error='skip'",
            uri=self.uri,
            record=line.number,
        )


def _ranges(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of lines, including their ends."""
    start = 0
    while start < len(data):
        found = data.find(b"\n", start)
        stop = len(data) if found < 0 else found + 1
        yield start, stop
        start = stop


def _frames(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of zstd frames, and of damaged bytes between them."""
    start = 0
    while start < len(data):
        stop = _frame_end(data, start)
        if stop is None or (stop < len(data) and not data.startswith(_FRAME_MAGIC, stop)):
            found = data.find(_FRAME_MAGIC, start + 1)
            following = len(data) if found < 0 else found
            # A frame that seems to reach into the next one has a damaged length.
            stop = following if stop is None else min(stop, following)
        yield start, stop
        start = stop


def _frame_end(data: bytes, start: int) -> int | None:
    """Return the end of the zstd frame at ``start``, from its block sizes (RFC 8878, 3.1.1); None: no end."""
    try:
        head = data[start : start + 18]
        checksum = 4 if zstandard.get_frame_parameters(head).has_checksum else 0
        at = start + zstandard.frame_header_size(head)
    except zstandard.ZstdError:
        return None
    while at + 3 <= len(data):
        block = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        at += 3 + (1 if kind == 1 else size)  # Kind 1 repeats one byte.
        if last:
            return at + checksum if at + checksum <= len(data) else None
    return None
