"""Where the arrays of a store lie: in RAM, or in files of the cache that are mapped into memory.

An array over a file is written only where space was reserved for it before. A full disk is then an error of
one call (`FileArrays.reserve`), and not a signal that kills the process at some later write.

Example:
    >>> import tempfile
    >>> import numpy as np
    >>> folder = tempfile.mkdtemp()
    >>> with FileArrays(folder, writable=True) as arrays:
    ...     rows = arrays.array("rows", (1_000_000, 2), np.dtype("f4"))    # Sparse: takes no space yet.
    ...     arrays.reserve("rows", 3)
    ...     rows[:3] = 1
    ...     arrays.trim("rows", 3)
    ...     arrays.flush()
    ...     arrays.sizes
    {'rows': 24}
    >>> with FileArrays(folder, sizes={"rows": 24}) as arrays:
    ...     arrays.array("rows", (3, 2), np.dtype("f4")).tolist()
    [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import mmap
import os
import platform
import re
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from rlio.errors import CacheError, ClosedError, CorruptData, OptionError, excerpt
from rlio.storage.local import sync_descriptor

__all__ = ["Arrays", "FileArrays", "RamArrays", "copied", "file_name", "is_array_file"]

#: Disk space is reserved in steps of as many bytes: a call each 16 MiB costs nothing beside writing them.
STEP: Final = 16 << 20
# Arrays of fewer bytes gain nothing from huge pages, and would take a whole one.
_HUGE: Final = 8 << 20
_SUFFIX: Final = ".array"
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-.")
_ARRAY_FILE: Final = re.compile(r"([a-z0-9_.%-]{0,200}|[a-z0-9_.%-]{64}~[0-9a-f]{32})\.array")
_MOST_PLAIN: Final = 200
_OPEN: Final = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What posix_fallocate says where a filesystem cannot reserve.
_NO_FALLOCATE: Final = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Arrays(Protocol):
    """Makes the arrays of one store: `RamArrays` and `FileArrays`. For one thread at a time."""

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
        """The array of a name: shape (rows, ...), all zeros where nothing was written yet.

        Args:
            name: Any text; one array has it.
            shape: Rows first. A subarray dtype adds its own shape at the end.
            dtype: Of its values; no objects.

        Returns:
            A view, writable for whoever builds and read-only for readers. The memory lives as long as a view.

        Raises:
            OptionError: The dtype holds objects, or the name is taken.
        """

    def reserve(self, name: str, rows: int) -> None:
        """Make sure that the rows below ``rows`` can be written. To be called before they are.

        Raises:
            CacheError: The disk is full, or a quota or limit is reached.
            OptionError: The array has fewer rows.
        """


@dataclass(frozen=True)
class _Rows:
    """What one row of an array is."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> tuple[Self, int]:
        """What a row is, and how many there are."""
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise OptionError(f"the array {excerpt(name)} of dtype {kind}: objects have no place in a store")
        if not shape or min(shape) < 0:
            raise OptionError(f"the array {excerpt(name)} of shape {shape}: expected (rows, ...)")
        return cls(kind.base, (*shape[1:], *kind.shape)), shape[0]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def over(self, memory: NDArray[np.uint8] | None, rows: int) -> NDArray[Any]:
        """As many rows over the beginning of some bytes, or over none where they have no bytes."""
        shape = (rows, *self.shape)
        if memory is None or not rows * self.bytes:
            return np.zeros(shape, self.dtype)
        return memory[: rows * self.bytes].view(self.dtype).reshape(shape)


class RamArrays:
    """Arrays in anonymous memory, which is taken from the machine as it is touched: see `Arrays`."""

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
        """See `Arrays.array`; writable.

        Raises:
            OptionError: The dtype holds objects, or there is no address space for as much.
        """
        row, rows = _Rows.of(name, shape, dtype)
        return row.over(_anonymous(name, rows * row.bytes), rows)

    def reserve(self, name: str, rows: int) -> None:
        """See `Arrays.reserve`; memory needs no reserving."""


def copied(arrays: Arrays, name: str, rows: int, like: NDArray[Any]) -> NDArray[Any]:
    """A new array of so many rows of the kind of ``like``, with room for all of them."""
    made = arrays.array(name, (rows, *like.shape[1:]), like.dtype)
    arrays.reserve(name, rows)
    return made


def _anonymous(name: str, size: int) -> NDArray[np.uint8]:
    """Zeros."""
    flags = _lazy_flags()
    if not size or flags is None:
        return np.zeros(size, np.uint8)
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as error:
        raise OptionError(
            f"the array {excerpt(name)} of {size} bytes: there is no address space for as many; "
            "lower the capacity, or raise the limit (ulimit -v, vm.overcommit_memory)"
        ) from error
    _in_huge_pages(memory, size)
    return np.frombuffer(memory, np.uint8)


def _in_huge_pages(memory: mmap.mmap, size: int) -> None:
    """Ask for pages of 2 MiB: random rows would else wait for the translation of their addresses, too."""
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel without them; what is asked for is no more than speed.
            memory.madvise(mmap.MADV_HUGEPAGE)


