"""What a worker does to experience that it reads instead of sampling: adapting actions, postprocessing.

Example:
    >>> from gymnasium.spaces import Box
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.rollout.config import RolloutConfig
    >>> policy = RandomPolicy()
    >>> policy.bind(Box(-1.0, 1.0, (3,)), Box(-2.0, 2.0, (1,)), seed=0)
    >>> offline_functions(RolloutConfig(normalize_actions=True), policy)
    [NormalizeActions(space=Box(-2.0, 2.0, (1,), float32))]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlio.actions import ClipActions, NormalizeActions
from rlio.batch import MultiAgentBatch, concat_samples
from rlio.errors import OptionError, excerpt
from rlio.interfaces import Batch
from rlio.policies.policy import Policy
from rlio.rollout.config import RolloutConfig
from rlio.storage.paths import locate

__all__ = ["PostprocessInputs", "offline_functions", "refuse_same_root"]


@dataclass(frozen=True)
class PostprocessInputs:
    """Puts each episode's rows, or chunk of them, of a batch through the policy's ``postprocess_trajectory``.

    Attributes:
        policy: The policy.
    """

    policy: Policy

    def __call__(self, batch: Batch) -> Batch:
        """Return the postprocessed batch; ``batch`` is not changed.

        Raises:
            OptionError: The batch is of several policies.
        """
        if isinstance(batch, MultiAgentBatch):
            raise OptionError(
                f"postprocess_inputs=True: the input has rows of the policies {excerpt(list(batch))}, and "
                "there is one policy to postprocess them; read one policy's rows"
            )
        parts = batch.split_by_episode()
        if not parts:
            return batch
        # Copies: the policy may change what it gets, and these are views of the reader's batch.
        return concat_samples([self.policy.postprocess_trajectory(part.copy()) for part in parts])


def offline_functions(config: RolloutConfig, policy: Policy) -> list[Callable[[Batch], Batch]]:
    """The functions for `MappedInput` that bring what was read into the form of what is sampled.

    Actions are clipped to the action space, and scaled to [-1, 1], as ``config`` says; then trajectories are
    postprocessed.
    """
    functions: list[Callable[[Batch], Batch]] = []
    # In this order: the bounds are those of actions that are not scaled yet.
    if config.clip_actions and not config.actions_in_input_normalized:
        functions.append(ClipActions(policy.action_space))
    if config.normalize_actions and not config.actions_in_input_normalized:
        functions.append(NormalizeActions(policy.action_space))
    if config.postprocess_inputs:
        functions.append(PostprocessInputs(policy))
    return functions


def refuse_same_root(source: Any, output: Any) -> None:
    """Check that no path of ``source`` lies in the folder ``output``, or around it.

    Raises:
        OptionError: One does: what is written would be read again.
    """
    if not isinstance(output, (str, os.PathLike)):
        return
    target = locate(output).uri.rstrip("/") + "/"
    for path in _paths(source):
        place = locate(_without_glob(path)).uri.rstrip("/") + "/"
        if place.startswith(target) or target.startswith(place):
            raise OptionError(
                f"record='all' writes what is read from {excerpt(os.fspath(path))} to "
                f"{excerpt(os.fspath(output))}, where it would be read again: "
                "write to another folder, or leave record at 'live'"
            )


def _paths(source: Any) -> Iterator[str | os.PathLike[str]]:
    """Every path in what a user gave as an input."""
    if isinstance(source, (str, os.PathLike)):
        if source != "sampler":
            yield source
    elif isinstance(source, Mapping):
        for key in source:
            yield from _paths(key)
    elif isinstance(source, (list, tuple)):
        for item in source:
            yield from _paths(item)


def _without_glob(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The folder above the first wildcard of ``path``."""
    text = os.fspath(path)
    first = min((text.find(letter) for letter in "*?[" if letter in text), default=-1)
    return path if first < 0 else text[:first].rpartition("/")[0] or "."
