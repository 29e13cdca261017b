"""The texts of filters: Python's grammar, restricted to a few forms, and brought to one canonical form.

Example:
    >>> text_of(canonical(parsed("(rewards>0) & (obs[1] <= 0.5)")))
    'rewards > 0 and obs[1] <= 0.5'
"""

from __future__ import annotations

import ast
import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final

import numpy as np

from rlio.batch.columns import Columns
from rlio.errors import OptionError, excerpt
from rlio.query.derived_columns import EPISODE_COLUMNS, MC_RETURN, checked_discount
from rlio.query.filter_values import Ref

__all__ = [
    "ALLOWED",
    "COMPARISONS",
    "FLOAT_TESTS",
    "OPERATIONS",
    "Discounts",
    "Quantiles",
    "canonical",
    "kind_of",
    "pairs_in",
    "parsed",
    "quantile_in",
    "ref_of",
    "references_in",
    "refusal",
    "text_of",
]


COMPARISONS: Final[dict[type[ast.cmpop], Callable[..., Any]]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
OPERATIONS: Final[dict[type[ast.operator], Callable[..., Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
FLOAT_TESTS: Final[Mapping[str, np.ufunc]] = {"isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite}
_FUNCTIONS: Final = ("abs", "column", "len", *FLOAT_TESTS)
ALLOWED: Final = (
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


def parsed(text: str) -> ast.expr:
    """Python's tree of a text, of checked size but unchecked content."""
    if not isinstance(text, str):
        raise OptionError(f"filter={excerpt(text)}: expected a text such as 'rewards > 0'")
    if len(text) > _MAX_CHARACTERS:
        raise OptionError(
            f"a filter of {len(text)} characters: expected at most {_MAX_CHARACTERS}; pass a function instead"
        )
    tokens = [found for found in _TOKEN.findall(text) if found[0] not in "'\""]
    if "#" in tokens:
        raise OptionError(f"filter={excerpt(text)}: a filter cannot hold comments; {ALLOWED}")
    if len(tokens) > _MAX_TOKENS:
        raise OptionError(
            f"filter={excerpt(text)}: more than {_MAX_TOKENS} names and operators; use x in (...), or a "
            "function"
        )
    try:
        tree = ast.parse(re.sub(r"[\r\n]", " ", text).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        hint = "the return of an episode is episode_return; " if "return" in tokens else ""
        raise OptionError(
            f"filter={excerpt(text)} cannot be read: {excerpt(str(error))}; {hint}{ALLOWED}"
        ) from error
    level: list[ast.AST] = [tree]
    for _ in range(_MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise OptionError(
            f"filter={excerpt(text)}: nested more than {_MAX_DEPTH} deep; use x in (...), or a function"
        )
    return tree


def refusal(node: ast.AST, why: str) -> OptionError:
    """The error of a part of a text."""
    return OptionError(f"filter: {excerpt(text_of(node))}: {why}")


def text_of(node: ast.AST) -> str:
    """The text of an expression, in ASCII. Saved states hold it, so every Python must give the same text."""
    match node:
        # `ast.unparse` writes `a and (not b)`.
        case ast.BoolOp(op=ast.Or(), values=values):
            return " or ".join(map(text_of, values))
        case ast.BoolOp(values=values):
            return " and ".join(
                f"({text_of(one)})" if isinstance(one, ast.BoolOp) else text_of(one) for one in values
            )
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return (
                f"not ({text_of(operand)})" if isinstance(operand, ast.BoolOp) else f"not {text_of(operand)}"
            )
    return ast.unparse(node).encode("ascii", "backslashreplace").decode()


def canonical(node: ast.expr) -> ast.expr:
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
            return _opposite(canonical(operand))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return canonical(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _folded(ast.UnaryOp(ast.USub(), inner := canonical(operand)), operator.neg, inner)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATIONS:
            a, b = canonical(left), canonical(right)
            return _folded(ast.BinOp(a, op, b), OPERATIONS[type(op)], a, b)
        case ast.Compare():
            return _comparison(node)
        case ast.Call(func=ast.Name(id="abs"), args=[value], keywords=[]):
            return _folded(ast.Call(ast.Name("abs"), [inner := canonical(value)], []), abs, inner)
        case ast.Call(func=ast.Name(id="len"), args=[value], keywords=[]):
            return ast.Call(ast.Name("len"), [_reference(value)], [])
        case ast.Call(func=ast.Name(id=name), args=[value], keywords=[]) if name in FLOAT_TESTS:
            return ast.Call(ast.Name(name), [canonical(value)], [])
    raise refusal(node, ALLOWED)


def _joined(op: ast.boolop, parts: list[ast.expr]) -> ast.expr:
    """Join conditions; joins of the same kind among them are flattened."""
    flat: list[ast.expr] = []
    for part in map(canonical, parts):
        if isinstance(part, ast.Constant):
            raise refusal(
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
        raise refusal(node, "'in' cannot be chained with other comparisons; join them by 'and'")
    for left, op, right in pairs_in(made):
        if not any(among) and type(op) not in COMPARISONS:
            raise refusal(node, ALLOWED)
        if isinstance(left, ast.Constant) and isinstance(right, ast.Constant | ast.Tuple):
            raise refusal(node, "a comparison of constants: compare a column")
        for side, other in ((left, right), (right, left)):
            ref = ref_of(other)
            is_episodes = ref is not None and not ref.path and ref.column in EPISODE_COLUMNS
            if quantile_in(side) is not None and not is_episodes:
                raise refusal(node, f"quantile(share) is compared with one of {', '.join(EPISODE_COLUMNS)}")
    return made


def quantile_in(node: ast.AST) -> float | None:
    """The share of ``quantile(share)``; None: it is something else."""
    match node:
        case ast.Call(
            func=ast.Name(id="quantile"), args=[ast.Constant(value=int() | float() as share)], keywords=[]
        ):
            return float(share)
    return None


def _side(node: ast.expr) -> ast.expr:
    """One side of a comparison: an expression, or a quantile as in ``quantile(0.1) < episode_return``."""
    share = quantile_in(node)
    if share is None:
        return canonical(node)
    if not 0.0 <= share <= 1.0:
        raise refusal(node, "expected a share of the episodes, from 0 to 1")
    return ast.Call(ast.Name("quantile"), [ast.Constant(share)], [])


class Discounts(ast.NodeTransformer):
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
                    raise refusal(node, f"the filter has the discount {self.found} too: write one of them")
                self.found = discount
                return ast.Name(name)
        return self.generic_visit(node)


class Quantiles(ast.NodeTransformer):
    """Replaces quantiles by their values."""

    def __init__(self, value_of: Callable[[str, float], float]) -> None:
        self._value_of = value_of

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        sides: list[ast.expr] = [node.left, *node.comparators]
        names = [ref.column for ref in map(ref_of, sides) if ref is not None]
        for at, side in enumerate(sides):
            share = quantile_in(side)
            if share is not None:
                sides[at] = ast.Constant(self._value_of(names[0], share))
        return ast.Compare(sides[0], node.ops, sides[1:])


def _among(node: ast.expr) -> ast.Tuple:
    """The constants after ``in``. Parentheses around a single constant are meant as a tuple."""
    found = [canonical(item) for item in (node.elts if isinstance(node, ast.Tuple | ast.List) else [node])]
    kinds = {kind_of(item.value) if isinstance(item, ast.Constant) else "" for item in found}
    if len(kinds) != 1 or "" in kinds:
        raise refusal(node, "'in' looks among constants of one kind, numbers or texts: x in (1, 2, 3)")
    return ast.Tuple(found)


def _folded(node: ast.expr, operation: Callable[..., Any], *operands: ast.expr) -> ast.expr:
    """A calculation; its result, if all operands are constants."""
    values = [one.value for one in operands if isinstance(one, ast.Constant)]
    if any(kind_of(value) != "number" for value in values):
        raise refusal(node, "a text cannot be used in a calculation")
    if len(values) < len(operands):
        return node
    try:
        return _constant(node, operation(*values))
    except ArithmeticError as error:
        raise refusal(node, str(error)) from error


def _constant(node: ast.expr, value: Any) -> ast.Constant:
    """A constant that can be compared with every column of numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal(node, "the number exceeds float64; test for infinities with isinf(x)")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise refusal(node, "the number exceeds 64-bit integers; write it with a point, as a float")
    return ast.Constant(value)


def _reference(node: ast.expr) -> ast.expr:
    """A column with its keys and indexes, each in its own brackets."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name.startswith("__") or name in _FUNCTIONS:
            raise refusal(node, "a column of this name needs quotes: column('the name') or obs['the key']")
        case ast.Name(id=name):
            return _column(name)
        case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str() as name)], keywords=[]):
            return _column(name)
        case ast.Attribute(value=value, attr=key):
            return ast.Subscript(_reference(value), ast.Constant(key))
        case ast.Subscript(value=value, slice=index):
            steps = index.elts if isinstance(index, ast.Tuple) and index.elts else [index]
            found = [canonical(step) for step in steps]
            if all(isinstance(step, ast.Constant) and type(step.value) in (str, int) for step in found):
                return reduce(ast.Subscript, found, _reference(value))
            raise refusal(node, "expected a whole number as an index, or a key of a nested column")
    raise refusal(node, f"expected a column; {ALLOWED}")


def _column(name: str) -> ast.expr:
    plain = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    if plain and not name.startswith("__") and name not in (*_FUNCTIONS, Columns.DONES):
        return ast.Name(name)
    return ast.Call(ast.Name("column"), [ast.Constant(name)], [])


def ref_of(node: ast.AST) -> Ref | None:
    """The row value that an expression names; None if it names none."""
    match node:
        case ast.Name(id=name):
            return Ref(name)
        case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str() as name)]):
            return Ref(name)
        case ast.Subscript(value=value, slice=ast.Constant(value=str() | int() as step)):
            inner = ref_of(value)
            return None if inner is None else Ref(inner.column, (*inner.path, step))
        case ast.Call(func=ast.Name(id="len"), args=[value]):
            inner = ref_of(value)
            return None if inner is None else inner._replace(length=True)
    return None


def references_in(node: ast.AST) -> dict[Ref, None]:
    """The row values that an expression reads, each once, in the order of the text."""
    if ref := ref_of(node):
        return {ref: None}
    inner = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
    return {ref: None for part in inner for ref in references_in(part)}


def pairs_in(node: ast.Compare) -> list[tuple[ast.expr, ast.cmpop, ast.expr]]:
    """Left, operator and right of each comparison of a chain."""
    return list(zip((node.left, *node.comparators), node.ops, node.comparators, strict=False))


def kind_of(value: Any) -> str:
    """``number``, ``text`` or ``bytes``: values of one kind can be compared. A bool is a number."""
    dtype_kind = value.dtype.kind if isinstance(value, np.ndarray) else ""
    if isinstance(value, str) or dtype_kind in ("U", "O"):
        return "text"
    return "bytes" if isinstance(value, bytes) or dtype_kind == "S" else "number"
