"""Rows of a `Structure` as lists and structs of Arrow, and back. `rlio.schemas.arrow` has the other kinds.

Lists, tuples and arrays of texts are lists. A dict is a struct of its keys, a tuple of different parts one of
the names ``0``, ``1``, ..., and a graph one of ``nodes``, ``edges`` and ``edge_links``. Only the last two
may be null.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.errors import CorruptData
from rlio.schemas.column import ColumnSpec
from rlio.schemas.number_arrays import check_offsets, numbers_from_arrow, numbers_to_arrow, numbers_type
from rlio.schemas.structure import Structure, text_array

__all__ = ["nested_leaves", "structure_from_arrow", "structure_to_arrow", "structure_type", "texts_of"]


def _field(name: str, structure: Structure, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, structure_type(structure), nullable=nullable)


def structure_type(structure: Structure) -> pa.DataType:
    """The Arrow type of values of a structure."""
    match structure.form:
        case "text":
            return pa.string()
        case "bytes":
            return pa.binary()
        case "datetime" | "utc":
            return pa.timestamp("us", "UTC" if structure.form == "utc" else None)
        case "date":
            return pa.date32()
        case "texts":
            return pa.list_(pa.field("element", pa.string(), nullable=False))
        case "list" | "tuple":
            return pa.list_(_field("element", structure.item))
        case "array" | "rows":
            return numbers_type(_spec(structure), nullable=False)
    return pa.struct(
        [
            _field(name, part, nullable=structure.form == "graph" and number > 0)
            for number, (name, part) in enumerate(structure.parts)
        ]
    )


def _spec(structure: Structure) -> ColumnSpec:
    """The spec of a column of arrays."""
    items = ColumnSpec.of(np.empty((0, *structure.shape), structure.numpy))
    return items if structure.form == "array" else ColumnSpec("|O", (), "ragged", items=items)


def structure_to_arrow(
    values: Sequence[Any], structure: Structure, valid: NDArray[np.bool_] | None = None
) -> pa.Array:
    """The Arrow array of checked values.

    Args:
        values: One a row, or, with ``valid``, one for each True in it.
        structure: Theirs.
        valid: Shape (rows,): which rows have a value; None: all.
    """
    match structure.form:
        case "array" | "rows":
            if structure.form == "array":
                column = np.empty((len(values), *structure.shape), structure.numpy)
                column[:] = values if len(values) else 0
            else:
                column = object_column(values)
            return numbers_to_arrow(column, valid, _spec(structure))
        case "text" | "bytes" | "datetime" | "utc" | "date":
            return pa.array(_spread(values, valid), structure_type(structure))
        case "texts" | "list" | "tuple":
            lists = [value.tolist() for value in values] if structure.form == "texts" else values
            item = Structure("text") if structure.form == "texts" else structure.item
            if item.form in ("text", "bytes"):  # Arrow makes lists of texts itself.
                return pa.array(_spread(lists, valid), structure_type(structure))
            child = structure_to_arrow([*chain.from_iterable(lists)], item)
            return _lists(list(map(len, lists)), child, structure_type(structure), valid)
    return _struct(values, structure, valid)


def _spread(values: Sequence[Any], valid: NDArray[np.bool_] | None) -> list[Any]:
    """The values in the rows that have one, and None in the others."""
    if valid is None:
        return [*values]
    found = iter(values)
    return [next(found) if has else None for has in valid.tolist()]


def _lists(lengths: list[int], child: pa.Array, kind: Any, valid: NDArray[np.bool_] | None) -> pa.Array:
    sizes, bitmap = np.array(lengths, np.int64), None
    if valid is not None:
        every = np.zeros(len(valid), np.int64)
        every[valid] = sizes
        sizes, bitmap = every, pa.array(valid).buffers()[1]
    offsets = np.cumsum([0, *sizes])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise CorruptData(f"a row group of {offsets[-1]} items in one column; limit its rows")
    buffers = [bitmap, pa.py_buffer(offsets.astype(np.int32))]
    return pa.ListArray.from_buffers(kind, len(sizes), buffers, children=[child])


def _struct(values: Sequence[Any], structure: Structure, valid: NDArray[np.bool_] | None) -> pa.Array:
    present = np.ones(len(values), bool) if valid is None else valid
    children = []
    for number, (name, part) in enumerate(structure.parts):
        given = [value[name] if structure.form == "dict" else value[number] for value in values]
        has = present.copy()
        has[present] = [value is not None for value in given]
        kept = [value for value in given if value is not None]
        if structure.form == "graph" and number:
            children.append(structure_to_arrow(kept, part, has))
        else:  # A null would not be legal: rows without a struct have something in its fields.
            rest = iter(kept)
            full = [next(rest) if each else part.blank() for each in has.tolist()]
            children.append(structure_to_arrow(full, part))
    mask = None if valid is None else pa.array(~valid)
    kind = structure_type(structure)
    return pa.StructArray.from_arrays(children, fields=[*kind], mask=mask)


def structure_from_arrow(array: pa.Array, structure: Structure) -> list[Any]:
    """The values of an array without nulls; arrays are views of Arrow's memory, which nothing else has.

    Raises:
        CorruptData: It has nulls, or lists of other lengths than the structure says.
    """
    if array.null_count:
        raise CorruptData(f"{array.null_count} nulls inside rows")
    match structure.form:
        case "array" | "rows":
            return [*numbers_from_arrow(array, _spec(structure))]
        case "text" | "bytes":
            return texts_of(array)
        case "datetime" | "utc" | "date":
            return _times_of(array, structure)
        case "texts" | "list" | "tuple":
            return [*_rows_of_lists(array, structure)]
    parts = [_part(array, number, part) for number, (_, part) in enumerate(structure.parts)]
    if structure.form == "graph" and len(parts) == 3:
        _, edges, links = parts
        if any((a is None) != (b is None) for a, b in zip(edges, links, strict=True)):
            raise CorruptData("a graph with edges that link no nodes, or the reverse")
    return [structure.named(each) for each in zip(*parts, strict=True)]


def texts_of(array: pa.Array) -> list[Any]:
    """The texts or bytes of an array, None where it is null; those of a dictionary are one object."""
    if not pa.types.is_dictionary(array.type):
        texts: list[Any] = array.to_pylist()
        return texts
    distinct = np.array([*array.dictionary.to_pylist(), None], object)
    found: list[Any] = distinct[array.indices.fill_null(len(distinct) - 1).to_numpy()].tolist()
    return found


def _times_of(array: pa.Array, structure: Structure) -> list[Any]:
    try:
        found: list[Any] = array.to_pylist()
    except (ValueError, OverflowError) as error:
        raise CorruptData(f"a time that Python does not have: {error}") from error
    return [each.replace(tzinfo=datetime.UTC) for each in found] if structure.form == "utc" else found


def _rows_of_lists(array: pa.Array, structure: Structure) -> Iterator[Any]:
    ends = array.offsets.to_numpy().astype(np.int64)
    check_offsets(ends, len(array.values))
    child = array.values.slice(ends[0], ends[-1] - ends[0])
    starts = (ends - ends[0]).tolist()
    if structure.form == "texts":
        texts = structure_from_arrow(child, Structure("text"))
        return (text_array(texts[a:b], structure.dtype) for a, b in pairwise(starts))
    items = structure_from_arrow(child, structure.item)
    rows = (items[a:b] for a, b in pairwise(starts))
    return rows if structure.form == "list" else map(tuple, rows)


def _part(array: pa.Array, number: int, part: Structure) -> list[Any]:
    """The values of a field of structs, None where it is null."""
    field = array.field(number)
    if not field.null_count:
        return structure_from_arrow(field, part)
    found = iter(structure_from_arrow(field.drop_null(), part))
    return [next(found) if has else None for has in field.is_valid().to_pylist()]


def nested_leaves(field: pa.Field, path: str | None = None) -> Iterator[tuple[str, pa.DataType]]:
    """Path and type of each column of Parquet that a field is made of."""
    path = field.name if path is None else path
    if pa.types.is_list(field.type):
        yield from nested_leaves(field.type.value_field, f"{path}.list.element")
    elif pa.types.is_struct(field.type):
        for child in field.type:
            yield from nested_leaves(child, f"{path}.{child.name}")
    else:
        yield path, field.type
