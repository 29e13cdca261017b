"""Row filters: choose the rows that may be drawn, by a text or a function of columns.

A filter's text is a Python expression restricted to a few forms. `ast` parses it, and this module checks
every node and interprets the tree on NumPy arrays. The text is never compiled or executed, which makes texts
from files and command lines safe. The operations mean:

- Integers and bools are exact: ``t - 1 < 0`` holds for an unsigned 0. Integer arithmetic that may exceed 64
  bits is an error. Integers become float64 in divisions and beside floats.
- Floats follow NumPy, in the precision of the columns: beside a float32 column, 0.1 means float32's 0.1. A
  NaN makes every comparison false except ``!=``; ``not rewards > 0`` and ``rewards <= 0`` therefore differ.
- Texts compare by code points.
- ``len(tokens)`` is the number of items of each row: of a list, an array or an object, or characters of a
  text.
- ``infos["success"]`` is the value of that key in each row's object: a number, bool or text. Where an object
  lacks it, it is like a NaN: as a condition it is false, and so is every comparison except ``!=``.
- ``dones`` means ``terminateds or truncateds``, and needs both columns.
- ``episode_return >= quantile(0.9)`` compares with the quantile of all episodes: see `rlio.replay.draws`.
- ``mc_return(0.9)`` states the discount of the derived column ``mc_return``.

This module does not skip row groups by their bounds; `rlio.query.filter_pushdown` does.

Example:
    >>> import numpy as np
    >>> chosen = RowFilter.parse("(rewards>0) & (obs[1] <= 0.5)")
    >>> chosen.text, chosen.columns
    ('rewards > 0 and obs[1] <= 0.5', ('rewards', 'obs'))
    >>> chosen.mask({"rewards": np.array([1.0, 0.0]), "obs": np.zeros((2, 4))})
    array([ True, False])
"""

from __future__ import annotations

import ast
import copy
import datetime
import keyword
import math
import operator
import re
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import is_tensor, object_column, to_numpy
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.infos import NOTES, info_objects, is_typed, mask_path
from rlio.batch.nested import Path
from rlio.batch.other_names import did_you_mean
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.query.derived_columns import EPISODE_COLUMNS, MC_RETURN, checked_discount
from rlio.query.splits import Split
from rlio.schemas.column import ColumnSpec, object_rows
from rlio.schemas.leaves import rebuild
from rlio.schemas.parquet_statistics import Bounds
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.streams import WRITER

__all__ = ["Ref", "RowFilter", "RowFunction", "advice_for"]

#: Takes a batch of rows and returns a bool for each, shape (rows,).
RowFunction: TypeAlias = Callable[[SampleBatch], Any]


class Ref(NamedTuple):
    """One value of each row: a column, keys into a nested column, and indexes into the row's array.

    ``length``: not the value there, but its number of items.
    """

    column: str
    path: Path = ()
    length: bool = False


