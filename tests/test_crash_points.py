"""A process that dies at any file-system call loses no row, and recovery makes the same shards."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
from crash_child import WRITERS, Tally, files_of, fork, logs_of, rows_of, shard_names, wait_for
from crash_shim import DIED, dying_at, intercepted
from further import further

from rlio import Roll
from rlio.maintenance import compact, gc
from rlio.writers.recovery import recover

pytestmark = pytest.mark.usefixtures("stopped_clock")

# Rows of each write(), and what is done after some: rolls at 8 rows, so that some are cut in two.
_WRITES = (3, 3, 5, 2, 9, 1)
_FLUSH_AFTER = 3


def _script(root: Path, kind: str, tally: Tally, *, rows: int = sum(_WRITES), sync: str = "always") -> None:
    """Open, write, roll, flush, write, close; the first ``rows`` rows of it."""
    writer = WRITERS[kind](root, roll=Roll(max_rows=8, max_seconds=None), writer_id="w", sync=sync)  # type: ignore[arg-type]
    for number, count in enumerate(_WRITES):
        take = min(count, rows - tally.acked)
        if take:
            tally.write(writer, take)
        if number == _FLUSH_AFTER:
            writer.flush()
    writer.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[str]]:
    """Names of the shards of a script that was never interrupted and ended after some rows."""

    @cache
    def names(kind: str, rows: int) -> list[str]:
        root = tmp_path_factory.mktemp("whole")
        _script(root, kind, Tally(), rows=rows)
        return shard_names(root)

    return names


def _dying_script(root: Path, kind: str, tally: Tally, point: int) -> None:
    with intercepted(dying_at(point)):
        _script(root, kind, tally)


def _recover_dying(root: Path, point: int) -> None:
    _dying(partial(recover, all_hosts=True), root, point)


def _dying(act: Callable[[Path], object], root: Path, point: int) -> None:
    with intercepted(dying_at(point)):
        act(root)


def _leave_log(root: Path, kind: str, tally: Tally) -> None:
    """A log whose writer died at the end, one shard published."""

    def run() -> None:
        writer = WRITERS[kind](root, roll=Roll(max_rows=8, max_seconds=None), writer_id="w")
        # What is flushed is published; of what follows nothing is, since no shard is full.
        for number, rows in enumerate(_WRITES):
            tally.write(writer, rows)
            if number == _FLUSH_AFTER:
                writer.flush()
        os._exit(DIED)

    assert wait_for(fork(run)) == DIED


def _check(
    root: Path,
    kind: str,
    tally: Tally,
    expected: Callable[[str, int], list[str]],
    *,
    all_hosts: bool = False,
) -> None:
    """Recover, and check that what is there is what an uninterrupted writer would have made."""
    report = recover(root, all_hosts=all_hosts)
    assert report.is_clean, report
    rows = rows_of(root)
    assert rows == list(range(len(rows)))
    assert tally.acked <= len(rows) <= tally.attempted
    assert shard_names(root) == expected(kind, len(rows))
    assert logs_of(root) == []
    before = files_of(root)
    assert recover(root).rows == 0
    assert files_of(root) == before


def _roots(base: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        root = base / f"{number}"
        yield root
        shutil.rmtree(root)


#: Both formats have the same calls but for the bytes: each dies at every 15th; `further` has the others.
_STEP = 15
_EVERY_CALL = [
    ("parquet", 1),
    ("json", 8),
    *further(
        *(("parquet", first) for first in range(2, _STEP + 1)),
        *(("json", first) for first in range(1, _STEP + 1) if first != 8),
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "first"), _EVERY_CALL)
def test_a_writer_that_dies_at_any_call_loses_nothing(
    kind: str, first: int, tmp_path: Path, expected: Callable[[str, int], list[str]]
) -> None:
    points = 0
    for point, root in zip(itertools.count(first, _STEP), _roots(tmp_path), strict=False):
        tally = Tally()
        code = wait_for(fork(_dying_script, root, kind, tally, point))
        assert code in (0, DIED)
        root.mkdir(exist_ok=True)
        _check(root, kind, tally, expected)
        if code == 0:
            break
        points += 1
    assert points >= 5


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "first"), _EVERY_CALL)
def test_recovery_that_dies_at_any_call_is_done_by_the_next_one(
    kind: str, first: int, tmp_path: Path, expected: Callable[[str, int], list[str]]
) -> None:
    log, tally = tmp_path / "log", Tally()
    _leave_log(log, kind, tally)
    points = 0
    for point in range(first, 1000, _STEP):
        root = tmp_path / "copy"
        shutil.copytree(log, root)
        code = wait_for(fork(_recover_dying, root, point))
        _check(root, kind, tally, expected, all_hosts=True)
        shutil.rmtree(root)
        if code == 0:
            break
        assert code == DIED
        points += 1
    assert points >= 1


@pytest.mark.parametrize(("seed", "pairs"), [(0, 4), *further((0, 12), (1, 12), (2, 12), (3, 12))])
def test_pairs_of_deaths_of_a_writer_and_of_its_recovery_lose_nothing(
    tmp_path: Path, expected: Callable[[str, int], list[str]], seed: int, pairs: int
) -> None:
    random_ = random.Random(seed)
    for number, root in zip(range(pairs), _roots(tmp_path), strict=False):
        kind, tally = ("parquet", "json")[number % 2], Tally()
        point, second = random_.randrange(10, 110), random_.randrange(1, 30)
        assert wait_for(fork(_dying_script, root, kind, tally, point)) in (0, DIED)
        root.mkdir(exist_ok=True)
        assert wait_for(fork(_recover_dying, root, second)) in (0, DIED)
        _check(root, kind, tally, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("act", [compact, partial(gc, grace=0)], ids=["compact", "gc"])
def test_maintenance_that_dies_at_any_call_changes_no_row(
    act: Callable[[Path], object],
    tmp_path: Path,
) -> None:
    before, tally = tmp_path / "before", Tally()
    with WRITERS["parquet"](before, roll=Roll(max_rows=8, max_seconds=None)) as writer:
        for _ in range(5):
            tally.write(writer, 8)
    if act is not compact:
        compact(before)
    points = 0
    for point in range(1, 1000):
        root = tmp_path / "copy"
        shutil.copytree(before, root)
        code = wait_for(fork(_dying, act, root, point))
        assert rows_of(root) == list(range(tally.acked))
        act(root)
        assert rows_of(root) == list(range(tally.acked))
        shutil.rmtree(root)
        if code == 0:
            break
        assert code == DIED
        points += 1
    assert points >= 5


_SYSTEM_CALLS = (
    "openat,write,writev,pwrite64,fsync,fdatasync,ftruncate,link,linkat,rename,renameat,renameat2,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir"
)
_TRACED = re.compile(r"(\d+) +(\w+)\(")


class _Traced:
    """The script in a process of its own under strace, which sees the calls of every library."""

    def __init__(self, folder: Path, kind: str) -> None:
        found = shutil.which("strace")
        if found is None:
            pytest.skip("strace is not installed")
        probe = subprocess.run([found, "-o", os.devnull, "true"], check=False, capture_output=True, text=True)
        if probe.returncode:
            pytest.skip(f"strace may not trace here: {probe.stderr.strip()[:200]}")
        self._strace, self._kind = found, kind
        self._acked, self._trace = folder / "acked", folder / "trace"
        self._program = folder / "program.py"
        self._program.write_text(_PROGRAM.format(tests=str(Path(__file__).parent)))

    def run(self, root: Path, *options: str) -> tuple[int, Tally]:
        """The exit code, and the rows that were acknowledged."""
        self._acked.unlink(missing_ok=True)
        command = [self._strace, "-f", "-y", "-o", str(self._trace)]
        done = subprocess.run(
            [*command, *options, sys.executable, str(self._program), str(root), self._kind, str(self._acked)],
            check=False,
            timeout=240,
            capture_output=True,
            text=True,
            # What is cached once is not made again: every run makes the same calls while it imports.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode in (0, -signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
        tally = Tally()
        tally.acked = len(self._acked.read_bytes()) if self._acked.exists() else 0
        tally.attempted = min(tally.acked + max(_WRITES), sum(_WRITES))
        return done.returncode, tally

    def points(self, root: Path) -> list[tuple[str, int]]:
        """Name and number of every call that an uninterrupted run makes below ``root``.

        strace counts the calls of a name in each thread by itself. A number that another thread reaches
        elsewhere, as it imports, is left out.
        """
        code, tally = self.run(root, f"--trace={_SYSTEM_CALLS}")
        assert (code, tally.acked) == (0, sum(_WRITES))
        numbers: Counter[tuple[str, str]] = Counter()
        below: dict[tuple[str, int], bool] = {}
        for line in self._trace.read_text(errors="replace").splitlines():
            if head := _TRACED.match(line):
                thread, call = head.groups()
                numbers[thread, call] += 1
                point = call, numbers[thread, call]
                below[point] = below.get(point, True) and str(root) in line
        return [point for point, is_below in below.items() if is_below]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_writer_that_is_killed_at_any_system_call_loses_nothing(
    kind: str, tmp_path: Path, expected: Callable[[str, int], list[str]]
) -> None:
    """By strace, which sees every call of every library, not of ours alone."""
    traced = _Traced(tmp_path, kind)
    points = traced.points(tmp_path / "whole")
    killed: Counter[str] = Counter()
    for (call, number), root in zip(points, _roots(tmp_path / "roots"), strict=False):
        code, tally = traced.run(root, f"--trace={call}", f"--inject={call}:signal=SIGKILL:when={number}")
        killed[call] += code != 0
        root.mkdir(parents=True, exist_ok=True)
        _check(root, kind, tally, expected)
    # Threads share the calls out differently each time, so that the last number of some is not reached.
    assert killed.total() >= max(70, 0.8 * len(points)), (killed, len(points))
    assert min(killed[call] for call in ("openat", "writev", "fsync", "fdatasync", "renameat", "unlink")) > 0


_PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from crash_child import Tally
import test_crash_points as script

class Noted(Tally):
    def write(self, writer, rows):
        super().write(writer, rows)
        with open(sys.argv[3], "ab") as file:
            file.write(bytes(rows))

script._script(Path(sys.argv[1]), sys.argv[2], Noted())
"""
