"""`read_table`, `from_arrays`, `from_episodes`: readers of data whose columns the user names.

Example:
    >>> reader = from_arrays(
    ...     {"x": [0.0, 1.0, 5.0], "a": [1, 0, 1], "r": [0.5, 1.0, 0.0], "done": [False, True, True]},
    ...     columns={"obs": ["x"], "actions": "a", "rewards": "r"}, terminated="done", next_obs="derive",
    ... )
    >>> batch = reader.sample()
    >>> batch["eps_id"].tolist(), batch["obs"].tolist(), batch["new_obs_valid"].tolist()
    ([0, 0, 1], [[0.0], [1.0], [5.0]], [True, False, False])
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Unpack

import numpy as np

from rlio.batch.arrays import as_column, concat_leaves, is_table, table_columns, zero_leaf
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves, map_structure
from rlio.dataset.names import HEADER
from rlio.errors import OptionError, SchemaError, UnknownLayout, excerpt
from rlio.formats.format import Format, Marks, by_name, formats
from rlio.formats.mapping import DERIVE, ColumnMap, MappedSource, Spec, by_own_names, own_map
from rlio.formats.place import Place, locate_format, open_place
from rlio.formats.tables import ArrayTable, Table, table_in_memory
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.episode_reader import EpisodeReader
from rlio.readers.read_options import PassKeywords
from rlio.storage import expand_inputs
from rlio.storage.filesystem import Storage
from rlio.storage.paths import StrPath
from rlio.support.options import checked_keywords

__all__ = ["MAP_OPTIONS", "from_arrays", "from_episodes", "read_table"]


class TableKeywords(PassKeywords, total=False):
    """What the columns of a table mean, and how it is read, with defaults; see `read_table`."""

    batch_size: Annotated[int | None, None]
    shard: Annotated[tuple[int, int], (0, 1)]
    columns: Annotated[Mapping[str, Spec] | None, None]
    episode: Annotated[str | Sequence[str] | None, None]
    terminated: Annotated[str | bool | None, None]
    truncated: Annotated[str | bool | None, None]
    next_obs: Annotated[Spec | None, None]
    dtypes: Annotated[Mapping[str, str] | None, None]
    per_file: Annotated[bool | None, None]
    final_row: Annotated[bool, False]


#: Keywords that only a mapping has, besides ``columns``.
MAP_OPTIONS = ("episode", "terminated", "truncated", "next_obs", "dtypes", "per_file", "final_row")
_MEMORY = Format(name="table", title="a table in memory", marks=Marks())
# Columns that options stand for.
_BY_OPTION = {
    Columns.EPS_ID: "episode",
    Columns.TERMINATEDS: "terminated",
    Columns.TRUNCATEDS: "truncated",
    Columns.NEXT_OBS: "next_obs",
    Columns.NEXT_OBS_VALID: "next_obs",
    Columns.DONES: "terminated",
}


@checked_keywords
def read_table(
    inputs: Any,
    *,
    format: str | None = None,
    format_options: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    storage_options: Mapping[str, Any] | None = None,
    **keywords: Unpack[TableKeywords],
) -> EpisodeReader:
    """Read a table with one row a step, whose columns have any names. `rlio.read` calls it.

    Row t has the observation, the action, and the reward and the flags that followed it. Rows of an episode
    are adjacent, in the order of time. A name may be a path to a part of a nested column, such as
    ``"info.speed"``. Without ``columns``, the names must be rlio's.

    Args:
        inputs: CSV, JSON lines, Parquet, Arrow (also Feather) or NPZ files, or a folder of Hugging Face's
            `save_to_disk`: a path, URI, glob or a list of those. Or a table in memory: `pandas.DataFrame`,
            `polars.DataFrame`, `pyarrow.Table`, `datasets.Dataset`.
        format: Name of the format of files; None: by their suffixes.
        format_options: ``delimiter`` of CSV; ``split`` of Hugging Face.
        limits: Bounds on the files.
        storage_options: Keywords of the fsspec filesystem.
        keywords: Those of `rlio.readers.read_options.ReadOptions`, and:

            - ``columns``: rlio's column -> a column of the table; or a list of columns with one number a row,
              joined into one array; or a dict of these, a nested column.
            - ``episode``: The column, or columns, whose value changes where an episode begins. Whole numbers
              become ``eps_id``; for others, it numbers the episodes.
            - ``terminated``: The flag that marks the last row of a terminated episode; True: all terminated.
            - ``truncated``: The same for truncated episodes. None: complete episodes that are not terminated
              are truncated.
            - ``next_obs``: The columns of ``new_obs``, as in ``columns``; or ``"derive"``: from the next row
              of the episode. The last row of each episode then has ``new_obs_valid`` False.
            - ``dtypes``: rlio's column -> dtype, such as ``{"obs": "float32"}``.
            - ``per_file``: True: an episode ends with its file, and ids are unique only within a file; False:
              an episode may continue in the next file.
            - ``final_row``: Whether each episode has a further row, with its final observation only.

    Raises:
        MissingColumn: There is no such column. The message shows all, with dtype and three values.
        SchemaError: For example, a column is not numeric, lengths differ, or an id returns.
        OptionError: Nothing shows where episodes end, or another option is illegal.
        DataNotFound: There are no such files.
        CorruptData: A file is damaged. (UnsafeData: it exceeds ``limits``.)
    """
    mapping, details, rest = _split(dict(keywords))
    own = dict(format_options or {})
    if is_table(inputs):
        given = {"format": format, "format_options": own, "storage_options": storage_options}
        if wrong := [name for name, value in given.items() if value]:
            raise OptionError(f"{excerpt(wrong)} have no effect: the table is in memory")
        return _reader(table_in_memory(inputs), mapping, _MEMORY, details, rest)
    found, place = _locate(inputs, format, storage_options, limits)
    table = open_place(found, found.table, place, own, limits=limits)
    return _reader(table, mapping, found, {**details, **own}, rest)


@checked_keywords
def from_arrays(arrays: Mapping[str, Any], **keywords: Unpack[TableKeywords]) -> EpisodeReader:
    """Read columns in memory: one array, list or tensor a column, one row a step.

    Args:
        arrays: Columns by name, nested where a value is a dict. They are not copied, and must not change.
        keywords: See `read_table`.

    Returns:
        A reader, which `rlio.convert` takes too.

    Raises:
        SchemaError: The columns differ in length. Others as in `read_table`.
    """
    if not isinstance(arrays, Mapping):
        raise OptionError(f"found {excerpt(arrays)}, expected a dict of arrays; rlio.read takes data frames")
    mapping, details, rest = _split(dict(keywords))
    return _reader(ArrayTable("arrays", table_columns(arrays)), mapping, _MEMORY, details, rest)


@checked_keywords
def from_episodes(episodes: Iterable[Mapping[str, Any]], **keywords: Unpack[TableKeywords]) -> EpisodeReader:
    """Read episodes in memory, each a dict of columns with a row a step.

    A single value applies to all rows of its episode; as ``terminated`` or ``truncated``, to the last row. If
    the columns of ``obs`` have one row more than the others in every episode, it is the final observation.

    Args:
        episodes: The episodes, with the same columns. All are held in memory.
        keywords: See `read_table`; without ``episode``, each dict is an episode.

    Returns:
        A reader, which `rlio.convert` takes too.

    Raises:
        SchemaError: Episodes have different columns, or columns differ in length. Others as in `read_table`.
    """
    mapping, details, rest = _split(dict(keywords))
    found = list(episodes)
    if not found or not all(isinstance(episode, Mapping) for episode in found):
        raise OptionError(f"found {excerpt(found)}, expected one dict of columns, or several")
    flags: tuple[object, ...] = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
    if mapping is not None:
        flags = (mapping.terminated, mapping.truncated)
    parts = [_episode(number, episode, found[0], flags) for number, episode in enumerate(found)]
    further = {has_more for _, _, has_more in parts}
    if len(further) > 1:
        raise SchemaError("some episodes have a final observation, and others have none")
    columns = {
        name: map_structure(lambda *each: concat_leaves(each), *(part[name] for part, _, _ in parts))
        for name in found[0]
    }
    table = ArrayTable("episodes", columns, lengths=[rows for _, rows, _ in parts])
    if True in further:
        mapping = mapping or own_map(table)
        if mapping.next_obs not in (None, DERIVE):
            raise OptionError(
                "next_obs: the columns with one row more than the others already give it: leave it out"
            )
        mapping = replace(mapping, next_obs=DERIVE, final_row=True)
    return _reader(table, mapping, _MEMORY, details, rest)


def _episode(
    number: int, episode: Mapping[str, Any], first: Mapping[str, Any], flags: Sequence[Any]
) -> tuple[dict[str, Any], int, bool]:
    """Columns with as many rows each, how many, and whether the last has only an observation."""
    if episode.keys() != first.keys():
        raise SchemaError(
            f"episode {number} has the columns {excerpt([*episode])}, the first {excerpt([*first])}"
        )
    single = {
        name for name, value in episode.items() if np.ndim(value) == 0 and not isinstance(value, Mapping)
    }
    columns = {name: as_column(name, value) for name, value in episode.items() if name not in single}
    counts = {len(leaf) for column in columns.values() for _, leaf in leaves(column)}
    rows = max(counts, default=0)
    if not counts or min(counts) < rows - 1:
        shown = {name: len(leaves(column)[0][1]) for name, column in columns.items()}
        raise SchemaError(f"episode {number}: the columns have different lengths: {excerpt(shown)}")

    def padded(leaf: Any) -> Any:
        return leaf if len(leaf) == rows else concat_leaves([leaf, zero_leaf(leaf, 1)])

    full = {name: map_structure(padded, column) for name, column in columns.items()}
    for name in single:
        values = np.array([episode[name]] * rows)
        if name in flags:
            values[: rows - 1 - (len(counts) > 1)] = False
        full[name] = values
    return full, rows, len(counts) > 1


def _split(keywords: dict[str, Any]) -> tuple[ColumnMap | None, dict[str, Any], dict[str, Any]]:
    """The mapping, the mapping as JSON values, and the keywords of the reader."""
    own = {name: keywords.pop(name) for name in ("columns", *MAP_OPTIONS) if name in keywords}
    columns = own.pop("columns", None)
    own = {name: value for name, value in own.items() if value is not None}
    if columns is None:
        if own:
            raise OptionError(
                f"{excerpt(sorted(own))} need columns={{'obs': ..., 'actions': ..., 'rewards': ...}}"
            )
        return None, {}, keywords
    if not isinstance(columns, Mapping) or not columns:
        raise OptionError(
            f"columns={excerpt(columns)}: expected a dict of rlio's column -> column of the table"
        )
    for name in columns:
        if name in _BY_OPTION:
            raise OptionError(f"columns={{{name!r}: ...}}: pass {_BY_OPTION[name]}= instead")
    for name in ("per_file", "final_row"):
        if not isinstance(own.get(name, False), bool):
            raise OptionError(f"{name}={excerpt(own[name])}: expected True or False")
    for name in ("terminated", "truncated"):
        if not isinstance(own.get(name, ""), (str, bool)):
            raise OptionError(f"{name}={excerpt(own[name])}: expected a column, True or False")
    if own.get("terminated") is True and own.get("truncated") not in (None, False):
        raise OptionError("terminated=True and truncated= contradict each other: leave one out")
    if not isinstance(own.get("dtypes", {}), Mapping):
        raise OptionError(f"dtypes={excerpt(own['dtypes'])}: expected a dict")
    if isinstance(ids := own.get("episode", ()), str):
        ids = (ids,)
    mapping = ColumnMap(columns, **{**own, "episode": tuple(ids)})
    return mapping, {name: value for name, value in asdict(mapping).items() if value}, keywords


def _reader(
    table: Table, mapping: ColumnMap | None, format: Format, details: dict[str, Any], keywords: dict[str, Any]
) -> EpisodeReader:
    source = by_own_names(table) if mapping is None else MappedSource(table, mapping)
    return EpisodeReader.of(source, format, details=details, **keywords)  # type: ignore[arg-type]  # checked before


def _locate(
    inputs: Any, format: str | None, storage_options: Mapping[str, Any] | None, limits: Limits
) -> tuple[Format, Place]:
    """The format of files with columns of the user's own, and the files."""
    values: list[StrPath] = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    known = [one for one in formats() if one.table is not None]
    chosen = None if format is None else by_name(format)
    if format is not None and chosen not in known:
        raise OptionError(f"format={excerpt(format)}: a mapping reads {', '.join(one.name for one in known)}")
    if chosen is None and len(values) == 1 and not set("*?[").intersection(os.fspath(values[0])):
        storage = Storage.open(values[0], storage_options=storage_options)
        if storage.exists(HEADER):
            raise OptionError("found a data set of rlio, whose columns need no mapping", uri=storage.uri)
        chosen = next((one for one in known if any(map(storage.exists, one.root))), None)
    if chosen is not None and chosen.root:
        return locate_format(inputs, format=chosen.name, storage_options=storage_options, limits=limits)
    endings = tuple(ending for one in (known if chosen is None else [chosen]) for ending in one.marks.endings)
    files = expand_inputs(
        values, suffixes=endings, storage_options=storage_options, limit=limits.listed_names
    )
    if chosen is None:
        kinds = {_kind(file.path, known) for file in files}
        chosen = kinds.pop()
        if kinds or chosen is None:
            raise UnknownLayout(
                f"found files of {len(kinds) + 1} kinds, or of one that a mapping does not read, expected "
                f"one of {', '.join(one.name for one in known)}: pass a glob, or format=",
                uri=files[0].uri,
            )
    return chosen, Place(files[0].uri, None, tuple(files))


def _kind(path: str, known: Sequence[Format]) -> Format | None:
    """The format that the ending of a name says."""
    return next(
        (one for one in known if one.marks.endings and path.lower().endswith(one.marks.endings)), None
    )
