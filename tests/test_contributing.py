"""CONTRIBUTING.md is true: the files that it names are there, and its examples run."""

import re
from pathlib import Path

import pytest
from test_readme import blocks


def test_files_that_it_names_are_there(checkout: Path) -> None:
    text = (checkout / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]*(?:\.pyi?|\.md)?)`", text))
    assert len(named) > 30
    assert [name for name in sorted(named) if not (checkout / name).exists()] == []


def test_its_examples_run(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "contributing"}
    code = blocks(checkout / "CONTRIBUTING.md", "python")
    assert len(code) == 5
    for block in code:
        exec(compile(block, "CONTRIBUTING.md", "exec"), scope)
