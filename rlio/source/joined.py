"""`JoinedRoots`: the rows of several data sets of rlio as one source, in the order of the list.

Example:
    >>> import numpy as np, rlio
    >>> for day in ("monday", "tuesday"):
    ...     with rlio.ParquetWriter(f"memory://joined-example/{day}") as writer:
    ...         writer.write(rlio.SampleBatch(obs=np.zeros((3, 4)), rewards=np.ones(3)))
    >>> roots = ["memory://joined-example/monday", "memory://joined-example/tuesday"]
    >>> len(rlio.read(roots, epochs=1))
    6
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self, TypeAlias

from rlio.catalog.listing import HoleCheck, SegmentKey
from rlio.errors import OptionError, excerpt
from rlio.schemas.schema import Schema, canonical_json
from rlio.schemas.streams import Streams
from rlio.source.snapshot import DatasetSnapshot, Snapshot
from rlio.source.source import EpisodeInfo, OpenSegment, Source, StoredSegment
from rlio.storage.parallel import Plan, Range
from rlio.support.words import and_more

__all__ = ["JoinedRoots", "Snapshots"]

#: A snapshot of one root, or one of each of a list, where None means all rows that the root has.
Snapshots: TypeAlias = Snapshot | Sequence[Snapshot | None]


@dataclass(frozen=True)
class _Part:
    """A segment of one of the roots; see `StoredSegment`."""

    key: SegmentKey
    path: str
    writer: str
    first: int
    skip: int
    rows: int
    root: DatasetSnapshot = field(compare=False, repr=False)
    segment: StoredSegment = field(compare=False, repr=False)


class JoinedRoots(Source):
    """See the module.

    A writer keeps its id, by which episodes are split, unless another root has a writer of the same id: the
    root is then a part of it.

    Args:
        roots: Open data sets, at least one.

    Raises:
        OptionError: One of them is there twice.
    """

    def __init__(self, roots: Sequence[DatasetSnapshot]) -> None:
        self.roots: tuple[DatasetSnapshot, ...] = tuple(roots)
        known: dict[Any, DatasetSnapshot] = {}
        for root in self.roots:
            before = known.setdefault(_place(root), root)
            if before is not root:
                other = "" if before.uri == root.uri else f", also as {excerpt(before.uri)}"
                raise OptionError(f"{excerpt(root.uri)} is in the list twice{other}: pass each data set once")
        owners = Counter(chain.from_iterable(_writers(root) for root in self.roots))
        self._shared = {writer for writer, count in owners.items() if count > 1}
        self._parts = [
            self._part(number, root, segment)
            for number, root in enumerate(self.roots)
            for segment in root.segments
        ]

    def _part(self, number: int, root: DatasetSnapshot, segment: StoredSegment) -> _Part:
        path, skip, rows = segment.key
        key = SegmentKey(f"{number}/{path}", skip, rows)
        writer = self._name_of(root, segment.writer)
        place = root.uri_of(segment.path)
        return _Part(key, place, writer, segment.first, segment.skip, segment.rows, root, segment)

    def _name_of(self, root: DatasetSnapshot, writer: str) -> str:
        return f"{writer} of {root.uri}" if writer in self._shared else writer

    @property
    def uri(self) -> str:
        """The first root, and how many more there are."""
        return and_more([root.uri for root in self.roots], 1)

    @property
    def schemas(self) -> Mapping[str, Schema]:
        """See `Source.schemas`; those of all roots."""
        return {name: schema for root in self.roots for name, schema in root.schemas.items()}

    @property
    def stated_group_rows(self) -> int | None:  # type: ignore[override]  # The base has an attribute.
        """See `Source.stated_group_rows`."""
        return max((root.stated_group_rows or 1 for root in self.roots), default=None)

    @property
    def segments(self) -> Sequence[_Part]:
        """See `Source.segments`."""
        return self._parts

    @property
    def pinned(self) -> bool:  # type: ignore[override]  # The base has an attribute, for formats' sake.
        """Whether all roots show requested snapshots."""
        return all(root.pinned for root in self.roots)

    def snapshot(self) -> list[Snapshot]:
        """Return the snapshot of each root, for ``at=``."""
        return [root.snapshot() for root in self.roots]

    @property
    def state_identity(self) -> str:
        """See `Source.state_identity`: of the snapshots in their order."""
        text = canonical_json([root.state_identity for root in self.roots])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def episode_parts(self) -> Iterator[EpisodeInfo]:
        """See `Source.episode_parts`."""
        for root in self.roots:
            for part in root.episode_parts():
                yield replace(part, writer=self._name_of(root, part.writer))

    # ---- reading ----

    def open_segment(self, segment: StoredSegment) -> OpenSegment:
        """See `Source.open_segment`."""
        assert isinstance(segment, _Part)
        segment.root.keeps_pictures = self.keeps_pictures
        return segment.root.open_segment(segment.segment)

    def plan(self) -> Plan | None:
        """See `Source.plan`."""
        return next((plan for root in self.roots if (plan := root.plan()) is not None), None)

    def ranges(
        self, segment: StoredSegment, opened: OpenSegment | None, groups: Sequence[int] | None
    ) -> Sequence[Range]:
        """See `Source.ranges`."""
        assert isinstance(segment, _Part)
        return segment.root.ranges(segment.segment, opened, groups)

    def stated_groups(self, segment: StoredSegment) -> Sequence[int] | None:
        """See `Source.stated_groups`."""
        assert isinstance(segment, _Part)
        return segment.root.stated_groups(segment.segment)

    def streams(self, opened: OpenSegment, segment: StoredSegment) -> Streams:
        """See `Source.streams`."""
        assert isinstance(segment, _Part)
        return segment.root.streams(opened, segment.segment)

    def check_schema(self, schema: Schema, segment: StoredSegment) -> None:
        """See `Source.check_schema`."""
        assert isinstance(segment, _Part)
        segment.root.check_schema(schema, segment.segment)

    def uri_of(self, path: str) -> str:
        """See `Source.uri_of`; the paths are URIs."""
        return path

    # ---- rows that are missing or moved ----

    @property
    def hole_check(self) -> HoleCheck:
        """How often to look for a missing shard."""
        return self.roots[0].hole_check

    def listed_again(self) -> Self:
        """See `Source.listed_again`."""
        return type(self)([root.listed_again() for root in self.roots])

    def lost_rows(self) -> list[tuple[str, int]]:
        """See `Source.lost_rows`."""
        return [(f"{root.uri}: {where}", rows) for root in self.roots for where, rows in root.lost_rows()]

    def check_complete(self) -> None:
        """See `Source.check_complete`."""
        for root in self.roots:
            root.check_complete()

    def why_empty(self) -> str:
        """See `Source.why_empty`."""
        return "; ".join(f"{root.uri}: {root.why_empty()}" for root in self.roots)


def _place(root: DatasetSnapshot) -> Any:
    """Where a data set is, however its path or URI is written."""
    storage = root.storage
    return os.path.realpath(storage.root) if storage.is_local else (storage.fs, storage.root)


def _writers(root: DatasetSnapshot) -> set[str]:
    return {segment.writer for segment in root.segments}