class RowFilter:
    """Chooses rows. Use `parse` or `of` to make one.

    Attributes:
        text: Names the filter in saved states: the canonical form of its text (texts that differ only in
            white space, parentheses, or ``&`` for ``and`` have one form), or ``function module:name``.
        columns: Logical names of the columns that the filter reads, in the order of its text; None: a
            function that gets all of them.
        references: The row values that a text reads, each once; empty for a function.
        split: The side of a split whose rows pass, beside the condition; None: both.
        discount: That of ``mc_return``, if the text states it; not part of ``text``.
    """

    def __init__(
        self,
        *,
        text: str,
        columns: tuple[str, ...] | None,
        condition: ast.expr | None = None,
        function: RowFunction | None = None,
        split: Split | None = None,
        discount: float | None = None,
    ) -> None:
        self.text = text
        self.discount = discount
        self.split = split
        self.columns = columns
        self.references: tuple[Ref, ...] = () if condition is None else tuple(_references(condition))
        self._condition = condition
        self._function = function

    @classmethod
    def parse(cls, text: str) -> RowFilter:
        """Parse a text such as ``"rewards > 0 and not terminateds and obs[3] <= 0.5"``.

        A text may hold comparisons (also chained), ``in (1, 2)``, ``and``, ``or``, ``not`` (also ``& | ~``),
        ``+ - * /``, ``abs``, ``isnan``, ``isinf``, ``isfinite``, numbers, bools, texts; columns with indexes
        (``obs[0, 2]``) and keys (``obs["position"][0]``, ``obs.position[0]``), also of objects
        (``infos["success"]``), and ``column("any name")``.

        Raises:
            OptionError: The text holds anything else, or is too long or too deeply nested.
        """
        discounts = _Discounts()
        condition = _canonical(discounts.visit(_parsed(text)))
        if not isinstance(condition, ast.BoolOp | ast.Compare | ast.UnaryOp | ast.Call) and not _ref(
            condition
        ):
            raise _refusal(condition, f"expected a condition, such as rewards > 0; {_ALLOWED}")
        columns = dict.fromkeys(ref.column for ref in _references(condition))
        return cls(
            text=_text(condition), columns=tuple(columns), condition=condition, discount=discounts.found
        )

    @classmethod
    def of(
        cls,
        value: str | RowFilter | RowFunction,
        *,
        columns: Sequence[str] | None = None,
        name: str | None = None,
    ) -> RowFilter:
        """Make a filter of a text, a filter, or a function of a batch.

        Args:
            value: The text, filter or function. A function gets a `SampleBatch` of some rows, which it must
                not change, and returns a bool for each row. It may be called for any part of the data, more
                than once, and must always give the same answer for a row.
            columns: The columns that a function needs; None: all of them, which must all be read.
            name: Name of a function in saved states; None: its module and qualified name. Saved states ignore
                the code of a function: rename a function when you change its meaning.

        Raises:
            OptionError: ``value`` is none of the three; or it is a function without a ``name`` that another
                process cannot find by its own name (a lambda, a nested function, a bound method).
        """
        if isinstance(value, str | RowFilter):
            if columns is not None or name is not None:
                raise OptionError(
                    "columns= and name= are for functions: a text already names its columns; drop them"
                )
            return value if isinstance(value, RowFilter) else cls.parse(value)
        if not callable(value):
            raise OptionError(
                f"filter={excerpt(value)}: expected a text such as 'rewards > 0', or a function of a batch"
            )
        if isinstance(columns, str) or (columns is not None and not columns):
            raise OptionError(f"columns={excerpt(columns)}: expected a list of names, or None")
        if name is None and (name := _lasting_name(value)) is None:
            raise OptionError(
                f"filter={excerpt(value)}: a saved state names a function by its module and name, and this "
                "function cannot be found by them; define it at the top of a module, write a text such as "
                "'rewards > 0', or use RowFilter.of(function, name=...)"
            )
        return cls(
            text=f"function {name}",
            columns=None if columns is None else tuple(columns),
            function=value,
        )

    @classmethod
    def of_option(cls, value: str | RowFilter | RowFunction) -> RowFilter:
        """Make the filter of an option ``filter``: as `of`, but a function needs no name.

        A state that names a function without a lasting name loads only in this process, and only beside the
        same function: nothing shows whether a lambda of another process means the same.

        Raises:
            OptionError: ``value`` is no text, filter or function.
        """
        if isinstance(value, str | RowFilter) or not callable(value) or _lasting_name(value) is not None:
            return cls.of(value)
        return cls.of(
            value,
            name=f"{getattr(value, '__qualname__', type(value).__qualname__)}{_NAMELESS}{_token(value)}",
        )

    @classmethod
    def on_side(cls, split: Split, other: RowFilter | None) -> RowFilter:
        """Make a filter of the rows on one side of a split that also pass the ``other`` filter."""
        if other is None:
            return cls(text=split.text, columns=(Columns.EPS_ID,), split=split)
        columns = other.columns
        return cls(
            text=f"{split.text}: {other.text}",
            columns=None if columns is None else tuple(dict.fromkeys((*columns, Columns.EPS_ID))),
            condition=other._condition,
            function=other._function,
            split=split,
            discount=other.discount,
        )

    @property
    def quantiles(self) -> bool:
        """Whether the filter compares with quantiles."""
        nodes = () if self._condition is None else ast.walk(self._condition)
        return any(_quantile(node) is not None for node in nodes)

    def with_quantiles(self, value_of: Callable[[str, float], float]) -> RowFilter:
        """Return the filter with the value of each quantile in its place."""
        if self._condition is None:
            return self
        condition = _Quantiles(value_of).visit(copy.deepcopy(self._condition))
        made = copy.copy(self)
        made._condition = condition
        return made

    def __repr__(self) -> str:
        return f"RowFilter({self.text!r})"

    def reads(self, column: str) -> bool:
        """Whether the filter needs a logical column, if it exists."""
        return self.columns is None or column in self.columns or (column == WRITER and self.split is not None)

    def check(self, policy: PolicySchema, *, derived: Collection[str] = ()) -> None:
        """Check that a filter fits the columns of a policy, before any data is read.

        Args:
            policy: The columns.
            derived: Those of them that are derived from whole episodes.

        Raises:
            MissingColumn: The policy lacks a column, or a key in one.
            OptionError: A column has the wrong shape or type, or has one row a sequence; or a discount is
                stated for a column that is not derived.
        """
        if self.discount is not None and MC_RETURN in policy.columns and MC_RETURN not in derived:
            raise OptionError(
                f"the filter {excerpt(self.text)} states a discount, but the data has the column "
                f"{MC_RETURN!r} already: write the name alone",
                column=MC_RETURN,
            )
        self.check_names(policy.columns)
        for name in self.columns or ():
            if is_per_sequence(name):
                raise OptionError(
                    f"the filter {excerpt(self.text)} reads a column with a row a sequence, but a filter "
                    "chooses steps: leave the column out",
                    column=name,
                )
        if self.split is not None and Columns.EPS_ID not in policy.columns:
            raise _no_column(Columns.EPS_ID, policy.columns)
        if self._condition is not None:
            leaves = {name: policy.shown.columns[name] for name in self.columns or ()}
            self.with_quantiles(lambda *_: 0.0).mask(
                {
                    name: rebuild([(leaf.path, _example(leaf.spec)) for leaf in found])
                    for name, found in leaves.items()
                }
            )

    def check_names(self, known: Collection[str]) -> None:
        """Check that the filter reads only columns that are among the ``known`` ones.

        Raises:
            MissingColumn: One is not.
        """
        for name in self.columns or ():
            if name not in known:
                raise _no_column(name, known)

    def mask(
        self, columns: Mapping[str, Any], *, rows: int | None = None, writer: str | NDArray[Any] = ""
    ) -> NDArray[np.bool_]:
        """Which rows pass the filter.

        Args:
            columns: Logical name -> array, or dict or tuple of arrays, with one row each, such as a batch.
                The result shares no memory with them, and they are not changed.
            rows: Number of rows, for ``columns`` that may be empty; None: taken from the columns.
            writer: Writer of the rows, or of each; a column ``_writer`` counts more.

        Returns:
            Shape (rows,) bool, a fresh array.

        Raises:
            MissingColumn: A column, or a key in one, is absent.
            OptionError: A column has the wrong shape or type; a function did not return a bool for each row;
                or integers are too large for the filter's arithmetic.
            SchemaError: The columns have different numbers of rows.
        """
        if self.split is None:
            return self._passing(columns, rows)
        owners = columns.get(WRITER)
        here = self.split.holds(
            _values_of(columns, Ref(Columns.EPS_ID)),
            writer if owners is None else np.where(_array(owners) == "", writer, _array(owners)),
        )
        return here & self._passing(columns, len(here)) if self._condition or self._function else here

    def _passing(self, columns: Mapping[str, Any], rows: int | None) -> NDArray[np.bool_]:
        """`mask` of the condition, or the function."""
        if self._function is not None:
            return self._called(self._function, columns, rows)
        assert self._condition is not None
        arrays: dict[Ref, NDArray[Any]] = {}
        for ref in self.references:
            arrays[ref] = _values_of(columns, ref)
            if rows is not None and len(arrays[ref]) != rows:
                raise SchemaError(f"{len(arrays[ref])} rows where others have {rows}", column=ref.column)
            rows = len(arrays[ref])
        # Without this, NumPy would warn of 1 / 0. The result is an infinity or a NaN, as the module's
        # docstring says.
        with np.errstate(all="ignore"):
            found = _holds(self._condition, arrays)
        return found.copy() if _ref(self._condition) else found

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
                f"the filter's {self.text} returned {found.dtype} of shape {found.shape}: expected a bool "
                f"for each row, shape ({count},)"
            )
        return found.copy()

    def may_match(self, bounds: Mapping[Ref, Bounds]) -> bool:
        """Whether any of some rows may pass, given bounds of their values; True if bounds are unknown.

        Bounds decide comparisons of a column with a constant, and columns of bools; also those joined by
        ``and`` and ``or``. Anything else may be true, also what follows ``not``.

        Args:
            bounds: Row value -> its least and greatest value among the rows, NaNs excluded, as NumPy scalars
                of the column's dtype. Absent values may be anything.
        """
        if self._condition is None:
            return True
        with np.errstate(all="ignore"):
            return _may_hold(self._condition, bounds)


