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
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import is_tensor
from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.batch.nested import unflatten
from rlio.envs.checking import VectorCheck
from rlio.envs.leaves import Leaf, leaf_of, leaves_of
from rlio.envs.seeds import EpisodeSeeds
from rlio.envs.values import as_flags, as_reward, as_rewards, fitted, has_true, in_numpy, is_plain, on_host
from rlio.errors import EnvError, OptionError, SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.vector import AutoresetMode, VectorEnv

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
        finals: The final observation of each episode that ended, if `obs` does not hold it: (environment,
            checked copies of the leaves of the observation in the space's order).
        infos: The vector environment's infos; see `env_infos`.
        faulty: Mask of the environments that failed, shape (N,), bool; None if none did. Discard the rows of
            the running episode, or of the next one if this row is the last of an episode.
        errors: Errors of the environments that failed in this step, by index. Includes environments that
            failed again while they were recreated, which are not marked `faulty` again.
        misfits: Why rows cannot be stored, by environment. Only `VectorStepper.read` returns such a step.
        unseen: Mask of the environments whose next observation, in ``obs``, is not known, because it does not
            fit the space, shape (N,), bool; None if none.
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
    misfits: Mapping[int, SchemaError] = MappingProxyType({})
    unseen: NDArray[np.bool_] | None = None


class Stepper(ABC):
    """Steps N environments and distinguishes transitions from resets.

    Args:
        envs: The environments; `close` closes them.

    Attributes:
        envs: The vector environment, which callbacks get.
        num_envs: Number of environments.
        keeps_infos: Whether `env_infos` returns copies, which the caller keeps; set by the caller.
        keeps_reset_infos: Whether to keep the infos of resets in `reset_infos`; set by the caller.
        reset_infos: The info of each environment's last reset, if kept.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        self.envs = envs
        self.num_envs: int = envs.num_envs
        self.keeps_infos = False
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
        """The info of each environment's transition, not of the reset after it; see `keeps_infos`."""

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
        self._mode = _autoreset_mode(envs)
        self._leaves = leaves_of(envs.single_observation_space)
        self._shape = (self.num_envs, *self._leaves[0].shape)
        self._name = type(envs).__name__
        self._statistics = _keys_of_statistics(envs)
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
        return on_host(self._leaves, obs)

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
            given = _infos_on_host(infos)
            for env in envs:
                info = _info_of(given, env, self.num_envs)
                self.reset_infos[env] = {key: info[key] for key in info if key not in _OF_THE_LAST}

    def step(self, actions: Any) -> VectorStep:
        """Step all environments.

        Raises:
            SchemaError: An episode ended without the final observation that SAME_STEP promises.
            EnvError: The environments failed.
        """
        # A copy, because environments may change the actions that they get.
        result = self._called("step", own_copy(actions))
        if self._check is not None:
            self._check.step(result)
            self._check = None
        step = self.read(result)
        if step.misfits:
            raise next(iter(step.misfits.values()))
        if step.finals and self.is_reset_by_caller:
            # Copies, because the reset may overwrite what the step returned.
            step = step._replace(
                rewards=own_copy(step.rewards),
                terminateds=own_copy(step.terminateds),
                truncateds=own_copy(step.truncateds),
                infos=self.env_infos(step),
            )
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
        # A copy, because environments may change what they get.
        obs, infos = self._called("reset", seed=seeds, options={"reset_mask": ended.copy()})
        self._keep_infos(infos, np.flatnonzero(ended).tolist())
        return on_host(self._leaves, obs)

    def read(self, result: tuple[Any, Any, Any, Any, dict[str, Any]]) -> VectorStep:
        """Convert ``result``, returned by the environments' ``step``, to transitions and episodes.

        With autoreset DISABLED, ``obs`` still holds the final observations, because the caller resets.

        Raises:
            SchemaError: The flags are not one for each environment. Other values that cannot be stored are
                in ``misfits``.
        """
        obs, rewards, terminateds, truncateds, infos = result
        rows = self.num_envs
        terminateds = as_flags(terminateds, rows, column=Columns.TERMINATEDS, giver=self._name)
        truncateds = as_flags(truncateds, rows, column=Columns.TRUNCATEDS, giver=self._name)
        ended = terminateds | truncateds
        starts, valid = ended, None
        if self._next_step:
            starts, self._ended = self._ended, ended
            valid = ~starts
        misfits: dict[int, SchemaError] = {}
        obs = self._fitting(obs, misfits)
        unseen = np.isin(np.arange(rows), list(misfits)) if misfits else None
        rewards = self._numbers(rewards, misfits)
        finals: list[tuple[int, list[Any]]] = []
        if not self._next_step and has_true(ended):
            given = self._given_finals(infos) if self._same_step else None
            for env in np.flatnonzero(ended).tolist():
                try:
                    final = self._final(given, env) if self._same_step else self._row(obs, env)
                except SchemaError as error:
                    misfits.setdefault(env, error)
                else:
                    finals.append((env, final))
        return VectorStep(
            obs, rewards, terminateds, truncateds, valid, starts, finals, infos,
            misfits=misfits, unseen=unseen,
        )  # fmt: skip

    def _numbers(self, values: Any, misfits: dict[int, SchemaError]) -> NDArray[Any]:
        """The rewards; 0 for those that are none, whose errors are added to ``misfits``."""
        try:
            return as_rewards(values, self.num_envs, giver=self._name)
        except SchemaError as error:
            return self._row_by_row(
                values, error, misfits, np.zeros(self.num_envs), partial(as_reward, giver=self._name)
            )

    def _fitting(self, obs: Any, misfits: dict[int, SchemaError]) -> Any:
        """``obs`` in the dtypes of the space, on the host; zeros for rows that do not fit; see `_numbers`."""
        if is_plain(self._leaves, obs, self._shape):
            return obs
        rows, parts, same = self.num_envs, [], True
        for leaf in self._leaves:
            given: Any = None
            check = partial(self._fitted, leaf)
            try:
                given = leaf_of(obs, leaf.path)
                part = check(given, rows=rows)
            except SchemaError as error:
                # (Rows are checked again where they are recorded; only Text spaces check objects.)
                empty = np.full((rows, *leaf.shape), "" if leaf.is_object else 0, leaf.dtype)
                part = self._row_by_row(given, error, misfits, empty, check)
            same = same and part is given
            parts.append(part)
        if same:
            return obs
        paths = [leaf.path for leaf in self._leaves]
        return unflatten(paths, parts) if paths[0] else parts[0]

    def _row_by_row(
        self,
        values: Any,
        error: SchemaError,
        misfits: dict[int, SchemaError],
        made: NDArray[Any],
        check: Callable[[Any], Any],
    ) -> NDArray[Any]:
        """Fill ``made`` with the values that pass ``check``; ``error`` is that of all together."""
        try:
            each = list(values)
        except TypeError:
            each = []
        if len(each) != len(made):
            misfits |= {env: misfits.get(env, error) for env in range(len(made))}
            return made
        for env, value in enumerate(each):
            try:
                made[env] = check(value)
            except SchemaError as misfit:
                misfits.setdefault(env, misfit)
        return made

    def _row(self, obs: Any, env: int) -> list[Any]:
        """Copy one environment's observation before the reset overwrites it."""
        parts = [leaf_of(obs, leaf.path)[env] for leaf in self._leaves]
        return self._own(parts)

    def _own(self, parts: list[Any]) -> list[Any]:
        return [own_copy(self._fitted(leaf, part)) for leaf, part in zip(self._leaves, parts, strict=True)]

    def _fitted(self, leaf: Leaf, value: Any, *, rows: int | None = None) -> Any:
        """One observation's leaf, or that of ``rows`` observations; see `fitted`."""
        return fitted(leaf, value, column=Columns.OBS, giver=self._name, rows=rows)

    def _given_finals(self, infos: Any) -> Any:
        """The final observations that SAME_STEP gives, batched or one for each environment."""
        if isinstance(infos, (list, tuple)):
            return [info.get("final_obs") for info in infos]
        found = infos.get("final_obs")
        is_batched = isinstance(found, (dict, tuple)) or not isinstance(found, (np.ndarray, list, type(None)))
        return on_host(self._leaves, found) if is_batched else found

    def _final(self, finals: Any, env: int) -> list[Any]:
        is_batched = isinstance(finals, (dict, tuple))
        final = finals if is_batched or finals is None else finals[env]
        if final is None:
            raise SchemaError(
                f"{type(self.envs).__name__} ended an episode in environment {env} without "
                "infos['final_obs'], which its autoreset mode SAME_STEP promises"
            )
        parts = [leaf_of(final, leaf.path) for leaf in self._leaves]
        return self._own([part[env] for part in parts] if is_batched else parts)

    def env_infos(self, step: VectorStep) -> list[dict[str, Any]]:
        told = step.infos
        if self._same_step and isinstance(told, dict):
            # It may be large, and is no info.
            told = {key: told[key] for key in told if key not in ("final_obs", "_final_obs")}
        given = _infos_on_host(told)
        infos = [_info_of(given, env, self.num_envs) for env in range(self.num_envs)]
        if self._same_step:
            for env, _ in step.finals:
                # The other keys are of the reset, but for those that a wrapper added to the step.
                of_wrappers = {key: infos[env][key] for key in self._statistics if key in infos[env]}
                infos[env] = {**infos[env].get("final_info", {}), **of_wrappers}
        return infos


def _autoreset_mode(envs: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """The autoreset mode of ``envs``, not that of another environment of its class.

    Up to gymnasium 1.2, vector environments write their mode into the metadata of their environments' class,
    which others share. Their attribute is their own.
    """
    from gymnasium.vector import AutoresetMode

    own = getattr(envs.unwrapped, "autoreset_mode", None)
    mode = envs.metadata.get("autoreset_mode") if own is None else own
    try:
        return AutoresetMode(mode)
    except ValueError as error:
        raise OptionError(
            f"{type(envs).__name__}.metadata['autoreset_mode'] is {excerpt(mode)}: expected a member of "
            "gymnasium.vector.AutoresetMode, which distinguishes resets from transitions"
        ) from error


def _keys_of_statistics(envs: VectorEnv[Any, Any, Any]) -> list[str]:
    """The keys in which gymnasium's RecordEpisodeStatistics, around ``envs``, stores an episode's totals."""
    from gymnasium.vector import VectorWrapper
    from gymnasium.wrappers.vector import RecordEpisodeStatistics

    found = []
    while isinstance(envs, VectorWrapper):
        if isinstance(envs, RecordEpisodeStatistics):
            found.append(envs._stats_key)
        envs = envs.env
    return found


def _seeds_each(envs: VectorEnv[Any, Any, Any]) -> bool:
    """Whether ``envs`` accepts a seed for each environment."""
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    return isinstance(envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv))


def _infos_on_host(infos: Any) -> Any:
    """``infos`` with an array for each tensor: one transfer, not one for each environment."""
    if isinstance(infos, dict):
        return {key: _infos_on_host(values) for key, values in infos.items()}
    is_elsewhere = is_tensor(infos) or (hasattr(infos, "__array__") and not isinstance(infos, np.ndarray))
    return in_numpy(infos) if is_elsewhere else infos


def _info_of(infos: Any, env: int, rows: int) -> dict[str, Any]:
    """A copy of environment ``env``'s info.

    Args:
        infos: gymnasium's arrays, in which ``key`` applies where the mask ``_key`` is True; or a list with an
            info for each environment (gymnasium's wrapper DictInfoToList).
        env: Number of the environment.
        rows: Number of environments.

    Raises:
        SchemaError: A key has another number of values.
    """
    if isinstance(infos, (list, tuple)):
        info: dict[str, Any] = own_copy(infos[env])
        return info
    found: dict[str, Any] = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if key.startswith("_") and key[1:] in infos:
            continue
        if mask is not None and not mask[env]:
            continue
        if isinstance(values, dict):
            found[key] = _info_of(values, env, rows)
        elif isinstance(values, (list, tuple)) or (isinstance(values, np.ndarray) and values.ndim):
            if len(values) != rows:
                raise SchemaError(
                    f"infos[{excerpt(key)}] has {len(values)} values: expected one for each of the {rows} "
                    "environments",
                    column=Columns.INFOS,
                )
            value = values[env]
            found[key] = value.item() if isinstance(value, np.generic) else own_copy(value)
        else:
            found[key] = own_copy(values)  # One value for all environments.
    return found
