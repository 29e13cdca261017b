"""`ExternalAgentsRunner`: samples an `ExternalMultiAgentEnv`, whose loop asks for actions of several agents.

A loop's call is a step of its episode: `AgentLoops` keeps it until the runner takes it, as if an environment
had returned it, and keeps the actions until the loop takes them.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.envs.external import ExternalMultiAgentEnv
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> class Turns(ExternalMultiAgentEnv):
    ...     def run(self):
    ...         while True:
    ...             episode = self.start_episode()
    ...             for t in range(4):
    ...                 self.get_action(episode, {("white", "black")[t % 2]: [t]})
    ...                 self.log_returns(episode, {("white", "black")[t % 2]: 1.0})
    ...             self.end_episode(episode, {"white": [4], "black": [4]})
    >>> env = Turns(Box(0.0, 9.0, (1,)), Discrete(2))
    >>> runner = ExternalAgentsRunner(env, {"default_policy": RandomPolicy()}, seed=0)
    >>> rows = runner.run(4)["default_policy"]
    >>> rows["t"].tolist(), rows["agent_index"].tolist(), rows["new_obs"].ravel().tolist()
    ([0, 2, 1, 3], [0, 0, 1, 1], [2.0, 4.0, 3.0, 4.0])
    >>> runner.stop()
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.batch.nested import map_structure
from rlio.envs.external import ExternalMultiAgentEnv
from rlio.envs.multi_agent import ALL_AGENTS, AgentId, MultiAgentDict, MultiAgentEnv
from rlio.envs.multi_agent_stepping import MultiAgentStep, MultiAgentStepper
from rlio.envs.values import as_info
from rlio.errors import ClosedError, EnvError, OptionError, SchemaError, excerpt
from rlio.policies.policy import Policy
from rlio.sampling.actor import Acted
from rlio.sampling.agent_group import Agent, AgentGroup, PlayedEpisode
from rlio.sampling.agent_rows import EPISODE
from rlio.sampling.callbacks import CallbacksLike
from rlio.sampling.config import RolloutConfig
from rlio.sampling.external_episodes import LOGGED, fill_in, joined, name_of_episode, row_of
from rlio.sampling.external_runner import LOOK_SECONDS, OF_WORKERS, USED, LoopThread, check_loops_go_on
from rlio.sampling.given_values import check_flag, finite_reward, value_of
from rlio.sampling.multi_agent_episode import MultiAgentEpisode
from rlio.sampling.multi_agent_loop import MultiAgentLoop
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.sampling.policy_group import MappingFn

__all__ = ["AgentLoops", "ExternalAgentsRunner"]


class _Reported(MultiAgentEnv):
    """What a loop reports of an episode, as an environment that a `MultiAgentStepper` checks."""

    def __init__(self, env: ExternalMultiAgentEnv) -> None:
        self.possible_agents = env.possible_agents
        self.get_observation_space = env.get_observation_space  # type: ignore[method-assign] # the same
        self.get_action_space = env.get_action_space  # type: ignore[method-assign] # the same
        #: The result of the next call.
        self.given: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.given

    def step(self, actions: MultiAgentDict) -> Any:
        return self.given


@dataclass(eq=False)
class _Episode:
    """One running episode.

    Attributes:
        name: The episode's name in its loop.
        index: Its number, instead of an environment's index.
        training_enabled: Whether its rows go into batches.
        stepper: Checks what the loop reports.
        heard: Time of the loop's last call or of the last answer.
        rewards: The agents' rewards since the last step.
        infos: The agents' infos since the last step.
        done: Agents that ended since the last step.
        step: The step that the runner has not taken yet.
        logged: The actions that the loop chose in that step, each (1, ...); None requests the policies'.
        sent: The agents' latest actions; None while they are to be chosen.
        answer: The actions, or why there are none.
        agents: Agents that have had an observation.
        acted: Whether its first step was reported.
    """

    name: str
    index: int
    training_enabled: bool
    stepper: MultiAgentStepper
    heard: float
    rewards: dict[AgentId, float] = field(default_factory=dict)
    infos: dict[AgentId, Any] = field(default_factory=dict)
    done: dict[AgentId, bool] = field(default_factory=dict)
    step: MultiAgentStep | None = None
    logged: dict[AgentId, Any] | None = None
    sent: dict[AgentId, Any] | None = None
    answer: Future[Any] | None = None
    agents: set[AgentId] = field(default_factory=set)
    acted: bool = False


class _Same(Sequence[Any]):
    """The same object at every index: episodes have numbers, but share the environment."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, index: Any) -> Any:
        return self._value

    def __len__(self) -> int:
        return 1


