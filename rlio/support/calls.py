"""`call_each` calls several functions although some fail; `closing_on_error` closes what could not be opened.

Example:
    >>> called = []
    >>> call_each([("the first", lambda: called.append(1)), ("the second", lambda: called.append(2))])
    >>> called
    [1, 2]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["call_each", "closing_on_error"]


class _Closes(Protocol):
    def close(self) -> object: ...


@contextmanager
def closing_on_error(opened: _Closes) -> Iterator[None]:
    """Close ``opened`` if the block raises; otherwise it stays open, and its owner closes it."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def call_each(calls: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Make every call, also after a failure, then raise the first failure with notes on all.

    Args:
        calls: Place for the note, and function.
    """
    first: Exception | None = None
    for place, call in calls:
        try:
            call()
        except Exception as failure:
            if first is None:
                first = failure
                first.add_note(f"raised by {place}")
            else:
                first.add_note(f"{place} failed too: {failure!r}")
    if first is not None:
        raise first
