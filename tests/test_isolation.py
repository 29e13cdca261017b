"""A process of its own, with bounds: its death is an error here that names the signal or the bound."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isolated_work import answer, be_killed, call, crash, fail, grow, hold, leave, refuse, spin, wait
from typer.testing import CliRunner

import rlio
from rlio.cli.main import app
from rlio.conversion import Isolation
from rlio.errors import CorruptData, DataNotFound, OptionError, RlioError, SchemaError, UnsafeData
from rlio.support import isolation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the bounds of Linux")
GOLDEN = Path(__file__).with_name("golden") / "formats"
RING = GOLDEN / "tianshou/ring.hdf5"


def test_a_process_gives_its_result_what_it_tells_and_what_it_logs(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []
    found = call(answer, lambda *values: heard.append(values))
    assert heard == [("one", 1), ("two", None)]
    assert found["pid"] != os.getpid()
    assert found["cwd"] == os.getcwd()
    assert "a word" in caplog.text


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("work", "kind", "text", "bounds"),
    [
        (crash, CorruptData, "ended by SIGSEGV", {}),
        (be_killed, CorruptData, "ended by SIGKILL", {}),
        (leave, CorruptData, "ended by exit code 3", {}),
        (
            grow,
            UnsafeData,
            r"more than memory_bytes=268435456: .*Isolation\(memory_bytes",
            {"memory_bytes": 1 << 28},
        ),
        (spin, UnsafeData, "more than processor_seconds=1", {"processor_seconds": 1}),
        (hold, UnsafeData, "more than open_files=20", {"open_files": 20}),
    ],
)
def test_the_death_of_a_process_is_an_error_that_names_the_signal_or_the_bound(
    work: Callable[..., Any], kind: type[RlioError], text: str, bounds: dict[str, int]
) -> None:
    with pytest.raises(kind, match=text) as caught:
        call(work, **bounds)
    assert caught.value.uri == "a.hdf5"


def test_errors_of_the_process_come_back_with_their_place() -> None:
    with pytest.raises(
        SchemaError, match=r"^no such thing \[in memory://x, record 3, column obs\]$"
    ) as caught:
        call(refuse)
    assert (caught.value.uri, caught.value.record, caught.value.column) == ("memory://x", 3, "obs")
    with pytest.raises(RuntimeError, match="ZeroDivisionError: of no use"):
        call(fail)


def test_an_interrupt_ends_a_process_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_LAST_WORDS", 0.1)
    pids: list[int] = []

    def interrupt(pid: int) -> None:
        pids.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(wait, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("work", ["wait", "hang"])
def test_a_process_ends_with_its_caller(work: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import isolated_work as work\n"
        f"work.call(work.{work}, lambda pid: print(pid, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        caller.kill()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
            break  # Nobody waits for it in a container.
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{pid}").exists()


# ---- conversions ----


class Progress:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self, name: str, total: int | None) -> None:
        self.seen.append((name, total))

    def __call__(self, rows: int, episodes: int) -> None:
        self.seen.append((rows, episodes))


@pytest.mark.further
def test_an_isolated_conversion_reports_what_one_in_process_does(tmp_path: Path) -> None:
    reports, seen = [], []
    for isolated in (False, True):
        progress = Progress()
        target = tmp_path / str(isolated)
        report = rlio.convert(RING, target, prove=True, progress=progress, isolated=isolated)
        reports.append(replace(report, target=""))
        seen.append(progress.seen)
        assert report.target == str(target)
    assert reports[0] == reports[1]
    assert reports[0].proved
    assert seen[0] == seen[1]
    assert seen[0][:3] == [("convert", 8), (5, 1), (8, 2)]


@pytest.mark.further
def test_an_isolated_conversion_takes_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,a,r,e\n1,0,1.5,7\n2,1,2.5,7\n")
    mapping = rlio.Mapping(
        columns={"obs": ["x"], "actions": "a", "rewards": "r"},
        episode="e",
        terminated=True,
        next_obs="derive",
    )
    assert rlio.convert(tmp_path / "a.csv", tmp_path / "out", mapping=mapping, isolated=True).rows == 2
    np.testing.assert_array_equal(rlio.open_dataset(tmp_path / "out")[:]["rewards"], [1.5, 2.5])


class _Aborts:
    def __reduce__(self) -> Any:
        return os.abort, ()


def test_a_crash_in_a_conversion_is_an_error_with_the_source(tmp_path: Path) -> None:
    with pytest.raises(CorruptData, match=r"ended by SIGABRT.*ring\.hdf5"):
        rlio.convert(RING, tmp_path / "out", storage_options={"x": _Aborts()}, isolated=True)
    with pytest.raises(DataNotFound):
        rlio.convert(tmp_path / "none", tmp_path / "out", isolated=True)


def test_an_isolated_conversion_refuses_sources_in_memory(tmp_path: Path) -> None:
    for src in ({"obs": [1.0]}, "memory://a", [RING, 3]):
        with pytest.raises(OptionError, match="paths or URIs"):
            rlio.convert(src, tmp_path / "out", isolated=True)
    with pytest.raises(OptionError, match="cannot be pickled"):
        rlio.convert(RING, tmp_path / "out", read_options={"x": lambda: 0}, isolated=True)
    with pytest.raises(OptionError, match="isolated=3"):
        rlio.convert(RING, tmp_path / "out", isolated=3)  # type: ignore[arg-type]  # It is refused.
    with pytest.raises(OptionError, match=r"Isolation.open_files=0"):
        Isolation(open_files=0)


@pytest.mark.further
def test_the_command_takes_bounds(tmp_path: Path) -> None:
    run = CliRunner()
    command = ["convert", str(RING), str(tmp_path / "out"), "--isolated", "--json"]
    assert run.invoke(app, [*command, "--bound", "memory_bytes=6000000000"]).exit_code == 0
    assert "--isolated" in run.invoke(app, [*command[:3], "--bound", "open_files=9"]).stderr
    assert "nonsense" in run.invoke(app, [*command, "--bound", "nonsense=9"]).stderr
