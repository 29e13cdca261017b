"""`Resampling` and `empirical_bernstein`: intervals of estimates.

Example:
    >>> import numpy as np
    >>> from rlio.evaluation.weighting import Contributions
    >>> x = np.random.default_rng(0).normal(3.0, 1.0, 400)
    >>> low, high = Resampling(400, resamples=1000, seed=0).interval(
    ...     [Contributions(x, np.ones(400))], confidence=0.95
    ... )
    >>> round(low, 1), round(high, 1)
    (2.9, 3.1)
    >>> low, high = empirical_bernstein(x, bounds=(-10.0, 10.0), confidence=0.95)
    >>> round(low, 1), round(high, 1)
    (2.3, 3.6)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError, excerpt
from rlio.evaluation.weighting import Contributions
from rlio.support.forks import cached_property
from rlio.support.options import check_count, check_number, set_options

__all__ = ["IntervalOptions", "Resampling", "empirical_bernstein", "influences_of"]

Floats = NDArray[np.float64]

# Up to this many episodes are drawn singly. More are drawn in groups, so the time does not grow with the
# episodes; the interval of a sum of many does not change by it.
_DRAWN, _GROUPS = 2000, 1000


@dataclass(frozen=True, kw_only=True)
class IntervalOptions:
    """Options of intervals.

    Attributes:
        confidence: How often an interval should hold the true value, above 0 and below 1.
        resamples: Draws of the bootstrap.
        seed: Seed of the bootstrap.
        value_bounds: (least, greatest) possible weighted return of an episode, from knowledge of the problem,
            not from the data: for concentration bounds of the estimators ``is`` and ``pdis``. None: no such
            bounds.

    Raises:
        OptionError: A value is out of range.
    """

    confidence: float = 0.95
    resamples: int = 2000  # The interval's width then varies by 2 % with the seed.
    seed: int = 0
    value_bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        set_options(
            self,
            confidence=check_number("confidence", self.confidence, above=0, below=1),
            # The interval uses their tails.
            resamples=check_count("resamples", self.resamples, least=100),
        )
        match self.value_bounds:
            case None:
                pass
            case (low, high) if math.isfinite(low) and math.isfinite(high) and low < high:
                pass
            case _:
                raise OptionError(f"value_bounds={excerpt(self.value_bounds)}: (least, greatest), or None")


class Resampling:
    """Bootstrap draws of n episodes, shared by all estimates from them.

    Args:
        episodes: n.
        resamples: Number of draws, each of n episodes with replacement.
        seed: Seed of the draws.
    """

    def __init__(self, episodes: int, *, resamples: int, seed: int) -> None:
        self.episodes = episodes
        self._resamples, self._seed = resamples, seed

    @cached_property
    def _counts(self) -> Floats:
        """How often each draw contains each episode, or group of them: (resamples, n or groups)."""
        units = self.episodes if self.episodes <= _DRAWN else _GROUPS
        drawn = np.random.default_rng(self._seed).integers(0, units, (self._resamples, units))
        drawn += np.arange(self._resamples)[:, None] * units
        counts = np.bincount(drawn.ravel(), minlength=self._resamples * units)
        return counts.reshape(self._resamples, units).astype(np.float64)

    def _grouped(self, values: Floats) -> Floats:
        if self.episodes <= _DRAWN:
            return values
        return np.asarray(np.bincount(np.arange(self.episodes) % _GROUPS, values, _GROUPS), np.float64)

    def interval(self, parts: Sequence[Contributions], *, confidence: float) -> tuple[float, float]:
        """Return the symmetric studentised (bootstrap-t) interval of an estimate.

        The interval is the estimate -+ q standard errors. q is the quantile, over all draws, of the distance
        of a draw's estimate from the estimate, in standard errors of the draw. Its width therefore accounts
        for heavy tails of the weights, where percentiles of the draws, and corrections of those, are too
        narrow. If too many draws have no variance, so that this quantile does not exist, the interval of
        percentiles is used.

        Args:
            parts: Contributions of the n episodes, one or two, on one scale. With two, the estimate is the
                first minus the second.
            confidence: How often an interval should hold the true value.

        Returns:
            (low, high), times e^-log_scale; infinitely wide with fewer than two episodes.

        Source: Hall, "On symmetric bootstrap confidence intervals" (1988); percentiles: Efron, Tibshirani,
        "An introduction to the bootstrap" (1993), chapter 13.
        """
        if self.episodes < 2:
            return -math.inf, math.inf
        centred = _Centred.of([self._shares(part) for part in parts])
        low, high = centred.deviations(self._counts @ centred.columns, confidence)
        values = [float(part.numerators.sum() / part.denominators.sum()) for part in parts]
        value = values[0] - sum(values[1:])
        return value + low, value + high

    def _shares(self, part: Contributions) -> tuple[Floats, Floats]:
        """Return each drawn unit's effect on the estimate, and its share of the denominator."""
        return (
            self._grouped(part.influences / len(part.numerators)),
            self._grouped(part.denominators / part.denominators.sum()),
        )


