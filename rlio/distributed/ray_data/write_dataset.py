"""`write_dataset`: writes the rows of a Ray Data dataset, each once, even if tasks are killed.

Example:
    >>> ds = rlio.distributed.read_dataset("runs/cartpole")                          # doctest: +SKIP
    >>> rlio.distributed.write_dataset(ds.filter(expr="rewards > 0"), "runs/good")   # doctest: +SKIP
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rlio.catalog.commit import put_header
from rlio.catalog.listing import list_shards
from rlio.catalog.names import part_id, part_of
from rlio.dataset.dataset import Dataset
from rlio.dataset.opening import open_dataset
from rlio.distributed.ray_data.part_writer import PartOptions
from rlio.distributed.ray_import import require_ray
from rlio.errors import OptionError, RlioError
from rlio.schemas.arrow_tables import Layout
from rlio.schemas.parquet import Compression
from rlio.schemas.provenance import Provenance
from rlio.storage.clients import protocols_of
from rlio.storage.filesystem import Storage
from rlio.writers.roll import Roll

if TYPE_CHECKING:
    import ray.data

__all__ = ["WriteReport", "WrittenPart", "write_dataset"]

_PART_DIGITS: Final = len("-000000")


@dataclass(frozen=True)
class WrittenPart:
    """One part of a job: the rows of one task.

    Attributes:
        writer: Id of the attempt that readers take; None if the part has no rows.
        rows: Number of its rows.
        written: Whether this run reported writing it. False: an earlier run did, or a task that was killed
            before it could report.
    """

    writer: str | None
    rows: int
    written: bool


@dataclass(frozen=True)
class WriteReport:
    """Result of `write_dataset`.

    Attributes:
        uri: The root.
        job: Name of the job: given, or generated.
        parts: The parts, in order.
        left_out: Columns of the dataset without a value in any row: they are not written.
    """

    uri: str
    job: str
    parts: tuple[WrittenPart, ...]
    left_out: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows of all parts."""
        return sum(part.rows for part in self.parts)


def write_dataset(
    ds: ray.data.Dataset,
    root: str | os.PathLike[str],
    *,
    job: str | None = None,
    like: str | os.PathLike[str] | Dataset | None = None,
    spaces: Mapping[str, tuple[Any, Any]] | None = None,
    roll: Roll | None = None,
    compression: str | Compression = "zstd",
    provenance: Provenance | None = None,
    storage_options: Mapping[str, Any] | None = None,
    concurrency: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
) -> WriteReport:
    """Write the rows of a Ray dataset into a data set; existing rows stay.

    Each task writes its rows as one part of the job, which readers see once it is sealed. If a task is rerun
    (its process was killed, its output lost) and its part is already sealed, it writes nothing; otherwise it
    writes all rows under a new id. No row is lost or duplicated. Tasks need no log, because they can be
    rerun. `rlio gc` removes abandoned attempts.

    Columns are those that `read_dataset` returns, or any with one value, text or array of one shape a row:
    ``obs/position`` becomes a leaf of a nested ``obs``, the texts of ``infos`` become objects, the column
    ``policy_id`` means several agents. If rows of an episode are consecutive, ``new_obs`` that equals the
    next row's ``obs``, and repeated frames, are stored once. A column without a value in any row (RLlib's
    ``agent_id`` with one agent) is left out, with one warning.

    Args:
        ds: The rows. If tasks may be rerun, they must not depend on time or chance.
        root: Folder of the data set, which every task can reach: a path or any fsspec URL.
        job: Permanent name of the job. A rerun with the same name and the same rows in the same order
            compares sealed parts, and does not write them again. None generates a name.
        like: A data set with the intended columns. It supplies what blocks lack after functions of NumPy
            batches (objects other than ``infos``, dicts with numbers for keys, widths of texts, byte order),
            and spaces.
        spaces: Policy id -> (observation space, action space), stored with the schema.
        roll: When to begin a new shard within a part; ``max_seconds`` is ignored.
        compression: As for `rlio.ParquetWriter`.
        provenance: Origin of the data, stored in every shard.
        storage_options: For fsspec.
        concurrency: Most tasks at a time; None: Ray decides.
        ray_remote_args: Options of the tasks; ``max_retries`` limits how often Ray reruns one.

    Raises:
        MissingExtra: Ray is not installed.
        OptionError: An option is illegal, or an earlier run of the job wrote other rows.
        SchemaError: Rows cannot be stored, for example if a column has values in only some rows.
            (SchemaConflict: they do not fit the existing rows.)
        PublishError: An object could not be stored.
    """
    require_ray()
    from rlio.distributed.ray_data.ray_sink import DatasetSink

    name = uuid.uuid4().hex[:12] if job is None else job
    part_id(name, 0)
    storage = _shared_storage(root, storage_options)
    known = None if like is None else like if isinstance(like, Dataset) else open_dataset(like)
    options = _part_options(roll, compression, provenance, spaces, known)
    put_header(storage)
    before = set() if job is None else _sealed_parts(storage, name)
    layout = None if known is None else _layout_of(known)
    sink = DatasetSink(storage, name, options, like=layout, before=before)
    remote_args = None if ray_remote_args is None else dict(ray_remote_args)
    with _ordered(ds, job is not None), _our_errors(job):
        ds.write_datasink(sink, ray_remote_args=remote_args, concurrency=concurrency)
    parts = tuple(WrittenPart(done.sealed.writer, done.sealed.rows, done.written) for done in sink.done)
    return WriteReport(storage.uri, name, parts, sink.left_out)


