"""What is drawn from a table: transitions, n-step transitions, sequences or whole episodes, as batches.

A draw has units, numbered in recorded order; which units come when is the business of an order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.columns import STATE_IN_PREFIX, STATE_OUT_PREFIX, Columns
from rlio.errors import MissingColumn, OptionError
from rlio.reader import Unit
from rlio.replay.filters import RowFilter
from rlio.replay.n_step import NStep, Window, windows
from rlio.replay.numbers import Numbers
from rlio.replay.sequences import Sequences, chain_rows, completed_sequences
from rlio.replay.steps import Steps, ranges
from rlio.replay.table import Plan, RowTable
from rlio.schemas.schema import Leaf, PolicySchema, rebuild
from rlio.support.forks import cached_property

__all__ = ["BATCH_INDEXES", "Draw", "PolicyView", "RowRange", "RowUnits", "Units", "open_units"]

Ids = NDArray[np.int64]

#: The column of logical row numbers, by which priorities are updated.
BATCH_INDEXES: Final = "batch_indexes"
#: Columns that an n-step transition has of its last row.
_OF_LAST: Final = frozenset(
    (Columns.NEXT_OBS, Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.NEXT_OBS_VALID)
)
# Rows at a time, where all rows of a table are looked at.
_CHUNK: Final = 1 << 16


@dataclass(frozen=True)
class Draw:
    """What a unit is, and which columns come with it.

    Attributes:
        columns: Logical columns; None: all.
        n_step: Steps to look ahead; None: rows as they were recorded.
        sequences: How episodes are cut into sequences; None: they are not.
        episodes: Whether a unit is a whole episode.
        policy: Of several policies, the one whose rows are drawn, each on its own; None: joint steps of all.
        filter: Selects rows; of sequences and episodes, their first ones.
        views: Whether columns are views of one block of rows, strided, instead of contiguous copies; wide
            ``obs`` and ``new_obs`` then overlap, and are read-only.
        indexes: Whether ``batch_indexes`` comes with the columns.
    """

    columns: frozenset[str] | None = None
    n_step: NStep | None = None
    sequences: Sequences | None = None
    episodes: bool = False
    policy: str | None = None
    filter: RowFilter | None = None
    views: bool = False
    indexes: bool = False

    def __post_init__(self) -> None:
        kinds = [self.n_step is not None, self.sequences is not None, self.episodes]
        if sum(kinds) > 1:
            raise OptionError("n_step, sequence_length and episodes exclude each other: give one of them")
        if self.views and any(kinds):
            raise OptionError("views=True is for single transitions: the others need rows of their own")

    @property
    def unit(self) -> Unit:
        """What is counted."""
        return "episodes" if self.episodes else "steps" if self.sequences is None else "sequences"

    @property
    def looks_around(self) -> bool:
        """Whether other columns, or other rows, than those that are given are looked at."""
        return bool(self.filter or self.n_step or self.sequences or self.episodes)

    def to_json(self) -> dict[str, Any]:
        """What a saved state holds of it."""
        return {
            "n_step": None if self.n_step is None else [self.n_step.n, self.n_step.gamma],
            "sequences": None
            if self.sequences is None
            else [self.sequences.length, self.sequences.burn_in, self.sequences.overlap],
            "episodes": self.episodes,
            "policy": self.policy,
            "filter": None if self.filter is None else self.filter.text,
        }


class RowRange(NamedTuple):
    """Which rows of a table are seen.

    Attributes:
        first: Number of the first row; see `PolicyView.first`.
        rows: How many there are.
        head: Rows from here on are not seen, by logical number.
    """

    first: int
    rows: int
    head: int


@dataclass(frozen=True)
class PolicyView:
    """The rows of one policy, as one reader sees them.

    Attributes:
        name: The policy's id.
        policy: Its schema.
        table: Its rows.
        rows: Logical numbers of the rows in recorded order; None where they follow each other.
        span: Which of them are seen; None: whatever the table holds at the moment.
    """

    name: str
    policy: PolicySchema
    table: RowTable
    rows: Ids | None = None
    span: RowRange | None = None

    @property
    def first(self) -> int:
        """Number of the first row. Rows are numbered in recorded order: logically, if that is the same."""
        return self.table.tail if self.span is None else self.span.first

    @property
    def count(self) -> int:
        """Rows that are seen."""
        return len(self.table) if self.span is None else self.span.rows

    @property
    def head(self) -> int:
        """Rows from here on are not seen, by logical number."""
        return self.table.head if self.span is None else self.span.head

    @property
    def numbers(self) -> tuple[int, int]:
        """Number of the first row, and that behind the last."""
        return self.first, self.first + self.count

    def rows_of(self, numbers: Ids) -> Ids:
        """Logical numbers of the rows of given numbers."""
        return numbers if self.rows is None else self.rows[numbers]

    def numbers_of(self, rows: Ids) -> Ids:
        """Numbers of the rows of given logical numbers; below `first` where they are not seen."""
        return rows if self.rows is None else self._numbers[rows]

    @cached_property
    def _numbers(self) -> Ids:
        assert self.rows is not None
        found = np.full(self.head, -1, np.int64)
        found[self.rows] = np.arange(len(self.rows))
        return found

    def wanted(self, draw: Draw) -> list[Leaf]:
        """The leaves of a draw's columns.

        Raises:
            MissingColumn: There is no such column.
        """
        missing = sorted((draw.columns or set()) - set(self.policy.columns))
        if missing:
            raise MissingColumn(
                f"no column {missing[0]!r} in policy {self.name!r}; there are "
                f"{', '.join(sorted(self.policy.columns))}",
                column=missing[0],
            )
        return [leaf for leaf in self.table.leaves if draw.columns is None or leaf.column in draw.columns]

    def single(self, column: str, why: str) -> Leaf:
        """The leaf of a packed column with one number a row.

        Raises:
            MissingColumn: There is none.
        """
        found = [leaf for leaf in self.table.layout.packed if leaf.column == column]
        if len(found) != 1 or found[0].path or found[0].spec.shape:
            raise MissingColumn(f"{why} needs the column {column!r} with one number a row", column=column)
        return found[0]


class _Index:
    """The units of a draw, by numbers that ascend in recorded order, as rows come and go.

    Args:
        span: Gives the number of the first row (or joint step) that is there, and that behind the last.
        find: Gives, for the rows (or joint steps) from one number to another, the units that they complete:
            whether there is a unit is a matter of the rows up to the one that completes it.
        per_row: Units that may begin with one row: those of row r have numbers from ``r * per_row`` on.
    """

    def __init__(
        self,
        span: Callable[[], tuple[int, int]],
        find: Callable[[int, int], Ids],
        *,
        per_row: int = 1,
    ) -> None:
        self._span = span
        self._find = find
        self._per_row = per_row
        self._numbers = Numbers()
        self._seen = 0
        self.update()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, units: Ids) -> Ids:
        found: Ids = self._numbers.values[units]
        return found

    def update(self) -> None:
        """Drop the units that begin before the first row, and add those that new rows complete."""
        first, stop = self._span()
        self._numbers.drop_below(first * self._per_row)
        begin = max(self._seen, first)
        found = [self._find(at, min(at + _CHUNK, stop)) for at in range(begin, stop, _CHUNK)]
        if found:
            self._numbers.insert(np.concatenate(found))
        self._seen = stop


class Units(ABC):
    """The units of a draw. A batch is made of the units of given numbers, in that order."""

    #: Whether a batch is cut into smaller ones by slicing its rows.
    sliceable = False
    #: Which of the rows, or joint steps, the units begin with; None: all, or nothing of the kind.
    _index: _Index | None = None

    @property
    @abstractmethod
    def count(self) -> int:
        """How many there are."""

    def update(self) -> None:
        """Take note of the rows that came and went, in time for those."""
        if self._index is not None:
            self._index.update()

    @abstractmethod
    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        """The units of the given numbers; what they are made of is the caller's.

        Args:
            numbers: Which.
            also: Further columns, one value a unit: the rows of a longer unit all have it.
        """


def open_units(held: Mapping[str, PolicyView], draw: Draw, *, steps: Steps | None = None) -> Units:
    """The units of a draw.

    Args:
        held: Policy id -> its rows.
        draw: What is drawn.
        steps: Which rows belong to each joint step; None where there is one agent.

    Raises:
        OptionError, MissingColumn: The data has no such units.
    """
    if steps is not None:
        return _JointSteps({pid: _Maker(rows, draw) for pid, rows in held.items()}, draw, steps)
    ((_, rows),) = held.items()
    maker = _Maker(rows, draw)
    if draw.sequences is not None:
        return _SequenceUnits(maker, draw.sequences)
    return _EpisodeUnits(maker) if draw.episodes else RowUnits(maker)


class _Maker:
    """Makes columns of the rows of one policy."""

    def __init__(self, held: PolicyView, draw: Draw) -> None:
        self.held = held
        self.draw = draw
        self.leaves = held.wanted(draw)
        self.plan = held.table.plan(self.leaves)
        #: Physical and logical names, in the order of the schema, where no column is nested.
        self.plain: list[tuple[str, str]] | None = None
        given = {leaf.physical for leaf in self.leaves}
        named = [leaf for leaf in held.policy.leaves if leaf.physical in given]
        if not any(leaf.path for leaf in named):
            self.plain = [(leaf.physical, leaf.column) for leaf in named]
        self._rewards = self._terminated = self._valid = None
        if draw.filter is not None:
            draw.filter.check(held.policy)
        if draw.n_step is not None:
            self._rewards = held.single(Columns.REWARDS, "n_step")
            self._terminated = held.single(Columns.TERMINATEDS, "n_step").physical
            if Columns.NEXT_OBS_VALID in held.policy.columns:
                self._valid = held.single(Columns.NEXT_OBS_VALID, "n_step").physical

    def columns(self, rows: Ids) -> dict[str, Any]:
        """The columns of single transitions, or of n-step ones that begin with the given rows."""
        if self.draw.n_step is not None:
            return self._n_step(rows, self.draw.n_step)
        table = self.held.table
        gather = table.gather_views if self.draw.views else table.gather
        return self._named(gather(rows, self.plan), rows)

    def _named(self, arrays: Mapping[str, NDArray[Any]], rows: Ids) -> dict[str, Any]:
        made: dict[str, Any]
        if self.plain is not None:
            made = {column: arrays[physical] for physical, column in self.plain if physical in arrays}
        else:
            made = self._nested(arrays)
        if self.draw.indexes:
            made[BATCH_INDEXES] = rows.copy()
        return made

    def _n_step(self, rows: Ids, step: NStep) -> dict[str, Any]:
        """Columns of the first rows, with those that an n-step transition has of the last."""
        assert self._rewards is not None
        assert self._terminated is not None
        table = self.held.table
        window = windows(table, rows, step, rewards=self._rewards.physical, head=self.held.head)
        firsts, lasts = self._n_step_plans
        made = table.gather(rows, firsts) | table.gather(window.last, lasts)
        if self._rewards in self.leaves:
            made[self._rewards.physical] = window.rewards
        columns = self._named(made, rows)
        columns["n_step_discount"] = window.discount
        columns["bootstrap_mask"] = self._mask(window)
        return columns

    @cached_property
    def _n_step_plans(self) -> tuple[Plan, Plan]:
        """How the columns of the first rows, and those of the last, are gathered."""
        table = self.held.table
        firsts = [leaf for leaf in self.leaves if leaf.column not in _OF_LAST and leaf != self._rewards]
        return table.plan(firsts), table.plan(leaf for leaf in self.leaves if leaf.column in _OF_LAST)

    def _mask(self, window: Window) -> NDArray[np.float32]:
        """1 where there is a state to bootstrap from."""
        table = self.held.table
        assert self._terminated is not None
        ends = np.asarray(table.values(self._terminated, window.last), bool)
        if self._valid is not None:
            ends = ends | ~np.asarray(table.values(self._valid, window.last), bool)
        return (~ends).astype(np.float32)

    def passes(self, rows: Ids) -> NDArray[np.bool_]:
        """Which rows the filter lets pass; all, if there is none."""
        chosen = self.draw.filter
        if chosen is None or not len(rows):
            return np.ones(len(rows), bool)
        arrays = self.held.table.gather(rows, self._filter_plan)
        return chosen.mask(self._nested(arrays), rows=len(rows))

    @cached_property
    def _filter_plan(self) -> Plan:
        """How the columns that the filter reads are gathered."""
        chosen, table = self.draw.filter, self.held.table
        assert chosen is not None
        return table.plan(leaf for leaf in table.leaves if chosen.reads(leaf.column))

    def _nested(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {}
        for leaf in self.held.policy.leaves:
            if leaf.physical in arrays:
                found.setdefault(leaf.column, []).append((leaf.path, arrays[leaf.physical]))
        return {column: rebuild(parts) for column, parts in found.items()}


class RowUnits(Units):
    """One row each, or the n-step transition that begins with it."""

    def __init__(self, maker: _Maker) -> None:
        self._maker = maker
        self.sliceable = True
        if maker.draw.filter is not None:
            self._index = _Index(lambda: maker.held.numbers, self._find)

    @property
    def count(self) -> int:
        return self._maker.held.count if self._index is None else len(self._index)

    def _find(self, start: int, stop: int) -> Ids:
        numbers = np.arange(start, stop)
        return numbers[self._maker.passes(self._maker.held.rows_of(numbers))]

    def rows(self, numbers: Ids) -> Ids:
        """Logical numbers of the rows that the units of the given numbers begin with."""
        held = self._maker.held
        if self._index is not None:
            return held.rows_of(self._index[numbers])
        first = held.first
        return held.rows_of(numbers + first if first else numbers)

    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        columns = self._maker.columns(self.rows(numbers))
        return SampleBatch._trusted(columns if also is None else {**columns, **also})

    # ---- for whoever gathers the rows of several tables together ----

    @property
    def table(self) -> RowTable:
        """What the rows lie in."""
        return self._maker.held.table

    @property
    def plan(self) -> Plan:
        """Which columns are wanted."""
        return self._maker.plan

    @property
    def is_packed(self) -> bool:
        """Whether the columns are those of packed rows as they were recorded, of a table that keeps them."""
        plan, draw = self._maker.plan, self._maker.draw
        elsewhere = plan.windows or plan.wide or plan.texts or len(plan.packed) < len(plan.fixed)
        return not (elsewhere or draw.n_step or draw.views or draw.indexes or self.table.ring)

    def looks_like(self, other: RowUnits) -> bool:
        """Whether packed rows, wanted columns and their names are those of ``other``."""
        return (
            self.table.void == other.table.void
            and self.table.row == other.table.row
            and self.plan.packed == other.plan.packed
            and self._maker.plain is not None
            and self._maker.plain == other._maker.plain
        )

    def named(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Physical columns by their logical names."""
        return {column: arrays[physical] for physical, column in self._maker.plain or ()}


