"""`synchronize_filters`: merges the running statistics of several workers, each observation counted once.

Example:
    >>> from rlio.connectors.mean_std import MeanStdFilter
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.sampling.config import RolloutConfig
    >>> from rlio.sampling.env_runner import EnvRunner
    >>> config = RolloutConfig(rollout_fragment_length=9, observation_connectors=[MeanStdFilter()])
    >>> runners = [EnvRunner("CartPole-v1", RandomPolicy(), config=config, worker_index=i) for i in (1, 2)]
    >>> for runner in runners:
    ...     _ = runner.run()
    >>> synchronize_filters(runners)
    >>> [runner.get_filters()["default_policy"][0].running_stats.n for runner in runners]
    [20, 20]
    >>> for runner in runners:
    ...     runner.stop()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rlio.connectors.connector import Pipeline
from rlio.connectors.mean_std import MeanStdFilter
from rlio.errors import StateError, excerpt

__all__ = ["HasFilters", "add_changes", "filters_in", "make_equal", "synchronize_filters"]


class HasFilters(Protocol):
    """A runner or worker."""

    def get_filters(self, flush_after: bool = False) -> dict[str, list[MeanStdFilter]]:
        """Copies of the filters, by policy id."""

    def sync_filters(self, filters: Mapping[str, Sequence[MeanStdFilter]]) -> None:
        """Make the filters equal to ``filters``."""


def filters_in(pipeline: Pipeline) -> list[MeanStdFilter]:
    """The `MeanStdFilter`s among the connectors of ``pipeline``, in their order."""
    return [each for each in pipeline.connectors if isinstance(each, MeanStdFilter)]


def make_equal(filters: Sequence[MeanStdFilter], others: Sequence[MeanStdFilter]) -> None:
    """Make ``filters`` equal to ``others``.

    Raises:
        StateError: The numbers of filters differ.
    """
    if len(others) != len(filters):
        raise StateError(f"found {len(others)} filters, expected {len(filters)}")
    for mine, other in zip(filters, others, strict=True):
        mine.sync(other)


def add_changes(
    joint: Mapping[str, Sequence[MeanStdFilter]], parts: Iterable[Mapping[str, Sequence[MeanStdFilter]]]
) -> None:
    """Add the buffers of ``parts`` to ``joint``.

    Raises:
        StateError: The filters differ; nothing is added.
    """
    counts = {policy_id: len(own) for policy_id, own in joint.items()}
    given = list(parts)
    for part in given:
        if {policy_id: len(own) for policy_id, own in part.items()} != counts:
            raise StateError(
                f"workers have filters of {excerpt(sorted(joint))} and {excerpt(sorted(part))}, or "
                "different numbers of filters: synchronise only workers that were made alike"
            )
    for part in given:
        for policy_id, filters in joint.items():
            for mine, theirs in zip(filters, part[policy_id], strict=True):
                mine.apply_changes(theirs)


def synchronize_filters(workers: Iterable[HasFilters]) -> None:
    """Add the observations that each worker saw since the last call to the filters of all.

    Workers must start equal: all new, restored from one state, or synchronised before.

    Args:
        workers: Runners or workers with the same filters.

    Raises:
        StateError: The workers have different filters. No statistics are lost, but buffers may be flushed.
    """
    given = list(workers)
    if not given:
        return
    joint, *others = [worker.get_filters(flush_after=True) for worker in given]
    add_changes(joint, others)
    for filters in joint.values():
        for each in filters:
            each.reset_buffer()
    for worker in given:
        worker.sync_filters(joint)
