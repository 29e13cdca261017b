"""A step whose info or observation cannot be stored costs itself, in every recorder and worker."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Graph, GraphInstance, Text
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pettingzoo.utils.conversions import parallel_to_aec
from test_hostile_values import VALUES, as_stored, equal, is_storable
from test_pettingzoo import Falls

import rlio
from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.arrays import object_column
from rlio.envs.multi_agent import make_multi_agent
from rlio.errors import SchemaError
from rlio.readers.recording_input import RecordingInput
from rlio.sampling import PolicySetup
from rlio.testing import assert_same

WRITERS: list[Callable[..., rlio.OutputWriter]] = [rlio.ParquetWriter, rlio.JsonWriter]


class Colour(enum.Enum):
    RED = 1


HOSTILE = {
    "a datetime of another zone": datetime.datetime(
        2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(1 / 24))
    ),
    "an enum": Colour.RED,
    "a set": {1, 2},
    "a masked array": np.ma.array([1, 2], mask=[True, False]),
    "a function": print,
    "records": np.zeros(2, [("a", "f4")]),
}
#: Steps with a hostile info.
BAD = (3, 4, 9)


class Odd(gym.Env[np.ndarray, int]):
    """Counts its steps; the infos of the steps `BAD` of each episode hold ``value``; it ends at step 12."""

    observation_space = Box(0, 100, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, value: Any) -> None:
        self.value = value
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        info = {"deep": [{"value": self.value}]} if self.t - 1 in BAD else {"t": self.t}
        return np.full(1, self.t, np.float32), 1.0, self.t == 12, False, info


def read(root: Path) -> SampleBatch:
    batch = rlio.DatasetReader(root, epochs=1, batch_size=100_000, shuffle=False).sample()
    if isinstance(batch, MultiAgentBatch):
        (batch,) = batch.policy_batches.values()
    return batch


@pytest.mark.few(3)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.each_value_once
def test_a_step_with_an_info_that_cannot_be_stored_costs_only_itself(
    value: Any, writer: Callable[..., rlio.OutputWriter], tmp_path: Path
) -> None:
    with rlio.RecordExperience(Odd(value), writer(tmp_path), infos=True) as env:
        for _ in range(2):
            env.reset()
            for t in range(12):
                if t in BAD:
                    with pytest.raises(SchemaError, match=r"infos/deep/0/value") as caught:
                        env.step(0)
                    assert "cannot be stored" in str(caught.value)
                else:
                    env.step(0)
    found = read(tmp_path)
    kept = [t for t in range(12) if t not in BAD]
    assert found["t"].tolist() == 2 * kept
    assert [info["t"] for info in found["infos"]] == [t + 1 for t in 2 * kept]
    assert found["obs"].ravel().tolist() == 2 * kept
    assert found["new_obs"].ravel().tolist() == [t + 1 for t in 2 * kept]
    assert rlio.verify(tmp_path).ok


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.each_value_once
def test_an_info_that_cannot_be_stored_costs_the_row_of_its_environment(
    value: Any, mode: AutoresetMode, tmp_path: Path
) -> None:
    envs = SyncVectorEnv([lambda: Odd(value), lambda: Odd("fine")], autoreset_mode=mode)
    with rlio.RecordVectorExperience(envs, tmp_path, infos=True) as env:
        env.reset()
        for t in range(12):
            if t in BAD:
                with pytest.raises(SchemaError, match=r"environment 0: .*infos/deep"):
                    env.step(np.zeros(2, np.int64))
            else:
                env.step(np.zeros(2, np.int64))
    found = read(tmp_path)
    first = found["env_id"] == 0
    assert found["t"][first].tolist() == [t for t in range(12) if t not in BAD]
    assert found["t"][~first].tolist() == list(range(12))
    fine = [info for info in found["infos"][~first] if "deep" in info]
    assert [info["deep"][0]["value"] for info in fine] == ["fine"] * len(BAD)


class OddFalls(Falls):
    """The first agent's info holds a set at step 2."""

    def step(self, actions: Any) -> Any:
        found = super().step(actions)
        infos = found[-1]
        if self._t == 2:
            infos["p1"]["value"] = {1}
        return found


