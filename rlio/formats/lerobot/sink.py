"""`LeRobotSink`: writes LeRobot data sets of version 3.0. Alignment: `rlio.formats.lerobot.source`."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np

from rlio.batch.arrays import zero_leaf
from rlio.batch.encoded_picture import VideoFrame, is_encoded, row_type
from rlio.batch.picture_codecs import decode_column, file_of
from rlio.batch.pictures import encode_png
from rlio.errors import SchemaError
from rlio.formats.lerobot.source import (
    DONE,
    EPISODE,
    FINAL,
    FINAL_KNOWN,
    FRAME,
    INDEX,
    INFO,
    REWARD,
    TERMINATED,
    TRUNCATED,
)
from rlio.formats.sink import Origin, PreparedEpisode
from rlio.storage.filesystem import Storage
from rlio.support.options import check_choice, check_number

__all__ = ["LeRobotSink"]

_TIME, _TASK = "timestamp", "task_index"
# LeRobot's own, in seconds.
_TOLERANCE: Final = 1e-4
_FILES_IN_CHUNK: Final = 1000
_FILE_MB: Final = 100
_VIDEO_MB: Final = 200
# Pictures of which the statistics are made at once, in floats of eight bytes.
_PICTURES: Final = 16
_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_EPISODES = "meta/episodes/chunk-000/file-000.parquet"
_TASKS = "meta/tasks.parquet"
_STATS = "meta/stats.json"
_WHOLE = {"dtype": "int64", "shape": [1], "names": None}


class LeRobotSink:
    """Writes episodes as a LeRobot data set of version 3.0; an `EpisodeSink`.

    Observations are the features ``observation.state``, or ``observation.image`` (a picture), or one feature
    ``observation.<key>`` for each key of a dict; pictures are PNG in the Parquet files, or the files that the
    source has. Videos of the source are the same files, whole, even if only some of their episodes are
    written: if the first episode has consecutive frames of one, the feature is a video. Each Parquet file is
    built in memory and has about 100 MB. A sink for the folder of an interrupted
    sink begins again.

    Args:
        storage: The folder.
        origin: ``extra`` may have ``fps``, ``tasks`` and ``task_numbers``, as those of `LeRobotSource` have.
        fps: Frames a second; None: the origin's, or else 1, so that seconds are steps.
        task: The task of the episodes in words, if the origin states none.
        videos: ``"keep"`` the videos of the source; or ``"decode"`` them: frames are PNG.

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
        videos: Literal["keep", "decode"] = "keep",
    ) -> None:
        self._keeps_videos = check_choice("videos", videos, ("keep", "decode")) == "keep"
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
        self._storage = storage
        self._features: dict[str, dict[str, Any]] = {}
        self._stats: dict[str, _Statistics] = {}
        #: Feature -> digest of each of its videos -> the number of its file.
        self._videos: dict[str, dict[bytes, int]] = {}
        self._rows: list[dict[str, Any]] = []
        self._paths: set[str] = set()
        self._file = 0
        self._stream = io.BytesIO()
        self._writer: Any = None

    def takes(self, name: str, column: np.ndarray) -> bool:
        """Whether a column is the feature of LeRobot that has its name; see `EpisodeSink`."""
        if name == _TASK and len(self._tasks) > 1:
            return column.dtype == np.int64 and self._tasks.keys() >= set(column.tolist())
        times = np.arange(len(column)) / self._fps
        return name == _TIME and column.dtype == np.float32 and bool((abs(column - times) < _TOLERANCE).all())

    def write(self, episode: PreparedEpisode) -> None:
        """Add one episode; see `EpisodeSink`."""
        if not self.episodes:
            self._storage.remove(INFO)  # From now on the folder is no data set until `close`.
        columns = self._columns(episode)
        videos: dict[str, Any] = {}
        for name, column in columns.items():
            if is_encoded(column) and column[0].codec == "video":
                if (found := self._video(name, column, episode)) is None:
                    columns[name] = decode_column(column)
                else:
                    videos |= found
        if not self.episodes:
            self._features = {
                name: self._video_feature(name, column) if name in self._videos else _feature(column)
                for name, column in columns.items()
            }
        self._write_rows(columns)
        self._count(columns)
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
                **videos,
            }
        )
        self.episodes += 1
        self._frames += len(episode)
        if self._stream.tell() >= _FILE_MB << 20:
            self._end_file()

    def _write_rows(self, columns: Mapping[str, np.ndarray]) -> None:
        """Add the features of an episode that are no videos to the file, as a row group."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table(
            {
                name: _to_arrow(column, self._features[name])
                for name, column in columns.items()
                if name not in self._videos
            }
        )
        if self._writer is None:
            self._stream = io.BytesIO()
            # Floats and files of pictures seldom repeat: a dictionary of them takes a third of the time.
            few = [field.name for field in table.schema if not _is_varied(field.type)]
            self._writer = pq.ParquetWriter(
                self._stream, table.schema, compression="snappy", use_dictionary=few
            )
        self._writer.write_table(table, row_group_size=max(1, len(table)))

    def _count(self, columns: Mapping[str, np.ndarray]) -> None:
        """Take the features of an episode into the statistics."""
        for name, column in columns.items():
            stats = self._stats.setdefault(name, _Statistics())
            if self._features[name]["dtype"] in ("image", "video"):
                for start in range(0, len(column), _PICTURES):
                    part = column[start : start + _PICTURES]
                    stats.add(decode_column(part) if is_encoded(part) else part, is_picture=True)
            elif column.dtype.kind in "biuf" and len(column):
                stats.add(column, is_picture=False)

    def _columns(self, episode: PreparedEpisode) -> dict[str, np.ndarray]:
        """Features of an episode, by name."""
        steps, frames = len(episode), np.arange(len(episode))
        terminated, truncated = episode.ends
        columns = _named(episode.obs, "observation") | _named(episode.actions, "action")
        if episode.declares_final:
            for name, leaf in _named(episode.new_obs, "observation").items():
                is_text = leaf.dtype == object and not is_encoded(leaf)
                column = np.full_like(leaf, "") if is_text else zero_leaf(leaf, len(leaf))
                column[-1:] = leaf[-1:]
                columns[FINAL + name.removeprefix("observation")] = column
            columns[FINAL_KNOWN] = (frames == steps - 1) & episode.has_final_observation
        if episode.rewards is not None:
            columns[REWARD] = episode.rewards
        columns |= {DONE: terminated | truncated, TERMINATED: terminated, TRUNCATED: truncated}
        return {
            **columns,
            _TIME: (frames / self._fps).astype(np.float32),
            _TASK: np.full(steps, min(self._tasks)),
            **episode.extra_outputs,
            FRAME: frames,
            EPISODE: np.full(steps, self.episodes),
            INDEX: self._frames + frames,
        }

    def _video(self, name: str, column: np.ndarray, episode: PreparedEpisode) -> dict[str, Any] | None:
        """What is known of an episode whose frames are those of a video; None: they become PNG.

        Raises:
            SchemaError: They are not consecutive, and those of the episodes before are.
        """
        begin = None
        if self._keeps_videos and not episode.declares_final:
            begin = _begin_in_video(column, self._fps)
        if begin is None:
            if name in self._videos:
                raise SchemaError(
                    f"the frames of an episode are not consecutive frames of one video, {self._fps:g} a "
                    "second, as those of the episodes before are: options={'videos': 'decode'} writes PNG",
                    column=name,
                )
            return None
        if self.episodes and name not in self._videos:
            return None
        stream, numbers = column[0].stream, self._videos.setdefault(name, {})
        if stream.digest not in numbers:
            numbers[stream.digest] = len(numbers)
            chunk, file = divmod(numbers[stream.digest], _FILES_IN_CHUNK)
            self._put(_VIDEO.format(video_key=name, chunk_index=chunk, file_index=file), stream.content())
        chunk, file = divmod(numbers[stream.digest], _FILES_IN_CHUNK)
        found: dict[str, Any] = {"chunk_index": chunk, "file_index": file}
        found |= {"from_timestamp": begin, "to_timestamp": begin + len(column) / self._fps}
        return {f"videos/{name}/{key}": value for key, value in found.items()}

    def _video_feature(self, name: str, column: np.ndarray) -> dict[str, Any]:
        feature = {**_feature(column), "dtype": "video"}
        height, width, channels = feature["shape"]
        known = {
            "height": height,
            "width": width,
            "channels": channels,
            "fps": self._fps,
            "is_depth_map": False,
        }
        known |= column[0].stream.about()
        feature["info"] = {**{f"video.{key}": value for key, value in known.items()}, "has_audio": False}
        return feature

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
        stats = {name: found.as_json() for name, found in self._stats.items() if found.count}
        self._put(_STATS, json.dumps(stats).encode())
        for folder in ("data", "meta", "videos"):  # Of an interrupted sink that had written more.
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
            "video_path": _VIDEO if self._videos else None,
            "features": self._features,
        }
        self._storage.put(INFO, json.dumps(info, indent=4).encode())

    def abort(self) -> None:
        """Release everything."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _named(column: Any, prefix: str) -> dict[str, np.ndarray]:
    """Feature name -> array, of observations or actions."""
    if isinstance(column, dict):
        return {f"{prefix}.{key}": part for key, part in column.items()}
    if prefix == "observation":
        prefix += ".image" if _is_picture(column) else ".state"
    return {prefix: column}


