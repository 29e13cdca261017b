"""The least and greatest values of a row group's columns, from the statistics in a shard's footer.

The CRC in the shard's name covers its footer, so the bounds are those that the writer stored. Trusting them
is safe: false statistics only hide rows of the shard that states them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow.parquet as pq

from rlio.schemas.group_arrays import linked_columns
from rlio.schemas.schema import Schema

__all__ = ["Bounds", "read_bounds"]

#: The least and the greatest value of a column without NaNs, in its dtype.
Bounds: TypeAlias = "tuple[np.generic[Any], np.generic[Any]]"


def read_bounds(metadata: pq.FileMetaData, schema: Schema) -> list[Mapping[str, Bounds]]:
    """Return the bounds of each row group's scalar columns, by physical name.

    Leaves out columns with unknown bounds: columns that are not scalars, that hold only NaNs and nulls, and
    those of ``new_obs``, which store only values that are not another row's ``obs``.

    Args:
        metadata: A footer that fits ``schema``.
        schema: Schema of the shard.
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
