"""`LoggedRows`: the checked columns of a batch that estimators use.

This module refuses rows without the columns that estimators need, and impossible values.

Example:
    >>> from rlio.batch import SampleBatch
    >>> read_rewards(SampleBatch(rewards=[0, 1])).tolist()
    [0.0, 1.0]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.arrays import Column, to_numpy
from rlio.batch.columns import AGENT_ID, Columns
from rlio.batch.nested import map_structure
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt

__all__ = ["NO_AGENT", "LoggedRows", "StepNumbers", "read_nested", "read_rewards", "rows_of"]

#: Agent of rows that name none.
NO_AGENT: Final = -1


@dataclass(frozen=True)
class LoggedRows:
    """Checked columns of N rows.

    Attributes:
        eps_id: Episode of each row.
        agent: Agent of each row; `NO_AGENT` if there is one agent.
        t: Step within the episode, int64.
        ends: Whether the row ended its episode.
        columns: Values that are kept until the episode is complete.
    """

    eps_id: NDArray[Any]
    agent: NDArray[Any]
    t: NDArray[np.int64]
    ends: NDArray[np.bool_]
    columns: dict[str, Column]

    def __len__(self) -> int:
        return len(self.t)

    @classmethod
    def single_steps(cls, columns: dict[str, Column], eps_id: range) -> LoggedRows:
        """Return rows with ``columns``, each of which is an episode."""
        rows = len(eps_id)
        agent, t, ends = np.full(rows, NO_AGENT), np.zeros(rows, np.int64), np.ones(rows, bool)
        return cls(np.array(eps_id), agent, t, ends, columns)

    @classmethod
    def of(cls, batch: SampleBatch, columns: dict[str, Column], steps: StepNumbers | None) -> LoggedRows:
        """Return the rows of ``batch``, with ``columns``.

        Args:
            batch: The batch with the episodes of the rows.
            columns: Values to keep.
            steps: Numbers the steps if the batch does not; None: the rows may arrive in any order.

        Raises:
            MissingColumn: The batch lacks the episodes or steps.
            SchemaError: Some batches have steps and others do not.
        """
        if Columns.EPS_ID not in batch:
            raise MissingColumn(
                "rows do not say which episode they are of, so no episode is known to be whole: record "
                "with rlio, or, if every row is a separate episode, pass bandit=True",
                column=Columns.EPS_ID,
            )
        ended = [to_numpy(batch[name]) for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS) if name in batch]
        if not ended:
            raise MissingColumn(
                "rows do not say where episodes end: expected terminateds, truncateds or both",
                column=Columns.TERMINATEDS,
            )
        agents = [to_numpy(batch[name]) for name in (AGENT_ID, Columns.AGENT_INDEX) if name in batch]
        agent = agents[0] if agents else np.full(len(batch), NO_AGENT)
        ends = np.logical_or.reduce([flags.astype(bool) for flags in ended])
        eps_id = to_numpy(batch[Columns.EPS_ID])
        given = to_numpy(batch[Columns.T]).astype(np.int64) if Columns.T in batch else None
        if steps is not None:
            t = steps.of(given, eps_id, agent, ends)
        elif given is None:
            raise MissingColumn(
                "rows do not say which step of their episode they are, nor does their order, because "
                "they are shuffled or read in parts: read them in the order in which they were recorded, in "
                "one process; or, if every row is a separate episode, pass bandit=True",
                column=Columns.T,
            )
        else:
            t = given
        return cls(eps_id, agent, t, ends, columns)


class StepNumbers:
    """Numbers the steps of episodes without ``t``, in the order of their rows.

    The first row of an episode counts as its step 0, because missing earlier rows are not detectable.
    """

    def __init__(self) -> None:
        #: Whether rows have ``t``; None before the first.
        self._given: bool | None = None
        #: (episode, agent) -> its next step, for episodes that have not ended.
        self._running: dict[tuple[Any, Any], int] = {}

    def of(
        self,
        given: NDArray[np.int64] | None,
        eps_id: NDArray[Any],
        agent: NDArray[Any],
        ends: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Return the step of each row, (N,): from ``given``, or from the order of the rows.

        Raises:
            SchemaError: Some batches have steps and others do not.
        """
        if self._given not in (None, given is not None):
            raise SchemaError(
                "some batches say which step of its episode each row is, and others do not: give all batches "
                "this column, or none",
                column=Columns.T,
            )
        self._given = given is not None
        if given is not None:
            return given
        keys = zip(eps_id.tolist(), agent.tolist(), strict=True)
        found = np.empty(len(eps_id), np.int64)
        for i, (key, is_last) in enumerate(zip(keys, ends.tolist(), strict=True)):
            found[i] = self._running.pop(key, 0)
            if not is_last:
                self._running[key] = int(found[i]) + 1
        return found


def rows_of(batch: Batch, policy_id: str | None) -> SampleBatch:
    """Return the rows of one policy in ``batch``, as arrays, without padding.

    Raises:
        OptionError: The batch has several policies and ``policy_id`` is None, or lacks the named policy.
    """
    if isinstance(batch, MultiAgentBatch):
        wanted = policy_id if policy_id is not None or len(batch.keys()) != 1 else next(iter(batch))
        if wanted is None:
            raise OptionError(
                f"found rows of the policies {excerpt(list(batch))}: select one with policy_id="
            )
        batch = batch.get(wanted) or SampleBatch()
    elif policy_id is not None:
        raise OptionError(
            f"policy_id={excerpt(policy_id)}, but the rows are of one policy without a name: omit policy_id"
        )
    return batch.unpad() if batch.zero_padded else batch


def read_rewards(batch: SampleBatch) -> NDArray[np.float64]:
    """Return the rewards, (N,) float64.

    Raises:
        MissingColumn: The batch has no rewards.
        SchemaError: A reward is NaN or infinite.
    """
    if Columns.REWARDS not in batch:
        raise MissingColumn("rows have no rewards to estimate returns from", column=Columns.REWARDS)
    rewards = to_numpy(batch[Columns.REWARDS]).astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(rewards))
    if len(wrong):
        raise SchemaError(
            f"the reward in row {wrong[0]} of the batch is {rewards[wrong[0]]}: leave such episodes out",
            column=Columns.REWARDS,
        )
    return rewards


def read_nested(batch: SampleBatch, name: str) -> Column:
    """Return column ``name`` as arrays, with its nesting.

    Raises:
        MissingColumn: The column is absent.
    """
    if name not in batch:
        raise MissingColumn(f"rows have no {name}, which the judged policy needs", column=name)
    column: Column = map_structure(to_numpy, batch[name])
    return column
