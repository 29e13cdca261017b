"""Batches as Ray's blocks (Arrow tables with one row a step), and blocks as batches again.

A column of a block is a leaf of a batch's column, under the name that the written format has for it
(docs/format.md, 2.2): ``obs``, or ``obs/position`` where ``obs`` is nested.

- What has a shape is a tensor column (`ray.data.extensions.ArrowTensorArray`): ``iter_batches`` with
  ``batch_format="numpy"`` gives it as an array of shape (rows, *shape) and its own dtype.
- Scalars, texts and byte strings are Arrow's own types; texts come as object arrays.
- Objects (``infos``) are their JSON text (docs/format.md, section 5).
- Columns with a row a sequence (``seq_lens``, ``state_in_k``) have it on the first row of each sequence, and
  zeros on the others.
- Where several agents were recorded there is a column ``policy_id``, and the rows of a joint step follow each
  other.

Arrow has no complex numbers and no foreign byte order: the former are refused, of the latter the values stay.
What Arrow does not tell (tuples, objects, texts of fixed width) is in the fields' metadata. It stays with a
block through Ray's own operations and through functions of Arrow tables, and is lost in functions of NumPy
batches; `Layout.of_names` then goes by names.

Not here: where rows come from and go to (`rlio.distributed.part_reader`, `rlio.distributed.part_writer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.arrays import to_numpy
from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.columns import Columns, is_per_sequence
from rlio.errors import MissingColumn, SchemaError, excerpt
from rlio.interfaces import Batch
from rlio.multi_agent import step_numbers
from rlio.nested import Path, leaves, unflatten
from rlio.replay.weaving import in_c_order
from rlio.schemas.json_values import dump_value, load_value
from rlio.schemas.schema import Schema

__all__ = [
    "POLICY_ID",
    "WRITER",
    "Assembler",
    "BlockColumn",
    "Layout",
    "block_arrays",
    "to_table",
    "without_empty_columns",
]

#: Of blocks: whose row it is, where several agents were recorded.
POLICY_ID: Final = "policy_id"

#: The column that says whose a row is, where rows of several writers come together.
WRITER: Final = "_writer"

_NOTE: Final = b"rlio.column"
_DIGITS = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class BlockColumn:
    """A leaf of a batch's column as a column of blocks.

    Attributes:
        name: In blocks.
        column: The logical column.
        path: Of the leaf within it.
        dtype: ``dtype.str`` as in `rlio.schemas.column.ColumnSpec`; "" where that is not known.
        shape: Of a row; None where that is not known.
        is_json: Whether rows are objects, in blocks their JSON text.
    """

    name: str
    column: str
    path: Path
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    is_json: bool = False

    @property
    def note(self) -> dict[bytes, bytes]:
        """The metadata of its field."""
        known = {"column": self.column, "path": list(self.path), "dtype": self.dtype, "json": self.is_json}
        return {_NOTE: json.dumps(known).encode()}


@dataclass(frozen=True)
class Layout:
    """The columns of blocks.

    Attributes:
        columns: In order.
        joint: Whether there is a `POLICY_ID`.
    """

    columns: tuple[BlockColumn, ...]
    joint: bool = False

    @classmethod
    def of_schema(cls, schema: Schema, policy: str, *, joint: bool = False) -> Layout:
        """The leaves of a policy."""
        return cls(
            tuple(
                BlockColumn(
                    name=_name(leaf.column, leaf.path),
                    column=leaf.column,
                    path=leaf.path,
                    dtype=leaf.spec.dtype,
                    shape=leaf.spec.shape,
                    is_json=leaf.spec.kind == "json",
                )
                for leaf in schema.policies[policy].leaves
            ),
            joint,
        )

    @classmethod
    def of_fields(cls, fields: pa.Schema, *, like: Layout | None = None) -> Layout:
        """The columns of a block that may come from anywhere.

        Of each column, what counts is the metadata of its field; else the column of that name in ``like``;
        else its name: tokens that are the numbers 0, 1, ... without a gap are the places of a tuple, others
        keys; ``infos`` holds objects.
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
        """The columns of blocks of which only the names are known; see `of_fields`."""
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
                BlockColumn(
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
        """The columns of some names, in the order of the layout."""
        return replace(self, columns=tuple(column for column in self.columns if column.name in names))

    @property
    def names(self) -> list[str]:
        """All names, `POLICY_ID` included."""
        return [*([POLICY_ID] if self.joint else []), *(column.name for column in self.columns)]

    @property
    def logical(self) -> list[str]:
        """The batch's columns that are needed."""
        return list(dict.fromkeys(column.column for column in self.columns))

    def empty(self) -> pa.Table:
        """A table without rows."""
        arrays = {
            c.name: np.empty((0, *(c.shape or ())), object if c.is_json else np.dtype(c.dtype or "f8"))
            for c in self.columns
        }
        return _table(self, arrays, np.empty(0, object))


def _name(column: str, path: Path) -> str:
    tokens = [str(token).replace("~", "~0").replace("/", "~1") for token in (column, *path)]
    return "/".join(tokens)


def _tokens(name: str) -> tuple[str, ...]:
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in name.split("/"))


