"""Transforms for experience that a worker reads instead of sampling: adapting actions, postprocessing.

Example:
    >>> from gymnasium.spaces import Box
    >>> from rlio.batch import SampleBatch
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.sampling.config import RolloutConfig
    >>> policy = RandomPolicy()
    >>> policy.bind(Box(-1.0, 1.0, (3,)), Box(-2.0, 2.0, (1,)), seed=0)
    >>> (scale,) = offline_functions(RolloutConfig(normalize_actions=True), {"default_policy": policy})
    >>> scale(SampleBatch(actions=[[2.0], [-1.0]]))["actions"].ravel().tolist()
    [1.0, -0.5]
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.actions import ClipActions, NormalizeActions
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.errors import OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.sampling.config import RolloutConfig
from rlio.storage.paths import locate

__all__ = ["AdaptActions", "PostprocessInputs", "offline_functions", "refuse_same_root"]

#: Agent's number in an episode -> policy id and rows.
_Agents: TypeAlias = dict[int, tuple[str, SampleBatch]]


@dataclass(frozen=True)
class AdaptActions:
    """Clips or scales logged actions to the action space of their policy.

    Attributes:
        policies: Policies by id; a plain batch belongs to ``default_policy``.
        how: `ClipActions` or `NormalizeActions`.
    """

    policies: Mapping[str, Policy]
    how: type[ClipActions] | type[NormalizeActions]

    def __call__(self, batch: Batch) -> Batch:
        """Return ``batch`` with adapted actions; does not change ``batch``.

        Raises:
            OptionError: The batch has rows of an unknown policy.
        """
        adapted = {
            policy_id: self.how(_known(self.policies, policy_id).action_space)(rows)
            for policy_id, rows in batch.policies().items()
        }
        if isinstance(batch, SampleBatch):
            return adapted[DEFAULT_POLICY_ID]
        return MultiAgentBatch(adapted, batch.env_steps())


@dataclass(frozen=True)
class PostprocessInputs:
    """Applies ``postprocess_trajectory`` to each agent's rows of each episode, or chunk of one.

    Attributes:
        policies: Policies by id; a plain batch belongs to ``default_policy``.
    """

    policies: Mapping[str, Policy]

    def __call__(self, batch: Batch) -> Batch:
        """Return the postprocessed batch, agent by agent; does not change ``batch``.

        Raises:
            OptionError: The batch has rows of an unknown policy.
        """
        # Copy, because the policy may change its input, and the rows read may be views.
        if isinstance(batch, SampleBatch):
            return _known(self.policies, DEFAULT_POLICY_ID).postprocess_batch(batch.copy())
        # A batch may repeat parts of an episode, if a reader crosses the end of an epoch.
        episodes: dict[tuple[Any, int], _Agents] = {}
        times: Counter[tuple[Any, int]] = Counter()
        for policy_id, rows in batch.items():
            _known(self.policies, policy_id)
            for episode, agent, part in _trajectories(rows):
                episodes.setdefault((episode, times[episode, agent]), {})[agent] = (policy_id, part)
                times[episode, agent] += 1
        made: dict[str, list[SampleBatch]] = {policy_id: [] for policy_id in batch}
        for agents in episodes.values():
            for agent, (policy_id, part) in agents.items():
                others = {other: rows for other, rows in agents.items() if other != agent}
                policy = self.policies[policy_id]
                made[policy_id].append(policy.postprocess_trajectory(part.copy(), others))
        joined = {policy_id: concat_samples(parts) for policy_id, parts in made.items() if parts}
        return MultiAgentBatch(dict(batch.items()) | joined, batch.env_steps())


def _known(policies: Mapping[str, Policy], policy_id: str) -> Policy:
    try:
        return policies[policy_id]
    except KeyError:
        raise OptionError(
            f"the input has rows of the unknown policy {excerpt(policy_id)}: expected "
            f"{excerpt(list(policies))}. Give the worker a policy with this id, or read other rows"
        ) from None


def _trajectories(rows: SampleBatch) -> Iterator[tuple[Any, int, SampleBatch]]:
    """Episode id, agent number and rows, for each agent of each episode or part of one."""
    for part in rows.split_by_episode():
        episode = part[Columns.EPS_ID][0] if Columns.EPS_ID in part else object()
        if Columns.AGENT_INDEX not in part:
            yield episode, 0, part
            continue
        numbers = np.asarray(part[Columns.AGENT_INDEX])
        for number in np.unique(numbers).tolist():
            yield episode, number, part[numbers == number]


def offline_functions(
    config: RolloutConfig, policies: Mapping[str, Policy]
) -> list[Callable[[Batch], Batch]]:
    """The functions for `MappedInput` that give rows read the form of sampled rows.

    They clip actions to the action space or scale them to [-1, 1], as ``config`` says, and then postprocess
    trajectories.
    """
    functions: list[Callable[[Batch], Batch]] = []
    # Clip first, because the bounds apply to unscaled actions.
    if config.clip_actions and not config.actions_in_input_normalized:
        functions.append(AdaptActions(policies, ClipActions))
    if config.normalize_actions and not config.actions_in_input_normalized:
        functions.append(AdaptActions(policies, NormalizeActions))
    if config.postprocess_inputs:
        functions.append(PostprocessInputs(policies))
    return functions


def refuse_same_root(source: Any, output: Any) -> None:
    """Check that no path of ``source`` lies in or around the folder ``output``.

    Raises:
        OptionError: A path does, so written data would be read again.
    """
    if not isinstance(output, (str, os.PathLike)):
        return
    target = locate(output).uri.rstrip("/") + "/"
    for path in _paths(source):
        place = locate(_without_glob(path)).uri.rstrip("/") + "/"
        if place.startswith(target) or target.startswith(place):
            raise OptionError(
                f"record='all' writes the data read from {excerpt(os.fspath(path))} to "
                f"{excerpt(os.fspath(output))}, where it would be read again: write to another folder, or "
                "leave record at 'live'"
            )


def _paths(source: Any) -> Iterator[str | os.PathLike[str]]:
    """Yield every path in a user's input argument."""
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
