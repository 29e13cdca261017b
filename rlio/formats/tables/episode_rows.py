"""`EpisodeRows`: a table whose rows are whole episodes, as a table of steps.

A cell has a list, one item a step; a cell with one value has it for all steps of its episode. If actions and
rewards are one value, each episode has one step. ::

    user  item       click             user  item  click
    7     [3, 5, 4]  [0, 1, 1]   ->    7     3     0
    8     [9]        [1]               7     5     1
                                       7     4     1
                                       8     9     1

Arrays of the shape (episodes, steps, ...) are such lists, all of one length; the number of steps that are no
padding, or a mask of these, may be a column of its own.

Example:
    >>> from rlio.formats.tables.table import ArrayTable
    >>> table = ArrayTable("log", {"x": [[1.0, 2.0], [3.0]], "a": [[0, 1], [1]], "user": [7, 8]})
    >>> rows = EpisodeRows(table, Mapping({"obs": "x", "actions": "a"}, per_row=True))
    >>> rows.lengths, rows.read(Rows(0, 1, 3), ["x", "user"])
    ([2, 1], {'x': array([2., 3.]), 'user': array([7, 8])})
"""

from __future__ import annotations

from bisect import bisect_right
from collections import abc
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.nested import leaves, map_structure
from rlio.errors import DataNotFound, RlioError, SchemaError, UnsafeData, excerpt, raise_at
from rlio.formats.files.value_arrays import flags_in
from rlio.formats.tables.final_rows import with_final_row
from rlio.formats.tables.padding import PaddedLists, padding_error
from rlio.formats.tables.paths import paths_in, resolved, walk
from rlio.formats.tables.table import Lists, Rows, Table, TableAround
from rlio.mapping import Mapping
from rlio.storage import Span

__all__ = ["EpisodeRows"]

# Rows whose lists are measured at once.
_SCAN_ROWS: Final = 1024
# Rows in which padding is looked for before any is read.
_LOOK_ROWS: Final = 64
_LOOK_BYTES: Final = 16 << 20


