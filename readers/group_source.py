"""Row groups of a data set in an order: what `DatasetReader` cuts its batches from.

A position is the number of a unit (step, sequence or joint step) within an epoch. Recorded order needs the
footer of the shard it is in; shuffled order needs all footers once, to know how many units each group has.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples, count_units, split_units
from rlio.columns import Columns, is_per_sequence
from rlio.dataset import Dataset
from rlio.errors import CorruptData, DataNotFound, OptionError
from rlio.interfaces import Batch, Unit
from rlio.multi_agent import step_numbers
from rlio.replay.order import WindowOrder, WindowRef
from rlio.schemas.filling import Filling
from rlio.storage.listing import Segment
from rlio.storage.names import SCHEMA_DIR
from rlio.storage.shards import OpenShard

__all__ = ["GroupSource", "RecordedOrder", "WindowedOrder", "open_groups"]

logger = logging.getLogger("rlio")

T = TypeVar("T")

# Footers of this many shards stay parsed; a window of row groups seldom spans more.
_OPEN_SHARDS = 16


@dataclass(frozen=True)
class GroupOptions:
    """What is read of each group.

    Attributes:
        columns: Logical columns; None: all.
        skip_damage: Whether damage is counted and passed over instead of raised.
        filling: Adds the columns that a shard lacks; None where none may be lacking.
    """

    columns: list[str] | None = None
    skip_damage: bool = False
    filling: Filling | None = None


class _Shards:
    """Opens shards and reads their groups; used from one thread at a time."""

    def __init__(self, dataset: Dataset, options: GroupOptions, unit: Unit, *, by_row: bool) -> None:
        self._dataset = dataset
        self._unit = unit
        self._by_row = by_row
        self._options = options
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._damaged: set[tuple[int, int]] = set()
        #: Rows lost to damage.
        self.skipped = 0

    @property
    def segments(self) -> list[Segment]:
        return self._dataset.segments

    def open(self, segment: int) -> OpenShard | None:
        """The shard of a segment; None if it is damaged as a whole, which is then counted."""
        shard = self._open.get(segment)
        if shard is None:
            try:
                shard = self._dataset.open_shard(self.segments[segment])
            except (CorruptData, DataNotFound) as error:
                self._lose(segment, -1, self.segments[segment].rows, error)
                return None
            self._check_schema(shard, self.segments[segment])
            self._open[segment] = shard
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(segment)
        return shard

    def _check_schema(self, shard: OpenShard, segment: Segment) -> None:
        """Raise where the schemas by which units are told apart do not have this shard's."""
        if shard.schema.hash not in self._dataset.schemas:
            raise CorruptData(
                f"its schema {shard.schema.hash} is not under {SCHEMA_DIR}/: restore {SCHEMA_DIR}/"
                f"{shard.schema.hash}.json; the shard's footer holds its text",
                uri=self._dataset.storage.uri_of(segment.ref.path),
            )

    def spans(self, segment: int) -> list[tuple[int, int]]:
        """(first unit, units) of each group, those cut off by the segment having none.

        A shard that is damaged as a whole is one group of its rows: what is lost is counted when reached.
        """
        part = self.segments[segment]
        shard = self.open(segment)
        if shard is None:
            return [(0, part.rows if self._by_row else 0)]
        stop = part.skip + part.rows
        if not self._by_row:
            if (part.skip, stop) != (0, sum(shard.rows)):
                raise CorruptData(
                    f"only rows {part.skip} to {stop - 1} of the shard are live: its {self._unit} cannot be "
                    "cut there",
                    uri=self._dataset.storage.uri_of(part.ref.path),
                )
            return [(0, size) for size in shard.units]
        starts = [0, *accumulate(shard.rows)]
        clipped = [(max(a, part.skip), min(b, stop)) for a, b in pairwise(starts)]
        return [
            (max(a, part.skip) - start, max(b - a, 0)) for (a, b), start in zip(clipped, starts, strict=False)
        ]

    def read(self, segment: int, group: int, span: tuple[int, int]) -> Batch | None:
        """The units ``span`` (first, number) of a group, filled up as the options say; None if lost."""
        shard = self.open(segment)
        if shard is None:
            return None
        try:
            batch = shard.read(group, columns=self._columns(shard))
            self._check_units(batch, shard, group, segment)
        except (CorruptData, DataNotFound) as error:
            self._lose(segment, group, shard.rows[group], error)
            return None
        if span != (0, shard.rows[group] if self._by_row else shard.units[group]):
            batch = _cut(batch, span[0], sum(span), self._unit)
        filling = self._options.filling
        return batch if filling is None else filling.fill(batch)

    def _check_units(self, batch: Batch, shard: OpenShard, group: int, segment: int) -> None:
        """Positions count what the shard says about its groups, so that it must be so."""
        expected = shard.rows[group] if self._by_row else shard.units[group]
        found = count_units(batch, self._unit)
        if found != expected:
            raise CorruptData(
                f"the row group has {found} {self._unit} and its shard says {expected}",
                uri=self._dataset.storage.uri_of(self.segments[segment].ref.path),
                record=group,
            )

    def _columns(self, shard: OpenShard) -> list[str] | None:
        """The wanted columns; with filling, those that this shard has."""
        columns = self._options.columns
        if columns is None or self._options.filling is None:
            return columns
        has = [column for policy in shard.schema.policies.values() for column in policy.columns]
        # Rows of which everything is filled are counted by a column that goes again.
        found = [column for column in columns if column in has]
        return found or [column for column in has if not is_per_sequence(column)][:1]

    def _lose(self, segment: int, group: int, rows: int, error: Exception) -> None:
        """Count lost rows once, or raise."""
        if not self._options.skip_damage:
            raise error
        if (segment, group) not in self._damaged:
            self._damaged.add((segment, group))
            self.skipped += rows
            logger.warning("skipped %d rows: %s", rows, error)


