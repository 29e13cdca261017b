"""Prioritised replay: draws rows in proportion to their priorities, and weights them accordingly.

    P(i) = p_i / sum_k p_k,   p_i = (|error_i| + epsilon)^alpha
    w_i  = (N P(i))^-beta / max_j w_j

`SumTree` keeps priorities and finds rows. A store uses `Priorities`, which turns errors into rows and
weights. This module does not know which rows exist: a row that must not be drawn, because it is forgotten or
filtered out, has priority 0.

Nothing here locks. If threads share a tree, hold a lock around every call, including `find` and `draw`.

Example:
    >>> import numpy as np
    >>> priorities = Priorities(4, Prioritised(alpha=1.0, beta=1.0))
    >>> priorities.appended(range(3))                     # Slot 3 holds no row.
    >>> priorities.update([0, 1, 2], [1.0, 1.0, 2.0])
    >>> rng = np.random.Generator(np.random.Philox(0))
    >>> slots, weights = priorities.draw(8, rng)
    >>> slots.tolist()
    [0, 0, 1, 1, 2, 2, 2, 2]
    >>> weights.round(2).tolist()
    [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]

Source: Schaul et al., "Prioritized Experience Replay" (2016), sections 3.3 and 3.4, appendix B.2.1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from rlio.errors import OptionError, StateError, excerpt
from rlio.support.options import check_choice, check_number, checked_keywords, set_options

__all__ = ["LARGEST", "LEAST", "Priorities", "Prioritised", "Prioritized", "SumTree"]

#: A priority is 0 or lies between these limits. Sums of 2**63 of the largest are then finite, and a share of
#: the least is still exact.
LEAST, LARGEST = 2.0**-960, 2.0**960

Slots: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.float64]

# Children of a node: one cache line of float64.
_FAN_OUT = 8
_SHIFT = 3
# Most nodes of the level on which masses are looked up by bisection in running sums. Each update recomputes
# those sums, at 3 ns a node; one more level costs 15 us for each draw and update of 256.
_TOP = 2048
# Nodes to compute at a time when recomputing a whole level: the intermediate sums stay in the cache.
_BLOCK = 16_384


class SumTree:
    """A sum tree: non-negative numbers, one a slot, that finds the slots of masses in their running sum.

    Each node has eight children and holds their sum. Every change recomputes the sum from the children in a
    fixed order, and never adds differences. Sums therefore do not drift; they depend only on the values and
    the capacity.

    Args:
        capacity: Slots, at least 1; all hold 0.
        smallest: Whether to support the property `smallest`.
    """

    def __init__(self, capacity: int, *, smallest: bool = False) -> None:
        #: Number of slots.
        self.capacity = capacity
        # The values, padded with zeros; the sums of every eight values; the sums of those; up to the top.
        self._levels: list[Values] = [np.zeros(size, np.float64) for size in _level_sizes(capacity)]
        self._bounds = _LowerBounds(len(self._levels[0])) if smallest else None
        # Running sums of the top level, from 0; valid unless stale.
        self._running: Values = np.zeros(len(self._levels[-1]) + 1, np.float64)
        self._stale = False

    @property
    def values(self) -> Values:
        """The value of each slot; a view."""
        return self._levels[0][: self.capacity]

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._running_sums()[-1])

    @property
    def smallest(self) -> float:
        """The smallest value above 0; inf if all are 0."""
        assert self._bounds is not None
        return self._bounds.smallest(self._levels[0])

    def fill(self, slots: range, value: float) -> None:
        """Give neighbouring ``slots`` one value."""
        if slots:
            self.values[slots.start : slots.stop] = value
            self._changed(slots.start, slots.stop, bound=value or math.inf)

    def restore(self, values: Values) -> None:
        """Set all values: all sums are then equal to those of the tree that had them, bit for bit."""
        self.values[:] = values
        self._changed(0, len(values), bound=LEAST)

    def locate(self, masses: Values) -> tuple[Slots, Values]:
        """Slots and values at some masses up to the total, plus a rounding error; changes ``masses``."""
        running = self._running_sums()
        np.minimum(masses, math.nextafter(running[-1], 0.0), out=masses)
        node = running[1:].searchsorted(masses, side="right")
        rest = masses - running.take(node)
        for level in self._levels[-2::-1]:
            node = _descend(level, node, rest)
        values = self._levels[0].take(node)
        if np.minimum.reduce(values, initial=1.0) <= 0.0:
            for index in np.flatnonzero(values <= 0.0):
                node[index] = self._locate_one(masses[index])
            values = self._levels[0].take(node)
        return node, values

    def _locate_one(self, mass: float) -> int:
        """The slot of a mass that rounding moved past the last value above 0 of some node."""
        running = self._running_sums()
        node = int(running[1:].searchsorted(mass, side="right"))
        rest = mass - running[node]
        for level in self._levels[-2::-1]:
            children = level[_FAN_OUT * node : _FAN_OUT * (node + 1)]
            before = np.concatenate([[0.0], np.add.accumulate(children)])
            last = int(np.flatnonzero(children)[-1])
            child = min(int(before[1:].searchsorted(rest, side="right")), last)
            rest -= before[child]
            node = _FAN_OUT * node + child
        return node

    def _running_sums(self) -> Values:
        if self._stale:
            np.add.accumulate(self._levels[-1], out=self._running[1:])
            self._stale = False
        return self._running

    def put(self, slots: Slots, values: Values, *, bounds: Values) -> None:
        """Set the values of ``slots``; if a slot is named twice, the last value counts.

        Args:
            slots: Shape (n,).
            values: Shape (n,).
            bounds: See `_LowerBounds.put`.
        """
        self._levels[0][slots] = values
        at = slots
        for child, parent in pairwise(self._levels):
            at = at >> _SHIFT
            if len(at) >= len(parent):
                _sum_stretch(child, parent, 0, len(parent))
            else:
                # A node that occurs twice gets the same sum twice.
                parent[at] = _sum_eights(child.reshape(-1, _FAN_OUT).take(at, axis=0).reshape(-1))
        if self._bounds is not None:
            self._bounds.put(slots, bounds)
        self._stale = True

    def _changed(self, start: int, stop: int, *, bound: float) -> None:
        """Recompute what depends on slots ``start`` to ``stop - 1``; see `_LowerBounds.put_stretch`."""
        low, high = start, stop
        for child, parent in pairwise(self._levels):
            low, high = low >> _SHIFT, -(-high >> _SHIFT)
            _sum_stretch(child, parent, low, high)
        if self._bounds is not None:
            self._bounds.put_stretch(start, stop, bound)
        self._stale = True


def _sum_stretch(child: Values, parent: Values, start: int, stop: int) -> None:
    """Recompute the nodes ``start`` to ``stop - 1`` of ``parent``."""
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        parent[low:high] = _sum_eights(child[_FAN_OUT * low : _FAN_OUT * high])


def _sum_eights(children: Values) -> Values:
    """The sum of every eight values, pairwise, because `np.add.reduce` over short rows is slower."""
    fours = children[::2] + children[1::2]
    twos = fours[::2] + fours[1::2]
    ones: Values = twos[::2] + twos[1::2]
    return ones


def _descend(level: Values, node: Slots, rest: Values) -> Slots:
    """Move each mass from its node to the child on which it falls.

    Args:
        level: The children of all nodes.
        node: Node of each mass, shape (n,).
        rest: The mass minus the sum of all nodes before its node; changed to the same for the child.
    """
    eights = level.reshape(-1, _FAN_OUT).take(node, axis=0).reshape(-1)
    # The same sums as in the node's computation, of its quarters and halves.
    fours = eights[::2] + eights[1::2]
    left = fours[::4] + fours[1::4]
    first = np.arange(len(node))
    at = first
    for deeper in (fours, eights, None):
        beyond = rest >= left
        left *= beyond
        rest -= left
        at = at + at
        at += beyond
        if deeper is not None:
            left = deeper.take(at + at)
    # `at` counts the children of the n visited nodes; convert to the children of all nodes of the level.
    at += (node - first) << _SHIFT
    return at


class _LowerBounds:
    """A lower bound of the values above 0 in each stretch of slots, made exact only on demand.

    A value that increases or disappears leaves a bound too low, which is harmless. If that bound is the
    lowest when the smallest value is needed, its stretch is scanned. This is rare, because small values are
    seldom drawn. A tree of minima would be recomputed at every update, which costs more than the sums.
    """

    def __init__(self, size: int) -> None:
        # Scanning a stretch of 512 takes 3 us, and finding the lowest of 4096 bounds 1 us.
        self._shift = 9
        while size >> self._shift > 4096:
            self._shift += 1
        self._low: Values = np.full((size >> self._shift) + 1, math.inf, np.float64)
        self._exact: NDArray[np.bool_] = np.ones(len(self._low), np.bool_)

    def put(self, slots: Slots, bounds: Values) -> None:
        """Record new values of ``slots``, each 0 or at least its bound; shape (n,) or ()."""
        at = slots >> self._shift
        np.minimum.at(self._low, at, bounds)
        self._exact[at] = False

    def put_stretch(self, start: int, stop: int, bound: float) -> None:
        """Record new values of slots ``start`` to ``stop - 1``, each 0 or at least ``bound``."""
        at = slice(start >> self._shift, (stop - 1 >> self._shift) + 1)
        np.minimum(self._low[at], bound, out=self._low[at])
        self._exact[at] = False

    def smallest(self, leaves: Values) -> float:
        """The smallest value above 0 among ``leaves``; inf if all are 0."""
        low, exact = self._low, self._exact
        while not exact[at := int(low.argmin())]:
            stretch = leaves[at << self._shift : at + 1 << self._shift]
            low[at] = np.minimum.reduce(stretch, where=stretch > 0.0, initial=math.inf)
            exact[at] = True
        return float(low[at])


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class Prioritised:
    """How to draw rows by priority. The defaults are those of the paper's proportional variant.

    Attributes:
        alpha: How much priorities count, at least 0; with 0, all rows are equal.
        beta: How much of the bias the weights correct, 0 to 1; or a function of the number of rows drawn so
            far, such as ``lambda drawn: min(1.0, 0.4 + 0.6 * drawn / 1e7)``.
        epsilon: Added to each error, above 0: rows without an error are still drawn now and then.
        normalise: Where the largest weight is 1: "buffer", among all rows that can be drawn; "batch", among
            the rows of the batch. The paper's algorithm, RLlib, TorchRL and cpprb divide by the largest
            weight of all rows. With "batch" (Dopamine), a single row of tiny priority does not push all
            weights towards 0, and `Priorities.update` is quicker.
    """

    alpha: float = 0.6
    beta: float | Callable[[int], float] = 0.4
    epsilon: float = 1e-6
    normalise: Literal["buffer", "batch"] = "buffer"

    def __post_init__(self) -> None:
        check_choice("normalise", self.normalise, ("buffer", "batch"))
        set_options(
            self,
            alpha=check_number("alpha", self.alpha, least=0),
            beta=self.beta if callable(self.beta) else _checked_beta(self.beta),
            epsilon=check_number("epsilon", self.epsilon, above=0),
        )
        least = _power(self.epsilon, self.alpha)
        if not (LEAST <= least <= LARGEST and _largest_error(self) > 0.0):
            raise OptionError(
                f"alpha={self.alpha}, epsilon={self.epsilon}: epsilon to the power alpha is outside "
                f"{LEAST:.0e} to {LARGEST:.0e}; choose a smaller alpha"
            )


Prioritized = Prioritised


class Priorities:
    """The priorities of a table's rows, by slot: draws, weights and updates.

    Slots that are empty, forgotten or filtered out have priority 0. `update` leaves them at 0, because their
    rows may have gone since they were drawn. Only `appended` adds rows.

    Args:
        capacity: Slots, at least 1; all empty.
        options: How rows are drawn.

    Attributes:
        options: As given.
        tree: The tree of priorities.
        drawn: Rows drawn so far, on which ``beta`` may depend.
        maximum: The highest priority from `update` so far, at least 1; new rows get it.
    """

    def __init__(self, capacity: int, options: Prioritised | None = None) -> None:
        self.options: Prioritised = Prioritised() if options is None else options
        self.tree: SumTree = SumTree(capacity, smallest=self._whole_buffer)
        self.drawn: int = 0
        self.maximum: float = 1.0
        self._largest_error = _largest_error(self.options)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Slots, NDArray[np.float32]]:
        """Draw ``n`` rows with replacement, in proportion to their priorities.

        Divides the total into ``n`` equal parts and draws one mass from each (stratified sampling): a row is
        drawn n P(i) times, give or take less than one at each of its ends.

        Args:
            n: At least 1.
            rng: Gives ``n`` numbers. The state of `numpy.random.Philox` is a counter.

        Returns:
            Slots, shape (n,) int64, ascending; and their weights, shape (n,) float32, each above 0 (within
            the range of float32) and at most 1.

        Raises:
            OptionError: ``n`` is below 1, no row has a priority, or ``beta`` returned an illegal value.
        """
        if n < 1:
            raise OptionError(f"draw({n}): expected a number of rows, at least 1")
        total = self.tree.total
        if not total > 0.0:
            raise OptionError(f"draw({n}): no row has a priority above 0; add rows, or loosen the filter")
        beta = self.options.beta
        beta = _checked_beta(beta(self.drawn)) if callable(beta) else beta
        masses = rng.random(n)
        masses += np.arange(n)
        masses *= total / n
        slots, priorities = self.tree.locate(masses)
        self.drawn += n
        return slots, self._weights(priorities, beta)

    def update(self, slots: npt.ArrayLike, errors: npt.ArrayLike) -> None:
        """Set the priorities of rows from their errors; if a slot is named twice, the last error counts.

        Args:
            slots: Integers, shape (n,), from `draw`. Slots of priority 0 keep it.
            errors: Temporal-difference errors or losses, shape (n,), of either sign; float64 is quickest.

        Raises:
            OptionError: A slot is out of range, an error is not finite, or its power exceeds `LARGEST`.
                Nothing has changed then.
        """
        wanted = _checked_slots(slots, self.tree.capacity)
        values = np.abs(np.asarray(errors, np.float64))
        if values.shape != wanted.shape:
            raise OptionError(
                f"errors of shape {values.shape} for {len(wanted)} slots: pass one error a slot"
            )
        # One comparison suffices: NaN and infinity are not below the limit, and no power below it overflows.
        if not np.maximum.reduce(values, initial=0.0) <= self._largest_error:
            raise OptionError(_why_not(values, self._largest_error, self.options.alpha))
        values += self.options.epsilon
        np.power(values, self.options.alpha, out=values)
        self.maximum = max(self.maximum, float(np.maximum.reduce(values, initial=0.0)))
        live = self.tree.values.take(wanted) > 0.0
        self.tree.put(wanted, values * live, bounds=values)

    def appended(self, slots: range) -> None:
        """Give the slots of new rows the highest priority so far, regardless of their old one."""
        self.tree.fill(slots, self.maximum)

    def forget(self, slots: range) -> None:
        """Empty a range of slots whose rows are gone: draws never return them."""
        self.tree.fill(slots, 0.0)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return what `from_arrays` needs, except the options.

        Returns:
            ``values``: shape (capacity,) float64, a read-only view that changes with every call; ``drawn``:
            shape () int64; ``maximum``: shape () float64.
        """
        values = self.tree.values
        values.flags.writeable = False
        return {
            "values": values,
            "drawn": np.array(self.drawn, np.int64),
            "maximum": np.array(self.maximum, np.float64),
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], options: Prioritised | None = None
    ) -> Priorities:
        """Restore priorities from the result of `to_arrays`; with equal numbers, they give equal draws.

        Raises:
            StateError: ``arrays`` are not the result of `to_arrays`.
        """
        drawn, maximum = int(_array(arrays, "drawn", 0)), float(_array(arrays, "maximum", 0))
        if drawn < 0 or not 1.0 <= maximum <= LARGEST:
            raise StateError(
                f"drawn={drawn}, maximum={maximum}: expected at least 0, and 1 to {LARGEST:.0e}; pass what "
                "to_arrays() returned"
            )
        values = _array(arrays, "values", 1)
        if not len(values):
            raise StateError("values is empty: expected at least one slot; pass what to_arrays() returned")
        restored = cls(len(values), options)
        restored.tree.restore(_checked_values(values))
        restored.drawn, restored.maximum = drawn, maximum
        return restored

    @property
    def _whole_buffer(self) -> bool:
        return self.options.normalise == "buffer"

    def _weights(self, priorities: Values, beta: float) -> NDArray[np.float32]:
        """(N P(i))^-beta / max_j w_j: N and the sum cancel; the least priority has the largest weight."""
        least = self.tree.smallest if self._whole_buffer else np.minimum.reduce(priorities)
        ratio = np.divide(least, priorities)
        return np.power(ratio, beta, out=ratio).astype(np.float32)


