"""The measurements behind docs/scale.md run, at tiny sizes, and its tables have their places in the page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import followers, scaling
from benchmarks.report import replace_blocks
from benchmarks.scaling import TABLES, main

pytestmark = [pytest.mark.xdist_group("scaling"), pytest.mark.further]  # Measured once.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run gives: measured in processes of their own, as this one may be large."""
    folder = tmp_path_factory.mktemp("scaling")
    scaling.make_names(folder / "names", 1200, 10)
    scaling.make_readable(folder / "shards", 30, 2)
    scaling.small_shards.make(folder / "small", 30, 2)
    found = {
        "listed": scaling._child("_listed", root=str(folder / "names"), rounds=1),
        "in_memory": scaling._child("_in_memory", shards=1100, writers=5, rounds=1),
        "read": scaling._child("_read", root=str(folder / "shards")),
        "small": scaling._child("_small", root=str(folder / "small"), rounds=1),
    }
    sizes = {"listed": (1200, 10), "in_memory": (1100, 5), "read": (30, 2), "small": (30, 2)}
    return {
        "machine": scaling.machine.facts(),
        "rounds": 1,
        **{
            part: [
                {
                    "shards": sizes[part][0],
                    "writers": sizes[part][1],
                    "values": values,
                }
            ]
            for part, values in found.items()
        },
        "stored": [{"shards": 1, "writers": 1, "values": {"nothing": "moto is not installed"}}],
    }


def test_it_measures_what_it_says(run: dict[str, Any]) -> None:
    listed = run["listed"][0]["values"]
    # 1,200 shards, and a seal for each writer but the first.
    assert listed["names"]["facts"]["bytes"] > 1200 * len(
        "000000000000-2048-123456-00000000-00000000.parquet"
    )
    assert {"open", "poll", "cover", "share"} <= listed.keys()
    assert run["read"][0]["values"]["resume"]["facts"]["bytes"] < 1024


@pytest.mark.parametrize("name", TABLES)
def test_each_table_is_made_and_has_its_place_in_the_page(
    name: str, run: dict[str, Any], checkout: Path, tmp_path: Path
) -> None:
    made = TABLES[name](run)
    page = tmp_path / "page.md"
    page.write_text((checkout / "docs" / "scale.md").read_text(encoding="utf-8"), encoding="utf-8")
    replace_blocks(page, {name: made})
    assert made in page.read_text(encoding="utf-8")
    rows = [line for line in made.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) <= 1


def test_the_curves_of_small_shards_are_a_picture(run: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "curves.svg"
    scaling.small_shards.draw([*run["small"], {**run["small"][0], "shards": 60}], file)
    assert file.read_text(encoding="utf-8").count("<svg") == 1


def test_what_was_measured_can_be_shown_again(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run), encoding="utf-8")
    main(["--from", str(file)])
    shown = capsys.readouterr().out
    assert re.search(r"\| 1,200 \| 10 \|", shown)


def test_followers_of_two_checkouts_take_turns(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    followers.main(["--rounds", "1", "--shards", "4", "--beside", str(checkout)])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    # This one beside itself is one checkout.
    assert [(row[0].strip(), row[1].strip()) for row in rows[2:]] == [("2,500", "this"), ("100", "this")]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 and int(row[5]) >= 4 for row in rows[2:])
