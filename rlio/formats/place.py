"""Finds a data set of another library: its format, its root, and its files.

Example:
    >>> from rlio.storage import Storage
    >>> Storage.open("memory://place-example").put("deep/data/metadata.json", b'{"data_format": "hdf5", '
    ...     b'"total_episodes": 0, "total_steps": 0}')
    >>> format, place = locate_format("memory://place-example")
    >>> format.name, place.uri
    ('minari', 'memory://place-example/deep')
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rlio.errors import DataNotFound, OptionError, UnknownLayout, UnsafeData, excerpt, raise_at
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.inputs import FileOptions
from rlio.formats.format import (
    Format,
    Found,
    Look,
    by_name,
    file_in,
    formats,
    load,
    recognise,
    recognise_file,
    titles_of_read,
)
from rlio.formats.tables.mapping import by_own_names
from rlio.limits import Limits
from rlio.source.damage import damage_named
from rlio.source.episodes import EpisodeFiles, EpisodeSource
from rlio.storage import InputFile, expand_inputs
from rlio.storage.filesystem import Storage
from rlio.storage.inputs import is_glob
from rlio.storage.paths import StrPath, is_uri
from rlio.support.calls import closing_on_error
from rlio.support.options import option_names, refuse_unknown
from rlio.support.words import and_more

__all__ = [
    "Place",
    "Recognised",
    "episode_files",
    "locate_format",
    "open_episode_files",
    "open_place",
    "open_source",
    "recognise_inputs",
]


# Folders above a file that may be the data set of which it is a part.
_LEVELS_UP: Final = 5
_PLAIN: Final = FileOptions()


@dataclass(frozen=True)
class Place:
    """The files that a source opens.

    Attributes:
        uri: The root or the first file, and how many more there are, for messages.
        storage: The root of a data set that is a folder; None: the data set consists of files.
        files: The files of a format whose files are read one by one.
    """

    uri: str
    storage: Storage | None
    files: tuple[InputFile, ...] = ()

    @classmethod
    def of_files(cls, files: Sequence[InputFile]) -> Place:
        """Files that are read one by one: a message about all of several does not name one of them alone."""
        return cls(and_more([file.uri for file in files], 1), None, tuple(files))

    def root(self) -> Storage:
        """The root of a format that is a folder."""
        assert self.storage is not None
        return self.storage

    def file(self, path: str, size: int | None = None) -> InputFile:
        """A file below the root, to be opened with `rlio.storage.open_input`."""
        return file_in(self.root(), path, size)


@dataclass(frozen=True)
class Recognised:
    """Inputs that were recognised, which takes requests, with what `recognise_inputs` found."""

    inputs: StrPath | Sequence[StrPath]
    found: Found | None


def locate_format(
    inputs: StrPath | Sequence[StrPath] | Recognised, how: FileOptions = _PLAIN
) -> tuple[Format, Place]:
    """Return the format of ``inputs``, and the place of its data set.

    Args:
        inputs: A folder, file, glob or URI, a list of files, or an id, see `Format.home`.
        how: Its format, storage options and limits count.

    Raises:
        OptionError: There is no format of that name.
        DataNotFound: Nothing is there.
        UnknownLayout: The format is not known or not read, or several data sets are there.
    """
    known = inputs if isinstance(inputs, Recognised) else None
    inputs = inputs.inputs if isinstance(inputs, Recognised) else inputs
    values = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    storage_options, limits = how.storage_options, how.limits
    chosen = None if how.format is None else by_name(how.format)
    if how.format is not None and chosen is None:
        names = ", ".join(one.name for one in formats())
        raise OptionError(f"format={excerpt(how.format)}: no such format; the formats are {names}")
    alone = len(values) == 1 and not is_glob(values[0], storage_options)
    found = recognise_inputs(values, storage_options) if known is None else known.found
    values = [_found_by_id(value) or value for value in values]
    if chosen is None and found is not None:
        chosen = found.format
    if chosen is None:
        expand_inputs(values, storage_options=storage_options, limit=limits.listed_names)
        raise UnknownLayout(
            f"found no format that rlio knows, expected one of {titles_of_read()}: pass format= if you know "
            "it, or mapping=rlio.Mapping(columns=...) for a table of steps (docs/mapping.md)",
            uri=os.fspath(values[0]),
        )
    if chosen.source is None:
        raise chosen.refusal(uri=os.fspath(values[0]))
    if chosen.root:
        if not alone:
            raise UnknownLayout(
                f"found files of {chosen.title}, expected the folder of a data set: pass the folder that has "
                + " or ".join(chosen.root),
                uri=os.fspath(values[0]),
            )
        return chosen, _folder(values[0], chosen, found, storage_options)
    files = expand_inputs(
        values,
        suffixes=chosen.marks.endings,
        recursive=found is not None and bool(found.folder),
        storage_options=storage_options,
        limit=limits.listed_names,
    )
    return chosen, Place.of_files(files)


def recognise_inputs(values: Sequence[StrPath], storage_options: Mapping[str, Any] | None) -> Found | None:
    """What `recognise` finds at a lone path, or in the first file of a glob or list; None: nothing known."""
    value = _found_by_id(values[0]) or values[0]
    if len(values) > 1 or is_glob(value, storage_options):
        try:
            return recognise_file(expand_inputs(values, storage_options=storage_options)[0])
        except DataNotFound:
            return None
    found = recognise(value, storage_options=storage_options if is_uri(os.fspath(value)) else None)
    if found is None:
        _refuse_part(value)
    return found


def _found_by_id(value: StrPath) -> str | None:
    """The data set that a library keeps under the id ``value``; None: it is a path, or there is none.

    Raises:
        DataNotFound: It may be in a remote store that cannot be reached.
    """
    text = os.fspath(value)
    if is_uri(text) or os.path.isabs(text) or ".." in text.split("/") or os.path.exists(text):
        return None
    for format in formats():
        if format.home is not None:
            home = os.environ.get(format.home[0]) or os.path.expanduser(format.home[1])
            root = os.path.join(home, text)
            if os.path.isdir(root) and any(os.path.isfile(os.path.join(root, name)) for name in format.root):
                return root
    remotes = (load(format.remote)(text) for format in formats() if format.remote)
    return next((uri for uri in remotes if uri is not None), None)


def _folder(
    value: StrPath, format: Format, found: Found | None, storage_options: Mapping[str, Any] | None
) -> Place:
    """The root of the data set at or below ``value``."""
    storage = Storage.open(value, storage_options=storage_options).of_others()
    parts = found.folder.split("/") if found is not None and found.folder else []
    for depth in range(len(parts) + 1):
        folder = "/".join(parts[:depth])
        if not _is_root(storage, folder, format):
            continue
        if depth:
            above = "/".join(parts[: depth - 1])
            others = [
                name for name in storage.folders(above) if _is_root(storage, _join(above, name), format)
            ]
            if len(others) > 1:
                raise UnknownLayout(
                    f"found {len(others)} data sets of {format.title} ({excerpt(others[:5])}), expected one: "
                    "pass the path of one of them",
                    uri=storage.uri_of(above),
                )
            storage = storage.below(folder)
        return Place(storage.uri, storage)
    if (whole := _above(value, format, storage_options)) is not None:
        return whole
    way = f"; {format.rootless}" if format.rootless and found is not None else ""
    raise DataNotFound(
        f"no data set of {format.title}: {' or '.join(format.root)} is not there; pass its root"
        f"{storage.did_you_mean()}{way}",
        uri=storage.uri,
    )


def _above(value: StrPath, format: Format, storage_options: Mapping[str, Any] | None) -> Place | None:
    """The data set that ``value`` describes or holds whole, beside its metadata; None: it is in none.

    Raises:
        UnknownLayout: It is a part of a data set.
    """
    text = os.fspath(value) if is_uri(os.fspath(value)) else os.path.abspath(value)
    folder, root = text.rstrip("/"), None
    for _ in range(_LEVELS_UP):
        folder = folder.rpartition("/")[0] if is_uri(text) else os.path.dirname(folder)
        storage = Storage.open(folder, storage_options=storage_options).of_others()
        if _is_root(storage, "", format):  # The highest one: an episode of Minari has its own metadata.
            root = storage, folder
        elif root is not None or folder.endswith(("/", ":")):
            break
    if root is None:
        return None
    storage, folder = root
    place, _, name = text[len(folder) :].replace(os.sep, "/").strip("/").rpartition("/")
    marker = next(marker for marker in format.root if storage.exists(marker))
    ending = os.path.splitext(name)[1]
    alike = [one for one, is_folder in storage.children(place) if not is_folder and one.endswith(ending)]
    if marker.rpartition("/")[0] != place or (name not in Look.MARKERS and alike != [name]):
        raise _part_of(format, storage.uri, text)
    return Place(storage.uri, storage)


def _part_of(format: Format, folder: str, uri: str) -> UnknownLayout:
    """The error of a file that is a part of a data set."""
    return UnknownLayout(
        f"found a part of a data set of {format.title}, expected the whole: pass its folder {folder}", uri=uri
    )


def _refuse_part(value: StrPath) -> None:
    """Refuse a local file of no known format in a data set whose metadata has a folder of its own."""
    if is_uri(os.fspath(value)) or not os.path.isfile(value):
        return
    for format in formats():
        nested = tuple(path for path in format.root if "/" in path)
        whole = _above(value, replace(format, root=nested), None) if nested else None
        if whole is not None:
            raise _part_of(format, whole.uri, os.fspath(value))


def _is_root(storage: Storage, folder: str, format: Format) -> bool:
    return any(storage.exists(_join(folder, path)) for path in format.root)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def open_source(format: Format, place: Place, options: Mapping[str, Any], *, limits: Limits) -> Any:
    """The `rlio.source.episodes.EpisodeSource` of a place; see `open_place`."""
    opened = open_place(format, format.source, place, options, limits=limits)
    if format.source == format.table:  # A table claims its rows itself.
        with damage_named(format.title, uri=place.uri):
            return by_own_names(opened)
    try:
        Allowance.of(opened.files, limits).claim(sum(opened.lengths))
    except UnsafeData as error:
        opened.close()
        raise_at(error, uri=opened.uri)
    return opened


def open_episode_files(inputs: StrPath | Sequence[StrPath] | Recognised, how: FileOptions) -> EpisodeFiles:
    """The episodes of a data set as a source; see `locate_format` for the errors."""
    own = dict(how.format_options or {})
    found, place = locate_format(inputs, how)
    return episode_files(open_source(found, place, own, limits=how.limits), found, own, how)


def episode_files(
    layout: EpisodeSource, format: Format, own: Mapping[str, Any], how: FileOptions
) -> EpisodeFiles:
    """Open episodes as a source, which owns them.

    Args:
        layout: The episodes.
        format: Their format.
        own: Everything besides the files that determines the rows, as JSON values; part of states.
        how: Its spaces and columns count, and what to do with damage.
    """
    about = {"format": format.name, "options": dict(own) or None}
    with closing_on_error(layout):
        return EpisodeFiles(
            layout, about=about, columns=how.columns, on_error=how.on_error, spaces=how.spaces
        )


def open_place(
    format: Format, target: str | None, place: Place, options: Mapping[str, Any], *, limits: Limits
) -> Any:
    """What a format's ``module:Class`` (`Format.source` or `Format.table`) opens.

    Raises:
        OptionError: The format has no such option.
    """
    assert target is not None
    opens = load(target)
    names = [name for name in option_names(opens) or () if name not in ("place", "limits")]
    refuse_unknown(options, names, of=f"the format {format.name}")
    try:
        with damage_named(format.title, uri=place.uri):
            return opens(place, limits=limits, **options)
    except UnsafeData as error:
        raise_at(error, uri=place.uri)
