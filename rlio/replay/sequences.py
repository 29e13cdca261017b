"""Which sequences, or whole episodes, a table holds: where each begins, and how many rows it may have.

A chain is what was recorded of an episode without a gap. Sequences of one chain begin ``length - overlap``
rows apart, the first at its start; each may be preceded by up to ``burn_in`` rows that only warm up the
recurrent state, fewer where the chain begins.

Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning" (R2D2, 2019),
for burn-in and overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError, excerpt
from rlio.replay.table import RowTable

__all__ = ["SequenceStarts", "Sequences", "episode_starts", "follow", "sequence_starts"]

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Sequences:
    """How episodes are cut.

    Attributes:
        length: Rows of a sequence, burn-in not counted; at least 1.
        burn_in: Rows before them, at most.
        overlap: Rows that a sequence shares with the one before; less than ``length``.
    """

    length: int
    burn_in: int = 0
    overlap: int = 0

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("burn_in", 0), ("overlap", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                shown = "sequence_length" if name == "length" else name
                raise OptionError(f"{shown}={excerpt(value)}: a number of rows, at least {least}")
        if self.overlap >= self.length:
            raise OptionError(
                f"overlap={self.overlap}: less than the {self.length} rows of a sequence, or none would begin"
            )


@dataclass(frozen=True)
class SequenceStarts:
    """Sequences, by their first rows.

    Attributes:
        rows: Logical number of the first row, burn-in included, shape (n,).
        burn_in: How many of the rows from there on are burn-in, shape (n,).
    """

    rows: Ids
    burn_in: Ids

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, numbers: Ids) -> SequenceStarts:
        """Those of the given numbers."""
        return SequenceStarts(self.rows[numbers], self.burn_in[numbers])


def sequence_starts(
    table: RowTable, rows: Ids, at: Ids, cut: Sequences, *, head: int | None = None
) -> SequenceStarts:
    """The sequences whose first rows are among ``rows``, in their order.

    Args:
        table: Holds them.
        rows: Logical numbers.
        at: Their places in their chains.
        cut: How chains are cut.
        head: Rows from here on are taken to be not there; None: all are.
    """
    step = cut.length - cut.overlap
    # The first row of the chain begins every sequence whose burn-in would reach before it.
    early = np.arange(0, cut.burn_in + 1, step)
    late = np.flatnonzero((at > 0) & ((at + cut.burn_in) % step == 0))
    first = np.flatnonzero(at == 0)
    place = np.concatenate([np.repeat(first, len(early)), late])
    burn_in = np.concatenate([np.tile(early, len(first)), np.full(len(late), cut.burn_in)])
    order = np.lexsort((burn_in, place))
    starts = SequenceStarts(rows[place[order]], burn_in[order])
    # Behind its burn-in, a sequence has a row of its own, and one that the sequence before has not.
    own = follow(table, starts.rows, starts.burn_in, head=head) >= 0
    if cut.overlap:
        begins = starts.burn_in + at[place[order]] > 0
        fresh = follow(table, starts.rows, starts.burn_in + cut.overlap * begins, head=head) >= 0
        own &= fresh
    return starts.take(np.flatnonzero(own))


def episode_starts(rows: Ids, at: Ids) -> Ids:
    """The rows, of those given, with which chains begin."""
    found: Ids = rows[at == 0]
    return found


def follow(table: RowTable, rows: Ids, steps: Ids, *, head: int | None = None) -> Ids:
    """The row that comes ``steps`` after each row in its episode, or -1."""
    found = rows.copy()
    for step in range(int(steps.max(initial=0))):
        going = np.flatnonzero((steps > step) & (found >= 0))
        if not len(going):
            break
        found[going] = table.successors(found[going], head=head)
    return found
