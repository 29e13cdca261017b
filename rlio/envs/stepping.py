"""Stepping a vector environment: its true transitions, whatever its autoreset mode.

Gymnasium knows three modes. With NEXT_STEP, the step after an episode's last is a reset: its action is
ignored and its row is no transition. With SAME_STEP, the step that ends an episode returns the first
observation of the next, and the final one in its info. With DISABLED, whoever steps resets. `VectorStepper`
gives the same in all three.

Example:
    >>> import numpy as np
    >>> from rlio.envs.making import make_vector_env
    >>> stepper = VectorStepper(make_vector_env("CartPole-v1", num_envs=2))
    >>> obs = stepper.reset(seed=1)
    >>> step = stepper.step(np.array([0, 1]))
    >>> step.rewards, step.valid is None, step.finals
    (array([1., 1.]), True, [])
    >>> stepper.close()
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.envs.leaves import leaf_of, leaves_of
from rlio.errors import OptionError, SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.vector import VectorEnv

__all__ = ["VectorStep", "VectorStepper"]


class VectorStep(NamedTuple):
    """What one step of N environments gave.

    A row is a transition (`valid`), a reset, which gives the first observation of an episode (`starts`), both
    (where a step ends an episode and begins the next), or neither: then its environment still works on an
    earlier action, or waits to be made anew; its row of `obs` is as it was, and the action sent to it now is
    not used. An action that was sent when the row was a transition or a start will be answered in a later
    step, and is the one to be recorded then.

    Attributes:
        obs: What the policy sees next, batched. May be the environment's own buffer, valid until it steps
            again.
        rewards: Shape (N,).
        terminateds: Shape (N,), bool.
        truncateds: Shape (N,), bool.
        valid: Which rows are transitions, shape (N,), bool; None if all are.
        starts: Which rows of `obs` are the first of an episode, shape (N,), bool.
        finals: The final observation of each episode that ended where `obs` is not it: (environment, the
            leaves of the observation in the space's order).
        infos: As the vector environment gave them; see `env_infos`.
        faulty: Where an environment failed, shape (N,), bool; None if none did. Rows of the episode that was
            running are to be discarded: of the next one, if this row is the last of an episode.
        errors: What environments failed with in this step, by index; also those that failed once more while
            they were made anew, which are not `faulty` again.
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


class VectorStepper:
    """Steps ``envs``, which it closes.

    Args:
        envs: A gymnasium vector environment whose metadata say its autoreset mode.

    Raises:
        OptionError: The metadata do not say it.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        from gymnasium.vector import AutoresetMode

        mode = envs.metadata.get("autoreset_mode")
        try:
            self._mode = AutoresetMode(mode)
        except ValueError as error:
            raise OptionError(
                f"{type(envs).__name__}.metadata['autoreset_mode'] is {excerpt(mode)}: it must be one of "
                "gymnasium.vector.AutoresetMode, or resets could not be told from transitions"
            ) from error
        self.envs = envs
        self.num_envs = envs.num_envs
        self._leaves = [leaf.path for leaf in leaves_of(envs.single_observation_space)]
        self._ended = np.zeros(self.num_envs, bool)
        self._next_step = self._mode is AutoresetMode.NEXT_STEP
        self._same_step = self._mode is AutoresetMode.SAME_STEP

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Of one environment."""
        return self.envs.single_observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Of one environment."""
        return self.envs.single_action_space

    @property
    def has_reset_steps(self) -> bool:
        """Whether some steps of some environments are resets, and no transitions."""
        return self._next_step

    @property
    def is_reset_by_caller(self) -> bool:
        """Whether nothing begins an episode but `reset` (DISABLED)."""
        return not self._next_step and not self._same_step

    def forget(self) -> None:
        """All environments were reset by somebody else."""
        self._ended = np.zeros(self.num_envs, bool)

    def reset(self, *, seed: int | None = None) -> Any:
        """Start a new episode in every environment and return the first observations.

        Args:
            seed: Of the first environment; the others' follow it, one by one. (Vector environments with one
                generator for all take one number only.) None goes on with the environments' own generators.
        """
        self._ended = np.zeros(self.num_envs, bool)
        obs, _ = self.envs.reset(seed=seed)
        return obs

    def step(self, actions: Any) -> VectorStep:
        """Step all environments.

        Raises:
            SchemaError: An episode ended without the final observation that SAME_STEP promises.
        """
        step = self.read(self.envs.step(actions))
        if step.finals and self.is_reset_by_caller:
            obs, _ = self.envs.reset(options={"reset_mask": step.starts})
            step = step._replace(obs=obs)
        return step

    def read(self, result: tuple[Any, Any, Any, Any, dict[str, Any]]) -> VectorStep:
        """What ``result``, which the environments' ``step`` gave, says of transitions and episodes.

        With autoreset DISABLED, ``obs`` are the final ones still: whoever steps resets.

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
        """A copy of one environment's observation, which the reset is about to overwrite."""
        leaves = [leaf_of(obs, path)[env] for path in self._leaves]
        return [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]

    def _final(self, infos: dict[str, Any], env: int) -> list[Any]:
        final = infos.get("final_obs")
        if final is None:
            raise SchemaError(
                f"{type(self.envs).__name__} ended an episode in environment {env} without "
                "infos['final_obs'], which its autoreset mode SAME_STEP promises"
            )
        if isinstance(
            final, (dict, tuple)
        ):  # batched as observations are, not an object for each environment
            return [leaf_of(final, path)[env] for path in self._leaves]
        return [leaf_of(final[env], path) for path in self._leaves]

    def env_infos(self, step: VectorStep) -> list[dict[str, Any]]:
        """The info of each environment that belongs to the transition, not to the reset after it."""
        infos = [_info_of(step.infos, env) for env in range(self.num_envs)]
        if self._same_step:
            for env, _ in step.finals:
                infos[env] = infos[env].get("final_info", {})
        return infos

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


def _info_of(infos: dict[str, Any], env: int) -> dict[str, Any]:
    """Environment ``env``'s info out of gymnasium's arrays; ``key`` counts where the mask ``_key`` does."""
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
