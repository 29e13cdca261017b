"""`Runner`: the base class of all runners. It holds seeds, counters, state and filters.

`EnvRunner`, `MultiAgentEnvRunner` and `ExternalRunner` derive from it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from typing import Any, Generic, TypeVar

from rlio.batch import SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.multi_agent import AgentId
from rlio.errors import ClosedError, OptionError, StateError, excerpt
from rlio.policies.checkpoint import select_components
from rlio.policies.policy import Policy, PolicyState
from rlio.policies.weights import accepts_weights
from rlio.reader import JsonState
from rlio.sampling.actor import Actor
from rlio.sampling.callbacks import Callbacks, CallbacksLike, RunningEpisode, combine, overridden
from rlio.sampling.config import RolloutConfig
from rlio.sampling.filters import filters_in, make_equal
from rlio.sampling.metrics import Counts, MetricsCollector, RolloutMetrics
from rlio.sampling.progress import Progress, check_amount
from rlio.sampling.runner_seeds import RunnerSeeds
from rlio.support.described import Described
from rlio.support.options import expected
from rlio.support.states import fitting
from rlio.support.turns import Turns
from rlio.support.words import counted

__all__ = ["Runner"]

logger: logging.Logger = logging.getLogger("rlio")

#: `Episode`, or `MultiAgentEpisode` where there are several agents.
EpisodeT = TypeVar("EpisodeT")


class Runner(Described, ABC, Generic[EpisodeT]):
    """Samples one source: a vector environment, multi-agent environments, or external loops.

    Several threads may call a runner: their calls take turns. `stop` and `interrupt` do not wait for their
    turn.

    Args:
        config: How to step and record; None uses the defaults.
        callbacks: Called on sampling events; see `Callbacks`.
        seed: Seed of all randomness. None draws one from the OS, logs it and keeps it in `seeds`.
        worker_index: Gives workers with the same ``seed`` different seeds and ids.

    Attributes:
        config: How the runner steps and records.
        callbacks: All callbacks, combined into one object.
        metrics: The runner's counters.
        worker_index: Index of the runner's worker.
    """

    def __init__(
        self,
        *,
        config: RolloutConfig | None,
        callbacks: CallbacksLike,
        seed: int | None,
        worker_index: int,
    ) -> None:
        self.config: RolloutConfig = expected(config, RolloutConfig, "config")
        self.callbacks: Callbacks = combine(callbacks)
        self._hooks = overridden(self.callbacks)
        self.metrics: MetricsCollector = MetricsCollector(
            perf_ema_coef=self.config.sampler_perf_stats_ema_coef
        )
        self.worker_index = worker_index
        self._seeds = RunnerSeeds.of(seed, worker_index=worker_index)
        self._progress = Progress.of_worker(worker_index)
        self._closed = self._warned = False
        self._turns = Turns(type(self).__name__)

    # ---- hooks of subclasses ----

    #: The policy of a runner that has one.
    policy: Policy

    @property
    @abstractmethod
    def env_id(self) -> str | None:
        """The registered id of the environments; None if they have none that can be seen from here."""

    def _describe(self) -> Iterator[str]:
        yield repr(self.env_id)
        yield counted(self.env_steps, "env step")

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Policy id -> policy."""
        return {DEFAULT_POLICY_ID: self.policy}

    @property
    @abstractmethod
    def _actors(self) -> Mapping[str, Actor]:
        """Policy id -> actor, for policies that act in this runner."""

    @property
    @abstractmethod
    def _rows_waiting(self) -> int:
        """Rows that were recorded but not handed out yet."""

    @abstractmethod
    def _sampled_chunks(
        self, steps: int | None, episodes: int | None, *, at_random: bool, force_reset: bool
    ) -> list[EpisodeT]:
        """The result of `sample`."""

    @abstractmethod
    def _explore(self, explore: bool) -> None:
        """Set whether policies explore from now on."""

    @abstractmethod
    def _start_over(self, seeds: RunnerSeeds, progress: Progress, state: JsonState) -> None:
        """Continue from the counters in a `state_dict` state, with new episodes and new seeds."""

    @abstractmethod
    def _close(self) -> None:
        """Close the sampled source."""

    def _between_calls(self) -> AbstractContextManager[object]:
        """Keep other threads from sampling, while a state is taken or loaded."""
        return self._turns.held()

    # ---- counters ----

    @property
    def seeds(self) -> dict[str, int]:
        """Seeds by name: ``seed, worker_index, policy``. `episode_seed` derives the environments' seeds."""
        return self._seeds.as_dict()

    @property
    def timesteps(self) -> int:
        """Rows recorded so far. With several agents, a row is one agent's step."""
        return self._progress.timesteps

    @property
    def env_steps(self) -> int:
        """Environment steps taken so far."""
        return self._progress.timesteps

    @property
    def steps_dropped(self) -> int:
        """Recorded rows that no batch will contain."""
        return self._progress.dropped

    def get_metrics(self) -> RolloutMetrics:
        """Return the metrics since the last call; see `MetricsCollector.drain`."""
        return self.metrics.drain()

    def assert_healthy(self) -> None:
        """Raise unless the runner can sample.

        Raises:
            ClosedError: The runner is stopped.
        """
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                f"the {type(self).__name__} is stopped: make a new one, or sample before stop()"
            )

    def interrupt(self) -> None:
        """End a call of another thread after its current step, with a ClosedError; `stop` follows."""
        self._closed = True

    def stop(self) -> None:
        """Close the sampled source; a second call does nothing. Interrupts a call of another thread."""
        if self._turns.begin_close():
            self._closed = True
            with self._turns.after_calls(self.interrupt):
                self._close()

    # ---- sampling ----

    def _begin_call(self, steps: int | None) -> int:
        """Start a sampling call; returns the number of ``steps`` to sample."""
        wanted = self.config.fragment_steps if steps is None else steps
        if wanted < 1:
            raise OptionError(f"steps={steps}: expected a number of steps, at least 1")
        self._check_open()
        self.metrics.begin()
        return wanted

    def _warn_of_long_episodes(self, waiting: int, wanted: int) -> None:
        """Warn once if far more steps wait for their episodes to end than are ``wanted``."""
        # The same bounds as RLlib's.
        if not self._warned and waiting > max(1000, 10 * wanted):
            self._warned = True
            logger.warning(
                "%d steps wait for their episodes to end, but only %d are wanted. If episodes do not end, "
                "pass horizon= or batch_mode='truncate_episodes'",
                waiting,
                wanted,
            )

    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[EpisodeT]:
        """Sample episodes or chunks of episodes.

        A chunk has its episode's id. Its ``lookback`` holds the preceding steps sampled by this runner, up to
        the config's ``episode_lookback_horizon``. Chunks have no ``state_in_k``: with a recurrent policy, the
        state before a step is the ``state_out_k`` of the previous step.

        Args:
            num_timesteps: Sample at least this many steps in total: chunks in truncate mode, else whole
                episodes. With neither number, sample as much as `run` returns.
            num_episodes: Sample exactly this many whole episodes (at least this many from external loops).
                Abandons running episodes whose first rows were handed out before. If all episodes begin in
                this call, each environment plays its share of them, since the first ones to end would be
                short ones; episodes beyond its share wait for the next call.
            explore: Overrides the config's ``explore``.
            random_actions: Act at random instead of by the policies. The extra columns are then those of
                `RandomPolicy`, and no rows are postprocessed. If the value differs from the last call's, new
                episodes begin when rows are waiting or when the policy depends on earlier steps.
            force_reset: Abandon the running episodes and begin new ones.

        Returns:
            `Episode`s, or `MultiAgentEpisode`s if the runner has several agents: first those that ended, in
            the order of their ends, then the running ones by environment.

        Raises:
            OptionError: Both numbers are given, or one is below 1; or the call asks external loops for random
                actions or new episodes.
            EndOfData: The external loop ended, and no rows are left.
            EnvError: An environment failed.
            SchemaError: An environment or a policy returned invalid data.
            ClosedError: The runner is stopped.
        """
        check_amount(num_timesteps, num_episodes)
        with self._turns.lock:
            self._explore(self.config.explore if explore is None else explore)
            try:
                chunks = self._sampled_chunks(
                    num_timesteps, num_episodes, at_random=random_actions, force_reset=force_reset
                )
            finally:
                self._explore(self.config.explore)
            if "on_sample_end" in self._hooks:
                self.callbacks.on_sample_end(runner=self, samples=chunks)
            return chunks

    # ---- handing out rows ----

    def _postprocessed_episode(self, rows: SampleBatch, episode: RunningEpisode | None) -> SampleBatch:
        """Rows of an episode of the runner's only policy, postprocessed by the policy and by callbacks.

        Args:
            rows: The rows; may be changed.
            episode: The episode that callbacks see; None if unknown.
        """
        hooked = "on_postprocess_trajectory" in self._hooks
        originals = {None: (DEFAULT_POLICY_ID, rows.copy() if hooked else rows)}
        return self._postprocess(rows, DEFAULT_POLICY_ID, None, episode, originals)

    def _postprocess(
        self,
        rows: SampleBatch,
        policy_id: str,
        agent_id: AgentId | None,
        episode: RunningEpisode | None,
        originals: Mapping[Any, tuple[str, SampleBatch]],
    ) -> SampleBatch:
        """One agent's ``rows`` of an episode, postprocessed by the policy and by callbacks.

        Args:
            rows: The agent's rows; may be changed.
            policy_id: The policy that acted.
            agent_id: The agent; None if there is only one.
            episode: The episode that callbacks see; None if unknown.
            originals: Agent id -> (policy id, rows), as recorded.
        """
        policy = self.policies[policy_id]
        if policy.postprocesses:
            others = {agent: each for agent, each in originals.items() if agent != agent_id}
            rows = policy.postprocess_trajectory(rows, None if agent_id is None else others, episode)
        if "on_postprocess_trajectory" in self._hooks:
            self.callbacks.on_postprocess_trajectory(
                runner=self,
                episode=episode,
                agent_id=agent_id,
                policy_id=policy_id,
                policies=self.policies,
                postprocessed_batch=rows,
                original_batches=originals,
            )
        return rows

    # ---- state ----

    def state_dict(self) -> JsonState:
        """Return seeds, counters and connector states as JSON.

        The state does not include the environments; see `load_state_dict`. Waits for a call of another thread
        that samples.
        """
        with self._between_calls():
            return self._state()

    def _state(self) -> JsonState:
        state: JsonState = {
            "seed": self._seeds.seed,
            "restarts": self._seeds.restarts,
            **self._progress.state_dict(waiting=self._rows_waiting),
        }
        connectors = self.connector_states()
        return state | ({"connectors": connectors} if any(map(_has_some, connectors.values())) else {})

    def load_state_dict(self, state: JsonState) -> None:
        """Continue counting from a `state_dict` state, with new episodes.

        The new episodes differ from the earlier ones, but every runner that loads the state gets the same
        ones. Rows that were recorded but not handed out at the time of saving count in `steps_dropped`.

        Raises:
            StateError: A key is missing or not an integer, or the state belongs to other connectors.
        """
        seeds = RunnerSeeds.from_state(state, worker_index=self.worker_index).after_restart()
        progress = Progress.from_state(state)
        with self._between_calls(), ExitStack() as undo, fitting("the runner's state"):
            self.load_connectors(state.get("connectors", {}), undo)
            self._start_over(seeds, progress, state)
            undo.pop_all()
            self._seeds = seeds

    def _components(self) -> dict[str, Callable[[], Any]]:
        """Component name of `get_state` -> the function that makes the component."""
        return {
            "policies": lambda: {each: self.policies[each].get_state() for each in self.policies},
            "connectors": self.connector_states,
            "runner": self.state_dict,
            "metrics": self.metrics.state_dict,
        }

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
    ) -> PolicyState:
        """Return the runner's state: nested dicts of arrays and JSON values.

        Args:
            components: Any of ``"policies"`` (by id), ``"connectors"`` (by policy id), ``"runner"``
                (`state_dict`) and ``"metrics"``; None returns all. An `EnvRunner` has ``"policy"`` instead of
                the first, and ``"observation_connectors"`` and ``"action_connectors"`` instead of the second.
            not_components: Component or components to leave out; None: none.

        Raises:
            OptionError: A component does not exist.
        """
        parts = self._components()
        with self._between_calls():
            return {name: parts[name]() for name in select_components(parts, components, not_components)}

    def set_state(self, state: PolicyState) -> None:
        """Load the components present in a `get_state` state.

        Without ``"runner"``, running episodes continue. Loads a policy only if its ``weights_seq_no`` is
        newer than the runner's, or 0. Skips policies that the runner does not have.

        Raises:
            StateError: The state belongs to other policies or connectors. The runner is unchanged.
        """
        with fitting("the runner's state"):
            self._set_state(state)

    def _set_state(self, state: PolicyState) -> None:
        if "metrics" in state:
            Counts.from_state(state["metrics"])
        with self._between_calls(), ExitStack() as undo:
            for policy_id, own in state.get("policies", {}).items():
                policy = self.policies.get(policy_id)
                if policy is not None and accepts_weights(policy.weights_seq_no, own.get("weights_seq_no")):
                    undo.callback(policy.set_state, policy.get_state())
                    policy.set_state(own)
            connectors = state.get("connectors", {})
            if "runner" in state:
                # The runner's state repeats them, because it can be saved alone.
                runner = state["runner"]
                self.load_state_dict(runner | {"connectors": runner.get("connectors", {}) | connectors})
            else:
                self.load_connectors(connectors, undo)
            undo.pop_all()
        if "metrics" in state:
            self.metrics.load_state_dict(state["metrics"])

    def connector_states(self) -> dict[str, Any]:
        """The connector states as JSON, by policy id."""
        return {policy_id: actor.state_dict() for policy_id, actor in self._actors.items()}

    def load_connectors(self, states: Mapping[str, Any], undo: ExitStack) -> None:
        """Load `connector_states` results; adds the steps that revert the load to ``undo``.

        Raises:
            StateError: The states belong to other connectors.
        """
        for policy_id, state in states.items():
            actor = self._actors.get(policy_id)
            if actor is None:
                raise StateError(
                    f"the state has connectors of {excerpt(policy_id)}: expected those of "
                    f"{excerpt(list(self._actors))}"
                )
            undo.callback(actor.load_state_dict, actor.state_dict())
            actor.load_state_dict(state)

    # ---- filters ----

    def get_filters(self, flush_after: bool = False) -> dict[str, list[MeanStdFilter]]:
        """Copies of the `MeanStdFilter`s among the observation connectors, by policy id.

        Args:
            flush_after: Reset the buffers of the runner's filters after the copy, so that later calls do not
                count the same observations again.
        """
        own = {policy_id: filters_in(actor.observations) for policy_id, actor in self._actors.items()}
        copies = {policy_id: [each.copy() for each in filters] for policy_id, filters in own.items()}
        if flush_after:
            for each in chain.from_iterable(own.values()):
                each.reset_buffer()
        return copies

    def sync_filters(self, filters: Mapping[str, Sequence[MeanStdFilter]]) -> None:
        """Make the filters equal to ``filters``, a `get_filters` result of this or another runner.

        Skips policies that have not acted in this runner, because they have no filters yet.

        Raises:
            StateError: A policy has more or fewer filters.
        """
        for policy_id, actor in self._actors.items():
            mine = filters_in(actor.observations)
            make_equal(mine, filters.get(policy_id, mine))


def _has_some(states: Mapping[str, Any]) -> bool:
    return any(states.values())
