"""Room in the folder of built stores: what is counted, what is promised, and which stores make way.

Who builds promises itself bytes before it writes them; the promise stands in the locked file of its key, so
that builders of several stores together keep the bound. Promises of the dead count for nothing: their locks
are free.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Final

from rlio.errors import CacheError
from rlio.replay.cache_files import ROOM, StoreFolder, lock_path, scan, store_path
from rlio.replay.locks import Lock, try_lock, wait_for_lock

__all__ = [
    "builder_of",
    "drop_lock",
    "is_idle",
    "make_room",
    "put_aside",
    "remove_abandoned",
    "size_text",
    "sweep",
    "write_promise",
]

logger = logging.getLogger("rlio")

#: Part of the disk that is never asked for.
_KEPT_FREE: Final = 0.05
_PROMISE_BYTES: Final = 64
_PATIENCE_SECONDS: Final = 600.0
_ATTEMPTS: Final = 3
_PAUSE_SECONDS: Final = 0.03


def make_room(folder: str, lock: Lock, key: str, wanted: int, max_bytes: int) -> None:
    """Promise the builder of a store ``wanted`` bytes beyond those that it has, for which others make way.

    Args:
        folder: Of the stores.
        lock: The builder's.
        key: Of its store.
        wanted: Bytes.
        max_bytes: That all stores together may take.

    Raises:
        CacheError: There is no such room, even without the stores that nobody reads; then none is removed.
    """
    with _room_lock(folder):
        sweep(folder)
        for _ in range(_ATTEMPTS):
            use = _Use.of(folder, key)
            missing = use.missing(folder, wanted, max_bytes)
            # Looked at before any is removed: what does not help is not done.
            idle = 0 if missing <= 0 else sum(found.bytes for found in use.stores if is_idle(found))
            if missing <= 0 or (idle >= missing and _evict(folder, use.stores, missing) >= missing):
                write_promise(lock, use.own + wanted)
                return
            # A process that is just being forked has the locks of the one that forks it for a moment.
            time.sleep(_PAUSE_SECONDS)
        raise _no_room(folder, _Use.of(folder, key), wanted, max_bytes)


def _room_lock(folder: str) -> Lock:
    """Held by whoever counts and promises: two builders never get the same room."""
    path = os.path.join(folder, ROOM)
    return wait_for_lock(
        lambda: try_lock(path, make=True),
        what=f"another process that makes room in {folder}",
        timeout=_PATIENCE_SECONDS,
    )


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
    """What the stores take.

    Attributes:
        own: Bytes of the builder that asks.
        others: Bytes of all others, promised ones included.
        promised: Those of them that are promised and not on the disk yet.
        stores: Those of others, of which nobody builds them, the least recently used first.
    """

    own: int
    others: int
    promised: int
    stores: list[StoreFolder]

    @classmethod
    def of(cls, folder: str, key: str) -> _Use:
        folders, locks = scan(folder)
        taken: dict[str, int] = dict.fromkeys(locks, 0)
        for found in folders:
            taken[found.key] = taken.get(found.key, 0) + found.bytes
        own = taken.pop(key, 0)
        promised = {other: _read_promise(folder, other) for other in taken}
        counted = {other: max(size, promised[other] or 0) for other, size in taken.items()}
        stores = [found for found in folders if found.kind == "store" and promised.get(found.key, 0) is None]
        stores.sort(key=lambda found: (found.used, found.key))
        total = sum(counted.values())
        return cls(own, total, total - sum(taken.values()), stores)

    def missing(self, folder: str, wanted: int, max_bytes: int) -> int:
        """Bytes that have to be freed."""
        over = self.own + self.others + wanted - max_bytes
        free, kept = _disk(folder)
        return max(over, wanted + self.promised - (free - kept))


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


def _read_promise(folder: str, key: str) -> int | None:
    """The bytes that the builder of a store has promised itself; None if nobody builds it."""
    path = lock_path(folder, key)
    try:
        lock = try_lock(path)
        if lock is not None:
            lock.release()
            return None
        with open(path, "rb") as file:
            return int(file.read(_PROMISE_BYTES).split()[1])
    except FileNotFoundError:
        return None
    except (ValueError, IndexError):
        return 0  # It has just been made.


def builder_of(folder: str, key: str) -> int | None:
    """The id of the process that builds a store, as far as it is known."""
    try:
        with open(lock_path(folder, key), "rb") as file:
            return int(file.read(_PROMISE_BYTES).split()[0])
    except (OSError, ValueError, IndexError):
        return None


def write_promise(lock: Lock, promised: int) -> None:
    """Note who builds a store, and how many bytes it may take in all."""
    os.pwrite(lock.fd, f"{os.getpid()} {promised}".ljust(_PROMISE_BYTES).encode(), 0)


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
        f"{size_text(max_bytes)}, of which other stores have or expect {size_text(use.others)} "
        f"({size_text(idle)} not in use), and its disk has {size_text(max(free, 0))} free, of which "
        f"{size_text(kept)} stay free: raise RLIO_CACHE_BYTES, let RLIO_CACHE be a folder of a larger disk, "
        "end processes that read or build other stores, or do without a cache (cache='none')",
        uri=folder,
    )
