"""Rows of values of other libraries' files as arrays: stacked, and with the standard dtypes of columns."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.errors import SchemaError, excerpt
from rlio.formats.files.packed import Allowance

__all__ = ["FLOATS", "stack_rows", "standard_dtype", "text_extent"]

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


def standard_dtype(name: str, array: Array) -> Array:
    """``array`` with the standard dtype of column ``name``: bool for flags, floats for rewards and so on.

    Raises:
        SchemaError: Flags other than 0 and 1.
    """
    if name in _FLAGS and array.dtype != np.bool_:
        if array.dtype.kind not in "iuf" or not np.isin(array, (0, 1)).all():
            raise SchemaError(f"expected true and false, found {excerpt(array[:4].tolist())}")
        return array.astype(np.bool_)
    if name in FLOATS and array.dtype.kind in "iu":
        return array.astype(np.float64)
    return array


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
