"""10^6 transitions of a counting environment: all of them, in order, with true final observations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from counting_env import CountingEnv, CountingVectorEnv, action_for, check_stream
from further import first
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlio.policies.policy import Policy
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner

MODES = list(AutoresetMode)


class Telling(Policy):
    """Takes an action that tells which observation it was given."""

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        return action_for(obs), state, {}


def recorded(envs: Any, *, rows: int, truncates: bool, **config: Any) -> None:
    """Record ``rows`` rows in fragments of odd sizes, and check each."""
    runner = EnvRunner(envs, Telling(), config=RolloutConfig(**config), seed=3)
    parts, sizes, count = [], iter(np.tile([1, 333, 50, 7, 1000, 128], rows)), 0
    while count < rows:
        parts.append(runner.run(int(next(sizes))))
        assert len(parts[-1]), "a batch without rows: the loop would not end"
        count += len(parts[-1])
    runner.stop()
    found = check_stream(parts, num_envs=runner.num_envs, truncates=truncates, told_by_actions=True)
    assert found == count >= rows
    assert runner.steps_dropped == 0


# In all 3 x 2 x (30,000 + 60,000 + 600) rows and more: half a million.


@pytest.mark.few(1)
@pytest.mark.parametrize("truncates", [False, True], ids=["terminated", "truncated"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.each_value_once
def test_sync_environments(mode: AutoresetMode, truncates: bool) -> None:
    makers = [partial(CountingEnv, i, truncates=truncates) for i in range(24)]
    envs = SyncVectorEnv(makers, copy=False, autoreset_mode=mode)
    recorded(envs, rows=8_000, truncates=truncates)


@pytest.mark.few(1)
@pytest.mark.parametrize("truncates", [False, True], ids=["terminated", "truncated"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.each_value_once
def test_environments_that_are_vectors_by_themselves(mode: AutoresetMode, truncates: bool) -> None:
    envs = CountingVectorEnv(64, mode, truncates=truncates)
    recorded(envs, rows=20_000, truncates=truncates)


@pytest.mark.few(1)
@pytest.mark.parametrize("truncates", [False, True], ids=["terminated", "truncated"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.each_value_once
def test_environments_in_processes(mode: AutoresetMode, truncates: bool) -> None:
    makers = [partial(CountingEnv, i, truncates=truncates) for i in range(2)]
    envs = AsyncVectorEnv(makers, copy=False, autoreset_mode=mode)
    recorded(envs, rows=400, truncates=truncates)


@pytest.mark.few(1)
@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarting"])
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.each_value_once
def test_environments_that_the_runner_makes(kind: Any, restarts: bool) -> None:
    """Row 2.3, loop: the runner's own stepping of single environments, here and in processes."""
    config = {"num_envs": 2, "vectorize_mode": kind, "restart_failed_sub_environments": restarts}
    recorded(
        lambda context: CountingEnv(context.vector_index, truncates=False),
        rows=3_000 if kind == "sync" else 300,
        truncates=False,
        **config,
    )


@pytest.mark.further
@pytest.mark.parametrize("mode", first(1, MODES), ids=lambda mode: mode.name)
def test_whole_episodes_leave_no_episode_out(mode: AutoresetMode) -> None:
    envs = CountingVectorEnv(32, mode, truncates=True)
    config = RolloutConfig(batch_mode="complete_episodes", rollout_fragment_length=29)
    runner = EnvRunner(envs, Telling(), config=config, seed=3)
    parts = [runner.run() for _ in range(40)]
    assert check_stream(parts, num_envs=32, truncates=True, told_by_actions=True) >= 40 * 29 * 32
    assert all(part["t"][0] == 0 and part["dones"][-1] for part in parts)
