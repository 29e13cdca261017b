"""Parquet files of strangers, opened so that no Arrow extension type can act.

Files that Arrow wrote hold an Arrow schema in their footer. Where it names an extension type that some
library has registered in this process, merely opening the file runs that library's code, on bytes that the
file's author chose. Here pyarrow is shown the file with that one key blanked out: columns read as what
Parquet stores, and the types' names and parameters are read from the Arrow schema by a parser of our own.

Example:
    >>> import io
    >>> import pyarrow as pa
    >>> import pyarrow.parquet as pq
    >>> stream = io.BytesIO()
    >>> pq.write_table(pa.table({"obs": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))}), stream)
    >>> with open_parquet(stream) as file:
    ...     file.arrow.schema_arrow.field("obs").type, file.extensions
    (ListType(list<element: float>), {})
"""

from __future__ import annotations

import base64
import binascii
import inspect
import io
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, Self

from rlio.errors import CorruptData, UnsafeData, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.parquet_metadata import (
    BYTE_ARRAY,
    DELTA_BYTE_ARRAY,
    DICTIONARY,
    Chunk,
    FileMetadata,
    PageTotals,
    dictionary_lengths,
    measure_pages,
    parse_metadata,
    read_footer,
)

__all__ = ["Extension", "ForeignFile", "open_parquet", "registered_extensions"]

_KEY = b"ARROW:schema"
_BLANK = b"rlio--hidden"  # of the same length, and nobody's key
_MAX_FIELDS = 4096
_MAX_DEPTH = 16
# pyarrow's names of the codecs that it unpacks on request, by their numbers in a footer.
_CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
# Bytes of a value in memory, by physical type; those of texts are measured.
_WIDTHS = (1, 4, 8, 12, 4, 8)


class Extension(NamedTuple):
    """An Arrow extension type, as the file names it."""

    name: str
    #: What the type wrote about itself; JSON by custom.
    parameters: bytes


