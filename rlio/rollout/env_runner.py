"""`EnvRunner`: a policy acts in environments, and every step is recorded.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.rollout.config import RolloutConfig
    >>> config = RolloutConfig(num_envs=2, rollout_fragment_length=5)
    >>> runner = EnvRunner("CartPole-v1", RandomPolicy(), config=config, seed=0)
    >>> batch = runner.run()
    >>> len(batch), batch["obs"].shape, batch["t"].tolist()
    (10, (10, 4), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
    >>> runner.stop()
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch, concat_samples
from rlio.columns import DEFAULT_POLICY_ID, Columns
from rlio.connectors.actions import ClipAction, UnsquashAction
from rlio.connectors.connector import ActionPipeline, Connector, Pipeline, Streams
from rlio.connectors.mean_std import MeanStdFilter
from rlio.connectors.rewards import clip_rewards
from rlio.envs.games import Game, finished_games, tells_games
from rlio.envs.horizon import with_horizon
from rlio.envs.making import EnvLike, make_stepper, set_environs
from rlio.envs.seeding import EpisodeSeeds
from rlio.envs.stepping import Stepper, VectorStep
from rlio.envs.sub_envs import SubEnvStepper
from rlio.episode import Episode
from rlio.errors import ClosedError, OptionError, StateError, excerpt
from rlio.interfaces import JsonState
from rlio.policies.checkpoint import select_components
from rlio.policies.policy import Policy, PolicyState
from rlio.policies.random_policy import RandomPolicy
from rlio.policies.weights import accepts_weights
from rlio.rollout.acting import Acted, Acting
from rlio.rollout.callbacks import CallbacksLike, combine, overridden
from rlio.rollout.config import RolloutConfig
from rlio.rollout.env_setup import env_setup
from rlio.rollout.episode_hooks import EpisodeHooks
from rlio.rollout.episodes import Episodes
from rlio.rollout.lookback import LookBack
from rlio.rollout.metrics import MetricsCollector, PerfCounters, RolloutMetrics
from rlio.rollout.observing import Observer
from rlio.rollout.recorder import StepRecorder
from rlio.rollout.trajectories import piece_starts, with_sequences, without_states

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.vector import VectorEnv

__all__ = ["EnvRunner"]

logger = logging.getLogger("rlio")

# Unroll ids of different workers never meet: 2^40 fragments each.
_UNROLLS_A_WORKER = 1 << 40
# RLlib's bounds of what it calls large: a batch that waits for an episode's end.
_LARGE_BATCH, _LARGE_FRAGMENTS = 1000, 10
_ENV_SEED = "env_seed"


class EnvRunner:
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
        callbacks: What is called while it samples: `RolloutCallbacks`, or several; None: nothing.
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
        self.config = config if config is not None else RolloutConfig()
        self.policy = policy
        self.callbacks = combine(callbacks)
        self.metrics = MetricsCollector(perf_ema_coef=self.config.sampler_perf_stats_ema_coef)
        self.worker_index, self.num_workers = worker_index, num_workers
        self.timesteps = 0
        self.seeds = _seeds(seed, worker_index)
        self._given_env, self._recreated = env, recreated_worker
        self._dropped = 0
        self._counted = 0
        self._unrolls = worker_index * _UNROLLS_A_WORKER
        self._restarts = 0
        self._closed = False
        self._warned = False
        self._failures = 0
        self._stepper: Stepper | None = None
        set_environs(self.config.extra_python_environs)
        self.make_env()
        try:
            self.config = self.config.resolved(
                num_envs=self.num_envs, num_workers=num_workers, worker_index=worker_index
            )
            self.make_module()
        except BaseException:
            self._stepping.close()
            raise

    # ---- making ----

    def make_env(self) -> None:
        """Make the environment, in place of the one that is there, if any, which is closed."""
        config = self.config
        if self._stepper is not None:
            self._forget_steps()
            self._stepper.close()
        env = self._given_env
        if config.horizon is not None and not config.soft_horizon:
            env = with_horizon(env, config.horizon)
        setup = env_setup(
            config,
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            recreated_worker=self._recreated,
        )
        self._context = setup.context
        self._stepper = make_stepper(env, setup)
        if config.render_env and self._stepper.envs.render_mode is None:
            self._stepper.close()
            raise OptionError(
                "render_env=True, but the environments have no render mode: a function that makes them gives "
                "it, as in gymnasium.make(id, render_mode='rgb_array')"
            )
        self._begun = self._ready = False
        self._failures = 0
        self.callbacks.on_environment_created(runner=self, env=self._stepper.envs)
        if "on_sub_environment_created" in overridden(self.callbacks):
            for i in range(self.num_envs):
                self._sub_env_created(i)
            if isinstance(self._stepper, SubEnvStepper):
                self._stepper.on_made_anew = partial(self._sub_env_created, recreated=True)

    def _sub_env_created(self, env: int, recreated: bool = False) -> None:
        made = getattr(self.envs, "envs", None)
        self.callbacks.on_sub_environment_created(
            runner=self,
            env=None if made is None else made[env],
            env_index=env,
            context=self._context.with_index(env, recreated=recreated),
        )

    def make_module(self) -> None:
        """Bind the policy to the spaces between the connectors, and make room for what it does."""
        config, env_space, action_space = self.config, self._stepping.observation_space, self.env_action_space
        self._observer = Observer(
            config.observation_connectors, env_space, num_envs=self.num_envs, policy=self.policy
        )
        own: list[Connector] = [UnsquashAction()] if config.normalize_actions else []
        if config.clip_actions:
            own.append(ClipAction())
        self._action_pipeline = ActionPipeline([*config.action_connectors, *own], action_space, self.policy)
        self.policy.bind(self.observation_space, self.action_space, self.seeds["policy"])
        self._acting = Acting(self.policy, self.num_envs)
        self._tells_policy = self.policy.has_episode_hooks
        self._random_policy: RandomPolicy | None = None
        self._acts_randomly = False
        self._recorder = self._new_recorder()
        self._look_back = LookBack(config.episode_lookback_horizon)
        self._explore = config.explore
        #: Whether rows of running episodes were handed out.
        self._is_cut = False
        self._changes_obs = len(self._observer.pipeline) > 0
        self._changes_actions = len(self._action_pipeline) > 0
        self._slots, self._never = np.arange(self.num_envs), np.zeros(self.num_envs, bool)
        hooks = EpisodeHooks(
            self.callbacks,
            runner=self,
            space=env_space,
            num_envs=self.num_envs,
            worker_index=self.worker_index,
        )
        # Of several workers, the first one renders.
        self._renders = config.render_env and self.worker_index <= 1
        self._hooks = hooks if hooks.wants or self._renders else None
        self._episodes = self._new_episodes()

    def _new_recorder(self) -> StepRecorder:
        steps = self.config.fragment_steps
        # A reset is followed by a transition: at most every other step of an environment is none.
        capacity = 2 * steps + 2 if self._stepping.has_reset_steps else steps
        return StepRecorder(
            self.observation_space,
            self.action_space,
            num_envs=self.num_envs,
            capacity=capacity,
            infos=self.config.record_infos,
        )

    # ---- what it steps ----

    @property
    def _stepping(self) -> Stepper:
        assert self._stepper is not None
        return self._stepper

    @property
    def envs(self) -> VectorEnv[Any, Any, Any]:
        """The vector environment."""
        return self._stepping.envs

    @property
    def num_envs(self) -> int:
        """Environments that are stepped together."""
        return self._stepping.num_envs

    @property
    def env_id(self) -> str | None:
        """The registered id of the environments; None if they have none that can be seen from here."""
        if isinstance(self._given_env, str):
            return self._given_env
        envs = self._stepping.envs
        first = next(iter(getattr(envs, "envs", ())), None)
        spec = envs.spec or getattr(first, "spec", None)
        return None if spec is None else str(spec.id)

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Of one observation that the policy sees, and that is recorded."""
        return self._observer.pipeline.space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Of one action that the policy gives, and that is recorded."""
        return self._action_pipeline.space

    @property
    def env_action_space(self) -> gym.Space[Any]:
        """Of one action that an environment gets."""
        return self._stepping.action_space

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Observation and action space of one environment, under ``"__env__"``, and of the policy."""
        return {
            "__env__": (self._stepping.observation_space, self.env_action_space),
            DEFAULT_POLICY_ID: (self.observation_space, self.action_space),
        }

    def assert_healthy(self) -> None:
        """Raise unless it can sample.

        Raises:
            ClosedError: It is stopped.
        """
        if self._closed:
            raise ClosedError("the EnvRunner is stopped: make a new one, or sample before stop()")

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

    def _sampled(self, steps: int | None = None) -> SampleBatch:
        steps = self.config.fragment_steps if steps is None else steps
        if steps < 1:
            raise OptionError(f"steps={steps}: a number of steps, at least 1")
        if self.config.batch_mode == "complete_episodes":
            return self._complete(rows=steps)
        return self._fragment(steps)

    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[Episode]:
        """Sample episodes, or chunks of episodes.

        A chunk has the id of its episode, and the steps before it, as many as the config's
        ``episode_lookback_horizon`` says, in its ``lookback``.

        Args:
            num_timesteps: At least so many steps in all; chunks in truncate mode, else whole episodes. With
                neither argument, a fragment of the config's size.
            num_episodes: Exactly so many whole episodes; begun ones of which rows were handed out are
                abandoned.
            explore: In place of the config's.
            random_actions: Act at random, whatever the policy is: the extra columns are those of
                `RandomPolicy`.
            force_reset: Abandon the episodes that run, and begin new ones.

        Raises:
            OptionError: Both are given, or one is below 1.
            ClosedError: After `stop`.
        """
        if num_timesteps is not None and num_episodes is not None:
            raise OptionError(
                f"num_timesteps={num_timesteps} and num_episodes={num_episodes}: give one of them"
            )
        if num_episodes is not None and num_episodes < 1:
            raise OptionError(f"num_episodes={num_episodes}: at least 1")
        self._act_at_random(random_actions)
        if force_reset:
            self._forget_steps()
        self._explore = self.config.explore if explore is None else explore
        try:
            if num_episodes is not None:
                batch = self._complete(episodes=num_episodes)
            elif num_timesteps is None or self.config.batch_mode == "complete_episodes":
                batch = self._sampled(num_timesteps)
            else:
                batch = self._sampled(-(-num_timesteps // self.num_envs))
        finally:
            self._explore = self.config.explore
        rows_of_episodes = without_states(batch).split_by_episode() if len(batch) else []
        running = self._episodes.ids.union(self._recorder.scalar(Columns.EPS_ID).tolist())
        chunks = self._look_back.follow(map(Episode.from_batch, rows_of_episodes), running=running)
        self.callbacks.on_sample_end(runner=self, samples=chunks)
        return chunks

    def _act_at_random(self, at_random: bool) -> None:
        """From now on, act at random, or as the policy does."""
        if at_random == self._acts_randomly:
            return
        # Rows that wait have other extra columns; and a policy that remembers is to see whole episodes.
        if self._recorder.rows or self._acting.remembers:
            self._forget_steps()
        self._recorder.forget_extras()
        acting = self.policy
        if at_random:
            if self._random_policy is None:
                self._random_policy = RandomPolicy()
                self._random_policy.bind(
                    self.observation_space, self.action_space, _number(self._sequence(3))
                )
            acting = self._random_policy
        self._acting = Acting(acting, self.num_envs)
        self._acts_randomly = at_random

    def get_metrics(self) -> RolloutMetrics:
        """What happened since the last call."""
        return self.metrics.drain()

    @property
    def steps_dropped(self) -> int:
        """Rows that were recorded but are in no batch, see the class."""
        return self._dropped

    def stop(self) -> None:
        """Close the environments; may be called again."""
        if not self._closed:
            self._closed = True
            self._stepping.close()

    # ---- the loop ----

    def _begin(self) -> None:
        """Start new episodes everywhere, the first time from the seed."""
        self._forget_steps()
        self._episodes.flush()
        if not self._begun:
            self._episodes = self._new_episodes()
        episodes, hooks, everywhere = self._episodes, self._hooks, np.arange(self.num_envs)
        episodes.begin()
        if hooks is not None:
            hooks.begin(episodes.eps_id)
        seeds = None if self._begun else self._episode_seeds()
        self._begun = True
        obs = self._stepping.reset(seeds=seeds)
        self._env_seeds = self._stepping.env_seeds
        self._recorder.start(self._observer.begin(obs) if self._changes_obs else obs)
        self._acting.begin()
        if hooks is not None:
            hooks.started(obs)
        if self._tells_policy:
            self.policy.on_episode_start(everywhere)
        self._ready = True

    def _forget_steps(self) -> None:
        """Abandon the episodes that run: the next step begins others."""
        if self._ready or self._begun:
            self._dropped += self._recorder.rows
            self.metrics.rows_dropped(self._recorder.rows)
            self._recorder.clear()
            self._look_back.forget()
        self._is_cut = self._ready = False

    def _new_episodes(self) -> Episodes:
        ids = np.random.default_rng(self._sequence(1))
        return Episodes(self.num_envs, metrics=self.metrics, ids=ids, hooks=self._hooks)

    def _step(self) -> NDArray[np.bool_]:
        """Step every environment once, record it, and return which episodes ended."""
        self._ready = False
        episodes, perf = self._episodes, self.metrics.perf
        perf.begin()
        if self._renders:
            self._render()
            perf.lap(PerfCounters.ENV_RENDER)
        acted = self._acting.act(
            self._recorder.obs,
            {Columns.T: episodes.t, Columns.EPS_ID: episodes.eps_id},
            explore=self._explore,
            timestep=self.timesteps,
        )
        perf.lap(PerfCounters.INFERENCE)
        sent = acted.actions
        if self._changes_actions:
            sent = self._action_pipeline(sent, Streams(self._slots, episodes.t == 0))
        perf.lap(PerfCounters.ACTION_PROCESSING)
        step = self._stepping.step(sent)
        perf.lap(PerfCounters.ENV_WAIT)
        ended = self._record(step, acted, sent)
        perf.lap(PerfCounters.OBS_PROCESSING)
        perf.end_step()
        self._ready = True
        return ended

    def _render(self) -> None:
        """Keep what environments show before they are stepped: frame t is of the observation of step t."""
        assert self._hooks is not None
        frames = self._stepping.render()
        for episode, t, frame in zip(self._hooks.running, self._episodes.t.tolist(), frames, strict=True):
            shown = episode.media.setdefault("frames", [])
            if len(shown) <= t:  # An environment that still works on an action shows what it showed.
                shown.append(frame)

    def _record(self, step: VectorStep, acted: Acted, sent: Any) -> NDArray[np.bool_]:
        """Write down what ``step`` gave, and return which of its rows are the last of an episode."""
        config, episodes = self.config, self._episodes
        ended: NDArray[np.bool_] = step.terminateds | step.truncateds
        if step.valid is not None:
            ended = ended & step.valid
        if config.soft_horizon:
            step, ended = self._cut_softly(step, ended)
        if config.no_done_at_end:
            step = step._replace(terminateds=self._never, truncateds=self._never)
        shown, rewards = step, step.rewards
        if self._changes_obs:
            shown = self._observer.step(step, ended, self._recorder.obs)
        if config.clip_rewards:
            rewards = clip_rewards(rewards, config.clip_rewards)
            shown = shown._replace(rewards=rewards)
        infos = self._infos(step, ended)
        self._recorder.add(
            shown,
            actions=acted.actions,
            extras=acted.extras,
            scalars=self._scalars(step, acted),
            infos=infos,
            ends=ended,
        )
        self.timesteps += episodes.count(step.rewards, step.valid)
        self._acting.advance(step, rewards)
        if self._hooks is not None:
            self._hooks.follow(
                step, ended, sent=sent, infos=infos, lengths=episodes.t, totals=episodes.totals
            )
        if ended.any():
            episodes.end(ended, self._games(step, ended, infos))
        if step.faulty is not None:
            self._discard(step)
        if self._hooks is not None:
            self._hooks.renew(step, episodes.eps_id)
        if self._tells_policy:
            self._tell_policy(step, ended)
        return ended

    def _scalars(self, step: VectorStep, acted: Acted) -> dict[str, Any]:
        episodes = self._episodes
        scalars = {
            Columns.EPS_ID: episodes.eps_id,
            Columns.T: episodes.t,
            Columns.WEIGHTS_SEQ_NO: acted.weights_seq_no,
        }
        if self.config.record_env_seeds:
            scalars[_ENV_SEED] = self._env_seeds
            if step.starts.any():
                self._env_seeds = self._stepping.env_seeds
        return scalars

    def _infos(self, step: VectorStep, ended: NDArray[np.bool_]) -> list[dict[str, Any]] | None:
        """The infos of a step, if somebody wants them."""
        wanted = self.config.record_infos or (self._hooks is not None and self._hooks.looks_at(ended))
        return self._stepping.env_infos(step) if wanted else None

    def _games(
        self, step: VectorStep, ended: NDArray[np.bool_], infos: list[dict[str, Any]] | None
    ) -> dict[int, Game | None] | None:
        """What is counted in place of the episodes that ``ended``, where environments tell it."""
        if infos is None:
            if not tells_games(step.infos):
                return None
            infos = self._stepping.env_infos(step)
        return finished_games(infos, np.flatnonzero(ended).tolist())

    def _cut_softly(self, step: VectorStep, ended: NDArray[np.bool_]) -> tuple[VectorStep, NDArray[np.bool_]]:
        """Begin new episodes at the horizon, where the environment goes on."""
        assert self.config.horizon is not None
        cut = (self._episodes.t + 1 >= self.config.horizon) & ~ended
        if step.valid is not None:
            cut &= step.valid
        if not cut.any():
            return step, ended
        shown = self._observer.rows_of(step.obs, np.flatnonzero(cut))
        step = step._replace(starts=step.starts | cut, finals=[*step.finals, *shown])
        return step, ended | cut

    def _discard(self, step: VectorStep) -> None:
        """Forget the episodes of environments that failed."""
        assert step.faulty is not None
        which, episodes, rows = step.faulty, self._episodes, 0
        for env in np.flatnonzero(which).tolist():
            rows += self._recorder.discard(env, int(episodes.eps_id[env]))
            if self._hooks is not None:
                self._hooks.failed(
                    env,
                    step.errors.get(env),
                    length=int(episodes.t[env]),
                    total=float(episodes.totals[env]),
                )
        self._dropped += rows
        episodes.fail(which, rows=rows)

    def _tell_policy(self, step: VectorStep, ended: NDArray[np.bool_]) -> None:
        over = ended if step.faulty is None else ended | step.faulty
        for which, tell in (
            (over, self.policy.on_episode_end),
            (step.starts, self.policy.on_episode_start),
        ):
            if which.any():
                tell(np.flatnonzero(which))

    # ---- rows out of steps ----

    def _fragment(self, steps: int) -> SampleBatch:
        """Exactly num_envs x ``steps`` rows."""
        self._make_ready()
        wanted = steps * self.num_envs
        recorder = self._recorder
        while recorder.rows < wanted:
            if recorder.is_full:
                # With resets and failures among the steps, more of them are needed than rows.
                least = 2 * steps + 2 if self._stepping.has_reset_steps else steps
                recorder.reserve(max(least, 2 * recorder.steps))
            self._step()
        # The first rows in time. Rows that are left over are of the last step, unless whole episodes were
        # asked for before.
        valid = recorder.valid
        chosen = (
            None if recorder.rows == wanted else valid & (np.cumsum(valid).reshape(valid.shape) <= wanted)
        )
        self._is_cut = True
        return self._handed_out(chosen)

    def _complete(self, *, rows: int = 0, episodes: int = 0) -> SampleBatch:
        """Whole episodes: at least ``rows`` rows of them, or exactly ``episodes``, those that ended first."""
        self._make_ready()
        if self._is_cut:
            self._begin()
        recorder = self._recorder
        ended = recorder.ended
        ended_episodes, ended_rows = int(ended.sum()), int(_until_last(ended, recorder.valid).sum())
        while ended_rows < rows or ended_episodes < episodes:
            if recorder.is_full:
                self._warn_if_large(rows)
                recorder.reserve(2 * recorder.capacity)
            lengths = self._episodes.t + 1
            ended = self._step()
            ended_episodes += int(ended.sum())
            ended_rows += int(lengths[ended].sum())
        ended = recorder.ended
        if episodes:
            ended &= np.cumsum(ended).reshape(ended.shape) <= episodes
        return self._handed_out(_until_last(ended, recorder.valid))

    def _warn_if_large(self, rows: int) -> None:
        limit = max(_LARGE_BATCH, _LARGE_FRAGMENTS * max(rows, self.config.fragment_steps * self.num_envs))
        if self._recorder.rows > limit and not self._warned:
            self._warned = True
            logger.warning(
                "%s steps wait for their episodes to end, more than %s: if episodes are that long, set a "
                "horizon, or batch_mode='truncate_episodes'",
                self._recorder.rows,
                limit,
            )

    def _make_ready(self) -> None:
        """Begin, or begin anew where the last step failed half-way."""
        self.assert_healthy()
        self.metrics.begin()
        if not self._ready:
            self._begin()

    def _handed_out(self, chosen: NDArray[np.bool_] | None) -> SampleBatch:
        columns, counts = self._recorder.take(chosen)
        eps_id: Any = columns[Columns.EPS_ID]
        columns[Columns.ENV_ID] = np.repeat(np.arange(self.num_envs), counts)
        columns[Columns.AGENT_INDEX] = np.zeros(len(eps_id), np.int64)
        starts = piece_starts(eps_id)
        columns[Columns.UNROLL_ID] = self._unrolls + np.cumsum(starts) - 1
        self._unrolls += int(starts.sum())
        batch = SampleBatch(columns)
        if self._hooks is not None:
            batch = self._wanted(batch, self._hooks)
        batch = self._postprocessed(batch)
        self._episodes.flush()
        self.metrics.sampled(self.timesteps - self._counted, weights_seq_no=self.policy.weights_seq_no)
        self._counted = self.timesteps
        if self._stepping.failures > self._failures:
            self.metrics.episodes_failed(0, restarts=self._stepping.failures - self._failures)
            self._failures = self._stepping.failures
        return batch

    def _wanted(self, batch: SampleBatch, hooks: EpisodeHooks) -> SampleBatch:
        """``batch`` without the episodes that callbacks do not want in it."""
        unwanted = hooks.not_for_training
        if not unwanted:
            return batch
        kept = np.flatnonzero(~np.isin(batch[Columns.EPS_ID], unwanted))
        self._dropped += len(batch) - len(kept)
        self.metrics.rows_dropped(len(batch) - len(kept))
        kept_rows: SampleBatch = batch[kept]
        return kept_rows

    def _postprocessed(self, batch: SampleBatch) -> SampleBatch:
        hooks, policy = self._hooks, self.policy
        if hooks is not None:
            hooks.update(self._episodes.t, self._episodes.totals)
        # What a policy computes needs its own extra columns.
        if self._acts_randomly or not len(batch):
            made = batch
        elif hooks is None:
            made = policy.postprocess_batch(batch)
        elif policy.postprocesses or hooks.wants_trajectories:
            made = concat_samples([hooks.postprocessed(part, policy) for part in batch.split_by_episode()])
        else:
            made = batch
        if hooks is not None:
            hooks.keep(np.unique(self._recorder.scalar(Columns.EPS_ID)).tolist())
        return made

    # ---- seeds and state ----

    def _sequence(self, *key: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seeds["seed"], spawn_key=(self.worker_index, self._restarts, *key))

    def _episode_seeds(self) -> EpisodeSeeds:
        # From the second start on, others than the first: a restored runner is not to repeat its episodes.
        return EpisodeSeeds(
            self.seeds["seed"],
            worker_index=self.worker_index,
            restart=self._restarts,
            num_envs=self.num_envs,
        )

    def state_dict(self) -> JsonState:
        """Return seeds, counters and what connectors keep as JSON. Environments cannot be saved: see
        `load_state_dict`.
        """
        state: JsonState = {
            "seed": self.seeds["seed"],
            "restarts": self._restarts,
            "timesteps": self.timesteps,
            "unrolls": self._unrolls,
            "steps_dropped": self._dropped + self._recorder.rows,
        }
        connectors = {name: pipe.state_dict() for name, pipe in self._pipelines.items()}
        if any(connectors.values()):
            state["connectors"] = connectors
        return state

    def load_state_dict(self, state: JsonState) -> None:
        """Continue counting from a state of `state_dict`, at the start of new episodes.

        The episodes are others than those before, and the same ones for each runner that loads the state.
        Rows that were recorded but not handed out when it was saved are in `steps_dropped`.

        Raises:
            StateError: A key is missing, or no whole number.
        """
        for key in ("seed", "restarts", "timesteps", "unrolls", "steps_dropped"):
            if not isinstance(state.get(key), int):
                raise StateError(
                    f"the runner's state needs {key!r} (int), but it has {excerpt(state.get(key))}"
                )
        for name, kept in state.get("connectors", {}).items():
            self._load_connectors(name, kept)
        self._recorder.clear()
        self._look_back.forget()
        self.seeds = _seeds(state["seed"], self.worker_index)
        self._restarts = state["restarts"] + 1
        self.timesteps, self._unrolls = state["timesteps"], state["unrolls"]
        self._counted = self.timesteps
        self._dropped = state["steps_dropped"]
        self._begun = self._ready = self._is_cut = False

    def get_state(
        self, components: Collection[str] | None = None, *, not_components: Collection[str] = ()
    ) -> PolicyState:
        """Return what makes the runner what it is: nested dicts of arrays and of what JSON takes.

        Args:
            components: Of ``"policy"``, ``"observation_connectors"``, ``"action_connectors"``, ``"runner"``
                (`state_dict`) and ``"metrics"``; None: all.
            not_components: Parts to leave out.

        Raises:
            OptionError: There is no such component.
        """
        state: PolicyState = {
            "policy": self.policy.get_state(),
            **{name: pipe.state_dict() for name, pipe in self._pipelines.items()},
            "runner": self.state_dict(),
            "metrics": self.metrics.state_dict(),
        }
        return select_components(state, components, not_components)

    def set_state(self, state: PolicyState) -> None:
        """Take over the components of a state of `get_state`, those that are there.

        Without ``"runner"`` episodes go on. The policy is taken over if its ``weights_seq_no`` is newer than
        what is here, or 0.

        Raises:
            StateError: It is of other policies or connectors.
        """
        policy = state.get("policy")
        if policy is not None and accepts_weights(self.policy.weights_seq_no, policy.get("weights_seq_no")):
            self.policy.set_state(policy)
        if "runner" in state:
            self.load_state_dict(state["runner"])
        for name in self._pipelines:
            if name in state:
                self._load_connectors(name, state[name])
        if "metrics" in state:
            self.metrics.load_state_dict(state["metrics"])

    @property
    def _pipelines(self) -> dict[str, Pipeline]:
        return {
            "observation_connectors": self._observer.pipeline,
            "action_connectors": self._action_pipeline,
        }

    def _load_connectors(self, name: str, state: JsonState) -> None:
        if name not in self._pipelines:
            raise StateError(
                f"the state has connectors {excerpt(name)}: known are {', '.join(self._pipelines)}"
            )
        self._pipelines[name].load_state_dict(state)

    # ---- filters ----

    @property
    def _filters(self) -> list[MeanStdFilter]:
        return [each for each in self._observer.pipeline.connectors if isinstance(each, MeanStdFilter)]

    def get_filters(self, *, flush_after: bool = False) -> dict[str, list[MeanStdFilter]]:
        """Copies of the `MeanStdFilter`s among the observation connectors, by policy id.

        Args:
            flush_after: Reset their buffers: what came in until now is in the copies, and is counted once.
        """
        copies = [each.copy() for each in self._filters]
        if flush_after:
            for each in self._filters:
                each.reset_buffer()
        return {DEFAULT_POLICY_ID: copies}

    def sync_filters(self, filters: Mapping[str, Sequence[MeanStdFilter]]) -> None:
        """Make the filters equal to ``filters``, as `get_filters` gave them, here or elsewhere.

        Raises:
            StateError: There are more or fewer of them.
        """
        theirs = filters.get(DEFAULT_POLICY_ID, ())
        if len(theirs) != len(self._filters):
            raise StateError(f"{len(theirs)} filters for the {len(self._filters)} that are here")
        for mine, other in zip(self._filters, theirs, strict=True):
            mine.sync(other)


def _seeds(seed: int | None, worker_index: int) -> dict[str, int]:
    """What everything random of a runner is seeded with."""
    entropy = np.random.SeedSequence(seed).entropy
    assert isinstance(entropy, int)
    if seed is None:
        logger.info("EnvRunner: seed %s, drawn from the OS", entropy)
    _, policy = np.random.SeedSequence(entropy, spawn_key=(worker_index,)).spawn(2)
    return {"seed": entropy, "worker_index": worker_index, "policy": _number(policy)}


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1)[0])


def _until_last(ended: NDArray[np.bool_], valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of the ``valid`` rows, (steps, N), those up to each environment's last ``ended``."""
    return valid & np.logical_or.accumulate(ended[::-1], axis=0)[::-1]
