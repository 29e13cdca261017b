"""What a condition of a row filter can come to, for all that bounds say: interval arithmetic.

Every answer errs on one side. "Can hold" may be said of rows of which none matches; where it is denied, none
does. Bounds leave NaNs out, as Parquet's statistics do, so that any float may also be a NaN.

Floats are calculated by NumPy in the same dtypes as the rows' own values: rounding keeps the order of
results, so that what bounds values before it bounds them after it. Integers are exact in both.

Example:
    >>> import numpy as np
    >>> from rlio.replay.filter_syntax import Ref, parse
    >>> outcomes(parse("abs(t - 5) < 2"), {Ref("t"): (np.int64(10), np.int64(20))})
    Outcomes(can_hold=False, can_fail=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

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
from rlio.replay.filter_values import as_floats, nearest_float
from rlio.schemas.parquet_statistics import Bounds

__all__ = ["Outcomes", "outcomes"]


class Outcomes(NamedTuple):
    """Whether a condition may hold for some row, and whether it may fail for some."""

    can_hold: bool
    can_fail: bool


_EITHER = Outcomes(True, True)


class _Whole(NamedTuple):
    """Integers from one to another."""

    least: int
    most: int


class _Floats(NamedTuple):
    """Floats between two, shape (2,), neither of which is a NaN; and NaNs."""

    ends: NDArray[np.floating[Any]]


#: None: anything. Constants are Python's.
_Interval: TypeAlias = _Whole | _Floats | None


def outcomes(node: Condition, bounds: Mapping[Ref, Bounds]) -> Outcomes:
    """What a condition can come to for values within ``bounds``; what has none may be anything."""
    with np.errstate(all="ignore"):
        return _outcomes(node, bounds)


def _outcomes(node: Condition, bounds: Mapping[Ref, Bounds]) -> Outcomes:
    match node:
        case Ref():
            found = _interval(node, bounds)
            if isinstance(found, _Whole):
                return Outcomes(found.most > 0, found.least < 1)
            return _EITHER
        case Compare():
            return _all(
                [
                    _compared(symbol, _interval(left, bounds), _interval(right, bounds))
                    for symbol, left, right in node.pairs()
                ]
            )
        case Member(value, among):
            found = _interval(value, bounds)
            return _any([_compared("==", found, _constant(one)) for one in among])
        case FloatTest(name, value):
            never = name == "isnan" and isinstance(_interval(value, bounds), _Whole)
            return Outcomes(False, True) if never else _EITHER
        case Not(part):
            can_hold, can_fail = _outcomes(part, bounds)
            return Outcomes(can_fail, can_hold)
        case And(parts):
            return _all([_outcomes(part, bounds) for part in parts])
        case Or(parts):
            return _any([_outcomes(part, bounds) for part in parts])


def _all(parts: list[Outcomes]) -> Outcomes:
    return Outcomes(all(part.can_hold for part in parts), any(part.can_fail for part in parts))


def _any(parts: list[Outcomes]) -> Outcomes:
    return Outcomes(any(part.can_hold for part in parts), all(part.can_fail for part in parts))


def _constant(value: syntax.Literal) -> int | float | None:
    """A number; None for a text, about which nothing is known here."""
    return None if isinstance(value, str | bytes) else int(value) if isinstance(value, bool) else value


def _interval(node: Value, bounds: Mapping[Ref, Bounds]) -> _Interval | int | float:
    """Where the values of a node lie; a constant as it is."""
    match node:
        case Ref():
            return _bounded(bounds.get(node))
        case Constant(value):
            return _constant(value)
        case Negative(value):
            found = _interval(value, bounds)
            if isinstance(found, _Whole):
                return _Whole(-found.most, -found.least)
            return _Floats(-found.ends[::-1]) if isinstance(found, _Floats) else None
        case Absolute(value):
            return _absolute(_interval(value, bounds))
        case Arithmetic(symbol, left, right):
            return _calculated(symbol, _interval(left, bounds), _interval(right, bounds))


def _bounded(found: Bounds | None) -> _Interval:
    """Bounds of a column, if they make sense."""
    if found is None:
        return None
    least, most = found
    if least.dtype.kind in "biu" and most.dtype.kind in "biu":
        return _Whole(int(least), int(most)) if int(least) <= int(most) else None
    ends = np.array([least, most])
    # Of NaNs, this is false.
    return _Floats(ends) if ends.dtype.kind == "f" and ends[0] <= ends[1] else None


def _absolute(found: _Interval | int | float) -> _Interval:
    if isinstance(found, _Whole):
        sizes = abs(found.least), abs(found.most)
        return _Whole(0 if found.least <= 0 <= found.most else min(sizes), max(sizes))
    if not isinstance(found, _Floats):
        return None
    ends = np.sort(np.abs(found.ends))
    if found.ends[0] <= 0 <= found.ends[1]:
        ends[0] = 0
    return _Floats(ends)


def _calculated(symbol: str, a: _Interval | int | float, b: _Interval | int | float) -> _Interval:
    """Of values that are taken from both at will: the ends come from the ends."""
    if a is None or b is None:
        return None
    if symbol != "/" and isinstance(a, _Whole | int) and isinstance(b, _Whole | int):
        found: list[Any] = [OPERATIONS[symbol](x, y) for x in _ends(a) for y in _ends(b)]
        return _Whole(min(found), max(found))
    left, right = as_floats(_operand(a), _operand(b))
    if symbol == "/" and right.min() <= 0 <= right.max():
        return None
    results = OPERATIONS[symbol](left.reshape(-1, 1), right.reshape(1, -1))
    assert isinstance(results, np.ndarray)
    return None if np.isnan(results).any() else _Floats(np.array([results.min(), results.max()]))


def _ends(value: _Whole | int) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value.least, value.most)


def _operand(value: _Whole | _Floats | int | float) -> Any:
    """The two ends as an array of the dtype that the rows' values would have; a constant as it is."""
    if isinstance(value, _Floats):
        return value.ends
    if isinstance(value, _Whole):
        return np.array([nearest_float(value.least), nearest_float(value.most)])
    return value


def _compared(symbol: str, a: _Interval | int | float, b: _Interval | int | float) -> Outcomes:
    if a is None or b is None:
        return _EITHER
    if isinstance(a, _Whole | int) and isinstance(b, _Whole | int):
        return _from_ends(symbol, *_ends(a), *_ends(b))
    left, right = as_floats(_operand(a), _operand(b))
    found = _from_ends(symbol, left.flat[0], left.flat[-1], right.flat[0], right.flat[-1])
    if isinstance(a, _Floats) or isinstance(b, _Floats):
        # Of a NaN, every comparison fails but "!=".
        return Outcomes(True, found.can_fail) if symbol == "!=" else Outcomes(found.can_hold, True)
    return found


def _from_ends(symbol: str, a_least: Any, a_most: Any, b_least: Any, b_most: Any) -> Outcomes:
    """Whether some a and some b compare so, and whether some do not."""
    if symbol in ("==", "!="):
        overlap = bool(a_least <= b_most and b_least <= a_most)
        differ = not bool(a_least == b_most and a_most == b_least)
        return Outcomes(overlap, differ) if symbol == "==" else Outcomes(differ, overlap)
    if symbol in (">", ">="):
        a_least, a_most = a_most, a_least
        b_least, b_most = b_most, b_least
    compare = COMPARISONS[symbol]
    return Outcomes(bool(compare(a_least, b_most)), not compare(a_most, b_least))
