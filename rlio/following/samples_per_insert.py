"""`SamplesPerInsert`: limits on how often rows are drawn for each inserted row; `Account` counts both.

Example:
    >>> account = Account(SamplesPerInsert(max=4, min_size=1000, error_buffer=256))
    >>> account.may_draw
    0
    >>> account.insert(1100)
    >>> account.may_draw  # 4 * (1100 - 1000) + 256
    656
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

from rlio.errors import LedgerError, OptionError
from rlio.support.options import check_count, check_number, set_options

__all__ = ["NO_BOUND", "Account", "SamplesPerInsert"]

#: Allowed rows where there is no limit; a count never reaches this number.
NO_BOUND: Final = 2**62

# Limits of a ratio: far outside all sensible values, and far inside the range of exact arithmetic on whole
# rows.
_LEAST, _MOST = 1e-6, 1e6


@dataclass(frozen=True, kw_only=True)
class SamplesPerInsert:
    """The minimum and maximum number of rows drawn for each row put in.

    With I rows put in and S rows drawn, at every moment::

        S <= max * (I - min_size) + error_buffer       or else a draw waits
        I <= min_size + (S + error_buffer) / min       or else an insert waits

    and no row is drawn before I reaches ``min_size``. With ``min == max`` these are the limits of Reverb's
    ``SampleToInsertRatio(samples_per_insert, min_size_to_sample, error_buffer)``.

    Attributes:
        min: Least rows drawn for each row put in; None: inserts never wait for draws.
        max: Most rows drawn for each row put in; None: draws never wait, once there are ``min_size`` rows.
        error_buffer: Drawn rows by which each side may be ahead of the ratio. A larger buffer means less
            waiting. With ``min``, use about the rows that are drawn in the seconds that it takes to store,
            list and read rows, and to inform writers.
        min_size: Rows that are put in before the first draw; they allow no draws.

    Raises:
        OptionError: A number is out of bounds, or ``min`` is above ``max``.

    Source: Cassirer et al., "Reverb: A Framework For Experience Replay" (2021), section 3.3.
    """

    min: float | None = None
    max: float | None = None
    error_buffer: int = 0
    min_size: int = 1

    def __post_init__(self) -> None:
        for name in ("min", "max"):
            rate = check_number(
                f"SamplesPerInsert.{name}",
                getattr(self, name),
                least=_LEAST,
                most=_MOST,
                of="rows drawn for each row put in",
                none="no limit",
            )
            set_options(self, **{name: rate})
        for name, least in (("error_buffer", 0), ("min_size", 1)):
            found, most = getattr(self, name), NO_BOUND - 1
            rows = check_count(f"SamplesPerInsert.{name}", found, least=least, most=most, of="rows")
            set_options(self, **{name: rows})
        if self.min is not None and self.max is not None and self.min > self.max:
            raise OptionError(
                f"SamplesPerInsert(min={self.min!r}, max={self.max!r}): expected min to be at most max"
            )

    def most_drawn(self, inserted: int) -> int:
        """Rows that may have been drawn after ``inserted`` rows were put in."""
        if inserted < self.min_size:
            return 0
        if self.max is None:
            return NO_BOUND
        return math.floor(_exact(self.max) * (inserted - self.min_size)) + self.error_buffer

    def most_inserted(self, drawn: int) -> int:
        """Rows that may have been put in after ``drawn`` rows were drawn."""
        if self.min is None:
            return NO_BOUND
        return min(self.min_size + math.floor((drawn + self.error_buffer) / _exact(self.min)), NO_BOUND)

    def check_batch(self, rows: int) -> None:
        """Refuse limits that deadlock with batches of ``rows`` rows.

        Draws and inserts can only wait for each other if the buffer is narrow: rows are put in until I is one
        below its limit, and the draw needs ``S + rows <= max * ...``.

        Raises:
            OptionError: They would wait for each other.
        """
        if self.min is None or self.max is None:
            return
        room = _exact(self.max) / _exact(self.min) + 1
        needed = math.ceil((rows + _exact(self.max)) / room)
        if self.error_buffer < needed:
            raise OptionError(
                f"{self}: with batches of {rows} rows, draws and inserts would wait for each other without "
                f"end; use error_buffer={needed} or more"
            )


class Account:
    """Counts rows put in and rows drawn, and how many more of each are allowed. Not thread-safe.

    Args:
        limits: The limits.
        inserted: Rows put in so far.
        drawn: Rows drawn so far.
    """

    def __init__(self, limits: SamplesPerInsert, *, inserted: int = 0, drawn: int = 0) -> None:
        self.limits = limits
        self.inserted: int = inserted
        self.drawn: int = drawn
        self._most_drawn = limits.most_drawn(inserted)  # Kept, because each draw reads it.

    def __repr__(self) -> str:
        return f"Account(inserted={self.inserted}, drawn={self.drawn}, {self.limits})"

    @property
    def may_draw(self) -> int:
        """Rows that may be drawn now; 0 or more."""
        return max(self._most_drawn - self.drawn, 0)

    @property
    def may_insert(self) -> int:
        """Rows that may be put in now; 0 or more."""
        return max(self.limits.most_inserted(self.drawn) - self.inserted, 0)

    def draw(self, rows: int) -> None:
        """Count drawn rows.

        Raises:
            LedgerError: The rows exceed `may_draw`.
        """
        if rows > self.may_draw:
            raise LedgerError(f"{rows} rows were drawn where {self.may_draw} may be: {self}; report this bug")
        self.drawn += rows

    def insert(self, rows: int) -> None:
        """Count rows that were put in.

        Raises:
            LedgerError: The rows exceed `may_insert`.
        """
        if rows > self.may_insert:
            raise LedgerError(
                f"{rows} rows were put in where {self.may_insert} may be: {self}; report this bug"
            )
        self.inserted += rows
        self._most_drawn = self.limits.most_drawn(self.inserted)


@lru_cache(16)
def _exact(ratio: float) -> Fraction:
    """The decimal number that the user wrote: 0.1 is exactly a tenth."""
    return Fraction(repr(ratio))
