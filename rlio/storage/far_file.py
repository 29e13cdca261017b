"""`FarFile`: a large file of a remote store, read in ranges that follow each other, some of them ahead.

A filesystem's own file waits for each of its requests, and reads tens of megabytes ahead wherever it is: of
HDF5, 15 times the bytes of the file. Here, each position from which a reader goes on is a run of its own.
What a run reads ahead grows with what was read in it, and is requested side by side.

Example:
    >>> from fsspec import filesystem
    >>> from fsspec.spec import AbstractBufferedFile
    >>> store = filesystem("memory")
    >>> store.pipe_file("/far-example.bin", b"0123456789")
    >>> file = FarFile(AbstractBufferedFile(store, "/far-example.bin"), Clients(store, timeout=None))
    >>> file.seek(4), file.read(3), file.read(), file.read()
    (4, b'456', b'789', b'')
    >>> file.close()
"""

from __future__ import annotations

import gc
import io
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rlio.storage.clients import TIMEOUT, Clients
from rlio.storage.parallel import REQUESTS, Plan, Range

__all__ = ["FarFile", "far_file"]

# Bytes of a request of a long run, which begins at a multiple of them: their transfer takes about as long as
# the way there and back.
_PIECE: Final = 4 << 20
# A run goes on after a gap of so many bytes, which are fetched too: as many as a reader's buffer has.
_GAP: Final = 1 << 18
# Runs whose last piece is kept, and the bytes of those pieces but the last. HDF5 reads its data sets in turn.
_RUNS: Final = 16
_RUN_BYTES: Final = 32 << 20
# Bytes of whole pieces that all open files of a process keep, each an equal part: files are read several
# times, to find their episodes and then the rows.
_KEPT_BYTES: Final = 64 << 20
# Of the bytes that were read in a run, how many are requested ahead; and in a file that is scanned.
_AHEAD: Final = 0.25
_SCANNED_AHEAD: Final = 8


def far_file(fs: Any, path: str, *, scans: bool = False, locks: bool = False) -> Any:
    """A file of a filesystem, open for reading: a `FarFile`, if ranges of it can be requested side by side.

    Args:
        fs: An fsspec filesystem, which is remote.
        path: Path of the file within it.
        scans: Whether the file is read to its end.
        locks: Whether its reader holds a lock as it reads; see `FarFile`.

    Raises:
        FileNotFoundError: There is no file.
    """
    from fsspec.spec import AbstractBufferedFile

    file, clients = fs.open(path, "rb"), Clients(fs, timeout=TIMEOUT)
    # Where each call has a connection of its own, the open file is the only one that is surely not replaced.
    is_shared = clients.at_once == REQUESTS and isinstance(file, AbstractBufferedFile)
    if not is_shared or not isinstance(file.size, int):  # HTTP servers that know no ranges have no size.
        return file
    return FarFile(file, clients, scans=scans, locks=locks)


#: The files that keep pieces.
_open_files: weakref.WeakSet[FarFile] = weakref.WeakSet()


@dataclass(eq=False)
class _Run:
    """Pieces of a file that were read one after the other.

    Attributes:
        begin: First byte of the run.
        asked: Byte after the last that was asked for.
        start: First byte of the last piece.
        data: The last piece.
        coming: The pieces after it that are requested, or will be.
        plan: Requests them.
    """

    begin: int
    asked: int
    start: int
    data: bytes = b""
    coming: deque[Range] = field(default_factory=deque)
    plan: Plan | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


