"""`WeightedSteps` and the estimators: the arithmetic of off-policy evaluation on whole episodes.

Pure functions of arrays. Values stay in logs until the last step, so that products of 100,000 ratios, and
very large ratios, do not overflow. ``w`` of a step is the product of the ratios up to it.

Example:
    >>> import numpy as np
    >>> ratios, rewards = np.array([2.0, 0.5, 0.5]), np.array([1.0, 3.0, 4.0])
    >>> steps = WeightedSteps(np.log(ratios), rewards, lengths=np.array([2, 1]), gamma=1.0)
    >>> importance_sampling(steps).value, per_decision(steps).value
    (3.0, 3.5)
    >>> weighted_importance_sampling(steps).value
    4.0

Source: Precup, Sutton, Singh, "Eligibility traces for off-policy policy evaluation" (2000); Jiang, Li,
"Doubly robust off-policy value evaluation" (2016); Thomas, Brunskill, "Data-efficient off-policy policy
evaluation" (2016).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError
from rlio.support.forks import cached_property

__all__ = [
    "Contributions",
    "EpisodeWeights",
    "WeightedSteps",
    "direct_method",
    "doubly_robust",
    "importance_sampling",
    "per_decision",
    "stepwise_weighted",
    "weighted_doubly_robust",
    "weighted_importance_sampling",
    "weighted_per_decision",
]

Floats = NDArray[np.float64]

# Numbers up to e^500 are summed directly; larger ones are first divided by their largest.
_LARGE = 500.0


@dataclass(frozen=True)
class Contributions:
    """Contribution of each of n episodes to an estimate: sum(numerators) / sum(denominators) * e^log_scale.

    Attributes:
        numerators: (n,).
        denominators: (n,); all 1 if the estimate is a mean.
        log_scale: 0, unless numbers are too large.
        values: Value of each episode, (n,), divided by e^log_scale, if the numerators are not these times the
            mean denominator: their mean is the estimate.
    """

    numerators: Floats
    denominators: Floats
    log_scale: float = 0.0
    values: Floats | None = None

    @property
    def value(self) -> float:
        """The estimate."""
        return rescaled(float(self.numerators.sum() / self.denominators.sum()), self.log_scale)

    @property
    def episode_values(self) -> Floats:
        """Value of each episode, (n,), divided by e^log_scale; their mean is the estimate."""
        return self.numerators / self.denominators.mean() if self.values is None else self.values

    @property
    def influences(self) -> Floats:
        """Effect of one more episode of each kind, times n, (n,), divided by e^log_scale: mean 0."""
        mean = self.denominators.mean()
        found: Floats = (
            self.numerators - self.numerators.sum() / self.denominators.sum() * self.denominators
        ) / mean
        return found


def rescaled(value: float, log_scale: float) -> float:
    """Return ``value`` * e^log_scale; infinite if a float cannot hold it."""
    if not log_scale or value == 0.0 or not math.isfinite(value):
        return value
    logarithm = math.log(abs(value)) + log_scale
    return math.copysign(math.exp(logarithm) if logarithm < 709.0 else math.inf, value)


@dataclass(frozen=True)
class EpisodeWeights:
    """Data for importance sampling of n episodes: a few numbers for each, independent of its length.

    Attributes:
        returns: Discounted returns, (n,).
        log_weights: Log of the product of all ratios, (n,).
        per_decision: Sum of gamma^t w_t r_t, divided by e^per_decision_scale, (n,).
        per_decision_scale: (n,).
        lengths: Number of steps, int64, (n,).
    """

    returns: Floats
    log_weights: Floats
    per_decision: Floats
    per_decision_scale: Floats
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class WeightedSteps:
    """N steps of n consecutive whole episodes.

    Attributes:
        log_ratios: Log of the ratio of the judged policy's probability of each action to the acting one's,
            (N,).
        rewards: (N,).
        lengths: Number of steps of each episode, (n,), at least 1.
        gamma: Discount per step.
        state_values: A model's value of each observation, (N,), for estimators that use one.
        action_values: A model's value of each action, (N,).
        final_values: A model's value after each episode's last step, (n,): 0 if it terminated.
    """

    log_ratios: Floats
    rewards: Floats
    lengths: NDArray[np.int64]
    gamma: float
    state_values: Floats | None = None
    action_values: Floats | None = None
    final_values: Floats | None = None

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """First step of each episode, (n,)."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def last(self) -> NDArray[np.int64]:
        """Last step of each episode, (n,)."""
        return np.cumsum(self.lengths) - 1

    @cached_property
    def t(self) -> NDArray[np.int64]:
        """Number of each step within its episode, (N,)."""
        found: NDArray[np.int64] = np.arange(len(self.rewards)) - np.repeat(self.starts, self.lengths)
        return found

    @cached_property
    def log_discounts(self) -> Floats:
        """Log of gamma^t of each step, (N,)."""
        return _log_powers(self.gamma, int(self.lengths.max(initial=0)))[self.t]

    @cached_property
    def log_weights(self) -> Floats:
        """Log of w of each step, (N,)."""
        return _running_sums(self.log_ratios, self.lengths)

    @cached_property
    def log_weights_before(self) -> Floats:
        """Log of w of the previous step, 0 for first steps, (N,)."""
        found = np.empty_like(self.log_weights)
        found[1:] = self.log_weights[:-1]
        found[self.starts] = 0.0
        return found

    def sums(self, values: Floats) -> Floats:
        """Return the sum of ``values``, (N,), over each episode, (n,)."""
        if not len(self.starts):
            return np.zeros(0)
        return np.asarray(np.add.reduceat(values, self.starts), np.float64)

    @cached_property
    def returns(self) -> Floats:
        """Discounted return of each episode, (n,)."""
        return self.sums(np.exp(self.log_discounts) * self.rewards)

    @cached_property
    def episode_weights(self) -> EpisodeWeights:
        """Data for importance sampling of these episodes."""
        scale = np.zeros(len(self.lengths))
        if len(scale):
            scale = np.maximum(np.maximum.reduceat(self.log_weights, self.starts) - _LARGE, 0.0)
        weights = np.exp(self.log_weights + self.log_discounts - np.repeat(scale, self.lengths))
        return EpisodeWeights(
            self.returns, self.log_weights[self.last], self.sums(weights * self.rewards), scale, self.lengths
        )


