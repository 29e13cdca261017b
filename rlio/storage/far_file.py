"""`FarFile`: a large file of a remote store, read in ranges that follow each other, some of them ahead.

A filesystem's own file waits for each of its requests, and reads tens of megabytes ahead wherever it is: of
HDF5, 15 times the bytes of the file. Here, each position from which a reader goes on is a run of its own.
What a run reads ahead grows with what was read in it, and is requested side by side.

Example:
    >>> from fsspec import filesystem
    >>> from fsspec.spec import AbstractBufferedFile
    >>> store = filesystem("memory")
    >>> store.pipe_file("/far-example.bin", b"0123456789")
    >>> opened = AbstractBufferedFile(store, "/far-example.bin")
    >>> file = FarFile(Requests(store, "/far-example.bin", opened=opened))
    >>> file.seek(4), file.read(3), file.read(), file.read()
    (4, b'456', b'789', b'')
    >>> file.close()
"""

from __future__ import annotations

import gc
import io
import os
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, TypeAlias

from rlio.storage.clients import TIMEOUT, Clients
from rlio.storage.parallel import REQUESTS, Plan, Range

__all__ = ["GAP", "FarFile", "Requests", "Span", "far_file", "joined", "pieces"]

#: Bytes of a file: its number, the first one, and the one after the last. (number, 0, 0): it is only opened.
Span: TypeAlias = tuple[int, int, int]

# Bytes of a request of a long run, which begins at a multiple of them: their transfer takes about as long as
# the way there and back.
_PIECE: Final = 4 << 20
#: A run goes on after a gap of so many bytes, which are fetched too: as many as a reader's buffer has.
GAP: Final = 1 << 18
# Between stated bytes, such a gap is fetched in any case: pyarrow reads what is in it too.
_HOLE: Final = 8 << 10
# Runs whose last piece is kept, and the bytes of those pieces but the last. HDF5 reads its data sets in turn.
_RUNS: Final = 16
_RUN_BYTES: Final = 32 << 20
# Bytes of whole pieces that all open files of a process keep, each an equal part: files are read several
# times, to find their episodes and then the rows.
_KEPT_BYTES: Final = 64 << 20
# With locks: where so many small reads waited within so many bytes, these are fetched by one request, which
# takes about as long as those waits. HDF5 has its groups all over a file.
_WAITS: Final = 24
# As many, if a file of the same folder needed a window, and this one is being opened: they are alike.
_ALIKE_WAITS: Final = 4
_WINDOW_BYTES: Final = 32 << 20
# Files of a process that have such a window: as many as one source of HDF5 keeps open.
_WINDOWS: Final = 4
# Of the bytes that were read in a run, how many are requested ahead; and in a file that is scanned.
_AHEAD: Final = 0.25
_SCANNED_AHEAD: Final = 8


def far_file(
    fs: Any, path: str, *, scans: bool = False, locks: bool = False, requests: Requests | None = None
) -> Any:
    """A file of a filesystem, open for reading: a `FarFile`, if ranges of it can be requested side by side.

    Args:
        fs: An fsspec filesystem, which is remote.
        path: Path of the file within it.
        scans: Whether the file is read to its end.
        locks: Whether its reader holds a lock as it reads; see `FarFile`.
        requests: Those that were made for it before; None: none were. It is closed with the file.

    Raises:
        FileNotFoundError: There is no file.
    """
    from fsspec.spec import AbstractBufferedFile

    requests = requests or Requests(fs, path)
    file = requests.file
    # Where each call has a connection of its own, the open file is the only one that is surely not replaced.
    is_shared = requests.is_shared and isinstance(file, AbstractBufferedFile)
    if not is_shared or not isinstance(file.size, int):  # HTTP servers that know no ranges have no size.
        return file
    return FarFile(requests, scans=scans, locks=locks)


