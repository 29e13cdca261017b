"""Turns a row group into the Arrow table of a shard: linked, split and typed, but not yet encoded.

`rlio.schemas.parquet` encodes it, and `rlio.schemas.row_groups` collects the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.errors import CorruptData
from rlio.schemas.arrow import arrow_type, to_arrow
from rlio.schemas.column import ColumnSpec, Nullable
from rlio.schemas.observations import MISSING, STORED, link, previous_rows, successors
from rlio.schemas.row_groups import RowGroup, partial_columns
from rlio.schemas.schema import Schema
from rlio.schemas.streams import TABLE_COLUMNS, StreamTable

__all__ = [
    "BATCH",
    "NEXT",
    "OLDER",
    "STREAM",
    "check_stacks",
    "file_fields",
    "group_table",
    "linked_columns",
    "nullable_columns",
    "stack_specs",
]

#: Suffix of the column that holds the older frames of stacks.
OLDER = "#older"
NEXT, STREAM, BATCH = "_next", "_stream", "_batch"


def _streams(group: RowGroup, schema: Schema, table: StreamTable) -> NDArray[np.int32]:
    """Return the stream number of each row in ``table``; numbers the policies one after the other."""
    stream = np.empty(group.rows, np.int32)
    for number, pid in enumerate(group.policies):
        columns = schema.policies[pid].columns
        every = np.arange(group.rows) if group.policy is None else np.flatnonzero(group.policy == number)
        rows = slice(None) if group.policy is None else every
        named = {
            name: _at(group.columns[columns[name][0].physical], rows)
            for name in TABLE_COLUMNS
            if name in columns and columns[name][0].physical in group.columns
        }
        times = group.times
        if group.policy is not None:  # By the numbers of the policy's own rows.
            times = [(int(np.searchsorted(every, first)), each) for first, each in times]
        stream[rows] = table.assign(pid, named, len(every), times=times)
    return stream


def group_table(group: RowGroup, schema: Schema, streams: StreamTable) -> pa.Table:
    """Return the rows of a group in the columns of `file_fields`.

    Args:
        group: The table views its memory if the layout allows: keep it unchanged.
        schema: Schema of the rows.
        streams: The shard's streams so far; the call adds those of the group.
    """
    stream = _streams(group, schema, streams)
    following = successors(stream)
    columns = dict(group.columns)
    distance = _link(group, schema, stream, following)
    pooled = {new_obs for new_obs, _ in schema.stacked.values()}
    for name in linked_columns(schema):
        if name in pooled:
            continue
        values, valid = columns[name]
        stored = _stored(group, schema, name, distance)
        columns[name] = (values[stored], stored) if valid is None else (values[stored[valid]], valid & stored)
    for name, mask in schema.masks.items():
        columns[name] = _masked(columns[name], columns[mask], group.rows, schema.columns[name])
    for name in schema.rests:
        columns[name] = _without_blanks(*columns[name])
    stacked = _split_stacks(group, schema, following, distance)
    arrays = {
        NEXT: pa.array(distance),
        STREAM: pa.array(stream),
        BATCH: pa.array(group.batches, pa.string()),
    }
    fields = file_fields(schema)
    for name in (field.name for field in fields if field.name not in arrays):
        if name in stacked:
            arrays[name] = to_arrow(*stacked[name])
        else:
            arrays[name] = to_arrow(*columns[name], schema.columns[name])
    return pa.Table.from_arrays([arrays[field.name] for field in fields], schema=pa.schema(fields))


def _stored(group: RowGroup, schema: Schema, name: str, distance: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return a mask of rows that store their own value of a linked column."""
    stored: NDArray[np.bool_] = distance == STORED
    if group.policy is not None:
        for number, pid in enumerate(group.policies):
            if name not in {new_obs.physical for _, new_obs in schema.policies[pid].linked}:
                stored |= group.policy == number
    return stored


def _masked(column: Nullable, mask: Nullable, rows: int, spec: ColumnSpec) -> Nullable:
    """Return the values of the rows that a mask names."""
    values, valid = column
    has, owners = mask
    every = has
    if owners is not None:
        every = np.zeros(rows, bool)
        every[owners] = has
    kept = every if valid is None else every[valid]
    if kept.all() and spec.kind != "bytes":
        return column
    return values[kept], every if valid is None else valid & every


def _without_blanks(texts: NDArray[Any], valid: NDArray[np.bool_] | None) -> Nullable:
    """Return the texts that are not empty."""
    kept = np.fromiter(map(len, texts.tolist()), np.int64, len(texts)) > 0
    if valid is None:
        return texts[kept], kept
    every = valid.copy()
    every[valid] = kept
    return texts[kept], every


