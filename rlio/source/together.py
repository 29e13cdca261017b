"""`Together`: which opened segments are decoded together, because each costs as much as some hundred rows.

Example:
    >>> together = Together()
    >>> together.takes(shard, 10)                                            # doctest: +SKIP
    True
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["MOST_OPEN", "RUN_BYTES", "RUN_ROWS", "Together"]

#: Up to so many rows, and bytes, short groups are read as one.
RUN_ROWS: Final = 4096
RUN_BYTES: Final = 4 << 20
#: Up to so many segments are opened for it by what reads a whole data set: more save little, and each takes
#: memory while it is open.
MOST_OPEN: Final = 64


class Together:
    """Collects segments of one group each, up to `RUN_ROWS` and `RUN_BYTES`.

    Args:
        most: The most segments; None: any number.

    Attributes:
        opened: Those that were taken.
    """

    def __init__(self, most: int | None = None) -> None:
        self.opened: list[Any] = []
        self._most = most
        self._rows = self._held = 0

    def has_room(self, rows: int) -> bool:
        """Whether one more, of so many rows, is not too much."""
        return self._rows + rows <= RUN_ROWS and len(self.opened) != self._most

    def takes(self, opened: Any, rows: int) -> bool:
        """Take a segment if it can be decoded with those before.

        Args:
            opened: The `rlio.source.source.OpenSegment`, whose ``form`` decides.
            rows: The rows of it that are read.
        """
        form = getattr(opened, "form", None)
        if form is None or opened.rows != [rows] or not self.has_room(rows):
            return False
        held = self._held + opened.held_bytes
        unpacked = (self._rows + rows) * opened.schema.row_bytes
        if (self.opened and form is not self.opened[0].form) or max(held, unpacked) > RUN_BYTES:
            return False
        self.opened.append(opened)
        self._rows += rows
        self._held = held
        return True
