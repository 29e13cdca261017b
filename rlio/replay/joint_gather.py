"""Gathers rows of several stores into one batch, where a mixture would otherwise join copies.

Readers of stores offer their next rows as a `RowSource`, which tells which rows come without reading them.
The rows of all sources are then copied at once, each to its place, and cut into columns together.
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
# Most pieces to remember, of 200 bytes each.
_PIECES: Final = 16_384


class RowSource(Protocol):
    """The next rows of a reader, by their places in a store."""

    @property
    def row_units(self) -> RowUnits | None:
        """The reader's units; None if they are not single rows of a store, or other ranks share them."""

    def peek(self, n: int) -> Ids | None:
        """The numbers of the next ``n`` units; None if the reader has fewer left."""

    def advance(self, n: int) -> None:
        """Skip the next ``n`` units, which were delivered."""


class JointGather:
    """Gathers batches that have rows of every source, in the order of the sources.

    Args:
        sources: Sources with equal packed rows; see `of`.
    """

    def __init__(self, sources: Sequence[tuple[RowSource, RowUnits]]) -> None:
        self._sources = sources
        self._buffers = Buffers()
        #: Numbers of the rows, source by source; and the rows themselves, batch by batch.
        self._rows: Ids = np.empty(0, np.int64)
        self._packed: NDArray[Any] = np.empty(0, np.void)
        #: Shares -> the pieces that copy their rows.
        self._known: dict[tuple[tuple[int, ...], ...], list[_Piece]] = {}

    @classmethod
    def of(cls, sources: Sequence[RowSource | None]) -> JointGather | None:
        """Combine the given sources; None if they cannot be gathered together."""
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
        """The rows of several batches, concatenated: column -> contiguous array.

        Args:
            shares: For each batch, the number of rows from each source.

        Returns:
            None if a source has too few rows left.
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
        """Allocate memory for row numbers and their rows; users get copies of it."""
        self._rows = np.empty(rows, np.int64)
        self._packed = np.empty(rows, self._sources[0][1].table.packed.dtype)
        self._known.clear()

    def _pieces(self, shares: tuple[tuple[int, ...], ...]) -> list[_Piece]:
        """The pieces that copy the rows of each batch from each source, in order.

        They are remembered, because shares repeat, and making the views takes as long as copying the rows.
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
                    take = self._sources[i][1].table.packed.take
                    pieces.append((take, self._rows[start:stop], self._packed[at : at + count]))
                    at += count
        if (len(self._known) + 1) * len(pieces) > _PIECES:
            self._known.clear()
        self._known[shares] = pieces
        return pieces