def _level_sizes(capacity: int) -> list[int]:
    """Leaves and nodes of each level, up to the first level that is small enough to be the top."""
    depth = 0
    while -(-capacity // _FAN_OUT**depth) > _TOP:
        depth += 1
    top = -(-capacity // _FAN_OUT**depth)
    return [top * _FAN_OUT ** (depth - level) for level in range(depth + 1)]


def _checked_slots(slots: npt.ArrayLike, capacity: int) -> Slots:
    wanted = np.asarray(slots)
    if wanted.ndim != 1 or (wanted.dtype.kind not in "iu" and wanted.size):
        raise OptionError(
            f"slots of dtype {wanted.dtype} and shape {wanted.shape}: expected integers in one dimension"
        )
    numbers = wanted.astype(np.int64, copy=False)
    # As unsigned numbers, negative numbers exceed any capacity.
    if np.maximum.reduce(numbers.view(np.uint64), initial=0) >= capacity:
        raise OptionError(f"slots {numbers.min()} to {numbers.max()}: expected 0 to {capacity - 1}")
    return numbers


def _checked_values(values: Values) -> Values:
    given = np.asarray(values, np.float64)
    wrong = ~((given == 0.0) | ((given >= LEAST) & (given <= LARGEST)))  # NaN is wrong
    if wrong.any():
        raise StateError(
            f"{np.count_nonzero(wrong)} of {given.size} values are not priorities, such as {given[wrong][0]}"
            f": expected 0, or {LEAST:.0e} to {LARGEST:.0e}"
        )
    return given


def _array(arrays: Mapping[str, NDArray[Any]], name: str, dimensions: int) -> NDArray[Any]:
    if name not in arrays:
        raise StateError(f"{name} is missing among {excerpt(sorted(arrays))}: pass what to_arrays() returned")
    array = np.asarray(arrays[name])
    kind = np.int64 if name == "drawn" else np.float64
    if array.ndim != dimensions or array.dtype != kind:
        raise StateError(
            f"{name} has dtype {array.dtype} and shape {array.shape}: pass what to_arrays() returned"
        )
    return array


def _checked_beta(beta: object) -> float:
    return float(check_number("beta", beta, least=0, most=1))


def _power(base: float, exponent: float) -> float:
    """``base ** exponent`` as `update` computes it; infinity on overflow."""
    with np.errstate(over="ignore"):
        return float(np.power(np.float64(base), exponent))


def _largest_error(options: Prioritised) -> float:
    """The largest error whose priority surely does not exceed `LARGEST`."""
    if options.alpha == 0.0:
        return sys.float_info.max
    # A little less, because powers are rounded and epsilon is added. 2**1023 is close to the largest float.
    return math.ldexp(1.0 - 1e-9, math.floor(min(960.0 / options.alpha, 1023.0))) - options.epsilon


def _why_not(errors: Values, largest: float, alpha: float) -> str:
    endless = errors[~np.isfinite(errors)]
    if len(endless):
        return (
            f"{len(endless)} of {len(errors)} errors are not finite, such as {endless[0]}: the loss has "
            "diverged, or rows without an error were passed"
        )
    return (
        f"an error of {errors.max():.3g}: with alpha={alpha}, errors are at most {largest:.3g}; scale them "
        "down"
    )
