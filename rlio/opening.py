"""Opens what is stored as a source: a data set of rlio, files of another library, or a table in memory.

`rlio.open_dataset` makes a `rlio.Dataset` of it; readers and stores read the source itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeGuard, TypeVar, cast

from rlio.batch.arrays import is_table, refuse_columns
from rlio.catalog.commit import read_header
from rlio.catalog.names import HEADER
from rlio.errors import DataNotFound, OptionError, excerpt
from rlio.formats.files.inputs import FileOptions
from rlio.formats.files.partitions import expand_with_partitions
from rlio.formats.format import BY_ENDING, Found, by_name, load, recognise
from rlio.formats.place import Recognised, open_episode_files, recognise_inputs
from rlio.formats.tables.table_files import open_table_files
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.source.joined import JoinedRoots, Snapshots
from rlio.source.snapshot import DatasetSnapshot, Snapshot, rows_waiting
from rlio.source.source import FileSource
from rlio.storage.filesystem import Storage
from rlio.storage.inputs import is_glob, is_zip
from rlio.storage.near import with_hint
from rlio.support.options import check_choice, refuse_unknown

__all__ = [
    "OtherFiles",
    "are_roots",
    "dataset_on",
    "is_list",
    "may_be_root",
    "open_files",
    "open_other",
    "open_own",
    "open_source",
    "opened",
    "opened_roots",
    "refuse_open_options",
    "refuse_snapshot",
    "require_header",
    "without_options",
]

logger: logging.Logger = logging.getLogger("rlio")

S = TypeVar("S", bound=DatasetSnapshot)
R = TypeVar("R", bound=DatasetSnapshot | JoinedRoots)
#: The endings of names of files, which are no data sets if they stand in a list.
_FILES: Final = (".json", ".jsonl", ".zip", ".hdf5", ".h5", ".parquet")
#: Formats of tables whose columns may have any names: their reader says which mapping they need. Not .json,
#: which may be anything.
_ENDINGS: Final = {"rllib-json": ".jsonl", "parquet": ".parquet"}
Root: TypeAlias = str | os.PathLike[str] | DatasetSnapshot


class OtherFiles:
    """Files of another library, or a table in memory, which can be opened again.

    Attributes:
        inputs: The files, or the table.
        options: Keywords of `open_files`.
    """

    inputs: Any
    options: dict[str, Any]

    @property
    def uri(self) -> str:
        """Where they are."""
        raise NotImplementedError

    def again(self) -> FileSource:
        """The same files as another source, which the caller closes."""
        found = open_files(self.inputs, **{"storage_options": None, **self.options})
        if found is None:
            raise DataNotFound(f"found no format that rlio knows in {excerpt(self.inputs)}")
        return found


def open_own(
    uri: str | os.PathLike[str],
    *,
    at: Snapshot | None,
    on_error: Literal["raise", "skip"],
    storage_options: Mapping[str, Any] | None,
    limits: Limits,
    look: bool = True,
    kind: type[S],
) -> S:
    """`rlio.open_dataset` for a data set of rlio, as a ``kind``. ``look``: see `require_header`."""
    check_choice("on_error", on_error, ("raise", "skip"))
    storage = Storage.open(uri, storage_options=storage_options, limits=limits)
    dataset = _listed(storage, at, look, kind)
    if at is not None and on_error == "raise":
        dataset.check_complete()
    return dataset


def dataset_on(storage: Storage, *, at: Snapshot | None = None) -> DatasetSnapshot:
    """`open_own` for a root that is already open. Counts missing rows instead of raising."""
    return _listed(storage, at, True, DatasetSnapshot)


def _listed(storage: Storage, at: Snapshot | None, look: bool, kind: type[S]) -> S:
    require_header(storage, look=look)
    found = kind.listed(storage, at=at)
    if at is None and not len(found) and (waiting := rows_waiting(storage)):
        logger.warning("%s has no rows%s", storage.uri, waiting)
    return found


def require_header(storage: Storage, *, look: bool = True) -> None:
    """Raise unless ``storage`` is the root of a data set.

    Args:
        storage: The root.
        look: Whether to look for the layout of another library, which lists some folders.

    Raises:
        DataNotFound: It is not. The message names what was found: rows in logs, the layout of another
            library, a file, or the names of some files.
        OptionError: The data set has a format version that this library does not read.
        CorruptData: The header is damaged.
    """
    try:
        read_header(storage)
    except DataNotFound as error:
        # The writer may have died before it could reach the store.
        if waiting := rows_waiting(storage):
            raise DataNotFound(f"no data set yet: {HEADER} is not there{waiting}", uri=storage.uri) from error
        if not look:
            raise
        if found := recognise(storage):
            raise other_layout(found, storage.uri) from error
        if hint := storage.did_you_mean():
            raise with_hint(error, hint) from error
        raise


def other_layout(found: Found, uri: str) -> DataNotFound:
    """The error for files of another library where a data set of rlio is needed."""
    title, advice = found.format.title, found.format.advice
    return DataNotFound(
        f"no data set of rlio: {HEADER} is not there; found {title}'s layout: {advice}", uri=uri
    )


def opened_roots(
    roots: Root | Sequence[Root],
    *,
    at: Snapshots | None,
    **options: Any,
) -> DatasetSnapshot | JoinedRoots:
    """`opened`, of one data set or of each of a list.

    Args:
        roots: The data sets.
        at: A snapshot; of a list, one for each, or None.
        options: Those of `opened`.

    Raises:
        OptionError: As `opened`; or ``at`` has another length, or a data set is in the list twice.
        DataNotFound, HoleError: As `opened`.
    """
    if not is_list(roots):
        return opened(cast("Root", roots), at=cast("Snapshot | None", at), **options)
    snapshots = [None] * len(roots) if at is None else at
    if not isinstance(snapshots, Sequence) or len(snapshots) != len(roots):
        raise OptionError(
            f"at={excerpt(at)} with {len(roots)} data sets: expected a list with a snapshot, or None, for "
            "each"
        )
    found = [opened(root, at=one, **options) for root, one in zip(roots, snapshots, strict=True)]
    return found[0] if len(found) == 1 else JoinedRoots(found)


def opened(
    root: Root,
    *,
    at: Snapshot | None,
    on_error: Literal["raise", "skip"],
    storage_options: Mapping[str, Any] | None,
    limits: Limits,
    look: bool = True,
) -> DatasetSnapshot:
    """Open the data set with `open_own`, or return the one that is already open.

    Raises:
        OptionError: As `rlio.open_dataset`; or the call gives options that the open data set already has.
        DataNotFound: The root has no data set.
        HoleError: Rows are missing.
    """
    if isinstance(root, DatasetSnapshot):
        refuse_open_options(storage_options, limits)
        dataset = root if at is None else root.refresh(at=at)
    else:
        dataset = open_own(
            root,
            at=at,
            on_error=on_error,
            storage_options=storage_options,
            limits=limits,
            look=look,
            kind=DatasetSnapshot,
        )
    if on_error == "raise":
        dataset.check_complete()
    return dataset


def refuse_open_options(storage_options: Mapping[str, Any] | None, limits: Limits) -> None:
    """Refuse the options that only `rlio.open_dataset` takes, because the data set is already open.

    Raises:
        OptionError: One of them is given.
    """
    for name, given in (
        ("storage_options", storage_options is not None),
        ("limits", limits != DEFAULT_LIMITS),
    ):
        if given:
            raise OptionError(f"found {name}= with an open Dataset: pass it to open_dataset() instead")


def open_source(
    value: Any,
    *,
    at: Snapshots | None,
    own: Mapping[str, Any],
    on_error: Literal["raise", "skip"],
    storage_options: Mapping[str, Any] | None,
    limits: Limits,
) -> DatasetSnapshot | JoinedRoots | FileSource:
    """The rows of data sets of rlio, or of another library's files, which the caller closes, as a source.

    Args:
        value: Where it is, an open `Dataset`, or a list of these.
        at: See `open_dataset`.
        own: The options of other libraries' files; None: not given.
        on_error: See `open_dataset`.
        storage_options: See `open_dataset`.
        limits: See `open_dataset`.

    Raises:
        OptionError, DataNotFound, HoleError: As `open_dataset`.
    """
    shared: dict[str, Any] = {"on_error": on_error, "storage_options": storage_options, "limits": limits}
    if isinstance(value, OtherFiles):
        refuse_snapshot(at, value.uri)
        return value.again()
    if isinstance(value, DatasetSnapshot) or (is_list(value) and are_roots(value, storage_options)):
        return without_options(own, opened_roots(value, at=at, **shared))
    failure = None
    if may_be_root(value, own):
        try:
            return without_options(own, opened_roots(value, at=at, look=False, **shared))
        except DataNotFound as error:
            failure = error
    return open_other(value, at, {**own, **shared}, failure)


def may_be_root(value: Any, own: Mapping[str, Any]) -> bool:
    """Whether ``value``, with these options of other libraries' files, may be the root of a data set."""
    return isinstance(value, (str, os.PathLike)) and own["mapping"] is None


