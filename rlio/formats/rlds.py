"""RLDS: episodes in TFRecord files, as TensorFlow Datasets (TFDS) stores them.

A folder has ``features.json``, ``dataset_info.json`` and ``<name>-<split>.tfrecord-<i>-of-<n>``. A record is
an episode: its feature ``steps`` is flattened to lists over all steps, such as ``steps/observation/state``.

Alignment: step t has the observation, the action, and the reward and discount that followed that action. The
last step (``is_last``) has the observation after the last action, and an action, reward and discount without
meaning. So an episode of N + 1 steps gives N rows, and all observations are known. If the last step has
``is_terminal``, the episode terminated; otherwise it was truncated. An episode whose last step is not
``is_last`` has not ended: all its steps have actions, and the observation after the last one is not known.
Some data sets store an action that was taken and its reward in the last step too; ``last_step="action"``
reads it as a row without a final observation.

A sequence in a step (``tfds.features.Sequence`` of numbers) has any number of items: rows of a `rlio.Ragged`.
It is stored as two lists: ``steps/tokens/ragged_flat_values``, the items of all steps, and
``steps/tokens/ragged_row_lengths_0``, how many each step has.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.batch.encoded_picture import row_type
from rlio.batch.nested import map_structure, unflatten
from rlio.batch.picture_codecs import encoded_column
from rlio.batch.ragged import Ragged
from rlio.errors import (
    CorruptData,
    MissingColumn,
    OptionError,
    UnknownLayout,
    UnsafeData,
    excerpt,
)
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.inputs import Guard, in_column
from rlio.formats.files.json_files import NUMBERS, OURS, read_object
from rlio.formats.files.step_rows import flags_of, flat
from rlio.formats.files.tf_records import BYTES, FLOATS, INTS, Example, RecordFile, Values, floats_of, ints_of
from rlio.formats.format import Format, Marks, with_all_of
from rlio.formats.place import Place
from rlio.formats.sink import Origin
from rlio.limits import Limits
from rlio.source.episodes import with_next_obs, without_final_obs
from rlio.storage import InputFile, InputFiles, Span, each_file
from rlio.storage.open_files import OpenFiles
from rlio.support.calls import closing_on_error
from rlio.support.extras import needs
from rlio.support.options import check_choice
from rlio.support.progress import reached

FORMAT = Format(
    name="rlds",
    title="RLDS",
    marks=Marks(
        json=with_all_of({"pythonClassName", "featuresDict"}, {"fileFormat", "moduleName", "splits"}),
        files=lambda names: any(name.endswith(".tfrecord") or ".tfrecord-" in name for name in names),
    ),
    source="rlio.formats.rlds:RldsSource",
    root=("features.json", "dataset_info.json"),
    about="The last step of an episode is its final observation. Without is_terminal, ends are truncations.",
)

_FEATURES, _INFO = "features.json", "dataset_info.json"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_STEPS, _FIRST, _LAST, _TERMINAL = "steps", "is_first", "is_last", "is_terminal"
_COLUMNS: Final = {"observation": Columns.OBS, "action": Columns.ACTIONS, "reward": Columns.REWARDS}
_PICTURE = "picture"
_OPEN_FILES = 4
# Bytes of records, on average, of which all are read on a remote store: other requests take as long.
_SCANNED: Final = 1 << 20
#: Bytes that a whole number takes in memory, of which a file may have one.
_VARINT: Final = 8
#: Bytes that a text takes in memory, as `Limits.group_bytes` counts them.
_TEXT_BYTES = 64

_Path = tuple[str, ...]
_Bounds = dict[_Path, NDArray[np.int64] | None]


class _Opened(NamedTuple):
    """An episode that is read in parts: what the first part decoded for all.

    Attributes:
        example: Its features.
        bounds: Feature -> where its rows lie; see `Example.bounds`.
        ends: The flags of all steps; see `RldsSource._ends`.
    """

    example: Example
    bounds: _Bounds
    ends: dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Feature:
    """One leaf: shape and dtype of a step's value, or of one of them (object: text), and the encoding."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    encoding: str = "none"
    #: Whether a step has any number of such values.
    is_list: bool = False


_FLAG = _Feature((), np.dtype(np.bool_))
#: Lists of sequences in steps: the items of all steps, and how many each step has.
_ITEMS, _LENGTHS = "ragged_flat_values", "ragged_row_lengths_0"
_LENGTH = _Feature((), np.dtype(np.int64))


