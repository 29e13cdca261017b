"""Live stores as folders: rows, open episodes and priorities, written whole or not at all.

Source of the protocol: as for shards, a temporary folder that is synced and renamed (docs/design).
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.errors import CorruptData, DataNotFound, StateError
from rlio.interfaces import Batch
from rlio.replay.draws import Draw
from rlio.replay.ingest import OpenEpisode
from rlio.replay.manifests import Manifest
from rlio.replay.memory import FileArrays
from rlio.replay.rows import Filled, StoreRows
from rlio.schemas.dtypes import stored_dtype
from rlio.schemas.schema import Schema
from rlio.storage.spool import sync_folder

__all__ = ["SavedStore", "load_rows", "save_rows"]

_MANIFEST: Final = "store.json"
_PRIORITIES: Final = "priorities"
# Units that are copied at a time.
_CHUNK: Final = 4096


class SavedStore(NamedTuple):
    """What a folder held.

    Attributes:
        rows: A ring with the rows, each under the number that it had.
        capacity: Rows that it keeps.
        frames: Frames that its pools keep; None: enough.
        priorities: Arrays of a `Priorities`; None: none were saved.
        span: Rows whose priorities they are: (oldest, next).
    """

    rows: StoreRows
    capacity: int
    frames: int | None
    priorities: dict[str, NDArray[Any]] | None
    span: tuple[int, int]


def save_rows(
    folder: Path,
    rows: StoreRows,
    *,
    capacity: int,
    frames: int | None,
    priorities: Mapping[str, NDArray[Any]] | None,
    span: tuple[int, int],
) -> None:
    """Write the rows of a live store; a folder of the same name is replaced.

    Args:
        folder: Where; its parent exists.
        rows: The ring.
        capacity: Rows that it keeps.
        frames: As `RowTable` was given.
        priorities: Arrays of a `Priorities`.
        span: Rows whose priorities they are.

    Raises:
        CacheError: The disk is full; what was there before is there still.
    """
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        count = max((len(table) for table in rows.tables.values()), default=1)
        with FileArrays(made, writable=True) as arrays:
            copy = StoreRows(rows.schema, capacity=max(count, 1), arrays=arrays)
            for batch in _batches(rows):
                copy.add(batch)
            copy.save_steps()
            used = copy.used
            for name, values in (priorities or {}).items():
                target = arrays.array(f"{_PRIORITIES} {name}", (max(values.size, 1),), values.dtype)
                arrays.reserve(f"{_PRIORITIES} {name}", len(target))
                target[: values.size] = values.reshape(-1)
            for name, count in used.items():
                arrays.trim(name, count)
            arrays.flush()
            state = _state(rows, copy, capacity, frames)
            state["priorities"] = {name: list(values.shape) for name, values in (priorities or {}).items()}
            state["dtypes"] = {name: values.dtype.str for name, values in (priorities or {}).items()}
            state["span"] = list(span)
            manifest = Manifest(describe={"kind": "live"}, arrays=arrays.sizes, state=state)
        _write(made / _MANIFEST, manifest.dump())
        sync_folder(str(made))
        _replace(made, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _state(rows: StoreRows, copy: StoreRows, capacity: int, frames: int | None) -> dict[str, Any]:
    return {
        "schema": rows.schema.text,
        "capacity": capacity,
        "frames": frames,
        "heads": {pid: table.head for pid, table in rows.tables.items()},
        **copy.filled.to_json(),
        "open": {
            pid: [[list(key), *last] for key, last in ingest.open.items()]
            for pid, ingest in rows.ingests.items()
        },
    }


def _batches(rows: StoreRows) -> Iterator[Batch]:
    """All rows, in order."""
    units = rows.units(Draw())
    for start in range(0, units.count, _CHUNK):
        yield units.batch(np.arange(start, min(start + _CHUNK, units.count)))


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(made: Path, folder: Path) -> None:
    """Put a folder in the place of another: in between, for a moment, there is none."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    sync_folder(str(folder.parent))
    shutil.rmtree(old, ignore_errors=True)


def load_rows(folder: Path, *, arrays: Any) -> SavedStore:
    """Read what `save_rows` wrote.

    Args:
        folder: Where.
        arrays: Of the ring that is made.

    Raises:
        DataNotFound: There is no saved store.
        CorruptData: It is damaged.
    """
    if not (folder / _MANIFEST).exists():
        # A save that was cut off between its two renames.
        kept = folder.with_name(f".{folder.name}.old")
        if not (kept / _MANIFEST).exists():
            raise DataNotFound("there is no saved store", uri=str(folder))
        folder = kept
    manifest = Manifest.load((folder / _MANIFEST).read_bytes())
    state = manifest.state
    try:
        schema = Schema.from_text(state["schema"], uri=str(folder))
        with FileArrays(folder, sizes=manifest.arrays) as files:
            stored = StoreRows(schema, capacity=1, arrays=files, filled=Filled.from_json(state), sealed=True)
            starts = {pid: state["heads"][pid] - len(table) for pid, table in stored.tables.items()}
            ring = StoreRows(
                schema,
                capacity=state["capacity"],
                arrays=arrays,
                ring=True,
                frames=state["frames"],
                starts=starts,
            )
            for batch in _batches(stored):
                ring.add(batch)
            priorities = {
                name: _loaded(files, name, state["dtypes"][name], shape)
                for name, shape in state["priorities"].items()
            }
            for pid, episodes in state["open"].items():
                ring.ingests[pid].open.clear()
                for key, row, t, at in episodes:
                    ring.ingests[pid].open[tuple(key)] = OpenEpisode(row, t, at)
        first, last = state["span"]
        return SavedStore(ring, state["capacity"], state["frames"], priorities or None, (first, last))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CorruptData | StateError):
            raise
        raise CorruptData(f"the saved store is damaged: {error!r}", uri=str(folder)) from error


def _loaded(files: FileArrays, name: str, dtype: str, shape: list[int]) -> NDArray[Any]:
    """One array of priorities."""
    size = math.prod(shape)
    stored = files.array(f"{_PRIORITIES} {name}", (max(size, 1),), stored_dtype(dtype))
    return stored[:size].reshape(shape)
