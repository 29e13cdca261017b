"""Canonical expressions of filters, interpreted on arrays, and on bounds of columns.

Example:
    >>> from rlio.query.filter_text import canonical, parsed
    >>> bool(holds(canonical(parsed("t > 1")), {Ref("t"): np.array([2])})[0])
    True
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError, excerpt
from rlio.query.filter_text import (
    COMPARISONS,
    FLOAT_TESTS,
    OPERATIONS,
    kind_of,
    pairs_in,
    ref_of,
    text_of,
)
from rlio.query.filter_values import Ref, filled
from rlio.schemas.parquet_statistics import Bounds

__all__ = ["holds", "may_hold"]

_Arrays: TypeAlias = Mapping[Ref, NDArray[Any]]


def holds(node: ast.expr, arrays: _Arrays) -> NDArray[np.bool_]:
    """Whether a condition holds, shape (rows,)."""
    found, missing = filled(_calculated(node, arrays))
    if missing is not None:
        found = np.zeros(len(missing), bool) if found is None else np.where(missing, False, found)
    if not isinstance(found, np.ndarray) or found.dtype != np.bool_:
        raise OptionError(
            f"the filter takes {excerpt(text_of(node))}, a {kind_of(found)}, for a condition: compare it "
            "with something; & and | bind closer than comparisons: (a > 0) & (b < 1)"
        )
    return found


def _calculated(node: ast.expr, arrays: _Arrays) -> Any:
    """The value of an expression: an array of shape (rows,), or a constant."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.BoolOp(op=op, values=values):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return reduce(join, [holds(value, arrays) for value in values])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.logical_not(holds(operand, arrays))
        case ast.Compare():
            sides = pairs_in(node)
            return reduce(np.logical_and, [_compared(a, op, b, arrays) for a, op, b in sides])
        case ast.UnaryOp(operand=operand):
            (found,) = _numbers(node, arrays, operand)
            return -found if _is_float(found) else _arithmetic(node, operator.sub, 0, found)
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(node, OPERATIONS[type(op)], *_numbers(node, arrays, left, right))
        case ast.Call(func=ast.Name(id="abs"), args=[operand]):
            (found,) = _numbers(node, arrays, operand)
            if found.dtype.kind == "i":
                return np.maximum(found, _arithmetic(node, operator.sub, 0, found))
            return np.abs(found)
        case ast.Call(func=ast.Name(id=name), args=[operand]) if name in FLOAT_TESTS:
            return FLOAT_TESTS[name](*_numbers(node, arrays, operand))
    ref = ref_of(node)
    assert ref is not None
    return arrays[ref]


def _numbers(node: ast.expr, arrays: _Arrays, *operands: ast.expr) -> list[Any]:
    found = []
    for operand in operands:
        value, missing = filled(_calculated(operand, arrays))
        if missing is not None and value is None:
            value = np.full(len(missing), np.nan)
        elif missing is not None and kind_of(value) == "number":
            value = np.where(missing, np.nan, value)
        found.append(value)
    for value in found:
        if kind_of(value) != "number":
            raise OptionError(
                f"the filter calculates with a {kind_of(value)} in {excerpt(text_of(node))}: use numbers only"
            )
    return found


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr, arrays: _Arrays) -> NDArray[np.bool_]:
    a, lost = filled(_calculated(left, arrays))
    among = (
        [one.value for one in right.elts if isinstance(one, ast.Constant)]
        if isinstance(right, ast.Tuple)
        else []
    )
    b, also = (among[0], None) if among else filled(_calculated(right, arrays))
    if lost is not None or also is not None:
        gone = lost if also is None else also if lost is None else lost | also
        assert gone is not None
        otherwise = isinstance(op, ast.NotEq | ast.NotIn)  # As for NaN.
        if a is None or b is None:
            return np.full(len(gone), otherwise)
        return np.where(gone, otherwise, _compared_known(left, op, right, a, b, among))
    return _compared_known(left, op, right, a, b, among)


def _compared_known(
    left: ast.expr, op: ast.cmpop, right: ast.expr, a: Any, b: Any, among: list[Any]
) -> NDArray[np.bool_]:
    if kind_of(a) != kind_of(b):
        where = excerpt(text_of(ast.Compare(left, [op], [right])))
        raise OptionError(f"the filter compares a {kind_of(a)} with a {kind_of(b)} in {where}")
    if not among:
        return _compare(op, a, b)
    found = _is_among(a, among)
    return ~found if isinstance(op, ast.NotIn) else found


