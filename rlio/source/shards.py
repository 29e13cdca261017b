"""Stored shards, opened: the same few operations for Parquet and JSON shards.

Example:
    >>> shard = open_shard(storage, ref)                                     # doctest: +SKIP
    >>> shard.read(0)                                                        # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.catalog.listing import ShardRef
from rlio.catalog.rows import cut_rows
from rlio.errors import CorruptData
from rlio.schemas.batches import pictures_decoded, to_folded
from rlio.schemas.folded import Folded, unfold
from rlio.schemas.json_lines import SchemaLookup
from rlio.schemas.parquet_metadata import FOOTER_BYTES
from rlio.schemas.shard_file import ShardFile
from rlio.schemas.streams import Streams
from rlio.source.json_shard import JsonShard, schema_lookup
from rlio.source.source import OpenSegment
from rlio.source.videos import Videos
from rlio.storage.filesystem import Storage
from rlio.storage.parallel import Range

__all__ = ["OpenShard", "ParquetShard", "open_shard", "ranges_of"]

# A shard up to this size is fetched in one request with all of its row groups: its bytes take as long as the
# way there and back that another request would cost.
_WHOLE_BYTES: Final = 4 << 20


class OpenShard(OpenSegment, Protocol):
    """A shard with a known structure: what the engine reads, and its provenance and episodes."""

    @property
    def provenance(self) -> dict[str, Any]:
        """What made the data; see `rlio.schemas.provenance`."""

    def read(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> SampleBatch | MultiAgentBatch:
        """Read like `read_folded`, and look up frame stacks."""

    @property
    def streams(self) -> Streams:
        """The table of streams: the episodes that have rows in this shard."""


class ParquetShard(ShardFile):
    """A Parquet shard; see `OpenShard`.

    Args:
        storage: The data set's root.
        ref: The shard.
        fetch: Returns the bytes [start, stop) of the shard; None reads them from ``storage``.
        keeps_pictures: See `rlio.source.source.Source`.
        videos: Those of the root; None: the shard has its own, which it checks again.

    Raises:
        CorruptData: The footer is damaged, or the shard holds other rows than its name says.
    """

    def __init__(
        self,
        storage: Storage,
        ref: ShardRef,
        *,
        fetch: Callable[[int, int], bytes] | None = None,
        keeps_pictures: bool = False,
        videos: Videos | None = None,
    ) -> None:
        self.keeps_pictures: bool = keeps_pictures
        self._videos = videos or Videos(storage)
        super().__init__(
            fetch or (lambda start, stop: storage.read_range(ref.path, start, stop)),
            size=ref.name.size,
            footer_crc32=ref.name.footer_crc32,
            uri=storage.uri_of(ref.path),
            limits=storage.limits,
        )
        if sum(self.rows) != ref.name.rows:
            raise CorruptData(
                f"the shard holds {sum(self.rows)} rows and its name says {ref.name.rows}", uri=self.uri
            )

    def read(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> SampleBatch | MultiAgentBatch:
        """See `OpenShard`."""
        return unfold([self.read_folded(index, columns=columns, rows=rows)])

    def read_folded(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> Folded:
        """See `OpenShard`."""
        group = self.read_group(index, columns=columns, batches=True)
        folded = to_folded(group, columns=columns)
        if rows is not None:
            folded = replace(folded, batch=cut_rows(folded.batch, rows, group.policies(), uri=self.uri))
        if self.schema.has_videos:
            folded = replace(folded, batch=self._videos.known(folded.batch))
        if self.keeps_pictures or not self.schema.has_pictures:
            return folded
        return replace(folded, batch=pictures_decoded(folded.batch, self.uri, index))

    def joined(self, others: Sequence[ParquetShard], columns: Sequence[str] | None) -> Folded:
        """See `rlio.source.source.OpenSegment`."""
        return to_folded(self.read_joined([self, *others], columns=columns), columns=columns)


def open_shard(
    storage: Storage,
    ref: ShardRef,
    *,
    schemas: SchemaLookup | None = None,
    keeps_pictures: bool = False,
    videos: Videos | None = None,
) -> OpenShard:
    """Open a shard of either kind.

    Args:
        storage: The data set's root.
        ref: The shard.
        schemas: Returns schemas by hash for JSON shards, which only name them; None reads them from
            ``storage``.
        keeps_pictures: See `rlio.source.source.Source`.
        videos: See `ParquetShard`.

    Raises:
        CorruptData: The parts that describe the shard are damaged.
        DataNotFound: The shard no longer exists.
    """
    if ref.name.suffix == "parquet":
        return ParquetShard(storage, ref, keeps_pictures=keeps_pictures, videos=videos)
    schemas = schemas or schema_lookup(storage)
    return JsonShard(storage, ref, schemas, keeps_pictures=keeps_pictures, videos=videos)


def ranges_of(
    storage: Storage, ref: ShardRef, opened: OpenSegment | None, groups: Sequence[int] | None
) -> Sequence[Range]:
    """See `Source.ranges`. A small shard whose groups are all read is one range."""
    path, size = ref.path, ref.name.size
    if ref.name.suffix != "parquet":  # It is read as a whole, to the byte after its last; and kept.
        return [Range(storage, path, 0, size + 1)] if opened is None and size <= _WHOLE_BYTES else ()
    if groups is None and size <= _WHOLE_BYTES:
        return [Range(storage, path, 0, size)]
    if opened is None:
        return [Range(storage, path, max(0, size - FOOTER_BYTES), size)]
    assert isinstance(opened, ShardFile)
    if opened.held_bytes:  # Its rows came with its footer.
        return ()
    wanted = opened.groups if groups is None else [opened.groups[group] for group in groups]
    return [Range(storage, path, info.start, info.stop) for info in wanted]
