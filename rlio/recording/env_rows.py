"""`EnvRows`: the steps of one environment since the last write, as preallocated columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlio.batch import Column, SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.envs.values import MOST_REWARD, as_reward, fitted
from rlio.errors import SchemaError, excerpt
from rlio.recording.recorder import ENV, MOST_ROWS, as_extra, check_object, stored_info
from rlio.sampling.row_store import nested
from rlio.support.clock import utc_ms

__all__ = ["EnvRows"]

_INT64: Final = 1 << 63

#: Rows of an episode with consecutive steps: the first row and its step; the episode's id, seed (-1: none)
#: and start, in milliseconds since 1970-01-01 UTC. A plain tuple, because each `reset` makes one.
_Run: TypeAlias = tuple[int, int, int, int, int]


class _Buffer:
    """One value of a space for each step, nested or not."""

    def __init__(self, column: str, space: gym.Space[Any], rows: int, *, giver: str) -> None:
        self._column, self._giver = column, giver
        self._leaves = leaves_of(space)
        self._arrays = [np.zeros((rows, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        #: Values that were kept; arrays as those of the rows, once there is one.
        self._kept: list[NDArray[Any]] = []
        first = self._leaves[0]
        #: The array of a space that is a single array: assigned to without a loop.
        self._plain = None if first.path or first.is_object else self._arrays[0]
        self._dtype, self._shape = first.dtype, first.shape
        #: Whether a Python int is a value, such as a Discrete action.
        self._takes_int = self._plain is not None and first.dtype == np.int64 and not first.shape

    def put(self, at: int, value: Any) -> None:
        """Copy a value into row ``at``.

        Raises:
            SchemaError: The value does not fit the space; see `rlio.envs.values.fitted`.
        """
        plain = self._plain
        if plain is not None:
            kind = type(value)
            # (`is`: NumPy has one object for each builtin dtype. Other dtypes take the slower path.)
            if kind is np.ndarray and value.dtype is self._dtype and value.shape == self._shape:
                plain[at] = value
                return
            if self._takes_int and (kind is np.int64 or (kind is int and -_INT64 <= value < _INT64)):
                plain[at] = value
                return
        for leaf, array in zip(self._leaves, self._arrays, strict=True):
            part = fitted(leaf, leaf_of(value, leaf.path), column=self._column, giver=self._giver)
            if leaf.is_object:
                check_object(leaf, part, self._column)
                part = own_copy(part)
            array[at] = part

    def keep(self, at: int, number: int) -> None:
        """Keep row ``at`` as the kept value ``number``."""
        if not self._kept:
            self._kept = [np.zeros(array.shape, array.dtype) for array in self._arrays]
        for array, kept in zip(self._arrays, self._kept, strict=True):
            kept[number] = array[at]

    def move(self, at: int, to: int) -> None:
        """Copy row ``at`` to row ``to``."""
        for array in self._arrays:
            array[to] = array[at]

    def columns(self, first: int, rows: int, replaced: Sequence[int] = ()) -> Column:
        """Some rows, nested like the space: views, or copies if kept values replace the rows ``replaced``."""
        parts = [array[first : first + rows] for array in self._arrays]
        if replaced:
            parts = [part.copy() for part in parts]
            for part, kept in zip(parts, self._kept, strict=True):
                part[replaced] = kept[: len(replaced)]
        made: Column = nested(self._leaves, parts)
        return made


class EnvRows:
    """The steps of one environment since the last write.

    Args:
        env: The environment; only its spaces are used.
        infos: Whether to record infos.
        seeds: Whether to record the seeds of episodes.

    Attributes:
        count: Number of rows.
        actions: The actions, of which row ``count`` is that of the next step.
        extras: The extra columns.
    """

    def __init__(self, env: gym.Env[Any, Any], *, infos: bool, seeds: bool) -> None:
        # One more row: the observation after step n is the one before step n + 1.
        self._obs = _Buffer(Columns.OBS, env.observation_space, MOST_ROWS + 1, giver=ENV)
        self.actions: _Buffer = _Buffer(Columns.ACTIONS, env.action_space, MOST_ROWS, giver="the loop")
        # float32, as EnvRunner records rewards: learners compute in float32.
        self._rewards = np.zeros(MOST_ROWS, np.float32)
        self._terminateds = np.zeros(MOST_ROWS, bool)
        self._truncateds = np.zeros(MOST_ROWS, bool)
        self._infos: list[dict[str, Any]] | None = [] if infos else None
        self._seeds = seeds
        #: Columns that the user passes to `RecordExperience.record`; known from the first step on.
        self.extras: dict[str, NDArray[Any]] = {}
        self._begun = False
        self.count: int = 0
        #: The runs of the rows, in order; the next row belongs to the last one.
        self._runs: list[_Run] = []
        #: Last rows of episodes, and rows before a gap. The observations after them were kept: the next row
        #: begins with another observation.
        self._finals: list[int] = []
        #: Whether the observation before the next step is unknown, because it did not fit.
        self._unseen = False

    @property
    def full(self) -> bool:
        """Whether the buffer has no room for another step."""
        return self.count == MOST_ROWS

    def start(self, obs: Any, eps_id: int, seed: int | None) -> None:
        """Begin an episode.

        Raises:
            SchemaError: The observation does not fit the space.
        """
        self._keep_final()
        self._obs.put(self.count, obs)
        self._begin((self.count, 0, eps_id, -1 if seed is None else seed, utc_ms()))
        self._unseen = False

    def _begin(self, run: _Run) -> None:
        runs = self._runs
        if runs and runs[-1][0] == run[0]:  # It has no rows.
            runs.pop()
        runs.append(run)

    def _keep_final(self) -> None:
        """Keep the observation after the last row, because the next row begins with another one."""
        at = self.count
        # Only once: a later observation that did not fit may have overwritten part of that row.
        if at and not (self._finals and self._finals[-1] == at - 1):
            self._obs.keep(at, len(self._finals))
            self._finals.append(at - 1)

    def act(self, action: Any, extras: dict[str, Any]) -> None:
        """Store the action of the next step, and extra columns, before the environment can change them.

        Without extra columns, ``actions.put(count, action)`` is enough. Empties ``extras``.

        Raises:
            SchemaError: One of them does not fit.
        """
        try:
            self.actions.put(self.count, action)
            if extras or self.extras:
                self._add_extras(extras)
        finally:
            extras.clear()

    def add(self, obs: Any, reward: Any, terminated: bool, truncated: bool, info: Any) -> None:
        """Record the result of the step whose action `act` stored.

        Raises:
            SchemaError: A value cannot be stored. The step is not recorded; ``t`` counts it.
        """
        at = self.count
        try:
            self._obs.put(at + 1, obs)
        except BaseException:
            self._unseen = True
            self._pass_over()
            raise
        try:
            if self._unseen:
                self._unseen = False
                raise SchemaError(
                    "this step is not recorded, because the observation before it could not be stored",
                    column=Columns.OBS,
                )
            usual = type(reward) is float and -MOST_REWARD <= reward <= MOST_REWARD
            self._rewards[at] = reward if usual else as_reward(reward, giver=ENV)
            if self._infos is not None:
                self._infos.append(stored_info(info))
        except BaseException:
            self._pass_over()
            self._keep_final()
            self._obs.move(at + 1, at)
            raise
        self._terminateds[at] = terminated
        self._truncateds[at] = truncated
        self.count = at + 1
        self._begun = True

    def _pass_over(self) -> None:
        """Count a step that is not recorded: the next row has the step after it."""
        row, t, eps_id, seed, began = self._runs[-1]
        self._begin((self.count, t + self.count - row + 1, eps_id, seed, began))

    def _add_extras(self, extras: dict[str, Any]) -> None:
        """Store extra columns of the next step; every step must have the same ones.

        Raises:
            SchemaError: The columns differ from those of earlier steps.
        """
        if not self._begun:
            found = {name: as_extra(name, value) for name, value in extras.items()}
            self.extras = {
                name: np.zeros((MOST_ROWS, *value.shape), value.dtype) for name, value in found.items()
            }
        known = self.extras
        if extras.keys() != known.keys():
            raise SchemaError(
                f"record() was given {excerpt(sorted(extras))} for this step, and {excerpt(sorted(known))} "
                "before: every step has the same columns, from the first one on"
            )
        for name, value in extras.items():
            buffer = known[name]
            if type(value) is float and buffer.ndim == 1 and buffer.dtype.kind == "f":
                buffer[self.count] = value  # The common case, in a tenth of the time of the checks below.
                continue
            given = as_extra(name, value)
            if given.shape != buffer.shape[1:] or not np.can_cast(given.dtype, buffer.dtype, "same_kind"):
                raise SchemaError(
                    f"record() was given {given.dtype} {given.shape}, and {buffer.dtype} {buffer.shape[1:]} "
                    "before",
                    column=name,
                )
            buffer[self.count] = given if given.dtype != object else given.item()

    def batch(self) -> SampleBatch:
        """The rows: views, except for ``eps_id`` and ``t``."""
        rows = self.count
        first, t, eps_ids, seeds, began = zip(*self._runs, strict=True)
        bounds = np.array((*first, rows))
        lengths = bounds[1:] - bounds[:-1]
        columns: dict[str, Any] = {
            Columns.OBS: self._obs.columns(0, rows),
            Columns.ACTIONS: self.actions.columns(0, rows),
            Columns.REWARDS: self._rewards[:rows],
            Columns.NEXT_OBS: self._obs.columns(1, rows, self._finals),
            Columns.TERMINATEDS: self._terminateds[:rows],
            Columns.TRUNCATEDS: self._truncateds[:rows],
        }
        if self._infos is not None:
            columns[Columns.INFOS] = object_column(self._infos)
        columns[Columns.EPS_ID] = np.array(eps_ids, np.int64).repeat(lengths)
        columns[Columns.T] = np.arange(rows) + (t - bounds[:-1]).repeat(lengths)
        if self._seeds:
            columns[Columns.ENV_SEED] = np.array(seeds, np.int64).repeat(lengths)
        for name, buffer in self.extras.items():
            columns[name] = buffer[:rows]
        # As vector environments and runners record it: all of them may share a data set.
        columns[Columns.ENV_ID] = np.zeros(rows, np.int64)
        return SampleBatch(columns, episode_starts=dict(zip(eps_ids, began, strict=True)))

    def written(self) -> None:
        """Drop the rows; the episode continues."""
        rows = self.count
        row, t, eps_id, seed, began = self._runs[-1]
        self._runs = [(0, t + rows - row, eps_id, seed, began)]
        self._finals.clear()
        self._obs.move(rows, 0)
        if self._infos is not None:
            self._infos.clear()
        self.count = 0
