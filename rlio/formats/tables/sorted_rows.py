"""`SortedRows`: a table whose rows are in no order, as one in which the rows of an episode follow each other.

Example:
    >>> from rlio.formats.tables.table import ArrayTable
    >>> table = ArrayTable("log", {"user": [7, 8, 7], "time": [2, 1, 1], "x": [0.1, 0.2, 0.3]})
    >>> rows = SortedRows(table, Mapping({"obs": "x"}, episode="user", sort="time"))
    >>> rows.read(Rows(0, 0, 3), ["x"])["x"].tolist()
    [0.3, 0.1, 0.2]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import concat_leaves
from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.errors import RlioError, SchemaError, excerpt, raise_at
from rlio.formats.files.value_arrays import one_a_row
from rlio.formats.tables.paths import resolved, walk
from rlio.formats.tables.table import Rows, Table, TableAround
from rlio.mapping import Mapping
from rlio.storage import Span

__all__ = ["SortedRows"]

#: Texts whose characters sort as what they mean, if all have one width: times of ISO 8601, and numbers with
#: zeros before them, behind one text or none. The groups must be alike in all.
_ORDERED: Final = (
    re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?"),
    re.compile(r"(?:[01]\d|2[0-3]):\d\d(?::\d\d(?:\.\d+)?)?"),
    re.compile(r"(\D*)\d+"),
)


def _check_order(texts: Sequence[str], name: str) -> None:
    """Refuse texts that mean another order than that of their characters, such as ``9:30`` and ``10:00``."""
    for pattern in _ORDERED:
        found = [pattern.fullmatch(text) for text in texts]
        if all(found) and len({(len(one[0]), one.groups()) for one in found if one is not None}) <= 1:
            return
    raise SchemaError(
        f"sort: found the texts {excerpt(', '.join(map(repr, texts[:4])), 80)}, which may mean another order "
        "than that of their characters: write numbers, or times as ISO 8601 of one width and one time zone "
        "(2024-01-31T09:05:00); for numbers with a decimal comma, pass decimal=','",
        column=name,
    )


class SortedRows(TableAround):
    """A table in the order of another one's ids and times; a `Table`.

    Episodes come in the order of their first rows. Opening reads the columns of the order; memory holds 8
    bytes a row. Rows that are far apart are read from as many pieces of the other table.

    Args:
        table: The other table; owned by this one.
        mapping: Its meaning, with ``sort``.

    Attributes:
        ties: Rows whose times equal those of another row of their episode; they keep the table's order.

    Raises:
        MissingColumn: There is no such column.
        SchemaError: A value of the order is missing, or its texts have another order than their characters.
    """

    def __init__(self, table: Table, mapping: Mapping) -> None:
        super().__init__(table)
        self.ties: int = 0
        ids = [resolved(table, name, "episode") for name in mapping.episode or ()]
        keys = [resolved(table, name, "sort") for name in mapping.sort]
        starts = [0, *accumulate(table.rows)]
        files = range(len(table.rows))
        #: Of each part that is sorted by itself, a file or all of them: the rows of the other table in order.
        self._order: list[NDArray[np.int64]] = []
        for part in [[file] for file in files] if mapping.per_file else [[*files]]:
            values = self._values_of([*ids, *keys], part)
            columns = [self._column(path, values[path], is_key=path in keys) for path in (*ids, *keys)]
            order = self._sorted(
                columns[: len(ids)], columns[len(ids) :], sum(table.rows[file] for file in part)
            )
            self._order.append(order + starts[part[0]] if part else order)
        self._starts = np.array(starts, np.int64)
        self.rows: Sequence[int] = [len(order) for order in self._order]
        self.continues: bool | None = table.continues if mapping.per_file else True

    def _values_of(
        self, paths: Sequence[tuple[str, ...]], files: Sequence[int]
    ) -> dict[tuple[str, ...], list[NDArray[Any]]]:
        """The values of the columns of the order, in parts."""
        names = {path[0] for path in paths}
        found: dict[tuple[str, ...], list[NDArray[Any]]] = {path: [] for path in paths}
        for rows in self._table.stretches(names, files):
            columns = self._read(rows, names)
            for path, parts in found.items():
                parts.append(_values(walk(columns[path[0]], path), path, rows.start))
        return found

    def _column(self, path: tuple[str, ...], parts: Sequence[NDArray[Any]], *, is_key: bool) -> NDArray[Any]:
        """A column of the order, as numbers that have its order; ``is_key``: it is no id."""
        kinds = {
            "text" if part.dtype.kind in "OU" else "time" if part.dtype.kind in "mM" else "" for part in parts
        }
        if len(kinds) > 1:
            raise SchemaError("the files differ: some have numbers, others text", column=".".join(path))
        values = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if not kinds & {"text", "time"}:
            return values
        distinct, numbers = np.unique(values, return_inverse=True)
        if is_key and kinds == {"text"}:
            _check_order(distinct.tolist(), ".".join(path))
        return numbers

    def _sorted(
        self, ids: Sequence[NDArray[Any]], keys: Sequence[NDArray[Any]], rows: int
    ) -> NDArray[np.int64]:
        """The rows in order: episodes by their first row, and the rows of each by ``keys``."""
        episode = np.zeros(rows, np.int64)
        for values in ids:
            numbers = np.unique(values, return_inverse=True)[1]
            episode = np.unique(episode * (int(numbers.max(initial=0)) + 1) + numbers, return_inverse=True)[1]
        _, first, number = np.unique(episode, return_index=True, return_inverse=True)
        by = [*reversed(keys), np.argsort(np.argsort(first))[number]]
        order: NDArray[np.int64] = np.lexsort(by)  # Stable.
        same = np.ones(max(0, rows - 1), np.bool_)
        for values in by:
            same &= values[order][1:] == values[order][:-1]
        self.ties += int((np.append(same, False) | np.insert(same, 0, False)).sum()) if rows else 0
        return order.astype(np.int64)

    def _read(self, rows: Rows, names: Collection[str]) -> dict[str, Any]:
        """Read rows of the other table."""
        try:
            return self._table.read(rows, names)
        except RlioError as error:
            raise_at(error, uri=self._table.uri_of(rows.file))

    def read(self, rows: Rows, names: Collection[str]) -> dict[str, Any]:
        """See `Table`."""
        wanted = self._wanted(rows)
        stored = np.sort(wanted)
        self._table.together = self.together
        parts = [self._read(part, names) for part in self._stored(rows, stored)]
        if not parts:
            return self._read(rows._replace(file=0, start=0, stop=0, keep=None), names)
        place = np.searchsorted(stored, wanted)
        return {name: _joined(name, [part[name] for part in parts], place) for name in names}

    def spans(self, rows: Rows, names: Collection[str]) -> Iterator[Span]:
        """See `Table`."""
        self._table.together = self.together
        for part in self._stored(rows, np.sort(self._wanted(rows))):
            yield from self._table.spans(part, names)

    def _wanted(self, rows: Rows) -> NDArray[np.int64]:
        """Which rows of the other table some rows are."""
        wanted = self._order[rows.file][rows.start : rows.stop]
        return wanted if rows.keep is None else wanted[rows.keep]

    def _stored(self, rows: Rows, stored: NDArray[np.int64]) -> Iterator[Rows]:
        """Rows of the other table in its order, as those of its files."""
        for file, (base, end) in enumerate(zip(self._starts[:-1], self._starts[1:], strict=True)):
            low, high = np.searchsorted(stored, (base, end))
            here = stored[low:high] - base
            if len(here):
                span = np.zeros(int(here[-1] - here[0]) + 1, np.bool_)
                span[here - here[0]] = True
                keep = None if span.all() else span
                yield rows._replace(file=file, start=int(here[0]), stop=int(here[-1]) + 1, keep=keep)


def _values(values: Any, path: tuple[str, ...], row: int) -> NDArray[Any]:
    """The values of a column from a row on, each of which has a place in an order."""
    name = ".".join(path)
    values = one_a_row(Columns.EPS_ID, values) if isinstance(values, np.ndarray) else values
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise SchemaError("expected one value a row, by which rows are sorted", column=name)
    if values.dtype.kind in "OU":
        is_missing = np.array([not isinstance(one, str) or not one for one in values.tolist()], np.bool_)
    else:
        is_missing = values != values
    if is_missing.any():
        raise SchemaError(
            f"row {row + int(is_missing.argmax())} has no value by which it could be sorted",
            column=name,
        )
    return values


def _joined(name: str, parts: Sequence[Any], place: NDArray[np.int64]) -> Any:
    """A column of several files, in order."""
    if all(part is None for part in parts):
        return None
    if any(part is None for part in parts):
        raise SchemaError("only some of the files have a value", column=name)
    try:
        return map_structure(lambda *each: concat_leaves(each)[place], *parts)
    except SchemaError as error:
        raise SchemaError(f"the files differ: {error}", column=name) from error
