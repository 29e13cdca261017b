"""`DatasetSnapshot`: the live rows of a root as of one listing. Users have it as a `rlio.Dataset`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

from rlio.catalog import listing as listings
from rlio.catalog.listing import Coverage, Listing, Segment, list_settled
from rlio.catalog.names import MAX_ROW, SCHEMA_DIR, is_writer_id
from rlio.catalog.schema_files import read_schemas
from rlio.errors import (
    CorruptData,
    DataNotFound,
    HoleError,
    OptionError,
    excerpt,
)
from rlio.log.spool import Spool, find_logs, spool_of
from rlio.schemas.leaves import Leaf
from rlio.schemas.schema import Schema, canonical_json
from rlio.schemas.shown import leaf_table
from rlio.schemas.streams import Streams
from rlio.source.json_shard import schema_lookup
from rlio.source.live_streams import exact_streams, live_streams
from rlio.source.shards import OpenShard, open_shard, ranges_of
from rlio.source.source import EpisodeInfo, HoleCheck, OpenSegment, Source, StoredSegment
from rlio.source.videos import Videos
from rlio.storage.filesystem import Storage
from rlio.storage.parallel import Plan, Range
from rlio.support.clock import utc_time
from rlio.support.described import Described
from rlio.support.forks import cached_property
from rlio.support.html import Html
from rlio.support.words import counted

__all__ = ["DatasetSnapshot", "Snapshot", "rows_waiting"]

logger: logging.Logger = logging.getLogger("rlio")

#: Writer id -> rows, or [first row, rows] if the rows below the first were already trimmed.
Snapshot: TypeAlias = Mapping[str, int | list[int]]


class DatasetSnapshot(Described, Source):
    """The listed shards of one root: which rows are live, which shard holds them, and their columns.

    The source of rlio's own data: a segment is the live part of a shard, a group is a row group or a line.

    Rows are ordered by writer id, then ascending within each writer.

    Args:
        storage: The root.
        listing: The objects under the root.
        at: The snapshot to show; None: all listed rows.
    """

    def __init__(self, storage: Storage, listing: Listing, *, at: Snapshot | None = None) -> None:
        self.storage = storage
        self._listing = listing
        self._at = None if at is None else _ranges_of(at)
        self._segments: list[Segment] = []
        self._schema_of = schema_lookup(storage)
        self._videos = Videos(storage)
        #: Rows that should exist but are missing: writer id -> ranges of row numbers.
        self.holes: dict[str, list[range]] = {}
        #: Rows of the snapshot that were trimmed since it was taken: writer id -> row numbers.
        self.trimmed_since: dict[str, range] = {}
        self._torn = {w: torn for w, torn in listing.torn().items() if self._at is None or w in self._at}
        # Writer id -> the row after the writer's last row.
        self._stops: dict[str, int] = {}
        for writer in listing.writers if self._at is None else sorted(self._at):
            coverage = self._cover(writer)
            self._segments += coverage.segments
            if coverage.segments:
                self._stops[writer] = coverage.segments[-1].end
            if coverage.holes:
                self.holes[writer] = coverage.holes

    @classmethod
    def listed(cls, storage: Storage, *, at: Snapshot | None = None) -> Self:
        """List the root. Lists again if rows are missing or being uploaded."""
        seen: list[Self] = []

        def lacks(listing: Listing) -> bool:
            seen.append(cls(storage, listing, at=at))
            return bool(seen[-1].holes or seen[-1].missing_shards())

        listing = list_settled(storage, lacks=lacks)
        found = seen[-1] if seen[-1]._listing is listing else cls(storage, listing, at=at)
        for writer, rows in found._unfinished():
            if not found._is_closed(writer):
                logger.warning(
                    "left out rows %s of writer %s in %s: being uploaded, or torn; `rlio verify` shows which",
                    _text(rows),
                    writer,
                    storage.uri,
                )
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the listing too, and the schemas that were read: other processes see the same rows, and
        # request nothing but these.
        at = None if self._at is None else self.snapshot()
        known: Mapping[str, Schema] = self.__dict__.get("schemas", {})
        texts = {name: schema.text for name, schema in known.items()}
        return _unpickled, (type(self), self.storage, self._listing, at, texts)

    def _cover(self, writer: str) -> Coverage:
        """Return the segments that serve the rows of ``writer`` in this data set."""
        if self._at is None:
            return self._listing.cover(writer)
        wanted = self._at[writer]
        gone = range(wanted.start, min(self._listing.trimmed_below(writer), wanted.stop))
        if gone:
            self.trimmed_since[writer] = gone
        return self._listing.cover(writer, start=wanted.start, end=wanted.stop)

    @property
    def uri(self) -> str:
        """The root."""
        return self.storage.uri

    @property
    def segments(self) -> list[Segment]:
        """The parts of shards that hold the live rows, in order; do not modify."""
        return self._segments

    @property
    def pinned(self) -> bool:  # type: ignore[override]  # The base has an attribute, for formats' sake.
        """Whether this shows a requested snapshot instead of all listed rows."""
        return self._at is not None

    def _describe(self) -> Iterator[str]:
        yield repr(self.uri)
        yield counted(len(self), "row")
        yield counted(len(self.segments), "shard")
        yield counted(len(self._stops), "writer")
        if self.pinned:
            yield "a snapshot"

    def _tables(self) -> Iterator[Html]:
        policies: dict[str, dict[str, Leaf]] = {}
        for schema in self.schemas.values():
            for policy, found in schema.policies.items():
                policies.setdefault(policy, {}).update({leaf.name: leaf for leaf in found.leaves})
        yield leaf_table({policy: found.values() for policy, found in policies.items()})

    def snapshot(self) -> dict[str, int | list[int]]:
        """Return the version of the data set, as JSON for ``at=``. It makes orders reproducible.

        Returns:
            Writer id -> the number of rows written so far (the row after the last one). If the first rows
            were trimmed, ``[first remaining row, rows]``.
        """
        if self._at is not None:
            ranges = self._at
        else:
            ranges = {w: range(self._listing.trimmed.get(w, 0), end) for w, end in self._stops.items()}
        return {w: [rows.start, rows.stop] if rows.start else rows.stop for w, rows in ranges.items() if rows}

    def refresh(self, *, at: Snapshot | None = None) -> Self:
        """Return the same root, listed again, without reading the header.

        Args:
            at: The snapshot to show. None: the same snapshot if this shows one, else all rows there are now.
        """
        if at is None and self._at is not None:
            at = self.snapshot()
        return self.listed(self.storage, at=at)

    def listed_again(self) -> Self:
        """Return the same rows in the shards that hold them now."""
        return self.refresh(at=self.snapshot())

    @property
    def hole_check(self) -> HoleCheck:
        """How often to look for a missing shard."""
        return listings.HOLE_CHECK

    def part(self, at: Snapshot) -> Self:
        """Return the rows of ``at`` from the existing listing, without a request to the storage."""
        return type(self)(self.storage, self._listing, at=at)

    @cached_property
    def digest(self) -> str:
        """16 hex digits that identify the snapshot."""
        return hashlib.blake2b(canonical_json(self.snapshot()).encode(), digest_size=8).hexdigest()

    @property
    def state_identity(self) -> str:
        """See `digest`."""
        return self.digest

    def why_empty(self) -> str:
        """Return the message for a data set without rows. It names rows that wait in logs on this machine."""
        return f"the data set has no rows{rows_waiting(self.storage)}"

    def files(self) -> list[str]:
        """Return the URIs of the live Parquet and JSON shards, for other tools (DuckDB, Polars, pandas).

        Leaves out shards that a larger shard covers. After `compact`, each row counts once, even before the
        covered shards are collected. But tools read whole files. If only a part of a shard is live
        (`cut_files`), they also count its other rows: rows that another file has too, that were trimmed, or
        that were written after the snapshot. Compact the data set first, or filter those rows out.

        Parquet shards have no column ``new_obs``; compute it. Where ``_next`` is k > 0, it is the ``obs`` of
        the row k below in the same file; where it is 0, it is in ``_new_obs``; where it is -1, it is missing.
        docs/format.md has the SQL. For frame stacks, ``obs`` holds only the newest frame. `to_arrow`,
        `to_pandas` and `to_polars` fill in both.
        """
        return [self.storage.uri_of(segment.ref.path) for segment in self.segments]

    def cut_files(self) -> list[str]:
        """Return the `files` that are only partly live; empty unless shards overlap in part."""
        return [
            self.storage.uri_of(segment.ref.path)
            for segment in self.segments
            if segment.rows < segment.ref.name.rows
        ]

    def bytes(self) -> int:
        """Return the size of the live shards in bytes."""
        return sum(segment.ref.name.size for segment in self.segments)

    @cached_property
    def schemas(self) -> dict[str, Schema]:
        """Hash -> schema of every writer's rows; read from the root at first use.

        For a snapshot, the schemas of its rows only: schemas of later writers are left out. To find them,
        reads footers until each schema was found; reads all footers if a schema is not used. Those that a
        used one holds stay: they change nothing, and infos that get keys leave one that no shard has.

        Raises:
            CorruptData: A schema file is damaged.
        """
        found = read_schemas(self.storage)
        if self._at is None or len(found) < 2:
            return found
        used: set[str] = set()
        # The last segments of all writers first: their schemas are most likely to differ.
        lasts = {segment.ref.writer: segment for segment in self.segments}
        for segment in dict.fromkeys((*lasts.values(), *self.segments)):
            try:
                schema = self.open_shard(segment).schema
            except (CorruptData, DataNotFound):
                continue  # The reader of its rows finds the damage again, and raises or counts it.
            if schema.hash not in used:
                used |= {schema.hash, *(name for name, other in found.items() if schema.holds(other))}
            if used >= found.keys():
                break
        return {name: schema for name, schema in found.items() if name in used}

    @property
    def stated_group_rows(self) -> int | None:  # type: ignore[override]  # As above.
        """See `Source`: the schemas state them, so an order of lanes needs no footers."""
        return max((schema.group_rows for schema in self.schemas.values()), default=None)

    def uri_of(self, path: str) -> str:
        """Return the URI of a shard."""
        return self.storage.uri_of(path)

    def open_shard(self, segment: Segment) -> OpenShard:
        """Open the shard of a segment."""
        return open_shard(
            self.storage,
            segment.ref,
            schemas=self._schema_of,
            keeps_pictures=self.keeps_pictures,
            videos=self._videos,
        )

    def open_segment(self, segment: StoredSegment) -> OpenShard:
        """See `open_shard`."""
        assert isinstance(segment, Segment)
        return self.open_shard(segment)

    def plan(self) -> Plan | None:
        """See `Source.plan`."""
        return self.storage.plan()

    def ranges(
        self, segment: StoredSegment, opened: OpenSegment | None, groups: Sequence[int] | None
    ) -> Sequence[Range]:
        """See `Source.ranges`."""
        assert isinstance(segment, Segment)
        if self.storage.at_once == 1:  # Of several roots, one may be local.
            return ()
        return ranges_of(self.storage, segment.ref, opened, groups)

    @cached_property
    def _group_rows(self) -> int | None:
        """Rows of all row groups but a shard's last; None: they depend on values, or on the writer."""
        found = {schema.group_rows if schema.has_fixed_rows else None for schema in self.schemas.values()}
        return found.pop() if len(found) == 1 else None

    def stated_groups(self, segment: StoredSegment) -> list[int] | None:
        """See `Source.stated_groups`: from the number of rows in the shard's name."""
        assert isinstance(segment, Segment)
        name, most = segment.ref.name, self._group_rows
        if most is None or name.suffix != "parquet":
            return None
        full, rest = divmod(name.rows, most)
        return [most] * full + [rest] * (rest > 0)

    def streams(self, opened: OpenSegment, segment: StoredSegment) -> Streams:
        """See `Source.streams`: from the table in the footer of the shard, if all of its rows are live."""
        assert isinstance(segment, Segment)
        return exact_streams(cast(OpenShard, opened), segment)

    def check_schema(self, schema: Schema, segment: StoredSegment) -> None:
        """Raise CorruptData unless the root has the schema of an opened shard."""
        if schema.hash not in self.schemas:
            raise CorruptData(
                f"its schema {schema.hash} is not under {SCHEMA_DIR}/: restore {SCHEMA_DIR}/"
                f"{schema.hash}.json; the shard's footer holds its text",
                uri=self.uri_of(segment.path),
            )

    def episode_parts(self) -> Iterator[EpisodeInfo]:
        """Yield the parts of episodes that the tables of the shards list, shard by shard.

        Reads the footers, and the rows of shards of which a part was trimmed. An episode that spans two
        shards appears in both; `Dataset.episodes` has it once.
        """
        for each, opened in self.opened_in_turn(self.segments, footers=True):
            segment = cast(Segment, each)
            table = live_streams(cast(OpenShard, opened), segment)
            for *values, writer, began, written, version in zip(*vars(table).values(), strict=True):
                # In a shard of merged writers, the table names the writer of the episode.
                named = segment.ref.writer if writer is None else writer
                own: list[Any] = [named, *values, utc_time(began), utc_time(written), version]
                yield EpisodeInfo(*own)

    def missing_shards(self) -> list[tuple[str, str, int]]:
        """Return the objects that have a shard's name but cannot be that shard.

        Each is (URI, reason, rows that no other shard has). For a writer that is not closed, such an object
        at the end is one that is still being uploaded.
        """
        lost = []
        covered = self._ends()
        for writer, torn in self._torn.items():
            holes = self.holes.get(writer, [])
            for (path, reason), name in torn:
                fills_hole = any(name.first < hole.stop and hole.start < name.end for hole in holes)
                goes_on = self._is_closed(writer) and name.end > covered.get(writer, 0)
                if fills_hole or goes_on:
                    lost.append((self.storage.uri_of(path), reason, name.rows))
        return lost

    def lost_rows(self) -> list[tuple[str, int]]:
        """Return the rows for which `check_complete` raises: (where, number of missing rows)."""
        # At the ends of closed writers, only torn shards hold them.
        torn = [(w, rows) for w, rows in self._unfinished() if self._is_closed(w)]
        gone = [(f"{w}: rows {_text(rows)}, trimmed", len(rows)) for w, rows in self.trimmed_since.items()]
        lost = [(f"{w}: rows {_text(hole)}", len(hole)) for w, holes in self.holes.items() for hole in holes]
        return gone + lost + [(f"{w}: rows {_text(rows)}", len(rows)) for w, rows in torn]

    def _is_closed(self, writer: str) -> bool:
        """Whether all rows of ``writer`` should exist: a torn shard is then not an upload in progress."""
        return self._at is None and writer in self._listing.sealed

    def _unfinished(self) -> list[tuple[str, range]]:
        """Return the rows after each writer's last shard that only objects of a wrong size hold."""
        found: list[tuple[str, range]] = []
        ends = self._ends()
        for writer, torn in self._torn.items() if self._at is None else ():
            end = max(name.end for _, name in torn)
            holes = self.holes.get(writer, [])
            first = max([ends.get(writer, 0), *(hole.stop for hole in holes)])
            if end > first:
                found.append((writer, range(first, end)))
        return found

    def _ends(self) -> dict[str, int]:
        """Writer id -> the row up to which all rows exist or were trimmed."""
        return self._listing.trimmed | self._stops

    def check_complete(self) -> None:
        """Raise if stored rows are missing.

        Raises:
            CorruptData: A shard is torn.
            HoleError: Rows are missing between or after shards, or were trimmed since the snapshot was taken.
        """
        for writer, rows in self.trimmed_since.items():
            raise HoleError(
                f"rows {_text(rows)} of writer {writer!r} were trimmed since the snapshot was taken: take a "
                "new snapshot, or read the remaining rows with on_error='skip'",
                uri=self.uri,
            )
        for uri, reason, count in self.missing_shards():
            raise CorruptData(
                f"the shard {reason}; its {count} rows are lost: restore it, or read with on_error='skip'",
                uri=uri,
            )
        for writer, holes in self.holes.items():
            raise HoleError(
                f"rows {_text(holes[0])} of writer {writer!r} are missing{self._expected(writer)}: "
                "restore them, or read with on_error='skip'",
                uri=self.uri,
            )

    def _expected(self, writer: str) -> str:
        """Return why rows of ``writer`` are expected, if the shards around them do not show it."""
        if self._at is not None:
            known = "" if writer in self._listing.writers else ", and so is everything else of that writer"
            return f" of the {self._at[writer].stop} rows that the snapshot has{known}"
        sealed = self._listing.sealed.get(writer, 0)
        return f" of the {sealed} rows with which it was closed" if sealed else ""


