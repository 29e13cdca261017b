"""The mapping of a table whose columns have rlio's names."""

from __future__ import annotations

import re
from collections import abc
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final

from rlio.batch.columns import Columns, is_per_sequence
from rlio.errors import RlioError, SchemaError, StoreError, UnknownLayout, excerpt
from rlio.formats.files.step_columns import check_other_names
from rlio.formats.tables.described import describe
from rlio.formats.tables.table import Table
from rlio.mapping import Mapping

__all__ = ["OwnNames", "own_map"]

_NUMBERED: Final = re.compile(r"(obs|new_obs|actions)_([0-9]+)")


@dataclass(frozen=True)
class OwnNames(Mapping):
    """The mapping of a table whose columns have rlio's names: ``eps_id`` and ``new_obs`` are columns, too."""

    instead: ClassVar[abc.Mapping[str, str]] = MappingProxyType({})

    def _check_meant(self, name: str, tops: set[str]) -> None:
        """The file has these names: one that rlio does not know is a further column."""


def own_map(table: Table) -> Mapping:
    """The mapping of a table whose columns have rlio's names.

    ``obs_0``, ``obs_1``, ... are one column, and ``obs/position`` is a part of one. The table needs obs,
    actions and rewards (none if rlio wrote it: with new_obs_valid), and eps_id, terminateds, truncateds, or
    the lengths of its episodes.

    Raises:
        UnknownLayout: The table has other columns; the message shows them.
    """
    try:
        columns = _own_columns(table)
        flags = [columns.pop(name, None) for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS)]
        ids = [columns.pop(Columns.EPS_ID)] if table.lengths is None and Columns.EPS_ID in columns else []
        return OwnNames(columns, episode=ids, terminated=flags[0], truncated=flags[1])
    except StoreError:
        table.close()
        raise
    except RlioError as error:
        with closing(table):
            found, shown, way = str(error).partition(":")[0], describe(table), table.suggested()
        raise UnknownLayout(f"{found}; say what the columns mean: {way}; {shown}", uri=table.uri) from error


def _own_columns(table: Table) -> dict[str, Any]:
    if table.uneven:
        raise SchemaError(f"only some of the files have the columns {excerpt(sorted(table.uneven))}")
    stacks: dict[str, dict[int, str]] = {}
    columns: dict[str, Any] = {}
    for name in table.names:
        if match := _NUMBERED.fullmatch(name):
            stack = stacks.setdefault(match[1], {})
            if int(match[2]) in stack:
                raise SchemaError(f"{stack[int(match[2])]} and {name} have the same number")
            stack[int(match[2])] = name
            continue
        *parents, last = name.split("/")
        inner = columns
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise SchemaError(f"the column {excerpt(name)} is a part of another column")
        if last in inner:
            raise SchemaError(f"the column {excerpt(name)} is also the parent of other columns")
        inner[last] = name
    for name, parts in stacks.items():
        if name in columns or sorted(parts) != list(range(len(parts))):
            raise SchemaError(f"{name} is not numbered from 0, each number once: {excerpt(sorted(parts))}")
        columns[name] = [parts[number] for number in range(len(parts))]
    check_other_names(columns)
    if refused := sorted(name for name in columns if name == Columns.DONES or is_per_sequence(name)):
        raise SchemaError(f"{excerpt(refused)} are no columns of steps")
    # A conversion by rlio writes data without rewards; of other tables, they may have another name.
    needed = [Columns.REWARDS] * (Columns.NEXT_OBS_VALID not in columns)
    missing = [name for name in (Columns.OBS, Columns.ACTIONS, *needed) if name not in columns]
    if missing:
        raise SchemaError(f"found no column {missing[0]}")
    ends = (Columns.EPS_ID, Columns.TERMINATEDS, Columns.TRUNCATEDS)
    if table.lengths is None and not any(isinstance(columns.get(name), str) for name in ends):
        raise SchemaError(f"found none of {', '.join(ends)}, which say where an episode ends")
    return columns
