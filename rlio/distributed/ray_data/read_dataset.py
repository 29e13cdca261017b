"""`read_dataset`: a data set as a dataset of Ray Data.

Example:
    >>> ds = rlio.distributed.read_dataset("s3://bucket/cartpole", filter="rewards > 0")   # doctest: +SKIP
    >>> for batch in ds.iter_batches(batch_size=256, batch_format="numpy"):                # doctest: +SKIP
    ...     learner.update(batch["obs"], batch["actions"])
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from rlio.dataset.dataset import Dataset, Snapshot, opened
from rlio.dataset.part_reader import plan_of, split
from rlio.distributed.ray_data.blocks import ray_tensors
from rlio.distributed.ray_import import require_ray
from rlio.errors import OptionError, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.read_options import ReadOptions
from rlio.replay.filters import RowFilter, RowFunction

if TYPE_CHECKING:
    import ray.data

__all__ = ["read_dataset"]


def read_dataset(
    root: str | os.PathLike[str] | Dataset,
    *,
    columns: list[str] | None = None,
    filter: str | RowFunction | RowFilter | None = None,
    policy: str | None = None,
    at: Snapshot | None = None,
    writers: bool = False,
    missing: Literal["error", "drop", "fill"] = "error",
    on_error: Literal["raise", "skip"] = "raise",
    tasks: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **ray_options: Any,
) -> ray.data.Dataset:
    """Read a data set with Ray Data: its rows, typed, in the order of the data set, one row a step.

    The rows are those of `rlio.DatasetReader`, column by column: observations are rebuilt (``new_obs`` in
    full, frame stacks), damage is found before a byte is decoded, and nothing in the files is run. What is
    listed now is read, whatever is written, compacted or collected meanwhile. A task reads a group of
    shards, a row group at a time; which shards depends on the data alone.

    ``iter_batches(batch_format="numpy")`` gives arrays of shape (rows, *shape) and of the columns' own
    dtypes, but for three kinds: texts are object arrays of str, objects (``infos``) are their JSON text, and
    what has another byte order comes in this machine's. Nested columns come leaf by leaf: ``obs/position``.
    Of data recorded in sequences, ``seq_lens`` and ``state_in_k`` stand on the first row of each sequence,
    and zeros on the others.

    Args:
        root: Folder of the data set: a path or any fsspec URL; or an open `rlio.Dataset`.
        columns: Logical columns to read (``obs`` for all of its leaves); None: all.
            ``select_columns`` of the result is pushed down too.
        filter: Which rows: a text such as ``"rewards > 0 and not terminateds"``, or a function of a batch
            (which Ray pickles). What the bounds in the footers rule out is not read; of the other row groups,
            the filter's columns are read first.
        policy: Of several policies, the one whose rows are read. None: the rows of all, with the column
            ``policy_id``, the rows of a joint step one after the other; they must share the columns that are
            read, with their types.
        at: A snapshot, as `rlio.Dataset.snapshot` gave it.
        writers: Whether the column ``_writer`` says whose each row is. `write_dataset` stores it: needed
            where the writers' ``eps_id`` are not unique.
        missing: What to do with columns that only some writers have: "error", "drop", or "fill" with zeros.
        on_error: What to do with damaged rows: "raise", or "skip": count and log them, in the task.
        tasks: How many tasks, at most one a shard. None: 64 MiB of shards each, and up to 32 of 1 MiB.
        storage_options: For fsspec.
        limits: What the data may ask for.
        ray_options: For `ray.data.read_datasource`: ``concurrency``, ``num_cpus``, ``memory`` and so on.

    Raises:
        MissingExtra: Ray is not installed.
        DataNotFound: There is no data set.
        HoleError: Rows are missing; in tasks, CorruptData where they are damaged.
        OptionError: Options do not fit each other or the data.
        SchemaError: Policies do not share their columns, or Arrow has no such type (complex numbers).
    """
    require_ray()
    import ray.data

    from rlio.distributed.ray_data.ray_source import DatasetSource

    if tasks is not None and not (type(tasks) is int and tasks >= 1):
        raise OptionError(f"tasks={excerpt(tasks)}: a number of tasks, at least 1, or None")
    options = ReadOptions(columns=columns, on_error=on_error)
    dataset = opened(root, at=at, on_error=on_error, storage_options=storage_options, limits=limits)
    plan = plan_of(dataset, options, missing=missing, policy=policy, filter=filter, writers=writers)
    plan = replace(plan, layout=replace(plan.layout, tensors=ray_tensors))
    plan.layout.empty()  # Raises here, and not in tasks, where Arrow has no such type.
    # A data set without rows is a part without rows: it has columns all the same.
    parts = split(dataset, tasks=tasks) or [[]]
    source = DatasetSource(dataset.storage, plan, parts)
    # As many as there are: Ray would cut the blocks of fewer into more.
    made: ray.data.Dataset = ray.data.read_datasource(source, override_num_blocks=len(parts), **ray_options)
    return made
