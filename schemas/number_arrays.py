"""Numbers between NumPy and Arrow, by their spec: rows of fixed size, and rows that are arrays of any length.

Fixed-size data is not copied either way. `rlio.schemas.arrow` has all kinds of columns.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.batch.ragged import Ragged
from rlio.errors import CorruptData
from rlio.schemas.column import ColumnSpec
from rlio.schemas.dtypes import numpy_type

__all__ = ["check_offsets", "numbers_from_arrow", "numbers_to_arrow", "numbers_type", "with_nat"]

#: NumPy's number for a time that is not known.
_NAT: Final = np.iinfo(np.int64).min


def numbers_type(spec: ColumnSpec, *, nullable: bool) -> pa.DataType:
    """Return the Arrow type of rows of the kinds ``scalar``, ``list``, ``bytes``, ``time`` and ``ragged``."""
    if spec.items is not None:
        return pa.list_(pa.field("element", numbers_type(spec.items, nullable=False), nullable=False))
    if spec.kind == "bytes":
        return pa.binary() if nullable else pa.binary(spec.row_bytes)
    if spec.kind == "time":
        return _time_type(spec)
    value = pa.from_numpy_dtype(spec.native)
    if spec.kind == "list":
        return pa.list_(pa.field("element", value, nullable=False))
    return value


def numbers_to_arrow(values: NDArray[Any], valid: NDArray[np.bool_] | None, spec: ColumnSpec) -> pa.Array:
    """Return the Arrow array of a column; see `rlio.schemas.arrow.to_arrow`."""
    if spec.items is not None:
        return _ragged_to_arrow(values, valid, spec, spec.items)
    dense = np.ascontiguousarray(values, dtype=spec.native)
    if spec.kind == "time":
        return _times_to_arrow(dense, valid, spec)
    rows = len(dense) if valid is None else len(valid)
    if spec.kind == "scalar":
        if valid is None:
            return pa.array(dense)
        spread = np.zeros(rows, spec.native)
        spread[valid] = dense
        return pa.array(spread, mask=~valid)
    width = spec.size if spec.kind == "list" else spec.row_bytes
    bitmap = None
    if valid is not None:
        bitmap = pa.array(valid).buffers()[1]
    if spec.kind == "bytes":
        data = pa.py_buffer(dense.reshape(-1).view(np.uint8))
        if valid is None:
            return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), rows, [None, data])
        return pa.BinaryArray.from_buffers(pa.binary(), rows, [bitmap, _offsets(valid, rows, width), data])
    kind = numbers_type(spec, nullable=valid is not None)
    child = pa.array(dense.reshape(-1))
    buffers = [bitmap, _offsets(valid, rows, width)]
    return pa.ListArray.from_buffers(kind, rows, buffers, children=[child])


def numbers_from_arrow(array: pa.Array, spec: ColumnSpec) -> NDArray[Any]:
    """Return the values of the rows that are not null, writable; see `rlio.schemas.arrow.from_arrow`.

    Raises:
        CorruptData: The stored lengths do not fit the spec.
    """
    if spec.items is not None:
        return _ragged_from_arrow(array.drop_null() if array.null_count else array, spec.items)
    if spec.kind == "time":
        return _times_from_arrow(array.drop_null() if array.null_count else array, spec)
    if spec.kind == "scalar":
        dense = array.drop_null() if array.null_count else array
        return _in_dtype(_values(dense), spec)
    count = len(array) - array.null_count
    if spec.kind == "bytes":
        flat = _fixed_bytes(array, spec.row_bytes, count).view(spec.native)
    else:
        _check_lengths(array, spec.size)
        flat = _values(array.flatten())
    if flat.size != count * spec.size:
        raise CorruptData(f"{flat.size} values in {count} rows of shape {spec.shape}")
    return _in_dtype(flat.reshape(count, *spec.shape), spec)


def _time_type(spec: ColumnSpec) -> pa.DataType:
    """Dates or timestamps without a zone; of durations, which Parquet lacks, the number of their units."""
    if spec.numpy.kind == "m":
        return pa.int64()
    unit, _ = spec.time_unit
    return pa.date32() if unit == "D" else pa.timestamp(unit)


def _whole(spec: ColumnSpec) -> tuple[pa.DataType, int, int]:
    """The Arrow type of the numbers behind times, the one for NaT, and how many are one unit of the dtype."""
    is_date = spec.numpy.kind == "M" and spec.time_unit[0] == "D"
    factor = spec.time_unit[1] if spec.numpy.kind == "M" else 1
    return (pa.int32(), np.iinfo(np.int32).min, 1) if is_date else (pa.int64(), _NAT, factor)


def _times_to_arrow(dense: NDArray[Any], valid: NDArray[np.bool_] | None, spec: ColumnSpec) -> pa.Array:
    """Return times; without ``valid``, NaT is null, else the least number."""
    kind, unknown, factor = _whole(spec)
    counts = dense.view(np.int64)
    nat = counts == _NAT
    counts = np.where(nat, unknown, counts * factor)
    if valid is not None:
        spread = np.zeros(len(valid), np.int64)
        spread[valid] = counts
        counts, nat = spread, ~valid
    return pa.array(counts.astype(numpy_type(kind)), mask=nat).cast(_time_type(spec))


def _times_from_arrow(array: pa.Array, spec: ColumnSpec) -> NDArray[Any]:
    kind, unknown, factor = _whole(spec)
    stored = array.cast(kind).to_numpy().astype(np.int64)
    counts, rest = np.divmod(stored, factor)
    nat = stored == unknown
    if rest[~nat].any():
        raise CorruptData(f"a timestamp that is no whole number of {spec.dtype}")
    counts[nat] = _NAT
    return _in_dtype(counts.view(spec.native), spec)


def with_nat(array: pa.Array, spec: ColumnSpec) -> pa.Array:
    """Return a column that every row has without nulls, which stand for NaT; see `numbers_from_arrow`."""
    if spec.kind != "time" or not array.null_count:
        return array
    kind, unknown, _ = _whole(spec)
    return array.cast(kind).fill_null(unknown)


def _offsets(valid: NDArray[np.bool_] | None, rows: int, width: int) -> pa.Buffer:
    """Return Arrow's offsets for rows of equal width; nulls have no values."""
    offsets = np.zeros(rows + 1, np.int64)
    if valid is None:
        offsets[:] = np.arange(rows + 1)
    else:
        np.cumsum(valid, out=offsets[1:])
    offsets *= width
    if offsets[-1] > np.iinfo(np.int32).max:
        raise CorruptData(f"a row group of {offsets[-1]} values in one column; limit its rows")
    return pa.py_buffer(offsets.astype(np.int32))


