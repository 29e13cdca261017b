"""The arrays in a space's values: their paths, dtypes and shapes.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Dict, Discrete
    >>> for leaf in leaves_of(Dict(camera=Box(0, 255, (8, 8), np.uint8), gear=Discrete(5))):
    ...     print(leaf.path, leaf.dtype, leaf.shape)
    ('camera',) uint8 (8, 8)
    ('gear',) int64 ()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlio.batch.nested import Path, path_text
from rlio.errors import SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["Leaf", "leaf_of", "leaves_of"]


class Leaf(NamedTuple):
    """One array in a space's values: its path, and its dtype and shape for a single value.

    Values of Text, Sequence, Graph and OneOf spaces are objects: dtype object, shape ().
    """

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    space: gym.Space[Any]

    @property
    def is_object(self) -> bool:
        """Whether values are Python objects."""
        return self.dtype.kind == "O"

    @property
    def choices(self) -> list[tuple[int, int]] | None:
        """(Start, count) of each choice in a Discrete or MultiDiscrete space; None for other spaces."""
        from gymnasium import spaces

        match self.space:
            case spaces.Discrete() as space:
                return [(int(space.start), int(space.n))]
            case spaces.MultiDiscrete() as space:
                return list(zip(space.start.ravel().tolist(), space.nvec.ravel().tolist(), strict=True))
        return None

    @property
    def place(self) -> str:
        """Where the leaf is, for messages: ``" at camera/0"``, or nothing for a plain space."""
        return f" at {path_text(self.path)}" if self.path else ""


def leaves_of(space: gym.Space[Any]) -> list[Leaf]:
    """The leaves of ``space``, in the order of its values; a plain space is one leaf with the path ().

    Raises:
        SchemaError: A key of a Dict space is no str, or the space has no leaf that could be a column.
    """
    found: list[Leaf] = []
    _collect(space, (), found)
    if not found:
        raise SchemaError(f"the space {space} has no values: expected a Dict or Tuple that is not empty")
    return found


def _collect(space: gym.Space[Any], path: Path, found: list[Leaf]) -> None:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            if not isinstance(key, str):
                raise SchemaError(
                    f"a Dict space has the key {excerpt(key)}: expected a str, because columns are nested "
                    "by str keys"
                )
            _collect(child, (*path, key), found)
    elif isinstance(space, spaces.Tuple):
        for i, child in enumerate(space.spaces):
            _collect(child, (*path, i), found)
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        found.append(Leaf(path, np.dtype(space.dtype), tuple(space.shape or ()), space))
    else:
        found.append(Leaf(path, np.dtype(object), (), space))


def leaf_of(value: Any, path: Path) -> Any:
    """The part of ``value`` at ``path``.

    Raises:
        SchemaError: ``value`` is not nested this way.
    """
    try:
        for part in path:
            value = value[part]
    except (KeyError, IndexError, TypeError) as error:
        raise SchemaError(
            f"a value has nothing at {path_text(path)}: it is not nested as its space"
        ) from error
    return value
