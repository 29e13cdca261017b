"""Parquet files of strangers, opened so that no Arrow extension type can act.

pyarrow is given a footer without the Arrow schema (`rlio.schemas.parquet_metadata`); the names and parameters
of the extension types in it are read from it as plain texts.

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
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import IO, Any, Final, NamedTuple, Self

from rlio.errors import CorruptData, UnsafeData, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.parquet_metadata import ARROW_SCHEMA, read_metadata

__all__ = ["Extension", "ForeignFile", "open_parquet", "registered_extensions"]

_ARROWS_NAME: Final = b"ARROW:extension:name"
# As long as Arrow's key, so that its schema stays readable.
_NAME: Final = b"rlio-:extension:name"
_PARAMETERS: Final = b"ARROW:extension:metadata"
# Bytes of a value in memory, by physical type; those of FIXED_LEN_BYTE_ARRAY are the column's.
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


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

    def columns(self, group: int, names: Collection[str] | None) -> list[tuple[Any, Any]]:
        """The columns of a row group that belong to top-level fields: pyarrow's schema and metadata of each.

        Args:
            group: Number of the row group.
            names: Of the fields; None: all.
        """
        schema, info = self.arrow.metadata.schema, self.arrow.metadata.row_group(group)
        # By number: a name may have the dots that paths are joined by.
        owners = [field.name for field in self.arrow.schema_arrow for _ in range(_leaves(field.type))]
        wanted = [i for i, name in enumerate(owners) if names is None or name in names]
        return [(schema.column(i), info.column(i)) for i in wanted]

    def widest(self, group: int, names: Collection[str], *, limits: Limits) -> int:
        """Check the sizes that the footer declares for columns of a row group.

        Returns:
            As many bytes as any one text in them can have.

        Raises:
            UnsafeData: The columns would take more memory than a row group may.
        """
        widest, decoded = 1, 0
        for leaf, chunk in self.columns(group, names):
            unpacked = chunk.total_uncompressed_size
            if chunk.file_path:
                raise UnsafeData(
                    f"column {excerpt(leaf.path)} lies in another file, {excerpt(chunk.file_path)}: none is "
                    "opened"
                )
            limits.check_inflation(chunk.total_compressed_size, unpacked, f"column {excerpt(leaf.path)}")
            if leaf.physical_type != "BYTE_ARRAY":
                decoded += chunk.num_values * _WIDTHS.get(leaf.physical_type, leaf.length)
            elif leaf.max_repetition_level:
                decoded += unpacked
            else:  # The caller takes as few rows at a time as these texts need.
                widest = max(widest, unpacked)
            if decoded > limits.group_bytes:
                raise UnsafeData(
                    f"a row group that takes more than {limits.group_bytes} bytes in memory, by column "
                    f"{excerpt(leaf.path)}: raise Limits.group_bytes if the file is yours"
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
    """Open a Parquet file; it owns ``stream`` from now on.

    Raises:
        CorruptData: It is no Parquet file.
        UnsafeData: It is encrypted, or asks for more than ``limits``.
    """
    import pyarrow.parquet as pq

    metadata = read_metadata(stream, limits=limits)
    options: dict[str, Any] = {"page_checksum_verification": True}
    # Parquet's own logical types become extension types too, where pyarrow knows that option.
    if "arrow_extensions_enabled" in inspect.signature(pq.ParquetFile.__init__).parameters:
        options["arrow_extensions_enabled"] = False
    written = (metadata.metadata or {}).get(ARROW_SCHEMA)
    extensions = {} if written is None else dict(_extensions(_arrow_schema(written), ""))
    return ForeignFile(pq.ParquetFile(stream, metadata=metadata, **options), extensions)


def registered_extensions() -> frozenset[str]:
    """Names of the extension types that libraries have registered in this process."""
    import pyarrow as pa

    # pyarrow keeps the list, but has no public way to read it; without it none counts as registered, and then
    # still none can act.
    kinds = getattr(pa.lib, "_python_extension_types_registry", ())
    return frozenset(kind.extension_name for kind in kinds)


def _leaves(kind: Any) -> int:
    """Columns of Parquet that a field of an Arrow type has."""
    return sum(_leaves(kind.field(i).type) for i in range(kind.num_fields)) or 1


def _arrow_schema(written: bytes) -> Any:
    """The Arrow schema of a footer, of which extension types are plain metadata of their fields."""
    import pyarrow as pa

    try:
        message = base64.b64decode(written, validate=True)
        return pa.ipc.read_schema(pa.py_buffer(message.replace(_ARROWS_NAME, _NAME)))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptData(f"damaged Arrow schema in the footer: {excerpt(str(error))}") from error


def _extensions(fields: Iterable[Any], prefix: str) -> Iterable[tuple[str, Extension]]:
    """Path of each field of an extension type, and that."""
    for field in fields:
        path = prefix + field.name
        metadata = field.metadata or {}
        if _NAME in metadata:
            name = metadata[_NAME].decode("utf-8", "replace")
            yield path, Extension(name, metadata.get(_PARAMETERS, b""))
        children = [field.type.field(i) for i in range(field.type.num_fields)]
        yield from _extensions(children, f"{path}.")
