"""Builds the rows of a store from a data set's snapshot: one thread decodes, another packs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rlio.batch import Batch
from rlio.batch.columns import Columns
from rlio.dataset.dataset import Dataset
from rlio.dataset.listing import Segment
from rlio.dataset.segment_reader import SegmentReader, counting_of, group_options, own_size
from rlio.dataset.snapshot import common_columns
from rlio.errors import ClosedError
from rlio.readers.read_options import ReadOptions
from rlio.replay.rows import AddedRows, StoreRows
from rlio.schemas.filling import joint_columns
from rlio.schemas.folded import unfold
from rlio.schemas.schema import Leaf, PolicySchema, Schema
from rlio.support.forks import BackgroundThread

__all__ = ["Built", "SegmentKey", "Source", "build", "key_of", "schema_of"]


class SegmentKey(NamedTuple):
    """The live rows of one shard. The shard's name holds the CRC of its footer.

    Attributes:
        path: Path of the shard.
        skip: Number of rows at its start that are not live.
        rows: Number of live rows.
    """

    path: str
    skip: int
    rows: int


@dataclass(frozen=True)
class Source:
    """What to build a store from.

    Attributes:
        dataset: The snapshot.
        missing: The rule for columns that only some writers have.
        on_error: What to do with damaged rows.
    """

    dataset: Dataset
    missing: Literal["error", "drop", "fill"] = "error"
    on_error: Literal["raise", "skip"] = "raise"


@dataclass(frozen=True)
class Built:
    """The result of a build.

    Attributes:
        pieces: Part of a shard -> its rows, in the order in which they were added.
        lost: Part of a shard -> rows of it that were lost to damage.
    """

    pieces: dict[SegmentKey, AddedRows]
    lost: dict[SegmentKey, int]

    @property
    def skipped(self) -> int:
        """Number of lost rows."""
        return sum(self.lost.values())


def key_of(segment: Segment) -> SegmentKey:
    """The key of a segment's rows."""
    return SegmentKey(segment.ref.path, segment.skip, segment.rows)


def schema_of(source: Source) -> Schema | None:
    """The schema of the decoded rows, common to all writers; None for a data set without rows."""
    schemas = list(source.dataset.schemas.values())
    if not schemas:
        return None
    chosen = common_columns(source.dataset, missing=source.missing, wanted=None)
    wanted = None if chosen is None else {*chosen, Columns.NEXT_OBS_VALID}
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

    Stores hold ``new_obs`` in full. The fixed name keeps cached stores valid.
    """
    if leaf.column != Columns.NEXT_OBS:
        return leaf
    return replace(leaf, physical=leaf.physical.removeprefix("_"))


def batches_of(source: Source, reader: SegmentReader, segments: Sequence[Segment]) -> Iterator[Decoded]:
    """Decode every row group of some segments, in order; None in place of a lost one.

    Frame stacks come in parts, because decoding and packing a row of stacks takes over ten times the memory
    that the store keeps of it.
    """
    most = own_size(source.dataset)
    for segment in segments:
        for span in reader.spans(segment):
            folded = reader.read_folded(segment, span)
            if folded is None:
                yield Decoded(segment, None, len(span.rows))
            else:
                for part in folded.parts(most):
                    yield Decoded(segment, unfold([part]), part.batch.agent_steps())


class Decoded(NamedTuple):
    """A row group, or a part of one.

    Attributes:
        segment: The segment of the rows.
        batch: The rows; None if they are lost.
        rows: Number of rows, present or lost.
    """

    segment: Segment
    batch: Batch | None
    rows: int


def build(
    source: Source,
    segments: Sequence[Segment],
    rows: StoreRows,
    *,
    progress: Callable[[int], None],
    stop: threading.Event,
    given_up: set[str],
) -> Built:
    """Decode segments and add their rows to a store.

    Args:
        source: What to read.
        segments: Segments that the store lacks, in recorded order.
        rows: The store.
        progress: Called with the number of rows added, or lost.
        stop: Set it to stop the build.
        given_up: Paths of shards that are listed but missing, which counts as damage.

    Raises:
        CorruptData: Rows are damaged.
        ShardGone: A shard is missing: list the data set again.
        ClosedError: ``stop`` was set.
    """
    dataset = source.dataset
    options = group_options(dataset, ReadOptions(on_error=source.on_error), source.missing)
    reader = SegmentReader(dataset, options, counting_of(dataset, None), given_up=given_up)
    decoded = batches_of(source, reader, segments)
    pieces: dict[SegmentKey, AddedRows] = {}
    lost: dict[SegmentKey, int] = {}
    # A background thread decodes one group ahead of this thread, which packs.
    with closing(BackgroundThread("rlio-decode")) as thread:
        coming = thread.submit(next, decoded, None)
        while (found := coming.result()) is not None:
            if stop.is_set():
                raise ClosedError("the store was closed while it was being built: open a new one")
            coming = thread.submit(next, decoded, None)
            if found.batch is None:
                key = key_of(found.segment)
                lost[key] = lost.get(key, 0) + found.rows
            else:
                writer = found.segment.ref.writer
                piece = replace(rows.add(found.batch, writer=writer), writer=writer)
                key = key_of(found.segment)
                pieces[key] = _joined(pieces[key], piece) if key in pieces else piece
            progress(found.rows)
    return Built(pieces, lost)


def _joined(one: AddedRows, other: AddedRows) -> AddedRows:
    """Join two pieces, the second added right after the first."""
    rows = {pid: (first, count + other.rows[pid][1]) for pid, (first, count) in one.rows.items()}
    return replace(one, rows=rows, steps=(one.steps[0], one.steps[1] + other.steps[1]))