def _begin_in_video(column: np.ndarray, fps: float) -> float | None:
    """When the first frame is shown, in seconds; None: they are not consecutive frames of one video."""
    frames = column.tolist()
    if not all(isinstance(frame, VideoFrame) for frame in frames):
        return None
    if any(frame.stream.digest != frames[0].stream.digest for frame in frames):
        return None
    seconds = np.array(frames[0].stream.seconds([frame.time for frame in frames]))
    begin = float(seconds[0])
    expected = begin + np.arange(len(frames)) / fps
    return begin if (abs(seconds - expected) < _TOLERANCE).all() else None


def _is_picture(array: np.ndarray) -> bool:
    dtype, shape = row_type(array)
    return dtype == np.uint8 and len(shape) == 3 and shape[2] in (1, 3, 4)


def _feature(column: np.ndarray) -> dict[str, Any]:
    """What LeRobot's metadata says of a column."""
    if _is_picture(column):
        names = ["height", "width", "channels"]
        return {"dtype": "image", "shape": list(row_type(column)[1]), "names": names}
    dtype = "string" if column.dtype == object else column.dtype.name
    return {"dtype": dtype, "shape": list(column.shape[1:]) or [1], "names": None}


def _to_arrow(column: np.ndarray, feature: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    if feature["dtype"] == "image":
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        files = map(file_of, column) if is_encoded(column) else encode_png(column)
        return pa.array([{"bytes": file, "path": None} for file in files], kind)
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


def _is_varied(kind: Any) -> bool:
    """Whether values of a type of Arrow are of floats or bytes, or nested."""
    import pyarrow as pa

    return bool(pa.types.is_nested(kind) or pa.types.is_floating(kind) or pa.types.is_binary(kind))


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
        self.count = self._weight = 0
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
        mean = values.mean(0)
        square = ((values - mean) ** 2).sum(0).reshape(shape)
        mean = mean.reshape(shape)
        both = self._weight + len(values)
        difference = mean - self._mean
        self._mean = self._mean + difference * (len(values) / both)
        self._square = self._square + square + difference**2 * (self._weight * len(values) / both)
        self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)
        self.count += len(column)
        self._weight = both

    def as_json(self) -> dict[str, Any]:
        found = {"min": self._low, "max": self._high, "mean": self._mean}
        listed = {name: value.tolist() for name, value in found.items()}
        return {**listed, "std": np.sqrt(self._square / self._weight).tolist(), "count": [self.count]}
