"""The values of rows that a filter reads: `Ref` names one, `values_of` finds it in a batch.

Example:
    >>> values_of({"obs": np.array([[1.0, 2.0]])}, Ref("obs", (1,))).tolist()
    [2.0]
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import is_tensor, object_column, to_numpy
from rlio.batch.columns import Columns
from rlio.batch.infos import NOTES, info_objects, is_typed, mask_path
from rlio.batch.nested import Path
from rlio.batch.other_names import did_you_mean
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.query.derived_columns import EPISODE_COLUMNS
from rlio.schemas.column import ColumnSpec, object_rows

__all__ = ["Ref", "as_array", "example_of", "filled", "no_column", "values_of"]


class Ref(NamedTuple):
    """One value of each row: a column, keys into a nested column, and indexes into the row's array.

    ``length``: not the value there, but its number of items.
    """

    column: str
    path: Path = ()
    length: bool = False


def as_array(value: Any) -> NDArray[Any]:
    """The values as an array of NumPy."""
    return np.asarray(to_numpy(value) if is_tensor(value) else value)


def example_of(spec: ColumnSpec) -> NDArray[Any]:
    """One row of a column."""
    if spec.kind == "text":
        return np.array([b"" if spec.dtype[1] == "S" else ""])
    if spec.kind in ("ragged", "nested"):
        return object_rows([spec.empty_row])
    return np.array([{}], object) if spec.kind == "json" else np.zeros((1, *spec.shape), spec.numpy)


def no_column(name: str, known: Iterable[str]) -> MissingColumn:
    """The error of a column that is absent."""
    hint = ""
    if name in EPISODE_COLUMNS:
        hint = "; it is derived from whole episodes in a store: read with cache='memory' or 'disk'"
    stored = sorted({*known}.difference(EPISODE_COLUMNS))
    return MissingColumn(
        f"the filter needs a column {excerpt(name)}; the columns are {', '.join(stored)}; derived from whole "
        f"episodes are {', '.join(EPISODE_COLUMNS)}{hint or did_you_mean(name, [*stored, *EPISODE_COLUMNS])}",
        column=name,
    )


def values_of(columns: Mapping[str, Any], ref: Ref) -> NDArray[Any]:
    """The values of a reference, shape (rows,); a view, or a copy of infos."""
    if ref.column == Columns.INFOS and is_typed(typed := _raw(columns, ref.column)):
        own = _of_info_key(typed, ref)
        if own is not None:
            return own
        columns = {ref.column: info_objects(typed)}
    leaf, steps = _located(columns, ref)
    array = as_array(leaf)
    if not array.ndim:
        raise SchemaError("found a single value, expected one a row", column=ref.column)
    if ref.length:
        return _lengths(array, steps, ref)
    if steps and array.dtype.kind == "O" and array.ndim == 1 and not any(type(x) is str for x in array):
        return _of_objects(array, steps, ref)
    index = tuple(step for step in steps if isinstance(step, int))
    if len(index) < len(steps):
        raise MissingColumn(
            f"the filter reads {_written(ref)}, but the value there is an array, which has no keys",
            column=ref.column,
        )
    shape = array.shape[1:]
    if len(index) != len(shape) or not all(-n <= at < n for at, n in zip(index, shape, strict=True)):
        example = f"[{', '.join('0' * len(shape))}]" if shape else ""
        raise OptionError(
            f"the filter reads {_written(ref)} of a column with rows of shape {shape}: name one value, "
            f"such as {ref.column}{example}",
            column=ref.column,
        )
    objects = array.dtype.kind == "O" and not all(type(value) is str for value in array.tolist())
    if objects or array.dtype.kind not in "biufSUO":
        what = "objects" if objects else str(array.dtype)
        hint = f"; name a key, such as {ref.column}['success']" if objects and not ref.path else ""
        if array.dtype.kind in "mM" or (objects and isinstance(array[0], datetime.date)):
            what = f"{what} of time" if objects else what
            hint = f"; times by a function, such as lambda rows: rows[{ref.column!r}] > moment"
        raise OptionError(
            f"the filter reads {_written(ref)}, which holds {what}: numbers, bools and texts can be compared"
            f"{hint}",
            column=ref.column,
        )
    at: Any = (slice(None), *index)
    found: NDArray[Any] = array[at]
    return found


def _raw(columns: Mapping[str, Any], name: str) -> Any:
    """A column as a batch has it, without making objects of infos; None: there is none."""
    if isinstance(columns, SampleBatch):
        return columns._raw(name) if name in columns else None
    return columns.get(name)


def _of_info_key(infos: Mapping[str, Any], ref: Ref) -> NDArray[Any] | None:
    """The values of a key that is a column, as `_of_objects` gives them; None: they may be elsewhere."""
    node: Any = infos
    path: Path = ()
    steps = list(ref.path)
    while isinstance(node, dict) and steps and isinstance(key := steps[0], str):
        if key not in node or key.startswith("_") or not key:
            return None
        node, path = node[key], (*path, steps.pop(0))
    rest = infos[NOTES][NOTES]
    if isinstance(node, dict) or ref.length or len(steps) != node.ndim - 1 or node.dtype == np.uint64:
        return None
    if rest.dtype == object and any(left is not None for left in rest):
        return None
    if not all(isinstance(at, int) and -n <= at < n for at, n in zip(steps, node.shape[1:], strict=True)):
        return None
    mask: Any = infos
    for part in mask_path(path):
        mask = mask[part]
    has: NDArray[np.bool_] = mask
    found: NDArray[Any] = node[(slice(None), *steps)]
    # Values of objects are Python's own.
    found = found.astype({"f": np.float64, "b": np.bool_}.get(found.dtype.kind, np.int64))
    if has.all():
        return found
    made = found.astype(object)
    made[~has] = None
    return made


def _lengths(rows: NDArray[Any], steps: Path, ref: Ref) -> NDArray[Any]:
    """The number of items in each row, shape (rows,); objects, with None, if some rows have no value."""
    found = [_at(row, steps) if steps else row for row in rows]
    try:
        lengths = [None if value is None else len(value) for value in found]
    except TypeError as error:
        raise OptionError(
            f"the filter reads {_written(ref)}, but {error}: lists, arrays, objects and texts have a length",
            column=ref.column,
        ) from error
    return object_column(lengths) if None in lengths else np.array(lengths, np.int64)


def _written(ref: Ref) -> str:
    text = ref.column + "".join(f"[{step!a}]" for step in ref.path)
    return f"len({text})" if ref.length else text


def _of_objects(rows: NDArray[Any], steps: Path, ref: Ref) -> NDArray[Any]:
    """The values at a place in the object of each row, shape (rows,); objects, with None, if some lack it."""
    found = [_at(value, steps) for value in rows.tolist()]
    known = [value for value in found if value is not None]
    typed = _typed(known)
    if known and typed is None:
        raise OptionError(
            f"the filter reads {_written(ref)}, which holds {excerpt(known)}: numbers, bools and texts can "
            "be compared, those of one kind",
            column=ref.column,
        )
    return typed if typed is not None and len(known) == len(found) else object_column(found)


def _at(value: Any, steps: Path) -> Any:
    """The value at some keys and indexes of an object, as Python's own; None if there is none."""
    for step in steps:
        if isinstance(value, str | bytes):
            return None  # A letter of it is no value of its own.
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.size == 1 else value


