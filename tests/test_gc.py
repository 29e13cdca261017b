"""Collection: what no reader needs goes after its grace; the only copy of a row never does."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import zstandard
from further import further
from growing_data import encode, publish
from stored_batches import assert_identical, files, fresh_root, load, numbered, put, remove
from test_compact import WRITERS, pieces, shard_files, store_small, two_that_overlap

import rlio
from rlio.catalog.names import ShardName, shard_path
from rlio.errors import OptionError
from rlio.maintenance.gc import GcReport
from rlio.storage import local as local_module
from rlio.storage.filesystem import Storage
from rlio.storage.local import PendingFile

# The package's name is the function's.
gc_module = import_module("rlio.maintenance.gc")

DAY = 24 * 3600.0


def kinds(report: GcReport) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in report.removed:
        found[entry.kind] = found.get(entry.kind, 0) + 1
    return found


def set_age(root: Path, pattern: str, seconds: float) -> None:
    """Make the files of a pattern so much older than a file that is written now."""
    probe = root / "probe"
    probe.write_bytes(b"")
    now = probe.stat().st_mtime
    probe.unlink()
    for path in root.glob(pattern):
        os.utime(path, (now - seconds, now - seconds))


def covered_by_one(kind: str) -> str:
    """A root with four shards of three rows, and one that has all of them.

    Compaction makes such shards of Parquet ones; earlier versions also made them of JSON lines.
    """
    root = store_small(*pieces(numbered(12), 3), kind=kind)
    publish(root, "w0", 0, encode(*pieces(numbered(12), 3), kind=WRITERS[kind]))
    return root


@pytest.mark.parametrize("kind", WRITERS)
def test_covered_shards_go_and_every_row_stays(kind: str) -> None:
    root = covered_by_one(kind)
    covered = {path: data for path, data in shard_files(root).items() if "-12-" not in path}
    report = rlio.maintenance.gc(root, grace=0)
    assert kinds(report) == {"covered": 4}
    assert report.bytes == sum(map(len, covered.values()))
    assert {entry.uri for entry in report.removed} == {
        f"memory:/{path}" for path in covered
    } or report.removed
    assert not set(covered) & set(shard_files(root))
    assert_identical(load(root), numbered(12))
    again = rlio.maintenance.gc(root, grace=0)
    assert (again.removed, again.waiting, again.kept) == ((), 0, ())
    assert json.loads(json.dumps(report.to_json()))["bytes"] == report.bytes


def test_nothing_goes_while_it_may_be_read() -> None:
    """The grace begins when the covering shard was stored, however old the covered ones are."""
    root = store_small(*pieces(numbered(12), 3))
    rlio.maintenance.compact(root)
    before = files(root, "")
    report = rlio.maintenance.gc(root)
    assert (report.removed, report.waiting) == ((), 4)
    assert files(root, "") == before


def test_the_grace_begins_with_the_covering_shard(tmp_path: Path) -> None:
    root = str(tmp_path)
    store_small(*pieces(numbered(12), 3), root=root)
    set_age(tmp_path, "data/w0/*", 30 * DAY)
    rlio.maintenance.compact(root)
    assert rlio.maintenance.gc(root).waiting == 4
    set_age(tmp_path, "data/w0/*-12-*", DAY - 60)
    assert rlio.maintenance.gc(root).waiting == 4
    set_age(tmp_path, "data/w0/*-12-*", DAY + 60)
    assert kinds(rlio.maintenance.gc(root)) == {"covered": 4}
    assert_identical(load(root), numbered(12))


def test_shards_below_a_trim_go(tmp_path: Path) -> None:
    root = str(tmp_path)
    store_small(*pieces(numbered(12), 3), root=root)
    before = {path: path.read_bytes() for path in tmp_path.glob("data/w0/*.parquet")}
    rlio.maintenance.trim(root, before={"w0": 7})
    for path, data in before.items():  # A late retry.
        path.write_bytes(data)
    set_age(tmp_path, "data/w0/*.parquet", 30 * DAY)
    assert rlio.maintenance.gc(root).waiting == 2
    set_age(tmp_path, "data/w0/*", 30 * DAY)
    assert kinds(rlio.maintenance.gc(root)) == {"trimmed": 2}
    assert load(root)["t"].tolist() == list(range(7, 12))


def test_of_two_shards_that_share_some_rows_both_stay() -> None:
    root = two_that_overlap()
    before = files(root)
    assert rlio.maintenance.gc(root, grace=0).removed == ()
    assert files(root) == before
    assert_identical(load(root), numbered(12))


# ---- never the only copy ----


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", WRITERS)
def test_behind_a_damaged_cover_nothing_goes(kind: str) -> None:
    root = covered_by_one(kind)
    (cover,) = (path for path in shard_files(root) if "-12-" in path)
    whole = shard_files(root)[cover]
    for place in range(0, len(whole), 97):
        data = bytearray(whole)
        data[place] ^= 4
        if kind == "jsonl.zst" and _unpacked(bytes(data)) == _unpacked(whole):
            continue  # Zstandard has bits that mean nothing: the rows are whole.
        put(cover, bytes(data))
        before = files(root)
        report = rlio.maintenance.gc(root, grace=0)
        if place < 40 and kind != "parquet":  # The provenance is no row.
            put(cover, whole)
            continue
        assert report.removed == ()
        assert len(report.kept) == 4
        assert all("not whole" in kept.reason for kept in report.kept)
        assert files(root) == before
    put(cover, whole)
    assert kinds(rlio.maintenance.gc(root, grace=0)) == {"covered": 4}


def _unpacked(data: bytes) -> bytes | None:
    """The lines of a packed shard; None if they cannot be unpacked."""
    lines = b""
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            lines += frame.decompress(data)
        except zstandard.ZstdError:
            return None
        if not frame.eof:
            return None
        data = frame.unused_data
    return lines


def test_a_torn_object_goes_only_if_its_rows_are_elsewhere() -> None:
    root = store_small(*pieces(numbered(12), 3))
    paths = list(shard_files(root))
    torn = files(root)[paths[1]][:-9]
    rlio.maintenance.compact(root)
    put(paths[1], torn)
    assert kinds(rlio.maintenance.gc(root, grace=0)) == {"covered": 3, "torn": 1}
    assert_identical(load(root), numbered(12))

    root = store_small(*pieces(numbered(12), 3))
    path = list(shard_files(root))[1]
    put(path, torn)
    report = rlio.maintenance.gc(root, grace=0)
    assert report.removed == ()
    assert [path.rsplit("/", 1)[1] in kept.uri for kept in report.kept] == [True]
    assert path in files(root)
    rlio.maintenance.trim(root, before={"w0": 6})
    assert kinds(rlio.maintenance.gc(root, grace=0)) == {"torn": 1}


def test_an_upload_that_goes_on_is_left_alone_and_not_complained_about(tmp_path: Path) -> None:
    root = str(tmp_path)
    store_small(numbered(3), root=root)
    name = ShardName(first=3, rows=5, size=1000, crc32=1, footer_crc32=2)
    (tmp_path / shard_path("w0", name)).write_bytes(b"PAR1")
    report = rlio.maintenance.gc(root)
    assert (report.removed, report.kept, report.waiting) == ((), (), 1)


@pytest.mark.parametrize("after", [True, *further(False)])
def test_compacting_and_collecting_may_end_at_any_operation(
    monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    class Killed(BaseException):
        pass

    def interrupted(root: str, fail_at: int, *, after: bool) -> int:
        """Compact and collect, dying at the n-th put or removal, before or after it has happened."""
        calls = 0

        def counted(original: Any) -> Any:
            def call(self: Storage, *args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == fail_at and not after:
                    raise Killed
                original(self, *args, **options)
                if calls == fail_at:
                    raise Killed

            return call

        with monkeypatch.context() as patch:
            for name in ("put", "remove"):
                patch.setattr(Storage, name, counted(getattr(Storage, name)))
            with contextlib.suppress(Killed):
                rlio.maintenance.compact(root)
                rlio.maintenance.gc(root, grace=1e-9)
        return calls

    fail_at, was_killed = 0, True
    while was_killed:
        fail_at += 1
        root = store_small(*pieces(numbered(6), 3), writer_id="w0")
        store_small(*pieces(numbered(6, 6), 3), root=root, writer_id="w1")
        was_killed = interrupted(root, fail_at, after=after) >= fail_at
        assert_identical(load(root), numbered(12))
        rlio.maintenance.compact(root)
        rlio.maintenance.gc(root, grace=0)
        assert_identical(load(root), numbered(12))
        assert len(shard_files(root)) == 2
        assert not files(root, "_tmp")
    assert fail_at - 1 == 2 + 1 + 4 + 1  # Two shards, the object that tells the time, and what goes.


# ---- only what is ours ----

STRANGE = [
    "data/w0/notes.txt",
    "data/w0/000000000000-3-10-00000000-00000000.parquet.bak",
    "data/w0/sub/000000000000-3-10-00000000-00000000.parquet",
    "data/W0/000000000000-3-10-00000000-00000000.parquet",
    "data/000000000000-3-10-00000000-00000000.parquet",
    "_tmp/notes.txt",
    "_tmp/0123456789abcdef0123456789abcdef.tmp.old",
    "_tmp/sub/0123456789abcdef0123456789abcdef.tmp",
    "_wal/w0/000000000000.wal",
    "elsewhere/0123456789abcdef0123456789abcdef.tmp",
    "0123456789abcdef0123456789abcdef.tmp",
]


def test_names_that_are_not_ours_are_never_touched(tmp_path: Path) -> None:
    root = str(tmp_path)
    store_small(*pieces(numbered(12), 3), root=root)
    rlio.maintenance.compact(root)
    for name in STRANGE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"mine")
    unfinished = tmp_path / "_tmp" / f"{7:032x}.tmp"
    unfinished.write_bytes(b"half a shard")
    (tmp_path / "_tmp" / f"{8:032x}.tmp").symlink_to(tmp_path / "elsewhere")
    removed: list[str] = []
    original = os.unlink

    def unlink(path: Any, **options: Any) -> None:
        removed.append(os.fspath(path))
        original(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        report = rlio.maintenance.gc(root, grace=0)
    assert kinds(report) == {"covered": 4, "unfinished": 1}
    assert len(removed) == 5
    for name in STRANGE:
        assert (tmp_path / name).read_bytes() == b"mine"
    assert (tmp_path / "_tmp" / f"{8:032x}.tmp").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} >= {"_rlio.json", "_schema", "data", "elsewhere"}


def test_a_path_that_is_not_ours_is_refused_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    root = store_small(*pieces(numbered(12), 3))
    evil = gc_module._Candidate("_rlio.json", "covered", 1)
    monkeypatch.setattr(gc_module._Collection, "_left_over", lambda self: iter([evil]))
    with pytest.raises(OptionError, match="not for gc"):
        rlio.maintenance.gc(root, grace=0)
    assert len(rlio.open_dataset(root)) == 12


def test_indexes_of_early_versions_are_not_used_and_go(tmp_path: Path) -> None:
    root = store_small(numbered(3), root=str(tmp_path))
    kinds_of_objects = ("00000001-0123456789abcdef-187-0a1b2c3d", "change-0123456789abcdef-187-0a1b2c3d")
    (tmp_path / "_index").mkdir()
    for name in kinds_of_objects:
        (tmp_path / "_index" / f"{name}.json.zst").write_bytes(b"an index")
    (tmp_path / "_index" / "notes.txt").write_bytes(b"mine")
    report = rlio.verify(root)
    assert ("unused-index", "note") in [(one.code, one.severity) for one in report.findings]
    assert len(rlio.open_dataset(root)) == 3
    assert rlio.maintenance.gc(root).removed == ()
    assert kinds(rlio.maintenance.gc(root, grace=0)) == {"index": 2}
    assert [path.name for path in (tmp_path / "_index").iterdir()] == ["notes.txt"]


def test_unfinished_files_go_when_they_are_old(tmp_path: Path) -> None:
    root = str(tmp_path)
    store_small(numbered(3), root=root)
    for number, age in enumerate([0, DAY / 2, DAY - 60, DAY + 60, 30 * DAY]):
        (tmp_path / "_tmp" / f"{number:032x}.tmp").write_bytes(b"half")
        set_age(tmp_path, f"_tmp/{number:032x}.tmp", age)
    report = rlio.maintenance.gc(root)
    assert (kinds(report), report.waiting) == ({"unfinished": 2}, 3)
    assert {path.name for path in (tmp_path / "_tmp").iterdir()} == {f"{n:032x}.tmp" for n in range(3)}


# ---- beside live writers ----


@pytest.mark.parametrize("grace", [0.0, 1e-9, 60.0])
def test_gc_never_removes_the_unfinished_file_of_a_live_writer(
    tmp_path: Path, grace: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer had to write the shard again, and said so."""
    roll = rlio.Roll(max_rows=100_000, max_seconds=None)
    with rlio.ParquetWriter(tmp_path, roll=roll, spool=None) as writer:
        for _ in range(3):
            writer.write(numbered(30_000))
        while not list(tmp_path.glob("_tmp/*.tmp")):  # A background thread encodes.
            time.sleep(0.01)
        (begun,) = tmp_path.glob("_tmp/*.tmp")
        set_age(tmp_path, "_tmp/*", 30 * DAY)
        report = rlio.maintenance.gc(tmp_path, grace=grace)
        assert (report.removed, report.waiting) == ((), 1)
        assert rlio.maintenance.gc(tmp_path, grace=grace, dry_run=True).removed == ()
        assert begun.exists()
    assert "again" not in caplog.text
    assert len(rlio.open_dataset(tmp_path)) == writer.rows_received


