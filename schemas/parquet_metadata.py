"""A Parquet file's footer and page headers, read by our own bounded parser before any library sees them.

Parquet libraries believe what a footer says: they allocate what it claims, follow the offsets in it, and
some die of it. Here a footer from a stranger is parsed into a few plain values, and refused unless they fit
each other, the file and the limits. The same goes for the headers of pages, since what a page decodes to
depends on those alone.

Not here: what a shard of rlio must look like beyond that (`rlio.schemas.shard_layout`).

Source: the Parquet format's parquet.thrift, whose numbers of fields these are.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import IO, Any, Final, NamedTuple

from rlio.errors import CorruptData, UnsafeData, excerpt
from rlio.limits import Limits
from rlio.schemas.thrift import BOOL, I8, I16, I32, I64, LIST, STRUCT, TEXT, CompactReader, Field, Fields

__all__ = [
    "BYTE_ARRAY",
    "DATA_PAGE",
    "DELTA_BYTE_ARRAY",
    "FIXED_BYTES",
    "Chunk",
    "DataPage",
    "Element",
    "FileMetadata",
    "Group",
    "PageTotals",
    "dictionary_lengths",
    "measure_pages",
    "parse_metadata",
    "read_footer",
]

# Physical types.
BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE, BYTE_ARRAY, FIXED_BYTES = range(8)
# Repetition.
REQUIRED, OPTIONAL, REPEATED = range(3)
#: Encodings that refer to a dictionary, and the one in which a prefix may stand for any number of values.
DICTIONARY: Final = (2, 8)
DELTA_BYTE_ARRAY: Final = 7

_MAGIC: Final = b"PAR1"
_ENCRYPTED: Final = b"PARE"
_ENCODINGS: Final = frozenset((0, 2, 3, 4, 5, 6, 7, 8, 9))
_CODECS: Final = frozenset(range(8))
#: Bytes of a value in a page, at least; of those of variable length, four say how long they are.
_LEAST_BYTES: Final = {INT32: 4, INT64: 8, INT96: 12, FLOAT: 4, DOUBLE: 8, BYTE_ARRAY: 4}
DATA_PAGE, _INDEX_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = range(4)
_PAGE_VALUES: Final = 10_000
# A header of a dozen bytes would take ten times that in memory.
_KEPT_PAGES: Final = 64
# Pages of one chunk: 8 KiB each in 1 GiB. Each costs a few microseconds.
_MAX_PAGES: Final = 1 << 17
# A list is two levels and its values a third.
_LEVELS_PER_NESTING: Final = 3
_MAX_NAME_BYTES: Final = 64 << 10
_MAX_CREATOR_BYTES: Final = 1024

_LOGICAL_NAMES: Final = {
    1: "string", 2: "map", 3: "list", 4: "enum", 5: "decimal", 6: "date", 7: "time", 8: "timestamp",
    10: "integer", 11: "unknown", 12: "json", 13: "bson", 14: "uuid", 15: "float16", 16: "variant",
    17: "geometry", 18: "geography",
}  # fmt: skip
_INTEGER: Fields = {1: Field("bits", I8), 2: Field("signed", BOOL)}
_LOGICAL: Fields = {
    number: Field(name, STRUCT, fields=_INTEGER if name == "integer" else {})
    for number, name in _LOGICAL_NAMES.items()
}
_ELEMENT: Fields = {
    1: Field("type", I32),
    2: Field("length", I32),
    3: Field("repetition", I32),
    4: Field("name", TEXT),
    5: Field("children", I32),
    6: Field("converted", I32),
    10: Field("logical", STRUCT, fields=_LOGICAL),
}
_ENTRY: Fields = {1: Field("key", TEXT), 2: Field("value", TEXT)}
_COLUMN: Fields = {
    1: Field("type", I32),
    2: Field("encodings", LIST, I32),
    3: Field("path", LIST, TEXT),
    4: Field("codec", I32),
    5: Field("values", I64),
    6: Field("unpacked", I64),
    7: Field("packed", I64),
    8: Field("", LIST),
    9: Field("data_at", I64),
    10: Field("index_at", I64),
    11: Field("dictionary_at", I64),
    12: Field("", STRUCT),
    13: Field("", LIST),
    14: Field("bloom_at", I64),
}
_CHUNK: Fields = {
    1: Field("file", TEXT),
    2: Field("", I64),
    3: Field("column", STRUCT, fields=_COLUMN),
    4: Field("", I64),
    5: Field("", I32),
    6: Field("", I64),
    7: Field("", I32),
    8: Field("crypto", STRUCT, fields={}),
    9: Field("secret", TEXT),
}
_GROUP: Fields = {
    1: Field("chunks", LIST, STRUCT, _CHUNK),
    2: Field("", I64),
    3: Field("rows", I64),
    4: Field("", LIST),
    5: Field("", I64),
    6: Field("", I64),
    7: Field("", I16),
}
_FILE: Fields = {
    1: Field("version", I32),
    2: Field("schema", LIST, STRUCT, _ELEMENT),
    3: Field("rows", I64),
    4: Field("groups", LIST, STRUCT, _GROUP),
    5: Field("entries", LIST, STRUCT, _ENTRY),
    6: Field("creator", TEXT),
    7: Field("", LIST),
    8: Field("encryption", STRUCT, fields={}),
    9: Field("signing", TEXT),
}
_DATA_HEADER: Fields = {
    1: Field("values", I32),
    2: Field("encoding", I32),
    3: Field("definition", I32),
    4: Field("repetition", I32),
    5: Field("", STRUCT),
}
_DICTIONARY_HEADER: Fields = {1: Field("values", I32), 2: Field("encoding", I32), 3: Field("", BOOL)}
_DATA_HEADER_V2: Fields = {
    1: Field("values", I32),
    2: Field("nulls", I32),
    3: Field("rows", I32),
    4: Field("encoding", I32),
    5: Field("definition_bytes", I32),
    6: Field("repetition_bytes", I32),
    7: Field("", BOOL),
    8: Field("", STRUCT),
}
_PAGE: Fields = {
    1: Field("type", I32),
    2: Field("unpacked", I32),
    3: Field("packed", I32),
    4: Field("", I32),
    5: Field("data", STRUCT, fields=_DATA_HEADER),
    6: Field("", STRUCT),
    7: Field("dictionary", STRUCT, fields=_DICTIONARY_HEADER),
    8: Field("data_v2", STRUCT, fields=_DATA_HEADER_V2),
}


class Element(NamedTuple):
    """A node of the file's schema, in the order of the tree.

    Attributes:
        name: Its own name.
        physical: Type of a leaf; None for a group.
        length: Of values of fixed length; 0 for others.
        repetition: `REQUIRED`, `OPTIONAL` or `REPEATED`.
        children: Nodes right below; 0 for a leaf.
        logical: What it means: "string", "list", ("integer", bits, signed), ...; "" for nothing more.
    """

    name: str
    physical: int | None
    length: int
    repetition: int
    children: int
    logical: str | tuple[str, int, bool]


class Leaf(NamedTuple):
    """A leaf of the schema.

    Attributes:
        element: Its node.
        path: Names from the top, the root's left out.
        repeated: Whether a row may have any number of its values.
    """

    element: Element
    path: tuple[str, ...]
    repeated: bool


class Chunk(NamedTuple):
    """The values of one leaf in one row group.

    Attributes:
        leaf: Which.
        codec: Number of the compression.
        encodings: As the footer lists them.
        values: With nulls and empty lists.
        start, stop: Byte range of its pages.
    """

    leaf: Leaf
    codec: int
    encodings: frozenset[int]
    values: int
    start: int
    stop: int


class Group(NamedTuple):
    """A row group: its rows, and a chunk for each leaf in their order."""

    rows: int
    chunks: list[Chunk]


class FileMetadata(NamedTuple):
    """What a footer says, checked to fit itself and the file.

    Attributes:
        elements: The schema, its root first.
        leaves: The columns.
        groups: The row groups.
        entries: Keys and values of the file's own metadata.
    """

    elements: list[Element]
    leaves: list[Leaf]
    groups: list[Group]
    entries: list[tuple[bytes, bytes]]


class DataPage(NamedTuple):
    """A page of values, as its header has it.

    Attributes:
        kind: `DATA_PAGE`, or the newer kind.
        start: First byte of its body, counted from the chunk's beginning.
        packed, unpacked: Bytes of the body.
        values: With nulls and empty lists.
        encoding: Of the values.
        level_encodings: Of definition and repetition levels; None where the header does not say.
    """

    kind: int
    start: int
    packed: int
    unpacked: int
    values: int
    encoding: int
    level_encodings: tuple[int | None, int | None]


class PageTotals(NamedTuple):
    """What the pages of a chunk unpack to.

    Attributes:
        unpacked: Bytes of all pages.
        encodings: Those that occur in data pages.
        dictionary: (first byte, bytes packed, bytes unpacked, entries) of the dictionary's page, counted from
            the chunk's beginning; None where there is none.
        pages: The data pages; none where they are too many to be kept in mind.
    """

    unpacked: int
    encodings: frozenset[int]
    dictionary: tuple[int, int, int, int] | None
    pages: list[DataPage]


def read_footer(stream: IO[bytes], limits: Limits) -> tuple[bytes, int]:
    """The Thrift bytes of a file's footer, and where they begin.

    Raises:
        CorruptData: It is no Parquet file, or cut off.
        UnsafeData: It is encrypted, or its footer exceeds ``limits``.
    """
    size = stream.seek(0, io.SEEK_END)
    if size < 12:
        raise CorruptData(f"a file of {size} bytes is no Parquet file")
    stream.seek(size - 8)
    tail = stream.read(8)
    if tail[4:] == _ENCRYPTED:
        raise UnsafeData("an encrypted Parquet file: decrypt it first")
    length = struct.unpack("<I", tail[:4])[0]
    if tail[4:] != _MAGIC or length > size - 12:
        raise CorruptData(f"no Parquet file, or cut off: it ends in {excerpt(tail)} instead of a footer")
    if length > limits.footer_bytes:
        raise UnsafeData(f"a footer of {length} bytes, more than {limits.footer_bytes}")
    start = size - 8 - length
    stream.seek(start)
    footer = stream.read(length)
    if len(footer) != length:
        raise CorruptData("the file ends within its footer")
    return footer, start


def parse_metadata(footer: bytes, *, end: int, limits: Limits) -> FileMetadata:
    """Read a footer's metadata.

    Args:
        footer: The Thrift bytes, without length and magic.
        end: Where the footer begins in the file: nothing that it refers to lies behind.
        limits: What it may ask for.

    Raises:
        CorruptData: It is damaged, or does not fit itself or the file.
        UnsafeData: It asks for more than the limits, or is encrypted.
    """
    reader = CompactReader(footer, max_values=limits.footer_values)
    written = reader.struct(_FILE)
    if reader.at != len(footer):
        raise CorruptData(f"{len(footer) - reader.at} bytes in the footer behind its metadata")
    for name in ("schema", "rows", "groups"):
        if name not in written:
            raise CorruptData(f"a footer without {name}")
    if "encryption" in written or "signing" in written:
        raise UnsafeData("an encrypted Parquet file: decrypt it first")
    if len(written.get("creator", b"")) > _MAX_CREATOR_BYTES:
        raise UnsafeData(f"{len(written['creator'])} bytes that name the file's creator")
    elements = [_element(found) for found in written["schema"]]
    leaves = _leaves(elements, limits)
    groups = [_group(found, leaves, end) for found in written["groups"]]
    if sum(group.rows for group in groups) != written["rows"]:
        raise CorruptData(f"row groups of {sum(g.rows for g in groups)} rows in a file of {written['rows']}")
    entries = written.get("entries", ())
    if any("key" not in entry for entry in entries):
        raise CorruptData("an entry of the footer's metadata without a key")
    pairs = [(entry["key"], entry.get("value", b"")) for entry in entries]
    return FileMetadata(elements, leaves, groups, pairs)


def _element(written: dict[str, Any]) -> Element:
    name = _name(written.get("name"))
    physical, length = written.get("type"), written.get("length", 0)
    children = written.get("children", 0)
    if physical is None:
        length = 0  # A group's is nobody's.
    elif not 0 <= physical <= FIXED_BYTES or children:
        raise CorruptData(f"the leaf {excerpt(name)} of type {physical} and {children} children")
    if physical == FIXED_BYTES and length < 1:
        raise CorruptData(f"values of {length} bytes in {excerpt(name)}")
    repetition = written.get("repetition", REQUIRED)
    if repetition not in (REQUIRED, OPTIONAL, REPEATED) or children < 0:
        raise CorruptData(f"the node {excerpt(name)} with repetition {repetition}, {children} children")
    logical = _logical(written, name)
    return Element(name, physical, length if physical == FIXED_BYTES else 0, repetition, children, logical)


def _name(written: bytes | None) -> str:
    if written is None or len(written) > _MAX_NAME_BYTES:
        raise CorruptData(f"a column's name: {excerpt(written)}")
    try:
        return written.decode("utf-8")
    except UnicodeDecodeError:
        raise CorruptData(f"a column's name is no UTF-8: {excerpt(written)}") from None


# What the older notation of logical types says in the newer.
_CONVERTED: Final[dict[int, str | tuple[str, int, bool]]] = {
    0: "string", 1: "map", 2: "map", 3: "list", 4: "enum", 5: "decimal", 6: "date", 7: "time", 8: "time",
    9: "timestamp", 10: "timestamp", 19: "json", 20: "bson", 21: "interval",
    **{11 + i: ("integer", 8 << i, False) for i in range(4)},
    **{15 + i: ("integer", 8 << i, True) for i in range(4)},
}  # fmt: skip


def _logical(written: dict[str, Any], name: str) -> str | tuple[str, int, bool]:
    """What a node means, by either notation, which must agree."""
    older = _CONVERTED.get(written["converted"], "?") if "converted" in written else ""
    newer: str | tuple[str, int, bool] = ""
    if "logical" in written:
        if len(written["logical"]) > 1 or older == "?":
            raise CorruptData(f"the node {excerpt(name)} means more than one thing")
        for kind, parts in written["logical"].items():
            newer = kind
            if kind == "integer":
                newer = (kind, parts.get("bits", 0), parts.get("signed", False))
    if older and newer and older != newer:
        raise CorruptData(f"the node {excerpt(name)} means {older} and {newer}")
    found = newer or older
    # What the physical type says already.
    plain = {("integer", 32, True): INT32, ("integer", 64, True): INT64}
    if isinstance(found, tuple) and plain.get(found) == written.get("type"):
        return ""
    return found


def _leaves(elements: list[Element], limits: Limits) -> list[Leaf]:
    """The leaves of the tree, which must be one."""
    if not elements or elements[0].physical is not None:
        raise CorruptData("a footer whose schema has no root")
    leaves: list[Leaf] = []
    #: Of each open node: its children to come, its path, whether it is repeated.
    open_nodes: list[tuple[int, tuple[str, ...], bool]] = [(elements[0].children, (), False)]
    for element in elements[1:]:
        while open_nodes and not open_nodes[-1][0]:
            open_nodes.pop()
        if not open_nodes:
            raise CorruptData("a schema with nodes that belong to no other")
        left, path, repeated = open_nodes[-1]
        open_nodes[-1] = (left - 1, path, repeated)
        path, repeated = (*path, element.name), repeated or element.repetition == REPEATED
        if element.physical is None:
            open_nodes.append((element.children, path, repeated))
            if len(open_nodes) > _LEVELS_PER_NESTING * limits.nesting + 1:
                raise UnsafeData(f"a Parquet schema nested more than {limits.nesting} deep")
        else:
            leaves.append(Leaf(element, path, repeated))
            if len(leaves) > limits.columns:
                raise UnsafeData(f"more than {limits.columns} columns")
    if any(left for left, _, _ in open_nodes):
        raise CorruptData("a schema with fewer nodes than it says")
    return leaves


def _group(written: dict[str, Any], leaves: list[Leaf], end: int) -> Group:
    rows, chunks = written.get("rows", -1), written.get("chunks", ())
    if rows < 0 or len(chunks) != len(leaves):
        raise CorruptData(f"a row group of {rows} rows and {len(chunks)} columns, of {len(leaves)}")
    return Group(rows, [_chunk(found, leaf, end) for found, leaf in zip(chunks, leaves, strict=True)])


def _chunk(written: dict[str, Any], leaf: Leaf, end: int) -> Chunk:
    shown = excerpt(".".join(leaf.path))
    if "file" in written:
        raise UnsafeData(f"column {shown} lies in another file, {excerpt(written['file'])}: none is opened")
    if "crypto" in written or "secret" in written:
        raise UnsafeData(f"column {shown} is encrypted: decrypt it first")
    column = written.get("column")
    if column is None or not {"type", "path", "codec", "values", "packed", "data_at"} <= column.keys():
        raise CorruptData(f"column {shown} of a row group says less than where its pages are")
    path = tuple(map(_name, column["path"]))
    if column["type"] != leaf.element.physical or path != leaf.path:
        raise CorruptData(f"column {excerpt('.'.join(path))} of a row group stands where {shown} should")
    encodings = frozenset(column.get("encodings", ()))
    if column["codec"] not in _CODECS or not encodings <= _ENCODINGS:
        raise CorruptData(f"column {shown} has codec {column['codec']} and encodings {sorted(encodings)}")
    start = column["data_at"]
    if 0 < column.get("dictionary_at", 0) < start:
        start = column["dictionary_at"]
    packed, values = column["packed"], column["values"]
    # The pages of no value may lie nowhere.
    if start < (4 if values else 0) or packed < 0 or start + packed > end or values < 0:
        raise CorruptData(f"column {shown} has {values} values in {packed} bytes from byte {start}, of {end}")
    if values and not start <= column["data_at"] < start + packed:
        raise CorruptData(f"column {shown} has its data at byte {column['data_at']}, outside of its pages")
    for name in ("index_at", "bloom_at", "dictionary_at"):
        if not 0 <= column.get(name, 0) < end:
            raise CorruptData(f"column {shown} refers to byte {column[name]}, of {end}")
    return Chunk(leaf, column["codec"], encodings, values, start, start + packed)


# ---- pages ----


def measure_pages(data: bytes | memoryview, chunk: Chunk, *, limits: Limits) -> PageTotals:
    """Walk the headers of a chunk's pages, none of which is unpacked.

    Args:
        data: The bytes of the chunk.
        chunk: What the footer says about it.
        limits: What it may ask for.

    Raises:
        CorruptData: The pages do not have the values that the footer says, or do not fit the chunk.
        UnsafeData: They claim more than the limits.
    """
    shown = excerpt(".".join(chunk.leaf.path))
    at = values = unpacked = pages = 0
    found: list[DataPage] = []
    encodings: set[int] = set()
    dictionary = None
    while values < chunk.values:
        page, body = _page(data, at, chunk, shown)
        pages += 1
        if pages > _MAX_PAGES:
            raise UnsafeData(f"column {shown} has more than {_MAX_PAGES} pages in one row group")
        unpacked += page["unpacked"]
        if unpacked > limits.group_bytes:
            raise UnsafeData(f"column {shown}: pages that unpack to more than {limits.group_bytes} bytes")
        if page["type"] == _DICTIONARY_PAGE:
            if dictionary is not None or values:
                raise CorruptData(f"column {shown} has a dictionary where none should be")
            dictionary = (body, page["packed"], page["unpacked"], _dictionary(page, chunk, shown))
        elif page["type"] != _INDEX_PAGE:
            data_page = _data(page, body, shown)
            values += data_page.values
            encodings.add(data_page.encoding)
            if pages <= _KEPT_PAGES:
                found.append(data_page)
        at = body + page["packed"]
    if values != chunk.values:
        raise CorruptData(f"column {shown} has pages of {values} values, and the footer says {chunk.values}")
    if encodings & set(DICTIONARY) and dictionary is None:
        raise CorruptData(f"column {shown} refers to a dictionary and has none")
    limits.check_inflation(len(data), unpacked, f"column {shown}")
    return PageTotals(unpacked, frozenset(encodings), dictionary, found if pages <= _KEPT_PAGES else [])


def _page(data: bytes | memoryview, at: int, chunk: Chunk, shown: str) -> tuple[dict[str, Any], int]:
    """The page header at ``at``, and where the page's body begins."""
    if at >= len(data):
        raise CorruptData(f"column {shown} has fewer values than its footer says: {chunk.values}")
    reader = CompactReader(data, at, max_values=_PAGE_VALUES)
    page = reader.struct(_PAGE)
    if not {"type", "unpacked", "packed"} <= page.keys():
        raise CorruptData(f"column {shown} has a page whose header lacks something")
    if page["packed"] < 0 or page["unpacked"] < 0 or reader.at + page["packed"] > len(data):
        raise CorruptData(
            f"column {shown} has a page of {page['packed']} bytes, of {len(data) - reader.at} left"
        )
    if not DATA_PAGE <= page["type"] <= _DATA_PAGE_V2:
        raise CorruptData(f"column {shown} has a page of type {page['type']}")
    if chunk.codec == 0 and page["packed"] != page["unpacked"]:
        raise CorruptData(f"column {shown} has an uncompressed page of another size than it is")
    return page, reader.at


