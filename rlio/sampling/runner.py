"""`Runner`: what runners have in common, whatever they sample: seeds, counters, states, filters.

`EnvRunner`, `MultiAgentEnvRunner` and `ExternalRunner` derive from it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.multi_agent import AgentId
from rlio.errors import ClosedError, OptionError, StateError, excerpt
from rlio.policies.checkpoint import select_components
from rlio.policies.policy import Policy, PolicyState
from rlio.policies.weights import accepts_weights
from rlio.reader import JsonState
from rlio.sampling.actor import Actor
from rlio.sampling.callbacks import CallbacksLike, RunningEpisode, combine, overridden
from rlio.sampling.config import RolloutConfig
from rlio.sampling.filters import copies_of, filters_in, make_equal
from rlio.sampling.metrics import Counts, MetricsCollector, RolloutMetrics
from rlio.sampling.progress import Progress, check_amount
from rlio.sampling.runner_seeds import RunnerSeeds
from rlio.support.options import expected

__all__ = ["Runner"]

logger = logging.getLogger("rlio")

#: `Episode`, or `MultiAgentEpisode` where there are several agents.
EpisodeT = TypeVar("EpisodeT")


class Runner(ABC, Generic[EpisodeT]):
    """Samples a source: a vector environment, multi-agent environments, or loops elsewhere.

    Args:
        config: How to step and record; None: the defaults.
        callbacks: Told of what happens; see `Callbacks`.
        seed: Of all that is random. None draws one from the OS, logs it and keeps it in `seeds`.
        worker_index: Makes the seeds and ids of workers with the same ``seed`` different.

    Attributes:
        config: How it steps and records.
        callbacks: All of them as one.
        metrics: What is counted.
        worker_index: Of the runner.
    """

    def __init__(
        self,
        *,
        config: RolloutConfig | None,
        callbacks: CallbacksLike,
        seed: int | None,
        worker_index: int,
    ) -> None:
        self.config = expected(config, RolloutConfig, "config")
        self.callbacks = combine(callbacks)
        self._hooks = overridden(self.callbacks)
        self.metrics = MetricsCollector(perf_ema_coef=self.config.sampler_perf_stats_ema_coef)
        self.worker_index = worker_index
        self._seeds = RunnerSeeds.of(seed, worker_index=worker_index)
        self._progress = Progress.of_worker(worker_index)
        self._closed = self._warned = False

    # ---- what a kind of runner provides ----

    #: Of a runner with one policy.
    policy: Policy

    @property
    def policies(self) -> Mapping[str, Policy]:
        """Policy id -> policy."""
        return {DEFAULT_POLICY_ID: self.policy}

    @property
    @abstractmethod
    def _actors(self) -> Mapping[str, Actor]:
        """Policy id -> the actor, of policies that act here."""

    @property
    @abstractmethod
    def _rows_waiting(self) -> int:
        """Rows that were recorded and not handed out."""

    @abstractmethod
    def _sampled_chunks(
        self, steps: int | None, episodes: int | None, *, at_random: bool, force_reset: bool
    ) -> list[EpisodeT]:
        """What `sample` gives."""

    @abstractmethod
    def _explore(self, explore: bool) -> None:
        """Whether policies explore from now on."""

    @abstractmethod
    def _begin_anew(self, seeds: RunnerSeeds, progress: Progress, state: JsonState) -> None:
        """Go on from the counters of a state of `state_dict`, with new episodes of other seeds."""

    @abstractmethod
    def _close(self) -> None:
        """Close what is sampled."""

    # ---- what it has done ----

    @property
    def seeds(self) -> dict[str, int]:
        """What everything random was seeded with: ``seed, worker_index, policy``; environments are seeded
        with `episode_seed`.
        """
        return self._seeds.as_dict()

    @property
    def timesteps(self) -> int:
        """Rows recorded so far: with several agents, each is an agent's step."""
        return self._progress.timesteps

    @property
    def env_steps(self) -> int:
        """Steps of environments taken so far."""
        return self._progress.timesteps

    @property
    def steps_dropped(self) -> int:
        """Rows that were recorded and will be in no batch."""
        return self._progress.dropped

    def get_metrics(self) -> RolloutMetrics:
        """What happened since the last call; see `MetricsCollector.drain`."""
        return self.metrics.drain()

    def assert_healthy(self) -> None:
        """Raise unless the runner can sample.

        Raises:
            ClosedError: It is stopped.
        """
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                f"the {type(self).__name__} is stopped: make a new one, or sample before stop()"
            )

    def stop(self) -> None:
        """Close what is sampled; may be called again."""
        if not self._closed:
            self._closed = True
            self._close()

    # ---- sampling ----

    def _begin_call(self, steps: int | None) -> int:
        """A call that samples begins; returns how many ``steps`` it is about."""
        wanted = self.config.fragment_steps if steps is None else steps
        if wanted < 1:
            raise OptionError(f"steps={steps}: a number of steps, at least 1")
        self._check_open()
        self.metrics.begin()
        return wanted

    def _warn_of_long_episodes(self, waiting: int, wanted: int) -> None:
        """Tell once that many more steps wait for the ends of episodes than are ``wanted``."""
        # RLlib's bounds.
        if not self._warned and waiting > max(1000, 10 * wanted):
            self._warned = True
            logger.warning(
                "%d steps wait for their episodes to end, and %d are wanted: do they end at all? Give "
                "horizon=, or batch_mode='truncate_episodes'",
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
        """Sample episodes, or chunks of episodes.

        A chunk has the id of its episode, and in its ``lookback`` the steps before it that were sampled here,
        as many as the config's ``episode_lookback_horizon`` says. Chunks have no ``state_in_k``: with a
        recurrent policy, each step's state is the ``state_out_k`` of the one before.

        Args:
            num_timesteps: At least so many steps in all; chunks in truncate mode, else whole episodes. With
                neither number, as much as `run` gives.
            num_episodes: Exactly so many whole episodes, of loops elsewhere at least so many; those of which
                rows were handed out before are abandoned.
            explore: In place of the config's.
            random_actions: Act at random, whatever the policies are: the extra columns are those of
                `RandomPolicy`, and nothing is postprocessed. Where this is different from the last call, new
                episodes begin if rows wait, or if what a policy does depends on the steps before.
            force_reset: Abandon the episodes that run, and begin new ones.

        Returns:
            `Episode`s, or `MultiAgentEpisode`s where there are several agents.

        Raises:
            OptionError: Both numbers are given, or one is below 1; or actions are to be random, or episodes
                to begin, in loops elsewhere.
            EndOfData: The loop elsewhere has ended, and there are no more rows.
            EnvError: An environment failed.
            SchemaError: An environment or a policy gave what makes no sense.
            ClosedError: After `stop`.
        """
        check_amount(num_timesteps, num_episodes)
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

    # ---- what is handed out ----

    def _postprocessed(
        self, batch: SampleBatch, episodes: Mapping[int, RunningEpisode] | None = None
    ) -> SampleBatch:
        """Rows of the runner's one policy, as it and callbacks leave them.

        Args:
            batch: Episode by episode.
            episodes: Id -> episode, as callbacks know it; None where callbacks do not ask for them.
        """
        hooked = "on_postprocess_trajectory" in self._hooks
        if episodes is None and not hooked:
            return self.policy.postprocess_batch(batch)
        if not hooked and not self.policy.postprocesses:
            return batch
        made = []
        for part in batch.split_by_episode():
            originals = {None: (DEFAULT_POLICY_ID, part.copy() if hooked else part)}
            episode = (episodes or {}).get(int(part[Columns.EPS_ID][0]))
            made.append(self._postprocess(part, DEFAULT_POLICY_ID, None, episode, originals))
        return concat_samples(made)

    def _postprocess(
        self,
        rows: SampleBatch,
        policy_id: str,
        agent_id: AgentId | None,
        episode: RunningEpisode | None,
        originals: Mapping[Any, tuple[str, SampleBatch]],
    ) -> SampleBatch:
        """One agent's ``rows`` of an episode, as the policy and callbacks leave them.

        Args:
            rows: May be changed.
            policy_id: Who acted.
            agent_id: None where there is one agent.
            episode: As callbacks know it; None where it is not known.
            originals: Agent id -> (policy id, rows), as they were recorded.
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
        """Return seeds, counters and what connectors keep as JSON. What is sampled cannot be saved: see
        `load_state_dict`.
        """
        state: JsonState = {
            "seed": self._seeds.seed,
            "restarts": self._seeds.restarts,
            **self._progress.state_dict(waiting=self._rows_waiting),
        }
        connectors = self.connector_states()
        return state | ({"connectors": connectors} if any(map(_has_some, connectors.values())) else {})

    def load_state_dict(self, state: JsonState) -> None:
        """Continue counting from a state of `state_dict`, at the start of new episodes.

        The episodes are others than those before, and the same ones for each runner that loads the state.
        Rows that were recorded but not handed out when it was saved are in `steps_dropped`.

        Raises:
            StateError: A key is missing, or no whole number; or it is of other connectors.
        """
        seeds = RunnerSeeds.from_state(state, worker_index=self.worker_index).after_restart()
        progress = Progress.from_state(state)
        with ExitStack() as undo:
            self.load_connectors(state.get("connectors", {}), undo)
            self._begin_anew(seeds, progress, state)
            undo.pop_all()
        self._seeds = seeds

    def _components(self) -> dict[str, Callable[[], Any]]:
        """Name -> what makes it, of the components of `get_state`."""
        return {
            "policies": lambda: {each: self.policies[each].get_state() for each in self.policies},
            "connectors": self.connector_states,
            "runner": self.state_dict,
            "metrics": self.metrics.state_dict,
        }

    def get_state(
        self, components: Collection[str] | None = None, *, not_components: Collection[str] = ()
    ) -> PolicyState:
        """Return what makes the runner what it is: nested dicts of arrays and of what JSON takes.

        Args:
            components: Of ``"policies"`` (by id), ``"connectors"`` (by policy id), ``"runner"``
                (`state_dict`) and ``"metrics"``; None: all. An `EnvRunner` has ``"policy"`` in place of the
                first, and ``"observation_connectors"`` and ``"action_connectors"`` in place of the second.
            not_components: Parts to leave out.

        Raises:
            OptionError: There is no such component.
        """
        parts = self._components()
        return {name: parts[name]() for name in select_components(parts, components, not_components)}

    def set_state(self, state: PolicyState) -> None:
        """Take over the components of a state of `get_state`, those that are there.

        Without ``"runner"`` episodes go on. A policy is taken over if its ``weights_seq_no`` is newer than
        what is here, or 0; policies that are not here are passed over.

        Raises:
            StateError: It is of other policies or connectors; all is as it was.
        """
        if "metrics" in state:
            Counts.from_state(state["metrics"])
        with ExitStack() as undo:
            for policy_id, own in state.get("policies", {}).items():
                policy = self.policies.get(policy_id)
                if policy is not None and accepts_weights(policy.weights_seq_no, own.get("weights_seq_no")):
                    undo.callback(policy.set_state, policy.get_state())
                    policy.set_state(own)
            connectors = state.get("connectors", {})
            if "runner" in state:
                # It has them too, as they were when it was saved alone.
                runner = state["runner"]
                self.load_state_dict(runner | {"connectors": runner.get("connectors", {}) | connectors})
            else:
                self.load_connectors(connectors, undo)
            undo.pop_all()
        if "metrics" in state:
            self.metrics.load_state_dict(state["metrics"])

    def connector_states(self) -> dict[str, Any]:
        """The states of connectors as JSON, by policy id."""
        return {policy_id: actor.state_dict() for policy_id, actor in self._actors.items()}

    def load_connectors(self, states: Mapping[str, Any], undo: ExitStack) -> None:
        """Load what `connector_states` gave; ``undo`` gets what takes that back.

        Raises:
            StateError: They are of other connectors.
        """
        for policy_id, state in states.items():
            actor = self._actors.get(policy_id)
            if actor is None:
                raise StateError(
                    f"the state has connectors of {excerpt(policy_id)}: there are those of "
                    f"{excerpt(list(self._actors))}"
                )
            undo.callback(actor.load_state_dict, actor.state_dict())
            actor.load_state_dict(state)

    # ---- filters ----

    def get_filters(self, *, flush_after: bool = False) -> dict[str, list[MeanStdFilter]]:
        """Copies of the `MeanStdFilter`s among the observation connectors, by policy id.

        Args:
            flush_after: Reset their buffers: what came in until now is in the copies, and is counted once.
        """
        return {
            policy_id: copies_of(filters_in(actor.observations), flush_after=flush_after)
            for policy_id, actor in self._actors.items()
        }

    def sync_filters(self, filters: Mapping[str, Sequence[MeanStdFilter]]) -> None:
        """Make the filters equal to ``filters``, as `get_filters` gave them, here or elsewhere.

        Those of policies that have not acted here are passed over: they have none yet.

        Raises:
            StateError: A policy has more or fewer of them.
        """
        for policy_id, actor in self._actors.items():
            mine = filters_in(actor.observations)
            make_equal(mine, filters.get(policy_id, mine))


def _has_some(states: Mapping[str, Any]) -> bool:
    return any(states.values())
