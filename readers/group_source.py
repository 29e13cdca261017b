"""Groups of a source in an order; `ColdPass` cuts its batches from them.

A position is the number of a unit (step, sequence or joint step) within an epoch. Recorded order opens only
the current segment. Shuffled order needs the units of each group, and opens all segments once if their
sources do not state them (`Source.stated_groups`). With a filter, only the passing rows have positions; they
are found before the order is drawn.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, split_units
from rlio.batch.columns import Columns
from rlio.batch.multi_agent import step_numbers
from rlio.batch.rows import ragged_rows
from rlio.errors import CorruptData
from rlio.query.filter_pushdown import Matches
from rlio.query.lanes import lane_bounds
from rlio.query.order import WindowOrder, WindowRef
from rlio.reader import Unit
from rlio.schemas.folded import Folded, join_folded
from rlio.source.ahead import Ahead
from rlio.source.damage import Damage
from rlio.source.selection import GroupOptions, counting_of
from rlio.source.source import Coming, Source, StoredSegment
from rlio.source.span_reader import Span, SpanReader
from rlio.source.together import RUN_ROWS
from rlio.support.forks import cached_property

__all__ = [
    "Dealt",
    "GroupSource",
    "Groups",
    "Piece",
    "RecordedOrder",
    "WindowedOrder",
    "digest",
    "take_units",
]

logger: logging.Logger = logging.getLogger("rlio")

# Up to so many rows, and bytes, of windows are put into their order at once.
_BLOCK_ROWS: Final = 4096
_BLOCK_BYTES: Final = 16 << 20


class Dealt(NamedTuple):
    """The units at some consecutive positions.

    Attributes:
        batch: The wanted units among those that are not lost, with frame stacks not yet looked up; None if
            there are none.
        found: Number of units that are not lost, wanted or not.
    """

    batch: Folded | None
    found: int


class _Chosen:
    """The rows of a segment that pass a filter: as bits, or as numbers if they are few.

    Args:
        rows: Their numbers within the segment, ascending.
        total: Rows of the segment.
    """

    def __init__(self, rows: NDArray[np.int64], total: int) -> None:
        self.count = len(rows)
        self._numbers: NDArray[np.uint32] | None = None
        if 32 * len(rows) < total < 1 << 32:
            self._numbers = rows.astype(np.uint32)
            return
        passes = np.zeros(total, bool)
        passes[rows] = True
        self._bits = np.packbits(passes)

    def within(self, start: int, stop: int) -> NDArray[np.int64]:
        """The passing rows from ``start`` to ``stop - 1``, counted from ``start``."""
        if self._numbers is not None:
            first, last = np.searchsorted(self._numbers, (start, stop))
            return self._numbers[first:last].astype(np.int64) - start
        bits = np.unpackbits(self._bits[start // 8 : -(-stop // 8)])
        return np.flatnonzero(bits[start % 8 :][: stop - start])

    def within_span(self, segment: StoredSegment, span: Span) -> NDArray[np.int64]:
        """The passing rows of a group, counted from its first live row."""
        start = span.first - segment.first
        return self.within(start, start + len(span.rows))


def _weigh(chosen: Mapping[StoredSegment, _Chosen] | None, segment: StoredSegment, span: Span | None) -> int:
    """How many rows the loss of a group or segment costs: only rows that would have been served."""
    if chosen is None:
        return segment.rows if span is None else len(span.rows)
    return chosen[segment].count if span is None else len(chosen[segment].within_span(segment, span))


@dataclass(frozen=True)
class Groups:
    """The groups to read.

    Attributes:
        source: Their source.
        options: What to read of each group.
        given_up: Paths of segments that are listed but missing: damage; may grow.
        matches: The rows that pass a filter, segment by segment; None: no filter.
        damage: Collects the damaged places.
        epochs: How many are read; None: any number.
    """

    source: Source
    options: GroupOptions
    given_up: set[str]
    matches: Iterator[Matches] | None = None
    damage: Damage | None = None
    epochs: int | None = None


class GroupSource(ABC):
    """The units of an epoch, by position.

    Args:
        groups: The row groups; with a filter, rows are counted.

    Raises:
        SegmentGone: A segment does not exist any more: list again.
    """

    def __init__(self, groups: Groups) -> None:
        source, options = groups.source, groups.options
        counting = counting_of(source, options.columns)
        self._matches, self._epochs = groups.matches, groups.epochs
        # Kept, because finding the rows again would decode the filter's columns each time. Takes at most a
        # bit for each row of the data, and at most 4 bytes for each row that passes.
        self._chosen: dict[StoredSegment, _Chosen] = {}
        # The reader does not refer to this object, which has it: it is freed once it is dropped.
        weigh = partial(_weigh, None if groups.matches is None else self._chosen)
        self._reader = SpanReader(
            source, options, counting, given_up=groups.given_up, weigh=weigh, damage=groups.damage
        )
        #: Whether each row is a unit.
        self.by_row: bool = counting.by_row
        #: The unit that is counted.
        self.unit: Unit = counting.unit
        #: Units of an epoch.
        self.total = 0
        #: A segment, its groups that have units, and the first unit of each group and the number of all.
        self._opened: tuple[StoredSegment | None, list[Span], list[int]] = None, [], [0]
        #: Up to where units were asked for; None: not yet.
        self._reached: int | None = None
        if not options.skip_damage:
            source.check_complete()
        for where, rows in source.lost_rows():
            self._reader.skipped += rows
            logger.warning("skipped %d rows of %s, which are missing: %s", rows, source.uri, where)

    @property
    def skipped(self) -> int:
        """Rows lost to damage so far."""
        return self._reader.skipped

    def _survey(self) -> Iterator[tuple[StoredSegment, list[tuple[Span, int]]]]:
        """Each segment with its groups that have live rows, and the units of each group."""
        source = self._reader.source
        if self._matches is None:
            unstated = [each for each in source.segments if self._reader.stated_spans(each) is None]
            opened = self._reader.in_turn(unstated, footers=True)
            for segment in source.segments:
                spans = self._reader.stated_spans(segment)
                if spans is None:
                    _, spans = next(opened)
                yield segment, [(span, span.units) for span in spans]
            return
        passing = total = 0
        for found in self._matches:
            segment = found.segment
            chosen = self._chosen[segment] = _Chosen(found.positions - found.start, found.rows)
            self._reader.skipped += found.lost  # They count because they might have passed.
            passing, total = passing + chosen.count, total + found.rows
            yield segment, [(span, len(self._passing(segment, span))) for span in found.spans]
        logger.info("the filter lets %d of %d rows of %s pass", passing, total, source.uri)

    def _passing(self, segment: StoredSegment, span: Span) -> NDArray[np.int64]:
        """The rows of a group that pass the filter, counted from its first live row."""
        return self._chosen[segment].within_span(segment, span)

    def _units_of(self, segment: StoredSegment, span: Span) -> int:
        return span.units if self._matches is None else len(self._passing(segment, span))

    def _spans_in(self, segment: StoredSegment) -> tuple[list[Span], list[int]]:
        """See `_opened`. Kept for the next groups: a JSON shard has one group a line, and as many spans."""
        if self._opened[0] != segment:
            spans = [span for span in self._reader.spans(segment) if self._units_of(segment, span)]
            starts = [0, *accumulate(self._units_of(segment, span) for span in spans)]
            self._opened = segment, spans, starts
        return self._opened[1:]

    def _follows(self, start: int, stop: int) -> bool:
        """Whether units are asked for in turn, so that more are worth reading; a rank passes over others'."""
        in_turn, self._reached = self._reached in (None, start), stop % self.total
        return in_turn

    def _expect(self, segment: StoredSegment, coming: Callable[[], Coming]) -> None:
        """`SpanReader.expect`; behind a filter, groups of other libraries' files may not be read."""
        if self._matches is None or self._reader.has_plan:
            self._reader.expect(segment, coming)

    def _passed(self, segment: StoredSegment, spans: Sequence[Span], folded: Folded) -> Folded:
        """Those of the rows of some groups that pass the filter."""
        if self._matches is None:
            return folded
        start = spans[0].first - segment.first
        rows = self._chosen[segment].within(start, spans[-1].end - segment.first)
        assert isinstance(folded.batch, SampleBatch)
        return folded if len(rows) == len(folded.batch) else replace(folded, batch=folded.batch[rows])

    @property
    @abstractmethod
    def layout(self) -> str:
        """A short text that names what positions depend on besides the snapshot."""

    @abstractmethod
    def units(self, epoch: int, start: int, stop: int, wanted: range) -> Iterator[Dealt]:
        """The units at positions ``start`` to ``stop - 1``, in parts.

        Args:
            epoch: Number of the epoch.
            start: The first position.
            stop: The position after the last.
            wanted: Which of the units that are not lost, counted from 0, to put into batches.

        Raises:
            SegmentGone: A segment does not exist: see `rlio.source.span_reader`.
        """

    @abstractmethod
    def rewind(self) -> None:
        """Drop decoded rows: the caller owns them and may have changed them."""

    @abstractmethod
    def close(self) -> None:
        """End the background thread."""

    def _new_ahead(self) -> Ahead[Any]:
        return Ahead(holds_gil=self._reader.source.holds_gil)


