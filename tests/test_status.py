"""`status`: what it says of living, dead and closed writers, logs and followers; nothing is written."""

from __future__ import annotations

import importlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from crash_child import batch_of, fork, wait_for
from growing_data import grow
from servers import Server
from stored_batches import fresh_root
from typer.testing import CliRunner

import rlio
from rlio import Markers, ParquetWriter, Roll
from rlio.catalog.commit import put_header
from rlio.catalog.markers import claim, seal
from rlio.catalog.names import MAX_ROW
from rlio.cli.main import app
from rlio.errors import DataNotFound
from rlio.following.marks import Mark, put_mark
from rlio.log import spool as spool_module
from rlio.log.spool import LogFolder
from rlio.maintenance import compact, status, trim
from rlio.storage.filesystem import Storage

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no logs without flock")

ONE, TWO, THREE = "w00001-00000001", "w00002-00000002", "w00003-00000003"
WHOLE = Roll(max_seconds=None)


@contextmanager
def living(root: str | Path, writer: str, published: int, logged: int, **options: Any) -> Iterator[int]:
    """A process with an open writer that has published some rows, and logged others; gives its id."""
    ready, says = os.pipe()

    def run() -> None:
        held = ParquetWriter(root, writer_id=writer, roll=WHOLE, **options)
        if published:
            held.write(batch_of(0, published))
            held.flush()
        for first in range(published, published + logged, 2):
            held.write(batch_of(first, 2))
        os.write(says, b"!")
        signal.pause()

    pid = fork(run)
    try:
        assert select.select([ready], [], [], 60)[0], "the writer did not come so far"
        assert os.read(ready, 1) == b"!"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        assert wait_for(pid) == -signal.SIGKILL
        os.close(ready)
        os.close(says)


def killed(root: str | Path, writer: str, published: int, logged: int, **options: Any) -> None:
    """A writer whose process was killed, and left rows in its log."""
    with living(root, writer, published, logged, **options):
        pass


def finished(root: str | Path, writer: str, rows: int, **options: Any) -> None:
    with ParquetWriter(root, writer_id=writer, roll=WHOLE, **options) as held:
        held.write(batch_of(0, rows))


def by_writer(root: str | Path, **options: Any) -> dict[str, tuple[str, int, int | None]]:
    """Writer -> state, rows, rows unpublished."""
    return {
        one.writer: (one.state, one.rows, one.rows_unpublished) for one in status(root, **options).writers
    }


def tree(*folders: Path) -> dict[Path, tuple[int, int, bytes]]:
    """Every file: its inode, when it was changed, and its bytes."""
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["status", *map(str, arguments)])


# ---- writers and their logs ----


def test_writers_that_live_died_and_finished_are_told_apart(tmp_path: Path) -> None:
    root = tmp_path / "run"
    finished(root, ONE, 12)
    killed(root, THREE, 10, 6)
    with living(root, TWO, 10, 4) as pid:
        # A writer that opens recovers the logs of dead ones: the one that lives has done so.
        killed_at = by_writer(root)
        assert killed_at == {ONE: ("closed", 12, 0), TWO: ("alive", 10, 4), THREE: ("closed", 16, 0)}
        (log,) = status(root).logs
        assert (log.writer, log.owner, log.pid, log.rows, log.command) == (TWO, "alive", pid, 4, None)
        assert log.bytes == sum(path.stat().st_size for path in (root / "_wal" / TWO).iterdir())
    found = status(root)
    assert by_writer(root)[TWO] == ("dead", 10, 4)
    assert (found.rows, found.rows_unpublished) == (12 + 10 + 16, 4)
    (log,) = found.left
    assert (log.owner, log.pid, log.rows) == ("dead", pid, 4)
    assert log.command == f"rlio recover {root}"
    done = CliRunner().invoke(app, shlex.split(log.command)[1:])
    assert done.exit_code == 0, done.output
    assert by_writer(root)[TWO] == ("closed", 14, 0)
    assert status(root).logs == ()


