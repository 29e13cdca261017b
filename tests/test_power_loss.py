"""A power failure at any moment costs what was not synced yet: never a hole, and nothing torn is served."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from crash_child import WRITERS, Tally, logs_of, rows_of
from crash_disk import Losses, Recorder
from crash_shim import intercepted
from further import further

from rlio import JsonWriter, ParquetWriter, Roll
from rlio.log.wal import Sync
from rlio.writers.recovery import recover

_WRITES = (3, 3, 5, 2, 9, 1, 4)


def _record(root: Path, kind: str, sync: Sync) -> Recorder:
    """Write, roll and flush, noting what is promised to survive and since when."""
    recorder, tally = Recorder(str(root)), Tally()
    with intercepted(recorder):
        writer = WRITERS[kind](root, roll=Roll(max_rows=8, max_seconds=None), writer_id="w", sync=sync)
        for number, rows in enumerate(_WRITES):
            tally.write(writer, rows)
            if number == 2:
                writer.flush()
            elif sync == "interval" and number % 2:
                _sync_now(writer)
            if sync == "always" or number == 2 or (sync == "interval" and number % 2):
                recorder.mark(tally.acked)
        writer.close()
        recorder.mark(tally.acked)
    return recorder


def _sync_now(writer: ParquetWriter | JsonWriter) -> None:
    """What the log's thread does every second."""
    log = writer._publisher.log
    assert log is not None
    for segment in list(log._segments):
        segment.sync()


def _check(recorder: Recorder, root: Path, moment: int, seed: int, loses: Losses) -> None:
    recorder.replay(moment).after_power_failure(root, random.Random(seed), loses)
    promised = max([rows for steps, rows in recorder.marks if steps <= moment], default=0)
    where = f"moment {moment}, seed {seed}, loses {loses}"
    report = recover(root, all_hosts=True)  # The files are copies, and this process lives.
    assert all(log.outcome == "recovered" for log in report.logs), (where, report)
    rows = rows_of(root)
    assert rows == list(range(len(rows))), where
    assert promised <= len(rows) <= sum(_WRITES), where
    assert logs_of(root) == [], where


def _fail_at_every_moment(base: Path, kind: str, sync: Sync, *, chances: int, part: int = 1) -> int:
    """Or at one moment of so many; gives how many there were."""
    recorder = _record(base / "whole", kind, sync)
    moments = len(recorder.steps) + 1
    # The cruellest first, at every moment: all is lost that can be, or all but names; then chance decides.
    cruel = [Losses(1.0, 1.0), Losses(0.0, 1.0)]
    total = len(cruel) * moments + chances
    tried = range(0, total, part)
    for seed in tried:
        loses = cruel[seed // moments] if seed < len(cruel) * moments else Losses(0.5, 0.5)
        root = base / f"{seed}"
        _check(recorder, root, seed % moments, seed, loses)
        shutil.rmtree(root)
    return len(tried)


@pytest.mark.few(1)
@pytest.mark.parametrize("part", [3, *further(1)])
@pytest.mark.parametrize("sync", ["always", "interval"])
@pytest.mark.parametrize("kind", ["parquet", "json"])
@pytest.mark.each_value_once
def test_a_power_failure_at_any_moment_costs_only_what_was_not_synced(
    tmp_path: Path, kind: str, sync: Sync, part: int
) -> None:
    assert _fail_at_every_moment(tmp_path, kind, sync, chances=50, part=part) >= 200 // part


@pytest.mark.soak
@pytest.mark.parametrize("sync", ["always", "interval", "never"])
@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_many_power_failures_cost_only_what_was_not_synced(tmp_path: Path, kind: str, sync: Sync) -> None:
    assert _fail_at_every_moment(tmp_path, kind, sync, chances=10_000) > 10_000
