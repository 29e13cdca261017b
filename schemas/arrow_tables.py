"""Batches as Arrow tables with one row per step, for other tools and for Ray Data.

A column of a table is a leaf of a batch's column, with its name in the written format (docs/format.md, 2.2):
``obs``, or ``obs/position`` if ``obs`` is nested.

- Scalars, texts and byte strings have Arrow's own types.
- A row of several values is a list of fixed size, nested if it has several axes: an ``Array`` in Polars, an
  ``ARRAY`` in DuckDB. `Layout.tensors` can make it another type.
- Rows of any length are lists; of lists if an item has an axis, of bytes if it has several.
- Objects (``infos``) are JSON text (docs/format.md, section 5).
- Columns with one row per sequence (``seq_lens``, ``state_in_k``) have their value on the first row of each
  sequence, and zeros on the others.
- With several agents, the column ``policy_id`` names the policy of each row, and the rows of a joint step
  follow each other.

Arrow has no complex numbers, which are refused, and no foreign byte order, which is converted to this
machine's. The metadata of the fields records what Arrow's types cannot express (tuples, objects, widths of
texts).

`rlio.dataset.part_reader` chooses the rows, and `rlio.distributed.ray_data.blocks` turns tables into batches.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.frames import in_c_order
from rlio.batch.multi_agent import step_numbers
from rlio.batch.nested import Path, leaves
from rlio.errors import CorruptData, MissingColumn, SchemaError
from rlio.schemas.arrow import to_arrow as column_to_arrow
from rlio.schemas.column import ColumnSpec
from rlio.schemas.json_values import dump_value
from rlio.schemas.leaves import Leaf, leaf_name
from rlio.schemas.structure import Structure

__all__ = ["POLICY_ID", "WRITER", "Layout", "TableColumn", "arrow_times", "nested_lists", "to_table"]

#: The column that names the policy of a row, in data of several agents.
POLICY_ID: Final = "policy_id"

#: The column that names the writer of a row, in tables with rows of several writers.
WRITER: Final = "_writer"

_NOTE: Final = b"rlio.column"
_DIGITS = re.compile(r"0|[1-9][0-9]{0,8}")


#: Kind and unit of NumPy's times -> the unit that Arrow has for them.
_ARROW_UNITS: Final = {
    **{f"M{unit}": "D" for unit in ("W", "D")},
    **{f"M{unit}": "s" for unit in ("h", "m", "s")},
    **{f"m{unit}": "s" for unit in ("W", "D", "h", "m", "s")},
    **{kind + unit: unit for kind in "mM" for unit in ("ms", "us", "ns")},
}


def arrow_times(values: NDArray[Any]) -> NDArray[Any]:
    """Return the same times in a unit that Arrow has; other values as they are.

    Arrow itself takes ``datetime64[25s]`` for seconds, and cuts days to 32 bits.

    Raises:
        TypeError: Arrow has no such unit.
        OverflowError: A time is beyond those of Arrow.
    """
    kind = values.dtype.kind
    if kind not in "mM":
        return values
    unit, _ = np.datetime_data(values.dtype)
    if kind + unit not in _ARROW_UNITS:
        raise TypeError(f"no times in {unit}")
    found = values.astype(f"{kind}8[{_ARROW_UNITS[kind + unit]}]", copy=False)
    known = ~np.isnat(values)
    is_same = found.astype(values.dtype)[known] == values[known]
    if found.dtype == "M8[D]":
        days = found.astype(np.int64)[known]
        is_same &= days == days.astype(np.int32)
    if not is_same.all():
        raise OverflowError(f"{values[known][~is_same][0]} is too far away for the times of Arrow")
    return found


def nested_lists(values: NDArray[Any]) -> pa.Array:
    """Return rows of several values as lists of fixed size, over the same memory.

    Args:
        values: An array in C order, with two or more axes.
    """
    found = pa.array(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        size = values.shape[axis]
        if size:
            found = pa.FixedSizeListArray.from_arrays(found, size)
        else:  # A list of fixed size 0 has no values to count the lists by.
            lists = math.prod(values.shape[:axis])
            found = pa.ListArray.from_arrays(pa.array(np.zeros(lists + 1, np.int32)), found)
    return found


@dataclass(frozen=True)
class TableColumn:
    """The table column for one leaf of a batch's column.

    Attributes:
        name: Its name in tables.
        column: The logical column.
        path: Path of the leaf within it.
        dtype: ``dtype.str`` as in `rlio.schemas.column.ColumnSpec`; "" if unknown.
        shape: Shape of a row; None if unknown.
        is_json: Whether rows are objects, stored as JSON text.
        items: The spec of one item, if rows are lists of any length.
        structure: That of rows that have one.
    """

    name: str
    column: str
    path: Path
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    is_json: bool = False
    items: ColumnSpec | None = None
    structure: Structure | None = None

    @property
    def spec(self) -> ColumnSpec | None:
        """The spec of rows of any length; None: they have another kind."""
        if self.structure is not None:
            return ColumnSpec("|O", (), "nested", structure=self.structure)
        return None if self.items is None else ColumnSpec("|O", (), "ragged", items=self.items)

    @property
    def note(self) -> dict[bytes, bytes]:
        """The metadata of the column's field."""
        known = {"column": self.column, "path": list(self.path), "dtype": self.dtype, "json": self.is_json}
        if self.items is not None:
            known["items"] = self.items.to_json()
        if self.structure is not None:
            known["structure"] = self.structure.to_json()
        return {_NOTE: json.dumps(known).encode()}


