"""`LeRobotSink`: writes LeRobot data sets of version 3.0. Alignment: `rlio.formats.lerobot.source`."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.errors import SchemaError, excerpt
from rlio.formats.files.images import encode_png
from rlio.formats.lerobot import source as lerobot
from rlio.formats.lerobot.source import (
    DONE,
    EPISODE,
    FINAL,
    FRAME,
    INDEX,
    INFO,
    REWARD,
    TERMINATED,
    TRUNCATED,
)
from rlio.formats.sink import Origin
from rlio.storage.filesystem import Storage
from rlio.support.options import check_number

__all__ = ["LeRobotSink"]

_TIME, _TASK = "timestamp", "task_index"
_FILES_IN_CHUNK: Final = 1000
_FILE_MB: Final = 100
_VIDEO_MB: Final = 200
_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_EPISODES = "meta/episodes/chunk-000/file-000.parquet"
_TASKS = "meta/tasks.parquet"
_STATS = "meta/stats.json"
_WHOLE = {"dtype": "int64", "shape": [1], "names": None}
_OWN: Final = frozenset((_TIME, _TASK, EPISODE, FRAME, INDEX))


class LeRobotSink:
    """Writes episodes as a LeRobot data set of version 3.0; an `EpisodeSink`.

    Observations are the features ``observation.state``, or ``observation.image`` (a picture), or one feature
    ``observation.<key>`` for each key of a dict; pictures are PNG in the Parquet files. Each file is built in
    memory and has about 100 MB. A sink for the folder of an interrupted sink begins again.

    Args:
        storage: The folder.
        origin: ``extra`` may have ``fps``, ``tasks`` and ``task_numbers``, as those of `LeRobotSource` have.
        fps: Frames a second; None: the origin's, or else 1, so that seconds are steps.
        task: The task of the episodes in words, if the origin states none.
        final_obs: Whether ``next.observation.final`` keeps the observation after the last step of each
            episode; None: if the first episode has one.

    Raises:
        OptionError: An option is illegal.
    """

    def __init__(
        self,
        storage: Storage,
        origin: Origin,
        *,
        fps: float | None = None,
        task: str = "",
        final_obs: bool | None = None,
    ) -> None:
        given = origin.extra.get("fps") if fps is None else fps
        self._fps = check_number("fps", 1 if given is None else given, above=0)
        tasks = origin.extra.get("tasks")
        if not isinstance(tasks, list) or not tasks:
            tasks = [task]
        #: What each ``task_index`` stands for.
        self._tasks: dict[int, str] = dict(
            zip(origin.extra.get("task_numbers") or range(len(tasks)), tasks, strict=True)
        )
        self.episodes: int = 0
        self._frames = 0
        self._storage, self._has_final = storage, final_obs
        self._features: dict[str, dict[str, Any]] = {}
        self._stats: dict[str, _Statistics] = {}
        #: What is lost with these options.
        self.loses: frozenset[str] = lerobot.FORMAT.loses | ({"final_obs"} if final_obs is False else set())
        self._rows: list[dict[str, Any]] = []
        self._paths: set[str] = set()
        self._file = 0
        self._stream = io.BytesIO()
        self._writer: Any = None

    def write(self, episode: Episode) -> None:
        """Add one episode; see `EpisodeSink`.

        Raises:
            SchemaError: Its columns differ from those of the first episode, are nested twice, or are objects
                or of a dtype that LeRobot does not have.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._has_final is None:
            self._has_final = episode.has_final_observation
        columns = self._columns(episode)
        features = {name: _feature(name, column) for name, column in columns.items()}
        if not self.episodes:
            self._storage.remove(INFO)  # From now on the folder is no data set until `close`.
            self._features = features
        elif features != self._features:
            names = {**features, **self._features}
            other = next(name for name in names if features.get(name) != self._features.get(name))
            raise SchemaError(
                f"found {excerpt(features.get(other))}, expected {excerpt(self._features.get(other))} as in "
                "the first episode",
                column=other,
            )
        arrays = {name: _to_arrow(column, features[name]) for name, column in columns.items()}
        table = pa.table(arrays)
        if self._writer is None:
            self._stream = io.BytesIO()
            self._writer = pq.ParquetWriter(self._stream, table.schema, compression="snappy")
        self._writer.write_table(table, row_group_size=max(1, len(table)))  # One row group an episode.
        for name, column in columns.items():
            if column.dtype.kind in "biuf" and len(column):
                is_picture = features[name]["dtype"] == "image"
                self._stats.setdefault(name, _Statistics()).add(column, is_picture=is_picture)
        used = sorted(set(columns[_TASK].tolist()))
        self._rows.append(
            {
                EPISODE: self.episodes,
                "tasks": [self._tasks[number] for number in used],
                "length": len(episode),
                "data/chunk_index": self._file // _FILES_IN_CHUNK,
                "data/file_index": self._file % _FILES_IN_CHUNK,
                "dataset_from_index": self._frames,
                "dataset_to_index": self._frames + len(episode),
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
        )
        self.episodes += 1
        self._frames += len(episode)
        if self._stream.tell() >= _FILE_MB << 20:
            self._end_file()

    def _columns(self, episode: Episode) -> dict[str, np.ndarray]:
        """Features of an episode, by name."""
        steps = len(episode)
        observations = _named(episode.observations, "observation", Columns.OBS)
        columns = {name: leaf[:steps] for name, leaf in observations.items()}
        columns |= _named(episode.actions, "action", Columns.ACTIONS)
        if self._has_final:
            if not episode.has_final_observation:
                raise SchemaError(
                    f"the observation after the last step of episode {excerpt(episode.id_)} is not known, "
                    "but those of others are: pass final_obs=False to leave them out",
                    column=Columns.NEXT_OBS,
                )
            for name, leaf in observations.items():
                if leaf.dtype.kind not in "biuf":
                    raise SchemaError("text has no final observation: pass final_obs=False", column=name)
                column = np.zeros_like(leaf[:steps])
                column[-1:] = leaf[-1:]
                columns[FINAL + name.removeprefix("observation")] = column
        ends = np.zeros((2, steps), np.bool_)
        ends[:, -1:] = [[episode.terminated], [episode.truncated]]
        columns |= {
            REWARD: to_numpy(episode.rewards),
            DONE: ends[0] | ends[1],
            TERMINATED: ends[0],
            TRUNCATED: ends[1],
        }
        for name, extra in episode.extra_outputs.items():
            if name not in _OWN:
                if isinstance(extra, (dict, tuple)) or name in columns:
                    raise SchemaError("found a nested column, expected one array", column=name)
                columns[name] = to_numpy(extra)
        frames = np.arange(steps)
        times, tasks = episode.extra_outputs.get(_TIME), episode.extra_outputs.get(_TASK)
        columns[_TIME] = (frames / self._fps).astype(np.float32) if times is None else to_numpy(times)
        columns[FRAME] = frames
        columns[EPISODE] = np.full(steps, self.episodes)
        columns[INDEX] = self._frames + frames
        columns[_TASK] = np.full(steps, min(self._tasks)) if tasks is None else to_numpy(tasks)
        if unknown := set(columns[_TASK].tolist()).difference(self._tasks):
            raise SchemaError(f"found no task for {max(unknown)}: pass data with tasks", column=_TASK)
        return columns

    def _end_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        chunk, file = divmod(self._file, _FILES_IN_CHUNK)
        self._put(_DATA.format(chunk_index=chunk, file_index=file), self._stream.getbuffer())
        self._stream = io.BytesIO()
        self._file += 1

    def _put(self, path: str, data: Any) -> None:
        self._storage.put(path, data)
        self._paths.add(path)

    def close(self) -> None:
        """Write the metadata of the data set; nothing if there is no episode."""
        import pyarrow as pa

        if not self.episodes:
            return
        self._end_file()
        self._put(_EPISODES, _parquet(pa.Table.from_pylist(self._rows)))
        self._put(_TASKS, _parquet(_task_table(self._tasks)))
        stats = {name: found.as_json() for name, found in self._stats.items()}
        self._put(_STATS, json.dumps(stats).encode())
        for folder in ("data", "meta"):  # Of an interrupted sink that had written more.
            for entry in self._storage.list(folder):
                if entry.path not in self._paths:
                    self._storage.remove(entry.path)
        info = {
            "codebase_version": "v3.0",
            "robot_type": None,
            "total_episodes": self.episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": _FILES_IN_CHUNK,
            "data_files_size_in_mb": _FILE_MB,
            "video_files_size_in_mb": _VIDEO_MB,
            "fps": int(self._fps) if self._fps == int(self._fps) else self._fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": _DATA,
            "video_path": None,
            "features": self._features,
        }
        self._storage.put(INFO, json.dumps(info, indent=4).encode())

    def abort(self) -> None:
        """Release everything."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _named(column: Any, prefix: str, name: str) -> dict[str, np.ndarray]:
    """Feature name -> array, of observations or actions."""
    if isinstance(column, dict):
        if any(isinstance(part, (dict, tuple)) for part in column.values()):
            raise SchemaError("found a dict in a dict, expected one level: LeRobot has features", column=name)
        if len(column) == 1 and next(iter(column)) in ("state", "image"):
            raise SchemaError(f"a dict of only {list(column)} would come back as one array", column=name)
        return {f"{prefix}.{key}": to_numpy(part) for key, part in column.items()}
    if isinstance(column, tuple):
        raise SchemaError("found a tuple, expected an array or a dict: LeRobot has features", column=name)
    array = to_numpy(column)
    if prefix == "observation":
        prefix += ".image" if _is_picture(array) else ".state"
    return {prefix: array}


def _is_picture(array: np.ndarray) -> bool:
    return array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] in (1, 3, 4)


def _feature(name: str, column: np.ndarray) -> dict[str, Any]:
    """What LeRobot's metadata says of a column."""
    if "/" in name:
        raise SchemaError("found '/' in the name of a feature, which LeRobot refuses", column=name)
    if _is_picture(column):
        names = ["height", "width", "channels"]
        return {"dtype": "image", "shape": list(column.shape[1:]), "names": names}
    if column.dtype.kind in "OU":
        if not all(isinstance(row, str) for row in column.tolist()):
            raise SchemaError("found objects, expected numbers or text", column=name)
        return {"dtype": "string", "shape": [1], "names": None}
    if column.dtype.kind not in "biuf" or column.ndim > 6 or 0 in column.shape[1:]:
        raise SchemaError(f"LeRobot has no {column.dtype} of shape {column.shape[1:]}", column=name)
    return {"dtype": column.dtype.name, "shape": list(column.shape[1:]) or [1], "names": None}


def _to_arrow(column: np.ndarray, feature: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    if feature["dtype"] == "image":
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        return pa.array([{"bytes": file, "path": None} for file in encode_png(column)], kind)
    if feature["dtype"] == "string":
        return pa.array(column.tolist(), pa.string())
    array = pa.array(np.ascontiguousarray(column).reshape(-1))
    shape = feature["shape"]
    if shape == [1]:
        return array
    if len(shape) == 1:
        return pa.FixedSizeListArray.from_arrays(array, shape[0])
    for size in reversed(shape):  # Lists of lists, as Hugging Face's ArrayND are stored.
        offsets = np.arange(0, len(array) + 1, size, dtype=np.int32)
        array = pa.ListArray.from_arrays(offsets, array)
    return array


def _parquet(table: Any) -> bytes:
    import pyarrow.parquet as pq

    stream = io.BytesIO()
    pq.write_table(table, stream, compression="snappy")
    return stream.getvalue()


def _task_table(tasks: Mapping[int, str]) -> Any:
    """The tasks as pandas stores a frame whose index they are, which is how LeRobot reads them."""
    import pyarrow as pa

    index = "__index_level_0__"
    text = {"name": None, "field_name": index, "pandas_type": "unicode", "numpy_type": "object"}
    about = {"index_columns": [index], "columns": [text], "column_indexes": [], "pandas_version": "2.0.0"}
    numbers = np.array(list(tasks), np.int64)
    table = pa.table({_TASK: numbers, index: pa.array(list(tasks.values()), pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(about)})


class _Statistics:
    """Minimum, maximum, mean and deviation of a feature along its last axis, of pictures by channel."""

    def __init__(self) -> None:
        self._count = self._weight = 0
        self._low, self._high = np.array(np.inf), np.array(-np.inf)
        self._mean = self._square = np.array(0.0)

    def add(self, column: np.ndarray, *, is_picture: bool) -> None:
        if is_picture:
            shape: tuple[int, ...] = (column.shape[3], 1, 1)
            values = column.reshape(-1, column.shape[3]) / 255.0
        else:
            # LeRobot's own are over all axes but the last.
            shape = column.shape[1:][-1:] or (1,)
            values = column.reshape(-1, *shape).astype(np.float64)
        low, high = values.min(0).reshape(shape), values.max(0).reshape(shape)
        mean = values.mean(0).reshape(shape)
        square = values.var(0).reshape(shape) * len(values)
        both = self._weight + len(values)
        difference = mean - self._mean
        self._mean = self._mean + difference * (len(values) / both)
        self._square = self._square + square + difference**2 * (self._weight * len(values) / both)
        self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)
        self._count += len(column)
        self._weight = both

    def as_json(self) -> dict[str, Any]:
        found = {"min": self._low, "max": self._high, "mean": self._mean}
        listed = {name: value.tolist() for name, value in found.items()}
        return {**listed, "std": np.sqrt(self._square / self._weight).tolist(), "count": [self._count]}
