"""Advantages, value targets and n-step transitions of trajectories: arrays in, arrays out.

All functions take any number of consecutive trajectories at once; `trajectory_lengths` finds their ends. The
kind of end decides the bootstrapped value. After a termination, and if the final observation is missing, the
value is 0. After a truncation, and at the cut of a fragment, it is the value of the true final observation.

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
from rlio.batch.discounting import discount_cumsum, rows_after
from rlio.batch.nested import map_structure
from rlio.errors import MissingColumn, OptionError, SchemaError
from rlio.replay.n_step import NStep
from rlio.support.options import check_flag, check_number, set_options

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

#: The discount of a row's bootstrapped value, and whether it has one: the names of `rlio.ReplayStore`.
N_STEP_DISCOUNT = "n_step_discount"
BOOTSTRAP_MASK = "bootstrap_mask"
#: A standard deviation below this is rounding error.
_LEAST_STD = 1e-4


@dataclass(frozen=True)
class GAE:
    """How to estimate advantages.

    Attributes:
        gamma: Discount of a step, 0 to 1.
        lambda_: 0: advantages from the next step's value only; 1: from all rewards of the trajectory.
        use_critic: Whether there are values. Without values, advantages are the discounted future rewards,
            and nothing is bootstrapped.

    Raises:
        OptionError: A value is out of range.
    """

    gamma: float = 0.99
    # The value of most published PPO results. RLlib's 1.0 has no bias and much more variance.
    lambda_: float = 0.95
    use_critic: bool = True

    def __post_init__(self) -> None:
        set_options(
            self,
            gamma=check_number("gamma", self.gamma, least=0, most=1),
            lambda_=check_number("lambda_", self.lambda_, least=0, most=1),
            use_critic=check_flag("use_critic", self.use_critic),
        )


def trajectory_lengths(batch: SampleBatch) -> Rows:
    """Rows of each trajectory, or chunk of one, in ``batch``, in order.

    A trajectory ends where a row terminates or truncates, and where the next row belongs to another episode
    or agent, or is not later in its episode.

    Raises:
        SchemaError: The batch is padded.
    """
    if batch.zero_padded:
        raise SchemaError("padded rows are not a trajectory: unpad() the batch first")
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


def bootstrapped_values(
    batch: SampleBatch, lengths: Rows, value_after: Callable[[Rows], NDArray[Any]]
) -> NDArray[np.float32]:
    """The value of the observation after each row: the expected return from there.

    Args:
        batch: With ``vf_preds`` and ``terminateds``.
        lengths: From `trajectory_lengths`.
        value_after: Row numbers -> the values of their ``new_obs``. Called once, for the last rows of
            truncated or cut trajectories.

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
    """The rows whose next observation is known and not terminal."""
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
        batch: Consecutive trajectories, or chunks of them: ``rewards`` and, with a critic, ``vf_preds``,
            ``terminateds`` and ``new_obs``.
        options: The parameters.
        value_after: As in `bootstrapped_values`; needed with a critic.

    Returns:
        A batch that shares the other columns. The new columns are float32, shape (N,). Without a critic, only
        ``advantages`` is new.

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
        raise OptionError(
            "advantages with a critic need value_after, a function: pass one, or GAE(use_critic=False)"
        )
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

    ``rewards`` become the discounted sum over the next n steps. ``new_obs``, ``new_obs_valid``,
    ``terminateds`` and ``truncateds`` become those of the last of these steps. If fewer steps follow, the
    window is shorter. ``n_step_discount``, gamma to the power of the steps, is the discount of the value
    after the window. ``bootstrap_mask`` is 0 after a termination and if the final observation is missing,
    else 1. `rlio.ReplayStore` gives the same columns for rows that were stored unchanged.

    Returns:
        A batch that shares the other columns.

    Raises:
        MissingColumn: A column is absent.
        SchemaError: The rows are n-step transitions already.
    """
    if N_STEP_DISCOUNT in batch:
        raise SchemaError("these are n-step transitions already", column=N_STEP_DISCOUNT)
    new_obs, rewards = _column(batch, Columns.NEXT_OBS), to_numpy(_column(batch, Columns.REWARDS))
    mask = _goes_on(batch)
    after = rows_after(trajectory_lengths(batch))
    steps = np.minimum(after + 1, step.n)
    last = np.arange(len(batch)) + steps - 1
    total = rewards.astype(np.float64)
    for ahead in range(1, min(step.n, int(after.max(initial=0)) + 1)):
        total[:-ahead] += np.where(after[:-ahead] >= ahead, step.gamma**ahead * rewards[ahead:], 0.0)
    made = batch.copy(shallow=True)
    # Discounted sums of whole numbers are not whole.
    made[Columns.REWARDS] = total.astype(rewards.dtype if rewards.dtype.kind == "f" else np.float32)
    made[Columns.NEXT_OBS] = map_structure(lambda leaf: take_leaf(leaf, last), new_obs)
    for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.NEXT_OBS_VALID):
        if name in batch:
            made[name] = to_numpy(batch[name])[last]
    made[N_STEP_DISCOUNT] = np.power(step.gamma, steps).astype(np.float32)
    made[BOOTSTRAP_MASK] = mask[last].astype(np.float32)
    return made


def standardize_fields(batch: BatchT, fields: Collection[str]) -> BatchT:
    """Scale columns to mean 0 and standard deviation 1, for each policy separately.

    Returns:
        A batch that shares the other columns.

    Raises:
        MissingColumn: A column is absent.
        OptionError: ``fields`` is one str.
    """
    if isinstance(fields, str):
        raise OptionError(f"standardize_fields={fields!r}: expected a list of columns, such as [{fields!r}]")
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
