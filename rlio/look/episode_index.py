"""The episodes of a source, joined from the streams of its segments: what each holds, and where its rows are.

An episode is the rows of one (writer, policy, eps_id, agent, environment), in any number of segments; without
``eps_id``, those up to a row that ends it. The tables of streams in the footers of rlio's shards tell all of
this without a row. Of other segments, the columns that tell episodes apart are read, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from rlio.errors import CorruptData, DataNotFound
from rlio.schemas.streams import Streams
from rlio.source.selection import Counting, GroupOptions
from rlio.source.source import OpenSegment, Source
from rlio.source.span_reader import SegmentGone, SpanReader
from rlio.support.forks import cached_property

__all__ = ["EpisodeIndex", "Seen", "join_episodes", "read_episodes", "rows_bar"]

#: What looks at the segments while they are open.
Seen: TypeAlias = Callable[[OpenSegment, Streams], None]
# A bar on a terminal, for what takes more than a second.
_BAR: Final[dict[str, Any]] = {
    "unit": " rows",
    "unit_scale": True,
    "delay": 1.0,
    "disable": None,
    "leave": False,
}


@dataclass
class EpisodeIndex:
    """The episodes of a source, one entry each, in the order of their first rows; and their fragments.

    Attributes:
        writer, policy, eps_id, agent: Identify an episode; None where the data has no such column.
        length: Number of rows.
        reward: Sum of the rewards, NaN where the rows have none.
        end: "terminated", "truncated" or "open", by the last row.
        began: When it began, in milliseconds since 1970-01-01 UTC; None: unknown.
        version: Version of the policy at its first row; None: unknown.
        first_t: ``t`` of its first row; None: unknown.
        is_trimmed: Whether the first rows of its writer were trimmed.
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
    version: list[int | None] = field(default_factory=list)
    first_t: list[int | None] = field(default_factory=list)
    is_trimmed: list[bool] = field(default_factory=list)
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

    def has_start(self) -> NDArray[np.bool_]:
        """Whether the first row of each episode is there, shape (episodes,).

        Its ``t`` is 0, or 1 where none begins at 0 and no rows were trimmed: tables may count from 1. Without
        ``t``, the rows are there unless the writer was trimmed.
        """
        counts_from_1 = 1 in self.first_t and 0 not in self.first_t and not any(self.is_trimmed)
        starts = zip(self.first_t, self.is_trimmed, strict=True)
        return np.array(
            [not is_trimmed if t is None else t == int(counts_from_1) for t, is_trimmed in starts], bool
        )

    def add(
        self,
        writer: str,
        streams: Streams,
        open_: dict[Hashable, dict[Hashable, int]],
        *,
        is_trimmed: bool = False,
    ) -> None:
        """Add the streams of the next segment.

        Args:
            writer: The writer of the segment; a stream may name another one.
            streams: The streams.
            is_trimmed: Whether the first rows of the writer were trimmed.
            open_: The episodes that later rows may continue, kept between the calls: (writer, named writer,
                policy, agent, environment) -> ``eps_id`` -> number.
        """
        length, reward, end, episode = self.length, self.reward, self.end, self.episode
        for policy, eps_id, agent, env, rows, t0, ended, sum_, named, began, _, version in zip(
            *vars(streams).values(), strict=True
        ):
            # Two roots of merged writers may name one writer.
            key = (writer, named, policy, agent, env)
            ids = open_.get(key)
            if ids is None:
                ids = open_[key] = {}
            value = np.nan if sum_ is None else sum_
            number = ids.get(eps_id)
            if number is None:
                number = ids[eps_id] = len(length)
                self.writer.append(named or writer)
                self.policy.append(policy)
                self.eps_id.append(eps_id)
                self.agent.append(agent)
                length.append(rows)
                reward.append(value)
                end.append(ended)
                self.began.append(began)
                self.version.append(version)
                self.first_t.append(t0)
                self.is_trimmed.append(is_trimmed)
            else:
                length[number] += rows
                reward[number] += value
                end[number] = ended
            episode.append(number)
            if eps_id is None and ended != "open":  # With an id, later rows still belong to the episode.
                del ids[eps_id]
        self.starts.append(len(episode))


def rows_bar(what: str, source: Source) -> tqdm[Any]:
    """A bar over the rows of a source, on a terminal; call ``update`` with the rows of each part."""
    return tqdm(total=len(source), desc=f"rlio: {what} of {source.uri}", **_BAR)


def join_episodes(source: Source, streams_of: Callable[[int], Streams]) -> EpisodeIndex:
    """Join the streams of all segments. On a terminal, a bar shows the progress after a second.

    Args:
        source: The source, without missing rows.
        streams_of: Returns the streams of a segment, by its index.

    Raises:
        CorruptData: A segment has other rows than its table of streams says.
    """
    found, open_ = EpisodeIndex(), dict[Hashable, dict[Hashable, int]]()
    whole = {segment.writer for segment in source.segments if segment.first == 0}
    with rows_bar("episodes", source) as bar:
        for index, segment in enumerate(source.segments):
            streams = streams_of(index)
            if sum(streams.rows) != segment.rows:
                raise CorruptData(
                    f"the table of streams has {sum(streams.rows)} rows, and the segment has {segment.rows}",
                    uri=source.uri_of(segment.path),
                )
            found.add(segment.writer, streams, open_, is_trimmed=segment.writer not in whole)
            bar.update(segment.rows)
    return found


def read_episodes(source: Source, *, seen: Seen | None = None) -> EpisodeIndex:
    """Join the episodes of a source, with the sums of their rewards. Keeps one group in memory.

    Reads the footers of rlio's Parquet shards; the narrow columns of other segments, and of shards of which
    only a part is live; and the rewards of shards where a sum may be infinite.

    Args:
        source: The source.
        seen: Called with each open segment, and the streams of its rows.

    Raises:
        HoleError, CorruptData: Rows are missing or damaged.
        SegmentGone: A segment is missing: list again.
    """
    reader = SpanReader(source, GroupOptions(), Counting("steps", by_row=True), given_up=set())

    def streams_of(index: int) -> Streams:
        segment = source.segments[index]
        opened = reader.open(segment)
        assert opened is not None  # Damage is raised.
        try:
            streams = source.streams(opened, segment)
        except DataNotFound as error:
            raise SegmentGone(source, segment, error) from error
        if seen is not None:
            seen(opened, streams)
        return streams

    return join_episodes(source, streams_of)
