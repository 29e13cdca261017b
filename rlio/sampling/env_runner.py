"""`EnvRunner`: a policy acts in environments, and every step is recorded.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.sampling.config import RolloutConfig
    >>> config = RolloutConfig(num_envs=2, rollout_fragment_length=5)
    >>> runner = EnvRunner("CartPole-v1", RandomPolicy(), config=config, seed=0)
    >>> batch = runner.run()
    >>> len(batch), batch["obs"].shape, batch["t"].tolist()
    (10, (10, 4), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
    >>> runner.stop()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.episode import Episode
from rlio.connectors.connector import Pipeline
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.make import EnvLike
from rlio.errors import OptionError, StateError, excerpt
from rlio.policies.policy import Policy, PolicyState
from rlio.reader import JsonState, Unit
from rlio.sampling.actor import Actor, remembers
from rlio.sampling.callbacks import CallbacksLike
from rlio.sampling.config import RolloutConfig
from rlio.sampling.lookback import LookBack
from rlio.sampling.progress import Progress
from rlio.sampling.recorder import until_last
from rlio.sampling.runner import Runner
from rlio.sampling.runner_envs import RunnerEnvs
from rlio.sampling.runner_seeds import RunnerSeeds
from rlio.sampling.trajectories import with_sequences, without_states
from rlio.sampling.vector_loop import VectorLoop

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.vector import VectorEnv

__all__ = ["EnvRunner"]


class EnvRunner(Runner[Episode]):
    """Steps a vector environment with a policy and gives what happened, as batches or as episodes.

    A row is one transition: ``obs, actions, rewards, new_obs, terminateds, truncateds`` and, int64,
    ``eps_id`` (63 random bits), ``t``, ``env_id``, ``agent_index`` (0), ``unroll_id`` (the same for rows of
    one episode in one batch, never used again) and ``weights_seq_no``; the policy's extra columns; and
    ``infos`` and ``env_seed``, if the config says so. ``new_obs`` is the true next observation, at the end of
    an episode the final one, in all three of gymnasium's autoreset modes; resets are never recorded as steps.
    Observations are those that the policy saw, behind the config's connectors; ``actions`` are its own,
    before the connectors that make of them what the environment gets. Dtypes are the spaces'; rewards are
    float32.

    Of a policy with recurrent state there are also ``state_out_k``, the state after each step, and, one row
    for each sequence of at most ``policy.max_seq_len`` steps, ``seq_lens`` and ``state_in_k``.

    Rows are ordered by environment, and within one by time. Rewards, actions and ids are in memory of their
    own: a batch belongs to the caller.

    Args:
        env: What `make_stepper` takes. The runner closes it, also if it was given as an object.
        policy: Acts; bound to the spaces here, if it was not before.
        config: How to step and record; None: the defaults.
        callbacks: What is called while it samples: `Callbacks`, or several; None: nothing.
        seed: Of the environments, the episode ids and, if it is not yet bound, the policy. None draws one
            from the OS, logs it and keeps it in `seeds`.
        worker_index: Makes the seeds and ids of workers with the same ``seed`` different.
        num_workers: Workers in all; 0 for a single one.
        recreated_worker: Whether the runner takes the place of one that failed: told to functions that make
            environments.

    Attributes:
        config: With numbers in place of what was to be found out.
        callbacks: All of them as one.
        metrics: What is counted.
        seeds: What everything random was seeded with: ``seed, worker_index, policy``; for the environments
            see `episode_seed`.
        timesteps: Rows recorded so far.
        steps_dropped: Rows that were recorded but are in no batch: because of a restart, of an environment
            that failed, or of callbacks that do not want them.

    Raises:
        OptionError: The environment cannot be made, or the policy cannot act in it.
        EnvError: The environment is no legal one.
    """

    def __init__(
        self,
        env: EnvLike,
        policy: Policy,
        *,
        config: RolloutConfig | None = None,
        callbacks: CallbacksLike = None,
        seed: int | None = None,
        worker_index: int = 0,
        num_workers: int = 0,
        recreated_worker: bool = False,
    ) -> None:
        if not isinstance(policy, Policy):
            raise OptionError(f"policy={excerpt(policy)}: expected a Policy, such as RandomPolicy()")
        super().__init__(config=config, callbacks=callbacks, seed=seed, worker_index=worker_index)
        self.policy = policy
        self.num_workers = num_workers
        #: Of `timesteps`, those that the metrics have.
        self._counted = 0
        self._made_loop: VectorLoop | None = None
        self._look_back = LookBack(self.config.episode_lookback_horizon)
        self._envs = RunnerEnvs(
            env,
            config=self.config,
            callbacks=self.callbacks,
            runner=self,
            worker_index=worker_index,
            num_workers=num_workers,
            recreated_worker=recreated_worker,
        )
        try:
            self.make_env()
            self.config = self.config.resolved(
                num_envs=self.num_envs, num_workers=num_workers, worker_index=worker_index
            )
            self.make_module()
        except BaseException:
            self._envs.close()
            raise

    def make_env(self) -> None:
        """Make the environment, in place of the one that is there, if any, which is closed."""
        self._abandon()
        self._envs.make()
        if self._made_loop is not None:
            self._loop.use(self._envs.stepper)

    def make_module(self) -> None:
        """Bind the policy to the spaces between the connectors, and make room for what it does."""
        self._abandon()
        self._made_loop = VectorLoop(
            self._envs.stepper,
            self.policy,
            config=self.config,
            seeds=self._seeds,
            callbacks=self.callbacks,
            metrics=self.metrics,
            progress=self._progress,
            runner=self,
            worker_index=self.worker_index,
        )
        #: Whether rows of running episodes were handed out, so that these will never be whole.
        self._is_cut = False

    # ---- what it steps ----

    @property
    def _loop(self) -> VectorLoop:
        assert self._made_loop is not None
        return self._made_loop

    @property
    def envs(self) -> VectorEnv[Any, Any, Any]:
        """The vector environment."""
        return self._envs.stepper.envs

    @property
    def num_envs(self) -> int:
        """Environments that are stepped together."""
        return self._envs.stepper.num_envs

    @property
    def env_id(self) -> str | None:
        """The registered id of the environments; None if they have none that can be seen from here."""
        return self._envs.env_id

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Of one observation that the policy sees, and that is recorded."""
        return self._loop.actor.observations.space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Of one action that the policy gives, and that is recorded."""
        return self._loop.actor.actions.space

    @property
    def env_action_space(self) -> gym.Space[Any]:
        """Of one action that an environment gets."""
        return self._envs.stepper.action_space

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Observation and action space of one environment, under ``"__env__"``, and of the policy."""
        return {
            "__env__": (self._envs.stepper.observation_space, self.env_action_space),
            DEFAULT_POLICY_ID: (self.observation_space, self.action_space),
        }

    @property
    def unit(self) -> Unit:
        """What its batches can be cut by: sequences, if the policy is recurrent."""
        return "sequences" if self.policy.is_recurrent else "steps"

    @property
    def _actors(self) -> Mapping[str, Actor]:
        return {DEFAULT_POLICY_ID: self._loop.actor}

    @property
    def _rows_waiting(self) -> int:
        return self._loop.recorder.rows

    def _close(self) -> None:
        self._envs.close()

    # ---- sampling ----

    def run(self, steps: int | None = None) -> SampleBatch:
        """Sample a batch.

        Args:
            steps: In place of the config's ``rollout_fragment_length``.

        Returns:
            In truncate mode num_envs x steps rows: exactly ``steps`` of each environment, or, where the
            vector environment spends steps on resets (NEXT_STEP), as many of each as it got to. In complete
            mode whole episodes with at least ``steps`` rows in all. Rows of episodes that are not
            `RunningEpisode.training_enabled` are sampled, but are in no batch, which is smaller then.

        Raises:
            OptionError: ``steps`` is below 1.
            ClosedError: After `stop`.
        """
        self._act_at_random(False)
        return with_sequences(self._sampled(steps), max_seq_len=self.policy.max_seq_len)

    def _sampled(self, steps: int | None = None, *, episodes: int = 0) -> SampleBatch:
        """A batch of fragments of ``steps`` of each environment, or of whole episodes."""
        steps = self._begin_call(steps)
        if not self._loop.is_ready:
            self._begin()
        if episodes:
            return self._handed_out(self._complete(0, episodes))
        if self.config.batch_mode == "complete_episodes":
            return self._handed_out(self._complete(steps))
        return self._handed_out(self._fragment(steps))

    def _begin(self) -> None:
        self._is_cut = False
        self._loop.begin()

    def _fragment(self, steps: int) -> NDArray[np.bool_] | None:
        """Step until there are exactly num_envs x ``steps`` rows; which of the recorder's, None: all."""
        loop, recorder = self._loop, self._loop.recorder
        wanted = steps * recorder.num_envs
        while recorder.rows < wanted:
            if recorder.is_full:
                # With resets and failures among the steps, more of them are needed than rows.
                least = 2 * steps + 2 if loop.stepper.has_reset_steps else steps
                recorder.reserve(max(least, 2 * recorder.steps))
            loop.step()
        self._is_cut = True
        if recorder.rows == wanted:
            return None
        # The first rows in time. Rows that are left over are of the last step, unless whole episodes were
        # asked for before.
        valid = recorder.valid
        return valid & (np.cumsum(valid).reshape(valid.shape) <= wanted)

    def _complete(self, rows: int, episodes: int = 0) -> NDArray[np.bool_]:
        """Step until whole episodes have ``rows`` rows in all, or until so many ``episodes`` are over."""
        if self._is_cut:
            self._begin()
        loop, recorder = self._loop, self._loop.recorder
        ended = recorder.ended
        ended_episodes, ended_rows = int(ended.sum()), int(until_last(ended, recorder.valid).sum())
        while ended_rows < rows or ended_episodes < episodes:
            if recorder.is_full:
                if rows != 1:  # else it is the next episode that ends, however long it is
                    usual = self.config.fragment_steps * self.num_envs
                    self._warn_of_long_episodes(recorder.rows, max(rows, usual))
                recorder.reserve(2 * recorder.capacity)
            lengths = loop.episodes.t + 1
            ended = loop.step()
            ended_episodes += int(np.count_nonzero(ended))
            ended_rows += int(lengths[ended].sum())
        ended = recorder.ended
        if episodes:
            ended &= np.cumsum(ended).reshape(ended.shape) <= episodes
        return until_last(ended, recorder.valid)

    # ---- what is handed out ----

    def _handed_out(self, chosen: NDArray[np.bool_] | None) -> SampleBatch:
        """Take the rows ``chosen`` out of the recorder, (steps, N), None: all; and make a batch of them."""
        loop, hooks = self._loop, self._loop.hooks
        loop.settle()
        batch = self._wanted(self._numbered(chosen))
        if len(batch) and not loop.at_random:  # what a policy computes needs its own extra columns
            batch = self._postprocessed(batch, None if hooks is None else hooks.known)
        if hooks is not None:
            hooks.keep(np.unique(loop.recorder.scalar(Columns.EPS_ID)).tolist())
        self.metrics.sampled(self.timesteps - self._counted, weights_seq_no=self.policy.weights_seq_no)
        self._counted = self.timesteps
        failures = self._envs.take_failures()
        if failures:
            self.metrics.episodes_failed(0, restarts=failures)
        return batch

    def _numbered(self, chosen: NDArray[np.bool_] | None) -> SampleBatch:
        columns, counts = self._loop.recorder.take(chosen)
        # Any: the recorder's columns may be nested, but this one is not.
        eps_id: Any = columns[Columns.EPS_ID]
        columns[Columns.ENV_ID] = np.repeat(np.arange(len(counts)), counts)
        columns[Columns.AGENT_INDEX] = np.zeros(len(eps_id), np.int64)
        columns[Columns.UNROLL_ID] = self._progress.unroll_ids(eps_id)
        return SampleBatch(columns)

    def _wanted(self, batch: SampleBatch) -> SampleBatch:
        """``batch`` without the episodes that callbacks do not want in it."""
        hooks = self._loop.hooks
        unwanted = () if hooks is None else hooks.not_for_training
        if not unwanted:
            return batch
        kept = np.flatnonzero(~np.isin(batch[Columns.EPS_ID], unwanted))
        self._progress.dropped += len(batch) - len(kept)
        self.metrics.rows_dropped(len(batch) - len(kept))
        kept_rows: SampleBatch = batch[kept]
        return kept_rows

    def _explore(self, explore: bool) -> None:
        self._loop.explore = explore

    def _sampled_chunks(
        self, steps: int | None, episodes: int | None, *, at_random: bool, force_reset: bool
    ) -> list[Episode]:
        self._act_at_random(at_random)
        if force_reset:
            self._abandon()
        loop = self._loop
        if steps is not None and self.config.batch_mode == "truncate_episodes":
            steps = -(-steps // self.num_envs)
        batch = self._sampled(steps, episodes=episodes or 0)
        rows_of_episodes = without_states(batch).split_by_episode() if len(batch) else []
        running = loop.episodes.ids.union(loop.recorder.scalar(Columns.EPS_ID).tolist())
        return self._look_back.follow(map(Episode.from_batch, rows_of_episodes), running=running)

    def _abandon(self) -> None:
        """Forget the episodes that run: the next step begins others."""
        if self._made_loop is not None:
            self._loop.forget()
        self._look_back.forget()

    def _act_at_random(self, at_random: bool) -> None:
        """From now on, act at random, or as the policy does."""
        loop = self._loop
        if at_random == loop.at_random:
            return
        # Rows that wait have other extra columns; and a policy that remembers is to see whole episodes.
        if loop.recorder.rows or remembers(self.policy):
            self._abandon()
        loop.act_at_random(at_random)

    # ---- state ----

    def _begin_anew(self, seeds: RunnerSeeds, progress: Progress, state: JsonState) -> None:
        self._loop.recorder.clear()
        self._abandon()
        self._loop.use_seeds(seeds)
        self._progress.take_over(progress)
        self._counted = self.timesteps

    def _components(self) -> dict[str, Callable[[], Any]]:
        return {
            "policy": self.policy.get_state,
            **{name: pipe.state_dict for name, pipe in self._pipelines.items()},
            "runner": self.state_dict,
            "metrics": self.metrics.state_dict,
        }

    def set_state(self, state: PolicyState) -> None:
        """Take over the components of a state of `get_state`; see `Runner.set_state`."""
        parts = {name: part for name, part in state.items() if name in ("runner", "metrics")}
        parts["connectors"] = {name: state[name] for name in self._pipelines if name in state}
        if "policy" in state:
            parts["policies"] = {DEFAULT_POLICY_ID: state["policy"]}
        super().set_state(parts)

    @property
    def _pipelines(self) -> dict[str, Pipeline]:
        return {
            "observation_connectors": self._loop.actor.observations,
            "action_connectors": self._loop.actor.actions,
        }

    def connector_states(self) -> dict[str, JsonState]:
        """The states of connectors as JSON, by the pipeline's name."""
        return {name: pipe.state_dict() for name, pipe in self._pipelines.items()}

    def load_connectors(self, states: Mapping[str, JsonState], undo: ExitStack) -> None:
        for name, state in states.items():
            if name not in self._pipelines:
                raise StateError(
                    f"the state has connectors {excerpt(name)}: known are {', '.join(self._pipelines)}"
                )
            pipeline = self._pipelines[name]
            undo.callback(pipeline.load_state_dict, pipeline.state_dict())
            pipeline.load_state_dict(state)

    def sync_filters(self, filters: Mapping[str, Sequence[MeanStdFilter]]) -> None:
        """Make the filters equal to ``filters``; see `Runner.sync_filters`. Its policy is not passed over."""
        super().sync_filters({DEFAULT_POLICY_ID: filters.get(DEFAULT_POLICY_ID, ())})
