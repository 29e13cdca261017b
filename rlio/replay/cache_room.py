"""Room in the folder of built stores: what is counted, and which stores are evicted.

The bound is approximate: builders count the bytes on the disk, and not those that other builders are about to
write. A builder counts again as it writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Final

from rlio.errors import CacheError
from rlio.replay.cache_files import StoreFolder, lock_path, scan, store_path
from rlio.replay.locks import Lock, try_lock

__all__ = [
    "builder_of",
    "drop_lock",
    "is_idle",
    "make_room",
    "put_aside",
    "remove_abandoned",
    "size_text",
    "sweep",
    "write_owner",
]

logger = logging.getLogger("rlio")

#: Part of the disk that is never asked for.
_KEPT_FREE: Final = 0.05
_OWNER_BYTES: Final = 64
_ATTEMPTS: Final = 3
_PAUSE_SECONDS: Final = 0.03


def make_room(folder: str, key: str, wanted: int, max_bytes: int) -> None:
    """Evict stores until there is room for ``wanted`` bytes more of a store.

    Args:
        folder: Of the stores.
        key: Of the store that is built; the caller has its lock.
        wanted: Bytes beyond those that it has.
        max_bytes: That all stores together may take.

    Raises:
        CacheError: There is no such room, even without the stores that nobody reads; then none is removed.
    """
    sweep(folder)
    for _ in range(_ATTEMPTS):
        use = _Use.of(folder, key)
        missing = use.missing(folder, wanted, max_bytes)
        # Looked at before any is removed: what does not help is not done.
        idle = 0 if missing <= 0 else sum(found.bytes for found in use.stores if is_idle(found))
        if missing <= 0 or (idle >= missing and _evict(folder, use.stores, missing) >= missing):
            return
        # A process that is just being forked has the locks of the one that forks it for a moment.
        time.sleep(_PAUSE_SECONDS)
    raise _no_room(folder, _Use.of(folder, key), wanted, max_bytes)


def sweep(folder: str) -> None:
    """Remove what the dead have left: stores half built, half removed, and locks for which there is none."""
    folders, locks = scan(folder)
    for found in folders:
        if found.kind == "old" and is_idle(found):
            found.remove()
    whole = {found.key for found in folders if found.kind == "store"}
    for key in {found.key for found in folders if found.kind == "new"} | (set(locks) - whole):
        lock = try_lock(lock_path(folder, key), make=True)
        if lock is not None:
            with lock:
                remove_abandoned(folder, key)
                drop_lock(folder, key, lock)


def remove_abandoned(folder: str, key: str) -> None:
    """Remove the half built stores of a key, for which the caller has the lock: their builders are dead."""
    for found in scan(folder, key)[0]:
        if found.kind == "new":
            found.remove()


def drop_lock(folder: str, key: str, lock: Lock) -> None:
    """Remove the file of a builder's lock, which the caller holds, where there is no store that it is for."""
    if not os.path.lexists(store_path(folder, key)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lock.path)


def put_aside(found: StoreFolder) -> StoreFolder | None:
    """Take a store that nobody reads out of the way; None if somebody does. The caller has the key's lock."""
    try:
        reading = try_lock(found.used_path)
    except FileNotFoundError:
        return found.put_aside()  # Damaged: nobody can read it.
    if reading is None:
        return None
    # Renamed under the lock: who gets it afterwards sees that this is not the store any more.
    with reading:
        return found.put_aside()


@dataclass(frozen=True)
class _Use:
    """What the stores take on the disk.

    Attributes:
        own: Bytes of the builder that asks.
        others: Bytes of all others, half built ones included.
        stores: The other stores, the least recently used first.
    """

    own: int
    others: int
    stores: list[StoreFolder]

    @classmethod
    def of(cls, folder: str, key: str) -> _Use:
        folders, _ = scan(folder)
        own = sum(found.bytes for found in folders if found.key == key)
        others = sum(found.bytes for found in folders if found.key != key)
        stores = [found for found in folders if found.kind == "store" and found.key != key]
        return cls(own, others, sorted(stores, key=lambda found: (found.used, found.key)))

    def missing(self, folder: str, wanted: int, max_bytes: int) -> int:
        """Bytes that have to be freed."""
        over = self.own + self.others + wanted - max_bytes
        free, kept = _disk(folder)
        return max(over, wanted - (free - kept))


def _disk(folder: str) -> tuple[int, int]:
    """Bytes that are free for this user, and those of them that stay so."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize, int(_KEPT_FREE * status.f_blocks * status.f_frsize)


def is_idle(found: StoreFolder) -> bool:
    """Whether nobody reads a store."""
    try:
        lock = try_lock(found.used_path)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    lock.release()
    return True


def _evict(folder: str, stores: list[StoreFolder], missing: int) -> int:
    """Remove stores that nobody reads or builds until as many bytes are free; gives how many are."""
    freed = 0
    for found in stores:
        if freed >= missing:
            break
        building = try_lock(lock_path(folder, found.key), make=True)
        if building is None:
            continue
        with building:
            aside = put_aside(found)
            if aside is None:
                continue
            last = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.used))
            logger.info("%s (%s, last used %s) makes way", found.path, size_text(found.bytes), last)
            aside.remove()
            drop_lock(folder, found.key, building)
        freed += found.bytes
    return freed


def builder_of(folder: str, key: str) -> int | None:
    """The id of the process that builds a store, as far as it is known."""
    try:
        with open(lock_path(folder, key), "rb") as file:
            return int(file.read(_OWNER_BYTES).split()[0])
    except (OSError, ValueError, IndexError):
        return None


def write_owner(lock: Lock) -> None:
    """Note which process builds a store."""
    os.pwrite(lock.fd, f"{os.getpid()}".ljust(_OWNER_BYTES).encode(), 0)


def size_text(size: int) -> str:
    """Bytes for people.

    Example:
        >>> size_text(999), size_text(3 << 29)
        ('999 B', '1.5 GiB')
    """
    if size < 1024:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, 5)
    return f"{size / 1024**power:.1f} {' KMGTP'[power]}iB"


def _no_room(folder: str, use: _Use, wanted: int, max_bytes: int) -> CacheError:
    idle = sum(found.bytes for found in use.stores if is_idle(found))
    free, kept = _disk(folder)
    return CacheError(
        f"a store needs {size_text(wanted)} beside the {size_text(use.own)} that it has; the cache may take "
        f"{size_text(max_bytes)}, of which other stores have {size_text(use.others)} "
        f"({size_text(idle)} not in use), and its disk has {size_text(max(free, 0))} free, of which "
        f"{size_text(kept)} stay free: raise RLIO_CACHE_BYTES, let RLIO_CACHE be a folder of a larger disk, "
        "end processes that read or build other stores, or do without a cache (cache='none')",
        uri=folder,
    )
