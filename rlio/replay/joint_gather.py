"""Rows of several stores gathered into one batch: what a mixture of them would otherwise join from copies.

Readers of stores offer their next rows as a `RowSource`: which rows come is told without reading them, so
that those of all sources are taken at once, each to its place, and cut into columns together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlio.replay.buffers import Buffers
from rlio.replay.draws import RowUnits

__all__ = ["JointGather", "RowSource"]

Ids = NDArray[np.int64]


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

    def columns(self, shares: Sequence[Sequence[int]]) -> dict[str, NDArray[Any]] | None:
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
        first = self._sources[0][1]
        tables = [units.table.packed_values for _, units in self._sources]
        packed = self._buffers.empty((sum(map(len, wanted)),), first.table.void)
        at, used = 0, [0] * len(wanted)
        for share in shares:
            for i, count in enumerate(share):
                if count:
                    start = used[i]
                    used[i] = stop = start + count
                    # For a few rows, every call on the way to this one would cost as much as they do.
                    tables[i].take(wanted[i][start:stop], None, packed[at : at + count], "clip")
                    at += count
        return first.named(first.table.unpacked(packed, first.plan, self._buffers))
