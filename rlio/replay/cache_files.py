"""What lies in the folder of built stores, and what of it may be removed: only what rlio has put there.

::

    rlio-cache            marks the folder as rlio's
    CACHEDIR.TAG          tells backup programs to leave it out
    <key>.lock            locked by the process that builds the store; it stays there
    <key>.store/          a store: *.array, and manifest.json, which is touched at each use
    <key>.new-<random>/   a store that is being built
    <key>.old-<random>/   a store that is being removed

``extending`` in a store says that an extension has begun: bytes below the lengths of the manifest may have
been written in place. ``used`` was in stores of earlier versions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from filelock import FileLock

from rlio.errors import CacheError, OptionError, RlioError, UnsafeData
from rlio.log.spool import on_network
from rlio.replay.memory import is_array_file
from rlio.storage.local import sync_descriptor, write_whole

__all__ = [
    "EXTENDING",
    "MANIFEST",
    "StoreFolder",
    "builder_lock",
    "explained",
    "is_key",
    "new_path",
    "prepare",
    "remove",
    "remove_store",
    "remove_strays",
    "scan",
    "store_path",
    "user_folder",
    "write_file",
]

logger = logging.getLogger("rlio")

MANIFEST: Final = "manifest.json"
EXTENDING: Final = "extending"
_USED: Final = "used"

_MARKER: Final = "rlio-cache"
_SAYS: Final = (
    b"Stores that rlio has built from data sets. They may be removed at any time: rlio builds them again.\n"
)
_TAG: Final = "CACHEDIR.TAG"
_TAG_SAYS: Final = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n# A cache of rlio. See https://bford.info/cachedir/\n"
)
_KEY: Final = re.compile(r"[0-9a-f]{16,128}")
_FOLDER: Final = re.compile(r"([0-9a-f]{16,128})\.(?:store|(new|old)-[0-9a-f]{8})")
_TEMPORARY: Final = re.compile(r"manifest-[0-9a-f]{8}\.tmp")


def is_key(key: str) -> bool:
    """Whether a text may be the key of a store: 16 to 128 hexadecimal digits, in small letters."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def store_path(folder: str, key: str) -> str:
    """Where the store of a key lies."""
    return os.path.join(folder, f"{key}.store")


def new_path(folder: str, key: str) -> str:
    """A place to build the store of a key in, which nobody else has."""
    return os.path.join(folder, f"{key}.new-{uuid.uuid4().hex[:8]}")


def builder_lock(folder: str, key: str) -> FileLock:
    """The lock that the builder of a key's store holds; a process that dies, or is forked, does not keep it.

    Any thread may release it. Two of these exclude each other, also in one process.
    """
    path = os.path.join(folder, f"{key}.lock")
    return FileLock(path, mode=0o600, thread_local=False, fallback_to_soft=False)


def user_folder() -> str:
    """The user's own cache folder of stores.

    Raises:
        OptionError: The user has no home.
    """
    home = os.path.expanduser("~")
    base = (
        os.path.join(home, "Library", "Caches") if sys.platform == "darwin" else os.path.join(home, ".cache")
    )
    given = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform != "darwin" and os.path.isabs(given):
        base = given
    if not os.path.isabs(base):
        raise OptionError("there is no home folder to keep built stores in: set RLIO_CACHE to a folder")
    return os.path.join(base, "rlio", "replay")


def prepare(path: str) -> None:
    """Make the folder, or check that it is rlio's, and this user's alone.

    Raises:
        OptionError: It holds other things.
        UnsafeData: It is a link, another user's, or others may write into it.
        CacheError: It cannot be made, or is no place for files that several processes share.
    """
    with explained(path):
        _make(path)
        if os.name != "posix" or on_network(path):
            raise CacheError(
                "processes share stores through locks and mapped files that may be removed, which network "
                "filesystems and Windows do not support: set RLIO_CACHE to a folder of a local disk, or use "
                "no cache (cache='memory' or 'none')",
                uri=path,
            )
        _claim(path)


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Say where an error of the operating system comes from, and what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RlioError):
            raise
        raise CacheError(
            f"the cache cannot be used: {error}; free space, or set RLIO_CACHE to another folder", uri=path
        ) from error


