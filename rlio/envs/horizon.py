"""`with_horizon`: truncates environments' episodes after a number of steps.

Example:
    >>> import gymnasium as gym
    >>> with_horizon("CartPole-v1", 7).max_episode_steps
    7
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from rlio.envs.make import EnvLike
from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["with_horizon"]


def with_horizon(env: EnvLike, horizon: int) -> EnvLike:
    """Return ``env``, or what makes its environments, with episodes truncated after ``horizon`` steps.

    Raises:
        OptionError: ``env`` is a vector environment or makes one, whose environments cannot be wrapped.
        gymnasium.error.Error: The environment id is unknown.
    """
    import gymnasium as gym
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

    if isinstance(env, VectorEnv):
        raise _out_of_reach(env)
    if isinstance(env, gym.Env):
        return _limited(env, horizon)
    if isinstance(env, (str, EnvSpec)):
        spec = copy.deepcopy(gym.spec(env) if isinstance(env, str) else env)
        spec.max_episode_steps = min(horizon, spec.max_episode_steps or horizon)
        return spec
    if not callable(env):
        return env  # the error comes when environments are made
    make = env

    @functools.wraps(make)
    def limited(*args: Any, **kwargs: Any) -> gym.Env[Any, Any]:
        return _limited(make(*args, **kwargs), horizon)

    return limited


def _limited(env: Any, horizon: int) -> gym.Env[Any, Any]:
    import gymnasium as gym
    from gymnasium.wrappers import TimeLimit

    if not isinstance(env, gym.Env):
        raise _out_of_reach(env)
    return TimeLimit(env, horizon)


def _out_of_reach(env: Any) -> OptionError:
    return OptionError(
        f"horizon applies to single environments, not to {excerpt(env)}: give it its own time limit, or set "
        "soft_horizon=True"
    )
