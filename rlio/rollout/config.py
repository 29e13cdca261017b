"""`RolloutConfig`: how environments are stepped and recorded. Field names are RLlib's.

Example:
    >>> RolloutConfig(num_envs=8, rollout_fragment_length=50).rows_per_fragment
    400
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlio.errors import OptionError, excerpt

__all__ = ["RolloutConfig", "VectorizeMode"]

VectorizeMode = Literal["sync", "async", "native"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "batch_mode": ("truncate_episodes", "complete_episodes"),
    "vectorize_mode": ("sync", "async", "native"),
    "compress_observations": (False, True, "bulk"),
}
_LEAST = (
    ("rollout_fragment_length", 1),
    ("num_envs", 1),
    ("shuffle_buffer_size", 0),
    ("max_env_restarts", 1),
)
_FLAGS = (
    "explore",
    "clip_actions",
    "normalize_actions",
    "actions_in_input_normalized",
    "postprocess_inputs",
    "record_infos",
    "record_env_seeds",
    "check_env",
    "restart_failed_sub_environments",
    "render_env",
)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How environments are stepped and recorded.

    Attributes:
        rollout_fragment_length: Steps of each environment in a fragment; with complete episodes, the least
            number of rows of a batch.
        num_envs: Environments that are stepped together.
        batch_mode: ``"truncate_episodes"``: fragments of exactly num_envs x rollout_fragment_length rows,
            which begin and end in the middle of episodes. ``"complete_episodes"``: whole episodes, never
            cut, until they have rollout_fragment_length rows in all.
        vectorize_mode: How `num_envs` environments become one: in this process one after the other
            (``"sync"``), each in a process of its own (``"async"``), or by the environment's own vector form
            (``"native"``).
        explore: Whether the policy explores.
        clip_actions: Bring the actions sent to an environment, and those read from files, within its bounds.
        normalize_actions: The policy's actions are in [-1, 1], and scaled to the bounds before they are sent.
        actions_in_input_normalized: Whether actions read from files are in [-1, 1] already; with
            `normalize_actions` they are scaled to it otherwise.
        postprocess_inputs: Put what is read from files through the policy's ``postprocess_trajectory`` too.
        shuffle_buffer_size: Shuffle the input in windows of so many batches; 0 for none.
        compress_observations: Compress obs and new_obs of the batches that `RolloutWorker.sample` returns,
            row by row (True) or as blocks (``"bulk"``). What is written to files is compressed by its
            writer.
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
            discarded and counted. Otherwise each failure is raised as an `EnvError`.
        max_env_restarts: How often one environment is made anew in a row, see `RestartPolicy`.
        env_step_timeout: Seconds after which a step or reset is a failure; None for no limit. ``"async"``
            only: in one process nothing can be interrupted.
        remote_env_batch_wait_ms: With ``"async"``: do not wait for all environments in each step, but from
            the first that is ready for so many milliseconds for others; 0 goes on with one. None waits for
            all.
        render_env: Make environments of ids with ``render_mode="rgb_array"``, so that they can be rendered.
        extra_python_environs: Environment variables that are set before the environments are made.

    Batches hold the actions that the policy gave; clipped and scaled ones go to the environment only.

    Raises:
        OptionError: A value is illegal, or two contradict each other.
    """

    # RLlib's default; of a 1-step return it wastes nothing, and of an advantage estimate little.
    rollout_fragment_length: int = 200
    num_envs: int = 1
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    # Processes pay from about a millisecond a step; most environments take less.
    vectorize_mode: VectorizeMode = "sync"
    explore: bool = True
    # Nothing that is sent, recorded or read is changed unless asked for. RLlib's policies give actions in
    # [-1, 1] unless told otherwise; a policy here is told the environment's own action space.
    clip_actions: bool = False
    normalize_actions: bool = False
    actions_in_input_normalized: bool = False
    postprocess_inputs: bool = False
    shuffle_buffer_size: int = 0
    compress_observations: bool | Literal["bulk"] = False
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
    remote_env_batch_wait_ms: float | None = None
    render_env: bool = False
    extra_python_environs: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, least in _LEAST:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(f"{name}={excerpt(value)}: a whole number, at least {least}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                raise OptionError(f"{name}={excerpt(value)}: one of {', '.join(map(repr, choices))}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={excerpt(getattr(self, name))}: True or False")
        for name in ("env_step_timeout", "remote_env_batch_wait_ms"):
            self._check_seconds(name)
        if self.actions_in_input_normalized and not self.normalize_actions:
            raise OptionError(
                "actions_in_input_normalized=True says that actions in files are in [-1, 1], but with "
                "normalize_actions=False the policy's are not: set both, or neither"
            )

    def _check_seconds(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise OptionError(f"{name}={excerpt(value)}: a number, at least 0, or None")
        if self.vectorize_mode != "async":
            raise OptionError(
                f"{name}={value} with vectorize_mode={self.vectorize_mode!r}: it needs environments in "
                "processes of their own, vectorize_mode='async'"
            )

    @property
    def rows_per_fragment(self) -> int:
        """Rows of a fragment in truncate mode."""
        return self.num_envs * self.rollout_fragment_length
