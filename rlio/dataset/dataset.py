"""`Dataset`: what is stored under one root. It opens, lists and describes; `DatasetReader` replays.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://dataset-example", writer_id="w00000-00000000") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((3, 4)), rewards=np.ones(3)))
    >>> data = rlio.open_dataset("memory://dataset-example")
    >>> len(data), data.snapshot()
    (3, {'w00000-00000000': 3})
    >>> with rlio.ParquetWriter("memory://dataset-example", writer_id="w00001-00000000") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((2, 4)), rewards=np.ones(2)))
    >>> len(rlio.open_dataset("memory://dataset-example", at=data.snapshot())), len(data.refresh())
    (3, 5)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rlio.dataset.commit import read_header
from rlio.dataset.foreign_layouts import recognise
from rlio.dataset.names import HEADER
from rlio.dataset.snapshot import DatasetSnapshot, EpisodeInfo, Snapshot, rows_waiting
from rlio.errors import (
    DataNotFound,
    OptionError,
    excerpt,
)
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.read_options import ReadOptions
from rlio.storage.filesystem import Storage

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa

    from rlio.replay.filters import RowFilter, RowFunction

__all__ = [
    "Dataset",
    "EpisodeInfo",
    "Snapshot",
    "dataset_on",
    "open_dataset",
    "opened",
    "refuse_open_options",
    "require_header",
]

logger = logging.getLogger("rlio")


class Dataset(DatasetSnapshot):
    """The shards under one root, as listed when it was opened. Use `open_dataset`.

    The order of the rows is: writers by id, rows ascending within each.

    Args:
        storage: The root.
        listing: What is there.
        at: The snapshot to show; None: everything that was listed.
    """

    def to_arrow_batches(
        self,
        *,
        columns: list[str] | None = None,
        filter: str | RowFunction | RowFilter | None = None,
        policy: str | None = None,
        writers: bool = False,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> pa.RecordBatchReader:
        """`to_arrow` as a stream of record batches of at most 32 MiB each, if a row has not more.

        A row group is read when its rows are asked for: memory stays bounded. Iterate over it, or give it to
        DuckDB, Polars or ``pyarrow.dataset.write_dataset``. The arguments are those of `to_arrow`; errors of
        the rows are raised while it is read.
        """
        from rlio.dataset.arrow_export import record_batches

        options = ReadOptions(columns=columns, on_error=on_error)
        return record_batches(self, options, filter=filter, policy=policy, writers=writers, missing=missing)

    def to_arrow(
        self,
        *,
        columns: list[str] | None = None,
        filter: str | RowFunction | RowFilter | None = None,
        policy: str | None = None,
        writers: bool = False,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> pa.Table:
        """The live rows as one Arrow table in memory, one row a step, in the order of the data set.

        The values are those that `rlio.DatasetReader` serves: ``new_obs`` in full, frame stacks in full, and
        where a final observation is missing, zeros and False in ``new_obs_valid``. The rows are those that
        were listed when the data set was opened, whatever is written, compacted or collected meanwhile.

        Rows of several values are lists of fixed size (``fixed_size_list<float>[17]``), nested where they
        have several axes. Objects (``infos``) are their JSON text. Nested columns come leaf by leaf
        (``obs/position``). Of data recorded in sequences, ``seq_lens`` and ``state_in_k`` stand on the first
        row of each sequence, and zeros on the others.

        Args:
            columns: Logical columns to read (``obs`` for all of its leaves); None: all.
            filter: Which rows, as for `rlio.DatasetReader`: a text such as ``"rewards > 0"``, or a function
                of a batch. What the bounds in the footers rule out is not read.
            policy: Of several policies, the one whose rows are read. None: the rows of all, with the column
                ``policy_id``, the rows of a joint step one after the other; the policies must then share
                the columns that are read, with their types.
            writers: Whether the column ``_writer`` says whose each row is: needed where the ``eps_id`` of
                several writers are not unique.
            missing: What to do with columns that only some writers have: "error", "drop", or "fill" with
                zeros.
            on_error: What to do with damaged or missing rows: "raise", or "skip": log how many, and go on.

        Raises:
            MissingColumn: There is no such column.
            OptionError: Options do not fit each other or the data.
            SchemaError: Policies do not share their columns, or Arrow has no such type (complex numbers).
            CorruptData: Rows are damaged. (HoleError: they are missing.)
        """
        return self.to_arrow_batches(
            columns=columns,
            filter=filter,
            policy=policy,
            writers=writers,
            missing=missing,
            on_error=on_error,
        ).read_all()

    def to_pandas(
        self,
        *,
        columns: list[str] | None = None,
        filter: str | RowFunction | RowFilter | None = None,
        policy: str | None = None,
        writers: bool = False,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> pandas.DataFrame:
        """`to_arrow` as a pandas data frame. ``numpy.stack(frame["obs"])`` is one array of all observations.

        Rows of several values are NumPy arrays of their shape: read-only views of the table.

        Raises:
            MissingExtra: pandas is not installed.
        """
        from rlio.dataset.arrow_export import pandas_frame

        return pandas_frame(
            self.to_arrow(
                columns=columns,
                filter=filter,
                policy=policy,
                writers=writers,
                missing=missing,
                on_error=on_error,
            )
        )

    def to_polars(
        self,
        *,
        columns: list[str] | None = None,
        filter: str | RowFunction | RowFilter | None = None,
        policy: str | None = None,
        writers: bool = False,
        missing: Literal["error", "drop", "fill"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> polars.DataFrame:
        """`to_arrow` as a Polars data frame; rows of several values are of its type ``Array``.

        Raises:
            MissingExtra: Polars is not installed.
        """
        from rlio.dataset.arrow_export import polars_frame

        return polars_frame(
            self.to_arrow(
                columns=columns,
                filter=filter,
                policy=policy,
                writers=writers,
                missing=missing,
                on_error=on_error,
            )
        )


def open_dataset(
    uri: str | os.PathLike[str],
    *,
    at: Snapshot | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    storage_options: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Dataset:
    """Open the data set under ``uri``: one listing and the header; no shard is read.

    Args:
        uri: A path or any fsspec URL.
        at: A snapshot, as `Dataset.snapshot` gave it: exactly its rows are shown, whatever was appended or
            compacted since. None: all that is there.
        on_error: What to do where rows of the snapshot are not there: ``"raise"``, or ``"skip"`` them; then
            `Dataset.lost_rows` counts them.
        storage_options: For fsspec, and ``rlio_timeout`` and ``rlio_retries``.
        limits: What the data may ask for: memory, names, depth.

    A data set without rows is no error; that rows of it wait in logs of this machine is logged.

    Raises:
        DataNotFound: There is no data set.
        HoleError: Rows of the snapshot are not there, or were trimmed since it was taken.
        OptionError: It is in another format version, or ``at`` is no snapshot.
    """
    if on_error not in ("raise", "skip"):
        raise OptionError(f"on_error={excerpt(on_error)}: 'raise' or 'skip'")
    dataset = dataset_on(Storage.open(uri, storage_options=storage_options, limits=limits), at=at)
    if at is not None and on_error == "raise":
        dataset.check_complete()
    return dataset


def dataset_on(storage: Storage, *, at: Snapshot | None = None) -> Dataset:
    """`open_dataset` for a root that is open already; what is missing is counted."""
    require_header(storage)
    found = Dataset.listed(storage, at=at)
    if at is None and not len(found) and (waiting := rows_waiting(storage)):
        logger.warning("%s has no rows%s", storage.uri, waiting)
    return found


def require_header(storage: Storage) -> None:
    """Raise unless ``storage`` is the root of a data set.

    Raises:
        DataNotFound: It is none. The message says what is there: rows in logs, the layout of another library,
            a file, or the names of some files.
        OptionError: It is one of a format version that this library does not read.
        CorruptData: Its header is damaged.
    """
    try:
        read_header(storage)
    except DataNotFound as error:
        # Its writer may have died before the store could be reached.
        if waiting := rows_waiting(storage):
            raise DataNotFound(f"no data set yet: {HEADER} is not there{waiting}", uri=storage.uri) from error
        if layout := recognise(storage):
            raise DataNotFound(
                f"no data set of rlio: {HEADER} is not there; found {layout.name}'s layout: {layout.advice}",
                uri=storage.uri,
            ) from error
        raise


def opened(
    root: str | os.PathLike[str] | Dataset,
    *,
    at: Snapshot | None,
    on_error: Literal["raise", "skip"],
    storage_options: Mapping[str, Any] | None,
    limits: Limits,
) -> Dataset:
    """`open_dataset`, or the data set that is open already.

    Raises:
        OptionError: As `open_dataset`; or options are given that an open data set has already.
        DataNotFound: There is no data set.
        HoleError: Rows are missing.
    """
    if isinstance(root, Dataset):
        refuse_open_options(storage_options, limits)
        dataset = root if at is None else root.refresh(at=at)
    else:
        dataset = open_dataset(root, at=at, on_error=on_error, storage_options=storage_options, limits=limits)
    if on_error == "raise":
        dataset.check_complete()
    return dataset


def refuse_open_options(storage_options: Mapping[str, Any] | None, limits: Limits) -> None:
    """Refuse options that a data set was opened with already.

    Raises:
        OptionError: One is given.
    """
    for name, given in (
        ("storage_options", storage_options is not None),
        ("limits", limits != DEFAULT_LIMITS),
    ):
        if given:
            raise OptionError(f"{name}= and an open Dataset, which has its own: give it to open_dataset()")