def _dictionary(page: dict[str, Any], chunk: Chunk, shown: str) -> int:
    """Entries of a dictionary: memory for all of them is made before the first is read."""
    header = page.get("dictionary", {})
    entries, element = header.get("values", -1), chunk.leaf.element
    least = element.length or _LEAST_BYTES.get(element.physical or 0, 1)
    if header.get("encoding") not in (0, 2) or entries < 0 or entries * least > page["unpacked"]:
        raise CorruptData(f"column {shown} has a dictionary of {entries} entries in {page['unpacked']} bytes")
    return int(entries)


def _data(page: dict[str, Any], body: int, shown: str) -> DataPage:
    """A data page whose body begins at ``body``."""
    header = page.get("data" if page["type"] == DATA_PAGE else "data_v2")
    if header is None or "values" not in header or header.get("encoding") not in _ENCODINGS:
        raise CorruptData(f"column {shown} has a page without values or encoding")
    levels = header.get("definition_bytes", 0), header.get("repetition_bytes", 0)
    if header["values"] < 0 or min(levels) < 0 or sum(levels) > min(page["packed"], page["unpacked"]):
        raise CorruptData(f"column {shown} has a page of {header['values']} values, levels of {levels} bytes")
    if page["type"] == _DATA_PAGE_V2 and not 0 <= header.get("nulls", 0) <= header["values"]:
        raise CorruptData(f"column {shown} has a page with {header['nulls']} nulls")
    return DataPage(
        page["type"],
        body,
        page["packed"],
        page["unpacked"],
        header["values"],
        header["encoding"],
        (header.get("definition"), header.get("repetition")),
    )


def dictionary_lengths(plain: bytes, entries: int) -> Iterator[int]:
    """Bytes of each text of a dictionary, from its unpacked page.

    Raises:
        CorruptData: It has fewer.
    """
    at = 0
    for _ in range(entries):
        size = int.from_bytes(plain[at : at + 4], "little")
        at += 4 + size
        if at > len(plain):
            raise CorruptData(f"a dictionary of {entries} texts ends within one")
        yield size
