"""Live stores as folders: rows, open episodes and priorities, replaced as a whole.

Rows are saved with their links, as they lie in memory: writers and partly forgotten episodes are preserved.
``store.json`` names the subfolder with the newest arrays; see `rlio.storage.generations`.
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.errors import CorruptData, DataNotFound, RlioError, StateError, excerpt
from rlio.replay.draws import Draw
from rlio.replay.ingest import Ingest
from rlio.replay.manifests import Manifest
from rlio.replay.memory import Arrays, FileArrays, copied, file_name
from rlio.replay.rows import StoreRows
from rlio.replay.table import ROW_VERSION
from rlio.schemas.dtypes import stored_dtype
from rlio.schemas.schema import Schema
from rlio.storage import Storage
from rlio.storage.failures import explained
from rlio.storage.generations import Generations
from rlio.storage.local import sync_folder
from rlio.storage.near import did_you_mean_path
from rlio.storage.paths import locate
from rlio.support.states import value_in, whole_number, whole_numbers

__all__ = ["SavedStore", "load_rows", "save_rows"]

_MANIFEST: Final = "store.json"
_PRIORITIES: Final = "priorities"
_PREFIX: Final = "rows-"
_WHAT: Final = "the saved store"
#: What the manifest says about itself. Version 1 has the kind alone.
#: The arrays of versions 1 and 2 lie beside the manifest.
_DESCRIBE: Final = {"kind": "live", "version": 3, "rows": ROW_VERSION}
_DESCRIBE_2: Final = {"kind": "live", "version": 2, "rows": ROW_VERSION}
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


class _DamagedPriorities(CorruptData):
    """The rows are whole, and their priorities are not."""


def save_rows(
    folder: Path,
    rows: StoreRows,
    *,
    capacity: int,
    frames: int | None,
    kept: Mapping[str, Any] | None,
) -> None:
    """Write the rows of a live store; replaces those that a save before left there, and nothing else.

    Args:
        folder: Folder to write; created as needed.
        rows: The ring.
        capacity: Capacity of the ring in rows.
        frames: The ``frames`` given to `RowTable`.
        kept: Result of `PrioritisedSampler.kept`.

    Raises:
        CacheError: The disk is full; an earlier store there is unchanged.
        StoreError, PublishError: The folder cannot be written; likewise.
    """
    priorities: dict[str, NDArray[Any]] = {} if kept is None else kept["priorities"]

    def make(name: str) -> bytes:
        with FileArrays(folder / name, writable=True) as arrays:
            state = {
                "capacity": capacity,
                "frames": frames,
                "store": rows.dump(arrays),
                "priorities": {part: list(values.shape) for part, values in priorities.items()},
                "dtypes": {part: values.dtype.str for part, values in priorities.items()},
                "span": [0, 0] if kept is None else kept["span"],
                "of": None if kept is None else kept["of"],
                "folder": name,
            }
            for part, values in priorities.items():
                flat = values.reshape(-1)
                copied(arrays, _file_of(part), max(flat.size, 1), flat)[: flat.size] = flat
            arrays.flush()
            sizes = arrays.sizes
        with FileArrays(folder / name, sizes=sizes) as written:
            checksums = {part: _checksum(written, part, size) for part, size in sizes.items()}
        with explained(str(folder)):
            sync_folder(str(folder / name))
        return Manifest(describe=_DESCRIBE, arrays=sizes, state={**state, "crc32": checksums}).dump()

    before = _generations(folder).replace(make)
    if before:
        _remove_arrays_beside(folder, before)


def _generations(folder: Path) -> Generations:
    return Generations(Storage.open(folder), _MANIFEST, prefix=_PREFIX)


def _remove_arrays_beside(folder: Path, before: bytes) -> None:
    """Remove the arrays of the replaced store, if they lie beside its manifest."""
    with contextlib.suppress(CorruptData):  # A damaged manifest names nothing.
        manifest = Manifest.load(before)
        if manifest.describe in (_DESCRIBE_1, _DESCRIBE_2):
            for name in manifest.arrays:
                with contextlib.suppress(FileNotFoundError):  # Another save was quicker.
                    os.unlink(folder / file_name(name))


def load_rows(folder: Path, *, arrays: Arrays, priorities: bool = True) -> SavedStore:
    """Read what `save_rows` wrote; if others save there meanwhile, all of it is of one save.

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
        # A save of version 2 may have been killed between its two renames.
        kept = folder.with_name(f".{folder.name}.old")
        if not (kept / _MANIFEST).exists():
            hint = did_you_mean_path(locate(folder))
            raise DataNotFound(f"there is no saved store: check the path{hint}", uri=str(folder))
        folder = kept
    generations = _generations(folder)

    def load(content: bytes) -> SavedStore:
        manifest = Manifest.load(content)
        if manifest.describe == _DESCRIBE:
            name = str(manifest.state.get("folder"))
            if not generations.is_name(name):
                raise CorruptData(f"the saved store names the folder {excerpt(name)}", uri=str(folder))
            return _load(manifest, folder / name, arrays, priorities=priorities)
        return _load(manifest, folder, arrays, priorities=priorities)

    try:
        return generations.read(load)
    except _DamagedPriorities as error:  # Only here: `read` tries again if others save meanwhile.
        raise StateError(
            f"the saved priorities are damaged: {error}; load the store without them (priorities=False)",
            uri=str(folder),
        ) from error


