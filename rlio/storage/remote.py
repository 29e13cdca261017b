"""A folder of any fsspec filesystem, with the few calls that all filesystems answer alike.

Never use a write handle: leaving ``with fs.open(path, "wb")`` by an exception publishes the truncated object
on every filesystem that we tried, and a handle that is open at interpreter exit hangs the interpreter. Never
use a conditional put: servers and clients ignore it, race, or report a success as a conflict.

Transfers over SFTP keep many requests in flight. fsspec's client waits for the answer to every 32 KiB.
Measured on a nearby server, each wait takes 40 ms (Nagle's algorithm against delayed acknowledgements): 80 s
for a shard of 64 MiB.

Example:
    >>> import fsspec
    >>> folder = RemoteFolder(fsspec.filesystem("memory"), "/remote-example")
    >>> folder.put("a.bin", memoryview(b"0123"))
    >>> folder.read("a.bin", 1, 3)
    b'12'
"""

from __future__ import annotations

import contextlib
import io
import logging
import uuid
from datetime import UTC, datetime
from typing import Any

from rlio.errors import UnsafeData
from rlio.storage.clients import Clients, protocols_of
from rlio.storage.failures import behind_not_found
from rlio.storage.local import warn_of_links
from rlio.storage.paths import TMP_DIR, Entry

__all__ = ["RemoteFolder", "get_range", "put_whole", "real_move"]

logger: logging.Logger = logging.getLogger("rlio")

#: Filesystems on which one put shows the whole object or none, a "move" copies and deletes, and folders need
#: not be created (creating one may even create a bucket).
_ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"})

#: Read only: servers that accept a PUT are not known to show only whole objects.
_HTTP = frozenset({"http", "https"})

#: After a put that raised, the stored object is compared in pieces of this size, each one request.
_COMPARE_BYTES = 8 << 20

#: Assumed size of a whole object of unknown size, to compute its time limit: the size of a shard.
_UNKNOWN_BYTES = 64 << 20

#: A listing may take this many times the limit of one call: a million names take a thousand requests.
_LISTING_PATIENCE = 5

#: Clients' names for the time at which an object was stored.
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "modify", "updated", "created")


