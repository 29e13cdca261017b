"""`RolloutConfig`: how environments are stepped and recorded. Field names are RLlib's.

Example:
    >>> RolloutConfig(num_envs=8, rollout_fragment_length=50).rows_per_fragment
    400
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlio.errors import OptionError, excerpt

__all__ = ["RolloutConfig", "VectorizeMode"]

VectorizeMode = Literal["sync", "async", "native"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "batch_mode": ("truncate_episodes", "complete_episodes"),
    "vectorize_mode": ("sync", "async", "native"),
    "compress_observations": (False, True, "bulk"),
}
_FLAGS = (
    "explore",
    "clip_actions",
    "normalize_actions",
    "actions_in_input_normalized",
    "postprocess_inputs",
    "record_infos",
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

    def __post_init__(self) -> None:
        for name, least in (("rollout_fragment_length", 1), ("num_envs", 1), ("shuffle_buffer_size", 0)):
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
        if self.actions_in_input_normalized and not self.normalize_actions:
            raise OptionError(
                "actions_in_input_normalized=True says that actions in files are in [-1, 1], but with "
                "normalize_actions=False the policy's are not: set both, or neither"
            )

    @property
    def rows_per_fragment(self) -> int:
        """Rows of a fragment in truncate mode."""
        return self.num_envs * self.rollout_fragment_length
