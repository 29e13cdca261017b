"""`VectorLoop`: a policy acts in N environments step by step, and a recorder keeps the results.

Example:
    >>> from rlio.sampling.make_env import make_stepper
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> stepper = make_stepper("CartPole-v1", RolloutConfig(num_envs=2))
    >>> config = RolloutConfig(num_envs=2, rollout_fragment_length=5)
    >>> counters = {"callbacks": Callbacks(), "metrics": MetricsCollector(), "progress": Progress()}
    >>> loop = VectorLoop(stepper, RandomPolicy(), config=config, seeds=RunnerSeeds(0), **counters)
    >>> loop.begin()
    >>> ended = loop.step()
    >>> loop.recorder.rows, loop.episodes.t.tolist(), ended.tolist()
    (2, [1, 1], [False, False])
    >>> stepper.close()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.connectors.clip import clip_rewards
from rlio.connectors.connector import Streams
from rlio.envs.games import Game, finished_games, tells_games
from rlio.envs.vector import Stepper, VectorStep
from rlio.policies.policy import Policy
from rlio.sampling.actor import Acted, Actor
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.config import RolloutConfig
from rlio.sampling.episodes import Episodes
from rlio.sampling.metrics import MetricsCollector, PerfCounters
from rlio.sampling.observer import Observer
from rlio.sampling.progress import Progress
from rlio.sampling.recorder import StepRecorder
from rlio.sampling.runner_seeds import RunnerSeeds

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["VectorLoop"]


class VectorLoop:
    """Steps environments with a policy, and records each step. Call `begin` first.

    Binds the policy to the spaces between the connectors, if it is not bound yet.

    Args:
        stepper: The environments.
        policy: Policy that acts.
        config: How to step and record; its ``rollout_fragment_length`` must be a number.
        seeds: Seeds of environments, episode ids and policy.
        callbacks: Called on episode events.
        metrics: Counts episodes and times.
        progress: Counts rows.
        runner: Passed to callbacks as ``runner``.
        worker_index: Passed to callbacks as ``worker_index``.

    Attributes:
        recorder: Holds the recorded rows that were not handed out.
        episodes: The running episodes.
        actor: The policy with its connectors.
        explore: Whether the policy explores.
        is_ready: Whether `step` can be called: False before `begin`, and after a step that failed halfway.
        at_random: Whether actions are random instead of the policy's. Change it only if no rows wait, because
            the extra columns change. A policy with memory also needs new episodes.
        postprocess: Called with an environment whose episode is about to end (True) or to be cut (False),
            before ``on_episode_end``; None calls nothing.

    Raises:
        OptionError: The policy cannot act in these spaces, or a connector does not fit them.
    """

    def __init__(
        self,
        stepper: Stepper,
        policy: Policy,
        *,
        config: RolloutConfig,
        seeds: RunnerSeeds,
        callbacks: Callbacks,
        metrics: MetricsCollector,
        progress: Progress,
        runner: Any = None,
        worker_index: int = 0,
    ) -> None:
        self.policy = policy
        self.postprocess: Callable[[int, bool], None] | None = None
        self.explore: bool = config.explore
        self.is_ready: bool = False
        self.at_random: bool = False
        self._config, self._seeds = config, seeds
        self._metrics, self._progress = metrics, progress
        #: Whether environments and ids are seeded.
        self._is_seeded = False
        self.actor: Actor = Actor(
            policy,
            stepper.observation_space,
            stepper.action_space,
            config=config,
            seed=seeds.policy,
            random_seed=lambda: self._seeds.random_actions,
        )
        observations, actions = self.actor.observations, self.actor.actions
        self._observer = Observer(observations, stepper.observation_space, num_envs=stepper.num_envs)
        # Read once, because reading at each step takes as long as a few of these answers.
        self._changes_obs, self._changes_actions = len(observations) > 0, len(actions) > 0
        self._slots, self._zeros = np.arange(stepper.num_envs), np.zeros(stepper.num_envs, np.int64)
        self._never = np.zeros(stepper.num_envs, bool)
        #: Environments that still work on an action of `_last`; None if none does.
        self._in_flight: NDArray[np.bool_] | None = None
        self._last: Acted | None = None
        self._tells_policy = policy.has_episode_hooks
        self.recorder: StepRecorder = _recorder(stepper, config, observations.space, actions.space)
        # Only the first of several workers renders.
        self._renders = config.render_env and worker_index <= 1
        self.episodes: Episodes = Episodes(
            stepper.num_envs,
            space=stepper.observation_space,
            callbacks=callbacks,
            metrics=metrics,
            runner=runner,
            worker_index=worker_index,
            keeps_media=self._renders,
        )
        self.use(stepper)

    # ---- before the steps ----

    def use(self, stepper: Stepper) -> None:
        """Replace the environments by others with the same spaces; call `begin` next."""
        self.stepper = stepper
        stepper.keeps_infos = self._config.record_infos
        stepper.keeps_reset_infos = self.episodes.looks_at_starts
        self._is_seeded = self.is_ready = False

    def use_seeds(self, seeds: RunnerSeeds) -> None:
        """Reseed environments and ids; call `begin` next."""
        self._seeds = seeds
        self._is_seeded = self.is_ready = False

    def begin(self) -> None:
        """Start new episodes in all environments, the first time from the seed."""
        self.forget()
        episodes = self.episodes
        if not self._is_seeded:
            episodes.draw_from(self._seeds.episode_ids())
        episodes.begin()
        seeds = None if self._is_seeded else self._seeds.of_episodes(num_envs=self.stepper.num_envs)
        self._is_seeded = True
        obs = self.stepper.reset(seeds=seeds)
        self._env_seeds = self.stepper.env_seeds
        self.recorder.start(self._observer.begin(obs) if self._changes_obs else obs)
        self._in_flight = None
        episodes.started(obs, self.stepper.reset_infos)
        if self._tells_policy:
            self.policy.on_episode_start(self._slots)
        self.is_ready = True

    def forget(self) -> None:
        """Abandon the running episodes and the rows that were not taken; call `begin` next."""
        self._progress.dropped += self.recorder.rows
        self._metrics.rows_dropped(self.recorder.rows)
        self.recorder.clear()
        self.is_ready = False

    # ---- a step ----

    def step(self, wanted: int | None = None) -> NDArray[np.bool_]:
        """Step every environment once, record the step, and return which episodes ended, (N,).

        Args:
            wanted: Number of recorded rows with which the fragment is complete, which cuts running episodes.
        """
        self.is_ready = False
        episodes, perf = self.episodes, self._metrics.perf
        perf.begin()
        if self._renders:
            self._render()
            perf.lap(PerfCounters.ENV_RENDER)
        streams = Streams(self._slots, episodes.t == 0)
        acted = self._act(streams)
        perf.lap(PerfCounters.INFERENCE)
        sent = acted.actions
        if self._changes_actions:
            # A copy, because the row keeps what the policy chose.
            sent = self.actor.actions(own_copy(sent), streams)
            perf.lap(PerfCounters.ACTION_PROCESSING)
        step = self.stepper.step(sent)
        perf.lap(PerfCounters.ENV_WAIT)
        ended = self._record(step, acted, sent, wanted)
        perf.lap(PerfCounters.OBS_PROCESSING)
        perf.end_step()
        self.is_ready = True
        return ended

    def _act(self, streams: Streams) -> Acted:
        """Compute actions for all environments; those in flight keep their action."""
        episodes, slots = self.episodes, self._slots
        known = {
            Columns.T: episodes.t,
            Columns.EPS_ID: episodes.eps_id,
            Columns.ENV_ID: slots,
            Columns.AGENT_INDEX: self._zeros,
        }
        acted = self.actor.act(
            self.policy,
            self.recorder.obs,
            streams,
            known,
            explore=self.explore,
            timestep=self._progress.timesteps,
            at_random=self.at_random,
        )
        if self._in_flight is not None and self._last is not None:
            acted = self._last.where(self._in_flight, acted)
        self.actor.keep(slots, acted)
        self._last = acted
        return acted

    def _render(self) -> None:
        """Keep the frames before the step: frame t shows the observation of step t."""
        frames = self.stepper.render()
        for episode, t, frame in zip(self.episodes.running, self.episodes.t.tolist(), frames, strict=True):
            shown = episode.media.setdefault("frames", [])
            if len(shown) <= t:  # An environment in flight repeats its frame.
                shown.append(own_copy(frame))

    def _record(self, step: VectorStep, acted: Acted, sent: Any, wanted: int | None) -> NDArray[np.bool_]:
        """Record ``step``, and return which of its rows are the last of an episode."""
        config, episodes = self._config, self.episodes
        ended: NDArray[np.bool_] = step.terminateds | step.truncateds
        if step.valid is not None:
            ended = ended & step.valid
        if config.soft_horizon:
            step, ended = self._cut_softly(step, ended)
        if config.no_done_at_end:
            step = step._replace(terminateds=self._never, truncateds=self._never)
        shown, rewards = step, step.rewards
        if self._changes_obs:
            shown = self._observer.step(step, ended, self.recorder.obs)
        if config.clip_rewards:
            rewards = clip_rewards(rewards, config.clip_rewards)
            shown = shown._replace(rewards=rewards)
        infos = self._infos(step, ended)
        self.recorder.add(
            shown,
            actions=acted.actions,
            extras=acted.extras,
            scalars=self._scalars(step, acted),
            infos=infos,
            ends=ended,
        )
        self._progress.timesteps += episodes.count(step.rewards, step.valid)
        self._advance(step, rewards)
        over = ended.nonzero()[0].tolist()
        games = self._games(step, over, infos) if over else None
        if episodes.are_shown or step.faulty is not None:
            # The rows of a failed environment go, and others make up for them.
            cuts = wanted is not None and step.faulty is None and self.recorder.rows >= wanted
            self._go_on(step, ended, games, sent=sent, infos=infos, cuts=cuts)
        elif over:
            episodes.end(over, games)
        if self._tells_policy:
            self._tell_policy(step, ended)
        return ended

    def _go_on(
        self,
        step: VectorStep,
        ended: NDArray[np.bool_],
        games: Mapping[int, Game | None] | None,
        *,
        sent: Any,
        infos: list[dict[str, Any]] | None,
        cuts: bool,
    ) -> None:
        """Show the step, end episodes and begin new ones, environment by environment, as RLlib does.

        Args:
            step: The step, before connectors.
            ended: Mask of the rows that end an episode, (N,).
            games: See `_games`.
            sent: The actions that the environments got.
            infos: Infos of the rows; None if no callback needs them.
            cuts: Whether the fragment is complete.
        """
        episodes, shown, finals = self.episodes, self.episodes.are_shown, dict(step.finals)
        faulty = self._never if step.faulty is None else step.faulty
        rows = ~self._never if step.valid is None else step.valid
        postprocess = self.postprocess
        told = ended | faulty
        if shown:
            told = told | step.starts | (rows if episodes.looks_at_steps else self._never)
        if cuts and postprocess is not None:
            told = ~self._never
        for env in told.nonzero()[0].tolist():
            follows = shown and rows[env] and bool(ended[env] or episodes.looks_at_steps)
            if follows:
                episodes.follow(env, step, final=finals.get(env), sent=sent, infos=infos)
            if postprocess is not None and (ended[env] or (cuts and not step.starts[env])):
                postprocess(env, bool(ended[env]))
            if ended[env]:
                episodes.end([env], games)
            elif follows:
                episodes.forget_values(env)
            if faulty[env]:
                self._discard(env, step.errors)
            if shown:
                episodes.renew(env, step.obs if step.starts[env] else None, self.stepper.reset_infos)

    def _advance(self, step: VectorStep, rewards: NDArray[Any]) -> None:
        """Store the outcome of the last actions; ``rewards`` are the recorded ones."""
        if step.valid is None:
            self._in_flight = None
            self.actor.reward(self._slots, rewards)
            return
        moved = step.valid | step.starts
        self._in_flight = None if moved.all() else ~moved
        if self._in_flight is not None and self._last is not None:
            self._last = own_copy(self._last)  # The policy may reuse its arrays.
        if self.actor.remembers_steps:
            self.actor.reward(self._slots[step.valid], rewards[step.valid])

    def _scalars(self, step: VectorStep, acted: Acted) -> dict[str, Any]:
        episodes = self.episodes
        scalars = {
            Columns.EPS_ID: episodes.eps_id,
            Columns.T: episodes.t,
            Columns.WEIGHTS_SEQ_NO: acted.weights_seq_no,
        }
        if self._config.record_env_seeds:
            scalars[Columns.ENV_SEED] = self._env_seeds
            if step.starts.any():
                self._env_seeds = self.stepper.env_seeds
        return scalars

    def _infos(self, step: VectorStep, ended: NDArray[np.bool_]) -> list[dict[str, Any]] | None:
        """The infos of a step, if they are recorded or a callback needs them."""
        wanted = self._config.record_infos or self.episodes.looks_at(ended)
        return self.stepper.env_infos(step) if wanted else None

    def _games(
        self, step: VectorStep, envs: list[int], infos: list[dict[str, Any]] | None
    ) -> Mapping[int, Game | None] | None:
        """The games to count instead of the episodes that ended in ``envs``, if infos report games."""
        if infos is None:
            if not tells_games(step.infos):
                return None
            infos = self.stepper.env_infos(step)
        return finished_games(infos, envs)

    def _cut_softly(self, step: VectorStep, ended: NDArray[np.bool_]) -> tuple[VectorStep, NDArray[np.bool_]]:
        """Begin new episodes at the soft horizon, while the environments continue."""
        assert self._config.horizon is not None
        cut = (self.episodes.t + 1 >= self._config.horizon) & ~ended
        if step.valid is not None:
            cut &= step.valid
        if not cut.any():
            return step, ended
        shown = self._observer.rows_of(step.obs, np.flatnonzero(cut))
        if self.stepper.keeps_reset_infos:
            # Infos of their first observations, because there was no reset.
            infos = self.stepper.env_infos(step)
            for env in np.flatnonzero(cut).tolist():
                self.stepper.reset_infos[env] = infos[env]
        step = step._replace(starts=step.starts | cut, finals=[*step.finals, *shown])
        return step, ended | cut

    def _discard(self, env: int, errors: Mapping[int, Exception]) -> None:
        """Discard the episode of a failed environment."""
        rows = self.recorder.discard(env, self.episodes.eps_id.item(env))
        self._progress.dropped += rows
        self.episodes.fail([env], errors, rows=rows)

    def _tell_policy(self, step: VectorStep, ended: NDArray[np.bool_]) -> None:
        over = ended if step.faulty is None else ended | step.faulty
        for which, tell in (
            (over, self.policy.on_episode_end),
            (step.starts, self.policy.on_episode_start),
        ):
            if which.any():
                tell(np.flatnonzero(which))


def _recorder(
    stepper: Stepper, config: RolloutConfig, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> StepRecorder:
    steps = config.fragment_steps
    # A transition follows each reset, so at least every other step of an environment is a transition.
    capacity = 2 * steps + 2 if stepper.has_reset_steps else steps
    return StepRecorder(
        observation_space,
        action_space,
        num_envs=stepper.num_envs,
        capacity=capacity,
        infos=config.record_infos,
    )
