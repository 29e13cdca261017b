"""CSV: one row a step, with the names of the columns on the first line.

The separator is found by looking at the first lines. Lines before the names that begin with ``#`` are
comments; the last of them has the names if the line after it has none, as ``numpy.savetxt`` writes.

Values may be numbers, flags (``true``, ``false``, 0, 1), times and text, which may have line ends if it is
quoted. An empty value is null: NaN in a floating-point column, and refused in others.
"""

from __future__ import annotations

import codecs
import io
import re
from collections import deque
from collections.abc import Sequence
from typing import IO, Any, Final

from rlio.errors import CorruptData, OptionError, UnknownLayout, UnsafeData, excerpt
from rlio.formats.format import Format, Marks
from rlio.formats.place import Place
from rlio.formats.tables.text_table import TextTable
from rlio.limits import Limits
from rlio.mapping import Mapping

_SEPARATORS: Final = b",;\t|"
_LOOK_BYTES: Final = 1 << 16
_QUOTED: Final = re.compile(rb'"[^"]*"')
_NUMBER: Final = re.compile(rb"[-+]?[0-9][0-9.,]*(?:[eE][-+]?[0-9]+)?")
_UNEVEN: Final = re.compile(r"Expected \d+ columns, got \d+")
#: The separator, as Excel has it in a line of its own.
_EXCEL: Final = re.compile(rb'"?sep=.?"?\s*')
#: What may part values and is not found by looking: several characters, or blanks.
_LONG: Final = re.compile(rb"(?<=\w)(?:[~^#$&@!:/]+| +|[\x01-\x08\x1f])(?=\w)")
#: The one spelling of a whole number that two texts cannot share.
_WHOLE: Final = r"^(0|-?[1-9][0-9]*)$"

FORMAT = Format(
    name="csv",
    title="CSV",
    marks=Marks(endings=(".csv", ".tsv", ".csv.gz", ".tsv.gz"), by_ending=True),
    source="rlio.formats.tables.csv:CsvTable",
    table="rlio.formats.tables.csv:CsvTable",
    about="Columns by rlio's names, or by a mapping (docs/mapping.md).",
)


def _way(separator: object) -> str:
    """How text with a separator of several characters is read, to be appended."""
    if not isinstance(separator, str) or not separator:
        return ""
    text = r"\s+" if separator.isspace() or separator == r"\s+" else re.escape(separator)
    return f"; otherwise pass pandas.read_csv(path, sep={excerpt(text)}, engine='python') to rlio.read"


