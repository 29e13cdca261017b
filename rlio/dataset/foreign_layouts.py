"""The layouts in which other libraries store experience, recognised by what only they have.

A file whose layout is not positively known is not guessed at: `recognise` names what lies at a place, and
`check_step_columns` refuses a table of steps whose columns would be read wrong. A `Layout` says which reader
takes it, or what to do where none does.

Not here: how a layout is read (`rlio.readers`).

Example:
    >>> from rlio.storage import Storage
    >>> Storage.open("memory://layouts-example").put(
    ...     "data/metadata.json", b'{"total_episodes": 2, "total_steps": 26, "data_format": "parquet"}'
    ... )
    >>> recognise("memory://layouts-example").name
    'Minari'
    >>> check_step_columns(["obs", "actions", "rewards", "terminateds", "episode_index"])
    Traceback (most recent call last):
    ...
    rlio.errors.UnknownLayout: ... [column episode_index]
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

from rlio.batch.columns import Columns
from rlio.dataset.names import HEADER
from rlio.errors import RlioError, UnknownLayout, excerpt
from rlio.limits import DEFAULT_LIMITS
from rlio.schemas.parquet_metadata import read_metadata
from rlio.storage.filesystem import InputFile, Storage, StrPath, open_input
from rlio.storage.paths import is_uri, locate

__all__ = [
    "Layout",
    "check_other_names",
    "check_step_columns",
    "layout_of_columns",
    "layout_of_hdf5",
    "layout_of_json",
    "recognise",
    "refuse_known",
]


@dataclass(frozen=True)
class Layout:
    """A way in which some library stores experience.

    Attributes:
        name: What its users call it.
        reader: Name of the class of `rlio` that reads it; None: none does.
        advice: What to do with it, as the end of a message.
    """

    name: str
    reader: str | None
    advice: str

    def refusal(self, *, uri: str | None = None) -> UnknownLayout:
        """The error for a reader that was given this layout and does not read it."""
        return UnknownLayout(
            f"found {self.name}'s layout, expected one that this reader knows: {self.advice}", uri=uri
        )


def _unread(name: str, how: str) -> Layout:
    return Layout(name, None, f"rlio does not read it yet; {how}")


_WRITE_BATCHES: Final = (
    "load it with its own library and write each episode as a SampleBatch (obs, new_obs, actions, rewards, "
    "terminateds, truncateds, eps_id, t) with rlio.ParquetWriter"
)
MINARI: Final = _unread(
    "Minari",
    "iterate over minari.load_dataset(...) and write each episode as a SampleBatch, with observations[:-1] "
    "as obs and observations[1:] as new_obs, with rlio.ParquetWriter",
)
LEROBOT: Final = _unread("LeRobot", _WRITE_BATCHES)
D3RLPY_1: Final = _unread("d3rlpy 1", _WRITE_BATCHES)
D3RLPY_2: Final = _unread("d3rlpy 2", _WRITE_BATCHES)
ROBOMIMIC: Final = _unread("Robomimic", _WRITE_BATCHES)
TIANSHOU: Final = _unread("Tianshou", _WRITE_BATCHES)
TORCHRL: Final = _unread("TorchRL", _WRITE_BATCHES)
RLDS: Final = _unread("RLDS", _WRITE_BATCHES)
VAULT: Final = _unread("Flashbax Vault", _WRITE_BATCHES)
HUGGING_FACE: Final = _unread(
    "Hugging Face datasets",
    "call load_from_disk(...).to_parquet(...), with the columns named as in rlio, and read that file",
)
RLLIB_EPISODES: Final = _unread(
    "RLlib's episodes", "record with output_write_episodes=False, which writes one step a row"
)
RLLIB_JSON: Final = Layout("RLlib's JSON", "JsonReader", "read it with rlio.JsonReader")
RLLIB_PARQUET: Final = Layout(
    "RLlib's Parquet", "ForeignParquetReader", "read it with rlio.ForeignParquetReader"
)
D4RL: Final = Layout("D4RL", "D4RLReader", "read it with rlio.D4RLReader")

# ---- what only they have ----

# Columns that together occur in one layout alone.
_BY_COLUMNS: Final = (
    (frozenset(("observations", "actions", "rewards", "terminations", "truncations")), MINARI),
    (frozenset(("episode_index", "frame_index")), LEROBOT),
    (frozenset(("episode_index", "dataset_from_index")), LEROBOT),
    (frozenset(("type", "policy_batches")), RLLIB_PARQUET),
    (frozenset(("obs", "actions", "rewards")), RLLIB_PARQUET),
)

# Columns of a shard of rlio.
_OUR_COLUMNS: Final = frozenset(("_next", "_stream", "_batch"))

# Keys that together occur in the JSON of one layout alone.
_BY_KEYS: Final = (
    (frozenset(("total_episodes", "total_steps", "data_format")), MINARI),
    (frozenset(("total_episodes", "total_steps", "minari_version")), MINARI),
    (frozenset(("total_steps", "rewards_sum", "rewards_mean")), MINARI),  # of one episode
    (frozenset(("codebase_version", "features", "total_episodes")), LEROBOT),
    (frozenset(("episode_index", "tasks", "length")), LEROBOT),
    (frozenset(("episode_index", "stats")), LEROBOT),
    (frozenset(("_data_files", "_fingerprint")), HUGGING_FACE),
    (frozenset(("builder_name", "dataset_size", "features")), HUGGING_FACE),
    (frozenset(("citation", "description", "features", "homepage", "license")), HUGGING_FACE),
    (frozenset(("pythonClassName", "featuresDict")), RLDS),
    (frozenset(("fileFormat", "moduleName", "splits")), RLDS),
    (frozenset(("structure_shape", "structure_dtype")), VAULT),
)

_HDF5_EPISODE = re.compile(r"episode_[0-9]+")
_HDF5_DEMO = re.compile(r"demo_[0-9]+")


def layout_of_columns(names: Collection[str]) -> Layout | None:
    """The layout of a Parquet or Arrow file with these top-level columns; None: it is no known one."""
    found = frozenset(names)
    if found == {"item"}:
        return RLLIB_EPISODES
    if not found.isdisjoint(_OUR_COLUMNS):
        return None
    return next((layout for columns, layout in _BY_COLUMNS if columns <= found), None)


def layout_of_json(found: object) -> Layout | None:
    """The layout that a file's JSON, or the first line of it, belongs to; None: to no known one."""
    if not isinstance(found, Mapping):
        return None
    keys = frozenset(key for key in found if isinstance(key, str))
    if found.get("type") in ("SampleBatch", "MultiAgentBatch") and "schema" not in keys:
        return RLLIB_JSON
    if keys == {"splits"} and isinstance(found["splits"], list):
        return HUGGING_FACE
    if str(found.get("_class", found.get("_type", ""))).find("tensordict") >= 0:
        return TORCHRL
    return next((layout for needed, layout in _BY_KEYS if needed <= keys), None)