def _compare(op: ast.cmpop, a: Any, b: Any) -> NDArray[np.bool_]:
    """Compare exactly: NumPy does so for integers, also int64 with uint64 and with Python's of any size."""
    a, b = _beside_floats(a, b) if _is_float(a) or _is_float(b) else (_whole(a), _whole(b))
    return np.asarray(COMPARISONS[type(op)](a, b), np.bool_)


def _whole(value: Any) -> Any:
    """Flags as integers: with flags, NumPy would convert even an integer too large for int64 to int64."""
    is_flags = isinstance(value, np.ndarray) and value.dtype == np.bool_
    return value.view(np.uint8) if is_flags else value


def _is_among(found: NDArray[Any], among: list[Any]) -> NDArray[np.bool_]:
    """Whether each value is among some constants of the same kind."""
    if found.dtype.kind == "O":
        wanted = frozenset(among)
        return np.fromiter((value in wanted for value in found.tolist()), np.bool_, len(found))
    if found.dtype.kind in "USf":
        return np.isin(found, np.array(among, found.dtype if found.dtype.kind == "f" else None))
    # Integers compare exactly, except with a float: then as float64.
    found = _whole(found)
    info = np.iinfo(found.dtype)
    whole = [int(one) for one in among if isinstance(one, int) and info.min <= one <= info.max]
    floats = [one for one in among if isinstance(one, float)]
    result = np.isin(found, np.array(whole, found.dtype))
    return result | np.isin(found.astype(np.float64), floats) if floats else result


def _is_float(value: Any) -> bool:
    return value.dtype.kind == "f" if isinstance(value, np.ndarray) else isinstance(value, float)


def _beside_floats(*values: Any) -> list[Any]:
    """Integer arrays as float64. A constant takes the dtype of the array beside it."""
    return [
        value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind in "biu" else value
        for value in values
    ]


def _arithmetic(node: ast.expr, operation: Callable[..., Any], a: Any, b: Any) -> NDArray[Any]:
    """Calculate on floats as NumPy does, and on integers in 64 bits, with an error on overflow."""
    floats = _beside_floats(a, b)
    if operation is operator.truediv or _is_float(a) or _is_float(b):
        return np.asarray(operation(*floats))
    if any(np.any(np.abs(x) >= 2.0**63) for x in (*floats, operation(*floats))):
        raise OptionError(
            f"the filter's {excerpt(text_of(node))} exceeds integers of 64 bits: multiply one of them by 1.0 "
            "to calculate in float64, or pass a function of a batch"
        )
    return np.asarray(operation(np.asarray(a, np.int64), np.asarray(b, np.int64)))


_MIRRORED: Final = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


def may_hold(node: ast.expr, bounds: Mapping[Ref, Bounds]) -> bool:
    """Whether a condition may hold for some row; never False if it does."""
    match node:
        case ast.BoolOp(op=op, values=values):
            found = [may_hold(value, bounds) for value in values]
            return all(found) if isinstance(op, ast.And) else any(found)
        case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.Tuple(elts=among)]):
            return any(_may_compare(left, ast.Eq(), one, bounds) for one in among)
        case ast.Compare():
            return all(_may_compare(*pair, bounds) for pair in pairs_in(node))
    return _may_compare(node, ast.Gt(), ast.Constant(0), bounds)


def _may_compare(left: ast.expr, op: ast.cmpop, right: ast.expr, bounds: Mapping[Ref, Bounds]) -> bool:
    """Whether a comparison of a column with a constant may hold; True for any other comparison."""
    if isinstance(left, ast.Constant):
        left, op, right = right, _MIRRORED.get(type(op), type(op))(), left
    ref = ref_of(left)
    if ref is None or ref not in bounds or not isinstance(right, ast.Constant):
        return True
    ends = np.array(bounds[ref])
    # Bounds that hold a NaN, or are in the wrong order, carry no information.
    if ends.dtype.kind not in "biuf" or not ends[0] <= ends[1]:
        return True
    # A float column may hold NaNs, which bounds exclude: of all comparisons, a NaN passes "!=".
    if ends.dtype.kind == "f" and isinstance(op, ast.NotEq):
        return True
    # Compare in the dtype of the rows' own values, because rounding keeps the order.
    if isinstance(op, ast.Eq):
        return bool(_compare(ast.LtE(), ends, right.value)[0] and _compare(ast.GtE(), ends, right.value)[1])
    return bool(_compare(op, ends, right.value).any())
