"""The little language of row filters: text to nodes and back. Nothing in it is ever run as code.

Python's own grammar is used, so that a filter reads as the user expects, but only a few of its forms are
taken over, one by one, into the nodes below; everything else is refused, with its place in the text.

Not here: what the nodes mean for columns (`rlio.replay.filters`), and for bounds of columns
(`rlio.replay.filter_bounds`).

Example:
    >>> text_of(parse("(rewards>0) & ~terminateds & (obs['speed'][0] <= .5)"))
    "rewards > 0 and not terminateds and obs['speed'][0] <= 0.5"
"""

from __future__ import annotations

import ast
import keyword
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from rlio.columns import Columns
from rlio.errors import OptionError, excerpt
from rlio.nested import Path

__all__ = [
    "COMPARISONS",
    "OPERATIONS",
    "Absolute",
    "And",
    "Arithmetic",
    "Compare",
    "Condition",
    "Constant",
    "FloatTest",
    "Literal",
    "Member",
    "Negative",
    "Not",
    "Or",
    "Ref",
    "Value",
    "parse",
    "references",
    "text_of",
]

Literal: TypeAlias = bool | int | float | str | bytes

#: Comparisons and arithmetic as functions, on Python's numbers and on arrays.
COMPARISONS: Final[dict[str, Callable[..., object]]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne,
}  # fmt: skip
OPERATIONS: Final[dict[str, Callable[..., object]]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip

_COMPARISON_OF: Final = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_OPERATION_OF: Final = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_TESTS: Final = ("isnan", "isinf", "isfinite")
_FUNCTIONS: Final = ("abs", "column", *_TESTS)

# A list of thousands of episode ids fits; a text that makes Python's parser work for long does not.
_MAX_CHARACTERS: Final = 1 << 16
# Names, operators and brackets, each of which may nest one deeper: Python's parser recurses in C.
_MAX_TOKENS: Final = 1000
_MAX_DEPTH: Final = 50
_MAX_NUMBER: Final = 64
_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 64) - 1

_ALLOWED: Final = (
    "a filter has comparisons (< <= > >= == != in), and, or, not, + - * /, abs(x), isnan(x), isinf(x), "
    "isfinite(x), numbers, True, False, texts, and columns such as rewards, obs[3], obs['position'][0]"
)


@dataclass(frozen=True)
class Ref:
    """One value a row: a column, keys into it where it is nested, indexes into a row's array."""

    column: str
    path: Path = ()


@dataclass(frozen=True)
class Constant:
    """A number, a bool, a text, or bytes."""

    value: Literal


@dataclass(frozen=True)
class Negative:
    """Minus a value."""

    value: Value


@dataclass(frozen=True)
class Absolute:
    """The absolute value."""

    value: Value


@dataclass(frozen=True)
class Arithmetic:
    """Two values joined by one of `OPERATIONS`; at least one is no constant."""

    symbol: str
    left: Value
    right: Value


@dataclass(frozen=True)
class Compare:
    """A chain of comparisons: ``first``, then symbol and value, each with its left neighbour."""

    first: Value
    rest: tuple[tuple[str, Value], ...]

    def pairs(self) -> list[tuple[str, Value, Value]]:
        """Symbol, left and right of each comparison."""
        values = [self.first, *(value for _, value in self.rest)]
        return [(symbol, values[i], value) for i, (symbol, value) in enumerate(self.rest)]


@dataclass(frozen=True)
class Member:
    """Whether a value is one of some constants: all numbers and bools, all texts, or all bytes."""

    value: Value
    among: tuple[Literal, ...]


@dataclass(frozen=True)
class FloatTest:
    """``isnan``, ``isinf`` or ``isfinite``."""

    name: str
    value: Value


@dataclass(frozen=True)
class Not:
    """The opposite of a condition."""

    part: Condition


