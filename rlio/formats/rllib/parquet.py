"""Parquet files with one step or one batch a row, as RLlib writes them. `ForeignParquetReader` reads them."""

from rlio.formats.format import Format, Marks

# Columns of a shard of rlio, which is no data set by itself.
_OURS = frozenset(("_next", "_stream", "_batch"))
_STEPS = frozenset(("obs", "actions", "rewards"))
_BATCHES = frozenset(("type", "policy_batches"))

FORMAT = Format(
    name="rllib-parquet",
    title="RLlib's Parquet",
    marks=Marks(
        endings=(".parquet",),
        columns=lambda names: not names & _OURS and (names >= _STEPS or names >= _BATCHES),
    ),
    reader="rlio.readers.foreign_parquet:ForeignParquetReader",
    rows="rlio.formats.tables.parquet_source:open_rows",
    advice="read it with rlio.ForeignParquetReader",
    about="One row a step, as RLlib's new recordings and any data frame with these columns have it.",
)