def _checksum(files: FileArrays, name: str, size: int) -> int:
    return zlib.crc32(files.array(name, (size,), np.uint8).data)


def _check(files: FileArrays, manifest: Manifest, folder: Path) -> None:
    """Compare arrays with their checksums, which versions 1 and 2 do not have."""
    if manifest.describe != _DESCRIBE:
        return
    for name, size in files.sizes.items():
        if _checksum(files, name, size) != manifest.state["crc32"][name]:
            raise CorruptData(
                f"the array {excerpt(name)} of the saved store is damaged: save it again",
                uri=str(folder / file_name(name)),
            )


def _load(manifest: Manifest, folder: Path, arrays: Arrays, *, priorities: bool) -> SavedStore:
    state = manifest.state
    if manifest.describe not in (_DESCRIBE, _DESCRIBE_2, _DESCRIBE_1):
        raise StateError(
            f"the saved store is {excerpt(dict(manifest.describe))}, but this version of rlio reads "
            f"{_DESCRIBE}: load it with the version that saved it",
            uri=str(folder),
        )
    try:
        of_priorities = {_file_of(name) for name in value_in(state, "priorities", dict, of=_WHAT)}
        sizes = {name: size for name, size in manifest.arrays.items() if name not in of_priorities}
        with FileArrays(folder, sizes=sizes) as files:
            _check(files, manifest, folder)
            capacity = whole_number(state, "capacity", of=_WHAT)
            frames = None if state["frames"] is None else whole_number(state, "frames", of=_WHAT)
            options: dict[str, Any] = {"capacity": capacity, "frames": frames, "arrays": arrays}
            if manifest.describe == _DESCRIBE_1:
                ring = _restored_from_1(files, state, folder, **options)
            else:
                ring = StoreRows.restored(files, state["store"], **options)
        without = manifest.describe == _DESCRIBE and not of_priorities
        if without and (state["span"], state["of"]) != ([0, 0], None):
            raise ValueError("it names a sampler, and has no priorities")
        kept = _kept(manifest, folder, capacity) if priorities and of_priorities else None
        return SavedStore(ring, capacity, frames, kept)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, RlioError) and not (isinstance(error, StateError) and error.uri is None):
            raise
        raise CorruptData(f"the saved store is damaged: {excerpt(repr(error))}", uri=str(folder)) from error


def _kept(manifest: Manifest, folder: Path, capacity: int) -> dict[str, Any]:
    """The priorities, as `PrioritisedSampler.restore` takes them."""
    state = manifest.state
    try:
        sizes = {_file_of(name): manifest.arrays[_file_of(name)] for name in state["priorities"]}
        with FileArrays(folder, sizes=sizes) as files:
            _check(files, manifest, folder)
            found = {
                name: _loaded(files, name, state["dtypes"][name], shape)
                for name, shape in state["priorities"].items()
            }
        first, last = whole_numbers(state, "span", 2, of=_WHAT)
        if not 0 <= first <= last <= first + capacity:
            raise ValueError(f"priorities of the rows {first} to {last}")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _DamagedPriorities(excerpt(str(error)), uri=str(folder)) from error
    return {"priorities": found, "span": [first, last]} | (
        {} if state.get("of") is None else {"of": state["of"]}
    )


def _loaded(files: FileArrays, name: str, dtype: str, shape: list[int]) -> NDArray[Any]:
    """One array of priorities."""
    size, kind = math.prod(shape), stored_dtype(dtype)
    place = _file_of(name)
    if min(shape, default=0) < 0 or max(size, 1) * kind.itemsize != files.sizes[place]:
        raise ValueError(f"{name} of the shape {shape}")
    return files.array(place, (max(size, 1),), kind)[:size].reshape(shape)


def _file_of(name: str) -> str:
    """The stored name of an array of priorities."""
    return f"{_PRIORITIES} {name}"


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
