"""Names in a mapping as paths into the columns of a table: ``"info.speed"`` is the part speed of info."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlio.batch.arrays import object_column
from rlio.batch.other_names import did_you_mean
from rlio.errors import MissingColumn, OptionError, excerpt
from rlio.formats.tables.table import Lists, Table
from rlio.mapping import Mapping, nested

__all__ = ["flags_of", "names_of", "paths_in", "paths_of", "resolved", "walk"]


def resolved(table: Table, name: object, option: str) -> tuple[str, ...]:
    """The top-level column, and the keys below it.

    Raises:
        MissingColumn: There is no such column.
    """
    if not isinstance(name, str):
        raise OptionError(f"{option}={excerpt(name)}: expected the name of a column")
    if name in table.names:
        return (name,)
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (top := ".".join(parts[:end])) in table.names:
            return (top, *parts[end:])
    lacks = "only some of the files have" if name in table.uneven else "the table has no"
    raise MissingColumn(
        f"{option}: {lacks} column {excerpt(name)}{did_you_mean(name, table.names)}", column=name
    )


def flags_of(mapping: Mapping) -> list[str]:
    """The columns that ``terminated`` and ``truncated`` name, without the ``not``."""
    given = (mapping.terminated, mapping.truncated)
    return [flag.removeprefix("not ").strip() for flag in given if isinstance(flag, str)]


def paths_of(spec: Any) -> Iterator[tuple[str, ...]]:
    """The paths in a spec whose names are paths."""
    if isinstance(spec, tuple):
        yield spec
    else:
        for part in spec.values() if isinstance(spec, dict) else spec:
            yield from paths_of(part)


def paths_in(table: Table, columns: abc.Mapping[str, Any], *, of: str) -> list[tuple[str, ...]]:
    """The paths from which a column of rlio is made."""
    specs = nested(columns)
    return [resolved(table, name, of) for name in names_of(specs[of])] if of in specs else []


def names_of(spec: Any) -> Iterator[Any]:
    """The names in a spec, nested or not."""
    if isinstance(spec, abc.Mapping) or (isinstance(spec, Sequence) and not isinstance(spec, str)):
        for part in spec.values() if isinstance(spec, abc.Mapping) else spec:
            yield from names_of(part)
    else:
        yield spec


def walk(found: Any, path: tuple[str, ...]) -> Any:
    """What is at a path of a column: ``found`` is the column ``path[0]``.

    Raises:
        MissingColumn: The column has no such part.
    """
    keys = list(path[1:])
    while keys:
        # A key may have dots, as TimeLimit.truncated in the infos of Gym: the longest that is there counts.
        tried = [".".join(keys[:end]) for end in range(len(keys), 0, -1)]
        found, key = _part(found, tried, path)
        keys = keys[key.count(".") + 1 :]
    return found


def _part(found: Any, tried: Sequence[str], path: tuple[str, ...]) -> tuple[Any, str]:
    """The part of a column under the first of some keys that it has, and the key."""
    parts = found.values if isinstance(found, Lists) else found
    rows = parts.tolist() if isinstance(parts, np.ndarray) and parts.dtype == object else []
    objects = [row for row in rows if isinstance(row, dict)]
    # An object may lack a key, and a row an object: then it is None, or NaN in pandas.
    if objects and all(isinstance(row, dict) or row is None or row != row for row in rows):
        known = {key for row in objects for key in row}
        key = next((key for key in tried if key in known), tried[0])
        values = [row.get(key) if isinstance(row, dict) else None for row in rows]
        try:
            return np.array(values), key
        except ValueError:  # Lists of different lengths.
            return object_column(values), key
    names = parts.dtype.names or () if isinstance(parts, np.ndarray) else parts
    key = next((key for key in tried if isinstance(names, dict | tuple) and key in names), "")
    if not key:
        raise MissingColumn(
            f"the column {excerpt(path[0])} has no part {excerpt(tried[-1])}{_way(found)}",
            column=".".join(path),
        )
    return Lists(found.lengths, parts[key]) if isinstance(found, Lists) else parts[key], key


def _way(found: Any) -> str:
    """What to do with items that have no parts, to be appended."""
    if not isinstance(found, Lists) or getattr(found.values, "dtype", None) != np.dtype(object):
        return ""
    return (
        ": its items are no objects, but may be lists of them: load the file, and pass its episodes to "
        "rlio.from_episodes"
    )
