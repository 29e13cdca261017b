"""Parts of other libraries' files, or of a table in memory, which tasks of Ray open and read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rlio.batch import Batch
from rlio.dataset.file_dataset import FileDataset
from rlio.dataset.part_reader import Plan, source_tables
from rlio.dataset.portions import Portion, portion_spans, portions
from rlio.distributed.ray_import import require_ray
from rlio.errors import CorruptData
from rlio.read_options import ReadOptions
from rlio.source.selection import counting_of, group_options
from rlio.source.source import FileSource
from rlio.source.span_reader import GoneSegments, SpanReader

__all__ = ["FilePart", "Files", "cut_files", "whole_batches"]


@dataclass(frozen=True)
class Files:
    """Files that each task opens again.

    Attributes:
        stored: Reference to the `FileDataset` in Ray's object store, where a table in memory is kept once.
        identity: Its `Source.state_identity` when it was cut into parts.
    """

    # Any: Ray's ObjectRef, which only Ray can check.
    stored: Any
    identity: str

    @contextmanager
    def opened(self) -> Iterator[FileSource]:
        """The files, opened until the end of the block.

        Raises:
            CorruptData: They have other names, sizes or rows than when they were cut.
        """
        source = require_ray().get(self.stored).again()
        try:
            if source.state_identity != self.identity:
                raise CorruptData("the files have changed since they were opened", uri=source.uri)
            yield source
        finally:
            source.close()


@dataclass(frozen=True)
class FilePart:
    """Reads one part; can be pickled for the task.

    Attributes:
        files: The files.
        plan: What to read of each group.
        part: The groups.
    """

    files: Files
    plan: Plan
    part: Sequence[Portion]

    def __len__(self) -> int:
        return sum(portion.rows for portion in self.part)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows as tables; one empty table if there are none.

        Raises:
            CorruptData: Rows are damaged; with ``on_error="skip"`` they are counted and logged. Or the files
                have changed.
        """
        empty = True
        with self.files.opened() as source:
            for table in source_tables(source, self.plan, self.part):
                empty = False
                yield table
        if empty:
            yield self.plan.shows(self.plan.layout.empty())


def cut_files(dataset: FileDataset, *, tasks: int | None) -> tuple[Files, list[list[Portion]]]:
    """Cut files into parts of about equal bytes, in order: at least one.

    Raises:
        OptionError: ``tasks`` is not a whole number, or below 1.
    """
    parts = portions(dataset, dataset.sizes, tasks=tasks) or [[]]
    return Files(require_ray().put(dataset), dataset.state_identity), parts


def whole_batches(source: FileSource, part: Sequence[Portion]) -> Iterator[Batch]:
    """Yield the rows of a part with all of their columns, group by group.

    Raises:
        CorruptData: Rows are damaged.
    """
    options, gone = group_options(source, ReadOptions(), "error"), GoneSegments("raise")
    reader = SpanReader(source, options, counting_of(source, None), given_up=gone.given_up)
    for segment, span in portion_spans(reader, gone, part):
        batch = reader.read(segment, span)
        assert batch is not None  # What is damaged raises.
        yield batch
