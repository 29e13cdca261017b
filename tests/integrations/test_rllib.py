"""RLlib reads what rlio writes, trains from rlio's data sets and records into them."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgpack
import msgpack_numpy
import numpy as np
import pytest

import rlio

ray = pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("ray.rllib", reason="ray[rllib] is not installed")
pytest.importorskip("torch", reason="torch is not installed")

from ray.rllib.algorithms.bc import BCConfig  # noqa: E402
from ray.rllib.algorithms.cql import CQLConfig  # noqa: E402
from ray.rllib.algorithms.marwil import MARWILConfig  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.env.single_agent_episode import SingleAgentEpisode  # noqa: E402
from ray.rllib.offline.dataset_writer import DatasetWriter  # noqa: E402
from ray.rllib.offline.json_reader import JsonReader  # noqa: E402
from ray.rllib.offline.json_writer import JsonWriter  # noqa: E402
from ray.rllib.policy.sample_batch import MultiAgentBatch  # noqa: E402
from ray.rllib.policy.sample_batch import SampleBatch as RllibSampleBatch  # noqa: E402

from rlio.integrations.rllib import (  # noqa: E402
    RecordingEnvRunner,
    RlioOfflineData,
    input_creator,
    output_creator,
)

EPISODES = Path(__file__).parents[1] / "golden/formats/rllib/cartpole/cartpoleenv/run-000001-00001"
# RLlib leaves files open, and uses what others have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def record(root: Path, env_id: str, episodes: int) -> list[rlio.SampleBatch]:
    """Episodes of random actions, a batch each."""
    env, made = gym.make(env_id), []
    spaces = (env.observation_space, env.action_space)
    env.action_space.seed(1)
    with rlio.ParquetWriter(root, spaces={"default_policy": spaces}, spool=None) as writer:
        for number in range(episodes):
            observations, rows = [env.reset(seed=number)[0]], []
            while not rows or not any(rows[-1][2:]):
                action = env.action_space.sample()
                observation, *rest, _ = env.step(action)
                observations.append(observation)
                rows.append((action, *rest))
            actions, rewards, terminateds, truncateds = map(np.array, zip(*rows, strict=True))
            batch = rlio.SampleBatch(
                obs=np.array(observations[:-1]), new_obs=np.array(observations[1:]), actions=actions,
                rewards=rewards.astype(np.float64), terminateds=terminateds, truncateds=truncateds,
                eps_id=np.full(len(rows), number), t=np.arange(len(rows)),
            )  # fmt: skip
            writer.write(batch)
            made.append(batch)
    return made


def test_rllibs_json_reader_reads_the_json_that_is_written(tmp_path: Path) -> None:
    made = record(tmp_path / "own", "CartPole-v1", 5)
    rlio.convert(tmp_path / "own", tmp_path / "json", to="rllib-json", prove=True)
    found = list(JsonReader(str(tmp_path / "json")).read_all_files())
    assert len(found) == len(made) == 5
    for given, read in zip(made, found, strict=True):
        assert len(given) == len(read)
        for name in given:
            np.testing.assert_array_equal(given[name], read[name].astype(given[name].dtype), err_msg=name)


def test_rllibs_episodes_are_equal_to_those_that_were_recorded(tmp_path: Path) -> None:
    made = record(tmp_path / "own", "Pendulum-v1", 2)
    rlio.convert(tmp_path / "own", tmp_path / "episodes", to="rllib-episodes", prove=True)
    episodes = {episode.id_: episode for episode in episodes_of(tmp_path / "episodes")}
    assert set(episodes) == {"0", "1"}
    for number, given in enumerate(made):
        episode = episodes[str(number)]
        assert episode.observation_space == gym.make("Pendulum-v1").observation_space
        assert (episode.is_terminated, episode.is_truncated, len(episode)) == (False, True, 200)
        np.testing.assert_array_equal(episode.get_observations(slice(0, 200)), given["obs"])
        np.testing.assert_array_equal(episode.get_observations(-1), given["new_obs"][-1])
        np.testing.assert_array_equal(episode.get_actions(), given["actions"])
        np.testing.assert_array_equal(episode.get_rewards(), given["rewards"])


@pytest.mark.parametrize("compressed", [[], ["obs", "new_obs"]])
def test_json_of_rllib_is_equal_after_a_data_set_of_rlio(compressed: list[str], tmp_path: Path) -> None:
    writer = JsonWriter(str(tmp_path / "own"), compress_columns=compressed)
    for rows in record(tmp_path / "recorded", "Pendulum-v1", 3):
        writer.write(RllibSampleBatch(dict(rows)))
    writer.cur_file.close()
    # Stored as float32 values in JSON, which has no dtypes: the spaces say which they were.
    env = gym.make("Pendulum-v1")
    options = {"spaces": (env.observation_space, env.action_space), "unnormalise_actions": False}
    rlio.convert(tmp_path / "own", tmp_path / "rlio", prove=True, read_options=options)
    rlio.convert(tmp_path / "rlio", tmp_path / "again", to="rllib-json", prove=True)
    before, after = (list(JsonReader(str(tmp_path / name)).read_all_files()) for name in ("own", "again"))
    assert len(before) == len(after) == 3
    for one, other in zip(before, after, strict=True):
        assert set(one) <= set(other)
        for name in one:
            np.testing.assert_array_equal(
                np.asarray(one[name]), np.asarray(other[name], one[name].dtype), err_msg=name
            )


def test_episodes_of_rllib_are_equal_after_a_data_set_of_rlio(tmp_path: Path) -> None:
    rlio.convert(EPISODES, tmp_path / "rlio", prove=True)
    rlio.convert(tmp_path / "rlio", tmp_path / "again", to="rllib-episodes", prove=True)
    # Ray reads files in any order.
    before, after = (
        {episode.id_: episode for episode in episodes_of(path)} for path in (EPISODES, tmp_path / "again")
    )
    assert len(before) > 1
    assert before.keys() == after.keys()
    for id_, one in before.items():
        other = after[id_]
        assert (len(one), one.t_started) == (len(other), other.t_started)
        assert (one.is_terminated, one.is_truncated) == (other.is_terminated, other.is_truncated)
        assert one.observation_space == other.observation_space
        assert one.action_space == other.action_space
        for get in ("get_observations", "get_actions", "get_rewards"):
            np.testing.assert_array_equal(getattr(one, get)(), getattr(other, get)(), err_msg=get)
        for name in one.extra_model_outputs:
            np.testing.assert_array_equal(
                one.get_extra_model_outputs(name), other.get_extra_model_outputs(name), err_msg=name
            )


def episodes_of(path: Path) -> Iterator[SingleAgentEpisode]:
    for row in ray.data.read_parquet(str(path)).take_all():
        yield SingleAgentEpisode.from_state(msgpack.unpackb(row["item"], object_hook=msgpack_numpy.decode))


def test_rllibs_own_offline_data_trains_from_the_episodes_that_are_written(tmp_path: Path) -> None:
    record(tmp_path / "own", "CartPole-v1", 20)
    rlio.convert(tmp_path / "own", tmp_path / "episodes", to="rllib-episodes")
    config = offline(BCConfig(), "CartPole-v1").offline_data(
        input_=[str(tmp_path / "episodes")], input_read_episodes=True, input_read_batch_size=5
    )
    assert np.isfinite(losses(config)).all()


def offline(config: Any, env_id: str) -> Any:
    env = gym.make(env_id)
    return (
        config.environment(observation_space=env.observation_space, action_space=env.action_space)
        .training(train_batch_size_per_learner=256)
        .offline_data(dataset_num_iters_per_learner=1)
        .debugging(seed=0)
    )


def losses(config: Any, iterations: int = 3, check: Any = None) -> list[float]:
    algorithm = config.build_algo()
    try:
        if check is not None:
            check(algorithm.offline_data)
        results = [algorithm.train()["learners"]["default_policy"] for _ in range(iterations)]
    finally:
        algorithm.stop()
    return [float(result["total_loss"]) for result in results]


def test_bc_marwil_and_cql_train_from_a_data_set_and_all_rows_are_counted(tmp_path: Path) -> None:
    cql = CQLConfig().training(lr=None, actor_lr=1e-4, critic_lr=1e-4, alpha_lr=1e-4)
    tasks = ((BCConfig(), "CartPole-v1"), (MARWILConfig(), "CartPole-v1"), (cql, "Pendulum-v1"))
    for config, env_id in tasks:
        root = tmp_path / type(config).__name__
        made = record(root, env_id, 4 if env_id == "Pendulum-v1" else 30)
        rows = sum(map(len, made))

        def check(data: Any, rows: int = rows, made: Any = made) -> None:
            assert (data.rows, data.episodes) == (rows, len(made))

        config = offline(config, env_id).offline_data(input_=[str(root)], offline_data_class=RlioOfflineData)
        if isinstance(config, CQLConfig):
            # It asks for an environment, which it does not step, and takes no single batch.
            config = config.environment(env_id).offline_data(dataset_num_iters_per_learner=2)
        if isinstance(config, MARWILConfig) and not isinstance(config, BCConfig):
            config = config.offline_data(postprocess_inputs=True)
        found = losses(config, check=check)
        assert np.isfinite(found).all()


def test_marwils_value_targets_are_the_discounted_returns_of_whole_episodes(tmp_path: Path) -> None:
    made = record(tmp_path / "own", "CartPole-v1", 12)
    gamma = 0.9
    config = (
        offline(MARWILConfig(), "CartPole-v1")
        .training(gamma=gamma, train_batch_size_per_learner=100_000)
        .offline_data(
            input_=[str(tmp_path / "own")], offline_data_class=RlioOfflineData, postprocess_inputs=True
        )
    )
    algorithm = config.build_algo()
    try:
        batch = algorithm.offline_data.sample(num_samples=100_000, num_shards=0)["default_policy"]
    finally:
        algorithm.stop()
    kept = np.asarray(batch["loss_mask"], bool)
    found = np.asarray(batch["value_targets"])[kept]
    expected = []
    for rows in made:  # All end by termination, where nothing is bootstrapped.
        assert rows["terminateds"][-1]
        returns, total = [], 0.0
        for reward in rows["rewards"][::-1]:
            total = reward + gamma * total
            returns.append(total)
        expected += returns[::-1]
    # Prelearners run side by side, so their episodes come in any order.
    np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=1e-4)


@pytest.mark.parametrize(("mode", "envs"), [("truncate_episodes", 2), ("complete_episodes", 1)])
def test_ppo_records_every_step_that_it_samples(mode: str, envs: int, tmp_path: Path) -> None:
    root = tmp_path / "recorded"
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            env_runner_cls=RecordingEnvRunner,
            num_env_runners=1,
            num_envs_per_env_runner=envs,
            batch_mode=mode,
        )
        .offline_data(output=str(root), output_write_episodes=False)
        .training(train_batch_size_per_learner=400, minibatch_size=100, num_epochs=1)
    )
    algorithm = config.build_algo()
    try:
        results = [algorithm.train() for _ in range(2)]
    finally:
        algorithm.stop()
    sampled = int(results[-1]["env_runners"]["num_env_steps_sampled_lifetime"])
    assert int(results[-1]["env_runners"]["rlio_rows_recorded"]) == sampled
    data = rlio.open_dataset(root)
    assert len(data) == sampled >= 800
    env = gym.make("CartPole-v1")
    assert data.spaces == (env.observation_space, env.action_space)
    with rlio.read(root, epochs=1) as reader:
        rows = rlio.concat_samples(list(reader))
    assert {"action_logp", "action_dist_inputs", "weights_seq_no"} <= set(rows)
    for episode in set(rows["eps_id"]):
        own = rows["eps_id"] == episode
        steps = rows["t"][own]
        assert sorted(steps) == list(range(len(steps)))
        assert not (rows["terminateds"] | rows["truncateds"])[own][np.argsort(steps)][:-1].any()
    # And it trains from what was recorded.
    config = offline(BCConfig(), "CartPole-v1").offline_data(
        input_=[str(root)], offline_data_class=RlioOfflineData
    )
    assert np.isfinite(losses(config)).all()


def old_stack(config: Any, env_id: str) -> Any:
    return config.environment(env_id).api_stack(
        enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False
    )


def test_the_old_stack_records_and_trains(tmp_path: Path) -> None:
    root = tmp_path / "recorded"
    config = (
        old_stack(PPOConfig(), "CartPole-v1")
        .env_runners(num_env_runners=0, rollout_fragment_length=100)
        .training(train_batch_size=200, minibatch_size=100, num_epochs=1)
        .offline_data(output=output_creator(root), output_write_episodes=False)
    )
    algorithm = config.build_algo()
    try:
        sampled = algorithm.train()["num_env_steps_sampled_lifetime"]
    finally:
        algorithm.stop()
    assert len(rlio.open_dataset(root)) == sampled > 0
    env = gym.make("CartPole-v1")
    assert rlio.open_dataset(root).spaces == (env.observation_space, env.action_space)
    for config in (BCConfig(), MARWILConfig()):
        config = (
            old_stack(config, "CartPole-v1")
            .training(train_batch_size=100)
            .env_runners(num_env_runners=0)
            .offline_data(input_=input_creator(root), postprocess_inputs=not isinstance(config, BCConfig))
        )
        algorithm = config.build_algo()
        try:
            result = algorithm.train()
        finally:
            algorithm.stop()
        stats = result["info"]["learner"]["default_policy"]["learner_stats"]
        assert np.isfinite(stats["policy_loss"]), json.dumps(stats, default=str)


def test_a_data_set_of_several_writers_is_read_by_tasks_and_serves_every_episode_once(tmp_path: Path) -> None:
    made = [batch for _ in range(3) for batch in record(tmp_path / "own", "CartPole-v1", 5)]
    config = offline(BCConfig(), "CartPole-v1").offline_data(input_=[str(tmp_path / "own")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlio.integrations.rllib_packing, "_packed", None)  # This process reads nothing.
        data = RlioOfflineData(config)
    assert (data.rows, data.episodes) == (sum(map(len, made)), 15)
    found = [
        SingleAgentEpisode.from_state(msgpack.unpackb(row["item"], object_hook=msgpack_numpy.decode))
        for row in data.data.iter_rows()
    ]
    assert len({episode.id_ for episode in found}) == 15
    given = {batch["obs"].tobytes() for batch in made}
    assert {episode.get_observations(slice(0, len(episode))).tobytes() for episode in found} == given


@pytest.mark.parametrize("options", [{}, {"split": ("train", 0.5)}, {"filter": "rewards > 0"}])
def test_a_single_writer_is_read_by_many_tasks_and_each_episode_is_whole(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Six environments take turns, so each shard holds pieces of six episodes; the last ones do not end."""
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 6)
    writer = rlio.ParquetWriter(tmp_path, roll=rlio.Roll(max_rows=97))
    recorder = rlio.RecordVectorExperience(envs, writer)
    recorder.reset(seed=1)
    recorder.action_space.seed(1)
    for _ in range(150):
        recorder.step(recorder.action_space.sample())
    recorder.close()
    dataset = rlio.open_dataset(tmp_path)
    assert len(dataset.segments) > 8
    expected = {
        rows["obs"].tobytes(): len(rows)
        for _, rows in rlio.conversion.episodes.open_episodes(tmp_path, read_options=options)
    }
    config = offline(BCConfig(), "CartPole-v1").offline_data(input_=[str(tmp_path)], input_config=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlio.integrations.rllib_packing, "_packed", None)
        patch.setattr(rlio.integrations.rllib_packing, "_packed_by_writer", None)
        patch.setattr(rlio.dataset.portions, "_LEAST_BYTES", 1)  # Small shards are read by many tasks.
        data = RlioOfflineData(config)
    assert data.data.num_blocks() > 4
    assert (data.rows, data.episodes) == (sum(expected.values()), len(expected))
    found = [
        SingleAgentEpisode.from_state(msgpack.unpackb(row["item"], object_hook=msgpack_numpy.decode))
        for row in data.data.iter_rows()
    ]
    assert len({episode.id_ for episode in found}) == len(expected)
    assert {
        episode.get_observations(slice(0, len(episode))).tobytes(): len(episode) for episode in found
    } == expected


