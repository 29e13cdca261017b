"""Numbers in sentences.

Example:
    >>> counted(1, "writer"), counted(0, "row"), counted(12_000, "entry")
    ('1 writer', '0 rows', '12,000 entries')
    >>> and_more(["a", "b", "c"], 2), and_more(["a", "b"], 2)
    ('a, b and 1 more', 'a, b')
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["and_more", "counted", "one_line"]


def counted(number: int, noun: str) -> str:
    """A number and its noun, in the plural unless it is one; of regular nouns in lower case."""
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in "aeiou" else f"{noun}s"
    return f"{number:,} {noun}"


def and_more(parts: Sequence[str], most: int) -> str:
    """The first of the parts, and how many there are more."""
    rest = len(parts) - most
    return ", ".join(parts[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def one_line(text: str, most: int) -> str:
    """A text of strangers on one line: escapes replace what does not print; long ones are cut."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."
