"""`FollowingReplay`: a replay buffer that follows a data set while others write it, without a server.

Committed rows enter a ring, each once; draws come from the ring. Limits bound how often rows are drawn for
each inserted row, and both sides keep them: a draw waits for rows, and writers opened as `rlio.PacedWriter`
wait for draws.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://following-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((100, 4)), t=np.arange(100)))
    >>> ratio = rlio.SamplesPerInsert(max=2, min_size=60)
    >>> with rlio.FollowingReplay(
    ...     "memory://following-example", capacity=1000, batch_size=32, ratio=ratio, seed=0
    ... ) as replay:
    ...     print([len(batch) for batch in replay], replay.counters)
    [32, 32, 16] FollowCounters(inserted=100, drawn=80, in_ring=100)
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Unpack

import numpy as np

from rlio.batch import Batch
from rlio.errors import EndOfData, OptionError, StateError, WaitTimeout, excerpt
from rlio.following.feed import Feed
from rlio.following.follow import FollowPass
from rlio.following.markers import Markers, MarkKeeper
from rlio.following.ring_rows import reread
from rlio.following.samples_per_insert import Account, SamplesPerInsert
from rlio.following.state import FollowState, merge_states
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.query.order import rank_of
from rlio.query.positions import check_seed, draw_seed
from rlio.read_options import ReadOptions
from rlio.reader import InputReader, JsonState, Unit
from rlio.replay.draw_options import LiveDrawKeywords, draw_of
from rlio.replay.priorities import Prioritised
from rlio.replay.samplers import PrioritisedSampler, UniformSampler
from rlio.replay.store import ReplayStore
from rlio.source.snapshot import rows_waiting
from rlio.storage.filesystem import Storage
from rlio.support.forks import Owner
from rlio.support.options import check_count, check_number, checked_keywords, expected
from rlio.support.words import counted

__all__ = ["FollowCounters", "FollowingReplay"]

logger: logging.Logger = logging.getLogger("rlio")

# A longer wait is logged, each time that this many seconds have passed.
_SILENT_SECONDS: Final = 10.0


@dataclass(frozen=True)
class FollowCounters:
    """Counts of a `FollowingReplay` at one moment.

    Attributes:
        inserted: Rows that were put into the ring: committed rows of its slots, each counted once.
        drawn: Rows that were drawn.
        in_ring: Rows in the ring.
    """

    inserted: int
    drawn: int
    in_ring: int


class FollowingReplay(InputReader):
    """Draws from the newest rows of a growing data set; see `SamplesPerInsert` for the limits.

    A background thread takes the committed rows of every writer, in order and exactly once. A draw takes rows
    of the ring, uniformly and with replacement (or by priority). It waits if the limits do not allow it for
    the rows put in so far. Drawn rows are counted: one for each n-step transition, ``length`` for each
    sequence (without ``burn_in``).

    The data ends once every writer is closed (sealed), all rows were put in, and ``ratio.max`` allows no more
    draws; without ``max`` it never ends. Recovery closes a writer that was killed: when the next writer opens
    on that machine, or by `rlio recover`. Until then draws wait, for ``timeout``.

    Writers are divided among ``slots`` slots, and slots among the ranks of ``shard``. Each rank has its own
    limits and counters. `merge_states` makes one state of those of all ranks, for any number of ranks.

    It is not `replayable`, because the times at which rows arrive cannot be repeated. A reader that loads a
    state puts in exactly the rows that had not been put in, each once; has the same rows in its ring, except
    those that were trimmed or damaged since (`lost`), and the same counters; and never draws with the same
    random numbers again. Priorities start again. docs/design/following.md has the details.

    A store that is down is retried; meanwhile draws continue from the ring as far as the limits allow.
    `sample` raises errors that a retry cannot fix (rights, damage, missing rows).

    Several threads may call it: see `rlio.InputReader`. `state_dict` does not wait for a `sample`
    that waits for rows.

    Args:
        root: Folder of the data set: a path or any fsspec URL; it need not exist yet.
        capacity: Rows that the ring keeps.
        folder: Keep them in mapped files of this folder, on a local disk; None: in memory. See `ReplayStore`.
        batch_size: Units of a batch.
        ratio: How often rows are drawn for each row put in.
        seed: Seed of the draws, combined with the rank; None draws one from the OS, logs it and keeps it in
            the state.
        prioritised: Draw by priority: see `ReplayStore.prioritised`, and `sampler` for `update_priorities`.
        markers: Whether, and when, to put progress marks beside the data, for writers that wait, and for its
            own restart; required if ``ratio.min`` is given. None: none.
        shard: (rank, world).
        slots: Number of parts that writers are divided into; the same for all ranks, and for all states.
        timeout: Seconds that `sample` waits for rows; None: no limit.
        poll_seconds: Least seconds between two listings while no rows are available.
        on_error: What to do with damaged or missing rows: "raise", or "skip" and count them.
        drop_last: Drop the last batch if it is shorter.
        missing: "error", or "fill" columns that only some writers have with zeros.
        storage_options: For fsspec.
        limits: Limits on the data's demands.
        draw: What to draw: ``columns`` (None: all), and ``draw`` (not `rlio.WholeEpisodes`), ``policy``,
            ``filter``, ``views`` and ``indexes`` as described at `rlio.DatasetReader`.

    Raises:
        OptionError: Options are illegal or contradict each other; at `sample`: the data set does not count
            in rows (sequences, several agents), or ``filter`` drops all rows that ``ratio.min`` allows in.
        WaitTimeout: At `sample`: no draw is allowed after ``timeout`` seconds.
        CorruptData: At `sample`: rows are damaged. Call it again to retry.
        OSError: At opening, or loading a state: the store did not answer. Load the state again.
    """

    replayable = False

    @checked_keywords
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        capacity: int,
        folder: str | os.PathLike[str] | None = None,
        batch_size: int = 256,
        ratio: SamplesPerInsert | None = None,
        seed: int | None = None,
        prioritised: Prioritised | None = None,
        markers: Markers | None = None,
        shard: tuple[int, int] = (0, 1),
        slots: int = 64,
        timeout: float | None = None,
        poll_seconds: float = 1.0,
        on_error: Literal["raise", "skip"] = "raise",
        drop_last: bool = False,
        missing: Literal["error", "fill"] = "error",
        storage_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        **draw: Unpack[LiveDrawKeywords],
    ) -> None:
        self.ratio: SamplesPerInsert = expected(ratio, SamplesPerInsert, "ratio")
        self._draw = draw_of(draw)
        self._draw.check_live()
        if self._draw.unit == "episodes":
            raise OptionError(
                "FollowingReplay(draw=rlio.WholeEpisodes()): limits count rows, and the rows of an episode "
                "are unknown before it is drawn; pass draw=rlio.Sequences(length)"
            )
        self.unit: Unit = self._draw.unit
        self._unit_rows = 1 if self._draw.sequences is None else self._draw.sequences.length
        self._options = ReadOptions(
            batch_size=batch_size, seed=seed, shard=shard, on_error=on_error, drop_last=drop_last
        )
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.timeout = timeout
        self._capacity, self._folder = capacity, folder
        self._slots = slots
        self._check()
        self._prioritised: Prioritised | None = (
            None if prioritised is None else expected(prioritised, Prioritised, "prioritised")
        )
        self._markers = markers
        self._missing: Literal["error", "fill"] = missing
        self._poll_seconds = poll_seconds
        self._storage = Storage.open(root, storage_options=storage_options, limits=limits)
        # Marks need not survive a power failure.
        self._marks_storage = Storage.open(root, storage_options=storage_options, sync=False, limits=limits)
        #: Seed of the draws, the same for all ranks.
        self.seed: int = draw_seed(self._storage.uri) if seed is None else seed
        #: Rows that a loaded state could not restore to the ring, because they were trimmed or damaged since.
        self.lost: int = 0
        self._owner = Owner()
        self._open(self._beginning())

    def _check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            OptionError: Two options contradict each other.
        """
        ratio, capacity, slots = self.ratio, self._capacity, self._slots
        self._slots = check_count("slots", slots, least=self._options.shard[1], of="slots, one a rank")
        self.timeout = check_number("timeout", self.timeout, least=0, of="seconds", none="no limit")
        least = max(ratio.min_size, self._unit_rows)
        self._capacity = check_count(
            "capacity", capacity, least=least, of="rows, those of min_size and of a unit"
        )
        ratio.check_batch(self.batch_size * self._unit_rows)

    def _beginning(self) -> FollowState:
        """The initial state of a reader that loads none.

        Raises:
            OptionError: Writers must wait, but there are no marks to inform them.
        """
        rank, world = self._options.shard
        state = FollowState(
            seed=self.seed, slots=self._slots, ranks=(rank,), world=world, draw=self._draw.to_json()
        )
        if self._markers is None and self.ratio.min is not None:
            raise OptionError(
                f"{self.ratio}: writers learn about min from progress marks: pass "
                "markers=rlio.Markers('learner')"
            )
        if self._markers is not None and self._markers.resume:
            state.rows = self._keeper(self._markers).found()
            state.missed = {writer: row for writer, row in state.rows.items() if row}
        return state

    def _keeper(self, markers: Markers) -> MarkKeeper:
        # A function outside this reader: a bound method in the thread would keep the reader alive.
        rank, world, slots = *self._options.shard, self._slots
        return MarkKeeper(
            self._marks_storage, markers, lambda writer: rank_of(writer, world=world, slots=slots) == rank
        )

    def _open(self, state: FollowState) -> None:
        """Open at a state, and refill the ring with the rows that it names."""
        self.seed = state.seed
        follow = FollowPass(
            self._storage,
            ReadOptions(shard=self._options.shard, on_error=self._options.on_error),
            self._missing,
            idle_timeout=None,
            poll_seconds=self._poll_seconds,
            slots=self._slots,
        )
        follow.seek({**follow.position(), "rows": dict(state.rows), "turn": state.turn})
        #: The ring; only this reader appends rows.
        self.store: ReplayStore = ReplayStore(self._capacity, folder=self._folder)
        self._feed = Feed(
            self._storage,
            follow,
            self.store,
            Account(self.ratio, inserted=state.inserted, drawn=state.drawn),
            state,
            keeper=None if self._markers is None else self._keeper(self._markers),
            poll_seconds=self._poll_seconds,
        )
        self._finalizer = weakref.finalize(self, self._feed.close)
        ranges = state.ring_ranges(self._capacity)
        found = self._feed.refill(reread(self._storage, ranges, self._options, self._missing))
        self.lost = sum(len(rows) for rows in ranges.values()) - found
        #: Draws from the ring; a prioritised sampler takes errors through `update_priorities`.
        self.sampler: UniformSampler | PrioritisedSampler = self._make_sampler(state.draws)

    def _make_sampler(self, draws: int) -> UniformSampler | PrioritisedSampler:
        """A sampler that continues after the units drawn so far."""
        rank = self._options.shard[0]
        if self._prioritised is None:
            seed = int(np.random.SeedSequence([self.seed, rank]).generate_state(1, np.uint64)[0])
            uniform = UniformSampler(self.store, self._draw, batch_size=self.batch_size, seed=seed)
            uniform.drawn = draws
            return uniform
        seed = int(np.random.SeedSequence([self.seed, rank, draws]).generate_state(1, np.uint64)[0])
        return PrioritisedSampler(
            self.store, self._draw, self._prioritised, batch_size=self.batch_size, seed=seed
        )

    # ---- counters ----

    def _describe(self) -> Iterator[str]:
        account = self._feed.account
        yield repr(self._storage.uri)
        yield f"{counted(account.inserted, 'row')} inserted, {account.drawn:,} drawn"
        yield f"capacity={self._capacity}"
        yield from self._options.given()

    @property
    def counters(self) -> FollowCounters:
        """Rows put in and drawn, at one moment.

        Raises:
            ClosedError: In a forked process.
        """
        self._check_owner()
        feed = self._feed
        with feed.changed:
            return FollowCounters(feed.account.inserted, feed.account.drawn, len(feed.ring))

    @property
    def skipped(self) -> int:
        """Rows lost to damage and holes, with ``on_error="skip"``."""
        return self._feed.follow.skipped

    # ---- draws ----

    def _next(self) -> Batch:
        return self._take(self.batch_size)

    def _take(self, n: int) -> Batch:
        self._check_owner()
        self._check_size(n)
        feed = self._feed
        feed.start()
        until = None if self.timeout is None else time.monotonic() + self.timeout
        with feed.changed:
            while True:
                feed.raise_failure()
                units = self._drawable(n)
                batch = self._drawn(units) if units else None
                if batch is not None:
                    return batch
                if feed.complete:
                    why = self._why_none() if units else self._why()
                    raise EndOfData(f"{self._storage.uri} was followed to its end, and {why}")
                if units and not feed.account.may_insert:
                    raise self._standstill()
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise self._overdue() from feed.outage
                if not feed.changed.wait(_SILENT_SECONDS if left is None else min(left, _SILENT_SECONDS)):
                    logger.info("a follower of %s waits, as %s", self._storage.uri, self._why())

    def _check_size(self, n: int) -> None:
        """Refuse a batch size for which the limits would never leave room."""
        if n != self.batch_size:
            self.ratio.check_batch(n * self._unit_rows)

    def _drawable(self, n: int) -> int:
        """Units that may be drawn now: ``n``; at the end, the rest; or 0."""
        allowed = self._feed.account.may_draw // self._unit_rows
        if allowed >= n:
            return n
        return allowed if self._feed.complete and not self.drop_last else 0

    def _drawn(self, units: int) -> Batch | None:
        """Draw units from the ring, and count them; None: the ring has none that can be drawn."""
        try:
            batch = self.sampler.sample(units)
        except EndOfData:
            return None
        self._feed.account.draw(units * self._unit_rows)
        self._feed.draws += units
        self._feed.changed.notify_all()
        return batch

    def _why(self) -> str:
        account = self._feed.account
        return (
            f"{account.may_draw} rows may be drawn: {account.inserted} were put in and {account.drawn} drawn "
            f"so far, with {self.ratio}"
        )

    def _why_none(self) -> str:
        return f"none of the {len(self.store)} rows in the ring can be drawn (see filter)"

    def _standstill(self) -> OptionError:
        return OptionError(
            f"{self._why_none()}, and {self.ratio} "
            "allows no more in before one is drawn: use a larger error_buffer or min_size",
            uri=self._storage.uri,
        )

    def _overdue(self) -> WaitTimeout:
        outage = self._feed.outage
        waiting = "" if self._feed.account.inserted else rows_waiting(self._storage)
        store = "" if outage is None else f"; the store does not answer ({outage})"
        return WaitTimeout(
            f"no batch within {self.timeout:g} s, because {self._why()}{store}{waiting}. Only committed "
            "rows count: check that writers write, and flush or roll often enough; call sample() to wait "
            "again",
            uri=self._storage.uri,
        )

    # ---- state ----

    def _check_owner(self) -> None:
        self._owner.check(type(self).__name__, uri=self._storage.uri)

    def state_dict(self) -> JsonState:
        """See `InputReader.state_dict`. Does not wait for a `sample` that waits for rows."""
        return self._whole_state()

    def _position(self) -> JsonState:
        self._check_owner()
        feed = self._feed
        with feed.changed:
            drawn, ring = feed.account.drawn, feed.ring.firsts()
            return replace(feed.state, draws=feed.draws, drawn=drawn, ring=ring).to_json()

    def _seek(self, position: JsonState) -> None:
        self._check_owner()
        state = FollowState.from_json(position)
        if state.slots != self._slots:
            raise StateError(
                f"the state has {state.slots} slots and this reader has {self._slots}: open the reader with "
                f"slots={state.slots}",
                uri=self._storage.uri,
            )
        check_seed(position, self._options.seed, uri=self._storage.uri)
        draw = self._draw.to_json()
        if state.draw not in (None, draw):
            raise StateError(
                f"state['position']['draw'] is {excerpt(state.draw)} but this reader has {excerpt(draw)}: "
                "open the reader with the same options",
                uri=self._storage.uri,
            )
        state = replace(state.share(*self._options.shard, uri=self._storage.uri), draw=draw)
        self._shut()
        self._open(state)

    #: Merges the states of all ranks into one for any number of ranks; see `rlio.following.state`.
    merge_states: staticmethod[[Sequence[JsonState]], JsonState] = staticmethod(merge_states)

    # ---- the end ----

    def interrupt(self) -> None:
        """Wake a waiting `sample`; see `InputReader`."""
        self._feed.stop()

    def _shut(self) -> None:
        self._finalizer.detach()
        self._feed.close()
        self.store.close()

    def _close(self) -> None:
        self._shut()
