"""`TextTable`: files of lines (CSV, JSON lines) as a `Table`, parsed by pyarrow in blocks of whole lines.

Opening a file parses it once, to learn the types of the columns and where the blocks begin. Memory holds one
block, and the parsed blocks that `Pieces` keeps. Of files compressed by gzip, an earlier block is found by
inflating the file from its beginning.
"""

from __future__ import annotations

import gzip
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import IO, Any, Final, cast

from rlio.errors import CorruptData, UnsafeData, excerpt
from rlio.formats.files.inputs import Guard
from rlio.formats.place import Place
from rlio.formats.tables.table import Pieces
from rlio.limits import Limits
from rlio.storage import InputFile, InputFiles, each_file, open_input
from rlio.storage.open_files import OpenFiles
from rlio.support.calls import closing_on_error
from rlio.support.progress import reached

__all__ = ["TextTable"]

_BLOCK_BYTES: Final = 1 << 20
_OPEN_FILES: Final = 4
#: Bytes of a column that a byte of text becomes at most: `1,` is a number of eight.
_PARSED: Final = 8
#: Numbers that may be beyond float64: of more than 308 digits, or with an exponent of three.
_NUMBER: Final = re.compile(
    rb"(?<![\w.])[-+]?[0-9]{309,}(?:\.[0-9]*)?|(?<![\w.])[-+]?[0-9]+(?:\.[0-9]*)?[eE]\+?[0-9]{3,}"
)
_INFINITY: Final = re.compile(rb"\binf(?:inity)?\b", re.IGNORECASE)


class _Inflated(gzip.GzipFile):
    """The text of a compressed file; closing it closes the file."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(fileobj=stream, mode="rb")
        self._stored = stream

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._stored.close()


def _size(file: InputFile) -> int:
    """Stored bytes of a file."""
    if file.size is not None:
        return file.size
    with open_input(file) as stream:
        return stream.seek(0, os.SEEK_END)


class TextTable(Pieces):
    """Base of tables of text; a `Table`.

    Args:
        place: The files.
        limits: Bounds on the files.
    """

    #: Of the format, for messages.
    title = "text"

    def __init__(self, place: Place, *, limits: Limits) -> None:
        super().__init__(place.uri, place.files, limits)
        self.limits: Limits = limits
        self._inputs = InputFiles(place.files)
        # A compressed file is inflated from its beginning, whatever is read of it.
        if not any(map(self._is_packed, range(len(place.files)))):
            self.inputs: InputFiles | None = self._inputs
        self._open: OpenFiles[int, IO[bytes]] = OpenFiles(_OPEN_FILES, close=lambda stream: stream.close())
        #: Of each file: where each block begins, and its bytes.
        self._blocks: list[list[tuple[int, int]]] = []
        self._schema: Any = None
        schemas = []
        with closing_on_error(self):
            for number in each_file(place.files):
                with Guard(place.files[number], format=self.title):
                    schemas += self._index(number)
            self._schema = _joined(schemas)

    def header(self, stream: IO[bytes]) -> list[str]:
        """Read the names before the rows, if there are any, and leave the stream behind them."""
        return []

    def parse(self, text: bytes, file: int, names: Sequence[str] | None, schema: Any) -> Any:
        """Parse a block.

        Args:
            text: Whole lines, not all of them empty.
            file: Number of the file.
            names: Columns; None: all.
            schema: Their types; None: as the text has them.
        """
        raise NotImplementedError

    def is_open(self, text: bytes, file: int) -> bool:
        """Whether a value that begins in ``text`` goes on after it."""
        return False

    def _index(self, number: int) -> list[Any]:
        """Find the blocks of a file; gives the schema of each."""
        blocks, rows, schemas = [], [], []
        is_packed, stored = self._is_packed(number), 0
        # It stays open: what was fetched is read again, for the episodes and their rows.
        stream = self._open.add(number, self._opened(number, scans=True))
        head = self.header(stream)
        names = dict.fromkeys(head)
        is_open = partial(self.is_open, file=number)
        for start, text in _blocks(stream, self.limits.line_bytes, is_open):
            if is_packed:
                stored = stored or _size(self.files[number])
                self.limits.check_inflation(stored, start + len(text), "a compressed file")
            else:
                reached(start, self.files[number].size or 0)
            if not text.strip():
                continue
            self.allowance.piece().spend(_PARSED * len(text))
            table = self.parse(text, number, None, None)
            _check_finite(table, text)
            if len(table):
                blocks.append((start, len(text)))
                rows.append(len(table))
                schemas.append(table.schema)
                names.update(dict.fromkeys(table.schema.names))
        if len(names) > self.limits.columns:
            raise UnsafeData(f"{len(names)} columns: more than {self.limits.columns}")
        self._blocks.append(blocks)
        # An empty file of lines names no column.
        self.add_pieces(head or list(names) or self.names, rows)
        return schemas

    def _read_as_text(self, names: Collection[str]) -> None:
        """Give columns the type of texts, whatever their values look like."""
        import pyarrow as pa

        for name in names:
            self._schema = self._schema.set(self._schema.get_field_index(name), pa.field(name, pa.string()))

    def decode(self, file: int, piece: int, names: Sequence[str], schema: Any = None) -> Any:
        """See `Pieces`. ``schema``: other types than those of the table."""
        with Guard(self.files[file], format=self.title):
            stream = self._open.get(file) or self._open.add(file, self._opened(file))
            start, size = self._blocks[file][piece]
            self.allowance.piece().spend(_PARSED * size)
            stream.seek(start)
            return self.parse(stream.read(size), file, names, schema or self._schema)

    def places(self, file: int, piece: int, names: Collection[str]) -> Iterator[tuple[int, int]]:
        """See `Pieces`."""
        start, size = self._blocks[file][piece]
        yield start, start + size

    def _is_packed(self, file: int) -> bool:
        return self.files[file].path.lower().endswith(".gz")

    def _opened(self, file: int, *, scans: bool = False) -> IO[bytes]:
        """The text of a file, from its beginning; the caller closes it."""
        stream = self._inputs.open(file, scans=scans)
        return cast("IO[bytes]", _Inflated(stream)) if self._is_packed(file) else stream

    def close(self) -> None:
        """Close all files."""
        super().close()
        self._open.close()
        self._inputs.close()


def _check_finite(table: Any, text: bytes) -> None:
    """Refuse a number beyond float64, which pyarrow parses as infinity."""
    found = {name: sum(map(_infinities, table.column(name).chunks)) for name in table.column_names}
    count = sum(found.values())
    if not count or count <= len(_INFINITY.findall(text)):
        return
    spelled = [one for one in _NUMBER.findall(text) if math.isinf(float(one))]
    if spelled:
        raise CorruptData(
            f"found {excerpt(spelled[0].decode(), 40)}, expected numbers that float64 holds: write inf if "
            "you mean it, or text",
            column=next(name for name, infinite in found.items() if infinite),
        )


def _infinities(values: Any) -> int:
    """How many values are infinite."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(values.type):
        return sum(_infinities(values.field(part)) for part in range(values.type.num_fields))
    if pa.types.is_list(values.type):
        return _infinities(values.values)
    if not pa.types.is_floating(values.type):
        return 0
    return pc.sum(pc.is_inf(values)).as_py() or 0