#: What the name of a function without a lasting name holds, before a token.
_NAMELESS: Final = " without a name, "
#: Function -> its token, so that equal functions have equal names in this process.
_tokens: WeakKeyDictionary[RowFunction, str] = WeakKeyDictionary()


def _token(function: RowFunction) -> str:
    """Random digits that no other function has, in any process."""
    fresh = secrets.token_hex(8)
    try:
        return _tokens.setdefault(function, fresh)
    except TypeError:  # It cannot be hashed, or referred to: no two uses are known to be equal.
        return fresh


def advice_for(saved: object, own: object) -> str:
    """Advice to append where the filter of a state differs, if a function without a name is one; else ""."""
    if not any(isinstance(text, str) and _NAMELESS in text for text in (saved, own)):
        return ""
    return (
        "; a function without a name fits only states of this process: name it, "
        "filter=rlio.RowFilter.of(function, name=...), or define it at the top of a module"
    )


def _lasting_name(function: RowFunction) -> str | None:
    """``module:name`` by which every process that imports the module finds it; None: there is none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in name.split(".") if isinstance(name, str) else ():
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


# ---- texts: Python's grammar, restricted to a few forms ----

_COMPARISONS: Final[dict[type[ast.cmpop], Callable[..., Any]]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_OPERATIONS: Final[dict[type[ast.operator], Callable[..., Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_FLOAT_TESTS: Final = {"isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite}
_FUNCTIONS: Final = ("abs", "column", "len", *_FLOAT_TESTS)
_ALLOWED: Final = (
    "a filter has comparisons (< <= > >= == != in), and, or, not, + - * /, abs(x), len(x), isnan(x), "
    "isinf(x), isfinite(x), numbers, True, False, texts, and columns such as rewards, obs[3], "
    "obs['position'][0]"
)

# A list of thousands of episode ids fits. Python's parser recurses in C. Names, operators and brackets, each
# of which may nest one level deeper, are therefore limited before parsing. Constants and commas nest nothing.
_MAX_CHARACTERS: Final = 1 << 16
_MAX_TOKENS: Final = 1000
_MAX_DEPTH: Final = 60
_TOKEN: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\W\d]\w*|[^\s\w,]", re.DOTALL)


def _parsed(text: str) -> ast.expr:
    """Python's tree of a text, of checked size but unchecked content."""
    if not isinstance(text, str):
        raise OptionError(f"filter={excerpt(text)}: expected a text such as 'rewards > 0'")
    if len(text) > _MAX_CHARACTERS:
        raise OptionError(
            f"a filter of {len(text)} characters: expected at most {_MAX_CHARACTERS}; pass a function instead"
        )
    tokens = [found for found in _TOKEN.findall(text) if found[0] not in "'\""]
    if "#" in tokens:
        raise OptionError(f"filter={excerpt(text)}: a filter cannot hold comments; {_ALLOWED}")
    if len(tokens) > _MAX_TOKENS:
        raise OptionError(
            f"filter={excerpt(text)}: more than {_MAX_TOKENS} names and operators; use x in (...), or a "
            "function"
        )
    try:
        tree = ast.parse(re.sub(r"[\r\n]", " ", text).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise OptionError(
            f"filter={excerpt(text)} cannot be read: {excerpt(str(error))}; {_ALLOWED}"
        ) from error
    level: list[ast.AST] = [tree]
    for _ in range(_MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise OptionError(
            f"filter={excerpt(text)}: nested more than {_MAX_DEPTH} deep; use x in (...), or a function"
        )
    return tree


def _refusal(node: ast.AST, why: str) -> OptionError:
    return OptionError(f"filter: {excerpt(_text(node))}: {why}")


def _text(node: ast.AST) -> str:
    """The text of an expression, in ASCII. Saved states hold it, so every Python must give the same text."""
    match node:
        # `ast.unparse` writes `a and (not b)`.
        case ast.BoolOp(op=ast.Or(), values=values):
            return " or ".join(map(_text, values))
        case ast.BoolOp(values=values):
            return " and ".join(
                f"({_text(one)})" if isinstance(one, ast.BoolOp) else _text(one) for one in values
            )
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"not ({_text(operand)})" if isinstance(operand, ast.BoolOp) else f"not {_text(operand)}"
    return ast.unparse(node).encode("ascii", "backslashreplace").decode()


def _canonical(node: ast.expr) -> ast.expr:
    """The canonical form of expressions with equal meaning; refuses forms that filters do not allow."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | bytes() as constant):
            return _constant(node, constant)
        case ast.Name(id=Columns.DONES):
            # As in a batch: terminated or truncated. ``dones`` is never stored.
            return ast.BoolOp(ast.Or(), [ast.Name(Columns.TERMINATEDS), ast.Name(Columns.TRUNCATEDS)])
        case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Call(func=ast.Name(id="column")):
            return _reference(node)
        case ast.BoolOp(op=op, values=values):
            return _joined(op, values)
        case ast.BinOp(op=ast.BitAnd(), left=left, right=right):
            return _joined(ast.And(), [left, right])
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return _joined(ast.Or(), [left, right])
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return _opposite(_canonical(operand))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _canonical(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _folded(ast.UnaryOp(ast.USub(), inner := _canonical(operand)), operator.neg, inner)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATIONS:
            a, b = _canonical(left), _canonical(right)
            return _folded(ast.BinOp(a, op, b), _OPERATIONS[type(op)], a, b)
        case ast.Compare():
            return _comparison(node)
        case ast.Call(func=ast.Name(id="abs"), args=[value], keywords=[]):
            return _folded(ast.Call(ast.Name("abs"), [inner := _canonical(value)], []), abs, inner)
        case ast.Call(func=ast.Name(id="len"), args=[value], keywords=[]):
            return ast.Call(ast.Name("len"), [_reference(value)], [])
        case ast.Call(func=ast.Name(id=name), args=[value], keywords=[]) if name in _FLOAT_TESTS:
            return ast.Call(ast.Name(name), [_canonical(value)], [])
    raise _refusal(node, _ALLOWED)


def _joined(op: ast.boolop, parts: list[ast.expr]) -> ast.expr:
    """Join conditions; joins of the same kind among them are flattened."""
    flat: list[ast.expr] = []
    for part in map(_canonical, parts):
        if isinstance(part, ast.Constant):
            raise _refusal(
                part, "a constant is not a condition; & | bind closer than comparisons: (a > 0) & (b < 1)"
            )
        flat += part.values if isinstance(part, ast.BoolOp) and type(part.op) is type(op) else [part]
    return ast.BoolOp(op, flat)


def _opposite(node: ast.expr) -> ast.expr:
    match node:
        case ast.Compare(left=left, ops=[ast.In()], comparators=among):
            return ast.Compare(left, [ast.NotIn()], among)
        case ast.Compare(left=left, ops=[ast.NotIn()], comparators=among):
            return ast.Compare(left, [ast.In()], among)
    return ast.UnaryOp(ast.Not(), node)


def _comparison(node: ast.Compare) -> ast.expr:
    among = [isinstance(op, ast.In | ast.NotIn) for op in node.ops]
    sides = [
        _among(side) if is_in else _side(side) for is_in, side in zip(among, node.comparators, strict=True)
    ]
    made = ast.Compare(_side(node.left), node.ops, sides)
    if any(among) and len(among) > 1:
        raise _refusal(node, "'in' cannot be chained with other comparisons; join them by 'and'")
    for left, op, right in _pairs(made):
        if not any(among) and type(op) not in _COMPARISONS:
            raise _refusal(node, _ALLOWED)
        if isinstance(left, ast.Constant) and isinstance(right, ast.Constant | ast.Tuple):
            raise _refusal(node, "a comparison of constants: compare a column")
        for side, other in ((left, right), (right, left)):
            ref = _ref(other)
            is_episodes = ref is not None and not ref.path and ref.column in EPISODE_COLUMNS
            if _quantile(side) is not None and not is_episodes:
                raise _refusal(node, f"quantile(share) is compared with one of {', '.join(EPISODE_COLUMNS)}")
    return made


def _quantile(node: ast.AST) -> float | None:
    """The share of ``quantile(share)``; None: it is something else."""
    match node:
        case ast.Call(
            func=ast.Name(id="quantile"), args=[ast.Constant(value=int() | float() as share)], keywords=[]
        ):
            return float(share)
    return None


def _side(node: ast.expr) -> ast.expr:
    """One side of a comparison: an expression, or a quantile as in ``quantile(0.1) < episode_return``."""
    share = _quantile(node)
    if share is None:
        return _canonical(node)
    if not 0.0 <= share <= 1.0:
        raise _refusal(node, "expected a share of the episodes, from 0 to 1")
    return ast.Call(ast.Name("quantile"), [ast.Constant(share)], [])


class _Discounts(ast.NodeTransformer):
    """Takes the discount out of ``mc_return(0.9)``, and leaves the name of the column."""

    def __init__(self) -> None:
        self.found: float | None = None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=value)], keywords=[]) if (
                name == MC_RETURN
            ):
                discount = checked_discount(value)
                if self.found not in (None, discount):
                    raise _refusal(node, f"the filter has the discount {self.found} too: write one of them")
                self.found = discount
                return ast.Name(name)
        return self.generic_visit(node)


class _Quantiles(ast.NodeTransformer):
    """Replaces quantiles by their values."""

    def __init__(self, value_of: Callable[[str, float], float]) -> None:
        self._value_of = value_of

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        sides: list[ast.expr] = [node.left, *node.comparators]
        names = [ref.column for ref in map(_ref, sides) if ref is not None]
        for at, side in enumerate(sides):
            share = _quantile(side)
            if share is not None:
                sides[at] = ast.Constant(self._value_of(names[0], share))
        return ast.Compare(sides[0], node.ops, sides[1:])


def _among(node: ast.expr) -> ast.Tuple:
    """The constants after ``in``. Parentheses around a single constant are meant as a tuple."""
    found = [_canonical(item) for item in (node.elts if isinstance(node, ast.Tuple | ast.List) else [node])]
    kinds = {_kind(item.value) if isinstance(item, ast.Constant) else "" for item in found}
    if len(kinds) != 1 or "" in kinds:
        raise _refusal(node, "'in' looks among constants of one kind, numbers or texts: x in (1, 2, 3)")
    return ast.Tuple(found)


def _folded(node: ast.expr, operation: Callable[..., Any], *operands: ast.expr) -> ast.expr:
    """A calculation; its result, if all operands are constants."""
    values = [one.value for one in operands if isinstance(one, ast.Constant)]
    if any(_kind(value) != "number" for value in values):
        raise _refusal(node, "a text cannot be used in a calculation")
    if len(values) < len(operands):
        return node
    try:
        return _constant(node, operation(*values))
    except ArithmeticError as error:
        raise _refusal(node, str(error)) from error


def _constant(node: ast.expr, value: Any) -> ast.Constant:
    """A constant that can be compared with every column of numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        raise _refusal(node, "the number exceeds float64; test for infinities with isinf(x)")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise _refusal(node, "the number exceeds 64-bit integers; write it with a point, as a float")
    return ast.Constant(value)


def _reference(node: ast.expr) -> ast.expr:
    """A column with its keys and indexes, each in its own brackets."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name.startswith("__") or name in _FUNCTIONS:
            raise _refusal(node, "a column of this name needs quotes: column('the name') or obs['the key']")
        case ast.Name(id=name):
            return _column(name)
        case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str() as name)], keywords=[]):
            return _column(name)
        case ast.Attribute(value=value, attr=key):
            return ast.Subscript(_reference(value), ast.Constant(key))
        case ast.Subscript(value=value, slice=index):
            steps = index.elts if isinstance(index, ast.Tuple) and index.elts else [index]
            found = [_canonical(step) for step in steps]
            if all(isinstance(step, ast.Constant) and type(step.value) in (str, int) for step in found):
                return reduce(ast.Subscript, found, _reference(value))
            raise _refusal(node, "expected a whole number as an index, or a key of a nested column")
    raise _refusal(node, f"expected a column; {_ALLOWED}")


def _column(name: str) -> ast.expr:
    plain = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    if plain and not name.startswith("__") and name not in (*_FUNCTIONS, Columns.DONES):
        return ast.Name(name)
    return ast.Call(ast.Name("column"), [ast.Constant(name)], [])


# ---- canonical expressions, interpreted on arrays ----

_Arrays: TypeAlias = Mapping[Ref, NDArray[Any]]


def _ref(node: ast.AST) -> Ref | None:
    """The row value that an expression names; None if it names none."""
    match node:
        case ast.Name(id=name):
            return Ref(name)
        case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str() as name)]):
            return Ref(name)
        case ast.Subscript(value=value, slice=ast.Constant(value=str() | int() as step)):
            inner = _ref(value)
            return None if inner is None else Ref(inner.column, (*inner.path, step))
        case ast.Call(func=ast.Name(id="len"), args=[value]):
            inner = _ref(value)
            return None if inner is None else inner._replace(length=True)
    return None


def _references(node: ast.AST) -> dict[Ref, None]:
    """The row values that an expression reads, each once, in the order of the text."""
    if ref := _ref(node):
        return {ref: None}
    inner = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
    return {ref: None for part in inner for ref in _references(part)}


def _holds(node: ast.expr, arrays: _Arrays) -> NDArray[np.bool_]:
    """Whether a condition holds, shape (rows,)."""
    found, missing = _filled(_calculated(node, arrays))
    if missing is not None:
        found = np.zeros(len(missing), bool) if found is None else np.where(missing, False, found)
    if not isinstance(found, np.ndarray) or found.dtype != np.bool_:
        raise OptionError(
            f"the filter takes {excerpt(_text(node))}, a {_kind(found)}, for a condition: compare it with "
            "something; & and | bind closer than comparisons: (a > 0) & (b < 1)"
        )
    return found


def _calculated(node: ast.expr, arrays: _Arrays) -> Any:
    """The value of an expression: an array of shape (rows,), or a constant."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.BoolOp(op=op, values=values):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return reduce(join, [_holds(value, arrays) for value in values])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.logical_not(_holds(operand, arrays))
        case ast.Compare():
            sides = _pairs(node)
            return reduce(np.logical_and, [_compared(a, op, b, arrays) for a, op, b in sides])
        case ast.UnaryOp(operand=operand):
            (found,) = _numbers(node, arrays, operand)
            return -found if _is_float(found) else _arithmetic(node, operator.sub, 0, found)
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(node, _OPERATIONS[type(op)], *_numbers(node, arrays, left, right))
        case ast.Call(func=ast.Name(id="abs"), args=[operand]):
            (found,) = _numbers(node, arrays, operand)
            if found.dtype.kind == "i":
                return np.maximum(found, _arithmetic(node, operator.sub, 0, found))
            return np.abs(found)
        case ast.Call(func=ast.Name(id=name), args=[operand]) if name in _FLOAT_TESTS:
            return _FLOAT_TESTS[name](*_numbers(node, arrays, operand))
    ref = _ref(node)
    assert ref is not None
    return arrays[ref]


def _numbers(node: ast.expr, arrays: _Arrays, *operands: ast.expr) -> list[Any]:
    found = []
    for operand in operands:
        value, missing = _filled(_calculated(operand, arrays))
        if missing is not None and value is None:
            value = np.full(len(missing), np.nan)
        elif missing is not None and _kind(value) == "number":
            value = np.where(missing, np.nan, value)
        found.append(value)
    for value in found:
        if _kind(value) != "number":
            raise OptionError(
                f"the filter calculates with a {_kind(value)} in {excerpt(_text(node))}: use numbers only"
            )
    return found


def _pairs(node: ast.Compare) -> list[tuple[ast.expr, ast.cmpop, ast.expr]]:
    """Left, operator and right of each comparison of a chain."""
    return list(zip((node.left, *node.comparators), node.ops, node.comparators, strict=False))


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr, arrays: _Arrays) -> NDArray[np.bool_]:
    a, lost = _filled(_calculated(left, arrays))
    among = (
        [one.value for one in right.elts if isinstance(one, ast.Constant)]
        if isinstance(right, ast.Tuple)
        else []
    )
    b, also = (among[0], None) if among else _filled(_calculated(right, arrays))
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
    if _kind(a) != _kind(b):
        where = excerpt(_text(ast.Compare(left, [op], [right])))
        raise OptionError(f"the filter compares a {_kind(a)} with a {_kind(b)} in {where}")
    if not among:
        return _compare(op, a, b)
    found = _is_among(a, among)
    return ~found if isinstance(op, ast.NotIn) else found


def _compare(op: ast.cmpop, a: Any, b: Any) -> NDArray[np.bool_]:
    """Compare exactly: NumPy does so for integers, also int64 with uint64 and with Python's of any size."""
    a, b = _beside_floats(a, b) if _is_float(a) or _is_float(b) else (_whole(a), _whole(b))
    return np.asarray(_COMPARISONS[type(op)](a, b), np.bool_)


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


def _kind(value: Any) -> str:
    """``number``, ``text`` or ``bytes``: values of one kind can be compared. A bool is a number."""
    dtype_kind = value.dtype.kind if isinstance(value, np.ndarray) else ""
    if isinstance(value, str) or dtype_kind in ("U", "O"):
        return "text"
    return "bytes" if isinstance(value, bytes) or dtype_kind == "S" else "number"


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
            f"the filter's {excerpt(_text(node))} exceeds integers of 64 bits: multiply one of them by 1.0 "
            "to calculate in float64, or pass a function of a batch"
        )
    return np.asarray(operation(np.asarray(a, np.int64), np.asarray(b, np.int64)))


