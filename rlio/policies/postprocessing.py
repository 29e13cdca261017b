"""Advantages, value targets and n-step transitions of trajectories: arrays in, arrays out.

All functions take any number of trajectories, one after the other, at once; `trajectory_lengths` says where
they end. What is known of the end decides what is bootstrapped: nothing after a termination, nor where the
final observation is missing; the value of the true final observation after a truncation, and where a fragment
was cut.

Example:
    >>> import numpy as np
    >>> discount_cumsum(np.array([1.0, 1.0, 1.0, 5.0]), 0.5, lengths=np.array([3, 1])).tolist()
    [1.75, 1.5, 1.0, 5.0]
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.arrays import take_leaf, to_numpy
from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.replay.n_step import NStep

__all__ = [
    "BOOTSTRAP_MASK",
    "GAE",
    "N_STEP_DISCOUNT",
    "NStep",
    "adjust_nstep",
    "bootstrapped_values",
    "compute_gae",
    "discount_cumsum",
    "standardize_fields",
    "trajectory_lengths",
]

Rows: TypeAlias = NDArray[np.int64]
BatchT = TypeVar("BatchT", SampleBatch, MultiAgentBatch)

#: Discount of what a row bootstraps from, and whether it does: as `rlio.ReplayStore` names them.
N_STEP_DISCOUNT = "n_step_discount"
BOOTSTRAP_MASK = "bootstrap_mask"
#: Below this, a standard deviation is rounding.
_LEAST_STD = 1e-4


@dataclass(frozen=True)
class GAE:
    """How advantages are estimated.

    Attributes:
        gamma: Discount of a step, 0 to 1.
        lambda_: 0: advantages by the next step's value alone; 1: by all rewards of the trajectory.
        use_critic: Whether there are values. Without them advantages are the discounted rewards to come, and
            nothing is bootstrapped.

    Raises:
        OptionError: A value is out of range.
    """

    gamma: float = 0.99
    # What most published results with PPO use; RLlib's 1.0 has no bias and much more variance.
    lambda_: float = 0.95
    use_critic: bool = True

    def __post_init__(self) -> None:
        for name in ("gamma", "lambda_"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise OptionError(f"{name}={excerpt(getattr(self, name))}: from 0 to 1")


def trajectory_lengths(batch: SampleBatch) -> Rows:
    """Rows of each trajectory, or chunk of one, in ``batch``, in order.

    One ends where a row terminates or truncates, and where the next row is of another episode or agent, or
    not later in its episode.

    Raises:
        SchemaError: The batch is padded.
    """
    if batch.zero_padded:
        raise SchemaError("padded rows are no trajectory: unpad() the batch first")
    rows = len(batch)
    starts = np.zeros(rows + 1, bool)
    starts[[0, rows]] = True
    inner = starts[1:rows]
    ids = Columns.EPS_ID if Columns.EPS_ID in batch else Columns.UNROLL_ID
    for name in (ids, Columns.AGENT_INDEX, "agent_id", Columns.ENV_ID):
        if name in batch:
            values = to_numpy(batch[name])
            inner |= values[1:] != values[:-1]
    if Columns.T in batch:
        times = to_numpy(batch[Columns.T])
        inner |= times[1:] <= times[:-1]
    for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS):
        if name in batch:
            inner |= to_numpy(batch[name])[:-1].astype(bool)
    return np.diff(np.flatnonzero(starts)) if rows else np.zeros(0, np.int64)


def _rows_after(lengths: Rows) -> Rows:
    """How many rows of its trajectory follow each row."""
    ends = np.cumsum(lengths)
    after: Rows = np.repeat(ends, lengths) - np.arange(int(lengths.sum())) - 1
    return after


def discount_cumsum(
    values: NDArray[Any], gamma: float, *, lengths: Rows | None = None
) -> NDArray[np.float64]:
    """``y[t] = values[t] + gamma * y[t + 1]`` within each trajectory.

    In log2(longest trajectory) passes over all rows, each of which doubles how far rows have looked ahead.

    Args:
        values: Shape (N,).
        gamma: Discount of a step.
        lengths: Rows of the trajectories; None: there is one.

    Returns:
        Shape (N,), in fresh memory.

    Raises:
        SchemaError: ``lengths`` do not add up to N.
    """
    total = np.array(values, np.float64)
    lengths = np.array([len(total)]) if lengths is None else lengths
    if total.ndim != 1 or int(lengths.sum()) != len(total):
        raise SchemaError(
            f"trajectories of {int(lengths.sum())} rows in all, but values of shape {total.shape}"
        )
    after = _rows_after(lengths)
    reach, factor = 1, float(gamma)
    while factor and reach <= int(after.max(initial=0)):
        more = np.where(after[:-reach] >= reach, factor * total[reach:], 0.0)
        total[:-reach] += more
        reach, factor = 2 * reach, factor * factor
    return total


def bootstrapped_values(
    batch: SampleBatch, lengths: Rows, value_after: Callable[[Rows], NDArray[Any]]
) -> NDArray[np.float32]:
    """The value of the observation after each row: what is left to be had from there.

    Args:
        batch: With ``vf_preds`` and ``terminateds``.
        lengths: Of `trajectory_lengths`.
        value_after: Given numbers of rows, the values of their ``new_obs``. It is asked once, for the last
            rows of those trajectories that go on: truncated, or cut.

    Returns:
        Shape (N,): 0 after a termination, and where the final observation is missing (``new_obs_valid``).

    Raises:
        MissingColumn: A column is absent.
    """
    values = to_numpy(_column(batch, Columns.VF_PREDS))
    after = np.zeros(len(values), np.float32)
    after[:-1] = values[1:]
    last = np.cumsum(lengths) - 1
    after[last] = 0.0
    goes_on = last[_goes_on(batch)[last]]
    if len(goes_on):
        _column(batch, Columns.NEXT_OBS)
        after[goes_on] = value_after(goes_on)
    return after


def _goes_on(batch: SampleBatch) -> NDArray[np.bool_]:
    """Which rows have a known observation after them that is not the end."""
    mask = ~to_numpy(_column(batch, Columns.TERMINATEDS)).astype(bool)
    if Columns.NEXT_OBS_VALID in batch:
        mask &= to_numpy(batch[Columns.NEXT_OBS_VALID]).astype(bool)
    return mask


def compute_gae(
    batch: SampleBatch, options: GAE, value_after: Callable[[Rows], NDArray[Any]] | None = None
) -> SampleBatch:
    """Add ``advantages``, ``value_targets`` and ``values_bootstrapped`` to trajectories.

        delta_t = r_t + gamma * V(s_(t+1)) - V(s_t)
        A_t = delta_t + gamma * lambda * A_(t+1)
        target_t = A_t + V(s_t)

    Args:
        batch: Trajectories, or chunks of them, one after the other: ``rewards`` and, with a critic,
            ``vf_preds``, ``terminateds`` and ``new_obs``.
        options: The numbers.
        value_after: As in `bootstrapped_values`; needed with a critic.

    Returns:
        A batch that shares the other columns; the new ones are float32, shape (N,). Without a critic it has
        ``advantages`` alone.

    Raises:
        MissingColumn: A column is absent.

    Source: Schulman et al., "High-dimensional continuous control using generalized advantage estimation"
    (2016).
    """
    made = batch.copy(shallow=True)
    if not len(batch):
        return made
    lengths = trajectory_lengths(batch)
    rewards = to_numpy(_column(batch, Columns.REWARDS)).astype(np.float64)
    if not options.use_critic:
        made[Columns.ADVANTAGES] = discount_cumsum(rewards, options.gamma, lengths=lengths).astype(np.float32)
        return made
    if value_after is None:
        raise OptionError("advantages with a critic need value_after, which gives values of observations")
    values = to_numpy(_column(batch, Columns.VF_PREDS)).astype(np.float64)
    after = bootstrapped_values(batch, lengths, value_after)
    deltas = rewards + options.gamma * after - values
    advantages = discount_cumsum(deltas, options.gamma * options.lambda_, lengths=lengths)
    made[Columns.VALUES_BOOTSTRAPPED] = after
    made[Columns.ADVANTAGES] = advantages.astype(np.float32)
    made[Columns.VALUE_TARGETS] = (advantages + values).astype(np.float32)
    return made


def adjust_nstep(batch: SampleBatch, step: NStep) -> SampleBatch:
    """Turn transitions into n-step transitions, within each trajectory.

    ``rewards`` become the discounted sum over the next n steps, and ``new_obs``, ``new_obs_valid``,
    ``terminateds`` and ``truncateds`` those of the last of them. Where fewer follow, the window is shorter:
    ``n_step_discount``, gamma to the power of its steps, says how much what comes after it counts, and
    ``bootstrap_mask`` (0 after a termination and where the final observation is missing) whether. They are
    the columns of `rlio.ReplayStore`, which does the same to rows that were stored as they are.

    Returns:
        A batch that shares the other columns.

    Raises:
        MissingColumn: A column is absent.
        SchemaError: These are n-step transitions already.
    """
    if N_STEP_DISCOUNT in batch:
        raise SchemaError("these are n-step transitions already", column=N_STEP_DISCOUNT)
    new_obs, rewards = _column(batch, Columns.NEXT_OBS), to_numpy(_column(batch, Columns.REWARDS))
    mask = _goes_on(batch)
    after = _rows_after(trajectory_lengths(batch))
    steps = np.minimum(after + 1, step.n)
    last = np.arange(len(batch)) + steps - 1
    total = rewards.astype(np.float64)
    for ahead in range(1, min(step.n, int(after.max(initial=0)) + 1)):
        total[:-ahead] += np.where(after[:-ahead] >= ahead, step.gamma**ahead * rewards[ahead:], 0.0)
    made = batch.copy(shallow=True)
    # Discounted sums of whole numbers are none.
    made[Columns.REWARDS] = total.astype(rewards.dtype if rewards.dtype.kind == "f" else np.float32)
    made[Columns.NEXT_OBS] = map_structure(lambda leaf: take_leaf(leaf, last), new_obs)
    for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.NEXT_OBS_VALID):
        if name in batch:
            made[name] = to_numpy(batch[name])[last]
    made[N_STEP_DISCOUNT] = np.power(step.gamma, steps).astype(np.float32)
    made[BOOTSTRAP_MASK] = mask[last].astype(np.float32)
    return made


def standardize_fields(batch: BatchT, fields: Collection[str]) -> BatchT:
    """Bring columns to mean 0 and standard deviation 1, each policy's by itself.

    Returns:
        A batch that shares the other columns.

    Raises:
        MissingColumn: A column is absent.
    """
    if isinstance(batch, MultiAgentBatch):
        parts = {policy_id: standardize_fields(rows, fields) for policy_id, rows in batch.items()}
        return MultiAgentBatch(parts, batch.env_steps())
    made = batch.copy(shallow=True)
    for name in fields:
        values = to_numpy(_column(batch, name))
        if len(values):
            made[name] = ((values - values.mean()) / max(_LEAST_STD, float(values.std()))).astype(np.float32)
    return made


def _column(batch: SampleBatch, name: str) -> Any:
    if name not in batch:
        raise MissingColumn("postprocessing needs it: sample or read it too", column=name)
    return batch[name]
