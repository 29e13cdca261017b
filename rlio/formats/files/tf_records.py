"""TFRecord files of `tf.train.Example`, read without TensorFlow.

A record is its length (8 bytes, little-endian), the masked CRC-32C of the length (4), the bytes, and their
masked CRC-32C (4). google-crc32c computes the sums (extra ``rlds``). An Example is a protobuf message: a map
of names to lists of bytes, of float32 or of int64. This module
reads the parts of protobuf's wire format that it needs. An Example names no types, and no code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.errors import CorruptData, UnsafeData, excerpt
from rlio.formats.files.allowance import Allowance
from rlio.limits import Limits
from rlio.support.calls import closing_on_error
from rlio.support.extras import needs

__all__ = ["BYTES", "FLOATS", "INTS", "Example", "RecordFile", "Values", "floats_of", "ints_of"]

#: Kinds of lists, by their numbers in the message Feature.
BYTES, FLOATS, INTS = 1, 2, 3
_LENGTH_DELIMITED = 2
_VARINT_BYTES = 10
# Varints are decoded in blocks: the arrays that it takes are 40 times as large.
_BLOCK = 1 << 20


class RecordFile:
    """The records of an open TFRecord file.

    Args:
        stream: The file, open; closed by `close`.
        limits: A record may have `Limits.group_bytes`, because it is read as a whole.
    """

    def __init__(self, stream: IO[bytes], limits: Limits) -> None:
        with closing_on_error(stream), needs("google-crc32c", "rlds"):
            library = import_module("google_crc32c")
        self._crc: Callable[[bytes], int] = library.value
        self._extend: Callable[[int, bytes], int] = library.extend
        self._stream, self._limits = stream, limits

    def places(self) -> Iterator[tuple[int, int]]:
        """Where each record begins, and its bytes. Only the lengths are read and checked.

        Raises:
            CorruptData: A length is damaged, or the file ends within a record. (UnsafeData: a record is too
                large.)
        """
        end = self._stream.seek(0, 2)
        at = number = 0
        while at < end:
            head = self._read(at, 12)
            if len(head) < 12 or _masked(self._crc(head[:8])) != int.from_bytes(head[8:], "little"):
                raise CorruptData(f"the length of record {number} at byte {at} is damaged or cut")
            size = int.from_bytes(head[:8], "little")
            if size > end - at - 16:
                raise CorruptData(f"record {number} at byte {at} has {size} bytes, and the file ends before")
            Allowance(self._limits).spend(size)
            yield at + 12, size
            at, number = at + size + 16, number + 1

    def read(self, start: int, size: int) -> bytes:
        """The bytes of a record.

        Raises:
            CorruptData: Their sum is another one.
        """
        found = self._read(start, size + 4)
        data = found[:size]
        self._compare(self._crc(data), found[size:], start)
        return data

    def check(self, start: int, size: int) -> None:
        """Raise `CorruptData` unless the sum of a record is right, of which one block is kept at a time."""
        crc = 0
        for at in range(start, start + size, _BLOCK):
            crc = self._extend(crc, self._read(at, min(_BLOCK, start + size - at)))
        self._compare(crc, self._read(start + size, 4), start)

    def glance(self, start: int, size: int) -> Example:
        """The names and lists of a record, of which only the places are read. Nothing is checked by a sum."""
        return Example(lambda at, count: self._read(start + at, count), size, self._limits)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    @staticmethod
    def _compare(crc: int, stated: bytes, start: int) -> None:
        if len(stated) < 4 or _masked(crc) != int.from_bytes(stated, "little"):
            raise CorruptData(f"the checksum of the record at byte {start - 12} is not that of its bytes")

    def _read(self, start: int, size: int) -> bytes:
        self._stream.seek(start)
        return self._stream.read(size)


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class Values(NamedTuple):
    """The list of a feature: `BYTES`, `FLOATS` or `INTS`, and where its message lies in the Example."""

    kind: int
    start: int
    stop: int


class Example:
    """A serialized `tf.train.Example`, in which the features are found but not decoded.

    Args:
        read: (start, size) -> bytes of it.
        size: Its bytes.
        limits: It may have `Limits.columns` features.

    Attributes:
        features: Name -> its list; a feature without a list is absent.

    Raises:
        CorruptData: It is not an Example. (UnsafeData: it has too many features.)
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, limits: Limits) -> None:
        self._read = read
        self.features: dict[str, Values] = {}
        for _, *features in self._fields(0, size, known=(1,)):
            for count, (_, *entry) in enumerate(self._fields(*features, known=(1,))):
                if count == limits.columns:
                    raise UnsafeData(f"an Example of more than {limits.columns} features")
                self._add(*entry)

    @classmethod
    def of(cls, data: bytes, limits: Limits) -> Example:
        """An Example in memory."""
        return cls(lambda at, count: data[at : at + count], len(data), limits)

    def _add(self, start: int, stop: int) -> None:
        parts = {number: place for number, *place in self._fields(start, stop, known=(1, 2))}
        name = self.bytes_at(*parts.get(1, (0, 0))).decode()
        if name in self.features:
            raise CorruptData(f"an Example with the feature {excerpt(name)} twice")
        for number, *place in self._fields(*parts.get(2, (0, 0)), known=(BYTES, FLOATS, INTS)):
            self.features[name] = Values(number, *place)

    def bytes_at(self, start: int, stop: int) -> bytes:
        """Some of its bytes."""
        return self._read(start, stop - start)

    def pieces(self, values: Values) -> list[bytes]:
        """The items of a list of `BYTES`; of a list of numbers, its packed pieces, mostly one."""
        return [self.bytes_at(start, stop) for _, start, stop in self._fields(*values[1:], known=(1,))]

    def bounds(self, values: Values, size: int) -> NDArray[np.int64] | None:
        """Where the rows of a list lie that has ``size`` items a row, to read some of them (`some`).

        Returns:
            The first byte of each row, and the one after the last. None: the numbers are not in one piece.

        Raises:
            CorruptData: The last row is not whole.
        """
        found = [place for _, *place in self._fields(*values[1:], known=(1,))]
        if values.kind == BYTES:
            bounds = np.array([values.start, *(stop for _, stop in found)], np.int64)[:: max(1, size)]
            stop = values.stop
        elif len(found) != 1:
            return None
        else:
            ((start, stop),) = found
            if values.kind == FLOATS:
                bounds = np.arange(start, stop + 1, 4 * max(1, size))
            else:
                bounds = np.append(start, self._ends(start, stop, max(1, size)))
        if not size or bounds[-1] != stop:
            raise CorruptData(f"a list of {values.stop - values.start} bytes, expected rows of {size} items")
        return bounds

    def some(self, values: Values, start: int, stop: int) -> list[bytes]:
        """The `pieces` of some rows of a list, from one of its `bounds` to another."""
        if values.kind == BYTES:
            return self.pieces(Values(BYTES, start, stop))
        return [self.bytes_at(start, stop)]

    def _ends(self, start: int, stop: int, size: int) -> NDArray[np.int64]:
        """The ends of each ``size`` whole numbers, of which one block is kept at a time."""
        found, count = [np.empty(0, np.int64)], 0
        for at in range(start, stop, _BLOCK):
            block = np.frombuffer(self.bytes_at(at, min(at + _BLOCK, stop)), np.uint8)
            ends = np.flatnonzero(block < 0x80) + (at + 1)
            found.append(ends[(size - 1 - count) % size :: size])
            count += ends.size
        return np.concatenate(found)

    def _fields(self, start: int, stop: int, *, known: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """(number, start, stop) of the fields of a message, which all are messages, texts or packed."""
        at = start
        while at < stop:
            head = self._read(at, min(2 * _VARINT_BYTES, stop - at))
            tag, used = _varint(head, 0)
            size, used = _varint(head, used)
            number, kind = tag >> 3, tag & 7
            if kind != _LENGTH_DELIMITED or number not in known:
                raise CorruptData(f"no Example: field {number} of wire type {kind} at byte {at}")
            at += used
            if size > stop - at:
                raise CorruptData(f"a field of {size} bytes at byte {at}, where {stop - at} are left")
            yield number, at, at + size
            at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and where the next thing begins."""
    value = 0
    for shift, byte in enumerate(data[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise CorruptData("a number that is cut, or of more than 64 bits")


def floats_of(pieces: list[bytes]) -> NDArray[np.float32]:
    """The values of a list of floats.

    Raises:
        CorruptData: They are not floats.
    """
    data = b"".join(pieces)
    if len(data) % 4:
        raise CorruptData(f"a list of floats of {len(data)} bytes")
    return np.frombuffer(data, "<f4").astype(np.float32)


#: The most bytes that a whole number of 64 bits takes.
_SHIFTS: Final = 7 * np.arange(_VARINT_BYTES, dtype=np.uint64)


def ints_of(pieces: list[bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values of a list of whole numbers.

    Raises:
        CorruptData: They are not numbers, or ``dtype`` cannot hold them.
    """
    raw = np.frombuffer(b"".join(pieces), np.uint8)
    found: list[NDArray[Any]] = [np.empty(0, dtype)]
    while raw.size:
        ends = np.flatnonzero(raw[:_BLOCK] < 0x80)
        if not ends.size:
            raise CorruptData("a list of whole numbers that is cut, or has more than 64 bits")
        found.append(_in_dtype(_varints(raw, ends), dtype))
        raw = raw[ends[-1] + 1 :]
    return np.concatenate(found)


def _varints(raw: NDArray[np.uint8], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers whose last bytes lie at ``ends``."""
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts + 1
    if sizes.max() > _VARINT_BYTES:
        raise CorruptData("a whole number of more than 64 bits")
    values = np.zeros(len(ends), np.uint64)
    for place in range(sizes.max()):
        has = sizes > place
        values[has] |= (raw[starts[has] + place] & 0x7F).astype(np.uint64) << _SHIFTS[place]
    return values.view(np.int64)


def _in_dtype(values: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.itemsize == 8:  # uint64 is stored as the int64 of the same bits.
        return values.view(dtype)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if values.min() < low or values.max() > high:
        raise CorruptData(f"found whole numbers from {values.min()} to {values.max()}, expected {dtype}")
    return values.astype(dtype)
