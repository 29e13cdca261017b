"""Which rows of a data set a filter lets pass, without reading what cannot hold one of them.

Row groups whose bounds rule a filter out are passed over; of the others, only the columns that the filter
reads are decoded. The bounds are those of a shard's footer, which a CRC covers: they can be wrong only where
whoever wrote the data lied, and then rows are missing, which is all that comes of it.

Not here: filters themselves (`rlio.replay.filters`), and orders over the rows that are found
(`rlio.replay.order`).

Example:
    >>> import rlio
    >>> with rlio.ParquetWriter("memory://pushdown-example") as writer:
    ...     writer.write(rlio.SampleBatch(rewards=[0.0, 1.0, 0.0, 2.0]))
    >>> found = resolve(rlio.open_dataset("memory://pushdown-example"), RowFilter.parse("rewards > 0"))
    >>> found.positions, found.total
    (array([1, 3]), 4)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch
from rlio.columns import DEFAULT_POLICY_ID, Columns
from rlio.dataset import Dataset
from rlio.errors import OptionError, excerpt
from rlio.interfaces import Batch, ReadOptions
from rlio.replay.filters import Ref, RowFilter
from rlio.replay.segment_reader import SegmentReader, Span, counting_of, group_options
from rlio.schemas.parquet_statistics import Bounds
from rlio.schemas.schema import Leaf, PolicySchema, Schema
from rlio.storage.listing import Segment
from rlio.storage.shards import OpenShard

__all__ = ["Matches", "Resolved", "is_ruled_out", "matches", "resolve"]

logger = logging.getLogger("rlio")

Rows = NDArray[np.int64]


class Matches(NamedTuple):
    """What a filter lets pass of one segment.

    Attributes:
        segment: The live part of a shard.
        start: Position of its first row.
        rows: Positions that it takes: its rows, those that are lost included.
        positions: Of the rows that pass, ascending; shape (k,) int64.
        lost: Rows of it that are damaged, and might have passed.
        groups_read, groups_passed_over: Row groups that were read, and those that bounds ruled out.
        spans: The live parts of its row groups, all of them.
    """

    segment: Segment
    start: int
    rows: int
    positions: Rows
    lost: int
    groups_read: int
    groups_passed_over: int
    spans: list[Span]


@dataclass(frozen=True)
class Resolved:
    """What a filter lets pass of a data set.

    Attributes:
        positions: Of the rows that pass, in recorded order: writers by id, rows ascending, from 0; shape
            (k,) int64. Rows that are lost have positions, rows that are missing have none. Where there are
            several policies, only the rows of one are counted, and none of a damaged row group.
        total: How many positions there are.
        lost: Rows that are damaged or missing, and might have passed.
        groups_read, groups_passed_over: Row groups that were read, and those that bounds ruled out.
    """

    positions: Rows
    total: int
    lost: int
    groups_read: int
    groups_passed_over: int


def is_ruled_out(
    shard: OpenShard, group: int, row_filter: RowFilter, *, policy: str = DEFAULT_POLICY_ID
) -> bool:
    """Whether what a shard's footer says of a row group leaves no row of it that may pass; reads nothing."""
    if policy not in shard.schema.policies:
        return True
    columns, known = shard.schema.policies[policy].columns, shard.bounds(group)
    bounds: dict[Ref, Bounds] = {}
    for ref in row_filter.references:
        for leaf in columns.get(ref.column, ()):
            if leaf.path == ref.path and leaf.physical in known:
                bounds[ref] = known[leaf.physical]
    return not row_filter.may_match(bounds)


def matches(
    dataset: Dataset,
    row_filter: RowFilter,
    *,
    policy: str | None = None,
    missing: Literal["error", "drop", "fill"] = "error",
    on_error: Literal["raise", "skip"] = "raise",
    given_up: set[str] | None = None,
) -> Iterator[Matches]:
    """What a filter lets pass, segment by segment in recorded order; one row group is in memory at a time.

    Args:
        dataset: The snapshot.
        row_filter: The filter.
        policy: Whose rows are wanted; None: those of the only policy that there is.
        missing: What to do where only some writers have a column that the filter needs: ``"error"``; with
            ``"fill"``, their rows have zeros, as when they are read; with ``"drop"``, it is no column.
        on_error: What to do with rows that are damaged or missing: ``"raise"``, or ``"skip"``: count and log
            them. Row groups that are passed over are not looked at.
        given_up: Paths of shards that are listed and not there: damage, not asked for again.

    Raises:
        MissingColumn: There is no such column.
        OptionError: The filter does not fit the columns, or there are several policies and none was named.
        SchemaConflict: Only some writers have a column, and ``missing`` is ``"error"``.
        CorruptData: Rows are damaged. (HoleError: missing.)
        ShardGone: A shard is not there any more: list again (`rlio.replay.segment_reader`).
    """
    if on_error == "raise":
        dataset.check_complete()
    schemas = list(dataset.schemas.values())
    if not schemas and not dataset.segments:
        return
    pid = _policy_of(dataset, policy)
    columns = _columns_to_read(row_filter, schemas)
    options = group_options(dataset, ReadOptions(columns=columns, on_error=on_error), missing)
    row_filter.check(_united(schemas, pid, options.columns))
    counting = counting_of(dataset, options.columns)
    reader = SegmentReader(dataset, options, counting, given_up=set() if given_up is None else given_up)
    several = len({name for schema in schemas for name in schema.policies}) > 1
    start = 0
    for segment in dataset.segments:
        found = _segment_matches(_Search(reader, row_filter, pid, several), segment, start)
        start += found.rows
        yield found


