"""Draws from a table: transitions, n-step transitions, sequences or whole episodes, as batches.

The units of a draw are numbered in recorded order. `rlio.query.order` decides which units come when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.columns import STATE_IN_PREFIX, STATE_OUT_PREFIX, Columns
from rlio.batch.infos import REST, info_objects, is_typed
from rlio.batch.nested import Path, leaves, map_structure, unflatten
from rlio.batch.other_names import did_you_mean
from rlio.errors import MissingColumn, OptionError
from rlio.query.derived_columns import EPISODE_COLUMNS, MC_RETURN
from rlio.query.filters import RowFilter
from rlio.reader import Unit
from rlio.replay.episode_columns import EpisodeValues, episode_leaf
from rlio.replay.n_step import NStep, Window, windows
from rlio.replay.numbers import Numbers
from rlio.replay.sequences import Sequences, chain_rows, completed_sequences
from rlio.replay.steps import Steps, ranges
from rlio.replay.table import Plan, RowTable
from rlio.schemas.column import TEXTS, ColumnSpec
from rlio.schemas.filling import blank_rows
from rlio.schemas.leaves import Leaf, column_of_name, is_named, rebuild
from rlio.schemas.policy_schema import PolicySchema, with_validity
from rlio.schemas.streams import WRITER
from rlio.support.forks import cached_property

__all__ = [
    "BATCH_INDEXES",
    "DEFAULT_DISCOUNT",
    "MASK",
    "Draw",
    "PolicyView",
    "RowRange",
    "RowUnits",
    "Units",
    "open_units",
]

Ids = NDArray[np.int64]

#: The column of logical row numbers, by which `update_priorities` finds units.
BATCH_INDEXES: Final = "batch_indexes"
#: The discount of ``mc_return`` unless it is stated.
DEFAULT_DISCOUNT: Final = 0.99
#: The column that marks the rows of a sequence that are not padding, with ``layout="time"``.
MASK: Final = "mask"
#: Columns that an n-step transition takes from its last row.
_OF_LAST: Final = frozenset(
    (Columns.NEXT_OBS, Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.NEXT_OBS_VALID)
)
# Rows read at a time in a scan of a whole table.
_CHUNK: Final = 1 << 16


@dataclass(frozen=True)
class Draw:
    """What a unit is, and which columns come with it.

    Attributes:
        columns: Logical columns, or parts of them (``obs/camera``); None: all. Those with ``new_obs`` bring
            ``new_obs_valid``, if the policy has it.
        n_step: Steps to look ahead; None: rows as they were recorded.
        sequences: How to cut episodes into sequences; None: not at all.
        episodes: Whether a unit is a whole episode.
        policy: With several policies, the one whose rows are drawn; None: joint steps of all.
        filter: Selects rows; for sequences and episodes, by their first rows. It may read `EPISODE_COLUMNS`.
            A quantile in it is that of the episodes whose value is known, on the side of its split.
        derive: Which of `EPISODE_COLUMNS` to add, as float32.
        gamma: Discount of ``mc_return``.
        views: Make columns strided views of one block of rows, instead of contiguous copies; wide ``obs`` and
            ``new_obs`` then overlap and are read-only.
        indexes: Add the column ``batch_indexes``.
    """

    columns: frozenset[str] | None = None
    n_step: NStep | None = None
    sequences: Sequences | None = None
    episodes: bool = False
    policy: str | None = None
    filter: RowFilter | None = None
    views: bool = False
    indexes: bool = False
    derive: tuple[str, ...] = ()
    gamma: float = DEFAULT_DISCOUNT

    def __post_init__(self) -> None:
        if self.views and (self.n_step is not None or self.sequences is not None or self.episodes):
            raise OptionError("views=True works only for single transitions: leave out views, or draw")

    @property
    def unit(self) -> Unit:
        """The kind of unit that `Units.count` counts."""
        if self.episodes:
            return "episodes"
        # In the layout (sequences, rows, ...), a sequence is one row of the batch.
        return "steps" if self.sequences is None or self.sequences.layout == "time" else "sequences"

    @property
    def by_row(self) -> bool:
        """Whether a unit is one row, or the transition that begins there."""
        return self.sequences is None and not self.episodes

    def needs(self, known: Collection[str]) -> frozenset[str] | None:
        """What a store must keep of the columns ``known`` for the draw; None: all."""
        if self.columns is None or (self.filter is not None and self.filter.columns is None):
            return None
        more = set() if self.filter is None else set(self.filter.columns or ())
        if self.filter is not None and self.filter.split is not None:
            more |= {WRITER}
        if self.n_step is not None or self.derived(known):
            more |= {
                Columns.REWARDS,
                Columns.TERMINATEDS,
                Columns.TRUNCATEDS,
                Columns.T,
                Columns.NEXT_OBS_VALID,
            }
        if self.sequences is not None or self.episodes:
            more |= {name for name in known if name.startswith(STATE_OUT_PREFIX)}
        return self.columns | (more & set(known))

    def derived(self, known: Collection[str]) -> list[str]:
        """The columns to derive, also for the filter alone, if the data has the columns ``known``."""
        read = () if self.filter is None else self.filter.columns or ()
        return [*self.derive, *(name for name in read if name in EPISODE_COLUMNS and name not in known)]

    def check_live(self) -> None:
        """Refuse what needs whole episodes, for a live store, whose rows come and go.

        Raises:
            OptionError: Columns are derived, or a split is drawn.
        """
        if self.derived(()) or (self.filter is not None and self.filter.split is not None):
            raise OptionError(
                "derive, split and filters of episode columns are for data sets: record the rows, and open "
                "rlio.DatasetReader or rlio.ReplayStore.open on them"
            )

    def to_json(self) -> dict[str, Any]:
        """The part of the draw that a saved state holds."""
        return {
            "n_step": None if self.n_step is None else [self.n_step.n, self.n_step.gamma],
            "sequences": None if self.sequences is None else self.sequences.to_json(),
            "episodes": self.episodes,
            "policy": self.policy,
            "filter": None if self.filter is None else self.filter.text,
            # Left out if unused: states of earlier versions have no such keys.
            **({"derive": list(self.derive)} if self.derive else {}),
            **({"gamma": self.gamma} if MC_RETURN in self.derived(()) else {}),
        }


class RowRange(NamedTuple):
    """Which rows of a table a reader sees.

    Attributes:
        first: Number of the first row; see `PolicyView.first`.
        rows: Number of rows.
        head: Logical number of the first row that is too new to be seen.
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
        rows: Logical numbers of the rows in recorded order; None if they are consecutive.
        span: Which rows are seen; None: the current rows of the table.
        writers: (row numbers at which the rows of a writer begin, the writers); None for a live store.
        trimmed: The writers whose first rows were trimmed.
    """

    name: str
    policy: PolicySchema
    table: RowTable
    rows: Ids | None = None
    span: RowRange | None = None
    writers: tuple[Ids, NDArray[Any]] | None = None
    trimmed: frozenset[str] = frozenset()

    @property
    def first(self) -> int:
        """Number of the first row. Rows are numbered in recorded order, which may not be logical order."""
        return self.table.tail if self.span is None else self.span.first

    @property
    def count(self) -> int:
        """Number of rows seen."""
        return len(self.table) if self.span is None else self.span.rows

    @property
    def head(self) -> int:
        """Logical number of the first row that is too new to be seen."""
        return self.table.head if self.span is None else self.span.head

    @property
    def numbers(self) -> tuple[int, int]:
        """Number of the first row, and the number after the last."""
        return self.first, self.first + self.count

    def rows_of(self, numbers: Ids) -> Ids:
        """Logical numbers of the rows with the given numbers."""
        return numbers if self.rows is None else self.rows[numbers]

    def numbers_of(self, rows: Ids) -> Ids:
        """Numbers of the rows with the given logical numbers; below `first` for unseen rows."""
        return rows if self.rows is None else self._numbers[rows]

    def writer_of(self, rows: Ids) -> str | NDArray[Any]:
        """The writers of the rows with the given logical numbers."""
        if self.writers is None:
            return ""
        starts, names = self.writers
        found: NDArray[Any] = names[np.searchsorted(starts, self.numbers_of(rows), "right") - 1]
        return found

    def episode_values(self) -> EpisodeValues:
        """Columns that are derived from the whole episodes of the rows seen."""
        leaves = [leaf for leaf in self.table.layout.packed if not (leaf.path or leaf.spec.shape)]
        flat = {leaf.column: leaf.physical for leaf in leaves}
        rows = self.rows_of(np.arange(*self.numbers))
        return EpisodeValues(self.table, rows, head=self.head, flat=flat, trimmed=self._is_trimmed)

    def _is_trimmed(self, rows: Ids) -> NDArray[np.bool_]:
        return np.isin(np.asarray(self.writer_of(rows), str), sorted(self.trimmed))

    @cached_property
    def _numbers(self) -> Ids:
        assert self.rows is not None
        found = np.full(self.head, -1, np.int64)
        found[self.rows] = np.arange(len(self.rows))
        return found

    def wanted(self, draw: Draw) -> list[Leaf]:
        """The leaves of a draw's columns.

        Raises:
            MissingColumn: The policy lacks a column.
        """
        if draw.columns is None:
            return self.table.leaves
        missing = sorted(draw.columns - self.policy.names)
        if missing:
            form = self.policy.infos
            if form is not None and form.has_rest and column_of_name(missing[0]) == Columns.INFOS:
                raise MissingColumn(
                    f"no key of infos has a column {missing[0]!r} in policy {self.name!r}: if its values "
                    "have several types, read 'infos' whole",
                    column=missing[0],
                )
            raise MissingColumn(
                f"no column {missing[0]!r} in policy {self.name!r}; its columns are "
                f"{', '.join(sorted(self.policy.columns))}{did_you_mean(missing[0], self.policy.columns)}",
                column=missing[0],
            )
        self.policy.check_whole_tuples(draw.columns)
        names = with_validity((self.policy,), draw.columns)
        return [leaf for leaf in self.table.leaves if is_named(leaf, names)]

    def single(self, column: str, why: str) -> Leaf:
        """The leaf of a packed column with one number a row.

        Raises:
            MissingColumn: The policy has no such column.
        """
        found = [leaf for leaf in self.table.layout.packed if leaf.column == column]
        if len(found) != 1 or found[0].path or found[0].spec.shape:
            raise MissingColumn(f"{why} needs the column {column!r} with one number a row", column=column)
        return found[0]


class _Index:
    """The units of a draw, by ascending numbers in recorded order, while rows come and go.

    Args:
        span: Returns the number of the first row (or joint step), and the number after the last.
        find: Returns the units that a range of rows (or joint steps) completes. Whether a unit exists depends
            only on the rows up to the one that completes it.
        per_row: How many units may begin with one row: units of row r have numbers from ``r * per_row`` on.
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
        """Drop units that begin before the first row, and add units that new rows complete."""
        first, stop = self._span()
        self._numbers.drop_below(first * self._per_row)
        begin = max(self._seen, first)
        found = [self._find(at, min(at + _CHUNK, stop)) for at in range(begin, stop, _CHUNK)]
        if found:
            self._numbers.insert(np.concatenate(found))
        self._seen = stop


