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
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns, is_per_sequence
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.query.derived_columns import MC_RETURN
from rlio.query.filter_conditions import holds, may_hold
from rlio.query.filter_text import (
    ALLOWED,
    Discounts,
    Quantiles,
    canonical,
    parsed,
    quantile_in,
    ref_of,
    references_in,
    refusal,
    text_of,
)
from rlio.query.filter_values import Ref, as_array, example_of, no_column, values_of
from rlio.query.splits import Split
from rlio.schemas.leaves import rebuild
from rlio.schemas.parquet_statistics import Bounds
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.streams import WRITER

__all__ = ["Ref", "RowFilter", "RowFunction", "advice_for"]

#: Takes a batch of rows and returns a bool for each, shape (rows,).
RowFunction: TypeAlias = Callable[[SampleBatch], Any]


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
        self.references: tuple[Ref, ...] = () if condition is None else tuple(references_in(condition))
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
        discounts = Discounts()
        condition = canonical(discounts.visit(parsed(text)))
        if not isinstance(condition, ast.BoolOp | ast.Compare | ast.UnaryOp | ast.Call) and not ref_of(
            condition
        ):
            raise refusal(condition, f"expected a condition, such as rewards > 0; {ALLOWED}")
        columns = dict.fromkeys(ref.column for ref in references_in(condition))
        return cls(
            text=text_of(condition), columns=tuple(columns), condition=condition, discount=discounts.found
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
        return any(quantile_in(node) is not None for node in nodes)

    def with_quantiles(self, value_of: Callable[[str, float], float]) -> RowFilter:
        """Return the filter with the value of each quantile in its place."""
        if self._condition is None:
            return self
        condition = Quantiles(value_of).visit(copy.deepcopy(self._condition))
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
            raise no_column(Columns.EPS_ID, policy.columns)
        if self._condition is not None:
            leaves = {name: policy.shown.columns[name] for name in self.columns or ()}
            self.with_quantiles(lambda *_: 0.0).mask(
                {
                    name: rebuild([(leaf.path, example_of(leaf.spec)) for leaf in found])
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
                raise no_column(name, known)

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
            values_of(columns, Ref(Columns.EPS_ID)),
            writer if owners is None else np.where(as_array(owners) == "", writer, as_array(owners)),
        )
        return here & self._passing(columns, len(here)) if self._condition or self._function else here

    def _passing(self, columns: Mapping[str, Any], rows: int | None) -> NDArray[np.bool_]:
        """`mask` of the condition, or the function."""
        if self._function is not None:
            return self._called(self._function, columns, rows)
        assert self._condition is not None
        arrays: dict[Ref, NDArray[Any]] = {}
        for ref in self.references:
            arrays[ref] = values_of(columns, ref)
            if rows is not None and len(arrays[ref]) != rows:
                raise SchemaError(f"{len(arrays[ref])} rows where others have {rows}", column=ref.column)
            rows = len(arrays[ref])
        # Without this, NumPy would warn of 1 / 0. The result is an infinity or a NaN, as the module's
        # docstring says.
        with np.errstate(all="ignore"):
            found = holds(self._condition, arrays)
        return found.copy() if ref_of(self._condition) else found

    def _called(
        self, function: RowFunction, columns: Mapping[str, Any], rows: int | None
    ) -> NDArray[np.bool_]:
        chosen = {name: columns[name] for name in columns if self.reads(name)}
        for name in self.columns or ():
            if name not in chosen:
                raise no_column(name, columns)
        batch = SampleBatch(chosen)
        count = len(batch) if rows is None else rows
        found = as_array(function(batch))
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
            return may_hold(self._condition, bounds)


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
