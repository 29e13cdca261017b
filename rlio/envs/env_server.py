"""`EnvServer`: makes, resets and steps one environment on request of a stepper in another process.

Example:
    >>> import gymnasium as gym
    >>> server = EnvServer(0, lambda index, recreated: gym.make("CartPole-v1"))
    >>> traits, error = server.answer("make", (False,))
    >>> traits.fn.action_space
    Discrete(2)
    >>> (made, obs, info), error = server.answer("reset", (7, False))
    >>> made, obs.shape, info, error
    (None, (4,), None, None)
    >>> server.answer("fly", ())
    (None, AttributeError("'EnvServer' object has no attribute 'fly'"))
    >>> server.close()
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

from gymnasium.vector.utils import CloudpickleWrapper

from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.envs.checking import EnvCheck
from rlio.envs.leaves import leaves_of
from rlio.envs.values import as_flag, as_reward, own_leaves
from rlio.errors import SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["Answer", "EnvServer", "EnvTraits", "Transition"]

logger: logging.Logger = logging.getLogger("rlio")

_GIVER = "the environment"

#: The result, or the error of the request.
Answer = tuple[Any, Exception | None]


class Transition(NamedTuple):
    """The result of a step in another process; the next observation is sent separately.

    Attributes:
        reward: Reward of the step.
        terminated: Whether the step terminated the episode.
        truncated: Whether the step truncated the episode.
        info: Info of the step, not of the reset after it.
        final: The leaves of the final observation, if the step ended the episode; else None.
        error: The error of the reset after it.
    """

    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    final: list[Any] | None
    error: Exception | None


#: The transition; the next observation; and the info of the reset that gave it, if requested. None: no such.
Begun = tuple[Transition | None, Any, dict[str, Any] | None]


class EnvTraits(NamedTuple):
    """The properties of an environment that other processes need."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any

    @property
    def spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Observation space and action space."""
        return self.observation_space, self.action_space


class EnvServer:
    """Serves environment ``index``, one request at a time.

    Args:
        index: Index of the environment.
        make: Makes the environment from its index and whether it replaces a failed one.
        spaces: The expected observation and action spaces; None takes those of the first environment.
        check: Whether to check the first reset and step.

    Attributes:
        env: The environment; None before it is made.
    """

    def __init__(
        self,
        index: int,
        make: Callable[[int, bool], Any],
        *,
        spaces: tuple[Any, Any] | None = None,
        check: bool = False,
    ) -> None:
        self._index, self._make, self._spaces, self._check = index, make, spaces, check
        self.env: Any = None
        self._checking: EnvCheck | None = None

    def answer(self, command: str, arguments: tuple[Any, ...]) -> Answer:
        """Call the named method, and return its result or its error."""
        try:
            return getattr(self, command)(*arguments), None
        # The requesting process raises any error.
        except Exception as error:
            return None, portable(error)

    def close(self) -> None:
        """Close the environment, if it was made."""
        env, self.env = self.env, None
        if env is not None:
            env.close()

    def make(self, recreated: bool) -> CloudpickleWrapper:
        """Make the environment, replacing any existing one; returns its `EnvTraits`, wrapped for cloudpickle.

        Raises:
            SchemaError: The environment's spaces differ from those of the first one.
            Exception: The error raised while making the environment.
        """
        try:
            self.close()
        except Exception as error:
            # Its earlier failure was reported already; only its replacement matters.
            logger.warning("failed environment %s cannot be closed: %s", self._index, excerpt(str(error)))
        env = self._make(self._index, recreated)
        spaces = env.observation_space, env.action_space
        if self._spaces is None:
            self._spaces = spaces
        if spaces != self._spaces:
            env.close()
            raise other_spaces(self._index, spaces, self._spaces)
        if self._check:
            self._checking = EnvCheck(env, f"environment {self._index}")
            self._check = False
        self.env = env
        traits: Any = EnvTraits(
            *spaces, env.metadata, env.render_mode, env.spec
        )  # Any: gymnasium's wrapper is annotated for functions.
        return CloudpickleWrapper(traits)

    def reset(self, seed: int | None, keeps_info: bool) -> Begun:
        """Reset the environment."""
        result = self.env.reset(seed=seed)
        if self._checking is not None:
            self._checking.reset(result)
        obs, info = result
        return None, obs, info if keeps_info else None

    def check_step(self, result: Any) -> None:
        """Check the result of the first step; does not check later ones.

        Raises:
            EnvError: The result is not a valid step.
        """
        if self._checking is not None:
            self._checking.step(result)
            self._checking = None

    def recreate(self, seed: int | None, keeps_info: bool) -> Begun:
        """Make another environment in its place, and reset it."""
        self.make(True)
        return self.reset(seed, keeps_info)

    def step(self, action: Any, next_reset: tuple[int | None, bool]) -> Begun:
        """Step the environment; if that ends the episode, `reset` it with the arguments ``next_reset``."""
        result = self.env.step(action)
        self.check_step(result)
        obs, reward, terminated, truncated, info = result
        reward = as_reward(reward, giver=_GIVER)
        terminated = as_flag(terminated, column=Columns.TERMINATEDS, giver=_GIVER)
        truncated = as_flag(truncated, column=Columns.TRUNCATEDS, giver=_GIVER)
        if not (terminated or truncated):
            return Transition(reward, terminated, truncated, info, None, None), obs, None
        assert self._spaces is not None, "make comes first"
        # Copies, because the reset may overwrite what the step returned.
        final = own_leaves(leaves_of(self._spaces[0]), obs, giver=_GIVER)
        info = own_copy(info)
        failed, obs, reset_info = None, None, None
        try:
            _, obs, reset_info = self.reset(*next_reset)
        except Exception as error:
            failed = portable(error)
        return Transition(reward, terminated, truncated, info, final, failed), obs, reset_info

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the environment, or get an attribute."""
        found = self.env.render if name == "render" else self.env.get_wrapper_attr(name)
        return found(*args, **kwargs) if callable(found) else found

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute of the environment."""
        self.env.set_wrapper_attr(name, value)


def other_spaces(index: int, found: tuple[Any, Any], expected: tuple[Any, Any]) -> SchemaError:
    """The error for environment ``index`` without the ``expected`` spaces."""
    return SchemaError(
        f"environment {index} has the spaces {found[0]} and {found[1]}, but the first one has {expected[0]} "
        f"and {expected[1]}: expected equal spaces"
    )


def portable(error: Exception) -> Exception:
    """Return ``error``, or a RuntimeError with its text if it cannot be sent through a pipe."""
    try:
        # Pickle as the pipe does, to see whether the other end gets the error and not one of pickling.
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # The environment's own error class may raise anything in __reduce__ or __init__.
        return RuntimeError(f"{type(error).__name__}: {excerpt(str(error), 500)}")
    return error
