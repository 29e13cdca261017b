"""`SubEnvStepper`: base class of steppers of N single environments.

The `VectorStep` of a step is filled environment by environment, as answers arrive.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.envs.observation_buffer import ObservationBuffer
from rlio.envs.restarts import Restarts
from rlio.envs.seeds import EpisodeSeeds
from rlio.envs.vector import Stepper, VectorStep

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

__all__ = ["SubEnvStepper"]


class SubEnvStepper(Stepper):
    """Steps the environments of ``envs`` one by one; each has its own episodes.

    Args:
        envs: Holds the environments.
        max_restarts: See `Restarts`.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        *,
        max_restarts: int | None = None,
    ) -> None:
        super().__init__(envs)
        self._restarts = Restarts(max_restarts, num_envs=self.num_envs)
        self._buffer = ObservationBuffer(self.observation_space, num_envs=self.num_envs)
        #: Failures since the last step that no step has reported: those in `reset`.
        self._untold: dict[int, Exception] = {}
        self._new_outcome()
        self._seeds: EpisodeSeeds | None = None
        self._steps = np.zeros(self.num_envs, np.int64)
        #: Called with the index of each recreated environment.
        self.on_recreated: Callable[[int], object] = lambda env: None

    @property
    def failures(self) -> int:
        """Number of environment failures so far, in steps, resets and restarts."""
        return self._restarts.count

    @property
    def env_seeds(self) -> NDArray[np.int64]:
        if self._seeds is None:
            return super().env_seeds
        return np.array([-1 if seed is None else seed for seed in self._seeds.current], np.int64)

    def reset(self, *, seed: int | None = None, seeds: EpisodeSeeds | None = None) -> Any:
        """Start a new episode in every environment and return the first observations.

        Waits for environments that are being recreated.

        Args:
            seed: Seed of the first environment; the others get the following numbers. Later episodes use the
                environments' own generators.
            seeds: Replaces ``seed``: seeds each episode of each environment from now on. With neither,
                earlier seeds continue; without earlier ones, the environments seed themselves.

        Raises:
            EnvError: An environment failed and must not be recreated, or failed too often.
        """
        if seeds is not None or seed is not None:
            self._seeds = seeds
        self._reset_all(seed)
        return self._buffer.value

    @abstractmethod
    def _reset_all(self, seed: int | None) -> None:
        """Bring every environment to the first observation of a new episode."""

    def env_infos(self, step: VectorStep) -> list[dict[str, Any]]:
        infos: list[dict[str, Any]] = step.infos
        return infos

    # ---- failures ----

    def _next_seed(self, env: int) -> int | None:
        """Seed of the next reset of ``env``."""
        return None if self._seeds is None else self._seeds.next(env)

    def _note(self, env: int, error: Exception, *, where: str, episode: bool) -> None:
        """Record a failure.

        Raises:
            EnvError: The environment must not be recreated.
        """
        self._errors[env] = error
        if episode:
            self._faulty.add(env)
        self._restarts.failed(
            env,
            error,
            where=where,
            episode=None if self._seeds is None else self._seeds.episodes[env] - 1,
            seed=None if self._seeds is None else self._seeds.current[env],
        )

    def _new_outcome(self, *, idle: bool = False) -> VectorStep:
        """Begin a step. ``idle``: no row is a transition until it is filled; else each row is one."""
        rows = self.num_envs
        #: Environments whose rows are not transitions, and those that lost an episode.
        self._skipped: set[int] = set(range(rows)) if idle else set()
        self._faulty: set[int] = set()
        self._errors, self._untold = self._untold, {}
        # (Not the rows of one array: to make those costs more.)
        terminateds, truncateds, starts = np.zeros(rows, bool), np.zeros(rows, bool), np.zeros(rows, bool)
        self._outcome = VectorStep(
            self._buffer.value, np.zeros(rows), terminateds, truncateds, None, starts, [], [{}] * rows
        )
        return self._outcome

    def _filled(self) -> VectorStep:
        """Return the step that was begun."""
        step = self._outcome
        if self._skipped:
            step = step._replace(valid=~self._mask(self._skipped))
        if self._faulty:
            step = step._replace(faulty=self._mask(self._faulty))
        step.finals.sort(key=itemgetter(0))  # Processes answer in any order.
        return step._replace(errors=self._errors) if self._errors else step

    def _mask(self, envs: set[int]) -> NDArray[np.bool_]:
        return np.isin(np.arange(self.num_envs), list(envs))
