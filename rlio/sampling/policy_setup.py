"""`PolicySetup`: how a worker makes and keeps its policies, and which agents they act for.

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
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.policy_group import MappingFn, PoliciesToTrain, PolicyGroup

__all__ = ["PolicySetup"]


@dataclass(frozen=True, kw_only=True)
class PolicySetup:
    """How a worker makes and keeps its policies, which agents they act for, and which of them learn.

    Attributes:
        policy_mapping_fn: Agent id and episode -> policy id, called once for each agent and episode, for an
            environment with several agents. None: the only policy acts for all agents, or each policy for the
            agent of its name.
        policies_to_train: Ids of the policies that learn, or a function of policy id and batch; None: all.
        spaces: Policy id -> (observation space, action space), for policies without spaces; other policies
            take those of the environment.
        default_policy_class: Class for specs without a ``policy_class``.
        capacity: Number of policies in memory; the states of the others are in a folder. See `PolicyMap`.
        policy_states_are_swappable: See `PolicyMap`.
        folder: Local folder for policies' states; None uses a temporary one.
    """

    policy_mapping_fn: MappingFn | None = None
    policies_to_train: PoliciesToTrain = field(default=None, hash=False)
    spaces: Mapping[str, Spaces] = field(default_factory=dict, hash=False)
    default_policy_class: MakePolicy | str | None = None
    capacity: int = 100
    policy_states_are_swappable: bool = False
    folder: str | os.PathLike[str] | None = None

    def make(self, policies: Any, *, seed: int | None = None) -> PolicyMap:
        """Make the policies by id; those without spaces wait for `Policy.bind`.

        Args:
            policies: Policies that `as_specs` accepts.
            seed: Seed of the policies that are made here.

        Raises:
            OptionError: A policy cannot be made, or `spaces` names an unknown one.
        """
        specs = as_specs(policies)
        unknown = self.spaces.keys() - specs.keys()
        if unknown:
            raise OptionError(
                f"spaces are given for the unknown policies {excerpt(sorted(unknown))}: pass these policies "
                "too, or remove their spaces"
            )
        return PolicyMap(
            {policy_id: self.complete(policy_id, given) for policy_id, given in specs.items()},
            capacity=self.capacity,
            policy_states_are_swappable=self.policy_states_are_swappable,
            folder=self.folder,
            seed=seed,
        )

    def group(
        self, policies: Any, *, seed: int | None = None, callbacks: Callbacks | None = None
    ) -> PolicyGroup:
        """Make the policies, and the group of them; see `make`."""
        made = self.make(policies, seed=seed)
        try:
            return PolicyGroup(
                made,
                policy_mapping_fn=self.policy_mapping_fn,
                policies_to_train=self.policies_to_train,
                callbacks=callbacks,
            )
        except BaseException:
            made.close()
            raise

    def complete(self, policy_id: str, given: Policy | PolicySpec) -> Policy | PolicySpec:
        """Complete ``given`` with this setup's spaces and class for ``policy_id``.

        Raises:
            OptionError: The policy is bound to other spaces.
        """
        spaces = self.spaces.get(policy_id)
        if isinstance(given, Policy):
            if spaces is not None:
                given.bind(*spaces)
            return given
        if given.policy_class is None:
            given = replace(given, policy_class=self.default_policy_class)
        return given if spaces is None else given.with_spaces(*spaces)
