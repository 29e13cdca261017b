"""Intervals that are called reliable hold the truth about as often as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import ope_coverage
import pytest
from ope_coverage import FAMILIES, Found, coverage, intervals
from tabular_problems import PROBLEMS, Problem, survivor
from typer.testing import CliRunner

import rlio
from rlio.evaluation import OffPolicyEstimate, evaluate_offline


def test_an_interval_that_misses_the_truth_at_an_effective_sample_size_of_4_is_not_reliable() -> None:
    """In the result, its text and its JSON."""
    problem = survivor()
    estimate = missing_estimate(problem)
    assert estimate.overlap is not None
    assert 3 < estimate.overlap.effective_sample_size < 5
    assert not estimate.v_target.interval[0] <= problem.truth <= estimate.v_target.interval[1]
    assert not estimate.reliable
    assert len(estimate.doubts) == 3
    assert "not reliable" in str(estimate.v_target)
    assert str(estimate).count("not reliable") == 3
    assert estimate.v_behavior.reliable
    found = json.loads(json.dumps(estimate.to_json()))
    assert found["reliable"] is found["v_target"]["reliable"] is found["v_gain"]["reliable"] is False
    assert found["doubts"] == list(estimate.doubts)


def missing_estimate(problem: Problem) -> OffPolicyEstimate:
    """What wpdis says of 30 long episodes: it is sure, and wrong."""
    batch = problem.simulate(30, seed=34)
    return evaluate_offline(batch, problem.target, gamma=problem.gamma, estimators=["wpdis"])["wpdis"]


def judged_in_survivor(obs: Any, actions: Any) -> Any:
    """As a command names it."""
    return survivor().log_probabilities(obs, actions)


def test_the_command_says_which_intervals_are_not_reliable_in_its_table_and_in_json(tmp_path: Path) -> None:
    from rlio.cli.main import app

    root = str(tmp_path / "rows")
    with rlio.ParquetWriter(root) as writer:
        writer.write(survivor().simulate(30, seed=34))
    command = ["evaluate", root, "--policy", "test_ope_coverage:judged_in_survivor", "--gamma", "1"]
    table = CliRunner().invoke(app, command)
    assert table.exit_code == 0, table.output
    estimates = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert [estimate["reliable"] for estimate in estimates.values()] == [False] * 4
    for name, estimate in estimates.items():
        low, high = estimate["v_target"]["interval"]
        assert f"{low:.6g} to {high:.6g} (not reliable)" in table.output
        assert f"not reliable: {name}: " in table.output
        assert estimate["doubts"]


def test_the_metrics_of_a_worker_say_which_estimates_are_not_reliable(tmp_path: Path) -> None:
    root = str(tmp_path / "rows")
    with rlio.ParquetWriter(root) as writer:
        writer.write(survivor().simulate(30, seed=34))
    policy = Cautious()
    policy.bind(survivor().target.observation_space, survivor().target.action_space, seed=0)
    rollout = rlio.RolloutConfig(input_evaluation=["wpdis"], input_evaluation_gamma=1.0)
    options = {"epochs": 1}
    with rlio.RolloutWorker(None, policy, input=root, rollout=rollout, input_options=options) as worker:
        for _ in worker:
            pass
        found = worker.get_metrics().summarise()["off_policy_estimator"]["wpdis"]
    assert found["reliable"] is False
    assert found["doubts"]


class Cautious(rlio.RandomPolicy):
    """The judged policy of `survivor`."""

    def compute_log_likelihoods(self, actions: Any, obs: Any, **options: Any) -> Any:
        return survivor().log_probabilities(np.asarray(obs), np.asarray(actions))


@pytest.mark.further
def test_intervals_that_are_called_reliable_hold_the_truth_and_those_that_miss_it_are_not() -> None:
    found: list[Found] = []
    for strength in (0.5, 1.0):
        found += intervals(
            "long", survivor().further(strength), episodes=300, runs=25, estimators=["wpdis", "is"]
        )
    missed = [one for one in found if not one.holds]
    # Half of them miss it, and the effective sample size alone does not tell: it is above 30 in many.
    assert len(missed) > 0.3 * len(found)
    assert sum(one.effective_sample_size > 30 for one in missed) > 5
    assert sum(one.reliable for one in missed) <= 1
    for name in ("bandit", "chain"):
        found = list(
            intervals(
                name, PROBLEMS[name], episodes=1000, runs=25, estimators=["wpdis", "wis"], resamples=199
            )
        )
        reliable = [one for one in found if one.reliable]
        assert len(reliable) > 0.6 * len(found)
        assert coverage(reliable) > 0.88


@pytest.mark.soak
def test_in_all_problems_hardly_any_interval_that_misses_the_truth_is_called_reliable() -> None:
    found = ope_coverage.experiment(60)
    for name in ope_coverage.ESTIMATORS:
        short, long = ([one for one in found if (one.family, one.estimator) == (f, name)] for f in FAMILIES)
        assert coverage([one for one in short if one.reliable]) > 0.92, name
        assert sum(one.reliable for one in short) > 0.2 * len(short), name
        assert sum(one.reliable and not one.holds for one in long) < 0.02 * len(long), name
        if name not in ("dr", "wdr"):
            doubted = [one for one in long if not one.reliable]
            assert coverage(doubted) < 0.75, name
            # The effective sample size alone does not tell.
            assert coverage([one for one in doubted if one.effective_sample_size > 100]) < 0.85, name