class RldsSource:
    """The episodes of one data set; an `EpisodeSource` that reads parts.

    A record is one episode with one checksum. So a long episode is read once as it is opened, in blocks, to
    compare the sum; its parts then decode the bytes of their own steps.

    Opening it reads the places of the features and the ends of each episode, and no other values.

    Args:
        place: The data set.
        limits: Bounds on the files.
        split: Name of the split that is read; None: all of them, in the order of ``dataset_info.json``.
        leave_out: Features of steps that are not read, with all below them, such as
            ``["observation/image"]``.
        last_step: What the step with ``is_last`` has: only the final ``"observation"``, as RLDS defines, or
            a real ``"action"`` and reward too.

    Attributes:
        origin: Name, version and config of the data set, as ``extra``.
        notes: What is not read or not known.
        inputs: See `SpanSource`.
    """

    spaces = None
    reads_parts = True

    def __init__(
        self,
        place: Place,
        *,
        limits: Limits,
        split: str | None = None,
        leave_out: Sequence[str] = (),
        last_step: Literal["observation", "action"] = "observation",
    ) -> None:
        check_choice("last_step", last_step, ("observation", "action"))
        self._place, self._limits = place, limits
        self._ends_in_action = last_step == "action"
        self.uri: str = place.uri
        storage = place.root()
        self._info = read_object(storage, _INFO, limits=limits)
        self._notes: list[str] = []
        self._steps: dict[_Path, _Feature] = {}
        self._about: dict[_Path, _Feature] = {}
        self._read_features(read_object(storage, _FEATURES, limits=limits), leave_out)
        fields = {"name": "name", "version": "version", "config": "configName"}
        extra = {ours: self._info[theirs] for ours, theirs in fields.items() if theirs in self._info}
        self.origin: Origin = Origin(uri=self.uri, extra=extra)
        counts = self._files(split)
        self.files: list[InputFile] = [place.file(name, size) for name, size, _ in counts]
        self.inputs: InputFiles = InputFiles(self.files)
        self._allowance = Allowance.of(self.files, limits)
        self._piece = self._allowance.piece()
        #: Of each episode: file, place, and whether its last step is a final observation.
        self._places: list[tuple[int, int, int]] = []
        self.lengths: list[int] = []
        self._doubtful: set[int] = set()
        self._headless: set[int] = set()
        self._empty = 0
        self._has_all_finals = True
        # Whether an episode ends, or is so damaged that it is not known.
        self._some_end = False
        #: Episodes of which parts were read, and the last one: its features, and the bounds of its steps.
        self._checked: set[int] = set()
        self._held: tuple[int, _Opened] | None = None
        self._open: OpenFiles[int, RecordFile] = OpenFiles(_OPEN_FILES, close=RecordFile.close)
        with closing_on_error(self):
            for number in each_file(self.files):
                with Guard(self.files[number], format="RLDS"):
                    self._index(number, counts[number][2])
            self._check_ended()
            self.row_bytes: int = self._measured()

    @property
    def notes(self) -> list[str]:
        """What is not read or not known, each a sentence."""
        notes = list(self._notes)
        if self._empty:
            notes.append(f"{self._empty} episodes have no step with an action, and give no rows.")
        if self._doubtful:
            notes.append(
                f"The last steps of {len(self._doubtful)} episodes have rewards other than zero. RLDS gives "
                "them no meaning, so they are not read; last_step='action' reads them."
            )
        if self._headless:
            notes.append(
                f"{len(self._headless)} episodes do not begin with is_first: t counts from their first step."
            )
        return notes

    # ---- what describes the whole ----

    def _read_features(self, found: Mapping[str, Any], leave_out: Sequence[str]) -> None:
        where = self._place.root().uri_of(_FEATURES)
        top = _children(found, where)
        sequence = top.pop(_STEPS, {}).get("sequence")
        if not isinstance(sequence, Mapping):
            raise UnknownLayout(
                f"found a TFDS data set of {excerpt(list(top))}, expected the feature steps of RLDS",
                uri=where,
            )
        steps = _children(sequence.get("feature"), where)
        seen = set()
        refused = {}
        for path, about in _leaves(steps, (), where, self._limits):
            name = "/".join(path)
            covering = [one for one in leave_out if name == one or name.startswith(one + "/")]
            seen.update(covering)
            if covering:
                self._notes.append(f"The feature {excerpt(name)} of steps is left out.")
            elif (feature := _feature(about)) is None or (feature.is_list and path[0] == "reward"):
                refused[name] = about
            else:
                self._steps[path] = feature
        if unknown := [one for one in leave_out if one not in seen]:
            raise OptionError(f"leave_out={excerpt(unknown)}: no such features of steps")
        if refused:
            raise UnknownLayout(
                f"found the features {excerpt(refused)} of steps, expected numbers and sequences of them, "
                "texts of a fixed shape and pictures: "
                f"format_options={{'leave_out': {excerpt(list(refused))}}} reads all else",
                uri=where,
            )
        self._check_names(where)
        for path, about in _leaves(top, (), where, self._limits):
            feature = _feature(about)
            if feature is None or feature.is_list or feature.shape or feature.encoding != "none":
                self._notes.append(f"The feature {excerpt('/'.join(path))} of episodes is not read.")
            else:
                self._about[path] = feature

    def _check_names(self, where: str) -> None:
        names = {path[0] for path in self._steps}
        if (_LAST,) not in self._steps:
            raise MissingColumn(
                f"found the features {excerpt(sorted(names))} of steps", column=_LAST, uri=where
            )
        for name in (_FIRST, _LAST, _TERMINAL):
            if self._steps.get((name,), _FLAG) != _FLAG:
                raise UnknownLayout(f"found {self._steps[(name,)]}, expected a bool", uri=where, column=name)
        if (_TERMINAL,) not in self._steps:
            self._notes.append("There is no is_terminal: episodes that ended are truncated.")
        if taken := sorted(names & OURS):
            raise UnknownLayout(
                f"found the features {taken} of steps, whose names mean something else in rlio: "
                f"format_options={{'leave_out': {taken}}} reads all else",
                uri=where,
            )
        pictures = ["/".join(path) for path, f in self._steps.items() if f.encoding == _PICTURE]
        if pictures:
            _pillow(pictures)

    def _files(self, split: str | None) -> list[tuple[str, int | None, int]]:
        """Name, bytes and records of each file."""
        uri = self._place.root().uri_of(_INFO)
        kind = self._info.get("fileFormat", "tfrecord")
        if kind != "tfrecord":
            raise UnknownLayout(
                f"found files of the kind {excerpt(kind)}, expected tfrecord: "
                "`tfds convert_format --out_file_format=tfrecord` writes them",
                uri=uri,
            )
        splits = self._info.get("splits")
        if not isinstance(splits, list) or not all(isinstance(one, Mapping) for one in splits):
            raise CorruptData(f"splits is {excerpt(splits)}, expected a list of objects", uri=uri)
        names = [one.get("name") for one in splits]
        if split is not None and split not in names:
            raise OptionError(f"split={excerpt(split)}: expected one of {excerpt(names)}", uri=uri)
        if split is None and len(splits) > 1:
            self._notes.append(f"The splits {excerpt(names)} are read one after the other.")
        sizes = {entry.path: entry.size for entry in self._place.root().list(limit=self._limits.listed_names)}
        found = []
        for one in splits:
            if split not in (None, one.get("name")):
                continue
            if one.get("filepathTemplate", _TEMPLATE) not in (_TEMPLATE, ""):
                raise UnknownLayout(f"found files named {excerpt(one['filepathTemplate'])}", uri=uri)
            counts = [_count(value, uri) for value in one.get("shardLengths", [])]
            for number, count in enumerate(counts):
                shard = f"{number:05d}-of-{len(counts):05d}"
                name = f"{self._info.get('name')}-{one.get('name')}.tfrecord-{shard}"
                if name not in sizes:
                    raise CorruptData(f"the file {excerpt(name)} is absent", uri=self.uri)
                found.append((name, sizes[name], count))
        return found

    # ---- records ----

    def _file(self, number: int, *, scans: bool = False) -> RecordFile:
        if (found := self._open.get(number)) is not None:
            return found
        return self._open.add(number, RecordFile(self.inputs.open(number, scans=scans), self._limits))

    def _index(self, number: int, expected: int) -> None:
        # Small records are read on the way from one to the next.
        file, records = self._file(number, scans=(self.files[number].size or 0) <= expected * _SCANNED), 0
        for start, size in file.places():
            reached(start, self.files[number].size or 0)
            records += 1
            self._piece = self._allowance.piece()
            try:
                last = self._column(file.glance(start, size), (_STEPS, _LAST), self._steps[(_LAST,)])
                steps = len(last) - int(last[-1:].any() and not self._ends_in_action)
                if not steps:  # No `load` follows, which would see that the flags are damaged.
                    file.read(start, size)
                self._has_all_finals &= steps < max(1, len(last))
                self._some_end |= bool(last[-1:].any()) or self._is_terminal(file.glance(start, size))
            except CorruptData:
                self._some_end = True
                steps = 1  # `load` raises it, so that it can be skipped.
            if steps:
                self._places.append((number, start, size))
                self.lengths.append(steps)
            self._empty += not steps
        if records != expected:
            raise CorruptData(f"{_INFO} says {expected} records, but the file has {records}")

    def _is_terminal(self, example: Example) -> bool:
        """Whether the last step of an episode is terminal."""
        feature = self._steps.get((_TERMINAL,))
        return feature is not None and bool(self._column(example, (_STEPS, _TERMINAL), feature)[-1:].any())

    def _check_ended(self) -> None:
        """Refuse data whose writer never said which step is the last: is it a row, or a final observation?"""
        if self.lengths and not self._some_end and not self._ends_in_action:
            raise UnknownLayout(
                f"found {len(self.lengths)} episodes of which none ends: is_last is false in all their "
                "steps, expected it in the last step of each; format_options={'last_step': 'action'} reads "
                "them as episodes that have not ended, if the actions of their last steps were taken",
                uri=self.uri,
            )

    def _measured(self) -> int:
        """Bytes of a row. Pictures whose size is not described have that of the first one."""
        wide = 0
        for path, feature in self._steps.items():
            if (-1 in feature.shape or feature.is_list) and self.lengths:
                number, *place = self._places[0]
                with contextlib.suppress(CorruptData):  # `load` raises it.
                    example = self._file(number).glance(*place)
                    shown = self._part(_Opened(example, {}, {}), path, feature, range(1))
                    shape = (len(shown[0]), *feature.shape) if feature.is_list else row_type(shown)[1]
                    feature = replace(feature, shape=shape)
            wide += (1 + (path[0] == "observation")) * _row_bytes(feature)
        return max(1, wide)

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode; see `EpisodeSource`."""
        number, start, size = self._places[episode]
        with self._guarded(episode):
            example = Example.of(self._file(number).read(start, size), self._limits)
            return self._rows(episode, _Opened(example, {}, {}), range(self.lengths[episode]), columns)

    def load_part(self, episode: int, start: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read some steps of an episode; see `PartSource`."""
        with self._guarded(episode):
            return self._rows(episode, self._found(episode), range(start, stop), columns)

    def spans(
        self, first: int, stop: int, start: int, rows: int, columns: frozenset[str] | None
    ) -> Iterator[Span]:
        """See `SpanSource`. A record is read whole, with its first part."""
        for number, begin, size in self._places[first:stop] if start == 0 else ():
            yield number, begin - 12, begin + size + 4  # With its length, and the sum.

    def _guarded(self, episode: int) -> Guard:
        self._piece = self._allowance.piece()
        return Guard(self.files[self._places[episode][0]], episode, format="RLDS")

    def _found(self, episode: int) -> _Opened:
        """The features of an episode, whose values stay in the file."""
        if self._held is None or self._held[0] != episode:
            number, start, size = self._places[episode]
            file = self._file(number)
            if episode not in self._checked:
                file.check(start, size)
                self._checked.add(episode)
            self._held = episode, _Opened(file.glance(start, size), {}, {})
        return self._held[1]

    def _rows(
        self, episode: int, opened: _Opened, part: range, columns: frozenset[str] | None
    ) -> SampleBatch:
        example, ends = opened.example, opened.ends
        if not ends:
            ends.update(self._ends(example))
        total, is_over, is_terminal = len(ends[_LAST]), bool(ends[_LAST][-1]), bool(ends[_TERMINAL][-1])
        has_final = is_over and not self._ends_in_action
        steps = total - has_final
        if steps != self.lengths[episode]:
            raise CorruptData(f"the episode has {steps} steps, expected {self.lengths[episode]}")
        # One step more, which has the next observation of the last row.
        shown = range(part.start, min(part.stop + 1, total))
        found = self._of_steps(opened, shown, total, columns)
        rows: dict[str, Any] = {}
        if "observation" in found:
            goes_on = len(shown) > len(part)
            rows |= (with_next_obs if goes_on else without_final_obs)(found.pop("observation"))
            if not self._has_all_finals:  # All episodes have the same columns.
                rows.setdefault(Columns.NEXT_OBS_VALID, np.ones(len(part), np.bool_))
        if _FIRST in ends:
            if not ends[_FIRST][0]:
                self._headless.add(episode)
            if columns is not None and _FIRST in columns:
                rows[_FIRST] = ends[_FIRST][part.start : part.stop]
        is_last = has_final and part.stop == steps
        if is_last and "reward" in found and flat(found["reward"])[-1:].any():
            self._doubtful.add(episode)
        for name, values in found.items():
            cut = map_structure(lambda leaf: leaf[: len(part)], values)
            rows[_COLUMNS.get(name, name)] = flat(cut) if name == "reward" else cut
        rows |= flags_of(part, steps, terminated=is_terminal, truncated=is_over and not is_terminal)
        return SampleBatch(rows | self._of_episode(example, len(part), columns))

    def _of_steps(
        self, opened: _Opened, shown: range, total: int, columns: frozenset[str] | None
    ) -> dict[str, Any]:
        """The features of some of the ``total`` steps, but for the flags."""
        parts: dict[_Path, NDArray[Any]] = {}
        for path, feature in self._steps.items():
            if path[0] in opened.ends or not _is_wanted(path[0], columns):
                continue
            if len(shown) < total or feature.is_list:
                parts[path] = self._part(opened, path, feature, shown, total)
            else:
                parts[path] = self._column(opened.example, (_STEPS, *path), feature)
                _check_steps(path, len(parts[path]), total)
        found: dict[str, Any] = unflatten(parts, parts.values())
        return found

    def _of_episode(self, example: Example, rows: int, columns: frozenset[str] | None) -> dict[str, Any]:
        """The features of the episode, the same in all rows."""
        found = {}
        for path, feature in self._about.items():
            name = "/".join(path)
            if columns is None or name in columns:
                (value,) = self._column(example, path, feature)
                # A text is one object in all rows: an array of texts would repeat it.
                is_text = value.dtype.kind == "U"
                found[name] = np.full(rows, value.item(), object) if is_text else np.full(rows, value)
        return found

    def _ends(self, example: Example) -> dict[str, NDArray[Any]]:
        """The flags of all steps, of which only the first may begin the episode and the last may end it."""
        found = {
            name: self._column(example, (_STEPS, name), feature)
            for name in (_FIRST, _LAST, _TERMINAL)
            if (feature := self._steps.get((name,))) is not None
        }
        last = found[_LAST]
        if not len(last):
            raise CorruptData("an episode without steps")
        for name, flags in found.items():
            _check_steps((name,), len(flags), len(last))
            if name != _FIRST and flags[:-1].any():
                raise CorruptData(f"{name} is true in step {int(flags.argmax())} of {len(flags)}")
        terminal = found.setdefault(_TERMINAL, np.zeros_like(last))
        if terminal[-1] and not last[-1]:
            raise CorruptData("the last step is_terminal, but not is_last")
        first = found.get(_FIRST)
        if first is not None and first[1:].any():
            raise CorruptData(f"is_first is true in step {1 + int(first[1:].argmax())}")
        return found

    def _part(
        self, opened: _Opened, path: _Path, feature: _Feature, rows: range, steps: int | None = None
    ) -> NDArray[Any]:
        """The values of some steps of a feature, which must have ``steps`` if they are given."""
        if feature.is_list:
            return self._lists(opened, path, feature, rows, steps)
        example, bounds, _ = opened
        values = _values(example, (_STEPS, *path), feature)
        with in_column("/".join((_STEPS, *path))):
            if path not in bounds:
                is_one = values.kind == BYTES and feature.dtype.kind != "O"
                bounds[path] = example.bounds(values, 1 if is_one else math.prod(feature.shape))
            if (found := bounds[path]) is None:
                array = self._array(example.pieces(values), feature)
                _check_steps(path, len(array), steps)
                return array[rows.start : rows.stop]
            _check_steps(path, len(found) - 1, steps)
            start, stop = (int(found[min(row, len(found) - 1)]) for row in (rows.start, rows.stop))
            return self._array(example.some(values, start, stop), feature)

    def _lists(
        self, opened: _Opened, path: _Path, feature: _Feature, rows: range, steps: int | None
    ) -> NDArray[Any]:
        """See `_part`, of a sequence in each step: rows of a `Ragged`."""
        if (ends := opened.bounds.get(path)) is None:
            lengths = self._column(opened.example, (_STEPS, *path, _LENGTHS), _LENGTH)
            if (lengths < 0).any():
                raise CorruptData("a sequence has less than no items", column="/".join((_STEPS, *path)))
            ends = opened.bounds[path] = np.cumsum([0, *lengths])
        _check_steps(path, len(ends) - 1, steps)
        own = ends[rows.start : rows.stop + 1]
        items = replace(feature, is_list=False)
        self._piece.spend(_TEXT_BYTES * len(own))
        values = self._part(opened, (*path, _ITEMS), items, range(int(own[0]), int(own[-1])), int(ends[-1]))
        return Ragged(values, own - own[0]).rows()

    def _column(self, example: Example, path: _Path, feature: _Feature) -> NDArray[Any]:
        """The values of a feature: a row a step; of a feature of episodes, one row."""
        pieces = example.pieces(_values(example, path, feature))
        with in_column("/".join(path)):
            return self._array(pieces, feature)

    def _array(self, pieces: list[bytes], feature: _Feature) -> NDArray[Any]:
        """The rows that lie in pieces of a list."""
        if _kind(feature) == BYTES:
            return self._decoded(pieces, feature)
        size = math.prod(feature.shape)
        is_real = _kind(feature) == FLOATS
        self._piece.spend((1 if is_real else _VARINT) * sum(map(len, pieces)))
        flat_values = floats_of(pieces) if is_real else ints_of(pieces, feature.dtype)
        rows, rest = divmod(flat_values.size, max(1, size))
        if rest or not size:
            raise CorruptData(f"{flat_values.size} values, expected rows of shape {feature.shape}")
        return flat_values.reshape(rows, *feature.shape).astype(feature.dtype, copy=False)

    def _decoded(self, pieces: list[bytes], feature: _Feature) -> NDArray[Any]:
        shape, dtype, encoding = feature.shape, feature.dtype, feature.encoding
        if encoding == _PICTURE:  # The description need not say of which kind.
            return encoded_column(pieces, None if -1 in shape else shape, spend=self._piece.spend)
        if dtype.kind == "O":
            rows, rest = divmod(len(pieces), max(1, math.prod(shape)))
            longest = max(map(len, pieces), default=0)
            self._piece.spend(len(pieces) * max(_TEXT_BYTES, 4 * longest))
            if rest:
                raise CorruptData(f"{len(pieces)} texts, expected rows of shape {shape}")
            return np.array([piece.decode() for piece in pieces], np.str_).reshape(rows, *shape)
        size = math.prod(shape) * dtype.itemsize
        self._piece.spend(size * len(pieces))
        if encoding == "zlib":
            pieces = [zlib.decompressobj().decompress(piece, size + 1) for piece in pieces]
        if any(len(piece) != size for piece in pieces):
            raise CorruptData(
                f"found bytes of other values, expected {size} of shape {shape} and dtype {dtype}"
            )
        values = np.frombuffer(b"".join(pieces), dtype.newbyteorder("<")).astype(dtype)
        return values.reshape(len(pieces), *shape)

    def close(self) -> None:
        """Close all files."""
        self._open.close()
        self.inputs.close()


