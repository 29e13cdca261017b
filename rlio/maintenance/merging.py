"""Encodes the rows of stored Parquet shards into larger shards, for compaction.

Shards are decoded and encoded one row group at a time, so memory holds one shard that is read, or up to 64
short ones that are decoded together, and one that is made. `rlio.maintenance.compact` decides which shards to
merge, and where the result goes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.multi_agent import step_numbers
from rlio.catalog.listing import Segment, ShardRef, load_shard
from rlio.errors import CorruptData
from rlio.log.publisher import NewShard
from rlio.schemas.batches import to_batch
from rlio.schemas.column import ColumnSpec
from rlio.schemas.leaves import Leaf
from rlio.schemas.parquet import Compression
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.row_groups import Piece
from rlio.schemas.schema import Schema
from rlio.schemas.shard_file import DecodedGroup, ShardFile
from rlio.schemas.streams import WRITER, KeptTimes, Times
from rlio.source.shards import ParquetShard
from rlio.storage.filesystem import Storage
from rlio.writers.roll import Roll
from rlio.writers.shard_maker import RowGroups, ShardMaker

__all__ = [
    "ParquetMerger",
    "open_whole",
    "with_writer_column",
]


def open_whole(storage: Storage, ref: ShardRef, opened: ParquetShard | None = None) -> ParquetShard:
    """Fetch a Parquet shard in one request, and check the whole of it.

    Args:
        storage: The data set's root.
        ref: The shard.
        opened: The shard, if it is open: if it holds all of its bytes, they are not fetched again.

    Raises:
        CorruptData: Its bytes do not match its name.
        DataNotFound: It is gone: covered by a larger shard and collected, or trimmed.
    """
    data = opened.held if opened is not None else b""
    is_held = len(data) == ref.name.size
    if not is_held:
        data = load_shard(storage, ref)
    if zlib.crc32(data) != ref.name.crc32:
        raise CorruptData(
            "the shard does not match the CRC-32 in its name; restore it, or run `rlio verify --repair`",
            uri=storage.uri_of(ref.path),
        )
    if opened is not None and is_held:
        return opened
    return ParquetShard(storage, ref, fetch=lambda start, stop: data[start:stop])


def with_writer_column(schema: Schema) -> Schema:
    """Return the schema with the column that names the writer of each row, for every policy."""
    leaf = Leaf(WRITER, (), WRITER, ColumnSpec("<U", (), "text"))
    return replace(
        schema,
        policies={
            pid: policy
            if WRITER in policy.columns
            else PolicySchema((*policy.leaves, leaf), spaces=policy.spaces)
            for pid, policy in schema.policies.items()
        },
    )


class ParquetMerger:
    """Encodes the rows of Parquet shards, one shard after the other, into few large ones.

    Fills row groups completely, with two exceptions. A sequence stays within one row group. Groups of several
    agents are joined only if their joint steps stay the same, in the same order, because readers serve these
    by group.

    Args:
        schema: Schema of the new shards: the schema of the old ones, or its `with_writer_column`.
        provenance: JSON text for the footers.
        compression: Compression of the pages.
        max_bytes: Size at which a shard is finished.
        publish: Stores an encoded shard.
        keep: Called with the rows of each row group before they are in a shard; None: nothing is.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        provenance: str,
        compression: Compression,
        max_bytes: int,
        publish: Callable[[NewShard], None],
        keep: Callable[[SampleBatch | MultiAgentBatch], None] | None = None,
    ) -> None:
        self._schema, self._keep = schema, keep
        self._maker = ShardMaker(
            publish,
            roll=Roll(max_bytes=max_bytes, max_seconds=None),
            compression=compression,
            provenance=provenance,
        )
        self._groups = RowGroups(schema, self._maker.add)
        self._joint = _JointSteps()
        self._writer: str | None = None
        self._times = Times()
        self._begins_writer = False

    def add(self, shards: Sequence[tuple[Segment, ShardFile]], *, writer: str | None = None) -> None:
        """Add the rows of segments.

        Args:
            shards: One segment and its shard, from `open_whole`; or several that can be decoded together
                (`rlio.source.together`).
            writer: Writer of the rows, for a schema `with_writer_column`.

        Raises:
            CorruptData: A shard is damaged, or cannot be cut where its segment begins.
        """
        if len(shards) > 1 and self._add_together([file for _, file in shards], writer):
            return
        for segment, file in shards:
            self._begin(file, writer)
            first = 0
            for index, info in enumerate(file.groups):
                if first + info.rows > segment.skip:
                    try:
                        group = file.read_group(index, batches=True)
                        self._add_group(group, max(segment.skip - first, 0), writer)
                    except CorruptData as error:
                        if error.uri is not None:
                            raise
                        raise CorruptData(str(error), uri=file.uri, record=index) from error
                first += info.rows

    def _add_together(self, files: Sequence[ShardFile], writer: str | None) -> bool:
        """Add all rows of shards; False, and no row, if one of them is damaged: alone, it says what is."""
        try:
            group = ShardFile.read_joined(files)
            batch = to_batch(group)
        except CorruptData:
            return False
        rows, first = self._rows_of(batch, writer)[DEFAULT_POLICY_ID], 0
        for file in files:
            self._begin(file, writer)
            self._add_rows(group, rows, first, first + file.rows[0])
            first += file.rows[0]
        return True

    def _begin(self, file: ShardFile, writer: str | None) -> None:
        """Begin a shard."""
        # The rest of a cut batch does not belong to another writer's batch.
        self._begins_writer = writer != self._writer
        self._times = KeptTimes(file.streams, writer=writer)
        self._writer = writer

    def finish(self) -> None:
        """Encode and publish the remaining rows."""
        self._groups.finish()
        self._maker.finish()

    def _add_group(self, group: DecodedGroup, skip: int, writer: str | None) -> None:
        batch = to_batch(group)
        if self._keep is not None:
            self._keep(batch)
        rows = self._rows_of(batch, writer)
        if isinstance(batch, MultiAgentBatch):
            if skip:
                raise CorruptData("rows of several agents are cut within a row group")
            self._add_joint(_joint_pieces(group, rows, self._times), batch)
        else:
            self._add_rows(group, rows[DEFAULT_POLICY_ID], skip, group.info.rows)

    def _rows_of(self, batch: SampleBatch | MultiAgentBatch, writer: str | None) -> dict[str, _Rows]:
        return {
            pid: _Rows(self._schema.policies[pid], pid, part, writer)
            for pid, part in batch.policies().items()
        }

    def _add_rows(self, group: DecodedGroup, rows: _Rows, first: int, last: int) -> None:
        """Add rows [first, last) of one policy, cut where written batches begin and where groups are full."""
        begins = group.begins
        here = slice(*np.searchsorted(begins, [first, last]).tolist())
        text_of = dict(zip(begins[here].tolist(), group.batches[here], strict=True))
        bounds = [first, *(begin for begin in text_of if begin > first), last]
        rows.check_cuts(bounds)
        for start, stop in pairwise(bounds):
            text = text_of.get(start, "{}" if self._begins_writer else None)
            self._begins_writer = False
            while start < stop:
                end = rows.fitting(start, stop, self._groups.room)
                if end == start and self._groups.rows:
                    self._groups.finish()
                    continue
                if end == start:  # One sequence that is longer than a row group.
                    end = rows.fitting(start, stop, None)
                count = end - start
                part = rows.cut(start, end)
                self._groups.append([Piece(DEFAULT_POLICY_ID, part, count, text, count, times=self._times)])
                start, text = end, None

    def _add_joint(self, pieces: list[Piece], batch: MultiAgentBatch) -> None:
        """Add a whole row group of several agents."""
        rows = sum(piece.rows for piece in pieces)
        if self._groups.rows and (rows > self._groups.room or not self._joint.extends(batch)):
            self._groups.finish()
        if not self._groups.rows:
            self._joint = _JointSteps()
        self._joint.add(batch)
        self._groups.append(pieces)


