"""Arrow record batches and data frames of a data set's rows, for `Dataset.to_arrow` and its siblings.

`rlio.schemas.arrow_tables` turns rows into tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.dataset.part_reader import Missing, PartReader, plan_of, source_tables, split
from rlio.query.filters import RowFilter, RowFunction
from rlio.read_options import ReadOptions
from rlio.source.snapshot import DatasetSnapshot
from rlio.source.source import FileSource
from rlio.support.calls import closing_on_error
from rlio.support.extras import needs

if TYPE_CHECKING:
    import datasets
    import pandas
    import polars

__all__ = ["hf_dataset", "pandas_frame", "polars_frame", "record_batches", "source_batches"]


def record_batches(
    dataset: DatasetSnapshot,
    options: ReadOptions,
    *,
    filter: str | RowFunction | RowFilter | None,
    policy: str | None,
    writers: bool,
    missing: Missing,
) -> pa.RecordBatchReader:
    """Return the rows of a data set, at most 32 MiB at a time; see `rlio.Dataset.to_arrow`."""
    if options.on_error == "raise":
        dataset.check_complete()
    plan = plan_of(dataset, options, missing=missing, policy=policy, filter=filter, writers=writers)
    parts = split(dataset, tasks=1)

    def read() -> Iterator[pa.RecordBatch]:
        for rows in parts:
            for table in PartReader(dataset.storage, plan, rows).tables():
                yield from table.to_batches()

    return pa.RecordBatchReader.from_batches(plan.shows(plan.layout.empty()).schema, read())


def source_batches(
    source: FileSource,
    options: ReadOptions,
    *,
    filter: str | RowFunction | RowFilter | None,
    policy: str | None,
    missing: Missing,
) -> pa.RecordBatchReader:
    """`record_batches` of other libraries' files, which are closed when all rows are read, or on an error."""
    with closing_on_error(source):
        plan = plan_of(source, options, missing=missing, policy=policy, filter=filter, writers=False)

    def read() -> Iterator[pa.RecordBatch]:
        try:
            for table in source_tables(source, plan):
                yield from table.to_batches()
        finally:
            source.close()

    return pa.RecordBatchReader.from_batches(plan.shows(plan.layout.empty()).schema, read())


def pandas_frame(read: Callable[[], pa.Table]) -> pandas.DataFrame:
    """Return a table as a pandas frame. A row of several values is a read-only view of the value's shape.

    Args:
        read: Makes the table, which may take long: called once it is known that pandas is installed.

    Raises:
        MissingExtra: pandas is not installed.
    """
    with needs("pandas", "pandas"):
        import pandas
    table = read()
    # pyarrow would make nested arrays of rows with several axes.
    columns = {
        name: _rows_of(column) if pa.types.is_fixed_size_list(column.type) else column.to_pandas()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return pandas.DataFrame(columns)


def polars_frame(read: Callable[[], pa.Table]) -> polars.DataFrame:
    """Return a table as a Polars data frame; ``read`` as in `pandas_frame`.

    Raises:
        MissingExtra: Polars is not installed.
    """
    with needs("polars", "polars"):
        import polars
    frame = polars.from_arrow(read())
    assert isinstance(frame, polars.DataFrame)  # Only an array would give a Series.
    return frame


def hf_dataset(read: Callable[[], pa.Table]) -> datasets.Dataset:
    """Return a table as a Hugging Face data set over the same memory; ``read`` as in `pandas_frame`.

    Raises:
        MissingExtra: datasets is not installed.
    """
    with needs("datasets", "hf"):
        import datasets
        from datasets.table import InMemoryTable
    return datasets.Dataset(InMemoryTable(read()))


def _rows_of(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return rows of several values as an array of arrays."""
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
