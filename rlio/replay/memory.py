"""Arrays of a store: in RAM, or in memory-mapped files of the cache.

Space is reserved before an array over a file is written. A full disk is then an error of one call
(`FileArrays.reserve`) instead of a signal that kills the process at a later write.

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

from rlio.errors import CacheError, CorruptData, OptionError, excerpt
from rlio.storage.local import sync_descriptor

__all__ = ["Arrays", "FileArrays", "RamArrays", "copied", "file_name", "is_array_file"]

#: Disk space is reserved in steps of this many bytes: one call per 16 MiB costs nothing beside the writes.
STEP: Final = 16 << 20
# Smaller arrays gain nothing from huge pages, and would occupy a whole one.
_HUGE: Final = 8 << 20
_SUFFIX: Final = ".array"
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-.")
_ARRAY_FILE: Final = re.compile(r"([a-z0-9_.%-]{0,200}|[a-z0-9_.%-]{64}~[0-9a-f]{32})\.array")
_MOST_PLAIN: Final = 200
_OPEN: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors of posix_fallocate on filesystems that cannot reserve space.
_NO_FALLOCATE: Final = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Arrays(Protocol):
    """Makes the arrays of one store: `RamArrays` or `FileArrays`. Use one thread at a time."""

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
        """The array of a name: shape (rows, ...), zeros in every row not yet written.

        Args:
            name: Any text; one array has it.
            shape: Rows first. A subarray dtype adds its own shape at the end.
            dtype: Dtype of the values; no objects.

        Returns:
            A view, writable for builders and read-only for readers. The memory lives as long as a view.
        """

    def size(self, name: str) -> int | None:
        """Bytes that an array already holds; None: there is no such array yet."""

    def reserve(self, name: str, rows: int) -> None:
        """Make sure that all rows below ``rows`` can be written. Call it before writing them.

        Raises:
            CacheError: The disk is full, or a quota or limit is reached.
        """


def _row_bytes(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    """Bytes of a row of an array."""
    return math.prod(shape[1:]) * np.dtype(dtype).itemsize


def _over(memory: mmap.mmap | None, shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
    """An array over the beginning of ``memory``, or zeros without memory."""
    return np.zeros(shape, dtype) if memory is None else np.ndarray(shape, dtype, buffer=memory)


class RamArrays:
    """Arrays in anonymous memory, which the OS allocates as it is touched: see `Arrays`."""

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
        """See `Arrays.array`; writable.

        Raises:
            OptionError: The address space is too small.
        """
        return _over(_anonymous(name, shape[0] * _row_bytes(shape, dtype)), shape, dtype)

    def size(self, name: str) -> None:
        """See `Arrays.size`; no array in memory holds anything before it is made."""

    def reserve(self, name: str, rows: int) -> None:
        """See `Arrays.reserve`; memory needs no reservation."""


def copied(arrays: Arrays, name: str, rows: int, like: NDArray[Any]) -> NDArray[Any]:
    """A new array with this many rows of the kind of ``like``, all reserved."""
    made = arrays.array(name, (rows, *like.shape[1:]), like.dtype)
    arrays.reserve(name, rows)
    return made


def _anonymous(name: str, size: int) -> mmap.mmap | None:
    """Zeros; None if NumPy makes them as well."""
    flags = _lazy_flags()
    if not size or flags is None:
        return None
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as error:
        raise OptionError(
            f"the array {excerpt(name)} of {size} bytes exceeds the address space; lower the capacity, or "
            "raise the limit (ulimit -v, vm.overcommit_memory)"
        ) from error
    _in_huge_pages(memory, size)
    return memory


def _in_huge_pages(memory: mmap.mmap, size: int) -> None:
    """Ask for pages of 2 MiB: with small pages, random rows also wait for address translation."""
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # Some kernels lack huge pages, which only add speed.
            memory.madvise(mmap.MADV_HUGEPAGE)


def _lazy_flags() -> int | None:
    """Flags of memory that counts only when touched; None where NumPy's zeros do the same."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return None
    flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        # Python names the flag from 3.13 on. All but a few old architectures share its value.
        known = 0x40 if platform.machine().startswith("ppc") else 0x4000
        flags |= getattr(mmap, "MAP_NORESERVE", known)
    return flags


@dataclass
class _InFile:
    """A writable array over a file.

    Attributes:
        row: Bytes of a row.
        rows: How many rows fit in the file.
        fd: File descriptor.
        reserved: Bytes, from the start, that have space on the disk.
        mapped: The bytes; None for an empty file.
    """

    row: int
    rows: int
    fd: int
    reserved: int
    mapped: mmap.mmap | None

    @property
    def bytes(self) -> int:
        return self.rows * self.row


