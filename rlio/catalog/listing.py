"""Lists the committed shards: the listing is the manifest.

A shard is a range of one writer's rows. Ranges may repeat and overlap (compaction, retries). A reader moves a
cursor over them, and so gets every row exactly once, with any set of shards. Each attempt at a part of a job
is a writer. Of several attempts at one part, the first sealed one is taken (docs/design/attempts.md).

Example:
    >>> def shard(first, rows):
    ...     name = ShardName(first=first, rows=rows, size=1, crc32=0, footer_crc32=0)
    ...     return ShardRef("w", name, f"data/w/{name.format()}")
    >>> shards = [shard(0, 10), shard(10, 5), shard(0, 12), shard(20, 5)]
    >>> segments, holes = cover_rows(shards)
    >>> [(part.ref.name.first, part.skip, part.rows) for part in segments]
    [(0, 0, 12), (10, 2, 3), (20, 0, 5)]
    >>> holes
    [range(15, 20)]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from rlio.catalog.names import (
    DATA_DIR,
    ShardName,
    is_writer_id,
    parse_sealed,
    parse_trim,
    part_of,
    writer_dir,
)
from rlio.errors import CorruptData
from rlio.storage.filesystem import Storage

__all__ = [
    "Coverage",
    "HoleCheck",
    "Listing",
    "PassedOver",
    "Rejected",
    "Segment",
    "SegmentKey",
    "ShardRef",
    "cover_rows",
    "list_settled",
    "list_shards",
    "list_with_times",
    "list_writer",
    "load_shard",
]


@dataclass(frozen=True, kw_only=True)
class HoleCheck:
    """When to believe a hole: a listing of a growing data set is not a snapshot, and may miss stored rows.

    Attributes:
        listings: Number of listings that must all lack the rows.
        seconds: Time between two listings. For stores that list page by page the next listing is right; the
            wait is for stores that show a put with a delay.
        sleep: Waits for that many seconds.
    """

    listings: int = 3
    seconds: float = 0.1
    sleep: Callable[[float], object] = time.sleep


#: The rule of this process; tests shorten it.
HOLE_CHECK = HoleCheck()


class SegmentKey(NamedTuple):
    """Identifies the content of a segment.

    Attributes:
        path: Names the file and its content: it changes if the content does.
        skip: Number of rows at its start that are not live.
        rows: Number of live rows.
    """

    path: str
    skip: int
    rows: int


class ShardRef(NamedTuple):
    """A stored shard: its writer, the facts that its name certifies, and its path below the root.

    The path is kept because another tool may have written the same numbers with another padding.
    """

    writer: str
    name: ShardName
    path: str


class Segment(NamedTuple):
    """The served part of a shard: ``rows`` rows from its row ``skip`` on. A `StoredSegment`."""

    ref: ShardRef
    skip: int
    rows: int

    @property
    def key(self) -> SegmentKey:
        """Identifies the rows: the name of a shard holds their number, their size and their CRCs."""
        return SegmentKey(self.ref.path, self.skip, self.rows)

    @property
    def path(self) -> str:
        """The shard's path below the root."""
        return self.ref.path

    @property
    def writer(self) -> str:
        """The shard's writer."""
        return self.ref.writer

    @property
    def first(self) -> int:
        """Row number, within the writer, of the first served row."""
        return self.ref.name.first + self.skip

    @property
    def end(self) -> int:
        """The row after the last served one."""
        return self.first + self.rows


class Rejected(NamedTuple):
    """An object in the data folder that is not served, and why."""

    path: str
    reason: str


class Coverage(NamedTuple):
    """The rows of one writer: the segments that serve them, and the missing ranges."""

    segments: list[Segment]
    holes: list[range]


@dataclass(frozen=True)
class PassedOver:
    """An attempt at a part of a job whose rows are not served: it is unsealed, or another one is taken.

    Attributes:
        shards: Its shards, by first row.
        rejected: Its objects that are neither shards nor markers, or have another size than in their name.
        sealed: Its rows, if it is closed for good: a snapshot or a follower that started with it keeps it.
        trimmed: The row of its trim marker; None without one.
    """

    shards: list[ShardRef]
    rejected: list[Rejected]
    sealed: int | None
    trimmed: int | None