def _running_sums(values: Floats, lengths: NDArray[np.int64]) -> Floats:
    """Return the sum up to each step of each episode, (N,), added in the order of the steps.

    The result is the same to the last bit with any other episodes present, unlike a sum over all of them
    minus the earlier part. Long episodes are summed singly, short ones in parallel.
    """
    found = values.copy()
    starts = np.cumsum(lengths) - lengths
    long = max(math.isqrt(len(values)), 1)
    for episode in np.flatnonzero(lengths > long).tolist():
        start = starts[episode]
        np.cumsum(values[start : start + lengths[episode]], out=found[start : start + lengths[episode]])
    short = np.flatnonzero((lengths > 1) & (lengths <= long))
    short = short[np.argsort(lengths[short], kind="stable")]
    rows, ends = starts[short], lengths[short]
    for t in range(1, int(ends[-1]) if len(ends) else 0):
        running = rows[np.searchsorted(ends, t, side="right") :] + t
        found[running] += found[running - 1]
    return found


def _log_powers(gamma: float, count: int) -> Floats:
    """Return the log of gamma^0, gamma^1, ..."""
    found = np.full(count, -np.inf)
    if gamma > 0.0:
        found = np.arange(count, dtype=np.float64) * math.log(gamma)
    found[:1] = 0.0
    return found


def _mean(values: Floats, log_scale: float = 0.0) -> Contributions:
    return Contributions(values, np.ones(len(values)), log_scale)


