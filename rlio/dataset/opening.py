"""`open_dataset`: opens a data set of rlio, or another library's files as one that is read only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rlio.dataset.dataset import Dataset, Snapshot
from rlio.dataset.file_dataset import FileDataset
from rlio.errors import DataNotFound, OptionError
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.mapping import Mapping as ColumnMapping
from rlio.opening import are_roots, is_list, may_be_root, open_other, open_own, without_options
from rlio.support.options import checked_keywords

__all__ = ["open_dataset"]


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
    """Open the data set under ``uri``. Lists the root and reads its header and schemas, but no shard.

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
    if is_list(uri) and are_roots(uri, storage_options):
        raise OptionError(
            "several data sets are read by rlio.read and rlio.ReplayStore.open: open each alone here"
        )
    failure = None
    if may_be_root(uri, own):
        try:
            return without_options(own, open_own(uri, at=at, look=False, kind=Dataset, **shared))
        except DataNotFound as error:
            failure = error
    found = open_other(uri, at, {**own, **shared}, failure)
    return FileDataset(uri, {**own, **shared}, found)