# ---- what the bounds of columns allow ----


_MIRRORED: Final = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


def _may_hold(node: ast.expr, bounds: Mapping[Ref, Bounds]) -> bool:
    """Whether a condition may hold for some row; never False if it does."""
    match node:
        case ast.BoolOp(op=op, values=values):
            found = [_may_hold(value, bounds) for value in values]
            return all(found) if isinstance(op, ast.And) else any(found)
        case ast.Compare(left=left, ops=[ast.In()], comparators=[ast.Tuple(elts=among)]):
            return any(_may_compare(left, ast.Eq(), one, bounds) for one in among)
        case ast.Compare():
            return all(_may_compare(*pair, bounds) for pair in _pairs(node))
    return _may_compare(node, ast.Gt(), ast.Constant(0), bounds)


def _may_compare(left: ast.expr, op: ast.cmpop, right: ast.expr, bounds: Mapping[Ref, Bounds]) -> bool:
    """Whether a comparison of a column with a constant may hold; True for any other comparison."""
    if isinstance(left, ast.Constant):
        left, op, right = right, _MIRRORED.get(type(op), type(op))(), left
    ref = _ref(left)
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


# ---- finding a value in a batch ----


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(to_numpy(value) if is_tensor(value) else value)


def _example(spec: ColumnSpec) -> NDArray[Any]:
    """One row of a column."""
    if spec.kind == "text":
        return np.array([b"" if spec.dtype[1] == "S" else ""])
    if spec.kind in ("ragged", "nested"):
        return object_rows([spec.empty_row])
    return np.array([{}], object) if spec.kind == "json" else np.zeros((1, *spec.shape), spec.numpy)


