"""Reads parts of a data set as Arrow tables, one row group at a time, and splits a data set into parts.

A part is a range of rows of each of some writers. It means the same rows even if others compact, collect or
write meanwhile. Exports read a data set as one part; Ray Data reads one part per task.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.other_names import did_you_mean
from rlio.catalog.listing import Listing, Segment, ShardRef
from rlio.dataset.portions import Portion, by_size, part_bytes, portion_spans
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.query.filter_pushdown import check_filter, filter_options, passing
from rlio.query.filters import RowFilter
from rlio.read_options import ReadOptions
from rlio.schemas.arrow_tables import WRITER, Layout, TableColumn, to_table
from rlio.schemas.filling import joint_columns
from rlio.schemas.folded import unfold
from rlio.schemas.leaves import Leaf, column_of_name
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.schema import Schema
from rlio.source.selection import GroupOptions, common_columns, counting_of, group_options, with_step_columns
from rlio.source.snapshot import DatasetSnapshot
from rlio.source.source import FileSource, Source, StoredSegment
from rlio.source.span_reader import GoneSegments, SegmentGone, Span, SpanReader
from rlio.storage.filesystem import Storage

__all__ = ["PartReader", "Plan", "Rows", "plan_of", "source_tables", "split"]

logger: logging.Logger = logging.getLogger("rlio")

Missing = Literal["error", "drop", "fill"]

# Largest table in bytes (or one row): the amount that is decoded at once, where stacks are looked up.
_TABLE_BYTES: Final = 32 << 20


@dataclass(frozen=True)
class Rows:
    """A range of a writer's rows, and the shards that held them at the listing."""

    writer: str
    first: int
    stop: int
    shards: tuple[ShardRef, ...]

    def __len__(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class Plan:
    """What to read of a data set, and the form of the tables.

    Attributes:
        options: What to read of each group.
        layout: The columns of the tables.
        policy: Of several policies, the one whose rows to read; None: all, or the only one.
        row_filter: Chooses rows; None: all.
        filter_options: What to read of each group for the filter.
        schemas: Schemas of all writers, by hash.
        writers: Whether a column names the writer of each row.
        row_bytes: Bytes of a row in memory; texts are estimated.
        shown: Columns of the tables, if the layout has others that are only needed to make them.
    """

    options: GroupOptions
    layout: Layout
    policy: str | None
    row_filter: RowFilter | None
    filter_options: GroupOptions
    schemas: Mapping[str, Schema]
    writers: bool
    row_bytes: int
    shown: tuple[str, ...] | None = None

    def shows(self, table: pa.Table) -> pa.Table:
        """Select the requested columns of a table that has all columns of the layout."""
        return table if self.shown is None else table.select(list(self.shown))

    def only(self, names: Sequence[str]) -> Plan:
        """Return a plan for the same rows with only some of the columns.

        Raises:
            MissingColumn: A column does not exist.
        """
        for name in names:
            if name not in self.layout.names:
                raise MissingColumn(
                    f"the table has only {', '.join(self.layout.names)}"
                    f"{did_you_mean(name, self.layout.names)}",
                    column=name,
                )
        layout = self.layout.only(names)
        # A table without columns has no rows either. Ray counts rows by one column, and drops it.
        if not layout.columns:
            layout = replace(layout, columns=self.layout.columns[:1])
        needed = layout.logical
        if self.layout.joint:
            layout = replace(layout, joint=True)
            known = self.layout.logical
            needed += [name for name in (Columns.EPS_ID, Columns.T) if name in known and name not in needed]
        columns = [name for name in needed if name != WRITER or not self.writers]
        shown = tuple(name for name in layout.names if name in names) or None
        options = replace(self.options, columns=columns or None)
        return replace(self, layout=layout, options=options, shown=shown)


def plan_of(
    dataset: Source,
    options: ReadOptions,
    *,
    missing: Missing,
    policy: str | None,
    filter: str | RowFilter | Any | None,
    writers: bool,
) -> Plan:
    """Check the request before anything is read, and return the plan.

    Raises:
        OptionError: The options contradict each other or do not fit the data.
        MissingColumn: A requested column does not exist.
        SchemaConflict: Only some writers have a column, and ``missing`` is "error".
        SchemaError: The policies' columns differ.
    """
    schemas = list(dataset.schemas.values())
    joint = any(schema.multi_agent for schema in schemas)
    policies = sorted({pid for schema in schemas for pid in schema.policies})
    if policy is not None and policy not in policies and policies:
        raise OptionError(f"policy={excerpt(policy)}: the data set has {excerpt(policies)}", uri=dataset.uri)
    pids = [policy] if policy is not None else policies or [DEFAULT_POLICY_ID]
    wanted = None if options.columns is None else with_step_columns(dataset, options.columns)
    shared = common_columns(dataset, missing=missing, wanted=wanted)
    wanted = shared if missing == "drop" else wanted
    chosen = group_options(dataset, replace(options, columns=wanted), missing)
    row_filter = None if filter is None else RowFilter.of_option(filter)
    if not schemas:  # The data set has no rows to choose among.
        row_filter = None
    searched = chosen
    if row_filter is not None:
        _check_chooses_rows(dataset, chosen, joint=joint and policy is None)
        check_filter(row_filter, schemas, pids[0])
        searched = filter_options(dataset, row_filter, missing=missing, on_error=options.on_error)
    layout = _layout_of(dataset, schemas, pids, chosen, joint=joint and policy is None)
    if options.columns is not None and joint:  # The columns that identify joint steps are read but not shown.
        given = {column_of_name(name) for name in options.columns} | {
            *options.columns,
            Columns.NEXT_OBS_VALID,
        }
        layout = replace(layout, columns=tuple(c for c in layout.columns if c.column in given))
    if missing != "drop":
        _check_stored(dataset, schemas, pids, options.columns or (), layout)
    return Plan(
        options=chosen,
        layout=_with_writers(layout, uri=dataset.uri) if writers else layout,
        policy=policy,
        row_filter=row_filter,
        filter_options=searched,
        schemas=dataset.schemas,
        writers=writers,
        row_bytes=max((schema.row_bytes for schema in schemas), default=1),
    )


def _layout_of(
    dataset: Source, schemas: Sequence[Schema], pids: Sequence[str], chosen: GroupOptions, *, joint: bool
) -> Layout:
    """The columns of the tables, which policies share."""
    leaves_of = {pid: _shown(joint_columns(schemas, pid, chosen.columns)) for pid in pids}
    told = next(
        (own[Columns.NEXT_OBS_VALID] for own in leaves_of.values() if Columns.NEXT_OBS_VALID in own), []
    )
    for own in leaves_of.values():
        if told and Columns.NEXT_OBS in own:  # Without the column, all are valid: tables fill it.
            own.setdefault(Columns.NEXT_OBS_VALID, told)
    layouts = {pid: Layout.of_leaves(own) for pid, own in leaves_of.items()}
    return _shared_layout(layouts, joint=joint, uri=dataset.uri)


def _check_stored(
    dataset: Source, schemas: Sequence[Schema], pids: Sequence[str], names: Sequence[str], layout: Layout
) -> None:
    """Raise for a column that no schema has."""
    has = {
        name
        for schema in schemas
        for pid in pids
        if pid in schema.policies
        for name in schema.policies[pid].names
    }
    for name in names:
        if name not in has:
            raise MissingColumn(
                f"policy {excerpt(pids[0])} has only {', '.join(sorted(layout.logical))}"
                f"{did_you_mean(name, layout.logical)}",
                uri=dataset.uri,
                column=name,
            )


def _shown(columns: Mapping[str, list[Leaf]]) -> dict[str, list[Leaf]]:
    """The columns with infos as objects."""
    shown = PolicySchema(tuple(leaf for leaves in columns.values() for leaf in leaves)).shown
    return dict(shown.columns)


def _check_chooses_rows(dataset: Source, options: GroupOptions, *, joint: bool) -> None:
    """Refuse a filter if single rows are not units.

    Raises:
        OptionError: The data has sequences; or the joint steps of several agents are read (``joint``).
    """
    sequences = counting_of(dataset, options.columns).unit == "sequences"
    if sequences or joint:
        what = "sequences (seq_lens)" if sequences else "joint steps of several agents"
        hint = "leave filter= out, and" if sequences else "name one policy=, or"
        raise OptionError(
            f"filter chooses among rows, but the data has {what}: {hint} filter the result",
            uri=dataset.uri,
        )


def _with_writers(layout: Layout, *, uri: str) -> Layout:
    """Add a column that names the writer of each row."""
    if WRITER in layout.logical:
        raise OptionError("writers=True: the data already has a column '_writer'", uri=uri)
    return replace(layout, columns=(*layout.columns, TableColumn(WRITER, WRITER, (), "<U", ())))


def _shared_layout(layouts: dict[str, Layout], *, joint: bool, uri: str) -> Layout:
    """Return the layout that all policies share.

    Raises:
        OptionError: Several agents have sequences.
        SchemaError: A policy lacks a column of another, or has it with another type.
    """
    (first, layout), *others = layouts.items()
    for pid, other in others:
        unlike = set(layout.columns) ^ set(other.columns)
        if unlike:
            names = excerpt(sorted({column.name for column in unlike}))
            raise SchemaError(
                f"policies {first!r} and {pid!r} differ in {names}, but a table has one type per column: "
                "name one policy=, or columns=[...] that they share",
                uri=uri,
                column=min(c.name for c in unlike),
            )
    if joint and Columns.SEQ_LENS in layout.logical:
        raise OptionError(
            "the data has sequences (seq_lens) of several agents: name one policy=, or columns=[...] without "
            "seq_lens and the states",
            uri=uri,
        )
    if joint and "policy_id" in layout.logical:
        raise SchemaError("the data has a column 'policy_id': name one policy=", uri=uri, column="policy_id")
    return replace(layout, joint=joint)


def split(dataset: DatasetSnapshot, *, tasks: int | None = None) -> list[list[Rows]]:
    """Split a data set into parts of about equal bytes; never splits a shard.

    Args:
        dataset: The data set.
        tasks: Largest number of parts; exactly this many if the shards allow it. None: decided by the bytes.

    Raises:
        OptionError: ``tasks`` is not a whole number, or below 1.
    """
    parts: list[list[Rows]] = []
    sized = [(segment, segment.ref.name.size) for segment in dataset.segments]
    for segments in by_size(sized, part_bytes(dataset.bytes(), tasks)):
        parts.append([])
        for segment in segments:
            _append(parts[-1], segment)
    return parts


def _append(part: list[Rows], segment: Segment) -> None:
    rows = Rows(segment.ref.writer, segment.first, segment.end, (segment.ref,))
    if part and (part[-1].writer, part[-1].stop) == (rows.writer, rows.first):
        before = part.pop()
        rows = replace(rows, first=before.first, shards=before.shards + rows.shards)
    part.append(rows)


@dataclass(frozen=True)
class PartReader:
    """Reads one part; can be pickled for the task.

    Args:
        storage: The root.
        plan: What to read.
        rows: The part.
    """

    storage: Storage
    plan: Plan
    rows: Sequence[Rows]

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows as tables; one empty table if the part has no rows."""
        empty = True
        for batch in self.batches():
            empty = False
            yield self.plan.shows(to_table(batch, self.plan.layout))
        if empty:
            yield self.plan.shows(self.plan.layout.empty())

    def batches(self) -> Iterator[Batch]:
        """Yield the rows in batches of at most 32 MiB (more only if one row is larger).

        Raises:
            CorruptData: Rows are damaged or missing; with ``on_error="skip"`` they are counted and logged.
        """
        for rows in self.rows:
            for batch in self._of_writer(rows):
                if batch.agent_steps():
                    yield _finished(self.plan, batch, rows.writer)

    def _of_writer(self, rows: Rows) -> Iterator[Batch]:
        cursor = rows.first
        on_error: Literal["raise", "skip"] = "skip" if self.plan.options.skip_damage else "raise"
        missing = GoneSegments(on_error)
        given_up = missing.given_up
        listing = Listing({rows.writer: list(rows.shards)})
        dataset = DatasetSnapshot(self.storage, listing, at={rows.writer: [cursor, rows.stop]})
        while cursor < rows.stop:
            self._check(dataset)
            # Set here, because otherwise each task would read the schema files of all writers.
            vars(dataset)["schemas"] = dict(self.plan.schemas)
            options, searched = self.plan.options, self.plan.filter_options
            reader = SpanReader(dataset, options, counting_of(dataset, options.columns), given_up=given_up)
            search = reader.with_options(searched, counting_of(dataset, searched.columns))
            try:
                footers = self.plan.row_filter is not None  # It may rule groups out.
                for segment, spans in reader.in_turn(dataset.segments, footers=footers):
                    for span in spans:
                        chosen = _passing(self.plan, search, segment, span)
                        yield from _of_span(self.plan, reader, segment, span, chosen)
                        cursor = span.end
                return
            except SegmentGone as gone:
                missing.miss(gone)
                dataset = dataset.refresh(at={rows.writer: [cursor, rows.stop]})

    def _check(self, dataset: DatasetSnapshot) -> None:
        if not self.plan.options.skip_damage:
            dataset.check_complete()
        for where, rows in dataset.lost_rows():
            logger.warning("skipped %d rows of %s, which are missing: %s", rows, dataset.uri, where)


def source_tables(
    source: FileSource, plan: Plan, part: Sequence[Portion] | None = None
) -> Iterator[pa.Table]:
    """Yield the rows of other libraries' files as tables, group by group; nothing if there are no rows.

    Args:
        source: The files.
        plan: What to read.
        part: What to read of them; None: all.

    Raises:
        CorruptData: Rows are damaged or missing; a plan that skips damage counts and logs them.
    """
    gone = GoneSegments("skip" if plan.options.skip_damage else "raise")
    reader = SpanReader(
        source, plan.options, counting_of(source, plan.options.columns), given_up=gone.given_up
    )
    search = reader.with_options(plan.filter_options, counting_of(source, plan.filter_options.columns))

    def read_span(segment: StoredSegment, span: Span, _: Source) -> list[Batch]:
        chosen = _passing(plan, search, segment, span)
        return list(_of_span(plan, reader, segment, span, chosen))

    for segment, span in portion_spans(reader, gone, part, reads_all=plan.row_filter is None):
        for batch in gone.read(source, partial(read_span, segment, span)):
            if batch.agent_steps():
                yield plan.shows(to_table(_finished(plan, batch, segment.writer), plan.layout))


def _finished(plan: Plan, batch: Batch, writer: str) -> Batch:
    """Return the batch in the form of the layout."""
    if plan.layout.joint:
        batch = batch.as_multi_agent()
    if not plan.writers:
        return batch
    if isinstance(batch, MultiAgentBatch):
        return MultiAgentBatch({p: _signed(b, writer) for p, b in batch.items()}, batch.env_steps())
    return _signed(batch, writer)


def _of_span(
    plan: Plan, reader: SpanReader, segment: StoredSegment, span: Span, chosen: NDArray[np.int64] | None
) -> Iterator[Batch]:
    """Yield the chosen rows of a row group, of the policy that is read; None: all."""
    if chosen is not None and not len(chosen):
        return
    folded = reader.read_folded(segment, span)
    if folded is None:
        return
    if isinstance(folded.batch, MultiAgentBatch):
        if plan.policy is None:
            yield folded.batch
        elif plan.policy in folded.batch:
            own = folded.batch[plan.policy]
            yield own if chosen is None else own[chosen]
        return
    if chosen is not None and len(chosen) < len(folded.batch):
        folded = replace(folded, batch=folded.batch[chosen])
    for part in folded.parts(max(1, _TABLE_BYTES // max(plan.row_bytes, 1))):
        yield unfold([part])


def _passing(plan: Plan, search: SpanReader, segment: StoredSegment, span: Span) -> NDArray[np.int64] | None:
    """Return the rows of the policy in a group that pass the filter; None: no filter."""
    if plan.row_filter is None:
        return None
    pid = plan.policy or DEFAULT_POLICY_ID
    found = passing(search, segment, span, plan.row_filter, pid)
    return np.empty(0, np.int64) if found is None else found[0]


def _signed(batch: SampleBatch, writer: str) -> SampleBatch:
    """Return the batch with a column that names the writer of its rows."""
    return batch._like({**batch, WRITER: np.full(batch.count, writer, object)})
