"""`AgentRows`: rows of one policy's agents, opened when they act, closed when the outcome is known.

Unlike a vector environment's rows, these are not in step. Agents join, leave and act in turns, and a row may
stay open for many steps while others come and go. Columns are growing arrays; one assignment per column opens
or closes a whole batch of rows.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> rows = AgentRows(Box(0, 9, (), np.float32), Discrete(2))
    >>> first = rows.open(np.array([3.0, 4.0]), np.array([0, 1]), {}, {"t": 0, "agent_index": [0, 1]})
    >>> rows.close(np.array([first + 1]), rewards=[1.5], new_obs=np.array([5.0]), t=1)
    >>> rows.closed.tolist()
    [False, True]
    >>> taken, moved = rows.take(rows.closed)
    >>> taken["obs"].tolist(), taken["new_obs"].tolist(), moved.tolist()
    ([4.0], [5.0], [0, -1])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import Column, object_column
from rlio.batch.columns import Columns
from rlio.envs.leaves import Leaf, leaf_of
from rlio.envs.values import fitted
from rlio.sampling.row_store import RowStore, assign, nested

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["AGENT_T", "EPISODE", "NEXT_T", "AgentRows", "stacked"]

#: Integer columns that only runners use and that are in no batch: the episode's number in the runner, the
#: agent's own step in it, and the environment step at which `new_obs` was observed.
#: Bool column: the outcome of the row is known.
_CLOSED = "_closed"
EPISODE = "_episode"
AGENT_T = "_agent_t"
NEXT_T = "_next_t"


class AgentRows(RowStore):
    """Rows of one policy; open rows have no outcome yet.

    Args:
        observation_space: Space of one observation, as the policy gets it.
        action_space: Space of one action, as the policy gives it.
        infos: Whether to record a column of infos.
    """

    def __init__(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], *, infos: bool = False
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            entries=256,
            # Rewards of several environment steps are summed.
            rewards=np.float64,
            flags=(_CLOSED, Columns.NEXT_OBS_VALID),
            infos=infos,
        )
        self._rows = 0
        #: Number of closed rows.
        self.closed_rows: int = 0
        self._new_obs = self._buffers(self._observation_leaves)

    def _leaf_buffers(self) -> list[list[NDArray[Any]]]:
        return [*super()._leaf_buffers(), self._new_obs]

    def __len__(self) -> int:
        """Number of rows, open and closed."""
        return self._rows

    @property
    def closed(self) -> NDArray[np.bool_]:
        """Mask of the closed rows: a copy, shape (rows,)."""
        closed = self._own[_CLOSED][: self._rows].copy()
        # Without this check, a caller that samples until it has enough rows waits forever for a lost row.
        assert np.count_nonzero(closed) == self.closed_rows, "rows were lost, or closed twice"
        return closed

    def integers(self, name: str) -> NDArray[np.int64]:
        """An integer column, shape (rows,): a view."""
        if name not in self._integers:
            return np.zeros(0, np.int64)
        return self._integers[name][: self._rows]

    # ---- adding rows ----

    def open(
        self,
        obs: Any,
        actions: Any,
        extras: Mapping[str, Any],
        integers: Mapping[str, int | Sequence[int] | NDArray[np.int64]],
    ) -> int:
        """Add a row for each of N agents that act.

        Args:
            obs: The observations, (N, ...), nested as the space.
            actions: The actions, (N, ...), nested as the space.
            extras: The policy's further columns, (N, ...), the same ones in every call.
            integers: Integer columns, N numbers or one for all, the same ones in every call.

        Returns:
            The number of the first row; the others follow it.

        Raises:
            SchemaError: Actions or extras do not fit; nothing is added.
        """
        observed = [leaf_of(obs, leaf.path) for leaf in self._observation_leaves]
        n = len(observed[0])
        first, end = self._rows, self._rows + n
        acted = self._checked_actions(actions, n)
        # If no row waits, another policy may have replaced the previous one.
        if not self._rows and self._extras is not None and extras.keys() != self._extras.keys():
            self.forget_extras()
        added = self._checked_extras(extras, n)
        if end > self._entries:
            self._lengthen(max(end, 2 * self._entries), first)
        for buffer, value in zip(self._obs, observed, strict=True):
            assign(buffer, slice(first, end), value)
        self._put(slice(first, end), acted, added, integers)
        for column in self._own.values():
            column[first:end] = None if column.dtype == object else 0
        self._rows = end
        return first

    def close(
        self,
        rows: NDArray[np.int64],
        *,
        rewards: Sequence[float],
        t: int | Sequence[int],
        new_obs: Any = None,
        ended: Sequence[tuple[bool, bool]] | None = None,
        infos: Sequence[Any] | None = None,
    ) -> None:
        """Record the outcome of n rows.

        Args:
            rows: Numbers of the rows.
            rewards: Sum of the rewards of each row since it was opened.
            t: Environment step at which ``new_obs`` was observed.
            new_obs: (n, ...), nested as the space; None if unknown.
            ended: (terminated, truncated) of each row; None if none ended.
            infos: Info of each row, if infos are recorded.
        """
        own = self._own
        own[Columns.REWARDS][rows] += rewards
        own[_CLOSED][rows] = True
        self.closed_rows += len(rows)
        if NEXT_T not in self._integers:
            self._integers[NEXT_T] = self._buffer(np.int64)
        self._integers[NEXT_T][rows] = t
        if ended is not None:
            flags = np.asarray(ended, bool).reshape(-1, 2)
            own[Columns.TERMINATEDS][rows], own[Columns.TRUNCATEDS][rows] = flags.T
        if new_obs is not None:
            own[Columns.NEXT_OBS_VALID][rows] = True
            for leaf, buffer in zip(self._observation_leaves, self._new_obs, strict=True):
                assign(buffer, rows, leaf_of(new_obs, leaf.path))
        else:
            for buffer in self._new_obs:
                assign(buffer, rows, [None] * len(rows) if buffer.dtype == object else 0)
        if Columns.INFOS in own and infos is not None:
            assign(own[Columns.INFOS], rows, infos)

    def add_reward(self, row: int, reward: float) -> None:
        """Add a reward that came after ``row`` was closed."""
        self._own[Columns.REWARDS][row] += reward

    # ---- removing rows ----

    def take(self, chosen: NDArray[np.bool_]) -> tuple[dict[str, Column], NDArray[np.int64]]:
        """Hand out rows, and keep the others.

        Args:
            chosen: Mask of the closed rows to hand out, shape (rows,).

        Returns:
            The columns of the chosen rows as copies, ordered by environment, episode, agent and time,
            including the integer columns for runners; and the new number of each row, or -1.
        """
        return self.peek(chosen), self._keep(~chosen)

    def peek(self, chosen: NDArray[np.bool_]) -> dict[str, Column]:
        """The columns of closed rows as copies, as `take` returns them; the rows stay."""
        at = np.flatnonzero(chosen)
        names = (Columns.AGENT_INDEX, EPISODE, Columns.ENV_ID)
        keys = [self._integers[name][at] for name in names if name in self._integers]
        # Rows are in time order, and the sort is stable.
        order = at[np.lexsort(keys)] if len(keys) else at
        columns = self._columns(lambda buffer: buffer[order], [buffer[order] for buffer in self._new_obs])
        valid = self._own[Columns.NEXT_OBS_VALID][order]
        if not valid.all():
            columns[Columns.NEXT_OBS_VALID] = valid
        return columns

    def empty(self) -> None:
        """Forget all rows; new rows may have other extra columns."""
        self._keep(np.zeros(self._rows, bool))
        self.forget_extras()

    def drop(self, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Drop rows; returns the new number of each row, like `take`."""
        return self._keep(~chosen)

    def _keep(self, kept: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Move the ``kept`` rows to the front."""
        old, at = self._rows, np.flatnonzero(kept)
        moved = np.full(old, -1, np.int64)
        moved[at] = np.arange(len(at))
        rows = len(at)
        if 0 < rows < old:
            self._keep_entries(at, rows)
        if Columns.INFOS in self._own:
            self._own[Columns.INFOS][rows:old] = None  # releases the objects
        self._rows = rows
        self.closed_rows = int(np.count_nonzero(self._own[_CLOSED][:rows]))
        return moved


def stacked(leaves: Sequence[Leaf], values: Sequence[Any]) -> Any:
    """Copy observations of several agents into one batch, (N, ...).

    Args:
        leaves: The leaves of the agents' space.
        values: The observations.

    Raises:
        SchemaError: An observation does not fit the space.
    """
    return nested(leaves, [_stacked_leaf(leaf, values) for leaf in leaves])


def _stacked_leaf(leaf: Leaf, values: Sequence[Any]) -> NDArray[Any]:
    parts = [leaf_of(value, leaf.path) for value in values]
    if leaf.is_object:
        for part in parts:
            fitted(leaf, part, column=Columns.OBS, giver="the environment")
        return object_column(parts)
    try:
        made = np.array(parts)  # A copy, in a dtype that holds all of them.
    except (TypeError, ValueError, RuntimeError):
        made = np.empty(0, object)
    if made.dtype != leaf.dtype or made.shape != (len(parts), *leaf.shape):
        # One by one, so that the message is about the one that does not fit.
        each = [fitted(leaf, part, column=Columns.OBS, giver="the environment") for part in parts]
        made = np.array(each, leaf.dtype).reshape(len(parts), *leaf.shape)
    return made
