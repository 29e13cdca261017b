"""The README's code runs as it stands, in a fresh folder, one block after the other."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return [code for found, code in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def test_python_and_sql_of_the_readme_run(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    duckdb = pytest.importorskip("duckdb", reason="the README's SQL runs in DuckDB")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    code = blocks(checkout / "README.md", "python")
    assert len(code) >= 3
    for block in code:
        exec(compile(block, "README.md", "exec"), scope)
    suite: Any = scope["TestConstant"]
    for name in dir(suite):
        if name.startswith("test_"):
            getattr(suite(), name)()
    rewards, moves = blocks(checkout / "README.md", "sql")
    assert duckdb.sql(rewards).fetchall() == [(1.0,)], "every step of CartPole earns 1"
    steps: Any = rlio.open_dataset("runs/cartpole").to_pandas()
    expected = (np.stack(steps["new_obs"]) - np.stack(steps["obs"]))[:, 0].mean(dtype=np.float64)
    assert duckdb.sql(moves).fetchall() == [(pytest.approx(expected, rel=1e-3),)]


def test_the_commands_of_the_readme_are_targets_of_the_makefile(checkout: Path) -> None:
    makefile = (checkout / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(
        r"^\$ make (\w+)", (checkout / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert commands == ["demo", "test"]
    for target in commands:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_record_train_mix_example_is_short(checkout: Path) -> None:
    lines = [line for line in blocks(checkout / "README.md", "python")[0].splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith("#")]) <= 17
