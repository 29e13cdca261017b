"""The records of RLlib's JSON files, in any order: where each line is, and the batch in it.

Not here: the format of a record (`rlio.formats.rllib.decoder`), and the order of reading.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import accumulate
from typing import IO, Any, Final, Literal

import orjson

from rlio.batch import Batch
from rlio.batch.columns import Columns
from rlio.catalog.names import HEADER, ShardName
from rlio.errors import CorruptData, OptionError, SchemaError, UnknownLayout, UnsafeData, raise_at
from rlio.formats.files.inputs import Failures, FileOptions, find_files
from rlio.formats.files.json_files import spread_value
from rlio.formats.files.line_files import READ_ERRORS, Line, LineFile, line_of, open_line_files
from rlio.formats.files.partitions import refuse_partitions
from rlio.formats.rllib.decoder import STEP_NUMBERS, NextLine, RllibDecoder
from rlio.formats.rllib.record_source import DecoderOf, RecordFiles, Records, decoders
from rlio.read_options import ReadOptions
from rlio.schemas.json_columns import check_containers
from rlio.schemas.json_lines import is_provenance, parse_head
from rlio.source.damage import damage_named
from rlio.storage import InputFile, InputFiles, Span
from rlio.storage.filesystem import StrPath
from rlio.storage.open_files import OpenFiles
from rlio.support.progress import reached

__all__ = ["JsonRecords", "open_json", "open_records"]

# Endings of the names of the files.
_SUFFIXES: Final = (".json", ".jsonl", ".zip")

_OPEN_FILES: Final = 4
# A shuffled zip member up to this size is held inflated, because seeking back inflates it from the start.
_HELD_BYTES: Final = 64 << 20
# What is read of a file whose first line is no record, to see what it is.
_LOOK_BYTES: Final = 1 << 12

_STEP_NUMBERS: Final = tuple(name.encode() for name in STEP_NUMBERS)
# A list of numbers, at least one, after the name of its column.
_NUMBERS: Final = re.compile(rb"\s*:\s*\[\s*([^][\s][^][]*)\]")


class JsonRecords(Records):
    """Lines of several files as batches.

    An index has the places of the lines: 24 bytes a record, built as files are read.

    Args:
        files: The files.
        limit: Most bytes of a line.
        on_error: What to do with files that are damaged.
    """

    def __init__(
        self, files: Sequence[LineFile], limit: int, on_error: Literal["raise", "skip"] = "raise"
    ) -> None:
        self.files: Sequence[LineFile] = files
        self.inputs: InputFiles | None = next((file.listed[0] for file in files if file.listed), None)
        self._limit = limit
        #: Bytes before each file, and of all.
        self._before = [0, *accumulate(file.size or 0 for file in files)]
        self.failures: Failures = Failures(on_error)
        self._offsets = array("q")
        self._sizes = array("q")
        self.numbers: array[int] = array("q")
        #: For each file read to its end: number of records up to there.
        self.ends: list[int] = []
        # Where reading continues in the file after those: offset, and number of the line.
        self._place = (0, 0)
        self._lines: Generator[Line, None, None] | None = None
        self._last: Line | None = None
        self._streams: OpenFiles[int, IO[bytes]] = OpenFiles(_OPEN_FILES, close=lambda stream: stream.close())

    def has(self, index: int) -> bool:
        """See `Records`."""
        while index >= len(self._offsets) and len(self.ends) < len(self.files):
            self._read_on()
        return index < len(self._offsets)

    def _read_on(self) -> None:
        """Add the next line to the index, or note the end of a file."""
        if self._lines is None:
            offset, number = self._place
            self._lines = self._lines_of(len(self.ends), offset=offset, number=number)
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
            self.ends.append(len(self._offsets))
            return
        self._place = (line.end, line.number + 1)
        reached(self._before[len(self.ends)] + line.end, self._before[-1])
        if line.data == b"":
            return
        self._offsets.append(line.start)
        self._sizes.append(line.size)
        self.numbers.append(line.number)
        self._last = line

    def _lines_of(
        self, file: int, offset: int = 0, number: int = 0, *, scans: bool = True
    ) -> Generator[Line, None, None]:
        """Records, and blank lines, of a file; see `LineFile.lines`."""
        return self.files[file].lines(self._limit, offset=offset, number=number, scans=scans)

    def line(self, index: int) -> Line:
        """A record's line; reads it again, unless it is the last one that was found."""
        line = self._last
        if line is None or index + 1 < len(self._offsets):
            place = self._offsets[index], self._sizes[index], self.numbers[index]
            line = self._line_at(self.file_of(index), *place)
        return line

    def spans(self, indices: range) -> Iterator[Span]:
        """See `Records`. Members of zip files are inflated as a whole."""
        for index in indices:
            if (listed := self.files[self.file_of(index)].listed) is not None:
                yield listed[1], self._offsets[index], self._offsets[index] + self._sizes[index] + 1

    def rows_of(self, index: int) -> int | None:
        """Rows of a plain record, by one of its lists; None: it must be decoded to tell.

        A record whose columns differ in length is found to be damaged when it is decoded.
        """
        data = self.line(index).data
        if data is not None and (counted := _counted(data)):
            return counted
        try:
            check_containers(data or b"")
            record = None if data is None else orjson.loads(data)
        except (orjson.JSONDecodeError, UnsafeData):
            return None
        if not isinstance(record, dict) or record.get("type", "SampleBatch") != "SampleBatch":
            return None
        if Columns.SEQ_LENS in record:
            return None
        lists = (record[name] for name in STEP_NUMBERS if name in record)
        return next((len(found) for found in lists if isinstance(found, list)), None)

    def load(self, index: int, decoder: RllibDecoder) -> Batch:
        """The batch in a record.

        Raises:
            CorruptData, SchemaError: It is damaged.
        """
        line, next_line = self.line(index), partial(self._next_line, index)
        return self._decode(self.file_of(index), line, decoder, next_line)

    def _next_line(self, index: int) -> bytes | None:
        """The line after that of record ``index``; None: there is none."""
        # Damage is reported when the line itself is served.
        with contextlib.suppress(CorruptData):
            return self.line(index + 1).data if self.has(index + 1) else None
        return None

    def _decode(
        self, file: int, line: Line, decoder: RllibDecoder, next_line: NextLine | None = None
    ) -> Batch:
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
            with damage_named("RLlib's JSON", uri=self.files[file].uri, record=line.number):
                return decoder.decode(line.data, next_line)
        except (CorruptData, SchemaError, UnknownLayout) as error:
            if type(error) is CorruptData and (other := self._spread_value(file, line)):
                raise_at(other, uri=self.files[file].uri)
            raise_at(error, uri=self.files[file].uri, record=line.number)

    def _spread_value(self, file: int, line: Line) -> UnknownLayout | None:
        """The error of a file that is one JSON value over several lines, of which ``line`` is the first."""
        try:
            with self.files[file].open() as stream:
                text = stream.read(line.end + _LOOK_BYTES) if line.start < _LOOK_BYTES else b""
        except READ_ERRORS:
            return None
        before, rest = text[: line.start].removeprefix(BOM_UTF8), text[line.end :]
        if before.strip() or not rest.strip():
            return None
        return spread_value(line.data or b"", rest)

    def firsts(self, decoder: RllibDecoder) -> Iterator[tuple[str, Batch]]:
        """URI and first readable record with rows of each file that has one."""
        for number, file in enumerate(self.files):
            # Damage is reported when the record is served.
            with (
                contextlib.suppress(CorruptData),
                contextlib.closing(self._lines_of(number, scans=False)) as lines,
            ):
                if batch := self._first_of(number, lines, decoder):
                    yield file.uri, batch

    def _first_of(self, file: int, lines: Iterable[Line], decoder: RllibDecoder) -> Batch | None:
        for line in lines:
            with contextlib.suppress(CorruptData, SchemaError):
                if line.data != b"" and len(batch := self._decode(file, line, decoder)):
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
        for file in self.files:
            if file.listed is not None:
                file.listed[0].close()
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _counted(line: bytes) -> int | None:
    """Rows of a plain record, without parsing it: exact for JSON without inner objects and escaped texts."""
    if not line.endswith(b"}") or line.find(b"{", 1) >= 0 or b"\\" in line:
        return None
    # Text -> where it ends. `find` is ten times as fast as `split`, which copies the line.
    ends: dict[bytes, int] = {}
    at = line.find(b'"')
    while at >= 0:
        end = line.find(b'"', at + 1)
        if end < 0:
            return None
        ends.setdefault(line[at + 1 : end], end + 1)
        at = line.find(b'"', end + 1)
    if [*ends][:2] != [b"type", b"SampleBatch"] or b"seq_lens" in ends:
        return None
    name = next((name for name in _STEP_NUMBERS if name in ends), None)
    found = None if name is None else _NUMBERS.match(line, ends[name])
    return None if found is None else found[1].count(b",") + 1


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


