"""One column as JSON, by its spec, and back; `rlio.schemas.json_lines` builds lines from these.

Numbers are nested lists, floats in the shortest form that restores the same bits. NaN and infinities are the
strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``. Text is a list of strings; objects are a list of the JSON
of `rlio.schemas.json_values`. A type without a JSON form (complex numbers, dates, long doubles, byte strings)
is ``{"base64": ...}`` of its C-order little-endian bytes. ``{"zstd": ...}`` is the same, compressed, for any
column; the bytes of text and objects are then their JSON in UTF-8. Byte strings have an extra ``"width"``.
Encoded pictures are a list of the base64 of their files.

Example:
    >>> import numpy as np
    >>> spec = ColumnSpec.of(np.zeros((2, 2), np.float32))
    >>> text = dump_column(np.array([[0.1, -0.0], [np.nan, 3]], np.float32), spec)
    >>> text
    b'[[0.1,-0.0],["NaN",3]]'
    >>> load_column(json.loads(text), spec, rows=2)
    array([[ 0.1, -0. ],
           [ nan,  3. ]], dtype=float32)
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pybase64
import zstandard
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.ragged import Ragged
from rlio.errors import UnsafeData, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.arrow import pictures_of
from rlio.schemas.column import TEXTS, ColumnSpec
from rlio.schemas.json_values import SPECIAL_FLOATS, dump_value, value_from_json
from rlio.schemas.zstd_frames import inflate

__all__ = ["MAX_TEXT_BYTES", "check_containers", "dump_column", "load_column", "parse_json"]

#: Size of JSON that is parsed at once: a line, or a compressed column of text in one.
MAX_TEXT_BYTES: Final = 64 << 20

# Lists and objects in one text: each takes about 60 bytes in memory, so a text of empty ones would take 30
# times its size. A line of 64 MiB of full 84x84x4 frames has 3.7 million.
_MAX_CONTAINERS = 4_000_000
# As for Parquet: on observations, level 1 is within a few percent of level 3, at twice the speed.
_ZSTD_LEVEL = 1


def dump_column(values: NDArray[Any], spec: ColumnSpec, *, compress: bool = False) -> bytes:
    """Return the JSON of a column.

    Args:
        values: Shape (k, *shape), from `PolicySchema.flatten`: objects as their JSON text.
        spec: The column's type.
        compress: Whether to write a ``{"zstd": ...}`` of the bytes instead of a list.

    Raises:
        UnsafeData: Readers would refuse the compressed column.
    """
    if spec.dtype == "|S":
        width = values.dtype.itemsize
        return b'{"width":%d,%b' % (width, _blob(values.tobytes(), compress=compress)[1:])
    if spec.kind == "picture":  # Is compressed already.
        return json.dumps(
            [pybase64.b64encode_as_string(picture.data) for picture in values.tolist()], separators=(",", ":")
        ).encode()
    if spec.kind in TEXTS:
        text = _texts(values, spec)
        if not compress:
            return text
        if len(text) > MAX_TEXT_BYTES:
            raise UnsafeData(f"a compressed column of {len(text)} bytes of text, more than {MAX_TEXT_BYTES}")
        check_containers(text)
        return _blob(text, compress=True)
    if compress or not _is_plain(spec.numpy):
        little = np.ascontiguousarray(values, spec.numpy.newbyteorder("<"))
        return _blob(little.tobytes(), compress=compress)
    return _numbers(np.ascontiguousarray(values, spec.native))


def load_column(
    written: Any, spec: ColumnSpec, *, rows: int, limits: Limits = DEFAULT_LIMITS
) -> NDArray[Any]:
    """Return the values of a parsed column: shape (rows, *shape), writable, owned by the caller.

    Pictures are still encoded, shape (rows,).

    Args:
        written: The result of `json.loads` on `dump_column`; it may be hostile.
        spec: The column's type; nothing is guessed.
        rows: Expected number of rows; the caller has checked their size by the spec.
        limits: Limits for the rest.

    Raises:
        ValueError, OverflowError: It is not such a column; the message says what was found.
        UnsafeData: It would take far more memory than its text.
    """
    if isinstance(written, dict) and spec.kind != "picture":
        return _from_blob(written, spec, rows, limits)
    if not isinstance(written, list):
        raise ValueError(f"expected a list, found {excerpt(written)}")
    if spec.kind == "picture":
        return _pictures(_of_length(written, rows), spec)
    if spec.kind == "json":
        return object_column(value_from_json(item) for item in _of_length(written, rows))
    if spec.structure is not None:
        values = [value_from_json(item) for item in _of_length(written, rows)]
        return object_column(map(spec.structure.taken, values))
    if spec.items is not None:
        return _lists(_of_length(written, rows), spec.items, limits)
    if spec.kind == "text":
        return _strings(_of_length(written, rows), spec, limits)
    if not _is_plain(spec.numpy):
        raise ValueError(f"found a list, expected base64 or zstd for values of {spec.dtype}")
    if rows == 0 or spec.size == 0:
        _of_length(written, rows)
        return np.empty((rows, *spec.shape), spec.numpy)
    return _parsed_numbers(written, spec, (rows, *spec.shape))


def parse_json(text: bytes, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Parse strictly: UTF-8, no ``NaN``, no repeated key, no more lists than memory allows.

    Raises:
        ValueError: It is not such JSON.
        UnsafeData: It has more lists or objects, or nests deeper, than any text of rlio.
    """
    check_containers(text, limits)
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise UnsafeData("JSON that nests too deep") from error


