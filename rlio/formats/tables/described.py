"""The columns of a table in messages, with dtype and three values each, and what their texts may be.

Example:
    >>> from rlio.formats.tables.table import ArrayTable
    >>> describe(ArrayTable("log", {"x": [0.5, 1.0, 1.5, 2.0], "trip": [[1], [1, 2], [3], [4]]}))
    'the columns are x (float64: 0.5, 1.0, 1.5), trip (lists of 1, 2, 1 items: int64)'
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.nested import leaves
from rlio.errors import RlioError, StoreError, excerpt
from rlio.formats.tables.table import Lists, Rows, Table

__all__ = ["describe", "described_lists", "hint_of", "kind_of"]

_SHOWN_COLUMNS: Final = 20
_THOUSANDS: Final = re.compile(r"\s*[-+]?[0-9]{1,3}(,[0-9]{3})*(\.[0-9]*)?\s*")
_MISSING: Final = frozenset(("nan", "null", "none", "na", "n/a", "?", "-", ""))
_DECIMAL_COMMA: Final = re.compile(r"\s*[-+]?[0-9]*,?[0-9]+([eE][-+]?[0-9]+)?\s*")


def describe(table: Table) -> str:
    """The columns of a table with dtype and three values each, for messages."""
    if (own := table.described()) is not None:
        return own
    shown = []
    file = next((number for number, rows in enumerate(table.rows) if rows), None)
    for name in list(table.names)[:_SHOWN_COLUMNS]:
        rows = None if file is None else Rows(file, 0, min(3, table.rows[file]))
        try:
            if rows is not None and table.count(rows.file, name) != table.rows[rows.file]:
                shown.append(_described_beside(name, table.array(rows.file, name)))
                continue
            found = None if rows is None else table.read(rows, [name])[name]
        except StoreError:
            raise
        except RlioError as error:
            shown.append(described_lists(table, rows, name) or _unreadable(name, error))
            continue
        for path, leaf in leaves(found) if found is not None else ():
            shape = f" {leaf.shape[1:]}" if leaf.ndim > 1 else ""
            values = excerpt(leaf.tolist(), 60).removeprefix("[").removesuffix("]")
            shown.append(f"{'.'.join([name, *map(str, path)])[:60]} ({kind_of(leaf)}{shape}: {values})")
        if found is None:
            shown.append(f"{name} (empty)")
    more = len(table.names) - _SHOWN_COLUMNS
    return f"the columns are {', '.join(shown)}" + (f", and {more} more" if more > 0 else "")


def _described_beside(name: str, array: NDArray[Any]) -> str:
    """An array that has not as many values as the table has rows."""
    values = excerpt(array[:3].tolist(), 60).removeprefix("[").removesuffix("]")
    return f"{name} ({kind_of(array)} {array.shape}: {values})"


def _unreadable(name: str, error: RlioError) -> str:
    return f"{name} (unreadable: {excerpt(str(error), 80)})"


def described_lists(table: Table, rows: Rows | None, name: str) -> str:
    """A column of lists of different lengths; "": it has none."""
    try:
        found = None if rows is None else table.lists(rows, name)
    except StoreError:
        raise
    except RlioError:
        return ""
    if not isinstance(found, Lists) or found.lengths is None or len({*found.lengths.tolist()}) < 2:
        return ""
    lengths, parts = ", ".join(map(str, found.lengths.tolist())), leaves(found.values)
    items = ", ".join(f"{'.'.join(map(str, path))} {kind_of(leaf)}".strip() for path, leaf in parts)
    return f"{name} (lists of {lengths} items: {items[:80]})"


def kind_of(value: Any) -> str:
    """The dtype of an array, for messages."""
    dtype = getattr(value, "dtype", None)
    return "no value" if dtype is None else "text or objects" if dtype == np.dtype(object) else str(dtype)


def hint_of(value: Any, name: str) -> str:
    """What may make numbers of texts, to be appended; "": nothing known."""
    texts = (
        [one for one in value[:100].tolist() if isinstance(one, str)] if isinstance(value, np.ndarray) else []
    )
    if texts and all(map(_DECIMAL_COMMA.fullmatch, texts)) and any("," in text for text in texts):
        return (
            f" such as {excerpt(texts[0])}: if these are numbers with decimal commas, pass "
            "format_options={'decimal': ','} (pandas.read_csv: decimal=',')"
        )
    if not texts:
        return ""
    if all(map(_THOUSANDS.fullmatch, texts)):
        return f" such as {excerpt(texts[0])}: pass pandas.read_csv(path, thousands=',') to rlio.read"
    if missing := [text for text in texts if text.strip().lower() in _MISSING]:
        return (
            f" such as {excerpt(missing[0])}: if these are missing values, pass pandas.read_csv(path) to "
            "rlio.read, which has NaN for them"
        )
    if all(text.lstrip()[:1] in ("[", "(") for text in texts):
        return (
            f" such as {excerpt(texts[0], 60)}, lists written as text: load the table, and parse them, such "
            f"as log[{excerpt(name)}].map(json.loads)"
        )
    return f" such as {excerpt(texts[0], 60)}: if these are categories, pass codes={excerpt(name)}"
