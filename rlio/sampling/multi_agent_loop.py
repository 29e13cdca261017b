"""`MultiAgentLoop`: steps episodes of several agents in several environments.

It calls policies, steps environments, and opens and closes rows. `MultiAgentEnvRunner` decides which rows to
hand out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.copies import own_copy
from rlio.connectors.clip import clip_rewards
from rlio.envs.multi_agent import COMMON_INFO, AgentId
from rlio.envs.multi_agent_stepping import MultiAgentStep
from rlio.envs.values import as_info, as_reward
from rlio.errors import SchemaError, excerpt
from rlio.sampling.agent_group import UNSEEN, Agent, AgentGroup, PlayedEpisode
from rlio.sampling.agent_mapping import AgentMapping
from rlio.sampling.agent_rows import EPISODE
from rlio.sampling.callbacks import Callbacks, RunningEpisode, overridden
from rlio.sampling.config import RolloutConfig
from rlio.sampling.metrics import MetricsCollector, PerfCounters
from rlio.sampling.multi_agent_envs import MultiAgentEnvs
from rlio.sampling.progress import Progress

__all__ = ["MultiAgentLoop"]

logger: logging.Logger = logging.getLogger("rlio")

_LOOKING = frozenset({"on_episode_start", "on_episode_step", "on_episode_end"})


class MultiAgentLoop:
    """Steps episodes and records them.

    Args:
        envs: The environments.
        mapping: Maps agents to policies.
        config: How to step and record.
        callbacks: Called on episode events.
        metrics: Counts steps and episodes.
        progress: Counts rows that are opened, and rows that will never be handed out.
        runner: Passed to callbacks as ``runner``.
        worker_index: Index of the runner's worker.

    Attributes:
        playing: Environment -> its running episode.
        over: Ended episodes that were not handed out, in the order of their ends.
        fresh: Environment steps that were not handed out, excluding failed episodes.
        env_steps: Environment steps so far.
        late_rewards: Sum of the rewards that came after their row was handed out.
        explore: Whether policies explore.
        at_random: Whether actions are drawn uniformly at random.
        ids: Draws the ids of new episodes; set it before `begin`.
        is_ready: Whether `step` can be called: False before `begin`, and after a step that failed halfway.
        postprocess: Called with an episode that is about to end or to be cut, before ``on_episode_end``; None
            calls nothing.
    """

    ids: np.random.Generator

    def __init__(
        self,
        envs: MultiAgentEnvs,
        mapping: AgentMapping,
        *,
        config: RolloutConfig,
        callbacks: Callbacks,
        metrics: MetricsCollector,
        progress: Progress,
        runner: Any = None,
        worker_index: int = 0,
    ) -> None:
        self.envs = envs
        self.mapping = mapping
        self.playing: dict[int, PlayedEpisode] = {}
        self.over: list[PlayedEpisode] = []
        self.fresh: int = 0
        self.env_steps: int = 0
        self.late_rewards: float = 0.0
        self.explore: bool = config.explore
        self.at_random: bool = False
        self.is_ready: bool = False
        self.postprocess: Callable[[PlayedEpisode], None] | None = None
        self._config = config
        self._callbacks = callbacks
        self._hooks = overridden(callbacks)
        self._metrics = metrics
        self._progress = progress
        self._runner = runner
        self._worker_index = worker_index
        self._episodes = 0
        self._keeps_infos = config.record_infos
        self._looks = bool(self._hooks & _LOOKING)
        # Only the first of several workers renders.
        self._renders = config.render_env and worker_index <= 1
        # Environment by environment, as RLlib does, except where rows would depend on it, or where an
        # environment that fails afterwards would leave the fragment incomplete.
        self._cuts_in_turn = (
            "on_postprocess_trajectory" in self._hooks
            and not config.observation_connectors
            and not config.restart_failed_sub_environments
        )
        self._indexes = {agent: i for i, agent in enumerate(envs.envs[0].possible_agents)}

    @property
    def groups(self) -> Mapping[str, AgentGroup]:
        """Policy id -> the group of its agents and rows."""
        return self.mapping.groups

    # ---- beginning ----

    def begin(self) -> None:
        """Start new episodes in all environments; drops the rows of the old ones."""
        self.is_ready = False
        self.forget()
        for index in self.envs.up:
            self._start(index)
        self._settle()
        self.is_ready = True

    def forget(self) -> None:
        """Forget all episodes, and drop their rows."""
        self._count_dropped(sum(len(group.rows) for group in self.groups.values()))
        for group in self.groups.values():
            group.forget()
            group.rows.empty()
        for policy_id in self.groups.keys() - self.mapping.policies.keys():
            del self.mapping.groups[policy_id]
        self.playing.clear()
        self.over.clear()
        self.fresh = 0

    def _count_dropped(self, rows: int) -> None:
        self._progress.dropped += rows
        if rows:
            self._metrics.rows_dropped(rows)

    def revive(self) -> None:
        """Start episodes in failed environments that are due for a restart; waits for one if all are down."""
        if not self.envs.restarts.down:
            return
        revived = self.envs.revive(wait=not self.playing)
        for index in revived:
            self._start(index)
        if revived:
            self._settle()

    def _start(self, index: int) -> None:
        """Begin an episode in an environment; marks the environment as down if that fails."""
        shown = self._created(index)
        step = self.envs.reset(index)
        if step is None:
            self._metrics.episodes_failed(1)
            self._call_end(shown, self.envs.errors[index])
            return
        self._play(shown, step)

    def _created(self, index: int) -> RunningEpisode:
        eps_id = int(self.ids.integers(0, 1 << 63, dtype=np.int64))
        shown = RunningEpisode(eps_id, index, self._worker_index)
        self._call("on_episode_created", shown)
        return shown

    def _play(
        self, shown: RunningEpisode, step: MultiAgentStep, *, before: dict[AgentId, str] | None = None
    ) -> None:
        index = shown.env_index
        seed = self.envs.seeds.current[index] or 0
        episode = PlayedEpisode(shown, self._episodes, seed, self.mapping.function, before or {})
        self._episodes += 1
        self.playing[index] = episode
        self._arrive(episode, step)
        if self._looks:
            self._look(episode, step, {})
            self._call("on_episode_start", shown)

    # ---- a step ----

    def step(self, envs: Collection[int] | None = None, *, wanted: int | None = None) -> None:
        """Step environments once, and record the step.

        Args:
            envs: The environments; None: all with a running episode.
            wanted: The value of `fresh` with which the fragment is complete, which cuts running episodes.
        """
        self.is_ready = False
        perf = self._metrics.perf
        perf.begin()
        actions = self._act(envs)
        chosen = sorted(self.playing) if envs is None else list(envs)
        # A slow environment may still be working on its previous actions.
        for index in [index for index in chosen if not self.envs.is_stepping(index)]:
            if self._renders:
                # Render before the step: frame t shows the observation that agents act on in step t.
                frames = self.playing[index].shown.media.setdefault("frames", [])
                frames.append(own_copy(self.envs.envs[index].render()))
                perf.lap(PerfCounters.ENV_RENDER)
            self.envs.send(index, actions.get(index, {}))
        ready = self.envs.ready(chosen)
        cuts = wanted is not None and self._cuts_in_turn and self.fresh + len(ready) >= wanted
        for index in ready:
            episode, sent = self.playing[index], self.envs.sent(index)
            step = self.envs.step(index)
            perf.lap(PerfCounters.ENV_WAIT)
            if step is None:
                self._discard(episode)
            else:
                self._advance(episode, step, sent)
                if cuts and not episode.is_over:
                    self._settle()
                    self._postprocess(episode)
        self._settle()
        perf.lap(PerfCounters.OBS_PROCESSING)
        perf.end_step()
        self.is_ready = True

    def _act(self, envs: Collection[int] | None) -> dict[int, dict[AgentId, Any]]:
        """Compute the actions of waiting agents: environment -> agent id -> action."""
        self._leave_removed_policies()
        actions: dict[int, dict[AgentId, Any]] = {}
        perf = self._metrics.perf
        for policy_id, group in self.groups.items():
            if not group.waiting:
                continue
            perf.lap(PerfCounters.ACTION_PROCESSING)
            acted = group.act(
                self.mapping.policies[policy_id],
                envs,
                explore=self.explore,
                at_random=self.at_random,
                timestep=self.env_steps,
            )
            perf.lap(PerfCounters.INFERENCE)
            self._progress.timesteps += len(acted)
            for agent, action in acted:
                actions.setdefault(agent.episode.env_index, {})[agent.id_] = action
        perf.lap(PerfCounters.ACTION_PROCESSING)
        return actions

    def _leave_removed_policies(self) -> None:
        """Move agents of removed policies to other policies; drops rows that no policy could learn from."""
        gone = [
            each for each, group in self.groups.items() if group.waiting and each not in self.mapping.policies
        ]
        for policy_id in gone:
            group = self.groups[policy_id]
            self.drop(group, group.rows.closed)
            for agent in group.leave():
                episode = self.playing[agent.episode.env_index]
                shown = episode.shown
                key = (agent.id_, policy_id)
                shown.agent_rewards[key] = shown.agent_rewards.get(key, 0.0) + agent.total
                agent.total = 0.0
                self._group(episode, agent.id_).take_over(agent)
        if gone:
            self._settle()

    def _advance(self, episode: PlayedEpisode, step: MultiAgentStep, sent: dict[AgentId, Any]) -> None:
        """Distribute the results of a step to its agents."""
        index = episode.env_index
        episode.t += 1
        episode.fresh += 1
        self.fresh += 1
        self.env_steps += 1
        episode.shown.length = episode.t
        if step.rewards:
            self._reward(episode, step.rewards)
        if self._keeps_infos:
            self._inform(episode, step)
        cuts = self._config.soft_horizon and not step.is_over and episode.t >= self._horizon
        if step.ended:
            self._end_agents(episode, step.ended, step.finals)
        if cuts:
            others = {agent: (False, False) for agent in episode.agents if agent not in step.ended}
            self._end_agents(episode, others, step.observations)
        else:
            self._arrive(episode, step)
        if self._looks:
            self._look(episode, step, sent)
        self._call("on_episode_step", episode.shown)
        if step.is_over or cuts:
            episode.terminated, episode.truncated = step.terminated, step.truncated
            self._end(episode, is_over=step.is_over)
            if cuts:
                self._play(self._created(index), step, before=episode.before | episode.shown.agent_policies)
            else:
                del self.playing[index]
                self._start(index)

    @property
    def _horizon(self) -> int:
        assert self._config.horizon is not None
        return self._config.horizon

    def _reward(self, episode: PlayedEpisode, rewards: Mapping[AgentId, Any]) -> None:
        agents, clips = episode.agents, self._config.clip_rewards
        given = [as_reward(reward, giver="the environment") for reward in rewards.values()]
        clipped = clip_rewards(np.array(given), clips).tolist() if clips else given
        for agent_id, reward, recorded in zip(rewards, given, clipped, strict=True):
            agent = agents.get(agent_id)
            if agent is None:
                before, recorded_before = episode.early.get(agent_id, (0.0, 0.0))
                episode.early[agent_id] = before + reward, recorded_before + recorded
                continue
            agent.total += reward
            if agent.row >= 0:
                agent.reward += recorded
            elif reward:
                self._reward_late(agent, recorded)

    def _reward_late(self, agent: Agent, reward: float) -> None:
        """Add a reward for an agent that ended and whose last row is closed."""
        if agent.last >= 0:
            agent.group.rows.add_reward(agent.last, reward)
            return
        self._count_late(agent.id_, agent.episode.env_index, reward)

    def _count_late(self, agent_id: AgentId, env_index: int, reward: float) -> None:
        if not self.late_rewards:
            logger.warning(
                "agent %s in environment %s got a reward of %s after its last row was handed out, or was "
                "ended by soft_horizon. Such rewards are in late_rewards and in the metrics, but in no "
                "batch; batch_mode='complete_episodes' without soft_horizon keeps them",
                excerpt(agent_id), env_index, reward,
            )  # fmt: skip
        self.late_rewards += reward

    def _inform(self, episode: PlayedEpisode, step: MultiAgentStep) -> None:
        """Keep the infos for open rows."""
        for agent_id, agent in episode.agents.items():
            if agent_id in step.infos:
                agent.info = as_info(step.infos[agent_id] or {}, giver="the environment")
            if step.common:
                agent.info = {**(agent.info or {}), COMMON_INFO: own_copy(step.common)}

    def _end_agents(
        self,
        episode: PlayedEpisode,
        ended: Mapping[AgentId, tuple[bool, bool]],
        seen: Mapping[AgentId, Any],
    ) -> None:
        """Close the rows of agents with these flags, and with their final observations in ``seen``."""
        for agent_id, flags in ended.items():
            agent = episode.agents.get(agent_id)
            if agent is None or agent.row < 0:
                continue  # it ended before acting, and is not part of the episode
            if self._config.no_done_at_end:
                flags = (False, False)
            agent.group.end(agent, flags, seen.get(agent_id, UNSEEN))

    def _arrive(self, episode: PlayedEpisode, step: MultiAgentStep) -> None:
        """Queue the agents with an observation to act."""
        agents = episode.agents
        for agent_id, obs in step.observations.items():
            agent = agents.get(agent_id)
            if agent is None:
                agent = self._join(episode, agent_id)
            agent.group.arrive(agent, obs)

    def _join(self, episode: PlayedEpisode, agent_id: AgentId) -> Agent:
        group = self._group(episode, agent_id)
        index = self._indexes.get(agent_id)
        if index is None:  # after the known agents, in order of appearance
            index = len(self._indexes) + sum(other not in self._indexes for other in episode.agents)
        agent = episode.agents[agent_id] = group.agent(agent_id, index, episode)
        episode.ids[index] = agent_id
        if agent_id in episode.early:
            agent.total, agent.reward = episode.early.pop(agent_id)
        return agent

    def _group(self, episode: PlayedEpisode, agent_id: AgentId) -> AgentGroup:
        policy_id = self.mapping.policy_id(agent_id, episode.shown, episode.mapping)
        index = episode.env_index
        group = self.mapping.group(policy_id, self.envs.envs[index], agent_id)
        if policy_id not in episode.shown.agent_policies.values():
            policy = self.mapping.policies[policy_id]
            if policy.has_episode_hooks:
                policy.on_episode_start(np.array([index]))
        episode.shown.agent_policies[agent_id] = policy_id
        return group

    def _settle(self) -> None:
        for group in self.groups.values():
            group.settle()

    # ---- ends ----

    def _end(self, episode: PlayedEpisode, *, is_over: bool) -> None:
        if is_over and not (episode.agent_steps or episode.before):
            raise SchemaError(
                f"environment {episode.env_index} ended an episode of {episode.t} steps in which "
                "no agent acted: return an observation of an agent that has not ended"
            )
        episode.is_over = True
        self.over.append(episode)
        _release(episode)
        shown = episode.shown
        # Agents that acted before the soft horizon and had no observation since.
        for agent_id, (total, recorded) in episode.early.items():
            if total and agent_id in episode.before:
                shown.agent_rewards[agent_id, episode.before[agent_id]] = total
                self._count_late(agent_id, shown.env_index, recorded)
        self._postprocess(episode)
        for policy_id in set(shown.agent_policies.values()) & self.mapping.policies.keys():
            policy = self.mapping.policies[policy_id]
            if policy.has_episode_hooks:
                policy.on_episode_end(np.array([shown.env_index]))
        self._call_end(shown, None)
        self._metrics.episode_ended(shown, duration=time.perf_counter() - episode.began)

    def _postprocess(self, episode: PlayedEpisode) -> None:
        _sum_up(episode)
        if self.postprocess is not None:
            self.postprocess(episode)

    def _discard(self, episode: PlayedEpisode) -> None:
        """Discard the episode of a failed environment, with all rows that were not handed out."""
        index = episode.env_index
        self._settle()
        rows = 0
        for group in self.groups.values():
            group.forget_env(index)
            rows += self._forget_rows(group, group.rows.integers(EPISODE) == episode.number)
        self._progress.dropped += rows
        self.fresh -= episode.fresh
        _release(episode)
        del self.playing[index]
        _sum_up(episode)
        self._call_end(episode.shown, self.envs.errors[index])
        self._metrics.episodes_failed(1, rows=rows)

    def drop(self, group: AgentGroup, chosen: NDArray[np.bool_]) -> None:
        """Drop rows of a group."""
        self._count_dropped(self._forget_rows(group, chosen))

    def _forget_rows(self, group: AgentGroup, chosen: NDArray[np.bool_]) -> int:
        count = int(np.count_nonzero(chosen))
        if count:
            self.moved(group, group.rows.drop(chosen))
        return count

    def moved(self, group: AgentGroup, to: NDArray[np.int64]) -> None:
        """Update the row numbers of ``group``'s agents; -1 marks removed rows."""
        for episode in (*self.playing.values(), *self.over):
            for agent in episode.agents.values():
                if agent.group is group:
                    agent.row = int(to[agent.row]) if agent.row >= 0 else -1
                    agent.last = int(to[agent.last]) if agent.last >= 0 else -1

    # ---- callbacks ----

    def _look(self, episode: PlayedEpisode, step: MultiAgentStep, sent: dict[AgentId, Any]) -> None:
        """Show the step to callbacks."""
        shown, born_done = episode.shown, step.ended.keys() - episode.agents.keys()

        def of_its_agents(values: Mapping[AgentId, Any]) -> dict[AgentId, Any]:
            return {agent: value for agent, value in values.items() if agent not in born_done}

        if shown.last_observation is None:
            shown.last_observation, shown.last_info = {}, {}
        shown.last_observation |= of_its_agents({**step.observations, **step.finals})
        shown.last_info |= of_its_agents(step.infos)
        if step.common:
            shown.last_info[COMMON_INFO] = step.common
        if episode.t:
            shown.last_action, shown.last_reward = sent, of_its_agents(step.rewards)
        _sum_up(episode)

    def _call(self, name: str, shown: RunningEpisode, **more: Any) -> None:
        if name in self._hooks:
            env = self.envs.envs[shown.env_index]
            getattr(self._callbacks, name)(runner=self._runner, env=env, episode=shown, **more)

    def _call_end(self, shown: RunningEpisode, error: Exception | None) -> None:
        self._call("on_episode_end", shown, error=error)
        shown.last_observation = shown.last_action = shown.last_reward = shown.last_info = None


def _release(episode: PlayedEpisode) -> None:
    for agent in episode.agents.values():
        agent.group.release(agent)


def _sum_up(episode: PlayedEpisode) -> None:
    """Update the reward sums that callbacks and metrics see.

    Rewards of agents that have not appeared count once these appear, because other agents have no rows.
    """
    shown = episode.shown
    for agent_id, agent in episode.agents.items():
        shown.agent_rewards[agent_id, agent.group.policy_id] = agent.total
    shown.total_reward = float(sum(shown.agent_rewards.values()))