@dataclass(frozen=True)
class _Centred:
    """An estimate minus its value, computed again for each draw of units.

    Attributes:
        columns: Values to sum over the units of a draw, (units, columns): e and w of each part, which add up
            to 0 and 1 over all units, and all pairwise products.
        scale: Divisor of e.
    """

    columns: Floats
    scale: float

    @classmethod
    def of(cls, shares: Sequence[tuple[Floats, Floats]]) -> _Centred:
        scale = max(float(np.abs(e).max()) for e, _ in shares) or 1.0
        first = np.stack([column for e, w in shares for column in (e / scale, w)], axis=1)
        left, right = np.triu_indices(first.shape[1])
        return cls(np.concatenate([first, first[:, left] * first[:, right]], axis=1), scale)

    def _studentised(self, sums: Floats, parts: int) -> tuple[Floats, Floats]:
        """Return the deviation of each draw, (draws, columns), and its standard error."""
        size = 2 * parts
        e, w = sums[:, 0:size:2], sums[:, 1:size:2]
        signs = np.array([1.0, -1.0])[:parts]
        with np.errstate(invalid="ignore", divide="ignore"):
            off = e / w
            # The error is sum_u (sum_p sign_p (e_up - off_p w_up) / w_p)^2, a quadratic form of the products.
            factors = np.stack([signs / w, -signs * off / w], axis=-1).reshape(len(sums), size)
        left, right = np.triu_indices(size)
        twice = np.where(left == right, 1.0, 2.0)
        squares = (factors[:, left] * factors[:, right] * twice * sums[:, size:]).sum(-1)
        return (signs * off).sum(-1), np.sqrt(np.maximum(squares, 0.0))

    def deviations(self, drawn: Floats, confidence: float) -> tuple[float, float]:
        """Return the ends of the interval, minus the estimate."""
        parts = {5: 1, 14: 2}[self.columns.shape[1]]
        _, error = self._studentised(self.columns.sum(0)[None], parts)
        off, errors = self._studentised(drawn, parts)
        # Draws without any weight are ignored.
        off, errors = off[np.isfinite(off)], errors[np.isfinite(off)]
        # Allows for rounding: zero squares are sums of terms of about 1.
        without = errors <= 1e-7 * error[0]
        distances = np.full(len(off), np.inf)
        np.divide(np.abs(off), errors, out=distances, where=~without)
        distances[without & (off == 0.0)] = 0.0
        # The k-th of B sorted distances, k = confidence (B + 1).
        place = min(math.ceil(confidence * (len(distances) + 1)), len(distances)) - 1
        half = float(np.partition(distances, place)[place]) * float(error[0]) if len(distances) else math.inf
        if math.isfinite(half):
            return -half * self.scale, half * self.scale
        ends = [0.5 - confidence / 2.0, 0.5 + confidence / 2.0]
        low, high = np.quantile(off, ends, method="weibull") * self.scale
        return float(low), float(high)


def influences_of(parts: Sequence[Contributions]) -> Floats:
    """Return the influences of the first part, minus those of the second if present, (n,)."""
    return parts[0].influences - parts[1].influences if len(parts) > 1 else parts[0].influences


def empirical_bernstein(
    values: Floats, *, bounds: tuple[float, float], confidence: float
) -> tuple[float, float]:
    """Return an interval that holds the mean with at least ``confidence``, for any values within ``bounds``.

    With n values of sample variance S and a range R, d = 1 - confidence, the interval is the mean of the
    values -+ (sqrt(2 S ln(4/d) / n) + 7 R ln(4/d) / (3 (n - 1))), cut at the bounds.

    Args:
        values: (n,), independent.
        bounds: (least, greatest) possible value.
        confidence: Above 0 and below 1.

    Raises:
        OptionError: A value is outside of the bounds.

    Source: Maurer, Pontil, "Empirical Bernstein bounds and sample variance penalization" (2009), theorem 4,
    on either side with half of d.
    """
    low, high = bounds
    if len(values) and not (values.min() >= low and values.max() <= high):
        raise OptionError(
            f"value_bounds=({low}, {high}), but found weighted returns from {values.min():.6g} to "
            f"{values.max():.6g}: pass bounds that hold for every episode (least and greatest return, times "
            "the largest weight)"
        )
    count = len(values)
    if count < 2:
        return low, high
    logarithm = math.log(4.0 / (1.0 - confidence))
    half = math.sqrt(2.0 * float(values.var(ddof=1)) * logarithm / count)
    half += 7.0 * (high - low) * logarithm / (3.0 * (count - 1))
    mean = float(values.mean())
    return max(mean - half, low), min(mean + half, high)
