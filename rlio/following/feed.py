"""`Feed`: a background thread that puts the rows of a growing data set into a ring, within limits.

One lock guards inserts and draws, and a row counts as put in at the moment it can be drawn. The account of
both is therefore right at every step, and a saved state belongs to one moment.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator

from rlio.catalog.listing import Listing, list_shards
from rlio.errors import ClosedError, EndOfData, RlioError
from rlio.following.follow import FollowPass, Taken
from rlio.following.markers import MarkKeeper
from rlio.following.ring_rows import RingRows
from rlio.following.samples_per_insert import NO_BOUND, Account
from rlio.following.state import FollowState
from rlio.replay.store import ReplayStore
from rlio.storage.failures import is_permanent
from rlio.storage.filesystem import Storage
from rlio.support.forks import Owner

__all__ = ["Feed"]

logger: logging.Logger = logging.getLogger("rlio")

# Rows that are put in at once; also the most that a draw waits for.
_AT_ONCE = 4096
# Seconds that closing waits for a store that hangs; the thread then ends when the store answers.
_LAST_SECONDS = 10.0


class Feed:
    """Takes rows and puts them into a ring, in a separate thread; draws are made under its lock.

    A store that does not answer is retried; `outage` holds its error meanwhile. Any other error stays in
    `failure` until a caller has raised it; then the same rows are tried again.

    Args:
        storage: The root.
        follow: Gives the rows; its position is that of ``state``.
        store: The ring.
        account: Counts rows put in and drawn.
        state: The initial state; updated with every row.
        keeper: Puts the progress marks; None: no marks.
        poll_seconds: Least seconds between two listings while no rows are available.
    """

    def __init__(
        self,
        storage: Storage,
        follow: FollowPass,
        store: ReplayStore,
        account: Account,
        state: FollowState,
        *,
        keeper: MarkKeeper | None,
        poll_seconds: float,
    ) -> None:
        #: Guards everything here and the ring; notified after inserts and draws, and at the end.
        self.changed: threading.Condition = threading.Condition()
        self.store = store
        self.account = account
        self.state = state
        self.ring: RingRows = RingRows()
        self.follow = follow
        self.keeper = keeper
        #: Units drawn so far.
        self.draws: int = state.draws
        #: Whether every writer is closed and all their rows were put in.
        self.complete: bool = False
        self.failure: BaseException | None = None
        self.outage: OSError | None = None
        self.closing: bool = False
        self._storage = storage
        self._poll_seconds = poll_seconds
        self._thread: threading.Thread | None = None
        self.owner: Owner = Owner()
        # Rows that were taken but could not be put in.
        self._pending: Taken | None = None
        self._look_at = 0.0
        # The last listing, made here or by the pass, and its time; and the pass's listing at that time.
        self._listing = self._listing_of_pass = follow.listing
        self._listed_at = -math.inf

    def start(self) -> None:
        """Start the thread, unless it has started or was stopped."""
        with self.changed:
            if self._thread is None and not self.closing:
                # A daemon, because the interpreter waits for other threads before any code can end them.
                self._thread = threading.Thread(target=self._run, name="rlio-feed", daemon=True)
                self._thread.start()

    def refill(self, rows: Iterator[Taken]) -> int:
        """Put rows back into the ring without counting them again; return how many rows the ring holds."""
        for taken in rows:
            self.store.append(taken.batch, writer=taken.writer)
            self.ring.add(taken.writer, taken.first, taken.batch.agent_steps())
            self.ring.keep(len(self.store))
        return len(self.ring)

    def raise_failure(self) -> None:
        """Raise the thread's error; the thread then retries. Call under the lock."""
        if self.closing:
            raise ClosedError("the reader was closed while it waited for rows")
        if self.failure is not None:
            failure, self.failure = self.failure, None
            self.changed.notify_all()
            raise failure

    def stop(self) -> None:
        """Wake all waiters and stop the thread."""
        if not self.owner.is_here:
            return  # A fork has no such thread, and its copy of the lock may never be released.
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def close(self) -> None:
        """End the thread after it has put its last marks. May be called again."""
        if not self.owner.is_here:
            return
        self.stop()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LAST_SECONDS)
            if thread.is_alive():
                logger.warning("%s does not answer: following ends when it does", self._storage.uri)
                return
        self.follow.close()

    # ---- the thread ----

    def _run(self) -> None:
        while not self.closing:
            try:
                seconds = self._step()
                self.outage = None
            except OSError as error:
                if is_permanent(error):
                    self._fail(error)
                    continue
                self.outage = error
                seconds = self._poll_seconds
                logger.warning("%s does not answer, and is retried: %s", self._storage.uri, error)
                # All other errors are raised by the next draw.
            except BaseException as error:
                self._fail(error)
                continue
            if seconds:
                self._rest(seconds)
        if self.keeper is not None:
            try:
                self.keeper.tell_all(self.state.rows)
            except (RlioError, OSError) as error:
                logger.warning("the last marks of progress could not be put: %s", error)

    def _rest(self, seconds: float) -> None:
        """Wait for some seconds, or until there is room if there was none."""
        with self.changed:
            was_full = not self._room()
            self.changed.wait_for(lambda: self.closing or (was_full and self._room() > 0), seconds)

    def _fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = error
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.closing or self.failure is None)

    def _room(self) -> int:
        """Rows that may be put in now."""
        return 0 if self.complete else min(self.account.may_insert, _AT_ONCE)

    def _step(self) -> float:
        """Put in available rows as allowed, and the due marks; return the seconds until the next step."""
        with self.changed:
            room = self._room()
        took = room > 0 and self._take(room)
        if self.keeper is not None and not self.keeper.wait:
            self._tell(self.keeper)
        if took:
            return 0.0
        waits = [self._poll_seconds]
        if room and not self.complete:
            waits.append(max(self._look_at - time.monotonic(), 0.001))
        if self.keeper is not None:
            waits.append(max(self.keeper.wait, 0.001))
        return min(waits)

    def _take(self, room: int) -> bool:
        """Take rows and put them in; return whether there were any."""
        if self._pending is None:
            if time.monotonic() < self._look_at:
                return False
            try:
                self._pending = self.follow.take_now(room)
            except EndOfData:
                with self.changed:
                    self.complete = True
                    self.changed.notify_all()
                return False
            if self._pending is None:
                # Counts trimmed or damaged last rows; otherwise their writer would wait for them to be taken.
                with self.changed:
                    self.state.pass_over(self.follow.reached)
                self._look_at = time.monotonic() + self.follow.pause
                return False
        taken = self._pending
        with self.changed:
            self.store.append(taken.batch, writer=taken.writer)
            rows = taken.batch.agent_steps()
            self.account.insert(rows)
            self.state.take(taken.writer, taken.first, rows)
            self.ring.add(taken.writer, taken.first, rows)
            self.ring.keep(len(self.store))
            self.changed.notify_all()
        self._pending = None
        return True

    def _tell(self, keeper: MarkKeeper) -> None:
        """Put the marks that are due."""
        with self.changed:
            rows = dict(self.state.rows)
            most = self.account.limits.most_inserted(self.account.drawn)
            # Writers count all of their rows; the account counts only those that were put in.
            total = None if most >= NO_BOUND else most + sum(self.state.missed.values())
        keeper.tell(rows, self._recent(), total)

    def _recent(self) -> Listing:
        """A listing that is not older than the pause between two polls."""
        now = time.monotonic()
        if self.follow.listing is not self._listing_of_pass:
            self._listing = self._listing_of_pass = self.follow.listing
            self._listed_at = now
        elif now - self._listed_at > self.follow.pause:
            self._listing, self._listed_at = list_shards(self._storage), now
        return self._listing
