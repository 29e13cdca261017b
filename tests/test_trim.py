"""Trimming: the oldest rows go for good, and nothing brings them back."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_batches import assert_identical, files, fresh_root, load, numbered, put
from test_compact import agents, pieces, shard_files, store_small

import rlio
from rlio import SampleBatch
from rlio.catalog.names import ShardName
from rlio.errors import OptionError
from rlio.storage.filesystem import Storage

KINDS = ["parquet", "jsonl", "jsonl.zst"]


def numbers(root: str) -> list[int]:
    data = rlio.open_dataset(root)
    return load(root)["t"].tolist() if len(data) else []


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", [0, 1, 3, 4, 11, 12])
@pytest.mark.each_value_once
def test_rows_below_the_row_are_gone_and_so_are_the_shards_that_held_nothing_else(
    kind: str, row: int
) -> None:
    root = store_small(*pieces(numbered(12), 3), kind=kind)
    report = rlio.maintenance.trim(root, before={"w0": row})
    assert numbers(root) == list(range(row, 12))
    assert len(shard_files(root)) == 4 - row // 3
    assert (report.rows, len(report.removed), report.rows_left) == (row, row // 3, 12 - row)
    assert report.bytes == sum(int(uri.rsplit("/", 1)[1].split("-")[2]) for uri in report.removed)
    assert json.loads(json.dumps(report.to_json()))["rows"] == row


def test_other_writers_keep_all() -> None:
    root = store_small(*pieces(numbered(6), 3), writer_id="w0")
    store_small(*pieces(numbered(6, 6), 3), root=root, writer_id="w1")
    rlio.maintenance.trim(root, before={"w0": 5})
    assert numbers(root) == [5, *range(6, 12)]


def test_trimming_again_changes_nothing_and_trimming_less_brings_nothing_back() -> None:
    root = store_small(*pieces(numbered(12), 3))
    rlio.maintenance.trim(root, before={"w0": 7})
    before = files(root, "")
    for row in (7, 3, 0):
        report = rlio.maintenance.trim(root, before={"w0": row})
        assert (report.rows, report.removed, report.writers) == (0, (), ())
    assert files(root, "") == before
    assert rlio.maintenance.trim(root, before={"w0": 10}).rows == 3


@pytest.mark.few(6)
@pytest.mark.parametrize("row", range(1, 12))
def test_a_late_retry_of_a_trimmed_shard_brings_no_row_back(row: int) -> None:
    root = store_small(*pieces(numbered(12), 3))
    before = shard_files(root)
    rlio.maintenance.trim(root, before={"w0": row})
    for path, data in before.items():
        put(path, data)
    assert numbers(root) == list(range(row, 12))
    # Nor do they stay: the next call, of any row, takes them.
    assert len(rlio.maintenance.trim(root, before={"w0": 0}).removed) == row // 3


def test_an_interruption_at_any_point_leaves_rows_there_or_gone_and_is_completed_by_another_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Killed(BaseException):
        pass

    def attempt(root: str, fail_at: int) -> int:
        calls = 0

        def counted(original: Any) -> Any:
            def call(self: Storage, *args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == fail_at:
                    raise Killed
                return original(self, *args, **options)

            return call

        with monkeypatch.context() as patch:
            for name in ("put", "remove"):
                patch.setattr(Storage, name, counted(getattr(Storage, name)))
            with contextlib.suppress(Killed):
                rlio.maintenance.trim(root, before={"w0": 8, "w1": 4})
        return calls

    fail_at = 1
    while True:
        root = store_small(*pieces(numbered(12), 3), writer_id="w0")
        store_small(*pieces(numbered(6, 100), 3), root=root, writer_id="w1")
        calls = attempt(root, fail_at)
        first, second = list(range(12)), list(range(100, 106))
        assert numbers(root) in [first + second, first[8:] + second, first[8:] + second[4:]]
        rlio.maintenance.trim(root, before={"w0": 8, "w1": 4})
        assert numbers(root) == first[8:] + second[4:]
        assert len(shard_files(root)) == 2 + 1
        if calls < fail_at:
            break
        fail_at += 1
    assert fail_at == 2 + 3 + 1  # Two markers and three shards: each was the last thing done once.


def test_a_writer_goes_on_after_all_of_its_rows_were_trimmed() -> None:
    root = fresh_root()
    with rlio.ParquetWriter(root, writer_id="w0") as writer:
        writer.write(numbered(5))
        writer.flush()
        rlio.maintenance.trim(root, keep_rows=0)
        assert numbers(root) == []
        writer.write(numbered(5, 5))
    assert numbers(root) == list(range(5, 10))


def test_a_reader_that_has_listed_before_a_trim_says_what_is_gone() -> None:
    root = store_small(*pieces(numbered(12), 3))
    snapshot = rlio.open_dataset(root).snapshot()
    rlio.maintenance.trim(root, before={"w0": 7})
    with pytest.raises(rlio.errors.CorruptData, match=r"0 to 6.*trimmed"):
        rlio.open_dataset(root, at=snapshot)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of them"),
        ({"before": {"w0": 1}, "keep_rows": 3}, "one of them"),
        ({"before": {"w7": 1}}, "no writer 'w7'; the data set has w0"),
        ({"before": {"w0": 13}}, "from 0 to 12"),
        ({"before": {"w0": -1}}, "from 0 to 12"),
        ({"before": {"w0": 1.5}}, "from 0 to 12"),
        ({"before": {"w0": True}}, "from 0 to 12"),
        ({"keep_rows": -1}, "0 or more"),
        ({"keep_rows": "7"}, "0 or more"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(options: dict[str, Any], message: str) -> None:
    """A marker past the end would hide rows that the writer has yet to write."""
    root = store_small(*pieces(numbered(12), 3))
    before = files(root, "")
    with pytest.raises(OptionError, match=message):
        rlio.maintenance.trim(root, **options)
    assert files(root, "") == before


def test_a_dry_run_says_the_same_and_changes_nothing() -> None:
    root = store_small(*pieces(numbered(12), 3))
    before = files(root, "")
    plan = rlio.maintenance.trim(root, keep_rows=5, dry_run=True)
    assert files(root, "") == before
    done = rlio.maintenance.trim(root, keep_rows=5)
    assert (plan.writers, plan.removed, plan.rows_left) == (done.writers, done.removed, done.rows_left)


# ---- the newest rows ----


def aged(root: Path, times: dict[tuple[str, int], float]) -> None:
    """Set when the shards of (writer, first row) were stored."""
    for path in root.glob("data/*/*.*"):
        name = ShardName.parse(path.name)
        if name is not None and (path.parent.name, name.first) in times:
            os.utime(path, (times[path.parent.name, name.first],) * 2)


@pytest.mark.few(7)
@pytest.mark.parametrize("keep", range(13))
def test_the_newest_rows_of_all_writers_are_kept(tmp_path: Path, keep: int) -> None:
    root = str(tmp_path)
    store_small(*pieces(numbered(6), 3), root=root, writer_id="w0")
    store_small(*pieces(numbered(6, 6), 3), root=root, writer_id="w1")
    aged(tmp_path, {("w0", 0): 100, ("w1", 0): 200, ("w0", 3): 300, ("w1", 3): 400})
    newest = [11, 10, 9, 5, 4, 3, 8, 7, 6, 2, 1, 0]
    report = rlio.maintenance.trim(root, keep_rows=keep)
    assert numbers(root) == sorted(newest[:keep])
    assert report.rows_left == keep


def test_a_shard_is_never_newer_than_those_after_it_and_compacting_makes_no_row_newer(tmp_path: Path) -> None:
    root = str(tmp_path)
    store_small(*pieces(numbered(9), 3), root=root, writer_id="w0")
    store_small(*pieces(numbered(6, 9), 3), root=root, writer_id="w1")
    times = {("w0", 0): 100.0, ("w0", 3): 150.0, ("w0", 6): 160.0, ("w1", 0): 200.0, ("w1", 3): 300.0}
    aged(tmp_path, times)
    rlio.maintenance.compact(root)  # Stored now; the shards with the old times are still there.
    rlio.maintenance.trim(root, keep_rows=8)
    assert numbers(root) == [7, 8, *range(9, 15)]


def test_more_rows_than_there_are_keep_everything() -> None:
    root = store_small(*pieces(numbered(12), 3))
    assert rlio.maintenance.trim(root, keep_rows=100).rows == 0
    assert numbers(root) == list(range(12))


def test_a_store_that_tells_no_times_cannot_say_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    root = store_small(*pieces(numbered(12), 3))
    monkeypatch.setattr(Storage, "modified", lambda self, path: None)
    with pytest.raises(OptionError, match="before="):
        rlio.maintenance.trim(root, keep_rows=3)
    rlio.maintenance.trim(root, before={"w0": 9})
    assert numbers(root) == [9, 10, 11]


# ---- what is not cut ----


def test_sequences_and_joint_steps_are_not_cut() -> None:
    parts = [
        SampleBatch(obs=np.arange(5.0)[:, None] + 5 * i, seq_lens=[3, 2], state_in_0=[[1.0], [2.0]])
        for i in range(3)
    ]
    root = store_small(*parts)
    report = rlio.maintenance.trim(root, before={"w0": 8})
    assert [(entry.row, entry.rows) for entry in report.writers] == [(5, 5)]
    assert load(root)["obs"][:, 0].tolist() == list(np.arange(5.0, 15.0))
    root = store_small(*(agents({"a": [(0, i)], "b": [(0, i)]}) for i in range(3)))
    rlio.maintenance.trim(root, before={"w0": 3})
    assert load(root)["a"]["t"].tolist() == [1, 2]


def test_trimming_beside_compacting_and_collecting_keeps_the_rest() -> None:
    root = store_small(*pieces(numbered(60), 4))
    for row in range(0, 60, 7):
        rlio.maintenance.trim(root, before={"w0": row})
        if row % 2:
            rlio.maintenance.compact(root)
        if row % 3 == 0:
            rlio.maintenance.gc(root, grace=0)
        assert_identical(load(root), numbered(60 - row, row))


def test_the_command_trims_and_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from rlio.cli.main import app

    root = str(tmp_path)
    store_small(*pieces(numbered(12), 3), root=root)
    runner = CliRunner()
    shown = runner.invoke(app, ["trim", root, "--before", "w0=7", "--dry-run"])
    assert shown.exit_code == 0
    assert "7 rows below row 7 would be removed" in shown.output
    assert json.loads(runner.invoke(app, ["trim", root, "--keep-rows", "5", "--json"]).output)["rows"] == 7
    assert numbers(root) == list(range(7, 12))
    assert runner.invoke(app, ["trim", root, "--before", "w0"]).exit_code == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_episodes_of_a_trimmed_data_set_have_the_rows_that_are_left(kind: str) -> None:
    """Also of the shard of which a part is left: its table counts the rows that are gone."""
    rows = numbered(12)
    rows["eps_id"] = np.repeat([7, 8, 9], 4)
    root = store_small(*pieces(rows, 6), kind=kind)
    rlio.maintenance.trim(root, before={"w0": 3})
    found = [(info.eps_id, info.rows) for info in rlio.open_dataset(root).episode_parts()]
    assert found == [(7, 1), (8, 2), (8, 2), (9, 4)]
