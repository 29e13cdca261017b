"""A zip file as a folder that is read only.

Imports fsspec. `rlio.storage.filesystem.Storage.open` imports this module when a path ends in ``.zip`` and
is a file.
"""

from __future__ import annotations

import io
import os
import zipfile
from typing import Any, Final, NoReturn

from fsspec.implementations.zip import ZipFileSystem

from rlio.errors import CorruptData, OptionError, RlioError, excerpt
from rlio.limits import Limits
from rlio.storage.local import LocalFolder
from rlio.storage.paths import Location
from rlio.storage.pointers import refuse_pointer
from rlio.storage.remote import RemoteFolder
from rlio.storage.zip_files import READ_ERRORS, check_directory, check_member, members_of

__all__ = ["ZippedFolder", "open_zipped"]

# Bytes of the zip file that are read at once: zipfile asks for 4 KiB at a time.
_BLOCK: Final = 1 << 18
#: Folders that are followed, each the only one in another.
_DEPTH: Final = 16
#: Names at the top of a zip file that file managers add.
_NO_NAMES: Final = ("__MACOSX", ".")


def open_zipped(place: Location, *, marker: str, timeout: float | None, limits: Limits) -> Location | None:
    """The folder of the data in the zip file at ``place``, see `_root_in`; None: no file is there.

    Args:
        place: Path or URI of the zip file.
        marker: A file that the root of a data set has: such a root is not left for the folder in it.
        timeout: Seconds for one call of a remote filesystem.
        limits: Bounds on the members.

    Raises:
        CorruptData: The zip file is damaged. (UnsafeData: its directory is too large, or a name leaves it.)
        DataNotFound: It was there, and is gone.
    """
    size = _size_of(place, timeout)
    if size is None:
        return None
    fs = ZippedFolder(place, size, timeout, limits)
    try:
        root = _root_in(fs, marker)
    except BaseException:
        fs.close()
        raise
    return Location(fs, root, f"{place.uri}/{root}".rstrip("/"))


def _root_in(fs: Any, marker: str) -> str:
    """The folder of the data in a zip file.

    Of folders that each hold one folder alone (``runs/cartpole``), it is the one with the marker. Without a
    marker, it is the first one: formats of other libraries are looked for below it.
    """
    chain, folder = [""], ""
    while not fs.exists(f"{folder}/{marker}".lstrip("/")):
        children = fs.ls(folder)
        kept = [one for one in children if not one["name"].rpartition("/")[2].startswith(_NO_NAMES)]
        if len(kept) != 1 or kept[0]["type"] != "directory" or len(chain) > _DEPTH:
            return chain[:2][-1]
        folder = kept[0]["name"].rstrip("/")
        chain.append(folder)
    return folder


def _size_of(place: Location, timeout: float | None) -> int | None:
    """Bytes of the file; None: there is none."""
    if place.fs is None:
        return os.path.getsize(place.path) if os.path.isfile(place.path) else None
    try:
        info = RemoteFolder(place.fs, "", timeout=timeout).info(place.path)
    except FileNotFoundError:
        return None
    if info["type"] != "file":
        return None
    if info.get("size") is None:
        raise OptionError("the store does not tell the size of the zip file: copy it first", uri=place.uri)
    return int(info["size"])


class _File(io.RawIOBase):
    """The bytes of a zip file, for one thread at a time. Forks share no offset."""

    def __init__(self, place: Location, size: int, timeout: float | None) -> None:
        path = os.path.realpath(place.path) if place.fs is None else place.path
        folder, _, self._name = path.rpartition("/")
        self._folder: LocalFolder | RemoteFolder = (
            LocalFolder(folder or "/", sync=False)
            if place.fs is None
            else RemoteFolder(place.fs, folder, timeout=timeout)
        )
        self._size, self._at = size, 0
        # Start of the block that was read last, and its bytes.
        self._block = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        first, block = self._block
        if not first <= self._at < first + len(block):
            stop = min(self._size, self._at + max(wanted, _BLOCK))
            first, block = self._block = self._at, self._folder.read(self._name, self._at, stop)
            if not block:
                raise zipfile.BadZipFile("the file became shorter")
        found = block[self._at - first : self._at - first + wanted]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


class ZippedFolder(ZipFileSystem):  # type: ignore[misc]  # fsspec has no types.
    """fsspec's zip filesystem, read only, with rlio's errors and limits.

    Args:
        place: Where the zip file is.
        size: Its bytes.
        timeout: Seconds for one call of its filesystem.
        limits: Bounds on members.
    """

    protocol = "zipped"
    #: A fork makes another one, because a thread of its parent may hold the lock of this one.
    renewed_in_forks = True

    def __init__(self, place: Location, size: int, timeout: float | None, limits: Limits) -> None:
        self.uri: str = place.uri
        uri = self.uri
        self._limits = limits
        try:
            file = _File(place, size, timeout)
            refuse_pointer(file.read(64) or b"", uri=uri)
            check_directory(file, uri=uri)
            super().__init__(file)
            members_of(self.zip, limits, uri=uri)
        except (*READ_ERRORS, NotImplementedError, UnicodeError, ValueError) as error:
            if isinstance(error, RlioError):
                raise
            raise CorruptData(f"damaged zip file: {excerpt(str(error))}", uri=uri) from error

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            self._refuse()
        name = self._strip_protocol(path)
        uri = f"{self.uri}/{excerpt(name)[1:-1]}"
        try:
            info = self.zip.getinfo(name)
        except KeyError as error:
            raise FileNotFoundError(name) from error
        check_member(info, self._limits, uri=uri)
        try:
            return _Member(self.zip.open(info), info.file_size, uri)
        except READ_ERRORS as error:
            raise CorruptData(f"damaged zip member: {excerpt(str(error))}", uri=uri) from error

    def _refuse(self, *values: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"{self.uri} is a zip file, which is read only: unpack it first")

    pipe_file: Any = _refuse
    rm_file: Any = _refuse
    rmdir: Any = _refuse
    mkdir: Any = _refuse
    makedirs: Any = _refuse
    touch: Any = _refuse
    mv: Any = _refuse


class _Member(io.RawIOBase):
    """A member that is open; damage raises CorruptData."""

    def __init__(self, member: Any, size: int, uri: str) -> None:
        self._member, self.size, self._uri = member, size, uri

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._member.tell())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._guarded(self._member.seek, offset, whence))

    def readinto(self, buffer: Any) -> int:
        data = self._guarded(self._member.read, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._member.close()

    def _guarded(self, call: Any, *values: int) -> Any:
        try:
            return call(*values)
        except READ_ERRORS as error:
            raise CorruptData(f"damaged zip member: {excerpt(str(error))}", uri=self._uri) from error
