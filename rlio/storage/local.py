"""A folder of this machine, through system calls: whole, durable objects, and nothing outside the root.

Every name below the root is opened relative to its parent's descriptor and without following symbolic links.
A stranger's data set therefore cannot make rlio read or write anywhere else, not even by swapping a folder
for a link at the same time. The root itself may be a link, because the user chose it.

On platforms without ``openat`` (Windows) the same calls use paths, after a check for links.

Example:
    >>> import tempfile
    >>> folder = LocalFolder(tempfile.mkdtemp(), sync=False)
    >>> folder.put("a/b.bin", memoryview(b"whole or not at all"))
    >>> folder.read("a/b.bin", 0, 5)
    b'whole'
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rlio.errors import UnsafeData, excerpt
from rlio.storage.paths import TMP_DIR, Entry

try:
    import fcntl
except ImportError:  # Windows has no flock.
    fcntl = None  # type: ignore[assignment]  # To mypy a module is never None.

__all__ = [
    "LocalFolder",
    "PendingFile",
    "make_folders",
    "on_network",
    "remove_unfinished",
    "sync_descriptor",
    "sync_folder",
    "try_lock",
    "warn_of_links",
    "write_whole",
]

logger: logging.Logger = logging.getLogger("rlio")

_HAS_OPENAT = os.open in os.supports_dir_fd and hasattr(os, "O_DIRECTORY")
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
# Non-blocking, because opening a FIFO that poses as a shard would otherwise block until a writer opens it.
_READ = os.O_RDONLY | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | getattr(os, "O_BINARY", 0)


# Here flock may have no effect, and files may vanish with the network.
_NETWORK = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.blobfuse",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.goofys",
        "fuse.juicefs",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "smb3",
        "smbfs",
        "wekafs",
    ]
)

# Where a filesystem has no locks, an unfinished file of the last day counts as being written.
_GRACE = 24 * 3600.0
_ATTEMPTS = 100
# Syncing this many bytes takes some milliseconds, in the background.
_SYNC_BYTES = 4 << 20


class LocalFolder:
    """The local backend of `Storage`.

    Args:
        root: Absolute path of the folder; need not exist.
        sync: `put` waits until the object and its name are on the disk.
    """

    def __init__(self, root: str, *, sync: bool) -> None:
        self.root = root
        self.sync = sync

    def read(self, path: str, start: int, stop: int | None) -> bytes:
        """Bytes ``[start, stop)`` of a regular file; fewer at its end."""
        with self._open(path) as fd, open(fd, "rb", buffering=0, closefd=False) as file:
            file.seek(start)
            if stop is None:
                return file.readall()
            parts: list[bytes] = []
            # Not more than the file has: read() allocates what is requested.
            missing = min(stop, os.fstat(fd).st_size) - start
            # The loop serves files larger than one read() returns (2 GiB on Linux).
            while missing > 0 and (part := file.read(missing)):
                parts.append(part)
                missing -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def put(self, path: str, data: memoryview) -> None:
        """Create or replace ``path`` with ``data``: readers see the old object or the whole new one."""
        make_folders(self.root, sync=self.sync)
        pending = PendingFile(self.root, sync=self.sync)
        try:
            pending.write(data)
            pending.commit(path)
        finally:
            pending.discard()  # After an interrupt; a committed file has nothing to discard.

    def landed(self, path: str, data: memoryview) -> bool:
        """Always False: a failed local call has lost no response, and its durability is in doubt."""
        return False

    def entries(
        self, folder: str, limit: int, *, times: dict[str, float | None] | None = None
    ) -> list[Entry]:
        """Every regular file below ``folder``, unsorted. Leaves out links and special files.

        Args:
            folder: A folder below the root; "" for the root.
            limit: Largest number of names.
            times: A dict to fill: path -> time of the last write. None: times are not needed.

        Raises:
            UnsafeData: There are more than ``limit`` names.
        """
        if folder and not self._is_plain_folder(folder):
            return []
        found: list[Entry] = []
        links: list[str] = []
        pending = [folder]
        seen = 0
        while pending:
            parent = pending.pop()
            prefix = f"{parent}/" if parent else ""
            try:
                children = os.scandir(os.path.join(self.root, parent) if parent else self.root)
            except (FileNotFoundError, NotADirectoryError):
                continue  # The folder was removed, or replaced by a file: it has no files.
            with children:
                for child in children:
                    seen += 1
                    if seen > limit:
                        raise UnsafeData(f"more than {limit} names: raise the limit if they are yours")
                    path = prefix + child.name
                    if child.is_file(follow_symlinks=False):
                        try:
                            status = child.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue  # removed after it was listed
                        found.append(Entry(path, status.st_size))
                        if times is not None:
                            times[path] = status.st_mtime
                    elif child.is_dir(follow_symlinks=False):
                        pending.append(path)
                    elif child.is_symlink():
                        links.append(path)
        warn_of_links(links, self.root)
        return found

    def exists(self, path: str) -> bool:
        """Whether a regular file or a folder exists there."""
        if not path:
            return os.path.isdir(self.root)
        *folders, name = path.split("/")
        try:
            with self.folder(folders) as folder:
                mode = folder.mode(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(mode) or stat.S_ISDIR(mode)

    def remove(self, path: str) -> None:
        """Remove the file, if it exists."""
        *folders, name = path.split("/")
        with contextlib.suppress(FileNotFoundError), self.folder(folders) as folder:
            os.unlink(folder.at(name), dir_fd=folder.fd)

    def remove_folder(self, folder: str, limit: int) -> None:
        """Remove a folder with everything in it; what cannot be removed remains."""
        shutil.rmtree(os.path.join(self.root, folder), ignore_errors=True)

    def modified(self, path: str) -> float | None:
        """When the file was last written, in seconds since the epoch by its filesystem's clock."""
        *folders, name = path.split("/")
        with self.folder(folders) as folder:
            return os.stat(folder.at(name), dir_fd=folder.fd, follow_symlinks=False).st_mtime

    @contextlib.contextmanager
    def hold_unfinished(self, path: str) -> Iterator[bool | None]:
        """Hold the file of a `PendingFile` whose process is gone; yields whether it is held.

        False: a process writes it, or it is gone. None: that is unknown, for want of locks or of permission.
        """
        *folders, name = path.split("/")
        with contextlib.ExitStack() as stack:
            held: bool | None
            try:
                folder = stack.enter_context(self.folder(folders))
                with folder.refusing_links(name):
                    fd = os.open(folder.at(name), _READ, dir_fd=folder.fd)
                stack.callback(os.close, fd)
                held = try_lock(fd)
            except (FileNotFoundError, NotADirectoryError):
                held = False
            except PermissionError:
                held = None
            yield held

    def children(self, folder: str, most: int | None) -> list[tuple[str, bool]]:
        """Names directly in ``folder``, at most ``most``, each with whether it is a folder."""
        if folder and not self._is_plain_folder(folder):
            return []
        try:
            found = os.scandir(os.path.join(self.root, folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        with found:
            return [(child.name, child.is_dir(follow_symlinks=False)) for child in islice(found, most)]

    # ---- inside ----

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[int]:
        """A descriptor of a regular file."""
        *folders, name = path.split("/")
        with self.folder(folders) as folder:
            with folder.refusing_links(name):
                fd = os.open(folder.at(name), _READ, dir_fd=folder.fd)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise UnsafeData(
                        f"{excerpt(path)} is not a regular file: a folder, pipe or device is never read",
                        uri=self.root,
                    )
                yield fd
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def folder(self, parts: list[str], *, create: bool = False) -> Iterator[_Folder]:
        """The folder that ``parts`` lead to from the root, without following links."""
        with contextlib.ExitStack() as stack:
            folder = _Folder(self.root, None)
            if _HAS_OPENAT:
                folder.fd = os.open(self.root, _FOLDER)
                stack.callback(os.close, folder.fd)
            for part in parts:
                if create:
                    self._make(folder, part)
                child = _Folder(os.path.join(folder.path, part), None)
                with folder.refusing_links(part):
                    if _HAS_OPENAT:
                        child.fd = os.open(part, _FOLDER | _NO_FOLLOW, dir_fd=folder.fd)
                        stack.callback(os.close, child.fd)
                folder = child
            yield folder

    def _make(self, folder: _Folder, name: str) -> None:
        """Create the folder ``name`` if it does not exist. Its name is durable before its content."""
        try:
            folder.mode(name)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another writer was quicker
                os.mkdir(folder.at(name), dir_fd=folder.fd)
            # Files in `TMP_DIR` get another name before any process relies on them.
            if self.sync and name != TMP_DIR:
                folder.sync()

    def _is_plain_folder(self, folder: str) -> bool:
        """Whether ``folder`` is a folder and no link leads to it; a link is logged as a warning."""
        try:
            with self.folder(folder.split("/")):
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False
        except UnsafeData:
            warn_of_links([folder], self.root)
            return False


class PendingFile:
    """A file that is written piece by piece, and appears whole and durable on `commit`.

    Its process holds a lock on it (flock) until then: `gc` leaves it alone, however long it takes, and
    removes it once the process is gone.

    Args:
        root: Absolute path of the data set's folder.
        sync: Make the file and its name durable.

    Raises:
        OSError: The file could not be created.
    """

    def __init__(self, root: str, *, sync: bool = True) -> None:
        self._folder = LocalFolder(root, sync=sync)
        self._name = ""
        self._unsynced = 0
        #: The first error. After it, `write` does nothing and `commit` raises.
        self.failure: OSError | None = None
        self._fd = -1
        try:
            self._create()
        except BaseException:
            self.discard()  # Closing the folder may have failed.
            raise

    def _create(self) -> None:
        """Create and lock the file; until then, `remove_unfinished` may remove folder and file."""
        for left in reversed(range(_ATTEMPTS)):
            self._name = f"{uuid.uuid4().hex}.tmp"
            try:
                with self._folder.folder([TMP_DIR], create=True) as tmp:
                    self._fd = os.open(tmp.at(self._name), _CREATE, 0o666, dir_fd=tmp.fd)
            except FileNotFoundError:
                if left and os.path.isdir(self._folder.root):
                    continue
                raise
            if not left or (try_lock(self._fd) is not False and os.fstat(self._fd).st_nlink):
                return
            self._close()

    def write(self, data: memoryview) -> None:
        """Append ``data``; syncs now and then, to leave little for `commit`."""
        if self.failure is not None:
            return
        try:
            write_whole(self._fd, data)
            self._unsynced += len(data)
            if self._folder.sync and self._unsynced >= _SYNC_BYTES:
                os.fsync(self._fd)
                self._unsynced = 0
        except OSError as error:
            self.failure = error

    def commit(self, path: str) -> None:
        """Give the file its name below the root, and make file and name durable.

        Raises:
            OSError: This failed, or a `write` had failed; the file is then removed.
        """
        *folders, name = path.split("/")
        try:
            if self.failure is not None:
                raise self.failure
            if self._folder.sync:
                sync_descriptor(self._fd)
            with (
                self._folder.folder([TMP_DIR]) as tmp,
                self._folder.folder(folders, create=True) as target,
            ):
                os.replace(tmp.at(self._name), target.at(name), src_dir_fd=tmp.fd, dst_dir_fd=target.fd)
                if self._folder.sync:
                    target.sync()
        except BaseException:
            self.discard()
            raise
        self._close()

    def discard(self) -> None:
        """Remove the written file; if this fails, `gc` removes it later. May be called again."""
        if self._fd >= 0:
            try:
                self._close()
                with self._folder.folder([TMP_DIR]) as tmp:
                    tmp.discard(self._name)
            except FileNotFoundError:
                return
            except OSError as error:
                logger.warning("could not remove the unfinished %s: %s", self._name, error)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


class _Folder:
    """An open folder: a descriptor on platforms with ``openat``, else a path."""

    def __init__(self, path: str, fd: int | None) -> None:
        self.path = path
        self.fd = fd

    def at(self, name: str) -> str:
        """The path of the child ``name``, to be passed together with ``dir_fd=self.fd``."""
        return name if self.fd is not None else os.path.join(self.path, name)

    def mode(self, name: str) -> int:
        return os.stat(self.at(name), dir_fd=self.fd, follow_symlinks=False).st_mode

    def sync(self) -> None:
        """Make the names in this folder durable. Does nothing on Windows, which has no such call."""
        if self.fd is not None:
            sync_descriptor(self.fd)

    def discard(self, name: str) -> None:
        """Remove the unfinished file ``name``; garbage collection removes it later if this fails."""
        try:
            os.unlink(self.at(name), dir_fd=self.fd)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("could not remove the unfinished %s/%s: %s", self.path, name, error)

    @contextlib.contextmanager
    def refusing_links(self, name: str) -> Iterator[None]:
        """Turn the error of opening a link into `UnsafeData`; without O_NOFOLLOW, check for links first."""
        if not _HAS_OPENAT and os.path.islink(os.path.join(self.path, name)):
            raise self._link(name)
        try:
            yield
        except OSError as error:
            # Linux returns ENOTDIR for a link to a folder; both codes also have other causes.
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISLNK(self.mode(name)):
                        raise self._link(name) from error
            raise

    def _link(self, name: str) -> UnsafeData:
        return UnsafeData(
            f"{excerpt(name)} is a symbolic link, which could lead out of the root: put the file itself "
            "there (cp -rL copies what links point to)",
            uri=self.path,
        )


def warn_of_links(links: list[str], where: str) -> None:
    """Log that ``links`` were not followed, because nothing is left out silently."""
    if links:
        logger.warning(
            "%d symbolic links in %s were not followed (the first: %s), because they could lead out of the "
            "folder; open the place that they point to, or copy it with cp -rL",
            len(links),
            where,
            excerpt(links[0]),
        )


def write_whole(fd: int, data: memoryview) -> None:
    """Write all of ``data``, in as many calls as the kernel needs."""
    offset = 0
    while offset < len(data):
        offset += os.write(fd, data[offset:])


def sync_descriptor(fd: int) -> None:
    """Make a file or folder durable, including in the drive's cache."""
    if sys.platform == "darwin":
        import fcntl

        # On macOS fsync() leaves the data in the drive's cache. Not every filesystem supports the stronger
        # call.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable. Does nothing on Windows, which has no such call."""
    if _HAS_OPENAT:
        fd = os.open(folder, _FOLDER)
        try:
            sync_descriptor(fd)
        finally:
            os.close(fd)


def make_folders(path: str, *, mode: int = 0o777, sync: bool = True) -> None:
    """Create a folder and its parents; with ``sync``, their names survive a power failure."""
    missing = []
    while not os.path.isdir(path) and path != os.path.dirname(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode)
        if sync:
            with contextlib.suppress(
                PermissionError
            ):  # A parent may allow creating folders, but not reading it.
                sync_folder(os.path.dirname(folder))


def try_lock(fd: int) -> bool | None:
    """Lock an open file or folder until it is closed, or this process dies.

    Returns:
        False: another process has the lock, or another descriptor of this one. None: there are no locks here.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # The filesystem has none.
        return None
    return True


def remove_unfinished(root: str) -> None:
    """Remove files that dead processes left unfinished in a root, and their folder if it is then empty.

    A process that is still writing one holds its lock.
    """
    trusts_locks = not on_network(root)
    # Whatever cannot be removed now remains for the next call.
    with contextlib.suppress(OSError, UnsafeData):
        with LocalFolder(root, sync=False).folder([TMP_DIR]) as tmp:
            for name in os.listdir(tmp.path if tmp.fd is None else tmp.fd):
                if name.endswith(".tmp"):
                    _remove_abandoned(tmp, name, trusts_locks=trusts_locks)
        os.rmdir(os.path.join(root, TMP_DIR))


def _remove_abandoned(tmp: _Folder, name: str, *, trusts_locks: bool) -> None:
    with contextlib.suppress(FileNotFoundError):  # Its process has renamed it, or another has removed it.
        fd = os.open(tmp.at(name), _READ, dir_fd=tmp.fd)
        try:
            locked = try_lock(fd) if trusts_locks else None
            if os.fstat(fd).st_mtime < time.time() - _GRACE if locked is None else locked:
                tmp.discard(name)
        finally:
            os.close(fd)


def on_network(path: str) -> bool:
    """Whether a local path lies on a network filesystem, according to /proc."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    real = os.path.realpath(path)
    best, kind = -1, ""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, types = left.split(" "), right.split(" ")
        if len(fields) < 5 or not types[0]:
            continue
        mount = fields[4].encode("latin-1", "replace").decode("unicode_escape")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:
            best, kind = len(mount), types[0]
    return kind in _NETWORK
