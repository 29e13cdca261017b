"""`Structure`: the type of rows that consist of parts, such as lists of texts and values of Graph spaces.

Rows of one structure are stored as lists and structs of Arrow (`rlio.schemas.nested`), not as JSON text. A
structure is exact: it fits a value only if the value comes back with the same types.

Example:
    >>> structure = structure_of([["a", "b"], []])
    >>> structure
    list[str]
    >>> structure.taken(["c"])
    ['c']
    >>> structure.taken(["c", 3])
    Traceback (most recent call last):
        ...
    ValueError: int, expected str
"""

from __future__ import annotations

import datetime
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.errors import excerpt
from rlio.schemas.times import TIME_FORMS, TimeForm, form_of, text_of, time_of

__all__ = [
    "PARQUET_TYPES",
    "Structure",
    "is_structured",
    "packed",
    "structure_of",
    "structure_of_space",
    "text_array",
]

#: ``array``: an array of one shape, or a scalar of NumPy; ``rows``: an array whose first axis varies;
#: ``text``: a ``str``; ``bytes``: those; ``datetime``, ``utc``,
#: ``date``: as in `rlio.schemas.times`; ``texts``: an array of texts with one axis; ``list``, ``tuple``: any
#: number of parts of one structure; ``dict``, ``places``: a dict, or a tuple, with a structure for each part;
#: ``graph``: a ``GraphInstance``.
Form: TypeAlias = Literal[
    "array", "rows", "text", "bytes", TimeForm, "texts", "list", "tuple", "dict", "places", "graph"
]

#: The dtypes of arrays, without their byte order.
PARQUET_TYPES: Final = frozenset(("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"))
_MANY = ("list", "tuple")
#: The parts of a graph; those after the first are None if it has no edges.
GRAPH: Final = ("nodes", "edges", "edge_links")
_LINK: Final = (2,)
_MAX_DEPTH = 8
_MAX_PARTS = 256
_MAX_NDIM = 32
_MAX_ITEMS = 1 << 25
_FIRST: Final = {
    "datetime": "1970-01-01T00:00:00",
    "utc": "1970-01-01T00:00:00+00:00",
    "date": "1970-01-01",
}
_DTYPES: Final = {"texts": ("<U", "|O")}


