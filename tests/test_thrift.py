"""The Thrift reader gives what a reader without shortcuts gives, and refuses what that refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_thrift import PlainReader, Refused

from rlio.errors import CorruptData
from rlio.schemas.parquet_metadata import _FILE, _PAGE
from rlio.schemas.thrift import BOOL, I8, I16, I32, I64, LIST, STRUCT, TEXT, CompactReader, Field, Fields

INNER: Fields = {1: Field("a", I32), 2: Field("b", TEXT), 300: Field("far", I64)}
FIELDS: Fields = {
    1: Field("i16", I16),
    2: Field("i32", I32),
    3: Field("i64", I64),
    4: Field("text", TEXT),
    5: Field("bool", BOOL),
    6: Field("i8", I8),
    7: Field("struct", STRUCT, fields=INNER),
    8: Field("structs", LIST, STRUCT, INNER),
    9: Field("texts", LIST, TEXT),
    10: Field("numbers", LIST, I32),
    11: Field("", I32),
    12: Field("", STRUCT),
    13: Field("", LIST),
}


def read(data: bytes, fields: Fields, max_values: int) -> Any:
    """What our reader gives: values and where they end; None if it refuses."""
    reader = CompactReader(data, max_values=max_values)
    try:
        return reader.struct(fields), reader.at
    except CorruptData:
        return None


def read_plainly(data: bytes, fields: Fields, max_values: int) -> Any:
    reader = PlainReader(data, max_values)
    try:
        return reader.struct(fields), reader.at
    except Refused:
        return None


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


# Integers of one byte, of several, at the ends of their types and beyond, padded, and too long.
integers = st.one_of(
    st.integers(0, 127).map(varint),
    st.integers(0, 2**66).map(varint),
    st.sampled_from((15, 16, 31, 32, 63, 64)).map(lambda bits: varint(2**bits - 1)),
    st.sampled_from((16, 32, 64)).map(lambda bits: varint(2**bits)),
    st.integers(1, 11).map(lambda size: b"\x80" * size + b"\0"),
)
texts = st.binary(max_size=20).map(lambda text: varint(len(text)) + text)


def structs(values: st.SearchStrategy[tuple[int, bytes]]) -> st.SearchStrategy[bytes]:
    """Structs whose fields rise in short form mostly, and now and then are named in long form."""

    def join(fields: list[tuple[int, int | None, tuple[int, bytes]]]) -> bytes:
        parts = [
            bytes([step << 4 | kind]) + body if number is None else bytes([kind]) + varint(2 * number) + body
            for step, number, (kind, body) in fields
        ]
        return b"".join(parts) + b"\0"

    number = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 14), st.sampled_from((300, 40000)))
    return st.lists(st.tuples(st.integers(1, 3), number, values), max_size=8).map(join)


def lists(of: int, items: st.SearchStrategy[bytes]) -> st.SearchStrategy[tuple[int, bytes]]:
    def join(found: list[bytes]) -> tuple[int, bytes]:
        size = len(found)
        return LIST, (bytes([size << 4 | of]) if size < 15 else b"\xf5" + varint(size)) + b"".join(found)

    return st.lists(items, max_size=20).map(join)


scalars = st.one_of(
    st.tuples(st.sampled_from((I16, I32, I64)), integers),
    st.tuples(st.just(TEXT), texts),
    st.tuples(st.sampled_from((1, 2)), st.just(b"")),
    st.tuples(st.just(I8), st.binary(min_size=1, max_size=1)),
    st.tuples(st.just(7), st.binary(min_size=8, max_size=8)),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        structs(inner).map(lambda data: (STRUCT, data)),
        lists(STRUCT, structs(inner)),
        lists(TEXT, texts),
        lists(I32, integers),
        lists(BOOL, st.binary(min_size=1, max_size=1)),
    ),
    max_leaves=12,
)
budgets = st.one_of(st.integers(0, 30), st.just(10_000))


@settings(max_examples=300, deadline=None)
@given(data=structs(values), max_values=budgets)
@example(data=b"\x14\x06\x04\x02\x06\x00", max_values=10)  # The field 1 twice, the second in long form.
@example(data=b"\x25\x80\x80\x80\x80\x10\x00", max_values=10)  # 33 bits in 32.
@example(data=b"\x25\xff\xff\xff\xff\x0f\x00", max_values=10)
# Structs that are passed over: of more values than may be, with numbers of fields that grow too large.
@example(data=b"\xcc" + b"\x15\x02" * 5 + b"\0\0", max_values=4)
@example(data=b"\xcc" + b"\xf5\x02" * 2184 + b"\0\0", max_values=10_000)
@example(data=b"\xcc" + b"\xf5\x02" * 2185 + b"\0\0", max_values=10_000)
def test_structs_are_read_as_without_shortcuts(data: bytes, max_values: int) -> None:
    assert read(data, FIELDS, max_values) == read_plainly(data, FIELDS, max_values)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=40), max_values=budgets)
def test_any_bytes_are_read_as_without_shortcuts(data: bytes, max_values: int) -> None:
    assert read(data, FIELDS, max_values) == read_plainly(data, FIELDS, max_values)


@settings(max_examples=200, deadline=None)
@given(draw=st.data())
def test_mutated_footers_and_page_headers_are_read_as_without_shortcuts(draw: st.DataObject) -> None:
    data, fields = draw.draw(st.sampled_from(_written()))
    place = draw.draw(st.integers(0, len(data) - 1))
    cut = draw.draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))
    mutated = (data[:place] + draw.draw(st.binary(max_size=3)) + data[place + 1 :])[:cut]
    budget = draw.draw(st.sampled_from((10, 100, 1000, 100_000)))
    assert read(mutated, fields, budget) == read_plainly(mutated, fields, budget)


def _written() -> list[tuple[bytes, Fields]]:
    """The footer of a Parquet file of several kinds of columns, and the header of its first page."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"a": [1.5, None], "b": [[1], [2, 3]], "c": ["x", "y"], "d": [True, False]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, store_schema=False, compression="none")
    data = sink.getvalue().to_pybytes()
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") : -8]
    return [(footer, _FILE), (data[4:200], _PAGE)]


def test_what_is_compared_is_mostly_readable() -> None:
    for data, fields in _written():
        assert read(data, fields, 10_000) is not None


@pytest.mark.parametrize("size", [2, 200])
def test_a_text_that_is_cut_short_is_refused(size: int) -> None:
    data = b"\x48" + varint(size) + b"x" * (size - 1)
    assert read(data, FIELDS, 100) is None
    assert read(data + b"x\0", FIELDS, 100) == ({"text": b"x" * size}, len(data) + 2)
