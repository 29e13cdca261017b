"""Every block of code in README.md and docs/*.md runs, in the order of its page, or says why it does not."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from pages import RUNNABLE, blocks_of, commands_of, pages, run_command, run_page
from typer.main import get_command
from typer.testing import CliRunner

import rlio
from rlio.cli import main as cli
from rlio.evaluation import FittedQ

HERE = Path(__file__).parent
# These pages have tests of their own: test_readme, test_look_page.
PAGES = [page for page in pages(HERE.parent) if page.name not in ("README.md", "start.md", "look.md")]
#: Pages that are about a data set which another page has recorded, and its name there.
ABOUT = {
    "columns.md": "runs/cartpole",
    "commands.md": "runs/cartpole",
    "convert.md": "runs/cartpole",
    "cookbook.md": "runs/cartpole",
    "evaluation.md": "runs/cartpole",
    "format.md": "root",
    "plugins.md": "runs/cartpole",
    "reading.md": "runs/cartpole",
    "recording.md": "runs/cartpole",
    "replay.md": "runs/cartpole",
    "security.md": "runs/cartpole",
    "verify.md": "runs/cartpole",
}


#: Pages that take ``import rlio`` for granted.
WITHOUT_IMPORT = {"distributed.md", "evaluation.md", "security.md"}
#: What stands in the place of some of their words: less work, and no machines but this one.
FEWER = {
    "distributed.md": {
        '"tcp://10.0.0.1:29500"': 'f"file://{os.getcwd()}/meeting"',
        "epochs=10": "epochs=1",
        "% 1000 == 999": "% 2 == 1",
    },
    "security.md": {"s3://from/elsewhere": "runs/cartpole"},
}


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 steps of CartPole under a random policy."""
    root = tmp_path_factory.mktemp("recorded") / "cartpole"
    rollout = rlio.RolloutConfig(rollout_fragment_length=1000)
    with rlio.RolloutWorker(
        "CartPole-v1", rlio.RandomPolicy(), rollout=rollout, output=root, seed=0
    ) as worker:
        worker.sample()
    return root


@pytest.mark.few(6)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_an_empty_folder(
    page: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    given: dict[str, Any] = {"rlio": rlio} if page.name in WITHOUT_IMPORT else {}
    if page.name in ABOUT:
        shutil.copytree(recorded, tmp_path / ABOUT[page.name])
    if page.name == "evaluation.md":
        # Its 3,000 iterations take ten seconds.
        monkeypatch.setitem(FittedQ.__init__.__kwdefaults__, "iterations", 30)
        given["policy"] = rlio.policies.BehaviourCloning()
        given["policy"].bind(*rlio.open_dataset(recorded).spaces, seed=0)
    if page.name == "distributed.md":  # One process alone, which meets in a file: TCP ports are open to all.
        given |= {"env": gym.make("CartPole-v1"), "root": recorded, "folder": "checkpoint", "resumed": False}
        given |= {"rank": 0, "world": 1, "os": os}
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    scope = run_page(page, tmp_path, fewer=FEWER.get(page.name), given=given)
    if page.name == "distributed.md":
        torch.distributed.destroy_process_group()
        assert rlio.load_checkpoint(tmp_path / "checkpoint", policy=scope["policy"]) == {}
    if page.name == "plugins.md":
        suite = scope["TestConstant"]
        for name in dir(suite):
            if name.startswith("test_"):
                getattr(suite(), name)()
        assert scope["writer"].total == 10.0
    if page.name == "recording.md":
        frame = rlio.open_dataset(tmp_path / "runs" / "cartpole").to_pandas()
        moved = np.stack(frame["new_obs"]) - np.stack(frame["obs"])
        expected = moved[:, 0].mean(dtype=np.float64)
        assert scope["sql"] == [[(1.0,)], [(pytest.approx(expected, rel=1e-3),)]]


@pytest.mark.parametrize("page", pages(HERE.parent), ids=lambda page: page.stem)
def test_a_block_that_does_not_run_with_its_page_says_why(page: Path) -> None:
    found = list(blocks_of(page))
    assert len(found) == len(re.findall(r"^```.*\n(?:.*\n)*?^```$", page.read_text("utf-8"), re.MULTILINE))
    for block in found:
        place = f"{page.name}:{block.line}"
        assert block.language in {*RUNNABLE, "", "json"}, f"{place}: {block.language}"
        if block.mark == "run by":
            for name in re.findall(r"tests/(\w+\.py)", block.why) or ["(no file)"]:
                text = (HERE / name).read_text("utf-8") if (HERE / name).exists() else ""
                assert page.name in text or page.stem in text, f"{place}: {name} does not read the page"
        elif block.mark == "not run":
            assert len(block.why) > 8, f"{place}: the reason is missing"


def test_most_blocks_run() -> None:
    """A mark is the exception: three of five blocks or more run, here or in other tests."""
    code = [block for page in pages(HERE.parent) for block in blocks_of(page) if block.language in RUNNABLE]
    ran = [block for block in code if block.mark != "not run"]
    assert len(ran) >= 0.6 * len(code), f"{len(ran)} of {len(code)}"


def commands() -> list[str]:
    return sorted(get_command(cli.app).commands)  # type: ignore[attr-defined]  # a group, as it has commands


@pytest.mark.few(3)
@pytest.mark.parametrize("name", commands())
def test_the_examples_in_the_help_of_a_command_run(
    name: str, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"}).output
    examples = re.findall(rf"^ *(?:Example: )?(rlio {name}\b.*?) *$", shown, re.MULTILINE)
    assert examples
    if name == "demo":
        return  # Half a minute; tests/test_demo.py runs it.
    shutil.copytree(recorded, tmp_path / "runs" / "cartpole")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("my_policies.py").write_text("def even(obs, actions):\n    return -0.7 + 0.0 * actions\n")
    for example in examples:
        run_command(commands_of(f"$ {example}")[0], name)


def test_every_link_of_a_page_leads_to_a_file_and_a_heading(checkout: Path) -> None:
    for page in pages(checkout):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            to = (page.parent / path) if path else page
            assert to.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in anchors(to), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
