"""`EnvRunner`: a policy acts in environments, and the runner records every step.

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
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.episode import Episode
from rlio.connectors.connector import Pipeline
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.sub_envs import SubEnvStepper
from rlio.envs.vector import Stepper
from rlio.errors import OptionError, StateError, excerpt
from rlio.policies.policy import Policy, PolicyState
from rlio.reader import JsonState, Unit
from rlio.sampling.actor import Actor, remembers
from rlio.sampling.callbacks import CallbacksLike, RunningEpisode
from rlio.sampling.config import RolloutConfig
from rlio.sampling.lookback import LookBack
from rlio.sampling.make_env import EnvLike, make_stepper, set_environs
from rlio.sampling.postprocessed import Postprocessed
from rlio.sampling.progress import Progress, shares_of
from rlio.sampling.recorder import until_last
from rlio.sampling.runner import Runner
from rlio.sampling.runner_seeds import RunnerSeeds
from rlio.sampling.trajectories import piece_starts, with_sequences, without_states
from rlio.sampling.vector_loop import VectorLoop

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.vector import VectorEnv

__all__ = ["EnvRunner"]


class EnvRunner(Runner[Episode]):
    """Steps a vector environment with a policy and returns the steps as batches or episodes.

    A row is one transition: ``obs, actions, rewards, new_obs, terminateds, truncateds`` and, int64,
    ``eps_id`` (63 random bits), ``t``, ``env_id``, ``agent_index`` (0), ``unroll_id`` (shared by the rows of
    one episode in one batch, never reused) and ``weights_seq_no``; the policy's extra columns; and ``infos``
    and ``env_seed``, if the config requests them. ``new_obs`` is the true next observation in all three of
    gymnasium's autoreset modes; at the end of an episode it is the final one. Resets are never recorded as
    steps. Observations are recorded after the config's connectors, as the policy saw them; ``actions`` are
    recorded before the connectors that adapt them to the environment. Dtypes are those of the spaces; rewards
    are float32.

    A policy with recurrent state adds ``state_out_k``, the state after each step. It also adds ``seq_lens``
    and ``state_in_k``, with one row per sequence of at most ``policy.max_seq_len`` steps.

    Rows are ordered by environment, then by time. The caller owns the batch, because its columns are copies.

    Several threads may call it: their calls take turns. `stop` and `interrupt` do not wait for their turn.

    Args:
        env: Environment that `make_stepper` accepts. The runner closes it, even if you pass an object.
        policy: Policy that acts; the runner binds it to the spaces if it is not bound yet.
        config: How to step and record; None uses the defaults.
        callbacks: Called during sampling: `Callbacks`, or several; None calls nothing.
        seed: Seed of the environments, the episode ids and, if it is not bound yet, the policy. None draws
            one from the OS, logs it and keeps it in `seeds`.
        worker_index: Gives workers with the same ``seed`` different seeds and ids.
        num_workers: Total number of workers; 0 for a single one.
        recreated_worker: Whether the runner replaces a failed one; passed to functions that make
            environments.

    Attributes:
        config: The config, with ``"auto"`` values resolved to numbers.
        callbacks: All callbacks, combined into one object.
        metrics: The runner's counters.
        seeds: Seeds by name: ``seed, worker_index, policy``; for those of the environments see
            `episode_seed`.
        timesteps: Rows recorded so far.
        steps_dropped: Recorded rows that are in no batch, because of a restart, a failed environment, or
            callbacks that exclude them.

    Raises:
        OptionError: The environment cannot be made, or the policy cannot act in it.
        EnvError: The environment breaks gymnasium's API.
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
        self._given_env = env
        self._env_context = self.config.context(
            worker_index=worker_index, num_workers=num_workers, recreated_worker=recreated_worker
        )
        set_environs(self.config.extra_python_environs)
        self._made_stepper: Stepper | None = None
        #: The part of `timesteps` that the metrics already include.
        self._counted = 0
        self._look_back: LookBack[Episode] = LookBack(self.config.episode_lookback_horizon)
        try:
            self._open_envs()
            self.config: RolloutConfig = self.config.resolved(
                num_envs=self.num_envs, num_workers=num_workers, worker_index=worker_index
            )
            self._loop: VectorLoop = self._new_loop()
        except BaseException:
            self._close()
            raise

    def make_env(self) -> None:
        """Make the environments; closes the previous ones, if any.

        Raises:
            OptionError: The environments cannot be made, or cannot be rendered as requested.
            EnvError: An environment breaks gymnasium's API.
        """
        with self._turns.held():
            self._abandon()
            self._close()
            self._open_envs()
            self._loop.use(self._stepper)

    def _open_envs(self) -> None:
        config = self.config
        self._made_stepper = stepper = make_stepper(self._given_env, config, self._env_context)
        #: The part of the environments' failures that the metrics already include.
        self._failures_counted = 0
        if config.render_env and stepper.envs.render_mode is None:
            stepper.close()
            raise OptionError(
                "render_env=True, but the environments have no render mode: set it in the function that "
                "makes them, as in gymnasium.make(id, render_mode='rgb_array')"
            )
        self.callbacks.on_environment_created(runner=self, env=stepper.envs, context=self._env_context)
        if "on_sub_environment_created" in self._hooks:
            for i in range(stepper.num_envs):
                self._tell_of_env(i)
            if isinstance(stepper, SubEnvStepper):
                stepper.on_recreated = partial(self._tell_of_env, recreated=True)

    def _tell_of_env(self, index: int, recreated: bool = False) -> None:
        made = getattr(self.envs, "envs", None)
        self.callbacks.on_sub_environment_created(
            runner=self,
            env=None if made is None else made[index],
            env_index=index,
            context=self._env_context.with_index(index, recreated=recreated),
        )

    def make_module(self) -> None:
        """Bind the policy to the spaces between the connectors, and allocate memory for its rows."""
        with self._turns.held():
            self._abandon()
            self._loop = self._new_loop()

    def _new_loop(self) -> VectorLoop:
        #: Whether rows of running episodes were handed out, which means that these episodes cannot be handed
        #: out whole.
        self._is_cut = False
        self._done_rows = Postprocessed()
        #: Rows of the next batch of fragments; 0: it will have whole episodes.
        self._wanted_rows = 0
        #: Ids of the episodes that ended before the last batch, in the order of their ends.
        self._over: NDArray[np.int64] = np.zeros(0, np.int64)
        loop = VectorLoop(
            self._stepper,
            self.policy,
            config=self.config,
            seeds=self._seeds,
            callbacks=self.callbacks,
            metrics=self.metrics,
            progress=self._progress,
            runner=self,
            worker_index=self.worker_index,
        )
        # Postprocessing may write to an episode that is shown, so it comes before the episode's end.
        writes = loop.episodes.are_shown and self.policy.postprocesses
        if writes or "on_postprocess_trajectory" in self._hooks:
            loop.postprocess = self._postprocess_env
        return loop

    # ---- environments and spaces ----

    @property
    def _stepper(self) -> Stepper:
        assert self._made_stepper is not None
        return self._made_stepper

    @property
    def envs(self) -> VectorEnv[Any, Any, Any]:
        """The vector environment."""
        return self._stepper.envs

    @property
    def num_envs(self) -> int:
        """Number of environments stepped together."""
        return self._stepper.num_envs

    @property
    def env_id(self) -> str | None:
        """The registered id of the environments; None if it is unknown."""
        if isinstance(self._given_env, str):
            return self._given_env
        first = next(iter(getattr(self.envs, "envs", ())), None)
        spec = self.envs.spec or getattr(first, "spec", None)
        return None if spec is None else str(spec.id)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Space of one observation, as the policy sees it and as it is recorded."""
        return self._loop.actor.observations.space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Space of one action, as the policy gives it and as it is recorded."""
        return self._loop.actor.actions.space

    @property
    def env_action_space(self) -> gym.Space[Any]:
        """Space of one action, as an environment gets it."""
        return self._stepper.action_space

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Observation and action space of one environment (``"__env__"``) and of the policy."""
        return {
            "__env__": (self._stepper.observation_space, self.env_action_space),
            DEFAULT_POLICY_ID: (self.observation_space, self.action_space),
        }

    @property
    def unit(self) -> Unit:
        """The unit by which batches can be cut: sequences, if the policy is recurrent."""
        return "sequences" if self.policy.is_recurrent else "steps"

    @property
    def _actors(self) -> Mapping[str, Actor]:
        return {DEFAULT_POLICY_ID: self._loop.actor}

    @property
    def _rows_waiting(self) -> int:
        return self._loop.recorder.rows

    def _close(self) -> None:
        if self._made_stepper is not None:
            self._made_stepper.close()

    # ---- sampling ----

    def run(self, steps: int | None = None) -> SampleBatch:
        """Sample a batch.

        Args:
            steps: Overrides the config's ``rollout_fragment_length``.

        Returns:
            In truncate mode, num_envs x steps rows: exactly ``steps`` of each environment. If the vector
            environment spends steps on resets (NEXT_STEP), the numbers per environment differ. In complete
            mode, whole episodes with at least num_envs x ``steps`` rows in total: the first ones that ended.
            Episodes with `RunningEpisode.training_enabled` False are sampled but left out, and the batch is
            smaller.

        Raises:
            OptionError: ``steps`` is below 1.
            ClosedError: The runner is stopped.
        """
        with self._turns.lock:
            self._act_at_random(False)
            return with_sequences(self._sampled(steps), max_seq_len=self.policy.max_seq_len)

    def _sampled(
        self, steps: int | None = None, *, total: int | None = None, episodes: int = 0
    ) -> SampleBatch:
        """A batch of fragments with ``steps`` steps of each environment, or of whole episodes.

        Args:
            steps: Steps of each environment; None: the config's.
            total: Steps of whole episodes together; None: as many as those of a fragment.
            episodes: Number of whole episodes; 0: as many as have the steps.
        """
        steps = self._begin_call(steps)
        if not self._loop.is_ready:
            self._begin()
        if episodes:
            return self._handed_out(self._complete(0, episodes))
        rows = steps * self.num_envs if total is None else total
        if self.config.batch_mode == "complete_episodes":
            return self._handed_out(self._complete(rows))
        return self._handed_out(self._fragment(steps))

    def _begin(self) -> None:
        self._is_cut = False
        self._done_rows.clear()
        self._loop.begin()

    def _fragment(self, steps: int) -> NDArray[np.bool_] | None:
        """Step until there are num_envs x ``steps`` rows.

        Returns:
            Mask of the recorder's rows to hand out; None: all.
        """
        loop, recorder = self._loop, self._loop.recorder
        self._wanted_rows = wanted = steps * recorder.num_envs
        while recorder.rows < wanted:
            self._check_open()
            if recorder.is_full:
                # Resets and failures take steps that give no rows, so allow for more steps than rows.
                least = 2 * steps + 2 if loop.stepper.has_reset_steps else steps
                recorder.reserve(max(least, 2 * recorder.steps))
            loop.step(wanted)
        self._is_cut = True
        return None if recorder.rows == wanted else self._first_rows(wanted)

    def _first_rows(self, wanted: int) -> NDArray[np.bool_]:
        """Mask of the first ``wanted`` rows in time.

        The surplus rows belong to the last step, unless whole episodes were requested before.
        """
        valid = self._loop.recorder.valid
        return valid & (np.cumsum(valid).reshape(valid.shape) <= wanted)

    def _complete(self, rows: int, episodes: int = 0) -> NDArray[np.bool_]:
        """Step until whole episodes have ``rows`` rows in total, or until ``episodes`` episodes ended."""
        if self._is_cut:
            self._begin()
        self._wanted_rows = 0
        loop, recorder = self._loop, self._loop.recorder
        ended = recorder.ended
        # If all episodes begin now, the first ones to end are short: each environment plays its share then.
        shares = None
        if episodes and not recorder.rows and not loop.episodes.t.any():
            shares = np.array(shares_of(episodes, self.num_envs))
        ended_of_each, ended_rows = ended.sum(axis=0), int(until_last(ended, recorder.valid).sum())
        while ended_rows < rows or (
            int(ended_of_each.sum()) < episodes if shares is None else (ended_of_each < shares).any()
        ):
            self._check_open()
            if recorder.is_full:
                if rows > self.num_envs:  # 1 step means the next episodes that end, however long they are
                    usual = self.config.fragment_steps * self.num_envs
                    self._warn_of_long_episodes(recorder.rows, max(rows, usual))
                recorder.reserve(2 * recorder.capacity)
            lengths = loop.episodes.t + 1
            ended = loop.step()
            ended_of_each += ended
            ended_rows += int(lengths[ended].sum())
        ended = recorder.ended
        if shares is not None:
            ended &= np.cumsum(ended, axis=0) <= shares
        elif episodes:
            ended &= np.cumsum(ended).reshape(ended.shape) <= episodes
        else:
            # As many as are needed, in the order in which they ended, as RLlib takes them.
            lengths = np.where(ended, recorder.column(Columns.T) + 1, 0)
            ended &= np.cumsum(lengths).reshape(ended.shape) - lengths < rows
        return until_last(ended, recorder.valid)

    # ---- handing out rows ----

    def _handed_out(self, chosen: NDArray[np.bool_] | None) -> SampleBatch:
        """Take the rows ``chosen``, shape (steps, N), or None for all, out of the recorder as a batch."""
        loop, episodes = self._loop, self._loop.episodes
        self._over = loop.recorder.column(Columns.EPS_ID)[loop.recorder.ended]
        episodes.update()
        batch = self._wanted(self._numbered(chosen))
        if len(batch) and not loop.at_random:  # postprocessing needs the policy's own extra columns
            batch = self._with_postprocessed(batch)
        if episodes.are_shown:
            waiting = set(loop.recorder.scalar(Columns.EPS_ID).tolist())
            episodes.keep(waiting)
            self._done_rows.keep(waiting.__contains__)
        self.metrics.sampled(self.timesteps - self._counted, weights_seq_no=self.policy.weights_seq_no)
        self._counted = self.timesteps
        failures = self._stepper.failures - self._failures_counted
        self._failures_counted += failures
        self.metrics.episodes_failed(0, restarts=failures)
        return batch

    def _postprocess_env(self, env: int, ends: bool) -> None:
        """Postprocess the rows of an environment's episode, which ends or is cut now."""
        loop, recorder = self._loop, self._loop.recorder
        eps_id, episode = loop.episodes.eps_id.item(env), loop.episodes.updated(env)
        if loop.at_random or not episode.training_enabled:
            return
        at = np.flatnonzero(recorder.valid[:, env] & (recorder.column(Columns.EPS_ID)[:, env] == eps_id))
        at = at[self._done_rows.count(eps_id) :]
        # Rows that the next batch will have are a trajectory of their own, as they are without callbacks.
        now = np.ones(len(at), bool)
        if 0 < self._wanted_rows < recorder.rows:
            now = self._first_rows(self._wanted_rows)[at, env]
        for piece in (at[now], at[~now]) if ends else (at[now],):
            if len(piece):
                self._postprocess_rows(env, piece, eps_id, episode)

    def _postprocess_rows(self, env: int, at: NDArray[np.intp], eps_id: int, episode: RunningEpisode) -> None:
        columns = self._loop.recorder.peek(env, at)
        columns[Columns.ENV_ID] = np.full(len(at), env)
        columns[Columns.AGENT_INDEX] = np.zeros(len(at), np.int64)
        columns[Columns.UNROLL_ID] = self._progress.unroll_ids(np.full(len(at), eps_id))
        starts: dict[int | str, int] = {eps_id: self._loop.episodes.starts[eps_id]}
        made = self._postprocessed_episode(SampleBatch(columns, episode_starts=starts), episode)
        self._done_rows.add(eps_id, len(at), made)

    def _with_postprocessed(self, batch: SampleBatch) -> SampleBatch:
        """``batch`` after postprocessing, which `_postprocess_env` has done for most rows, if it is used."""
        episodes = self._loop.episodes
        if self._loop.postprocess is None:
            return self.policy.postprocess_batch(batch)
        made = []
        for rows in batch.split_by_episode():
            eps_id = int(rows[Columns.EPS_ID][0])
            done = self._done_rows.take(eps_id, len(rows))
            if done is None:
                done = self._postprocessed_episode(rows, episodes.known.get(eps_id))
            made.append(done)
        return concat_samples(made)

    def _numbered(self, chosen: NDArray[np.bool_] | None) -> SampleBatch:
        columns, counts = self._loop.recorder.take(chosen)
        # Any: the recorder's columns may be nested, but this one never is.
        eps_id: Any = columns[Columns.EPS_ID]
        columns[Columns.ENV_ID] = np.repeat(np.arange(len(counts)), counts)
        columns[Columns.AGENT_INDEX] = np.zeros(len(eps_id), np.int64)
        columns[Columns.UNROLL_ID] = self._progress.unroll_ids(eps_id)
        starts = self._loop.episodes.take_starts(
            np.unique(eps_id[piece_starts(eps_id)]).tolist(),
            waiting=self._loop.recorder.scalar(Columns.EPS_ID).tolist(),
        )
        return SampleBatch(columns, episode_starts=starts)

    def _wanted(self, batch: SampleBatch) -> SampleBatch:
        """``batch`` without the episodes that callbacks exclude from training."""
        unwanted = self._loop.episodes.not_for_training
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
        total = steps
        if steps is not None and self.config.batch_mode == "truncate_episodes":
            steps = -(-steps // self.num_envs)
        batch = self._sampled(steps, total=total, episodes=episodes or 0)
        rows_of_episodes = without_states(batch).split_by_episode() if len(batch) else []
        # Ended episodes come first, in the order of their ends, and then the running ones, as in RLlib.
        places = {eps_id: place for place, eps_id in enumerate(self._over.tolist())}
        rows_of_episodes.sort(key=lambda rows: places.get(int(rows[Columns.EPS_ID][0]), len(places)))
        running = loop.episodes.ids.union(loop.recorder.scalar(Columns.EPS_ID).tolist())
        return self._look_back.follow(map(Episode.from_batch, rows_of_episodes), running=running)

    def _abandon(self) -> None:
        """Forget the running episodes; the next step begins new ones."""
        self._loop.forget()
        self._look_back.forget()

    def _act_at_random(self, at_random: bool) -> None:
        """Act at random from now on, or as the policy decides."""
        loop = self._loop
        if at_random == loop.at_random:
            return
        # Waiting rows have other extra columns, and a policy with memory must see whole episodes.
        if loop.recorder.rows or remembers(self.policy):
            self._abandon()
        loop.recorder.forget_extras()
        loop.at_random = at_random

    # ---- state ----

    def _start_over(self, seeds: RunnerSeeds, progress: Progress, state: JsonState) -> None:
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

    def _set_state(self, state: PolicyState) -> None:
        parts = {name: part for name, part in state.items() if name in ("runner", "metrics")}
        parts["connectors"] = {name: state[name] for name in self._pipelines if name in state}
        if "policy" in state:
            parts["policies"] = {DEFAULT_POLICY_ID: state["policy"]}
        super()._set_state(parts)

    @property
    def _pipelines(self) -> dict[str, Pipeline]:
        return {
            "observation_connectors": self._loop.actor.observations,
            "action_connectors": self._loop.actor.actions,
        }

    def connector_states(self) -> dict[str, JsonState]:
        """The connector states as JSON, by the pipeline's name."""
        return {name: pipe.state_dict() for name, pipe in self._pipelines.items()}

    def load_connectors(self, states: Mapping[str, JsonState], undo: ExitStack) -> None:
        for name, state in states.items():
            if name not in self._pipelines:
                raise StateError(
                    f"the state has connectors {excerpt(name)}: expected {', '.join(self._pipelines)}"
                )
            pipeline = self._pipelines[name]
            undo.callback(pipeline.load_state_dict, pipeline.state_dict())
            pipeline.load_state_dict(state)

    def sync_filters(self, filters: Mapping[str, Sequence[MeanStdFilter]]) -> None:
        """Make the filters equal to ``filters``. Never skips the policy; see `Runner.sync_filters`."""
        super().sync_filters({DEFAULT_POLICY_ID: filters.get(DEFAULT_POLICY_ID, ())})
