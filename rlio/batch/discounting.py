"""Discounted sums along trajectories.

Example:
    >>> discount_cumsum(np.array([1.0, 1.0, 1.0, 5.0]), 0.5, lengths=np.array([3, 1])).tolist()
    [1.75, 1.5, 1.0, 5.0]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.errors import SchemaError

__all__ = ["discount_cumsum", "rows_after"]


def rows_after(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of later rows in its trajectory, for each row."""
    ends = np.cumsum(lengths)
    after: NDArray[np.int64] = np.repeat(ends, lengths) - np.arange(int(lengths.sum())) - 1
    return after


def discount_cumsum(
    values: NDArray[Any], gamma: float, *, lengths: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """``y[t] = values[t] + gamma * y[t + 1]`` within each trajectory.

    Takes log2(longest trajectory) passes over all rows; each doubles the number of steps that rows look
    ahead.

    Args:
        values: Shape (N,).
        gamma: Discount of a step.
        lengths: Rows of the trajectories; None: one trajectory.

    Returns:
        Shape (N,), in new memory.

    Raises:
        SchemaError: The sum of ``lengths`` is not N.
    """
    total = np.array(values, np.float64)
    lengths = np.array([len(total)]) if lengths is None else lengths
    if total.ndim != 1 or int(lengths.sum()) != len(total):
        raise SchemaError(
            f"found trajectories of {int(lengths.sum())} rows in all, but values of shape {total.shape}"
        )
    after = rows_after(lengths)
    reach, factor = 1, float(gamma)
    while factor and reach <= int(after.max(initial=0)):
        more = np.where(after[:-reach] >= reach, factor * total[reach:], 0.0)
        total[:-reach] += more
        reach, factor = 2 * reach, factor * factor
    return total
