"""`Sequences` and `WholeEpisodes`: where each begins in a table, and how many rows it may have.

A chain is the part of an episode that was recorded without a gap. Sequences of one chain begin
``length - overlap`` rows apart, the first at the chain's start. Up to ``burn_in`` rows precede each sequence
and only warm up the recurrent state; near the start of a chain, fewer rows do.

Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning" (R2D2, 2019),
for burn-in and overlap.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError
from rlio.replay.table import RowTable
from rlio.support.options import check_choice, check_count, checked_keywords, set_options

__all__ = ["Sequences", "WholeEpisodes", "chain_rows", "completed_sequences"]

Ids = NDArray[np.int64]

# Links of each episode to examine first; the number doubles from there. The second limits all episodes
# together.
_FIRST_LOOK: Final = 64
_MOST_LOOKED_AT: Final = 1 << 17


STARTS: Final = ("strided", "all")
PADDINGS: Final = ("right", "left")
LAYOUTS: Final = ("rows", "time")


@checked_keywords
@dataclass(frozen=True)
class Sequences:
    """Parts of episodes, as ``draw=rlio.Sequences(20, burn_in=5)`` of readers and samplers.

    Each has ``burn_in + length`` rows, padded with zeros. Batches have ``seq_lens``, the column ``burn_in``
    (True for rows that only warm up the state), and ``state_in_k`` from the recorded ``state_out_k``.

    Attributes:
        length: Rows of a sequence, without those of ``burn_in``; at least 1.
        burn_in: Most rows before a sequence that warm up the state.
        overlap: Rows that a sequence shares with the one before; less than ``length``.
        starts: "strided": sequences begin ``length - overlap`` rows apart. "all": one begins at each row; the
            last ones of an episode are short.
        padding: Side of the zeros in a short sequence; "left" only with ``layout="time"``.
        layout: "rows": the sequences of a batch in one axis. "time": columns (sequences, rows, ...) with the
            bool column ``mask`` (True: not padding) instead of ``seq_lens``; ``state_in_k`` and priorities
            have one value a sequence.

    Raises:
        OptionError: A value is out of range, or two exclude each other.
    """

    length: int
    _: KW_ONLY
    burn_in: int = 0
    overlap: int = 0
    starts: Literal["strided", "all"] = "strided"
    padding: Literal["right", "left"] = "right"
    layout: Literal["rows", "time"] = "rows"

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("burn_in", 0), ("overlap", 0)):
            rows = check_count(f"Sequences.{name}", getattr(self, name), least=least, of="rows")
            set_options(self, **{name: rows})
        if self.overlap >= self.length:
            raise OptionError(
                f"Sequences.overlap={self.overlap}: expected less than the {self.length} rows of a sequence, "
                "or none would begin"
            )
        for name, known in (("starts", STARTS), ("padding", PADDINGS), ("layout", LAYOUTS)):
            check_choice(f"Sequences.{name}", getattr(self, name), known)
        if self.starts == "all" and self.overlap:
            raise OptionError("Sequences: starts='all' begins a sequence at each row: leave out overlap")
        if self.padding == "left" and self.layout == "rows":
            raise OptionError(
                "Sequences: padding='left' needs layout='time': seq_lens cannot mark zeros before rows"
            )

    def to_json(self) -> list[Any]:
        """The part of a saved state that names the cut."""
        more = [self.starts, self.padding, self.layout]
        return [
            self.length,
            self.burn_in,
            self.overlap,
            *(more if more != ["strided", "right", "rows"] else ()),
        ]


@dataclass(frozen=True)
class WholeEpisodes:
    """Episodes, as ``draw=rlio.WholeEpisodes()`` of readers and samplers.

    A unit is a whole episode. Batches have ``seq_lens``, the rows of each, and ``state_in_k`` from the
    recorded ``state_out_k``.
    """


def completed_sequences(table: RowTable, rows: Ids, cut: Sequences) -> tuple[Ids, Ids]:
    """Find the sequences that the given rows complete.

    After its burn-in, a sequence has at least one row, and one row that the previous sequence lacks (or, if
    one begins at each row, its own first row).

    Args:
        table: Holds the rows.
        rows: Logical numbers.
        cut: How to cut chains.

    Returns:
        Logical numbers of the sequences' first rows, burn-in included, and the numbers of burn-in rows; in
        the order of the rows, without sequences whose first rows are forgotten.
    """
    at = table.places(rows)
    # Place, after burn-in, at which the sequence that a row completes begins.
    begin = np.maximum(at - cut.overlap, 0)
    completes = (cut.starts == "all") | (at == 0) | ((begin > 0) & (begin % (cut.length - cut.overlap) == 0))
    rows, at, begin = rows[completes], at[completes], begin[completes]
    burn_in = np.minimum(begin, cut.burn_in)
    firsts = _preceding(table, rows, at - begin + burn_in)
    known = firsts >= 0
    return firsts[known], burn_in[known]


def _preceding(table: RowTable, rows: Ids, steps: Ids) -> Ids:
    """The row ``steps`` before each row in its episode, or -1."""
    found = rows.copy()
    for step in range(int(steps.max(initial=0))):
        going = np.flatnonzero((steps > step) & (found >= 0))
        if not len(going):
            break
        found[going] = table.predecessors(found[going])
    return found


def chain_rows(table: RowTable, starts: Ids, most: Ids, *, head: int) -> tuple[Ids, Ids]:
    """Collect the rows of episodes, beginning at the given rows.

    Rows of an episode are mostly equally far apart: adjacent, or as many rows apart as there are
    environments. The search handles such runs as a whole.

    Args:
        table: Holds the rows.
        starts: Logical numbers of the first rows, shape (n,).
        most: Most rows of each episode, shape (n,); at least 1.
        head: Ignore rows from this logical number on.

    Returns:
        The rows of all episodes, concatenated, and the number of rows of each, shape (n,).
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
