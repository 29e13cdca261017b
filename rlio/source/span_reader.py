"""Reads the rows of a source, one group at a time: opens, checks, cuts and fills them, and counts lost rows.

A span is the live part of a group. `rlio.readers.group_source`, `rlio.replay.build` and
`rlio.following.follow` decide the order of reading.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import Any, Literal, NamedTuple, TypeVar

from rlio.batch import Batch, count_units
from rlio.batch.columns import is_per_sequence
from rlio.errors import CorruptData, DataNotFound, HoleError, SchemaError
from rlio.schemas.folded import Folded, join_folded, unfold
from rlio.source.damage import Damage
from rlio.source.selection import Counting, GroupOptions
from rlio.source.source import Coming, OpenSegment, Source, StoredSegment
from rlio.source.together import RUN_BYTES, RUN_ROWS, Together
from rlio.storage.open_files import OpenFiles
from rlio.storage.parallel import Range

__all__ = ["GoneSegments", "SegmentGone", "Span", "SpanReader"]

logger: logging.Logger = logging.getLogger("rlio")

T = TypeVar("T")

# The footers of this many segments stay parsed; a window of groups seldom spans more.
_OPEN_SEGMENTS = 16
# Segments that are looked at for requests side by side.
_LOOKED_AT = 256
# Segments that are opened ahead, if their footers tell what is read. Fewer than half of those that stay
# parsed: until the turn of one, as many others are opened, and as many used.
_OPEN_AHEAD = _OPEN_SEGMENTS // 2 - 1


class Span(NamedTuple):
    """The live part of a group.

    Attributes:
        group: Number of the group; -1 for a segment that is damaged as a whole, which is one group.
        rows: Live rows of the group (of the segment, for a damaged one).
        first: Number of the first live row within the writer.
        units: Number of units in these rows; 0 if unknown, because all are lost.
        whole: Whether these are all rows of the group.
    """

    group: int
    rows: range
    first: int
    units: int
    whole: bool

    @property
    def end(self) -> int:
        """Number, within the writer, of the row after the last one."""
        return self.first + len(self.rows)


class SegmentGone(Exception):
    """A listed segment is missing: it was compacted and collected, or it is lost. List again."""

    def __init__(self, source: Source, segment: StoredSegment, error: DataNotFound) -> None:
        super().__init__(segment.path)
        self.source = source
        self.segment = segment
        self.error = error


class GoneSegments:
    """Listed segments that are missing: each is looked for in a few listings, then counts as lost.

    Args:
        on_error: What to do with a lost segment: "raise", or "skip" to treat its rows as damage.

    Attributes:
        given_up: Paths of the lost segments.
    """

    def __init__(self, on_error: Literal["raise", "skip"]) -> None:
        self.given_up: set[str] = set()
        self._on_error = on_error
        self._attempts: Counter[str] = Counter()

    def miss(self, gone: SegmentGone) -> None:
        """Record a missing segment before the caller lists again. Waits from the second time on.

        Raises:
            HoleError: Too many listings have named the missing segment.
        """
        path = gone.segment.path
        self._attempts[path] += 1
        attempts, hole_check = self._attempts[path], gone.source.hole_check
        if attempts <= hole_check.listings:
            logger.info("%s is gone: listing again", gone.source.uri_of(path))
            if attempts > 1:
                hole_check.sleep(hole_check.seconds)
        elif self._on_error == "skip":
            self.given_up.add(path)
        else:
            raise HoleError(
                f"the shard is listed and is not there, in {attempts} attempts: restore it, or read with "
                "on_error='skip'",
                uri=gone.source.uri_of(path),
            ) from gone.error

    def read(self, source: Source, read: Callable[[Source], T]) -> T:
        """Call ``read`` with the source; if a segment is missing, again with the same rows listed again."""
        while True:
            try:
                return read(source)
            except SegmentGone as gone:
                self.miss(gone)
            source = source.listed_again()
            if self._on_error == "raise":
                source.check_complete()

    def forget(self) -> None:
        """Count attempts from 0 again."""
        self._attempts.clear()


class SpanReader:
    """Opens segments and reads their spans; used from one thread at a time.

    Args:
        source: Opens segments; has the known schemas.
        options: What to read.
        counting: What to count.
        given_up: Paths of segments that are listed but were missing in several attempts, so count as damage;
            may grow.
        learn: Called if the schema of a segment is unknown; may replace `source` and `options`.
        weigh: Returns how many rows count as lost with a span, or, for None, with a whole segment.
        damage: Collects the damaged places.
    """

    def __init__(
        self,
        source: Source,
        options: GroupOptions,
        counting: Counting,
        *,
        given_up: set[str],
        learn: Callable[[], object] | None = None,
        weigh: Callable[[StoredSegment, Span | None], int] | None = None,
        damage: Damage | None = None,
    ) -> None:
        self.source = source
        self.options = options
        self.counting = counting
        #: Rows lost to damage.
        self.skipped: int = 0
        self._given_up = given_up
        self._learn = learn
        self._weigh = weigh or _all_rows
        #: The damaged places.
        self.damage: Damage = damage or Damage()
        self._open: OpenFiles[str, OpenSegment] = OpenFiles(_OPEN_SEGMENTS)
        # Path, group, and first row of the part of the group.
        self._damaged: set[tuple[str, int, int]] = set()
        self._plan = source.plan()
        # Whether short segments may be read together, and those that must not be.
        self._joins = True
        self._alone: set[str] = set()
        # A segment that could not be opened ahead of its turn, and why.
        self._failed: tuple[str, Exception] | None = None

    def with_options(self, options: GroupOptions, counting: Counting) -> SpanReader:
        """Return a reader of other columns that shares the open segments, so each footer is read once."""
        other = SpanReader(self.source, options, counting, given_up=self._given_up, damage=self.damage)
        other._open, other._plan = self._open, self._plan
        return other

    def expect(
        self,
        segment: StoredSegment,
        coming: Callable[[], Coming],
    ) -> None:
        """Open a segment; requests are made side by side for what is read from there on.

        Args:
            segment: The segment.
            coming: Gives what is read next, in order, beginning with the segment.

        Raises:
            SegmentGone: The segment is missing.
        """
        if self._plan is None:
            if (opened := self.open(segment)) is not None:
                self.source.expect(islice(coming(), _LOOKED_AT), self._columns(opened))
            return
        first = list(self._ranges(islice(coming(), 1)))
        if not self._plan.leads(first):
            self._plan.expect(self._ranges(coming()))
        if self.open(segment) is None:
            return
        # The places of its groups are known now. A small one is whole.
        if list(self._ranges(islice(coming(), 1))) != first:
            self._plan.expect(self._ranges(coming()))

    @property
    def has_plan(self) -> bool:
        """Whether the source's requests are planned here; otherwise `expect` states exact groups."""
        return self._plan is not None

    def _ranges(self, coming: Coming) -> Iterator[Range]:
        source, opened = self.source, self._open  # The plan must not refer to this reader, which has it.
        return (
            wanted
            for segment, groups in islice(coming, _LOOKED_AT)
            for wanted in source.ranges(segment, opened.peek(segment.path), groups)
        )

    def in_turn(
        self, segments: Sequence[StoredSegment], *, footers: bool = False
    ) -> Iterator[tuple[StoredSegment, list[Span]]]:
        """Segments that are read one after the other, with their `spans`; ``footers``: only opened."""
        for number, segment in enumerate(segments):
            yield segment, self.spans_at(segments, number, footers=footers)

    def chosen_in_turn(
        self, segments: Sequence[StoredSegment], choose: Callable[[OpenSegment], Sequence[int]]
    ) -> Iterator[tuple[StoredSegment, list[Span]]]:
        """`in_turn`, where ``choose`` says which groups of an open segment are read.

        Of remote stores, the footers of the next segments are read ahead of their turn, so that the groups of
        several segments are requested side by side.
        """
        for number, segment in enumerate(segments):
            if self._plan is not None:
                self._open_ahead(segments, number)
                self._plan.expect(self._ranges(_chosen(segments, number, self._open, choose)))
            yield segment, self.spans(segment)

    def _open_ahead(self, segments: Sequence[StoredSegment], number: int) -> None:
        """Open a segment that is read later, before the first one all up to it."""
        if number == 0:
            self.expect_in_turn(segments, 0, footers=True)
        for segment in segments[number + _OPEN_AHEAD if number else 1 : number + _OPEN_AHEAD + 1]:
            if self._failed is not None:
                return
            try:
                self.open(segment)
            except Exception as error:
                self._failed = segment.path, error  # It is raised in its turn.

    def spans_at(
        self, segments: Sequence[StoredSegment], number: int, *, footers: bool = False
    ) -> list[Span]:
        """The `spans` of one of several segments, which are read in order from there on; see `in_turn`."""
        self.expect_in_turn(segments, number, footers=footers)
        return self.spans(segments[number])

    def expect_in_turn(
        self, segments: Sequence[StoredSegment], number: int, *, footers: bool = False
    ) -> None:
        """`expect` that segments are read in order from one of them on; ``footers``: only opened."""
        groups, numbers = range(0) if footers else None, range(number, len(segments))
        self.expect(segments[number], lambda: ((segments[n], groups) for n in numbers))

    def forget(self) -> None:
        """Drop what was requested: what is read next is requested again."""
        if self._plan is not None:
            self._plan.forget()
        else:
            self.source.expect((), None)

    def open(self, segment: StoredSegment) -> OpenSegment | None:
        """Open a segment; None if it is damaged as a whole, which is then counted.

        Raises:
            SegmentGone: The segment is missing.
        """
        path = segment.path
        opened = self._open.get(path)
        if opened is not None:
            return opened
        if self._failed is not None and self._failed[0] == path:
            error, self._failed = self._failed[1], None
            raise error
        if (path, -1, 0) in self._damaged:
            return None  # Its rows are skipped batch by batch, but it is opened only once.
        try:
            opened = self.source.open_segment(segment)
        except (CorruptData, DataNotFound) as error:
            self._lose(segment, -1, self._weigh(segment, None), error)
            return None
        if opened.schema.hash not in self.source.schemas and self._learn is not None:
            self._learn()
        self.source.check_schema(opened.schema, segment)
        return self._open.add(path, opened)

    def spans(self, segment: StoredSegment) -> list[Span]:
        """Return the groups of a segment that have live rows.

        A segment that is damaged as a whole is one group. Its lost rows count when a reader reaches them.

        Raises:
            SegmentGone: The segment is missing.
        """
        opened = self.open(segment)
        live = range(segment.skip, segment.skip + segment.rows)
        if opened is None:
            units = segment.rows if self.counting.by_row else 0
            return [Span(-1, live, segment.first, units, False)]
        found = _live_spans(segment, opened.rows)
        if self.counting.by_row:
            return found
        return [
            span._replace(
                units=opened.units[span.group]
                if span.whole
                else self._count(segment, opened, span.group, span.rows)
            )
            for span in found
        ]

    def stated_spans(self, segment: StoredSegment) -> list[Span] | None:
        """Return the `spans` of a segment that its source states without opening it; None: open it."""
        stated = self.source.stated_groups(segment) if self.counting.by_row else None
        return None if stated is None else _live_spans(segment, stated)

    def as_stored(self, segment: StoredSegment, spans: Sequence[Span]) -> Sequence[Span]:
        """Return what holds the rows of neighbouring `stated_spans`: these, or parts of other groups."""
        if (
            not self.counting.by_row
            or self.source.stated_groups(segment) is None
            or self.open(segment) is None
        ):
            return spans
        rows = range(spans[0].first, spans[-1].end)
        found = [_within(span, rows) for span in self.spans(segment)]
        return [span for span in found if span.rows]

    def _count(self, segment: StoredSegment, opened: OpenSegment, group: int, rows: range) -> int:
        """Count the units of a part of a group; this needs its rows."""
        if self.counting.by_row:
            return len(rows)
        try:
            part = opened.read_folded(group, columns=self._columns(opened), rows=rows).batch
        except (CorruptData, DataNotFound) as error:
            self._lose(segment, group, len(rows), error)
            return 0
        return count_units(part, self.counting.unit)

    def read(self, segment: StoredSegment, span: Span) -> Batch | None:
        """Read the units of a span, with missing columns filled; None if they are lost.

        Raises:
            SegmentGone: The segment is missing.
        """
        folded = self.read_folded(segment, span)
        return None if folded is None else unfold([folded])

    def read_folded(self, segment: StoredSegment, span: Span) -> Folded | None:
        """Read like `read`, but without looking up frame stacks yet."""
        opened = self.open(segment)
        if opened is None or span.group < 0:
            return None
        try:
            folded = opened.read_folded(
                span.group, columns=self._columns(opened), rows=None if span.whole else span.rows
            )
            self._check(folded.batch, span, segment)
        except (CorruptData, DataNotFound, SchemaError) as error:
            self._lose(segment, span.group, self._weigh(segment, span), error, first=span.first)
            return None
        return replace(folded, batch=self.filled(folded.batch))

    def runs(
        self, segment: StoredSegment, spans: Sequence[Span]
    ) -> Iterator[tuple[Sequence[Span], Folded | None]]:
        """Read spans in order: short ones together, if rows are units; a lost one (None) alone."""
        at = 0
        while at < len(spans):
            stop, folded = self.read_run(segment, spans, at)
            yield spans[at:stop], folded
            at = stop

    def read_run(self, segment: StoredSegment, spans: Sequence[Span], at: int) -> tuple[int, Folded | None]:
        """Read the span at index ``at`` and short ones after it, see `runs`; returns the index after them."""
        opened: Any = self.open(segment)
        stop = self._end_of_run(spans, at, getattr(opened, "run_rows", 0))
        if stop > at + 1:
            groups = range(spans[at].group, spans[stop - 1].group + 1)
            # If one of them is damaged, each is read by itself, and says what it has.
            with contextlib.suppress(CorruptData, SchemaError):
                run = opened.read_run(groups, self._columns(opened))
                if len(run.batch) == spans[stop - 1].end - spans[at].first:
                    return stop, replace(run, batch=self.filled(run.batch))
        first = self.read_folded(segment, spans[at])
        if first is None or first.frames or self._end_of_run(spans, at, RUN_ROWS) == at + 1:
            return at + 1, first
        row_bytes = max(1, first.batch.size_bytes() // len(spans[at].rows))
        stop = self._end_of_run(spans, at, min(RUN_ROWS, RUN_BYTES // row_bytes))
        parts = [first]
        while at + len(parts) < stop:
            try:
                part = self.read_folded(segment, spans[at + len(parts)])
            except Exception:  # It is raised in its turn.
                break
            if part is None:
                break
            parts.append(part)
        return at + len(parts), join_folded(parts)

    def read_joined(
        self,
        segments: Sequence[StoredSegment],
        at: int,
        stop: int | None = None,
        *,
        ends: Sequence[int] | None = None,
        attributes: bool = True,
    ) -> tuple[Sequence[StoredSegment], Folded] | None:
        """Read the whole segment at index ``at`` and short ones after it together.

        Args:
            segments: The segments, in order.
            at: Index of the first to read.
            stop: Index after the last that may be read; None: there is none.
            ends: Ascending indices, at one of which what is read must end; None: at any.
            attributes: Whether batches of rows must have the attributes that they were written with.

        Returns:
            The segments that were read, at least two, and all of their rows; None if the first must be read
            by itself: it is not short, or one of them is damaged, which is then lost alone; or if none of
            ``ends`` is reached.
        """
        joins = self._joins and self.counting.by_row and at != stop
        if not joins or segments[at].path in self._alone:
            return None
        found, opened = self._neighbours(segments, at, stop)
        if ends is not None:
            most = max((end - at for end in ends if end - at <= len(found)), default=0)
            found, opened = found[:most], opened[:most]
        if len(found) < 2:
            return None
        where = None
        try:
            joined = opened[0].joined(opened[1:], self._columns(opened[0]))
            whole = len(joined.batch) == sum(segment.rows for segment in found)
            self._joins = not (attributes and joined.batch.num_grad_updates is not None)
            if whole and self._joins:
                return found, replace(joined, batch=self.filled(joined.batch))
        except (CorruptData, DataNotFound, SchemaError) as error:
            where = error.uri
        # The first one is named by errors of them all, too.
        named = {each.path for each in found[1:] if self.source.uri_of(each.path) == where}
        self._alone = named or {each.path for each in found}
        for each in found:  # Some were decoded, and are opened again to be joined.
            self._open.drop(each.path)
        return None

    def _neighbours(
        self, segments: Sequence[StoredSegment], at: int, stop: int | None
    ) -> tuple[list[StoredSegment], list[Any]]:
        """The segment at index ``at``, and those after it that can be read with it, both opened."""
        found: list[StoredSegment] = []
        together = Together()
        for segment in islice(segments, at, stop):
            if not together.has_room(segment.rows) or (found and segment.path in self._alone):
                break
            try:
                opened = self.open(segment)
            except Exception as error:
                if not found:
                    raise
                self._failed = segment.path, error  # It is raised in its turn.
                break
            if not together.takes(opened, segment.rows):
                break
            found.append(segment)
        return found, together.opened

    def _end_of_run(self, spans: Sequence[Span], at: int, most: int) -> int:
        """Index after the spans from ``at`` on that are whole neighbouring groups of ``most`` rows in all."""
        stop, rows = at + 1, len(spans[at].rows)
        while self.counting.by_row and stop < len(spans):
            before, span = spans[stop - 1], spans[stop]
            rows += len(span.rows)
            if rows > most or span.group != before.group + 1 or not (span.whole and before.whole):
                break
            stop += 1
        return stop

    def filled(self, batch: Batch) -> Batch:
        """Return the batch with every column known so far, if columns are filled."""
        filling = self.options.filling
        return batch if filling is None else filling.fill(batch)

    def _check(self, batch: Batch, span: Span, segment: StoredSegment) -> None:
        """Check the counts that the segment states for its group, because positions rely on them."""
        unit = self.counting.unit
        found = count_units(batch, unit)
        if found != span.units:
            raise CorruptData(
                f"the row group has {found} {unit} and its shard says {span.units}",
                uri=self.source.uri_of(segment.path),
                record=span.group,
            )
        if batch.agent_steps() != len(span.rows):
            raise CorruptData(
                f"the row group has {batch.agent_steps()} rows and its shard says {len(span.rows)}",
                uri=self.source.uri_of(segment.path),
                record=span.group,
            )

    def _columns(self, opened: OpenSegment) -> list[str] | None:
        """Return the wanted columns; with filling, those that this segment has."""
        columns = self.options.columns
        if columns is None or self.options.filling is None:
            return columns
        policies = opened.schema.policies
        # If all wanted columns are filled, one other column is read to count the rows, and dropped.
        found = self.options.filling.names_in(policies, columns)
        has = [column for policy in policies.values() for column in policy.columns]
        return found or [column for column in has if not is_per_sequence(column)][:1]

    def _lose(
        self,
        segment: StoredSegment,
        group: int,
        rows: int,
        error: CorruptData | DataNotFound | SchemaError,
        *,
        first: int = 0,
    ) -> None:
        """Count lost rows once, or raise.

        Raises:
            SegmentGone: The segment is missing, and another listing may show where its rows are.
        """
        path = segment.path
        if isinstance(error, DataNotFound) and path not in self._given_up:
            raise SegmentGone(self.source, segment, error) from error
        if not self.options.skip_damage:
            raise error
        if (path, group, first) not in self._damaged:
            self._damaged.add((path, group, first))
            self.skipped += rows
            self.damage.add(error)
            logger.warning("skipped %d rows: %s", rows, error)


def _chosen(
    segments: Sequence[StoredSegment],
    number: int,
    opened: OpenFiles[str, OpenSegment],
    choose: Callable[[OpenSegment], Sequence[int]],
) -> Iterator[tuple[StoredSegment, Sequence[int]]]:
    """What `SpanReader.chosen_in_turn` reads from a segment on; of those that are not open, only footers."""
    for at in range(number, len(segments)):
        if (own := opened.peek(segments[at].path)) is not None:
            yield segments[at], choose(own)
        if at + 1 + _OPEN_AHEAD < len(segments):
            yield segments[at + 1 + _OPEN_AHEAD], range(0)


def _live_spans(segment: StoredSegment, groups: Sequence[int]) -> list[Span]:
    """The live parts of groups of so many rows, which are units."""
    live = range(segment.skip, segment.skip + segment.rows)
    found = []
    for group, (start, stop) in enumerate(pairwise([0, *accumulate(groups)])):
        first, last = max(start, live.start), min(stop, live.stop)
        if first < last:
            rows = range(first - start, last - start)
            number = segment.first - segment.skip + first
            found.append(Span(group, rows, number, len(rows), len(rows) == stop - start))
    return found


def _within(span: Span, rows: range) -> Span:
    """The part of a span whose rows have the given numbers within the writer."""
    first, stop = max(span.first, rows.start), min(span.end, rows.stop)
    own = span.rows[max(0, first - span.first) : max(0, stop - span.first)]
    return span if len(own) == len(span.rows) else Span(span.group, own, first, len(own), False)


def _all_rows(segment: StoredSegment, span: Span | None) -> int:
    return segment.rows if span is None else len(span.rows)
