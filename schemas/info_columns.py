"""Infos as columns: which keys are columns, and objects to columns.

A key is a column if its values are numbers, bools or arrays of one dtype and shape. Everything else is left
in the rest of its row, so infos never conflict. `rlio.batch.infos` has the form in memory, and makes objects
of it.

Example:
    >>> parsed = ParsedInfos.of([{"x": 0.5, "name": "a"}, {"x": 1.5}])
    >>> form = InfoForm().grown(parsed)
    >>> sorted(form.keys), form.has_rest
    ([('x',)], True)
    >>> form.arranged(parsed)["x"], form.arranged(parsed)[""][""]
    (array([0.5, 1.5]), array([{'name': 'a'}, None], dtype=object))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch.infos import NOTES, REST, info_objects, is_typed, mask_path, note_path, order_of
from rlio.batch.nested import Path, leaves, rebuilt
from rlio.errors import CorruptData, SchemaError, excerpt
from rlio.schemas.column import ColumnSpec
from rlio.support.forks import cached_property

__all__ = ["InfoForm", "InfoKey", "ParsedInfos", "absent"]

_MASK: Final = ColumnSpec("|b1", (), "mask")
_EMPTY: Final = ColumnSpec("|b1", (0,), "none")
_JSON: Final = ColumnSpec("|O", (), "json")

# More keys, deeper ones and longer names stay in the rest. An info of hundreds of keys is seldom a record.
_MOST_KEYS: Final = 128
_MOST_DEEP: Final = 4
_MOST_CHARACTERS: Final = 128
_MOST_BYTES: Final = 64 << 10
_STORED: Final = ("scalar", "list", "bytes")
_RESERVED_ENDS: Final = ("#older", ".list.element")


class InfoKey(NamedTuple):
    """The type of a key's values.

    Attributes:
        dtype, shape: Of a value; the dtype as in `ColumnSpec`.
        is_python: Whether the values are Python's own float, int or bool.
    """

    dtype: str
    shape: tuple[int, ...]
    is_python: bool = False

    @property
    def spec(self) -> ColumnSpec:
        """The spec of the column."""
        return _spec(self.dtype, self.shape)


@lru_cache(maxsize=1024)
def _spec(dtype: str, shape: tuple[int, ...]) -> ColumnSpec:
    return ColumnSpec.of(np.empty((0, *shape), dtype))


_PYTHON: Final = {
    float: InfoKey("<f8", (), True),
    int: InfoKey("<i8", (), True),
    bool: InfoKey("|b1", (), True),
}
_DTYPES: Final = frozenset(("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f4", "<f8"))
_NUMBERS: Final = {np.dtype(text).type: InfoKey(text, ()) for text in _DTYPES}

_Found = dict[InfoKey, tuple[list[int], list[Any]]]


@dataclass
class ParsedInfos:
    """The infos of some rows, by key.

    Attributes:
        objects: The infos.
        orders: The keys of dicts in their order, with their path and rows.
        found: Path of a key -> type -> the rows that have such a value, and the values.
        rest: Row -> what has no type, as in the typed form.
    """

    objects: Sequence[Any]
    orders: list[tuple[Path, Sequence[int], tuple[Any, ...]]] = field(default_factory=list)
    found: dict[Path, _Found] = field(default_factory=dict)
    rest: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: Iterable[Any]) -> ParsedInfos:
        """Parse the infos of rows: dicts, and anything else."""
        listed = objects.tolist() if isinstance(objects, np.ndarray) else list(objects)
        made = cls(listed)
        rows = range(len(listed))
        if set(map(type, listed)) <= {dict}:
            made._level(rows, listed, ())
            return made
        made.rest = {row: (info,) for row, info in enumerate(listed) if not isinstance(info, dict)}
        made._level(
            [row for row in rows if row not in made.rest], [x for x in listed if isinstance(x, dict)], ()
        )
        return made

    def _level(self, rows: Sequence[int], dicts: list[dict[Any, Any]], path: Path) -> None:
        """Parse the dicts at a path of some rows."""
        if not set(map(type, chain.from_iterable(dicts))) <= {str}:
            dicts = [self._with_texts(row, one, path) for row, one in zip(rows, dicts, strict=True)]
        alike: dict[tuple[str, ...], tuple[list[int], list[dict[Any, Any]]]] = {}
        first = tuple(dicts[0]) if dicts else ()
        if all(tuple(one) == first for one in dicts):
            alike[first] = [*rows], dicts
        else:
            for row, one in zip(rows, dicts, strict=True):
                own = alike.setdefault(tuple(one), ([], []))
                own[0].append(row)
                own[1].append(one)
        by_key: dict[str, tuple[list[int], list[Any]]] = {}
        for keys, (at, ones) in alike.items():
            self.orders.append((path, at, keys))
            for key in keys:
                values = [one[key] for one in ones]
                before = by_key.get(key)
                by_key[key] = (at, values) if before is None else (before[0] + at, before[1] + values)
        for key, (at, values) in by_key.items():
            if _is_name(key) and len(path) < _MOST_DEEP:
                self._key((*path, key), at, values)
            else:
                self._leave((*path, key), at, values)

    def _with_texts(self, row: int, one: dict[Any, Any], path: Path) -> dict[Any, Any]:
        """A dict without its keys that are no texts, which are left."""
        others = {key: value for key, value in one.items() if type(key) is not str}
        if others:
            self.orders.append((path, [row], tuple(one)))
        for key, value in others.items():
            self._leave((*path, key), [row], [value])
        return {key: value for key, value in one.items() if type(key) is str} if others else one

    def _key(self, path: Path, rows: list[int], values: list[Any]) -> None:
        """Parse the values of one key."""
        kind, *others = set(map(type, values))
        known = None if others else _NUMBERS.get(kind) or _PYTHON.get(kind)
        if known is not None and (kind is not int or _fits(values)):
            self.found[path] = {known: (rows, values)}
            return
        nested: tuple[list[int], list[dict[Any, Any]]] = [], []
        found: _Found = {}
        for row, value in zip(rows, values, strict=True):
            if isinstance(value, dict) and value:
                nested[0].append(row)
                nested[1].append(value)
            elif (key := _key_of(value)) is not None:
                own = found.setdefault(key, ([], []))
                own[0].append(row)
                own[1].append(value)
            else:
                self._leave(path, [row], [value])
        if found:
            self.found[path] = found
        if nested[0]:
            self._level(*nested, path)

    def _leave(self, path: tuple[Any, ...], rows: Iterable[int], values: Iterable[Any]) -> None:
        """Leave values in the rest of their rows."""
        _leave(self.rest, path, rows, values)


@dataclass(frozen=True)
class InfoForm:
    """Which keys of infos are columns.

    Attributes:
        keys: Path -> type, in the order of the columns.
        has_rest: Whether rows may have more.
    """

    keys: Mapping[Path, InfoKey] = field(default_factory=dict)
    has_rest: bool = False

    @classmethod
    def of(cls, specs: Mapping[Path, ColumnSpec]) -> InfoForm | None:
        """The form of a stored column, by the specs of its leaves; None: it is not in the typed form.

        Raises:
            CorruptData: It is a typed form whose leaves do not fit each other.
        """
        if REST not in specs:
            return None
        keys = {
            path: InfoKey(spec.dtype, spec.shape, note_path(path) in specs)
            for path, spec in specs.items()
            if path[:1] != (NOTES,) and spec.kind != "mask"
        }
        form = cls(keys, specs[REST].kind == "json")
        names = [token for path in keys for token in (path or (NOTES,))]
        if (
            not all(type(name) is str and _is_name(name) for name in names)
            or any(key.dtype not in _DTYPES for key in keys.values())
            or dict(form.leaves()) != dict(specs)
        ):
            raise CorruptData(
                f"the columns of infos do not fit each other: {excerpt(sorted(map(str, specs)))}"
            )
        return form

    def leaves(self) -> list[tuple[Path, ColumnSpec]]:
        """The leaves of the column, in order: values with their masks, notes, and the rest."""
        found: list[tuple[Path, ColumnSpec]] = []
        for path, key in self.keys.items():
            found += [(path, key.spec), (mask_path(path), _MASK)]
        found += [(note_path(path), _EMPTY) for path, key in self.keys.items() if key.is_python]
        return [*found, (REST, _JSON if self.has_rest else _EMPTY)]

    def grown(self, parsed: ParsedInfos, *, takes_keys: bool = True) -> InfoForm:
        """This form with the new keys of some rows, and with a rest if the rows need one."""
        keys, leaves_some = dict(self.keys), bool(parsed.rest)
        for path, found in parsed.found.items():
            if path not in keys and takes_keys and len(keys) < _MOST_KEYS and not _crosses(path, keys):
                keys[path] = max(found, key=lambda kind: len(found[kind][0]))
            leaves_some |= found.keys() != {keys.get(path)}
        made = InfoForm(keys, self.has_rest or leaves_some)
        if not made.has_rest and made._orders(parsed):
            made = InfoForm(keys, True)
        return self if made == self else made

    @classmethod
    def joint(cls, forms: Sequence[InfoForm | None]) -> InfoForm:
        """The form that holds the rows of several; None: rows of objects. Keys of several types are left."""
        keys: dict[Path, InfoKey] = {}
        unlike: set[Path] = set()
        known = [form for form in forms if form is not None]
        for form in known:
            for path, key in form.keys.items():
                if keys.setdefault(path, key) != key:
                    unlike.add(path)
        every = frozenset(keys)
        unlike |= {path for path in keys for n in range(1, len(path)) if path[:n] in every}
        unlike |= {path[:n] for path in keys for n in range(1, len(path)) if path[:n] in every}
        has_rest = bool(unlike) or len(known) < len(forms) or any(form.has_rest for form in known)
        joint = cls({path: key for path, key in keys.items() if path not in unlike}, has_rest)
        if not has_rest and not all(joint._keeps_order(list(form.keys)) for form in known):
            joint = cls(joint.keys, True)
        return joint

    @cached_property
    def _ranks(self) -> dict[Path, int]:
        """Path of a key, or of a dict with keys below -> its place among the others."""
        found: dict[Path, int] = {}
        for path in self.keys:
            for n in range(1, len(path) + 1):
                found.setdefault(path[:n], len(found))
        return found

    def _keeps_order(self, paths: Sequence[Path]) -> bool:
        """Whether objects of columns at some paths have their keys in the same order in this form."""
        own = InfoForm({path: self.keys[path] for path in paths if path in self.keys})
        ranks = [self._ranks[path] for path in own._ranks]
        return ranks == sorted(ranks)

    def _orders(self, parsed: ParsedInfos) -> dict[int, list[tuple[Any, Any]]]:
        """The order of the keys of each row that would come back in another one."""
        doubtful: set[int] = set()
        for path, rows, keys in parsed.orders:
            ranks = [self._ranks.get((*path, key), -1) for key in keys]
            if -1 in ranks or ranks != sorted(ranks):
                doubtful.update(rows)
        for path, found in parsed.found.items():
            doubtful.update(*(rows for key, (rows, _) in found.items() if key != self.keys.get(path)))
        doubtful.update(row for row, left in parsed.rest.items() if type(left) is dict)
        return {
            row: order_of(parsed.objects[row])
            for row in sorted(doubtful)
            if not self._is_ordered(parsed.objects[row], ())[1]
        }

    def _is_ordered(self, one: Mapping[Any, Any], path: Path) -> tuple[bool, bool]:
        """Whether a dict has keys that are columns, and whether its keys come back in their order."""
        typed: list[str] = []
        others: list[Any] = []
        is_ordered = True
        for key, value in one.items():
            own = (*path, key)
            has_column = False
            if type(key) is str and own in self._ranks:
                if isinstance(value, dict) and value:
                    has_column, inner = self._is_ordered(value, own)
                    is_ordered &= inner or not has_column
                else:
                    has_column = own in self.keys and self.keys[own] == _key_of(value)
            (typed if has_column else others).append(key)
        typed.sort(key=lambda key: self._ranks[*path, key])
        return bool(typed), is_ordered and [*typed, *others] == list(one)

    def arranged(self, parsed: ParsedInfos) -> dict[str, Any]:
        """The typed form of some rows; what has no column is in the rest, also without `has_rest`."""
        rows = len(parsed.objects)
        made: dict[Path, Any] = {}
        rest = parsed.rest if parsed.rest or self.has_rest else {}
        for path, key in self.keys.items():
            found = parsed.found.get(path, {})
            made[path], made[mask_path(path)] = _column(key, found.get(key), rows)
        left = [
            (path, at, values)
            for path, found in parsed.found.items()
            for key, (at, values) in found.items()
            if self.keys.get(path) != key
        ]
        if left:
            rest = {row: _copied(value) for row, value in rest.items()}
            for path, at, values in left:
                _leave(rest, path, at, values)
        rest = {row: _in_order(value, parsed.objects[row]) for row, value in rest.items()}
        orders = self._orders(parsed)
        rest = rest if not orders else {**rest, **{row: (rest.get(row, {}), orders[row]) for row in orders}}
        made |= {note_path(p): _no_values(rows) for p, key in self.keys.items() if key.is_python}
        if rest or self.has_rest:
            texts = np.full(rows, None, object)
            for row, value in rest.items():
                texts[row] = value
            made[REST] = texts
        else:
            made[REST] = _no_values(rows)
        return rebuilt(tuple(made), list(made.values()))  # type: ignore[no-any-return]  # a dict, because of REST

    def conformed(self, column: Any) -> dict[str, Any]:
        """A column of infos, of objects or in another typed form, in this form.

        The form must hold it: it is the joint form of that of the column, and of others.
        """
        if not is_typed(column):
            return self.arranged(ParsedInfos.of(column))
        found = dict(leaves(column))
        if [(path, values.dtype.str) for path, values in found.items()] == self._dtypes:
            return column
        own = {path for path in found if path[0] != NOTES and mask_path(path) in found}
        fits = self.has_rest or found[REST].dtype != object
        ordered = [path for path in found if path in own]
        if fits and all(self._fits(path, found) for path in own) and self._keeps_order(ordered):
            return self._widened(found, len(found[REST]))
        return self.arranged(ParsedInfos.of(info_objects(column)))

    def parts(self, column: Any, paths: Sequence[Path], rows: int) -> dict[str, Any]:
        """The leaves at some paths of a column of infos, of objects, in a typed form, or of parts of one.

        A value that is no number, bool or array of the key's shape has no place there: the mask says so.

        Raises:
            SchemaError: The dtype of a key cannot hold a number.
        """
        found = dict(leaves(column)) if type(column) is dict else {}
        if found and (
            REST not in found or found[REST].dtype != object or not any(map(_is_left, found[REST]))
        ):
            lacking = [path for path in paths if path in self.keys and path not in found]
            for path in lacking:
                found[path], found[mask_path(path)] = _column(self.keys[path], None, rows)
        else:
            parsed = ParsedInfos.of(info_objects(column) if is_typed(column) else column)
            found = {}
            for path, key in self.keys.items():
                if path not in paths and mask_path(path) not in paths:
                    continue  # A number that this key cannot hold is no matter.
                values, mask = _column(key, None, rows)
                for other, (at, given) in parsed.found.get(path, {}).items():
                    if other.shape == key.shape:
                        values[at], mask[at] = _cast(np.array(given, other.dtype), key, path), True
                for row, number in _numbers_left(parsed.rest, path, key.shape):
                    values[row], mask[row] = _cast(number[None], key, path)[0], True
                found[path], found[mask_path(path)] = values, mask
        return rebuilt(tuple(paths), [found[path] for path in paths])  # type: ignore[no-any-return]  # by names

    @cached_property
    def _dtypes(self) -> list[tuple[Path, str]]:
        return [(path, spec.dtype) for path, spec in self.leaves()]

    def _fits(self, path: Path, found: Mapping[Path, NDArray[Any]]) -> bool:
        key, values = self.keys.get(path), found[path]
        return key == (values.dtype.str, values.shape[1:], note_path(path) in found)

    def _widened(self, found: Mapping[Path, NDArray[Any]], rows: int) -> dict[str, Any]:
        """The leaves of a smaller form, and those that it lacks."""
        made: dict[Path, Any] = {}
        for path, key in self.keys.items():
            if path in found:
                made[path], made[mask_path(path)] = found[path], found[mask_path(path)]
            else:
                made[path], made[mask_path(path)] = _column(key, None, rows)
        made |= {note_path(p): _no_values(rows) for p, key in self.keys.items() if key.is_python}
        rest = found[REST]
        made[REST] = np.full(rows, None, object) if self.has_rest and rest.dtype != object else rest
        return rebuilt(tuple(made), list(made.values()))  # type: ignore[no-any-return]  # a dict, because of REST


def _is_left(left: Any) -> bool:
    return left is not None


def _cast(values: NDArray[Any], key: InfoKey, path: Path) -> NDArray[Any]:
    """Numbers of another type in the dtype of a key."""
    given = values.astype(object)  # Python compares integers with floats exactly; NumPy rounds the integers.
    same = np.zeros(values.shape, np.bool_)
    if values.dtype.kind != "c":
        with np.errstate(invalid="ignore", over="ignore"), suppress(OverflowError):
            made = values.astype(key.dtype)
            held = made.astype(object)
            same = (held == given) | ((held != held) & (given != given))
            if same.all():
                return made
    raise SchemaError(
        f"found {excerpt(values[~same].flat[0])} of {values.dtype}, which {np.dtype(key.dtype)} cannot hold: "
        "read 'infos' whole",
        column="/".join(("infos", *map(str, path))),
    )


def _numbers_left(
    rest: Mapping[int, Any], path: Path, shape: tuple[int, ...]
) -> Iterable[tuple[int, NDArray[Any]]]:
    """The rows whose value at a path has no type of a key, but is a number, or numbers of a shape."""
    for row, value in rest.items():
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float | np.generic | np.ndarray):
            found = np.asarray(value)
            if found.shape == shape and (found.dtype.kind in "biufc" or isinstance(value, int)):
                yield row, found


def absent(key: InfoKey | ColumnSpec, rows: int) -> NDArray[Any]:
    """Values for rows that lack the key: NaN, zero or False."""
    return np.full((rows, *key.shape), np.nan if key.dtype[1] == "f" else 0, key.dtype)


def _column(
    key: InfoKey, found: tuple[list[int], list[Any]] | None, rows: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The values and the mask of a key."""
    if found is None:
        return absent(key, rows), np.zeros(rows, np.bool_)
    at, values = found
    given = np.array(values, key.dtype).reshape(len(values), *key.shape)
    if at == list(range(rows)):
        return given, np.ones(rows, np.bool_)
    made, mask = absent(key, rows), np.zeros(rows, np.bool_)
    made[at], mask[at] = given, True
    return made, mask


