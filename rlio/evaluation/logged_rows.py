"""`LoggedRows`: the checked columns of a batch that estimators use.

This module refuses rows without probabilities of their actions, and impossible values.

Example:
    >>> from rlio.batch import SampleBatch
    >>> read_log_probabilities(SampleBatch(action_prob=[0.5, 0.25]), densities=False).round(2).tolist()
    [-0.69, -1.39]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.arrays import Column, to_numpy
from rlio.batch.columns import AGENT_ID, Columns
from rlio.batch.nested import map_structure
from rlio.batch.probabilities import ROUNDING, contradicting
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt

__all__ = ["NO_AGENT", "LoggedRows", "StepNumbers", "read_log_probabilities", "rows_of"]

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


def read_log_probabilities(batch: SampleBatch, *, densities: bool) -> NDArray[np.float64]:
    """Return the log of the probability of each action: ``action_logp``, or log of ``action_prob``.

    Args:
        batch: The rows.
        densities: Whether values may be above 1.

    Returns:
        (N,) float64, all finite.

    Raises:
        MissingColumn: Both columns are absent.
        SchemaError: A value is NaN, zero or above 1, or the two columns contradict each other.
    """
    names = (Columns.ACTION_LOGP, Columns.ACTION_PROB)
    found = {name: _read_numbers(batch, name) for name in names if name in batch}
    if not found:
        raise MissingColumn(
            "rows do not say how likely their actions were: record with a policy whose extra columns are "
            "action_logp or action_prob, add the column (rlio.MappedInput), or use the direct method, "
            "which does not need it",
            column=Columns.ACTION_LOGP,
        )
    logs = {name: _logs_of(name, values) for name, values in found.items()}
    for name, logp in logs.items():
        _check_range(batch, logp, name, densities)
    if len(found) == 2:
        _check_agreement(batch, found[Columns.ACTION_LOGP], found[Columns.ACTION_PROB])
    name, logp = next(iter(logs.items()))
    for bad, why in (
        (logp == np.inf, "is infinite"),
        (logp == -np.inf, "is zero, but the action was taken: the column is wrong, or is of another policy"),
    ):
        if bad.any():
            raise SchemaError(f"the probability of the action in {_row(batch, bad)} {why}", column=name)
    return logp


def _row(batch: SampleBatch, wrong: NDArray[np.bool_]) -> str:
    """Where the first of the ``wrong`` rows is: readers cut a data set into batches of their own size."""
    row = int(wrong.argmax())
    keys = [
        f"{name} {excerpt(to_numpy(batch[name])[row].item())}"
        for name in (Columns.EPS_ID, Columns.T)
        if name in batch
    ]
    return f"row {row} of the batch" + (f" ({', '.join(keys)})" if keys else "")


def _read_numbers(batch: SampleBatch, name: str) -> NDArray[Any]:
    values = map_structure(to_numpy, batch[name])
    if isinstance(values, np.ndarray) and values.shape == (len(batch),) and values.dtype.kind in "iuf":
        return values
    found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else "a nested column"
    raise SchemaError(
        f"found {found}: expected one number per row, real numbers of shape ({len(batch)},)", column=name
    )


def _logs_of(name: str, values: NDArray[Any]) -> NDArray[np.float64]:
    numbers = values.astype(np.float64)
    if name == Columns.ACTION_LOGP:
        return numbers
    if (numbers < 0).any():
        raise SchemaError(
            f"{numbers.min():.4g} is not a probability: if these are logs, name the column action_logp",
            column=name,
        )
    with np.errstate(divide="ignore"):
        return np.log(numbers)


def _check_range(batch: SampleBatch, logp: NDArray[np.float64], name: str, densities: bool) -> None:
    if np.isnan(logp).any():
        where = _row(batch, np.isnan(logp))
        raise SchemaError(f"the probability of the action in {where} is NaN", column=name)
    if not densities and len(logp) and logp.max() > ROUNDING:
        most = np.exp(min(logp.max(), 700.0))
        raise SchemaError(
            f"the action in {_row(batch, logp == logp.max())} has the probability {most:.4g}, "
            "above 1: the column has densities of continuous actions that were rounded later, not "
            "probabilities of the logged actions",
            column=name,
        )


def _check_agreement(batch: SampleBatch, logp: NDArray[Any], prob: NDArray[Any]) -> None:
    wrong = contradicting(logp, prob)
    rows = np.flatnonzero(wrong)
    if len(rows):
        first = rows[0]
        raise SchemaError(
            f"action_logp and action_prob contradict each other in {len(rows)} of {len(logp)} rows of the "
            f"batch, rows {', '.join(map(str, rows[:5]))}{', ...' if len(rows) > 5 else ''}: in "
            f"{_row(batch, wrong)}, action_logp is {logp[first]:.6g}, but the log of action_prob "
            f"{prob[first]:.6g} is {_log(prob[first]):.6g}. Remove the wrong column, for example with "
            "rlio.MappedInput",
            column=Columns.ACTION_LOGP,
        )


def _log(prob: Any) -> float:
    return math.log(prob) if prob > 0 else -math.inf


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
