"""Sets of row numbers as lists of ranges.

Example:
    >>> joined([range(5, 9), range(0, 3), range(3, 6)])
    [range(0, 9)]
    >>> without([range(0, 9)], [range(2, 4), range(8, 20)])
    [range(0, 2), range(4, 8)]
    >>> common([range(0, 9)], [range(2, 4), range(8, 20)])
    [range(2, 4), range(8, 9)]
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["common", "joined", "without"]


def joined(ranges: Iterable[range]) -> list[range]:
    """The same rows as ascending ranges that do not touch each other."""
    found: list[range] = []
    for part in sorted((part for part in ranges if part), key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return found


def without(ranges: Iterable[range], others: Iterable[range]) -> list[range]:
    """The rows of ``ranges`` that are not in ``others``."""
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
    """The rows in both."""
    ours = joined(ranges)
    return without(ours, without(ours, others))
