"""Converts actions between a policy and an environment: clipping, and scaling to and from [-1, 1].

Functions work on arrays of actions with any leading axes, nested if the space is. `ClipActions` and
`NormalizeActions` do the same to a batch, for `MappedInput`.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box
    >>> space = Box(-2.0, 4.0, (1,), np.float32)
    >>> unsquash_actions(np.array([[-1.0], [0.0], [3.0]], np.float32), space).ravel().tolist()
    [-2.0, 1.0, 4.0]
    >>> normalize_actions(np.array([[1.0], [4.0]], np.float32), space).ravel().tolist()
    [0.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import MissingColumn, SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.spaces import Box

__all__ = [
    "ClipActions",
    "NormalizeActions",
    "clip_actions",
    "has_boxes",
    "normalize_actions",
    "unsquash_actions",
]

BatchT = TypeVar("BatchT", bound=SampleBatch | MultiAgentBatch)

# Any: arrays, or dicts and tuples of them, with the structure of the space.


def clip_actions(actions: Any, space: gym.Space[Any]) -> Any:
    """Clip ``actions`` of Box spaces to their bounds.

    Args:
        actions: Arrays of shape (..., *shape of the space), nested if the space is.
        space: The space of one action.

    Returns:
        Fresh arrays of the same dtypes for Box spaces; actions of other spaces are returned as they are.

    Raises:
        SchemaError: ``actions`` are not nested like ``space``, or a shape does not fit.
    """
    return _map_boxes(_clip, actions, space, ())


def unsquash_actions(actions: Any, space: gym.Space[Any]) -> Any:
    """Scale ``actions`` from [-1, 1] to the bounds of ``space``, and clip them to the bounds.

    ``low + (action + 1) (high - low) / 2``, for each number of a floating-point Box with two finite bounds;
    other numbers, integer Boxes and other spaces are unchanged.

    Args:
        actions: As in `clip_actions`.
        space: The space of one action.

    Returns:
        Fresh arrays in the dtypes of ``actions`` for Box spaces.

    Raises:
        SchemaError: As in `clip_actions`.
    """
    return _map_boxes(partial(_scaled, _unsquash), actions, space, ())


def normalize_actions(actions: Any, space: gym.Space[Any]) -> Any:
    """Scale ``actions`` from the bounds of ``space`` to [-1, 1]: the inverse of `unsquash_actions`.

    ``2 (action - low) / (high - low) - 1``, for the same numbers, without clipping. If low equals high, the
    result is 0.
    """
    return _map_boxes(partial(_scaled, _normalize), actions, space, ())


def has_boxes(space: gym.Space[Any]) -> bool:
    """Whether clipping can change actions of ``space``: whether the space contains a Box."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return any(has_boxes(child) for child in space.spaces.values())
    if isinstance(space, spaces.Tuple):
        return any(has_boxes(child) for child in space.spaces)
    return isinstance(space, spaces.Box)


def _map_boxes(
    fn: Callable[[Any, Box], Any], actions: Any, space: gym.Space[Any], path: tuple[Any, ...]
) -> Any:
    """Apply ``fn`` to the arrays of Box spaces; return the rest as it is."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        if not isinstance(actions, dict) or actions.keys() != space.spaces.keys():
            raise _unlike(actions, f"a dict of {sorted(space.spaces)}", path)
        return {key: _map_boxes(fn, actions[key], child, (*path, key)) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(actions, tuple) or len(actions) != len(space.spaces):
            raise _unlike(actions, f"a tuple of {len(space.spaces)}", path)
        return tuple(
            _map_boxes(fn, part, child, (*path, i))
            for i, (part, child) in enumerate(zip(actions, space.spaces, strict=True))
        )
    if not isinstance(space, spaces.Box):
        return actions
    if not isinstance(actions, np.ndarray) or actions.shape[actions.ndim - len(space.shape) :] != space.shape:
        raise _unlike(actions, f"an array of shape (..., {', '.join(map(str, space.shape))})", path)
    return fn(actions, space)


def _unlike(found: Any, expected: str, path: tuple[Any, ...]) -> SchemaError:
    what = f"an array of shape {found.shape}" if isinstance(found, np.ndarray) else excerpt(found)
    place = f" at {'/'.join(map(str, path))}" if path else ""
    return SchemaError(f"actions{place} are {what}, but their space wants {expected}")


def _clip(actions: Any, space: Box) -> Any:
    # Bounds of another dtype would promote the result.
    return np.clip(actions, space.low, space.high).astype(actions.dtype, copy=False)


def _scaled(formula: Callable[[Any, Any, Any], Any], actions: Any, space: Box) -> Any:
    """Apply ``formula`` of (actions, low, high) to numbers with two finite bounds in floating-point Boxes."""
    if space.dtype is None or space.dtype.kind != "f":
        return actions
    finite = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(finite, space.low, 0.0), np.where(finite, space.high, 1.0)
    return np.where(finite, formula(actions, low, high), actions).astype(actions.dtype, copy=False)


def _unsquash(actions: Any, low: Any, high: Any) -> Any:
    return np.clip(low + (actions + 1.0) * (high - low) / 2.0, low, high)


def _normalize(actions: Any, low: Any, high: Any) -> Any:
    width = high - low
    return np.where(width > 0, 2.0 * (actions - low) / np.where(width > 0, width, 1.0) - 1.0, 0.0)


@dataclass(frozen=True)
class ClipActions:
    """Clips a batch's ``actions`` to the bounds of ``space``: a function for `MappedInput`.

    Attributes:
        space: The action space, of every policy if the batch is a MultiAgentBatch.
    """

    space: gym.Space[Any]

    def __call__(self, batch: BatchT) -> BatchT:
        """Return ``batch`` with clipped actions; other columns are shared, ``batch`` is not changed."""
        return _with_actions(batch, lambda actions: clip_actions(actions, self.space))


@dataclass(frozen=True)
class NormalizeActions:
    """Scales a batch's ``actions`` from the bounds of ``space`` to [-1, 1]: a function for `MappedInput`.

    Use it if logged actions are in the environment's units and the policy gives normalised ones.

    Attributes:
        space: The action space, of every policy if the batch is a MultiAgentBatch.
    """

    space: gym.Space[Any]

    def __call__(self, batch: BatchT) -> BatchT:
        """Return ``batch`` with normalised actions; other columns are shared, ``batch`` is not changed."""
        return _with_actions(batch, lambda actions: normalize_actions(actions, self.space))


def _with_actions(batch: BatchT, fn: Callable[[Any], Any]) -> BatchT:
    def changed(rows: SampleBatch) -> SampleBatch:
        if Columns.ACTIONS not in rows:
            raise MissingColumn("the batch has no actions to clip or scale", column=Columns.ACTIONS)
        made = rows.copy(shallow=True)
        made[Columns.ACTIONS] = fn(rows[Columns.ACTIONS])
        return made

    return cast("BatchT", batch._each(changed))
