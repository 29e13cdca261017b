"""The cache of built stores: shared, bounded, and never wrong, whoever dies, and whatever lies there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import itertools
import json
import logging
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from crash_child import fork, wait_for
from crash_shim import DIED, Call, dying_at, failing, intercepted, open_files_below
from further import first, further
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.errors import CacheError, ClosedError, CorruptData, OptionError, UnsafeData
from rlio.replay import cache, cache_files, cache_room, memory
from rlio.replay.cache import Build, CacheFolder, Entry, Reading
from rlio.replay.manifests import Manifest

KEY: Final = "0123456789abcdef"
OTHER: Final = "fedcba9876543210"
ROWS: Final = np.dtype("<i8")
spawn: Final = multiprocessing.get_context("spawn")


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path / "cache")


@pytest.fixture(autouse=True)
def _nobody_pulls_the_plug(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync costs tens of milliseconds; only tests of durability can tell whether there was one."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def unsynced(handle: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """The same for calls that pass through a handler."""
    return lambda call: handle(call._replace(go=lambda: None) if call.name == "fsync" else call)


def entry_of(folder: CacheFolder | Path, key: str = KEY) -> Entry:
    made = folder if isinstance(folder, CacheFolder) else CacheFolder(folder)
    return made.entry(key, {"root": f"/data/{key}"})


def extend(build: Build, rows: int) -> None:
    """Build or extend the store of the numbers 0, 1, ... by as many."""
    first = build.manifest.state["head"] if build.manifest is not None else 0
    array = build.arrays.array("rows", (first + rows,), ROWS)
    build.arrays.reserve("rows", first + rows)
    array[first:] = np.arange(first, first + rows)
    build.publish({"head": first + rows})


def build(entry: Entry, rows: int = 10) -> None:
    with entry.building() as opened:
        if opened.manifest is None:
            extend(opened, rows)


def rows_in(entry: Entry) -> int | None:
    """How many rows a reader finds, each of which is checked; None for no store."""
    reading = entry.reading()
    return None if reading is None else rows_read(reading)


@contextlib.contextmanager
def opened_for_reading(entry: Entry) -> Iterator[Reading]:
    reading = entry.reading()
    assert reading is not None
    yield reading


def rows_read(reading: Reading) -> int:
    head: int = reading.manifest.state["head"]
    found = reading.arrays.array("rows", (head,), ROWS)
    np.testing.assert_array_equal(found, np.arange(head))
    return head


def names(folder: CacheFolder) -> list[str]:
    """What lies in the folder, apart from locks and what always does."""
    found = {name for name in os.listdir(folder.path) if not name.endswith(".lock")}
    return sorted(found - {"rlio-cache", "CACHEDIR.TAG"})


# ---- building and reading


def test_what_was_built_is_read_by_others_of_this_user_alone(folder: CacheFolder) -> None:
    entry = entry_of(folder)
    assert rows_in(entry) is None
    build(entry)
    assert rows_in(entry_of(CacheFolder(folder.path))) == 10
    assert names(folder) == [f"{KEY}.store"]
    assert sorted(os.listdir(entry.path)) == ["manifest.json", "rows.array"]
    for path, _, files in os.walk(folder.path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
        assert all(stat.S_IMODE(os.stat(os.path.join(path, file)).st_mode) == 0o600 for file in files)
    assert folder.bytes == 8192


def test_an_extension_is_seen_by_new_readers_and_leaves_the_old_as_they_are(folder: CacheFolder) -> None:
    entry = entry_of(folder)
    build(entry)
    with opened_for_reading(entry) as old:
        before = old.arrays.array("rows", (10,), ROWS)
        with entry.building() as opened:
            assert opened.manifest == old.manifest
            extend(opened, 990)
        assert rows_in(entry) == 1000
        np.testing.assert_array_equal(before, np.arange(10))
    with opened_for_reading(entry) as late:
        with pytest.raises(CorruptData):
            late.arrays.array("rows", (1001,), ROWS)
        assert late.manifest.arrays == {"rows": 8000}


def test_a_reader_opens_its_arrays_as_long_as_they_were_when_it_came(folder: CacheFolder) -> None:
    entry = entry_of(folder)
    build(entry)
    with opened_for_reading(entry) as old:
        with entry.building() as opened:
            extend(opened, 10)
        with pytest.raises(CorruptData, match="80 bytes, expected 160"):
            old.arrays.array("rows", (20,), ROWS)
        assert rows_read(old) == 10


def test_a_build_may_publish_again_and_again(folder: CacheFolder) -> None:
    entry = entry_of(folder)
    with entry.building() as opened:
        for rows in (10, 20, 30):
            extend(opened, 10)
            assert rows_in(entry) == rows


def test_arrays_are_cut_to_what_is_used(folder: CacheFolder) -> None:
    entry = entry_of(folder)
    with entry.building() as opened:
        rows = opened.arrays.array("rows", (1 << 40,), np.dtype("u1"))
        opened.arrays.array("empty", (0, 3), ROWS)
        opened.arrays.reserve("rows", 5)
        rows[:5] = 1
        manifest = opened.publish({"any": [1, None, "ü"]}, rows={"rows": 5})
    assert manifest.arrays == {"rows": 5, "empty": 0}
    with opened_for_reading(entry) as reading:
        assert reading.manifest == manifest
        assert reading.arrays.array("rows", (5,), np.dtype("u1")).tolist() == [1] * 5
        assert reading.arrays.array("empty", (0, 3), ROWS).shape == (0, 3)
    assert folder.bytes == 8192


def test_what_is_not_published_is_dropped(folder: CacheFolder) -> None:
    entry = entry_of(folder)
    with entry.building() as opened:
        opened.arrays.array("rows", (10,), ROWS)
        opened.arrays.reserve("rows", 10)
        assert len(names(folder)) == 1
    assert names(folder) == []
    with pytest.raises(ZeroDivisionError), entry.building() as opened:
        opened.arrays.array("rows", (10,), ROWS)[:] = 1 // 0
    assert names(folder) == []
    assert rows_in(entry) is None
    with pytest.raises(ClosedError):
        opened.ensure_room(1)


def test_a_store_whose_extension_is_not_published_is_built_again_by_the_next(folder: CacheFolder) -> None:
    entry = entry_of(folder)
    build(entry)
    with entry.building() as opened:
        array = opened.arrays.array("rows", (20,), ROWS)
        opened.arrays.array("more", (20,), ROWS)
        opened.arrays.reserve("rows", 20)
        array[:] = -1
        array[:10] = np.arange(10)
    assert rows_in(entry) == 10
    with entry.building() as opened:
        assert opened.manifest is None
        again = opened.arrays.array("rows", (20,), ROWS)
        assert again.tolist() == [0] * 20
    assert names(folder) == []
    build(entry, 15)
    assert rows_in(entry) == 15


def test_a_store_is_rebuilt_beside_its_readers(folder: CacheFolder) -> None:
    entry = entry_of(folder)
    build(entry)
    with opened_for_reading(entry) as old:
        with entry.building() as opened:
            opened.start_over()
            assert opened.manifest is None
            extend(opened, 7)
            assert rows_in(entry) == 7
        assert rows_read(old) == 10  # Its files are mapped, though they have no names.
    with entry.building() as opened:
        opened.start_over()
        assert rows_in(entry) is None
    assert names(folder) == []


@pytest.mark.parametrize("place", ["manifest", "some arrays", "a damaged array", "stamp"])
def test_a_reader_begins_again_when_its_store_goes_away_while_it_opens_it(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Whatever it has opened so far, it gets the next store, or none, and never a mixture or damage."""
    entry = entry_of(folder)
    module, name = {
        "manifest": (cache, "_read"),
        "some arrays": (memory.FileArrays, "_map_whole"),
        "a damaged array": (memory.FileArrays, "_check_size"),
        "stamp": (cache, "_stamp"),
    }[place]
    real = getattr(module, name)

    for rows in (4, None):
        with entry.building() as opened:
            if opened.manifest is not None:
                opened.start_over()
            opened.arrays.array("a first", (10,), ROWS)
            extend(opened, 10)

        def late(*args: Any, rows: int | None = rows) -> Any:
            monkeypatch.setattr(module, name, real)
            if place == "some arrays":
                real(*args)
            if rows is None:
                cache_files.remove_store(folder.path, KEY)
            else:
                with entry.building() as opened:
                    opened.start_over()
                    extend(opened, rows)
            if place == "a damaged array":
                raise CorruptData("an array is shorter")
            return real(*args)

        monkeypatch.setattr(module, name, late)
        assert rows_in(entry) == rows
        assert getattr(module, name) is real


