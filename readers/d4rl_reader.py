"""`D4RLReader`: HDF5 files in D4RL's flat layout, one dataset a column and one row a step.

Every row is served exactly once, also the last row of an episode. Many files do not hold its successor: then
``new_obs`` is zeros and ``new_obs_valid`` false. ``new_obs`` is never the first observation of the next
episode. Timeouts are truncations.

h5py (extra ``hdf5``) reads HDF5. Links to other places, virtual and external data, and compression plug-ins
are refused, so an untrusted file cannot reach outside itself.

Example:
    >>> import io, h5py, numpy as np
    >>> from rlio.storage import Storage
    >>> stream = io.BytesIO()
    >>> with h5py.File(stream, "w") as file:
    ...     for name, values in {"observations": [[0.0], [1.0], [2.0]], "actions": [[1.0]] * 3}.items():
    ...         file[name] = np.array(values, np.float32)
    ...     file["rewards"], file["terminals"] = np.ones(3, np.float32), np.array([False, True, False])
    >>> Storage.open("memory://d4rl-example").put("a.hdf5", stream.getvalue())
    >>> with D4RLReader("memory://d4rl-example/a.hdf5", epochs=1) as reader:
    ...     batch = reader.sample()
    >>> batch["eps_id"].tolist(), batch["new_obs"].tolist(), batch["new_obs_valid"].tolist()
    ([0, 0, 1], [[1.0], [0.0], [0.0]], [True, False, False])
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias, Unpack

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.dataset.step_columns import check_step_columns
from rlio.errors import (
    CorruptData,
    MissingColumn,
    OptionError,
    SchemaError,
    UnsafeData,
    excerpt,
)
from rlio.formats.format import format_of_hdf5
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.hdf5_files import Hdf5Files, check_dataset
from rlio.readers.inputs import Cursor, Failures, StoredReader, TableCursor, find_files
from rlio.readers.read_options import ReadKeywords, ReadOptions
from rlio.readers.rllib_json import wanted_columns
from rlio.storage.filesystem import StrPath
from rlio.support.options import check_count, checked_keywords

__all__ = ["D4RLReader"]

logger: logging.Logger = logging.getLogger("rlio")

Array: TypeAlias = NDArray[Any]
#: Dtype and shape of a row.
_Spec: TypeAlias = "tuple[np.dtype[Any], tuple[int, ...]]"

_SUFFIXES = (".hdf5", ".h5")
_NAMES = {
    "observations": Columns.OBS,
    "next_observations": Columns.NEXT_OBS,
    "actions": Columns.ACTIONS,
    "rewards": Columns.REWARDS,
    "terminals": Columns.TERMINATEDS,
    "timeouts": Columns.TRUNCATEDS,
    "infos/action_log_probs": Columns.ACTION_LOGP,
}
_NEEDED = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS, Columns.TERMINATEDS)
_FLAGS = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
# Columns with one number a row, which some files store as (rows, 1).
_FLAT = (*_FLAGS, Columns.REWARDS, Columns.ACTION_LOGP)

# Rows read at a time. Small groups mix better when shuffled; larger groups suit large HDF5 chunks, which are
# inflated as a whole.
_MIN_GROUP_ROWS = 4096
_MAX_GROUP_ROWS = 65_536
_GROUP_BYTES = 64 << 20
_FLAG_ROWS = 1 << 20


class D4RLReader(StoredReader):
    """Reads HDF5 files in D4RL's layout.

    Columns are ``obs, actions, rewards, terminateds, new_obs, eps_id, t``; ``truncateds`` if the file has
    timeouts; ``new_obs_valid`` if it has no next observations; ``action_logp`` if it has them. Other datasets
    with a row a step keep their HDF5 path as name (``infos/qpos``). Episodes end at terminals and timeouts,
    and are numbered across all files; a tail without either keeps both flags false. Without ``batch_size``,
    `sample` serves some thousands of rows. ``shuffle`` mixes rows from about 16 places of the files at a
    time.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        inputs: A file, folder, glob or URI, or a list of those. In folders, every ``*.hdf5`` and ``*.h5`` is
            read.
        max_episode_steps: Time limit of the environment, for old files without timeouts: an episode that
            reaches it is truncated there.
        limits: Limits on the files' demands.
        storage_options: Keywords of the fsspec filesystem.
        keywords: ``batch_size``, ``epochs``, ``shuffle``, ``seed``, ``shard``, ``columns``, ``on_error`` and
            ``drop_last``: see `ReadOptions`. Each rank gets its share of every stretch of rows.

    Attributes:
        notes: What to say of the data in a report (`rlio.formats.report`), each a sentence.

    Raises:
        MissingExtra: h5py is not installed.
        DataNotFound: ``inputs`` name no file, or the files hold no row.
        CorruptData: A file is not HDF5, or is damaged. (UnsafeData: it leads out of itself, or needs a
            plug-in.)
        SchemaError: A file is not in D4RL's layout, or differs from the first.
    """

    @checked_keywords
    def __init__(
        self,
        inputs: StrPath | Sequence[StrPath],
        *,
        max_episode_steps: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
        storage_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> None:
        options = ReadOptions.of(keywords)
        max_episode_steps = check_count(
            "max_episode_steps", max_episode_steps, least=1, of="steps", none="no limit"
        )
        files = find_files(inputs, suffixes=_SUFFIXES, storage_options=storage_options, limits=limits)
        self._handles = Hdf5Files(files)
        self.notes: list[str] = []

        def make_cursor(seed: int, failures: Failures) -> Cursor:
            table = _Table(self._handles, failures, options, max_episode_steps, limits)
            self.notes = table.notes
            return TableCursor(table, options, seed=seed, failures=failures)

        try:
            super().__init__(options, files, make_cursor, details={"max_episode_steps": max_episode_steps})
        except BaseException:
            self._handles.close()
            raise

    def _close(self) -> None:
        super()._close()
        self._handles.close()


@dataclass(frozen=True)
class _Part:
    """The datasets of one file, or of one of the numbered groups of a very large file."""

    file: int
    #: Column -> path of its dataset.
    paths: dict[str, str]
    #: Column -> dtype and shape of a served row.
    specs: dict[str, _Spec]
    rows: int
    group_rows: int
    #: First rows of its episodes, and at the end its number of rows.
    starts: NDArray[np.int64]


class _Table:
    """The rows of all files, in groups; a `TableSource`."""

    def __init__(
        self,
        handles: Hdf5Files,
        failures: Failures,
        options: ReadOptions,
        max_episode_steps: int | None,
        limits: Limits,
    ) -> None:
        self._handles = handles
        self._limits = limits
        self._asked = options.columns
        self._wanted = wanted_columns(options.columns)
        self._unlike = options.unlike
        self._max_steps = max_episode_steps
        self.notes: list[str] = []
        self._parts: list[_Part] = []
        for number in range(len(handles.files)):
            try:
                self._parts.extend(self._open_parts(number))
            except (CorruptData, SchemaError) as error:
                failures.handle(error)
        if self._unlike != "error":
            self._bring_together()
        self._check_asked(options.columns)
        self._warn_of_joined_episodes()
        episodes = [len(part.starts) - 1 for part in self._parts]
        self._first_episodes = [0, *accumulate(episodes)]
        #: (part, first row) of each group.
        self._groups: list[tuple[int, int]] = []
        self.rows: list[int] = []
        self.sizes: list[int] = []
        for number, part in enumerate(self._parts):
            row_bytes = _row_bytes(part.specs)
            for first in range(0, part.rows, part.group_rows):
                count = min(part.group_rows, part.rows - first)
                self._groups.append((number, first))
                self.rows.append(count)
                self.sizes.append(count * row_bytes)

    # ---- what is in the files ----

    def _open_parts(self, number: int) -> list[_Part]:
        parts: list[_Part] = self._handles.guarded(number, None, lambda: self._find_parts(number))
        first = self._parts[0] if self._parts else parts[0]
        uri = self._handles.files[number].uri
        for part in parts:
            for name in {*first.specs, *part.specs}:
                lacks = name not in first.specs or name not in part.specs
                if first.specs.get(name) != part.specs.get(name) and not (lacks and self._unlike != "error"):
                    raise SchemaError(
                        f"found {_spec_text(part.specs.get(name))} where the first file has "
                        f"{_spec_text(first.specs.get(name))}",
                        uri=uri,
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
        if self._unlike == "intersect":
            specs = {name: spec for name, spec in specs.items() if not lacking[name] or name in kept}
        if without := lacking.get(Columns.TRUNCATEDS):
            self._warn(without[0], "has no timeouts, as other files have: truncateds is False in its rows")
        self._parts = [
            replace(part, specs=specs, paths={k: path for k, path in part.paths.items() if k in specs})
            for part in self._parts
        ]

    def _find_parts(self, number: int) -> list[_Part]:
        root, uri = self._handles.file(number), self._handles.files[number].uri
        found = format_of_hdf5(root)
        if found is not None and found.name != "d4rl":
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
            there = ", ".join(excerpt(name, 40) for name in list(group)[:8]) or "nothing"
            raise MissingColumn(
                f"not in D4RL's layout: found {there}; expected observations, actions, rewards and terminals",
                uri=uri,
                column=missing[0],
            )
        if self._asked is None:
            check_step_columns(found, uri=uri)
        rows = found[Columns.OBS].shape[0]
        specs, paths, chunk_rows = {}, {}, 1
        for name, dataset in found.items():
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
        wished = min(max(_MIN_GROUP_ROWS, chunk_rows), _MAX_GROUP_ROWS)
        row_bytes, most = _row_bytes(specs), self._limits.group_bytes
        if row_bytes > most:
            raise UnsafeData(f"rows of {row_bytes} bytes, more than {most}", uri=uri)
        group_rows = max(1, min(wished, min(_GROUP_BYTES, most) // row_bytes))
        return _Part(number, paths, specs, rows, group_rows, self._starts(number, paths, rows))

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
                check_dataset(item, path, uri, self._limits)
                found[_NAMES.get(path, path)] = item
            elif path in _NAMES:
                raise SchemaError(f"{path} is not an array of numbers with one row a step", uri=uri)
        return found

    def _check_asked(self, columns: list[str] | None) -> None:
        if not self._parts:
            return
        part = self._parts[0]
        for name in columns or ():
            if name not in part.specs and name != Columns.DONES:
                raise MissingColumn(
                    f"a requested column is missing; the file has {', '.join(sorted(part.specs))}",
                    uri=self._handles.files[part.file].uri,
                    column=name,
                )

    def _warn_of_joined_episodes(self) -> None:
        """Warn once if episodes that a time limit cut cannot be told from the next ones."""
        unknown = {Columns.TRUNCATEDS, Columns.NEXT_OBS}
        for part in self._parts:
            if unknown.isdisjoint(part.paths) and self._max_steps is None:
                self._warn(
                    part,
                    "has no timeouts and no next observations: an episode that a time limit cut is joined "
                    "with the next one; if the environment has a limit, pass max_episode_steps=",
                )
                return

    def _warn(self, part: _Part, text: str) -> None:
        self.notes.append(f"{self._handles.files[part.file].uri} {text}")
        logger.warning("%s", self.notes[-1])

    # ---- episodes ----

    def _starts(self, number: int, paths: Mapping[str, str], rows: int) -> NDArray[np.int64]:
        """First rows of episodes, and at the end the number of rows."""
        file = self._handles.file(number)
        ends = []
        for first in range(0, rows, _FLAG_ROWS):
            stop = min(first + _FLAG_ROWS, rows)
            done = np.zeros(stop - first, np.bool_)
            for name in _FLAGS:
                if name in paths:
                    done |= _read(name, file[paths[name]], first, stop)
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

    def load(self, group: int, start: int, stop: int) -> SampleBatch:
        number, first = self._groups[group]
        part = self._parts[number]
        return self._handles.guarded(
            part.file, group, lambda: self._rows(number, first + start, first + stop)
        )

    def _rows(self, number: int, first: int, stop: int) -> SampleBatch:
        part = self._parts[number]
        file = self._handles.file(part.file)
        columns: dict[str, Array] = {
            name: _read(name, file[path], first, stop)
            for name, path in part.paths.items()
            if self._wants(name)
        }
        rows = np.arange(first, stop)
        starts, first_episode = part.starts, self._first_episodes[number]
        episode = np.searchsorted(starts, rows, side="right") - 1
        steps = rows - starts[episode]
        last = rows + 1 == starts[episode + 1]
        if self._max_steps is not None and self._wants(Columns.TRUNCATEDS):
            terminated = _read(Columns.TERMINATEDS, file[part.paths[Columns.TERMINATEDS]], first, stop)
            columns[Columns.TRUNCATEDS] = (steps + 1 == self._max_steps) & ~terminated
        if Columns.NEXT_OBS not in part.paths and self._wants(Columns.NEXT_OBS):
            follow = np.zeros((stop - first, *part.specs[Columns.OBS][1]), part.specs[Columns.OBS][0])
            known = _read(Columns.OBS, file[part.paths[Columns.OBS]], first + 1, min(stop + 1, part.rows))
            follow[: len(known)] = known
            follow[last] = 0
            columns[Columns.NEXT_OBS], columns[Columns.NEXT_OBS_VALID] = follow, ~last
        if self._wants(Columns.EPS_ID):
            columns[Columns.EPS_ID] = episode + first_episode
        if self._wants(Columns.T):
            columns[Columns.T] = steps
        for name in part.specs.keys() - columns.keys():  # Columns that the file lacks, and others have.
            if self._wants(name):
                dtype, shape = part.specs[name]
                make = np.ones if name == Columns.NEXT_OBS_VALID else np.zeros
                columns[name] = make((stop - first, *shape), dtype)
        return SampleBatch(columns)

    def _wants(self, name: str) -> bool:
        return self._wanted is None or name in self._wanted


def _spec(name: str, dataset: Any, uri: str) -> _Spec:
    """Dtype and shape of a row of ``dataset`` as column ``name``."""
    shape = tuple(dataset.shape[1:])
    if name not in _FLAT:
        return dataset.dtype, shape
    if shape not in ((), (1,)):
        raise SchemaError(f"rows of shape {shape}: expected one number a row", uri=uri, column=name)
    return (np.dtype(np.bool_) if name in _FLAGS else dataset.dtype), ()


def _read(name: str, dataset: Any, first: int, stop: int) -> Array:
    """Rows of ``dataset`` as column ``name``."""
    values: Array = np.asarray(dataset[first:stop])
    if name in _FLAT:
        values = values.reshape(len(values))
    if name in _FLAGS and values.dtype != np.bool_:
        if not np.isin(values, (0, 1)).all():
            raise SchemaError(f"expected flags, found {excerpt(values[:4].tolist())}", column=name)
        values = values.astype(np.bool_)
    return values


def _row_bytes(specs: Mapping[str, _Spec]) -> int:
    return max(1, sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs.values()))


def _spec_text(spec: _Spec | None) -> str:
    return "no such column" if spec is None else f"{spec[0]} rows of shape {spec[1]}"