class _NoSeeds:
    """Loops seed themselves."""

    current: _Same = _Same(None)


class _NoRestarts:
    """Loops restart themselves."""

    down: frozenset[int] = frozenset()


class AgentLoops:
    """The episodes that loops play, in place of the environments of a `MultiAgentLoop`. Thread-safe.

    Args:
        env: Defines the agents' spaces.
        timeout: Seconds that a loop waits for actions; None waits without limit.

    Attributes:
        changed: The lock; notified on each change.
        envs: The environment, for each episode.
        errors: Why an episode was abandoned.
    """

    def __init__(self, env: ExternalMultiAgentEnv, *, timeout: float | None = None) -> None:
        self.changed: threading.Condition = threading.Condition(threading.RLock())
        self.envs: Any = _Same(env)
        self.seeds: _NoSeeds = _NoSeeds()
        self.restarts: _NoRestarts = _NoRestarts()
        self.errors: dict[int, Exception] = {}
        #: No episode begins by itself.
        self.up: list[int] = []
        self._env, self._timeout = env, timeout
        self._numbers = itertools.count()
        #: By name, those that have not ended; by number, those that the runner plays.
        self._running: dict[str, _Episode] = {}
        self._played: dict[int, _Episode] = {}
        #: Episodes with a first step, for `admitted`.
        self._new: list[_Episode] = []
        self._closed = False

    # ---- called by loops ----

    def start(self, episode_id: str | None = None, *, training_enabled: bool = True) -> str:
        """Begin an episode; see `rlio.sampling.external_episodes.ExternalEpisodes.start`."""
        check_flag("training_enabled", training_enabled)
        with self.changed:
            self._check_open()
            name = name_of_episode(episode_id, self._running)
            self._running[name] = _Episode(
                name, next(self._numbers), training_enabled, MultiAgentStepper(_Reported(self._env)),
                heard=time.monotonic(),
            )  # fmt: skip
        return name

    def get_action(self, episode_id: str, observations: MultiAgentDict) -> MultiAgentDict:
        """Report the agents' observations, and wait for the actions of those that have not ended.

        Args:
            episode_id: Name of a running episode.
            observations: Agent id -> observation, nested as its space; lists are accepted.

        Returns:
            Agent id -> action, copies.

        Raises:
            OptionError: No such episode is running, it already waits for actions, or an agent is unknown.
            SchemaError: A value does not fit its space, or an agent has ended before.
            EnvError: No actions were chosen in time, or an error ended the episode.
            ClosedError: The runner is stopped.
        """
        found: MultiAgentDict = self._ask(episode_id, observations, None)
        return found

    def log_action(self, episode_id: str, observations: MultiAgentDict, actions: MultiAgentDict) -> None:
        """Report the agents' observations, and the actions that they took instead of the policies'.

        Args:
            episode_id: Name of a running episode.
            observations: As in `get_action`.
            actions: Agent id -> action, of each agent that has an observation and has not ended.

        Raises:
            As for `get_action`.
        """
        self._ask(episode_id, observations, self._values("actions", actions))

    def log_returns(
        self,
        episode_id: str,
        rewards: Mapping[AgentId, float],
        infos: Mapping[AgentId, Mapping[str, Any]] | None = None,
        dones: Mapping[AgentId, bool] | None = None,
    ) -> None:
        """Report rewards since the last actions; several for one agent add up.

        Args:
            episode_id: Name of a running episode.
            rewards: Agent id -> reward. If agents have spaces of their own, a reward may come before an
                agent's first observation, and goes into its first row.
            infos: Agent id -> info.
            dones: Agent id -> True if it has ended: its observation in the next call is its last one.

        Raises:
            OptionError: No such episode is running, it has no action yet, or an agent is unknown.
            SchemaError: A reward is not a finite number, an info not a mapping, or a flag not a bool.
        """
        numbers = {agent: finite_reward(each) for agent, each in self._of_agents("rewards", rewards)}
        copied = {}
        for agent, info in self._of_agents("infos", infos or {}):
            if not isinstance(info, Mapping):
                raise SchemaError(f"infos[{excerpt(agent)}]={excerpt(info)}: expected a mapping")
            copied[agent] = as_info(dict(info), giver="the loop")
        if (dones or {}).get(ALL_AGENTS):
            raise OptionError(f"{ALL_AGENTS!r} is True: report the end of all agents with end_episode()")
        ended = {agent: each for agent, each in self._of_agents("dones", dones or {}) if agent != ALL_AGENTS}
        for agent, flag in ended.items():
            check_flag(f"dones[{excerpt(agent)}]", flag)
        with self.changed:
            episode = self._episode(episode_id)
            self._check_reported(episode, [*numbers, *copied, *ended])
            episode.heard = time.monotonic()
            for agent, number in numbers.items():
                episode.rewards[agent] = episode.rewards.get(agent, 0.0) + number
            for agent, info in copied.items():
                episode.infos[agent] = {**episode.infos.get(agent, {}), **info}
            episode.done |= {agent: bool(flag) for agent, flag in ended.items()}

    def end(
        self, episode_id: str, observations: MultiAgentDict | None = None, *, truncated: bool = False
    ) -> None:
        """Report the end of an episode, for all agents.

        Args:
            episode_id: Name of a running episode.
            observations: The agents' final observations, as far as known.
            truncated: Whether the episode was cut off instead of terminating.

        Raises:
            OptionError: No such episode is running, or it waits for actions in another thread.
            SchemaError: An observation does not fit its space, or ``truncated`` is not a bool.
        """
        check_flag("truncated", truncated)
        seen = self._values("observations", observations or {})
        with self.changed:
            episode = self._episode(episode_id)
            self._check_answered(episode)
            if episode.acted:
                self._report(episode, seen, terminated=not truncated, truncated=truncated)
            del self._running[episode.name]

    def _check_reported(self, episode: _Episode, agents: list[AgentId]) -> None:
        """Refuse results of an episode, or of agents, that cannot have acted."""
        if not episode.acted:
            raise OptionError(
                f"episode {excerpt(episode.name)} got results before its first action: report observations "
                "first"
            )
        known = episode.agents.union(self._env.possible_agents)
        if unknown := [agent for agent in agents if agent not in known]:
            raise OptionError(
                f"episode {excerpt(episode.name)} got results of agent {excerpt(unknown[0])}, which has had "
                f"no observation: expected some of {excerpt(sorted(known, key=str))}"
            )

    def _of_agents(self, what: str, values: Any) -> Iterator[tuple[Any, Any]]:
        if not isinstance(values, Mapping):
            raise SchemaError(f"{what}={excerpt(values)}: expected a dict by agent id")
        for agent, value in values.items():
            if agent != ALL_AGENTS or what != "dones":
                self._space(what, agent)
            yield agent, value

    def _space(self, what: str, agent: Any) -> Any:
        env = self._env
        try:
            return env.get_action_space(agent) if what == "actions" else env.get_observation_space(agent)
        except (KeyError, TypeError) as error:
            raise OptionError(
                f"{what} has the unknown agent {excerpt(agent)}: expected one of "
                f"{excerpt(env.possible_agents)}"
            ) from error

    def _values(self, what: str, values: Any) -> dict[AgentId, Any]:
        """Copies of observations or actions, as batches of one."""
        column = Columns.ACTIONS if what == "actions" else Columns.OBS
        return {
            agent: value_of(self._space(what, agent), value, column)
            for agent, value in self._of_agents(what, values)
        }

    def _ask(self, name: str, observations: Any, logged: dict[AgentId, Any] | None) -> Any:
        seen = self._values("observations", observations)
        with self.changed:
            episode = self._episode(name)
            self._check_answered(episode)
            acting = {agent for agent in seen if not episode.done.get(agent)}
            if logged is not None and logged.keys() != acting:
                raise SchemaError(
                    f"log_action() got actions of {excerpt(list(logged))}: expected one of each agent with "
                    f"an observation that has not ended, {excerpt(sorted(acting, key=str))}"
                )
            self._report(episode, seen, terminated=False, truncated=False)
            episode.logged, episode.acted = logged, True
            episode.agents |= seen.keys()
            answer: Future[Any] = Future()
            episode.answer = answer
            self.changed.notify_all()
        try:
            return answer.result(self._timeout)
        except TimeoutError as error:
            with self.changed:
                if not answer.done():
                    # The step was reported, so it cannot be asked for again.
                    self._give_up(episode)
                    raise EnvError(
                        f"no actions were chosen for episode {excerpt(name)} within {self._timeout} s, and "
                        "the episode is abandoned: call sample(), or give loops more time (timeout=)"
                    ) from error
        return answer.result()

    def _report(
        self, episode: _Episode, seen: Mapping[Any, Any], *, terminated: bool, truncated: bool
    ) -> None:
        """Keep a step for the runner."""
        obs = {agent: map_structure(lambda leaf: leaf[0], each) for agent, each in seen.items()}
        stepper: Any = episode.stepper
        if episode.sent is None:
            stepper.env.given = obs, episode.infos
            step = stepper.reset()
        else:
            flags = {**episode.done, ALL_AGENTS: terminated}
            stepper.env.given = obs, episode.rewards, flags, {ALL_AGENTS: truncated}, episode.infos
            step = stepper.step(episode.sent)
        episode.step, episode.heard = step, time.monotonic()
        episode.rewards, episode.infos, episode.done = {}, {}, {}
        if episode.index not in self._played and episode not in self._new:
            self._new.append(episode)
        self.changed.notify_all()

    def _episode(self, name: str) -> _Episode:
        self._check_open()
        if not isinstance(name, str):
            raise SchemaError(f"episode_id={excerpt(name)}: expected the str that start_episode returned")
        if name not in self._running:
            raise OptionError(
                f"no episode {excerpt(name)} is running: start it first; {len(self._running)} are running, "
                f"such as {excerpt(list(itertools.islice(self._running, 3)))}"
            )
        return self._running[name]

    def _check_answered(self, episode: _Episode) -> None:
        if episode.answer is not None and not episode.answer.done():
            raise OptionError(f"episode {excerpt(episode.name)} already waits for actions, in another thread")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the runner is stopped and no longer samples these episodes")

    def _give_up(self, episode: _Episode) -> None:
        """Let the runner discard an episode."""
        if episode.index in self._played:
            self.errors[episode.index] = EnvError(
                f"episode {excerpt(episode.name)} was abandoned by its loop"
            )
        self._running.pop(episode.name, None)
        if episode in self._new:
            self._new.remove(episode)
        episode.step = None
        self.changed.notify_all()

    def abandon_silent(self, seconds: float) -> list[str]:
        """Give up episodes whose loops made no call for ``seconds``; returns their names."""
        with self.changed:
            before = time.monotonic() - seconds
            silent = [
                each
                for each in self._running.values()
                if each.heard < before and (each.answer is None or each.answer.done())
            ]
            for episode in silent:
                self._give_up(episode)
            return [episode.name for episode in silent]

    # ---- called by the runner ----

    def __len__(self) -> int:
        return 1

    def has_news(self) -> bool:
        """Whether there is a step or an end that the runner has not taken."""
        return bool(self._new) or any(map(self._is_ready, self._played))

    def _is_ready(self, index: int) -> bool:
        return index in self.errors or (self.is_stepping(index) and self._played[index].step is not None)

    def admitted(self) -> list[_Episode]:
        """Take the episodes that have begun since the last call."""
        with self.changed:
            new, self._new = self._new, []
            self._played.update((episode.index, episode) for episode in new)
            return new

    def taken(self, episode: _Episode) -> MultiAgentStep:
        """Take an episode's first step."""
        step, episode.step = episode.step, None
        assert step is not None
        return step

    def logged(self, agent: Agent) -> Any:
        """The action that a loop chose for ``agent``, (1, ...); None if the policy chooses."""
        logged = self._played[agent.episode.env_index].logged
        return None if logged is None else logged[agent.id_]

    def send(self, index: int, actions: MultiAgentDict) -> None:
        """Answer the loop of an episode."""
        with self.changed:
            episode = self._played[index]
            episode.sent, episode.heard = actions, time.monotonic()
            if episode.answer is not None and not episode.answer.done():
                episode.answer.set_result(own_copy(actions))

    def is_stepping(self, index: int) -> bool:
        """Whether an episode's actions were chosen, and its next step is not taken."""
        return self._played[index].sent is not None

    def sent(self, index: int) -> MultiAgentDict:
        """The latest actions of an episode."""
        return self._played[index].sent or {}

    def ready(self, wanted: Sequence[int]) -> list[int]:
        """The episodes of ``wanted`` whose next step, or whose end, is reported."""
        with self.changed:
            return [index for index in wanted if self._is_ready(index)]

    def step(self, index: int) -> MultiAgentStep | None:
        """Take an episode's next step; None if its loop gave it up."""
        with self.changed:
            episode = self._played[index]
            if index in self.errors:
                return None
            step = self.taken(episode)
            if not step.is_over:
                # Its agents act next: `is_stepping` is False until they have.
                episode.sent = None
            return step

    def over(self, index: int) -> None:
        """Forget an episode that ended, or was given up."""
        self._played.pop(index, None)
        self.errors.pop(index, None)

    def lose(self, error: BaseException) -> None:
        """End all episodes that the runner plays, because sampling failed; their loops get an EnvError."""
        with self.changed:
            for episode in [*self._played.values(), *self._new]:
                self._running.pop(episode.name, None)
                if episode.answer is not None and not episode.answer.done():
                    episode.answer.set_exception(
                        EnvError(f"episode {excerpt(episode.name)} is lost, because sampling failed: {error}")
                    )
            self._played, self._new = {}, []
            self.errors.clear()

    def close(self) -> None:
        """Wake all waiting loops with a ClosedError."""
        with self.changed:
            self._closed = True
            for episode in self._running.values():
                if episode.answer is not None and not episode.answer.done():
                    episode.answer.set_exception(
                        ClosedError("the runner is stopped: no more actions are chosen")
                    )
            self.changed.notify_all()


