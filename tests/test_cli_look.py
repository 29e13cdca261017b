"""`rlio info`, `head`, `episodes` and `stats` say what the public functions give, on every format."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import some
from typer.testing import CliRunner

import rlio
from rlio.cli.main import app
from rlio.cli.spark import histogram, sparkline
from rlio.cli.tables import waiting
from rlio.dataset.file_dataset import FileDataset
from rlio.support.progress import each, reached, watched

runner = CliRunner()
FORMATS = Path(__file__).parent / "golden/formats"
RLLIB_2019 = "rllib-2019/output-2019-10-28_00-00-00_worker-0_0.json"


def steps(rows: int = 40, seed: int = 0) -> rlio.SampleBatch:
    t = np.arange(rows) % 8
    rng = np.random.default_rng(seed)
    return rlio.SampleBatch(
        obs=rng.random((rows, 3)).astype(np.float32),
        new_obs=rng.random((rows, 3)).astype(np.float32),
        new_obs_valid=t != 7,
        actions=rng.integers(0, 2, rows),
        rewards=rng.random(rows),
        terminateds=t == 7,
        truncateds=np.zeros(rows, bool),
        eps_id=np.arange(rows) // 8,
        t=t,
    )


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("look") / "cartpole"
    rows = steps()
    del rows["new_obs"], rows["new_obs_valid"]
    with rlio.ParquetWriter(folder, roll=rlio.Roll(max_rows=13), writer_id="w00000-00000000") as writer:
        writer.write(rows)
    with rlio.ParquetWriter(folder, writer_id="w00001-00000000") as writer:
        writer.write(rows[:12])
    return str(folder)


def agents(folder: Path) -> str:
    rows = steps(8)
    del rows["new_obs"], rows["new_obs_valid"]
    with rlio.ParquetWriter(folder / "agents") as writer:
        writer.write(rlio.MultiAgentBatch({"left": rows, "right": rows.copy()}, 8))
    return str(folder / "agents")


def table(folder: Path) -> str:
    lines = [f"{n % 4},{n},{n / 2},{n // 4},{int(n % 4 == 3)}" for n in range(12)]
    (folder / "log.csv").write_text("x,a,r,trip,over\n" + "\n".join(lines) + "\n")
    return str(folder / "log.csv")


MAPPED = [
    "--map",
    "obs=x,",
    "--map",
    "actions=a",
    "--map",
    "rewards=r",
    "--episode",
    "trip",
    "--terminated",
    "over",
]


def converted(to: str, name: str) -> Callable[[Path, str], str]:
    def make(folder: Path, own: str) -> str:
        rlio.convert(
            own, folder / name, to=to, options={"next_observations": False} if to == "d4rl" else None
        )
        return str(folder / name)

    return make


#: Name -> what makes the data, and the options that read it.
DATA: dict[str, tuple[Callable[[Path, str], str], list[str]]] = {
    "rlio": (lambda folder, own: own, []),
    "rlio, two agents": (lambda folder, own: agents(folder), []),
    "minari": (lambda folder, own: str(FORMATS / "minari/cart/collected-v0"), []),
    "minari, nested": (lambda folder, own: str(FORMATS / "minari/nested/hdf5-v0"), []),
    "lerobot": (lambda folder, own: str(FORMATS / "lerobot/v3.0"), []),
    "lerobot, 2.1": (lambda folder, own: str(FORMATS / "lerobot/v2.1"), ["--format", "lerobot"]),
    "rllib": (lambda folder, own: str(FORMATS / "rllib/cartpole"), []),
    "rllib-json": (lambda folder, own: str(FORMATS / RLLIB_2019), []),
    "rllib-dataset": (lambda folder, own: str(FORMATS / "rllib-dataset/one-agent.parquet"), []),
    "d3rlpy": (lambda folder, own: str(FORMATS / "d3rlpy/buffer.h5"), []),
    "d4rl": (converted("d4rl", "d4rl.hdf5"), []),
    "robomimic": (converted("robomimic", "robomimic.hdf5"), []),
    "tianshou": (lambda folder, own: str(FORMATS / "tianshou/ring.hdf5"), []),
    "torchrl": (lambda folder, own: str(FORMATS / "torchrl/tensors"), []),
    "rlds": (lambda folder, own: str(FORMATS / "rlds/counts"), []),
    "csv": (lambda folder, own: table(folder), MAPPED),
}


@pytest.fixture(scope="module")
def made(own: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Where the data of a name is, which is made once; no command changes it."""
    return cache(lambda name: DATA[name][0](tmp_path_factory.mktemp("data"), own))


