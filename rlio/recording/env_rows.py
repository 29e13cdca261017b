"""`EnvRows`: the steps of one environment since the last write, as preallocated columns."""

from __future__ import annotations

from typing import Any, Final

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


class _Buffer:
    """One value of a space for each step, nested or not."""

    def __init__(self, column: str, space: gym.Space[Any], rows: int, *, giver: str) -> None:
        self._column, self._giver = column, giver
        self._leaves = leaves_of(space)
        self._arrays = [np.zeros((rows, *leaf.shape), leaf.dtype) for leaf in self._leaves]
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

    def row(self, at: int) -> list[Any]:
        """Copies of row ``at``, one for each leaf."""
        return [own_copy(array[at]) for array in self._arrays]

    def move(self, at: int, to: int) -> None:
        """Copy row ``at`` to row ``to``."""
        for array in self._arrays:
            array[to] = array[at]

    def columns(self, first: int, rows: int, changed: list[tuple[int, list[Any]]] | None = None) -> Column:
        """Some rows, nested like the space: views, or copies if some rows are ``changed``."""
        parts = [array[first : first + rows] for array in self._arrays]
        if changed:
            parts = [part.copy() for part in parts]
            for at, values in changed:
                for part, value in zip(parts, values, strict=True):
                    part[at] = value
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
        #: Id, step and seed of each row's episode; and those of the next row.
        self._keys: list[tuple[int, int, int]] = []
        self._next = (0, 0, -1)
        #: When the episodes of the rows, and the running one, began.
        self._starts: dict[int | str, int] = {}
        #: Last rows of episodes, and rows before a gap, and the observations after them: the next row begins
        #: with another observation.
        self._finals: list[tuple[int, list[Any]]] = []
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
        self._next = eps_id, 0, -1 if seed is None else seed
        self._starts[eps_id] = utc_ms()
        self._unseen = False

    def _keep_final(self) -> None:
        """Keep the observation after the last row, because the next row begins with another one."""
        at = self.count
        # Only once: a later observation that did not fit may have overwritten part of that row.
        if at and not (self._finals and self._finals[-1][0] == at - 1):
            self._finals.append((at - 1, self._obs.row(at)))

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
        key = eps_id, t, seed = self._next
        self._next = eps_id, t + 1, seed
        try:
            self._obs.put(at + 1, obs)
        except BaseException:
            self._unseen = True
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
        except SchemaError:
            self._keep_final()
            self._obs.move(at + 1, at)
            raise
        self._terminateds[at] = terminated
        self._truncateds[at] = truncated
        self._keys.append(key)
        self.count = at + 1
        self._begun = True

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
        eps_ids, ts, seeds = np.array(self._keys, np.int64).T.copy()
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
        columns[Columns.EPS_ID], columns[Columns.T] = eps_ids, ts
        if self._seeds:
            columns[Columns.ENV_SEED] = seeds
        for name, buffer in self.extras.items():
            columns[name] = buffer[:rows]
        # As vector environments and runners record it: all of them may share a data set.
        columns[Columns.ENV_ID] = np.zeros(rows, np.int64)
        return SampleBatch(columns, episode_starts=dict(self._starts))

    def written(self) -> None:
        """Drop the rows; the episode continues."""
        rows = self.count
        self._keys.clear()
        self._starts = {self._next[0]: self._starts[self._next[0]]}
        self._finals.clear()
        self._obs.move(rows, 0)
        if self._infos is not None:
            self._infos.clear()
        self.count = 0