def test_a_process_id_that_another_process_has_now_does_not_make_a_dead_writer_live(tmp_path: Path) -> None:
    killed(tmp_path, ONE, 4, 2)
    owner = tmp_path / "_wal" / ONE / "owner"
    said = json.loads(owner.read_text())
    inode = owner.stat().st_ino
    owner.write_text(json.dumps({**said, "pid": os.getpid()}))
    assert owner.stat().st_ino == inode
    assert by_writer(tmp_path) == {ONE: ("dead", 4, 2)}
    owner.write_text(json.dumps({**said, "pid": os.getpid(), "boot": "another"}))
    assert by_writer(tmp_path) == {ONE: ("dead", 4, 2)}


def test_whether_writers_of_other_hosts_live_is_not_known(tmp_path: Path) -> None:
    killed(tmp_path, ONE, 4, 2)
    grow(str(tmp_path), TWO, 0, 5)
    owner = tmp_path / "_wal" / ONE / "owner"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "host": "another", "pid": os.getpid()}))
    assert by_writer(tmp_path) == {ONE: ("unknown", 4, 2), TWO: ("unknown", 5, None)}
    (log,) = status(tmp_path).left
    assert (log.owner, log.command) == ("other-host", f"rlio recover {tmp_path} --all-hosts")
    shown = run(tmp_path).output
    assert re.search(rf"{TWO}\W+unknown\W+5\W+\?\W+\d+ s ago", shown), shown


def test_logs_of_other_users_and_without_an_owner_are_shown_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path, ONE, 4, 2)
    (tmp_path / "_wal" / ONE / "owner").rename(tmp_path / "owner")
    (log,) = status(tmp_path).left
    assert (log.owner, log.rows, log.command) == ("ownerless", 2, None)
    assert by_writer(tmp_path) == {ONE: ("unknown", 4, 2)}
    (tmp_path / "owner").rename(tmp_path / "_wal" / ONE / "owner")

    def refuse(self: LogFolder) -> list[str]:
        raise PermissionError(13, "Permission denied", self.path)

    monkeypatch.setattr(LogFolder, "state", lambda self: "other-user")
    monkeypatch.setattr(LogFolder, "segments", refuse)
    (log,) = status(tmp_path).left
    assert (log.owner, log.rows, log.bytes) == ("other-user", None, None)
    assert by_writer(tmp_path) == {ONE: ("unknown", 4, None)}
    assert "belongs to another user" in run(tmp_path).output


def test_a_writer_that_has_published_nothing_is_shown(tmp_path: Path) -> None:
    with living(tmp_path, ONE, 0, 6):
        assert by_writer(tmp_path) == {ONE: ("alive", 0, 6)}
        (one,) = status(tmp_path).writers
        assert (one.shards, one.bytes, one.last_commit) == (0, 0, None)


def test_each_root_has_its_own_writers_also_where_logs_share_a_folder(tmp_path: Path) -> None:
    roots, spool = [tmp_path / "a", tmp_path / "b"], tmp_path / "spool"
    killed(roots[0], ONE, 4, 2, spool=spool)
    killed(roots[1], ONE, 6, 8, spool=spool)
    assert by_writer(roots[0], spool=spool) == {ONE: ("dead", 4, 2)}
    assert by_writer(roots[1], spool=spool) == {ONE: ("dead", 6, 8)}
    (log,) = status(roots[1], spool=spool).left
    assert log.command == f"rlio recover {roots[1]} --spool {spool}"
    assert by_writer(roots[0]) == {ONE: ("unknown", 4, None)}, "without --spool its log is not found"


def test_rows_in_a_log_that_a_shard_has_already_are_not_counted_twice(tmp_path: Path) -> None:
    killed(tmp_path, ONE, 0, 6)
    grow(str(tmp_path), ONE, 0, 4)  # As if it had died between storing the shard and cutting its log.
    assert by_writer(tmp_path) == {ONE: ("dead", 4, 2)}


