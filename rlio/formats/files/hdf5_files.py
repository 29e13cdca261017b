"""Opens HDF5 files of others so that an untrusted file cannot reach other files or code.

Links to other files, virtual and external data and compression plug-ins are refused. h5py reads HDF5
(extra ``hdf5``).

Example:
    >>> import io, h5py
    >>> from rlio.storage import Storage, expand_inputs
    >>> stream = io.BytesIO()
    >>> with h5py.File(stream, "w") as file:
    ...     file["a"] = h5py.SoftLink("/b")
    >>> Storage.open("memory://hdf5-example").put("a.hdf5", stream.getvalue())
    >>> files = Hdf5Files(expand_inputs("memory://hdf5-example/a.hdf5"), Limits())
    >>> files.child(files.file(0), "a")
    Traceback (most recent call last):
    ...
    rlio.errors.UnsafeData: 'a' is a SoftLink, which may lead out of the file
    >>> files.close()
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch.ragged import Ragged
from rlio.errors import CorruptData, SchemaError, UnsafeData, excerpt, raise_at
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.inputs import Guard
from rlio.limits import Limits
from rlio.storage import InputFile, InputFiles, Span
from rlio.storage.open_files import OpenFiles
from rlio.support.calls import closing_on_error
from rlio.support.extras import needs

__all__ = ["Hdf5Files", "StoredAs", "leaves_of", "memory_type", "tree_of"]

_OPEN_FILES = 4
_CACHE_BYTES = 64 << 20
# Datasets of a file that stay open: opening one takes as long as reading ten thousand rows of ten numbers.
_OPEN_DATASETS: Final = 64
# A row, or an HDF5 chunk (inflated as a whole), may take this fraction of a row group's limit.
_PART = 4
# gzip, shuffle, fletcher32, szip, nbit, scaleoffset and lzf come with h5py; other filters are plug-ins.
_FILTERS: Final = frozenset((1, 2, 3, 4, 5, 6, 32000))
# Chunks of which the places are looked up before they are read.
_PLACES: Final = 1024
# Bytes that HDF5 reads of data without chunks where fewer are asked for.
_SIEVE: Final = 64 << 10
# HDF5's numbers of layouts.
_CHUNKED: Final = 2
# HDF5's number of the filter that sorts bytes.
_SHUFFLE: Final = 2
_UNSTORED: Final = "rows that are not stored, and no value to fill them"
# Names of a file that a message shows, and how deep.
_SHOWN: Final = 20
_SHOWN_DEPTH: Final = 6
# Names of a group among which those that are alike are counted.
_LISTED: Final = 1000
_VIRTUAL: Final = 3
# What a text takes in memory besides its bytes.
_TEXT_BYTES: Final = 64


class StoredAs(NamedTuple):
    """How a dataset is stored.

    Attributes:
        properties, kind: HDF5's descriptions of the storage, and of the type.
        memory: See `memory_type`.
        dtype: NumPy's.
        chunk: Shape of a chunk; (): it has none.
        chunk_bytes: Of a chunk, once its filters are undone.
        is_plain: Whether a chunk has as many bytes in the file: it is not compressed, and has no texts, which
            are elsewhere.
        has_fill: Whether rows that are not stored have a value.
    """

    properties: Any
    kind: Any
    memory: Any
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    chunk_bytes: int
    is_plain: bool
    has_fill: bool


def memory_type(h5py: Any, kind: Any, dtype: np.dtype[Any]) -> Any:
    """The type ``kind`` of a file, if values of ``dtype`` have it in memory, too; None: HDF5 converts them.

    With it, h5py makes none for each read. Others differ from what h5py calls them in bits or bytes:
    numbers of 20 bits, bfloat16, truth values of four bytes.
    """
    is_number = dtype.kind in "biufc" and dtype.isnative
    return kind if is_number and h5py.h5t.py_create(dtype).equal(kind) else None


class Hdf5Files:
    """Open HDF5 files: the few most recently used.

    Args:
        files: The files.
        limits: Bounds on them.

    Attributes:
        allowance: That of the files. What one block of `guarded` visits and reads is a piece of it.
        inputs: Opens them. What its `hold` fetched before a read needs no request within.
    """

    def __init__(self, files: Sequence[InputFile], limits: Limits) -> None:
        with needs("h5py", "hdf5"):
            import h5py
        self._h5py = h5py
        self.files = files
        self.inputs: InputFiles = InputFiles(files, locks=True)
        self._limits = limits
        self.allowance: Allowance = Allowance.of(files, limits)
        self._piece = self.allowance.piece()
        self._open: OpenFiles[int, _Opened] = OpenFiles(_OPEN_FILES, close=_Opened.close)
        self._layouts: dict[str, StoredAs] = {}

    def file(self, number: int) -> Any:
        """The h5py file."""
        return self._of(number).file

    def dataset(self, number: int, path: str) -> Any:
        """A dataset of a file, whose path was checked. It stays open if its cache of chunks is small."""
        opened = self._of(number)
        return opened.kept(path) or opened.keep(path, opened.file[path])

    def checked(self, number: int, path: str) -> Any:
        """A dataset of a file, checked as it is opened; see `dataset`.

        Raises:
            CorruptData: It is absent, or not a dataset.
            UnsafeData: It leads out of the file, or asks for too much.
        """
        opened = self._of(number)
        if (kept := opened.kept(path)) is not None:
            return kept
        found = self.member(number, path)
        if not self.is_dataset(found):
            raise CorruptData(f"{excerpt(path)} is {'absent' if found is None else 'not a dataset'}")
        if found.shape:
            self.check(found, path, self.files[number].uri)
        return opened.keep(path, found)

    def member(self, number: int, path: str) -> Any:
        """A group or dataset that is stored in the file itself; None: there is none. "" is the file."""
        opened = self._of(number)
        if not path:
            return opened.file
        parent, _, name = path.rpartition("/")
        if parent not in opened.parents:
            group = self.member(number, parent)
            opened.parents.clear()
            opened.parents[parent] = group
        group = opened.parents[parent]
        return self._child(group, name) if self.is_group(group) else None

    def _of(self, number: int) -> _Opened:
        return self._open.get(number) or self._open.add(number, self._opened(number))

    def _opened(self, number: int) -> _Opened:
        stream = self.inputs.open(number)
        # HDF5 itself reads local files in half the time that reads through Python take.
        place = stream if self.files[number].fs is not None else self.files[number].path
        locking = {} if place is stream else {"locking": False}
        with closing_on_error(stream):
            # The cache holds the chunks around the current group; h5py's default of 1 MB often holds none.
            file = self._h5py.File(place, "r", rdcc_nbytes=_CACHE_BYTES, **locking)
        return _Opened(file, stream, OrderedDict(), {}, {})

    def guarded(self, number: int, record: int | None = None) -> Guard:
        """See `rlio.formats.files.inputs.Guard`; the block begins a piece of the allowance."""
        self._piece = self.allowance.piece()
        return Guard(self.files[number], record, format="HDF5")

    def visit(self) -> None:
        """Count a group or dataset before it is opened."""
        self._piece.visit()

    def tree(self, number: int, path: str) -> Any:
        """The datasets at a path: "" for a dataset itself; of a group, its members by name, likewise.

        Groups without datasets are left out.

        Raises:
            UnsafeData: It has more datasets or levels than the limits allow, or a member is a link.
            SchemaError: There is no dataset.
        """
        opened, left = self._of(number), [self._limits.columns]
        if path in opened.trees:
            return opened.trees[path]

        def below(member: Any, place: str, depth: int) -> Any:
            left[0] -= 1
            if left[0] < 0 or depth > self._limits.nesting:
                raise UnsafeData(f"{excerpt(path)} has more members or levels than Limits allow")
            if self.is_dataset(member):
                if member.shape and opened.kept(place) is None:  # It will be read next.
                    with contextlib.suppress(UnsafeData):  # `checked` raises it, if the dataset is read.
                        self.check(member, place, self.files[number].uri)
                        opened.keep(place, member)
                return ""
            if not self.is_group(member):
                return None
            inside = f"{place}/" if place else ""
            inner = {name: below(self.child(member, name), inside + name, depth + 1) for name in member}
            return {name: part for name, part in inner.items() if part is not None} or None

        found = below(self.member(number, path), path, 0)
        if found is None:
            raise SchemaError("found no dataset", column=path)
        if len(opened.trees) >= _OPEN_DATASETS:
            opened.trees.clear()
        opened.trees[path] = found
        return found

    def child(self, group: Any, name: str) -> Any:
        """A member of ``group``, which is there; refuses links."""
        if (found := self._child(group, name)) is None:
            raise CorruptData(f"{excerpt(name)} is absent")
        return found

    def _child(self, group: Any, name: str) -> Any:
        """A member of ``group``; None: it is absent. Refuses links."""
        self.visit()
        # Identifiers are found in half the time of h5py's objects.
        h5py, links, encoded = self._h5py, group.id.links, name.encode() if isinstance(name, str) else name
        if not links.exists(encoded):
            return None
        if links.get_info(encoded).type != h5py.h5l.TYPE_HARD:
            if (link := group.get(name, getlink=True)) is None:  # It leads nowhere.
                return None
            raise UnsafeData(f"{excerpt(name)} is a {type(link).__name__}, which may lead out of the file")
        found = h5py.h5o.open(group.id, encoded)
        if isinstance(found, h5py.h5d.DatasetID):
            return h5py.Dataset(found, readonly=True)
        return h5py.Group(found) if isinstance(found, h5py.h5g.GroupID) else h5py.Datatype(found)

    def is_stored(self, group: Any, name: str) -> bool:
        """Whether a member of ``group`` is stored in the file itself, and no link."""
        return isinstance(group.get(name, getlink=True), self._h5py.HardLink)

    def is_dataset(self, item: Any) -> bool:
        return isinstance(item, self._h5py.Dataset)

    def is_group(self, item: Any) -> bool:
        return isinstance(item, self._h5py.Group)

    def check(self, dataset: Any, path: str, uri: str) -> tuple[tuple[int, ...], StoredAs]:
        """Refuse data that is in other files, needs a plug-in, or inflates to too much memory.

        Args:
            dataset: h5py's Dataset, or its identifier, which is made in half the time.
            path: What messages call it.
            uri: Of the file.

        Returns:
            Its shape, and how it is stored.
        """
        # h5py's properties take longer than reading the rows of a short episode: each is asked once.
        low = dataset if isinstance(dataset.id, int) else dataset.id
        layout, shape = self._layout(low, path, uri), low.shape
        most = self._limits.group_bytes // _PART
        if math.prod(shape[1:]) * layout.dtype.itemsize > most:
            raise UnsafeData(f"{excerpt(path)} has rows of shape {shape[1:]}: too large", uri=uri)
        # A file of two kilobytes may claim a dataset of 10**12 rows and store none. Deflate shrinks zeros,
        # such as the flags of long episodes, by a factor of 1032.
        size = math.prod(shape) * layout.dtype.itemsize
        if size > self._limits.free_bytes:
            try:
                self._limits.check_inflation(
                    2 * low.get_storage_size(), size, f"{excerpt(path)} of shape {shape}"
                )
            except UnsafeData as error:
                raise_at(error, uri=uri)
        if layout.chunk_bytes > most:
            raise UnsafeData(f"{excerpt(path)} has chunks of shape {layout.chunk}: too large", uri=uri)
        self._check_stored(low, layout, shape, path, uri)
        return shape, layout

    def _layout(self, low: Any, path: str, uri: str) -> StoredAs:
        """How a dataset is stored. Refuses data that is in other files, or needs a plug-in.

        Datasets of one name are mostly stored alike, and comparing two layouts takes as long as one question.
        """
        properties, kind, name = low.get_create_plist(), low.get_type(), path.rpartition("/")[2]
        known = self._layouts.get(name)
        if (
            known is not None
            and known.properties.equal(properties)
            # HDF5 finds lists equal of which the last number of a chunk's shape differs.
            and (not known.chunk or properties.get_chunk() == known.chunk)
            and known.kind.equal(kind)
        ):
            return known
        if properties.get_layout() == _VIRTUAL or properties.get_external_count():
            raise UnsafeData(f"{excerpt(path)} lies in other files, which are not opened", uri=uri)
        filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
        if unknown := {*filters} - _FILTERS:
            raise UnsafeData(f"{excerpt(path)} needs HDF5 plug-ins {sorted(unknown)}", uri=uri)
        if len(filters) > len({*filters}):  # Twice deflated, a chunk of no size becomes one of any size.
            raise UnsafeData(f"{excerpt(path)} has a filter twice", uri=uri)
        chunk = properties.get_chunk() if properties.get_layout() == _CHUNKED else ()
        never, dtype = self._h5py.h5d.FILL_TIME_NEVER, low.dtype
        found = StoredAs(
            properties,
            kind,
            memory_type(self._h5py, kind, dtype),
            dtype,
            chunk,
            math.prod(chunk) * kind.get_size() if chunk else 0,
            {*filters} <= {_SHUFFLE} and not dtype.hasobject,
            bool(properties.fill_value_defined()) and properties.get_fill_time() != never,
        )
        if len(self._layouts) >= _OPEN_DATASETS:
            self._layouts.clear()
        if not kind.committed():  # Such a type is gone with its file.
            self._layouts[name] = found
        return found

    def _check_stored(self, low: Any, layout: StoredAs, shape: tuple[int, ...], path: str, uri: str) -> None:
        """Refuse data for which HDF5 gives what was in memory before, without an error."""
        if not layout.chunk:
            if not (layout.has_fill or 0 in shape or low.get_storage_size()):
                raise CorruptData(f"{excerpt(path)} has {_UNSTORED}", uri=uri)
            return
        wanted, size = 1, layout.chunk_bytes
        for rows, part in zip(shape, layout.chunk, strict=True):
            wanted *= -(-rows // part)
        if layout.is_plain and not (layout.has_fill and wanted == 1 and low.get_storage_size() == size):
            sizes: list[int] = []  # Their sum says nothing: one may be short, and another too long.
            low.chunk_iter(lambda chunk: sizes.append(chunk.size))
            if sizes.count(size) < len(sizes):
                text = f"{excerpt(path)} has chunks of {min(sizes)} to {max(sizes)} bytes, expected {size}"
                raise CorruptData(text, uri=uri)
        if not layout.has_fill and (stored := low.get_num_chunks()) < wanted:
            raise CorruptData(f"{excerpt(path)} has {_UNSTORED}: {stored} of {wanted} chunks", uri=uri)

    def read(self, dataset: Any, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Rows of a dataset, or all that it has, as a new array."""
        shape, dtype = dataset.shape, dataset.dtype
        if not shape:
            self._piece.spend(dtype.itemsize)
            return np.asarray(dataset[()])
        if dtype.hasobject:
            return self._of_any_length(dataset, start, shape[0] if stop is None else min(stop, shape[0]))
        rows = max(0, (shape[0] if stop is None else min(stop, shape[0])) - start)
        self.spend(rows, shape, dtype)
        # Reading all takes half the time of reading the same rows by their numbers.
        return np.asarray(dataset[()] if rows == shape[0] else dataset[start : start + rows])

    def hold(self, number: int, spans: Iterable[Span]) -> None:
        """Have the bytes that are read next of a file, see `InputFiles.hold`; opens the file.

        What is wrong with ``spans`` is raised by reading.
        """
        if self.inputs.are_far:
            with self.guarded(number):
                self._of(number)
            with contextlib.suppress(CorruptData, SchemaError):
                self.inputs.hold(spans)

    def spans(self, number: int, wanted: Iterable[tuple[Any, int, int]]) -> Iterator[Span]:
        """The bytes that `read` fetches of some datasets; of a file that is not open, only that it will be.

        Args:
            number: The file.
            wanted: Each dataset with its first row and the one after the last; asked for while it is open.
        """
        if self._open.peek(number) is None:
            yield number, 0, 0
        if self._open.peek(number) is None:  # Nor since `InputFiles.hold` came back to it.
            return
        with self.guarded(number):
            for dataset, start, stop in wanted:
                yield from ((number, *place) for place in self.places(dataset, start, stop))

    def places(self, dataset: Any, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The bytes ``[start, stop)`` of the file that `read` fetches; none, if they are in many places."""
        low, shape, dtype = dataset.id, dataset.shape, dataset.dtype
        if not shape or 0 in shape or dtype.hasobject or start >= stop:
            return
        layout, stop = low.get_create_plist(), min(stop, shape[0])
        if layout.get_layout() == _CHUNKED:
            sizes = layout.get_chunk()
            firsts = range(start - start % sizes[0], stop, sizes[0])
            others = [range(0, length, size) for length, size in zip(shape[1:], sizes[1:], strict=True)]
            if len(firsts) * math.prod(map(len, others)) > _PLACES:
                return
            for chunk in product(firsts, *others):
                found = low.get_chunk_info_by_coord(chunk)
                if found.byte_offset is not None:
                    yield found.byte_offset, found.byte_offset + found.size
        elif (offset := low.get_offset()) is not None:
            row = math.prod(shape[1:]) * dtype.itemsize
            # HDF5 reads small parts in pieces of this size.
            end = offset + max(stop * row, min(start * row + _SIEVE, shape[0] * row))
            yield offset + start * row, end

    def spend(self, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Count the bytes of rows of a dataset before they are read."""
        self._piece.spend(rows * math.prod(shape[1:]) * dtype.itemsize)

    def _of_any_length(self, dataset: Any, start: int, stop: int) -> NDArray[Any]:
        """Rows of texts or lists. Each row may point to the same bytes of the file, so that few bytes become
        many: no more rows are read at a time than can be counted.
        """
        wide = max(1, math.prod(dataset.shape[1:]))
        step = max(1, self._limits.group_bytes // (_PART * wide * max(1, self.allowance.stored or 1)))
        found = []
        for first in range(start, stop, step):
            found.append(np.asarray(dataset[first : min(first + step, stop)]))
            self._piece.spend(sum(_TEXT_BYTES + _bytes_of(value) for value in found[-1].flat))
        return np.concatenate(found) if found else np.asarray(dataset[start:start])

    def rows_of_lists(self, dataset: Any, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """As `read`, of a dataset whose rows are lists of numbers (`items_of`): rows of a `Ragged`."""
        items = self.items_of(dataset.dtype)
        assert items is not None
        if not items.isnative:  # h5py 3.16 gives its bytes as those of the machine's order.
            raise SchemaError(
                f"found lists of {items.str}, expected the machine's order of bytes: write it again"
            )
        rows = Ragged.joined(self.read(dataset, start, stop), items, ())
        assert rows is not None
        return rows.rows()

    def items_of(self, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        """The dtype of the numbers in rows of variable length; None: rows are something else."""
        items = self._h5py.check_vlen_dtype(dtype)  # Of texts: `str` or `bytes`.
        return items if isinstance(items, np.dtype) and items.kind in "biuf" else None

    def close(self) -> None:
        self._open.close()
        self.inputs.close()


def _bytes_of(value: Any) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else len(value)


@dataclass
class _Opened:
    """An open file, and the datasets that stay open: each with the bytes of chunks that it may cache."""

    file: Any
    stream: IO[bytes]
    datasets: OrderedDict[str, tuple[Any, int]]
    #: What is in the groups that were read last, see `Hdf5Files.tree`.
    trees: dict[str, Any]
    #: The group whose member was asked for last, by its path: the next one is often in it.
    parents: dict[str, Any]
    #: The bytes of all caches.
    cached: int = 0

    def kept(self, path: str) -> Any:
        """A dataset that is open; None: it is not."""
        if path not in self.datasets:
            return None
        self.datasets.move_to_end(path)
        return self.datasets[path][0]

    def keep(self, path: str, found: Any) -> Any:
        """Keep a dataset open instead of those that were used least recently, if its cache is small."""
        caches = min(found.nbytes, _CACHE_BYTES) if found.chunks else 0
        while self.datasets and (len(self.datasets) >= _OPEN_DATASETS or self.cached + caches > _CACHE_BYTES):
            self.cached -= self.datasets.popitem(last=False)[1][1]
        self.cached += caches - self.datasets.get(path, (None, 0))[1]
        self.datasets[path] = found, caches
        return found

    def close(self) -> None:
        self.datasets.clear()
        self.parents.clear()
        try:
            self.file.close()
        finally:
            self.stream.close()


def leaves_of(tree: Any, path: str = "") -> list[str]:
    """The paths of the datasets in `Hdf5Files.tree`, of which ``path`` is the root."""
    if not isinstance(tree, dict):
        return [path]
    return [leaf for key, part in tree.items() for leaf in leaves_of(part, f"{path}/{key}")]


def tree_of(group: Any) -> str:
    """The names in an HDF5 file with dtypes and shapes, for a message: 20 of them, 6 levels deep.

    Of groups whose names differ by their number alone, the first is shown.
    """
    import h5py

    found: list[str] = []
    pending = [("", group, 0)]
    while pending and len(found) <= _SHOWN:
        path, item, depth = pending.pop()
        if isinstance(item, h5py.Dataset):
            found.append(f"{excerpt(path, 80)[1:-1]} ({item.dtype} {item.shape})")
        elif isinstance(item, int):
            found.append(f"{item} more {excerpt(path, 80)[1:-1]}/")
        elif not isinstance(item, h5py.Group) or (path and (depth == _SHOWN_DEPTH or not len(item))):
            found.append(f"{excerpt(path, 80)[1:-1]}/")
        else:
            pending += reversed(_first_members(path, item, depth + 1))
    more = ", ..." if len(found) > _SHOWN or pending else ""
    return ", ".join(found[:_SHOWN]) + more or "nothing"


def _first_members(path: str, group: Any, depth: int) -> list[tuple[str, Any, int]]:
    """Some members of a group: path, the member, and its depth; of groups that are alike, their number.

    What a link leads to is not opened.
    """
    import h5py

    found: list[tuple[str, Any, int]] = []
    alike: dict[str, list[int]] = {}  # Name without its number -> its place, and how many there are.
    for _, name in zip(range(_LISTED), group, strict=False):
        family, is_link = (
            name.rstrip("0123456789"),
            not isinstance(group.get(name, getlink=True), h5py.HardLink),
        )
        if family != name and family in alike:
            alike[family][1] += 1
            continue
        if len(found) <= _SHOWN:
            item = None if is_link else group[name]
            if family != name and isinstance(item, h5py.Group):
                alike[family] = [len(found), 0]
            found.append((f"{path}/{name}".lstrip("/"), item, depth))
    for family, (at, count) in sorted(alike.items(), key=lambda one: -one[1][0]):
        if count:
            found.insert(at + 1, (f"{path}/{family}*".lstrip("/"), count, depth))
    return found