def test_gc_without_grace_removes_the_unfinished_file_of_a_writer_that_was_killed(tmp_path: Path) -> None:
    store_small(numbered(3), root=str(tmp_path))
    held, ready = multiprocessing.get_context("fork").Pipe()
    pid = os.fork()
    if pid == 0:
        pending = PendingFile(str(tmp_path), sync=False)
        pending.write(memoryview(b"half"))
        ready.send(True)
        time.sleep(600)
        os._exit(1)
    try:
        assert held.recv()
        assert rlio.maintenance.gc(tmp_path, grace=0).waiting == 1
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert kinds(rlio.maintenance.gc(tmp_path, grace=0)) == {"unfinished": 1}
    assert list((tmp_path / "_tmp").iterdir()) == []


def test_a_file_that_gc_takes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_small(numbered(3), root=str(tmp_path))
    real, removed = local_module.try_lock, []

    def late(fd: int) -> bool | None:
        monkeypatch.setattr(local_module, "try_lock", real)
        removed.extend(rlio.maintenance.gc(tmp_path, grace=0).removed)
        return real(fd)

    monkeypatch.setattr(local_module, "try_lock", late)
    Storage.open(tmp_path).put("data/object", b"whole")
    assert [one.kind for one in removed] == ["unfinished"]
    assert (tmp_path / "data/object").read_bytes() == b"whole"
    assert list((tmp_path / "_tmp").iterdir()) == []


