"""`gc`: removes objects that no reader needs any more, but never the only copy of a row.

It removes shards whose rows larger shards have, and shards below a trim marker. It removes torn objects whose
rows have another copy, attempts at a part of a job that are not taken, unfinished files, and indexes of early
versions. It removes only objects with names of the rlio grammar, one by one, under ``data/``, ``_tmp/`` and
``_index/``.

An attempt is removed if, during the grace period, nothing was stored in it and no other attempt was sealed.
All of it is removed, except the seal of a sealed attempt: it shows a reader of that attempt that its rows are
gone.

An unfinished file is never removed while a process of this machine writes it, whatever the grace: the process
holds a lock on the file. Stores that are not local, and network filesystems, do not tell which uploads run.
There, and only there, unfinished files stay for a day even with a shorter grace.

The grace period exists because a reader that listed the data set before a larger shard appeared may still
read the covered shards. Ages are differences of the store's own times, compared with a small object that gc
puts for this. The clock of this machine does not matter.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://gc-example", writer_id="w0") as writer:
    ...     for _ in range(5):
    ...         writer.write(rlio.SampleBatch(obs=np.zeros((3, 4)), rewards=np.ones(3)))
    ...         writer.flush()
    >>> _ = rlio.maintenance.compact("memory://gc-example")
    >>> rlio.maintenance.gc("memory://gc-example").waiting
    5
    >>> len(rlio.maintenance.gc("memory://gc-example", grace=0).removed)
    5
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

from rlio.catalog.listing import Listing, PassedOver, Segment, ShardRef, list_shards
from rlio.catalog.names import (
    DATA_DIR,
    INDEX_DIR,
    ShardName,
    is_writer_id,
    parse_trim,
    part_of,
    sealed_name,
    trim_name,
    writer_dir,
)
from rlio.errors import CorruptData, DataNotFound, OptionError, excerpt
from rlio.maintenance.merging import open_whole
from rlio.opening import require_header
from rlio.source.json_shard import JsonShard, schema_lookup
from rlio.storage.filesystem import Storage
from rlio.storage.local import on_network
from rlio.storage.parallel import each
from rlio.storage.paths import TMP_DIR
from rlio.support.options import check_seconds
from rlio.support.progress import Progress, silent

__all__ = ["Collected", "GcReport", "Kept", "gc"]

logger: logging.Logger = logging.getLogger("rlio")

Kind: TypeAlias = Literal["covered", "trimmed", "torn", "attempt", "unfinished", "index"]

#: One day: longer than readers use a listing without listing again.
_GRACE: Final = 24 * 3600.0
#: Content of the object that tells the store's time.
_PROBE: Final = b"What time is it?\n"
_UNFINISHED: Final = re.compile(rf"{TMP_DIR}/[0-9a-f]{{32}}\.tmp")
_INDEX: Final = re.compile(rf"{INDEX_DIR}/(?:[0-9]{{8}}|change)-[0-9a-f-]+\.json\.zst")


@dataclass(frozen=True)
class Collected:
    """One removed object.

    Attributes:
        uri: The object.
        kind: "covered" (a larger shard has its rows), "trimmed", "torn", "attempt" (from an attempt at a part
            of a job that is not taken), "unfinished" or "index" (of sealed writers, from early versions).
        bytes: Its size; 0 if unknown.
    """

    uri: str
    kind: Kind
    bytes: int


@dataclass(frozen=True)
class Kept:
    """An object that looks unneeded but stays, and the reason. Check it by hand."""

    uri: str
    reason: str


@dataclass(frozen=True)
class GcReport:
    """The result of `gc`, or, in a dry run, the expected result.

    Attributes:
        uri: The root.
        grace: Seconds.
        dry_run: Whether nothing was removed.
        removed: The removed objects.
        waiting: Number of unneeded objects that are younger than the grace period.
        kept: Objects that stay because it is uncertain whether they are needed.
    """

    uri: str
    grace: float
    dry_run: bool
    removed: tuple[Collected, ...]
    waiting: int
    kept: tuple[Kept, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the removed objects."""
        return sum(entry.bytes for entry in self.removed)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return asdict(self) | {"bytes": self.bytes}