def test_trimmed_and_compacted_rows_are_counted_as_readers_see_them(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path, writer_id=ONE, roll=WHOLE) as held:
        for first in range(0, 20, 5):
            held.write(batch_of(first, 5))
            held.flush()
    before = status(tmp_path)
    os.utime(next((tmp_path / "data" / ONE).glob("000000000015-*")), (1_000, 1_000))
    compact(tmp_path)
    found = status(tmp_path)
    assert (found.rows, found.shards, before.shards) == (20, 5, 4)
    assert found.last_commit == 1_000, "the shard that was made by compacting came later"
    trim(tmp_path, before={ONE: 7})
    assert status(tmp_path).rows == 13


def test_attempts_that_are_not_closed_are_shown_and_their_rows_are_hidden(tmp_path: Path) -> None:
    first, second = "xjob-000000~0000-00000000", "xjob-000000~0001-00000000"
    put_header(Storage.open(tmp_path))
    grow(str(tmp_path), first, 0, 5)
    found = {one.writer: one for one in status(tmp_path).writers}
    assert (found[first].rows, found[first].rows_hidden, found[first].state) == (0, 5, "unknown")
    grow(str(tmp_path), second, 0, 7)
    seal(Storage.open(tmp_path), second, 7)
    found = {one.writer: one for one in status(tmp_path).writers}
    assert (found[first].rows, found[first].rows_hidden) == (0, 5)
    assert (found[second].rows, found[second].rows_hidden, found[second].state) == (7, 0, "closed")
    assert "5 rows of attempts" in run(tmp_path).output
    seal(Storage.open(tmp_path), first, 5)
    found = {one.writer: one for one in status(tmp_path).writers}
    assert (found[first].rows, found[first].rows_hidden, found[first].state) == (5, 0, "closed")
    assert (found[second].rows, found[second].rows_hidden, found[second].state) == (0, 7, "closed")


# ---- it disturbs nobody ----


def test_nothing_is_written_and_no_lock_of_a_writer_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, spool = tmp_path / "run", tmp_path / "spool"
    finished(root, ONE, 12, spool=spool)
    Storage.open(root).put("_progress/w00001-00000001/learner_0_3_90", b"1")
    with living(root, TWO, 10, 4, spool=spool):
        killed(root, THREE, 10, 6, spool=spool)
        taken: list[int] = []
        flock = spool_module.fcntl.flock

        def watched(fd: int, operation: int) -> None:
            flock(fd, operation)
            taken.append(operation)

        monkeypatch.setattr(spool_module.fcntl, "flock", watched)
        before = tree(tmp_path)
        folders = {path for path in tmp_path.rglob("*") if path.is_dir()}
        status(root, spool=spool)
        assert run(root, "--spool", spool).exit_code == 0
        assert tree(tmp_path) == before
        assert {path for path in tmp_path.rglob("*") if path.is_dir()} == folders
        assert taken == [], "the living have theirs, and those of the dead are for recovery"


def test_no_shard_is_opened_and_no_payload_of_a_log_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path, ONE, 10, 20)
    read: list[str] = []
    real = Storage._read

    def watched(self: Storage, path: str, start: int, stop: int | None) -> bytes:
        read.append(path)
        return real(self, path, start, stop)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the payload of a frame was looked at")

    monkeypatch.setattr(Storage, "_read", watched)
    monkeypatch.setattr("rlio.log.wal._parse", refuse)
    assert by_writer(tmp_path) == {ONE: ("dead", 10, 20)}
    assert read == ["_rlio.json"]