def layout_of_hdf5(file: Any) -> Layout | None:
    """The layout of an open h5py file; None: it is no known one. No link that leaves the file is followed."""
    keys = set(file)
    if {"columns", "num_episodes", "version"} <= keys:
        return D3RLPY_2
    if {"observations", "episode_terminals"} <= keys:
        return D3RLPY_1
    if {"_meta", "_size"} <= keys:
        return TIANSHOU
    if any(_HDF5_DEMO.fullmatch(name) for name in _members(file, "data")):
        return ROBOMIMIC
    episode = next((name for name in sorted(keys) if _HDF5_EPISODE.fullmatch(name)), None)
    if episode is not None and {"observations", "terminations"} <= set(_members(file, episode)):
        return MINARI
    return D4RL if {"observations", "actions", "rewards", "terminals"} <= keys else None


def _members(file: Any, name: str) -> Iterable[str]:
    """Names in a group that is stored in ``file`` itself."""
    import h5py

    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        return ()
    group = file[name]
    return group if isinstance(group, h5py.Group) else ()


# ---- tables of steps ----

#: Columns of which a table of steps has one or more.
_STEP_COLUMNS: Final = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS)
_ENDS: Final = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
# What others call the columns that say what a row is, and where an episode ends. Each may be the columns
# before it: where one of those is absent, rows would be read wrong without it.
_OTHER_NAMES: Final = (
    ((Columns.OBS,), ("observation", "observations", "state", "states")),
    ((Columns.NEXT_OBS,), ("next_obs", "next_observation", "next_observations", "next_state", "next_states")),
    ((Columns.NEXT_OBS,), ("obs_next",)),
    ((Columns.ACTIONS,), ("action",)),
    ((Columns.REWARDS,), ("reward", "next.reward")),
    ((Columns.TERMINATEDS,), ("terminal", "terminals", "terminated", "termination", "terminations")),
    ((Columns.TERMINATEDS,), ("is_terminal",)),
    (
        (Columns.TRUNCATEDS,),
        ("timeout", "timeouts", "truncated", "truncation", "truncations", "is_truncated"),
    ),
    (_ENDS, ("done", "next.done", "is_last", "episode_end", "episode_ends", "episode_terminals")),
    ((Columns.EPS_ID,), ("episode", "episode_id", "episode_idx", "episode_index", "ep_id", "is_first")),
    ((Columns.EPS_ID,), ("traj_id", "trajectory", "trajectory_id")),
)
_MEANT: Final = {name: meant for meant, names in _OTHER_NAMES for name in names}


