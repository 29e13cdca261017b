"""The files in the folder of built stores, and their removal: only of files that rlio created.

::

    rlio-cache            marks the folder as rlio's
    CACHEDIR.TAG          tells backup programs to leave it out
    <key>.lock            locked by the process that builds the store; never removed
    <key>.store/          a store: *.array, and manifest.json, which every use touches
    <key>.new-<random>/   a store being built
    <key>.old-<random>/   a store being removed

``extending`` in a store marks an extension that has begun: it may have changed bytes in place, below the
lengths in the manifest. If its builder died, the next builder removes the store. Stores of earlier versions
also have ``used``.
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
from rlio.replay.memory import is_array_file
from rlio.storage.local import on_network, sync_descriptor, write_whole

__all__ = [
    "EXTENDING",
    "MANIFEST",
    "StoreFolder",
    "builder_lock",
    "explained",
    "new_path",
    "prepare",
    "remove",
    "remove_store",
    "scan",
    "store_path",
    "user_folder",
    "write_file",
]

logger: logging.Logger = logging.getLogger("rlio")

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
_FOLDER: Final = re.compile(r"([0-9a-f]{16,128})\.(?:store|(new|old)-[0-9a-f]{8})")
_TEMPORARY: Final = re.compile(r"manifest-[0-9a-f]{8}\.tmp")


def store_path(folder: str, key: str) -> str:
    """Path of the store of a key."""
    return os.path.join(folder, f"{key}.store")


def new_path(folder: str, key: str) -> str:
    """A new, unique path for building the store of a key."""
    return os.path.join(folder, f"{key}.new-{uuid.uuid4().hex[:8]}")


def builder_lock(folder: str, key: str) -> FileLock:
    """The lock that the builder of a key's store holds; a dead process or a fork does not keep it.

    Any thread may release it. Two such locks exclude each other even within one process.
    """
    path = os.path.join(folder, f"{key}.lock")
    return FileLock(path, mode=0o600, thread_local=False, fallback_to_soft=False)


def user_folder() -> str:
    """The user's default cache folder of stores.

    Raises:
        OptionError: The user has no home folder.
    """
    home = os.path.expanduser("~")
    base = (
        os.path.join(home, "Library", "Caches") if sys.platform == "darwin" else os.path.join(home, ".cache")
    )
    given = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform != "darwin" and os.path.isabs(given):
        base = given
    if not os.path.isabs(base):
        raise OptionError("found no home folder for built stores: set RLIO_CACHE to a folder")
    return os.path.join(base, "rlio", "replay")


def prepare(path: str) -> None:
    """Create the folder, or check that it belongs to rlio and to this user alone.

    Raises:
        OptionError: The folder holds other files.
        UnsafeData: It is a link, belongs to another user, or others may write into it.
        CacheError: It cannot be created, or cannot hold files that processes share.
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
    """Turn errors of the operating system into `CacheError`s that say where, and what to do."""
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
            f"the cache folder belongs to user {status.st_uid}, but this is user {os.getuid()}: set "
            "RLIO_CACHE to a folder of your own",
            uri=path,
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise UnsafeData(
            f"others may write into the cache folder (mode {stat.S_IMODE(status.st_mode):04o}): chmod 700 it "
            "if no one else has put files there, or set RLIO_CACHE to another folder",
            uri=path,
        )


def _claim(path: str) -> None:
    """Mark an empty folder as rlio's; refuse a folder that is neither empty nor marked."""
    marker = os.path.join(path, _MARKER)
    if os.listdir(path) and not os.path.lexists(marker):
        raise OptionError(
            "the cache folder holds other things, which rlio must not remove: set RLIO_CACHE to a new or "
            "empty folder",
            uri=path,
        )
    for name, says in ((_MARKER, _SAYS), (_TAG, _TAG_SAYS)):
        with contextlib.suppress(FileExistsError):
            write_file(os.path.join(path, name), says)
    if stat.S_IMODE(os.stat(path).st_mode) != 0o700:
        os.chmod(path, 0o700)


@dataclass(frozen=True)
class StoreFolder:
    """A folder of a store, found on the disk.

    Attributes:
        path: Path of the folder.
        key: Key of the store.
        kind: Whether the store is complete, being built, or being removed.
        bytes: Bytes on the disk.
        used: Time of its last use, in seconds since 1970; 0 if unknown.
    """

    path: str
    key: str
    kind: Literal["store", "new", "old"]
    bytes: int
    used: float


def remove_store(folder: str, key: str) -> None:
    """Remove the store of a key, if it exists. Arrays that readers have mapped stay valid."""
    aside = os.path.join(folder, f"{key}.old-{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        # A reader that is opening the store notices the new name and starts again.
        os.rename(store_path(folder, key), aside)
        remove(aside)


def remove(path: str) -> None:
    """Remove rlio's files from a folder, and the folder itself if it is then empty."""
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


def scan(folder: str) -> list[StoreFolder]:
    """The folders of stores."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _FOLDER.fullmatch(entry.name)
            with contextlib.suppress(FileNotFoundError):  # It was removed or renamed in the meantime.
                if match is not None and entry.is_dir(follow_symlinks=False):
                    found.append(_measure(entry.path, match[1], match[2] or "store"))
    return found


def _measure(path: str, key: str, kind: str) -> StoreFolder:
    total, used = 0, 0.0
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if _is_ours(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    total += status.st_blocks * 512
                    if entry.name == MANIFEST:
                        used = status.st_mtime
    return StoreFolder(path, key, kind, total, used)  # type: ignore[arg-type]  # The pattern ensures the kind.


def write_file(path: str, data: bytes) -> None:
    """Create a file and make it durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_whole(fd, memoryview(data))
        sync_descriptor(fd)
    finally:
        os.close(fd)
