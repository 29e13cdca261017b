"""Reads one stored shard from end to end: damage becomes findings, and intact rows are returned.

Parquet and JSON shards are handled alike, one row group or line at a time. Each byte of a Parquet shard is
fetched once, and reaches pyarrow only after its CRC has matched (`rlio.schemas.shard_file`).

The checks receive rows by policy, and which of them are live (`Rows`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, count_units
from rlio.batch.arrays import to_numpy
from rlio.dataset.json_shard import JsonShard
from rlio.dataset.listing import ShardRef
from rlio.errors import CorruptData, DataNotFound, RlioError, UnsafeData
from rlio.maintenance.findings import Findings
from rlio.schemas.batches import to_batch
from rlio.schemas.json_lines import SchemaLookup
from rlio.schemas.schema import Schema
from rlio.schemas.shard_file import DecodedGroup, ShardFile
from rlio.storage.filesystem import Storage

__all__ = ["Part", "Rows", "ShardScan", "UnknownSchema", "flat_column", "unit_of"]

_BLOCK_BYTES = 8 << 20


class UnknownSchema(CorruptData):
    """The schema that a shard names is missing from the root's schema files, or damaged."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"schema {name} is not there")


@dataclass
class ShardScan:
    """Reads one shard.

    Args:
        storage: The data set's root.
        ref: The shard; its size matches its name.
        findings: Receives the problems.
        schemas: Returns the schema of a JSON shard by its hash; raises `UnknownSchema`.

    Attributes:
        schema: Schema of its rows; None if unknown.
        intact: Ranges of its rows that verify; complete once `rows` is exhausted.
        codes: Codes of the problems with its bytes.
    """

    storage: Storage
    ref: ShardRef
    findings: Findings
    schemas: SchemaLookup
    schema: Schema | None = None
    intact: list[range] = field(default_factory=list)
    codes: set[str] = field(default_factory=set)

    @property
    def is_clean(self) -> bool:
        """Whether its bytes have no problem."""
        return not self.codes

    @property
    def uri(self) -> str:
        """URI of the shard."""
        return self.storage.uri_of(self.ref.path)

    @property
    def is_parquet(self) -> bool:
        """Whether it is a Parquet shard."""
        return self.ref.name.suffix == "parquet"

    def open(self) -> ShardFile | JsonShard | None:
        """Open the shard and check its structure; None if it is damaged, after adding a finding."""
        lost = self.ref.name.rows
        try:
            return self._open_parquet() if self.is_parquet else self._open_json()
        except DataNotFound:
            self._found(
                "vanished", "it was removed while it was verified (compacted and collected?): run again", lost
            )
        except CorruptData as error:
            code = self._code_of_footer() if self.is_parquet else "shard-damaged"
            if isinstance(error, UnsafeData) and code != "footer-crc":
                code = "unsafe"
            self._found_error(code, error, lost)
        except OSError as error:
            self._found("unreadable", f"the store does not return it: {error!r}", lost)
        return None

    def _open_parquet(self) -> ShardFile | None:
        name = self.ref.name
        self._position = self._crc32 = 0
        file = self._shard_file()
        self.schema = file.schema
        if (rows := sum(file.rows)) != name.rows:
            self._found("shard-rows", f"the shard holds {rows} rows and its name says {name.rows}", name.rows)
            return None
        return file

    def _shard_file(self) -> ShardFile:
        name = self.ref.name
        return ShardFile(
            self._fetch,
            size=name.size,
            footer_crc32=name.footer_crc32,
            uri=self.uri,
            limits=self.storage.limits,
        )

    def _open_json(self) -> JsonShard | None:
        try:
            shard = JsonShard(self.storage, self.ref, self.schemas)
        except UnknownSchema:
            self.codes.add("schema-file-missing")  # Reported once for all shards of that schema.
            raise
        self.schema = shard.schema
        return shard

    def rows(self) -> Iterator[Rows]:
        """Yield every intact row group or line, in order; the others become findings.

        Raises:
            UnknownSchema: The schema of a JSON shard is unknown.
        """
        shard = self.open()
        if isinstance(shard, ShardFile):
            yield from self._parquet_rows(shard)
        elif shard is not None:
            yield from self._json_rows(shard)

    # ---- Parquet ----

    def _fetch(self, start: int, stop: int) -> bytes:
        """Read a range; consecutive ranges add up to the whole file's CRC-32."""
        data = self.storage.read_range(self.ref.path, start, stop)
        if start == self._position:
            self._crc32 = zlib.crc32(data, self._crc32)
            self._position = stop
        return data

    def _parquet_rows(self, file: ShardFile) -> Iterator[Rows]:
        self._position = self._crc32 = 0  # Start again: the footer was read out of order.
        first = 0
        for index, info in enumerate(file.groups):
            group = self._group(file, index)
            if group is not None:
                rows = self._decoded(group, index, first)
                if rows is not None:
                    self._keep(first, info.rows)
                    yield rows
            first += info.rows
        self._finish_parquet()

    def _group(self, file: ShardFile, index: int) -> DecodedGroup | None:
        info = file.groups[index]
        try:
            return file.read_group(index, batches=True)
        except DataNotFound:
            self._found(
                "vanished", "it was removed while it was verified: run again", info.rows, record=index
            )
        except CorruptData as error:
            self._found_error(self._code_of_group(file, index, error), error, info.rows)
        except OSError as error:
            self._found("unreadable", f"the store does not return it: {error!r}", info.rows, record=index)
        return None

    def _decoded(self, group: DecodedGroup, index: int, first: int) -> Rows | None:
        """Return the rows of a group by policy, counted as readers count them."""
        try:
            batch = to_batch(group)
            found, unit = count_units(batch, unit_of(group.schema)), unit_of(group.schema)
            if found != group.info.units:
                raise CorruptData(f"the row group has {found} {unit} and its shard says {group.info.units}")
            listed = group.policies()
        except RlioError as error:
            self._found_error("group-malformed", error, group.info.rows, record=index)
            return None
        everything = np.arange(group.info.rows)
        batches = batch if isinstance(batch, MultiAgentBatch) else {next(iter(listed)): batch}
        parts = [Part(pid, everything if at is None else at, batches[pid]) for pid, at in listed.items()]
        return Rows(index, first, group.info.rows, parts)

    def _finish_parquet(self) -> None:
        """Run the checks that need the whole file."""
        if not self.is_clean or not self._reads(lambda: self._fetch(self._position, self.ref.name.size)):
            return
        if self._crc32 != self.ref.name.crc32:
            self._found(
                "file-crc",
                f"the file's CRC-32 is {self._crc32:08x} and its name says {self.ref.name.crc32:08x}, "
                "although footer and row groups match theirs: the name was changed",
                0,
            )

    def _code_of_footer(self) -> str:
        """Return whether a refused footer was damaged later, or was written so."""
        name = self.ref.name
        try:
            tail = self.storage.read_range(self.ref.path, max(0, name.size - 8), name.size)
            length = int.from_bytes(tail[:4], "little") + 8
            if length > name.size or tail[4:] != b"PAR1":
                return "footer-crc"
            footer = self.storage.read_range(self.ref.path, name.size - length, name.size)
        except OSError:  # The shard is gone by now; the footer read before was damaged.
            return "footer-crc"
        return "footer-malformed" if zlib.crc32(footer) == name.footer_crc32 else "footer-crc"

    def _code_of_group(self, file: ShardFile, index: int, error: CorruptData) -> str:
        """Return whether a refused row group was damaged later, or was written so."""
        if isinstance(error, UnsafeData):
            return "unsafe"
        info = file.groups[index]
        try:
            crc32 = zlib.crc32(self.storage.read_range(self.ref.path, info.start, info.stop))
        except OSError:  # The shard is gone by now; the group read before was damaged.
            return "group-crc"
        return "group-malformed" if crc32 == info.crc32 else "group-crc"

    # ---- JSON ----

    def _json_rows(self, shard: JsonShard) -> Iterator[Rows]:
        first = 0
        for index, count in enumerate(shard.rows):
            rows = self._line(shard, index, first)
            if rows is not None:
                self._keep(first, count)
                yield rows
            first += count
        self._reads(lambda: self._finish_json(shard))

    def _finish_json(self, shard: JsonShard) -> None:
        """Run the checks that need the first line or the whole file."""
        try:
            _ = shard.provenance
        except CorruptData as error:
            self._found_error("provenance-damaged", error, 0)
        if self.is_clean and self._whole_crc32() != self.ref.name.crc32:
            self._found(
                "file-crc",
                "the file's CRC-32 does not match its name, although every line matches its own",
                0,
            )

    def _line(self, shard: JsonShard, index: int, first: int) -> Rows | None:
        count = shard.rows[index]
        try:
            batch = shard.read(index)
            self._check_line(shard, index, batch)
        except DataNotFound:
            self._found("vanished", "it was removed while it was verified: run again", count, record=index)
            return None
        except CorruptData as error:
            if not index and not count:
                return None  # The line of the provenance, which is checked later.
            self._found_error(self._code_of_line(shard, index, error), error, count)
            return None
        except OSError as error:
            self._found("unreadable", f"the store does not return it: {error!r}", count, record=index)
            return None
        parts, at = [], 0
        for pid, part in batch.policies().items():
            parts.append(Part(pid, np.arange(at, at + len(part)), part))
            at += len(part)
        return Rows(index, first, count, parts)

    @staticmethod
    def _code_of_line(shard: JsonShard, index: int, error: CorruptData) -> str:
        """Return whether a refused line was damaged later, or was written so."""
        if isinstance(error, UnsafeData):
            return "unsafe"
        try:
            shard.check_line(index)
        except (CorruptData, OSError):
            return "line-damaged"
        return "line-malformed"

    def _check_line(self, shard: JsonShard, index: int, batch: Batch) -> None:
        found, unit = count_units(batch, unit_of(shard.schema)), unit_of(shard.schema)
        if found != shard.units[index]:
            raise CorruptData(
                f"the line has {found} {unit} and says {shard.units[index]}", uri=self.uri, record=index
            )

    def _whole_crc32(self) -> int:
        crc32, size = 0, self.ref.name.size
        for start in range(0, size, _BLOCK_BYTES):
            crc32 = zlib.crc32(
                self.storage.read_range(self.ref.path, start, min(start + _BLOCK_BYTES, size)), crc32
            )
        return crc32

    # ---- both ----

    def _reads(self, read: Callable[[], object]) -> bool:
        """Read again from a shard whose rows were all read. Returns whether it could be read."""
        try:
            read()
        except DataNotFound:
            return False  # Collected meanwhile: a larger shard has its rows, and they were intact here.
        except OSError as error:
            self._found("unreadable", f"the store does not return it: {error!r}", 0)
            return False
        return True

    def _keep(self, first: int, count: int) -> None:
        if not count:
            return
        if self.intact and self.intact[-1].stop == first:
            self.intact[-1] = range(self.intact[-1].start, first + count)
        else:
            self.intact.append(range(first, first + count))

    def _found(self, code: str, message: str, rows: int, *, record: int | None = None) -> None:
        self.codes.add(code)
        self.findings.add(code, message, uri=self.uri, record=record, rows=rows)

    def _found_error(self, code: str, error: RlioError, rows: int, *, record: int | None = None) -> None:
        if isinstance(error, UnknownSchema):
            raise error
        self.codes.add(code)
        self.findings.add_error(code, error, uri=self.uri, record=record, rows=rows)