def _unpickled(
    kind: type[DatasetSnapshot],
    storage: Storage,
    listing: Listing,
    at: Snapshot | None,
    texts: Mapping[str, str],
) -> DatasetSnapshot:
    found = kind(storage, listing, at=at)
    if texts:
        found.schemas = {name: Schema.from_text(text, limits=storage.limits) for name, text in texts.items()}
    return found


def rows_waiting(storage: Storage) -> str:
    """Return the message that rows wait in logs, and where, for a root without rows; "" if none do."""
    folder = spool_of(storage, Spool())
    try:
        count = 0 if folder is None else sum(log.has_rows() for log in find_logs(folder))
    except OSError:  # Another user's folder.
        return ""
    if not count:
        return ""
    logs = "one log" if count == 1 else f"{count} logs"
    return (
        f", but rows wait in {logs} in {folder}: a live writer stores them at flush(), at close() or when "
        f"a shard is full; if the writer is dead, run `rlio recover {storage.uri}`"
    )


def _text(rows: range) -> str:
    return f"{rows.start} to {rows.stop - 1}"


def _ranges_of(at: Snapshot) -> dict[str, range]:
    """Return the rows of each writer, checked, because a snapshot may come from a file."""
    if not isinstance(at, Mapping):
        raise OptionError(f"at={excerpt(at)}: expected the dict that snapshot() returns")
    found = {}
    for writer, rows in at.items():
        bounds = rows if isinstance(rows, list | tuple) else [0, rows]
        whole = len(bounds) == 2 and all(type(row) is int for row in bounds)
        if not is_writer_id(writer) or not whole or not 0 <= bounds[0] <= bounds[1] <= MAX_ROW:
            raise OptionError(
                f"at[{excerpt(writer)}] is {excerpt(rows)}: expected a writer's id, and its rows or "
                "[first row, rows], as snapshot() returns them"
            )
        if bounds[0] < bounds[1]:
            found[writer] = range(bounds[0], bounds[1])
    return found