class _Ahead(Generic[T]):
    """Loads in a background thread what will be wanted next, one item ahead."""

    def __init__(self, load: Callable[[Any], T]) -> None:
        self._load = load
        self._pool: ThreadPoolExecutor | None = None
        self._key: Hashable = None
        self._future: Future[T] | None = None

    def get(self, key: Any) -> T:
        """The item of ``key``, from the background if it was announced."""
        future, announced = self._future, self._key
        self._future = self._key = None
        if future is not None and announced == key:
            return future.result()
        if future is not None:
            wait([future])  # The loader is not to run in two threads at once.
        return self._load(key)

    def announce(self, key: Any) -> None:
        """Begin to load the item of ``key``."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rlio-decode")
        self._key, self._future = key, self._pool.submit(self._load, key)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
            self._future = self._key = None


class GroupSource(ABC):
    """Units of an epoch by position.

    Args:
        dataset: What is read.
        options: How.
        unit: What is counted.
        by_row: Whether a unit is a row.
    """

    def __init__(self, dataset: Dataset, options: GroupOptions, unit: Unit, *, by_row: bool) -> None:
        self._shards = _Shards(dataset, options, unit, by_row=by_row)
        self.unit = unit
        #: Units of an epoch.
        self.total = 0
        if not options.skip_damage:
            dataset.check_complete()
        for where, rows in dataset.lost_rows():
            self._shards.skipped += rows
            logger.warning("skipped %d rows of %s, which are missing: %s", rows, dataset.uri, where)

    @property
    def skipped(self) -> int:
        """Rows lost to damage so far."""
        return self._shards.skipped

    @property
    @abstractmethod
    def layout(self) -> str:
        """Names what positions depend on besides the snapshot: a short text."""

    @abstractmethod
    def units(self, epoch: int, start: int, stop: int) -> Iterator[tuple[Batch, int]]:
        """The units at positions ``start`` to ``stop - 1``, and how many; fewer where damage was skipped."""

    @abstractmethod
    def rewind(self) -> None:
        """Forget what was decoded: it is the caller's now, and may have been changed."""

    @abstractmethod
    def close(self) -> None:
        """End the background thread."""


class RecordedOrder(GroupSource):
    """Writers by id, rows ascending."""

    def __init__(self, dataset: Dataset, options: GroupOptions, unit: Unit, *, by_row: bool) -> None:
        super().__init__(dataset, options, unit, by_row=by_row)
        count = len(dataset.segments)
        if by_row:
            sizes = [segment.rows for segment in dataset.segments]
        else:
            sizes = [sum(size for _, size in self._shards.spans(index)) for index in range(count)]
        self._starts = [0, *accumulate(sizes)]
        self.total = self._starts[-1]
        self._ahead: _Ahead[_Group] = _Ahead(self._load)
        self._group: _Group | None = None
        self._spans_of = -1
        self._spans: list[tuple[int, int]] = []
        self._span_starts = [0]

    @property
    def layout(self) -> str:
        return f"{self.total} {self.unit}"

    def units(self, epoch: int, start: int, stop: int) -> Iterator[tuple[Batch, int]]:
        """See `GroupSource.units`. Batches are views of the group, which nobody else gets."""
        while start < stop:
            group = self._group
            if group is None or not group.start <= start < group.stop:
                group = self._ahead.get(start)
                if group.stop < self.total:
                    self._ahead.announce(group.stop)
            end = min(stop, group.stop)
            head, rest = _split(group.batch, start - group.start, end - group.start, self.unit)
            self._group = _Group(end, group.stop, rest)
            if head is not None:
                yield head, end - start
            start = end

    def rewind(self) -> None:
        self._group = None

    def _load(self, position: int) -> _Group:
        """The group that holds ``position``."""
        segment = bisect_right(self._starts, position) - 1
        if self._spans_of != segment:
            # Kept from group to group: a JSON shard has one a line, and as many as there are rows.
            self._spans = self._shards.spans(segment)
            self._span_starts = [0, *accumulate(size for _, size in self._spans)]
            self._spans_of = segment
        index = bisect_right(self._span_starts, position - self._starts[segment]) - 1
        if index >= len(self._spans):
            raise CorruptData(
                "the shard holds fewer rows than its name says",
                uri=self._shards.segments[segment].ref.path,
            )
        start = self._starts[segment] + self._span_starts[index]
        span = self._spans[index]
        return _Group(start, start + span[1], self._shards.read(segment, index, span))

    def close(self) -> None:
        self._ahead.close()
        self._group = None


