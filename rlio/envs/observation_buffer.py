"""`ObservationBuffer`: the current observations of N environments, batched and written row by row.

Example:
    >>> from gymnasium.spaces import Box, Dict, Discrete
    >>> buffer = ObservationBuffer(Dict(camera=Box(0, 255, (2, 2), "uint8"), gear=Discrete(5)), num_envs=3)
    >>> buffer.write(1, {"camera": np.ones((2, 2), np.uint8), "gear": 4})
    >>> buffer.value["gear"].tolist(), buffer.value["camera"].shape
    ([0, 4, 0], (3, 2, 2))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.batch.nested import unflatten
from rlio.envs.leaves import Leaf, leaf_of, leaves_of
from rlio.envs.values import fitted, own_leaves

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["ObservationBuffer"]

_GIVER = "the environment"


class ObservationBuffer:
    """Observations of ``num_envs`` environments.

    Args:
        space: Space of one environment's observations.
        num_envs: Number of rows.

    Attributes:
        value: All observations, nested as ``space``: the arrays themselves, always the same ones.
    """

    def __init__(self, space: gym.Space[Any], *, num_envs: int) -> None:
        self._leaves: list[Leaf] = leaves_of(space)
        self._arrays = [np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        self._only = self._arrays[0] if self._leaves[0].path == () else None
        # Properties of `_only`, cached because arrays recompute them and each observation needs them.
        self._dtype, self._shape = self._arrays[0].dtype, self._arrays[0].shape[1:]
        paths = [leaf.path for leaf in self._leaves]
        self.value: Any = unflatten(paths, self._arrays) if self._only is None else self._only

    def write(self, env: int, obs: Any) -> None:
        """Set row ``env``.

        Raises:
            SchemaError: ``obs`` does not fit the space; see `rlio.envs.values.fitted`.
        """
        only = self._only
        # (`is`: NumPy has one object for each builtin dtype. Other dtypes take the slower path.)
        if (
            only is not None
            and type(obs) is np.ndarray
            and obs.dtype is self._dtype
            and obs.shape == self._shape
        ):
            only[env] = obs
            return
        for leaf, array in zip(self._leaves, self._arrays, strict=True):
            value = fitted(leaf, leaf_of(obs, leaf.path), column=Columns.OBS, giver=_GIVER)
            array[env] = own_copy(value) if leaf.is_object else value

    def own_leaves(self, obs: Any) -> list[Any]:
        """Checked copies of the leaves of one environment's ``obs``."""
        return own_leaves(self._leaves, obs, giver=_GIVER)