@dataclass(frozen=True)
class ForeignFile:
    """An open Parquet file.

    Attributes:
        arrow: pyarrow's ParquetFile; Any, since pyarrow ships no type information.
        extensions: Path of a field (names joined by dots) -> its extension type.
        layout: What the footer says, as far as it was checked.
    """

    arrow: Any
    extensions: dict[str, Extension]
    layout: FileMetadata
    _bytes: _Masked
    _limits: Limits

    def widest(self, group: int, names: Collection[str]) -> int:
        """Check the pages of columns of a row group, and hold them until other pages are asked for.

        Args:
            group: Number of the row group.
            names: Top-level columns; no others may be read before the next call.

        Returns:
            More bytes than any one text in them can have.

        Raises:
            CorruptData: The pages are not those that the footer speaks of.
            UnsafeData: They would take more memory than a row group may.
        """
        self._bytes.release()
        widest, decoded, packed = 1, 0, 0
        for chunk in self.layout.groups[group].chunks:
            if chunk.leaf.path[0] not in names:
                continue
            packed += chunk.stop - chunk.start
            if packed > self._limits.group_bytes:
                raise UnsafeData(f"a row group of more than {self._limits.group_bytes} bytes, packed")
            data = self._bytes.hold(chunk.start, chunk.stop)
            totals = measure_pages(data, chunk, limits=self._limits)
            if chunk.leaf.element.physical == BYTE_ARRAY:
                widest = max(widest, totals.unpacked)
                decoded += self._text_bytes(data, chunk, totals)
            else:
                element = chunk.leaf.element
                decoded += chunk.values * (element.length or _WIDTHS[element.physical or 0])
            if decoded > self._limits.group_bytes:
                raise UnsafeData(
                    f"a row group that takes more than {self._limits.group_bytes} bytes in memory, by column "
                    f"{excerpt('.'.join(chunk.leaf.path))}: raise Limits.group_bytes if the file is yours"
                )
        return widest

    def _text_bytes(self, data: bytes, chunk: Chunk, totals: PageTotals) -> int:
        """Bytes of the texts of a chunk that must be in memory at once.

        Of one text a row, the caller takes as few rows at a time as are needed. Where a row is a list of
        them, a single row may repeat a text of the dictionary a million times.
        """
        if not chunk.leaf.repeated:
            return 0
        if DELTA_BYTE_ARRAY in totals.encodings:
            return chunk.values * totals.unpacked
        if totals.dictionary is None or not totals.encodings & set(DICTIONARY):
            return totals.unpacked
        start, packed, unpacked, entries = totals.dictionary
        if chunk.values * unpacked <= self._limits.free_bytes:
            return chunk.values * unpacked
        page = data[start : start + packed]
        plain = page if chunk.codec == 0 else _decompressed(page, chunk.codec, unpacked)
        return totals.unpacked + chunk.values * max(dictionary_lengths(plain, entries), default=0)

    def close(self) -> None:
        """Close the file and its stream."""
        self.arrow.close(force=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_parquet(stream: IO[bytes], *, limits: Limits = DEFAULT_LIMITS) -> ForeignFile:
    """Open a Parquet file; it owns ``stream`` from now on.

    Raises:
        CorruptData: It is no Parquet file.
        UnsafeData: It is encrypted, or asks for more than ``limits``.
    """
    import pyarrow.parquet as pq

    footer, start = read_footer(stream, limits)
    layout = parse_metadata(footer, end=start, limits=limits)
    masked = _Masked(stream, footer.replace(_KEY, _BLANK), start)
    options: dict[str, Any] = {"page_checksum_verification": True}
    # Parquet's own logical types become extension types too, where pyarrow knows that option.
    if "arrow_extensions_enabled" in inspect.signature(pq.ParquetFile.__init__).parameters:
        options["arrow_extensions_enabled"] = False
    arrow = pq.ParquetFile(masked, **options)
    written = (arrow.metadata.metadata or {}).get(_BLANK)
    extensions = {} if written is None else _extensions(written)
    return ForeignFile(arrow, extensions, layout, masked, limits)


def _decompressed(page: bytes, codec: int, size: int) -> bytes:
    """An unpacked page of ``size`` bytes, which were checked to be no more than may be."""
    import pyarrow as pa

    if codec not in _CODECS or not pa.Codec.is_available(_CODECS[codec]):
        raise UnsafeData(f"a dictionary of texts in lists, compressed with codec {codec}: cannot be measured")
    return bytes(pa.Codec(_CODECS[codec]).decompress(page, size).to_pybytes())


def registered_extensions() -> frozenset[str]:
    """Names of the extension types that libraries have registered in this process."""
    import pyarrow as pa

    # pyarrow keeps the list, but has no public way to read it; without it none counts as registered, and then
    # still none can act.
    kinds = getattr(pa.lib, "_python_extension_types_registry", ())
    return frozenset(kind.extension_name for kind in kinds)


class _Masked(io.RawIOBase):
    """``stream``, with other bytes from ``start`` on: as many as are given.

    Bytes that were checked are held and served from memory, so that they cannot change in between.
    """

    def __init__(self, stream: IO[bytes], patch: bytes, start: int) -> None:
        super().__init__()
        self._stream = stream
        self._patch = patch
        self._start = start
        self._held: dict[int, bytes] = {}

    def hold(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), which from now on are what is read there.

        Raises:
            CorruptData: The file ends before.
        """
        self._stream.seek(start)
        data = self._stream.read(stop - start)
        if len(data) != stop - start:
            raise CorruptData(f"the file ends at byte {start + len(data)}, within its pages")
        self._held[start] = data
        return data

    def release(self) -> None:
        """Hold nothing any more."""
        self._held.clear()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def read(self, size: int = -1) -> bytes:
        at = self._stream.tell()
        held = self._held.get(at)
        if held is not None and 0 <= size <= len(held):
            self._stream.seek(at + size)
            return held[:size]
        data = self._stream.read(size)
        low, high = max(at, self._start), min(at + len(data), self._start + len(self._patch))
        if low >= high:
            return data
        patch = self._patch[low - self._start : high - self._start]
        return data[: low - at] + patch + data[high - at :]

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            super().close()


# ---- the Arrow schema, a flatbuffer ----


def _extensions(written: bytes) -> dict[str, Extension]:
    """Extension types that the Arrow schema in a footer names.

    Source: Arrow's IPC format, "Encapsulated message format", and its Schema.fbs and Message.fbs, which
        number
    a table's fields as here.
    """
    try:
        message = base64.b64decode(written, validate=True)
        prefix = 8 if message[:4] == b"\xff\xff\xff\xff" else 4
        root = _Table.root(message, prefix)
        header = root.table(2)
        found: dict[str, Extension] = {}
        if header is not None:
            _collect(header.tables(1), "", found, 0)
    except (binascii.Error, struct.error, IndexError, ValueError, UnicodeError) as error:
        raise CorruptData(f"damaged Arrow schema in the footer: {excerpt(str(error))}") from error
    return found


def _collect(fields: list[_Table], prefix: str, found: dict[str, Extension], depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError("fields nested too deeply")
    for field in fields:
        path = prefix + (field.text(0) or b"").decode("utf-8")
        metadata = {pair.text(0): pair.text(1) or b"" for pair in field.tables(6)}
        name = metadata.get(b"ARROW:extension:name")
        if name is not None:
            found[path] = Extension(name.decode("utf-8"), metadata.get(b"ARROW:extension:metadata", b""))
        _collect(field.tables(5), f"{path}.", found, depth + 1)


class _Table:
    """A flatbuffer table: its fields are found through its table of offsets, every one of them checked."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self._offsets = at - self._number("<i", at)
        self._size = self._number("<H", self._offsets)

    @classmethod
    def root(cls, data: bytes, start: int) -> _Table:
        return cls(data, start + struct.unpack_from("<I", data, start)[0])

    def _number(self, form: str, at: int) -> int:
        if not 0 <= at < len(self._data):
            raise ValueError("an offset beyond the end")
        return int(struct.unpack_from(form, self._data, at)[0])

    def _target(self, field: int) -> int | None:
        """Where a field's text, table or vector lies; None if the table lacks the field."""
        entry = 4 + 2 * field
        offset = self._number("<H", self._offsets + entry) if entry < self._size else 0
        return None if offset == 0 else self._follow(self._at + offset)

    def _follow(self, at: int) -> int:
        return at + self._number("<I", at)

    def text(self, field: int) -> bytes | None:
        at = self._target(field)
        if at is None:
            return None
        length = self._number("<I", at)
        if at + 4 + length > len(self._data):
            raise ValueError("text beyond the end")
        return self._data[at + 4 : at + 4 + length]

    def table(self, field: int) -> _Table | None:
        at = self._target(field)
        return None if at is None else _Table(self._data, at)

    def tables(self, field: int) -> list[_Table]:
        at = self._target(field)
        if at is None:
            return []
        count = self._number("<I", at)
        if count > _MAX_FIELDS:
            raise ValueError(f"{count} fields")
        return [_Table(self._data, self._follow(at + 4 + 4 * i)) for i in range(count)]
