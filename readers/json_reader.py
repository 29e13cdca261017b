"""`JsonReader`: RLlib's JSON recordings, from folders, globs, lists, URIs and zip files.

One line is one record: the batch that was written at one time. Records are read one at a time in the order of
the files, or, with ``shuffle``, in another pseudo-random order each epoch. The reader remembers the offsets
of records as it reads the files.

Not here: the formats of a record (`rlio.readers.rllib_json`), and rlio's data sets, whose JSON shards
`rlio.DatasetReader` reads.

Example:
    >>> from rlio.storage import Storage
    >>> record = b'{"type": "SampleBatch", "obs": [[0.5], [1.0]], "rewards": [1.0, 1.0]}'
    >>> Storage.open("memory://json-example").put("old.json", record)
    >>> with JsonReader("memory://json-example", epochs=1) as reader:
    ...     [batch["rewards"].tolist() for batch in reader]
    [[1.0, 1.0]]
"""

from __future__ import annotations

import contextlib
import sys
from array import array
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import IO, Any, Unpack

from rlio.batch import Batch
from rlio.dataset.names import HEADER, ShardName
from rlio.errors import (
    CorruptData,
    OptionError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
)
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.inputs import Cursor, Failures, RecordCursor, StoredReader, find_files, raise_at
from rlio.readers.line_files import (
    READ_ERRORS,
    Line,
    LineFile,
    line_of,
    open_line_files,
)
from rlio.readers.read_options import ReadKeywords, ReadOptions
from rlio.readers.rllib_json import NextLine, RllibDecoder
from rlio.readers.space_arrays import Spaces
from rlio.schemas.json_lines import is_provenance, parse_head
from rlio.source.uniform import Agreed
from rlio.storage import InputFile
from rlio.storage.filesystem import StrPath
from rlio.storage.open_files import OpenFiles
from rlio.support.options import checked_keywords

__all__ = ["JsonReader"]

_SUFFIXES = (".json", ".jsonl", ".zip")
_OPEN_FILES = 4
# A shuffled zip member up to this size is held inflated, because seeking back inflates it from the start.
_HELD_BYTES = 64 << 20


class JsonReader(StoredReader):
    """Reads RLlib's JSON recordings.

    Without ``batch_size``, `sample` serves the records as they were written. All records must be alike: a
    record counts as damaged if its columns, dtypes or shapes differ from those of the first readable record.
    Record number i of the order over all epochs belongs to rank i modulo world.

    Rows keep the dtypes of JSON (int64, float64, bool; packed columns have their own) unless ``spaces`` are
    given; legacy ``dones`` become ``terminateds``.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        inputs: A file, folder, glob or URI, or a list of those. In folders and zip files, every ``*.json``
            and ``*.jsonl`` is read; in folders also every ``*.zip``.
        spaces: (observation space, action space), or policy id -> such a pair: restores the structure and
            dtypes of obs, new_obs, actions and prev_actions.
        unnormalise_actions: RLlib records actions of bounded Boxes scaled to [-1, 1]. True: actions and
            prev_actions are scaled to the bounds of their space, and clipped to them. False, or None: they
            are served as recorded; None also logs this once if actions are floats.
        format_options: ``{"infos": "obs"}`` or ``{"infos": "new_obs"}``: which observation an info came with.
            None: RLlib's rule, which changed with its version 2.3: that of ``obs`` in batches with
            ``terminateds``, else that of ``new_obs``. rlio's rows have that of ``new_obs``; where it was not
            recorded, they have ``{}``.
        limits: Limits on the files' demands.
        storage_options: Keywords of the fsspec filesystem.
        keywords: ``batch_size``, ``epochs``, ``shuffle``, ``seed``, ``shard``, ``columns``, ``on_error`` and
            ``drop_last``: see `ReadOptions`.

    Raises:
        DataNotFound: ``inputs`` name no file.
        OptionError: An option is illegal, or a file belongs to a data set of rlio.
        CorruptData: A zip file is damaged (UnsafeData: it would inflate to too much memory).
    """

    @checked_keywords
    def __init__(
        self,
        inputs: StrPath | Sequence[StrPath],
        *,
        spaces: Spaces | None = None,
        unnormalise_actions: bool | None = None,
        format_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        storage_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[ReadKeywords],
    ) -> None:
        options = ReadOptions.of(keywords)
        found = find_files(inputs, suffixes=_SUFFIXES, storage_options=storage_options, limits=limits)
        _refuse_data_sets(found)
        decoder = RllibDecoder(
            options.columns,
            spaces=spaces,
            limits=limits,
            unnormalise_actions=unnormalise_actions,
            format_options=format_options,
            source=found[0].uri,
        )
        files = open_line_files(found, limits)
        records = _Records(files, decoder, limits.line_bytes, options)

        def make_cursor(seed: int, failures: Failures) -> Cursor:
            records.failures = failures
            return RecordCursor(records, options, seed=seed, failures=failures)

        details = {**decoder.details, "max_line_bytes": limits.line_bytes}
        super().__init__(options, found, make_cursor, details=details)


def _refuse_data_sets(files: Sequence[InputFile]) -> None:
    for file in files:
        name = file.path.rsplit("/", 1)[-1]
        if name == HEADER or ShardName.parse(name) is not None:
            raise OptionError(
                "this file belongs to a data set of rlio: read the data set's root with rlio.DatasetReader "
                "(writers= selects writers), and mix it with other recordings through rlio.MixedInput",
                uri=file.uri,
            )


