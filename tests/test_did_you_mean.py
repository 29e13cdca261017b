"""A name that is slightly wrong, or another library's, is answered with the right one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio
from rlio.batch.other_names import did_you_mean
from rlio.errors import MissingColumn, OptionError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "cartpole"
    with rlio.ParquetWriter(folder) as writer:
        writer.write(steps())
    return str(folder)


def steps(rows: int = 20) -> rlio.SampleBatch:
    t = np.arange(rows) % 5
    return rlio.SampleBatch(
        obs={"position": np.ones((rows, 2)), "speed": np.ones(rows)},
        actions=np.zeros(rows, np.int64),
        rewards=np.ones(rows),
        terminateds=t == 4,
        eps_id=np.arange(rows) // 5,
        t=t,
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("action", "'actions'"),
        ("Observation", "'obs'"),
        ("reward", "'rewards'"),
        ("terminated", "'terminateds'"),
        ("done", "'terminateds'"),
        ("episode_id", "'eps_id'"),
        ("observation/position", "'obs/position'"),
        ("rewrads", "'rewards'"),
        ("OBS", "'obs'"),
    ],
)
def test_another_librarys_name_and_a_typo_name_the_column(name: str, meant: str) -> None:
    known = ["obs", "obs/position", "actions", "rewards", "terminateds", "eps_id"]
    assert did_you_mean(name, known) == f": did you mean {meant}?"


def test_a_standard_name_that_is_absent_is_no_typo_of_a_similar_one() -> None:
    assert did_you_mean("truncateds", ["terminateds"]) == ""
    assert did_you_mean("speed", ["obs", "actions"]) == ""


ASKS: dict[str, Callable[[str], object]] = {
    "reader": lambda root: rlio.read(root, columns=["action"], epochs=1),
    "reader with a store": lambda root: rlio.read(root, columns=["action"], cache="memory").sample(),
    "epochs of a store": lambda root: rlio.ReplayStore.open(root).epochs(columns=["action"]).sample(),
    "uniform draws": lambda root: rlio.ReplayStore.open(root).uniform(columns=["action"]).sample(),
    "store": lambda root: rlio.ReplayStore.open(root, columns=["action"]),
    "to_arrow": lambda root: rlio.open_dataset(root).to_arrow(columns=["action"]),
    "take": lambda root: rlio.open_dataset(root).take([0], columns=["action"]),
    "stats": lambda root: rlio.open_dataset(root).stats(["action"]),
    "normalise": lambda root: rlio.read(root, normalise={"action": "mean_std"}),
    "batch": lambda root: rlio.read(root, epochs=1).sample()["action"],
    "filter": lambda root: rlio.read(root, filter="action == 1", epochs=1).sample(),
    "filter without a store": lambda root: rlio.read(root, filter="action == 1", cache="none"),
    "filter of an export": lambda root: rlio.open_dataset(root).to_arrow(filter="action == 1"),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_column_named_action_is_answered_with_actions(root: str, ask: str) -> None:
    with pytest.raises(MissingColumn, match=r"did you mean 'actions'\?"):
        ASKS[ask](root)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_a_typo_in_a_filter_lists_derived_columns(root: str, cache: Any) -> None:
    with pytest.raises(MissingColumn, match=r"episode_length: did you mean 'episode_return'\?") as raised:
        rlio.read(root, filter="episode_retrun > 3", epochs=1, cache=cache).sample()
    for name in ("returns_to_go", "mc_return", "episode_return", "eps_id"):
        assert name in str(raised.value)
    with pytest.raises(MissingColumn, match="episode_return"):
        rlio.open_dataset(root).to_arrow(filter="episode_retrun > 3")


def test_a_wrong_column_of_json_records_names_those_of_the_record() -> None:
    records = Path(__file__).parent / "golden/formats/rllib-2019/output-2019-10-28_00-00-00_worker-0_0.json"
    with pytest.raises(MissingColumn, match=r"did you mean 'actions'\?"):
        rlio.read(str(records), columns=["action"], epochs=1).sample()


# ---- mappings ----


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("observations", "'obs'"),
        ("State", "'obs'"),
        ("observations/camera", "'obs/camera'"),
        ("action", "'actions'"),
        ("reward", "'rewards'"),
        ("next_obs", "next_obs="),
        ("done", "terminated= or truncated="),
        ("episode_id", "episode="),
    ],
)
def test_a_mapping_refuses_another_librarys_name_for_a_column(key: str, hint: str) -> None:
    with pytest.raises(OptionError) as raised:
        rlio.Mapping({key: "x"})
    assert f"did you mean {hint}?" in str(raised.value)


def test_a_mapping_names_its_options() -> None:
    with pytest.raises(OptionError, match="did you mean 'episode'"):
        rlio.Mapping({"obs": "x"}, episodes="trip")  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"write columns=\{'obs': \.\.\.\}. It takes columns, episode"):
        rlio.Mapping(obs="x")  # type: ignore[call-arg]


def test_a_mapping_takes_such_a_name_beside_the_column_that_it_may_mean() -> None:
    mapping = rlio.Mapping(
        {"obs": "x", "state": "y", "actions": "a", "done": "d"}, terminated="d", episode="e"
    )
    assert set(mapping.columns) == {"obs", "state", "actions", "done"}
    assert "speed" in rlio.Mapping({"speed": "x"}).columns


def test_a_mapping_names_the_near_column_of_the_table() -> None:
    columns = {"speed": np.zeros(3), "act": np.zeros(3), "rew": np.zeros(3)}
    mapping = rlio.Mapping({"obs": "sped", "actions": "act", "rewards": "rew"}, per_file=True)
    with pytest.raises(MissingColumn, match=r"did you mean 'speed'\?"):
        rlio.from_arrays(columns, mapping=mapping)


# ---- columns in memory ----


@pytest.mark.parametrize("value", [np.zeros((3, 2)), [0.0, 1.0], {"position": np.zeros(3)}])
@pytest.mark.parametrize("opens", ["read", "open_dataset", "ReplayStore.open", "convert"])
def test_a_dict_of_arrays_is_answered_with_from_arrays(value: Any, opens: str, tmp_path: Path) -> None:
    ways: dict[str, Callable[[Any], object]] = {
        "read": rlio.read,
        "open_dataset": rlio.open_dataset,
        "ReplayStore.open": rlio.ReplayStore.open,
        "convert": lambda columns: rlio.convert(columns, tmp_path / "to"),
    }
    with pytest.raises(OptionError, match=r"pass rlio\.from_arrays\(\.\.\.\)"):
        ways[opens]({"obs": value})
    with pytest.raises(OptionError, match=r"pass rlio\.from_episodes\(\.\.\.\)"):
        ways[opens]([{"obs": value}])


def test_a_mixture_with_numbers_for_weights_is_no_dict_of_arrays(root: str) -> None:
    with rlio.read({root: np.float64(0.5)}, epochs=1) as reader:
        assert len(reader.sample()) > 0
