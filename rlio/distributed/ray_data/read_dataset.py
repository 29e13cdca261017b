"""`read_dataset`: a data set as a Ray Data dataset.

Example:
    >>> ds = rlio.distributed.read_dataset("s3://bucket/cartpole", filter="rewards > 0")   # doctest: +SKIP
    >>> for batch in ds.iter_batches(batch_size=256, batch_format="numpy"):                # doctest: +SKIP
    ...     learner.update(batch["obs"], batch["actions"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from rlio.dataset.file_dataset import FileDataset
from rlio.dataset.opening import open_dataset
from rlio.dataset.part_reader import PartReader, Plan, plan_of, split
from rlio.distributed.ray_data.blocks import ray_tensors
from rlio.distributed.ray_data.file_parts import FilePart, cut_files
from rlio.distributed.ray_import import require_ray
from rlio.errors import OptionError
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.opening import opened, refuse_open_options, refuse_snapshot
from rlio.query.filters import RowFilter, RowFunction
from rlio.read_options import ReadOptions
from rlio.source.snapshot import DatasetSnapshot, Snapshot

if TYPE_CHECKING:
    import ray.data

__all__ = ["part_readers", "read_dataset"]


def read_dataset(
    root: Any,
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
    """Read a data set with Ray Data: typed rows in the order of the data set, one row a step.

    The rows are those of `rlio.DatasetReader`, column by column: observations are reconstructed (``new_obs``
    in full, frame stacks), damage is found before a byte is decoded, and nothing in the files is run. The
    call lists the data set once; later writes, compaction and collection change nothing. A task reads a group
    of shards, one row group at a time; which shards depends on the data alone.

    ``iter_batches(batch_format="numpy")`` returns arrays of shape (rows, *shape) and of the columns' own
    dtypes, with three exceptions: texts are object arrays of str, objects (``infos``) are their JSON text,
    and other byte orders become this machine's. Each leaf of a nested column is a column: ``obs/position``.
    In data recorded in sequences, ``seq_lens`` and ``state_in_k`` are on the first row of each sequence, and
    zeros on the others.

    Args:
        root: Folder of the data set: a path or any fsspec URL; or what else `rlio.open_dataset` takes, of
            which each task opens the files again; or an open `rlio.Dataset`, as for files that need
            ``mapping=``.
        columns: Logical columns to read (``obs`` for all of its leaves, ``obs/position`` for one); None: all.
            ``new_obs`` brings ``new_obs_valid``, if some final observation may be missing.
            ``select_columns`` of the result is pushed down too, and reads exactly what it names.
        filter: Selects rows: a text such as ``"rewards > 0 and not terminateds"``, or a function of a batch
            (which Ray pickles). Row groups that the bounds in the footers exclude are not read; of the
            others, the filter's columns are read first.
        policy: The policy whose rows to read. None: the rows of all policies, with the column ``policy_id``
            and the rows of a joint step one after the other. The policies must share the requested columns
            and their types.
        at: A snapshot from `rlio.Dataset.snapshot`.
        writers: Whether to add the column ``_writer``, the writer of each row. `write_dataset` stores it:
            needed if the writers' ``eps_id`` are not unique. Other libraries' files have no writers.
        missing: What to do with columns that only some writers have: "error", "drop", or "fill" with zeros.
        on_error: What to do with damaged rows: "raise", or "skip": count and log them in the task.
        tasks: Number of tasks, at most one a shard, or one a group of rows of other files. None: one for each
            64 MiB of files, or up to 32 of 1 MiB.
        storage_options: For fsspec.
        limits: Bounds on the data.
        ray_options: For `ray.data.read_datasource`: ``concurrency``, ``num_cpus``, ``memory`` and so on.

    Raises:
        MissingExtra: Ray is not installed.
        DataNotFound: The data set does not exist.
        HoleError: Rows are missing. Tasks raise CorruptData if rows are damaged.
        OptionError: Options do not fit each other or the data.
        SchemaError: Policies do not share their columns, or Arrow has no type for a column (complex numbers).
    """
    require_ray()
    import ray.data

    from rlio.distributed.ray_data.ray_source import DatasetSource

    dataset = _opened(root, at=at, on_error=on_error, storage_options=storage_options, limits=limits)
    options = ReadOptions(columns=columns, on_error=on_error)
    chosen: dict[str, Any] = {"filter": filter, "policy": policy, "writers": writers, "missing": missing}
    parts: Sequence[PartReader] | Sequence[FilePart] = (
        _file_parts(dataset, options, tasks, **chosen)
        if isinstance(dataset, FileDataset)
        else part_readers(dataset, options, tasks=tasks, **chosen)
    )
    # Matches the number of parts, because Ray would cut their blocks to get more.
    made: ray.data.Dataset = ray.data.read_datasource(
        DatasetSource(parts), override_num_blocks=len(parts), **ray_options
    )
    return made


def part_readers(
    dataset: DatasetSnapshot,
    options: ReadOptions,
    *,
    filter: str | RowFunction | RowFilter | None = None,
    policy: str | None = None,
    writers: bool = False,
    missing: Literal["error", "drop", "fill"] = "error",
    tasks: int | None = None,
) -> list[PartReader]:
    """What the tasks of `read_dataset` read, in order: at least one part. Arguments and errors are its."""
    plan = plan_of(dataset, options, missing=missing, policy=policy, filter=filter, writers=writers)
    plan = _in_ray(plan)
    # A data set without rows is one part without rows, which still has columns.
    return [PartReader(dataset.storage, plan, rows) for rows in split(dataset, tasks=tasks) or [[]]]


def _file_parts(
    dataset: FileDataset, options: ReadOptions, tasks: int | None, *, writers: bool, **chosen: Any
) -> list[FilePart]:
    """`part_readers` of other libraries' files."""
    if writers:
        raise OptionError("writers=True: these files have no writers; leave it out", uri=dataset.uri)
    plan = _in_ray(plan_of(dataset, options, writers=False, **chosen))
    files, parts = cut_files(dataset, tasks=tasks)
    return [FilePart(files, plan, part) for part in parts]


def _in_ray(plan: Plan) -> Plan:
    """The plan with columns of Ray's types. Raises here instead of in tasks if Arrow lacks a type."""
    plan = replace(plan, layout=replace(plan.layout, tensors=ray_tensors))
    plan.layout.empty()
    return plan


def _opened(
    root: Any,
    *,
    at: Snapshot | None,
    on_error: Literal["raise", "skip"],
    storage_options: Mapping[str, Any] | None,
    limits: Limits,
) -> DatasetSnapshot | FileDataset:
    """The data set, opened unless it is; see `rlio.open_dataset`."""
    if isinstance(root, FileDataset):
        refuse_open_options(storage_options, limits)
        refuse_snapshot(at, root.uri)
        return root
    if not isinstance(root, DatasetSnapshot):
        root = open_dataset(root, at=at, on_error=on_error, storage_options=storage_options, limits=limits)
        if isinstance(root, FileDataset):
            return root
        at, storage_options, limits = None, None, DEFAULT_LIMITS
    return opened(root, at=at, on_error=on_error, storage_options=storage_options, limits=limits)
