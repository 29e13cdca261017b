"""Checks that all batches of one input have the same columns, and names the first column that differs.

Example:
    >>> from rlio.batch import SampleBatch
    >>> uniform = Uniform()
    >>> uniform.adopt(SampleBatch(obs=[[0.5, 1.0]]))
    >>> uniform.conform(SampleBatch(obs=[[1, 2]]))["obs"]
    array([[1., 2.]])
    >>> uniform.conform(SampleBatch(obs=[[1.0]]))
    Traceback (most recent call last):
    ...
    rlio.errors.SchemaError: rows of shape (1,) where the first record has (2,) [column obs]
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch
from rlio.batch.arrays import zero_leaf
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.encoded_picture import row_type
from rlio.batch.join import Unlike
from rlio.batch.nested import Path, leaves, map_structure, path_text
from rlio.batch.ragged import Ragged, item_type
from rlio.errors import MissingColumn, SchemaError, excerpt
from rlio.read_options import ReadOptions

__all__ = ["Agreed", "Uniform"]

_Leaf: TypeAlias = tuple[str, Path]
#: Dtype and shape of a row; and of an item, if rows are lists of any length.
_Type: TypeAlias = tuple[np.dtype[Any], tuple[int, ...], tuple[np.dtype[Any], tuple[int, ...]] | None]
_Types: TypeAlias = dict[_Leaf, _Type]

logger: logging.Logger = logging.getLogger("rlio")

# Columns that may be absent if the column after the colon exists: absence then has a known meaning.
_KEPT = {Columns.TRUNCATEDS: Columns.TERMINATEDS, Columns.NEXT_OBS_VALID: Columns.NEXT_OBS}


class Uniform:
    """The expected columns of each policy (names, dtypes, shapes of rows).

    The first batch decides them, or `agree`.

    Args:
        unlike: How `agree` treats columns that only some files have, see `ReadOptions`.
        lists: What to do about rows of any length, if the first record has them of one, for a message.
    """

    def __init__(self, *, unlike: Unlike = "error", lists: str = "") -> None:
        self._unlike, self._lists = unlike, lists
        self._policies: dict[str, _Types] = {}
        # For policies whose columns were chosen by `agree`: each column, with one row of it.
        self._chosen: dict[str, dict[str, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._policies)

    def agree(self, found: Sequence[tuple[str, Batch]]) -> None:
        """Decide the columns, from one batch and the URI of each file, or of each kind of file.

        Raises:
            SchemaError: The columns differ, and ``unlike`` is ``"error"``.
        """
        policies: dict[str, list[tuple[str, SampleBatch]]] = {}
        for uri, batch in found:
            for policy, rows in batch.policies().items():
                if len(rows):
                    policies.setdefault(policy, []).append((uri, rows))
        for policy, parts in policies.items():
            if self._unlike == "error":
                _refuse_unlike(parts)
            elif any(set(rows) != set(parts[0][1]) for _, rows in parts):
                self._chosen[policy] = _choose(parts, fill=self._unlike == "fill")
            self._policies[policy] = _types(self._chosen.get(policy, parts[0][1]))

    def adopt(self, batch: Batch) -> None:
        """Expect batches like this one from now on, for policies that were not seen before."""
        for policy, rows in batch.policies().items():
            if len(rows) and policy not in self._policies:
                self._policies[policy] = _types(rows)

    def conform(self, batch: Batch, columns: Collection[str] | None = None) -> Batch:
        """Return ``batch``, with whole numbers converted to floats where the column has floats elsewhere.

        Args:
            batch: The batch.
            columns: The columns that were read; None: all.

        Raises:
            SchemaError: A column has another dtype or shape than in the first batch, or is new.
            MissingColumn: A column of the first batch is absent.
        """
        self.adopt(batch)
        for policy, rows in batch.policies().items():
            if len(rows):
                if policy in self._chosen:
                    self._choose(rows, self._chosen[policy])
                expected = self._policies[policy]
                if columns is not None:
                    expected = {leaf: kind for leaf, kind in expected.items() if leaf[0] in columns}
                self._conform(rows, expected)
        return batch

    def _choose(self, rows: SampleBatch, chosen: dict[str, Any]) -> None:
        """Drop or fill columns as `agree` decided."""
        if self._unlike == "intersect":
            for name in rows.keys() - chosen.keys():
                del rows[name]
        knows_next = Columns.NEXT_OBS in rows or Columns.NEXT_OBS not in chosen
        for name, like in chosen.items():
            if name in rows or not (self._unlike == "fill" or name in _KEPT):
                continue
            if name == Columns.NEXT_OBS_VALID:
                rows[name] = np.full(len(rows), knows_next)
            elif not is_per_sequence(name):
                rows[name] = map_structure(lambda leaf: zero_leaf(leaf, len(rows)), like)

    def _conform(self, rows: SampleBatch, expected: _Types) -> None:
        found = dict(_leaves(rows))
        for (name, path), (dtype, shape, items) in expected.items():
            values = found.get((name, path))
            if values is None:
                raise MissingColumn(
                    f"the column{_within(path)} is absent, but the first record has it: pass columns= with "
                    "the names that all records have",
                    column=name,
                )
            dtype_found, shape_found, items_found = _type_of(values)
            if items is not None:
                lists = _with_items(values, *items)
                if lists is None:
                    what, of = (
                        ("rows", (dtype_found, shape_found))
                        if items_found is None
                        else ("lists", items_found)
                    )
                    raise SchemaError(
                        f"{what} of {of[0]} and shape {of[1]}{_within(path)} where the first record has "
                        f"lists of {items[0]} and shape {items[1]}",
                        column=name,
                    )
                if lists is not values:
                    rows[name] = map_structure(
                        lambda leaf, old=values, new=lists: new if leaf is old else leaf, rows[name]
                    )
                continue
            if shape_found != shape:
                is_list = items_found is not None or (shape and shape_found[1:] == shape[1:])
                shown = f"shape {shape_found}" if items_found is None else "any length"
                raise SchemaError(
                    f"rows of {shown}{_within(path)} where the first record has {shape}"
                    + self._lists * bool(is_list),
                    column=name,
                )
            if dtype_found != dtype and not (dtype_found.kind == dtype.kind and dtype.kind in "US"):
                if not _fits(values, dtype):
                    raise SchemaError(
                        f"dtype {values.dtype}{_within(path)} where the first record has {dtype}", column=name
                    )
                rows[name] = map_structure(
                    lambda leaf, old=values, dtype=dtype: leaf.astype(dtype) if leaf is old else leaf,
                    rows[name],
                )
        for name, path in found.keys() - expected.keys():
            raise SchemaError(
                f"the column{_within(path)} is not in the first record: pass columns= with the common names",
                column=name,
            )


class Agreed:
    """The common columns of all files' batches.

    They are decided at opening if files may have different columns, unless columns are named or damage is
    skipped. Otherwise the first readable batch decides, when it is needed.

    Args:
        options: The read options.
        firsts: Yields the URI and the first readable batch of each file, or of each kind of file.
        several: Whether there may be several kinds.
        lists: See `Uniform`.

    Raises:
        SchemaError: Files have different columns, and the options do not reconcile them.
    """

    def __init__(
        self,
        options: ReadOptions,
        firsts: Callable[[], Iterable[tuple[str, Batch]]],
        *,
        several: bool,
        lists: str = "",
    ) -> None:
        self._uniform = Uniform(unlike=options.unlike, lists=lists)
        self._firsts = firsts
        self._has_looked = False
        brings = options.columns is None and (options.on_error == "raise" or options.unlike != "error")
        if brings and several:
            self._look(at_all=True)

    def _look(self, *, at_all: bool) -> None:
        seen: set[frozenset[tuple[str, str]]] = set()
        found: list[tuple[str, Batch]] = []
        for uri, batch in self._firsts():
            names = frozenset((policy, name) for policy, rows in batch.policies().items() for name in rows)
            if names not in seen:  # Memory holds one batch of each kind.
                found.append((uri, batch))
                seen.add(names)
            if not at_all:
                break
        self._uniform.agree(found)
        self._has_looked = True

    def conform(self, batch: Batch, columns: Collection[str] | None = None) -> Batch:
        """See `Uniform`."""
        if not self._has_looked:
            self._look(at_all=False)
        return self._uniform.conform(batch, columns)


def _fits(values: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Whether whole numbers fit ``dtype`` exactly: text formats write 1.0 as 1."""
    if values.dtype.kind not in "iu" or dtype.kind not in "iuf":
        return False
    with np.errstate(over="ignore"):  # Overflowing values compare unequal, and are refused.
        return bool(np.array_equal(values.astype(dtype), values))