def test_an_error_in_a_task_that_reads_is_raised_where_the_data_is_opened(tmp_path: Path) -> None:
    for number in range(2):
        with rlio.ParquetWriter(tmp_path) as writer:
            writer.write(
                rlio.SampleBatch(
                    obs=np.zeros((2, 4), np.float32), new_obs=np.zeros((2, 4), np.float32),
                    new_obs_valid=np.array([True, number == 0]), actions=np.zeros(2, np.int64),
                    rewards=np.ones(2, np.float32), terminateds=np.array([False, True]),
                    truncateds=np.zeros(2, bool), eps_id=np.full(2, number), t=np.arange(2),
                )
            )  # fmt: skip
    config = offline(BCConfig(), "CartPole-v1").offline_data(input_=[str(tmp_path)])
    with pytest.raises(rlio.errors.SchemaError, match="observation after the last of 2 steps"):
        RlioOfflineData(config)


def test_rows_of_a_killed_runner_are_in_the_data_set_when_the_algorithm_has_stopped(tmp_path: Path) -> None:
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(env_runner_cls=RecordingEnvRunner, num_env_runners=2, rollout_fragment_length=100)
        .fault_tolerance(restart_failed_env_runners=False, ignore_env_runner_failures=True)
        .offline_data(output=str(tmp_path / "recorded"), output_write_episodes=False)
        .training(train_batch_size_per_learner=400, minibatch_size=200, num_epochs=1)
    )
    algorithm = config.build_algo()
    try:
        sampled = int(algorithm.train()["env_runners"]["num_env_steps_sampled_lifetime"])
        (first, _) = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: os.getpid(), local_env_runner=False
        )
        os.kill(first, signal.SIGKILL)
    finally:
        algorithm.stop()
    assert len(rlio.open_dataset(tmp_path / "recorded")) == sampled > 0


