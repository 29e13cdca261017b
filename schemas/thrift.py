r"""Thrift's compact protocol, as far as Parquet footers and page headers use it, from bytes of strangers.

The reader knows what it expects: a struct is described by `Field`s, and a known field of another type, or
one that comes twice, is refused. Library readers pass over such fields in silence, so that two of them could
see two different files in the same bytes. Unknown fields are passed over here too; all reading is within a
budget of values and depth.

Source: the Thrift project's "Thrift Compact protocol encoding".

Example:
    >>> fields = {1: Field("rows", I32), 2: Field("name", TEXT)}
    >>> written = encode_struct({1: (I32, encode_int(3)), 2: (TEXT, encode_text(b"obs"))})
    >>> CompactReader(written, max_values=100).struct(fields)
    {'rows': 3, 'name': b'obs'}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from rlio.errors import CorruptData, UnsafeData

__all__ = [
    "BOOL",
    "I8",
    "I16",
    "I32",
    "I64",
    "LIST",
    "STRUCT",
    "TEXT",
    "CompactReader",
    "Field",
    "Fields",
    "RawFields",
    "RawLists",
    "encode_int",
    "encode_list",
    "encode_struct",
    "encode_text",
    "encode_varint",
    "raw_int",
    "raw_struct",
]

# Types, as they are written. A bool field is written as 1 or 2, which is its value.
BOOL: Final = 1
_FALSE: Final = 2
I8: Final = 3
I16: Final = 4
I32: Final = 5
I64: Final = 6
_DOUBLE: Final = 7
TEXT: Final = 8
LIST: Final = 9
_SET: Final = 10
_MAP: Final = 11
STRUCT: Final = 12
_UUID: Final = 13

_MAX_DEPTH: Final = 24
_BITS: Final = {I16: 15, I32: 31, I64: 63}


class Field(NamedTuple):
    """A field that is understood.

    Attributes:
        name: Its key in what is read; "" for one that is checked for its type and passed over.
        kind: Its type.
        of: Of a list, the type of its items.
        fields: Of a struct, or a list of structs, their fields.
    """

    name: str
    kind: int
    of: int = 0
    fields: Fields | None = None


#: Number of a field -> what it is.
Fields: TypeAlias = Mapping[int, Field]
#: Number of a field, ascending -> its type, and its value as it is written.
RawFields: TypeAlias = Mapping[int, tuple[int, bytes]]
#: Number of a field that is a list of structs -> likewise for these, or None.
RawLists: TypeAlias = "Mapping[int, RawLists | None]"

# No type: any is passed over.
_UNKNOWN: Final = Field("", 0)


class CompactReader:
    """Reads structs from ``data``.

    Args:
        data: Any bytes.
        at: Where the first struct begins.
        max_values: Values that may be read in all.

    Attributes:
        at: Where the next struct begins.
    """

    def __init__(self, data: bytes | memoryview, at: int = 0, *, max_values: int) -> None:
        self.at = at
        self._data = data
        self._max = self._left = max_values

    def struct(self, fields: Fields) -> dict[str, Any]:
        """The struct here, by the names of its known fields.

        Raises:
            CorruptData: The bytes are no such struct. (UnsafeData: it is larger than may be.)
        """
        try:
            return self._struct(fields, 0)
        except IndexError:
            raise CorruptData(f"a Thrift struct ends at byte {len(self._data)}, within a value") from None

    def _struct(self, fields: Fields, depth: int) -> dict[str, Any]:
        # The place is kept in a variable, and short integers and texts, which are most, are read here: calls
        # and attributes are what this costs.
        data, at = self._data, self.at
        found: dict[str, Any] = {}
        last = largest = 0
        numbers = set()
        while head := data[at]:
            at += 1
            kind, step = head & 15, head >> 4
            if step:
                last += step
            else:
                self.at = at
                last = self._zigzag(I16)
                at = self.at
            if last > largest:
                largest = last
            elif last in numbers:
                raise CorruptData(f"the Thrift field {last} comes twice in one struct")
            if not 0 < last < 1 << 15:
                raise CorruptData(f"a Thrift field of number {last}")
            numbers.add(last)
            name, expected, _, _ = field = fields.get(last, _UNKNOWN)
            if kind != expected and expected and not (expected == BOOL and kind == _FALSE):
                raise CorruptData(f"the Thrift field {last} has type {kind}, not {expected}")
            if I16 <= kind <= I64 and ((raw := data[at]) < 128 or data[at + 1] < 128):
                at += 1
                if raw > 127:
                    raw = raw & 127 | data[at] << 7
                    at += 1
                self._left -= 1
                if self._left < 0:
                    self._spend(0)
                if name:
                    found[name] = raw >> 1 ^ -(raw & 1)
                continue
            if kind == TEXT and (size := data[at]) < 128:
                start, at = at + 1, at + 1 + size
                self._left -= 1
                if self._left < 0:
                    self._spend(0)
                if at > len(data):
                    raise IndexError
                if name:
                    found[name] = bytes(data[start:at])
                continue
            self.at = at
            if name:
                found[name] = self._value(kind, field, depth)
            else:
                self._skip(kind, depth, is_item=False)
            at = self.at
        self.at = at + 1
        return found

    def _value(self, kind: int, field: Field, depth: int) -> Any:
        """The value of a known field."""
        if kind in _BITS:
            self._spend(1)
            return self._zigzag(kind)
        if kind == TEXT:
            self._spend(1)
            return self._text()
        if kind == LIST:
            return self._list(field, depth)
        if kind == STRUCT:
            self._enter(depth)
            return self._struct(field.fields or {}, depth + 1)
        self._spend(1)
        if kind == I8:
            self.at += 1
            value = self._data[self.at - 1]
            return value - 256 if value > 127 else value
        return kind == BOOL

    def _list(self, field: Field, depth: int) -> list[Any]:
        kind, size = self._list_head()
        if kind != field.of and size:
            raise CorruptData(f"a Thrift list of type {kind}, not {field.of}")
        self._enter(depth)
        if kind == STRUCT:
            fields = field.fields or {}
            self._spend(size)
            return [self._struct(fields, depth + 1) for _ in range(size)]
        if kind == TEXT:
            self._spend(size)
            return [self._text() for _ in range(size)]
        if kind in _BITS:
            self._spend(size)
            return [self._zigzag(kind) for _ in range(size)]
        item = Field("", kind)
        return [self._value(kind, item, depth + 1) for _ in range(size)]

    def _list_head(self) -> tuple[int, int]:
        head = self._data[self.at]
        self.at += 1
        size = head >> 4
        if size == 15:
            size = self._varint()
        # An item takes a byte at least: no list of a billion in a file of a kilobyte.
        if size > len(self._data) - self.at:
            raise CorruptData(f"a Thrift list of {size} items in {len(self._data) - self.at} bytes")
        return head & 15, size

    def _skip(self, kind: int, depth: int, *, is_item: bool) -> None:
        """Pass over a value of any type."""
        if kind in (BOOL, _FALSE):
            self._spend(1)
            self.at += is_item  # As a field, its type is its value.
        elif kind == I8:
            self._spend(1)
            self.at += 1
        elif kind in _BITS:
            self._spend(1)
            self._varint()
        elif kind == _DOUBLE:
            self._spend(1)
            self.at += 8
        elif kind == TEXT:
            self._spend(1)
            self._text()
        elif kind in (LIST, _SET):
            self._enter(depth)
            of, size = self._list_head()
            for _ in range(size):
                self._skip(of, depth + 1, is_item=True)
        elif kind == _MAP:
            self._skip_map(depth)
        elif kind == STRUCT:
            self._enter(depth)
            self._skip_struct(depth + 1)
        elif kind == _UUID:
            self._spend(1)
            self.at += 16
        else:
            raise CorruptData(f"a Thrift value of the unknown type {kind}")
        if self.at > len(self._data):
            raise IndexError

    def _skip_struct(self, depth: int) -> None:
        """Pass over a struct: most hold statistics, which are short numbers and texts."""
        data, at = self._data, self.at
        number = values = 0
        while head := data[at]:
            kind, step = head & 15, head >> 4
            at += 1
            if I16 <= kind <= I64 and data[at] < 128:
                at += 1
            elif kind == TEXT and data[at] < 128:
                at += 1 + data[at]
            elif kind not in (BOOL, _FALSE):
                step = 0
            number += step
            values += 1
            if not step or number >> 15:  # Anything else, and what is refused: field by field.
                self._struct({}, depth)
                return
        self._spend(values)
        self.at = at + 1

    def _skip_map(self, depth: int) -> None:
        self._enter(depth)
        size = self._varint()
        if size > len(self._data) - self.at:
            raise CorruptData(f"a Thrift map of {size} pairs in {len(self._data) - self.at} bytes")
        if size:
            kinds = self._data[self.at]
            self.at += 1
            for _ in range(size):
                self._skip(kinds >> 4, depth + 1, is_item=True)
                self._skip(kinds & 15, depth + 1, is_item=True)

    def _text(self) -> bytes:
        start = self.at + 1
        size = self._data[self.at]
        if size > 127:
            size = self._varint()
            start = self.at
        self.at = stop = start + size
        if stop > len(self._data):
            raise IndexError
        return bytes(self._data[start:stop])

    def _zigzag(self, kind: int) -> int:
        """A signed integer that fits its type: library readers cut off the rest of one that does not."""
        raw = self._data[self.at]
        if raw < 128:
            self.at += 1
            return raw >> 1 ^ -(raw & 1)
        raw = self._varint()
        value = raw >> 1 ^ -(raw & 1)
        if raw >> 1 >> _BITS[kind]:
            raise CorruptData(f"a Thrift integer of {value} in {_BITS[kind] + 1} bits")
        return value

    def _varint(self) -> int:
        byte = self._data[self.at]
        self.at += 1
        if byte < 128:
            return byte
        value, shift = byte & 127, 7
        while True:
            byte = self._data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
            if shift > 63:
                raise CorruptData("a Thrift integer of more than ten bytes")
        if value >> 64:
            raise CorruptData("a Thrift integer of more than 64 bits")
        return value

    def _enter(self, depth: int) -> None:
        self._spend(1)
        if depth >= _MAX_DEPTH:
            raise UnsafeData(f"Thrift nested more than {_MAX_DEPTH} deep")

    def _spend(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise UnsafeData(f"more than {self._max} values in a Parquet footer or page header")


def raw_struct(data: bytes, lists: RawLists | None = None, *, at: int = 0) -> tuple[dict[int, Any], int]:
    """A struct that a library of ours has just written, its values as they are written, and where it ends.

    Args:
        data: Trusted bytes: nothing is checked.
        lists: Fields that are lists of structs -> likewise for these: such a field is given as a list of raw
            structs, or of bytes where that is None. Others are (type, bytes), as `encode_struct` takes them.
        at: Where the struct begins.
    """
    found: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        number += head >> 4  # Parquet's fields are never more than 15 apart.
        kind = head & 15
        start = at + 1
        if lists is not None and number in lists:
            found[number], at = _raw_list(data, start, lists[number])
        else:
            at = _end_of(data, start, kind)
            found[number] = kind, data[start:at]
    return found, at + 1


def _raw_list(data: bytes, at: int, lists: RawLists | None) -> tuple[list[Any], int]:
    size, at = _size_of_list(data, at)
    found: list[Any] = []
    for _ in range(size):
        if lists is None:
            start, at = at, _end_of(data, at, STRUCT)
            found.append(data[start:at])
        else:
            item, at = raw_struct(data, lists, at=at)
            found.append(item)
    return found, at


def _end_of(data: bytes, at: int, kind: int) -> int:
    """Where a value of a type ends that begins at ``at``."""
    if kind == STRUCT:
        # Written out for integers and texts, which nearly all values are: calls are what this costs.
        while head := data[at]:
            at += 1
            kind = head & 15
            if I16 <= kind <= I64:
                while data[at] > 127:
                    at += 1
                at += 1
            elif kind == TEXT and data[at] < 128:
                at += data[at] + 1
            elif kind > _FALSE:  # The value of a bool is its type.
                at = _end_of(data, at, kind)
        return at + 1
    if kind == LIST:
        kind = data[at] & 15
        size, at = _size_of_list(data, at)
        for _ in range(size):
            at = _end_of(data, at, kind)
        return at
    if kind == TEXT:
        size, at = _varint(data, at)
        return at + size
    if I16 <= kind <= I64:
        return _varint(data, at)[1]
    return at + (8 if kind == _DOUBLE else 1)


def _size_of_list(data: bytes, at: int) -> tuple[int, int]:
    size = data[at] >> 4
    return (size, at + 1) if size < 15 else _varint(data, at + 1)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) > 127:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


def raw_int(written: bytes) -> int:
    """The integer that is written so."""
    value, _ = _varint(written, 0)
    return value >> 1 ^ -(value & 1)


def encode_struct(fields: RawFields) -> bytes:
    """A struct of values that are encoded already."""
    parts, last = [], 0
    for number, (kind, value) in fields.items():
        # Fields of Parquet are never more than 15 apart, which is what one byte can say.
        parts += [bytes([number - last << 4 | kind]), value]
        last = number
    return b"".join(parts) + b"\0"


def encode_list(kind: int, items: Sequence[bytes]) -> bytes:
    """A list of items that are encoded already."""
    head = (
        bytes([len(items) << 4 | kind])
        if len(items) < 15
        else bytes([0xF0 | kind]) + encode_varint(len(items))
    )
    return head + b"".join(items)


def encode_text(text: bytes) -> bytes:
    """Bytes of any length."""
    return encode_varint(len(text)) + text


def encode_int(value: int) -> bytes:
    """An integer of two, four or eight bytes, as small ones take fewer."""
    return encode_varint(value << 1 if value >= 0 else ~(value << 1))


def encode_varint(value: int) -> bytes:
    """An unsigned integer, seven bits a byte."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