def is_list(value: Any) -> TypeGuard[Sequence[Root]]:
    """Whether ``value`` is a list of paths and open data sets."""
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str | DatasetSnapshot) and len(value)
    return bool(is_sequence) and all(isinstance(one, (str, os.PathLike, DatasetSnapshot)) for one in value)


def are_roots(values: Sequence[Root], storage_options: Mapping[str, Any] | None) -> bool:
    """Whether the items of a list are data sets of rlio.

    Raises:
        OptionError: Some are, and some are not.
    """
    alone = len(values) == 1
    found = [isinstance(one, DatasetSnapshot) or _is_root(one, storage_options, alone) for one in values]
    if any(found) and not all(found):
        own, other = values[found.index(True)], values[found.index(False)]
        raise OptionError(
            f"{excerpt(_place(own))} is a data set of rlio, and {excerpt(_place(other))} is not: a list has "
            "one kind; to read both, pass a mixture with a weight for each: {path: weight, ...}"
        )
    return all(found)


def _place(value: Root) -> str:
    return value.uri if isinstance(value, DatasetSnapshot) else os.fspath(value)


def _is_root(value: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, alone: bool) -> bool:
    """Whether ``value`` is the root of a data set.

    A folder may have the ending of a file, but in a long list of what look like files, or a glob of them,
    none is looked at: that would be a request each.
    """
    # A folder or a zip file may have such a name, and be the root of a data set.
    is_like_file = os.fspath(value).endswith(_FILES)
    if is_like_file and (not alone or is_glob(value, storage_options)):
        return False
    return Storage.open(value, storage_options=storage_options).exists(HEADER)


