"""`DatasetSnapshot`: the live rows of a root as of one listing. Users get it as a `rlio.Dataset`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from rlio.batch.columns import Columns
from rlio.dataset.json_shard import schema_lookup
from rlio.dataset.listing import Coverage, Listing, Segment, list_settled
from rlio.dataset.names import MAX_ROW, is_writer_id
from rlio.dataset.schema_files import check_agreement, read_schemas
from rlio.dataset.shards import OpenShard, open_shard
from rlio.errors import (
    CorruptData,
    DataNotFound,
    HoleError,
    MissingColumn,
    OptionError,
    SchemaConflict,
    SchemaError,
    excerpt,
)
from rlio.log.spool import Spool, find_logs, spool_of
from rlio.schemas.schema import Schema, canonical_json
from rlio.schemas.spaces import space_from_json
from rlio.storage.filesystem import Storage
from rlio.support.forks import cached_property

__all__ = ["DatasetSnapshot", "EpisodeInfo", "Snapshot", "common_columns", "rows_waiting"]

logger = logging.getLogger("rlio")

#: Writer id -> rows, or [first row, rows] where the rows below the first were trimmed already.
Snapshot: TypeAlias = Mapping[str, int | list[int]]


@dataclass(frozen=True)
class EpisodeInfo:
    """The rows of one episode in one shard.

    Attributes:
        writer: Id of the writer.
        policy, eps_id, agent_index, env_id: What names the episode; None where the data has no such column.
        rows: Rows in this shard.
        t0: ``t`` of the first of them.
        end: "terminated", "truncated" or "open" (it goes on in another shard, or was cut).
        reward: Sum of the rewards in this shard.
    """

    writer: str
    policy: str
    eps_id: Any
    agent_index: Any
    env_id: Any
    rows: int
    t0: int | None
    end: str
    reward: float | None


class DatasetSnapshot:
    """The shards under one root, as listed: which rows are live, where they lie, and what columns they have.

    The order of the rows is: writers by id, rows ascending within each.

    Args:
        storage: The root.
        listing: What is there.
        at: The snapshot to show; None: everything that was listed.
    """

    def __init__(self, storage: Storage, listing: Listing, *, at: Snapshot | None = None) -> None:
        self.storage = storage
        self._listing = listing
        self._at = None if at is None else _ranges_of(at)
        self._segments: list[Segment] = []
        self._schema_of = schema_lookup(storage)
        #: Rows that should be there and are not: writer id -> ranges of row numbers.
        self.holes: dict[str, list[range]] = {}
        #: Rows of the snapshot that were trimmed since it was taken: writer id -> row numbers.
        self.trimmed_since: dict[str, range] = {}
        self._torn = {w: torn for w, torn in listing.torn().items() if self._at is None or w in self._at}
        # Writer id -> the row after its last.
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
        """What is there, listed again where rows are missing, or are being uploaded."""
        seen: list[Self] = []

        def lacks(listing: Listing) -> bool:
            seen.append(cls(storage, listing, at=at))
            return bool(seen[-1].holes or seen[-1].missing_shards())

        listing = list_settled(storage, lacks=lacks)
        found = seen[-1] if seen[-1]._listing is listing else cls(storage, listing, at=at)
        for writer, rows in found._unfinished():
            if not found._is_closed(writer):
                logger.warning(
                    "rows %s of writer %s in %s are being uploaded, or torn (`rlio verify` tells): left out",
                    _text(rows),
                    writer,
                    storage.uri,
                )
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # What was listed travels to other processes, so that they need not list again and see the same.
        return _restored, (
            type(self),
            self.storage,
            self._listing,
            None if self._at is None else self.snapshot(),
        )

    def _cover(self, writer: str) -> Coverage:
        """What serves the rows of a writer that this data set shows."""
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
    def pinned(self) -> bool:
        """Whether it shows a snapshot that was asked for, and not all that was there."""
        return self._at is not None

    @property
    def segments(self) -> list[Segment]:
        """The parts of shards that hold the rows, in order; do not modify."""
        return self._segments

    def __len__(self) -> int:
        return sum(segment.rows for segment in self._segments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r}: {len(self)} rows, {len(self.files())} shards)"

    def snapshot(self) -> dict[str, int | list[int]]:
        """The version of the data set, and what makes orders reproducible: JSON for ``at=``.

        Returns:
            Writer id -> the number of rows that it had written, which is the row after its last. Where the
            first of them were trimmed, ``[first row that is left, rows]``.
        """
        if self._at is not None:
            ranges = self._at
        else:
            ranges = {w: range(self._listing.trimmed.get(w, 0), end) for w, end in self._stops.items()}
        return {w: [rows.start, rows.stop] if rows.start else rows.stop for w, rows in ranges.items() if rows}

    def refresh(self, *, at: Snapshot | None = None) -> Self:
        """The same root, listed again: one request, and the header is not read.

        Args:
            at: The snapshot to show. None: this one's if it shows a snapshot, else all that is there now.
        """
        if at is None and self._at is not None:
            at = self.snapshot()
        return self.listed(self.storage, at=at)

    def part(self, at: Snapshot) -> Self:
        """The rows of ``at``, out of what was listed: nothing is asked of the storage."""
        return type(self)(self.storage, self._listing, at=at)

    @cached_property
    def digest(self) -> str:
        """16 hex digits that name the snapshot."""
        return hashlib.blake2b(canonical_json(self.snapshot()).encode(), digest_size=8).hexdigest()

    def why_empty(self) -> str:
        """What to say where it has no rows: also that rows wait in logs of this machine, if some do."""
        return f"the data set has no rows{rows_waiting(self.storage)}"

    def files(self) -> list[str]:
        """URIs of the live Parquet and JSON shards, for other tools (DuckDB, Polars, pandas).

        A shard that a larger one covers is not among them, so that after `compact`, and before the covered
        ones are collected, each row is counted once. Tools read whole files, though: where only a part of a
        shard is live (`cut_files`) they also count the rest of it, rows that another file has too, or that
        were trimmed, or that came after the snapshot. Compact the data set first, or leave those rows out.

        Parquet shards have no column ``new_obs``: it has to be filled in. Where ``_next`` is k > 0, it is the
        ``obs`` of the k-th row below in the same file; where it is 0, it is in ``_new_obs``; where it is -1,
        it is missing. docs/format.md has the SQL. Frame stacks have only their newest frame in ``obs``.
        `to_arrow`, `to_pandas` and `to_polars` fill in both.
        """
        return [self.storage.uri_of(segment.ref.path) for segment in self._segments]

    def cut_files(self) -> list[str]:
        """Those of `files` of which not all rows are live; none, as long as shards do not overlap in part."""
        return [
            self.storage.uri_of(segment.ref.path)
            for segment in self._segments
            if segment.rows < segment.ref.name.rows
        ]

    def bytes(self) -> int:
        """Bytes of the live shards."""
        return sum(segment.ref.name.size for segment in self._segments)

    @cached_property
    def schemas(self) -> dict[str, Schema]:
        """Hash -> schema of every writer's rows; read from the root at first use.

        Of a snapshot, those that its rows have: what writers that came later brought does not change it. To
        tell them apart, footers are read until each schema was found, all of them if one is not used.

        Raises:
            CorruptData: A schema file is damaged.
        """
        found = read_schemas(self.storage)
        if self._at is None or len(found) < 2:
            return found
        used: set[str] = set()
        for segment in _ends_first(self._segments):
            try:
                used.add(self.open_shard(segment).schema.hash)
            except (CorruptData, DataNotFound):
                continue  # Found again, and raised or counted, by whoever reads its rows.
            if used >= found.keys():
                break
        return {name: schema for name, schema in found.items() if name in used}

    @property
    def columns(self) -> dict[str, list[str]]:
        """Policy id -> its columns, of all writers together, in the order they were first written in."""
        merged: dict[str, dict[str, None]] = {}
        for schema in self.schemas.values():
            for pid, policy in schema.policies.items():
                merged.setdefault(pid, {}).update(dict.fromkeys(policy.columns))
        return {pid: list(columns) for pid, columns in merged.items()}

    @property
    def policy_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Policy id -> (observation space, action space), of the policies for which writers stored them.

        Raises:
            SchemaConflict: Writers stored unlike spaces for one policy.
        """
        stored: dict[str, Mapping[str, Any]] = {}
        for schema in self.schemas.values():
            for pid, policy in schema.policies.items():
                if policy.spaces is None:
                    continue
                if stored.setdefault(pid, policy.spaces) != policy.spaces:
                    raise SchemaConflict(
                        f"writers stored unlike spaces for policy {excerpt(pid)}: {excerpt(stored[pid])} and "
                        f"{excerpt(policy.spaces)}; read those of one kind, writers=[...], and make the "
                        "spaces yourself",
                        uri=self.uri,
                    )
        return {
            pid: (space_from_json(spaces["observation"]), space_from_json(spaces["action"]))
            for pid, spaces in stored.items()
        }

    @property
    def spaces(self) -> tuple[Any, Any]:
        """(observation space, action space) of the one policy that was recorded.

        Training from stored data needs no environment: ``policy.bind(*data.spaces)``.

        Raises:
            SchemaError: No writer stored spaces.
            OptionError: Several policies were recorded: take theirs from `policy_spaces`.
            SchemaConflict: Writers stored unlike spaces.
        """
        found = self.policy_spaces
        if len(found) > 1:
            raise OptionError(
                f"the data set has the spaces of {len(found)} policies: take "
                f"policy_spaces[{min(found)!r}] or another of {', '.join(map(excerpt, sorted(found)))}",
                uri=self.uri,
            )
        if not found:
            raise SchemaError(
                "the data set does not say its spaces: workers and RecordExperience store them; of a writer "
                "of your own they are an argument, spaces={policy_id: (observation_space, action_space)}",
                uri=self.uri,
            )
        return next(iter(found.values()))

    def open_shard(self, segment: Segment) -> OpenShard:
        """Open the shard of a segment."""
        return open_shard(self.storage, segment.ref, schemas=self._schema_of)

    def episodes(self) -> Iterator[EpisodeInfo]:
        """What the shards' tables say about episodes, shard by shard: an episode cut by a shard is in both.

        Reads the footers, not the rows.
        """
        for segment in self._segments:
            table = self.open_shard(segment).streams()
            for *values, writer in zip(*vars(table).values(), strict=True):
                # Of writers that were merged, the table says whose episode it is.
                yield EpisodeInfo(segment.ref.writer if writer is None else writer, *values)

    def missing_shards(self) -> list[tuple[str, str, int]]:
        """Objects that are named like shards but cannot be: (URI, reason, rows that no other shard has).

        At the end of a writer that is not closed, such an object is one that is not there yet.
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
        """What `check_complete` would raise for, counted: (where, rows that should be there and are not)."""
        gone = [(f"{w}: rows {_text(rows)}, trimmed", len(rows)) for w, rows in self.trimmed_since.items()]
        lost = [(f"{w}: rows {_text(hole)}", len(hole)) for w, holes in self.holes.items() for hole in holes]
        return gone + lost + [(f"{w}: rows {_text(rows)}", len(rows)) for w, rows in self._torn_ends()]

    def _torn_ends(self) -> list[tuple[str, range]]:
        """The rows at the ends of writers that only torn shards are named for."""
        return [(writer, rows) for writer, rows in self._unfinished() if self._is_closed(writer)]

    def _is_closed(self, writer: str) -> bool:
        """Whether all rows of a writer should be there: what is torn is not still being uploaded."""
        return self._at is None and writer in self._listing.sealed

    def _unfinished(self) -> list[tuple[str, range]]:
        """The rows after the last shard of a writer that only objects of another size are named for."""
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
        """Writer id -> the row up to which rows are there, or gone on purpose."""
        return self._listing.trimmed | self._stops

    def check_complete(self) -> None:
        """Raise where rows that were stored are not there.

        Raises:
            CorruptData: A shard is torn.
            HoleError: Rows are missing between or after shards, or were trimmed since the snapshot was taken.
        """
        for writer, rows in self.trimmed_since.items():
            raise HoleError(
                f"rows {_text(rows)} of writer {writer!r} were trimmed since the snapshot was taken: take a "
                "new snapshot, or read what is left with on_error='skip'",
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
        """Why a writer's rows are missed, where the shards around them do not say it."""
        if self._at is not None:
            known = "" if writer in self._listing.writers else ", and so is everything else of that writer"
            return f" of the {self._at[writer].stop} rows that the snapshot has{known}"
        sealed = self._listing.sealed.get(writer, 0)
        return f" of the {sealed} rows with which it was closed" if sealed else ""