def _no_column(name: str, known: Iterable[str]) -> MissingColumn:
    hint = ""
    if name in EPISODE_COLUMNS:
        hint = "; it is derived from whole episodes in a store: read with cache='memory' or 'disk'"
    stored = sorted({*known}.difference(EPISODE_COLUMNS))
    return MissingColumn(
        f"the filter needs a column {excerpt(name)}; the columns are {', '.join(stored)}; derived from whole "
        f"episodes are {', '.join(EPISODE_COLUMNS)}{hint or did_you_mean(name, [*stored, *EPISODE_COLUMNS])}",
        column=name,
    )


def _values_of(columns: Mapping[str, Any], ref: Ref) -> NDArray[Any]:
    """The values of a reference, shape (rows,); a view, or a copy of infos."""
    if ref.column == Columns.INFOS and is_typed(typed := _raw(columns, ref.column)):
        own = _of_info_key(typed, ref)
        if own is not None:
            return own
        columns = {ref.column: info_objects(typed)}
    leaf, steps = _located(columns, ref)
    array = _array(leaf)
    if not array.ndim:
        raise SchemaError("found a single value, expected one a row", column=ref.column)
    if ref.length:
        return _lengths(array, steps, ref)
    if steps and array.dtype.kind == "O" and array.ndim == 1 and not any(type(x) is str for x in array):
        return _of_objects(array, steps, ref)
    index = tuple(step for step in steps if isinstance(step, int))
    if len(index) < len(steps):
        raise MissingColumn(
            f"the filter reads {_written(ref)}, but the value there is an array, which has no keys",
            column=ref.column,
        )
    shape = array.shape[1:]
    if len(index) != len(shape) or not all(-n <= at < n for at, n in zip(index, shape, strict=True)):
        example = f"[{', '.join('0' * len(shape))}]" if shape else ""
        raise OptionError(
            f"the filter reads {_written(ref)} of a column with rows of shape {shape}: name one value, "
            f"such as {ref.column}{example}",
            column=ref.column,
        )
    objects = array.dtype.kind == "O" and not all(type(value) is str for value in array.tolist())
    if objects or array.dtype.kind not in "biufSUO":
        what = "objects" if objects else str(array.dtype)
        hint = f"; name a key, such as {ref.column}['success']" if objects and not ref.path else ""
        if array.dtype.kind in "mM" or (objects and isinstance(array[0], datetime.date)):
            what = f"{what} of time" if objects else what
            hint = f"; times by a function, such as lambda rows: rows[{ref.column!r}] > moment"
        raise OptionError(
            f"the filter reads {_written(ref)}, which holds {what}: numbers, bools and texts can be compared"
            f"{hint}",
            column=ref.column,
        )
    at: Any = (slice(None), *index)
    found: NDArray[Any] = array[at]
    return found


