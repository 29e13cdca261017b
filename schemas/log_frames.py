"""Rows as the payload of a log frame: fixed-size values as in memory, texts in Arrow IPC.

The log holds the rows after `Schema` has checked and flattened them, so recovery makes the same shards.

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
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns
from rlio.errors import CorruptData, RlioError
from rlio.schemas.arrow import arrow_type, from_arrow, to_arrow
from rlio.schemas.column import ColumnSpec, FrameStack
from rlio.schemas.frame_pools import Frames, StackPool
from rlio.schemas.leaves import Leaf
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.row_groups import Piece, pooled
from rlio.schemas.schema import Schema
from rlio.schemas.streams import Times

__all__ = ["LogFrames"]

_LENGTH: Final = struct.Struct("<I")
#: The time of a `write()`, and the length of the starts of episodes, or 0. Starts are a zero byte, the ids
#: and the times, as int64; or JSON, which begins with no zero byte, if an id is a text or beyond int64.
_TIMES: Final = struct.Struct("<qI")
_NUMBERS: Final = b"\0"
#: Up to so many bytes, a copy takes less time than a view.
_FEW_BYTES: Final = 1 << 14


class LogFrames:
    """Encodes and decodes the pieces of one schema."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        pairs = schema.stacked
        self._policies = {pid: _Policy(policy, pairs) for pid, policy in schema.policies.items()}

    def encode(self, pieces: list[Piece]) -> list[bytes | memoryview]:
        """Return the payload of pieces for one row group, as buffers one after the other.

        The buffers are copies: a change by the caller must not break the CRC of a frame.
        """
        parts: list[bytes | memoryview] = [
            _head(tuple((piece.policy, piece.rows, piece.attributes, piece.env_steps, 1) for piece in pieces))
        ]
        for piece in pieces:
            parts.append(_times_bytes(piece.times))
            parts += self._policies[piece.policy].encode(pooled(piece, self.schema))
        return [b"".join(parts)]

    def decode(self, payload: bytes) -> list[Piece]:
        """Return the pieces of a payload whose CRC has matched; their arrays are views of it.

        Raises:
            CorruptData: The payload does not fit this schema.
        """
        try:
            (size,) = _LENGTH.unpack_from(payload)
            at = _LENGTH.size + size
            found = []
            for described in json.loads(payload[_LENGTH.size : at]):
                piece, at = self._policies[described[0]].decode(described, payload, at)
                found.append(piece)
        except (ValueError, LookupError, TypeError, struct.error, pa.ArrowException, RecursionError) as error:
            if isinstance(error, RlioError):
                raise
            raise CorruptData(f"the frame does not fit its schema: {error!r}") from error
        if at != len(payload):
            raise CorruptData(f"a frame of {len(payload)} bytes, of which {at} are of its schema")
        return found


class _Policy:
    """The columns of one policy's pieces.

    Rows of fixed size are logged as their bytes in memory, not in the form of shards, because making
    Arrow arrays of them takes longer than logging them.
    """

    def __init__(self, policy: PolicySchema, pairs: Mapping[str, tuple[str, FrameStack]]) -> None:
        self._policy = policy
        self._per_sequence = {leaf.physical for leaf in policy.per_sequence}
        self._pairs = pairs
        self._specs = {leaf.physical: leaf.spec for leaf in policy.leaves}
        pooled = {*pairs, *(new_obs for new_obs, _ in pairs.values())}
        leaves = [leaf for leaf in policy.leaves if leaf.spec.kind != "none" and leaf.physical not in pooled]
        self._plain = [
            leaf
            for leaf in leaves
            if leaf.spec.kind in ("scalar", "list", "bytes", "time", "mask")
            and leaf.physical not in self._per_sequence
        ]
        self._others = [leaf for leaf in leaves if leaf not in self._plain]
        self._fields = pa.schema([self._field(leaf) for leaf in self._others])

    def _field(self, leaf: Leaf) -> pa.Field:
        nullable = leaf.physical in self._per_sequence
        return pa.field(leaf.physical, arrow_type(leaf.spec, nullable=nullable), nullable=nullable)

    def encode(self, piece: Piece) -> list[bytes | memoryview]:
        """Return the columns of fixed size, then one record batch of the others, if there are any."""
        parts: list[bytes | memoryview] = []
        for leaf in self._plain:
            parts.append(_bytes_of(piece.arrays[leaf.physical]))
        for name in self._pairs:
            pool = piece.stacks[name]
            parts.append(_LENGTH.pack(len(pool.frames)))
            parts += map(_bytes_of, (pool.frames.values, pool.obs, pool.new_obs))
        if self._others:
            firsts = self._firsts(piece) if self._per_sequence else None
            arrays = [
                to_arrow(
                    piece.arrays[leaf.physical],
                    firsts if leaf.physical in self._per_sequence else None,
                    leaf.spec,
                )
                for leaf in self._others
            ]
            parts.append(memoryview(pa.RecordBatch.from_arrays(arrays, schema=self._fields).serialize()))
        return parts

    def decode(self, described: list[Any], payload: bytes, at: int) -> tuple[Piece, int]:
        """Return the piece whose columns begin at ``at``, and the position after it."""
        pid, rows, attributes, env_steps, *has_times = described
        times = Times()
        if has_times:
            times, at = _read_times(payload, at)
        arrays: dict[str, NDArray[Any]] = {}
        for leaf in self._policy.leaves:
            if leaf.spec.kind == "none":
                arrays[leaf.physical] = np.empty((rows, *leaf.spec.shape), leaf.spec.numpy)
        for leaf in self._plain:
            values = np.frombuffer(payload, leaf.spec.numpy, rows * leaf.spec.size, at)
            arrays[leaf.physical] = values.reshape(rows, *leaf.spec.shape)
            at += values.nbytes
        stacks: dict[str, StackPool] = {}
        for name, (_, stack) in self._pairs.items():
            stacks[name], at = _read_pool(payload, at, rows, self._specs[name], stack)
        if self._others:
            stream = pa.BufferReader(pa.py_buffer(payload).slice(at))
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(stream), self._fields)
            batch.validate(full=True)
            if batch.num_rows != rows:
                raise CorruptData(f"a frame holds {batch.num_rows} rows, but states {rows}")
            for leaf, column in zip(self._others, batch.columns, strict=True):
                is_json = leaf.spec.kind == "json"
                # Pieces hold the JSON text of objects.
                arrays[leaf.physical] = (
                    object_column(column.drop_null().to_pylist())
                    if is_json
                    else from_arrow(column, leaf.spec)[0]
                )
            at += stream.tell()
        return Piece(
            pid,
            {leaf.physical: arrays[leaf.physical] for leaf in self._policy.leaves if leaf.physical in arrays},
            rows,
            attributes,
            env_steps,
            stacks,
            times,
        ), at

    def _firsts(self, piece: Piece) -> NDArray[np.bool_]:
        """Return a mask of the first row of each sequence, which holds the per-sequence values."""
        lengths = self._policy.single(piece.arrays, Columns.SEQ_LENS).astype(np.int64)
        firsts = np.zeros(piece.rows, bool)
        firsts[np.cumsum(lengths) - lengths] = True
        return firsts