class Units(ABC):
    """The units of a draw. A batch consists of the units with the given numbers, in that order."""

    #: Whether slicing a batch's rows gives smaller batches.
    sliceable = False
    #: Which rows, or joint steps, the units begin with; None: all of them, or not applicable.
    _index: _Index | None = None

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of units."""

    def update(self) -> None:
        """Adopt rows that were added or removed; takes time in proportion to their number."""
        if self._index is not None:
            self._index.update()

    @abstractmethod
    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        """Make a batch of the units with the given numbers; the caller owns its arrays.

        Args:
            numbers: Numbers of the units.
            also: Further columns, one value a unit, repeated for all rows of a longer unit.
        """


def open_units(held: Mapping[str, PolicyView], draw: Draw, *, steps: Steps | None = None) -> Units:
    """The units of a draw.

    Args:
        held: Policy id -> its rows.
        draw: What is drawn.
        steps: Which rows belong to each joint step; None for a single agent.

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
    """Makes the columns of rows of one policy."""

    def __init__(self, held: PolicyView, draw: Draw) -> None:
        self.held = held
        self.draw = draw
        self.leaves: list[Leaf] = held.wanted(draw)
        #: The wanted parts of infos, if a residual may have values of theirs; else None.
        self._info_parts: list[Path] | None = None
        form = held.policy.infos
        if form is not None and form.has_rest:
            parts = [leaf.path for leaf in self.leaves if leaf.column == Columns.INFOS]
            if parts and REST not in parts:
                self._info_parts = parts
                given = {leaf.physical for leaf in self.leaves}
                self.leaves = [
                    leaf
                    for leaf in held.table.leaves
                    if leaf.physical in given or leaf.column == Columns.INFOS
                ]
        self.plan: Plan = held.table.plan(self.leaves)
        #: Physical and logical names, in schema order; None if some column is nested.
        self.plain: list[tuple[str, str]] | None = None
        given = {leaf.physical for leaf in self.leaves}
        named = [leaf for leaf in held.policy.leaves if leaf.physical in given]
        if not any(leaf.path for leaf in named):
            self.plain = [(leaf.physical, leaf.column) for leaf in named]
        self._rewards = self._terminated = self._valid = None
        known = held.policy.columns
        for name in draw.derive:
            if name in known:
                raise OptionError(f"derive: the data has a column {name!r} already", column=name)
        self._derived: dict[str, NDArray[np.float64]] = {}
        self._filter = draw.filter
        if draw.filter is not None:
            wanted = draw.derived(known)
            schema = PolicySchema((*held.policy.leaves, *map(episode_leaf, dict.fromkeys(wanted))))
            draw.filter.check(schema, derived=wanted)
        if names := dict.fromkeys(draw.derived(known)):
            episodes = held.episode_values()
            self._derived = {name: episodes.of(name, draw.gamma) for name in names}
            if draw.filter is not None and draw.filter.quantiles:
                self._filter = self._with_quantiles(draw.filter, episodes.firsts)
        if draw.n_step is not None:
            self._rewards = held.single(Columns.REWARDS, "NStep")
            self._terminated = held.single(Columns.TERMINATEDS, "NStep").physical
            if Columns.NEXT_OBS_VALID in held.policy.columns:
                self._valid = held.single(Columns.NEXT_OBS_VALID, "NStep").physical

    def columns(self, rows: Ids) -> dict[str, Any]:
        """The columns of single transitions, or of n-step transitions, that begin with the given rows."""
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
            if self._info_parts is not None and (form := self.held.policy.infos) is not None:
                made[Columns.INFOS] = form.parts(made[Columns.INFOS], self._info_parts, len(rows))
        if self.draw.indexes:
            made[BATCH_INDEXES] = rows.copy()
        for name in self.draw.derive:
            made[name] = self._derived[name][rows].astype(np.float32)
        return made

    def _with_quantiles(self, chosen: RowFilter, firsts: Ids) -> RowFilter:
        """The filter with the values of its quantiles, each episode counted once."""
        if chosen.split is not None:
            side = RowFilter.on_side(chosen.split, None)
            firsts = firsts[self._passes(side, firsts)]

        def value_of(column: str, share: float) -> float:
            values = self._derived[column][firsts]
            values = values[np.isfinite(values)]
            return float(np.quantile(values, share)) if len(values) else np.nan

        return chosen.with_quantiles(value_of)

    def _n_step(self, rows: Ids, step: NStep) -> dict[str, Any]:
        """Columns of the first rows; some columns of an n-step transition come from its last row."""
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
        """How to gather the columns of the first rows, and those of the last."""
        table = self.held.table
        firsts = [leaf for leaf in self.leaves if leaf.column not in _OF_LAST and leaf != self._rewards]
        return table.plan(firsts), table.plan(leaf for leaf in self.leaves if leaf.column in _OF_LAST)

    def _mask(self, window: Window) -> NDArray[np.float32]:
        """1 where the value of a next state can be bootstrapped."""
        table = self.held.table
        assert self._terminated is not None
        ends = np.asarray(table.values(self._terminated, window.last), bool)
        if self._valid is not None:
            ends = ends | ~np.asarray(table.values(self._valid, window.last), bool)
        return (~ends).astype(np.float32)

    def passes(self, rows: Ids) -> NDArray[np.bool_]:
        """Which rows pass the filter; all without a filter."""
        if self._filter is None or not len(rows):
            return np.ones(len(rows), bool)
        return self._passes(self._filter, rows)

    def _passes(self, chosen: RowFilter, rows: Ids) -> NDArray[np.bool_]:
        columns = self._nested(self.held.table.gather(rows, self._filter_plan))
        if chosen.columns is not None:
            columns |= {name: self._derived[name][rows] for name in chosen.columns if name in self._derived}
        return chosen.mask(columns, rows=len(rows), writer=self.held.writer_of(rows))

    @cached_property
    def _filter_plan(self) -> Plan:
        """How to gather the columns that the filter reads."""
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
    """Units of one row each, or of the n-step transition that begins with that row."""

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
        """Logical numbers of the rows with which the given units begin."""
        held = self._maker.held
        if self._index is not None:
            return held.rows_of(self._index[numbers])
        first = held.first
        return held.rows_of(numbers + first if first else numbers)

    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        columns = self._maker.columns(self.rows(numbers))
        return SampleBatch._trusted(columns if also is None else {**columns, **also})

    # ---- for gathering rows of several tables together ----

    @property
    def table(self) -> RowTable:
        """The table that holds the rows."""
        return self._maker.held.table

    @property
    def plan(self) -> Plan:
        """The wanted columns."""
        return self._maker.plan

    @property
    def is_packed(self) -> bool:
        """Whether the columns are packed rows as recorded, of a table that never drops rows."""
        plan, draw = self._maker.plan, self._maker.draw
        elsewhere = plan.windows or plan.wide or plan.texts or len(plan.packed) < len(plan.fixed)
        return not (elsewhere or draw.n_step or draw.views or draw.indexes or draw.derive or self.table.ring)

    def looks_like(self, other: RowUnits) -> bool:
        """Whether both units have the same packed rows, wanted columns and names."""
        return (
            self.table.packed.dtype == other.table.packed.dtype
            and self.table.row == other.table.row
            and self.plan.packed == other.plan.packed
            and self._maker.plain is not None
            and self._maker.plain == other._maker.plain
        )

    def named(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Physical columns by their logical names."""
        return {column: arrays[physical] for physical, column in self._maker.plain or ()}


class _ChainUnits(Units):
    """Units that begin within an episode and continue with the rows that follow."""

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
        if cut.layout == "time" and MASK in maker.held.policy.columns:
            raise OptionError(
                f"Sequences.layout='time' adds the column {MASK!r}, which the data has already", column=MASK
            )
        super().__init__(maker, per_row=cut.burn_in + 1)

    def _find(self, start: int, stop: int) -> Ids:
        """The sequences that rows complete, each as first row times (``burn_in + 1``) plus burn-in."""
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
        if is_typed(infos := columns.get(Columns.INFOS)):
            columns[Columns.INFOS] = info_objects(infos)  # Padding is None, not an info without keys.
        begins = np.arange(len(numbers)) * length
        place = ranges(begins if self._cut.padding == "right" else begins + length - sizes, sizes)
        specs = {(leaf.column, *leaf.path): leaf.spec for leaf in held.table.leaves}
        padded = {
            name: unflatten(
                [path for path, _ in leaves(column)],
                [
                    _padded(leaf, place, len(numbers) * length, specs.get((name, *path)))
                    for path, leaf in leaves(column)
                ],
            )
            for name, column in columns.items()
        }
        if self._cut.burn_in:
            within = ranges(np.zeros(len(numbers), np.int64), sizes)
            padded["burn_in"] = _padded(within < np.repeat(burn_in, sizes), place, len(numbers) * length)
        if self._cut.layout == "time":
            padded[MASK] = _padded(np.ones(len(rows), bool), place, len(numbers) * length)
            padded = {
                name: map_structure(lambda leaf: leaf.reshape(len(numbers), length, *leaf.shape[1:]), column)
                for name, column in padded.items()
            }
            return SampleBatch({**padded, **_state_in(held, self._states, starts), **(also or {})})
        padded |= _state_in(held, self._states, starts)
        padded |= {name: np.repeat(values, length) for name, values in (also or {}).items()}
        padded[Columns.SEQ_LENS] = sizes.astype(np.int32)
        return SampleBatch(padded, zero_padded=True, max_seq_len=length)


class _EpisodeUnits(_ChainUnits):
    """Whole episodes, concatenated, with ``seq_lens``; each up to the first gap in its recording."""

    def _find(self, start: int, stop: int) -> Ids:
        """Numbers of the rows that begin an episode."""
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
    """Steps of several agents: all rows with one (eps_id, t)."""

    def __init__(self, makers: Mapping[str, _Maker], draw: Draw, steps: Steps) -> None:
        if draw.sequences is not None or draw.episodes:
            raise OptionError(
                f"rlio.Sequences and rlio.WholeEpisodes are of one agent: pass policy={min(makers)!r}"
            )
        self._makers = makers
        self._steps = steps
        if draw.filter is not None:
            self._index = _Index(lambda: (steps.first, steps.stop), self._find)

    @property
    def count(self) -> int:
        return self._steps.count if self._index is None else len(self._index)

    def _find(self, start: int, stop: int) -> Ids:
        """Numbers of the steps with a row that passes the filter."""
        numbers = np.arange(start, stop)
        found = np.zeros(len(numbers), bool)
        for pid, maker in self._makers.items():
            rows, sizes = self._steps.of(pid, numbers)
            found[np.repeat(numbers - start, sizes)[maker.passes(rows)]] = True
        return numbers[found]

    def batch(self, numbers: Ids, also: Mapping[str, NDArray[Any]] | None = None) -> Batch:
        if also:
            raise OptionError("draws by priority are of one policy: pass policy=...")
        wanted = numbers + self._steps.first if self._index is None else self._index[numbers]
        parts = {}
        for pid, maker in self._makers.items():
            rows, _ = self._steps.of(pid, wanted)
            if len(rows):
                parts[pid] = SampleBatch._trusted(maker.columns(rows))
        return MultiAgentBatch(parts, len(wanted))


def _padded(leaf: NDArray[Any], place: Ids, rows: int, spec: ColumnSpec | None = None) -> NDArray[Any]:
    """Rows at some places of as many; between them zeros, empty rows of the column's type, or None."""
    if leaf.dtype != object:
        made = np.zeros((rows, *leaf.shape[1:]), leaf.dtype)
    elif spec is not None and spec.kind in TEXTS:
        made = blank_rows(spec, rows)
    else:
        made = np.full((rows, *leaf.shape[1:]), None, object)
    made[place] = leaf
    return made


def _states(held: PolicyView) -> dict[str, Leaf]:
    """``state_in_k`` -> the leaf of ``state_out_k``, its source."""
    found = {}
    for leaf in held.table.leaves:
        if leaf.column.startswith(STATE_OUT_PREFIX) and not leaf.path:
            found[STATE_IN_PREFIX + leaf.column.removeprefix(STATE_OUT_PREFIX)] = leaf
    return found


def _state_in(held: PolicyView, states: Mapping[str, Leaf], starts: Ids) -> dict[str, Any]:
    """The recurrent state at the start of sequences: the output state of the row before, or zeros."""
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