def test_a_runner_recovers_what_an_earlier_run_left_before_it_samples(tmp_path: Path) -> None:
    code = """
import os, sys, numpy as np, rlio
writer = rlio.ParquetWriter(sys.argv[1])
writer.write(rlio.SampleBatch(obs=np.zeros((7, 4), np.float32), rewards=np.ones(7, np.float32)))
os._exit(9)
"""
    for made in ("runner", "creator"):
        root = tmp_path / made
        assert subprocess.run([sys.executable, "-c", code, str(root)], check=False).returncode == 9
        assert len(rlio.open_dataset(root)) == 0
        if made == "runner":
            config = PPOConfig().environment("CartPole-v1").offline_data(output=str(root))
            RecordingEnvRunner(config=config).stop()
        else:
            context = types.SimpleNamespace(worker_index=0, worker=None)
            output_creator(root)(context).close()
        assert len(rlio.open_dataset(root)) == 7


class Counting(gym.Env[Any, Any]):
    """The observation is the step's number, and so is the info; an episode has seven steps."""

    observation_space, action_space = gym.spaces.Box(0.0, 9.0, (1,)), gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.t = 0

    def reset(self, **options: Any) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {"came_with": 0}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == 7, False, {"came_with": self.t}


def sampled(output: Any) -> None:
    """Let the old stack sample 40 steps of two environments, and write them."""
    config = (
        old_stack(PPOConfig(), Counting)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2, rollout_fragment_length=10)
        .training(train_batch_size=40, minibatch_size=20, num_epochs=1)
        .offline_data(output=output, output_write_episodes=False)
    )
    algorithm = config.build_algo()
    try:
        algorithm.train()
        writer = algorithm.env_runner.output_writer
        if isinstance(writer, JsonWriter):
            writer.cur_file.close()
    finally:
        algorithm.stop()


