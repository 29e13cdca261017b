"""`AgentGroup`: the agents for which one policy acts, in all environments of a runner.

It batches the agents' observations for the policy, and keeps their rows and recurrent states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.batch.nested import map_structure
from rlio.connectors.connector import Streams
from rlio.envs.leaves import leaves_of
from rlio.envs.multi_agent import AgentId
from rlio.errors import SchemaError, excerpt
from rlio.sampling.actor import Acted, Actor
from rlio.sampling.agent_rows import AGENT_T, EPISODE, AgentRows, stacked
from rlio.support.clock import utc_ms

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy import Policy
    from rlio.sampling.callbacks import RunningEpisode
    from rlio.sampling.config import RolloutConfig
    from rlio.sampling.policy_group import MappingFn

__all__ = ["UNSEEN", "Agent", "AgentGroup", "PlayedEpisode"]

#: Stands for a final observation that the environment did not return.
UNSEEN: Final = object()


@dataclass(slots=True, eq=False)
class PlayedEpisode:
    """An episode of several agents, from its beginning until its last rows are handed out.

    Attributes:
        shown: The episode that callbacks see.
        number: Number of the episode in its runner.
        seed: Seed of its reset.
        mapping: The mapping when the episode began.
        before: The policies of agents that acted before the last soft horizon.
        t: Environment steps so far.
        agents: Agents that have appeared and acted or will act.
        ids: The agents' ids, by ``agent_index``.
        early: Rewards of agents that have not appeared: (original, recorded).
        fresh: Environment steps that were not handed out.
        began: Start time, in seconds of `time.perf_counter`.
        began_at: Start time, see `SampleBatch.episode_starts`.
        is_over: Whether it ended.
        terminated: Whether it terminated.
        truncated: Whether it was truncated.
    """

    shown: RunningEpisode
    number: int
    seed: int
    mapping: MappingFn
    before: dict[AgentId, str]
    t: int = 0
    agents: dict[AgentId, Agent] = field(default_factory=dict)
    ids: dict[int, AgentId] = field(default_factory=dict)
    early: dict[AgentId, tuple[float, float]] = field(default_factory=dict)
    fresh: int = 0
    began: float = field(default_factory=time.perf_counter)
    began_at: int = field(default_factory=utc_ms)
    is_over: bool = False
    terminated: bool = False
    truncated: bool = False

    @property
    def env_index(self) -> int:
        """Index of its environment."""
        return self.shown.env_index

    @property
    def agent_steps(self) -> int:
        """Number of rows, including open ones."""
        return sum(agent.steps for agent in self.agents.values())


@dataclass(slots=True, eq=False)
class Agent:
    """An agent of a running episode.

    Attributes:
        id_: The agent's id.
        index: Its ``agent_index``.
        episode: Its episode.
        group: The group that contains the agent.
        slot: Its slot in the group, reserved for it while the episode runs.
        row: Number of its open row; -1 if it has none.
        last: Number of its last closed row that was not handed out; -1 if there is none.
        reward: Recorded reward since its last action, or before its first.
        total: Its total reward.
        steps: Number of its actions.
        is_new: Whether it has not yet acted with this policy in this episode.
        seen: Its last observation, as the environment returned it, while it waits to act.
        info: The latest info since its last action.
    """

    id_: AgentId
    index: int
    episode: PlayedEpisode
    group: AgentGroup
    slot: int
    row: int = -1
    last: int = -1
    reward: float = 0.0
    total: float = 0.0
    steps: int = 0
    is_new: bool = True
    seen: Any = None
    info: Any = None


class AgentGroup:
    """Agents, the policy that acts for them, and their rows.

    Args:
        policy_id: The policy's id.
        policy: Bound here if it is not bound yet. The group does not keep it; callers pass the acting policy
            to `act`.
        observation_space: Space of one agent's observation, as the environment defines it.
        action_space: Space of one agent's action, as the environment defines it.
        config: Defines the connectors and the recorded columns.
        seed: Seed of the policy, if it is bound here.
        random_seed: Returns the seed of random actions, called when first needed.

    Attributes:
        waiting: Agents that wait to act, in the order of the batch.
        rows: The group's rows.
        actor: The policy with its connectors.

    Raises:
        OptionError: The policy cannot act in these spaces.
    """

    def __init__(
        self,
        policy_id: str,
        policy: Policy,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        config: RolloutConfig,
        seed: int,
        random_seed: Callable[[], int],
    ) -> None:
        self.policy_id = policy_id
        #: The spaces as the environments define them, equal for all agents of the group.
        self.env_spaces: tuple[gym.Space[Any], gym.Space[Any]] = observation_space, action_space
        #: Agents known to have these spaces.
        self.fitting: set[AgentId] = set()
        self._env_leaves = leaves_of(observation_space)
        self.actor: Actor = Actor(
            policy, observation_space, action_space, config=config, seed=seed, random_seed=random_seed
        )
        self._observations, self._actions = self.actor.observations, self.actor.actions
        self._records_seeds = config.record_env_seeds
        self.rows: AgentRows = AgentRows(
            self._observations.space, self._actions.space, infos=config.record_infos
        )
        self.waiting: list[Agent] = []
        #: Changes what the policy chose, before it is recorded.
        self.adapt: Callable[[Sequence[Agent], Acted], Acted] | None = None
        self._obs: Any = None
        self._arrived: list[Agent] = []
        self._ended: list[tuple[Agent, tuple[bool, bool]]] = []

    def agent(self, id_: AgentId, index: int, episode: PlayedEpisode) -> Agent:
        """Add an agent to an episode."""
        return Agent(id_, index, episode, self, self.actor.new_slot())

    def release(self, agent: Agent) -> None:
        """Free the slot of ``agent``, whose episode ended."""
        self.actor.free_slot(agent.slot)

    # ---- results of environments ----

    def arrive(self, agent: Agent, obs: Any) -> None:
        """Record that ``agent`` observes ``obs`` and must act."""
        # A copy, because another environment is stepped before `settle`, and may share its arrays.
        agent.seen = own_copy(obs)
        self._arrived.append(agent)

    def end(self, agent: Agent, flags: tuple[bool, bool], obs: Any) -> None:
        """End ``agent``, which has acted, with the final observation ``obs``, or `UNSEEN`."""
        agent.seen = own_copy(obs)
        self._ended.append((agent, flags))

    def settle(self) -> None:
        """Close the rows of all results since the last call, and convert observations for the policy.

        Raises:
            SchemaError: An observation does not fit its space.
        """
        # Final observations come first, because a slot's next episode may have begun in the same step.
        self.settle_ended()
        if self._arrived:
            self._settle_arrived()

    def settle_ended(self) -> None:
        """Close the rows of the agents that ended since the last call."""
        for are_seen in (True, False):
            ended = [each for each in self._ended if (each[0].seen is not UNSEEN) is are_seen]
            if not ended:
                continue
            agents = [agent for agent, _ in ended]
            obs = self._final(agents) if are_seen else None
            self._close(agents, new_obs=obs, ended=[flags for _, flags in ended])
        self._ended.clear()

    def _final(self, agents: Sequence[Agent]) -> Any:
        obs = self._stack(agents)
        return self._observations.final(obs, _streams(agents)) if len(self._observations) else obs

    def _settle_arrived(self) -> None:
        agents = self._arrived
        obs = self._stack(agents)
        if len(self._observations):
            obs = self._observations(obs, _streams(agents))
        at = [i for i, agent in enumerate(agents) if agent.row >= 0]
        if at:
            acted = agents if len(at) == len(agents) else [agents[i] for i in at]
            self._close(acted, new_obs=obs if acted is agents else map_structure(lambda leaf: leaf[at], obs))
        if self.waiting:  # agents of environments that were not stepped
            obs = map_structure(lambda *parts: np.concatenate(parts), self._obs, obs)
        self.waiting, self._obs = self.waiting + agents, obs
        self._arrived = []

    def _stack(self, agents: Sequence[Agent]) -> Any:
        """The observations of ``agents`` in one batch."""
        try:
            return stacked(self._env_leaves, [agent.seen for agent in agents])
        except SchemaError:
            for agent in agents:
                self._check(agent)
            raise

    def _check(self, agent: Agent) -> None:
        try:
            stacked(self._env_leaves, [agent.seen])
        except SchemaError as error:
            where = f"agent {excerpt(agent.id_)} in environment {agent.episode.env_index}"
            raise SchemaError(f"{where}: {error}") from error

    def _close(
        self, agents: Sequence[Agent], *, new_obs: Any = None, ended: list[tuple[bool, bool]] | None = None
    ) -> None:
        self.rows.close(
            np.array([agent.row for agent in agents]),
            rewards=[agent.reward for agent in agents],
            t=[agent.episode.t for agent in agents],
            new_obs=new_obs,
            ended=ended,
            infos=[{} if agent.info is None else agent.info for agent in agents],
        )
        if self.actor.remembers_steps and ended is None:
            self.actor.reward([agent.slot for agent in agents], [agent.reward for agent in agents])
        for agent in agents:
            agent.last, agent.row, agent.reward, agent.info = agent.row, -1, 0.0, None

    # ---- acting ----

    def act(
        self,
        policy: Policy,
        envs: Collection[int] | None = None,
        *,
        explore: bool,
        at_random: bool,
        timestep: int,
    ) -> list[tuple[Agent, Any]]:
        """Compute actions for waiting agents, and open their rows.

        Args:
            policy: The current policy.
            envs: Environments whose agents act; None: all. The other agents keep waiting.
            explore: See `Policy.compute_actions`.
            at_random: Whether a `RandomPolicy` acts instead.
            timestep: Environment steps sampled so far.

        Returns:
            The agents with the actions for the environment.
        """
        agents, obs = self._chosen(envs)
        if not agents:
            return []
        streams, integers = _streams(agents), self._integers_of(agents)
        acted = self.actor.act(
            policy, obs, streams, integers, explore=explore, timestep=timestep, at_random=at_random
        )
        if self.adapt is not None:
            acted = self.adapt(agents, acted)
        integers[Columns.WEIGHTS_SEQ_NO] = acted.weights_seq_no
        first = self.rows.open(obs, acted.actions, acted.extras, integers)
        self.actor.keep(streams.slots, acted)
        for row, agent in enumerate(agents, first):
            agent.row, agent.is_new = row, False
            agent.steps += 1
        sent = acted.actions
        if len(self._actions):
            sent = self._actions(sent, streams)
        return list(zip(agents, _each(sent, len(agents)), strict=True))

    def _integers_of(self, agents: Sequence[Agent]) -> dict[str, Any]:
        """The integer columns of the rows that ``agents`` open, known before the policy acts."""
        known: dict[str, Any] = {
            Columns.EPS_ID: [agent.episode.shown.eps_id for agent in agents],
            Columns.T: [agent.episode.t for agent in agents],
            Columns.ENV_ID: [agent.episode.env_index for agent in agents],
            Columns.AGENT_INDEX: [agent.index for agent in agents],
            EPISODE: [agent.episode.number for agent in agents],
            AGENT_T: [agent.steps for agent in agents],
        }
        if self._records_seeds:
            known[Columns.ENV_SEED] = [agent.episode.seed for agent in agents]
        return known

    def _chosen(self, envs: Collection[int] | None) -> tuple[list[Agent], Any]:
        """Take the agents that act now from the waiting ones, with their observations."""
        agents, obs = self.waiting, self._obs
        self.waiting, self._obs = [], None
        if envs is None or not agents:
            return agents, obs
        acts = [agent.episode.env_index in envs for agent in agents]
        now, later = np.flatnonzero(acts), np.flatnonzero(np.logical_not(acts))
        self.waiting = [agents[i] for i in later]
        if self.waiting:
            self._obs = map_structure(lambda leaf: leaf[later], obs)
        return [agents[i] for i in now], map_structure(lambda leaf: leaf[now], obs)

    def leave(self) -> list[Agent]:
        """Remove and return the waiting agents, because the policy no longer exists."""
        agents, self.waiting, self._obs = self.waiting, [], None
        return agents

    def take_over(self, agent: Agent) -> None:
        """Take ``agent`` from another group; it acts here on its last observation."""
        agent.group, agent.is_new, agent.last, agent.slot = self, True, -1, self.actor.new_slot()
        self.arrive(agent, agent.seen)

    def forget(self) -> None:
        """Forget all episodes and waiting agents."""
        self.waiting, self._obs = [], None
        self._arrived = []
        self._ended.clear()
        self.actor.free_slots()

    def forget_env(self, env_index: int) -> None:
        """Forget the waiting agents of one environment, whose episode is discarded."""
        if any(agent.episode.env_index == env_index for agent in self.waiting):
            others = {agent.episode.env_index for agent in self.waiting} - {env_index}
            kept, obs = self._chosen(others)
            self.waiting, self._obs = kept, obs


def _streams(agents: Sequence[Agent]) -> Streams:
    return Streams(
        np.array([agent.slot for agent in agents]), np.array([agent.is_new for agent in agents], bool)
    )


def _each(batched: Any, n: int) -> list[Any]:
    """Split a batch into single values."""
    if isinstance(batched, dict):
        parts = {key: _each(value, n) for key, value in batched.items()}
        return [{key: values[i] for key, values in parts.items()} for i in range(n)]
    if isinstance(batched, tuple):
        return list(zip(*(_each(value, n) for value in batched), strict=True))
    return list(batched)
