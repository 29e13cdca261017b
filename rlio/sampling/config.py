"""`RolloutConfig`: how environments are stepped and recorded. Field names are RLlib's.

Example:
    >>> RolloutConfig(num_envs=8, rollout_fragment_length=50).rows_per_fragment
    400
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from rlio.envs.context import EnvContext
from rlio.errors import OptionError, excerpt
from rlio.support.options import checked_keywords, expected_mapping

if TYPE_CHECKING:
    from rlio.connectors.connector import ConnectorLike

__all__ = ["INPUT_ESTIMATORS", "RolloutConfig", "VectorizeMode"]

VectorizeMode = Literal["sync", "async", "native"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "batch_mode": ("truncate_episodes", "complete_episodes"),
    "vectorize_mode": ("sync", "async", "native"),
    "compress_observations": (False, True, "bulk"),
    "count_steps_by": ("env_steps", "agent_steps"),
}
#: Names of ``input_evaluation`` -> the estimators of `rlio.evaluation` that they stand for. RLlib's own
#: names, the first two, mean RLlib's estimators, which are step-wise.
INPUT_ESTIMATORS: Mapping[str, str] = {
    "is": "pdis",
    "wis": "stepwise_wis",
    "pdis": "pdis",
    "wpdis": "wpdis",
    "trajectory_is": "is",
    "trajectory_wis": "wis",
}
_EVALUATIONS = ("simulation", *INPUT_ESTIMATORS)
_LEAST = (
    ("num_envs", 1),
    ("episode_lookback_horizon", 0),
    ("shuffle_buffer_size", 0),
    ("max_env_restarts", 1),
)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How environments are stepped and recorded.

    Attributes:
        rollout_fragment_length: Steps of each environment in a fragment; with complete episodes, the minimum
            number of rows in a batch. ``"auto"``: chosen to make one fragment of each worker a batch of
            `train_batch_size` rows; see `resolved`.
        train_batch_size: Rows in a batch, for ``rollout_fragment_length="auto"``.
        num_envs: Number of environments stepped together.
        batch_mode: ``"truncate_episodes"``: fragments of exactly num_envs x rollout_fragment_length rows,
            which may begin and end in the middle of episodes. ``"complete_episodes"``: whole episodes, never
            cut, with at least num_envs x rollout_fragment_length rows in total.
        count_steps_by: The unit of a fragment's steps with several agents: ``"env_steps"`` or
            ``"agent_steps"``. With one agent they are the same.
        episode_lookback_horizon: Number of earlier steps in the ``lookback`` of a chunk, where
            `EnvRunner.sample` cuts episodes.
        horizon: Truncate an episode after this many steps if the environment has not ended it; None sets no
            limit.
        soft_horizon: At the `horizon`, begin a new episode without a reset. The environment continues, and no
            row is marked as an end.
        no_done_at_end: Never mark a row as terminated or truncated. Use it for environments whose ends are
            artificial. The next row still has another ``eps_id``.
        vectorize_mode: How to run `num_envs` environments together: in this process one after the other
            (``"sync"``), each in its own process (``"async"``), or by the environment's own vector form
            (``"native"``).
        explore: Whether the policy explores.
        observation_connectors: Applied in order to observations before the policy sees them and before they
            are recorded: `Connector`s and functions of a batch. Each runner has its own copies.
        action_connectors: Applied in order to the policy's actions before the environment gets them, like
            `observation_connectors`. Batches record the policy's actions.
        clip_rewards: Clip the rewards in batches to their signs (True), or to this distance from 0 (a
            number). Metrics keep the original rewards. None applies the environment's own setting, which
            Atari environments have; False never clips.
        sampler_perf_stats_ema_coef: See `PerfCounters`.
        clip_actions: Clip actions sent to an environment, and actions read from files, to its bounds.
        normalize_actions: The policy's actions are in [-1, 1]; scale them to the bounds before they are sent.
        actions_in_input_normalized: Whether actions read from files are already in [-1, 1]. If not,
            `normalize_actions` scales them to it.
        postprocess_inputs: Also apply the policy's ``postprocess_trajectory`` to batches read from files.
        shuffle_buffer_size: Shuffle the input in windows of this many batches; 0 does not shuffle.
        compress_observations: Compress obs and new_obs of the batches that `RolloutWorker.sample` returns,
            row by row (True) or as blocks (``"bulk"``). Writers compress their files independently of this.
        input_evaluation: How to judge the policies of a `RolloutWorker` while they learn from its input; one
            or several of these names. ``"simulation"``: with each batch read, the policies also sample a
            fragment, which counts in the metrics but is in no batch. ``"is"`` and ``"wis"`` (RLlib's
            estimators, step by step), ``"pdis"``, ``"wpdis"``, ``"trajectory_is"`` and ``"trajectory_wis"``:
            importance sampling estimates the policies' returns from the rows read (docs/evaluation.md). These
            need rows in recorded order with the probabilities of their actions. The metrics report them as
            ``off_policy_estimator``, over the episodes completed since the last report.
        input_evaluation_gamma: Discount per step for the estimates, from 0 to 1; they require it.
        sample_async: Run the sampler of a `RolloutWorker` in its own thread, up to 5 batches ahead; see
            `AsyncInput`. The worker's methods and those of rlio's policies never change a policy while it
            acts. If you call your own policy directly, hold its `rlio.Policy.lock`.
        fake_sampler: The sampler of a `RolloutWorker` repeats its first batch, to measure the speed of
            learning.
        record_infos: Whether batches have an ``infos`` column.
        record_env_seeds: Whether batches have a column ``env_seed``, int64: the seed of the reset that began
            the row's episode; -1 if the environment continued with its own generator.
        env_config: Keyword arguments of an environment given by its id. A function that makes environments
            finds them in its `EnvContext`.
        check_env: Check spaces, the first reset and the first step of each environment, and report what is
            wrong and where. Later steps cost nothing.
        validate_env: Called with each new environment and its `EnvContext`, in the environment's process;
            raises to reject the environment.
        restart_failed_sub_environments: Recreate an environment that fails in ``step`` or ``reset``, whose
            process died, or that exceeds `env_step_timeout`; the others continue. The episode is discarded
            and counted. If False, each failure raises an `EnvError`. Vector environments are not restarted.
        max_env_restarts: How often in a row to recreate one environment; see `Restarts`.
        env_step_timeout: Seconds after which a step or reset counts as failed (a reset after 60 at the
            earliest); None sets no limit. Only for ``"async"`` and `remote_worker_envs`, because a call in
            the same process cannot be interrupted.
        remote_worker_envs: Run each of the `num_envs` environments as a Ray actor, on any machine of the
            cluster that this process is connected to (``pip install 'rlio[ray]'``). Replaces
            `vectorize_mode`. The actors reserve no Ray CPUs. Worthwhile when a step takes some milliseconds
            or more.
        remote_env_batch_wait_ms: With ``"async"`` or `remote_worker_envs`: how many milliseconds a step waits
            for other environments after the first is ready; 0 continues with one. None waits for all. Each
            such step reserves memory for all environments until its rows are handed out. With complete
            episodes, the rows of a slow environment keep all steps that it took part in.
        render_env: Render each environment before each step, in worker 0 or 1. The frames go into
            ``RunningEpisode.media["frames"]``, and with the episode into the metrics. Environments given by
            id are made with ``render_mode="rgb_array"``.
        extra_python_environs: Environment variables to set before the environments are made; numbers become
            text.

    Batches hold the policy's actions; only the environment gets clipped and scaled ones.

    Raises:
        OptionError: A value is invalid, or two values contradict each other.
    """

    # RLlib's default: wastes nothing of a 1-step return, and little of an advantage estimate.
    rollout_fragment_length: int | Literal["auto"] = 200
    train_batch_size: int | None = None
    num_envs: int = 1
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"
    # RLlib's default: enough for a previous action and reward.
    episode_lookback_horizon: int = 1
    horizon: int | None = None
    soft_horizon: bool = False
    no_done_at_end: bool = False
    # Processes are worthwhile from about a millisecond a step; most environments take less.
    vectorize_mode: VectorizeMode = "sync"
    explore: bool = True
    observation_connectors: Sequence[ConnectorLike] = ()
    action_connectors: Sequence[ConnectorLike] = ()
    clip_rewards: bool | float | None = None
    sampler_perf_stats_ema_coef: float | None = None
    # By default, actions are never changed. RLlib's policies give actions in [-1, 1] by default; rlio's
    # policies know the environment's own action space.
    clip_actions: bool = False
    normalize_actions: bool = False
    actions_in_input_normalized: bool = False
    postprocess_inputs: bool = False
    shuffle_buffer_size: int = 0
    compress_observations: bool | Literal["bulk"] = False
    input_evaluation: str | Sequence[str] | None = None
    input_evaluation_gamma: float | None = None
    sample_async: bool = False
    fake_sampler: bool = False
    # A dict per row costs more time and memory than all of CartPole's other columns together.
    record_infos: bool = False
    record_env_seeds: bool = False
    env_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    check_env: bool = True
    validate_env: Callable[..., None] | None = None
    restart_failed_sub_environments: bool = False
    # With pauses up to 10 s, this tolerates a server outage of a quarter of an hour.
    max_env_restarts: int = 100
    env_step_timeout: float | None = None
    remote_worker_envs: bool = False
    remote_env_batch_wait_ms: float | None = None
    render_env: bool = False
    extra_python_environs: Mapping[str, str | float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        expected_mapping(self.env_config, "env_config")
        for name, least in _LEAST:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(f"{name}={excerpt(value)}: expected a whole number, at least {least}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                raise OptionError(f"{name}={excerpt(value)}: expected one of {', '.join(map(repr, choices))}")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type == "bool" and not isinstance(value, bool):
                raise OptionError(f"{option.name}={excerpt(value)}: expected True or False")
        if self.remote_worker_envs and self.vectorize_mode != "sync":
            raise OptionError(
                f"remote_worker_envs=True with vectorize_mode={self.vectorize_mode!r}: each environment is "
                "either an actor or vectorised here; leave out one of the two"
            )
        for name in ("env_step_timeout", "remote_env_batch_wait_ms"):
            self._check_seconds(name)
        for name in ("observation_connectors", "action_connectors"):
            self._check_connectors(name)
        self._check_sizes()
        self._check_evaluation()
        clip: Any = self.clip_rewards
        if not isinstance(clip, bool | None) and not (
            isinstance(clip, int | float) and 0 < clip < float("inf")
        ):
            raise OptionError(
                f"clip_rewards={excerpt(clip)}: expected True, False, None, or a number above 0"
            )
        if self.actions_in_input_normalized and not self.normalize_actions:
            raise OptionError(
                "actions_in_input_normalized=True says that actions in files are in [-1, 1], but with "
                "normalize_actions=False the policy's are not: set both, or neither"
            )

    def _check_sizes(self) -> None:
        """Check fragment lengths and horizons, and the options that depend on them."""
        if self.rollout_fragment_length == "auto":
            if self.train_batch_size is None:
                raise OptionError(
                    "rollout_fragment_length='auto' is computed from train_batch_size: pass that too"
                )
        elif self.train_batch_size is not None:
            raise OptionError(
                f"train_batch_size={self.train_batch_size} requires rollout_fragment_length='auto', but it "
                f"is {self.rollout_fragment_length}"
            )
        for name in ("rollout_fragment_length", "train_batch_size", "horizon"):
            value = getattr(self, name)
            if value not in (None, "auto") and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise OptionError(f"{name}={excerpt(value)}: expected a whole number, at least 1")
        if self.soft_horizon and self.horizon is None:
            raise OptionError("soft_horizon=True changes what happens at the horizon: pass horizon too")

    def _check_evaluation(self) -> None:
        given: Any = self.input_evaluation
        names = (given,) if isinstance(given, str) else given
        if names is not None:
            if not isinstance(names, Sequence) or not names or any(n not in _EVALUATIONS for n in names):
                raise OptionError(
                    f"input_evaluation={excerpt(given)}: expected None, or one or several of "
                    f"{', '.join(_EVALUATIONS)}"
                )
            object.__setattr__(self, "input_evaluation", tuple(dict.fromkeys(names)))
        gamma = self.input_evaluation_gamma
        if (gamma is not None) != bool(self.logged_estimators) or not 0.0 <= (gamma or 0.0) <= 1.0:
            raise OptionError(
                f"input_evaluation={excerpt(given)}, input_evaluation_gamma={gamma}: pass a discount from 0 "
                f"to 1 with {', '.join(_EVALUATIONS[1:])}, and with nothing else"
            )

    @property
    def envs_are_elsewhere(self) -> bool:
        """Whether environments live in their own processes or actors."""
        return self.vectorize_mode == "async" or self.remote_worker_envs

    @property
    def most_restarts(self) -> int | None:
        """Restarts of one environment in a row; None: environments are not recreated."""
        return self.max_env_restarts if self.restart_failed_sub_environments else None

    @property
    def simulates(self) -> bool:
        """Whether policies also sample while they learn from logged rows."""
        return "simulation" in (self.input_evaluation or ())

    @property
    def logged_estimators(self) -> tuple[str, ...]:
        """Names of the estimators that judge policies by logged rows."""
        return tuple(name for name in self.input_evaluation or () if name != "simulation")

    def _check_connectors(self, name: str) -> None:
        given = getattr(self, name)
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(map(callable, given)):
            raise OptionError(
                f"{name}={excerpt(given)}: expected a list of connectors, such as [FrameStack(4)], and "
                "functions"
            )
        object.__setattr__(self, name, tuple(given))

    def _check_seconds(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise OptionError(f"{name}={excerpt(value)}: expected a number, at least 0, or None")
        if not self.envs_are_elsewhere:
            raise OptionError(
                f"{name}={value} with vectorize_mode={self.vectorize_mode!r}: requires environments in "
                "their own processes; use vectorize_mode='async' or remote_worker_envs=True"
            )

    def resolved(
        self, *, num_envs: int | None = None, num_workers: int = 0, worker_index: int = 0
    ) -> RolloutConfig:
        """Return this config with a number instead of ``rollout_fragment_length="auto"``.

        Divides ``train_batch_size`` among the workers' environments. The environments of the first workers
        each take one more step to cover the remainder. One fragment of each worker gives at least
        ``train_batch_size`` rows in total, and fewer than ``num_envs`` extra rows.

        Args:
            num_envs: Environments per worker, for a vector environment with its own number.
            num_workers: Total number of workers, as in `IOContext`: 0 for a single one.
            worker_index: 0 for a local worker, 1 to ``num_workers`` for others.
        """
        if self.train_batch_size is None:
            return self
        envs = self.num_envs if num_envs is None else num_envs
        workers = max(num_workers, 1)
        steps, rest = divmod(self.train_batch_size, envs * workers)
        takes_more = max(worker_index - 1, 0) * envs < rest
        return replace(self, rollout_fragment_length=max(steps + takes_more, 1), train_batch_size=None)

    def context(
        self, *, worker_index: int = 0, num_workers: int = 0, recreated_worker: bool = False
    ) -> EnvContext:
        """The context passed to functions that make the environments of a worker."""
        return EnvContext(
            self.env_config,
            worker_index=worker_index,
            num_workers=num_workers,
            remote=self.envs_are_elsewhere,
            recreated_worker=recreated_worker,
        )

    def refuse_others(self, who: str, used: Collection[str]) -> None:
        """Raise if fields other than ``used`` were set, because ``who`` would ignore them silently.

        Raises:
            OptionError: Such fields were set; the message names them.
        """
        ignored = self.changed([option.name for option in fields(self) if option.name not in used])
        if ignored:
            raise OptionError(f"{', '.join(ignored)}: {who} does not use this; leave it out")

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of the fields ``names`` that differ from their defaults, as ``name=value``."""
        usual = RolloutConfig()
        return [
            f"{name}={excerpt(getattr(self, name))}"
            for name in names
            if getattr(self, name) != getattr(usual, name)
        ]

    @property
    def fragment_steps(self) -> int:
        """``rollout_fragment_length`` as a number.

        Raises:
            OptionError: It is ``"auto"``; see `resolved`.
        """
        if self.rollout_fragment_length == "auto":
            raise OptionError("rollout_fragment_length='auto' is a number for each worker: see resolved()")
        return self.rollout_fragment_length

    @property
    def rows_per_fragment(self) -> int:
        """Rows in a fragment in truncate mode."""
        return self.num_envs * self.fragment_steps