def test_no_descriptor_is_left(folder: CacheFolder) -> None:
    entry = entry_of(folder)
    build(entry)
    with entry.building() as opened:
        extend(opened, 10)
    assert rows_in(entry) == 20
    with opened_for_reading(entry) as reading:
        rows_read(reading)
    del reading
    gc.collect()
    assert open_files_below(folder.path) == []


# ---- several processes


def build_and_count(path: str, log: str, seconds: float) -> None:
    """Build the store unless it is there, slowly, and note who has built it."""
    entry = entry_of(Path(path))
    with entry.building() as opened:
        built = opened.manifest is None
        if built:
            time.sleep(seconds)
            extend(opened, 10)
    with open(log, "a") as file:
        file.write(f"{json.dumps([built, rows_in(entry)])}\n")


def test_of_two_processes_one_builds_and_the_other_finds_it_built(tmp_path: Path) -> None:
    args = (str(tmp_path / "cache"), str(tmp_path / "log"), 1.0)
    pids = [fork(build_and_count, *args) for _ in range(2)]
    assert [wait_for(pid) for pid in pids] == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(line[0] for line in lines) == [False, True]
    assert [line[1] for line in lines] == [10, 10]


@pytest.mark.further
def test_many_processes_build_each_store_once(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def run(seed: int) -> None:
        keys = [f"{number:016x}" for number in range(6)]
        random.Random(seed).shuffle(keys)
        for key in keys:
            entry = entry_of(tmp_path / "cache", key)
            with entry.building() as opened:
                if opened.manifest is None:
                    with open(log, "a") as file:
                        file.write(f"{key}\n")
                    extend(opened, 100)
            assert rows_in(entry) == 100

    pids = [fork(run, seed) for seed in range(6)]
    assert [wait_for(pid) for pid in pids] == [0] * 6
    assert sorted(log.read_text().split()) == [f"{number:016x}" for number in range(6)]


def test_threads_wait_for_each_other_too(folder: CacheFolder) -> None:
    built: list[int] = []

    def run() -> None:
        with entry_of(folder).building() as opened:
            if opened.manifest is None:
                built.append(1)
                extend(opened, 10)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


def test_a_builder_waits_for_another_until_it_is_told_to_stop(folder: CacheFolder, caplog: Any) -> None:
    entry, stop = entry_of(folder), threading.Event()
    caplog.set_level(logging.INFO, "rlio")
    with entry.building(), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(entry.building, stop=stop)
        assert wait([waiting], 0.1).not_done
        stop.set()
        assert isinstance(waiting.exception(30), ClosedError)
    assert sum("waiting for another builder" in record.message for record in caplog.records) == 1
    entry.building(stop=stop).close()


def ready_child(act: Callable[[Callable[[], None]], None]) -> int:
    """Fork ``act``, which calls what it is given once it has come so far; returns then."""
    read, write = os.pipe()
    pid = fork(lambda: act(lambda: os.close(write)))
    os.close(write)
    os.read(read, 1)
    os.close(read)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert wait_for(pid) == -signal.SIGKILL


def test_a_reader_keeps_the_rows_of_a_store_that_is_evicted_meanwhile(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache", max_bytes=20_000)
    entry = entry_of(folder)
    build(entry)
    with opened_for_reading(entry) as reading:
        with entry_of(folder, OTHER).building() as opened:
            opened.ensure_room(16_000)
        assert rows_in(entry) is None
        assert names(folder) == []
        build(entry, 4)
        pid = fork(lambda: rows_read(reading))
        assert wait_for(pid) == 0
        assert rows_read(reading) == 10  # Nothing of it was opened before, here or in the fork.
    assert rows_in(entry) == 4


def test_a_fork_of_a_builder_neither_builds_nor_ends_the_build(folder: CacheFolder) -> None:
    opened = entry_of(folder).building()
    opened.arrays.array("rows", (10,), ROWS)

    def child() -> None:
        for act in (lambda: opened.ensure_room(1), lambda: opened.publish({}), lambda: opened.arrays):
            with pytest.raises(CacheError, match="fork"):
                act()
        opened.close()

    assert wait_for(fork(child)) == 0
    stop = threading.Event()
    stop.set()
    with ThreadPoolExecutor(1) as pool, pytest.raises(ClosedError):
        pool.submit(entry_of(folder).building, stop=stop).result()
    assert len(names(folder)) == 1
    opened.publish({"head": 0})
    opened.close()
    assert rows_in(entry_of(folder)) == 0


def test_a_fork_of_a_dead_builder_does_not_hold_its_lock(tmp_path: Path) -> None:
    read, write = os.pipe()

    def run() -> None:
        opened = entry_of(tmp_path / "cache").building()
        opened.arrays.array("rows", (10,), ROWS)
        os.write(write, b"%d\n" % fork(time.sleep, 600))
        time.sleep(600)

    pid = fork(run)
    child = int(os.read(read, 100))
    kill(pid)
    try:
        with entry_of(tmp_path / "cache").building() as opened:
            extend(opened, 3)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)
    assert rows_in(entry_of(tmp_path / "cache")) == 3


@pytest.mark.further
@pytest.mark.parametrize("forks", [6, *further(15)])
def test_forks_at_any_moment_hold_no_lock_of_another_thread(tmp_path: Path, forks: int) -> None:
    path, stopped = str(tmp_path), threading.Event()

    def run() -> None:
        while not stopped.is_set():
            with cache_files.builder_lock(path, KEY):
                pass

    thread = threading.Thread(target=run)
    thread.start()
    pids = [fork(time.sleep, 600) for _ in range(forks)]
    stopped.set()
    thread.join()
    try:
        cache_files.builder_lock(path, KEY).acquire(timeout=120).lock.release()
    finally:
        for pid in pids:
            kill(pid)


# ---- builders that die


# How far `life` has come -> rows that a reader may find then.
STAGES: Final[list[tuple[int | None, ...]]] = [(None, 10), (10, 20), (None, 20, 7)]


def life(path: Path, stage: mmap.mmap) -> None:
    """A first build, an extension, and one that starts over."""
    stage[0] = 0
    entry = entry_of(path)
    build(entry)
    stage[0] = 1
    with entry.building() as opened:
        opened.arrays.array("more", (5,), ROWS)
        extend(opened, 10)
    stage[0] = 2
    with entry.building() as opened:
        opened.start_over()
        extend(opened, 7)


def check_after(path: Path, stage: mmap.mmap, where: object) -> None:
    """Whatever happened: a whole store or none, and the next build succeeds and leaves nothing else there."""
    entry = entry_of(path)
    assert rows_in(entry) in STAGES[stage[0]], where
    with entry.building() as opened:
        extend(opened, 100)
    assert rows_in(entry) in (100, 110, 120, 107), where
    with entry.building() as opened:
        opened.ensure_room(1)  # Sweeps.
        assert opened.manifest is not None
    assert names(entry.folder) == [f"{KEY}.store"], where
    files = set(os.listdir(entry.path))
    assert files - {"more.array"} == {"manifest.json", "rows.array"}, where


@pytest.mark.parametrize("start", first(1, range(1, 13)))
def test_a_build_that_dies_at_any_call_leaves_a_whole_store_or_none(tmp_path: Path, start: int) -> None:
    stage = mmap.mmap(-1, 1)
    for point in itertools.count(start, 12):  # Together every call.
        path = tmp_path / f"{point}"

        def run(path: Path = path, point: int = point) -> None:
            with intercepted(unsynced(dying_at(point))):
                life(path, stage)

        status = wait_for(fork(run))
        assert status in (0, DIED), point
        check_after(path, stage, point)
        shutil.rmtree(path)
        if status == 0:
            break
    assert point > 40


@pytest.mark.parametrize(
    ("code", "start"), first(1, [((errno.ENOSPC, errno.EIO)[start % 2], start) for start in range(1, 16)])
)
def test_any_call_may_fail_and_the_store_is_whole_or_none(tmp_path: Path, code: int, start: int) -> None:
    stage = mmap.mmap(-1, 1)
    for point in itertools.count(start, 15):  # Together every call.
        path = tmp_path / f"{point}"

        def run(path: Path = path, point: int = point) -> None:
            logging.disable(logging.CRITICAL)
            fails = failing(lambda name, number: number == point and name != "close", code)
            with intercepted(unsynced(fails)) as seen:
                try:
                    life(path, stage)
                except CacheError:
                    pass
                else:
                    os._exit(0 if len(seen) >= point else 9)

        status = wait_for(fork(run))
        assert status in (0, 9), point
        if status == 9:
            break
        check_after(path, stage, point)
        shutil.rmtree(path)
    assert point > 80


def build_for_ever(path: str) -> None:
    entry = entry_of(Path(path))
    for turn in itertools.count():
        with entry.building() as opened:
            if turn % 4 == 3:
                opened.start_over()
            extend(opened, 200_000)


@pytest.mark.further
@pytest.mark.parametrize("kills", [5, *further(12)])
def test_a_build_that_is_killed_at_any_moment_leaves_a_whole_store_or_none(
    tmp_path: Path, kills: int
) -> None:
    process = spawn.Process(target=build_for_ever, args=(str(tmp_path),))
    random_, found = random.Random(5), []
    for turn in range(kills):
        if turn == 0:
            process.start()
            while not list(tmp_path.glob("*.store")):
                time.sleep(0.01)
            pid = process.pid
        else:
            pid = fork(build_for_ever, str(tmp_path))
        assert pid is not None
        while turn == kills - 1 and not any(found) and rows_in(entry_of(tmp_path)) is None:
            time.sleep(0.01)  # A busy machine may have killed all others before they had built anything.
        time.sleep(random_.uniform(0.01, 0.15))
        os.kill(pid, signal.SIGKILL)
        if turn == 0:
            process.join()
        else:
            assert wait_for(pid) == -signal.SIGKILL
        found.append(rows_in(entry_of(tmp_path)))
    assert any(found)
    folder = CacheFolder(tmp_path)
    with entry_of(folder).building() as opened:
        opened.start_over()
        extend(opened, 3)
    assert names(folder) == [f"{KEY}.store"]


def test_nothing_is_published_before_it_is_durable(tmp_path: Path) -> None:
    """Power loss: when a manifest gets its name, all that it names has been synced since it was written."""
    dirty: set[str] = set()
    renamed: list[str] = []

    def handle(call: Call) -> Any:
        if call.name in ("fsync", "fdatasync"):
            path = os.readlink(f"/proc/self/fd/{call.args[0]}")
            dirty.difference_update(
                {path, *(p for p in dirty if p.startswith("name ") and parent(p) == path)}
            )
        done = call.go()
        if call.name == "open" and call.args[1] & os.O_CREAT and "/rows" in (path := path_of(done)):
            dirty.update({path, f"name {path}"})
        if call.name in ("ftruncate", "write") and not path_of(call.args[0]).endswith(".lock"):
            dirty.add(path_of(call.args[0]))
        if call.name == "rename" and "manifest.json" in str(call.args[1]):
            renamed.append(f"{sorted(dirty)}")
        return done

    def path_of(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def parent(name: str) -> str:
        return os.path.dirname(name.removeprefix("name "))

    with intercepted(handle):
        life(tmp_path / "cache", mmap.mmap(-1, 1))
    assert len(renamed) == 3
    assert renamed == ["[]"] * 3


def test_what_could_not_be_made_durable_is_not_published(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    entry = entry_of(folder)
    build(entry)
    with entry.building() as opened:
        with monkeypatch.context() as patch:
            patch.setattr(memory, "sync_descriptor", fail)
            with pytest.raises(CacheError, match="durable"):
                extend(opened, 5)
        with pytest.raises(CacheError, match="durable"):
            opened.publish({"head": 15})
    assert rows_in(entry) == 10


# ---- damage


def test_a_manifest_with_any_bit_flipped_or_cut_anywhere_is_none() -> None:
    whole = Manifest(describe={"a": "b"}, arrays={"rows": 80}, state={"head": 10}).dump()
    assert Manifest.load(whole).state == {"head": 10}
    for at in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            with pytest.raises(CorruptData):
                Manifest.load(bytes(flipped))
        with pytest.raises(CorruptData):
            Manifest.load(whole[:at])
    with pytest.raises(CorruptData):
        Manifest.load(whole + b"\n")


def test_a_manifest_of_another_version_or_machine_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("rlio.replay.manifests.LAYOUT_VERSION", 2), ("sys.byteorder", "big")):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            other = Manifest(describe={}, arrays={}, state={}).dump()
        with pytest.raises(CorruptData, match="expected 1, little"):
            Manifest.load(other)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("manifest.json", flip),
        ("manifest.json", cut),
        ("manifest.json", Path.unlink),
        ("manifest.json", replace_by_link),
        ("rows.array", cut),
        ("rows.array", Path.unlink),
        ("rows.array", replace_by_link),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_damaged_store_is_built_again(
    folder: CacheFolder, name: str, damage: Callable[[Path], None], caplog: Any
) -> None:
    entry = entry_of(folder)
    build(entry)
    damage(Path(entry.path, name))
    assert rows_in(entry) is None
    assert any("built again" in record.message for record in caplog.records) or damage is Path.unlink
    with entry.building() as opened:
        assert opened.manifest is None
        extend(opened, 4)
    assert rows_in(entry) == 4


def test_a_damaged_store_takes_no_room(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache", max_bytes=20_000)
    build(entry_of(folder))
    Path(entry_of(folder).path, "manifest.json").unlink()
    with entry_of(folder, OTHER).building() as opened:
        opened.ensure_room(18_000)
    assert names(folder) == []


def test_a_store_of_an_earlier_version_is_read_and_removed_whole(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache", max_bytes=20_000)
    build(entry_of(folder))
    Path(entry_of(folder).path, "used").touch()  # Its readers locked this file.
    assert rows_in(entry_of(folder)) == 10
    with entry_of(folder, OTHER).building() as opened:
        opened.ensure_room(16_000)
    assert names(folder) == []


def test_a_store_of_another_description_is_not_taken_for_this_one(folder: CacheFolder) -> None:
    build(entry_of(folder))
    other = folder.entry(KEY, {"root": "/elsewhere"})
    assert rows_in(other) is None
    with other.building() as opened:
        assert opened.manifest is None
    same = folder.entry(KEY, {"root": f"/data/{KEY}"})
    assert rows_in(same) == 10


def test_a_cache_that_somebody_removed_is_made_again(folder: CacheFolder) -> None:
    entry = entry_of(folder)
    build(entry)
    with opened_for_reading(entry) as reading:
        array = reading.arrays.array("rows", (10,), ROWS)
        shutil.rmtree(folder.path)
        assert array.tolist() == list(range(10))
    assert rows_in(entry) is None
    build(entry, 4)
    assert rows_in(entry) == 4


# ---- room


def use_at(entry: Entry, seconds: float) -> None:
    os.utime(os.path.join(entry.path, "manifest.json"), (seconds, seconds))


def test_the_least_recently_used_makes_way_first(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache", max_bytes=6 * 8192)  # With room to build in, five fit.
    entries = [entry_of(folder, f"{number:016x}") for number in range(5)]
    for entry in entries:
        build(entry)
    for age, number in enumerate((3, 1, 4, 0, 2)):
        use_at(entries[number], 1e9 + age)
    assert folder.bytes == 5 * 8192
    for gone in ([3], [1], [4], [0], [2]):
        kept = {number for number in range(5) if rows_in_path(entries[number])}
        assert gone[0] in kept
        build(entry_of(folder, f"{100 + gone[0]:016x}"))
        assert {number for number in range(5) if rows_in_path(entries[number])} == kept - set(gone)
        assert folder.bytes <= folder.max_bytes


def rows_in_path(entry: Entry) -> bool:
    """Whether a store is there, without using it."""
    return os.path.exists(entry.path)


def test_a_use_is_noted_once_a_minute(folder: CacheFolder) -> None:
    entry, used = entry_of(folder), time.time()
    build(entry)
    for age, moves in ((30, False), (90, True), (-90, True)):
        use_at(entry, used - age)
        assert rows_in(entry) == 10
        assert (abs(os.stat(os.path.join(entry.path, "manifest.json")).st_mtime - (used - age)) > 1) == moves


def test_an_extension_is_a_use(folder: CacheFolder) -> None:
    entry, now = entry_of(folder), time.time()
    build(entry)
    use_at(entry, now - 1000)
    with entry.building() as opened:
        extend(opened, 10)
    assert os.stat(os.path.join(entry.path, "manifest.json")).st_mtime >= now - 1


def test_what_does_not_help_is_not_done(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache", max_bytes=40_000)
    idle = entry_of(folder, OTHER)
    build(idle)
    with entry_of(folder).building() as opened:
        with pytest.raises(CacheError):
            opened.ensure_room(40_001)
        assert rows_in(idle) == 10
        opened.ensure_room(39_000)
        assert rows_in(idle) is None


def test_what_frees_no_disk_space_is_not_counted_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the least recently used store is mapped by a process."""
    folder = CacheFolder(tmp_path / "cache")
    mapped, idle = entry_of(folder, "1" * 16), entry_of(folder, "2" * 16)
    for entry in (mapped, idle):
        build(entry)
    use_at(mapped, time.time() - 1000)
    monkeypatch.setattr(cache_room, "_disk", lambda path: (0 if os.path.exists(idle.path) else 8192, 0))
    with entry_of(folder).building() as opened:
        opened.ensure_room(8000)
        assert (rows_in(mapped), rows_in(idle)) == (None, None)
        with pytest.raises(CacheError):
            opened.ensure_room(9000)


def test_a_store_that_is_being_extended_does_not_make_way(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache", max_bytes=40_000)
    extended, idle = entry_of(folder, "1" * 16), entry_of(folder, "2" * 16)
    build(extended)
    build(idle)
    with extended.building() as extension:
        extension.arrays.array("rows", (20,), ROWS)
        with entry_of(folder).building() as opened:
            opened.ensure_room(25_000)
            assert rows_in(idle) is None
            with pytest.raises(CacheError):
                opened.ensure_room(39_000)
        assert rows_in(extended) == 10


def test_what_a_dead_builder_has_left_makes_way_at_once(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache", max_bytes=20_000)

    def begin(ready: Callable[[], None]) -> None:
        with entry_of(folder).building() as opened:
            opened.arrays.array("rows", (1500,), ROWS)
            opened.arrays.reserve("rows", 1500)
            ready()
            time.sleep(600)

    kill(ready_child(begin))
    assert folder.bytes == 12288
    for key in (KEY, OTHER):
        with entry_of(folder, key).building() as opened:
            opened.ensure_room(20_000)
            assert folder.bytes == 0
        kill(ready_child(begin))


def test_a_build_that_outgrows_its_room_makes_more_or_stops(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache", max_bytes=40 << 20)
    build(entry_of(folder, OTHER))
    with entry_of(folder).building() as opened:
        opened.ensure_room(1000)
        rows = opened.arrays.array("rows", (100 << 20,), np.dtype("u1"))
        opened.arrays.reserve("rows", 20 << 20)
        rows[: 20 << 20 : 4096] = 1
        assert rows_in(entry_of(folder, OTHER)) == 10
        with pytest.raises(CacheError, match="RLIO_CACHE_BYTES"):
            opened.arrays.reserve("rows", 41 << 20)
        assert folder.bytes <= folder.max_bytes
        opened.publish({}, rows={"rows": 20 << 20})
    assert folder.bytes <= folder.max_bytes


def test_a_twentieth_of_the_disk_stays_free(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(folder.path)

    class Small:
        f_frsize, f_blocks, f_bavail = 4096, 1000, 100
        f_bfree = 100

    assert real.f_blocks
    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    with entry_of(folder).building() as opened:
        opened.ensure_room(50 * 4096)
        with pytest.raises(CacheError, match=r"400.0 KiB free, of which 200.0 KiB stay free"):
            opened.ensure_room(50 * 4096 + 1)


@pytest.mark.further
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9000), st.booleans()), max_size=15))
@settings(max_examples=15)
def test_the_bound_is_kept_whatever_is_built(steps: list[tuple[int, int, bool]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as path:
        folder = CacheFolder(f"{path}/cache", max_bytes=120_000)
        readers: list[Reading] = []
        for number, rows, keep in steps:
            entry = entry_of(folder, f"{number:016x}")
            try:
                with entry.building() as opened:
                    extend(opened, rows)
                    if keep:
                        reading = entry.reading()
                        assert reading is not None
                        readers.append(reading)
            except CacheError:
                pass
            assert folder.bytes <= folder.max_bytes
        for reader in readers:
            assert rows_read(reader)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk could be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_an_error_and_readers_keep_the_store(small_disk: Path) -> None:
    def run() -> None:
        folder = CacheFolder(small_disk / "cache")
        entry, filler = entry_of(folder), small_disk / "filler"
        build(entry, 1000)
        with entry.building() as opened:
            filler.write_bytes(bytes(1_500_000))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cache, "make_room", lambda *args: None)  # As if others had just taken it.
                with pytest.raises(CacheError, match="no space for the array"):
                    extend(opened, 100_000)
        assert rows_in(entry) == 1000
        with open(filler, "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(CacheError), entry.building() as opened:
            extend(opened, 100_000)
        assert rows_in(entry) is None
        filler.unlink()
        build(entry, 2000)
        assert rows_in(entry) == 2000

    assert wait_for(fork(run)) == 0


# ---- the folder


def test_the_folder_is_that_of_the_environment_or_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "given"))
    monkeypatch.setenv("RLIO_CACHE_BYTES", "12345")
    assert (CacheFolder().path, CacheFolder().max_bytes) == (str(tmp_path / "given"), 12345)
    assert CacheFolder(tmp_path / "other", max_bytes=5).path == str(tmp_path / "other")
    monkeypatch.delenv("RLIO_CACHE")
    monkeypatch.setenv("RLIO_CACHE_BYTES", "64 GiB")
    with pytest.raises(OptionError, match="RLIO_CACHE_BYTES='64 GiB'"):
        CacheFolder()
    monkeypatch.delenv("RLIO_CACHE_BYTES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.platform", "linux")
    assert (CacheFolder().path, CacheFolder().max_bytes) == (str(tmp_path / "xdg/rlio/replay"), 64 << 30)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert CacheFolder().path == str(tmp_path / "home/.cache/rlio/replay")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_files.user_folder() == str(tmp_path / "home/Library/Caches/rlio/replay")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(OptionError, match="set RLIO_CACHE"):
        cache_files.user_folder()


@pytest.mark.parametrize("bytes_", [0, -1, 1.5, True, "1"])
def test_an_illegal_bound_is_refused(tmp_path: Path, bytes_: Any) -> None:
    with pytest.raises(OptionError, match="max_bytes"):
        CacheFolder(tmp_path / "cache", max_bytes=bytes_)


def test_a_folder_that_others_could_have_filled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in (0o720, 0o702, 0o777, 0o1777):
        path = tmp_path / f"{mode}"
        path.mkdir()
        path.chmod(mode)
        with pytest.raises(UnsafeData, match="chmod 700"):
            CacheFolder(path)
        assert os.listdir(path) == []
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafeData, match="link"):
        CacheFolder(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(UnsafeData, match="file"):
        CacheFolder(tmp_path / "file")
    with pytest.raises(CacheError, match="cannot be used"):
        CacheFolder(tmp_path / "file" / "below")
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(UnsafeData, match=f"belongs to user {user}"):
        CacheFolder(tmp_path / "real")
    assert os.listdir(tmp_path / "real") == []


def test_a_folder_that_others_can_read_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    CacheFolder(tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_where_there_are_no_locks_there_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(cache_files, "on_network", lambda path: True)
        with pytest.raises(CacheError, match=r"network.*RLIO_CACHE.*cache='memory'"):
            CacheFolder(tmp_path / "cache")
    entry = entry_of(tmp_path / "cache")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(CacheError):
        entry.building()


# ---- what is not ours


names_of_files = st.one_of(
    st.text("abc012.-_ ~%", min_size=1, max_size=12).filter(lambda name: name not in (".", "..")),
    st.sampled_from(
        [
            f"{KEY}.store.txt",
            f"{KEY}.stor",
            f"{KEY}",
            f"{KEY}.old",
            f"{KEY}.new-0",
            f"{KEY}.store-01234567",
            "manifest.json",
            "used",
            "rows.array",
            f"{KEY[:-1]}.store",
            "manifest-0.tmp",
        ]
    ),
)


@given(st.dictionaries(names_of_files, st.binary(min_size=1, max_size=20), max_size=6), st.booleans())
@settings(max_examples=15)
def test_what_rlio_did_not_make_is_never_removed(others: dict[str, bytes], folders: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as base:
        path = Path(base, "cache")
        foreign = Path(base, "foreign")
        foreign.mkdir()
        put(foreign, others, folders)
        before = tree(foreign)
        if others:
            with pytest.raises(OptionError, match="other things"):
                CacheFolder(foreign)
            assert tree(foreign) == before
        folder = CacheFolder(path, max_bytes=20_000)
        put(path, others, folders)
        build(entry_of(folder))
        put(Path(entry_of(folder).path), {f"x {name}": data for name, data in others.items()}, folders)
        for number in range(3):  # Evicts.
            build(entry_of(folder, f"{number:016x}"))
        assert not os.path.exists(entry_of(folder).path)
        kept = sorted(tree(path).values())
        for data in others.values():
            assert kept.count(data) >= 2
        assert {name: tree(path).get(name) for name in before} == before


def put(path: Path, others: dict[str, bytes], folders: bool) -> None:
    for name, data in others.items():
        if folders:
            (path / name).mkdir()
        (path / name / "used" if folders else path / name).write_bytes(data)


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    found = (Path(top, name) for top, _, files in os.walk(path) for name in files)
    return {str(file.relative_to(path)): file.read_bytes() for file in found}
