"""`AgentGroup`: the agents for which one policy acts, in all environments of a runner.

It brings their observations to the policy in one batch, keeps their rows, and the recurrent state of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.connectors.connector import Streams
from rlio.envs.leaves import leaves_of
from rlio.envs.multi_agent import AgentId
from rlio.errors import SchemaError, excerpt
from rlio.sampling.actor import Actor
from rlio.sampling.agent_rows import AGENT_T, EPISODE, AgentRows, stacked

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy import Policy
    from rlio.sampling.config import RolloutConfig

__all__ = ["Agent", "AgentEpisode", "AgentGroup"]


@dataclass(slots=True, eq=False)
class AgentEpisode:
    """What the rows of all agents of one running episode have in common.

    Attributes:
        env_index: Its environment.
        number: Of the episode in its runner.
        eps_id: Its id.
        seed: What its reset was seeded with.
        t: Steps of the environment so far.
    """

    env_index: int
    number: int
    eps_id: int
    seed: int
    t: int = 0


@dataclass(slots=True, eq=False)
class Agent:
    """An agent of a running episode.

    Attributes:
        id_: Its id.
        index: Its ``agent_index``.
        episode: Its episode.
        group: The policy's agents, among which it is.
        slot: Its number there: of nobody else as long as the episode runs.
        row: Its open row; -1 if it has none.
        last: Its last closed row that was not handed out; -1 if there is none.
        reward: What it got since it acted, or before it ever did, as it is recorded.
        total: What it got in all.
        steps: How often it has acted.
        is_new: Whether it has not acted for this policy in this episode.
        seen: Its last observation, as the environment gave it, while it waits to act.
        info: The last it got since it acted.
    """

    id_: AgentId
    index: int
    episode: AgentEpisode
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
        policy: Bound here, if it was not before. It is not kept: whoever acts is given to `act`.
        observation_space: Of one agent of the group, as the environment has it.
        action_space: The same of actions.
        config: Which connectors there are, and what is recorded.
        seed: Of the policy, if it is bound here.
        random_seed: Gives the seed of random actions, once they are asked for.

    Attributes:
        waiting: Agents that are to act, in the order of the batch.
        rows: Of the group.
        actor: The policy between its connectors.

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
        #: As the environments have them: equal for all agents of the group.
        self.env_spaces = observation_space, action_space
        #: Agents of which it is known that they have these spaces.
        self.fitting: set[AgentId] = set()
        self._env_leaves = leaves_of(observation_space)
        self.actor = Actor(
            policy, observation_space, action_space, config=config, seed=seed, random_seed=random_seed
        )
        self._observations, self._actions = self.actor.observations, self.actor.actions
        self._records_seeds = config.record_env_seeds
        self.rows = AgentRows(self._observations.space, self._actions.space, infos=config.record_infos)
        self.waiting: list[Agent] = []
        self._obs: Any = None
        self._arrived: list[Agent] = []
        self._ended: list[tuple[Agent, tuple[bool, bool], Any]] = []
        self._lost: list[tuple[Agent, tuple[bool, bool]]] = []

    def agent(self, id_: AgentId, index: int, episode: AgentEpisode) -> Agent:
        """An agent that joins."""
        return Agent(id_, index, episode, self, self.actor.new_slot())

    def release(self, agent: Agent) -> None:
        """The episode of ``agent`` is over: others may have its slot."""
        self.actor.free_slot(agent.slot)

    # ---- what environments say ----

    def arrive(self, agent: Agent, obs: Any) -> None:
        """``agent`` sees ``obs`` and is to act."""
        agent.seen = obs
        self._arrived.append(agent)

    def end(self, agent: Agent, flags: tuple[bool, bool], obs: Any) -> None:
        """``agent``, which has acted, has ended and saw ``obs``."""
        # A copy: the environment may be reset before `settle`, and write over what it gave.
        self._ended.append((agent, flags, map_structure(_copied, obs)))

    def end_unseen(self, agent: Agent, flags: tuple[bool, bool]) -> None:
        """``agent``, which has acted, has ended, and nobody knows what it would have seen."""
        self._lost.append((agent, flags))

    def settle(self) -> None:
        """Close rows of what was said since the last call, and bring observations to the policy's form.

        Raises:
            SchemaError: An observation does not fit its space.
        """
        # Final observations first: a slot's next episode may have begun in the same step.
        if self._ended:
            agents = [agent for agent, _, _ in self._ended]
            obs = self._stack(agents, [seen for _, _, seen in self._ended])
            if len(self._observations):
                obs = self._observations.final(obs, _streams(agents))
            self._close(agents, new_obs=obs, ended=[flags for _, flags, _ in self._ended])
            self._ended.clear()
        if self._lost:
            agents = [agent for agent, _ in self._lost]
            self._close(agents, ended=[flags for _, flags in self._lost])
            self._lost.clear()
        if self._arrived:
            self._settle_arrived()

    def _settle_arrived(self) -> None:
        agents = self._arrived
        obs = self._stack(agents, [agent.seen for agent in agents])
        if len(self._observations):
            obs = self._observations(obs, _streams(agents))
        at = [i for i, agent in enumerate(agents) if agent.row >= 0]
        if at:
            acted = agents if len(at) == len(agents) else [agents[i] for i in at]
            self._close(acted, new_obs=obs if acted is agents else map_structure(lambda leaf: leaf[at], obs))
        if self.waiting:  # of environments that were not stepped
            obs = map_structure(lambda *parts: np.concatenate(parts), self._obs, obs)
        self.waiting, self._obs = self.waiting + agents, obs
        self._arrived = []

    def _stack(self, agents: Sequence[Agent], seen: Sequence[Any]) -> Any:
        try:
            return stacked(self._env_leaves, seen)
        except SchemaError as error:
            odd = [agent for agent, obs in zip(agents, seen, strict=True) if not self._fits(obs)]
            where = f"agent {excerpt(odd[0].id_)} in environment {odd[0].episode.env_index}: " if odd else ""
            raise SchemaError(f"{where}{error}") from error

    def _fits(self, obs: Any) -> bool:
        try:
            stacked(self._env_leaves, [obs])
        except SchemaError:
            return False
        return True

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
        """Let the policy act for agents that wait, and open their rows.

        Args:
            policy: The policy, as it is now.
            envs: Those whose agents act; None: all. The others go on waiting.
            explore: See `Policy.compute_actions`.
            at_random: Whether a `RandomPolicy` acts in its place.
            timestep: Environment steps sampled so far.

        Returns:
            The agents, and what the environment gets as their actions.
        """
        agents, obs = self._chosen(envs)
        if not agents:
            return []
        streams, integers = _streams(agents), self._integers_of(agents)
        acted = self.actor.act(
            policy, obs, streams, integers, explore=explore, timestep=timestep, at_random=at_random
        )
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
        """What is known of the rows that ``agents`` open, before any policy acts."""
        known: dict[str, Any] = {
            Columns.EPS_ID: [agent.episode.eps_id for agent in agents],
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
        """Those who act now, taken from those who wait, and what they see."""
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
        """Let those who wait go: to another policy, as there is none here any more."""
        agents, self.waiting, self._obs = self.waiting, [], None
        return agents

    def take_over(self, agent: Agent) -> None:
        """``agent`` comes from another group, and acts here on what it has seen last."""
        agent.group, agent.is_new, agent.last, agent.slot = self, True, -1, self.actor.new_slot()
        self.arrive(agent, agent.seen)

    def forget(self) -> None:
        """All episodes are over: nobody waits."""
        self.waiting, self._obs = [], None
        self._arrived = []
        self._ended.clear()
        self._lost.clear()
        self.actor.free_slots()

    def forget_env(self, env_index: int) -> None:
        """The episode in one environment is discarded: nobody there waits any more."""
        if any(agent.episode.env_index == env_index for agent in self.waiting):
            others = {agent.episode.env_index for agent in self.waiting} - {env_index}
            kept, obs = self._chosen(others)
            self.waiting, self._obs = kept, obs


def _streams(agents: Sequence[Agent]) -> Streams:
    return Streams(
        np.array([agent.slot for agent in agents]), np.array([agent.is_new for agent in agents], bool)
    )


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _each(batched: Any, n: int) -> list[Any]:
    """The values of a batch one by one."""
    if isinstance(batched, dict):
        parts = {key: _each(value, n) for key, value in batched.items()}
        return [{key: values[i] for key, values in parts.items()} for i in range(n)]
    if isinstance(batched, tuple):
        return list(zip(*(_each(value, n) for value in batched), strict=True))
    return list(batched)