class _ExternalLoop(MultiAgentLoop):
    """Steps the episodes of `AgentLoops`: they begin, and act, when their loops say so."""

    envs: Any

    def step(self, envs: Collection[int] | None = None, *, wanted: int | None = None) -> None:
        for given in self.envs.admitted():
            shown = self._created(given.index)
            shown.training_enabled = given.training_enabled
            self._play(shown, self.envs.taken(given))
        self._settle()
        super().step(envs, wanted=wanted)

    def _start(self, index: int) -> None:
        self.envs.over(index)

    def _discard(self, episode: PlayedEpisode) -> None:
        """End an episode that its loop gave up; fragments keep its rows whose outcome is known."""
        index = episode.env_index
        if self._config.batch_mode == "complete_episodes":
            super()._discard(episode)
        else:
            self._settle()
            for group in self.groups.values():
                group.forget_env(index)
                rows = group.rows
                self.drop(group, (rows.integers(EPISODE) == episode.number) & ~rows.closed)
            self.over.append(episode)
            for agent in episode.agents.values():
                agent.group.release(agent)
            del self.playing[index]
            self._call_end(episode.shown, self.envs.errors[index])
            self._metrics.episodes_failed(1)
        self.envs.over(index)

    def _group(self, episode: PlayedEpisode, agent_id: AgentId) -> AgentGroup:
        group = super()._group(episode, agent_id)
        group.adapt = self._with_logged
        return group

    def _with_logged(self, agents: Sequence[Agent], acted: Acted) -> Acted:
        """``acted`` with the actions that loops chose; their likelihoods are unknown."""
        columns = {name: np.array(value) for name, value in acted.extras.items()}
        logged = [self.envs.logged(agent) for agent in agents]
        for i, action in enumerate(logged):
            if action is not None:
                fill_in(columns, i, {})
        columns[LOGGED] = np.array([action is not None for action in logged], bool)
        parts = [row_of(acted.actions, i) if action is None else action for i, action in enumerate(logged)]
        return acted._replace(actions=joined(parts), extras=columns)