@dataclass(frozen=True)
class And:
    """Conditions joined by ``and``; none of them is itself such a join."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class Or:
    """Conditions joined by ``or``; none of them is itself such a join."""

    parts: tuple[Condition, ...]


Value: TypeAlias = Ref | Constant | Negative | Absolute | Arithmetic
#: A Ref alone is a column of bools.
Condition: TypeAlias = Ref | Compare | Member | FloatTest | Not | And | Or


def parse(text: str) -> Condition:
    """The condition that a filter's text states.

    Raises:
        OptionError: It is too long, or holds what no filter may; the message says at which character.
    """
    if not isinstance(text, str):
        raise OptionError(f"filter={excerpt(text)}: expected a text such as 'rewards > 0'")
    if len(text) > _MAX_CHARACTERS:
        raise OptionError(
            f"a filter of {len(text)} characters: at most {_MAX_CHARACTERS}; give a function instead"
        )
    _check_tokens(text)
    # One line for the parser; no text that a filter may hold has a line end in it.
    line = re.sub(r"[\r\n]", " ", text)
    start = len(line) - len(line.lstrip())
    try:
        tree = ast.parse(line.strip(), mode="eval")
    except SyntaxError as error:
        raise _refusal(text, start + (error.offset or 1) - 1, f"{error.msg}; {_ALLOWED}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise OptionError(
            f"filter={excerpt(text)} cannot be read: {excerpt(str(error))}; {_ALLOWED}"
        ) from error
    return _Translator(text, line[start:], start).condition(tree.body, 0)


# ---- tokens: what reaches Python's parser is bounded before ----

_STRING = r"[A-Za-z]{{0,3}}{0}(?:[^{0}\\\r\n]|\\[\\'\"abfnrtvxuU])*{0}"
_TOKEN: Final = re.compile(
    rf"""(?P<space>[ \t\r\n]+)
    |(?P<string>{_STRING.format('"')}|{_STRING.format("'")})
    |(?P<number>\.?[0-9](?:[eE][+-]|[\w.])*)
    |(?P<name>[^\W\d]\w*)
    |(?P<operator><=|>=|==|!=|[-+*/<>&|~()\[\],.])""",
    re.VERBOSE,
)
_NUMBER: Final = re.compile(r"(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_KEYWORDS: Final = frozenset(("and", "or", "not", "in", "True", "False"))


def _check_tokens(text: str) -> None:
    """Refuse what no filter is made of: Python's parser recurses, and warns of what it finds odd."""
    at = tokens = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            hint = "== compares; " if text[at] == "=" else ""
            raise _refusal(text, at, f"{hint}{_ALLOWED}")
        kind, found = match.lastgroup, match.group()
        if kind == "number" and (len(found) > _MAX_NUMBER or not _NUMBER.fullmatch(found)):
            raise _refusal(
                text, at, f"no number that is understood: write one such as 12, 0.5 or 1e-3; {_ALLOWED}"
            )
        if kind == "string" and found[0] not in "'\"" and found[:1].lower() + found[1] not in ("b'", 'b"'):
            raise _refusal(text, at, "texts have no prefix but b, for bytes")
        if kind == "name" and keyword.iskeyword(found) and found not in _KEYWORDS:
            raise _refusal(text, at, _ALLOWED)
        tokens += kind in ("name", "operator") and found != ","
        if tokens > _MAX_TOKENS:
            raise _refusal(
                text, at, f"more than {_MAX_TOKENS} names and operators; use x in (...), or a function"
            )
        at = match.end()


def _refusal(text: str, at: int, why: str) -> OptionError:
    """The error for what stands at a place of the text."""
    return OptionError(f"filter at character {at + 1}: {excerpt(text[at:], 30)}: {why}")


# ---- Python's nodes to ours ----


