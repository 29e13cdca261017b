"""`trim`: the oldest rows of writers go, for good.

First a marker says so, then the shards go that lie wholly below it. The marker is enough: rows below it are
served by nobody, whatever shards are there or come back, so that an interruption, a late retry of a writer
and a reader in the middle of it all are harmless. Hidden rows of a shard that is cut take room until the
shard was merged with later ones, or is trimmed altogether.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://trim-example", writer_id="w0") as writer:
    ...     for _ in range(5):
    ...         writer.write(rlio.SampleBatch(obs=np.zeros((3, 4)), rewards=np.ones(3)))
    ...         writer.flush()
    >>> report = rlio.maintenance.trim("memory://trim-example", keep_rows=7)
    >>> report.rows, len(report.removed), len(rlio.open_dataset("memory://trim-example"))
    (8, 2, 7)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlio.dataset.dataset import require_header
from rlio.dataset.listing import Listing, Segment, ShardRef, list_shards
from rlio.dataset.markers import trim as put_marker
from rlio.dataset.shards import open_shard
from rlio.errors import DataNotFound, OptionError, excerpt
from rlio.maintenance.compaction import is_by_row
from rlio.maintenance.progress import Progress, silent
from rlio.storage.filesystem import Storage
from rlio.storage.parallel import each

__all__ = ["TrimReport", "Trimmed", "trim"]

logger = logging.getLogger("rlio")


@dataclass(frozen=True)
class Trimmed:
    """What went of one writer.

    Attributes:
        writer: Its id.
        row: The first row that is left; those below are gone.
        rows: Rows that this call took away.
    """

    writer: str
    row: int
    rows: int


@dataclass(frozen=True)
class TrimReport:
    """What `trim` did, or, in a dry run, would do.

    Attributes:
        uri: The root.
        dry_run: Whether nothing was changed.
        writers: What went of each writer; those of which nothing did are left out.
        removed: URIs of the shards that were removed.
        bytes: Bytes of those.
        rows_left: Live rows that are left, of all writers.
    """

    uri: str
    dry_run: bool
    writers: tuple[Trimmed, ...]
    removed: tuple[str, ...]
    bytes: int
    rows_left: int

    @property
    def rows(self) -> int:
        """Rows that went."""
        return sum(writer.rows for writer in self.writers)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"rows": self.rows}


def trim(
    uri: str | os.PathLike[str],
    *,
    before: Mapping[str, int] | None = None,
    keep_rows: int | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> TrimReport:
    """Remove the oldest rows. Safe at any time, beside readers and writers, and to repeat.

    Sequences (``seq_lens``) and the joint steps of several agents are not cut: of those, the marker is put
    where a shard begins, and up to one shard of rows more is left than was asked for.

    Args:
        uri: The data set: a path or any fsspec URL.
        before: Writer id -> the first row to keep; other writers keep all.
        keep_rows: How many of the newest rows to keep, instead. How new a shard is, the store says: when it
            was stored. Rows that were compacted count as stored then, unless the old shards are still there.
        dry_run: Only say what would go.
        storage_options: For fsspec.
        progress: Shows how far it is.

    Raises:
        DataNotFound: There is no data set.
        OptionError: Not exactly one of ``before`` and ``keep_rows`` is given, a writer is unknown or has no
            such row, or the store does not tell times, which ``keep_rows`` needs.
        PublishError: A marker could not be stored; what was marked before it is trimmed.
    """
    if (before is None) == (keep_rows is None):
        raise OptionError("give before={writer: row} or keep_rows=N, one of them")
    storage = Storage.open(uri, storage_options=storage_options)
    require_header(storage)
    listing = list_shards(storage)
    if before is None:
        assert keep_rows is not None
        before = _newest(storage, listing, keep_rows)
    else:
        _check(storage, listing, before)
    rows = {writer: _legal_row(storage, listing, writer, row) for writer, row in sorted(before.items())}
    trimmed = []
    for writer, row in rows.items():
        gone = sum(min(part.end, row) - part.first for part in _live(listing, writer) if part.first < row)
        if gone:
            trimmed.append(Trimmed(writer, row, gone))
    # Below markers of earlier calls too: what an interrupted one has left is removed by the next.
    marked = listing.trimmed | {entry.writer: entry.row for entry in trimmed}
    doomed = [
        ref for writer, row in marked.items() for ref in listing.shards.get(writer, []) if ref.name.end <= row
    ]
    if not dry_run:
        for entry in trimmed:
            put_marker(storage, entry.writer, entry.row)
            logger.info("trimmed %s: rows below %d of %s are gone", storage.uri, entry.row, entry.writer)
        _remove(storage, doomed, progress)
    left = sum(part.rows for writer in listing.shards for part in _live(listing, writer))
    return TrimReport(
        uri=storage.uri,
        dry_run=dry_run,
        writers=tuple(trimmed),
        removed=tuple(storage.uri_of(ref.path) for ref in doomed),
        bytes=sum(ref.name.size for ref in doomed),
        rows_left=left - sum(entry.rows for entry in trimmed),
    )


def _live(listing: Listing, writer: str) -> list[Segment]:
    return listing.cover(writer).segments


def _check(storage: Storage, listing: Listing, before: Mapping[str, int]) -> None:
    """Refuse what cannot be meant: a marker past a writer's end would hide rows that are still to come."""
    known = sorted({*listing.shards, *listing.trimmed})
    for writer, row in before.items():
        if writer not in known:
            raise OptionError(
                f"no writer {excerpt(writer)}: there are {', '.join(known) or 'none'}", uri=storage.uri
            )
        ends = [ref.name.end for ref in listing.shards.get(writer, [])]
        end = max([*ends, listing.trimmed.get(writer, 0)])
        if type(row) is not int or not 0 <= row <= end:
            raise OptionError(
                f"before[{writer!r}] is {excerpt(row)}: expected a row from 0 to {end}, the rows stored",
                uri=storage.uri,
            )


