"""Columns of lists of one length, encoded by NumPy and zstd, in a file of which pyarrow writes the rest.

pyarrow makes the levels of lists value by value, which takes it longer than all else that it does of most
data sets. Where every row has a list of the same length they are the same bytes for every row group, and are
made once. The values follow, split by place; zstd takes half the time if it looks for matches where numbers
have them. pyarrow knows nothing of these chunks: they lie behind its own, and are put into its footer.

Source: the Parquet format's parquet.thrift, whose numbers of fields these are, and its Encodings.md.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from rlio.schemas.arrow import empty_array
from rlio.schemas.column import ColumnSpec
from rlio.schemas.parquet_metadata import DOUBLE, FLOAT, INT32, INT64
from rlio.schemas.thrift import (
    I32,
    I64,
    LIST,
    STRUCT,
    TEXT,
    encode_int,
    encode_list,
    encode_struct,
    encode_text,
    encode_varint,
    raw_int,
    raw_struct,
)

__all__ = [
    "ListChunk",
    "PlacedChunks",
    "encode_lists",
    "has_pages_of_ours",
    "level_bytes",
    "list_compressor",
    "with_chunks",
]

_TYPES: Final = {"i4": INT32, "u4": INT32, "i8": INT64, "u8": INT64, "f4": FLOAT, "f8": DOUBLE}
_ZSTD: Final = 6
_RLE: Final = 3
_BYTE_STREAM_SPLIT: Final = 9
# The fields of a footer, a row group, and a chunk of a column.
_SCHEMA, _GROUPS, _ORDERS = 2, 4, 7
_CHUNKS, _UNPACKED, _PACKED = 1, 2, 6


class ListChunk(NamedTuple):
    """What a footer says of a column of a row group: one page.

    Attributes:
        physical: Parquet's type of its values.
        values: How many there are.
        packed, unpacked: Bytes with and without compression, both with the page's header.
        crc32: Of the page without its header.
    """

    physical: int
    values: int
    packed: int
    unpacked: int
    crc32: int


#: Column -> first byte in the file, and the chunk that begins there.
PlacedChunks: TypeAlias = Mapping[str, tuple[int, ListChunk]]


def has_pages_of_ours(spec: ColumnSpec) -> bool:
    """Whether a column that every row has can be encoded here: lists of numbers of four or eight bytes."""
    return spec.kind == "list" and spec.size > 0 and spec.native.str[1:] in _TYPES


def list_compressor(level: int | None) -> zstandard.ZstdCompressor:
    """What compresses the pages, by the level that the user wants."""
    if level is not None and level != 1:
        return zstandard.ZstdCompressor(level=min(level, zstandard.MAX_COMPRESSION_LEVEL))  # As pyarrow does.
    # Level 1 with a table of 2^8 places where it has 2^14, which stays in the nearest cache: observations of
    # HalfCheetah-v5 take 40 ns a row instead of 80, and as many bytes. One-hot, rounded and repeated numbers
    # came out as small, or smaller, too.
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(
            window_log=19, hash_log=8, chain_log=12, search_log=1, min_match=7, target_length=0, strategy=1
        )
    )


def encode_lists(
    values: NDArray[Any], length: int, compressor: zstandard.ZstdCompressor
) -> tuple[ListChunk, list[bytes]]:
    """The chunk of a column, and its bytes, in parts.

    Args:
        values: Shape (rows * length,), at least one row; of four or eight bytes each.
        length: Of the lists.
        compressor: See `list_compressor`.
    """
    levels = level_bytes(len(values) // length, length)
    body = empty_array((len(levels) + values.nbytes,), np.dtype(np.uint8))
    body[: len(levels)] = levels
    _split(values, body[len(levels) :].reshape(values.itemsize, len(values)))
    packed = compressor.compress(memoryview(body))  # type: ignore[arg-type]  # NumPy's stubs hide the protocol
    crc32 = zlib.crc32(packed)
    header = _page_header(len(values), unpacked=len(body), packed=len(packed), crc32=crc32)
    chunk = ListChunk(
        physical=_TYPES[values.dtype.str[1:]],
        values=len(values),
        packed=len(header) + len(packed),
        unpacked=len(header) + len(body),
        crc32=crc32,
    )
    return chunk, [header, packed]


@lru_cache(maxsize=16)
def level_bytes(rows: int, length: int) -> NDArray[np.uint8]:
    """The levels with which a page of ``rows`` lists of ``length`` values begins, none of them empty.

    Each value but a list's first repeats at level 1, in one bit-packed run; all are defined at level 1, in
    one run of equal levels. Before each run stands its size.
    """
    groups = -(-rows * length // 8)
    repeats = np.ones((rows, length), bool)
    repeats[:, 0] = False
    packed = np.packbits(repeats, bitorder="little").tobytes()
    runs = [encode_varint(groups << 1 | 1) + packed, encode_varint(rows * length << 1) + b"\1"]
    return np.frombuffer(b"".join(len(run).to_bytes(4, "little") + run for run in runs), np.uint8)


def _split(flat: NDArray[Any], planes: NDArray[np.uint8]) -> None:
    """Byte-stream split: the first byte of every value, then the second of each, and so on."""
    numbers = flat.view(f"u{flat.itemsize}")
    for place, plane in enumerate(planes):
        # Shifted and cut in blocks that fit the cache: twice as fast as NumPy's copy with a stride.
        np.right_shift(numbers, 8 * place, out=plane, casting="unsafe")


def _page_header(values: int, *, unpacked: int, packed: int, crc32: int) -> bytes:
    data = {
        1: (I32, encode_int(values)),
        2: (I32, encode_int(_BYTE_STREAM_SPLIT)),
        3: (I32, encode_int(_RLE)),
        4: (I32, encode_int(_RLE)),
    }
    return encode_struct(
        {
            1: (I32, encode_int(0)),
            2: (I32, encode_int(unpacked)),
            3: (I32, encode_int(packed)),
            4: (I32, encode_int(crc32 - (crc32 >> 31 << 32))),  # As the signed integer that the field is.
            5: (STRUCT, encode_struct(data)),
        }
    )


def with_chunks(footer: bytes, whole: bytes, columns: Sequence[str], groups: Sequence[PlacedChunks]) -> bytes:
    """The metadata of a file with all of its columns.

    Args:
        footer: The metadata that pyarrow has written for its own columns.
        whole: Those of a file of all columns, and no rows.
        columns: Names of all columns, in order.
        groups: Of each row group, the chunks that pyarrow knows nothing of.
    """
    fields, _ = raw_struct(footer, {_GROUPS: {_CHUNKS: None}})
    whole_fields, _ = raw_struct(whole)
    fields |= {number: whole_fields[number] for number in (_SCHEMA, _ORDERS) if number in whole_fields}
    changed = [
        _with_chunks(group, columns, ours) for group, ours in zip(fields[_GROUPS], groups, strict=True)
    ]
    fields[_GROUPS] = LIST, encode_list(STRUCT, changed)
    return encode_struct(fields)


def _with_chunks(fields: dict[int, Any], columns: Sequence[str], ours: PlacedChunks) -> bytes:
    """A row group's metadata with our chunks in their places, and in its sizes."""
    theirs = iter(fields[_CHUNKS])
    chunks = [_chunk(name, *ours[name]) if name in ours else next(theirs) for name in columns]
    fields[_CHUNKS] = LIST, encode_list(STRUCT, chunks)
    for number, more in (
        (_UNPACKED, sum(chunk.unpacked for _, chunk in ours.values())),
        (_PACKED, sum(chunk.packed for _, chunk in ours.values())),
    ):
        fields[number] = I64, encode_int(raw_int(fields[number][1]) + more)
    return encode_struct(fields)


def _chunk(name: str, start: int, chunk: ListChunk) -> bytes:
    """The metadata of a chunk that begins at byte ``start``, as pyarrow would write them."""
    path = [name.encode(), b"list", b"element"]
    page = {1: (I32, encode_int(0)), 2: (I32, encode_int(_BYTE_STREAM_SPLIT)), 3: (I32, encode_int(1))}
    column = {
        1: (I32, encode_int(chunk.physical)),
        2: (LIST, encode_list(I32, [encode_int(_RLE), encode_int(_BYTE_STREAM_SPLIT)])),
        3: (LIST, encode_list(TEXT, [encode_text(part) for part in path])),
        4: (I32, encode_int(_ZSTD)),
        5: (I64, encode_int(chunk.values)),
        6: (I64, encode_int(chunk.unpacked)),
        7: (I64, encode_int(chunk.packed)),
        9: (I64, encode_int(start)),
        13: (LIST, encode_list(STRUCT, [encode_struct(page)])),
    }
    return encode_struct({2: (I64, encode_int(0)), 3: (STRUCT, encode_struct(column))})