def _no_values(rows: int) -> NDArray[np.bool_]:
    return np.empty((rows, 0), np.bool_)


def _leave(rest: dict[int, Any], path: tuple[Any, ...], rows: Iterable[int], values: Iterable[Any]) -> None:
    for row, value in zip(rows, values, strict=True):
        node = rest.setdefault(row, {})
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = {} if type(value) is dict and not value else value


def _in_order(left: Any, one: Any) -> Any:
    """What is left of a dict, with the keys in the order of the dict."""
    if left is one or not isinstance(left, dict):
        return left
    return {key: _in_order(left[key], part) for key, part in one.items() if key in left}


def _copied(value: Any) -> Any:
    """The dicts that lead to what is left, copied; values are shared."""
    return {key: _copied(part) for key, part in value.items()} if type(value) is dict else value


def _crosses(path: Path, keys: Mapping[Path, Any]) -> bool:
    """Whether a path leads through another key, or another key through it."""
    return any(path[: len(other)] == other or other[: len(path)] == path for other in keys)


def _is_name(key: str) -> bool:
    """Whether a key can be the name of a column: not that of a mask, nor one that the format reserves."""
    return (
        0 < len(key) <= _MOST_CHARACTERS
        and key[0] != "_"
        and not key.endswith(_RESERVED_ENDS)
        and (key.isascii() or not any("\ud800" <= one <= "\udfff" for one in key))
    )


def _fits(values: Iterable[int]) -> bool:
    """Whether integers of Python fit 64 bits."""
    return min(values) >= -(1 << 63) and max(values) < 1 << 63


def _key_of(value: Any) -> InfoKey | None:
    """The type of one value; None: it has none."""
    kind = type(value)
    if kind is int and not _fits((value,)):
        return None
    if kind is not np.ndarray:
        return _PYTHON.get(kind) or _NUMBERS.get(kind)
    if value.dtype.str not in _DTYPES or not value.ndim or not 0 < value.nbytes <= _MOST_BYTES:
        return None
    key = InfoKey(value.dtype.str, value.shape)
    return key if ColumnSpec.of(value[None]).kind in _STORED else None
