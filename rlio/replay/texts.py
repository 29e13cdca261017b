"""Texts and JSON of rows, whose size varies: kept as bytes, decoded when they are drawn.

Every draw gives objects of its own: a dictionary that one batch's user changes is in no other batch.

Example:
    >>> import numpy as np
    >>> from rlio.replay.memory import RamArrays
    >>> from rlio.schemas.column import ColumnSpec
    >>> heap = TextHeap(ColumnSpec("|O", (), "text"), arrays=RamArrays(), name="note", capacity=4, ring=False)
    >>> heap.append(np.arange(2), np.array(["left", "right"], object))
    >>> heap.gather(np.array([1, 1, 0])).tolist()
    ['right', 'right', 'left']
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.arrays import object_column
from rlio.replay.memory import Arrays
from rlio.schemas.column import ColumnSpec
from rlio.schemas.json_values import load_value

__all__ = ["TextExtent", "TextHeap"]

#: Texts lie in chunks, the first of this many bytes, each twice as large as the one before, up to 1 GiB; a
#: longer text has a chunk of its own.
_CHUNK: Final = 16 << 20
_DOUBLINGS: Final = 6
_BYTE: Final = np.dtype(np.uint8)
_PLACE: Final = np.dtype([("chunk", "<i4"), ("size", "<i4"), ("at", "<i8")])


class TextExtent(NamedTuple):
    """How far a heap is filled.

    Attributes:
        chunks: Bytes of each chunk.
        used: Bytes that are used of the last of them.
    """

    chunks: tuple[int, ...] = ()
    used: int = 0


class TextHeap:
    """One column of texts, by slot.

    Args:
        spec: Of the column: text or JSON.
        arrays: Where it lies.
        name: Of its arrays.
        capacity: Slots.
        ring: Whether slots are written again: then the texts are objects of this process, each freed when its
            slot is overwritten; else they lie one after the other in ``arrays``.
        extent: What is there already.
        sealed: Whether nothing is added, and the last chunk is cut to what is used.
    """

    def __init__(
        self,
        spec: ColumnSpec,
        *,
        arrays: Arrays,
        name: str,
        capacity: int,
        ring: bool,
        extent: TextExtent | None = None,
        sealed: bool = False,
    ) -> None:
        self._spec = spec
        self._arrays = arrays
        self._name = name
        self._ring: list[bytes] | None = [b""] * capacity if ring else None
        #: Name of the array that says where each text lies.
        self.places = f"{name} places"
        self._place = None if ring else arrays.array(self.places, (capacity,), _PLACE)
        filled = extent or TextExtent()
        self._sizes = list(filled.chunks)
        self._used = filled.used
        open_sizes = [*self._sizes[:-1], *([self._used] if sealed else self._sizes[-1:])]
        self._chunks = [
            arrays.array(self._chunk_name(i), (size,), _BYTE)
            for i, size in enumerate(open_sizes[: len(self._sizes)])
        ]

    @property
    def extent(self) -> TextExtent:
        """What is there."""
        return TextExtent(tuple(self._sizes), self._used)

    @property
    def used(self) -> dict[str, int]:
        """Array -> bytes of it that are used, where that is not all."""
        return {self._chunk_name(len(self._sizes) - 1): self._used} if self._sizes else {}

    def append(self, slots: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Put texts, or the JSON texts of objects, into slots."""
        encoded = [value if isinstance(value, bytes) else value.encode() for value in values.tolist()]
        if self._ring is not None:
            for slot, text in zip(slots.tolist(), encoded, strict=True):
                self._ring[slot] = text
            return
        assert self._place is not None
        self._arrays.reserve(self.places, int(slots.max(initial=-1)) + 1)
        for slot, text in zip(slots.tolist(), encoded, strict=True):
            chunk, at = self._room(len(text))
            self._chunks[chunk][at : at + len(text)] = np.frombuffer(text, np.uint8)
            self._place[slot] = (chunk, len(text), at)

    def _room(self, size: int) -> tuple[int, int]:
        """Chunk and offset of the next ``size`` bytes."""
        if not self._chunks or self._used + size > self._sizes[-1]:
            # Each chunk is a file, and a descriptor of whoever has it open: there are to be few of them.
            self._sizes.append(max(size, _CHUNK << min(len(self._chunks), _DOUBLINGS)))
            self._chunks.append(
                self._arrays.array(self._chunk_name(len(self._chunks)), (self._sizes[-1],), _BYTE)
            )
            self._used = 0
        chunk, at = len(self._chunks) - 1, self._used
        self._used += size
        self._arrays.reserve(self._chunk_name(chunk), self._used)
        return chunk, at

    def _chunk_name(self, chunk: int) -> str:
        return f"{self._name} {chunk}"

    def gather(self, slots: NDArray[np.int64]) -> NDArray[Any]:
        """The values of slots, decoded: strings, bytes or objects, as they were recorded."""
        if self._ring is not None:
            found = [self._ring[slot] for slot in slots.tolist()]
        else:
            assert self._place is not None
            places = self._place[slots].tolist()
            found = [self._chunks[chunk][at : at + size].tobytes() for chunk, size, at in places]
        if self._spec.kind == "json":
            return object_column(load_value(text) for text in found)
        if self._spec.dtype == "|S":
            return np.array(found, np.bytes_)
        texts = [text.decode() for text in found]
        if self._spec.dtype == "|O":
            return object_column(texts)
        # As wide as the longest of them, like every column of such texts.
        values = np.array(texts, np.str_)
        return values.astype(np.dtype(f"{self._spec.dtype}{values.dtype.itemsize // 4}"), copy=False)
