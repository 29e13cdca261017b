"""`Described`: a `repr` that says in one line what an object holds, and the same for notebooks.

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

from rlio.support.html import Html, lines, panel

__all__ = ["Described"]

# Characters within the parentheses.
_LENGTH = 150


class Described:
    """Has a `repr` of the parts that `_describe` gives. It does no I/O, takes no lock and never raises."""

    def _describe(self) -> Iterator[str]:
        """The parts, the most important first: from plain attributes, with ``!r`` or `excerpt` for texts."""
        yield from ()

    def _tables(self) -> Iterator[Html]:
        """What notebooks show below the parts, such as the columns, without a pass over data."""
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

    def _repr_html_(self) -> str:
        parts: list[str] = []
        tables: list[Html] = []
        try:
            parts.extend(self._describe())
            tables.extend(self._tables())
        except Exception:  # As in the `repr`; also columns of a data set that is away or damaged.
            parts.append("...")
        if getattr(self, "_closed", False):
            parts.append("closed")
        return panel(type(self).__name__, lines(parts), *tables)