@pytest.mark.further
def test_writers_and_a_gc_without_grace_do_not_disturb_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, done = str(tmp_path), threading.Event()
    store_small(numbered(3), root=root)

    def write(writer: str) -> None:
        with rlio.ParquetWriter(root, writer_id=writer, spool=None) as output:
            for _ in range(40):
                output.write(numbered(5))
                output.flush()

    def collect() -> None:
        while not done.is_set():
            rlio.maintenance.gc(root, grace=0)

    with ThreadPoolExecutor(3) as pool:
        collecting = pool.submit(collect)
        try:
            for task in [pool.submit(write, writer) for writer in ("w1", "w2")]:
                task.result()
        finally:
            done.set()
        collecting.result()
    assert "again" not in caplog.text
    assert len(load(root)) == 3 + 2 * 200


@pytest.mark.parametrize("why", ["memory", "network", "no locks"])
def test_unfinished_files_stay_for_a_day_where_nobody_knows_who_writes_them(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fresh_root() if why == "memory" else str(tmp_path)
    storage = Storage.open(root)
    store_small(*pieces(numbered(12), 3), root=root)
    if why == "network":
        monkeypatch.setattr(gc_module, "on_network", lambda _: True)
    if why == "no locks":
        monkeypatch.setattr(local_module, "fcntl", None)
    path = f"_tmp/{7:032x}.tmp"
    storage.put(path, b"half")
    rlio.maintenance.compact(root)
    report = rlio.maintenance.gc(root, grace=0)
    assert (kinds(report), report.waiting) == ({"covered": 4}, 1)
    assert storage.exists(path)
    if why != "memory":
        set_age(tmp_path, "_tmp/*", DAY - 60)
        assert rlio.maintenance.gc(root, grace=0).waiting == 1
        set_age(tmp_path, "_tmp/*", DAY + 60)
        assert kinds(rlio.maintenance.gc(root, grace=0)) == {"unfinished": 1}
        assert list((tmp_path / "_tmp").iterdir()) == []
    monkeypatch.setattr(Storage, "modified", lambda self, path: None)
    storage.put(path, b"half")
    (kept,) = rlio.maintenance.gc(root, grace=0).kept if why == "memory" else [None]
    assert kept is None or "remove it if nobody writes it" in kept.reason


def test_a_gc_that_loses_its_probe_to_another_one_puts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    root = store_small(*pieces(numbered(12), 3))
    rlio.maintenance.compact(root)
    real, lost = Storage.modified, []

    def modified(self: Storage, path: str) -> float | None:
        if path.startswith("_tmp/") and not lost:
            lost.append(path)
            self.remove(path)
        return real(self, path)

    monkeypatch.setattr(Storage, "modified", modified)
    assert rlio.maintenance.gc(root).waiting == 4
    assert len(lost) == 1
    assert files(root, "_tmp") == {}


# ---- clocks ----


@pytest.mark.few(3)
@pytest.mark.parametrize("shift", [-400 * DAY, -DAY, DAY, 400 * DAY])
def test_this_machines_clock_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: float
) -> None:
    root = str(tmp_path)
    store_small(*pieces(numbered(12), 3), root=root)
    rlio.maintenance.compact(root)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + shift) * 1e9))
    report = rlio.maintenance.gc(root)
    assert (report.removed, report.waiting) == ((), 4)
    set_age(tmp_path, "data/w0/*", 2 * DAY)
    assert kinds(rlio.maintenance.gc(root)) == {"covered": 4}