class _Records:
    """Lines of several files as batches; a `RecordSource`.

    An index has the places of the lines: 24 bytes a record, built as files are read.

    Attributes:
        failures: What handles files that are damaged.
    """

    def __init__(
        self, files: Sequence[LineFile], decoder: RllibDecoder, limit: int, options: ReadOptions
    ) -> None:
        self.files = files
        self._decoder, self._limit = decoder, limit
        self._agreed = Agreed(options, self._firsts, several=len(files) > 1)
        self.failures = Failures("raise")
        self._offsets = array("q")
        self._sizes = array("q")
        self._numbers = array("q")
        #: For each file read to its end: number of records up to there.
        self._ends: list[int] = []
        # Where reading continues in the file after those: offset, and number of the line.
        self._place = (0, 0)
        self._lines: Generator[Line, None, None] | None = None
        self._last: Line | None = None
        self._streams: OpenFiles[int, IO[bytes]] = OpenFiles(_OPEN_FILES, close=lambda stream: stream.close())

    def has(self, index: int) -> bool:
        while index >= len(self._offsets) and len(self._ends) < len(self.files):
            self._read_on()
        return index < len(self._offsets)

    def count(self) -> int:
        self.has(sys.maxsize)
        return len(self._offsets)

    def _read_on(self) -> None:
        """Add the next line to the index, or note the end of a file."""
        if self._lines is None:
            offset, number = self._place
            self._lines = self._lines_of(len(self._ends), offset=offset, number=number)
        try:
            line = next(self._lines, None)
        except BaseException as error:
            self._lines = None  # The next call starts again at the same place.
            if not isinstance(error, CorruptData):
                raise
            self.failures.handle(error)
            line = None  # Records before the damage can be read.
        if line is None:
            self._lines, self._place = None, (0, 0)
            self._ends.append(len(self._offsets))
            return
        self._place = (line.end, line.number + 1)
        if line.data == b"":
            return
        self._offsets.append(line.start)
        self._sizes.append(line.size)
        self._numbers.append(line.number)
        self._last = line

    def _lines_of(self, file: int, offset: int = 0, number: int = 0) -> Generator[Line, None, None]:
        """Records, and blank lines, of a file; see `LineFile.lines`."""
        return self.files[file].lines(self._limit, offset=offset, number=number)

    def load(self, index: int) -> Batch:
        file, line = bisect_right(self._ends, index), self._line(index)
        batch = self._decode(file, line, partial(self._next_line, index))
        try:
            return self._agreed.conform(batch)
        except SchemaError as error:
            raise_at(error, uri=self.files[file].uri, record=line.number)

    def _line(self, index: int) -> Line:
        """The line of record ``index``, which must be known."""
        if self._last is not None and index + 1 == len(self._offsets):
            return self._last
        file = bisect_right(self._ends, index)
        return self._line_at(file, self._offsets[index], self._sizes[index], self._numbers[index])

    def _next_line(self, index: int) -> bytes | None:
        """The line after that of record ``index``; None: there is none."""
        # Damage is reported when the line itself is served.
        with contextlib.suppress(CorruptData):
            return self._line(index + 1).data if self.has(index + 1) else None
        return None

    def _decode(self, file: int, line: Line, next_line: NextLine | None = None) -> Batch:
        try:
            if line.data is None:
                raise UnsafeData(
                    f"a line of {line.size} bytes, more than {self._limit}: raise Limits.line_bytes if you "
                    "trust the file"
                )
            if is_provenance(line.data) or parse_head(line.data) is not None:
                raise OptionError(
                    "rlio wrote this line, which needs the schema of its data set: read the root of the data "
                    "set with rlio.DatasetReader",
                    uri=self.files[file].uri,
                )
            return self._decoder.decode(line.data, next_line)
        except (CorruptData, SchemaError, UnknownLayout) as error:
            raise_at(error, uri=self.files[file].uri, record=line.number)

    def _firsts(self) -> Iterator[tuple[str, Batch]]:
        """URI and first readable record with rows of each file that has one."""
        for number, file in enumerate(self.files):
            # Damage is reported when the record is served.
            with contextlib.suppress(CorruptData), contextlib.closing(self._lines_of(number)) as lines:
                if batch := self._first_of(number, lines):
                    yield file.uri, batch

    def _first_of(self, file: int, lines: Iterable[Line]) -> Batch | None:
        for line in lines:
            with contextlib.suppress(CorruptData, SchemaError):
                if line.data != b"" and len(batch := self._decode(file, line)):
                    return batch
        return None

    def _line_at(self, file: int, offset: int, size: int, number: int) -> Line:
        """Read a line again: that at ``offset``, known to have ``size`` bytes."""
        place, uri = (offset, size, offset + size), self.files[file].uri
        if size > self._limit:
            return line_of(number, None, place)
        try:
            stream = self._streams.get(file) or self._streams.add(file, _opened(self.files[file]))
            stream.seek(offset)
            data = stream.read(size)
        except READ_ERRORS as error:
            raise CorruptData(f"the line cannot be read again: {error}", uri=uri, record=number) from error
        if len(data) < size or b"\n" in data:
            raise CorruptData(
                "the line is not there any more: the file changed after it was read", uri=uri, record=number
            )
        return line_of(number, data, place)

    def close(self) -> None:
        """Close the files."""
        self._streams.close()
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _opened(file: LineFile) -> IO[bytes]:
    """A file for reading in any order. A small member of a zip file is held inflated."""
    stream = file.open()
    if file.member is None or (file.size or 0) > _HELD_BYTES:
        return stream
    held = BytesIO()
    # The index has no records behind damage, so the rest is not needed.
    with stream, contextlib.suppress(*READ_ERRORS):
        while piece := stream.read(1 << 20):
            held.write(piece)
    return held