def test_infos_that_rllib_recorded_are_those_of_the_next_observation(tmp_path: Path) -> None:
    sampled(str(tmp_path / "json"))
    sampled(output_creator(tmp_path / "own"))
    theirs = next(iter(JsonReader(str(tmp_path / "json")).read_all_files()))["default_policy"]
    assert (theirs["infos"][1], theirs["obs"][1, 0]) == ({"came_with": 1}, 1)
    for name, unknown in (("json", 2), ("own", 4)):
        with rlio.read(tmp_path / name, epochs=1, shuffle=False) as reader:
            rows = rlio.concat_samples([batch.policies()["default_policy"] for batch in reader])
        assert len(rows) >= 40
        ends = rows["terminateds"] | rows["truncateds"]
        known = np.array([info != {} for info in rows["infos"]])
        assert not known[ends].any()
        # The last rows of two environments have no next fragment; the writer has not seen any.
        assert (~known & ~ends).sum() <= unknown
        given = [info["came_with"] for info in rows["infos"][known]]
        assert given == rows["new_obs"][known, 0].tolist()


def test_infos_of_rlio_are_those_of_the_observation_for_rllib(tmp_path: Path) -> None:
    sampled(output_creator(tmp_path / "own"))
    rlio.convert(tmp_path / "own", tmp_path / "json", to="rllib-json", prove=True)
    config = (
        old_stack(MARWILConfig(), Counting)
        .env_runners(num_env_runners=0)
        .training(train_batch_size=20)
        .offline_data(input_=input_creator(tmp_path / "own"), postprocess_inputs=True)
    )
    algorithm = config.build_algo()
    try:
        episodes = [algorithm.env_runner.input_reader.next()]
    finally:
        algorithm.stop()
    for rows in [*JsonReader(str(tmp_path / "json")).read_all_files(), *episodes]:
        for info, obs in zip(rows["infos"], np.asarray(rows["obs"])[:, 0], strict=True):
            assert info in ({}, {"came_with": obs})
        assert sum(info != {} for info in rows["infos"]) >= len(rows) // 2


