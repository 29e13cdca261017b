"""Arrays of stores: what is written comes back, a full disk is an error, short files are refused."""

from __future__ import annotations

import errno
import faulthandler
import itertools
import os
import re
import resource
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_child import fork, wait_for
from crash_shim import open_files_below
from hypothesis import given
from hypothesis import strategies as st

from rlio.errors import CacheError, CorruptData, OptionError
from rlio.replay import memory
from rlio.replay.memory import STEP, Arrays, FileArrays, RamArrays, file_name, is_array_file

ROW = np.dtype(
    {"names": ["obs", "done"], "formats": [("<f4", (3,)), "?"], "offsets": [0, 12], "itemsize": 16}
)
KINDS: list[tuple[tuple[int, ...], Any]] = [
    ((5,), ROW),
    ((5,), np.dtype(("<f4", (2, 3)))),
    ((5,), np.dtype((np.void, 7))),
    ((5, 4, 2), np.dtype("u1")),
    ((5,), ">i8"),
    ((5,), np.dtype("<U3")),
    ((5,), np.dtype("<M8[s]")),
    ((0, 3), np.dtype("f4")),
    ((5, 0), np.dtype("f4")),
]


@pytest.fixture(params=["ram", "files"])
def arrays(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arrays]:
    if request.param == "ram":
        yield RamArrays()
        return
    with FileArrays(tmp_path, writable=True) as made:
        yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk could be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.parametrize(("shape", "dtype"), KINDS, ids=[str(kind) for _, kind in KINDS])
def test_an_array_is_that_of_numpy_zeros_and_takes_any_value(
    arrays: Arrays, shape: tuple[int, ...], dtype: Any
) -> None:
    array, expected = arrays.array("a", shape, dtype), np.zeros(shape, dtype)
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    assert array.tobytes() == expected.tobytes()
    arrays.reserve("a", shape[0])
    array.reshape(-1).view(np.uint8)[:] = 1
    assert array.tobytes() == b"\1" * expected.nbytes


