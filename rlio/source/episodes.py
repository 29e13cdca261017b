"""`EpisodeFiles`: the episodes of another library's files as a `Source`.

A format owns its layout: `EpisodeSource` states the lengths of the episodes and reads one. Everything else
that the engine asks for follows: segments, groups, schemas, identities. A group is an episode, a part of a
long one, or a run of short ones where the format reads runs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rlio.batch import SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.nested import leaves, map_structure
from rlio.errors import CorruptData, RlioError, SchemaError, raise_at
from rlio.schemas.folded import Folded
from rlio.schemas.parquet_statistics import Bounds
from rlio.schemas.schema import Schema, canonical_json, column_of_name
from rlio.source.selection import named_parts
from rlio.source.source import FileSource, SegmentKey, StoredSegment
from rlio.source.uniform import Uniform
from rlio.storage import InputFile, open_input

__all__ = [
    "EpisodeFiles",
    "EpisodeSource",
    "PartSource",
    "RunSource",
    "content_of",
    "measure_row",
    "with_next_obs",
    "without_final_obs",
]

logger: logging.Logger = logging.getLogger("rlio")

# Largest group: rows that are decoded at once, unless one episode has more and its format reads no parts.
_GROUP_ROWS: Final = 4096
_GROUP_BYTES: Final = 64 << 20
# A shuffle without a store mixes the rows of a window.
_WINDOW_ROWS: Final = 65_536
_WINDOW_BYTES: Final = 256 << 20
# Groups of a segment: memory then holds the spans of this many groups.
_SEGMENT_GROUPS: Final = 4096
# Rows of which the schema is made.
_SAMPLE_ROWS: Final = 64
# Files up to this size are known by their content, larger ones by size and time.
_SMALL_BYTES: Final = 1 << 20


class EpisodeSource(Protocol):
    """Episodes in another library's format, each readable by itself.

    Attributes:
        uri: Where they are stored, for messages.
        files: The files of the episodes; their names and sizes are part of a reader's state.
        lengths: Steps of each episode.
        row_bytes: About how many bytes a row takes in memory. Saved positions depend on it, so a source
            measures the same episode in all versions.
        spaces: (observation space, action space); None: the format does not say.

    A source may have two more: ``origin``, the `rlio.formats.sink.Origin` that a conversion keeps, and
    ``notes``, sentences about its data for the report (`rlio.formats.report`).
    """

    uri: str
    files: Sequence[InputFile]
    lengths: Sequence[int]
    row_bytes: int
    spaces: tuple[Any, Any] | None

    def load(self, episode: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read one episode as fresh arrays, a row a step.

        Args:
            episode: Index into `lengths`.
            columns: Columns that are needed; None: all. More may be given.

        Returns:
            Columns by rlio's names, without ``eps_id`` and ``t``, which are added if they are absent.

        Raises:
            CorruptData: The episode is damaged.
            SchemaError: Its columns are not columns of a batch.
        """

    def close(self) -> None:
        """Close all files."""


