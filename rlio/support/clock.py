"""`utc_ms`: the time of this machine's clock, as rlio stores it.

Example:
    >>> utc_time(1_764_320_000_123).isoformat()
    '2025-11-28T08:53:20.123000+00:00'
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import overload

__all__ = ["utc_ms", "utc_ms_of", "utc_time"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def utc_ms() -> int:
    """Milliseconds since 1970-01-01 UTC. May jump: never compute durations from it."""
    return time.time_ns() // 1_000_000


@overload
def utc_time(milliseconds: int) -> datetime: ...
@overload
def utc_time(milliseconds: None) -> None: ...
def utc_time(milliseconds: int | None) -> datetime | None:
    """What `utc_ms` returned, as a time in UTC; None for None, and for what is no time of our calendar."""
    try:
        return None if milliseconds is None else _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return None


def utc_ms_of(time: datetime) -> int:
    """The inverse of `utc_time`. A time without a zone is local time."""
    return (time.astimezone(UTC) - _EPOCH) // timedelta(milliseconds=1)
