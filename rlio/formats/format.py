"""`Format`: a format in which a library stores experience; `recognise` names the format of a path.

Each module of `rlio.formats` describes one format in its constant ``FORMAT``: how it is recognised, and what
opens and writes it. To add a format, add a module. A path whose format is not positively known is refused;
the format is never guessed.

Not here: how a format is read or written (the other modules of `rlio.formats`, `rlio.readers`).

Example:
    >>> from rlio.storage import Storage
    >>> Storage.open("memory://format-example").put(
    ...     "data/metadata.json", b'{"total_episodes": 2, "total_steps": 26, "data_format": "parquet"}'
    ... )
    >>> found = recognise("memory://format-example")
    >>> found.format.title, found.folder
    ('Minari', 'data')
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import IO, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from rlio.batch.encoded_picture import Codec
from rlio.catalog.names import HEADER
from rlio.errors import CorruptData, RlioError, StoreError, StoreRefused, UnknownLayout, UnsafeData
from rlio.limits import DEFAULT_LIMITS
from rlio.schemas.parquet_metadata import read_metadata
from rlio.source.damage import DAMAGE
from rlio.storage.failures import explained
from rlio.storage.filesystem import InputFile, Storage, StrPath, open_input
from rlio.storage.paths import is_uri, locate
from rlio.storage.zip_files import open_archive

__all__ = [
    "BY_CONTENT",
    "BY_ENDING",
    "BY_MARKER",
    "LOSSES",
    "Format",
    "Found",
    "Holds",
    "Look",
    "Marks",
    "by_name",
    "file_in",
    "format_of_columns",
    "format_of_hdf5",
    "format_of_json",
    "formats",
    "recognise",
    "recognise_file",
    "refuse_known",
    "titles_of_read",
    "with_all_of",
]

T = TypeVar("T")

#: How sure `recognise` is: by the ending of a name, by what is in a data file, by a file that only this
#: format has.
BY_ENDING: Final = 1
BY_CONTENT: Final = 2
BY_MARKER: Final = 3

#: What a format may lose, see `Holds.loses`: name -> what it is.
LOSSES: Final = MappingProxyType(
    {
        "final_obs": "the observation after the last step of an episode",
        "unfinished": "that an episode has not ended: it comes back as truncated",
        "truncated": "that an episode was truncated: it comes back as not ended",
        "ends": "how an episode ended, and whether it did: it comes back as terminated",
        "ids": "the ids of episodes",
        "start": "the number of the first step of an episode that is not recorded from its beginning",
        "infos": "infos",
        "extra": "columns beyond obs, actions, rewards, ends and infos",
        "row_shape": "whether a row is one number or an array of one number",
        "dtypes": "dtypes (values are kept)",
    }
)

#: How the arrays of a column may be nested: one "array"; an array or "keys", a dict of arrays; an array or
#: "parts", a tuple of arrays; "dicts", also in dicts; "any".
Nesting: TypeAlias = Literal["array", "keys", "parts", "dicts", "any"]

# A look is bounded, however large the folder is: names of a folder, folders, bytes of a file, levels down.
_NAMES = 1000
_FOLDERS = 12
_DEPTH = 4
_JSON_BYTES = 4 << 20
_LINE_BYTES = 1 << 20
_FOLDERS_FIRST: Final = ("meta", "data")


def _never(_: object) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Properties that only files of one format have.

    Attributes:
        json: Test of an object in a marker file, or on the first line of a JSON file; see `with_all_of`.
        columns: Test of the top-level columns of a Parquet or Arrow file.
        hdf5: Test of the paths in an HDF5 file, two levels deep, such as ``episode_0/observations``. Of a
            large file, not all paths are listed.
        hdf5_names: Members of an HDF5 file that are listed in any case.
        npz: Test of the names of the arrays in an NPZ file.
        files: Test of the names of the files in a folder.
        folders: Names of folders, all of which are in the folder of a data set that `paths` mark.
        paths: Files below such a folder, one of which only this format has.
        endings: Endings of the names of data files, lower case, such as ``.csv``.
        by_ending: Whether the ending alone marks the format, because its files have no other marks.
    """

    json: Callable[[Mapping[str, Any]], bool] = _never
    columns: Callable[[frozenset[str]], bool] = _never
    hdf5: Callable[[frozenset[str]], bool] = _never
    hdf5_names: frozenset[str] = frozenset()
    npz: Callable[[frozenset[str]], bool] = _never
    files: Callable[[Collection[str]], bool] = _never
    folders: frozenset[str] = frozenset()
    paths: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    by_ending: bool = False


