"""Environments whose every step can be recognised, and that fail where they are told to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from rlio.envs.context import EnvContext

__all__ = ["LENGTH", "Crashing", "Transitions", "cartpole", "fails_once"]

LENGTH = 5


class Crashing(gym.Env[Any, Any]):
    """Observations are (vector index, life, episode of that life, t); episodes have LENGTH steps.

    Args:
        context: Items: ``fails``, a function of (env) called before each step and reset, which may raise.
    """

    action_space = Discrete(2)

    def __init__(self, context: EnvContext) -> None:
        self.observation_space = Box(-1, 1e6, (4,), np.float32)
        self.index, self.recreated = context.vector_index, context.recreated
        self.fails: Callable[[Crashing, str], None] = context.get("fails", lambda env, what: None)
        self.life, self.episode, self.t = int(context.recreated), -1, 0
        self.render_mode = "rgb_array"
        self.is_closed = False
        self.fails(self, "make")

    def pid(self) -> int:
        return os.getpid()

    def _obs(self) -> NDArray[Any]:
        return np.array([self.index, self.life, self.episode, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        self.fails(self, "reset")
        return self._obs(), {"t": self.t}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.fails(self, "step")
        return self._obs(), float(self.t), self.t == LENGTH, False, {"t": self.t}

    def render(self) -> Any:
        return np.full((2, 2, 3), self.t, np.uint8)

    def close(self) -> None:
        self.is_closed = True


def fails_once(index: int, *, episode: int, t: int, how: str = "raise") -> Callable[[Crashing, str], None]:
    """What fails in environment ``index``, in its first life, at ``t`` of ``episode``; 0 is the reset."""

    def fails(env: Crashing, what: str) -> None:
        if what == "make" or env.recreated or (env.index, env.episode, env.t) != (index, episode, t):
            return
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            threading.Event().wait()
        raise ValueError("the simulator is gone")

    return fails


def cartpole(index: int, recreated: bool) -> gym.Env[Any, Any]:
    """An environment of gymnasium's; here, a process that is restarted imports little to find it."""
    return gym.make("CartPole-v1")


class Transitions:
    """The transitions of steps, told apart from resets and from nothing, and checked one by one."""

    def __init__(self, obs: NDArray[Any]) -> None:
        self.obs = np.array(obs)
        self.rows: list[tuple[NDArray[Any], float, NDArray[Any], bool]] = []
        #: Rows of each environment's running episode.
        self.running: list[list[Any]] = [[] for _ in obs]
        self.faulty: list[int] = []

    def add(self, step: Any) -> None:
        finals = dict(step.finals)
        for i in range(len(self.obs)):
            is_transition = step.valid is None or step.valid[i]
            ended = bool(step.terminateds[i] or step.truncateds[i])
            if is_transition:
                after = finals[i][0] if i in finals else step.obs[i].copy()
                assert (after[:3] == self.obs[i][:3]).all(), (i, self.obs[i], after)
                assert after[3] == self.obs[i][3] + 1 == step.rewards[i]
                assert ended == (after[3] == LENGTH)
                self.running[i].append((self.obs[i], step.rewards[i], after, ended))
            if ended:
                assert is_transition
                self.rows += self.running[i]
                self.running[i] = []
            if step.faulty is not None and step.faulty[i]:
                self.faulty.append(i)
                self.running[i] = []
            if step.starts[i]:
                assert step.obs[i][3] == 0
            elif not is_transition:
                assert (step.obs[i] == self.obs[i]).all()
        self.obs = np.array(step.obs)

    def episodes(self, env: int) -> list[tuple[int, int]]:
        """(life, episode) of the whole episodes of ``env``, in order; each has LENGTH rows."""
        whole = [tuple(int(v) for v in row[0][1:3]) for row in self.rows if row[0][0] == env]
        found = list(dict.fromkeys(whole))
        assert all(whole.count(key) == LENGTH for key in found)
        return found