def _raw(columns: Mapping[str, Any], name: str) -> Any:
    """A column as a batch has it, without making objects of infos; None: there is none."""
    if isinstance(columns, SampleBatch):
        return columns._raw(name) if name in columns else None
    return columns.get(name)


def _of_info_key(infos: Mapping[str, Any], ref: Ref) -> NDArray[Any] | None:
    """The values of a key that is a column, as `_of_objects` gives them; None: they may be elsewhere."""
    node: Any = infos
    path: Path = ()
    steps = list(ref.path)
    while isinstance(node, dict) and steps and isinstance(key := steps[0], str):
        if key not in node or key.startswith("_") or not key:
            return None
        node, path = node[key], (*path, steps.pop(0))
    rest = infos[NOTES][NOTES]
    if isinstance(node, dict) or ref.length or len(steps) != node.ndim - 1 or node.dtype == np.uint64:
        return None
    if rest.dtype == object and any(left is not None for left in rest):
        return None
    if not all(isinstance(at, int) and -n <= at < n for at, n in zip(steps, node.shape[1:], strict=True)):
        return None
    mask: Any = infos
    for part in mask_path(path):
        mask = mask[part]
    has: NDArray[np.bool_] = mask
    found: NDArray[Any] = node[(slice(None), *steps)]
    # Values of objects are Python's own.
    found = found.astype({"f": np.float64, "b": np.bool_}.get(found.dtype.kind, np.int64))
    if has.all():
        return found
    made = found.astype(object)
    made[~has] = None
    return made


