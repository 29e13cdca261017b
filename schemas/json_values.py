"""Objects of a row (infos, ragged observations) as JSON text that keeps dtypes, and back, without code.

Plain JSON values are written unchanged. A value that JSON lacks is an object with one reserved key:
``{"$array": "<f4", "shape": [2], "data": [1.0, 2.0]}``, ``{"$scalar": "<f4", "data": 1.5}``, ``{"$tuple":
[...]}``, ``{"$float": "NaN"}``, ``{"$bytes": "<base64>"}``, ``{"$time": "2026-01-31"}``, ``{"$graph": [nodes,
edges, edge_links]}``, and
``{"$map": [[key, value], ...]}`` for dictionaries whose keys are not all plain strings.

What `dump_value` accepts, `load_value` gives back, equal; docs/columns.md lists the types that change. It
refuses everything else, and names the part of the value. `check_value` says the same without making the text.

Example:
    >>> import numpy as np
    >>> text = dump_value({"p": np.float32([0.5, 0.5]), "lives": (3,)})
    >>> load_value(text)
    {'p': array([0.5, 0.5], dtype=float32), 'lives': (3,)}
    >>> check_value({"camera": {"size": {640, 480}}}, "infos")
    Traceback (most recent call last):
        ...
    rlio.errors.SchemaError: a value of type set cannot be stored ({640, 480}): store list(value) [column ...]
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import math
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import is_tensor, object_column, to_numpy
from rlio.errors import CorruptData, SchemaError, excerpt
from rlio.schemas.dtypes import is_stored, stored_dtype
from rlio.schemas.times import form_of, text_of, time_of

__all__ = [
    "SPECIAL_FLOATS",
    "check_text",
    "check_value",
    "dump_value",
    "load_value",
    "plain_array",
    "value_from_json",
]

#: The strings that stand for floats without a JSON number.
SPECIAL_FLOATS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_DEPTH = 64
# Characters of one value. `rlio.schemas.text_columns` refuses objects of a row group that take 4 GiB, and
# counts 72 bytes for a bracket; a group has 12 Mi other characters.
_MAX_CHARACTERS = 32 << 20
# Python writes and reads ints of 4,300 digits, unless the process has another limit.
_MAX_INT = 10**4300
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
# Of a million honest keys, at most three collide.
_MAX_EQUAL_HASHES = 100
_MAX_ARRAY_BYTES = 256 << 20
# Ints of more bits may exceed the digits that a process allows: at least 640.
_LONG_INT = 2000
# A dtype such as <U60000000 turns one letter into hundreds of megabytes. This limits the padding of texts.
_MAX_PADDING = 1 << 20


def check_value(value: Any, name: str) -> None:
    """Refuse a value that `dump_value` refuses: of a row of ``infos``, or of another column of objects.

    Call it before the value enters a buffer or a batch. An info of eight numbers takes about 1 us. Values
    with other parts than numbers, ASCII texts, lists, tuples, dicts and small arrays take as long as
    `dump_value`.

    Args:
        value: The value of one row.
        name: The column, which begins the path in the error: ``infos/camera/stamp``.

    Raises:
        SchemaError: The value has no stored form. The message names the part, and what to store instead.
    """
    if type(value) is dict and not value:
        return
    if _sure_characters(value, 0) > _SURELY_SHORT:
        dump_value(value, name)


def check_text(text: str, name: str) -> None:
    """Refuse a text that a column of texts cannot hold, because it has no UTF-8 form; see `check_value`.

    A column of objects that are all texts, such as observations of a Text space, is stored as such. A text
    within an info may have any characters.

    Raises:
        SchemaError: It has half of a surrogate pair.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SchemaError(
                f"a text with half of a surrogate pair ({excerpt(text)}): replace it, or store bytes",
                column=name,
            ) from error


def dump_value(value: Any, name: str = "") -> str:
    """Return JSON text of ``value``; it always has a UTF-8 form.

    Args:
        value: Any object.
        name: As for `check_value`.

    Raises:
        SchemaError: A part of it has no stored form, it nests over 64 deep, or its text is too long.
    """
    if type(value) is dict and not value:  # By far the most common info.
        return "{}"
    try:
        plain = _to_plain(value, 0)
        text = _json_text(plain)
    except SchemaError as error:
        raise _located(error, value, name) from error.__cause__
    if len(text) > _MAX_CHARACTERS:
        raise SchemaError(
            f"a value of {len(text)} characters as JSON: at most {_MAX_CHARACTERS}; store it in columns of "
            "its own, or store a reference to it",
            column=name or None,
        )
    return text


def _json_text(plain: Any) -> str:
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # Half of a surrogate pair, as in some file names; keep it as an escape.
        if _SURROGATE_PAIR.search(text):  # Escapes of two halves are one character.
            raise SchemaError(
                "a text holds both halves of a surrogate pair as two characters: store "
                "text.encode('utf-16', 'surrogatepass').decode('utf-16')"
            ) from None
        text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return text