class CsvTable(TextTable):
    """CSV files; a `Table`.

    Args:
        place: The files.
        limits: Bounds on the files.
        delimiter: Between values; None: the one of ``, ; | `` and tab that the first lines have.
        decimal: Between the digits of a number: a point or a comma.
        names: The names of the columns, if the files do not have them in their first line.
        comment: Lines that begin with this are comments, wherever they are; None: only those that begin with
            ``#`` and come before the names.

    Raises:
        OptionError: An option is illegal, or several separators are possible.
    """

    title = "CSV"

    def __init__(
        self,
        place: Place,
        *,
        limits: Limits,
        delimiter: str | None = None,
        decimal: str = ".",
        names: Sequence[str] | None = None,
        comment: str | None = None,
    ) -> None:
        for name, value in (("delimiter", delimiter), ("comment", comment)):
            if value is not None and (not isinstance(value, str) or len(value) != 1):
                raise OptionError(f"{name}={excerpt(value)}: expected one character{_way(value)}")
        if decimal not in (".", ","):
            raise OptionError(f"decimal={excerpt(decimal)}: expected '.' or ','")
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            raise OptionError(f"names={excerpt(names)}: expected a list of names")
        self._delimiter, self._decimal = delimiter, decimal
        self._given = None if names is None else list(names)
        self._comment = None if comment is None else comment.encode()
        self._names: list[list[str]] = []
        self._separators: list[str] = []
        super().__init__(place, limits=limits)

    def arranged(self, mapping: Mapping) -> Mapping:
        """Ids and categories are texts, unless they are spelled as whole numbers are; see `Table`."""
        import pyarrow as pa

        kinds = {field.name: field.type for field in self._schema}
        ids = kinds.keys() & {*(mapping.episode or ())}
        whole = sorted(
            name for name in ids | kinds.keys() & mapping.codes if pa.types.is_integer(kinds[name])
        )
        self._read_as_text(ids.difference(whole) | self._spelled_otherwise(whole))
        return mapping

    def _spelled_otherwise(self, names: Sequence[str]) -> set[str]:
        """The columns of whole numbers that have another spelling of one, such as 0012 for 12."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found, texts = set[str](), pa.schema([(name, pa.string()) for name in names])
        for file, blocks in enumerate(self._blocks):
            for number in range(len(blocks)):
                rest = [name for name in names if name not in found and name not in self.partitions[file]]
                if not rest:
                    break
                table = self.decode(file, number, rest, texts)
                found |= {
                    name for name in rest if not pc.all(pc.match_substring_regex(table[name], _WHOLE)).as_py()
                }
        return found

    def header(self, stream: IO[bytes]) -> list[str]:
        """See `TextTable`."""
        line = stream.readline(self.limits.line_bytes)
        if line.startswith(b"#{") and b'"t_start"' in line:
            raise UnknownLayout(
                "found the CSV of Stable-Baselines3's Monitor, which has the return and the length of each "
                "episode, and no steps: record steps with rlio.RecordExperience; for the returns, "
                "pandas.read_csv(path, skiprows=1)"
            )
        start, line = stream.tell() - len(line), self._header_line(stream, line)
        if self._given is not None:
            return self._take_given(stream, start)
        if line.count(self._separators[-1].encode()) >= self.limits.columns:
            raise UnsafeData(f"more than {self.limits.columns} columns")
        if self._delimiter is None:
            self._refuse_long_separators(stream, line)
        try:
            line.decode()
        except UnicodeDecodeError as error:
            raise CorruptData(
                f"{excerpt(str(error))}: expected UTF-8; if the file has another encoding, such as utf-16 or "
                "latin-1, pass pandas.read_csv(path, encoding=...) to rlio.read"
            ) from error
        table = self.parse(line.rstrip(b"\r\n") + b"\n", len(self._names), None, None)
        if len(table):
            raise CorruptData(
                "the first line has several rows, parted by carriage returns: expected line feeds, as after "
                "other lines"
            )
        self._refuse_numbers(table.column_names)
        self._names.append(table.column_names)
        return list(table.column_names)

    def _take_given(self, stream: IO[bytes], start: int) -> list[str]:
        """Take the names that were given; the stream is left at the first line that is no comment."""
        assert self._given is not None
        while True:
            stream.seek(start)
            line = stream.readline(self.limits.line_bytes)
            if not line.startswith(self._comment or b"#"):
                break
            start += len(line)
        stream.seek(start)
        self._names.append(self._given)
        return self._given

    def _refuse_long_separators(self, stream: IO[bytes], line: bytes) -> None:
        """Refuse names and a row that several characters part, or one that is not found by looking."""
        separator, here = self._separators[-1].encode(), stream.tell()
        row = stream.readline(self.limits.line_bytes)
        stream.seek(here)
        found = _LONG.search(line) if separator not in line else None
        long = found[0] if found else 2 * separator
        if long in row and (found or 2 * line.count(long) == line.count(separator) > 0):
            raise UnknownLayout(
                f"{excerpt(long.decode())} seems to part the values: expected one of , ; | and tab, or "
                f"another character in format_options={{'delimiter': ...}}{_way(long.decode())}"
            )

    @staticmethod
    def _refuse_numbers(names: Sequence[str]) -> None:
        """Refuse a first line that has a row instead of names. Pandas numbers columns without names."""
        if all(_NUMBER.fullmatch(name.strip().encode()) for name in names) and any(
            not name.strip().isdecimal() for name in names
        ):
            raise UnknownLayout(
                f"the first line has the numbers {excerpt(list(names), 60)}, expected the names of the "
                "columns: pass format_options={'names': ['x', 'y', ...]}"
            )

    def _header_line(self, stream: IO[bytes], line: bytes) -> bytes:
        """The line with the names, of which ``line`` is the first that may be it; rows follow in the stream.

        It also finds the separator.
        """
        mark, last, start = self._comment or b"#", b"", 0
        line = line.removeprefix(codecs.BOM_UTF8)
        if _EXCEL.fullmatch(line):
            line = stream.readline(self.limits.line_bytes)
        while line.startswith(mark):
            start, last = stream.tell(), line[len(mark) :].strip() + b"\n"
            line = stream.readline(self.limits.line_bytes)
        if not line.strip() and not last.strip():
            raise CorruptData("the first line is empty, expected the names of the columns")
        here = stream.tell()
        self._separators.append(self._separator(line if line.strip() else last, stream.read(_LOOK_BYTES)))
        stream.seek(here)
        cells, names = (one.split(self._separators[-1].encode()) for one in (line, last))
        has_number = any(_NUMBER.fullmatch(cell.strip()) for cell in cells)
        if last.strip() and (not line.strip() or (len(cells) == len(names) and has_number)):
            stream.seek(start)
            return self._separators[-1].encode().join(name.strip() for name in names) + b"\n"
        return line

    def _separator(self, line: bytes, rows: bytes) -> str:
        """The separator of the next file, by a line and the beginning of the rows that follow it."""
        file = len(self._separators)
        usual = "\t" if self.files[file].path.lower().endswith((".tsv", ".tsv.gz")) else ","
        if self._delimiter is not None:
            return self._delimiter
        *whole, _ = (_QUOTED.sub(b"", rows) + b"\n").split(b"\n")
        whole = whole[:-1] if len(rows) == _LOOK_BYTES else whole  # The last one may be cut off.
        counts = [(one, _QUOTED.sub(b"", line).count(one)) for one in map(bytes, zip(_SEPARATORS))]
        rows_of = [row for row in whole[:20] if row.strip() and not row.startswith(self._comment or b"#")]
        fits = [one for one, count in counts if count and all(row.count(one) == count for row in rows_of)]
        if len(fits) > 1:
            raise OptionError(
                f"each of {excerpt([one.decode() for one in fits])} may part the values of the first lines: "
                f"pass format_options={{'delimiter': {excerpt(fits[0].decode())}}} or another one",
                uri=self.files[file].uri,
            )
        return fits[0].decode() if fits else usual

    def is_open(self, text: bytes, file: int) -> bool:
        """See `TextTable`. As for pyarrow, a quote has a meaning only at the beginning of a value."""
        if b'"' not in text:
            return False
        delimiter = re.escape(self._separators[file].encode())
        # The look behind comes after the quote: searching for a quote first is four times as fast.
        quoted = re.compile(rb'"(?<![^\r\n%s]")[^"]*+(?:""[^"]*+)*+("?)' % delimiter)
        last = deque(quoted.finditer(text), maxlen=1)
        return bool(last) and not last[0][1]

    def parse(self, text: bytes, file: int, names: Sequence[str] | None, schema: Any) -> Any:
        """See `TextTable`."""
        import pyarrow as pa
        from pyarrow import csv

        known = self._names[file] if file < len(self._names) else None
        kinds = None if schema is None else {name: schema.field(name).type for name in names or ()}
        if known is not None and self._comment is not None:
            text = self._without_comments(text, file, self._comment)
            if not text.strip():
                return pa.table({})
        try:
            return csv.read_csv(
                io.BytesIO(text),
                read_options=csv.ReadOptions(
                    column_names=known, use_threads=False, block_size=max(1, len(text))
                ),
                parse_options=csv.ParseOptions(delimiter=self._separators[file]),
                convert_options=csv.ConvertOptions(
                    include_columns=names,
                    column_types=kinds,
                    strings_can_be_null=False,
                    decimal_point=self._decimal,
                ),
            )
        except pa.ArrowInvalid as error:
            if self._comment is None and re.search(rb"^#", text, re.MULTILINE):
                raise CorruptData(
                    f"not readable as CSV: {excerpt(str(error))}; if the lines that begin with # are "
                    "comments, pass format_options={'comment': '#'}"
                ) from error
            if _UNEVEN.search(str(error)):
                raise CorruptData(
                    f"not readable as CSV: {excerpt(str(error))}; if the last values of a row are a list, "
                    "which the separator parts too, read the lines yourself, and pass one list a row to "
                    "rlio.from_arrays; delete lines with other notes"
                ) from error
            raise

    def _without_comments(self, text: bytes, file: int, mark: bytes) -> bytes:
        """Whole lines without those that are comments."""
        if not re.search(rb"^" + re.escape(mark), text, re.MULTILINE):
            return text
        kept, value = [], b""
        for line in text.splitlines(keepends=True):
            if value:  # A quoted value goes on.
                value += line
            elif not line.startswith(mark):
                value = line
            if value and not self.is_open(value, file):
                kept.append(value)
                value = b""
        return b"".join([*kept, value])
