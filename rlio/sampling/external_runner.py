"""`ExternalRunner`: samples an `ExternalEnv`. It answers the environment's loops and returns their rows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.batch.episode import Episode
from rlio.envs.external import ExternalEnv, ExternalMultiAgentEnv
from rlio.errors import ClosedError, EndOfData, EnvError, OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.reader import JsonState, Unit
from rlio.sampling.actor import Actor
from rlio.sampling.callbacks import CallbacksLike
from rlio.sampling.config import RolloutConfig
from rlio.sampling.external_episodes import ExternalEpisodes
from rlio.sampling.progress import Progress
from rlio.sampling.runner import Runner
from rlio.sampling.runner_seeds import RunnerSeeds
from rlio.sampling.trajectories import with_sequences, without_states
from rlio.support.forks import Owner
from rlio.support.turns import awaited

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["LOOK_SECONDS", "OF_WORKERS", "USED", "ExternalRunner", "LoopThread", "check_loops_go_on"]

logger: logging.Logger = logging.getLogger("rlio")

# How long to wait for the loop's thread when the runner stops: it may be inside a simulator's call.
_STOP_SECONDS = 5.0
# The config fields used here, and those that a worker may use.
USED = frozenset(
    {"rollout_fragment_length", "train_batch_size", "batch_mode", "explore", "record_infos", "count_steps_by"}
)
OF_WORKERS = frozenset(
    {
        "compress_observations",
        "fake_sampler",
        "input_evaluation",
        "input_evaluation_gamma",
        "postprocess_inputs",
        "sample_async",
        "shuffle_buffer_size",
    }
)
# How often to check whether the loop ended.
LOOK_SECONDS = 0.2


def check_loops_go_on(*, at_random: bool, force_reset: bool) -> None:
    """Refuse what needs environments that a runner steps.

    Raises:
        OptionError: One of the flags is set.
    """
    if at_random or force_reset:
        raise OptionError(
            "random_actions and force_reset require environments that a runner steps. External loops go on "
            "by themselves; they can act at random with log_action()"
        )


class ExternalRunner(Runner[Episode]):
    """Runs ``env`` in its own thread, chooses its actions while it samples, and collects rows.

    Between two calls of `run`, loops that request an action wait. Rows are those of
    `rlio.sampling.external_episodes.ExternalEpisodes`, postprocessed by the policy.

    Several threads may call it: their calls take turns. `stop` and `interrupt` do not wait for their turn.

    Args:
        env: The environment; the runner starts its `ExternalEnv.run`.
        policy: Policy that acts; the runner binds it to the environment's spaces if it is not bound yet.
        config: Uses only ``rollout_fragment_length`` (rows of all episodes together), ``train_batch_size``,
            ``batch_mode``, ``count_steps_by``, ``explore`` and ``record_infos``; others are refused.
        callbacks: See `rlio.sampling.callbacks`.
        seed: Seed of the policy, if it is not bound yet, and of the episode ids.
        worker_index: Gives workers with the same ``seed`` different seeds and ids.
        timeout: Seconds that a loop waits for an action before it gets an `EnvError`; None waits without
            limit.

    Raises:
        OptionError: ``env`` is not an `ExternalEnv`, or the policy cannot act in its spaces.
    """

    def __init__(
        self,
        env: ExternalEnv,
        policy: Policy,
        *,
        config: RolloutConfig | None = None,
        callbacks: CallbacksLike = None,
        seed: int | None = None,
        worker_index: int = 0,
        timeout: float | None = None,
    ) -> None:
        if isinstance(env, ExternalMultiAgentEnv):
            raise OptionError(
                f"env={excerpt(env)} has several agents: pass it to a RolloutWorker with its policies, or to "
                "rlio.sampling.ExternalAgentsRunner(env, policies, policy_mapping_fn)"
            )
        if not isinstance(env, ExternalEnv):
            raise OptionError(
                f"env={excerpt(env)}: expected an ExternalEnv; use EnvRunner for other environments"
            )
        super().__init__(config=config, callbacks=callbacks, seed=seed, worker_index=worker_index)
        self.env: ExternalEnv = env
        self.policy: Policy = policy
        self.config: RolloutConfig = self.config.resolved()
        self.config.refuse_others("the sampler of an ExternalEnv", USED | OF_WORKERS)
        policy.bind(env.observation_space, env.action_space, self._seeds.policy)
        self.episodes: ExternalEpisodes = ExternalEpisodes(
            policy,
            explore=self.config.explore,
            infos=self.config.record_infos,
            timeout=timeout,
            callbacks=self.callbacks,
            metrics=self.metrics,
            seed=self._seeds.episode_ids(),
            worker_index=worker_index,
        )
        self._progress = self.episodes.progress
        # Postprocessing may write to an episode that is shown, so it comes before the episode's end.
        self._early = "on_postprocess_trajectory" in self._hooks or (
            bool(self._hooks) and policy.postprocesses
        )
        if self._early:
            self.episodes.postprocess = self._postprocessed_episode
        self._whole = self.config.batch_mode == "complete_episodes"
        env.attach(self.episodes)
        self._thread = LoopThread(env, self.episodes.changed, is_closed=lambda: self._closed)

    # ---- environment and spaces ----

    @property
    def env_id(self) -> str | None:
        """None, because an external environment is not in a registry."""
        return None

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Space of one observation."""
        return self.env.observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Space of one action."""
        return self.env.action_space

    @property
    def unit(self) -> Unit:
        """The unit by which batches can be cut: sequences, if the policy is recurrent."""
        return "sequences" if self.policy.is_recurrent else "steps"

    @property
    def _actors(self) -> Mapping[str, Actor]:
        return {DEFAULT_POLICY_ID: self.episodes.actor}

    @property
    def _rows_waiting(self) -> int:
        return self.episodes.rows_waiting

    def run(self, steps: int | None = None) -> SampleBatch:
        """Answer loops until there are enough rows for a batch.

        Args:
            steps: Overrides the config's ``rollout_fragment_length``.

        Returns:
            All available rows, at least ``steps``; in complete mode only those of whole episodes. Fewer at
            the end of the loop.

        Raises:
            EndOfData: The loop ended, and no rows are left.
            EnvError: The loop raised an error, which is the cause. Later calls return the rows before the
                error, and then raise it again.
            ClosedError: The runner is stopped.
        """
        with self._turns.lock:
            return with_sequences(self._sampled(steps), max_seq_len=self.policy.max_seq_len)

    def _sampled(self, steps: int | None) -> SampleBatch:
        wanted = self._begin_call(steps)
        self.serve_until(lambda: self.rows_ready >= wanted)
        return self.hand_out()

    @property
    def rows_ready(self) -> int:
        """Number of rows that `hand_out` would return."""
        return self.episodes.rows_ready(whole=self._whole)

    def _explore(self, explore: bool) -> None:
        self.episodes.explore = explore

    def _sampled_chunks(
        self, steps: int | None, episodes: int | None, *, at_random: bool, force_reset: bool
    ) -> list[Episode]:
        check_loops_go_on(at_random=at_random, force_reset=force_reset)
        if episodes is None:
            batch = self._sampled(steps)
        else:
            self._begin_call(None)
            self.serve_until(lambda: self.episodes.episodes_ready >= episodes)
            batch = self._taken(whole=True)
        return [Episode.from_batch(rows) for rows in without_states(batch).split_by_episode()]

    def serve_until(self, enough: Callable[[], bool]) -> None:
        """Answer loops until ``enough`` is true or the loop ended, for callers that hand out the rows.

        Raises:
            EndOfData: As for `run`, like EnvError and ClosedError.
        """
        self._thread.owner.check(type(self).__name__)
        # Hold the lock between the check and the wait, because a change in between would not wake the wait.
        with self.episodes.changed:
            while not enough():
                self._check_open()
                if not self._thread.goes_on(self.rows_ready):
                    return
                self.episodes.serve(LOOK_SECONDS)

    def abandon_silent(self, seconds: float) -> list[str]:
        """Give up episodes whose loops are gone; see `ExternalEpisodes.abandon_silent`.

        In complete mode, their rows are dropped.
        """
        return self.episodes.abandon_silent(seconds, keep_rows=not self._whole)

    def hand_out(self) -> SampleBatch:
        """Return the ready rows, postprocessed, with a recurrent policy's state before each row."""
        return self._taken(whole=self._whole)

    def _taken(self, *, whole: bool) -> SampleBatch:
        batch = self.episodes.take(whole=whole)
        if not self._early:
            return self.postprocessed(batch)
        self.metrics.sampled(len(batch), weights_seq_no=self.policy.weights_seq_no)
        return batch

    def postprocessed(self, batch: SampleBatch) -> SampleBatch:
        """Count rows in which this runner's policy acted elsewhere, and postprocess them."""
        self.metrics.sampled(len(batch), weights_seq_no=self.policy.weights_seq_no)
        if not len(batch) or not self._early:
            return self.policy.postprocess_batch(batch)
        return concat_samples([self._postprocessed_episode(rows, None) for rows in batch.split_by_episode()])

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Observation and action space, the same for ``"__env__"`` and for the policy."""
        spaces = self.observation_space, self.action_space
        return {"__env__": spaces, DEFAULT_POLICY_ID: spaces}

    def assert_healthy(self) -> None:
        """Raise if the runner cannot sample.

        Raises:
            ClosedError: The runner is stopped.
            EnvError: The loop raised an error.
        """
        self._check_open()
        self._thread.assert_healthy()

    # ---- state and end ----

    def _between_calls(self) -> AbstractContextManager[object]:
        # A `run` that waits for the loops releases this lock.
        return self.episodes.changed

    def _start_over(self, seeds: RunnerSeeds, progress: Progress, state: JsonState) -> None:
        # Running loops continue; their episodes and the waiting rows get new ids.
        self.episodes.go_on_from(progress, seeds.episode_ids())

    def interrupt(self) -> None:
        """Wake the loops and a `run` that waits in another thread, all with a ClosedError."""
        if not self._thread.owner.is_here:
            return
        self._closed = True
        self.episodes.close()

    def stop(self) -> None:
        """Wake the loops with a ClosedError, and wait some seconds for the environment's thread.

        May be called again.
        """
        if self._thread.owner.is_here:
            self._close()

    def _close(self) -> None:
        self.interrupt()
        self._thread.join()


class LoopThread:
    """The thread of an environment that drives the loop, and how its loop ended.

    Args:
        env: The environment; its `ExternalEnv.run` begins at once.
        changed: Notified when the loop ends.
        is_closed: Whether the runner is stopped.

    Attributes:
        owner: The process that owns the thread.
    """

    def __init__(
        self, env: ExternalEnv, changed: threading.Condition, *, is_closed: Callable[[], bool]
    ) -> None:
        self.owner: Owner = Owner()
        self._env, self._changed, self._is_closed = env, changed, is_closed
        #: The error that ended the loop, and whether it was raised.
        self._error: BaseException | None = None
        self._error_told = False
        # A daemon thread: a loop that hangs must not keep the interpreter alive.
        self._thread = threading.Thread(target=self._play, name="rlio-external-env", daemon=True)
        self._thread.start()

    def _play(self) -> None:
        try:
            with awaited():
                self._env.run()
        except BaseException as error:  # Sampling raises any error again.
            if isinstance(error, ClosedError) and self._is_closed():  # The loop noticed the stop.
                logger.debug("the loop of %s ended with its runner", type(self._env).__name__)
            else:
                self._error = error
        with self._changed:
            self._changed.notify_all()

    def goes_on(self, rows: int) -> bool:
        """Whether the loop still runs; False if it ended and ``rows`` are left to hand out.

        Raises:
            EnvError: The loop raised an error: the first time, and when no rows are left.
            EndOfData: The loop ended, and no rows are left.
        """
        if self._error is not None and not (self._error_told and rows):
            self._error_told = True
            self.assert_healthy()
        if self._error is None and self._thread.is_alive():
            return True
        if not rows:
            raise EndOfData(f"{type(self._env).__name__}.run() ended, and all its rows were handed out")
        return False

    def assert_healthy(self) -> None:
        """Raise an EnvError if the loop raised an error."""
        error = self._error
        if error is not None:
            raise EnvError(
                f"{type(self._env).__name__}.run() raised {type(error).__name__}: {excerpt(str(error), 500)}"
            ) from error

    def join(self) -> None:
        """Wait some seconds for the thread."""
        if self._thread is threading.current_thread():
            return
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "%s.run() is still running %.0f s after its runner stopped: it requests no actions",
                type(self._env).__name__,
                _STOP_SECONDS,
            )