def gc(
    uri: str | os.PathLike[str],
    *,
    grace: float = _GRACE,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> GcReport:
    """Remove objects that no reader needs any more. Safe beside readers, writers and maintenance; repeatable.

    Before gc removes a covered shard, it reads and checks the shards that cover it from end to end. If one of
    them is damaged, the covered shard stays.

    Args:
        uri: The data set: a path or any fsspec URL.
        grace: Seconds for which an object must have been unneeded. Keep it longer than readers run without
            listing. 0 checks no ages, but for unfinished files on stores without locks: use it in tests, or
            if no process reads the data set, and no attempt at a part of a job runs.
        dry_run: Only report what would be removed; does not check covering shards.
        storage_options: Options for fsspec.
        progress: Shows the progress.

    Raises:
        DataNotFound: ``uri`` has no data set.
        OptionError: ``grace`` is not a number of seconds, or the root has another format version.
        PublishError: The object that shows the store's time could not be put.
    """
    grace = check_seconds("grace", grace)
    storage = Storage.open(uri, storage_options=storage_options)
    require_header(storage)
    ages = _Ages(storage, grace)
    try:
        return _Collection(storage, ages, dry_run=dry_run).run(progress)
    finally:
        ages.close()


@dataclass(frozen=True)
class _Candidate:
    """An object that may be removed.

    Attributes:
        path: Path below the root.
        kind: Why it may be removed.
        bytes: Its size, if known.
        since: Objects that made it unneeded. The grace period starts with the newest of them and of itself.
        covers: Shards that have its rows.
        is_only_copy: Whether it has rows that no other object has.
        least_age: Seconds for which it stays even with a shorter grace.
    """

    path: str
    kind: Kind
    bytes: int
    since: tuple[str, ...] = ()
    covers: tuple[ShardRef, ...] = ()
    is_only_copy: bool = False
    least_age: float = 0.0


@dataclass
class _Collection:
    storage: Storage
    ages: _Ages
    dry_run: bool
    removed: list[Collected] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    waiting: int = 0
    #: Covering shards that were read: None if they are whole, else the problem.
    checked: dict[ShardRef, str | None] = field(default_factory=dict)

    def run(self, progress: Progress) -> GcReport:
        listing = list_shards(self.storage)
        candidates = [*self._shards(listing), *self._attempts(listing), *self._left_over()]
        aged = [one for one in candidates if max(one.least_age, self.ages.grace)]
        self.ages.look_up([path for one in aged for path in (one.path, *one.since)])
        doomed = [candidate for candidate in candidates if self._may_go(candidate)]
        with progress("gc", len(doomed)) as advance:
            goes = self._is_removed if not self.dry_run else lambda _: True
            for candidate, gone in zip(doomed, each(self.storage, goes, doomed), strict=True):
                if gone:
                    uri = self.storage.uri_of(candidate.path)
                    self.removed.append(Collected(uri, candidate.kind, candidate.bytes))
                else:
                    self.waiting += 1
                advance(1)
        return GcReport(
            uri=self.storage.uri,
            grace=self.ages.grace,
            dry_run=self.dry_run,
            removed=tuple(self.removed),
            waiting=self.waiting,
            kept=tuple(self.kept),
        )

    # ---- candidates for removal ----

    def _shards(self, listing: Listing) -> Iterator[_Candidate]:
        torn = listing.torn()
        for writer in sorted({*listing.shards, *torn}):
            segments = listing.cover(writer).segments
            live = {segment.ref for segment in segments}
            for ref in listing.shards.get(writer, []):
                if ref not in live:
                    yield from self._superfluous(listing, writer, ref.path, ref.name, segments, "covered")
            for (path, _), name in torn.get(writer, []):
                yield from self._superfluous(listing, writer, path, name, segments, "torn")

    def _superfluous(
        self,
        listing: Listing,
        writer: str,
        path: str,
        name: ShardName,
        segments: list[Segment],
        kind: Literal["covered", "torn"],
    ) -> Iterator[_Candidate]:
        """Yield a shard that serves no row: its rows are trimmed, in other shards, or not served."""
        trim = listing.trimmed.get(writer, 0)
        if name.end <= trim:
            marker = f"{writer_dir(writer)}/{trim_name(trim)}"
            yield _Candidate(path, "trimmed" if kind == "covered" else kind, name.size, (marker,))
            return
        first = max(name.first, trim)
        covers = [part for part in segments if part.first < name.end and part.end > first]
        if sum(min(part.end, name.end) - max(part.first, first) for part in covers) == name.end - first:
            refs = tuple(part.ref for part in covers)
            yield _Candidate(path, kind, name.size, tuple(ref.path for ref in refs), refs)
        else:
            yield _Candidate(path, kind, name.size, is_only_copy=True)

    def _attempts(self, listing: Listing) -> Iterator[_Candidate]:
        """Yield the objects of attempts that are not taken."""
        seals = {part_of(writer): _seal_of(writer, rows) for writer, rows in listing.sealed.items()}
        for writer, passed in listing.passed_over.items():
            objects = _objects_of(writer, passed)
            # A new object means that the attempt may still run, or that a reader listed it as the first one.
            taken = seals.get(part_of(writer))
            since = tuple(path for path, _ in objects) + (() if taken is None else (taken,))
            if passed.sealed is not None:
                since += (_seal_of(writer, passed.sealed),)
            for path, size in objects:
                yield _Candidate(path, "attempt", size, since)

    def _left_over(self) -> Iterator[_Candidate]:
        """Yield unfinished files, and the indexes of early versions."""
        for path, size in self.storage.list(INDEX_DIR):
            if _INDEX.fullmatch(path):
                yield _Candidate(path, "index", size or 0)
        # Locks of other machines may not show there.
        has_locks = self.storage.is_local and not on_network(self.storage.root)
        for path, size in self.storage.list(TMP_DIR):
            if not _UNFINISHED.fullmatch(path):
                continue
            with self.storage.hold_unfinished(path) as held:
                is_written = held is False
                is_left = (held and has_locks) or self._is_probe(path, size)
            if is_written:
                self.waiting += 1
            else:
                yield _Candidate(path, "unfinished", size or 0, least_age=0.0 if is_left else _GRACE)

    def _is_probe(self, path: str, size: int | None) -> bool:
        """Whether an object told a gc the time; a gc that runs puts it again."""
        if size not in (None, len(_PROBE)):
            return False
        with contextlib.suppress(DataNotFound):
            return self.storage.read_range(path, 0, len(_PROBE) + 1) == _PROBE
        return False

    # ---- removal ----

    def _may_go(self, candidate: _Candidate) -> bool:
        """Whether an object is old enough and its rows have whole shards; else counts or reports it."""
        grace = max(candidate.least_age, self.ages.grace)
        age = self.ages.of(candidate.path, *candidate.since) if grace else 0.0
        problem: str | None = None
        if age is None:
            problem = "the store does not report its age"
            problem += (
                "; remove it if nobody writes it" if candidate.least_age else "; grace=0 checks no ages"
            )
        elif age < grace:
            self.waiting += 1
            return False
        elif candidate.is_only_copy:
            problem = "it is torn, and the only copy of some of its rows; run `rlio verify`"
        elif not self.dry_run:
            try:
                found = next(filter(None, map(self._problem_of, candidate.covers)), None)
            except DataNotFound:  # Compacted again: the next call finds the new covering shard.
                self.waiting += 1
                return False
            problem = found and f"a shard that covers it is not whole: {found}"
        if problem is not None:
            self.kept.append(Kept(self.storage.uri_of(candidate.path), problem))
            logger.warning("kept %s: %s", self.storage.uri_of(candidate.path), problem)
        return problem is None

    def _problem_of(self, ref: ShardRef) -> str | None:
        """Read a whole covering shard and return the problem with it; None: none.

        Raises:
            DataNotFound: The shard is gone.
        """
        if ref not in self.checked:
            try:
                if ref.name.suffix == "parquet":
                    open_whole(self.storage, ref)
                else:
                    shard = JsonShard(self.storage, ref, schema_lookup(self.storage))
                    for index in range(len(shard.rows)):
                        shard.check_line(index)
                self.checked[ref] = None
            except CorruptData as error:
                self.checked[ref] = str(error)
        return self.checked[ref]

    def _is_removed(self, candidate: _Candidate) -> bool:
        """Remove an object, unless a process has begun to write it."""
        if candidate.kind != "unfinished":
            self._remove(candidate.path)
            return True
        with self.storage.hold_unfinished(candidate.path) as held:
            if held is not False:
                self._remove(candidate.path)
            return held is not False

    def _remove(self, path: str) -> None:
        """Remove one object. Checks its name again, because a removal cannot be undone."""
        parts = path.split("/")
        is_shard = (
            len(parts) == 3
            and parts[0] == DATA_DIR
            and is_writer_id(parts[1])
            and (
                ShardName.parse(parts[2]) is not None
                or (part_of(parts[1]) is not None and parse_trim(parts[2]) is not None)
            )
        )
        if not (is_shard or _UNFINISHED.fullmatch(path) or _INDEX.fullmatch(path)):
            raise OptionError(f"{excerpt(path)} is not for gc to remove", uri=self.storage.uri)
        self.storage.remove(path)
        logger.info("removed %s", self.storage.uri_of(path))


def _objects_of(writer: str, passed: PassedOver) -> list[tuple[str, int]]:
    """Return path and bytes of an attempt's removable objects: shards, torn or whole, and its claim."""
    found = [(ref.path, ref.name.size) for ref in passed.shards]
    for path, _ in passed.rejected:
        name = ShardName.parse(path.rpartition("/")[2])
        if name is not None and path.count("/") == 2:
            found.append((path, name.size))
    if passed.sealed is None and passed.trimmed is not None:
        found.append((f"{writer_dir(writer)}/{trim_name(passed.trimmed)}", 0))
    return found


def _seal_of(writer: str, rows: int) -> str:
    return f"{writer_dir(writer)}/{sealed_name(rows)}"


class _Ages:
    """The ages of objects, by the store's own clock."""

    def __init__(self, storage: Storage, grace: float) -> None:
        self._storage = storage
        self.grace = grace
        #: The object that was put to get the store's time, until `close`.
        self.probe: str | None = None
        self._now: float | None = None
        self._stored: dict[str, float | None] = {}

    def look_up(self, paths: list[str]) -> None:
        """Request the store's time, and the times of all objects whose ages are needed."""
        if not paths:
            return
        self.probe = f"{TMP_DIR}/{uuid.uuid4().hex}.tmp"
        for last in (False, False, True):
            self._storage.put(self.probe, _PROBE)
            try:
                self._now = self._storage.modified(self.probe)
                break
            except DataNotFound:  # A gc with grace=0 runs at the same time, and took it for left over.
                if last:
                    raise
        wanted = sorted(set(paths))
        self._stored = dict(zip(wanted, each(self._storage, self._time, wanted), strict=True))

    def of(self, path: str, *others: str) -> float | None:
        """Return seconds since the newest of the objects was stored; None if the store has no times."""
        times = [self._stored[one] for one in (path, *others)]
        if self._now is None or None in times:
            return None
        return self._now - max(time for time in times if time is not None)

    def _time(self, path: str) -> float | None:
        try:
            return self._storage.modified(path)
        except DataNotFound:  # Removed meanwhile, or a marker written with another padding.
            return float("-inf")

    def close(self) -> None:
        """Remove the probe."""
        if self.probe is not None:
            self._storage.remove(self.probe)
