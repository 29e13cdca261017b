"""`ParquetWriter`: compressed, columnar, self-certifying shards.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://parquet-writer-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((3, 4), np.float32), rewards=np.ones(3, np.float32)))
    >>> len(rlio.open_dataset("memory://parquet-writer-example"))
    3
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from rlio.log.spool import SpoolLike
from rlio.log.wal import Sync
from rlio.schemas.parquet import Compression
from rlio.schemas.provenance import Provenance
from rlio.support.options import checked_keywords, expected
from rlio.writers.dataset_writer import DatasetWriter
from rlio.writers.parquet_encoder import ParquetEncoder
from rlio.writers.roll import Roll
from rlio.writers.shard_maker import check_memory

__all__ = ["ParquetWriter"]


class ParquetWriter(DatasetWriter):
    """Writes batches into a data set of Parquet shards, on any filesystem.

    Any number of writers share a root without coordination. `write` logs and collects rows. A background
    thread encodes them a row group at a time, and stores a whole shard when `roll` says so, at `flush` and at
    `close`. If a writer on this machine died, the next writer that opens the root publishes the rows in its
    log; `rlio recover` does so too.

    Several threads may call it: see `rlio.OutputWriter`.

    Args:
        root: Folder of the data set: a path or any fsspec URL.
        roll: When to store a shard.
        compression: ``"codec:level"`` (zstd, lz4, snappy, gzip, brotli, none), or a `Compression`. Without a
            level, zstd takes 1, and 5 for frames of stacks that share most of their bytes.
        spool: The write-ahead log: "auto", a folder, a `Spool`, or None: rows are safe once published.
        sync: When logged rows become safe against power failure: "interval", "always" or "never"; see
            `Spool`. None: the `Spool` decides.
        writer_id: A fixed id, for jobs and tests; it must have no rows yet. None draws one.
        worker_index: Part of a drawn id.
        spaces: Policy id -> (observation space, action space), stored with the schema.
        pictures: Name of a column (``"obs/camera"``) -> ``"png"``: its frames, uint8 of shape (height, width)
            or (height, width, 1, 3 or 4), are stored as PNG, without loss, and decoded when they are read;
            ``new_obs`` is stored as ``obs``. Needs Pillow (extra ``images``). docs/design/pictures.md has the
            cost.
        provenance: The origin of the data, stored in every shard.
        storage_options: For fsspec.

    A writer opens although the store is down or hangs if rows can wait: in a log that is not on the root's
    own disk, under a drawn id. Opening then takes up to about a minute.

    Raises:
        OptionError: An option is illegal, or ``writer_id`` has rows already.
        MissingExtra: ``pictures`` needs Pillow, which is not installed.
        UnknownName: No filesystem has the URL's scheme.
        PublishError: Rows cannot be stored, or logged, there.
    """

    @checked_keywords
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        roll: Roll | None = None,
        compression: str | Compression = "zstd",
        spool: SpoolLike = "auto",
        sync: Sync | None = None,
        writer_id: str | None = None,
        worker_index: int = 0,
        spaces: Mapping[str, tuple[Any, Any]] | None = None,
        pictures: Mapping[str, Literal["png"]] | None = None,
        provenance: Provenance | None = None,
        storage_options: dict[str, object] | None = None,
    ) -> None:
        roll, codec = expected(roll, Roll, "roll"), Compression.parse(compression)
        check_memory(roll)
        about = expected(provenance, Provenance, "provenance")
        super().__init__(
            root,
            partial(ParquetEncoder, roll=roll, compression=codec, provenance=about.text),
            spool=spool,
            sync=sync,
            writer_id=writer_id,
            worker_index=worker_index,
            spaces=spaces,
            pictures=pictures,
            provenance=about,
            storage_options=storage_options,
        )
