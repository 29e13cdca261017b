"""Storage on every kind of filesystem: the conformance suite, and what fails on purpose."""

from __future__ import annotations

import errno
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import stat
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from crash_shim import open_files_below
from fsspec import AbstractFileSystem
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from further import further

import rlio
from rlio.errors import (
    DataNotFound,
    MissingExtra,
    OptionError,
    PublishError,
    StoreError,
    UnknownName,
    UnsafeData,
)
from rlio.storage.filesystem import Entry, Retry, Storage, expand_inputs, is_uri, open_input
from rlio.storage.paths import TMP_DIR, mask_secrets
from rlio.storage.remote import RemoteFolder
from rlio.testing import FaultyFileSystem, FaultyRenamingFileSystem, FileSystemTests
from rlio.testing.filesystem import Call, Fault

AT_ONCE = Retry(first_delay=0)
linux_only = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")


class NoRename(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no type information
    """A store whose puts are not known to be atomic, with no rename and a cache of listings."""

    protocol = "norename"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("norename://")))

    find = AbstractFileSystem.find

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cached: dict[str, Any] = {}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if path not in self.cached:
            self.cached[path] = super().ls(path, detail=True, **kwargs)
        return self.cached[path] if detail else [info["name"] for info in self.cached[path]]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.cached.clear()


class Renaming(NoRename):
    """The same with a rename that, like WebDAV's, never moves onto an object."""

    protocol = "renaming"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    moves = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("renaming://")))

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if path2 in self.store:
            raise FileExistsError(path2)
        type(self).moves += 1
        self.store[path2] = self.store.pop(path1)


@pytest.fixture(autouse=True)
def _registered() -> None:
    fsspec.register_implementation("norename", NoRename, clobber=True)
    fsspec.register_implementation("renaming", Renaming, clobber=True)


def fresh(scheme: str) -> str:
    return f"{scheme}://{uuid.uuid4().hex}/run"


# ---- the suite, on every kind of filesystem ----


class TestLocal(FileSystemTests):
    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage.open(tmp_path / "not" / "there yet")


class TestLocalByUriUnsynced(FileSystemTests):
    def make_storage(self, tmp_path: Path) -> Storage:
        storage = Storage.open(f"file://{tmp_path}/run", sync=False)
        assert storage.is_local
        return storage


