"""A process that dies at any file-system call loses no acknowledged row, and recovery makes the same shards."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from crash_child import WRITERS, Tally, files_of, fork, logs_of, rows_of, shard_names, wait_for
from crash_shim import DIED, dying_at, intercepted

from rlio import Roll
from rlio.maintenance import compact, gc
from rlio.writers.recovery import recover

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


def _check(root: Path, kind: str, tally: Tally, expected: Callable[[str, int], list[str]]) -> None:
    """Recover, and check that what is there is what an uninterrupted writer would have made."""
    report = recover(root)
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


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_writer_that_dies_at_any_call_loses_nothing(
    kind: str, tmp_path: Path, expected: Callable[[str, int], list[str]]
) -> None:
    points = 0
    for point, root in enumerate(_roots(tmp_path), start=1):
        tally = Tally()

        def die(point: int = point, root: Path = root, tally: Tally = tally) -> None:
            with intercepted(dying_at(point)):
                _script(root, kind, tally)

        code = wait_for(fork(die))
        assert code in (0, DIED)
        root.mkdir(exist_ok=True)
        _check(root, kind, tally, expected)
        if code == 0:
            break
        points += 1
    print(f"{points} points")
    assert points >= 100
