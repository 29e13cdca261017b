"""`RecordFiles`: files of RLlib's records as a `Source`: a segment is a file, a group is a record.

Opening reads the files once, to count the rows of each record.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, count_units
from rlio.batch.columns import Columns
from rlio.errors import CorruptData, DataNotFound, SchemaError, raise_at
from rlio.formats.files.inputs import Failures, FileOptions
from rlio.formats.rllib.decoder import LISTS_WAY, RllibDecoder
from rlio.read_options import ReadOptions
from rlio.reader import Unit
from rlio.schemas.schema import Schema
from rlio.source.files import GroupFiles
from rlio.source.uniform import Agreed
from rlio.storage import InputFile, InputFiles, Span

__all__ = ["DecoderOf", "RecordFiles", "Records", "decoders"]

#: Makes the decoder of some columns; None: of all.
DecoderOf = Callable[[list[str] | None], RllibDecoder]


def decoders(files: Sequence[InputFile], how: FileOptions, **decoding: Any) -> DecoderOf:
    """What makes decoders of files; ``decoding``: further options of `RllibDecoder`."""
    return partial(
        RllibDecoder,
        spaces=how.spaces,
        limits=how.limits,
        format_options=how.format_options,
        source=files[0].uri,
        **decoding,
    )


class Records(ABC):
    """RLlib's records, which can be read in any order.

    Attributes:
        files: The files, each with its URI.
        failures: What handles files that are damaged.
        numbers: Of each record that was found, its number in its file.
        ends: Of each file that was read to its end, the number of records up to there.
        inputs: The files, if it is known where the records are in them; or None.
    """

    files: Sequence[Any]
    failures: Failures
    numbers: Sequence[int]
    ends: Sequence[int]
    inputs: InputFiles | None

    @abstractmethod
    def has(self, index: int) -> bool:
        """Whether a record ``index`` exists; reads no further than needed."""

    def count(self) -> int:
        """The number of records."""
        self.has(sys.maxsize)
        return len(self.numbers)

    def rows_of(self, index: int) -> int | None:
        """Rows of a record, if they are known without decoding it."""
        return None

    @abstractmethod
    def load(self, index: int, decoder: RllibDecoder) -> Batch:
        """Read one record; raises CorruptData or SchemaError, with the place, if the record is damaged."""

    @abstractmethod
    def spans(self, indices: range) -> Iterable[Span]:
        """The bytes of records in turn, as far as they are known; see `GroupFiles`."""

    @abstractmethod
    def firsts(self, decoder: RllibDecoder) -> Iterator[tuple[str, Batch]]:
        """URI and first readable record with rows of each file, or of each kind of file, that has one."""

    def file_of(self, index: int) -> int:
        """Number of the file that has a record."""
        return bisect_right(self.ends, index)

    def uri_of(self, index: int) -> str:
        """The file that has a record."""
        uri: str = self.files[self.file_of(index)].uri
        return uri

    @abstractmethod
    def close(self) -> None:
        """Close the files."""


class RecordFiles(GroupFiles):
    """Records, all of one writer: an episode may continue in the next file.

    Args:
        records: The records.
        files: The files that hold them.
        decoder_of: Makes decoders.
        options: The read options: what to do with damage, and with files with different columns.
        columns: The columns that are read; None: all. Records may differ in others.

    Attributes:
        failures: What handles records that cannot be parsed, which are found at opening.
    """

    def __init__(
        self,
        records: Records,
        files: Sequence[InputFile],
        decoder_of: DecoderOf,
        options: ReadOptions,
        *,
        columns: Sequence[str] | None,
    ) -> None:
        self._whole = decoder_of(None)
        super().__init__(files, self._whole.details)
        self._records, self._decoder_of = records, decoder_of
        self._decoders: dict[frozenset[str] | None, RllibDecoder] = {None: self._whole}
        self.failures: Failures = records.failures
        self._agreed = Agreed(
            options,
            lambda: records.firsts(self._whole),
            several=len(records.files) > 1,
            lists=LISTS_WAY,
        )
        # Files may have different columns: all are decoded, and then dropped or filled.
        self._decodes_all = options.unlike != "error"
        self._count(columns)

    def _count(self, columns: Sequence[str] | None) -> None:
        """Count the rows and units of each record, and find the schema."""
        rows, units, records = array("q"), array("q"), self._records
        wanted, row_bytes = None, 1
        while records.has(len(rows)):
            found = counted = 0
            try:
                known = records.rows_of(len(rows)) if self._schemas else None
                if known is None:
                    batch = self._loaded(len(rows), wanted)
                    found, counted = batch.agent_steps(), count_units(batch, _unit_of(batch))
                    if found and not self._schemas:
                        self._adopt(Schema.of(batch, is_written=False))
                        wanted = None if columns is None else self._stored(columns)
                        row_bytes = batch.size_bytes() // found
                else:
                    found = counted = known
            except (CorruptData, SchemaError) as error:
                self.failures.handle(error)
            rows.append(found)
            units.append(counted)
        if not rows:
            raise DataNotFound("found no record in the files: expected at least one", uri=self.uri)
        of_files = zip(records.files, pairwise([0, *records.ends]), strict=True)
        segments = [(file.uri, range(first, stop)) for file, (first, stop) in of_files if stop > first]
        self._state(rows, segments, units=units, row_bytes=row_bytes)

    @property
    def inputs(self) -> InputFiles | None:
        """See `GroupFiles`."""
        return self._records.inputs

    def _spans(self, groups: range, columns: frozenset[str] | None) -> Iterable[Span]:
        return self._records.spans(groups)  # Records are read with all of their columns.

    def _read(self, group: int, columns: frozenset[str] | None) -> Batch:
        return self._loaded(group, columns)

    def _loaded(self, index: int, columns: frozenset[str] | None) -> Batch:
        """The batch in a record."""
        columns = None if self._decodes_all else columns
        if columns not in self._decoders:
            self._decoders[columns] = self._decoder_of(sorted(columns or ()))
        try:
            batch = self._records.load(index, self._decoders[columns])
            is_joint = any(schema.multi_agent for schema in self._schemas.values())
            if self._schemas and is_joint != isinstance(batch, MultiAgentBatch):
                raise SchemaError("found records of one agent and of several in the same files")
            return self._agreed.conform(batch, columns)
        except (CorruptData, SchemaError) as error:
            raise_at(error, uri=self._records.uri_of(index), record=self._records.numbers[index])

    def close(self) -> None:
        """Close the files."""
        self._records.close()


def _unit_of(batch: Batch) -> Unit:
    return "sequences" if isinstance(batch, SampleBatch) and Columns.SEQ_LENS in batch else "steps"
