"""The benchmark runs, part by part, at tiny sizes. No time is asserted, only that what it says is so."""

import doctest
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from further import further

pytest.importorskip("mujoco", reason="HalfCheetah-v5 is recorded")
pytest.importorskip("ale_py", reason="ALE/Pong-v5 is recorded")

from benchmarks import bounds, machine, peers, report, results, timing
from benchmarks.__main__ import main, measure
from benchmarks.data import episode_slices, half_cheetah, pong, write_dataset
from benchmarks.parts import PARTS, WHOLE
from benchmarks.results import Line, Run, Section
from benchmarks.scales import TINY
from benchmarks.store import stored
from benchmarks.timing import Case, Taken, interleave

# One process makes the one run that these tests look at.
pytestmark = pytest.mark.xdist_group("benchmarks")

#: Module -> the contender that it is needed for, and where that one takes part.
PEERS = {
    "cpprb": ("cpprb", ("batches", "images", "priorities", "growth")),
    "torchrl": ("TorchRL, RAM", ("batches", "images", "priorities", "growth")),
    "d3rlpy": ("d3rlpy", ("batches",)),
    "minari": ("Minari", ("files", "formats", "recording")),
    "ray": ("RLlib", ("files", "formats", "rollouts")),
}


#: What names the folders in which users keep things, where a run must keep nothing.
FOLDERS = ("RLIO_CACHE", "MINARI_DATASETS_PATH")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


class Parts:
    """A run of all parts, each measured when it is first asked for: no test waits for all of them."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.runs: dict[str, Run] = {}

    def measured(self, part: str) -> Section:
        if part not in self.runs:
            with pytest.MonkeyPatch.context() as patch:
                for name in FOLDERS:
                    patch.setenv(name, str(self.data / name))
                self.runs[part] = measure([part], scale=TINY, data=self.data)
                assert [os.environ[name] for name in FOLDERS] == [str(self.data / name) for name in FOLDERS]
        return self.runs[part].sections[0]


# A run of all parts is for `make test-all`, with the tests that look at it.
@pytest.fixture(scope="module", params=further("every part"))
def parts(data: Path) -> Parts:
    return Parts(data)


@pytest.fixture(scope="module")
def run(parts: Parts) -> Run:
    sections = [parts.measured(name) for name in WHOLE]
    first = parts.runs[WHOLE[0]]
    return Run(first.machine, {**first.options, "parts": list(WHOLE), "only": False}, sections)


def section(run: Run, part: str) -> Section:
    return next(each for each in run.sections if each.part == part)


def test_one_process_makes_the_run(request: pytest.FixtureRequest) -> None:
    """Groups are pytest-xdist's affair, and pytest 9.2 has broken them without a word."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@benchmarks")


# ---- a run ----


@pytest.mark.further
def test_a_part_runs_alone(tmp_path: Path) -> None:
    (found,) = measure(["recording"], scale=TINY, data=tmp_path).sections
    assert found.part == "recording"
    assert all(math.isfinite(value) and value > 0 for figure in found.figures for value in figure.values)
    assert found.lines


@pytest.mark.parametrize("part", PARTS)
def test_a_part_gives_figures_and_lines(parts: Parts, part: str) -> None:
    found = parts.measured(part)
    assert found.figures or found.tables
    for figure in found.figures:
        assert len(figure.values) >= min(TINY.rounds, 3)
        assert all(math.isfinite(value) and value > 0 for value in figure.values), figure
    assert found.lines or part in ("growth", "far")
    for line in found.lines:
        assert (line.value is None) == (line.verdict == "not measured")
        assert (line.value is None) == bool(line.why), f"{line}: what is not measured has a reason"


