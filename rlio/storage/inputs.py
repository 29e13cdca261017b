"""Finds the input files of readers for foreign formats: files, folders, globs, and lists of them.

Example:
    >>> from rlio.storage.filesystem import Storage
    >>> storage = Storage.open("memory://inputs-example")
    >>> for name in ("log-10.json", "log-9.json", "notes.txt"):
    ...     storage.put(name, b"{}")
    >>> [file.uri for file in expand_inputs("memory://inputs-example", suffixes=(".json",))]
    ['memory://inputs-example/log-9.json', 'memory://inputs-example/log-10.json']
"""

from __future__ import annotations

import glob
import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple, cast

from rlio.errors import DataNotFound, OptionError, UnsafeData, excerpt
from rlio.limits import DEFAULT_LIMITS
from rlio.storage.call_options import refuse_call_options
from rlio.storage.failures import explained
from rlio.storage.far_file import Requests, far_file
from rlio.storage.near import did_you_mean_path
from rlio.storage.others import blobs_of, inside
from rlio.storage.paths import Location, StrPath, is_litter, is_uri, locate
from rlio.storage.pointers import POINTER_BYTES, refuse_pointer

__all__ = [
    "InputFile",
    "expand_inputs",
    "is_glob",
    "is_zip",
    "natural_order",
    "open_input",
    "opened_remote",
]

_MAGIC = re.compile(r"[*?\[]")
_DIGITS = re.compile(r"([0-9]+)")
# Bytes to read at a time: each request passes through Python.
_BUFFER_BYTES = 1 << 18


class InputFile(NamedTuple):
    """A file to read.

    Attributes:
        fs: The fsspec filesystem; None for a local file.
        path: Path within ``fs``, or the absolute local path.
        uri: For messages: the absolute path or the URI, secrets masked.
        size: Bytes, if known.
    """

    # Any: fsspec ships no type information.
    fs: Any
    path: str
    uri: str
    size: int | None


def expand_inputs(
    inputs: StrPath | Sequence[StrPath],
    *,
    suffixes: tuple[str, ...] = (),
    recursive: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    limit: int = 1_000_000,
) -> list[InputFile]:
    """The files that ``inputs`` name, each once.

    Those of a list come in its order, those of a folder, a glob or a zip file in the order of their names, in
    which numbers sort numerically.

    A name that exists is taken literally, even if it contains ``*?[``, and so is each folder at the beginning
    of a glob. In folders and globs, names that begin with a dot are left out, and links are followed to files
    of the same folder only, because a stranger's folder must not lead to the user's own files. A link that is
    named is followed anywhere.

    Args:
        inputs: A file, folder or glob (``**`` crosses folders), as a path or URI, or a list of those. A zip
            file stands for its members with the suffixes, if there are suffixes other than its own.
        suffixes: Endings of the files to take from folders; () for all. Files and globs are taken as named.
        recursive: Search folders to the bottom.
        storage_options: Keywords of the fsspec filesystems; only for URIs, and none of `CallOptions`.
        limit: Most files to accept.

    Raises:
        DataNotFound: One of ``inputs`` names no file; the message lists what was found instead.
        OptionError: ``inputs`` is empty, or is not a path.
        UnsafeData: There are more than ``limit`` files, or a link leads out of its folder.
        UnknownName: No known filesystem has the scheme of a URI.
        MissingExtra: The filesystem's client is not installed.
        StoreError: A filesystem failed.
    """
    values = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    if not values:
        raise OptionError("no inputs: expected a file, folder, glob or URI, or a list of those")
    refuse_call_options(storage_options)
    found: dict[tuple[int, str], InputFile] = {}
    any_uri = any(isinstance(value, str) and is_uri(value) for value in values)
    for value in values:
        # A list may mix paths and URIs. The options apply to the URIs, and are refused if there is none.
        uses_options = not any_uri or (isinstance(value, str) and is_uri(value))
        place = locate(value, storage_options if uses_options else None)
        with explained(place.uri):
            find = _local if place.fs is None else _remote
            files = _members(place, suffixes) or find(place, suffixes, recursive)
            if not files:
                raise DataNotFound(_what_was_there(place, suffixes), uri=place.uri)
        for file in sorted(files, key=lambda file: (natural_order(file.uri), file.uri)):
            found.setdefault((id(file.fs), file.path), file)
            if len(found) > limit:
                raise UnsafeData(f"more than {limit} files: raise the limit if they are yours", uri=place.uri)
    return list(found.values())