class _ChainUnits(Units):
    """Units that begin somewhere in an episode, and go on with the rows that follow there."""

    _index: _Index

    def __init__(self, maker: _Maker, *, per_row: int = 1) -> None:
        self._maker = maker
        self._states = _states(maker.held)
        self._index = _Index(lambda: maker.held.numbers, self._find, per_row=per_row)

    @abstractmethod
    def _find(self, start: int, stop: int) -> Ids:
        """See `_Index`."""

    @property
    def count(self) -> int:
        return len(self._index)


class _SequenceUnits(_ChainUnits):
    """Sequences, padded with zeros to equal length."""

    def __init__(self, maker: _Maker, cut: Sequences) -> None:
        self._cut = cut
        super().__init__(maker, per_row=cut.burn_in + 1)

    def _find(self, start: int, stop: int) -> Ids:
        """The sequences that rows complete: ``burn_in + 1`` times their first row, and their burn-in."""
        held = self._maker.held
        rows, burn_in = completed_sequences(held.table, held.rows_of(np.arange(start, stop)), self._cut)
        numbers = held.numbers_of(rows)
        seen = numbers >= held.first
        seen[seen] = self._maker.passes(rows[seen])
        found: Ids = numbers[seen] * (self._cut.burn_in + 1) + burn_in[seen]
        return found

    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        held, length = self._maker.held, self._cut.length + self._cut.burn_in
        firsts, burn_in = np.divmod(self._index[numbers], self._cut.burn_in + 1)
        starts = held.rows_of(firsts)
        rows, sizes = chain_rows(held.table, starts, self._cut.length + burn_in, head=held.head)
        columns = self._maker.columns(rows)
        place = ranges(np.arange(len(numbers)) * length, sizes)
        padded = {name: _padded(column, place, len(numbers) * length) for name, column in columns.items()}
        if self._cut.burn_in:
            within = ranges(np.zeros(len(numbers), np.int64), sizes)
            padded["burn_in"] = _padded(within < np.repeat(burn_in, sizes), place, len(numbers) * length)
        padded |= _state_in(held, self._states, starts)
        padded |= {name: np.repeat(values, length) for name, values in (also or {}).items()}
        padded[Columns.SEQ_LENS] = sizes.astype(np.int32)
        return SampleBatch(padded, zero_padded=True, max_seq_len=length)


