"""The command line: commands have help and stand in docs/commands.md; errors are messages, not tracebacks."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import rlio
from rlio.cli import main as cli

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
