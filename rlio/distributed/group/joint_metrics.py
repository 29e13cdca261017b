"""`JointMetrics`: what all workers of a group have counted, those that died included.

Example:
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

from collections.abc import Hashable

from rlio.reader import JsonState
from rlio.sampling.metrics import Counts, RolloutMetrics

__all__ = ["JointMetrics"]

# As `MetricsCollector`: who never asks is not to fill the memory.
_MOST_EPISODES = 65_536
# Parts that wait are joined now and then: each has some arrays.
_MOST_PARTS = 256


class JointMetrics:
    """Puts together what comes with each batch."""

    def __init__(self) -> None:
        self._parts: list[RolloutMetrics] = []
        self._lifetimes: dict[Hashable, Counts] = {}
        self._before = Counts()

    def add(self, who: Hashable, part: RolloutMetrics) -> None:
        """Count what ``who`` counted since its last part."""
        self._lifetimes[who] = part.lifetime
        self._parts.append(part)
        if len(self._parts) >= _MOST_PARTS:
            self._parts = [_shortened(RolloutMetrics.merge(self._parts))]

    def take(self) -> RolloutMetrics:
        """What came since the last call; ``lifetime`` is of all that ever came."""
        merged = _shortened(RolloutMetrics.merge(self._parts))
        self._parts = []
        merged.lifetime = self.lifetime
        return merged

    @property
    def lifetime(self) -> Counts:
        """What happened since the beginning."""
        total = self._before
        # A copy: weights are sent in any thread, with this sum, while others add to it.
        for counts in list(self._lifetimes.values()):
            total = total.plus(counts)
        return total

    def state_dict(self) -> JsonState:
        """The lifetime's counts, as JSON."""
        return {name: getattr(self.lifetime, name) for name in Counts.__slots__}

    def load_state_dict(self, state: JsonState) -> None:
        """Go on counting from a state of `state_dict`.

        Raises:
            StateError: A count is missing, or no whole number.
        """
        self._before = Counts.from_state(state)
        self._parts, self._lifetimes = [], {}


def _shortened(metrics: RolloutMetrics) -> RolloutMetrics:
    for name in ("returns", "lengths", "durations", "details"):
        setattr(metrics, name, getattr(metrics, name)[-_MOST_EPISODES:])
    return metrics
