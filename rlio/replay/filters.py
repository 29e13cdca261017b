"""Row filters: which rows may be drawn, as a text or a function of columns.

A filter's text is parsed into a few kinds of nodes and calculated on arrays; none of it is run as code, so
that a text from a file or a command line is safe. What its operations mean:

- Integers and bools are exact, whatever their size; nothing wraps around: ``t - 1 < 0`` holds for an unsigned
  0. Where integers meet floats, and in divisions, they become float64.
- Floats are NumPy's, in the precision of the columns: 0.1 beside a float32 column means float32's 0.1. A NaN
  makes every comparison false but ``!=``, so that ``not rewards > 0`` and ``rewards <= 0`` differ there.
- Texts compare by code points.
- ``dones`` stands for ``terminateds or truncateds``, and needs both.

Not here: the grammar (`rlio.replay.filter_syntax`), and how row groups are passed over unread
(`rlio.replay.filter_pushdown`).

Example:
    >>> import numpy as np
    >>> chosen = RowFilter.parse("(rewards>0) & (obs[1] <= 0.5)")
    >>> chosen.text, chosen.columns
    ('rewards > 0 and obs[1] <= 0.5', ('rewards', 'obs'))
    >>> chosen.mask({"rewards": np.array([1.0, 0.0]), "obs": np.zeros((2, 4))})
    array([ True, False])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.arrays import is_tensor, to_numpy
from rlio.batch import SampleBatch
from rlio.columns import is_per_sequence
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.replay.filter_bounds import outcomes
from rlio.replay.filter_syntax import (
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
    parse,
    references,
    text_of,
)
from rlio.replay.filter_values import Kind, Values, literal_kind
from rlio.schemas.column import ColumnSpec
from rlio.schemas.parquet_statistics import Bounds
from rlio.schemas.schema import PolicySchema, rebuild

__all__ = ["RowFilter", "RowFunction"]

#: Takes a batch of rows and gives a bool for each, shape (rows,).
RowFunction: TypeAlias = Callable[[SampleBatch], Any]


class RowFilter:
    """Chooses rows; made by `parse` or `of`.

    Attributes:
        text: What names the filter in saved states: the canonical form of its text (equal for texts that
            differ only in white space, parentheses, or ``&`` for ``and``), or ``function module:name``.
        columns: Logical names of the columns that it reads, in the order of its text; None: a function that
            is given all of them.
    """

    def __init__(
        self,
        *,
        text: str,
        columns: tuple[str, ...] | None,
        condition: Condition | None = None,
        function: RowFunction | None = None,
    ) -> None:
        self.text = text
        self.columns = columns
        self._condition = condition
        self._function = function
        self._references = () if condition is None else tuple(references(condition))

    @classmethod
    def parse(cls, text: str) -> RowFilter:
        """The filter that a text states, such as ``"rewards > 0 and not terminateds and obs[3] <= 0.5"``.

        Comparisons (chains too), ``in (1, 2)``, ``and``, ``or``, ``not`` (also ``& | ~``), ``+ - * /``,
        ``abs``, ``isnan``, ``isinf``, ``isfinite``, numbers, bools, texts; columns with indexes
        (``obs[0, 2]``) and keys (``obs["position"][0]``, ``obs.position[0]``), and ``column("any name")``.

        Raises:
            OptionError: It holds anything else, or too much; the message says at which character.
        """
        condition = parse(text)
        names = dict.fromkeys(ref.column for ref in references(condition))
        return cls(text=text_of(condition), columns=tuple(names), condition=condition)

    @classmethod
    def of(
        cls,
        value: str | RowFilter | RowFunction,
        *,
        columns: Sequence[str] | None = None,
        name: str | None = None,
    ) -> RowFilter:
        """A text, a filter, or a function of a batch as a filter.

        Args:
            value: The text, filter or function. A function gets a `SampleBatch` of some rows, which it must
                not change, and returns a bool for each; it may be called for any part of the data, again and
                again, and must say the same of a row each time.
            columns: The columns that a function needs; None: all of them are read for it.
            name: What stands for a function in saved states; None: its module and qualified name. The code
                of a function is not looked at: rename one whose meaning changes.

        Raises:
            OptionError: It is none of the three; or a function that has no name under which another process
                would find it (a lambda, a function within a function, a bound method), and none was given.
        """
        if isinstance(value, str | RowFilter):
            if columns is not None or name is not None:
                raise OptionError("columns= and name= are for functions: a text says itself what it reads")
            return value if isinstance(value, RowFilter) else cls.parse(value)
        if not callable(value):
            raise OptionError(
                f"filter={excerpt(value)}: a text such as 'rewards > 0', or a function of a batch"
            )
        if isinstance(columns, str) or (columns is not None and not columns):
            raise OptionError(f"columns={excerpt(columns)}: a list of names, or None")
        return cls(
            text=f"function {_name_of(value) if name is None else name}",
            columns=None if columns is None else tuple(columns),
            function=value,
        )

    def __repr__(self) -> str:
        return f"RowFilter({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowFilter) and self.text == other.text and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(self.text)

    def reads(self, column: str) -> bool:
        """Whether the filter needs a logical column."""
        return self.columns is None or column in self.columns

    @property
    def references(self) -> tuple[Ref, ...]:
        """The values of a row that a text names; none for a function."""
        return self._references

    def check(self, policy: PolicySchema) -> None:
        """Refuse a filter that does not fit the columns of a policy, before any data is read.

        Raises:
            MissingColumn: There is no such column, or key in it.
            OptionError: A column has another shape or type than the filter needs, or a row a sequence.
        """
        for name in self.columns or ():
            if name not in policy.columns:
                raise _no_column(name, policy.columns)
            if is_per_sequence(name):
                raise OptionError(
                    f"the filter {excerpt(self.text)} reads a column that has a row a sequence, and chooses "
                    "among rows: leave it out",
                    column=name,
                )
        if self._condition is not None:
            specs = {
                name: rebuild([(leaf.path, leaf.spec) for leaf in policy.columns[name]])
                for name in self.columns or ()
            }
            kinds = {ref: _kind_of_spec(*_located(specs, ref), ref) for ref in self._references}
            _check_condition(self._condition, kinds)

    def mask(self, columns: Mapping[str, Any], *, rows: int | None = None) -> NDArray[np.bool_]:
        """Which rows the filter lets pass.

        Args:
            columns: Logical name -> array, or dict or tuple of such, with one row each; a batch is one. They
                are not changed, nor is their memory given out.
            rows: How many rows there are, where ``columns`` may be none; None: as many as the columns have.

        Returns:
            Shape (rows,) bool, fresh.

        Raises:
            MissingColumn: A column, or key in it, is absent.
            OptionError: A column has another shape or type than the filter needs; or a function gave
                something else than a bool a row.
            SchemaError: The columns differ in their rows.
        """
        if self._function is not None:
            return self._called(self._function, columns, rows)
        assert self._condition is not None
        arrays: dict[Ref, NDArray[Any]] = {}
        kinds: dict[Ref, Kind] = {}
        for ref in self._references:
            leaf, index = _located(columns, ref)
            array = _array(leaf)
            kinds[ref] = _kind_of_array(array, index, ref)
            at: Any = (slice(None), *index)
            arrays[ref] = array[at]
            if rows is not None and len(array) != rows:
                raise SchemaError(f"{len(array)} rows where others have {rows}", column=ref.column)
            rows = len(array)
        _check_condition(self._condition, kinds)
        texts = frozenset(ref for ref, kind in kinds.items() if kind in ("text", "bytes"))
        found = Values(arrays, texts).holds(self._condition)
        return found.copy() if isinstance(self._condition, Ref) else found

    def _called(
        self, function: RowFunction, columns: Mapping[str, Any], rows: int | None
    ) -> NDArray[np.bool_]:
        chosen = {name: columns[name] for name in columns if self.reads(name)}
        for name in self.columns or ():
            if name not in chosen:
                raise _no_column(name, columns)
        batch = SampleBatch(chosen)
        count = len(batch) if rows is None else rows
        found = _array(function(batch))
        if found.dtype != np.bool_ or found.shape != (count,):
            raise OptionError(
                f"the filter's {self.text} gave {found.dtype} of shape {found.shape}: expected a bool for "
                f"each row, shape ({count},)"
            )
        return found.copy()

    def may_match(self, bounds: Mapping[Ref, Bounds]) -> bool:
        """Whether a row may pass, for all that is known of some rows; True where nothing is known.

        Args:
            bounds: A value of a row -> its least and greatest among those rows but for NaNs, as NumPy scalars
                of the column's dtype. Values that are left out may be anything.
        """
        return self._condition is None or outcomes(self._condition, bounds).can_hold


def _name_of(function: RowFunction) -> str:
    """``module:name`` under which every process that imports the module finds the function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in name.split(".") if isinstance(name, str) else ():
        found = getattr(found, part, None)
    if found is not function:
        raise OptionError(
            f"filter={excerpt(function)}: a saved state names a function by its module and name, and this "
            "one cannot be found by that; define it at the top of a module, write a text such as "
            "'rewards > 0', or give RowFilter.of(function, name=...)"
        )
    return f"{module}:{name}"


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(to_numpy(value) if is_tensor(value) else value)