def _check_lengths(array: pa.Array, size: int) -> None:
    """Refuse lists that do not all have the spec's size."""
    lengths = np.diff(array.offsets.to_numpy())
    if array.null_count:
        lengths = lengths[array.is_valid().to_numpy(zero_copy_only=False)]
    if not (lengths == size).all():
        raise CorruptData(f"lists of {int(lengths.min())} to {int(lengths.max())} values, expected {size}")


def _fixed_bytes(array: pa.Array, width: int, count: int) -> NDArray[np.uint8]:
    """Return the bytes of wide rows, one after the other."""
    if pa.types.is_fixed_size_binary(array.type):
        if array.type.byte_width != width or array.null_count:
            raise CorruptData(f"rows of {array.type.byte_width} bytes, expected {width}")
        start = array.offset * width
        return _writable(array.buffers()[1], np.dtype(np.uint8))[start : start + count * width]
    dense = array.drop_null()
    lengths = np.diff(np.frombuffer(dense.buffers()[1], np.int32)[dense.offset : dense.offset + count + 1])
    if not (lengths == width).all():
        raise CorruptData(f"rows of {int(lengths.min())} to {int(lengths.max())} bytes, expected {width}")
    if count == 0:
        return np.empty(0, np.uint8)
    first = int(np.frombuffer(dense.buffers()[1], np.int32)[dense.offset])
    return _writable(dense.buffers()[2], np.dtype(np.uint8))[first : first + count * width]


