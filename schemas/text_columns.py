"""Measures the memory that texts and objects of a row group will take, before any is created.

A text that is stored once can be in every row, and JSON grows when it is parsed: three bytes, ``[],``, take
sixty. Both are measured on the distinct texts, in Arrow.

`rlio.schemas.arrow` turns the texts into NumPy arrays.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlio.errors import UnsafeData
from rlio.limits import Limits
from rlio.schemas.arrow import expanded_bytes
from rlio.schemas.column import ColumnSpec

__all__ = ["check_nested", "check_texts"]

# Bytes of a Python list or dict with its place in another; of a value in one; of an object per row.
_CONTAINER_BYTES = 72
_VALUE_BYTES = 40
_ROW_BYTES = 64
# Objects may take this many times the limit of a row group.
_OBJECT_SHARE = 4


def check_texts(array: pa.DictionaryArray, spec: ColumnSpec, name: str, limits: Limits) -> None:
    """Refuse a column of texts or objects that would take more memory than a row group may.

    Raises:
        UnsafeData: It would take more.
    """
    size = expanded_bytes(array) + _ROW_BYTES * len(array)
    if size > limits.group_bytes:
        raise UnsafeData(f"{size} bytes of text; raise Limits.group_bytes if the data are yours", column=name)
    if spec.kind == "json":
        size = _object_bytes(array)
        if size > _OBJECT_SHARE * limits.group_bytes:
            raise UnsafeData(
                f"objects of about {size} bytes: at most {_OBJECT_SHARE} x Limits.group_bytes", column=name
            )
    elif spec.dtype != "|O":
        # An array of text gives each row the width of the longest.
        size = _longest(array, spec) * len(array)
        if size > limits.group_bytes:
            raise UnsafeData(f"texts of {size} bytes as an array of equal widths", column=name)


def check_nested(array: pa.Array, name: str, limits: Limits, *, padding: int = 0) -> None:
    """Refuse lists and structs whose values would take more memory than a row group may.

    Args:
        array: Its texts may be in dictionaries.
        name: The column.
        limits: The limits.
        padding: Bytes of a character where NumPy gives each text the width of the longest; 0: it does not.

    Raises:
        UnsafeData: They would take more.
    """
    if (size := _nested_bytes(array, padding)) > limits.group_bytes:
        raise UnsafeData(
            f"rows of about {size} bytes; raise Limits.group_bytes if the data are yours", column=name
        )


def _nested_bytes(array: pa.Array, padding: int) -> int:
    kind = array.type
    if pa.types.is_list(kind):
        return _ROW_BYTES * len(array) + _nested_bytes(array.flatten(), padding)
    if pa.types.is_struct(kind):
        fields = (array.field(number) for number in range(kind.num_fields))
        return _ROW_BYTES * len(array) + sum(_nested_bytes(each, padding) for each in fields)
    if pa.types.is_temporal(kind):
        return _VALUE_BYTES * len(array)
    is_texts = pa.types.is_string(kind) or pa.types.is_binary(kind)
    if not is_texts and not pa.types.is_dictionary(kind):
        return int(array.nbytes)
    texts = array if pa.types.is_dictionary(kind) else array.dictionary_encode()
    longest = pc.max(pc.binary_length(texts.dictionary)).as_py() or 0
    return expanded_bytes(texts) + (_VALUE_BYTES + padding * longest) * len(array)


def _object_bytes(array: pa.DictionaryArray) -> int:
    """Estimate the bytes of the objects, one object per row."""
    texts = array.dictionary
    each = np.zeros(len(texts), np.int64)
    for mark, weight in (("[", _CONTAINER_BYTES), ("{", _CONTAINER_BYTES), (",", _VALUE_BYTES)):
        found = pc.count_substring(texts, mark)
        each += weight * np.asarray(found.to_numpy(zero_copy_only=False), np.int64)
    used = array.indices.drop_null().to_numpy()
    return int(np.bincount(used, minlength=len(each)) @ each) + expanded_bytes(array) if len(used) else 0


def _longest(array: pa.DictionaryArray, spec: ColumnSpec) -> int:
    """Return the bytes of the widest value of any row."""
    is_bytes = spec.dtype == "|S"
    lengths = pc.binary_length(array.dictionary) if is_bytes else pc.utf8_length(array.dictionary)
    used = np.unique(array.indices.drop_null().to_numpy())
    if not len(used):
        return 0
    longest = int(np.asarray(lengths.to_numpy(zero_copy_only=False))[used].max())
    return longest * (1 if is_bytes else 4)