def _noted(name: str, metadata: Mapping[bytes, bytes] | None) -> BlockColumn | None:
    """What the metadata of a field says; None: nothing that is ours."""
    try:
        note = json.loads((metadata or {})[_NOTE])
        column, path, dtype, is_json = note["column"], note["path"], note["dtype"], note["json"]
        if (
            type(column) is str
            and type(dtype) is str
            and type(is_json) is bool
            and all(type(part) in (str, int) for part in path)
            and _name(column, tuple(path)) == name  # Else the column was renamed.
        ):
            return BlockColumn(name, column, tuple(path), dtype, None, is_json)
    except (KeyError, ValueError, TypeError):
        pass
    return None


# ---- to blocks ----


def to_table(batch: Batch, layout: Layout) -> pa.Table:
    """The rows of a batch as a table. Arrays of numbers are viewed, not copied, where they are in C order.

    Raises:
        MissingColumn: The batch lacks a column of the layout.
        SchemaError: Arrow has no such type.
    """
    if isinstance(batch, MultiAgentBatch):
        return _joint_table(batch, layout)
    return _table(layout, _arrays(batch, layout), None)


def _joint_table(batch: MultiAgentBatch, layout: Layout) -> pa.Table:
    """The rows of all policies, those of a joint step one after the other."""
    numbers, _ = step_numbers(batch)
    order = np.argsort(np.concatenate([numbers[pid] for pid in batch]), kind="stable")
    parts = [_arrays(rows, layout) for rows in batch.values()]
    arrays = {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}
    counts = [rows.count for rows in batch.values()]
    owners = np.repeat(np.array(list(batch), object), counts)[order]
    return _table(layout, arrays, owners)


def _arrays(batch: SampleBatch, layout: Layout) -> dict[str, NDArray[Any]]:
    """Name in blocks -> array with one row a step."""
    found: dict[str, NDArray[Any]] = {}
    nested: dict[str, dict[Path, Any]] = {}
    firsts = _sequence_starts(batch)
    for column in layout.columns:
        if column.column not in nested:
            if column.column not in batch:
                raise MissingColumn(f"the batch has only {sorted(batch.keys())}", column=column.column)
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
    found = [_to_arrow(arrays[column.name], column) for column in layout.columns]
    fields = [
        pa.field(c.name, array.type, metadata=c.note) for c, array in zip(layout.columns, found, strict=True)
    ]
    if layout.joint:
        assert owners is not None
        found.insert(0, pa.array(owners, pa.string()))
        fields.insert(0, pa.field(POLICY_ID, pa.string()))
    return pa.Table.from_arrays(found, schema=pa.schema(fields))


def _to_arrow(values: NDArray[Any], column: BlockColumn) -> pa.Array:
    """A column of a block."""
    if column.is_json:
        # Most infos are one and the same, and as text they compare as their bytes.
        return pa.array([dump_value(value) for value in values], pa.string())
    if values.dtype.kind in "OU":
        # Not the array itself: of NumPy's own texts, Arrow cuts each at a NUL.
        return pa.array(values.tolist(), pa.string())
    if values.dtype.kind == "S":
        return pa.array(values.tolist(), pa.binary())
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    try:
        if native.ndim == 1:
            return pa.array(native)
        from ray.data.extensions import ArrowTensorArray

        return ArrowTensorArray.from_numpy(in_c_order(native))
    except (pa.ArrowException, NotImplementedError, TypeError) as error:
        raise _no_type(values, column) from error
    except Exception as error:
        # Ray's own error of this has no public base; its cause is Arrow's.
        if isinstance(error.__cause__, pa.ArrowException | NotImplementedError | TypeError):
            raise _no_type(values, column) from error
        raise


def _no_type(values: NDArray[Any], column: BlockColumn) -> SchemaError:
    return SchemaError(
        f"Arrow, as which rows come to Ray Data, has no {values.dtype}: leave the column out (columns=[...])",
        column=column.name,
    )


# ---- from blocks ----


