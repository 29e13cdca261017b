"""Parquet with a row a step, and ``new_obs`` in full, for other tools. `rlio.ForeignParquetReader` reads it.

Row t has the observation, the action, the reward and the flags that followed it, and the observation after
it; ``new_obs_valid`` is False if that is not known. A file has whole episodes. A row of several values
is a list of fixed size, one of rows of different lengths a list; columns of dicts are structs. Times are
dates, timestamps without a zone, and durations.
"""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.arrays import Column, to_numpy
from rlio.batch.frames import in_c_order
from rlio.batch.ragged import Ragged, item_type
from rlio.formats.episode_files import EpisodeFilesSink
from rlio.formats.files.arrow_columns import ANY_LENGTH, TIMES, is_lists
from rlio.formats.files.value_arrays import FLOATS
from rlio.formats.format import Format, Holds, Marks
from rlio.formats.sink import Origin
from rlio.schemas.arrow_tables import arrow_times, nested_lists
from rlio.storage.filesystem import Storage

FORMAT = Format(
    name="parquet",
    title="Parquet with a row a step",
    # Without a mapping, its files are read as RLlib's Parquet.
    marks=Marks(endings=(".parquet", ".pq")),
    reader="rlio.readers.foreign_parquet:ForeignParquetReader",
    rows="rlio.formats.tables.parquet_source:open_rows",
    table="rlio.formats.tables.parquet_table:ParquetTable",
    writer="rlio.formats.tables.parquet_rows:ParquetRowsSink",
    holds=Holds(
        obs="dicts",
        actions="dicts",
        extra="dicts",
        texts=frozenset(("obs", "actions", "extra")),
        ragged=frozenset(("obs", "actions", "extra")),
        times=True,
        # By these, files of LeRobot, Minari and RLlib are recognised.
        reserved="episode_index|terminations|type",
        rewards="numbers",
        floats=FLOATS,
        needs_rewards=False,
        agents=True,
        uniform="dtypes",
    ),
    advice="read it with rlio.ForeignParquetReader",
    about="Columns as rlio has them, with new_obs in full, for DuckDB, Polars, pandas and Hugging Face.",
)


class ParquetRowsSink(EpisodeFilesSink):
    """Writes a folder of files; an `EpisodeSink`.

    Args:
        storage: The folder.
        origin: What is known of the data.
        compression: Codec of the pages.
        episodes_per_file: Whole episodes in a file; None: 64 MiB of them.
    """

    ending = ".parquet"

    def __init__(
        self,
        storage: Storage,
        origin: Origin,
        *,
        compression: str = "zstd",
        episodes_per_file: int | None = None,
    ) -> None:
        self._compression = compression
        super().__init__(storage, episodes_per_file=episodes_per_file)

    def _encoded(self, episodes: list[SampleBatch]) -> bytes:
        rows = concat_samples(episodes)
        table = pa.table({name: _to_arrow(column) for name, column in rows.items()})
        lists = {
            field.name: Ragged.of(to_numpy(rows[field.name])).values.shape[1:]
            for field in table.schema
            if is_lists(field.type)
        }
        dtypes = {name: column.dtype for name, column in rows.items() if isinstance(column, np.ndarray)}
        times = {name: dtype.str for name, dtype in dtypes.items() if dtype.kind in "mM"}
        stated = {ANY_LENGTH: lists, TIMES: times}
        table = table.replace_schema_metadata({key: json.dumps(one) for key, one in stated.items() if one})
        found = BytesIO()
        pq.write_table(table, found, compression=self._compression)
        return found.getvalue()


def _to_arrow(column: Column) -> Any:
    if isinstance(column, dict):
        return pa.StructArray.from_arrays([_to_arrow(part) for part in column.values()], names=list(column))
    array = in_c_order(to_numpy(column))
    if array.dtype == object and item_type(array) is not None:
        found = Ragged.of(array)
        items = found.values
        items = pa.array(items) if items.ndim == 1 else nested_lists(in_c_order(items))
        return pa.LargeListArray.from_arrays(pa.array(found.offsets), items)
    if array.dtype == object:
        return pa.array(array.tolist(), pa.string())
    return pa.array(arrow_times(array)) if array.ndim == 1 else nested_lists(array)
