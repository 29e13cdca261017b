"""LeRobot data sets, versions 2 and 3.

Alignment: an episode of N frames has N rows; the features ``next.*`` of frame t belong to action t. The frame
after the last action is usually absent: ``new_obs`` of the last row is then zeros, and ``new_obs_valid``
False. ``next.observation.final``, a feature that rlio adds, holds it in the last row of an episode;
``next.observation.final_known`` is false there if it is not known.

``observation.<key>`` are the parts of ``obs`` (``observation.state`` or ``observation.image`` alone is
``obs`` itself), ``action`` or ``action.<key>`` are ``actions``. ``next.terminated`` and ``next.truncated``,
which rlio adds, are the ends. Without them an episode is terminated if ``next.done`` is true in its last
frame, and truncated otherwise, because the record ends there. In earlier frames ``next.done`` ends nothing:
data of robots often have it in every frame in which the task is done. Other features keep their names, which
must not be those of rlio's own columns; ``timestamp``, and ``task_index`` of a single task, are read only if
they are requested.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, Literal

import numpy as np

from rlio.batch import SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.columns import AGENT_ID, TRAJECTORY, Columns, is_per_sequence
from rlio.batch.encoded_picture import VideoFrame
from rlio.batch.nested import map_structure
from rlio.batch.picture_codecs import decode_column, encoded_column
from rlio.errors import CorruptData, UnknownLayout, excerpt
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.arrow_columns import to_column
from rlio.formats.files.inputs import Guard
from rlio.formats.files.json_files import parse_json, read_object, whole_number
from rlio.formats.files.parquet_files import ParquetFiles
from rlio.formats.files.value_arrays import flags_in, one_a_row
from rlio.formats.format import Format, Holds, Marks, with_all_of
from rlio.formats.place import Place
from rlio.formats.sink import Origin
from rlio.limits import Limits
from rlio.schemas.leaves import leaf_name
from rlio.source.episodes import measure_first, with_next_obs, without_final_obs
from rlio.source.videos import VideoStream, video_library
from rlio.storage import InputFile, InputFiles, Span
from rlio.support.calls import closing_on_error
from rlio.support.options import check_choice
from rlio.support.progress import each

#: The file that describes the whole, and names of features.
INFO: Final = "meta/info.json"
FINAL: Final = "next.observation.final"
#: Whether the last frame has it; in the frames before, it is not known.
FINAL_KNOWN: Final = "next.observation.final_known"
TERMINATED, TRUNCATED, DONE, REWARD = "next.terminated", "next.truncated", "next.done", "next.reward"
FRAME, EPISODE, INDEX = "frame_index", "episode_index", "index"
_FLAGS: Final = (TERMINATED, TRUNCATED, DONE)
#: Features that are columns of other names.
_NAMED: Final = (*_FLAGS, REWARD, FINAL_KNOWN)
#: Features that every data set of LeRobot has.
_INDICES: Final = ("timestamp", FRAME, EPISODE, INDEX, "task_index")

#: The way out where the description of a data set is not read; the frames are rows of Parquet.
AS_TABLE: Final = (
    "read its frames as a table: rlio.read('FOLDER/data/**/*.parquet', mapping=rlio.Mapping(columns={'obs': "
    "'observation.state', 'actions': 'action'}, episode='episode_index'))"
)

FORMAT = Format(
    name="lerobot",
    title="LeRobot",
    marks=Marks(
        json=with_all_of(
            {"codebase_version", "features", "total_episodes"},
            {"fps", "features", "total_episodes"},  # Its version is missing, which is said when it is opened.
            {"episode_index", "tasks", "length"},
            {"episode_index", "stats"},
        ),
        columns=with_all_of({"episode_index", "frame_index"}, {"episode_index", "dataset_from_index"}),
    ),
    source="rlio.formats.lerobot.source:LeRobotSource",
    writer="rlio.formats.lerobot.sink:LeRobotSink",
    holds=Holds(
        obs="keys",
        actions="keys",
        extra="array",
        texts=frozenset(("obs", "actions", "extra")),
        axes=6,
        slash=False,
        named=frozenset(("timestamp", "task_index")),
        reserved="|".join(
            [*map(re.escape, (*_INDICES, *_NAMED)), rf"({re.escape(FINAL)}|observation|action)(\..*)?"]
        ),
        lone_keys=frozenset(("state", "image")),
        rewards="numbers",
        needs_rewards=False,
        pictures=frozenset(("png", "jpeg", "video")),
        final_obs="declared",
        ids="none",
        start=False,
        row_shape=False,
        uniform="dtypes",
    ),
    root=("meta/info.json",),
    rootless="data sets of LeRobot v1 have meta_data/info.json instead, and others are incomplete without "
    f"it: convert v1 with LeRobot (docs/foreign.md), or {AS_TABLE}",
    home=("HF_LEROBOT_HOME", "~/.cache/huggingface/lerobot"),
    about="Frames after the last action are usually absent. Ends are those of next.done in the last frame.",
)

#: Columns of rlio that no feature may be: the reader makes them, or episodes have no such column.
_OURS: Final = TRAJECTORY | {AGENT_ID, Columns.DONES}
_EPISODE_FILES = re.compile(r"meta/episodes/(?:[^./][^/]*/)*[^./][^/]*\.parquet")
_FIELD = re.compile(r"\{(\w+)(?::0?([1-9])d)?\}")
#: ``observation.<key>`` that is ``obs`` itself if it is the only one.
_PLAIN = ("", "state", "image")
# Frames that a decoder keeps besides.
_DECODER_FRAMES: Final = 8


class LeRobotSource:
    """The episodes of one data set; an `EpisodeSource`.

    Args:
        place: The data set.
        limits: Bounds on the files.
        videos: ``"decode"`` frames (PyAV, extra ``video``), or ``"skip"`` the features that are videos.

    Attributes:
        version: That of the format.
        sizes: Bytes of the files with rows, and of the videos.
        origin: The tasks, their numbers unless these are 0, 1, ..., and the frames a second, as ``extra``.
        notes: What is not read or not known.
        inputs: See `SpanSource`.
    """

    spaces = None
    reads_parts = True

    def __init__(self, place: Place, *, limits: Limits, videos: Literal["decode", "skip"] = "decode") -> None:
        check_choice("videos", videos, ("decode", "skip"))
        self._place, self._limits = place, limits
        self.uri: str = place.uri
        storage = place.root()
        self._info = read_object(storage, INFO, limits=limits)
        self._where = storage.uri_of(INFO)
        self.version: str = _checked_version(self._info.get("codebase_version"), self._where)
        self._is_v3 = self.version.startswith("v3")
        self._sizes = {entry.path: entry.size for entry in storage.list(limit=limits.listed_names)}
        self._features = self._read_features()
        self._check_names()
        self._notes: list[str] = []
        #: (episode, first frame) of what was read -> frames before the last one in which next.done is true.
        self._early_dones: dict[tuple[int, int], int] = {}
        self._videos = [name for name, about in self._features.items() if about["dtype"] == "video"]
        self._take_videos(videos)
        self._episodes = self._read_episodes()
        self.lengths: list[int] = [whole_number(about, "length", uri=self.uri) for about in self._episodes]
        self._check_totals()
        self._place_episodes()
        self._allowance = Allowance(limits, stored=sum(size or 0 for size in self._sizes.values()))
        self._parquet = ParquetFiles(self.files, limits)
        self.inputs: InputFiles = self._parquet.inputs
        self._streams: dict[str, VideoStream] = {}
        #: What each ``task_index`` stands for; the numbers need not be 0, 1, ...
        self._task_texts = self._tasks()
        self.origin: Origin = Origin(uri=self.uri, extra=self._about_tasks())
        self._note_absences()
        shortest = min(filter(None, self.lengths), default=0)
        with closing_on_error(self):
            self.row_bytes: int = 1
            if shortest:
                others = (number for number, steps in enumerate(self.lengths) if steps)
                self.row_bytes = measure_first(
                    (self.lengths.index(shortest), *others), lambda episode: self.load(episode, None)
                )
        self._early_dones.clear()

    @property
    def notes(self) -> list[str]:
        """What is not read or not known, each a sentence."""
        if not self._early_dones:
            return list(self._notes)
        frames, episodes = sum(self._early_dones.values()), len({number for number, _ in self._early_dones})
        return [
            *self._notes,
            f"next.done is true in {frames} frames before the last one of their episodes ({episodes} "
            "episodes): these frames do not end an episode.",
        ]

    # ---- what describes the whole ----

    def _take_videos(self, videos: Literal["decode", "skip"]) -> None:
        """Leave out the features that are videos, or check that they can be decoded."""
        if self._videos and videos == "skip":
            self._notes.append(f"Videos are not read: {excerpt(self._videos)}.")
            skipped = {*self._videos, *(FINAL + name.removeprefix("observation") for name in self._videos)}
            self._features = {n: about for n, about in self._features.items() if n not in skipped}
            self._videos = []
        if self._videos:
            skip = "format_options={'videos': 'skip'} reads all else"
            if depth := [name for name in self._videos if _is_depth(self._info["features"][name])]:
                raise UnknownLayout(
                    f"the videos {excerpt(depth)} are depth maps, whose codes stand for distances: rlio "
                    f"decodes pictures alone; {skip}",
                    uri=self._where,
                )
            video_library(f"the videos {excerpt(self._videos)} ({skip})")
            self._notes.append(self._about_videos())

    def _place_episodes(self) -> None:
        """Find the file and the first row of each episode, and the sizes of the files."""
        self._paths = [self._path("data_path", number, "data") for number in range(len(self.lengths))]
        #: The row in its file at which each episode begins, and the rows of each file.
        self._starts: list[int] = []
        rows = dict.fromkeys(self._paths, 0)
        for path, length in zip(self._paths, self.lengths, strict=True):
            self._starts.append(rows[path])
            rows[path] += length
        self._file_rows = list(rows.values())
        self._numbers = {path: number for number, path in enumerate(rows)}
        self.files: Sequence[InputFile] = [self._place.file(path, self._sizes[path]) for path in rows]
        self.beside: Sequence[InputFile] = [
            self._place.file(path, size) for path, size in self._sizes.items() if path not in rows
        ]
        videos_read = {path for path in self._sizes if path.startswith("videos/") and self._videos}
        self.sizes: list[int | None] = [self._sizes[path] for path in (*rows, *sorted(videos_read))]

    def _about_tasks(self) -> dict[str, Any]:
        """The frames a second and the tasks, with their numbers unless these are 0, 1, ..."""
        about = {"fps": self._info.get("fps"), "tasks": list(self._task_texts.values())}
        if list(self._task_texts) != list(range(len(self._task_texts))):
            about["task_numbers"] = list(self._task_texts)
        return about

    def _about_videos(self) -> str:
        """What a conversion makes of videos."""
        parts = list(_parts(self._features, "observation"))
        keys = [name.removeprefix("observation").removeprefix(".") for name in self._videos]
        is_one = len(parts) == 1 and parts[0] in _PLAIN
        shown = {
            Columns.OBS if is_one else leaf_name(Columns.OBS, (key,)): "png" for key in keys if key in parts
        }
        return (
            "Frames of videos are decoded when they are read. A conversion into a data set of rlio keeps the "
            f"videos; it stores PNG with options={{'pictures': {shown}}}, raw frames with "
            "{'pictures': 'frames'}."
        )

    def _note_absences(self) -> None:
        data = {path for path in self._sizes if path.startswith("data/") and path.endswith(".parquet")}
        if unused := sorted(data.difference(self._paths)):
            self._notes.append(f"Data files of no episode are not read: {excerpt(unused)}.")
        if REWARD not in self._features:
            self._notes.append("There are no rewards.")
        if self._features.keys().isdisjoint(_FLAGS):
            self._notes.append("It is not known why episodes ended: they are truncated.")

    def _read_features(self) -> dict[str, dict[str, Any]]:
        found = self._info.get("features")
        if not isinstance(found, dict):
            raise CorruptData(f"features is {excerpt(found)}, expected an object", uri=self._where)
        features: dict[str, dict[str, Any]] = {}
        for name, about in found.items():
            shape = about.get("shape") if isinstance(about, dict) else None
            if (
                not isinstance(shape, list)
                or not all(type(n) is int and n > 0 for n in shape)
                or not isinstance(about.get("dtype"), str)
            ):
                raise CorruptData(f"feature {excerpt(name)} is {excerpt(about)}", uri=self._where)
            features[name] = {"dtype": about["dtype"], "shape": tuple(shape)}
        return features

    def _check_names(self) -> None:
        """Refuse features that cannot be told from rlio's columns, and parts without a final observation."""
        if taken := sorted(name for name in self._features if name in _OURS or is_per_sequence(name)):
            raise UnknownLayout(
                f"found the features {excerpt(taken)}, whose names mean something else in rlio: rename them",
                uri=self._where,
            )
        now, final = (set(_parts(self._features, prefix)) for prefix in ("observation", FINAL))
        if final and now != final:
            lone = [*(f"observation.{key}" for key in sorted(now - final))]
            lone += [f"{FINAL}.{key}" for key in sorted(final - now)]
            raise UnknownLayout(
                f"found {excerpt([name.rstrip('.') for name in lone])} without its counterpart, expected the "
                f"same keys of observation and of {FINAL}: add the absent features, or leave out {FINAL}",
                uri=self._where,
            )

    def _read_episodes(self) -> list[dict[str, Any]]:
        """What is stored of each episode, by its index, which is 0, 1, ..."""
        paths = ["meta/episodes.jsonl"]
        if self._is_v3:
            # Files of operating systems and editors, such as ._file-000.parquet, are none of LeRobot's.
            paths = sorted(path for path in self._sizes if _EPISODE_FILES.fullmatch(path))
        found = [about for path in each(paths) for about in self._records(path, without="stats/")]
        if not all(isinstance(about, dict) for about in found):
            raise CorruptData("found an episode that is not an object", uri=self.uri)
        found.sort(key=lambda about: whole_number(about, EPISODE, uri=self.uri))
        for number, about in enumerate(found):
            if about[EPISODE] != number:
                where = self.uri if self._is_v3 else self._place.root().uri_of(paths[0])
                raise CorruptData(f"episode {number} is absent, or listed twice", uri=where)
        return found

    def _records(self, path: str, *, without: str | None = None) -> list[Any]:
        """The rows of a small file of JSON lines or Parquet.

        Args:
            path: Where it is.
            without: Beginning of columns of Parquet that are not read.
        """
        if path.endswith(".jsonl"):
            text = self._place.root().read(path, limit=self._limits.schema_bytes)
            uri = self._place.root().uri_of(path)
            self._limits.check_json(text, path)
            lines = (line for line in text.splitlines() if line.strip())
            return [parse_json(line, path, uri=uri, limits=self._limits) for line in lines]
        file = ParquetFiles([self._place.file(path, self._sizes[path])], self._limits)
        with closing(file), file.guarded(0):
            names = file.file(0).arrow.schema_arrow.names
            chosen = [name for name in names if without is None or not name.startswith(without)]
            rows: list[dict[str, Any]] = file.all(0, chosen).to_pylist()
            return rows

    def _tasks(self) -> dict[int, str]:
        """What ``task_index`` stands for, in the order of the numbers; nothing if the file is absent."""
        path = "meta/tasks.parquet" if self._is_v3 else "meta/tasks.jsonl"
        if path not in self._sizes:
            return {}
        file = self._place.file(path, self._sizes[path])
        with Guard(file, format="a table of tasks"):
            found = self._records(path)
            found.sort(key=lambda row: whole_number(row, "task_index", uri=file.uri))
            texts: dict[int, Any] = {
                row["task_index"]: next((value for name, value in row.items() if name != "task_index"), None)
                for row in found
            }
            if len(texts) < len(found):
                raise CorruptData("found two tasks of one number")
            if not all(isinstance(text, str) for text in texts.values()):
                raise CorruptData("found a task that is not text")
            return texts

    def _check_totals(self) -> None:
        for name, count in (("total_episodes", len(self.lengths)), ("total_frames", sum(self.lengths))):
            stated = whole_number(self._info, name, uri=self._where)
            if stated != count:
                raise CorruptData(f"{name} is {stated}, but the episodes have {count}", uri=self._where)
        if not self._is_v3:
            return
        end = 0
        for number, (about, length) in enumerate(zip(self._episodes, self.lengths, strict=True)):
            start, stop = (
                whole_number(about, f"dataset_{name}_index", uri=self.uri) for name in ("from", "to")
            )
            if start != end or stop - start != length:
                raise CorruptData(
                    f"the metadata places episode {number} of {length} frames at the rows {start} to {stop}, "
                    f"expected {end} to {end + length}",
                    uri=self.uri,
                )
            end = stop

    def _path(self, field: str, episode: int, prefix: str, video: str = "") -> str:
        """The file of an episode by a template of the metadata, into which no other fields are put."""
        template = self._info.get(field)
        about = self._episodes[episode]
        values: dict[str, Any] = {"episode_index": episode, "video_key": video}
        if self._is_v3:
            for name in ("chunk_index", "file_index"):
                values[name] = whole_number(about, f"{prefix}/{name}", uri=self.uri)
        else:
            size = whole_number(self._info, "chunks_size", uri=self._where)
            values["episode_chunk"] = episode // max(1, size)

        def put(match: re.Match[str]) -> str:
            if match[1] not in values:
                raise CorruptData(f"{field} has the unknown field {match[0]}", uri=self._where)
            return str(values[match[1]]).zfill(int(match[2] or 0))

        if not isinstance(template, str):
            raise CorruptData(f"{field} is {excerpt(template)}, expected a path", uri=self._where)
        path = _FIELD.sub(put, template)
        # Only what is listed below the root is opened.
        if path not in self._sizes:
            raise CorruptData(f"the file of episode {episode} is absent: {excerpt(path)}", uri=self.uri)
        return path

    # ---- one episode ----

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode; see `EpisodeSource`."""
        return self.load_part(episode, 0, self.lengths[episode], columns)

    def load_part(self, episode: int, start: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read some steps of an episode; see `PartSource`."""
        number = self._numbers[self._paths[episode]]
        with self._parquet.guarded(number, episode):
            return self._rows(number, episode, range(start, stop), columns)

    def _rows(self, number: int, episode: int, part: range, columns: frozenset[str] | None) -> SampleBatch:
        # The observation after the last step of a part is that of the next frame.
        is_last, read = part.stop == self.lengths[episode], part
        if not is_last:
            read = range(part.start, part.stop + 1)
        names = [name for name in self._features if self._is_wanted(name, columns)]
        table = self._table(number, episode, self._stored(names), read)
        self._check_place(table, episode, read)
        found: dict[str, Any] = {}
        for name in names:
            is_obs = name.split(".")[0] == "observation"
            frames, rows_of = (read, table) if is_obs else (part, table.slice(0, len(part)))
            is_video = name in self._videos
            found[name] = (
                self._video(name, episode, frames) if is_video else self._column(name, rows_of, number)
            )
        rows: dict[str, Any] = {}
        if obs := _parts(found, "observation"):
            final = _parts(found, FINAL)
            is_one = len(obs) == 1 and next(iter(obs)) in _PLAIN
            plain = next(iter(obs.values())) if is_one else obs
            known = final and (not is_last or bool(found.get(FINAL_KNOWN, np.ones(1, np.bool_))[-1]))
            if final and is_last and known:
                last = next(iter(final.values())) if is_one else {key: final[key] for key in obs}
                joined = map_structure(lambda leaf, end: np.concatenate([leaf, end[-1:]]), plain, last)
                rows |= with_next_obs(joined)
            else:
                rows |= with_next_obs(plain) if known else without_final_obs(plain, len(part))
            if FINAL_KNOWN in self._features:  # All episodes have the same columns.
                rows.setdefault(Columns.NEXT_OBS_VALID, np.ones(len(part), np.bool_))
        if actions := _parts(found, "action"):
            rows[Columns.ACTIONS] = next(iter(actions.values())) if list(actions) == [""] else actions
        if REWARD in found:
            rows[Columns.REWARDS] = one_a_row(Columns.REWARDS, found[REWARD])
        rows[Columns.TERMINATEDS], rows[Columns.TRUNCATEDS] = self._ends(found, episode, part)
        rows[Columns.T] = np.arange(part.start, part.stop)
        rows |= {name: column for name, column in found.items() if not _is_part(name) and name not in _NAMED}
        return SampleBatch(rows)

    def _ends(self, found: dict[str, Any], episode: int, part: range) -> tuple[np.ndarray, np.ndarray]:
        """The flags terminateds and truncateds of a part of an episode."""
        none = np.zeros(len(part), np.bool_)
        terminated, truncated, done = (flags_in(name, found.get(name, none)).copy() for name in _FLAGS)
        #: The last row of the episode, if it is one of the part.
        last = slice(self.lengths[episode] - 1 - part.start, None)
        if TERMINATED not in found:
            terminated[last] = done[last] & ~truncated[last]
            if early := int(np.count_nonzero(done[: last.start])):
                self._early_dones[episode, part.start] = early
        if TERMINATED not in found or TRUNCATED not in found:
            truncated[last] = ~terminated[last]
        return terminated, truncated

    def _is_wanted(self, name: str, columns: frozenset[str] | None) -> bool:
        if name in (INDEX, EPISODE, FRAME):
            return False
        if columns is None:
            # What follows from the frame's number, or is the same everywhere, is given if it is asked for.
            return name != "timestamp" and (name != "task_index" or len(self._task_texts) > 1)
        if name.split(".")[0] == "observation" or name.startswith(FINAL):  # Also whether it is known.
            return not columns.isdisjoint((Columns.OBS, Columns.NEXT_OBS, Columns.NEXT_OBS_VALID))
        if name.split(".")[0] == "action":
            return Columns.ACTIONS in columns
        return name in columns or name in _FLAGS or (name == REWARD and Columns.REWARDS in columns)

    def _stored(self, names: Iterable[str]) -> frozenset[str]:
        """The columns of a file that some features are read from."""
        return frozenset((*names, FRAME, EPISODE)).difference(self._videos)

    def spans(
        self, first: int, stop: int, start: int, rows: int, columns: frozenset[str] | None
    ) -> Iterator[Span]:
        """See `SpanSource`. Of a file whose footer is not known, by its rows, with a margin."""
        names = self._stored(name for name in self._features if self._is_wanted(name, columns))
        for episode in range(first, stop):
            number, begin = self._numbers[self._paths[episode]], self._starts[episode] + start
            end, size, total = begin + rows, self.files[number].size or 0, self._file_rows[number]
            if columns is None and not self._parquet.is_open(number):
                yield number, 0, 0
                margin = size // 16  # Rows of one file differ in bytes.
                yield (
                    number,
                    max(0, size * begin // total - margin),
                    min(size, size * end // total + margin),
                )
            else:
                yield from self._parquet.spans_of_rows(number, begin, end + 1, names)

    def _table(self, number: int, episode: int, names: frozenset[str], frames: range) -> Any:
        """The rows of some frames of an episode."""
        import pyarrow as pa

        file = self._parquet.file(number)
        start, stop = self._starts[episode] + frames.start, self._starts[episode] + frames.stop
        absent = names - set(file.arrow.schema_arrow.names)
        if absent:
            raise CorruptData(f"the columns {excerpt(sorted(absent))} are absent")
        parts, first = [], 0
        for group in range(file.arrow.num_row_groups):
            rows = file.arrow.metadata.row_group(group).num_rows
            if first < stop and start < first + rows:
                table = self._parquet.group(number, group, names)
                begin = max(0, start - first)
                parts.append(table.slice(begin, min(rows, stop - first) - begin))
            first += rows
        if first != self._file_rows[number]:
            raise CorruptData(f"the file has {first} rows, and its episodes have {self._file_rows[number]}")
        return pa.concat_tables(parts) if parts else file.arrow.schema_arrow.empty_table()

    def _check_place(self, table: Any, episode: int, expected: range) -> None:
        indices = to_column(EPISODE, table.column(EPISODE).combine_chunks(), {})
        frames = to_column(FRAME, table.column(FRAME).combine_chunks(), {})
        numbers = np.arange(expected.start, expected.start + len(frames))
        wrong = np.flatnonzero((indices != episode) | (frames != numbers))
        if len(wrong):
            row = int(wrong[0])
            raise CorruptData(
                f"row {self._starts[episode] + numbers[row]} is frame {frames[row]} of episode "
                f"{indices[row]}, expected frame {numbers[row]} of episode {episode}"
            )

    def _column(self, name: str, table: Any, number: int) -> Any:
        values = table.column(name).combine_chunks()
        about = self._features[name]
        if about["dtype"] == "image":
            return self._pictures(name, values, about["shape"])
        column = to_column(name, values, {})
        if column is None:
            raise CorruptData(f"{name} has no value in any row, expected {about['dtype']}", column=name)
        if isinstance(column, (dict, tuple)) or column.dtype.hasobject:
            return column
        shape = about["shape"]
        is_number = shape == (1,) and not _is_part(name)
        if math.prod(shape) != math.prod(column.shape[1:]):
            raise CorruptData(f"{name} has rows of shape {column.shape[1:]}, expected {shape}")
        return column.reshape(len(column), *(() if is_number else shape))

    def _pictures(self, name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
        rows: list[bytes] = [row["bytes"] for row in values.to_pylist() if row and row["bytes"]]
        if len(rows) < len(values):
            raise UnknownLayout(f"{name} is in separate picture files, which are not read: embed them")
        # A file of one channel has no axis for it. Other shapes in the metadata may have the channels first.
        return encoded_column(rows, shape if shape[2:] == (1,) else None, spend=self._allowance.piece().spend)

    def _video(self, name: str, episode: int, frames: range) -> np.ndarray:
        """Some frames of an episode, which are not decoded."""
        path = self._path("video_path", episode, f"videos/{name}", name)
        if path not in self._streams:
            self._streams[path] = VideoStream(self._place.root(), path, size=self._sizes[path])
        begin = 0.0
        if self._is_v3:
            begin = float(self._episodes[episode].get(f"videos/{name}/from_timestamp") or 0.0)
        fps = float(self._info["fps"])
        times, shape = self._streams[path].times(begin + frames.start / fps, len(frames), fps)
        self._allowance.piece().spend((len(frames) + _DECODER_FRAMES) * math.prod(shape))
        column = object_column(VideoFrame(self._streams[path], time, shape) for time in times)
        # Final observations are pictures of another kind, and one column has one kind.
        return decode_column(column) if FINAL + name.removeprefix("observation") in self._features else column

    def close(self) -> None:
        """Close all files."""
        self._parquet.close()


def _parts(found: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Features ``prefix`` (as "") and ``prefix.<key>`` (as key)."""
    return {
        name[len(prefix) + 1 :]: column
        for name, column in found.items()
        if name == prefix or name.startswith(prefix + ".")
    }


def _is_part(name: str) -> bool:
    """Whether a feature is a part of observations or actions."""
    is_final = name == FINAL or name.startswith(FINAL + ".")
    return is_final or name.split(".")[0] in ("observation", "action")


def _checked_version(found: object, uri: str) -> str:
    """The version of a data set, if this module reads it."""
    if found is None:
        raise UnknownLayout(
            'codebase_version is missing, expected v2 or v3: add "codebase_version": "v2.1" to the file '
            'if meta/episodes.jsonl is there, or "v3.0" if meta/episodes/ is',
            uri=uri,
        )
    if not isinstance(found, str) or not re.fullmatch(r"v[23]\.\d+", found):
        raise UnknownLayout(
            f"found version {excerpt(found)}, expected v2 or v3: convert the data set with LeRobot "
            f"(docs/foreign.md), or {AS_TABLE}",
            uri=uri,
        )
    return found


def _is_depth(feature: Mapping[str, Any]) -> bool:
    """Whether LeRobot decodes a video into distances; the last two are its earlier spellings."""
    about = [one if isinstance(one, dict) else {} for one in (feature.get("info"), feature.get("video_info"))]
    return bool(about[0].get("is_depth_map") or any(one.get("video.is_depth_map") for one in about))
