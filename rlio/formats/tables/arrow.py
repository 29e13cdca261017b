"""Arrow: files of record batches, as the stream format or the file format (Feather) has them; one row a step.

A stream is a sequence of messages; a file also has a footer with their positions. Opening reads only the
metadata of the messages. Buffers may be compressed; their inflated size is known, and bounded, before they
are inflated. Code of extension types does not run: their storage is read. Columns with a dictionary
(categories) are refused.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, Any, Final, NamedTuple

from rlio.errors import CorruptData, UnknownLayout, UnsafeData
from rlio.formats.files.arrow_columns import bytes_of_views
from rlio.formats.files.inputs import Guard
from rlio.formats.files.parquet_footer import Extension, plain_schema
from rlio.formats.format import Format, Marks
from rlio.formats.place import Place
from rlio.formats.tables.table import Pieces
from rlio.limits import Limits
from rlio.storage import InputFile, InputFiles, each_file
from rlio.storage.open_files import OpenFiles
from rlio.support.calls import closing_on_error

FORMAT = Format(
    name="arrow",
    title="Arrow",
    marks=Marks(endings=(".arrow", ".feather", ".ipc"), by_ending=True),
    source="rlio.formats.tables.arrow:ArrowTable",
    table="rlio.formats.tables.arrow:ArrowTable",
    about="Columns by rlio's names, or by a mapping (docs/mapping.md).",
)

_MAGIC: Final = b"ARROW1"
_CONTINUES: Final = 0xFFFFFFFF
_OPEN_FILES: Final = 4
# Bodies of so many bytes are read on a remote store: another request takes as long.
_PASSED_BYTES: Final = 4 << 20
# Fields of Arrow's flatbuffers: of a message; of a schema; of a record batch; of a footer (a block has 24
# bytes).
_KIND, _HEADER, _BODY_LENGTH = 1, 2, 3
_BIG_ENDIAN = 0
_ROWS, _BUFFERS, _COMPRESSION = 0, 2, 3
_FOOTER_SCHEMA, _FOOTER_DICTIONARIES, _FOOTER_BATCHES, _BLOCK = 1, 2, 3, 24
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_NO_CATEGORIES: Final = (
    "found columns with dictionaries (categories), expected plain ones: cast them to text or numbers, or "
    "write Parquet"
)


class _Batch(NamedTuple):
    """A record batch in a file: where its message begins, and the bytes of its metadata and body."""

    start: int
    metadata: int
    body: int


class ArrowTable(Pieces):
    """Files in Arrow's IPC formats; a `Table`.

    Args:
        place: The files.
        limits: Bounds on the files.
        opens: Opens a file by its number, as `InputFiles.open`; None: that of `inputs`.
    """

    def __init__(
        self, place: Place, *, limits: Limits, opens: Callable[..., IO[bytes]] | None = None
    ) -> None:
        super().__init__(place.uri, place.files, limits)
        self.inputs: InputFiles = InputFiles(place.files)
        self._opens = opens or self.inputs.open
        self._limits = limits
        self._open: OpenFiles[int, IO[bytes]] = OpenFiles(_OPEN_FILES, close=lambda stream: stream.close())
        self._batches: list[list[_Batch]] = []
        self._schemas: list[tuple[Any, dict[str, Extension]]] = []
        with closing_on_error(self):
            for number in each_file(self.files):
                with Guard(self.files[number], format="Arrow"):
                    self._index(number)

    def pieces(self, file: int) -> Sequence[_Batch]:
        """The record batches of a file."""
        return self._batches[file]

    def schema(self, file: int) -> Any:
        """The schema of a file, with the storage of extension types."""
        return self._schemas[file][0]

    def _index(self, number: int) -> None:
        batches, rows = [], []
        schema: tuple[Any, dict[str, Extension]] | None = None
        # It stays open: what was fetched is read again, for the episodes and their rows.
        stream = self._open.add(number, self._opens(number, scans=True))
        size, starts = stream.seek(0, os.SEEK_END), None
        stream.seek(0)
        if stream.read(len(_MAGIC)) == _MAGIC:
            footer = _footer(stream, size, self._limits)
            schema, starts = _schema_of_file(footer), _starts_of(footer)
        passed = 0 if self.files[number].fs is None else _PASSED_BYTES
        for place, metadata in _messages(stream, size, self._limits, starts, passed):
            kind, header = _header(metadata)
            if kind == _SCHEMA and schema is None:
                _check_endian(metadata, header)
                schema = plain_schema(struct.pack("<II", _CONTINUES, len(metadata)) + metadata)
            elif kind == _DICTIONARY:
                raise UnknownLayout(_NO_CATEGORIES)
            elif kind == _RECORD_BATCH and schema is not None:
                count = _field(metadata, header, _ROWS)
                batches.append(place)
                rows.append(0 if count is None else struct.unpack_from("<q", metadata, count)[0])
            else:
                raise CorruptData(f"found a message of kind {kind}, expected a schema and record batches")
        if schema is None:
            raise CorruptData("found no schema")
        if len(schema[0].names) > self._limits.columns or max(rows, default=0) > self._limits.group_rows:
            raise UnsafeData("more columns, or rows in a batch, than Limits allow")
        if min(rows, default=0) < 0:
            raise CorruptData("found a batch of less than no rows")
        self._schemas.append(schema)
        self._batches.append(batches)
        self.add_pieces(schema[0].names, rows)

    def places(self, file: int, piece: int, names: Collection[str]) -> Iterator[tuple[int, int]]:
        """See `Pieces`. A batch is read with all of its columns."""
        start, metadata, body = self._batches[file][piece]
        yield start, start + 8 + metadata + body

    def decode(self, file: int, piece: int, names: Sequence[str]) -> Any:
        """See `Pieces`."""
        with Guard(self.files[file], piece, format="Arrow"):
            return self._decoded(file, piece, names)

    def _decoded(self, file: int, piece: int, names: Sequence[str]) -> Any:
        import pyarrow as pa

        stream = self._open.get(file) or self._open.add(file, self._opens(file))
        place = self._batches[file][piece]
        allowance = self.allowance.piece()
        allowance.spend(place.body)
        stream.seek(place.start)
        message = stream.read(8 + place.metadata + place.body)
        allowance.spend(self._inflated(message[8 : 8 + place.metadata], message[8 + place.metadata :]))
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), self._schemas[file][0])
        batch.validate(full=True)
        found = batch.select(names)
        allowance.spend(sum(map(bytes_of_views, found.columns)))
        return found

    def _inflated(self, metadata: bytes, body: bytes) -> int:
        """Bytes that compressed buffers become: each begins with its length."""
        _, header = _header(metadata)
        if _field(metadata, header, _COMPRESSION) is None:
            return 0
        first, count = _vector(metadata, header, _BUFFERS)
        inflated = 0
        for number in range(count):
            offset, size = struct.unpack_from("<qq", metadata, first + 16 * number)
            if size > 0:
                (length,) = struct.unpack_from("<q", body, offset)
                if length < -1:
                    raise CorruptData(f"found a buffer of {length} bytes")
                inflated += size if length == -1 else length
        self._limits.check_inflation(len(body), inflated, "a batch")
        return inflated

    def extensions(self, file: int) -> Mapping[str, Extension]:
        """See `Pieces`."""
        return self._schemas[file][1]

    def close(self) -> None:
        """Close all files."""
        super().close()
        self._open.close()
        self.inputs.close()


def open_plain_arrow(file: InputFile, *, limits: Limits, opens: Callable[..., IO[bytes]]) -> ArrowTable:
    """A file without extension types; for ``opens`` see `ArrowTable`.

    Raises:
        CorruptData: The file is damaged. (UnsafeData: it has extension types.)
        UnknownLayout: It has categories.
    """
    table = ArrowTable(Place(file.uri, None, (file,)), limits=limits, opens=opens)
    if table.extensions(0):
        table.close()
        raise UnsafeData("found Arrow extension types, expected plain columns", uri=file.uri)
    return table


def read_arrow(table: ArrowTable) -> Any:
    """All rows of a table of one file, validated.

    Raises:
        CorruptData: The file is damaged. (UnsafeData: it is too large.)
    """
    import pyarrow as pa

    batches, allowance = [], table.allowance.piece()
    for piece in range(len(table.pieces(0))):
        batches.append(table.decode(0, piece, table.schema(0).names))
        allowance.spend(batches[-1].get_total_buffer_size())
    return pa.Table.from_batches(batches, table.schema(0))


def _footer(stream: IO[bytes], size: int, limits: Limits) -> bytes:
    """The footer of a file, which its last bytes measure."""
    stream.seek(max(0, size - 4 - len(_MAGIC)))
    tail = stream.read()
    (length,) = struct.unpack_from("<i", tail)
    if not tail.endswith(_MAGIC) or not 0 < length <= min(limits.footer_bytes, size - len(tail)):
        raise CorruptData("found no footer: the file is cut off")
    stream.seek(size - len(tail) - length)
    return stream.read(length)


def _schema_of_file(footer: bytes) -> tuple[Any, dict[str, Extension]]:
    root = struct.unpack_from("<I", footer)[0]
    if (found := _field(footer, root, _FOOTER_SCHEMA)) is not None:
        _check_endian(footer, found + struct.unpack_from("<I", footer, found)[0])
    if _vector(footer, root, _FOOTER_DICTIONARIES)[1]:
        raise UnknownLayout(_NO_CATEGORIES)
    empty = _MAGIC + b"\0\0" + footer + struct.pack("<i", len(footer)) + _MAGIC
    return plain_schema(empty, is_file=True)


def _starts_of(footer: bytes) -> list[int]:
    """Where the messages of the record batches begin."""
    first, count = _vector(footer, struct.unpack_from("<I", footer)[0], _FOOTER_BATCHES)
    return [struct.unpack_from("<q", footer, first + _BLOCK * number)[0] for number in range(count)]


def _check_endian(data: bytes, schema: int) -> None:
    if (endian := _field(data, schema, _BIG_ENDIAN)) is not None and data[endian]:
        raise UnknownLayout("found big-endian values: write them on a usual machine")


def _messages(
    stream: IO[bytes], size: int, limits: Limits, starts: Sequence[int] | None, passed: int
) -> Iterator[tuple[_Batch, bytes]]:
    """Place and metadata of each message, without the bodies.

    Args:
        stream: The file.
        size: Its bytes.
        limits: Bounds on it.
        starts: Where the messages of a file begin; None: it is a stream.
        passed: Most bytes before a message that are read, not passed over.
    """
    left = iter(starts or ())
    start: int | None = 0 if starts is None else next(left, None)
    while start is not None and (starts is not None or start < size):
        target = min(max(0, start), size)
        if 0 < target - stream.tell() <= passed:
            stream.read(target - stream.tell())
        stream.seek(target)
        prefix = stream.read(8)
        marker, length = struct.unpack("<Ii", prefix) if len(prefix) == 8 else (0, 0)
        if marker == _CONTINUES and length == 0 and starts is None:
            if start + len(prefix) < size:
                raise CorruptData(f"bytes follow the end of the stream at byte {start}: expected one stream")
            return
        if marker != _CONTINUES or not 0 < length <= limits.footer_bytes:
            raise CorruptData(f"found no message at byte {start}")
        metadata = stream.read(length)
        place = _field(metadata, struct.unpack_from("<I", metadata)[0], _BODY_LENGTH)
        body = 0 if place is None else struct.unpack_from("<q", metadata, place)[0]
        end = start + 8 + length + body
        if body < 0 or end > size:
            raise CorruptData(f"the message at byte {start} is cut off")
        yield _Batch(start, length, body), metadata
        start = end if starts is None else next(left, None)


def _header(metadata: bytes) -> tuple[int, int]:
    """Kind of a message, and where the table of that kind begins."""
    message = struct.unpack_from("<I", metadata)[0]
    kind, header = _field(metadata, message, _KIND), _field(metadata, message, _HEADER)
    if kind is None or header is None:
        raise CorruptData("found a message without a header")
    return metadata[kind], header + struct.unpack_from("<I", metadata, header)[0]


def _vector(data: bytes, table: int, number: int) -> tuple[int, int]:
    """Where the items of a vector in a table begin, and how many there are."""
    place = _field(data, table, number)
    if place is None:
        return 0, 0
    start = place + struct.unpack_from("<I", data, place)[0]
    return start + 4, struct.unpack_from("<I", data, start)[0]


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a field of a flatbuffer's table lies; None: it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0 or 4 + 2 * number >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
    return table + offset if offset else None
