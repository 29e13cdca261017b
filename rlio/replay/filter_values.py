"""Conditions of row filters, calculated on the values of many rows at once.

Values of rows are arrays of bools, integers, floats or texts, or Python's own integers as objects, where 64
bits were too few; constants stay Python's. What the operations mean is said in `rlio.replay.filters`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import reduce
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.replay import filter_syntax as syntax
from rlio.replay.filter_syntax import (
    COMPARISONS,
    OPERATIONS,
    Absolute,
    And,
    Arithmetic,
    Compare,
    Condition,
    Constant,
    FloatTest,
    Member,
    Negative,
    Not,
    Or,
    Ref,
    Value,
)

__all__ = ["Kind", "Values", "as_floats", "literal_kind", "nearest_float"]

#: What can be compared with each other; a bool is also a number.
Kind: TypeAlias = Literal["bool", "number", "text", "bytes"]

_FLOAT_TESTS: Final = {"isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite}
_INT64: Final = np.iinfo(np.int64)


def literal_kind(value: syntax.Literal) -> Kind:
    """The kind of a constant; a bool is a number."""
    return "text" if isinstance(value, str) else "bytes" if isinstance(value, bytes) else "number"


def nearest_float(value: int) -> float:
    """An integer as float64; one beyond all of them as infinity."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


class Values:
    """Calculates conditions, whose types have been checked.

    Args:
        arrays: What each reference stands for, shape (rows,); not changed.
        texts: The references among them that hold texts or bytes.
    """

    def __init__(self, arrays: Mapping[Ref, NDArray[Any]], texts: Set[Ref]) -> None:
        self._arrays = arrays
        self._texts = texts

    def holds(self, node: Condition) -> NDArray[np.bool_]:
        """Whether a condition holds, shape (rows,); fresh, unless the node is a Ref."""
        # Python's parser reads 1/x as it stands: what has no result is a NaN or an infinity, and no warning.
        with np.errstate(all="ignore"):
            return self._holds(node)

    def _holds(self, node: Condition) -> NDArray[np.bool_]:
        match node:
            case Ref():
                return self._arrays[node]
            case Compare():
                pairs = [self._compare(*pair) for pair in node.pairs()]
                return reduce(np.logical_and, pairs)
            case Member(value, among):
                return self._is_among(value, among)
            case FloatTest(name, value):
                return np.asarray(_FLOAT_TESTS[name](_floats(self._value(value))), np.bool_)
            case Not(part):
                return np.logical_not(self._holds(part))
            case And(parts):
                return reduce(np.logical_and, map(self._holds, parts))
            case Or(parts):
                return reduce(np.logical_or, map(self._holds, parts))

    def _compare(self, symbol: str, left: Value, right: Value) -> NDArray[np.bool_]:
        compare, a, b = COMPARISONS[symbol], self._value(left), self._value(right)
        if left in self._texts or right in self._texts:
            return np.asarray(compare(a, b), np.bool_)
        if _is_whole(a) and _is_whole(b):
            return _compare_whole(compare, a, b)
        return np.asarray(compare(*as_floats(a, b)), np.bool_)

    def _is_among(self, value: Value, among: tuple[syntax.Literal, ...]) -> NDArray[np.bool_]:
        found = self._value(value)
        if value in self._texts:
            return _is_member(found, among)
        if not _is_whole(found):
            return np.isin(found, np.array([float(number) for number in among], found.dtype))
        # Integers are exact; beside a float they are float64.
        whole = [int(number) for number in among if isinstance(number, int)]
        others = [number for number in among if not isinstance(number, int)]
        least, most = _span(found)
        result = _is_member(_plain(found), [number for number in whole if least <= number <= most])
        return result | np.isin(_floats(found), others) if others else result

    def _value(self, node: Value) -> Any:
        """An array of a value of each row; a constant as it is."""
        match node:
            case Ref():
                return self._arrays[node]
            case Constant(value):
                return value
            case Negative(value):
                found = self._value(value)
                return _exactly("-", 0, found) if _is_whole(found) else np.negative(found)
            case Absolute(value):
                return _absolute(self._value(value))
            case Arithmetic(symbol, left, right):
                a, b = self._value(left), self._value(right)
                if symbol != "/" and _is_whole(a) and _is_whole(b):
                    return _exactly(symbol, a, b)
                return OPERATIONS[symbol](*as_floats(a, b))


