"""The folders of logs: their place, their owners, and which logs their owners left behind.

A writer's log is a folder with a locked ``owner`` file and segments (`rlio.log.wal`). Logs of earlier
versions may also hold encoded shards. `rlio.writers.recovery` turns the rows into shards.

Example:
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> log = LogFolder.create(f"{folder}/w00000-0a1b2c3d", root="/data/x", writer="w00000-0a1b2c3d")
    >>> [found.claim() for found in find_logs(folder)]     # Its owner is alive.
    [False]
    >>> log.release()
    >>> [found.claim() for found in find_logs(folder)]
    [True]
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import stat
import sys
import uuid
import weakref
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

from rlio.catalog.names import WAL_DIR, ShardName, is_writer_id
from rlio.errors import OptionError, PublishError, RlioError, UnsafeData, excerpt
from rlio.log.wal import Sync
from rlio.storage.endpoint import endpoint_of
from rlio.storage.filesystem import Storage
from rlio.storage.local import make_folders, on_network, sync_descriptor, write_whole
from rlio.storage.local import sync_folder as sync_folder
from rlio.support.options import check_choice, check_count, check_number, check_seconds, set_options

try:
    import fcntl
except ImportError:  # Windows has no flock, and so no log.
    fcntl = None  # type: ignore[assignment]  # To mypy a module is never None.

__all__ = [
    "LogFolder",
    "LogState",
    "Spool",
    "SpoolLike",
    "find_logs",
    "first_row",
    "parse_spool",
    "spool_of",
    "spools_beside",
    "sweep",
]

logger: logging.Logger = logging.getLogger("rlio")

_OWNER: Final = "owner"
# Non-blocking, because opening a FIFO would otherwise wait. (Windows has no log, and not these flags.)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
#: Prefix of a log folder that is being made; no writer id begins with it.
_NEW: Final = "_new-"
_SEGMENT: Final = re.compile(r"([0-9]{1,19})\.wal")
_SCHEMA: Final = re.compile(r"schema-[0-9a-f]{8,64}\.json")
_SUB_FOLDER: Final = re.compile(r"[0-9a-f]{16}")
_LEFTOVER: Final = re.compile(r"[^/]*\.tmp")
_MAX_OWNER_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 100

SpoolLike: TypeAlias = "Literal['auto'] | str | os.PathLike[str] | Spool | None"


@dataclass(frozen=True, kw_only=True)
class Spool:
    """The options of the write-ahead log.

    Attributes:
        folder: The folder of the logs. None: ``_wal`` in a root on a local disk, else a folder of this user
            (the environment variable ``RLIO_SPOOL``, or ``rlio/spool`` in the user's cache folder).
        sync: When rows become safe against power failure: every ``sync_interval`` seconds ("interval"),
            within each `write()` ("always"), or when the kernel writes them ("never"). They are safe against
            the death of the process at once.
        sync_interval: Seconds between syncs: the most that a power failure loses.
        max_bytes: Bytes that a writer's log may take while rows cannot be published. 1 GiB is two and a half
            hours of 1,000 HalfCheetah-v5 steps/s.
        block_seconds: How long `write()` waits for space in a full log before it raises.
        publish_seconds: Seconds that `flush()` and `close()` wait for the store before they raise; None: no
            limit. The rows stay in the log, and the writer keeps trying. After its process has ended, the
            next writer or `rlio recover` stores them. 600 s are enough for a full log of 1 GiB at 2 MB/s, and
            limit how long an outage delays the end of a job.

    Raises:
        OptionError: A value is out of bounds.
    """

    folder: str | os.PathLike[str] | None = None
    sync: Sync = "interval"
    sync_interval: float = 1.0
    max_bytes: int = 1 << 30
    block_seconds: float = 60.0
    publish_seconds: float | None = 600.0

    def __post_init__(self) -> None:
        check_choice("sync", self.sync, ("interval", "always", "never"))
        set_options(
            self,
            sync_interval=check_number("Spool.sync_interval", self.sync_interval, above=0, of="seconds"),
            max_bytes=check_count("Spool.max_bytes", self.max_bytes, least=1, of="bytes"),
            block_seconds=check_seconds("Spool.block_seconds", self.block_seconds),
            publish_seconds=check_number(
                "Spool.publish_seconds", self.publish_seconds, above=0, of="seconds", none="no limit"
            ),
        )


def parse_spool(spool: SpoolLike, sync: Sync | None) -> Spool | None:
    """Return the writers' arguments ``spool`` and ``sync`` as a `Spool`; None: no log.

    Raises:
        OptionError: The arguments contradict each other, or one is illegal.
    """
    if spool is None:
        if sync is not None:
            raise OptionError(f"sync={excerpt(sync)} with spool=None: without a log there is nothing to sync")
        return None
    if isinstance(spool, Spool):
        found = spool
    elif spool == "auto":
        found = Spool()
    elif isinstance(spool, (str, os.PathLike)):
        found = Spool(folder=spool)
    else:
        raise OptionError(f"spool={excerpt(spool)}: expected 'auto', a folder, a Spool, or None for no log")
    return found if sync is None else replace(found, sync=sync)


def spool_of(storage: Storage, spool: Spool) -> str | None:
    """Return the folder for the logs of the root's writers; it may not exist yet.

    None for roots in this process's memory, because no log could outlive its rows there, and without flock.
    """
    if fcntl is None:
        logger.warning("no write-ahead log on %s: rows are safe once they are published", sys.platform)
        return None
    if not storage.is_local and _is_memory(storage):
        return None
    if spool.folder is None and storage.is_local and not on_network(storage.root):
        return os.path.join(storage.root, WAL_DIR)
    base = os.fspath(spool.folder) if spool.folder is not None else _user_spool()
    place = "\0".join([storage.uri, *endpoint_of(storage)])
    digest = hashlib.blake2b(place.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return os.path.join(os.path.abspath(os.path.expanduser(base)), digest)


def spools_beside(spool: str) -> list[str]:
    """Return the log folders of other roots, beside ``spool`` and in the user's folder; see `spool_of`.

    Only folders of this user; leaves out links.
    """
    bases = [os.path.abspath(os.path.expanduser(_user_spool()))]
    if os.path.basename(spool) != WAL_DIR:
        bases.append(os.path.dirname(spool))
    found = []
    for base in dict.fromkeys(bases):
        with contextlib.suppress(OSError):  # It does not exist, or this user may not list it.
            names = [name for name in sorted(os.listdir(base)) if _SUB_FOLDER.fullmatch(name)]
            found += [path for name in names if (path := os.path.join(base, name)) != spool and _is_own(path)]
    return found


def _is_own(path: str) -> bool:
    """Whether ``path`` is a folder of this user, and not a link."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


#: "gone": the log was recovered, or its writer has closed; "ownerless": it has files but no owner file.
LogState: TypeAlias = Literal["alive", "other-host", "other-user", "ownerless", "gone"]
_WHY_LEFT: Final[dict[LogState, str]] = {
    "alive": "its writer is alive",
    "other-host": (
        "it is another host's, whose writer may be alive: recover it on that host, or, if that host is gone "
        "for good (a recreated container, a disk that was moved), with `rlio recover --all-hosts`"
    ),
    "other-user": "it is another user's, who must recover it",
    "ownerless": "its owner file is missing, so it is unknown whether its writer is alive",
    "gone": "it has just been removed: open the writer again",
}


class LogFolder:
    """A writer's log folder; `create` and `claim` lock it.

    A forked child inherits the descriptor but not the lock: it closes its copy.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        #: The content of the owner file, once the log is locked.
        self.owner: dict[str, Any] = {}
        self._fd = -1

    @property
    def writer(self) -> str:
        """The writer's id."""
        return os.path.basename(self.path)

    @classmethod
    def create(cls, path: str, *, root: str, writer: str) -> Self:
        """Make and lock the folder of a new writer.

        Raises:
            PublishError: The folder could not be made, or already exists.
            UnsafeData: The spool belongs to another user.
        """
        # Made under another name, so that a visible log always has a live owner.
        made = os.path.join(os.path.dirname(path), f"{_NEW}{writer}-{uuid.uuid4().hex[:8]}")
        try:
            _make_folder(made)
        except OSError as error:
            raise PublishError(
                f"the log's folder could not be made: {error}; pass another one as "
                "spool=Spool(folder=...), or write without a log: spool=None",
                uri=path,
            ) from error
        try:
            owner, fd = _own(made, root=root, writer=writer)
            try:
                os.rename(made, path)  # Also replaces an empty folder that a dead writer left.
                made = path
                sync_folder(os.path.dirname(path))
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            if not os.path.exists(path) or made == path:
                raise PublishError(f"the log could not be made: {error}", uri=path) from error
            raise PublishError(
                f"the log of writer {writer!r} already exists: {cls(path).why_left()}", uri=path
            ) from error
        finally:
            if made != path:
                _unmake_folder(made)
        log = cls(path)
        log._hold(owner, fd)
        return log

    def _hold(self, owner: dict[str, Any], fd: int) -> None:
        self.owner, self._fd = owner, fd
        _held.add(self)

    def segments(self) -> list[str]:
        """Return the paths of the segments, by first row."""
        found = [
            (int(match[1]), name) for name in os.listdir(self.path) if (match := _SEGMENT.fullmatch(name))
        ]
        return [os.path.join(self.path, name) for _, name in sorted(found)]

    def shards(self) -> list[tuple[ShardName, str]]:
        """Return the encoded shards that an earlier version left here, by first row, with their paths."""
        found = [
            (name, text) for text in os.listdir(self.path) if (name := ShardName.parse(text)) is not None
        ]
        return [
            (name, os.path.join(self.path, text)) for name, text in sorted(found, key=lambda x: x[0].first)
        ]

    def shard_rows(self) -> list[range]:
        """Return the rows of those of these shards whose files are whole."""
        rows = []
        for name, path in self.shards():
            with contextlib.suppress(FileNotFoundError):  # Published after the listing.
                status = os.stat(path, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_size == name.size:
                    rows.append(range(name.first, name.end))
        return rows

    def schemas(self) -> list[str]:
        """Return the paths of the schemas of these shards."""
        return sorted(
            os.path.join(self.path, name) for name in os.listdir(self.path) if _SCHEMA.fullmatch(name)
        )

    def segment_path(self, first: int) -> str:
        """Return the path for the segment that begins with row ``first``."""
        return os.path.join(self.path, f"{first:012d}.wal")

    def bytes(self) -> int:
        """Return the size of all files in the folder in bytes."""
        total = 0
        with os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_size
        return total

    def release(self) -> None:
        """Release the lock. The files stay, for recovery. You can call this more than once."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def remove(self) -> None:
        """Remove the folder of a log that is no longer needed, and release the lock.

        Leaves unknown files in place and logs a warning.
        """
        shards = [path for _, path in self.shards()]
        leftovers = [os.path.join(self.path, x) for x in os.listdir(self.path) if _LEFTOVER.fullmatch(x)]
        for path in [*shards, *self.segments(), *self.schemas(), *leftovers]:
            os.unlink(path)
        # The owner file goes last: after a crash, the log can be claimed and removed again.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, _OWNER))
        try:
            os.rmdir(self.path)
        except OSError as error:
            logger.warning("the log folder %s is no longer needed but not empty: %s", self.path, error)
        with contextlib.suppress(OSError):  # The folder holds another writer's log too.
            os.rmdir(os.path.dirname(self.path))
        self.release()

    def claim(self, *, all_hosts: bool = False) -> bool:
        """Lock the log. Returns False if its owner is alive or may be (another host), or if the log is gone.

        Args:
            all_hosts: Also claim a log of another host, or a copy of a log. You must know that the owner is
                dead, or that the log is a copy.

        Raises:
            UnsafeData: The log belongs to another user.
        """
        path = os.path.join(self.path, _OWNER)
        try:
            if os.stat(self.path, follow_symlinks=False).st_uid not in (os.getuid(), 0):
                return False  # Another user's log: that user recovers it.
            fd = os.open(path, os.O_RDWR | _NO_FOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return False  # A log has its owner file before any row; gc removes such a folder.
        except PermissionError:
            return False  # Another user's log: that user recovers it.
        try:
            owner = self._lock(fd, path)
            if owner is not None and (all_hosts or self._is_dead(owner, fd)):
                self._hold(owner, fd)
        finally:
            if self._fd != fd:
                os.close(fd)
        return self._fd == fd

    def read_owner(self) -> dict[str, Any]:
        """Return the content of the owner file; {} if it is empty, illegal or not a regular file.

        Raises:
            OSError: The file does not exist, or belongs to another user.
        """
        fd = os.open(os.path.join(self.path, _OWNER), os.O_RDONLY | _NO_FOLLOW)
        try:
            return _owner_in(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else {}
        finally:
            os.close(fd)

    def is_held(self, owner: dict[str, Any]) -> bool:
        """Whether the process that owns the log surely lives, on this machine.

        Args:
            owner: What `read_owner` gave.

        Raises:
            OSError: The log is gone, or another user's.
        """
        here = (owner.get("host"), owner.get("boot")) == (host_id(), boot_id())
        if not here or not is_running(owner.get("pid")):
            return False
        fd = os.open(os.path.join(self.path, _OWNER), os.O_RDONLY | _NO_FOLLOW)
        try:
            status = os.fstat(fd)
            if (owner.get("device"), owner.get("inode")) != (status.st_dev, status.st_ino):
                return True  # A copy of the log; `claim` leaves it, too, while that process runs.
            # Its number may be another process's by now. The lock is tried only here, where the owner most
            # likely has it: while it is taken, if for a moment, a recovery cannot claim the log.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def has_rows(self) -> bool:
        """Whether the log has segments or shards."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return any(_SEGMENT.fullmatch(name) or ShardName.parse(name) for name in names)

    def state(self) -> LogState:
        """Return why a log that `claim` did not lock is left."""
        try:
            if os.stat(self.path, follow_symlinks=False).st_uid not in (os.getuid(), 0):
                return "other-user"
            owner = self.read_owner()
        except PermissionError:
            return "other-user"
        except (FileNotFoundError, NotADirectoryError):
            return "ownerless" if self.has_rows() else "gone"
        return "alive" if owner.get("host") == host_id() else "other-host"

    def why_left(self) -> str:
        """Return, as text, why a new writer of the same id cannot use this log."""
        try:
            if not self.claim():
                return _WHY_LEFT[self.state()]
            self.release()
        except (RlioError, OSError) as error:
            return f"it cannot be claimed: {error}"
        return "its writer is dead, and its rows could not be recovered: `rlio recover` says why"

    def _lock(self, fd: int, path: str) -> dict[str, Any] | None:
        """Lock the owner file and return its content; None if another process has the lock."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeData("the log's owner file is not a regular file", uri=path)
        if status.st_uid != os.getuid():
            raise UnsafeData(f"the log belongs to user {status.st_uid}, who must recover it", uri=path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        try:
            if os.stat(path, follow_symlinks=False).st_ino != status.st_ino:
                return None  # Removed, and made again, after the open.
        except FileNotFoundError:
            return None
        return _owner_in(fd)

    def _is_dead(self, owner: dict[str, Any], fd: int) -> bool:
        """Whether taking the lock proved that the owner is dead."""
        if owner.get("host") != host_id():
            host = excerpt(owner.get("host"))
            logger.warning("%s is the log of another host (%s): recover it on that host", self.path, host)
            return False
        status = os.fstat(fd)
        if (owner.get("device"), owner.get("inode")) == (status.st_dev, status.st_ino):
            return True
        # A copy (or a disk whose number changed at a reboot): no process ever locks a copy, so its lock
        # proves nothing.
        return owner.get("boot") != boot_id() or not is_running(owner.get("pid"))


def _owner_in(fd: int) -> dict[str, Any]:
    """Return the content of an owner file.

    {} if it is empty or illegal: it is not from rlio, which syncs an owner file before it gets its name.
    """
    try:
        owner = json.loads(os.read(fd, _MAX_OWNER_BYTES))
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def find_logs(spool: str) -> list[LogFolder]:
    """Return every writer's log folder in ``spool``, by writer id; none if ``spool`` does not exist."""
    if os.path.islink(spool):
        logger.warning("%s is a symbolic link: it leads to the logs of another root", spool)
        return []
    try:
        names = sorted(os.listdir(spool))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [LogFolder(os.path.join(spool, name)) for name in names if is_writer_id(name)]
    return [log for log in found if not os.path.islink(log.path) and os.path.isdir(log.path)]


def first_row(segment: str) -> int:
    """Return the first row of a segment, from its path."""
    match = _SEGMENT.fullmatch(os.path.basename(segment))
    return int(match[1]) if match else 0


@cache
def host_id() -> str:
    """Return an id of this machine or container."""
    machine = ""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            machine = Path(path).read_text().strip()
            break
    digest = hashlib.blake2b(f"{machine} {platform.node()}".encode(), digest_size=8)
    return digest.hexdigest()


@cache
def boot_id() -> str:
    """Return an id of this boot of the machine; "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_running(pid: Any) -> bool:
    """Whether a process with this id runs on this machine."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _make_folder(path: str) -> None:
    """Make a writer's log folder and its parent, which a closing writer may remove at the same moment."""
    parent = os.path.dirname(path)
    for attempt in range(_ATTEMPTS):
        _make_private(parent, shared=os.path.basename(parent) == WAL_DIR)
        try:
            os.mkdir(path, 0o700)
        except FileNotFoundError:
            if attempt + 1 == _ATTEMPTS:
                raise
        else:
            return


def _make_private(path: str, *, shared: bool) -> None:
    """Make the folder of logs: private to this user, or beside a root that several users may share.

    Raises:
        UnsafeData: The folder belongs to another user, or is a link.
    """
    if shared:
        make_folders(path)
        if os.path.islink(path):
            raise UnsafeData("the folder of logs is a symbolic link", uri=path)
        return
    make_folders(path, mode=0o700)
    status = os.stat(path, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UnsafeData(
            f"the spool belongs to user {status.st_uid}, or is a link: recovery would publish files that "
            "others put there; pass a folder of your own as spool=Spool(folder=...)",
            uri=path,
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.chmod(path, 0o700)


def _own(path: str, *, root: str, writer: str) -> tuple[dict[str, Any], int]:
    """Make and lock the owner file of a log. Returns its content and its descriptor."""
    fd = os.open(os.path.join(path, _OWNER), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = {
            "format": 0,
            "root": root,
            "writer": writer,
            "host": host_id(),
            "boot": boot_id(),
            "pid": os.getpid(),
            "device": os.fstat(fd).st_dev,
            "inode": os.fstat(fd).st_ino,
        }
        write_whole(fd, memoryview(json.dumps(owner).encode()))
        sync_descriptor(fd)
        sync_folder(path)
    except BaseException:
        os.close(fd)
        raise
    return owner, fd


def _unmake_folder(path: str) -> None:
    """Remove a log folder that was not completed; it has no rows."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, _OWNER))
    with contextlib.suppress(OSError):
        os.rmdir(path)


def sweep(spool: str) -> None:
    """Remove the folders in ``spool`` of writers that died while they made or removed their log's folder."""
    if os.path.islink(spool) or not os.path.isdir(spool):
        return
    for name in os.listdir(spool):
        path = os.path.join(spool, name)
        if is_writer_id(name):
            with contextlib.suppress(OSError):  # It is not empty, or belongs to another user.
                os.rmdir(path)
        if not name.startswith(_NEW) or os.path.islink(path):
            continue
        with contextlib.suppress(OSError):  # It belongs to another user, or is gone.
            fd = os.open(os.path.join(path, _OWNER), os.O_RDWR | _NO_FOLLOW)
            try:
                # The maker of an empty file is about to lock it, and would fail if it found this lock.
                if os.fstat(fd).st_size:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _unmake_folder(path)
            finally:
                os.close(fd)


def _user_spool() -> str:
    """Return this user's folder of logs."""
    given = os.environ.get("RLIO_SPOOL")
    if given:
        return given
    if sys.platform == "darwin":
        return os.path.expanduser("~/Library/Caches/rlio/spool")
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "rlio", "spool")


def _is_memory(storage: Storage) -> bool:
    from fsspec.implementations.memory import MemoryFileSystem

    return isinstance(storage.fs, MemoryFileSystem)


_held: weakref.WeakSet[LogFolder] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    """Release the locks in a child. Else the log of a dead parent would look alive."""
    for log in list(_held):
        log.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_after_fork)
