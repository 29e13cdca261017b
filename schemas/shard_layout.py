"""What the footer and pages of a Parquet shard must be, given its schema: everything else is refused.

The format leaves nothing to choose about a shard's physical schema (docs/format.md, 2.2, 2.5, 3.5 to 3.9),
and little about its encodings. So a footer under a right CRC, made by somebody else, can be held against what
`rlio.schema` implies before a library acts on it, and each row group costs what is known beforehand.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import pyarrow as pa

from rlio.errors import CorruptData, UnsafeData, excerpt
from rlio.limits import Limits
from rlio.schemas.column import ColumnSpec
from rlio.schemas.group_arrays import file_fields
from rlio.schemas.parquet import GroupInfo
from rlio.schemas.parquet_metadata import (
    BOOLEAN,
    BYTE_ARRAY,
    DELTA_BYTE_ARRAY,
    DICTIONARY,
    DOUBLE,
    FIXED_BYTES,
    FLOAT,
    INT32,
    INT64,
    OPTIONAL,
    REPEATED,
    REQUIRED,
    Chunk,
    Element,
    FileMetadata,
    PageTotals,
    measure_pages,
)
from rlio.schemas.schema import Schema

__all__ = ["GroupCost", "check_layout", "check_pages", "entries_of"]

# BIT_PACKED (4) is for levels of old; in DELTA_BYTE_ARRAY (7) one prefix stands for any number of values.
_REFUSED_ENCODINGS: Final = frozenset((4, DELTA_BYTE_ARRAY))
# None, snappy, gzip, brotli, zstd and lz4: what writers may use. The others are old framings.
_CODECS: Final = frozenset((0, 1, 2, 4, 6, 7))
_TYPES: Final[dict[pa.DataType, tuple[int, str | tuple[str, int, bool]]]] = {
    pa.bool_(): (BOOLEAN, ""),
    pa.int8(): (INT32, ("integer", 8, True)),
    pa.int16(): (INT32, ("integer", 16, True)),
    pa.int32(): (INT32, ""),
    pa.int64(): (INT64, ""),
    pa.uint8(): (INT32, ("integer", 8, False)),
    pa.uint16(): (INT32, ("integer", 16, False)),
    pa.uint32(): (INT32, ("integer", 32, False)),
    pa.uint64(): (INT64, ("integer", 64, False)),
    pa.float32(): (FLOAT, ""),
    pa.float64(): (DOUBLE, ""),
    pa.string(): (BYTE_ARRAY, "string"),
    pa.binary(): (BYTE_ARRAY, ""),
}


class GroupCost(NamedTuple):
    """What a row group will take, from its pages' headers.

    Attributes:
        unpacked: Bytes of the pages.
        dictionaries: Columns of variable length whose values are in dictionaries.
        pages: Field -> its chunk, and what its pages' headers say.
    """

    unpacked: int
    dictionaries: frozenset[str]
    pages: dict[str, tuple[Chunk, PageTotals]]


def entries_of(metadata: FileMetadata) -> dict[bytes, bytes]:
    """The metadata of the footer.

    Raises:
        CorruptData: A key comes twice, so that two readers could see two values.
    """
    found = dict(metadata.entries)
    if len(found) != len(metadata.entries):
        raise CorruptData("a key of the footer's metadata comes twice")
    return found


def check_layout(metadata: FileMetadata, schema: Schema, groups: list[GroupInfo]) -> None:
    """Hold a footer against the schema in it, and against its list of row groups.

    Raises:
        CorruptData: Columns, encodings, codecs or places are others than they must be.
    """
    expected = [element for field in file_fields(schema) for element in _elements(field)]
    for found, wanted in zip(metadata.elements[1:], expected, strict=False):
        if found != wanted:
            raise CorruptData(
                f"its columns are not those of its schema: {_shown(found)} where {_shown(wanted)} should be"
            )
    if len(metadata.elements) - 1 != len(expected):
        raise CorruptData(
            f"the file has {len(metadata.elements) - 1} schema nodes and its schema makes {len(expected)}"
        )
    if len(metadata.groups) != len(groups):
        raise CorruptData(f"{len(metadata.groups)} row groups, {len(groups)} listed")
    for group, info in zip(metadata.groups, groups, strict=True):
        for chunk in group.chunks:
            _check_chunk(chunk, info, schema.columns.get(chunk.leaf.path[0]))
        places = sorted((chunk.start, chunk.stop) for chunk in group.chunks)
        if any(before > start for (_, before), (start, _) in pairwise(places)):
            raise CorruptData("two columns of a row group have the same bytes")


def _check_chunk(chunk: Chunk, info: GroupInfo, spec: ColumnSpec | None) -> None:
    shown = excerpt(".".join(chunk.leaf.path))
    if chunk.codec not in _CODECS:
        raise CorruptData(f"column {shown} is compressed with codec {chunk.codec}")
    if chunk.encodings & _REFUSED_ENCODINGS:
        raise UnsafeData(f"column {shown} has the encodings {sorted(chunk.encodings)}")
    if not info.start <= chunk.start <= chunk.stop <= info.stop:
        raise CorruptData(
            f"column {shown} lies in bytes {chunk.start} to {chunk.stop}, its row group in {info.start} to "
            f"{info.stop}",
        )
    # A list has as many values as rows have numbers, an absent one a level of its own.
    most = info.rows * (spec.size if chunk.leaf.repeated and spec is not None else 1)
    if not info.rows <= chunk.values <= most:
        raise CorruptData(
            f"column {shown} has {chunk.values} values in {info.rows} rows, not {most}: lists of "
            f"{chunk.values // max(info.rows, 1)}",
        )


def check_pages(
    data: bytes, metadata: FileMetadata, index: int, start: int, names: set[str], limits: Limits
) -> GroupCost:
    """Walk the page headers of the wanted columns of a row group.

    Args:
        data: The bytes of the group.
        metadata: The file's.
        index: Number of the group.
        start: Where ``data`` lie in the file.
        names: Columns that will be decoded.
        limits: What they may ask for, together.

    Raises:
        CorruptData: The pages are not those of the footer.
        UnsafeData: They would take more than the limits.
    """
    view = memoryview(data)
    unpacked, dictionaries = 0, set()
    pages: dict[str, tuple[Chunk, PageTotals]] = {}
    for chunk in metadata.groups[index].chunks:
        name, element = chunk.leaf.path[0], chunk.leaf.element
        if name not in names:
            continue
        totals = measure_pages(view[chunk.start - start : chunk.stop - start], chunk, limits=limits)
        if totals.encodings & _REFUSED_ENCODINGS:
            raise UnsafeData(f"column {excerpt(name)} has pages in an encoding that can multiply values")
        decoded = 0 if element.physical == BYTE_ARRAY else chunk.values * (element.length or 8)
        unpacked += max(totals.unpacked, decoded)
        if unpacked > limits.group_bytes:
            raise UnsafeData(f"a row group of more than {limits.group_bytes} bytes; raise Limits.group_bytes")
        if element.physical == BYTE_ARRAY and totals.encodings & set(DICTIONARY):
            dictionaries.add(name)
        pages[name] = chunk, totals
    return GroupCost(unpacked, frozenset(dictionaries), pages)


def _elements(field: pa.Field) -> list[Element]:
    """The nodes of a column in the file's schema."""
    repetition = OPTIONAL if field.nullable else REQUIRED
    if pa.types.is_list(field.type):
        return [
            Element(field.name, None, 0, repetition, 1, "list"),
            Element("list", None, 0, REPEATED, 1, ""),
            *_elements(pa.field("element", field.type.value_type, nullable=False)),
        ]
    if pa.types.is_fixed_size_binary(field.type):
        return [Element(field.name, FIXED_BYTES, field.type.byte_width, repetition, 0, "")]
    physical, logical = _TYPES[field.type]
    return [Element(field.name, physical, 0, repetition, 0, logical)]


def _shown(element: Element) -> str:
    kind = "a group" if element.physical is None else f"type {element.physical}"
    length = f" of {element.length} bytes" if element.length else ""
    return f"{excerpt(element.name)} ({kind}{length}, repetition {element.repetition}, {element.logical!r})"