def check_step_columns(names: Collection[str], *, uri: str | None = None) -> None:
    """Refuse a table of one row a step whose columns are not known to be steps.

    Args:
        names: The columns of the file.
        uri: The file, for the message.

    Raises:
        UnknownLayout: It has neither ``obs`` nor ``actions`` nor ``rewards``, or see `check_other_names`.
    """
    check_other_names(names, uri=uri)
    if not set(names).intersection(_STEP_COLUMNS):
        raise UnknownLayout(
            f"found the columns {excerpt(sorted(names))}, expected one row a step with "
            f"{', '.join(_STEP_COLUMNS)} or some of them: rename the columns in the file, or name those to "
            "read: columns=[...]",
            uri=uri,
        )


def check_other_names(names: Collection[str], *, uri: str | None = None) -> None:
    """Refuse a column that another library uses for one that is absent.

    ``episode_id`` without ``eps_id``, for instance: without it, the episodes would be joined.

    Args:
        names: The columns of the file or record.
        uri: The file, for the message.

    Raises:
        UnknownLayout: There is such a column.
    """
    found = set(names)
    if Columns.DONES in found:
        found.add(Columns.TERMINATEDS)  # It says where an episode ends, but not why.
    for name in names:
        absent = [meant for meant in _MEANT.get(name, ()) if meant not in found]
        if absent:
            raise UnknownLayout(
                f"the column {name!r} may be what is called {' or '.join(absent)} here, which is absent: "
                "rename it in the file; or, if it is something else, name the columns to read: columns=[...]",
                uri=uri,
                column=name,
            )


# ---- looking ----

# JSON files that say what is in their folder, by name; and what a data file ends in.
_MARKERS: Final = frozenset(
    (
        *("metadata.json", "info.json", "dataset_info.json", "state.json", "dataset_dict.json"),
        *("meta.json", "features.json"),
    )
)
_FOLDERS_FIRST: Final = ("meta", "data")
# A look is bounded, whatever lies there: names of a folder, folders, bytes of a file, levels down.
_NAMES = 1000
_FOLDERS = 12
_DEPTH = 4
_JSON_BYTES = 4 << 20
_LINE_BYTES = 1 << 20


def refuse_known(
    inputs: Sequence[StrPath], storage_options: Mapping[str, Any] | None, cause: RlioError
) -> None:
    """Raise, from ``cause``, where one of ``inputs`` is in a layout that no reader takes.

    Raises:
        UnknownLayout: One is.
    """
    for value in inputs:
        layout = recognise(value, storage_options=storage_options if is_uri(os.fspath(value)) else None)
        if layout is not None and layout.reader is None:
            raise layout.refusal(uri=cause.uri or os.fspath(value)) from cause