@pytest.mark.parametrize(("shape", "dtype"), KINDS, ids=[str(kind) for _, kind in KINDS])
def test_files_give_readers_what_was_written(tmp_path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    with FileArrays(tmp_path, writable=True) as writer:
        array = writer.array("a", shape, dtype)
        writer.reserve("a", shape[0])
        array.reshape(-1).view(np.uint8)[:] = np.arange(array.nbytes)
        writer.flush()
        sizes = writer.sizes
    with FileArrays(tmp_path, sizes=sizes) as reader:
        read = reader.array("a", shape, dtype)
        assert (read.shape, read.dtype, read.tobytes()) == (array.shape, array.dtype, array.tobytes())
        assert not read.flags.writeable
        with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
            read.reshape(-1).view(np.uint8)[:] = 0
        if read.nbytes:
            with pytest.raises(ValueError, match="WRITEABLE"):
                read.flags.writeable = True


def test_more_memory_than_the_machine_has_costs_nothing_until_it_is_touched() -> None:
    arrays = RamArrays()
    before = resident()
    array = arrays.array("a", (1 << 42,), np.dtype("u1"))  # 4 TiB
    arrays.reserve("a", 1 << 42)
    array[:: 1 << 40] = 7
    assert array[1 << 40] == 7
    assert array[(1 << 40) + 1] == 0
    assert resident() - before < 64 << 20


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(OptionError, match="capacity"):
        RamArrays().array("a", (1 << 60,), np.dtype("u1"))


def test_arrays_outlive_those_who_made_them(tmp_path: Path) -> None:
    arrays = FileArrays(tmp_path, writable=True)
    array = arrays.array("a", (4,), np.dtype("i8"))
    arrays.reserve("a", 4)
    array[:] = 3
    arrays.close()
    arrays.close()
    assert array.tolist() == [3, 3, 3, 3]


def test_writers_of_files_take_space_in_steps_and_give_back_what_they_do_not_use(tmp_path: Path) -> None:
    asked: list[int] = []
    with FileArrays(tmp_path, writable=True, before_reserving=asked.append) as arrays:
        rows = 3 * STEP
        array = arrays.array("a", (rows,), np.dtype("u1"))
        path = tmp_path / "a.array"
        assert (path.stat().st_size, on_disk(path)) == (rows, 0)
        for used in (1, 2, STEP, STEP + 1, 2 * STEP - 1):
            arrays.reserve("a", used)
            array[used - 1] = 1
        assert asked == [STEP, STEP]
        assert on_disk(path) == 2 * STEP
        arrays.reserve("a", rows)
        assert on_disk(path) == rows
        arrays.trim("a", 5)
        assert (path.stat().st_size, arrays.sizes) == (5, {"a": 5})
        assert on_disk(path) <= 4096
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_space_is_made_with_zeros_where_it_cannot_be_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    for name in ("refused", "absent"):
        if name == "refused":
            monkeypatch.setattr(os, "posix_fallocate", refuse)
        else:
            monkeypatch.delattr(os, "posix_fallocate")
        with FileArrays(tmp_path, writable=True) as arrays:
            array = arrays.array(name, (STEP + 10,), np.dtype("u1"))
            arrays.reserve(name, 5)
            array[:5] = 1
            arrays.reserve(name, STEP + 10)
            assert on_disk(tmp_path / f"{name}.array") >= STEP + 10
            assert array[:5].all()
            assert not array[5:].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("fallocate", [True, False], ids=["reserved", "zeros"])
def test_a_full_disk_is_an_error_before_anything_is_written(small_disk: Path, fallocate: bool) -> None:
    def run() -> None:
        if not fallocate:
            del os.posix_fallocate
        with FileArrays(small_disk, writable=True) as arrays:
            array = arrays.array("a", (64 << 20,), np.dtype("u1"))
            other = arrays.array("b", (4096,), np.dtype("u1"))
            arrays.reserve("b", 4096)
            other[:] = 2
            with pytest.raises(CacheError, match="RLIO_CACHE") as caught:
                arrays.reserve("a", 100)  # A step does not fit.
            assert caught.value.uri == str(small_disk / "a.array")
            arrays.trim("a", 1000)
            arrays.reserve("a", 1000)  # The rest of the step is not wanted any more.
            array[:1000] = 1
            arrays.flush()
            assert (other == 2).all()

    assert wait_for(fork(run)) == 0  # Not -7, SIGBUS.


def test_a_write_that_was_not_reserved_would_kill_the_process(small_disk: Path) -> None:
    """What `reserve` is for: shows that the test above can fail."""

    def run() -> None:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        arrays = FileArrays(small_disk, writable=True)
        arrays.array("a", (64 << 20,), np.dtype("u1"))[::4096] = 1

    assert wait_for(fork(run)) == -signal.SIGBUS


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [0, 50_000])
def test_a_limit_on_file_sizes_is_an_error(tmp_path: Path, limit: int) -> None:
    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with FileArrays(tmp_path, writable=True) as arrays:
            with pytest.raises(CacheError, match="no space"):
                arrays.array("a", (100_000,), np.dtype("u1"))
            if limit:
                arrays.array("b", (1000,), np.dtype("u1"))
                arrays.reserve("b", 1000)

    assert wait_for(fork(run)) == 0


def test_a_file_that_is_too_short_absent_or_no_file_is_damaged_data(tmp_path: Path) -> None:
    (tmp_path / "short.array").write_bytes(bytes(99))
    (tmp_path / "long.array").write_bytes(bytes(200))
    (tmp_path / "link.array").symlink_to(tmp_path / "long.array")
    os.mkfifo(tmp_path / "pipe.array")
    kind = np.dtype("u1")
    for name, size in (("short", 100), ("absent", 1), ("pipe", 0), ("pipe", 1), ("link", 100)):
        with pytest.raises(CorruptData):
            FileArrays(tmp_path, sizes={"long": 99, name: size})
    with FileArrays(tmp_path, sizes={"long": 99}) as reader:
        for name, rows in (("long", 100), ("short", 1)):
            with pytest.raises(CorruptData):
                reader.array(name, (rows,), kind)
        assert reader.array("long", (99,), kind).shape == (99,)
    with FileArrays(tmp_path, writable=True, sizes={"short": 100, "absent": 1}) as writer:
        for name in ("short", "absent"):
            with pytest.raises(CorruptData):
                writer.array(name, (100,), kind)


