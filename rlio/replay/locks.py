"""Locks of files between processes (flock), which know about forks.

A lock belongs to what a descriptor stands for, of which a forked child has a copy: the lock is held until
every copy is closed, and undone for all of them by whoever unlocks it. So nothing here unlocks; descriptors
are closed. A child closes its copies of exclusive locks at once, since it does none of its parent's work, and
keeps those of shared ones, since it may read what its parent has opened.

Example:
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "lock")
    >>> lock = try_lock(path, make=True)
    >>> try_lock(path) is None
    True
    >>> lock.release()
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, Self

from rlio.errors import CacheError, UnsafeData

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None  # type: ignore[assignment]  # To mypy a module is never None.

__all__ = ["HAS_LOCKS", "Lock", "try_lock", "wait_for_lock"]

HAS_LOCKS: Final = fcntl is not None

_FLAGS: Final = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NO_FLOCK: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_POLL_SECONDS: Final = 0.02
# Held while a descriptor and the note of it come or go, and across a fork: a child never inherits a
# descriptor that it does not know.
_forks: Final = threading.RLock()


class Lock:
    """A lock that is held until `release`, or until nobody knows it any more. Use `try_lock`.

    Attributes:
        path: Of the file.
        fd: Its descriptor; -1 once it is released.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    def release(self) -> None:
        """Let go. May be called again."""
        with _forks:
            self._close()

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        # Garbage is collected at any place, also where waiting for a fork would be waiting for ever.
        self._close()


def try_lock(
    path: str, *, shared: bool = False, make: bool = False, dir_fd: int | None = None
) -> Lock | None:
    """Lock a file; None where another has it.

    Args:
        path: Of the file.
        shared: Beside others who share it; else alone.
        make: Make the file where there is none.
        dir_fd: Folder that a relative path begins in.

    Raises:
        FileNotFoundError: There is no such file.
        CacheError: The filesystem has no locks.
        UnsafeData: It is no file of this user.
    """
    flags = (os.O_RDONLY if shared else os.O_RDWR) | (os.O_CREAT if make else 0) | _FLAGS
    while True:
        with _forks:
            fd = os.open(path, flags, 0o600, dir_fd=dir_fd)
            lock = Lock(path, fd)
            if not shared:
                _exclusive.add(lock)
        try:
            if not _flock(lock, shared):
                lock.release()
                return None
            if _is_still(path, fd, dir_fd):
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()


def wait_for_lock(
    attempt: Callable[[], Lock | None],
    *,
    what: str,
    timeout: float | None,
    progress: Callable[[float], None] | None = None,
) -> Lock:
    """Try until there is a lock.

    Args:
        attempt: Tries to take it.
        what: That is waited for; for the message.
        timeout: Seconds; None: for ever.
        progress: Called with the seconds waited, some times a second; may raise.

    Raises:
        CacheError: It was not to be had in time.
    """
    start = time.monotonic()
    while True:
        lock = attempt()
        if lock is not None:
            return lock
        waited = time.monotonic() - start
        if timeout is not None and waited >= timeout:
            raise CacheError(f"waited {waited:.0f} s for {what}: look at that process, or wait for longer")
        if progress is not None:
            progress(waited)
        time.sleep(_POLL_SECONDS)


def _flock(lock: Lock, shared: bool) -> bool:
    status = os.fstat(lock.fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise UnsafeData(f"no regular file of user {os.getuid()}: remove it", uri=lock.path)
    try:
        fcntl.flock(lock.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            raise CacheError(
                f"this filesystem has no locks that processes could share a cache by ({error.strerror}): let "
                "RLIO_CACHE be a folder of a local disk, or do without (cache='memory' or 'none')",
                uri=lock.path,
            ) from error
        raise
    return True


def _is_still(path: str, fd: int, dir_fd: int | None) -> bool:
    """Whether the file that was locked has not been removed, and perhaps made again, since it was opened."""
    try:
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    status = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino)


_exclusive: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A child must not keep its parent's locks: what a dead parent was building would look alive."""
    for lock in list(_exclusive):
        lock.release()
    _forks.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_forks.acquire, after_in_parent=_forks.release, after_in_child=_let_go_in_child
    )