def _make(path: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.stat(path, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeData("the cache folder is a link or a file: give the folder itself", uri=path)
    if status.st_uid != os.getuid():
        raise UnsafeData(
            f"the cache folder belongs to user {status.st_uid}, and this is user {os.getuid()}: "
            "set RLIO_CACHE to a folder of your own",
            uri=path,
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise UnsafeData(
            f"others may write into the cache folder (mode {stat.S_IMODE(status.st_mode):04o}): chmod 700 it "
            "if nobody has put anything there, or set RLIO_CACHE to another",
            uri=path,
        )


def _claim(path: str) -> None:
    """Mark a folder that is empty; refuse one that is neither empty nor marked."""
    marker = os.path.join(path, _MARKER)
    if os.listdir(path) and not os.path.lexists(marker):
        raise OptionError(
            "the cache folder holds other things, which rlio would have to tell from its own: set RLIO_CACHE "
            "to a new or empty folder",
            uri=path,
        )
    for name, says in ((_MARKER, _SAYS), (_TAG, _TAG_SAYS)):
        with contextlib.suppress(FileExistsError):
            write_file(os.path.join(path, name), says)
    if stat.S_IMODE(os.stat(path).st_mode) != 0o700:
        os.chmod(path, 0o700)


@dataclass(frozen=True)
class StoreFolder:
    """A folder of a store that was found.

    Attributes:
        path: Of the folder.
        key: Of the store.
        kind: Whether it is whole, being built, or being removed.
        bytes: On the disk.
        used: When it was last used, in seconds since 1970; 0 where that is not known.
    """

    path: str
    key: str
    kind: Literal["store", "new", "old"]
    bytes: int
    used: float


def remove_store(folder: str, key: str) -> None:
    """Remove the store of a key, if it is there. Arrays that readers have mapped stay valid."""
    aside = os.path.join(folder, f"{key}.old-{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        # A reader that opens the store meanwhile sees by the name that it has to begin again.
        os.rename(store_path(folder, key), aside)
        remove(aside)


def remove(path: str) -> None:
    """Remove what rlio has put into a folder, and the folder if it is empty then."""
    with contextlib.suppress(FileNotFoundError):  # Another process was quicker.
        names = os.listdir(path)
        ours = [name for name in names if _is_ours(name)]
        for name in ours:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        if len(ours) == len(names):
            with contextlib.suppress(OSError):  # Another process has just put a file there.
                os.rmdir(path)
        elif ours:
            logger.warning("%s holds files that are not rlio's: they are left there", path)


def _is_ours(name: str) -> bool:
    return (
        name in (_USED, MANIFEST, EXTENDING) or is_array_file(name) or _TEMPORARY.fullmatch(name) is not None
    )


def remove_strays(dir_fd: int, keep: set[str]) -> None:
    """Remove from a store what an extension of it has left that was killed: arrays that are not its own."""
    for name in os.listdir(dir_fd):
        if (is_array_file(name) and name not in keep) or _TEMPORARY.fullmatch(name):
            os.unlink(name, dir_fd=dir_fd)


def scan(folder: str, key: str | None = None) -> list[StoreFolder]:
    """The folders of stores, of all keys or one."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _FOLDER.fullmatch(entry.name)
            if match is None or (key is not None and match[1] != key):
                continue
            with contextlib.suppress(FileNotFoundError):  # It was removed, or has a new name, just now.
                if entry.is_dir(follow_symlinks=False):
                    found.append(_measure(entry.path, match[1], match[2] or "store"))
    return found


def _measure(path: str, key: str, kind: str) -> StoreFolder:
    total, used = 0, 0.0
    for name, status in _files(path):
        total += status.st_blocks * 512
        if name == MANIFEST:
            used = status.st_mtime
    return StoreFolder(path, key, kind, total, used)  # type: ignore[arg-type]  # One of the pattern's.


def _files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if _is_ours(entry.name):
                    yield entry.name, entry.stat(follow_symlinks=False)


def write_file(path: str, data: bytes, *, dir_fd: int | None = None) -> None:
    """Make a new file, durably."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(path, flags, 0o600, dir_fd=dir_fd)
    try:
        write_whole(fd, memoryview(data))
        sync_descriptor(fd)
    finally:
        os.close(fd)
