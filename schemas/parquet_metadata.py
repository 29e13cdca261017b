"""Footers of untrusted Parquet files: bounded before pyarrow parses them, and without Arrow's schema.

Files that Arrow wrote hold an Arrow schema in their footer. If the schema names an extension type that some
library has registered in this process, opening the file already runs that library's code, on bytes that the
file's author chose. This module renames that one key before pyarrow reads the footer. Columns are then read
with their Parquet types, and no extension type can act.

`rlio.schemas.shard_file` reads the footers of rlio's own shards, which are under a CRC.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Any, Final

from rlio.errors import CorruptData, UnsafeData, excerpt
from rlio.limits import Limits

__all__ = ["ARROW_SCHEMA", "FOOTER_BYTES", "MAGIC", "read_footer", "read_metadata"]

#: The bytes at the beginning and the end of a Parquet file.
MAGIC: Final = b"PAR1"
_ENCRYPTED: Final = b"PARE"
#: The key that replaces Arrow's key for its schema in a footer; it has the same length.
ARROW_SCHEMA: Final = b"rlio--hidden"
_ARROWS_KEY: Final = b"ARROW:schema"
#: Bytes at the end that are read at once: most footers are shorter.
FOOTER_BYTES: Final = 64 << 10
# A list takes two levels, and its values a third.
_LEVELS_PER_NESTING: Final = 3


def read_metadata(stream: IO[bytes], *, limits: Limits) -> Any:
    """Return the metadata of a Parquet file, with Arrow's schema under the key `ARROW_SCHEMA`.

    Returns:
        pyarrow's FileMetaData; Any, because pyarrow ships no type information.

    Raises:
        CorruptData: It is not a Parquet file, or cut off, or its footer is damaged.
        UnsafeData: The file is encrypted, or its footer exceeds ``limits``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    def fetch(start: int, stop: int) -> bytes:
        stream.seek(start)
        return stream.read(stop - start)

    size = stream.seek(0, io.SEEK_END)
    footer = read_footer(fetch, size, limits=limits).replace(_ARROWS_KEY, ARROW_SCHEMA)
    try:
        metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
    except (pa.ArrowException, OSError) as error:
        raise CorruptData(f"the footer is not readable as Parquet: {excerpt(str(error))}") from error
    if metadata.num_columns > limits.columns:
        raise UnsafeData(f"{metadata.num_columns} columns, more than {limits.columns}")
    for number in range(metadata.num_columns):
        path = metadata.schema.column(number).path
        if path.count(".") > _LEVELS_PER_NESTING * limits.nesting:
            raise UnsafeData(f"column {excerpt(path)} is nested more than {limits.nesting} deep")
    return metadata


def read_footer(fetch: Callable[[int, int], bytes], size: int, *, limits: Limits) -> bytes:
    """Return the footer of a Parquet file: metadata, its length, and the closing magic.

    Args:
        fetch: Returns the bytes [start, stop) of the file.
        size: Bytes of the file.
        limits: The most that the footer may ask for.

    Raises:
        CorruptData: It is not a Parquet file, or cut off.
        UnsafeData: The file is encrypted, or its footer exceeds ``limits``.
    """
    tail = fetch(max(0, size - FOOTER_BYTES), size)
    if tail[-4:] == _ENCRYPTED:
        raise UnsafeData("an encrypted Parquet file: decrypt it first")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if len(tail) < 12 or tail[-4:] != MAGIC or length > size - 4:
        raise CorruptData(
            f"not a Parquet file, or cut off: it ends in {excerpt(tail[-8:])} instead of a footer"
        )
    if length > limits.footer_bytes:
        raise UnsafeData(
            f"a footer of {length} bytes, more than {limits.footer_bytes}; raise Limits.footer_bytes if the "
            "data are yours"
        )
    footer = tail[-length:] if length <= len(tail) else fetch(size - length, size)
    if len(footer) != length:
        raise CorruptData("the file ends within its footer")
    return footer
