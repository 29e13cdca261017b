"""Many small requests: several at once where each takes a round trip."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from rlio.storage.filesystem import Storage

__all__ = ["each"]

T = TypeVar("T")
S = TypeVar("S")

# As many as object stores take from one client without asking it to slow down.
_REQUESTS: Final = 16


def each(
    storage: Storage, work: Callable[[S], T], items: Sequence[S], *, ahead: int | None = None
) -> Iterator[T]:
    """What ``work`` gives for each item, in order; on remote stores several items are worked on at once.

    The first error is raised when its turn comes; of the items after it, those that were begun are done.

    Args:
        storage: Where the requests go.
        work: Makes them.
        items: What each is for.
        ahead: Results that are made before they are asked for, at most: where they take much memory.
    """
    if storage.is_local or len(items) < 2:
        yield from map(work, items)
        return
    # Connections, and what is looked up once, are made by the first alone.
    yield work(items[0])
    coming: deque[Future[T]] = deque()
    with ThreadPoolExecutor(min(ahead or _REQUESTS, _REQUESTS), thread_name_prefix="rlio-requests") as pool:
        try:
            for item in items[1:]:
                coming.append(pool.submit(work, item))
                if ahead is not None and len(coming) > ahead:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
