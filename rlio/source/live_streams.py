"""The streams of the rows of a segment, which may be a part of its shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.catalog.listing import Segment
from rlio.schemas.streams import KeptTimes, Streams
from rlio.source.row_streams import plain_rewards, read_streams, without_rewards
from rlio.source.shards import OpenShard, ParquetShard

__all__ = ["exact_streams", "live_streams"]

_MAX: Final = np.finfo(np.float64).max


def live_streams(shard: OpenShard, segment: Segment) -> Streams:
    """The table of the streams of a segment's rows.

    The table of the shard counts rows that are not live, too: of a part of a shard, rows are read.

    Raises:
        CorruptData: These rows are damaged.
    """
    if segment.rows == segment.ref.name.rows:
        return shard.streams
    return read_streams(shard, segment, times=KeptTimes(shard.streams))


def exact_streams(shard: OpenShard, segment: Segment) -> Streams:
    """`live_streams` with the sum of the rewards of each stream, NaN where rows have none.

    A footer has no number for a sum that is not finite. Where its bounds do not show that the sum is NaN, the
    rewards are read.

    Raises:
        CorruptData: These rows are damaged.
    """
    streams = live_streams(shard, segment)
    if None in streams.reward and isinstance(shard, ParquetShard):  # A table of rows has every number.
        reward: list[Any] = streams.reward
        sums = None if _only_nan(shard) else _sums(shard).tolist()
        exact = [
            one if one is not None else np.nan if sums is None else sums[number]
            for number, one in enumerate(reward)
        ]
        streams = replace(streams, reward=exact)
    return without_rewards(shard, _with_versions(shard, streams))


def _with_versions(shard: OpenShard, streams: Streams) -> Streams:
    """The streams with the version of the policy, if that of a shard without such entries is constant."""
    if any(version is not None for version in streams.version):
        return streams
    found: dict[str, int] = {}
    for name, policy in shard.schema.policies.items():
        for leaf in policy.columns.get(Columns.WEIGHTS_SEQ_NO, ()):
            bounds = [shard.bounds(group).get(leaf.physical) for group in range(len(shard.rows))]
            known = {int(one) for pair in bounds for one in pair or (-1, 0)}
            if len(known) == 1:
                found[name] = known.pop()
    return replace(streams, version=[found.get(policy) for policy in streams.policy]) if found else streams


def _only_nan(shard: ParquetShard) -> bool:
    """Whether the footer shows that a sum which is not finite is NaN: no reward is infinite or very large."""
    for policy in shard.schema.policies.values():
        leaf = plain_rewards(policy)
        for group, rows in enumerate(shard.rows):
            bounds = None if leaf is None else shard.bounds(group).get(leaf.physical)
            if leaf is not None and (bounds is None or not max(map(abs, map(float, bounds))) < _MAX / rows):
                return False
    return True


def _sums(shard: ParquetShard) -> NDArray[np.float64]:
    """The sum of the rewards of each stream of a shard, by its rows."""
    sums = np.zeros(len(shard.streams))
    for index in range(len(shard.rows)):
        group = shard.read_group(index, columns=[Columns.REWARDS])
        for name, rows in group.policies().items():
            leaf = plain_rewards(shard.schema.policies[name])
            if leaf is not None:
                values = np.asarray(group.values(leaf, rows), np.float64)
                streams = group.stream if rows is None else group.stream[rows]
                sums += np.bincount(streams, weights=values, minlength=len(sums))
    return sums
