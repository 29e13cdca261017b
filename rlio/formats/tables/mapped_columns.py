"""`MappedColumns`: rlio's columns, from those of a table, by the names of a mapping."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import abc
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import concat_leaves
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves, map_structure
from rlio.batch.ragged import Ragged, item_type
from rlio.errors import MissingColumn, OptionError, RlioError, SchemaError, excerpt, raise_at
from rlio.formats.files.value_arrays import flags_in, one_a_row, standard_dtype
from rlio.formats.tables.described import hint_of, kind_of
from rlio.formats.tables.doubts import NOT, is_time_limit, mask_ends
from rlio.formats.tables.paths import paths_of, resolved, walk
from rlio.formats.tables.table import Rows, Table, cut_text
from rlio.mapping import Mapping, dotted

__all__ = ["WAY_OF_ROWS", "Flag", "MappedColumns", "as_flags", "is_cut", "spelled"]

_SHOWN_CODES: Final = 50
#: A column of more values has no categories.
_MOST_CODES: Final = 4096
_LISTS: Final = (Columns.OBS, Columns.NEXT_OBS, Columns.ACTIONS)
_NUMBERS: Final = (Columns.OBS, Columns.NEXT_OBS, Columns.ACTIONS, Columns.REWARDS, Columns.T)
#: A flag that is true where a column is 0, and what may be another expression.
_NOT: Final = re.compile(r"not\s+(\S.*)")
_EXPRESSION: Final = re.compile(r"[~!=<>&|()*+-]|\b(not|and|or)\b")

WAY_OF_ROWS: Final = (
    "if later steps are padding, name their mask in valid=, or the number of steps in lengths=; if arrays "
    "have the shape (steps, environments, ...), or a row has several episodes, load the file, and pass one "
    "long array a column to rlio.from_arrays, such as obs.swapaxes(0, 1).reshape(-1, *obs.shape[2:])"
)


class Flag(NamedTuple):
    """A column of flags: its path, and whether a flag is where the column is 0."""

    path: tuple[str, ...]
    is_inverted: bool


class MappedColumns:
    """The columns that a mapping makes of a table; a base class, which `MappedSource` fills."""

    uri: str
    notes: list[str]
    _table: Table
    _map: Mapping
    #: rlio's columns, with paths for names.
    _specs: dict[str, Any]
    #: First row of each file, and the number of rows.
    _file_starts: list[int]
    _rows: int
    _ids: list[tuple[str, ...]]
    _flags: list[Flag | None]
    _first: Flag | None
    #: Flags with one value an episode.
    _of_episodes: dict[tuple[str, ...], NDArray[np.bool_]]
    #: Of columns of categories: the code of each.
    _codes: dict[tuple[str, ...], dict[Any, int]]

    def _path(self, name: object, option: str) -> tuple[str, ...]:
        """Top-level column, and the keys below it."""
        return resolved(self._table, name, option)

    def _flag_of(self, option: str) -> Flag | None:
        """The column of flags that an option names; ``"not x"``: the flags are where x is 0."""
        name = getattr(self._map, option)
        if not isinstance(name, str):
            return None
        negated = None if name in self._table.names else _NOT.fullmatch(name)
        text = name if negated is None else negated[1]
        try:
            return Flag(self._path(text, option), is_inverted=negated is not None)
        except MissingColumn as error:
            if _EXPRESSION.search(text) is None:
                raise
            raise MissingColumn(
                f"{str(error).rpartition(' [')[0]}; besides a column, 'not COLUMN' is the only expression: "
                "compute any other, and add it to the table as a column",
                column=name,
            ) from error

    def _resolved(self, spec: Any, name: str) -> Any:
        """The spec with paths for names."""
        if isinstance(spec, abc.Mapping) and spec:
            return {key: self._resolved(part, f"{name}.{key}") for key, part in spec.items()}
        if isinstance(spec, Sequence) and not isinstance(spec, str) and spec:
            return [self._path(part, name) for part in spec]
        return self._path(spec, name)

    def _paths(self) -> set[tuple[str, ...]]:
        """All that is read."""
        mapped = {path for spec in self._specs.values() for path in paths_of(spec)}
        flags = {flag.path for flag in (*self._flags, self._first) if flag is not None}
        return mapped | {*self._ids, *(flags - self._of_episodes.keys())}

    def _read(
        self,
        start: int,
        stop: int,
        paths: Collection[tuple[str, ...]],
        *,
        keep: NDArray[np.bool_] | None = None,
        fills: bool = False,
        flag: tuple[str, ...] = (),
    ) -> dict[tuple[str, ...], Any]:
        """Columns of a stretch of rows, over all files. None: no row has a value."""
        names = sorted({path[0] for path in paths})
        parts: list[Any] = []
        file = max(0, min(bisect_right(self._file_starts, start) - 1, len(self._table.rows) - 1))
        while file < len(self._table.rows) and (self._file_starts[file] < stop or not parts):
            base = self._file_starts[file]
            low, high = max(start - base, 0), min(stop - base, self._table.rows[file])
            if low < high or not parts:
                try:
                    at = base + low - start
                    mask = None if keep is None else keep[at : at + high - low]
                    parts.append(self._table.read(Rows(file, low, max(low, high), mask, fills, flag), names))
                except RlioError as error:
                    raise_at(error, uri=self._table.uri_of(file))
            file += 1
        at_path = _sparse_flag if flag else walk
        found = {path: _joined([at_path(part[path[0]], path) for part in parts], path) for path in paths}
        for path in found.keys() & self._codes.keys():
            found[path] = _coded(found[path], self._codes[path], path, fills=fills)
        return found

    def _stretches(self, paths: Iterable[tuple[str, ...]]) -> Iterator[tuple[int, int]]:
        """Stretches of rows, of which the caller reads some columns in turn; see `Table.stretches`."""
        for file, start, stop, *_ in self._table.stretches({path[0] for path in paths}):
            yield self._file_starts[file] + start, self._file_starts[file] + stop

    def _codes_of(self, given: Any) -> dict[tuple[str, ...], dict[Any, int]]:
        """The categories of columns, with their codes."""
        found = {self._path(name, "codes"): values for name, values in given.items()}
        if unused := [".".join(path) for path in found if path not in self._paths()]:
            raise OptionError(
                f"codes={excerpt(unused)}: expected columns of the table that the mapping names, such as "
                "those in columns="
            )
        codes = {}
        for path, values in found.items():
            listed = self._categories(path) if values is None else values
            codes[path] = {value: code for code, value in enumerate(listed)}
            shown = ", ".join(f"{code} = {value!r}" for code, value in enumerate(listed[:_SHOWN_CODES]))
            more = f", and {len(listed) - _SHOWN_CODES} more" if len(listed) > _SHOWN_CODES else ""
            self.notes.append(f"Codes of {'.'.join(path)}: {shown}{more}.")
        return codes

    def _categories(self, path: tuple[str, ...]) -> list[Any]:
        """The values of a column of categories, sorted."""
        name, values = ".".join(path), set[Any]()
        for start, stop in self._stretches([path]):
            column = _as_texts(self._read(start, stop, [path], fills=self._map.final_row)[path])
            if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "OUiub":
                raise SchemaError(
                    f"codes: found {kind_of(column)}, expected texts or whole numbers", column=name
                )
            values.update(column.tolist())
            if len(values) > _MOST_CODES:
                raise SchemaError(f"codes: found more than {_MOST_CODES} categories", column=name)
        values -= {None, ""}  # A row that needs a value is refused when it is read.
        if len({type(value) for value in values} - {bool}) > 1 or any(
            not isinstance(v, str | int) for v in values
        ):
            raise SchemaError(
                "codes: found values of several types, expected texts or whole numbers", column=name
            )
        return sorted(values)

    def _keep(self, name: str, first: NDArray[np.bool_], last: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Which rows have the values of a column; None: all. ``first``, ``last``: those rows of episodes.

        A final row has an observation only::

            row                   0    1    2 = last
            obs                   o0   o1   o2
            actions               a0   a1   -          keep: not the last
            actions, if shifted   -    a0   a1         keep: not the first
        """
        if not self._map.final_row or name == Columns.OBS:
            return None
        return ~first if name in self._map.shifted else ~last

    def _built(self, name: str, start: int, stop: int, keep: NDArray[np.bool_] | None = None) -> Any:
        """A column of rlio. ``keep``: which of the rows; None: all."""
        spec = self._specs[name]
        found = self._read(start, stop, list(paths_of(spec)), keep=keep)
        return self._made(spec, found, name)

    def _made(self, spec: Any, found: abc.Mapping[tuple[str, ...], Any], name: str) -> Any:
        top = name.partition(".")[0]
        if isinstance(spec, dict):
            return {key: self._made(part, found, f"{name}.{key}") for key, part in spec.items()}
        if isinstance(spec, list):
            parts = [_numbers(found[path], path, top, is_flat=True) for path in spec]
            return self._cast(np.stack(parts, axis=1), name)
        value = found[spec]
        if value is None and top != Columns.INFOS:
            raise SchemaError("no row has a value", column=".".join(spec))
        if top in _NUMBERS:
            value = map_structure(lambda leaf: _numbers(leaf, spec, top), value)
        return map_structure(lambda leaf: self._cast(leaf, name), value)

    def _cast(self, array: NDArray[Any], name: str) -> NDArray[Any]:
        """Return the array in the requested dtype, as a copy."""
        own = name.replace(Columns.NEXT_OBS, Columns.OBS, 1) if name.startswith(Columns.NEXT_OBS) else name
        dtypes = {dotted(key): dtype for key, dtype in (self._map.dtypes or {}).items()}
        wanted = next((dtypes[key] for key in (name, own, own.partition(".")[0]) if key in dtypes), None)
        if (items := item_type(array)) is not None and items[0].kind in "biuf":
            rows = Ragged.of(array)
            return Ragged(self._cast(rows.values, name), rows.offsets).rows()
        array = one_a_row(name, array)
        if wanted is None:
            try:
                return standard_dtype(name, array.astype(array.dtype.newbyteorder("="), order="C"))
            except SchemaError as error:
                raise SchemaError(str(error), column=name) from error
        try:
            kind = np.dtype(wanted)
            with np.errstate(all="ignore"):
                cast = array.astype(kind)
        except (TypeError, ValueError) as error:
            raise SchemaError(f"dtypes: {excerpt(wanted)}: {excerpt(str(error))}", column=name) from error
        is_whole = kind.kind in "biu" or array.dtype.kind in "biu"
        with np.errstate(all="ignore"):
            is_kept = cast.astype(array.dtype) == array if is_whole else np.isinf(cast) == np.isinf(array)
        if not np.all(is_kept):
            raise SchemaError(f"dtypes: {kind} does not hold all values of the column", column=name)
        return cast

    def _read_flags(
        self, start: int, stop: int, flags: Sequence[Flag], others: Sequence[tuple[str, ...]] = ()
    ) -> tuple[dict[tuple[str, ...], Any], list[NDArray[np.bool_]]]:
        """Other columns of a stretch of rows, and flags."""
        fills = self._map.final_row
        cuts = {flag.path: self._read_cuts(start, stop, flag) for flag in flags if is_cut(flag)}
        # A mask that is missing in a final row must not become 0, which is an end.
        strict = [flag.path for flag in flags if flag.is_inverted]
        loose = [*others, *(flag.path for flag in flags if not (flag.is_inverted or is_cut(flag)))]
        found = self._read(start, stop, loose, fills=fills) if loose else {}
        if strict:
            found |= self._read(start, stop, strict)
        return found, [
            cuts[flag.path] if is_cut(flag) else as_flags(found[flag.path], flag, fills=fills)
            for flag in flags
        ]

    def _read_cuts(self, start: int, stop: int, flag: Flag) -> NDArray[np.bool_]:
        """A flag of time limits, which rows that were not cut may lack."""
        value = self._read(start, stop, [flag.path], fills=True, flag=flag.path[1:])[flag.path]
        return np.zeros(stop - start, np.bool_) if value is None else as_flags(value, flag, fills=True)


