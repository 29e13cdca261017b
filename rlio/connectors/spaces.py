"""Spaces of connectors' results: nested from leaves, or inferred from samples.

Example:
    >>> import numpy as np
    >>> space_like({"a": np.zeros((2, 3), np.float32)})
    Dict('a': Box(-inf, inf, (3,), float32))
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlio.batch.nested import unflatten
from rlio.envs.leaves import Leaf
from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["check_leaves", "nested_space", "samples_of", "space_like"]


def samples_of(space: gym.Space[Any], rows: int) -> Any:
    """``rows`` samples of ``space``, batched as by a vector environment; always the same ones."""
    from gymnasium.vector.utils import batch_space

    # A copy, so the space's own generator does not advance.
    batched = batch_space(copy.deepcopy(space), rows)
    batched.seed(0)
    return batched.sample()


def space_like(values: Any) -> gym.Space[Any]:
    """The widest space that holds ``values``, a batch."""
    from gymnasium import spaces

    if isinstance(values, dict):
        return spaces.Dict([(key, space_like(part)) for key, part in values.items()])
    if isinstance(values, tuple):
        return spaces.Tuple([space_like(part) for part in values])
    dtype, shape = values.dtype, values.shape[1:]
    if dtype.kind == "b":
        return spaces.MultiBinary(shape)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return spaces.Box(limits.min, limits.max, shape, dtype)
    return spaces.Box(-np.inf, np.inf, shape, dtype)


def nested_space(leaves: Sequence[Leaf], leaf_spaces: Sequence[gym.Space[Any]]) -> gym.Space[Any]:
    """The space nested like ``leaves``, with ``leaf_spaces`` in their places."""
    from gymnasium import spaces

    # Pairs, because gymnasium sorts the keys of a dict.
    def build(node: Any) -> gym.Space[Any]:
        if isinstance(node, dict):
            return spaces.Dict([(key, build(part)) for key, part in node.items()])
        if isinstance(node, tuple):
            return spaces.Tuple([build(part) for part in node])
        found: gym.Space[Any] = leaf_spaces[node]
        return found

    made: gym.Space[Any] = build(unflatten([leaf.path for leaf in leaves], range(len(leaves))))
    return made


def check_leaves(who: str, leaves: Sequence[Leaf], kinds: tuple[type, ...]) -> None:
    """Raise unless the spaces of all ``leaves`` are of ``kinds``.

    Raises:
        OptionError: A space is of another kind; ``who`` names the connector.
    """
    for leaf in leaves:
        if not isinstance(leaf.space, kinds):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise OptionError(
                f"{who} is for {names} spaces and Dict and Tuple of them, but found "
                f"{excerpt(str(leaf.space))}"
            )
