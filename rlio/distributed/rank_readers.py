"""`reader_shards`: one `DatasetReader` a rank, for the processes of a distributed training.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://reader-shards-example") as writer:
    ...     writer.write(rlio.SampleBatch(t=np.arange(6)))
    >>> shards = reader_shards("memory://reader-shards-example", 2, batch_size=2, epochs=1)
    >>> [[batch["t"].tolist() for batch in shard.open()] for shard in shards]
    [[[0, 1], [4]], [[2, 3], [5]]]
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlio.dataset import Dataset, Snapshot, open_dataset
from rlio.errors import OptionError, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.dataset_reader import DatasetReader

__all__ = ["ReaderShard", "reader_shards"]

logger = logging.getLogger("rlio")


@dataclass(frozen=True)
class ReaderShard:
    """One rank's part of a data set. It travels to other processes by pickle, and is opened there.

    Attributes:
        rank: Whose part, from 0.
        world: Of how many.
        dataset: The snapshot that all ranks read.
        options: Of `rlio.DatasetReader`.
    """

    rank: int
    world: int
    dataset: Dataset
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, **options: Any) -> DatasetReader:
        """The rank's reader.

        Args:
            options: In place of those that were given for all ranks, such as ``prefetch``. Those that decide
                on the order of rows must be the same on all ranks.
        """
        return DatasetReader(self.dataset, shard=(self.rank, self.world), **{**self.options, **options})


def reader_shards(
    root: str | os.PathLike[str] | Dataset,
    world: int,
    *,
    at: Snapshot | None = None,
    storage_options: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **options: Any,
) -> list[ReaderShard]:
    """The parts of a data set for ``world`` ranks, who need not know of each other.

    The data set is listed once, and every rank reads that snapshot, with one seed. Together the ranks read
    each row once an epoch, in an order that does not depend on ``world``; the state of one is that of all,
    and any number of ranks can load it. Nothing here needs Ray: give part r to the actor, or to the worker
    of Ray Train, whose rank is r.

    Args:
        root: Folder of the data set: a path or any fsspec URL; or an open `rlio.Dataset`.
        world: How many ranks.
        at: A snapshot, as `rlio.Dataset.snapshot` gave it; None: what is there now.
        storage_options: For fsspec.
        limits: What the data may ask for.
        options: Of `rlio.DatasetReader`: ``batch_size`` (of each rank), ``epochs``, ``shuffle``, ``columns``
            and so on.

    Raises:
        DataNotFound: There is no data set.
        OptionError: ``world`` is no number of ranks, or an option is not for ranks.
    """
    if type(world) is not int or world < 1:
        raise OptionError(f"world={excerpt(world)}: a number of ranks, at least 1")
    for name in ("shard", "grow", "follow"):
        if name in options:
            raise OptionError(
                f"{name}= is not for reader_shards(): all ranks read one snapshot, each its part"
            )
    if isinstance(root, Dataset):
        dataset = root if at is None else root.refresh(at=at)
    else:
        dataset = open_dataset(root, storage_options=storage_options, limits=limits, at=at)
    if options.get("shuffle") and options.get("seed") is None:
        options["seed"] = secrets.randbits(63)
        logger.info("reader_shards: drew seed %d", options["seed"])
    return [ReaderShard(rank, world, dataset, options) for rank in range(world)]