def load_value(text: str | bytes) -> Any:
    """Return the value that `dump_value` wrote.

    Raises:
        CorruptData: ``text`` is not such JSON.
    """
    if text in ("{}", b"{}"):
        return {}
    try:
        return _from_plain(json.loads(text), 0)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CorruptData(f"not a stored JSON value: {error}; found {excerpt(text)}") from error


def value_from_json(parsed: Any) -> Any:
    """Return the value that `dump_value` wrote, from its text as parsed by `json.loads`.

    Raises:
        CorruptData: ``parsed`` is not such a value.
    """
    try:
        return _from_plain(parsed, 0)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptData(f"not a stored JSON value: {error!r}; found {excerpt(parsed)}") from error


def _float_name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _to_plain(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise SchemaError(f"a value nests more than {_MAX_DEPTH} deep; store it in columns of its own")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return _checked_int(value)
    if kind is float:
        return value if math.isfinite(value) else {"$float": _float_name(value)}
    if isinstance(value, enum.Enum):  # It may be a tuple or bytes, too.
        raise _refused(value)
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _to_plain(item, depth + 1) for key, item in value.items()}
        return _map_to_plain(value, depth)
    if isinstance(value, list):
        return [_to_plain(item, depth + 1) for item in value]
    if isinstance(value, tuple):
        mark = "$graph" if _is_graph(kind) else "$tuple"
        return {mark: [_to_plain(item, depth + 1) for item in value]}
    if isinstance(value, np.ndarray):
        return _array_to_plain(plain_array(value), depth)
    if isinstance(value, np.generic):
        return _scalar_to_plain(value, depth)
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, datetime.date) and form_of(value) is not None:
        return {"$time": text_of(value)}
    if is_tensor(value):
        return _array_to_plain(_tensor_to_numpy(value), depth)
    raise _refused(value)


def _checked_int(value: int) -> int:
    if -_MAX_INT < value < _MAX_INT:
        try:
            _ = value.bit_length() > _LONG_INT and str(value)
        except ValueError:  # This process has a lower limit.
            pass
        else:
            return value
    raise SchemaError("an int of more digits than Python reads (4300 by default): store it as bytes")


def _map_to_plain(value: dict[Any, Any], depth: int) -> dict[str, Any]:
    """Return a dictionary with keys of any kind, which the decoder must give back as the same keys."""
    keys = [_to_plain(key, depth + 1) for key in value]
    pairs = [[key, _to_plain(item, depth + 1)] for key, item in zip(keys, value.values(), strict=True)]
    try:
        found = len(_map_from_plain([[key, None] for key in keys], depth))
    except (TypeError, ValueError) as error:  # A tensor as a key comes back as an array, which is no key.
        raise SchemaError(f"a dict whose keys cannot be stored ({error}): use strings as keys") from error
    if found != len(value):
        raise SchemaError("a dict with several NaN as keys cannot be stored: use strings as keys")
    return {"$map": pairs}


def _scalar_to_plain(value: np.generic, depth: int) -> dict[str, Any]:
    array = plain_array(np.asarray(value))
    if array.dtype.kind in "SU" and array[()] != value:  # NumPy drops NULs at the end of an array's texts.
        raise SchemaError(f"a {type(value).__name__} that ends in NUL: store str(value) or bytes(value)")
    plain = _array_to_plain(array, depth)
    return {"$scalar": plain["$array"], "data": plain["data"]}


def _tensor_to_numpy(value: Any) -> NDArray[Any]:
    try:
        return to_numpy(value)
    except (TypeError, RuntimeError) as error:
        raise SchemaError(
            f"a tensor of {value.dtype}, {value.layout}, on {value.device} cannot be stored ({error}): store "
            "a dense one in a dtype of NumPy, such as value.float()"
        ) from error


def plain_array(array: NDArray[Any], column: str | None = None) -> NDArray[Any]:
    """Return an array without its subclass: of `numpy.memmap` and `numpy.matrix`, which add no values.

    Raises:
        SchemaError: It has another subclass, such as one with a mask or a unit, or a dtype of another
            library.
    """
    kind = type(array)
    if kind is not np.ndarray and kind not in (np.memmap, np.matrix):
        how = "value.filled(...), and value.mask beside it" if isinstance(array, np.ma.MaskedArray) else ""
        raise SchemaError(
            f"a {kind.__name__} cannot be stored, because only its values would be kept: store "
            f"{how or 'numpy.asarray(value) to keep only these'}",
            column=column,
        )
    if not is_stored(array.dtype):
        how = "one array for each field" if array.dtype.names else "an array of one of NumPy's own dtypes"
        raise SchemaError(f"an array of dtype {array.dtype} cannot be stored: store {how}", column=column)
    return np.asarray(array)


