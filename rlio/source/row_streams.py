"""The streams of the rows of a segment, by the columns that tell them apart: no table of them is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns
from rlio.schemas.column import TEXTS
from rlio.schemas.leaves import Leaf
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.streams import TABLE_COLUMNS, Streams, StreamTable, Times

if TYPE_CHECKING:
    from rlio.source.source import OpenSegment, StoredSegment

__all__ = ["flat_columns", "plain_rewards", "read_streams", "without_rewards"]


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
    columns = [name for name in TABLE_COLUMNS if name in known]
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
    return {name: to_numpy(rows[name]) for name in TABLE_COLUMNS if name in rows}


def plain_rewards(policy: PolicySchema) -> Leaf | None:
    """The leaf of the rewards of a policy's rows; None: there is not one number a row."""
    found = policy.columns.get(Columns.REWARDS, [])
    if len(found) != 1 or found[0].path or found[0].spec.shape or found[0].spec.kind in TEXTS:
        return None
    return found[0] if found[0].spec.numpy.kind in "biuf" else None


def without_rewards(opened: OpenSegment, streams: Streams) -> Streams:
    """The streams, with NaN as the sum of rows that have no rewards; a table has 0 there."""
    without = {name for name, policy in opened.schema.policies.items() if plain_rewards(policy) is None}
    if not without:
        return streams
    return replace(
        streams,
        reward=[
            np.nan if policy in without else sum_
            for policy, sum_ in zip(streams.policy, streams.reward, strict=True)
        ],
    )
