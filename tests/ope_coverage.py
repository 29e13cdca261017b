"""How often intervals of off-policy estimates hold the truth, and how often reliable ones do.

`python tests/ope_coverage.py` prints the tables of docs/evaluation.md; it takes about ten minutes.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from tabular_problems import PROBLEMS, Problem, gridworld, survivor

from rlio.evaluation import weighting
from rlio.evaluation.estimates import Overlap, measured
from rlio.evaluation.intervals import IntervalOptions, Resampling
from rlio.evaluation.weighting import Contributions

ESTIMATORS: dict[str, Callable[[Any], Contributions]] = {
    "is": weighting.importance_sampling,
    "pdis": weighting.per_decision,
    "wis": weighting.weighted_importance_sampling,
    "wpdis": weighting.weighted_per_decision,
    "dr": weighting.doubly_robust,
    "wdr": weighting.weighted_doubly_robust,
}

#: Short episodes, and long ones: those of `survivor` have weights with tails so heavy that they hardly have a
#: variance.
FAMILIES: dict[str, dict[str, Problem]] = {
    "short": {**PROBLEMS, "large gridworld": gridworld(5)},
    "long": {"survivor": survivor()},
}
STRENGTHS = {"short": (1.0, 2.0, 3.0), "long": (0.25, 0.5, 0.75, 1.0, 1.5)}
EPISODES = (30, 100, 300, 1000)


class Found(NamedTuple):
    """One interval of one run."""

    family: str
    estimator: str
    holds: bool
    reliable: bool
    effective_sample_size: float
    mean_weight: float
    error_sample_size: float


def intervals(
    family: str,
    problem: Problem,
    *,
    episodes: int,
    runs: int,
    estimators: Sequence[str] = tuple(ESTIMATORS),
    resamples: int = 399,
) -> Iterator[Found]:
    """The 95 % intervals of ``runs`` data sets of so many ``episodes``."""
    values = problem.action_values(problem.judged)
    model = values + 0.3 * np.abs(values).mean()
    draws = Resampling(episodes, resamples=resamples, seed=0)
    for run in range(runs):
        seed = zlib.crc32(f"{family} {problem.judged.tolist()} {episodes} {run}".encode())
        steps = problem.steps(problem.simulate(episodes, seed), values=model)
        overlap = Overlap.of(steps.log_weights[steps.last])
        for name in estimators:
            found = measured([ESTIMATORS[name](steps)], draws, IntervalOptions(), doubts=overlap.doubts)
            low, high = found.interval
            yield Found(
                family,
                name,
                bool(low <= problem.truth <= high),
                found.reliable,
                overlap.effective_sample_size,
                overlap.mean_weight,
                found.error_sample_size,
            )


def experiment(runs: int) -> list[Found]:
    """All problems, strengths and numbers of episodes."""
    return [
        found
        for family, problems in FAMILIES.items()
        for problem in problems.values()
        for strength in STRENGTHS[family]
        for episodes in EPISODES
        for found in intervals(family, problem.further(strength), episodes=episodes, runs=runs)
    ]


def coverage(found: Sequence[Found]) -> float:
    """The share of intervals that hold the truth; NaN of none."""
    return sum(one.holds for one in found) / len(found) if found else float("nan")


def table(found: Sequence[Found], heading: str, rows: dict[str, Callable[[Found], bool]]) -> str:
    """Share of the intervals that hold the truth, and their number, in lines of Markdown."""
    lines = [f"| {heading} | episodes | {' | '.join(ESTIMATORS)} |", f"|{'---|' * (2 + len(ESTIMATORS))}"]
    for family in FAMILIES:
        for name, chosen in rows.items():
            parts = [
                [one for one in found if one.family == family and one.estimator == estimator and chosen(one)]
                for estimator in ESTIMATORS
            ]
            cells = [f"{coverage(part):.0%} ({len(part)})" if len(part) >= 50 else "" for part in parts]
            lines.append(f"| {name} | {family} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _between(field: str, low: float, high: float) -> Callable[[Found], bool]:
    return lambda one: bool(low <= getattr(one, field) < high)


def main() -> None:
    """Write how many intervals hold the truth, by each of the numbers that are looked at."""
    found = experiment(200)
    for field, ends in (
        ("effective_sample_size", [0, 10, 30, 100, np.inf]),
        ("error_sample_size", [0, 5, 10, 20, np.inf]),
        ("mean_weight", [0, 0.7, 0.9, 1.1, np.inf]),
    ):
        rows = {f"{low:g} to {high:g}": _between(field, low, high) for low, high in pairwise(ends)}
        sys.stdout.write(table(found, field, rows) + "\n")
    called = {str(reliable): _between("reliable", reliable, reliable + 1) for reliable in (True, False)}
    sys.stdout.write(table(found, "reliable", called))


if __name__ == "__main__":
    main()
