"""Builds the rows of a store from a source: one thread decodes, another packs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Final, Literal, NamedTuple

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import ClosedError
from rlio.read_options import ReadOptions
from rlio.replay.rows import AddedRows, StoreRows
from rlio.schemas.filling import joint_columns
from rlio.schemas.folded import Folded, unfold
from rlio.schemas.leaves import Leaf
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.schema import Schema
from rlio.schemas.streams import STREAM_COLUMNS
from rlio.source.damage import Damage
from rlio.source.selection import GroupOptions, counting_of, group_options, own_size
from rlio.source.source import SegmentKey, Source, StoredSegment
from rlio.source.span_reader import SpanReader
from rlio.support.forks import BackgroundThread

__all__ = ["SegmentRows", "StoreInput", "build", "rows_of", "schema_of"]


# They tell the rows of episodes apart, their order, and their ends; rewards link no rows.
_LINKING: Final = tuple(name for name in STREAM_COLUMNS if name != Columns.REWARDS)


@dataclass(frozen=True)
class StoreInput:
    """What to build a store from.

    Attributes:
        source: The source.
        missing: The rule for columns that only some writers have.
        on_error: What to do with damaged rows.
        columns: The columns, or parts of them, that the store keeps; None: all. Others are decoded only if
            they link the rows of an episode.
        given_up: Paths of segments that are listed but missing, which counts as damage.
        damage: Collects the damaged places.
        stop: Set it to stop the build.
        progress: Called with the number of rows added, or lost.
    """

    source: Source
    missing: Literal["error", "drop", "fill"]
    on_error: Literal["raise", "skip"]
    columns: frozenset[str] | None
    given_up: set[str]
    damage: Damage
    stop: threading.Event
    progress: Callable[[int], object] = lambda rows: None

    @property
    def options(self) -> GroupOptions:
        """What to read of each row group."""
        names: list[str] | None = None
        if self.columns is not None:
            known = {name for columns in self.source.columns.values() for name in columns}
            names = [*sorted(self.columns), *(n for n in _LINKING if n in known and n not in self.columns)]
        read = ReadOptions(columns=names, on_error=self.on_error)
        return group_options(self.source, read, self.missing)


class SegmentRows(NamedTuple):
    """What a store has of a segment.

    Attributes:
        rows: Its rows; None if all are lost.
        lost: Number of rows lost to damage.
    """

    rows: AddedRows | None = None
    lost: int = 0


def rows_of(parts: Iterable[SegmentRows], segments: Iterable[StoredSegment]) -> tuple[list[AddedRows], int]:
    """The rows of some segments, by what a store has of each, and the number of lost rows."""
    found = [(part, segment.writer) for part, segment in zip(parts, segments, strict=True)]
    rows = [replace(part.rows, writer=writer) for part, writer in found if part.rows is not None]
    return rows, sum(part.lost for part, _ in found)


def schema_of(given: StoreInput) -> Schema | None:
    """The schema of the decoded rows, common to all writers; None for a source without rows."""
    schemas = list(given.source.schemas.values())
    if not schemas:
        return None
    wanted = given.options.columns
    policies = {
        pid: PolicySchema(
            tuple(
                _in_stores(leaf) for leaves in joint_columns(schemas, pid, wanted).values() for leaf in leaves
            )
        )
        for pid in sorted({pid for schema in schemas for pid in schema.policies})
    }
    return Schema(policies, any(schema.multi_agent for schema in schemas))


def _in_stores(leaf: Leaf) -> Leaf:
    """A leaf with its name in stores, for shards of any version of rlio.

    Stores hold ``new_obs`` in full, and pictures decoded. The fixed name keeps cached stores valid.
    """
    leaf = replace(leaf, spec=leaf.spec.decoded)
    if leaf.column != Columns.NEXT_OBS:
        return leaf
    return replace(leaf, physical=leaf.physical.removeprefix("_"))


def batches_of(
    reader: SpanReader, segments: Sequence[StoredSegment], pools: Callable[[Folded], bool]
) -> Iterator[Decoded]:
    """Decode the row groups of some segments, in order, short ones together; None in place of a lost one.

    Short segments are decoded together too, and their rows are then those of one `Decoded` for each writer.

    Frame stacks that the store ``pools`` are not looked up. Others come in parts, because decoding and
    packing a row of stacks takes over ten times the memory that the store keeps of it.
    """
    most = own_size(reader.source)
    at = 0
    while at < len(segments):
        reader.expect_in_turn(segments, at)
        joined = reader.read_joined(segments, at, attributes=False)
        if joined is not None:
            at += len(joined[0])
            rows = joined[1] if pools(joined[1]) else Folded(unfold([joined[1]]))
            yield from _by_writer(joined[0], rows)
            continue
        segment, at = segments[at], at + 1
        for spans, folded in reader.runs(segment, reader.spans(segment)):
            if folded is None:
                yield Decoded((segment,), None, len(spans[0].rows))
            else:
                for part in [folded] if pools(folded) else folded.parts(most):
                    rows = part if pools(part) else Folded(unfold([part]))
                    yield Decoded((segment,), rows, part.batch.agent_steps())


def _by_writer(segments: Sequence[StoredSegment], folded: Folded) -> Iterator[Decoded]:
    """The rows of whole segments, in order, in one batch for each writer."""
    first, batch = 0, folded.batch
    assert isinstance(batch, SampleBatch)
    for _, each in groupby(segments, attrgetter("writer")):
        own = tuple(each)
        rows = sum(segment.rows for segment in own)
        part = folded if rows == len(batch) else replace(folded, batch=batch[first : first + rows])
        yield Decoded(own, part, rows)
        first += rows


class Decoded(NamedTuple):
    """A row group, a part of one, or several.

    Attributes:
        segments: The segment of the rows; or several of one writer, of which these are all rows.
        batch: The rows; stacks are looked up unless the store pools them. None if they are lost.
        rows: Number of rows, present or lost.
    """

    segments: tuple[StoredSegment, ...]
    batch: Folded | None
    rows: int


def build(given: StoreInput, segments: Sequence[StoredSegment], rows: StoreRows) -> list[SegmentRows]:
    """Decode segments and add their rows to a store.

    Args:
        given: What to read.
        segments: Segments that the store lacks, in recorded order.
        rows: The store.

    Returns:
        What was added of each segment.

    Raises:
        CorruptData: Rows are damaged.
        SegmentGone: A segment is missing: list the source again.
        ClosedError: ``given.stop`` was set.
    """
    source = given.source
    reader = SpanReader(
        source, given.options, counting_of(source, None), given_up=given.given_up, damage=given.damage
    )
    decoded = batches_of(reader, segments, rows.pools)
    parts = {segment: SegmentRows() for segment in segments}
    # A background thread decodes one group ahead of this thread, which packs.
    with ExitStack() as after:
        after.callback(reader.forget)  # Of a build that failed, what failed ahead of its turn, too.
        thread = after.enter_context(closing(BackgroundThread("rlio-decode")))
        coming = thread.submit(next, decoded, None)
        while (found := coming.result()) is not None:
            if given.stop.is_set():
                raise ClosedError("the store was closed while it was being built: open a new one")
            coming = thread.submit(next, decoded, None)
            segment = found.segments[0]
            added, lost = parts[segment]
            if found.batch is None:
                parts[segment] = SegmentRows(added, lost + found.rows)
            else:
                more = rows.add(found.batch, writer=segment.writer)
                if len(found.segments) > 1:
                    parts.update(_divided(more, found.segments))
                else:
                    parts[segment] = SegmentRows(more if added is None else _joined(added, more), lost)
            given.progress(found.rows)
    return list(parts.values())


def lost_again(given: StoreInput, segments: Sequence[StoredSegment]) -> dict[SegmentKey, int]:
    """The rows of each segment that cannot be read now; decodes the segments."""
    counting = counting_of(given.source, None)
    reader = SpanReader(given.source, given.options, counting, given_up=given.given_up, damage=Damage())
    lost = dict.fromkeys((segment.key for segment in segments), 0)
    with ExitStack() as after:
        after.callback(reader.forget)
        for found in batches_of(reader, segments, lambda _: True):
            if found.batch is None:
                lost[found.segments[0].key] += found.rows
    return lost


def _divided(added: AddedRows, segments: Sequence[StoredSegment]) -> dict[StoredSegment, SegmentRows]:
    """Divide rows of one agent that were added together among their segments."""
    ((pid, (first, _)),) = added.rows.items()
    starts = accumulate((segment.rows for segment in segments), initial=first)
    pairs = zip(segments, starts, strict=False)
    return {each: SegmentRows(replace(added, rows={pid: (start, each.rows)})) for each, start in pairs}


def _joined(one: AddedRows, other: AddedRows) -> AddedRows:
    """Join two pieces, the second added right after the first."""
    rows = {pid: (first, count + other.rows[pid][1]) for pid, (first, count) in one.rows.items()}
    return replace(one, rows=rows, steps=(one.steps[0], one.steps[1] + other.steps[1]))