def without_options(own: Mapping[str, Any], found: R) -> R:
    """Refuse the options of other libraries' files for a data set of rlio."""
    if given := [name for name, value in own.items() if value is not None]:
        raise OptionError(
            f"{', '.join(given)} is for other libraries' files, and this is a data set of rlio: leave it out",
            uri=found.uri,
        )
    return found


def open_other(
    value: Any, at: Snapshots | None, options: Mapping[str, Any], failure: DataNotFound | None
) -> FileSource:
    """Other libraries' files; raises ``failure`` if no format is known."""
    known, storage_options = None, options["storage_options"]
    if options["mapping"] is None and not is_table(value):
        known = _recognised(value, storage_options, options["format"])
        if known is None and options["format"] is None:
            raise _unknown(value, storage_options, failure)
    found = open_files(value, known=known, **options)
    if found is None:
        assert known is not None
        raise other_layout(known, excerpt(value) if failure is None else failure.uri or "") from failure
    try:
        refuse_snapshot(at, found.uri)
    except OptionError:
        found.close()
        raise
    return found


def _unknown(
    value: Any, storage_options: Mapping[str, Any] | None, failure: DataNotFound | None
) -> DataNotFound:
    """The error for inputs of no known format; ``failure``: why they are no data set of rlio."""
    if failure is None:
        return DataNotFound(f"found no format that rlio knows in {excerpt(value)}")
    return with_hint(failure, Storage.open(value, storage_options=storage_options).did_you_mean())


