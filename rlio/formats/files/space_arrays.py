"""Restores the structure and dtypes of a gymnasium space in columns from text formats, which lose them.

Example:
    >>> import gymnasium as gym
    >>> space = gym.spaces.Dict(position=gym.spaces.Box(-1, 1, (2,)), mode=gym.spaces.Discrete(3))
    >>> column = fit_space({"position": [[0, 1], [1, 0]], "mode": [2, 0]}, space, np.array)
    >>> column["position"].dtype, column["mode"].tolist()
    (dtype('float32'), [2, 0])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.encoded_picture import row_type
from rlio.errors import SchemaError, excerpt
from rlio.support.spaces import Spaces

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["check_fits", "children_of", "fit_space", "space_of"]

Array: TypeAlias = NDArray[Any]


def space_of(spaces: Spaces | None, policy: str) -> dict[str, gym.Space[Any]]:
    """Column -> space for the batches of ``policy``; empty if the policy is unknown."""
    if isinstance(spaces, Mapping):
        pair = spaces.get(policy)
        if pair is None and policy == DEFAULT_POLICY_ID and len(spaces) == 1:
            (pair,) = spaces.values()
    else:
        pair = spaces
    if pair is None:
        return {}
    observation, action = pair
    return {
        Columns.OBS: observation,
        Columns.NEXT_OBS: observation,
        Columns.ACTIONS: action,
        Columns.PREV_ACTIONS: action,
    }


def fit_space(value: Any, space: gym.Space[Any], to_array: Callable[[Any], Array]) -> Any:
    """Convert ``value`` to columns of ``space``.

    Args:
        value: Lists or arrays with the rows first. For a Dict or Tuple space, the same nesting (a tuple may
            be a list), or one flat vector a row, as gymnasium's `flatten` makes them.
        space: Any space; spaces of objects (Text, Graph, Sequence, OneOf) give object arrays.
        to_array: Turns one leaf into an array, rows first.

    Raises:
        SchemaError: ``value`` has another structure or shape, or values that the dtype cannot hold.
    """
    import gymnasium as gym

    spaces = gym.spaces
    if isinstance(space, spaces.Dict):
        if isinstance(value, dict):
            if value.keys() != space.spaces.keys():
                raise SchemaError(f"found parts {sorted(value)} where the space has {sorted(space.spaces)}")
            return {key: fit_space(value[key], part, to_array) for key, part in space.spaces.items()}
        return _from_flat(to_array(value), space)
    if isinstance(space, spaces.Tuple):
        if (
            isinstance(value, (list, tuple))
            and len(value) == len(space.spaces)
            and not _is_flat(value, space)
        ):
            return tuple(
                fit_space(item, part, to_array) for item, part in zip(value, space.spaces, strict=True)
            )
        return _from_flat(to_array(value), space)
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        array = to_array(value)
        shape = space.shape or ()
        if array.shape[1:] == shape:
            return _cast(array, space.dtype)
        if array.ndim > 1 and np.prod(array.shape[1:]) == np.prod(shape):
            return _cast(array.reshape(len(array), *shape), space.dtype)
        return _from_flat(array, space)
    return value if isinstance(value, np.ndarray) else object_column(value)


def _is_flat(value: Any, space: gym.Space[Any]) -> bool:
    """Whether a list for a Tuple space holds flat rows instead of parts: all rows are vectors of one size."""
    import gymnasium as gym

    if not isinstance(space, gym.spaces.Tuple) or not space.is_np_flattenable:
        return False
    size = gym.spaces.flatdim(space)
    return all(
        isinstance(row, (list, np.ndarray)) and len(row) == size and np.ndim(row[0]) == 0 for row in value
    )


def _from_flat(array: Array, space: gym.Space[Any]) -> Any:
    """Undo gymnasium's `flatten` for all rows at once."""
    import gymnasium as gym

    spaces = gym.spaces
    size = gym.spaces.flatdim(space) if space.is_np_flattenable else -1
    if array.ndim != 2 or array.shape[1] != size:
        raise SchemaError(
            f"rows of shape {array.shape[1:]} and dtype {array.dtype} do not fit {excerpt(space)}"
        )
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = list(space.spaces.values()) if isinstance(space, spaces.Dict) else list(space.spaces)
        ends = np.cumsum([gym.spaces.flatdim(part) for part in parts])
        pieces = [
            _from_flat(piece, part) for piece, part in zip(np.split(array, ends[:-1], 1), parts, strict=True)
        ]
        if isinstance(space, spaces.Dict):
            return dict(zip(space.spaces, pieces, strict=True))
        return tuple(pieces)
    if isinstance(space, spaces.Discrete):
        return (_from_one_hot(array) + space.start).astype(space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        ends = np.cumsum(space.nvec.ravel())
        digits = np.stack([_from_one_hot(part) for part in np.split(array, ends[:-1], 1)], 1)
        return (digits.reshape(len(array), *space.shape) + space.start).astype(space.dtype)
    return _cast(array.reshape(len(array), *(space.shape or ())), space.dtype)


def _from_one_hot(array: Array) -> NDArray[np.int64]:
    if not (np.isin(array, (0, 1)).all() and (array.sum(1) == 1).all()):
        raise SchemaError(f"expected one-hot rows of {array.shape[1]}, found {excerpt(array[:2].tolist())}")
    return np.asarray(array.argmax(1), np.int64)


def _cast(array: Array, dtype: Any) -> Array:
    """``array`` as ``dtype``; raises SchemaError if values do not fit (floats may lose digits)."""
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf":
        raise SchemaError(f"dtype {array.dtype} where the space has {dtype}")
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(cast, array):
        raise SchemaError(f"the space's dtype {dtype} cannot hold the values {excerpt(array[:2].tolist())}")
    return cast


def children_of(space: Any) -> list[tuple[str | int, Any]] | None:
    """(key or position, space) of the parts of a Dict or Tuple; None: it is another space."""
    parts = getattr(space, "spaces", None)  # Of Dict, Tuple, and OneOf, which Minari has not.
    if parts is None:
        return None
    return list(parts.items() if isinstance(parts, Mapping) else enumerate(parts))


def check_fits(column: Any, space: Any, name: str) -> None:
    """Raise SchemaError unless the rows of ``column`` have the structure and shape of ``space``."""
    from gymnasium.spaces import Text

    children = children_of(space)
    if children is not None:
        parts = dict(enumerate(column)) if isinstance(column, tuple) else column
        if not isinstance(parts, dict) or parts.keys() != {key for key, _ in children}:
            raise SchemaError(
                f"the column has another structure than its space {excerpt(str(space))}", column=name
            )
        for key, child in children:
            check_fits(parts[key], child, name)
        return
    if isinstance(column, (dict, tuple)):
        raise SchemaError(f"found a nested column, expected {excerpt(str(space))}", column=name)
    if isinstance(space, Text):
        if not all(isinstance(row, str) for row in column):
            raise SchemaError("found no text where the space has text", column=name)
        return
    dtype, shape = row_type(column)
    if dtype.kind not in "biuf" or shape != space.shape:
        raise SchemaError(
            f"found {dtype} of shape {shape}, expected {space.dtype} of {space.shape}", column=name
        )
