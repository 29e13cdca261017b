"""Reads one stored shard from end to end: damage becomes findings, and intact rows are returned.

Parquet and JSON shards are handled alike, one row group or line at a time, and short Parquet shards also
together (`read_joined`). Each byte of a Parquet shard is fetched once, if nothing is wrong with it and its
neighbours, and reaches pyarrow only after its CRC has matched (`rlio.schemas.shard_file`).

The checks receive rows by policy, and which of them are live (`Rows`).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch, count_units
from rlio.batch.arrays import to_numpy
from rlio.catalog.listing import ShardRef
from rlio.catalog.names import VIDEO_DIR
from rlio.errors import CorruptData, DataNotFound, MissingExtra, RlioError, UnsafeData
from rlio.maintenance.findings import Findings
from rlio.schemas.batches import pictures_decoded, to_batch
from rlio.schemas.json_lines import SchemaLookup
from rlio.schemas.schema import Schema
from rlio.schemas.shard_file import ShardFile
from rlio.source.json_shard import JsonShard
from rlio.source.videos import Videos
from rlio.storage.filesystem import Storage
from rlio.support.forks import cached_property

__all__ = ["Part", "Rows", "ShardScan", "UnknownSchema", "flat_column", "read_joined", "unit_of"]

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
    # Opened by `ahead`.
    _file: ShardFile | None = None
    # CRC-32 of the bytes from the first to this position.
    _position: int = 0
    _crc32: int = 0

    @cached_property
    def _videos(self) -> Videos:
        return Videos(self.storage)

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
        with self._reading(self.ref.name.rows, self._code_of_opening):
            return self._open_parquet() if self.is_parquet else self._open_json()
        return None

    def _code_of_opening(self, error: CorruptData) -> str:
        code = self._code_of_footer() if self.is_parquet else "shard-damaged"
        return "unsafe" if isinstance(error, UnsafeData) and code != "footer-crc" else code

    @contextlib.contextmanager
    def _reading(
        self, rows: int, code_of: Callable[[CorruptData], str], *, record: int | None = None
    ) -> Iterator[None]:
        """Make findings of failures to read.

        Args:
            rows: Rows that a failure loses.
            code_of: Returns the code of damage.
            record: The row group or line.

        Raises:
            UnknownSchema: The schema of a JSON shard is unknown.
        """
        try:
            yield
        except DataNotFound:
            self._found(
                "vanished",
                "it was removed while it was verified (compacted and collected?): run again",
                rows,
                record=record,
            )
        except UnknownSchema:
            raise
        except CorruptData as error:
            self._found_error(code_of(error), error, rows, record=record)
        except OSError as error:
            self._found("unreadable", f"the store does not return it: {error!r}", rows, record=record)

    def ahead(self) -> ShardFile | None:
        """Open a Parquet shard, perhaps to read it with its neighbours, see `read_joined`.

        None: it cannot be opened. `rows` tries again in its turn, and finds what is wrong with it.
        """
        with contextlib.suppress(CorruptData, OSError):
            self._file = self._opened()
        return self._file

    def _opened(self) -> ShardFile:
        name = self.ref.name
        self._position = self._crc32 = 0
        return ShardFile(
            self._fetch,
            size=name.size,
            footer_crc32=name.footer_crc32,
            uri=self.uri,
            limits=self.storage.limits,
        )

    def _open_parquet(self) -> ShardFile | None:
        name, file = self.ref.name, self._file or self._opened()
        self.schema = file.schema
        if (rows := sum(file.rows)) != name.rows:
            self._found("shard-rows", f"the shard holds {rows} rows and its name says {name.rows}", name.rows)
            return None
        return file

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
        if shard is None:
            return
        counts = shard.rows if isinstance(shard, JsonShard) else [group.rows for group in shard.groups]
        if self._position < self.ref.name.size:  # A small shard came as a whole with its footer.
            self._position = self._crc32 = 0  # Start again: the footer was read out of order.
        first = 0
        for index, count in enumerate(counts):
            if isinstance(shard, JsonShard):
                rows = self._line(shard, index, first)
            else:
                rows = self._group(shard, index, first)
            if rows is not None:
                self._keep(first, count)
                yield rows
            first += count
        self._finish(shard)

    # ---- Parquet ----

    def _fetch(self, start: int, stop: int) -> bytes:
        """Read a range; consecutive ranges add up to the whole file's CRC-32."""
        data = self.storage.read_range(self.ref.path, start, stop)
        if start == self._position:
            self._crc32 = zlib.crc32(data, self._crc32)
            self._position = stop
        return data

    def _group(self, file: ShardFile, index: int, first: int) -> Rows | None:
        """Return the rows of a group by policy, counted as readers count them."""
        count = file.groups[index].rows
        with self._reading(count, lambda error: self._code_of_group(file, index, error), record=index):
            group = file.read_group(index, batches=True)
            try:
                batch = to_batch(group)
                if group.schema.has_videos:
                    batch = self._videos.known(batch)
                batch = pictures_decoded(batch, self.uri, index)
                found, unit = count_units(batch, unit_of(group.schema)), unit_of(group.schema)
                if found != group.info.units:
                    raise CorruptData(
                        f"the row group has {found} {unit} and its shard says {group.info.units}"
                    )
                listed = group.policies()
            except MissingExtra:  # It says nothing of the rows.
                raise
            except RlioError as error:
                self._found_error("group-malformed", error, count, record=index)
                return None
            everything = np.arange(count)
            batches = batch if isinstance(batch, MultiAgentBatch) else {next(iter(listed)): batch}
            parts = [Part(pid, everything if at is None else at, batches[pid]) for pid, at in listed.items()]
            return Rows(index, first, count, parts)
        return None

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

    def _line(self, shard: JsonShard, index: int, first: int) -> Rows | None:
        count = shard.rows[index]
        if not index and not count:
            return None  # The line of the provenance, which is checked later.
        with self._reading(count, lambda error: self._code_of_line(shard, index, error), record=index):
            batch = shard.read(index)
            found, unit = count_units(batch, unit_of(shard.schema)), unit_of(shard.schema)
            if found != shard.units[index]:
                raise CorruptData(
                    f"the line has {found} {unit} and says {shard.units[index]}", uri=self.uri, record=index
                )
            parts, at = [], 0
            for pid, part in batch.policies().items():
                parts.append(Part(pid, np.arange(at, at + len(part)), part))
                at += len(part)
            return Rows(index, first, count, parts)
        return None

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

    # ---- both ----

    def finish_joined(self) -> None:
        """Run the checks of a shard whose rows `read_joined` has returned."""
        assert self._file is not None
        self._keep(0, self.ref.name.rows)
        self._finish(self._file)

    def _finish(self, shard: ShardFile | JsonShard) -> None:
        """Run the checks that need the first line or the whole file."""
        name, is_json = self.ref.name, isinstance(shard, JsonShard)
        # Not found: a larger shard has its rows, which were intact here, and it was collected meanwhile.
        with self._reading(0, lambda error: "provenance-damaged"), contextlib.suppress(DataNotFound):
            if isinstance(shard, JsonShard):
                _ = shard.provenance
            if not self.is_clean:
                return
            for start in range(self._position, name.size, _BLOCK_BYTES):
                self._fetch(start, min(start + _BLOCK_BYTES, name.size))
            if self._crc32 != name.crc32:
                fine = "every line matches its own" if is_json else "footer and row groups match theirs"
                self._found(
                    "file-crc",
                    f"the file's CRC-32 is {self._crc32:08x} and its name says {name.crc32:08x}, "
                    f"although {fine}: the name was changed",
                    0,
                )

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
        if error.uri is not None and error.uri.startswith(self.storage.uri_of(f"{VIDEO_DIR}/")):
            code = "video-damaged"
        self.codes.add(code)
        self.findings.add_error(code, error, uri=self.uri, record=record, rows=rows)


