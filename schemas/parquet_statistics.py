"""The least and greatest values of a row group's columns, from the statistics in a shard's footer.

The CRC in the shard's name covers its footer, so the bounds are those that the writer stored. Trusting them
is safe: false statistics only hide rows of the shard that states them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow.parquet as pq

from rlio.schemas.group_arrays import linked_columns
from rlio.schemas.schema import Schema

__all__ = ["Bounds", "bounded_columns", "read_bounds"]

#: The least and the greatest value of a column without NaNs, in its dtype.
Bounds: TypeAlias = "tuple[np.generic[Any], np.generic[Any]]"


def bounded_columns(schema: Schema, places: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """Return number -> physical name of the columns that may have bounds: scalars.

    Those of ``new_obs`` are left out, which store only values that are not another row's ``obs``; and keys of
    infos, which rows may lack.

    Args:
        schema: Schema of the shard.
        places: Name of each column of the file -> the numbers of its columns of Parquet.
    """
    elided = {*linked_columns(schema), *schema.masks}
    return {
        numbers[0]: name
        for name, numbers in places.items()
        if name in schema.columns and schema.columns[name].kind == "scalar" and name not in elided
    }


def read_bounds(
    metadata: pq.FileMetaData, schema: Schema, columns: Mapping[int, str]
) -> list[Mapping[str, Bounds]]:
    """Return the bounds of each row group's scalar columns, by physical name.

    Leaves out columns that hold only NaNs and nulls.

    Args:
        metadata: A footer that fits ``schema``.
        schema: Schema of the shard.
        columns: Its `bounded_columns`.
    """
    native = {name: schema.columns[name].native.type for name in columns.values()}
    found: list[Mapping[str, Bounds]] = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        bounds = {}
        for number, name in columns.items():
            statistics = group.column(number).statistics
            if statistics is not None and statistics.has_min_max:
                low, high = native[name](statistics.min), native[name](statistics.max)
                if low <= high:
                    bounds[name] = low, high
        found.append(bounds)
    return found