def with_all_of(*needed: set[str]) -> Callable[[Collection[str]], bool]:
    """A test of keys or columns for `Marks`: whether all names of one of the sets are there."""
    return lambda found: any(names.issubset(found) for names in needed)


@dataclass(frozen=True, kw_only=True)
class Holds:
    """What a format holds of an episode, as data: `rlio.conversion.prepare` fits episodes to it.

    Numbers are bools, integers and floats of 8 bytes at most. Further columns are all but observations,
    actions, rewards, ends, ids and infos.

    Attributes:
        obs, actions: How observations and actions may be nested.
        extra: How further columns may be nested; None: the format has none but those of `named`.
        named: Further columns that the layout has a place for, if the sink takes their values.
        texts: Which of "obs", "actions" and "extra" may be texts.
        text_axes: Axes of an array of texts, at most.
        axes: Axes of an array of numbers, at most.
        ragged: Which of "obs", "actions", "extra" and "parts", of dicts, may have rows of different lengths
            (`rlio.Ragged`).
        times: Whether further columns may be times (datetime64, timedelta64) that Arrow has.
        shapes: (column, shape of its rows), of columns whose rows have one shape in all data.
        slash: Whether names may have slashes.
        reserved: A pattern of the names that the layout uses itself, which no further column can have.
        lone_keys: A dict of observations that has one of these keys alone comes back as its array.
        rewards: "number": one a step; "numbers": rows of any shape.
        floats: Columns whose whole numbers come back as floats.
        needs_rewards: Whether the format has no data without rewards.
        final_obs: Whether an observation after the last step is "needed"; may be "marked" as missing; is
            "declared" for all episodes by the first one, and then marked where it is missing; or is "lost".
        ends: "all", also unfinished episodes; "closed": an unfinished episode comes back as truncated;
            "either": likewise, and an episode that is terminated and truncated as terminated; "terminated":
            truncation is not kept; "none": every episode comes back as terminated.
        ids: Which ids of episodes: "any", "text" (numbers become texts) or "none".
        start: Whether the number of the first step is kept.
        agents: Whether the agent's id is kept.
        infos: Whether infos are kept, as JSON's values.
        row_shape: Whether rows of one number differ from arrays of one number.
        dtypes: Whether dtypes are kept.
        uniform: What all episodes have in common, besides the names of columns: nothing (""), "shapes" of
            rows, or also "dtypes".
        spaces: Whether observations and actions must have the structure of the spaces, if these are known.
        pictures: Codecs of the pictures, of shape (height, width, channels), that observations and further
            columns keep as files; others are decoded.
        environment: The description of an environment that it keeps: "gymnasium" (JSON of a spec),
            "robomimic" (JSON of ``env_args``); "": none.
    """

    obs: Nesting = "array"
    actions: Nesting = "array"
    extra: Nesting | None = None
    named: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    text_axes: int = 1
    axes: int = 32
    ragged: frozenset[str] = frozenset()
    times: bool = False
    shapes: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    slash: bool = True
    reserved: str = ""
    lone_keys: frozenset[str] = frozenset()
    rewards: Literal["number", "numbers"] = "number"
    floats: frozenset[str] = frozenset()
    needs_rewards: bool = True
    final_obs: Literal["needed", "marked", "declared", "lost"] = "marked"
    ends: Literal["all", "closed", "either", "terminated", "none"] = "all"
    ids: Literal["any", "text", "none"] = "any"
    start: bool = True
    agents: bool = False
    infos: bool = False
    row_shape: bool = True
    dtypes: bool = True
    uniform: Literal["", "shapes", "dtypes"] = ""
    spaces: bool = False
    pictures: frozenset[Codec] = frozenset()
    environment: Literal["", "gymnasium", "robomimic"] = ""

    @property
    def loses(self) -> frozenset[str]:
        """Names in `LOSSES`: what does not come back."""
        lost = {
            "final_obs": self.final_obs == "lost",
            "unfinished": self.ends in ("closed", "either"),
            "truncated": self.ends == "terminated",
            "ends": self.ends == "none",
            "ids": self.ids != "any",
            "start": not self.start,
            "infos": not self.infos,
            "extra": self.extra is None,
            "row_shape": not self.row_shape,
            "dtypes": not self.dtypes,
        }
        return frozenset(name for name, is_lost in lost.items() if is_lost)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format in which a library stores experience.

    Attributes:
        name: What ``to=`` of `rlio.convert` and ``--to`` take, such as ``"minari"``.
        title: The name that its users know.
        marks: How it is recognised.
        reader: ``module:Class`` of a `rlio.InputReader` of its own that opens it; None: it has none.
        source: ``module:Class`` of the `rlio.source.episodes.EpisodeSource` with which `EpisodeReader`
            opens it; the same as ``table``, if the columns of files may have rlio's names. With neither, rlio
            does not read the format.
        rows: ``module:function`` that opens the files of a format with a ``reader`` as a source of rows, by
            `rlio.formats.files.inputs.FileOptions`.
        takes: The options that ``rows`` takes, besides those of storage.
        table: ``module:Class`` of the `rlio.formats.tables.table.Table` from which a mapping reads; None: it
            has no columns of the user's own.
        writer: ``module:Class`` of the `rlio.formats.sink.EpisodeSink` that writes it; None: rlio does not
            write it.
        holds: What files that ``writer`` writes hold of an episode.
        within: Name of the format whose files these are, too; it is recognised by more than that one.
        root: If a folder is a data set: paths below it, of which each data set has one or more. (): each file
            is read by itself.
        rootless: What the user can do with files of the format without a ``root``, as the end of a message.
        home: (environment variable, path in its stead) of the folder in which the library keeps data sets
            whose ids are paths below it; None: it has no such folder.
        remote: ``module:function`` that gives the URI of a data set in the library's remote store for an id;
            None: there is none.
        advice: What the user can do, as the end of a message.
        about: What is read, and what the format does not store, in one or two sentences, for docs and
            reports.
    """

    name: str
    title: str
    marks: Marks
    reader: str | None = None
    source: str | None = None
    rows: str | None = None
    takes: tuple[str, ...] = ("spaces", "format_options")
    table: str | None = None
    writer: str | None = None
    holds: Holds = field(default_factory=Holds)
    within: str = ""
    root: tuple[str, ...] = ()
    rootless: str = ""
    home: tuple[str, str] | None = None
    remote: str | None = None
    advice: str = "read it with rlio.read"
    about: str = ""

    @property
    def loses(self) -> frozenset[str]:
        """Names in `LOSSES`: what does not come back from files that ``writer`` has written."""
        return self.holds.loses if self.writer else frozenset()

    @property
    def is_read(self) -> bool:
        """Whether rlio reads it."""
        return self.reader is not None or self.source is not None or self.table is not None

    def has_marker(self, look: Look) -> bool:
        """Whether the folder has a file that only this format has."""
        marks = self.marks
        return (
            marks.files(look.files)
            or any(map(marks.json, look.markers()))
            or (marks.folders <= look.folders and any(map(look.has, marks.paths)))
        )

    def has_content(self, look: Look) -> bool:
        """Whether a data file has content of this format."""
        marks = self.marks
        return (
            any(map(marks.json, look.json_lines()))
            or any(map(marks.columns, look.columns(marks.endings)))
            or any(map(marks.hdf5, look.hdf5()))
            or any(map(marks.npz, look.npz()))
        )

    def has_ending(self, look: Look) -> bool:
        """Whether the name of a file has an ending that marks the format."""
        marks = self.marks
        return marks.by_ending and any(name.lower().endswith(marks.endings) for name in look.files)

    def refusal(self, *, uri: str | None = None) -> UnknownLayout:
        """The error of a reader that was given this format and does not read it."""
        return UnknownLayout(
            f"found {self.title}, which rlio does not read: {self.advice}"
            if not self.is_read
            else f"found {self.title}'s layout, expected one that this reader knows: {self.advice}",
            uri=uri,
        )


def load(place: str) -> Any:
    """The object at ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


