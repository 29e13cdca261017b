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

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.ragged import Ragged
from rlio.errors import CorruptData
from rlio.replay.memory import Arrays, copied
from rlio.schemas.column import ColumnSpec
from rlio.schemas.json_values import load_value
from rlio.schemas.structure import packed

__all__ = ["TextHeap", "encoded"]

#: Texts lie in chunks. The first has this many bytes, and each further chunk twice as many as the one before,
#: up to 1 GiB. A longer text gets its own chunk.
_CHUNK: Final = 16 << 20
_DOUBLINGS: Final = 6
# Texts to copy at a time.
_SOME: Final = 4096
_NONE: Final = np.empty(0, np.uint8)
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

    def append(self, slots: NDArray[np.int64], texts: Ragged) -> None:
        """Put texts, as returned by `encoded`, into slots.

        Raises:
            CacheError: There is no memory; never in a ring.
        """
        if self._ring is not None:
            for slot, text in zip(slots.tolist(), texts, strict=True):
                self._ring[slot] = text.tobytes()
            return
        assert self._place is not None
        self._arrays.reserve(self.places, int(slots.max(initial=-1)) + 1)
        ends, first = texts.offsets, 0
        while first < len(texts):
            chunk, at, stop = self._room(ends, first)
            size = int(ends[stop] - ends[first])
            self._arrays.reserve(self._chunk_name(chunk), at + size)
            self._chunks[chunk][at : at + size] = texts.values[ends[first] : ends[stop]]
            places = np.empty(stop - first, _PLACE)
            places["chunk"] = chunk
            places["size"] = np.diff(ends[first : stop + 1])
            places["at"] = at + ends[first:stop] - ends[first]
            self._place[slots[first:stop]] = places
            self._used, first = at + size, stop

    def _room(self, ends: NDArray[np.int64], first: int) -> tuple[int, int, int]:
        """Where the texts from ``first`` on go: a chunk, an offset in it, and the end of those that fit."""
        free = len(self._chunks[-1]) - self._used if self._chunks else -1
        stop = int(np.searchsorted(ends, ends[first] + free, side="right")) - 1
        if stop > first:
            return len(self._chunks) - 1, self._used, stop
        self._add_chunk(max(int(ends[first + 1] - ends[first]), self._usual))
        self._used = 0
        return self._room(ends, first)

    @property
    def _usual(self) -> int:
        """Bytes of the next chunk. Chunks are few, because each is a file, and is mapped by every process."""
        return _CHUNK << min(len(self._chunks), _DOUBLINGS)

    def _add_chunk(self, size: int) -> None:
        self._chunks.append(self._arrays.array(self._chunk_name(len(self._chunks)), (size,), _BYTE))

    def _chunk_name(self, chunk: int) -> str:
        return f"{self._name} {chunk}"

    def texts(self, slots: NDArray[np.int64]) -> Ragged:
        """A copy of the texts of slots, as passed to `append`."""
        if self._ring is not None:
            return _joined([self._ring[slot] for slot in slots.tolist()])
        assert self._place is not None
        places = self._place[slots]
        chunks, starts, ends = places["chunk"], places["at"], places["at"] + places["size"]
        # Rows of an episode lie one after the other, and are copied together.
        apart = np.flatnonzero((chunks[1:] != chunks[:-1]) | (starts[1:] != ends[:-1])) + 1
        firsts, lasts = [np.r_[0, apart], np.r_[apart, len(slots)] - 1] if len(slots) else [[], []]
        cuts = zip(chunks[firsts].tolist(), starts[firsts].tolist(), ends[lasts].tolist(), strict=True)
        parts = [self._chunks[chunk][start:end] for chunk, start, end in cuts]
        return Ragged(np.concatenate([_NONE, *parts]), np.cumsum([0, *places["size"]]))

    def dump(self, arrays: Arrays, slots: NDArray[np.int64]) -> int:
        """Copy the texts of slots into arrays; returns their total bytes, which `restore` needs."""
        sizes = copied(arrays, f"{self._name} sizes", len(slots), slots)
        parts = [slice(start, start + _SOME) for start in range(0, len(slots), _SOME)]
        for part in parts:
            sizes[part] = self.texts(slots[part]).lengths
        ends = np.cumsum(sizes, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        target = copied(arrays, self._name, total, _NONE)
        for part in parts:
            found = self.texts(slots[part]).values
            stop = int(ends[part][-1])
            target[stop - len(found) : stop] = found
        return total

    def restore(self, arrays: Arrays, slots: NDArray[np.int64], total: int) -> None:
        """Put the texts that `dump` copied into the same number of slots."""
        sizes = arrays.array(f"{self._name} sizes", (len(slots),), np.int64)
        stored = arrays.array(self._name, (total,), np.uint8)
        ends = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=ends[1:])
        if sizes.min(initial=0) < 0 or ends[-1] != total:
            raise ValueError(f"texts of {ends[-1]} bytes, not {total}")
        for start in range(0, len(slots), _SOME):
            cuts = ends[start : start + _SOME + 1]
            self.append(slots[start : start + _SOME], Ragged(stored[cuts[0] : cuts[-1]], cuts - cuts[0]))

    def gather(self, slots: NDArray[np.int64]) -> NDArray[Any]:
        """The decoded values of slots: strings, bytes or objects, as recorded."""
        found = self.texts(slots)
        if (items := self._spec.items) is not None:
            if (found.offsets % items.row_bytes).any():
                raise CorruptData(f"a row of {self._name} is not made of items of {items.row_bytes} bytes")
            values = found.values.view(items.numpy).reshape(-1, *items.shape)
            return Ragged(values, found.offsets // items.row_bytes).rows()
        listed = [text.tobytes() for text in found]
        if self._spec.structure is not None:
            return object_column(map(self._spec.structure.unpacked, listed))
        if self._spec.kind == "json":
            # An empty text: no residual.
            return object_column(load_value(text) if text else None for text in listed)
        if self._spec.dtype == "|S":
            return np.array(listed, np.bytes_)
        texts = [text.decode() for text in listed]
        if self._spec.dtype == "|O":
            return object_column(texts)
        # As wide as the longest text, like every column of such texts.
        values = np.array(texts, np.str_)
        return values.astype(np.dtype(f"{self._spec.dtype}{values.dtype.itemsize // 4}"), copy=False)


def encoded(values: NDArray[Any]) -> Ragged:
    """The bytes of texts, of the JSON texts of objects, or of the items of lists."""
    if len(values) and isinstance(values[0], np.ndarray) and values[0].dtype.kind not in "UO":
        found = Ragged.of(values)
        item = found.values.dtype.itemsize * math.prod(found.values.shape[1:])
        return Ragged(np.ascontiguousarray(found.values).reshape(-1).view(np.uint8), found.offsets * item)
    return _joined([value if isinstance(value, bytes) else packed(value) for value in values.tolist()])


def _joined(texts: list[bytes]) -> Ragged:
    return Ragged(np.frombuffer(bytearray().join(texts), np.uint8), np.cumsum([0, *map(len, texts)]))