def test_rllibs_json_reader_reads_a_folder_of_rlio_only_when_it_is_converted(tmp_path: Path) -> None:
    made = record(tmp_path / "parquet", "CartPole-v1", 2)
    with rlio.JsonWriter(tmp_path / "own") as writer:
        for batch in made:
            writer.write(batch)
    with pytest.raises(ValueError, match="Failed to read"):
        JsonReader(str(tmp_path / "own")).next()
    rlio.convert(tmp_path / "own", tmp_path / "json", to="rllib-json", prove=True)
    found = list(JsonReader(str(tmp_path / "json")).read_all_files())
    assert [len(batch) for batch in found] == [len(batch) for batch in made]


def test_parquet_of_rllibs_dataset_writer_is_read(tmp_path: Path) -> None:
    for name, infos in (("flat", [{"a": 0}, {"a": 1}]), ("nested", [{0: {"agent0": {}}}, {"a": 1}])):
        path = tmp_path / name
        config = {"format": "parquet", "path": str(path), "max_num_samples_per_file": 2}
        writer = DatasetWriter(types.SimpleNamespace(output_config=config))
        rows = RllibSampleBatch(
            obs=np.zeros((2, 4), np.float32), actions=np.zeros(2, np.int64), rewards=np.ones(2, np.float32),
            terminateds=np.array([False, True]), eps_id=np.array([5, 5]), infos=np.array(infos, object),
        )  # fmt: skip
        for _ in range(2):
            writer.write(MultiAgentBatch({"p0": rows, "p1": rows}, 2))
        for batch in rlio.read(path, epochs=1, extension_types="storage"):
            assert batch["p0"]["infos"].tolist() == batch["p1"]["infos"].tolist() == [{"a": 1}, {}]
            assert batch["p1"]["obs"].dtype == np.float32


