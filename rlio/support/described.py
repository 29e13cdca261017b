"""`Described`: a `repr` that says in one line what an object holds.

Example:
    >>> class Box(Described):
    ...     def __init__(self, rows):
    ...         self.rows = rows
    ...     def _describe(self):
    ...         yield f"{len(self.rows)} rows"
    >>> Box([1, 2]), Box.__new__(Box)
    (Box(2 rows), Box(...))
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Described"]

# Characters within the parentheses.
_LENGTH = 150


class Described:
    """Has a `repr` of the parts that `_describe` gives. It does no I/O, takes no lock and never raises."""

    def _describe(self) -> Iterator[str]:
        """The parts, the most important first: from plain attributes, with ``!r`` or `excerpt` for texts."""
        yield from ()

    def __repr__(self) -> str:
        parts: list[str] = []
        try:
            parts.extend(self._describe())
        except Exception:  # Debuggers and tracebacks show half-made and closed objects too.
            parts.append("...")
        text = ", ".join(parts)
        if len(text) > _LENGTH:
            text = f"{text[:_LENGTH]}..."
        if getattr(self, "_closed", False):
            text += ", closed" if text else "closed"
        return f"{type(self).__name__}({text})"