def resolve(
    dataset: Dataset,
    row_filter: RowFilter,
    *,
    policy: str | None = None,
    missing: Literal["error", "drop", "fill"] = "error",
    on_error: Literal["raise", "skip"] = "raise",
    given_up: set[str] | None = None,
) -> Resolved:
    """All that a filter lets pass; see `matches`, whose arguments and errors these are.

    Takes 8 bytes for each row that passes, twice while they are put together, and a row group.
    """
    parts: list[Rows] = []
    total = lost = read = passed_over = 0
    for found in matches(
        dataset, row_filter, policy=policy, missing=missing, on_error=on_error, given_up=given_up
    ):
        parts.append(found.positions)
        total += found.rows
        lost += found.lost
        read += found.groups_read
        passed_over += found.groups_passed_over
    positions = np.concatenate(parts) if parts else np.empty(0, np.int64)
    lost += sum(rows for _, rows in dataset.lost_rows())
    logger.info(
        "filter %s: %d of %d rows of %s; %d row groups read, %d passed over",
        excerpt(row_filter.text),
        len(positions),
        total,
        dataset.uri,
        read,
        passed_over,
    )
    return Resolved(positions, total, lost, read, passed_over)


class _Search(NamedTuple):
    """What is looked for: see `matches`.

    Attributes:
        several: Whether there are other policies: then a row group has to be read to know how many of its
            rows are this one's.
    """

    reader: SegmentReader
    row_filter: RowFilter
    policy: str
    several: bool


def _segment_matches(search: _Search, segment: Segment, start: int) -> Matches:
    """What passes of a segment whose first row has the position ``start``."""
    at, lost, read, passed_over = start, 0, 0, 0
    parts: list[Rows] = []
    spans = search.reader.spans(segment)
    for span in spans:
        if _is_span_ruled_out(search, segment, span):
            passed_over += 1
            at += len(span.rows)
            continue
        batch = search.reader.read(segment, span)
        if batch is None:
            lost += len(span.rows)
            at += 0 if search.several else len(span.rows)
            continue
        read += 1
        rows, count = _passing(batch, search.row_filter, search.policy)
        parts.append(rows + at)
        at += count
    positions = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return Matches(segment, start, at - start, positions, lost, read, passed_over, spans)


def _is_span_ruled_out(search: _Search, segment: Segment, span: Span) -> bool:
    if search.several or span.group < 0:
        return False
    shard = search.reader.open(segment)
    return shard is not None and is_ruled_out(shard, span.group, search.row_filter, policy=search.policy)


def _passing(batch: Batch, row_filter: RowFilter, policy: str) -> tuple[Rows, int]:
    """The rows of a policy that pass, among those that it has; and how many these are."""
    own = batch.get(policy) if isinstance(batch, MultiAgentBatch) else batch
    if own is None or not own.count:
        return np.empty(0, np.int64), 0
    return np.flatnonzero(row_filter.mask(own, rows=own.count)), own.count


def _policy_of(dataset: Dataset, policy: str | None) -> str:
    """The policy whose rows are wanted."""
    known = sorted({name for schema in dataset.schemas.values() for name in schema.policies})
    if policy is None:
        if len(known) > 1:
            raise OptionError(
                f"the data set has the policies {excerpt(known)}: name the one whose rows are wanted, "
                "policy=",
                uri=dataset.uri,
            )
        return known[0] if known else DEFAULT_POLICY_ID
    if known and policy not in known:
        raise OptionError(f"no policy {excerpt(policy)}; there are {excerpt(known)}", uri=dataset.uri)
    return policy


def _columns_to_read(row_filter: RowFilter, schemas: list[Schema]) -> list[str] | None:
    """The columns of a filter; of several agents, also those that tell joint steps apart."""
    if row_filter.columns is None:
        return None
    columns = list(row_filter.columns)
    for name in (Columns.EPS_ID, Columns.T):
        joint = any(
            name in policy.columns
            for schema in schemas
            if schema.multi_agent
            for policy in schema.policies.values()
        )
        if joint and name not in columns:
            columns.append(name)
    return columns


def _united(schemas: list[Schema], policy: str, columns: list[str] | None) -> PolicySchema:
    """The columns of a policy that any schema has, among those that are read."""
    leaves: dict[str, list[Leaf]] = {}
    for schema in schemas:
        if policy in schema.policies:
            for name, found in schema.policies[policy].columns.items():
                if columns is None or name in columns:
                    leaves.setdefault(name, found)
    return PolicySchema(tuple(leaf for found in leaves.values() for leaf in found))
