"""When a writer finishes a shard and begins the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlio.errors import OptionError, excerpt

__all__ = ["Roll"]


@dataclass(frozen=True, kw_only=True)
class Roll:
    """Limits of a shard: it is stored as soon as one of them is reached.

    Attributes:
        max_rows: Rows of a shard; None: no limit. Sequences and joint steps are not cut to fit it.
        max_bytes: Encoded bytes of a shard. One whole-object PUT must carry it: at about 100 MB object stores
            switch to multi-part uploads, which leave orphans behind when killed.
        max_seconds: Age of the oldest row that is not stored yet; None: no limit. Without a write-ahead
            log, a crash of the machine loses the rows of this time.
    """

    max_rows: int | None = None
    max_bytes: int = 64 << 20
    max_seconds: float | None = 30.0

    def __post_init__(self) -> None:
        for name, kinds, what in (
            ("max_rows", (int, np.integer, type(None)), "a positive whole number, or None for no limit"),
            ("max_bytes", (int, np.integer), "a positive whole number"),
            ("max_seconds", (int, float, np.number, type(None)), "a positive number, or None for no limit"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not (value is None or value > 0):
                raise OptionError(f"Roll({name}={excerpt(value)}): expected {what}")
