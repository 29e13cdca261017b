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
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, Self

from rlio.errors import CorruptData, UnsafeData, excerpt

__all__ = ["Extension", "ForeignFile", "open_parquet", "registered_extensions"]

_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_MAX_FOOTER = 64 << 20
_KEY = b"ARROW:schema"
_BLANK = b"rlio--hidden"  # of the same length, and nobody's key
_MAX_FIELDS = 4096
_MAX_DEPTH = 16


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
    """

    arrow: Any
    extensions: dict[str, Extension]

    def close(self) -> None:
        """Close the file and its stream."""
        self.arrow.close(force=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_parquet(stream: IO[bytes]) -> ForeignFile:
    """Open a Parquet file; it owns ``stream`` from now on.

    Raises:
        CorruptData: It is no Parquet file.
        UnsafeData: It is encrypted, or its footer is too large.
    """
    import pyarrow.parquet as pq

    footer, start = _read_footer(stream)
    masked = _Masked(stream, footer.replace(_KEY, _BLANK), start)
    options: dict[str, Any] = {"page_checksum_verification": True}
    # Parquet's own logical types become extension types too, where pyarrow knows that option.
    if "arrow_extensions_enabled" in inspect.signature(pq.ParquetFile.__init__).parameters:
        options["arrow_extensions_enabled"] = False
    arrow = pq.ParquetFile(masked, **options)
    written = (arrow.metadata.metadata or {}).get(_BLANK)
    return ForeignFile(arrow, {} if written is None else _extensions(written))


def registered_extensions() -> frozenset[str]:
    """Names of the extension types that libraries have registered in this process."""
    import pyarrow as pa

    # pyarrow keeps the list, but has no public way to read it; without it none counts as registered, and then
    # still none can act.
    kinds = getattr(pa.lib, "_python_extension_types_registry", ())
    return frozenset(kind.extension_name for kind in kinds)


def _read_footer(stream: IO[bytes]) -> tuple[bytes, int]:
    """The footer's metadata, and where it begins."""
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
    if length > _MAX_FOOTER:
        raise UnsafeData(f"a footer of {length} bytes, more than {_MAX_FOOTER}")
    start = size - 8 - length
    stream.seek(start)
    footer = stream.read(length)
    if len(footer) != length:
        raise CorruptData("the file ends within its footer")
    return footer, start


class _Masked(io.RawIOBase):
    """``stream``, with other bytes from ``start`` on: as many as are given."""

    def __init__(self, stream: IO[bytes], patch: bytes, start: int) -> None:
        super().__init__()
        self._stream = stream
        self._patch = patch
        self._start = start

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