@dataclass(frozen=True)
class Layout:
    """The columns of tables.

    Attributes:
        columns: The columns, in order.
        joint: Whether the tables have a column `POLICY_ID`.
        tensors: Makes the Arrow array of a column whose rows have several values.
    """

    columns: tuple[TableColumn, ...]
    joint: bool = False
    tensors: Callable[[NDArray[Any]], pa.Array] = nested_lists

    @classmethod
    def of_leaves(cls, columns: Mapping[str, list[Leaf]]) -> Layout:
        """Return the layout for the leaves of a policy's columns."""
        return cls(
            tuple(
                TableColumn(
                    name=leaf.name,
                    column=leaf.column,
                    path=leaf.path,
                    dtype=leaf.spec.dtype,
                    shape=leaf.spec.shape,
                    is_json=leaf.spec.kind == "json",
                    items=leaf.spec.items,
                    structure=leaf.spec.structure,
                )
                for own in columns.values()
                for leaf in own
            )
        )

    @classmethod
    def of_fields(cls, fields: pa.Schema, *, like: Layout | None = None) -> Layout:
        """Return the layout of a table of any origin.

        The metadata of a field decides; else the column of the same name in ``like``; else the name itself.
        In a name, tokens that are the numbers 0, 1, ... without a gap are the places of a tuple, and others
        are keys. ``infos`` holds objects.
        """
        known = {} if like is None else {column.name: column for column in like.columns}
        named = {column.name: column for column in cls.of_names(fields.names).columns}
        found = []
        for name in fields.names:
            if name != POLICY_ID:
                noted = _noted(name, fields.field(name).metadata)
                found.append(noted or known.get(name) or named[name])
        return cls(tuple(found), POLICY_ID in fields.names)

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Layout:
        """Return the layout of tables of which only the names are known; see `of_fields`."""
        tokens = {name: _tokens(name) for name in names if name != POLICY_ID}
        siblings: dict[tuple[str, ...], set[str]] = {}
        for parts in tokens.values():
            for depth in range(1, len(parts)):
                siblings.setdefault(parts[:depth], set()).add(parts[depth])
        tuples = {
            parent
            for parent, keys in siblings.items()
            if all(map(_DIGITS.fullmatch, keys)) and set(map(int, keys)) == set(range(len(keys)))
        }
        return cls(
            tuple(
                TableColumn(
                    name=name,
                    column=parts[0],
                    path=tuple(
                        int(part) if parts[:depth] in tuples else part
                        for depth, part in enumerate(parts[1:], start=1)
                    ),
                    dtype="<U" if parts == (WRITER,) else "",
                    is_json=parts == (Columns.INFOS,),
                )
                for name, parts in tokens.items()
            )
        )

    def only(self, names: Sequence[str]) -> Layout:
        """Return the layout with only the columns ``names``, in the same order."""
        return replace(self, columns=tuple(column for column in self.columns if column.name in names))

    @property
    def names(self) -> list[str]:
        """All names, including `POLICY_ID`."""
        return [*([POLICY_ID] if self.joint else []), *(column.name for column in self.columns)]

    @property
    def logical(self) -> list[str]:
        """The batch columns that the tables need."""
        return list(dict.fromkeys(column.column for column in self.columns))

    def empty(self) -> pa.Table:
        """Return a table without rows."""
        arrays = {
            c.name: np.empty((0, *(c.shape or ())), object if c.is_json else np.dtype(c.dtype or "f8"))
            for c in self.columns
        }
        return _table(self, arrays, np.empty(0, object))


def _tokens(name: str) -> tuple[str, ...]:
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in name.split("/"))


