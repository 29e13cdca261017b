"""Opens untrusted Parquet files so that no Arrow extension type can run code.

pyarrow gets a footer without the Arrow schema (`rlio.schemas.parquet_metadata`). The names and parameters of
the extension types are read from that schema as plain texts.

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
import inspect
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rlio.errors import CorruptData, UnsafeData, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.parquet_metadata import ARROW_SCHEMA, read_metadata
from rlio.support.calls import closing_on_error

__all__ = ["Extension", "ForeignFile", "open_parquet", "plain_schema", "registered_extensions"]

_ARROWS_NAME: Final = b"ARROW:extension:name"
# As long as Arrow's key, so the schema stays readable.
_NAME: Final = b"rlio-:extension:name"
_PARAMETERS: Final = b"ARROW:extension:metadata"
# Bytes of a value in memory, by physical type; for FIXED_LEN_BYTE_ARRAY, the column's length.
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
# Arrow reads a column of a row group whole. Of larger groups, it reads pieces; each may be a request.
_LARGE_GROUP: Final = 64 << 20
_BUFFER: Final = 8 << 20
# Columns that are read in turn, of which a remote file keeps what was requested and is not read yet.
_TURNS: Final = 12


class Extension(NamedTuple):
    """An Arrow extension type as the file names it."""

    name: str
    #: The type's own description, usually JSON.
    parameters: bytes


@dataclass(frozen=True)
class ForeignFile:
    """An open Parquet file.

    Attributes:
        arrow: pyarrow's ParquetFile; Any, because pyarrow ships no type information.
        extensions: Path of a field (names joined by dots) -> its extension type.
        reads_parts: Whether columns of a row group are read in parts, in turn.
    """

    arrow: Any
    extensions: dict[str, Extension]
    reads_parts: bool

    def spans(
        self, group: int, names: Collection[str] | None, share: float = 1.0
    ) -> Iterator[tuple[int, int]]:
        """The bytes ``[start, stop)`` of a row group, or of columns of it, about in the order of reading.

        ``share``: of the rows, from the first one on, if they are read in parts.
        """
        chunks = []
        for _, chunk in self.columns(group, names):
            first = chunk.data_page_offset
            if chunk.dictionary_page_offset is not None:
                first = min(first, chunk.dictionary_page_offset)
            chunks.append((first, first + chunk.total_compressed_size))
        if not self.reads_parts:
            yield from chunks
        elif len(chunks) <= _TURNS:
            # Columns take turns: what belongs to the same rows is about the same part of each.
            parts = [
                ((at - first) / (stop - first), at, min(at + _BUFFER, stop))
                for first, stop in chunks
                for at in range(first, stop, _BUFFER)
            ]
            yield from (part[1:] for part in sorted(parts) if part[0] < share)

    def columns(self, group: int, names: Collection[str] | None) -> list[tuple[Any, Any]]:
        """The columns of a row group in some top-level fields: pyarrow's schema and metadata of each.

        Args:
            group: Number of the row group.
            names: Names of the fields; None: all.
        """
        schema, info = self.arrow.metadata.schema, self.arrow.metadata.row_group(group)
        # By number, because a name may contain the dots that join paths.
        owners = [field.name for field in self.arrow.schema_arrow for _ in range(_leaves(field.type))]
        wanted = [i for i, name in enumerate(owners) if names is None or name in names]
        return [(schema.column(i), info.column(i)) for i in wanted]

    def widest(self, group: int, names: Collection[str], *, limits: Limits) -> int:
        """Check the declared sizes of some columns of a row group.

        Returns:
            The maximum bytes of a single text in them.

        Raises:
            UnsafeData: The columns would take more memory than a row group may.
        """
        widest, decoded = 1, 0
        for leaf, chunk in self.columns(group, names):
            unpacked = chunk.total_uncompressed_size
            if chunk.file_path:
                raise UnsafeData(
                    f"column {excerpt(leaf.path)} lies in another file, {excerpt(chunk.file_path)}, which is "
                    "not opened"
                )
            limits.check_inflation(chunk.total_compressed_size, unpacked, f"column {excerpt(leaf.path)}")
            if leaf.physical_type != "BYTE_ARRAY":
                decoded += chunk.num_values * _WIDTHS.get(leaf.physical_type, leaf.length)
            elif leaf.max_repetition_level:
                decoded += unpacked
            else:  # The caller limits the rows it reads at a time by the size of these texts.
                widest = max(widest, unpacked)
            if decoded > limits.group_bytes:
                raise UnsafeData(
                    f"a row group takes more than {limits.group_bytes} bytes in memory, by column "
                    f"{excerpt(leaf.path)}: raise Limits.group_bytes if you trust the file"
                )
        return widest

    def close(self) -> None:
        """Close the file and its stream."""
        self.arrow.close(force=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_parquet(stream: IO[bytes], *, limits: Limits = DEFAULT_LIMITS) -> ForeignFile:
    """Open a Parquet file. The result owns ``stream``.

    Raises:
        CorruptData: The file is not a Parquet file.
        UnsafeData: The file is encrypted, or exceeds ``limits``.
    """
    with closing_on_error(stream):
        return _open(stream, limits)


def _open(stream: IO[bytes], limits: Limits) -> ForeignFile:
    metadata = read_metadata(stream, limits=limits)
    options: dict[str, Any] = {"page_checksum_verification": True}
    # With this option on, Parquet's own logical types would become extension types too.
    if "arrow_extensions_enabled" in inspect.signature(pq.ParquetFile.__init__).parameters:
        options["arrow_extensions_enabled"] = False
    groups = (metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    reads_parts = max(groups, default=0) > _LARGE_GROUP
    # With a buffer, pyarrow before 19 reads past the end of memory where pages are small, or crashes.
    reads_parts = reads_parts and int(pa.__version__.partition(".")[0]) >= 19
    if reads_parts:
        options |= {"pre_buffer": False, "buffer_size": _BUFFER}
    written = (metadata.metadata or {}).get(ARROW_SCHEMA)
    extensions = {} if written is None else plain_schema(written, is_base64=True)[1]
    return ForeignFile(pq.ParquetFile(stream, metadata=metadata, **options), extensions, reads_parts)


def registered_extensions() -> frozenset[str]:
    """Names of the extension types that libraries have registered in this process."""
    # pyarrow keeps the list, but has no public way to read it. Without the list no type counts as registered,
    # and still none can run code.
    kinds = getattr(pa.lib, "_python_extension_types_registry", ())
    return frozenset(kind.extension_name for kind in kinds)


def plain_schema(
    data: bytes, *, is_file: bool = False, is_base64: bool = False
) -> tuple[Any, dict[str, Extension]]:
    """The Arrow schema in an IPC message, with storage types, and the extension type of each path.

    Args:
        data: The message.
        is_file: Whether it is a whole file instead.
        is_base64: Whether it is encoded, as in the footers of Parquet files.

    Raises:
        CorruptData: The message is not a schema.
    """
    try:
        message = base64.b64decode(data, validate=True) if is_base64 else data
        plain = pa.py_buffer(message.replace(_ARROWS_NAME, _NAME))
        schema = pa.ipc.open_file(plain).schema if is_file else pa.ipc.read_schema(plain)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptData(f"damaged Arrow schema: {excerpt(str(error))}") from error
    return schema, dict(_extensions(schema, ""))


def _leaves(kind: Any) -> int:
    """The number of Parquet columns of a field of an Arrow type."""
    return sum(_leaves(kind.field(i).type) for i in range(kind.num_fields)) or 1


def _extensions(fields: Iterable[Any], prefix: str) -> Iterable[tuple[str, Extension]]:
    """Path of each field with an extension type, and the type."""
    for field in fields:
        path = prefix + field.name
        metadata = field.metadata or {}
        if _NAME in metadata:
            name = metadata[_NAME].decode("utf-8", "replace")
            yield path, Extension(name, metadata.get(_PARAMETERS, b""))
        children = [field.type.field(i) for i in range(field.type.num_fields)]
        yield from _extensions(children, f"{path}.")