@lru_cache(maxsize=64)  # Most writes have as many rows as the one before.
def _head(pieces: tuple[tuple[str, int, str | None, int, int], ...]) -> bytes:
    """Return the description of pieces, after its length. The last number says that times follow."""
    text = json.dumps(pieces).encode()
    return _LENGTH.pack(len(text)) + text


def _times_bytes(times: Times) -> bytes:
    if times.written is None:
        return _TIMES.pack(-1, 0)
    starts = _starts_bytes(times.began) if times.began else b""
    return _TIMES.pack(times.written, len(starts)) + starts


def _starts_bytes(began: Mapping[Any, int]) -> bytes:
    try:  # JSON takes ten times as long, and each row may begin an episode.
        return _NUMBERS + struct.pack(f"<{2 * len(began)}q", *began, *began.values())
    except struct.error:
        return json.dumps(list(began.items())).encode()


def _read_times(payload: bytes, at: int) -> tuple[Times, int]:
    """Return the times that begin at ``at``, and the position after them."""
    written, size = _TIMES.unpack_from(payload, at)
    at += _TIMES.size
    stored = payload[at : at + size]
    starts: dict[Any, int] = {}
    if stored[:1] == _NUMBERS:
        ids, times = np.frombuffer(stored, "<i8", offset=1).reshape(2, -1).tolist()
        starts = dict(zip(ids, times, strict=True))
    elif size:
        starts = dict(json.loads(stored))
    return Times(None if written < 0 else written, starts), at + size


def _bytes_of(values: NDArray[Any]) -> bytes | memoryview:
    """Return an array's bytes in C order."""
    if values.nbytes <= _FEW_BYTES:
        return values.tobytes()
    plain = np.ascontiguousarray(values)
    if plain.dtype.kind in "mM":  # NumPy gives no buffer for these.
        plain = plain.view(np.int64)
    return memoryview(plain)  # type: ignore[arg-type]  # NumPy's stubs hide the buffer protocol


def _read_pool(
    payload: bytes, at: int, rows: int, spec: ColumnSpec, stack: FrameStack
) -> tuple[StackPool, int]:
    """Return the stacks of a pair of columns that begin at ``at``, and the position after them."""
    (count,) = _LENGTH.unpack_from(payload, at)
    at += _LENGTH.size
    shape = tuple(n for axis, n in enumerate(spec.shape) if axis != stack.axis)
    frames = np.frombuffer(payload, spec.numpy, count * (spec.size // stack.depth), at)
    at += frames.nbytes
    places = np.frombuffer(payload, np.int32, 2 * rows * stack.depth, at).reshape(2, rows, stack.depth)
    if places.size and not 0 <= int(places.min()) <= int(places.max()) < count:
        raise CorruptData(f"a frame stack refers to none of the {count} frames of its rows")
    pool = StackPool(Frames(frames.reshape(count, *shape), stack), places[0], places[1])
    return pool, at + places.nbytes