def _weights_of(episodes: WeightedSteps | EpisodeWeights) -> EpisodeWeights:
    return episodes.episode_weights if isinstance(episodes, WeightedSteps) else episodes


def importance_sampling(episodes: WeightedSteps | EpisodeWeights) -> Contributions:
    """Return the mean of w_last * G, where G is the discounted return of an episode: unbiased."""
    found = _weights_of(episodes)
    scale = max(float(found.log_weights.max(initial=0.0)) - _LARGE, 0.0)
    return _mean(np.exp(found.log_weights - scale) * found.returns, scale)


def per_decision(episodes: WeightedSteps | EpisodeWeights) -> Contributions:
    """Return the mean of sum_t gamma^t w_t r_t: unbiased, with less noise than `importance_sampling`.

    Later actions do not affect a reward, so its weight omits their ratios.
    """
    found = _weights_of(episodes)
    scale = float(found.per_decision_scale.max(initial=0.0))
    return _mean(found.per_decision * np.exp(found.per_decision_scale - scale), scale)


def weighted_importance_sampling(episodes: WeightedSteps | EpisodeWeights) -> Contributions:
    """Return sum of w_last * G / sum of w_last: biased, consistent, never outside the observed returns.

    Raises:
        OptionError: All weights are 0.
    """
    found = _weights_of(episodes)
    weights = np.exp(found.log_weights - _largest(found.log_weights))
    return Contributions(weights * found.returns, weights)


def weighted_per_decision(steps: WeightedSteps) -> Contributions:
    """Return sum_t gamma^t (sum_i w_it r_it) / (sum_i w_it).

    An episode that ended earns 0 from then on and keeps its last weight. Otherwise late steps would average
    only over long episodes.

    Raises:
        OptionError: All weights are 0.
    """
    return _mean(_normalised(steps, steps.log_weights, steps.rewards))


def stepwise_weighted(steps: WeightedSteps) -> Contributions:
    """Return the mean of sum_t gamma^t w_t r_t / m_t, with m_t the mean weight of episodes that reach step t.

    This is RLlib's ``WeightedImportanceSampling``. Unlike in `weighted_per_decision`, ended episodes do not
    count at later steps: late steps count as often as the acting policy reaches them, which is wrong if the
    judged policy's episodes are longer or shorter. A step counts 0 if no episode that reaches it has a weight
    above 0.

    Raises:
        OptionError: All weights are 0.
    """
    _largest(steps.log_weights[steps.last])
    horizon = int(steps.lengths.max(initial=0))
    log_totals = _log_sums(steps.t, steps.log_weights, horizon)
    shares = np.exp(steps.log_weights - _finite(log_totals)[steps.t])
    means = np.bincount(steps.t, shares * steps.rewards, horizon)[steps.t]
    reach = np.bincount(steps.t, minlength=horizon)[steps.t]
    # The estimate plus each episode's influence on it, to first order.
    values = means + reach * shares * (steps.rewards - means)
    discounts = np.exp(steps.log_discounts)
    found = _mean(steps.sums(discounts * values))
    return replace(found, values=steps.sums(discounts * reach * shares * steps.rewards))


def _model(steps: WeightedSteps) -> tuple[Floats, Floats, Floats]:
    values, actions, final = steps.state_values, steps.action_values, steps.final_values
    if values is None or actions is None or final is None:
        raise OptionError(
            "this estimator needs a model's values: pass state_values, action_values and final_values"
        )
    return values, actions, final


def direct_method(steps: WeightedSteps) -> Contributions:
    """Return the mean of a model's value of the first observation; as good as the model, without weights."""
    values, _, _ = _model(steps)
    return _mean(values[steps.starts])


