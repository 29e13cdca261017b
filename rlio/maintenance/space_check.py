"""Which rows lie outside of a gymnasium space, for all rows of a column at once.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Discrete
    >>> rows_outside(Discrete(3), np.array([0, 2, 3])).rows.tolist()
    [False, False, True]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.arrays import to_numpy

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["Misfit", "Outside", "rows_outside"]


class Misfit(Exception):
    """Values of another structure, shape or kind than the space's."""


@dataclass(frozen=True)
class Outside:
    """Which rows are outside.

    Attributes:
        rows: Of any part of the space.
        beyond_discrete: Of a part that is no Box: there is no reading under which these are legal.
    """

    rows: NDArray[np.bool_]
    beyond_discrete: NDArray[np.bool_]


def rows_outside(space: gym.Space[Any], value: Any) -> Outside:
    """Compare a column with a space. NaN is in no Box.

    Args:
        space: Of one row.
        value: Arrays with the rows first, nested where the space is; objects for spaces of those.

    Raises:
        Misfit: No row of this type can be in the space.
    """
    import gymnasium as gym

    spaces = gym.spaces
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            raise Misfit(f"{_nesting(value)} where the space has {sorted(space.spaces)}")
        return _joined([rows_outside(part, value[key]) for key, part in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            raise Misfit(f"{_nesting(value)} where the space has {len(space.spaces)} parts")
        return _joined([rows_outside(part, item) for part, item in zip(space.spaces, value, strict=True)])
    if isinstance(value, dict | tuple):
        raise Misfit(f"{_nesting(value)} where the space is {type(space).__name__}")
    array = to_numpy(value)
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        if array.dtype.kind not in "biuf" or array.shape[1:] != (space.shape or ()):
            raise Misfit(f"{array.dtype} rows of shape {array.shape[1:]} where the space has {space.shape}")
        inside = _any_value(_inside(space, array))
        outside = ~inside
        return Outside(outside, np.zeros_like(outside) if isinstance(space, spaces.Box) else outside)
    if array.dtype.kind not in "OUS":
        raise Misfit(f"{array.dtype} where the space is {type(space).__name__}")
    odd = np.array([not _contains(space, row) for row in array.tolist()], bool)
    return Outside(odd, odd)


def _inside(space: Any, array: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each value is within the bounds."""
    import gymnasium as gym

    if isinstance(space, gym.spaces.Box):
        return np.asarray((array >= space.low) & (array <= space.high))
    if isinstance(space, gym.spaces.MultiBinary):
        return np.asarray((array == 0) | (array == 1))
    start = space.start
    stop = start + (space.n if isinstance(space, gym.spaces.Discrete) else space.nvec)
    within = (array >= start) & (array < stop)
    return np.asarray(within & (array == np.floor(array)) if array.dtype.kind == "f" else within)


def _any_value(inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows all of whose values are inside."""
    return np.asarray(inside.all(axis=tuple(range(1, inside.ndim))))


def _contains(space: gym.Space[Any], row: Any) -> bool:
    """Whether the space has the object; stored graphs come back as plain tuples."""
    import gymnasium as gym

    if isinstance(space, gym.spaces.Graph) and isinstance(row, tuple) and len(row) == 3:
        row = gym.spaces.GraphInstance(*row)
    if isinstance(row, bytes):
        row = row.decode("utf-8", "replace")
    try:
        return bool(space.contains(row))
    except (TypeError, ValueError, AttributeError, AssertionError, IndexError):
        return False  # What gymnasium trips over is not one of its elements.


def _joined(parts: list[Outside]) -> Outside:
    if not parts:
        raise Misfit("a space of no parts")
    return Outside(
        np.logical_or.reduce([part.rows for part in parts]),
        np.logical_or.reduce([part.beyond_discrete for part in parts]),
    )


def _nesting(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {sorted(value)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else "one array"