@dataclass(frozen=True)
class Listing:
    """The result of listing a data set.

    Attributes:
        shards: Writer id -> its shards, by first row; writers by id. Of several attempts at a part of a job,
            the taken one.
        rejected: Objects under the data folder that are neither shards nor markers, or have another size than
            in their name (being uploaded, or torn).
        sealed: Writer id -> rows, for writers that are closed for good.
        trimmed: Writer id -> row; the rows below it were removed on purpose. Also has each attempt at a part
            without a sealed attempt, with row 0, because rows may still come.
        passed_over: Writer id -> the attempts that are not taken.
    """

    shards: dict[str, list[ShardRef]] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    sealed: dict[str, int] = field(default_factory=dict)
    trimmed: dict[str, int] = field(default_factory=dict)
    passed_over: dict[str, PassedOver] = field(default_factory=dict)
    #: The listing with every attempt among the writers, taken or not; None: it is this one.
    _everything: Listing | None = field(default=None, compare=False, repr=False)

    @property
    def writers(self) -> list[str]:
        """Ids of the writers that have shards or are sealed, sorted."""
        return sorted(self.shards.keys() | self.sealed.keys())

    def cover(self, writer: str, *, start: int = 0, end: int | None = None) -> Coverage:
        """Return the rows of ``writer``, respecting its markers.

        Args:
            writer: The writer's id; one that is not listed has no rows.
            start: First wanted row. Rows below a trim marker are never wanted, although a late retry may have
                stored them again.
            end: Row after the last wanted one; None: all stored rows, and those that a seal promises.

        An attempt that is not taken still has its rows if it is sealed, because a reader that names it
        started with it before another one was sealed. An unsealed one has no rows.
        """
        passed = self.passed_over.get(writer)
        if passed is None:
            refs, sealed = self.shards.get(writer, []), self.sealed.get(writer)
        else:
            refs, sealed = [] if passed.sealed is None else passed.shards, passed.sealed
        return cover_rows(refs, trim=max(start, self.trimmed_below(writer)), sealed=sealed, end=end)

    def trimmed_below(self, writer: str) -> int:
        """Return the row below which rows of ``writer`` are trimmed, also for an attempt not taken."""
        passed = self.passed_over.get(writer)
        return (self.trimmed.get(writer) if passed is None else passed.trimmed) or 0

    def torn(self) -> dict[str, list[tuple[Rejected, ShardName]]]:
        """Return writer id -> objects that have a name of its shards but another size."""
        found: dict[str, list[tuple[Rejected, ShardName]]] = {}
        for rejected in self.rejected:
            parts = rejected.path.split("/")
            if len(parts) == 3 and is_writer_id(parts[1]) and (name := ShardName.parse(parts[2])) is not None:
                found.setdefault(parts[1], []).append((rejected, name))
        return found

    def joined(self, later: Listing) -> Listing:
        """Return the union of both listings. A shard never changes, so one that was seen once was stored."""
        one, other = self._everything or self, later._everything or later
        shards = {}
        for writer in sorted(one.shards.keys() | other.shards.keys()):
            both = {*one.shards.get(writer, []), *other.shards.get(writer, [])}
            shards[writer] = sorted(both, key=_order)
        return Listing(
            shards=shards,
            rejected=other.rejected,
            sealed=_larger(one.sealed, other.sealed),
            trimmed=_larger(one.trimmed, other.trimmed),
        )._chosen()

    def staying_with(self, begun: Collection[str]) -> Listing:
        """Return the listing for a reader that has started some writers: keeps their attempts as taken.

        Args:
            begun: Ids of writers; ids that are not of attempts do not matter.
        """
        kept = {part: writer for writer in begun if (part := part_of(writer)) is not None}
        return (self._everything or self)._chosen(kept) if kept else self

    def _chosen(self, kept: Mapping[str, str] = MappingProxyType({})) -> Listing:
        """Choose one attempt of each part in this listing, which has every attempt among its writers.

        Takes the first sealed one: among the sealed attempts, the one with the smallest id.

        Args:
            kept: Part -> the attempt to take for it, even if others exist.
        """
        torn: dict[str, list[Rejected]] = {}
        for rejected in self.rejected:
            torn.setdefault(_writer_of(rejected.path.rpartition("/")[0]) or "", []).append(rejected)
        # Other files in a folder (notes of a file browser) are not a sign of an attempt.
        begun = {writer for writer, found in torn.items() if any(map(_is_shard, found))}
        known = self.shards.keys() | self.sealed.keys() | self.trimmed.keys() | begun
        attempts: dict[str, list[str]] = {}
        for writer in sorted(writer for writer in known if "~" in writer):
            attempts.setdefault(part_of(writer) or "", []).append(writer)
        if not attempts:
            return self
        found = Listing({**self.shards}, [], {**self.sealed}, {**self.trimmed}, _everything=self)
        for part, writers in attempts.items():
            taken = kept.get(part) or next((writer for writer in writers if writer in self.sealed), None)
            for writer in writers:
                if writer == taken and writer in self.sealed:
                    continue
                found.passed_over[writer] = PassedOver(
                    shards=found.shards.pop(writer, []),
                    rejected=torn.get(writer, []),
                    sealed=found.sealed.pop(writer, None),
                    trimmed=found.trimmed.pop(writer, None),
                )
                if taken is None or writer == taken:
                    found.trimmed[writer] = 0
        passed = {rejected for over in found.passed_over.values() for rejected in over.rejected}
        found.rejected.extend(rejected for rejected in self.rejected if rejected not in passed)
        return found