def _shared_storage(root: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> Storage:
    """Open the root, which the tasks in other processes must reach too."""
    storage = Storage.open(root, storage_options=storage_options)
    if not storage.is_local and "memory" in protocols_of(storage.fs):
        raise OptionError("each process has its own memory://: use a folder or a store", uri=storage.uri)
    return storage


def _part_options(
    roll: Roll | None,
    compression: str | Compression,
    provenance: Provenance | None,
    spaces: Mapping[str, tuple[Any, Any]] | None,
    known: Dataset | None,
) -> PartOptions:
    """How tasks write; the spaces are those that are given, else those of a known data set."""
    made_by = provenance or Provenance()
    return PartOptions(
        roll=roll or Roll(),
        compression=Compression.parse(compression),
        provenance=made_by.text,
        stored=made_by.stored,
        spaces=made_by.spaces_to_json(spaces) if known is None or spaces is not None else _spaces_of(known),
    )


def _sealed_parts(storage: Storage, job: str) -> set[str]:
    """Return the parts that an earlier run of a job sealed."""
    parts = {part_of(writer) or "" for writer in list_shards(storage).sealed}
    return {part for part in parts if part[1:-_PART_DIGITS] == job}


def _layout_of(dataset: Dataset) -> Layout:
    """Return the columns of a data set; if two policies or schemas have a column, the first one counts."""
    columns = {
        column.name: column
        for schema in reversed(list(dataset.schemas.values()))
        for pid in reversed(list(schema.policies))
        for column in Layout.of_leaves(schema.policies[pid].shown.columns).columns
    }
    return Layout(tuple(columns.values()))


def _spaces_of(dataset: Dataset) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for schema in dataset.schemas.values():
        for pid, policy in schema.policies.items():
            if policy.spaces is not None:
                found.setdefault(pid, policy.spaces)
    return found


@contextmanager
def _ordered(ds: ray.data.Dataset, wanted: bool) -> Iterator[None]:
    """Number tasks by the order of rows, not of time, because a rerun job needs the same parts."""
    options = ds.context.execution_options
    before = options.preserve_order
    options.preserve_order = wanted or before
    try:
        yield
    finally:
        options.preserve_order = before


@contextmanager
def _our_errors(job: str | None) -> Iterator[None]:
    """Raise a task's own error instead of Ray's wrapper.

    A note states what happens to the parts that other tasks have sealed.
    """
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        found: BaseException | None = error
        # Ray's error is also of the cause's class; its text is a traceback.
        while isinstance(found, RayError) or not isinstance(found, RlioError | None):
            found = getattr(found, "cause", None) or found.__cause__
        (found or error).add_note(
            "Parts that were sealed before stay in the data set: "
            + (
                "pass job= to be able to rerun a failed write without writing them twice"
                if job is None
                else f"run job={job!r} again with the same rows, and it does not write them twice"
            )
        )
        if found is None:
            raise
        raise found from error