def _sparse_flag(found: Any, path: tuple[str, ...]) -> Any:
    """The flag at a path of a column; False where no object of a file has it.

    Infos may be texts: JSON, or what Python prints.
    """
    rows = found.tolist() if isinstance(found, np.ndarray) and found.dtype.kind in "OU" else []
    if any(isinstance(row, str) for row in rows):
        pattern = re.compile(cut_text(path[1:]))
        return np.array([isinstance(row, str) and pattern.search(row) is not None for row in rows])
    try:
        return walk(found, path)
    except MissingColumn:
        return np.zeros(len(leaves(found)[0][1]), np.bool_)


def _joined(parts: list[Any], path: tuple[str, ...]) -> Any:
    """The column of a stretch over several files."""
    parts = [part for part in parts if part is not None and len(leaves(part)[0][1])] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    try:
        return map_structure(lambda *each: concat_leaves(each), *parts)
    except SchemaError as error:
        raise SchemaError(f"the files differ: {error}", column=".".join(path)) from error


def _numbers(value: Any, path: tuple[str, ...], top: str, *, is_flat: bool = False) -> NDArray[Any]:
    name = ".".join(path)
    kind = value.dtype.kind if isinstance(value, np.ndarray) else "no array"
    if kind == "O" and top in _LISTS and not is_flat:  # Rows of any number of items.
        items = item_type(value)
        kind = items[0].kind if items is not None else kind if len(value) else "i"
    if kind not in "biuf":
        raise SchemaError(f"{top} needs numbers, found {kind_of(value)}{hint_of(value, name)}", column=name)
    assert isinstance(value, np.ndarray)
    if is_flat and value.size != len(value):
        raise SchemaError(f"columns side by side have one number a row, found {value.shape[1:]}", column=name)
    return value.reshape(len(value)) if is_flat else value


