"""Conversion between Ray's blocks (Arrow tables with one row a step) and batches.

The columns are those of `rlio.schemas.arrow_tables`, except that rows of several values are a tensor column
(`ray.data.extensions.ArrowTensorArray`): ``iter_batches`` with ``batch_format="numpy"`` returns it as an
array of shape (rows, *shape) and its own dtype. Texts become object arrays.

Ray's own operations and functions of Arrow tables keep the fields' metadata. Functions of NumPy batches lose
it; `Layout.of_names` then uses the names.

Not here: reading rows (`rlio.dataset.part_reader`) and writing them
(`rlio.distributed.ray_data.part_writer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.multi_agent import step_numbers
from rlio.batch.nested import Path, unflatten
from rlio.errors import SchemaError, excerpt
from rlio.schemas.arrow import arrow_type, from_arrow
from rlio.schemas.arrow_tables import POLICY_ID, Layout, TableColumn
from rlio.schemas.column import ColumnSpec
from rlio.schemas.json_values import load_value

__all__ = ["Assembler", "block_arrays", "ray_tensors"]


def ray_tensors(values: NDArray[Any]) -> pa.Array:
    """Return rows of several values as a Ray tensor column.

    Raises:
        TypeError: Arrow has no type for them.
    """
    from ray.data.extensions import ArrowTensorArray

    try:
        return ArrowTensorArray.from_numpy(values)
    except Exception as error:
        # Ray's error for this has no public base class; its cause is Arrow's error.
        if isinstance(error.__cause__, pa.ArrowException | NotImplementedError | TypeError):
            raise TypeError(f"no tensors of {values.dtype}") from error
        raise


@dataclass
class Assembler:
    """Makes batches from consecutive tables, with whole sequences and joint steps.

    Ray cuts blocks anywhere, so rows of a sequence or joint step at the end of a table wait for the next
    table. Columns without a value in any row are left out: see `block_arrays`.

    Args:
        like: Layout of columns whose fields lack metadata.

    Attributes:
        left_out: Names of columns that were left out.
        names: Names of the other columns.
    """

    like: Layout | None = None
    left_out: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    _waiting: dict[str, NDArray[Any]] = field(default_factory=dict)
    _layout: Layout | None = None

    def batches(self, tables: Iterable[Any]) -> Iterator[Batch]:
        """Return the batches; none is empty.

        Args:
            tables: Blocks, Arrow tables or data frames.

        Raises:
            SchemaError: A column has values in only some rows, or rows of several shapes; no column has any
                value; or sequences were cut.
        """
        for block in tables:
            arrays, layout, left_out = block_arrays(block, self.like)
            if not len(next(iter(arrays.values()), ())):
                continue
            self.left_out.update(left_out)
            self.names.update(arrays)
            if self._layout is not None and set(layout.names) != set(self._layout.names):
                raise SchemaError(
                    f"found a block with the columns {excerpt(layout.names)} after blocks with "
                    f"{excerpt(self._layout.names)}: give all rows the same columns"
                )
            self._layout = layout
            if self._waiting:
                arrays = {name: np.concatenate([self._waiting[name], arrays[name]]) for name in arrays}
            rows = len(next(iter(arrays.values())))
            whole = _whole_rows(arrays, layout)
            self._waiting = {name: values[whole:] for name, values in arrays.items()} if whole < rows else {}
            if whole:
                yield _batch({name: values[:whole] for name, values in arrays.items()}, layout)
        if self._waiting:
            assert self._layout is not None
            rest, self._waiting = self._waiting, {}
            yield _batch(rest, self._layout)


def _whole_rows(arrays: Mapping[str, NDArray[Any]], layout: Layout) -> int:
    """Count the rows before the sequence or joint step that may continue in the next block."""
    rows = len(next(iter(arrays.values())))
    if Columns.SEQ_LENS in arrays:
        firsts = np.flatnonzero(arrays[Columns.SEQ_LENS])
        last = int(firsts[-1]) if len(firsts) else 0
        return rows if last + int(arrays[Columns.SEQ_LENS][last]) == rows else last
    if not layout.joint or Columns.EPS_ID not in arrays or Columns.T not in arrays:
        return rows
    ids, times = arrays[Columns.EPS_ID], arrays[Columns.T]
    others = np.flatnonzero((ids != ids[-1]) | (times != times[-1]))
    return int(others[-1]) + 1 if len(others) else 0


def _batch(arrays: Mapping[str, NDArray[Any]], layout: Layout) -> Batch:
    """Return the rows of a block as a batch."""
    if not layout.joint:
        return _sample_batch(arrays, layout)
    owners = arrays[POLICY_ID]
    parts = {}
    for pid in dict.fromkeys(owners.tolist()):
        own = np.flatnonzero(owners == pid)
        parts[pid] = _sample_batch({name: values[own] for name, values in arrays.items()}, layout)
    steps = step_numbers(MultiAgentBatch(parts, 0))[1]
    return MultiAgentBatch(parts, steps)


def _sample_batch(arrays: Mapping[str, NDArray[Any]], layout: Layout) -> SampleBatch:
    firsts: NDArray[np.int64] | None = None
    if Columns.SEQ_LENS in arrays:
        lengths = arrays[Columns.SEQ_LENS]
        firsts = np.flatnonzero(lengths)
        ends = firsts + lengths[firsts].astype(np.int64)
        if not np.array_equal([0, *ends[:-1]], firsts) or ends[-1] != len(lengths):
            raise SchemaError(
                "the rows of a sequence are no longer consecutive: filter and shuffle whole "
                "sequences, or leave seq_lens and the states out",
                column=Columns.SEQ_LENS,
            )
    columns: dict[str, dict[Path, NDArray[Any]]] = {}
    for column in layout.columns:
        values = _from_block(arrays[column.name], column)
        if firsts is not None and is_per_sequence(column.column):
            values = values[firsts]
        columns.setdefault(column.column, {})[column.path] = values
    return SampleBatch({name: unflatten(parts, parts.values()) for name, parts in columns.items()})


def _from_block(values: NDArray[Any], column: TableColumn) -> NDArray[Any]:
    """Return values as they were before conversion to a block."""
    if column.is_json:
        if values.dtype.kind == "O" and not all(type(value) is str for value in values):
            return values  # A function of batches made them objects.
        objects = np.empty(len(values), object)
        objects[:] = [load_value(text) for text in values]
        return objects
    if values.dtype.kind == "O":
        if column.dtype[1:] == "U":
            return values.astype("U")
        if all(type(value) is bytes for value in values):
            return values.astype("S")
        return values
    if column.dtype and column.dtype != values.dtype.str:
        wanted = np.dtype(column.dtype)
        if wanted.newbyteorder("=") == values.dtype:  # Arrow has only this machine's byte order.
            return values.astype(wanted)
        if wanted.kind == values.dtype.kind and wanted.kind in "mM":  # Of a unit that Arrow lacks.
            given = values.astype(wanted)
            return given if np.array_equal(given.astype(values.dtype), values, equal_nan=True) else values
    return values


def block_arrays(block: Any, like: Layout | None) -> tuple[dict[str, NDArray[Any]], Layout, list[str]]:
    """Return the columns of a block as arrays, read-only views where possible; and their layout.

    Columns without a value in any row are left out, such as RLlib's ``agent_id`` if there is one agent. Their
    names are the last part of the result.

    Raises:
        SchemaError: A column has values in only some rows, or rows of several shapes; or none has a value.
    """
    from ray.data.block import BlockAccessor

    table = BlockAccessor.for_block(block).to_arrow()
    empty = []
    for name in table.column_names:
        nulls, kind = table.column(name).null_count, table.schema.field(name).type
        if not nulls or pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_date(kind):
            continue  # NumPy has NaT for a missing time.
        if nulls < table.num_rows:
            raise SchemaError(
                f"{nulls} of {table.num_rows} rows have no value: fill them, or leave the column out",
                column=name,
            )
        empty.append(name)
    if empty and len(empty) == table.num_columns:
        raise SchemaError(
            f"none of {table.num_rows} rows has a value in any of the columns {excerpt(empty)}, so nothing "
            "can be written: check the source of these rows"
        )
    table = table.drop_columns(empty)
    if not table.num_columns:
        return {}, Layout(()), empty
    layout = Layout.of_fields(table.schema, like=like)
    arrays = {
        column.name: lists
        for column in layout.columns
        if column.spec is not None and (lists := _lists(table.column(column.name), column.spec)) is not None
    }
    rest = table.drop_columns([*arrays])
    found: Any = BlockAccessor.for_block(rest).to_numpy() if rest.num_columns else {}
    arrays |= {name: _dense(values, name, table.schema.field(name)) for name, values in found.items()}
    return arrays, layout, empty


def _lists(column: pa.ChunkedArray, spec: ColumnSpec) -> NDArray[Any] | None:
    """Return the rows of a column of lists; None: a function of batches has made it another column."""
    if not column.num_chunks or not column.type.equals(arrow_type(spec, nullable=True)):
        return None
    return from_arrow(pa.concat_arrays(column.chunks), spec)[0]


def _dense(values: NDArray[Any], name: str, of: pa.Field) -> NDArray[Any]:
    """Return rows of one shape as one array; Arrow's lists are an array of arrays."""
    if values.dtype.kind != "O" or pa.types.is_string(of.type) or pa.types.is_large_string(of.type):
        return values
    if pa.types.is_binary(of.type) or pa.types.is_large_binary(of.type) or not len(values):
        return values
    if all(isinstance(value, np.ndarray) for value in values):
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            raise SchemaError(f"rows have the shapes {excerpt(sorted(shapes))}: expected one", column=name)
        return np.stack(list(values))
    return values
