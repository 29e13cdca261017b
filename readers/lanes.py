"""The orders of a listing: that of one reader alone, and that of lanes, which ranks read without one another.

See `rlio.query.lanes`. Rows in recorded order are cut into lanes as they are. Shuffled rows are dealt in
stretches, and then in windows within each lane.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple, Self

import numpy as np

from rlio.batch import split_units
from rlio.errors import CorruptData
from rlio.query.lanes import LaneOrder, lanes_of_rank
from rlio.query.order import WindowRef, gather
from rlio.query.positions import UnitRange
from rlio.readers.group_source import (
    Groups,
    GroupSource,
    Piece,
    RecordedOrder,
    WindowedOrder,
    digest,
    take_units,
)
from rlio.schemas.folded import Folded
from rlio.source.source import StoredSegment
from rlio.support.forks import cached_property

__all__ = ["LanedOrder", "Orders"]


class _Stretch(NamedTuple):
    """Consecutive units of a segment, at most a window of them; or a larger group."""

    segment: StoredSegment
    start: int
    units: int


class LanedOrder(WindowedOrder):
    """Permutes stretches of segments and deals them to lanes: `rlio.query.lanes.LaneOrder`.

    If names and schemas state the rows, a rank opens the segments of its own lane and no other.
    Units are read lane by lane, see `lane`; damage is raised, because it would move those of other lanes.
    """

    def __init__(self, groups: Groups, *, seed: int) -> None:
        GroupSource.__init__(self, groups)
        source = groups.source
        stated = source.stated_group_rows if self.by_row and groups.matches is None else None
        if stated is not None:
            # The most rows that a group has, as far as names tell.
            largest = min(stated, max((segment.rows for segment in source.segments), default=1))
            self._window_rows = source.window_rows or 4 * largest
            cut = (_cut(segment, self._window_rows) for segment in source.segments)
        else:
            groups_of = [(segment, [units for _, units in spans]) for segment, spans in self._survey()]
            largest = max((units for _, sizes in groups_of for units in sizes), default=0)
            self._window_rows = source.window_rows or max(4 * largest, 1)
            cut = (_joined(segment, sizes, self._window_rows) for segment, sizes in groups_of)
        self._stretches = list(chain.from_iterable(cut))
        self._sizes = np.array([stretch.units for stretch in self._stretches], np.int64)
        self._seed = seed
        self.total: int = int(self._sizes.sum())
        self._reads_ahead = True
        self._begin()

    @cached_property
    def layout(self) -> str:
        """The same rows in other segments come in another order."""
        return f"{self.total} {self.unit} {digest(self._sizes.tolist())} {self._window_rows}"

    def lane(self, number: int, lanes: int, *, ahead: bool) -> Self:
        """See `RecordedOrder.lane`."""
        found = copy.copy(self)
        found._order = LaneOrder(
            self._sizes, seed=self._seed, window_rows=self._window_rows, lanes=lanes, lane=number
        )
        found._reads_ahead = ahead
        found._begin()
        found.rewind()
        return found

    def reseed(self, seed: int) -> None:
        self._seed = seed

    def _following(self, epoch: int, window: WindowRef) -> tuple[int, WindowRef] | None:
        if not self._reads_ahead or window.stop_position == len(self._order):
            return None
        return epoch, self._order.window_at(epoch, window.stop_position)

    def _pieces(self, epoch: int, window: WindowRef) -> list[Piece]:
        pieces = []
        for piece in self._order.pieces(epoch, window):
            segment, begin, units = self._stretches[piece.stretch]
            is_whole = begin == piece.start == 0 and piece.stop == units == segment.rows and self.by_row
            part = range(begin + piece.start, begin + piece.stop)
            pieces.append(Piece(segment, is_whole and self._matches is None, part))
        return pieces

    def _expect_from(self, epoch: int, window: WindowRef, at: int, segment: StoredSegment) -> None:
        if self._reads_ahead and segment != self._opened[0]:
            super()._expect_from(epoch, window, at, segment)

    def _coming_from(
        self, epoch: int, window: WindowRef, at: int
    ) -> Iterator[tuple[StoredSegment, range | None]]:
        """See `WindowedOrder`. Of parts, only the footers."""
        while True:
            for piece in self._pieces(epoch, window)[at:]:
                yield piece.segment, None if piece.is_whole else range(0)
            following = self._following(epoch, window)
            if following is None:
                return
            (epoch, window), at = following, 0

    def _read_piece(self, piece: Piece) -> Iterator[tuple[int, Folded | None]]:
        segment, part = piece.segment, piece.part
        spans, starts = self._spans_in(segment)
        low, high = bisect_right(starts, part.start) - 1, bisect_left(starts, part.stop)
        if high > len(spans):
            raise CorruptData("the shard holds fewer rows than its name says", uri=segment.path)
        at = starts[low]
        for read, folded in self._reader.runs(segment, spans[low:high]):
            units = sum(self._units_of(segment, span) for span in read)
            assert folded is not None
            passed = self._passed(segment, read, folded)
            own = range(max(part.start - at, 0), min(part.stop - at, units))
            head = split_units(passed.batch, own.stop, self.unit)[0] if own.stop < units else passed.batch
            rows = split_units(head, own.start, self.unit)[1] if own.start else head
            yield len(own), replace(passed, batch=rows)
            at += units


def _cut(segment: StoredSegment, most: int) -> Iterator[_Stretch]:
    """Stretches of a segment, which end where every ``most`` rows of the file end: there a group ends too."""
    start = 0
    while start < segment.rows:
        units = min(most - (segment.skip + start) % most, segment.rows - start)
        yield _Stretch(segment, start, units)
        start += units


def _joined(segment: StoredSegment, units: list[int], most: int) -> Iterator[_Stretch]:
    """Stretches of the groups of a segment."""
    ends = np.cumsum([0, *units])
    for start, stop in pairwise(ends[gather(ends, most)].tolist()):
        yield _Stretch(segment, start, stop - start)


class Orders:
    """The orders of a listing; each is opened when it is first used.

    Args:
        groups: Makes the groups to read.
        seed: Seed of the order; None: the recorded order.
        world: Number of ranks.
    """

    def __init__(self, groups: Callable[[], Groups], *, seed: int | None, world: int) -> None:
        self._groups = groups
        self._seed = seed
        self._world = world
        self._open: dict[bool, GroupSource] = {}
        #: An epoch, its lanes, and those that are being read.
        self._lanes: tuple[tuple[int, int], dict[int, GroupSource]] = (-1, 0), {}

    def of(self, lanes: int) -> GroupSource:
        """The order of an epoch of so many lanes; with 1, that of a reader alone."""
        laned = lanes > 1 and self._seed is not None
        if laned not in self._open:
            self.close()  # A source is for one thread at a time.
            groups, seed = self._groups(), self._seed
            if seed is None:
                self._open[laned] = RecordedOrder(groups)
            else:
                self._open[laned] = (LanedOrder if laned else WindowedOrder)(groups, seed=seed)
        return self._open[laned]

    @property
    def known(self) -> GroupSource:
        """One of the orders that are open: they have the same units."""
        return next(iter(self._open.values()))

    @property
    def skipped(self) -> int:
        """Rows lost to damage so far."""
        return max(order.skipped for order in self._open.values())

    def units(self, part: UnitRange) -> Iterator[Folded]:
        """The units of a part of an epoch, in batches."""
        source = self._lane(part) if part.lanes > 1 else self._alone()
        if part.step > 1 and source.unit == "steps" and not source.by_row:
            # A batch numbers the steps of several agents from 0, so each step is read alone.
            for place in range(part.start, part.stop, part.step):
                yield from self.units(part._replace(start=place, stop=place + 1, step=1))
            return
        at = part.start
        for dealt in source.units(part.epoch, part.start, part.stop, range(part.stop - part.start)):
            assert dealt.batch is not None
            if part.step == 1:
                yield dealt.batch
                continue
            own = np.arange(-(at - part.start) % part.step, dealt.found, part.step)
            at += dealt.found
            if len(own):
                yield replace(dealt.batch, batch=take_units(dealt.batch.batch, own, source.unit, {}))

    def _lane(self, part: UnitRange) -> GroupSource:
        key, order = (part.epoch, part.lanes), self.of(part.lanes)
        assert isinstance(order, RecordedOrder | LanedOrder)
        if self._lanes[0] != key:
            self.close()
            self._lanes = key, {}
        lanes = self._lanes[1]
        if part.lane not in lanes:
            ahead = lanes_of_rank(part.lanes, self._world) == 1
            lanes[part.lane] = order.lane(part.lane, part.lanes, ahead=ahead)
        return lanes[part.lane]

    def _alone(self) -> GroupSource:
        if self._lanes[1]:
            self._close_lanes()
        return self.of(1)

    def _close_lanes(self) -> None:
        for lane in self._lanes[1].values():
            lane.close()
        self._lanes = (-1, 0), {}

    def reseed(self, seed: int) -> None:
        """Use another seed, that of a saved state."""
        self._seed = seed
        for order in self._open.values():
            if isinstance(order, WindowedOrder):
                order.reseed(seed)

    def rewind(self) -> None:
        """Drop decoded rows: the caller owns them and may have changed them."""
        self._close_lanes()
        for order in self._open.values():
            order.rewind()

    def close(self) -> None:
        """End the background threads."""
        self._close_lanes()
        for order in self._open.values():
            order.close()