def open_input(
    file: InputFile,
    *,
    fetch: Callable[[], IO[bytes] | None] = lambda: None,
    scans: bool = False,
    locks: bool = False,
) -> IO[bytes]:
    """Open ``file`` for reading from its start; the caller closes it.

    Errors of the filesystem become `StoreError`s, also later while reading.

    Args:
        file: The file.
        fetch: Returns its bytes as the filesystem has them; None: the filesystem opens it.
        scans: Whether it will be read to its end: on a remote store, more is then fetched ahead.
        locks: Whether its reader holds a lock as it reads; see `FarFile`.

    Raises:
        DataNotFound: The file no longer exists.
        UnknownLayout: It is a pointer of Git LFS, not the file itself.
        StoreError: The file could not be opened.
    """
    with explained(file.uri):
        try:
            stream: Any = _local_file(file.path) if file.fs is None else fetch()
        except FileNotFoundError as error:
            raise DataNotFound("the file is gone since it was found", uri=file.uri) from error
        stream = opened_remote(file, scans=scans, locks=locks) if stream is None else stream
        try:
            if _may_be_pointer(file, stream):
                start = stream.read(POINTER_BYTES)
                stream.seek(0)
                refuse_pointer(start, uri=file.uri)
        except BaseException:
            stream.close()
            raise
    return io.BufferedReader(_Stream(stream, file.uri), _BUFFER_BYTES)


def opened_remote(
    file: InputFile, *, scans: bool = False, locks: bool = False, requests: Requests | None = None
) -> Any:
    """A file of a filesystem, see `far_file`.

    Raises:
        DataNotFound: The file no longer exists.
    """
    try:
        return far_file(file.fs, file.path, scans=scans, locks=locks, requests=requests)
    except FileNotFoundError as error:
        raise DataNotFound("the file is gone since it was found", uri=file.uri) from error


def _may_be_pointer(file: InputFile, stream: Any) -> bool:
    """Whether a file is so small: others are not looked into, which would be a request more."""
    if file.fs is None:
        status = os.fstat(stream.fileno())
        return stat.S_ISREG(status.st_mode) and status.st_size < POINTER_BYTES
    size = file.size if file.size is not None else getattr(stream, "size", None)
    return size is not None and size < POINTER_BYTES and stream.seekable()


def _local_file(path: str) -> io.FileIO:
    """A local file. The place in it is of this process: of an open file, a fork shares it."""
    is_regular = hasattr(os, "pread") and stat.S_ISREG(os.stat(path).st_mode)
    return _Placed(path) if is_regular else io.FileIO(path)


class _Placed(io.FileIO):
    """A regular file that is read at a place of its own; for `_Stream`."""

    _at = 0

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        data = os.pread(self.fileno(), size, self._at)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        ends = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}
        end = os.fstat(self.fileno()).st_size if whence == os.SEEK_END else ends[whence]
        if end + offset < 0:
            raise ValueError(f"byte {end + offset} is before the first byte of the file")
        self._at = end + offset
        return self._at

    def tell(self) -> int:
        return self._at


class _Stream(io.RawIOBase):
    """The bytes of a file; its errors are `StoreError`s."""

    def __init__(self, file: IO[bytes], uri: str) -> None:
        self._file = file
        self._uri = uri

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def readinto(self, buffer: Any) -> int:
        with explained(self._uri):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET and offset < 0:  # By what a file says of itself: the store is well.
            raise ValueError(f"byte {offset} is before the first byte of the file")
        with explained(self._uri):
            self._file.seek(offset, whence)
            return self._file.tell()  # Seeking in a file of paramiko returns None.

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._file.close()