def test_new_files_are_never_those_of_others(tmp_path: Path) -> None:
    (tmp_path / "a.array").write_bytes(b"precious")
    (tmp_path / "b.array").symlink_to(tmp_path / "elsewhere")
    with FileArrays(tmp_path, writable=True) as writer:
        for name in ("a", "b"):
            with pytest.raises(CacheError):
                writer.array(name, (3,), np.dtype("u1"))
    assert (tmp_path / "a.array").read_bytes() == b"precious"
    assert not (tmp_path / "elsewhere").exists()


def test_an_extension_begins_with_zeros_behind_what_is_known(tmp_path: Path) -> None:
    with FileArrays(tmp_path, writable=True) as first:
        array = first.array("a", (8,), np.dtype("u1"))
        first.reserve("a", 8)
        array[:] = 9  # Four of them are known to others; then this process dies.
    with FileArrays(tmp_path, sizes={"a": 4}) as reader:
        seen = reader.array("a", (4,), np.dtype("u1"))
        with FileArrays(tmp_path, writable=True, sizes={"a": 4}) as second:
            with pytest.raises(OptionError, match="already"):
                second.array("a", (3,), np.dtype("u1"))
            array = second.array("a", (10,), np.dtype("u1"))
            assert array.tolist() == [9] * 4 + [0] * 6
            second.reserve("a", 10)
            array[4:] = 7
            assert second.sizes == {"a": 10}
        assert seen.tolist() == [9] * 4


def test_a_failed_sync_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileArrays(tmp_path, writable=True) as writer:
        writer.array("a", (9,), np.dtype("u1"))

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(memory, "sync_descriptor", fail)
            with pytest.raises(CacheError, match="durable"):
                writer.flush()
        with pytest.raises(CacheError, match="durable"):
            writer.flush()  # The kernel would say that all is well.


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    for writable in (True, False):
        arrays = FileArrays(tmp_path, writable=writable, sizes=None if writable else {"a": 9})
        array = arrays.array("a", (9,), np.dtype("u1"))
        arrays.close()
        del array, arrays
    assert open_files_below(tmp_path) == []


@given(st.lists(st.text(max_size=300), min_size=2, max_size=2, unique=True))
def test_names_have_files_of_their_own(names: list[str]) -> None:
    one, other = (file_name(name) for name in names)
    assert one.lower() == one
    assert one != other
    assert all(is_array_file(file) and "/" not in file and len(file.encode()) < 256 for file in (one, other))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "A", "a", "%41", "\0", "\ud800", "x" * 300, "x" * 301, "é" * 90, "NUL"]
)
def test_awkward_names_are_files(tmp_path: Path, name: str) -> None:
    assert is_array_file(file_name(name))
    with FileArrays(tmp_path, writable=True) as writer:
        writer.array(name, (3,), np.dtype("u1"))
    (file,) = os.listdir(tmp_path)
    assert file == file_name(name)


def test_long_names_have_files_of_their_own() -> None:
    assert len({file_name("x" * length) for length in range(195, 300)}) == 105


def test_files_of_others_are_not_taken_for_arrays() -> None:
    for name in ("a.txt", "A.array", "a b.array", "array", "a.array~", "x" * 201 + ".array", "a~b.array"):
        assert not is_array_file(name), name


@pytest.mark.few(1)
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no huge pages on this system"
)
@pytest.mark.parametrize(("rows", "huge"), [(4 << 20, True), (1 << 10, False)])
def test_large_arrays_in_memory_ask_for_huge_pages(rows: int, huge: bool) -> None:
    array = RamArrays().array("rows", (rows,), np.dtype("i8"))
    address = array.ctypes.data
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    # Flags of a mapping come last, its range first: in the part before, after the flags of the mapping above.
    (flags,) = (
        later.splitlines()[0].split()
        for part, later in itertools.pairwise(maps)
        for line in part.splitlines()
        if (span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line))
        and int(span[1], 16) <= address < int(span[2], 16)
    )
    assert ("hg" in flags) is huge
