"""The parts that both kinds of compaction share: options, reports, reading shards and storing shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple

from rlio.dataset.commit import put_shard
from rlio.dataset.listing import Segment
from rlio.dataset.names import schema_path
from rlio.dataset.shards import ParquetShard
from rlio.errors import CorruptData, OptionError
from rlio.log.publisher import NewShard
from rlio.maintenance.merging import ParquetMerger, open_whole, with_writer_column
from rlio.maintenance.progress import Progress
from rlio.schemas.parquet import Compression
from rlio.schemas.schema import Schema, canonical_json
from rlio.schemas.shard_file import ShardFile
from rlio.storage.filesystem import Storage
from rlio.storage.parallel import each

__all__ = [
    "CompactReport",
    "Compacted",
    "Identity",
    "Options",
    "Publisher",
    "Sources",
    "is_by_row",
    "merged",
    "size_of",
]

logger: logging.Logger = logging.getLogger("rlio")

# Whole shards to fetch ahead on remote stores. Each takes its size in memory.
_SHARDS_AHEAD: Final = 2


@dataclass(frozen=True)
class Compacted:
    """One run of shards that was merged into fewer.

    Attributes:
        writer: The writer of the rows; with ``into``, the writer in the new root.
        first: Number of the first row.
        rows: Number of rows.
        sources: URIs of the shards that were read.
        shards: URIs of the shards that were written; none in a dry run.
        bytes_before: Bytes of the sources.
        bytes_after: Bytes of the written shards; 0 in a dry run.
    """

    writer: str
    first: int
    rows: int
    sources: tuple[str, ...]
    shards: tuple[str, ...]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class CompactReport:
    """The result of `compact`, or, in a dry run, the expected result.

    Attributes:
        uri: The root.
        into: The new root, if one was given.
        dry_run: Whether nothing was written.
        shards_before: Live shards before.
        shards_after: Live shards now (in a dry run: at least one per run).
        runs: The merged runs.
        skipped: Messages about damaged runs that were left unchanged, with ``on_error="skip"``.
    """

    uri: str
    into: str | None
    dry_run: bool
    shards_before: int
    shards_after: int
    runs: tuple[Compacted, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows in the merged runs."""
        return sum(run.rows for run in self.runs)

    @property
    def bytes_before(self) -> int:
        """Bytes of the shards that were merged."""
        return sum(run.bytes_before for run in self.runs)

    @property
    def bytes_after(self) -> int:
        """Bytes of the shards that were written."""
        return sum(run.bytes_after for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        totals = {name: getattr(self, name) for name in ("rows", "bytes_before", "bytes_after")}
        return asdict(self) | totals


@dataclass(frozen=True)
class Options:
    """The options of `compact`, checked; `compact` describes them."""

    max_bytes: int
    min_shards: int
    compression: Compression
    on_error: Literal["raise", "skip"]
    dry_run: bool
    progress: Progress


class Identity(NamedTuple):
    """The properties that shards must share to be merged."""

    schema: str
    provenance: str


class Sources:
    """The shards of a root: their identities and their rows."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def check_parquet(self, segments: Iterable[Segment]) -> None:
        """Refuse a data set that has JSON shards.

        Raises:
            OptionError: The data set has some.
        """
        uris = [self.storage.uri_of(s.ref.path) for s in segments if s.ref.name.suffix != "parquet"]
        if uris:
            raise OptionError(
                f"found {len(uris)} shards of JSON lines, such as {uris[0]}; compact merges Parquet shards; "
                "copy the data set into a new root: write each batch of rlio.DatasetReader(ROOT, epochs=1) "
                "with rlio.ParquetWriter(NEW)",
                uri=self.storage.uri,
            )

    def schema(self, segment: Segment) -> Schema:
        """Return a shard's schema; reads its footer."""
        return ParquetShard(self.storage, segment.ref).schema

    def identity(self, segment: Segment) -> Identity:
        """Return what a shard must share with the shards it is merged with; reads its footer."""
        shard = ParquetShard(self.storage, segment.ref)
        return Identity(shard.schema.hash, canonical_json(shard.provenance))

    def identities(self, segments: list[Segment]) -> list[Identity]:
        """Return the `identity` of each segment."""
        return list(each(self.storage, self.identity, segments))

    def loaded(self, segments: Sequence[Segment]) -> Iterator[tuple[Segment, ShardFile]]:
        """Yield each segment with its whole shard; fetches ahead on remote stores."""

        def load(segment: Segment) -> ShardFile:
            return open_whole(self.storage, segment.ref)

        return zip(segments, each(self.storage, load, segments, ahead=_SHARDS_AHEAD), strict=True)


@dataclass
class Publisher:
    """Stores the new shards of one writer, one after the other."""

    storage: Storage
    writer: str
    next_row: int
    written: list[tuple[str, int]] = field(default_factory=list)
    #: Called before each shard is stored.
    before: Callable[[], None] = lambda: None

    def publish(self, shard: NewShard) -> None:
        """Store an encoded shard."""
        self.before()
        ref = put_shard(
            self.storage, self.writer, shard.name(self.next_row), memoryview(shard.data).cast("B")
        )
        self.next_row += shard.rows
        self.written.append((ref.path, ref.name.size))
        logger.info("compacted into %s: %d rows", self.storage.uri_of(ref.path), shard.rows)

    def check_end(self, end: int) -> None:
        """Raise unless exactly the rows before ``end`` were written."""
        if self.next_row != end:
            raise CorruptData(
                f"rows up to {self.next_row} of writer {self.writer!r} were merged, expected {end}: "
                "the shards do not hold the rows that their names state; run `rlio verify`",
                uri=self.storage.uri,
            )


def merged(
    sources: Sources,
    segments: list[Segment],
    publisher: Publisher,
    options: Options,
    *,
    provenance: str,
    signed: bool = False,
) -> Compacted:
    """Encode and store the rows of segments of one schema.

    Args:
        sources: The root of the segments.
        segments: The segments to merge.
        publisher: Stores the new shards.
        options: The options of `compact`.
        provenance: JSON text for the footers of the new shards.
        signed: Whether a column names the writer of each row.
    """
    first, before = publisher.next_row, len(publisher.written)
    rows = sum(segment.rows for segment in segments)
    if options.dry_run:
        publisher.next_row += rows
    else:
        schema = sources.schema(segments[0])
        if signed:
            schema = with_writer_column(schema)
            publisher.storage.put(schema_path(schema.hash), schema.text.encode())
        merger = ParquetMerger(
            schema,
            provenance=provenance,
            compression=options.compression,
            max_bytes=options.max_bytes,
            publish=publisher.publish,
        )
        for segment, file in sources.loaded(segments):
            merger.add(file, skip=segment.skip, writer=segment.ref.writer if signed else None)
        merger.finish()
        publisher.check_end(first + rows)
    written = publisher.written[before:]
    return Compacted(
        writer=publisher.writer,
        first=first,
        rows=rows,
        sources=tuple(sources.storage.uri_of(segment.ref.path) for segment in segments),
        shards=tuple(publisher.storage.uri_of(path) for path, _ in written),
        bytes_before=size_of(segments),
        bytes_after=sum(size for _, size in written),
    )


def is_by_row(schema: Schema) -> bool:
    """Whether rows can be cut anywhere, because they are of one agent and without sequences."""
    return not schema.multi_agent and not any(p.has_sequences for p in schema.policies.values())


def size_of(segments: list[Segment]) -> int:
    """Bytes of the shards."""
    return sum(segment.ref.name.size for segment in segments)