@pytest.fixture
def data(request: pytest.FixtureRequest, made: Callable[[str], str]) -> tuple[str, list[str], rlio.Dataset]:
    uri, options = made(request.param), DATA[request.param][1]
    mapping = None
    if options == MAPPED:
        columns = {"obs": ["x"], "actions": "a", "rewards": "r"}
        mapping = rlio.Mapping(columns, episode="trip", terminated="over")
    return uri, options, rlio.open_dataset(uri, mapping=mapping)


def run(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.few(2)
@pytest.mark.parametrize("data", some(2, DATA), indirect=True)
def test_info_is_what_the_function_gives(data: tuple[str, list[str], rlio.Dataset]) -> None:
    uri, options, opened = data
    found = opened.info()
    assert repr(found) in run("info", uri, *options)
    shown = json.loads(run("info", uri, *options, "--json"))
    shown.pop("warnings", None)
    assert shown == json.loads(json.dumps(found.as_dict()))


@pytest.mark.few(2)
@pytest.mark.parametrize("data", some(2, DATA), indirect=True)
def test_episodes_are_those_of_the_table(data: tuple[str, list[str], rlio.Dataset]) -> None:
    uri, options, opened = data
    shown = json.loads(run("episodes", uri, *options, "--json"))["episodes"]
    assert len(shown) == len(opened.episodes)
    assert [row["length"] for row in shown] == opened.lengths().tolist()
    returns = [math.nan if row["return"] is None else row["return"] for row in shown]
    np.testing.assert_array_equal(returns, opened.episodes["return"])
    best = json.loads(run("episodes", uri, *options, "--sort", "return", "--top", "1", "--json"))["episodes"]
    assert best == [shown[int(opened.episodes.sort("return", descending=True)["episode"][0])]][: len(best)]
    assert "episode" in run("episodes", uri, *options)


@pytest.mark.few(2)
@pytest.mark.parametrize("data", some(2, DATA, start=1), indirect=True)
def test_head_shows_the_first_rows(data: tuple[str, list[str], rlio.Dataset]) -> None:
    uri, options, opened = data
    (row, *more) = json.loads(run("head", uri, *options, "-n", "2", "--json"))["rows"]
    assert len(more) == 1
    assert "rewards" in row or "policy_id" in row
    if not any(schema.multi_agent for schema in opened.schemas.values()):
        first = opened.take([0])
        assert row["rewards"] == pytest.approx(float(first["rewards"][0]))
        assert list(row) == list(first)
    assert "2 rows of" in run("head", uri, *options, "-n", "2")


@pytest.mark.few(2)
@pytest.mark.parametrize("data", some(2, DATA, start=1), indirect=True)
def test_stats_are_those_of_the_function(data: tuple[str, list[str], rlio.Dataset]) -> None:
    uri, options, opened = data
    if any(schema.multi_agent for schema in opened.schemas.values()):
        result = runner.invoke(app, ["stats", uri])
        assert (result.exit_code, "policy" in result.output) == (2, True)
        options, policy = [*options, "--policy", "left"], "left"
    else:
        policy = None
    shown = json.loads(run("stats", uri, *options, "-c", "rewards", "--json"))
    shown.pop("warnings", None)
    assert shown == json.loads(json.dumps(opened.stats(["rewards"], policy=policy).to_json()))
    assert "rewards" in run("stats", uri, *options)


# ---- options and what is printed ----


def test_episodes_are_sorted_filtered_and_the_best_ones(own: str) -> None:
    expected = rlio.open_dataset(own).episodes
    where = "finished and return > 3"
    found = json.loads(run("episodes", own, "--where", where, "--sort", "return", "--json"))
    passing = expected.filter(where).sort("return", descending=True)
    assert [row["episode"] for row in found["episodes"]] == passing["episode"].tolist()
    least = json.loads(run("episodes", own, "--sort", "length", "--ascending", "--top", "2", "--json"))
    assert [row["episode"] for row in least["episodes"]] == expected.sort("length")["episode"][:2].tolist()
    text = run("episodes", own, "--top", "3")
    assert "7 episodes, 1 unfinished, 2 writers" in text
    assert "returns over episodes" in text
    assert "histogram of lengths" in text


def test_one_writer_is_one_and_two_are_two(own: str, tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "one") as writer:
        writer.write(
            steps(8)[["obs", "actions", "rewards", "t"]] if False else rlio.SampleBatch(t=[0], rewards=[1.0])
        )
    assert "1 writer" in run("info", str(tmp_path / "one"))
    assert "1 row in 1 episode" in run("info", str(tmp_path / "one"))
    assert re.search(
        r"1 episode, 1 unfinished, 1 writer$", run("episodes", str(tmp_path / "one")), re.MULTILINE
    )
    assert "2 writers" in run("info", own)


def test_nan_is_null_in_the_json_and_the_json_is_strict(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "nan") as writer:
        writer.write(
            rlio.SampleBatch(
                obs=np.array([[np.nan, 1.0], [np.inf, 2.0]]),
                rewards=np.array([np.nan, 1.0]),
                terminateds=[False, True],
                eps_id=[0, 0],
                t=[0, 1],
            )
        )

    def strict(text: str) -> Any:
        def refuse(name: str) -> None:
            raise AssertionError(name)

        return json.loads(text, parse_constant=refuse)

    uri = str(tmp_path / "nan")
    assert strict(run("episodes", uri, "--json"))["episodes"][0]["return"] is None
    assert strict(run("head", uri, "--json"))["rows"][0]["obs"] == [None, 1.0]
    assert strict(run("stats", uri, "--json"))["rows"] == 2
    assert strict(run("info", uri, "--ranges", "--json"))["returns"] is None
    for command in ("info", "head", "episodes", "stats"):
        run(command, uri)


@pytest.mark.parametrize("agents", [False, True])
def test_head_shows_times_of_any_unit_as_texts_in_json(agents: bool, tmp_path: Path) -> None:
    uri = str(tmp_path / "data")
    nat = np.iinfo(np.int64).min
    rows = rlio.SampleBatch(
        ns=np.array([1, nat]).view("M8[ns]"),
        days=np.array([2**31 - 1, nat]).view("M8[D]"),
        wait=np.array([90, nat]).view("m8[s]"),
        both=np.array([[2**62, nat]] * 2).view("M8[us]"),
    )
    with rlio.ParquetWriter(uri) as writer:
        writer.write(rlio.MultiAgentBatch({"a": rows}, 2) if agents else rows)
    known = {"ns": "1970-01-01T00:00:00.000000001", "days": "5881580-07-11", "wait": "90 seconds"}
    both = [str(np.datetime64(2**62, "us")), None]
    found = json.loads(run("head", uri, "--json"))["rows"]
    policy = {"policy_id": "a"} if agents else {}
    assert found[0] == {**policy, **known, "both": both}
    assert found[1] == {**policy, **dict.fromkeys(known), "both": both}
    assert "5881580-07-11" in run("head", uri)


def test_wrong_options_and_places_exit_with_2_and_say_what_to_do(own: str, tmp_path: Path) -> None:
    for arguments, words in (
        (["episodes", own, "--sort", "retrun"], "did you mean 'return'"),
        (["episodes", own, "--where", "lenght > 3"], "length"),
        (["episodes", own, "--ascending"], "--sort"),
        (["head", own, "-c", "action"], "did you mean 'actions'"),
        (["head", own, "--frames", "2"], "-o FOLDER"),
        (["head", own, "--frames", "2", "-o", str(tmp_path / "f"), "--number", "99"], "--number 99"),
        (["stats", own, "-c", "reward"], "did you mean 'rewards'"),
        (["info", own[:-1]], "did you mean"),
        (["info", own, "--map", "obs=x"], "a data set of rlio"),
        (["info", own, "--episode", "x"], "--map"),
    ):
        result = runner.invoke(app, [*arguments, "--json"])
        assert result.exit_code == 2, (arguments, result.output)
        assert words in json.loads(result.stdout)["error"]["message"], arguments


def test_a_missing_column_is_a_wrong_option_only_if_an_option_names_it(tmp_path: Path) -> None:
    uri = str(tmp_path / "rewards")
    for more in ({}, {"speed": [1.0]}):
        with rlio.ParquetWriter(uri) as writer:
            writer.write(rlio.SampleBatch(t=[0], rewards=[1.0], **more))
    named = ([], ["-c", "speed"], ["-c", "spede"], ["-c", "t"])
    codes = [runner.invoke(app, ["head", uri, *more]).exit_code for more in named]
    assert codes == [1, 1, 2, 0]  # Only one writer has a speed.


def test_columns_of_some_writers_are_shown_as_the_option_says(tmp_path: Path) -> None:
    rows = steps(8)
    for name in ("w00000-00000000", "w00001-00000000"):
        with rlio.ParquetWriter(tmp_path / "run", writer_id=name) as writer:
            writer.write(rows)
        rows["speed"] = np.full(8, 2.0)
    run = str(tmp_path / "run")
    for command in ("head", "stats"):
        refused = runner.invoke(app, [command, run])
        assert (refused.exit_code, "missing" in refused.stderr) == (1, True)

    def printed(*arguments: str) -> Any:
        return json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)

    filled = printed("head", run, "-n", "16", "--missing", "fill")["rows"]
    assert [row["speed"] for row in filled] == [0.0] * 8 + [2.0] * 8
    assert "speed" not in printed("head", run, "-n", "16", "--missing", "drop")["rows"][0]
    data = rlio.open_dataset(run)
    for missing in ("fill", "drop"):
        found = printed("stats", run, "--missing", missing)
        assert found == data.stats(missing=missing).to_json()
        assert ("speed" in json.dumps(found)) == (missing == "fill")


