r"""Files of lines, plain or inside zip files: read in pieces, from any line on, never as a whole.

Members of a zip file are read in place, and never extracted. Members that are not JSON are skipped.

Example:
    >>> from rlio.storage import Storage, expand_inputs
    >>> Storage.open("memory://lines-example").put("a.json", b"{}\n\n{}")
    >>> (file,) = open_line_files(expand_inputs("memory://lines-example/a.json"))
    >>> [(line.number, line.data, line.end) for line in file.lines(100)]
    [(0, b'{}', 3), (1, b'', 4), (2, b'{}', 6)]
"""

from __future__ import annotations

import io
import logging
import sys
import zipfile
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, NamedTuple

from rlio.errors import CorruptData, DataNotFound, UnsafeData, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.storage import InputFile, InputFiles, open_input
from rlio.storage.zip_files import READ_ERRORS, check_member, open_archive

__all__ = ["READ_ERRORS", "Line", "LineFile", "line_of", "open_line_files"]

logger: logging.Logger = logging.getLogger("rlio")

_CHUNK = 1 << 20
_MEMBER_SUFFIXES = (".json", ".jsonl")
# Lines that a member may have for each stored byte, and lines that any member may have. A line costs some
# microseconds and 24 bytes, and 60 million lines pack into 60 KB.
_LINES_PER_BYTE = 1
_FREE_LINES = 1000
# A zip file of no member.
_EMPTY = b"PK\5\6" + bytes(18)


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        number: Number of the line in its file, from 0.
        data: Its bytes, without the line end; None if they exceed the limit.
        start: Offset of its first byte.
        size: Its bytes.
        end: Offset of the next line.
    """

    number: int
    data: bytes | None
    start: int
    size: int
    end: int


@dataclass(frozen=True)
class LineFile:
    """A file of lines, or a member of a zip file.

    Attributes:
        uri: For messages.
        file: The file, or the zip file.
        member: The member of the zip file; its name is never used as a path.
        size: Bytes, if known.
        most_lines: Maximum number of lines, from its stored bytes; None: any number.
        listed: The files that it is one of, and its number there; None: it is opened by itself.
    """

    uri: str
    file: InputFile
    member: zipfile.ZipInfo | None = None
    size: int | None = None
    most_lines: int | None = None
    listed: tuple[InputFiles, int] | None = None

    def open(self, *, scans: bool = False) -> IO[bytes]:
        """Open the file at its start; the caller closes it. ``scans``: see `rlio.storage.open_input`."""
        if self.listed is None:
            stream = open_input(self.file, scans=scans)
        else:
            stream = self.listed[0].open(self.listed[1], scans=scans)
        if self.member is None:
            return stream
        try:
            # Without its directory, which each of many members would read again.
            archive = zipfile.ZipFile(io.BytesIO(_EMPTY))
            archive.fp = stream
            return _Member(archive, archive.open(self.member), stream)
        except BaseException as error:
            stream.close()
            if isinstance(error, (*READ_ERRORS, RuntimeError, LookupError, ValueError)):
                raise CorruptData(f"damaged zip file: {excerpt(str(error))}", uri=self.uri) from error
            raise

    def lines(
        self, limit: int, *, offset: int = 0, number: int = 0, scans: bool = True
    ) -> Generator[Line, None, None]:
        """The lines from ``offset``, where line ``number`` begins.

        Lines end with a newline. White space around a line is dropped, and a byte-order mark at the file's
        start. Memory holds at most ``limit`` bytes of a line. ``scans``: whether all will be read.

        Raises:
            CorruptData: The rest of the file cannot be read.
            UnsafeData: The file has too many lines for its stored bytes.
        """
        limit = min(limit, sys.maxsize - 1)  # readline takes no larger numbers.
        with self.open(scans=scans) as stream:
            try:
                if offset:
                    stream.seek(offset)
                while data := stream.readline(limit + 1):
                    if self.most_lines is not None and number >= self.most_lines:
                        raise UnsafeData(
                            f"more than {self.most_lines} lines in a compressed file of few bytes",
                            uri=self.uri,
                        )
                    size, is_ended = len(data), data.endswith(b"\n")
                    while size > limit and not is_ended and (piece := stream.readline(_CHUNK)):
                        size, is_ended = size + len(piece), piece.endswith(b"\n")  # Only the size counts.
                    end = offset + size
                    size -= is_ended
                    yield line_of(number, data if size <= limit else None, (offset, size, end))
                    offset, number = end, number + 1
            except READ_ERRORS as error:
                raise CorruptData(f"damaged compressed file: {error}", uri=self.uri) from error


class _Member(io.BufferedReader):
    """A member of a zip file; closing it closes the zip file."""

    def __init__(self, archive: zipfile.ZipFile, member: IO[bytes], stream: IO[bytes]) -> None:
        # A member has all of RawIOBase's methods, though its declared type says IO.
        super().__init__(member, _CHUNK)  # type: ignore[arg-type]  # typeshed does not relate the two.
        self._archive = archive
        self._stream = stream

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._archive.close()
            self._stream.close()


def open_line_files(files: Sequence[InputFile], limits: Limits = DEFAULT_LIMITS) -> list[LineFile]:
    """The files to read lines from: plain ``files``, and the JSON members of zip files.

    Raises:
        CorruptData: A zip file is damaged.
        UnsafeData: A member would inflate a thousandfold, or there are too many members.
        DataNotFound: A zip file holds no JSON.
    """
    found: list[LineFile] = []
    inputs = InputFiles(files)
    for number, file in enumerate(files):
        if file.uri.lower().endswith(".zip"):
            found.extend(_members(file, limits))
        else:
            found.append(LineFile(file.uri, file, None, file.size, listed=(inputs, number)))
    _warn_of_twins(found)
    return found


def _members(file: InputFile, limits: Limits) -> Iterable[LineFile]:
    with open_input(file) as stream:
        try:
            with open_archive(stream, limits, uri=file.uri) as archive:
                infos = archive.infolist()
        except (*READ_ERRORS, NotImplementedError, UnicodeError) as error:
            raise CorruptData(f"damaged zip file: {error}", uri=file.uri) from error
    chosen = [info for info in infos if _is_json(info)]
    if not chosen:
        names = ", ".join(excerpt(info.filename, 80) for info in infos[:8]) or "nothing"
        raise DataNotFound(f"found no JSON in the zip file: it holds {names}", uri=file.uri)
    return [
        LineFile(
            _check_member(info, file, limits),
            file,
            info,
            info.file_size,
            _FREE_LINES + _LINES_PER_BYTE * info.compress_size,
        )
        for info in sorted(chosen, key=lambda info: info.filename)
    ]


def _is_json(info: zipfile.ZipInfo) -> bool:
    base = info.filename.rsplit("/", 1)[-1]  # Of a folder: "".
    # File managers add names such as "__MACOSX/._x.json".
    return base.lower().endswith(_MEMBER_SUFFIXES) and not base.startswith(".")


def _check_member(info: zipfile.ZipInfo, file: InputFile, limits: Limits) -> str:
    """The URI of a readable member."""
    uri = f"{file.uri}!{excerpt(info.filename)[1:-1]}"
    check_member(info, limits, uri=uri)
    return uri


def _warn_of_twins(files: Sequence[LineFile]) -> None:
    """Warn if a zip member also lies beside the zip file: RLlib's reader extracted members there."""
    plain = {(file.uri, file.size) for file in files if file.member is None}
    for file in files:
        if file.member is not None:
            folder = file.file.uri.rpartition("/")[0]
            if (f"{folder}/{file.member.filename}", file.size) in plain:
                logger.warning(
                    "%s also lies beside the zip file, with as many bytes, and both are read: pass only one "
                    "of them if they are the same recording",
                    file.uri,
                )


def line_of(number: int, data: bytes | None, place: tuple[int, int, int]) -> Line:
    """A line from its bytes (None: too many) and its start, size and end."""
    if data is not None and number == 0:
        data = data.removeprefix(b"\xef\xbb\xbf")
    return Line(number, None if data is None else data.strip(), *place)
