"""One stored shard, read from end to end: what is damaged becomes findings, what is intact comes out as rows.

Parquet and JSON shards come out alike, a row group or line at a time. Each byte of a Parquet shard is fetched
once, and reaches pyarrow only after its CRC has matched (`rlio.schemas.shard_file`).

The checks get rows by policy, and which of them are live (`Scanned`).
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
    """The schema that a shard names is not among the root's schema files, or damaged."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"schema {name} is not there")


@dataclass
class ShardScan:
    """Reads one shard.

    Args:
        storage: The data set's root.
        ref: The shard; its size is that in its name.
        findings: Takes what is wrong.
        schemas: Gives schemas by hash to JSON shards; raises `UnknownSchema`.

    Attributes:
        schema: Of its rows; None where that cannot be known.
        intact: Ranges of rows, within the shard, that verify; complete once `rows` is exhausted.
        codes: Of what is wrong with its bytes.
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
        """Whether nothing is wrong with its bytes."""
        return not self.codes

    @property
    def uri(self) -> str:
        """Of the shard."""
        return self.storage.uri_of(self.ref.path)

    @property
    def is_parquet(self) -> bool:
        """Of which kind it is."""
        return self.ref.name.suffix == "parquet"

    def open(self) -> ShardFile | JsonShard | None:
        """The shard, its structure checked; None where that is damaged, which is then found."""
        lost = self.ref.name.rows
        try:
            return self._open_parquet() if self.is_parquet else self._open_json()
        except DataNotFound:
            self._found(
                "vanished", "it went while it was verified (compacted and collected?): run again", lost
            )
        except CorruptData as error:
            code = self._code_of_footer() if self.is_parquet else "shard-damaged"
            if isinstance(error, UnsafeData) and code != "footer-crc":
                code = "unsafe"
            self._found_error(code, error, lost)
        except OSError as error:
            self._found("unreadable", f"the store does not give it: {error!r}", lost)
        return None

    def _open_parquet(self) -> ShardFile | None:
        name = self.ref.name
        self._position = self._crc32 = 0
        file = self._shard_file()
        self.schema = file.schema
        if file.rows != name.rows:
            self._found(
                "shard-rows", f"the shard holds {file.rows} rows and its name says {name.rows}", name.rows
            )
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
            self.codes.add("schema-file-missing")  # Found once for all shards of that schema.
            raise
        self.schema = shard.schema
        return shard

    def rows(self) -> Iterator[Rows]:
        """Every intact row group or line, in order; the others become findings.

        Raises:
            UnknownSchema: The schema of a JSON shard is not known.
        """
        shard = self.open()
        if isinstance(shard, ShardFile):
            yield from self._parquet_rows(shard)
        elif shard is not None:
            yield from self._json_rows(shard)

    # ---- Parquet ----

    def _fetch(self, start: int, stop: int) -> bytes:
        """Read a range; ranges that follow each other add up to the whole file's CRC-32."""
        data = self.storage.read_range(self.ref.path, start, stop)
        if start == self._position:
            self._crc32 = zlib.crc32(data, self._crc32)
            self._position = stop
        return data

    def _parquet_rows(self, file: ShardFile) -> Iterator[Rows]:
        self._position = self._crc32 = 0  # What the footer took was no beginning of a pass.
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
            self._found("vanished", "it went while it was verified: run again", info.rows, record=index)
        except CorruptData as error:
            self._found_error(self._code_of_group(file, index, error), error, info.rows)
        except OSError as error:
            self._found("unreadable", f"the store does not give it: {error!r}", info.rows, record=index)
        return None

    def _decoded(self, group: DecodedGroup, index: int, first: int) -> Rows | None:
        """The rows of a group by policy, counted as readers count them."""
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
        """What only the whole file tells."""
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
        """Whether a footer that was refused is damaged, or was written so."""
        name = self.ref.name
        try:
            tail = self.storage.read_range(self.ref.path, max(0, name.size - 8), name.size)
            length = int.from_bytes(tail[:4], "little") + 8
            if length > name.size or tail[4:] != b"PAR1":
                return "footer-crc"
            footer = self.storage.read_range(self.ref.path, name.size - length, name.size)
        except OSError:  # It went since: what was read before was damaged.
            return "footer-crc"
        return "footer-malformed" if zlib.crc32(footer) == name.footer_crc32 else "footer-crc"

    def _code_of_group(self, file: ShardFile, index: int, error: CorruptData) -> str:
        """Whether a row group that was refused is damaged, or was written so."""
        if isinstance(error, UnsafeData):
            return "unsafe"
        info = file.groups[index]
        try:
            crc32 = zlib.crc32(self.storage.read_range(self.ref.path, info.start, info.stop))
        except OSError:  # It went since: what was read before was damaged.
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
        """What only the first line and the whole file tell."""
        try:
            _ = shard.provenance
        except CorruptData as error:
            self._found_error("provenance-damaged", error, 0)
        if self.is_clean and self._whole_crc32() != self.ref.name.crc32:
            self._found(
                "file-crc",
                "the file's CRC-32 is not that of its name, although every line matches its own",
                0,
            )

    def _line(self, shard: JsonShard, index: int, first: int) -> Rows | None:
        count = shard.rows[index]
        try:
            batch = shard.read(index)
            self._check_line(shard, index, batch)
        except DataNotFound:
            self._found("vanished", "it went while it was verified: run again", count, record=index)
            return None
        except CorruptData as error:
            if not index and not count:
                return None  # Where the provenance should be, which is looked for later.
            self._found_error(self._code_of_line(shard, index, error), error, count)
            return None
        except OSError as error:
            self._found("unreadable", f"the store does not give it: {error!r}", count, record=index)
            return None
        parts, at = [], 0
        for pid, part in batch.policies().items():
            parts.append(Part(pid, np.arange(at, at + len(part)), part))
            at += len(part)
        return Rows(index, first, count, parts)

    @staticmethod
    def _code_of_line(shard: JsonShard, index: int, error: CorruptData) -> str:
        """Whether a line that was refused is damaged, or was written so."""
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
        """Read once more from a shard whose rows were all seen; whether it could be read."""
        try:
            read()
        except DataNotFound:
            return False  # Collected since: its rows are in a larger shard, and were intact here.
        except OSError as error:
            self._found("unreadable", f"the store does not give it: {error!r}", 0)
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
    """What readers count in rows of this schema."""
    has_sequences = any(policy.has_sequences for policy in schema.policies.values())
    return "sequences" if has_sequences and not schema.multi_agent else "steps"


@dataclass(frozen=True)
class Part:
    """The rows of one policy in a row group or line.

    Attributes:
        policy: Its id.
        rows: Which rows of the group these are, ascending.
        batch: Their columns, in that order.
    """

    policy: str
    rows: NDArray[np.int64]
    batch: SampleBatch


@dataclass(frozen=True)
class Rows:
    """An intact row group or line.

    Attributes:
        record: Its number, as errors and findings count them.
        first: Row within the shard of its first row.
        count: Its rows.
        parts: Those, by policy.
    """

    record: int
    first: int
    count: int
    parts: list[Part]


def flat_column(schema: Schema, part: Part, column: str) -> NDArray[np.generic] | None:
    """A column with one value a row that is not nested; None where the policy has none such."""
    leaves = schema.policies[part.policy].columns.get(column, [])
    if len(leaves) != 1 or leaves[0].path or leaves[0].spec.shape:
        return None
    values = to_numpy(part.batch[column])
    return values if len(values) == len(part.rows) else None
