"""The least and greatest values of a row group's columns, from the statistics in a shard's footer.

A footer is covered by the CRC in its shard's name, so that bounds are those that the writer gave. They are
believed for what they are: a stranger whose statistics lie hides rows of his own data, and harms nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow.parquet as pq

from rlio.schemas.group_arrays import linked_columns
from rlio.schemas.schema import Schema

__all__ = ["Bounds", "read_bounds"]

#: The least and the greatest value of a column but for NaNs, in its dtype.
Bounds: TypeAlias = "tuple[np.generic[Any], np.generic[Any]]"


def read_bounds(metadata: pq.FileMetaData, schema: Schema) -> list[Mapping[str, Bounds]]:
    """The bounds of each row group's scalar columns, by physical name.

    What is left out is not known: columns that are no scalars, or hold nothing but NaNs and nulls, and those
    of ``new_obs``, of which only the values that are no other row's ``obs`` are stored.

    Args:
        metadata: A footer that was found to fit ``schema``.
        schema: Of the shard.
    """
    elided = set(linked_columns(schema))
    scalars = {
        number: name
        for number in range(metadata.num_columns)
        if (name := metadata.schema.column(number).path) in schema.columns
        and schema.columns[name].kind == "scalar"
        and name not in elided
    }
    found: list[Mapping[str, Bounds]] = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        bounds = {}
        for number, name in scalars.items():
            statistics = group.column(number).statistics
            if statistics is not None and statistics.has_min_max:
                native = schema.columns[name].native.type
                low, high = native(statistics.min), native(statistics.max)
                if low <= high:
                    bounds[name] = low, high
        found.append(bounds)
    return found
