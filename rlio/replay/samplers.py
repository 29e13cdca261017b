"""Readers over a store: uniform and prioritised draws with replacement, and epochs without.

All are `InputReader`s: they mix with each other and with any other reader (`rlio.MixedInput`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import EndOfData, OptionError, StateError, excerpt
from rlio.query.filters import advice_for
from rlio.query.order import UniformDraws
from rlio.query.positions import check_seed, draw_seed
from rlio.read_options import ReadOptions
from rlio.reader import Endless, InputReader, JsonState, Unit
from rlio.replay.draws import BATCH_INDEXES, Draw, RowUnits, Units
from rlio.replay.epochs import OWN_BATCH, StorePass, most_at_once
from rlio.replay.priorities import Priorities, Prioritised
from rlio.replay.priority_files import read_priorities, write_priorities
from rlio.replay.table import RowTable, slots_of
from rlio.support.options import check_count
from rlio.support.states import restore_generator, value_in, whole_number, whole_numbers
from rlio.support.turns import Turns

if TYPE_CHECKING:
    from rlio.replay.joint_gather import RowSource
    from rlio.replay.store import ReplayStore

__all__ = ["EpochReader", "PrioritisedSampler", "UniformSampler"]

logger: logging.Logger = logging.getLogger("rlio")


class EpochReader(InputReader):
    """Gives every unit of a store once an epoch; see `ReplayStore.epochs`.

    Several threads may call it: see `rlio.InputReader`.
    """

    def __init__(self, store: ReplayStore, draw: Draw, options: ReadOptions) -> None:
        self._pass = StorePass(store, draw, options)
        _ = self._pass.units  # Refuses an illegal draw here, not at the first batch.
        self.unit: Unit = draw.unit
        self.drop_last: bool = options.drop_last
        # Ranks share batches among them, and the batch size decides how many rows are dropped.
        self.can_read_ahead: bool = options.shard[1] == 1 and not options.drop_last

    def _describe(self) -> Iterator[str]:
        yield repr(self._pass.uri)
        yield self._pass.place
        yield from self._pass.options.given()

    def __len__(self) -> int:
        """Units of one epoch, of all ranks together."""
        return self._pass.total

    @property
    def row_source(self) -> RowSource:
        """The reader's next rows, to be gathered together with rows of other readers."""
        return self._pass

    @property
    def epoch(self) -> int:
        """Number of the epoch in which the next batch begins, from 0."""
        return self._pass.epoch

    @property
    def seed(self) -> int | None:
        """Seed of the order; None: the recorded order."""
        return self._pass.seed

    def _endless(self) -> Endless | None:
        ends = self._pass.options.epochs is not None
        return None if ends else Endless(self._pass.epoch, self._pass.total)

    def _next(self) -> Batch:
        return self._pass.take(None)

    def _take(self, n: int) -> Batch:
        return self._pass.take(n)

    def _position(self) -> JsonState:
        return self._pass.position()

    def _seek(self, position: JsonState) -> None:
        self._pass.seek(position)

    def interrupt(self) -> None:
        """Wake a `sample` that waits for the store to be built; see `InputReader`."""
        self._pass.interrupt()

    def _close(self) -> None:
        self._pass.close()


