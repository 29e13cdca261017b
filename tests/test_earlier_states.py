"""What version 4d4987e wrote beside recordings is opened, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from counter_env import episode
from earlier_states import AFTER, INDEXED, READERS, ROOT, WORKERS, _actor, put_data, served
from gymnasium.spaces import Box, Discrete
from stored_batches import assert_identical, load

import rlio
from rlio.errors import StateError
from rlio.following.marks import list_marks
from rlio.storage.filesystem import Storage

GOLDEN = Path(__file__).with_name("golden") / "states"
#: Readers that serve the rows of their files in another order since.
REFUSED = {"others' Parquet", "D4RL"}
#: Readers that drop what they hold, also in the version that saved it, and say so.
#: Draws of a replay that follows depend on how many rows its thread has put in by then.
DROPPING = {"shuffled", "asynchronous", "following replay"}


@pytest.fixture
def data() -> Iterator[None]:
    """The data where they lay when states were saved."""
    put_data(GOLDEN)
    yield
    fsspec.filesystem("memory").rm(ROOT, recursive=True)


@pytest.mark.usefixtures("data")
def test_readers_go_on_from_earlier_states() -> None:
    stored = json.loads((GOLDEN / "states.json").read_text())
    assert stored.keys() == READERS.keys()
    for name, make in READERS.items():
        with make() as reader:
            if name in REFUSED:
                with pytest.raises(StateError, match="earlier version"):
                    reader.load_state_dict(stored[name]["state"])
                continue
            reader.load_state_dict(stored[name]["state"])
            found = served(reader)
        assert len(found) == AFTER
        assert name in DROPPING or found == stored[name]["served"], name


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", [name for name in WORKERS if name != "agents"])
def test_workers_go_on_from_earlier_checkpoints(name: str) -> None:
    with WORKERS[name]() as worker:
        worker.restore(GOLDEN / "workers" / name)
        weights = worker.get_weights()
        with np.load(GOLDEN / "workers" / name / "arrays.npz") as arrays:
            saved = [arrays[key].tolist() for key in arrays.files]
        assert all(values.tolist() in saved for values in weights.values())
        assert worker.sample()


def test_the_position_of_an_earlier_worker_of_several_agents_is_refused_and_the_rest_is_restored() -> None:
    folder = GOLDEN / "workers" / "agents"
    with WORKERS["agents"]() as worker, pytest.raises(StateError):
        worker.restore(folder)
    with WORKERS["agents"]() as worker:
        worker.restore(folder, not_components=["position"])
        with np.load(folder / "arrays.npz") as arrays:
            saved = [arrays[key].tolist() for key in arrays.files]
        weights = worker.get_weights(["a"])["a"]
        assert weights
        assert all(values.tolist() in saved for values in weights.values())
        assert worker.sample()


def test_an_earlier_state_of_a_policy_server_is_refused() -> None:
    position = {"runner": {"timesteps": 5, "rows_dropped": 0}}
    state = {"version": 1, "reader": "PolicyServerInput", "position": position, "skip": 0, "dropped": 0}
    spaces = Box(-1.0, 1.0, (3,)), Discrete(2)
    with (
        rlio.serving.PolicyServerInput(rlio.RandomPolicy(), spaces=spaces) as server,
        pytest.raises(StateError),
    ):
        server.load_state_dict(state)


def test_a_policy_is_loaded_from_an_earlier_checkpoint() -> None:
    policy = _actor()
    policy.bind(Box(-1.0, 1.0, (3,)), Discrete(2), seed=1)
    with np.load(GOLDEN / "policy" / "arrays.npz") as arrays:
        policy.load(GOLDEN / "policy")
        saved = [arrays[key].tolist() for key in arrays.files]
    assert all(values.tolist() in saved for values in policy.get_weights().values())


@pytest.mark.usefixtures("data")
def test_earlier_priorities_are_loaded() -> None:
    with rlio.ReplayStore.open(f"{ROOT}/parquet") as store, store.prioritised(batch_size=4) as sampler:
        sampler.load(GOLDEN / "priorities.npz")
        found = sampler.priorities.to_arrays()
    with np.load(GOLDEN / "priorities.npz") as saved:
        assert {*saved.files} == {*found, "span"}
        assert all(saved[name].tolist() == values.tolist() for name, values in found.items())
        assert saved["values"].size


@pytest.mark.usefixtures("data")
def test_an_earlier_store_in_a_cache_folder_is_used(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "cache", tmp_path / "cache")

    def stored() -> dict[Path, tuple[int, int]]:
        paths = (tmp_path / "cache").rglob("*.array")
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}

    before = stored()
    assert before
    with rlio.ReplayStore.open(INDEXED, cache="disk", cache_folder=tmp_path / "cache") as store:
        assert len(store) == 18
        assert stored() == before
        with store.uniform(batch_size=200, seed=0) as sampler:
            rows = sampler.sample()
    assert set(zip(rows["env_id"].tolist(), rows["t"].tolist(), strict=True)) == {
        (env, t) for env in range(3) for t in range(6)
    }


@pytest.mark.usefixtures("data")
def test_an_earlier_index_of_sealed_writers_is_passed_over_and_gc_removes_it() -> None:
    assert_identical(load(INDEXED), rlio.concat_samples([episode(env, 0, 6) for env in range(3)]))
    assert [one.kind for one in rlio.maintenance.gc(INDEXED, grace=0).removed] == ["index"]
    assert Storage.open(INDEXED).list("_index") == []


def test_earlier_marks_of_followers_are_heard() -> None:
    (marks,) = list_marks(Storage.open(GOLDEN / "followed")).values()
    assert [(mark.follower, mark.row) for mark in marks.values()] == [("learner", 9)]
