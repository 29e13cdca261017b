"""`GroupFiles`: rows of one writer in groups, each read by itself: the base of most sources of foreign files.

A subclass states its groups and their schema, and reads one. Everything else that the engine asks for
follows: segments, identities, columns by name, windows.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, count, islice
from typing import IO, Any, Final

from rlio.batch import Batch, MultiAgentBatch
from rlio.errors import CorruptData, DataNotFound, SchemaError
from rlio.schemas.batches import pictures_decoded
from rlio.schemas.folded import Folded
from rlio.schemas.leaves import column_of_name
from rlio.schemas.parquet_statistics import Bounds
from rlio.schemas.schema import Schema, canonical_json
from rlio.source.selection import named_parts
from rlio.source.source import Coming, FileSource, SegmentKey, StoredSegment
from rlio.storage import InputFile, InputFiles, Span, open_input
from rlio.support.words import and_more

__all__ = ["GroupFiles", "content_of", "content_of_all"]

# A shuffle without a store mixes the rows of a window.
_WINDOW_ROWS: Final = 65_536
_WINDOW_BYTES: Final = 256 << 20
# Files up to this size are known by their content, larger ones by size and time.
_SMALL_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class _Segment:
    """Consecutive groups; see `StoredSegment`.

    Attributes:
        number: Number of the segment.
        path: Names it within its source.
        groups: Its groups.
        first: Number of its first row.
        rows: Number of rows.
        source: Its source.
    """

    number: int
    path: str
    groups: range
    first: int
    rows: int
    source: GroupFiles = field(compare=False, repr=False)
    writer: str = ""
    skip: int = 0

    @property
    def key(self) -> SegmentKey:
        """Identifies the content."""
        return SegmentKey(f"{self.number}@{self.source.content}", 0, self.rows)


class GroupFiles(FileSource):
    """See the module.

    Args:
        files: The files; their names and sizes are part of the state of a reader.
        about: Everything besides the files that determines the rows, as JSON values.

    Attributes:
        rows, units: Rows and units of each group.
        run_rows: Up to how many rows of several groups to read together; 0: each group is read by itself.
    """

    run_rows: int = 0

    def __init__(self, files: Sequence[InputFile], about: Mapping[str, Any]) -> None:
        self._files, self._about = files, about
        #: Other files that determine the rows.
        self._beside: Sequence[InputFile] = ()
        self.rows: Sequence[int] = ()
        self.units: Sequence[int] = ()
        self._segments: list[_Segment] = []
        self._schemas: dict[str, Schema] = {}
        self._columns: frozenset[str] = frozenset()
        self._content: str | None = None
        self._described: list[Any] = []

    def _adopt(self, schema: Schema) -> None:
        """State the schema of all rows."""
        self._schemas[schema.hash] = schema
        self._columns = frozenset(name for names in self.columns.values() for name in names)

    def _state(
        self,
        rows: Sequence[int],
        segments: Iterable[tuple[str, range]],
        *,
        units: Sequence[int] | None = None,
        pieces: int | None = None,
        row_bytes: int = 1,
    ) -> None:
        """State what there is, after `_adopt`.

        Args:
            rows: Rows of each group.
            segments: (path, groups) of each segment.
            units: Units of each group; None: rows are units.
            pieces: How many episodes or records there are; None: as many as groups. Part of states.
            row_bytes: About how many bytes a row takes.
        """
        self.rows, self.units = rows, rows if units is None else units
        self.window_rows: int | None = max(1, min(_WINDOW_ROWS, _WINDOW_BYTES // max(1, row_bytes)))
        starts = [0, *accumulate(rows)]
        this: GroupFiles = weakref.proxy(self)  # It has the segments: it is freed once it is dropped.
        self._segments = [
            _Segment(number, path, groups, first, stop - first, this)
            for number, (path, groups) in enumerate(segments)
            for first, stop in [(starts[groups.start], starts[groups.stop])]
            if first < stop
        ]
        # The name of a table in memory has its checksum.
        files = [[file.path.rpartition("/")[2] or file.uri, file.size] for file in self._files]
        self._described = [files, len(self), len(rows) if pieces is None else pieces, self._about]

    @property
    def uri(self) -> str:
        return and_more([file.uri for file in self._files], 1)

    @property
    def sizes(self) -> Sequence[int | None]:
        """See `FileSource`."""
        return [file.size for file in self._files if file.path]

    @property
    def schemas(self) -> Mapping[str, Schema]:
        return self._schemas

    @property
    def segments(self) -> Sequence[_Segment]:
        return self._segments

    @property
    def state_identity(self) -> str:
        """A digest of the names, the sizes and the rows of the files, and of the format's options."""
        return _digest(self._described)

    @property
    def content(self) -> str:
        """A digest that changes with the content of the files."""
        if self._content is None:
            self._content = _digest([content_of_all([*self._files, *self._beside]), self.state_identity])
        return self._content

    def uri_of(self, path: str) -> str:
        return path

    def open_segment(self, segment: StoredSegment) -> _Opened:
        assert isinstance(segment, _Segment)
        return _Opened(self, next(iter(self._schemas.values())), segment.groups)

    def read(
        self,
        groups: range,
        columns: Sequence[str] | None,
        rows: range | None = None,
        *,
        keeps_pictures: bool = False,
    ) -> Batch:
        """The rows of a group, or of several, with only the named columns; see `OpenSegment`."""
        stored = None if columns is None else self._stored(columns)
        batch = self._read(groups[0], stored) if len(groups) == 1 else self._read_run(groups, stored)
        if isinstance(batch, MultiAgentBatch):
            parts = {policy: named_parts(found, columns) for policy, found in batch.items()}
            return MultiAgentBatch(parts, batch.env_steps())
        found = named_parts(batch, columns)
        if rows is not None:
            found = found[rows.start : rows.stop]
        return found if keeps_pictures else pictures_decoded(found, self.uri, groups[0])

    def _stored(self, names: Sequence[str]) -> frozenset[str]:
        """The columns of ``names``, which may be parts of nested ones (``obs/camera``).

        A column may have such a name itself (``infos/qpos`` of D4RL).
        """
        return frozenset(name if name in self._columns else column_of_name(name) for name in names)

    @property
    def inputs(self) -> InputFiles | None:
        """The files whose bytes `_spans` states; None: it states none."""
        return None

    def _spans(self, groups: range, columns: frozenset[str] | None) -> Iterable[Span]:
        """The bytes that reading some groups in turn fetches, about in that order, as far as they are known.

        Requests nothing of files that requests are made for in other threads. See `_read` for the columns.
        """
        return ()

    def _open_group(self, group: int) -> None:
        """Read what `_spans` needs to know of a group that is read next, such as the footer of its file."""

    def expect(self, coming: Coming, columns: Sequence[str] | None) -> None:
        """See `Source`."""
        inputs = self.inputs
        if inputs is None or self.is_left or not inputs.are_far:
            return
        if coming == ():
            inputs.forget()
            return
        coming = iter(coming)
        first = [*islice(coming, 1)]
        # What is wrong with them is raised in their turn.
        with contextlib.suppress(CorruptData, DataNotFound, SchemaError):
            for group in islice((group for one in first for group in _groups_of(*one)), 1):
                self._open_group(group)
        stored = None if columns is None else self._stored(columns)
        inputs.expect(self._spans_of(chain(first, coming), stored))
        if self.is_left:  # Meanwhile.
            inputs.forget()

    def _spans_of(self, coming: Coming, columns: frozenset[str] | None) -> Iterator[Span]:
        for segment, numbers in coming:
            groups = _groups_of(segment, numbers)
            with contextlib.suppress(CorruptData, DataNotFound, SchemaError):
                if groups:
                    yield from self._spans(range(groups[0], groups[-1] + 1), columns)

    @abstractmethod
    def _read(self, group: int, columns: frozenset[str] | None) -> Batch:
        """The rows of a group as a new batch, of the schema.

        Args:
            group: Number of the group.
            columns: Columns that are needed; None: all. More may be given.

        Raises:
            CorruptData, SchemaError: The group is damaged.
        """

    def _read_run(self, groups: range, columns: frozenset[str] | None) -> Batch:
        """The rows of several groups as one batch, where there are `run_rows`; see `_read`."""
        raise NotImplementedError


