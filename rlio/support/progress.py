"""Progress of a long job: the caller passes a function that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

__all__ = ["Progress", "silent"]

#: Shows the progress of one part: ``with progress(name, total) as advance: advance(done)``, in any unit.
Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@contextmanager
def silent(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show nothing."""
    yield lambda done: None
