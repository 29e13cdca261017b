"""Live stores as folders: rows, open episodes and priorities, written atomically.

Rows are saved with their links, as they lie in memory: writers and partly forgotten episodes are preserved.
As for shards, a temporary folder is written, synced and renamed.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.errors import CorruptData, DataNotFound, RlioError, StateError, excerpt
from rlio.log.spool import sync_folder
from rlio.replay.cache_files import write_file
from rlio.replay.draws import Draw
from rlio.replay.ingest import Ingest
from rlio.replay.manifests import Manifest
from rlio.replay.memory import Arrays, FileArrays, copied
from rlio.replay.rows import StoreRows
from rlio.replay.table import ROW_VERSION
from rlio.schemas.dtypes import stored_dtype
from rlio.schemas.schema import Schema

__all__ = ["SavedStore", "load_rows", "save_rows"]

_MANIFEST: Final = "store.json"
_PRIORITIES: Final = "priorities"
#: What the manifest says about itself. Version 1 has the kind alone.
_DESCRIBE: Final = {"kind": "live", "version": 2, "rows": ROW_VERSION}
_DESCRIBE_1: Final = {"kind": "live"}
# Units to copy at a time from a file of version 1.
_CHUNK: Final = 4096
# Columns that distinguish episodes in such a file.
_KEYS: Final = (Columns.EPS_ID, Columns.AGENT_INDEX, Columns.ENV_ID)


class SavedStore(NamedTuple):
    """The content of a saved store.

    Attributes:
        rows: A ring with the rows, each under its old number.
        capacity: Capacity of the ring in rows.
        frames: Capacity of its pools in frames; None: enough for all rows.
        kept: Result of `PrioritisedSampler.kept`; None: no priorities were saved, or none are wanted.
    """

    rows: StoreRows
    capacity: int
    frames: int | None
    kept: dict[str, Any] | None


def save_rows(
    folder: Path,
    rows: StoreRows,
    *,
    capacity: int,
    frames: int | None,
    kept: Mapping[str, Any] | None,
) -> None:
    """Write the rows of a live store; replaces an existing folder.

    Args:
        folder: Folder to write; its parent exists.
        rows: The ring.
        capacity: Capacity of the ring in rows.
        frames: The ``frames`` given to `RowTable`.
        kept: Result of `PrioritisedSampler.kept`.

    Raises:
        CacheError: The disk is full; an earlier store there is unchanged.
    """
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    priorities = {} if kept is None else kept["priorities"]
    try:
        with FileArrays(made, writable=True) as arrays:
            state = {
                "capacity": capacity,
                "frames": frames,
                "store": rows.dump(arrays),
                "priorities": {name: list(values.shape) for name, values in priorities.items()},
                "dtypes": {name: values.dtype.str for name, values in priorities.items()},
                "span": [0, 0] if kept is None else kept["span"],
                "of": None if kept is None else kept["of"],
                "crc32": {name: zlib.crc32(values.tobytes()) for name, values in priorities.items()},
            }
            for name, values in priorities.items():
                flat = values.reshape(-1)
                copied(arrays, _file_of(name), flat.size, flat)[:] = flat
            arrays.flush()
            manifest = Manifest(describe=_DESCRIBE, arrays=arrays.sizes, state=state)
        write_file(str(made / _MANIFEST), manifest.dump())
        sync_folder(str(made))
        _replace(made, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _replace(made: Path, folder: Path) -> None:
    """Replace a folder by another; between the two renames, neither has the name."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    sync_folder(str(folder.parent))
    shutil.rmtree(old, ignore_errors=True)


