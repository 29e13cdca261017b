"""The command `rlio verify`: exit codes, JSON, tables; nothing but the report on standard output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from further import first
from stored_batches import fresh_root
from test_verify import DAMAGE, WRITER, episodes, recorded
from typer.testing import CliRunner

import rlio
from rlio import ParquetWriter
from rlio.catalog.listing import HoleCheck
from rlio.cli.main import app
from rlio.maintenance.findings import CODES

runner = CliRunner()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between listings: memory shows at once what was put."""
    monkeypatch.setattr("rlio.catalog.listing.HOLE_CHECK", HoleCheck(seconds=0))


def run(*arguments: str) -> Any:
    return runner.invoke(app, ["verify", *arguments])


#: `make test` runs the first four.
EXITS = {
    "nothing": (0, 0),
    "a torn last shard": (0, 1),  # a warning
    "a flipped row group": (1, 1),
    "no header": (1, 1),
    "a stray file beside shards": (0, 1),
    "a flipped footer": (1, 1),
    "a shard that is gone": (1, 1),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", first(3, EXITS))
def test_exit_codes_tell_errors_and_with_strict_warnings(name: str) -> None:
    kind, plant, _, _ = DAMAGE[name]
    root = recorded(kind)
    plant(root)
    assert (run(root).exit_code, run(root, "--strict").exit_code) == EXITS[name]
    assert run(root, "--json").exit_code == EXITS[name][0]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "arguments",
    [["nowhere"], ["--level", "deep"], ["--no-such-option"], [], ["--limit", "0"], ["nosuch://x/y"]],
)
def test_what_cannot_be_verified_exits_with_2(arguments: list[str], tmp_path: Path) -> None:
    if arguments == ["nowhere"]:
        arguments = [str(tmp_path / "nowhere")]
    elif arguments and arguments[0].startswith("--"):
        arguments = [recorded(), *arguments]
    shown = run(*arguments)
    assert shown.exit_code == 2
    assert "Traceback" not in shown.output


def test_the_exit_codes_stand_in_the_help() -> None:
    text = " ".join(run("--help").output.replace("│", " ").split())
    assert "Exit codes: 0, no errors" in text


def test_json_is_one_object_with_the_keys_that_the_page_describes(checkout: Path) -> None:
    root = recorded()
    DAMAGE["a flipped row group"][1](root)
    shown = json.loads(run(root, "--json").stdout)
    assert list(shown) == [
        *("version", "uri", "level", "ok", "counts", "omitted", "bytes", "findings", "ledger", "total"),
    ]
    assert shown["ok"] is False
    assert shown["counts"] == {"error": 1, "warning": 0, "note": 0}
    (finding,) = shown["findings"]
    assert list(finding) == ["severity", "code", "uri", "message", "record", "column", "rows"]
    assert (finding["code"], finding["record"], finding["rows"]) == ("group-crc", 1, 16)
    (entry,) = shown["ledger"]
    assert entry == {"writer": WRITER, **shown["total"]}
    assert (entry["live"], entry["damaged"], entry["end"]) == (284, 16, 300)
    page = (checkout / "docs" / "verify.md").read_text()
    for key in [*shown, *finding, *entry]:
        assert f"`{key}`" in page, f"docs/verify.md does not say what {key} is"


def test_repair_in_json_says_what_was_done() -> None:
    root = recorded()
    DAMAGE["no header"][1](root)
    shown = run(root, "--repair", "--json")
    assert shown.exit_code == 0
    repair = json.loads(shown.stdout)["repair"]
    assert [action["kind"] for action in repair["actions"]] == ["header-written"]
    assert repair["before"] == {"error": 1, "warning": 0, "note": 0}
    assert json.loads(run(root, "--repair", "--json").stdout)["repair"]["actions"] == []


def test_the_text_names_findings_what_was_repaired_and_the_ledger() -> None:
    root = recorded()
    DAMAGE["a flipped row group"][1](root)
    text = run(root).output
    assert "error: group-crc: " in text
    assert "record 1" in text
    assert WRITER in text
    assert "284" in text
    assert "damaged; 1 errors, 0 warnings" in text
    DAMAGE["no header"][1](root)
    text = run(root, "--repair").output
    assert "repaired: " in text
    assert "error: group-crc: " in text
    clean = run(recorded()).output
    assert "clean; 0 errors, 0 warnings, 0 notes; 300 rows verify (full)" in clean


def test_findings_beyond_the_limit_are_counted() -> None:
    root = recorded()
    for name in ("a flipped footer", "no header"):
        DAMAGE[name][1](root)
    text = run(root, "--limit", "1").output
    assert "and 1 more findings" in text


def test_several_writers_have_a_sum() -> None:
    root = fresh_root()
    for name in ("w1", "w2"):
        with ParquetWriter(root, writer_id=name) as writer:
            writer.write(episodes(20))
    table = run(root).output
    assert "total" in table
    assert json.loads(run(root, "--json").stdout)["total"]["live"] == 40


@pytest.mark.further
def test_the_command_in_a_process_of_its_own_writes_the_report_to_stdout_alone(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path / "data set [x]") as writer:
        writer.write(episodes(20))
    command = [
        sys.executable,
        "-c",
        "from rlio.cli.main import main; main()",
        "verify",
        "data set [x]",
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(rlio.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["total"]["live"] == 20


def test_every_code_is_explained_on_the_page_with_its_severity(checkout: Path) -> None:
    page = (checkout / "docs" / "verify.md").read_text()
    listed = {
        cells[1].strip(" `"): cells[2].strip()
        for line in page.splitlines()
        if len(cells := line.split("|")) == 5
    }
    for code, severity in CODES.items():
        assert listed.get(code, "").split(",")[0] == severity, code
    assert set(listed) - set(CODES) <= {"code", "---", "key", "exit code"} | {"0", "1", "2"}