class FarFile(io.RawIOBase):
    """See the module; for one thread at a time.

    A read gives at least one byte, and fewer than it is asked for where a piece ends.

    Args:
        file: The filesystem's open file, which is closed with this one. Its requests fail if the file was
            replaced since, where the store can tell.
        clients: Those of its filesystem.
        scans: Whether the file is read to its end; once it was, it is read as others.
        locks: Whether its reader holds a lock as it reads, as h5py does: nothing is requested in other
            threads, and nothing has a time limit.
    """

    # Any: fsspec ships no type information.
    def __init__(self, file: Any, clients: Clients, *, scans: bool = False, locks: bool = False) -> None:
        self.size: int = file.size
        self._requests = _Requests(file, clients)
        self._scans, self._locks = scans, locks
        self._at = 0
        #: The one that was used last is the last.
        self._runs: list[_Run] = []
        #: Whole pieces by their first byte, likewise.
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        #: Requests what was stated to be read.
        self._stated: Plan | None = None
        _open_files.add(self)

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        """State which bytes ``[start, stop)`` are read next, about in this order: in place of those before.

        They are requested side by side, as far as a `Plan` goes. What is read otherwise is read as without.
        """
        if self._locks:
            return
        self._stated = self._stated or Plan()
        self._stated.expect(_pieces(self._requests, self.size, spans, frozenset(self._kept)))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if at < 0:
            raise ValueError(f"byte {at} is before the first byte of the file")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        """The next bytes; see the class.

        Raises:
            Exception: A request failed; the next call makes it again.
        """
        if size < 0:
            return self.readall()
        wanted = min(size, self.size - self._at)
        if wanted <= 0:
            return b""
        run = self._run_at(self._at, wanted)
        found = run.data[self._at - run.start : self._at - run.start + wanted]
        self._at += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        if not self.closed:
            super().close()
            _open_files.discard(self)
            self._kept.clear()
            if self._stated is not None:
                self._stated.forget()
            while self._runs:
                self._drop(self._runs[0])
            self._requests.file.close()

    # ---- inside ----

    def _run_at(self, at: int, wanted: int) -> _Run:
        """The run whose last piece has byte ``at``."""
        run = next((run for run in reversed(self._runs) if run.start <= at < run.stop), None)
        if run is None:
            run = next((run for run in reversed(self._runs) if run.stop <= at <= run.stop + _GAP), None)
            run = run or _Run(at, at, at)
            if (data := self._kept.get(start := at - at % _PIECE)) is not None:
                self._advance(run, start, data)
                run.asked = max(run.asked, at + wanted)
            elif (stated := self._stated_at(at)) is not None:
                start, data = stated
                run = _Run(start, start + len(data), start, data)
                if self._is_whole(Range(self._requests, "", start, run.stop)):
                    self._keep(start, data)
            while not run.start <= at < run.stop:
                self._go_on(run, at + wanted)
        if run in self._runs:
            self._runs.remove(run)
        self._runs.append(run)
        self._drop_some()
        return run

    def _stated_at(self, at: int) -> tuple[int, bytes] | None:
        return None if self._stated is None else self._stated.take_around(self._requests, at)

    def _go_on(self, run: _Run, stop: int) -> None:
        """Fetch the next piece of a run, of which the bytes up to ``stop`` are needed."""
        if stop > run.asked:  # Otherwise the same read goes on.
            read, run.asked = run.stop - run.begin, stop
            stop += max(_PIECE, _SCANNED_AHEAD * read) if self._scans else int(_AHEAD * read)
        if stop > run.asked or not run.coming:
            self._expect(run, min(stop, self.size))
        wanted = run.coming[0]
        data = self._kept.get(wanted.start) if self._is_whole(wanted) else None
        if data is None and self._locks:
            data = self._requests.fetch_here(wanted.start, wanted.stop)
        elif data is None and (len(run.coming) > 1 or run.plan is not None):
            run.plan = run.plan or Plan()
            run.plan.expect([piece for piece in run.coming if piece.start not in self._kept])
            data = run.plan.take(*wanted)
        data = self._requests.fetch(*wanted[1:]) if data is None else data
        self._advance(run, wanted.start, data)
        self._scans = self._scans and run.stop < self.size
        if self._is_whole(wanted):
            self._keep(wanted.start, data)

    def _is_whole(self, piece: Range) -> bool:
        return piece.start % _PIECE == 0 and piece.stop == min(piece.start + _PIECE, self.size)

    def _advance(self, run: _Run, start: int, data: bytes) -> None:
        """Make ``data`` the last piece of a run."""
        run.start, run.data = start, data
        while run.coming and run.coming[0].stop <= run.stop:
            run.coming.popleft()

    def _keep(self, start: int, data: bytes) -> None:
        """Keep a whole piece instead of those that were used least recently."""
        self._kept[start] = data
        self._kept.move_to_end(start)
        while len(self._kept) * _PIECE > max(_PIECE, _KEPT_BYTES // len(_open_files)):
            self._kept.popitem(last=False)

    def _expect(self, run: _Run, stop: int) -> None:
        """Add pieces up to ``stop``: one request, or whole pieces if the run is longer."""
        start = run.coming[-1].stop if run.coming else run.stop
        is_short = stop - run.begin < _PIECE
        while start < stop:
            end = stop if is_short else min(start - start % _PIECE + _PIECE, self.size)
            run.coming.append(Range(self._requests, "", start, end))
            start = end

    def _drop_some(self) -> None:
        """Keep the runs that were used last, within the bounds."""
        kept, most = 0, _RUN_BYTES // len(_open_files)
        for number, run in enumerate(reversed(self._runs[:-1]), 1):
            kept += 0 if run.data is self._kept.get(run.start) else len(run.data)
            if number >= _RUNS or kept > most:
                self._drop(run)

    def _drop(self, run: _Run) -> None:
        self._runs.remove(run)
        if run.plan is not None:
            run.plan.forget()


def _pieces(
    requests: _Requests, size: int, spans: Sequence[tuple[int, int]], kept: frozenset[int]
) -> Iterator[Range]:
    """Ranges of stated bytes, without the whole pieces that are kept. What a file states may be nonsense."""
    for start, stop in spans:
        if 0 <= start < stop <= size:
            for first in (start, *range(start - start % _PIECE + _PIECE, stop, _PIECE)):
                if first not in kept:
                    yield Range(requests, "", first, min(first - first % _PIECE + _PIECE, stop))


class _Requests:
    """The requests for ranges of an open file; a `parallel.Store`."""

    at_once: int = REQUESTS

    def __init__(self, file: Any, clients: Clients) -> None:
        self.file, self._clients = file, clients

    def fetch(self, path: str, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)``.

        Raises:
            OSError: There are fewer: the file was replaced.
        """
        return self._clients.run(lambda _: self._fetched(start, stop), size=stop - start)

    def fetch_here(self, start: int, stop: int) -> bytes:
        """See `fetch`; in this thread, whose locks a collection of garbage in the client's thread may need.

        h5py frees its objects under the lock that it holds here: the two would wait for each other.
        """
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return self._fetched(start, stop)
        finally:
            if was_enabled:
                gc.enable()

    def _fetched(self, start: int, stop: int) -> bytes:
        found = self.file._fetch_range(start, stop)
        if len(found) != stop - start:
            raise OSError(f"found {len(found)} bytes from {start} to {stop}: the file was replaced")
        return bytes(found)

    def hold(self, plan: Plan) -> None:
        """See `Storage.hold`; here, who holds the plan asks it."""
