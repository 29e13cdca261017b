"""`Resampling` and `empirical_bernstein`: how far an estimate may be off.

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
from rlio.evaluation.weighting import Contributions, rescaled
from rlio.support.forks import cached_property

__all__ = ["IntervalOptions", "Resampling", "empirical_bernstein", "influences_of"]

Floats = NDArray[np.float64]

# Up to so many episodes are drawn one by one. More are put into groups, which are drawn: the time does not
# grow with the episodes then, and the interval of a sum of many does not change by it.
_DRAWN, _GROUPS = 2000, 1000


@dataclass(frozen=True, kw_only=True)
class IntervalOptions:
    """How intervals are made.

    Attributes:
        confidence: How often an interval is to hold the true value, above 0 and below 1.
        resamples: Draws of the bootstrap.
        seed: Of the bootstrap.
        value_bounds: (least, greatest) that an episode's weighted return can be, by what is known of the
            problem and not by what was seen: for concentration bounds of the estimators ``is`` and ``pdis``.
            None: none are made.

    Raises:
        OptionError: A value is out of range.
    """

    confidence: float = 0.95
    resamples: int = 2000  # the interval's width then varies by 2 % with the seed
    seed: int = 0
    value_bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.confidence < 1.0:
            raise OptionError(f"confidence={self.confidence}: above 0 and below 1, such as 0.95")
        if self.resamples < 100:
            raise OptionError(
                f"resamples={self.resamples}: at least 100, as an interval is made of their ends"
            )
        match self.value_bounds:
            case None:
                pass
            case (low, high) if math.isfinite(low) and math.isfinite(high) and low < high:
                pass
            case _:
                raise OptionError(f"value_bounds={excerpt(self.value_bounds)}: (least, greatest), or None")


class Resampling:
    """Bootstrap draws of the same n episodes, for all that is estimated from them.

    Args:
        episodes: n.
        resamples: Draws, each of n episodes with replacement.
        seed: Decides them.
    """

    def __init__(self, episodes: int, *, resamples: int, seed: int) -> None:
        self.episodes = episodes
        self._resamples, self._seed = resamples, seed

    @cached_property
    def _counts(self) -> Floats:
        """How often each draw has each episode, or group of them: (resamples, n or groups)."""
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
        """The symmetric studentised (bootstrap-t) interval of an estimate.

        It is the estimate -+ q standard errors, q being the quantile, over all draws, of how far a draw's
        estimate is from the estimate, in standard errors of the draw. So it is as wide as the weights'
        heavy tails ask for, where percentiles of the draws, and corrections of those, are too narrow. Where
        so many draws lack any variance that there is no such quantile, it is the interval of percentiles.

        Args:
            parts: Contributions of the n episodes, one or two, on one scale: of two, what is estimated is the
                first minus the second.
            confidence: How often an interval is to hold the true value.

        Returns:
            (low, high), times e^-log_scale; infinitely wide where there are fewer than two episodes.

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
        """Of each unit that is drawn: what it changes of the estimate, and its part of the denominator."""
        return (
            self._grouped(part.influences / len(part.numerators)),
            self._grouped(part.denominators / part.denominators.sum()),
        )


@dataclass(frozen=True)
class _Centred:
    """An estimate minus its value, which draws of units estimate anew.

    Attributes:
        columns: What is summed over the units of a draw, (units, columns): e and w of each part, which add up
            to 0 and 1 over all units, and the products of any two of those.
        scale: By which e was divided.
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
        """How far each draw, (draws, columns), is off, and its standard error."""
        size = 2 * parts
        e, w = sums[:, 0:size:2], sums[:, 1:size:2]
        signs = np.array([1.0, -1.0])[:parts]
        with np.errstate(invalid="ignore", divide="ignore"):
            off = e / w
            # The error is sum_u (sum_p sign_p (e_up - off_p w_up) / w_p)^2, a square form of the products.
            factors = np.stack([signs / w, -signs * off / w], axis=-1).reshape(len(sums), size)
        left, right = np.triu_indices(size)
        twice = np.where(left == right, 1.0, 2.0)
        squares = (factors[:, left] * factors[:, right] * twice * sums[:, size:]).sum(-1)
        return (signs * off).sum(-1), np.sqrt(np.maximum(squares, 0.0))

    def deviations(self, drawn: Floats, confidence: float) -> tuple[float, float]:
        """The ends of the interval, minus the estimate."""
        parts = {5: 1, 14: 2}[self.columns.shape[1]]
        _, error = self._studentised(self.columns.sum(0)[None], parts)
        off, errors = self._studentised(drawn, parts)
        # A draw without any weight says nothing.
        off, errors = off[np.isfinite(off)], errors[np.isfinite(off)]
        # Rounding: squares that are zero are sums of terms of about 1.
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
    """Influences of the first part, minus those of the second if there is one, (n,)."""
    return parts[0].influences - parts[1].influences if len(parts) > 1 else parts[0].influences


def empirical_bernstein(
    values: Floats, *, bounds: tuple[float, float], confidence: float
) -> tuple[float, float]:
    """An interval that holds the mean with at least ``confidence``, however values lie within ``bounds``.

    With n values of sample variance S and a range R, d = 1 - confidence: the mean of the values -+
    (sqrt(2 S ln(4/d) / n) + 7 R ln(4/d) / (3 (n - 1))), cut at the bounds.

    Args:
        values: (n,), independent.
        bounds: (least, greatest) that they can be.
        confidence: Above 0 and below 1.

    Raises:
        OptionError: A value is out of the bounds.

    Source: Maurer, Pontil, "Empirical Bernstein bounds and sample variance penalization" (2009), theorem 4,
    on either side with half of d.
    """
    low, high = bounds
    if len(values) and not (values.min() >= low and values.max() <= high):
        raise OptionError(
            f"value_bounds=({low}, {high}), but weighted returns from {values.min():.6g} to "
            f"{values.max():.6g} were "
            "seen: give bounds that hold for every episode (least and greatest return, times the largest "
            "weight)"
        )
    count = len(values)
    if count < 2:
        return low, high
    logarithm = math.log(4.0 / (1.0 - confidence))
    half = math.sqrt(2.0 * float(values.var(ddof=1)) * logarithm / count)
    half += 7.0 * (high - low) * logarithm / (3.0 * (count - 1))
    mean = float(values.mean())
    return max(mean - half, low), min(mean + half, high)


def rescaled_interval(interval: tuple[float, float], log_scale: float) -> tuple[float, float]:
    """Both ends times e^log_scale."""
    return rescaled(interval[0], log_scale), rescaled(interval[1], log_scale)