@pytest.mark.parametrize("turns", [False, True])
def test_an_info_that_cannot_be_stored_costs_the_row_of_its_agent(turns: bool, tmp_path: Path) -> None:
    expected = []
    for odd in (False, True):
        root, refused = tmp_path / str(odd), []
        made = OddFalls() if odd else Falls()
        recorder: Any = rlio.RecordAECEnv if turns else rlio.RecordParallelEnv
        with recorder(parallel_to_aec(made) if turns else made, root, infos=True, seed=0) as env:
            env.reset()
            while env.agents:
                agent = env.agent_selection if turns else ""
                is_over = turns and (env.terminations[agent] or env.truncations[agent])
                try:
                    env.step((None if is_over else 0) if turns else dict.fromkeys(env.agents, 0))
                except SchemaError as error:
                    refused.append(str(error))
        assert len(refused) == odd
        assert all("infos/value" in message for message in refused)
        rows = read(root)
        expected.append(sorted(zip(rows["agent_id"], rows["t"].tolist(), strict=True)))
    lost = set(expected[0]) - set(expected[1])
    assert lost == {("p1", 6 if turns else 1)}
    assert len(expected[1]) == len(expected[0]) - 1


class Speaks(Odd):
    """Observes text; that before the steps `BAD` has half of a surrogate pair, which has no UTF-8 form."""

    observation_space = Text(8, charset="abc")  # type: ignore[assignment]
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "a", {}

    def step(self, action: Any) -> Any:
        _, reward, ended, cut, _ = super().step(action)
        return "b\ud800" if self.t in BAD else "c", reward, ended, cut, {}


@pytest.mark.parametrize("vector", [False, True])
def test_an_observation_that_cannot_be_stored_costs_the_two_rows_that_hold_it(
    vector: bool, tmp_path: Path
) -> None:
    made: Any = SyncVectorEnv([lambda: Speaks(0)]) if vector else Speaks(0)
    recorder: Any = rlio.RecordVectorExperience if vector else rlio.RecordExperience
    refused = []
    with recorder(made, tmp_path) as env:
        env.reset()
        for t in range(12):
            try:
                env.step(np.zeros(1, np.int64) if vector else 0)
            except SchemaError:
                refused.append(t)
    assert refused == [2, 3, 4, 8, 9]
    assert read(tmp_path)["t"].tolist() == [t for t in range(12) if t not in refused]


def test_each_info_is_refused_by_the_step_or_comes_back_equal(tmp_path: Path) -> None:
    class Each(Odd):
        def step(self, action: Any) -> Any:
            obs, *middle, _ = super().step(action)
            return np.zeros_like(obs), *middle, {"value": VALUES[action]}

    Each.action_space = Discrete(len(VALUES))
    kept = []
    with rlio.RecordExperience(Each(None), tmp_path, infos=True) as env:
        for number, value in enumerate(VALUES):
            env.reset()
            # A mapping of another class may be a view, and is copied as a dict.
            given = dict(value) if isinstance(value, Mapping) else value
            try:
                env.step(number)
            except SchemaError:
                assert not is_storable({"value": given}), repr(value)
            else:
                assert is_storable({"value": given}), repr(value)
                kept.append(given)
    infos = read(tmp_path)["infos"]
    assert all(equal(info["value"], as_stored(value)) for info, value in zip(infos, kept, strict=True))


@pytest.mark.parametrize("name", ["records", "a masked array"])
def test_an_extra_column_that_cannot_be_stored_is_refused_before_the_step(name: str, tmp_path: Path) -> None:
    with rlio.RecordExperience(Odd(0), tmp_path) as env:
        env.reset()
        env.record(extra=HOSTILE[name])
        with pytest.raises(SchemaError, match="extra"):
            env.step(0)
        env.record(extra=np.zeros(2))
        env.step(0)
    assert read(tmp_path)["t"].tolist() == [0]


class Graphs(gym.Env[Any, int]):
    """Observes graphs of a growing number of nodes; every other one has edges."""

    observation_space = Graph(Box(0, 9, (2,), np.float32), Discrete(3))
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.see(), {}

    def see(self) -> GraphInstance:
        nodes = np.full((self.t + 1, 2), self.t, np.float32)
        if self.t % 2:
            return GraphInstance(nodes, np.array([1, 2]), np.array([[0, 1], [1, 0]]))
        return GraphInstance(nodes, None, None)

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.see(), 1.0, self.t == 4, False, {"at": self.see()}


def check_graphs(graphs: Any, first: int) -> None:
    env = Graphs()
    for env.t, graph in enumerate(graphs, first):
        assert isinstance(graph, GraphInstance)
        assert equal(graph, env.see())


