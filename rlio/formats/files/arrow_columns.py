"""Converts columns of a foreign Arrow table to columns of a batch.

Example:
    >>> import pyarrow as pa
    >>> to_column("obs", pa.array([[1.0, 2.0], [3.0, 4.0]]), {})
    array([[1., 2.],
           [3., 4.]])
    >>> to_column("rewards", pa.array([1, None, 2], pa.float32()), {})
    array([ 1., nan,  2.], dtype=float32)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns
from rlio.batch.ragged import Ragged
from rlio.errors import CorruptData, SchemaError, excerpt
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.packed import is_packed, unpack, unpickle
from rlio.formats.files.parquet_footer import Extension
from rlio.formats.files.value_arrays import stack_rows, standard_dtype
from rlio.schemas.arrow_tables import arrow_times
from rlio.schemas.dtypes import numpy_type

__all__ = [
    "UnequalLists",
    "bytes_of_views",
    "is_lists",
    "is_pickled",
    "load_pickled",
    "no_items",
    "to_column",
    "to_lists",
    "to_times",
]

Array: TypeAlias = NDArray[Any]

# What a text or another object takes in memory, see `Limits.group_bytes`.
_OBJECT_BYTES: Final = 64
# Extension types that store one list a row, and the rows' shape in their parameters.
_TENSORS = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "arrow.fixed_shape_tensor")


def is_pickled(extension: Extension | None) -> bool:
    """Whether Ray Data stored Python objects in a column, because Arrow has no type for them."""
    return extension is not None and extension.name == "ray.data.arrow_pickled_object"


def load_pickled(data: bytes | None, allowance: Allowance) -> Any:
    """A value of such a column, read without running the pickle; see `rlio.formats.files.packed`.

    Raises:
        UnsafeData: It has something else than plain values and arrays, or exceeds ``allowance``.
        CorruptData: It is damaged.
    """
    return None if data is None else unpickle(data, allowance=allowance)


def to_column(
    name: str, values: Any, extensions: Mapping[str, Extension], allowance: Allowance | None = None
) -> Any:
    """Convert an Arrow array to a column of a batch.

    Args:
        name: The column's name, which decides the dtype of flags, rewards and the like.
        values: A pyarrow Array.
        extensions: Path of a field -> its extension type, which gives the shape of rows.
        allowance: The budget of packed text, shared with other columns; None: the default of one record.

    Returns:
        New NumPy arrays, nested where ``values`` are structs; None for Arrow's type null.

    Raises:
        SchemaError: Lists differ in length, values are null and the dtype has no null, or the type has no
            dtype.
        CorruptData: Packed text is damaged.
    """
    return _to_column(name, values, extensions, allowance or Allowance(), name)


#: Key of a Parquet file's metadata: of columns of lists that may differ in length, even if those here do not,
#: the shape of an item.
ANY_LENGTH: Final = "rlio.lists"
#: Of columns of times, their dtypes: Arrow and Parquet do not have all units.
TIMES: Final = "rlio.times"


class UnequalLists(SchemaError):
    """The rows of a column are lists of different lengths."""


def to_lists(name: str, values: Any, allowance: Allowance, item: tuple[int, ...] = ()) -> Any:
    """A column of lists of numbers that may differ in length, as rows of a `Ragged`.

    Args:
        name: The column's name.
        values: A pyarrow Array of lists; their items are numbers, or lists of one shape.
        allowance: The budget of rows, shared with other columns.
        item: Shape of an item, where there is none.

    Raises:
        SchemaError: Values are null, or the items have no dtype or different shapes.
    """
    _refuse_nulls(values)
    allowance.spend(_OBJECT_BYTES * len(values))
    flat = values.flatten()
    items = _from_lists(flat) if _is_list(flat.type) else _from_numbers(flat)
    items = items if len(items) or items.ndim != len(item) + 1 else np.empty((0, *item), items.dtype)
    ends = np.cumsum([0, *values.value_lengths().to_numpy()], dtype=np.int64)
    return standard_dtype(name, Ragged(items, ends).rows())


def no_items(kind: Any, item: tuple[int, ...]) -> Array:
    """An array of no items of a type of lists of numbers, each of the shape ``item``."""
    while _is_list(kind):
        kind = kind.value_type
    return np.empty((0, *item), numpy_type(kind))


def to_times(name: str, values: Any, dtype: np.dtype[Any]) -> Any:
    """A column that rlio wrote as times, in their unit.

    Raises:
        CorruptData: The column has other values, or its times do not fit the unit.
    """
    if dtype.kind == "m" and pa.types.is_int64(values.type):  # Parquet has no durations.
        values = values.view(pa.array(arrow_times(np.zeros(0, dtype))).type)
    column = to_column(name, values, {})
    if isinstance(column, np.ndarray) and column.dtype.kind == dtype.kind:
        found = column.astype(dtype)
        if np.array_equal(found.astype(column.dtype), column, equal_nan=True):
            return found
    raise CorruptData(f"{TIMES} in the metadata states {dtype}, but the column has other values")


def is_lists(kind: Any) -> bool:
    """Whether a type is lists of numbers that may differ in length."""
    return isinstance(kind, pa.ListType | pa.LargeListType) and _has_numbers(kind)


def _to_column(
    name: str, values: Any, extensions: Mapping[str, Extension], allowance: Allowance, path: str
) -> Any:
    types, kind = pa.types, values.type
    if types.is_null(kind):
        return None
    if types.is_dictionary(kind):
        values = values.dictionary_decode()
        kind = values.type
    if types.is_struct(kind) and name != Columns.INFOS:
        _refuse_nulls(values)
        parts = {
            field.name: _to_column(name, part, extensions, allowance, f"{path}.{field.name}")
            for field, part in zip(kind, values.flatten(), strict=True)
        }
        return {key: part for key, part in parts.items() if part is not None}
    if _is_list(kind) and _has_numbers(kind) and name != Columns.INFOS:
        return standard_dtype(name, _shaped(_from_lists(values), extensions.get(path)))
    if is_pickled(extensions.get(path)):
        objects = [load_pickled(value, allowance) for value in _objects(values, allowance)]
        if name == Columns.INFOS:
            return object_column(objects)
        return _standard(name, stack_rows(objects, allowance))
    if types.is_string(kind) or types.is_large_string(kind):
        return _standard(name, _from_text(values, allowance))
    if _is_number(kind):
        return standard_dtype(name, _from_numbers(values))
    if types.is_decimal(kind):
        raise SchemaError(f"decimal numbers ({kind}) have no NumPy dtype: cast the column to float64")
    return standard_dtype(name, object_column(_objects(values, allowance)))


def _objects(values: Any, allowance: Allowance) -> list[Any]:
    """The values as objects of Python, which are counted before they are made."""
    allowance.spend(_OBJECT_BYTES * _values_in(values) + bytes_of_views(values))
    found: list[Any] = values.to_pylist()
    return found


def _values_in(values: Any) -> int:
    """How many values an array has on all levels. Lists of nothing may have many, and no byte."""
    kind = values.type
    is_dense = pa.types.is_union(kind) and kind.mode == "dense"
    if is_dense or pa.types.is_run_end_encoded(kind) or _is_list_view(kind):
        raise SchemaError(f"found {kind}, which may repeat values: write plain lists and values")
    if _is_list(values.type):
        return len(values) + _values_in(values.flatten())
    if pa.types.is_struct(values.type):
        return len(values) + sum(map(_values_in, values.flatten()))
    return len(values)


def _is_list_view(kind: Any) -> bool:
    return isinstance(kind, pa.ListViewType | pa.LargeListViewType)


def bytes_of_views(values: Any) -> int:
    """Bytes of texts that each row points to: rows may share them."""
    if _is_list(values.type):
        return bytes_of_views(values.flatten())
    if pa.types.is_struct(values.type):
        return sum(map(bytes_of_views, values.flatten()))
    if not (pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type)):
        return 0
    # A view has 16 bytes, of which the first four are the length of its text.
    views = np.frombuffer(values.buffers()[1], np.int32)[::4]
    return int(views[values.offset : values.offset + len(values)].sum(dtype=np.int64))


def _standard(name: str, column: Any) -> Any:
    """A column that may be nested; the parts of one have no standard dtype."""
    return standard_dtype(name, column) if isinstance(column, np.ndarray) else column


def _is_list(kind: Any) -> bool:
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def _has_numbers(kind: Any) -> bool:
    while _is_list(kind):
        kind = kind.value_type
    return _is_number(kind)


def _is_number(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_temporal(kind)
    )


def _refuse_nulls(values: Any) -> None:
    if values.null_count:
        raise SchemaError(
            f"{values.null_count} of {len(values)} rows are null: expected a value in each; drop or fill "
            "those rows"
        )


def _from_numbers(values: Any) -> Array:
    """Numbers as a new array; nulls become NaN or NaT where the dtype has them."""
    types = pa.types
    has_none = types.is_floating, types.is_timestamp, types.is_date, types.is_duration
    if not any(test(values.type) for test in has_none):
        _refuse_nulls(values)
    if not values.null_count and not pa.types.is_temporal(values.type):
        return _without_nulls(values)
    array: Array = values.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable and array.flags.owndata else array.copy()


def _without_nulls(values: Any) -> Array:
    """Numbers or flags as a new array. Arrow's ``to_numpy`` imports pandas, if it is there, for 0.5 s."""
    start, stop = values.offset, values.offset + len(values)
    data = values.buffers()[1]
    if data is None or start == stop:
        return np.zeros(0, numpy_type(values.type))
    if pa.types.is_boolean(values.type):
        first = start // 8
        packed = np.frombuffer(data, np.uint8)[first : -(-stop // 8)]
        bits = np.unpackbits(packed, bitorder="little")[start - 8 * first : stop - 8 * first]
        return bits.astype(np.bool_)
    return np.frombuffer(data, numpy_type(values.type), stop)[start:].copy()


def _from_lists(values: Any) -> Array:
    """Lists of one length as a new array, with one more axis for each level of nesting."""
    rows, shape = len(values), []
    while _is_list(values.type):
        _refuse_nulls(values)
        count = len(values)
        flat = values.flatten()
        size, left = divmod(len(flat), max(count, 1))
        lengths = None if hasattr(values.type, "list_size") else values.value_lengths().to_numpy()
        if left or (lengths is not None and count and (lengths != size).any()):
            raise UnequalLists("lists of different lengths: expected rows of one shape")
        shape.append(size)
        values = flat
    return _from_numbers(values).reshape(rows, *shape)


def _shaped(array: Array, extension: Extension | None) -> Array:
    """Reshape flat rows to the shape that their extension type states."""
    if extension is None or extension.name not in _TENSORS:
        return array
    try:
        parameters = json.loads(extension.parameters)
        shape = parameters["shape"] if isinstance(parameters, dict) else parameters
        order = parameters.get("permutation") if isinstance(parameters, dict) else None
        legal = all(type(n) is int and n >= 0 for n in shape) and math.prod(shape) == math.prod(
            array.shape[1:]
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SchemaError(f"bad parameters of {extension.name}: {excerpt(extension.parameters)}") from error
    if not legal or (order is not None and order != list(range(len(shape)))):
        raise SchemaError(
            f"tensors of shape {excerpt(shape)} and axes {excerpt(order)} in rows of shape {array.shape[1:]}"
        )
    return array.reshape(len(array), *shape)


def _from_text(values: Any, allowance: Allowance) -> Any:
    """Text as an object array; RLlib's packed text as the arrays in it."""
    rows = _objects(values, allowance)
    if rows and all(map(is_packed, rows)):
        # A repeated text, which a file may store once, is unpacked once.
        unpacked = {text: unpack(text, allowance=allowance) for text in dict.fromkeys(rows)}
        return stack_rows([unpacked[row] for row in rows], allowance)
    return object_column(rows)
