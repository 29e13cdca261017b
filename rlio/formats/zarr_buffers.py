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

import io
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.other_names import MEANT
from rlio.errors import CorruptData, OptionError, SchemaError, UnknownLayout, UnsafeData, excerpt
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.inputs import Guard
from rlio.formats.files.json_files import read_object
from rlio.formats.files.step_columns import suggested_mapping
from rlio.formats.format import Format, Marks
from rlio.formats.place import Place
from rlio.formats.tables.mapping import MappedSource
from rlio.formats.tables.paths import names_of
from rlio.formats.tables.table import Rows, Table
from rlio.limits import Limits
from rlio.mapping import DERIVE
from rlio.mapping import Mapping as ColumnMapping
from rlio.storage import InputFile, Storage
from rlio.storage.filesystem import Entry
from rlio.support.extras import needs

_ENDS: Final = "meta/episode_ends"
_ROOTS: Final = (f"{_ENDS}/.zarray", f"{_ENDS}/zarr.json")

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
        super().__init__(place.uri, [place.file(next(path for path in _ROOTS if root.exists(path)))])
        self._arrays = _Arrays(root, limits)
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
        for name in names:
            try:
                with self._guarded():
                    about = self._arrays.look(f"data/{name}")
                if about is not None:
                    self.arrays[name] = about
            except (UnknownLayout, SchemaError) as error:
                self.unread[name] = error
        of_episodes = [f"meta/{name}" for name, is_folder in root.children("meta", most=_SHOWN) if is_folder]
        self.beside: list[str] = [path for path in of_episodes if path != _ENDS]
        self.allowance: Allowance = self._arrays.allowance
        # Rows after the last end belong to no episode.
        self.add_file(list(self.arrays), int(ends[-1]) if len(ends) else 0)

    def _guarded(self) -> Guard:
        return Guard(self._file, format="zarr")

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
        for name in names:
            shape = self.arrays[name].shape
            if not shape or shape[0] < self.rows[0]:
                raise SchemaError(f"found the shape {shape}, expected {self.rows[0]} rows", column=name)
            found[name] = self._values(name, rows)
        return found

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
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    packed: str
    chunk_bytes: int
    shard: int


class _Arrays:
    """The arrays in a folder in zarr's format, opened by zarr."""

    def __init__(self, root: Storage, limits: Limits) -> None:
        with needs("zarr", "zarr"):
            from rlio.storage.zarr_store import CheckedStore
        self._root, self._limits = root, limits
        self._abouts: dict[str, _About | None] = {}
        self._open: dict[str, Any] = {}
        self._store = CheckedStore(root, self._check, most=limits.group_bytes)
        self._entries: list[Entry] | None = None
        self._allowance: Allowance | None = None

    def files(self) -> list[InputFile]:
        """All files that are stored below ``data`` and ``meta``."""
        root, fs = self._root, None if self._root.is_local else self._root.fs
        return [InputFile(fs, root.real(one.path), root.uri_of(one.path), one.size) for one in self._listed()]

    def _listed(self) -> list[Entry]:
        if self._entries is None:
            self._entries = [*self._root.list("data"), *self._root.list("meta")]
        return self._entries

    @property
    def allowance(self) -> Allowance:
        """That of all files."""
        if self._allowance is None:
            self._allowance = Allowance(self._limits, stored=sum(one.size or 0 for one in self._listed()))
        return self._allowance

    def look(self, path: str) -> _About | None:
        """The description of an array; None: there is none."""
        if path not in self._abouts:
            self._abouts[path] = self._looked(path)
        return self._abouts[path]

    def _looked(self, path: str) -> _About | None:
        names = [f"{path}/{name}" for name in (".zarray", "zarr.json")]
        name = next((name for name in names if self._root.exists(name)), None)
        found = {} if name is None else read_object(self._root, name, limits=self._limits)
        if name is None or (name == names[1] and found.get("node_type") != "array"):
            return None
        try:
            about = _about_2(found) if name == names[0] else _about_3(found)
        except UnknownLayout as error:
            raise UnknownLayout(str(error), uri=self._root.uri_of(name)) from error
        if about.dtype.kind not in "biuf":
            raise SchemaError(f"found an array of {about.dtype}, expected numbers", column=path)
        most = self._limits.group_bytes // _PART
        row = math.prod(about.shape[1:]) * about.dtype.itemsize
        if max(about.chunk_bytes, row) > most or about.shard > self._limits.listed_names:
            raise UnsafeData(f"{excerpt(path)} has rows or chunks of more than {most} bytes: too large")
        size = math.prod(about.shape) * about.dtype.itemsize
        if size > self._limits.free_bytes:
            inside = sum(one.size or 0 for one in self._listed() if one.path.startswith(f"{path}/"))
            self._limits.check_inflation(inside, size, f"{excerpt(path)} of shape {about.shape}")
        return about

    def rows(self, path: str, start: int, stop: int | None) -> NDArray[Any]:
        """Some rows of an array."""
        about = self.look(path)
        if about is None:
            raise CorruptData(f"{excerpt(path)} is no array")
        rows = len(range(*slice(start, stop).indices(about.shape[0] if about.shape else 0)))
        self.allowance.piece().spend(rows * math.prod(about.shape[1:]) * about.dtype.itemsize)
        if path not in self._open:
            self._open[path] = self._store.array(path)
        return np.asarray(self._open[path][start:stop])

    def _check(self, path: str, data: bytes, is_index: bool, is_part: bool) -> None:
        """Refuse a chunk that unpacks to more than its array says; see `CheckedStore`."""
        about = self._abouts.get(path)
        if about is None or is_index:
            return
        pieces = [data] if is_part or not about.shard else _pieces(data, about.shard)
        for piece in pieces:
            _check_size(about.packed, piece, about.chunk_bytes, f"a chunk of {excerpt(path)}")


