"""What commands answer to places that are no data sets: exit code, error and JSON are the same in all."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import fsspec
import numpy as np
import pytest
from foreign_files import GOLDEN_MINARI, lerobot_2
from further import further
from gymnasium import spaces
from typer.testing import CliRunner

import rlio
from rlio.cli.main import app
from rlio.errors import DataNotFound, OptionError

runner = CliRunner()

# Each command with the options that it needs.
COMMANDS = {
    "compact": [],
    "evaluate": ["--policy", "test_cli_errors:even", "--gamma", "0.9"],
    "gc": [],
    "recover": [],
    "trim": ["--keep-rows", "5"],
    "verify": [],
}


def even(obs: np.ndarray[Any, Any], actions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Log-probabilities of a policy that takes each of two actions equally often."""
    return np.full(len(actions), np.log(0.5))


def run(command: str, uri: str, *more: str) -> Any:
    return runner.invoke(app, [command, uri, *COMMANDS[command], *more])


def rllib(root: Path) -> None:
    root.mkdir()
    line = {"type": "SampleBatch", "obs": [[0.0], [1.0]], "actions": [0, 1], "rewards": [1.0, 1.0]}
    (root / "output-2020-01-01_00-00-00_worker-0_0.json").write_text(json.dumps(line) + "\n")


def plain(root: Path) -> None:
    root.mkdir()
    (root / "notes.txt").write_text("nothing\n")


# What lies there, and what the error names it.
PLACES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file": (lambda path: path.write_text("{}\n"), "file"),
    "nothing": (lambda path: None, "empty or does not exist"),
    "an empty folder": (lambda path: path.mkdir(), "empty or does not exist"),
    "Minari": (lambda path: shutil.copytree(GOLDEN_MINARI, path), "Minari"),
    "LeRobot": (lerobot_2, "LeRobot"),
    "RLlib": (rllib, "RLlib"),
    "other files": (plain, "notes.txt"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("place", [*list(PLACES)[::3], *further(*(p for i, p in enumerate(PLACES) if i % 3))])
def test_a_place_that_is_no_data_set_is_the_same_error_in_every_command(place: str, tmp_path: Path) -> None:
    make, named = PLACES[place]
    root = tmp_path / "place"
    make(root)
    before = sorted(tmp_path.rglob("*"))
    for command in COMMANDS:
        if command == "evaluate" and place in ("Minari", "LeRobot", "RLlib"):
            continue  # It reads their files.
        shown = run(command, str(root))
        assert (shown.exit_code, shown.stdout) == (2, ""), (command, shown.output)
        assert isinstance(shown.exception, SystemExit), command
        (line,) = shown.stderr.splitlines()
        assert line.startswith("rlio: DataNotFound: "), line
        assert named in line
        assert str(root) in line
        told = run(command, str(root), "--json")
        assert told.exit_code == 2
        error = json.loads(told.stdout)["error"]
        assert (error["type"], error["uri"]) == ("DataNotFound", str(root)), command
        assert error["message"] in told.stderr
    assert sorted(tmp_path.rglob("*")) == before  # nothing was made there


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frob", "x"], "No such command 'frob'"),
        (["--bogus", "info"], "No such option"),
        (["episodes", "x", "--top", "many"], "--top"),
        (["version", "extra"], "unexpected extra argument"),
        *(
            ([command, "x", "--bogus"], "--bogus")
            for command in (*COMMANDS, "convert", "info", "head", "stats")
        ),
        *(([command], "Missing argument") for command in (*COMMANDS, "convert", "info", "status")),
    ],
)
def test_a_usage_error_is_json_too(arguments: list[str], message: str) -> None:
    plain = runner.invoke(app, arguments)
    assert (plain.exit_code, plain.stdout) == (2, "")
    assert message in plain.stderr
    told = runner.invoke(app, [*arguments, "--json"])
    assert (told.exit_code, told.stderr) == (2, plain.stderr)
    error = json.loads(told.stdout)["error"]
    assert error.keys() == {"type", "message", "uri", "record", "column"}
    assert message in error["message"]


def test_a_file_on_a_store_is_no_data_set_either() -> None:
    fsspec.filesystem("memory").pipe("/cli-errors/x.json", b"{}")
    for command in COMMANDS:
        shown = run(command, "memory://cli-errors/x.json")
        assert shown.exit_code == 2, (command, shown.output)
        assert shown.stderr.startswith("rlio: DataNotFound: "), (command, shown.stderr)


def recorded(root: Path) -> None:
    with rlio.ParquetWriter(root) as writer:
        writer.write(
            rlio.SampleBatch(
                obs=np.zeros((4, 1), np.float32),
                actions=np.zeros(4, np.int64),
                rewards=np.ones(4, np.float32),
                terminateds=np.arange(4) == 3,
                truncateds=np.zeros(4, bool),
                eps_id=np.ones(4, np.int64),
                t=np.arange(4),
                action_prob=np.full(4, 0.5, np.float32),
            )
        )


def damage_header(root: Path) -> None:
    (root / "_rlio.json").write_bytes(b'{"format": "none"}\n')


def raise_format(root: Path) -> None:
    (root / "_rlio.json").write_bytes(b'{"format": 99}\n')


