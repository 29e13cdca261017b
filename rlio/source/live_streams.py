"""The streams of the rows of a segment, which may be a part of its shard."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.catalog.listing import Segment
from rlio.schemas.streams import STREAM_COLUMNS, KeptTimes, Streams, StreamTable
from rlio.source.shards import OpenShard

__all__ = ["flat_columns", "live_streams"]


def live_streams(shard: OpenShard, segment: Segment) -> Streams:
    """The table of the streams of a segment's rows.

    The table of the shard counts rows that are not live, too: of a part of a shard, rows are read.

    Raises:
        CorruptData: These rows are damaged.
    """
    if segment.rows == segment.ref.name.rows:
        return shard.streams
    known = {name for policy in shard.schema.policies.values() for name in policy.columns}
    columns = [name for name in STREAM_COLUMNS if name in known]
    table, times, start = StreamTable(), [(0, KeptTimes(shard.streams))], 0
    for group, count in enumerate(shard.rows):
        first = max(segment.skip - start, 0)
        stop = min(segment.skip + segment.rows - start, count)
        start += count
        if first < stop:
            batch = shard.read_folded(group, columns=columns or None, rows=range(first, stop)).batch
            for policy, rows in batch.policies().items():
                table.assign(policy, flat_columns(rows), len(rows), times=times)
    return table.streams


def flat_columns(rows: SampleBatch) -> dict[str, NDArray[Any]]:
    """The columns that tell streams apart."""
    return {name: to_numpy(rows[name]) for name in STREAM_COLUMNS if name in rows}