class _Sampler(InputReader):
    """Draws from the units that a store has at the moment of each draw."""

    def __init__(self, store: ReplayStore, draw: Draw, *, batch_size: int | None, seed: int | None) -> None:
        batch_size = check_count("batch_size", batch_size, least=1, of=draw.unit, none="the default")
        seed = check_count("seed", seed, least=0, none="one from the OS")
        if store.live:
            draw.check_live()
        self.store = store
        self.unit: Unit = draw.unit
        self.batch_size: int = batch_size or OWN_BATCH
        self.seed: int = draw_seed(store.uri) if seed is None else seed
        #: The seed that was given; None: that of a loaded state counts.
        self._given = seed
        self._draw = draw
        self._units: Units | None = None
        self._version = -1
        self._changes = 0
        self._interrupted = False
        # Calls hold the store's lock: each draws rows of one moment, and a fork comes between two of them.
        self._thread_turns = Turns(type(self).__name__, store.lock)

    def _describe(self) -> Iterator[str]:
        yield repr(self.store.uri)
        yield f"batch_size={self.batch_size}"
        yield f"seed={self.seed}"
        if self.unit != "steps":
            yield self.unit

    def _seen(self) -> Units:
        """The current units. The caller holds the store's lock; this waits for the store to be built."""
        self.store.check_open()
        if self._units is None:
            self.store.wait_unless(self._is_interrupted)
        units = self._units
        if units is None or self._version != self.store.version:
            if units is None or self._changes != self.store.changes:
                units = self._units = self.store.units(self._draw)
                self._changes = self.store.changes
            else:
                units.update()
            if units.count:
                self._version = self.store.version
                self._changed()
        if not units.count:
            raise EndOfData(self.store.why_empty(self.unit))
        return units

    def _changed(self) -> None:
        """Called when the store's rows have changed."""

    def _is_interrupted(self) -> bool:
        return self._interrupted

    def interrupt(self) -> None:
        """Wake a `sample` that waits for the store to be built; see `InputReader`."""
        self._interrupted = True
        self.store.wake()

    def _close(self) -> None:
        self.interrupt()  # The lock is free while a call waits.

    def _endless(self) -> Endless | None:
        return Endless(
            0, None, by_epochs=False
        )  # With replacement, a batch may have more units than the store.

    def _next(self) -> Batch:
        return self._take(self.batch_size)

    def _state(self) -> JsonState:
        self.store.wait_unless(self._is_interrupted)
        return {
            "seed": self.seed,
            "draw": self._draw.to_json(),
            "store": self.store.digest,
            "rows": {pid: [table.tail, table.head] for pid, table in self.store.tables.items()},
        }

    def _check_state(self, position: Mapping[str, Any]) -> None:
        """Refuse a state saved over other rows or with other options.

        Raises:
            StateError: The state does not fit.
        """
        ours = self._state()
        for key in ("draw", "store"):
            saved = position.get(key)
            if saved != ours[key]:
                filters = [one.get("filter") if isinstance(one, dict) else None for one in (saved, ours[key])]
                raise StateError(
                    f"state['position'][{key!r}] is {excerpt(saved)} but this sampler has "
                    f"{excerpt(ours[key])}: open the same data with the same options{advice_for(*filters)}",
                    uri=self.store.uri,
                )
        rows = value_in(position, "rows", dict)
        for pid in rows:
            tail, head = whole_numbers(rows, pid, 2, of="state['position']['rows']")
            now = ours["rows"].get(pid, [0, 0])
            if not now[0] <= tail <= head <= now[1]:
                raise StateError(
                    f"the state was saved over rows {tail} to {head - 1} of policy {excerpt(pid)}, but the "
                    f"store has rows {now[0]} to {now[1] - 1}: load the store that was saved with the state",
                    uri=self.store.uri,
                )
        self.seed = check_seed(position, self._given, uri=self.store.uri)


