"""`ExternalRunner`: samples an `ExternalEnv`: answers its loops, and gives their rows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from rlio.batch import SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.batch.episode import Episode
from rlio.envs.external import ExternalEnv
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

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["ExternalRunner"]

logger = logging.getLogger("rlio")

# How long the loop's thread is waited for when the runner stops: it may be in a simulator's call.
_STOP_SECONDS = 5.0
# What is used of a config here, and what a worker may use of it.
_USED = frozenset(
    {"rollout_fragment_length", "train_batch_size", "batch_mode", "explore", "record_infos", "count_steps_by"}
)
_OF_WORKERS = frozenset(
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
# How often it is looked whether the loop has ended meanwhile.
_LOOK_SECONDS = 0.2


class ExternalRunner(Runner[Episode]):
    """Lets ``env`` play in a thread of its own, chooses its actions while it samples, and collects rows.

    Between two calls of `run` the loops that ask for an action wait. Rows are those of
    `rlio.sampling.external_episodes.ExternalEpisodes`, postprocessed by the policy.

    Args:
        env: The environment, whose `ExternalEnv.run` is started here.
        policy: Acts; bound to the environment's spaces here, if it was not before.
        config: Of it, ``rollout_fragment_length`` (rows of all episodes together), ``batch_mode``,
            ``explore`` and ``record_infos`` count.
        callbacks: See `rlio.sampling.callbacks`.
        seed: Of the policy, if it is not bound yet, and of the episode ids.
        worker_index: Makes those of workers with the same ``seed`` different.
        timeout: Seconds that a loop waits for an action before it gets an `EnvError`; None: for ever.

    Raises:
        OptionError: ``env`` is none, or the policy cannot act in its spaces.
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
        if not isinstance(env, ExternalEnv):
            raise OptionError(f"env={excerpt(env)}: expected an ExternalEnv; others are EnvRunner's")
        super().__init__(config=config, callbacks=callbacks, seed=seed, worker_index=worker_index)
        self.env, self.policy = env, policy
        self.config = self.config.resolved()
        self.config.refuse_others("the sampler of an ExternalEnv", _USED | _OF_WORKERS)
        policy.bind(env.observation_space, env.action_space, self._seeds.policy)
        self.episodes = ExternalEpisodes(
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
        self._whole = self.config.batch_mode == "complete_episodes"
        #: What ended the loop, and whether that was raised.
        self._error: BaseException | None = None
        self._error_told = False
        env.attach(self.episodes)
        #: Whose the loop's thread is.
        self._owner = Owner()
        # A daemon: a loop that hangs must not keep the interpreter.
        self._thread = threading.Thread(target=self._play, name="rlio-external-env", daemon=True)
        self._thread.start()

    def _play(self) -> None:
        try:
            self.env.run()
        except BaseException as error:  # Whatever it is: it is raised where experience is sampled.
            if isinstance(error, ClosedError) and self._closed:  # Which the loop has noticed.
                logger.debug("the loop of %s has ended with its runner", type(self.env).__name__)
            else:
                self._error = error
        with self.episodes.changed:
            self.episodes.changed.notify_all()

    # ---- what it samples ----

    @property
    def env_id(self) -> str | None:
        """None: an external environment is in no registry."""
        return None

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Of one observation."""
        return self.env.observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Of one action."""
        return self.env.action_space

    @property
    def unit(self) -> Unit:
        """What its batches can be cut by: sequences, if the policy is recurrent."""
        return "sequences" if self.policy.is_recurrent else "steps"

    @property
    def _actors(self) -> Mapping[str, Actor]:
        return {DEFAULT_POLICY_ID: self.episodes.actor}

    @property
    def _rows_waiting(self) -> int:
        return self.episodes.rows_waiting

    def run(self, steps: int | None = None) -> SampleBatch:
        """Answer loops until there are rows for a batch.

        Args:
            steps: In place of the config's ``rollout_fragment_length``.

        Returns:
            At least ``steps`` rows, all that there are; in complete mode those of whole episodes only. Fewer
            at the end of the loop.

        Raises:
            EndOfData: The loop has ended, and there are no more rows.
            EnvError: It has raised an error, which is the cause; the rows before it come with the next calls,
                and then this error again.
            ClosedError: After `stop`.
        """
        return with_sequences(self._sampled(steps), max_seq_len=self.policy.max_seq_len)

    def _sampled(self, steps: int | None) -> SampleBatch:
        wanted = self._begin_call(steps)
        self.serve_until(lambda: self.rows_ready >= wanted)
        return self.hand_out()

    @property
    def rows_ready(self) -> int:
        """Rows that `hand_out` would give."""
        return self.episodes.rows_ready(whole=self._whole)

    def _explore(self, explore: bool) -> None:
        self.episodes.explore = explore

    def _sampled_chunks(
        self, steps: int | None, episodes: int | None, *, at_random: bool, force_reset: bool
    ) -> list[Episode]:
        if at_random or force_reset:
            raise OptionError(
                "random_actions and force_reset are for environments that a runner steps: the loops of an "
                "ExternalEnv go on, and can act at random themselves with log_action()"
            )
        if episodes is None:
            batch = self._sampled(steps)
        else:
            self._begin_call(None)
            self.serve_until(lambda: self.episodes.episodes_ready >= episodes)
            batch = self.postprocessed(self.episodes.take(whole=True))
        return [Episode.from_batch(rows) for rows in without_states(batch).split_by_episode()]

    def serve_until(self, enough: Callable[[], bool]) -> None:
        """Answer loops until there is ``enough``, or no more to come; for who hands out the rows itself.

        Raises:
            EndOfData: As `run`, like EnvError and ClosedError.
        """
        self._owner.check(type(self).__name__)
        # What happens between looking and waiting would wake nobody: the lock is held meanwhile.
        with self.episodes.changed:
            while not enough():
                self._check_open()
                if self._error is not None and not self._error_told:
                    self._error_told = True
                    self._raise(self._error)
                if self._error is None and self._thread.is_alive():
                    self.episodes.serve(_LOOK_SECONDS)
                elif self.rows_ready:
                    return
                elif self._error is not None:
                    self._raise(self._error)
                else:
                    raise EndOfData(f"{type(self.env).__name__}.run() has ended, and its rows were given")

    def _raise(self, error: BaseException) -> NoReturn:
        raise EnvError(
            f"{type(self.env).__name__}.run() raised {type(error).__name__}: {excerpt(str(error), 500)}"
        ) from error

    def abandon_silent(self, seconds: float) -> list[str]:
        """Give up episodes of loops that are gone; see `ExternalEpisodes.abandon_silent`.

        In complete mode none of their rows are kept.
        """
        return self.episodes.abandon_silent(seconds, keep_rows=not self._whole)

    def hand_out(self) -> SampleBatch:
        """The rows that are ready, postprocessed, with a recurrent policy's state before each of them."""
        return self.postprocessed(self.episodes.take(whole=self._whole))

    def postprocessed(self, batch: SampleBatch) -> SampleBatch:
        """Count rows of episodes that this runner's policy acted in, and let it postprocess them."""
        self.metrics.sampled(len(batch), weights_seq_no=self.policy.weights_seq_no)
        return self._postprocessed(batch) if len(batch) else batch

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """Observation and action space, under ``"__env__"`` and of the policy: they are the same."""
        spaces = self.observation_space, self.action_space
        return {"__env__": spaces, DEFAULT_POLICY_ID: spaces}

    def assert_healthy(self) -> None:
        """Check that there is something to sample.

        Raises:
            ClosedError: After `stop`.
            EnvError: The loop has raised an error.
        """
        self._check_open()
        if self._error is not None:
            self._raise(self._error)

    # ---- state and end ----

    def state_dict(self) -> JsonState:
        """Return seeds and counters as JSON; see `Runner.state_dict`."""
        with self.episodes.changed:
            return super().state_dict()

    def _begin_anew(self, seeds: RunnerSeeds, progress: Progress, state: JsonState) -> None:
        # Loops that run go on; their episodes, and the rows that wait, get new ids.
        self.episodes.go_on_from(progress, seeds.episode_ids())

    def interrupt(self) -> None:
        """Let the loops go, and a `run` that waits in another thread, all with a ClosedError."""
        if not self._owner.is_here:
            return
        self._closed = True
        self.episodes.close()

    def stop(self) -> None:
        """Let the loops go, which get a ClosedError, and wait some seconds for the environment's thread.

        May be called again.
        """
        if self._owner.is_here:
            self._close()

    def _close(self) -> None:
        self.interrupt()
        if self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)
            if self._thread.is_alive():
                logger.warning(
                    "%s.run() goes on %.0f s after its runner was stopped: it asks for no actions",
                    type(self.env).__name__,
                    _STOP_SECONDS,
                )
