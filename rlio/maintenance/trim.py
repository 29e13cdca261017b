"""`trim`: removes the oldest rows of writers for good.

It first puts a marker, then removes the shards that lie wholly below it. The marker is enough: readers never
serve rows below it, even if shards with them exist or return. So an interruption, a late retry of a writer
and a reader in the middle of a trim are harmless. A shard that the marker cuts keeps its hidden rows on disk
until it is merged with later shards or fully trimmed.

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

from rlio.catalog.listing import Listing, Segment, list_shards
from rlio.catalog.markers import trim as put_marker
from rlio.errors import DataNotFound, OptionError, excerpt
from rlio.maintenance.compaction import is_by_row
from rlio.opening import require_header
from rlio.source.shards import open_shard
from rlio.storage.filesystem import Storage
from rlio.storage.parallel import each
from rlio.support.options import check_count
from rlio.support.progress import Progress, silent

__all__ = ["TrimReport", "Trimmed", "trim"]

logger: logging.Logger = logging.getLogger("rlio")


@dataclass(frozen=True)
class Trimmed:
    """The trimmed rows of one writer.

    Attributes:
        writer: The writer's id.
        row: The first remaining row.
        rows: Rows that this call removed.
    """

    writer: str
    row: int
    rows: int


@dataclass(frozen=True)
class TrimReport:
    """The result of `trim`, or, in a dry run, the expected result.

    Attributes:
        uri: The root.
        dry_run: Whether nothing was changed.
        writers: The writers that lost rows.
        removed: URIs of the removed shards.
        bytes: Bytes of the removed shards.
        rows_left: Remaining live rows of all writers.
    """

    uri: str
    dry_run: bool
    writers: tuple[Trimmed, ...]
    removed: tuple[str, ...]
    bytes: int
    rows_left: int

    @property
    def rows(self) -> int:
        """Rows that were removed."""
        return sum(writer.rows for writer in self.writers)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
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
    """Remove the oldest rows. Safe at any time, beside readers and writers; repeatable.

    Does not cut sequences (``seq_lens``) or the joint steps of several agents. For these, it puts the marker
    at the start of a shard, and keeps up to one shard of rows more than requested.

    Args:
        uri: The data set: a path or any fsspec URL.
        before: Writer id -> the first row to keep; other writers keep all rows.
        keep_rows: How many of the newest rows to keep, instead. The store's time of a shard decides how new
            it is. Compacted rows count as stored at the compaction, unless the old shards still exist.
        dry_run: Only report what would be removed.
        storage_options: Options for fsspec.
        progress: Shows the progress.

    Raises:
        DataNotFound: ``uri`` has no data set.
        OptionError: You gave both or neither of ``before`` and ``keep_rows``, a writer is unknown or has no
            such row, or the store has no times, which ``keep_rows`` needs.
        PublishError: A marker could not be stored; writers marked before it are trimmed.
    """
    if (before is None) == (keep_rows is None):
        raise OptionError("pass before={writer: row} or keep_rows=N, exactly one of them")
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
    # Also below markers of earlier calls, to remove what an interrupted call left.
    marked = listing.trimmed | {entry.writer: entry.row for entry in trimmed}
    doomed = [
        ref for writer, row in marked.items() for ref in listing.shards.get(writer, []) if ref.name.end <= row
    ]
    if not dry_run:
        for entry in trimmed:
            put_marker(storage, entry.writer, entry.row)
            logger.info("trimmed %s: removed rows below %d of %s", storage.uri, entry.row, entry.writer)
        with progress("trim", len(doomed)) as advance:
            for _ in each(storage, storage.remove, [ref.path for ref in doomed]):
                advance(1)
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
    """Refuse rows past a writer's end, because such a marker would hide rows that are still to come."""
    known = sorted({*listing.shards, *listing.trimmed})
    for writer, row in before.items():
        if writer not in known:
            raise OptionError(
                f"no writer {excerpt(writer)}; the data set has {', '.join(known) or 'none'}", uri=storage.uri
            )
        ends = [ref.name.end for ref in listing.shards.get(writer, [])]
        end = max([*ends, listing.trimmed.get(writer, 0)])
        check_count(f"before[{excerpt(writer)}]", row, least=0, most=end, of="the stored rows")


def _legal_row(storage: Storage, listing: Listing, writer: str, row: int) -> int:
    """Return ``row``, or the first row of its shard if that shard cannot be cut."""
    for part in _live(listing, writer):
        if part.first < row < part.end:
            try:
                shard = open_shard(storage, part.ref)
            except DataNotFound as error:
                raise DataNotFound(
                    "the shard was removed during the call; call again", uri=storage.uri_of(part.ref.path)
                ) from error
            # An earlier marker may already cut a larger shard.
            return row if is_by_row(shard.schema) else part.first
    return row


def _newest(storage: Storage, listing: Listing, keep_rows: int) -> dict[str, int]:
    """Return writer id -> first row to keep, for the writers that lose rows."""
    keep_rows = check_count("keep_rows", keep_rows, least=0, of="rows")
    parts = {writer: _live(listing, writer) for writer in sorted(listing.shards)}
    aged = [item for writer, found in parts.items() for item in _aged(storage, listing, writer, found)]
    left, before = keep_rows, dict[str, int]()
    for _, part in sorted(aged, key=lambda item: (-item[0], item[1].ref.writer, -item[1].first)):
        kept = min(part.rows, left)
        left -= kept
        # Newest to oldest: keeps the row of the writer's newest shard that is cut.
        if kept < part.rows:
            before[part.ref.writer] = max(part.end - kept, before.get(part.ref.writer, 0))
    return before


def _aged(
    storage: Storage, listing: Listing, writer: str, parts: list[Segment]
) -> list[tuple[float, Segment]]:
    """Return when the rows of each part were stored: never later than the rows after them."""
    refs = listing.shards[writer]
    times = each(storage, lambda ref: _stored(storage, ref.path), refs)
    stored = [(ref.name, time) for ref, time in zip(refs, times, strict=True)]
    found: list[tuple[float, Segment]] = []
    latest = float("inf")
    for part in reversed(parts):
        # The earliest shard with the part's last row: a compacted shard came later.
        first = min(time for name, time in stored if name.first < part.end <= name.end)
        latest = min(latest, first)
        found.append((latest, part))
    return found


def _stored(storage: Storage, path: str) -> float:
    time = storage.modified(path)
    if time is None:
        raise OptionError(
            "the store has no times for its objects, which keep_rows needs: use before=",
            uri=storage.uri_of(path),
        )
    return time
