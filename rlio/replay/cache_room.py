"""Room in the folder of built stores: what is counted, and which stores are evicted.

The bound is approximate. A builder counts the files in the folder, and counts them again as it writes. It
does not count what other builders are about to write, nor evicted stores that readers still have mapped:
their disk space is free once these readers close them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Final

from filelock import Timeout

from rlio.errors import CacheError
from rlio.replay.cache_files import StoreFolder, builder_lock, remove, remove_store, scan

__all__ = ["make_room", "remove_abandoned", "size_text"]

logger = logging.getLogger("rlio")

#: Part of the disk that is never asked for.
_KEPT_FREE: Final = 0.05


def make_room(folder: str, key: str, wanted: int, max_bytes: int) -> None:
    """Evict stores until there is room for ``wanted`` bytes more of a store, the least recently used first.

    Args:
        folder: Of the stores.
        key: Of the store that is built; the caller has its lock.
        wanted: Bytes beyond those that it has.
        max_bytes: That all stores together may take.

    Raises:
        CacheError: There is no such room, even without the other stores; then none is removed.
    """
    _sweep(folder)
    use = _Use.of(folder, key)
    missing = use.missing(folder, wanted, max_bytes)
    # Looked at before any is removed: what does not help is not done.
    if missing > sum(found.bytes for found in use.stores):
        raise _no_room(folder, use, wanted, max_bytes)
    for found in use.stores:
        if missing > 0 and _evict(folder, found):
            missing -= found.bytes
    if missing > 0:  # Other processes are extending stores.
        raise _no_room(folder, _Use.of(folder, key), wanted, max_bytes)


def _evict(folder: str, found: StoreFolder) -> bool:
    """Remove a store, unless it is being extended; whether it was removed."""
    try:
        with builder_lock(folder, found.key).acquire(blocking=False):
            remove_store(folder, found.key)
    except Timeout:
        return False
    last = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.used))
    logger.info("%s (%s, last used %s) makes way", found.path, size_text(found.bytes), last)
    return True


def _sweep(folder: str) -> None:
    """Remove what dead processes have left: stores half removed, and stores half built."""
    for found in scan(folder):
        if found.kind == "old":
            remove(found.path)
        elif found.kind == "new":
            with contextlib.suppress(Timeout), builder_lock(folder, found.key).acquire(blocking=False):
                remove(found.path)


def remove_abandoned(folder: str, key: str) -> None:
    """Remove the half built stores of a key, whose lock the caller has: their builders are dead."""
    for found in scan(folder, key):
        if found.kind == "new":
            remove(found.path)


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
        folders = scan(folder)
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
    free, kept = _disk(folder)
    return CacheError(
        f"a store needs {size_text(wanted)} beside the {size_text(use.own)} that it has; the cache may take "
        f"{size_text(max_bytes)}, of which other stores have {size_text(use.others)}, and its disk has "
        f"{size_text(max(free, 0))} free, of which {size_text(kept)} stay free: raise RLIO_CACHE_BYTES, set "
        "RLIO_CACHE to a folder of a larger disk, end processes that build other stores, or use no cache "
        "(cache='none')",
        uri=folder,
    )
