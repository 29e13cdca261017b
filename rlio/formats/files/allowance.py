"""`Allowance`: what an opened data set of others may claim, which everything that decodes it draws on.

A few bytes may claim many rows, inflate to many bytes, repeat one value, or name one object by many paths. So
each helper that opens arrays, texts, groups, archives or pictures charges one of four accounts before it
takes memory or time: rows, bytes, values, objects. They are bounded by the stored bytes and by `rlio.Limits`.
`tests/test_allowance.py` lists the helpers, and fails if one does not charge.

Example:
    >>> piece = Allowance(Limits(group_bytes=1000), stored=100).piece()
    >>> piece.spend(900)
    >>> piece.spend(200)
    Traceback (most recent call last):
    ...
    rlio.errors.UnsafeData: more than 1000 bytes decoded together: raise Limits.group_bytes if you trust them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rlio.errors import UnsafeData
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.storage import InputFile

__all__ = ["Allowance"]

#: Bytes of memory that a row takes at least, in the indices of episodes and as ids, steps and flags.
_ROW_BYTES: Final = 16
#: Groups, datasets and names that are visited together: each takes more than 8 bytes of a file, and each file
#: may have some.
_BYTES_PER_OBJECT: Final = 8
_FREE_OBJECTS: Final = 4096
# A packed row of four floats has 48 opcodes, and takes 17 bytes of a Parquet file with many such rows.
_VALUES_PER_BYTE: Final = 4


class Allowance:
    """The budget of one opened data set. Rows are counted over all of it, all else by the piece.

    Args:
        limits: `Limits.group_bytes` limits the bytes of arrays, texts and pictures that are decoded together,
            `Limits.packed_values` the values, such as the opcodes of RLlib's packed columns.
        stored: Bytes of its files; None: not known, so that the limits alone count.
        packed: Bytes of packed columns, if the file has one row for each packed value: each allows four more
            values.
    """

    def __init__(
        self, limits: Limits = DEFAULT_LIMITS, *, stored: int | None = None, packed: int = 0
    ) -> None:
        self.limits = limits
        self.stored = stored
        self.rows: int = 0
        in_proportion = max(limits.free_bytes, limits.inflation * (stored or 0))
        self._most = limits.group_bytes if stored is None else min(limits.group_bytes, in_proportion)
        self.bytes: int = self._most
        self.values: int = limits.packed_values + _VALUES_PER_BYTE * packed
        self.objects: int = _FREE_OBJECTS + (limits.group_bytes if stored is None else stored) // (
            _BYTES_PER_OBJECT
        )

    @classmethod
    def of(cls, files: Sequence[InputFile], limits: Limits) -> Allowance:
        """The budget of files."""
        sizes = [file.size for file in files]
        known = [size for size in sizes if size is not None]
        return cls(limits, stored=sum(known) if known and len(known) == len(sizes) else None)

    def piece(self) -> Allowance:
        """The budget of what is decoded together: the index of a file, an episode, a record."""
        return Allowance(self.limits, stored=self.stored)

    def claim(self, rows: int) -> None:
        """Count rows of the data set, before anything is allocated for each. Some take no byte of a file.

        Raises:
            UnsafeData: All rows so far take memory out of proportion to the stored bytes.
        """
        self.rows += rows
        if self.stored is None:
            return
        limits, room = self.limits, _ROW_BYTES * self.rows
        in_proportion = min(limits.inflation * self.stored, limits.group_bytes)
        if room > max(limits.free_bytes, in_proportion, _ROW_BYTES * self.stored):
            raise UnsafeData(
                f"{self.stored} bytes claim {self.rows} rows: raise Limits.free_bytes if you trust the data"
            )

    def spend(self, size: int) -> None:
        """Count bytes before they are allocated.

        Raises:
            UnsafeData: The budget is exceeded.
        """
        self.bytes -= size
        if self.bytes < 0:
            name = "group_bytes" if self._most == self.limits.group_bytes else "inflation"
            stored = "" if name == "group_bytes" else f" from {self.stored} stored ones"
            raise UnsafeData(
                f"more than {self._most} bytes decoded together{stored}: raise Limits.{name} if you trust "
                "them"
            )

    def count(self, values: int) -> None:
        """Count opcodes or values before they are parsed.

        Raises:
            UnsafeData: The budget is exceeded.
        """
        self.values -= values
        if self.values < 0:
            raise UnsafeData(
                f"a record of more than {self.limits.packed_values} opcodes and values: raise "
                "Limits.packed_values if you trust the data"
            )

    def visit(self, objects: int = 1) -> None:
        """Count objects before they are opened: groups and datasets may have many names.

        Raises:
            UnsafeData: The budget is exceeded.
        """
        self.objects -= objects
        if self.objects < 0:
            raise UnsafeData(
                f"more groups and datasets than a file of {self.stored} bytes can hold: some have many names"
            )
