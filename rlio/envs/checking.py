"""`EnvCheck`: checks an environment against gymnasium's interface, at its first reset and first step.

The check makes no extra step or reset: it inspects the first results once.

Example:
    >>> import gymnasium as gym
    >>> env = gym.make("CartPole-v1")
    >>> check = EnvCheck(env, "environment 0")
    >>> check.reset(env.reset(seed=1))
    >>> check.step((99, 1.0, False, False, {}))
    Traceback (most recent call last):
    ...
    rlio.errors.EnvError: environment 0 (CartPoleEnv), step() gave int64 (): expected float32 (4,), as ...
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlio.batch.columns import Columns
from rlio.envs.leaves import Leaf, leaf_of, leaves_of
from rlio.envs.values import as_reward, as_rewards, fitted, in_numpy
from rlio.errors import EnvError, SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.vector import VectorEnv

__all__ = ["EnvCheck", "VectorCheck", "check_methods", "check_observation", "check_spaces"]

_HINT = "check_env=False skips this check"


class EnvCheck:
    """Checks the spaces and methods of ``env`` at once, and a reset and a step when they happen.

    Args:
        env: The environment.
        name: Name of the environment, for messages.

    Raises:
        EnvError: The environment breaks the interface; the message says what and where. The methods raise it
            too.
    """

    def __init__(self, env: gym.Env[Any, Any], name: str) -> None:
        self._where = f"{name} ({type(env.unwrapped).__name__})"
        check_spaces(env, self._where)
        check_methods(env, self._where)
        self._space = env.observation_space
        self._leaves = leaves_of(env.observation_space)

    def reset(self, result: Any) -> None:
        """Check the result of ``reset()``."""
        where = f"{self._where}, reset()"
        obs, info = _tuple_of(result, "(observation, info)", where)
        check_observation(self._leaves, obs, where)
        _check_info(info, where)

    def step(self, result: Any) -> None:
        """Check the result of ``step()``."""
        where = f"{self._where}, step()"
        expected = "(observation, reward, terminated, truncated, info)"
        obs, reward, terminated, truncated, info = _tuple_of(result, expected, where)
        check_observation(self._leaves, obs, where)
        try:
            number = as_reward(reward, giver="it")
        except SchemaError as error:
            raise _wrong(where, f"the reward is {excerpt(reward)}: expected a number") from error
        if not np.isfinite(number):
            raise _wrong(where, f"the reward is {number}: expected a finite number")
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, (bool, np.bool_)):
                raise _wrong(where, f"{name} is {excerpt(value)}: expected True or False")
        _check_info(info, where)


class VectorCheck:
    """Checks a vector environment, whose results must have one row per environment.

    Args:
        envs: The vector environment.

    Raises:
        EnvError: Raised by the methods, with what is wrong and where.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        self._where, self._num_envs = type(envs.unwrapped).__name__, envs.num_envs
        self._leaves = leaves_of(envs.single_observation_space)

    def reset(self, result: Any) -> None:
        """Check the result of ``reset()``."""
        where = f"{self._where}, reset()"
        obs, infos = _tuple_of(result, "(observations, infos)", where)
        self._check_rows(obs, where)
        self._check_infos(infos, where)

    def step(self, result: Any) -> None:
        """Check the result of ``step()``."""
        where = f"{self._where}, step()"
        expected = "(observations, rewards, terminations, truncations, infos)"
        obs, rewards, terminateds, truncateds, infos = _tuple_of(result, expected, where)
        self._check_rows(obs, where)
        try:
            as_rewards(rewards, self._num_envs, giver=where)
        except SchemaError as error:
            raise EnvError(f"{error}; {_HINT}") from error
        for name, value in (("terminations", terminateds), ("truncations", truncateds)):
            found = in_numpy(value)
            if found.shape != (self._num_envs,):
                raise _wrong(where, f"{name} have the shape {found.shape}: expected ({self._num_envs},)")
            if found.dtype != bool:
                raise _wrong(where, f"{name} are {found.dtype}: expected bool")
        self._check_infos(infos, where)

    def _check_infos(self, infos: Any, where: str) -> None:
        # A list has an info for each environment, as gymnasium's wrapper DictInfoToList returns it.
        for info in infos if isinstance(infos, list) and len(infos) == self._num_envs else [infos]:
            _check_info(info, where)

    def _check_rows(self, obs: Any, where: str) -> None:
        for leaf in self._leaves:
            part = _part(obs, leaf, where)
            rows = part if leaf.is_object else in_numpy(part)
            if len(rows) != self._num_envs:
                raise _wrong(
                    where, f"the observations{leaf.place} have {len(rows)} rows: expected {self._num_envs}"
                )
            for env, row in enumerate(rows):
                _check_leaf(leaf, row, f"{where}, environment {env}")


