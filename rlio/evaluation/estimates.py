"""`OffPolicyEstimate`: an estimate, its uncertainty, and how far the two policies are apart.

Example:
    >>> import numpy as np
    >>> from rlio.evaluation.intervals import IntervalOptions, Resampling
    >>> from rlio.evaluation.weighting import Contributions
    >>> returns = np.array([1.0, 2.0, 3.0])
    >>> options = IntervalOptions()
    >>> draws = Resampling(3, resamples=200, seed=0)
    >>> measured([Contributions(returns, np.ones(3))], draws, options).value
    2.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.evaluation.intervals import IntervalOptions, Resampling, influences_of
from rlio.evaluation.weighting import Contributions, rescaled

__all__ = ["Measured", "OffPolicyEstimate", "Overlap", "measured"]

Floats = NDArray[np.float64]
# Thresholds by measurement: docs/evaluation.md, "When an interval is reliable". Intervals beyond one of these
# hold the true value far less often than stated.
_LEAST_SAMPLE_SIZE = 30
_LEAST_ERROR_SIZE = 20
_MOST_WEIGHT_OFF = 0.1
_QUANTILES = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)


@dataclass(frozen=True)
class Measured:
    """An estimated number.

    Attributes:
        value: The estimate.
        standard_error: Standard error to first order; NaN for one episode.
        interval: Bootstrap interval at the result's `confidence`; see `Resampling.interval`.
        concentration: Interval that holds at least that often for any distribution; None without bounds of
            the weighted return, or if the estimator has none.
        error_sample_size: Number of episodes on which the standard error rests: (sum of i^2)^2 / sum of i^4,
            where i is an episode's contribution to the estimate; about a third of the episodes if i is
            normal.
        doubts: Why the standard error and the interval are not reliable; empty if they are.
        standard_deviation: Of the episodes' values, whose mean is ``value``, as NumPy computes it: RLlib's
            ``v_target_std``.
    """

    value: float
    standard_error: float
    interval: tuple[float, float]
    concentration: tuple[float, float] | None = None
    error_sample_size: float = math.inf
    doubts: tuple[str, ...] = ()
    standard_deviation: float = math.nan

    @property
    def reliable(self) -> bool:
        """Whether the interval should hold the true value as often as its confidence states."""
        return not self.doubts

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        low, high = self.interval
        said = "" if self.reliable else ", not reliable:"
        return f"{self.value:.6g}{said} +- {self.standard_error:.2g} [{low:.6g}, {high:.6g}]"


def measured(
    parts: Sequence[Contributions],
    draws: Resampling,
    options: IntervalOptions,
    concentration: tuple[float, float] | None = None,
    *,
    doubts: Sequence[str] | None = None,
) -> Measured:
    """Return the first of ``parts``, minus the second if present, with its errors.

    Args:
        parts: One or two.
        draws: Bootstrap draws of their episodes.
        options: Options of intervals.
        concentration: Stored in the result.
        doubts: Doubts about an estimate that uses weights or a model; doubts from ``parts`` are added. None:
            a plain mean, whose interval is not doubted.
    """
    log_scale = parts[0].log_scale
    value = parts[0].value - (parts[1].value if len(parts) > 1 else 0.0)
    on_scale = [_on_scale(part, log_scale) for part in parts]
    influences, count = influences_of(on_scale), draws.episodes
    largest = float(np.abs(influences).max()) or 1.0  # squares of numbers up to e^500 would overflow
    squares = (influences / largest) ** 2
    total = float(squares.sum())
    error = largest * math.sqrt(total / (count - 1) / count) if count > 1 else math.nan
    low, high = draws.interval(on_scale, confidence=options.confidence)
    # NumPy squares by multiplication; for a fourth power it calls pow, 30 times as slow.
    rests_on = total**2 / float((squares**2).sum()) if total else float(count)
    found = list(doubts or ())
    if doubts is not None and rests_on < _LEAST_ERROR_SIZE:
        found.append(
            f"the standard error rests on {rests_on:.1f} episodes in effect, fewer than {_LEAST_ERROR_SIZE}"
        )
    return Measured(
        value,
        rescaled(error, log_scale),
        (rescaled(low, log_scale), rescaled(high, log_scale)),
        concentration,
        error_sample_size=rests_on,
        doubts=tuple(found),
        standard_deviation=rescaled(_deviation(on_scale), log_scale),
    )


def _deviation(parts: Sequence[Contributions]) -> float:
    """Standard deviation of the episodes' values of the first part, minus those of the second if present."""
    values = parts[0].episode_values - sum(part.episode_values for part in parts[1:])
    largest = float(np.abs(values).max()) or 1.0
    return largest * float(np.std(values / largest))


def _on_scale(part: Contributions, log_scale: float) -> Contributions:
    if part.log_scale == log_scale:
        return part
    factor = np.exp(part.log_scale - log_scale)
    values = None if part.values is None else part.values * factor
    return Contributions(part.numerators * factor, part.denominators, log_scale, values)