# ---- the description ----


def _children(about: object, where: str) -> dict[str, Mapping[str, Any]]:
    """The features of a dict of features."""
    inner = about.get("featuresDict") if isinstance(about, Mapping) else None
    found = inner.get("features") if isinstance(inner, Mapping) else None
    if not isinstance(found, Mapping) or not all(isinstance(one, Mapping) for one in found.values()):
        raise CorruptData(f"found {excerpt(about)}, expected a dict of features", uri=where)
    return dict(found)


def _leaves(
    features: Mapping[str, Mapping[str, Any]], above: _Path, where: str, limits: Limits
) -> Iterator[tuple[_Path, Mapping[str, Any]]]:
    if len(above) > limits.nesting:
        raise UnsafeData(f"features nested more than {limits.nesting} deep", uri=where)
    for name, about in features.items():
        if "featuresDict" in about:
            yield from _leaves(_children(about, where), (*above, name), where, limits)
        elif parts := _sequences(about, where):
            yield from _leaves(parts, (*above, name), where, limits)
        else:
            yield (*above, name), about


def _sequences(about: Mapping[str, Any], where: str) -> dict[str, Mapping[str, Any]]:
    """A sequence of dicts as the dict of sequences that TFDS makes of it; {}: it is something else."""
    found = about.get("sequence")
    sequence: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    inner = sequence.get("feature")
    if not isinstance(inner, Mapping) or "featuresDict" not in inner:
        return {}
    parts = _children(inner, where).items()
    return {name: {"sequence": {**sequence, "feature": one}} for name, one in parts}


