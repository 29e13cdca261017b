"""Data sets in memory for d3rlpy, tensordict, TorchRL, Stable-Baselines3 and datasets: what these see."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import rlio
from rlio import bridges
from rlio.errors import OptionError, SchemaError

EPISODES = ((3, True, False), (4, False, True), (2, False, False))  # steps, terminated, truncated


def batch() -> rlio.SampleBatch:
    """Observation 10 * episode + t; its successor is one more."""
    rows = [(e, t, t == n - 1, end, cut) for e, (n, end, cut) in enumerate(EPISODES) for t in range(n)]
    obs = np.array([[10.0 * e + t, 1.0] for e, t, *_ in rows], np.float32)
    return rlio.SampleBatch(
        obs=obs,
        new_obs=obs + np.array([1, 0], np.float32),
        actions=np.array([t % 2 for _, t, *_ in rows]),
        rewards=np.arange(9, dtype=np.float32),
        terminateds=np.array([last and end for _, _, last, end, _ in rows]),
        truncateds=np.array([last and cut for _, _, last, _, cut in rows]),
        eps_id=np.array([e for e, *_ in rows]),
        t=np.array([t for _, t, *_ in rows]),
    )


@pytest.fixture
def data(tmp_path) -> rlio.Dataset:
    with rlio.ParquetWriter(tmp_path / "root") as writer:
        writer.write(batch())
    return rlio.open_dataset(tmp_path / "root")


@pytest.mark.parametrize("stored", [False, True])
def test_d3rlpy_has_the_episodes_with_their_ends(stored: bool, data: rlio.Dataset) -> None:
    pytest.importorskip("d3rlpy", reason="d3rlpy is not installed")
    rows = batch()
    buffer = bridges.to_d3rlpy(data if stored else rows)
    assert [(e.size(), e.terminated) for e in buffer.episodes] == [(3, True), (4, False), (2, False)]
    assert buffer.transition_count == 3 + 3 + 1
    for index in range(buffer.transition_count):
        one = buffer.transition_picker(*buffer._buffer[index])
        expected = np.zeros(2) if one.terminal else one.observation + np.array([1, 0])
        assert np.array_equal(one.next_observation, expected)
    if not stored:
        assert np.shares_memory(buffer.episodes[1].observations, rows["obs"])
    assert buffer.sample_transition_batch(16).observations.shape == (16, 2)


def test_a_tensordict_shares_memory_and_has_torchrls_keys() -> None:
    pytest.importorskip("tensordict", reason="tensordict is not installed")
    rows = batch()
    found = rlio.torch.to_tensordict(rows, layout="torchrl")
    rows["obs"][0, 0] = 77
    assert found["observation"][0, 0] == 77
    assert found["next", "observation"].tolist() == rows["new_obs"].tolist()
    assert found["next", "done"].shape == (9, 1)
    assert found["next", "done"].sum() == 2
    assert set(rlio.torch.to_tensordict(rows).keys()) == set(rows)


def test_torchrl_samples_recorded_rows_and_does_not_change_them(data: rlio.Dataset) -> None:
    rl = pytest.importorskip("torchrl.data", reason="torchrl is not installed")
    with rlio.ReplayStore.open(data) as store:
        buffer = rl.ReplayBuffer(
            storage=bridges.torchrl_storage(store),
            writer=rl.ImmutableDatasetWriter(),
            collate_fn=lambda rows: rows,
            batch_size=32,
        )
        assert len(buffer) == 9
        drawn = buffer.sample()
        assert ((drawn["next", "observation"] - drawn["observation"])[:, 0] == 1).all()
        assert buffer[3]["observation"][0] == 10
        with pytest.raises(OptionError):
            bridges.torchrl_storage(store).set(0, drawn)


@pytest.mark.parametrize("n_envs", [1, 2])
def test_sb3_has_the_rows_and_tells_timeouts_from_ends(n_envs: int, data: rlio.Dataset) -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers", reason="SB3 is not installed")
    from gymnasium.spaces import Box, Discrete

    buffer = buffers.ReplayBuffer(20, Box(-1, 99, (2,)), Discrete(2), "cpu", n_envs=n_envs)
    filled = bridges.fill_sb3(buffer, data)
    assert filled == (9 - 9 % n_envs, 0, 9 % n_envs)
    assert buffer.size() == 9 // n_envs
    assert buffer.dones.sum() == 2
    assert buffer.timeouts.sum() == 1
    samples = buffer.sample(64)
    assert ((samples.next_observations - samples.observations)[:, 0] == 1).all()
    with pytest.raises(OptionError):
        bridges.fill_sb3(buffers.ReplayBuffer(4, Box(-1, 99, (2,)), Discrete(2), "cpu"), data)


def test_sb3_scales_actions_and_leaves_out_rows_without_a_final_observation() -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers", reason="SB3 is not installed")
    from gymnasium.spaces import Box, Dict

    rows = batch()
    rows["actions"] = np.linspace(-2, 2, 9, dtype=np.float32).reshape(9, 1)
    rows["obs"], rows["new_obs"] = {"x": rows["obs"]}, {"x": rows["new_obs"]}
    rows["new_obs_valid"] = np.arange(9) < 8
    buffer = buffers.DictReplayBuffer(20, Dict(x=Box(-1, 99, (2,))), Box(-2, 2, (1,)), "cpu")
    assert bridges.fill_sb3(buffer, rows) == (8, 1, 0)
    assert np.allclose(buffer.actions[:8, 0, 0], np.linspace(-1, 1, 9)[:8])


def test_several_policies_sequences_and_lost_observations_are_refused(tmp_path) -> None:
    for library in ("d3rlpy", "torchrl", "stable_baselines3"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer

    with rlio.ParquetWriter(tmp_path / "two") as writer:
        writer.write(rlio.MultiAgentBatch({"a": batch(), "b": batch()}, 9))
    two, spaces = rlio.open_dataset(tmp_path / "two"), (Box(-1, 99, (2,)), Discrete(2), "cpu")
    with pytest.raises(OptionError):
        bridges.to_d3rlpy(two)
    with pytest.raises(OptionError):
        bridges.fill_sb3(ReplayBuffer(20, *spaces), two)
    with rlio.ReplayStore.open(two) as store, pytest.raises(OptionError):
        bridges.torchrl_storage(store)
    assert len(bridges.to_d3rlpy(two, policy="a").episodes) == 3
    assert bridges.fill_sb3(ReplayBuffer(20, *spaces), two, policy="b").rows == 9
    with pytest.raises(OptionError):
        bridges.fill_sb3(NStepReplayBuffer(20, *spaces), batch())
    padded = rlio.SampleBatch({**batch(), "seq_lens": [3, 4, 2]})
    with pytest.raises(SchemaError):
        bridges.fill_sb3(ReplayBuffer(20, *spaces), padded)
    with pytest.raises(SchemaError):
        rlio.torch.to_tensordict(padded)
    lost = rlio.SampleBatch({**batch(), "new_obs_valid": np.arange(9) != 6})  # the truncated row
    with pytest.raises(SchemaError):
        rlio.torch.to_tensordict(lost, layout="torchrl")
    outside = rlio.SampleBatch({**batch(), "actions": np.full(9, 2)})
    with pytest.raises(SchemaError):
        bridges.fill_sb3(ReplayBuffer(20, *spaces), outside)


def test_hugging_face_has_the_rows(data: rlio.Dataset) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    found = data.to_hf()
    assert len(found) == 9
    assert found[4]["obs"] == [11.0, 1.0]


def test_hugging_face_loads_what_rlio_writes_and_rlio_what_it_writes(
    data: rlio.Dataset, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rlio.convert(tmp_path / "root", tmp_path / "parquet", to="parquet", prove=True)
    files = [str(path) for path in (tmp_path / "parquet").glob("*.parquet")]
    loaded = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))["train"]
    rows = batch()
    for name in rows:
        assert loaded.with_format("numpy")[name][:].tolist() == rows[name].tolist(), name
    data.to_hf().save_to_disk(tmp_path / "disk")
    again = datasets.load_from_disk(tmp_path / "disk")
    assert again.to_dict() == data.to_hf().to_dict()
    again.to_parquet(tmp_path / "again.parquet")
    with rlio.read(tmp_path / "again.parquet", epochs=1) as reader:
        found = rlio.concat_samples(list(reader))
    for name in rows:
        np.testing.assert_array_equal(found[name], rows[name], err_msg=name)


@pytest.mark.parametrize(
    ("example", "library", "gain"),
    [
        ("d3rlpy_cql.py", "d3rlpy", 100),
        ("sb3_warm_start.py", "stable_baselines3", 100),
        ("torchrl_sac.py", "torchrl", 300),
    ],
)
def test_an_example_trains_a_policy_that_beats_its_data(
    example: str, library: str, gain: int, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The last return that is printed beats the others: of the data, and of SB3's DQN without the log."""
    pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.setattr(sys, "argv", [example, str(tmp_path / "out")])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / example), run_name="__main__")
    printed = capsys.readouterr().out
    *others, trained = map(int, re.findall(r"(-?\d+) (?:in|after)", printed.partition("mean return: ")[2]))
    assert trained >= max(others) + gain, printed