def read_joined(scans: Sequence[ShardScan], files: Sequence[ShardFile]) -> Rows | None:
    """Return the rows of neighbouring shards, decoded together, if nothing is wrong with any of them.

    Each shard has matched its own CRCs, and each has as many units and streams as it states: what is wrong in
    one cannot make up for what is wrong in another.

    Args:
        scans: The shards, each of which still has to be finished (`ShardScan.finish_joined`).
        files: What `ShardScan.ahead` returned for each; they can be decoded together.

    Returns:
        None: read them one by one, to find what is wrong, and where.
    """
    for scan, file in zip(scans, files, strict=True):
        scan.schema = file.schema
        if file.rows != [scan.ref.name.rows] or file.units != file.rows:  # Rows are units here.
            return None
    with contextlib.suppress(RlioError):
        group = ShardFile.read_joined(files)
        (policy,) = group.policies()
        batch = to_batch(group)
        count = sum(scan.ref.name.rows for scan in scans)
        if isinstance(batch, SampleBatch) and len(batch) == count:
            return Rows(0, 0, count, [Part(policy, np.arange(count), batch)])
    return None


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

    def split(self, counts: Sequence[int]) -> Iterator[Rows]:
        """Yield the rows of each shard, if these are the rows of one policy in shards of so many rows."""
        (part,) = self.parts
        for start, stop in pairwise(accumulate(counts, initial=0)):
            own = Part(part.policy, np.arange(stop - start), part.batch[start:stop])
            yield Rows(self.record, 0, stop - start, [own])


def flat_column(schema: Schema, part: Part, column: str) -> NDArray[np.generic] | None:
    """Return a flat column with one value per row; None if the policy has no such column."""
    leaves = schema.policies[part.policy].columns.get(column, [])
    if len(leaves) != 1 or leaves[0].path or leaves[0].spec.shape:
        return None
    values = to_numpy(part.batch[column])
    return values if len(values) == len(part.rows) else None
