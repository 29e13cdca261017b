"""Off-policy evaluation: logged steps, in episodes of several lengths, judged by importance sampling."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np

import rlio
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave
from rlio.evaluation import evaluate_offline

__all__ = ["run"]

# Steps of an episode: bandits, short ones, CartPole's, and a horizon that overflows where logs are not used.
_LENGTHS = (1, 10, 200, 100_000)
_ROUNDS = 5


def run(setup: Setup) -> Section:
    """Seconds of one evaluation, intervals and diagnostics included, by a policy that costs little."""
    steps = setup.scale.rows
    section = Section(
        "evaluation", f"Off-policy evaluation of {steps:,} steps in memory, batches of 4,096", unit="call"
    )
    for length in _LENGTHS:
        if length > steps:
            continue
        kind, parts = f"episodes of {length:,}", list(_steps(steps // length, length).timeslices(4096))
        cases = [
            Case(name, partial(_evaluate, parts, estimators), 1, once=True)
            for name, estimators in (("is", ["is"]), ("is, pdis, wis, wpdis", ["is", "pdis", "wis", "wpdis"]))
        ]
        section.add_taken(kind, interleave(cases, rounds=_ROUNDS, seconds=0))
        figure = section.find(kind, "is")
        assert figure is not None
        work = f"IS over {steps:,} steps, {kind}"
        section.quantity(work, "seconds on the clock", figure.median, "s", at_most=1)
        section.quantity(work, "seconds of processors", statistics.median(figure.cpu), "s", at_most=None)
    return section


def _steps(episodes: int, length: int) -> rlio.SampleBatch:
    """Whole episodes of two random actions."""
    rng, rows = np.random.default_rng(0), episodes * length
    return rlio.SampleBatch(
        obs=np.zeros(rows, np.float32),
        actions=rng.integers(0, 2, rows),
        rewards=rng.normal(size=rows),
        action_logp=np.full(rows, np.log(0.5)),
        terminateds=np.tile(np.arange(length) == length - 1, episodes),
        eps_id=np.repeat(rng.permutation(episodes), length),
        t=np.tile(np.arange(length), episodes),
    )


def _evaluate(parts: list[rlio.SampleBatch], estimators: list[str]) -> Any:
    return evaluate_offline(parts, _judged, gamma=0.99, estimators=estimators)


def _judged(obs: Any, actions: Any) -> Any:
    return np.where(actions == 1, np.log(0.51), np.log(0.49))
