"""README.md and docs/start.md are true: their blocks run in an empty folder; the loop resumes bit for bit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import blocks, one_thread, run_page

import rlio

pytestmark = pytest.mark.xdist_group("readme")  # The page is followed once.

LOOP = "rlio.load_checkpoint("


@pytest.fixture(scope="module")
def ran(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, empty before, in which the first steps were followed from top to bottom."""
    folder = tmp_path_factory.mktemp("start")
    run_page(checkout / "docs/start.md", folder, fewer={"range(200)": "range(10)", "epochs=10": "epochs=1"})
    return folder


def test_the_readme_is_followed_from_an_empty_folder(checkout: Path, tmp_path: Path) -> None:
    scope = run_page(checkout / "README.md", tmp_path)
    assert len(scope["data"]) == 5_000
    assert torch.isfinite(scope["loss"])  # Random actions cannot be learnt.


def test_the_first_steps_are_followed_from_an_empty_folder(ran: Path) -> None:
    assert len(rlio.open_dataset(ran / "runs" / "cartpole")) == 20_000
    assert (ran / "checkpoint" / "checkpoint.json").exists()


def test_the_batches_of_the_mix_are_half_live(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ran)
    sources = {"sampler": 0.5, "runs/cartpole": 0.5}
    options = {"batch_size": 256, "shuffle": True, "source_column": True}
    with rlio.RolloutWorker(
        "CartPole-v1", rlio.RandomPolicy(), input=sources, input_options=options
    ) as worker:
        found = worker.sample()["source"].tolist()
    assert found.count("runs/cartpole") == found.count("sampler") == 128


def test_its_own_loop_goes_on_bit_for_bit_where_it_was_stopped(
    checkout: Path, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in one go, once stopped after 300 steps, of which 200 were saved."""
    (loop,) = (code for code in blocks(checkout / "docs/start.md", "python") if LOOP in code)
    assert (loop.count("steps < 600"), loop.count('"checkpoint"')) == (1, 2)
    monkeypatch.chdir(ran)

    def run(until: int, folder: str) -> dict[str, torch.Tensor]:
        code = loop.replace("steps < 600", f"steps < {until}").replace('"checkpoint"', f"{folder!r}")
        scope: dict[str, Any] = {"torch": torch, "rlio": rlio}
        torch.manual_seed(0)
        with one_thread():
            exec(compile(code, "start.md", "exec"), scope)
        found: dict[str, torch.Tensor] = scope["net"].state_dict()
        return found

    whole = run(400, str(tmp_path / "whole"))
    run(300, str(tmp_path / "stopped"))
    resumed = run(400, str(tmp_path / "stopped"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_commands_of_the_readme_are_targets_of_the_makefile(checkout: Path) -> None:
    makefile = (checkout / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(
        r"^\$ make (\w+)", (checkout / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert commands == ["demo", "test"]
    for target in commands:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_record_train_mix_examples_are_short(checkout: Path) -> None:
    record, train, mix = blocks(checkout / "docs/start.md", "python")[:3]
    for code, most in ((record, 15), (train, 10), (mix, 10)):
        assert len([line for line in code.splitlines() if line.strip()]) <= most


def test_the_readme_has_at_most_600_words(checkout: Path) -> None:
    assert len((checkout / "README.md").read_text(encoding="utf-8").split()) <= 600
