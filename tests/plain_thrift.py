"""Thrift's compact protocol read without any shortcut: what `rlio.schemas.thrift` is compared with."""

from __future__ import annotations

from typing import Any

from rlio.schemas.thrift import BOOL, I8, I16, I32, I64, LIST, STRUCT, TEXT, Field, Fields

BITS = {I16: 15, I32: 31, I64: 63}
FALSE, DOUBLE, SET, MAP, UUID = 2, 7, 10, 11, 13


class Refused(Exception):
    """The bytes are no such struct, or ask for too much."""


class PlainReader:
    """Reads one struct, a byte at a time."""

    def __init__(self, data: bytes, max_values: int) -> None:
        self.data, self.at, self.left = data, 0, max_values

    def byte(self) -> int:
        if self.at >= len(self.data):
            raise Refused("end")
        self.at += 1
        return self.data[self.at - 1]

    def spend(self, values: int = 1) -> None:
        self.left -= values
        if self.left < 0:
            raise Refused("values")

    def varint(self) -> int:
        value = 0
        for place in range(10):
            byte = self.byte()
            value |= (byte & 127) << 7 * place
            if byte < 128:
                if value >> 64:
                    raise Refused("bits")
                return value
        raise Refused("bytes")

    def integer(self, kind: int) -> int:
        raw = self.varint()
        value = -(raw + 1 >> 1) if raw & 1 else raw >> 1
        if not -(2 ** BITS[kind]) <= value < 2 ** BITS[kind]:
            raise Refused("range")
        return value

    def text(self) -> bytes:
        return bytes(self.byte() for _ in range(self.within(self.varint())))

    def within(self, size: int) -> int:
        if size > len(self.data) - self.at:
            raise Refused("size")
        return size

    def struct(self, fields: Fields, depth: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen: set[int] = set()
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer(I16)
            if number in seen or not 0 < number < 2**15:
                raise Refused("number")
            seen.add(number)
            kind, field = head & 15, fields.get(number)
            if field is not None and kind != field.kind and (field.kind, kind) != (BOOL, FALSE):
                raise Refused("type")
            if field is None or not field.name:
                self.skip(kind, depth, is_item=False)
            else:
                found[field.name] = self.value(kind, field, depth)
        return found

    def value(self, kind: int, field: Field, depth: int) -> Any:
        self.spend()
        if kind in BITS:
            return self.integer(kind)
        if kind == TEXT:
            return self.text()
        if kind in (BOOL, FALSE):
            return kind == BOOL
        if kind == I8:
            byte = self.byte()
            return byte - 256 if byte > 127 else byte
        if depth >= 24:
            raise Refused("depth")
        if kind == STRUCT:
            return self.struct(field.fields or {}, depth + 1)
        of, size = self.list_head()
        if of != field.of and size:
            raise Refused("type")
        if of == STRUCT:
            self.spend(size)
            return [self.struct(field.fields or {}, depth + 1) for _ in range(size)]
        return [self.value(of, Field("", of), depth + 1) for _ in range(size)]

    def list_head(self) -> tuple[int, int]:
        head = self.byte()
        size = head >> 4 if head >> 4 < 15 else self.varint()
        return head & 15, self.within(size)

    def skip(self, kind: int, depth: int, *, is_item: bool) -> None:
        self.spend()
        if kind in BITS:
            self.varint()
        elif kind == TEXT:
            self.text()
        elif kind in (BOOL, FALSE):
            self.at += is_item
        elif kind in (I8, DOUBLE, UUID):
            self.at += {I8: 1, DOUBLE: 8, UUID: 16}[kind]
        elif depth >= 24:
            raise Refused("depth")
        elif kind in (LIST, SET):
            of, size = self.list_head()
            for _ in range(size):
                self.skip(of, depth + 1, is_item=True)
        elif kind == MAP:
            size = self.within(self.varint())
            kinds = self.byte() if size else 0
            for _ in range(size):
                self.skip(kinds >> 4, depth + 1, is_item=True)
                self.skip(kinds & 15, depth + 1, is_item=True)
        elif kind == STRUCT:
            self.struct({}, depth + 1)
        else:
            raise Refused("type")
        if self.at > len(self.data):
            raise Refused("end")
