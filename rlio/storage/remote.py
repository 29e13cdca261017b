"""A folder of any fsspec filesystem, with the few calls that all of them answer alike.

Never a write handle: leaving ``with fs.open(path, "wb")`` by an exception publishes the truncated object
on every filesystem that we tried, and a handle that is open when the interpreter exits hangs it. Never a
conditional put: servers and clients ignore it, race, or report a success as a conflict.

Example:
    >>> import fsspec
    >>> folder = RemoteFolder(fsspec.filesystem("memory"), "/remote-example")
    >>> folder.put("a.bin", memoryview(b"0123"))
    >>> folder.read("a.bin", 1, 3)
    b'12'
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from rlio.errors import UnsafeData
from rlio.storage.local import warn_of_links
from rlio.storage.names import TMP_DIR
from rlio.storage.paths import Entry

__all__ = ["RemoteFolder"]

logger = logging.getLogger("rlio")

#: Filesystems where one put shows the whole object or none, where what is called a move copies and deletes,
#: and where folders need not be made (making one may even create a bucket).
_ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"})

#: Up to this size a put that raised compares content too before it is taken for stored: one cheap request.
_COMPARE_BYTES = 1 << 20

#: What clients call the time at which an object was stored.
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "modify", "updated", "created")


class RemoteFolder:
    """The fsspec backend of `Storage`.

    Args:
        fs: An fsspec filesystem, in synchronous mode.
        root: Path of the folder within ``fs``; need not exist.
    """

    # Any: fsspec ships no type information.
    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._pid = os.getpid()
        self._made: set[str] = set()
        self.root = root.rstrip("/")
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
        self._atomic_put = not _ATOMIC_PUT.isdisjoint(protocols)

    @property
    def fs(self) -> Any:
        """The filesystem; a new client after a fork, for asynchronous ones own an event loop thread."""
        if os.getpid() != self._pid:
            if getattr(self._fs, "async_impl", False):
                self._fs = type(self._fs)(*self._fs.storage_args, **self._fs.storage_options)
            self._pid = os.getpid()
        return self._fs

    def read(self, path: str, start: int, stop: int | None) -> bytes:
        """Bytes ``[start, stop)``, fewer where the object ends."""
        if stop is not None and stop <= start:
            return b""
        full = self.full(path)
        if start == 0 and stop is None:
            return bytes(self.fs.cat_file(full))
        try:
            if start == 0 and not getattr(self.fs, "async_impl", False):
                # As cat_file() does, without its seek(0), which fsspec's wrapper of Arrow (HDFS) refuses.
                with self.fs.open(full, "rb") as file:
                    return bytes(file.read(stop))
            return bytes(self.fs.cat_file(full, start=start, end=stop))
        except FileNotFoundError:
            raise
        except Exception:
            # HTTP servers answer a range that starts past the end with an error (416).
            size = self.fs.info(full).get("size")
            if size is not None and start >= size:
                return b""
            raise

    def put(self, path: str, data: memoryview) -> None:
        """Create or replace ``path``; where the filesystem has a real rename, nobody sees half an object."""
        final = self.full(path)
        # Clients take bytes and nothing else; they neither change nor keep them (memory copies on write).
        content = data.obj if isinstance(data.obj, bytes) else data.tobytes()
        move = None if self._atomic_put else _real_move(self.fs)
        try:
            if not self._atomic_put:
                self._make_parent(final)
            if move is None:
                self.fs.pipe_file(final, content)
            else:
                self._put_by_move(final, content, move)
        except BaseException:
            self._made.clear()  # one of these folders may be what is missing
            raise

    def landed(self, path: str, data: memoryview) -> bool:
        """Whether ``path`` holds ``data`` although a put raised: only the response was lost."""
        self.fs.invalidate_cache()
        full = self.full(path)
        try:
            info = self.fs.info(full)
        except FileNotFoundError:
            return False
        if info.get("type") != "file" or info.get("size") not in (len(data), None):
            return False
        if len(data) > _COMPARE_BYTES:
            return info.get("size") is not None
        return bool(self.fs.cat_file(full) == data)

    def entries(self, folder: str, limit: int) -> list[Entry]:
        """Every object below ``folder``, unsorted, never from a cache.

        Raises:
            UnsafeData: More than ``limit`` names are there.
        """
        self.fs.invalidate_cache()
        top = self.full(folder) if folder else self.root
        infos = self._find(top) if _finds_flat(self.fs) else self._walk(top, limit)
        if len(infos) > limit:
            raise UnsafeData(f"more than {limit} names: raise the limit if they are yours")
        base = f"{self.root}/"
        below = f"{top}/"
        found: list[Entry] = []
        links: list[str] = []
        for info in infos:
            name = info["name"]
            path = name[len(base) :]
            # A hostile or merely odd store may hold keys that are no paths: nobody can have meant them.
            if not name.startswith(below) or any(part in ("", ".", "..") for part in path.split("/")):
                continue
            if info["type"] == "file":
                found.append(Entry(path, info.get("size")))
            elif info["type"] == "link":
                links.append(path)
        warn_of_links(links, top)
        return found

    def exists(self, path: str) -> bool:
        """Whether an object or a folder is there."""
        self.fs.invalidate_cache()
        try:
            self.fs.info(self.full(path) if path else self.root)
        except FileNotFoundError:
            # A bucket's or a memory filesystem's own root has no entry of its own.
            return not path and bool(self.entries("", limit=1 << 62))
        return True

    def remove(self, path: str) -> None:
        """Remove the object, if it is there."""
        full = self.full(path)
        try:
            self.fs.rm_file(full)  # not rm(): it expands * ? [ in names
        except Exception:
            self.fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                self.fs.info(full)
                raise
        self.fs.invalidate_cache()

    def modified(self, path: str) -> float | None:
        """When the object was stored: seconds, by the store's clock; None where it does not tell."""
        full = self.full(path)
        self.fs.invalidate_cache()
        try:
            time = self.fs.modified(full)
        except (NotImplementedError, KeyError, TypeError):  # What clients raise whose answers have no time.
            info = self.fs.info(full)
            time = next((info[key] for key in _TIMES if info.get(key) is not None), None)
        return _seconds(time)

    def empty_folders(self, folder: str) -> list[Entry]:
        """None: object stores have no folders, and elsewhere ours hold something."""
        return []

    def remove_empty_folder(self, path: str) -> bool:
        """False: see `empty_folders`."""
        return False

    def full(self, path: str) -> str:
        """``path`` as the filesystem knows it."""
        return f"{self.root}/{path}" if self.root or self.fs.root_marker else path

    # ---- inside ----

    def _make_parent(self, full: str) -> None:
        parent = full.rpartition("/")[0]
        if parent and parent not in self._made:
            self.fs.makedirs(parent, exist_ok=True)
            self._made.add(parent)

    def _put_by_move(self, final: str, content: bytes, move: Callable[[str, str], object]) -> None:
        temporary = self.full(f"{TMP_DIR}/{uuid.uuid4().hex}.tmp")
        self._make_parent(temporary)
        try:
            self.fs.pipe_file(temporary, content)
            try:
                move(temporary, final)
            except FileExistsError:
                # Some servers never move onto an existing object. What is there is not ours, or the caller
                # would have found it landed; readers do without it for a moment.
                self.fs.rm_file(final)
                move(temporary, final)
        except BaseException:
            self._discard(temporary)
            raise

    def _discard(self, temporary: str) -> None:
        """Remove an unfinished upload; what cannot be removed is left to garbage collection."""
        try:
            self.fs.rm_file(temporary)
        except FileNotFoundError:
            return
        except Exception as error:
            logger.warning("could not remove the unfinished upload %s: %r", temporary, error)

    def _find(self, top: str) -> list[dict[str, Any]]:
        try:
            return list(self.fs.find(top, detail=True).values())
        except FileNotFoundError:
            return []

    def _walk(self, top: str, limit: int) -> list[dict[str, Any]]:
        """List folder by folder. fsspec's own walk() takes one that it cannot list for empty."""
        found: list[dict[str, Any]] = []
        pending = [top]
        seen = 0
        while pending and seen <= limit:
            folder = pending.pop()
            try:
                children = self.fs.ls(folder, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone, or an object where a folder was asked for: no files below it
            for child in children:
                name = child["name"].rstrip("/")
                if not name.startswith(f"{folder}/"):
                    continue  # ls of an object, or ".": the thing itself
                seen += 1
                if child["type"] == "directory":
                    pending.append(name)
                else:
                    found.append({**child, "name": name})
        if seen > limit:
            raise UnsafeData(f"more than {limit} names: raise the limit if they are yours")
        return found


def _seconds(time: Any) -> float | None:
    """Seconds since the epoch of what a client gives for a time; None for what is none."""
    if isinstance(time, str):
        # FTP's listing (RFC 3659) has digits alone; others write ISO 8601.
        form = "%Y%m%d%H%M%S" if time[:14].isdecimal() else None
        try:
            time = datetime.strptime(time[:14], form) if form else datetime.fromisoformat(time)
        except ValueError:
            return None
    if isinstance(time, datetime):
        # Without a zone it is some zone's, always the same: all that is asked of times is their difference.
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return float(time) if isinstance(time, int | float) and not isinstance(time, bool) else None


def _finds_flat(fs: Any) -> bool:
    """Whether the filesystem lists a whole tree by its own means, in few requests."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    cls = type(fs)
    if issubclass(cls, AsyncFileSystem):
        return cls._find is not AsyncFileSystem._find
    return cls.find is not AbstractFileSystem.find


def _real_move(fs: Any) -> Callable[[str, str], object] | None:
    """The filesystem's own rename; None where moving would copy and delete."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    cls = type(fs)
    move: Callable[[str, str], object] | None = None
    if cls.mv is not AbstractFileSystem.mv:
        move = fs.mv
    elif issubclass(cls, AsyncFileSystem):
        if cls._mv_file is not AsyncFileSystem._mv_file:
            move = fs.mv_file
    elif hasattr(cls, "mv_file"):
        move = fs.mv_file
    return move