def rows_waiting(storage: Storage) -> str:
    """What is to be said of a root without rows: that some wait in logs, and where; "" if none do."""
    folder = spool_of(storage, Spool())
    try:
        count = 0 if folder is None else sum(log.has_rows() for log in find_logs(folder))
    except OSError:  # Another user's folder.
        return ""
    if not count:
        return ""
    logs = "one log" if count == 1 else f"{count} logs"
    return (
        f", but rows wait in {logs} in {folder}: a living writer stores them at flush(), at close() or when "
        f"a shard is full; those of a dead one, `rlio recover {storage.uri}`"
    )


def _text(rows: range) -> str:
    return f"{rows.start} to {rows.stop - 1}"


def _ranges_of(at: Snapshot) -> dict[str, range]:
    """The rows of each writer, checked: a snapshot may come from a file."""
    if not isinstance(at, Mapping):
        raise OptionError(f"at={excerpt(at)}: expected the dict that snapshot() gave")
    found = {}
    for writer, rows in at.items():
        bounds = rows if isinstance(rows, list | tuple) else [0, rows]
        whole = len(bounds) == 2 and all(type(row) is int for row in bounds)
        if not is_writer_id(writer) or not whole or not 0 <= bounds[0] <= bounds[1] <= MAX_ROW:
            raise OptionError(
                f"at[{excerpt(writer)}] is {excerpt(rows)}: expected a writer's id, and its rows or "
                "[first row, rows], as snapshot() gives them"
            )
        if bounds[0] < bounds[1]:
            found[writer] = range(bounds[0], bounds[1])
    return found