def doubly_robust(steps: WeightedSteps) -> Contributions:
    """Return the mean of sum_t gamma^t (w_(t-1) V(s_t) + w_t (r_t - Q(s_t, a_t))): a corrected model."""
    values, actions, final = _model(steps)
    scale = max(float(steps.log_weights.max(initial=0.0)) - _LARGE, 0.0)
    before = np.exp(steps.log_weights_before + steps.log_discounts - scale)
    after = np.exp(steps.log_weights + steps.log_discounts - scale)
    totals = steps.sums(before * values + after * (steps.rewards - actions))
    # For a cut episode, adds the model's value of the rest.
    return _mean(totals + steps.gamma * after[steps.last] * final, scale)


def weighted_doubly_robust(steps: WeightedSteps) -> Contributions:
    """Return `doubly_robust` with weights that add up to 1 at each step.

    Raises:
        OptionError: All weights are 0.
    """
    values, actions, final = _model(steps)
    errors = steps.rewards - actions
    # The model's value after the last step belongs to that step.
    errors[steps.last] += steps.gamma * final
    of_values = _normalised(steps, steps.log_weights_before, values)
    return _mean(of_values + _normalised(steps, steps.log_weights, errors))


def _largest(log_weights: Floats) -> float:
    largest = float(log_weights.max(initial=-np.inf))
    if largest == -np.inf:
        raise OptionError(
            "the judged policy could not have produced any logged episode: all weights are 0, and weighted "
            "estimators have nothing to average; judge a policy that acts more like the logged one, or use dm"
        )
    return largest


def _normalised(steps: WeightedSteps, log_weights: Floats, values: Floats) -> Floats:
    """Return n numbers, one per episode, with mean sum_t gamma^t (sum_i w_it x_it) / (sum_i w_it).

    They are the estimate plus each episode's influence on it, to first order.
    """
    episodes = len(steps.lengths)
    ended = steps.log_weights[steps.last]
    _largest(np.concatenate([log_weights[steps.starts], ended]))
    log_totals = _log_totals(steps, log_weights, ended)
    shares = np.exp(log_weights - _finite(log_totals)[steps.t])
    means = np.bincount(steps.t, shares * values, len(log_totals))  # of x at each step
    discounts = np.exp(_log_powers(steps.gamma, len(log_totals)))
    own = steps.sums(np.exp(steps.log_discounts) * shares * (values - means[steps.t]))
    # At the steps after its end an episode earns 0, so it differs from the others by `means`.
    after = steps.lengths
    missing = _tail_sums(discounts * means, log_totals, after, ended)
    return (discounts * means).sum() + episodes * (own - missing)  # type: ignore[no-any-return] # float64; sums are untyped


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, 0.0)


def _log_totals(steps: WeightedSteps, log_weights: Floats, ended: Floats) -> Floats:
    """Return the log of the sum of all weights at each step; ended episodes count their last weight."""
    horizon = int(steps.lengths.max(initial=0))
    running = _log_sums(steps.t, log_weights, horizon)
    over = np.logaddexp.accumulate(_log_sums(steps.lengths, ended, horizon + 1))[:horizon]
    return np.logaddexp(running, over)


def _log_sums(index: NDArray[np.int64], logs: Floats, size: int) -> Floats:
    """Return the log of the sum of e^logs over each value of ``index``, (size,)."""
    largest = np.full(size, -np.inf)
    np.maximum.at(largest, index, logs)
    shift = _finite(largest)
    with np.errstate(divide="ignore"):
        return shift + np.log(np.bincount(index, np.exp(logs - shift[index]), size))


def _tail_sums(values: Floats, log_totals: Floats, first: NDArray[np.int64], logs: Floats) -> Floats:
    """Return, for each episode, the sum of values_t * e^(logs - log_totals_t) over t from ``first`` on."""
    total = np.zeros(len(first))
    for sign in (1.0, -1.0):
        with np.errstate(divide="ignore"):
            parts = np.log(np.maximum(sign * values, 0.0)) - _finite(log_totals)
        tails = np.append(np.logaddexp.accumulate(parts[::-1])[::-1], -np.inf)
        total += sign * np.exp(logs + tails[first])
    return total
