"""Gymnasium spaces as JSON, and back: a fixed grammar, exact, without code from data.

Ten types can be written: Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict, Tuple, Sequence, Graph,
OneOf. Arrays (bounds, ``nvec``, ``start``) are flat lists in C order, or one number if all are equal.
Infinities are the strings ``"Infinity"`` and ``"-Infinity"``. Every field is written, including defaults, so
two spaces are equal exactly if their JSON is equal (gymnasium's own ``==`` accepts slightly different
bounds).

Not written: the state of a space's random generator, and the class of a subclass (it is written as the
gymnasium space from which it derives).

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box
    >>> space_to_json(Box(-np.inf, np.inf, (4,), np.float32))
    {'type': 'Box', 'dtype': '<f4', 'shape': [4], 'low': '-Infinity', 'high': 'Infinity'}
    >>> space_from_json({"type": "Discrete", "dtype": "<i8", "n": 3, "start": -1})
    Discrete(3, start=-1)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.errors import CorruptData, RlioError, SchemaError, UnsafeData, excerpt

if TYPE_CHECKING:
    from gymnasium import Space

__all__ = ["space_from_json", "space_to_json"]

Json: TypeAlias = dict[str, Any]  # of a fixed grammar that Python's types cannot express

# Descriptions may be hostile. Deeper or larger ones have no known use: 2^24 elements are 200 frames of
# 84x84x12, and cost a reader at most 300 MB of bounds.
_MAX_DEPTH = 32
_MAX_SPACES = 4096
_MAX_ELEMENTS = 1 << 24
_MAX_NDIM = 32
_MAX_TEXT = 1 << 21  # all of Unicode fits

_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


def space_to_json(space: Space[Any]) -> Json:
    """Describe ``space`` in JSON.

    Args:
        space: A gymnasium space of one of the ten types, or a subclass, nested at most 32 deep.

    Returns:
        A new dict of lists, strings and numbers, with only values that JSON has (no NaN, no infinities).

    Raises:
        SchemaError: A space of another type, a Dict with keys that are not strings, or a space past the
            limits.
    """
    try:
        return _write(space, 0, _Room())
    except UnsafeData as error:
        raise SchemaError(f"this space cannot be stored: {error}") from error


def space_from_json(described: object) -> Space[Any]:
    """Make the space that `space_to_json` described; ``described`` may be hostile.

    Returns:
        A new space, with its random generator not yet seeded.

    Raises:
        SchemaError: The type is not one of the ten.
        CorruptData: A field is missing, of the wrong type or illegal.
        UnsafeData: The description nests too deep or would take too much memory.
    """
    return _read(described, 0, _Room())


class _Room:
    """The spaces and array elements that one description may still use."""

    def __init__(self) -> None:
        self.spaces = _MAX_SPACES
        self.elements = _MAX_ELEMENTS

    def enter(self, depth: int) -> None:
        self.spaces -= 1
        if depth > _MAX_DEPTH or self.spaces < 0:
            raise UnsafeData(f"a space of more than {_MAX_SPACES} spaces or nested over {_MAX_DEPTH} deep")

    def take(self, shape: tuple[int, ...]) -> None:
        self.elements -= math.prod(shape)
        if len(shape) > _MAX_NDIM or self.elements < 0:
            raise UnsafeData(
                f"a space with an array of shape {excerpt(shape)}: at most {_MAX_NDIM} axes, "
                f"and {_MAX_ELEMENTS} elements in all"
            )


# ---- writing ----


def _write(space: Space[Any], depth: int, room: _Room) -> Json:
    from gymnasium import spaces

    room.enter(depth)

    def inner(child: Space[Any]) -> Json:
        return _write(child, depth + 1, room)

    match space:
        case spaces.Box():
            return _write_box(space, room)
        case spaces.Discrete():
            return {
                "type": "Discrete",
                "dtype": np.dtype(space.dtype).str,
                "n": int(space.n),
                "start": int(space.start),
            }
        case spaces.MultiDiscrete():
            return _write_multi_discrete(space, room)
        case spaces.MultiBinary():
            room.take(space.shape)
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
        case spaces.Text():
            return _write_text(space)
        case spaces.Dict():
            for key in space.spaces:
                if not isinstance(key, str):
                    raise SchemaError(f"a Dict space has the key {excerpt(key)}; only strings can be stored")
            # Pairs, not an object: the order is part of the space, and canonical JSON sorts keys.
            return {"type": "Dict", "spaces": [[key, inner(child)] for key, child in space.spaces.items()]}
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [inner(child) for child in space.spaces]}
        case spaces.OneOf():
            return {"type": "OneOf", "spaces": [inner(child) for child in space.spaces]}
        case spaces.Sequence():
            return {"type": "Sequence", "stack": bool(space.stack), "space": inner(space.feature_space)}
        case spaces.Graph():
            edges = None if space.edge_space is None else inner(space.edge_space)
            return {"type": "Graph", "nodes": inner(space.node_space), "edges": edges}
        case _:
            raise SchemaError(
                f"a space of type {type(space).__name__} cannot be stored; use {', '.join(_READERS)}, "
                "or record without spaces"
            )


def _write_box(space: Any, room: _Room) -> Json:
    dtype = np.dtype(space.dtype)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise SchemaError(f"a Box of dtype {dtype} cannot be stored; use a dtype of 8 bytes or less")
    room.take(space.shape)
    # A signed integer Box keeps "unbounded" beside the bounds, which then hold the dtype's extremes.
    low: Any = _values_to_json(space.low, infinite=~space.bounded_below, name="-Infinity")
    high: Any = _values_to_json(space.high, infinite=~space.bounded_above, name="Infinity")
    return {"type": "Box", "dtype": dtype.str, "shape": list(space.shape), "low": low, "high": high}


def _write_multi_discrete(space: Any, room: _Room) -> Json:
    room.take(space.shape)
    return {
        "type": "MultiDiscrete",
        "dtype": np.dtype(space.dtype).str,
        "shape": list(space.shape),
        "nvec": _values_to_json(space.nvec),
        "start": _values_to_json(space.start),
    }


def _write_text(space: Any) -> Json:
    charset = "".join(space.character_list)
    if any("\ud800" <= character <= "\udfff" for character in charset):
        raise SchemaError(
            "a Text space's charset holds half a surrogate pair, which UTF-8 cannot encode; leave it out"
        )
    return {
        "type": "Text",
        "min_length": int(space.min_length),
        "max_length": int(space.max_length),
        "charset": charset,
    }


def _values_to_json(
    array: NDArray[Any], *, infinite: NDArray[np.bool_] | None = None, name: str = ""
) -> int | float | str | list[Any]:
    """Return one number if all are equal (including the sign: -0.0 is not 0.0), else the flat list.

    Elements marked in ``infinite`` are written as ``name``; their values in the array are ignored.
    """
    flat = array.reshape(-1)
    marks = None if infinite is None else infinite.reshape(-1)
    uniform = flat.size > 0 and bool(
        (flat == flat[0]).all() and (np.signbit(flat) == np.signbit(flat[0])).all()
    )
    if uniform and marks is not None:
        uniform = bool((marks == marks[0]).all())
    if uniform:
        flat, marks = flat[:1], marks if marks is None else marks[:1]
    values = (flat.view(np.uint8) if flat.dtype.kind == "b" else flat).tolist()
    listed = [_number_to_json(value) for value in values]
    if marks is not None:
        listed = [name if mark else value for value, mark in zip(listed, marks.tolist(), strict=True)]
    return listed[0] if uniform else listed


def _number_to_json(value: float) -> float | str:
    """Return ``value``, or the name of an infinity (a low bound may be +Infinity, if the high one is too)."""
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


# ---- reading ----


def _read(described: object, depth: int, room: _Room) -> Space[Any]:
    room.enter(depth)
    if not isinstance(described, Mapping) or not isinstance(described.get("type"), str):
        raise CorruptData(f"not a space: expected an object with a type, found {excerpt(described)}")
    reader = _READERS.get(described["type"])
    if reader is None:
        raise SchemaError(
            f"a space of unknown type {excerpt(described['type'])}; this rlio knows {', '.join(_READERS)}"
        )
    names, make = reader
    if set(described) != {"type", *names}:
        raise CorruptData(
            f"a {described['type']} space has the fields type, {', '.join(names)}; "
            f"found {excerpt(list(described))}"
        )
    try:
        return make(described, depth + 1, room)
    except RlioError:
        raise
    # Other problems that gymnasium or NumPy find with the numbers; both also use assertions.
    except (ValueError, TypeError, AssertionError, ArithmeticError) as error:
        raise CorruptData(f"not a {described['type']} space: {error}; found {excerpt(described)}") from error


def _read_box(described: Mapping[str, Any], depth: int, room: _Room) -> Space[Any]:
    from gymnasium.spaces import Box

    dtype, shape = _dtype(described["dtype"], "biuf"), _shape(described["shape"], room)
    low, no_low = _bounds(described["low"], shape, dtype, "-Infinity")
    high, no_high = _bounds(described["high"], shape, dtype, "Infinity")
    box: Any = Box(low, high, shape, dtype)
    box.bounded_below, box.bounded_above = ~no_low, ~no_high
    return box  # type: ignore[no-any-return]  # Any, because the two fields are typed read-only


def _read_discrete(described: Mapping[str, Any], depth: int, room: _Room) -> Space[Any]:
    from gymnasium.spaces import Discrete

    dtype = _dtype(described["dtype"], "iu")
    n, start = _integer(described["n"], 1), _integer(described["start"])
    # Gymnasium casts silently, so check that both ends are values of the dtype.
    np.array([n, start, start + n - 1], dtype)
    return Discrete(n, start=start, **_unless_int64(dtype))


def _read_multi_discrete(described: Mapping[str, Any], depth: int, room: _Room) -> Space[Any]:
    from gymnasium.spaces import MultiDiscrete

    dtype, shape = _dtype(described["dtype"], "iu"), _shape(described["shape"], room)
    nvec, start = _integers(described["nvec"], shape, dtype), _integers(described["start"], shape, dtype)
    space: Space[Any] = MultiDiscrete(nvec, dtype=dtype, start=start)
    return space


def _read_multi_binary(described: Mapping[str, Any], depth: int, room: _Room) -> Space[Any]:
    from gymnasium.spaces import MultiBinary

    n = described["n"]
    shape = _shape(n if isinstance(n, list) else [n], room)
    return MultiBinary(list(shape) if isinstance(n, list) else shape[0])


def _read_text(described: Mapping[str, Any], depth: int, room: _Room) -> Space[Any]:
    from gymnasium.spaces import Text

    charset = described["charset"]
    if not isinstance(charset, str) or len(charset) > _MAX_TEXT:
        raise CorruptData(
            f"a charset is a string of at most {_MAX_TEXT} characters; found {excerpt(charset)}"
        )
    shortest, longest = _integer(described["min_length"], 0), _integer(described["max_length"], 0)
    return Text(longest, min_length=shortest, charset=charset)


def _read_dict(described: Mapping[str, Any], depth: int, room: _Room) -> Space[Any]:
    from gymnasium.spaces import Dict

    children: OrderedDict[str, Space[Any]] = OrderedDict()
    for pair in _list(described["spaces"]):
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not isinstance(pair[0], str)
            or pair[0] in children
        ):
            raise CorruptData(f"a Dict's spaces are [key, space] with different keys; found {excerpt(pair)}")
        children[pair[0]] = _read(pair[1], depth, room)
    return Dict(children)


def _read_tuple(described: Mapping[str, Any], depth: int, room: _Room) -> Space[Any]:
    from gymnasium.spaces import Tuple

    return Tuple([_read(child, depth, room) for child in _list(described["spaces"])])


def _read_one_of(described: Mapping[str, Any], depth: int, room: _Room) -> Space[Any]:
    from gymnasium.spaces import OneOf

    return OneOf([_read(child, depth, room) for child in _list(described["spaces"])])


def _read_sequence(described: Mapping[str, Any], depth: int, room: _Room) -> Space[Any]:
    from gymnasium.spaces import Sequence

    if not isinstance(described["stack"], bool):
        raise CorruptData(f"a Sequence's stack is true or false; found {excerpt(described['stack'])}")
    return Sequence(_read(described["space"], depth, room), stack=described["stack"])


def _read_graph(described: Mapping[str, Any], depth: int, room: _Room) -> Space[Any]:
    from gymnasium.spaces import Graph

    edges = described["edges"]
    return Graph(_read(described["nodes"], depth, room), None if edges is None else _read(edges, depth, room))


_READERS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], int, _Room], Space[Any]]]] = {
    "Box": (("dtype", "shape", "low", "high"), _read_box),
    "Discrete": (("dtype", "n", "start"), _read_discrete),
    "MultiDiscrete": (("dtype", "shape", "nvec", "start"), _read_multi_discrete),
    "MultiBinary": (("n",), _read_multi_binary),
    "Text": (("min_length", "max_length", "charset"), _read_text),
    "Dict": (("spaces",), _read_dict),
    "Tuple": (("spaces",), _read_tuple),
    "Sequence": (("stack", "space"), _read_sequence),
    "Graph": (("nodes", "edges"), _read_graph),
    "OneOf": (("spaces",), _read_one_of),
}


# ---- the values of fields ----


def _dtype(text: object, kinds: str) -> np.dtype[Any]:
    # Accept only the form of dtype.str: np.dtype() also takes records, aliases and comma lists.
    if not isinstance(text, str) or len(text) != 3 or text[0] not in "<>|" or text[1] not in kinds:
        raise CorruptData(f"a dtype is written as '<f4' and of kind {'/'.join(kinds)}; found {excerpt(text)}")
    return np.dtype(text)


def _shape(listed: object, room: _Room) -> tuple[int, ...]:
    shape = tuple(_integer(length, 0) for length in _list(listed))
    room.take(shape)
    return shape


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise CorruptData(f"expected a list; found {excerpt(value)}")
    return value


def _integer(value: object, least: int | None = None) -> int:
    if type(value) is not int or (least is not None and value < least):
        wanted = "an integer" if least is None else f"an integer of at least {least}"
        raise CorruptData(f"expected {wanted}; found {excerpt(value)}")
    return value


def _integers(value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if isinstance(value, list):
        return np.array([_integer(item) for item in value], dtype).reshape(shape)
    return np.full(shape, np.array(_integer(value), dtype), dtype)


def _bounds(
    value: object, shape: tuple[int, ...], dtype: np.dtype[Any], unbounded: str
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return (bounds, mask of those that are the infinity named ``unbounded``)."""
    listed = value if isinstance(value, list) else [value]
    none = np.array([item == unbounded for item in listed], np.bool_)
    if dtype.kind == "f":
        wide = np.array(
            [_INFINITIES[item] if item in _INFINITIES else _number(item) for item in listed], np.float64
        )
        with np.errstate(over="raise"):
            array = wide.astype(dtype)
    else:
        if none.any() and dtype.kind != "i":
            raise CorruptData(f"a Box of dtype {dtype} has bounds; found {unbounded!r}")
        info = np.iinfo(np.uint8 if dtype.kind == "b" else dtype)
        extreme = info.min if unbounded == "-Infinity" else info.max
        array = np.array([extreme if item == unbounded else _integer(item) for item in listed], info.dtype)
        if dtype.kind == "b" and array.max(initial=0) > 1:
            raise CorruptData(f"a bool's bounds are 0 and 1; found {excerpt(value)}")
        array = array.astype(dtype)
    if isinstance(value, list):
        return array.reshape(shape), none.reshape(shape)
    return np.full(shape, array[0], dtype), np.full(shape, none[0])


def _number(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]  # just checked
        raise CorruptData(f"expected a number, 'Infinity' or '-Infinity'; found {excerpt(value)}")
    return float(value)  # type: ignore[arg-type]  # just checked


def _unless_int64(dtype: np.dtype[Any]) -> dict[str, Any]:
    """Return the dtype as a keyword, unless it is the default: older gymnasium's Discrete has no other."""
    return {} if dtype == np.int64 else {"dtype": dtype}