class RemoteFolder:
    """The fsspec backend of `Storage`.

    Args:
        fs: An fsspec filesystem, in synchronous mode.
        root: Path of the folder within ``fs``; need not exist.
        timeout: Seconds for one call, plus the time for its bytes; None: no limit.
    """

    # Any: fsspec ships no type information.
    def __init__(self, fs: Any, root: str, *, timeout: float | None = None) -> None:
        self._clients = Clients(fs, timeout=timeout)
        self._made: set[str] = set()
        self.root: str = root.rstrip("/")
        protocols = protocols_of(fs)
        self._atomic_put = not _ATOMIC_PUT.isdisjoint(protocols)
        self._over_http = not _HTTP.isdisjoint(protocols)
        self._knows_ranges: bool | None = None
        self._over_sftp = "sftp" in protocols and _is_plain_sftp(fs)

    @property
    def fs(self) -> Any:
        """The filesystem; a fork gets new asynchronous clients, because each owns a thread."""
        return self._clients.fs

    @property
    def at_once(self) -> int:
        """How many requests to make side by side."""
        return self._clients.at_once

    @property
    def lists_flat(self) -> bool:
        """Whether the filesystem itself lists a whole tree, in few requests."""
        from fsspec import AbstractFileSystem
        from fsspec.asyn import AsyncFileSystem

        cls = type(self.fs)
        if issubclass(cls, AsyncFileSystem):
            return cls._find is not AsyncFileSystem._find
        return cls.find is not AbstractFileSystem.find

    def read(self, path: str, start: int, stop: int | None) -> bytes:
        """Bytes ``[start, stop)``; fewer at the end of the object."""
        if stop is not None and stop <= start:
            return b""
        full = self.full(path)
        size = _UNKNOWN_BYTES if stop is None else stop - start
        try:
            data = self._read(full, start, stop, size)
        except FileNotFoundError as error:
            raise behind_not_found(error) or error from error.__cause__
        except Exception as error:
            if stop is None or isinstance(error, TimeoutError):
                raise
            # HTTP servers answer a range that starts past the end with an error (416).
            length = self._info(full).get("size")
            if length is not None and start >= length:
                return b""
            raise
        return self._cut(full, data, start, stop) if self._over_http and stop is not None else data

    def put(self, path: str, data: memoryview) -> None:
        """Create or replace ``path``; on filesystems with a real rename, readers never see half an object."""
        if self._over_http:  # HTTP has no writes. This error counts as permanent.
            raise NotImplementedError("a web server is read only: write to another filesystem")
        final = self.full(path)
        # Clients accept only bytes, and neither change nor keep them (memory copies on write).
        content = data.obj if isinstance(data.obj, bytes) else data.tobytes()
        move = None if self._atomic_put else real_move(self.fs)
        try:
            if not self._atomic_put:
                self._make_parent(final)
            if move is None:
                self._put_object(final, content)
            else:
                self._put_by_move(final, content, move)
        except BaseException:
            self._made.clear()  # one of these folders may have been removed
            raise

    def landed(self, path: str, data: memoryview) -> bool:
        """Whether ``path`` holds ``data`` although a put raised, because only the response was lost."""
        self._clients.invalidate_cache()
        full = self.full(path)
        try:
            info = self._info(full)
        except FileNotFoundError:
            return False
        if info.get("type") != "file" or info.get("size") not in (len(data), None):
            return False
        if len(data) <= _COMPARE_BYTES:
            return bool(self._clients.call("cat_file", full, size=len(data)) == data)
        if info.get("size") is None:  # It may be longer. Putting again is also correct.
            return False
        # Compare all bytes: an object damaged on its way may have the right size, and the log is deleted once
        # this returns True. Reading costs as much as putting again.
        for start in range(0, len(data), _COMPARE_BYTES):
            stop = min(start + _COMPARE_BYTES, len(data))
            if self._read(full, start, stop, stop - start) != data[start:stop]:
                return False
        return True

    def entries(
        self, folder: str, limit: int, *, times: dict[str, float | None] | None = None
    ) -> list[Entry]:
        """Every object below ``folder``, unsorted, never from a cache.

        Args:
            folder: A folder below the root; "" for the root.
            limit: Largest number of names.
            times: A dict to fill: path -> time of storing, None if the listing does not state it. None:
                times are not needed.

        Raises:
            UnsafeData: There are more than ``limit`` names.
        """
        self._clients.invalidate_cache()
        top = self.full(folder) if folder else self.root
        infos = self._find(top) if self.lists_flat else self._walk(top, limit)
        if len(infos) > limit:
            raise UnsafeData(f"more than {limit} names: raise the limit if they are yours")
        base = self.full("")
        below = f"{top}/" if folder else base
        found: list[Entry] = []
        links: list[str] = []
        for info in infos:
            name = info["name"]
            path = name[len(base) :]
            # A hostile or odd store may hold keys that are not paths: no data set uses them.
            if not name.startswith(below) or any(part in ("", ".", "..") for part in path.split("/")):
                continue
            if info["type"] == "file":
                found.append(Entry(path, info.get("size")))
                if times is not None:
                    times[path] = _time_of(info)
            elif info["type"] == "link":
                links.append(path)
        warn_of_links(links, top)
        return found

    def exists(self, path: str) -> bool:
        """Whether an object or a folder is there."""
        self._clients.invalidate_cache()
        try:
            self._info(self.full(path) if path else self.root)
        except FileNotFoundError:
            # The root of a bucket or of a memory filesystem has no entry.
            return not path and bool(self.entries("", limit=1 << 62))
        return True

    def remove(self, path: str) -> None:
        """Remove the object, if it exists."""
        full = self.full(path)
        try:
            self._clients.call("rm_file", full)  # not rm(): it expands * ? [ in names
        except Exception:  # Clients share no error class. Raise, unless the object is gone.
            self._clients.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                self._info(full)
                raise
        self._clients.invalidate_cache()

    def remove_folder(self, folder: str, limit: int) -> None:
        """Remove the objects below ``folder``, and on stores that have folders, the empty ones too."""
        if self.lists_flat:
            for path, _ in self.entries(folder, limit):
                self.remove(path)
            return
        for name, is_folder in self.children(folder, limit):
            if is_folder:
                self.remove_folder(f"{folder}/{name}", limit)
            else:
                self.remove(f"{folder}/{name}")
        # Clients share no error class, and an empty folder that remains does no harm.
        with contextlib.suppress(Exception):
            self._clients.call("rmdir", self.full(folder))
        self._made.clear()

    def modified(self, path: str) -> float | None:
        """When the object was stored, in seconds by the store's clock; None if the store does not say."""
        full = self.full(path)
        self._clients.invalidate_cache()
        try:
            time = self._clients.call("modified", full)
        except (NotImplementedError, KeyError, TypeError):  # Raised by clients whose answers have no time.
            time = None
        if time is None:  # Some clients return None for a missing object; `_info` then raises.
            return _time_of(self._info(full))
        return _seconds(time)

    def children(self, folder: str, most: int | None) -> list[tuple[str, bool]]:
        """Names directly in ``folder``, at most ``most``, each with whether it is a folder; no cache."""
        self._clients.invalidate_cache()
        full = self.full(folder) if folder else self.root
        children = self._ls(full, patience=_LISTING_PATIENCE)
        below = f"{full}/" if full else ""
        paths = [(child["name"].rstrip("/"), child["type"] == "directory") for child in children]
        # Some servers list the folder as a child of itself.
        found = [(path.rpartition("/")[2], folder) for path, folder in paths if path.startswith(below)]
        return found[:most]

    def full(self, path: str) -> str:
        """``path`` in the filesystem's own form."""
        return f"{self.root}/{path}" if self.root or self.fs.root_marker else path

    # ---- inside ----

    def info(self, full: str) -> dict[str, Any]:
        """What the filesystem tells of a path of its own: ``type``, ``size`` and others."""
        self._clients.invalidate_cache()
        return self._info(full)

    def _info(self, full: str) -> dict[str, Any]:
        info: dict[str, Any] = self._ask("info", full)
        return info

    def _ask(self, operation: str, full: str, **keywords: Any) -> Any:
        """Call a client; raises what it reported as a missing file, if the file is not missing."""
        try:
            return self._clients.call(operation, full, **keywords)
        except FileNotFoundError as error:
            raise behind_not_found(error) or error from error.__cause__

    def _ls(self, full: str, *, patience: float = 1) -> list[dict[str, Any]]:
        """What a client says of each child of a folder; nothing if it is missing, or not a folder."""
        try:
            children: list[dict[str, Any]] = self._ask("ls", full, detail=True, patience=patience)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Servers (FTP) list an object as its own only child.
        own = f"{full}/{full.rpartition('/')[2]}"
        if [(child["type"], child["name"]) for child in children] != [("file", own)]:
            return children
        return [] if self._info(full).get("type") == "file" else children

    def _read(self, full: str, start: int, stop: int | None, size: int) -> bytes:
        if self._over_sftp:
            return self._clients.run(lambda client: get_range(client, full, start, stop), size=size)
        if start == 0 and stop is None:
            return bytes(self._clients.call("cat_file", full, size=size))
        if start == 0 and not getattr(self.fs, "async_impl", False):

            def read_first(fs: Any) -> bytes:
                # Like cat_file(), but without its seek(0), which fsspec's wrapper of Arrow (HDFS) refuses.
                with fs.open(full, "rb") as file:
                    return bytes(file.read(stop))

            return self._clients.run(read_first, size=size)
        return bytes(self._clients.call("cat_file", full, start=start, end=stop, size=size))

    def _cut(self, full: str, data: bytes, start: int, stop: int) -> bytes:
        """Cut the range from a web server's answer: servers that do not know ranges send the whole file."""
        if start == 0:
            return data[:stop]
        if self._knows_ranges is None:
            size = self._info(full).get("size")
            if size is None:  # Unknown size. A range is at least never longer than requested.
                return data[start:stop] if len(data) > stop - start else data
            self._knows_ranges = len(data) == min(stop, size) - start
        return data if self._knows_ranges else data[start:stop]

    def _make_parent(self, full: str) -> None:
        parent = full.rpartition("/")[0]
        if not parent or parent in self._made:
            return
        # Clients check and then create, so writers that begin together collide, perhaps once for each folder
        # on the way. Servers refuse an existing folder in many different ways.
        for last in (*[False] * parent.count("/"), True):
            try:
                self._clients.call("makedirs", parent, exist_ok=True)
                break
            except PermissionError:
                raise
            except Exception:  # Any kind, see above. Raise, unless the folder exists now.
                if self._is_folder(parent):
                    break
                if last:
                    raise
        self._made.add(parent)

    def _is_folder(self, full: str) -> bool:
        self._clients.invalidate_cache()
        try:
            return self._info(full).get("type") == "directory"
        except FileNotFoundError:
            return False

    def _put_object(self, full: str, content: bytes) -> None:
        if self._over_sftp:
            self._clients.run(lambda client: put_whole(client, full, content), size=len(content))
        else:
            self._clients.call("pipe_file", full, content, size=len(content))

    def _put_by_move(self, final: str, content: bytes, move: str) -> None:
        temporary = self.full(f"{TMP_DIR}/{uuid.uuid4().hex}.tmp")
        self._make_parent(temporary)
        try:
            self._put_object(temporary, content)
            try:
                self._clients.call(move, temporary, final)
            except FileExistsError:
                # Some servers never move onto an existing object. The existing object is not ours, or the
                # caller would have found it landed; readers do without it for a moment.
                self._clients.call("rm_file", final)
                self._clients.call(move, temporary, final)
        except BaseException:
            self._discard(temporary)
            raise

    def _discard(self, temporary: str) -> None:
        """Remove an unfinished upload; garbage collection removes it later if this fails."""
        try:
            self._clients.call("rm_file", temporary)
        except FileNotFoundError:
            return
        except Exception as error:
            logger.warning("could not remove the unfinished upload %s: %r", temporary, error)

    def _find(self, top: str) -> list[dict[str, Any]]:
        try:
            found = self._ask("find", top, detail=True, patience=_LISTING_PATIENCE)
        except FileNotFoundError:
            return []
        # Azure's client returns a list of one name if ``top`` is an object, which has no files below it.
        return list(found.values()) if isinstance(found, dict) else []

    def _walk(self, top: str, limit: int) -> list[dict[str, Any]]:
        """List folder by folder. fsspec's own walk() treats a folder that it cannot list as empty."""
        found: list[dict[str, Any]] = []
        pending = [top]
        seen = 0
        while pending and seen <= limit:
            folder = pending.pop()
            for child in self._ls(folder):
                name = child["name"].rstrip("/")
                if not name.startswith(f"{folder}/"):
                    continue  # ls of an object, or ".": the folder itself
                seen += 1
                if child["type"] == "directory":
                    pending.append(name)
                else:
                    found.append({**child, "name": name})
        if seen > limit:
            raise UnsafeData(f"more than {limit} names: raise the limit if they are yours")
        return found


