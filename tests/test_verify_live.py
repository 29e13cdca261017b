"""verify and repair beside others: logs of the dead and the living, compaction, writers at work, servers."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import Server
from stored_batches import fresh_root, store
from test_verify import WRITER, bad, episodes

import rlio
from rlio import DatasetReader, JsonWriter, ParquetWriter, Roll, SampleBatch
from rlio.catalog.listing import HoleCheck, list_shards
from rlio.log.spool import Spool
from rlio.storage import Storage

NO_AGE = Roll(max_rows=50, max_seconds=None)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between listings."""
    monkeypatch.setattr("rlio.catalog.listing.HOLE_CHECK", HoleCheck(seconds=0))


# ---- logs ----

needs_logs = pytest.mark.skipif(not hasattr(os, "fork"), reason="no logs without flock")


def killed(root: Path, make: Any = ParquetWriter, **options: Any) -> None:
    """Write 130 rows, 100 of which become shards, and die without a chance to close."""
    child = os.fork()
    if child == 0:
        try:
            writer = make(root, writer_id=WRITER, roll=NO_AGE, **options)
            for first in range(0, 130, 10):
                writer.write(episodes(10, first, length=10))
            # What is published in the background is waited for; the open shard stays in the log.
            while len(list((root / "data").rglob("*-50-*"))) < 2:
                time.sleep(0.01)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.few(1)
@needs_logs
@pytest.mark.parametrize("make", [ParquetWriter, JsonWriter])
def test_rows_in_the_log_of_a_dead_writer_wait_and_repair_stores_them(tmp_path: Path, make: Any) -> None:
    root = tmp_path / "run"
    killed(root, make)
    report = rlio.verify(root)
    assert [finding.code for finding in report.findings] == ["log-waiting"]
    assert (report.total.live, report.total.waiting) == (100, 30)
    repaired = rlio.maintenance.repair(root)
    assert [(action.kind, action.rows) for action in repaired.actions] == [("log-recovered", 30)]
    assert repaired.after.findings == ()
    assert (repaired.after.total.live, repaired.after.total.waiting) == (130, 0)
    assert rlio.maintenance.repair(root).actions == ()
    with DatasetReader(root, epochs=1, batch_size=1000) as reader:
        assert reader.sample()["obs"][:, 0].tolist() == list(range(130))


@needs_logs
def test_the_log_of_a_living_writer_is_counted_and_left_to_it(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path, writer_id=WRITER, roll=Roll(max_seconds=None)) as writer:
        writer.write(episodes(20))
        for _ in range(2):
            report = rlio.maintenance.repair(tmp_path)
            assert report.actions == ()
            assert (report.after.total.live, report.after.total.waiting) == (0, 20)
        writer.write(episodes(20, 20))
    assert rlio.verify(tmp_path).total.live == 40
    assert rlio.verify(tmp_path).total.waiting == 0


@needs_logs
def test_damage_in_a_log_is_found_and_its_intact_rows_still_wait(tmp_path: Path) -> None:
    root = tmp_path / "run"
    killed(root)
    (segment,) = sorted((root / "_wal" / WRITER).glob("*.wal"))[-1:]
    data = bytearray(segment.read_bytes())
    frames = [match.start() for match in re.finditer(rb"rlw0", bytes(data))]  # The first is the header.
    data[frames[2] + 60] ^= 1
    segment.write_bytes(data)
    report = rlio.verify(root)
    assert bad(report) == ["log-damaged"]
    assert report.total.waiting == 10
    assert report.findings[0].rows == 10
    after = rlio.maintenance.repair(root).after
    assert after.total.live == 100 + report.total.waiting
    assert [finding.code for finding in after.findings] == ["log-set-aside"]
    assert rlio.maintenance.repair(root).actions == ()


@needs_logs
def test_a_log_cut_in_the_middle_of_a_write_is_no_damage(tmp_path: Path) -> None:
    root = tmp_path / "run"
    killed(root)
    (segment,) = sorted((root / "_wal" / WRITER).glob("*.wal"))[-1:]
    segment.write_bytes(segment.read_bytes()[:-5])
    report = rlio.verify(root)
    assert bad(report) == []
    assert report.total.waiting == 20


@needs_logs
def test_logs_in_a_folder_of_the_users_choice_are_found_when_told(tmp_path: Path) -> None:
    root, spool = tmp_path / "run", tmp_path / "spool"
    killed(root, spool=Spool(folder=spool))
    assert rlio.verify(root).total.waiting == 0
    assert rlio.verify(root, spool=spool).total.waiting == 30
    assert rlio.maintenance.repair(root, spool=spool).after.total.live == 130


# ---- compaction ----