class UniformSampler(_Sampler):
    """Draws units uniformly, with replacement; see `ReplayStore.uniform`.

    Draw i is a pure function of (seed, i, current rows), so the state is a counter.

    Several threads may call it: see `rlio.ReplayStore`.
    """

    def __init__(self, store: ReplayStore, draw: Draw, *, batch_size: int | None, seed: int | None) -> None:
        super().__init__(store, draw, batch_size=batch_size, seed=seed)
        self.replayable: bool = not store.live
        self.can_read_ahead: bool = not store.live
        #: Units drawn so far.
        self.drawn: int = 0
        self._order = UniformDraws(self.seed)
        self._ahead = 1
        self._block: SampleBatch | None = None
        self._cut = 0

    def _describe(self) -> Iterator[str]:
        yield from super()._describe()
        yield f"{self.drawn} drawn"

    def _changed(self) -> None:
        self._block, self._ahead = None, 1

    # ---- as a source of rows for joint gathering: see `rlio.replay.joint_gather` ----

    @property
    def row_source(self) -> RowSource:
        """The reader's next rows, to be gathered together with rows of other readers."""
        return self

    @property
    def row_units(self) -> RowUnits | None:
        """The units, if they are rows of a data set."""
        if self.store.live:
            return None
        self.store.wait_unless(self._is_interrupted)
        if not len(self.store):
            return None
        units = self._seen()
        return units if isinstance(units, RowUnits) and units.count else None

    def peek(self, n: int) -> NDArray[np.int64] | None:
        """The numbers of the next ``n`` units."""
        return self._order.take(self.drawn, self.drawn + n, self._seen().count)

    def advance(self, n: int) -> None:
        """Skip the next ``n`` units, which another component delivered."""
        self._block = None
        self.drawn += n

    def _take(self, n: int) -> Batch:
        units = self._seen()
        if n != self.batch_size:
            self._block = None
        elif self._block is None:
            # Batches are drawn together until an append comes between two of them.
            self._ahead = min(2 * self._ahead, most_at_once(units, self.store.row_bytes, self.batch_size))
            if self._ahead > 1:
                gathered = self._gathered(units, n * self._ahead)
                assert isinstance(gathered, SampleBatch)
                self._block, self._cut = gathered, 0
        block, at = self._block, self._cut
        found = self._gathered(units, n) if block is None else block[at : at + n]
        self.drawn += n
        self._cut = at + n
        if block is not None and self._cut == len(block):
            self._block = None
        return found

    def _gathered(self, units: Units, n: int) -> Batch:
        return units.batch(self._order.take(self.drawn, self.drawn + n, units.count))

    def _position(self) -> JsonState:
        return self._state() | {"drawn": self.drawn}

    def _seek(self, position: JsonState) -> None:
        drawn = whole_number(position, "drawn")
        self._check_state(position)
        self.drawn = drawn
        self._order = UniformDraws(self.seed)
        self._block, self._ahead = None, 1


