"""The input of a policy for one step, taken from a batch of earlier steps.

Example:
    >>> from rlio.batch import SampleBatch
    >>> batch = SampleBatch(obs=[[1.0], [2.0]], new_obs=[[2.0], [3.0]], actions=[5, 6])
    >>> single_step_inputs(batch, {"obs": ("obs", 0), "prev_actions": ("actions", -1)})
    {'obs': array([[3.]]), 'prev_actions': array([6])}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlio.batch.arrays import Column, concat_leaves, row_count, take_leaf, zero_leaf
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.nested import map_structure
from rlio.errors import MissingColumn, OptionError, SchemaError

if TYPE_CHECKING:
    from rlio.batch.sample_batch import SampleBatch

__all__ = ["single_step_inputs"]


def single_step_inputs(
    batch: SampleBatch,
    view_requirements: Mapping[str, tuple[str, int | Sequence[int]]],
    index: int | Literal["last"] = "last",
) -> dict[str, Column]:
    """Build the input, one row, for a step; see `SampleBatch.get_single_step_input_dict`."""
    if Columns.SEQ_LENS in batch:
        raise SchemaError(
            "inputs for a step need a batch of steps, but this batch has seq_lens: select its rows first"
        )
    steps = len(batch)
    step = steps if index == "last" else index
    if not 0 <= step <= steps:
        raise OptionError(
            f"index={index!r}: expected 'last', or a step from 0 to {steps}, the number of steps"
        )
    inputs: dict[str, Column] = {}
    for name, (column, shift) in view_requirements.items():
        shifts = [shift] if isinstance(shift, int) else list(shift)
        parts = [_step(batch, column, step + by) for by in shifts]
        if isinstance(shift, int):
            inputs[name] = parts[0]
        else:
            inputs[name] = map_structure(
                lambda *rows: concat_leaves([row[None] for row in rows], axis=1), *parts
            )
    if any(is_per_sequence(name) for name in inputs):
        inputs[Columns.SEQ_LENS] = np.ones(1, np.int32)
    return inputs


def _step(batch: SampleBatch, column: str, position: int) -> Column:
    """Row ``position`` of ``column``: zeros before the first row; for obs, one row past the last step too."""
    values = batch[column]
    steps = len(batch)
    if position == steps and column == Columns.OBS:
        valid = batch.get(Columns.NEXT_OBS_VALID)
        if not steps or Columns.NEXT_OBS not in batch or (valid is not None and not valid[-1]):
            raise MissingColumn(
                f"the observation after the last of {steps} steps is not known: it would end new_obs",
                column=Columns.NEXT_OBS,
            )
        values, position = batch[Columns.NEXT_OBS], steps - 1
    elif position >= steps:
        raise OptionError(f"step {position} of column {column!r} lies ahead: the batch has {steps} steps")

    def select(leaf: Any) -> Any:
        return zero_leaf(leaf, 1) if position < 0 else take_leaf(leaf, np.array([position]))

    return map_structure(select, values) if row_count(values) is not None else values
