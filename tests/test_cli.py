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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from further import further
from typer.testing import CliRunner
from warm_children import Ended, run_all

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


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [("--help",), ("info", "--help"), ("convert", "--help")], ids=" ".join)
def test_the_help_imports_neither_arrays_nor_tables(arguments: tuple[str, ...]) -> None:
    """So that it takes little more time than the import of its library."""
    heavy = ["numpy", "pyarrow", "torch", "gymnasium", "fsspec", "pandas", "h5py", "rich", "tqdm", "pydantic"]
    if typer.__version__.startswith("0.19."):  # It imports Rich for the options of a command.
        heavy.remove("rich")
    code = (
        f"import sys; from rlio.cli.main import app; sys.argv = ['rlio', *{arguments}]\n"
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


def _code(code: str, *arguments: str) -> str:
    return (
        f"import os, sys\nfrom rlio.cli import main\n{code}\nsys.argv = ['rlio', *{arguments!r}]\nmain.main()"
    )


# Code at the beginning of a process: where its output goes, and what it meets.
_NOWHERE = "os.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n"
_TO_A_CLOSED_PIPE = "read, write = os.pipe()\nos.dup2(write, 1)\nos.close(read)\nos.close(write)\n"
_A_BUG = (
    "import importlib\n"
    "def fail(*values, **options): return 1 / 0\n"
    "importlib.import_module('rlio.maintenance.verify').verify = fail\n"
)
_CTRL_C = (
    "import importlib\n"
    "def stop(*values, **options): raise KeyboardInterrupt\n"
    "importlib.import_module('rlio.maintenance.verify').verify = stop\n"
)
_SHOWN_AT_ONCE = "import rlio.cli.tables as tables\ntables._QUIET_SECONDS = 0\n"
_LONG = ("verify", "convert --prove", "recover", "convert")
# What they would all import first.
_IMPORTED = (
    "rlio.cli.main",
    "rlio.cli.tables",
    "rlio.maintenance.verify",
    "rlio.conversion.proof",
    "rlio.readers.dataset_reader",
    "rich.console",
)
one_process = pytest.mark.xdist_group("cli")  # One parent for all processes.


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Ended]:
    """What became of each process; its output is what it wrote to standard error, a terminal or not."""
    pty = pytest.importorskip("pty")
    termios = pytest.importorskip("termios")
    folder = tmp_path_factory.mktemp("cli")
    root = _two_writers(folder / "root")
    tasks = {
        "a bug": _code(_NOWHERE + _A_BUG, "verify", "runs"),
        "Ctrl-C": _code(_NOWHERE + _CTRL_C, "verify", "runs"),
        "a closed pipe": _code(_TO_A_CLOSED_PIPE, "verify", root, "--json"),
    }
    terminals = {}
    shown = [item for item in request.session.items if item.name.startswith("test_progress_has")]
    for command in [each.callspec.params["command"] for each in shown if isinstance(each, pytest.Function)]:
        for where in ("terminal", "terminal, --json", "pipe"):
            name, own = f"{command}, {where}", str(folder / f"of {command}, {where}")
            code = _NOWHERE + _SHOWN_AT_ONCE
            if where != "pipe":
                terminals[name], theirs = pty.openpty()
                termios.tcsetwinsize(theirs, (24, 120))
                code += f"os.dup2(os.open({os.ttyname(theirs)!r}, os.O_RDWR), 2)\n"
                os.close(theirs)
            if command == "recover":
                _leave_a_log(Path(own))
            verb, *options = command.split()
            paths = {"verify": [root], "convert": [root, own], "recover": [own]}[verb]
            tasks[name] = _code(code, verb, *paths, *options, *(["--json"] if "--json" in where else []))
    found = run_all(tasks, tmp_path_factory.mktemp("output"), modules=_IMPORTED)
    return found | {name: replace(found[name], output=_all_of(ours)) for name, ours in terminals.items()}


def _two_writers(root: Path) -> str:
    t = np.arange(20) % 5
    for part in range(2):
        with rlio.ParquetWriter(root, roll=rlio.Roll(max_rows=10)) as writer:
            rows = {"obs": t * 1.0, "actions": t, "rewards": t * 1.0, "terminateds": t == 4, "t": t}
            writer.write(rlio.SampleBatch(rows, eps_id=np.arange(20) // 5 + part))
    return str(root)


def _leave_a_log(root: Path) -> None:
    """A log of a writer that is dead."""
    child = os.fork()
    if not child:
        writer = rlio.ParquetWriter(root, sync="always")
        writer.write(rlio.SampleBatch(obs=[[0.0]] * 9, t=range(9)))
        os._exit(0)
    os.waitpid(child, 0)


def _all_of(terminal: int) -> str:
    shown = b""
    with contextlib.suppress(OSError):  # The end, on Linux.
        while part := os.read(terminal, 1 << 16):
            shown += part
    os.close(terminal)
    return shown.decode()


@one_process
def test_a_bug_has_an_exit_code_of_its_own_and_a_traceback(ended: dict[str, Ended]) -> None:
    assert ended["a bug"].status == 70
    assert "Traceback" in ended["a bug"].output
    assert "ZeroDivisionError" in ended["a bug"].output


@one_process
def test_ctrl_c_has_an_exit_code_of_its_own(ended: dict[str, Ended]) -> None:
    assert ended["Ctrl-C"].status == 130


@one_process
def test_a_closed_pipe_has_an_exit_code_of_its_own_and_no_traceback(ended: dict[str, Ended]) -> None:
    assert (ended["a closed pipe"].status, ended["a closed pipe"].output) == (141, "")


@pytest.mark.few(1)
@one_process
@pytest.mark.parametrize("command", [*_LONG[:3], *further(*_LONG[3:])])
def test_progress_has_rate_and_remaining_time_and_is_silent_elsewhere(
    command: str, ended: dict[str, Ended]
) -> None:
    terminal, with_json, piped = (
        ended[f"{command}, {where}"] for where in ("terminal", "terminal, --json", "pipe")
    )
    assert (terminal.status, with_json.status) == (0, 0), terminal.output + with_json.output
    for name in command.split(" --"):
        pattern = rf"{name}.*%\|.*\[\d\d:\d\d<(\d\d:\d\d|\?), .*/s\]"
        assert re.search(pattern, terminal.output), terminal.output
    assert "%|" not in with_json.output
    assert (piped.status, piped.output) == (0, "")


def test_the_installed_command_and_an_unknown_one(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("rlio")
    if not command.exists():
        pytest.skip("rlio is not installed as a command beside this Python")
    found = subprocess.run([command, "nonsense"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "nonsense" in found.stderr


@pytest.fixture
def _handler_goes() -> Iterator[None]:
    """`main` sets a handler of SIGTERM, which children of later tests would inherit."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_handler_goes")
def test_an_error_of_ours_is_its_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlio", "gc", "memory://no-such-data-set"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlio: DataNotFound: ")


@pytest.mark.usefixtures("_handler_goes")
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
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert not [*logs.glob("**/_wal/*")]
    (root,) = {path.parent for path in logs.glob("**/_rlio.json")}
    assert len(rlio.open_dataset(root)) > 0