def _lengths(rows: NDArray[Any], steps: Path, ref: Ref) -> NDArray[Any]:
    """The number of items in each row, shape (rows,); objects, with None, if some rows have no value."""
    found = [_at(row, steps) if steps else row for row in rows]
    try:
        lengths = [None if value is None else len(value) for value in found]
    except TypeError as error:
        raise OptionError(
            f"the filter reads {_written(ref)}, but {error}: lists, arrays, objects and texts have a length",
            column=ref.column,
        ) from error
    return object_column(lengths) if None in lengths else np.array(lengths, np.int64)


def _written(ref: Ref) -> str:
    text = ref.column + "".join(f"[{step!a}]" for step in ref.path)
    return f"len({text})" if ref.length else text


def _of_objects(rows: NDArray[Any], steps: Path, ref: Ref) -> NDArray[Any]:
    """The values at a place in the object of each row, shape (rows,); objects, with None, if some lack it."""
    found = [_at(value, steps) for value in rows.tolist()]
    known = [value for value in found if value is not None]
    typed = _typed(known)
    if known and typed is None:
        raise OptionError(
            f"the filter reads {_written(ref)}, which holds {excerpt(known)}: numbers, bools and texts can "
            "be compared, those of one kind",
            column=ref.column,
        )
    return typed if typed is not None and len(known) == len(found) else object_column(found)


