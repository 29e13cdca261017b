"""The joint steps of several agents: which rows of each policy belong to each step, in recorded order.

Steps have logical numbers, which only grow. Those of one append come together, and are forgotten together: as
soon as a table has forgotten a row of one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.replay.memory import Arrays, copied
from rlio.replay.numbers import Numbers

__all__ = ["StepLog", "Steps", "bounds_of", "ranges"]

Ids = NDArray[np.int64]


def ranges(starts: Ids, sizes: Ids) -> Ids:
    """``starts[0], starts[0] + 1, ...``: one range after the other."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    found: Ids = np.arange(total) + np.repeat(starts - (ends - sizes), sizes)
    return found


class Steps:
    """Joint steps.

    Attributes:
        first, stop: Numbers of the oldest step that is kept, and of the next one.
    """

    def __init__(self) -> None:
        self.first = self.stop = 0
        #: Policy id -> logical numbers of its rows, step by step.
        self._rows: dict[str, Numbers] = {}
        #: Policy id -> logical number that its next row had before each step, and after the last.
        self._bounds: dict[str, Numbers] = {}
        #: Number of the first step of each append.
        self._appends: deque[int] = deque()

    @property
    def count(self) -> int:
        """How many are kept."""
        return self.stop - self.first

    @property
    def appends(self) -> Ids:
        """How many of the kept steps came with each append."""
        return np.diff([*self._appends, self.stop])

    def add(self, rows: Mapping[str, Ids], bounds: Mapping[str, Ids]) -> None:
        """Add steps.

        Args:
            rows: Policy id -> logical numbers of its rows, step by step; of every policy that there is.
            bounds: Policy id -> logical number that its next row had before each step, and after the last,
                shape (steps + 1,).
        """
        added = max((len(own) - 1 for own in bounds.values()), default=0)
        if not added:
            return
        for pid, own in rows.items():
            if pid not in self._rows:  # It took no part before.
                self._rows[pid] = Numbers()
                self._bounds[pid] = Numbers(np.full(self.count + 1, bounds[pid][0]))
            self._rows[pid].extend(own)
            self._bounds[pid].extend(bounds[pid][1:])
        self._appends.append(self.stop)
        self.stop += added

    def forget(self, tails: Mapping[str, int]) -> None:
        """Drop the steps of appends of which a row is forgotten.

        Args:
            tails: Policy id -> the oldest row that its table keeps.
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
        """Logical numbers of a policy's rows in the given steps, and how many each of those has."""
        if policy not in self._rows:  # It has taken no part yet.
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
        """Policy id -> its rows, step by step; policy id -> how many rows each step has."""
        rows = {pid: own.values for pid, own in self._rows.items()}
        return rows, {pid: np.diff(own.values) for pid, own in self._bounds.items()}

    # ---- keeping those of a ring ----

    def dump(self, arrays: Arrays) -> dict[str, Any]:
        """Copy the steps into arrays; give, as JSON, what `restore` needs besides."""
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
        """Take what `dump` gave, numbered from 0; where there are no steps.

        Args:
            arrays: What it wrote.
            state: What it returned.
            heads: Policy id -> logical number of the row that its table gets next.
        """
        if not state["chunks"]:
            return
        ends = np.cumsum(arrays.array("steps chunks", (state["chunks"],), np.int64))
        self.stop = int(ends[-1])
        self._appends.extend([0, *ends[:-1].tolist()])
        for pid, size in state["rows"].items():
            sizes = arrays.array(f"steps sizes {pid}", (self.stop,), np.int64)
            self._rows[pid] = Numbers(arrays.array(f"steps rows {pid}", (size,), np.int64))
            self._bounds[pid] = Numbers(bounds_of(sizes, first=heads[pid] - size))


def bounds_of(sizes: Ids, *, first: int = 0) -> Ids:
    """``first``, and where steps of so many rows end from there on: shape (steps + 1,)."""
    return first + np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _steps_of(rows: Mapping[str, Ids], sizes: Mapping[str, Ids]) -> Steps:
    """Steps by the rows of each policy, step by step, and how many each step has of it."""
    made = Steps()
    made.add(rows, {pid: bounds_of(own) for pid, own in sizes.items()})
    return made


class StepLog:
    """The joint steps of a store that is no ring: those that were added, and those that lie in arrays.

    Args:
        arrays: Where they lie.
        saved: For each `save` so far: policy id -> rows, and how many steps they are.
    """

    def __init__(self, arrays: Arrays, saved: Sequence[tuple[Mapping[str, int], int]]) -> None:
        self._arrays = arrays
        self.saved = list(saved)
        #: For each `save`, its arrays: policy id -> rows, policy id -> rows of each step.
        self._parts = [
            (
                {pid: self._array(number, "rows", pid, size) for pid, size in rows.items()},
                {pid: self._array(number, "sizes", pid, count) for pid in rows},
            )
            for number, (rows, count) in enumerate(saved)
        ]
        self.added = Steps()

    def _array(self, number: int, what: str, pid: str, size: int) -> Ids:
        return self._arrays.array(f"steps {number} {what} {pid}", (size,), np.dtype(np.int64))

    @property
    def stop(self) -> int:
        """Number of the next step."""
        return sum(count for _, count in self.saved) + self.added.stop

    def save(self) -> None:
        """Write the steps that were added since the last time into arrays."""
        if not self.added.count:
            return
        number, (rows, sizes) = len(self.saved), self.added.to_arrays()
        for what, found in (("rows", rows), ("sizes", sizes)):
            for pid, values in found.items():
                target = self._array(number, what, pid, len(values))
                self._arrays.reserve(f"steps {number} {what} {pid}", len(values))
                target[:] = values
        self.saved.append(({pid: len(own) for pid, own in rows.items()}, self.added.count))
        self._parts.append((rows, sizes))
        self.added = Steps()

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
    """Policy id -> its arrays, one after the other; the first part has every policy."""
    return {pid: np.concatenate([part[pid] for part in parts if pid in part]) for pid in parts[0]}
