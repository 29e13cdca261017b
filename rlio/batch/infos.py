"""Infos whose keys are columns: the typed form of a column of dicts, and the objects that it stands for.

A column ``infos`` of a batch is an object array, or a nested column in the typed form. `SampleBatch` makes
the objects when they are first asked for, so only readers, stores and writers see the typed form. It has, for
each key with values of one dtype and shape, an array with a row a step, and a mask of the rows that have the
key, called as gymnasium calls them::

    {"x": values, "_x": mask, "episode": {"r": values, "_r": mask}, "": {"x": empty, "": rest}}

Under the key ``""`` are an empty array for each key whose values are Python's own numbers, not NumPy's, and,
under ``""`` again, the residual: the part of each info that no column holds. It is None if the columns hold
all of the info; a dict of the other keys, which follow those of columns; ``(left, order)`` if the keys have
another order (`order_of`); or ``(info,)`` for an info that is no dict. If the columns hold all infos, the
residual is an array of shape (rows, 0).

Example:
    >>> rest = np.empty((2, 0), bool)
    >>> typed = {"x": np.array([0.5, 0.0]), "_x": np.array([True, False]), "": {"": rest}}
    >>> info_objects(typed).tolist()
    [{'x': np.float64(0.5)}, {}]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from rlio.batch.nested import Path
from rlio.errors import CorruptData, excerpt

__all__ = ["NOTES", "REST", "info_objects", "is_typed", "mask_path", "note_path", "order_of", "typed_rows"]

#: The key of what is no key of an info.
NOTES: Final = ""
#: The path of the residual.
REST: Final[Path] = (NOTES, NOTES)


def is_typed(column: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a column ``infos`` is in the typed form."""
    return type(column) is dict and type(notes := column.get(NOTES)) is dict and NOTES in notes


def mask_path(path: Path) -> Path:
    """The path of the mask of the values at ``path``."""
    return (*path[:-1], f"_{path[-1]}")


def note_path(path: Path) -> Path:
    """The path of the empty array that says that the values at ``path`` are Python's own."""
    return (NOTES, *path)


def typed_rows(column: Mapping[str, Any]) -> int:
    """The number of rows of a column in the typed form."""
    return len(column[NOTES][NOTES])


def info_objects(column: Mapping[str, Any]) -> NDArray[Any]:
    """The infos of a column in the typed form, shape (rows,): new dicts, which share no array with it.

    Raises:
        CorruptData: A residual does not fit the keys.
    """
    notes = column[NOTES]
    rest = notes[NOTES]
    keys = {key: part for key, part in column.items() if key != NOTES}
    made: list[Any] = _dicts(keys, notes, len(rest))
    if rest.dtype == object:
        for row, left in enumerate(rest.tolist()):
            if left is not None:
                made[row] = _with_rest(made[row], left)
    return np.fromiter(made, dtype=object, count=len(made))


def _dicts(keys: Mapping[str, Any], notes: Mapping[str, Any], rows: int) -> list[dict[str, Any]]:
    """A dict for each row, of the keys that it has."""
    names: list[str] = []
    whole: list[Iterable[Any]] = []
    some: list[tuple[str, list[int], Iterable[Any]]] = []
    for key, part in keys.items():
        if key.startswith("_"):
            continue
        own = notes.get(key)
        if isinstance(part, dict):
            has = _present(part)
            has_all = bool(has.all())
            if not has_all:
                part = _taken(part, np.flatnonzero(has))
            values: Iterable[Any] = _dicts(part, own or {}, rows if has_all else int(has.sum()))
        else:
            has = keys[f"_{key}"]
            has_all = bool(has.all())
            values = _values(part if has_all else part[has], is_python=own is not None)
        if has_all:
            names.append(key)
            whole.append(values)
        elif has.any():
            some.append((key, np.flatnonzero(has).tolist(), values))
    made = _zipped(names, whole, rows)
    for key, at, values in some:
        for row, value in zip(at, values, strict=True):
            made[row][key] = value
    order = [key for key in keys if not key.startswith("_")]
    added = [key for key, *_ in some]
    if added and [*names, *added] != [key for key in order if key in {*names, *added}]:
        for row in {row for _, at, _ in some for row in at}:
            made[row] = {key: made[row][key] for key in order if key in made[row]}
    return made


def order_of(info: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """The keys of an info in their order, each with those of a dict under it, or None."""
    return [(key, order_of(part) if isinstance(part, dict) and part else None) for key, part in info.items()]


def _ordered(info: Mapping[Any, Any], order: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    return {key: info[key] if part is None else _ordered(info[key], part) for key, part in order}


def _with_rest(made: dict[str, Any], left: Any) -> Any:
    """An info, of its keys that are columns and of its residual.

    Raises:
        CorruptData: The two do not fit each other.
    """
    try:
        if type(left) is not tuple:
            _merge(made, left)
            return made
        if len(left) == 1:
            return left[0]
        others, order = left
        _merge(made, others)
        found = _ordered(made, order)
        if len(found) == len(made):
            return found
    except (AttributeError, LookupError, TypeError, ValueError):
        pass
    raise CorruptData(f"an info of {excerpt(list(made))} does not fit its residual: {excerpt(left)}")


def _values(values: NDArray[Any], *, is_python: bool) -> list[Any]:
    """The value of each row: a number of Python or NumPy, or an array."""
    if values.ndim > 1:
        return list(values.copy())
    found: list[Any] = values.tolist() if is_python else list(values)
    return found


def _present(keys: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which rows have any of some keys."""
    masks = [
        _present(part) if isinstance(part, dict) else part
        for key, part in keys.items()
        if isinstance(part, dict) or key.startswith("_")
    ]
    found: NDArray[np.bool_] = np.logical_or.reduce(masks)
    return found


def _taken(part: Any, rows: NDArray[np.int64]) -> Any:
    if isinstance(part, dict):
        return {key: _taken(inner, rows) for key, inner in part.items()}
    return part[rows]


def _merge(made: dict[str, Any], left: Mapping[Any, Any]) -> None:
    """Add the residual of a row to its dict; nested dicts are joined."""
    for key, value in left.items():
        before = made.get(key)
        if type(before) is dict and isinstance(value, dict):
            _merge(before, value)
        else:
            made[key] = value


def _zipped(names: list[str], columns: list[Iterable[Any]], rows: int) -> list[dict[str, Any]]:
    """A dict for each row, of columns that all rows have."""
    if len(names) < 4:
        made: list[dict[str, Any]] = [{} for _ in range(rows)]
    else:  # A dict display takes half the time of `dict`.
        a, b, c, d = names[:4]
        made = [{a: v, b: w, c: x, d: y} for v, w, x, y in zip(*columns[:4], strict=True)]
        names, columns = names[4:], columns[4:]
    for name, values in zip(names, columns, strict=True):
        for info, value in zip(made, values, strict=True):
            info[name] = value
    return made
