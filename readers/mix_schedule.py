"""Decides how many steps of a batch each source of a mixture gives: exact shares, in whole numbers.

Example:
    >>> schedule = Schedule(whole_weights([0.7, 0.2, 0.1], ["a", "b", "c"]), order=[0, 1, 2])
    >>> [schedule.deal(4) for _ in range(3)], schedule.counts
    ([[3, 1, 0], [3, 1, 0], [3, 0, 1]], [9, 2, 1])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from rlio.errors import OptionError, excerpt

__all__ = ["Schedule", "Shares", "Weight", "whole_weights"]

#: A relative weight; a float counts as its printed decimal number.
Weight: TypeAlias = float | Fraction | Decimal
#: Steps of each source.
Shares: TypeAlias = tuple[int, ...]

# Approximate number of places of a cycle that are remembered between plans.
_PLACES = 1024


class Schedule:
    """Deals steps to sources by integer weights, each within one step of its share at any time.

    The weights w_i add up to 1. After T steps, source i has had more than ``w_i T - 1`` and fewer than
    ``w_i T + 1`` steps, for any T and any sizes of `deal`. A source must have had floor(w_i T). The
    remaining steps go to the sources with the earliest deadline (count + 1) / w_i. All numbers are exact
    integers.

    Args:
        weights: Whole numbers, 0 or more, not all 0.
        order: A permutation of the sources: which goes first at equal deadlines.
        credits: Steps that each source is owed from before, in units of 1 / `UNIT`; their sum is 0. The bound
            then holds for ``w_i T + credit_i`` as soon as the schedule has caught up.

    Source:
        Tijdeman, "The chairman assignment problem" (1980); Baruah et al., "Proportionate progress" (1996).
        They decide step by step. Here only the end of a batch matters, because its rows have no order in
        time. This keeps the bound: if some schedule meets all later deadlines, then so does one that takes
        earlier deadlines first (swap the two steps where they differ).
    """

    #: Credits are counted in this fraction of a step.
    UNIT = 2**32

    def __init__(
        self, weights: Sequence[int], *, order: Sequence[int], credits: Sequence[int] | None = None
    ) -> None:
        self.weights: list[int] = list(weights)
        self.credits: list[int] = [0] * len(self.weights) if credits is None else list(credits)
        heaviest = max(range(len(self.weights)), key=self.weights.__getitem__)
        for i, weight in enumerate(self.weights):
            if not weight:  # It gives nothing from now on, so its credit goes to another source.
                self.credits[heaviest] += self.credits[i]
                self.credits[i] = 0
        self.counts: list[int] = [0] * len(self.weights)
        self._order = list(order)
        self._sum = sum(self.weights)
        # Deadlines are compared as whole numbers: source i's are multiples of common / weight_i.
        common = math.lcm(*(weight for weight in self.weights if weight))
        self._spacing = [common // weight if weight else 0 for weight in self.weights]
        #: Place in the cycle of `plan` -> the shares dealt there, and the next place. `_step` is the batch
        #: size.
        self._places: dict[Shares, tuple[Shares, Shares]] = {}
        self._step = 0

    def deal(self, n: int) -> list[int]:
        """Return how many of the next ``n`` steps each source gives, and count them."""
        shares = self._dealt(self.counts, n)
        self.counts = [count + share for count, share in zip(self.counts, shares, strict=True)]
        return shares

    def plan(self, n: int, times: int) -> list[Shares]:
        """Return the results of ``times`` calls of ``deal(n)``, without counting the steps.

        The shares depend only on the place in the cycle of the weights' sum: after each cycle every source
        has had its weight. Each place of the cycle is therefore computed once.
        """
        # If no place comes again soon, remembering places is useless.
        most = _PLACES if self._sum // math.gcd(self._sum, n) <= _PLACES else 1
        if n != self._step or len(self._places) > most:
            self._step, self._places = n, {}
        place, planned = self._within(self.counts), []
        for _ in range(times):
            known = self._places.get(place)
            if known is None:
                shares = tuple(self._dealt(place, n))
                after = [count + share for count, share in zip(place, shares, strict=True)]
                known = self._places[place] = (shares, self._within(after))
            planned.append(known[0])
            place = known[1]
        return planned

    def _within(self, counts: Sequence[int]) -> Shares:
        """The place in the cycle: steps that each source has had since the cycle began."""
        cycles = sum(counts) // self._sum
        return tuple(count - cycles * weight for count, weight in zip(counts, self.weights, strict=True))

    def _dealt(self, counts: Sequence[int], n: int) -> list[int]:
        """How many of the next ``n`` steps each source gives after ``counts``."""
        total = sum(counts) + n
        shares, left = [0] * len(counts), n
        optional = []
        for rank, i in enumerate(self._order):
            weight, count = self.weights[i], counts[i]
            if not weight:
                continue
            entitled = weight * total * self.UNIT + self.credits[i] * self._sum
            whole, part = divmod(entitled, self._sum * self.UNIT)
            if whole >= count:
                shares[i] = whole - count
                left -= shares[i]
                if part:
                    optional.append((self._deadline(i, whole + 1), rank, i))
        optional.sort()
        for _, _, i in optional[: max(left, 0)]:
            shares[i] += 1
        while left < 0:
            # Only with credits: more is owed than there are steps, so the latest deadlines wait.
            _, i = max((self._deadline(i, counts[i] + share), i) for i, share in enumerate(shares) if share)
            shares[i] -= 1
            left += 1
        return shares

    def owed(self) -> list[int]:
        """Steps that each source is owed now, as the ``credits`` of another schedule."""
        total, unit = sum(self.counts), self.UNIT
        owed = [
            credit + (weight * total * unit) // self._sum - count * unit
            for weight, credit, count in zip(self.weights, self.credits, self.counts, strict=True)
        ]
        # Rounding down left a few units over; the sum must be 0.
        owed[self._order[0]] -= sum(owed)
        return owed

    def _deadline(self, i: int, step: int) -> int:
        """Time by which source ``i`` should have had ``step`` steps, in a unit common to all sources."""
        return (step * self.UNIT - self.credits[i]) * self._spacing[i]


def whole_weights(weights: Sequence[Weight], names: Sequence[str]) -> list[int]:
    """The smallest whole numbers in the proportion of ``weights``."""
    exact = []
    for name, weight in zip(names, weights, strict=True):
        try:
            # 0.7 means seven tenths, not the binary fraction next to it.
            value = Fraction(str(weight)) if isinstance(weight, (float, np.floating)) else Fraction(weight)
        except (TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"weight {excerpt(weight)} of source {name!r}: not a finite number") from error
        if value < 0:
            raise OptionError(f"weight {weight} of source {name!r}: expected 0 or more")
        exact.append(value)
    scale = math.lcm(*(value.denominator for value in exact))
    whole = [int(value * scale) for value in exact]
    common = math.gcd(*whole)
    if not common:
        raise OptionError(f"the weights of {excerpt(list(names))} are all 0: at least one must be positive")
    return [value // common for value in whole]