class TestLocalWithoutOpenat(FileSystemTests):
    """What Windows runs."""

    @pytest.fixture(autouse=True)
    def _no_openat(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlio.storage.local._HAS_OPENAT", False)

    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage.open(tmp_path / "run")


class TestMemory(FileSystemTests):
    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage.open(fresh("memory"))


class TestFolderOfAnotherFilesystem(FileSystemTests):
    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage.on(DirFileSystem(path="/" + uuid.uuid4().hex, fs=MemoryFileSystem()), "run")


class TestNoRename(FileSystemTests):
    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage.open(fresh("norename"))


class TestRenaming(FileSystemTests):
    # Between removing the old object and moving the new one there is neither.
    atomic = False

    def make_storage(self, tmp_path: Path) -> Storage:
        return Storage.open(fresh("renaming"), retry=AT_ONCE)

    def test_writers_of_one_object_never_show_a_mixture(self, storage: Storage) -> None:
        pytest.skip("a server that never moves onto an object cannot replace one that others replace too")


class TestArrow(FileSystemTests):
    """pyarrow's filesystems through fsspec: no common code with fsspec's own."""

    def make_storage(self, tmp_path: Path) -> Storage:
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow.fs import LocalFileSystem as ArrowLocal

        return Storage.on(ArrowFSWrapper(ArrowLocal()), str(tmp_path / "run"), uri="arrow://run")


class TestAsynchronous(FileSystemTests):
    """An asynchronous client behind the synchronous calls, as those of object stores are."""

    def make_storage(self, tmp_path: Path) -> Storage:
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

        fs = AsyncFileSystemWrapper(MemoryFileSystem(), asynchronous=False)
        return Storage.on(fs, "/" + uuid.uuid4().hex, uri="async://run")


class TestFaulty(FileSystemTests):
    """Every call may fail in every way, a fifth of them do, and the suite passes all the same."""

    atomic = False

    def make_storage(self, tmp_path: Path) -> Storage:
        retry = Retry(attempts=40, first_delay=0)
        return Storage.on(
            FaultyFileSystem(MemoryFileSystem(), chosen_by(7)), fresh("memory")[8:], retry=retry
        )

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        storage.fs.target.pipe_file(f"{storage.root}/{path}", data)

    def raw_read(self, storage: Storage, path: str) -> bytes:
        return bytes(storage.fs.target.cat_file(f"{storage.root}/{path}"))

    def test_a_storage_travels_to_other_processes(self, storage: Storage) -> None:
        pytest.skip("the chooser of faults is a closure")

    def test_a_listing_sees_at_once_what_others_did(self, storage: Storage) -> None:
        storage.fs.choose = lambda call: None  # the test removes through the faulty filesystem itself
        super().test_a_listing_sees_at_once_what_others_did(storage)

    def test_a_listing_longer_than_the_limit_is_refused(self, storage: Storage) -> None:
        storage.fs.choose = lambda call: None  # the test lists through the faulty filesystem itself
        super().test_a_listing_longer_than_the_limit_is_refused(storage)


def chosen_by(seed: int, share: float = 0.2) -> Callable[[Call], Fault | None]:
    draw = random.Random(seed)
    kinds: tuple[Fault, ...] = ("before", "after", "torn")
    return lambda call: draw.choice(kinds) if draw.random() < share else None


# ---- faults ----


@pytest.mark.parametrize("kind", [FaultyFileSystem, FaultyRenamingFileSystem])
@pytest.mark.parametrize("fault", ["before", "after", "torn"])
@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.each_value_once
def test_whatever_call_of_a_put_fails_the_object_is_whole_or_the_error_is_clean(
    kind: type[FaultyFileSystem], fault: Fault, sticky: bool
) -> None:
    data = b"0123456789" * 100
    for n in itertools.count():
        fs = kind(MemoryFileSystem(), lambda call: fault if hit(call.number, n, sticky) else None)  # noqa: B023
        storage = Storage.on(fs, fresh("memory")[8:], retry=Retry(attempts=3, first_delay=0))
        cause: BaseException | None = None
        try:
            storage.put("data/a.bin", data)
            stored = True
        except PublishError as error:
            stored, cause = False, error.__cause__
        assert stored or isinstance(cause, OSError)
        renames = kind is FaultyRenamingFileSystem
        seen = fs.target.store.get(f"{storage.root}/data/a.bin")
        if stored:
            assert seen is not None
            assert seen.getvalue() == data
        elif renames and seen is not None:
            assert seen.getvalue() == data, "a rename shows nothing that is torn"
        fs.choose = lambda call: None
        storage.put("data/a.bin", data)
        assert storage.read("data/a.bin") == data
        if n >= len(fs.calls):
            break
    assert n > 1


def hit(number: int, n: int, sticky: bool) -> bool:
    return number >= n if sticky else number == n


def test_a_lost_response_is_a_success_and_is_put_once() -> None:
    fs = FaultyFileSystem(MemoryFileSystem(), lambda call: "after" if call.operation == "pipe_file" else None)
    storage = Storage.on(fs, fresh("memory")[8:], retry=AT_ONCE)
    storage.put("a.bin", b"content")
    assert Counter(call.operation for call in fs.calls)["pipe_file"] == 1


def test_a_lost_response_after_which_another_content_is_there_is_put_again() -> None:
    other = fresh("memory")[8:]

    def choose(call: Call) -> Fault | None:
        if call.operation == "pipe_file" and call.number < 2:
            MemoryFileSystem().pipe_file(call.path, b"CONTENT")  # of the same size
            return "before"
        return None

    storage = Storage.on(FaultyFileSystem(MemoryFileSystem(), choose), other, retry=AT_ONCE)
    storage.put("a.bin", b"content")
    assert storage.read("a.bin") == b"content"


@pytest.mark.few(1)
@pytest.mark.parametrize("flipped", [(20 << 20) - 1, None, *further(0, 9 << 20)])
def test_a_large_object_is_compared_to_its_last_byte_and_in_pieces_before_it_is_taken_for_stored(
    flipped: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(0).randbytes(20 << 20)
    there = bytearray(data)
    if flipped is not None:
        there[flipped] ^= 1

    def choose(call: Call) -> Fault | None:
        if call.operation != "pipe_file" or Counter(c.operation for c in fs.calls)["pipe_file"] > 1:
            return None
        MemoryFileSystem().pipe_file(call.path, bytes(there))
        return "before"

    fs = FaultyFileSystem(MemoryFileSystem(), choose)
    storage = Storage.on(fs, fresh("memory")[8:], retry=AT_ONCE)
    pieces: list[int] = []
    read = RemoteFolder._read

    def shim(folder: RemoteFolder, full: str, start: int, stop: int | None, size: int) -> bytes:
        found = read(folder, full, start, stop, size)
        pieces.append(len(found))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "_read", shim)
        storage.put("a.bin", data)
    assert Counter(call.operation for call in fs.calls)["pipe_file"] == (1 if flipped is None else 2)
    assert max(pieces) <= 8 << 20
    assert storage.read("a.bin") == data


def test_a_large_object_that_was_torn_is_not_taken_for_stored() -> None:
    data = bytes(3 * 2**20)
    fs = FaultyFileSystem(MemoryFileSystem(), lambda call: "torn" if call.number == 1 else None)
    storage = Storage.on(fs, fresh("memory")[8:], retry=AT_ONCE)
    storage.put("a.bin", data)
    assert storage.read("a.bin") == data
    assert Counter(call.operation for call in fs.calls)["pipe_file"] == 2


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import LocalFileSystem as ArrowLocal

    arrow = Storage.on(
        ArrowFSWrapper(ArrowLocal()), str(tmp_path / "arrow"), uri="arrow://run", retry=AT_ONCE
    )
    for storage in (arrow, Storage.open(tmp_path / "local", retry=AT_ONCE)):
        for _ in range(2):
            storage.put("data/w/a.bin", b"content")
            assert storage.read("data/w/a.bin") == b"content"
            shutil.rmtree(storage.root)


def test_attempts_are_bounded_and_further_and_further_apart() -> None:
    waits: list[float] = []
    fs = FaultyFileSystem(MemoryFileSystem(), lambda call: "before")
    retry = Retry(attempts=6, first_delay=1.0, max_delay=10.0, sleep=waits.append)
    storage = Storage.on(fs, "/run", retry=retry)
    with pytest.raises(PublishError, match="7 bytes could not be stored in 6 attempts: OSError"):
        storage.put("a.bin", b"content")
    assert len(waits) == 5
    assert all(0.5 * 2**i <= wait <= min(1.5 * 2**i, 10) for i, wait in enumerate(waits))
    with pytest.raises(OSError, match="injected"):
        storage.list()


def test_what_no_repetition_can_change_is_not_repeated() -> None:
    fs = FaultyFileSystem(MemoryFileSystem(), lambda call: "before", lambda: PermissionError(13, "denied"))
    storage = Storage.on(fs, "/run", retry=AT_ONCE)
    with pytest.raises(PublishError, match="in 1 attempts: PermissionError"):
        storage.put("a.bin", b"content")
    with pytest.raises(PermissionError, match="denied"):
        storage.read("b.bin")
    assert sum(call.path.endswith("b.bin") for call in fs.calls) == 1


def test_an_outage_is_not_taken_for_an_empty_folder() -> None:
    fs = FaultyFileSystem(MemoryFileSystem(), lambda call: None)
    storage = Storage.on(fs, fresh("memory")[8:], retry=Retry(attempts=2, first_delay=0))
    storage.put("data/w/a.bin", b"content")
    fs.choose = lambda call: "before" if call.path.endswith("data/w") else None
    with pytest.raises(StoreError) as caught:
        storage.list()
    assert str(caught.value.uri).startswith(storage.uri)
    with pytest.raises(StoreError):
        storage.exists("data/w")


def test_an_interrupt_is_not_swallowed_and_leaves_nothing() -> None:
    def interrupted(call: Call) -> Fault | None:
        if call.operation == "mv":
            raise KeyboardInterrupt
        return None

    storage = Storage.on(FaultyRenamingFileSystem(MemoryFileSystem(), interrupted), fresh("memory")[8:])
    with pytest.raises(KeyboardInterrupt):
        storage.put("a.bin", b"content")
    assert storage.list() == []


def test_objects_go_through_a_rename_where_there_is_one() -> None:
    before = Renaming.moves
    storage = Storage.open(fresh("renaming"))
    storage.put("data/a.bin", b"content")
    assert Renaming.moves == before + 1
    assert [entry.path for entry in storage.list()] == ["data/a.bin"]


def test_a_torn_leftover_is_replaced_where_nothing_moves_onto_an_object() -> None:
    storage = Storage.open(fresh("renaming"))
    storage.fs.pipe_file(f"{storage.root}/data/a.bin", b"cont")
    storage.put("data/a.bin", b"content")
    assert storage.read("data/a.bin") == b"content"


def test_no_write_handle_is_ever_opened() -> None:
    fs = FaultyFileSystem(MemoryFileSystem(), lambda call: None)
    storage = Storage.on(fs, fresh("memory")[8:])
    storage.put("a.bin", b"content")
    with pytest.raises(AssertionError, match="write handle"):
        fs.open("/x", "wb")
    assert {call.operation for call in fs.calls} == {"makedirs", "pipe_file"}


# ---- local system calls ----

SYSCALLS = ("open", "write", "fsync", "replace", "close", "mkdir", "stat", "unlink")


class FailingOs:
    """Makes the n-th call (from 0) of SYSCALLS fail; with ``sticky``, every later one too.

    A negative ``code`` ends the process instead.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int, *, sticky: bool, code: int) -> None:
        self.n, self.sticky, self.code = n, sticky, code
        self.count = 0
        self.thread = threading.get_ident()
        for name in SYSCALLS:
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name: str, call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return call(*args, **kwargs)
            number, self.count = self.count, self.count + 1
            failing = self.n >= 0 and hit(number, self.n, self.sticky)
            if not failing or name == "close":
                result = call(*args, **kwargs)  # a descriptor is gone even if closing it fails
            if failing and self.code < 0:
                os._exit(9)
            if failing:
                raise OSError(self.code, f"injected into {name}")
            return result

        return wrapper


@pytest.mark.few(1)
@linux_only
@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("old", [None, b"the old object"])
@pytest.mark.each_value_once
def test_whatever_system_call_of_a_put_fails_the_object_is_old_or_whole(
    tmp_path: Path, sticky: bool, code: int, old: bytes | None
) -> None:
    data = b"0123456789" * 1000
    failures = 0
    for n in itertools.count():
        root = tmp_path / str(n)
        storage = Storage.open(root, retry=Retry(attempts=2, first_delay=0))
        if old is not None:
            storage.put("data/a.bin", old)
        with pytest.MonkeyPatch.context() as patch:
            faults = FailingOs(patch, n, sticky=sticky, code=code)
            try:
                storage.put("data/a.bin", data)
                stored = True
            except PublishError:
                stored = False
                failures += 1
        file = root / "data" / "a.bin"
        content = file.read_bytes() if file.exists() else None
        assert content == data if stored else content in (old, data)
        assert open_files_below(tmp_path) == []
        storage.put("data/a.bin", data)
        assert storage.read("data/a.bin") == data
        if not sticky:
            assert os.listdir(root / TMP_DIR) == []
        if n >= faults.count:
            break
    assert n >= 10
    # One EIO is repaired by the second attempt; no attempt makes room on a full disk.
    assert failures == 0 if code == errno.EIO and not sticky else failures > 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("old", [b"the old object", *further(None)])
def test_a_process_that_dies_at_any_system_call_of_a_put_leaves_the_object_old_or_whole(
    tmp_path: Path, old: bytes | None
) -> None:
    data = b"0123456789" * 1000
    contents = []
    for n in itertools.count():
        storage = Storage.open(tmp_path / str(n))
        if old is not None:
            storage.put("data/a.bin", old)
        child = os.fork()
        if child == 0:
            with pytest.MonkeyPatch.context() as patch:
                FailingOs(patch, n, sticky=False, code=-1)
                storage.put("data/a.bin", data)
            os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        file = tmp_path / str(n) / "data" / "a.bin"
        contents.append(file.read_bytes() if file.exists() else None)
        storage.put("data/a.bin", data)
        assert [entry.path for entry in storage.list("data")] == ["data/a.bin"]
        assert storage.read("data/a.bin") == data
        if not died:
            break
    assert set(contents) == {old, data}
    assert contents == sorted(contents, key=lambda content: content == data), "once whole, whole for good"


@linux_only
def test_whatever_system_call_of_a_read_fails_no_descriptor_leaks(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    storage.put("data/w/a.bin", b"content")
    for n in itertools.count():
        with pytest.MonkeyPatch.context() as patch:
            faults = FailingOs(patch, n, sticky=False, code=errno.EIO)
            try:
                assert storage.read("data/w/a.bin") == b"content"
            except OSError as error:
                assert error.errno == errno.EIO  # noqa: PT017
        assert open_files_below(tmp_path) == []
        if n >= faults.count:
            break
    assert n >= 6


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[:3]))
    storage = Storage.open(tmp_path)
    storage.put("a.bin", b"0123456789")
    assert (tmp_path / "a.bin").read_bytes() == b"0123456789"


def test_the_object_then_its_name_are_synced_and_a_new_folder_before_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace, mkdir = os.fsync, os.replace, os.mkdir

    def name_of(fd: int) -> str:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return "temporary" if path.endswith(".tmp") else os.path.relpath(path, tmp_path)

    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(f"sync {name_of(fd)}"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *a, **k: (events.append("replace"), replace(*a, **k)))
    monkeypatch.setattr(
        os, "mkdir", lambda p, *a, **k: (events.append(f"mkdir {Path(p).name}"), mkdir(p, **k))
    )
    Storage.open(tmp_path / "run").put("data/a.bin", b"content")
    assert events == [
        "mkdir run",
        "sync .",
        "mkdir _tmp",  # What it holds has another name before anybody relies on it.
        "sync temporary",
        "mkdir data",
        "sync run",
        "replace",
        "sync run/data",
    ]
    events.clear()
    Storage.open(tmp_path / "run", sync=False).put("data/a.bin", b"content")
    assert events == ["replace"]


def test_the_user_s_umask_decides_who_may_read(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        Storage.open(tmp_path).put("data/a.bin", b"content")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "data" / "a.bin").stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_root_reads_and_refuses_puts(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    storage.put("a.bin", b"content")
    tmp_path.chmod(0o555)
    try:
        assert storage.read("a.bin") == b"content"
        with pytest.raises(PublishError, match="PermissionError"):
            storage.put("data/b.bin", b"content")
    finally:
        tmp_path.chmod(0o755)


def test_a_file_where_the_root_should_be_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PublishError, match="NotADirectoryError"):
        Storage.open(tmp_path / "file").put("a.bin", b"content")


def test_a_folder_where_the_object_should_be_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.bin").mkdir()
    storage = Storage.open(tmp_path)
    with pytest.raises(PublishError, match="IsADirectoryError"):
        storage.put("a.bin", b"content")
    with pytest.raises(UnsafeData, match="not a regular file"):
        storage.read("a.bin")
    assert os.listdir(tmp_path / TMP_DIR) == []


# ---- links and special files ----


@pytest.fixture(params=[True, False], ids=["openat", "no openat"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr("rlio.storage.local._HAS_OPENAT", False)
        monkeypatch.setattr("rlio.storage.local._READ", os.O_RDONLY)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.bin").write_bytes(b"secret")
    return folder


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("path", ["file.bin", "folder/secret.bin", "loop/secret.bin"])
def test_no_link_inside_the_root_is_followed(
    tmp_path: Path, outside: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "file.bin").symlink_to(outside / "secret.bin")
    (root / "folder").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    storage = Storage.open(root)
    with pytest.raises(UnsafeData, match="symbolic link"):
        storage.read(path)
    assert not storage.exists("file.bin")
    with caplog.at_level(logging.WARNING, "rlio"):
        assert storage.list() == []
        assert storage.list("folder") == []
    assert "3 symbolic links" in caplog.text
    storage.put("file.bin", b"ours")
    assert (outside / "secret.bin").read_bytes() == b"secret"
    assert storage.read("file.bin") == b"ours"


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("folder", [TMP_DIR, "data"])
def test_nothing_is_written_through_a_link(tmp_path: Path, outside: Path, folder: str) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / folder).symlink_to(outside)
    with pytest.raises(PublishError, match="symbolic link"):
        Storage.open(root).put("data/a.bin", b"content")
    assert os.listdir(outside) == ["secret.bin"]


@pytest.mark.usefixtures("_both_ways")
def test_nothing_is_removed_through_a_link(tmp_path: Path, outside: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "folder").symlink_to(outside)
    (root / "file.bin").symlink_to(outside / "secret.bin")
    storage = Storage.open(root)
    with pytest.raises(UnsafeData, match="symbolic link"):
        storage.remove("folder/secret.bin")
    storage.remove("file.bin")
    assert not (root / "file.bin").is_symlink()
    assert (outside / "secret.bin").exists()


def test_a_root_that_is_a_link_is_the_user_s_own_word(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    storage = Storage.open(tmp_path / "link")
    storage.put("data/a.bin", b"content")
    assert (tmp_path / "real" / "data" / "a.bin").read_bytes() == b"content"
    assert storage.list() == [Entry("data/a.bin", 7)]


def test_a_pipe_or_socket_that_poses_as_an_object_is_neither_listed_nor_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    storage = Storage.open(tmp_path)
    assert storage.list() == []
    assert not storage.exists("pipe.bin")
    with pytest.raises(UnsafeData, match="not a regular file"):
        storage.read("pipe.bin")


# ---- what is a path and what is a URI ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/run", True),
        ("memory://run", True),
        (Path("/folder").as_uri(), True),
        ("file:/run", True),
        ("abfss://c@a.dfs.core.windows.net/run", True),
        ("simplecache::s3://bucket/run", True),
        ("s3foo/run", False),
        ("d4rl", False),
        ("gs", False),
        ("memory", False),
        ("C:\\run", False),
        ("c:/run", False),
        ("C://run", False),
        ("./s3://bucket", False),
        ("a::b", False),
        ("/tmp/s3://x", False),
        ("~/run", False),
        ("run with spaces/*.json", False),
    ],
)
def test_a_uri_has_a_scheme_and_all_else_is_a_path(text: str, expected: bool) -> None:
    assert is_uri(text) is expected


def test_a_relative_path_is_fixed_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = Storage.open("s3foo/a::b/#1 50%")
    monkeypatch.chdir("/")
    storage.put("a.bin", b"content")
    assert (tmp_path / "s3foo" / "a::b" / "#1 50%" / "a.bin").read_bytes() == b"content"
    assert storage.root == storage.uri == str(tmp_path / "s3foo" / "a::b" / "#1 50%")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Storage.open("~/run").root == str(tmp_path / "run")
    assert Storage.open(Path("~/run")).root == str(tmp_path / "run")


def test_a_path_object_is_a_path_even_where_its_text_reads_as_a_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(os.PathLike[str]):
        def __fspath__(self) -> str:
            return "memory://run"

    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory:").mkdir()
    assert Storage.open(Odd()).root == str(tmp_path / "memory:" / "run")


def test_a_uri_that_went_through_pathlib_is_recognised() -> None:
    for value in (Path("s3://bucket/run"), "s3:/bucket/run"):
        with pytest.raises(OptionError, match=r"'s3://\.\.\.' itself"):
            Storage.open(value)


@pytest.mark.parametrize("value", ["", "a\0b"])
def test_an_empty_path_or_a_nul_is_refused(value: str) -> None:
    with pytest.raises(OptionError, match="is not a path"):
        Storage.open(value)


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"'s4'.*did you mean s3://.*known are .*memory") as caught:
        Storage.open("s4://bucket/run")
    assert "'./...'" in str(caught.value)
    with pytest.raises(UnknownName, match="did you mean s3"):
        Storage.open("S3://bucket/run")
    with pytest.raises(UnknownName, match="nocache"):
        Storage.open("nocache::memory://run")


def test_a_known_scheme_without_its_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.registry

    def missing(scheme: str) -> Any:
        raise ImportError(f"Install it to access {scheme}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(MissingExtra, match=r"s3fs is not installed.*rlio\[s3\]"):
        Storage.open("s3://bucket/run")
    with pytest.raises(UnknownName, match="Install it to access smb"):
        Storage.open("smb://server/run")


def test_options_that_nothing_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"\['anon'\] were given for a local path.*into_storage_options"):
        Storage.open(tmp_path, storage_options={"anon": True})
    with pytest.raises(OptionError, match="given for local files"):
        Storage.open(f"file://{tmp_path}", storage_options={"auto_mkdir": True})


def test_secrets_in_a_uri_are_not_shown() -> None:
    assert mask_secrets("sftp://me:hunter2@host/run") == "sftp://me:***@host/run"
    assert mask_secrets("https://host/x.json?X-Signature=abc") == "https://host/x.json?***"
    assert mask_secrets("s3://bucket/a@b:c?d") == "s3://bucket/a@b:c?d"
    storage = Storage.on(MemoryFileSystem(), "/run", uri="ftp://me:hunter2@host/run")
    assert "hunter2" not in repr(storage) + storage.uri_of("a.bin")


def test_a_local_filesystem_object_is_a_local_folder(tmp_path: Path) -> None:
    for fs, root in (
        (LocalFileSystem(), str(tmp_path)),
        (DirFileSystem(str(tmp_path), LocalFileSystem()), ""),
    ):
        storage = Storage.on(fs, root)
        assert storage.is_local
        assert storage.root == str(tmp_path)


def _veiled(data: bytes) -> bytes:
    """Data as an encrypting filesystem stores it, and the other way round."""
    return bytes(byte ^ 0x55 for byte in data)


class Veiled(LocalFileSystem):  # type: ignore[misc]  # fsspec ships no type information
    """A local filesystem that stores nothing as it is given."""

    protocol = "veiled"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, _veiled(value), mode=mode, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(_veiled(Path(path).read_bytes()))
        return super()._open(path, mode, **kwargs)


class VeiledFolder(DirFileSystem):  # type: ignore[misc]  # fsspec ships no type information
    """A folder of a plain filesystem that stores nothing as it is given."""

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        super().pipe_file(path, _veiled(value), **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return _veiled(super().cat_file(path, **kwargs))[start:end]

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return io.BytesIO(self.cat_file(path))


class VeiledClient(AsyncFileSystemWrapper):  # type: ignore[misc]  # fsspec ships no type information
    """An asynchronous filesystem whose synchronous methods alone are overridden."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.sync_fs.pipe_file(path, _veiled(value), mode=mode, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return _veiled(self.sync_fs.cat_file(path, **kwargs))[start:end]


def test_a_filesystem_that_encrypts_is_asked_also_where_it_is_a_kind_of_one_that_we_know(
    tmp_path: Path,
) -> None:
    for name in ("local", "within", "folder", "client"):
        (tmp_path / name).mkdir()
    places: list[tuple[Any, str]] = [
        (Veiled(), str(tmp_path / "local")),
        (VeiledClient(fs=LocalFileSystem(), asynchronous=False), str(tmp_path / "client")),
        (DirFileSystem(str(tmp_path / "within"), Veiled()), ""),
        (VeiledFolder(str(tmp_path / "folder"), LocalFileSystem()), ""),
        (VeiledClient(fs=LocalFileSystem(), asynchronous=False), str(tmp_path / "client")),
    ]
    for fs, root in places:
        storage = Storage.on(fs, root)
        assert not storage.is_local
        storage.put("sub/a.bin", b"plain text")
        (stored,) = tmp_path.rglob("a.bin")
        assert stored.read_bytes() == _veiled(b"plain text"), type(fs)
        assert storage.read("sub/a.bin") == b"plain text", type(fs)
        assert storage.read_range("sub/a.bin", 2, 7) == b"ain t", type(fs)
        assert storage.list() == [Entry("sub/a.bin", 10)], type(fs)
        stored.unlink()


def test_a_data_set_and_the_files_of_others_on_a_local_filesystem_that_encrypts(tmp_path: Path) -> None:
    fsspec.register_implementation("veiled", Veiled, clobber=True)
    root = f"veiled://{tmp_path}/run"
    (tmp_path / "run").mkdir()
    with rlio.ParquetWriter(root, spool=None) as writer:
        writer.write(rlio.SampleBatch(t=np.arange(3)))
    stored = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [_veiled(data)[:4] for data in stored].count(b"PAR1") == 1
    assert not any(b"PAR1" in data or b"format" in data for data in stored)
    with rlio.DatasetReader(root, epochs=1) as reader:
        assert [batch["t"].tolist() for batch in reader] == [[0, 1, 2]]
    (tmp_path / "other.json").write_bytes(_veiled(b"{}"))
    (file,) = expand_inputs(f"veiled://{tmp_path}", suffixes=(".json",))
    with open_input(file) as stream:
        assert stream.read() == b"{}"


def test_only_the_sftp_client_that_we_know_is_bypassed() -> None:
    paramiko = pytest.importorskip("paramiko")
    from fsspec.implementations.sftp import SFTPFileSystem

    class Encrypting(SFTPFileSystem):  # type: ignore[misc]  # fsspec ships no type information
        pass

    def connect(self: Any) -> None:
        self.client, self.ftp = paramiko.SSHClient(), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SFTPFileSystem, "_connect", connect)
        found = [
            RemoteFolder(cls(host="nowhere", skip_instance_cache=True), "/run")._over_sftp
            for cls in (SFTPFileSystem, Encrypting)
        ]
    assert found == [True, False]