def _array_to_plain(array: NDArray[Any], depth: int) -> dict[str, Any]:
    if array.nbytes > _MAX_ARRAY_BYTES:
        raise SchemaError(
            f"an array of {array.nbytes} bytes: at most {_MAX_ARRAY_BYTES} inside a JSON value; store it in "
            "a column of its own"
        )
    kind = array.dtype.kind
    if kind == "O":
        data: Any = [_to_plain(item, depth + 1) for item in array.reshape(-1)]
    elif kind in "biu":
        data = array.reshape(-1).tolist()
    elif kind == "f" and array.dtype.itemsize <= 8:
        data = [item if math.isfinite(item) else _float_name(item) for item in array.reshape(-1).tolist()]
    elif kind == "U":
        data = array.reshape(-1).tolist()
        if array.nbytes > _most_bytes(data):
            raise SchemaError(
                f"an array of {len(data)} texts, each padded to {array.dtype.itemsize} bytes: store a list"
            )
    elif kind in "fcmMS":  # Wider floats too, because Python's float cannot hold them.
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    else:
        raise SchemaError(f"an array of dtype {array.dtype} cannot be stored inside a JSON value")
    return {"$array": array.dtype.str, "shape": list(array.shape), "data": data}


def _most_bytes(texts: list[str]) -> int:
    """Return the bytes that an array of these texts may take with its padding."""
    return _MAX_PADDING + 4 * sum(map(len, texts))


