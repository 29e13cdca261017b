"""The parts of a column: NumPy arrays and torch tensors behind one set of operations.

A column is an ``np.ndarray``, a ``torch.Tensor``, or a dict or tuple of columns (see `rlio.batch.nested`).
This module never imports torch for a check: a value can be a tensor only if other code has imported torch.
Values that are not numbers (infos, text, graphs) are in object arrays with one object a row.

Example:
    >>> as_column("rewards", [0.5, 1.0]).dtype
    dtype('float64')
    >>> as_column("infos", [{"lives": 3}, {}]).shape
    (2,)
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, TypeAlias

import numpy as np

from rlio.batch.columns import Columns
from rlio.batch.encoded_picture import is_encoded
from rlio.batch.nested import leaves, map_structure
from rlio.batch.ragged import Ragged
from rlio.errors import OptionError, SchemaError, excerpt

__all__ = [
    "Column",
    "SwappedArray",
    "as_column",
    "concat_leaves",
    "copy_leaf",
    "equal_columns",
    "is_table",
    "is_tensor",
    "join_columns",
    "joint_dtype",
    "object_column",
    "refuse_columns",
    "row_count",
    "size_bytes",
    "slice_leaf",
    "table_columns",
    "take_column",
    "take_leaf",
    "to_numpy",
    "zero_leaf",
]

#: An array, a tensor, or a dict or tuple of columns. Any: torch's types cannot be named without importing it.
Column: TypeAlias = Any


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a torch tensor, without importing torch."""
    # getattr, because another thread may be importing torch at this moment.
    tensor_class = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_class is not None and isinstance(value, tensor_class)


_TABLES = frozenset(
    (
        *(("pyarrow", "Table"), ("pyarrow", "RecordBatch"), ("pandas", "DataFrame"), ("polars", "DataFrame")),
        *(("polars", "LazyFrame"), ("datasets", "Dataset"), ("datasets", "DatasetDict")),
        *(("datasets", "IterableDataset"), ("datasets", "IterableDatasetDict")),
    )
)


def is_table(value: object) -> bool:
    """Whether ``value`` is a table in memory: of Arrow, pandas, Polars or Hugging Face; imports none."""
    owner = type(value).__module__.partition(".")[0]
    return owner in sys.modules and (owner, type(value).__name__) in _TABLES


def refuse_columns(value: object) -> None:
    """Refuse a dict of columns where an input is expected, and name what reads it.

    Raises:
        OptionError: ``value`` is a dict with a value of several items, or a list of such dicts.
    """
    name = "rlio.from_arrays"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value, name = value[0], "rlio.from_episodes"
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if isinstance(item, (Mapping, Sequence)) or getattr(item, "ndim", False):
            raise OptionError(
                f"found a dict of columns, {{{excerpt(key)}: {excerpt(item, 60)}, ...}}, expected an input: "
                f"pass {name}(...), which reads columns in memory"
            )


def object_column(rows: Iterable[Any]) -> np.ndarray:
    """A 1-D object array with one element a row, for rows of any kind: lists and arrays stay whole."""
    rows = list(rows)
    return np.fromiter(rows, dtype=object, count=len(rows))


