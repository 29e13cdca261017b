"""Minari data sets, as HDF5, Arrow or Parquet.

Alignment: an episode of N steps has N+1 observations; action, reward, termination and truncation t belong to
the step from observation t to observation t+1. In Arrow and Parquet files all columns have N+1 rows, and the
last row of all but the observations is padding, which is left out.

`rlio.formats.minari.sink` writes HDF5 and Arrow, with raw pictures. It refuses an episode whose final
observation is not known, unless an option states what to do.

``seed`` of an episode is the column ``env_seed``. Infos and the options of resets are not read. Episodes are
in the order of their ids, which are 0, 1, ...
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import IO, Any, Final, NamedTuple

import numpy as np

from rlio.batch import SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves
from rlio.batch.picture_codecs import encoded_column
from rlio.errors import CorruptData, SchemaError, UnknownLayout, UnsafeData, excerpt, raise_at
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.arrow_columns import to_column
from rlio.formats.files.hdf5_files import Hdf5Files, memory_type
from rlio.formats.files.inputs import Guard
from rlio.formats.files.json_files import read_object, whole_number
from rlio.formats.files.parquet_files import ParquetFiles
from rlio.formats.files.space_arrays import children_of, fit_space
from rlio.formats.files.value_arrays import flags_in
from rlio.formats.format import Format, Holds, Marks, with_all_of
from rlio.formats.minari.spaces import space_of_minari
from rlio.formats.place import Place
from rlio.formats.sink import Origin
from rlio.formats.tables.arrow import ArrowTable, open_plain_arrow, read_arrow
from rlio.limits import Limits
from rlio.source.episodes import measure_first, with_next_obs
from rlio.storage import InputFile, InputFiles, Span
from rlio.storage.parallel import each as side_by_side
from rlio.support.calls import closing_on_error
from rlio.support.progress import each

FORMAT = Format(
    name="minari",
    title="Minari",
    marks=Marks(
        json=with_all_of(
            {"total_episodes", "total_steps", "data_format"},
            {"total_episodes", "total_steps", "minari_version"},
            {"total_steps", "rewards_sum", "rewards_mean"},  # of one episode
        ),
        columns=with_all_of({"observations", "actions", "rewards", "terminations", "truncations"}),
        hdf5=lambda paths: any(
            re.fullmatch("episode_[0-9]+/observations", path) and path[:-12] + "terminations" in paths
            for path in paths
        ),
    ),
    source="rlio.formats.minari.source:MinariSource",
    writer="rlio.formats.minari.sink:MinariSink",
    holds=Holds(
        obs="any",
        actions="any",
        named=frozenset((Columns.ENV_SEED,)),
        slash=False,
        final_obs="needed",
        ids="none",
        start=False,
        dtypes=False,
        uniform="shapes",
        spaces=True,
        environment="gymnasium",
    ),
    root=("data/metadata.json", "metadata.json"),
    home=("MINARI_DATASETS_PATH", "~/.minari/datasets"),
    remote="rlio.formats.minari.remote:uri_of_id",
    about="All observations, spaces, seeds and the environment's spec are read, infos and options are not.",
)

logger: logging.Logger = logging.getLogger("rlio")

_METADATA: Final = "metadata.json"
#: Fields of the metadata that are kept as they are, for who writes the data again.
KEPT: Final = (
    *("dataset_id", "code_permalink", "author", "author_email", "algorithm_name", "description"),
    *("requirements", "eval_env_spec", "ref_min_score", "ref_max_score", "num_episodes_average_score"),
)
# Rows that are measured.
_SAMPLE_ROWS: Final = 64
_REWARDS, _ENDS = "rewards", ("terminations", "truncations")
_SPACES: Final = ("observation", "action")


class MinariSource:
    """The episodes of one data set; an `EpisodeSource` that reads parts.

    Attributes:
        origin: Spaces, the JSON of the environment's spec, and the fields `KEPT` of the metadata.
        version: That of Minari, if the metadata state it.
        notes: What is not read, and, once such an episode was read, that steps follow the end of one.
    """

    reads_parts = True

    def __init__(self, place: Place, *, limits: Limits) -> None:
        storage = place.root()
        folder = "data/" if storage.exists(f"data/{_METADATA}") else ""
        self.uri: str = storage.uri
        where = storage.uri_of(folder + _METADATA)
        metadata = read_object(storage, folder + _METADATA, limits=limits)
        if "total_episodes" not in metadata:
            raise UnknownLayout("found an episode of a Minari data set, expected its root", uri=where)
        observation, action = self._take_about(metadata, where, limits)
        self.notes: list[str] = ["Infos and the options of resets are not read."]
        spaces = {"observations": observation, "actions": action}
        decode = _Decode(spaces, metadata.get("jpeg_encoding", True) is not False, limits)
        count = whole_number(metadata, "total_episodes", uri=where)
        kind = metadata.get("data_format", "hdf5")
        #: Its `episodes` have the metadata of each: total_steps, and maybe seed and rewards_sum.
        self._store: _Hdf5Store | _ArrowStore = (
            _Hdf5Store(place, folder, count, decode)
            if kind == "hdf5"
            else _ArrowStore(place, folder, kind, count, decode)
        )
        with closing_on_error(self._store):
            self.files: Sequence[InputFile] = self._store.files
            self.lengths: list[int] = [
                whole_number(about, "total_steps", uri=self.uri) for about in self._store.episodes
            ]
            total = whole_number(metadata, "total_steps", uri=where)
            if sum(self.lengths) != total:
                raise CorruptData(
                    f"total_steps is {total}, but the {count} episodes have {sum(self.lengths)}", uri=where
                )
            self._seeds = self._all_seeds()
            self._has_warned = False
            #: The episode whose sum of rewards was checked last.
            self._summed = -1
            self.row_bytes: int = self._measured()

    def _take_about(self, metadata: dict[str, Any], where: str, limits: Limits) -> tuple[Any, Any]:
        """Take in what the metadata state of the whole; gives both spaces, None if one is not stated."""
        kind = metadata.get("data_format", "hdf5")
        if kind not in ("hdf5", "arrow", "parquet"):
            raise UnknownLayout(
                f"found data_format {excerpt(kind)}, expected hdf5, arrow or parquet", uri=where
            )
        try:
            observation, action = (_space(metadata, f"{name}_space", limits) for name in _SPACES)
        except (CorruptData, SchemaError) as error:
            raise_at(error, uri=where)
        is_known = observation is not None and action is not None
        self.spaces: tuple[Any, Any] | None = (observation, action) if is_known else None
        stated, spec = metadata.get("minari_version"), metadata.get("env_spec")
        self.version: str | None = stated if isinstance(stated, str) else None
        self.origin: Origin = Origin(
            uri=self.uri,
            spaces=self.spaces,
            env=spec if isinstance(spec, str) else None,
            extra={name: metadata[name] for name in KEPT if name in metadata},
        )
        return observation, action

    def _measured(self) -> int:
        """Bytes of a row. The longest episode counts, of which not all rows need fit into memory."""
        longest = max(self.lengths, default=0)
        if not longest:
            return 1
        part = range(min(longest, _SAMPLE_ROWS))
        others = (number for number, steps in enumerate(self.lengths) if steps)
        return measure_first(
            (self.lengths.index(longest), *others),
            lambda episode: self._load(episode, part[: self.lengths[episode]], None),
        )

    def _all_seeds(self) -> np.ndarray | None:
        """The seed of each episode, -1 if it has none; None: no episode has one."""
        # Some versions of Minari write str(None) if there was no seed.
        found = (about.get("seed") for about in self._store.episodes)
        seeds = [None if seed == "None" else seed for seed in found]
        given = [seed for seed in seeds if seed is not None]
        for seed in given:
            if type(seed) is not int or not 0 <= seed < 1 << 64:
                raise CorruptData(f"found the seed {excerpt(seed)}, expected 64 bits", uri=self.uri)
        if not given:
            return None
        # Minari draws seeds of 64 bits, without a sign.
        if max(given) < 1 << 63:
            return np.array([-1 if seed is None else seed for seed in seeds], np.int64)
        if len(given) == len(seeds):
            return np.array(given, np.uint64)
        self.notes.append("Seeds are not read: some are above 2**63, and some episodes have none.")
        return None

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode; see `EpisodeSource`."""
        return self._load(episode, None, columns)

    def load_part(self, episode: int, start: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read some steps of an episode; see `PartSource`. The sum of its rewards is checked first."""
        if episode != self._summed:
            self._check_rewards(
                episode, self._store.read(episode, [_REWARDS], None, self.lengths[episode])[_REWARDS]
            )
            self._summed = episode
        return self._load(episode, range(start, stop), columns)

    @property
    def inputs(self) -> InputFiles | None:
        """See `SpanSource`."""
        return self._store.inputs

    def spans(
        self, first: int, stop: int, start: int, rows: int, columns: frozenset[str] | None
    ) -> Iterator[Span]:
        """See `SpanSource`."""
        for episode in range(first, stop):
            steps = range(start, min(start + rows, self.lengths[episode]))
            yield from self._store.spans(episode, _names_of(columns), steps)

    def _load(self, episode: int, part: range | None, columns: frozenset[str] | None) -> SampleBatch:
        steps = self.lengths[episode]
        found = self._store.read(episode, _names_of(columns), part, steps)
        steps = steps if part is None else len(part)
        for name, value in found.items():
            if name in (_REWARDS, *_ENDS) and not isinstance(value, np.ndarray):
                raise CorruptData(f"{name} of episode {episode} are nested: expected an array", uri=self.uri)
            rows = steps + 1 if name == "observations" else steps
            for _, leaf in leaves(value):
                if len(leaf) != rows:
                    raise CorruptData(
                        f"episode {episode} of {steps} steps has {len(leaf)} {name}, expected {rows}",
                        uri=self.uri,
                    )
        if part is None:
            self._check_rewards(episode, found[_REWARDS])
        terminated, truncated = (flags_in(name, found[name]) for name in _ENDS)
        last = -1 if part is None or part.stop == self.lengths[episode] else None
        if not self._has_warned and (terminated[:last].any() or truncated[:last].any()):
            self._has_warned = True
            self.notes.append(
                "Some episodes have steps after one that ends them: all their steps are read, as one episode."
            )
            logger.warning("%s: episode %d has steps after one that ends it", self.uri, episode)
        columns_found = with_next_obs(found["observations"]) if "observations" in found else {}
        if "actions" in found:
            columns_found[Columns.ACTIONS] = found["actions"]
        columns_found |= {
            Columns.REWARDS: found[_REWARDS],
            Columns.TERMINATEDS: terminated,
            Columns.TRUNCATEDS: truncated,
        }
        if self._seeds is not None:
            columns_found[Columns.ENV_SEED] = np.full(steps, self._seeds[episode])
        return SampleBatch(columns_found)

    def _check_rewards(self, episode: int, rewards: Any) -> None:
        if not isinstance(rewards, np.ndarray):
            raise CorruptData(f"rewards of episode {episode} are nested: expected an array", uri=self.uri)
        stated = self._store.episodes[episode].get("rewards_sum")
        if stated is None:
            return
        total, told = float(rewards.sum(dtype=np.float64)), float(stated)
        is_right = math.isclose(told, total, rel_tol=1e-4, abs_tol=1e-6)
        if not is_right and not (math.isnan(told) and math.isnan(total)):
            raise CorruptData(
                f"rewards_sum of episode {episode} is {stated}, but its rewards sum up to {rewards.sum()}",
                uri=self.uri,
            )

    def close(self) -> None:
        """Close all files."""
        self._store.close()


def _names_of(columns: frozenset[str] | None) -> list[str]:
    """What is read of an episode for some columns."""

    def wants(*names: str) -> bool:
        return columns is None or not columns.isdisjoint(names)

    names = [_REWARDS, *_ENDS]
    names += ["observations"] * wants(Columns.OBS, Columns.NEXT_OBS)
    names += ["actions"] * wants(Columns.ACTIONS)
    return names


def _space(metadata: dict[str, Any], name: str, limits: Limits) -> Any:
    text = metadata.get(name)
    if text is None:  # Old data sets have the environment's spec alone; no environment is made for it.
        return None
    if not isinstance(text, str):
        raise CorruptData(f"{name} is {excerpt(text)}, expected JSON as a string")
    return space_of_minari(text, limits=limits)


@dataclass(frozen=True)
class _Decode:
    """What files hold for a space, as arrays."""

    spaces: dict[str, Any]
    has_jpeg: bool
    limits: Limits

    def is_jpeg(self, space: Any) -> bool:
        """Whether values of ``space`` are stored as JPEG files."""
        return self.has_jpeg and space is not None and is_image_space(space)

    def pictures(self, rows: Sequence[bytes], space: Any) -> np.ndarray:
        """JPEG files as pictures."""
        return encoded_column(rows, space.shape, codec="jpeg", spend=Allowance(self.limits).spend)


def is_image_space(space: Any) -> bool:
    """Whether Minari takes values of ``space`` for pictures."""
    from gymnasium.spaces import Box

    return (
        isinstance(space, Box)
        and len(space.shape) in (2, 3)
        and min(space.shape[:2]) >= 32
        and space.dtype == np.uint8
        and bool((space.low == 0).all() and (space.high == 255).all())
    )


def _nested(parts: dict[Any, Any], space: Any) -> Any:
    from gymnasium.spaces import Tuple

    return tuple(parts.values()) if isinstance(space, Tuple) else parts


# ---- HDF5 ----


class _Rows(NamedTuple):
    """Rows ``start`` to ``stop - 1`` of a dataset that must have ``all`` rows."""

    start: int
    stop: int
    all: int


class _Hdf5Store:
    """All episodes in one file: a group each.

    h5py's low-level functions are used: they take half the time of its objects, and an episode of some steps
    takes longer to find than to read.
    """

    def __init__(self, place: Place, folder: str, count: int, decode: _Decode) -> None:
        path = f"{folder}main_data.hdf5"
        entries = [entry for entry in place.root().list(folder.rstrip("/")) if entry.path == path]
        if not entries:
            raise CorruptData(f"{path} is absent", uri=place.uri)
        self.files: Sequence[InputFile] = [place.file(path, entries[0].size)]
        self._decode = decode
        self._handles = Hdf5Files(self.files, decode.limits)
        self.inputs: InputFiles | None = self._handles.inputs
        #: The library, once for all: an import statement takes as long as opening a dataset.
        self._h5py = import_module("h5py")
        self._open, self._all = self._h5py.h5o.open, self._h5py.h5s.ALL
        self._hard: Any = self._h5py.h5l.TYPE_HARD
        self._group: Any = self._h5py.h5g.GroupID
        self._dataset: Any = self._h5py.h5d.DatasetID
        with closing_on_error(self._handles), self._handles.guarded(0):
            self.episodes = self._index(count)

    def _index(self, count: int) -> list[dict[str, Any]]:
        h5a = self._h5py.h5a
        root = self._handles.file(0).id
        found = sum(1 for name in root if name.startswith(b"episode_"))
        if found != count:
            raise CorruptData(f"total_episodes is {count}, but the file has {found}")
        episodes: list[dict[str, Any]] = []
        kinds: dict[bytes, tuple[Any, np.dtype[Any], Any]] = {}
        for episode in each(range(count)):
            group = self._member(root, f"episode_{episode}")
            about = {}
            for name in (b"total_steps", b"seed", b"rewards_sum"):
                if h5a.exists(group, name):
                    attribute = h5a.open(group, name)
                    kind, known = attribute.get_type(), kinds.get(name)
                    # Finding NumPy's type takes longer than reading a number.
                    if known is None or not known[0].equal(kind):
                        dtype = attribute.dtype
                        known = kinds[name] = kind, dtype, memory_type(self._h5py, kind, dtype)
                    _, dtype, memory = known
                    value = np.empty((), dtype)
                    if name == b"seed" and value.dtype.kind == "O" and not attribute.shape:
                        about["seed"] = self._h5py.Group(group).attrs["seed"]  # Text: `_all_seeds` checks it.
                        continue
                    if value.dtype.kind not in "iuf" or attribute.shape:
                        raise CorruptData(f"{name.decode()} of episode {episode} is not a number")
                    attribute.read(value, memory)
                    about[name.decode()] = value.item()
            episodes.append(about)
        return episodes

    def _member(self, group: Any, name: str) -> Any:
        """The identifier of a group or dataset of ``group`` that is stored right there."""
        encoded = name.encode()
        self._handles.visit()
        if not isinstance(group, self._group):
            raise CorruptData(f"{excerpt(name)} is absent: found a dataset where its group should be")
        if group.links.get_info(encoded).type != self._hard:
            raise UnsafeData(f"{excerpt(name)} is a link, which may lead out of the file")
        found = self._open(group, encoded)
        if not isinstance(found, (self._dataset, self._group)):
            raise CorruptData(f"{excerpt(name)} is a type, expected a group or dataset")
        return found

    def read(self, episode: int, names: Sequence[str], part: range | None, steps: int) -> dict[str, Any]:
        """Columns of an episode, or of a part of its ``steps`` steps; observations have a row more."""
        found = {}
        self._handles.hold(0, self.spans(episode, names, range(steps) if part is None else part))
        with self._handles.guarded(0, episode):
            group = self._member(self._handles.file(0).id, f"episode_{episode}")
            for name in names:
                rows = None
                if part is not None:
                    more = name == "observations"
                    rows = _Rows(part.start, part.stop + more, steps + more)
                found[name] = self._value(group, name, self._decode.spaces.get(name), 0, rows)
        return found

    def spans(self, episode: int, names: Sequence[str], rows: range) -> Iterator[Span]:
        """The bytes of some steps of an episode."""
        return self._handles.spans(0, self._stretches(episode, names, rows))

    def _stretches(self, episode: int, names: Sequence[str], rows: range) -> Iterator[tuple[Any, int, int]]:
        group = self._member(self._handles.file(0).id, f"episode_{episode}")
        for name in names:
            for dataset in self._datasets(group, name, 0):
                yield dataset, rows.start, rows.stop + (name == "observations")

    def _datasets(self, group: Any, name: str, depth: int) -> Iterator[Any]:
        """A member of ``group``, or the datasets below it."""
        item = self._member(group, name)
        if not isinstance(item, self._group):
            yield self._h5py.Dataset(item)
            return
        self._check_depth(name, depth)
        for inner in item:
            yield from self._datasets(item, inner.decode(), depth + 1)

    def _check_depth(self, name: str, depth: int) -> None:
        """Refuse a group that is too deep: it may be in itself."""
        if depth > self._decode.limits.nesting:
            raise UnsafeData(f"{excerpt(name)} nests more than {self._decode.limits.nesting} deep")

    def _value(self, group: Any, name: str, space: Any, depth: int, rows: _Rows | None) -> Any:
        item = self._member(group, name)
        children = children_of(space)
        is_group = isinstance(item, self._group)
        if is_group != (children is not None) and space is not None:
            raise CorruptData(f"{excerpt(name)} has another structure than its space {excerpt(str(space))}")
        if is_group:
            self._check_depth(name, depth)
            if children is None:
                return self._groups(item, depth, rows)
            parts = {
                key: self._value(
                    item, key if isinstance(key, str) else f"_index_{key}", child, depth + 1, rows
                )
                for key, child in children
            }
            return _nested(parts, space)
        return self._leaf(item, name, space, rows)

    def _groups(self, group: Any, depth: int, rows: _Rows | None) -> Any:
        """What is below a group, where no space is stated."""
        names = sorted(name.decode() for name in group)
        positions = [f"_index_{number}" for number in range(len(names))]
        if sorted(positions) == names:
            return tuple(self._value(group, name, None, depth + 1, rows) for name in positions)
        return {name: self._value(group, name, None, depth + 1, rows) for name in names}

    def _leaf(self, item: Any, name: str, space: Any, rows: _Rows | None) -> np.ndarray:
        shape, stored = self._handles.check(item, name, self.files[0].uri)
        kind = stored.dtype
        if rows is not None and shape[:1] != (rows.all,):
            raise CorruptData(f"{excerpt(name)} has the shape {shape}, expected {rows.all} rows")
        if kind.hasobject:
            return self._of_any_length(self._h5py.Dataset(item), name, space, rows)
        if rows is not None:
            shape = (rows.stop - rows.start, *shape[1:])
        self._handles.spend(shape[0] if shape else 1, shape, kind)
        values = np.empty(shape, kind if kind.isnative else kind.newbyteorder("="))
        if rows is None:
            item.read(self._all, self._all, values, stored.memory)
        else:
            self._h5py.Dataset(item).read_direct(values, np.s_[rows.start : rows.stop])
        if values.ndim == 2 and kind == np.uint8 and self._decode.is_jpeg(space):
            return self._decode.pictures([row.tobytes() for row in values], space)
        if name in (_REWARDS, *_ENDS) and values.shape[1:] == (1,):
            return values.reshape(-1)
        if space is not None and values.shape[1:] != space.shape:
            raise SchemaError(
                f"rows of shape {values.shape[1:]} where the space has {space.shape}", column=name
            )
        return values

    def _of_any_length(self, dataset: Any, name: str, space: Any, part: _Rows | None) -> np.ndarray:
        """Texts, or JPEG files of different lengths."""
        is_text = self._h5py.check_string_dtype(dataset.dtype) is not None
        of_bytes = self._h5py.check_vlen_dtype(dataset.dtype) == np.uint8
        is_picture = of_bytes and self._decode.is_jpeg(space)
        if dataset.ndim != 1 or not (is_text or is_picture):
            raise SchemaError(
                f"found {dataset.dtype} of shape {dataset.shape}, expected numbers", column=name
            )
        rows = self._handles.read(dataset, *((0, None) if part is None else (part.start, part.stop)))
        if is_picture:
            return self._decode.pictures([row.tobytes() for row in rows], space)
        return object_column(row.decode() for row in rows)

    def close(self) -> None:
        self._handles.close()


# ---- Arrow and Parquet ----


class _ArrowStore:
    """A folder for each episode, with its metadata and one file."""

    def __init__(self, place: Place, folder: str, kind: str, count: int, decode: _Decode) -> None:
        self._decode = decode
        storage, limits = place.root(), decode.limits
        sizes = {
            entry.path: entry.size for entry in storage.list(folder.rstrip("/"), limit=limits.listed_names)
        }
        found = sum(path.endswith(f"/part-0.{kind}") for path in sizes)
        if found != count:
            raise CorruptData(f"total_episodes is {count}, but there are {found}", uri=place.uri)
        paths = [f"{folder}{episode}/part-0.{kind}" for episode in range(count)]
        if absent := next((path for path in paths if path not in sizes), None):
            raise CorruptData(f"{absent} is absent", uri=place.uri)
        files = [place.file(path, sizes[path]) for path in paths]
        self.files: Sequence[InputFile] = files
        abouts = [f"{folder}{episode}/{_METADATA}" for episode in range(count)]
        read = side_by_side(storage, lambda path: read_object(storage, path, limits=limits), abouts)
        self.episodes = [about for _, about in zip(each(range(count)), read, strict=True)]
        self._parquet = ParquetFiles(files, limits) if kind == "parquet" else None
        self.inputs: InputFiles = self._parquet.inputs if self._parquet else InputFiles(files)
        #: Of Arrow: the file of which parts were read last, and its last record batch.
        self._open: tuple[int, ArrowTable] | None = None
        self._held: tuple[int, int, Any] | None = None

    def read(self, episode: int, names: Sequence[str], part: range | None, steps: int) -> dict[str, Any]:
        """Columns of an episode, or of a part of its ``steps`` steps; observations have a row more."""
        with Guard(self.files[episode], episode, format="Arrow" if self._parquet is None else "Parquet"):
            found = self._all(episode, names) if part is None else self._rows(episode, names, part, steps)
            return self._columns(found, names)

    def spans(self, episode: int, names: Sequence[str], rows: range) -> Iterator[Span]:
        """The bytes of some steps of an episode, and of the row after them; a guess, before it is open."""
        if self._parquet is not None:
            yield from self._parquet.spans_of_rows(episode, rows.start, rows.stop + 1, names)
        elif self._open is not None and self._open[0] == episode:
            table, at = self._open[1], 0
            for piece, count in enumerate(table.piece_rows(0)):
                is_held = self._held is not None and self._held[:2] == (episode, piece)
                if rows.start < at + count and at <= rows.stop and not is_held:
                    yield from ((episode, *place) for place in table.places(0, piece, names))
                at += count
        else:
            size, steps = self.files[episode].size or 0, max(1, self.episodes[episode]["total_steps"])
            margin = size // 16  # Rows of one file differ in bytes.
            start, stop = size * rows.start // steps - margin, size * (rows.stop + 1) // steps + margin
            yield episode, max(0, start), min(size, stop)

    def _all(self, episode: int, names: Sequence[str]) -> Any:
        if self._parquet is not None:
            return self._parquet.all(episode, names)
        try:
            return read_arrow(self._arrow_file(episode))
        except BaseException:
            self._close()  # The bytes may have been damaged on their way: they are fetched again.
            raise

    def _opened(self, episode: int, file: int, *, scans: bool = False) -> IO[bytes]:
        """The file of an episode, which is the only one of its table."""
        return self.inputs.open(episode, scans=scans)

    def _rows(self, episode: int, names: Sequence[str], part: range, steps: int) -> Any:
        """The rows of a part, and the one after it, as a table. Of Arrow, the last record batch is kept."""
        import pyarrow as pa

        parquet, at, found = self._parquet, 0, []
        if parquet is not None:
            about = parquet.file(episode).arrow.metadata
            counts = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
        else:
            counts = self._arrow_file(episode).piece_rows(0)
        for piece, count in enumerate(counts):
            low, high = max(part.start - at, 0), min(part.stop + 1 - at, count)
            at += count
            if low >= high:
                continue
            if parquet is not None:
                found.append(parquet.rows(episode, piece, low, high, names))
            else:
                found.append(pa.Table.from_batches([self._batch(episode, piece).slice(low, high - low)]))
        if at != steps + 1:
            raise CorruptData(f"episode {episode} of {steps} steps has {at} rows, expected {steps + 1}")
        return pa.concat_tables(found)

    def _arrow_file(self, episode: int) -> ArrowTable:
        if self._open is None or self._open[0] != episode:
            self._close()
            opens = partial(self._opened, episode)
            table = open_plain_arrow(self.files[episode], limits=self._decode.limits, opens=opens)
            self._open = episode, table
        return self._open[1]

    def _batch(self, episode: int, piece: int) -> Any:
        """A record batch, whose buffers are the bytes of the file: the columns are not decoded."""
        if self._held is None or self._held[:2] != (episode, piece):
            self._held = None  # Frees the old one before the next is read.
            table = self._arrow_file(episode)
            self._held = episode, piece, table.decode(0, piece, table.names)
        return self._held[2]

    def _columns(self, table: Any, names: Sequence[str]) -> dict[str, Any]:
        found = {}
        for name in names:
            if name not in table.column_names:
                raise CorruptData(f"the column {name} is absent")
            values = table.column(name).combine_chunks()
            if name != "observations":
                # The last row is padding, or that of the next part.
                values = values.slice(0, max(0, len(values) - 1))
            found[name] = self._value(values, name, self._decode.spaces.get(name))
        return found

    def _value(self, values: Any, name: str, space: Any) -> Any:
        import pyarrow as pa

        if (children := children_of(space)) is not None:
            if not pa.types.is_struct(values.type):
                raise SchemaError(f"found {values.type}, expected a struct", column=name)
            fields = [values.type.field(i).name for i in range(values.type.num_fields)]
            if sorted(fields) != sorted(str(key) for key, _ in children):
                raise SchemaError(
                    f"found the fields {excerpt(fields)}, expected those of the space", column=name
                )
            parts = dict(zip(fields, values.flatten(), strict=True))
            return _nested({key: self._value(parts[str(key)], name, child) for key, child in children}, space)
        if pa.types.is_binary(values.type) and self._decode.is_jpeg(space):
            return self._decode.pictures(values.to_pylist(), space)
        array = to_column(name, values, {})
        if space is None or isinstance(array, (dict, tuple)) or array.dtype.hasobject:
            return array
        return fit_space(array, space, np.asarray)

    def _close(self) -> None:
        opened, self._open, self._held = self._open, None, None
        if opened is not None:
            opened[1].close()

    def close(self) -> None:
        self._close()
        self.inputs.close()
        if self._parquet is not None:
            self._parquet.close()
