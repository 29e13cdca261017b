"""The main job: `rlio demo`, at a fraction of its size."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import rlio
from rlio.cli.demo import DemoOptions, run_demo
from rlio.cli.main import app
from rlio.testing import assert_same

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


def rows_of(root: str) -> rlio.SampleBatch:
    with rlio.read(root, epochs=1) as reader:
        found: rlio.SampleBatch = rlio.concat_samples(list(reader))
    return found


@pytest.mark.further
def test_a_seed_gives_the_same_rows_and_returns_again(tmp_path: Path) -> None:
    first, second = (run_demo(DemoOptions(out=str(tmp_path), seed=5, **SHORTER)) for _ in range(2))
    assert first.root != second.root
    assert_same(rows_of(first.root), rows_of(second.root))
    for name, returns in first.returns.items():
        np.testing.assert_array_equal(returns, second.returns[name])


@pytest.mark.further
def test_another_seed_gives_other_data(tmp_path: Path) -> None:
    first, second = (run_demo(DemoOptions(out=str(tmp_path), seed=s, **SHORTER)) for s in (1, 2))
    assert not np.array_equal(rows_of(first.root)["actions"], rows_of(second.root)["actions"])


@pytest.mark.further
def test_the_demo_runs_on_any_filesystem() -> None:
    report = run_demo(DemoOptions(out="memory://demo-test", **SHORTER))
    assert report.plot == "memory://demo-test/001/returns.png"
    assert len(rlio.open_dataset("memory://demo-test/001/cartpole")) == 3_000


@pytest.mark.further
def test_the_command_prints_one_table(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path), "--seed", "1"])
    assert result.exit_code == 0, result.output
    for text in ("policy", "mean return", "bytes a step", "behaviour", "mixed", "5,000 steps"):
        assert text in " ".join(result.output.split())
    header = json.loads((tmp_path / "001" / "cartpole" / "_rlio.json").read_text())
    assert header == {"format": 0}


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.further
def test_the_demo_without_matplotlib_finishes_without_the_plot_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It trained for minutes, and then exited with 2 and without its table."""
    without_matplotlib(monkeypatch)
    tiny = {**SHORTER, "record_steps": 1_000, "tuning_updates": 1, "episodes": 2}
    monkeypatch.setattr("rlio.cli.demo._QUICK", tiny)
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "mixed" in said
    assert "plot none: matplotlib is not installed: run pip install 'rlio[plot]'" in said
    assert not (tmp_path / "001" / "returns.png").exists()
    assert "matplotlib is not installed" in caplog.text  # Before it trains, too.
