"""When a writer finishes a shard and begins the next."""

from __future__ import annotations

from dataclasses import dataclass

from rlio.support.options import check_count, check_number, set_options

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

    Raises:
        OptionError: A limit is not a number above 0.
    """

    max_rows: int | None = None
    max_bytes: int = 64 << 20
    max_seconds: float | None = 30.0

    def __post_init__(self) -> None:
        set_options(
            self,
            max_rows=check_count("Roll.max_rows", self.max_rows, least=1, of="rows", none="no limit"),
            max_bytes=check_count("Roll.max_bytes", self.max_bytes, least=1, of="bytes"),
            max_seconds=check_number(
                "Roll.max_seconds", self.max_seconds, above=0, of="seconds", none="no limit"
            ),
        )