def test_a_store_whose_clock_went_back_loses_nothing(tmp_path: Path) -> None:
    root = str(tmp_path)
    store_small(*pieces(numbered(12), 3), root=root)
    rlio.maintenance.compact(root)
    set_age(tmp_path, "data/w0/*", -2 * DAY)
    assert rlio.maintenance.gc(root, grace=1.0).waiting == 4


def test_a_store_that_tells_no_times_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    root = store_small(*pieces(numbered(12), 3))
    rlio.maintenance.compact(root)
    monkeypatch.setattr(Storage, "modified", lambda self, path: None)
    report = rlio.maintenance.gc(root)
    assert (report.removed, report.waiting) == ((), 0)
    assert len(report.kept) == 4
    assert kinds(rlio.maintenance.gc(root, grace=0)) == {"covered": 4}


def test_the_object_that_tells_the_time_is_taken_away_again() -> None:
    root = store_small(*pieces(numbered(12), 3))
    rlio.maintenance.compact(root)
    before = files(root, "")
    rlio.maintenance.gc(root)
    assert files(root, "") == before


@pytest.mark.parametrize("grace", [-1.0, float("nan")])
def test_a_grace_that_is_none_is_refused(grace: float) -> None:
    with pytest.raises(OptionError, match="0 or more"):
        rlio.maintenance.gc(store_small(numbered(3)), grace=grace)


