"""`Observer`: applies observation connectors to a vector environment's steps before they are recorded.

Example:
    >>> from gymnasium.spaces import Box
    >>> from rlio.connectors.connector import ObservationPipeline
    >>> from rlio.connectors.frame_stack import FrameStack
    >>> space = Box(0.0, 9.0, (1,))
    >>> observer = Observer(ObservationPipeline([FrameStack(2)], space), space, num_envs=3)
    >>> observer.begin(np.ones((3, 1), np.float32)).shape
    (3, 2, 1)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.copies import own_copy
from rlio.batch.nested import map_structure, unflatten
from rlio.connectors.connector import ObservationPipeline, Streams
from rlio.envs.leaves import Leaf, leaf_of, leaves_of

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.envs.vector import VectorStep

__all__ = ["Observer"]


class Observer:
    """Applies connectors to the observations of N environments, once per observation.

    Args:
        pipeline: The connectors.
        space: Space of one environment's observations.
        num_envs: Number of environments.
    """

    def __init__(self, pipeline: ObservationPipeline, space: gym.Space[Any], *, num_envs: int) -> None:
        self.pipeline = pipeline
        self._given = leaves_of(space)
        self._made = leaves_of(self.pipeline.space)
        self._slots = np.arange(num_envs)

    def begin(self, obs: Any) -> Any:
        """Transform the first observations of all environments into the policy's form."""
        return self.pipeline(self._batched(obs), Streams(self._slots, np.ones(len(self._slots), bool)))

    def step(self, step: VectorStep, ended: NDArray[np.bool_], before: Any) -> VectorStep:
        """Return ``step`` with its observations in the policy's form.

        Args:
            step: The step, with the environments' observations.
            ended: Mask of its rows that end an episode, (N,).
            before: The policy's previous observations, kept for environments without a new one.
        """
        finals = step.finals
        if finals:
            envs = np.array([env for env, _ in finals])
            seen = self.pipeline.final(self._joined([leaves for _, leaves in finals]), self._streams(envs))
            finals = list(zip(envs.tolist(), self._taken_apart(seen, len(envs)), strict=True))
        obs = self._batched(step.obs)
        # If no reset followed, the shown observation is the final one.
        last = ended & ~step.starts
        fresh = None if step.valid is None else step.valid | step.starts
        if not last.any() and (fresh is None or fresh.all()):
            return step._replace(obs=self.pipeline(obs, Streams(self._slots, step.starts)), finals=finals)
        shown = map_structure(np.array, before)
        usual = np.flatnonzero(~last if fresh is None else fresh & ~last)
        if len(usual):
            streams = Streams(usual, step.starts[usual])
            _put(shown, usual, self.pipeline(_rows(obs, usual), streams))
        if last.any():
            which = np.flatnonzero(last)
            _put(shown, which, self.pipeline.final(_rows(obs, which), self._streams(which)))
        return step._replace(obs=shown, finals=finals)

    def rows_of(self, obs: Any, envs: NDArray[np.int64]) -> list[tuple[int, list[Any]]]:
        """Copies of the observations of the environments ``envs``, as in `VectorStep.finals`."""
        parts = [leaf_of(obs, leaf.path) for leaf in self._given]
        return [(env, [own_copy(part[env]) for part in parts]) for env in envs.tolist()]

    def _streams(self, slots: NDArray[np.int64]) -> Streams:
        return Streams(slots, np.zeros(len(slots), bool))

    def _batched(self, obs: Any) -> Any:
        """``obs`` with arrays as leaves, because values of Text and similar spaces arrive as tuples."""
        if not any(leaf.is_object for leaf in self._given):
            return obs
        parts = [_column(leaf_of(obs, leaf.path), leaf) for leaf in self._given]
        return unflatten([leaf.path for leaf in self._given], parts)

    def _joined(self, observations: list[list[Any]]) -> Any:
        """Join observations, each given as its leaves, into one batch."""
        parts = [_column([leaves[i] for leaves in observations], leaf) for i, leaf in enumerate(self._given)]
        return unflatten([leaf.path for leaf in self._given], parts)

    def _taken_apart(self, values: Any, rows: int) -> list[list[Any]]:
        """Split a batch into the leaves of each row."""
        parts = [leaf_of(values, leaf.path) for leaf in self._made]
        return [[part[row] for part in parts] for row in range(rows)]


def _column(values: Any, leaf: Leaf) -> NDArray[Any]:
    # Their dtypes are those of the space, see `VectorStep.finals`.
    return object_column(values) if leaf.is_object else np.asarray(values)


def _rows(values: Any, which: NDArray[np.int64]) -> Any:
    return map_structure(lambda leaf: leaf[which], values)


def _put(into: Any, which: NDArray[np.int64], values: Any) -> None:
    map_structure(lambda old, new: old.__setitem__(which, new), into, values)