def test_logs_and_files_that_go_while_they_are_looked_at_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path / "kept", ONE, 4, 6)
    log = tmp_path / "kept" / "_wal" / ONE
    segments, folder_bytes, state = LogFolder.segments, LogFolder.bytes, LogFolder.state

    def copy(name: str) -> Path:
        return Path(shutil.copytree(tmp_path / "kept", tmp_path / name))

    def gone_before(self: LogFolder) -> Any:
        shutil.rmtree(self.path)
        return state(self)

    def gone_after(self: LogFolder) -> Any:
        found = state(self)
        shutil.rmtree(self.path)
        return found

    def gone_when_listed(self: LogFolder) -> list[str]:
        found = segments(self)
        for path in found:
            os.unlink(path)
        return found

    def gone_when_summed(self: LogFolder) -> int:
        shutil.rmtree(self.path)
        return folder_bytes(self)

    for number, (owner, name, act, rows) in enumerate(
        [
            (LogFolder, "state", gone_before, None),
            (LogFolder, "state", gone_after, None),
            (LogFolder, "segments", gone_when_listed, 0),
            (LogFolder, "bytes", gone_when_summed, None),
        ]
    ):
        root = copy(str(number))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, act)
            found = status(root)
        assert [one.rows for one in found.logs] == ([] if rows is None else [rows]), name
        assert [one.rows for one in found.writers] == [4]
    assert log.is_dir()


def test_a_folder_of_logs_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path, ONE, 4, 6)

    def refuse(spool: str) -> list[LogFolder]:
        raise PermissionError(13, "Permission denied", spool)

    # The package's `status` is the function.
    monkeypatch.setattr(importlib.import_module("rlio.maintenance.status"), "find_logs", refuse)
    report = json.loads(run(tmp_path, "--json").stdout)
    assert [(one["state"], one["rows_unpublished"]) for one in report["writers"]] == [("unknown", None)]
    assert "_wal" in report["warnings"][0]


def test_while_a_writer_appends_every_row_is_counted_once(tmp_path: Path) -> None:
    root, rows, acked, stop = tmp_path / "run", 3, [0, 0], threading.Event()

    def record() -> None:
        with ParquetWriter(root, writer_id=ONE, roll=Roll(max_rows=60, max_seconds=None)) as held:
            while not stop.is_set():
                acked[0] += rows
                held.write(batch_of(acked[1], rows))
                acked[1] = acked[0]

    finished(root, TWO, 1)
    thread = threading.Thread(target=record)
    thread.start()
    try:
        until, looked = time.monotonic() + 120, 0
        while (looked < 40 or acked[1] < 3_000) and time.monotonic() < until:
            least = acked[1]
            found = status(root)
            most = acked[0]
            counted = found.rows - 1 + found.rows_unpublished
            assert least <= counted <= most
            looked += 1
    finally:
        stop.set()
        thread.join()
    assert looked >= 40
    assert by_writer(root)[ONE] == ("closed", acked[1], 0)


def test_what_a_crash_cut_off_is_not_counted_and_what_is_damaged_is_told(tmp_path: Path) -> None:
    killed(tmp_path, ONE, 0, 6)
    (segment,) = (tmp_path / "_wal" / ONE).glob("*.wal")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-5])
    (log,) = status(tmp_path).logs
    assert log.rows == 4
    assert 0 < log.unread_bytes < len(whole) // 3
    segment.write_bytes(b"?" + whole[1:])
    (log,) = status(tmp_path).logs
    assert (log.rows, log.unread_bytes) == (0, len(whole))
    segment.write_bytes(b"")
    assert [(one.rows, one.unread_bytes) for one in status(tmp_path).logs] == [(0, 0)]
    segment.unlink()
    segment.symlink_to(tmp_path / "_rlio.json")
    shown = run(tmp_path, "--json")
    assert shown.exit_code == 0
    assert "link" in json.loads(shown.stdout)["warnings"][0]


def test_files_that_a_recovery_set_aside_are_named(tmp_path: Path) -> None:
    finished(tmp_path, ONE, 4)
    aside = tmp_path / "_wal" / "_damaged" / f"{TWO}-000000000000.wal"
    aside.parent.mkdir(parents=True)
    aside.write_bytes(b"rlw0")
    assert status(tmp_path).set_aside == (str(aside),)
    assert "set aside" in run(tmp_path).output