def _tuple_of(result: Any, expected: str, where: str) -> tuple[Any, ...]:
    """Check that ``result`` is a tuple with as many parts as ``expected`` names."""
    if not isinstance(result, tuple) or len(result) != expected.count(",") + 1:
        raise _wrong(where, f"returned {_shape_of(result)}: expected {expected}")
    return result


def check_observation(leaves: Sequence[Leaf], obs: Any, where: str) -> None:
    """Check that ``obs`` has the shapes and bounds of a space, and its dtypes or castable ones.

    Args:
        leaves: Leaves of the space.
        obs: One observation.
        where: Source of the observation, for messages.

    Raises:
        EnvError: The observation does not fit.
    """
    for leaf in leaves:
        _check_leaf(leaf, _part(obs, leaf, where), where)


def _part(obs: Any, leaf: Leaf, where: str) -> Any:
    try:
        return leaf_of(obs, leaf.path)
    except SchemaError as error:
        raise _wrong(where, f"the observation has no value{leaf.place}: {_shape_of(obs)}") from error


def _check_leaf(leaf: Leaf, value: Any, where: str) -> None:
    what = f"{where}: the observation{leaf.place}"
    if leaf.is_object:
        if not leaf.space.contains(value):
            raise _wrong("", f"{what} is {excerpt(value)}, which is not in {leaf.space}")
        return
    try:
        cast = np.asarray(fitted(leaf, value, column=Columns.OBS, giver=where))
    except SchemaError as error:
        raise EnvError(f"{error}; {_HINT}") from error
    if not leaf.space.contains(cast if leaf.shape or not np.issubdtype(cast.dtype, np.integer) else cast[()]):
        raise _wrong("", f"{what} is {_outside(leaf, cast)}, which is not in its space {leaf.space}")


def _outside(leaf: Leaf, value: np.ndarray[Any, Any]) -> str:
    """The first number of a Box value that is out of bounds; else the value."""
    low, high = getattr(leaf.space, "low", None), getattr(leaf.space, "high", None)
    if low is None or high is None:
        return excerpt(value.tolist())
    # This form also finds NaN.
    wrong = np.argwhere(~((value >= low) & (value <= high)))
    if not len(wrong):
        return excerpt(value.tolist())
    at = tuple(int(index) for index in wrong[0])
    return f"{value[at]} at index {list(at)}" if at else f"{value}"


def _check_info(info: Any, where: str) -> None:
    if not isinstance(info, dict):
        raise _wrong(where, f"the info is {excerpt(info)}: expected a dict")


def _wrong(where: str, what: str) -> EnvError:
    return EnvError(f"{where}{': ' if where else ''}{what}; {_HINT}")


def _shape_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, dict):
        return f"a dict with the keys {excerpt(list(value))}"
    return f"{type(value).__name__} {excerpt(value)}"


def check_spaces(env: gym.Env[Any, Any], where: str) -> None:
    """Check that ``env`` has gymnasium spaces.

    Raises:
        EnvError: A space is missing or of another type.
    """
    from gymnasium import Space

    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, Space):
            raise _wrong(where, f"{name} is {excerpt(space)}: expected a gymnasium space")


def check_methods(env: gym.Env[Any, Any], where: str) -> None:
    """Check that ``env`` can be stepped with one action, and reset with a seed.

    Raises:
        EnvError: A method does not take these arguments.
    """
    for name, arguments, keywords in (("step", (None,), {}), ("reset", (), {"seed": None})):
        method = getattr(env.unwrapped, name)
        try:
            inspect.signature(method).bind(*arguments, **keywords)
        except TypeError as error:
            raise _wrong(where, f"{name}{inspect.signature(method)} cannot be called: {error}") from error
        except ValueError:
            continue  # Written in C, without a signature.