def _no_column(name: str, known: Iterable[str]) -> MissingColumn:
    return MissingColumn(
        f"the filter needs a column {excerpt(name)}; there are {', '.join(sorted(known))}", column=name
    )


# ---- where a value lies, and what it is ----


def _located(columns: Mapping[str, Any], ref: Ref) -> tuple[Any, tuple[int, ...]]:
    """The leaf of a column that a reference leads to, and the indexes that are left for its array."""
    if ref.column not in columns:
        raise _no_column(ref.column, columns)
    value, path = columns[ref.column], list(ref.path)
    while isinstance(value, dict | tuple):
        parts = value if isinstance(value, dict) else dict(enumerate(value))
        if not path:
            raise OptionError(
                f"the filter reads {text_of(ref)}, which is nested: name one of {excerpt(list(parts))} of it",
                column=ref.column,
            )
        step = path.pop(0)
        if step not in parts or isinstance(step, bool):
            raise MissingColumn(
                f"the filter reads {text_of(ref)}; at {excerpt(step)} there are {excerpt(list(parts))}",
                column=ref.column,
            )
        value = parts[step]
    indexes = tuple(step for step in path if isinstance(step, int))
    if len(indexes) < len(path):
        raise MissingColumn(
            f"the filter reads {text_of(ref)}, where there is an array and no key", column=ref.column
        )
    return value, indexes