def test_every_budget_of_replay_is_in_the_table(run: Run) -> None:
    goals = [(line.work, line.sense, line.goal) for line in run.lines if line.goal is not None]
    for work, sense, goal in [
        ("write vectors", ">=", 8),
        ("write vectors", "<=", 90),
        ("write images", ">=", 2),
        ("write images", "<=", 0.25),
        ("read vectors", ">=", 10),
        ("read images", ">=", 3),
        ("random batches of 256, contiguous", ">=", 3),
        ("random batches of 256, contiguous", ">=", 8),
        ("random batches of 4,096, contiguous", ">=", 3),
        ("random batches of 4,096, contiguous", ">=", 8),
        ("random batches of 4,096, as views", ">=", 6),
        ("random image batches of 256, contiguous", ">=", 1.5),
        ("memory that holds the images", "<=", 1 / 6),
        ("prioritised sample and update, 256", ">=", 2),
        ("rollouts of 16 CartPole", ">=", 1.2),
        ("rollouts of 16 CartPole", ">=", 25),
        ("recorder's overhead, rlio", "<=", 10),
        ("read RLlib's JSON, lists", ">=", 2),
        ("read Minari's HDF5", ">=", 1),
        ("convert D4RL's HDF5, 5,000 rows", "<=", 15),
        ("statistics of obs and actions, 5,000 rows", "<=", 1),
        ("to_d3rlpy", ">=", 0.5),
        ("to_tensordict", ">=", 0.5),
        ("mixing three sources, hot stores", ">=", 0.9),
        ("resume from files at 10,000 rows", "<=", 1),
        ("resume from files at 10,000 rows", "<=", 1023),
        ("open 50 shards", "<=", 2),
    ]:
        assert (work, sense, goal) in goals


def test_rlio_takes_part_wherever_it_can(run: Run) -> None:
    for part in ("files", "batches", "images", "priorities", "rollouts", "growth"):
        assert "rlio" in {figure.name for figure in section(run, part).figures}, part


@pytest.mark.parametrize("module", PEERS)
def test_a_peer_that_is_not_installed_is_reported_and_one_that_is_takes_part(run: Run, module: str) -> None:
    name, parts = PEERS[module]
    for part in parts:
        found = section(run, part)
        took_part = any(figure.name.startswith(name) for figure in found.figures)
        assert took_part != (name in found.absent), f"{name} in {part}"
        if importlib.util.find_spec(module) is None:
            assert "not installed" in found.absent[name]
            if part != "growth":
                assert any(name in line.work or name in line.beside for line in found.lines)


def test_a_run_leaves_nothing_but_its_recordings(run: Run, data: Path) -> None:
    assert {entry.name for entry in data.iterdir()} == {"halfcheetah-5000", "pong-300"}


def test_a_run_says_on_which_machine_it_was(run: Run) -> None:
    machine = run.machine
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert machine["copy_gb_per_s"] > 0
    assert machine["versions"]["numpy"] == np.__version__


# ---- what it writes ----


def test_a_run_comes_back_from_json(run: Run) -> None:
    written = json.loads(json.dumps(run.to_json()))
    assert Run.from_json(written) == run
    verdicts = [line["verdict"] for each in written["sections"] for line in each["lines"]]
    assert verdicts == [line.verdict for line in run.lines]


def test_tables_are_well_formed(run: Run) -> None:
    blocks = report.markdown(run)
    assert set(blocks) == {"machine", "goals", *WHOLE}
    for name in ("goals", *WHOLE):
        tables = [part.splitlines() for part in blocks[name].split("\n\n") if part.startswith("|")]
        assert tables, name
        for rows in tables:
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
            assert len(rows) > 2, name
            assert len(cells) == 1, f"{name}: rows of {cells} cells"
    for each in run.sections:
        for name in each.absent:
            assert f"{name} did not run" in blocks[each.part]


def test_the_table_on_the_terminal_has_every_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report.show(run)
    printed = capsys.readouterr().out
    for verdict in ("met", "missed", "not measured"):
        count = sum(line.verdict == verdict for line in run.lines)
        assert printed.count(f" {verdict} ") == count