class _Rows:
    """The rows of one policy in one row group, checked against the schema and ready to be cut."""

    def __init__(self, policy: PolicySchema, pid: str, batch: SampleBatch, writer: str | None) -> None:
        if WRITER in policy.columns and WRITER not in batch:
            batch = batch.copy(shallow=True)
            batch[WRITER] = np.full(len(batch), writer)
        self.count = len(batch)
        self.batch = batch
        self._arrays = policy.flatten(batch, policy=pid)
        self._per_sequence = {leaf.physical for leaf in policy.per_sequence}
        #: The row after each sequence; None without sequences.
        self._ends: NDArray[np.int64] | None = None
        if policy.has_sequences:
            self._ends = np.cumsum(policy.single(self._arrays, Columns.SEQ_LENS)).astype(np.int64)

    def check_cuts(self, bounds: Iterable[int]) -> None:
        """Raise if one of ``bounds`` lies within a sequence."""
        if self._ends is None:
            return
        legal = {0, *self._ends.tolist()}
        for bound in bounds:
            if bound not in legal:
                raise CorruptData(f"the cut at row {bound} of the row group is within a sequence")

    def fitting(self, start: int, stop: int, room: int | None) -> int:
        """Return the end of the part from ``start`` of at most ``room`` rows; None: of one sequence."""
        if self._ends is None:
            return stop if room is None else min(start + room, stop)
        if room is None:
            return int(self._ends[np.searchsorted(self._ends, start, side="right")])
        last = int(np.searchsorted(self._ends, min(start + room, stop), side="right"))
        return max(int(self._ends[last - 1]), start) if last else start

    def cut(self, start: int, stop: int) -> dict[str, NDArray[Any]]:
        """Return the arrays of rows ``start`` to ``stop - 1``, as views."""
        first = last = 0
        if self._ends is not None:
            first, last = np.searchsorted(self._ends, [start, stop], side="right").tolist()
        return {
            name: values[first:last] if name in self._per_sequence else values[start:stop]
            for name, values in self._arrays.items()
        }