def _lazy_flags() -> int | None:
    """Flags of memory that counts only once it is touched; None where NumPy's own zeros do as well."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return None
    flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        # Python names the flag from 3.13 on. Its value is that of all machines but a few old ones.
        known = 0x40 if platform.machine().startswith("ppc") else 0x4000
        flags |= getattr(mmap, "MAP_NORESERVE", known)
    return flags


@dataclass
class _InFile:
    """An array over a file.

    Attributes:
        row: What a row is.
        rows: How many fit the file.
        fd: Of the file, for whoever writes; -1 for readers.
        reserved: Bytes, from the start, that have their place on the disk.
        mapped: The bytes; None of an empty file.
    """

    row: _Rows
    rows: int
    fd: int
    reserved: int
    mapped: mmap.mmap | None

    @property
    def bytes(self) -> int:
        return self.rows * self.row.bytes


class FileArrays:
    """Arrays over files of one folder, a file each, that several processes may read: see `Arrays`.

    A reader maps all of them at once, so that they stay valid when the files are removed. Files are sparse:
    bytes that were never written nor reserved take no space. On filesystems that copy what is overwritten
    (Btrfs, ZFS), a row that is written twice may need space a second time.

    Args:
        folder: Where the files lie; it exists.
        writable: Make arrays, or extend those in ``sizes``; else read them.
        sizes: Name -> bytes of the arrays that are there: what lies behind them is not looked at, and cut off
            by the process that extends them. None: there are none.
        before_reserving: Called with the number of bytes that are about to be reserved; may raise.
        dir_fd: A descriptor of the folder, which may have been renamed; not closed.

    Raises:
        CacheError: The folder, or a file to be read, cannot be opened.
        CorruptData: A file to be read is absent, or shorter than its array.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        writable: bool = False,
        sizes: Mapping[str, int] | None = None,
        before_reserving: Callable[[int], None] | None = None,
        dir_fd: int | None = None,
    ) -> None:
        self.folder = os.fspath(folder)
        self.writable = writable
        self._given = dict(sizes or {})
        self._before_reserving = before_reserving
        self._files: dict[str, _InFile] = {}
        #: Name -> the bytes of each array to be read; None of an empty one.
        self._mapped: dict[str, mmap.mmap | None] = {}
        self._failed: str | None = None
        try:
            # A descriptor, so that the files are those of this folder even after it was renamed.
            self._dir = os.open(folder, os.O_RDONLY | os.O_CLOEXEC) if dir_fd is None else os.dup(dir_fd)
        except OSError as error:
            raise CacheError(f"the folder of arrays cannot be opened: {error}", uri=self.folder) from error
        if not writable:
            try:
                for name, size in self._given.items():
                    with self._errors(name):
                        self._mapped[name] = self._map_whole(name, size)
            except BaseException:
                self.close()
                raise

    @property
    def sizes(self) -> dict[str, int]:
        """Name -> bytes of every array: those that were opened as long as they are now, others as given."""
        return {**self._given, **{name: found.bytes for name, found in self._files.items()}}

    @property
    def reserved(self) -> int:
        """Bytes of the arrays that were opened which have their place on the disk."""
        return sum(found.reserved for found in self._files.values())

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
        """See `Arrays.array`.

        Raises:
            CorruptData: A reader asks for an array that is absent or shorter; or a builder's file is.
            CacheError: The file could not be made or opened.
            OptionError: As there; or the array has more rows already.
        """
        if self._dir < 0:
            raise ClosedError("the arrays of this store were closed", uri=self.folder)
        row, rows = _Rows.of(name, shape, dtype)
        if name in self._files:
            raise OptionError(f"there is an array {excerpt(name)} already", uri=self.folder)
        opened = self._extend if self.writable else self._read
        with self._errors(name):
            self._files[name] = found = opened(name, row, rows)
        return _over(found)

    def reserve(self, name: str, rows: int) -> None:
        """See `Arrays.reserve`."""
        found = self._writable(name)
        _check_rows(name, rows, found.rows)
        wanted = rows * found.row.bytes
        if wanted <= found.reserved:
            return
        end = min(-(-wanted // STEP) * STEP, found.bytes)
        if self._before_reserving is not None:
            self._before_reserving(end - found.reserved)
        with self._errors(name):
            _fill(found.fd, found.reserved, end)
        found.reserved = end

    def trim(self, name: str, rows: int) -> None:
        """Give back what lies behind the first ``rows`` rows: touching it ends the process (SIGBUS)."""
        found = self._writable(name)
        _check_rows(name, rows, found.rows)
        with self._errors(name):
            os.ftruncate(found.fd, rows * found.row.bytes)
        found.rows = rows
        found.reserved = min(found.reserved, found.bytes)

    def flush(self) -> None:
        """Make what was written durable.

        Raises:
            CacheError: It could not be: what is stored there is not to be relied upon.
        """
        for name in self._files:
            found = self._writable(name)
            if self._failed is not None:
                # The kernel reports a failed write once, and takes the pages for written afterwards.
                raise CacheError(self._failed, uri=self._path(name))
            try:
                if found.mapped is not None:
                    found.mapped.flush()
                sync_descriptor(found.fd)
            except OSError as error:
                self._failed = f"the array {excerpt(name)} could not be made durable: {error}"
                raise CacheError(self._failed, uri=self._path(name)) from error

    def clear(self) -> None:
        """Let go of every array; their names are free again. Arrays that were given out stay."""
        files, self._files, self._mapped = self._files, {}, {}
        for found in files.values():
            if found.fd >= 0:
                os.close(found.fd)

    def close(self) -> None:
        """Let go of everything but the arrays that were given out. May be called again."""
        self.clear()
        fd, self._dir = self._dir, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_dir"):
            self.close()

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, file_name(name))

    def _writable(self, name: str) -> _InFile:
        if self._dir < 0:
            raise ClosedError("the arrays of this store were closed", uri=self.folder)
        if not self.writable:
            raise OptionError("these arrays were opened for reading", uri=self.folder)
        return self._files[name]

    @contextlib.contextmanager
    def _errors(self, name: str) -> Any:
        """Say what an error of the operating system means."""
        try:
            yield
        except OSError as error:
            if isinstance(error, CacheError):
                raise
            if error.errno in _NO_ROOM:
                raise CacheError(
                    f"no space for the array {excerpt(name)}: {error.strerror}; free some, or let the cache "
                    "lie on another disk (RLIO_CACHE)",
                    uri=self._path(name),
                ) from error
            raise CacheError(
                f"the array {excerpt(name)} cannot be used: {error}", uri=self._path(name)
            ) from error

    def _map_whole(self, name: str, size: int) -> mmap.mmap | None:
        fd = self._open(name, os.O_RDONLY)
        try:
            self._check_size(name, os.fstat(fd).st_size, size)
            return _map(fd, size, mmap.ACCESS_READ)
        finally:
            os.close(fd)  # The map has a descriptor of its own.

    def _read(self, name: str, row: _Rows, rows: int) -> _InFile:
        if name not in self._given:
            raise CorruptData(f"the store has no array {excerpt(name)}: build it again", uri=self.folder)
        size = rows * row.bytes
        self._check_size(name, self._given[name], size)
        return _InFile(row, rows, -1, size, self._mapped[name])

    def _extend(self, name: str, row: _Rows, rows: int) -> _InFile:
        size, given = rows * row.bytes, self._given.get(name)
        if given is not None and given > size:
            raise OptionError(
                f"the array {excerpt(name)} has {given} bytes already: it cannot be one of {size}",
                uri=self.folder,
            )
        fd = self._open(name, os.O_RDWR | (os.O_CREAT | os.O_EXCL if given is None else 0))
        try:
            if given is not None:
                self._check_size(name, os.fstat(fd).st_size, given)
                os.ftruncate(fd, given)  # An extension that was killed may have left more: zeros again.
            os.ftruncate(fd, size)
            return _InFile(row, rows, fd, given or 0, _map(fd, size, mmap.ACCESS_WRITE))
        except BaseException:
            os.close(fd)
            raise

    def _open(self, name: str, flags: int) -> int:
        try:
            fd = os.open(file_name(name), flags | _OPEN, 0o600, dir_fd=self._dir)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            raise CorruptData(
                "a file of the store is absent or a link: build it again", uri=self._path(name)
            ) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CorruptData("a file of the store is no regular file", uri=self._path(name))
        return fd

    def _check_size(self, name: str, found: int, expected: int) -> None:
        if found < expected:
            raise CorruptData(
                f"a file of the store has {found} bytes, expected {expected}: build the store again",
                uri=self._path(name),
            )


def _check_rows(name: str, rows: int, most: int) -> None:
    if not 0 <= rows <= most:
        raise OptionError(f"{rows} rows of the array {excerpt(name)}, which has {most}: expected 0 to {most}")


def _map(fd: int, size: int, access: int) -> mmap.mmap | None:
    return mmap.mmap(fd, size, access=access) if size else None


def _over(found: _InFile) -> NDArray[Any]:
    memory = None if found.mapped is None else np.frombuffer(found.mapped, np.uint8)
    array = found.row.over(memory, found.rows)
    if found.fd < 0:
        array.flags.writeable = False
    return array


def _fill(fd: int, start: int, end: int) -> None:
    """Give the bytes from ``start`` on, which nobody has written yet, their place on the disk."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, start, end - start)
            return
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
    zeros = bytes(1 << 20)
    while start < end:
        start += os.pwrite(fd, memoryview(zeros)[: end - start], start)


def file_name(name: str) -> str:
    """The file of an array: plain letters, so that names differ on any filesystem, whatever their case.

    Example:
        >>> file_name("obs"), file_name("obs/Camera")
        ('obs.array', 'obs%2f%43amera.array')
    """
    text = "".join(
        letter
        if letter in _PLAIN
        else "".join(f"%{byte:02x}" for byte in letter.encode("utf-8", "surrogatepass"))
        for letter in name
    )
    if len(text) > _MOST_PLAIN:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        text = f"{text[:64]}~{digest}"
    return text + _SUFFIX


def is_array_file(file: str) -> bool:
    """Whether `file_name` may have given this name."""
    return _ARRAY_FILE.fullmatch(file) is not None
