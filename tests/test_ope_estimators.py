"""The estimators' arithmetic, on small problems whose values are known exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from further import first, further
from tabular_problems import PROBLEMS, Problem

from rlio.errors import OptionError
from rlio.evaluation import weighting
from rlio.evaluation.estimates import Overlap
from rlio.evaluation.intervals import Resampling, empirical_bernstein
from rlio.evaluation.weighting import Contributions, WeightedSteps

RUNS = 400
UNBIASED: dict[str, Callable[[Any], Contributions]] = {
    "is": weighting.importance_sampling,
    "pdis": weighting.per_decision,
    "dr": weighting.doubly_robust,
}
CONSISTENT: dict[str, Callable[[Any], Contributions]] = {
    "wis": weighting.weighted_importance_sampling,
    "wpdis": weighting.weighted_per_decision,
    "wdr": weighting.weighted_doubly_robust,
}


def runs(
    problem: Problem, count: int, episodes: int, seed: int, values: Any = None
) -> Iterator[WeightedSteps]:
    """``count`` runs of independent episodes, simulated at once."""
    batch = problem.simulate(count * episodes, seed)
    cuts = np.searchsorted(batch["eps_id"], np.arange(count + 1) * episodes)
    for run in range(count):
        part = batch[cuts[run] : cuts[run + 1]].copy()
        part["eps_id"] = part["eps_id"] - run * episodes
        yield problem.steps(part, values=values)


def models_of(problem: Problem) -> dict[str, Any]:
    """Action values, (S, A), that are right, off, of nothing, and of no sense at all."""
    right = problem.action_values(problem.judged)
    nonsense = np.random.default_rng(0).normal(scale=2.0, size=right.shape)
    return {"right": right, "off": right + 0.3, "none": 0 * right, "nonsense": nonsense}


def test_the_exact_value_is_what_playing_the_judged_policy_earns() -> None:
    for problem in PROBLEMS.values():
        played = Problem(
            problem.transitions, problem.rewards, problem.judged, problem.judged, problem.gamma, problem.noise
        )
        returns = played.steps(played.simulate(20_000, seed=0)).returns
        assert abs(returns.mean() - problem.truth) < 3 * returns.std() / np.sqrt(20_000)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", first(2, PROBLEMS))
def test_unbiased_estimators_are_right_on_average_and_the_others_come_close(name: str) -> None:
    problem = PROBLEMS[name]
    found: dict[str, list[float]] = {}
    for steps in runs(problem, RUNS, 50, seed=1, values=models_of(problem)["off"]):
        for estimator, function in (UNBIASED | CONSISTENT).items():
            found.setdefault(estimator, []).append(function(steps).value)
    for estimator, values in found.items():
        error = np.std(values) / np.sqrt(RUNS)
        # The bias of self-normalised estimators falls with the episodes; it is a part of their spread.
        allowed = 3 * error if estimator in UNBIASED else 0.15 * np.std(values) + 3 * error
        assert abs(np.mean(values) - problem.truth) < allowed, estimator
    # What each is for: later ones of these pairs are less noisy.
    assert np.std(found["wis"]) < 1.2 * np.std(found["is"])
    assert np.std(found["dr"]) < 1.2 * np.std(found["pdis"])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROBLEMS)
def test_doubly_robust_estimates_are_right_on_average_whatever_the_model_says(name: str) -> None:
    """Many runs with each; a good model makes them less noisy, and a bad one does not make them wrong."""
    problem, found = PROBLEMS[name], {}
    batch = problem.simulate(RUNS * 50, seed=3)
    for model, values in models_of(problem).items():
        each = weighting.doubly_robust(problem.steps(batch, values=values)).numerators
        estimates = each.reshape(RUNS, 50).mean(1)
        found[model] = estimates.std()
        assert abs(estimates.mean() - problem.truth) < 3 * estimates.std() / np.sqrt(RUNS), model
    assert found["right"] < found["nonsense"]


# Episodes of a run: the effective sample size is about 125 in the bandit, 200 in the chain, 160 in the grid.
COVERAGE_EPISODES = 250
MANY_RUNS = 1000


@pytest.mark.parametrize("name", further("chain", "bandit", "gridworld"))
def test_bootstrap_intervals_and_standard_errors_are_as_wide_as_estimates_vary(name: str) -> None:
    """They hold the truth in 93 to 97 % of 1,000 runs with an effective sample size of at least 100."""
    problem, estimators = PROBLEMS[name], UNBIASED | CONSISTENT
    draws = Resampling(COVERAGE_EPISODES, resamples=599, seed=0)
    rows: list[list[tuple[bool, float, float]]] = []
    # A few runs more, in place of those whose effective sample size is too low.
    for steps in runs(problem, MANY_RUNS + 120, COVERAGE_EPISODES, seed=2, values=models_of(problem)["off"]):
        if Overlap.of(steps.log_weights[steps.last]).effective_sample_size < 100 or len(rows) == MANY_RUNS:
            continue
        parts = [function(steps) for function in estimators.values()]
        ends = [draws.interval([part], confidence=0.95) for part in parts]
        errors = [np.sqrt((part.influences**2).mean() / COVERAGE_EPISODES) for part in parts]
        rows.append(
            [
                (low <= problem.truth <= high, part.value, error)
                for part, (low, high), error in zip(parts, ends, errors, strict=True)
            ]
        )
    assert len(rows) == MANY_RUNS
    table = np.array(rows)
    for number, estimator in enumerate(estimators):
        hits, values, standard_errors = table[:, number].T
        assert 0.93 <= hits.mean() <= 0.97, (estimator, hits.mean())
        assert np.mean(standard_errors) == pytest.approx(np.std(values), rel=0.1), estimator


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bandit", "chain", *further("gridworld")])
def test_concentration_bounds_hold_the_truth_in_at_least_95_percent_of_1000_runs(name: str) -> None:
    problem = PROBLEMS[name]
    steps = problem.steps(problem.simulate(MANY_RUNS * COVERAGE_EPISODES, seed=4))
    for estimator in (weighting.importance_sampling, weighting.per_decision):
        values = estimator(steps).numerators.reshape(MANY_RUNS, COVERAGE_EPISODES)
        # Bounds that each episode keeps to; noise is normal, so that the problem itself has none.
        bounds = float(values.min()), float(values.max())
        ends = [empirical_bernstein(run, bounds=bounds, confidence=0.95) for run in values]
        assert np.mean([low <= problem.truth <= high for low, high in ends]) >= 0.95


def test_an_interval_is_what_a_loop_over_the_draws_gives() -> None:
    """Of an estimate, and of a difference: value -+ the quantile of |t| times the standard error."""
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=50)
    parts = [
        Contributions(weights * rng.normal(size=50), weights),
        Contributions(rng.random(50), np.ones(50)),
    ]
    draws = Resampling(50, resamples=199, seed=3)

    def estimate(index: Any, count: int) -> tuple[float, float]:
        drawn = [Contributions(p.numerators[index], p.denominators[index]) for p in parts[:count]]
        influences = sum(sign * p.influences for sign, p in zip((1, -1), drawn, strict=False))
        return drawn[0].value - sum(p.value for p in drawn[1:]), float(np.sqrt((influences**2).sum()) / 50)

    picks = np.random.default_rng(3).integers(0, 50, (199, 50))
    for count in (1, 2):
        value, error = estimate(slice(None), count)
        each = [estimate(pick, count) for pick in picks]
        half = sorted(abs(drawn - value) / own for drawn, own in each)[189] * error
        assert draws.interval(parts[:count], confidence=0.95) == pytest.approx((value - half, value + half))


def test_an_interval_of_what_hardly_varies_is_that_of_percentiles() -> None:
    """One episode in ten earned something: a third of all draws have none of it, and no variance."""
    rare = Contributions(np.append(np.zeros(9), 5.0), np.ones(10))
    low, high = Resampling(10, resamples=999, seed=0).interval([rare], confidence=0.95)
    assert (low, high) == (pytest.approx(0.0), pytest.approx(1.5))
    same = Contributions(np.full(10, 0.1), np.ones(10))
    assert Resampling(10, resamples=999, seed=0).interval([same], confidence=0.95) == pytest.approx(
        (0.1, 0.1)
    )
    huge = Contributions(np.arange(10) * 1e200, np.ones(10))
    low, high = Resampling(10, resamples=999, seed=0).interval([huge], confidence=0.95)
    assert 0.0 < low < 4.5e200 < high < 9e200


def test_a_concentration_bound_holds_at_least_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    # Mostly 0 and now and then 10, as weighted returns are: where the normal approximation fails.
    samples = 10.0 * (rng.random((2000, 300)) < 0.02)
    intervals = [empirical_bernstein(row, bounds=(0.0, 10.0), confidence=0.9) for row in samples]
    assert np.mean([low <= 0.2 <= high for low, high in intervals]) >= 0.9
    assert all(0.0 <= low <= high <= 10.0 for low, high in intervals)
    wide = [high - low for low, high in intervals]
    longer = empirical_bernstein(np.repeat(samples[0], 20), bounds=(0.0, 10.0), confidence=0.9)
    assert longer[1] - longer[0] < 0.5 * np.mean(wide)
    with pytest.raises(OptionError, match="found weighted returns"):
        empirical_bernstein(samples[0] - 1, bounds=(0.0, 10.0), confidence=0.9)


def test_a_concentration_bound_is_the_formula_of_its_source() -> None:
    values = np.array([0.0, 1.0, 0.0, 1.0] * 50)
    low, high = empirical_bernstein(values, bounds=(-5.0, 5.0), confidence=0.95)
    logarithm = np.log(4 / 0.05)
    half = np.sqrt(2 * values.var(ddof=1) * logarithm / 200) + 7 * 10 * logarithm / (3 * 199)
    assert (low, high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))


def test_equal_policies_have_weights_of_one_and_all_estimators_agree() -> None:
    rng = np.random.default_rng(0)
    steps = WeightedSteps(np.zeros(30), rng.normal(size=30), np.array([5, 1, 14, 10]), 0.9)
    expected = [steps.returns.mean()] * 5
    estimators = [
        weighting.importance_sampling,
        weighting.per_decision,
        weighting.weighted_importance_sampling,
        weighting.weighted_per_decision,
        weighting.stepwise_weighted,
    ]
    np.testing.assert_allclose([estimator(steps).value for estimator in estimators], expected)
    assert Overlap.of(np.zeros(4)).effective_sample_size == pytest.approx(4)


def test_each_estimator_is_its_formula_on_episodes_of_unequal_lengths() -> None:
    """By hand, step by step; an episode that is over keeps its weight, and earns nothing."""
    rng = np.random.default_rng(3)
    lengths, gamma = np.array([2, 4, 1]), 0.8
    ratios, rewards = rng.normal(size=7), rng.normal(size=7)
    states, actions, finals = rng.normal(size=7), rng.normal(size=7), np.array([0.0, 0.7, 0.0])
    steps = WeightedSteps(ratios, rewards, lengths, gamma, states, actions, finals)
    horizon, episodes = 5, 3
    w, before = np.zeros((episodes, horizon)), np.ones((episodes, horizon))
    r, v, q, tail = (np.zeros((episodes, horizon)) for _ in range(4))
    start = 0
    for i, length in enumerate(lengths):
        own = np.exp(np.cumsum(ratios[start : start + length]))
        w[i] = np.append(own, np.full(horizon - length, own[-1]))
        before[i] = np.append([1.0], w[i, :-1])
        for table, column in ((r, rewards), (v, states), (q, actions)):
            table[i, :length] = column[start : start + length]
        tail[i, length - 1] = gamma * finals[i]
        start += length
    discount = gamma ** np.arange(horizon)
    lasts = np.arange(horizon) < lengths[:, None]
    # Of nobody at the last of these steps: 0 there.
    mean_weights = (w * lasts).sum(0) / np.maximum(lasts.sum(0), 1)
    by_hand = {
        weighting.importance_sampling: (w[:, -1] * (r @ discount)).mean(),
        weighting.per_decision: ((w * r) @ discount).mean(),
        weighting.weighted_importance_sampling: (w[:, -1] * (r @ discount)).sum() / w[:, -1].sum(),
        weighting.weighted_per_decision: ((w * r).sum(0) / w.sum(0)) @ discount,
        weighting.stepwise_weighted: ((w / np.maximum(mean_weights, 1e-300) * r) @ discount).mean(),
        weighting.direct_method: v[:, 0].mean(),
        weighting.doubly_robust: ((before * v + w * (r - q + tail)) @ discount).mean(),
        weighting.weighted_doubly_robust: (
            (before * v).sum(0) / before.sum(0) + (w * (r - q + tail)).sum(0) / w.sum(0)
        )
        @ discount,
    }
    for estimator, expected in by_hand.items():
        found: Contributions = estimator(steps)  # type: ignore[operator] # functions of steps
        assert found.value == pytest.approx(expected), estimator


@pytest.mark.few(1)
@pytest.mark.parametrize("name", first(2, PROBLEMS))
def test_standard_errors_of_rllibs_weighted_estimator_are_as_wide_as_it_varies(name: str) -> None:
    """It comes near another value than the truth where policies last unequally long: no test of coverage."""
    found = [weighting.stepwise_weighted(steps) for steps in runs(PROBLEMS[name], 400, 250, seed=5)]
    errors = [np.sqrt((part.influences**2).mean() / 250) for part in found]
    assert np.mean(errors) == pytest.approx(np.std([part.value for part in found]), rel=0.12)


def test_doubly_robust_recursion_and_sum_are_the_same() -> None:
    rng = np.random.default_rng(4)
    ratios, rewards, states, actions = (rng.normal(size=6) for _ in range(4))
    steps = WeightedSteps(ratios, rewards, np.array([6]), 0.9, states, actions, np.zeros(1))
    value = 0.0
    for t in reversed(range(6)):
        value = states[t] + np.exp(ratios[t]) * (rewards[t] + 0.9 * value - actions[t])
    assert weighting.doubly_robust(steps).value == pytest.approx(value)


@pytest.mark.few(1)
@pytest.mark.parametrize("drift", [-0.5, 0.0, 0.5])
def test_horizons_of_100_000_steps_do_not_overflow(drift: float) -> None:
    """Weights from e^-50000 to e^50000; and rewards below 0."""
    rng = np.random.default_rng(0)
    lengths = np.array([100_000, 60_000, 100_000])
    ratios = drift + 0.01 * rng.normal(size=lengths.sum())
    rewards = -rng.random(lengths.sum())
    values = rng.normal(size=lengths.sum())
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        steps = WeightedSteps(ratios, rewards, lengths, 0.999, values, values, np.zeros(3))
        functions = UNBIASED | CONSISTENT | {"stepwise_wis": weighting.stepwise_weighted}
        found = {name: function(steps) for name, function in functions.items()}
        overlap = Overlap.of(steps.log_weights[steps.last])
    for contributions in found.values():
        assert not np.isnan(contributions.value)
        assert np.isfinite(contributions.influences).all()
    # Averages of what was seen stay within it, however large the weights are.
    assert steps.returns.min() <= found["wis"].value <= steps.returns.max()
    assert -1000.0 < found["wpdis"].value < 0.0
    assert 1.0 <= overlap.effective_sample_size <= 3.0


def test_an_action_that_is_never_taken_ends_what_its_episode_says() -> None:
    ratios = np.array([0.0, -np.inf, 0.0, 0.5, 0.5, 0.5])
    steps = WeightedSteps(ratios, np.ones(6), np.array([3, 3]), 1.0)
    assert steps.log_weights.tolist() == [0.0, -np.inf, -np.inf, 0.5, 1.0, 1.5]
    assert weighting.per_decision(steps).value == pytest.approx((1 + np.exp([0.5, 1.0, 1.5]).sum()) / 2)
    assert weighting.weighted_importance_sampling(steps).value == pytest.approx(3.0)
    assert weighting.weighted_per_decision(steps).value == pytest.approx(3.0)
    impossible = WeightedSteps(np.full(2, -np.inf), np.ones(2), np.array([2]), 1.0)
    assert weighting.importance_sampling(impossible).value == 0.0
    with pytest.raises(OptionError, match="all weights are 0"):
        weighting.weighted_per_decision(impossible)
    assert Overlap.of(np.full(3, -np.inf)).effective_sample_size == 0.0


def test_many_episodes_are_drawn_in_groups_and_give_the_same_interval() -> None:
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=6000)
    part = Contributions(weights * rng.normal(2.0, 1.0, 6000), weights)
    low, high = Resampling(6000, resamples=2000, seed=0).interval([part], confidence=0.95)
    error = np.sqrt((part.influences**2).mean() / 6000)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    assert (high + low) / 2 == pytest.approx(part.value, abs=0.2 * error)


def test_what_an_episode_says_does_not_depend_on_its_neighbours_by_a_single_bit() -> None:
    """So that parts of the data can be judged anywhere and put together."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.geometric(0.1, 300), [500, 1, 900]])
    ratios, rewards = 3.0 * rng.normal(size=lengths.sum()), rng.normal(size=lengths.sum())
    whole = WeightedSteps(ratios, rewards, lengths, 0.97).episode_weights
    start = 0
    for episode, length in enumerate(lengths.tolist()):
        rows = slice(start, start + length)
        alone = WeightedSteps(ratios[rows], rewards[rows], np.array([length]), 0.97).episode_weights
        for field in dataclasses.fields(alone):
            (value,) = getattr(alone, field.name)
            assert getattr(whole, field.name)[episode] == value, field.name
        start += length