def _joint_pieces(group: DecodedGroup, rows: Mapping[str, _Rows], times: Times) -> list[Piece]:
    """Return the rows of a group of several policies in the order in which they were written."""
    try:
        written = [json.loads(text) for text in group.batches]
        listed = [[(str(pid), int(count)) for pid, count in entry["policies"]] for entry in written]
        steps = [int(entry["env_steps"]) for entry in written]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptData(f"the attributes of a written batch are damaged: {error}") from error
    _check_order(group, listed)
    pieces = []
    at = dict.fromkeys(rows, 0)
    for text, parts, env_steps in zip(group.batches, listed, steps, strict=True):
        for index, (pid, count) in enumerate(parts):
            start, stop = at[pid], at[pid] + count
            rows[pid].check_cuts([start, stop])
            begins = index == 0
            pieces.append(
                Piece(
                    pid,
                    rows[pid].cut(start, stop),
                    count,
                    text if begins else None,
                    env_steps if begins else 0,
                    times=times,
                )
            )
            at[pid] = stop
    return pieces


def _check_order(group: DecodedGroup, listed: list[list[tuple[str, int]]]) -> None:
    """Raise if the written batches do not account for the rows, policy by policy."""
    begins = [0, *np.cumsum([sum(count for _, count in parts) for parts in listed]).tolist()]
    order = [pid for parts in listed for pid, count in parts for _ in range(count)]
    if begins != [*group.begins.tolist(), group.info.rows] or len(order) != group.info.rows:
        raise CorruptData("the written batches do not make up the row group")
    for pid, own in group.policies().items():
        found = [index for index, name in enumerate(order) if name == pid]
        if found != (list(range(group.info.rows)) if own is None else own.tolist()):
            raise CorruptData("the written batches name other policies than the rows have")


class _JointSteps:
    """The joint steps of the open row group, to find out whether more rows would change them."""

    def __init__(self) -> None:
        self._ids: MultiAgentBatch | None = None
        self._numbers: dict[str, NDArray[np.int64]] = {}
        self._count = 0

    def extends(self, batch: MultiAgentBatch) -> bool:
        """Whether the joined rows have the steps of both, with those of ``batch`` last."""
        ids, numbers, count = self._joined(batch)
        found, steps = step_numbers(ids)
        return steps == count and all(np.array_equal(found[pid], numbers[pid]) for pid in numbers)

    def add(self, batch: MultiAgentBatch) -> None:
        """Add the rows."""
        self._ids, self._numbers, self._count = self._joined(batch)

    def _joined(self, batch: MultiAgentBatch) -> tuple[MultiAgentBatch, dict[str, NDArray[np.int64]], int]:
        ids = MultiAgentBatch({pid: _ids_of(part) for pid, part in batch.items()}, 0)
        numbers, count = step_numbers(ids)
        if self._ids is None:
            return ids, numbers, count
        after = {pid: part + self._count for pid, part in numbers.items()}
        nothing = np.empty(0, np.int64)
        joined = {
            pid: np.concatenate([self._numbers.get(pid, nothing), after.get(pid, nothing)])
            for pid in {**self._numbers, **after}
        }
        both = concat_samples([self._ids, ids])
        assert isinstance(both, MultiAgentBatch)
        # Readers get the policies of a row group by name, and their order matters.
        ordered = MultiAgentBatch({pid: both[pid] for pid in sorted(both)}, 0)
        return ordered, joined, self._count + count


def _ids_of(part: SampleBatch) -> SampleBatch:
    """Return the columns that identify joint steps; a stand-in column if there are none."""
    names = [name for name in (Columns.EPS_ID, Columns.T) if name in part]
    return SampleBatch({name: part[name] for name in names} or {"row": np.zeros(len(part), bool)})