def natural_order(text: str) -> list[tuple[int, str]]:
    """Sort key that puts ``_9`` before ``_10``, because loggers number their files without padding."""
    parts = _DIGITS.split(text)
    # Odd places hold digits. Their length without zeros, and then the digits, orders numbers of any size.
    return [(len(part.lstrip("0")), part.lstrip("0")) if i % 2 else (0, part) for i, part in enumerate(parts)]


def _wanted(path: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file is one to take from a folder; ``path`` is relative to the folder."""
    return not is_litter(path) and (not suffixes or path.lower().endswith(suffixes))


def is_glob(value: StrPath, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether ``value`` is a glob: it has one of ``*?[``, and nothing has this very name.

    Raises:
        OptionError, UnknownName, MissingExtra, StoreError: As `expand_inputs`.
    """
    if not _MAGIC.search(os.fspath(value)):
        return False
    place = locate(value, storage_options if is_uri(os.fspath(value)) else None)
    with explained(place.uri):
        return bool(_MAGIC.search(place.path)) and not _is_there(place.fs, place.path)


def _is_there(fs: Any, path: str) -> bool:
    return os.path.lexists(path) if fs is None else _info(fs, path) is not None


def _glob_of(place: Location) -> tuple[str, str] | None:
    """The folder in which a glob begins, and the rest of the glob; None: it is no glob."""
    folder, rest = "", place.path
    while rest and (found := _MAGIC.search(rest)):
        # The folders before the first one with such a character are literal; it is too, if it exists.
        start = rest.rfind("/", 0, found.start()) + 1
        end = rest.find("/", found.end())
        if end < 0 or not _is_there(place.fs, folder + rest[:end]):
            return folder + rest[:start], rest[start:]
        folder, rest = folder + rest[: end + 1], rest[end + 1 :]
    return None


def is_zip(name: str) -> bool:
    """Whether a name is that of a zip file."""
    return name.lower().endswith(".zip")


def _members(place: Location, suffixes: tuple[str, ...]) -> list[InputFile]:
    """The members of a zip file with the suffixes; [] for other files, and if zip files are asked for."""
    if not is_zip(place.path) or not suffixes or ".zip" in suffixes:
        return []
    from rlio.storage.zipped import open_zipped

    found = open_zipped(place, marker="", timeout=None, limits=DEFAULT_LIMITS)
    if found is None:
        return []
    members = [child for child in found.fs.find("", detail=True).values() if _wanted(child["name"], suffixes)]
    if not members:
        names = sorted(found.fs.find(""))
        raise DataNotFound(
            f"no files ending in {', '.join(suffixes)} found: the zip file holds {excerpt(names[:8])}",
            uri=place.uri,
        )
    return [
        InputFile(found.fs, child["name"], f"{place.uri}/{child['name']}", child["size"]) for child in members
    ]


def _local(place: Location, suffixes: tuple[str, ...], recursive: bool) -> list[InputFile]:
    path, root = place.path, place.path
    if os.path.isdir(path):
        found = _files_below(path) if recursive else os.listdir(path)
        names = [os.path.join(path, name) for name in found if _wanted(name, suffixes)]
    elif os.path.exists(path):
        # The user named it: it may be a link, or a pipe (which has no size).
        size = os.path.getsize(path) if os.path.isfile(path) else None
        return [InputFile(None, path, path, size)]
    elif (pattern := _glob_of(place)) is not None:
        root = pattern[0].rstrip(os.sep) or os.sep
        names = list(glob.iglob(os.path.join(glob.escape(root), pattern[1]), recursive=True))
    else:
        names = []
    names = [name for name in names if not os.path.isdir(name)]
    linked = [name for name in names if _is_linked(name, root)]
    if linked:
        reals: dict[str, str] = {}
        # Links and the file that they lead to are one file, whose own name it keeps. Files of the hub's cache
        # that are equal are one blob, but files of their own.
        blobs = blobs_of(root)
        for name in sorted(linked, reverse=True):
            real = inside(name, root)
            reals[name if os.path.dirname(real) == blobs else real] = name
        reals |= {os.path.realpath(name): name for name in set(names).difference(linked)}
        names = list(reals.values())
    return [InputFile(None, name, name, os.path.getsize(name)) for name in names if os.path.isfile(name)]


def _is_linked(name: str, root: str) -> bool:
    """Whether ``name``, or a folder between it and ``root``, is a link."""
    while len(name) > len(root):
        if os.path.islink(name):
            return True
        name = os.path.dirname(name)
    return False


def _files_below(root: str) -> list[str]:
    """Paths of the files below ``root`` relative to it; each folder once, where links lead to it too."""
    found: list[str] = []
    seen, pending = {os.path.realpath(root)}, [""]
    while pending:
        folder = pending.pop()
        with os.scandir(os.path.join(root, folder)) as scanned:
            children = list(scanned)
        for child in children:
            path = os.path.join(folder, child.name)
            if is_litter(child.name):
                continue
            if not child.is_dir():
                found.append(path)
                continue
            real = inside(child.path, root) if child.is_symlink() else os.path.realpath(child.path)
            if real not in seen:
                seen.add(real)
                pending.append(path)
    return found


def _remote(place: Location, suffixes: tuple[str, ...], recursive: bool) -> list[InputFile]:
    fs, root = place.fs, place.path
    fs.invalidate_cache()
    info = _info(fs, place.path)
    if info is not None and info["type"] == "file":
        return [InputFile(fs, place.path, place.uri, info.get("size"))]
    infos: Iterable[dict[str, Any]]
    if info is not None:
        children = fs.find(place.path, detail=True).values() if recursive else fs.ls(place.path, detail=True)
        infos = [child for child in children if _wanted(_below(child["name"], root), suffixes)]
    elif (pattern := _glob_of(place)) is not None:
        root = pattern[0]
        infos = fs.glob(glob.escape(root) + pattern[1], detail=True).values()
        if not is_litter(pattern[1]):  # As locally, where `*` does not mean hidden names.
            infos = [child for child in infos if not is_litter(_below(child["name"], root))]
    else:
        infos = []
    return [
        InputFile(fs, child["name"], place.uri_of(child["name"]), child.get("size"))
        for child in infos
        if child["type"] == "file" and not child["name"].endswith("/")
    ]


def _below(path: str, root: str) -> str:
    """``path`` of a remote store, relative to the folder ``root``."""
    return path.strip("/").removeprefix(root.strip("/")).lstrip("/")


def _info(fs: Any, path: str) -> dict[str, Any] | None:
    try:
        return cast("dict[str, Any]", fs.info(path))
    except FileNotFoundError:
        return None


def _what_was_there(place: Location, suffixes: tuple[str, ...]) -> str:
    """The message for inputs without files: lists the nearest folder that exists."""
    folder = place.path
    magic = _glob_of(place)
    if magic is not None:
        folder = magic[0].rstrip("/")
    names: list[str] = []
    for _ in range(2):
        names = _names(place.fs, folder)
        if names or folder == place.path:
            break
        folder = folder.rpartition("/")[0]
    shown = ", ".join(excerpt(name, 80) for name in names[:8]) + (
        f" and {len(names) - 8} more" if len(names) > 8 else ""
    )
    expected = f"files ending in {', '.join(suffixes)}" if suffixes and not magic else "files"
    there = f"{excerpt(folder)} holds {shown}" if names else "nothing is there"
    hint = "" if magic or names else did_you_mean_path(place)
    return f"no {expected} found: {there}; expected a file, a folder of them, a glob or a URI{hint}"


def _names(fs: Any, folder: str) -> list[str]:
    try:
        if fs is None:
            return sorted(os.listdir(folder or os.sep))
        return sorted(child.rstrip("/").rsplit("/", 1)[-1] for child in fs.ls(folder, detail=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
