"""The mapping of a batch from names to columns, with ``dones``, which is not a column.

`SampleBatch` implements `_check`, which says what the columns must have in common.

Example:
    >>> from rlio.batch import SampleBatch
    >>> batch = SampleBatch(terminateds=[False, True])
    >>> batch["dones"], "dones" in batch, list(batch)
    (array([False,  True]), True, ['terminateds'])
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from typing import Any

import numpy as np

from rlio.batch.arrays import Column, as_column, is_tensor
from rlio.batch.columns import Columns
from rlio.errors import MissingColumn, SchemaError, excerpt

__all__ = ["ColumnMapping", "named_column"]

_DONES = Columns.DONES


class ColumnMapping(MutableMapping[str, Column]):
    """Name -> column, with an optional interceptor for reads; base of `SampleBatch`."""

    __slots__ = ("__weakref__", "_columns", "_intercepted", "_interceptor")

    def _set_columns(self, columns: dict[str, Column]) -> None:
        """Start with ``columns``, unchecked; keeps the dict itself."""
        self._columns = columns
        self._interceptor: Callable[[Any], Any] | None = None
        self._intercepted: dict[str, Any] = {}

    @abstractmethod
    def _check(self, columns: dict[str, Column]) -> None:
        """Raise SchemaError unless ``columns`` can be the columns of this batch."""

    def _read(self, key: str) -> Column:
        column = self._columns.get(key)
        if column is None:
            column = self._dones() if key == _DONES else None
            if column is None:
                known = ", ".join(map(excerpt, self._columns)) or "none"
                raise MissingColumn(f"there is no column {excerpt(key)}; the batch has {known}")
        if self._interceptor is None:
            return column
        if key not in self._intercepted:
            self._intercepted[key] = self._interceptor(column)
        return self._intercepted[key]

    def _dones(self) -> Column | None:
        flags = [
            self._columns[name] for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS) if name in self._columns
        ]
        if not flags:
            return None
        # Fresh memory even for one flag: writing into the result must not change the flag.
        flags = [flag != 0 if is_tensor(flag) else flag.astype(bool) for flag in flags]
        return flags[0] if len(flags) == 1 else flags[0] | flags[1]

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a column; it is kept, not copied.

        Raises:
            SchemaError: Its rows do not fit the batch, or it is ``dones``. The batch is unchanged then.
        """
        columns = {**self._columns, key: named_column(key, value)}
        self._check(columns)
        self._columns = columns
        self._forget(key)

    def __delitem__(self, key: str) -> None:
        if key not in self._columns:
            raise MissingColumn(f"there is no column {excerpt(key)} to delete")
        columns = {name: column for name, column in self._columns.items() if name != key}
        if key == Columns.SEQ_LENS:
            self._check(columns)
        self._columns = columns
        self._forget(key)

    def _forget(self, key: str) -> None:
        """Drop the interceptor's results for ``key``, and for ``dones``, which may depend on it."""
        self._intercepted.pop(key, None)
        self._intercepted.pop(_DONES, None)

    def clear(self) -> None:
        """Delete every column."""
        self._columns, self._intercepted = {}, {}

    def __contains__(self, key: object) -> bool:
        if key == _DONES:
            return Columns.TERMINATEDS in self._columns or Columns.TRUNCATEDS in self._columns
        return key in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def get(self, key: str, default: Any = None) -> Any:
        """Column ``key``, through `__getitem__`, or ``default``."""
        return self._read(key) if key in self else default

    # The mixins of MutableMapping would use len(batch) as the number of columns.
    def keys(self) -> KeysView[str]:
        return self._columns.keys()

    def values(self) -> ValuesView[Column]:
        """The columns as stored: no interceptor is applied."""
        return self._columns.values()

    def items(self) -> ItemsView[str, Column]:
        """Names and columns as stored: no interceptor is applied."""
        return self._columns.items()

    # Identity: `equals` compares values.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return object.__eq__(self, other)

    def set_get_interceptor(self, fn: Callable[[Any], Any] | None) -> None:
        """Pass each column read by name through ``fn`` once; the result is kept until the column is set.

        `copy` keeps the interceptor; slices, other derived batches and pickles do not.
        """
        if fn is not self._interceptor:
            self._interceptor, self._intercepted = fn, {}


def named_column(name: Any, value: Any) -> Column:
    """Convert ``value`` to column ``name``; accepts and checks any objects."""
    if not isinstance(name, str):
        raise SchemaError(
            f"found a column name {excerpt(name)} ({type(name).__name__}): a column's name is a str"
        )
    if name == _DONES:
        raise SchemaError(
            "dones cannot be written, because it is read as terminateds OR truncateds: write one of these",
            column=_DONES,
        )
    if name == Columns.SEQ_LENS and isinstance(value, list):
        return np.asarray(value, np.int32)
    return as_column(name, value)
