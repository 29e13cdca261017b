"""`ParquetFiles`: the row groups of Parquet files of others, read one at a time and within limits.

Not here: how a file is opened without running code (`rlio.formats.files.parquet_footer`).

Example:
    >>> import io
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> from rlio.storage import Storage, expand_inputs
    >>> stream = io.BytesIO()
    >>> pq.write_table(pa.table({"t": [0, 1, 2], "x": [5, 6, 7]}), stream, row_group_size=2)
    >>> Storage.open("memory://parquet-files-example").put("a.parquet", stream.getvalue())
    >>> files = ParquetFiles(expand_inputs("memory://parquet-files-example"), Limits())
    >>> files.group(0, 1, ["x"]).to_pydict(), files.all(0).num_rows
    ({'x': [7]}, 3)
    >>> files.close()
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlio.errors import CorruptData, UnsafeData, raise_at
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.inputs import Guard
from rlio.formats.files.parquet_footer import ForeignFile, open_parquet
from rlio.limits import Limits
from rlio.storage import InputFile, InputFiles, Span
from rlio.storage.open_files import OpenFiles

__all__ = ["ParquetFiles"]

# Dictionary-encoded text, stored once with a number in each row, can multiply in memory. Rows are therefore
# read in batches that stay within this limit, regardless of the file's declarations.
_BATCH_BYTES = 64 << 20
_BATCH_ROWS = 8192
_OPEN_FILES = 4
# Bytes in which the footers of most files end: another request reads the rest of a longer one.
_FOOTER_BYTES = 64 << 10


@dataclass
class _Scan:
    """A row group that is read in parts.

    Attributes:
        key: The open file, the row group, and the columns.
        size: Most rows of a batch.
        batches: The batches that were not read yet.
        rest: The last batch that was read, if it has rows that were not asked for.
        at: Number of the first row of ``rest``, or of the next batch.
        held: Bytes of all rows up to there.
    """

    key: tuple[ForeignFile, int, list[str]]
    size: int
    batches: Iterator[Any]
    rest: Any = None
    at: int = 0
    held: int = 0


class ParquetFiles:
    """Open Parquet files, the few most recently used, and the row group that was read last.

    Args:
        files: The files.
        limits: What they may ask for.

    Attributes:
        allowance: That of the files: each claims its rows when it is first opened.
        inputs: Opens them.
    """

    def __init__(self, files: Sequence[InputFile], limits: Limits) -> None:
        self.files: Sequence[InputFile] = files
        self.inputs: InputFiles = InputFiles(files, tail=_FOOTER_BYTES)
        self._limits = limits
        self.allowance: Allowance = Allowance.of(files, limits)
        self._claimed: set[int] = set()
        self._open: OpenFiles[int, ForeignFile] = OpenFiles(_OPEN_FILES, close=ForeignFile.close)
        self._held: tuple[object, Any] = (None, None)
        #: Where a row group is read in parts: the next part goes on there. One at most.
        self._scans: OpenFiles[int, _Scan] = OpenFiles(1)
        #: (file, row group) -> stored and decoded bytes of one that takes more than a row group may.
        self._inflated: dict[tuple[int, int], tuple[int, int]] = {}

    def file(self, number: int) -> ForeignFile:
        """The open file."""
        if (found := self._open.get(number)) is not None:
            return found
        opened = open_parquet(self.inputs.open(number), limits=self._limits)
        if number not in self._claimed:  # A row group of a few bytes may claim any number of rows.
            self._claimed.add(number)
            try:
                self.allowance.claim(opened.arrow.metadata.num_rows)
            except UnsafeData as error:
                opened.close()
                raise_at(error, uri=self.files[number].uri)
        return self._open.add(number, opened)

    def is_open(self, number: int) -> bool:
        """Whether a file is open."""
        return self._open.peek(number) is not None

    def spans(
        self, number: int, group: int, names: Collection[str] | None, share: float = 1.0
    ) -> Iterator[Span]:
        """The bytes of columns of a row group (None: of all); of a file that is not open, that it will be.

        ``share``: of the rows, from the first one on.
        """
        if (opened := self._open.peek(number)) is None:
            yield number, 0, 0
        else:
            yield from ((number, *span) for span in opened.spans(group, names, share))

    def spans_of_rows(
        self, number: int, start: int, stop: int, names: Collection[str] | None
    ) -> Iterator[Span]:
        """`spans` of the row groups that have some rows of a file."""
        opened, first = self._open.peek(number), 0
        for group in range(1 if opened is None else opened.arrow.num_row_groups):
            rows = stop if opened is None else opened.arrow.metadata.row_group(group).num_rows
            if first < stop and start < first + rows:
                yield from self.spans(number, group, names)
            first += rows

    def guarded(self, number: int, record: int | None = None) -> Guard:
        """See `rlio.formats.files.inputs.Guard`."""
        return Guard(self.files[number], record, format="Parquet")

    def group(self, number: int, group: int, names: Collection[str] | None = None) -> Any:
        """A row group as an Arrow table. The last one is kept: many records may be in one."""
        key = (number, group, None if names is None else frozenset(names))
        if self._held[0] != key:
            self._held = (None, None)  # Frees the old row group before the next is read.
            rows = self.file(number).arrow.metadata.row_group(group).num_rows
            self._held = (key, self.rows(number, group, 0, rows, names))
        return self._held[1]

    def rows(
        self, number: int, group: int, start: int, stop: int, names: Collection[str] | None = None
    ) -> Any:
        """Some rows of a row group as an Arrow table, validated.

        Args:
            number: Number of the file.
            group: Number of the row group in it.
            start: First row.
            stop: Row after the last.
            names: Columns; None: all.

        Raises:
            CorruptData: The row group has fewer rows.
            UnsafeData: It exceeds the limits.
        """
        import pyarrow as pa

        file, limits = self.file(number), self._limits
        if (found := file.arrow.metadata.row_group(group).num_rows) > limits.group_rows:
            raise UnsafeData(f"a row group of {found} rows, more than {limits.group_rows}")
        columns = [name for name in file.arrow.schema_arrow.names if names is None or name in names]
        batches, piece = [], self.allowance.piece()
        if (number, group) in self._inflated:  # Its other parts are not decoded only to be refused too.
            limits.check_inflation(*self._inflated[number, group], "a row group")
        scan = self._scan_of(number, group, columns, range(start, stop))
        while scan.at < stop:
            batch = next(scan.batches, None) if scan.rest is None else scan.rest
            if batch is None:
                raise CorruptData(
                    f"found {scan.at} rows in a row group, expected at least {stop} by its footer"
                )
            scan.held += batch.nbytes if scan.rest is None else 0
            if scan.held > limits.group_bytes:  # In all: a page of kilobytes may spell out gigabytes.
                stored = sum(chunk.total_compressed_size for _, chunk in file.columns(group, columns))
                self._inflated[number, group] = stored, scan.held
                limits.check_inflation(stored, scan.held, "a row group")
            low, high = max(start - scan.at, 0), min(stop - scan.at, batch.num_rows)
            if low < high:
                piece.spend(batch.nbytes)
                batch.validate(full=True)
                batches.append(batch.slice(low, high - low))
            if scan.at + batch.num_rows >= stop:
                scan.rest = batch  # Also if it ends here: the next part may begin with its last row.
                break
            scan.rest, scan.at = None, scan.at + batch.num_rows
        if stop < found:
            self._scans.add(number, scan)
        return pa.Table.from_batches(batches, None if batches else file.arrow.schema_arrow).select(columns)

    def _scan_of(self, number: int, group: int, columns: list[str], rows: range) -> _Scan:
        """The scan that goes on to some rows, or a new one; after an error, the next call begins again."""
        file = self.file(number)
        widest = file.widest(group, columns, limits=self._limits)
        most = max(1, min(_BATCH_ROWS, len(rows), min(_BATCH_BYTES, self._limits.group_bytes) // widest))
        scan = self._scans.peek(number)
        self._scans.close()
        goes_on = scan is not None and scan.key == (file, group, columns) and scan.at <= rows.start
        # Its batches are as small as the first part, which may have been a look at a few rows.
        if scan is None or not goes_on or rows.start <= scan.size < most:
            return _Scan((file, group, columns), most, file.arrow.iter_batches(most, [group], columns))
        return scan

    def all(self, number: int, names: Collection[str] | None = None) -> Any:
        """All rows of a file as an Arrow table.

        Raises:
            UnsafeData: They exceed the limits of a row group.
        """
        import pyarrow as pa

        tables, piece = [], self.allowance.piece()
        for group in range(self.file(number).arrow.num_row_groups):
            tables.append(self.group(number, group, names))
            piece.spend(tables[-1].nbytes)
        return pa.concat_tables(tables) if tables else self.file(number).arrow.schema_arrow.empty_table()

    def close(self) -> None:
        """Close all files."""
        self._held = (None, None)
        self._scans.close()
        self._open.close()
        self.inputs.close()