def load_rows(folder: Path, *, arrays: Arrays, priorities: bool = True) -> SavedStore:
    """Read what `save_rows` wrote.

    Args:
        folder: Folder of the saved store.
        arrays: Makes the arrays of the ring.
        priorities: Whether to read the priorities, if there are any.

    Raises:
        DataNotFound: The folder holds no saved store.
        CorruptData: The saved store is damaged.
        StateError: The priorities are damaged; or the saved store has another version, which does not record
            which rows follow each other.
    """
    if not (folder / _MANIFEST).exists():
        # A save may have been killed between its two renames.
        kept = folder.with_name(f".{folder.name}.old")
        if not (kept / _MANIFEST).exists():
            raise DataNotFound("there is no saved store: check the path", uri=str(folder))
        folder = kept
    manifest = Manifest.load((folder / _MANIFEST).read_bytes())
    state = manifest.state
    if manifest.describe not in (_DESCRIBE, _DESCRIBE_1):
        raise StateError(
            f"the saved store is {dict(manifest.describe)}, but this version of rlio reads {_DESCRIBE}: load "
            "it with the version that saved it",
            uri=str(folder),
        )
    try:
        names = {_file_of(name) for name in state["priorities"]}
        sizes = {name: size for name, size in manifest.arrays.items() if name not in names}
        with FileArrays(folder, sizes=sizes) as files:
            options = {"capacity": state["capacity"], "frames": state["frames"], "arrays": arrays}
            if manifest.describe == _DESCRIBE:
                ring = StoreRows.restored(files, state["store"], **options)
            else:
                ring = _restored_from_1(files, state, folder, **options)
        sizes = {name: manifest.arrays[name] for name in names} if priorities else {}
        found = _kept(folder, sizes, state) if sizes else None
        return SavedStore(ring, state["capacity"], state["frames"], found)
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, RlioError):
            raise
        raise CorruptData(f"the saved store is damaged: {error!r}", uri=str(folder)) from error


def _kept(folder: Path, sizes: Mapping[str, int], state: Mapping[str, Any]) -> dict[str, Any]:
    """The priorities, as `PrioritisedSampler.restore` takes them.

    Raises:
        StateError: They are damaged.
    """
    try:
        with FileArrays(folder, sizes=sizes) as files:
            found = {
                name: _loaded(files, name, state["dtypes"][name], shape)
                for name, shape in state["priorities"].items()
            }
    except CorruptData as error:
        raise _damaged(str(error), folder) from error
    for name, checksum in state.get("crc32", {}).items():
        if zlib.crc32(found[name].tobytes()) != checksum:
            raise _damaged(f"{excerpt(name)} does not fit its checksum", folder)
    kept = {"priorities": found, "span": state["span"]}
    return kept | ({} if state.get("of") is None else {"of": state["of"]})


def _loaded(files: FileArrays, name: str, dtype: str, shape: list[int]) -> NDArray[Any]:
    """One array of priorities."""
    stored = files.array(_file_of(name), (math.prod(shape),), stored_dtype(dtype))
    return stored.reshape(shape)


def _file_of(name: str) -> str:
    """The stored name of an array of priorities."""
    return f"{_PRIORITIES} {name}"


def _damaged(what: str, folder: Path) -> StateError:
    return StateError(
        f"the saved priorities are damaged: {what}; load the store without them (priorities=False)",
        uri=str(folder),
    )


# ---- version 1, whose files hold rows without writers and without links ----


def _restored_from_1(files: FileArrays, state: Mapping[str, Any], folder: Path, **options: Any) -> StoreRows:
    """Restore a ring from a file of version 1: add its rows again, if only one result is possible.

    Raises:
        StateError: The rows may have been linked differently.
    """
    schema = Schema.from_text(state["schema"], uri=str(folder))
    stored = StoreRows(schema, capacity=1, arrays=files, sealed=True)
    ring = StoreRows(schema, ring=True, **options)
    for pid, table in ring.tables.items():
        table.tail = table.head = state["heads"][pid] - len(stored.tables[pid])
    units = stored.units(Draw())
    for start in range(0, units.count, _CHUNK):
        ring.add(units.batch(np.arange(start, min(start + _CHUNK, units.count))))
    for pid, ingest in ring.ingests.items():
        again = dict(ingest.open)
        ingest.open_from_json(state["open"][pid])
        kept = {key: last for key, last in ingest.open.items() if last.row >= ingest.table.tail}
        if again != kept or not _links_are_certain(ingest):
            raise StateError(
                "an earlier version of rlio saved this store without the writers of its rows; eps_id and t "
                f"do not determine which rows of policy {excerpt(pid)} followed each other: fill a new store",
                uri=str(folder),
            )
    return ring


def _links_are_certain(ingest: Ingest) -> bool:
    """Whether the links of a ring's rows are certain, for any assignment of writers.

    They are certain if each episode is one run of rows without a gap, and no row of it was forgotten.
    """
    table = ingest.table
    rows = np.arange(table.tail, table.head)
    found = table.gather(
        rows, table.plan(leaf for leaf in table.leaves if leaf.column in (*_KEYS, Columns.T))
    )
    if Columns.T not in found:
        return False
    starts = table.predecessors(rows) < 0
    keys = zip(*(found[name].tolist() for name in _KEYS if name in found), strict=True)
    whole = not table.tail or not found[Columns.T][starts].any()
    return whole and len(set(keys)) == int(starts.sum())