def _time_of(info: dict[str, Any]) -> float | None:
    """When an object was stored, by what a client says of it; None where it does not tell."""
    return _seconds(next((info[key] for key in _TIMES if info.get(key) is not None), None))


def _seconds(time: Any) -> float | None:
    """A client's time value in seconds since the epoch; None for anything else."""
    if isinstance(time, str):
        # FTP's listing (RFC 3659) has only digits; other servers write ISO 8601.
        form = "%Y%m%d%H%M%S" if time[:14].isdecimal() else None
        try:
            time = datetime.strptime(time[:14], form) if form else datetime.fromisoformat(time)
        except ValueError:
            return None
    if isinstance(time, datetime):
        # A time without a zone is always in the same zone, and only differences of times are used.
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return float(time) if isinstance(time, int | float) and not isinstance(time, bool) else None


def _is_plain_sftp(fs: Any) -> bool:
    """Whether it is fsspec's own client, with access to paramiko's: a derived client may encrypt."""
    from fsspec.implementations.sftp import SFTPFileSystem

    return type(fs) is SFTPFileSystem


def real_move(fs: Any) -> str | None:
    """The name of the filesystem's own rename; None if moving would copy and delete."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    cls = type(fs)
    if cls.mv is not AbstractFileSystem.mv:
        return "mv"
    if issubclass(cls, AsyncFileSystem):
        return "mv_file" if cls._mv_file is not AsyncFileSystem._mv_file else None
    return "mv_file" if hasattr(cls, "mv_file") else None


# Any: neither fsspec nor paramiko ships type information.
def put_whole(client: Any, path: str, content: bytes) -> None:
    """Write ``content`` to ``path``, and check that all of it was stored."""
    client.ftp.putfo(io.BytesIO(content), path, file_size=len(content), confirm=True)


def get_range(client: Any, path: str, start: int, stop: int | None) -> bytes:
    """Bytes ``[start, stop)`` of the object; fewer at its end."""
    with client.ftp.open(path, "rb") as file:
        size = file.stat().st_size or 0
        end = size if stop is None else min(stop, size)
        if start >= end:
            return b""
        file.seek(start)
        file.prefetch(end)
        return bytes(file.read(end - start))
