"""What notebooks show: markup that a stranger's names cannot change, in the colours of the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import rlio
from rlio.conversion.report import Finding, ImportReport
from rlio.support.html import lines, panel, shown, table
from rlio.support.words import and_more, counted

EVIL = "<script>alert(\"x\")</script><img src=x onerror='y'>&amp;\x1b[2J\u202e"
STEPS = 5


def batch(n: int = STEPS) -> rlio.SampleBatch:
    return rlio.SampleBatch(
        {
            "obs": {
                "<b>position": np.arange(2.0 * n).reshape(n, 2),
                "camera": np.full((n, 9, 8, 3), 7, np.uint8),
            },
            "actions": np.arange(n),
            "rewards": np.array([1.5, np.nan, np.inf, 0, 2.0])[:n],
            "infos": [{EVIL: EVIL}] * n,
            "<i>note": np.array([EVIL] * n, object),
            "eps_id": np.zeros(n, np.int64),
            "t": np.arange(n),
        }
    )


def episode() -> rlio.Episode:
    pictures = np.arange(STEPS * 9 * 8, dtype=np.uint8).reshape(STEPS, 9, 8)
    return rlio.Episode(
        EVIL, observations=pictures, actions=np.arange(STEPS), rewards=np.ones(STEPS), agent_id=EVIL,
        extra_outputs={EVIL: np.array([EVIL] * STEPS, object)},
    )  # fmt: skip


REPORT = ImportReport(
    source=EVIL, target="b", source_format="csv", target_format=EVIL, episodes=1, rows=1200, written=1,
    findings=(
        Finding(kind="note", count=1, unit="a", text=EVIL, places=(EVIL,), column=EVIL, suspicion=True),
    ),
    proved=True,
)  # fmt: skip

FRAME = pd.DataFrame(
    {"obs": [1.0, 2.0, 3.0], "actions": [0, 1, 2], "rewards": [1.0] * 3, "eps_id": [0, 0, 1]}
)

Make = Callable[[Path], Any]
#: What is made -> texts that it shows.
THINGS: dict[str, tuple[Make, list[str]]] = {
    "batch": (lambda root: batch(), ["SampleBatch: 5 steps", "(9, 8, 3)", "[7 7 7 7 7 7 ...]", "nan"]),
    "batch of one": (lambda root: batch(1), ["SampleBatch: 1 step<"]),
    "empty batch": (lambda root: rlio.SampleBatch(), ["SampleBatch: 0 steps"]),
    "agents": (lambda root: rlio.MultiAgentBatch({EVIL: batch(), "b": batch()}, 5), ["5 env", "b: 5 st"]),
    "episode": (lambda root: episode(), ["not ended", "data:image/png;base64,"]),
    "report": (lambda root: REPORT, ["1,200 rows in 1 episode", "suspicion"]),
    "several": (lambda root: rlio.MultiAgentBatch({}, 0), ["0 env steps"]),
    "dataset": (rlio.open_dataset, ["5 rows", "1 shard<", "1 writer<", "(9, 8, 3)"]),
    "info": (lambda root: rlio.open_dataset(root).info(), ["DatasetInfo", "5 rows in 1", "1 writer<"]),
    "reader": (lambda root: rlio.read(root, batch_size=2, epochs=1), ["DatasetReader", "batch_size=2"]),
    "store": (rlio.ReplayStore.open, ["ReplayStore", "actions", "int64"]),
    "files": (lambda root: rlio.open_dataset(FRAME), ["3 rows", "rewards", "int64"]),
}  # fmt: skip


class Checked(HTMLParser):
    """Collects the tags, and the values of attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag != "img":
            self.open.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("html") / "<u>root"
    with rlio.ParquetWriter(folder) as writer:
        writer.write(batch())
    return folder


def check(text: str) -> None:
    """Refuse markup that is not of rlio, colours, and characters that do not print."""
    found = Checked(text)
    assert not found.open
    assert found.tags <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td", "span", "img"}
    assert found.attributes.keys() <= {"style", "src", "alt", "title", "colspan"}
    assert all(src.startswith("data:image/png;base64,") for src in found.attributes.get("src", ()))
    for style in found.attributes["style"]:
        assert not re.search("background|#[0-9a-f]{3}|rgb", style), style
        assert "color" not in style.replace("color:inherit", "")
    assert text.isprintable()


@pytest.mark.parametrize("name", THINGS)
def test_html_shows_what_a_thing_holds_and_no_markup_of_strangers(name: str, root: Path) -> None:
    make, texts = THINGS[name]
    thing = make(root)
    found = thing._repr_html_()
    check(found)
    for text in texts:
        assert text in found
    if hasattr(thing, "close"):
        thing.close()
        check(thing._repr_html_())


def test_html_of_a_large_batch_is_small() -> None:
    columns = {f"c{n}": np.zeros((1000, 50)) for n in range(300)}
    text = rlio.SampleBatch({**columns, "x": np.array(["y" * 100_000] * 1000, object)})._repr_html_()
    assert len(text) < 50_000
    assert "and 241 more" in text


def test_html_of_a_data_set_reads_no_shard(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rlio.open_dataset(root)

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("a shard was opened")

    monkeypatch.setattr(rlio.Dataset, "open_shard", fails)
    assert "position" in data._repr_html_()


def test_html_of_what_is_half_made_never_raises() -> None:
    from test_described import described_classes

    for each in described_classes():
        if each.__module__.startswith("rlio.") and not getattr(each, "__abstractmethods__", None):
            check(each.__new__(each)._repr_html_())


def test_helpers_escape_cut_and_count() -> None:
    assert shown(shown("<b>")) == "&lt;b&gt;"
    assert shown("é\x00") == "é\\x00"
    assert len(shown("x" * 1000)) == 200
    assert "and 3 more" in table(("n",), [(n,) for n in range(63)])
    assert table(("n",), []) == ""
    assert panel("a", lines(["<"])).count("&lt;") == 1
    assert [counted(n, "policy") for n in (0, 1, 2)] == ["0 policies", "1 policy", "2 policies"]
    assert counted(1000, "day") == "1,000 days"
    assert and_more(["a", "b", "c"], 1) == "a and 2 more"


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.further
@pytest.mark.skipif(BROWSER is None, reason="no Chromium: install Debian's package chromium")
@pytest.mark.parametrize(
    ("paper", "ink"), [("#ffffff", "#111111"), ("#111318", "#e6e6e6")], ids=["light", "dark"]
)
def test_a_browser_shows_each_thing_in_the_colours_of_the_page(
    paper: str, ink: str, root: Path, tmp_path: Path
) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    bodies = "<hr>".join(make(root)._repr_html_() for make, _ in THINGS.values())
    style = f"background:{paper};color:{ink}"
    page.write_text(f"<!doctype html><meta charset=utf-8><body style='{style}'>{bodies}")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,1700"]
    command += [f"--user-data-dir={tmp_path / 'user'}", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3).astype(int)
    colours = [[int(colour[n : n + 2], 16) for n in (1, 3, 5)] for colour in (paper, ink)]
    is_paper, is_ink = (np.abs(pixels - colour).max(1) < 40 for colour in colours)
    assert is_paper.mean() > 0.6
    assert is_ink.mean() > 0.005