#: The files that keep pieces.
_open_files: weakref.WeakSet[FarFile] = weakref.WeakSet()
#: The folder of the file that needed a window last.
_window_folder: str | None = None
#: The files that have a window; the newest is the last one.
_windowed: tuple[weakref.ref[FarFile], ...] = ()


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
        requests: Those for the file, which is closed with this one.
        scans: Whether the file is read to its end; once it was, it is read as others.
        locks: Whether its reader holds a lock as it reads, as h5py does: a read makes no request in another
            thread, and has no time limit. What was given to `hold` before needs no request.
    """

    def __init__(self, requests: Requests, *, scans: bool = False, locks: bool = False) -> None:
        self.size: int = requests.file.size
        #: Those for the file.
        self.requests: Requests = requests
        self._scans, self._locks = scans, locks
        self._at = 0
        #: The one that was used last is the last.
        self._runs: list[_Run] = []
        #: Whole pieces by their first byte, likewise.
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        #: What `hold` was given: the first byte of each range, and its bytes, in the order of the file.
        self._held: list[tuple[int, bytes]] = []
        #: With ``locks``: where the last small reads waited; the first byte of a window, and its bytes.
        self._waits: deque[int] = deque(maxlen=_WAITS)
        self._window: tuple[int, bytes] = (0, b"")
        #: Whether it had no window yet, and nothing to hold.
        self._is_new = True
        _open_files.add(self)

    @property
    def kept(self) -> frozenset[int]:
        """The first byte of each whole piece that needs no request."""
        start, data = self._window
        return frozenset((*self._kept, *range(start, start + len(data), _PIECE)))

    def hold(self, held: dict[int, bytes], needed: Sequence[tuple[int, int]]) -> None:
        """Have bytes, by the first one of each range, that reads need not request: in place of those before.

        Those before stay where they have bytes ``[start, stop)`` of ``needed``.
        """
        self._is_new = False
        stay = {
            at: data
            for at, data in self._held
            if any(start < at + len(data) and at < stop for start, stop in needed)
        }
        self._held = sorted({**stay, **held}.items())

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
            self._held, self._window = [], (0, b"")
            while self._runs:
                self._drop(self._runs[0])
            self.requests.close()

    # ---- inside ----

    def _run_at(self, at: int, wanted: int) -> _Run:
        """The run whose last piece has byte ``at``."""
        run = next((run for run in reversed(self._runs) if run.start <= at < run.stop), None)
        if run is None:
            run = next((run for run in reversed(self._runs) if run.stop <= at <= run.stop + GAP), None)
            run = run or _Run(at, at, at)
            if (data := self._kept.get(start := at - at % _PIECE)) is not None:
                self._advance(run, start, data)
                run.asked = max(run.asked, at + wanted)
            elif (stated := self._stated_at(at) or self._window_at(at, wanted)) is not None:
                start, data = stated
                run = _Run(start, start + len(data), start, data)
                # Otherwise it is not kept: it is read once, and pieces that are kept are stated no more.
                if self._scans and self._is_whole(Range(self.requests, "", start, run.stop)):
                    self._keep(start, data)
            while not run.start <= at < run.stop:
                self._go_on(run, at + wanted)
        if run in self._runs:
            self._runs.remove(run)
        if run.data is not self._window[1]:  # The file's last run stays, and so would the window.
            self._runs.append(run)
            self._drop_some()
        return run

    def _stated_at(self, at: int) -> tuple[int, bytes] | None:
        """What was requested because it was stated, and has byte ``at``: its first byte, and its bytes."""
        if self._locks:
            found = self._held[max(0, bisect_right(self._held, at, key=itemgetter(0)) - 1) :][:1]
            return next((one for one in found if one[0] <= at < one[0] + len(one[1])), None)
        plan = self.requests.plan
        return None if plan is None else plan.take_around(self.requests, at)

    def _window_at(self, at: int, wanted: int) -> tuple[int, bytes] | None:
        """The window, if it has byte ``at``, or if small reads waited all around it.

        None: there is no such window.
        """
        global _window_folder
        start, data = self._window
        if start <= at < start + len(data):
            return start, data
        if not self._locks or wanted > GAP:
            return None
        self._waits.append(at)
        is_alike = self._is_new and _window_folder == self.requests.folder
        most = _ALIKE_WAITS if is_alike else _WAITS
        if len(self._waits) < most or max(self._waits) - min(self._waits) > _WINDOW_BYTES:
            return None
        self._waits.clear()
        self._is_new, _window_folder = False, self.requests.folder
        self._take_window()
        last = max(0, self.size - _WINDOW_BYTES)
        start = min(at - at % _PIECE, last + -last % _PIECE)
        stop = min(start + _WINDOW_BYTES, self.size)
        self._window = start, self.requests.fetch_here(start, stop)
        return self._window

    def _take_window(self) -> None:
        """Be the newest file that has a window; the oldest ones lose theirs."""
        global _windowed
        others = [file for one in _windowed if (file := one()) not in (None, self) and file._window[1]]
        for file in others[: 1 - _WINDOWS]:
            file._window = (0, b"")
        _windowed = tuple(weakref.ref(file) for file in (*others[1 - _WINDOWS :], self))

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
            data = self.requests.fetch_here(wanted.start, wanted.stop)
        elif data is None and (len(run.coming) > 1 or run.plan is not None):
            run.plan = run.plan or Plan()
            run.plan.expect([piece for piece in run.coming if piece.start not in self._kept])
            data = run.plan.take(*wanted)
        data = self.requests.fetch(*wanted[1:]) if data is None else data
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
            run.coming.append(Range(self.requests, "", start, end))
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


def pieces(
    requests: Requests, size: int, start: int, stop: int, kept: frozenset[int] = frozenset()
) -> Iterator[Range]:
    """Ranges of stated bytes, but for those in pieces that are kept. What a file states may be nonsense.

    Args:
        requests: Those for the file.
        size: Bytes of the file.
        start: The first of the stated bytes.
        stop: The byte after the last.
        kept: See `FarFile.kept`.
    """
    if 0 <= start < stop <= size:
        for first in (start, *range(start - start % _PIECE + _PIECE, stop, _PIECE)):
            if first - first % _PIECE not in kept:
                yield Range(requests, "", first, min(first - first % _PIECE + _PIECE, stop))


def joined(spans: Iterable[Span], *, gap: int = 0) -> Iterator[Span]:
    """Spans, of which those that follow each other or overlap are one, up to the end of its last piece.

    Also those with at most ``gap`` bytes between them, and no more than those before, or 8 KiB: all are
    within then.
    """
    number, begin, start, stop = -1, 0, 0, -1
    for span in spans:
        if span[0] == number and begin <= span[1] <= stop + min(gap, max(stop - begin, _HOLE)):
            stop = max(stop, span[2])
        else:
            if start < stop or stop == 0:
                yield number, start, stop
            number, begin, stop = span
            start = begin
        if start < (whole := stop - stop % _PIECE):
            yield number, start, whole
            start = whole
    if start < stop or stop == 0:
        yield number, start, stop


class Requests:
    """The requests for ranges of a file, which the first one opens; a `parallel.Store`.

    Those of an open file fail if the file was replaced since, where the store can tell. For any thread.

    Args:
        fs: An fsspec filesystem.
        path: Path of the file within it.
        opened: The filesystem's open file; None: it is opened as soon as it is needed.
    """

    at_once: int = REQUESTS

    # Any: fsspec ships no type information.
    def __init__(self, fs: Any, path: str, *, opened: Any = None) -> None:
        self._fs, self._path, self._file = fs, path, opened
        self._clients = Clients(fs, timeout=TIMEOUT)
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._plan: weakref.ref[Plan] | None = None

    @property
    def folder(self) -> str:
        """The path of the folder of the file."""
        return self._path.rpartition("/")[0]

    def state(self, plan: Plan) -> None:
        """Have reads take from a plan, which `InputFiles` has."""
        self._plan = weakref.ref(plan)

    @property
    def is_shared(self) -> bool:
        """Whether the filesystem answers several at once over one connection."""
        return self._clients.at_once == REQUESTS

    @property
    def file(self) -> Any:
        """The filesystem's open file.

        Raises:
            FileNotFoundError: There is no file.
        """
        if self._pid != os.getpid():  # A thread of the parent may have held the lock.
            self._pid, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            if self._file is None:
                self._file = self._fs.open(self._path, "rb")
            return self._file

    @property
    def plan(self) -> Plan | None:
        """What requests stated ranges; None: nothing does."""
        return None if self._plan is None else self._plan()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

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
