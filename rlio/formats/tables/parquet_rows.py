"""Parquet with a row a step, and ``new_obs`` in full, for other tools. `rlio.ForeignParquetReader` reads it.

Row t has the observation, the action, the reward and the flags that followed it, and the observation after
it; ``new_obs_valid`` is False if that is not known. A file has whole episodes. A row of several values
is a list of fixed size; columns of dicts are structs.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.arrays import Column, to_numpy
from rlio.batch.episode import Episode
from rlio.batch.frames import in_c_order
from rlio.errors import SchemaError
from rlio.formats.episode_files import EpisodeFilesSink, rows_of
from rlio.formats.format import Format, Marks
from rlio.formats.sink import Origin
from rlio.schemas.arrow_tables import nested_lists
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
    loses=frozenset(("infos",)),
    advice="read it with rlio.ForeignParquetReader",
    about="Columns as rlio has them, with new_obs in full, for DuckDB, Polars, pandas and Hugging Face.",
)


class ParquetRowsSink(EpisodeFilesSink[SampleBatch]):
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

    def check(self, episode: Episode) -> SampleBatch:
        """See `EpisodeFilesSink`."""
        rows = rows_of(episode)
        _table(rows)
        return rows

    def _encoded(self, episodes: list[SampleBatch]) -> bytes:
        found = BytesIO()
        pq.write_table(_table(concat_samples(episodes)), found, compression=self._compression)
        return found.getvalue()


def _table(rows: SampleBatch) -> Any:
    return pa.table({name: _to_arrow(name, column) for name, column in rows.items()})


def _to_arrow(name: str, column: Column) -> Any:
    if isinstance(column, dict):
        parts = [_to_arrow(f"{name}/{key}", part) for key, part in column.items()]
        return pa.StructArray.from_arrays(parts, names=list(column))
    if isinstance(column, tuple):
        raise SchemaError("Parquet has no tuples, found one", column=name)
    array = in_c_order(to_numpy(column))
    if array.dtype.kind in "OU" and all(isinstance(value, str) for value in array):
        return pa.array(array.tolist(), pa.string())
    if array.dtype.kind not in "biuf":
        raise SchemaError(f"the format holds numbers and text, found {array.dtype}", column=name)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return pa.array(array) if array.ndim == 1 else nested_lists(array)
