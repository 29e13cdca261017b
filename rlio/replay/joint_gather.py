"""Rows of several stores gathered into one batch: what a mixture of them would otherwise join from copies.

Readers of stores offer their next rows as a `RowSource`: which rows come is told without reading them, so
that those of all sources are taken at once, each to its place, and cut into columns together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.replay.buffers import Buffers
from rlio.replay.draws import RowUnits

__all__ = ["JointGather", "RowSource"]

Ids = NDArray[np.int64]

# `numpy.ndarray.take` of a table, the rows to take, and where they go.
_Piece: TypeAlias = tuple[Callable[..., object], Ids, NDArray[Any]]
# Pieces that are remembered, of 200 bytes each, at most.
_PIECES: Final = 16_384


class RowSource(Protocol):
    """The next rows of a reader, by their places in a store."""

    @property
    def row_units(self) -> RowUnits | None:
        """What they are units of; None if they are not single rows of a store, or not all of them its own."""

    def peek(self, n: int) -> Ids | None:
        """The numbers of the next ``n`` units; None if the reader has fewer left."""

    def advance(self, n: int) -> None:
        """Step over the next ``n`` units, which were given."""


class JointGather:
    """Gathers batches that have rows of every source, in the sources' order.

    Args:
        sources: Whose packed rows are alike; see `of`.
    """

    def __init__(self, sources: Sequence[tuple[RowSource, RowUnits]]) -> None:
        self._sources = sources
        self._buffers = Buffers()
        #: Numbers of the rows, source by source, and the rows themselves, batch by batch.
        self._rows: Ids = np.empty(0, np.int64)
        self._packed: NDArray[Any] = np.empty(0, np.void)
        #: Shares -> what copies the rows that they say.
        self._known: dict[tuple[tuple[int, ...], ...], list[_Piece]] = {}

    @classmethod
    def of(cls, sources: Sequence[RowSource | None]) -> JointGather | None:
        """One over the given sources; None where they cannot be gathered together."""
        found = []
        for source in sources:
            units = None if source is None else source.row_units
            if source is None or units is None or not units.is_packed:
                return None
            found.append((source, units))
        first = found[0][1]
        if any(not units.looks_like(first) for _, units in found):
            return None
        return cls(found)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._sources[0][1].table.row.itemsize

    def columns(self, shares: Sequence[tuple[int, ...]]) -> dict[str, NDArray[Any]] | None:
        """The rows of several batches, one after the other: column -> contiguous array.

        Args:
            shares: For each batch, the rows of each source.

        Returns:
            None if a source has fewer rows left.
        """
        wanted = []
        for (source, units), own in zip(self._sources, zip(*shares, strict=True), strict=True):
            numbers = source.peek(sum(own))
            if numbers is None:
                return None
            wanted.append(units.rows(numbers))
        total = sum(map(len, wanted))
        if total != len(self._rows):
            self._make_room(total)
        np.concatenate(wanted, out=self._rows)
        for take, rows, target in self._pieces(tuple(shares)):
            take(rows, None, target, "clip")
        first = self._sources[0][1]
        return first.named(first.table.unpacked(self._packed, first.plan, self._buffers))

    def _make_room(self, rows: int) -> None:
        """Memory for so many row numbers, and for their rows; what is given to users is copied from it."""
        self._rows = np.empty(rows, np.int64)
        self._packed = np.empty(rows, self._sources[0][1].table.void)
        self._known.clear()

    def _pieces(self, shares: tuple[tuple[int, ...], ...]) -> list[_Piece]:
        """What copies the rows of each batch from each source, one after the other.

        They are remembered: shares come again, and to make the views takes as long as to copy the rows.
        """
        found = self._known.get(shares)
        if found is not None:
            return found
        starts = [0, *accumulate(map(sum, zip(*shares, strict=True)))]
        pieces: list[_Piece] = []
        at = 0
        for share in shares:
            for i, count in enumerate(share):
                if count:
                    start = starts[i]
                    starts[i] = stop = start + count
                    take = self._sources[i][1].table.packed_values.take
                    pieces.append((take, self._rows[start:stop], self._packed[at : at + count]))
                    at += count
        if (len(self._known) + 1) * len(pieces) > _PIECES:
            self._known.clear()
        self._known[shares] = pieces
        return pieces
