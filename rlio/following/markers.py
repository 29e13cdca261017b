"""`Markers` and `MarkKeeper`: a follower tells writers its progress, and how much more they may write.

The follower divides the rows that it may still take among the writers, as ceilings. The ceilings never add up
to more, so the writers keep to the limit together without knowing of each other.

Example:
    >>> fast, slow, done = Growing(rows=100), Growing(rows=10), Growing(rows=40, is_open=False)
    >>> share_out(250, {"a": fast, "b": slow, "c": done})
    {'a': 150, 'b': 60, 'c': 40}
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from rlio.catalog.listing import Listing
from rlio.catalog.names import MAX_ROW
from rlio.errors import PublishError, RlioError, UnsafeData
from rlio.following.marks import Mark, check_follower_name, list_marks, mark_path, newest, put_mark
from rlio.storage.filesystem import Storage
from rlio.storage.parallel import each
from rlio.support.options import check_count, check_flag, check_seconds, set_options

__all__ = ["Growing", "MarkKeeper", "Markers", "share_out"]

logger: logging.Logger = logging.getLogger("rlio")


@dataclass(frozen=True)
class Markers:
    """The name and the times of a follower's progress marks.

    Attributes:
        name: Name of the follower, or of the group of followers that share the writers: 1 to 64 of
            ``a-z 0-9 -``. No other follower of the data set may use it at the same time.
        every_seconds: Least seconds between two rounds of marks.
        every_rows: Least rows by which a writer's ceiling or cursor must grow before it gets a new mark;
            a writer that has reached its ceiling gets one at once.
        heartbeat_seconds: Seconds after which a writer that has reached its ceiling gets a mark although
            nothing has changed, as a sign of life. Use less than half of the writers' ``stale_seconds``.
        idle_seconds: Seconds after which a writer that may write, but has stored nothing, loses its
            reservation, because it may be dead. Use more than its ``Roll.max_seconds``.
        resume: Whether a follower that is opened without a saved state continues where its marks say, instead
            of at the first row. It then takes again the rows that its predecessor took after its last marks:
            those of ``every_seconds``, unless the store was down. Rows that the predecessor had in its ring
            but had not drawn are not drawn any more, and counters begin at 0.

    Raises:
        OptionError: A value is out of bounds.
    """

    name: str
    _: KW_ONLY
    every_seconds: float = 0.5
    every_rows: int = 1
    heartbeat_seconds: float = 10.0
    idle_seconds: float = 120.0
    resume: bool = False

    def __post_init__(self) -> None:
        check_follower_name(self.name)
        for name in ("every_seconds", "heartbeat_seconds", "idle_seconds"):
            set_options(self, **{name: check_seconds(f"Markers.{name}", getattr(self, name))})
        set_options(
            self,
            every_rows=check_count("Markers.every_rows", self.every_rows, least=1, of="rows"),
            resume=check_flag("Markers.resume", self.resume),
        )


@dataclass(frozen=True)
class Growing:
    """A writer's progress, for `share_out`.

    Attributes:
        rows: Rows that the writer has stored.
        ceiling: Rows that its last mark allows; never lowered.
        is_open: Whether it may store more.
        is_idle: Whether it has not used its allowance for long: nothing is reserved for it.
    """

    rows: int
    ceiling: int = 0
    is_open: bool = True
    is_idle: bool = False

    @property
    def held(self) -> int:
        """Rows that the writer has, or may have by now."""
        return max(self.rows, self.ceiling) if self.is_open and not self.is_idle else self.rows


def share_out(total: int, writers: Mapping[str, Growing]) -> dict[str, int]:
    """Writer -> the rows that it may have: ``total`` together, or what they hold already if it is more.

    Free rows go to the writers with the least left to write, so all end up with equally much left. A fast
    writer does not take everything, and a slow one does not hoard.
    """
    ceilings = {writer: found.held for writer, found in writers.items()}
    free = total - sum(ceilings.values())
    # Writers that may get more, ordered by the rows they have left.
    waiting = sorted(
        (ceilings[writer] - found.rows, writer)
        for writer, found in writers.items()
        if found.is_open and not found.is_idle
    )
    level, count = 0, 0
    for left, _ in waiting:
        # Raise all earlier writers to this writer's level, as far as the free rows allow.
        if (left - level) * count > free:
            break
        free -= (left - level) * count
        level, count = left, count + 1
    if free >= 0 and count:
        more, rest = divmod(free, count)
        for index, (_, writer) in enumerate(waiting[:count]):
            ceilings[writer] = writers[writer].rows + level + more + (index < rest)
    return {
        writer: min(max(ceiling, writers[writer].ceiling), MAX_ROW) for writer, ceiling in ceilings.items()
    }


@dataclass
class _LastMark:
    """The last mark of a writer, and the writer's progress since.

    Attributes:
        mark: The newest stored mark; None: none yet.
        number: Number of the next mark. No number is used twice, even if storing failed.
        at: When the mark was put, or found.
        paths: Stored marks, to be removed after a newer one is stored.
        rows: Rows that the writer had stored at the last look.
        since: When these rows, or the ceiling, last grew.
    """

    mark: Mark | None = None
    number: int = 0
    at: float = -math.inf
    paths: list[str] = field(default_factory=list)
    rows: int = 0
    since: float = 0.0

    @property
    def ceiling(self) -> int:
        return 0 if self.mark is None else self.mark.ceiling


class MarkKeeper:
    """Puts the marks of one follower. For one thread at a time.

    If a mark cannot be stored, this is counted and logged, and retried in the next round. Writers without a
    new mark for long continue anyway.

    Args:
        storage: The root.
        markers: Name and times.
        owns: Whether a writer belongs to this follower.
        clock: Returns seconds, from any origin.
    """

    def __init__(
        self,
        storage: Storage,
        markers: Markers,
        owns: Callable[[str], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.markers = markers
        #: Marks that were put, and attempts that failed.
        self.put: int = 0
        self.failed: int = 0
        self._storage = storage
        self._owns = owns
        self._clock = clock
        self._told: dict[str, _LastMark] | None = None
        self._round = -math.inf
        self._listed: tuple[Listing, dict[str, int]] | None = None

    def found(self) -> dict[str, int]:
        """Writer -> the row at which to continue, from the stored marks."""
        return {writer: told.mark.row for writer, told in self._known().items() if told.mark is not None}

    def _known(self) -> dict[str, _LastMark]:
        """The stored marks. Continues from marks of an earlier follower of this name.

        Raises:
            UnsafeData: A mark has the largest possible number: rlio did not write it.
        """
        if self._told is None:
            told = {}
            for writer, marks in list_marks(self._storage).items():
                own = {path: mark for path, mark in marks.items() if mark.follower == self.markers.name}
                if own and self._owns(writer):
                    (mark,) = newest(own.values()).values()
                    if mark.number >= MAX_ROW:
                        raise UnsafeData(
                            f"follower {self.markers.name} cannot put a mark with a number above this one: "
                            "remove the mark, or use another name",
                            uri=self._storage.uri_of(mark_path(writer, mark)),
                        )
                    now = self._clock()
                    told[writer] = _LastMark(mark, mark.number + 1, now, [*own], since=now)
            self._told = told
        return self._told

    @property
    def wait(self) -> float:
        """Seconds until the next round is allowed."""
        return max(self._round + self.markers.every_seconds - self._clock(), 0.0)

    def tell(self, rows: Mapping[str, int], listing: Listing, total: int | None) -> None:
        """Put the marks that are due.

        Args:
            rows: The cursors: writer -> next row.
            listing: The newest listing.
            total: Rows that the follower's writers may have together; None: no limit.
        """
        if self.wait:
            return
        self._round = self._clock()
        known = self._known()
        writers = self._growing(known, listing)
        ceilings = dict.fromkeys(writers, MAX_ROW) if total is None else share_out(total, writers)
        due = []
        for writer, growing in writers.items():
            told = known.setdefault(writer, _LastMark(since=self._clock()))
            row, ceiling = rows.get(writer, 0), ceilings[writer]
            if told.mark is not None and ceiling <= growing.rows:
                ceiling = told.ceiling  # Part of a batch exceeded the ceiling; the writer gets no more now.
            if self._is_due(told, growing, row, ceiling):
                due.append((writer, row, ceiling))
        self._put_all(due)

    def tell_all(self, rows: Mapping[str, int]) -> None:
        """Put every cursor that has moved, regardless of the time: the follower is ending."""
        due = []
        for writer, told in self._known().items():
            row = rows.get(writer, 0)
            if told.mark is not None and told.mark.row != row:
                due.append((writer, row, told.mark.ceiling))
        self._put_all(due)

    def _growing(self, known: dict[str, _LastMark], listing: Listing) -> dict[str, Growing]:
        """This follower's writers, also those without rows."""
        found = {}
        now = self._clock()
        for writer, stored in self._stored(listing).items():
            sealed = listing.sealed.get(writer)
            told = known.setdefault(writer, _LastMark(since=now))
            if stored > told.rows:
                told.rows, told.since = stored, now
            found[writer] = Growing(
                rows=stored if sealed is None else sealed,
                ceiling=told.ceiling,
                is_open=sealed is None,
                # A writer without anything left to write cannot have stored rows since.
                is_idle=told.ceiling > stored and now - told.since > self.markers.idle_seconds,
            )
        return found

    def _stored(self, listing: Listing) -> dict[str, int]:
        """This follower's writers -> rows that they have stored; computed once for each listing."""
        if self._listed is None or self._listed[0] is not listing:
            stored = {
                writer: max(
                    listing.trimmed.get(writer, 0),
                    *(ref.name.end for ref in listing.shards.get(writer, ())),
                    0,
                )
                for writer in sorted({*listing.writers, *listing.trimmed})
                if self._owns(writer)
            }
            self._listed = (listing, stored)
        return self._listed[1]

    def _is_due(self, told: _LastMark, growing: Growing, row: int, ceiling: int) -> bool:
        """Whether a writer needs a new mark."""
        mark = told.mark
        if mark is None:
            return growing.is_open or row > 0
        age = self._clock() - told.at
        waits = growing.is_open and growing.rows >= mark.ceiling
        if waits and (ceiling > mark.ceiling or age >= self.markers.heartbeat_seconds):
            return True
        grown = max(row - mark.row, ceiling - mark.ceiling)
        if not growing.is_open:
            return row != mark.row and (row >= growing.rows or grown >= self.markers.every_rows)
        # A follower that restarted from an earlier state is behind its marks.
        return grown >= self.markers.every_rows or row < mark.row

    def _put_all(self, due: list[tuple[str, int, int]]) -> None:
        """Put marks, (writer, row, ceiling) each, in parallel where that is faster."""
        for _ in each(self._storage, lambda one: self._put(*one), due):
            pass

    def _put(self, writer: str, row: int, ceiling: int) -> None:
        """Put one mark, then remove the earlier ones."""
        told = self._known()[writer]
        mark = Mark(follower=self.markers.name, number=told.number, row=row, ceiling=ceiling)
        old, told.number = told.paths, told.number + 1
        told.paths = [*old, mark_path(writer, mark)]  # After a failure the mark may still exist.
        try:
            put_mark(self._storage, writer, mark)
        except PublishError as error:
            self.failed += 1
            logger.warning("the progress mark for writer %s could not be stored: %s", writer, error)
            return
        self.put += 1
        if mark.ceiling > told.ceiling:
            told.since = self._clock()
        told.mark, told.at = mark, self._clock()
        for path in old:
            try:
                self._storage.remove(path)
            except (RlioError, OSError) as error:
                logger.info("an old mark remains until the next one is put: %s", error)
            else:
                told.paths.remove(path)
