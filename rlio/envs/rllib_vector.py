"""`as_gymnasium`: RLlib's `VectorEnv` as one of gymnasium, which runners step.

Any class with its methods is accepted: ``vector_reset``, ``reset_at`` and ``vector_step``.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> class Pair:
    ...     observation_space, action_space, num_envs = Box(0.0, 9.0, (1,)), Discrete(2), 2
    ...     def vector_reset(self, *, seeds=None, options=None):
    ...         return [np.zeros(1, np.float32)] * 2, [{}, {}]
    ...     def reset_at(self, index, *, seed=None, options=None):
    ...         return np.zeros(1, np.float32), {}
    ...     def vector_step(self, actions):
    ...         return [np.ones(1, np.float32)] * 2, [1.0, 2.0], [False] * 2, [False] * 2, [{}, {}]
    >>> envs = as_gymnasium(Pair())
    >>> _ = envs.reset(seed=0)
    >>> envs.step(np.array([0, 1]))[1].tolist()
    [1.0, 2.0]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from rlio.errors import EnvError, excerpt

__all__ = ["as_gymnasium"]

_METHODS = ("vector_reset", "reset_at", "vector_step", "num_envs", "observation_space", "action_space")


def as_gymnasium(env: Any) -> Any:
    """``env``; if it is a `VectorEnv` of RLlib's kind, one of gymnasium that steps it."""
    if isinstance(env, (VectorEnv, type)) or not all(hasattr(env, name) for name in _METHODS):
        return env
    return _RllibVectorEnv(env)


class _RllibVectorEnv(VectorEnv[Any, Any, Any]):
    """Steps ``env``, whose caller resets each environment that ended."""

    # Any: environments define observations and actions.

    def __init__(self, env: Any) -> None:
        self.env, self.num_envs = env, int(env.num_envs)
        self.single_observation_space = env.observation_space
        self.single_action_space = env.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self._obs: list[Any] = []

    @property
    def envs(self) -> list[Any]:
        """The environments, as far as ``env`` gives them."""
        return list(self.env.get_sub_environments()) if hasattr(self.env, "get_sub_environments") else []

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        seeds = (
            [None if seed is None else seed + i for i in range(self.num_envs)]
            if (seed is None or isinstance(seed, int))
            else list(seed)
        )
        mask = None if options is None else options.get("reset_mask")
        if mask is None:
            self._obs, infos = map(list, self.env.vector_reset(seeds=seeds))
            return self._stacked(), infos
        infos = [{} for _ in range(self.num_envs)]
        for index in np.flatnonzero(mask).tolist():
            obs, info = self.env.reset_at(index, seed=seeds[index])
            if isinstance(obs, Exception):  # How RLlib's wrappers report a failure.
                raise EnvError(f"reset_at({index}) returned {excerpt(repr(obs))}") from obs
            self._obs[index], infos[index] = obs, info or {}
        return self._stacked(), infos

    def step(self, actions: Any) -> Any:
        given = list(iterate(self.action_space, actions))
        obs, rewards, terminateds, truncateds, infos = self.env.vector_step(given)
        self._obs = list(obs)
        ends = (np.array(flags, bool) for flags in (terminateds, truncateds))
        return self._stacked(), np.array(rewards, np.float64), *ends, list(infos)

    def _stacked(self) -> Any:
        space = self.single_observation_space
        return concatenate(space, self._obs, cast("Any", create_empty_array(space, self.num_envs)))

    def close_extras(self, **kwargs: Any) -> None:
        for env in (*self.envs, self.env):
            if hasattr(env, "close"):
                env.close()
