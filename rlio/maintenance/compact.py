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
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, chain, groupby, islice
from typing import Any, Final, Literal, NamedTuple

from rlio.catalog.listing import Segment, list_shards
from rlio.catalog.names import parse_trim, writer_dir
from rlio.errors import CorruptData, DataNotFound, OptionError
from rlio.maintenance.compact_into import copy_into
from rlio.maintenance.compaction import (
    Compacted,
    CompactReport,
    Identity,
    Options,
    Source,
    check_parquet,
    identity,
    is_by_row,
    merged,
    size_of,
)
from rlio.opening import require_header
from rlio.schemas.parquet import Compression
from rlio.source.shards import ParquetShard
from rlio.source.together import MOST_OPEN
from rlio.storage.filesystem import Storage
from rlio.storage.parallel import each
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


class _Placed(NamedTuple):
    """An open shard and its place.

    Attributes:
        run: Number of the run that it belongs to.
        shared: What it shares with the shards of the run.
        live: Its first live row.
        segment: Its rows, from the first on at which it can be cut.
        shard: The shard; None: it has been closed.
    """

    run: int
    shared: Identity
    live: int
    segment: Segment
    shard: ParquetShard | None


class _Run(NamedTuple):
    """Shards to merge.

    Attributes:
        shared: What they share.
        live: The first live row.
        first: The first of them, from the row on at which it can be cut.
        sources: All of them; they are opened as they are taken.
    """

    shared: Identity
    live: int
    first: Segment
    sources: Iterable[Source]


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
                for run in self._runs(candidates):
                    advance(self._compact_run(run))
                return
            except DataNotFound as error:
                # Another process compacted or trimmed, and old shards are gone: list again what remains.
                logger.info("a shard was removed during compaction, listing again: %s", error)
                if attempt + 1 == _ATTEMPTS:
                    raise

    def _runs(self, candidates: list[list[Segment]]) -> Iterator[_Run]:
        """Yield runs of shards with the same schema and provenance; each is opened when it is read."""
        least = self._options.min_shards
        for segments in candidates:
            for _, same in groupby(self._placed(segments), lambda placed: placed.run):
                # Those that are looked at before the run is worth merging are opened again if they are many.
                begin = [
                    placed if number < MOST_OPEN else placed._replace(shard=None)
                    for number, placed in enumerate(islice(same, least))
                ]
                if len(begin) == least:
                    sources = (Source(placed.segment, placed.shard) for placed in chain(begin, same))
                    yield _Run(begin[0].shared, begin[0].live, begin[0].segment, sources)

    def _placed(self, segments: list[Segment]) -> Iterator[_Placed]:
        """Open segments in order, and say to which run each belongs.

        A run ends before a shard with another identity, and before one that cannot be cut at its first live
        row, which is then taken from an earlier row on, at which it can be cut.
        """
        run, before = 0, None
        for segment, shard in self._opened(segments):
            if shard is None:
                before = None
                continue
            shared, cut = identity(shard), _cut_of(shard, segment)
            live = segment.first
            if shared != before or cut != segment.skip:
                run += 1
                segment = Segment(segment.ref, cut, segment.rows + segment.skip - cut)
            before = shared
            yield _Placed(run, shared, live, segment, shard)

    def _opened(self, segments: list[Segment]) -> Iterator[tuple[Segment, ParquetShard | None]]:
        """Open segments in order; with ``on_error="skip"``, None for a damaged one."""

        def opened(segment: Segment) -> ParquetShard | CorruptData:
            try:
                return ParquetShard(self._storage, segment.ref)
            except CorruptData as error:
                if self._options.on_error == "raise":
                    raise
                return error

        for segment, shard in zip(segments, each(self._storage, opened, segments), strict=True):
            if isinstance(shard, CorruptData):
                self._skip(shard)
                yield segment, None
            else:
                yield segment, shard

    def _compact_run(self, run: _Run) -> int:
        """Merge a run. Returns the bytes of its shards; 0 if it is left unchanged."""
        writer = run.first.ref.writer
        try:
            done = merged(
                self._storage,
                run.sources,
                self._storage,
                writer,
                self._options,
                first=run.first.first,
                provenance=run.shared.provenance,
                before=lambda: self._check_trim(writer, run.live),
            )
        except CorruptData as error:
            if self._options.on_error == "raise":
                raise
            self._skip(error)
            return 0
        self._done.append(done)
        return done.bytes_before

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


def _cut_of(shard: ParquetShard, segment: Segment) -> int:
    """Return the last row, up to the first live one, where a shard can be cut without decoding it."""
    if is_by_row(shard.schema):
        return segment.skip
    return max(end for end in accumulate(shard.rows, initial=0) if end <= segment.skip)


def _candidates(segments: list[Segment], options: Options) -> Iterator[list[Segment]]:
    """Yield runs of small shards without a gap, each of at most ``max_bytes``, by their names only."""
    run, size = list[Segment](), 0
    for index, segment in enumerate(segments):
        before = segments[index - 1] if index else None
        after = segments[index + 1] if index + 1 < len(segments) else None
        hidden = before is not None and before.end == segment.first and segment.skip > 0
        hides = after is not None and segment.end == after.first and after.skip > 0
        # Half: two larger shards never fit together, and a new shard is not rewritten again and again.
        wanted = segment.ref.name.size <= options.max_bytes // 2 or hidden or hides
        goes_on = (
            bool(run) and run[-1].end == segment.first and size + segment.ref.name.size <= options.max_bytes
        )
        if run and not (wanted and goes_on):
            if len(run) >= options.min_shards:
                yield run
            run, size = [], 0
        if wanted:
            run.append(segment)
            size += segment.ref.name.size
    if len(run) >= options.min_shards:
        yield run
