"""What a scan of a shard hands to the checks: rows by policy, and which of them are live."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.schemas.schema import Schema

__all__ = ["Part", "Rows", "flat_column"]


@dataclass(frozen=True)
class Part:
    """The rows of one policy in a row group or line.

    Attributes:
        policy: Its id.
        rows: Which rows of the group these are, ascending.
        batch: Their columns, in that order.
    """

    policy: str
    rows: NDArray[np.int64]
    batch: SampleBatch


@dataclass(frozen=True)
class Rows:
    """An intact row group or line.

    Attributes:
        record: Its number, as errors and findings count them.
        first: Row within the shard of its first row.
        count: Its rows.
        parts: Those, by policy.
    """

    record: int
    first: int
    count: int
    parts: list[Part]


def flat_column(schema: Schema, part: Part, column: str) -> NDArray[np.generic] | None:
    """A column with one value a row that is not nested; None where the policy has none such."""
    leaves = schema.policies[part.policy].columns.get(column, [])
    if len(leaves) != 1 or leaves[0].path or leaves[0].spec.shape:
        return None
    values = to_numpy(part.batch[column])
    return values if len(values) == len(part.rows) else None
