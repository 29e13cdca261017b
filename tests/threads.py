"""Helpers of tests that call one object from several threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["THREADS", "in_a_thread", "together"]

#: As many threads as the law names.
THREADS = 8
#: Seconds that a call may take which waits for nothing: a deadlock is then a failure, not a hanging run.
DEADLINE = 60.0


@contextmanager
def switching_often() -> Iterator[None]:
    """Threads that change places every few lines, where they would every few thousand."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make calls at one moment, each in a thread of its own; return their results, or errors."""
    results: list[Any] = [None] * len(calls)
    ready = threading.Barrier(len(calls))

    def run(number: int) -> None:
        try:
            ready.wait()
            results[number] = calls[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    with switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads), "a call never returned"
    return results


class in_a_thread:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: Any = None

        def run() -> None:
            try:
                self._result = call()
            except BaseException as error:
                self._result = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def is_running(self, seconds: float = 0.0) -> bool:
        """Whether the call has not returned after some seconds."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def result(self) -> Any:
        """What the call returned, or its error."""
        assert not self.is_running(DEADLINE), "the call never returned"
        return self._result
