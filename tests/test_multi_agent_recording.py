"""Experience of several agents on disk: early deaths, turns, missing observations come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_agents import AgentCounter, Chosen, by_agent, check_stream, map_agent

import rlio
from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.interfaces import OutputWriter
from rlio.multi_agent import step_numbers
from rlio.readers.recording_input import RecordingInput
from rlio.rollout.config import RolloutConfig
from rlio.rollout.multi_agent_episode import MultiAgentEpisode
from rlio.rollout.multi_agent_runner import MultiAgentEnvRunner
from rlio.testing import assert_same


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


@pytest.mark.parametrize("kind", ["parquet", "json"])
@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_what_is_read_is_what_was_sampled(tmp_path: Path, kind: str, mode: Any) -> None:
    """Section 4.7: agents that die early, missing last observations; env steps, t, agent_index are kept."""
    root = str(tmp_path / "data")
    batches = sampled(mode, record_infos=True)
    with open_writer(kind, root) as writer:
        for batch in batches:
            writer.write(batch)
    reader = rlio.DatasetReader(root, epochs=1) if kind == "parquet" else rlio.JsonReader(root, epochs=1)
    with reader:
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
    # Batches that are cut anew count the steps that they can see: those in which somebody acted.
    acted = step_numbers(expected)[1]
    assert found.env_steps() == (acted if kind == "parquet" else expected.env_steps())
    assert rlio.verify(root).ok


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