@pytest.mark.parametrize("word", ["dataset", "logdir"])
def test_a_recording_runner_refuses_a_word_that_is_no_path(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(env_runner_cls=RecordingEnvRunner, num_env_runners=0)
        .offline_data(output=word, output_write_episodes=False)
    )
    with pytest.raises(rlio.errors.OptionError, match=rf"found output='{word}'.*'\./{word}'"):
        RecordingEnvRunner(config=config)
    assert not (tmp_path / word).exists()


def test_bc_of_the_best_recorded_episodes_beats_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "init", lambda **options: None)  # `cluster` has started it.
    monkeypatch.setattr("sys.argv", ["rllib_bc.py", str(tmp_path / "out")])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "rllib_bc.py"), run_name="__main__")
    printed = capsys.readouterr().out
    recorded, trained = map(int, re.findall(r"(-?\d+) (?:in|after)", printed.partition("mean return: ")[2]))
    assert trained >= recorded + 100, printed


def test_input_config_selects_episodes_and_ignores_no_option(tmp_path: Path) -> None:
    made = record(tmp_path / "own", "CartPole-v1", 20)
    config = offline(BCConfig(), "CartPole-v1").offline_data(
        input_=[str(tmp_path / "own")],
        input_config={"filter": "episode_return >= 20"},
        offline_data_class=RlioOfflineData,
    )
    best = [len(rows) for rows in made if rows["rewards"].sum() >= 20]
    assert 0 < len(best) < 20
    data = RlioOfflineData(config)
    assert (data.rows, data.episodes) == (sum(best), len(best))
    with pytest.raises(rlio.errors.OptionError):
        RlioOfflineData(config.offline_data(input_config={"normalise": "mean_std"}))
