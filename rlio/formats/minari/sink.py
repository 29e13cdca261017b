"""`MinariSink`: writes Minari data sets, as HDF5 or Arrow. Layout: `rlio.formats.minari.source`."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.batch.nested import leaves
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.formats.files.space_arrays import children_of
from rlio.formats.format import Holds
from rlio.formats.hdf5_sink import NewHdf5File
from rlio.formats.minari.source import FORMAT, KEPT
from rlio.formats.minari.spaces import space_to_minari
from rlio.formats.sink import Origin, PreparedEpisode
from rlio.storage.filesystem import Storage
from rlio.support.options import check_choice

__all__ = [
    *("MinariSink", "about_episode", "columns_of", "id_of", "kept_fields", "unbounded_space"),
]

# The version of Minari whose layout is written: older ones would take raw pictures for JPEG files.
_VERSION: Final = "0.5.4"
_METADATA: Final = "data/metadata.json"
_DATA: Final = "data/main_data.hdf5"
_ID = re.compile(r"(?:[-\w][-\w/]*[-\w]/)?[-\w]+-v[0-9]+")
_LISTS: Final = ("author", "author_email", "requirements")
_NUMBERS: Final = ("ref_min_score", "ref_max_score", "num_episodes_average_score")


class MinariSink:
    """Writes episodes as a Minari data set; an `EpisodeSink`.

    Minari opens it by its id if the folder is ``$MINARI_DATASETS_PATH/<id>``, and otherwise with
    ``minari.MinariDataset(folder + "/data")``. A sink for the folder of an interrupted sink begins again.
    HDF5 is written to a temporary file (in ``TMPDIR``) and stored by `close`.

    Where the origin states no spaces, they are Boxes over all values of each column's dtype.

    Args:
        storage: The folder.
        origin: Spaces, environment, and Minari's own fields, which are kept.
        data_format: ``"hdf5"`` or ``"arrow"``.
        dataset_id: Minari's id of the data set, such as ``"D4RL/pen/human-v2"``; None: that of the folder.

    Raises:
        OptionError: An option is illegal.
        MissingExtra: h5py is not installed.
    """

    def __init__(
        self,
        storage: Storage,
        origin: Origin,
        *,
        data_format: Literal["hdf5", "arrow"] = "hdf5",
        dataset_id: str | None = None,
    ) -> None:
        check_choice("data_format", data_format, ("hdf5", "arrow"))
        if dataset_id is not None and not _ID.fullmatch(dataset_id):
            raise OptionError(f"dataset_id={excerpt(dataset_id)}: expected an id such as 'name-v0'")
        self.episodes: int = 0
        self._steps = 0
        self.holds: Holds = replace(FORMAT.holds, dtypes=data_format == "hdf5")
        self._storage, self._origin = storage, origin
        self._id = dataset_id or id_of(storage)
        self._format, self._spaces = data_format, origin.spaces
        self._store: _Hdf5Writer | _ArrowWriter = (
            _Hdf5Writer(storage) if data_format == "hdf5" else _ArrowWriter(storage)
        )

    def takes(self, name: str, column: np.ndarray) -> bool:
        """Whether a column is the seed of an episode; see `EpisodeSink`."""
        return name == Columns.ENV_SEED and column.dtype.kind in "iu" and bool((column == column[0]).all())

    def write(self, episode: PreparedEpisode) -> None:
        """Add one episode; see `EpisodeSink`."""
        if self._spaces is None:
            self._spaces = (
                unbounded_space(episode.observations, Columns.OBS),
                unbounded_space(episode.actions, Columns.ACTIONS),
            )
        if not self.episodes:
            # From now on the folder is no data set until `close`.
            self._storage.remove(_METADATA)
        self._store.add(columns_of(episode), self._spaces, about_episode(self.episodes, episode))
        self.episodes += 1
        self._steps += len(episode)

    def close(self) -> None:
        """Write the metadata of the data set; nothing if there is no episode."""
        if not self.episodes:
            self.abort()
            return
        assert self._spaces is not None
        spaces = [json.dumps(space_to_minari(space)) for space in self._spaces]
        kept, size = self._store.close()
        for entry in self._storage.list("data"):  # Of an interrupted sink that had written more.
            if entry.path not in kept:
                self._storage.remove(entry.path)
        metadata = {
            "total_episodes": self.episodes,
            "total_steps": self._steps,
            "data_format": self._format,
            "jpeg_encoding": False,
            "observation_space": spaces[0],
            "action_space": spaces[1],
            **({} if self._origin.env is None else {"env_spec": self._origin.env}),
            **kept_fields(self._origin.extra),
            "dataset_id": self._id,
            "minari_version": _VERSION,
            "dataset_size": round(size / 1e6, 1),
        }
        self._storage.put(_METADATA, json.dumps(metadata).encode())

    def abort(self) -> None:
        """Release everything."""
        self._store.abort()


def id_of(storage: Storage) -> str:
    """Where the folder lies among Minari's, or its name, as an id."""
    name = storage.root.rstrip("/").rpartition("/")[2]
    home = os.environ.get("MINARI_DATASETS_PATH")
    if storage.is_local and home and storage.root.startswith(os.path.join(os.path.abspath(home), "")):
        name = os.path.relpath(storage.root, os.path.abspath(home))
    name = re.sub(r"[^-\w/]", "-", name) or "data"
    return name if _ID.fullmatch(name) else f"{name}-v0"