# Equal rows take the fewest bytes: 65,536 of them take about 500. A name that claims more could make readers
# walk missing rows for years.
_ROWS_PER_BYTE = 1000
_FREE_ROWS = 1 << 24


def list_shards(storage: Storage, *, limit: int | None = None) -> Listing:
    """List the data set at ``storage`` in one pass, without opening an object.

    A listing of a growing data set is not a snapshot: it may have a later shard but not an earlier one. List
    again before you believe a hole.

    Raises:
        UnsafeData: The data set has more than ``limit`` names.
    """
    return _listing_of(storage.list(DATA_DIR, limit=limit))


def list_with_times(storage: Storage) -> tuple[Listing, dict[str, float | None]]:
    """`list_shards`, and path -> when each object was stored; see `Storage.list_with_times`.

    Raises:
        UnsafeData: There are more names than a listing may have.
    """
    entries, times = storage.list_with_times(DATA_DIR)
    return _listing_of(entries), times


def list_writer(storage: Storage, writer: str) -> Listing:
    """List the folder of one writer: one request, however many other writers exist."""
    return _listing_of(storage.list(writer_dir(writer)))


def _listing_of(entries: Iterable[tuple[str, int | None]]) -> Listing:
    """Build the listing from the names and sizes of objects.

    Args:
        entries: Path and bytes of each, sorted by path.
    """
    listing = Listing()
    # The entries of one folder are consecutive, except those of its subfolders.
    folder: str = ""
    writer: str | None = None
    refs: list[ShardRef] = []
    for path, size in entries:
        parent, _, text = path.rpartition("/")
        if parent != folder:
            folder, writer = parent, _writer_of(parent)
            refs = []
        if writer is None:
            listing.rejected.append(Rejected(path, f"not in a writer's folder ({DATA_DIR}/<writer>/)"))
            continue
        name = ShardName.parse(text)
        if name is None:
            _take_marker(listing, writer, text, path)
        elif size is not None and size != name.size:
            reason = f"has {size} bytes and its name says {name.size}: torn, or not uploaded yet"
            listing.rejected.append(Rejected(path, reason))
        elif name.rows > _ROWS_PER_BYTE * name.size + _FREE_ROWS:
            reason = f"claims {name.rows} rows in {name.size} bytes, which no shard has"
            listing.rejected.append(Rejected(path, reason))
        else:
            if not refs:
                refs = listing.shards.setdefault(writer, refs)
            refs.append(_new(ShardRef, (writer, name, path)))
    for refs in listing.shards.values():
        refs.sort(key=_first_row)  # Stable: shards of one first row stay sorted by path.
    return listing._chosen()


def _is_shard(rejected: Rejected) -> bool:
    return ShardName.parse(rejected.path.rpartition("/")[2]) is not None


def _writer_of(folder: str) -> str | None:
    """Return the writer whose shards are in ``folder``, a path below the root; None if it has no writer."""
    parts = folder.split("/")
    return parts[1] if len(parts) == 2 and is_writer_id(parts[1]) else None