def _refuse_unlike(parts: list[tuple[str, SampleBatch]]) -> None:
    (first_uri, first), *others = parts
    for uri, rows in others:
        if unlike := set(rows) ^ set(first):
            raise SchemaError(
                f"the columns {excerpt(sorted(unlike))} are only in this file or only in {first_uri}: pass "
                "columns='intersect' to read the columns that all files have, columns='fill' to fill absent "
                "ones with zeros, or a list of columns",
                uri=uri,
                column=min(unlike),
            )


def _choose(parts: list[tuple[str, SampleBatch]], *, fill: bool) -> dict[str, Any]:
    """Name -> one row, for the columns to read from files with different columns."""
    names = dict.fromkeys(name for _, rows in parts for name in rows)
    lacking = {name: [uri for uri, rows in parts if name not in rows] for name in names}
    if not fill:
        names = {name: None for name in names if not lacking[name] or _may_lack(name, parts)}
    owners = {name: next(rows for _, rows in parts if name in rows) for name in names}
    chosen = {name: map_structure(lambda leaf: leaf[:1].copy(), owners[name][name]) for name in names}
    if Columns.NEXT_OBS in chosen and lacking[Columns.NEXT_OBS]:
        chosen.setdefault(Columns.NEXT_OBS_VALID, np.ones(1, bool))
    if Columns.TRUNCATEDS in chosen and lacking[Columns.TRUNCATEDS]:
        logger.warning(
            "%s does not say which episodes were truncated, as other files do: truncateds is False there",
            lacking[Columns.TRUNCATEDS][0],
        )
    return chosen