# ---- roots ----


def test_a_root_without_writers_is_shown_and_one_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    put_header(Storage.open(tmp_path / "empty"))
    found = status(tmp_path / "empty")
    assert (found.writers, found.logs, found.followers, found.last_commit) == ((), (), (), None)
    assert run(tmp_path / "empty").exit_code == 0
    with pytest.raises(DataNotFound):
        status(tmp_path / "missing")
    shown = run(tmp_path / "missing", "--json")
    assert shown.exit_code == 2
    assert json.loads(shown.stdout)["error"]["type"] == "DataNotFound"
    assert not (tmp_path / "missing").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("not a data set")
    assert run(tmp_path / "other").exit_code == 2
    assert run(tmp_path / "empty", "--storage-options", "[").exit_code == 2
    (tmp_path / "empty" / "_rlio.json").write_text("?")
    assert run(tmp_path / "empty").exit_code == 1


def test_rows_that_wait_for_a_root_that_could_not_be_made_are_shown(tmp_path: Path) -> None:
    root, spool = tmp_path / "run", tmp_path / "spool"
    killed(root, ONE, 0, 6, spool=spool)
    shutil.rmtree(root)
    shown = run(root, "--spool", spool, "--json")
    assert shown.exit_code == 0
    report = json.loads(shown.stdout)
    assert [(log["owner"], log["rows"]) for log in report["logs"]] == [("dead", 6)]
    assert "_rlio.json" in report["warnings"][0]


def test_writers_of_this_process_to_memory_are_shown_as_unknown() -> None:
    root = fresh_root()
    with ParquetWriter(root, writer_id=ONE, roll=WHOLE) as held:
        held.write(batch_of(0, 3))
        held.flush()
        found = status(root)
        assert [(one.state, one.rows, one.rows_unpublished) for one in found.writers] == [
            ("unknown", 3, None)
        ]
        assert found.last_commit is not None
        assert abs(time.time() - found.last_commit) < 600
        assert found.spool is None
    assert by_writer(root) == {ONE: ("closed", 3, 0)}


