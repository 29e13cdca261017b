"""The leaves of columns: each array of a logical column, found in a batch, and its names.

A logical column ("obs") may be nested; its leaves are stored. A leaf's name is the column and the path joined
by ``/`` (escaped as in JSON Pointer).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.batch.columns import AGENT_ID, Columns
from rlio.batch.encoded_picture import Codec, is_encoded
from rlio.batch.infos import NOTES, REST, info_objects, is_typed
from rlio.batch.nested import Path, leaves, rebuilt
from rlio.errors import SchemaConflict, SchemaError
from rlio.limits import DEFAULT_LIMITS
from rlio.schemas.column import ColumnSpec
from rlio.schemas.info_columns import InfoForm, ParsedInfos
from rlio.schemas.json_values import plain_array
from rlio.schemas.structure import Structure, structure_of_space

__all__ = [
    "EPISODE_KEYS",
    "KEY",
    "READ_WHOLE",
    "RESERVED",
    "STORED_NEXT_OBS",
    "Leaf",
    "column_of_name",
    "info_array",
    "info_leaves",
    "is_in",
    "is_named",
    "leaf_array",
    "leaf_name",
    "leaves_of",
    "missing_in",
    "parsed_infos",
    "rebuild",
    "structures_of",
]

#: The physical column of ``new_obs``. Nearly all its values are null, because they are the ``obs`` of a later
#: row. Under its own name, other tools would take it for the complete next observations.
STORED_NEXT_OBS: Final = "_new_obs"
#: Names of the format's own columns. User columns cannot have these names.
RESERVED: Final = frozenset({"_next", "_stream", "_batch", STORED_NEXT_OBS})
#: The columns that tell episodes apart. Other values in them would be ignored, and episodes joined.
EPISODE_KEYS: Final = frozenset((Columns.EPS_ID, Columns.AGENT_INDEX, AGENT_ID, Columns.ENV_ID))
#: What a row of them is.
KEY: Final = "one whole number or text"
#: What to do with infos that were read as the arrays of their keys.
READ_WHOLE: Final = (
    "; columns=['infos/x'] reads the arrays of keys: read 'infos' whole to write them beside infos, or write "
    "the arrays as a column of another name"
)
#: The writer of each row in merged data: one text per row, and nothing else under this name.
_WRITER: Final = "_writer"
# Endings of the columns of older frames, and of Parquet's name for the values of a list.
_RESERVED_ENDS: Final = ("#older", ".list.element")


@dataclass(frozen=True)
class Leaf:
    """One array of a logical column: its place in the column and its stored name."""

    column: str
    path: Path
    physical: str
    spec: ColumnSpec

    @property
    def name(self) -> str:
        """The column and the path, as users see them."""
        return leaf_name(self.column, self.path)


def leaf_name(column: str, path: Path) -> str:
    """Return the name of a leaf, with JSON Pointer's escapes, because a key may hold a slash.

    The residual of infos has the name of the column itself.
    """
    if path == REST and column == Columns.INFOS:
        return column
    tokens = [str(token).replace("~", "~0").replace("/", "~1") for token in (column, *path)]
    return "/".join(tokens)


def column_of_name(name: str) -> str:
    """The column of a name such as ``obs/camera``, of a part of a nested column; or of the column itself."""
    return name.partition("/")[0].replace("~1", "/").replace("~0", "~")


def is_named(leaf: Leaf, names: Collection[str] | None) -> bool:
    """Whether ``names`` has a leaf: by its column, or by a part of the column (``obs/camera``); None: all."""
    return is_in(leaf.column, leaf.path, names)


def is_in(column: str, path: Path, names: Collection[str] | None) -> bool:
    """`is_named` for the leaf of a column at a path."""
    if names is None or column in names:
        return True
    if column == Columns.INFOS and path:
        last = path[-1]
        if path[0] == NOTES:
            return False
        if isinstance(last, str) and last.startswith("_"):  # The mask of a key comes with the key.
            path = (*path[:-1], last[1:])
    return any(leaf_name(column, path[:n]) in names for n in range(1, len(path) + 1))


def rebuild(found: list[tuple[Path, Any]]) -> Any:
    """Return a column, rebuilt from its leaves."""
    if len(found) == 1 and not found[0][0]:
        return found[0][1]
    return rebuilt(tuple([path for path, _ in found]), [item for _, item in found])


def leaves_of(
    batch: SampleBatch,
    *,
    pictures: Mapping[str, Codec] | None = None,
    is_written: bool = True,
    has_info_keys: bool = False,
    expected: Mapping[str, Structure] = MappingProxyType({}),
) -> tuple[Leaf, ...]:
    """Return the leaves of a batch, named as if there were no other policy."""
    found, pictures, missing = [], pictures or {}, missing_in(batch)
    for column in batch:
        if column in RESERVED:
            raise SchemaError(f"column {column!r} is reserved by the format; rename yours", column=column)
        if column == Columns.INFOS and has_info_keys and _are_objects(infos := batch._raw(column)):
            _check_no_part_of_infos(batch)
            found += info_leaves(InfoForm().grown(parsed_infos(infos)))
            continue
        _check_nesting(batch[column], column)
        for path, item in leaves(batch[column]):
            name = leaf_name(column, path)
            if is_written and len(path) > DEFAULT_LIMITS.nesting:
                raise SchemaError(f"it nests more than {DEFAULT_LIMITS.nesting} deep", column=name)
            if name.endswith(_RESERVED_ENDS):
                raise SchemaError(
                    f"names that end in {_RESERVED_ENDS} are reserved by the format", column=name
                )
            as_obs = leaf_name(Columns.OBS, path) if column == Columns.NEXT_OBS else name
            array = leaf_array(item, name)
            if (
                missing is not None
                and column == Columns.NEXT_OBS
                and array.dtype == object
                and not is_encoded(array)
            ):
                array = array[~missing]  # Rows that have none may hold anything.
            codec, structure = pictures.get(as_obs), expected.get(as_obs)
            spec = ColumnSpec.of(array, column=name, codec=codec, expected=structure)
            if column == _WRITER and (path or spec.kind != "text" or spec.dtype[1] != "U" or spec.shape):
                raise SchemaError(f"column {column!r} is reserved by the format; rename yours", column=column)
            # (Time-major batches are refused as such, once their rows are cut.)
            if not batch.time_major and (expects := _unlike_standard(column, path, spec)):
                raise SchemaError(
                    f"found {spec.dtype} of shape {spec.shape} per row, expected {expects} per row",
                    column=name,
                )
            found.append(Leaf(column, path, name, spec))
    return tuple(found)


def _unlike_standard(column: str, path: Path, spec: ColumnSpec) -> str | None:
    """What a column should hold by which rlio tells episodes and steps apart; None: it does, or is another.

    Otherwise its rows would be joined by what is left, to wrong episodes.
    """
    is_one = not path and not spec.shape
    if column == Columns.NEXT_OBS_VALID:
        return None if is_one and spec.dtype == "|b1" else "one bool"
    if column in (Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.T):
        return None if is_one and spec.numpy.kind in "biuf" else "one number"
    if column in EPISODE_KEYS:
        # Of numbers and texts together, each row is checked.
        is_key = spec.numpy.kind in "iuU" or (spec.numpy.kind == "O" and spec.kind in ("text", "json"))
        return None if is_one and is_key else KEY
    return None


def info_leaves(form: InfoForm) -> list[Leaf]:
    """Return the leaves of infos in a form, named as if there were no other policy."""
    return [Leaf(Columns.INFOS, path, leaf_name(Columns.INFOS, path), spec) for path, spec in form.leaves()]


def structures_of(spaces: Any) -> dict[str, Structure]:
    """Return leaf -> the structure that the spaces of a policy give its rows, where they have one."""
    return {
        leaf_name(column, path): structure
        for kind, column in (("observation", Columns.OBS), ("action", Columns.ACTIONS))
        if isinstance(spaces, Mapping) and isinstance(spaces.get(kind), Mapping)
        for path, structure in _structures_in(spaces[kind], ())
        if structure.form not in ("array", "rows", "text")
    }


def _structures_in(space: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Structure]]:
    if space["type"] in ("Dict", "Tuple"):
        inner = space["spaces"] if space["type"] == "Dict" else enumerate(space["spaces"])
        for key, child in inner:
            yield from _structures_in(child, (*path, key))
    elif (structure := structure_of_space(space)) is not None:
        yield path, structure


def _check_no_part_of_infos(batch: SampleBatch) -> None:
    """Refuse a column whose name is that of a key of infos."""
    for name in batch:
        if name.startswith(f"{Columns.INFOS}/"):
            raise SchemaError(
                f"the name is that of the key {name.partition('/')[2]!r} of the column 'infos'; rename yours",
                column=name,
            )


def missing_in(batch: SampleBatch) -> NDArray[np.bool_] | None:
    """Return a mask of the rows that have no ``new_obs``; None: the batch says nothing of it."""
    if isinstance(batch.get(Columns.NEXT_OBS_VALID), dict | tuple | None):
        return None  # Or nested, which is refused.
    found: NDArray[np.bool_] = ~to_numpy(batch[Columns.NEXT_OBS_VALID]).astype(bool)
    return found


def leaf_array(item: Any, column: str) -> NDArray[Any]:
    """Return a leaf as an array."""
    try:
        array = to_numpy(item)
    except (TypeError, RuntimeError) as error:  # NumPy has no form of some tensors, such as bfloat16.
        raise SchemaError(f"found {item.dtype}: {error}; cast it before writing", column=column) from error
    return plain_array(array, column)


def _check_nesting(value: Any, column: str) -> None:
    """Refuse empty dicts and tuples: without a leaf, a file could not restore them."""
    if isinstance(value, dict | tuple):
        if not value:
            raise SchemaError(
                "it holds an empty dict or tuple, which cannot be stored; leave it out", column=column
            )
        for part in value.values() if isinstance(value, dict) else value:
            _check_nesting(part, column)


def _are_objects(infos: Any) -> bool:
    """Whether a column of infos has an object a row, also in the typed form."""
    return is_typed(infos) or (isinstance(infos, np.ndarray) and infos.dtype == object and infos.ndim == 1)


def info_array(infos: Any) -> NDArray[Any]:
    """Return infos that are not in the typed form.

    Raises:
        SchemaConflict: They are no objects.
    """
    if not _are_objects(infos):
        is_nested = isinstance(infos, dict | tuple)
        found = "nested columns" if is_nested else f"{infos.dtype} {infos.shape}"
        raise SchemaConflict(
            f"found {found}, expected an object a row as before{READ_WHOLE if is_nested else ''}",
            column=Columns.INFOS,
        )
    array: NDArray[Any] = infos
    return array


def parsed_infos(infos: Any) -> ParsedInfos:
    """Return the keys of infos, an object a row."""
    return ParsedInfos.of(info_objects(infos) if is_typed(infos) else info_array(infos))
