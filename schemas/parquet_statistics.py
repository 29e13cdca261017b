"""The least and greatest values of a row group's columns, from the statistics in a shard's footer.

They are read by our own parser, and never asked of pyarrow: what it makes of statistics of the wrong length
ends the process (tried with 26.0: an exception of C++ that nobody catches).

A footer is covered by the CRC in its shard's name, so that bounds are those that the writer gave. They are
believed for what they are: a stranger whose statistics lie hides rows of his own data, and harms nobody.

Source: the Parquet format's parquet.thrift, `Statistics`: NaNs are left out, as are nulls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from rlio.errors import CorruptData
from rlio.limits import Limits
from rlio.schemas.column import ColumnSpec
from rlio.schemas.group_arrays import linked_columns
from rlio.schemas.parquet_metadata import FileMetadata
from rlio.schemas.schema import Schema
from rlio.schemas.thrift import LIST, STRUCT, TEXT, CompactReader, Field, Fields

__all__ = ["Bounds", "read_bounds"]

#: The least and the greatest value of a column but for NaNs, in its dtype.
Bounds: TypeAlias = "tuple[np.generic[Any], np.generic[Any]]"

_STATISTICS: Fields = {5: Field("most", TEXT), 6: Field("least", TEXT)}
_COLUMN: Fields = {12: Field("statistics", STRUCT, fields=_STATISTICS)}
_CHUNK: Fields = {3: Field("column", STRUCT, fields=_COLUMN)}
_GROUP: Fields = {1: Field("chunks", LIST, STRUCT, _CHUNK)}
_FILE: Fields = {4: Field("groups", LIST, STRUCT, _GROUP)}

# How Parquet stores integers: in four bytes, or in eight.
_NARROW: Final = 4


def read_bounds(
    footer: bytes, layout: FileMetadata, schema: Schema, *, limits: Limits
) -> list[Mapping[str, Bounds]]:
    """The bounds of each row group's scalar columns, by physical name.

    What is left out is not known: columns that are no scalars, or hold nothing but NaNs and nulls, and those
    of ``new_obs``, of which only the values that are no other row's ``obs`` are stored.

    Args:
        footer: The Thrift bytes that ``layout`` was parsed from, and found to fit ``schema``.
        layout: What they say.
        schema: Of the shard.
        limits: What the footer may ask for.
    """
    try:
        written = CompactReader(footer, max_values=limits.footer_values).struct(_FILE)
    except CorruptData:
        # Of the whole footer, statistics alone have not been looked at before: these say nothing.
        return [{} for _ in layout.groups]
    elided = set(linked_columns(schema))
    scalars = {
        number: (leaf.path[0], spec)
        for number, leaf in enumerate(layout.leaves)
        if (spec := schema.columns.get(leaf.path[0])) is not None
        and spec.kind == "scalar"
        and leaf.path[0] not in elided
    }
    found: list[Mapping[str, Bounds]] = []
    for group in written["groups"]:
        bounds = {}
        for number, (name, spec) in scalars.items():
            statistics = group["chunks"][number]["column"].get("statistics", {})
            known = _bounds(statistics.get("least", b""), statistics.get("most", b""), spec)
            if known is not None:
                bounds[name] = known
        found.append(bounds)
    return found


def _bounds(least: bytes, most: bytes, spec: ColumnSpec) -> Bounds | None:
    """Two values of a column; None where they are none, or not in order, as two NaNs are not."""
    low, high = _value(least, spec), _value(most, spec)
    return (low, high) if low is not None and high is not None and low <= high else None


def _value(data: bytes, spec: ColumnSpec) -> Any:
    """A value from its plain encoding; None where it is no value of the column."""
    native = spec.native
    stored = native
    if native.kind in "iu":
        stored = np.dtype(f"{native.kind}{max(native.itemsize, _NARROW)}")
    if len(data) != stored.itemsize or (native.kind == "b" and data[0] > 1):
        return None
    value = np.frombuffer(data, stored.newbyteorder("<"))[0]
    if native.kind in "iu" and not np.iinfo(native).min <= int(value) <= np.iinfo(native).max:
        return None
    return native.type(value)
