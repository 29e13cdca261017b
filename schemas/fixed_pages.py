"""Columns of fixed-size values that every row has, decoded from their pages by NumPy.

These hold nearly all bytes of most data sets. pyarrow builds lists level by level, which takes four times as
long as all the rest of decoding them; here the levels are only compared with those that lists of equal length
must have. What is stored in any other way than shards usually are is left to pyarrow.

Not here: what the pages' headers may say (`rlio.schemas.parquet_metadata`), and Arrow's arrays.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlio.limits import DEFAULT_LIMITS
from rlio.schemas.arrow import empty_array, page_rows
from rlio.schemas.list_chunks import level_bytes
from rlio.schemas.parquet_metadata import (
    BOOLEAN,
    DATA_PAGE,
    FIXED_BYTES,
    Chunk,
    DataPage,
    PageTotals,
    measure_pages,
    parse_metadata,
)

__all__ = ["decode_fixed", "list_levels"]

_UNCOMPRESSED: Final = 0
# The codec whose frames tell how much is in them: others may fill less than the page's header says.
_ZSTD: Final = 6
_PLAIN: Final = 0
_RLE: Final = 3
_BYTE_STREAM_SPLIT: Final = 9
# Levels of more values are not compared: they would have to be made first.
_MAX_VALUES: Final = 1 << 23


def decode_fixed(
    data: memoryview, chunk: Chunk, totals: PageTotals, *, dtype: np.dtype[Any], per_row: int, rows: int
) -> NDArray[Any] | None:
    """The values of a column without nulls.

    Args:
        data: The bytes of the chunk.
        chunk: What the footer says about it, checked.
        totals: What its pages' headers say, checked.
        dtype: As which the values are stored; "V<n>" for values of n bytes.
        per_row: Values of each row: the length of lists, 1 where there are none.
        rows: Rows of the group.

    Returns:
        Shape (rows * per_row,), writable and nobody else's; None where pages are not of the usual kind: those
        are for pyarrow to judge.
    """
    count = rows * per_row
    is_usual = (
        chunk.values == count == sum(page.values for page in totals.pages)
        and 0 < count <= _MAX_VALUES
        and chunk.codec in (_UNCOMPRESSED, _ZSTD)
        and dtype.itemsize == _stored_size(chunk)
        and all(_is_usual(page, chunk, per_row) for page in totals.pages)
    )
    if not is_usual or totals.dictionary is not None:
        return None
    if _lies_ready(chunk, totals):
        (page,) = totals.pages
        body = _body(data[page.start : page.start + page.packed], page, chunk)
        return body.view(dtype) if len(body) == count * dtype.itemsize else None
    found = empty_array((count,), dtype)
    start = 0
    for page in totals.pages:
        body = _body(data[page.start : page.start + page.packed], page, chunk)
        if chunk.leaf.repeated:
            rows_of_page = page.values // per_row
            for levels_of in (level_bytes, list_levels):
                levels = levels_of(rows_of_page, per_row)
                if np.array_equal(body[: len(levels)], levels):
                    body = body[len(levels) :]
                    break
            else:
                return None
        is_bits = chunk.leaf.element.physical == BOOLEAN
        if not _take_up(body, found[start : start + page.values], page, is_bits=is_bits):
            return None
        start += page.values
    return found


def _lies_ready(chunk: Chunk, totals: PageTotals) -> bool:
    """Whether what is unpacked is already what is wanted, in memory of its own: one page of plain values."""
    return (
        len(totals.pages) == 1
        and chunk.codec != _UNCOMPRESSED
        and totals.pages[0].encoding == _PLAIN
        and not chunk.leaf.repeated
        and chunk.leaf.element.physical != BOOLEAN
    )


def _stored_size(chunk: Chunk) -> int:
    """Bytes of a value in memory; 0 for those of variable length."""
    element = chunk.leaf.element
    return element.length if element.physical == FIXED_BYTES else _SIZES.get(element.physical or 0, 0)


# BOOLEAN, INT32, INT64, FLOAT and DOUBLE.
_SIZES: Final = {0: 1, 1: 4, 2: 8, 4: 4, 5: 8}


def _is_usual(page: DataPage, chunk: Chunk, per_row: int) -> bool:
    splits = chunk.leaf.element.physical not in (BOOLEAN, FIXED_BYTES)
    return (
        page.kind == DATA_PAGE
        and page.values > 0
        and page.values % per_row == 0
        and (page.encoding == _PLAIN or (page.encoding == _BYTE_STREAM_SPLIT and splits))
        and page.level_encodings == (_RLE, _RLE)
    )


def _body(packed: memoryview, page: DataPage, chunk: Chunk) -> NDArray[np.uint8]:
    """The page unpacked."""
    if chunk.codec == _UNCOMPRESSED:
        return np.frombuffer(packed, np.uint8)
    # Fails where the frame has more or less than the header says.
    return np.frombuffer(pa.Codec("zstd").decompress(packed, decompressed_size=page.unpacked), np.uint8)


def _take_up(body: NDArray[np.uint8], found: NDArray[Any], page: DataPage, *, is_bits: bool) -> bool:
    """Put the values of a page without its levels into ``found``; whether there are as many as it says."""
    if is_bits:
        if len(body) != (page.values + 7) // 8:
            return False
        found[:] = np.unpackbits(body, count=page.values, bitorder="little")
        return True
    width = found.dtype.itemsize
    if len(body) != page.values * width:
        return False
    places = found.view(np.uint8)
    if page.encoding == _PLAIN:
        places[:] = body
        return True
    places = places.reshape(page.values, width)
    for place, plane in enumerate(body.reshape(width, page.values)):
        places[:, place] = plane
    return True


@lru_cache(maxsize=16)
def list_levels(rows: int, length: int) -> NDArray[np.uint8]:
    """The levels with which a page of ``rows`` lists of ``length`` values begins, as pyarrow writes them."""
    field = pa.field("x", pa.list_(pa.field("element", pa.bool_(), nullable=False)), nullable=False)
    offsets = pa.py_buffer(np.arange(0, rows * length + 1, length, dtype=np.int32))
    child = pa.array(np.zeros(rows * length, bool))
    lists = pa.ListArray.from_buffers(field.type, rows, [None, offsets], children=[child])
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_arrays([lists], schema=pa.schema([field])),
        sink,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        row_group_size=rows,
        **page_rows(rows),
        data_page_size=1 << 30,
    )
    data = sink.getvalue().to_pybytes()
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    (group,) = parse_metadata(data[end:-8], end=end, limits=DEFAULT_LIMITS).groups
    (chunk,) = group.chunks
    (page,) = measure_pages(data[chunk.start : chunk.stop], chunk, limits=DEFAULT_LIMITS).pages
    start = chunk.start + page.start
    levels = np.frombuffer(data[start : start + page.unpacked - (page.values + 7) // 8], np.uint8)
    return levels.copy()
