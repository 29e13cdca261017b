"""The conformance suite of storage, and filesystems that fail on purpose.

Subclass `FileSystemTests` with a factory to prove that data sets can be on a filesystem. `FaultyFileSystem`
wraps a filesystem. Chosen calls fail before their effect, after it, or halfway; or succeed badly.

Example:
    >>> import fsspec
    >>> from rlio.storage.filesystem import Storage
    >>> fs = FaultyFileSystem(fsspec.filesystem("memory"), lambda call: "after" if call.number == 1 else None)
    >>> storage = Storage.on(fs, "/faulty-example")
    >>> storage.put("a.bin", b"the response was lost, the object was not")
    >>> [call.operation for call in fs.calls]
    ['makedirs', 'pipe_file', 'info', 'cat_file']
"""

from __future__ import annotations

import copy
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import pytest
from fsspec import AbstractFileSystem

from rlio.errors import DataNotFound, OptionError, UnsafeData
from rlio.storage.filesystem import Entry, Storage

__all__ = ["Call", "Fault", "FaultyFileSystem", "FaultyRenamingFileSystem", "FileSystemTests"]

#: How a call fails: before any effect; after the effect, with a lost response; or with half stored. Or how it
#: succeeds badly: late; with an outdated listing; with an unordered listing.
Fault: TypeAlias = Literal["before", "after", "torn", "slow", "stale", "unordered"]
_SUCCEEDING = (None, "slow", "stale", "unordered")


