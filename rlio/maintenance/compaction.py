"""The parts that both kinds of compaction share: options, reports, reading shards and storing shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.catalog.commit import put_shard
from rlio.catalog.listing import Segment, ShardRef
from rlio.catalog.names import schema_path
from rlio.errors import CorruptData, OptionError
from rlio.log.publisher import NewShard
from rlio.maintenance.merging import ParquetMerger, open_whole, with_writer_column
from rlio.schemas.parquet import Compression
from rlio.schemas.schema import Schema
from rlio.source.shards import ParquetShard
from rlio.source.together import MOST_OPEN, Together
from rlio.source.videos import Videos, keep_videos
from rlio.storage.filesystem import Storage
from rlio.storage.parallel import each
from rlio.support.options import check_choice, check_count, set_options
from rlio.support.progress import Progress

__all__ = [
    "CompactReport",
    "Compacted",
    "Identity",
    "Options",
    "Source",
    "check_parquet",
    "identities",
    "identity",
    "is_by_row",
    "merged",
    "size_of",
]

logger: logging.Logger = logging.getLogger("rlio")

_MOST_BYTES: Final = 512 << 20
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

    def __post_init__(self) -> None:
        check_choice("on_error", self.on_error, ("raise", "skip"))
        set_options(
            self,
            max_bytes=check_count("max_bytes", self.max_bytes, least=1, most=_MOST_BYTES, of="bytes"),
            # One shard needs no merging.
            min_shards=check_count("min_shards", self.min_shards, least=2, of="shards"),
        )


class Identity(NamedTuple):
    """The properties that shards must share to be merged."""

    schema: str
    provenance: str


def check_parquet(storage: Storage, segments: Iterable[Segment]) -> None:
    """Refuse a data set that has JSON shards.

    Raises:
        OptionError: The data set has some.
    """
    uris = [storage.uri_of(s.ref.path) for s in segments if s.ref.name.suffix != "parquet"]
    if uris:
        raise OptionError(
            f"found {len(uris)} shards of JSON lines, such as {uris[0]}; compact merges Parquet shards; "
            "copy the data set into a new root: write each batch of rlio.DatasetReader(ROOT, epochs=1) "
            "with rlio.ParquetWriter(NEW)",
            uri=storage.uri,
        )


def identity(shard: ParquetShard) -> Identity:
    """Return what an open shard must share with the shards it is merged with."""
    return Identity(shard.schema.hash, shard.provenance_text)


def identities(storage: Storage, segments: list[Segment]) -> dict[Segment, Identity]:
    """Return the `identity` of each segment; reads their footers."""
    found = each(storage, lambda segment: identity(ParquetShard(storage, segment.ref)), segments)
    return dict(zip(segments, found, strict=True))


class Source(NamedTuple):
    """Rows to merge: a segment, and its shard if that is open."""

    segment: Segment
    shard: ParquetShard | None = None


def _keep_videos(
    videos: Videos, target: Storage, kept: set[bytes], batch: SampleBatch | MultiAgentBatch
) -> None:
    """Copy the videos whose frames are rows, unless the root of the new shards has them."""
    keep_videos(videos.known(batch), target, kept)


def merged(
    source: Storage,
    sources: Iterable[Source],
    target: Storage,
    writer: str,
    options: Options,
    *,
    first: int,
    provenance: str,
    signed: bool = False,
    before: Callable[[], None] = lambda: None,
) -> Compacted:
    """Encode and store the rows of segments of one schema.

    Args:
        source: The root of the segments.
        sources: The segments to merge, at least one; taken as they are read.
        target: The root of the new shards.
        writer: Their writer.
        options: The options of `compact`.
        first: The number of their first row.
        provenance: JSON text for their footers.
        signed: Whether a column names the writer of each row.
        before: Called before each shard is stored.
    """
    segments: list[Segment] = []
    written: list[ShardRef] = []

    def publish(shard: NewShard) -> None:
        before()
        row = written[-1].name.end if written else first
        written.append(put_shard(target, writer, shard.name(row), memoryview(shard.data).cast("B")))
        logger.info("compacted into %s: %d rows", target.uri_of(written[-1].path), shard.rows)

    def begun(schema: Schema) -> ParquetMerger:
        if signed:
            schema = with_writer_column(schema)
            target.put(schema_path(schema.hash), schema.text.encode())
        return ParquetMerger(
            schema,
            provenance=provenance,
            compression=options.compression,
            max_bytes=options.max_bytes,
            publish=publish,
            keep=partial(_keep_videos, Videos(source), target, set()) if schema.has_videos else None,
        )

    if options.dry_run:
        segments += [one.segment for one in sources]
    else:
        merger: ParquetMerger | None = None
        for part in _opened(source, sources):
            merger = merger or begun(part[0][1].schema)
            merger.add(part, writer=part[0][0].ref.writer if signed else None)
            segments += [segment for segment, _ in part]
        assert merger is not None, "there is something to merge"
        merger.finish()
    rows = sum(segment.rows for segment in segments)
    if not options.dry_run and sum(ref.name.rows for ref in written) != rows:
        raise CorruptData(
            f"{sum(ref.name.rows for ref in written)} rows of writer {writer!r} were merged, expected "
            f"{rows}: the shards do not hold the rows that their names state; run `rlio verify`",
            uri=target.uri,
        )
    return Compacted(
        writer=writer,
        first=first,
        rows=rows,
        sources=tuple(source.uri_of(segment.ref.path) for segment in segments),
        shards=tuple(target.uri_of(ref.path) for ref in written),
        bytes_before=size_of(segments),
        bytes_after=sum(ref.name.size for ref in written),
    )


def _opened(storage: Storage, sources: Iterable[Source]) -> Iterator[list[tuple[Segment, ParquetShard]]]:
    """Yield what is merged, in order, open and checked: one shard, or short ones to decode together."""
    remaining = iter(sources)
    while part := list(islice(remaining, MOST_OPEN)):
        shards = each(
            storage, lambda one: open_whole(storage, one.segment.ref, one.shard), part, ahead=_SHARDS_AHEAD
        )
        held: list[tuple[Segment, ParquetShard]] = []
        together = Together()
        for (segment, _), shard in zip(part, shards, strict=True):
            follows = bool(held) and held[-1][0].ref.writer == segment.ref.writer
            if not (follows and together.takes(shard, segment.rows)):
                if held:
                    yield held
                held, together = [], Together()
                if not together.takes(shard, segment.rows):
                    yield [(segment, shard)]
                    continue
            held.append((segment, shard))
        if held:
            yield held


def is_by_row(schema: Schema) -> bool:
    """Whether rows can be cut anywhere, because they are of one agent and without sequences."""
    return not schema.multi_agent and not any(p.has_sequences for p in schema.policies.values())


def size_of(segments: list[Segment]) -> int:
    """Bytes of the shards."""
    return sum(segment.ref.name.size for segment in segments)
