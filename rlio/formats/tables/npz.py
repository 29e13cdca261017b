"""NPZ: files of NumPy's arrays, one row a step; an episode does not continue in the next file.

An array is a column, under rlio's name (``obs``, ``new_obs``, ``actions``, ``rewards``, ``terminateds``,
``truncateds``, ``eps_id``, ``t``, ...), or a part of a nested column (``obs/position``). Row t has the
observation, the action, the reward and the flags that followed it, and the observation after it;
``new_obs_valid`` is False if that is not known. ``lengths`` has the rows of each episode, one after the
other; without it, ``eps_id`` or the flags show where episodes end. Arrays of objects are neither written nor
read, because they would be pickled.

A column whose rows have any number of items (`rlio.Ragged`) is two arrays: ``tokens.values``, the items of
all rows, and ``tokens.offsets``, where each row begins, and the end of the last.
"""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.arrays import size_bytes, to_numpy
from rlio.batch.nested import leaves
from rlio.batch.npz import read_array, read_header
from rlio.batch.ragged import Ragged, item_type
from rlio.errors import SchemaError, UnsafeData
from rlio.formats.episode_files import EpisodeFilesSink
from rlio.formats.files.inputs import Guard, in_column
from rlio.formats.files.value_arrays import FLOATS
from rlio.formats.format import Format, Holds, Marks
from rlio.formats.place import Place
from rlio.formats.sink import Origin
from rlio.formats.tables.paths import flags_of
from rlio.formats.tables.table import KEPT_BYTES, Rows, Table
from rlio.limits import Limits
from rlio.mapping import Mapping
from rlio.storage import InputFiles, Span, Storage, each_file
from rlio.storage.open_files import OpenFiles
from rlio.storage.zip_files import check_member, open_archive
from rlio.support.calls import closing_on_error

FORMAT = Format(
    name="npz",
    title="NPZ",
    marks=Marks(endings=(".npz",), by_ending=True),
    source="rlio.formats.tables.npz:NpzTable",
    table="rlio.formats.tables.npz:NpzTable",
    writer="rlio.formats.tables.npz:NpzSink",
    holds=Holds(
        obs="dicts",
        actions="dicts",
        extra="dicts",
        texts=frozenset(("extra",)),
        text_axes=32,
        ragged=frozenset(("obs", "actions", "extra", "parts")),
        slash=False,
        reserved=r"lengths|(obs|new_obs|actions)_[0-9]+|.*\.(values|offsets)",
        floats=FLOATS,
        rewards="numbers",
        needs_rewards=False,
        agents=True,
        uniform="dtypes",
    ),
    about="Arrays by rlio's names, with `lengths` of the episodes; or any, by a mapping (docs/mapping.md).",
)

_LENGTHS = "lengths"
#: The arrays of a `Ragged`, after the name of the column.
_VALUES, _OFFSETS = ".values", ".offsets"
# What a row of a `Ragged` takes in memory besides its items.
_ROW_BYTES: Final = 64
#: Rows of a larger file that are read without the rest: the first ones show whether a mapping fits.
_FIRST_ROWS: Final = 1024
_OPEN_FILES: Final = 4


