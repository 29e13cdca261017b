"""`EnvServer`: makes and resets one environment, and steps it on request for a stepper in another process.

Example:
    >>> import gymnasium as gym
    >>> server = EnvServer(0, lambda index, recreated: gym.make("CartPole-v1"))
    >>> traits, error = server.answer("make", (False,))
    >>> traits.fn.action_space
    Discrete(2)
    >>> (obs, info), error = server.answer("reset", (7, False))
    >>> obs.shape, info, error
    ((4,), None, None)
    >>> server.answer("fly", ())
    (None, AttributeError("'EnvServer' object has no attribute 'fly'"))
    >>> server.close()
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

from gymnasium.vector.utils import CloudpickleWrapper

from rlio.envs.checking import EnvCheck
from rlio.envs.observation_buffer import ObservationBuffer
from rlio.errors import SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["Answer", "EnvServer", "EnvTraits", "Transition"]

logger = logging.getLogger("rlio")

#: What was asked for, or the error that it failed with.
Answer = tuple[Any, Exception | None]


class Transition(NamedTuple):
    """What a step in another process gave; the observation after it comes beside it.

    Attributes:
        reward: Of the step.
        terminated: Whether it ended the episode.
        truncated: Whether it cut it.
        info: Of the step, not of the reset after it.
        final: The leaves of the final observation, where the step ended the episode; else None.
        error: What the reset after it failed with.
        reset_info: What came with that reset, if it was asked for.
    """

    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    final: list[Any] | None
    error: Exception | None
    reset_info: dict[str, Any] | None = None


class EnvTraits(NamedTuple):
    """What an environment is, as far as those must know who do not have it."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any

    @classmethod
    def of(cls, env: gym.Env[Any, Any]) -> EnvTraits:
        """Those of ``env``."""
        return cls(env.observation_space, env.action_space, env.metadata, env.render_mode, env.spec)

    @property
    def spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Of observations and actions."""
        return self.observation_space, self.action_space


class EnvServer:
    """Serves environment ``index``, one request after the other.

    Args:
        index: Which environment.
        make: Makes it, given its index and whether it takes the place of one that failed.
        spaces: What its observations and actions must be; None: what they are the first time.
        buffer: Where its observations go, in row ``index``; None: each comes with its answer.
        check: Whether to check its first reset and step.

    Attributes:
        env: The environment; None before it is made.
    """

    def __init__(
        self,
        index: int,
        make: Callable[[int, bool], Any],
        *,
        spaces: tuple[Any, Any] | None = None,
        buffer: ObservationBuffer | None = None,
        check: bool = False,
    ) -> None:
        self._index, self._make, self._spaces, self._check = index, make, spaces, check
        self._is_shared = buffer is not None
        self._row = index if buffer is not None else 0
        self._shared = buffer
        self.env: Any = None
        self._checking: EnvCheck | None = None

    def answer(self, command: str, arguments: tuple[Any, ...]) -> Answer:
        """Call the method that is named, and give what it returned, or the error that it raised."""
        try:
            return getattr(self, command)(*arguments), None
        # Whatever it is, it is raised there.
        except Exception as error:
            return None, portable(error)

    def pid(self) -> int:
        """The id of the process that this is."""
        return os.getpid()

    def close(self) -> None:
        """Close the environment, if it was made."""
        env, self.env = self.env, None
        if env is not None:
            env.close()

    def make(self, recreated: bool) -> CloudpickleWrapper:
        """Make it, in place of the one that is there; returns its `EnvTraits`, wrapped for cloudpickle.

        Raises:
            SchemaError: It has other spaces than the first one.
            Exception: What making it raised.
        """
        try:
            self.close()
        except Exception as error:
            # It failed before, which was told; what counts is the one in its place.
            logger.warning(
                "environment %s, which failed, cannot be closed: %s", self._index, excerpt(str(error))
            )
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
        traits: Any = EnvTraits.of(env)  # Any: gymnasium's wrapper is annotated for functions.
        return CloudpickleWrapper(traits)

    def reset(self, seed: int | None, keeps_info: bool) -> tuple[Any, dict[str, Any] | None]:
        """Reset it.

        Returns:
            Its observation, None if that lies in ``buffer``; and the info if that is wanted, else None.
        """
        result = self.env.reset(seed=seed)
        if self._checking is not None:
            self._checking.reset(result)
        obs, info = result
        return self._shown(obs), info if keeps_info else None

    def check_step(self, result: Any) -> None:
        """Check what its first step gave; later ones are not looked at.

        Raises:
            EnvError: It is no legal step.
        """
        if self._checking is not None:
            self._checking.step(result)
            self._checking = None

    def make_anew(self, seed: int | None, keeps_info: bool) -> tuple[Any, dict[str, Any] | None]:
        """`make` another one in its place, and `reset` it."""
        self.make(True)
        return self.reset(seed, keeps_info)

    def step(self, action: Any, next_reset: tuple[int | None, bool]) -> tuple[Transition, Any]:
        """Step it; where that ends the episode, reset it with ``next_reset``, the arguments of `reset`."""
        result = self.env.step(action)
        self.check_step(result)
        obs, reward, terminated, truncated, info = result
        # float: what is no number fails here, where it belongs.
        reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
        if not (terminated or truncated):
            return Transition(reward, terminated, truncated, info, None, None), self._shown(obs)
        final = self._buffer.leaves_of(obs)
        shown, failed, reset_info = None, None, None
        try:
            shown, reset_info = self.reset(*next_reset)
        except Exception as error:
            failed = portable(error)
        return Transition(reward, terminated, truncated, info, final, failed, reset_info), shown

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of it, or get an attribute."""
        found = self.env.render if name == "render" else self.env.get_wrapper_attr(name)
        return found(*args, **kwargs) if callable(found) else found

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute of it."""
        self.env.set_wrapper_attr(name, value)

    @property
    def _buffer(self) -> ObservationBuffer:
        """The shared one; or one for a single row, for its checks of what is written."""
        if self._shared is None:
            assert self._spaces is not None, "make comes first"
            self._shared = ObservationBuffer(self._spaces[0], num_envs=1)
        return self._shared

    def _shown(self, obs: Any) -> Any:
        self._buffer.write(self._row, obs)
        return None if self._is_shared else obs


def other_spaces(index: int, found: tuple[Any, Any], expected: tuple[Any, Any]) -> SchemaError:
    """Environment ``index`` does not have the ``expected`` spaces."""
    return SchemaError(
        f"environment {index} has other spaces, {found[0]} and {found[1]}, than the first one, "
        f"{expected[0]} and {expected[1]}"
    )


def portable(error: Exception) -> Exception:
    """``error``, or what can be said of it where it does not come through a pipe."""
    try:
        # As the pipe does it: whether the other end would get the error, and no error of its own.
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # The environment's own error class may raise anything in __reduce__ or __init__.
        return RuntimeError(f"{type(error).__name__}: {excerpt(str(error), 500)}")
    return error
