"""`PacedWriter`: a writer that waits for followers of the data set if they are too far behind.

A follower (`rlio.FollowingReplay` with ``ratio.min``) puts progress marks beside the data, which state how
many rows each writer may have. This writer reads its own marks before it writes more; it contacts no other
process.

Example:
    >>> import rlio
    >>> stored = rlio.ParquetWriter("memory://paced-example")
    >>> with rlio.PacedWriter(stored, pace=rlio.Pace(stale_seconds=0)) as writer:
    ...     writer.write(rlio.SampleBatch(rewards=[1.0, 2.0]))  # There is no follower.
    >>> writer.unheeded, writer.rows_received
    (1, 2)
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rlio.batch import Batch
from rlio.errors import ClosedError, OptionError, PublishError, RlioError, excerpt
from rlio.following.marks import Mark, list_marks, newest
from rlio.storage.clients import within
from rlio.storage.filesystem import Storage
from rlio.support.forks import Owner
from rlio.support.options import check_count, check_seconds, expected, set_options
from rlio.support.words import counted
from rlio.writer import OutputWriter

if TYPE_CHECKING:
    from rlio.writers.recovery import WriterLog

__all__ = ["Pace", "PacedWriter", "Stored"]

logger: logging.Logger = logging.getLogger("rlio")

# Seconds that one reading of the marks may take: a store that hangs counts as silent.
_LOOK_SECONDS = 10.0
# Readings of the marks in `stale_seconds`, for a writer that continues without its followers.
_LOOKS = 4


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a writer waits for followers.

    Attributes:
        stale_seconds: Seconds without a new mark after which a follower counts as dead, and the writer stops
            waiting for it; also the seconds to wait for the first follower. Use more than twice the
            followers' ``heartbeat_seconds``.
        poll_seconds: Seconds between two readings of the marks, while waiting.
        ahead: Rows that may be written before the first mark of any follower.

    Raises:
        OptionError: A value is out of bounds.
    """

    stale_seconds: float = 60.0
    poll_seconds: float = 0.5
    ahead: int = 0

    def __post_init__(self) -> None:
        set_options(
            self,
            stale_seconds=check_seconds("Pace.stale_seconds", self.stale_seconds),
            poll_seconds=check_seconds("Pace.poll_seconds", self.poll_seconds, least=1e-3),
            ahead=check_count("Pace.ahead", self.ahead, least=0, of="rows"),
        )


@runtime_checkable
class Stored(Protocol):
    """Attributes of the wrapped writer that a `PacedWriter` needs, besides those of every writer."""

    @property
    def storage(self) -> Storage:
        """The data set's folder."""

    @property
    def writer_id(self) -> str:
        """The id under which its rows are stored there."""


@dataclass
class _Follower:
    """A follower, as its marks show it.

    Attributes:
        mark: The newest mark.
        since: When the mark was first seen.
        heeded: Whether the writer waits for this follower.
    """

    mark: Mark
    since: float
    heeded: bool = True


