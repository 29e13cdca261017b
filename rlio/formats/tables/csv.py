"""CSV: one row a step, with the names of the columns on the first line.

Values may be numbers, flags (``true``, ``false``, 0, 1), times and text, which may have line ends if it is
quoted. An empty value is null: NaN in a floating-point column, and refused in others.
"""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Sequence
from typing import IO, Any

from rlio.errors import CorruptData, OptionError, UnknownLayout, UnsafeData, excerpt
from rlio.formats.format import Format, Marks
from rlio.formats.place import Place
from rlio.formats.tables.text_table import TextTable
from rlio.limits import Limits

FORMAT = Format(
    name="csv",
    title="CSV",
    marks=Marks(endings=(".csv", ".tsv"), by_ending=True),
    source="rlio.formats.tables.csv:CsvTable",
    table="rlio.formats.tables.csv:CsvTable",
    advice="read it with rlio.read",
    about="Columns by rlio's names, or by a mapping (docs/mapping.md).",
)


class CsvTable(TextTable):
    """CSV files; a `Table`.

    Args:
        place: The files.
        limits: Bounds on the files.
        delimiter: Between values; None: a comma, and a tab in files that end in .tsv.
    """

    title = "CSV"

    def __init__(self, place: Place, *, limits: Limits, delimiter: str | None = None) -> None:
        if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1):
            raise OptionError(f"delimiter={excerpt(delimiter)}: expected one character")
        self._delimiter = delimiter
        self._names: list[list[str]] = []
        super().__init__(place, limits=limits)

    def header(self, stream: IO[bytes]) -> list[str]:
        """See `TextTable`."""
        line = stream.readline(self.limits.line_bytes)
        if line.startswith(b"#{") and b'"t_start"' in line:
            raise UnknownLayout(
                "found the CSV of Stable-Baselines3's Monitor, which has the return and the length of each "
                "episode, and no steps: record steps with rlio.RecordExperience; for the returns, "
                "pandas.read_csv(path, skiprows=1)"
            )
        if not line.strip():
            raise CorruptData("the first line is empty, expected the names of the columns")
        if line.count(self._parse_options(len(self._names)).delimiter.encode()) >= self.limits.columns:
            raise UnsafeData(f"more than {self.limits.columns} columns")
        table = self.parse(line.rstrip(b"\r\n") + b"\n", len(self._names), None, None)
        if len(table):
            raise CorruptData(
                "the first line has several rows, parted by carriage returns: expected line feeds, as after "
                "other lines"
            )
        self._names.append(table.column_names)
        return list(table.column_names)

    def is_open(self, text: bytes, file: int) -> bool:
        """See `TextTable`. As for pyarrow, a quote has a meaning only at the beginning of a value."""
        if b'"' not in text:
            return False
        delimiter = re.escape(self._parse_options(file).delimiter.encode())
        # The look behind comes after the quote: searching for a quote first is four times as fast.
        quoted = re.compile(rb'"(?<![^\r\n%s]")[^"]*+(?:""[^"]*+)*+("?)' % delimiter)
        last = deque(quoted.finditer(text), maxlen=1)
        return bool(last) and not last[0][1]

    def _parse_options(self, file: int) -> Any:
        from pyarrow import csv

        tabs = self.files[file].path.lower().endswith(".tsv")
        return csv.ParseOptions(delimiter=self._delimiter or ("\t" if tabs else ","))

    def parse(self, text: bytes, file: int, names: Sequence[str] | None, schema: Any) -> Any:
        """See `TextTable`."""
        from pyarrow import csv

        known = self._names[file] if file < len(self._names) else None
        kinds = None if schema is None else {name: schema.field(name).type for name in names or ()}
        return csv.read_csv(
            io.BytesIO(text),
            read_options=csv.ReadOptions(column_names=known, use_threads=False, block_size=max(1, len(text))),
            parse_options=self._parse_options(file),
            convert_options=csv.ConvertOptions(
                include_columns=names, column_types=kinds, strings_can_be_null=False
            ),
        )