def _read_in_child(storage: Storage, answers: Any) -> None:
    answers.put(storage.read("a.bin"))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_storage_works_on_after_a_fork(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    storage.put("a.bin", b"content")
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_read_in_child, args=(storage, answers))
    child.start()
    assert answers.get(timeout=120) == b"content"
    child.join()


def test_an_asynchronous_client_is_recreated_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no type information
        protocol = "client"
        async_impl = True
        cachable = False

    client = Client(token="x")
    storage = Storage.on(client, "/run")
    assert storage.fs is client
    monkeypatch.setattr(os, "getpid", lambda: -1)
    again = storage.fs
    assert again is not client
    assert again.storage_options == {"token": "x"}
    assert storage.fs is again


# ---- finding the files of others ----


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for name in ("run-10.json", "run-9.json", "run-1.jsonl", "notes.txt", ".hidden.json", "sub/run-2.json"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(name.encode())
    return tmp_path


@pytest.fixture(params=["local", "memory", "norename"])
def place(request: pytest.FixtureRequest, logs: Path) -> Iterator[str]:
    """The same files as ``logs``, on several filesystems."""
    if request.param == "local":
        yield str(logs)
        return
    storage = Storage.open(fresh(request.param))
    for file in logs.rglob("*"):
        if file.is_file():
            storage.put(str(file.relative_to(logs)), file.read_bytes())
    yield storage.uri


SUFFIXES = (".json", ".jsonl", ".zip")


def found(place: str, inputs: Any, **options: Any) -> list[str]:
    files = expand_inputs(inputs, **options)
    for file in files:
        with open_input(file) as stream:
            content = stream.read()
        assert file.uri == f"{place}/{content.decode()}"
        assert file.size == len(content)
    return [file.uri.removeprefix(place + "/") for file in files]


def test_a_folder_gives_its_files_with_a_suffix_in_numeric_order(place: str) -> None:
    assert found(place, place, suffixes=SUFFIXES) == ["run-1.jsonl", "run-9.json", "run-10.json"]
    assert found(place, place + "/", suffixes=(".json",)) == ["run-9.json", "run-10.json"]
    assert found(place, place) == ["notes.txt", "run-1.jsonl", "run-9.json", "run-10.json"]


def test_a_folder_is_searched_to_the_bottom_when_asked(place: str) -> None:
    names = found(place, place, suffixes=(".json",), recursive=True)
    assert names == ["run-9.json", "run-10.json", "sub/run-2.json"]


def test_a_glob_gives_what_it_matches(place: str) -> None:
    assert found(place, f"{place}/run-*.json") == ["run-9.json", "run-10.json"]
    assert found(place, f"{place}/**/run-[29].json") == ["run-9.json", "sub/run-2.json"]
    # As in a shell, a star leaves out hidden files, on every filesystem.
    assert found(place, f"{place}/*") == ["notes.txt", "run-1.jsonl", "run-9.json", "run-10.json"]


def test_a_file_is_taken_whatever_its_suffix(place: str) -> None:
    assert found(place, f"{place}/notes.txt", suffixes=(".json",)) == ["notes.txt"]


def test_a_list_gives_each_file_once(place: str) -> None:
    inputs = [f"{place}/run-9.json", place, f"{place}/run-*.json"]
    assert found(place, inputs, suffixes=(".json",)) == ["run-9.json", "run-10.json"]


def test_a_list_gives_its_files_in_its_order(place: str) -> None:
    inputs = [f"{place}/sub/run-2.json", f"{place}/run-10.json", f"{place}/run-[19].json*"]
    assert found(place, inputs) == ["sub/run-2.json", "run-10.json", "run-1.jsonl", "run-9.json"]


def test_a_list_may_mix_paths_and_uris(logs: Path) -> None:
    uri = fresh("memory")
    Storage.open(uri).put("x.json", b"{}")
    files = expand_inputs([logs / "run-9.json", uri], suffixes=SUFFIXES)
    assert [file.uri for file in files] == [str(logs / "run-9.json"), f"{uri}/x.json"]


def test_a_name_that_exists_is_literal(tmp_path: Path) -> None:
    (tmp_path / "run[1]*.json").write_bytes(b"{}")
    (tmp_path / "run[2]").mkdir()
    (tmp_path / "run[2]" / "a.json").write_bytes(b"{}")
    assert [file.path for file in expand_inputs(tmp_path / "run[1]*.json")] == [
        str(tmp_path / "run[1]*.json")
    ]
    assert [file.path for file in expand_inputs(tmp_path / "run[2]")] == [str(tmp_path / "run[2]" / "a.json")]


@pytest.mark.parametrize("tail", ["/*.parquet", "/missing", "/missing/*.json", "/sub/*.zip"])
def test_nothing_found_is_an_error_that_lists_what_is_there(place: str, tail: str) -> None:
    with pytest.raises(DataNotFound, match=r"run-|nothing is there") as caught:
        expand_inputs([f"{place}/run-9.json", place + tail], suffixes=SUFFIXES)
    assert caught.value.uri == place + tail


def test_a_folder_without_a_fitting_file_names_the_suffixes_and_what_it_holds(logs: Path) -> None:
    with pytest.raises(DataNotFound, match=r"ending in \.zip, \.lz4 found: .*'notes\.txt'"):
        expand_inputs(logs, suffixes=(".zip", ".lz4"))


def test_links_are_followed_where_named_and_within_their_folder(logs: Path) -> None:
    (logs / "sub" / "link.json").symlink_to(logs / "run-9.json")
    (named,) = expand_inputs(logs / "sub" / "link.json")
    assert named.size == len("run-9.json")
    for place in (logs / "sub", f"{logs}/sub/*.json"):
        with pytest.raises(UnsafeData, match=r"link\.json' leads out of the folder, to '.*run-9.*cp -rL"):
            expand_inputs(place)
    # Of the whole, it is a second name of a file that is there.
    assert [Path(f.path).name for f in expand_inputs(f"{logs}/**/*.json")].count("run-9.json") == 1
    (logs / "sub" / "link.json").unlink()
    (logs / "sub" / "other.json").symlink_to("run-2.json")
    (logs / "sub" / "circle").symlink_to(logs / "sub")
    for recursive in (False, True):
        (file,) = expand_inputs(logs / "sub", suffixes=(".json",), recursive=recursive)
        assert Path(file.path).name == "run-2.json"
    (logs / "sub" / "gone.json").symlink_to("run-3.json")
    with pytest.raises(UnsafeData, match=r"gone\.json' leads to .*where nothing is.*annex"):
        expand_inputs(logs / "sub")


def test_a_linked_folder_out_of_the_folder_is_refused_where_it_would_be_read(
    logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.json").write_text("{}")
    (logs / "sub" / "away").symlink_to(outside)
    assert [Path(f.path).name for f in expand_inputs(logs / "sub")] == ["run-2.json"]  # Not looked into.
    with pytest.raises(UnsafeData, match="'sub/away' leads out"):
        expand_inputs(logs, recursive=True)
    with pytest.raises(UnsafeData, match=r"'sub/away/secret.json' leads out"):
        expand_inputs(f"{logs}/**/*.json")


def test_no_inputs_and_too_many_are_refused(logs: Path) -> None:
    with pytest.raises(OptionError, match="no inputs"):
        expand_inputs([])
    with pytest.raises(UnsafeData, match="more than 2 files"):
        expand_inputs(logs, limit=2)


def test_options_for_uris_are_refused_where_there_is_none(logs: Path) -> None:
    with pytest.raises(OptionError, match="given for a local path"):
        expand_inputs([logs], storage_options={"anon": True})


def test_an_unknown_scheme_among_the_inputs_is_named(logs: Path) -> None:
    with pytest.raises(UnknownName, match="'nosuch'"):
        expand_inputs([logs, "nosuch://x/*.json"])


def test_an_input_that_is_gone_when_it_is_opened_is_named(logs: Path) -> None:
    (file,) = expand_inputs(logs / "run-9.json")
    (logs / "run-9.json").unlink()
    with pytest.raises(DataNotFound, match=r"run-9\.json"):
        open_input(file)


def test_a_listing_while_others_write_and_remove_sees_only_whole_objects(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path, sync=False)
    stop = threading.Event()
    failures: list[BaseException] = []

    def churn() -> None:
        try:
            for i in itertools.count():
                if stop.is_set():
                    return
                storage.put(f"data/w{i % 7}/{i % 13}.bin", b"content")
                storage.remove(f"data/w{(i + 3) % 7}/{(i + 5) % 13}.bin")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(200):
            assert {entry.size for entry in storage.list("data")} <= {7}
    finally:
        stop.set()
        thread.join()
    assert failures == []


def test_a_storage_survives_pickling(tmp_path: Path) -> None:
    """With the bytes that other processes get; the suite for authors makes do without them."""
    storage = Storage.open(tmp_path)
    storage.put("a.bin", b"content")
    twin = pickle.loads(pickle.dumps(storage))
    assert twin.uri == storage.uri
    assert twin.read("a.bin") == b"content"
