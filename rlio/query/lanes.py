"""Lanes: an epoch is dealt to ranks before it is read, so that each reads its share and no other.

An epoch has as many lanes as ranks began it. The rows, in recorded order or in that of permuted stretches,
are cut into as many equal parts, the lanes. Position p of the epoch is place ``p // lanes`` of lane
``p % lanes``, so any number of ranks can continue from one position: a rank takes every ``world``-th.

Example:
    >>> lane_bounds(10, 3, 0), lane_bounds(10, 3, 1), lane_bounds(10, 3, 2)
    ((0, 4), (4, 7), (7, 10))
    >>> [part[1:] for part in lane_parts(UnitRange(0, 4, 10), 3, total=10, shard=(0, 3))]
    [(2, 4, 0, 3, 1)]
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rlio.query.order import Permutation, WindowRef, gather
from rlio.query.positions import UnitRange

__all__ = ["LaneOrder", "LanePiece", "lane_bounds", "lane_parts", "lanes_of_rank"]

IntArray: TypeAlias = npt.NDArray[np.int64]


def lane_bounds(total: int, lanes: int, lane: int) -> tuple[int, int]:
    """The first unit of a lane, and the one after its last, in the order that is cut into lanes."""
    least, more = divmod(total, lanes)
    first = lane * least + min(lane, more)
    return first, first + least + (lane < more)


def lanes_of_rank(lanes: int, world: int) -> int:
    """Of how many lanes a rank reads rows."""
    return lanes // gcd(lanes, world)


def lane_parts(span: UnitRange, lanes: int, *, total: int, shard: tuple[int, int]) -> list[UnitRange]:
    """A rank's units at some positions of an epoch, lane by lane.

    Args:
        span: Positions of all ranks together.
        lanes: Lanes of the epoch.
        total: Units of an epoch.
        shard: (rank, world).
    """
    rank, world = shard
    # Counted over all epochs, so that a step that spans two gives each rank equally many.
    first = span.start + (rank - span.epoch * total - span.start) % world
    count = len(range(first, span.stop, world))
    several = lanes_of_rank(lanes, world)
    step = several * world // lanes
    found = []
    for number in range(min(several, count)):
        start, lane = divmod(first + number * world, lanes)
        units = -(-(count - number) // several)
        found.append(UnitRange(span.epoch, start, start + (units - 1) * step + 1, lane, lanes, step))
    return found


@dataclass(frozen=True, slots=True)
class LanePiece:
    """Consecutive units of a stretch.

    Attributes:
        stretch: Number of the stretch.
        start, stop: The units, counted from the first of the stretch.
    """

    stretch: int
    start: int
    stop: int


class LaneOrder:
    """A lane of shuffled rows: stretches permuted each epoch and dealt to lanes, rows permuted in windows.

    A stretch is a run of rows of one segment. It is a pure function of (stretches, lanes, lane, window_rows,
    seed, epoch, position).

    Args:
        stretches: Units of each stretch, at least 1, in recorded order.
        seed: Any integer.
        window_rows: Most units in a window, if it has several stretches.
        lanes: Number of lanes.
        lane: Number of this one.
    """

    def __init__(
        self, stretches: Sequence[int] | IntArray, *, seed: int, window_rows: int, lanes: int, lane: int
    ) -> None:
        self._stretches = np.asarray(stretches, np.int64)
        self._seed = operator.index(seed)
        self._window_rows = window_rows
        self._lanes, self._lane = lanes, lane
        first, stop = lane_bounds(int(self._stretches.sum()), lanes, lane)
        self._bounds = first, stop
        # The pieces of one epoch, the first piece of each window, and the place of its first row.
        self._cached: tuple[int, list[LanePiece], list[int], IntArray] | None = None

    def __len__(self) -> int:
        return self._bounds[1] - self._bounds[0]

    def window_at(self, epoch: int, position: int) -> WindowRef:
        """Return the window that serves a place of the lane; `WindowRef.groups` are numbers of its pieces."""
        _, first_piece, starts = self._epoch(epoch)
        index = int(np.searchsorted(starts, position, side="right")) - 1
        start, stop = int(starts[index]), int(starts[index + 1])
        pieces = range(first_piece[index], first_piece[index + 1])
        return WindowRef(index, pieces, self._bounds[0] + start, start, stop - start)

    def rows_in(self, epoch: int, window: WindowRef) -> IntArray:
        """Return the rows of ``window`` in serving order: int64, counted from the window's first row."""
        key = (5, self._lanes, self._lane, window.index)
        return Permutation(window.rows, seed=self._seed, epoch=epoch, key=key).take(0, window.rows)

    def pieces(self, epoch: int, window: WindowRef) -> list[LanePiece]:
        """Return the pieces of ``window``."""
        return self._epoch(epoch)[0][window.groups.start : window.groups.stop]

    def _epoch(self, epoch: int) -> tuple[list[LanePiece], list[int], IntArray]:
        cached = self._cached
        if cached is None or cached[0] != epoch:
            pieces = self._dealt(epoch)
            rows = [piece.stop - piece.start for piece in pieces]
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])
            first_piece = gather(ends, self._window_rows)
            self._cached = cached = (epoch, pieces, first_piece.tolist(), ends[first_piece])
        return cached[1:]

    def _dealt(self, epoch: int) -> list[LanePiece]:
        """The pieces of the lane: the stretches at its ends may be shared with the neighbours."""
        count = len(self._stretches)
        order = Permutation(count, seed=self._seed, epoch=epoch, key=(4,)).take(0, count)
        sizes = self._stretches[order]
        ends = np.cumsum(sizes)
        first, stop = self._bounds
        low, high = np.searchsorted(ends, first, side="right"), np.searchsorted(ends, stop, side="left")
        found = []
        for number, size, end in zip(
            order[low : high + 1].tolist(),
            sizes[low : high + 1].tolist(),
            ends[low : high + 1].tolist(),
            strict=True,
        ):
            begin = end - size
            found.append(LanePiece(number, max(first - begin, 0), min(stop - begin, size)))
        return found if stop > first else []
