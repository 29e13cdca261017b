"""`MultiAgentEnvRunner`: policies act for the agents of several environments; every step is recorded.

Example:
    >>> from rlio.envs.multi_agent import make_multi_agent
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.sampling.config import RolloutConfig
    >>> runner = MultiAgentEnvRunner(
    ...     make_multi_agent("CartPole-v1"),
    ...     {"even": RandomPolicy(), "odd": RandomPolicy()},
    ...     lambda agent_id, episode: ("even", "odd")[agent_id % 2],
    ...     config=RolloutConfig(num_envs=2, rollout_fragment_length=5, env_config={"num_agents": 3}),
    ...     seed=0,
    ... )
    >>> batch = runner.run()
    >>> batch.env_steps(), batch.agent_steps(), len(batch["even"]), len(batch["odd"])
    (10, 30, 20, 10)
    >>> runner.stop()
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.envs.multi_agent import MultiAgentEnv
from rlio.errors import OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.reader import JsonState
from rlio.sampling.actor import Actor
from rlio.sampling.agent_group import AgentGroup, PlayedEpisode
from rlio.sampling.agent_mapping import AgentMapping
from rlio.sampling.agent_parts import AgentPart, cut, joined
from rlio.sampling.agent_rows import EPISODE
from rlio.sampling.callbacks import CallbacksLike
from rlio.sampling.config import RolloutConfig
from rlio.sampling.lookback import LookBack
from rlio.sampling.multi_agent_envs import MultiAgentEnvLike, MultiAgentEnvs
from rlio.sampling.multi_agent_episode import MultiAgentEpisode
from rlio.sampling.multi_agent_loop import MultiAgentLoop
from rlio.sampling.policy_group import MappingFn
from rlio.sampling.postprocessed import Postprocessed
from rlio.sampling.progress import Progress, runner_number, shares_of
from rlio.sampling.runner import Runner
from rlio.sampling.runner_seeds import RunnerSeeds

if TYPE_CHECKING:
    from rlio.envs.context import EnvContext

__all__ = ["MultiAgentEnvRunner"]

logger: logging.Logger = logging.getLogger("rlio")

#: Policy id -> the parts of its rows.
_Parts: TypeAlias = dict[str, list[AgentPart]]


class MultiAgentEnvRunner(Runner[MultiAgentEpisode]):
    """Steps environments in which several agents act, and returns the steps by policy.

    A row is one agent's transition: from the observation on which it acts to its next observation. The row
    holds the sum of the agent's rewards in between, over any number of environment steps. Columns are those
    of `EnvRunner`. ``t`` is the environment step in which the agent acted, and ``agent_index`` is its
    position among ``possible_agents`` (in each episode, other agents get the numbers after them). Rows are
    ordered by environment, episode, agent and time. Environment steps in which no agent acts count, but have
    no row.

    A row is handed out once its outcome is known: the row of an agent that waits for its turn at the end of a
    fragment comes with the next fragment. If an episode ends and an agent has seen nothing since it acted,
    its last row keeps the rewards, and ``new_obs_valid`` is False. Rewards before an agent's first
    observation go into its first row. Rewards after its end are added to its last row; if that row was
    already handed out, they count in `late_rewards`, with one warning. A soft horizon ends all rows: if an
    agent has no observation after it, the agent's further rewards count in `late_rewards`.

    Several threads may call it: their calls take turns. `stop` and `interrupt` do not wait for their turn.

    Args:
        env: A `MultiAgentEnv`, a PettingZoo environment, or a function that makes one and may take an
            `EnvContext`. The runner closes it.
        policies: Policy id -> policy, looked up for each action. Policies that you add can act; those that
            you remove stop acting.
        policy_mapping_fn: Called once per agent and episode with agent id and episode (a `RunningEpisode`),
            and with ``worker=`` (this runner) if it takes that; returns the policy id. None: the only policy
            acts for all, or each policy acts for the agent of its name.
        config: How to step and record; None uses the defaults. ``count_steps_by`` sets the unit of fragments.
        callbacks: Called on sampling events; see `Callbacks`.
        seed: Seed of the environments, the episode ids and the policies that are not bound yet. None draws
            one from the OS, logs it and keeps it in `seeds`.
        worker_index: Gives workers with the same ``seed`` different seeds and ids.
        num_workers: Passed to functions that make environments.
        recreated_worker: Whether the runner replaces a failed one; passed to functions that make
            environments.

    Attributes:
        metrics: The runner's counters; see `get_metrics`.

    Raises:
        OptionError: An environment cannot be made, or a policy cannot act in it.
    """

    def __init__(
        self,
        env: MultiAgentEnvLike,
        policies: Mapping[str, Policy],
        policy_mapping_fn: MappingFn | None = None,
        *,
        config: RolloutConfig | None = None,
        callbacks: CallbacksLike = None,
        seed: int | None = None,
        worker_index: int = 0,
        num_workers: int = 0,
        recreated_worker: bool = False,
    ) -> None:
        _check_policies(policies)
        super().__init__(config=config, callbacks=callbacks, seed=seed, worker_index=worker_index)
        self.config: RolloutConfig = self.config.resolved(num_workers=num_workers, worker_index=worker_index)
        self._mapping = AgentMapping(
            policies,
            config=self.config,
            seed_of=lambda policy_id: _seed_of(self._seeds.policy, policy_id),
            random_seed_of=lambda policy_id: _seed_of(self._seeds.random_actions, policy_id),
            worker=self,
        )
        self._mapping.set_function(policy_mapping_fn)
        self._given_env = env
        self._env_context = self.config.context(
            worker_index=worker_index, num_workers=num_workers, recreated_worker=recreated_worker
        )
        #: Whether environments and ids use the current seeds.
        self._is_seeded = False
        #: Whether rows of running episodes were handed out.
        self._is_cut = False
        self._look_back: LookBack[MultiAgentEpisode] = LookBack(self.config.episode_lookback_horizon)
        self._envs = self._new_envs()
        try:
            self._loop = self._LOOP(
                self._envs,
                self._mapping,
                config=self.config,
                callbacks=self.callbacks,
                metrics=self.metrics,
                progress=self._progress,
                runner=self,
                worker_index=worker_index,
            )
            self._done_rows = Postprocessed()
            self._loop.postprocess = self._postprocess_episode
            self._tell_of_envs()
            self.make_module()
        except BaseException:
            self._envs.close()
            raise

    _LOOP: type[MultiAgentLoop] = MultiAgentLoop

    def _new_envs(self) -> MultiAgentEnvs:
        return MultiAgentEnvs(
            self._given_env,
            config=self.config,
            context=self._env_context,
            on_made=self._on_made,
        )

    def _tell_of_envs(self) -> None:
        if "on_environment_created" in self._hooks:
            self.callbacks.on_environment_created(runner=self, env=self._envs.envs, context=self._env_context)

    def make_env(self) -> None:
        """Recreate the environments; closes the current ones and drops their episodes.

        Raises:
            OptionError: The environments cannot be made.
        """
        with self._turns.held():
            self._loop.forget()
            self._envs.close()
            self._envs = self._loop.envs = self._new_envs()
            self._is_seeded = self._loop.is_ready = False
            self._tell_of_envs()

    def make_module(self) -> None:
        """Give spaces to unbound policies whose agents are known.

        Raises:
            OptionError: A policy cannot act in these spaces.
        """
        self._mapping.bind(self.envs[0], worker_index=self.worker_index)

    def _on_made(self, index: int, env: MultiAgentEnv, context: EnvContext) -> None:
        if context.recreated:
            self.metrics.episodes_failed(0, restarts=1)
        if "on_sub_environment_created" in self._hooks:
            self.callbacks.on_sub_environment_created(runner=self, env=env, env_index=index, context=context)

    # ---- environments, policies and spaces ----

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Policy id -> policy."""
        return self._mapping.policies

    def set_policy_mapping_fn(self, policy_mapping_fn: MappingFn | None) -> None:
        """Change which policy acts for which agent, from the next episodes on.

        Raises:
            OptionError: ``policy_mapping_fn`` is not a function.
        """
        self._mapping.set_function(policy_mapping_fn)

    @property
    def num_envs(self) -> int:
        """Number of environments stepped together."""
        return len(self._envs)

    @property
    def envs(self) -> list[MultiAgentEnv]:
        """The environments."""
        return self._envs.envs

    @property
    def env_id(self) -> str:
        """The environment's name in its metadata, or else its class name."""
        env = self._envs.envs[0]
        inner = getattr(env, "env", env)
        name = (getattr(inner, "metadata", None) or {}).get("name")
        return str(name) if name else type(inner).__name__

    @property
    def env_steps(self) -> int:
        """Environment steps taken so far."""
        return self._loop.env_steps

    @property
    def _actors(self) -> Mapping[str, Actor]:
        groups = list(self._loop.groups.items())  # At once: another thread may add one.
        return {policy_id: group.actor for policy_id, group in groups}

    @property
    def _rows_waiting(self) -> int:
        return sum(len(group.rows) for group in self._loop.groups.values())

    def _close(self) -> None:
        self._envs.close()

    @property
    def late_rewards(self) -> float:
        """Sum of the rewards that came after their row was handed out."""
        return self._loop.late_rewards

    def get_spaces(self) -> dict[str, Any]:
        """Policy id -> (observation space, action space), as policies see them, for bound policies.

        ``"__env__"`` has those of the environment, as two dicts by agent id.
        """
        env = self._envs.envs[0]
        agents = list(env.possible_agents)
        found: dict[str, Any] = {
            "__env__": (
                {agent: env.get_observation_space(agent) for agent in agents},
                {agent: env.get_action_space(agent) for agent in agents},
            )
        }
        for policy_id in self.policies:
            policy = self.policies[policy_id]
            if policy.is_bound:
                found[policy_id] = policy.observation_space, policy.action_space
        return found

    # ---- sampling ----

    def run(self, steps: int | None = None) -> MultiAgentBatch:
        """Sample a batch.

        Args:
            steps: Overrides the config's ``rollout_fragment_length``.

        Returns:
            In truncate mode with ``count_steps_by="env_steps"``, exactly num_envs x ``steps`` environment
            steps, ``steps`` of each environment; if one fails, the others make up for it. With
            ``"agent_steps"``, at least num_envs x ``steps`` rows. In complete mode, whole episodes with at
            least num_envs x ``steps`` in total: the first ones that ended. Policies that did not act are left
            out.

        Raises:
            OptionError: ``steps`` is below 1.
            EnvError: An environment failed.
            SchemaError: An environment or a policy returned invalid data.
            ClosedError: The runner is stopped.
        """
        with self._turns.lock:
            taken = self._sampled(steps)
            batch = MultiAgentBatch(self._joined(taken.parts), taken.env_steps)
            self._count(taken)
            return batch

    def _explore(self, explore: bool) -> None:
        self._loop.explore = explore

    def _sampled_chunks(
        self, steps: int | None, episodes: int | None, *, at_random: bool, force_reset: bool
    ) -> list[MultiAgentEpisode]:
        total = steps
        if steps is not None and self.config.batch_mode == "truncate_episodes":
            steps = -(-steps // self.num_envs)
        if force_reset:
            self._loop.is_ready = False
        taken = self._sampled(steps, total=total, episodes=episodes or 0, at_random=at_random)
        chunks = self._chunks(taken)
        self._count(taken)
        return chunks

    def _chunks(self, taken: _Taken) -> list[MultiAgentEpisode]:
        by_episode: dict[int, list[AgentPart]] = {number: [] for number in taken.episodes}
        for parts in taken.parts.values():
            for part in parts:
                by_episode[part.number].append(part)
        chunks = [
            self._chunk(taken.episodes[number], parts, taken.fresh[number])
            for number, parts in by_episode.items()
            if parts or taken.fresh[number]
        ]
        running = {episode.shown.eps_id for episode in self._loop.playing.values()}
        return self._look_back.follow(chunks, running=running)

    def _chunk(self, episode: PlayedEpisode, parts: list[AgentPart], fresh: int) -> MultiAgentEpisode:
        agents = {episode.ids[part.agent_index]: part for part in parts}
        return MultiAgentEpisode(
            episode.shown.eps_id,
            {agent: part.to_episode(agent) for agent, part in agents.items()},
            env_ts={agent: part.env_ts() for agent, part in agents.items()},
            policy_ids={agent: part.policy_id for agent, part in agents.items()},
            agent_indexes={agent: part.agent_index for agent, part in agents.items()},
            env_t_started=episode.t - fresh,
            env_t=episode.t,
            terminated=episode.terminated,
            truncated=episode.truncated,
        )

    def _sampled(
        self, steps: int | None, *, total: int | None = None, episodes: int = 0, at_random: bool = False
    ) -> _Taken:
        """Sample fragments of ``steps`` of each environment, or whole episodes, and take out their rows.

        Args:
            steps: Steps of each environment; None: the config's.
            total: Steps of whole episodes together; None: as many as those of a fragment.
            episodes: Number of whole episodes; 0: as many as have the steps.
            at_random: Whether actions are random.
        """
        steps = self._begin_call(steps)
        self._make_ready(at_random=at_random)
        if episodes or self.config.batch_mode == "complete_episodes":
            total = steps * self.num_envs if total is None else total
            return self._handed_out(self._complete(total, episodes))
        self._fragment(steps)
        self._is_cut = True
        return self._handed_out(None)

    def _make_ready(self, *, at_random: bool) -> None:
        """Begin new episodes: at first, after a step that failed halfway, or if action columns change."""
        if not self._loop.is_ready or self._loop.at_random != at_random:
            self._loop.at_random = at_random
            self._begin()

    def _begin(self) -> None:
        if not self._is_seeded:
            self._envs.seeds = self._seeds.of_episodes(num_envs=self.num_envs)
            self._loop.ids = self._seeds.episode_ids()
            self._is_seeded = True
        self._look_back.forget()
        self._done_rows.clear()
        self._loop.begin()
        self._is_cut = False

    def _fragment(self, steps: int) -> None:
        """Step until there are exactly num_envs x ``steps`` steps, or at least that many rows."""
        loop, wanted = self._loop, steps * self.num_envs
        while True:
            self._check_open()
            loop.revive()
            if self.config.count_steps_by == "agent_steps":
                if sum(group.rows.closed_rows for group in loop.groups.values()) >= wanted:
                    return
                loop.step()
                continue
            lacking = wanted - loop.fresh
            if lacking <= 0:
                return
            # If an environment failed and others make up for it, only some take the last step.
            envs = None if lacking >= len(loop.playing) else sorted(loop.playing)[:lacking]
            loop.step(envs, wanted=wanted)

    def _complete(self, steps: int, episodes: int) -> list[PlayedEpisode]:
        """Step until ended episodes have ``steps`` in total, or number ``episodes``; return only these."""
        if self._is_cut:
            self._begin()
        loop = self._loop
        # If all episodes begin now, the first ones to end are short: each environment plays its share then.
        is_new = not loop.over and not any(episode.t for episode in loop.playing.values())
        shares = shares_of(episodes, self.num_envs) if is_new else None
        taken = total = 0
        while True:
            if episodes and (chosen := _first_to_end(loop.over, episodes, shares)):
                return chosen
            # As many as are needed, in the order in which they ended, as RLlib takes them.
            while not episodes and taken < len(loop.over):
                total += self._size(loop.over[taken])
                taken += 1
                if total >= steps:
                    return loop.over[:taken]
            self._check_open()
            self._warn_of_long_episodes(loop.fresh, steps)
            loop.revive()
            loop.step()

    def _size(self, episode: PlayedEpisode) -> int:
        return episode.agent_steps if self.config.count_steps_by == "agent_steps" else episode.t

    # ---- handing out rows ----

    def _handed_out(self, over: list[PlayedEpisode] | None) -> _Taken:
        """Take out the rows of the episodes ``over``, or, if None, all closed rows."""
        loop = self._loop
        # Ended episodes come first, in the order of their ends, and then the running ones, as in RLlib.
        running = [loop.playing[env] for env in sorted(loop.playing)]
        known = {episode.number: episode for episode in (*loop.over, *running)}
        chosen = known if over is None else {episode.number: episode for episode in over}
        for episode in chosen.values():
            # Those that were not cut in turn.
            self._postprocess_episode(episode)
        unwanted = [number for number, each in known.items() if not each.shown.training_enabled]
        parts: _Parts = {}
        for policy_id, group in list(loop.groups.items()):
            self._drop_unwanted(policy_id, group, unwanted)
            taken = self._taken(group, None if over is None else list(chosen))
            if taken is not None:
                starts: dict[int | str, int] = {each.shown.eps_id: each.began_at for each in chosen.values()}
                parts[policy_id] = cut(policy_id, taken, starts)
        fresh = {number: each.fresh for number, each in chosen.items()}
        loop.fresh -= sum(fresh.values())
        for episode in chosen.values():
            episode.fresh = 0
        loop.over = [episode for episode in loop.over if episode.number not in chosen]
        wanted = {number: each for number, each in chosen.items() if each.shown.training_enabled}
        self._replace_postprocessed(parts)
        left = {episode.number for episode in (*running, *loop.over)}
        self._done_rows.keep(lambda key: key[0] in left)
        return _Taken(parts, wanted, fresh)

    def _drop_unwanted(self, policy_id: str, group: AgentGroup, unwanted: list[int]) -> None:
        """Drop closed rows of episodes excluded from training and of removed policies."""
        drop = np.zeros(len(group.rows), bool)
        if policy_id not in self.policies:
            drop[:] = True
        elif unwanted:
            drop = np.isin(group.rows.integers(EPISODE), unwanted)
        if drop.any():
            self._loop.drop(group, drop & group.rows.closed)
        if policy_id not in self.policies and not len(group.rows) and not group.waiting:
            del self._mapping.groups[policy_id]

    def _taken(self, group: AgentGroup, numbers: list[int] | None) -> dict[str, Any] | None:
        """The closed rows of the episodes ``numbers``, or of all if None; returns None if there are none."""
        rows, closed = group.rows, group.rows.closed
        chosen = closed if numbers is None else np.isin(rows.integers(EPISODE), numbers)
        if not chosen.any():
            return None
        columns, moved = rows.take(chosen)
        self._loop.moved(group, moved)
        return columns

    def _postprocess_episode(self, episode: PlayedEpisode) -> None:
        """Postprocess the closed rows of ``episode``, agent by agent in the order in which they appeared."""
        hooked = "on_postprocess_trajectory" in self._hooks
        # Postprocessing needs the policy's own extra columns.
        if self._loop.at_random or not episode.shown.training_enabled:
            return
        if not hooked and not any(self.policies[each].postprocesses for each in self._acting(episode)):
            return
        for group in self._loop.groups.values():
            group.settle_ended()
        trajectories = self._fresh_parts(episode)
        originals = {episode.ids[part.agent_index]: (part.policy_id, part.rows) for part in trajectories}
        for part in trajectories:
            if hooked or self.policies[part.policy_id].postprocesses:
                agent = episode.ids[part.agent_index]
                # A copy, because the other agents must not see changes made in place.
                rows = part.rows.copy()
                made = self._postprocess(rows, part.policy_id, agent, episode.shown, originals)
                self._done_rows.add(_key_of(part), len(part.rows), made)

    def _acting(self, episode: PlayedEpisode) -> list[str]:
        """The policies that act in ``episode``, except those that were removed."""
        acting = {agent.group.policy_id for agent in episode.agents.values()}
        return [policy_id for policy_id in self._loop.groups if policy_id in acting & self.policies.keys()]

    def _fresh_parts(self, episode: PlayedEpisode) -> list[AgentPart]:
        """The closed rows of ``episode`` that were not postprocessed yet, by agent."""
        starts: dict[int | str, int] = {episode.shown.eps_id: episode.began_at}
        found = []
        for policy_id in self._acting(episode):
            rows = self._loop.groups[policy_id].rows
            chosen = rows.closed & (rows.integers(EPISODE) == episode.number)
            for part in cut(policy_id, rows.peek(chosen), starts) if chosen.any() else ():
                part.rows = part.rows[self._done_rows.count(_key_of(part)) :]
                if len(part.rows):
                    found.append(part)
        places = {agent.index: place for place, agent in enumerate(episode.agents.values())}
        return sorted(found, key=lambda part: places[part.agent_index])

    def _replace_postprocessed(self, parts: _Parts) -> None:
        """Replace the rows of ``parts`` with the postprocessed ones."""
        for own in parts.values():
            for part in own:
                made = self._done_rows.take(_key_of(part), len(part.rows))
                if made is not None:
                    part.rows, part.whole = made, None

    def _joined(self, parts: _Parts) -> dict[str, SampleBatch]:
        batches = {}
        for policy_id, own in parts.items():
            batches[policy_id] = joined(
                own, unrolls=self._progress.unrolls, max_seq_len=self.policies[policy_id].max_seq_len
            )
            self._progress.unrolls += len(own)
        return batches

    def _count(self, taken: _Taken) -> None:
        rows: Counter[str] = Counter()
        of_agents: Counter[str] = Counter()
        for policy_id, parts in taken.parts.items():
            for part in parts:
                rows[policy_id] += len(part.rows)
                of_agents[str(taken.episodes[part.number].ids[part.agent_index])] += len(part.rows)
        self.metrics.sampled(
            taken.env_steps,
            agent_steps=rows.total(),
            policy_steps=rows,
            steps_of_agents=of_agents,
            weights_seq_no=max((self.policies[each].weights_seq_no for each in rows), default=0),
        )

    # ---- seeds and state ----

    def _state(self) -> JsonState:
        return super()._state() | {"env_steps": self.env_steps}

    def connector_states(self) -> dict[str, Any]:
        return dict(self._mapping.connector_states())

    def load_connectors(self, states: Mapping[str, Any], undo: ExitStack) -> None:
        # States of policies that have not acted yet are kept until they act.
        undo.callback(self._mapping.load_connector_states, self._mapping.connector_states())
        self._mapping.load_connector_states(states)

    def _start_over(self, seeds: RunnerSeeds, progress: Progress, state: JsonState) -> None:
        env_steps = runner_number(state, "env_steps")
        self._loop.forget()
        self._progress.take_over(progress)
        self._loop.env_steps = env_steps
        self._is_seeded = self._loop.is_ready = False


def _first_to_end(over: list[PlayedEpisode], episodes: int, shares: list[int] | None) -> list[PlayedEpisode]:
    """The first ``episodes`` of those that are ``over``, [] if there are fewer.

    Args:
        over: Ended episodes.
        episodes: How many to take.
        shares: How many to take of each environment; None: any.
    """
    if shares is None:
        return over[:episodes] if len(over) >= episodes else []
    left, chosen = list(shares), []
    for episode in over:
        if left[episode.env_index]:
            left[episode.env_index] -= 1
            chosen.append(episode)
    return [] if any(left) else chosen


class _Taken(NamedTuple):
    """Rows that are handed out.

    Attributes:
        parts: Policy id -> the parts of its rows.
        episodes: Number -> episode, for episodes used in training.
        fresh: Number -> environment steps that are handed out.
    """

    parts: _Parts
    episodes: dict[int, PlayedEpisode]
    fresh: dict[int, int]

    @property
    def env_steps(self) -> int:
        """Environment steps of the episodes used in training."""
        return sum(self.fresh[number] for number in self.episodes)


def _key_of(part: AgentPart) -> tuple[int, str, int]:
    return part.number, part.policy_id, part.agent_index


def _seed_of(seed: int, policy_id: str) -> int:
    """Derive a policy's seed from the seed of all; the default policy's is that of an `EnvRunner`."""
    if policy_id == DEFAULT_POLICY_ID:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=tuple(policy_id.encode())).generate_state(1)[0])


def _check_policies(policies: Any) -> None:
    if not isinstance(policies, Mapping) or not policies:
        raise OptionError(
            f"policies={excerpt(policies)}: expected policies by id, such as "
            "{'default_policy': RandomPolicy()}"
        )
    if isinstance(policies, dict):  # other mappings check their values
        for policy_id, policy in policies.items():
            if not isinstance(policy_id, str) or not isinstance(policy, Policy):
                raise OptionError(
                    f"policies[{excerpt(policy_id)}] is {excerpt(policy)}: expected a Policy under a str id"
                )
