"""The episodes of D4RL's flat HDF5. `rlio.D4RLReader` reads it.

Every row is served, also the last one of an episode. Many files do not hold its successor: then ``new_obs``
is zeros and ``new_obs_valid`` false. ``new_obs`` is never the first observation of the next episode.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.columns import Columns, is_per_sequence
from rlio.errors import CorruptData, OptionError, SchemaError, UnknownLayout, UnsafeData, excerpt
from rlio.formats.d4rl.sink import FORMAT as D4RL
from rlio.formats.files.hdf5_files import Hdf5Files, tree_of
from rlio.formats.files.inputs import Failures, FileOptions, find_files
from rlio.formats.files.step_columns import check_step_columns
from rlio.formats.format import format_of_hdf5, titles_of_read
from rlio.formats.place import episode_files
from rlio.formats.tables.doubts import Followed, break_in
from rlio.formats.tables.hdf5 import suggested_for
from rlio.limits import Limits
from rlio.read_options import ReadOptions
from rlio.source.episodes import EpisodeFiles
from rlio.storage import InputFile, InputFiles, Span, each_file
from rlio.storage.paths import StrPath
from rlio.support.calls import closing_on_error
from rlio.support.words import and_more

__all__ = ["D4rlSource", "open_d4rl"]

logger: logging.Logger = logging.getLogger("rlio")

Array: TypeAlias = NDArray[Any]
#: Dtype and shape of a row.
_Spec: TypeAlias = "tuple[np.dtype[Any], tuple[int, ...]]"

_NAMES: Final = {
    "observations": Columns.OBS,
    "next_observations": Columns.NEXT_OBS,
    "actions": Columns.ACTIONS,
    "rewards": Columns.REWARDS,
    "terminals": Columns.TERMINATEDS,
    "timeouts": Columns.TRUNCATEDS,
    "infos/action_log_probs": Columns.ACTION_LOGP,
}
_NEEDED: Final = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS, Columns.TERMINATEDS)
_FLAGS: Final = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
# Columns with one number a row, which some files store as (rows, 1).
_FLAT: Final = (*_FLAGS, Columns.REWARDS, Columns.ACTION_LOGP)

# Rows read at a time. Small groups mix better when shuffled; larger groups suit large HDF5 chunks, which are
# inflated as a whole.
_MIN_GROUP_ROWS = 4096
_MAX_GROUP_ROWS: Final = 65_536
_FLAG_ROWS: Final = 1 << 20
#: Rows whose observations and next observations are compared.
_COMPARED_ROWS: Final = 4096


@dataclass(frozen=True)
class _Part:
    """The datasets of one file, or of one of the numbered groups of a very large file."""

    file: int
    #: Column -> path of its dataset.
    paths: dict[str, str]
    #: Column -> dtype and shape of a served row.
    specs: dict[str, _Spec]
    rows: int
    chunk_rows: int
    #: First rows of its episodes, and at the end its number of rows.
    starts: NDArray[np.int64]


class D4rlSource:
    """The episodes of all files; an `EpisodeSource` that reads parts and runs.

    Args:
        files: The files.
        options: The read options: the columns, and what to do with files with different ones.
        max_episode_steps: See `rlio.D4RLReader`.
        limits: Bounds on the files.

    Attributes:
        failures: The files that ``on_error="skip"`` left out, because they cannot be opened.
        inputs: See `SpanSource`.
    """

    reads_parts = True
    spaces: tuple[Any, Any] | None = None

    def __init__(
        self,
        files: Sequence[InputFile],
        options: ReadOptions,
        *,
        max_episode_steps: int | None = None,
        limits: Limits,
    ) -> None:
        self.uri: str = and_more([file.uri for file in files], 1)
        self.files: Sequence[InputFile] = files
        self.failures: Failures = Failures(options.on_error)
        self.notes: list[str] = []
        self._limits, self._options, self._max_steps = limits, options, max_episode_steps
        self._handles = Hdf5Files(files, limits)
        self.inputs: InputFiles = self._handles.inputs
        self._parts: list[_Part] = []
        with closing_on_error(self):
            for number in each_file(files):
                try:
                    self._parts.extend(self._open_parts(number))
                except (CorruptData, SchemaError) as error:
                    self.failures.handle(error)
            if options.unlike != "error":
                self._bring_together()
            self._warn_of_joined_episodes()
            self.row_bytes: int = max([1, *(_row_bytes(part.specs) for part in self._parts)])
            self._handles.allowance.piece().spend(self.row_bytes)
        chunk = max([1, *(part.chunk_rows for part in self._parts)])
        wished = min(max(_MIN_GROUP_ROWS, chunk), _MAX_GROUP_ROWS)
        self.group_rows: int = max(1, min(wished, limits.group_bytes // self.row_bytes))
        self.lengths: Sequence[int] = [n for part in self._parts for n in np.diff(part.starts).tolist()]
        #: Number of the first episode of each part, and of all episodes.
        self._firsts = [0, *accumulate(len(part.starts) - 1 for part in self._parts)]

    # ---- what is in the files ----

    def _open_parts(self, number: int) -> list[_Part]:
        with self._handles.guarded(number):
            parts = self._find_parts(number)
        first = self._parts[0] if self._parts else parts[0]
        for part in parts:
            for name in {*first.specs, *part.specs}:
                lacks = name not in first.specs or name not in part.specs
                if first.specs.get(name) != part.specs.get(name) and not (
                    lacks and self._options.unlike != "error"
                ):
                    raise SchemaError(
                        f"found {_spec_text(part.specs.get(name))} where the first file has "
                        f"{_spec_text(first.specs.get(name))}",
                        uri=self.files[number].uri,
                        column=name,
                    )
        return parts

    def _bring_together(self) -> None:
        """Give all parts their common columns, or the union; columns that a part lacks are filled."""
        specs: dict[str, _Spec] = {}
        for part in self._parts:
            specs |= {name: spec for name, spec in part.specs.items() if name not in specs}
        lacking = {name: [part for part in self._parts if name not in part.specs] for name in specs}
        kept = (Columns.TRUNCATEDS, Columns.NEXT_OBS_VALID)
        if self._options.unlike == "intersect":
            specs = {name: spec for name, spec in specs.items() if not lacking[name] or name in kept}
        if without := lacking.get(Columns.TRUNCATEDS):
            self._warn(without[0], "has no timeouts, as other files have: truncateds is False in its rows")
        self._parts = [
            replace(part, specs=specs, paths={k: path for k, path in part.paths.items() if k in specs})
            for part in self._parts
        ]

    def _find_parts(self, number: int) -> list[_Part]:
        root, uri = self._handles.file(number), self.files[number].uri
        found = format_of_hdf5(root)
        if found is not None and found is not D4RL:
            raise found.refusal(uri=uri)
        if "observations" not in root and "virtual" in root:
            chunks = self._handles.child(root, "virtual")
            names = sorted(chunks, key=lambda name: (len(name), name))
            if names:
                return [self._part(number, self._handles.child(chunks, name), uri) for name in names]
        return [self._part(number, root, uri)]

    def _part(self, number: int, group: Any, uri: str) -> _Part:
        found = self._datasets(group, "", uri)
        missing = [name for name in _NEEDED if name not in found]
        if missing:
            raise UnknownLayout(
                "not in D4RL's layout, which has observations, actions, rewards and terminals: found "
                f"{tree_of(group)}. The layouts of HDF5 that rlio reads are {titles_of_read(hdf5=True)}. "
                f"Of any other, say what its names mean: {suggested_for(self._handles, number)} "
                "(docs/mapping.md); or read it with h5py, and pass its arrays to rlio.from_arrays, or its "
                "episodes to rlio.from_episodes",
                uri=uri,
                column=missing[0],
            )
        asked = self._options.columns
        if asked is None:
            check_step_columns(found, uri=uri)
        rows = found[Columns.OBS].shape[0]
        self._handles.allowance.claim(rows)
        specs, paths, chunk_rows = {}, {}, 1
        for name, dataset in found.items():
            if asked is not None and name not in asked and (name == Columns.DONES or is_per_sequence(name)):
                continue  # No column of a step.
            if dataset.shape[0] != rows:
                if name in _NAMES.values():
                    raise SchemaError(
                        f"{dataset.shape[0]} rows where observations has {rows}", uri=uri, column=name
                    )
                logger.info("%s: %s is left out: expected one row a step", uri, excerpt(dataset.name))
                continue
            specs[name], paths[name] = _spec(name, dataset, uri), dataset.name
            chunk_rows = max(chunk_rows, dataset.chunks[0] if dataset.chunks else 1)
        if self._max_steps is not None:
            if Columns.TRUNCATEDS in paths:
                raise OptionError(
                    "max_episode_steps is for files without timeouts, but this file has them: leave it out",
                    uri=uri,
                )
            specs[Columns.TRUNCATEDS] = (np.dtype(np.bool_), ())
        if Columns.NEXT_OBS not in paths:
            specs[Columns.NEXT_OBS] = specs[Columns.OBS]
            specs[Columns.NEXT_OBS_VALID] = (np.dtype(np.bool_), ())
        specs[Columns.EPS_ID] = specs[Columns.T] = (np.dtype(np.int64), ())
        return _Part(number, paths, specs, rows, chunk_rows, self._starts(number, paths, rows))

    def _datasets(self, group: Any, prefix: str, uri: str) -> dict[str, Any]:
        """Column -> dataset, of ``group`` and its infos."""
        found: dict[str, Any] = {}
        if len(group) > self._limits.columns:
            raise UnsafeData(f"{len(group)} datasets: more than {self._limits.columns}", uri=uri)
        for key in group:
            path = prefix + key
            if path in ("metadata", "virtual"):
                continue
            item = self._handles.child(group, key)
            if self._handles.is_group(item):
                if path == "infos":
                    found.update(self._datasets(item, "infos/", uri))
            elif self._handles.is_dataset(item) and item.shape and item.dtype.kind in "biuf":
                self._handles.check(item, path, uri)
                found[_NAMES.get(path, path)] = item
            elif path in _NAMES:
                raise SchemaError(f"{path} is not an array of numbers with one row a step", uri=uri)
        return found

    def _warn_of_joined_episodes(self) -> None:
        """Warn once if episodes that a time limit cut cannot be told from the next ones."""
        unknown = {Columns.TRUNCATEDS, Columns.NEXT_OBS}
        for part in self._parts:
            if Columns.NEXT_OBS in part.paths and Columns.TRUNCATEDS not in part.paths:
                self._check_followed(part)
            if unknown.isdisjoint(part.paths) and self._max_steps is None:
                self._warn(
                    part,
                    "has no timeouts and no next observations: an episode that a time limit cut is joined "
                    "with the next one; if the environment has a limit, pass max_episode_steps=",
                )
                return

    def _check_followed(self, part: _Part) -> None:
        """Refuse next observations that show where an episode ends, if no flag does."""
        row_bytes = max(1, _row_bytes(part.specs))
        stop = min(part.rows, _COMPARED_ROWS, max(4, self._limits.group_bytes // row_bytes))
        if self._max_steps is not None or stop < 2:
            return
        try:
            with self._handles.guarded(part.file):
                file = self._handles.file(part.file)
                obs, after = (
                    self._read(name, file[part.paths[name]], 0, stop)
                    for name in (Columns.OBS, Columns.NEXT_OBS)
                )
        except CorruptData:
            return  # Raised, or skipped, where it is served.
        ends = np.isin(np.arange(1, stop + 1), part.starts)
        row = break_in(Followed(obs, after, ends=ends, terminated=ends, row=0))
        if row is not None:
            raise UnknownLayout(
                f"the next observation of row {row} is not the observation of row {row + 1}, and neither "
                "terminals nor timeouts end an episode there: two episodes would be one, such as those that "
                "a time limit cut; add timeouts to the file, such as np.append((next_observations[:-1] != "
                "observations[1:]).any(axis=1), True) & ~terminals; or pass max_episode_steps= to "
                "rlio.D4RLReader",
                uri=self.files[part.file].uri,
                column="next_observations",
            )

    def _warn(self, part: _Part, text: str) -> None:
        self.notes.append(f"{self.files[part.file].uri} {text}")
        logger.warning("%s", self.notes[-1])

    def _starts(self, number: int, paths: Mapping[str, str], rows: int) -> NDArray[np.int64]:
        """First rows of episodes, and at the end the number of rows."""
        file = self._handles.file(number)
        ends = []
        for first in range(0, rows, _FLAG_ROWS):
            stop = min(first + _FLAG_ROWS, rows)
            done = np.zeros(stop - first, np.bool_)
            for name in _FLAGS:
                if name in paths:
                    done |= self._read(name, file[paths[name]], first, stop)
            ends.append(np.flatnonzero(done) + first + 1)
        bounds = np.concatenate([[0], *ends, [rows]]).astype(np.int64)
        bounds = bounds[np.append(True, np.diff(bounds) > 0)]
        if self._max_steps is not None:
            cuts = [
                np.arange(start, stop, self._max_steps)
                for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            ]
            bounds = np.append(np.concatenate(cuts), rows) if cuts else bounds
        return bounds

    # ---- rows ----

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode; see `EpisodeSource`."""
        return self.load_run(episode, episode + 1, columns)

    def load_part(self, episode: int, start: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read some steps of an episode; see `PartSource`."""
        ((number, first, _),) = self._runs(episode, episode + 1)
        return self._rows(number, first + start, first + stop, columns)

    def load_run(self, first: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read several episodes; see `RunSource`."""
        found = [self._rows(*run, columns) for run in self._runs(first, stop)]
        return found[0] if len(found) == 1 else concat_samples(found)

    def _runs(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The parts that episodes lie in: number, first row, and the row after the last."""
        while first < stop:
            number = bisect_right(self._firsts, first) - 1
            before, end = self._firsts[number], min(stop, self._firsts[number + 1])
            starts = self._parts[number].starts
            yield number, int(starts[first - before]), int(starts[end - before])
            first = end

    def spans(
        self, first: int, stop: int, start: int, rows: int, columns: frozenset[str] | None
    ) -> Iterator[Span]:
        """See `SpanSource`."""
        for number, begin, end in self._runs(first, stop):
            yield from self._spans_of(number, begin + start, min(end, begin + start + rows), columns)

    def _spans_of(self, number: int, first: int, stop: int, wanted: frozenset[str] | None) -> Iterator[Span]:
        """The bytes of rows of a part; of observations, those of the row after them too."""
        part = self._parts[number]
        derives = Columns.NEXT_OBS not in part.paths and _derives(wanted)
        datasets = (
            (self._handles.dataset(part.file, path), first, stop + (derives and name == Columns.OBS))
            for name, path in part.paths.items()
            if wanted is None or name in wanted or (derives and name == Columns.OBS)
        )
        return self._handles.spans(part.file, datasets)

    def _rows(self, number: int, first: int, stop: int, wanted: frozenset[str] | None) -> SampleBatch:
        """Rows of a part; errors name the episode of the first one."""
        part = self._parts[number]
        self._handles.hold(part.file, self._spans_of(number, first, stop, wanted))
        episode = self._firsts[number] + int(np.searchsorted(part.starts, first, side="right")) - 1
        with self._handles.guarded(part.file, episode):
            return self._read_rows(number, first, stop, wanted)

    def _read_rows(self, number: int, first: int, stop: int, wanted: frozenset[str] | None) -> SampleBatch:
        part = self._parts[number]

        def wants(name: str) -> bool:
            return wanted is None or name in wanted

        def read(name: str, stop: int = stop) -> Array:
            return self._read(name, self._handles.dataset(part.file, part.paths[name]), first, stop)

        derives = Columns.NEXT_OBS not in part.paths and _derives(wanted)
        columns: dict[str, Array] = {
            name: read(name) for name in part.paths if wants(name) and not (derives and name == Columns.OBS)
        }
        cuts = self._max_steps is not None and wants(Columns.TRUNCATEDS)
        if cuts or derives or wants(Columns.EPS_ID) or wants(Columns.T) or not columns:
            rows, starts = np.arange(first, stop), part.starts
            episode = np.searchsorted(starts, rows, side="right") - 1
            steps = rows - starts[episode]
            columns |= {Columns.EPS_ID: episode + self._firsts[number], Columns.T: steps}
            if cuts:
                columns[Columns.TRUNCATEDS] = (steps + 1 == self._max_steps) & ~read(Columns.TERMINATEDS)
            if derives:
                last = rows + 1 == starts[episode + 1]
                known = read(Columns.OBS, min(stop + 1, part.rows))
                follow = np.zeros((stop - first, *known.shape[1:]), known.dtype)
                follow[: len(known) - 1] = known[1:]
                follow[last] = 0
                columns |= {
                    Columns.OBS: known[: stop - first],
                    Columns.NEXT_OBS: follow,
                    Columns.NEXT_OBS_VALID: ~last,
                }
        for name in part.specs.keys() - columns.keys():  # Columns that the file lacks, and others have.
            if wants(name):
                dtype, shape = part.specs[name]
                make = np.ones if name == Columns.NEXT_OBS_VALID else np.zeros
                columns[name] = make((stop - first, *shape), dtype)
        return SampleBatch(columns)

    def _read(self, name: str, dataset: Any, first: int, stop: int) -> Array:
        """Rows of ``dataset`` as column ``name``."""
        values = self._handles.read(dataset, first, stop)
        if name in _FLAT:
            values = values.reshape(len(values))
        if name in _FLAGS and values.dtype != np.bool_:
            if not np.isin(values, (0, 1)).all():
                raise SchemaError(f"expected flags, found {excerpt(values[:4].tolist())}", column=name)
            values = values.astype(np.bool_)
        return values

    def close(self) -> None:
        """Close all files."""
        self._handles.close()


def open_d4rl(inputs: StrPath | Sequence[StrPath], how: FileOptions) -> EpisodeFiles:
    """The files as a source, as `rlio.D4RLReader` reads them without options."""
    files = find_files(inputs, how, suffixes=D4RL.marks.endings)
    source = D4rlSource(files, ReadOptions(on_error=how.on_error), limits=how.limits)
    return episode_files(source, D4RL, {}, how)


def _spec(name: str, dataset: Any, uri: str) -> _Spec:
    """Dtype and shape of a row of ``dataset`` as column ``name``."""
    shape = tuple(dataset.shape[1:])
    if name not in _FLAT:
        return dataset.dtype, shape
    if shape not in ((), (1,)):
        raise SchemaError(f"rows of shape {shape}: expected one number a row", uri=uri, column=name)
    return (np.dtype(np.bool_) if name in _FLAGS else dataset.dtype), ()


def _derives(wanted: frozenset[str] | None) -> bool:
    """Whether columns are wanted that are made of the next row's observation, if they are not stored."""
    return wanted is None or not wanted.isdisjoint((Columns.NEXT_OBS, Columns.NEXT_OBS_VALID))


def _row_bytes(specs: Mapping[str, _Spec]) -> int:
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs.values())


def _spec_text(spec: _Spec | None) -> str:
    return "no such column" if spec is None else f"{spec[0]} rows of shape {spec[1]}"
