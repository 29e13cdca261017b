"""`clip_rewards`: rewards as they are learned from.

Example:
    >>> import numpy as np
    >>> clip_rewards(np.array([-7.0, 0.0, 0.5]), True).tolist()
    [-1.0, 0.0, 1.0]
    >>> clip_rewards(np.array([-7.0, 0.0, 0.5]), 2.0).tolist()
    [-2.0, 0.0, 0.5]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["clip_rewards"]


def clip_rewards(rewards: NDArray[Any], how: bool | float | None) -> NDArray[Any]:
    """Return ``rewards`` (N,) as ``RolloutConfig.clip_rewards`` says.

    Args:
        rewards: What the environments gave.
        how: True: their signs. A number: within its distance from 0. None or False: as they are.
    """
    if how is None or how is False:
        return rewards
    clipped: NDArray[Any] = np.sign(rewards) if how is True else np.clip(rewards, -how, how)
    return clipped
