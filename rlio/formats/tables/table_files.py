"""Tables as sources of episodes: files of a kind that a mapping reads, and tables in memory.

Not here: what a mapping means (`rlio.mapping`), how a table is read by one (`rlio.formats.tables.mapping`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from rlio.batch.arrays import is_table
from rlio.catalog.names import HEADER
from rlio.errors import (
    CorruptData,
    DataNotFound,
    OptionError,
    RlioError,
    StoreError,
    UnknownLayout,
    UnsafeData,
    excerpt,
)
from rlio.formats.files.inputs import Failures, FileOptions, find_files
from rlio.formats.format import Format, Marks, by_name, formats, recognise_file
from rlio.formats.place import Place, episode_files, locate_format, open_place
from rlio.formats.tables.mapping import MappedSource, by_own_names
from rlio.formats.tables.table import Table, table_in_memory
from rlio.mapping import Mapping
from rlio.source.damage import damage_named
from rlio.source.episodes import EpisodeFiles
from rlio.storage import InputFile
from rlio.storage.filesystem import Storage
from rlio.storage.inputs import expand_inputs, is_glob
from rlio.storage.paths import StrPath
from rlio.support.options import expected
from rlio.support.progress import each
from rlio.support.spaces import Spaces

__all__ = ["IN_MEMORY", "details_of", "mapped_source", "open_table_files", "spaces_of"]

IN_MEMORY: Final = Format(name="table", title="a table in memory", marks=Marks())


def open_table_files(inputs: Any, how: FileOptions) -> EpisodeFiles:
    """The episodes of a table as a source.

    With ``on_error="skip"``, damaged files are left out if the mapping says that files are whole episodes:
    otherwise an episode could go on behind a gap.
    """
    how = replace(how, spaces=spaces_of(how.mapping, how.spaces))  # It raises before anything is opened.
    mapping, own, details = how.mapping, dict(how.format_options or {}), details_of(how.mapping)
    if is_table(inputs):
        given = {"format": how.format, "format_options": own, "storage_options": how.storage_options}
        if wrong := [name for name, value in given.items() if value]:
            raise OptionError(f"{excerpt(wrong)} have no effect: the table is in memory")
        return episode_files(mapped_source(table_in_memory(inputs), mapping), IN_MEMORY, details, how)
    found, place = _locate(inputs, how)

    def opened(files: Sequence[InputFile]) -> MappedSource:
        part = place if files is place.files else Place.of_files(files)
        table = open_place(found, found.table, part, own, limits=how.limits)
        with damage_named(found.title, uri=part.uri):
            return mapped_source(table, mapping)

    try:
        source = opened(place.files)
    except UnsafeData:
        raise
    except CorruptData as error:
        may_skip = how.on_error == "skip" and len(place.files) > 1 and not found.root
        if not (may_skip and mapping is not None and mapping.per_file):
            raise
        source = _without_damaged(place.files, opened, error)
    return episode_files(source, found, {**details, **own}, how)


def _without_damaged(
    files: Sequence[InputFile], opened: Callable[[Sequence[InputFile]], MappedSource], error: CorruptData
) -> MappedSource:
    """The episodes of those files that are not damaged, which are opened one by one to tell.

    Raises:
        CorruptData: ``error``, if none of them, or all, are damaged.
    """
    damaged: list[CorruptData] = []
    whole: list[InputFile] = []
    for file in each(files):
        try:
            opened([file]).close()
        except CorruptData as found:
            found.uri = found.uri or file.uri
            damaged.append(found)
            continue
        except StoreError:
            raise
        except RlioError:  # Of this file alone; it is raised if it is one of all files, too.
            pass
        whole.append(file)
    if not whole or not damaged:
        raise error
    source = opened(whole)
    source.failures = Failures("skip")
    for one in damaged:
        source.failures.handle(one)
        source.notes.append(f"{one.uri} is damaged, and left out: {one}")
    return source


def mapped_source(table: Table, mapping: Mapping | None) -> MappedSource:
    """The episodes of a table, which are closed with it."""
    return by_own_names(table) if mapping is None else MappedSource(table, mapping)


def spaces_of(mapping: Mapping | None, spaces: Spaces | None) -> Spaces | None:
    """The spaces that the option states, or the mapping.

    Raises:
        OptionError: Both do.
    """
    stated = None if mapping is None else expected(mapping, Mapping, "mapping").spaces
    if spaces is not None and stated is not None:
        raise OptionError("spaces= and rlio.Mapping(spaces=...) are one option: pass one of them")
    return stated if spaces is None else spaces


def details_of(mapping: Mapping | None) -> dict[str, Any]:
    """What of a mapping determines the rows, as JSON values."""
    return {} if mapping is None else expected(mapping, Mapping, "mapping").to_json()


def _locate(inputs: Any, how: FileOptions) -> tuple[Format, Place]:
    """The format of files with columns of the user's own, and the files."""
    format, storage_options = how.format, how.storage_options
    values: list[StrPath] = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    known = [one for one in formats() if one.table is not None]
    chosen = None if format is None else by_name(format)
    if format is not None and chosen not in known:
        raise OptionError(f"format={excerpt(format)}: a mapping reads {', '.join(one.name for one in known)}")
    if chosen is None and len(values) == 1 and not is_glob(values[0], storage_options):
        storage = Storage.open(values[0], storage_options=storage_options).of_others()
        if storage.exists(HEADER):
            raise OptionError("found a data set of rlio, whose columns need no mapping", uri=storage.uri)
        chosen = next((one for one in known if any(map(storage.exists, one.root))), None)
    if chosen is not None and chosen.root:
        return locate_format(inputs, replace(how, format=chosen.name))
    endings = tuple(ending for one in (known if chosen is None else [chosen]) for ending in one.marks.endings)
    try:
        files = find_files(values[0] if len(values) == 1 else values, how, suffixes=endings)
    except DataNotFound as error:
        if below := _files_below(values, endings, how):
            raise DataNotFound(below, uri=error.uri) from error
        raise
    if chosen is None:
        kinds = {_kind(file.path, known) for file in files}
        chosen = kinds.pop()
        if chosen is None and not kinds:
            other = recognise_file(files[0])
            if other is not None and not other.format.is_read:
                raise other.format.refusal(uri=files[0].uri)
        if kinds or chosen is None:
            name = excerpt(files[0].path.rpartition("/")[2])
            found = f"files of {len(kinds) + 1} kinds" if kinds else f"{name}, which a mapping does not read"
            raise UnknownLayout(
                f"found {found}, expected files of one of {', '.join(one.name for one in known)}: pass a "
                "glob, or format=; or load the file, and pass its arrays to rlio.from_arrays",
                uri=files[0].uri,
            )
    return chosen, Place.of_files(files)


def _files_below(values: Sequence[StrPath], endings: tuple[str, ...], how: FileOptions) -> str:
    """What to say of a lone folder that has files in its folders only; "": there are none."""
    if len(values) != 1 or is_glob(values[0], how.storage_options):
        return ""
    try:
        found = expand_inputs(
            values[0],
            suffixes=endings,
            recursive=True,
            storage_options=how.storage_options,
            limit=how.limits.listed_names,
        )
    except StoreError:
        raise
    except RlioError:  # There are none, or too many.
        return ""
    kinds = Counter(next(one for one in endings if file.path.lower().endswith(one)) for file in found)
    ending = kinds.most_common(1)[0][0]
    root = os.fspath(values[0]).rstrip("/")
    return (
        f"found no file of a table in the folder itself, but {kinds[ending]} {ending} below it: pass them as "
        f"a glob, {excerpt(f'{root}/**/*{ending}', 200)}"
    )


def _kind(path: str, known: Sequence[Format]) -> Format | None:
    """The format that the ending of a name says."""
    return next(
        (one for one in known if one.marks.endings and path.lower().endswith(one.marks.endings)), None
    )
