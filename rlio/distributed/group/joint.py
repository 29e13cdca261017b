"""`JointFilters` and `JointMetrics`: running statistics and metrics of all workers of a group combined.

Workers send the observations that their filters saw since the last request, and adopt the sum, so each
observation counts once. Observations between the two steps count the next time. Metrics include those of dead
workers.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box
    >>> workers = [MeanStdFilter(), MeanStdFilter()]
    >>> for number, each in enumerate(workers):
    ...     _ = each.bind(Box(0.0, 9.0, (1,)))
    ...     _ = each(np.full((3, 1), float(number)))
    >>> joint = JointFilters()
    >>> joint.add([{"default_policy": [each]} for each in workers])
    >>> joint.filters["default_policy"][0].running_stats.n
    6
    >>> from rlio.sampling.metrics import Counts
    >>> joint = JointMetrics()
    >>> for worker, steps, lifetime in ((1, 30, 30), (2, 5, 5), (1, 10, 40)):
    ...     part = RolloutMetrics(counts=Counts(env_steps=steps), lifetime=Counts(env_steps=lifetime))
    ...     joint.add((worker, 0), part)
    >>> taken = joint.take()
    >>> taken.counts.env_steps, taken.lifetime.env_steps, joint.take().lifetime.env_steps
    (45, 45, 45)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from rlio.connectors.mean_std import MeanStdFilter
from rlio.errors import StateError, excerpt
from rlio.reader import JsonState
from rlio.sampling.filters import add_changes
from rlio.sampling.metrics import Counts, RolloutMetrics

__all__ = ["JointFilters", "JointMetrics"]


class JointFilters:
    """Adds up the filters that workers send.

    Attributes:
        filters: The joint filters by policy id; empty before `add`, or if workers have none.
    """

    def __init__(self) -> None:
        self.filters: dict[str, list[MeanStdFilter]] = {}

    def add(self, parts: Sequence[Mapping[str, Sequence[MeanStdFilter]]]) -> None:
        """Add the buffers of filters that workers sent.

        Raises:
            StateError: Workers have different filters; nothing is added.
        """
        joint = self.filters
        if parts and not joint:
            # The first worker started with empty filters, so its buffer holds all it has seen.
            joint = {policy_id: [_empty(each) for each in own] for policy_id, own in parts[0].items()}
        add_changes(joint, parts)
        self.filters = joint

    def state_dict(self) -> JsonState:
        """Return the statistics as JSON."""
        return {
            policy_id: [each.state_dict() for each in filters] for policy_id, filters in self.filters.items()
        }

    def load_state_dict(self, state: JsonState, like: Mapping[str, Sequence[MeanStdFilter]]) -> None:
        """Continue from a state of `state_dict`.

        Args:
            state: The state.
            like: Filters of a worker, which give the spaces.

        Raises:
            StateError: The state is of different filters.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"the state of filters is {excerpt(state)}: expected a dict by policy id")
        counts = {policy_id: len(filters) for policy_id, filters in like.items()} if state else {}
        if counts != {
            policy_id: len(parts) if isinstance(parts, list) else None for policy_id, parts in state.items()
        }:
            raise StateError(f"the state has filters of {excerpt(state)}, but workers have {counts}")
        loaded = {policy_id: [each.copy() for each in like[policy_id]] for policy_id in counts}
        for policy_id, filters in loaded.items():
            for each, part in zip(filters, state[policy_id], strict=True):
                each.load_state_dict(part)
        self.filters = loaded


def _empty(like: MeanStdFilter) -> MeanStdFilter:
    """Return an empty filter with the same space and options."""
    made = like.copy()
    made.reset()
    return made


# As in `MetricsCollector`, because a group may never be asked for its metrics.
_MOST_EPISODES = 65_536
# Waiting parts are merged regularly, because each has several arrays.
_MOST_PARTS = 256


class JointMetrics:
    """Combines the metrics that arrive with each batch."""

    def __init__(self) -> None:
        self._parts: list[RolloutMetrics] = []
        self._lifetimes: dict[Hashable, Counts] = {}
        self._before = Counts()

    def add(self, who: Hashable, part: RolloutMetrics) -> None:
        """Add what ``who`` counted since its last part."""
        self._lifetimes[who] = part.lifetime
        self._parts.append(part)
        if len(self._parts) >= _MOST_PARTS:
            self._parts = [_shortened(RolloutMetrics.merge(self._parts))]

    def take(self) -> RolloutMetrics:
        """Return the metrics since the last call; ``lifetime`` covers everything."""
        merged = _shortened(RolloutMetrics.merge(self._parts))
        self._parts = []
        merged.lifetime = self.lifetime
        return merged

    @property
    def lifetime(self) -> Counts:
        """Counts since the beginning."""
        total = self._before
        # A copy, because any thread may send weights with this sum while others add to it.
        for counts in list(self._lifetimes.values()):
            total = total.plus(counts)
        return total

    def state_dict(self) -> JsonState:
        """Return the lifetime's counts as JSON."""
        return self.lifetime.state_dict()

    def load_state_dict(self, state: JsonState) -> None:
        """Continue counting from a state of `state_dict`.

        Raises:
            StateError: A count is missing, or is not a whole number.
        """
        self._before = Counts.from_state(state)
        self._parts, self._lifetimes = [], {}


def _shortened(metrics: RolloutMetrics) -> RolloutMetrics:
    for name in ("returns", "lengths", "durations", "details"):
        setattr(metrics, name, getattr(metrics, name)[-_MOST_EPISODES:])
    return metrics
