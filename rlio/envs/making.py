"""Making a vector environment of what a user names: an id, a function, an environment, a vector environment.

Example:
    >>> envs = make_vector_env("CartPole-v1", num_envs=3)
    >>> envs.num_envs, str(envs.single_action_space)
    (3, 'Discrete(2)')
    >>> envs.close()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rlio.envs.leaves import leaves_of
from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

T = TypeVar("T")

__all__ = ["EnvLike", "make_vector_env"]

# Any: gymnasium's generic parameters, which say nothing here.
if TYPE_CHECKING:
    EnvLike: TypeAlias = (
        str
        | EnvSpec
        | gym.Env[Any, Any]
        | VectorEnv[Any, Any, Any]
        | Callable[[], gym.Env[Any, Any] | VectorEnv[Any, Any, Any]]
    )
else:
    EnvLike = object


def make_vector_env(
    env: EnvLike, *, num_envs: int = 1, vectorize_mode: str = "sync"
) -> VectorEnv[Any, Any, Any]:
    """Make a vector environment of ``num_envs`` environments, or take the one that is given.

    Args:
        env: A gymnasium id or spec; a function that makes an environment, or, but not for ``"async"``, a
            vector environment; an environment, which cannot be multiplied; or a vector environment.
        num_envs: How many. A given vector environment has its own number: then 1 means "as it is".
        vectorize_mode: ``"sync"``, ``"async"`` or ``"native"``, see `RolloutConfig`; of no meaning for a
            given environment or vector environment.

    Returns:
        The vector environment, which the caller closes. Those made here return views of buffers of theirs,
        and start a new episode in the step that ends one.

    Raises:
        OptionError: It cannot be made; the message says why.
    """
    from gymnasium import Env
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

    if isinstance(env, VectorEnv):
        return _of_size(env, num_envs)
    if isinstance(env, Env):
        if num_envs != 1:
            raise OptionError(
                f"num_envs={num_envs} but env is one environment, {excerpt(env)}: "
                "pass a function that makes it"
            )
        given = env
        return _made("env", lambda: _sync([lambda: given]))
    make: Callable[[], Any]
    if isinstance(env, (str, EnvSpec)):
        name = excerpt(env if isinstance(env, str) else env.id)
        if vectorize_mode == "native":
            return _made(name, partial(_native, env, num_envs))
        make = partial(_make, env)
    elif callable(env):
        name, make = excerpt(env), env
        if vectorize_mode == "native":
            made = _made(name, make)
            if not isinstance(made, VectorEnv):
                raise OptionError(f"env={name} gave {excerpt(made)}: 'native' needs a vector environment")
            return _of_size(made, num_envs)
    else:
        raise OptionError(
            f"env={excerpt(env)}: expected a gymnasium id or spec, an environment, a vector environment, "
            "or a function that makes one"
        )
    if vectorize_mode == "async":
        return _made(name, partial(_async, make, num_envs))
    first = _made(name, make)
    if isinstance(first, VectorEnv):
        return _of_size(first, num_envs)
    if not isinstance(first, Env):
        raise OptionError(f"env={name} gave {excerpt(first)}: expected a gymnasium environment")
    return _made(name, lambda: _sync([lambda: first, *[make] * (num_envs - 1)]))


def _made(name: str, make: Callable[[], T]) -> T:
    """``make()``, its failure told as an OptionError."""
    try:
        return make()
    except Exception as error:
        raise OptionError(
            f"env={name} cannot be made: {type(error).__name__}: {excerpt(str(error), 500)}"
        ) from error


def _make(env: str | EnvSpec) -> gym.Env[Any, Any]:
    import gymnasium as gym

    return gym.make(env)


def _native(env: str | EnvSpec, num_envs: int) -> VectorEnv[Any, Any, Any]:
    import gymnasium as gym

    return gym.make_vec(env, num_envs=num_envs, vectorization_mode="vector_entry_point")


# SAME_STEP: every step is a transition, where NEXT_STEP spends one on each reset. copy=False: rows are
# copied into the recorder's columns anyway.


def _sync(makers: list[Any]) -> VectorEnv[Any, Any, Any]:
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def _async(make: Callable[[], Any], num_envs: int) -> VectorEnv[Any, Any, Any]:
    from gymnasium import Env
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode

    probe = make()
    try:
        if not isinstance(probe, Env):
            raise TypeError(f"it is a {type(probe).__name__}, not one gymnasium environment")
        # Objects cannot lie in shared memory.
        shared = not any(leaf.is_object for leaf in leaves_of(probe.observation_space))
    finally:
        probe.close()
    return AsyncVectorEnv(
        [make] * num_envs, shared_memory=shared, copy=False, autoreset_mode=AutoresetMode.SAME_STEP
    )


def _of_size(envs: VectorEnv[Any, Any, Any], num_envs: int) -> VectorEnv[Any, Any, Any]:
    if num_envs not in (1, envs.num_envs):
        raise OptionError(
            f"num_envs={num_envs} but the vector environment has {envs.num_envs}: leave num_envs at 1"
        )
    return envs
