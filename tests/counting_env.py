"""An environment that counts: each observation is (environment, number of its episode, step), known before.

Lengths of episodes, which way they end and their rewards are functions of the same numbers, so that what a
runner recorded can be compared with what there was to record: every row, in order, none left out.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from rlio import SampleBatch

__all__ = ["CountingEnv", "CountingVectorEnv", "action_for", "check_stream", "length_of"]

_SPACE = Box(0, np.inf, (3,), np.float64)


def length_of(env: Any, number: Any) -> Any:
    """Steps of episode ``number`` of environment ``env``: 1 to 23; numbers or arrays."""
    return 1 + (7 * number + 5 * env + number * number * 3) % 23


def action_for(obs: NDArray[Any]) -> NDArray[np.int64]:
    """An action for each observation, shape (n, 3), that its row can be told by."""
    actions: NDArray[np.int64] = obs.sum(1).astype(np.int64) % 3
    return actions


class CountingEnv(gym.Env[Any, Any]):
    """Environment number ``index``; its episodes all end in one way."""

    observation_space = _SPACE
    action_space = Discrete(3)

    def __init__(self, index: int, *, truncates: bool) -> None:
        self._index, self._truncates, self._number = index, truncates, -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._number += 1
        self._t = 0
        self._end = length_of(self._index, self._number)
        return np.array([self._index, self._number, 0.0]), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        over = self._t == self._end
        obs = np.array([self._index, self._number, self._t], np.float64)
        return obs, float(self._t), over and not self._truncates, over and self._truncates, {}


class CountingVectorEnv(VectorEnv[Any, Any, Any]):
    """The same, many at once, in any autoreset mode; its buffers are overwritten by each step."""

    single_observation_space = _SPACE
    single_action_space = Discrete(3)

    def __init__(self, num_envs: int, mode: AutoresetMode, *, truncates: bool) -> None:
        self.num_envs, self._mode, self._truncates = num_envs, mode, truncates
        self.metadata = {"autoreset_mode": mode}
        self.observation_space = Box(0, np.inf, (num_envs, 3), np.float64)
        self.action_space = gym.spaces.MultiDiscrete([3] * num_envs)
        self._obs = np.zeros((num_envs, 3))
        self._obs[:, 0], self._obs[:, 1] = np.arange(num_envs), -1
        self._over = np.zeros(num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        self._restart((options or {}).get("reset_mask", np.ones(self.num_envs, bool)))
        return self._obs, {}

    def _restart(self, which: NDArray[np.bool_]) -> None:
        self._obs[which, 1] += 1
        self._obs[which, 2] = 0
        self._over[which] = False

    def step(self, actions: Any) -> Any:
        resets = self._over.copy() if self._mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        self._obs[~resets, 2] += 1
        self._restart(resets)
        over = (self._obs[:, 2] == length_of(self._obs[:, 0], self._obs[:, 1])) & ~resets
        self._over = over.copy()
        rewards, infos = self._obs[:, 2].copy(), {}
        if over.any() and self._mode is AutoresetMode.SAME_STEP:
            final = np.full(self.num_envs, None, object)
            for env in np.flatnonzero(over):
                final[env] = self._obs[env].copy()
            infos = {"final_obs": final, "_final_obs": over.copy()}
            self._restart(over)
        none = np.zeros(self.num_envs, bool)
        flags = (none, over.copy()) if self._truncates else (over.copy(), none)
        return self._obs, rewards, *flags, infos


def check_stream(
    parts: list[SampleBatch], *, num_envs: int, truncates: bool, told_by_actions: bool = False
) -> int:
    """Raise unless ``parts`` are what there was to record, from the first step on; gives the rows.

    Args:
        parts: The rows.
        num_envs: Environments.
        truncates: Whether they cut their episodes off.
        told_by_actions: Whether the policy took `action_for` each observation.
    """
    batches = [part.copy() for part in parts]
    rows = 0
    for env in range(num_envs):
        mine = [batch[np.flatnonzero(batch["env_id"] == env)] for batch in batches]
        columns = {name: np.concatenate([part[name] for part in mine]) for name in batches[0]}
        n = len(columns["t"])
        # All episodes long enough, one after the other, cut at n rows.
        numbers = np.arange(n + 1)
        lengths = length_of(env, numbers)
        number = np.repeat(numbers, lengths)[:n]
        t = np.arange(n) - np.repeat(np.cumsum(lengths) - lengths, lengths)[:n]
        over = t + 1 == length_of(env, number)
        expected = np.stack([np.full(n, env), number, t], 1)
        np.testing.assert_array_equal(columns["obs"], expected)
        np.testing.assert_array_equal(columns["new_obs"], expected + np.array([0, 0, 1]))
        np.testing.assert_array_equal(columns["t"], t)
        if told_by_actions:
            np.testing.assert_array_equal(columns["actions"], action_for(expected))
        np.testing.assert_array_equal(columns["rewards"], t + 1)
        np.testing.assert_array_equal(columns["truncateds"], over & truncates)
        np.testing.assert_array_equal(columns["terminateds"], over & (not truncates))
        same = columns["eps_id"][1:] == columns["eps_id"][:-1]
        np.testing.assert_array_equal(same, number[1:] == number[:-1])
        assert len(np.unique(columns["eps_id"])) == number[-1] + 1
        rows += n
    return rows
