"""Compressed columns: object arrays of `CompressedRow`, which cannot be confused with text columns.

A block is one zstd frame with its dtype and shape, decoded without pickle. Rows refer
to their block: one block a row, or one for a whole column. A compressed column can therefore be sliced,
shuffled, joined and pickled like any other column.

Example:
    >>> frames = np.zeros((4, 84, 84), np.uint8)
    >>> packed = compress_column(frames, bulk=True)
    >>> packed.dtype, packed[0].block.nbytes < 200
    (dtype('O'), True)
    >>> np.array_equal(decompress_column(packed[1:3]), frames[1:3])
    True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from rlio.batch.arrays import Column
from rlio.batch.nested import map_structure
from rlio.errors import CorruptData

__all__ = ["CompressedBlock", "CompressedRow", "compress_column", "decompress_column"]

# Level 1: blocks live in memory between a sampler and a writer or learner, where speed matters more than
# size.
_LEVEL = 1
#: Kinds of dtype whose bytes are the value: no objects, no fields.
_PLAIN_KINDS = "biufcmMSU"


@dataclass(frozen=True)
class CompressedBlock:
    """Some rows of an array, compressed.

    Attributes:
        dtype: Their dtype, as `numpy.dtype.str`.
        shape: Their shape, (rows, ...).
        data: One zstd frame of the rows in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, rows: np.ndarray) -> CompressedBlock:
        """Compress ``rows``, of a plain dtype."""
        return cls(rows.dtype.str, rows.shape, zstandard.compress(rows.tobytes(), _LEVEL))

    def array(self) -> np.ndarray:
        """The rows, in fresh writable memory.

        Raises:
            CorruptData: The data is damaged, or does not have the shape.
        """
        try:
            data = bytearray(zstandard.decompress(self.data))
            return np.frombuffer(data, self.dtype).reshape(self.shape)
        except (zstandard.ZstdError, ValueError) as error:
            raise CorruptData(
                f"a compressed block does not hold {self.dtype} of shape {self.shape}: {error}"
            ) from error

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class CompressedRow:
    """One row of a compressed column: row ``index`` of ``block``."""

    block: CompressedBlock
    index: int


def compress_column(column: Column, *, bulk: bool = False) -> Column:
    """Compress each array of ``column``.

    Args:
        column: A column, nested or not. Tensors, object arrays and structured arrays in it are not
            compressed.
        bulk: Use one block for all rows, which is smaller and faster; False: one block a row.

    Returns:
        The same structure with a 1-D object array of `CompressedRow` for each array.
    """

    def pack(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in _PLAIN_KINDS or not len(leaf):
            return leaf
        packed = np.empty(len(leaf), object)
        block = CompressedBlock.of(leaf) if bulk else None
        for i in range(len(leaf)):
            packed[i] = (
                CompressedRow(CompressedBlock.of(leaf[i : i + 1]), 0)
                if block is None
                else CompressedRow(block, i)
            )
        return packed

    return map_structure(pack, column)


def is_compressed(leaf: Any) -> bool:
    """Whether ``leaf`` is an array of compressed rows."""
    return (
        isinstance(leaf, np.ndarray)
        and leaf.dtype == object
        and leaf.ndim == 1
        and len(leaf) > 0
        and isinstance(leaf[0], CompressedRow)
    )


def decompress_column(column: Column) -> Column:
    """The inverse of `compress_column`; uncompressed columns are returned as they are.

    Raises:
        CorruptData: A block is damaged, or rows of one column differ in dtype or shape.
    """
    return map_structure(lambda leaf: _unpack(leaf) if is_compressed(leaf) else leaf, column)


def _unpack(rows: np.ndarray) -> np.ndarray:
    # Decode each block once, for all rows that refer to it, and hold only one at a time.
    where: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if not isinstance(row, CompressedRow):
            raise CorruptData(
                "a compressed column holds a row that is not compressed: join like columns only"
            )
        where.setdefault(id(row.block), []).append(i)
    out: np.ndarray | None = None
    for targets in where.values():
        decoded: np.ndarray = rows[targets[0]].block.array()
        sources = [rows[i].index for i in targets]
        if len(where) == 1:
            return decoded if sources == list(range(len(decoded))) else decoded[sources]
        if out is None:
            out = np.empty((len(rows), *decoded.shape[1:]), decoded.dtype)
        if (decoded.dtype, decoded.shape[1:]) != (out.dtype, out.shape[1:]):
            raise CorruptData(
                f"a compressed column has rows of {out.dtype}{out.shape[1:]} and of "
                f"{decoded.dtype}{decoded.shape[1:]}: decompress before joining such batches"
            )
        out[targets] = decoded[sources]
    assert out is not None  # is_compressed: there is a row, and so a block
    return out
