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
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

from rlio.storage.filesystem import TIMEOUT
from rlio.storage.inputs import InputFile, expand_inputs, open_input
from rlio.storage.parallel import Plan, Range
from rlio.storage.remote import RemoteFolder

__all__ = ["InputFiles", "expand_inputs"]

# A file of up to this size is fetched whole: its bytes take as long as the way there and back that another
# request would cost.
_WHOLE_BYTES: Final = 4 << 20


class InputFiles:
    """Files, opened by their numbers; used from one thread at a time.

    The second file that is opened in turn begins a `Plan`: those after it are fetched ahead. Rows, order and
    errors are those of `open_input`.

    Args:
        files: The files, in the order in which they are most often read.
    """

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._files = files
        self._stores: dict[int, _Store] = {}
        self._plan: Plan | None = None
        self._last: int | None = None

    def open(self, number: int) -> IO[bytes]:
        """Open a file for reading from its start; the caller closes it.

        Raises:
            DataNotFound, UnknownLayout, StoreError: As `open_input`.
        """
        file = self._files[number]
        wanted = None if file.fs is None else _range_of(file, self._stores)
        if file.fs is not None:
            self._announce(number)
        return open_input(file) if wanted is None else open_input(file, fetch=lambda: self._fetched(wanted))

    def _announce(self, number: int) -> None:
        last, self._last = self._last, number
        if number == last:
            return
        if last is None or number != last + 1:
            self._drop()  # What it has is not read next.
        elif self._plan is None:
            self._plan = Plan()
            self._plan.expect(_ranges_of(self._files, number, self._stores))

    def _fetched(self, wanted: Range) -> IO[bytes] | None:
        """All bytes of a file; None: it has another size than when it was listed."""
        data = None if self._plan is None else self._plan.take(*wanted)
        if data is None:
            data = wanted.storage.fetch(*wanted[1:])
        return io.BytesIO(data) if len(data) == wanted.stop - 1 else None

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


def _range_of(file: InputFile, stores: dict[int, Any]) -> Range | None:
    """What is fetched to open a file, to the byte after its last; None: it is not fetched whole."""
    if file.fs is None or file.size is None or file.size > _WHOLE_BYTES:
        return None
    store = stores.get(id(file.fs)) or stores.setdefault(id(file.fs), _Store(file.fs, "", timeout=TIMEOUT))
    return None if store.at_once == 1 else Range(store, file.path, 0, file.size + 1)


def _ranges_of(files: Sequence[InputFile], first: int, stores: dict[int, Any]) -> Iterator[Range]:
    """Those of the files from a number on. It refers to no `InputFiles`, which has the plan that has this."""
    for number in range(first, len(files)):
        if (wanted := _range_of(files[number], stores)) is not None:
            yield wanted
