"""What is drawn from a table: transitions, n-step transitions, sequences or whole episodes, as batches.

A draw has units, numbered in recorded order; which units come when is the business of an order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.columns import STATE_IN_PREFIX, STATE_OUT_PREFIX, Columns
from rlio.errors import MissingColumn, OptionError
from rlio.interfaces import Batch, Unit
from rlio.replay.filters import RowFilter
from rlio.replay.n_step import NStep, Window, windows
from rlio.replay.sequences import Sequences, SequenceStarts, episode_starts, sequence_starts
from rlio.replay.table import Plan, RowTable
from rlio.schemas.schema import Leaf, PolicySchema, rebuild

__all__ = ["BATCH_INDEXES", "Draw", "Held", "RowUnits", "Span", "Steps", "Units", "open_units"]

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


class Span(NamedTuple):
    """Which rows of a table are seen.

    Attributes:
        first: Logical number of the first row; of a table in recorded order.
        rows: How many there are.
        head: Rows from here on are not seen.
    """

    first: int
    rows: int
    head: int


@dataclass(frozen=True)
class Held:
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
    span: Span | None = None

    @property
    def first(self) -> int:
        """Logical number of the first row; of a table in recorded order."""
        return self.table.tail if self.span is None else self.span.first

    @property
    def count(self) -> int:
        """Rows that are seen."""
        return len(self.table) if self.span is None else self.span.rows

    @property
    def head(self) -> int:
        """Rows from here on are not seen."""
        return self.table.head if self.span is None else self.span.head

    def numbered(self, places: Ids) -> Ids:
        """Logical numbers of the rows at places in recorded order."""
        if self.rows is not None:
            found: Ids = self.rows[places]
            return found
        first = self.first
        return places + first if first else places

    def chunk(self, start: int, stop: int) -> Ids:
        """Logical numbers of the rows from ``start`` to ``stop - 1`` in recorded order."""
        if self.rows is not None:
            found: Ids = self.rows[start:stop]
            return found
        return np.arange(self.first + start, self.first + stop)

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


class Units(ABC):
    """The units of a draw. A batch is made of the units of given numbers, in that order."""

    #: Whether they are still the units of a live table after rows were added to it.
    keeps_up = False
    #: Whether a batch is cut into smaller ones by slicing its rows.
    sliceable = False

    @property
    @abstractmethod
    def count(self) -> int:
        """How many there are."""

    @abstractmethod
    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        """The units of the given numbers; what they are made of is the caller's.

        Args:
            numbers: Which.
            also: Further columns, one value a unit: the rows of a longer unit all have it.
        """


def open_units(held: Mapping[str, Held], draw: Draw, *, steps: Steps | None = None) -> Units:
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


@dataclass(frozen=True)
class Steps:
    """The joint steps of several agents, in recorded order.

    Attributes:
        rows: Policy id -> logical numbers of its rows, step by step.
        ends: Policy id -> for each step, where its rows end in ``rows``, shape (steps,).
    """

    rows: Mapping[str, Ids]
    ends: Mapping[str, Ids]

    @property
    def count(self) -> int:
        """Steps."""
        return max((len(ends) for ends in self.ends.values()), default=0)

    def of(self, policy: str, numbers: Ids) -> tuple[Ids, Ids]:
        """Logical numbers of a policy's rows in the given steps, and how many each of those has."""
        ends = self.ends[policy]
        stop = ends[numbers]
        start = np.where(numbers > 0, ends[numbers - 1], 0)
        sizes = stop - start
        found: Ids = self.rows[policy][_ranges(start, sizes)]
        return found, sizes


