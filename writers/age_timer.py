"""A timer that bounds the age of rows that are only in memory, also when no further write comes.

Example:
    >>> import threading
    >>> fired = threading.Event()
    >>> timer = AgeTimer(0.001, fired.set)
    >>> timer.start()
    >>> fired.wait(10)
    True
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["AgeTimer"]


class AgeTimer:
    """Calls ``act`` from a thread of its own, ``seconds`` after the first `start` since the last `stop`.

    Args:
        seconds: None: never.
        act: Must take its own lock: a `stop` may come too late to prevent a call.
    """

    def __init__(self, seconds: float | None, act: Callable[[], object]) -> None:
        self._seconds = seconds
        self._act = act
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Begin to count, unless it has begun."""
        if self._timer is None and self._seconds is not None:
            self._timer = threading.Timer(self._seconds, self._act)
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """Count no more, until the next `start`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
