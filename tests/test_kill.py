"""Writers killed by SIGKILL at random moments lose no acknowledged row, and nothing comes twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from crash_child import WRITERS, Tally, fork, logs_of, rows_of, wait_for
from further import further

from rlio import Roll
from rlio.log.wal import Sync
from rlio.writers.recovery import recover

_SYNCS: tuple[Sync, ...] = ("interval", "always", "never")


def _write_for_ever(root: Path, kind: str, sync: Sync, seed: int, tally: Tally) -> None:
    """Write batches of random sizes, roll, and flush now and then, until the end comes."""
    random_ = random.Random(seed)
    roll = Roll(max_rows=random_.choice([None, 50, 300]), max_bytes=random_.choice([1 << 12, 1 << 26]))
    with WRITERS[kind](root, roll=roll, sync=sync) as writer:
        while True:
            tally.write(writer, random_.choice([1, 3, 20, 100]))
            if random_.random() < 0.03:
                writer.flush()


def _kill_and_recover(root: Path, seed: int) -> int:
    """Kill a writer, and perhaps its recovery too; gives the rows acknowledged."""
    random_ = random.Random(seed)
    kind, sync, tally = ("parquet", "json")[seed % 2], _SYNCS[seed % 3], Tally(parts=seed % 3 == 2)
    pid = fork(lambda: _write_for_ever(root, kind, sync, seed, tally))
    # After some rows, or before the first: on a busy machine a child comes to few rows in any time.
    least = random_.randrange(1, 120) if seed % 10 else 0
    until = time.monotonic() + 60
    while tally.acked < least:
        assert time.monotonic() < until, f"seed {seed}"
        time.sleep(0.0005)
    time.sleep(random_.uniform(0, 0.04))
    os.kill(pid, signal.SIGKILL)
    assert wait_for(pid) == -signal.SIGKILL
    root.mkdir(exist_ok=True)
    if seed % 4 == 0:  # So that recovery is killed in turn, often in the middle.
        pid = fork(lambda: recover(root))
        time.sleep(random_.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        wait_for(pid)
    # Not in this process: recovery is that of a stranger.
    assert wait_for(fork(lambda: _must_be_clean(root))) == 0
    rows = rows_of(root)
    assert rows == list(range(len(rows))), f"seed {seed}"
    assert tally.acked <= len(rows) <= tally.attempted, f"seed {seed}"
    assert logs_of(root) == [], f"seed {seed}"
    return tally.acked


def _must_be_clean(root: Path) -> None:
    report = recover(root)
    assert report.is_clean, report


def _run(base: Path, seeds: range) -> None:
    acked = 0
    for seed in seeds:
        root = base / f"{seed}"
        acked += _kill_and_recover(root, seed)
        shutil.rmtree(root)
    assert acked > 20 * len(seeds)


@pytest.mark.parametrize("seeds", [range(5), *further(range(5, 40), range(40, 70), range(70, 100))], ids=str)
def test_a_hundred_kills_lose_and_repeat_no_acknowledged_row(tmp_path: Path, seeds: range) -> None:
    _run(tmp_path, seeds)


@pytest.mark.soak
def test_two_thousand_kills_lose_and_repeat_no_acknowledged_row(tmp_path: Path) -> None:
    _run(tmp_path, range(1000, 3000))