def _ranges(starts: Ids, sizes: Ids) -> Ids:
    """``starts[0], starts[0] + 1, ...``: one range after the other."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    found: Ids = np.arange(total) + np.repeat(starts - (ends - sizes), sizes)
    return found


class _Maker:
    """Makes columns of the rows of one policy."""

    def __init__(self, held: Held, draw: Draw) -> None:
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

    def selected(self) -> Ids | None:
        """Logical numbers of the rows that the filter lets pass, in recorded order; None: of all."""
        chosen = self.draw.filter
        if chosen is None:
            return None
        plan = self.held.table.plan(leaf for leaf in self.held.table.leaves if chosen.reads(leaf.column))
        found = []
        for start in range(0, self.held.count, _CHUNK):
            rows = self.held.chunk(start, min(start + _CHUNK, self.held.count))
            arrays = self.held.table.gather(rows, plan)
            found.append(rows[chosen.mask(self._nested(arrays), rows=len(rows))])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _nested(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {}
        for leaf in self.held.policy.leaves:
            if leaf.physical in arrays:
                found.setdefault(leaf.column, []).append((leaf.path, arrays[leaf.physical]))
        return {column: rebuild(parts) for column, parts in found.items()}

    def rows_and_places(self) -> tuple[Ids, Ids]:
        """The rows that the filter lets pass, and their places in their chains."""
        held = self.held
        chosen = self.selected()
        rows = held.chunk(0, held.count) if chosen is None else chosen
        # By logical number: the table's own order.
        lowest = int(rows.min(initial=held.table.head))
        at = held.table.places(lowest, max(int(rows.max(initial=-1)) + 1, lowest))
        return rows, at[rows - lowest]


class RowUnits(Units):
    """One row each, or the n-step transition that begins with it."""

    def __init__(self, maker: _Maker) -> None:
        self._maker = maker
        self.sliceable = True
        self._rows = maker.selected()
        self.keeps_up = self._rows is None

    @property
    def count(self) -> int:
        return self._maker.held.count if self._rows is None else len(self._rows)

    def rows(self, numbers: Ids) -> Ids:
        """Logical numbers of the rows that the units of the given numbers begin with."""
        if self._rows is None:
            return self._maker.held.numbered(numbers)
        found: Ids = self._rows[numbers]
        return found

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


class _SequenceUnits(Units):
    """Sequences, padded with zeros to equal length."""

    def __init__(self, maker: _Maker, cut: Sequences) -> None:
        self._maker = maker
        self._cut = cut
        held = maker.held
        rows, at = maker.rows_and_places()
        self._starts: SequenceStarts = sequence_starts(held.table, rows, at, cut, head=held.head)
        self._states = _states(held)

    @property
    def count(self) -> int:
        return len(self._starts)

    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        starts = self._starts.take(numbers)
        length = self._cut.length + self._cut.burn_in
        rows, sizes = _chain_rows(self._maker.held, starts.rows, self._cut.length + starts.burn_in)
        columns = self._maker.columns(rows)
        place = _ranges(np.arange(len(numbers)) * length, sizes)
        padded = {name: _padded(column, place, len(numbers) * length) for name, column in columns.items()}
        if self._cut.burn_in:
            within = _ranges(np.zeros(len(numbers), np.int64), sizes)
            padded["burn_in"] = _padded(
                within < np.repeat(starts.burn_in, sizes), place, len(numbers) * length
            )
        padded |= _state_in(self._maker.held, self._states, starts.rows)
        padded |= {name: np.repeat(values, length) for name, values in (also or {}).items()}
        padded[Columns.SEQ_LENS] = sizes.astype(np.int32)
        return SampleBatch(padded, zero_padded=True, max_seq_len=length)


class _EpisodeUnits(Units):
    """Whole episodes, one after the other, with ``seq_lens``; what was recorded of each without a gap."""

    def __init__(self, maker: _Maker) -> None:
        self._maker = maker
        self._starts = episode_starts(*maker.rows_and_places())
        self._states = _states(maker.held)

    @property
    def count(self) -> int:
        return len(self._starts)

    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        starts = self._starts[numbers]
        held = self._maker.held
        rows, sizes = _chain_rows(held, starts, np.full(len(starts), held.head))
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
        self._numbers = self._selected()

    @property
    def count(self) -> int:
        return self._steps.count if self._numbers is None else len(self._numbers)

    def _selected(self) -> Ids | None:
        """Steps of which some row passes the filter; None: all."""
        if not any(maker.draw.filter for maker in self._makers.values()):
            return None
        kept = np.zeros(self._steps.count, bool)
        for pid, maker in self._makers.items():
            passing = np.zeros(maker.held.table.head, bool)
            chosen = maker.selected()
            assert chosen is not None
            passing[chosen] = True
            ends = self._steps.ends[pid]
            step = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
            kept[step[passing[self._steps.rows[pid]]]] = True
        return np.flatnonzero(kept)

    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        if also:
            raise OptionError("draws by priority are of one policy: name it, policy=...")
        wanted = numbers if self._numbers is None else self._numbers[numbers]
        parts = {}
        for pid, maker in self._makers.items():
            rows, _ = self._steps.of(pid, wanted)
            if len(rows):
                parts[pid] = SampleBatch._trusted(maker.columns(rows))
        return MultiAgentBatch(parts, len(wanted))


def _chain_rows(held: Held, starts: Ids, most: Ids) -> tuple[Ids, Ids]:
    """The rows of chains from ``starts`` on, at most so many of each; and how many they are."""
    table = held.table
    if not table.ring:
        sizes = [
            table.run_length(start, most=count, head=held.head)
            for start, count in zip(starts.tolist(), most.tolist(), strict=True)
        ]
        if None not in sizes:  # As one environment after the other recorded them: no link has to be followed.
            lengths = np.array(sizes, np.int64)
            return _ranges(starts, lengths), lengths
    live = np.arange(len(starts))
    steps, owners, front = [starts], [live], starts
    taken = 1
    while True:
        going = np.flatnonzero(most[live] > taken)
        live, front = live[going], front[going]
        following = table.successors(front, head=held.head) if len(front) else front
        goes_on = np.flatnonzero(following >= 0)
        if not len(goes_on):
            break
        live, front = live[goes_on], following[goes_on]
        steps.append(front)
        owners.append(live)
        taken += 1
    rows, owner = np.concatenate(steps), np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    return rows[order], np.bincount(owner, minlength=len(starts)).astype(np.int64)


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


def _states(held: Held) -> dict[str, Leaf]:
    """``state_in_k`` -> the leaf of ``state_out_k``, which holds what it is made from."""
    found = {}
    for leaf in held.table.leaves:
        if leaf.column.startswith(STATE_OUT_PREFIX) and not leaf.path:
            found[STATE_IN_PREFIX + leaf.column.removeprefix(STATE_OUT_PREFIX)] = leaf
    return found


def _state_in(held: Held, states: Mapping[str, Leaf], starts: Ids) -> dict[str, Any]:
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
