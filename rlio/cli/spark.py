"""Lines of numbers as small drawings: a series, and a histogram.

Example:
    >>> sparkline([0, 1, 2, 3], width=4), sparkline([5, 5, 5], width=3), sparkline([], width=3)
    ('▁▃▆█', '▄▄▄', '')
    >>> sparkline(range(100), width=5), histogram([1, 1, 1, 9], width=4)
    ('▁▃▅▆█', '█▁▁▃')
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

__all__ = ["histogram", "sparkline"]

_LEVELS = "▁▂▃▄▅▆▇█"
#: For terminals whose encoding lacks the others.
_ASCII = "_.-:=+*#"


def sparkline(values: Iterable[float], *, width: int, encoding: str | None = None) -> str:
    """Draw a series: each character is the mean of its part of the values.

    Values that are not finite are left out.

    Args:
        values: The series.
        width: Most characters.
        encoding: That of the output; None: UTF-8.
    """
    known = [float(value) for value in values if math.isfinite(value)]
    if not known:
        return ""
    count = min(width, len(known))
    ends = [len(known) * part // count for part in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(ends)]
    return _drawn(means, min(means), max(means), encoding)


def histogram(values: Iterable[float], *, width: int, encoding: str | None = None) -> str:
    """Draw how many values lie in each of ``width`` equal parts of their range."""
    known = [float(value) for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    counts = [0] * width
    for value in known:
        counts[min(width - 1, int((value - low) / (high - low) * width)) if high > low else width // 2] += 1
    return _drawn(counts, 0, max(counts), encoding)


def _drawn(values: Iterable[float], low: float, high: float, encoding: str | None) -> str:
    levels = _LEVELS
    try:
        _LEVELS.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        levels = _ASCII
    if high <= low:
        return "".join(levels[len(levels) // 2 - 1] for _ in values)
    scale = (len(levels) - 1) / (high - low)
    return "".join(levels[round((value - low) * scale)] for value in values)
