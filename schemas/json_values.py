"""Objects of a row (infos, ragged observations) as JSON text that keeps dtypes, and back, without code.

Plain JSON values are written unchanged. A value that JSON lacks is an object with one reserved key:
``{"$array": "<f4", "shape": [2], "data": [1.0, 2.0]}``, ``{"$scalar": "<f4", "data": 1.5}``, ``{"$tuple":
[...]}``, ``{"$float": "NaN"}``, ``{"$bytes": "<base64>"}``, and ``{"$map": [[key, value], ...]}`` for
dictionaries whose keys are not all plain strings.

Example:
    >>> import numpy as np
    >>> text = dump_value({"p": np.float32([0.5, 0.5]), "lives": (3,)})
    >>> load_value(text)
    {'p': array([0.5, 0.5], dtype=float32), 'lives': (3,)}
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import Counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.errors import CorruptData, SchemaError, excerpt
from rlio.schemas.dtypes import stored_dtype

__all__ = ["SPECIAL_FLOATS", "dump_value", "load_value", "value_from_json"]

#: The strings that stand for floats without a JSON number.
SPECIAL_FLOATS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_DEPTH = 64
# Of a million honest keys, at most three collide.
_MAX_EQUAL_HASHES = 100
_MAX_ARRAY_BYTES = 256 << 20
# A dtype such as <U60000000 turns one letter into hundreds of megabytes. This limits the padding of texts.
_MAX_PADDING = 1 << 20


def dump_value(value: Any) -> str:
    """Return JSON text of ``value``; it always has a UTF-8 form.

    Raises:
        SchemaError: A part of it is neither JSON, NumPy, bytes nor a tuple, or it nests over 64 deep.
    """
    if type(value) is dict and not value:  # By far the most common info.
        return "{}"
    plain = _to_plain(value, 0)
    try:
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # Half of a surrogate pair, as in some file names; keep it as an escape.
        text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    except ValueError as error:  # Python writes no int of more than 4,300 digits.
        raise SchemaError(f"a value cannot be written as JSON: {error}; store it as a string") from error
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
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": _float_name(value)}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _to_plain(item, depth + 1) for key, item in value.items()}
        return {"$map": [[_to_plain(k, depth + 1), _to_plain(v, depth + 1)] for k, v in value.items()]}
    if isinstance(value, list):
        return [_to_plain(item, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [_to_plain(item, depth + 1) for item in value]}
    if isinstance(value, np.ndarray):
        return _array_to_plain(value, depth)
    if isinstance(value, np.generic):
        plain = _array_to_plain(np.asarray(value), depth)
        return {"$scalar": plain["$array"], "data": plain["data"]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return _array_to_plain(value.detach().cpu().numpy(), depth)
    raise SchemaError(
        f"a value of type {type(value).__name__} cannot be stored ({excerpt(value)}); "
        "give numbers, strings, lists, dicts, tuples, bytes or NumPy arrays"
    )


def _array_to_plain(array: NDArray[Any], depth: int) -> dict[str, Any]:
    kind = array.dtype.kind
    if kind == "O":
        data: Any = [_to_plain(item, depth + 1) for item in array.reshape(-1)]
    elif kind in "biu":
        data = array.reshape(-1).tolist()
    elif kind == "f" and array.dtype.itemsize <= 8:
        data = [item if math.isfinite(item) else _float_name(item) for item in array.reshape(-1).tolist()]
    elif kind == "U":
        data = array.reshape(-1).tolist()
    elif kind in "fcmMS":  # Wider floats too, because Python's float cannot hold them.
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    else:
        raise SchemaError(f"an array of dtype {array.dtype} cannot be stored inside a JSON value")
    return {"$array": array.dtype.str, "shape": list(array.shape), "data": data}


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
    if "$float" in value:
        return SPECIAL_FLOATS[value["$float"]]
    if "$bytes" in value:
        return _decode_base64(value["$bytes"])
    if "$map" in value:
        return _map_from_plain(value["$map"], depth)
    return {key: _from_plain(item, depth + 1) for key, item in value.items()}


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
    if dtype.kind == "U" and len(data) * dtype.itemsize > _MAX_PADDING + 4 * sum(map(len, data)):
        raise ValueError(f"texts of {len(data)} x {dtype.itemsize} bytes, most of it padding")
    if dtype.kind == "f":
        data = [item if type(item) in (int, float) else SPECIAL_FLOATS[item] for item in data]
    return np.array(data, dtype).reshape(shape)


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("base64 text is damaged") from error