@dataclass(frozen=True)
class _Group:
    """What nobody got yet of a decoded group, at its place in the epoch; without a batch if it is lost.

    Batches are views: what was given may have been changed, the columns by which units are told apart too.
    """

    start: int
    stop: int
    batch: Batch | None


@dataclass(frozen=True)
class _Window:
    """A decoded window: its units in recorded order.

    Attributes:
        batch: The units that are not lost; None if all are.
        place: Where each unit of the window is in the batch (-1: lost); None where nothing is lost.
        steps: Policy id -> joint step of each row, counted through the window; None for rows and sequences.
            Equal (eps_id, t) in two groups are two steps: ids may repeat from writer to writer.
    """

    batch: Batch | None
    place: NDArray[np.int64] | None
    steps: dict[str, NDArray[np.int64]] | None


class WindowedOrder(GroupSource):
    """Windows of row groups permuted, units permuted within: `rlio.replay.order.WindowOrder`."""

    def __init__(
        self, dataset: Dataset, options: GroupOptions, unit: Unit, *, by_row: bool, seed: int
    ) -> None:
        super().__init__(dataset, options, unit, by_row=by_row)
        self._groups: list[tuple[int, int, int, int]] = []
        for segment in range(len(dataset.segments)):
            for group, (first, size) in enumerate(self._shards.spans(segment)):
                if size:
                    self._groups.append((segment, group, first, size))
        self._order = self._order_of(seed)
        self.total = len(self._order)
        self._ahead: _Ahead[_Window] = _Ahead(self._load)
        self._current: tuple[int, int] | None = None
        self._window = _Window(None, None, None)
        self._rows = np.empty(0, np.int64)

    @cached_property
    def layout(self) -> str:
        """Windows are made of row groups, so that the same rows in other groups come in another order."""
        sizes = np.array([size for *_, size in self._groups], "<i8")
        return f"{self.total} {self.unit} {hashlib.blake2b(sizes.tobytes(), digest_size=8).hexdigest()}"

    def reseed(self, seed: int) -> None:
        """Take another seed: that of a saved state."""
        self._order = self._order_of(seed)
        self._current = None

    def rewind(self) -> None:
        self._current = None

    def units(self, epoch: int, start: int, stop: int) -> Iterator[tuple[Batch, int]]:
        """See `GroupSource.units`. Batches are copies."""
        while start < stop:
            window = self._order.window_at(epoch, start)
            self._enter(epoch, window)
            end = min(stop, window.stop_position)
            rows = self._rows[start - window.start_position : end - window.start_position]
            if self._window.place is not None:
                rows = self._window.place[rows]
                rows = rows[rows >= 0]
            if self._window.batch is not None and len(rows):
                yield _take(self._window.batch, rows, self.unit, self._window.steps), len(rows)
            start = end

    def _enter(self, epoch: int, window: WindowRef) -> None:
        """Make ``window`` the current one, and announce the one after it."""
        if self._current == (epoch, window.index):
            return
        self._window = self._ahead.get(window.index)
        self._rows = self._order.rows_in(epoch, window)
        self._current = (epoch, window.index)
        last = window.stop_position == self.total
        following = (
            self._order.window_at(epoch + 1, 0)
            if last
            else self._order.window_at(epoch, window.stop_position)
        )
        if following.index != window.index:
            self._ahead.announce(following.index)

    def _load(self, index: int) -> _Window:
        parts: list[Batch] = []
        place: list[NDArray[np.int64]] = []
        steps: dict[str, list[NDArray[np.int64]]] = {}
        found = 0
        for number in self._order.groups_of(index):
            segment, group, first, size = self._groups[number]
            batch = self._shards.read(segment, group, (first, size))
            if batch is None:
                place.append(np.full(size, -1, np.int64))
                continue
            if isinstance(batch, MultiAgentBatch):
                for pid, own in step_numbers(batch)[0].items():
                    steps.setdefault(pid, []).append(own + found)
            parts.append(batch)
            place.append(np.arange(found, found + size))
            found += size
        whole = found == sum(len(numbers) for numbers in place)
        joined = concat_samples(parts) if len(parts) > 1 else parts[0] if parts else None
        numbers = {pid: np.concatenate(own) for pid, own in steps.items()}
        return _Window(joined, None if whole else np.concatenate(place), numbers or None)

    def _order_of(self, seed: int) -> WindowOrder:
        return WindowOrder([size for *_, size in self._groups], seed=seed)

    def close(self) -> None:
        self._ahead.close()
        self._window = _Window(None, None, None)
        self._current = None


