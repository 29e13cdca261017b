"""Stored shards, opened: the same few operations on Parquet and JSON shards.

Example:
    >>> shard = open_shard(storage, ref)                                     # doctest: +SKIP
    >>> shard.read(0)                                                        # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.dataset.json_shard import JsonShard, schema_lookup
from rlio.dataset.listing import ShardRef
from rlio.dataset.rows import cut_rows
from rlio.errors import CorruptData
from rlio.schemas.batches import to_folded
from rlio.schemas.folded import Folded, unfold
from rlio.schemas.json_lines import SchemaLookup
from rlio.schemas.parquet_statistics import Bounds
from rlio.schemas.schema import Schema
from rlio.schemas.shard_file import ShardFile
from rlio.schemas.streams import Streams
from rlio.storage.filesystem import Storage

__all__ = ["OpenShard", "ParquetShard", "open_shard"]


class OpenShard(Protocol):
    """A shard whose structure is known; its rows are decoded a group at a time. Not thread-safe."""

    schema: Schema
    #: Rows of each group.
    rows: list[int]
    #: Steps, sequences or joint steps of each group.
    units: list[int]

    def read(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> SampleBatch | MultiAgentBatch:
        """Check and decode one group into a batch that nobody else holds.

        Args:
            index: Number of the group.
            columns: Logical columns; None: all.
            rows: Those of the group's rows to give, where only a part of it is live: whole written batches,
                or any rows where there are neither sequences nor several agents. None: all.

        Raises:
            CorruptData: The group is damaged; ``uri`` and ``record`` say where.
        """

    def read_folded(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> Folded:
        """`read`, but that frame stacks are not looked up yet."""

    def bounds(self, index: int) -> Mapping[str, Bounds]:
        """The least and greatest values of a group, by physical column, as far as they are known unread."""

    def streams(self) -> Streams:
        """The table of streams: which episodes have rows here."""


class ParquetShard:
    """A Parquet shard; see `OpenShard`."""

    def __init__(self, storage: Storage, ref: ShardRef) -> None:
        self._file = ShardFile(
            lambda start, stop: storage.read_range(ref.path, start, stop),
            size=ref.name.size,
            footer_crc32=ref.name.footer_crc32,
            uri=storage.uri_of(ref.path),
            limits=storage.limits,
        )
        self.schema = self._file.schema
        self.rows = [info.rows for info in self._file.groups]
        self.units = [info.units for info in self._file.groups]
        if sum(self.rows) != ref.name.rows:
            raise CorruptData(
                f"the shard holds {sum(self.rows)} rows and its name says {ref.name.rows}",
                uri=storage.uri_of(ref.path),
            )

    @property
    def provenance(self) -> dict[str, Any]:
        """What made the data; see `rlio.schemas.provenance`."""
        return self._file.provenance

    def read(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> SampleBatch | MultiAgentBatch:
        """See `OpenShard`."""
        return unfold([self.read_folded(index, columns=columns, rows=rows)])

    def read_folded(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> Folded:
        """See `OpenShard`."""
        group = self._file.read_group(index, columns=columns, batches=True)
        folded = to_folded(group, columns=columns)
        if rows is None:
            return folded
        return replace(folded, batch=cut_rows(folded.batch, rows, group.policies(), uri=self._file.uri))

    def bounds(self, index: int) -> Mapping[str, Bounds]:
        """See `OpenShard`."""
        return self._file.bounds[index]

    def streams(self) -> Streams:
        """See `OpenShard`."""
        return self._file.streams


def open_shard(storage: Storage, ref: ShardRef, *, schemas: SchemaLookup | None = None) -> OpenShard:
    """Open a shard of either kind.

    Args:
        storage: The data set's root.
        ref: The shard.
        schemas: Gives schemas by hash to JSON shards, which name them; None reads them from ``storage``.

    Raises:
        CorruptData: What says how to read it is damaged.
        DataNotFound: It is not there any more.
    """
    if ref.name.suffix == "parquet":
        return ParquetShard(storage, ref)
    return JsonShard(storage, ref, schemas or schema_lookup(storage))