def open_json(inputs: StrPath | Sequence[StrPath], how: FileOptions) -> RecordFiles:
    """RLlib's JSON files as a source, as `JsonReader` reads them without options."""
    return RecordFiles(*open_records(inputs, how), ReadOptions(on_error=how.on_error), columns=None)


def open_records(
    inputs: StrPath | Sequence[StrPath], how: FileOptions, **decoding: Any
) -> tuple[JsonRecords, list[InputFile], DecoderOf]:
    """The records of JSON files, the files, and what makes decoders; ``decoding``: see `decoders`."""
    files = find_files(inputs, how, suffixes=_SUFFIXES)
    _refuse_data_sets(files)
    refuse_partitions(files)
    records = JsonRecords(open_line_files(files, how.limits), how.limits.line_bytes, how.on_error)
    return records, files, decoders(files, how, **decoding)


def _refuse_data_sets(files: Sequence[InputFile]) -> None:
    """Raise OptionError if a file belongs to a data set of rlio."""
    for file in files:
        name = file.path.rsplit("/", 1)[-1]
        if name == HEADER or ShardName.parse(name) is not None:
            raise OptionError(
                "this file belongs to a data set of rlio: read the data set's root with rlio.DatasetReader "
                "(writers= selects writers), and mix it with other recordings through rlio.MixedInput",
                uri=file.uri,
            )
