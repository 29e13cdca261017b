"""Many small requests: several at once where each takes a round trip."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from rlio.storage.filesystem import Storage

__all__ = ["each"]

T = TypeVar("T")
S = TypeVar("S")

# As many as object stores take from one client without asking it to slow down.
_REQUESTS: Final = 16


def each(storage: Storage, work: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """What ``work`` gives for each item, in order; on remote stores several items are worked on at once.

    The first error is raised when its turn comes; of the items after it, those that were begun are done.
    """
    if storage.is_local or len(items) < 2:
        yield from map(work, items)
        return
    # Connections, and what is looked up once, are made by the first alone.
    yield work(items[0])
    with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="rlio-requests") as pool:
        try:
            yield from pool.map(work, items[1:])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