class Call(NamedTuple):
    """One call to a `FaultyFileSystem`: its number from 0, the operation's name, and the path."""

    number: int
    operation: str
    path: str


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no type information
    """Passes calls on to another filesystem, and makes chosen calls fail.

    It has no rename, and needs no folders; see `FaultyRenamingFileSystem`.

    Args:
        target: The fsspec filesystem that does the work.
        choose: Returns the fault of a call, or None to let it pass. ``"torn"`` stores half of a put and is
            like ``"before"`` for other operations; ``"stale"`` and ``"unordered"`` affect only listings.
        error: Makes the exception to raise.
        delay: Seconds that ``"slow"`` waits before the call.
        history: Folder -> its listings so far, for ``"stale"``, which returns the last one. Clients that
            share a history see each other's listings.
    """

    protocol = "faulty"
    root_marker = "/"
    cachable = False

    def __init__(
        self,
        target: Any,
        choose: Callable[[Call], Fault | None],
        error: Callable[[], Exception] = lambda: OSError(5, "injected fault"),
        *,
        delay: float = 0.01,
        history: dict[str, list[Any]] | None = None,
    ) -> None:
        super().__init__()
        self.target = target
        self.choose = choose
        self.error = error
        self.delay = delay
        self.history: dict[str, list[Any]] = {} if history is None else history
        #: All calls so far, also failed ones.
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def _pass_on(self, operation: str, path: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            call = Call(len(self.calls), operation, path)
            self.calls.append(call)
        fault = self.choose(call)
        if fault == "slow":
            time.sleep(self.delay)
        if fault == "torn" and operation == "pipe_file":
            self.target.pipe_file(path, args[0][: len(args[0]) // 2])
        runs = fault == "after" or fault in _SUCCEEDING
        result = getattr(self.target, operation)(path, *args, **kwargs) if runs else None
        if fault not in _SUCCEEDING:
            raise self.error()
        return self._bent(fault, path, result or []) if operation == "ls" else result

    def _bent(self, fault: Fault | None, path: str, listing: list[Any]) -> list[Any]:
        """A listing as an eventually consistent store may give it."""
        seen = self.history.setdefault(path, [[]])
        if fault == "stale":
            return list(seen[-1])
        if listing != seen[-1]:
            seen.append(list(listing))
        return list(reversed(listing)) if fault == "unordered" else listing

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self._pass_on("ls", path, detail=detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        return self._pass_on("info", path, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        return self._pass_on("cat_file", path, start=start, end=end, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        return self._pass_on("pipe_file", path, value, mode=mode, **kwargs)

    def rm_file(self, path: str) -> Any:
        return self._pass_on("rm_file", path)

    def makedirs(self, path: str, exist_ok: bool = False) -> Any:
        return self._pass_on("makedirs", path, exist_ok=exist_ok)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.target.invalidate_cache(path)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb":
            raise AssertionError("a write handle was opened: it publishes truncated objects")
        return self._pass_on("open", path, mode)


class FaultyRenamingFileSystem(FaultyFileSystem):
    """A `FaultyFileSystem` with a rename, as SFTP and similar filesystems have."""

    protocol = "faulty-renaming"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> Any:
        return self._pass_on("mv", path1, path2, **kwargs)


# Each of these was a bug in some client: globs, fragments, escapes, encodings, options.
_ODD_NAMES = (
    "with space.bin",
    "ümlaut/日本語.bin",
    "percent%20 100%.bin",
    "hash#fragment.bin",
    "plus+and&equals=.bin",
    "star*question?[bracket].bin",
    "-dash.bin",
    "dots..bin",
    "quote'\"`$.bin",
    "n" * 200 + ".bin",
)


class FileSystemTests(ABC):
    """Proves that data sets can be on a filesystem.

    Subclass it in a test file, name the subclass ``Test...``, and implement `make_storage`. If the raw
    accessors do not reach the objects that storage writes, override them too.
    """

    #: Names to store objects under. If a filesystem cannot hold one, list the others here, and document it.
    odd_names: ClassVar[tuple[str, ...]] = _ODD_NAMES
    #: Whether no reader ever sees a half-written object.
    atomic: ClassVar[bool] = True

    @abstractmethod
    def make_storage(self, tmp_path: Path) -> Storage:
        """A folder that does not exist yet, a different one each time."""

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        """Store ``data`` as another program would, not through ``storage``."""
        full = f"{storage.root}/{path}"
        storage.fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        storage.fs.pipe_file(full, data)

    def raw_read(self, storage: Storage, path: str) -> bytes:
        """The object's bytes as another program reads them."""
        return bytes(storage.fs.cat_file(f"{storage.root}/{path}"))

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return self.make_storage(tmp_path)

    def test_a_folder_that_does_not_exist_is_empty_and_no_error(self, storage: Storage) -> None:
        assert storage.list() == []
        assert storage.list("data") == []
        assert not storage.exists()
        assert not storage.exists("data/a.bin")
        storage.remove("data/a.bin")

    def test_what_is_put_is_what_everybody_reads(self, storage: Storage) -> None:
        storage.put("data/w/a.bin", b"content")
        assert self.raw_read(storage, "data/w/a.bin") == b"content"
        assert storage.read("data/w/a.bin") == b"content"
        assert storage.list() == [Entry("data/w/a.bin", 7)]

    def test_what_others_put_is_read(self, storage: Storage) -> None:
        self.raw_write(storage, "data/w/a.bin", b"content")
        assert storage.read("data/w/a.bin") == b"content"

    def test_an_object_its_folders_and_the_root_exist_and_nothing_else(self, storage: Storage) -> None:
        storage.put("data/w/a.bin", b"content")
        assert all(storage.exists(path) for path in ("", "data", "data/w", "data/w/a.bin"))
        assert not any(storage.exists(path) for path in ("dat", "data/w/a", "data/w/a.bin2", "w"))

    @pytest.mark.parametrize("size", [0, 1, 3 * 2**20 + 1])
    def test_any_size_round_trips(self, storage: Storage, size: int) -> None:
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        storage.put("a.bin", data)
        assert storage.read("a.bin") == data
        assert storage.list() == [Entry("a.bin", size)]

    @pytest.mark.parametrize(
        ("start", "stop"), [(0, 0), (0, 1), (3, 7), (0, 10), (9, 10), (5, 99), (10, 11), (50, 60)]
    )
    def test_a_range_is_what_a_slice_is(self, storage: Storage, start: int, stop: int) -> None:
        data = b"0123456789"
        storage.put("a.bin", data)
        assert storage.read_range("a.bin", start, stop) == data[start:stop]

    @pytest.mark.parametrize(("start", "stop"), [(-1, 4), (4, 3)])
    def test_a_range_from_the_end_or_backwards_is_refused(
        self, storage: Storage, start: int, stop: int
    ) -> None:
        with pytest.raises(OptionError, match="0 <= start <= stop"):
            storage.read_range("a.bin", start, stop)

    def test_reading_what_is_not_there_names_it(self, storage: Storage) -> None:
        storage.put("a.bin", b"content")
        for read in (storage.read, lambda path: storage.read_range(path, 2, 5)):
            with pytest.raises(DataNotFound) as caught:
                read("data/missing.bin")
            assert caught.value.uri is not None
            assert caught.value.uri.endswith("data/missing.bin")

    def test_reading_more_than_the_limit_is_refused(self, storage: Storage) -> None:
        storage.put("a.bin", b"0123456789")
        assert storage.read("a.bin", limit=10) == b"0123456789"
        with pytest.raises(UnsafeData, match="more than the 9 bytes"):
            storage.read("a.bin", limit=9)

    def test_a_put_replaces_the_whole_object(self, storage: Storage) -> None:
        storage.put("a.bin", b"a long first content")
        storage.put("a.bin", b"short")
        assert self.raw_read(storage, "a.bin") == b"short"
        assert storage.list() == [Entry("a.bin", 5)]

    def test_putting_the_same_again_changes_nothing(self, storage: Storage) -> None:
        for _ in range(3):
            storage.put("data/a.bin", b"content")
        assert storage.read("data/a.bin") == b"content"
        assert storage.list() == [Entry("data/a.bin", 7)]

    def test_buffers_are_taken_as_they_are_and_not_kept(self, storage: Storage) -> None:
        buffer = bytearray(b"..content..")
        storage.put("a.bin", memoryview(buffer)[2:9])
        storage.put("b.bin", buffer)
        buffer[:] = bytes(len(buffer))
        assert storage.read("a.bin") == b"content"
        assert storage.read("b.bin") == b"..content.."

    def test_a_listing_is_recursive_sorted_and_of_that_folder_alone(self, storage: Storage) -> None:
        for path in ("data/b/2.bin", "data/b/1.bin", "data/a/deep/er/x.bin", "data2/c.bin", "top.bin"):
            storage.put(path, path.encode())
        inside = ["data/a/deep/er/x.bin", "data/b/1.bin", "data/b/2.bin"]
        assert [entry.path for entry in storage.list("data")] == inside
        assert [entry.path for entry in storage.list()] == [*inside, "data2/c.bin", "top.bin"]
        assert all(entry.size == len(entry.path) for entry in storage.list())

    def test_listing_an_object_as_if_it_were_a_folder_is_empty(self, storage: Storage) -> None:
        storage.put("data/a.bin", b"content")
        assert storage.list("data/a.bin") == []

    def test_folders_are_listed_by_the_beginning_of_their_names(self, storage: Storage) -> None:
        for path in ("data/xa~1/a", "data/xa~2/b/c", "data/xb/d", "data/xa~3", "other/xa~4/e"):
            storage.put(path, b"1")
        assert storage.folders("data", "xa~") == ["xa~1", "xa~2"]
        assert storage.folders("data") == ["xa~1", "xa~2", "xb"]
        assert storage.folders("nowhere") == []

    def test_the_children_of_a_folder_are_its_own_alone(self, storage: Storage) -> None:
        for path in ("data/a/b/c", "data/a/d", "data/e", "top.bin"):
            storage.put(path, b"1")
        assert storage.children("data") == [("a", True), ("e", False)]
        assert ("top.bin", False) in storage.children()
        assert len(storage.children("data", most=1)) == 1
        assert storage.children("data/e") == storage.children("nowhere") == []

    def test_a_listing_sees_at_once_what_others_did(self, storage: Storage) -> None:
        assert storage.list() == []
        for i in range(3):
            self.raw_write(storage, f"data/{i}.bin", b"content")
            assert len(storage.list()) == i + 1
        assert storage.exists("data/2.bin")
        storage.fs.rm_file(f"{storage.root}/data/1.bin")
        assert [entry.path for entry in storage.list("data")] == ["data/0.bin", "data/2.bin"]
        assert not storage.exists("data/1.bin")

    def test_a_listing_longer_than_the_limit_is_refused(self, storage: Storage) -> None:
        for i in range(5):
            storage.put(f"{i}.bin", b"content")
        left_over = len(storage.fs.ls(storage.root)) - 5  # _tmp, if it exists
        assert len(storage.list(limit=5 + left_over)) == 5
        with pytest.raises(UnsafeData, match="more than 4 names"):
            storage.list(limit=4)

    def test_remove_takes_that_object_and_nothing_else(self, storage: Storage) -> None:
        for path in ("data/a.bin", "data/ab.bin", "data/a/x.bin"):
            storage.put(path, b"content")
        storage.remove("data/a.bin")
        storage.remove("data/a.bin")
        assert [entry.path for entry in storage.list()] == ["data/a/x.bin", "data/ab.bin"]

    def test_times_are_the_stores_own_and_do_not_run_backwards(self, storage: Storage) -> None:
        """Garbage collection uses these times; a store without times loses nothing, and keeps everything."""
        times = []
        for name in ("first", "second"):
            storage.put(f"data/{name}.bin", b"content")
            times.append(storage.modified(f"data/{name}.bin"))
        first, second = times
        assert first is None or (second is not None and first <= second)
        with pytest.raises(DataNotFound):
            storage.modified("data/third.bin")

    def test_a_listing_tells_the_times_that_its_objects_have(self, storage: Storage) -> None:
        for path in ("data/a.bin", "data/b/c.bin", "top.bin"):
            storage.put(path, b"content")
        entries, times = storage.list_with_times("data")
        assert entries == storage.list("data")
        assert sorted(times) == ["data/a.bin", "data/b/c.bin"]
        for path, listed in times.items():
            asked = storage.modified(path)
            # Listings may tell whole seconds, or, as those of some servers, minutes.
            assert listed is None or (asked is not None and abs(listed - asked) <= 60)

    def test_odd_names_are_names(self, storage: Storage) -> None:
        for name in self.odd_names:
            storage.put(f"data/{name}", name.encode())
        assert [entry.path for entry in storage.list()] == sorted(f"data/{name}" for name in self.odd_names)
        for name in self.odd_names:
            path = f"data/{name}"
            assert storage.exists(path)
            assert storage.read(path) == name.encode()
            assert storage.read_range(path, 0, 3) == name.encode()[:3]
            storage.remove(path)
            assert not storage.exists(path)

    @pytest.mark.parametrize("path", ["/a", "../a", "a/../../b", "a/..", "./a", "a//b", "a/", "a\0b", ""])
    def test_no_path_leads_out_of_the_root(self, storage: Storage, path: str) -> None:
        for refused in (
            lambda: storage.read(path),
            lambda: storage.read_range(path, 0, 1),
            lambda: storage.put(path, b"content"),
            lambda: storage.remove(path),
        ):
            with pytest.raises(OptionError, match="not a path below the root"):
                refused()

    def test_a_put_leaves_nothing_but_its_object(self, storage: Storage) -> None:
        storage.put("data/a.bin", b"content")
        assert [entry.path for entry in storage.list()] == ["data/a.bin"]

    def test_writers_of_one_object_never_show_a_mixture(self, storage: Storage) -> None:
        contents = [bytes([i]) * 200_000 for i in range(4)]
        storage.put("a.bin", contents[0])
        seen: list[bytes] = []
        failures: list[BaseException] = []

        def write(data: bytes) -> None:
            try:
                for _ in range(5):
                    storage.put("a.bin", data)
                    seen.append(storage.read("a.bin"))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(data,)) for data in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert storage.read("a.bin") in contents
        if self.atomic:
            assert set(seen) <= set(contents)

    def test_a_storage_travels_to_other_processes(self, storage: Storage) -> None:
        storage.put("a.bin", b"content")
        ForkingPickler.dumps(storage)  # Raises if a part cannot be pickled.
        twin = copy.copy(storage)  # The same path as the receiver's, without bytes that could run code.
        assert twin.uri == storage.uri
        assert twin.read("a.bin") == b"content"
