"""`VectorRows`: the steps of a vector environment since the last write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.envs.values import fitted, has_true, is_plain
from rlio.envs.vector import VectorStep
from rlio.errors import SchemaError
from rlio.recording.recorder import MOST_ROWS, check_object
from rlio.sampling.recorder import StepRecorder
from rlio.sampling.row_store import nested
from rlio.support.clock import utc_ms

__all__ = ["VectorRows"]


class VectorRows:
    """The steps of a vector environment since the last write.

    Args:
        envs: The vector environment; only its spaces and its size are used.
        infos: Whether to record infos.
        seeds: Whether to record the seeds of episodes.
        seed: Seed of the episode ids; None draws one from the OS.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], *, infos: bool, seeds: bool, seed: int | None) -> None:
        self._envs = envs.num_envs
        self._steps = StepRecorder(
            envs.single_observation_space,
            envs.single_action_space,
            num_envs=self._envs,
            capacity=-(-MOST_ROWS // self._envs),
            infos=infos,
        )
        self._action_leaves = leaves_of(envs.single_action_space)
        self._action_shape = (self._envs, *self._action_leaves[0].shape)
        self._bits = np.random.default_rng(seed).bit_generator
        self._eps_id = np.zeros(self._envs, np.int64)
        self._t = np.zeros(self._envs, np.int64)
        self._env_seed = np.full(self._envs, -1, np.int64) if seeds else None
        #: When the episodes of the rows, and the running ones, began.
        self._starts: dict[int | str, int] = {}
        #: Environments whose current observation is unknown, because it did not fit; None: none.
        self._unseen: NDArray[np.bool_] | None = None
        #: Rows that were taken from the recorder but not written.
        self._taken: SampleBatch | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return self._steps.rows + (0 if self._taken is None else len(self._taken))

    @property
    def full(self) -> bool:
        """Whether the buffer has no room for another step."""
        return self._steps.is_full

    def start(self, obs: Any, which: NDArray[np.bool_], seed: int | Sequence[int | None] | None) -> None:
        """Begin episodes in some environments.

        Raises:
            SchemaError: An observation does not fit the space.
        """
        self._steps.restart(obs, which)
        if self._unseen is not None:
            self._unseen &= ~which
        self._begin(which)
        if self._env_seed is not None and seed is not None:
            # One number is the first environment's seed; the others get the numbers after it.
            of_each = [seed + env for env in range(self._envs)] if isinstance(seed, int) else seed
            given = np.array([-1 if one is None else one for one in of_each], np.int64)
            self._env_seed[which] = given[which]

    def _begin(self, which: NDArray[np.bool_]) -> None:
        if self._env_seed is not None:
            self._env_seed[which] = -1
        self._t[which] = 0
        # The numbers that `Generator.integers(1 << 63)` draws, in less time.
        ids = self._bits.random_raw(np.count_nonzero(which)) >> 1
        self._eps_id[which] = ids
        self._starts.update(dict.fromkeys(ids.tolist(), utc_ms()))

    def checked(self, actions: Any, extras: Mapping[str, Any]) -> Any:
        """Copies of the actions of a step to come, because environments may change what they get.

        Raises:
            SchemaError: They do not fit the space, or ``extras`` differ from those of earlier steps.
        """
        if extras or self._steps.has_extras:
            self._steps.check_extras(extras)
        if is_plain(self._action_leaves, actions, self._action_shape):
            return actions.copy()
        parts = []
        for leaf in self._action_leaves:
            part = leaf_of(actions, leaf.path)
            part = fitted(leaf, part, column=Columns.ACTIONS, giver="the loop", rows=self._envs)
            for value in part if leaf.is_object else ():
                check_object(leaf, value, Columns.ACTIONS)
            parts.append(own_copy(part))
        return nested(self._action_leaves, parts)

    def add(
        self,
        step: VectorStep,
        actions: Any,
        extras: Mapping[str, Any],
        infos: list[dict[str, Any]] | None,
        misfits: Mapping[int, SchemaError],
    ) -> None:
        """Record a step of all environments, except for the rows that cannot be stored.

        Args:
            step: The step.
            actions: Result of `checked`.
            extras: Further columns, which are kept.
            infos: The infos, which are kept; None: not recorded.
            misfits: Why rows cannot be stored, by environment.

        Raises:
            SchemaError: Rows cannot be stored, but for those without a transition; the others are recorded.
        """
        scalars = {Columns.EPS_ID: self._eps_id, Columns.T: self._t}
        if self._env_seed is not None:
            scalars[Columns.ENV_SEED] = self._env_seed
        lost = self._lost(step, misfits)
        stored = step
        if lost:
            valid = np.ones(self._envs, bool) if step.valid is None else step.valid.copy()
            valid[lost] = False
            stored = step._replace(valid=valid)
        self._steps.add(stored, actions=actions, extras=extras, scalars=scalars, infos=infos, checked=True)
        self._unseen = step.unseen
        ended = step.terminateds | step.truncateds
        if step.valid is None:
            self._t += 1
        else:
            self._t += step.valid
            ended &= step.valid
        if has_true(ended):
            self._begin(ended)
        if lost:
            raise _not_stored(lost, misfits)

    def _lost(self, step: VectorStep, misfits: Mapping[int, SchemaError]) -> list[int]:
        """The environments whose transition cannot be stored."""
        if not misfits and self._unseen is None:
            return []
        lost = np.isin(np.arange(self._envs), list(misfits))
        if self._unseen is not None:
            lost |= self._unseen
        if step.valid is not None:
            lost &= step.valid
        found: list[int] = np.flatnonzero(lost).tolist()
        return found

    def batch(self) -> SampleBatch:
        """The rows, environment by environment; they stay here until `written` is called."""
        if self._taken is None:
            columns, counts = self._steps.take()
            columns[Columns.ENV_ID] = np.repeat(np.arange(self._envs), counts)
            self._taken = SampleBatch(columns, episode_starts=self._starts)
            running = set(self._eps_id.tolist())
            self._starts = {eps_id: start for eps_id, start in self._starts.items() if eps_id in running}
        return self._taken

    def written(self) -> None:
        """Drop the rows of the last `batch`."""
        self._taken = None


def _not_stored(envs: list[int], misfits: Mapping[int, SchemaError]) -> SchemaError:
    error = misfits.get(envs[0])
    reason = "the observation before this step could not be stored" if error is None else str(error)
    made = SchemaError(f"this step is not recorded in environment {', '.join(map(str, envs))}: {reason}")
    made.__cause__ = error
    return made
