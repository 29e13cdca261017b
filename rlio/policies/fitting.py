"""Checks that rows are values of a policy's spaces, with a named error before a module sees them.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box
    >>> Fit("obs", Box(-1.0, 1.0, (4,))).check(np.zeros((50, 6)))
    Traceback (most recent call last):
    ...
    rlio.errors.SchemaError: rows of shape (6,), expected (4,): ... [column obs]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlio.batch.arrays import to_numpy
from rlio.envs.leaves import Leaf, leaf_of, leaves_of
from rlio.errors import SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["Fit"]


class Fit:
    """Checks the rows of one column against the space that a policy was bound to.

    Args:
        column: Name of the column in messages.
        space: Space of one row.
    """

    def __init__(self, column: str, space: gym.Space[Any]) -> None:
        self._column, self._space = column, space
        self._leaves = [leaf for leaf in leaves_of(space) if not leaf.is_object]

    def check(self, rows: Any, *, numbers: bool = False) -> None:
        """Raise unless ``rows``, arrays or tensors nested like the space, have its shapes.

        Args:
            rows: (N, *shape) each.
            numbers: Whether to check Discrete and MultiDiscrete values too: values outside the space would be
                indexes outside a table.

        Raises:
            SchemaError: A shape differs, or a number is outside the space.
        """
        for leaf in self._leaves:
            part = leaf_of(rows, leaf.path) if leaf.path else rows
            if tuple(part.shape[1:]) != leaf.shape:
                raise self._misfit(leaf, f"rows of shape {tuple(part.shape[1:])}, expected {leaf.shape}")
            if numbers and len(part) and (beyond := _beyond(part, leaf)):
                raise self._misfit(leaf, beyond)

    def _misfit(self, leaf: Leaf, found: str) -> SchemaError:
        return SchemaError(
            f"{found}{leaf.place}: the policy is bound to {excerpt(str(self._space))}; bind it to the spaces "
            "of the data, or pass data of its spaces",
            column=self._column,
        )


def _beyond(part: Any, leaf: Leaf) -> str:
    """The message for numbers outside a space; "" if there are none, or the space has no range of numbers."""
    if leaf.choices is None:
        return ""
    start, count = np.array(leaf.choices).T
    rows = to_numpy(part).reshape(len(part), -1)
    least, most = rows.min(0), rows.max(0)
    if (least >= start).all() and (most < start + count).all():
        return ""
    return f"numbers from {least.tolist()} to {most.tolist()}"
