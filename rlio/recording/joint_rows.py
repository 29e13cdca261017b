"""`JointRows`: the rows of an environment with several agents since the last write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.columns import AGENT_ID, DEFAULT_POLICY_ID, Columns
from rlio.batch.nested import unflatten
from rlio.envs.leaves import Leaf, leaf_of, leaves_of
from rlio.envs.values import as_reward, fitted, own_leaves
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.recording.recorder import ENV, MOST_ROWS, as_extra, check_object, stored_info
from rlio.sampling.agent_rows import EPISODE, NEXT_T, AgentRows, stacked
from rlio.sampling.row_store import nested
from rlio.support.clock import utc_ms

__all__ = ["JointRows", "PolicyMappingFn", "policies_of"]

#: Agent id -> policy id.
PolicyMappingFn = Callable[[Any], str]

#: Columns of `AgentRows` that are not recorded.
_OF_ROWS: Final = (EPISODE, NEXT_T)


class _Policy:
    """The rows of one policy, and the spaces of its agents."""

    def __init__(self, spaces: tuple[gym.Space[Any], gym.Space[Any]], *, infos: bool) -> None:
        self.spaces = spaces
        self.observations, self.actions = leaves_of(spaces[0]), leaves_of(spaces[1])
        self.rows = AgentRows(*spaces, infos=infos)


@dataclass(eq=False)
class _Agent:
    """An agent of the running episode.

    Attributes:
        id_: The agent's id.
        index: Its ``agent_index``.
        policy: Its policy.
        obs: Its latest observation, nested as the space; None: it has none, or one that could not be stored.
        is_unseen: Whether the latest observation could not be stored.
        row: Number of its open row; -1: none.
        reward: Sum of the rewards since its last action.
        info: The latest info since then.
    """

    id_: Any
    index: int
    policy: _Policy
    obs: Any = None
    is_unseen: bool = False
    row: int = -1
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)


class JointRows:
    """Rows of the agents of one environment. An agent's row is open from its action to its next observation.

    Args:
        spaces: Returns the spaces of an agent.
        possible_agents: The agents; their positions are their ``agent_index``.
        mapping: Agent id -> policy id.
        infos: Whether to record infos.
        seeds: Whether to record the seeds of episodes.
        seed: Seed of the episode ids; None draws one from the OS.
    """

    def __init__(
        self,
        spaces: Callable[[Any], tuple[gym.Space[Any], gym.Space[Any]]],
        possible_agents: Sequence[Any],
        mapping: PolicyMappingFn,
        *,
        infos: bool,
        seeds: bool,
        seed: int | None,
    ) -> None:
        self._spaces, self._mapping, self._infos, self._seeds = spaces, mapping, infos, seeds
        self._names: list[Any] = list(possible_agents)
        self._ids = np.random.default_rng(seed)
        self._policies: dict[str, _Policy] = {}
        self._agents: dict[Any, _Agent] = {}
        self._episode = -1
        self._eps_id, self._t, self._seed = 0, 0, -1
        self._env_steps = 0
        #: When the episodes of the rows, and the running one, began.
        self._starts: dict[int | str, int] = {}
        self._taken: MultiAgentBatch | None = None
        for agent in self._names:
            self._policy_of(agent)

    # ---- an episode ----

    def start(self, seed: int | None) -> None:
        """Begin an episode. Open rows of the previous one get no further outcome: see `cut`."""
        self._agents.clear()
        self._episode += 1
        self._eps_id = int(self._ids.integers(0, 1 << 63, dtype=np.int64))
        self._t, self._seed = 0, -1 if seed is None else seed
        self._starts[self._eps_id] = utc_ms()

    def see(
        self,
        agent: Any,
        *,
        obs: Any = None,
        reward: Any = 0.0,
        ended: tuple[bool, bool] = (False, False),
        info: Any = None,
    ) -> None:
        """Record what an agent gets: the outcome of its last action, and its observation.

        A row stays open until its agent has an observation or ends.

        Args:
            agent: The agent's id.
            obs: Its observation; None: it has none now.
            reward: Its reward since the last call.
            ended: Whether it terminated, and whether it was truncated.
            info: Its info; None: it has none now.

        Raises:
            SchemaError: A value cannot be stored. The agent's open row is dropped.
        """
        found = self._agent(agent)
        found.obs, was_unseen, found.is_unseen = None, found.is_unseen, obs is not None
        try:
            leaves = found.policy.observations
            if obs is not None:
                found.obs = nested(leaves, _storable(own_leaves(leaves, obs, giver=ENV), leaves, Columns.OBS))
            found.is_unseen = False
            found.reward += as_reward(reward, giver=ENV)
            if self._infos and info is not None:
                found.info = stored_info(info)
            if was_unseen and obs is not None:
                raise SchemaError(
                    f"a step of agent {excerpt(agent)} is not recorded, because the observation before it "
                    "could not be stored",
                    column=Columns.OBS,
                )
        except SchemaError:
            self._drop(found)
            raise
        if found.row >= 0 and (obs is not None or any(ended)):
            self._close(found, ended)

    def _close(self, agent: _Agent, ended: tuple[bool, bool]) -> None:
        leaves = agent.policy.observations
        agent.policy.rows.close(
            np.array([agent.row]),
            rewards=[agent.reward],
            t=self._t,
            new_obs=None if agent.obs is None else stacked(leaves, [agent.obs]),
            ended=[ended],
            infos=[agent.info] if self._infos else None,
        )
        agent.row, agent.reward, agent.info = -1, 0.0, {}

    def act(self, actions: Mapping[Any, Any], extras: Mapping[Any, Mapping[str, Any]]) -> None:
        """Open the rows of agents that act, before the environment can change their actions.

        Args:
            actions: Agent id -> action.
            extras: Agent id -> further columns; the same ones for all agents of a policy.

        Raises:
            SchemaError: A value does not fit; no row is opened.
        """
        by_policy: dict[int, list[_Agent]] = {}
        acted = {}
        for agent_id, action in actions.items():
            agent = self._agent(agent_id)
            leaves = agent.policy.actions
            found = [
                fitted(leaf, leaf_of(action, leaf.path), column=Columns.ACTIONS, giver="the loop")
                for leaf in leaves
            ]
            acted[agent_id] = _storable(found, leaves, Columns.ACTIONS)
            if agent.obs is not None:
                by_policy.setdefault(id(agent.policy), []).append(agent)
        for agents in by_policy.values():
            self._open(agents, acted, extras)
        self._t += 1
        self._env_steps += 1

    def _open(
        self,
        agents: list[_Agent],
        actions: Mapping[Any, list[Any]],
        extras: Mapping[Any, Mapping[str, Any]],
    ) -> None:
        policy = agents[0].policy
        names = extras.get(agents[0].id_, {}).keys()
        for agent in agents:
            if extras.get(agent.id_, {}).keys() != names:
                raise SchemaError(
                    f"record() was given {excerpt(sorted(extras.get(agent.id_, {})))} for agent "
                    f"{excerpt(agent.id_)}, and {excerpt(sorted(names))} for agent {excerpt(agents[0].id_)}: "
                    "all agents of a policy have the same columns, from the first step on"
                )
        further = {
            name: np.stack([as_extra(name, extras[agent.id_][name]) for agent in agents]) for name in names
        }
        integers: dict[str, Any] = {
            Columns.EPS_ID: self._eps_id,
            Columns.T: self._t,
            Columns.ENV_ID: 0,
            Columns.AGENT_INDEX: [agent.index for agent in agents],
            EPISODE: self._episode,
        }
        if self._seeds:
            integers[Columns.ENV_SEED] = self._seed
        first = policy.rows.open(
            stacked(policy.observations, [agent.obs for agent in agents]),
            _batched(policy.actions, [actions[agent.id_] for agent in agents]),
            further,
            integers,
        )
        for row, agent in enumerate(agents, first):
            agent.row, agent.reward, agent.info = row, 0.0, {}

    def cut(self, seen: Mapping[Any, tuple[Any, Any]]) -> None:
        """Close the open rows of an episode that is left before its end.

        Args:
            seen: Agent id -> its observation and its reward since its last action, where they are known. A
                row without them has no final observation.
        """
        for agent_id, agent in self._agents.items():
            if agent.row < 0:
                continue
            obs, reward = seen.get(agent_id, (None, 0.0))
            self.see(agent_id, obs=obs, reward=reward)
            if agent.row >= 0:
                self._close(agent, (False, False))

    def forget(self) -> None:
        """Drop all open rows, because the state of the environment is unknown."""
        for agent in self._agents.values():
            self._drop(agent)
            agent.obs = None

    def _drop(self, agent: _Agent) -> None:
        if agent.row < 0:
            return
        chosen = np.zeros(len(agent.policy.rows), bool)
        chosen[agent.row] = True
        agent.row, agent.reward, agent.info = -1, 0.0, {}
        self._moved(agent.policy, agent.policy.rows.drop(chosen))

    def _moved(self, policy: _Policy, to: NDArray[np.int64]) -> None:
        for agent in self._agents.values():
            if agent.policy is policy and agent.row >= 0:
                agent.row = int(to[agent.row])

    # ---- agents and policies ----

    def _agent(self, agent_id: Any) -> _Agent:
        if agent_id not in self._agents:
            if agent_id not in self._names:
                self._names.append(agent_id)
            policy = self._policies[self._policy_of(agent_id)]
            self._agents[agent_id] = _Agent(agent_id, self._names.index(agent_id), policy)
        return self._agents[agent_id]

    def _policy_of(self, agent_id: Any) -> str:
        policy_id = self._mapping(agent_id)
        spaces = self._spaces(agent_id)
        policy = self._policies.get(policy_id)
        if policy is None:
            policy = self._policies[policy_id] = _Policy(spaces, infos=self._infos)
        if policy.spaces != spaces:
            raise OptionError(
                f"agent {excerpt(agent_id)} has the policy {excerpt(policy_id)} and the spaces {spaces[0]} "
                f"and {spaces[1]}, but other agents of that policy have {policy.spaces[0]} and "
                f"{policy.spaces[1]}: pass policy_mapping_fn=, which gives agents of unlike spaces other "
                "policies"
            )
        return policy_id

    # ---- rows ----

    @property
    def count(self) -> int:
        """Number of rows with a known outcome."""
        waiting = sum(policy.rows.closed_rows for policy in self._policies.values())
        return waiting + (0 if self._taken is None else self._taken.agent_steps())

    @property
    def full(self) -> bool:
        """Whether the rows should be written before another step."""
        return self.count >= MOST_ROWS

    def batch(self) -> MultiAgentBatch:
        """The rows with a known outcome; they stay here until `written` is called."""
        if self._taken is None:
            parts = {}
            for policy_id, policy in self._policies.items():
                if policy.rows.closed_rows:
                    columns, moved = policy.rows.take(policy.rows.closed)
                    self._moved(policy, moved)
                    parts[policy_id] = SampleBatch(self._recorded(columns), episode_starts=self._starts)
            self._taken = MultiAgentBatch(parts, self._env_steps)
            self._env_steps = 0
            # (Rows of an episode before the running one are all closed.)
            self._starts = {self._eps_id: self._starts[self._eps_id]}
        return self._taken

    def _recorded(self, columns: dict[str, Any]) -> dict[str, Any]:
        kept = {name: column for name, column in columns.items() if name not in _OF_ROWS}
        names = [str(self._names[index]) for index in columns[Columns.AGENT_INDEX].tolist()]
        return {**kept, AGENT_ID: object_column(names)}

    def written(self) -> None:
        """Drop the rows of the last `batch`."""
        self._taken = None


def _storable(values: list[Any], leaves: Sequence[Leaf], column: str) -> list[Any]:
    """The values of leaves, of which objects have a stored form; see `check_object`."""
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.is_object:
            check_object(leaf, value, column)
    return values


def _batched(leaves: Sequence[Leaf], values: Iterable[Sequence[Any]]) -> Any:
    """A batch of values, each given as its leaves."""
    columns = [
        object_column(parts) if leaf.is_object else np.array(parts)
        for leaf, parts in zip(leaves, zip(*values, strict=True), strict=True)
    ]
    return columns[0] if not leaves[0].path else unflatten([leaf.path for leaf in leaves], columns)


def policies_of(
    agents: Sequence[Any],
    spaces: Callable[[Any], tuple[gym.Space[Any], gym.Space[Any]]],
    mapping: PolicyMappingFn | None,
) -> tuple[PolicyMappingFn, dict[str, tuple[gym.Space[Any], gym.Space[Any]]]]:
    """The policy of each agent, and the spaces of each policy.

    Args:
        agents: The agents.
        spaces: Returns the spaces of an agent.
        mapping: Agent id -> policy id. None: ``default_policy`` if all agents have equal spaces, else each
            agent has a policy of its own name.

    Raises:
        OptionError: ``mapping`` gives something other than a str.
    """
    if mapping is None:
        alike = all(spaces(agent) == spaces(agents[0]) for agent in agents)
        mapping = (lambda agent: DEFAULT_POLICY_ID) if alike else str
    found: dict[str, tuple[gym.Space[Any], gym.Space[Any]]] = {}
    for agent in agents:
        policy_id = mapping(agent)
        if not isinstance(policy_id, str):
            raise OptionError(
                f"policy_mapping_fn({excerpt(agent)}) returned {excerpt(policy_id)}: expected a policy id, "
                "a str"
            )
        found.setdefault(policy_id, spaces(agent))
    return mapping, found
