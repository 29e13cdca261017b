"""`MixBlock`: the next batches of a mixture, assembled at once and served one by one.

Assembling a batch costs some calls for each source and column, however few its rows are. Sixteen batches at
once share these calls.

Example:
    >>> first, second = SampleBatch(t=np.arange(6)), SampleBatch(t=np.arange(10, 14))
    >>> shares = [[3, 1], [1, 3]]
    >>> columns = woven([[first], [second]], shares, Buffers())
    >>> block = MixBlock(columns, shares=shares, batch_size=4)
    >>> [block.cut()["t"].tolist() for _ in range(2)]
    [[0, 1, 2, 10], [3, 11, 12, 13]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.replay.buffers import Buffers, batch_dtype

__all__ = ["MixBlock", "plain_columns", "woven"]

Arrays = dict[str, NDArray[Any]]


class MixBlock:
    """Batches whose rows are stored one batch after the other.

    Args:
        columns: Name -> the rows of all batches.
        shares: For each batch, the number of rows from each source.
        batch_size: Rows of each batch.
    """

    def __init__(
        self, columns: Mapping[str, NDArray[Any]], *, shares: Sequence[Sequence[int]], batch_size: int
    ) -> None:
        self._columns = columns
        self._shares = shares
        self._size = batch_size
        self._given = self._settled = 0

    @property
    def is_spent(self) -> bool:
        """Whether all batches were served."""
        return self._given == len(self._shares)

    def cut(self) -> SampleBatch:
        """The next batch; the caller owns it, and no other batch has its rows."""
        rows = slice(self._given * self._size, (self._given + 1) * self._size)
        self._given += 1
        return SampleBatch._trusted({name: column[rows] for name, column in self._columns.items()})

    def settle(self) -> list[int]:
        """Rows of each source that were served since the last call; empty if there are none."""
        given = self._shares[self._settled : self._given]
        self._settled = self._given
        return [sum(rows) for rows in zip(*given, strict=True)]


def plain_columns(batch: object) -> Arrays | None:
    """The columns of rows that can be woven: plain arrays with a row a step; None for other rows.

    Objects cannot be woven, because their size differs from row to row.
    """
    if not isinstance(batch, SampleBatch) or batch.num_grad_updates is not None:
        return None
    if batch.zero_padded or batch._max_seq_len is not None or "seq_lens" in batch._columns:
        return None
    columns: Arrays = {}
    for name, column in batch._columns.items():
        if type(column) is not np.ndarray or column.dtype.hasobject:
            return None
        columns[name] = column
    return columns


def woven(
    parts: Sequence[Sequence[SampleBatch]], shares: Sequence[Sequence[int]], buffers: Buffers
) -> Arrays | None:
    """Weave rows of several sources into the order of the mixture's batches.

    Args:
        parts: For each source, batches that hold the rows it gives, and perhaps more.
        shares: For each batch of the mixture, the number of rows from each source.
        buffers: Provides the memory.

    Returns:
        Copies; None if the parts are not plain rows with the same columns.
    """
    taken = [plain_columns(part) for part in chain.from_iterable(parts)]
    columns = [each for each in taken if each is not None]
    if len(columns) < len(taken) or not columns:
        return None
    kinds = [[(name, own.dtype, own.shape[1:]) for name, own in each.items()] for each in columns]
    if any(kind != kinds[0] for kind in kinds):
        return None
    pieces = _pieces([[len(part) for part in own] for own in parts], shares)
    rows = sum(map(sum, shares))
    out = buffers.columns(batch_dtype(rows, {name: (dtype, shape) for name, dtype, shape in kinds[0]}))
    for name, target in out.items():
        arrays = [each[name] for each in columns]
        np.concatenate([arrays[i][start:stop] for i, start, stop in pieces], out=target)
    return out


def _pieces(sizes: Sequence[Sequence[int]], shares: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """The ranges of rows in output order: index of a part, counted over all sources, start and stop."""
    first, number = [], 0  # For each source: index of its current part; `used` counts the rows used of it.
    for own in sizes:
        first.append(number)
        number += len(own)
    flat = list(chain.from_iterable(sizes))
    at, used = first, [0] * len(sizes)
    pieces = []
    for share in shares:
        for i, missing in enumerate(share):
            while missing:
                start = used[i]
                size = min(missing, flat[at[i]] - start)
                if size:
                    pieces.append((at[i], start, start + size))
                used[i] = start + size
                missing -= size
                if used[i] == flat[at[i]]:
                    at[i], used[i] = at[i] + 1, 0
    return pieces
