"""Gymnasium spaces in Minari's JSON, both ways, through rlio's own description of spaces, which is bounded.

Example:
    >>> space_of_minari('{"type": "Discrete", "dtype": "int64", "start": -1, "n": 3}')
    Discrete(3, start=-1)
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from rlio.errors import CorruptData, SchemaError, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.spaces import space_from_json

__all__ = ["space_of_minari", "space_to_minari"]

_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")
_MAX_DEPTH = 32


def space_of_minari(text: str, *, limits: Limits = DEFAULT_LIMITS) -> Any:
    """The space that Minari wrote as ``text``.

    Raises:
        CorruptData: It is not a space. (UnsafeData: it is too large.)
        SchemaError: It is a space that Minari does not have.
    """
    limits.check_json(text, "space")
    try:
        return space_from_json(_described(json.loads(text), 0))
    except (CorruptData, SchemaError):
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptData(f"not a space of Minari: {error!r} in {excerpt(text)}") from error


def _described(found: dict[str, Any], depth: int) -> dict[str, Any]:
    """Rlio's description of a space of Minari."""
    if depth > _MAX_DEPTH:
        raise CorruptData(f"a space nests more than {_MAX_DEPTH} deep")
    match kind := found["type"]:
        case "Box":
            shape, dtype = found["shape"], _dtype(found["dtype"])
            return {
                "type": kind,
                "dtype": dtype.str,
                "shape": shape,
                **{name: _bounds(found[name], dtype) for name in ("low", "high")},
            }
        case "Discrete":
            dtype = _dtype(found.get("dtype", "int64"))
            return {"type": kind, "dtype": dtype.str, "n": found["n"], "start": found.get("start", 0)}
        case "MultiDiscrete":
            nvec = np.array(found["nvec"])
            return {
                "type": kind,
                "dtype": _dtype(found.get("dtype", "int64")).str,
                "shape": list(nvec.shape),
                "nvec": nvec.reshape(-1).tolist(),
                "start": np.array(found["start"]).reshape(-1).tolist() if "start" in found else 0,
            }
        case "MultiBinary" | "Text":
            return dict(found)
        case "Dict":
            children = found["subspaces"].items()
            return {"type": kind, "spaces": [[key, _described(child, depth + 1)] for key, child in children]}
        case "Tuple":
            return {"type": kind, "spaces": [_described(child, depth + 1) for child in found["subspaces"]]}
    raise SchemaError(f"found a space of type {excerpt(kind)}, expected one that Minari has")


def _dtype(name: object) -> np.dtype[Any]:
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise CorruptData(f"found the dtype {excerpt(name)}, expected the name of one of NumPy's numbers")
    return np.dtype(name)


def _bounds(found: Any, dtype: np.dtype[Any]) -> list[Any]:
    flat = np.array(found, dtype).reshape(-1)
    values = (flat.view(np.uint8) if dtype.kind == "b" else flat).tolist()
    names = {np.inf: "Infinity", -np.inf: "-Infinity"}
    return [names.get(value, value) for value in values]


def space_to_minari(space: Any) -> dict[str, Any]:
    """A space as Minari describes it, to be written with `json.dumps`.

    Raises:
        SchemaError: Minari has no such space.
    """
    from gymnasium import spaces

    match space:
        case spaces.Box():
            low, high = space.low.tolist(), space.high.tolist()
            about = {"dtype": str(space.dtype), "shape": list(space.shape), "low": low, "high": high}
            return {"type": "Box", **about}
        case spaces.Discrete():
            return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
        case spaces.MultiDiscrete():
            numbers = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"type": "MultiDiscrete", "dtype": str(space.dtype), **numbers}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
        case spaces.Text():
            sizes = {"max_length": int(space.max_length), "min_length": int(space.min_length)}
            return {"type": "Text", **sizes, "charset": space.characters}
        case spaces.Dict():
            children = {key: space_to_minari(child) for key, child in space.spaces.items()}
            return {"type": "Dict", "subspaces": children}
        case spaces.Tuple():
            return {"type": "Tuple", "subspaces": [space_to_minari(child) for child in space.spaces]}
    raise SchemaError(f"Minari cannot hold a space of type {type(space).__name__}")