class _Translator:
    """Takes over, node by node, what a filter may hold.

    Args:
        text: What the user wrote.
        line: What was parsed: from ``start`` on, with spaces for line ends.
        start: Where that begins in the text.
    """

    def __init__(self, text: str, line: str, start: int) -> None:
        self._text = text
        self._bytes = line.encode()
        self._start = start

    def _refusal(self, node: ast.AST, why: str) -> OptionError:
        # Python counts bytes of UTF-8.
        before = self._bytes[: getattr(node, "col_offset", 0)].decode("utf-8", "replace")
        return _refusal(self._text, self._start + len(before), why)

    def _check_depth(self, node: ast.AST, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise self._refusal(node, f"nested more than {_MAX_DEPTH} deep; use x in (...), or a function")

    def condition(self, node: ast.expr, depth: int) -> Condition:
        """What is true or false of a row."""
        self._check_depth(node, depth)
        match node:
            case ast.BoolOp(op=op, values=values):
                parts = [self.condition(value, depth + 1) for value in values]
                return _joined(And if isinstance(op, ast.And) else Or, parts)
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() as op, left=left, right=right):
                parts = [self._operand(side, depth + 1) for side in (left, right)]
                return _joined(And if isinstance(op, ast.BitAnd) else Or, parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Not(self.condition(operand, depth + 1))
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return Not(self._operand(operand, depth + 1))
            case ast.Compare():
                return self._compare(node, depth + 1)
            case ast.Call(func=ast.Name(id=name)) if name in _TESTS:
                return FloatTest(name, self.value(self._argument(node), depth + 1))
            case ast.Name(id=Columns.DONES):
                # As a batch has it: terminated or truncated. It is never stored.
                return Or((Ref(Columns.TERMINATEDS), Ref(Columns.TRUNCATEDS)))
            case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Call():
                return self._reference(node, depth + 1)
        raise self._refusal(node, f"expected a condition, such as rewards > 0; {_ALLOWED}")

    def _operand(self, node: ast.expr, depth: int) -> Condition:
        """What stands beside ``&``, ``|`` or ``~``, which bind closer than comparisons do."""
        if isinstance(node, ast.Constant):
            raise self._refusal(
                node, "& | ~ join conditions, and bind closer than comparisons: write (a > 0) & (b < 1)"
            )
        return self.condition(node, depth)

    def _compare(self, node: ast.Compare, depth: int) -> Condition:
        if any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            if len(node.ops) > 1:
                raise self._refusal(node, "'in' cannot be chained with other comparisons; join them by 'and'")
            member = Member(self.value(node.left, depth), self._among(node.comparators[0]))
            if isinstance(member.value, Constant):
                raise self._refusal(node, "a constant among constants: compare a column")
            return Not(member) if isinstance(node.ops[0], ast.NotIn) else member
        first, rest = self.value(node.left, depth), []
        for op, side in zip(node.ops, node.comparators, strict=True):
            if type(op) not in _COMPARISON_OF:
                raise self._refusal(node, _ALLOWED)
            rest.append((_COMPARISON_OF[type(op)], self.value(side, depth)))
        found = Compare(first, tuple(rest))
        for _, left, right in found.pairs():
            if isinstance(left, Constant) and isinstance(right, Constant):
                raise self._refusal(node, "a comparison of two constants: compare a column")
        return found

    def _among(self, node: ast.expr) -> tuple[Literal, ...]:
        """The constants behind ``in``; parentheses round one of them are no tuple, but meant as one."""
        items = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
        found: list[Literal] = []
        for item in items:
            constant = self.value(item, _MAX_DEPTH - 2)
            if not isinstance(constant, Constant):
                raise self._refusal(item, "'in' looks among constants: x in (1, 2, 3)")
            found.append(constant.value)
        if len({type(x) if isinstance(x, str | bytes) else float for x in found}) != 1:
            raise self._refusal(
                node, "'in' looks among constants of one kind, at least one: numbers or texts"
            )
        return tuple(found)

    def value(self, node: ast.expr, depth: int) -> Value:
        """A number or text of a row."""
        self._check_depth(node, depth)
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | bytes() as constant):
                return self._constant(node, constant)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._negative(node, self._number(operand, depth + 1))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._number(operand, depth + 1)
            case ast.BinOp(op=op) if type(op) in _OPERATION_OF:
                return self._arithmetic(node, _OPERATION_OF[type(op)], depth + 1)
            case ast.Call(func=ast.Name(id="abs")):
                inner = self._number(self._argument(node), depth + 1)
                if isinstance(inner, Constant) and not isinstance(inner.value, str | bytes):
                    return self._constant(node, abs(inner.value))
                return Absolute(inner)
            case ast.Name(id=Columns.DONES):
                raise self._refusal(node, "dones is terminateds or truncateds: a condition, and not compared")
            case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Call():
                return self._reference(node, depth + 1)
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not() | ast.Invert()):
                raise self._refusal(
                    node, "a condition cannot be compared or calculated with; join by 'and' or 'or'"
                )
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
                raise self._refusal(node, "& | bind closer than comparisons: write (a > 0) & (b < 1)")
        raise self._refusal(node, _ALLOWED)

    def _number(self, node: ast.expr, depth: int) -> Value:
        found = self.value(node, depth)
        if isinstance(found, Constant) and isinstance(found.value, str | bytes):
            raise self._refusal(node, "a text cannot be calculated with")
        return found

    def _constant(self, node: ast.AST, value: Literal) -> Constant:
        """A constant that every column of numbers can be compared with."""
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refusal(node, "beyond the numbers of float64; for infinities there is isinf(x)")
        if isinstance(value, int) and not _LEAST <= value <= _MOST:
            raise self._refusal(node, "beyond the integers of 64 bits; write it with a point, as a float")
        return Constant(value)

    def _negative(self, node: ast.AST, inner: Value) -> Value:
        if isinstance(inner, Constant) and not isinstance(inner.value, str | bytes):
            return self._constant(node, -inner.value)
        return Negative(inner)

    def _arithmetic(self, node: ast.BinOp, symbol: str, depth: int) -> Value:
        left, right = self._number(node.left, depth), self._number(node.right, depth)
        if not (isinstance(left, Constant) and isinstance(right, Constant)):
            return Arithmetic(symbol, left, right)
        try:
            found = OPERATIONS[symbol](left.value, right.value)
        except (ZeroDivisionError, OverflowError) as error:
            raise self._refusal(node, str(error)) from error
        assert isinstance(found, int | float)
        return self._constant(node, found)

    def _argument(self, node: ast.Call) -> ast.expr:
        if len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
            raise self._refusal(node, "expected one argument")
        return node.args[0]

    # ---- columns ----

    def _reference(self, node: ast.expr, depth: int) -> Ref:
        """A column, and the keys and indexes behind it."""
        self._check_depth(node, depth)
        match node:
            case ast.Name(id=name):
                self._check_name(node, name)
                return Ref(name)
            case ast.Attribute(value=value, attr=attribute):
                self._check_name(node, attribute)
                found = self._reference(value, depth + 1)
                return Ref(found.column, (*found.path, attribute))
            case ast.Subscript(value=value, slice=index):
                found = self._reference(value, depth + 1)
                steps = index.elts if isinstance(index, ast.Tuple) and index.elts else [index]
                return Ref(found.column, (*found.path, *map(self._step, steps)))
            case ast.Call(func=ast.Name(id="column")):
                match self._argument(node):
                    case ast.Constant(value=str() as quoted):
                        return Ref(quoted)
                raise self._refusal(node, "expected column('its name')")
            case ast.Call(func=ast.Name(id=name)):
                raise self._refusal(node, f"no function {excerpt(name)}; there are {', '.join(_FUNCTIONS)}")
        raise self._refusal(node, f"expected a column; {_ALLOWED}")

    def _step(self, node: ast.expr) -> str | int:
        found = None if isinstance(node, ast.Slice | ast.Starred) else self.value(node, _MAX_DEPTH - 2)
        if isinstance(found, Constant) and type(found.value) in (str, int):
            assert isinstance(found.value, str | int)
            return found.value
        raise self._refusal(node, "an index is a whole number, or a key of a nested column")

    def _check_name(self, node: ast.AST, name: str) -> None:
        if name.startswith("__") or name in _FUNCTIONS:
            raise self._refusal(
                node, "no column is named so; if one is, write column('its name') or obs['its key']"
            )


