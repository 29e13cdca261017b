"""The rows of a data set as Arrow record batches and data frames: what `Dataset.to_arrow` and others return.

Not here: how rows become tables (`rlio.dataset.arrow_tables`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.dataset.part_reader import Missing, PartReader, plan_of, split
from rlio.dataset.snapshot import DatasetSnapshot
from rlio.errors import MissingExtra
from rlio.readers.read_options import ReadOptions
from rlio.replay.filters import RowFilter, RowFunction

if TYPE_CHECKING:
    import pandas
    import polars

__all__ = ["pandas_frame", "polars_frame", "record_batches"]


def record_batches(
    dataset: DatasetSnapshot,
    options: ReadOptions,
    *,
    filter: str | RowFunction | RowFilter | None,
    policy: str | None,
    writers: bool,
    missing: Missing,
) -> pa.RecordBatchReader:
    """The rows of a data set, at most 32 MiB of them at a time; see `rlio.Dataset.to_arrow`."""
    if options.on_error == "raise":
        dataset.check_complete()
    plan = plan_of(dataset, options, missing=missing, policy=policy, filter=filter, writers=writers)
    parts = split(dataset, tasks=1)

    def read() -> Iterator[pa.RecordBatch]:
        for rows in parts:
            for table in PartReader(dataset.storage, plan, rows).tables():
                yield from table.to_batches()

    return pa.RecordBatchReader.from_batches(plan.shows(plan.layout.empty()).schema, read())


def pandas_frame(table: pa.Table) -> pandas.DataFrame:
    """A table as a pandas data frame. Rows of several values are arrays of their shape: read-only views.

    Raises:
        MissingExtra: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("pandas", "pandas") from error
    # pyarrow would make arrays of arrays of the rows of several axes.
    columns = {
        name: _rows_of(column) if pa.types.is_fixed_size_list(column.type) else column.to_pandas()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return pandas.DataFrame(columns)


def polars_frame(table: pa.Table) -> polars.DataFrame:
    """A table as a Polars data frame.

    Raises:
        MissingExtra: Polars is not installed.
    """
    try:
        import polars
    except ImportError as error:
        raise MissingExtra("polars", "polars") from error
    frame = polars.from_arrow(table)
    assert isinstance(frame, polars.DataFrame)  # A Series only of an array.
    return frame


def _rows_of(column: pa.ChunkedArray) -> NDArray[Any]:
    """Rows of several values as an array of arrays."""
    found = np.empty(len(column), object)
    row = 0
    for chunk in column.chunks:
        shape, values = [len(chunk)], chunk
        while pa.types.is_fixed_size_list(values.type):
            shape.append(values.type.list_size)
            values = values.flatten()
        for array in values.to_numpy(zero_copy_only=False).reshape(shape):
            found[row] = array
            row += 1
    return found
