"""Logs have owners: a living one is never robbed, a dead one's log goes to the next writer."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from crash_child import Tally, batch_of, fork, rows_of, wait_for
from further import further

from rlio import ParquetWriter
from rlio.errors import OptionError, PublishError, UnsafeData
from rlio.log.spool import LogFolder, Spool, find_logs, spool_of, sweep
from rlio.storage.filesystem import Storage
from rlio.writers.recovery import recover


def _die_with_rows(root: Path, rows: int = 3) -> None:
    """Leave the log of a dead writer ``w``."""

    def run() -> None:
        ParquetWriter(root, writer_id="w").write(batch_of(0, rows))
        os._exit(5)

    assert wait_for(fork(run)) == 5


def _edit_owner(root: Path, **changes: Any) -> None:
    path = root / "_wal" / "w" / "owner"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _dead_pid() -> int:
    pid = fork(lambda: None)
    wait_for(pid)
    return pid


def test_the_log_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    writer = ParquetWriter(tmp_path)
    writer.write(batch_of(0, 3))
    assert [log.outcome for log in recover(tmp_path).logs] == ["alive"]
    assert [log.outcome for log in recover(tmp_path, all_hosts=True).logs] == ["alive"]
    with ParquetWriter(tmp_path):
        assert rows_of(tmp_path) == []
    writer.close()
    assert rows_of(tmp_path) == [0, 1, 2]
    assert not (tmp_path / "_wal").exists()


def test_the_next_writer_of_a_root_recovers_the_log_of_a_dead_one(tmp_path: Path) -> None:
    _die_with_rows(tmp_path)
    with ParquetWriter(tmp_path):
        assert rows_of(tmp_path) == [0, 1, 2]


def test_logs_are_for_their_user_alone(tmp_path: Path) -> None:
    root, spool = tmp_path / "root", tmp_path / "spool"
    with ParquetWriter(root, writer_id="w", spool=spool) as writer:
        writer.write(batch_of(0, 3))
        folders = [spool, *spool.iterdir(), *spool.glob("*/w")]
        assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o700] * 3
        files = list(spool.glob("*/w/*"))
        assert {path.name for path in files} == {"owner", "000000000000.wal"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_log_of_another_host_is_recovered_by_command_alone(tmp_path: Path) -> None:
    _die_with_rows(tmp_path)
    _edit_owner(tmp_path, host="elsewhere")
    left = recover(tmp_path)
    assert ([log.outcome for log in left.logs], left.is_clean) == (["other-host"], False)
    with ParquetWriter(tmp_path):
        pass
    assert rows_of(tmp_path) == []
    assert recover(tmp_path, all_hosts=True).rows == 3


def test_a_copied_log_is_not_taken_from_a_living_writer(tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    writer = ParquetWriter(root, writer_id="w")
    writer.write(batch_of(0, 3))
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("_tmp"))  # It stores its schema meanwhile.
    assert [log.outcome for log in recover(copy).logs] == ["alive"]
    _edit_owner(copy, pid=_dead_pid())
    assert recover(copy).rows == 3
    assert rows_of(copy) == [0, 1, 2]
    writer.close()


def test_a_copied_log_of_before_the_machine_started_is_recovered(tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    with ParquetWriter(root, writer_id="w") as writer:
        writer.write(batch_of(0, 3))
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns("_tmp"))
    _edit_owner(copy, boot="another start")
    assert recover(copy).rows == 3


def test_a_forked_child_neither_writes_nor_holds_the_log(tmp_path: Path) -> None:
    root, tally = tmp_path / "root", Tally()

    def run() -> None:
        writer = ParquetWriter(root)
        writer.write(batch_of(0, 3))

        def grandchild() -> None:
            for act in (lambda: writer.write(batch_of(3, 3)), writer.flush, writer.close):
                with pytest.raises(PublishError, match="fork"):
                    act()
            tally.acked = 1
            time.sleep(600)

        tally.attempted = fork(grandchild)
        while not tally.acked:
            time.sleep(0.001)
        os._exit(5)

    assert wait_for(fork(run)) == 5
    try:
        assert recover(root).rows == 3  # Although the grandchild still lives.
        assert rows_of(root) == [0, 1, 2]
    finally:
        os.kill(tally.attempted, signal.SIGKILL)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_logs_and_spools_of_other_users_are_refused(tmp_path: Path) -> None:
    root, spool = tmp_path / "root", tmp_path / "spool"
    _die_with_rows(root)
    owner = root / "_wal" / "w" / "owner"
    os.chown(owner, 4242, 4242)
    (found,) = recover(root).logs
    assert (found.outcome, "4242" in str(found.error)) == ("failed", True)
    os.chown(owner, 0, 0)
    os.chown(root / "_wal" / "w", 4242, 4242)
    left = recover(root)
    assert ([log.outcome for log in left.logs], left.is_clean) == (["other-user"], False)
    assert rows_of(root) == []
    os.chown(root / "_wal" / "w", 0, 0)
    assert recover(root).rows == 3

    where = spool_of(Storage.open(root), Spool(folder=spool))
    assert where is not None
    os.makedirs(where)
    os.chown(where, 4242, 4242)
    with pytest.raises(UnsafeData, match="4242"):
        ParquetWriter(root, spool=spool)


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["_wal", "_wal/w", "_wal/w/owner"])
def test_links_in_place_of_a_log_are_not_followed(tmp_path: Path, place: str) -> None:
    victim, root = tmp_path / "victim", tmp_path / "root"
    _die_with_rows(victim)
    with ParquetWriter(root):
        pass
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).symlink_to(victim / place)
    assert recover(root, all_hosts=True).rows == 0
    assert rows_of(root) == []
    assert recover(victim).rows == 3


def test_an_owner_that_is_a_pipe_or_damaged_blocks_nothing(tmp_path: Path) -> None:
    _die_with_rows(tmp_path)
    owner = tmp_path / "_wal" / "w" / "owner"
    text = owner.read_text()
    owner.unlink()
    os.mkfifo(owner)
    assert [log.outcome for log in recover(tmp_path).logs] == ["failed"]
    owner.unlink()
    owner.write_text(text[:-5])
    found = recover(tmp_path, all_hosts=True)
    assert found.rows == 3


def test_a_writer_that_died_while_it_opened_is_in_nobodys_way(tmp_path: Path) -> None:
    wal = tmp_path / "_wal"
    # As it is between its folder and its owner file, and as it is while it is removed.
    (wal / "_new-w-01234567").mkdir(parents=True)
    (wal / "_new-w-01234567" / "owner").write_text("{}")
    (wal / "w").mkdir()
    with ParquetWriter(tmp_path, writer_id="w") as writer:
        writer.write(batch_of(0, 2))
    assert rows_of(tmp_path) == [0, 1]
    assert not wal.exists()


def test_a_log_that_is_being_made_is_not_swept_away(tmp_path: Path) -> None:
    log = LogFolder.create(str(tmp_path / "w"), root="r", writer="w")
    made = tmp_path / "_new-w-01234567"
    (tmp_path / "w").rename(made)
    sweep(str(tmp_path))
    assert made.exists()
    log.release()
    sweep(str(tmp_path))
    assert not made.exists()
    assert find_logs(str(tmp_path)) == []


def test_a_sweep_takes_no_lock_that_the_maker_of_a_log_is_about_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "_new-w-01234567"
    made.mkdir()
    (made / "owner").touch()
    monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("the sweep took the lock"))
    sweep(str(tmp_path))
    assert (made / "owner").exists()


def test_a_second_writer_of_the_same_id_is_refused(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path, writer_id="w") as writer:
        writer.write(batch_of(0, 1))
        with pytest.raises(OptionError, match="was used there already"):
            ParquetWriter(tmp_path, writer_id="w")
    assert rows_of(tmp_path) == [0]


@pytest.mark.further
@pytest.mark.parametrize("times", [15, *further(40)])
def test_writers_that_open_and_close_at_once_do_not_disturb_each_other(tmp_path: Path, times: int) -> None:
    """The last one that closes removes the folder of logs, which the next one is about to use."""

    def run() -> None:
        for _ in range(times):
            with ParquetWriter(tmp_path) as writer:
                writer.write(batch_of(0, 1))

    children = [fork(run) for _ in range(3)]
    assert [wait_for(child) for child in children] == [0, 0, 0]
    assert len(rows_of(tmp_path)) == 3 * times
    assert not (tmp_path / "_wal").exists()


def test_illegal_spools_are_refused() -> None:
    for options in ({"sync": "often"}, {"sync_interval": 0}, {"max_bytes": 0}, {"block_seconds": -1}):
        with pytest.raises(OptionError):
            Spool(**options)  # type: ignore[arg-type]
