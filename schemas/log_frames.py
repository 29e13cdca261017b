"""Rows as the payload of a frame of the write-ahead log: Arrow IPC, one record batch a policy.

What is logged is what `Schema` has checked and flattened, so that recovery makes the same shards of it.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.schemas.row_groups import pieces_of
    >>> batch = SampleBatch(obs=[[0.5, 1.0]], actions=[1])
    >>> frames = LogFrames(Schema.of(batch))
    >>> pieces = pieces_of(batch, frames.schema, rooms=iter([10]), limit=10)[0]
    >>> frames.decode(b"".join(frames.encode(pieces)))[0].arrays["obs"]
    array([[0.5, 1. ]])
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.columns import Columns
from rlio.errors import CorruptData, RlioError
from rlio.schemas.arrow import arrow_type, from_arrow, to_arrow
from rlio.schemas.row_groups import Piece
from rlio.schemas.schema import Leaf, PolicySchema, Schema

__all__ = ["LogFrames"]

_LENGTH: Final = struct.Struct("<I")


class LogFrames:
    """Encodes and decodes the pieces of one schema."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._policies = {pid: _Policy(policy) for pid, policy in schema.policies.items()}

    def encode(self, pieces: list[Piece]) -> list[bytes | memoryview]:
        """The payload of pieces that lie in one row group, as buffers one after the other."""
        head = [[piece.policy, piece.rows, piece.attributes, piece.env_steps] for piece in pieces]
        text = json.dumps(head).encode()
        return [
            _LENGTH.pack(len(text)) + text,
            *(self._policies[piece.policy].encode(piece) for piece in pieces),
        ]

    def decode(self, payload: bytes) -> list[Piece]:
        """The pieces of a payload whose CRC has matched; their arrays are views of it.

        Raises:
            CorruptData: It is none of this schema.
        """
        try:
            (size,) = _LENGTH.unpack_from(payload)
            head = json.loads(payload[_LENGTH.size : _LENGTH.size + size])
            stream = pa.BufferReader(pa.py_buffer(payload).slice(_LENGTH.size + size))
            return [self._policies[described[0]].decode(described, stream) for described in head]
        except (ValueError, LookupError, TypeError, struct.error, pa.ArrowException, RecursionError) as error:
            if isinstance(error, RlioError):
                raise
            raise CorruptData(f"the frame does not fit its schema: {error!r}") from error


class _Policy:
    """The record batches of one policy's pieces.

    Rows of fixed size are logged as the bytes that they are in memory, whatever they are in shards: making
    Arrow's lists of them takes longer than logging them.
    """

    def __init__(self, policy: PolicySchema) -> None:
        self._policy = policy
        self._leaves = [leaf for leaf in policy.leaves if leaf.spec.kind != "none"]
        self._per_sequence = {leaf.physical for leaf in policy.per_sequence}
        self._plain = {
            leaf.physical: pa.binary(leaf.spec.row_bytes)
            for leaf in self._leaves
            if leaf.spec.kind in ("scalar", "list", "bytes") and leaf.physical not in self._per_sequence
        }
        self._fields = pa.schema([self._field(leaf) for leaf in self._leaves])

    def _field(self, leaf: Leaf) -> pa.Field:
        if leaf.physical in self._plain:
            return pa.field(leaf.physical, self._plain[leaf.physical], nullable=False)
        nullable = leaf.physical in self._per_sequence
        return pa.field(leaf.physical, arrow_type(leaf.spec, nullable=nullable), nullable=nullable)

    def encode(self, piece: Piece) -> memoryview:
        firsts = self._firsts(piece) if self._per_sequence else None
        arrays = []
        for leaf in self._leaves:
            values = piece.arrays[leaf.physical]
            kind = self._plain.get(leaf.physical)
            if kind is not None:
                data = pa.py_buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
                arrays.append(pa.FixedSizeBinaryArray.from_buffers(kind, piece.rows, [None, data]))
            else:
                per_sequence = leaf.physical in self._per_sequence
                arrays.append(to_arrow(values, firsts if per_sequence else None, leaf.spec))
        return memoryview(pa.RecordBatch.from_arrays(arrays, schema=self._fields).serialize())

    def decode(self, described: list[Any], stream: pa.BufferReader) -> Piece:
        pid, rows, attributes, env_steps = described
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(stream), self._fields)
        batch.validate(full=True)
        if batch.num_rows != rows:
            raise CorruptData(f"a frame holds {batch.num_rows} rows where it says {rows}")
        arrays: dict[str, NDArray[Any]] = {}
        for leaf in self._policy.leaves:
            if leaf.spec.kind == "none":
                arrays[leaf.physical] = np.empty((rows, *leaf.spec.shape), leaf.spec.numpy)
        for leaf, column in zip(self._leaves, batch.columns, strict=True):
            arrays[leaf.physical] = self._values(column, leaf)
        return Piece(pid, arrays, rows, attributes, env_steps)

    def _values(self, column: pa.Array, leaf: Leaf) -> NDArray[Any]:
        if leaf.physical in self._plain:
            data = np.frombuffer(column.buffers()[1], leaf.spec.numpy, len(column) * leaf.spec.size)
            return data.reshape(len(column), *leaf.spec.shape)
        return _texts(column) if leaf.spec.kind == "json" else from_arrow(column, leaf.spec)[0]

    def _firsts(self, piece: Piece) -> NDArray[np.bool_]:
        """The first row of each sequence, where the columns with one value a sequence have it."""
        lengths = self._policy.single(piece.arrays, Columns.SEQ_LENS).astype(np.int64)
        firsts = np.zeros(piece.rows, bool)
        firsts[np.cumsum(lengths) - lengths] = True
        return firsts


def _texts(column: pa.Array) -> NDArray[Any]:
    """The JSON text of objects, which is what pieces hold of them."""
    texts = column.drop_null().to_pylist()
    values = np.empty(len(texts), object)
    values[:] = texts
    return values