def _feature(about: Mapping[str, Any]) -> _Feature | None:
    """What a leaf holds; None: nothing that is read."""
    if isinstance(sequence := about.get("sequence"), Mapping):
        inner = sequence.get("feature")
        item = _feature(inner) if isinstance(inner, Mapping) and "sequence" not in inner else None
        is_plain = item is not None and item.encoding == "none" and item.dtype.kind in "biuf"
        is_any = str(sequence.get("length")) == "-1"
        return replace(item, is_list=True) if item is not None and is_plain and is_any else None
    if "text" in about:
        return _Feature((), np.dtype(object))
    if "classLabel" in about:
        return _Feature((), np.dtype(np.int64))
    kind = next((kind for kind in ("tensor", "image") if isinstance(about.get(kind), Mapping)), None)
    if kind is None:
        return None
    found = about[kind]
    shape = _shape(found.get("shape"))
    name = found.get("dtype")
    if kind == "image":
        if shape is None or len(shape) != 3 or name != "uint8":
            return None
        return _Feature(shape, np.dtype(np.uint8), _PICTURE)
    if shape is None or -1 in shape or found.get("encoding", "none") not in ("none", "bytes", "zlib"):
        return None
    if name == "string":
        return _Feature(shape, np.dtype(object)) if found.get("encoding", "none") == "none" else None
    if name not in NUMBERS:
        return None
    return _Feature(shape, np.dtype(name), found.get("encoding", "none"))


