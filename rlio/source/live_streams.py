"""The streams of the rows of a segment, which may be a part of its shard."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.catalog.listing import Segment
from rlio.schemas.streams import STREAM_COLUMNS, KeptTimes, Streams, StreamTable, Times
from rlio.source.shards import OpenShard
from rlio.source.source import OpenSegment, StoredSegment

__all__ = ["flat_columns", "live_streams", "read_streams"]


def live_streams(shard: OpenShard, segment: Segment) -> Streams:
    """The table of the streams of a segment's rows.

    The table of the shard counts rows that are not live, too: of a part of a shard, rows are read.

    Raises:
        CorruptData: These rows are damaged.
    """
    if segment.rows == segment.ref.name.rows:
        return shard.streams
    return read_streams(shard, segment, times=KeptTimes(shard.streams))


def read_streams(opened: OpenSegment, segment: StoredSegment, *, times: Times | None = None) -> Streams:
    """Make the table of the streams of a segment's rows from the columns that tell them apart.

    Args:
        opened: The segment, open.
        segment: Which of its rows.
        times: When the streams began, and were written; None: as the batches say.

    Raises:
        CorruptData: These rows are damaged.
    """
    known = {name for policy in opened.schema.policies.values() for name in policy.columns}
    columns = [name for name in STREAM_COLUMNS if name in known]
    table, start = StreamTable(), 0
    for group, count in enumerate(opened.rows):
        first = max(segment.skip - start, 0)
        stop = min(segment.skip + segment.rows - start, count)
        start += count
        if first < stop:
            part = None if (first, stop) == (0, count) else range(first, stop)
            batch = opened.read_folded(group, columns=columns or None, rows=part).batch
            for policy, rows in batch.policies().items():
                of_rows = Times(None, rows.episode_starts) if times is None else times
                table.assign(policy, flat_columns(rows), len(rows), times=[(0, of_rows)])
    return table.streams


def flat_columns(rows: SampleBatch) -> dict[str, NDArray[Any]]:
    """The columns that tell streams apart."""
    return {name: to_numpy(rows[name]) for name in STREAM_COLUMNS if name in rows}