class PacedWriter(OutputWriter):
    """Passes every batch to ``writer``, which it owns, as soon as the followers allow it.

    `write` passes a batch on when the writer's rows are below the ceiling of every live follower. A batch is
    never cut, so the rows may exceed the ceiling by less than one batch. Otherwise `write` flushes the rows
    so far, so followers see them, and reads the marks until they allow it to continue.

    A follower whose mark has not changed during ``pace.stale_seconds`` of waiting counts as dead: the writer
    ignores it until it puts a new mark. This is logged as a warning, and counted in `unheeded`. The same
    applies if no follower ever put a mark.

    A store that is down counts as a silent follower. It causes no error and no loss here: ``writer`` keeps
    the rows by its own rules.

    Args:
        writer: A `rlio.ParquetWriter`, a `rlio.JsonWriter`, or another that is `Stored`; closed with this
            one.
        pace: How to wait.
        clock: Returns seconds, from any origin.

    Several threads may call `write`; they take turns. `close` ends a waiting `write` with a `ClosedError`:
    its batch was not taken.

    Raises:
        OptionError: ``writer`` is not such a writer.
    """

    def __init__(
        self,
        writer: OutputWriter,
        *,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(writer, OutputWriter) or not isinstance(writer, Stored):
            raise OptionError(
                f"PacedWriter takes a writer of a data set, such as ParquetWriter, not {excerpt(writer)}: "
                "wrap that writer, and pass the PacedWriter to writers that combine others"
            )
        self.writer = writer
        self.pace: Pace = expected(pace, Pace, "pace")
        self.durable: bool = writer.durable
        self.patience: float | None = writer.patience
        #: Calls of `write` that waited.
        self.waits: int = 0
        #: How often it continued without a follower that was silent for ``stale_seconds``, or that never
        #: came.
        self.unheeded: int = 0
        self._waited = 0.0
        self._clock = clock
        self._storage = writer.storage
        #: The id under which the rows are stored.
        self.writer_id: str = writer.writer_id
        self._followers: dict[str, _Follower] = {}
        # Whether any follower has put a mark; whether the writer stopped waiting for the first one.
        self._heard = self._alone = False
        self._next_look = -math.inf
        # Held by the current write(). Not the lock of the base class, because close() needs that one.
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._owner = Owner()
        super().__init__()

    def _describe(self) -> Iterator[str]:
        yield counted(self.waits, "wait")
        yield repr(self.writer)

    def write(self, batch: Batch) -> None:
        """Take a batch as soon as the followers allow it; see the class and `OutputWriter.write`.

        Raises:
            ClosedError: After `close`, or `close` was called while this call waited; nothing is taken.
        """
        # Another thread may hold `_turn`, and a forked child does not have that thread.
        self._owner.check(type(self).__name__, error=PublishError, uri=self._storage.uri)
        with self._turn:
            if not self.closed:
                self._wait()
            super().write(batch)

    def close(self) -> None:
        """Flush and release; a waiting `write` ends with a `ClosedError`."""
        self._closing.set()
        super().close()

    # ---- waiting ----

    def _wait(self) -> None:
        """Return when more rows may be written."""
        if self._may_write():
            self._look_around()
            return
        began = self._clock()
        try:
            self._look()
            if not self._may_write():
                self.waits += 1
                self._show()
            while not self._may_write():
                self._give_up(began)
                if self._may_write():
                    break
                if self._closing.wait(self.pace.poll_seconds):
                    raise ClosedError(
                        "the writer was closed while write() waited for followers: the batch was not taken"
                    )
                self._look()
        finally:
            self._waited += self._clock() - began

    def _may_write(self) -> bool:
        """Whether the rows are below the ceilings of all heeded followers."""
        rows = self.writer.rows_received
        if not self._heard:
            return self._alone or rows < self.pace.ahead
        return all(rows < found.mark.ceiling for found in self._followers.values() if found.heeded)

    def _look_around(self) -> None:
        """Read the marks now and then, to find a new or returned follower."""
        unheeded = any(not found.heeded for found in self._followers.values())
        if (unheeded or self._alone) and self._clock() >= self._next_look:
            self._look()

    def _look(self) -> None:
        """Read this writer's marks."""
        self._next_look = self._clock() + self.pace.stale_seconds / _LOOKS
        try:
            marks = self._listed()
        except (OSError, RlioError) as error:
            logger.warning("the marks of writer %s could not be read: %s", self.writer_id, error)
            return
        for name, mark in newest(marks).items():
            known = self._followers.get(name)
            if known is None or known.mark != mark:
                if known is None or not known.heeded:
                    logger.info("writer %s waits for follower %s", self.writer_id, name)
                self._followers[name] = _Follower(mark, self._clock())
                self._heard, self._alone = True, False

    def _listed(self) -> list[Mark]:
        seconds = None if self._storage.is_local else _LOOK_SECONDS
        found = within(seconds, lambda: list_marks(self._storage, self.writer_id))
        return [*found.get(self.writer_id, {}).values()]

    def _give_up(self, began: float) -> None:
        """Stop waiting for followers that were silent for too long while this call waited."""
        now, patience = self._clock(), self.pace.stale_seconds
        if not self._heard:
            if now - began >= patience:
                self._alone = True
                self._go_on("no follower of the data set has put a mark")
            return
        for name, found in self._followers.items():
            is_bound = self.writer.rows_received >= found.mark.ceiling
            if found.heeded and is_bound and now - max(found.since, began) >= patience:
                found.heeded = False
                self._go_on(f"follower {name} has put no mark")

    def _go_on(self, why: str) -> None:
        self.unheeded += 1
        logger.warning(
            "%s for %g s: writer %s in %s continues without it",
            why,
            self.pace.stale_seconds,
            self.writer_id,
            self._storage.uri,
        )

    def _show(self) -> None:
        """Make the rows so far visible, because followers may wait for them."""
        try:
            self.writer.flush()
        except PublishError as error:
            logger.warning("rows of writer %s wait for the store: %s", self.writer_id, error)

    # ---- hooks of OutputWriter ----

    @property
    def rows_published(self) -> int:
        """Rows that every reader can see."""
        return self.rows_received - (self.writer.rows_received - self.writer.rows_published)

    @property
    def seconds_waited(self) -> float:
        """Seconds that `write` has waited: for followers, and for room in the log."""
        return self._waited + self.writer.seconds_waited

    @property
    def logs(self) -> tuple[WriterLog, ...]:
        """The write-ahead log of the wrapped writer; empty if it has none."""
        return tuple(getattr(self.writer, "logs", ()))

    def _write(self, batch: Batch) -> None:
        self.writer.write(batch)

    def _flush(self) -> None:
        self.writer.flush()

    def _close(self) -> None:
        self.writer.close()
