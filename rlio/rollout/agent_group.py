"""`AgentGroup`: the agents for which one policy acts, in all environments of a runner.

It brings their observations to the policy in one batch, keeps their rows, and the recurrent state of each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.columns import STATE_OUT_PREFIX, Columns
from rlio.connectors.actions import ClipAction, UnsquashAction
from rlio.connectors.connector import ActionPipeline, ConnectorLike, ObservationPipeline, Streams
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.envs.multi_agent import AgentId
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.nested import map_structure
from rlio.policies.random_policy import RandomPolicy
from rlio.rollout.acting import STATE_BEFORE_PREFIX, check_extras
from rlio.rollout.agent_rows import AGENT_T, EPISODE, AgentRows, stacked, structured

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy import Policy
    from rlio.rollout.config import RolloutConfig

__all__ = ["Agent", "AgentEpisode", "AgentGroup"]

_INPUTS = (
    Columns.PREV_ACTIONS, Columns.PREV_REWARDS, Columns.T, Columns.EPS_ID, Columns.ENV_ID,
    Columns.AGENT_INDEX,
)  # fmt: skip


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
        self._observations = ObservationPipeline(config.observation_connectors, observation_space, policy)
        self._actions = ActionPipeline([*config.action_connectors, *_bounding(config)], action_space, policy)
        self._seed, self._random_seed = seed, random_seed
        self._meet(policy)
        self._records_seeds = config.record_env_seeds
        self._random: Policy | None = None
        self._action_leaves = leaves_of(self._actions.space)
        self.rows = AgentRows(self._observations.space, self._actions.space, infos=config.record_infos)
        #: How many slots there are, and which of them nobody has.
        self._slots = 0
        self._free: list[int] = []
        #: By slot: what a recurrent policy remembers, and what it did and got last.
        self._state: list[NDArray[Any]] = []
        self._before: dict[str, list[NDArray[Any]]] = {}
        self.waiting: list[Agent] = []
        self._obs: Any = None
        self._arrived: list[Agent] = []
        self._ended: list[tuple[Agent, tuple[bool, bool], Any]] = []
        self._lost: list[tuple[Agent, tuple[bool, bool]]] = []

    def _meet(self, policy: Policy) -> None:
        """``policy`` acts from now on: the first time, or in place of another of the same id."""
        policy.bind(self._observations.space, self._actions.space, self._seed)
        self._inputs = _checked_inputs(policy)
        # A PolicyMap puts away what nobody holds.
        self._met = weakref.ref(policy)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Of the observations that the policy gets."""
        return self._observations.space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Of the actions that the policy gives."""
        return self._actions.space

    @property
    def connectors(self) -> tuple[ObservationPipeline, ActionPipeline]:
        """Before and behind the policy."""
        return self._observations, self._actions

    def agent(self, id_: AgentId, index: int, episode: AgentEpisode) -> Agent:
        """An agent that joins."""
        return Agent(id_, index, episode, self, self._slot())

    def _slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1

    def release(self, agent: Agent) -> None:
        """The episode of ``agent`` is over: others may have its slot."""
        self._free.append(agent.slot)

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
        if Columns.PREV_REWARDS in self._before and ended is None:
            (rewards,) = self._before[Columns.PREV_REWARDS]
            rewards[[agent.slot for agent in agents]] = [agent.reward for agent in agents]
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
        if self._met() is not policy:
            self._meet(policy)
        agents, obs = self._chosen(envs)
        if not agents:
            return []
        acting = self._random_policy() if at_random else policy
        slots = np.array([agent.slot for agent in agents])
        starts = np.flatnonzero([agent.is_new for agent in agents])
        integers = self._integers_of(agents)
        with acting.lock:
            state = self._state_of(acting, slots, starts)
            inputs = self._inputs_of(integers, slots, starts) if acting.input_columns else None
            actions, after, extras = acting.compute_actions(
                obs, state, explore=explore, inputs=inputs, timestep=timestep
            )
            integers[Columns.WEIGHTS_SEQ_NO] = acting.weights_seq_no
        check_extras(extras)
        if after:
            extras = dict(extras)
        for k, (kept, old, new) in enumerate(zip(self._state, state, after, strict=True)):
            kept[slots] = new
            extras |= {f"{STATE_OUT_PREFIX}{k}": new, f"{STATE_BEFORE_PREFIX}{k}": old}
        first = self.rows.open(obs, actions, extras, integers)
        if self._inputs:
            self._remember_actions(actions, slots)
        for row, agent in enumerate(agents, first):
            agent.row, agent.is_new = row, False
            agent.steps += 1
        sent = self._actions(actions, _streams(agents)) if len(self._actions) else actions
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

    def _state_of(
        self, policy: Policy, slots: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[NDArray[Any], ...]:
        initial = policy.initial_state(len(starts))
        if not initial:
            self._state = []
            return ()
        size = self._slots
        if [part.shape[1:] for part in self._state] != [part.shape[1:] for part in initial]:
            starts = np.arange(len(slots))  # A policy that remembers other things than the one before.
            initial = policy.initial_state(len(starts))
            self._state = [np.zeros((size, *part.shape[1:]), part.dtype) for part in initial]
        self._state = [_at_least(part, size) for part in self._state]
        for part, fresh in zip(self._state, initial, strict=True):
            part[slots[starts]] = fresh
        return tuple(part[slots] for part in self._state)

    def _inputs_of(
        self, known: dict[str, Any], slots: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> SampleBatch:
        """What the policy asked for in `Policy.input_columns`."""
        size = self._slots
        if not self._before:
            self._before = {
                Columns.PREV_ACTIONS: [
                    np.zeros((size, *leaf.shape), leaf.dtype) for leaf in self._action_leaves
                ],
                Columns.PREV_REWARDS: [np.zeros(size, np.float32)],
            }
        for name, buffers in self._before.items():
            self._before[name] = [_at_least(buffer, size) for buffer in buffers]
            for buffer in self._before[name]:
                buffer[slots[starts]] = 0
        actions = [buffer[slots] for buffer in self._before[Columns.PREV_ACTIONS]]
        (rewards,) = self._before[Columns.PREV_REWARDS]
        inputs = {
            **known,
            Columns.PREV_ACTIONS: structured(self._action_leaves, actions),
            Columns.PREV_REWARDS: rewards[slots],
        }
        return SampleBatch({name: inputs[name] for name in self._inputs})

    def _remember_actions(self, actions: Any, slots: NDArray[np.int64]) -> None:
        buffers = self._before.get(Columns.PREV_ACTIONS, ())
        for leaf, buffer in zip(self._action_leaves, buffers, strict=False):
            buffer[slots] = leaf_of(actions, leaf.path)

    def _random_policy(self) -> Policy:
        if self._random is None:
            self._random = RandomPolicy()
            self._random.bind(self.observation_space, self.action_space, self._random_seed())
        return self._random

    def leave(self) -> list[Agent]:
        """Let those who wait go: to another policy, as there is none here any more."""
        agents, self.waiting, self._obs = self.waiting, [], None
        return agents

    def take_over(self, agent: Agent) -> None:
        """``agent`` comes from another group, and acts here on what it has seen last."""
        agent.group, agent.is_new, agent.last, agent.slot = self, True, -1, self._slot()
        self.arrive(agent, agent.seen)

    def forget(self) -> None:
        """All episodes are over: nobody waits."""
        self.waiting, self._obs = [], None
        self._arrived = []
        self._ended.clear()
        self._lost.clear()
        self._free = list(range(self._slots))

    def forget_env(self, env_index: int) -> None:
        """The episode in one environment is discarded: nobody there waits any more."""
        if any(agent.episode.env_index == env_index for agent in self.waiting):
            others = {agent.episode.env_index for agent in self.waiting} - {env_index}
            kept, obs = self._chosen(others)
            self.waiting, self._obs = kept, obs


def _bounding(config: RolloutConfig) -> list[ConnectorLike]:
    """What the config's flags do to actions, last of all."""
    scales: list[ConnectorLike] = [UnsquashAction()] if config.normalize_actions else []
    return [*scales, ClipAction()] if config.clip_actions else scales


def _checked_inputs(policy: Policy) -> tuple[str, ...]:
    for name in policy.input_columns:
        if name not in _INPUTS:
            raise OptionError(
                f"{type(policy).__name__}.input_columns has {excerpt(name)}: known are {', '.join(_INPUTS)}"
            )
    return tuple(policy.input_columns)


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


def _at_least(buffer: NDArray[Any], size: int) -> NDArray[Any]:
    """``buffer`` with at least ``size`` rows."""
    if len(buffer) >= size:
        return buffer
    made = np.zeros((2 * size, *buffer.shape[1:]), buffer.dtype)
    made[: len(buffer)] = buffer
    return made
