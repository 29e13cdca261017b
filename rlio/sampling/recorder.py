"""`StepRecorder`: the steps of N environments as preallocated columns, handed out as rows.

Columns have the shape (steps, N, ...) while they are filled, with one assignment per column and step. Rows
are handed out environment by environment, which keeps each episode's steps contiguous.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.envs.vector import VectorStep
    >>> recorder = StepRecorder(Box(0, 9, (), np.float32), Discrete(2), num_envs=2, capacity=8)
    >>> recorder.start(np.array([0, 5]))
    >>> no = np.zeros(2, bool)
    >>> for now in (1, 2):
    ...     step = VectorStep(np.array([now, 5 + now]), np.ones(2), no, no, None, no, [], {})
    ...     recorder.add(step, actions=np.array([0, 1]), extras={}, scalars={"t": np.array([now - 1] * 2)})
    >>> columns, counts = recorder.take()
    >>> columns["obs"].tolist(), columns["t"].tolist(), counts.tolist()
    ([0.0, 1.0, 5.0, 6.0], [0, 1, 0, 1], [2, 2])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Column
from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.envs.leaves import leaf_of
from rlio.envs.values import fitted, is_plain
from rlio.sampling.row_store import RowStore, assign, nested

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.envs.vector import VectorStep

__all__ = ["StepRecorder", "until_last"]

#: Bool columns: the row is the last of an episode; the row is a transition and was not handed out.
_ENDS, _VALID = "_ends", "_valid"


class StepRecorder(RowStore):
    """Columns for up to ``capacity`` steps of ``num_envs`` environments.

    Args:
        observation_space: Space of one environment's observation.
        action_space: Space of one environment's action.
        num_envs: Number of environments.
        capacity: Number of steps that fit.
        infos: Whether to record a column of infos.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        num_envs: int,
        capacity: int,
        infos: bool = False,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            # One more, because the observation after step s is the one before step s + 1.
            entries=capacity + 1,
            streams=num_envs,
            rewards=np.float32,
            flags=(_ENDS, _VALID),
            infos=infos,
        )
        self.capacity: int = capacity
        self.num_envs = num_envs
        #: Steps recorded since `take`.
        self.steps: int = 0
        self._own[_VALID][:] = True
        self._all_valid = True
        self._rows = 0
        #: (step, environment, leaves) where an episode's last `new_obs` is not the next `obs`.
        self._finals: list[tuple[int, int, list[Any]]] = []
        self._view: Any = None

    # ---- recording ----

    @property
    def is_full(self) -> bool:
        """Whether the next `add` needs a `take` or `reserve` first."""
        return self.steps >= self.capacity

    @property
    def obs(self) -> Any:
        """The current observations, batched and nested as their space: views that `take` overwrites."""
        return self._view

    def start(self, obs: Any) -> None:
        """Begin at ``obs``, and forget all steps since the last `take`."""
        self.clear()
        self._write_obs(self._fitting(obs))

    def restart(self, obs: Any, which: NDArray[np.bool_]) -> None:
        """Begin episodes in some environments; their previous observation becomes the last row's `new_obs`.

        Args:
            obs: The observations of all environments; only those of the environments ``which`` are used.
            which: Mask of the environments, shape (N,), bool.
        """
        at = self.steps
        known = {env for step, env, _ in self._finals if step == at - 1}
        began = np.flatnonzero(which).tolist()
        if at:
            self._finals += [
                (at - 1, env, [own_copy(buffer[at, env]) for buffer in self._obs])
                for env in began
                if env not in known
            ]
        for leaf, buffer, values in zip(self._observation_leaves, self._obs, self._fitting(obs), strict=True):
            for env in began:
                buffer[at, env] = own_copy(values[env]) if leaf.is_object else values[env]

    def _fitting(self, obs: Any) -> list[Any]:
        """The leaves of a batch of observations, which may be the environments' own arrays."""
        leaves = self._observation_leaves
        if leaves and is_plain(leaves, obs, self._obs[0].shape[1:]):
            return [obs]
        where = {"column": Columns.OBS, "giver": "the environment or a connector"}
        return [fitted(leaf, leaf_of(obs, leaf.path), rows=self.num_envs, **where) for leaf in leaves]

    def _write_obs(self, values: list[Any]) -> None:
        at = self.steps
        for leaf, buffer, value in zip(self._observation_leaves, self._obs, values, strict=True):
            if leaf.is_object:
                assign(buffer, at, own_copy(value))
            else:
                buffer[at] = value
        self._look()

    def check_extras(self, extras: Mapping[str, Any]) -> None:
        """Check the policy's further columns before a step.

        Raises:
            SchemaError: They do not fit; see `add`.
        """
        self._checked_extras(extras, self.num_envs)

    def add(
        self,
        step: VectorStep,
        *,
        actions: Any,
        extras: Mapping[str, Any],
        scalars: Mapping[str, Any],
        infos: list[dict[str, Any]] | None = None,
        ends: NDArray[np.bool_] | None = None,
        checked: bool = False,
    ) -> None:
        """Record one step of every environment.

        Args:
            step: The step that the environments returned.
            actions: The policy's actions, (N, ...), nested as the space.
            extras: The policy's further columns, (N, ...), the same ones in every call.
            scalars: Integer columns, (N,) or one number for all.
            infos: N infos, if infos are recorded; kept, so they must be copies.
            ends: Mask of the rows that are the last of an episode, (N,); None uses the flags.
            checked: Whether `fitted` has checked the actions and observations.

        Raises:
            SchemaError: Actions, extras or observations do not fit; nothing is recorded.
        """
        at, own = self.steps, self._own
        if checked:
            seen = [leaf_of(step.obs, leaf.path) for leaf in self._observation_leaves]
            acted = [leaf_of(actions, leaf.path) for leaf in self._action_leaves]
        else:
            seen = self._fitting(step.obs)
            acted = self._checked_actions(actions, self.num_envs)
        self._put(at, acted, self._checked_extras(extras, self.num_envs), scalars)
        own[Columns.REWARDS][at] = step.rewards
        own[Columns.TERMINATEDS][at] = step.terminateds
        own[Columns.TRUNCATEDS][at] = step.truncateds
        own[_ENDS][at] = step.terminateds | step.truncateds if ends is None else ends
        if step.valid is None:
            self._rows += self.num_envs
        else:
            own[_VALID][at] = step.valid
            self._all_valid = False
            self._rows += int(np.count_nonzero(step.valid))
        if Columns.INFOS in own and infos is not None:
            assign(own[Columns.INFOS], at, infos)
        for env, final in step.finals:
            self._finals.append((at, env, final))
        self.steps = at + 1
        self._write_obs(seen)

    def discard(self, env: int, eps_id: int) -> int:
        """Drop an episode's rows that were not handed out, and return their number.

        Args:
            env: The episode's environment.
            eps_id: The episode's id, as in the scalar column ``eps_id``.
        """
        if Columns.EPS_ID not in self._integers:
            return 0
        valid = self._own[_VALID][: self.steps, env]
        rows = valid & (self._integers[Columns.EPS_ID][: self.steps, env] == eps_id)
        dropped = int(np.count_nonzero(rows))
        if dropped:
            valid[rows] = False
            self._all_valid = False
            self._rows -= dropped
        return dropped

    def clear(self) -> None:
        """Forget the rows that were not handed out; call `start` before the next step."""
        self.steps = self._rows = 0
        self._finals.clear()
        self._own[_VALID][:] = True
        self._all_valid = True

    def scalar(self, name: str) -> NDArray[np.int64]:
        """A scalar column's values in the rows that were not handed out, unordered."""
        if not self._rows:
            return np.zeros(0, np.int64)
        values: NDArray[np.int64] = self._integers[name][: self.steps][self._own[_VALID][: self.steps]]
        return values

    # ---- handing out ----

    @property
    def rows(self) -> int:
        """Number of transitions that were recorded and not handed out."""
        return self._rows

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Mask of the recorded rows that are transitions and not handed out: a copy, shape (steps, N)."""
        return self._own[_VALID][: self.steps].copy()

    @property
    def ended(self) -> NDArray[np.bool_]:
        """Mask of the `valid` rows that are the last of an episode, shape (steps, N)."""
        ended: NDArray[np.bool_] = self._own[_ENDS][: self.steps] & self._own[_VALID][: self.steps]
        return ended

    def take(self, chosen: NDArray[np.bool_] | None = None) -> tuple[dict[str, Column], NDArray[np.int64]]:
        """Hand out rows, and keep the others for the next `take`.

        A step is kept while one of its rows waits, so there are at most as many steps as waiting rows.

        Args:
            chosen: Mask of the `valid` rows to hand out, shape (steps, N); None: all.

        Returns:
            The columns of the rows, one environment after the other, as copies; and the number of rows of
            each environment, shape (N,).
        """
        steps = self.steps
        rest = None if chosen is None else self.valid & ~chosen
        if chosen is None and not self._all_valid:
            chosen = self.valid
        columns = self._taken(steps, None if chosen is None else chosen.T)
        counts = np.full(self.num_envs, steps) if chosen is None else chosen.sum(axis=0)
        if rest is None:
            for buffer in self._obs:
                buffer[0] = buffer[steps]
            self.clear()
            self._look()
        else:
            self._drop(rest)
        return columns, counts.astype(np.int64)

    def column(self, name: str) -> NDArray[np.int64]:
        """A scalar column of all recorded rows, shape (steps, N): a view."""
        return self._integers[name][: self.steps]

    def peek(self, env: int, at: NDArray[np.intp]) -> dict[str, Column]:
        """Copy rows of one environment, which stay for `take`.

        Args:
            env: The environment.
            at: Numbers of the steps of its `valid` rows, in order.
        """
        rows = {step: row for row, step in enumerate(at.tolist())}
        next_obs = [buffer[at + 1, env] for buffer in self._obs]
        for step, where, final in self._finals:
            if where == env and step in rows:
                for column, value in zip(next_obs, final, strict=True):
                    column[rows[step]] = value
        return self._columns(lambda buffer: buffer[at, env], next_obs)

    def _taken(self, steps: int, chosen: NDArray[np.bool_] | None) -> dict[str, Column]:
        def rows(buffer: NDArray[Any]) -> NDArray[Any]:
            by_env = buffer[:steps].swapaxes(0, 1)
            return by_env.copy().reshape(-1, *buffer.shape[2:]) if chosen is None else by_env[chosen]

        return self._columns(rows, [self._next_obs(i, steps, chosen) for i in range(len(self._obs))])

    def _next_obs(self, leaf: int, steps: int, chosen: NDArray[np.bool_] | None) -> NDArray[Any]:
        by_env = self._obs[leaf][1 : steps + 1].swapaxes(0, 1).copy()
        for at, env, final in self._finals:
            by_env[env, at] = final[leaf]
        return by_env.reshape(-1, *by_env.shape[2:]) if chosen is None else by_env[chosen]

    def _drop(self, rest: NDArray[np.bool_]) -> None:
        """Move the steps with rows in ``rest`` to the front, followed by the current observations."""
        old = self.steps
        kept = np.flatnonzero(rest.any(axis=1))
        steps = len(kept)
        # Use a slice if the steps are the last ones, which holds unless an environment is slow.
        which: Any = slice(old - steps, old)
        if steps and kept[0] != old - steps:
            which = kept
            self._keep_next_obs(rest, kept)
        if steps < old:
            self._keep_entries(which, steps)
            for buffer in self._obs:
                buffer[steps] = buffer[old]
        place = dict(zip(kept.tolist(), range(steps), strict=True)) if self._finals else {}
        self._finals = [(place[at], env, final) for at, env, final in self._finals if at in place]
        valid = self._own[_VALID]
        valid[:steps] = rest[which]
        valid[steps:] = True
        self._all_valid = bool(valid[:steps].all())
        self._rows = int(np.count_nonzero(rest))
        self.steps = steps
        self._look()

    def _keep_next_obs(self, rest: NDArray[np.bool_], kept: NDArray[np.intp]) -> None:
        """Keep the `new_obs` of the rows ``rest`` whose next step is not in ``kept``."""
        known = {(at, env) for at, env, _ in self._finals}
        for at in kept[np.diff(kept, append=self.steps) > 1].tolist():
            for env in np.flatnonzero(rest[at]).tolist():
                if (at, env) not in known:
                    final = [own_copy(buffer[at + 1, env]) for buffer in self._obs]
                    self._finals.append((at, env, final))

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` steps in total, keeping the recorded ones."""
        if capacity <= self.capacity:
            return

        self._lengthen(capacity + 1, self.steps + 1)
        self._own[_VALID][self.steps :] = True
        self.capacity = capacity
        self._look()

    def _look(self) -> None:
        """Point `obs` at the current observations."""
        self._view = nested(self._observation_leaves, [buffer[self.steps] for buffer in self._obs])


def until_last(ended: NDArray[np.bool_], valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mask of the ``valid`` rows, (steps, N), up to each environment's last ``ended``."""
    return valid & np.logical_or.accumulate(ended[::-1], axis=0)[::-1]