class EpisodeRows(TableAround):
    """A table of steps, from one whose rows are episodes; a `Table`.

    Args:
        table: The table of episodes; owned by this one.
        mapping: Its meaning, with ``per_row=True``.

    Attributes:
        has_final: Whether each episode has a further row, because the lists of ``obs`` have one item more.

    Raises:
        SchemaError: No column has lists, or the lists of an episode have different lengths.
    """

    is_cut = True

    def __init__(self, table: Table, mapping: Mapping) -> None:
        super().__init__(table)
        self._map = mapping
        self.has_final: bool = False
        self._obs = {path[0] for path in paths_in(table, mapping.columns, of=Columns.OBS)}
        self._mask, self._is_inverted = self._mask_of()
        #: Columns that show padding that is not stated; a final row has none but obs.
        others = () if mapping.final_row else (Columns.ACTIONS, Columns.REWARDS)
        self._looked = self._obs.union(
            *({path[0] for path in paths_in(table, mapping.columns, of=name)} for name in others)
        )
        #: The column whose lists say how long an episode is; None: each row is an episode of one step.
        self._reference = self._reference_of()
        #: Of each file: the padding before the steps of each row, its steps, the items of its lists, and the
        #: rows of steps before each.
        self._skips: list[NDArray[np.int64]] = []
        self._steps: list[NDArray[np.int64]] = []
        self._items: list[NDArray[np.int64]] = []
        self._starts: list[list[int]] = []
        none = np.zeros(0, np.int64)
        measured = [[(none, none, none)] for _ in table.rows]
        for part in self._parts():
            try:
                measured[part.file].append(self._measured(part))
            except RlioError as error:
                raise_at(error, uri=table.uri_of(part.file))
        for found in measured:
            for kept, parts in zip(
                (self._skips, self._steps, self._items), zip(*found, strict=True), strict=True
            ):
                kept.append(np.concatenate(parts))
        self._look_for_final()
        self._look_for_padding()
        for steps in self._steps:
            self._starts.append([0, *accumulate((steps + (self.has_final & (steps > 0))).tolist())])
        self.rows: Sequence[int] = [starts[-1] for starts in self._starts]
        self.lengths: Sequence[int] = [
            stop - start for starts in self._starts for start, stop in pairwise(starts)
        ]

    def _mask_of(self) -> tuple[tuple[str, ...] | None, bool]:
        """Where the mask of steps is, and whether it marks the padding."""
        text = self._map.valid
        if text is None:
            return None, False
        is_inverted = text not in self._table.names and text.startswith("not ")
        return resolved(
            self._table, text.removeprefix("not ").strip() if is_inverted else text, "valid"
        ), is_inverted

    def _reference_of(self) -> tuple[str, ...] | None:
        names = dict.fromkeys(name.partition("/")[0] for name in self._map.columns)
        of_steps: list[str] = [name for name in (Columns.ACTIONS, Columns.REWARDS) if name in names]
        others = [name for name in names if name not in (*of_steps, Columns.OBS)]
        looked = of_steps or [*others, Columns.OBS]
        listed = {name: self._first_list(name) for name in looked if name in names}
        found = [path for path in listed.values() if path is not None]
        if of_steps and not found and not (self._map.lengths or self._mask):
            return None
        single = [
            name for name, path in listed.items() if path is None and (not found or name == Columns.REWARDS)
        ]
        if single == [Columns.REWARDS] and found:
            raise SchemaError(
                f"per_row=True: found one value a row in {excerpt(single)}, maybe the return of the episode: "
                "expected a list with an item a step; load the file, and make it one, such as "
                "[0.0] * (steps - 1) + [reward]; if actions are the vector of one step, make it a list of one"
            )
        if single or not found:
            raise SchemaError(
                f"per_row=True: found one value a row in {excerpt(single)}, expected a list with an item a "
                "step, or an array (episodes, steps, ...); actions and rewards that are both one value are "
                "an episode of one step; leave out per_row= if each row is a step"
            )
        return found[0]

    def _first_list(self, column: str) -> tuple[str, ...] | None:
        """The first path of a column of rlio that has a list in the first row; None: each has one value."""
        file = next((file for file, rows in enumerate(self._table.rows) if rows), None)
        if file is None:
            raise DataNotFound("found no rows")
        for path in paths_in(self._table, self._map.columns, of=column):
            found = walk(self._table.lists(Rows(file, 0, 1), path[0]), path)
            if any(one.lengths is not None for one in _lists_in(found)):
                return path
        return None

    def _parts(self) -> Iterator[Rows]:
        """The rows of all files, in parts whose lists are measured at once."""
        if self._reference is None:
            return (Rows(file, 0, rows) for file, rows in enumerate(self._table.rows))
        paths = [path for path in (self._reference, self._mask) if path is not None]
        if self._map.lengths is not None:
            paths.append(resolved(self._table, self._map.lengths, "lengths"))
        return self._table.stretches([path[0] for path in paths], rows=_SCAN_ROWS)

    def _measured(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of some rows: the padding before the steps of each, its steps, and the items of its lists."""
        if self._reference is None:
            ones = np.ones(rows.stop - rows.start, np.int64)
            return 0 * ones, ones, ones
        found = self._first_lists(rows, self._reference)
        assert found.lengths is not None
        size = sum(leaf.nbytes for _, leaf in leaves(found.values))
        if not size and found.lengths.any():
            raise UnsafeData("the lists have items of no bytes", column=".".join(self._reference))
        return *self._steps_of(rows, found.lengths), found.lengths

    def _first_lists(self, rows: Rows, path: tuple[str, ...]) -> Lists:
        each = _lists_in(walk(self._table.lists(rows, path[0]), path))
        found = next((one for one in each if one.lengths is not None), None)
        if found is None:
            raise SchemaError("expected a list in each row", column=".".join(path))
        return found

    def _steps_of(self, rows: Rows, items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The items of padding before the steps of some rows, and the steps."""
        name, none = self._map.lengths, np.zeros(len(items), np.int64)
        if name is not None:
            path = resolved(self._table, name, "lengths")
            values = walk(self._table.read(rows, [path[0]])[path[0]], path)
            is_count = (
                isinstance(values, np.ndarray) and values.dtype.kind in "iuf" and values.size == len(values)
            )
            values = values.reshape(-1) if is_count else np.full(len(items), -1)
            wrong = ~((values >= 0) & (values <= items) & (values == np.floor(values)))
            if wrong.any():
                at = int(wrong.argmax())
                shown = excerpt(values[at].item()) if is_count else "other values"
                raise SchemaError(
                    f"lengths: found {shown} in row {rows.start + at}, whose lists have {items[at]} items: "
                    "expected the number of its steps",
                    column=name,
                )
            return none, values.astype(np.int64)
        return (none, items) if self._mask is None else self._steps_of_mask(rows, items, self._mask)

    def _steps_of_mask(
        self, rows: Rows, items: NDArray[np.int64], path: tuple[str, ...]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found, name = self._first_lists(rows, path), ".".join(path)
        lengths, flags = (
            found.lengths,
            flags_in(name, np.asarray(found.values).reshape(len(found.values), -1)),
        )
        assert lengths is not None
        if (lengths != items).any():
            at = int((lengths != items).argmax())
            raise SchemaError(
                f"valid: found {lengths[at]} flags in row {rows.start + at}, expected {items[at]}, one a "
                "step",
                column=name,
            )
        flags = ~flags if self._is_inverted else flags
        total, ends = np.concatenate([[0], np.cumsum(flags)]), np.cumsum(lengths)
        begins = ends - lengths
        steps: NDArray[np.int64] = total[ends] - total[begins]
        # The first step of each row, and 0 if it has none.
        skips: NDArray[np.int64] = np.searchsorted(total, total[begins], side="right") - 1 - begins
        skips[steps == 0] = 0
        place, skipped = _within(lengths), np.repeat(skips, lengths)
        expected = (place >= skipped) & (place < skipped + np.repeat(steps, lengths))
        if (wrong := flags != expected).any():
            raise self._mask_error(rows.start + int(np.searchsorted(ends, int(wrong.argmax()), side="right")))
        return skips, steps

    def _mask_error(self, row: int) -> SchemaError:
        name = ".".join(self._mask or ())
        way = f"valid={excerpt(name if self._is_inverted else 'not ' + name)}"
        return SchemaError(
            f"valid: steps of row {row} follow padding, or seem to be padding: expected steps that follow "
            f"each other, with padding before or after all; if the column marks the opposite, pass {way}",
            column=name,
        )

    def _look_for_final(self) -> None:
        """See whether the lists of obs have one item more than those of other columns."""
        file = next((file for file, rows in enumerate(self._table.rows) if rows), None)
        if file is None or self._reference is None:
            return
        items = self._items[file][:1]
        for name in self._obs:
            for found in _lists_in(self._table.lists(Rows(file, 0, 1), name)):
                self.has_final |= found.lengths is not None and bool((found.lengths == items + 1).all())

    def mapping(self) -> Mapping:
        """The mapping of the steps.

        Raises:
            OptionError: The lists of obs have the final observation, and ``next_obs`` names others.
        """
        by = "the lists of obs, which have one item more than those of other columns,"
        return with_final_row(self._map, by) if self.has_final else self._map

    def read(self, rows: Rows, names: Collection[str]) -> dict[str, Any]:
        """See `Table`."""
        if self._reference is None:
            return self._table.read(rows, names)
        self._table.together = self.together
        part, starts = self._episodes_of(rows), self._starts[rows.file]
        here = slice(rows.start - starts[part.start], rows.stop - starts[part.start])

        def cut(leaf: NDArray[Any]) -> NDArray[Any]:
            return leaf[here] if rows.keep is None else leaf[here][rows.keep]

        found, lists = {}, {name: self._table.lists(part, name) for name in names}
        self._check_padding(part, [lists[name] for name in self._looked.intersection(names)])
        for name in names:
            steps = self._flat(lists[name], part, name)
            found[name] = None if steps is None else map_structure(cut, steps)
        return found

    def _episodes_of(self, rows: Rows) -> Rows:
        """The rows of the other table that have some steps."""
        starts = self._starts[rows.file]
        first = max(0, bisect_right(starts, rows.start) - 1)
        return rows._replace(start=first, stop=max(first, int(np.searchsorted(starts, rows.stop))), keep=None)

    def spans(self, rows: Rows, names: Collection[str]) -> Iterable[Span]:
        """See `Table`."""
        self._table.together = self.together
        return self._table.spans(rows if self._reference is None else self._episodes_of(rows), names)

    def _look_for_padding(self) -> None:
        """Look at the first episodes of each file, as far as they are small."""
        for file, rows in enumerate(self._table.rows):
            if self._reference is None or not rows:
                continue
            names = [name for name in self._looked if name in self._table.names]
            size = sum(_bytes(self._table.lists(Rows(file, 0, 1), name)) for name in names)
            part = Rows(file, 0, min(rows, _LOOK_ROWS, 1 + _LOOK_BYTES // max(1, size)))
            self._check_padding(part, [self._table.lists(part, name) for name in names], is_all=True)

    def _check_padding(self, rows: Rows, columns: Sequence[Any], *, is_all: bool = False) -> None:
        """Refuse steps that are padding, and padding that the mapping does not expect there.

        ``is_all``: whether these are all columns, so that zeros in all of them tell something.
        """
        each = [one for column in columns for one in _lists_in(column)]
        here = slice(rows.start, rows.stop)
        steps, skips = self._steps[rows.file][here], self._skips[rows.file][here]
        parts = [
            PaddedLists(leaf.reshape(len(leaf), -1), one.lengths, steps, skips)
            for one in each
            if one.lengths is not None
            for _, leaf in leaves(one.values)
            if leaf.dtype.kind in "biuf" and leaf.size
        ]
        if not parts or not len(steps):
            return
        if self._mask is not None:
            found = np.logical_and.reduce([part.is_inverted() for part in parts])
            if found.any():
                raise self._mask_error(rows.start + int(found.argmax()))
            return
        is_lost = [part.is_lost() for part in parts if part.values.dtype.kind == "f"]
        found = np.logical_and.reduce(is_lost) if is_lost else np.zeros(len(steps), np.bool_)
        if self._map.lengths:
            found |= np.logical_and.reduce([part.is_left() for part in parts])
        elif is_all and len(parts) > 1 and len(set(self._items[rows.file].tolist())) == 1:
            wide = max(part.values.shape[1] for part in parts)
            found |= np.logical_and.reduce([part.ends_with_zeros() for part in parts]) & (wide > 1)
        if found.any():
            raise padding_error(rows.start + int(found.argmax()), self._map.lengths)

    def _flat(self, found: Any, rows: Rows, name: str) -> Any:
        """The steps of a column of some rows."""
        if isinstance(found, dict):
            parts = {key: self._flat(part, rows, name) for key, part in found.items()}
            return {key: part for key, part in parts.items() if part is not None}
        here = slice(rows.start, rows.stop)
        steps, items = self._steps[rows.file][here], self._items[rows.file][here]
        skips = self._skips[rows.file][here]
        counts = steps + (self.has_final & (steps > 0))
        if found.values is None:
            return None
        if found.lengths is None:
            return map_structure(lambda leaf: np.repeat(leaf, counts, axis=0), found.values)
        more = 1 if self.has_final and name in self._obs else 0
        wrong = found.lengths != items + more
        if wrong.any():
            at = int(wrong.argmax())
            raise SchemaError(
                f"found a list of {found.lengths[at]} in row {rows.start + at}, expected {items[at] + more}, "
                "one item a step; a value that holds for the whole episode is one value, not a list",
                column=name,
            )
        begins = np.cumsum(found.lengths) - found.lengths
        # Where a list has no item for the final row, its last one stands there, and is not used.
        last = np.repeat(steps - 1 + more, counts)
        index = np.repeat(begins + skips, counts) + np.minimum(_within(counts), last)
        return map_structure(lambda leaf: leaf[index], found.values)

    def count(self, file: int, name: str) -> int:
        """See `Table`: a value for the whole episode is one an episode."""
        found = self._table.lists(Rows(file, 0, min(1, self._table.rows[file])), name)
        is_one = isinstance(found, Lists) and found.lengths is None
        return self._table.rows[file] if is_one else self.rows[file]

    def array(self, file: int, name: str) -> NDArray[Any]:
        """See `Table`."""
        found: NDArray[Any] = self._table.read(Rows(file, 0, self._table.rows[file]), [name])[name]
        return found


def _lists_in(found: Any) -> Iterator[Lists]:
    if isinstance(found, Lists):
        yield found
    elif isinstance(found, abc.Mapping):
        for part in found.values():
            yield from _lists_in(part)


def _bytes(column: Any) -> int:
    return sum(leaf.nbytes for one in _lists_in(column) for _, leaf in leaves(one.values))


def _within(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2, ... within each of some lists, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
