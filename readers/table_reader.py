"""`read_table`, `from_arrays`, `from_episodes`: readers of data whose columns the user names.

Example:
    >>> columns = {"obs": ["x"], "actions": "a", "rewards": "r"}
    >>> reader = from_arrays(
    ...     {"x": [0.0, 1.0, 5.0], "a": [1, 0, 1], "r": [0.5, 1.0, 0.0], "done": [False, True, True]},
    ...     mapping=Mapping(columns, terminated="done", next_obs="derive"),
    ... )
    >>> batch = reader.sample()
    >>> batch["eps_id"].tolist(), batch["obs"].tolist(), batch["new_obs_valid"].tolist()
    ([0, 0, 1], [[0.0], [1.0], [5.0]], [True, False, False])
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import numpy as np

from rlio.batch.arrays import as_column, concat_leaves, table_columns, zero_leaf
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves, map_structure
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.formats.files.inputs import FileOptions
from rlio.formats.place import episode_files
from rlio.formats.tables.final_rows import with_final_row
from rlio.formats.tables.own_names import own_map
from rlio.formats.tables.table import ArrayTable
from rlio.formats.tables.table_files import (
    IN_MEMORY,
    details_of,
    mapped_source,
    open_table_files,
    spaces_of,
)
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.mapping import Mapping
from rlio.readers.episode_reader import EpisodeReader
from rlio.readers.source_reader import Asked, SourceKeywords
from rlio.support.options import checked_keywords
from rlio.support.spaces import Spaces

__all__ = ["from_arrays", "from_episodes", "read_table"]


@checked_keywords
def read_table(
    inputs: Any,
    *,
    mapping: Mapping | None = None,
    format: str | None = None,
    format_options: abc.Mapping[str, Any] | None = None,
    spaces: Spaces | None = None,
    limits: Limits = DEFAULT_LIMITS,
    storage_options: abc.Mapping[str, Any] | None = None,
    **keywords: Unpack[SourceKeywords],
) -> EpisodeReader:
    """Read a table with one row a step, whose columns have any names. `rlio.read` calls it.

    Args:
        inputs: CSV, JSON lines, Parquet, Arrow (also Feather) or NPZ files, or a folder of Hugging Face's
            `save_to_disk`: a path, URI, glob or a list of those. Or a table in memory: `pandas.DataFrame`,
            `polars.DataFrame`, `pyarrow.Table`, `datasets.Dataset`.
        mapping: What the columns mean; None: their names are rlio's.
        format: Name of the format of files; None: by their suffixes.
        format_options: ``delimiter``, ``decimal``, ``comment``, ``names`` of CSV; ``split`` of Hugging Face.
        spaces: (observation space, action space) of the rows; None: not known.
        limits: Bounds on the files.
        storage_options: Keywords of the fsspec filesystem.
        keywords: What is read, in which order, what a unit is, and where rows are kept: see
            `rlio.DatasetReader`. ``columns`` are
            rlio's names.

    Raises:
        MissingColumn: There is no such column. The message shows all, with dtype and three values.
        SchemaError: For example, a column is not numeric, lengths differ, or an id returns.
        OptionError: Nothing shows where episodes end, or another option is illegal.
        DataNotFound: There are no such files.
        CorruptData: A file is damaged. (UnsafeData: it exceeds ``limits``.)
    """
    how = FileOptions(
        mapping=mapping,
        format=format,
        format_options=format_options,
        spaces=spaces,
        limits=limits,
        storage_options=storage_options,
    )
    asked = Asked.of(keywords)  # Raises before anything is opened.
    return EpisodeReader.of(open_table_files(inputs, asked.opening(how)), asked)


@checked_keywords
def from_arrays(
    arrays: abc.Mapping[str, Any],
    *,
    mapping: Mapping | None = None,
    spaces: Spaces | None = None,
    **keywords: Unpack[SourceKeywords],
) -> EpisodeReader:
    """Read columns in memory: one array, list or tensor a column, one row a step.

    Args:
        arrays: Columns by name, nested where a value is a dict. They are not copied, and must not change.
        mapping: What the columns mean; None: their names are rlio's.
        spaces: (observation space, action space) of the rows; None: not known.
        keywords: What is read, in which order, what a unit is, and where rows are kept: see
            `rlio.DatasetReader`.

    Returns:
        A reader, which `rlio.convert` takes too.

    Raises:
        SchemaError: The columns differ in length. Others as in `read_table`.
    """
    asked = Asked.of(keywords)  # Raises before anything is opened.
    if not isinstance(arrays, abc.Mapping):
        raise OptionError(f"found {excerpt(arrays)}, expected a dict of arrays; rlio.read takes data frames")
    table = ArrayTable("arrays", table_columns(arrays))
    return _in_memory(table, mapping, details_of(mapping), asked, spaces_of(mapping, spaces))


@checked_keywords
def from_episodes(
    episodes: Iterable[abc.Mapping[str, Any]],
    *,
    mapping: Mapping | None = None,
    spaces: Spaces | None = None,
    **keywords: Unpack[SourceKeywords],
) -> EpisodeReader:
    """Read episodes in memory, each a dict of columns with a row a step.

    A single value applies to all rows of its episode; as ``terminated`` or ``truncated``, to the last row. If
    the columns of ``obs`` have one row more than the others in every episode, it is the final observation.

    Args:
        episodes: The episodes, with the same columns. All are held in memory.
        mapping: What the columns mean; without ``episode``, each dict is an episode. None: their names are
            rlio's.
        spaces: (observation space, action space) of the rows; None: not known.
        keywords: What is read, in which order, what a unit is, and where rows are kept: see
            `rlio.DatasetReader`.

    Returns:
        A reader, which `rlio.convert` takes too.

    Raises:
        SchemaError: Episodes have different columns, or columns differ in length. Others as in `read_table`.
    """
    asked = Asked.of(keywords)  # Raises before anything is opened.
    details, spaces = details_of(mapping), spaces_of(mapping, spaces)
    _check_no_cuts(mapping)
    found = list(episodes)
    if not found or not all(isinstance(episode, abc.Mapping) for episode in found):
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
        mapping = with_final_row(mapping or own_map(table), "the columns with one row more than the others")
    return _in_memory(table, mapping, details, asked, spaces)


def _in_memory(
    table: ArrayTable,
    mapping: Mapping | None,
    details: abc.Mapping[str, Any],
    asked: Asked,
    spaces: Spaces | None,
) -> EpisodeReader:
    """A reader of a table in memory; ``details`` are those of the mapping that the user gave."""
    how = asked.opening(FileOptions(spaces=spaces))
    return EpisodeReader.of(episode_files(mapped_source(table, mapping), IN_MEMORY, details, how), asked)


def _check_no_cuts(mapping: Mapping | None) -> None:
    """Refuse fields that say where episodes begin: each dict is one."""
    names = ("starts", "lengths", "ends", "per_row")
    if given := [name for name in names if mapping is not None and getattr(mapping, name)]:
        raise OptionError(f"{given[0]}= has no meaning here: each dict is an episode; leave it out")


def _episode(
    number: int, episode: abc.Mapping[str, Any], first: abc.Mapping[str, Any], flags: Sequence[Any]
) -> tuple[dict[str, Any], int, bool]:
    """Columns with as many rows each, how many, and whether the last has only an observation."""
    if episode.keys() != first.keys():
        raise SchemaError(
            f"episode {number} has the columns {excerpt([*episode])}, the first {excerpt([*first])}"
        )
    single = {
        name for name, value in episode.items() if np.ndim(value) == 0 and not isinstance(value, abc.Mapping)
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
