"""`PolicySetup`: how a worker makes and keeps its policies.

Example:
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> spaces = (Box(-1.0, 1.0, (3,)), Discrete(2))
    >>> setup = PolicySetup(spaces={"main": spaces}, default_policy_class=RandomPolicy, capacity=10)
    >>> setup.make({"main": None})["main"].action_space
    Discrete(2)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlio.errors import OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.policies.policy_map import PolicyMap
from rlio.policies.policy_spec import MakePolicy, PolicySpec, Spaces, as_specs

__all__ = ["PolicySetup"]


@dataclass(frozen=True, kw_only=True)
class PolicySetup:
    """How a worker makes and keeps its policies.

    Attributes:
        spaces: Policy id -> observation and action space, of policies that are given without; others take
            those of the environment.
        default_policy_class: Of specs without a ``policy_class``.
        capacity: Policies in memory; the states of the others are in a folder. See `PolicyMap`.
        policy_states_are_swappable: See `PolicyMap`.
        folder: Of policies' states, a local path; None: a temporary one.
    """

    spaces: Mapping[str, Spaces] = field(default_factory=dict, hash=False)
    default_policy_class: MakePolicy | str | None = None
    capacity: int = 100
    policy_states_are_swappable: bool = False
    folder: str | os.PathLike[str] | None = None

    def make(self, policies: Any, *, seed: int | None = None) -> PolicyMap:
        """The policies by id; those without spaces wait for `Policy.bind`.

        Args:
            policies: What `as_specs` takes.
            seed: Of the policies that are made here.

        Raises:
            OptionError: One cannot be made, or `spaces` names an unknown one.
        """
        specs = as_specs(policies)
        unknown = self.spaces.keys() - specs.keys()
        if unknown:
            raise OptionError(f"spaces for the policies {excerpt(sorted(unknown))}, which are not given")
        return PolicyMap(
            {policy_id: self.complete(policy_id, given) for policy_id, given in specs.items()},
            capacity=self.capacity,
            policy_states_are_swappable=self.policy_states_are_swappable,
            folder=self.folder,
            seed=seed,
        )

    def complete(self, policy_id: str, given: Policy | PolicySpec) -> Policy | PolicySpec:
        """``given`` with what is known here about ``policy_id``.

        Raises:
            OptionError: A policy is bound to other spaces.
        """
        spaces = self.spaces.get(policy_id)
        if isinstance(given, Policy):
            if spaces is not None:
                given.bind(*spaces)
            return given
        if given.policy_class is None:
            given = replace(given, policy_class=self.default_policy_class)
        return given if spaces is None else given.with_spaces(*spaces)