def _check_indexes(shape: tuple[int, ...], indexes: tuple[int, ...], ref: Ref) -> None:
    """Refuse what is not one value a row."""
    if len(indexes) != len(shape):
        dots = ", ".join("0" * len(shape))
        hint = f"index one value, such as {ref.column}[{dots}]" if shape else "leave the index out"
        raise OptionError(
            f"the filter reads {text_of(ref)} of a column with rows of shape {shape}: {hint}",
            column=ref.column,
        )
    for index, size in zip(indexes, shape, strict=True):
        if not -size <= index < size:
            raise OptionError(
                f"the filter reads {text_of(ref)} of a column with rows of shape {shape}", column=ref.column
            )


def _kind_of_spec(spec: ColumnSpec, indexes: tuple[int, ...], ref: Ref) -> Kind:
    _check_indexes(spec.shape, indexes, ref)
    return _kind(spec.numpy, spec.kind == "text", ref)


def _kind_of_array(array: NDArray[Any], indexes: tuple[int, ...], ref: Ref) -> Kind:
    if not array.ndim:
        raise SchemaError("a single value where there should be one a row", column=ref.column)
    _check_indexes(array.shape[1:], indexes, ref)
    texts = array.dtype.kind != "O" or all(type(value) is str for value in array.tolist())
    return _kind(array.dtype, texts, ref)


def _kind(dtype: np.dtype[Any], is_text: bool, ref: Ref) -> Kind:
    """``bool``, ``number``, ``text`` or ``bytes``."""
    if dtype.kind in "biuf":
        return "bool" if dtype.kind == "b" else "number"
    if dtype.kind == "S":
        return "bytes"
    if dtype.kind == "U" or (dtype.kind == "O" and is_text):
        return "text"
    what = "objects" if dtype.kind == "O" else str(dtype)
    raise OptionError(
        f"the filter reads {text_of(ref)}, which holds {what}: numbers, bools and texts can be compared",
        column=ref.column,
    )


def _check_condition(node: Condition, kinds: Mapping[Ref, Kind]) -> None:
    """Refuse comparisons of what cannot be compared."""
    match node:
        case Ref():
            if kinds[node] != "bool":
                raise OptionError(
                    f"the filter takes {text_of(node)}, a {kinds[node]}, for a condition: compare it with "
                    "something",
                    column=node.column,
                )
        case Compare():
            for _, left, right in node.pairs():
                _check_alike(_value_kind(left, kinds), _value_kind(right, kinds), node)
        case Member(value, among):
            _check_alike(_value_kind(value, kinds), literal_kind(among[0]), node)
        case FloatTest(value=value):
            _check_alike(_value_kind(value, kinds), "number", node)
        case Not(part):
            _check_condition(part, kinds)
        case And(parts) | Or(parts):
            for part in parts:
                _check_condition(part, kinds)


def _check_alike(left: str, right: str, node: Condition) -> None:
    if left != right:
        raise OptionError(f"the filter compares a {left} with a {right} in {excerpt(text_of(node))}")


def _value_kind(node: Value, kinds: Mapping[Ref, Kind]) -> Kind:
    operands: tuple[Value, ...] = ()
    match node:
        case Ref():
            return "number" if kinds[node] == "bool" else kinds[node]
        case Constant(value):
            return literal_kind(value)
        case Negative(value) | Absolute(value):
            operands = (value,)
        case Arithmetic(left=left, right=right):
            operands = (left, right)
    for operand in operands:
        if (kind := _value_kind(operand, kinds)) != "number":
            raise OptionError(f"the filter calculates with a {kind} in {excerpt(text_of(node))}")
    return "number"