class ExternalAgentsRunner(MultiAgentEnvRunner):
    """Runs ``env`` in its own thread, chooses its agents' actions while it samples, and collects rows.

    Rows are those of `MultiAgentEnvRunner`, with the bool column ``logged_action``; ``env_id`` is the number
    of the episode among those of the runner. For logged actions ``action_logp`` and ``action_prob`` are NaN,
    because the policy did not choose. Between two calls of `run`, loops that request actions wait.

    Args:
        env: The environment; the runner starts its `ExternalMultiAgentEnv.run`.
        policies: As in `MultiAgentEnvRunner`.
        policy_mapping_fn: As in `MultiAgentEnvRunner`.
        config: Uses the fields that `ExternalRunner` uses; others are refused.
        callbacks: See `rlio.sampling.callbacks`.
        seed: Seed of the policies that are not bound yet, and of the episode ids.
        worker_index: Gives workers with the same ``seed`` different seeds and ids.
        timeout: Seconds that a loop waits for actions before it gets an `EnvError`; None: without limit.

    Raises:
        OptionError: ``env`` is not an `ExternalMultiAgentEnv`, or a policy cannot act in its spaces.
    """

    def __init__(
        self,
        env: ExternalMultiAgentEnv,
        policies: Mapping[str, Policy],
        policy_mapping_fn: MappingFn | None = None,
        *,
        config: RolloutConfig | None = None,
        callbacks: CallbacksLike = None,
        seed: int | None = None,
        worker_index: int = 0,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(env, ExternalMultiAgentEnv):
            raise OptionError(
                f"env={excerpt(env)}: expected an ExternalMultiAgentEnv; use MultiAgentEnvRunner for other "
                "environments"
            )
        if config is not None:
            config.refuse_others("the sampler of an ExternalMultiAgentEnv", USED | OF_WORKERS)
        self._loops = AgentLoops(env, timeout=timeout)
        super().__init__(
            env, policies, policy_mapping_fn, config=config, callbacks=callbacks, seed=seed,
            worker_index=worker_index,
        )  # fmt: skip
        env.attach(self._loops)  # type: ignore[arg-type] # the sink of its own methods
        self._thread = LoopThread(env, self._loops.changed, is_closed=lambda: self._closed)

    _LOOP = _ExternalLoop

    def _new_envs(self) -> Any:
        return self._loops

    def _tell_of_envs(self) -> None:
        if "on_environment_created" in self._hooks:
            self.callbacks.on_environment_created(runner=self, env=self._given_env)

    def make_env(self) -> None:
        """Refused: the loop drives the environment.

        Raises:
            OptionError: Always.
        """
        raise OptionError("an ExternalMultiAgentEnv drives the loop and cannot be made again here")

    @property
    def envs(self) -> list[Any]:
        """The environment."""
        return [self._given_env]

    @property
    def env_id(self) -> str | None:  # type: ignore[override] # as for `ExternalRunner`
        """None, because an external environment is not in a registry."""
        return None

    def _begin(self) -> None:
        if not self._is_seeded:
            self._loop.ids = self._seeds.episode_ids()
            self._is_seeded = True
        if self._loop.playing:  # A step failed halfway.
            self._loops.lose(EnvError("see the error of sample()"))
        self._look_back.forget()
        self._loop.begin()

    def _sampled_chunks(
        self, steps: int | None, episodes: int | None, *, at_random: bool, force_reset: bool
    ) -> list[MultiAgentEpisode]:
        check_loops_go_on(at_random=at_random, force_reset=force_reset)
        return super()._sampled_chunks(steps, episodes, at_random=False, force_reset=False)

    def _fragment(self, steps: int) -> None:
        groups = self._loop.groups
        by_rows = self.config.count_steps_by == "agent_steps"

        def rows() -> int:
            return sum(group.rows.closed_rows for group in list(groups.values()))

        self._serve_until(lambda: (rows() if by_rows else self._loop.fresh) >= steps, rows)

    def _complete(self, steps: int, episodes: int) -> list[PlayedEpisode]:
        loop = self._loop

        def enough() -> bool:
            return len(loop.over) >= episodes if episodes else sum(map(self._size, loop.over)) >= steps

        self._serve_until(enough, lambda: len(loop.over))
        return loop.over[:]

    def _serve_until(self, enough: Callable[[], bool], rows: Callable[[], int]) -> None:
        """Play until ``enough`` is true, or the loop ended and there are ``rows``."""
        self._thread.owner.check(type(self).__name__)
        loop, loops = self._loop, self._loops
        while not enough():
            self._check_open()
            with loops.changed:
                waits = loops.has_news() or not all(map(loops.is_stepping, loop.playing))
                if not waits:
                    if not self._thread.goes_on(rows()):
                        return
                    loops.changed.wait(LOOK_SECONDS)
                    continue
            try:
                loop.step()
            except BaseException as error:
                loops.lose(error)
                raise

    def abandon_silent(self, seconds: float) -> list[str]:
        """Give up episodes whose loops made no call for ``seconds``; see `AgentLoops.abandon_silent`.

        Their rows with a known outcome are kept, except in complete mode.

        Returns:
            Names of the abandoned episodes.
        """
        return self._loops.abandon_silent(seconds)

    def assert_healthy(self) -> None:
        """Raise if the runner cannot sample.

        Raises:
            ClosedError: The runner is stopped.
            EnvError: The loop raised an error.
        """
        super().assert_healthy()
        self._thread.assert_healthy()

    def interrupt(self) -> None:
        """Wake the loops and a `run` that waits in another thread, all with a ClosedError."""
        if self._thread.owner.is_here:
            self._closed = True
            self._loops.close()

    def _close(self) -> None:
        self.interrupt()
        self._thread.join()
