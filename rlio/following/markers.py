"""`Markers` and `MarkKeeper`: a follower tells writers how far it is, and how much more they may write.

What a follower may still take is dealt out to the writers as ceilings, whose sum never exceeds it: so that
they keep to it together, without knowing of each other.

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

from rlio.dataset.listing import Listing
from rlio.dataset.names import MAX_ROW
from rlio.errors import OptionError, PublishError, RlioError, UnsafeData, excerpt
from rlio.following.marks import Mark, check_follower_name, list_marks, mark_path, newest, put_mark
from rlio.storage.filesystem import Storage
from rlio.storage.parallel import each

__all__ = ["Growing", "MarkKeeper", "Markers", "share_out"]

logger = logging.getLogger("rlio")


@dataclass(frozen=True)
class Markers:
    """When a follower puts its progress marks, and under which name.

    Attributes:
        name: The follower's, or that of the group of followers that share the writers out: 1 to 64 of
            ``a-z 0-9 -``. Nobody else who follows the data set at the same time has it.
        every_seconds: Seconds between two rounds of marks, at least.
        every_rows: Rows by which a writer's ceiling or cursor has grown before it gets a new mark, at least;
            a writer that has reached its ceiling gets one at once.
        heartbeat_seconds: Seconds after which a writer that has reached its ceiling gets a mark although
            nothing has changed: a sign of life. Less than half of the writers' ``stale_seconds``.
        idle_seconds: Seconds after which a writer that may write, and has stored nothing, keeps nothing
            reserved for it: it may be dead. More than its ``Roll.max_seconds``.
        resume: Whether a follower that is opened without a saved state goes on where its marks say, instead
            of at the first row. Rows that the one before had taken since its last marks are then taken
            again: those of ``every_seconds``, unless the store was down. What that one had in its ring and
            had not drawn is not drawn any more, and counters begin at 0.

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
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise OptionError(f"Markers({name}={excerpt(value)}): a number of seconds, 0 or more")
        if type(self.every_rows) is not int or self.every_rows < 1:
            raise OptionError(f"Markers(every_rows={excerpt(self.every_rows)}): rows, 1 or more")


@dataclass(frozen=True)
class Growing:
    """A writer, as `share_out` sees it.

    Attributes:
        rows: Rows that it has stored.
        ceiling: Rows that it was told it may have; that is not taken back.
        is_open: Whether it may store more.
        is_idle: Whether it has not used what it may, for long: nothing is kept for it.
    """

    rows: int
    ceiling: int = 0
    is_open: bool = True
    is_idle: bool = False

    @property
    def held(self) -> int:
        """Rows that it has, or may have by now."""
        return max(self.rows, self.ceiling) if self.is_open and not self.is_idle else self.rows


