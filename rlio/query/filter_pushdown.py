"""Finds the rows of a source that pass a filter, and skips data that cannot hold such rows.

Row groups whose bounds rule the filter out are skipped. Of other row groups, only the columns that the filter
reads are decoded. Bounds come from a shard's footer, which a CRC covers. They are wrong only if the writer
forged them, and the only consequence is missing rows.

Filters themselves are in `rlio.query.filters`, and orders over the found rows in `rlio.query.order`.

Example:
    >>> import rlio
    >>> with rlio.ParquetWriter("memory://pushdown-example") as writer:
    ...     writer.write(rlio.SampleBatch(rewards=[0.0, 1.0, 0.0, 2.0]))
    >>> data = rlio.open_dataset("memory://pushdown-example")
    >>> [(found.positions, found.rows) for found in matches(data, RowFilter.parse("rewards > 0"))]
    [(array([1, 3]), 4)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.errors import OptionError, excerpt
from rlio.query.filters import Ref, RowFilter
from rlio.read_options import ReadOptions
from rlio.schemas.filling import joint_columns
from rlio.schemas.parquet_statistics import Bounds
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.schema import Schema
from rlio.schemas.streams import WRITER
from rlio.source.damage import Damage
from rlio.source.selection import GroupOptions, counting_of, group_options, with_step_columns
from rlio.source.source import OpenSegment, Source, StoredSegment
from rlio.source.span_reader import Span, SpanReader

__all__ = ["Matches", "check_filter", "check_split", "filter_options", "is_ruled_out", "matches", "passing"]

Rows = NDArray[np.int64]


class Matches(NamedTuple):
    """The rows of one segment that pass a filter.

    Attributes:
        segment: The segment.
        start: Position of its first row.
        rows: Number of its positions, lost rows included.
        positions: Positions of the rows that pass, ascending; shape (k,) int64.
        lost: Number of its damaged rows, which might have passed.
        spans: Its spans.
    """

    segment: StoredSegment
    start: int
    rows: int
    positions: Rows
    lost: int
    spans: list[Span]


def is_ruled_out(
    opened: OpenSegment, group: int, row_filter: RowFilter, *, policy: str = DEFAULT_POLICY_ID
) -> bool:
    """Whether bounds exclude that any row of a group passes; reads nothing."""
    if policy not in opened.schema.policies:
        return True
    columns, known = opened.schema.policies[policy].columns, opened.bounds(group)
    bounds: dict[Ref, Bounds] = {}
    for ref in row_filter.references:
        for leaf in columns.get(ref.column, ()):
            if leaf.path == ref.path and leaf.physical in known:
                bounds[ref] = known[leaf.physical]
    return not row_filter.may_match(bounds)


def filter_options(
    source: Source,
    row_filter: RowFilter,
    *,
    missing: Literal["error", "drop", "fill"],
    on_error: Literal["raise", "skip"],
) -> GroupOptions:
    """What to read of each row group in order to apply a filter."""
    row_filter.check_names({name for names in source.columns.values() for name in names})
    columns = None if row_filter.columns is None else with_step_columns(source, list(row_filter.columns))
    if columns is not None and row_filter.split is not None:
        check_split(source, row_filter, missing=missing)
        merged = any(WRITER in columns for columns in source.columns.values())
        columns += [WRITER] if merged and WRITER not in columns else []
    return group_options(source, ReadOptions(columns=columns, on_error=on_error), missing)


def check_split(source: Source, row_filter: RowFilter | None, *, missing: str) -> None:
    """Refuse a split of merged rows whose original writers are dropped: episodes would change sides.

    Raises:
        OptionError: Only some rows name their original writer, and ``missing`` is "drop".
    """
    if row_filter is None or row_filter.split is None or missing != "drop":
        return
    policies = [policy for schema in source.schemas.values() for policy in schema.policies.values()]
    if len({WRITER in policy.columns for policy in policies}) > 1:
        raise OptionError(
            "split with missing='drop': some rows were merged from other writers, which missing='drop' "
            "forgets; pass missing='fill'",
            uri=source.uri,
        )


def check_filter(
    row_filter: RowFilter, schemas: Iterable[Schema], policy: str, columns: list[str] | None = None
) -> None:
    """Check that a filter fits a policy's columns, as they are in any of the schemas.

    Args:
        row_filter: The filter.
        schemas: Schemas of all writers.
        policy: The policy's id.
        columns: The columns that are read; None: all.

    Raises:
        MissingColumn: No schema has the column.
        OptionError: The filter does not fit the columns.
    """
    known = joint_columns(schemas, policy, columns)
    row_filter.check(PolicySchema(tuple(leaf for leaves in known.values() for leaf in leaves)))


def matches(
    source: Source,
    row_filter: RowFilter,
    *,
    missing: Literal["error", "drop", "fill"] = "error",
    on_error: Literal["raise", "skip"] = "raise",
    given_up: set[str] | None = None,
    damage: Damage | None = None,
) -> Iterator[Matches]:
    """Find the rows that pass a filter, segment by segment in recorded order, with one row group in memory.

    Args:
        source: The source; of one policy.
        row_filter: The filter.
        missing: What to do if only some writers have a column that the filter needs: ``"error"``; ``"fill"``:
            the rows of other writers have zeros, as in reads; ``"drop"``: the column does not exist.
        on_error: What to do with rows that are damaged or missing: ``"raise"``, or ``"skip"``: count and log
            them. Skipped row groups are not checked.
        given_up: Paths of segments that are listed but missing: damage; they are not requested again.
        damage: Collects the damaged places.

    Raises:
        MissingColumn: The column does not exist.
        OptionError: The filter does not fit the columns, or there are several policies.
        SchemaConflict: Only some writers have a column, and ``missing`` is ``"error"``.
        CorruptData: Rows are damaged. (HoleError: missing.)
        SegmentGone: A segment is missing: list the source again (`rlio.source.span_reader`).
    """
    if on_error == "raise":
        source.check_complete()
    schemas = list(source.schemas.values())
    if not schemas and not source.segments:
        return
    policies = sorted({name for schema in schemas for name in schema.policies}) or [DEFAULT_POLICY_ID]
    if len(policies) > 1:
        raise OptionError(f"the data set has the policies {excerpt(policies)}: expected one", uri=source.uri)
    options = filter_options(source, row_filter, missing=missing, on_error=on_error)
    check_filter(row_filter, schemas, policies[0], options.columns)
    counting = counting_of(source, options.columns)
    gone = set() if given_up is None else given_up
    reader = SpanReader(source, options, counting, given_up=gone, damage=damage)
    start = 0
    for segment, spans in reader.in_turn(source.segments, footers=True):
        at, lost = start, 0
        parts: list[Rows] = []
        for span in spans:
            found = passing(reader, segment, span, row_filter, policies[0])
            rows, count = (np.empty(0, np.int64), len(span.rows)) if found is None else found
            lost += count if found is None else 0
            parts.append(rows + at)
            at += count
        positions = np.concatenate([np.empty(0, np.int64), *parts])
        yield Matches(segment, start, at - start, positions, lost, spans)
        start = at


def passing(
    reader: SpanReader, segment: StoredSegment, span: Span, row_filter: RowFilter, policy: str
) -> tuple[Rows, int] | None:
    """The rows of a policy in a span that pass, and its number of rows there; None: the rows are lost.

    A group that bounds rule out is not read.
    """
    opened = reader.open(segment)
    if opened is None or span.group < 0:
        return None
    if is_ruled_out(opened, span.group, row_filter, policy=policy):
        return np.empty(0, np.int64), len(span.rows)
    batch = reader.read(segment, span)
    own = batch.get(policy) if isinstance(batch, MultiAgentBatch) else batch
    if own is None:
        return None
    return np.flatnonzero(row_filter.mask(own, rows=own.count, writer=segment.writer)), own.count