def _link(
    group: RowGroup, schema: Schema, stream: NDArray[np.int32], following: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return the ``_next`` column; links policy by policy, because their observations differ."""
    distance = np.zeros(group.rows, np.int32)
    if group.missing is not None:
        distance[group.missing] = MISSING
    for number, pid in enumerate(group.policies):
        pairs = schema.policies[pid].linked
        if not pairs:
            continue
        if group.policy is None:
            arrays = [
                (group.columns[a.physical][0], group.columns[b.physical][0])
                for a, b in pairs
                if a.physical not in group.stacks
            ]
            distance = link(arrays, following, group.missing, equal=_linked_stacks(group, following))
            continue
        rows = np.flatnonzero(group.policy == number)
        arrays = [
            (_at(group.columns[a.physical], rows), _at(group.columns[b.physical], rows)) for a, b in pairs
        ]
        missing = None if group.missing is None else group.missing[rows]
        near = link(arrays, successors(stream[rows]), missing)
        target = np.arange(len(rows)) + np.maximum(near, 0)
        distance[rows] = np.where(near > 0, rows[target] - rows, near)
    return distance


def _linked_stacks(group: RowGroup, following: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of rows whose stacks of new_obs equal the obs stacks of their next row."""
    linked = following >= 0
    for pool in group.stacks.values():
        rows = np.flatnonzero(linked)
        linked[rows] = pool.frames.equal(pool.new_obs[rows], pool.obs[following[rows]])
    return linked


def _split_stacks(
    group: RowGroup, schema: Schema, following: NDArray[np.int64], distance: NDArray[np.int32]
) -> dict[str, tuple[NDArray[Any], NDArray[np.bool_] | None, ColumnSpec]]:
    """Return the newest and older frames of the stacked columns, by field name."""
    check_stacks(schema)
    found: dict[str, tuple[NDArray[Any], NDArray[np.bool_] | None, ColumnSpec]] = {}
    previous = previous_rows(following)
    stored = np.flatnonzero(distance == STORED)
    for name, pool in group.stacks.items():
        new_name = schema.stacked[name][0]
        newest, older = stack_specs(schema.columns[name])
        split = pool.split_obs(previous)
        found[name] = (split.newest, None, newest)
        found[name + OLDER] = (split.older, split.full, older)
        split = pool.split_new_obs(stored)
        full = np.zeros(group.rows, bool)
        full[stored] = split.full
        found[new_name] = (split.newest, distance == STORED, newest)
        found[new_name + OLDER] = (split.older, full, older)
    return found


def check_stacks(schema: Schema) -> None:
    """Refuse frame stacks in columns that cannot have them.

    Raises:
        CorruptData: Some rows lack the stacked columns, or the columns are not linked.
    """
    pairs = [(obs, new_obs) for obs, (new_obs, _) in schema.stacked.items()]
    paired = {name for pair in pairs for name in pair}
    stacked = {name for name, spec in schema.columns.items() if spec.stack is not None}
    if stacked != paired or any(schema.columns[a].stack != schema.columns[b].stack for a, b in pairs):
        raise CorruptData(
            "its schema has frame stacks in columns that not every row has, or that are not linked"
        )


def stack_specs(spec: ColumnSpec) -> tuple[ColumnSpec, ColumnSpec]:
    """Return the specs of a stacked column's newest frame and older frames; frames are the first axis."""
    assert spec.stack is not None
    frame = tuple(n for axis, n in enumerate(spec.shape) if axis != spec.stack.axis)
    older = (spec.stack.depth - 1, *frame)
    return ColumnSpec(spec.dtype, frame, "bytes"), ColumnSpec(spec.dtype, older, "bytes")


def linked_columns(schema: Schema) -> list[str]:
    """Return the physical ``new_obs`` columns that may refer to a later row's ``obs``."""
    return sorted({new_obs.physical for p in schema.policies.values() for _, new_obs in p.linked})


def nullable_columns(schema: Schema) -> set[str]:
    """Return the physical columns that are null in some rows, which have no value."""
    return partial_columns(schema) | {*linked_columns(schema), *schema.masks, *schema.rests}


def file_fields(schema: Schema) -> list[pa.Field]:
    """Return the Arrow fields of a shard of this schema: columns by name, then the structure columns."""
    absent = nullable_columns(schema)
    fields = []
    for name, spec in schema.columns.items():
        if name == Columns.NEXT_OBS_VALID or spec.kind in ("none", "mask"):
            continue
        nullable = name in absent or spec.kind == "time"  # NaT is null.
        if spec.stack is None:
            fields.append(pa.field(name, arrow_type(spec, nullable=nullable), nullable=nullable))
            continue
        newest, older = stack_specs(spec)
        fields.append(pa.field(name, arrow_type(newest, nullable=nullable), nullable=nullable))
        fields.append(pa.field(name + OLDER, arrow_type(older, nullable=True), nullable=True))
    return [
        *fields,
        pa.field(NEXT, pa.int32(), nullable=False),
        pa.field(STREAM, pa.int32(), nullable=False),
        pa.field(BATCH, pa.string(), nullable=True),
    ]


def _at(column: Nullable, rows: NDArray[np.int64] | slice) -> NDArray[Any]:
    """Return the values of the given rows of a column that other rows may lack."""
    values: NDArray[Any]
    values, valid = column
    return values[rows] if valid is None else values[(np.cumsum(valid) - 1)[rows]]