def test_sb3_refuses_nan_and_has_0_for_actions_with_one_value() -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers", reason="SB3 is not installed")
    from gymnasium.spaces import Box

    space = Box(np.array([-2, 1], np.float32), np.array([2, 1], np.float32))
    rows = rlio.SampleBatch({**batch(), "actions": np.array([[1.0, 1.0]] * 9, np.float32)})
    buffer = buffers.ReplayBuffer(20, Box(-1, 99, (2,)), space, "cpu")
    bridges.fill_sb3(buffer, rows)
    assert (buffer.actions[:9, 0] == [0.5, 0]).all()
    rows["actions"][3, 0] = np.nan
    with pytest.raises(SchemaError):
        bridges.fill_sb3(buffer, rows)


def test_sb3_has_room_for_the_rows_of_one_policy(tmp_path: Path) -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers", reason="SB3 is not installed")
    from gymnasium.spaces import Box, Discrete

    both = rlio.concat_samples([batch(), batch()])
    both["agent_index"] = np.repeat([0, 1], 9)
    with rlio.ParquetWriter(tmp_path / "two") as writer:
        writer.write(rlio.MultiAgentBatch({"a": both, "b": batch()}, 9))
    for room, fits in ((17, False), (18, True)):
        buffer = buffers.ReplayBuffer(room, Box(-1, 99, (2,)), Discrete(2), "cpu")
        if fits:
            assert bridges.fill_sb3(buffer, rlio.open_dataset(tmp_path / "two"), policy="a").rows == 18
        else:
            with pytest.raises(OptionError):
                bridges.fill_sb3(buffer, rlio.open_dataset(tmp_path / "two"), policy="a")
