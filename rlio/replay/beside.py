"""One piece of work beside another: half of the columns of a batch, while the other half is gathered here.

A thread for each piece, and no pool: the threads of a pool are gone in a forked child, which then waits for
ever, and somebody has to end them. A thread costs a tenth of a millisecond.

Example:
    >>> result = beside(lambda: 6 * 7)
    >>> result()
    42
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["beside"]

T = TypeVar("T")


def beside(job: Callable[[], T]) -> Callable[[], T]:
    """Begin ``job`` in a thread of its own; what is returned waits for its result, or raises its error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="rlio-beside", daemon=True).start()
    except RuntimeError:  # The interpreter is about to exit, or the system has no thread left.
        return job
    return future.result