def test_a_page_gets_tables_between_its_comments_only(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    places = "".join(
        f"<!-- {name} -->\nreplaced\n<!-- /{name} -->\ntext\n" for name in ("machine", "goals", *WHOLE)
    )
    page.write_text(f"before\n{places}<!-- other -->\nkept\n<!-- /other -->\n")
    report.update_page(page, run)
    once = page.read_text()
    assert "replaced" not in once
    assert once.startswith("before\n<!-- machine -->\nMeasured ")
    assert once.count("\ntext\n") == len(WHOLE) + 2
    assert once.endswith("<!-- other -->\nkept\n<!-- /other -->\n")
    report.update_page(page, run)
    assert page.read_text() == once


@pytest.mark.further
def test_a_report_of_some_parts_leaves_what_the_page_says_of_others(tmp_path: Path) -> None:
    section = Section("s3", "Far away")
    section.add("an epoch", "rlio", [1.0, 2.0, 3.0])
    section.compare("an epoch", case="an epoch", ours="rlio", beside="pyarrow", at_least=1)
    run = Run(machine.facts(), {"parts": ["s3"], "only": True, "rounds": 3}, [section])
    page = tmp_path / "page.md"
    page.write_text("<!-- goals -->\nkept\n<!-- /goals -->\n<!-- s3 -->\nreplaced\n<!-- /s3 -->\n")
    report.update_page(page, run)
    text = page.read_text()
    assert text.startswith("<!-- goals -->\nkept\n<!-- /goals -->\n")
    assert "replaced" not in text
    for own in ("**Far away**", "| an epoch | pyarrow |  | >= 1.00x | not measured |", "\nMeasured "):
        assert own in text


def test_a_page_without_a_place_for_a_table_is_refused_as_it_is(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- machine -->\n<!-- /machine -->\n")
    with pytest.raises(ValueError, match="no place for goals"):
        report.update_page(page, run)
    assert page.read_text() == "<!-- machine -->\n<!-- /machine -->\n"


def test_the_command_shows_plots_and_reports_what_was_measured_before(
    run: Run, tmp_path: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="extra plot")
    before, after = tmp_path / "run.json", tmp_path / "again.json"
    before.write_text(json.dumps(run.to_json()))
    page = tmp_path / "page.md"
    page.write_text((checkout / "docs" / "performance.md").read_text())
    arguments = ["--from", str(before), "--json", str(after), "--report", str(page)]
    main([*arguments, "--plot", str(tmp_path / "plot.png")])
    assert json.loads(after.read_text()) == run.to_json()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "rlio beside the others" in capsys.readouterr().out
    assert report.markdown(run)["goals"] in page.read_text()


def test_the_command_names_the_parts_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "nothing"])
    assert ended.value.code == 2
    assert "batches" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["performance", "performance-s3", "performance-frames"])
def test_the_page_shows_what_the_committed_figures_say(name: str, checkout: Path, tmp_path: Path) -> None:
    figures = checkout / "docs" / f"{name}.json"
    text = (checkout / "docs" / "performance.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(text)
    report.update_page(page, Run.from_json(json.loads(figures.read_text())))
    assert page.read_text() == text, (
        f"python -m benchmarks --from docs/{name}.json --report docs/performance.md"
    )


# ---- what it compares ----


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    found = Section("x", "x")
    found.add_taken(
        "case", {"a": Taken([1.0, 2.0, 4.0]), "b": Taken([3.0, 2.0, 8.0]), "c": Taken([9.0, 1.0, 9.0])}
    )
    found.compare("a beside b", case="case", ours="a", beside="b", at_least=2)
    found.compare_best("a beside both", case="case", ours="a", besides=["b", "c"], at_least=2.1)
    # 3, 1, 2 times; then 3, 0.5, 2 times: in each round the better of the two.
    assert [(line.value, line.verdict) for line in found.lines] == [(2.0, "met"), (2.0, "missed")]


@pytest.mark.parametrize(
    ("value", "sense", "verdict"),
    [
        (2.0, ">=", "met"),
        (1.9, ">=", "missed"),
        (2.0, "<=", "met"),
        (2.1, "<=", "missed"),
        (None, ">=", "not measured"),
    ],
)
def test_a_verdict_follows_from_value_and_goal(value: float | None, sense: str, verdict: str) -> None:
    assert Line("work", "beside", value, goal=2.0, sense=sense).verdict == verdict


def test_a_line_without_one_of_its_contenders_says_which_and_why() -> None:
    found = Section("x", "x", absent={"b": "not installed"})
    found.add("case", "a", [1.0])
    found.compare("a beside b", case="case", ours="a", beside="b", at_least=2)
    (line,) = found.lines
    assert (line.value, line.verdict, line.why) == (None, "not measured", "b: not installed")


@pytest.mark.further
def test_contenders_run_round_by_round_in_turns() -> None:
    order: list[str] = []
    cases = [
        Case(
            name,
            lambda name=name: order.append(name),
            1,
            before=lambda: order.append("-"),
            after=lambda: order.append("+"),
            once=True,
        )
        for name in "ab"
    ]
    taken = interleave(cases, rounds=2, seconds=0)
    assert "".join(order) == "-b+-a+-a+-b+-b+-a+"
    assert {name: len(each.seconds) for name, each in taken.items()} == {"a": 2, "b": 2}


def test_two_contenders_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="one name"):
        interleave([Case("a", list, 1), Case("a", dict, 1)], rounds=1, seconds=0)


