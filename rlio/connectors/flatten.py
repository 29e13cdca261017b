"""`Flatten` and `OneHot`: convert observations to the form that networks take.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Dict, Discrete
    >>> flatten = Flatten()
    >>> flatten.bind(Dict(speed=Box(0.0, 9.0, (2,)), gear=Discrete(3))).shape
    (5,)
    >>> obs = {"speed": np.array([[1.0, 2.0]], np.float32), "gear": np.array([2])}
    >>> flatten(obs).tolist()
    [[1.0, 2.0, 0.0, 0.0, 1.0]]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.nested import unflatten
from rlio.connectors.connector import Connector, Streams
from rlio.connectors.spaces import check_leaves, nested_space
from rlio.envs.leaves import Leaf, leaf_of, leaves_of

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy import Policy

__all__ = ["Flatten", "OneHot"]


class Flatten(Connector):
    """Puts an observation into one vector, (N, numbers) float32; discrete values become one-hot.

    Leaves are in the space's order, as in RLlib's preprocessors. Supports Box, Discrete, MultiDiscrete and
    MultiBinary spaces, and Dict and Tuple of them.
    """

    _leaves: list[Leaf]

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        from gymnasium import spaces

        kinds = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
        self._leaves = leaves_of(space)
        check_leaves("Flatten", self._leaves, kinds)
        flat: list[Any] = [spaces.flatten_space(leaf.space) for leaf in self._leaves]
        self._ends = np.cumsum([len(box.low) for box in flat]).tolist()
        low, high = (np.concatenate([getattr(box, end) for box in flat]) for end in ("low", "high"))
        return spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def __call__(self, values: Any, streams: Streams | None = None) -> NDArray[np.float32]:
        parts = [np.asarray(leaf_of(values, leaf.path)) for leaf in self._leaves]
        flat = np.zeros((len(parts[0]), self._ends[-1]), np.float32)
        start = 0
        for leaf, part, end in zip(self._leaves, parts, self._ends, strict=True):
            _fill(flat[:, start:end], part, leaf)
            start = end
        return flat


class OneHot(Connector):
    """Turns Discrete and MultiDiscrete leaves into one-hot float32 vectors; other leaves are unchanged."""

    _leaves: list[Leaf]

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        from gymnasium import spaces

        self._leaves = leaves_of(space)
        made: list[gym.Space[Any]] = []
        for leaf in self._leaves:
            size = sum(count for _, count in leaf.choices or ())
            made.append(spaces.Box(0.0, 1.0, (size,), np.float32) if size else leaf.space)
        return nested_space(self._leaves, made)

    def __call__(self, values: Any, streams: Streams | None = None) -> Any:
        made: list[Any] = []
        for leaf in self._leaves:
            part = leaf_of(values, leaf.path)
            if leaf.choices is not None:
                hot = np.zeros((len(part), sum(count for _, count in leaf.choices)), np.float32)
                _fill(hot, np.asarray(part), leaf)
                part = hot
            made.append(part)
        return unflatten([leaf.path for leaf in self._leaves], made)


def _fill(into: NDArray[np.float32], values: NDArray[Any], leaf: Leaf) -> None:
    """Write a leaf's values, (N, ...), into zeros of shape (N, numbers)."""
    choices = leaf.choices
    if choices is None:
        into[:] = values.reshape(len(values), -1)
        return
    first, counts = np.array(choices).T
    offsets = np.cumsum(counts) - counts
    columns = values.reshape(len(values), -1).astype(np.int64) - first + offsets
    into[np.arange(len(values))[:, None], columns] = 1.0
