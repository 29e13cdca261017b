"""`compact`: merges many small shards into few large ones; every row keeps its number and its values.

For each writer, one shard with exactly their rows replaces a run of small consecutive shards. It is published
like any other. Readers prefer it at once, because it covers more rows. The old shards stay until `gc` removes
them, so no lock is needed: readers, writers and other compactors can continue meanwhile.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://compact-example") as writer:
    ...     for _ in range(5):
    ...         writer.write(rlio.SampleBatch(obs=np.zeros((3, 4)), rewards=np.ones(3)))
    ...         writer.flush()
    >>> report = rlio.maintenance.compact("memory://compact-example")
    >>> report.shards_before, report.shards_after, report.rows
    (5, 1, 15)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, groupby
from typing import Any, Final, Literal

from rlio.catalog.listing import Segment, list_shards
from rlio.catalog.names import parse_trim, writer_dir
from rlio.errors import CorruptData, DataNotFound, OptionError
from rlio.maintenance.compact_into import copy_into
from rlio.maintenance.compaction import (
    Compacted,
    CompactReport,
    Identity,
    Options,
    check_parquet,
    identities,
    identity,
    is_by_row,
    merged,
    size_of,
)
from rlio.opening import require_header
from rlio.schemas.parquet import Compression
from rlio.source.shards import ParquetShard
from rlio.storage.filesystem import Storage
from rlio.support.progress import Progress, silent

__all__ = ["compact"]

logger: logging.Logger = logging.getLogger("rlio")

# The size at which writers roll: one PUT on every object store (s3fs starts multipart uploads at 100 MiB).
_DEFAULT_MAX_BYTES: Final = 64 << 20
# If a gc or trim removes a source, another process has done the work, so a few attempts are enough.
_ATTEMPTS: Final = 5
_MIN_SHARDS: Final = 2


def compact(
    uri: str | os.PathLike[str],
    *,
    into: str | os.PathLike[str] | None = None,
    max_bytes: int = _DEFAULT_MAX_BYTES,
    min_shards: int | None = None,
    compression: str | Compression = "zstd",
    on_error: Literal["raise", "skip"] = "raise",
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    into_storage_options: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> CompactReport:
    """Merge small consecutive Parquet shards into larger ones. You can run it at any time, and repeat it.

    Rows keep their numbers, values, types, batches, episodes and provenance. Cursors and snapshots stay
    valid, and readers in recorded order return the same rows. Two things depend on row groups, which become
    larger: the order in which ``shuffle=True`` draws rows, and a served batch's ``max_seq_len`` and
    ``num_grad_updates``, which are sums over its row groups.

    Refuses a data set with shards of JSON lines. Copy it into Parquet instead::

        with rlio.DatasetReader(ROOT, epochs=1) as reader, rlio.ParquetWriter(NEW) as writer:
            for batch in reader:
                writer.write(batch)

    Does not merge shards of different schema or provenance, or shards that are together larger than
    ``max_bytes``. Merges a shard that another one partly hides with that other shard, if they fit.

    Args:
        uri: The data set: a path or any fsspec URL.
        into: Write a copy to this new root instead. There, one writer has the rows of all writers, in their
            order, and the column ``_writer`` names the original writer. Meant for data sets of many writers
            that are all finished. After an interruption, run it again.
        max_bytes: Largest size of a new shard, measured by the size of its sources.
        min_shards: The fewest shards worth merging; None: 2.
        compression: As for `ParquetWriter`.
        on_error: What to do with a damaged shard: ``"raise"``, or ``"skip"`` its run and leave it unchanged.
        dry_run: Only report what would be merged; reads footers and writes nothing.
        storage_options: Options for fsspec.
        into_storage_options: Options for fsspec, for ``into``.
        progress: Shows the progress.

    Raises:
        DataNotFound: ``uri`` has no data set.
        CorruptData: A shard is damaged; nothing was removed, and its run is unchanged.
        HoleError: With ``into``: rows are missing.
        OptionError: An option is illegal, the root ``into`` already has other rows, or the data set has
            shards of JSON lines: copy it into Parquet.
        PublishError: A new shard could not be stored.
    """
    if into is not None and (min_shards is not None or on_error != "raise"):
        raise OptionError("into= copies every row: min_shards and on_error='skip' do not apply to it")
    options = Options(
        max_bytes,
        _MIN_SHARDS if min_shards is None else min_shards,
        Compression.parse(compression),
        on_error,
        dry_run,
        progress,
    )
    storage = Storage.open(uri, storage_options=storage_options)
    if into is not None:
        return copy_into(storage, Storage.open(into, storage_options=into_storage_options), options)
    require_header(storage)
    return _InPlace(storage, options).run()


class _InPlace:
    """Compaction within a root."""

    def __init__(self, storage: Storage, options: Options) -> None:
        self._storage = storage
        self._options = options
        self._done: list[Compacted] = []
        self._skipped: list[str] = []

    def run(self) -> CompactReport:
        listing = list_shards(self._storage)
        before = {writer: listing.cover(writer).segments for writer in listing.shards}
        check_parquet(self._storage, (segment for segments in before.values() for segment in segments))
        shards = sum(map(len, before.values()))
        candidates = {
            writer: found
            for writer, segments in sorted(before.items())
            if (found := list(_candidates(segments, self._options)))
        }
        total = sum(size_of(run) for runs in candidates.values() for run in runs)
        with self._options.progress("compact", total) as advance:
            for writer, runs in candidates.items():
                self._compact_writer(writer, runs, advance)
        gone = sum(len(run.sources) - max(len(run.shards), 1) for run in self._done)
        return CompactReport(
            uri=self._storage.uri,
            into=None,
            dry_run=self._options.dry_run,
            shards_before=shards,
            shards_after=shards - gone,
            runs=tuple(self._done),
            skipped=tuple(self._skipped),
        )

    def _compact_writer(
        self, writer: str, candidates: list[list[Segment]], advance: Callable[[int], None]
    ) -> None:
        for attempt in range(_ATTEMPTS):
            if attempt:
                candidates = list(
                    _candidates(list_shards(self._storage).cover(writer).segments, self._options)
                )
            try:
                for shared, live, run in self._runs(candidates):
                    self._compact_run(run, live, shared.provenance)
                    advance(size_of(run))
                return
            except DataNotFound as error:
                # Another process compacted or trimmed, and old shards are gone: list again what remains.
                logger.info("a shard was removed during compaction, listing again: %s", error)
                if attempt + 1 == _ATTEMPTS:
                    raise

    def _runs(self, candidates: list[list[Segment]]) -> Iterator[tuple[Identity, int, list[Segment]]]:
        """Yield runs of shards with the same schema and provenance, each with its first live row."""
        for segments in candidates:
            known = self._identified(segments)
            for shared, same in groupby(segments, known.get):
                if shared is not None:
                    for live, part in self._whole_parts(list(same)):
                        if len(part) >= self._options.min_shards:
                            yield shared, live, part

    def _whole_parts(self, segments: list[Segment]) -> Iterator[tuple[int, list[Segment]]]:
        """Split a run before each shard that cannot be cut at its first live row: (first live row, part).

        Takes such a shard from an earlier row on, at which it can be cut.
        """
        live, part = 0, list[Segment]()
        for segment in segments:
            cut = self._cut_of(segment) if segment.skip else 0
            if part and cut != segment.skip:
                yield live, part
                part = []
            if not part:
                live = segment.first
                segment = Segment(segment.ref, cut, segment.rows + segment.skip - cut)
            part.append(segment)
        if part:
            yield live, part

    def _cut_of(self, segment: Segment) -> int:
        """Return the last row, up to the first live one, where a shard can be cut without decoding it."""
        shard = ParquetShard(self._storage, segment.ref)
        if is_by_row(shard.schema):
            return segment.skip
        ends = [0, *accumulate(shard.rows)]
        return max(end for end in ends if end <= segment.skip)

    def _identified(self, segments: list[Segment]) -> dict[Segment, Identity]:
        """Return the identity of each segment; with ``on_error="skip"``, leaves out damaged ones."""
        try:
            return identities(self._storage, segments)
        except CorruptData:
            if self._options.on_error == "raise":
                raise
        found = {}
        for segment in segments:
            try:
                found[segment] = identity(self._storage, segment)
            except CorruptData as error:
                self._skip(error)
        return found

    def _compact_run(self, run: list[Segment], live: int, provenance: str) -> None:
        writer = run[0].ref.writer
        try:
            done = merged(
                self._storage,
                run,
                self._storage,
                writer,
                self._options,
                first=run[0].first,
                provenance=provenance,
                before=lambda: self._check_trim(writer, live),
            )
            self._done.append(done)
        except CorruptData as error:
            if self._options.on_error == "raise":
                raise
            self._skip(error)

    def _skip(self, error: CorruptData) -> None:
        if str(error) not in self._skipped:
            self._skipped.append(str(error))
            logger.warning("left unchanged: %s", error)

    def _check_trim(self, writer: str, live: int) -> None:
        """Raise if a part of the run was trimmed meanwhile, to give the run up.

        The trimmed rows would stay hidden anyway. But sequences and joint steps are not cut within a shard,
        and a trim leaves them whole only if no larger shard spans the marker.
        """
        names = (entry.path.rsplit("/", 1)[1] for entry in self._storage.list(writer_dir(writer)))
        trimmed = max((row for name in names if (row := parse_trim(name)) is not None), default=0)
        if trimmed > live:
            raise DataNotFound(
                f"rows below {trimmed} of writer {writer!r} were trimmed while they were compacted",
                uri=self._storage.uri,
            )


def _candidates(segments: list[Segment], options: Options) -> Iterator[list[Segment]]:
    """Yield runs of small shards without a gap, each of at most ``max_bytes``, by their names only."""
    run: list[Segment] = []
    for index, segment in enumerate(segments):
        before = segments[index - 1] if index else None
        after = segments[index + 1] if index + 1 < len(segments) else None
        hidden = before is not None and before.end == segment.first and segment.skip > 0
        hides = after is not None and segment.end == after.first and after.skip > 0
        # Half: two larger shards never fit together, and a new shard is not rewritten again and again.
        wanted = segment.ref.name.size <= options.max_bytes // 2 or hidden or hides
        goes_on = (
            bool(run)
            and run[-1].end == segment.first
            and size_of(run) + segment.ref.name.size <= options.max_bytes
        )
        if run and not (wanted and goes_on):
            if len(run) >= options.min_shards:
                yield run
            run = []
        if wanted:
            run.append(segment)
    if len(run) >= options.min_shards:
        yield run
