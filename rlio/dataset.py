"""`Dataset`: what is stored under one root. It opens, lists and describes; `DatasetReader` replays.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://dataset-example", writer_id="w00000-00000000") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((3, 4)), rewards=np.ones(3)))
    >>> data = rlio.open_dataset("memory://dataset-example")
    >>> len(data), data.snapshot()
    (3, {'w00000-00000000': 3})
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlio.columns import Columns
from rlio.errors import CorruptData, MissingColumn, OptionError, SchemaConflict
from rlio.schemas.schema import Schema, canonical_json
from rlio.storage.filesystem import Storage
from rlio.storage.json_shard import schema_lookup
from rlio.storage.listing import Listing, Segment, list_shards
from rlio.storage.names import ShardName, is_writer_id
from rlio.storage.publish import read_header
from rlio.storage.schema_files import check_agreement, read_schemas
from rlio.storage.shards import OpenShard, open_shard

__all__ = ["Dataset", "EpisodeInfo", "common_columns", "dataset_on", "open_dataset"]


# A listing of a growing data set is no snapshot: a hole is believed once it was seen this often.
_LISTINGS = 3


@dataclass(frozen=True)
class EpisodeInfo:
    """The rows of one episode in one shard.

    Attributes:
        writer: Id of the writer.
        policy, eps_id, agent_index, env_id: What names the episode; None where the data has no such column.
        rows: Rows in this shard.
        t0: ``t`` of the first of them.
        end: "terminated", "truncated" or "open" (it goes on in another shard, or was cut).
        reward: Sum of the rewards in this shard.
    """

    writer: str
    policy: str
    eps_id: Any
    agent_index: Any
    env_id: Any
    rows: int
    t0: int | None
    end: str
    reward: float | None


class Dataset:
    """The shards under one root, as listed when it was opened. Use `open_dataset`.

    The order of the rows is: writers by id, rows ascending within each.
    """

    def __init__(self, storage: Storage, listing: Listing) -> None:
        self.storage = storage
        self._listing = listing
        self._segments: list[Segment] = []
        self._schema_of = schema_lookup(storage)
        #: Rows that should be there and are not: writer id -> ranges of row numbers.
        self.holes: dict[str, list[range]] = {}
        for writer in sorted(listing.shards):
            coverage = listing.cover(writer)
            self._segments += coverage.segments
            if coverage.holes:
                self.holes[writer] = coverage.holes

    @property
    def uri(self) -> str:
        """The root."""
        return self.storage.uri

    @property
    def segments(self) -> list[Segment]:
        """The parts of shards that hold the rows, in order; do not modify."""
        return self._segments

    def __len__(self) -> int:
        return sum(segment.rows for segment in self._segments)

    def __repr__(self) -> str:
        return f"Dataset({self.uri!r}: {len(self)} rows, {len(self.files())} shards)"

    def snapshot(self) -> dict[str, int]:
        """Writer id -> rows listed: the version of the data set, and what makes orders reproducible."""
        ends: dict[str, int] = {}
        for segment in self._segments:
            ends[segment.ref.writer] = segment.end
        return ends

    @cached_property
    def digest(self) -> str:
        """16 hex digits that name the snapshot."""
        return hashlib.blake2b(canonical_json(self.snapshot()).encode(), digest_size=8).hexdigest()

    def files(self) -> list[str]:
        """URIs of the live Parquet and JSON shards, for other tools (DuckDB, Polars, pandas)."""
        return [self.storage.uri_of(segment.ref.path) for segment in self._segments]

    def bytes(self) -> int:
        """Bytes of the live shards."""
        return sum(segment.ref.name.size for segment in self._segments)

    @cached_property
    def schemas(self) -> dict[str, Schema]:
        """Hash -> schema of every writer's rows; read from the root at first use.

        Raises:
            CorruptData: A schema file is damaged.
        """
        return read_schemas(self.storage)

    @property
    def columns(self) -> dict[str, list[str]]:
        """Policy id -> its columns, of all writers together, in the order they were first written in."""
        merged: dict[str, dict[str, None]] = {}
        for schema in self.schemas.values():
            for pid, policy in schema.policies.items():
                merged.setdefault(pid, {}).update(dict.fromkeys(policy.columns))
        return {pid: list(columns) for pid, columns in merged.items()}

    def open_shard(self, segment: Segment) -> OpenShard:
        """Open the shard of a segment."""
        return open_shard(self.storage, segment.ref, schemas=self._schema_of)

    def episodes(self) -> Iterator[EpisodeInfo]:
        """What the shards' tables say about episodes, shard by shard: an episode cut by a shard is in both.

        Reads the footers, not the rows.
        """
        for segment in self._segments:
            table = self.open_shard(segment).streams()
            for values in zip(*vars(table).values(), strict=True):
                yield EpisodeInfo(segment.ref.writer, *values)

    def missing_shards(self) -> list[tuple[str, str, int]]:
        """Objects that are named like shards but cannot be: (URI, reason, rows that no other shard has)."""
        lost = []
        covered = self._ends()
        for path, reason in self._listing.rejected:
            parts = path.split("/")
            name = ShardName.parse(parts[-1]) if len(parts) == 3 and is_writer_id(parts[1]) else None
            if name is None:
                continue
            holes = self.holes.get(parts[1], [])
            fills_hole = any(name.first < hole.stop and hole.start < name.end for hole in holes)
            if fills_hole or name.end > covered.get(parts[1], 0):
                lost.append((self.storage.uri_of(path), reason, name.rows))
        return lost

    def lost_rows(self) -> list[tuple[str, int]]:
        """What `check_complete` would raise for, counted: (where, rows that should be there and are not)."""
        lost = [(f"{w}: rows {h.start} to {h.stop - 1}", len(h)) for w, hs in self.holes.items() for h in hs]
        ends = self._ends()
        torn: dict[str, int] = {}
        for path, _ in self._listing.rejected:
            parts = path.split("/")
            name = ShardName.parse(parts[-1]) if len(parts) == 3 and is_writer_id(parts[1]) else None
            if name is not None:
                torn[parts[1]] = max(name.end, torn.get(parts[1], 0))
        for writer, end in sorted(torn.items()):
            first = max(
                ends.get(writer, 0), max((hole.stop for hole in self.holes.get(writer, [])), default=0)
            )
            if end > first:
                lost.append((f"{writer}: rows {first} to {end - 1}", end - first))
        return lost

    def _ends(self) -> dict[str, int]:
        """Writer id -> the row up to which rows are there, or gone on purpose."""
        return self._listing.trimmed | {segment.ref.writer: segment.end for segment in self._segments}

    def check_complete(self) -> None:
        """Raise where rows that were stored are not there.

        Raises:
            CorruptData: A shard is torn, or rows between shards are missing.
        """
        for uri, reason, rows in self.missing_shards():
            raise CorruptData(
                f"the shard {reason}; its {rows} rows are lost: restore it, or read with on_error='skip'",
                uri=uri,
            )
        for writer, holes in self.holes.items():
            raise CorruptData(
                f"rows {holes[0].start} to {holes[0].stop - 1} of writer {writer!r} are missing: "
                "restore them, or read with on_error='skip'",
                uri=self.uri,
            )


def open_dataset(uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Dataset:
    """Open the data set under ``uri``: one listing and the header; no shard is read.

    Args:
        uri: A path or any fsspec URL.
        storage_options: For fsspec.

    Raises:
        DataNotFound: There is no data set.
        OptionError: It is in another format version.
    """
    return dataset_on(Storage.open(uri, storage_options=storage_options))


def dataset_on(storage: Storage) -> Dataset:
    """`open_dataset` for a root that is open already."""
    read_header(storage)
    dataset = Dataset(storage, list_shards(storage))
    for _ in range(_LISTINGS - 1):
        if not dataset.holes:
            break
        dataset = Dataset(storage, list_shards(storage))
    return dataset


def common_columns(dataset: Dataset, *, missing: str, wanted: list[str] | None) -> list[str] | None:
    """The logical columns to read under a rule for those that only some writers have.

    ``new_obs_valid`` is no such column: where it is absent, every final observation is there.

    Args:
        dataset: The data set.
        missing: "error", "drop" or "fill".
        wanted: The columns that the user asked for; None: all.

    Returns:
        ``wanted``, or, with "drop", those of them that all writers have; None: all.

    Raises:
        OptionError: ``missing`` is none of the three, or no column is left.
        MissingColumn: No writer has a wanted column.
        SchemaConflict: Only some writers have a column, and ``missing`` is "error"; or two writers give a
            column different types.
    """
    if missing not in ("error", "drop", "fill"):
        raise OptionError(f"missing={missing!r}: 'error', 'drop' or 'fill'")
    check_agreement(dataset.schemas, uri=dataset.uri, columns=wanted)
    by_policy: dict[str, list[tuple[str, set[str]]]] = {}
    for name, schema in sorted(dataset.schemas.items()):
        for pid, policy in schema.policies.items():
            by_policy.setdefault(pid, []).append((name, set(policy.columns)))
    known = {column for found in by_policy.values() for _, columns in found for column in columns}
    for column in wanted or ():
        if column not in known:
            raise MissingColumn(
                f"no column {column!r}; the data set has {', '.join(sorted(known))}",
                uri=dataset.uri,
                column=column,
            )
    partial: set[str] = set()
    for pid, found in by_policy.items():
        some = set.union(*(columns for _, columns in found)) & set(known if wanted is None else wanted)
        some.discard(Columns.NEXT_OBS_VALID)
        for name, columns in found:
            lacking = some - columns
            partial |= lacking
            if lacking and missing == "error":
                raise SchemaConflict(
                    f"schema {name} lacks {sorted(lacking)} of policy {pid!r}, which other writers have: "
                    "read with missing='drop' or missing='fill'",
                    uri=dataset.uri,
                    column=min(lacking),
                )
    left = (known if wanted is None else set(wanted)) - (partial if missing == "drop" else set())
    if wanted is not None and not left:
        raise OptionError(f"columns={wanted}: no column is left to read; name at least one")
    if not left and known:
        raise OptionError("missing='drop' leaves no column: the writers have none in common; use 'fill'")
    return sorted(left) if missing == "drop" and partial else wanted