def _typed(values: Sequence[Any]) -> NDArray[Any] | None:
    """Python's values as an array of one kind; None if they have several, or none that can be compared."""
    kinds = set(map(type, values))
    if not kinds:
        return None
    if kinds == {str}:
        return object_column(values)
    if kinds == {bool}:
        return np.array(values)
    if not kinds <= {bool, int, float}:
        return None
    try:
        return np.array(values, np.float64 if float in kinds else np.int64)
    except OverflowError:  # Integers of more than 64 bits.
        return None


def filled(value: Any) -> tuple[Any, NDArray[np.bool_] | None]:
    """Values of objects, typed, with any value where there is none, and where that is; others themselves.

    The values are None if none is there, so that their kind is not known.
    """
    if not (isinstance(value, np.ndarray) and value.dtype.kind == "O"):
        return value, None
    missing = np.array([one is None for one in value], bool)
    if len(value) and not missing.any():
        return value, None
    known = _typed(value[~missing].tolist())
    if known is None:
        return None, missing
    found = np.full(len(value), known[0], known.dtype)
    found[~missing] = known
    return found, missing


def _located(columns: Mapping[str, Any], ref: Ref) -> tuple[Any, Path]:
    """The leaf that a reference leads to, and the other steps: indexes into its array, or keys of objects."""
    if ref.column not in columns:
        raise no_column(ref.column, columns)
    value, path = columns[ref.column], list(ref.path)
    while isinstance(value, dict | tuple):
        parts = value if isinstance(value, dict) else dict(enumerate(value))
        if not path:
            raise OptionError(
                f"the filter reads {_written(ref)}, which is nested: name one of {excerpt(list(parts))}",
                column=ref.column,
            )
        step = path.pop(0)
        if step not in parts:
            raise MissingColumn(
                f"the filter reads {_written(ref)}, but {excerpt(step)} is not among the keys "
                f"{excerpt(list(parts))}",
                column=ref.column,
            )
        value = parts[step]
    return value, tuple(path)
