"""`compact` with ``into=``: copies a data set to a new root, where one writer has all rows.

The column ``_writer`` names the original writer. The id of the new writer is computed from the copied rows,
so a restarted copy makes the same shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

from rlio.dataset.commit import put_header
from rlio.dataset.dataset import dataset_on
from rlio.dataset.listing import Segment, list_shards
from rlio.dataset.markers import seal
from rlio.errors import OptionError
from rlio.maintenance.compaction import (
    CompactReport,
    Identity,
    Options,
    Publisher,
    Sources,
    merged,
    size_of,
)
from rlio.schemas.schema import canonical_json
from rlio.storage.filesystem import Storage

__all__ = ["Copy"]


class Copy:
    """Compaction into a new root, where one writer has all rows."""

    def __init__(self, source: Storage, target: Storage, options: Options) -> None:
        self._source = source
        self._target = target
        self._sources = Sources(source)
        self._options = options

    def run(self) -> CompactReport:
        dataset = dataset_on(self._source)
        dataset.check_complete()
        segments = dataset.segments
        self._sources.check_parquet(segments)
        writer = f"merged-{_digest(segments)}"
        self._check_target(writer)
        identities = dict(zip(segments, self._sources.identities(segments), strict=True))
        done = []
        publisher = Publisher(self._target, writer, 0)
        with self._options.progress("compact", size_of(segments)) as advance:
            for chunk in _chunks(segments, identities, self._options.max_bytes):
                provenance = _joint_provenance(chunk, identities)
                done.append(
                    merged(self._sources, chunk, publisher, self._options, provenance=provenance, signed=True)
                )
                advance(size_of(chunk))
        if publisher.next_row and not self._options.dry_run:
            seal(self._target, writer, publisher.next_row)
        return CompactReport(
            uri=self._source.uri,
            into=self._target.uri,
            dry_run=self._options.dry_run,
            shards_before=len(segments),
            shards_after=sum(max(len(run.shards), 1) for run in done),
            runs=tuple(done),
        )

    def _check_target(self, writer: str) -> None:
        """Raise unless the new root is empty, or holds only what an earlier run of this copy made."""
        if self._target.uri == self._source.uri:
            raise OptionError("into= is the data set itself: pass a new root", uri=self._target.uri)
        others = sorted({*(listing := list_shards(self._target)).shards, *listing.sealed} - {writer})
        if others:
            raise OptionError(
                f"into= already has rows of {len(others)} writers, such as {others[0]!r}: pass a new root; "
                "to read two data sets as one, mix them",
                uri=self._target.uri,
            )
        if not self._options.dry_run:
            put_header(self._target)


def _digest(segments: list[Segment]) -> str:
    """Return 16 hex digits that identify the copied rows, so a restarted copy has the same writer id."""
    bounds: dict[str, list[int]] = {}
    for segment in segments:
        bounds.setdefault(segment.ref.writer, [segment.first, 0])[1] = segment.end
    return hashlib.blake2b(canonical_json(bounds).encode(), digest_size=8).hexdigest()


def _chunks(
    segments: list[Segment], identities: Mapping[Segment, Identity], max_bytes: int
) -> Iterator[list[Segment]]:
    """Yield the segments that become one shard, through all writers in their order."""
    chunk: list[Segment] = []
    provenance: dict[str, str] = {}
    for segment in segments:
        writer, identity = segment.ref.writer, identities[segment]
        goes_on = (
            bool(chunk)
            and identities[chunk[0]].schema == identity.schema
            and size_of(chunk) + segment.ref.name.size <= max_bytes
            and provenance.get(writer, identity.provenance) == identity.provenance
        )
        if chunk and not goes_on:
            yield chunk
            chunk, provenance = [], {}
        chunk.append(segment)
        provenance[writer] = identity.provenance
    if chunk:
        yield chunk


def _joint_provenance(chunk: list[Segment], identities: Mapping[Segment, Identity]) -> str:
    """Return the provenance that all writers share, or else the provenance of each."""
    found = {segment.ref.writer: identities[segment].provenance for segment in chunk}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return canonical_json({"merged": {writer: json.loads(text) for writer, text in found.items()}})