def check_containers(text: bytes, limits: Limits = DEFAULT_LIMITS) -> None:
    """Refuse text with so many lists or objects that parsing it would take many times its size.

    Raises:
        UnsafeData: It has more than 4 million; in proportion more if the limits allow lines over 64 MiB.
    """
    most = _MAX_CONTAINERS * max(limits.line_bytes, MAX_TEXT_BYTES) // MAX_TEXT_BYTES
    if len(text) <= most:
        return
    found = text.count(b"[") + text.count(b"{")
    if found > most:
        raise UnsafeData(
            f"{found} lists and objects in {len(text)} bytes, more than {most}: write smaller records, or "
            "raise Limits.line_bytes"
        )


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether JSON numbers (or true and false) can represent the values."""
    return dtype.kind in "biu" or (dtype.kind == "f" and dtype.itemsize <= 8)


# ---- writing ----


def _texts(values: NDArray[Any], spec: ColumnSpec) -> bytes:
    listed = values.tolist()
    if spec.items is not None:
        return _lists_of_numbers(Ragged.of(values)) if listed else b"[]"
    if spec.structure is not None:
        listed = list(map(dump_value, listed))
    if spec.kind in ("nested", "json"):
        text = f"[{','.join(listed)}]"
    else:
        text = json.dumps(listed, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8")


def _blob(data: bytes, *, compress: bool) -> bytes:
    packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data) if compress else data
    if compress:
        DEFAULT_LIMITS.check_inflation(len(packed), len(data), "a compressed column")
    return b'{"%b":"%b"}' % (b"zstd" if compress else b"base64", pybase64.b64encode(packed))


def _numbers(values: NDArray[Any]) -> bytes:
    """Return nested lists, joined level by level in Arrow: 0.07 us per value, a sixth of ``json.dumps``."""
    if values.size == 0:
        return json.dumps(values.tolist(), separators=(",", ":")).encode()
    texts = _number_texts(values.reshape(-1))
    for level, length in enumerate(reversed(values.shape)):
        texts = _joined(texts, np.arange(0, len(texts) + 1, length), level)
    depth = values.ndim
    return b"[" * depth + bytes(texts[0].as_buffer()) + b"]" * depth


def _lists_of_numbers(found: Ragged) -> bytes:
    """Return the JSON of rows of any length, joined in Arrow like `_numbers`."""
    depth = found.values.ndim
    texts = _number_texts(np.ascontiguousarray(found.values).reshape(-1))
    for level, length in enumerate(reversed(found.values.shape[1:])):
        texts = _joined(texts, np.arange(0, len(texts) + 1, length), level)
    rows = _joined(texts, found.offsets, depth - 1).to_pylist()
    opening, closing = "[" * depth, "]" * depth
    listed = (
        f"{opening}{row}{closing}" if length else "[]"
        for row, length in zip(rows, found.lengths.tolist(), strict=True)
    )
    return f"[{','.join(listed)}]".encode()


def _joined(texts: pa.Array, ends: NDArray[np.integer], level: int) -> pa.Array:
    """Join texts of a level of nested lists into those of the next."""
    lists = pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), texts)
    return pc.binary_join(lists, "]" * level + "," + "[" * level)


def _number_texts(flat: NDArray[Any]) -> pa.Array:
    """Return the JSON text of each value."""
    if flat.dtype.kind != "f":
        return pc.cast(pa.array(flat), pa.string())
    # The oldest supported Arrow casts no float16; NumPy's text is as short.
    texts = pa.array(flat.astype("U")) if flat.itemsize == 2 else pc.cast(pa.array(flat), pa.string())
    finite = np.isfinite(flat)
    if not finite.all():
        names = np.where(np.isnan(flat), '"NaN"', np.where(flat > 0, '"Infinity"', '"-Infinity"'))
        texts = pc.if_else(pa.array(finite), texts, pa.array(names))
    # JSON readers take "-0" as an integer, which has no negative zero.
    negative_zero = (flat == 0) & np.signbit(flat)
    if negative_zero.any():
        texts = pc.if_else(pa.array(negative_zero), "-0.0", texts)
    return texts if flat.itemsize == 8 else _safe_from_double_rounding(texts, flat, finite)


def _safe_from_double_rounding(texts: pa.Array, flat: NDArray[Any], finite: NDArray[np.bool_]) -> pa.Array:
    """Lengthen texts that readers which go through float64, as JSON's do, would read with a wrong bit.

    This concerns shortest texts within 2**-53 of the middle between two float32: 7.0385307e-26.
    """
    with np.errstate(over="ignore"):
        read = pc.cast(pc.if_else(pa.array(finite), texts, "0"), pa.float64()).to_numpy().astype(flat.dtype)
    wrong = (read != flat) & finite
    if not wrong.any():
        return texts
    return pc.if_else(pa.array(wrong), pc.cast(pa.array(flat.astype(np.float64)), pa.string()), texts)


# ---- reading ----


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object without repeated keys: of two values for one column, neither can be trusted."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key occurs twice among {excerpt([key for key, _ in pairs])}")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; floats that are not finite are strings")


def _of_length(written: list[Any], rows: int) -> list[Any]:
    if len(written) != rows:
        raise ValueError(f"found {len(written)} rows, expected {rows}")
    return written


def _strings(listed: list[Any], spec: ColumnSpec, limits: Limits) -> NDArray[Any]:
    if not all(type(item) is str for item in listed):
        raise ValueError(f"expected strings, found {excerpt(next(x for x in listed if type(x) is not str))}")
    if spec.dtype == "|O":
        return object_column(listed)
    if spec.dtype not in ("<U", ">U"):
        raise ValueError("found a list, expected base64 or zstd for byte strings")
    if (size := max(map(len, listed), default=0) * len(listed) * 4) > limits.group_bytes:
        raise UnsafeData(f"strings that take {size} bytes as an array of equal widths")
    for item in listed:
        item.encode("utf-8")  # Raises UnicodeError, a ValueError, for half of a surrogate pair.
    values = np.array(listed, np.str_)
    return values.astype(np.dtype(f"{spec.dtype}{values.dtype.itemsize // 4}"), copy=False)


def _lists(listed: list[Any], items: ColumnSpec, limits: Limits) -> NDArray[Any]:
    """Return rows of any length as views of one array."""
    if not all(type(row) is list for row in listed):
        raise ValueError(f"expected lists, found {excerpt(next(x for x in listed if type(x) is not list))}")
    ends = np.cumsum([0, *map(len, listed)])
    if (size := int(ends[-1]) * items.row_bytes) > limits.group_bytes:
        raise UnsafeData(f"lists of {size} bytes, more than {limits.group_bytes}")
    every = [item for row in listed for item in row]
    values = load_column(every, items, rows=len(every), limits=limits)
    return Ragged(values, ends).rows()


def _pictures(listed: list[Any], spec: ColumnSpec) -> NDArray[Any]:
    if not all(type(item) is str for item in listed):
        raise ValueError(f"expected base64, found {excerpt(next(x for x in listed if type(x) is not str))}")
    if not listed:
        return np.empty((0, *spec.shape), spec.numpy)
    return pictures_of((pybase64.b64decode(item, validate=True) for item in listed), spec)


def _parsed_numbers(written: list[Any], spec: ColumnSpec, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return numbers from nested lists, checked for type, shape and range."""
    kind = spec.numpy.kind
    found = np.array(written)  # Raises ValueError if lists differ in length.
    if found.dtype.kind == "f" and np.isinf(found).any():
        raise ValueError("a number too large for any float")  # Infinities are strings.
    if kind == "f" and found.dtype.kind in "UO":
        found = np.array(_with_special_floats(written), np.float64)
    elif kind in "iu" and found.dtype.kind in "fO" and _all_ints(written):
        found = np.array(written, np.uint64 if kind == "u" else np.int64)
    if found.shape != shape:
        raise ValueError(f"found shape {found.shape}, expected {shape}")
    if found.dtype.kind not in {"b": "b", "i": "iu", "u": "iu", "f": "fiu"}[kind]:
        raise ValueError(f"found values of {found.dtype}, but the column has {spec.dtype}")
    with np.errstate(over="ignore"):
        values = found.astype(spec.numpy, copy=False)
    if kind in "iu":
        limits, lowest, highest = np.iinfo(spec.numpy), int(found.min()), int(found.max())
        if lowest < limits.min or highest > limits.max:
            raise ValueError(f"{lowest} to {highest} does not fit {spec.dtype}")
    if kind == "f" and (np.isinf(values) & np.isfinite(found)).any():
        raise ValueError(f"a value is too large for {spec.dtype}")
    return values


