"""The msgpack of RLlib's episodes: values, arrays as `msgpack_numpy` packs them, and RLlib's spaces.

Arrays are decoded by a hook of our own. Arrays of objects, which are pickles, are refused.

Not here: what an episode is made of (`rlio.formats.rllib.episodes`).
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import numpy as np

from rlio.errors import CorruptData, SchemaError, UnsafeData, excerpt
from rlio.formats.files.allowance import Allowance
from rlio.limits import Limits
from rlio.support.extras import needs

__all__ = ["msgpack", "pack", "read_keys", "space_from_rllib", "space_to_rllib", "unpack"]

_DTYPE: Final = re.compile(r"[<>|=](?:b1|[iu][1248]|f[248]|c8|c16|[SU][1-9]\d{0,5})")
# Bytes of the header of an array in numpy's file format.
_NPY_HEADER: Final = 4096


def msgpack() -> Any:
    """The module ``msgpack``.

    Raises:
        MissingExtra: It is not installed.
    """
    with needs("msgpack", "msgpack"):
        return import_module("msgpack")


# ---- reading ----


class _Hooks:
    """What msgpack calls for each map and list that it has decoded."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance, limits = allowance, allowance.limits
        self.options: dict[str, Any] = {
            "object_hook": self._map,
            "list_hook": self._list,
            "ext_hook": self._extension,
            # So that a length in a header reserves no more than this before a value is read.
            "max_array_len": limits.packed_values,
            "max_map_len": limits.packed_values,
        }

    def _map(self, found: dict[Any, Any]) -> Any:
        if b"nd" in found:
            self._allowance.count(1)
            return self._array(found)
        if b"complex" in found:
            raise CorruptData("a complex number outside an array is not read")
        self._allowance.count(1 + len(found))
        return found

    def _list(self, found: list[Any]) -> list[Any]:
        self._allowance.count(1 + len(found))
        return found

    def _extension(self, code: int, data: bytes) -> Any:
        raise UnsafeData(f"msgpack extension {code} of {len(data)} bytes: no episode needs one")

    def _array(self, found: dict[Any, Any]) -> Any:
        dtype, data = found.get(b"type"), found.get(b"data")
        if found.get(b"kind") == b"O" or dtype == "|O":
            raise UnsafeData("an array of objects, which is a pickle: pickles are not loaded")
        if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype) or not isinstance(data, bytes):
            raise CorruptData(f"an array of dtype {excerpt(dtype, 40)}: expected numbers or texts")
        is_array = found[b"nd"] is True
        shape = found.get(b"shape") if is_array else []
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise CorruptData(f"an array of shape {excerpt(shape, 80)}")
        kind = np.dtype(dtype)
        if len(shape) > 32 or math.prod(shape) * kind.itemsize != len(data):
            raise CorruptData(f"an array of shape {excerpt(shape, 80)} and {kind} in {len(data)} bytes")
        self._allowance.spend(len(data))
        array = np.frombuffer(data, kind).reshape(shape).astype(kind.newbyteorder("="), copy=False)
        return array if is_array else array[()]


def unpack(data: bytes, *, allowance: Allowance) -> Any:
    """Decode a message; arrays are read-only views of their bytes.

    Raises:
        UnsafeData: It holds a pickle, or more than ``allowance``.
        CorruptData: It is damaged.
    """
    with _damage_named():
        return msgpack().unpackb(data, **_Hooks(allowance).options)


@contextmanager
def _damage_named() -> Iterator[None]:
    """Turn msgpack's errors about damage into CorruptData."""
    try:
        yield
    except CorruptData:
        raise
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack().UnpackException) as error:
        raise CorruptData(f"damaged msgpack: {excerpt(str(error) or type(error).__name__)}") from error


def read_keys(data: bytes, wanted: Collection[str], *, allowance: Allowance) -> dict[str, Any]:
    """Return the values of some keys of a message that is a map; the values of other keys are skipped.

    Keys that are not wanted and stand there have the value None.

    Raises:
        CorruptData: It is damaged, or not a map.
    """
    found: dict[str, Any] = {}
    with _damage_named():
        unpacker = msgpack().Unpacker(max_buffer_size=len(data), **_Hooks(allowance).options)
        unpacker.feed(data)
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            if not isinstance(key, str):
                raise CorruptData(f"found the key {excerpt(key, 40)}, expected a name")
            if key in wanted:
                found[key] = unpacker.unpack()
            else:
                unpacker.skip()
                found[key] = None
    return found


# ---- writing ----


