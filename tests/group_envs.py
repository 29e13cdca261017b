"""Environments and policies for tests of worker groups: Ray's processes import them from here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from linear_policy import LinearPolicy

from rlio.connectors.connector import Connector, Streams
from rlio.distributed import Fragment, WorkerGroup, WorkerStatus
from rlio.envs.context import EnvContext

__all__ = [
    "Counting",
    "KnownEnv",
    "Weighed",
    "check_nothing_missing",
    "check_rows",
    "kill",
    "length_of",
    "make_known",
    "settle",
    "until_answered",
]


def length_of(number: Any) -> Any:
    """Steps of an environment's episode ``number``: 3 to 9; numbers or arrays."""
    return 3 + (number * number * 3 + number) % 7


class KnownEnv(gym.Env[Any, Any]):
    """Observations are (whose, episode, t), rewards are t: each row says what it is.

    ``whose`` is drawn from the first reset's seed, so that two workers never are the same one.
    """

    observation_space = Box(0, np.inf, (3,), np.float64)
    action_space = Discrete(2)

    def __init__(self, context: EnvContext) -> None:
        self.sleep = context.get("sleep", 0.0)
        self.folder = context.get("folder")
        self.context = context
        self.whose: int | None = None
        self.number = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.whose is None:
            assert seed is not None
            self.whose = seed
        self.number += 1
        self.t = 0
        return self._seen(), {}

    def _seen(self) -> Any:
        return np.array([self.whose, self.number, self.t], np.float64)

    def step(self, action: Any) -> Any:
        if self.sleep:
            time.sleep(self.sleep)
        if self.folder is not None:
            self._obey(Path(self.folder), self.context.worker_index)
        self.t += 1
        over = bool(self.t == length_of(self.number))
        return self._seen(), float(self.t), over, False, {}

    def _obey(self, folder: Path, worker: int) -> None:
        """Do, once, what a file in ``folder`` says that this worker is to do."""
        for order in ("die", "raise", "hang"):
            file = folder / f"{order}-{worker}"
            if file.exists():
                file.unlink()
                if order == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if order == "raise":
                    raise ZeroDivisionError(f"worker {worker} was told to")
                time.sleep(600)
        if (folder / f"always-die-{worker}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        while (folder / f"wait-{worker}").exists():
            time.sleep(0.005)


def make_known(context: EnvContext) -> KnownEnv:
    """As a function, for `RolloutConfig.env_config`."""
    return KnownEnv(context)


def check_rows(columns: dict[str, Any]) -> None:
    """Raise unless every row is a step of a `KnownEnv`, and no two are the same one."""
    obs, new_obs = columns["obs"], columns["new_obs"]
    np.testing.assert_array_equal(new_obs, obs + np.array([0, 0, 1]))
    np.testing.assert_array_equal(columns["rewards"], new_obs[:, 2])
    np.testing.assert_array_equal(columns["terminateds"], new_obs[:, 2] == length_of(obs[:, 1]))
    assert len(np.unique(obs, axis=0)) == len(obs), "a row is there twice"
    # The ids that the runner drew are as many as the episodes that the environments began.
    assert len(np.unique(columns["eps_id"])) == len(np.unique(obs[:, :2], axis=0))


def check_nothing_missing(columns: dict[str, Any]) -> None:
    """Raise unless each environment's rows are all of its steps, from the first on: in any order."""
    check_rows(columns)
    for whose in np.unique(columns["obs"][:, 0]):
        rows = columns["obs"][columns["obs"][:, 0] == whose]
        rows = rows[np.lexsort((rows[:, 2], rows[:, 1]))]
        numbers = np.arange(len(rows))
        lengths = length_of(numbers)
        number = np.repeat(numbers, lengths)[: len(rows)]
        t = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)[: len(rows)]
        np.testing.assert_array_equal(rows[:, 1:], np.stack([number, t], 1))


class Weighed(LinearPolicy):
    """Begins with a weight of its own: its seed decides."""

    def _setup(self, observation_space: Any, action_space: Any, seeds: np.random.SeedSequence) -> None:
        self.w = np.random.default_rng(seeds).random(1)


class Counting(Connector):
    """Leaves observations alone, and counts them."""

    seen = 0

    def bind(self, space: Any, policy: Any = None) -> Any:
        return space

    def __call__(self, values: Any, streams: Streams | None = None) -> Any:
        Counting.seen += len(values)
        return values

    def final(self, values: Any, streams: Streams | None = None) -> Any:
        return values


def stream(group: WorkerGroup, max_in_flight: int) -> Iterator[Fragment]:
    """Fragments as they come, while workers go on sampling."""
    while True:
        group.submit(max_in_flight)
        yield from group.ready()


def settle(group: WorkerGroup) -> None:
    """Take what comes until every worker is there and has nothing to do."""
    while any(_is_busy(status) for status in group.status()):
        group.ready()
        group.probe()


def _is_busy(status: WorkerStatus) -> bool:
    # What came and waits is a batch less that is asked for, and is counted already.
    return status.alive and bool(status.in_flight or status.waiting or not status.started)


def until_answered(group: WorkerGroup) -> None:
    """Wait until all batches that were asked for are in this process; nobody has looked at them then."""
    import ray

    requests = [request for worker in group._pool.workers for request in worker.requests]
    there, _ = ray.wait(requests, num_returns=len(requests))
    assert len(there) == len(requests)


def kill(group: WorkerGroup, index: int) -> None:
    """End the process of a worker that has started."""
    pid = group.status()[index - 1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