def damage_shard(root: Path) -> None:
    (shard,) = root.glob("data/*/*.parquet")
    shard.chmod(stat.S_IRUSR | stat.S_IWUSR)
    data = bytearray(shard.read_bytes())
    data[100] ^= 255
    shard.write_bytes(data)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("harm", "code", "concerned"),
    [
        (damage_header, 1, ["compact", "evaluate", "gc", "trim", "verify"]),
        (raise_format, 2, ["compact", "evaluate", "gc", "trim", "verify"]),
        *further((damage_shard, 1, ["evaluate", "verify"])),
    ],
    ids=["a damaged header", "another format", "a damaged shard"],
)
def test_damage_exits_with_1_and_what_cannot_be_done_with_2_in_every_command(
    harm: Callable[[Path], None], code: int, concerned: list[str], tmp_path: Path
) -> None:
    recorded(tmp_path / "data")
    for command in COMMANDS:
        assert run(command, str(tmp_path / "data")).exit_code == 0, command
    harm(tmp_path / "data")
    for command in concerned:
        shown = run(command, str(tmp_path / "data"))
        assert shown.exit_code == code, (command, shown.output)
        assert shown.exception is None or isinstance(shown.exception, SystemExit)
        assert run(command, str(tmp_path / "data"), "--json").exit_code == code
        json.loads(run(command, str(tmp_path / "data"), "--json").stdout)


def test_a_wrong_option_exits_with_2_in_every_command(tmp_path: Path) -> None:
    recorded(tmp_path / "data")
    for command in COMMANDS:
        shown = run(command, str(tmp_path / "data"), "--storage-options", "[]")
        assert shown.exit_code == 2, (command, shown.output)
        assert "Traceback" not in shown.output
        told = run(command, str(tmp_path / "data"), "--storage-options", "[]", "--json")
        assert json.loads(told.stdout)["error"]["type"] == "OptionError"


def test_what_was_warned_of_stands_in_the_json_and_on_standard_error(tmp_path: Path) -> None:
    root = tmp_path / "data"
    recorded(root)
    folder = next((root / "data").iterdir())
    (folder / "link").symlink_to(root / "_rlio.json")
    for command in ("compact", "gc", "trim", "verify", "evaluate"):  # recover lists dead writers only
        told = run(command, str(root), "--json")
        assert told.exit_code == 0, (command, told.output)
        (warning, *_) = json.loads(told.stdout)["warnings"]
        assert "link" in warning, command
        assert warning in told.stderr
    os.unlink(folder / "link")
    assert "warnings" not in json.loads(run("gc", str(root), "--json").stdout)


@pytest.mark.further
def test_demo_into_a_file_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}\n")
    shown = runner.invoke(app, ["demo", "--quick", "--out", str(tmp_path / "x.json")])
    assert shown.exit_code == 2, shown.output
    assert "Traceback" not in shown.output


def test_a_file_where_a_folder_is_meant_is_an_error_of_ours_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("{}\n")
    batch = rlio.SampleBatch(rewards=[1.0])

    def bound() -> rlio.RandomPolicy:
        policy = rlio.RandomPolicy()
        policy.bind(spaces.Box(-1, 1, (1,)), spaces.Discrete(2), seed=0)
        return policy

    def write(kind: Any) -> None:
        with kind(file) as writer:
            writer.write(batch)

    for what, expected in (
        (lambda: rlio.open_dataset(file), DataNotFound),
        (lambda: rlio.DatasetReader(file), DataNotFound),
        (lambda: rlio.ReplayStore.open(file), DataNotFound),
        (lambda: rlio.ReplayStore.load(file), DataNotFound),
        (lambda: rlio.verify(file), DataNotFound),
        (lambda: rlio.maintenance.recover(file, must_exist=True), DataNotFound),
        (lambda: bound().load(file), DataNotFound),
        (lambda: write(rlio.ParquetWriter), OptionError),
        (lambda: write(rlio.JsonWriter), OptionError),
        (lambda: rlio.FollowingReplay(file, capacity=10, timeout=5, seed=0).sample(), DataNotFound),
        (lambda: rlio.FollowReader(file, idle_timeout=0).sample(), DataNotFound),
    ):
        with pytest.raises(expected):
            what()
    assert file.read_text() == "{}\n"


def test_an_argument_of_the_wrong_kind_is_an_error_of_ours(tmp_path: Path) -> None:
    for rollout in ({"num_envs": 2}, "num_envs=2", 3):
        with pytest.raises(OptionError):
            rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), rollout=rollout)  # type: ignore[arg-type]
        with pytest.raises(OptionError):
            rlio.EnvRunner("CartPole-v1", rlio.RandomPolicy(), config=rollout)  # type: ignore[arg-type]
    recorded(tmp_path / "data")
    root, wrong = str(tmp_path / "data"), cast("Any", {"max_rows": 3})
    for use in (
        lambda: rlio.ParquetWriter(tmp_path / "out", roll=wrong),
        lambda: rlio.JsonWriter(tmp_path / "out", roll=wrong),
        lambda: rlio.open_dataset(root, limits=wrong),
        lambda: rlio.open_dataset(root, storage_options=cast("Any", [1])),
        lambda: rlio.open_dataset(cast("Any", None)),
        lambda: rlio.DatasetReader(cast("Any", 3)),
        lambda: rlio.verify(cast("Any", None)),
        lambda: rlio.FollowingReplay(root, capacity=10, ratio=wrong),
        lambda: rlio.RolloutConfig(env_config=cast("Any", [1])),
        lambda: rlio.RolloutWorker(
            "CartPole-v1", rlio.RandomPolicy(), input=root, input_options=cast("Any", [1])
        ),
    ):
        with pytest.raises(OptionError):
            use()
    assert not (tmp_path / "out").exists()
    with rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), seed=0) as worker, pytest.raises(OptionError):
        worker.set_global_vars({"step": 5})