@pytest.mark.few(2)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("agents", [1, 3])
def test_graphs_come_back_as_graphs(
    agents: int, writer: Callable[..., rlio.OutputWriter], tmp_path: Path
) -> None:
    config = rlio.RolloutConfig(
        rollout_fragment_length=4, record_infos=True, env_config={"num_agents": agents}
    )
    made: Any = (lambda _: Graphs()) if agents == 1 else make_multi_agent(Graphs)
    setup = (
        PolicySetup(policy_mapping_fn=lambda agent, episode, **_: "default_policy") if agents > 1 else None
    )
    policies = {"default_policy": rlio.RandomPolicy()}
    output = writer(tmp_path)
    worker = rlio.RolloutWorker(made, policies, rollout=config, output=output, seed=0, policy_setup=setup)
    worker.sample()
    worker.stop()
    data = rlio.open_dataset(tmp_path)
    assert data.episode_count == agents
    for number in range(agents):
        episode = data.episode(number)
        check_graphs(episode.observations, 0)
        check_graphs([info["at"] for info in episode.infos], 1)
    for options in ({"shuffle": False}, {"shuffle": True, "cache": "none"}):
        with rlio.DatasetReader(tmp_path, epochs=1, **options) as reader:
            batch = reader.sample()
        for part in batch.policies().values():
            assert all(isinstance(graph, GraphInstance) for graph in (*part["obs"], *part["new_obs"]))
    if agents == 1:
        with rlio.ReplayStore.open(tmp_path) as store:
            drawn = store.uniform(batch_size=8, seed=0).sample()
        assert all(isinstance(graph, GraphInstance) for graph in drawn["obs"])


@pytest.mark.parametrize("writer", WRITERS)
def test_a_worker_loses_only_the_row_whose_info_cannot_be_stored(
    writer: Callable[..., rlio.OutputWriter], tmp_path: Path
) -> None:
    config = rlio.RolloutConfig(rollout_fragment_length=12, record_infos=True)
    worker = rlio.RolloutWorker(
        lambda _: Odd({1}), rlio.RandomPolicy(), rollout=config, output=writer(tmp_path)
    )
    for _ in range(2):
        with pytest.raises(SchemaError, match="infos/deep") as caught:
            worker.sample()
        notes = "".join(caught.value.__notes__)
        assert "3 of 12 rows cannot be stored; the others are written" in notes
        assert "are not served" in notes
    worker.stop()
    assert read(tmp_path)["t"].tolist() == 2 * [t for t in range(12) if t not in BAD]


class OddRows(rlio.InputReader):
    """Joint batches of two policies; one row of each has an info that cannot be stored."""

    def __init__(self) -> None:
        super().__init__()
        self.served = 0

    def _next(self) -> MultiAgentBatch:
        self.served += 1

        def part(bad: int) -> SampleBatch:
            infos = object_column({1} if row == bad else {"row": row} for row in range(4))
            return SampleBatch(eps_id=np.ones(4, np.int64), t=np.arange(4), infos=infos)

        return MultiAgentBatch({"a": part(1), "b": part(2)}, 4)


def test_a_recorded_joint_batch_loses_only_the_rows_that_cannot_be_stored(tmp_path: Path) -> None:
    with (
        RecordingInput(OddRows(), rlio.ParquetWriter(tmp_path)) as reader,
        pytest.raises(SchemaError, match="infos"),
    ):
        reader.sample()
    batch = rlio.DatasetReader(tmp_path, epochs=1, batch_size=100, shuffle=False).sample()
    assert isinstance(batch, MultiAgentBatch)
    assert batch["a"]["t"].tolist() == [0, 2, 3]
    assert batch["b"]["t"].tolist() == [0, 1, 3]
    assert batch.env_steps() == 4


def test_a_batch_without_a_row_that_cannot_be_stored_is_refused_as_a_whole(tmp_path: Path) -> None:
    """The writer refuses it for another reason, so nothing of it is written."""
    from rlio.writers.storable_rows import write_storable

    good = SampleBatch(t=np.arange(3), infos=object_column([{}, {"a": 1}, {}]))
    with rlio.ParquetWriter(tmp_path) as writer:
        write_storable(writer, good)
        with pytest.raises(SchemaError) as caught:
            write_storable(writer, SampleBatch(t=np.arange(3.0), infos=good["infos"]))
        assert not getattr(caught.value, "__notes__", [])
        assert writer.rows_received == 3
    assert_same(read(tmp_path), good)
