"""`ClipAction`, `UnsquashAction`: convert a policy's actions to the environment's range. `clip_rewards`.

`RolloutConfig(clip_actions=True, normalize_actions=True)` puts both connectors after a policy. They call the
functions of `rlio.batch.actions`. `RolloutConfig(clip_rewards=...)` clips the rewards for learning.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box
    >>> from rlio.connectors.connector import ActionPipeline, Streams
    >>> pipeline = ActionPipeline([UnsquashAction(), ClipAction()], Box(0.0, 10.0, (1,)))
    >>> one = Streams(np.array([0]), np.array([False]))
    >>> pipeline(np.array([[0.5]], np.float32), one).tolist()
    [[7.5]]
    >>> clip_rewards(np.array([-7.0, 0.0, 0.5]), True).tolist()
    [-1.0, 0.0, 1.0]
    >>> clip_rewards(np.array([-7.0, 0.0, 0.5]), 2.0).tolist()
    [-2.0, 0.0, 0.5]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.actions import clip_actions, has_boxes, unsquash_actions
from rlio.connectors.connector import Connector, Streams

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy import Policy

__all__ = ["ClipAction", "UnsquashAction", "clip_rewards"]


class ClipAction(Connector):
    """Clips actions of Box spaces to their bounds; other actions are unchanged."""

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        self._space, self._changes = space, has_boxes(space)
        return space

    def __call__(self, values: Any, streams: Streams) -> Any:
        return clip_actions(values, self._space) if self._changes else values


class UnsquashAction(Connector):
    """Scales actions in [-1, 1] to the bounds of Box spaces; see `unsquash_actions`.

    The policy still gets the environments' own space. It must give actions in [-1, 1] itself.
    """

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        self._space, self._changes = space, has_boxes(space)
        return space

    def __call__(self, values: Any, streams: Streams) -> Any:
        return unsquash_actions(values, self._space) if self._changes else values


def clip_rewards(rewards: NDArray[Any], how: bool | float | None) -> NDArray[Any]:
    """Return ``rewards`` (N,), clipped as in ``RolloutConfig.clip_rewards``.

    Args:
        rewards: The environments' rewards.
        how: True: their signs. A number: clip to its distance from 0. None or False: unchanged.
    """
    if how is None or how is False:
        return rewards
    clipped: NDArray[Any] = np.sign(rewards) if how is True else np.clip(rewards, -how, how)
    return clipped
