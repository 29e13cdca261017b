"""Batches of experience: `SampleBatch`, `MultiAgentBatch`, and the functions that join, split and fill them.

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

from rlio.arrays import Column, object_column
from rlio.joining import (
    concat_samples,
    concat_samples_into_ma_batch,
    convert_ma_batch_to_sample_batch,
    copy_into,
    count_units,
    split_units,
)
from rlio.multi_agent import MultiAgentBatch
from rlio.sample_batch import SampleBatch

__all__ = [
    "Column",
    "MultiAgentBatch",
    "SampleBatch",
    "concat_samples",
    "concat_samples_into_ma_batch",
    "convert_ma_batch_to_sample_batch",
    "copy_into",
    "count_units",
    "object_column",
    "split_units",
]
