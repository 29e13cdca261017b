"""What one more row costs a full live store: ``append`` of one row and a draw of 32 units, of every kind."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

import rlio
from benchmarks.data import Columns
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import seconds_of

__all__ = ["DRAWS", "run"]

SIZE = 32
#: Kind -> the keywords of its sampler.
DRAWS: dict[str, dict[str, Any]] = {
    "rows": {},
    "filter": {"filter": "rewards > 0.5"},
    "n-step": {"draw": rlio.NStep(3)},
    "sequences": {"draw": rlio.Sequences(16, burn_in=4)},
    "episodes": {"draw": rlio.WholeEpisodes()},
    "by priority": {},
    "joint steps": {},
    "joint steps filtered": {"filter": "rewards > 0.5"},
}
# Rows of an episode, and environments whose rows alternate.
_LENGTH = 100
_ENVS = 4
# Rows of an append while a store is filled, and single rows that are appended in turn: whole episodes.
_FILL = _ENVS * _LENGTH
# Calls of which a median is taken, at least.
_LEAST = 10


def run(setup: Setup) -> Section:
    """Stores of several capacities, each full, so that every row that is appended takes the place of one."""
    section = Section("live", f"append(1) and sample({SIZE}) of a full live store", unit="call")
    capacities = setup.scale.live_rows
    for kind in DRAWS:
        for capacity in capacities:
            step = _step(kind, capacity)
            medians = [_median(step, setup.scale.seconds) for _ in range(setup.scale.rounds + 1)]
            section.add(kind, "rlio", medians[1:], at=capacity)
        few, *_, many = (each.median for each in section.figures if each.case == kind)
        work = f"append(1) and sample({SIZE}), {kind}"
        section.quantity(work, f"{capacities[-1]:,} rows", many * 1e6, "us", at_most=1000)
        section.quantity(work, f"beside {capacities[0]:,} rows", many / few, "x", at_most=2)
    return section


def _median(step: Callable[[], object], seconds: float) -> float:
    """Seconds of a call: the median of as many as fit the time, as other programs pause some of them."""
    taken = [seconds_of(step) for _ in range(_LEAST)]
    while sum(taken) < seconds:
        taken.append(seconds_of(step))
    return statistics.median(taken)


def _step(kind: str, capacity: int) -> Callable[[], object]:
    """A call that appends a row, or a joint step, to a full store and draws from it."""
    joint = kind.startswith("joint")
    store = rlio.ReplayStore(capacity)
    for start in range(0, 2 * capacity, _FILL):
        store.append(_batch(start, start + _FILL, joint=joint))
    make = store.prioritised if kind == "by priority" else store.uniform
    sampler = make(batch_size=SIZE, seed=0, **DRAWS[kind])
    fresh = itertools.cycle([_batch(row, row + 1, joint=joint) for row in range(_FILL)])

    def step() -> object:
        store.append(next(fresh))
        return sampler.sample()

    return step


def _batch(start: int, stop: int, *, joint: bool) -> rlio.SampleBatch | rlio.MultiAgentBatch:
    """Rows ``start`` to ``stop``: one agent's, or of two agents in every step."""
    if not joint:
        return rlio.SampleBatch(_columns(start, stop))
    parts = {pid: rlio.SampleBatch(_columns(start, stop)) for pid in ("one", "other")}
    return rlio.MultiAgentBatch(parts, stop - start)


def _columns(start: int, stop: int) -> Columns:
    """Steps of environments whose rows alternate, in episodes of equal length."""
    row = np.arange(start, stop)
    env, at = row % _ENVS, row // _ENVS
    t = at % _LENGTH
    obs = np.repeat(row[:, None], 8, axis=1).astype(np.float32)
    return {
        "obs": obs,
        "new_obs": obs + _ENVS,
        "actions": row % 4,
        "rewards": (row % 10 / 10).astype(np.float32),
        "terminateds": t == _LENGTH - 1,
        "truncateds": np.zeros(len(row), bool),
        "eps_id": at // _LENGTH * _ENVS + env,
        "t": t,
    }