def kept_fields(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Minari's fields among what a source states, of the types that Minari expects."""

    def is_legal(name: str, value: Any) -> bool:
        if name in _LISTS:
            return isinstance(value, list) and all(isinstance(one, str) for one in value)
        return isinstance(value, (int, float) if name in _NUMBERS else str)

    return {name: extra[name] for name in KEPT if name in extra and is_legal(name, extra[name])}


def columns_of(episode: PreparedEpisode) -> dict[str, Any]:
    """The columns of an episode as Minari names them: N+1 observations, N rows of all else."""
    terminations, truncations = episode.ends
    return {
        "observations": episode.observations,
        "actions": episode.actions,
        "rewards": episode.rewards,
        "terminations": terminations,
        "truncations": truncations,
    }


def about_episode(number: int, episode: Episode | PreparedEpisode) -> dict[str, Any]:
    """The metadata of an episode."""
    about: dict[str, Any] = {"id": number, "total_steps": len(episode)}
    if not len(episode):
        return about
    seeds = episode.extra_outputs.get(Columns.ENV_SEED)
    if seeds is not None and (seed := int(to_numpy(seeds)[0])) >= 0:
        about["seed"] = seed
    assert episode.rewards is not None
    rewards = to_numpy(episode.rewards).astype(np.float64)
    for name in ("sum", "mean", "std", "max", "min"):
        about[f"rewards_{name}"] = float(getattr(rewards, name)())
    return about


# ---- spaces ----


def unbounded_space(column: Any, name: str) -> Any:
    """The space of all values that a column's dtypes hold.

    Raises:
        SchemaError: The column has text or objects, for which there is no such space.
    """
    from gymnasium import spaces

    if isinstance(column, dict):
        return spaces.Dict({key: unbounded_space(part, name) for key, part in column.items()})
    if isinstance(column, tuple):
        return spaces.Tuple([unbounded_space(part, name) for part in column])
    dtype, shape = column.dtype, column.shape[1:]
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    if dtype.kind == "b":
        return spaces.Box(np.zeros(shape, dtype), np.ones(shape, dtype), shape, dtype)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return spaces.Box(bounds.min, bounds.max, shape, dtype)
    raise SchemaError(
        f"found {dtype}, expected numbers, because the spaces are not known: record with spaces", column=name
    )


# ---- files ----


class _Hdf5Writer:
    """One file, with a group for each episode."""

    def __init__(self, storage: Storage) -> None:
        self._new = NewHdf5File(storage, _DATA, track_order=True)
        import h5py

        self._text = h5py.string_dtype("utf-8")

    def add(self, columns: Mapping[str, Any], spaces: tuple[Any, Any], about: Mapping[str, Any]) -> None:
        group = self._new.file.create_group(f"episode_{about['id']}")
        seed = about.get("seed")
        group.attrs.update(about if seed is None else {**about, "seed": np.array(seed)})
        for name, column in columns.items():
            for path, leaf in leaves(column):
                parts = [part if isinstance(part, str) else f"_index_{part}" for part in path]
                group.create_dataset(
                    "/".join((name, *parts)),
                    data=leaf,
                    dtype=self._text if leaf.dtype.kind in "OU" else None,
                    chunks=True,  # Minari appends to them.
                    maxshape=(None, *leaf.shape[1:]),
                )
        group.create_group("infos")

    def close(self) -> tuple[set[str], int]:
        """Store what is not stored yet; gives the paths of all files, and their bytes."""
        return {_DATA}, self._new.close()

    def abort(self) -> None:
        self._new.abort()


class _ArrowWriter:
    """A folder for each episode."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._paths: set[str] = set()
        self._size = 0

    def add(self, columns: Mapping[str, Any], spaces: tuple[Any, Any], about: Mapping[str, Any]) -> None:
        import pyarrow as pa

        known = dict(zip(("observations", "actions"), spaces, strict=True))
        arrays = [_to_arrow(column, known.get(name), name) for name, column in columns.items()]
        batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
        stream = io.BytesIO()
        with pa.ipc.new_file(stream, batch.schema) as file:
            file.write_batch(batch)
        folder = f"data/{about['id']}"
        self._put(f"{folder}/part-0.arrow", stream.getvalue())
        self._put(f"{folder}/metadata.json", json.dumps(about).encode())

    def _put(self, path: str, data: bytes) -> None:
        self._storage.put(path, data)
        self._paths.add(path)
        self._size += len(data)

    def close(self) -> tuple[set[str], int]:
        return self._paths, self._size

    def abort(self) -> None:
        """Do nothing: no file is open."""


def _to_arrow(column: Any, space: Any, name: str) -> Any:
    """A column with a row of padding at its end, unless it is the observations."""
    import pyarrow as pa
    from gymnasium.spaces import Discrete

    children = children_of(space)
    if children is not None:
        parts = [_to_arrow(column[key], child, name) for key, child in children]
        return pa.StructArray.from_arrays(parts, names=[str(key) for key, _ in children])
    pad = name != "observations"
    if column.dtype.kind in "OU":
        return pa.array([*column.tolist(), *[None] * pad], pa.string())
    if space is not None and column.dtype != space.dtype:
        cast = column.astype(space.dtype)
        # Back, as one of both may be an integer beyond 2^53.
        if not np.array_equal(cast.astype(column.dtype), column, equal_nan=column.dtype.kind == "f"):
            raise SchemaError(f"values of {column.dtype} that {space.dtype} cannot hold", column=name)
        column = cast
    if pad:
        column = np.concatenate([column, np.zeros_like(column, shape=(1, *column.shape[1:]))])
    if space is None or not hasattr(space, "shape") or isinstance(space, Discrete):
        return pa.array(column)
    flat = np.ascontiguousarray(column).reshape(-1)
    size = int(np.prod(column.shape[1:], dtype=np.int64))
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), size)