def _values(array: pa.Array) -> NDArray[Any]:
    """Return the values of a primitive array without nulls."""
    if array.null_count:
        raise CorruptData(f"{array.null_count} nulls inside lists")
    if pa.types.is_boolean(array.type):  # Bits, which must be unpacked.
        return np.asarray(array.to_numpy(zero_copy_only=False), bool)
    dtype = numpy_type(array.type)
    buffer = array.buffers()[1]
    if buffer is None:
        return np.empty(0, dtype)
    return _writable(buffer, dtype)[array.offset : array.offset + len(array)]


def _writable(buffer: pa.Buffer, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a writable array over a buffer that the decoder has filled for this call only.

    Arrow marks every buffer read-only, because it may be shared. This one is not: it was decoded for this
    call, and the array keeps it alive. A copy would cost a fifth of the in-order reading speed.
    """
    values = buffer.size // dtype.itemsize
    return np.asarray(_Memory(buffer, values, dtype)) if values else np.empty(0, dtype)


class _Memory:
    """NumPy's array interface over an Arrow buffer; keeps the buffer alive."""

    def __init__(self, buffer: pa.Buffer, values: int, dtype: np.dtype[Any]) -> None:
        self._buffer = buffer
        self.__array_interface__ = {
            "data": (buffer.address, False),
            "shape": (values,),
            "typestr": dtype.str,
            "version": 3,
        }


def _in_dtype(values: NDArray[Any], spec: ColumnSpec) -> NDArray[Any]:
    """Restore the byte order of the spec."""
    return values if values.dtype == spec.numpy else values.astype(spec.numpy)


def _ragged_to_arrow(
    values: NDArray[Any], valid: NDArray[np.bool_] | None, spec: ColumnSpec, items: ColumnSpec
) -> pa.Array:
    """Return lists of items; nulls are empty."""
    found = Ragged.joined(values, items.numpy, items.shape)
    assert found is not None, "rows were checked against the schema"
    offsets, bitmap = found.offsets, None
    if valid is not None:
        lengths = np.zeros(len(valid), np.int64)
        lengths[valid] = found.lengths
        offsets, bitmap = np.cumsum([0, *lengths]), pa.array(valid).buffers()[1]
    if offsets[-1] > np.iinfo(np.int32).max:
        raise CorruptData(f"a row group of {offsets[-1]} items in one column; limit its rows")
    buffers = [bitmap, pa.py_buffer(offsets.astype(np.int32))]
    child = numbers_to_arrow(found.values, None, items)
    return pa.ListArray.from_buffers(
        numbers_type(spec, nullable=True), len(offsets) - 1, buffers, children=[child]
    )


def check_offsets(ends: NDArray[np.int64], items: int) -> None:
    """Refuse lists that do not lie one after the other among their items.

    Raises:
        CorruptData: Their offsets decrease, or go beyond the items.
    """
    if (np.diff(ends) < 0).any() or ends[0] < 0 or ends[-1] > items:
        raise CorruptData("lists whose offsets decrease, or go beyond their items")


def _ragged_from_arrow(array: pa.Array, items: ColumnSpec) -> NDArray[Any]:
    """Return rows that are views of one array."""
    ends = array.offsets.to_numpy().astype(np.int64)
    check_offsets(ends, len(array.values))
    child = array.values.slice(ends[0], ends[-1] - ends[0])
    if child.null_count:
        raise CorruptData(f"{child.null_count} nulls inside lists")
    return Ragged(numbers_from_arrow(child, items), ends - ends[0]).rows()