class NpzTable(Table):
    """NPZ files; a `Table`. The arrays of a file that a mapping needs are decoded whole, once later rows are.

    The array ``lengths``, if its sum is the number of rows, has the steps of each episode. A file has as many
    rows as most of its arrays.

    Args:
        place: The files.
        limits: Bounds on the files; the arrays of a file together take `Limits.group_bytes` at most.
    """

    holds_arrays = True

    def __init__(self, place: Place, *, limits: Limits) -> None:
        super().__init__(place.uri, place.files, limits)
        self.inputs: InputFiles = InputFiles(place.files)
        self._limits = limits
        # Their directories, and what was fetched of them, are read again.
        self._open: OpenFiles[int, tuple[IO[bytes], zipfile.ZipFile]] = OpenFiles(_OPEN_FILES, close=_close)
        #: Of the files that were read last: their arrays. `KEPT_BYTES` beside those of the last file.
        self._kept: OrderedDict[int, dict[str, NDArray[Any]]] = OrderedDict()
        self._bytes = 0  # Of all of them.
        #: A file, and the first rows of arrays of it.
        self._first: tuple[int, dict[str, NDArray[Any]]] = (-1, {})
        #: Of each file: the bytes of each array.
        self._places: list[dict[str, tuple[int, int]]] = []
        #: Of each file: the first axis of each array, 1 of those without axes, which are no columns.
        self._counts: list[dict[str, int]] = []
        #: Of each file: the columns that are two arrays.
        self._ragged: list[frozenset[str]] = []
        self._single: set[str] = set()
        with closing_on_error(self):
            lengths = [self._index(number) for number in each_file(self.files)]
        if all(one is not None for one in lengths):
            self.lengths: Sequence[int] | None = [steps for one in lengths for steps in one or ()]
            self.names: Sequence[str] = [name for name in self.names if name != _LENGTHS]

    def _index(self, number: int) -> list[int] | None:
        """Look into a file; returns the steps of its episodes, if it states them."""
        with self._archive(number) as archive:
            shapes = self._shapes(archive)
            self._places.append(_places_in(archive))
        self._ragged.append(_ragged_in(shapes))
        for name in self._ragged[-1]:
            del shapes[name + _VALUES]
            shapes[name] = (shapes.pop(name + _OFFSETS)[0] - 1,)
        self._counts.append({name: shape[0] if shape else 1 for name, shape in shapes.items()})
        self._single |= {name for name, shape in shapes.items() if not shape}
        counts = [shape[0] for shape in shapes.values() if shape]
        rows = max(counts, key=lambda rows: (counts.count(rows), rows), default=0)
        names = [name for name, shape in shapes.items() if shape]
        self.add_file(names, rows)
        steps = self._arrays(number, [_LENGTHS])[_LENGTHS] if _LENGTHS in names else np.zeros((0, 0))
        is_lengths = steps.ndim == 1 and steps.dtype.kind in "iu" and not (steps < 0).any()
        return [*map(int, steps)] if is_lengths and steps.sum() == self.rows[-1] else None

    def arranged(self, mapping: Mapping) -> Mapping:
        """Flags of episodes may be single values; see `Table`."""
        flags = {flag for flag in flags_of(mapping) if all(flag in counts for counts in self._counts)}
        self.of_episodes: frozenset[str] = frozenset(flags & self._single)
        self.names = [*self.names, *sorted(self.of_episodes.difference(self.names))]
        return mapping

    @contextmanager
    def _archive(self, number: int) -> Iterator[zipfile.ZipFile]:
        """A file as the archive of its arrays, which stays open."""
        try:
            with Guard(self.files[number], format="NPZ"):
                yield (self._open.get(number) or self._open.add(number, self._opened(number)))[1]
        except BaseException:
            self._open.drop(number)  # The next call reads it as it is then.
            raise

    def _opened(self, number: int) -> tuple[IO[bytes], zipfile.ZipFile]:
        stream = self.inputs.open(number)
        with closing_on_error(stream):
            archive = open_archive(stream, self._limits, uri=self.files[number].uri)
            if len(archive.infolist()) > self._limits.columns:
                raise UnsafeData(f"more than {self._limits.columns} arrays")
        return stream, archive

    def _shapes(self, archive: zipfile.ZipFile) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            check_member(info, self._limits, uri=self.uri)
            if name in shapes:
                raise SchemaError("found two arrays of this name: expected each name once", column=name)
            with archive.open(info) as member:
                shapes[name] = read_header(member)[0]
        return shapes

    def _arrays(
        self, number: int, names: Collection[str], *, first_rows: bool = False
    ) -> dict[str, NDArray[Any]]:
        """Return arrays of a file, or their first rows; those of the files that were read last are kept."""
        kept, rows = self._kept_of(number, first_rows=first_rows), _FIRST_ROWS if first_rows else None
        ragged = self._ragged[number]
        if missing := [name for name in names if name not in kept]:
            parts = [name + end for name in ragged.intersection(missing) for end in (_VALUES, _OFFSETS)]
            stored = [*parts, *(name for name in missing if name not in ragged)]
            with self._archive(number) as archive:
                found = self._decoded(archive, stored, rows, kept)
            for name in ragged.intersection(missing):
                self.allowance.piece().spend(_ROW_BYTES * self._counts[number][name])
                with in_column(name):
                    found[name] = Ragged(found.pop(name + _VALUES), found.pop(name + _OFFSETS)).rows()
            kept.update(found)
            if not first_rows:
                self._bytes += sum(map(size_bytes, found.values()))
                self._drop_some()
        return kept

    def _kept_of(self, number: int, *, first_rows: bool) -> dict[str, NDArray[Any]]:
        """What is kept of a file, or of its first rows."""
        if first_rows:
            if self._first[0] != number:
                self._first = number, {}
            return self._first[1]
        self._kept.setdefault(number, {})
        self._kept.move_to_end(number)
        return self._kept[number]

    def _drop_some(self) -> None:
        """Drop arrays of the files that were read least recently, beside those of the last one.

        Single arrays, because rows of two files may be read column by column.
        """
        most = KEPT_BYTES + sum(map(size_bytes, self._kept[next(reversed(self._kept))].values()))
        while self._bytes > most:
            arrays = self._kept[oldest := next(iter(self._kept))]
            while arrays and self._bytes > most:
                self._bytes -= size_bytes(arrays.pop(next(iter(arrays))))
            if not arrays:
                del self._kept[oldest]

    def _decoded(
        self,
        archive: zipfile.ZipFile,
        names: Collection[str],
        rows: int | None,
        kept: dict[str, NDArray[Any]],
    ) -> dict[str, NDArray[Any]]:
        found: dict[str, NDArray[Any]] = {}
        piece = self.allowance.piece()
        piece.spend(sum(array.nbytes for array in kept.values()))
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name not in names:
                continue
            piece.spend(info.file_size)
            with archive.open(info) as member:
                found[name] = np.atleast_1d(self._array_of(member, info.file_size, name, rows))
        return found

    def _array_of(self, member: IO[bytes], size: int, name: str, rows: int | None) -> NDArray[Any]:
        """The array in a member; of a pickled one, the error says the way out."""
        try:
            return read_array(member, size, name, rows=rows)
        except UnsafeData as error:
            if "pickled" not in str(error):
                raise
            raise UnsafeData(
                f"{error}: if you trust the file, load it with numpy.load(path, allow_pickle=True), and pass "
                "its arrays to rlio.from_arrays, or its episodes to rlio.from_episodes"
            ) from error

    def read(self, rows: Rows, names: Collection[str]) -> dict[str, Any]:
        """See `Table`."""
        stated = self.partitions[rows.file]
        stored = [name for name in names if name not in stated]
        has_lists = not self._ragged[rows.file].isdisjoint(stored)
        is_first = rows.stop <= _FIRST_ROWS < self.rows[rows.file] // 4 and not has_lists
        arrays = dict(self._arrays(rows.file, stored, first_rows=is_first))
        for name in names:
            if name in stated:
                arrays[name] = np.full(self.rows[rows.file], stated[name])
            self._check_rows(rows.file, name, self.count(rows.file, name))
        kept = slice(None) if rows.keep is None else rows.keep
        return {name: arrays[name][rows.start : rows.stop][kept] for name in names}

    def spans(self, rows: Rows, names: Collection[str]) -> Iterator[Span]:
        """See `Table`. Files that are kept are fetched no more."""
        kept, places = self._kept.get(rows.file, {}), self._places[rows.file]
        ragged = self._ragged[rows.file]
        parts = [
            name + end
            for name in names
            for end in ((_VALUES, _OFFSETS) if name in ragged else ("",))
            if name not in kept
        ]
        yield from ((rows.file, *place) for place in sorted(places[part] for part in parts if part in places))

    def count(self, file: int, name: str) -> int:
        """See `Table`."""
        return self._counts[file].get(name, self.rows[file])

    def array(self, file: int, name: str) -> NDArray[Any]:
        """See `Table`."""
        return self._arrays(file, [name])[name] if name in self._counts[file] else super().array(file, name)

    def close(self) -> None:
        """Forget the file that was decoded last, and those that were fetched."""
        self._kept.clear()
        self._bytes = 0
        self._first = (-1, {})
        self._open.close()
        self.inputs.close()


