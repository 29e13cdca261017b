"""TorchRL: memory-mapped TensorDicts in TorchRL's episode data format (TED).

`ReplayBuffer.dumps` writes a folder with ``storage/`` and ``writer/``; `TensorDict.memmap` writes what is in
``storage/`` alone: ``meta.json`` describes the tensors, ``<key>.memmap`` has the values of each, row after
row, and nested TensorDicts are folders. There are no checksums: a changed value is not noticed.

Alignment: row t has the observation and the action, and under ``next`` the observation, the reward and the
ends that followed. So every observation after an action is known. A full buffer is a ring: the writer's
cursor says where the oldest row is. Rows are read from the oldest to the newest, those of one of the
collector's trajectories (``traj_ids``) together. The oldest episode may lack its first steps, and the newest
its last. Of a TensorDict of several dimensions, the last one is time.

Without ``traj_ids``, ``next`` shows which row follows: rows of environments that take turns are put together,
and an episode is also cut where the next row has another observation; no flag marks such a cut. If no row
continues another one, the flags alone end episodes.

Refused are a full buffer without a cursor, a buffer of several dimensions (``ndim``, or trajectories as
items), and writers other than the round-robin ones, such as ``TensorDictMaxValueWriter``: it replaces the row
of the lowest rank, so the order of the rows means nothing.

Values that are not tensors (texts, pickles) are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.batch.nested import unflatten
from rlio.errors import CorruptData, MissingColumn, OptionError, UnknownLayout, UnsafeData, excerpt
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.inputs import Guard
from rlio.formats.files.json_files import NUMBERS, OURS, read_object, whole_number
from rlio.formats.files.step_rows import flat, ranges_of
from rlio.formats.format import Format, Marks
from rlio.formats.place import Place
from rlio.limits import Limits
from rlio.storage import InputFile, InputFiles, Span, open_input
from rlio.storage.open_files import OpenFiles
from rlio.support.calls import closing_on_error

FORMAT = Format(
    name="torchrl",
    title="TorchRL",
    marks=Marks(json=lambda found: "tensordict" in str(found.get("_class", found.get("_type", "")))),
    source="rlio.formats.torchrl:TorchrlSource",
    root=("storage/meta.json", "meta.json"),
    about=(
        "A dumped buffer or a TensorDict with the keys of TED. Episodes at a ring's ends may be parts. "
        "Buffers of several dimensions, and those of other writers than the round-robin one, are refused."
    ),
)

_META, _NEXT, _STORAGE, _WRITER = "meta.json", "next", "storage/storage_metadata.json", "writer/metadata.json"
#: What the round-robin writers store.
_ROUND_ROBIN: Final = frozenset(("cursor", "write_count", "generation_shape", "generation_dtype"))
_FLAGS: Final = ("done", "terminated", "truncated")
#: Keys that are neither observations nor columns: the buffer's, the collector's, and repeated flags.
_OWN: Final = frozenset((_NEXT, "collector", "index", "reward", *_FLAGS))
#: Keys that transforms put beside observations, before and after the action.
_COUNTERS: Final = frozenset(("is_init", "step_count", "reward_sum", "episode_reward", "time_step"))
_OPEN_FILES = 32
#: Environments whose rows may take turns, and rows in which they are looked for.
_MOST_ENVIRONMENTS: Final = 1024
_LOOKED_AT: Final = 4096
_FIRST_LOOK: Final = 8
_COMPARED_BYTES: Final = 8 << 20

_Path = tuple[str, ...]


class _Leaf(NamedTuple):
    """A tensor: its file, and the shape and dtype of a row."""

    file: InputFile
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class TorchrlSource:
    """The episodes of one dumped buffer or TensorDict; an `EpisodeSource`.

    Args:
        place: The data set.
        limits: What the files may ask for.
        observations: Keys that are parts of the observation; None: those both at the root and under ``next``,
            except counters such as ``step_count``. A single one is ``obs`` itself.

    Attributes:
        notes: What is not read.
        inputs: See `SpanSource`.
    """

    spaces = None

    def __init__(self, place: Place, *, limits: Limits, observations: Sequence[str] | None = None) -> None:
        self._place, self._limits = place, limits
        self.uri: str = place.uri
        self.notes: list[str] = []
        storage = place.root()
        self._folder = "storage/" if storage.exists(f"storage/{_META}") else ""
        self._sizes = {entry.path: entry.size for entry in storage.list(limit=limits.listed_names)}
        self._batch: tuple[int, ...] = ()
        self._leaves: dict[_Path, _Leaf] = {}
        self._left_out: list[str] = []
        self._read_meta(())
        self._columns = self._map(observations)
        self.files: list[InputFile] = [leaf.file for leaf in self._leaves.values()]
        self.row_bytes: int = max(1, sum(_row_bytes(leaf) for _, leaf in self._columns))
        self.inputs: InputFiles = InputFiles(self.files)
        self._numbers = {leaf: number for number, leaf in enumerate(self._leaves.values())}
        self._open: OpenFiles[int, IO[bytes]] = OpenFiles(_OPEN_FILES, close=lambda stream: stream.close())
        #: Of each episode: ranges of rows, in its order.
        self._ranges: list[list[tuple[int, int]]] = []
        self.lengths: list[int] = []
        with closing_on_error(self):
            self._index()
        if self._left_out:
            self.notes.append(f"Not read: {excerpt(self._left_out)}.")

    # ---- what describes the whole ----

    def _read_meta(self, above: _Path) -> None:
        """The tensors of a TensorDict, and of those in it."""
        path = self._folder + "/".join((*above, _META))
        if path not in self._sizes:  # Only what is listed below the root is opened.
            raise CorruptData(f"the file {excerpt(path)} is absent", uri=self.uri)
        meta = read_object(self._place.root(), path, limits=self._limits)
        where = self._place.root().uri_of(path)
        if len(above) > self._limits.nesting:
            raise UnsafeData(f"TensorDicts nested more than {self._limits.nesting} deep", uri=where)
        if "TensorDict'" not in str(meta.get("_type")) or "LazyStacked" in str(meta.get("_type")):
            if not above:
                raise UnknownLayout(f"found {excerpt(meta.get('_type'))}, expected a TensorDict", uri=where)
            self._left_out.append("/".join(above))
            return
        shape = _shape(meta.get("shape"), where)
        if not above:
            self._batch = shape
            Allowance(self._limits, stored=sum(size or 0 for size in self._sizes.values())).claim(
                math.prod(shape)
            )
        for name, about in meta.items():
            if not isinstance(about, dict):
                continue  # The TensorDict's own fields.
            if "dtype" not in about:
                self._read_meta((*above, name))
            elif about.get("is_nested") or str(about["dtype"]).removeprefix("torch.") not in NUMBERS:
                self._left_out.append("/".join((*above, name)))
            else:
                self._leaves[*above, name] = self._leaf((*above, name), about, where)
            if len(self._leaves) > self._limits.columns:
                raise UnsafeData(f"a TensorDict of more than {self._limits.columns} tensors", uri=where)

    def _leaf(self, path: _Path, about: dict[str, Any], where: str) -> _Leaf:
        shape = _shape(about.get("shape"), where)
        dtype = np.dtype(str(about["dtype"]).removeprefix("torch."))
        if shape[: len(self._batch)] != self._batch:
            raise CorruptData(
                f"{excerpt('/'.join(path))} has the shape {shape}, expected {self._batch} first", uri=where
            )
        name = f"{self._folder}{'/'.join(path)}.memmap"
        if name not in self._sizes:
            raise CorruptData(f"the file {excerpt(name)} is absent", uri=self.uri)
        file = self._place.file(name, self._sizes[name])
        if self._sizes[name] != math.prod(shape) * dtype.itemsize:
            open_input(file).close()  # It may be a pointer of Git LFS, which is another error.
            raise CorruptData(
                f"the file has {self._sizes[name]} bytes, expected {dtype} of shape {shape}",
                uri=self._place.root().uri_of(name),
            )
        return _Leaf(file, shape[len(self._batch) :], dtype)

    def _map(self, observations: Sequence[str] | None) -> list[tuple[_Path, _Leaf]]:
        """(column, and keys in it; tensor) of what is read, but for the flags."""
        top = {path[0] for path in self._leaves}
        after = {path[1] for path in self._leaves if path[0] == _NEXT and len(path) > 1}
        if observations is None:
            observations = sorted((top & after) - _OWN - _COUNTERS)
        elif unknown := [key for key in observations if key not in top or key not in after]:
            raise OptionError(
                f"observations={excerpt(unknown)}: expected keys of {sorted(top & after - _OWN)}"
            )
        if not observations or "reward" not in after or "action" not in top:
            raise UnknownLayout(
                f"found the keys {excerpt(sorted(top))}, and {excerpt(sorted(after))} in next, expected "
                "those of TED: observations in both, action, and next/reward",
                uri=self.uri,
            )
        found: list[tuple[_Path, _Leaf]] = []
        for path, leaf in self._leaves.items():
            column: _Path | None = None
            key, *inner = path[1:] if path[0] == _NEXT else path
            if key in observations:
                name = Columns.NEXT_OBS if path[0] == _NEXT else Columns.OBS
                column = (name, *([key] if len(observations) > 1 else []), *inner)
            elif path in ((_NEXT, "reward"), ("action", *inner)):
                column = (Columns.ACTIONS if key == "action" else Columns.REWARDS, *inner)
            elif path[0] != _NEXT and key not in _OWN and key not in OURS:
                column = ("/".join(path),)
            elif key not in _OWN and not (path[0] == _NEXT and key in top):
                self._left_out.append("/".join(path))
            if column is not None:
                found.append((column, leaf))
        sides = [
            {path[1:] for path, _ in found if path[0] == name} for name in (Columns.OBS, Columns.NEXT_OBS)
        ]
        if sides[0] != sides[1]:
            raise UnknownLayout("the observations and those of next have different parts", uri=self.uri)
        return found

    # ---- the order of rows ----

    def _index(self) -> None:
        order = self._order()
        new = np.zeros(len(order), np.bool_)
        if len(self._batch) > 1:
            new = order % max(1, self._batch[-1]) == 0
        ids = self._leaves.get(("collector", "traj_ids"))
        if ids is not None and not math.prod(ids.shape) > 1:
            _, first, each = np.unique(
                self._read(ids, ranges_of(order)).reshape(-1), return_index=True, return_inverse=True
            )
            # By the first row of each trajectory.
            number = np.argsort(np.argsort(first))[each]
            together = np.argsort(number, kind="stable")
            order, new, number = order[together], new[together], number[together]
            new[1:] |= number[1:] != number[:-1]
        ends = np.logical_or(*self._ends(ranges_of(order), len(order)))
        if ids is None:
            order, ends, breaks = self._by_next(order, ends)
            new[1:] |= breaks
        new[1:] |= ends[:-1]
        new[:1] = True
        for start, stop in pairwise([*np.flatnonzero(new).tolist(), len(order)]):
            self._ranges.append(ranges_of(order[start:stop]))
            self.lengths.append(stop - start)

    def _by_next(
        self, order: NDArray[np.int64], ends: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """The rows with those of each environment together, their ends, and whether each but the first does
        not go on from the one before.
        """
        distance = 1 if len(self._batch) > 1 else self._distance(order, ends)
        if distance > 1:
            together = np.argsort(np.arange(len(order)) % distance, kind="stable")
            order, ends = order[together], ends[together]
            self.notes.append(
                f"Without collector/traj_ids, rows of {distance} environments take turns, as next shows: "
                "they are put together."
            )
        follows = self._follows(order, 1)
        breaks = ~follows & ~ends[:-1]
        if not follows.any():
            breaks[:] = False
        elif count := int(breaks.sum()) - (distance - 1):
            self.notes.append(
                f"Without collector/traj_ids, {count} rows without a flag are the last of their episode: "
                "next has another observation than the row after them."
            )
        return order, ends, breaks

    def _distance(self, order: NDArray[np.int64], ends: NDArray[np.bool_]) -> int:
        """How many rows after a row the next one of its environment is, for most rows."""
        order, ends = order[:_LOOKED_AT], ends[:_LOOKED_AT]
        found = {}
        for distance in range(1, min(_MOST_ENVIRONMENTS, len(order) - 1) + 1):
            # The first rows rule most distances out.
            some = min(len(order), distance + _FIRST_LOOK)
            if distance > 1 and not (self._follows(order[:some], distance) & ~ends[: some - distance]).any():
                continue
            going_on = ~ends[:-distance]
            found[distance] = (
                float(self._follows(order, distance)[going_on].mean()) if going_on.any() else 1.0
            )
            if found[distance] == 1:
                break
        return max(found, key=lambda distance: (found[distance], -distance), default=1)

    def _follows(self, order: NDArray[np.int64], distance: int) -> NDArray[np.bool_]:
        """Whether the observation after each row is that of the row ``distance`` after it, byte by byte."""
        rows = max(0, len(order) - distance)
        found = np.ones(rows, np.bool_)
        step = max(1, _COMPARED_BYTES // self.row_bytes)
        leaves_of = {
            name: {path[1:]: leaf for path, leaf in self._columns if path[0] == name and _row_bytes(leaf)}
            for name in (Columns.OBS, Columns.NEXT_OBS)
        }
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            for path, leaf in leaves_of[Columns.OBS].items():
                after = self._read(leaves_of[Columns.NEXT_OBS][path], ranges_of(order[start:stop]))
                now = self._read(leaf, ranges_of(order[start + distance : stop + distance]))
                if after.dtype != now.dtype or after.shape != now.shape:
                    found[start:stop] = False
                    continue
                one, other = (values.view(np.uint8).reshape(stop - start, -1) for values in (after, now))
                found[start:stop] &= (one == other).all(axis=1)
        return found

    def _order(self) -> NDArray[np.int64]:
        """The rows that are valid, the oldest first."""
        rows, storage = math.prod(self._batch), self._place.root()
        path = _STORAGE if self._folder else _STORAGE.rpartition("/")[2]
        if path not in self._sizes:  # A TensorDict of its own.
            return np.arange(rows)
        where = storage.uri_of(path)
        about = read_object(storage, path, limits=self._limits)
        valid = whole_number(about, "len", uri=where)
        if valid > rows:
            raise CorruptData(f"len is {valid}, but there are {rows} rows", uri=where)
        if len(self._batch) > 1:
            raise UnknownLayout(
                f"found a buffer of the shape {self._batch}, whose dimension of time is not stored, expected "
                "one dimension: extend a buffer of one dimension with the rows of each trajectory",
                uri=self.uri,
            )
        cursor = self._cursor(rows, is_full=valid == rows)
        return (cursor + np.arange(valid)) % max(1, rows)

    def _cursor(self, rows: int, *, is_full: bool) -> int:
        """The oldest row of a buffer."""
        if not self._folder or _WRITER not in self._sizes:
            if not is_full:
                return 0
            raise UnknownLayout(
                f"found the storage of a full buffer without {_WRITER}, whose cursor says which row is the "
                "oldest: pass the folder of ReplayBuffer.dumps; or, if the rows lie in their order, save "
                "them alone: buffer[:].memmap(folder)",
                uri=self.uri,
            )
        where = self._place.root().uri_of(_WRITER)
        writer = read_object(self._place.root(), _WRITER, limits=self._limits)
        if unknown := sorted(writer.keys() - _ROUND_ROBIN):
            raise UnknownLayout(
                f"found a writer with {excerpt(unknown)}, such as TensorDictMaxValueWriter, which keeps its "
                "rows in no order, expected a round-robin writer, which has a cursor and no more: write its "
                "trajectories with rlio.ParquetWriter",
                uri=where,
            )
        cursor = whole_number(writer, "cursor", uri=where)
        if cursor > rows:
            raise CorruptData(f"cursor is {cursor}, and there are {rows} rows", uri=where)
        return cursor if is_full else 0

    def _ends(self, ranges: Sequence[tuple[int, int]], rows: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The flags terminateds and truncateds of rows."""
        found: dict[str, NDArray[np.bool_]] = {}
        for name in _FLAGS:
            leaf = self._leaves.get((_NEXT, name))
            if leaf is not None and (leaf.dtype != np.bool_ or math.prod(leaf.shape) != 1):
                raise UnknownLayout(f"next/{name} is {leaf.dtype} of shape {leaf.shape} a row", uri=self.uri)
            if leaf is not None:
                found[name] = self._read(leaf, ranges).reshape(rows)
        if "terminated" not in found:
            raise MissingColumn(
                "next has no terminated, which says why an episode ended", column="terminated", uri=self.uri
            )
        none = np.zeros(rows, np.bool_)
        terminated, done = found["terminated"], found.get("done", none)
        return terminated, found.get("truncated", none) | (done & ~terminated)

    # ---- values ----

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode; see `EpisodeSource`."""
        ranges, steps = self._ranges[episode], self.lengths[episode]
        Allowance(self._limits).spend(steps * self.row_bytes)
        wanted = self._wanted(columns)
        values = [self._read(leaf, ranges) for _, leaf in wanted]
        rows: dict[str, Any] = unflatten([path for path, _ in wanted], values) if wanted else {}
        if Columns.REWARDS in rows:
            rows[Columns.REWARDS] = flat(rows[Columns.REWARDS])
        rows[Columns.TERMINATEDS], rows[Columns.TRUNCATEDS] = self._ends(ranges, steps)
        return SampleBatch(rows)

    def _wanted(self, columns: frozenset[str] | None) -> list[tuple[_Path, _Leaf]]:
        return [pair for pair in self._columns if columns is None or pair[0][0] in columns]

    def spans(
        self, first: int, stop: int, start: int, rows: int, columns: frozenset[str] | None
    ) -> Iterator[Span]:
        """See `SpanSource`. Episodes are read whole."""
        flags = [self._leaves[_NEXT, name] for name in _FLAGS if (_NEXT, name) in self._leaves]
        for episode in range(first, stop):
            for leaf in (*(leaf for _, leaf in self._wanted(columns)), *flags):
                for begin, end in self._ranges[episode]:
                    yield self._numbers[leaf], begin * _row_bytes(leaf), end * _row_bytes(leaf)

    def _read(self, leaf: _Leaf, ranges: Sequence[tuple[int, int]]) -> NDArray[Any]:
        """Rows of a tensor as a new array."""
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        with Guard(leaf.file, format="TorchRL"):
            number = self._numbers[leaf]
            stream = self._open.get(number) or self._open.add(number, self.inputs.open(number))
            parts = []
            for start, stop in ranges:
                stream.seek(start * size)
                parts.append(stream.read((stop - start) * size))
                if len(parts[-1]) != (stop - start) * size:
                    raise CorruptData(f"the file ends within the rows {start} to {stop}")
            data = bytearray().join(parts)
            if leaf.dtype == np.bool_ and data.strip(b"\0\1"):
                raise CorruptData("found bools other than 0 and 1")
            rows = sum(stop - start for start, stop in ranges)
            return np.frombuffer(data, leaf.dtype).reshape(rows, *leaf.shape)

    def close(self) -> None:
        """Close all files."""
        self._open.close()
        self.inputs.close()


def _shape(found: object, where: str) -> tuple[int, ...]:
    if not isinstance(found, list) or len(found) > 32 or any(type(n) is not int or n < 0 for n in found):
        raise CorruptData(f"shape is {excerpt(found)}, expected whole numbers", uri=where)
    return tuple(found)


def _row_bytes(leaf: _Leaf) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
