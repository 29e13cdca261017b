"""`update_weights`: weights that travel with a version number, and the other numbers that workers share.

Learners count versions up; whoever acts takes those that are newer than its own, in whatever order they
arrive.

Example:
    >>> [accepts_weights(3, given) for given in (2, 3, 4, 0, None)]
    [False, False, True, True, True]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError, StateError, excerpt

if TYPE_CHECKING:
    from rlio.policies.policy import Policy

__all__ = ["GlobalVars", "Gradients", "Weights", "accepts_weights", "update_weights"]

Weights: TypeAlias = dict[str, NDArray[Any]]
#: Gradients of a loss, by the names of the weights.
Gradients: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class GlobalVars:
    """Numbers that all workers of a training run share.

    Attributes:
        timestep: Environment steps that all of them sampled so far. A `RolloutWorker` counts its own; a
            `WorkerGroup` adds up those of its workers, and sends the sum to them with weights.
        num_grad_updates_per_policy: Updates of each policy so far.
    """

    timestep: int = 0
    num_grad_updates_per_policy: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON."""
        return {
            "timestep": self.timestep,
            "num_grad_updates_per_policy": dict(self.num_grad_updates_per_policy),
        }

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> GlobalVars:
        """What `to_json` described.

        Raises:
            StateError: A field is missing, or no number.
        """
        timestep, updates = described.get("timestep"), described.get("num_grad_updates_per_policy")
        if (
            not isinstance(timestep, int)
            or not isinstance(updates, Mapping)
            or not all(isinstance(value, int) for value in updates.values())
        ):
            raise StateError(
                f"global vars are {excerpt(dict(described))}: expected 'timestep' (int) and "
                "'num_grad_updates_per_policy' (policy id -> int)"
            )
        return cls(timestep, dict(updates))


def accepts_weights(current: int, weights_seq_no: int | None) -> bool:
    """Whether weights of version ``weights_seq_no`` replace those of version ``current``.

    Newer ones do; 0 and None stand for weights without a version, which always do.

    Raises:
        OptionError: ``weights_seq_no`` is below 0.
    """
    if weights_seq_no is not None and weights_seq_no < 0:
        raise OptionError(f"weights_seq_no={weights_seq_no}: a version from 1 on, or 0 to force")
    return not weights_seq_no or weights_seq_no > current


def update_weights(
    policy: Policy, weights: Mapping[str, NDArray[np.generic]], weights_seq_no: int | None = None
) -> bool:
    """Give ``policy`` the ``weights``, unless it has them, or newer ones, already.

    Args:
        policy: Its ``weights_seq_no`` says which version it has, and is recorded with every step.
        weights: As `Policy.get_weights` gave them.
        weights_seq_no: Their version; 0 or None: set them in any case, and leave the version as it is.

    Returns:
        Whether they were set.

    Raises:
        OptionError: ``weights_seq_no`` is below 0.
        StateError: Names or shapes differ; nothing is changed.
    """
    if not accepts_weights(policy.weights_seq_no, weights_seq_no):
        return False
    policy.set_weights(weights)
    if weights_seq_no:
        policy.weights_seq_no = weights_seq_no
    return True
