"""A path that does not exist is answered with the path that is nearly the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import rlio
from rlio.cli.main import app
from rlio.errors import DataNotFound
from rlio.storage import near
from rlio.storage.near import did_you_mean_path
from rlio.storage.paths import locate


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("near") / "runs"
    for root in (str(folder / "cartpole"), "memory://near/runs/cartpole"):
        with rlio.ParquetWriter(root) as writer:
            writer.write(rlio.SampleBatch(obs=np.zeros((3, 2)), actions=np.zeros(3), rewards=np.ones(3)))
    (folder / "log.csv").write_text("obs,actions,rewards,terminateds\n1,0,1,1\n")
    store = rlio.ReplayStore(10)
    store.append(rlio.SampleBatch(obs=np.zeros((3, 2)), t=np.arange(3)))
    store.save(folder / "store")
    rlio.save_checkpoint(folder / "checkpoint-1", store=store)
    return folder


OPENS: dict[str, Callable[[Any], object]] = {
    "read": rlio.read,
    "open_dataset": rlio.open_dataset,
    "DatasetReader": rlio.DatasetReader,
    "ReplayStore": rlio.ReplayStore.open,
    "verify": rlio.verify,
    "compact": rlio.maintenance.compact,
    "evaluation": lambda path: rlio.evaluation.evaluate_offline(
        path, lambda batch: np.zeros(len(batch)), gamma=1.0
    ),
    "a list": lambda path: rlio.read([path]),
    "with a format": lambda path: rlio.read(path, format="minari"),
}


@pytest.mark.parametrize("opens", OPENS)
@pytest.mark.parametrize("wrong", ["cartpol", "Cartpole", "cart-pole"])
def test_a_wrong_path_suggests_siblings(runs: Path, opens: str, wrong: str) -> None:
    with pytest.raises(DataNotFound) as raised:
        OPENS[opens](str(runs / wrong))
    assert f"did you mean {str(runs / 'cartpole')!r}?" in str(raised.value)


@pytest.mark.parametrize("opens", OPENS)
def test_a_wrong_uri_suggests_siblings(runs: Path, opens: str) -> None:
    with pytest.raises(DataNotFound, match=r"did you mean 'memory://near/runs/cartpole'\?"):
        OPENS[opens]("memory://near/runs/cartpol")


def test_a_wrong_folder_above_a_path_is_corrected(runs: Path) -> None:
    with pytest.raises(DataNotFound) as raised:
        rlio.open_dataset(runs.parent / "rnus" / "cartpole")
    assert f"did you mean {str(runs / 'cartpole')!r}?" in str(raised.value)
    with pytest.raises(DataNotFound) as raised:
        rlio.open_dataset(runs.parent / "rnus" / "other")
    assert "did you mean" not in str(raised.value)


def test_wrong_files_stores_and_checkpoints_suggest_siblings(runs: Path) -> None:
    mapping = rlio.Mapping(
        {"obs": "obs", "actions": "actions", "rewards": "rewards"}, terminated="terminateds"
    )
    ways: dict[str, Callable[[], object]] = {
        "log.csv": lambda: rlio.read(str(runs / "logs.csv"), mapping=mapping),
        "store": lambda: rlio.ReplayStore.load(runs / "stroe"),
        "checkpoint-1": lambda: rlio.load_checkpoint(runs / "checkpoint", store=rlio.ReplayStore(10)),
    }
    for name, way in ways.items():
        with pytest.raises(DataNotFound) as raised:
            way()
        assert f"did you mean {str(runs / name)!r}?" in str(raised.value)


@pytest.mark.parametrize("command", [["status"], ["verify"], ["compact"], ["convert"], ["gc"]])
def test_commands_suggest_siblings(runs: Path, command: list[str], tmp_path: Path) -> None:
    more = [str(tmp_path / "to")] if command == ["convert"] else []
    result = CliRunner().invoke(app, [*command, str(runs / "cartpol"), *more])
    assert result.exit_code == 2
    assert f"did you mean {str(runs / 'cartpole')!r}?" in result.output


def test_a_reader_that_waits_for_a_wrong_path_says_so_once(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "rlio")
    with (
        rlio.FollowReader(runs / "cartpol", idle_timeout=0.05, poll_seconds=0.01) as reader,
        pytest.raises(rlio.EndOfData),
    ):
        reader.sample()
    (text,) = [r.getMessage() for r in caplog.records if "did you mean" in r.getMessage()]
    assert str(runs / "cartpole") in text


def test_a_path_that_exists_and_one_without_neighbours_suggest_nothing(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "emptyy").mkdir()
    assert did_you_mean_path(locate(tmp_path / "empty")) == ""
    assert did_you_mean_path(locate(tmp_path / "something else")) == ""
    assert did_you_mean_path(locate("/nowhere at all/x")) == ""
    assert did_you_mean_path(locate("memory://near/runs/cartpole")) == ""


def test_a_hint_lists_one_folder_and_no_failure_of_it_is_seen(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def children(self: Any, folder: str, most: int | None) -> Any:
        asked.append(self.root)
        raise RuntimeError("the client has its own errors")

    monkeypatch.setattr(near.RemoteFolder, "children", children)
    assert did_you_mean_path(locate("memory://near/runs/cartpol")) == ""
    assert asked == ["/near/runs"]