def pack(value: Any) -> bytes:
    """Encode as RLlib does, with `msgpack_numpy`'s form of arrays.

    Raises:
        SchemaError: A value is neither plain nor an array of numbers or texts, or a key is no text, which
            RLlib does not read.
    """
    _check_keys(value)
    try:
        packed: bytes = msgpack().packb(value, default=_encode)
    except (TypeError, ValueError, OverflowError) as error:
        raise SchemaError(f"msgpack cannot hold a value: {excerpt(str(error))}") from error
    return packed


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise SchemaError(f"found the key {excerpt(key, 40)}, expected a text: RLlib reads no other")
            _check_keys(part)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_keys(part)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray) and _DTYPE.fullmatch(value.dtype.str):
        return {
            b"nd": True,
            b"type": value.dtype.str,
            b"kind": b"",
            b"shape": value.shape,
            b"data": value.tobytes(),
        }
    if isinstance(value, np.bool_ | np.number) and _DTYPE.fullmatch(value.dtype.str):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(f"{type(value).__name__} {excerpt(value, 80)}")


# ---- spaces ----


def space_from_rllib(described: Any, *, limits: Limits, depth: int = 0) -> Any:
    """The gymnasium space that RLlib described; None for None, and for kinds that only RLlib has.

    Raises:
        CorruptData: It does not describe a space.
    """
    if described is None:
        return None
    if not isinstance(described, dict) or depth > limits.nesting:
        raise CorruptData(f"{excerpt(described, 80)} does not describe a space")
    try:
        return _space(described, limits, depth)
    except CorruptData:
        raise
    except (ValueError, TypeError, KeyError, AssertionError, AttributeError) as error:
        raise CorruptData(f"{excerpt(described, 80)} is not a space: {excerpt(str(error))}") from error


def _space(described: dict[str, Any], limits: Limits, depth: int) -> Any:
    import gymnasium as gym

    spaces, kind = gym.spaces, described["space"]

    def inner(child: Any) -> Any:
        return space_from_rllib(child, limits=limits, depth=depth + 1)

    def dtype() -> np.dtype[Any]:
        if not _DTYPE.fullmatch(described["dtype"]):
            raise ValueError(f"dtype {excerpt(described['dtype'], 40)}")
        found: np.dtype[Any] = np.dtype(described["dtype"])
        return found

    if kind == "box":
        low, high = (_bounds(described[name], limits) for name in ("low", "high"))
        return spaces.Box(low, high, tuple(described["shape"]), dtype().type)
    if kind == "discrete":
        return spaces.Discrete(described["n"], start=described.get("start", 0))
    if kind == "multi-binary":
        return spaces.MultiBinary(described["n"])
    if kind == "multi-discrete":
        return spaces.MultiDiscrete(_bounds(described["nvec"], limits), dtype=dtype().type)
    if kind == "text":
        return spaces.Text(
            described["max_length"], min_length=described["min_length"], charset=described["charset"]
        )
    if kind == "tuple":
        parts = [inner(child) for child in described["spaces"]]
        return None if None in parts else spaces.Tuple(parts)
    if kind == "dict":
        named = {name: inner(child) for name, child in described["spaces"].items()}
        return None if None in named.values() else spaces.Dict(list(named.items()))
    return None


def _bounds(text: Any, limits: Limits) -> np.ndarray:
    """An array in numpy's file format, deflated, as base64."""
    try:
        inflater = zlib.decompressobj()
        content = inflater.decompress(base64.b64decode(text, validate=True), limits.schema_bytes)
    except (binascii.Error, zlib.error, TypeError, ValueError) as error:
        raise CorruptData(f"bounds of a space are damaged: {error}") from error
    if inflater.unconsumed_tail:
        raise UnsafeData(f"bounds of a space take more than {limits.schema_bytes} bytes")
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(stream, max_header_size=_NPY_HEADER)
    rest = content[stream.tell() :]
    if not _DTYPE.fullmatch(dtype.str) or math.prod(shape) * dtype.itemsize != len(rest):
        raise CorruptData(f"bounds of a space: {dtype} of shape {shape} in {len(rest)} bytes")
    return np.frombuffer(rest, dtype).reshape(shape, order="F" if fortran else "C")


def space_to_rllib(space: Any) -> Any:
    """What RLlib writes of a space; None for None.

    Raises:
        SchemaError: RLlib cannot describe it.
    """
    import gymnasium as gym

    spaces = gym.spaces
    if space is None:
        return None
    if isinstance(space, spaces.Box):
        return {
            "space": "box",
            "low": _text_of(space.low),
            "high": _text_of(space.high),
            "shape": list(space.shape),
            "dtype": space.dtype.str,
        }
    if isinstance(space, spaces.Discrete):
        return {"space": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiBinary):
        return {"space": "multi-binary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"space": "multi-discrete", "nvec": _text_of(space.nvec), "dtype": space.dtype.str}
    if isinstance(space, spaces.Text):
        return {
            "space": "text",
            "min_length": space.min_length,
            "max_length": space.max_length,
            "charset": space.characters,
        }
    if isinstance(space, spaces.Tuple):
        return {"space": "tuple", "spaces": [space_to_rllib(part) for part in space.spaces]}
    if isinstance(space, spaces.Dict):
        parts = {name: space_to_rllib(part) for name, part in space.spaces.items()}
        return {"space": "dict", "spaces": parts}
    raise SchemaError(f"RLlib cannot describe the space {excerpt(space)}")


def _text_of(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return base64.b64encode(zlib.compress(stream.getvalue())).decode("ascii")
