"""Tracks which rows of which writer are in a ring, and reads them again.

Example:
    >>> ring = RingRows()
    >>> ring.add("a", 0, 10)
    >>> ring.add("b", 0, 5)
    >>> ring.add("a", 10, 2)
    >>> ring.keep(8)
    >>> ring.firsts()
    {'a': 9, 'b': 0}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from rlio.following.follow import Taken
from rlio.opening import dataset_on
from rlio.read_options import ReadOptions
from rlio.source.selection import counting_of, group_options
from rlio.source.span_reader import GoneSegments, SegmentGone, SpanReader
from rlio.storage.filesystem import Storage

__all__ = ["RingRows", "reread"]


class RingRows:
    """The rows in a ring, oldest first, as stretches of consecutive rows of one writer."""

    def __init__(self) -> None:
        self._stretches: deque[tuple[str, int, int]] = deque()
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, writer: str, first: int, rows: int) -> None:
        """Note that rows ``first`` to ``first + rows - 1`` of a writer were put in."""
        self._rows += rows
        if self._stretches:
            last, start, count = self._stretches[-1]
            if last == writer and start + count == first:
                self._stretches[-1] = (last, start, count + rows)
                return
        self._stretches.append((writer, first, rows))

    def keep(self, rows: int) -> None:
        """Note that only the newest ``rows`` rows are left."""
        while self._rows > rows:
            writer, first, count = self._stretches.popleft()
            gone = min(self._rows - rows, count)
            self._rows -= gone
            if gone < count:
                self._stretches.appendleft((writer, first + gone, count - gone))

    def firsts(self) -> dict[str, int]:
        """Writer -> its first row in the ring; all its later rows are in the ring too."""
        found: dict[str, int] = {}
        for writer, first, _ in self._stretches:
            found.setdefault(writer, first)
        return found


def reread(
    storage: Storage,
    ranges: Mapping[str, range],
    options: ReadOptions,
    missing: Literal["error", "drop", "fill"],
) -> Iterator[Taken]:
    """Read rows again, as far as they are stored and whole: writers by id, rows ascending.

    Args:
        storage: The root.
        ranges: Writer -> the rows to read.
        options: How to read; the order and size of batches do not matter.
        missing: What to do with columns that only some writers have.

    Raises:
        OSError: The store did not answer.
        DataNotFound: The data set does not exist any more.
    """
    wanted = {writer: rows for writer, rows in sorted(ranges.items()) if rows}
    gone = GoneSegments("skip")
    while wanted:
        dataset = dataset_on(storage, at={writer: [rows.start, rows.stop] for writer, rows in wanted.items()})
        reader = SpanReader(
            dataset,
            group_options(dataset, replace(options, on_error="skip"), missing),
            counting_of(dataset, options.columns),
            given_up=gone.given_up,
        )
        try:
            for segment, spans in reader.in_turn(dataset.segments):
                for span in spans:
                    batch = reader.read(segment, span)
                    writer = segment.writer
                    if batch is not None:
                        yield Taken(batch, writer, span.first)
                    wanted[writer] = range(span.end, wanted[writer].stop)
            return
        except SegmentGone as error:
            gone.miss(error)
        wanted = {writer: rows for writer, rows in wanted.items() if rows}
