"""The protocol of `PolicyServerInput` and `PolicyClient`: JSON over HTTP, and ``.npz`` for weights.

A command is a POST to ``/v1/<command>`` with the header ``Authorization: Bearer <token>`` and a JSON object:

| command | object | answer |
|---|---|---|
| ``start_episode`` | ``episode_id`` (str or null), ``training_enabled`` | ``{"episode_id": str}`` |
| ``get_action`` | ``episode_id``, ``observation`` | ``{"action": value}`` |
| ``log_action`` | ``episode_id``, ``observation``, ``action``, ``columns`` | ``{}`` |
| ``log_returns`` | ``episode_id``, ``reward``, ``info`` | ``{}`` |
| ``end_episode`` | ``episode_id``, ``observation`` (null: unknown), ``truncated`` | ``{}`` |
| ``get_spaces`` | | ``{"observation": space, "action": space, "explore": bool, "infos": bool}``, spaces as \
`rlio.schemas.space_to_json` |
| ``get_weights`` | | ``.npz``, with the version in the header ``X-Rlio-Weights-Seq-No``, and the \
environment steps of all clients in ``X-Rlio-Timestep`` |
| ``report_samples`` | two lines, not an object: a schema and a batch, as in JSON shards | ``{}`` |

Other fields are refused. ``episode_id`` of ``start_episode``, ``training_enabled``, ``columns``, ``info``,
``truncated`` and the observation of ``end_episode`` may be left out, or null; others may not.

A value is nested like its space: objects for Dict, lists for Tuple and Sequence, ``[index, value]`` for
OneOf, ``[nodes, edges, edge_links]`` for Graph. It must be in the space: NaN, and numbers outside of a Box's
bounds, are refused. An array is a list of lists or, faster, ``{"dtype": "<f4", "shape": [84, 84], "base64":
"..."}`` in C order. JSON has no NaN and no infinity: arrays and numbers with such values are packed in this
form, with the shape ``[]`` for a number. Rewards are finite numbers. An error is a status from 400 on and
``{"error": name of a class in rlio.errors, "message": str}``. A report may have the header
``X-Rlio-Report-Id``: a report with a known id is answered, but not taken again.

Example:
    >>> import numpy as np
    >>> to_json({"where": np.float32([0.5, 1.0]), "gear": np.int64(2)})
    {'where': [0.5, 1.0], 'gear': 2}
    >>> from_json(to_json(np.zeros((40, 40), np.uint8))).shape
    (40, 40)
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio import errors
from rlio.batch import SampleBatch
from rlio.errors import RlioError, SchemaError, excerpt
from rlio.schemas.json_lines import LineTooLarge, decode_line, encode_line
from rlio.schemas.schema import Schema

__all__ = [
    "PREFIX",
    "REPORT_ID",
    "TIMESTEP",
    "WEIGHTS_SEQ_NO",
    "batch_from_bytes",
    "batch_to_bytes",
    "error_class",
    "from_json",
    "pieces_to_bytes",
    "to_json",
]

PREFIX: Final = "/v1/"
WEIGHTS_SEQ_NO: Final = "X-Rlio-Weights-Seq-No"
TIMESTEP: Final = "X-Rlio-Timestep"
REPORT_ID: Final = "X-Rlio-Report-Id"

_ARRAY_KEYS: Final = {"dtype", "shape", "base64"}
# Larger arrays are packed, because as text each element takes several times its bytes, and much time.
_MOST_AS_TEXT: Final = 64
_KINDS: Final = "biuf"
# Lists of lists have as many levels as their array has axes, and NumPy allows 64, as stored infos do.
_MOST_LEVELS: Final = 64


def to_json(value: Any) -> Any:
    """Convert a nested value to JSON; see the module. Tensors are treated as arrays.

    Raises:
        SchemaError: A key of a dict is not a str, which JSON would make of it; or a dict has exactly the keys
            of a packed array.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value) or value.keys() == _ARRAY_KEYS:
            raise SchemaError(
                f"a dict has the keys {excerpt(list(value))}: expected keys of type str, and not just those "
                f"of a packed array, {sorted(_ARRAY_KEYS)}"
            )
        return {key: to_json(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        value = np.array(value)
    if isinstance(value, np.generic):
        value = np.array(value)
    if isinstance(value, np.ndarray):
        # Lists cannot express the axes after an empty one.
        has_shape = value.size > 0 or value.ndim < 2
        is_plain = has_shape and (value.dtype.kind != "f" or bool(np.isfinite(value).all()))
        if (value.size <= _MOST_AS_TEXT and is_plain) or value.dtype.kind not in _KINDS:
            return value.tolist()
        return {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "base64": base64.b64encode(value.tobytes()).decode(),
        }
    return value


def from_json(value: Any) -> Any:
    """Decode a nested value of `to_json`: packed arrays become arrays, other values are unchanged.

    Raises:
        SchemaError: A packed array is invalid, or lists are nested too deeply.
    """
    return _unpacked(value, _MOST_LEVELS)


def _unpacked(value: Any, levels: int) -> Any:
    if not levels:
        raise SchemaError(f"lists and objects have more than {_MOST_LEVELS} levels")
    if isinstance(value, list):
        return [_unpacked(part, levels - 1) for part in value] if _may_hold_arrays(value) else value
    if not isinstance(value, dict):
        return value
    if value.keys() != _ARRAY_KEYS:
        return {key: _unpacked(part, levels - 1) for key, part in value.items()}
    try:
        return _array(value["dtype"], value["shape"], value["base64"])
    except (TypeError, ValueError, SyntaxError, binascii.Error) as error:
        raise SchemaError(f"{excerpt(value)} is not a packed array: {excerpt(str(error))}") from error


def _array(kind: Any, shape: Any, text: Any) -> NDArray[Any]:
    if not isinstance(kind, str) or not isinstance(shape, list) or any(type(n) is not int for n in shape):
        raise TypeError("expected a str as dtype, and a list of whole numbers as shape")
    dtype, data = np.dtype(kind), base64.b64decode(text, validate=True)
    # Checked before an untrusted size allocates memory.
    if dtype.kind not in _KINDS or min(shape, default=0) < 0:
        raise ValueError(f"dtype {dtype} and shape {excerpt(shape)}")
    if len(data) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(data)} bytes for {excerpt(shape)} of {dtype}")
    if dtype.kind == "b":  # Bytes other than 0 and 1 would be neither True nor False.
        return np.not_equal(np.frombuffer(data, np.uint8), 0).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


def _may_hold_arrays(values: list[Any]) -> bool:
    return any(isinstance(value, (dict, list)) for value in values)


def batch_to_bytes(batch: SampleBatch) -> bytes:
    """A batch as two lines: its schema and its rows."""
    schema = Schema.of(batch)
    return schema.text.encode() + b"\n" + encode_line(batch, schema)


def pieces_to_bytes(batch: SampleBatch) -> list[bytes]:
    """`batch_to_bytes`, cut into as many pieces as needed: a line has at most 64 MiB.

    Raises:
        SchemaError: A single row is too large, or invalid.
    """
    try:
        return [batch_to_bytes(batch)]
    except LineTooLarge:
        if len(batch) < 2:
            raise
        half = len(batch) // 2
        return pieces_to_bytes(batch[:half]) + pieces_to_bytes(batch[half:])


def batch_from_bytes(data: bytes) -> SampleBatch:
    """Decode a batch of `batch_to_bytes` from an untrusted source.

    Raises:
        RlioError: The data is not a batch, is damaged, or exceeds the limits.
    """
    text, separator, line = data.partition(b"\n")
    if not separator:
        raise SchemaError("expected two lines, a schema and a batch, but found one")
    try:
        schema = Schema.from_text(text.decode())
    except UnicodeDecodeError as error:
        raise SchemaError(f"the schema is not UTF-8: {error}") from error
    found = decode_line(line.rstrip(b"\n"), lambda name: _the_schema(schema, name))
    if not isinstance(found, SampleBatch):
        raise SchemaError("samples of several policies are not reported to a policy server")
    return found


def _the_schema(schema: Schema, name: str) -> Schema:
    if name != schema.hash:
        raise SchemaError(f"the batch has the schema {excerpt(name)}, but {schema.hash} came with it")
    return schema


def error_class(name: str) -> type[RlioError] | None:
    """The class in `rlio.errors` with this name; None if there is none."""
    found = getattr(errors, name, None) if name in errors.__all__ else None
    return found if isinstance(found, type) and issubclass(found, RlioError) else None
