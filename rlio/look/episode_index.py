"""The episodes of a source, joined from the streams of its segments: what each holds, and where its rows are.

An episode is the rows of one (writer, policy, eps_id, agent, environment), in any number of segments; without
``eps_id``, those up to a row that ends it. The tables of streams in the footers of rlio's shards tell all of
this without a row. Of other segments, the columns that tell episodes apart are read, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.catalog.listing import Segment
from rlio.errors import CorruptData, DataNotFound
from rlio.schemas.column import TEXTS
from rlio.schemas.schema import Leaf, PolicySchema
from rlio.schemas.streams import Streams
from rlio.source.live_streams import live_streams, read_streams
from rlio.source.selection import Counting, GroupOptions
from rlio.source.shards import OpenShard, ParquetShard
from rlio.source.source import OpenSegment, Source
from rlio.source.span_reader import SegmentGone, SpanReader
from rlio.support.forks import cached_property

__all__ = ["EpisodeIndex", "join_episodes", "plain_rewards", "read_episodes"]

#: What looks at the shards while they are open.
Seen: TypeAlias = Callable[[OpenShard, Segment, Streams], None]

_MAX: Final = np.finfo(np.float64).max


@dataclass
class EpisodeIndex:
    """The episodes of a source, one entry each, in the order of their first rows; and their fragments.

    Attributes:
        writer, policy, eps_id, agent: Identify an episode; None where the data has no such column.
        length: Number of rows.
        reward: Sum of the rewards, NaN where the rows have none.
        end: "terminated", "truncated" or "open", by the last row.
        began: When it began, in milliseconds since 1970-01-01 UTC; None: unknown.
        episode: Of each fragment, the number of its episode. A fragment is the rows of an episode in one
            segment: a stream. Fragments come segment after segment.
        starts: Of each segment, the number of its first fragment; and the number of fragments.
    """

    writer: list[str] = field(default_factory=list)
    policy: list[str] = field(default_factory=list)
    eps_id: list[Any] = field(default_factory=list)
    agent: list[Any] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    began: list[int | None] = field(default_factory=list)
    episode: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])

    def __len__(self) -> int:
        return len(self.length)

    def id_of(self, number: int) -> Any:
        """The id of an episode; without ``eps_id``, its number."""
        eps_id = self.eps_id[number]
        return number if eps_id is None else eps_id

    def fragments(self, number: int) -> list[tuple[int, int]]:
        """The fragments of an episode, in order: index of the segment, and of the stream in it."""
        order, ends, starts = self._by_episode
        found = order[ends[number] : ends[number + 1]]
        segments = np.searchsorted(starts, found, "right") - 1
        streams = found - starts[segments]
        return list(zip(segments.tolist(), streams.tolist(), strict=True))

    @cached_property
    def _by_episode(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The fragments sorted by episode; where those of each episode begin; and `starts`."""
        episode = np.array(self.episode, np.int64)
        ends = np.append(0, np.bincount(episode, minlength=len(self)).cumsum())
        return np.argsort(episode, kind="stable"), ends, np.array(self.starts, np.int64)

    def add(self, writer: str, streams: Streams, open_: dict[Hashable, dict[Hashable, int]]) -> None:
        """Add the streams of the next segment.

        Args:
            writer: The writer of the segment; a stream may name another one.
            streams: The streams.
            open_: The episodes that later rows may continue, kept between the calls: (writer, policy, agent,
                environment) -> ``eps_id`` -> number.
        """
        length, reward, end, episode = self.length, self.reward, self.end, self.episode
        for policy, eps_id, agent, env, rows, _, ended, sum_, named, began, _ in zip(
            *vars(streams).values(), strict=True
        ):
            key = (named or writer, policy, agent, env)
            ids = open_.get(key)
            if ids is None:
                ids = open_[key] = {}
            value = np.nan if sum_ is None else sum_
            number = ids.get(eps_id)
            if number is None:
                number = ids[eps_id] = len(length)
                self.writer.append(key[0])
                self.policy.append(policy)
                self.eps_id.append(eps_id)
                self.agent.append(agent)
                length.append(rows)
                reward.append(value)
                end.append(ended)
                self.began.append(began)
            else:
                length[number] += rows
                reward[number] += value
                end[number] = ended
            episode.append(number)
            if eps_id is None and ended != "open":  # With an id, later rows still belong to the episode.
                del ids[eps_id]
        self.starts.append(len(episode))


def join_episodes(source: Source, streams_of: Callable[[int], Streams]) -> EpisodeIndex:
    """Join the streams of all segments.

    Args:
        source: The source, without missing rows.
        streams_of: Returns the streams of a segment, by its index.

    Raises:
        CorruptData: A segment has other rows than its table of streams says.
    """
    found, open_ = EpisodeIndex(), dict[Hashable, dict[Hashable, int]]()
    for index, segment in enumerate(source.segments):
        streams = streams_of(index)
        if sum(streams.rows) != segment.rows:
            raise CorruptData(
                f"the table of streams has {sum(streams.rows)} rows, and the segment has {segment.rows}",
                uri=source.uri_of(segment.path),
            )
        found.add(segment.writer, streams, open_)
    return found


def read_episodes(source: Source, *, seen: Seen | None = None) -> EpisodeIndex:
    """Join the episodes of a source, with the sums of their rewards. Keeps one group in memory.

    Reads the footers of rlio's Parquet shards; the narrow columns of other segments, and of shards of which
    only a part is live; and the rewards of shards where a sum may be infinite.

    Args:
        source: A data set of rlio.
        seen: Called with each open shard, its segment, and the streams of its live rows.

    Raises:
        HoleError, CorruptData: Rows are missing or damaged.
        SegmentGone: A segment is missing: list again.
    """
    reader = SpanReader(source, GroupOptions(), Counting("steps", by_row=True), given_up=set())

    def streams_of(index: int) -> Streams:
        segment = source.segments[index]
        opened = reader.open(segment)
        assert opened is not None  # Damage is raised.
        shard = cast(OpenShard, opened)
        try:
            if not isinstance(segment, Segment):
                return _with_exact_rewards(opened, read_streams(opened, segment))
            streams = live_streams(shard, segment)
            if seen is not None:
                seen(shard, segment, streams)
            return _with_exact_rewards(opened, streams)
        except DataNotFound as error:
            raise SegmentGone(source, segment, error) from error

    return join_episodes(source, streams_of)


# ---- sums of rewards ----


def plain_rewards(policy: PolicySchema) -> Leaf | None:
    """The leaf of the rewards of a policy's rows; None: there is not one number a row."""
    found = policy.columns.get(Columns.REWARDS, [])
    if len(found) != 1 or found[0].path or found[0].spec.shape or found[0].spec.kind in TEXTS:
        return None
    return found[0] if found[0].spec.numpy.kind in "biuf" else None


def _with_exact_rewards(opened: OpenSegment, streams: Streams) -> Streams:
    """The streams of an open segment with sums that are not finite, and NaN where rows have no rewards."""
    reward: list[Any] = streams.reward
    if None in reward and isinstance(opened, ParquetShard):  # JSON has no number that is not finite.
        sums = None if _only_nan(opened) else _sums(opened).tolist()
        reward = [
            sum_ if sum_ is not None else np.nan if sums is None else sums[number]
            for number, sum_ in enumerate(reward)
        ]
    without = {name for name, policy in opened.schema.policies.items() if plain_rewards(policy) is None}
    if without:
        reward = [
            np.nan if policy in without else sum_ for policy, sum_ in zip(streams.policy, reward, strict=True)
        ]
    return replace(streams, reward=reward)


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
