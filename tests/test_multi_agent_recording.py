"""Experience of several agents on disk: early deaths, turns, missing observations come back as they were."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_agents import AgentCounter, Chosen, by_agent, check_stream, map_agent
from crash_child import fork, wait_for
from further import further
from gymnasium.spaces import Box, Discrete

import rlio
from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.multi_agent import step_numbers
from rlio.readers.recording_input import RecordingInput
from rlio.sampling.config import RolloutConfig
from rlio.sampling.multi_agent_episode import MultiAgentEpisode
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.testing import assert_same
from rlio.writer import OutputWriter


def sampled(mode: Any, **config: Any) -> list[MultiAgentBatch]:
    runner = MultiAgentEnvRunner(
        AgentCounter,
        {"even": Chosen(), "odd": Chosen()},
        map_agent,
        config=RolloutConfig(num_envs=4, batch_mode=mode, **config),
        seed=2,
    )
    return [runner.run(50) for _ in range(6)]


def ma(batch: Any) -> MultiAgentBatch:
    assert isinstance(batch, MultiAgentBatch)
    return batch


def open_writer(kind: str, root: str) -> OutputWriter:
    return rlio.ParquetWriter(root) if kind == "parquet" else rlio.JsonWriter(root)


@pytest.mark.few(1)
@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", ["parquet", "json"])
@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_what_is_read_is_what_was_sampled(tmp_path: Path, kind: str, mode: Any) -> None:
    """Section 4.7: agents that die early, missing last observations; env steps, t, agent_index are kept."""
    root = str(tmp_path / "data")
    batches = sampled(mode, record_infos=True)
    with open_writer(kind, root) as writer:
        for batch in batches:
            writer.write(batch)
    with rlio.DatasetReader(root, epochs=1) as reader:
        found = ma(concat_samples([ma(batch) for batch in reader]))
    assert found.agent_steps() == sum(batch.agent_steps() for batch in batches)
    expected = ma(concat_samples(batches))
    for policy_id, rows in expected.items():
        assert found[policy_id].keys() == rows.keys()
        for name in rows:
            ours, theirs = found[policy_id][name], rows[name]
            assert ours.dtype == theirs.dtype, name
            assert np.array_equal(ours, theirs), name
        assert not rows["new_obs_valid"].all()
    check_stream([found], whole=mode == "complete_episodes")
    # Batches that are cut again count the steps that they can see: those in which somebody acted.
    acted = step_numbers(expected)[1]
    if kind == "parquet":
        assert found.env_steps() == acted
    # A line that is served whole has the steps that were recorded with it.
    assert acted <= found.env_steps() <= expected.env_steps()
    assert rlio.verify(root).ok


def fragments(root: str, kind: str, *, closes: bool = True) -> list[MultiAgentBatch]:
    """What a worker sampled and wrote in fragments so short that not each lacks a final observation."""
    worker = rlio.RolloutWorker(
        AgentCounter,
        {"even": Chosen(), "odd": Chosen()},
        policy_setup=rlio.sampling.PolicySetup(policy_mapping_fn=map_agent),
        rollout=RolloutConfig(rollout_fragment_length=12),
        output=lambda context: open_writer(kind, root),
        seed=1,
    )
    batches = [ma(worker.sample()) for _ in range(40)]
    if closes:
        worker.close()
    return batches


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "size"), [("parquet", 17), ("json", None), *further(("parquet", None))])
def test_whether_final_observations_are_missing_may_differ_from_batch_to_batch(
    tmp_path: Path, kind: str, size: int | None
) -> None:
    root = str(tmp_path / "data")
    batches = fragments(root, kind)
    told = {tuple(sorted(pid for pid, rows in b.items() if "new_obs_valid" in rows)) for b in batches}
    assert {(), ("even",), ("odd",), ("even", "odd")} <= told
    with rlio.DatasetReader(root, epochs=1, batch_size=size) as reader:
        found = [ma(batch) for batch in reader]
    assert check_stream(found) == check_stream(batches)
    if kind == "parquet":
        rlio.maintenance.compact(root)
    rlio.maintenance.gc(root, grace=0)
    with rlio.DatasetReader(root, epochs=1) as reader:
        assert check_stream([ma(batch) for batch in reader]) == check_stream(batches)
    assert rlio.verify(root).ok


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("kind", ["parquet", *further("json")])
def test_a_killed_writer_leaves_them_in_its_log(tmp_path: Path, kind: str) -> None:
    root = str(tmp_path / "data")

    def write_and_die() -> None:
        fragments(root, kind, closes=False)
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for(fork(write_and_die)) == -signal.SIGKILL
    rlio.maintenance.recover(root)
    with rlio.DatasetReader(root, epochs=1) as reader:
        found = [ma(batch) for batch in reader]
    assert check_stream(found) == check_stream(fragments(str(tmp_path / "other"), kind))


def test_a_loop_outside_may_know_the_final_observation_or_not(tmp_path: Path) -> None:
    class Loop(rlio.ExternalEnv):
        def run(self) -> None:
            for number in range(6):
                episode = self.start_episode()
                for t in range(4):
                    self.get_action(episode, np.full(1, t, np.float32))
                    self.log_returns(episode, 1.0)
                self.end_episode(episode, None if number % 3 else np.full(1, 4, np.float32))

    loop = Loop(Box(0.0, 9.0, (1,), np.float32), Discrete(2))
    config = RolloutConfig(rollout_fragment_length=4)
    with rlio.RolloutWorker(loop, rlio.RandomPolicy(), output=tmp_path, rollout=config) as worker:
        served = [worker.sample() for _ in range(6)]
    assert ["new_obs_valid" in batch for batch in served] == [False, True, True] * 2
    with rlio.DatasetReader(tmp_path, epochs=1) as reader:
        found = concat_samples(list(reader))
    assert isinstance(found, SampleBatch)
    assert found["new_obs_valid"].reshape(6, 4)[:, -1].tolist() == [True, False, False] * 2
    assert found["new_obs_valid"].sum() == 20


@pytest.mark.further
def test_episodes_are_found_again_in_batches_of_another_size(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    batches = sampled("complete_episodes")
    with rlio.ParquetWriter(root) as writer:
        for batch in batches:
            writer.write(batch)
    with rlio.DatasetReader(root, epochs=1, batch_size=17) as reader:
        parts = [ma(batch) for batch in reader]
    assert check_stream(parts, whole=True) == sum(batch.agent_steps() for batch in batches)
    # Rows of one step of the environment are never in two batches.
    steps = [
        {(int(e), int(t)) for rows in part.values() for e, t in zip(rows["eps_id"], rows["t"], strict=True)}
        for part in parts
    ]
    assert sum(map(len, steps)) == len(set().union(*steps))


@pytest.mark.further
def test_a_shuffled_replay_has_each_agents_row_once(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    batches = sampled("truncate_episodes")
    with rlio.ParquetWriter(root) as writer:
        for batch in batches:
            writer.write(batch)
    with rlio.DatasetReader(root, epochs=1, batch_size=32, shuffle=True, seed=3) as reader:
        found = ma(concat_samples([ma(batch) for batch in reader]))
    for policy_id, rows in ma(concat_samples(batches)).items():
        ours = found[policy_id]
        order, other = (np.lexsort((each["t"], each["agent_index"], each["eps_id"])) for each in (ours, rows))
        for name in ("obs", "new_obs", "rewards", "t", "agent_index", "new_obs_valid", "seen"):
            assert np.array_equal(ours[name][order], rows[name][other]), name


def test_a_sampler_is_recorded_like_any_reader(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    runner = MultiAgentEnvRunner(
        AgentCounter, {"even": Chosen(), "odd": Chosen()}, map_agent, config=RolloutConfig(), seed=5
    )
    with RecordingInput(rlio.SamplerInput(runner), rlio.ParquetWriter(root)) as reader:
        served = [ma(reader.sample()) for _ in range(2)]
    with rlio.DatasetReader(root, epochs=1) as stored:
        found = ma(concat_samples([ma(batch) for batch in stored]))
    assert by_agent([found]).keys() == by_agent(served).keys()
    check_stream([found])


def test_a_stored_episode_is_a_multi_agent_episode_again(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    (batch, *_) = sampled("complete_episodes")
    with rlio.ParquetWriter(root) as writer:
        writer.write(batch)
    with rlio.DatasetReader(root, epochs=1) as reader:
        found = ma(concat_samples([ma(part) for part in reader]))
    ids = {int(eps_id) for rows in found.values() for eps_id in rows["eps_id"]}
    assert len(ids) > 3
    for eps_id in ids:
        own = {name: rows[np.flatnonzero(rows["eps_id"] == eps_id)] for name, rows in found.items()}
        episode = MultiAgentEpisode.from_batch(MultiAgentBatch(own, 0), agents=AgentCounter.possible_agents)
        assert episode.is_done
        assert episode.agent_ids[0] == "a0"
        for policy_id, rows in own.items():
            if len(rows):
                order = np.lexsort((rows["t"], rows["agent_index"]))
                assert_same(without_mask(episode.to_batch()[policy_id]), without_mask(rows[order]))


def without_mask(rows: SampleBatch) -> SampleBatch:
    """Episodes have the column only where something is missing."""
    return SampleBatch({name: rows[name] for name in rows if name != "new_obs_valid"})
