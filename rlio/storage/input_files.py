"""`InputFiles`: opens the files of a list; small ones on remote stores in one request each, ahead if in turn.

Example:
    >>> from rlio.storage.filesystem import Storage
    >>> storage = Storage.open("memory://input-files-example")
    >>> for name in ("a", "b"):
    ...     storage.put(name, name.encode())
    >>> files = InputFiles(expand_inputs("memory://input-files-example"))
    >>> [files.open(number).read() for number in range(2)]
    [b'a', b'b']
    >>> files.close()
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import IO, Any, Final, cast

from rlio.storage.clients import TIMEOUT
from rlio.storage.inputs import InputFile, expand_inputs, open_input, opened_remote
from rlio.storage.parallel import Plan, Range
from rlio.storage.remote import RemoteFolder
from rlio.support.progress import each

__all__ = ["InputFiles", "each_file", "expand_inputs"]

# A file of up to this size is fetched whole: its bytes take as long as the way there and back that another
# request would cost.
_WHOLE_BYTES: Final = 4 << 20


def each_file(files: Sequence[InputFile]) -> Iterator[int]:
    """The numbers of the files, for work that `rlio.support.progress.watched` sees, in bytes."""
    return each(range(len(files)), size=lambda number: files[number].size)


class InputFiles:
    """Files, opened by their numbers; used from one thread at a time.

    The second file that is opened in turn begins a `Plan`: those after it are fetched ahead. Rows, order and
    errors are those of `open_input`.

    Args:
        files: The files, in the order in which they are most often read.
        tail: Bytes at the end of larger files that are fetched likewise, because they are read first.
        locks: Whether the reader of a file holds a lock as it reads; see `FarFile`. Not with ``tail``.
    """

    def __init__(self, files: Sequence[InputFile], *, tail: int = 0, locks: bool = False) -> None:
        self._files, self._tail, self._locks = files, tail, locks
        self._stores: dict[int, _Store] = {}
        self._plan: Plan | None = None
        self._last: int | None = None

    def open(self, number: int, *, scans: bool = False) -> IO[bytes]:
        """Open a file for reading from its start; the caller closes it. ``scans``: see `open_input`.

        Raises:
            DataNotFound, UnknownLayout, StoreError: As `open_input`.
        """
        file = self._files[number]
        wanted = _range_of(file, self._stores, self._tail)
        # A file that is opened again may have been damaged on its way, or been mended.
        again = number == self._last
        if file.fs is not None and not again:
            self._announce(number)
        if wanted is None:
            return open_input(file, scans=scans, locks=self._locks)
        whole = partial(self._fetched, file, wanted, ahead=not again)
        return open_input(file, fetch=whole, scans=scans, locks=self._locks)

    def _announce(self, number: int) -> None:
        last, self._last = self._last, number
        if last is None or number != last + 1:
            self._drop()  # What it has is not read next.
        elif self._plan is None:
            self._plan = Plan()
            self._plan.expect(_ranges_of(self._files, number, self._stores, self._tail))

    def _fetched(self, file: InputFile, wanted: Range, *, ahead: bool) -> IO[bytes] | None:
        """The bytes of a file, perhaps from ahead; None: it has another size than when it was listed."""
        data = self._plan.take(*wanted) if ahead and self._plan is not None else None
        if data is None:
            data = wanted.storage.fetch(*wanted[1:])
        if len(data) != wanted.stop - 1 - wanted.start:
            return None
        # To a reader, both are open files.
        return io.BytesIO(data) if wanted.start == 0 else cast("IO[bytes]", _Tailed(file, wanted.start, data))

    def close(self) -> None:
        """Drop what was fetched ahead. The files may be opened again."""
        self._drop()
        self._last = None

    def _drop(self) -> None:
        if self._plan is not None:
            self._plan.forget()
            self._plan = None


class _Store(RemoteFolder):
    """A filesystem whose files have its own paths."""

    def full(self, path: str) -> str:
        return path

    def fetch(self, path: str, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)``; fewer at the end of the file."""
        return self.read(path, start, stop)

    def hold(self, plan: Plan) -> None:
        """See `Storage.hold`; here, who holds the plan asks it."""


class _Tailed(io.RawIOBase):
    """A file whose end is here; the filesystem opens it as soon as other bytes are read."""

    def __init__(self, file: InputFile, start: int, tail: bytes) -> None:
        self._file, self._start, self._tail = file, start, tail
        self._at = 0
        self._rest: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._start + len(self._tail)}
        if base[whence] + offset < 0:
            raise ValueError(f"byte {base[whence] + offset} is before the first byte of the file")
        self._at = base[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._start:
            piece = self._tail[self._at - self._start :][: len(buffer)]
        else:
            piece = self._read(len(buffer))
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _read(self, size: int) -> bytes:
        rest = self._opened()
        rest.seek(self._at)
        return bytes(rest.read(size))

    def _opened(self) -> Any:
        if self._rest is None:
            self._rest = opened_remote(self._file)
        return self._rest

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        """See `FarFile.expect`."""
        if (expect := getattr(self._opened(), "expect", None)) is not None:
            expect(spans)

    def close(self) -> None:
        if self._rest is not None:
            self._rest.close()
        super().close()


def _range_of(file: InputFile, stores: dict[int, Any], tail: int) -> Range | None:
    """What is fetched to open a file, to the byte after its last; None: nothing is."""
    if file.fs is None or file.size is None or (file.size > _WHOLE_BYTES and not tail):
        return None
    start = 0 if file.size <= _WHOLE_BYTES else max(0, file.size - tail)
    store = stores.get(id(file.fs)) or stores.setdefault(id(file.fs), _Store(file.fs, "", timeout=TIMEOUT))
    return None if store.at_once == 1 else Range(store, file.path, start, file.size + 1)


def _ranges_of(files: Sequence[InputFile], first: int, stores: dict[int, Any], tail: int) -> Iterator[Range]:
    """Those of the files from a number on. It refers to no `InputFiles`, which has the plan that has this."""
    for number in range(first, len(files)):
        if (wanted := _range_of(files[number], stores, tail)) is not None:
            yield wanted
