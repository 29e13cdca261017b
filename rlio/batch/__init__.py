"""Batches of experience: `SampleBatch`, `MultiAgentBatch`, and functions that join, split and fill them.

Example:
    >>> batch = concat_samples([SampleBatch(obs=[1, 2], t=[0, 1]), SampleBatch(obs=[3], t=[2])])
    >>> batch
    SampleBatch(3 steps: obs int64 (3,), t int64 (3,))
    >>> batch[::2]["obs"]
    array([1, 3])
    >>> [len(part) for part in batch.timeslices(2)]
    [2, 1]
"""

from __future__ import annotations

from typing import TypeAlias

from rlio.batch.arrays import Column, object_column
from rlio.batch.concat import (
    concat_samples,
    concat_samples_into_ma_batch,
    convert_ma_batch_to_sample_batch,
    copy_into,
    count_units,
    split_units,
)
from rlio.batch.frames import in_c_order
from rlio.batch.multi_agent import MultiAgentBatch
from rlio.batch.sample_batch import SampleBatch

__all__ = [
    "Batch",
    "Column",
    "MultiAgentBatch",
    "SampleBatch",
    "concat_samples",
    "concat_samples_into_ma_batch",
    "convert_ma_batch_to_sample_batch",
    "copy_into",
    "count_units",
    "in_c_order",
    "object_column",
    "split_units",
]

Batch: TypeAlias = SampleBatch | MultiAgentBatch
