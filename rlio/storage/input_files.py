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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import IO, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from rlio.storage.clients import TIMEOUT, Clients
from rlio.storage.failures import explained
from rlio.storage.far_file import GAP, FarFile, Requests, Span, joined, pieces
from rlio.storage.inputs import InputFile, expand_inputs, open_input, opened_remote
from rlio.storage.parallel import Plan, Range
from rlio.storage.remote import RemoteFolder
from rlio.support.forks import cached_property
from rlio.support.progress import each

__all__ = ["InputFiles", "Span", "each_file", "expand_inputs"]


# A file of up to this size is fetched whole: its bytes take as long as the way there and back that another
# request would cost.
_WHOLE_BYTES: Final = 4 << 20
# Stated bytes that are put into the order of their files.
_SORTED_BYTES: Final = 8 << 20
# Bytes that are fetched at once for readers that hold a lock as they read, so that they wait seldom.
_HELD_BYTES: Final = 32 << 20


def each_file(files: Sequence[InputFile]) -> Iterator[int]:
    """The numbers of the files, for work that `rlio.support.progress.watched` sees, in bytes."""
    return each(range(len(files)), size=lambda number: files[number].size)


class InputFiles:
    """Files, opened by their numbers; used from one thread at a time.

    The second file that is opened in turn begins a `Plan`: those after it are fetched ahead. Where the reader
    states what it reads next (`expect`), the plan has that instead. Rows, order and errors are those of
    `open_input`.

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
        #: Whether the plan has what `expect` was told.
        self._is_stated = False
        #: What was opened of remote files, with their numbers, as long as its reader has it.
        self._streams: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        #: Those for larger files of which a plan has ranges, until they are opened.
        self._requests: WeakValueDictionary[int, Requests] = WeakValueDictionary()
        #: Of larger files that were opened, also those that were listed without a size.
        self._sizes: dict[int, int] = {}
        #: Whether files of the stores have ranges, as far as known.
        self._has_ranges = True
        #: With ``locks``: what `expect` was told and `hold` did not fetch yet, and what it fetched in the
        #: last two calls, and in the last.
        self._coming: Iterator[Span] | None = None
        self._fetched: set[Span] = set()
        self._held: set[Span] = set()

    def open(self, number: int, *, scans: bool = False) -> IO[bytes]:
        """Open a file for reading from its start; the caller closes it. ``scans``: see `open_input`.

        Raises:
            DataNotFound, UnknownLayout, StoreError: As `open_input`.
        """
        file = self._files[number]
        if file.fs is None:
            return open_input(file)
        # A file that is opened again may have been damaged on its way, or been mended.
        again = number == self._last
        if not again:
            self._announce(number)
        return open_input(file, fetch=partial(self._opened, number, scans=scans, ahead=not again))

    def _announce(self, number: int) -> None:
        last, self._last = self._last, number
        if self._is_stated:
            return
        if last is None or number != last + 1:
            self._drop()  # What it has is not read next.
        elif self._plan is None:
            self._plan = Plan()
            self._plan.expect(_ranges_of(self._files, number, self._stores, self._tail))

    def _opened(self, number: int, *, scans: bool, ahead: bool) -> Any:
        """A remote file, which is fetched, perhaps ahead, or read in ranges."""
        wanted = self._range_of(number)
        data = None if wanted is None else self._whole(wanted, ahead=ahead)
        if wanted is None or data is None:
            stream = self._far(number, scans=scans)
        elif wanted.start == 0:
            stream = io.BytesIO(data)
        else:
            stream = _Tailed(wanted.start, data, partial(self._far, number))
        self._streams[stream] = number
        return stream

    def _whole(self, wanted: Range, *, ahead: bool) -> bytes | None:
        """The bytes of a file, perhaps from ahead; None: it has another size than when it was listed."""
        data = self._plan.take(*wanted) if ahead and self._plan is not None else None
        if data is None:
            data = wanted.storage.fetch(*wanted[1:])
        return data if len(data) == wanted.stop - 1 - wanted.start else None

    def _far(self, number: int, *, scans: bool = False) -> Any:
        """A larger file; what was requested of it ahead is its own."""
        file = self._files[number]
        requests = self._requests.pop(number, None) or Requests(file.fs, file.path)
        found = opened_remote(file, scans=scans, locks=self._locks, requests=requests)
        if isinstance(found, FarFile):
            self._sizes[number] = found.size
        elif requests.is_shared:
            self._has_ranges = False
        return found

    def _range_of(self, number: int) -> Range | None:
        return _range_of(self._files[number], self._stores, self._tail)

    # ---- what is read next ----

    @cached_property
    def are_far(self) -> bool:
        """Whether a request for one of the files takes a round trip, so that `expect` saves time."""
        stores = {id(file.fs): file.fs for file in self._files if file.fs is not None}
        return any(Clients(fs, timeout=TIMEOUT).at_once > 1 for fs in stores.values())

    def expect(self, spans: Iterable[Span]) -> None:
        """State which bytes are read next, about in this order: in place of those before.

        They are requested side by side, as far as a `Plan` goes; with ``locks``, by `hold`. What is read
        otherwise is read as without.

        Args:
            spans: Taken as far as there is room, also by later reads.
        """
        if self._locks:
            self._coming, self._fetched = iter(spans), self._held
            return
        self._is_stated = True
        self._plan = self._plan or Plan()
        self._plan.expect(self._stated(joined(_by_file(spans), gap=GAP), self._plan))

    def _stated(self, spans: Iterator[Span], plan: Plan) -> Iterator[Range]:
        """The ranges to request for stated bytes. Small files that are not open are requested whole."""
        last = None
        for number, start, stop in spans:
            wanted = self._range_of(number)
            if number != last and wanted is not None and self._open_stream(number) is None:
                yield wanted
            last = number
            if wanted is None or wanted.start > 0:
                yield from self._ranges(number, start, stop, plan)

    def _open_stream(self, number: int) -> Any:
        """What was opened last of a remote file and is open; None: nothing."""
        found = [stream for stream, one in self._streams.items() if one == number and not stream.closed]
        return found[-1] if found else None

    def _ranges(self, number: int, start: int, stop: int, plan: Plan | None = None) -> Iterator[Range]:
        """The ranges of a larger file to request for stated bytes."""
        file, stream = self._files[number], self._open_stream(number)
        size = self._sizes.get(number, file.size)
        if file.fs is None or size is None or not self._has_ranges:
            return
        requests: Requests | None = getattr(stream, "requests", None) or self._requests.get(number)
        if requests is None:
            requests = self._requests[number] = Requests(file.fs, file.path)
        if not requests.is_shared:
            return
        if plan is not None:
            requests.state(plan)
        kept: frozenset[int] = getattr(stream, "kept", frozenset())
        yield from pieces(requests, size, start, stop, kept)

    def hold(self, spans: Iterable[Span]) -> None:
        """Fetch bytes that are read next, and some of those that were stated, side by side.

        Only with ``locks``, and while the reader does not hold its lock. Nothing is fetched before `expect`,
        and what the last two calls fetched is not again.

        Args:
            spans: The bytes that are read next, of open files.

        Raises:
            StoreError: A request failed.
        """
        if (coming := self._coming) is None:
            return
        spans = [*spans]
        needed = [span for span in spans if span not in self._fetched]
        if not needed:
            return
        size = _HELD_BYTES - sum(stop - start for _, start, stop in needed)
        taken = {*needed, *self._more(coming, size)}
        streams = {number: self._open_stream(number) for number, _, _ in taken}
        found = {n: dict[int, bytes]() for n, stream in streams.items() if isinstance(stream, FarFile)}
        ranges = [
            (number, wanted)
            for number, start, stop in joined(sorted(taken), gap=GAP)
            if number in found
            for wanted in self._ranges(number, start, stop)
        ]
        plan = Plan()
        plan.expect(wanted for _, wanted in ranges)
        for number, wanted in ranges:
            with explained(self._files[number].uri):
                data = plan.take(*wanted)
                found[number][wanted.start] = wanted.storage.fetch(*wanted[1:]) if data is None else data
        self._fetched, self._held = self._held | taken, taken
        for number, held in found.items():
            streams[number].hold(held, [span[1:] for span in spans if span[0] == number])

    def _more(self, coming: Iterator[Span], size: int) -> Iterator[Span]:
        """The next stated bytes, about so many, up to those of a file that is not open yet."""
        while size > 0 and (span := next(coming, None)) is not None:
            number, start, stop = span
            if self._open_stream(number) is None:
                if self._coming is coming:  # Otherwise another thread has dropped it.
                    self._coming = chain([span], coming)
                return
            if span not in self._fetched:
                size -= stop - start
                yield span

    def forget(self) -> None:
        """Drop what was stated, and fetched ahead. For any thread."""
        self._coming = None
        if (plan := self._plan) is not None:
            plan.forget()

    def close(self) -> None:
        """Drop what was fetched ahead, and was stated. The files may be opened again."""
        self._drop()
        self._last = None

    def _drop(self) -> None:
        self._is_stated = False
        self._coming, self._fetched, self._held = None, set(), set()
        if self._plan is not None:
            self._plan.forget()
            self._plan = None


def _by_file(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans, of which some megabytes at a time are in the order of their files: columns are read in turn."""
    files, size = dict[int, list[Span]](), 0
    for span in spans:
        files.setdefault(span[0], []).append(span)
        size += span[2] - span[1]
        if size >= _SORTED_BYTES:
            yield from chain.from_iterable(map(sorted, files.values()))
            files, size = {}, 0
    yield from chain.from_iterable(map(sorted, files.values()))


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

    def __init__(self, start: int, tail: bytes, open_rest: Callable[[], Any]) -> None:
        self._start, self._tail, self._open_rest = start, tail, open_rest
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
            self._rest = self._open_rest()
        return self._rest

    @property
    def kept(self) -> frozenset[int]:
        """See `FarFile`."""
        return getattr(self._rest, "kept", frozenset())

    @property
    def requests(self) -> Requests | None:
        """See `FarFile`; None: it is not open yet."""
        return getattr(self._rest, "requests", None)

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
