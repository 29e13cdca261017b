"""`JointFilters`: the running statistics of all workers as one, each observation counted once.

Workers send what came in since they were last asked, and adopt the sum. What comes in between the two stays
theirs until the next time.

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlio.connectors.mean_std import MeanStdFilter
from rlio.errors import StateError, excerpt
from rlio.reader import JsonState
from rlio.sampling.filters import add_changes

__all__ = ["JointFilters"]


class JointFilters:
    """Adds what workers send.

    Attributes:
        filters: By policy id; empty until `add`, or where workers have none.
    """

    def __init__(self) -> None:
        self.filters: dict[str, list[MeanStdFilter]] = {}

    def add(self, parts: Sequence[Mapping[str, Sequence[MeanStdFilter]]]) -> None:
        """Count the buffers of filters that workers sent.

        Raises:
            StateError: They have unlike filters; nothing is counted.
        """
        joint = self.filters
        if parts and not joint:
            # All that the first has seen is in its buffer: it began with none.
            joint = {policy_id: [_empty(each) for each in own] for policy_id, own in parts[0].items()}
        add_changes(joint, parts)
        self.filters = joint

    def state_dict(self) -> JsonState:
        """The statistics as JSON."""
        return {
            policy_id: [each.state_dict() for each in filters] for policy_id, filters in self.filters.items()
        }

    def load_state_dict(self, state: JsonState, like: Mapping[str, Sequence[MeanStdFilter]]) -> None:
        """Go on from a state of `state_dict`.

        Args:
            state: It.
            like: Filters of a worker, which say for what spaces.

        Raises:
            StateError: It is of other filters.
        """
        counts = {policy_id: len(filters) for policy_id, filters in like.items()} if state else {}
        if not isinstance(state, Mapping) or counts != {
            policy_id: len(parts) if isinstance(parts, list) else None for policy_id, parts in state.items()
        }:
            raise StateError(f"the state has filters of {excerpt(state)}, but workers have {counts}")
        loaded = {policy_id: [each.copy() for each in like[policy_id]] for policy_id in counts}
        for policy_id, filters in loaded.items():
            for each, part in zip(filters, state[policy_id], strict=True):
                each.load_state_dict(part)
        self.filters = loaded


def _empty(like: MeanStdFilter) -> MeanStdFilter:
    """A filter of the same space and options that has seen nothing."""
    made = like.copy()
    made.reset()
    return made