def list_settled(storage: Storage, *, lacks: Callable[[Listing], bool]) -> Listing:
    """List until nothing is lacking, or until as many listings as `HOLE_CHECK` says together lack it.

    Args:
        storage: The data set's root.
        lacks: Whether rows are missing in a listing.

    Returns:
        The union of the listings: a row that is missing here was in none of them.
    """
    found = list_shards(storage)
    for _ in range(HOLE_CHECK.listings - 1):
        if not lacks(found):
            break
        HOLE_CHECK.sleep(HOLE_CHECK.seconds)
        found = found.joined(list_shards(storage))
    return found


def _larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in sorted(one.keys() | other.keys())}


def _take_marker(listing: Listing, writer: str, text: str, path: str) -> None:
    rows, row = parse_sealed(text), parse_trim(text)
    if rows is not None:
        listing.sealed[writer] = max(rows, listing.sealed.get(writer, 0))
    elif row is not None:
        listing.trimmed[writer] = max(row, listing.trimmed.get(writer, 0))
    else:
        listing.rejected.append(Rejected(path, "the name is not that of a shard or a marker"))


_first_row = attrgetter("name.first")
# Creates a NamedTuple directly; the class's own constructor calls this too, in twice the time.
_new = tuple.__new__


def _order(ref: ShardRef) -> tuple[int, str]:
    return ref.name.first, ref.path


def cover_rows(
    refs: Iterable[ShardRef], *, trim: int = 0, sealed: int | None = None, end: int | None = None
) -> Coverage:
    """Choose the shards that serve one writer's rows, each row exactly once.

    The rule for the next row c: of the shards with first <= c < first + rows, take the one with the largest
    end (of equal ones, the smallest path), from its row c - first on. Then c is its end. Larger shards win: a
    compacted shard is used at once, and the shards that it covers may be removed.

    Args:
        refs: Shards of one writer, in any order.
        trim: First wanted row; rows below it are not missed.
        sealed: Rows that the writer had when it was closed for good; None while it may grow.
        end: Row after the last wanted one. All rows up to it are expected, regardless of ``sealed``.

    Returns:
        Segments in row order, and the ranges of rows from ``trim`` on that no shard holds although a later
        row is stored or was promised.
    """
    segments: list[Segment] = []
    holes: list[range] = []
    cursor = trim
    waiting = sorted(refs, key=_first_row)
    # The best shard that starts at or before the cursor. Its end, reach, shows whether it goes past the
    # cursor.
    best: ShardRef | None = None
    reach = best_first = i = 0
    count = len(waiting)
    while end is None or cursor < end:
        while i < count:
            ref = waiting[i]
            first, rows = ref.name[:2]
            if first > cursor:
                break
            ref_end = first + rows
            if best is None or ref_end > reach or (ref_end == reach and ref.path < best.path):
                best, reach, best_first = ref, ref_end, first
            i += 1
        if best is not None and reach > cursor:
            stop = reach if end is None else min(reach, end)
            segments.append(_new(Segment, (best, cursor - best_first, stop - cursor)))
        elif i < count:
            stop = waiting[i].name.first if end is None else min(waiting[i].name.first, end)
            holes.append(range(cursor, stop))
        else:
            break
        cursor = stop
    promised = sealed if end is None else end
    if promised is not None and promised > cursor:
        holes.append(range(cursor, promised))
    return Coverage(segments, holes)


def load_shard(storage: Storage, ref: ShardRef) -> bytes:
    """Read a whole shard. Checks its size; the decoder must check its CRCs before anything else.

    Raises:
        CorruptData: It has more or fewer bytes than its name says.
        DataNotFound: It is gone (covered by a larger one and collected): list again.
    """
    # One byte more than expected, to detect an object that was replaced by a larger one without reading it
    # whole.
    data = storage.read_range(ref.path, 0, ref.name.size + 1)
    if len(data) != ref.name.size:
        found = f"more than {ref.name.size}" if len(data) > ref.name.size else str(len(data))
        raise CorruptData(
            f"the shard has {found} bytes and its name says {ref.name.size}: it is torn or was changed; "
            "copy it again from its source",
            uri=storage.uri_of(ref.path),
        )
    return data
