"""The command line: commands have help and stand in docs/commands.md; errors are messages, not tracebacks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import rlio
from rlio.cli import main as cli
from rlio.cli.exit_codes import EXIT_CODES

runner = CliRunner()


def commands() -> dict[str, object]:
    return dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]  # a group, as it has commands


def test_every_command_has_help_and_stands_in_the_page_of_commands(checkout: Path) -> None:
    page = (checkout / "docs" / "commands.md").read_text(encoding="utf-8")
    assert "version" in commands()
    for name in commands():
        shown = runner.invoke(cli.app, [name, "--help"])
        assert shown.exit_code == 0
        assert "Usage" in shown.output
        assert f"| `rlio {name}" in page, f"docs/commands.md does not say `rlio {name}`"


def test_without_a_command_the_help_is_shown() -> None:
    shown = runner.invoke(cli.app, [])
    assert all(name in shown.output for name in commands())


def test_version_shows_what_is_installed_as_text_and_as_json() -> None:
    text = runner.invoke(cli.app, ["version"]).output
    assert f"rlio       {rlio.__version__}" in text.splitlines()
    shown = json.loads(runner.invoke(cli.app, ["version", "--json"]).output)
    assert shown["rlio"] == rlio.__version__
    assert {"python", "numpy", "pyarrow", "torch"} <= set(shown)


def test_the_version_is_an_option() -> None:
    shown = runner.invoke(cli.app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"rlio {rlio.__version__}\n")


def test_the_help_imports_neither_arrays_nor_tables() -> None:
    """So that it takes little more time than the import of its library."""
    heavy = ("numpy", "pyarrow", "torch", "gymnasium", "fsspec", "pandas", "h5py", "rich", "tqdm")
    code = (
        "import sys; from rlio.cli.main import app; sys.argv = ['rlio', '--help']\n"
        "try: app()\n"
        f"finally: print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: " in ran.stdout
    assert ran.stderr == "[]\n"


def test_one_table_of_exit_codes_stands_in_the_help_and_the_page(checkout: Path) -> None:
    page = (checkout / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES
    shown = " ".join(runner.invoke(cli.app, ["--help"]).output.split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in shown


def test_no_command_has_exit_codes_of_its_own(checkout: Path) -> None:
    for module in (checkout / "rlio" / "cli").glob("*.py"):
        text = module.read_text(encoding="utf-8")
        assert not re.search(r"(Exit|exit)\(\s*-?\d", text), f"{module.name} exits with a number"


def _code(code: str, arguments: tuple[str, ...]) -> str:
    return f"import sys\nfrom rlio.cli import main\n{code}\nsys.argv = ['rlio', *{arguments!r}]\nmain.main()"


def _run_main(*arguments: str, code: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    text = _code(code, arguments)
    return subprocess.run(
        [sys.executable, "-c", text], text=True, check=False, stderr=subprocess.PIPE, **options
    )


def test_a_bug_has_an_exit_code_of_its_own_and_a_traceback() -> None:
    ran = _run_main(code="main.app = lambda: 1 / 0", stdout=subprocess.DEVNULL)
    assert ran.returncode == 70
    assert "Traceback" in ran.stderr
    assert "ZeroDivisionError" in ran.stderr


def test_ctrl_c_has_an_exit_code_of_its_own() -> None:
    code = (
        "import importlib\n"
        "def stop(*values, **options): raise KeyboardInterrupt\n"
        "importlib.import_module('rlio.maintenance.verify').verify = stop"
    )
    assert _run_main("verify", "runs", code=code, stdout=subprocess.DEVNULL).returncode == 130


def test_a_closed_pipe_has_an_exit_code_of_its_own_and_no_traceback(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "root") as writer:
        writer.write(rlio.SampleBatch(obs=[[0.0]], t=[0]))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        ran = _run_main("verify", str(tmp_path / "root"), "--json", stdout=closed)
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.parametrize("command", ["verify", "convert", "convert --prove", "recover"])
def test_progress_has_rate_and_remaining_time_and_is_silent_elsewhere(command: str, tmp_path: Path) -> None:
    t = np.arange(20) % 5
    for part in range(2):
        with rlio.ParquetWriter(tmp_path / "root", roll=rlio.Roll(max_rows=10)) as writer:
            rows = {"obs": t * 1.0, "actions": t, "rewards": t * 1.0, "terminateds": t == 4, "t": t}
            writer.write(rlio.SampleBatch(rows, eps_id=np.arange(20) // 5 + part))
    root, code = str(tmp_path / "root"), "import rlio.cli.tables as tables; tables._QUIET_SECONDS = 0"

    def arguments(number: int) -> tuple[str, ...]:
        if command == "recover":
            _leave_a_log(tmp_path / str(number))
            return command, str(tmp_path / str(number))
        name, *options = command.split()
        return (name, root, *([str(tmp_path / str(number))] if name == "convert" else []), *options)

    shown = _run_on_terminal(*arguments(0), code=code)
    for name in command.split(" --"):
        assert re.search(rf"{name}.*%\|.*\[\d\d:\d\d<(\d\d:\d\d|\?), .*/s\]", shown), shown
    assert "%|" not in _run_on_terminal(*arguments(1), "--json", code=code)
    piped = _run_main(*arguments(2), code=code, stdout=subprocess.DEVNULL)
    assert (piped.returncode, piped.stderr) == (0, "")


def _leave_a_log(root: Path) -> None:
    """A log of a writer that is dead."""
    child = os.fork()
    if not child:
        writer = rlio.ParquetWriter(root, sync="always")
        writer.write(rlio.SampleBatch(obs=[[0.0]] * 9, t=range(9)))
        os._exit(0)
    os.waitpid(child, 0)


def _run_on_terminal(*arguments: str, code: str) -> str:
    """Run a command whose standard error is a terminal; gives what was written there."""
    pty = pytest.importorskip("pty")
    termios = pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    command = [sys.executable, "-c", _code(code, arguments)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, check=True)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # The end, on Linux.
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    return shown.decode()


def test_the_installed_command_and_an_unknown_one(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("rlio")
    if not command.exists():
        pytest.skip("rlio is not installed as a command beside this Python")
    found = subprocess.run([command, "nonsense"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "nonsense" in found.stderr


def test_an_error_of_ours_is_its_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlio", "gc", "memory://no-such-data-set"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlio: DataNotFound: ")


def test_an_error_that_is_not_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def _has_rows(folder: Path) -> bool:
    """Whether rows are surely logged: a log's file is there before a frame is in it."""
    with contextlib.suppress(FileNotFoundError):  # A log goes once its rows are in a shard.
        if any(path.stat().st_size > 1 << 16 for path in folder.glob("**/_wal/*/*.wal")):
            return True
    return any(folder.glob("**/data/*/*.parquet"))


@pytest.mark.further
def test_a_command_that_is_terminated_closes_its_writers(tmp_path: Path) -> None:
    """SIGTERM in the middle of the demo's recording: what was recorded is published, and no log is left."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from rlio.cli.main import main; main()",
            "demo",
            "--quick",
            "--out",
            str(tmp_path / "demo"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    logs = tmp_path / "demo"
    deadline = time.monotonic() + 120
    while not _has_rows(logs):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert not [*logs.glob("**/_wal/*")]
    (root,) = {path.parent for path in logs.glob("**/_rlio.json")}
    assert len(rlio.open_dataset(root)) > 0
