"""Rows of values of other libraries' files as arrays: stacked, and with the standard dtypes of columns."""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.errors import SchemaError, excerpt
from rlio.formats.files.allowance import Allowance

__all__ = ["FLOATS", "flags_in", "one_a_row", "stack_rows", "standard_dtype", "text_extent"]

Array: TypeAlias = NDArray[Any]

#: Columns of floats, even if a record holds only whole numbers: [1, 1] and [0.5, 1] are the same column.
FLOATS = frozenset(
    (
        Columns.REWARDS,
        Columns.PREV_REWARDS,
        Columns.ACTION_DIST_INPUTS,
        Columns.ACTION_LOGP,
        Columns.ACTION_PROB,
        Columns.VF_PREDS,
        Columns.ADVANTAGES,
        Columns.VALUE_TARGETS,
        Columns.WEIGHTS,
    )
)
_FLAGS = frozenset((Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.DONES, Columns.NEXT_OBS_VALID))
#: Columns of one value a row, which other libraries also store in the shape (N, 1).
_ONE_A_ROW: Final = (FLOATS - {Columns.ACTION_DIST_INPUTS}) | _FLAGS | {Columns.T, Columns.EPS_ID}
#: How flags are spelled as text, in any case.
_SPELLINGS: Final = {
    **dict.fromkeys(("true", "t", "yes", "y", "1", "1.0"), True),
    **dict.fromkeys(("false", "f", "no", "n", "0", "0.0"), False),
}


def stack_rows(rows: list[Any], allowance: Allowance) -> Any:
    """Stack rows, each an array or a dict or tuple of arrays, into one such value with a row axis.

    Raises:
        SchemaError: Rows differ in structure, dtype or shape.
        UnsafeData: The result would take more than ``allowance``.
    """

    def stacked(*leaf_rows: Any) -> Array:
        arrays = [row if isinstance(row, np.ndarray) else _joined(row, allowance) for row in leaf_rows]
        unlike = {(array.dtype.str, array.shape) for array in arrays}
        if len(unlike) > 1:
            raise SchemaError(f"packed rows of different dtype or shape: {sorted(map(str, unlike))[:4]}")
        allowance.spend(arrays[0].nbytes * len(arrays))
        return np.stack(arrays)

    return map_structure(stacked, *rows)


def _joined(value: Any, allowance: Allowance) -> Array:
    """An array of a packed row that is not an array yet."""
    count, longest = text_extent([value])
    # NumPy gives each text the room of the longest, and all other values eight bytes or more.
    allowance.spend(max(4 * count * longest, 8 * count))
    return np.asarray(value)


def one_a_row(name: str, array: Array) -> Array:
    """``array`` without further axes of length 1, if column ``name`` has one value a row; otherwise as it is.

    A reward of several objectives keeps its axis.

    Raises:
        SchemaError: It is a nested column, or has no value, and the column has one value a row.
    """
    if name in _ONE_A_ROW and not isinstance(array, np.ndarray):
        kind = "no value" if array is None else "a nested column"
        raise SchemaError(f"found {kind}, expected one value a row", column=name)
    is_one = name in _ONE_A_ROW and array.ndim > 1 and math.prod(array.shape[1:]) == 1
    return array.reshape(len(array)) if is_one else array


def standard_dtype(name: str, array: Array) -> Array:
    """``array`` with the standard dtype and shape of column ``name``: bool for flags, floats for rewards, and
    one axis for both. Flags that are text are parsed by their value.

    Raises:
        SchemaError: Flags other than 0 and 1, true and false; or whole numbers that floats cannot hold.
    """
    array = one_a_row(name, array)
    if name in _FLAGS:
        if array.ndim != 1:
            raise SchemaError(f"a flag is one value a row, found rows of the shape {array.shape[1:]}")
        return array if array.dtype == np.bool_ else _flags(array)
    if name in FLOATS and array.dtype.kind in "iu":
        floats = array.astype(np.float64)
        if array.dtype.itemsize == 8 and not np.array_equal(floats.astype(array.dtype), array):
            raise SchemaError("found whole numbers beyond 2^53, which the floats of this column cannot hold")
        return floats
    return array


def flags_in(name: str, values: Any) -> Array:
    """The flags in the column ``name`` of a file, by their values; see `standard_dtype`.

    Raises:
        SchemaError: Values other than 0 and 1, true and false.
    """
    try:
        return standard_dtype(Columns.TERMINATEDS, np.asarray(values))
    except SchemaError as error:
        raise SchemaError(str(error), column=name) from error


def _flags(array: Array) -> Array:
    if array.dtype.kind in "OUS":
        found = [_flag(value) for value in array.tolist()]
        wrong = np.array([value is None for value in found], np.bool_)
        values: Array = np.array(found, object)
    else:
        is_number = array.dtype.kind in "iuf"
        wrong = ~np.isin(array, (0, 1)) if is_number else np.ones(len(array), np.bool_)
        values = array
    if wrong.any():
        raise SchemaError(f"expected true and false, found {excerpt(array[wrong][:4].tolist())}")
    return values.astype(np.bool_)


def _flag(value: Any) -> bool | None:
    """The flag that a value spells; None: it spells none."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return bool(value) if value in (0, 1) else None
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return _SPELLINGS.get(text.strip().lower()) if isinstance(text, str) else None


# Types that make NumPy build an array of text, and types that NumPy looks into.
_TEXTS = frozenset((str, bytes, np.str_, np.bytes_))
_LISTS = frozenset((list, tuple))


def text_extent(value: list[Any] | tuple[Any, ...]) -> tuple[int, int]:
    """Number of values in nested lists and tuples, and characters of the longest text among them."""
    kinds = set(map(type, value))
    count = longest = 0
    if not kinds.isdisjoint(_TEXTS):
        longest = max(len(item) for item in value if type(item) in _TEXTS)
    if kinds.isdisjoint(_LISTS):
        return len(value), longest
    for item in value:
        if type(item) in _LISTS:
            inside, inner = text_extent(item)
            count, longest = count + inside, max(longest, inner)
        else:
            count += 1
    return count, longest