# ---- the data, and what contenders give ----


def test_recorded_rows_are_the_columns_that_learners_store(run: Run, data: Path) -> None:
    columns = half_cheetah(data, 5000)
    assert {name: (values.dtype.str, values.shape[1:]) for name, values in columns.items()} == {
        "obs": ("<f4", (17,)),
        "new_obs": ("<f4", (17,)),
        "actions": ("<f4", (6,)),
        "rewards": ("<f4", ()),
        "terminateds": ("|b1", ()),
        "truncateds": ("|b1", ()),
        "eps_id": ("<i8", ()),
        "t": ("<i8", ()),
    }
    assert sum(values[:1].nbytes for values in columns.values()) == 182
    assert [part.stop - part.start for part in episode_slices(columns["eps_id"])] == [1000] * 5


def test_stacks_follow_each_other_within_an_episode(run: Run, data: Path) -> None:
    recording = pong(data, 300)
    rows = recording.rows(0, 60)
    assert (rows["obs"].dtype, rows["obs"].shape) == (np.uint8, (60, 4, 84, 84))
    same = rows["eps_id"][1:] == rows["eps_id"][:-1]
    assert same.any()
    assert np.array_equal(rows["obs"][1:][same], rows["new_obs"][:-1][same])
    assert np.array_equal(rows["obs"][:, 1:], rows["new_obs"][:, :-1])
    last = recording.rows(0, 60, last_axis=True)
    assert np.array_equal(last["obs"], np.moveaxis(rows["obs"], 1, -1))


def test_what_is_called_contiguous_is(run: Run, data: Path, tmp_path: Path) -> None:
    recordings = {"vectors": [half_cheetah(data, 5000)], "images": [pong(data, 300).rows(0, 60)]}
    for name, batches in recordings.items():
        store = stored(write_dataset(tmp_path / name, batches), cache="memory")
        batch = store.epochs(16).sample()
        assert set(batch) == set(batches[0])
        for column in batch:
            assert batch[column].flags.c_contiguous, f"{column} of {name}"
        store.close()


def test_bounds_move_whole_rows() -> None:
    columns = {"obs": np.arange(3000.0).reshape(1000, 3), "t": np.arange(1000)}
    packed = bounds.packed_rows(columns)
    for reuse in (False, True):
        batch = bounds.Taken(columns, 64, reuse=reuse).sample()
        assert np.array_equal(batch["obs"], columns["obs"][batch["t"]])
    drawn = bounds.Packed(packed, 64).sample().view(packed.dtype)
    assert np.array_equal(drawn["obs"], columns["obs"][drawn["t"]])
    copied = bounds.Copied(packed, 64).sample().view(packed.dtype)
    assert np.array_equal(copied["t"], np.arange(64) + copied["t"][0])


@pytest.mark.parametrize("name", ["cpprb", "TorchRL"])
def test_a_peer_holds_the_rows_it_was_given(run: Run, data: Path, name: str) -> None:
    columns = half_cheetah(data, 5000)
    make = {"cpprb": peers.cpprb_uniform, "TorchRL": peers.torchrl_uniform}[name]
    try:
        sampler = make([columns], rows=5000)
    except peers.Absent as reason:
        pytest.skip(str(reason))
    batch = {key: np.asarray(value) for key, value in dict(sampler.sample(64).items()).items()}
    at = batch["t"].reshape(-1) + 1000 * (batch["eps_id"].reshape(-1) == columns["eps_id"][-1])
    for key, values in columns.items():
        assert np.array_equal(batch[key].reshape(64, -1), values[at].reshape(64, -1)), key


@pytest.mark.few(1)
@pytest.mark.parametrize("module", [results, timing])
def test_examples_in_docstrings_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert not found.failed


@pytest.mark.further
def test_importing_the_benchmark_imports_no_peer() -> None:
    code = f"import sys, benchmarks.__main__; print(sorted({set(PEERS)} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