def test_compacted_data_sets_are_clean_before_and_after_collection() -> None:
    root = fresh_root()
    for name in ("w1", "w2"):
        store(
            *(episodes(20, 20 * i) for i in range(10)),
            root=root,
            writer_id=name,
            roll=Roll(max_rows=20, max_seconds=None),
        )
    before = rlio.verify(root)
    assert bad(before) == []
    rlio.maintenance.compact(root)
    between = rlio.verify(root)
    assert bad(between) == []
    assert between.total.shards > before.total.shards
    assert between.total.live == before.total.live == 400
    rlio.maintenance.gc(root, grace=0)
    after = rlio.verify(root)
    assert bad(after) == []
    assert (after.total.shards, after.total.live) == (2, 400)


def test_episodes_of_writers_that_were_merged_are_told_apart() -> None:
    root, into = fresh_root(), fresh_root()
    for name in ("w1", "w2", "w3"):
        store(episodes(60), root=root, writer_id=name)
    rlio.maintenance.compact(root, into=into)
    report = rlio.verify(into)
    assert bad(report) == []
    assert report.total.live == 180


def test_trimmed_data_sets_are_clean() -> None:
    root = store(
        *(episodes(20, 20 * i) for i in range(10)), writer_id="w1", roll=Roll(max_rows=20, max_seconds=None)
    )
    rlio.maintenance.trim(root, before={"w1": 90})
    report = rlio.verify(root)
    assert bad(report) == []
    assert (report.total.trimmed, report.total.live, report.total.missing) == (90, 110, 0)


# ---- at work ----


def _write(root: str, index: int, shards: int) -> None:
    with ParquetWriter(root, worker_index=index, spool=None, roll=Roll(max_seconds=None)) as writer:
        for number in range(shards):
            writer.write(episodes(20, 20 * number))
            writer.flush()


def collect(storage: Storage) -> None:
    """Remove what larger shards cover, at once: `gc` gives readers a time of grace."""
    listing = list_shards(storage)
    for writer, refs in listing.shards.items():
        live = {segment.ref.path for segment in listing.cover(writer).segments}
        for ref in refs:
            if ref.path not in live:
                storage.remove(ref.path)


@pytest.mark.further
def test_verify_beside_writers_compaction_and_collection_finds_nothing_wrong(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    ParquetWriter(root, writer_id="w0", spool=None).close()
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    writers = [context.Process(target=_write, args=(root, index, 60)) for index in (1, 2)]
    stop, failures = threading.Event(), []

    def compact() -> None:
        while not stop.is_set():
            try:
                rlio.maintenance.compact(root)
                collect(Storage.open(root))
            except Exception as error:
                failures.append(error)
                return

    thread = threading.Thread(target=compact)
    for writer in writers:
        writer.start()
    thread.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        report = rlio.verify(root)
        errors = [str(finding) for finding in report.findings if finding.severity != "note"]
        assert errors == []
        seen.append(report.total.live + report.total.damaged)
    stop.set()
    thread.join()
    assert failures == []
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen == sorted(seen)
    report = rlio.verify(root)
    assert bad(report) == []
    assert report.total.live == 2 * 60 * 20


# ---- servers ----


@pytest.mark.further
@pytest.mark.parametrize("name", ["s3", "azure", "sftp", "ftp"])
def test_verify_and_repair_do_the_same_on_a_real_server(name: str, serve: Callable[[str], Server]) -> None:
    server = serve(name)
    root, options = server.fresh_root(), server.options
    with ParquetWriter(
        root, storage_options=options, writer_id=WRITER, spool=None, roll=Roll(max_rows=20, max_seconds=None)
    ) as writer:
        for first in (0, 20, 40):
            writer.write(episodes(20, first))
    assert rlio.verify(root, storage_options=options).findings == ()
    storage = Storage.open(root, storage_options=options)
    shards = [entry.path for entry in storage.list("data") if entry.path.endswith(".parquet")]
    data = bytearray(storage.read(shards[1]))
    data[-60] ^= 1
    storage.put(shards[1], bytes(data))
    storage.remove("_rlio.json")
    report = rlio.maintenance.repair(root, storage_options=options)
    assert [action.kind for action in report.actions] == ["quarantined", "header-written"]
    assert bad(report.after) == ["hole"]
    assert report.after.total.live == 40
    assert storage.read(f"_quarantine/{shards[1]}") == bytes(data)
    assert rlio.maintenance.repair(root, storage_options=options).actions == ()


def test_verify_reads_a_data_set_over_http(serve: Callable[[str], Server]) -> None:
    server = serve("http")
    assert server.folder is not None
    with ParquetWriter(server.folder / "run", writer_id=WRITER, spool=None) as writer:
        writer.write(SampleBatch(obs=np.arange(30.0), t=np.arange(30), eps_id=np.zeros(30, int)))
    report = rlio.verify(f"{server.base}/run")
    assert bad(report) == []
    assert report.total.live == 30
