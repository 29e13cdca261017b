"""`ForeignParquetReader`: Parquet files from other programs, with one row a step or one row a batch.

Not here: the layout of the rows (`rlio.formats.tables.parquet_source`), and rlio's own data sets
(`rlio.readers.dataset_reader`).

Example:
    >>> import io
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> from rlio.storage import Storage
    >>> stream = io.BytesIO()
    >>> pq.write_table(pa.table({"obs": [[0.5, 1.0], [1.5, 2.0]], "dones": [False, True]}), stream)
    >>> Storage.open("memory://foreign-example").put("a.parquet", stream.getvalue())
    >>> with ForeignParquetReader("memory://foreign-example", epochs=1) as reader:
    ...     reader.sample()
    SampleBatch(2 steps: obs float64 (2, 2), terminateds bool (2,))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from rlio.formats.files.inputs import FileOptions
from rlio.formats.tables.parquet_source import BatchRows, StepRows, open_row_groups
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.record_reader import RecordReader
from rlio.readers.source_reader import Asked, SourceKeywords
from rlio.storage.filesystem import StrPath
from rlio.support.calls import closing_on_error
from rlio.support.options import check_choice, checked_keywords
from rlio.support.spaces import Spaces

__all__ = ["ForeignParquetReader"]


class ForeignParquetReader(RecordReader):
    """Reads Parquet files that rlio did not write.

    Lists of one length become arrays, and structs nested columns. RLlib's packed text becomes the arrays in
    it; other text and ``infos`` become object arrays. Columns of Arrow's type null are left out. Nulls among
    floats become NaN, as pandas writes them. Legacy ``dones`` become ``terminateds``.

    Rows are read as `rlio.DatasetReader` reads its own, with all its options except ``at``; a row group is
    damaged as a whole, or by 64 MB of it. Rows that are batches are records, read as by `rlio.JsonReader`:
    without ``batch_size`` they are served as they were written.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        inputs: A file, folder, glob or URI, or a list of those. In folders, every ``*.parquet`` is read.
        spaces: (observation space, action space), or policy id -> such a pair: gives obs, new_obs, actions
            and prev_actions their structure and dtypes.
        unnormalise_actions: As for `rlio.JsonReader`.
        format_options: As for `rlio.JsonReader`. ``{"infos": "obs"}`` needs rows that are batches.
        extension_types: What to do with columns of an Arrow extension type that a library (Ray, for example)
            has registered in this process. ``"refuse"`` them, because that library may read more out of them
            than is stored; or read their ``"storage"``, as for types that are not registered. The library's
            code never runs.
        limits: Limits on the files' demands.
        storage_options: Keywords of the fsspec filesystem.
        keywords: What is read, in which order, what a unit is, and where rows are kept: see
            `rlio.DatasetReader`. A text as
            ``columns`` (``"intersect"``, ``"fill"``) is for files with different columns.

    Raises:
        DataNotFound: ``inputs`` name no file, or the files hold no row.
        OptionError: An option is illegal, or a file is a shard of one of rlio's own data sets.
        CorruptData: A file is not a Parquet file. (UnsafeData: it asks for more than data may.)
        SchemaError: A column cannot become a batch column, or differs from that of the first file.
    """

    @checked_keywords
    def __init__(
        self,
        inputs: StrPath | Sequence[StrPath],
        *,
        spaces: Spaces | None = None,
        unnormalise_actions: bool | None = None,
        format_options: Mapping[str, Any] | None = None,
        extension_types: Literal["refuse", "storage"] = "refuse",
        limits: Limits = DEFAULT_LIMITS,
        storage_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[SourceKeywords],
    ) -> None:
        asked = Asked.of(keywords)  # Raises before anything is opened.
        check_choice("extension_types", extension_types, ("refuse", "storage"))
        how = FileOptions(
            spaces=spaces, format_options=format_options, storage_options=storage_options, limits=limits
        )
        refuse = extension_types == "refuse"
        groups, decoder_of = open_row_groups(
            inputs, asked.options, how, refuse=refuse, unnormalise_actions=unnormalise_actions
        )
        about = {"extension_types": extension_types, "max_group_bytes": limits.group_bytes}
        with closing_on_error(groups):
            if groups.rows_are_batches:
                self._serve(BatchRows(groups), groups.files, decoder_of, asked, details=about)
                return
            decoder = decoder_of(None)
            steps = StepRows(groups, asked.options, spaces, decoder, about, columns=asked.columns)
            self._open_files(steps, asked)