def test_opening_shows_its_seconds_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("rlio.cli.tables._QUIET_SECONDS", 0.02)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with waiting("open"):
        end = time.monotonic() + 60
        while "open: 00:" not in shown.getvalue():
            assert time.monotonic() < end
            time.sleep(0.01)
        for _ in each(["a", "b"], size={"a": 3000, "b": 1000}.__getitem__):
            while "2.00k/4.00k [" not in shown.getvalue():
                assert time.monotonic() < end
                reached(2, of=3)
                time.sleep(0.01)
    monkeypatch.setattr(sys, "stderr", hidden := io.StringIO())
    with waiting("open"):
        time.sleep(0.1)
    assert hidden.getvalue() == ""


def test_convert_shows_its_opening_before_its_rows(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    @contextlib.contextmanager
    def shown(name: str, *_: Any, **options: Any) -> Iterator[Callable[[int], None]]:
        said.append(f"{name} begins")
        yield lambda done: None
        said.append(f"{name} ends")

    monkeypatch.setattr("rlio.cli.convert.waiting", shown)
    monkeypatch.setattr("rlio.cli.convert.progress_bar", shown)
    assert runner.invoke(app, ["convert", own, str(tmp_path / "to")]).exit_code == 0
    assert said == ["open begins", "open ends", "convert begins", "convert ends"]


@pytest.mark.few(4)
@pytest.mark.parametrize("data", some(2, DATA), indirect=True)
def test_opening_other_files_shows_how_far_it_is(data: tuple[str, list[str], rlio.Dataset]) -> None:
    _, _, opened = data
    if not isinstance(opened, FileDataset):
        pytest.skip("opening data of rlio lists names, whose number is not known")
    if opened.uri.endswith("torchrl/tensors"):
        pytest.skip("TorchRL's flags are memory maps, which are read at once")
    with watched() as work:
        opened.again().close()
    assert 0 < work.total == work.done


def test_damage_exits_with_1_and_warnings_reach_the_json(own: str, tmp_path: Path) -> None:
    uri = str(FORMATS / "rllib/cartpole")
    for command in ("info", "head", "episodes", "stats"):
        result = runner.invoke(app, [command, uri, "--json"])
        warned = json.loads(result.stdout)["warnings"]
        assert any("copies" in text for text in warned), command
        assert len(warned) == len(set(warned)) == result.stderr.count("rlio: warning: "), command
    with rlio.ParquetWriter(tmp_path / "damaged") as writer:
        writer.write(steps())
    (shard,) = (tmp_path / "damaged").glob("data/*/*.parquet")
    data = bytearray(shard.read_bytes())
    data[200:400] = bytes(200)
    shard.write_bytes(data)
    assert runner.invoke(app, ["stats", str(tmp_path / "damaged")]).exit_code == 1


def test_head_writes_frames(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    pictures = np.arange(10 * 16 * 16 * 3, dtype=np.uint8).reshape(10, 16, 16, 3)
    with rlio.ParquetWriter(tmp_path / "frames") as writer:
        writer.write(
            rlio.SampleBatch(
                obs=pictures,
                actions=np.zeros(10),
                rewards=np.ones(10),
                terminateds=np.arange(10) == 9,
                eps_id=np.zeros(10, np.int64),
                t=np.arange(10),
            )
        )
    shown = json.loads(
        run("head", str(tmp_path / "frames"), "--frames", "3", "-o", str(tmp_path / "png"), "--json")
    )
    assert sorted(map(str, (tmp_path / "png").glob("*.png"))) == sorted(shown["frames"])
    assert len(shown["frames"]) == 3
    assert "uint8 (16, 16, 3)" in run("head", str(tmp_path / "frames"))
    assert "obs (16, 16, 3)" in run("stats", str(tmp_path / "frames"))


@pytest.mark.further
def test_an_output_without_these_letters_gets_others(own: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from rlio.cli.main import main; main()", "episodes", own],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "PATH": "", "HOME": own},
    )
    assert ran.returncode == 0, ran.stderr
    assert b"returns over episodes" in ran.stdout


def test_text_of_strangers_cannot_command_the_terminal(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path / "text") as writer:
        writer.write(rlio.SampleBatch(t=[0], rewards=[1.0], infos=[{"say": "\x1b[2J[red]"}]))
    shown = run("head", str(tmp_path / "text"))
    assert "\x1b" not in shown
    assert "[red]" in shown


def test_drawings_show_means_and_counts() -> None:
    assert sparkline([1, 2, math.nan, 3, math.inf], width=9) == "▁▅█"
    assert histogram([1, 1, 1, 9], width=4) == "█▁▁▃"
    assert sparkline([0, 1], width=2, encoding="ascii") == "_#"
    assert (sparkline([math.nan], width=4), histogram([], width=4)) == ("", "")