def open_groups(dataset: Dataset, options: GroupOptions, *, seed: int | None) -> GroupSource:
    """The groups of a data set in recorded order, or shuffled by ``seed``."""
    schemas = dataset.schemas.values()
    joint = any(schema.multi_agent for schema in schemas)
    sequences = any(
        policy.has_sequences and (options.columns is None or Columns.SEQ_LENS in options.columns)
        for schema in schemas
        for policy in schema.policies.values()
    )
    _check_columns(dataset, options.columns)
    unit: Unit = "sequences" if sequences and not joint else "steps"
    by_row = not joint and not sequences
    if seed is None:
        return RecordedOrder(dataset, options, unit, by_row=by_row)
    return WindowedOrder(dataset, options, unit, by_row=by_row, seed=seed)


def _check_columns(dataset: Dataset, columns: list[str] | None) -> None:
    """Refuse a choice of columns without those by which units are told apart."""
    if columns is None:
        return
    states = [name for name in columns if is_per_sequence(name)]
    if states and Columns.SEQ_LENS not in columns:
        raise OptionError(
            f"columns={columns}: {states[0]} has a row a sequence; add 'seq_lens', or leave it out"
        )
    for schema in dataset.schemas.values():
        for policy in schema.policies.values() if schema.multi_agent else ():
            for name in (Columns.EPS_ID, Columns.T):
                if name in policy.columns and name not in columns:
                    raise OptionError(
                        f"columns={columns}: joint steps of several agents are told apart by eps_id and t; "
                        f"add {name!r}"
                    )


def _split(batch: Batch | None, start: int, stop: int, unit: Unit) -> tuple[Batch | None, Batch | None]:
    """Units ``start`` to ``stop - 1`` of a batch, and those after them, as views."""
    if batch is None:
        return None, None
    if unit == "steps" and isinstance(batch, SampleBatch):
        return (batch if start == 0 and stop == len(batch) else batch[start:stop]), batch[stop:]
    rest = split_units(batch, start, unit)[1] if start else batch
    return split_units(rest, stop - start, unit)


def _cut(batch: Batch, start: int, stop: int, unit: Unit) -> Batch:
    """Units ``start`` to ``stop - 1`` of a batch, as views."""
    part = _split(batch, start, stop, unit)[0]
    assert part is not None
    return part


def _take(
    batch: Batch, units: NDArray[np.int64], unit: Unit, steps: dict[str, NDArray[np.int64]] | None
) -> Batch:
    """The given units of a batch in that order, as copies; ``steps`` numbers those of several agents."""
    if isinstance(batch, MultiAgentBatch):
        numbers = steps or {}
        rank = np.full(max(int(own.max(initial=-1)) for own in numbers.values()) + 1, -1, np.int64)
        rank[units] = np.arange(len(units))
        chosen = {pid: _rows_by_rank(rank[numbers[pid]]) for pid in batch}
        return MultiAgentBatch(
            {pid: batch[pid][rows] for pid, rows in chosen.items() if len(rows)}, len(units)
        )
    if unit == "steps":
        taken: SampleBatch = batch[units]
        return taken
    lengths = np.asarray(batch[Columns.SEQ_LENS], np.int64)
    firsts = (np.cumsum(lengths) - lengths)[units]
    lengths = lengths[units]
    ends = np.cumsum(lengths)
    rows = np.arange(int(ends[-1])) + np.repeat(firsts - (ends - lengths), lengths)
    return batch._like(batch._map_rows(lambda leaf: leaf[rows], lambda leaf: leaf[units]))


def _rows_by_rank(rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows whose step was chosen, in the order of the choice."""
    rows = np.flatnonzero(rank >= 0)
    return rows[np.argsort(rank[rows], kind="stable")]