@dataclass(frozen=True, repr=False)
class Structure:
    """The type of a value that consists of parts.

    Attributes:
        form: What the value is.
        dtype: Of arrays: NumPy's ``dtype.str``; of ``texts`` ``"<U"`` or ``"|O"``.
        shape: Of an array, or of an item of ``rows``.
        parts: Name and structure of each part: of a list or tuple, one that all parts have.
    """

    form: Form
    dtype: str = ""
    shape: tuple[int, ...] = ()
    parts: tuple[tuple[str, Structure], ...] = ()

    @property
    def item(self) -> Structure:
        """The structure of each part of a list or tuple."""
        return self.parts[0][1]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype of arrays."""
        return np.dtype(self.dtype)

    def __repr__(self) -> str:
        """For people, as `rlio.look` shows it."""
        match self.form:
            case "text":
                return "str"
            case "bytes":
                return "bytes"
            case "texts":
                return "str[n]"
            case "array" | "rows":
                axes = ("n", *self.shape) if self.form == "rows" else self.shape
                return f"{self.numpy.name}[{', '.join(map(str, axes))}]" if axes else self.numpy.name
            case "utc":
                return "datetime[UTC]"
            case "datetime" | "date":
                return self.form
            case "list" | "tuple":
                return f"{self.form}[{self.item!r}]"
        inner = ", ".join(f"{name}: {part!r}" for name, part in self.parts)
        return f"{'tuple' if self.form == 'places' else self.form}({inner})"

    @property
    def depth(self) -> int:
        """How deep the parts are nested; 0: it has none."""
        return max((part.depth + 1 for _, part in self.parts), default=0)

    @property
    def has_padding(self) -> bool:
        """Whether a part is an array of texts, to each of which NumPy gives the width of the longest."""
        return self.dtype == "<U" or any(part.has_padding for _, part in self.parts)

    # ---- values ----

    def taken(self, value: Any) -> Any:
        """A checked copy of a value.

        Raises:
            ValueError: The value is of another structure; the message says where.
        """
        return _TAKE[self.form](self, value)

    def blank(self) -> Any:
        """The value that stands for one that is missing: no items, zeros, empty texts."""
        match self.form:
            case "text":
                return ""
            case "bytes":
                return b""
            case "datetime" | "utc" | "date":
                return time_of(_FIRST[self.form], self.form)
            case "texts":
                return np.empty(0, object if self.dtype == "|O" else "<U1")
            case "array":
                zeros = np.zeros(self.shape, self.numpy)
                return zeros if self.shape else zeros[()]
            case "rows":
                return np.empty((0, *self.shape), self.numpy)
            case "list":
                return []
            case "tuple":
                return ()
            case "graph":
                return _graph(self.parts[0][1].blank(), None, None)
        return self.named([part.blank() for _, part in self.parts])

    def named(self, values: Sequence[Any]) -> Any:
        """The value with these parts, in order: a dict, tuple or graph."""
        if self.form == "dict":
            return dict(zip((name for name, _ in self.parts), values, strict=True))
        return tuple(values) if self.form == "places" else _graph(*values, *[None] * (3 - len(values)))

    def unpacked(self, data: bytes) -> Any:
        """The value of `packed`.

        Raises:
            ValueError: The bytes are not those of such a value.
        """
        match self.form:
            case "text":
                return data.decode()
            case "bytes":
                return data
            case "datetime" | "utc" | "date":
                return time_of(data.decode(), self.form)
            case "array":
                values = np.frombuffer(bytearray(data), self.numpy).reshape(self.shape)
                return values if self.shape else values[()]
            case "rows":
                return np.frombuffer(bytearray(data), self.numpy).reshape(-1, *self.shape)
        found = _cut(data)
        if self.form == "texts":
            return text_array([text.decode() for text in found], self.dtype)
        if self.form in _MANY:
            parts = [self.item.unpacked(part) for part in found]
            return parts if self.form == "list" else tuple(parts)
        if self.form == "graph" and len(found) == 1:
            found += [None] * (len(self.parts) - 1)
        return self.named(
            [
                None if part is None else one.unpacked(part)
                for (_, one), part in zip(self.parts, found, strict=True)
            ]
        )

    def sizes(self, values: Sequence[Any]) -> NDArray[np.int64]:
        """About the bytes of each value; of texts, their characters."""
        match self.form:
            case "text" | "bytes":
                return _lengths(values)
            case "datetime" | "utc" | "date":
                return np.full(len(values), 8, np.int64)
            case "array":
                return np.full(len(values), self.item_bytes, np.int64)
            case "rows":
                return _lengths(values) * self.item_bytes
            case "list" | "tuple" | "texts":
                item = _TEXT if self.form == "texts" else self.item
                lengths = _lengths(values)
                if item.form == "text" and self.form != "texts":  # A join is the fastest way to measure them.
                    return _lengths(["".join(value) for value in values]) + 8 * lengths
                ends = np.cumsum(lengths)
                before = np.cumsum([0, *item.sizes([*chain.from_iterable(values)])])
                sums: NDArray[np.int64] = before[ends] - before[ends - lengths]
                return sums + 8 * lengths
        total = np.full(len(values), 8 * len(self.parts), np.int64)
        for number, (name, part) in enumerate(self.parts):
            given = [value[name if self.form == "dict" else number] for value in values]
            total[[each is not None for each in given]] += part.sizes([e for e in given if e is not None])
        return total

    @property
    def item_bytes(self) -> int:
        """Bytes of an array, or of an item of ``rows``."""
        return self.numpy.itemsize * math.prod(self.shape)

    # ---- the written form ----

    def to_json(self) -> dict[str, Any]:
        """The written form; see docs/format.md."""
        written: dict[str, Any] = {"form": self.form}
        if self.dtype:
            written["dtype"] = self.dtype
        if self.form in ("array", "rows"):
            written["shape"] = list(self.shape)
        if self.parts:
            written["parts"] = [[name, part.to_json()] for name, part in self.parts]
        return written

    @classmethod
    def from_json(cls, written: Any, *, depth: int = 0) -> Structure:
        """Parse the written form, which may be hostile.

        Raises:
            ValueError: It is not legal.
        """
        if not isinstance(written, dict) or depth > _MAX_DEPTH or len(written.get("parts", ())) > _MAX_PARTS:
            raise ValueError(f"a structure of over {_MAX_PARTS} parts, or nested over {_MAX_DEPTH} deep")
        parts = tuple((name, cls.from_json(part, depth=depth + 1)) for name, part in written.get("parts", ()))
        shape = tuple(written.get("shape", ()))
        found = cls(written["form"], written.get("dtype", ""), shape, parts)
        found._check()
        return found

    def _check(self) -> None:
        names, is_array = [name for name, _ in self.parts], self.form in ("array", "rows")
        expected: dict[str, list[str]] = {
            "list": [""],
            "tuple": [""],
            "dict": names,
            "places": [*map(str, range(len(names)))],
            "graph": [*(GRAPH if len(names) > 1 else GRAPH[:1])],
        }
        if self.form not in get_args(Form) or names != expected.get(self.form, []):
            raise ValueError(f"illegal form {excerpt(self.form)} of the parts {excerpt(names)}")
        is_open = self.form in expected and not names
        if is_open or {*map(type, names)} - {str} or len({*names}) != len(names):
            raise ValueError(f"illegal parts {excerpt(names)}")
        is_dtype = _is_parquet(self.dtype) if is_array else self.dtype in _DTYPES.get(self.form, ("",))
        is_shape = all(type(n) is int and n > 0 for n in self.shape) and len(self.shape) <= _MAX_NDIM
        is_shape = is_shape and math.prod(self.shape) <= _MAX_ITEMS and (is_array or not self.shape)
        if not is_dtype or not is_shape:
            raise ValueError(f"illegal dtype {excerpt(self.dtype)} or shape {excerpt(self.shape)}")


_TEXT: Final = Structure("text")


def _lengths(values: Sequence[Any]) -> NDArray[np.int64]:
    return np.fromiter(map(len, values), np.int64, len(values))


def _is_parquet(dtype: Any) -> bool:
    return type(dtype) is str and dtype[1:] in PARQUET_TYPES and np.dtype(dtype).str == dtype


# ---- copies ----


def _take_array(structure: Structure, value: Any) -> Any:
    expected = np.ndarray if structure.shape else structure.numpy.type
    if type(value) is not expected or value.dtype != structure.numpy or value.shape != structure.shape:
        raise _unlike(value, structure)
    return value.copy() if structure.shape else value


def _take_rows(structure: Structure, value: Any) -> Any:
    if type(value) is not np.ndarray or not value.ndim or value.shape[1:] != structure.shape:
        raise _unlike(value, structure)
    if value.dtype != structure.numpy:
        raise _unlike(value, structure)
    return value.copy()


def _take_text(structure: Structure, value: Any) -> str:
    if type(value) is not str:
        raise _unlike(value, structure)
    if not value.isascii():
        value.encode()  # Half of a surrogate pair has no UTF-8 form: UnicodeError, a ValueError.
    return value


def _take_bytes(structure: Structure, value: Any) -> bytes:
    if type(value) is not bytes:
        raise _unlike(value, structure)
    return value


def _take_time(structure: Structure, value: Any) -> Any:
    if form_of(value) != structure.form:
        raise _unlike(value, structure)
    return value


def _take_texts(structure: Structure, value: Any) -> Any:
    if type(value) is not np.ndarray or value.ndim != 1 or value.dtype.str[:2] != structure.dtype:
        raise _unlike(value, structure)
    return text_array([_take_text(_TEXT, each) for each in value.tolist()], structure.dtype)


def _take_many(structure: Structure, value: Any) -> Any:
    if type(value) is not (list if structure.form == "list" else tuple):
        raise _unlike(value, structure)
    take, item = _TAKE[structure.item.form], structure.item
    if item.form == "text" and {*map(type, value)} <= {str}:
        _take_text(item, "".join(value))  # All of them at once.
        return value[:]
    found = [take(item, each) for each in value]
    return found if structure.form == "list" else tuple(found)


def _take_named(structure: Structure, value: Any) -> Any:
    names = [name for name, _ in structure.parts]
    if structure.form == "dict" and type(value) is dict and value.keys() == {*names}:
        given = [value[name] for name in names]
    elif structure.form == "places" and type(value) is tuple and len(value) == len(names):
        given = [*value]
    else:
        raise _unlike(value, structure)
    pairs = zip(structure.parts, given, strict=True)
    return structure.named([part.taken(each) for (_, part), each in pairs])


def _take_graph(structure: Structure, value: Any) -> Any:
    if not _is_graph(type(value)):
        raise _unlike(value, structure)
    nodes, edges, links = value
    parts = [part for _, part in structure.parts]
    if (edges is None) != (links is None) or (len(parts) == 1 and edges is not None):
        raise _unlike(value, structure)
    made = [parts[0].taken(nodes)]
    if edges is not None:
        # Whole numbers, whose dtype is that of the column: gymnasium makes int32, and NumPy int64.
        if type(links) is np.ndarray and links.dtype.kind in "iu" and links.dtype != parts[2].numpy:
            cast = links.astype(parts[2].numpy)
            links = cast if np.array_equal(cast, links) else links
        made += [parts[1].taken(edges), parts[2].taken(links)]
    return _graph(*made, *[None] * (3 - len(made)))


_TAKE: Final[Mapping[str, Callable[[Structure, Any], Any]]] = {
    "array": _take_array,
    "rows": _take_rows,
    "text": _take_text,
    "bytes": _take_bytes,
    **dict.fromkeys(TIME_FORMS, _take_time),
    "texts": _take_texts,
    "list": _take_many,
    "tuple": _take_many,
    "dict": _take_named,
    "places": _take_named,
    "graph": _take_graph,
}


def _unlike(value: Any, structure: Structure) -> ValueError:
    found = type(value).__name__
    if isinstance(value, np.ndarray):
        found = f"{value.dtype} of shape {value.shape}"
    elif isinstance(value, tuple | list | dict):
        found = f"{found} {excerpt(value)}"
    return ValueError(f"{found}, expected {structure!r}")


def text_array(values: list[str], dtype: str) -> NDArray[Any]:
    """An array of texts; as wide as the longest, like every column of such texts."""
    if dtype == "|O":
        return object_column(values)
    return np.array(values, np.str_) if values else np.empty(0, "<U1")


def _is_graph(kind: type) -> bool:
    return kind.__name__ == "GraphInstance" and kind.__module__ == "gymnasium.spaces.graph"


def _graph(*parts: Any) -> Any:
    from gymnasium.spaces import GraphInstance

    return GraphInstance(*parts)


# ---- bytes ----


def packed(value: Any) -> bytes:
    """A value of any structure as bytes, which are equal exactly if the values are; see `unpacked`."""
    kind = type(value)
    if kind is str:
        return bytes(value, "utf-8")
    if kind is bytes:
        return bytes(value)
    if isinstance(value, datetime.date):
        return text_of(value).encode()
    if isinstance(value, np.ndarray) and value.dtype.kind in "UO":
        value = value.tolist()
    elif isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    parts = value.values() if kind is dict else value
    found = [packed(part) for part in parts if part is not None]
    return struct.pack(f"<{len(found) + 1}I", len(found), *map(len, found)) + b"".join(found)


def _cut(data: bytes) -> list[Any]:
    """The parts of `packed`."""
    count = int.from_bytes(data[:4], "little")
    start = 4 * (count + 1)
    if start > len(data):
        raise ValueError(f"a value of {len(data)} bytes, which has no sizes of {count} parts")
    # Of few parts, `struct` takes a quarter of NumPy's time.
    ends = [*accumulate(struct.unpack_from(f"<{count}I", data, 4), initial=start)]
    if ends[-1] != len(data):
        raise ValueError(f"a value of {len(data)} bytes, whose parts end at {ends[-1:]}")
    return [data[a:b] for a, b in pairwise(ends)]


# ---- finding the structure of values ----


def is_structured(value: Any) -> bool:
    """Whether a value of a batch may be of a structure, other than a text or an array of numbers."""
    kind = type(value)
    if kind is np.ndarray:
        return bool(value.ndim == 1 and value.dtype.kind in "UO")
    return kind in (list, tuple, bytes) or form_of(value) is not None or _is_graph(kind)


def structure_of(values: Iterable[Any], *, depth: int = 0) -> Structure | None:
    """The structure that all values show; None: they have none, leave a part of it open, or nest too deep.

    Dictionaries, and tuples of different parts, have none, because other rows may have other parts: only a
    space says that they do not.
    """
    values = [*values]
    kinds = {*map(type, values)}
    if len(kinds) != 1 or depth > _MAX_DEPTH:
        return None
    (kind,) = kinds
    if kind in (str, bytes):
        return Structure("text" if kind is str else "bytes")
    if issubclass(kind, datetime.date):
        found, *others = {*map(form_of, values)}
        return None if found is None or others else Structure(found)
    if kind is list or kind is tuple:
        item = structure_of(chain.from_iterable(values), depth=depth + 1)
        form: Form = "list" if kind is list else "tuple"
        return None if item is None else Structure(form, parts=(("", item),))
    if kind is np.ndarray:
        return _structure_of_arrays(values)
    if issubclass(kind, np.generic):
        return Structure("array", values[0].dtype.str) if _is_parquet(values[0].dtype.str) else None
    return _structure_of_graphs(values) if _is_graph(kind) else None


def structure_of_space(described: Mapping[str, Any], *, is_stacked: bool = False) -> Structure | None:
    """The structure that a space gives its values; None: they have none (OneOf).

    Args:
        described: A space as `rlio.schemas.spaces` writes it.
        is_stacked: Whether the value is any number of the space's values, as gymnasium stacks them.
    """
    kind = described["type"]
    if kind in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        dtype, shape = described.get("dtype", "|i1"), described.get("shape", ())
        if kind == "MultiBinary":
            shape = described["n"] if isinstance(described["n"], list) else [described["n"]]
        found = Structure("rows" if is_stacked else "array", dtype, tuple(shape))
        return found if _is_parquet(dtype) and 0 not in found.shape else None
    if kind in ("Dict", "Tuple"):
        pairs = described["spaces"] if kind == "Dict" else enumerate(described["spaces"])
        parts = [(str(name), structure_of_space(space, is_stacked=is_stacked)) for name, space in pairs]
        return _with_parts("dict" if kind == "Dict" else "places", parts) if parts else None
    if is_stacked:  # Of other spaces, gymnasium makes a tuple of the values.
        return _with_parts("tuple", [("", structure_of_space(described))])
    if kind == "Text":
        return Structure("text")
    if kind == "Sequence":
        item = structure_of_space(described["space"], is_stacked=described["stack"])
        return item if described["stack"] else _with_parts("tuple", [("", item)])
    if kind != "Graph":
        return None
    parts = [("nodes", structure_of_space(described["nodes"], is_stacked=True))]
    if described["edges"] is not None:
        links = Structure("rows", "<i4", _LINK)
        parts += [("edges", structure_of_space(described["edges"], is_stacked=True)), ("edge_links", links)]
    return _with_parts("graph", parts)


def _with_parts(form: Form, parts: list[tuple[str, Structure | None]]) -> Structure | None:
    known = tuple((name, part) for name, part in parts if part is not None)
    found = Structure(form, parts=known)
    return found if len(known) == len(parts) <= _MAX_PARTS and found.depth <= _MAX_DEPTH else None


def _structure_of_arrays(values: list[Any], *, is_rows: bool = False) -> Structure | None:
    """Of arrays of one dtype; ``is_rows``: their first axis varies, whatever their shapes are."""
    if not all(type(value) is np.ndarray for value in values):
        return None
    dtypes = {value.dtype.str[:2] if value.dtype.kind == "U" else value.dtype.str for value in values}
    if len(dtypes) != 1 or not all(value.ndim for value in values):
        return None
    (dtype,) = dtypes
    if dtype in ("<U", "|O"):
        texts = chain.from_iterable(value.tolist() for value in values) if dtype == "|O" else ()
        is_text = all(value.ndim == 1 for value in values) and {*map(type, texts)} <= {str}
        is_open = dtype == "|O" and not any(map(len, values))
        return Structure("texts", dtype) if is_text and not is_open else None
    items = {value.shape[1:] for value in values}
    if len(items) != 1 or not _is_parquet(dtype) or 0 in min(items):
        return None
    lengths = {len(value) for value in values}
    if is_rows or len(lengths) > 1 or 0 in lengths:
        return Structure("rows", dtype, items.pop())
    return Structure("array", dtype, values[0].shape)


def _structure_of_graphs(values: list[Any]) -> Structure | None:
    nodes = _structure_of_arrays([value.nodes for value in values], is_rows=True)
    edges = [value.edges for value in values if value.edges is not None]
    links = [value.edge_links for value in values if value.edge_links is not None]
    if nodes is None or len(edges) != len(links) or not edges:
        return None
    found, between = _structure_of_arrays(edges, is_rows=True), _structure_of_arrays(links, is_rows=True)
    if found is None or between is None or between.shape != _LINK or between.numpy.kind not in "iu":
        return None
    return Structure("graph", parts=tuple(zip(GRAPH, (nodes, found, between), strict=True)))
