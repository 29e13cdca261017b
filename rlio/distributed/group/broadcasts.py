"""`Broadcasts`: the newest weights of a group, for workers that are there and for those that come later.

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
    #: Of workers that have it: where it has none itself, they keep the one before.
    version: int


class Broadcasts:
    """Holds references to weights; those that newer ones replace are let go. Thread-safe.

    Attributes:
        count: Broadcasts so far: the number of the newest.
        newest: The highest sequence number so far.
    """

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._lock = threading.Lock()
        self.count = 0
        self.newest = 0

    def next_seq_no(self) -> int:
        """A number that no weights have had yet; it is taken with this."""
        with self._lock:
            self.newest += 1
            return self.newest

    def add(self, reference: Any, policies: frozenset[str], *, seq_no: int) -> bool:
        """Hold ``reference``, in place of those no newer whose policies it has all of.

        Args:
            reference: To a `Broadcast`.
            policies: Ids of the policies whose weights it has.
            seq_no: Its sequence number; 0 is newer than any.

        Returns:
            Whether it is held: it is not if it is no newer than what is held for the same policies.
        """
        with self._lock:
            covered = [each for each in self._held if each.policies >= policies]
            if not all(accepts_weights(each.version, seq_no) for each in covered):
                return False
            self.count += 1
            self.newest = max(self.newest, seq_no)
            # Those with a higher number say whose version counts, also of weights that are set in any case.
            kept = [each for each in self._held if not each.policies <= policies or each.seq_no > seq_no]
            version = max([seq_no, *(each.version for each in covered)])
            self._held = [*kept, _Held(self.count, reference, policies, seq_no, version)]
            return True

    def since(self, number: int) -> list[Any]:
        """References to those after the ``number``th, in their order."""
        return self.snapshot(number)[1]

    def snapshot(self, number: int) -> tuple[int, list[Any]]:
        """`count`, and `since`, at one moment."""
        with self._lock:
            return self.count, [each.reference for each in self._held if each.number > number]