def _recognised(value: Any, storage_options: Mapping[str, Any] | None, format: str | None) -> Found | None:
    """The format of files: by what they hold or, unless ``format`` says it, by the endings of all."""
    found = recognise_any(value, storage_options)
    return _by_endings(value, storage_options) if found is None and format is None else found


def _by_endings(value: Any, storage_options: Mapping[str, Any] | None) -> Found | None:
    """The format in which the names of all files end; None: there is none, or they end in something else."""
    values = [value] if isinstance(value, (str, os.PathLike)) else value
    try:
        files = expand_with_partitions(values, storage_options)
    except DataNotFound:
        return None
    for name, ending in _ENDINGS.items():
        format = by_name(name)
        if format is not None and all(file.path.lower().endswith(ending) for file in files):
            return Found(format, "", BY_ENDING)
    return None


def refuse_snapshot(at: Snapshots | None, uri: str) -> None:
    """Refuse a snapshot for files of another library.

    Raises:
        OptionError: ``at`` is given.
    """
    if at is not None:
        raise OptionError(
            "at= is a snapshot of a data set of rlio, and these files are of another library: leave it out",
            uri=uri,
        )


def open_files(
    inputs: Any,
    *,
    storage_options: Mapping[str, Any] | None,
    limits: Limits,
    on_error: Literal["raise", "skip"],
    known: Found | None = None,
    **own: Any,
) -> FileSource | None:
    """Files of another library, or a table, as a source, which the caller closes; None: no known format.

    Args:
        inputs: A folder, file, glob or URI, a list of files, or a table in memory.
        storage_options: Keywords of the fsspec filesystem.
        limits: Bounds on the files.
        on_error: What to do with damage that is found at opening.
        known: What `_recognised` found; None: it is called.
        own: ``mapping``, ``format``, ``format_options`` and ``spaces``, as `rlio.read` takes them; None: not
            given.

    Raises:
        OptionError: The format does not take one of them.
    """
    given = {name: value for name, value in own.items() if value is not None}
    how = FileOptions(storage_options=storage_options, limits=limits, on_error=on_error, **given)
    if "mapping" in given or is_table(inputs):
        return open_table_files(inputs, how)
    found = known or _recognised(inputs, storage_options, given.get("format"))
    if found is None and "format" not in given:
        return None
    if found is not None and not found.format.is_read and "format" not in given:
        raise found.format.refusal(uri=excerpt(inputs))
    format = found.format if found is not None and "format" not in given else None
    if format is None or format.rows is None:
        if format is not None and format.source is None:
            return None
        return open_episode_files(Recognised(inputs, found), how)
    is_path = isinstance(inputs, (str, os.PathLike))
    if found is not None and found.folder and is_path and not is_zip(os.fspath(inputs)):
        # Folders of runs, one level or two below, as RLlib leaves them.
        inputs = f"{os.fspath(inputs).rstrip('/')}/**/*{format.marks.endings[0]}"
    refuse_unknown(given, format.takes, of=f"the format {format.name}")
    opened: FileSource = load(format.rows)(inputs, how)
    opened.format = format.name
    return opened


def recognise_any(inputs: Any, storage_options: Mapping[str, Any] | None) -> Found | None:
    """What `recognise` finds at a lone path, or in the first file of a glob or list; None: nothing known.

    Raises:
        OptionError: They are no paths.
    """
    values = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    is_list = isinstance(values, Sequence) and all(isinstance(value, (str, os.PathLike)) for value in values)
    if not is_list or not values:
        refuse_columns(inputs)
        raise OptionError(f"found {excerpt(inputs)}, expected a path, a list of paths, a Dataset, or a table")
    return recognise_inputs(values, storage_options)
