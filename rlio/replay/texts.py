"""Texts and JSON values of rows, which vary in size: stored as bytes, decoded when drawn.

Every draw makes new objects: if a user changes a dictionary in one batch, no other batch changes.

Example:
    >>> import numpy as np
    >>> from rlio.replay.memory import RamArrays
    >>> from rlio.schemas.column import ColumnSpec
    >>> heap = TextHeap(ColumnSpec("|O", (), "text"), arrays=RamArrays(), name="note", capacity=4, ring=False)
    >>> heap.append(np.arange(2), encoded(np.array(["left", "right"], object)))
    >>> heap.gather(np.array([1, 1, 0])).tolist()
    ['right', 'right', 'left']
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.ragged import Ragged
from rlio.replay.memory import Arrays, copied
from rlio.schemas.column import ColumnSpec
from rlio.schemas.json_values import load_value

__all__ = ["TextHeap", "encoded"]

#: Texts lie in chunks. The first has this many bytes, and each further chunk twice as many as the one before,
#: up to 1 GiB. A longer text gets its own chunk.
_CHUNK: Final = 16 << 20
_DOUBLINGS: Final = 6
# Texts to copy at a time.
_SOME: Final = 4096
_BYTE: Final = np.dtype(np.uint8)
_PLACE: Final = np.dtype([("chunk", "<i4"), ("size", "<i4"), ("at", "<i8")])


class TextHeap:
    """One column of texts, by slot. Continues after the texts that the arrays already hold.

    Args:
        spec: Spec of the column: text or JSON.
        arrays: Makes the arrays of the heap.
        name: Prefix of their names.
        capacity: Number of slots.
        ring: Slots are reused. Texts are then objects of this process, freed when their slot is overwritten.
            False: texts lie one after the other in ``arrays``.
        sealed: Add no texts.
    """

    def __init__(
        self,
        spec: ColumnSpec,
        *,
        arrays: Arrays,
        name: str,
        capacity: int,
        ring: bool,
        sealed: bool = False,
    ) -> None:
        self._spec = spec
        self._arrays = arrays
        self._name = name
        self._ring: list[bytes] | None = [b""] * capacity if ring else None
        #: Name of the array with the place of each text.
        self.places: str = f"{name} places"
        self._place = None if ring else arrays.array(self.places, (capacity,), _PLACE)
        self._chunks: list[NDArray[np.uint8]] = []
        # Used bytes of the last chunk.
        self._used = 0
        while (used := arrays.size(self._chunk_name(len(self._chunks)))) is not None:
            self._add_chunk(used if sealed else max(used, self._usual))
            self._used = used

    @property
    def used(self) -> dict[str, int]:
        """Array -> its used bytes, for the one array that is only partly used."""
        return {self._chunk_name(len(self._chunks) - 1): self._used} if self._chunks else {}

    def append(self, slots: NDArray[np.int64], texts: list[bytes]) -> None:
        """Put texts, as returned by `encoded`, into slots.

        Raises:
            CacheError: There is no memory; never in a ring.
        """
        if self._ring is not None:
            for slot, text in zip(slots.tolist(), texts, strict=True):
                self._ring[slot] = text
            return
        assert self._place is not None
        self._arrays.reserve(self.places, int(slots.max(initial=-1)) + 1)
        for slot, text in zip(slots.tolist(), texts, strict=True):
            chunk, at = self._room(len(text))
            self._chunks[chunk][at : at + len(text)] = np.frombuffer(text, np.uint8)
            self._place[slot] = (chunk, len(text), at)

    def _room(self, size: int) -> tuple[int, int]:
        """Chunk and offset of the next ``size`` bytes."""
        if not self._chunks or self._used + size > len(self._chunks[-1]):
            self._add_chunk(max(size, self._usual))
            self._used = 0
        chunk, at = len(self._chunks) - 1, self._used
        self._used += size
        self._arrays.reserve(self._chunk_name(chunk), self._used)
        return chunk, at

    @property
    def _usual(self) -> int:
        """Bytes of the next chunk. Chunks are few, because each is a file, and is mapped by every process."""
        return _CHUNK << min(len(self._chunks), _DOUBLINGS)

    def _add_chunk(self, size: int) -> None:
        self._chunks.append(self._arrays.array(self._chunk_name(len(self._chunks)), (size,), _BYTE))

    def _chunk_name(self, chunk: int) -> str:
        return f"{self._name} {chunk}"

    def texts(self, slots: NDArray[np.int64]) -> list[bytes]:
        """The texts of slots, as passed to `append`."""
        if self._ring is not None:
            return [self._ring[slot] for slot in slots.tolist()]
        assert self._place is not None
        places = self._place[slots].tolist()
        return [self._chunks[chunk][at : at + size].tobytes() for chunk, size, at in places]

    def dump(self, arrays: Arrays, slots: NDArray[np.int64]) -> int:
        """Copy the texts of slots into arrays; returns their total bytes, which `restore` needs."""
        sizes = copied(arrays, f"{self._name} sizes", len(slots), slots)
        parts = [slice(start, start + _SOME) for start in range(0, len(slots), _SOME)]
        for part in parts:
            sizes[part] = [len(text) for text in self.texts(slots[part])]
        ends = np.cumsum(sizes, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        target = copied(arrays, self._name, total, np.empty(0, np.uint8))
        for part in parts:
            found = np.frombuffer(b"".join(self.texts(slots[part])), np.uint8)
            stop = int(ends[part][-1])
            target[stop - len(found) : stop] = found
        return total

    def restore(self, arrays: Arrays, slots: NDArray[np.int64], total: int) -> None:
        """Put the texts that `dump` copied into the same number of slots."""
        sizes = arrays.array(f"{self._name} sizes", (len(slots),), np.int64)
        stored = arrays.array(self._name, (total,), np.uint8)
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        if min(sizes.tolist(), default=0) < 0 or (ends and ends[-1] != total):
            raise ValueError(f"texts of {ends[-1]} bytes, not {total}")
        for start in range(0, len(slots), _SOME):
            cuts = zip([0, *ends][start : start + _SOME], ends[start : start + _SOME], strict=False)
            self.append(slots[start : start + _SOME], [stored[a:b].tobytes() for a, b in cuts])

    def gather(self, slots: NDArray[np.int64]) -> NDArray[Any]:
        """The decoded values of slots: strings, bytes or objects, as recorded."""
        found = self.texts(slots)
        if (items := self._spec.items) is not None:
            values = np.frombuffer(bytearray().join(found), items.numpy).reshape(-1, *items.shape)
            ends = np.cumsum([0, *map(len, found)]) // items.row_bytes
            return Ragged(values, ends).rows()
        if self._spec.kind == "json":
            # An empty text: nothing is left of an info.
            return object_column(load_value(text) if text else None for text in found)
        if self._spec.dtype == "|S":
            return np.array(found, np.bytes_)
        texts = [text.decode() for text in found]
        if self._spec.dtype == "|O":
            return object_column(texts)
        # As wide as the longest text, like every column of such texts.
        values = np.array(texts, np.str_)
        return values.astype(np.dtype(f"{self._spec.dtype}{values.dtype.itemsize // 4}"), copy=False)


def encoded(values: NDArray[Any]) -> list[bytes]:
    """The bytes of texts, of the JSON texts of objects, or of the items of lists."""
    listed = values.tolist()
    if listed and isinstance(listed[0], np.ndarray):
        return [row.tobytes() for row in listed]
    return [value if isinstance(value, bytes) else value.encode() for value in listed]
