"""`AgentMapping`: maps agents to policies, and keeps the group of each policy's agents.

Example:
    >>> from rlio.envs.multi_agent import make_multi_agent
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.sampling.config import RolloutConfig
    >>> env = make_multi_agent("CartPole-v1")(num_agents=2)
    >>> policies = {"0": RandomPolicy(), "1": RandomPolicy()}
    >>> mapping = AgentMapping(policies, config=RolloutConfig(), seed_of=len, random_seed_of=len)
    >>> mapping.policy_id(1, RunningEpisode(77))
    '1'
    >>> mapping.group("1", env, 1).env_spaces[0].shape
    (4,)
    >>> env.close()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlio.envs.multi_agent import AgentId, MultiAgentEnv
from rlio.errors import OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.reader import JsonState
from rlio.sampling.agent_group import AgentGroup
from rlio.sampling.callbacks import RunningEpisode
from rlio.sampling.config import RolloutConfig
from rlio.sampling.policy_group import MappingFn, check_mapping

__all__ = ["AgentMapping"]


class AgentMapping:
    """Calls the mapping function, and keeps the groups.

    Args:
        policies: Policy id -> policy, looked up for each call.
        config: Config of the groups.
        seed_of: Policy id -> seed of the policy, if it is not bound.
        random_seed_of: Policy id -> seed of the random actions that replace the policy's.
        worker: Passed to mapping functions as ``worker``, if they take it.

    Attributes:
        groups: Policy id -> group, for policies that have or had agents.
        function: The current mapping.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        *,
        config: RolloutConfig,
        seed_of: Callable[[str], int],
        random_seed_of: Callable[[str], int],
        worker: Any = None,
    ) -> None:
        self.policies = policies
        self.groups: dict[str, AgentGroup] = {}
        self._config = config
        self._seed_of, self._random_seed_of = seed_of, random_seed_of
        self._worker = worker
        #: Policy id -> states of its connectors, for groups that do not exist yet.
        self._states: dict[str, dict[str, JsonState]] = {}
        self.set_function(None)

    def set_function(self, function: MappingFn | None) -> None:
        """Set the mapping; None: the only policy acts for all, or each for the agent of its name.

        Raises:
            OptionError: ``function`` is not a function.
        """
        check_mapping(function)
        self.function: MappingFn = self._own_name if function is None else function
        if function is not None and _takes_worker(function):
            self.function = partial(function, worker=self._worker)

    def _own_name(self, agent_id: AgentId, episode: RunningEpisode) -> str:
        if len(self.policies) == 1:
            return next(iter(self.policies))
        if str(agent_id) in self.policies:
            return str(agent_id)
        raise OptionError(
            f"no policy of {excerpt(list(self.policies))} is named after agent {excerpt(agent_id)}: pass a "
            "policy_mapping_fn"
        )

    def policy_id(self, agent_id: AgentId, episode: RunningEpisode, function: MappingFn | None = None) -> str:
        """The id of the policy that acts for ``agent_id``.

        Args:
            agent_id: Id of the agent.
            episode: The agent's episode.
            function: The mapping of that episode. If it names a removed policy, the current mapping is used.

        Raises:
            OptionError: The mapping names an unknown policy.
        """
        chosen = None if function is None else function(agent_id, episode)
        if chosen not in self.policies:
            chosen = self.function(agent_id, episode)
        if chosen not in self.policies:
            raise OptionError(
                f"policy_mapping_fn maps agent {excerpt(agent_id)} to the unknown policy {excerpt(chosen)}: "
                f"expected one of {excerpt(list(self.policies))}"
            )
        return str(chosen)

    def group(self, policy_id: str, env: MultiAgentEnv, agent_id: AgentId) -> AgentGroup:
        """The group of ``policy_id``, checked to fit ``agent_id`` of ``env``.

        Raises:
            OptionError: The policy acts in other spaces.
        """
        group = self.groups.get(policy_id)
        if group is not None and agent_id in group.fitting:
            return group  # comparing spaces takes longer than a step
        spaces = env.get_observation_space(agent_id), env.get_action_space(agent_id)
        if group is None:
            group = self.groups[policy_id] = AgentGroup(
                policy_id,
                self.policies[policy_id],
                *spaces,
                config=self._config,
                seed=self._seed_of(policy_id),
                random_seed=partial(self._random_seed_of, policy_id),
            )
            self._load_connectors(group)
        elif group.env_spaces != spaces:
            raise OptionError(
                f"the policy {excerpt(policy_id)} acts in {excerpt(str(group.env_spaces))}, but agent "
                f"{excerpt(agent_id)} has {excerpt(str(spaces))}: map the agent to another policy"
            )
        if agent_id in env.possible_agents:  # the number of other agents is unlimited
            group.fitting.add(agent_id)
        return group

    def connector_states(self) -> dict[str, dict[str, JsonState]]:
        """Policy id -> the state of its `Actor`, as JSON."""
        return self._states | {each: group.actor.state_dict() for each, group in self.groups.items()}

    def load_connector_states(self, states: Mapping[str, dict[str, JsonState]]) -> None:
        """Continue from `connector_states`; keeps the states of policies that have no agents yet.

        Raises:
            StateError: The states belong to other connectors.
        """
        self._states |= states
        for policy_id in states.keys() & self.groups.keys():
            self._load_connectors(self.groups[policy_id])

    def _load_connectors(self, group: AgentGroup) -> None:
        if group.policy_id in self._states:
            group.actor.load_state_dict(self._states.pop(group.policy_id))

    def bind(self, env: MultiAgentEnv, *, worker_index: int = 0) -> None:
        """Give spaces to unbound policies whose agents are known.

        If the agents' spaces differ, calls the mapping for each agent, with an episode that does not count.
        """
        unbound = [policy_id for policy_id in self.policies if not self.policies[policy_id].is_bound]
        agents = list(env.possible_agents)
        if not unbound or not agents:
            return
        spaces = [(env.get_observation_space(agent), env.get_action_space(agent)) for agent in agents]
        if all(each == spaces[0] for each in spaces):
            for policy_id in unbound:
                self.group(policy_id, env, agents[0])
            return
        episode = RunningEpisode(-1, 0, worker_index)
        for agent in agents:
            policy_id = self.policy_id(agent, episode)
            if policy_id in unbound:
                self.group(policy_id, env, agent)


def _takes_worker(function: MappingFn) -> bool:
    """Whether ``function`` has a parameter ``worker``, as RLlib's mappings do."""
    try:
        return "worker" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # Written in C, without a signature.
        return False
