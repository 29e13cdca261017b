"""`open_dataset`: opens a data set of rlio, or another library's files as one that is read only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from rlio.batch.arrays import is_table
from rlio.dataset.dataset import Dataset, Snapshot, open_own, opened, other_layout
from rlio.dataset.file_dataset import FileDataset
from rlio.errors import DataNotFound, OptionError, excerpt, with_hint
from rlio.formats.format import open_files, recognise_any
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.mapping import Mapping as ColumnMapping
from rlio.source.source import FileSource
from rlio.storage.filesystem import Storage
from rlio.support.options import checked_keywords

__all__ = ["open_dataset", "open_source"]


@checked_keywords
def open_dataset(
    uri: Any,
    *,
    at: Snapshot | None = None,
    mapping: ColumnMapping | None = None,
    format: str | None = None,
    format_options: Mapping[str, Any] | None = None,
    spaces: Any = None,
    on_error: Literal["raise", "skip"] = "raise",
    storage_options: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Dataset:
    """Open the data set under ``uri``. Lists the root and reads the header, but no shard.

    Files of another library, and tables, are a data set that is read only: `Dataset.episode`, rows,
    `Dataset.stats` and exports work. What needs shards of rlio, such as `Dataset.snapshot`, raises
    OptionError and names `rlio convert`.

    Args:
        uri: A path or any fsspec URL; or files of another library, or a table, as `rlio.read` takes them.
        at: A snapshot from `Dataset.snapshot`: shows exactly its rows, without later appends, and unchanged
            by compaction. None: shows all rows that the root has.
        mapping: What the columns of a table mean.
        format: Name of the format of another library's files; None: recognise it.
        format_options: Options of that format.
        spaces: (observation space, action space), or policy id -> such a pair, of files that do not state
            them; they also shape RLlib's JSON: see `rlio.JsonReader`.
        on_error: What to do if rows of the snapshot are missing: ``"raise"``, or ``"skip"`` them; then
            `Dataset.lost_rows` counts them.
        storage_options: Options for fsspec, and ``rlio_timeout`` and ``rlio_retries``.
        limits: The most that the data may ask for: memory, names, depth.

    A data set without rows is not an error. Logs a warning if its rows wait in write-ahead logs on this
    machine.

    Raises:
        DataNotFound: ``uri`` has no data set.
        HoleError: Rows of the snapshot are missing, or were trimmed since it was taken.
        OptionError: The data set has another format version, or ``at`` is not a snapshot.
    """
    shared: dict[str, Any] = {"on_error": on_error, "storage_options": storage_options, "limits": limits}
    own = {"mapping": mapping, "format": format, "format_options": format_options, "spaces": spaces}
    if isinstance(uri, Dataset):
        raise OptionError("found a Dataset, which is open: expected where it is stored", uri=uri.uri)
    failure = None
    if _may_be_root(uri, own):
        try:
            return _without(own, open_own(uri, at=at, look=False, **shared))
        except DataNotFound as error:
            failure = error
    found = _files(uri, at, {**own, **shared}, failure)
    return FileDataset(uri, {**own, **shared}, found)


def open_source(
    value: Any,
    *,
    at: Snapshot | None,
    own: Mapping[str, Any],
    on_error: Literal["raise", "skip"],
    storage_options: Mapping[str, Any] | None,
    limits: Limits,
) -> Dataset | FileSource:
    """The rows of a data set of rlio, or of another library's files, which the caller closes, as a source.

    Args:
        value: Where it is, or an open `Dataset`.
        at: See `open_dataset`.
        own: The options of other libraries' files; None: not given.
        on_error: See `open_dataset`.
        storage_options: See `open_dataset`.
        limits: See `open_dataset`.

    Raises:
        OptionError, DataNotFound, HoleError: As `open_dataset`.
    """
    shared: dict[str, Any] = {"on_error": on_error, "storage_options": storage_options, "limits": limits}
    if isinstance(value, FileDataset):
        _refuse_snapshot(at, value.uri)
        return value.again()
    if isinstance(value, Dataset):
        return _without(own, opened(value, at=at, **shared))
    failure = None
    if _may_be_root(value, own):
        try:
            return _without(own, opened(value, at=at, look=False, **shared))
        except DataNotFound as error:
            failure = error
    return _files(value, at, {**own, **shared}, failure)


def _may_be_root(value: Any, own: Mapping[str, Any]) -> bool:
    return isinstance(value, (str, os.PathLike)) and own["mapping"] is None


def _without(own: Mapping[str, Any], found: Dataset) -> Dataset:
    """Refuse the options of other libraries' files for a data set of rlio."""
    if given := [name for name, value in own.items() if value is not None]:
        raise OptionError(
            f"{', '.join(given)} is for other libraries' files, and this is a data set of rlio: leave it out",
            uri=found.uri,
        )
    return found


def _files(
    value: Any, at: Snapshot | None, options: Mapping[str, Any], failure: DataNotFound | None
) -> FileSource:
    """Other libraries' files; raises ``failure`` if no format is known."""
    known = None
    if options["mapping"] is None and not is_table(value):
        known = recognise_any(value, options["storage_options"])
        if known is None and options["format"] is None:
            if failure is None:
                raise DataNotFound(f"found no format that rlio knows in {excerpt(value)}")
            storage = Storage.open(value, storage_options=options["storage_options"])
            raise with_hint(failure, storage.did_you_mean())
    found = open_files(value, known=known, **options)
    if found is None:
        assert known is not None
        raise other_layout(known, excerpt(value) if failure is None else failure.uri or "") from failure
    try:
        _refuse_snapshot(at, found.uri)
    except OptionError:
        found.close()
        raise
    return found


def _refuse_snapshot(at: Snapshot | None, uri: str) -> None:
    if at is not None:
        raise OptionError(
            "at= is a snapshot of a data set of rlio, and these files are of another library: leave it out",
            uri=uri,
        )
