"""Numbers of stored rows: cuts decoded groups at row numbers, and handles sets of rows as lists of ranges.

A snapshot or a cursor may cut a group. With several agents, the rows of a written batch are stored policy by
policy. A range of rows is then one range of each policy's rows.

Example:
    >>> import numpy as np
    >>> each = SampleBatch(eps_id=[7, 7, 7], t=[0, 1, 2])
    >>> both = MultiAgentBatch({"a": each, "b": each.copy()}, 3)
    >>> owners = {"a": np.array([0, 1, 4]), "b": np.array([2, 3, 5])}
    >>> cut_rows(both, range(4, 6), owners, uri="shard")["b"]["t"]
    array([2])
    >>> joined([range(5, 9), range(0, 3), range(3, 6)])
    [range(0, 9)]
    >>> without([range(0, 9)], [range(2, 4), range(8, 20)])
    [range(0, 2), range(4, 8)]
    >>> common([range(0, 9)], [range(2, 4), range(8, 20)])
    [range(2, 4), range(8, 9)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch, count_units
from rlio.batch.columns import Columns
from rlio.errors import CorruptData, SchemaError

__all__ = ["common", "cut_rows", "joined", "without"]


def cut_rows(
    batch: SampleBatch | MultiAgentBatch,
    rows: range,
    owners: Mapping[str, NDArray[Any] | None] | None,
    *,
    uri: str,
) -> SampleBatch | MultiAgentBatch:
    """Return the part of a group's batch that lies in ``rows``, as views.

    Args:
        batch: The whole group.
        rows: Numbers of rows within the group.
        owners: Policy id -> the numbers of its rows, ascending (None: all rows). None if the rows are ordered
            policy by policy.
        uri: The shard, for messages.

    Raises:
        CorruptData: A sequence lies across an end of ``rows``.
    """
    try:
        if isinstance(batch, SampleBatch):
            part: SampleBatch = batch[rows.start : rows.stop]
            return part
        parts: dict[str, SampleBatch] = {}
        before = 0
        for pid, own in batch.items():
            numbers = None if owners is None else owners.get(pid)
            if numbers is None:
                numbers = np.arange(before, before + own.count)
            before += own.count
            first, last = np.searchsorted(numbers, [rows.start, rows.stop]).tolist()
            if last > first:
                parts[pid] = own[first:last]
    except SchemaError as error:
        raise CorruptData(
            f"only rows {rows.start} to {rows.stop - 1} of a group are live, and a sequence lies across the "
            f"cut: {error}",
            uri=uri,
            column=Columns.SEQ_LENS,
        ) from error
    return MultiAgentBatch(parts, count_units(MultiAgentBatch(parts, 0), "steps"))


def joined(ranges: Iterable[range]) -> list[range]:
    """Return the same rows as ascending ranges that do not touch each other."""
    found: list[range] = []
    for part in sorted((part for part in ranges if part), key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return found


def without(ranges: Iterable[range], others: Iterable[range]) -> list[range]:
    """Return the rows of ``ranges`` that are not in ``others``."""
    left: list[range] = []
    holes = joined(others)
    for part in joined(ranges):
        start = part.start
        for hole in holes:
            if hole.stop <= start:
                continue
            if hole.start >= part.stop:
                break
            if hole.start > start:
                left.append(range(start, hole.start))
            start = hole.stop
        if start < part.stop:
            left.append(range(start, part.stop))
    return left


def common(ranges: Iterable[range], others: Iterable[range]) -> list[range]:
    """Return the rows that are in both."""
    ours = joined(ranges)
    return without(ours, without(ours, others))