def _about_2(found: Mapping[str, Any]) -> _About:
    """The description of an array in version 2 of the format."""
    shape, chunks, dtype = _numbers(found["shape"]), _numbers(found["chunks"]), found["dtype"]
    if not isinstance(dtype, str):
        raise SchemaError(f"found the dtype {excerpt(dtype)}, expected numbers")
    kind = np.dtype(dtype)
    packer = found.get("compressor")
    names = [one.get("id") for one in (*(found.get("filters") or ()), *([packer] if packer else []))]
    return _About(shape, kind, _packed(names), math.prod(chunks) * kind.itemsize, 0)


def _about_3(found: Mapping[str, Any]) -> _About:
    """The description of an array in version 3 of the format."""
    shape, dtype = _numbers(found["shape"]), found["data_type"]
    chunks = _numbers(found["chunk_grid"]["configuration"]["chunk_shape"])
    if not isinstance(dtype, str) or found["chunk_grid"]["name"] != "regular":
        raise SchemaError(f"found the data type {excerpt(dtype)}, expected numbers in a regular grid")
    kind, codecs, shard = np.dtype(dtype), found["codecs"], 0
    if [codec["name"] for codec in codecs] == [_SHARDS]:
        about = codecs[0]["configuration"]
        inner, index = _numbers(about["chunk_shape"]), [codec["name"] for codec in about["index_codecs"]]
        if index != ["bytes", "crc32c"] or about.get("index_location", "end") != "end" or 0 in inner:
            raise UnknownLayout(f"found an index of shards by {excerpt(index)}, expected that of zarr itself")
        shard = math.prod(outer // part for outer, part in zip(chunks, inner, strict=True))
        chunks, codecs = inner, about["codecs"]
    return _About(
        shape, kind, _packed([codec["name"] for codec in codecs]), math.prod(chunks) * kind.itemsize, shard
    )


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


def _pieces(shard: bytes, count: int) -> Iterator[bytes]:
    """The chunks in a shard, whose index is at its end."""
    index = np.frombuffer(shard[-16 * count - 4 : -4], "<u8")
    if len(index) != 2 * count:
        raise CorruptData(f"a shard has {len(shard)} bytes, too few for its index")
    for start, size in index.reshape(count, 2).tolist():
        if start < 2**63:
            yield shard[start : start + size]


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
    if packed == "zstd" and (claimed := zstandard.frame_content_size(data)) >= 0:
        return claimed
    if packed == "zstd":
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as stream:
            return _counted(lambda: stream.read(_BLOCK), most)
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
