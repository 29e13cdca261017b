"""Converts one column between NumPy and Arrow, by its spec. Fixed-size data is not copied either way.

`rlio.schemas.parquet` handles row groups and their columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.encoded_picture import EncodedPicture
from rlio.schemas.column import ColumnSpec
from rlio.schemas.json_values import load_value
from rlio.schemas.nested import structure_from_arrow, structure_to_arrow, structure_type
from rlio.schemas.number_arrays import numbers_from_arrow, numbers_to_arrow, numbers_type

__all__ = ["arrow_type", "expanded_bytes", "from_arrow", "page_rows", "pictures_of", "to_arrow"]


def arrow_type(spec: ColumnSpec, *, nullable: bool) -> pa.DataType:
    """Return the Arrow type of a column. Wide nullable rows have variable length, so nulls take no space."""
    if spec.kind == "text":
        return pa.binary() if spec.dtype == "|S" else pa.string()
    if spec.kind == "json":
        return pa.string()
    if spec.kind == "picture":
        return pa.binary()
    if spec.structure is not None:
        return structure_type(spec.structure)
    return numbers_type(spec, nullable=nullable)


def to_arrow(values: NDArray[Any], valid: NDArray[np.bool_] | None, spec: ColumnSpec) -> pa.Array:
    """Return the Arrow array of a column.

    Args:
        values: Shape (k, *shape): one per row, or, with ``valid``, one per True in it.
        valid: Shape (rows,); None if every row must have a value.
        spec: The column's type. Fixed-size data is viewed, not copied: keep ``values`` unchanged while the
            array is in use.
    """
    if spec.kind == "picture":
        values = object_column(picture.data for picture in values.tolist())
    if spec.kind in ("text", "json", "picture"):
        return _objects_to_arrow(values, valid, spec)
    if spec.structure is not None:
        return structure_to_arrow(values.tolist(), spec.structure, valid)
    return numbers_to_arrow(values, valid, spec)


def from_arrow(array: pa.Array, spec: ColumnSpec) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Return the values of a decoded column.

    Returns:
        (values, valid): values of shape (k, *shape), writable, over Arrow's own memory if the layout allows;
        pictures are still encoded, shape (k,);
        ``valid`` of shape (rows,), or None if the column has no nulls and k is the number of rows.

    Raises:
        CorruptData: The stored lengths do not fit the spec.
    """
    valid = None
    if array.null_count:
        valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool)
    if spec.kind in ("text", "json"):
        return _texts_from_arrow(array, spec), valid
    if spec.kind == "picture":
        return pictures_of((array.drop_null() if array.null_count else array).to_pylist(), spec), valid
    if spec.structure is not None:
        dense = array.drop_null() if array.null_count else array
        return object_column(structure_from_arrow(dense, spec.structure)), valid
    return numbers_from_arrow(array, spec), valid


def pictures_of(files: Iterable[bytes], spec: ColumnSpec) -> NDArray[Any]:
    """Return the bytes of files as a column of encoded pictures; nothing is checked before it is decoded."""
    assert spec.codec is not None
    return object_column(EncodedPicture(data, spec.codec, spec.shape) for data in files)


def page_rows(rows: int) -> dict[str, Any]:
    """Return arguments of `pyarrow.parquet.ParquetWriter` that end a page after ``rows`` rows.

    pyarrow 23 and later end a page after 20,000 rows by default. Earlier versions have neither this limit nor
    an argument for it.
    """
    return {"max_rows_per_page": rows} if int(pa.__version__.partition(".")[0]) >= 23 else {}


def _objects_to_arrow(values: NDArray[Any], valid: NDArray[np.bool_] | None, spec: ColumnSpec) -> pa.Array:
    """Return strings, bytes, or the JSON text of objects, which `PolicySchema.flatten` has already made."""
    listed = values.tolist()
    kind = arrow_type(spec, nullable=True)
    if valid is None:
        return pa.array(listed, kind)
    spread: list[Any] = [None] * len(valid)
    for index, value in zip(np.flatnonzero(valid).tolist(), listed, strict=True):
        spread[index] = value
    return pa.array(spread, kind)


def expanded_bytes(array: pa.DictionaryArray) -> int:
    """Return the bytes of a dictionary-encoded column's texts after expansion to its rows."""
    lengths = pc.binary_length(array.dictionary).to_numpy(zero_copy_only=False)
    used = array.indices.drop_null().to_numpy()
    return int(np.bincount(used, minlength=len(lengths)) @ lengths) if len(used) else 0


def _texts_from_arrow(array: pa.Array, spec: ColumnSpec) -> NDArray[Any]:
    """Return strings, or the objects of their JSON text: a new one per row, because objects are mutable."""
    dense = array.drop_null() if array.null_count else array
    if pa.types.is_dictionary(dense.type):
        distinct = np.array([*dense.dictionary.to_pylist(), None], object)[:-1]
        listed = distinct[dense.indices.to_numpy()].tolist()
    else:
        listed = dense.to_pylist()
    if spec.dtype != "|O":
        # For a dtype without a width, NumPy uses the width of the longest text and its own byte order.
        texts = np.array(listed, spec.dtype[1:])
        return texts.astype(texts.dtype.newbyteorder(">")) if spec.dtype[0] == ">" else texts
    return object_column(map(load_value, listed) if spec.kind == "json" else listed)