@cache
def formats() -> tuple[Format, ...]:
    """All formats that rlio knows, by name: ``FORMAT`` or ``FORMATS`` of the modules of `rlio.formats`."""
    package = import_module("rlio.formats")
    names = (info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    modules = map(import_module, names)
    # A module may import the format of another.
    found: dict[Format, None] = {}
    for module in modules:
        found |= dict.fromkeys(
            [module.FORMAT] if hasattr(module, "FORMAT") else getattr(module, "FORMATS", ())
        )
    return tuple(sorted(found, key=lambda format: format.name))


def titles_of_read(*, hdf5: bool = False) -> str:
    """The formats that rlio reads, for a message; ``hdf5``: those of them that are HDF5."""
    read = [one for one in formats() if one.is_read and not (hdf5 and one.marks.hdf5 is _never)]
    return ", ".join(sorted({one.title for one in read}))


def by_name(name: str) -> Format | None:
    """The format of this name; None: there is none."""
    return next((format for format in formats() if format.name == name), None)


# ---- what one file says ----


def format_of_columns(names: Collection[str]) -> Format | None:
    """The format of a Parquet or Arrow file with these top-level columns; None: no known one."""
    found = frozenset(names)
    return next((format for format in formats() if format.marks.columns(found)), None)


def format_of_json(found: object) -> Format | None:
    """The format of a file with this JSON, or with this first line; None: no known one."""
    if not isinstance(found, Mapping):
        return None
    return next((format for format in formats() if format.marks.json(found)), None)


def format_of_hdf5(file: Any) -> Format | None:
    """The format of an open h5py file; None: no known one. No link that leaves the file is followed."""
    paths = _hdf5_paths(file)
    return next((format for format in formats() if format.marks.hdf5(paths)), None)


def _hdf5_paths(file: Any) -> frozenset[str]:
    """Names of the members of an h5py file, and of the groups in it that are stored in the file itself."""
    import h5py

    paths = {name for format in formats() for name in format.marks.hdf5_names if name in file}
    for number, name in enumerate(file):
        if number == _NAMES:
            break
        paths.add(name)
        group = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
        if isinstance(group, h5py.Group):
            paths.update(f"{name}/{child}" for _, child in zip(range(_NAMES), group, strict=False))
    return frozenset(paths)


# ---- looking ----


class Found(NamedTuple):
    """What `recognise` found.

    Attributes:
        format: The format.
        folder: The folder, below the path that was given, whose files say so; "" is the path itself.
        confidence: `BY_ENDING`, `BY_CONTENT` or `BY_MARKER`.
    """

    format: Format
    folder: str
    confidence: int


def recognise(place: StrPath | Storage, *, storage_options: Mapping[str, Any] | None = None) -> Found | None:
    """Name the format of the file or folder at ``place``.

    It lists only a few folders and reads only a few small files, so None does not prove that the folder has
    no such files. A data set of rlio has none of these formats.

    Args:
        place: A path or URI.
        storage_options: For fsspec.

    Raises:
        OptionError: ``place`` is not a path, or its filesystem is not known.
        UnknownLayout: A file that would say it is a pointer of Git LFS.
        UnsafeData: Nothing was found but a link that leads out of the folder.
        StoreError: The store failed, or refuses the file at ``place``.
    """
    if not isinstance(place, Storage):
        location = locate(place, storage_options)
        file = InputFile(location.fs, location.path, location.uri, None)
        found = recognise_file(file)
        if found is not None and not (found.confidence == BY_ENDING and file.path.lower().endswith(".zip")):
            return found
        place = Storage.open(place, storage_options=storage_options)
        if found is not None and not place.is_zipped:
            return found
        # The ending of a zip file does not say what is in it.
    else:
        found = None
    refused: list[UnsafeData] = []
    below = _search(place.of_others(), "", _DEPTH, [], refused)
    if below is None and found is None and refused:
        raise refused[0]  # A link that leads out: rows may be behind it.
    return below or found


def recognise_file(file: InputFile) -> Found | None:
    """What `recognise` finds in one file.

    Raises:
        StoreError: The store failed, or refuses the file.
    """
    failures: list[StoreError] = []
    look = Look([file.path.rpartition("/")[2]], lambda _: file, fails=failures.append)
    found = _best(look, "")
    # A folder may have such a name; some stores have no word of their own for its being no file.
    if failures and not _is_folder(file):
        raise failures[0]
    return found


def _is_folder(file: InputFile) -> bool:
    with explained(file.uri):
        return os.path.isdir(file.path) if file.fs is None else bool(file.fs.isdir(file.path))


def refuse_known(
    inputs: Sequence[StrPath], storage_options: Mapping[str, Any] | None, cause: RlioError
) -> None:
    """Raise, from ``cause``, if one of ``inputs`` has a format that rlio does not read.

    Raises:
        UnknownLayout: One has.
    """
    for value in inputs:
        found = recognise(value, storage_options=storage_options if is_uri(os.fspath(value)) else None)
        if found is not None and not found.format.is_read:
            raise found.format.refusal(uri=cause.uri or os.fspath(value)) from cause


def _best(look: Look, folder: str) -> Found | None:
    # The surest first: data files are opened only where there is no marker.
    ways = ((BY_MARKER, Format.has_marker), (BY_CONTENT, Format.has_content), (BY_ENDING, Format.has_ending))
    # What rlio reads, beside which files of other kinds may lie, comes first, and a format before its kind.
    known = sorted(formats(), key=lambda format: (not format.is_read, not format.within))
    for confidence, is_there in ways:
        for format in known:
            if is_there(format, look):
                return Found(format, folder, confidence)
    return None


def _search(
    storage: Storage, folder: str, depth: int, seen: list[str], refused: list[UnsafeData]
) -> Found | None:
    """What a folder holds; a folder whose names alone say it gives way to one further down."""
    if len(seen) == _FOLDERS:
        return None
    seen.append(folder)
    try:
        children = storage.children(folder, most=_NAMES)
    except UnsafeData as error:
        refused.append(error)
        return None
    except StoreError as error:
        _raise_failure(error)
        return None
    except (RlioError, OSError):  # It cannot be listed: nothing is known of it.
        return None
    files = [name for name, is_folder in children if not is_folder]
    if HEADER in files:
        return None
    prefix = f"{folder}/" if folder else ""
    folders = [name for name, is_folder in children if is_folder]
    look = Look(files, lambda name: file_in(storage, prefix + name), folders, fails=_raise_failure)
    found = _best(look, folder)
    refused += look.refused
    if found is not None and found.confidence > BY_ENDING:
        return found
    below = [name for name, is_folder in children if is_folder and not name.startswith("_")]
    below.sort(key=lambda name: (name not in _FOLDERS_FIRST, name))
    for name in below if depth else ():
        if deeper := _search(storage, prefix + name, depth - 1, seen, refused):
            return deeper
    return found


def _raise_failure(error: StoreError) -> None:
    """Raise the error of a store that failed: what it has is not known, and another format may seem to fit.

    What it refuses may be beside the data, and what is no file, or no folder, is no failure.
    """
    is_other = isinstance(error, StoreRefused) or isinstance(
        error.__cause__, IsADirectoryError | NotADirectoryError
    )
    if not is_other:
        raise error


def file_in(storage: Storage, path: str, size: int | None = None) -> InputFile:
    """A file below a folder, to be opened with `rlio.storage.open_input`.

    Raises:
        UnsafeData: It is a link that leads out of the folder, or to nothing.
    """
    fs = None if storage.is_local else storage.fs
    return InputFile(fs, storage.real(path), storage.uri_of(path), size)


class Look:
    """A bounded look at the files of one folder, or at one file. Each file is opened once.

    Args:
        files: Names of the files.
        file_of: Name -> the file.
        folders: Names of the folders beside them.
        fails: Called with the error of a store that failed or refused a file, which it may raise.

    Attributes:
        files, folders: The names.
    """

    #: JSON files that say what is in their folder.
    MARKERS: Final = frozenset(
        f"{name}.json"
        for name in ("metadata", "info", "dataset_info", "state", "dataset_dict", "meta", "features")
    )

    def __init__(
        self,
        files: Collection[str],
        file_of: Callable[[str], InputFile],
        folders: Collection[str] = (),
        *,
        fails: Callable[[StoreError], None],
    ) -> None:
        self.files = files
        self.folders: frozenset[str] = frozenset(folders)
        self._file_of, self._fails = file_of, fails
        self._seen: dict[tuple[str, ...], list[Any]] = {}
        #: Errors of links that lead out of the folder.
        self.refused: list[UnsafeData] = []

    def has(self, path: str) -> bool:
        """Whether there is a file at a path below the folder."""
        return bool(self._each((path,), [path], lambda stream: stream.read(1)))

    def markers(self) -> list[Mapping[str, Any]]:
        """The JSON objects in the marker files of the folder."""
        names = [name for name in self.files if name in self.MARKERS]
        return [found for found in self._each(("marker",), names, _json_of) if isinstance(found, Mapping)]

    def json_lines(self) -> list[Mapping[str, Any]]:
        """The first JSON object of the first JSON file that is not a marker."""
        found = self._first((".json", ".jsonl"), _json_of)
        return [one for one in found if isinstance(one, Mapping)]

    def columns(self, endings: tuple[str, ...] = ()) -> list[frozenset[str]]:
        """Top-level columns of the first Parquet file, and of the first Arrow file.

        Args:
            endings: Endings of the names of a format's files; (): any.
        """
        kinds = ((".parquet", _parquet_columns), (".arrow", _arrow_columns))
        return [
            names
            for ending, look in kinds
            if not endings or ending in endings
            for names in self._first((ending,), look)
        ]

    def hdf5(self) -> list[frozenset[str]]:
        """Paths in the first HDF5 file, two levels deep."""
        return self._first((".hdf5", ".h5"), _paths_of_hdf5)

    def npz(self) -> list[frozenset[str]]:
        """Names of the arrays in the first NPZ file."""
        return self._first((".npz",), _npz_names)

    def _first(self, endings: tuple[str, ...], look: Callable[[IO[bytes]], T]) -> list[T]:
        if endings in self._seen:  # Each format asks: a list of the names takes longer than the answer.
            return self._seen[endings]
        names = (n for n in self.files if n.lower().endswith(endings) and n not in self.MARKERS)
        return self._each(endings, [name for _, name in zip(range(1), names, strict=False)], look)

    def _each(self, key: tuple[str, ...], names: list[str], look: Callable[[IO[bytes]], T]) -> list[T]:
        if key not in self._seen:
            found = [self._at(name, look) for name in names]
            self._seen[key] = [one for one in found if one is not None]
        return self._seen[key]

    def _at(self, name: str, look: Callable[[IO[bytes]], T]) -> T | None:
        """What ``look`` reads from a file; None: it cannot be opened, or is not of that kind."""
        try:
            file = self._file_of(name)
        except UnsafeData as error:
            self.refused.append(error)
            return None
        try:
            with open_input(file, locks=look is _paths_of_hdf5) as stream:
                return look(stream)
        except UnknownLayout:  # A pointer of Git LFS.
            raise
        except StoreError as error:
            self._fails(error)
            return None
        except (RlioError, ImportError, *DAMAGE):
            # Damaged, gone, a folder, or h5py is not installed: nothing is known of it, which is the answer.
            return None


def _parquet_columns(stream: IO[bytes]) -> frozenset[str]:
    return frozenset(read_metadata(stream, limits=DEFAULT_LIMITS).schema.to_arrow_schema().names)


def _arrow_columns(stream: IO[bytes]) -> frozenset[str]:
    """By the first message alone, in which no extension type is asked: a file has it after its magic."""
    from rlio.formats.files.parquet_footer import plain_schema

    stream.seek(8 if stream.read(6) == b"ARROW1" else 0)
    head = stream.read(8)
    size = int.from_bytes(head[4:], "little")
    if head[:4] != b"\xff\xff\xff\xff" or size > DEFAULT_LIMITS.footer_bytes:
        raise CorruptData("found no message of Arrow")
    return frozenset(plain_schema(head + stream.read(size))[0].names)


def _paths_of_hdf5(stream: IO[bytes]) -> frozenset[str]:
    import h5py

    with h5py.File(stream, "r") as file:
        return _hdf5_paths(file)


def _npz_names(stream: IO[bytes]) -> frozenset[str]:
    with open_archive(stream, DEFAULT_LIMITS, uri="") as archive:
        return frozenset(name.removesuffix(".npy") for name in archive.namelist()[:_NAMES])


def _json_of(stream: IO[bytes]) -> Any:
    """The JSON of a file, or of its first line; of a long line of RLlib, its type alone."""
    line = stream.readline(_LINE_BYTES)
    if len(line) == _LINE_BYTES and (
        kind := re.match(rb'\s*\{\s*"type"\s*:\s*"(SampleBatch|MultiAgentBatch)"', line)
    ):
        known = {"schema": 0} if b'"schema"' in line[:200] else {}
        return {"type": kind[1].decode(), **known}
    try:
        return _parsed(line)
    except ValueError:  # JSON over several lines.
        return _parsed(line + stream.read(_JSON_BYTES))


def _parsed(text: bytes) -> Any:
    import orjson

    DEFAULT_LIMITS.check_json(text, "JSON")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # `json` also reads NaN, and integers of any size.
        return json.loads(text)