def _with_special_floats(written: Any) -> Any:
    """Replace the strings for NaN and infinities in nested lists of numbers."""
    if isinstance(written, list):
        return [_with_special_floats(item) for item in written]
    if type(written) is int or (type(written) is float and math.isfinite(written)):
        return written
    if isinstance(written, str) and written in SPECIAL_FLOATS:
        return SPECIAL_FLOATS[written]
    raise ValueError(f"expected a number, found {excerpt(written)}")


def _all_ints(written: Any) -> bool:
    if isinstance(written, list):
        return all(_all_ints(item) for item in written)
    return type(written) is int


def _from_blob(written: dict[str, Any], spec: ColumnSpec, rows: int, limits: Limits) -> NDArray[Any]:
    """Return the values of ``{"base64": ...}`` or ``{"zstd": ...}``."""
    width = written.get("width")
    forms = {"base64", "zstd"} & set(written)
    expected = {"width"} if spec.dtype == "|S" else set()
    if len(forms) != 1 or set(written) != forms | expected:
        raise ValueError(f"expected a list, or base64 or zstd, found the keys {excerpt(sorted(written))}")
    (form,) = forms
    if not isinstance(written[form], str):
        raise ValueError(f"{form} is {excerpt(written[form])}, expected a string")
    packed = pybase64.b64decode(written[form], validate=True)
    if spec.kind in TEXTS and spec.dtype != "|S":
        if form != "zstd":
            raise ValueError("found base64, expected a list or zstd for text")
        text = inflate(packed, most=limits.line_bytes, limits=limits)
        return load_column(_no_object(parse_json(text, limits)), spec, rows=rows, limits=limits)
    dtype = spec.numpy.newbyteorder("<")
    if spec.dtype == "|S":
        if type(width) is not int or not 1 <= width <= limits.line_bytes:
            raise ValueError(f"a width of {excerpt(width)}")
        dtype = np.dtype(f"|S{width}")
    size = rows * math.prod(spec.shape) * dtype.itemsize
    if size > limits.group_bytes:
        raise UnsafeData(f"{rows} rows of {size} bytes, more than {limits.group_bytes}")
    data = inflate(packed, most=size, exactly=size, limits=limits) if form == "zstd" else packed
    if len(data) != size:
        raise ValueError(f"found {len(data)} bytes, but {rows} rows take {size}")
    if dtype.kind == "b" and data and max(data) > 1:
        raise ValueError(f"a bool of {max(data)}")
    little = np.frombuffer(data, dtype).reshape(rows, *spec.shape)
    return little.astype(dtype if spec.dtype == "|S" else spec.numpy, copy=True)


def _no_object(parsed: Any) -> Any:
    """Return a column from within a blob, which must be a list: blobs do not nest."""
    if isinstance(parsed, dict):
        raise ValueError("found an object in a compressed column, expected a list")
    return parsed
