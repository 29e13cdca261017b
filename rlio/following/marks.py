"""Progress marks: how far followers of a data set have read, and how much more its writers may write.

A mark is an object whose name holds all its data, as in a writer's folder (`rlio.catalog.markers`)::

    <root>/_progress/<writer>/<follower>_<number>_<row>_<ceiling>

The follower ``<follower>`` has taken the rows of that writer below ``row``, and the writer may have
``ceiling`` rows in all. Of several marks of one follower, the one with the largest number counts; the
follower removes the earlier ones. Putting a mark needs no lock, rename or condition.

Example:
    >>> mark = Mark(follower="learner", number=7, row=4096, ceiling=8192)
    >>> mark.format()
    'learner_7_4096_8192'
    >>> Mark.parse(mark.format()) == mark
    True
    >>> Mark.parse("learner_7_4096") is None
    True
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from rlio.catalog.names import MAX_ROW, is_writer_id
from rlio.errors import OptionError, excerpt
from rlio.storage.filesystem import Storage

__all__ = [
    "PROGRESS_DIR",
    "Mark",
    "check_follower_name",
    "list_marks",
    "mark_path",
    "newest",
    "parse_mark_path",
    "put_mark",
]

PROGRESS_DIR: Final = "_progress"

# ASCII digits only: \d would also match digits of other scripts. A name has no "_", the field separator.
_FOLLOWER = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_MARK = re.compile(r"([a-z0-9][a-z0-9-]{0,63})_([0-9]{1,19})_([0-9]{1,19})_([0-9]{1,19})")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The content of a mark's name. Immutable.

    Attributes:
        follower: Name of the follower, or of the group of followers that share the writers.
        number: Grows with every mark of the follower for that writer.
        row: The follower's next row of the writer: it has taken the rows below.
        ceiling: Rows that the writer may have; 2**62: no limit.

    Raises:
        OptionError: A value is out of bounds.
    """

    follower: str
    number: int
    row: int
    ceiling: int

    def __post_init__(self) -> None:
        check_follower_name(self.follower)
        if not all(0 <= value <= MAX_ROW for value in (self.number, self.row, self.ceiling)):
            raise OptionError(f"{self}: expected numbers from 0 to 2**62")

    def format(self) -> str:
        """The file name."""
        return f"{self.follower}_{self.number}_{self.row}_{self.ceiling}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The mark with the file name ``name`` (without folder), or None if it is not the name of a mark."""
        match = _MARK.fullmatch(name)
        if match is None:
            return None
        number, row, ceiling = int(match[2]), int(match[3]), int(match[4])
        if max(number, row, ceiling) > MAX_ROW:
            return None
        return cls(follower=match[1], number=number, row=row, ceiling=ceiling)


def check_follower_name(name: str) -> str:
    """Return ``name`` if it is a valid follower name.

    Raises:
        OptionError: The name is not 1 to 64 of ``a-z 0-9 -``, or starts with ``-``.
    """
    if not isinstance(name, str) or _FOLLOWER.fullmatch(name) is None:
        raise OptionError(
            f"a follower's name is {excerpt(name)}: expected 1 to 64 of the characters a-z, 0-9 and '-', "
            "not starting with '-'"
        )
    return name


def mark_path(writer: str, mark: Mark) -> str:
    """The path of a mark, relative to the root."""
    return f"{PROGRESS_DIR}/{writer}/{mark.format()}"


def parse_mark_path(path: str) -> tuple[str, Mark] | None:
    """The writer and the mark of a path below the root; None: the path is not that of a mark."""
    parts = path.split("/")
    if len(parts) != 3 or parts[0] != PROGRESS_DIR or not is_writer_id(parts[1]):
        return None
    mark = Mark.parse(parts[2])
    return None if mark is None else (parts[1], mark)


def put_mark(storage: Storage, writer: str, mark: Mark) -> str:
    """Put a mark; returns its path.

    Raises:
        PublishError: The mark could not be stored.
    """
    path = mark_path(writer, mark)
    # Not empty: some stores and copying tools drop objects without bytes.
    storage.put(path, f"{mark.format()}\n".encode())
    return path


def list_marks(storage: Storage, writer: str | None = None) -> dict[str, dict[str, Mark]]:
    """Writer -> its marks, by path; of one writer or of all. Skips other names.

    Raises:
        UnsafeData: There are more names than a listing may have.
        OSError: The store did not answer.
    """
    found: dict[str, dict[str, Mark]] = {}
    for path, _ in storage.list(PROGRESS_DIR if writer is None else f"{PROGRESS_DIR}/{writer}"):
        parsed = parse_mark_path(path)
        if parsed is not None:
            found.setdefault(parsed[0], {})[path] = parsed[1]
    return found


def newest(marks: Iterable[Mark]) -> dict[str, Mark]:
    """Follower -> its newest mark; of equal numbers, the mark that allows least."""
    found: dict[str, Mark] = {}
    for mark in marks:
        other = found.get(mark.follower)
        if other is None or (mark.number, -mark.ceiling, -mark.row) > (
            other.number,
            -other.ceiling,
            -other.row,
        ):
            found[mark.follower] = mark
    return found