class PrioritisedSampler(_Sampler):
    """Draws units in proportion to their priorities; see `ReplayStore.prioritised`.

    Batches have the columns ``weights`` (importance weights, float32) and ``batch_indexes`` (int64), which
    `update_priorities` takes. Every row of a sequence or episode has those of its unit. A state holds the
    seed and the counters, not the priorities: use `save` and `load` to keep those. If the priorities do not
    fit a loaded state, the first draw logs a warning.

    Several threads may call it: see `rlio.ReplayStore`.
    """

    replayable = False

    def __init__(
        self,
        store: ReplayStore,
        draw: Draw,
        options: Prioritised,
        *,
        batch_size: int | None,
        seed: int | None,
    ) -> None:
        super().__init__(store, draw, batch_size=batch_size, seed=seed)
        if store.live and (not draw.by_row or draw.filter is not None):
            raise OptionError(
                "prioritised draws from a live store take single or n-step transitions, without a filter: "
                "leave out draw=rlio.Sequences and filter, or draw with uniform()"
            )
        self.options = options
        self._rng = np.random.Generator(np.random.Philox(self.seed))
        self._priorities: Priorities | None = None
        #: For a live store: the rows whose priorities are known, (oldest, next).
        self.span: tuple[int, int] = (0, 0)
        # Draws before the loaded state was saved; None after the first draw.
        self._expected: int | None = None

    def _describe(self) -> Iterator[str]:
        yield from super()._describe()
        yield f"alpha={self.options.alpha}"

    @property
    def priorities(self) -> Priorities:
        """The priorities, by slot: units of a data set, or rows of a live store modulo its capacity."""
        with self.store.lock:
            self._seen()
            assert self._priorities is not None
            return self._priorities

    def _changed(self) -> None:
        assert self._units is not None
        if not self.store.live:
            if self._priorities is None:
                self._priorities = Priorities(max(self._units.count, 1), self.options)
                self._priorities.appended(range(self._units.count))
            return
        table = self._table
        if self._priorities is None:
            self._priorities = Priorities(table.capacity, self.options)
        tail, head = self.span
        for part in slots_of(range(tail, min(table.tail, head)), table.capacity):
            self._priorities.forget(part)
        for part in slots_of(range(max(head, table.tail), table.head), table.capacity):
            self._priorities.appended(part)
        self.span = table.tail, table.head

    @property
    def _table(self) -> RowTable:
        """The rows of the policy that is drawn.

        Raises:
            OptionError: The store has several policies and the draw names none.
        """
        tables = self.store.tables
        if self._draw.policy is None and len(tables) > 1:
            raise OptionError(
                f"draws by priority are of one policy: pass policy=..., one of {', '.join(sorted(tables))}"
            )
        return tables[self._draw.policy or next(iter(tables))]

    def _take(self, n: int) -> Batch:
        units = self._seen()
        assert self._priorities is not None
        self._check_priorities(self._priorities.drawn)
        slots, weights = self._priorities.draw(n, self._rng)
        first = 0
        if self.store.live:
            table, first = self._table, self._table.tail
            slots = first + (slots - first) % table.capacity
        return units.batch(slots - first, {Columns.WEIGHTS: weights, BATCH_INDEXES: slots})

    def update_priorities(self, indexes: npt.ArrayLike, errors: npt.ArrayLike) -> None:
        """Set the priorities of drawn units from their errors.

        Args:
            indexes: ``batch["batch_indexes"]``, shape (n,). Skips rows that a live store has forgotten since.
            errors: Temporal-difference errors, or losses, of either sign; shape (n,).

        Raises:
            OptionError: An index is of no row that the store has held, or an error is not finite.
        """
        slots = np.asarray(indexes)
        values: NDArray[Any] = np.asarray(errors)
        with self.store.lock:
            priorities = self.priorities
            if self.store.live:
                table = self._table
                if slots.size and (slots.min() < 0 or slots.max() >= table.head):
                    raise OptionError(
                        f"indexes {slots.min()} to {slots.max()}: rows 0 to {table.head - 1} have been "
                        "appended so far; pass batch['batch_indexes'] as drawn"
                    )
                kept = slots >= table.tail
                if not kept.all():
                    slots, values = slots[kept], values[kept]
                slots = slots % table.capacity
            priorities.update(slots, values)

    # ---- keeping ----

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the priorities to a ``.npz`` file; replaces an existing file atomically."""
        with self.store.lock:
            kept = self.kept()
            kept["priorities"] = {name: array.copy() for name, array in kept["priorities"].items()}
        write_priorities(path, kept)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load priorities that `save` wrote, of the same store and the same draw, with equal exponents.

        Raises:
            DataNotFound: There is no file.
            StateError: The priorities are of other rows, of another draw, of another ``alpha`` or
                ``epsilon``, or damaged. The sampler keeps its own.
        """
        with self.store.lock:
            kept = read_priorities(path, slots=self.priorities.tree.capacity)
            self.restore(kept, uri=os.fspath(path))

    def kept(self) -> dict[str, Any]:
        """The priorities for `restore`: ``priorities`` (see `Priorities.to_arrays`), ``span`` and ``of``.

        The last two are JSON: the rows of a live store, and what the priorities are of.
        """
        with self.store.lock:
            return {
                "priorities": self.priorities.to_arrays(),
                "span": list(self.span),
                "of": self._priorities_of(),
            }

    def restore(self, kept: Mapping[str, Any], *, uri: str = "", hint: str = "") -> None:
        """Take priorities that `kept` returned.

        Args:
            kept: The result of `kept`; without ``of`` if an earlier version made it.
            uri: Where they were stored, for errors.
            hint: What else may be done, for errors.

        Raises:
            StateError: As `load`.
        """
        uri = uri or self.store.uri
        with self.store.lock:
            mine = self.priorities
            self._check_kept(kept, uri, hint)
            try:
                loaded = Priorities.from_arrays(kept["priorities"], self.options)
            except StateError as error:
                raise StateError(f"the saved priorities are damaged: {error}", uri=uri) from error
            values = loaded.tree.values
            if len(values) != len(mine.tree.values) or ((values > 0.0) != (mine.tree.values > 0.0)).any():
                raise StateError(
                    f"priorities of {np.count_nonzero(values)} rows in {len(values)} slots, but the sampler "
                    f"has {np.count_nonzero(mine.tree.values)} in {len(mine.tree.values)}: load those saved "
                    "with the store",
                    uri=uri,
                )
            if values.max() > loaded.maximum:
                raise StateError(
                    f"the saved priorities are damaged: the highest is {values.max()}, above their maximum "
                    f"{loaded.maximum}",
                    uri=uri,
                )
            self._priorities = loaded

    def _check_kept(self, kept: Mapping[str, Any], uri: str, hint: str) -> None:
        """Refuse priorities that are not those of this sampler's units.

        Raises:
            StateError: They are not.
        """
        parts = (kept.get("priorities"), kept.get("of", {})) if isinstance(kept, Mapping) else (None, None)
        if not all(isinstance(part, Mapping) for part in parts):
            raise StateError(f"these are no saved priorities: {excerpt(kept)}", uri=uri)
        if "of" in kept:
            given, ours = kept["of"], self._priorities_of()
            for key in ours | given:
                if given.get(key) != ours.get(key):
                    raise StateError(
                        f"the priorities are of {excerpt(key)}={excerpt(given.get(key))}, but the sampler is "
                        f"of {excerpt(ours.get(key))}: make the sampler with the same options over the same "
                        f"rows{hint}",
                        uri=uri,
                    )
        else:
            self._check_earlier(uri)
        span = list(self.span)  # (0, 0) for a data set.
        if kept.get("span") != span:
            raise StateError(
                f"priorities of rows {excerpt(kept.get('span'))} (oldest, next), but the store has {span}: "
                "load the priorities saved with the store",
                uri=uri,
            )

    def _check_earlier(self, uri: str) -> None:
        """Refuse priorities that do not say what they are of, unless little can be wrong.

        Raises:
            StateError: The sampler has other options than most, or one of several policies.
        """
        usual = Prioritised()
        is_usual = self._exponents() == {"alpha": usual.alpha, "epsilon": usual.epsilon}
        if not is_usual or len(self.store.tables) > 1:
            raise StateError(
                "an earlier version of rlio saved these priorities without alpha, epsilon and policy: they "
                "load only into a sampler with the defaults, of a store with one policy; begin with new "
                "priorities",
                uri=uri,
            )
        logger.warning(
            "%s: an earlier version of rlio saved these priorities without alpha and epsilon; they are taken "
            "for the defaults, %s and %s",
            uri,
            usual.alpha,
            usual.epsilon,
        )

    def _exponents(self) -> dict[str, float]:
        """The options by which errors become priorities."""
        return {"alpha": float(self.options.alpha), "epsilon": float(self.options.epsilon)}

    def _priorities_of(self) -> JsonState:
        """What must be equal for priorities to mean the same, as JSON."""
        tables, draw = self.store.tables, self._draw.to_json()
        if len(tables) == 1:
            draw["policy"] = next(iter(tables))  # Which may be named or not.
        return {"store": self.store.digest, **self._exponents(), **draw}

    def _position(self) -> JsonState:
        drawn = 0 if self._priorities is None else self._priorities.drawn
        rng = _plain(self._rng.bit_generator.state)
        return self._state() | {"rng": rng, "drawn": drawn, "priorities": self._exponents()}

    def _seek(self, position: JsonState) -> None:
        # Earlier states do not hold them.
        if position.get("priorities", self._exponents()) != self._exponents():
            raise StateError(
                f"state['position']['priorities'] is {excerpt(position['priorities'])} but this sampler has "
                f"{self._exponents()}: make the sampler with the same options",
                uri=self.store.uri,
            )
        self._check_state(position)
        # States of 4d4987e do not hold the number of draws: skip the comparison.
        expected = whole_number(position, "drawn") if "drawn" in position else None
        restore_generator(self._rng.bit_generator, position.get("rng"), of="state['position']['rng']")
        self._expected = expected

    def _check_priorities(self, drawn: int) -> None:
        """Warn once if a state was loaded without the priorities that belong to it."""
        expected, self._expected = self._expected, None
        if expected is not None and expected != drawn:
            logger.warning(
                "%s: the loaded state was saved after %d draws, but the priorities here are those after %d. "
                "A state holds no priorities: keep them with the sampler's save() and load(), or with "
                "ReplayStore.save(priorities=...)",
                self.store.uri,
                expected,
                drawn,
            )


def _plain(value: Any) -> Any:
    """NumPy numbers as Python numbers, which JSON has."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.integer):
        return value.tolist()
    return value
