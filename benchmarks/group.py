"""Measures how the throughput of a `rlio.distributed.WorkerGroup` grows with its workers.

Run:  python -m benchmarks.group [--workers 1 2 4] [--step-ms 5]

The environment does nothing but wait, as simulators and servers elsewhere do: what is measured is what the
group itself costs. Needs rlio[ray]; it uses the cluster of RAY_ADDRESS, or starts one on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

import rlio
from rlio.distributed import Fragment, WorkerGroup

__all__ = ["driver", "main", "measure"]

_STEPS = 100


class _Waiting(gym.Env[Any, Any]):
    """Waits in each step."""

    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    action_space = Discrete(2)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        return self._obs, 1.0, False, False, {}


def measure(num_workers: int, *, step_seconds: float, rounds: int) -> tuple[float, float]:
    """Steps a second of a group of ``num_workers``, as medians: of `sample`, and of `submit` and `ready`."""
    config = rlio.RolloutConfig(rollout_fragment_length=_STEPS, horizon=1000)
    with WorkerGroup(
        lambda: _Waiting(step_seconds),
        rlio.RandomPolicy,
        num_workers=num_workers,
        seed=0,
        rollout=config,
        actor_options={"num_cpus": 0},  # They wait: more of them than processors are fine.
    ) as group:
        group.sample()  # The first of each checks its environment.
        together = statistics.median(_rate(lambda: len(group.sample())) for _ in range(rounds))
        stream = _stream(group)
        for _ in range(2 * num_workers):
            next(stream)
        begun = time.perf_counter()
        steps = sum(next(stream).batch.count for _ in range(rounds * num_workers))
        return together, steps / (time.perf_counter() - begun)


def driver(*, fragments: int = 500, rows: int = 10, rounds: int = 5) -> tuple[float, float, float]:
    """Fragments a second that the driver requests, takes, and both, as medians.

    Two workers have sampled them all before the driver takes them.
    """
    config = rlio.RolloutConfig(rollout_fragment_length=rows, horizon=1000)
    found = []
    with WorkerGroup(
        lambda: gym.make("CartPole-v1"),
        rlio.RandomPolicy,
        num_workers=2,
        seed=0,
        rollout=config,
        actor_options={"num_cpus": 0},
    ) as group:
        group.sample()
        for _ in range(rounds):
            begun = time.perf_counter()
            group.submit(fragments)
            asked = time.perf_counter() - begun
            time.sleep(fragments / 150)  # The workers have the cores to themselves.
            begun, left = time.perf_counter(), 2 * fragments
            while left:
                left -= sum(1 for _ in group.ready(60))
            took = time.perf_counter() - begun
            found.append(tuple(2 * fragments / seconds for seconds in (asked, took, asked + took)))
    requested, taken, both = map(statistics.median, zip(*found, strict=True))
    return requested, taken, both


def _stream(group: WorkerGroup) -> Iterator[Fragment]:
    """Fragments as they come; each worker samples one while another is on its way."""
    while True:
        group.submit(2)
        yield from group.ready()


def _rate(sample: Any) -> float:
    begun = time.perf_counter()
    steps = sample()
    return float(steps / (time.perf_counter() - begun))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.group", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="sizes of groups")
    parser.add_argument("--step-ms", type=float, default=5.0, help="milliseconds that a step waits")
    parser.add_argument("--rounds", type=int, default=10, help="fragments of each worker")
    parser.add_argument(
        "--fragments", type=int, default=500, help="of each worker, for the driver's own rate"
    )
    options = parser.parse_args(arguments)
    print(f"steps that wait {options.step_ms:g} ms, fragments of {_STEPS} steps, {options.rounds} rounds")
    print("| workers | sample(), steps/s | of one worker | submit(2), steps/s | of one worker |")
    print("|---|---|---|---|---|")
    first: tuple[float, float] | None = None
    for number in options.workers:
        rates = measure(number, step_seconds=options.step_ms / 1000, rounds=options.rounds)
        first = first or rates
        cells = [f"{rate:.1f} | {rate / base:.2f}x" for rate, base in zip(rates, first, strict=True)]
        print(f"| {number} | {' | '.join(cells)} |", flush=True)
    requested, taken, both = driver(fragments=options.fragments)
    said = (
        f"{requested:,.0f} fragments of 10 rows a second, takes {taken:,.0f}, and does both with {both:,.0f}"
    )
    print(f"a driver requests {said}")


if __name__ == "__main__":
    main()
