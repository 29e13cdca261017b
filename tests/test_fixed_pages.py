"""Columns that NumPy decodes come out as pyarrow decodes them, or are left to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlio.errors import CorruptData
from rlio.limits import Limits
from rlio.schemas.fixed_pages import decode_fixed, list_levels
from rlio.schemas.parquet_metadata import measure_pages, parse_metadata

ROWS = 700
RANDOM = np.random.default_rng(0)


def field_of(kind: pa.DataType, per_row: int | None) -> pa.Field:
    if per_row is not None:
        kind = pa.list_(pa.field("element", kind, nullable=False))
    return pa.field("x", kind, nullable=False)


def lists(values: NDArray[Any], lengths: list[int]) -> pa.Array:
    kind = pa.list_(pa.field("element", pa.from_numpy_dtype(values.dtype), nullable=False))
    offsets = pa.py_buffer(np.cumsum([0, *lengths]).astype(np.int32))
    return pa.ListArray.from_buffers(kind, len(lengths), [None, offsets], children=[pa.array(values)])


def written(array: pa.Array, **options: Any) -> bytes:
    """A Parquet file of one column that every row has."""
    sink = pa.BufferOutputStream()
    table = pa.Table.from_arrays([array], schema=pa.schema([pa.field("x", array.type, nullable=False)]))
    defaults: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": False,
        "write_statistics": False,
        "store_schema": False,
        "row_group_size": len(array),
    }
    pq.write_table(table, sink, **(defaults | options))
    return sink.getvalue().to_pybytes()


def decode(data: bytes, dtype: Any, per_row: int = 1, *, rows: int = ROWS) -> NDArray[Any] | None:
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    (group,) = parse_metadata(data[end:-8], end=end, limits=Limits()).groups
    (chunk,) = group.chunks
    view = memoryview(data)[chunk.start : chunk.stop]
    totals = measure_pages(view, chunk, limits=Limits())
    return decode_fixed(view, chunk, totals, dtype=np.dtype(dtype), per_row=per_row, rows=rows)


def numbers(dtype: str, count: int) -> NDArray[Any]:
    if dtype == "bool":
        return RANDOM.integers(0, 2, count).astype(bool)
    return RANDOM.integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype)


@pytest.mark.parametrize("options", [{}, {"max_rows_per_page": 64}, {"compression": "none"}], ids=str)
@pytest.mark.parametrize("per_row", [None, 1, 2, 17])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "float32", "float64", "bool"])
def test_numbers_come_out_as_they_went_in(dtype: str, per_row: int | None, options: Any) -> None:
    values = numbers(dtype, ROWS * (per_row or 1))
    array = pa.array(values) if per_row is None else lists(values, [per_row] * ROWS)
    leaf = "x" if per_row is None else "x.list.element"
    for split in [[], [leaf]] if dtype != "bool" else [[]]:
        found = decode(written(array, use_byte_stream_split=split, **options), dtype, per_row or 1)
        assert found is not None
        assert found.dtype == values.dtype
        assert found.tobytes() == values.tobytes()
        assert found.flags.writeable
        assert found.flags.aligned


@pytest.mark.parametrize("options", [{}, {"max_rows_per_page": 64}, {"compression": "none"}], ids=str)
def test_rows_of_bytes_come_out_as_they_went_in(options: Any) -> None:
    values = numbers("uint8", ROWS * 45)
    array = pa.FixedSizeBinaryArray.from_buffers(pa.binary(45), ROWS, [None, pa.py_buffer(values)])
    found = decode(written(array, **options), "V45")
    assert found is not None
    assert found.tobytes() == values.tobytes()


def test_what_was_decoded_is_no_view_of_the_file() -> None:
    data = bytearray(written(pa.array(numbers("int64", ROWS)), compression="none"))
    found = decode(bytes(data), "int64")
    assert found is not None
    before = found.copy()
    found[:] = 0
    again = decode(bytes(data), "int64")
    assert again is not None
    assert again.tobytes() == before.tobytes()


@pytest.mark.parametrize(
    "lengths",
    [
        [17] * (ROWS - 2) + [16, 18],
        [16, 18] + [17] * (ROWS - 2),
        [0, 34] + [17] * (ROWS - 2),
        [17 * ROWS] + [0] * (ROWS - 1),
    ],
    ids=["last", "first", "empty", "one"],
)
@pytest.mark.parametrize("rows_of_a_page", [64, ROWS])
def test_lists_of_unequal_lengths_are_left_to_pyarrow(lengths: list[int], rows_of_a_page: int) -> None:
    data = written(lists(numbers("float32", 17 * ROWS), lengths), max_rows_per_page=rows_of_a_page)
    assert decode(data, "float32", 17) is None


@pytest.mark.parametrize(
    "options",
    [
        {"data_page_version": "2.0"},
        {"data_page_version": "2.0", "compression": "none"},
        {"use_dictionary": True},
        {"compression": "snappy"},
        {"compression": "gzip"},
        {"column_encoding": {"x": "DELTA_BINARY_PACKED"}},
        {"max_rows_per_page": 5},
    ],
    ids=str,
)
def test_pages_of_another_kind_are_left_to_pyarrow(options: Any) -> None:
    assert decode(written(pa.array(np.arange(ROWS)), **options), "int64") is None


def test_pages_that_end_within_a_list_are_left_to_pyarrow() -> None:
    """Each page has as many values as whole lists take, and begins with the rest of the list before."""
    short, long = lists(numbers("int32", 6), [2, 4]), lists(numbers("int32", 6), [3, 3])
    for array, expected in ((short, None), (long, 6)):
        found = decode(written(array, compression="none", max_rows_per_page=1), "int32", 3, rows=2)
        assert expected == (None if found is None else len(found))


def test_uncompressed_pages_with_bytes_behind_their_values_are_left_to_pyarrow() -> None:
    data = written(pa.array(np.arange(ROWS)), compression="none")
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    parsed = parse_metadata(data[end:-8], end=end, limits=Limits())
    (chunk,) = parsed.groups[0].chunks
    view = memoryview(data)[chunk.start : chunk.stop]
    totals = measure_pages(view, chunk, limits=Limits())
    (page,) = totals.pages
    options: dict[str, Any] = {"dtype": np.dtype("int64"), "per_row": 1}
    assert decode_fixed(view, chunk, totals, rows=ROWS, **options) is not None
    fewer = totals._replace(pages=[page._replace(values=ROWS - 1)])
    assert decode_fixed(view, chunk._replace(values=ROWS - 1), fewer, rows=ROWS - 1, **options) is None


def test_other_values_than_are_asked_for_are_left_to_pyarrow() -> None:
    data = written(pa.array(np.arange(ROWS)))
    assert decode(data, "int32") is None
    assert decode(data, "int64", rows=ROWS - 1) is None
    assert decode(data, "int64", per_row=2) is None
    assert decode(written(pa.array(np.array([], np.int64)), row_group_size=None), "int64", rows=0) is None


def test_a_page_with_more_in_it_than_it_says_is_damage() -> None:
    """zstd frames that unpack to another size than the header's are neither cut nor filled up."""
    array = pa.array(np.zeros(ROWS, np.int64))
    data = written(array)
    start = data.index(b"\x28\xb5\x2f\xfd")
    size = data.index(b"\x19", start) - start
    for rows in (ROWS - 1, ROWS + 1):
        frame = pa.Codec("zstd").compress(bytes(8 * rows), asbytes=True)
        assert len(frame) <= size
        forged = data[:start] + frame + data[start + len(frame) :]
        with pytest.raises((OSError, CorruptData)):
            decode(forged, "int64")