def _as_texts(values: Any) -> Any:
    """Fixed bytes, as NumPy and HDF5 have texts, as texts."""
    is_bytes = isinstance(values, np.ndarray) and values.dtype.kind == "S"
    return np.char.decode(values, "utf-8") if is_bytes else values


def _coded(
    values: Any, codes: abc.Mapping[Any, int], path: tuple[str, ...], *, fills: bool
) -> NDArray[np.int64]:
    """The codes of a column of categories."""
    name = ".".join(path)
    values = _as_texts(values)
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise SchemaError(f"codes: found {kind_of(values)}, expected a category a row", column=name)
    listed = values.tolist()
    found = [codes.get(value) for value in listed]
    if fills:  # A final row has no category.
        found = [0 if code is None and listed[row] in ("", None) else code for row, code in enumerate(found)]
    if None in found:
        raise SchemaError(
            f"codes: found {excerpt(listed[found.index(None)])}, expected one of {excerpt([*codes], 200)}",
            column=name,
        )
    return np.array(found, np.int64)


def is_cut(flag: Flag | None) -> bool:
    """Whether a flag is true where a time limit was reached, and no state is terminal; rows may lack it."""
    return flag is not None and is_time_limit(flag.path) and not flag.is_inverted


def spelled(flag: Flag) -> str:
    """The flag as a mapping names it."""
    return NOT * flag.is_inverted + ".".join(flag.path)


def as_flags(value: Any, flag: Flag, *, fills: bool) -> NDArray[np.bool_]:
    """The values of a column as flags; ``fills``: a final row has none."""
    name = ".".join(flag.path)
    if not isinstance(value, np.ndarray):
        raise SchemaError(f"a flag is one value a row, found {kind_of(value)}", column=name)
    value = one_a_row(Columns.TERMINATEDS, value)
    if value.ndim > 1:
        raise SchemaError(
            f"a flag is one value a row, found rows of the shape {value.shape[1:]}; {WAY_OF_ROWS}",
            column=name,
        )
    if flag.is_inverted:
        return mask_ends(name, value, fills=fills)
    if fills and value.dtype.kind == "f":  # A final row has no flag.
        value = np.nan_to_num(value, nan=0.0)
    elif fills and value.dtype.kind in "OU":
        value = np.array(
            [one if one not in ("", None) and one == one else False for one in value.tolist()], object
        )
    return np.array(flags_in(name, value), np.bool_)