def share_out(total: int, writers: Mapping[str, Growing]) -> dict[str, int]:
    """Writer -> the rows that it may have: all of them together ``total``, or what they have anyway.

    What is free goes to the writers that have least left to write, so that all of them end up with equally
    much: a quick one does not take it all, and a slow one does not hoard.
    """
    ceilings = {writer: found.held for writer, found in writers.items()}
    free = total - sum(ceilings.values())
    # Those that may get more, by how much they have left.
    waiting = sorted(
        (ceilings[writer] - found.rows, writer)
        for writer, found in writers.items()
        if found.is_open and not found.is_idle
    )
    level, count = 0, 0
    for left, _ in waiting:
        # Raise those before up to this one, as far as it goes.
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
    """What a writer was told last, and what it has done since.

    Attributes:
        mark: The newest mark that stands; None: none yet.
        number: Of the next one: no two have the same, whether they could be stored or not.
        at: When it was put, or found.
        paths: Marks that stand, to be removed once there is a newer one.
        rows: Rows that the writer had stored when it was looked at.
        since: When these had grown last, or the ceiling had.
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

    A mark that cannot be stored is counted, logged and tried again with the next round: writers that hear
    nothing for long go on.

    Args:
        storage: The root.
        markers: Name and times.
        owns: Whether a writer is this follower's.
        clock: Seconds, from anywhere.
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
        self.put = self.failed = 0
        self._storage = storage
        self._owns = owns
        self._clock = clock
        self._told: dict[str, _LastMark] | None = None
        self._round = -math.inf
        self._listed: tuple[Listing, dict[str, int]] | None = None

    def found(self) -> dict[str, int]:
        """Writer -> the row at which the marks that stand say to go on."""
        return {writer: told.mark.row for writer, told in self._known().items() if told.mark is not None}

    def _known(self) -> dict[str, _LastMark]:
        """What stands; marks of an earlier follower of this name are gone on from.

        Raises:
            UnsafeData: One has the largest number that there may be: not one of ours.
        """
        if self._told is None:
            told = {}
            for writer, marks in list_marks(self._storage).items():
                own = {path: mark for path, mark in marks.items() if mark.follower == self.markers.name}
                if own and self._owns(writer):
                    (mark,) = newest(own.values()).values()
                    if mark.number >= MAX_ROW:
                        raise UnsafeData(
                            f"no mark of follower {self.markers.name} could count after this one: remove "
                            "it, or take another name",
                            uri=self._storage.uri_of(mark_path(writer, mark)),
                        )
                    now = self._clock()
                    told[writer] = _LastMark(mark, mark.number + 1, now, [*own], since=now)
            self._told = told
        return self._told

    @property
    def wait(self) -> float:
        """Seconds until the next round may be."""
        return max(self._round + self.markers.every_seconds - self._clock(), 0.0)

    def tell(self, rows: Mapping[str, int], listing: Listing, total: int | None) -> None:
        """Put the marks that are due.

        Args:
            rows: The cursors: writer -> next row.
            listing: What was listed last.
            total: Rows that the follower's writers may have, all together; None: as many as they like.
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
                ceiling = told.ceiling  # It went over by a part of a batch, and gets no more now.
            if self._is_due(told, growing, row, ceiling):
                due.append((writer, row, ceiling))
        self._put_all(due)

    def tell_all(self, rows: Mapping[str, int]) -> None:
        """Put every cursor that has moved, whatever the time: the follower ends."""
        due = []
        for writer, told in self._known().items():
            row = rows.get(writer, 0)
            if told.mark is not None and told.mark.row != row:
                due.append((writer, row, told.mark.ceiling))
        self._put_all(due)

    def _growing(self, known: dict[str, _LastMark], listing: Listing) -> dict[str, Growing]:
        """This follower's writers, also those that have no row yet."""
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
                # One that has had nothing left to write since cannot have stored anything.
                is_idle=told.ceiling > stored and now - told.since > self.markers.idle_seconds,
            )
        return found

    def _stored(self, listing: Listing) -> dict[str, int]:
        """This follower's writers -> rows that they have stored; looked up once for each listing."""
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
        """Whether a writer is to hear something."""
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
        # A follower that began again at an earlier state is behind its marks.
        return grown >= self.markers.every_rows or row < mark.row

    def _put_all(self, due: list[tuple[str, int, int]]) -> None:
        """Put marks, (writer, row, ceiling) each, side by side where that helps."""
        for _ in each(self._storage, lambda one: self._put(*one), due):
            pass

    def _put(self, writer: str, row: int, ceiling: int) -> None:
        """Put one mark, then remove those before it."""
        told = self._known()[writer]
        mark = Mark(follower=self.markers.name, number=told.number, row=row, ceiling=ceiling)
        old, told.number = told.paths, told.number + 1
        told.paths = [*old, mark_path(writer, mark)]  # One that failed may be there all the same.
        try:
            put_mark(self._storage, writer, mark)
        except PublishError as error:
            self.failed += 1
            logger.warning("writer %s does not hear how far the follower is: %s", writer, error)
            return
        self.put += 1
        if mark.ceiling > told.ceiling:
            told.since = self._clock()
        told.mark, told.at = mark, self._clock()
        for path in old:
            try:
                self._storage.remove(path)
            except (RlioError, OSError) as error:
                logger.info("an old mark stays until the next one is put: %s", error)
            else:
                told.paths.remove(path)
