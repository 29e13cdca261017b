"""Many small requests: several at a time on stores where each takes a round trip."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from rlio.storage.filesystem import Storage

__all__ = ["each"]

T = TypeVar("T")
S = TypeVar("S")

# Requests that object stores accept from one client without throttling it.
_REQUESTS: Final = 16


def each(
    storage: Storage, work: Callable[[S], T], items: Sequence[S], *, ahead: int | None = None
) -> Iterator[T]:
    """The results of ``work`` for each item, in order; remote stores handle several items at once.

    The first error is raised in its turn. Later items that have been started are finished.

    Args:
        storage: Where the requests go.
        work: Makes the request for one item.
        items: The items.
        ahead: Most results to prepare before they are needed: for results that take much memory.
    """
    if storage.is_local or len(items) < 2:
        yield from map(work, items)
        return
    # The first item runs alone: it makes connections, and does look-ups that are needed only once.
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