@settings(max_examples=300, deadline=None)
@given(draw=st.data())
def test_mutated_pages_are_decoded_as_pyarrow_does_or_left_to_it(draw: st.DataObject) -> None:
    per_row = draw.draw(st.sampled_from((1, 3)))
    codec = draw.draw(st.sampled_from(("none", "zstd")))
    values = np.arange(40 * per_row, dtype=np.float32)
    data = bytearray(written(lists(values, [per_row] * 40), compression=codec, max_rows_per_page=16))
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(4, end - 1))] = draw.draw(st.integers(0, 255))
    try:
        found = decode(bytes(data), "float32", per_row, rows=40)
    except (CorruptData, OSError):
        return
    if found is not None:
        (column,) = pq.read_table(pa.BufferReader(bytes(data))).columns
        assert column.combine_chunks().flatten().to_numpy().tobytes() == found.tobytes()
        assert set(np.diff(column.combine_chunks().offsets.to_numpy())) == {per_row}


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 512), (8, 1), (1000, 17), (40_000, 3)])
def test_levels_say_where_lists_begin(rows: int, length: int) -> None:
    levels = list_levels(rows, length)
    array = lists(np.zeros(rows * length, np.float32), [length] * rows)
    data = written(array, compression="none", max_rows_per_page=rows, data_page_size=1 << 30)
    assert levels.tobytes() in data
    assert len(levels) >= 8