@dataclass
class Assembler:
    """Makes batches of tables that come one after the other, with whole sequences and joint steps.

    Rows of a sequence or joint step at the end of a table wait for the next table: Ray cuts blocks anywhere.
    Columns without a value in any row are left out: see `without_empty_columns`.

    Args:
        like: What is known of columns whose fields do not say it.

    Attributes:
        left_out: Names of columns that were left out.
        names: Of those that were not.
    """

    like: Layout | None = None
    left_out: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    _waiting: dict[str, NDArray[Any]] = field(default_factory=dict)
    _layout: Layout | None = None

    def batches(self, tables: Iterable[Any]) -> Iterator[Batch]:
        """The batches; none has no rows.

        Args:
            tables: Blocks, Arrow tables or data frames.

        Raises:
            SchemaError: A column has values in some rows only, or rows of several shapes; no column has any
                value; or sequences were cut.
        """
        for block in tables:
            table, left_out = without_empty_columns(block)
            arrays, layout = block_arrays(table, self.like)
            if not len(next(iter(arrays.values()), ())):
                continue
            self.left_out.update(left_out)
            self.names.update(arrays)
            if self._layout is not None and set(layout.names) != set(self._layout.names):
                raise SchemaError(
                    f"a block with the columns {excerpt(layout.names)} after blocks with "
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
    """Rows before the sequence or joint step that may go on in the next block."""
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
    """The rows of a block as a batch."""
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
                "the rows of a sequence do not follow each other any more: filter and shuffle whole "
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


def _from_block(values: NDArray[Any], column: BlockColumn) -> NDArray[Any]:
    """Values as they were before they came into a block."""
    if column.is_json:
        if values.dtype.kind == "O" and not all(type(value) is str for value in values):
            return values  # A function of batches has made objects of them.
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
        if wanted.newbyteorder("=") == values.dtype:  # Arrow has this machine's byte order only.
            return values.astype(wanted)
        if wanted.kind == values.dtype.kind == "M":  # Days, as a tensor, come in seconds.
            given = values.astype(wanted)
            return given if np.array_equal(given.astype(values.dtype), values, equal_nan=True) else values
    return values


def without_empty_columns(block: Any) -> tuple[pa.Table, list[str]]:
    """The table of a block without the columns that have no value in any row; and their names.

    RLlib's ``agent_id`` is such a column where there is one agent.

    Raises:
        SchemaError: No column has a value.
    """
    from ray.data.block import BlockAccessor

    table = BlockAccessor.for_block(block).to_arrow()
    empty = [
        name
        for name in table.column_names
        if table.num_rows
        and table.column(name).null_count == table.num_rows
        and not _has_nat(table.schema.field(name).type)
    ]
    if empty and len(empty) == table.num_columns:
        raise SchemaError(
            f"none of {table.num_rows} rows has a value in any of the columns {excerpt(empty)}: there is "
            "nothing to write; look at where these rows come from"
        )
    return table.drop_columns(empty), empty


def block_arrays(block: Any, like: Layout | None) -> tuple[dict[str, NDArray[Any]], Layout]:
    """The columns of a block as arrays, read-only views where they can be, and what they are.

    Raises:
        SchemaError: A column has nulls, or no array of one shape a row.
    """
    from ray.data.block import BlockAccessor

    accessor = BlockAccessor.for_block(block)
    table = accessor.to_arrow()
    for name in table.column_names:
        nulls = table.column(name).null_count
        if nulls and not _has_nat(table.schema.field(name).type):
            raise SchemaError(
                f"{nulls} of {table.num_rows} rows have no value: fill them, or leave the column out",
                column=name,
            )
    if not table.num_columns:
        return {}, Layout(())
    found: Any = BlockAccessor.for_block(table).to_numpy()
    arrays = {name: _dense(values, name, table.schema.field(name)) for name, values in found.items()}
    return arrays, Layout.of_fields(table.schema, like=like)


def _has_nat(kind: pa.DataType) -> bool:
    """Whether a missing value is NumPy's own NaT."""
    types = pa.types
    return bool(types.is_timestamp(kind) or types.is_duration(kind) or types.is_date(kind))


def _dense(values: NDArray[Any], name: str, of: pa.Field) -> NDArray[Any]:
    """Rows of one shape: Arrow's own lists come as an array of arrays."""
    if values.dtype.kind != "O" or pa.types.is_string(of.type) or pa.types.is_large_string(of.type):
        return values
    if pa.types.is_binary(of.type) or pa.types.is_large_binary(of.type) or not len(values):
        return values
    if all(isinstance(value, np.ndarray) for value in values):
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            raise SchemaError(f"rows of the shapes {excerpt(sorted(shapes))}: expected one", column=name)
        return np.stack(list(values))
    return values
