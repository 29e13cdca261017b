"""`utc_ms`: the time of this machine's clock, as rlio stores it."""

from __future__ import annotations

import time

__all__ = ["utc_ms"]


def utc_ms() -> int:
    """Milliseconds since 1970-01-01 UTC. May jump: never compute durations from it."""
    return time.time_ns() // 1_000_000
