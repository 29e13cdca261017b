"""`Broadcasts`: the newest weights of a group, for present and later workers.

Example:
    >>> held = Broadcasts()
    >>> held.add("first weights", frozenset({"a", "b"}), seq_no=1)
    True
    >>> held.add("older weights", frozenset({"a", "b"}), seq_no=1)
    False
    >>> held.add("newer weights of one", frozenset({"a"}), seq_no=2)
    True
    >>> held.since(0), held.since(1), held.newest
    (['first weights', 'newer weights of one'], ['newer weights of one'], 2)
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from rlio.policies.weights import accepts_weights

__all__ = ["Broadcasts"]

# Any in this module: references to objects in Ray's store.


class _Held(NamedTuple):
    number: int
    reference: Any
    policies: frozenset[str]
    seq_no: int
    #: Version of workers that have it; without its own version, they keep the previous one.
    version: int


class Broadcasts:
    """Holds references to weights, and drops those that newer ones replace. Thread-safe.

    Attributes:
        count: Number of broadcasts so far, which is the number of the newest.
        newest: The highest sequence number so far.
    """

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._lock = threading.Lock()
        self.count: int = 0
        self.newest: int = 0

    def next_seq_no(self) -> int:
        """Return a new version number."""
        with self._lock:
            self.newest += 1
            return self.newest

    def add(self, reference: Any, policies: frozenset[str], *, seq_no: int) -> bool:
        """Hold ``reference``, and drop older ones whose policies it covers.

        Args:
            reference: Reference to a `Broadcast`.
            policies: Ids of the policies that have weights in it.
            seq_no: Its version; 0 counts as newer than any.

        Returns:
            Whether it is held. It is not if it is no newer than the held weights of the same policies.
        """
        with self._lock:
            covered = [each for each in self._held if each.policies >= policies]
            if not all(accepts_weights(each.version, seq_no) for each in covered):
                return False
            self.count += 1
            self.newest = max(self.newest, seq_no)
            # Broadcasts with a higher number determine the version, also of weights that are set with 0.
            kept = [each for each in self._held if not each.policies <= policies or each.seq_no > seq_no]
            version = max([seq_no, *(each.version for each in covered)])
            self._held = [*kept, _Held(self.count, reference, policies, seq_no, version)]
            return True

    def since(self, number: int) -> list[Any]:
        """Return references to the broadcasts after number ``number``, in order."""
        return self.snapshot(number)[1]

    def snapshot(self, number: int) -> tuple[int, list[Any]]:
        """Return `count` and `since`, read at one moment."""
        with self._lock:
            return self.count, [each.reference for each in self._held if each.number > number]
