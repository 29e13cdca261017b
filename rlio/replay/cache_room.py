"""Room in the folder of built stores: what counts, and which stores to evict.

The limit is approximate. A builder counts the files in the folder, and counts them again as it writes. It
counts neither what other builders are about to write, nor evicted stores that readers still have mapped. The
disk space of those is freed when the readers close them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Final

from filelock import Timeout

from rlio.errors import CacheError
from rlio.replay.cache_files import StoreFolder, builder_lock, remove, remove_store, scan

__all__ = ["make_room", "size_text", "sweep"]

logger: logging.Logger = logging.getLogger("rlio")

#: Part of the disk that always stays free.
_KEPT_FREE: Final = 0.05


def make_room(folder: str, key: str, wanted: int, max_bytes: int) -> None:
    """Evict the least recently used stores until ``wanted`` more bytes fit.

    Args:
        folder: Folder of the stores.
        key: Key of the store being built; the caller holds its lock.
        wanted: Bytes beyond those that the store has.
        max_bytes: Limit on the bytes of all stores together.

    Raises:
        CacheError: The bytes do not fit. If that is clear in advance, no store is removed. Stores that are
            being extended, or that a process has mapped, show only during eviction that they free nothing.
    """
    sweep(folder)
    found = scan(folder)
    others = sorted(
        (each for each in found if each.kind == "store" and each.key != key),
        key=lambda each: (each.used, each.key),
    )
    taken, (free, kept) = sum(each.bytes for each in found), _disk(folder)
    over, missing = taken + wanted - max_bytes, wanted - (free - kept)
    # Check before evicting: evict nothing if it would not suffice.
    if max(over, missing) <= sum(each.bytes for each in others):
        for each in others:
            if max(over, missing) > 0 and _evict(folder, each):
                over -= each.bytes
                # Measure again: the files of a store that a process has mapped still occupy the disk.
                free, kept = _disk(folder)
                missing = wanted - (free - kept)
    if max(over, missing) > 0:
        raise CacheError(
            f"a store needs {size_text(wanted)} more; the cache may take {size_text(max_bytes)} and has "
            f"{size_text(taken)}, {size_text(sum(each.bytes for each in others))} of it in other stores; its "
            f"disk has {size_text(max(free, 0))} free, of which {size_text(kept)} stay free: raise "
            "RLIO_CACHE_BYTES, set RLIO_CACHE to a folder of a larger disk, end processes that build other "
            "stores, or use no cache (cache='none')",
            uri=folder,
        )


def _evict(folder: str, found: StoreFolder) -> bool:
    """Remove a store unless it is being extended; returns whether it was removed."""
    try:
        with builder_lock(folder, found.key).acquire(blocking=False):
            remove_store(folder, found.key)
    except Timeout:
        return False
    last = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.used))
    logger.info("evicting %s (%s, last used %s)", found.path, size_text(found.bytes), last)
    return True


def sweep(folder: str, *, held: str | None = None) -> None:
    """Remove what dead processes left: stores half removed and stores half built.

    Args:
        folder: Folder of the stores.
        held: A key whose lock the caller holds, before it builds.
    """
    for found in scan(folder):
        if found.kind == "old" or (found.kind == "new" and found.key == held):
            remove(found.path)
        elif found.kind == "new":
            with contextlib.suppress(Timeout), builder_lock(folder, found.key).acquire(blocking=False):
                remove(found.path)


def _disk(folder: str) -> tuple[int, int]:
    """Bytes that are free for this user, and the part of them that must stay free."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize, int(_KEPT_FREE * status.f_blocks * status.f_frsize)


def size_text(size: int) -> str:
    """A number of bytes as readable text.

    Example:
        >>> size_text(999), size_text(3 << 29)
        ('999 B', '1.5 GiB')
    """
    if size < 1024:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, 5)
    return f"{size / 1024**power:.1f} {' KMGTP'[power]}iB"