def test_a_root_without_a_data_set_is_named() -> None:
    with pytest.raises(rlio.errors.DataNotFound, match="memory://"):
        rlio.maintenance.gc(fresh_root())


def test_a_dry_run_says_the_same_and_removes_nothing() -> None:
    root = store_small(*pieces(numbered(12), 3))
    rlio.maintenance.compact(root)
    before = files(root, "")
    plan = rlio.maintenance.gc(root, grace=0, dry_run=True)
    assert files(root, "") == before
    assert plan.removed == rlio.maintenance.gc(root, grace=0).removed


def test_a_cover_that_was_compacted_once_more_is_seen_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = store_small(*pieces(numbered(12), 3))
    rlio.maintenance.compact(root)
    original, calls = gc_module.list_shards, []

    def late(storage: Storage) -> Any:
        listing = original(storage)
        if not calls:
            calls.append(storage)
            store_small(numbered(2), root=root, writer_id="w1")
            with rlio.ParquetWriter(root, writer_id="w2") as writer:
                writer.write(numbered(2))
            # A larger shard of the same rows, and the one that was listed is gone.
            for path in [path for path in shard_files(root) if "-12-" in path]:
                remove(path)
        return listing

    monkeypatch.setattr(gc_module, "list_shards", late)
    report = rlio.maintenance.gc(root, grace=0)
    assert (report.removed, report.waiting) == ((), 4)
    assert load(root)["t"].tolist()[:12] == list(range(12))


def test_the_command_collects_and_says_so(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from rlio.cli.main import app

    root = str(tmp_path)
    store_small(*pieces(numbered(12), 3), root=root)
    runner = CliRunner()
    assert "would merge 4 shards" in runner.invoke(app, ["compact", root, "--dry-run"]).output
    assert "4 live shards -> 1; 12 rows merged" in runner.invoke(app, ["compact", root]).output
    assert "4 wait" in runner.invoke(app, ["gc", root]).output
    shown = runner.invoke(app, ["gc", root, "--grace", "0", "--json"])
    assert len(json.loads(shown.output)["removed"]) == 4
    assert json.loads(runner.invoke(app, ["compact", root, "--json"]).output)["runs"] == []
    for grace, seconds in (("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604800), ("5", 5)):
        shown = runner.invoke(app, ["gc", root, "--grace", grace, "--json"])
        assert json.loads(shown.output)["grace"] == seconds
    assert runner.invoke(app, ["gc", root, "--grace", "soon"]).exit_code == 2