@pytest.mark.further
def test_a_root_on_s3_is_shown_with_the_logs_of_its_endpoint(
    serve: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("s3")
    root = server.fresh_root()
    monkeypatch.setenv("RLIO_SPOOL", str(tmp_path / "spool"))
    options = tmp_path / "options.json"
    options.write_text(json.dumps(server.options))
    code = (
        "import json, os, signal, sys, rlio\n"
        "root, options = sys.argv[1], json.load(open(sys.argv[2]))\n"
        "writer = rlio.ParquetWriter(root, worker_index=1, storage_options=options)\n"
        "writer.write(rlio.SampleBatch(rewards=[1.0, 2.0, 3.0])); writer.flush()\n"
        "writer.write(rlio.SampleBatch(rewards=[1.0, 2.0]))\n"
        "print('ready', flush=True); signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, root, str(options)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            ((writer, found),) = by_writer(root, storage_options=server.options).items()
            assert found == ("alive", 3, 2)
        finally:
            process.kill()
    found = by_writer(root, storage_options=server.options)[writer]
    assert found == ("dead", 3, 2)
    shown = run(root, "--storage-options", f"@{options}", "--json")
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert abs(report["time"] - report["last_commit"]) < 600
    assert report["logs"][0]["command"] == f"rlio recover {root} --storage-options @FILE"
    assert "secret" not in shown.stdout
    # Written down under another endpoint, it is nobody's log here, and said to be there.
    moved = tmp_path / "spool" / ("0" * 16)
    (folder,) = (path for path in (tmp_path / "spool").iterdir() if path.is_dir())
    folder.rename(moved)
    report = json.loads(run(root, "--storage-options", f"@{options}", "--json").stdout)
    assert [(log["owner"], log["rows"], log["command"]) for log in report["logs"]] == [("elsewhere", 2, None)]
    assert [one["state"] for one in report["writers"]] == ["unknown"]
    assert str(moved) in report["warnings"][0]


# ---- followers ----


def test_a_follower_is_behind_by_the_rows_that_it_has_not_taken(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path, writer_id=ONE, roll=WHOLE) as held:
        held.write(batch_of(0, 40))
        held.flush()
        with rlio.FollowingReplay(
            tmp_path, capacity=100, batch_size=4, seed=0, markers=Markers("learner", every_seconds=0)
        ) as reader:
            reader.sample()
        (follower,) = status(tmp_path).followers
        assert (follower.name, follower.writers, follower.rows_behind) == ("learner", 1, 0)
        assert follower.last_mark is not None
        held.write(batch_of(40, 10))
        assert status(tmp_path).followers[0].rows_behind == 0, "rows in the log are not published"
        held.flush()
        assert status(tmp_path).followers[0].rows_behind == 10
    grow(str(tmp_path), TWO, 0, 7)
    assert status(tmp_path).followers[0].rows_behind == 17, "it has put no mark for the second writer"
    assert "learner" in run(tmp_path).output


def test_a_follower_at_whose_ceiling_writers_are_is_said_to_hold_them_back(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    put_header(storage)
    for writer, rows in ((ONE, 10), (TWO, 10), (THREE, 10)):
        claim(storage, writer)
        grow(str(tmp_path), writer, 0, rows)
    seal(storage, THREE, 10)
    for follower, number, writer, row, ceiling in (
        ("a", 0, ONE, 2, 5),
        ("a", 1, ONE, 4, 10),
        ("a", 0, TWO, 10, 11),
        ("a", 0, THREE, 10, 10),
        ("b", 0, ONE, 10, MAX_ROW),
    ):
        put_mark(storage, writer, Mark(follower=follower, number=number, row=row, ceiling=ceiling))
    a, b = status(tmp_path).followers
    assert (a.name, a.writers, a.rows_behind, a.blocks) == ("a", 3, 6, (ONE,))
    assert (b.name, b.writers, b.rows_behind, b.blocks) == ("b", 1, 20, ())
    trim(tmp_path, before={ONE: 9})
    assert status(tmp_path).followers[0].rows_behind == 1, "trimmed rows are not waited for"


# ---- the command ----


def test_the_json_is_the_report_and_the_text_says_what_to_do(tmp_path: Path) -> None:
    killed(tmp_path, ONE, 4, 2)
    shown = run(tmp_path, "--json")
    report = status(tmp_path).to_json()
    assert json.loads(shown.stdout) == json.loads(json.dumps(report)) | {
        "time": pytest.approx(report["time"], abs=60)
    }
    assert (report["rows"], report["rows_unpublished"], report["shards"]) == (4, 2, 1)
    text = run(tmp_path)
    assert text.exit_code == 0
    assert f"`rlio recover {tmp_path}`" in text.output
    assert "1 dead" in text.output


def test_the_examples_of_the_help_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finished("runs/cartpole", ONE, 4)
    text = re.sub(r"[│\n ]+", " ", CliRunner().invoke(app, ["status", "--help"]).output)
    examples = set(re.findall(r"rlio status runs/cartpole(?: --json)?", text))
    assert len(examples) == 2
    for example in examples:
        done = CliRunner().invoke(app, shlex.split(example)[1:])
        assert done.exit_code == 0, done.output
        assert ONE in done.output


def test_times_are_shown_in_the_largest_unit_that_fits() -> None:
    from rlio.cli.status import _ago

    found = [_ago(now, 1e6) for now in (None, 1e6 + 9, 1e6 - 59, 1e6 - 60, 1e6 - 7200, 1e6 - 90_000)]
    assert found == ["?", "0 s ago", "59 s ago", "1 min ago", "2 h ago", "1 d ago"]