def recognise(place: StrPath | Storage, *, storage_options: Mapping[str, Any] | None = None) -> Layout | None:
    """Name the layout of the file or folder at ``place``.

    It reads a few names, and a few small files at most, of large folders too; so None does not say that
    nothing of the kind is there. A data set of rlio is none of these layouts.

    Args:
        place: A path or URI.
        storage_options: For fsspec.

    Raises:
        OptionError: ``place`` is no path, or its filesystem is not known.
    """
    if isinstance(place, Storage):
        return _Look(place).folder("", _DEPTH)
    location = locate(place, storage_options)
    look = _look_of(location.path)
    if look is not None:
        found = _at_file(InputFile(location.fs, location.path, location.uri, None), look)
        if found is not None:
            return found
    return _Look(Storage.open(place, storage_options=storage_options)).folder("", _DEPTH)


class _Look:
    """A bounded look into a folder."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._left = _FOLDERS

    def folder(self, folder: str, depth: int) -> Layout | None:
        """The layout of a folder, by its marks, else by its first data file, else by what is further down."""
        if not self._left:
            return None
        self._left -= 1
        try:
            children = self._storage.children(folder, most=_NAMES)
        except (RlioError, OSError):  # It may not be listed: then nothing is known of it.
            return None
        files = [name for name, is_folder in children if not is_folder and not name.startswith(".")]
        if HEADER in files:
            return None
        for name in files:
            if name in _MARKERS and (found := self._file(folder, name)):
                return found
        if any(name.endswith(".tfrecord") or ".tfrecord-" in name for name in files):
            return RLDS
        data = next((name for name in files if name not in _MARKERS and _look_of(name)), None)
        if data is not None and (found := self._file(folder, data)):
            return found
        below = [name for name, is_folder in children if is_folder and not name.startswith((".", "_"))]
        below.sort(key=lambda name: (name not in _FOLDERS_FIRST, name))
        for name in below if depth else ():
            if found := self.folder(_join(folder, name), depth - 1):
                return found
        return None

    def _file(self, folder: str, name: str) -> Layout | None:
        look, path = _look_of(name), _join(folder, name)
        assert look is not None
        full = f"{self._storage.root.rstrip('/')}/{path}"
        fs = None if self._storage.is_local else self._storage.fs
        return _at_file(InputFile(fs, full, self._storage.uri_of(path), None), look)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _at_file(file: InputFile, look: Callable[[IO[bytes]], Layout | None]) -> Layout | None:
    """What ``look`` makes of a file; None of one that cannot be opened, or is none of its kind."""
    try:
        with open_input(file) as stream:
            return look(stream)
    except (RlioError, OSError, ValueError, RecursionError, KeyError, RuntimeError, ImportError):
        # Damaged, gone, a folder, or h5py is not installed: nothing is known of it, which is the answer.
        return None


def _look_of(path: str) -> Callable[[IO[bytes]], Layout | None] | None:
    """What recognises a file of this name; None: nothing does."""
    lower = path.lower()
    if lower.endswith(".parquet"):
        return _look_at_parquet
    if lower.endswith((".hdf5", ".h5")):
        return _look_at_hdf5
    return _look_at_json if lower.endswith((".json", ".jsonl")) else None


def _look_at_parquet(stream: IO[bytes]) -> Layout | None:
    return layout_of_columns(read_metadata(stream, limits=DEFAULT_LIMITS).schema.to_arrow_schema().names)


def _look_at_hdf5(stream: IO[bytes]) -> Layout | None:
    import h5py

    with h5py.File(stream, "r") as file:
        return layout_of_hdf5(file)


def _look_at_json(stream: IO[bytes]) -> Layout | None:
    line = stream.readline(_LINE_BYTES)
    if len(line) == _LINE_BYTES and re.match(rb'\s*\{\s*"type"\s*:\s*"(SampleBatch|MultiAgentBatch)"', line):
        return RLLIB_JSON if b'"schema"' not in line[:200] else None
    try:
        return layout_of_json(_parsed(line))
    except ValueError:  # JSON over several lines.
        return layout_of_json(_parsed(line + stream.read(_JSON_BYTES)))


def _parsed(text: bytes) -> Any:
    DEFAULT_LIMITS.check_json(text, "JSON")
    return json.loads(text)
