"""Zarr replay buffers (Diffusion Policy): ``data/<name>``, arrays of all steps, and ``meta/episode_ends``.

``episode_ends`` has the number of the row after each episode. Row t has the observation and the action that
was taken. The observation after the last step and the reason of an end are not stored: an episode is
truncated. ``data/action`` are the actions, ``reward`` or ``rewards`` the rewards; the other arrays are the
parts of the observation, unless the option ``observations`` names them.

The package zarr (extra ``zarr``) decodes both versions of its format, in folders and zip files. rlio reads
the files for it, and first refuses what it does not know: arrays of objects, codecs other than `_PACKED`,
chunks that claim to unpack to more than their array says. Chunks that are not stored have the fill value.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.other_names import MEANT
from rlio.errors import (
    CorruptData,
    DataNotFound,
    OptionError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
    excerpt,
)
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.inputs import Guard
from rlio.formats.files.json_files import read_object
from rlio.formats.files.step_columns import suggested_mapping
from rlio.formats.format import Format, Marks
from rlio.formats.place import Place
from rlio.formats.tables.mapping import MappedSource
from rlio.formats.tables.paths import names_of
from rlio.formats.tables.table import KEPT_BYTES, Rows, Table
from rlio.limits import Limits
from rlio.mapping import DERIVE
from rlio.mapping import Mapping as ColumnMapping
from rlio.storage import InputFile, InputFiles, Span, Storage
from rlio.storage.filesystem import Entry
from rlio.storage.open_files import OpenFiles
from rlio.storage.parallel import each
from rlio.support.extras import needs
from rlio.support.forks import cached_property

_ENDS: Final = "meta/episode_ends"
#: Of an array, in version 2 and 3 of the format.
_DESCRIPTIONS: Final = (".zarray", "zarr.json")
_ROOTS: Final = tuple(f"{_ENDS}/{name}" for name in _DESCRIPTIONS)
_NUMBER: Final = re.compile(r"[0-9]+")

FORMAT = Format(
    name="zarr",
    title="Zarr replay buffers",
    marks=Marks(folders=frozenset(("data", "meta")), paths=_ROOTS),
    source="rlio.formats.zarr_buffers:open_buffer",
    table="rlio.formats.zarr_buffers:ZarrTable",
    root=_ROOTS,
    about="Final observations are not stored, and all ends are truncations.",
)

#: A chunk is inflated as a whole: it may take this fraction of a row group's limit.
_PART: Final = 4
_PACKED: Final = frozenset(("blosc", "zstd", "gzip", "zlib", "lz4"))
#: Those that do not change how many bytes there are, by more than a checksum.
_PLAIN: Final = frozenset(("bytes", "transpose", "crc32c", "delta", "shuffle"))
_SHARDS: Final = "sharding_indexed"
_ACTIONS: Final = ("action", "actions")
_REWARDS: Final = ("reward", "rewards")
_DERIVED: Final = "next_obs='derive'"
_BLOCK: Final = 1 << 20
_SHOWN: Final = 20
#: Files that are open: a shard of each array.
_OPEN_FILES: Final = 16
#: Names whose meaning the layout does not state: whether they end an episode, or follow a step.
_DOUBTFUL: Final = frozenset(
    name
    for name, meant in MEANT.items()
    if not {Columns.OBS, Columns.ACTIONS, Columns.REWARDS}.intersection(meant)
) | {Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.DONES, Columns.EPS_ID, Columns.NEXT_OBS}


class ZarrTable(Table):
    """The arrays of a replay buffer; a `Table`. Only the chunks of the rows that are asked for are read.

    Args:
        place: The folder or zip file.
        limits: Bounds on the arrays.

    Attributes:
        arrays: Name -> shape and dtype.
        unread: Name -> why an array cannot be read.
        beside: Paths of other arrays, which have no value a step.
    """

    def __init__(self, place: Place, *, limits: Limits) -> None:
        root = place.root()
        path = next(path for path in _ROOTS if root.exists(path))
        super().__init__(place.uri, [place.file(path)])
        self._arrays = _Arrays(root, limits, path.rpartition("/")[2])
        self._file = self.files[0]
        with self._guarded():
            ends = self._arrays.rows(_ENDS, 0, None).astype(np.int64)
        if ends.ndim != 1 or (np.diff(ends, prepend=0) < 0).any():
            found = excerpt(ends.tolist())
            raise CorruptData(f"episode_ends is {found}, expected row numbers that grow", uri=self.uri)
        self.lengths: Sequence[int] | None = np.diff(ends, prepend=0).tolist()
        names = [name for name, is_folder in root.children("data", most=limits.columns + 1) if is_folder]
        if len(names) > limits.columns:
            raise UnsafeData(f"more than {limits.columns} arrays: raise Limits.columns", uri=self.uri)
        self.arrays: dict[str, _About] = {}
        self.unread: dict[str, UnknownLayout | SchemaError] = {}
        for name, about in zip(names, each(root, self._looked, names), strict=True):
            if isinstance(about, _About):
                self.arrays[name] = about
            elif about is not None:
                self.unread[name] = about
        of_episodes = [f"meta/{name}" for name, is_folder in root.children("meta", most=_SHOWN) if is_folder]
        self.beside: list[str] = [path for path in of_episodes if path != _ENDS]
        self.allowance: Allowance = self._arrays.allowance
        self.inputs: InputFiles = self._arrays.inputs
        #: The row after those that `spans` stated last.
        self._stated = -1
        # Rows after the last end belong to no episode.
        self.add_file(list(self.arrays), int(ends[-1]) if len(ends) else 0)

    def _guarded(self) -> Guard:
        return Guard(self._file, format="zarr")

    def _looked(self, name: str) -> _About | UnknownLayout | SchemaError | None:
        """The description of an array, or why it cannot be read; None: there is no array."""
        try:
            with self._guarded():
                return self._arrays.look(f"data/{name}")
        except (UnknownLayout, SchemaError) as error:
            return error

    def suggested(self) -> str:
        """See `Table`: the buffer itself states where episodes end."""
        return f"{suggested_mapping(list(self.names), ends=_DERIVED)} (docs/mapping.md)"

    def arranged(self, mapping: ColumnMapping) -> ColumnMapping:
        """See `Table`. A mapping may leave out what cannot be read."""
        for name in names_of([*mapping.columns.values()]):
            if name in self.unread:
                raise self.unread[name]
        return mapping

    def stored(self) -> list[InputFile]:
        """The files of the chunks, which determine the rows."""
        return self._arrays.files()

    def read(self, rows: Rows, names: Collection[str]) -> dict[str, Any]:
        """See `Table`."""
        found: dict[str, Any] = {}
        if self._stated < 0 and self.inputs.are_far:  # Opening, and whoever states nothing.
            self.inputs.expect(self._spans(rows, names))
        for name in names:
            shape = self.arrays[name].shape
            if not shape or shape[0] < self.rows[0]:
                raise SchemaError(f"found the shape {shape}, expected {self.rows[0]} rows", column=name)
            found[name] = self._values(name, rows)
        return found

    def spans(self, rows: Rows, names: Collection[str]) -> Iterator[Span]:
        """See `Table`. A chunk that the rows before have a part of is kept, and was stated with them."""
        goes_on = 0 <= self._stated - rows.start <= 1  # Parts of episodes have the row after them.
        self._stated = rows.stop
        yield from self._spans(rows, names, goes_on)

    def _spans(self, rows: Rows, names: Collection[str], goes_on: bool = False) -> Iterator[Span]:
        for name in names:
            yield from self._arrays.spans(f"data/{name}", rows.start, rows.stop, goes_on)

    def stretches(
        self, names: Collection[str], files: Iterable[int] | None = None, *, rows: int | None = None
    ) -> Iterator[Rows]:
        """See `Table`."""
        yield from super().stretches(names, files, rows=rows)
        self._stated = -1  # Nothing is stated any more.

    def close(self) -> None:
        """Close all files."""
        self._arrays.close()

    def _values(self, name: str, rows: Rows) -> NDArray[Any]:
        with self._guarded():
            values = self._arrays.rows(f"data/{name}", rows.start, rows.stop)
        return values if rows.keep is None else values[rows.keep]


class _About(NamedTuple):
    """What the description of an array says, checked.

    Attributes:
        shape, dtype: Of the array.
        packed: The codec that inflates its chunks; "": none.
        chunk_bytes: The bytes of a chunk, or of one within a shard.
        shard: Chunks in a shard; 0: chunks are files.
        rows: The rows of a chunk, or of one within a shard.
        parts: How many chunks with other rows a file has.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    packed: str
    chunk_bytes: int
    shard: int
    rows: int
    parts: int


