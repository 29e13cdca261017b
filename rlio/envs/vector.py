"""Stepping a vector environment: its true transitions, in every autoreset mode.

Gymnasium has three modes. With NEXT_STEP, the step after an episode's last is a reset: its action is ignored,
and its row is not a transition. With SAME_STEP, the step that ends an episode returns the first observation
of the next, and the final one in its info. With DISABLED, the caller resets. `VectorStepper` returns the same
results in all three.

Example:
    >>> import numpy as np
    >>> import gymnasium as gym
    >>> stepper = VectorStepper(gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"))
    >>> obs = stepper.reset(seed=1)
    >>> step = stepper.step(np.array([0, 1]))
    >>> step.rewards, step.valid.tolist(), step.finals
    (array([1., 1.]), [True, True], [])
    >>> stepper.close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.envs.checking import VectorCheck
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.envs.seeds import EpisodeSeeds
from rlio.errors import EnvError, OptionError, SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.vector import VectorEnv

__all__ = ["Stepper", "VectorStep", "VectorStepper"]

# Keys in the infos of SAME_STEP's automatic reset that belong to the previous episode.
_OF_THE_LAST = ("final_obs", "final_info")


class VectorStep(NamedTuple):
    """The result of one step of N environments.

    A row is a transition (`valid`), a reset with the first observation of an episode (`starts`), both (if a
    step ends an episode and begins the next), or neither. A row that is neither belongs to an environment
    that still works on an earlier action or waits to be recreated: its row of `obs` is unchanged, and the
    action sent now is not used. An action sent while the row was a transition or a start is answered in a
    later step, and is the one to record then.

    Attributes:
        obs: The policy's next observations, batched. May be the environment's own buffer, valid until the
            next step.
        rewards: Shape (N,).
        terminateds: Shape (N,), bool.
        truncateds: Shape (N,), bool.
        valid: Mask of the rows that are transitions, shape (N,), bool; None if all are.
        starts: Mask of the rows of `obs` that are the first of an episode, shape (N,), bool.
        finals: The final observation of each episode that ended, if `obs` does not hold it: (environment, the
            leaves of the observation in the space's order).
        infos: The vector environment's infos; see `env_infos`.
        faulty: Mask of the environments that failed, shape (N,), bool; None if none did. Discard the rows of
            the running episode, or of the next one if this row is the last of an episode.
        errors: Errors of the environments that failed in this step, by index. Includes environments that
            failed again while they were recreated, which are not marked `faulty` again.
    """

    obs: Any
    rewards: NDArray[Any]
    terminateds: NDArray[np.bool_]
    truncateds: NDArray[np.bool_]
    valid: NDArray[np.bool_] | None
    starts: NDArray[np.bool_]
    finals: list[tuple[int, list[Any]]]
    infos: Any
    faulty: NDArray[np.bool_] | None = None
    errors: Mapping[int, Exception] = MappingProxyType({})


class Stepper(ABC):
    """Steps N environments and distinguishes transitions from resets.

    Args:
        envs: The environments; `close` closes them.

    Attributes:
        envs: The vector environment, which callbacks get.
        num_envs: Number of environments.
        keeps_reset_infos: Whether to keep the infos of resets in `reset_infos`; set by the caller.
        reset_infos: The info of each environment's last reset, if kept.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        self.envs = envs
        self.num_envs: int = envs.num_envs
        self.keeps_reset_infos = False
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Observation space of one environment."""
        return self.envs.single_observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Action space of one environment."""
        return self.envs.single_action_space

    @property
    def has_reset_steps(self) -> bool:
        """Whether the reset after each episode takes a step of its environment, which is not a transition."""
        return False

    @property
    def failures(self) -> int:
        """Number of environment failures so far."""
        return 0

    @property
    def env_seeds(self) -> NDArray[np.int64]:
        """Seed of the reset that began each environment's running episode, (N,); -1 without a seed."""
        return np.full(self.num_envs, -1, np.int64)

    @abstractmethod
    def reset(self, *, seed: int | None = None, seeds: EpisodeSeeds | None = None) -> Any:
        """Start a new episode in every environment and return the first observations.

        Args:
            seed: Seed of the first environment; the others get the following numbers.
            seeds: Replaces ``seed``: seeds each episode of each environment from now on, as far as the
                environments accept seeds. With neither, earlier seeding continues.

        Raises:
            EnvError: An environment failed and must not be recreated, or failed too often.
        """

    @abstractmethod
    def step(self, actions: Any) -> VectorStep:
        """Step all environments that wait for an action.

        Raises:
            EnvError: An environment failed and must not be recreated, or failed too often.
        """

    @abstractmethod
    def env_infos(self, step: VectorStep) -> list[dict[str, Any]]:
        """The info of each environment's transition, not of the reset after it."""

    def render(self) -> tuple[Any, ...]:
        """A frame of each environment in its render mode; None if there is none."""
        return tuple(self.envs.render() or (None,) * self.num_envs)

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


class VectorStepper(Stepper):
    """Steps a gymnasium vector environment, in any autoreset mode. Raises its errors as `EnvError`.

    Args:
        envs: A gymnasium vector environment whose metadata state its autoreset mode.
        check: Check the first reset and the first step.

    Raises:
        OptionError: The metadata do not state the autoreset mode.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], *, check: bool = False) -> None:
        from gymnasium.vector import AutoresetMode

        super().__init__(envs)
        mode = envs.metadata.get("autoreset_mode")
        try:
            self._mode = AutoresetMode(mode)
        except ValueError as error:
            raise OptionError(
                f"{type(envs).__name__}.metadata['autoreset_mode'] is {excerpt(mode)}: expected a member of "
                "gymnasium.vector.AutoresetMode, which distinguishes resets from transitions"
            ) from error
        self._leaves = [leaf.path for leaf in leaves_of(envs.single_observation_space)]
        self._ended = np.zeros(self.num_envs, bool)
        self._next_step = self._mode is AutoresetMode.NEXT_STEP
        self._same_step = self._mode is AutoresetMode.SAME_STEP
        self._check = VectorCheck(envs) if check else None
        self._seeds: EpisodeSeeds | None = None
        self._current = super().env_seeds

    @property
    def has_reset_steps(self) -> bool:
        return self._next_step

    @property
    def is_reset_by_caller(self) -> bool:
        """Whether only `reset` begins episodes (DISABLED)."""
        return not self._next_step and not self._same_step

    def forget(self) -> None:
        """Record that the caller reset all environments."""
        self._ended = np.zeros(self.num_envs, bool)

    @property
    def env_seeds(self) -> NDArray[np.int64]:
        return self._current.copy()

    def reset(self, *, seed: int | None = None, seeds: EpisodeSeeds | None = None) -> Any:
        self._seeds = seeds if seeds is not None else None if seed is not None else self._seeds
        self._ended = np.zeros(self.num_envs, bool)
        given: Any = seed
        # (Vector environments with one generator for all accept only one number.)
        if self._seeds is not None and seed is None:
            of_each = [self._seeds.next(env) for env in range(self.num_envs)]
            given = of_each if _seeds_each(self.envs) else of_each[0]
        if isinstance(given, list):
            self._current = np.array(given, np.int64)
        else:
            self._current = np.full(self.num_envs, -1 if given is None else given, np.int64)
        result = self._called("reset", seed=given)
        if self._check is not None:
            self._check.reset(result)
        obs, infos = result
        self._keep_infos(infos, range(self.num_envs))
        return obs

    def _called(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the vector environment, turning its errors into `EnvError`."""
        try:
            return getattr(self.envs, method)(*arguments, **keywords)
        # Any exception, because environments are user code.
        except Exception as error:
            raise EnvError(
                f"{type(self.envs).__name__}.{method}() failed: {type(error).__name__}: "
                f"{excerpt(str(error), 500)}; pass a function that makes one environment to replace only "
                "those that fail (restart_failed_sub_environments=True)"
            ) from error

    def _keep_infos(self, infos: dict[str, Any], envs: Iterable[int]) -> None:
        """Keep the infos of the resets of ``envs``, if requested."""
        if self.keeps_reset_infos:
            for env in envs:
                info = _info_of(infos, env)
                self.reset_infos[env] = {key: info[key] for key in info if key not in _OF_THE_LAST}

    def step(self, actions: Any) -> VectorStep:
        """Step all environments.

        Raises:
            SchemaError: An episode ended without the final observation that SAME_STEP promises.
            EnvError: The environments failed.
        """
        result = self._called("step", actions)
        if self._check is not None:
            self._check.step(result)
            self._check = None
        step = self.read(result)
        if step.finals and self.is_reset_by_caller:
            step = step._replace(obs=self._reset_some(step.starts))
        elif self.keeps_reset_infos:
            self._keep_infos(step.infos, np.flatnonzero(step.starts).tolist())
        if self._seeds is not None and not self.is_reset_by_caller:
            self._current[step.starts] = -1
        return step

    def _reset_some(self, ended: NDArray[np.bool_]) -> Any:
        """Reset the environments that ``ended``, if the vector environment does not."""
        self._current[ended] = -1
        seeds: list[int | None] | None = None
        if self._seeds is not None and _seeds_each(self.envs):
            seeds = [self._seeds.next(env) if ended[env] else None for env in range(self.num_envs)]
            self._current[ended] = [seed for seed in seeds if seed is not None]
        obs, infos = self._called("reset", seed=seeds, options={"reset_mask": ended})
        self._keep_infos(infos, np.flatnonzero(ended).tolist())
        return obs

    def read(self, result: tuple[Any, Any, Any, Any, dict[str, Any]]) -> VectorStep:
        """Convert ``result``, returned by the environments' ``step``, to transitions and episodes.

        With autoreset DISABLED, ``obs`` still holds the final observations, because the caller resets.

        Raises:
            SchemaError: An episode ended without the final observation that SAME_STEP promises.
        """
        obs, rewards, terminateds, truncateds, infos = result
        ended = np.asarray(terminateds | truncateds)
        starts, valid = ended, None
        finals: list[tuple[int, list[Any]]] = []
        if self._next_step:
            starts, self._ended = self._ended, ended
            valid = ~starts
        elif ended.any():
            which = np.flatnonzero(ended).tolist()
            if self._same_step:
                finals = [(env, self._final(infos, env)) for env in which]
            else:
                finals = [(env, self._row(obs, env)) for env in which]
        return VectorStep(obs, rewards, terminateds, truncateds, valid, starts, finals, infos)

    def _row(self, obs: Any, env: int) -> list[Any]:
        """Copy one environment's observation before the reset overwrites it."""
        leaves = [leaf_of(obs, path)[env] for path in self._leaves]
        return [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]

    def _final(self, infos: dict[str, Any], env: int) -> list[Any]:
        final = infos.get("final_obs")
        if final is None:
            raise SchemaError(
                f"{type(self.envs).__name__} ended an episode in environment {env} without "
                "infos['final_obs'], which its autoreset mode SAME_STEP promises"
            )
        if isinstance(final, (dict, tuple)):  # batched like observations, not one object per environment
            return [leaf_of(final, path)[env] for path in self._leaves]
        return [leaf_of(final[env], path) for path in self._leaves]

    def env_infos(self, step: VectorStep) -> list[dict[str, Any]]:
        infos = [_info_of(step.infos, env) for env in range(self.num_envs)]
        if self._same_step:
            for env, _ in step.finals:
                infos[env] = infos[env].get("final_info", {})
        return infos


def _seeds_each(envs: VectorEnv[Any, Any, Any]) -> bool:
    """Whether ``envs`` accepts a seed for each environment."""
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    return isinstance(envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv))


def _info_of(infos: dict[str, Any], env: int) -> dict[str, Any]:
    """Environment ``env``'s info from gymnasium's arrays; ``key`` applies where the mask ``_key`` is True."""
    found: dict[str, Any] = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if key.startswith("_") and key[1:] in infos:
            continue
        if mask is not None and not mask[env]:
            continue
        if isinstance(values, dict):
            found[key] = _info_of(values, env)
        else:
            value = values[env]
            found[key] = value.item() if isinstance(value, np.generic) else value
    return found
