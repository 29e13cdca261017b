"""A KeyboardInterrupt at any line of a call into the library."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["interrupted_at"]


def _place(frame: Any) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno


def interrupted_at(line: int, call: Callable[[], object], *, passes: tuple[str, ...] = ()) -> str | None:
    """Make the call, with a KeyboardInterrupt at its ``line``-th line in the library, if there is one.

    Args:
        line: Number of the line, from 0.
        call: The call.
        passes: Beginnings of further lines that do not count.

    Returns:
        The line that was interrupted; None: there is none.
    """
    left = line

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        if "rlio" not in frame.f_globals.get("__name__", ""):
            return None
        # CPython handles no signal at these, and releases no lock that an exception meets there: the end of a
        # with block shows as its first line, and "try:" in a with block is not covered by it.
        if event == "line" and not text_of(frame).startswith(("with ", "try:", *passes)):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt(text_of(frame))
        return trace

    def text_of(frame: Any) -> str:
        return linecache.getline(*_place(frame)).strip()

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        return str(error)
    finally:
        sys.settrace(None)
    return None
