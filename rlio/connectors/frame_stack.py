"""`FrameStack`: stacks the last observations.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box
    >>> from rlio.connectors.connector import Streams
    >>> stack = FrameStack(3)
    >>> stack.bind(Box(0.0, 9.0, (1,))).shape
    (3, 1)
    >>> start, later = (Streams(np.array([0]), np.array([first])) for first in (True, False))
    >>> _ = stack(np.array([[1.0]]), start)
    >>> stack(np.array([[2.0]]), later).ravel().tolist()
    [1.0, 1.0, 2.0]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.nested import unflatten
from rlio.connectors.connector import Connector, Streams
from rlio.connectors.spaces import check_leaves, nested_space
from rlio.envs.leaves import Leaf, leaf_of, leaves_of
from rlio.support.options import check_choice, check_count

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy import Policy

__all__ = ["FrameStack"]


class FrameStack(Connector):
    """The last ``frames`` observations of an episode in a new axis, the oldest first.

    At an episode's start its first observation is repeated. Supports Box spaces, and Dict and Tuple of them.
    Data sets recognise stacks of images along either axis and store each frame once.

    Args:
        frames: Number of observations, at least 1.
        axis: Position of the new axis in an observation: 0 for first, as in gymnasium's wrapper; -1 for last.

    Raises:
        OptionError: A value is illegal.
    """

    _leaves: list[Leaf]

    def __init__(self, frames: int, *, axis: int = 0) -> None:
        self.frames: int = check_count("frames", frames, least=1)
        # The first or the last axis of an observation.
        self.axis: int = check_choice("axis", axis, (0, -1))

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        from gymnasium import spaces

        self._leaves = leaves_of(space)
        check_leaves("FrameStack", self._leaves, (spaces.Box,))
        made: list[gym.Space[Any]] = []
        for leaf in self._leaves:
            box: Any = leaf.space
            low, high = (np.stack([bound] * self.frames, axis=self.axis) for bound in (box.low, box.high))
            made.append(spaces.Box(low, high, dtype=box.dtype))
        # One buffer for each leaf: (slots, frames, ...), the newest frame last.
        self._kept = [np.zeros((0, self.frames, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        return nested_space(self._leaves, made)

    def __call__(self, values: Any, streams: Streams) -> Any:
        slots, starts = streams
        self._make_room(slots)
        made = []
        for i, leaf in enumerate(self._leaves):
            frames, kept = np.asarray(leaf_of(values, leaf.path)), self._kept[i]
            stacked = self._stacked(kept, frames, slots)
            if starts.any():
                stacked[starts] = frames[starts, None]
            kept[slots] = stacked
            made.append(self._moved(stacked))
        return unflatten([leaf.path for leaf in self._leaves], made)

    def final(self, values: Any, streams: Streams) -> Any:
        made = []
        for leaf, kept in zip(self._leaves, self._kept, strict=True):
            frames = np.asarray(leaf_of(values, leaf.path))
            made.append(self._moved(self._stacked(kept, frames, streams.slots)))
        return unflatten([leaf.path for leaf in self._leaves], made)

    def _stacked(self, kept: NDArray[Any], frames: NDArray[Any], slots: NDArray[np.int64]) -> NDArray[Any]:
        """The stacks of ``slots`` after one more frame, (N, frames, ...), in new memory."""
        stacked = np.empty((len(slots), *kept.shape[1:]), kept.dtype)
        stacked[:, :-1] = kept[slots, 1:]
        stacked[:, -1] = frames
        return stacked

    def _moved(self, stacked: NDArray[Any]) -> NDArray[Any]:
        return stacked if self.axis == 0 else np.moveaxis(stacked, 1, -1)

    def _make_room(self, slots: NDArray[np.int64]) -> None:
        needed = int(slots.max(initial=-1)) + 1
        if needed > len(self._kept[0]):
            # Doubling avoids copying everything each time when agents join one by one.
            more = max(needed, 2 * len(self._kept[0])) - len(self._kept[0])
            self._kept = [
                np.concatenate([kept, np.zeros((more, *kept.shape[1:]), kept.dtype)]) for kept in self._kept
            ]