def _from_plain(value: Any, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise ValueError(f"nested more than {2 * _MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_from_plain(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        if type(value) is float and not math.isfinite(value):
            raise ValueError(
                "NaN, or a number too large for any float: infinities are written as {'$float': ...}"
            )
        return value
    if "$array" in value:
        return _array_from_plain(value["$array"], tuple(value["shape"]), value["data"], depth)
    if "$scalar" in value:
        return _array_from_plain(value["$scalar"], (), value["data"], depth)[()]
    if "$tuple" in value:
        return tuple(_from_plain(item, depth + 1) for item in value["$tuple"])
    if "$graph" in value:
        return _graph([_from_plain(item, depth + 1) for item in value["$graph"]])
    if "$float" in value:
        return SPECIAL_FLOATS[value["$float"]]
    if "$bytes" in value:
        return _decode_base64(value["$bytes"])
    if "$time" in value:
        return time_of(value["$time"])
    if "$map" in value:
        return _map_from_plain(value["$map"], depth)
    return {key: _from_plain(item, depth + 1) for key, item in value.items()}


def _is_graph(kind: type) -> bool:
    """Whether ``kind`` is gymnasium's GraphInstance, which is not imported for this."""
    return kind.__name__ == "GraphInstance" and kind.__module__.startswith("gymnasium.")


def _graph(parts: list[Any]) -> Any:
    from gymnasium.spaces import GraphInstance

    nodes, edges, edge_links = parts
    return GraphInstance(nodes, edges, edge_links)


def _map_from_plain(pairs: list[Any], depth: int) -> dict[Any, Any]:
    """Return a dictionary with any keys. Refuses keys that collide, because they could take hours."""
    keys = [_from_plain(key, depth + 1) for key, _ in pairs]
    if len(keys) > _MAX_EQUAL_HASHES and max(Counter(map(hash, keys)).values()) > _MAX_EQUAL_HASHES:
        raise ValueError(f"a dictionary of {len(keys)} keys, more than {_MAX_EQUAL_HASHES} of which collide")
    return dict(zip(keys, (_from_plain(value, depth + 1) for _, value in pairs), strict=True))


def _array_from_plain(dtype_text: str, shape: tuple[int, ...], data: Any, depth: int) -> NDArray[Any]:
    if dtype_text == "|O":
        return object_column(_from_plain(item, depth + 1) for item in data).reshape(shape)
    dtype = stored_dtype(dtype_text)
    if dtype.kind not in "biufcmMSU":
        raise ValueError(f"dtype {dtype_text}")
    if math.prod(shape) * dtype.itemsize > _MAX_ARRAY_BYTES:
        raise ValueError(f"an array of shape {shape}")
    if isinstance(data, str):
        return np.frombuffer(_decode_base64(data), dtype).reshape(shape).copy()
    if not isinstance(data, list):
        raise ValueError(f"an array's data are {type(data).__name__}")
    if dtype.kind == "U" and len(data) * dtype.itemsize > _most_bytes(data):
        raise ValueError(f"texts of {len(data)} x {dtype.itemsize} bytes, most of it padding")
    if dtype.kind == "f":
        data = [item if type(item) in (int, float) else SPECIAL_FLOATS[item] for item in data]
    return np.array(data, dtype).reshape(shape)


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("base64 text is damaged") from error


# ---- checking, and what to say ----

# Types of which each value has a stored form.
_SURE_TYPES: Final = frozenset(
    {bool, float, type(None), np.bool_, np.float16, np.float32, np.float64}
    | {np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
)
_TEXT_TYPE: Final = frozenset((str,))
_SURE_INT = 1 << 63
# Characters of a number in JSON, with its dtype. The texts of numbers in arrays take less.
_NUMBER_CHARACTERS = 64
# Below this limit, the estimates here may be wrong by a factor of two.
_SURELY_SHORT = _MAX_CHARACTERS // 2
_UNSURE = _SURELY_SHORT + 1


def _sure_characters(value: Any, depth: int) -> int:
    """Return an estimate of the characters of ``value`` as JSON; `_UNSURE` or more if it may be refused."""
    kind = type(value)
    if kind is dict:
        if depth >= _MAX_DEPTH:
            return _UNSURE
        # These calls loop in C, which takes a third of the time of a loop here.
        if not _TEXT_TYPE.issuperset(map(type, value)):
            return _UNSURE
        names = "".join(value)
        if not names.isascii() or "$" in names:
            return _UNSURE
        kinds = set(map(type, value.values()))
        found = len(names) + _NUMBER_CHARACTERS * len(value)
        if kinds <= _SURE_TYPES:
            return found
        return found + sum(_sure_characters(item, depth + 1) for item in value.values())
    if kind in _SURE_TYPES:
        return _NUMBER_CHARACTERS
    if kind is int:
        return _NUMBER_CHARACTERS if -_SURE_INT < value < _SURE_INT else _UNSURE
    if kind is str:
        # Each character may become an escape.
        return 6 * len(value) + 2 if value.isascii() else _UNSURE
    if kind is list or kind is tuple or _is_graph(kind):
        if depth >= _MAX_DEPTH:
            return _UNSURE
        return 16 + sum(_sure_characters(item, depth + 1) for item in value)
    if kind is np.ndarray and value.dtype.type in _SURE_TYPES and value.nbytes < _MAX_ARRAY_BYTES:
        return _NUMBER_CHARACTERS + 24 * int(value.size)
    return _UNSURE


def _located(error: SchemaError, value: Any, name: str) -> SchemaError:
    """Return the error with the path of the first part of ``value`` that is refused by itself."""
    path = [name]
    for depth in range(1, _MAX_DEPTH + 1):
        for key, item in _parts(value):
            try:
                _json_text(_to_plain(item, depth))
            except SchemaError as inner:
                error, value = inner, item
                path.append(str(key).replace("~", "~0").replace("/", "~1"))
                break
        else:
            break
    # Of a value that is refused for its depth, the first parts say enough.
    located = SchemaError(str(error), column="/".join(path if len(path) < _MAX_DEPTH else path[:4]) or None)
    located.__cause__ = error.__cause__
    return located


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a value with their keys or positions."""
    if isinstance(value, enum.Enum):
        return
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif type(value) is np.ndarray and value.dtype.kind == "O":
        yield from enumerate(value.reshape(-1))


# What to store instead of values of these types. The first that matches counts.
_INSTEAD: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (enum.Enum, "value.value or value.name"),
    (datetime.timedelta, "value.total_seconds() or numpy.timedelta64(value)"),
    (datetime.datetime, "value.isoformat(), or a datetime.datetime without a zone or in datetime.UTC"),
    ((datetime.date, datetime.time), "value.isoformat()"),
    ((os.PathLike, decimal.Decimal, fractions.Fraction, uuid.UUID), "str(value)"),
    (complex, "numpy.complex128(value)"),
    (str, "str(value)"),
    (int, "int(value)"),
    (float, "float(value)"),
    (memoryview, "bytes(value)"),
    (Mapping, "dict(value)"),
    ((Set, range), "list(value)"),
    (BaseException, "str(value)"),
    (type, "value.__name__"),
)


def _refused(value: Any) -> SchemaError:
    """Return the error for a value without a stored form."""
    how = next((f"store {how}" for kinds, how in _INSTEAD if isinstance(value, kinds)), "")
    if not how and dataclasses.is_dataclass(value):
        how = "store dataclasses.asdict(value)"
    if not how and hasattr(value, "__array__"):  # Arrays of other libraries, and tables.
        how = "store numpy.asarray(value)"
    if not how:
        more = "list(value), or " if isinstance(value, Iterable) else ""
        how = f"store {more}numbers, strings, lists, dicts, tuples, bytes or NumPy arrays"
    try:
        shown = f" ({excerpt(value)})"
    except Exception:  # The value's own __repr__ fails.
        shown = ""
    return SchemaError(f"a value of type {type(value).__name__} cannot be stored{shown}: {how}")