def as_column(name: str, value: Any) -> Column:
    """Convert a user's value for column ``name`` to a column.

    Arrays and tensors are kept, not copied; `rlio.Ragged` gives its rows. A number is one row. Lists become
    arrays as in NumPy (int64, float64, bool). Lists of str, bytes, dicts or None, and every list of
    ``infos``, become 1-D object arrays. Columns of tables (pandas, Polars, Arrow) become arrays of their
    dtype, and lists in them rows of one shape.

    Raises:
        SchemaError: ``value`` is not a column, is a list of rows of several shapes, or a table's column with
            nulls.
    """
    if isinstance(value, np.ndarray) or is_tensor(value):
        return value if value.ndim else value.reshape(1)
    if isinstance(value, Ragged):
        return value.rows()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SchemaError(f"a nested column has the key {excerpt(key)}: keys are str", column=name)
        return {key: as_column(name, part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(as_column(name, part) for part in value)
    if isinstance(value, list):
        return _from_list(name, value)
    if isinstance(value, Number | np.generic):
        return np.asarray(value).reshape(1)
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        raise SchemaError(
            f"{excerpt(value)} ({type(value).__name__}) is not a column: expected an array, a tensor, a list "
            "of rows, or a dict or tuple of these",
            column=name,
        )
    return _from_table(name, value)


def _from_table(name: str, column: Any) -> Column:
    """A column of a table, or another sequence, as an array of its own dtype."""
    # NumPy has no nulls: it converts integers with nulls to floats, and other values to objects.
    if nulls := _nulls(column):
        raise SchemaError(
            f"{nulls} of {len(column)} rows are null: expected a value in each; drop or fill those rows",
            column=name,
        )
    array = np.asarray(column)
    if not array.dtype.hasobject or not len(array):
        return as_column(name, array)
    if array.ndim > 1:
        raise SchemaError("several columns of different types: expected one type; convert them", column=name)
    if isinstance(array[0], np.ndarray | list):
        return _from_list(name, [_cell(cell) for cell in array])
    return array


def _nulls(column: Any) -> int:
    """Number of nulls in a column of a table, if its type has nulls; NaN is a value of NumPy's floats."""
    count = getattr(column, "null_count", None)
    if count is not None:  # Arrow has a number, Polars a method.
        return int(count() if callable(count) else count)
    dtype = getattr(column, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype) or not hasattr(column, "isna"):
        return 0
    return int(np.sum(column.isna()))


def _cell(cell: Any) -> Any:
    """A list in a column; lists of lists arrive as object arrays of arrays."""
    if isinstance(cell, np.ndarray) and cell.dtype.hasobject and all(isinstance(c, np.ndarray) for c in cell):
        return np.array([_cell(part) for part in cell])
    return cell


def table_columns(table: Any) -> dict[str, Any]:
    """The columns of a mapping, of (name, column) pairs, or of a data frame or Arrow table.

    Raises:
        SchemaError: Two columns of a table have the same name.
    """
    names = getattr(table, "column_names", getattr(table, "columns", None))
    if isinstance(table, Mapping) or names is None:
        return dict(table)
    listed = list(names)
    for name in listed:
        if listed.count(name) > 1:
            raise SchemaError(f"the table has two columns {excerpt(name)}: rename one of them")
    return {name: table[name] for name in listed}


def _from_list(name: str, rows: list[Any]) -> Column:
    if name == Columns.INFOS:
        return object_column(rows)
    try:
        if rows and is_tensor(rows[0]):
            import torch

            return torch.stack(rows)
        array = np.array(rows)
    except (ValueError, RuntimeError) as error:
        raise SchemaError(
            f"the {len(rows)} rows of a list have different shapes ({error}): give rows of one shape; or, in "
            "every batch, arrays of different lengths as rlio.batch.object_column(rows) or rlio.Ragged",
            column=name,
        ) from error
    return object_column(rows) if array.dtype.kind in "OUS" else array


def row_count(column: Column) -> int | None:
    """Number of rows of ``column``, from its first leaf; None if it is nested and has no leaf."""
    if isinstance(column, np.ndarray):
        return len(column)
    return next((len(leaf) for _, leaf in leaves(column)), None)


def slice_leaf(leaf: Any, rows: slice) -> Any:
    """``leaf[rows]``, as a view if possible: torch has no negative steps, so a copy is needed there."""
    if is_tensor(leaf) and rows.step is not None and rows.step < 0:
        return take_leaf(leaf, np.arange(*rows.indices(len(leaf))))
    return leaf[rows]


def take_leaf(leaf: Any, index: np.ndarray) -> Any:
    """A copy of the rows ``index`` (integers) of ``leaf``."""
    if isinstance(leaf, np.ndarray):
        return leaf.take(index, axis=0)
    import torch

    return leaf[torch.as_tensor(index, device=leaf.device)]


def take_column(column: Column, index: np.ndarray) -> Column:
    """A copy of the rows ``index`` of ``column``; also of a dict of columns."""
    return map_structure(lambda leaf: take_leaf(leaf, index), column)


def copy_leaf(leaf: Any) -> Any:
    """A deep copy of ``leaf``, of the same dtype, memory order and device; objects in it are copied too."""
    if not isinstance(leaf, np.ndarray):
        return leaf.clone()
    return copy.deepcopy(leaf) if leaf.dtype.hasobject else leaf.copy(order="K")


@dataclass(frozen=True, slots=True)
class SwappedArray:
    """An array of foreign byte order in the form for pickling; pickle itself would restore native order."""

    array: np.ndarray

    @classmethod
    def wrap(cls, leaf: Any) -> Any:
        """``leaf`` itself; if its byte order is foreign, its bytes under the native order."""
        if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
            return cls(leaf.view(leaf.dtype.newbyteorder()))
        return leaf

    @classmethod
    def unwrap(cls, leaf: Any) -> Any:
        """The inverse of `wrap`."""
        return leaf.array.view(leaf.array.dtype.newbyteorder()) if isinstance(leaf, cls) else leaf


def zero_leaf(leaf: Any, *rows: int) -> Any:
    """Zeros of the dtype and row shape of ``leaf``: of objects None, no picture, or an array without items.

    Two ``rows`` are those of the time-major layout.
    """
    shape = (*rows, *leaf.shape[len(rows) :])
    if not isinstance(leaf, np.ndarray):
        return leaf.new_zeros(shape)
    if leaf.dtype == object:
        if len(leaf) and isinstance(first := leaf.flat[0], np.ndarray) and first.ndim:
            return object_column([first[:0].copy() for _ in range(math.prod(shape))]).reshape(shape)
        return np.full(shape, leaf[0].none() if is_encoded(leaf) else None, object)
    return np.zeros(shape, leaf.dtype)


def joint_dtype(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any] | None:
    """The dtype that holds all ``dtypes`` without loss: the common one, the wider of one kind, or None."""
    first = dtypes[0]
    if all(dtype == first for dtype in dtypes):
        return first
    if len({dtype.kind for dtype in dtypes}) > 1 or first.kind in "OV":
        return None
    try:
        joint: np.dtype[Any] = np.result_type(*dtypes)
    except TypeError:
        return None
    return joint if all(np.can_cast(dtype, joint, "safe") for dtype in dtypes) else None


def concat_leaves(parts: Sequence[Any], *, axis: int = 0) -> Any:
    """Join leaves along ``axis`` into fresh memory.

    Raises:
        SchemaError: Arrays are mixed with tensors, row shapes differ, or no dtype holds all without loss.
    """
    first = parts[0]
    if not isinstance(first, np.ndarray):
        if not all(is_tensor(part) and part.dtype == first.dtype for part in parts):
            raise SchemaError(f"cannot join {_kinds(parts)}: convert them to one dtype first")
        import torch

        return torch.cat(list(parts), dim=axis)
    if not all(isinstance(part, np.ndarray) for part in parts):
        raise SchemaError(f"cannot join {_kinds(parts)}: convert them to one kind first")
    dtype = joint_dtype([part.dtype for part in parts])
    if dtype is None:
        raise SchemaError(f"cannot join {_kinds(parts)} without loss: convert them to one dtype first")
    shapes = {part.shape[:axis] + part.shape[axis + 1 :] for part in parts}
    if len(shapes) > 1:
        raise SchemaError(f"cannot join rows of the shapes {', '.join(map(str, sorted(shapes, key=str)))}")
    return np.concatenate(parts, axis=axis, dtype=dtype)


def join_columns(parts: Sequence[Column], *, axis: int = 0) -> Column:
    """Join columns of the same nesting, or dicts of columns, as `concat_leaves` joins their leaves."""
    return map_structure(lambda *leaf: concat_leaves(leaf, axis=axis), *parts)


def _kinds(parts: Sequence[Any]) -> str:
    names = [f"{'array' if isinstance(part, np.ndarray) else 'tensor'} of {part.dtype}" for part in parts]
    return " and ".join(dict.fromkeys(names))


def to_numpy(leaf: Any) -> np.ndarray:
    """``leaf`` as an array: itself, or a CPU tensor's memory, or a copy from another device."""
    if isinstance(leaf, np.ndarray):
        return leaf
    # Torch may keep a conjugation or a sign as a flag, which NumPy does not know.
    array: np.ndarray = leaf.detach().cpu().resolve_conj().resolve_neg().numpy()
    return array


def size_bytes(column: Column) -> int:
    """Memory of the values: elements times their size; for objects, the size that Python reports.

    Arrays in objects count their items, also if they are views.
    """
    total = 0
    for _, leaf in leaves(column):
        total += leaf.nbytes
        if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:
            unique = {id(item): item for item in leaf.flat}
            total += sum(map(_object_bytes, unique.values()))
    return total


def _object_bytes(item: Any) -> int:
    is_view = isinstance(item, np.ndarray) and not item.flags.owndata
    return sys.getsizeof(item) + (item.nbytes if is_view else 0)


def equal_columns(a: Column, b: Column) -> bool:
    """Whether two columns agree in structure, dtype, shape and every value; NaN equals NaN."""
    try:
        return all(equal for _, equal in leaves(map_structure(_equal_leaves, a, b)))
    except SchemaError:
        return False


def _equal_leaves(a: Any, b: Any) -> bool:
    if type(a) is not type(b) and not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return False
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if isinstance(a, np.ndarray):
        if a.dtype == object:
            return all(map(_equal_objects, a.flat, b.flat))
        if a.dtype.kind not in "fcmM":
            return bool(np.all(a == b))
    elif a.device != b.device:
        return False
    same = a == b
    if bool(same.all()):  # Nearly always: three passes less than with NaN in mind.
        return True
    return bool((same | ((a != a) & (b != b))).all())


def _equal_objects(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray) or is_tensor(a):
        return _equal_leaves(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal_objects(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal_objects, a, b))
    return bool(a == b) or (isinstance(a, float | complex | np.generic) and bool(a != a) and bool(b != b))
