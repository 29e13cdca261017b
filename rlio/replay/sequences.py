"""Which sequences, or whole episodes, a table holds: where each begins, and how many rows it may have.

A chain is what was recorded of an episode without a gap. Sequences of one chain begin ``length - overlap``
rows apart, the first at its start; each may be preceded by up to ``burn_in`` rows that only warm up the
recurrent state, fewer where the chain begins.

Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning" (R2D2, 2019),
for burn-in and overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError, excerpt
from rlio.replay.table import RowTable

__all__ = ["Sequences", "chain_rows", "completed_sequences"]

Ids = NDArray[np.int64]

# Links of each episode that are looked at first, then twice as many, and so on; and of all, at most.
_FIRST_LOOK: Final = 64
_MOST_LOOKED_AT: Final = 1 << 17


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


def completed_sequences(table: RowTable, rows: Ids, cut: Sequences) -> tuple[Ids, Ids]:
    """The sequences that there are as soon as the given rows are, and not before.

    Behind its burn-in, a sequence has a row of its own, and one that the sequence before has not.

    Args:
        table: Holds the rows.
        rows: Logical numbers.
        cut: How chains are cut.

    Returns:
        Logical numbers of their first rows, burn-in included, and how many rows are burn-in; in the order of
        the rows, without those whose first rows are forgotten.
    """
    at = table.places(rows)
    # Place of the row with which the sequence that a row completes begins behind its burn-in.
    begin = np.maximum(at - cut.overlap, 0)
    completes = (at == 0) | ((begin > 0) & (begin % (cut.length - cut.overlap) == 0))
    rows, at, begin = rows[completes], at[completes], begin[completes]
    burn_in = np.minimum(begin, cut.burn_in)
    firsts = _preceding(table, rows, at - begin + burn_in)
    known = firsts >= 0
    return firsts[known], burn_in[known]


def _preceding(table: RowTable, rows: Ids, steps: Ids) -> Ids:
    """The row that comes ``steps`` before each row in its episode, or -1."""
    found = rows.copy()
    for step in range(int(steps.max(initial=0))):
        going = np.flatnonzero((steps > step) & (found >= 0))
        if not len(going):
            break
        found[going] = table.predecessors(found[going])
    return found


def chain_rows(table: RowTable, starts: Ids, most: Ids, *, head: int) -> tuple[Ids, Ids]:
    """The rows of episodes from given rows on.

    Rows of an episode mostly lie equally far apart: side by side, or as many rows as there are environments.
    Such runs are found at once.

    Args:
        table: Holds them.
        starts: Logical numbers of the first rows, shape (n,).
        most: How many rows of each at most, shape (n,); at least 1.
        head: Rows from here on are taken to be not there.

    Returns:
        The rows of one after the other, and how many each has, shape (n,).
    """
    live, front, left = np.arange(len(starts)), starts, most
    found, owners, look = [starts[:0]], [live[:0]], _FIRST_LOOK
    while len(live):
        look = max(min(look, int(left.max()), _MOST_LOOKED_AT // len(live)), 1)
        distance = table.distances(front)[:, None]
        rows = front[:, None] + distance * np.arange(look)
        goes_on = (table.distances(np.minimum(rows, head - 1)) == distance) & (distance > 0)
        goes_on &= (rows + distance < head) & (np.arange(1, look + 1) < left[:, None])
        taken = np.ones(rows.shape, bool)
        np.logical_and.accumulate(goes_on[:, :-1], axis=1, out=taken[:, 1:])
        sizes = taken.sum(axis=1)
        found.append(rows[taken])
        owners.append(np.repeat(live, sizes))
        if (sizes == look).any():
            look *= 2
        last, left = rows[np.arange(len(live)), sizes - 1], left - sizes
        following = table.successors(last, head=head)
        going = np.flatnonzero((following >= 0) & (left > 0))
        live, front, left = live[going], following[going], left[going]
    owner = np.concatenate(owners)
    rows = np.concatenate(found)
    if len(found) > 2:
        rows = rows[np.argsort(owner, kind="stable")]
    return rows, np.bincount(owner, minlength=len(starts))
