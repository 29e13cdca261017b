"""`ClipAction` and `UnsquashAction`: a policy's actions as the environment takes them.

`RolloutConfig(clip_actions=True, normalize_actions=True)` puts them behind a policy. Their functions are
those of `rlio.batch.actions`.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box
    >>> from rlio.connectors.connector import ActionPipeline, Streams
    >>> pipeline = ActionPipeline([UnsquashAction(), ClipAction()], Box(0.0, 10.0, (1,)))
    >>> one = Streams(np.array([0]), np.array([False]))
    >>> pipeline(np.array([[0.5]], np.float32), one).tolist()
    [[7.5]]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlio.batch.actions import clip_actions, has_boxes, unsquash_actions
from rlio.connectors.connector import Connector, Streams

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy import Policy

__all__ = ["ClipAction", "UnsquashAction"]


class ClipAction(Connector):
    """Brings actions of Box spaces within their bounds; others stay."""

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        self._space, self._changes = space, has_boxes(space)
        return space

    def __call__(self, values: Any, streams: Streams) -> Any:
        return clip_actions(values, self._space) if self._changes else values


class UnsquashAction(Connector):
    """Scales actions in [-1, 1] to the bounds of Box spaces; see `unsquash_actions`.

    The policy is told the environments' own space all the same: it is its business to give such actions.
    """

    def bind(self, space: gym.Space[Any], policy: Policy | None = None) -> gym.Space[Any]:
        self._space, self._changes = space, has_boxes(space)
        return space

    def __call__(self, values: Any, streams: Streams) -> Any:
        return unsquash_actions(values, self._space) if self._changes else values