class _File(NamedTuple):
    """An open file, its bytes, and of a shard those at its end, which say where its chunks are."""

    stream: IO[bytes]
    size: int
    chunks: bytes


class _Arrays:
    """The arrays in a folder in zarr's format, opened by zarr."""

    def __init__(self, root: Storage, limits: Limits, name: str) -> None:
        with needs("zarr", "zarr"):
            from rlio.storage.zarr_store import CheckedStore
        self._root, self._limits = root, limits
        self._abouts: dict[str, _About | None] = {}
        #: Path -> name of the file that describes the array, and what it says.
        self._described: dict[str, tuple[str, dict[str, Any]]] = {}
        #: The name of most descriptions comes first.
        self._names = sorted(_DESCRIPTIONS, key=name.__ne__)
        self._open: dict[str, Any] = {}
        #: Path -> first row and values of the last chunk that was read in part.
        self._kept: dict[str, tuple[int, NDArray[Any]]] = {}
        self._store = CheckedStore(root, self._check, most=limits.group_bytes)
        self._files: OpenFiles[int, _File] = OpenFiles(_OPEN_FILES, close=lambda file: file.stream.close())
        self._allowance: Allowance | None = None

    def files(self) -> list[InputFile]:
        """All files that are stored below ``data`` and ``meta``."""
        root, fs = self._root, None if self._root.is_local else self._root.fs
        return [InputFile(fs, root.real(one.path), root.uri_of(one.path), one.size) for one in self._listed]

    @cached_property
    def _listed(self) -> list[Entry]:
        return [*self._root.list("data"), *self._root.list("meta")]

    @cached_property
    def inputs(self) -> InputFiles:
        """Opens the files."""
        return InputFiles(self.files())

    @cached_property
    def _numbers(self) -> dict[tuple[str, int], list[int]]:
        """Path of an array, and number of a row of files -> the numbers of these files."""
        found: dict[tuple[str, int], list[int]] = {}
        for number, one in enumerate(self._listed):
            folder, name, *rest = one.path.split("/", 2)
            if rest and (row := _NUMBER.search(rest[0])):  # "0.0", "0/0", "c/0/0".
                found.setdefault((f"{folder}/{name}", int(row[0])), []).append(number)
        return found

    @property
    def allowance(self) -> Allowance:
        """That of all files."""
        if self._allowance is None:
            self._allowance = Allowance(self._limits, stored=sum(one.size or 0 for one in self._listed))
        return self._allowance

    def look(self, path: str) -> _About | None:
        """The description of an array; None: there is none."""
        if path not in self._abouts:
            self._abouts[path] = self._looked(path)
        return self._abouts[path]

    def _looked(self, path: str) -> _About | None:
        for name in self._names:
            with contextlib.suppress(DataNotFound):
                found = read_object(self._root, f"{path}/{name}", limits=self._limits)
                break
        else:
            return None
        if name == _DESCRIPTIONS[1] and found.get("node_type") != "array":
            return None
        self._described[path] = name, found
        try:
            about = _about_2(found) if name == _DESCRIPTIONS[0] else _about_3(found)
        except UnknownLayout as error:
            raise UnknownLayout(str(error), uri=self._root.uri_of(f"{path}/{name}")) from error
        if about.dtype.kind not in "biuf":
            raise SchemaError(f"found an array of {about.dtype}, expected numbers", column=path)
        most = self._limits.group_bytes // _PART
        if max(about.chunk_bytes, _row_bytes(about)) > most or about.shard > self._limits.listed_names:
            raise UnsafeData(f"{excerpt(path)} has rows or chunks of more than {most} bytes: too large")
        size = math.prod(about.shape) * about.dtype.itemsize
        if size > self._limits.free_bytes:
            inside = sum(one.size or 0 for one in self._listed if one.path.startswith(f"{path}/"))
            self._limits.check_inflation(inside, size, f"{excerpt(path)} of shape {about.shape}")
        return about

    def rows(self, path: str, start: int, stop: int | None) -> NDArray[Any]:
        """Some rows of an array."""
        about = self.look(path)
        if about is None:
            raise CorruptData(f"{excerpt(path)} is no array")
        start, stop, _ = slice(start, stop).indices(about.shape[0] if about.shape else 0)
        piece = self.allowance.piece()
        piece.spend(max(0, stop - start) * _row_bytes(about))
        if path not in self._open:
            self._open[path] = self._store.array(path, *self._described[path])
        # A chunk is read to its end, as zarr decodes it whole, and the next rows have the rest.
        is_whole = start < stop and self._keeps(about)
        end = min(_ceil(stop, about.rows) * about.rows, about.shape[0]) if is_whole else stop
        first, kept = self._kept.get(path, (0, np.zeros(0)))
        at = self._after(path, start)
        found = [kept[start - first : stop - first]] if at > start else []
        if at < stop or not found:
            self._store.given = self._given(path, about, at, end)
            try:
                values = np.asarray(self._open[path][at:end])
            except BaseException:
                self._files.close()  # Bytes may have been damaged on their way: they are fetched again.
                raise
            self._store.given = {}
            if not found and end == stop:
                return values
            kept = values[max(0, end - about.rows - at) :]
            self._kept[path] = end - len(kept), kept
            found.append(values[: stop - at])
        return np.concatenate(found)

    def _keeps(self, about: _About) -> bool:
        """Whether the last chunk of an array is kept, if only some of its rows were read."""
        return about.rows * _row_bytes(about) <= KEPT_BYTES // max(1, len(self._abouts))

    def _after(self, path: str, row: int) -> int:
        """The row after those that are kept from a row on; itself, if it is not kept."""
        first, kept = self._kept.get(path, (0, ()))
        return first + len(kept) if first <= row < first + len(kept) else row

    def _given(
        self, path: str, about: _About, start: int, stop: int
    ) -> dict[str, tuple[int, dict[int, bytes]]]:
        """What zarr will ask for to read some rows; see `CheckedStore`."""
        found: dict[str, tuple[int, dict[int, bytes]]] = {}
        piece = self.allowance.piece()
        rows = start // about.rows, _ceil(stop, about.rows)
        for number, low, high, count in self._places(path, about, *rows):
            opened = self._opened(number, about)
            stream, size, chunks = opened
            parts = {size - len(chunks): chunks}
            for begin, end in _ranges(opened, about, low, high):
                wanted = max(0, min(end, size) - begin)
                piece.spend(wanted)
                stream.seek(begin)
                parts[begin] = stream.read(wanted)
            if high == count:  # Read to its end: open files share what is kept.
                self._files.drop(number)
            found[self._listed[number].path] = size, parts
        return found

    def _places(self, path: str, about: _About, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """The files of some rows of chunks: number; which of its own rows of chunks, and how many it has."""
        for row in range(first // about.parts, _ceil(last, about.parts)):
            before = row * about.parts
            count = min(about.parts, _ceil(about.shape[0] if about.shape else 1, about.rows) - before)
            for number in self._numbers.get((path, row), ()):
                yield number, max(first - before, 0), min(last - before, count), count

    def _opened(self, number: int, about: _About) -> _File:
        if (found := self._files.get(number)) is None:
            stream = self.inputs.open(number)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _index_bytes(about)))
            found = self._files.add(number, _File(stream, size, stream.read()))
        return found

    def spans(self, path: str, start: int, stop: int, goes_on: bool) -> Iterator[Span]:
        """See `Table.spans`. A guess, in shards that are not open. ``goes_on``: rows before were stated."""
        about, start = self._abouts[path], self._after(path, start)
        if about is None or start >= stop:
            return
        first = _ceil(start, about.rows) if goes_on and self._keeps(about) else start // about.rows
        for number, low, high, count in self._places(path, about, first, _ceil(stop, about.rows)):
            if (opened := self._files.peek(number)) is not None:
                yield from ((number, *place) for place in _ranges(opened, about, low, high))
                continue
            size = self._listed[number].size or 0
            end = max(0, size - _index_bytes(about))
            margin = size // 16  # Chunks of one shard differ in bytes.
            begin = end * low // count + (margin if goes_on else -margin)
            yield number, max(0, begin) if low else 0, min(end, end * high // count + margin)
            if low == 0 or not goes_on:
                yield number, end, size

    def close(self) -> None:
        """Close all files."""
        self._files.close()
        self._kept.clear()
        self.inputs.close()

    def _check(self, path: str, data: bytes, is_index: bool, is_part: bool) -> None:
        """Refuse a chunk that unpacks to more than its array says; see `CheckedStore`."""
        about = self._abouts.get(path)
        if about is None or is_index:
            return
        chunks = _chunks(data[-_index_bytes(about) :], about) if about.shard and not is_part else [(0, None)]
        for start, stop in chunks:
            _check_size(about.packed, data[start:stop], about.chunk_bytes, f"a chunk of {excerpt(path)}")


def _about_2(found: Mapping[str, Any]) -> _About:
    """The description of an array in version 2 of the format."""
    shape, chunks, dtype = _numbers(found["shape"]), _numbers(found["chunks"]), found["dtype"]
    if not isinstance(dtype, str):
        raise SchemaError(f"found the dtype {excerpt(dtype)}, expected numbers")
    kind = np.dtype(dtype)
    packer = found.get("compressor")
    names = [one.get("id") for one in (*(found.get("filters") or ()), *([packer] if packer else []))]
    return _About(shape, kind, _packed(names), math.prod(chunks) * kind.itemsize, 0, max((1, *chunks[:1])), 1)


def _about_3(found: Mapping[str, Any]) -> _About:
    """The description of an array in version 3 of the format."""
    shape, dtype = _numbers(found["shape"]), found["data_type"]
    chunks = _numbers(found["chunk_grid"]["configuration"]["chunk_shape"])
    if not isinstance(dtype, str) or found["chunk_grid"]["name"] != "regular":
        raise SchemaError(f"found the data type {excerpt(dtype)}, expected numbers in a regular grid")
    kind, codecs, shard, rows = np.dtype(dtype), found["codecs"], 0, max((1, *chunks[:1]))
    if [codec["name"] for codec in codecs] == [_SHARDS]:
        about = codecs[0]["configuration"]
        inner, index = _numbers(about["chunk_shape"]), [codec["name"] for codec in about["index_codecs"]]
        if index != ["bytes", "crc32c"] or about.get("index_location", "end") != "end" or 0 in inner:
            raise UnknownLayout(f"found an index of shards by {excerpt(index)}, expected that of zarr itself")
        shard = math.prod(outer // part for outer, part in zip(chunks, inner, strict=True))
        chunks, codecs = inner, about["codecs"]
    packed, inner_rows = _packed([codec["name"] for codec in codecs]), max((1, *chunks[:1]))
    size, parts = math.prod(chunks) * kind.itemsize, max(1, rows // inner_rows)
    return _About(shape, kind, packed, size, shard, inner_rows, parts)


def _numbers(found: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in found):
        raise CorruptData(f"found {excerpt(found)}, expected whole numbers")
    return tuple(found)


def _packed(codecs: Sequence[Any]) -> str:
    """The codec of several that inflates; "": none does."""
    packed = [name for name in codecs if name in _PACKED]
    if unknown := [name for name in codecs if name not in _PACKED | _PLAIN]:
        raise UnknownLayout(
            f"found arrays that are compressed by {excerpt(unknown)}, expected {', '.join(sorted(_PACKED))}: "
            "write the buffer again with one of them; or load it with zarr, and pass its arrays to "
            "rlio.from_arrays(arrays, mapping=rlio.Mapping(columns=...))"
        )
    if len(packed) > 1:
        raise UnsafeData(f"found chunks that are compressed twice, by {packed}: expected once")
    return packed[0] if packed else ""


def _row_bytes(about: _About) -> int:
    return math.prod(about.shape[1:]) * about.dtype.itemsize


def _ceil(rows: int, of: int) -> int:
    return -(-rows // of)


def _index_bytes(about: _About) -> int:
    """Bytes at the end of a shard: first byte and size of each chunk, and a checksum."""
    return 16 * about.shard + 4 if about.shard else 0


def _chunks(index: bytes, about: _About, low: int = 0, high: int | None = None) -> Iterator[tuple[int, int]]:
    """The bytes ``[start, stop)`` of some rows of chunks in a shard."""
    found = np.frombuffer(index[:-4], "<u8")
    if len(found) != 2 * about.shard:
        raise CorruptData(f"a shard ends with {len(index)} bytes, too few for its index")
    for start, size in found.reshape(about.parts, -1, 2)[low:high].reshape(-1, 2).tolist():
        if start < 2**63:  # Otherwise the chunk has the fill value.
            yield start, start + size


def _ranges(file: _File, about: _About, low: int, high: int) -> list[tuple[int, int]]:
    """What zarr asks for to read some rows of the chunks in a file."""
    is_whole = (low, high) == (0, about.parts)
    return [(0, file.size)] if is_whole else [*_chunks(file.chunks, about, low, high)]


def _check_size(packed: str, data: bytes, most: int, what: str) -> None:
    """Refuse compressed bytes that become more than ``most``, or were cut off."""
    size = _size_of(packed, data, most)
    if size > most:
        raise UnsafeData(f"{what} would inflate to {size} bytes or more, expected {most}")
    # Blosc reads as many bytes as its header says, whether or not they are there.
    if packed == "blosc" and len(data) != int.from_bytes(data[12:16], "little"):
        raise CorruptData(f"{what} has {len(data)} bytes, its header states another number")


def _size_of(packed: str, data: bytes, most: int) -> int:
    """How many bytes compressed ones claim to become; beyond ``most``, any larger number."""
    import zstandard

    if packed == "blosc":
        return int.from_bytes(data[4:8], "little")
    if packed == "lz4":
        return int.from_bytes(data[:4], "little")
    if packed == "zstd":
        try:
            if (claimed := zstandard.frame_content_size(data)) >= 0:
                return claimed
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as stream:
                return _counted(lambda: stream.read(_BLOCK), most)
        except zstandard.ZstdError as error:
            raise CorruptData(f"found a chunk that zstd cannot read: {error}") from error
    if packed in ("gzip", "zlib"):
        unpacker, left = zlib.decompressobj(wbits=47), [data]

        def block() -> bytes:
            found = unpacker.decompress(left[0], _BLOCK)
            left[0] = unpacker.unconsumed_tail
            return found

        return _counted(block, most)
    return 0


def _counted(block: Callable[[], bytes], most: int) -> int:
    count = 0
    while (found := len(block())) and count <= most:
        count += found
    return count


def open_buffer(place: Place, *, limits: Limits, observations: Collection[str] | None = None) -> MappedSource:
    """The episodes of a replay buffer.

    Args:
        place: The folder or zip file.
        limits: Bounds on the arrays.
        observations: The arrays that are parts of the observation; None: all but actions and rewards.

    Raises:
        UnknownLayout: There are no actions, or the meaning of an array is doubtful.
        OptionError: ``observations`` names others than the arrays.
    """
    table = ZarrTable(place, limits=limits)
    mapping, left_out = _meaning(table, observations)
    source = MappedSource(table, mapping)
    source.notes.append("Reasons of ends are not stored: all episodes are truncated.")
    source.left_out = left_out
    source.beside = table.stored()
    return source


def _meaning(table: ZarrTable, observations: Collection[str] | None) -> tuple[ColumnMapping, list[str]]:
    rows = table.rows[0]
    actions = next((name for name in _ACTIONS if name in table.arrays), None)
    rewards = next((name for name in _REWARDS if name in table.arrays), None)
    for name, about in table.arrays.items():
        if (about.shape or (0,))[0] < rows:
            raise CorruptData(
                f"found an array of the shape {about.shape}, expected {rows} rows, as episode_ends states",
                uri=table.uri,
                column=name,
            )
    left = [name for name in table.arrays if name not in (actions, rewards)]
    wanted = {*table.unread} if observations is None else {*observations, *_ACTIONS, *_REWARDS}
    for error in (error for name, error in table.unread.items() if name in wanted):
        raise type(error)(
            f"{error}; or leave it out: format_options={{'observations': {excerpt(left)}}} names what is read"
        ) from error
    if observations is not None and (absent := sorted({*observations} - {*left})):
        raise OptionError(f"observations={excerpt(absent)}: expected some of {excerpt(left)}", uri=table.uri)
    doubtful = [name for name in left if name in _DOUBTFUL]
    parts = left if observations is None else [name for name in left if name in observations]
    if actions is None or not parts or (doubtful and observations is None):
        found = f"an array {excerpt(doubtful[0])}, whose meaning" if doubtful else "arrays whose meaning"
        raise UnknownLayout(
            f"found a replay buffer with {found} is not certain: say what they mean, {table.suggested()}; or "
            "name the parts of the observation, format_options={'observations': [...]}; "
            f"the arrays are {excerpt({name: about.shape for name, about in table.arrays.items()}, 400)}",
            uri=table.uri,
        )
    columns: dict[str, Any] = {Columns.OBS: {name: name for name in parts}, Columns.ACTIONS: actions}
    if rewards is not None:
        columns[Columns.REWARDS] = rewards
    left_out = sorted({*table.arrays, *table.unread} - {*parts, actions, rewards}) + table.beside
    return ColumnMapping(columns, next_obs=DERIVE), left_out
