"""`RolloutConfig`: how environments are stepped and recorded. Field names are RLlib's.

Example:
    >>> RolloutConfig(num_envs=8, rollout_fragment_length=50).rows_per_fragment
    400
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

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
        rollout_fragment_length: Steps of each environment in a fragment; with complete episodes, the least
            number of rows of a batch. ``"auto"``: such that one fragment of each worker makes a batch of
            `train_batch_size` rows, see `resolved`.
        train_batch_size: Rows of a batch, for ``rollout_fragment_length="auto"``.
        num_envs: Environments that are stepped together.
        batch_mode: ``"truncate_episodes"``: fragments of exactly num_envs x rollout_fragment_length rows,
            which begin and end in the middle of episodes. ``"complete_episodes"``: whole episodes, never
            cut, until they have rollout_fragment_length rows in all.
        count_steps_by: With several agents: what a fragment's steps are, ``"env_steps"`` or
            ``"agent_steps"``. With one they are the same.
        episode_lookback_horizon: Steps before a chunk of an episode that it comes with in its ``lookback``,
            where `EnvRunner.sample` cuts episodes.
        horizon: Steps after which an episode is truncated, if the environment has not ended it before; None:
            whenever the environment says so.
        soft_horizon: At the `horizon` a new episode begins without a reset: the environment goes on, and no
            row says that anything ended.
        no_done_at_end: No row says that its episode ended, by termination or truncation: for environments
            whose ends are artificial. The next row has another ``eps_id`` all the same.
        vectorize_mode: How `num_envs` environments become one: in this process one after the other
            (``"sync"``), each in a process of its own (``"async"``), or by the environment's own vector form
            (``"native"``).
        explore: Whether the policy explores.
        observation_connectors: What happens to observations before the policy sees them, and before they are
            recorded: `Connector`s and functions of a batch, in their order. Each runner has copies.
        action_connectors: What happens to the policy's actions before the environment gets them: as above.
            Recorded is what the policy gave.
        clip_rewards: Rewards in batches: their signs (True), or within this distance from 0 (a number).
            Metrics have them as they are. None leaves them, unless environments bring a setting with them, as
            Atari's do; False leaves them.
        sampler_perf_stats_ema_coef: See `PerfCounters`.
        clip_actions: Bring the actions sent to an environment, and those read from files, within its bounds.
        normalize_actions: The policy's actions are in [-1, 1], and scaled to the bounds before they are sent.
        actions_in_input_normalized: Whether actions read from files are in [-1, 1] already; with
            `normalize_actions` they are scaled to it otherwise.
        postprocess_inputs: Put what is read from files through the policy's ``postprocess_trajectory`` too.
        shuffle_buffer_size: Shuffle the input in windows of so many batches; 0 for none.
        compress_observations: Compress obs and new_obs of the batches that `RolloutWorker.sample` returns,
            row by row (True) or as blocks (``"bulk"``). What is written to files is compressed by its
            writer.
        input_evaluation: How the policies of a `RolloutWorker` are judged while they learn from what it
            reads; one of these, or several. ``"simulation"``: with each batch that is read they sample a
            fragment too, which is counted in the metrics and is in no batch. ``"is"`` and ``"wis"``
            (RLlib's estimators, step by step), ``"pdis"``, ``"wpdis"``, ``"trajectory_is"`` and
            ``"trajectory_wis"``: what they would have earned is estimated from the rows that are read, by
            importance sampling (docs/evaluation.md); for rows in recorded order with the probabilities of
            their actions. The metrics have it as ``off_policy_estimator``, of the episodes that became whole
            since they were last asked for.
        input_evaluation_gamma: Discount a step of those estimates, from 0 to 1; they need it.
        sample_async: The sampler of a `RolloutWorker` runs in a thread of its own, up to 5 batches ahead; see
            `AsyncInput`. No policy learns or changes while it acts, by the worker's methods or by those of
            rlio's policies; a policy of yours that you call directly does so under its `rlio.Policy.lock`.
        fake_sampler: The sampler of a `RolloutWorker` gives its first batch again and again: to time what
            learns from it.
        record_infos: Whether batches have an ``infos`` column.
        record_env_seeds: Whether batches have a column ``env_seed``, int64: what the reset of the row's
            episode was seeded with; -1 where the environment has gone on with a generator of its own.
        env_config: Keywords of an environment given by its id; what a function that makes environments finds
            in the `EnvContext` that it is given.
        check_env: Check spaces, the first reset and the first step of each environment, and say what is wrong
            and where. Costs nothing afterwards.
        validate_env: Called with each environment that is made and its `EnvContext`, in the process where it
            lives; raises where it does not like it.
        restart_failed_sub_environments: Make environments anew that fail in ``step`` or ``reset``, whose
            process died, or that take longer than `env_step_timeout`, while the others go on. The episode is
            discarded and counted. Otherwise each failure is raised as an `EnvError`. Vector environments are
            not restarted.
        max_env_restarts: How often one environment is made anew in a row, see `RestartPolicy`.
        env_step_timeout: Seconds after which a step or reset is a failure; None for no limit. ``"async"`` and
            `remote_worker_envs` only: in one process nothing can be interrupted.
        remote_worker_envs: Each of the `num_envs` environments is a Ray actor, on any machine of the cluster
            that this process is connected to (``pip install 'rlio[ray]'``), in place of a `vectorize_mode`.
            It takes none of Ray's CPUs, and pays from some milliseconds a step.
        remote_env_batch_wait_ms: With ``"async"`` or `remote_worker_envs`: do not wait for all environments
            in each step, but from the first that is ready for so many milliseconds for others; 0 goes on with
            one. None waits for all. Each such step has room for all environments in memory, until its rows
            are handed out; with complete episodes, those of an environment that is slow keep the steps in
            which it answered.
        render_env: Render each environment before each step, in worker 0 or 1: frames go into
            ``RunningEpisode.media["frames"]``, and with the episode into the metrics. Environments of an id
            are made with ``render_mode="rgb_array"``.
        extra_python_environs: Environment variables that are set before the environments are made.

    Batches hold the actions that the policy gave; clipped and scaled ones go to the environment only.

    Raises:
        OptionError: A value is illegal, or two contradict each other.
    """

    # RLlib's default; of a 1-step return it wastes nothing, and of an advantage estimate little.
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
    # Processes pay from about a millisecond a step; most environments take less.
    vectorize_mode: VectorizeMode = "sync"
    explore: bool = True
    observation_connectors: Sequence[ConnectorLike] = ()
    action_connectors: Sequence[ConnectorLike] = ()
    clip_rewards: bool | float | None = None
    sampler_perf_stats_ema_coef: float | None = None
    # Nothing that is sent, recorded or read is changed unless asked for. RLlib's policies give actions in
    # [-1, 1] unless told otherwise; a policy here is told the environment's own action space.
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
    # A dict a row costs more than all of CartPole's other columns together, in time and in memory.
    record_infos: bool = False
    record_env_seeds: bool = False
    env_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    check_env: bool = True
    validate_env: Callable[..., None] | None = None
    restart_failed_sub_environments: bool = False
    # With pauses up to 10 s: a server may be away for a quarter of an hour.
    max_env_restarts: int = 100
    env_step_timeout: float | None = None
    remote_worker_envs: bool = False
    remote_env_batch_wait_ms: float | None = None
    render_env: bool = False
    extra_python_environs: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        expected_mapping(self.env_config, "env_config")
        for name, least in _LEAST:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(f"{name}={excerpt(value)}: a whole number, at least {least}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                raise OptionError(f"{name}={excerpt(value)}: one of {', '.join(map(repr, choices))}")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type == "bool" and not isinstance(value, bool):
                raise OptionError(f"{option.name}={excerpt(value)}: True or False")
        if self.remote_worker_envs and self.vectorize_mode != "sync":
            raise OptionError(
                f"remote_worker_envs=True with vectorize_mode={self.vectorize_mode!r}: each environment is "
                "an actor, or they are vectorised here; leave one of them out"
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
            raise OptionError(f"clip_rewards={excerpt(clip)}: True, False, None, or a number above 0")
        if self.actions_in_input_normalized and not self.normalize_actions:
            raise OptionError(
                "actions_in_input_normalized=True says that actions in files are in [-1, 1], but with "
                "normalize_actions=False the policy's are not: set both, or neither"
            )

    def _check_sizes(self) -> None:
        """Fragments and horizons: numbers that may be left open, and what needs them."""
        if self.rollout_fragment_length == "auto":
            if self.train_batch_size is None:
                raise OptionError(
                    "rollout_fragment_length='auto' is found out from train_batch_size: give that too"
                )
        elif self.train_batch_size is not None:
            raise OptionError(
                f"train_batch_size={self.train_batch_size} is for rollout_fragment_length='auto', but it is "
                f"{self.rollout_fragment_length}"
            )
        for name in ("rollout_fragment_length", "train_batch_size", "horizon"):
            value = getattr(self, name)
            if value not in (None, "auto") and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise OptionError(f"{name}={excerpt(value)}: a whole number, at least 1")
        if self.soft_horizon and self.horizon is None:
            raise OptionError("soft_horizon=True says what happens at the horizon: give horizon too")

    def _check_evaluation(self) -> None:
        given: Any = self.input_evaluation
        names = (given,) if isinstance(given, str) else given
        if names is not None:
            if not isinstance(names, Sequence) or not names or any(n not in _EVALUATIONS for n in names):
                raise OptionError(
                    f"input_evaluation={excerpt(given)}: None, or one or several of {', '.join(_EVALUATIONS)}"
                )
            object.__setattr__(self, "input_evaluation", tuple(dict.fromkeys(names)))
        gamma = self.input_evaluation_gamma
        if (gamma is not None) != bool(self.logged_estimators) or not 0.0 <= (gamma or 0.0) <= 1.0:
            raise OptionError(
                f"input_evaluation={excerpt(given)}, input_evaluation_gamma={gamma}: a discount from 0 to 1 "
                f"goes with {', '.join(_EVALUATIONS[1:])}, and with nothing else"
            )

    @property
    def simulates(self) -> bool:
        """Whether policies sample beside what is read."""
        return "simulation" in (self.input_evaluation or ())

    @property
    def logged_estimators(self) -> tuple[str, ...]:
        """Names of the estimators that judge policies by what is read."""
        return tuple(name for name in self.input_evaluation or () if name != "simulation")

    def _check_connectors(self, name: str) -> None:
        given = getattr(self, name)
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(map(callable, given)):
            raise OptionError(
                f"{name}={excerpt(given)}: a list of connectors, such as [FrameStack(4)], and functions"
            )
        object.__setattr__(self, name, tuple(given))

    def _check_seconds(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise OptionError(f"{name}={excerpt(value)}: a number, at least 0, or None")
        if self.vectorize_mode != "async" and not self.remote_worker_envs:
            raise OptionError(
                f"{name}={value} with vectorize_mode={self.vectorize_mode!r}: it needs environments in "
                "processes of their own, vectorize_mode='async', or remote_worker_envs=True"
            )

    def resolved(
        self, *, num_envs: int | None = None, num_workers: int = 0, worker_index: int = 0
    ) -> RolloutConfig:
        """This config with a number in place of ``rollout_fragment_length="auto"``.

        ``train_batch_size`` is shared out among the workers' environments; what is left over is a step more
        of each environment of the first workers. One fragment of each worker has at least
        ``train_batch_size`` rows in all, and fewer than ``num_envs`` too many.

        Args:
            num_envs: Of a worker, where a vector environment brings its own number.
            num_workers: Workers in all, as for `IOContext`: 0 for a single one.
            worker_index: 0 for a local worker, 1 to ``num_workers`` for others.
        """
        if self.train_batch_size is None:
            return self
        envs = self.num_envs if num_envs is None else num_envs
        workers = max(num_workers, 1)
        steps, rest = divmod(self.train_batch_size, envs * workers)
        takes_more = max(worker_index - 1, 0) * envs < rest
        return replace(self, rollout_fragment_length=max(steps + takes_more, 1), train_batch_size=None)

    def refuse_others(self, who: str, used: Collection[str]) -> None:
        """Raise where fields beside those ``used`` were set: ``who`` would pass over them in silence.

        Raises:
            OptionError: Some were; they are named.
        """
        ignored = [
            f"{option.name}={excerpt(getattr(self, option.name))}"
            for option in fields(self)
            if option.name not in used and getattr(self, option.name) != _default(option)
        ]
        if ignored:
            raise OptionError(f"{', '.join(ignored)}: {who} does not use this; leave it out")

    @property
    def fragment_steps(self) -> int:
        """``rollout_fragment_length`` as a number.

        Raises:
            OptionError: It is ``"auto"``: `resolved` says what that is.
        """
        if self.rollout_fragment_length == "auto":
            raise OptionError("rollout_fragment_length='auto' is a number for each worker: see resolved()")
        return self.rollout_fragment_length

    @property
    def rows_per_fragment(self) -> int:
        """Rows of a fragment in truncate mode."""
        return self.num_envs * self.fragment_steps


def _default(option: Field[Any]) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()