@runtime_checkable
class PartSource(Protocol):
    """A source that may read a part of a long episode; more of an `EpisodeSource`.

    Attributes:
        reads_parts: Whether it does.
    """

    reads_parts: bool

    def load_part(self, episode: int, start: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read the steps from ``start`` to ``stop``; see `EpisodeSource.load`."""


@runtime_checkable
class RunSource(Protocol):
    """A source that reads many short episodes at once; more of an `EpisodeSource`."""

    def load_run(self, first: int, stop: int, columns: frozenset[str] | None) -> SampleBatch:
        """Read the episodes from ``first`` to ``stop``, with ``eps_id`` and ``t``; see `EpisodeSource`."""


class _Group(NamedTuple):
    """Rows that are read at once: whole episodes, or steps of one.

    Attributes:
        first, stop: The episodes.
        start: The first step, of one episode.
        rows: Number of rows.
    """

    first: int
    stop: int
    start: int
    rows: int


@dataclass(frozen=True)
class _Segment:
    """Some groups; see `StoredSegment`.

    Attributes:
        number: Number of the segment.
        first: Number of its first row.
        rows: Number of rows.
        source: Its source.
    """

    number: int
    first: int
    rows: int
    source: EpisodeFiles = field(compare=False, repr=False)
    writer: str = ""
    skip: int = 0

    @property
    def path(self) -> str:
        """The URI of the data set, and which part it is."""
        return f"{self.source.uri}#{self.number}"

    @property
    def key(self) -> SegmentKey:
        """Identifies the content."""
        return SegmentKey(f"{self.number}@{self.source.content}", 0, self.rows)


class EpisodeFiles(FileSource):
    """The episodes of a format as a source of one writer.

    Args:
        layout: The episodes; closed by the caller.
        about: Everything besides the files that determines the rows, as JSON values.
        columns: Columns that are asked for. A format may have some that it gives only then.

    Raises:
        CorruptData, SchemaError: No episode can be read.
    """

    def __init__(
        self, layout: EpisodeSource, *, about: Mapping[str, Any], columns: Collection[str] = ()
    ) -> None:
        self.layout = layout
        self._about = about
        self._most = max(1, min(_GROUP_ROWS, _GROUP_BYTES // max(1, layout.row_bytes)))
        self.window_rows = max(1, min(_WINDOW_ROWS, _WINDOW_BYTES // max(1, layout.row_bytes)))
        self._reads_parts = isinstance(layout, PartSource) and layout.reads_parts
        self._groups: list[_Group] = []
        for start, stop in _runs(layout, self._most):
            steps = layout.lengths[start]
            if self._reads_parts and stop == start + 1 and steps > self._most:
                self._groups += [
                    _Group(start, stop, at, min(self._most, steps - at)) for at in range(0, steps, self._most)
                ]
            else:
                self._groups.append(_Group(start, stop, 0, sum(layout.lengths[start:stop])))
        self._uniform = Uniform()
        self._content: str | None = None
        self._segments = [
            _Segment(number, first, rows, self)
            for number, (first, rows) in enumerate(_pieces([group.rows for group in self._groups]))
        ]
        # Columns of the rows, if those that the format gives by itself are not all.
        self._all: frozenset[str] | None = None
        schema = self._first_schema(frozenset(map(column_of_name, columns)))
        self._schemas = {} if schema is None else {schema.hash: schema}

    @property
    def uri(self) -> str:
        return self.layout.uri

    @property
    def notes(self) -> Sequence[str]:  # type: ignore[override]  # The base has an attribute, for formats' sake.
        """What the format says of its data."""
        return getattr(self.layout, "notes", ())

    @property
    def schemas(self) -> Mapping[str, Schema]:
        return self._schemas

    @property
    def segments(self) -> Sequence[_Segment]:
        return self._segments

    @property
    def policy_spaces(self) -> dict[str, tuple[Any, Any]]:
        """The spaces that the files state."""
        return {} if self.layout.spaces is None else {DEFAULT_POLICY_ID: self.layout.spaces}

    @property
    def state_identity(self) -> str:
        """A digest of the names, the sizes and the rows of the files, and of the format's options."""
        # The name of a table in memory has its checksum.
        files = [[file.path.rpartition("/")[2] or file.uri, file.size] for file in self.layout.files]
        described = [files, len(self), len(self.layout.lengths), self._about]
        return hashlib.blake2b(canonical_json(described).encode(), digest_size=8).hexdigest()

    @property
    def content(self) -> str:
        """A digest that changes with the content of the files."""
        if self._content is None:
            found = [content_of(file) for file in self.layout.files]
            text = canonical_json([found, self.state_identity])
            self._content = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return self._content

    def uri_of(self, path: str) -> str:
        return self.uri

    def open_segment(self, segment: StoredSegment) -> _Opened:
        assert isinstance(segment, _Segment)
        start = segment.number * _SEGMENT_GROUPS
        return _Opened(self, next(iter(self.schemas.values())), self._groups[start : start + _SEGMENT_GROUPS])

    def read(self, group: _Group, columns: Sequence[str] | None, rows: range | None) -> SampleBatch:
        """The rows of a group."""
        wanted = self._all if columns is None else frozenset(map(column_of_name, columns))
        try:
            batch = self._loaded(group, wanted)
            if wanted is not None:
                for name in batch.keys() - wanted:
                    del batch[name]
            self._uniform.conform(batch, wanted)
        except (CorruptData, SchemaError) as error:
            if error.record is None:  # Places of damage are counted by it.
                error.record = group.first
            raise_at(error, uri=self.uri, record=error.record)
        batch = named_parts(batch, columns)
        return batch if rows is None else batch[rows.start : rows.stop]

    def _loaded(self, group: _Group, wanted: frozenset[str] | None) -> SampleBatch:
        first, stop, start, rows = group
        layout = self.layout
        if isinstance(layout, RunSource):
            batch = layout.load_run(first, stop, wanted)
        elif isinstance(layout, PartSource) and rows < layout.lengths[first]:
            batch = layout.load_part(first, start, start + rows, wanted)
        else:
            batch = layout.load(first, wanted)
        if len(batch) != rows:
            raise CorruptData(f"episode {first} has {len(batch)} steps, expected {rows}")
        if Columns.EPS_ID not in batch:
            batch[Columns.EPS_ID] = np.full(rows, first, np.int64)
        if Columns.T not in batch:
            batch[Columns.T] = np.arange(start, start + rows)
        return batch

    def _first_schema(self, asked: frozenset[str]) -> Schema | None:
        """The schema of the first readable group, which every other one must fit."""
        failure: RlioError | None = None
        for group in self._groups:
            part = group
            if self._reads_parts:
                part = group._replace(rows=min(group.rows, _SAMPLE_ROWS))
            try:
                batch = self._loaded(part, None)
                if more := asked - batch.keys():
                    found = self._loaded(part, more)
                    for name in more & found.keys():
                        batch[name] = found[name]
                        self._all = frozenset(batch)
            except (CorruptData, SchemaError) as error:
                failure = failure or error
                continue
            self._uniform.adopt(batch)
            return Schema.of(batch)
        if isinstance(failure, (CorruptData, SchemaError)):
            raise_at(failure, uri=self.uri, record=0)
        return None

    def close(self) -> None:
        """Close all files."""
        self.layout.close()


class _Opened:
    """See `OpenSegment`."""

    def __init__(self, source: EpisodeFiles, schema: Schema, groups: Sequence[_Group]) -> None:
        self.schema = schema
        self._source, self._groups = source, groups
        self.rows = self.units = [group.rows for group in groups]

    def read_folded(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> Folded:
        """See `OpenSegment`."""
        return Folded(self._source.read(self._groups[index], columns, rows))

    def bounds(self, index: int) -> Mapping[str, Bounds]:
        """See `OpenSegment`; not known."""
        return {}


def _runs(layout: EpisodeSource, most: int) -> Iterator[tuple[int, int]]:
    """First episode of each run with rows, and the one after its last: one episode, unless the format reads
    runs.
    """
    start, rows = 0, 0
    for episode, steps in enumerate(layout.lengths):
        if not isinstance(layout, RunSource):
            if steps:
                yield episode, episode + 1
            continue
        if rows and rows + steps > most:
            yield start, episode
            start, rows = episode, 0
        rows += steps
    if rows:
        yield start, len(layout.lengths)


def _pieces(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each segment."""
    starts = [0, *accumulate(rows)]
    for group in range(0, len(rows), _SEGMENT_GROUPS):
        first = starts[group]
        yield first, starts[min(group + _SEGMENT_GROUPS, len(rows))] - first


def content_of(file: InputFile) -> list[Any]:
    """What changes with the content of a file."""
    if not file.path:  # A table in memory.
        return [file.uri, file.size]
    if file.size is not None and file.size <= _SMALL_BYTES:
        with open_input(file) as stream:
            return [file.uri, file.size, zlib.crc32(stream.read())]
    changed = os.stat(file.path).st_mtime_ns if file.fs is None else str(file.fs.ukey(file.path))
    return [file.uri, file.size, changed]


def measure_row(rows: SampleBatch) -> int:
    """About how many bytes a row takes in memory, by the rows of an episode."""
    return max(1, rows.size_bytes() // max(1, len(rows)))


def with_next_obs(observations: Any) -> dict[str, Any]:
    """Columns ``obs`` and ``new_obs`` of an episode of N steps, as views of its N+1 observations.

    Args:
        observations: Array of N+1 rows, or such arrays nested in dicts and tuples.
    """
    return {
        Columns.OBS: map_structure(lambda leaf: leaf[:-1], observations),
        Columns.NEXT_OBS: map_structure(lambda leaf: leaf[1:], observations),
    }


def without_final_obs(observations: Any) -> dict[str, Any]:
    """Columns ``obs``, ``new_obs`` and ``new_obs_valid`` of an episode whose last observation is not stored.

    ``new_obs`` of the last row is zeros, and ``new_obs_valid`` is False there.

    Args:
        observations: Array of N rows, or such arrays nested in dicts and tuples.
    """

    def shifted(leaf: np.ndarray) -> np.ndarray:
        follow = np.zeros_like(leaf)
        follow[:-1] = leaf[1:]
        return follow

    valid = np.ones(len(leaves(observations)[0][1]), np.bool_)
    valid[-1:] = False
    return {
        Columns.OBS: observations,
        Columns.NEXT_OBS: map_structure(shifted, observations),
        Columns.NEXT_OBS_VALID: valid,
    }