def _legal_row(storage: Storage, listing: Listing, writer: str, row: int) -> int:
    """``row``, or the first row of its shard where that cannot be cut."""
    for part in _live(listing, writer):
        if part.first < row < part.end:
            try:
                shard = open_shard(storage, part.ref)
            except DataNotFound as error:
                raise DataNotFound(
                    "the shard went while it was looked at; call again", uri=storage.uri_of(part.ref.path)
                ) from error
            # A larger shard may have been cut already, by a marker that was there before it.
            return row if is_by_row(shard.schema) else part.first
    return row


def _newest(storage: Storage, listing: Listing, keep_rows: int) -> dict[str, int]:
    """Writer id -> first row to keep, of writers that have rows to lose."""
    if type(keep_rows) is not int or keep_rows < 0:
        raise OptionError(f"keep_rows={excerpt(keep_rows)}: expected a number of rows, 0 or more")
    parts = {writer: _live(listing, writer) for writer in sorted(listing.shards)}
    aged = [item for writer, found in parts.items() for item in _aged(storage, listing, writer, found)]
    left, before = keep_rows, dict[str, int]()
    for _, part in sorted(aged, key=lambda item: (-item[0], item[1].ref.writer, -item[1].first)):
        kept = min(part.rows, left)
        left -= kept
        # From the newest to the oldest: the last word is that of the writer's first shard that is cut.
        if kept < part.rows:
            before[part.ref.writer] = max(part.end - kept, before.get(part.ref.writer, 0))
    return before


def _aged(
    storage: Storage, listing: Listing, writer: str, parts: list[Segment]
) -> list[tuple[float, Segment]]:
    """When the rows of each part were stored: never later than those after them."""
    refs = listing.shards[writer]
    times = each(storage, lambda ref: _stored(storage, ref.path), refs)
    stored = [(ref.name, time) for ref, time in zip(refs, times, strict=True)]
    found: list[tuple[float, Segment]] = []
    latest = float("inf")
    for part in reversed(parts):
        # The first shard that held the part's last row: a compacted one came later.
        first = min(time for name, time in stored if name.first < part.end <= name.end)
        latest = min(latest, first)
        found.append((latest, part))
    return found


def _stored(storage: Storage, path: str) -> float:
    time = storage.modified(path)
    if time is None:
        raise OptionError(
            "the store does not say when its objects were stored, which keep_rows needs: use before=",
            uri=storage.uri_of(path),
        )
    return time


def _remove(storage: Storage, doomed: list[ShardRef], progress: Progress) -> None:
    with progress("trim", len(doomed)) as advance:
        for _ in each(storage, storage.remove, [ref.path for ref in doomed]):
            advance(1)