def _close(opened: tuple[IO[bytes], zipfile.ZipFile]) -> None:
    opened[1].close()
    opened[0].close()


def _places_in(archive: zipfile.ZipFile) -> dict[str, tuple[int, int]]:
    """The bytes of each array of a file, from where it begins to where the next one does."""
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
    starts = zip(infos, ends, strict=False)
    return {info.filename.removesuffix(".npy"): (info.header_offset, end) for info, end in starts}


def _ragged_in(shapes: dict[str, tuple[int, ...]]) -> frozenset[str]:
    """The columns that are two arrays."""
    names = (name.removesuffix(_OFFSETS) for name in shapes if name.endswith(_OFFSETS))
    return frozenset(
        name
        for name in names
        if name not in shapes
        and shapes.get(name + _VALUES)
        and len(offsets := shapes[name + _OFFSETS]) == 1
        and offsets != (0,)
    )


class NpzSink(EpisodeFilesSink):
    """Writes a folder of files; an `EpisodeSink`.

    Args:
        storage: The folder.
        origin: What is known of the data.
        compressed: Whether arrays are deflated.
        episodes_per_file: Whole episodes in a file; None: 64 MiB of them.
    """

    ending = ".npz"

    def __init__(
        self,
        storage: Storage,
        origin: Origin,
        *,
        compressed: bool = False,
        episodes_per_file: int | None = None,
    ) -> None:
        self._method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
        super().__init__(storage, episodes_per_file=episodes_per_file)

    def _encoded(self, episodes: list[SampleBatch]) -> bytes:
        arrays = {_LENGTHS: np.array([len(one) for one in episodes])}
        for name, column in concat_samples(episodes).items():
            for path, leaf in leaves(column):
                place, array = "/".join((name, *map(str, path))), to_numpy(leaf)
                if place.endswith((_VALUES, _OFFSETS)):  # Keys; names of columns are reserved.
                    raise SchemaError(
                        "found a key of a name that means something else: rename it", column=place
                    )
                if item_type(array) is not None:
                    rows = Ragged.of(array)
                    arrays |= {place + _VALUES: rows.values, place + _OFFSETS: rows.offsets}
                else:
                    arrays[place] = array.astype(np.str_) if array.dtype == object else array
        found = BytesIO()
        with zipfile.ZipFile(found, "w", self._method) as archive:  # savez has parameters of its own names.
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return found.getvalue()