def _joined(kind: type[And] | type[Or], parts: list[Condition]) -> Condition:
    """Conditions joined, those that are such joins themselves taken apart."""
    flat: list[Condition] = []
    for part in parts:
        flat += part.parts if isinstance(part, kind) else (part,)
    return kind(tuple(flat))


# ---- and back ----

# How close what a node is written as binds; what binds less than its place asks for gets parentheses.
_OR, _AND, _NOT, _COMPARISON, _SUM, _PRODUCT, _UNARY, _ATOM = range(8)


def text_of(node: Condition | Value) -> str:
    """The canonical text: one for all that differ only in white space, parentheses, or ``&`` for ``and``."""
    return _written(node, _OR)


def _written(node: Condition | Value, place: int) -> str:
    text, binds = _text(node)
    return text if binds >= place else f"({text})"


def _text(node: Condition | Value) -> tuple[str, int]:
    match node:
        case Ref():
            return _reference_text(node), _ATOM
        case Constant(value):
            negative = not isinstance(value, str | bytes) and math.copysign(1, value) < 0
            return ascii(value), _UNARY if negative else _ATOM
        case Negative(value):
            return f"-{_written(value, _UNARY)}", _UNARY
        case Absolute(value):
            return f"abs({_written(value, _OR)})", _ATOM
        case Arithmetic(symbol, left, right):
            level = _SUM if symbol in "+-" else _PRODUCT
            # From the left: a - (b - c) keeps its parentheses.
            return f"{_written(left, level)} {symbol} {_written(right, level + 1)}", level
        case Compare(first, rest):
            parts = [_written(first, _SUM)]
            parts += (f"{symbol} {_written(value, _SUM)}" for symbol, value in rest)
            return " ".join(parts), _COMPARISON
        case Member():
            return _member_text(node, "in"), _COMPARISON
        case FloatTest(name, value):
            return f"{name}({_written(value, _OR)})", _ATOM
        case Not(Member() as member):
            return _member_text(member, "not in"), _COMPARISON
        case Not(part):
            return f"not {_written(part, _NOT)}", _NOT
        case And(parts=parts_):
            return " and ".join(_written(part, _NOT) for part in parts_), _AND
        case Or(parts=parts_):
            return " or ".join(_written(part, _AND) for part in parts_), _OR


def _member_text(node: Member, word: str) -> str:
    among = ", ".join(map(ascii, node.among)) + ("," if len(node.among) == 1 else "")
    return f"{_written(node.value, _SUM)} {word} ({among})"


def _reference_text(node: Ref) -> str:
    name = node.column
    plain = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    if not plain or name.startswith("__") or name in _FUNCTIONS or name == Columns.DONES:
        name = f"column({name!a})"
    return name + "".join(f"[{step!a}]" for step in node.path)


def references(node: Condition | Value) -> dict[Ref, None]:
    """The values of columns that a node reads, each once, in the order of the text."""
    match node:
        case Ref():
            return {node: None}
        case Negative(value) | Absolute(value) | Member(value=value) | FloatTest(value=value):
            return references(value)
        case Arithmetic(left=left, right=right):
            return references(left) | references(right)
        case Compare(first, rest):
            inner: list[Condition | Value] = [first, *(value for _, value in rest)]
        case Not(part):
            return references(part)
        case And(parts=parts) | Or(parts=parts):
            inner = list(parts)
        case _:
            return {}
    return {ref: None for part in inner for ref in references(part)}
