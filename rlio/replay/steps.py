"""The joint steps of several agents: which rows of each policy belong to each step, in recorded order.

Steps have logical numbers, which only increase. The steps of one append are forgotten together, as soon as a
table has forgotten a row of one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.replay.memory import Arrays, copied
from rlio.replay.numbers import Numbers
from rlio.support.states import whole_number

__all__ = ["StepLog", "Steps", "bounds_of", "ranges"]

Ids = NDArray[np.int64]


def ranges(starts: Ids, sizes: Ids) -> Ids:
    """Concatenate ranges: ``starts[0], starts[0] + 1, ...`` for each start and size."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    found: Ids = np.arange(total) + np.repeat(starts - (ends - sizes), sizes)
    return found


class Steps:
    """Joint steps.

    Attributes:
        first, stop: Numbers of the oldest kept step, and of the next step.
    """

    def __init__(self) -> None:
        self.first: int = 0
        self.stop: int = 0
        #: Policy id -> logical numbers of its rows, step by step.
        self._rows: dict[str, Numbers] = {}
        #: Policy id -> logical number of its next row before each step, and after the last step.
        self._bounds: dict[str, Numbers] = {}
        #: Number of the first step of each append.
        self._appends: deque[int] = deque()

    @property
    def count(self) -> int:
        """Number of kept steps."""
        return self.stop - self.first

    def add(self, rows: Mapping[str, Ids], bounds: Mapping[str, Ids]) -> None:
        """Add steps.

        Args:
            rows: Policy id -> logical numbers of its rows, step by step; for every existing policy.
            bounds: Policy id -> logical number of its next row before each step, and after the last step,
                shape (steps + 1,).
        """
        added = max((len(own) - 1 for own in bounds.values()), default=0)
        if not added:
            return
        for pid, own in rows.items():
            if pid not in self._rows:  # The policy had no rows before.
                self._rows[pid] = Numbers()
                self._bounds[pid] = Numbers(np.full(self.count + 1, bounds[pid][0]))
            self._rows[pid].extend(own)
            self._bounds[pid].extend(bounds[pid][1:])
        self._appends.append(self.stop)
        self.stop += added

    def forget(self, tails: Mapping[str, int]) -> None:
        """Drop the steps of appends that have a forgotten row.

        Args:
            tails: Policy id -> oldest kept row of its table.
        """
        first = self.first
        while self._appends:
            start, stop = self._appends[0], self._appends[1] if len(self._appends) > 1 else self.stop
            spans = ((own.values[[start - first, stop - first]], pid) for pid, own in self._bounds.items())
            if not any(low < min(high, tails[pid]) for (low, high), pid in spans):
                break
            self._appends.popleft()
            self.first = stop
        dropped = self.first - first
        if dropped:
            for pid, own in self._bounds.items():
                self._rows[pid].drop(int(own.values[dropped] - own.values[0]))
                own.drop(dropped)

    def of(self, policy: str, numbers: Ids) -> tuple[Ids, Ids]:
        """Logical numbers of a policy's rows in the given steps, and the number of its rows in each step."""
        if policy not in self._rows:  # The policy has no rows yet.
            return numbers[:0], np.zeros(len(numbers), np.int64)
        bounds, at = self._bounds[policy].values, numbers - self.first
        start = bounds[at]
        sizes = bounds[at + 1] - start
        found: Ids = self._rows[policy].values[ranges(start - bounds[0], sizes)]
        return found, sizes

    def picked(self, numbers: Ids) -> Steps:
        """Some steps, in the given order, numbered from 0."""
        found = {pid: self.of(pid, numbers) for pid in self._rows}
        rows = {pid: own for pid, (own, _) in found.items()}
        return _steps_of(rows, {pid: sizes for pid, (_, sizes) in found.items()})

    def to_arrays(self) -> tuple[dict[str, Ids], dict[str, Ids]]:
        """Policy id -> its rows, step by step; policy id -> number of its rows in each step."""
        rows = {pid: own.values for pid, own in self._rows.items()}
        return rows, {pid: np.diff(own.values) for pid, own in self._bounds.items()}

    # ---- saving the steps of a ring ----

    def dump(self, arrays: Arrays) -> dict[str, Any]:
        """Copy the steps into arrays; returns as JSON what `restore` needs besides."""
        if not self.count:
            return {"chunks": 0}
        rows, sizes = self.to_arrays()
        kept = {"chunks": np.diff([*self._appends, self.stop])}
        kept |= {f"rows {pid}": own for pid, own in rows.items()}
        kept |= {f"sizes {pid}": own for pid, own in sizes.items()}
        for name, values in kept.items():
            copied(arrays, f"steps {name}", len(values), values)[:] = values
        return {"chunks": len(self._appends), "rows": {pid: len(own) for pid, own in rows.items()}}

    def restore(self, arrays: Arrays, state: Mapping[str, Any], heads: Mapping[str, int]) -> None:
        """Take the result of `dump` into an empty object; steps are numbered from 0.

        Args:
            arrays: The arrays that `dump` wrote.
            state: The result of `dump`.
            heads: Policy id -> logical number of the next row in its table.

        Raises:
            CorruptData, KeyError, TypeError, ValueError: ``state`` is not a result of `dump`.
        """
        chunks = whole_number(state, "chunks", of="the saved steps")
        if not chunks:
            return
        ends = np.cumsum(arrays.array("steps chunks", (chunks,), np.int64))
        self.stop = int(ends[-1])
        self._appends.extend([0, *ends[:-1].tolist()])
        if missing := {pid for pid, head in heads.items() if head} - state["rows"].keys():
            raise ValueError(f"no steps of {sorted(missing)}")
        for pid, size in state["rows"].items():
            sizes = arrays.array(f"steps sizes {pid}", (self.stop,), np.int64)
            if sizes.min() < 0 or sizes.sum() != size:
                raise ValueError(f"steps of {sizes.sum()} rows, not {size}")
            self._rows[pid] = Numbers(arrays.array(f"steps rows {pid}", (size,), np.int64))
            self._bounds[pid] = Numbers(bounds_of(sizes, first=heads[pid] - size))


