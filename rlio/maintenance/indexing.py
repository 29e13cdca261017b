"""Keeping the index of sealed writers: what readers may be told by it, and when they may not.

Whoever changes the folders of writers says so first (`Changes`), and makes a new index when it is done
(`refresh_index`): see `rlio.storage.sealed_index`, and docs/design/sealed-index.md for why that is enough.

Example:
    >>> storage = Storage.open("memory://indexing-example")
    >>> changes = Changes(storage, ["w00000-0a1b2c3d"], list_shards(storage))
    >>> changes.announce()
    >>> refresh_index(storage, finished=changes.nonces, begin=True) is None  # There is too little to tell.
    True
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from typing import Final

from rlio.errors import CorruptData, DataNotFound
from rlio.storage.filesystem import Storage
from rlio.storage.listing import Listing, Segment, ShardRef, list_shards
from rlio.storage.names import sealed_name, trim_name
from rlio.storage.sealed_index import (
    PAGE,
    StoredIndex,
    encode_index,
    list_index,
    load_index,
    place_of,
    put_change,
)

__all__ = ["LEAST_AGE", "Changes", "indexed_names", "refresh_index"]

logger = logging.getLogger("rlio")

#: Seconds after which nobody changes anything any more on the word of an announcement, nor stores an index of
#: what was listed before it: several times `_FRESH`, and what a put takes at most.
LEAST_AGE: Final = 3600.0
_FRESH: Final = 600.0
_MAX_GENERATION: Final = 10**8 - 1


def _seconds() -> float:
    """Seconds, also those in which this machine slept: others did not."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux; elsewhere, what there is.
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Changes:
    """Announces that writers are about to be changed; see `rlio.storage.sealed_index.put_change`.

    Args:
        storage: The data set's root.
        writers: All that may be changed.
        listing: What the changes follow from. Where it has few names, nothing is announced as long as there
            is no index: nobody makes one of so few.
        clock: Seconds, of which only differences count.
    """

    def __init__(
        self,
        storage: Storage,
        writers: Iterable[str],
        listing: Listing,
        *,
        clock: Callable[[], float] = _seconds,
    ) -> None:
        self._storage = storage
        self._writers = sorted(writers)
        names = sum(map(len, listing.shards.values())) + len(listing.sealed) + len(listing.trimmed)
        self._is_small = names < PAGE // 2
        self._clock = clock
        self._announced: float | None = None
        #: Of the announcements so far.
        self.nonces: list[str] = []

    def announce(self) -> None:
        """Call it before each change: it is announced, and once more after a while.

        Raises:
            PublishError: It could not be stored: change nothing.
        """
        now = self._clock()
        if self._is_small and not list_index(self._storage).indexes:
            return
        if self._announced is None or now - self._announced > _FRESH:
            self.nonces.append(put_change(self._storage, self._writers))
            self._announced = now


def refresh_index(
    storage: Storage,
    *,
    finished: Collection[str] = (),
    begin: bool = False,
    clock: Callable[[], float] = _seconds,
) -> str | None:
    """Store an index of all that is sealed now.

    Args:
        storage: The data set's root.
        finished: Nonces of announced changes that were made, or never will be.
        begin: Whether to make the first index, where names are many enough for one; else it is only replaced.
        clock: Seconds, of which only differences count.

    Returns:
        Its URI; None where there is nothing to tell, or the newest one says so already.

    Raises:
        PublishError: It could not be stored.
    """
    begun = clock()
    folder, place = list_index(storage), place_of(storage)
    if place is None or not (folder.indexes or begin):
        return None
    newest = folder.newest(place)
    # Listed after the changes: it has seen all of them.
    settled = {*finished, *_settled_by(storage, newest)} & folder.changes.keys()
    listing = list_shards(storage)
    writers = indexed_names(listing)
    if not folder.indexes and sum(map(len, writers.values())) < PAGE:
        return None
    if clock() - begun > _FRESH:
        logger.warning("no index of %s: listing it took too long for it to be true still", storage.uri)
        return None
    latest = folder.latest()
    generation = 1 + (0 if latest is None else latest.generation)
    if latest is not None and generation > _MAX_GENERATION:
        logger.warning(
            "no index of %s: no number is left after that of %s, which is not ours; remove it",
            storage.uri,
            latest.object.path,
        )
        return None
    stored, data = encode_index(writers, settled=settled, generation=generation, place=place)
    if newest is not None and newest.object[1:] == stored.object[1:]:  # Size and CRC: it says the same.
        return None
    storage.put(stored.object.path, data)
    logger.info("indexed %d sealed writers of %s", len(writers), storage.uri)
    # The last one stays: somebody may be about to read it.
    for index in [index for index in folder.indexes if index.place == place][1:]:
        storage.remove(index.object.path)
    return storage.uri_of(stored.object.path)


def indexed_names(listing: Listing) -> dict[str, list[str]]:
    """Writer id -> the names in its folder that an index gives, of the writers that it can tell of."""
    doubtful = {path.split("/")[1] for path, _ in listing.rejected if path.count("/") == 2}
    found = {}
    for writer, rows in sorted(listing.sealed.items()):
        segments = None if writer in doubtful else _segments(listing, writer, rows)
        if segments is not None:
            names = [segment.ref.path.rpartition("/")[2] for segment in segments]
            trimmed = [trim_name(listing.trimmed[writer])] if writer in listing.trimmed else []
            found[writer] = [*names, sealed_name(rows), *trimmed]
    return found


def _segments(listing: Listing, writer: str, sealed: int) -> list[Segment] | None:
    """What serves a sealed writer's rows; None where readers could be told more by a whole listing."""
    segments, holes = listing.cover(writer)
    refs = listing.shards.get(writer, [])
    trimmed = listing.trimmed.get(writer, 0)
    if holes or (segments and segments[-1].end != sealed):
        return None
    live = {segment.ref for segment in segments}
    starts = [segment.ref.name.first for segment in segments]
    hidden = [ref for ref in refs if ref not in live and ref.name.end > trimmed]
    return segments if all(_is_within_one(ref, segments, starts) for ref in hidden) else None


def _is_within_one(ref: ShardRef, segments: list[Segment], starts: list[int]) -> bool:
    """Whether one shard has all rows of a covered one: wherever a reader begins, it takes the larger one."""
    index = bisect_right(starts, ref.name.first) - 1
    return index >= 0 and segments[index].ref.name.end >= ref.name.end


def _settled_by(storage: Storage, index: StoredIndex | None) -> frozenset[str]:
    if index is None:
        return frozenset()
    try:
        return load_index(storage, index.object).settled
    except (CorruptData, DataNotFound) as error:
        logger.warning("an index is replaced that cannot be read: %s", error)
        return frozenset()
