"""Portions of files: what one task reads of them, cut by size and in order.

Not here: parts of data sets of rlio, which outlive compaction (`rlio.dataset.part_reader`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from rlio.errors import CorruptData
from rlio.source.selection import GroupOptions, counting_of
from rlio.source.source import Source, StoredSegment
from rlio.source.span_reader import GoneSegments, SegmentGone, Span, SpanReader
from rlio.support.options import check_count

__all__ = ["Portion", "by_size", "part_bytes", "portion_spans", "portions"]

T = TypeVar("T")

# Most bytes of shards that one task reads (or one shard).
_TASK_BYTES: Final = 64 << 20
# Small data is split too: into at most this many tasks of at least a megabyte, decided by the data alone.
_TASKS: Final = 32
_LEAST_BYTES: Final = 1 << 20


def part_bytes(total: int, tasks: int | None) -> int:
    """The bytes of a part of ``total``."""
    tasks = check_count("tasks", tasks, least=1, of="tasks", none="a number by size")
    if tasks is None:
        return min(_TASK_BYTES, max(_LEAST_BYTES, -(-total // _TASKS)))
    return max(-(-total // tasks), 1)


def by_size(sized: Iterable[tuple[T, int]], target: int) -> list[list[T]]:
    """Cut things with their sizes, in order, into parts of about ``target``."""
    parts: list[list[T]] = []
    done, at = 0, -1
    for thing, size in sized:
        # The middle of a thing decides its part, so the number of parts never exceeds the total / ``target``.
        number = (2 * done + size) // (2 * target)
        done += size
        if number != at:
            parts.append([])
            at = number
        parts[-1].append(thing)
    return parts


class Portion(NamedTuple):
    """Groups of a segment of a source.

    Attributes:
        segment: Number of the segment.
        groups: Their numbers; None: all.
        rows: Number of their rows.
    """

    segment: int
    groups: range | None
    rows: int


def portions(source: Source, sizes: Sequence[int | None], *, tasks: int | None = None) -> list[list[Portion]]:
    """Split other libraries' files, or a table, into parts of about equal bytes; never splits a group.

    Args:
        source: The files. Segments that are larger than a part are opened.
        sizes: Bytes of each file; None: unknown. (): they are in memory.
        tasks: Largest number of parts; None: decided by the bytes.

    Raises:
        OptionError: ``tasks`` is not a whole number, or below 1.
    """
    if not len(source):
        return []
    in_memory = max(schema.row_bytes for schema in source.schemas.values()) * len(source)
    total = sum(size or 0 for size in sizes) or in_memory
    target = math.ceil(part_bytes(total, tasks) * len(source) / total)
    reader = SpanReader(source, GroupOptions(), counting_of(source, None), given_up=set())
    found: list[Portion] = []
    for number, segment in enumerate(source.segments):
        spans = [] if segment.rows <= target else _spans(reader, segment)
        for span in spans:
            found.append(Portion(number, range(span.group, span.group + 1), len(span.rows)))
        if not spans:
            found.append(Portion(number, None, segment.rows))
    parts = by_size(((one, one.rows) for one in found), target)
    return [_joined(part) for part in parts]


def _spans(reader: SpanReader, segment: StoredSegment) -> list[Span]:
    """The spans of a segment; none if it cannot be opened, which the task that reads it will tell."""
    with contextlib.suppress(CorruptData, SegmentGone):
        return reader.spans(segment)
    return []


def _joined(part: Sequence[Portion]) -> list[Portion]:
    """Return the portions with neighbouring groups as one."""
    joined: list[Portion] = []
    for one in part:
        last = joined[-1] if joined else None
        if last and last.groups and one.groups and last.segment == one.segment:
            groups = range(last.groups.start, one.groups.stop)
            joined[-1] = Portion(one.segment, groups, last.rows + one.rows)
        else:
            joined.append(one)
    return joined


def portion_spans(
    reader: SpanReader, gone: GoneSegments, part: Sequence[Portion] | None, *, reads_all: bool = True
) -> Iterator[tuple[StoredSegment, Span]]:
    """The groups of a part in order, with their segments.

    Args:
        reader: Opens the segments.
        gone: What to do with those that are missing.
        part: The part; None: all.
        reads_all: Whether all groups are read, so that they may be requested ahead.
    """
    segments = reader.source.segments
    if part is None:
        part = [Portion(number, None, segment.rows) for number, segment in enumerate(segments)]

    def spans(segment: StoredSegment, groups: range | None, _: Source) -> list[Span]:
        if reads_all:
            reader.expect(segment, lambda: [(segment, groups)])
        return reader.spans(segment)

    for number, groups, _ in part:
        segment = segments[number]
        for span in gone.read(reader.source, partial(spans, segment, groups)):
            # A segment that is damaged as a whole is one group with the number -1.
            if groups is None or span.group in groups or span.group < 0:
                yield segment, span
