"""HDF5 by a mapping: a dataset is a column, and has a row a step.

An episode is a group whose name matches ``Mapping.episode``, such as ``data/demo_*``; names are then relative
to the group. Otherwise the datasets of a file are its columns, and episodes end as in any table: by an id, by
a flag, or with the file. Groups are nested columns: ``obs`` has the parts ``obs/a`` and ``obs/b``.

A dataset of variable length (`h5py.vlen_dtype`) has rows of any number of items (`rlio.Ragged`).

With ``final_row=True``, a column may have one row less than the observations: that of the final observation.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns
from rlio.batch.other_names import did_you_mean
from rlio.errors import MissingColumn, OptionError, SchemaError, UnsafeData, excerpt
from rlio.formats.files.hdf5_files import Hdf5Files, leaves_of, tree_of
from rlio.formats.files.step_columns import suggested_mapping
from rlio.formats.format import Format, Marks, titles_of_read
from rlio.formats.place import Place
from rlio.formats.tables.mapping import MappedSource, by_own_names
from rlio.formats.tables.paths import flags_of, names_of
from rlio.formats.tables.table import Rows, Table
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.mapping import DERIVE
from rlio.mapping import Mapping as ColumnMapping
from rlio.storage import InputFiles, Span, each_file
from rlio.storage.inputs import natural_order
from rlio.support.calls import closing_on_error
from rlio.support.progress import each

__all__ = ["Hdf5Table", "suggested_for"]

FORMAT = Format(
    name="hdf5",
    title="HDF5",
    marks=Marks(endings=(".hdf5", ".h5"), by_ending=True),
    source="rlio.formats.tables.hdf5:open_by_names",
    table="rlio.formats.tables.hdf5:Hdf5Table",
    advice="read it with rlio.read and a mapping (docs/mapping.md)",
    about="Datasets by rlio's names; or any by a mapping, also episodes that are groups (docs/mapping.md).",
)

T = TypeVar("T")

_GLOB: Final = re.compile(r"[*?[]")
_NUMBERED: Final = re.compile(r"(.*?)[0-9]+")
# Levels that `suggested_for` looks for groups of episodes.
_LEVELS: Final = 2


class Hdf5Table(Table):
    """HDF5 files; a `Table`. Only the rows that are asked for are read.

    Args:
        place: The files.
        limits: Bounds on the files.
        last_only: Flags of groups that count in the last step alone.

    Attributes:
        early: (number of a file, group) of those with such a flag before the last step, as far as read.
    """

    def __init__(self, place: Place, *, limits: Limits, last_only: Sequence[str] = ()) -> None:
        super().__init__(place.uri, place.files, limits)
        self._last_only = frozenset(last_only)
        self.early: set[tuple[int, str]] = set()
        self._limits = limits
        self._handles = Hdf5Files(place.files, limits)
        self.inputs: InputFiles = self._handles.inputs
        #: Of each file: the groups of its episodes ("": the file itself), and the rows before each.
        self._groups: list[list[str]] = []
        self._starts: list[list[int]] = []
        #: (number of a file, pattern) -> the groups that match.
        self._matched: dict[tuple[int, str], list[str]] = {}
        #: Whether a file is a table, and no episode.
        self._is_flat = True
        #: How many rows less than the observations a column may have.
        self._lacks = 0
        #: The columns of observations, if they have one row more than all others in each episode.
        self._obs: list[str] = []
        #: Name of a column -> the datasets in it, see `Hdf5Files.tree`.
        self._trees: dict[str, Any] = {}

    def name_datasets(self) -> None:
        """State the datasets of the first file as the columns, for a mapping that their names imply."""
        with self._handles.guarded(0):
            root = self._handles.file(0)
            self.names: Sequence[str] = _paths_below(self._handles, root, self._limits, datasets_only=True)

    # ---- what is in the files ----

    def arranged(self, mapping: ColumnMapping) -> ColumnMapping:
        """Find the groups and rows of the episodes; see `Table`."""
        glob = self._glob(mapping)
        self.names = ()
        self.uneven: frozenset[str] = frozenset()
        self._is_flat = not (glob or mapping.per_file)
        self._lacks = int(mapping.final_row and not self._is_flat)
        wanted = _names_in(mapping)
        if not self._is_flat:
            with self._handles.guarded(0):
                groups = self._matching(0, glob) if glob else [""]
            self.of_episodes: frozenset[str] = frozenset(
                flag for flag in flags_of(mapping) if self._is_one(groups, flag)
            )
            wanted = [name for name in wanted if name not in self.of_episodes]
        if not self._is_flat and not mapping.final_row and mapping.next_obs in (None, DERIVE):
            self._obs = _names_in(mapping, of=Columns.OBS)
            with self._handles.guarded(0):
                is_longer = self._is_longer(self._first(glob), wanted)
            if is_longer:
                mapping, self._lacks = replace(mapping, next_obs=DERIVE, final_row=True), 1
            else:
                self._obs = []
        for number in each_file(self.files):
            with self._handles.guarded(number):
                self._index(number, glob, wanted)
        if not glob:
            return mapping
        self.lengths: Sequence[int] | None = [b - a for rows in self._starts for a, b in pairwise(rows)]
        return replace(mapping, episode=None, per_file=None)

    def _is_one(self, groups: Sequence[str], name: str) -> bool:
        """Whether a column of the first file has one value an episode. One step has one, too."""
        with self._handles.guarded(0):
            for group in groups:
                dataset = self._handles.member(0, _join(group, name))
                if not self._handles.is_dataset(dataset) or dataset.shape not in ((), (1,)):
                    return False
                if dataset.shape == ():
                    return True
        return True

    def _is_longer(self, group: str, wanted: Collection[str]) -> bool:
        """Whether the observations of the first episode have one row more than its other columns."""
        tops = {name: top for name in wanted if (top := self._top(0, group, name)) is not None}
        rows: dict[bool, set[int]] = {True: set(), False: set()}
        for name, top in tops.items():
            leaves = leaves_of(self._tree(0, group, top), top)
            rows[name in self._obs] |= {len(self._dataset(0, group, leaf)) for leaf in leaves}
        longer, shorter = rows[True], rows[False]
        return len(longer) == len(shorter) == 1 and {count - 1 for count in longer} == shorter

    def _glob(self, mapping: ColumnMapping) -> str:
        """The pattern of the groups of episodes; "": ``episode`` names columns, or nothing."""
        names = mapping.episode or ()
        if len(names) != 1 or not _GLOB.search(names[0]):
            return ""
        with self._handles.guarded(0):
            return names[0] if self._handles.member(0, names[0]) is None else ""

    # ---- for formats that know the names ----

    def tree(self, glob: str = "") -> dict[str, Any]:
        """The members of the first episode, see `Hdf5Files.tree`: of a group, or with "" of the file."""
        with self._handles.guarded(0):
            found = self._handles.tree(0, self._first(glob))
        return found if isinstance(found, dict) else {}

    def _first(self, glob: str) -> str:
        return self._matching(0, glob)[0] if glob else ""

    def attribute(self, name: str) -> Any:
        """An attribute of the first file; None: there is none."""
        with self._handles.guarded(0):
            return self._handles.file(0).attrs.get(name)

    def further(
        self, glob: str = "", *, known: Collection[str], like: str, lacks: int = 0
    ) -> tuple[dict[str, str], list[str]]:
        """Further members of the first episode as columns of their names, and the names of the others.

        Args:
            glob: The pattern of the groups of episodes; "": the file.
            known: Members that are no further ones.
            like: A column with a row a step.
            lacks: How many rows more than that another may have.
        """
        with self._handles.guarded(0):
            return self._further(glob, known, like, lacks)

    def _further(
        self, glob: str, known: Collection[str], like: str, lacks: int
    ) -> tuple[dict[str, str], list[str]]:
        first = self._first(glob)
        rows = len(self._dataset(0, first, leaves_of(self._tree(0, first, like), like)[0]))
        columns: dict[str, str] = {}
        others: list[str] = []
        for name in self._handles.member(0, first):
            if name in known:
                continue
            try:
                leaves = leaves_of(self._tree(0, first, name), name)
                counts = {len(self._dataset(0, first, leaf)) for leaf in leaves}
                ColumnMapping({Columns.OBS: like, name: name})
            except (SchemaError, OptionError):
                counts = set()
            if counts and counts <= {rows, rows + lacks} and "." not in name:
                columns[name] = name
            else:
                others.append(name)
        return columns, others

    def episodes_of(self, number: int) -> list[tuple[str, int]]:
        """The groups of episodes of a file, with their rows."""
        lengths = (stop - start for start, stop in pairwise(self._starts[number]))
        return list(zip(self._groups[number], lengths, strict=True))

    def described(self) -> str | None:
        """The tree of names in the first file; see `Table`."""
        with self._handles.guarded(0):
            return f"the file has {tree_of(self._handles.file(0))}"

    def suggested(self) -> str:
        """The mapping that the first file may need, and the layouts that need none; see `Table`."""
        with self._handles.guarded(0):
            shown = suggested_for(self._handles, 0)
        return (
            f"{shown} (docs/mapping.md); or read it with h5py, and pass its arrays to rlio.from_arrays, or "
            "its episodes to rlio.from_episodes. The layouts of HDF5 that need no mapping are "
            + titles_of_read(hdf5=True)
        )

    def _index(self, number: int, glob: str, wanted: Collection[str]) -> None:
        """Take in a file: its groups, and the rows of the wanted columns in each."""
        groups = self._matching(number, glob) if glob else [""]
        first = self._handles.member(number, groups[0])
        names = dict.fromkeys(_paths_below(self._handles, first, self._limits))
        found = [top for name in wanted if (top := self._top(number, groups[0], name)) is not None]
        names |= dict.fromkeys(found)
        if not found:
            self._refuse_names(number, glob, wanted, list(names))
        rows = [self._rows_of(number, group, found) for group in each(groups)]
        self._groups.append(groups)
        self._starts.append([0, *accumulate(rows)])
        self.add_file(list(names), self._starts[-1][-1])

    def _refuse_names(self, number: int, glob: str, wanted: Collection[str], names: list[str]) -> NoReturn:
        """Raise because a file, or its first group, has none of the columns of a mapping."""
        groups = None if glob else _numbered_groups(self._handles, self._handles.file(number), "", _LEVELS)
        where = f"the groups {excerpt(glob)}" if glob else "the file"
        way = ""
        if groups is not None:
            way = f"; if each group is an episode, pass episode={excerpt(groups[0])}, names relative to it"
        hint = did_you_mean(next(iter(wanted)), names)
        raise MissingColumn(f"found none of the columns {excerpt(list(wanted))} in {where}{hint}{way}")

    def _matching(self, number: int, glob: str) -> list[str]:
        """The groups that match a pattern, ``demo_2`` before ``demo_10``."""
        if (number, glob) in self._matched:
            return self._matched[number, glob]
        found = [""]
        for part in glob.strip("/").split("/"):
            below = [
                _join(path, name)
                for path in found
                for name in self._handles.member(number, path)
                if fnmatchcase(name, part)
            ]
            if len(below) > self._limits.listed_names:
                raise UnsafeData(f"more than {self._limits.listed_names} groups match {excerpt(glob)}")
            found = [path for path in below if self._handles.is_group(self._handles.member(number, path))]
        if not found:
            raise MissingColumn(f"episode={excerpt(glob)}: no group of the file matches", column=glob)
        self._matched[number, glob] = sorted(found, key=natural_order)
        return self._matched[number, glob]

    def _top(self, number: int, group: str, name: str) -> str | None:
        """The column of a name, which may go on with dots; None: there is none."""
        parts = name.split(".")
        tops = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((top for top in tops if self._handles.member(number, _join(group, top))), None)

    def _rows_of(self, number: int, group: str, wanted: Collection[str]) -> int:
        """The rows that the wanted columns have in a group."""
        counts: dict[str, int] = {}
        longer: set[str] = set()
        for name in wanted:
            tree = self._tree(number, group, name)
            if self._trees.setdefault(name, tree) != tree:
                raise SchemaError(
                    f"found {excerpt(tree)} in {excerpt(group)}, expected the datasets of the first episode, "
                    f"{excerpt(self._trees[name])}: map the parts that all episodes have",
                    column=name,
                )
            for path in leaves_of(tree, name):
                counts[path] = len(self._dataset(number, group, path))
                if any(name in (own, own.partition(".")[0]) for own in self._obs):
                    longer.add(path)
        found = list(counts.values())
        if self._is_flat:  # A column of another length is refused where it is read.
            return max(found, key=lambda rows: (found.count(rows), rows), default=0)
        rows = max(found, default=0)
        is_unlike = longer and any(count != rows - (path not in longer) for path, count in counts.items())
        if min(found, default=0) < rows - self._lacks or is_unlike:
            last = "; if the longest have the observation after the last step, pass next_obs='derive' and "
            raise SchemaError(
                f"found different numbers of rows in {excerpt(group or 'the file')}, {excerpt(counts)}: "
                "expected one a step in each column"
                + (", and one more in obs, as in the first episode" if longer else "")
                + (f"{last}final_row=True" if not self._lacks and min(found) == rows - 1 else "")
            )
        return rows

    def _tree(self, number: int, group: str, name: str) -> Any:
        path = _join(group, name)
        try:
            return self._handles.tree(number, path)
        except SchemaError as error:
            if self._handles.member(number, path) is not None:
                raise
            raise MissingColumn(
                f"{excerpt(group)} has no {excerpt(name)}, which the first episode has", column=name
            ) from error

    def _dataset(self, number: int, group: str, path: str) -> Any:
        dataset = self._handles.checked(number, _join(group, path))
        if dataset.shape == () and self._is_flat:
            raise SchemaError(
                "found one value, expected a row a step: if it is the flag of an episode, pass "
                "per_file=True, with which each file is one",
                column=path,
            )
        is_lists = self._handles.items_of(dataset.dtype) is not None and len(dataset.shape) == 1
        if not dataset.shape or not (dataset.dtype.kind in "biuf" or is_lists):
            raise SchemaError(
                f"found {dataset.dtype} of the shape {dataset.shape}, expected numbers with a row a step",
                column=path,
            )
        return dataset

    # ---- rows ----

    def read(self, rows: Rows, names: Collection[str]) -> dict[str, Any]:
        """See `Table`."""
        found = {}
        self._handles.hold(rows.file, self.spans(rows, names))
        for name in names:
            with self._handles.guarded(rows.file):
                found[name] = self._column(rows, name)
        return found

    def spans(self, rows: Rows, names: Collection[str]) -> Iterator[Span]:
        """See `Table`. Of a file that is not open, only that it will be."""
        paths = [path for name in names for path in leaves_of(self._trees.get(name, {}), name)]
        wanted = (found for path in paths for found in self._stretches(rows, path))
        return self._handles.spans(rows.file, wanted)

    def _stretches(self, rows: Rows, path: str) -> Iterator[tuple[Any, int, int]]:
        """The dataset of each group that has some rows, and which of its own rows they are."""
        groups, starts = self._groups[rows.file], self._starts[rows.file]
        first = max(0, bisect_right(starts, rows.start, hi=len(groups)) - 1)
        for at in range(first, len(groups)):
            if at > first and starts[at] >= rows.stop:
                return
            dataset = self._handles.checked(rows.file, _join(groups[at], path))
            yield dataset, max(rows.start - starts[at], 0), rows.stop - starts[at]

    def _column(self, rows: Rows, name: str) -> Any:
        stated = self.partitions[rows.file]
        if name in stated:
            found = np.full(rows.stop - rows.start, stated[name])
            return found if rows.keep is None else found[rows.keep]
        if name not in self._trees:  # One that the mapping does not name.
            self._trees[name] = self._tree(rows.file, self._groups[rows.file][0], name)
        return self._made(rows, name, self._trees[name])

    def _made(self, rows: Rows, path: str, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self._made(rows, f"{path}/{key}", part) for key, part in tree.items()}
        parts = list(self._parts(rows, path))
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return found if rows.keep is None else found[rows.keep]

    def _parts(self, rows: Rows, path: str) -> Iterator[NDArray[Any]]:
        """Rows of a dataset, from each group that has some of them."""
        groups, starts = self._groups[rows.file], self._starts[rows.file]
        first = max(0, bisect_right(starts, rows.start, hi=len(groups)) - 1)
        for at in range(first, len(groups)):
            base, count = starts[at], starts[at + 1] - starts[at]
            if at > first and base >= rows.stop:
                return
            dataset = self._dataset(rows.file, groups[at], path)
            if not count - self._lacks <= len(dataset) <= count:
                self._check_rows(rows.file, path, len(dataset))
                raise SchemaError(f"found {len(dataset)} rows, expected {count}", column=path)
            low, high = max(rows.start - base, 0), min(rows.stop - base, count)
            items = self._handles.items_of(dataset.dtype)
            read = self._handles.read if items is None else self._handles.rows_of_lists
            found = read(dataset, low, high)
            if len(found) < high - low:  # The final row has no value.
                none = np.zeros((1, *found.shape[1:]), found.dtype) if items is None else np.zeros(0, items)
                found = np.concatenate([found, none if items is None else object_column([none])])
            before = found[: max(0, count - self._lacks - 1 - low)]
            if path in self._last_only and before.any():
                self.early.add((rows.file, groups[at]))
                before[:] = 0
            yield found

    def count(self, file: int, name: str) -> int:
        """See `Table`."""
        groups = self._groups[file]
        is_array = groups == [""] and self._handles.is_dataset(self._handles.member(file, name))
        return len(self._dataset(file, "", name)) if is_array and not self._lacks else self.rows[file]

    def array(self, file: int, name: str) -> NDArray[Any]:
        """See `Table`."""
        if name in self.of_episodes:
            with self._handles.guarded(file):
                return self._values_of_episodes(file, name)
        if self._groups[file] != [""] or self._handles.member(file, name) is None:
            return super().array(file, name)
        with self._handles.guarded(file):
            return self._handles.read(self._dataset(file, "", name))

    def _values_of_episodes(self, file: int, name: str) -> NDArray[Any]:
        found = []
        for group in self._groups[file]:
            dataset = self._handles.checked(file, _join(group, name))
            if dataset.shape not in ((), (1,)) or dataset.dtype.kind not in "biuf":
                raise SchemaError(
                    f"found {dataset.dtype} of the shape {dataset.shape} in {excerpt(group or 'the file')}, "
                    "expected one number or flag, as in the first episode",
                    column=name,
                )
            found.append(self._handles.read(dataset).reshape(1))
        return np.concatenate(found)

    def close(self) -> None:
        """Close all files."""
        self._handles.close()


def open_by_names(place: Place, *, limits: Limits) -> MappedSource:
    """The episodes of HDF5 whose datasets have rlio's names.

    Raises:
        UnknownLayout: They have others; the message shows them.
    """
    table = Hdf5Table(place, limits=limits)
    with closing_on_error(table):
        table.name_datasets()
    return by_own_names(table)


def suggested_for(files: Hdf5Files, number: int) -> str:
    """The mapping that an HDF5 file may need, as code for a message; ``...`` where nothing fits."""
    root = files.file(number)
    found = _numbered_groups(files, root, "", _LEVELS)
    if found is not None:
        glob, group = found
        return suggested_mapping(_paths_below(files, group, DEFAULT_LIMITS), ends=f"episode={excerpt(glob)}")
    names = _paths_below(files, root, DEFAULT_LIMITS)
    return suggested_mapping(names, ends="per_file=True" if any("/" in name for name in names) else None)


def _numbered_groups(files: Hdf5Files, group: Any, path: str, levels: int) -> tuple[str, Any] | None:
    """A pattern of groups that are numbered, and the first of them; None: there are none."""
    names = sorted(
        (name for _, name in zip(range(DEFAULT_LIMITS.columns), group, strict=False)), key=natural_order
    )
    inner = [(name, files.child(group, name)) for name in names if files.is_stored(group, name)]
    groups = [(name, item) for name, item in inner if files.is_group(item)]
    for name, item in groups:
        if numbered := _NUMBERED.fullmatch(name):
            return f"{_join(path, numbered[1])}*", item
    below = (_numbered_groups(files, item, _join(path, name), levels - 1) for name, item in groups)
    return next((found for found in below if found is not None), None) if levels > 1 else None


def _paths_below(files: Hdf5Files, group: Any, limits: Limits, *, datasets_only: bool = False) -> list[str]:
    """Paths of the groups and datasets in a group: `Limits.columns` of them, the upper ones first."""
    found: list[str] = []
    pending = [("", group, 0)]
    for _ in range(limits.columns):  # Groups may be in circles.
        if not pending:
            break
        path, item, depth = pending.pop(0)
        if path and (files.is_dataset(item) or not datasets_only):
            found.append(path)
        if files.is_group(item) and depth < limits.nesting:
            names = [name for _, name in zip(range(limits.columns), item, strict=False)]
            pending += [
                (_join(path, name), files.child(item, name), depth + 1)
                for name in names
                if files.is_stored(item, name)
            ]
    return found


def _names_in(mapping: ColumnMapping, *, of: str = "") -> list[str]:
    """The names of all columns that a mapping names; ``of``: for one column of rlio."""
    if of:
        specs = [spec for name, spec in mapping.columns.items() if name.partition("/")[0] == of]
        return list(names_of(specs))
    next_obs = [] if mapping.next_obs in (None, DERIVE) else [mapping.next_obs]
    flags = [*flags_of(mapping), *([mapping.starts] if mapping.starts else ())]
    return list(dict.fromkeys(names_of([mapping.columns, *next_obs, *flags, *(mapping.episode or ())])))


def _join(group: str, name: str) -> str:
    return f"{group}/{name}" if group else name
