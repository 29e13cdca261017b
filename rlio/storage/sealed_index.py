"""The index of sealed writers: a part of a listing that was stored, so that openers list what still grows.

A writer that is sealed changes only where somebody maintains the data set. So `compact` leaves under
``_index/`` the names of the shards that serve each sealed writer, with its markers, and whoever opens the
data set lists the other writers alone. The index is advice: without it, or where it does not fit, everything
is listed, and the same rows are served. docs/design/sealed-index.md says why it cannot mislead::

    <root>/_index/<generation>-<place>-<bytes>-<crc32>.json.zst      an index
    <root>/_index/change-<nonce>-<bytes>-<crc32>.json.zst            writers that somebody is about to change

Example:
    >>> storage = Storage.open("memory://sealed-index-example")
    >>> change = put_change(storage, ["w00000-0a1b2c3d"])
    >>> sorted(list_index(storage).changes) == [change]
    True
    >>> list_indexed(storage) is None
    True
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import zstandard

from rlio.errors import CorruptData, DataNotFound, StoreRefused, excerpt
from rlio.schemas.zstd_frames import inflate
from rlio.storage.endpoint import endpoint_of
from rlio.storage.filesystem import Storage
from rlio.storage.listing import Listing, Patience, list_settled, listing_of
from rlio.storage.names import DATA_DIR, HEADER, is_writer_id
from rlio.storage.parallel import each

__all__ = [
    "INDEX_DIR",
    "IndexFolder",
    "SealedIndex",
    "StoredIndex",
    "StoredObject",
    "distrust_index",
    "encode_index",
    "list_index",
    "list_indexed",
    "list_to_read",
    "load_change",
    "load_index",
    "parse_index_name",
    "place_of",
    "put_change",
]

logger = logging.getLogger("rlio")

INDEX_DIR: Final = "_index"

# ASCII digits only: \d would also match other scripts' digits.
_INDEX = re.compile(r"([0-9]{8})-([0-9a-f]{16})-([0-9]{1,12})-([0-9a-f]{8})\.json\.zst")
_CHANGE = re.compile(r"change-([0-9a-f]{16})-([0-9]{1,12})-([0-9a-f]{8})\.json\.zst")
_NONCE = re.compile(r"[0-9a-f]{16}")

#: Names that a store gives in one answer: a data set of fewer is listed by one request without an index.
PAGE: Final = 1000
# A folder costs a request, sixteen of which are under way at a time; a page of a listing costs one too, and
# waits for the page before. Measured in docs/scale.md.
_FOLDERS_A_PAGE: Final = 8
# Bytes of a name in an index: the longest shard name has 86 and its JSON three more.
_NAME_BYTES: Final = 128
# Changes that are looked into; where there are more, everything is listed.
_MAX_CHANGES: Final = 64
_LEVEL: Final = 3


class StoredObject(NamedTuple):
    """An object under `INDEX_DIR`, and what its name certifies."""

    path: str
    size: int
    crc32: int


class StoredIndex(NamedTuple):
    """An index that is stored.

    Attributes:
        generation: Later ones are larger; of equal ones any is right.
        place: Where it was made; see `place_of`.
        object: Where it is.
    """

    generation: int
    place: str
    object: StoredObject


@dataclass(frozen=True)
class IndexFolder:
    """What is under `INDEX_DIR`.

    Attributes:
        indexes: Indexes, the newest first.
        changes: Nonce -> what was announced; torn ones too, since what they announced may have been done.
        torn: Paths of objects whose size is not that of their name.
    """

    indexes: list[StoredIndex] = field(default_factory=list)
    changes: dict[str, StoredObject] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)

    def newest(self, place: str) -> StoredIndex | None:
        """The index to use at a place; None also where a later one is torn, like one that is damaged."""
        found = max((index for index in self._with_torn() if index.place == place), default=None)
        return None if found is None or found.object.path in self.torn else found

    def latest(self) -> StoredIndex | None:
        """The index of the largest generation, of any place, torn or whole."""
        return max(self._with_torn(), default=None)

    def _with_torn(self) -> list[StoredIndex]:
        torn = map(parse_index_name, self.torn)
        return [*self.indexes, *(index for index in torn if isinstance(index, StoredIndex))]


@dataclass(frozen=True)
class SealedIndex:
    """An index, read.

    Attributes:
        listing: Sealed writers: the shards that serve their rows, and their markers.
        settled: Nonces of the announced changes that were finished before this was listed.
    """

    listing: Listing
    settled: frozenset[str]


class _Unreadable(OSError):
    """An object under `INDEX_DIR` is there, and the store does not give it."""


@dataclass
class _Memory:
    """What is known of a root, so that followers need not read again what does not change."""

    place: str | None = None
    index: tuple[str, SealedIndex] | None = None
    changes: dict[str, frozenset[str]] = field(default_factory=dict)
    distrusted: set[str] = field(default_factory=set)
    # What was listed came from another process, and a shard of it is gone: by which index is not known.
    is_wary: bool = False
    # Whether all that is there fits one page.
    is_small: bool = False


_MEMORIES: WeakKeyDictionary[Storage, _Memory] = WeakKeyDictionary()


def _memory_of(storage: Storage) -> _Memory:
    return _MEMORIES.setdefault(storage, _Memory())


# ---- openers ----


def list_to_read(
    storage: Storage, *, lacks: Callable[[Listing], bool], patience: Patience | None = None
) -> Listing:
    """`list_settled` for readers: the index may tell of sealed writers. No hole is believed on its word."""
    found = list_settled(storage, lacks=lacks, patience=patience, first=list_indexed)
    _memory_of(storage).is_small = _names_in(found) + len(found.rejected) < PAGE
    return found


def list_indexed(storage: Storage) -> Listing | None:
    """What `list_shards` gives, of which the index says what it knows, and the rest is listed.

    Left out are shards that others cover, where the index knows their writer, and what is not in the folder
    of a writer.

    Returns:
        None where no index fits, or using it is no cheaper: list everything.
    """
    memory = _memory_of(storage)
    if memory.is_small:
        return None
    try:
        found = _from_index(storage, memory)
    except DataNotFound as error:
        logger.info("listing everything, since an index was replaced meanwhile: %s", error)
        return None
    except (CorruptData, _Unreadable) as error:
        logger.warning("listing everything, since an index cannot be used: %s", error)
        return None
    # A whole listing refuses too many names.
    return None if found is None or _names_in(found) > storage.limits.listed_names else found


def distrust_index(storage: Storage) -> None:
    """Use none of the indexes that were used so far: a shard that was listed is gone.

    It may be gone for the best of reasons; listing everything tells.
    """
    memory = _memory_of(storage)
    if memory.index is None:
        memory.is_wary = True
    else:
        memory.distrusted.add(memory.index[0])


def _from_index(storage: Storage, memory: _Memory) -> Listing | None:
    is_wary, memory.is_wary = memory.is_wary, False  # Of what is there now, not of a later one.
    try:
        folder = list_index(storage)
    except StoreRefused as error:
        logger.info("listing everything, since %s must not be listed: %s", INDEX_DIR, error)
        return None
    if not folder.indexes or (place := _place(storage, memory)) is None:
        return None
    newest = folder.newest(place)
    if newest is not None and is_wary:
        memory.distrusted.add(newest.object.path)
    if newest is None or newest.object.path in memory.distrusted:
        return None
    try:
        index = _remembered_index(storage, newest, memory)
        changed = _changed(storage, folder, index, memory)
    except (CorruptData, _Unreadable):
        memory.distrusted.add(newest.object.path)  # A follower would read it, and say so, at every look.
        raise
    if changed is None:
        return None
    folders = storage.folders(DATA_DIR)
    known = _of_writers(index.listing, {writer for writer in folders if writer not in changed})
    others = [name for name in folders if name not in known.sealed and is_writer_id(name)]
    if storage.lists_flat and len(others) > _FOLDERS_A_PAGE * (1 + _names_in(known) // PAGE):
        return None
    lists = each(storage, lambda writer: storage.list(f"{DATA_DIR}/{writer}"), others)
    return listing_of((entry for entries in lists for entry in entries), known=known)


def _remembered_index(storage: Storage, stored: StoredIndex, memory: _Memory) -> SealedIndex:
    # Kept in one piece: another thread may look at the same root, and have seen another index.
    known = memory.index
    if known is None or known[0] != stored.object.path:
        known = memory.index = (stored.object.path, load_index(storage, stored.object))
    return known[1]


def _changed(
    storage: Storage, folder: IndexFolder, index: SealedIndex, memory: _Memory
) -> frozenset[str] | None:
    """Writers of which the index does not know what became of them; None: too many to tell."""
    open_changes = {nonce: each for nonce, each in folder.changes.items() if nonce not in index.settled}
    if len(open_changes) > _MAX_CHANGES:
        return None
    known = memory.changes
    memory.changes = found = {
        nonce: known[nonce] if nonce in known else load_change(storage, stored)
        for nonce, stored in open_changes.items()
    }
    return frozenset().union(*found.values())


def _of_writers(listing: Listing, writers: set[str]) -> Listing:
    """The part of a listing that is about some writers."""
    return Listing(
        {writer: refs for writer, refs in listing.shards.items() if writer in writers},
        [],
        {writer: rows for writer, rows in listing.sealed.items() if writer in writers},
        {writer: row for writer, row in listing.trimmed.items() if writer in writers},
    )


def _names_in(listing: Listing) -> int:
    return sum(map(len, listing.shards.values())) + len(listing.sealed) + len(listing.trimmed)


def _place(storage: Storage, memory: _Memory) -> str | None:
    if memory.place is None or storage.is_local:  # On a disk, another folder may have taken its place.
        memory.place = place_of(storage)
    return memory.place


# ---- what is stored ----


def list_index(storage: Storage) -> IndexFolder:
    """What is under `INDEX_DIR`; other names are passed over."""
    folder = IndexFolder()
    # Clients of object stores ask three times for a folder that is not there.
    if storage.lists_flat and INDEX_DIR not in storage.folders("", INDEX_DIR):
        return folder
    for path, size in storage.list(INDEX_DIR):
        parsed = parse_index_name(path)
        if parsed is None:
            continue
        stored = parsed.object if isinstance(parsed, StoredIndex) else parsed[1]
        is_torn = size is not None and size != stored.size
        if is_torn:
            folder.torn.append(path)
        if not isinstance(parsed, StoredIndex):
            folder.changes[parsed[0]] = stored
        elif not is_torn:
            folder.indexes.append(parsed)
    folder.indexes.sort(reverse=True)
    return folder


def parse_index_name(path: str) -> StoredIndex | tuple[str, StoredObject] | None:
    """What the path of an object says: an index, a change with its nonce, or None."""
    parent, _, name = path.rpartition("/")
    if parent != INDEX_DIR:
        return None
    if (match := _INDEX.fullmatch(name)) is not None:
        return StoredIndex(int(match[1]), match[2], StoredObject(path, int(match[3]), int(match[4], 16)))
    if (match := _CHANGE.fullmatch(name)) is not None:
        return match[1], StoredObject(path, int(match[2]), int(match[3], 16))
    return None


def place_of(storage: Storage) -> str | None:
    """16 hex digits that name where a data set is: those of a copy differ. None: there is none.

    Objects are copied one by one, so that an index in a copy may be older, or newer, than what it tells of.
    A copy that took the place of the original is told by when its header was stored, which is put once. On a
    local disk that is the time of change of its inode: no copy keeps it, while a number is soon given again.
    """
    if storage.is_local:
        try:
            folder = os.stat(os.path.join(storage.root, DATA_DIR))
            header = os.stat(os.path.join(storage.root, HEADER))
        except OSError:
            return None
        parts = [os.path.realpath(storage.root), f"{folder.st_ino} {header.st_ino} {header.st_ctime_ns}"]
    else:
        try:
            stored = storage.modified(HEADER)
        except DataNotFound:
            return None
        protocol = storage.fs.protocol
        name = protocol if isinstance(protocol, str) else protocol[0]
        # Whole seconds: some clients give no more.
        time = "" if stored is None else str(int(stored))
        parts = [f"{name}://{storage.root}", time, *endpoint_of(storage)]
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def encode_index(
    writers: Mapping[str, list[str]], *, settled: Iterable[str], generation: int, place: str
) -> tuple[StoredIndex, bytes]:
    """An index that is to be stored, and its bytes.

    Args:
        writers: Writer id -> the names in its folder.
        settled: Nonces of changes that were finished before the writers were listed.
        generation: Larger than those that are there, and below 10^8.
        place: From `place_of`.
    """
    data = _encode({"settled": sorted(settled), "writers": dict(sorted(writers.items()))})
    crc32 = zlib.crc32(data)
    path = f"{INDEX_DIR}/{generation:08d}-{place}-{len(data)}-{crc32:08x}.json.zst"
    return StoredIndex(generation, place, StoredObject(path, len(data), crc32)), data


def load_index(storage: Storage, stored: StoredObject) -> SealedIndex:
    """Read an index: its size and CRC first.

    Raises:
        CorruptData: It is damaged, or none.
        DataNotFound: It is gone: a newer one replaced it.
    """
    uri = storage.uri_of(stored.path)
    value = _decode(storage, stored)
    settled, writers = value.get("settled"), value.get("writers")
    if (
        not _is_texts(settled)
        or not all(_NONCE.fullmatch(nonce) for nonce in settled)
        or not isinstance(writers, dict)
        or not all(is_writer_id(writer) and _is_texts(names) for writer, names in writers.items())
    ):
        raise CorruptData("no index: expected 'settled' and 'writers', lists of texts", uri=uri)
    listing = listing_of(
        (f"{DATA_DIR}/{writer}/{name}", None) for writer, names in writers.items() for name in names
    )
    if listing.rejected or listing.sealed.keys() != writers.keys():
        what = listing.rejected[0].path if listing.rejected else "a writer without a seal"
        raise CorruptData(f"no index: it names {excerpt(what)}", uri=uri)
    return SealedIndex(listing, frozenset(settled))


def put_change(storage: Storage, writers: Iterable[str]) -> str:
    """Announce that ``writers`` are about to be changed; the nonce of the announcement.

    From then on nobody relies on what an index says of them, until one settles the change.

    Raises:
        PublishError: It could not be stored: change nothing.
    """
    nonce = secrets.token_hex(8)
    data = _encode({"writers": sorted(writers)})
    storage.put(f"{INDEX_DIR}/change-{nonce}-{len(data)}-{zlib.crc32(data):08x}.json.zst", data)
    return nonce


def load_change(storage: Storage, stored: StoredObject) -> frozenset[str]:
    """The writers that a change was announced of.

    Raises:
        CorruptData: It is damaged.
        DataNotFound: It is gone.
    """
    writers = _decode(storage, stored).get("writers")
    if not _is_texts(writers):
        raise CorruptData("no change: expected 'writers', a list of texts", uri=storage.uri_of(stored.path))
    return frozenset(writers)


def _encode(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(text)


def _decode(storage: Storage, stored: StoredObject) -> dict[str, Any]:
    """The object that a name certifies, parsed within the limits of a listing."""
    uri, limits = storage.uri_of(stored.path), storage.limits
    most = _NAME_BYTES * limits.listed_names
    if stored.size > most:
        raise CorruptData(f"it has {stored.size} bytes, and at most {most} are read", uri=uri)
    try:
        data = storage.read_range(stored.path, 0, stored.size + 1)
    except DataNotFound:
        raise
    except OSError as error:  # Whoever may list need not have the right to read.
        raise _Unreadable(f"{uri} cannot be read: {error!r}") from error
    if len(data) != stored.size or zlib.crc32(data) != stored.crc32:
        raise CorruptData("its bytes are not those that its name says", uri=uri)
    text = inflate(data, most=most, limits=limits)
    if text.count(b",") + text.count(b"[") + text.count(b"{") > 4 * limits.listed_names:
        raise CorruptData(f"it holds more than {limits.listed_names} names can be", uri=uri)
    try:
        value = json.loads(text.decode())
    # ValueError: no UTF-8, no JSON, or an integer of thousands of digits; RecursionError: nested too deep.
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"no JSON: {excerpt(str(error))}", uri=uri) from error
    if not isinstance(value, dict):
        raise CorruptData("no JSON object", uri=uri)
    return value


def _is_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