def _is_whole(value: Any) -> bool:
    """Whether these are integers or bools."""
    return value.dtype.kind in "biuO" if isinstance(value, np.ndarray) else isinstance(value, int)


def _plain(value: NDArray[Any]) -> NDArray[Any]:
    """Bools as integers."""
    return value.astype(np.uint8) if value.dtype.kind == "b" else value


def _span(value: Any) -> tuple[int, int]:
    """Integers between which all of ``value`` lies."""
    if not isinstance(value, np.ndarray):
        return int(value), int(value)
    if value.dtype.kind in "iu" and value.dtype.itemsize < 8:
        info = np.iinfo(value.dtype)
        return info.min, info.max
    return (int(value.min()), int(value.max())) if value.size else (0, 0)


def _exactly(symbol: str, a: Any, b: Any) -> NDArray[Any]:
    """A sum, difference or product of integers: in 64 bits where that is exact, else as Python's."""
    ends: list[Any] = [OPERATIONS[symbol](x, y) for x in _span(a) for y in _span(b)]
    fits = all(_INT64.min <= end <= _INT64.max for end in (*ends, *_span(a), *_span(b)))
    dtype = np.dtype(np.int64 if fits else object)
    return np.asarray(OPERATIONS[symbol](_cast(a, dtype), _cast(b, dtype)))


def _cast(value: Any, dtype: np.dtype[Any]) -> Any:
    return value.astype(dtype, copy=False) if isinstance(value, np.ndarray) else int(value)


def _absolute(value: NDArray[Any]) -> NDArray[Any]:
    if not _is_whole(value):
        return np.asarray(np.abs(value))
    if value.dtype.kind in "bu":
        return value
    fits = _span(value)[0] > _INT64.min and value.dtype.kind != "O"
    return np.asarray(np.abs(_cast(value, np.dtype(np.int64 if fits else object))))


def _floats(value: Any) -> Any:
    """Integers as float64; floats as they are."""
    if not _is_whole(value):
        return value
    if not isinstance(value, np.ndarray):
        return float(value)
    if value.dtype.kind != "O":
        return value.astype(np.float64)
    return np.array([nearest_float(number) for number in value.tolist()], np.float64)


def as_floats(a: Any, b: Any) -> tuple[Any, Any]:
    """Two operands, at least one an array: integers as float64, a constant in the dtype of the array."""
    a, b = _floats(a), _floats(b)
    if not isinstance(a, np.ndarray):
        return np.asarray(a, b.dtype), b
    return a, np.asarray(b, a.dtype) if not isinstance(b, np.ndarray) else b


def _compare_whole(compare: Callable[..., object], a: Any, b: Any) -> NDArray[np.bool_]:
    """Integers with integers: NumPy's own comparison of int64 with uint64 was inexact once."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        a, b = _plain(a), _plain(b)
        wide = {a.dtype.kind, b.dtype.kind} == {"i", "u"} and np.result_type(a, b).kind == "f"
        return np.asarray(compare(a.astype(object), b) if wide else compare(a, b), np.bool_)
    array, constant = (a, b) if isinstance(a, np.ndarray) else (b, a)
    a, b = (_plain(x) if isinstance(x, np.ndarray) else int(x) for x in (a, b))
    if array.dtype.kind in "iu":
        info = np.iinfo(array.dtype)
        if not info.min <= constant <= info.max:
            # Beyond all that the dtype holds, so that every value compares as 0 does.
            holds = compare(*(0 if isinstance(x, np.ndarray) else x for x in (a, b)))
            return np.full(array.shape, holds, np.bool_)
    return np.asarray(compare(a, b), np.bool_)


def _is_member(found: NDArray[Any], among: Any) -> NDArray[np.bool_]:
    """Whether texts, bytes or integers are among constants of their kind that their dtype can hold."""
    if not len(among):
        return np.zeros(found.shape, np.bool_)
    if found.dtype.kind == "O":
        wanted = frozenset(among)
        return np.fromiter((value in wanted for value in found.tolist()), np.bool_, len(found))
    if found.dtype.kind in "US":
        return np.isin(found, np.array(list(among)))
    return np.isin(found, np.array(among, found.dtype))