def _may_lack(name: str, parts: list[tuple[str, SampleBatch]]) -> bool:
    """Whether the column has a known meaning where it is absent."""
    return name in _KEPT and all(_KEPT[name] in rows for _, rows in parts)


def _types(rows: Mapping[str, Any] | SampleBatch) -> _Types:
    return {leaf: _type_of(values) for leaf, values in _leaves(rows)}


def _type_of(values: NDArray[Any]) -> _Type:
    return (*row_type(values), item_type(values))


def _with_items(values: NDArray[Any], dtype: np.dtype[Any], item: tuple[int, ...]) -> NDArray[Any] | None:
    """Lists, or rows of one length, as lists of items of a dtype and shape; None: they do not fit."""
    if not len(values) or item_type(values) == (dtype, item):
        return values
    if values.ndim > 1 and values.dtype.kind in "biuf":
        rows = Ragged.from_padded(values, np.ones(values.shape[:2], np.bool_))
    elif item_type(values) is not None:
        rows = Ragged.of(values)
    else:
        return None
    items = rows.values if len(rows.values) else np.empty((0, *item), dtype)
    if items.shape[1:] != item or not (items.dtype == dtype or _fits(items, dtype)):
        return None
    return Ragged(items.astype(dtype, copy=False), rows.offsets).rows()


def _leaves(rows: Mapping[str, Any] | SampleBatch) -> list[tuple[_Leaf, NDArray[Any]]]:
    return [((name, path), values) for name, column in rows.items() for path, values in leaves(column)]


def _within(path: Path) -> str:
    return f" at {excerpt(path_text(path), 80)}" if path else ""