def bounds_of(sizes: Ids, *, first: int = 0) -> Ids:
    """``first``, and the running end of steps of the given sizes: shape (steps + 1,)."""
    return first + np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _steps_of(rows: Mapping[str, Ids], sizes: Mapping[str, Ids]) -> Steps:
    """Steps from each policy's rows, step by step, and its number of rows in each step."""
    made = Steps()
    made.add(rows, {pid: bounds_of(own) for pid, own in sizes.items()})
    return made


class StepLog:
    """The joint steps of a store that is not a ring: added steps, and steps that the arrays already hold.

    Args:
        arrays: Holds the arrays.
        policies: Ids of the policies.
    """

    def __init__(self, arrays: Arrays, policies: Iterable[str]) -> None:
        self._arrays = arrays
        #: For each `save`: policy id -> its rows, step by step; policy id -> number of its rows in each step.
        self._parts: list[tuple[dict[str, Ids], dict[str, Ids]]] = []
        while sizes := self._stored("sizes", policies):
            self._parts.append((self._stored("rows", sizes), sizes))
        self.added: Steps = Steps()

    def _stored(self, what: str, policies: Iterable[str]) -> dict[str, Ids]:
        """Policy id -> its array of the next save; empty after the last."""
        names = {pid: f"steps {len(self._parts)} {what} {pid}" for pid in policies}
        sizes = {pid: self._arrays.size(name) for pid, name in names.items()}
        return {
            pid: self._arrays.array(names[pid], (size // 8,), np.int64)
            for pid, size in sizes.items()
            if size is not None
        }

    @property
    def stop(self) -> int:
        """Number of the next step."""
        return sum(len(next(iter(sizes.values()))) for _, sizes in self._parts) + self.added.stop

    def save(self) -> None:
        """Write the added steps into arrays, once."""
        if not self.added.count:
            return
        for what, found in zip(("rows", "sizes"), self.added.to_arrays(), strict=True):
            for pid, values in found.items():
                name = f"steps {len(self._parts)} {what} {pid}"
                copied(self._arrays, name, len(values), values)[:] = values

    def view(self, spans: Sequence[tuple[int, int]] | None) -> Steps:
        """The steps of some spans, each (number of the first, how many), in that order; None: all."""
        found = self.added
        if self._parts:
            parts = [*self._parts, self.added.to_arrays()]
            found = _steps_of(*(_joined([part[what] for part in parts]) for what in (0, 1)))
        if spans is None or spans == [(0, found.count)]:
            return found
        none = np.empty(0, np.int64)
        return found.picked(np.concatenate([none, *(np.arange(at, at + count) for at, count in spans)]))


def _joined(parts: Sequence[Mapping[str, Ids]]) -> dict[str, Ids]:
    """Policy id -> its arrays, concatenated; the first part has every policy."""
    return {pid: np.concatenate([part[pid] for part in parts if pid in part]) for pid in parts[0]}