def _ends_first(segments: list[Segment]) -> Iterator[Segment]:
    """The first and last segment of each writer, where its schema is likely to differ, then the others."""
    ends: list[Segment] = []
    others: list[Segment] = []
    for index, segment in enumerate(segments):
        around = (segments[index - 1] if index else None, *segments[index + 1 : index + 2])
        same = [other for other in around if other is not None and other.ref.writer == segment.ref.writer]
        (others if len(same) == 2 else ends).append(segment)
    yield from ends
    yield from others


def common_columns(dataset: DatasetSnapshot, *, missing: str, wanted: list[str] | None) -> list[str] | None:
    """The logical columns to read under a rule for those that only some writers have.

    ``new_obs_valid`` is no such column: where it is absent, every final observation is there.

    Args:
        dataset: The data set.
        missing: "error", "drop" or "fill".
        wanted: The columns that the user asked for; None: all.

    Returns:
        ``wanted``, or, with "drop", those of them that all writers have; None: all.

    Raises:
        OptionError: ``missing`` is none of the three, or no column is left.
        MissingColumn: No writer has a wanted column.
        SchemaConflict: Only some writers have a column, and ``missing`` is "error"; or two writers give a
            column different types.
    """
    if missing not in ("error", "drop", "fill"):
        raise OptionError(f"missing={missing!r}: 'error', 'drop' or 'fill'")
    check_agreement(dataset.schemas, uri=dataset.uri, columns=wanted)
    by_policy: dict[str, list[tuple[str, set[str]]]] = {}
    for name, schema in sorted(dataset.schemas.items()):
        for pid, policy in schema.policies.items():
            by_policy.setdefault(pid, []).append((name, set(policy.columns)))
    known = {column for found in by_policy.values() for _, columns in found for column in columns}
    for column in wanted or ():
        if column not in known:
            raise MissingColumn(
                f"no column {column!r}; the data set has {', '.join(sorted(known))}",
                uri=dataset.uri,
                column=column,
            )
    partial: set[str] = set()
    for pid, found in by_policy.items():
        some = set.union(*(columns for _, columns in found)) & set(known if wanted is None else wanted)
        some.discard(Columns.NEXT_OBS_VALID)
        for name, columns in found:
            lacking = some - columns
            partial |= lacking
            if lacking and missing == "error":
                raise SchemaConflict(
                    f"schema {name} lacks {sorted(lacking)} of policy {pid!r}, which other writers have: "
                    "read with missing='drop' or missing='fill'",
                    uri=dataset.uri,
                    column=min(lacking),
                )
    left = (known if wanted is None else set(wanted)) - (partial if missing == "drop" else set())
    if wanted is not None and not left:
        raise OptionError(f"columns={wanted}: no column is left to read; name at least one")
    if not left and known:
        raise OptionError("missing='drop' leaves no column: the writers have none in common; use 'fill'")
    return sorted(left) if missing == "drop" and partial else wanted


def _restored(
    kind: type[DatasetSnapshot], storage: Storage, listing: Listing, at: Snapshot | None
) -> DatasetSnapshot:
    """One that was pickled."""
    return kind(storage, listing, at=at)