class _EpisodeUnits(_ChainUnits):
    """Whole episodes, one after the other, with ``seq_lens``; what was recorded of each without a gap."""

    def _find(self, start: int, stop: int) -> Ids:
        """The numbers of the rows with which episodes begin."""
        held, numbers = self._maker.held, np.arange(start, stop)
        firsts: Ids = numbers[held.table.places(held.rows_of(numbers)) == 0]
        return firsts[self._maker.passes(held.rows_of(firsts))]

    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        held = self._maker.held
        starts = held.rows_of(self._index[numbers])
        rows, sizes = chain_rows(held.table, starts, np.full(len(starts), held.head), head=held.head)
        columns = self._maker.columns(rows) | _state_in(held, self._states, starts)
        columns |= {name: np.repeat(values, sizes) for name, values in (also or {}).items()}
        return SampleBatch(columns | {Columns.SEQ_LENS: sizes.astype(np.int32)})


class _JointSteps(Units):
    """Steps of several agents: all rows of one (eps_id, t)."""

    def __init__(self, makers: Mapping[str, _Maker], draw: Draw, steps: Steps) -> None:
        if draw.sequences is not None or draw.episodes:
            raise OptionError(
                f"{draw.unit} of several agents: name one, policy={min(makers)!r}, to cut its episodes"
            )
        self._makers = makers
        self._steps = steps
        if draw.filter is not None:
            self._index = _Index(lambda: (steps.first, steps.stop), self._find)

    @property
    def count(self) -> int:
        return self._steps.count if self._index is None else len(self._index)

    def _find(self, start: int, stop: int) -> Ids:
        """The numbers of the steps of which some row passes the filter."""
        numbers = np.arange(start, stop)
        found = np.zeros(len(numbers), bool)
        for pid, maker in self._makers.items():
            rows, sizes = self._steps.of(pid, numbers)
            found[np.repeat(numbers - start, sizes)[maker.passes(rows)]] = True
        return numbers[found]

    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        if also:
            raise OptionError("draws by priority are of one policy: name it, policy=...")
        wanted = numbers + self._steps.first if self._index is None else self._index[numbers]
        parts = {}
        for pid, maker in self._makers.items():
            rows, _ = self._steps.of(pid, wanted)
            if len(rows):
                parts[pid] = SampleBatch._trusted(maker.columns(rows))
        return MultiAgentBatch(parts, len(wanted))