def _at(value: Any, steps: Path) -> Any:
    """The value at some keys and indexes of an object, as Python's own; None if there is none."""
    for step in steps:
        if isinstance(value, str | bytes):
            return None  # A letter of it is no value of its own.
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.size == 1 else value


def _typed(values: Sequence[Any]) -> NDArray[Any] | None:
    """Python's values as an array of one kind; None if they have several, or none that can be compared."""
    kinds = set(map(type, values))
    if not kinds:
        return None
    if kinds == {str}:
        return object_column(values)
    if kinds == {bool}:
        return np.array(values)
    if not kinds <= {bool, int, float}:
        return None
    try:
        return np.array(values, np.float64 if float in kinds else np.int64)
    except OverflowError:  # Integers of more than 64 bits.
        return None


def _filled(value: Any) -> tuple[Any, NDArray[np.bool_] | None]:
    """Values of objects, typed, with any value where there is none, and where that is; others themselves.

    The values are None if none is there, so that their kind is not known.
    """
    if not (isinstance(value, np.ndarray) and value.dtype.kind == "O"):
        return value, None
    missing = np.array([one is None for one in value], bool)
    if len(value) and not missing.any():
        return value, None
    known = _typed(value[~missing].tolist())
    if known is None:
        return None, missing
    filled = np.full(len(value), known[0], known.dtype)
    filled[~missing] = known
    return filled, missing


def _located(columns: Mapping[str, Any], ref: Ref) -> tuple[Any, Path]:
    """The leaf that a reference leads to, and the other steps: indexes into its array, or keys of objects."""
    if ref.column not in columns:
        raise _no_column(ref.column, columns)
    value, path = columns[ref.column], list(ref.path)
    while isinstance(value, dict | tuple):
        parts = value if isinstance(value, dict) else dict(enumerate(value))
        if not path:
            raise OptionError(
                f"the filter reads {_written(ref)}, which is nested: name one of {excerpt(list(parts))}",
                column=ref.column,
            )
        step = path.pop(0)
        if step not in parts:
            raise MissingColumn(
                f"the filter reads {_written(ref)}, but {excerpt(step)} is not among the keys "
                f"{excerpt(list(parts))}",
                column=ref.column,
            )
        value = parts[step]
    return value, tuple(path)
