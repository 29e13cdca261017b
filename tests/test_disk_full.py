"""Calls that fail: an exception or a later attempt, nothing torn, and every accepted row there at the end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_child import WRITERS, Tally, fork, logs_of, rows_of, wait_for
from crash_shim import Call, failing, impatient, intercepted
from further import further

from rlio import JsonWriter, ParquetWriter, Roll
from rlio.errors import OptionError, PublishError, RlioError
from rlio.log.wal import Sync
from rlio.writers.recovery import recover

_ERRORS = ("ENOSPC", "EDQUOT", "EIO", "EMFILE", "EACCES", "EROFS")
_WRITES = (3, 9, 4)
_ROLL = Roll(max_rows=8, max_seconds=None)


def _open(root: Path, kind: str, sync: Sync) -> ParquetWriter | JsonWriter:
    try:
        return WRITERS[kind](root, roll=_ROLL, writer_id="w", sync=sync)
    except OptionError:  # An earlier attempt has claimed the id, and could not give it back.
        return WRITERS[kind](root, roll=_ROLL, sync=sync)


def _persist(act: Callable[[], object], *, attempts: int = 4) -> None:
    """Do something until it succeeds, with errors of our own kind before."""
    for attempt in range(attempts):
        try:
            act()
            return
        except (RlioError, OSError):
            if attempt + 1 == attempts:
                raise


def _script(root: Path, kind: str, tally: Tally, *, sync: Sync, repair: Callable[[], object]) -> None:
    """Write through errors as a patient caller would, who repairs the disk after each."""
    opened: list[ParquetWriter | JsonWriter] = []

    def patiently(act: Callable[[], object]) -> None:
        def attempt() -> None:
            try:
                act()
            except (RlioError, OSError):
                repair()
                raise

        _persist(attempt)

    patiently(lambda: opened.append(_open(root, kind, sync)))
    (writer,) = opened
    for rows in _WRITES:
        patiently(lambda rows=rows: tally.write(writer, rows))  # type: ignore[misc]
    patiently(writer.flush)
    patiently(lambda: tally.write(writer, 2))
    repair()
    _persist(writer.close)


def _check(root: Path, tally: Tally) -> None:
    report = recover(root)
    assert report.is_clean, report
    assert rows_of(root) == list(range(tally.acked))
    assert logs_of(root) == []


def _fail_at_calls(base: Path, kind: str, *, sticky: bool, start: int, step: int) -> int:
    """Let calls fail in turn, once or from then on until somebody repairs it; gives the points tried."""
    for tried, point in enumerate(itertools.count(start, step)):
        code = getattr(errno, _ERRORS[point % len(_ERRORS)])
        root, tally = base / f"{point}", Tally()
        broken = [True]

        def fails(name: str, number: int, point: int = point, broken: list[bool] = broken) -> bool:
            return broken[0] and (number >= point if sticky else number == point)

        def child(root: Path = root, tally: Tally = tally, code: int = code, broken: list[bool] = broken,
                  fails: Callable[[str, int], bool] = fails, point: int = point) -> None:  # fmt: skip
            logging.disable(logging.CRITICAL)
            with impatient(), intercepted(failing(fails, code)) as calls:
                _script(root, kind, tally, sync="always", repair=lambda: broken.__setitem__(0, False))
            tally.attempted = int(len(calls) < point)

        status = wait_for(fork(child))
        assert status == 0, f"call {point}, {errno.errorcode[code]}"
        assert tally.acked == sum(_WRITES) + 2
        _check(root, tally)
        shutil.rmtree(root)
        if tally.attempted:
            return tried
    raise AssertionError


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "sticky", "start"),
    [("parquet", True, 2), ("json", False, 3), *further(("parquet", False, 1), ("json", True, 4))],
    ids=["parquet, until repaired", "json, once", "parquet, once", "json, until repaired"],
)
@pytest.mark.parametrize(("step", "least"), [(28, 3), *further((7, 15), (4, 30))])
def test_any_call_may_fail_and_every_accepted_row_is_there_in_the_end(
    tmp_path: Path, kind: str, sticky: bool, start: int, step: int, least: int
) -> None:
    # With steps of 4, together every call of either kind, and each error at each kind of call; all of them in
    # make soak.
    assert _fail_at_calls(tmp_path, kind, sticky=sticky, start=start, step=step) >= least


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["parquet", "json"])
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "until repaired"])
def test_every_call_may_fail_and_every_accepted_row_is_there_in_the_end(
    tmp_path: Path, kind: str, sticky: bool
) -> None:
    assert _fail_at_calls(tmp_path, kind, sticky=sticky, start=1, step=1) >= 120


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_sync_that_fails_is_not_tried_again_on_the_same_file(tmp_path: Path, kind: str) -> None:
    """For ever: the log takes nothing. Once: the rows go through another segment."""
    synced: list[int] = []

    def run(fails: Callable[[str, int], bool], tally: Tally) -> None:
        failed: set[int] = set()

        def handle(call: Call) -> Any:
            if call.name == "open":
                failed.discard(fd := call.go())
                return fd
            if call.name != "fdatasync":
                return call.go()
            synced.append(call.args[0])
            if call.args[0] in failed:
                os._exit(3)  # After a failed sync the kernel may say that all is well, though it is not.
            if fails(call.name, len(synced)):
                failed.add(call.args[0])
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call.go()

        writer = _open(tmp_path, kind, "always")
        with intercepted(handle):
            for _ in range(6):
                with contextlib.suppress(PublishError):
                    tally.write(writer, 2)
        writer.close()
        if not synced:
            os._exit(4)

    once, always = Tally(), Tally()
    assert wait_for(fork(lambda: run(lambda name, number: number == 3, once))) == 0
    assert once.acked == 10
    assert rows_of(tmp_path) == list(range(10))
    shutil.rmtree(tmp_path)
    assert wait_for(fork(lambda: run(lambda name, number: True, always))) == 0
    assert always.acked == 0
    assert rows_of(tmp_path) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["parquet", "json"])
@pytest.mark.parametrize("limit", [0, 900, *further(100, 1500, 2300, 4000)])
@pytest.mark.each_value_once
def test_a_limit_on_file_sizes_is_an_error_and_loses_nothing_accepted(
    tmp_path: Path, kind: str, limit: int
) -> None:
    tally = Tally()

    def run() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = _open(tmp_path, kind, "interval")
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        failures = 0
        for _ in range(30):
            try:
                tally.write(writer, 3)
            except PublishError:
                failures += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert failures or limit >= 2300
        tally.write(writer, 3)
        writer.close()

    assert wait_for(fork(run)) == 0
    _check(tmp_path, tally)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "size", [size if size % 160 == 48 else further(size)[0] for size in range(128, 448, 16)]
)
def test_a_full_disk_is_an_error_and_loses_nothing_accepted(tmp_path: Path, size: int) -> None:
    disk, filler, tally = tmp_path / "disk", tmp_path / "disk" / "filler", Tally(parts=False)
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk could be mounted: {done.stderr.strip()}")
    try:
        filler.write_bytes(bytes(size * 600))
        kind = ("parquet", "json")[size // 16 % 2]

        def run() -> None:
            logging.disable(logging.CRITICAL)
            with impatient():
                writer = WRITERS[kind](disk / "root", roll=Roll(max_rows=500), writer_id="w")
                failures = 0
                while failures < 3 and tally.acked < 20_000:
                    try:
                        tally.write(writer, 200)
                    except PublishError:
                        failures += 1
                assert failures
                filler.unlink()
                _persist(writer.close)

        status = wait_for(fork(run))
        assert status == 0
        _check(disk / "root", tally)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