class FileArrays:
    """Arrays over the files of one folder, one file each, that several processes may read: see `Arrays`.

    A reader maps all files at once, so they stay valid after removal. Files are sparse: bytes that were never
    written or reserved take no space. On copy-on-write filesystems (Btrfs, ZFS), writing a row twice may need
    space twice.

    Args:
        folder: Folder of the files; it exists.
        writable: Make arrays, or extend those in ``sizes``; False: read them.
        sizes: Name -> bytes of the existing arrays. Readers ignore bytes beyond; a process that extends an
            array cuts them off. None: the folder has no arrays.
        before_reserving: Called with the number of bytes before they are reserved; may raise.

    Raises:
        CacheError: A file to read cannot be opened.
        CorruptData: A file to read is absent, or shorter than its array.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        writable: bool = False,
        sizes: Mapping[str, int] | None = None,
        before_reserving: Callable[[int], None] | None = None,
    ) -> None:
        self.folder: str = os.fspath(folder)
        self.writable = writable
        self._given = dict(sizes or {})
        self._before_reserving = before_reserving
        self._files: dict[str, _InFile] = {}
        #: Name -> the bytes of each array to read; None for an empty array.
        self._mapped: dict[str, mmap.mmap | None] = {}
        self._failed: str | None = None
        if not writable:
            for name, size in self._given.items():
                with self._errors(name):
                    self._mapped[name] = self._map_whole(name, size)

    @property
    def sizes(self) -> dict[str, int]:
        """Name -> bytes of every array: the current size of opened arrays, the given size of others."""
        return {**self._given, **{name: found.bytes for name, found in self._files.items()}}

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
        """See `Arrays.array`.

        Raises:
            CorruptData: The array to read, or the file to extend, is absent or too short.
            CacheError: The file could not be made or opened.
            OptionError: The array already has more rows.
        """
        rows, row = shape[0], _row_bytes(shape, dtype)
        with self._errors(name):
            memory = self._extend(name, row, rows) if self.writable else self._read(name, rows * row)
        array = _over(memory, shape, dtype)
        array.flags.writeable = self.writable
        return array

    def size(self, name: str) -> int | None:
        """See `Arrays.size`."""
        return self._given.get(name)

    def reserve(self, name: str, rows: int) -> None:
        """See `Arrays.reserve`."""
        found = self._files[name]
        wanted = rows * found.row
        if wanted <= found.reserved:
            return
        end = min(-(-wanted // STEP) * STEP, found.bytes)
        if self._before_reserving is not None:
            self._before_reserving(end - found.reserved)
        with self._errors(name):
            _fill(found.fd, found.reserved, end)
        found.reserved = end

    def trim(self, name: str, rows: int) -> None:
        """Free the space after the first ``rows`` rows; touching freed rows kills the process (SIGBUS)."""
        found = self._files[name]
        with self._errors(name):
            os.ftruncate(found.fd, rows * found.row)
        found.rows = rows
        found.reserved = min(found.reserved, found.bytes)

    def flush(self) -> None:
        """Make all written rows durable.

        Raises:
            CacheError: They are not durable: do not rely on the stored rows.
        """
        for name, found in self._files.items():
            if self._failed is not None:
                # The kernel reports a failed write only once, and then treats its pages as written.
                raise CacheError(self._failed, uri=self._path(name))
            try:
                if found.mapped is not None:
                    found.mapped.flush()
                sync_descriptor(found.fd)
            except OSError as error:
                self._failed = f"the array {excerpt(name)} could not be made durable: {error}"
                raise CacheError(self._failed, uri=self._path(name)) from error

    def close(self) -> None:
        """Release every array and its name. Arrays returned earlier stay valid. May be called again."""
        files, self._files, self._mapped = self._files, {}, {}
        for found in files.values():
            os.close(found.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self.close()

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, file_name(name))

    @contextlib.contextmanager
    def _errors(self, name: str) -> Any:
        """Turn an error of the operating system into a `CacheError`."""
        try:
            yield
        except OSError as error:
            if isinstance(error, CacheError):
                raise
            if error.errno in _NO_ROOM:
                raise CacheError(
                    f"no space for the array {excerpt(name)}: {error.strerror}; free some, or put the cache "
                    "on another disk (RLIO_CACHE)",
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
            os.close(fd)  # The map keeps its own descriptor.

    def _read(self, name: str, size: int) -> mmap.mmap | None:
        if name not in self._given:
            raise CorruptData(f"the store has no array {excerpt(name)}: build it again", uri=self.folder)
        self._check_size(name, self._given[name], size)
        return self._mapped[name]

    def _extend(self, name: str, row: int, rows: int) -> mmap.mmap | None:
        size, given = rows * row, self._given.get(name)
        if given is not None and given > size:
            raise OptionError(
                f"the array {excerpt(name)} has {given} bytes already: it cannot shrink to {size}",
                uri=self.folder,
            )
        fd = self._open(name, os.O_RDWR | (os.O_CREAT | os.O_EXCL if given is None else 0))
        try:
            if given is not None:
                self._check_size(name, os.fstat(fd).st_size, given)
                os.ftruncate(fd, given)  # A killed extension may have left bytes here: make them zeros again.
            os.ftruncate(fd, size)
            mapped = _map(fd, size, mmap.ACCESS_WRITE)
        except BaseException:
            os.close(fd)
            raise
        self._files[name] = _InFile(row, rows, fd, given or 0, mapped)
        return mapped

    def _open(self, name: str, flags: int) -> int:
        try:
            fd = os.open(self._path(name), flags | _OPEN, 0o600)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            raise CorruptData(
                "a file of the store is absent or a link: build it again", uri=self._path(name)
            ) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CorruptData(
                "a file of the store is not a regular file: build it again", uri=self._path(name)
            )
        return fd

    def _check_size(self, name: str, found: int, expected: int) -> None:
        if found < expected:
            raise CorruptData(
                f"a file of the store has {found} bytes, expected {expected}: build the store again",
                uri=self._path(name),
            )


def _map(fd: int, size: int, access: int) -> mmap.mmap | None:
    return mmap.mmap(fd, size, access=access) if size else None


def _fill(fd: int, start: int, end: int) -> None:
    """Reserve space on the disk for the bytes from ``start`` on, which are still unwritten."""
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
    """The file of an array: plain lower-case characters, so names differ on filesystems that ignore case.

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
    """Whether `file_name` can return this name."""
    return _ARRAY_FILE.fullmatch(file) is not None