def _shape(found: object) -> tuple[int, ...] | None:
    """The shape of a feature, -1 where it is not fixed; None: it is none."""
    dimensions = found.get("dimensions", []) if isinstance(found, Mapping) else None
    if not isinstance(dimensions, list) or len(dimensions) > 32:
        return None
    try:
        shape = tuple(int(n) for n in dimensions)
    except (TypeError, ValueError):
        return None
    return shape if all(-1 <= n < 1 << 40 for n in shape) else None


def _count(value: object, uri: str) -> int:
    if not isinstance(value, (str, int)) or not str(value).isdecimal():
        raise CorruptData(f"shardLengths has {excerpt(value)}, expected a whole number", uri=uri)
    return int(value)


def _kind(feature: _Feature) -> int:
    """The kind of the list that a feature is stored as."""
    if feature.dtype.kind == "O" or feature.encoding != "none":
        return BYTES
    return FLOATS if feature.dtype.kind == "f" else INTS


def _values(example: Example, path: _Path, feature: _Feature) -> Values:
    """The list of a feature."""
    name = "/".join(path)
    values = example.features.get(name)
    if values is None:
        raise CorruptData("the feature is absent", column=name)
    if values.kind != _kind(feature):
        raise CorruptData(f"found a list of the kind {values.kind}, expected {_kind(feature)}", column=name)
    return values


def _check_steps(path: _Path, found: int, steps: int | None) -> None:
    if steps is not None and found != steps:
        raise CorruptData(f"steps/{'/'.join(path)} has {found} steps, but steps/is_last {steps}")


def _row_bytes(feature: _Feature) -> int:
    return math.prod(max(1, n) for n in feature.shape) * max(feature.dtype.itemsize, 1)


def _is_wanted(name: str, columns: frozenset[str] | None) -> bool:
    if columns is None or name in (_FIRST, _LAST, _TERMINAL):
        return True
    if name == "observation":
        return not columns.isdisjoint((Columns.OBS, Columns.NEXT_OBS, Columns.NEXT_OBS_VALID))
    return _COLUMNS.get(name, name) in columns


def _pillow(pictures: Sequence[str]) -> None:
    offer = f"format_options={{'leave_out': {excerpt(list(pictures))}}} reads all else"
    with needs(f"Pillow, for pictures ({offer}),", "images"):
        import PIL  # noqa: F401