class RecordedOrder(GroupSource):
    """Writers by id, rows ascending."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self._segments = groups.source.segments
        self._groups: list[int] = []
        if self.by_row and groups.matches is None:
            sizes = [segment.rows for segment in self._segments]
        else:
            sizes = []
            for _, found in self._survey():
                sizes.append(sum(units for _, units in found))
                self._groups += [] if self.by_row else [units for _, units in found]
        self._starts = [0, *accumulate(sizes)]
        self.total: int = self._starts[-1]
        self._joint = any(schema.multi_agent for schema in groups.source.schemas.values())
        #: The first position, and the one after the last; a lane has a part of them.
        self._bounds = 0, self.total
        self._ahead: Ahead[_Group] = self._new_ahead()
        self._reads_ahead = True
        #: Whether what is read from the current segment on was stated.
        self._is_stated = False
        self._group: _Group | None = None

    @cached_property
    def layout(self) -> str:
        """Rows and sequences keep their order in any row groups. Joint steps within a group may not."""
        return f"{self.total} {self.unit}" + (f" {digest(self._groups)}" if self._joint else "")

    def units(self, epoch: int, start: int, stop: int, wanted: range) -> Iterator[Dealt]:
        """See `GroupSource.units`. Batches are views of the group; no other batch has the same rows."""
        found, (first, last) = 0, self._bounds
        start, stop = first + start, first + stop
        in_turn = self._follows(start, stop)
        while start < stop:
            group = self._group
            if group is None or not group.start <= start < group.stop:
                group = self._ahead.get((start, in_turn), self._load)
                if group.stop < last and self._reads_ahead:
                    self._ahead.announce((group.stop, in_turn), self._load)
            end = min(stop, group.stop)
            if group.batch is None:
                self._group = _Group(end, group.stop, None)
            else:
                low, high = max(wanted.start - found, 0), min(wanted.stop - found, end - start)
                found += end - start
                yield Dealt(self._cut(group, start + low, start + high), end - start)
            start = end

    def _cut(self, group: _Group, start: int, stop: int) -> Folded | None:
        """The units at some positions of a group; keeps the units after them."""
        self._group = group
        if start >= stop:
            return None
        assert group.batch is not None
        batch, frames = group.batch.batch, group.batch.frames
        if start > group.start:  # The units between belong to other ranks.
            batch = split_units(batch, start - group.start, self.unit)[1]
        head, rest = split_units(batch, stop - start, self.unit)
        self._group = _Group(stop, group.stop, Folded(rest, frames))
        return Folded(head, frames)

    def rewind(self) -> None:
        self._group = self._reached = None
        self._is_stated = False
        self._reader.forget()

    def _load(self, wanted: tuple[int, bool]) -> _Group:
        """The group that holds a position, and, with True, short ones after it."""
        position, in_turn = wanted
        number = bisect_right(self._starts, position) - 1
        segment = self._segments[number]
        is_new = segment != self._opened[0] or position == self._starts[number] or not self._is_stated
        if in_turn and self._reads_ahead and is_new:
            self._is_stated = True
            self._expect(segment, partial(self._coming, number, position))
        if in_turn and self._matches is None and position == self._starts[number]:
            stop = bisect_right(self._starts, self._bounds[1]) - 1
            joined = self._reader.read_joined(self._segments, number, stop)
            if joined is not None:
                return _Group(position, self._starts[number + len(joined[0])], joined[1])
        spans, starts = self._spans_in(segment)
        index = bisect_right(starts, position - self._starts[number]) - 1
        if index >= len(spans):
            raise CorruptData("the shard holds fewer rows than its name says", uri=segment.path)
        # Of groups that are read together, the last one may be the last of the lane.
        most = bisect_left(starts, self._bounds[1] - self._starts[number]) if in_turn else index + 1
        spans = spans[:most]
        stop, folded = self._reader.read_run(segment, spans, index)
        if folded is not None:
            folded = self._passed(segment, spans[index:stop], folded)
        first = self._starts[number]
        return _Group(first + starts[index], first + starts[stop], folded)

    def _coming(self, number: int, position: int) -> Iterator[tuple[StoredSegment, range | None]]:
        """What is read from a position of a segment on; see `SpanReader.expect`. Of parts, the footers."""
        first, last = self._bounds
        is_open = self._opened[0] == self._segments[number] or not self._reader.has_plan
        if position > self._starts[number] and is_open:
            spans, starts = self._spans_in(self._segments[number])
            begin = bisect_right(starts, position - self._starts[number]) - 1
            yield self._segments[number], range(spans[begin].group, spans[-1].group + 1)
            number += 1
        for at in range(number, bisect_left(self._starts, last)):
            is_whole = first <= self._starts[at] and self._starts[at + 1] <= last
            if self._starts[at] == self._starts[at + 1]:  # The filter lets none of its rows pass.
                continue
            yield self._segments[at], None if is_whole else range(0)

    def lane(self, number: int, lanes: int, *, ahead: bool) -> Self:
        """A lane of this order, whose positions count from its first unit.

        Args:
            number: Which.
            lanes: Number of lanes.
            ahead: Whether to read ahead. Lanes share what reads groups, which is for one thread at a time.
        """
        found = copy.copy(self)
        found._bounds = lane_bounds(self.total, lanes, number)
        found._ahead, found._reads_ahead = self._new_ahead(), ahead
        found.rewind()
        return found

    def close(self) -> None:
        self._ahead.close()
        self._reader.forget()
        self._group = None


class _Group(NamedTuple):
    """The unserved rows of a decoded group, at their place in the epoch; no batch if they are lost.

    Batches are views. The caller may have changed the served ones, including the columns that separate units.

    Attributes:
        start, stop: Positions of the unserved rows.
        batch: The unserved rows.
    """

    start: int
    stop: int
    batch: Folded | None


@dataclass(frozen=True)
class _Window:
    """A decoded window: its units in recorded order. Or short windows that follow each other in an epoch.

    Attributes:
        batch: The units that are not lost; None if all are lost.
        place: Index of each unit of the window in the batch; -1: lost. None: none is lost.
        steps: Policy id -> joint step of each row, counted through the window; empty for rows and sequences.
            Equal (eps_id, t) in two groups are two steps, because ids may repeat between writers.
        count: How many windows it has.
    """

    batch: Folded | None
    place: NDArray[np.int64] | None
    steps: dict[str, NDArray[np.int64]]
    count: int = 1


_NO_WINDOW = _Window(None, None, {})


class Piece(NamedTuple):
    """What a window has of a segment.

    Attributes:
        segment: The segment.
        is_whole: Whether these are all of its rows, and none is filtered.
        part: What else the order knows of it.
    """

    segment: StoredSegment
    is_whole: bool
    part: Any


#: An epoch, and windows of it that follow each other.
_Wanted: TypeAlias = tuple[int, tuple[WindowRef, ...]]

#: A group of a segment, and its units.
_Counted: TypeAlias = tuple[StoredSegment, Span, int]


class WindowedOrder(GroupSource):
    """Permutes windows of row groups, and units within each window: `rlio.query.order.WindowOrder`."""

    _order: Any  # `WindowOrder`, or another with the same methods.

    def __init__(self, groups: Groups, *, seed: int) -> None:
        super().__init__(groups)
        self._groups: list[_Counted] = []
        for segment, found in self._survey():
            self._groups += [(segment, span, units) for span, units in found if units]
        self._order = self._order_of(seed)
        self.total: int = len(self._order)
        self._begin()

    def _begin(self) -> None:
        """Hold no window."""
        self._ahead: Ahead[_Window] = self._new_ahead()
        #: What is decoded: an epoch, and the positions of its units.
        self._current: tuple[int, range] | None = None
        #: What is decoded next, and how many windows were read in turn before.
        self._coming: _Wanted | None = None
        self._in_turn = 0
        self._window = _NO_WINDOW
        self._rows = np.empty(0, np.int64)
        #: Units that were taken together, and the place of the first in the order of the window.
        self._block: tuple[int, SampleBatch] = 0, SampleBatch()

    @cached_property
    def layout(self) -> str:
        """Windows consist of row groups, so the same rows in other groups come in another order."""
        mixed = self._reader.source.window_rows
        windows = "" if mixed is None else f" {mixed}"
        return f"{self.total} {self.unit} {digest([units for _, _, units in self._groups])}{windows}"

    def reseed(self, seed: int) -> None:
        """Use another seed, that of a saved state."""
        self._order = self._order_of(seed)
        self._current = self._coming = None

    def rewind(self) -> None:
        self._current = self._coming = self._reached = None
        self._in_turn = 0
        self._reader.forget()

    def units(self, epoch: int, start: int, stop: int, wanted: range) -> Iterator[Dealt]:
        """See `GroupSource.units`. Batches are copies, or parts of one."""
        total, in_turn = 0, self._follows(start, stop)
        while start < stop:
            held = self._enter(epoch, start, in_turn)
            window = self._window
            end = min(stop, held.stop)
            first, last = start - held.start, end - held.start
            own = range(max(wanted.start - total, 0), max(wanted.stop - total, 0))
            is_all = own.start == 0 and own.stop >= last - first
            if is_all and in_turn and self.by_row and window.place is None:
                dealt = Dealt(self._cut(first, last), last - first)
            else:
                dealt = self._picked(self._rows[first:last], own)
            total += dealt.found
            yield dealt
            start = end

    def _picked(self, units: NDArray[np.int64], own: range) -> Dealt:
        """Some units of the window; ``own`` are the wanted ones among those that are not lost."""
        window = self._window
        places = units if window.place is None else window.place[units]
        places = places[places >= 0]
        taken = places[own.start : own.stop]
        if window.batch is None or not len(taken):
            return Dealt(None, len(places))
        batch = take_units(window.batch.batch, taken, self.unit, window.steps)
        return Dealt(Folded(batch, window.batch.frames), len(places))

    def _cut(self, start: int, stop: int) -> Folded:
        """The rows from a place to another in the order of the window, of which none is lost.

        More rows are taken at once, because each call costs as much as a hundred rows.
        """
        assert self._window.batch is not None
        rows, (first, block) = self._window.batch.batch, self._block
        assert isinstance(rows, SampleBatch)
        if not first <= start or stop > first + len(block):
            most = min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, rows.size_bytes() // len(rows)))
            first, block = start, rows[self._rows[start : start + max(most, stop - start)]]
            self._block = first, block
        return Folded(block[start - first : stop - first], self._window.batch.frames)

    def _enter(self, epoch: int, position: int, in_turn: bool) -> range:
        """Hold the window of a position, and announce what is next to the background thread.

        Short windows are decoded together, as many as were read in turn before, so that a reader of a few
        batches does not wait for many windows.

        Returns:
            The positions of what is held.
        """
        if self._current is not None and self._current[0] == epoch and position in self._current[1]:
            return self._current[1]
        wanted: _Wanted = epoch, (self._order.window_at(epoch, position),)
        if self._coming is not None and (self._coming[0], self._coming[1][:1]) == wanted:
            wanted = self._coming
        self._window = self._ahead.get(wanted, self._load)
        windows = wanted[1][: self._window.count]
        rows, start = [], windows[0].start_position
        for window in windows:
            rows.append(self._order.rows_in(epoch, window) + (window.start_position - start))
        self._rows, self._block = np.concatenate(rows), (0, SampleBatch())
        self._current = epoch, range(start, windows[-1].stop_position)
        self._in_turn = self._in_turn + len(windows) if in_turn else 1
        self._coming = self._next(epoch, windows[-1], self._in_turn)
        if self._coming is not None:
            self._ahead.announce(self._coming, self._load)
        return self._current[1]

    def _next(self, epoch: int, window: WindowRef, most: int) -> _Wanted | None:
        """What to decode after a window: the window after it, and up to ``most`` short ones in all."""
        following = self._following(epoch, window)
        if following is None:
            return None
        epoch, window = following
        found, rows = [window], window.rows
        while self.by_row and len(found) < most and window.stop_position < len(self._order):
            window = self._order.window_at(epoch, window.stop_position)
            rows += window.rows
            if rows > RUN_ROWS:
                break
            found.append(window)
        return epoch, tuple(found)

    def _following(self, epoch: int, window: WindowRef) -> tuple[int, WindowRef] | None:
        """The window after ``window``, and its epoch; None if it is the same, or there is none."""
        last = window.stop_position == self.total
        if last and epoch + 1 == self._epochs:
            return None
        following = self._order.window_at(epoch + last, 0 if last else window.stop_position)
        return (epoch + last, following) if following.index != window.index else None

    def _load(self, wanted: _Wanted) -> _Window:
        epoch, windows = wanted
        if (several := self._load_several(epoch, windows)) is not None:
            return several
        parts: list[Folded] = []
        place: list[NDArray[np.int64]] = []
        steps: dict[str, list[NDArray[np.int64]]] = {}
        found = 0
        for units, folded in self._runs_of(epoch, windows[0]):
            if folded is None:
                place.append(np.full(units, -1, np.int64))
                continue
            if isinstance(folded.batch, MultiAgentBatch):
                for pid, own in step_numbers(folded.batch)[0].items():
                    steps.setdefault(pid, []).append(own + found)
            parts.append(folded)
            place.append(np.arange(found, found + units))
            found += units
        joined = join_folded(parts) if parts else None
        numbers = {pid: np.concatenate(own) for pid, own in steps.items()}
        places = np.concatenate(place)
        return _Window(joined, places if (places < 0).any() else None, numbers)

    def _load_several(self, epoch: int, windows: Sequence[WindowRef]) -> _Window | None:
        """As many windows as can be decoded together, if they have whole segments; None: none or one."""
        segments: list[StoredSegment] = []
        ends: list[int] = []
        for window in windows if len(windows) > 1 else ():
            pieces = self._pieces(epoch, window)
            if not all(piece.is_whole for piece in pieces):
                break
            segments += [piece.segment for piece in pieces]
            ends.append(len(segments))
        if len(ends) < 2:
            return None
        self._expect_from(epoch, windows[0], 0, segments[0])
        joined = self._reader.read_joined(segments, 0, ends=ends)
        return None if joined is None else _Window(joined[1], None, {}, 1 + ends.index(len(joined[0])))

    def _runs_of(self, epoch: int, window: WindowRef) -> Iterator[tuple[int, Folded | None]]:
        """What is read together of a window: the number of its units, and the units; None: they are lost."""
        pieces, stop = self._pieces(epoch, window), 0
        segments = [piece.segment for piece in pieces]
        # Only whole segments are joined: not those at the ends of the window that another has a part of.
        cut = [at for at, piece in enumerate(pieces) if not piece.is_whole] + [len(pieces)]
        for at, piece in enumerate(pieces):
            if at < stop:
                continue
            self._expect_from(epoch, window, at, piece.segment)
            joined = self._reader.read_joined(segments, at, cut[bisect_left(cut, at)])
            if joined is not None:
                stop = at + len(joined[0])
                yield joined[1].batch.agent_steps(), joined[1]
            else:
                yield from self._read_piece(piece)

    def _pieces(self, epoch: int, window: WindowRef) -> list[Piece]:
        """What a window has of each segment."""
        pieces = []
        for segment, found in groupby(self._groups[window.groups.start : window.groups.stop], itemgetter(0)):
            units = {span: count for _, span, count in found}
            is_whole = self._matches is None and sum(units.values()) == segment.rows
            pieces.append(Piece(segment, is_whole, units))
        return pieces

    def _read_piece(self, piece: Piece) -> Iterator[tuple[int, Folded | None]]:
        """`_runs_of` of a part of a segment."""
        segment, units = piece.segment, piece.part
        stored: Sequence[Span] = list(units)
        if self._matches is None:
            stored = self._reader.as_stored(segment, stored)
        for spans, folded in self._reader.runs(segment, stored):
            passed = None if folded is None else self._passed(segment, spans, folded)
            yield sum(units.get(span, span.units) for span in spans), passed

    def _expect_from(self, epoch: int, window: WindowRef, at: int, segment: StoredSegment) -> None:
        """State that a window is read from one of its pieces on, which is of ``segment``."""
        self._expect(segment, partial(self._coming_from, epoch, window, at))

    def _coming_from(
        self, epoch: int, window: WindowRef, at: int
    ) -> Iterator[tuple[StoredSegment, range | None]]:
        """What is read from a piece of a window on; see `SpanReader.expect`."""
        while True:
            for segment, _, units in self._pieces(epoch, window)[at:]:
                spans = list(units)
                is_whole = sum(len(span.rows) for span in spans) == segment.rows
                yield segment, None if is_whole else range(spans[0].group, spans[-1].group + 1)
            following = self._following(epoch, window)
            if following is None:
                return
            (epoch, window), at = following, 0

    def _order_of(self, seed: int) -> WindowOrder:
        rows = [units for _, _, units in self._groups]
        return WindowOrder(rows, seed=seed, window_rows=self._reader.source.window_rows)

    def close(self) -> None:
        self._ahead.close()
        self._reader.forget()
        self._window, self._block = _NO_WINDOW, (0, SampleBatch())
        self._current = self._coming = None


def digest(sizes: list[int]) -> str:
    """A short text that names numbers of units."""
    return hashlib.blake2b(np.array(sizes, "<i8").tobytes(), digest_size=8).hexdigest()


def take_units(
    batch: Batch, units: NDArray[np.int64], unit: Unit, steps: dict[str, NDArray[np.int64]]
) -> Batch:
    """The given units of a batch in that order, as copies; ``steps`` numbers the joint steps of agents."""
    if isinstance(batch, MultiAgentBatch):
        rank = np.full(max(int(own.max(initial=-1)) for own in steps.values()) + 1, -1, np.int64)
        rank[units] = np.arange(len(units))
        chosen = {pid: _rows_by_rank(rank[steps[pid]]) for pid in batch}
        return MultiAgentBatch(
            {pid: batch[pid][rows] for pid, rows in chosen.items() if len(rows)}, len(units)
        )
    if unit == "steps":
        taken: SampleBatch = batch[units]
        return taken
    rows = ragged_rows(np.asarray(batch[Columns.SEQ_LENS]), units)
    return batch._like(batch._map_rows(lambda leaf: leaf[rows], lambda leaf: leaf[units]))


def _rows_by_rank(rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows whose step was chosen, in the order of the choice."""
    rows = np.flatnonzero(rank >= 0)
    return rows[np.argsort(rank[rows], kind="stable")]
