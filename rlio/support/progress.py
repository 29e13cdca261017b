"""Progress of a long job: the caller passes a function that shows it, or watches what the job goes through.

Example:
    >>> with watched() as work:
    ...     for name in each(["a", "b"], size={"a": 30, "b": 10}.__getitem__):
    ...         for _ in each(range(2)):
    ...             print(name, work.done, "of", work.total)
    a 0 of 40
    a 15.0 of 40
    b 30.0 of 40
    b 35.0 of 40
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

__all__ = ["Progress", "Work", "each", "reached", "silent", "watched"]

T = TypeVar("T")

#: Shows the progress of one part: ``with progress(name, total) as advance: advance(done)``, in any unit.
Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@contextmanager
def silent(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show nothing."""
    yield lambda done: None


# ---- work deep below the caller: that of opening files ----


@dataclass
class Work:
    """How far some work is. Another thread may look.

    Attributes:
        total: Sizes of the things that the work goes through; 0: not known yet.
        done: Those that it went through, with a part of the present one.
        part: Where the present thing begins, and its size; None: there is none.
    """

    total: float = 0
    done: float = 0
    part: tuple[float, float] | None = None


_work: ContextVar[Work | None] = ContextVar("_work", default=None)


@contextmanager
def watched() -> Iterator[Work]:
    """Watch what `each` goes through in this thread."""
    work = Work()
    token = _work.set(work)
    try:
        yield work
    finally:
        _work.reset(token)


def each(items: Sequence[T], *, size: Callable[[T], int | None] = lambda item: 1) -> Iterator[T]:
    """Go through ``items``, so that `watched` sees how far. A loop inside another is a part of its item.

    Args:
        items: What the work goes through.
        size: How much work an item is, in any unit; None: not known.
    """
    work = _work.get()
    if work is None:
        yield from items
        return
    sizes = [size(item) or 1 for item in items]
    outer, total = work.part, sum(sizes)
    if outer is None:
        work.total = total
    start, width = outer or (0, total)
    try:
        for item, one in zip(items, sizes, strict=True):
            work.done, work.part = start, (start, width * one / total)
            yield item
            start += work.part[1]
        work.done = start
    finally:
        work.part = outer


def reached(done: float, of: float) -> None:
    """Say how much is done of the present item, or of all work if there are no items; in any unit."""
    if (work := _work.get()) is None:
        return
    if work.part is None:
        work.total = of
    start, size = work.part or (0, of)
    work.done = start + size * min(done / of, 1) if of else start