def _blocks(stream: IO[bytes], most: int, is_open: Callable[[bytes], bool]) -> Iterator[tuple[int, bytes]]:
    """(offset, whole lines) of a stream from where it is. No block ends within a value."""
    while True:
        start = stream.tell()
        text = stream.read(_BLOCK_BYTES)
        if not text:
            return
        if not text.endswith(b"\n"):
            text += _line(stream, most)
        if is_open(text):
            lines, size = [text], 0
            while True:
                lines.append(_line(stream, most - size))
                size += len(lines[-1])
                if not lines[-1]:
                    raise CorruptData("a quoted value does not end")
                if not is_open(b'"' + lines[-1]):
                    break
            text = b"".join(lines)
        yield start, text


def _line(stream: IO[bytes], most: int) -> bytes:
    line = stream.readline(most + 1)
    if len(line) > most:
        raise UnsafeData(f"a line of more than {most} bytes: raise Limits.line_bytes if it is yours")
    return line


def _joined(schemas: Sequence[Any]) -> Any:
    """The types that hold all values of each column: text, if some are numbers and some text."""
    import pyarrow as pa

    kinds: dict[str, Any] = {}
    for schema in schemas:
        for field in schema:
            if field.name not in kinds or field.type == kinds[field.name]:
                kinds[field.name] = field.type
                continue
            both = [pa.schema([("x", kind)]) for kind in (kinds[field.name], field.type)]
            try:
                kinds[field.name] = pa.unify_schemas(both, promote_options="permissive").field("x").type
            except pa.ArrowException as error:
                if any(pa.types.is_nested(one.field("x").type) for one in both):
                    raise CorruptData(
                        f"found {both[0].field('x').type} and {both[1].field('x').type} in one column",
                        column=field.name,
                    ) from error
                kinds[field.name] = pa.string()
    return pa.schema(list(kinds.items()))