def _padded(column: Any, place: Ids, rows: int) -> Any:
    """A column with its rows at the given places, zeros between them."""
    if isinstance(column, dict):
        return {key: _padded(part, place, rows) for key, part in column.items()}
    if isinstance(column, tuple):
        return tuple(_padded(part, place, rows) for part in column)
    made = (
        np.full(rows, None, object)
        if column.dtype == object
        else np.zeros((rows, *column.shape[1:]), column.dtype)
    )
    made[place] = column
    return made


def _states(held: PolicyView) -> dict[str, Leaf]:
    """``state_in_k`` -> the leaf of ``state_out_k``, which holds what it is made from."""
    found = {}
    for leaf in held.table.leaves:
        if leaf.column.startswith(STATE_OUT_PREFIX) and not leaf.path:
            found[STATE_IN_PREFIX + leaf.column.removeprefix(STATE_OUT_PREFIX)] = leaf
    return found


def _state_in(held: PolicyView, states: Mapping[str, Leaf], starts: Ids) -> dict[str, Any]:
    """The recurrent state at the start of sequences: what the row before left, or zeros."""
    if not states:
        return {}
    before = held.table.predecessors(starts)
    known = np.flatnonzero(before >= 0)
    left = held.table.gather(before[known], held.table.plan(states.values()))
    made = {}
    for name, leaf in states.items():
        state = np.zeros((len(starts), *leaf.spec.shape), leaf.spec.numpy)
        state[known] = left[leaf.physical]
        made[name] = state
    return made
