"""An environment that lives elsewhere: it says who it is, and its next step can be told to go wrong."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from rlio.envs.context import EnvContext

__all__ = ["RemoteEnv", "Untold"]


class Untold(Exception):
    """An error that is not made again from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class RemoteEnv(gym.Env[Any, Any]):
    """Observations are (index, life, episode, t, a random number), the reward is the action and the number.

    Episodes have 3 to 9 steps, as the seed says.

    Args:
        context: ``goodbye``: a folder in which it leaves a file of its name when it is closed.

    Attributes:
        fault: What goes wrong in the next step: ``"raise"``, ``"untold"``, ``"lock"``, ``"hang"``, or a
            path: it waits until there is such a file.
        made_in: The process, and an environment variable of it.
    """

    observation_space = Box(-1, 1e6, (5,), np.float64)
    action_space = Discrete(1000)

    def __init__(self, context: EnvContext) -> None:
        self.index, self.life, self.episode = context.vector_index, int(context.recreated), -1
        self.fault: str | None = None
        self.goodbye: str | None = context.get("goodbye")
        self.made_in = os.getpid(), os.environ.get("RLIO_TESTED")
        self.remote = context.remote

    def _obs(self) -> Any:
        return np.array([self.index, self.life, self.episode, self.t, self.np_random.random()])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        self.length = int(self.np_random.integers(3, 10))
        return self._obs(), {"episode": self.episode}

    def step(self, action: Any) -> Any:
        self.t += 1
        fault, self.fault = self.fault, None
        if fault == "raise":
            raise ValueError("the simulator is gone")
        if fault == "untold":
            raise Untold(1, 2)
        if fault == "hang":
            threading.Event().wait()
        info = {"action": int(action)}
        if fault == "lock":
            info["lock"] = threading.Lock()  # type: ignore[assignment]
        elif fault is not None:
            while not Path(fault).exists():
                time.sleep(0.002)
        obs = self._obs()
        return obs, float(action) + obs[-1], self.t == self.length, False, info

    def close(self) -> None:
        if self.goodbye is not None:
            Path(self.goodbye, f"{self.index}-{self.life}").touch()