def unit_of(schema: Schema) -> str:
    """Return what readers count in rows of this schema: "sequences" or "steps"."""
    has_sequences = any(policy.has_sequences for policy in schema.policies.values())
    return "sequences" if has_sequences and not schema.multi_agent else "steps"


@dataclass(frozen=True)
class Part:
    """The rows of one policy in a row group or line.

    Attributes:
        policy: The policy's id.
        rows: Numbers of these rows within the group, ascending.
        batch: Their columns, in that order.
    """

    policy: str
    rows: NDArray[np.int64]
    batch: SampleBatch


@dataclass(frozen=True)
class Rows:
    """An intact row group or line.

    Attributes:
        record: Number of the group or line, as errors and findings count them.
        first: Row within the shard of its first row.
        count: Number of rows.
        parts: The rows by policy.
    """

    record: int
    first: int
    count: int
    parts: list[Part]


def flat_column(schema: Schema, part: Part, column: str) -> NDArray[np.generic] | None:
    """Return a flat column with one value per row; None if the policy has no such column."""
    leaves = schema.policies[part.policy].columns.get(column, [])
    if len(leaves) != 1 or leaves[0].path or leaves[0].spec.shape:
        return None
    values = to_numpy(part.batch[column])
    return values if len(values) == len(part.rows) else None