@dataclass(frozen=True)
class Overlap:
    """How much the episodes tell about the other policy, from the weights of whole episodes.

    Attributes:
        effective_sample_size: (sum of w)^2 / sum of w^2: how many episodes of the judged policy these are
            worth, from 1 to `OffPolicyEstimate.episodes`; 0 if all weights are 0.
        largest_weight_share: The largest weight as a share of their sum; near 1, one episode decides.
        mean_weight: About 1 if the recorded probabilities are right.
        log_weight_quantiles: Quantile -> log of the weight, for 0, 0.01, 0.25, 0.5, 0.75, 0.99 and 1.
        impossible: Episodes with an action that the judged policy never takes.
    """

    effective_sample_size: float
    largest_weight_share: float
    mean_weight: float
    log_weight_quantiles: dict[float, float]
    impossible: int

    @classmethod
    def of(cls, log_weights: Floats) -> Overlap:
        """Compute the overlap from log-weights, (n,), n > 0."""
        largest = float(log_weights.max())
        impossible = int((log_weights == -np.inf).sum())
        # No interpolation, because no value lies between a number and -inf.
        quantiles = np.quantile(log_weights, _QUANTILES, method="lower").tolist()
        table = dict(zip(_QUANTILES, quantiles, strict=True))
        if largest == -np.inf:
            return cls(0.0, 0.0, 0.0, table, impossible)
        weights = np.exp(log_weights - largest)
        total = float(weights.sum())
        mean = rescaled(total / len(weights), largest)
        return cls(total**2 / float((weights**2).sum()), 1.0 / total, mean, table, impossible)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why intervals of estimates with these weights are not reliable; empty if they are."""
        found = []
        if self.effective_sample_size < _LEAST_SAMPLE_SIZE:
            found.append(
                f"the effective sample size is {self.effective_sample_size:.1f}, less than "
                f"{_LEAST_SAMPLE_SIZE}"
            )
        if not abs(self.mean_weight - 1.0) <= _MOST_WEIGHT_OFF:
            found.append(
                f"the mean weight is {self.mean_weight:.3g}, more than {_MOST_WEIGHT_OFF} from 1: the data "
                "has too few or too many of the episodes that count"
            )
        return tuple(found)

    def __str__(self) -> str:
        text = (
            f"effective sample size {self.effective_sample_size:.1f}, largest weight "
            f"{self.largest_weight_share:.1%} "
            f"of all, mean weight {self.mean_weight:.3g}, log-weights "
            f"{', '.join(f'{value:.3g}' for value in self.log_weight_quantiles.values())} (quantiles "
            f"{', '.join(f'{q:g}' for q in self.log_weight_quantiles)})"
        )
        if self.impossible:
            text += f"; {self.impossible} episodes have weight 0"
        return text


@dataclass(frozen=True)
class OffPolicyEstimate:
    """The estimate of one estimator for a policy.

    Attributes:
        estimator: Its name.
        v_behavior: Mean discounted return of the recorded episodes.
        v_target: Estimated mean if the judged policy had acted.
        v_gain: v_target - v_behavior, with the error of the difference: both use the same episodes.
        v_gain_ratio: v_target / v_behavior; None if v_behavior is not above 0, where a ratio means nothing.
        overlap: None for the direct method, which uses no weights.
        episodes: Number of evaluated episodes.
        steps: Number of their steps.
        left_out: Number of incomplete episodes, with ``incomplete="drop"``.
        gamma: Discount per step.
        confidence: Confidence of the intervals.
    """

    estimator: str
    v_behavior: Measured
    v_target: Measured
    v_gain: Measured
    v_gain_ratio: float | None
    overlap: Overlap | None
    episodes: int
    steps: int
    left_out: int
    gamma: float
    confidence: float

    @property
    def reliable(self) -> bool:
        """Whether the intervals of `v_target` and `v_gain` should hold as often as stated."""
        return not self.doubts

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why they should not; empty if they should."""
        return self.v_target.doubts or self.v_gain.doubts

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        found = asdict(self) | {"reliable": self.reliable, "doubts": self.doubts}
        for name in ("v_behavior", "v_target", "v_gain"):
            found[name]["reliable"] = not found[name]["doubts"]
        if self.overlap is not None:
            quantiles = {f"{q:g}": value for q, value in self.overlap.log_weight_quantiles.items()}
            found["overlap"]["log_weight_quantiles"] = quantiles
        return found

    def __str__(self) -> str:
        ratio = "" if self.v_gain_ratio is None else f", {self.v_gain_ratio:.4g} times as much"
        lines = [
            f"{self.estimator}: {self.episodes} episodes, {self.steps} steps"
            + (f" (incomplete episodes left out: {self.left_out})" if self.left_out else "")
            + f", gamma {self.gamma:g}, {self.confidence:.0%} intervals",
            f"  v_behavior  {self.v_behavior}",
            f"  v_target    {self.v_target}",
            f"  v_gain      {self.v_gain}{ratio}",
        ]
        if self.v_target.concentration is not None:
            low, high = self.v_target.concentration
            lines.append(f"  v_target for sure in [{low:.6g}, {high:.6g}], by a concentration bound")
        if self.overlap is not None:
            lines.append(f"  overlap     {self.overlap}")
        if self.doubts:
            lines.append(f"  not reliable: {'; '.join(self.doubts)}")
        return "\n".join(lines)
