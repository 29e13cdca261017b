"""Columns as JSON: every dtype and shape comes back bit by bit, and what is not such a column is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from rlio.errors import UnsafeData
from rlio.limits import Limits
from rlio.schemas import json_columns
from rlio.schemas.column import ColumnSpec
from rlio.schemas.json_columns import dump_column, load_column, parse_json

FIXED = [
    *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "c8", "c16"),
    *(">i2", ">i8", ">f2", ">f4", ">f8", ">c8", "M8[ns]", "m8[s]", ">M8[D]"),
]


def there_and_back(values: NDArray[Any], *, compress: bool = False) -> NDArray[Any]:
    spec = ColumnSpec.of(values)
    text = dump_column(values, spec, compress=compress)
    return load_column(parse_json(text), spec, rows=len(values))


def assert_bits(found: NDArray[Any], values: NDArray[Any]) -> None:
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    assert found.flags.writeable
    if values.dtype.kind in "fc":
        np.testing.assert_array_equal(np.isnan(found), np.isnan(values))
        whole = ~np.isnan(values)
        if values.dtype.char not in "gG":  # Long doubles have bytes that are no part of the value.
            assert (
                np.ascontiguousarray(found[whole]).tobytes() == np.ascontiguousarray(values[whole]).tobytes()
            )
        np.testing.assert_array_equal(found, values)
    else:
        assert found.tobytes() == values.tobytes()


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    dtype = np.dtype(draw(st.sampled_from(FIXED)))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
    values = draw(hnp.arrays(dtype.newbyteorder("="), shape))
    return values.astype(dtype)


@settings(max_examples=100, deadline=None)
@given(values=arrays(), compress=st.booleans())
def test_fixed_size_columns_come_back_bit_by_bit(values: NDArray[Any], compress: bool) -> None:
    assert_bits(there_and_back(values, compress=compress), values)


@settings(max_examples=60, deadline=None)
@given(
    bits=hnp.arrays(np.uint32, st.integers(0, 300)),
    other=hnp.arrays(np.uint64, st.integers(0, 100)),
)
def test_every_bit_pattern_of_a_float_survives_a_parser_that_knows_only_doubles(
    bits: NDArray[np.uint32], other: NDArray[np.uint64]
) -> None:
    assert_bits(there_and_back(bits.view(np.float32)), bits.view(np.float32))
    assert_bits(there_and_back(other.view(np.float64)), other.view(np.float64))


def test_every_float16_comes_back() -> None:
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    assert_bits(there_and_back(values), values)


def test_a_float32_that_double_rounding_would_change_is_written_longer() -> None:
    values = np.array([0x15AE43FD], np.uint32).view(np.float32)
    text = dump_column(values, ColumnSpec.of(values)).decode()
    assert np.array(json.loads(text), np.float32).view(np.uint32)[0] == 0x15AE43FD


def test_floats_are_written_in_their_shortest_form() -> None:
    """Rule 4.5 of docs/format.md."""
    for dtype in (np.float16, np.float32, np.float64):
        values = np.array([0.1, 2.5, -0.0, np.nan, np.inf, -np.inf], dtype)
        text = dump_column(values, ColumnSpec.of(values)).decode()
        assert text == '[0.1,2.5,-0.0,"NaN","Infinity","-Infinity"]', dtype


def test_whole_numbers_and_flags_are_plain_json() -> None:
    values = np.array([[[1, -2]], [[3, 4]]], np.int8)
    assert dump_column(values, ColumnSpec.of(values)) == b"[[[1,-2]],[[3,4]]]"
    flags = np.array([True, False])
    assert dump_column(flags, ColumnSpec.of(flags)) == b"[true,false]"


def test_the_ends_of_every_integer_type_come_back() -> None:
    for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">u8"):
        limits = np.iinfo(code)
        for listed in ([limits.min, limits.max], [limits.max], [limits.max, 0, 1]):
            assert_bits(there_and_back(np.array(listed, code)), np.array(listed, code))


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)),
    compress=st.booleans(),
)
def test_texts_come_back(texts: list[str], compress: bool) -> None:
    # An array without elements is no array of strings.
    objects = np.array([*texts, "x"], object)
    found = there_and_back(objects, compress=compress)
    assert found.dtype == object
    assert found.tolist() == objects.tolist()
    for order in "<>":
        wide = np.array([*texts, "x"]).astype(np.dtype(f"{order}U7"))
        found = there_and_back(wide, compress=compress)
        assert found.dtype.str[:2] == wide.dtype.str[:2]
        assert found.tolist() == wide.tolist()


@settings(max_examples=50, deadline=None)
@given(values=hnp.arrays("S5", st.integers(0, 5)), compress=st.booleans())
def test_byte_strings_come_back_with_their_width(values: NDArray[Any], compress: bool) -> None:
    """Rule 4.7 of docs/format.md."""
    found = there_and_back(values, compress=compress)
    assert found.dtype == values.dtype
    assert found.tolist() == values.tolist()


def packed(data: bytes) -> dict[str, str]:
    import base64

    return {"zstd": base64.b64encode(zstandard.ZstdCompressor().compress(data)).decode()}


INT8 = ColumnSpec.of(np.zeros(2, np.int8))
PAIR = ColumnSpec.of(np.zeros((2, 2), np.float32))
FLAG = ColumnSpec.of(np.zeros(2, bool))
WIDE = ColumnSpec.of(np.zeros(2, np.complex64))
TEXT = ColumnSpec.of(np.array(["a", "b"]))
BYTES = ColumnSpec.of(np.array([b"a", b"b"]))
NONE = ColumnSpec.of(np.zeros((2, 0)))
INFO = ColumnSpec.of(np.array([{}, {}], object))


@pytest.mark.parametrize(
    ("spec", "written"),
    [
        (INT8, [1]),
        (INT8, [1, 2, 3]),
        (INT8, [1, 128]),
        (INT8, [1, -129]),
        (INT8, [1, 2**64]),
        (INT8, [1, 1.0]),
        (INT8, [1, 1.5]),
        (INT8, [1, "2"]),
        (INT8, [1, None]),
        (INT8, [[1], [2]]),
        (INT8, [1, [2]]),
        (INT8, [True, False]),
        (INT8, "12"),
        (INT8, None),
        (INT8, {"base64": "AAAA", "x": 1}),
        (INT8, {"base64": "AA"}),
        (INT8, {"base64": "A\nAA="}),
        (INT8, {"base64": 7}),
        (INT8, {"zstd": "AAAA"}),
        (INT8, packed(b"abc")),
        (INT8, packed(b"")),
        (INT8, {}),
        (PAIR, [[1, 2], [3]]),
        (PAIR, [[1, 2], [3, "nan"]]),
        (PAIR, [[1, 2], [3, "1.5"]]),
        (PAIR, [[1, 2], [3, 1e300]]),
        (PAIR, [[1, 2], [3, 10**400]]),
        (PAIR, [[1, 2], [3, None]]),
        (PAIR, [[1, 2], [3, {}]]),
        (PAIR, [1, 2]),
        (PAIR, [[True, True], [True, True]]),
        (FLAG, [1, 0]),
        (FLAG, {"base64": "AQI="}),
        (WIDE, [1, 2]),
        (TEXT, ["a", 1]),
        (TEXT, ["a"]),
        (TEXT, {"base64": "AAAA"}),
        (TEXT, packed(b'["a"]')),
        (TEXT, packed(b'{"zstd": ""}')),
        (BYTES, ["a", "b"]),
        (BYTES, {"base64": "YWI="}),
        (BYTES, {"width": 0, "base64": ""}),
        (BYTES, {"width": 2, "base64": "YWI="}),
        (BYTES, {"width": True, "base64": "YWI="}),
        (NONE, [[]]),
        (INFO, [{}]),
        (INFO, [{}, {"$array": "|O"}]),
        (INFO, [{}, {"$float": "1"}]),
    ],
)
def test_what_is_no_such_column_is_refused(spec: ColumnSpec, written: Any) -> None:
    with pytest.raises((ValueError, OverflowError)):
        load_column(written, spec, rows=2)


def test_numbers_of_another_form_are_read_as_what_the_schema_says() -> None:
    """Another writer may print 1.0 for a float as 1, or 1e2 for it."""
    found = load_column(json.loads("[[1, 2.0], [1e2, -0.0]]"), PAIR, rows=2)
    assert found.dtype == np.float32
    assert found.tolist() == [[1, 2], [100, 0]]


@pytest.mark.parametrize("text", [b'{"a":1,"a":2}', b"[NaN]", b"[-Infinity]", b"[1", b'["\xff"]', b""])
def test_loose_json_is_refused(text: bytes) -> None:
    """Rule 4.10 of docs/format.md."""
    with pytest.raises(ValueError, match=r"twice|not JSON|Expecting|codec"):
        parse_json(text)


def test_json_that_would_fill_the_memory_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnsafeData, match="nests"):
        parse_json(b"[" * 100_000 + b"]" * 100_000)
    monkeypatch.setattr(json_columns, "_MAX_CONTAINERS", 10)
    with pytest.raises(UnsafeData, match="lists and objects"):
        parse_json(b"[" + b"[]," * 10 + b"[]]")


def test_a_blob_that_claims_to_be_larger_than_its_rows_is_not_inflated() -> None:
    bomb = packed(bytes(1 << 20))
    with pytest.raises(ValueError, match="zstd frame of 1048576 bytes, expected 2"):
        load_column(bomb, INT8, rows=2)


def test_byte_strings_as_wide_as_they_like_are_bound_by_what_a_line_may_take() -> None:
    zeros = zstandard.compress(bytes(8 << 20))
    written = {"zstd": base64.b64encode(zeros).decode(), "width": 1 << 20}
    spec = ColumnSpec.of(np.array([b"a"]))
    assert load_column(written, spec, rows=8, limits=Limits(group_bytes=8 << 20)).nbytes == 8 << 20
    with pytest.raises(UnsafeData):
        load_column(written, spec, rows=8, limits=Limits(group_bytes=(8 << 20) - 1))
