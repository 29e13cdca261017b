"""The main job: `rlio demo`, at a fraction of its size."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import rlio
from rlio.cli.demo import DemoOptions, run_demo
from rlio.cli.main import app

SMALL = {
    "train_steps": 1_280,
    "record_steps": 3_000,
    "offline_updates": 40,
    "tuning_updates": 10,
    "episodes": 10,
}
SHORTER = {**SMALL, "train_steps": 1_024, "offline_updates": 5, "tuning_updates": 2}


def test_the_demo_reports_what_is_in_the_data_set(tmp_path: Path) -> None:
    report = run_demo(DemoOptions(out=str(tmp_path), seed=3, **SMALL), progress=None)
    assert [row.policy for row in report.rows] == ["random", "behaviour", "offline", "mixed"]
    data = rlio.open_dataset(report.root)
    assert len(data) == report.recorded_steps == 3_000
    assert data.bytes() == round(report.bytes_per_step * 3_000)
    tuned = report.rows[-1]
    assert (tuned.live, tuned.logged) == (1_280, 40 * 256 + 1_280)
    random = report.returns["random"]
    assert report.rows[0].mean == random.mean()
    assert report.rows[0].standard_error == random.std(ddof=1) / np.sqrt(10)
    assert (tmp_path / "001" / "returns.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.further
def test_a_seed_gives_the_same_files_and_returns_again(tmp_path: Path) -> None:
    first, second = (run_demo(DemoOptions(out=str(tmp_path), seed=5, **SHORTER)) for _ in range(2))
    assert first.root != second.root
    assert [Path(uri).name for uri in rlio.open_dataset(first.root).files()] == [
        Path(uri).name for uri in rlio.open_dataset(second.root).files()
    ], "names hold the CRC of the content"
    for name, returns in first.returns.items():
        np.testing.assert_array_equal(returns, second.returns[name])


@pytest.mark.further
def test_another_seed_gives_other_data(tmp_path: Path) -> None:
    first, second = (run_demo(DemoOptions(out=str(tmp_path), seed=s, **SHORTER)) for s in (1, 2))
    assert [Path(uri).name for uri in rlio.open_dataset(first.root).files()] != [
        Path(uri).name for uri in rlio.open_dataset(second.root).files()
    ]


@pytest.mark.further
def test_the_demo_runs_on_any_filesystem() -> None:
    report = run_demo(DemoOptions(out="memory://demo-test", **SHORTER))
    assert report.plot == "memory://demo-test/001/returns.png"
    assert len(rlio.open_dataset("memory://demo-test/001/cartpole")) == 3_000


def test_the_command_prints_one_table(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path), "--seed", "1"])
    assert result.exit_code == 0, result.output
    for text in ("policy", "mean return", "bytes a step", "behaviour", "mixed", "5,000 steps"):
        assert text in " ".join(result.output.split())
    header = json.loads((tmp_path / "001" / "cartpole" / "_rlio.json").read_text())
    assert header == {"format": 0}
