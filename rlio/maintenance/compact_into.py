"""`compact` with ``into=``: copies a data set to a new root, where one writer has all rows.

The column ``_writer`` names the original writer. The id of the new writer is computed from the copied rows,
so a restarted copy makes the same shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

from rlio.catalog.commit import put_header
from rlio.catalog.listing import Segment, list_shards
from rlio.catalog.markers import seal
from rlio.errors import OptionError
from rlio.maintenance.compaction import (
    Compacted,
    CompactReport,
    Identity,
    Options,
    Source,
    check_parquet,
    identities,
    merged,
    size_of,
)
from rlio.opening import dataset_on
from rlio.schemas.schema import canonical_json
from rlio.storage.filesystem import Storage

__all__ = ["copy_into"]


def copy_into(source: Storage, target: Storage, options: Options) -> CompactReport:
    """Compact into a new root, where one writer has all rows."""
    dataset = dataset_on(source)
    dataset.check_complete()
    segments = dataset.segments
    check_parquet(source, segments)
    writer = f"merged-{_digest(segments)}"
    _check_target(source, target, writer)
    if not options.dry_run:
        put_header(target)
    known = identities(source, segments)
    done: list[Compacted] = []
    rows = 0
    with options.progress("compact", size_of(segments)) as advance:
        for chunk in _chunks(segments, known, options.max_bytes):
            run = merged(
                source,
                map(Source, chunk),
                target,
                writer,
                options,
                first=rows,
                provenance=_joint_provenance(chunk, known),
                signed=True,
            )
            done.append(run)
            rows += run.rows
            advance(size_of(chunk))
    if rows and not options.dry_run:
        seal(target, writer, rows)
    return CompactReport(
        uri=source.uri,
        into=target.uri,
        dry_run=options.dry_run,
        shards_before=len(segments),
        shards_after=sum(max(len(run.shards), 1) for run in done),
        runs=tuple(done),
    )


def _check_target(source: Storage, target: Storage, writer: str) -> None:
    """Raise unless the new root is empty, or holds only what an earlier run of this copy made."""
    if target.uri == source.uri:
        raise OptionError("into= is the data set itself: pass a new root", uri=target.uri)
    others = sorted({*(listing := list_shards(target)).shards, *listing.sealed} - {writer})
    if others:
        raise OptionError(
            f"into= already has rows of {len(others)} writers, such as {others[0]!r}: pass a new root; "
            "to read two data sets as one, mix them",
            uri=target.uri,
        )


def _digest(segments: list[Segment]) -> str:
    """Return 16 hex digits that identify the copied rows, so a restarted copy has the same writer id."""
    bounds: dict[str, list[int]] = {}
    for segment in segments:
        bounds.setdefault(segment.ref.writer, [segment.first, 0])[1] = segment.end
    return hashlib.blake2b(canonical_json(bounds).encode(), digest_size=8).hexdigest()


def _chunks(
    segments: list[Segment], known: Mapping[Segment, Identity], max_bytes: int
) -> Iterator[list[Segment]]:
    """Yield the segments that become one shard, through all writers in their order."""
    chunk, size = list[Segment](), 0
    provenance: dict[str, str] = {}
    for segment in segments:
        writer, identity = segment.ref.writer, known[segment]
        goes_on = (
            bool(chunk)
            and known[chunk[0]].schema == identity.schema
            and size + segment.ref.name.size <= max_bytes
            and provenance.get(writer, identity.provenance) == identity.provenance
        )
        if chunk and not goes_on:
            yield chunk
            chunk, size, provenance = [], 0, {}
        chunk.append(segment)
        size += segment.ref.name.size
        provenance[writer] = identity.provenance
    if chunk:
        yield chunk


def _joint_provenance(chunk: list[Segment], known: Mapping[Segment, Identity]) -> str:
    """Return the provenance that all writers share, or else the provenance of each."""
    found = {segment.ref.writer: known[segment].provenance for segment in chunk}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return canonical_json({"merged": {writer: json.loads(text) for writer, text in found.items()}})