def _groups_of(segment: StoredSegment, numbers: Sequence[int] | None) -> Sequence[int]:
    """The groups of a source that some groups of a segment are; None: all."""
    assert isinstance(segment, _Segment)
    return segment.groups if numbers is None else [segment.groups[number] for number in numbers]


class _Opened:
    """See `OpenSegment`."""

    def __init__(self, source: GroupFiles, schema: Schema, groups: range) -> None:
        self.schema: Schema = schema
        self._source, self._groups = source, groups
        self.rows: list[int] = list(source.rows[groups.start : groups.stop])
        self.units: list[int] = list(source.units[groups.start : groups.stop])
        self.run_rows: int = source.run_rows
        self.keeps_pictures: bool = source.keeps_pictures

    def read_folded(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> Folded:
        """See `OpenSegment`."""
        return self._folded(self._groups[index : index + 1], columns, rows)

    def read_run(self, groups: range, columns: Sequence[str] | None) -> Folded:
        """See `OpenSegment`."""
        return self._folded(self._groups[groups.start : groups.stop], columns)

    def _folded(self, groups: range, columns: Sequence[str] | None, rows: range | None = None) -> Folded:
        return Folded(self._source.read(groups, columns, rows, keeps_pictures=self.keeps_pictures))

    def bounds(self, index: int) -> Mapping[str, Bounds]:
        """See `OpenSegment`; not known."""
        return {}


def content_of(file: InputFile, opened: Callable[[], IO[bytes]] | None = None) -> list[Any]:
    """What changes with the content of a file; ``opened`` opens it, if another than `open_input` should."""
    if not file.path:  # A table in memory.
        return [file.uri, file.size]
    if _is_small(file):
        with open_input(file) if opened is None else opened() as stream:
            return [file.uri, file.size, zlib.crc32(stream.read())]
    if file.fs is not None:
        return [file.uri, file.size, str(file.fs.ukey(file.path))]
    found = os.stat(file.path)
    # A program can set the time of a file's last change, but not that of the change of its status.
    return [file.uri, file.size, found.st_mtime_ns, found.st_ctime_ns]


def content_of_all(files: Sequence[InputFile]) -> str:
    """A digest that changes with the content of one of the files."""
    small = InputFiles([file for file in files if _is_small(file)])
    numbers = count()
    try:
        return _digest([content_of(file, lambda: small.open(next(numbers))) for file in files])
    finally:
        small.close()


def _is_small(file: InputFile) -> bool:
    return bool(file.path) and file.size is not None and file.size <= _SMALL_BYTES


def _digest(described: list[Any]) -> str:
    return hashlib.blake2b(canonical_json(described).encode(), digest_size=8).hexdigest()
