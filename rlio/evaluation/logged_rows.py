"""`LoggedRows`: the columns of a batch that estimators use, checked.

Here is what is refused: rows that do not say how likely their actions were, or say what cannot be.

Example:
    >>> from rlio.batch import SampleBatch
    >>> read_log_probabilities(SampleBatch(action_prob=[0.5, 0.25]), densities=False).round(2).tolist()
    [-0.69, -1.39]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.arrays import Column, to_numpy
from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.evaluation.target import ROUNDING

__all__ = ["LoggedRows", "StepNumbers", "read_log_probabilities", "rows_of"]

#: The id of an agent that is no int, which ``agent_index`` cannot hold.
_AGENT_ID = "agent_id"


@dataclass(frozen=True)
class LoggedRows:
    """Checked columns of N rows.

    Attributes:
        eps_id: Of each row.
        agent: Whose row of the episode; None where there is one agent.
        t: Step of the episode, int64.
        ends: Whether the row ended its episode.
        columns: What is kept of the rows until their episode is complete.
    """

    eps_id: NDArray[Any]
    agent: NDArray[Any] | None
    t: NDArray[np.int64]
    ends: NDArray[np.bool_]
    columns: dict[str, Column]

    def __len__(self) -> int:
        return len(self.t)

    @classmethod
    def single_steps(cls, columns: dict[str, Column], eps_id: range) -> LoggedRows:
        """Rows with ``columns``, each of which is an episode of its own."""
        rows = len(eps_id)
        return cls(np.array(eps_id), None, np.zeros(rows, np.int64), np.ones(rows, bool), columns)

    @classmethod
    def of(cls, batch: SampleBatch, columns: dict[str, Column], steps: StepNumbers | None) -> LoggedRows:
        """The rows of ``batch``, with ``columns``.

        Args:
            batch: What says which episodes they are of.
            columns: What is kept of them.
            steps: Numbers steps where the batch does not; None: the rows may come in any order.

        Raises:
            MissingColumn: It does not say which episodes, or steps, they are.
            SchemaError: Batches before it numbered their steps, or this one does and those did not.
        """
        if Columns.EPS_ID not in batch:
            raise MissingColumn(
                "rows do not say which episode they are of, so that no episode is known to be whole: record "
                "with rlio, or, if every row is an episode of its own, give bandit=True",
                column=Columns.EPS_ID,
            )
        ended = [to_numpy(batch[name]) for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS) if name in batch]
        if not ended:
            raise MissingColumn(
                "rows do not say where episodes end: expected terminateds, truncateds or both",
                column=Columns.TERMINATEDS,
            )
        agent = next((to_numpy(batch[n]) for n in (_AGENT_ID, Columns.AGENT_INDEX) if n in batch), None)
        ends = np.logical_or.reduce([flags.astype(bool) for flags in ended])
        eps_id = to_numpy(batch[Columns.EPS_ID])
        given = to_numpy(batch[Columns.T]).astype(np.int64) if Columns.T in batch else None
        if steps is not None:
            t = steps.of(given, eps_id, agent, ends)
        elif given is None:
            raise MissingColumn(
                "rows do not say which step of their episode they are, and their order does not say it, as "
                "they are shuffled or read in parts: read them in the order in which they were recorded, in "
                "one process; or, if every row is an episode of its own, give bandit=True",
                column=Columns.T,
            )
        else:
            t = given
        return cls(eps_id, agent, t, ends, columns)


class StepNumbers:
    """Numbers the steps of episodes whose rows do not say ``t``, in the order in which they come.

    The first row of an episode is taken for its step 0: that rows before it are missing cannot be seen.
    """

    def __init__(self) -> None:
        #: Whether rows say ``t``; None before the first.
        self._given: bool | None = None
        #: (episode, agent) -> its next step, of those that have not ended.
        self._running: dict[tuple[Any, Any], int] = {}

    def of(
        self,
        given: NDArray[np.int64] | None,
        eps_id: NDArray[Any],
        agent: NDArray[Any] | None,
        ends: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """The step of each row, (N,): as ``given``, or by the order of the rows.

        Raises:
            SchemaError: Steps were given before and are not now, or the other way round.
        """
        if self._given not in (None, given is not None):
            raise SchemaError(
                "some batches say which step of its episode each row is, and others do not: give all of them "
                "this column, or none",
                column=Columns.T,
            )
        self._given = given is not None
        if given is not None:
            return given
        agents = [None] * len(eps_id) if agent is None else agent.tolist()
        found = np.empty(len(eps_id), np.int64)
        for i, (key, is_last) in enumerate(
            zip(zip(eps_id.tolist(), agents, strict=True), ends.tolist(), strict=True)
        ):
            found[i] = self._running.pop(key, 0)
            if not is_last:
                self._running[key] = int(found[i]) + 1
        return found


def rows_of(batch: Batch, policy_id: str | None) -> SampleBatch:
    """The rows of one policy in ``batch``, as arrays, without padding.

    Raises:
        OptionError: The batch has rows of several policies and none is named, or not of the one that is.
    """
    if isinstance(batch, MultiAgentBatch):
        wanted = policy_id if policy_id is not None or len(batch.keys()) != 1 else next(iter(batch))
        if wanted is None:
            raise OptionError(
                f"rows of the policies {excerpt(list(batch))}: name the one whose rows count, policy_id="
            )
        batch = batch.get(wanted) or SampleBatch()
    elif policy_id is not None:
        raise OptionError(
            f"policy_id={excerpt(policy_id)}, but the rows are of one policy without a name: leave it out"
        )
    return batch.unpad() if batch.zero_padded else batch


def read_log_probabilities(batch: SampleBatch, *, densities: bool) -> NDArray[np.float64]:
    """Log of the probability with which each action was taken: ``action_logp``, or of ``action_prob``.

    Args:
        batch: The rows.
        densities: Whether they may be above 1.

    Returns:
        (N,) float64, all finite.

    Raises:
        MissingColumn: Neither is there.
        SchemaError: One is NaN, zero or above 1.
    """
    if Columns.ACTION_LOGP in batch:
        name = Columns.ACTION_LOGP
        logp = to_numpy(batch[name]).astype(np.float64)
    elif Columns.ACTION_PROB in batch:
        name = Columns.ACTION_PROB
        values = to_numpy(batch[name]).astype(np.float64)
        if (values < 0).any():
            raise SchemaError(
                f"{values.min():.4g} is no probability: if these are logs, name the column action_logp",
                column=name,
            )
        with np.errstate(divide="ignore"):
            logp = np.log(values)
    else:
        raise MissingColumn(
            "rows do not say how likely their actions were, and it cannot be guessed: record with a policy "
            "whose "
            "extra columns are action_logp or action_prob, add the column (rlio.MappedInput), or use the "
            "direct "
            "method, which does without",
            column=Columns.ACTION_LOGP,
        )
    if logp.shape != (len(batch),):
        raise SchemaError(f"shape {logp.shape}: expected one number a row, ({len(batch)},)", column=name)
    _check_range(logp, name, densities)
    return logp


def _check_range(logp: NDArray[np.float64], name: str, densities: bool) -> None:
    for bad, why in (
        (np.isnan(logp), "is NaN"),
        (logp == np.inf, "is infinite"),
        (logp == -np.inf, "is zero, but the action was taken: the column is wrong, or of another policy"),
    ):
        if bad.any():
            row = int(bad.argmax())
            raise SchemaError(f"the probability of the action in row {row} of the batch {why}", column=name)
    if not densities and len(logp) and logp.max() > ROUNDING:
        row = int(logp.argmax())
        raise SchemaError(
            f"the action in row {row} of the batch has the probability {np.exp(min(logp[row], 700.0)):.4g}, "
            "above 1: "
            "these are densities, of actions that were continuous before something rounded them, and no "
            "probabilities of the actions that were logged",
            column=name,
        )


def read_rewards(batch: SampleBatch) -> NDArray[np.float64]:
    """The rewards, (N,) float64.

    Raises:
        MissingColumn: There are none.
        SchemaError: One is NaN or infinite.
    """
    if Columns.REWARDS not in batch:
        raise MissingColumn("rows have no rewards, which are what is estimated", column=Columns.REWARDS)
    rewards = to_numpy(batch[Columns.REWARDS]).astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(rewards))
    if len(wrong):
        raise SchemaError(
            f"the reward in row {wrong[0]} of the batch is {rewards[wrong[0]]}: leave such episodes out",
            column=Columns.REWARDS,
        )
    return rewards


def read_nested(batch: SampleBatch, name: str) -> Column:
    """Column ``name`` as arrays, nested as it is.

    Raises:
        MissingColumn: There is none.
    """
    if name not in batch:
        raise MissingColumn(f"rows have no {name}: the policy that is judged is asked about it", column=name)
    column: Column = map_structure(to_numpy, batch[name])
    return column