def _noted(name: str, metadata: Mapping[bytes, bytes] | None) -> TableColumn | None:
    """Return the column that a field's metadata describes; None: the metadata is not from rlio."""
    try:
        note = json.loads((metadata or {})[_NOTE])
        column, path, dtype, is_json = note["column"], note["path"], note["dtype"], note["json"]
        if (
            type(column) is str
            and type(dtype) is str
            and type(is_json) is bool
            and all(type(part) in (str, int) for part in path)
            and leaf_name(column, tuple(path)) == name  # Else the column was renamed.
        ):
            items = ColumnSpec.from_json(note["items"], column=name) if "items" in note else None
            structure = Structure.from_json(note["structure"]) if "structure" in note else None
            return TableColumn(name, column, tuple(path), dtype, None, is_json, items, structure)
    except (KeyError, ValueError, TypeError, CorruptData):
        pass
    return None


def to_table(batch: Batch, layout: Layout) -> pa.Table:
    """Return the rows of a batch as a table. Arrays of numbers in C order are views, others are copies.

    Raises:
        MissingColumn: The batch lacks a column of the layout.
        SchemaError: Arrow has no such type.
    """
    if isinstance(batch, MultiAgentBatch):
        return _joint_table(batch, layout)
    return _table(layout, _arrays(batch, layout), None)


def _joint_table(batch: MultiAgentBatch, layout: Layout) -> pa.Table:
    """Return the rows of all policies; the rows of a joint step follow each other."""
    numbers, _ = step_numbers(batch)
    order = np.argsort(np.concatenate([numbers[pid] for pid in batch]), kind="stable")
    parts = [_arrays(rows, layout) for rows in batch.values()]
    arrays = {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}
    counts = [rows.count for rows in batch.values()]
    owners = np.repeat(np.array(list(batch), object), counts)[order]
    return _table(layout, arrays, owners)


def _arrays(batch: SampleBatch, layout: Layout) -> dict[str, NDArray[Any]]:
    """Return name in the table -> array with one row per step."""
    found: dict[str, NDArray[Any]] = {}
    nested: dict[str, dict[Path, Any]] = {}
    firsts = _sequence_starts(batch)
    for column in layout.columns:
        if column.column not in nested:
            if column.column not in batch and column.column == Columns.NEXT_OBS_VALID:
                nested[column.column] = {(): np.ones(batch.count, bool)}  # As the README says of its absence.
            elif column.column not in batch:
                raise MissingColumn(f"the batch has only {sorted(batch.keys())}", column=column.column)
            else:
                nested[column.column] = dict(leaves(batch[column.column]))
        values = to_numpy(nested[column.column][column.path])
        if firsts is not None and is_per_sequence(column.column):
            spread = np.zeros((batch.count, *values.shape[1:]), values.dtype)
            spread[firsts] = values
            values = spread
        found[column.name] = values
    return found


def _sequence_starts(batch: SampleBatch) -> NDArray[np.int64] | None:
    if Columns.SEQ_LENS not in batch:
        return None
    lengths = np.asarray(batch[Columns.SEQ_LENS], np.int64)
    return np.cumsum(lengths) - lengths


def _table(layout: Layout, arrays: Mapping[str, NDArray[Any]], owners: NDArray[Any] | None) -> pa.Table:
    found = [_to_arrow(arrays[column.name], column, layout.tensors) for column in layout.columns]
    fields = [
        pa.field(c.name, array.type, metadata=c.note) for c, array in zip(layout.columns, found, strict=True)
    ]
    if layout.joint:
        assert owners is not None
        found.insert(0, pa.array(owners, pa.string()))
        fields.insert(0, pa.field(POLICY_ID, pa.string()))
    return pa.Table.from_arrays(found, schema=pa.schema(fields))


def _to_arrow(
    values: NDArray[Any], column: TableColumn, tensors: Callable[[NDArray[Any]], pa.Array]
) -> pa.Array:
    if column.is_json:
        # Most infos are equal, and their texts are equal if their bytes are.
        return pa.array([dump_value(value) for value in values], pa.string())
    if column.spec is not None:
        return column_to_arrow(values, None, column.spec)
    if values.dtype.kind in "OU":
        # Not the array itself: Arrow cuts NumPy's own texts at a NUL.
        return pa.array(values.tolist(), pa.string())
    if values.dtype.kind == "S":
        return pa.array(values.tolist(), pa.binary())
    try:
        native = arrow_times(values.astype(values.dtype.newbyteorder("="), copy=False))
        return pa.array(native) if native.ndim == 1 else tensors(in_c_order(native))
    except (pa.ArrowException, NotImplementedError, TypeError) as error:
        raise SchemaError(
            f"Arrow has no type for {values.dtype}: leave the column out (columns=[...])", column=column.name
        ) from error
    except OverflowError as error:
        raise SchemaError(f"{error}: leave the column out (columns=[...])", column=column.name) from error
