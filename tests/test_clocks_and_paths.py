"""Clocks that jump, and roots of any name: what is written is the same, and what was logged comes back."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import further

import rlio
from rlio.errors import PublishError, RlioError
from rlio.writers.recovery import recover

WRITERS = {"parquet": rlio.ParquetWriter, "json": rlio.JsonWriter}
kinds = pytest.mark.parametrize("kind", WRITERS)


def steps(first: int, rows: int = 10) -> rlio.SampleBatch:
    t = np.arange(first, first + rows)
    return rlio.SampleBatch(t=t, obs=np.repeat(t, 3).reshape(-1, 3).astype(np.float32))


def rows_of(root: Any) -> list[int]:
    with rlio.DatasetReader(root, epochs=1) as reader:
        return [t for part in reader for t in part["t"].tolist()]


def files_of(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def dies(act: Callable[[], object]) -> None:
    """Do something in a forked process that ends without any farewell."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


# ---- clocks ----

DAY = 86_400.0


def _backwards() -> Callable[[], float]:
    times = iter(range(10**9, 0, -3600))
    return lambda: float(next(times))


def _jumping() -> Callable[[], float]:
    times = iter(range(10**9))
    return lambda: 1e9 + DAY * (next(times) % 2)


CLOCKS: dict[str, Callable[[], Callable[[], float]]] = {
    "a day ahead": lambda: lambda: time.monotonic() + 2e9 + DAY,
    "before the epoch": lambda: lambda: -1.0,
    "frozen": lambda: lambda: 1e9,
    "backwards": _backwards,
    "jumping by a day": _jumping,
}


@pytest.mark.few(2)
@kinds
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.each_value_once
@pytest.mark.usefixtures("stopped_clock")
def test_what_is_written_and_recovered_does_not_depend_on_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, clock: str
) -> None:
    def write(root: Path) -> dict[str, bytes]:
        roll = rlio.Roll(max_rows=25, max_seconds=30)
        with WRITERS[kind](root, writer_id="w00000-0a1b2c3d", roll=roll) as writer:
            for number in range(6):
                writer.write(steps(number * 10))

        def die() -> None:
            dead = WRITERS[kind](root, writer_id="w00001-0a1b2c3d", roll=roll)
            for number in range(3):
                dead.write(steps(number * 10))

        dies(die)
        assert [log.outcome for log in recover(root).logs] == ["recovered"]
        # A process that dies leaves unfinished files to garbage collection, under any name.
        return {path: data for path, data in files_of(root).items() if not path.startswith("_tmp")}

    expected = write(tmp_path / "true")
    monkeypatch.setattr(time, "time", CLOCKS[clock]())
    assert write(tmp_path / "false") == expected
    assert sorted(rows_of(tmp_path / "false")) == sorted([*range(60), *range(30)])


@pytest.mark.few(1)
@kinds
def test_a_clock_from_before_the_epoch_gives_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: -(10**15))

    def die() -> None:
        WRITERS[kind](tmp_path, writer_id="w00001-0a1b2c3d").write(steps(10))

    dies(die)
    recover(tmp_path)
    with WRITERS[kind](tmp_path) as writer:
        writer.write(steps(0))
    assert [info.written for info in rlio.open_dataset(tmp_path).episode_parts()] == [None, None]
    assert rlio.verify(tmp_path).ok


# ---- roots ----

NAMES = {
    "unicode": "ünïcode 日本語 \N{GRINNING FACE}",
    "composed differently": "e\u0301 \u00e9",
    "spaces": "  two  spaces  ",
    "special": "#%+&?*[a]{b}$c!'\"`;|<>\\",
    "a dash": "-rf",
    "dots": "...",
    "percent": "%20%2F%00",
    "a scheme": "s3:bucket",
    "a template": "{0} %s %(x)s",
    "a newline": "a\nb",
    "255 bytes": "n" * 255,
    "255 bytes of unicode": "é" * 127 + "x",
    "not UTF-8": os.fsdecode(b"\xff\xfe"),
}


@pytest.mark.few(3)
@kinds
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.each_value_once
def test_a_root_may_have_any_name(
    tmp_path: Path, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    # What is logged names the root, and a test run in several processes cannot report what is not UTF-8.
    caplog.set_level(logging.CRITICAL, "rlio")
    _works_at(tmp_path / NAMES[name], kind)


@pytest.mark.parametrize("name", ["special", *further("unicode", "a dash", "percent")])
def test_a_root_may_be_given_as_text(tmp_path: Path, name: str) -> None:
    _works_at(str(tmp_path / NAMES[name]), "parquet")


def _works_at(root: Any, kind: str) -> None:
    """A process dies there; the next writer recovers its rows and adds others; all are read."""

    def die() -> None:
        WRITERS[kind](root).write(steps(0))

    dies(die)
    with WRITERS[kind](root) as writer:
        writer.write(steps(10))
    assert sorted(rows_of(root)) == list(range(20))
    assert recover(root).logs == ()


def test_a_root_may_be_relative_and_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _works_at("runs/-a", "parquet")
    with rlio.ParquetWriter("runs/b") as writer:
        writer.write(steps(0))
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.write(steps(10))
    assert rows_of(tmp_path / "runs" / "b") == list(range(20))
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _works_at("~/run", "json")
    assert sorted(rows_of(tmp_path / "run")) == list(range(20))
    assert recover("~/run", spool="~/spool").spool == os.path.join(
        tmp_path, "spool", os.path.basename(str(recover("~/run", spool=tmp_path / "spool").spool))
    )


@pytest.mark.few(1)
@kinds
def test_a_root_may_be_reached_through_a_link(tmp_path: Path, kind: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real", target_is_directory=True)
    (tmp_path / "parent").symlink_to(".", target_is_directory=True)
    _works_at(tmp_path / "link", kind)
    assert sorted(rows_of(tmp_path / "parent" / "real")) == list(range(20))

    def die() -> None:
        WRITERS[kind](tmp_path / "link").write(steps(20))

    dies(die)
    assert recover(tmp_path / "real").rows == 10, "the same log, whatever way leads to it"
    assert sorted(rows_of(tmp_path / "link")) == list(range(30))


def test_a_root_that_may_only_be_read_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    # Below the system's own folder: the user who is tried may have no way into pytest's.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        with rlio.ParquetWriter(root) as writer:
            writer.write(steps(0))
        before = files_of(root)
        os.chmod(folder, 0o755)
        for path in [root, *root.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            _as_somebody(lambda: _is_refused(root))
        finally:
            for path in [root, *(path for path in root.rglob("*") if path.is_dir())]:
                path.chmod(0o755)
        assert files_of(root) == before


def _is_refused(root: Path) -> None:
    assert rows_of(root) == list(range(10))
    for writer in WRITERS.values():
        with pytest.raises(PublishError, match="Permission denied") as caught:
            writer(root)
        assert str(root) in str(caught.value)
        with pytest.raises(PublishError, match="Permission denied"):
            writer(root / "new")
    assert recover(root).is_clean


def _as_somebody(act: Callable[[], object]) -> None:
    """Do it as a user who is not root, in a forked process."""
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            act()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_log_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RlioError, match=r"spool=Spool\(folder=\.\.\.\), or write without a log: spool=None"):
        rlio.ParquetWriter(tmp_path / "run", spool=tmp_path / "file")
