"""`JsonSource`: RLlib's JSON files as a `Source`: a segment is a file, a group is a record.

Opening reads the files once, to count the rows of each record.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, Literal

import orjson

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, count_units
from rlio.batch.columns import Columns
from rlio.errors import CorruptData, DataNotFound, SchemaError, raise_at
from rlio.limits import Limits
from rlio.reader import Unit
from rlio.readers.inputs import Failures, find_files
from rlio.readers.json_records import JsonRecords
from rlio.readers.line_files import open_line_files
from rlio.readers.read_options import ReadOptions
from rlio.readers.rllib_json import STEP_NUMBERS, RllibDecoder
from rlio.readers.space_arrays import Spaces
from rlio.schemas.folded import Folded
from rlio.schemas.parquet_statistics import Bounds
from rlio.schemas.schema import Schema, canonical_json, column_of_name
from rlio.source.episodes import content_of
from rlio.source.selection import named_parts
from rlio.source.source import FileSource, SegmentKey, StoredSegment
from rlio.source.uniform import Agreed
from rlio.storage import InputFile
from rlio.storage.paths import StrPath

__all__ = ["SUFFIXES", "JsonSource", "open_json"]

#: Endings of the names of the files.
SUFFIXES: Final = (".json", ".jsonl", ".zip")

_WINDOW_ROWS: Final = 65_536
_WINDOW_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class _File:
    """The records of a file; see `StoredSegment`.

    Attributes:
        number: Number of the file.
        path: Its URI.
        records: Its records, by number.
        first: Number of its first row.
        rows: Number of rows.
        source: Its source.
    """

    number: int
    path: str
    records: range
    first: int
    rows: int
    source: JsonSource = field(compare=False, repr=False)
    writer: str = ""
    skip: int = 0

    @property
    def key(self) -> SegmentKey:
        """Identifies the content."""
        return SegmentKey(f"{self.path}@{self.source.content}", 0, self.rows)


class JsonSource(FileSource):
    """The records of RLlib's JSON files, all of one writer: an episode may continue in the next file.

    Args:
        records: The records.
        files: The files that hold them.
        decoder_of: Makes the decoder of some columns; None: of all.
        options: The read options: what to do with damage, and with files with different columns.
        columns: The columns that are read; None: all. Records may differ in others.

    Attributes:
        failures: What handles records that cannot be parsed, which are found at opening.
        rows, units: Rows and units of each record; 0 for those.
    """

    def __init__(
        self,
        records: JsonRecords,
        files: Sequence[InputFile],
        decoder_of: Callable[[list[str] | None], RllibDecoder],
        options: ReadOptions,
        *,
        columns: Sequence[str] | None,
    ) -> None:
        self._records, self._files, self._decoder_of = records, files, decoder_of
        self._decoders: dict[tuple[str, ...] | None, RllibDecoder] = {}
        self.failures = records.failures = Failures(options.on_error)
        self._whole = self._decoder(None)
        self._agreed = Agreed(options, lambda: records.firsts(self._whole), several=len(records.files) > 1)
        # Files may have different columns: all are decoded, and then dropped or filled.
        self._decodes_all = options.unlike != "error"
        self.rows, self.units = array("q"), array("q")
        self._content: str | None = None
        self._schemas: dict[str, Schema] = {}
        self._count(columns)

    def _decoder(self, columns: Sequence[str] | None) -> RllibDecoder:
        key = None if columns is None else tuple(columns)
        if key not in self._decoders:
            self._decoders[key] = self._decoder_of(None if columns is None else list(columns))
        return self._decoders[key]

    def _count(self, columns: Sequence[str] | None) -> None:
        """Count the rows and units of each record, and find the schema."""
        index, records = 0, self._records
        row_bytes = 1
        while records.has(index):
            rows = units = 0
            try:
                data = records.line(index).data
                counted = None if data is None or not self._schemas else _rows_of(data)
                if counted is None:
                    batch = self._loaded(index, columns if self._schemas else None)
                    if not self._schemas and batch.agent_steps():
                        schema = Schema.of(batch)
                        self._schemas[schema.hash] = schema
                        row_bytes = max(1, batch.size_bytes() // batch.agent_steps())
                    rows, units = batch.agent_steps(), count_units(batch, _unit_of(batch))
                else:
                    rows = units = counted
            except (CorruptData, SchemaError) as error:
                self.failures.handle(error)
            self.rows.append(rows)
            self.units.append(units)
            index += 1
        self.window_rows = max(1, min(_WINDOW_ROWS, _WINDOW_BYTES // row_bytes))
        if not index:
            raise DataNotFound("found no record in the files: expected at least one", uri=self.uri)
        starts = [0, *accumulate(self.rows)]
        self._segments = [
            _File(
                number,
                records.files[number].uri,
                range(first, stop),
                starts[first],
                starts[stop] - starts[first],
                self,
            )
            for number, (first, stop) in enumerate(pairwise([0, *records.ends]))
            if stop > first
        ]

    @property
    def uri(self) -> str:
        return self._files[0].uri

    @property
    def schemas(self) -> Mapping[str, Schema]:
        return self._schemas

    @property
    def segments(self) -> Sequence[_File]:
        return self._segments

    @property
    def state_identity(self) -> str:
        """A digest of the names, sizes and rows of the files, and of the options of decoding."""
        files = [[file.path.rpartition("/")[2], file.size] for file in self._files]
        described = [files, len(self), len(self.rows), self._whole.details]
        return hashlib.blake2b(canonical_json(described).encode(), digest_size=8).hexdigest()

    @property
    def content(self) -> str:
        """A digest that changes with the content of the files."""
        if self._content is None:
            text = canonical_json([[content_of(file) for file in self._files], self.state_identity])
            self._content = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return self._content

    def uri_of(self, path: str) -> str:
        return path

    def open_segment(self, segment: StoredSegment) -> _Opened:
        assert isinstance(segment, _File)
        return _Opened(self, next(iter(self._schemas.values())), segment.records)

    def read(self, index: int, columns: Sequence[str] | None) -> Batch:
        """The batch in a record, with only the named columns."""
        batch = self._loaded(index, columns)
        if isinstance(batch, MultiAgentBatch):
            parts = {policy: named_parts(rows, columns) for policy, rows in batch.items()}
            return MultiAgentBatch(parts, batch.env_steps())
        return named_parts(batch, columns)

    def _loaded(self, index: int, columns: Sequence[str] | None) -> Batch:
        wanted = None if columns is None else [*dict.fromkeys(map(column_of_name, columns))]
        decoder = self._whole if self._decodes_all else self._decoder(wanted)
        try:
            batch = self._records.load(index, decoder)
            is_joint = any(schema.multi_agent for schema in self._schemas.values())
            if self._schemas and is_joint != isinstance(batch, MultiAgentBatch):
                raise SchemaError("found records of one agent and of several in the same files")
            return self._agreed.conform(batch, None if self._decodes_all else wanted)
        except (CorruptData, SchemaError) as error:
            raise_at(error, uri=self._records.uri_of(index), record=self._records.numbers[index])

    def close(self) -> None:
        """Close the files."""
        self._records.close()


class _Opened:
    """See `OpenSegment`."""

    def __init__(self, source: JsonSource, schema: Schema, records: range) -> None:
        self.schema = schema
        self._source, self._records = source, records
        self.rows = source.rows[records.start : records.stop].tolist()
        self.units = source.units[records.start : records.stop].tolist()

    def read_folded(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> Folded:
        """See `OpenSegment`."""
        assert rows is None  # Records are whole.
        return Folded(self._source.read(self._records[index], columns))

    def bounds(self, index: int) -> Mapping[str, Bounds]:
        """See `OpenSegment`; not known."""
        return {}


def open_json(
    inputs: StrPath | Sequence[StrPath],
    *,
    spaces: Spaces | None = None,
    format_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None,
    limits: Limits,
    on_error: Literal["raise", "skip"],
) -> JsonSource:
    """RLlib's JSON files as a source, as `rlio.JsonReader` reads them without options."""
    files = find_files(inputs, suffixes=SUFFIXES, storage_options=storage_options, limits=limits)

    def decoder_of(columns: list[str] | None) -> RllibDecoder:
        return RllibDecoder(
            columns,
            spaces=spaces,
            limits=limits,
            unnormalise_actions=None,
            format_options=format_options,
            source=files[0].uri,
        )

    records = JsonRecords(open_line_files(files, limits), limits.line_bytes)
    return JsonSource(records, files, decoder_of, ReadOptions(on_error=on_error), columns=None)


def _unit_of(batch: Batch) -> Unit:
    return "sequences" if isinstance(batch, SampleBatch) and Columns.SEQ_LENS in batch else "steps"


def _rows_of(line: bytes) -> int | None:
    """Rows of a plain record, by one of its lists; None: it must be decoded to tell.

    A record whose columns differ in length is found to be damaged when it is decoded.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict) or record.get("type", "SampleBatch") != "SampleBatch":
        return None
    if Columns.SEQ_LENS in record:
        return None
    lists = (record[name] for name in STEP_NUMBERS if name in record)
    return next((len(found) for found in lists if isinstance(found, list)), None)
