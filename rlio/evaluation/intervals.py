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
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError, excerpt
from rlio.evaluation.weighting import Contributions, rescaled

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
    resamples: int = 2000  # the ends of the interval then vary by 3 % of its width with the seed
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
        """The percentile interval of an estimate, or of the first of two minus the second.

        (Of the bias-corrected, the studentised and the normal interval each covered better on some small
        problems and worse on others; none everywhere.)

        Args:
            parts: One, or two, with contributions of the n episodes each, on one scale.
            confidence: How often it is to hold the true value.

        Returns:
            (low, high), times e^-log_scale; infinitely wide where there are fewer than two episodes.

        Source: Efron, Tibshirani, "An introduction to the bootstrap" (1993), chapter 13.
        """
        if self.episodes < 2:
            return -math.inf, math.inf
        found = np.zeros(self._resamples)
        for part, sign in zip(parts, (1.0, -1.0), strict=False):
            sums = self._counts @ np.stack(
                [self._grouped(part.numerators), self._grouped(part.denominators)], -1
            )
            with np.errstate(invalid="ignore", divide="ignore"):
                found += sign * (sums[:, 0] / sums[:, 1])
        # A draw without any weight says nothing.
        found = found[np.isfinite(found)]
        low, high = np.quantile(found, [0.5 - confidence / 2.0, 0.5 + confidence / 2.0], method="weibull")
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
