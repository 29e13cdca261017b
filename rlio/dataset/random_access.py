"""Rows and episodes of a data set by number, without a store: each call decodes the row groups that it needs.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://random-access-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.arange(4.0), actions=np.zeros(4), rewards=np.ones(4),
    ...         terminateds=[False, True, False, True], eps_id=[7, 7, 8, 8], t=[0, 1, 0, 1]))
    >>> data = rlio.open_dataset("memory://random-access-example")
    >>> data.take([3, 0])["obs"], data[1]["obs"].item(), data.episode(1)
    (array([3., 0.]), 1.0, Episode(8: steps 0 to 2, terminated, final observation missing))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.columns import DEFAULT_POLICY_ID, is_per_sequence
from rlio.batch.episode import Episode
from rlio.batch.nested import map_structure
from rlio.catalog.listing import Segment
from rlio.errors import CorruptData, OptionError
from rlio.look.episode_index import EpisodeIndex, join_episodes
from rlio.read_options import ReadOptions
from rlio.schemas.batches import pictures_decoded
from rlio.schemas.observations import own_rows
from rlio.schemas.streams import STREAM_COLUMNS, Streams, StreamTable
from rlio.source.live_streams import live_streams
from rlio.source.row_streams import flat_columns
from rlio.source.selection import counting_of, group_options
from rlio.source.shards import OpenShard
from rlio.source.source import Source
from rlio.source.span_reader import GoneSegments, SegmentGone, Span, SpanReader
from rlio.support.turns import Turns

__all__ = ["RandomAccess"]

T = TypeVar("T")


class _Fragment(NamedTuple):
    """The rows of an episode in one segment.

    Attributes:
        segment: Index of the segment.
        policy: The policy of the rows.
        number: Number of the stream among those of the policy in the segment.
    """

    segment: int
    policy: str
    number: int


class RandomAccess:
    """Reads rows and episodes by number, for one thread at a time. Keeps the last decoded row group.

    Pictures in it stay encoded: those of the rows that are asked for are decoded.

    Args:
        dataset: The data set, or another source, without missing rows.
        columns: Logical columns; None: all, without those that have a row a sequence.
        missing: The rule for columns that only some writers have.

    Raises:
        HoleError, CorruptData: Rows are missing.
        MissingColumn: A column does not exist.
    """

    def __init__(
        self, dataset: Source, columns: Sequence[str] | None, missing: Literal["error", "drop", "fill"]
    ) -> None:
        dataset.check_complete()
        self._missing: Literal["error", "drop", "fill"] = missing
        if columns is None:
            known = [name for names in dataset.columns.values() for name in names]
            columns = [name for name in dict.fromkeys(known) if not is_per_sequence(name)]
        self._columns = list(columns)
        self._gone = GoneSegments("raise")
        self._turns = Turns("Dataset")
        self._open(dataset)

    def _open(self, dataset: Source) -> None:
        self._dataset = dataset
        options = group_options(dataset, ReadOptions(columns=self._columns), self._missing)
        counting = counting_of(dataset, options.columns)
        self._by_row = counting.by_row
        self._reader = SpanReader(dataset, options, counting, given_up=set())
        self._starts = np.array([0, *accumulate(segment.rows for segment in dataset.segments)])
        self._group: tuple[tuple[int, int], Any] | None = None
        self._index: EpisodeIndex | None = None
        #: Of segments without a table of their streams: the table that was made of their rows. Of those of
        #: other libraries' files also, of each fragment, its spans, and its rows there.
        self._tables: dict[int, Streams] = {}
        self._places: dict[_Fragment, list[tuple[int, NDArray[np.int64]]]] = {}

    def _again(self, read: Callable[[], T]) -> T:
        """Call ``read``; if shards were compacted meanwhile, list the same rows again first."""
        with self._turns.lock:
            self._gone.forget()
            while True:
                try:
                    return read()
                except SegmentGone as gone:
                    self._gone.miss(gone)
                    self._open(self._dataset.listed_again())

    def _batch(self, segment: int, span: Span) -> Any:
        """A decoded row group."""
        key = segment, span.first
        if self._group is None or self._group[0] != key:
            self._group = None  # Free it before the next one is decoded.
            if (opened := self._reader.open(self._dataset.segments[segment])) is not None:
                opened.keeps_pictures = True
            self._group = key, self._reader.read(self._dataset.segments[segment], span)
        return self._group[1]

    def _own(self, rows: SampleBatch, segment: int, span: Span) -> SampleBatch:
        """Rows of a group that share nothing with the group, which is kept, with their pictures decoded."""
        for name, column in rows.items():
            rows[name] = map_structure(lambda leaf: own_rows(leaf, np.ones(len(leaf), bool)), column)
        uri = self._dataset.uri_of(self._dataset.segments[segment].path)
        return cast(SampleBatch, pictures_decoded(rows, uri, span.group))

    # ---- rows ----

    def take(self, rows: NDArray[np.int64]) -> SampleBatch:
        """Return rows by their numbers in the order of the data set, in the given order, in new memory.

        Raises:
            OptionError: The data has several agents.
        """
        if not self._by_row:
            raise OptionError(
                "the data has several agents, whose rows have no single order: read episode(i), or a "
                "DatasetReader with policy=...",
                uri=self._dataset.uri,
            )
        return self._again(lambda: self._take(rows))

    def _take(self, rows: NDArray[np.int64]) -> SampleBatch:
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        parts: list[SampleBatch] = []
        for number in np.unique(np.searchsorted(self._starts, ascending, "right") - 1).tolist():
            segment, start = self._dataset.segments[number], int(self._starts[number])
            for span in self._reader.spans(segment):
                first = start + span.first - segment.first
                low, high = np.searchsorted(ascending, (first, first + len(span.rows)))
                if low < high:
                    part = self._batch(number, span)[ascending[low:high] - first]
                    parts.append(self._own(part, number, span))
        found = parts[0] if len(parts) == 1 else concat_samples(parts)
        taken: SampleBatch = found[np.argsort(order)]
        return taken

    # ---- episodes ----

    @property
    def episode_count(self) -> int:
        """Number of episodes, unfinished ones included; reads the footers of all shards once."""
        return self._again(lambda: len(self._joined()))

    def read(self, read: Callable[[Source], T]) -> T:
        """Call ``read`` with the data set, while no other thread reads it."""
        return self._again(lambda: read(self._dataset))

    def episode(self, number: int) -> Episode:
        """Return an episode by its number, in the order of first rows."""
        return self._again(lambda: self._episode(number))

    def _episode(self, number: int) -> Episode:
        index = self._joined()
        found = index.fragments(number)
        parts = [rows for segment, stream in found for rows in self._rows_of(self._fragment(segment, stream))]
        batch = parts[0] if len(parts) == 1 else concat_samples(parts)
        eps_id, began = index.id_of(number), index.began[number]
        if began is not None:
            batch.episode_starts = {eps_id: began}
        return Episode.from_batch(batch, id_=eps_id)

    def _joined(self) -> EpisodeIndex:
        if self._index is None:
            self._index = join_episodes(self._dataset, self._streams)
        return self._index

    def _fragment(self, segment: int, stream: int) -> _Fragment:
        """The fragment that is a stream of a segment."""
        policies = self._streams(segment).policy
        return _Fragment(segment, policies[stream], policies[:stream].count(policies[stream]))

    def streams(self, index: int) -> Streams:
        """The table of the streams of a segment's rows."""
        return self._again(lambda: self._streams(index))

    def _shard(self, segment: Segment) -> OpenShard:
        """The shard of a segment, which has a table of streams."""
        return cast(OpenShard, self._reader.open(segment))  # Damage is raised.

    def _streams(self, index: int) -> Streams:
        segment = self._dataset.segments[index]
        if isinstance(segment, Segment) and segment.rows == segment.ref.name.rows:
            return self._shard(segment).streams
        if index not in self._tables:
            self._tables[index] = (
                live_streams(self._shard(segment), segment)
                if isinstance(segment, Segment)
                else self._searched(index)
            )
        return self._tables[index]

    def _searched(self, index: int) -> Streams:
        """The streams of a segment without a table of them: reads what tells them apart."""
        segment, table = self._dataset.segments[index], StreamTable()
        known = [name for names in self._dataset.columns.values() for name in names]
        keys = [name for name in dict.fromkeys(known) if name in STREAM_COLUMNS]
        options = group_options(self._dataset, ReadOptions(columns=keys or None), self._missing)
        reader = self._reader.with_options(options, counting_of(self._dataset, options.columns))
        counts: dict[str, dict[int, int]] = {policy: {} for policy in self._policies(index)}
        for number, span in enumerate(reader.spans(segment)):
            batch = reader.read(segment, span)
            for policy, own in counts.items():
                rows = _of_policy(batch, policy)
                if rows is None:
                    continue
                streams = table.assign(policy, flat_columns(rows), len(rows))
                for stream in np.unique(streams).tolist():
                    fragment = _Fragment(index, policy, own.setdefault(stream, len(own)))
                    places = np.flatnonzero(streams == stream)
                    self._places.setdefault(fragment, []).append((number, places))
        return table.streams

    def _policies(self, index: int) -> Sequence[str]:
        opened = self._reader.open(self._dataset.segments[index])
        assert opened is not None  # Damage is raised.
        return list(opened.schema.policies)

    def _groups(self, index: int, policy: str) -> Iterator[tuple[Span, SampleBatch]]:
        """The rows of a policy, row group by row group."""
        for span in self._reader.spans(self._dataset.segments[index]):
            own = _of_policy(self._batch(index, span), policy)
            if own is not None:
                yield span, own

    def _rows_of(self, fragment: _Fragment) -> Iterator[SampleBatch]:
        """The rows of a fragment, as copies."""
        segment = self._dataset.segments[fragment.segment]
        if not isinstance(segment, Segment):
            spans = self._reader.spans(segment)
            for number, places in self._places[fragment]:
                found_rows = _of_policy(self._batch(fragment.segment, spans[number]), fragment.policy)
                assert found_rows is not None
                yield self._own(found_rows[places], fragment.segment, spans[number])
            return
        # The table of a shard of an earlier version knows no agents by name.
        names_agents = any(agent is not None for agent in self._shard(segment).streams.agent_index)
        table, found = StreamTable(names_agents=names_agents), False
        for span, rows in self._groups(fragment.segment, fragment.policy):
            numbers = table.assign(fragment.policy or DEFAULT_POLICY_ID, flat_columns(rows), len(rows))
            own = np.flatnonzero(numbers == fragment.number)
            if len(own):
                found = True
                yield self._own(rows[own], fragment.segment, span)
        if not found:
            raise CorruptData(
                f"the table of streams lists more episodes than the rows have: number {fragment.number}",
                uri=self._dataset.uri_of(segment.path),
            )


def _of_policy(batch: Any, policy: str) -> SampleBatch | None:
    """The rows of a policy; None: there are none."""
    own: SampleBatch | None = batch.get(policy) if isinstance(batch, MultiAgentBatch) else batch
    return own if own is not None and len(own) else None
