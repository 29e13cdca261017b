"""`update_weights`: weights with a version number, and other numbers that workers share.

Learners increment the version. Acting policies take only newer weights, in any order of arrival.

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
from rlio.support.options import check_count
from rlio.support.states import value_in, whole_number

if TYPE_CHECKING:
    from rlio.policies.policy import Policy

__all__ = ["GlobalVars", "Gradients", "Weights", "accepts_weights", "update_weights"]

_UPDATES = "num_grad_updates_per_policy"
_WHAT = "the state of global vars"

Weights: TypeAlias = dict[str, NDArray[Any]]
#: Gradients of a loss, by the names of the weights.
Gradients: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class GlobalVars:
    """Numbers that all workers of a training run share.

    Attributes:
        timestep: Environment steps that all workers sampled so far. A `RolloutWorker` counts its own steps; a
            `WorkerGroup` adds up those of its workers, and sends them the sum with the weights.
        num_grad_updates_per_policy: Updates of each policy so far.
    """

    timestep: int = 0
    num_grad_updates_per_policy: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, given: GlobalVars | Mapping[str, Any]) -> GlobalVars:
        """``given``, or the `GlobalVars` of a dict of its fields, such as RLlib's ``{"timestep": 42}``.

        Raises:
            OptionError: It is neither, has no timestep, another key, or a value that is no whole number.
        """
        if isinstance(given, GlobalVars):
            return given
        if not isinstance(given, Mapping) or "timestep" not in given or given.keys() - {"timestep", _UPDATES}:
            raise OptionError(
                f"global_vars={excerpt(given)}: expected a GlobalVars, as get_global_vars() returns it, or a "
                f"dict with timestep and, if known, {_UPDATES}"
            )
        try:
            return cls.from_json({_UPDATES: {}, **given})
        except StateError as error:
            raise OptionError(f"global_vars={excerpt(given)}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON."""
        return {
            "timestep": self.timestep,
            "num_grad_updates_per_policy": dict(self.num_grad_updates_per_policy),
        }

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> GlobalVars:
        """Read what `to_json` described.

        Raises:
            StateError: A field is missing, or is not a whole number.
        """
        updates = value_in(described, _UPDATES, dict, of=_WHAT)
        return cls(
            whole_number(described, "timestep", of=_WHAT),
            {name: whole_number(updates, name, of=_WHAT) for name in updates},
        )


def accepts_weights(current: int, weights_seq_no: int | None) -> bool:
    """Whether weights of version ``weights_seq_no`` replace those of version ``current``.

    Newer versions do. 0 and None mean weights without a version, which always replace.

    Raises:
        OptionError: ``weights_seq_no`` is below 0.
    """
    weights_seq_no = check_count("weights_seq_no", weights_seq_no, least=0, none="no version")
    return not weights_seq_no or weights_seq_no > current


def update_weights(
    policy: Policy, weights: Mapping[str, NDArray[np.generic]], weights_seq_no: int | None = None
) -> bool:
    """Set ``weights`` in ``policy``, unless it already has them or newer ones.

    Args:
        policy: Its ``weights_seq_no`` is its version, and is recorded with every step.
        weights: Weights from `Policy.get_weights`.
        weights_seq_no: Their version; 0 or None: set them always, and keep the policy's version.

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
