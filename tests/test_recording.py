"""`RecordExperience`: your own loop, written down as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from crash_child import fork, wait_for
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import Autoreset, RecordEpisodeStatistics
from gymnasium.wrappers.vector import DictInfoToList
from gymnasium.wrappers.vector import RecordEpisodeStatistics as VectorStatistics
from numpy.testing import assert_array_equal
from pettingzoo import ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec

import rlio
from rlio import (
    DatasetReader,
    JsonWriter,
    OutputWriter,
    ParquetWriter,
    RecordExperience,
    RecordVectorExperience,
    SampleBatch,
    open_dataset,
)
from rlio.batch import Batch
from rlio.errors import OptionError, PublishError, SchemaError
from rlio.schemas import space_to_json


class Counter(gym.Env[Any, Any]):
    """Observations say (episode, t); episodes end after ``lengths`` steps, by turns terminated and cut."""

    def __init__(self, lengths: tuple[int, ...] = (3, 5, 1), space: gym.Space[Any] | None = None) -> None:
        self.observation_space = space or gym.spaces.Box(-1, 1e6, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(1000)
        self.lengths = lengths
        self.episode = -1
        self._seen = np.zeros(2, np.float32)

    def _obs(self) -> Any:
        self._seen[:] = self.episode, self.t  # One buffer: whoever keeps it must copy.
        return self._seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {"begins": True}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        ends = self.t == self.lengths[self.episode % len(self.lengths)]
        terminated = ends and self.episode % 2 == 0
        return self._obs(), float(action), terminated, ends and not terminated, {"t": self.t}


class Keeping(OutputWriter):
    """Keeps copies of batches, unless it is to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[SampleBatch] = []
        self.fails = False

    def _write(self, batch: Batch) -> None:
        if self.fails:
            raise PublishError("no room")
        assert isinstance(batch, SampleBatch)
        self.batches.append(batch.copy())

    def rows(self, column: str) -> np.ndarray:
        return np.concatenate([batch[column] for batch in self.batches])


def drive(env: gym.Env[Any, Any], steps: int) -> None:
    env.reset(seed=1)
    for number in range(steps):
        *_, terminated, truncated, _ = env.step(number % 1000)
        if terminated or truncated:
            env.reset()


def check(rows: Keeping | SampleBatch, steps: int, lengths: tuple[int, ...]) -> None:
    """Every row is a step of the counter environment, in order."""
    get = rows.rows if isinstance(rows, Keeping) else rows.__getitem__
    episodes, ts = [], []
    while len(ts) < steps:
        number = (episodes[-1] + 1) if episodes else 0
        length = lengths[number % len(lengths)]
        episodes += [number] * length
        ts += range(length)
    episode, t = np.array(episodes[:steps]), np.array(ts[:steps])
    ends = t + 1 == np.array([lengths[number % len(lengths)] for number in episode])
    assert_array_equal(get("obs"), np.stack([episode, t], 1))
    assert_array_equal(get("new_obs"), np.stack([episode, t + 1], 1))
    assert_array_equal(get("t"), t)
    assert_array_equal(get("actions"), np.arange(steps) % 1000)
    assert_array_equal(get("rewards"), np.arange(steps) % 1000)
    assert_array_equal(get("terminateds"), ends & (episode % 2 == 0))
    assert_array_equal(get("truncateds"), ends & (episode % 2 == 1))
    ids = get("eps_id")
    assert_array_equal(ids[1:] == ids[:-1], episode[1:] == episode[:-1])
    assert len(set(ids.tolist())) == len(set(episode.tolist()))


@pytest.mark.parametrize("lengths", [(3, 5, 1), (1,), (100, 700), (256,), (10_000,)])
def test_every_step_is_a_row_whatever_the_lengths(lengths: tuple[int, ...]) -> None:
    writer = Keeping()
    with RecordExperience(Counter(lengths), writer) as env:
        drive(env, 2000)
    check(writer, 2000, lengths)
    assert max(map(len, writer.batches)) <= 256
    assert writer.rows_received == 2000
    assert writer.closed


@pytest.mark.parametrize("kind", [ParquetWriter, JsonWriter])
def test_it_comes_back_from_files(tmp_path: Path, kind: type[ParquetWriter] | type[JsonWriter]) -> None:
    with RecordExperience(Counter(), kind(tmp_path)) as env:
        drive(env, 700)
    batch = DatasetReader(tmp_path, epochs=1, batch_size=700).sample()
    assert isinstance(batch, SampleBatch)
    check(batch, 700, (3, 5, 1))
    assert batch["obs"].dtype == np.float32


def test_a_path_is_a_parquet_data_set_that_knows_its_spaces(tmp_path: Path) -> None:
    with RecordExperience(gym.make("CartPole-v1"), tmp_path) as env:
        drive_cart_pole(env)
    (schema,) = open_dataset(tmp_path).schemas.values()
    (policy,) = schema.policies.values()
    assert policy.spaces is not None
    assert policy.spaces["action"] == space_to_json(gym.spaces.Discrete(2))


def drive_cart_pole(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    for number in range(5):
        env.step(number % 2)


def test_steps_are_passed_on_as_they_are() -> None:
    bare, recorded = gym.make("CartPole-v1"), RecordExperience(gym.make("CartPole-v1"), Keeping())
    for env in (bare, recorded):
        env.reset(seed=3)
    for number in range(8):
        one, other = bare.step(number % 2), recorded.step(number % 2)
        assert_array_equal(one[0], other[0])
        assert one[1:] == other[1:]


def test_an_episode_that_is_left_has_no_end() -> None:
    writer = Keeping()
    with RecordExperience(Counter((9,)), writer) as env:
        env.reset()
        env.step(0)
        env.step(0)
        env.reset()
        env.reset()  # An episode without steps leaves nothing.
        env.step(0)
    assert_array_equal(writer.rows("obs"), [[0, 0], [0, 1], [2, 0]])
    assert_array_equal(writer.rows("new_obs"), [[0, 1], [0, 2], [2, 1]])
    assert not writer.rows("terminateds").any()
    assert not writer.rows("truncateds").any()
    first, second, third = writer.rows("eps_id").tolist()
    assert first == second != third


def test_columns_of_the_policy_belong_to_the_step_that_follows() -> None:
    writer = Keeping()
    with RecordExperience(Counter((2, 3)), writer) as env:
        env.reset()
        for number in range(5):
            env.record(action_logp=-0.5 * number, logits=np.full(3, number, np.float64))
            *_, terminated, truncated, _ = env.step(number)
            if terminated or truncated:
                env.reset()
    assert_array_equal(writer.rows("action_logp"), -0.5 * np.arange(5, dtype=np.float32))
    assert writer.rows("action_logp").dtype == np.float32
    assert_array_equal(writer.rows("logits"), np.repeat(np.arange(5.0), 3).reshape(5, 3))
    assert writer.rows("logits").dtype == np.float64


def test_columns_of_the_policy_are_the_same_at_every_step() -> None:
    env = RecordExperience(Counter((9,)), Keeping())
    env.reset()
    env.record(action_logp=-1.0)
    env.step(0)
    with pytest.raises(SchemaError, match="every step has the same columns"):
        env.step(0)
    env.record(action_logp=-1.0)
    env.step(0)
    env.record(action_logp=np.zeros(2))
    with pytest.raises(SchemaError, match=r"float64 \(2,\), and float32 \(\) before"):
        env.step(0)
    with pytest.raises(OptionError, match="records this column itself"):
        env.record(rewards=1.0)
    other = RecordExperience(Counter((9,)), Keeping())
    other.reset()
    other.step(0)
    other.record(action_logp=-1.0)
    with pytest.raises(SchemaError, match="from the first one on"):
        other.step(0)


def test_infos_are_those_of_the_steps() -> None:
    writer = Keeping()
    with RecordExperience(Counter((2,)), writer, infos=True) as env:
        drive(env, 5)
    assert writer.rows("infos").tolist() == [{"t": 1}, {"t": 2}, {"t": 1}, {"t": 2}, {"t": 1}]


def test_a_step_that_resets_is_no_row() -> None:
    writer = Keeping()
    with RecordExperience(Autoreset(Counter((2, 3))), writer) as env:
        env.reset()
        for number in range(9):
            env.step(number)
    assert_array_equal(writer.rows("obs"), [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]])
    assert_array_equal(writer.rows("new_obs")[:, 1], [1, 2, 1, 2, 3, 1, 2])
    assert_array_equal(writer.rows("actions"), [0, 1, 3, 4, 5, 7, 8])


def test_a_step_without_an_episode_is_refused() -> None:
    env = RecordExperience(Counter((1,)), Keeping())
    with pytest.raises(OptionError, match=r"call reset\(\) first"):
        env.step(0)
    env.reset()
    env.step(0)
    with pytest.raises(OptionError, match="autoreset=True"):
        env.step(0)


def test_nested_spaces_are_nested_columns() -> None:
    space = gym.spaces.Dict(
        where=gym.spaces.Box(0, 9, (2,), np.float32), gear=gym.spaces.Discrete(5), name=gym.spaces.Text(9)
    )

    class Nested(Counter):
        def _obs(self) -> Any:
            return {
                "where": np.full(2, self.t, np.float32),
                "gear": self.t,
                "name": f"{self.episode}-{self.t}",
            }

    writer = Keeping()
    with RecordExperience(Nested((2,), space), writer) as env:
        drive(env, 3)
    # Rows of an episode that took longer than 2 ms are a batch of their own.
    batch = rlio.concat_samples(writer.batches)
    assert_array_equal(batch["obs"]["gear"], [0, 1, 0])
    assert batch["new_obs"]["name"].tolist() == ["0-1", "0-2", "1-1"]


def test_what_does_not_fit_the_space_is_refused() -> None:
    class Broken(Counter):
        def _obs(self) -> Any:
            return np.zeros(3 if self.t == 2 else 2, np.float32)

    env = RecordExperience(Broken((9,)), Keeping())
    env.reset()
    env.step(0)
    with pytest.raises(SchemaError, match=r"float32 \(3,\).*float32 \(2,\)"):
        env.step(0)
    other = RecordExperience(Counter((9,)), Keeping())
    other.reset()
    with pytest.raises(SchemaError, match="actions"):
        other.step(0.5)


class Fragile(Counter):
    """Moves on, and then fails, at one step."""

    def step(self, action: Any) -> Any:
        found = super().step(action)
        if self.t == 3 and self.episode == 0:
            raise ConnectionError("the robot")
        return found


@pytest.mark.parametrize("autoreset", [False, True])
def test_after_a_step_that_fails_no_row_is_made_up(autoreset: bool) -> None:
    """The environment may have moved before it failed: from where the next step starts, nobody has seen."""
    writer = Keeping()
    env = RecordExperience(Fragile((9,)), writer, autoreset=autoreset)
    env.reset()
    for number in range(2):
        env.record(action_logp=-1.0)
        env.step(number)
    env.record(action_logp=-1.0)
    with pytest.raises(ConnectionError):
        env.step(2)
    with pytest.raises(OptionError, match=r"the last step failed.*reset\(\) first"):
        env.step(3)
    env.reset()
    env.record(action_logp=-2.0)
    env.step(7)
    env.close()
    assert_array_equal(writer.rows("obs"), [[0, 0], [0, 1], [1, 0]])
    assert_array_equal(writer.rows("new_obs"), [[0, 1], [0, 2], [1, 1]])
    assert_array_equal(writer.rows("action_logp"), [-1, -1, -2])
    assert not (writer.rows("terminateds") | writer.rows("truncateds")).any()


def test_an_observation_that_does_not_fit_costs_the_two_rows_that_hold_it() -> None:
    class Broken(Counter):
        def _obs(self) -> Any:
            return super()._obs() if (self.episode, self.t) not in ((0, 2), (1, 0)) else np.zeros(3)

    writer = Keeping()
    env = RecordExperience(Broken((9,)), writer)
    env.reset()
    env.step(0)
    with pytest.raises(SchemaError, match=r"float64 \(3,\)"):
        env.step(1)
    with pytest.raises(SchemaError, match="the observation before it"):
        env.step(2)
    env.step(3)
    with pytest.raises(SchemaError):
        env.reset()
    with pytest.raises(OptionError, match="no episode is running"):
        env.step(4)
    env.reset()
    env.step(5)
    env.close()
    assert_array_equal(writer.rows("obs"), [[0, 0], [0, 3], [2, 0]])
    assert_array_equal(writer.rows("new_obs"), [[0, 1], [0, 4], [2, 1]])
    assert_array_equal(writer.rows("t"), [0, 3, 0])
    assert_array_equal(writer.rows("actions"), [0, 3, 5])


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_steps_that_are_not_recorded_are_gaps_wherever_rows_are_written(seed: int) -> None:
    """Observations and rewards that do not fit, episodes that are left, and writes, at any step."""
    rng = np.random.default_rng(seed)

    class Unreliable(Counter):
        bad_obs = bad_reward = False

        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            return (
                np.zeros(3, np.float32) if self.bad_obs else obs,
                "much" if self.bad_reward else reward,
                *rest,
            )

    writer, inner = Keeping(), Unreliable((1, 2, 40))
    env = RecordExperience(inner, writer)
    env.reset()
    expected: list[tuple[int, int]] = []
    seen = True
    for number in range(1500):
        inner.bad_obs, inner.bad_reward = (rng.random(2) < 0.05).tolist()
        row, ends = (inner.episode, inner.t), False
        with suppress(SchemaError):
            *_, terminated, truncated, _ = env.step(number % 1000)
            ends = terminated or truncated
        if seen and not inner.bad_obs and not inner.bad_reward:
            expected.append(row)
        seen = not inner.bad_obs
        if ends or inner.t == inner.lengths[inner.episode % 3] or rng.random() < 0.03:
            env.reset()
            seen = True
        if rng.random() < 0.02:
            env._recorder.write()
    env.close()
    found = np.array(expected)
    assert_array_equal(writer.rows("obs"), found)
    assert_array_equal(writer.rows("new_obs"), np.add(found, [0, 1]))
    assert_array_equal(writer.rows("t"), found[:, 1])
    ids = writer.rows("eps_id")
    assert_array_equal(ids[1:] != ids[:-1], found[1:, 0] != found[:-1, 0])


def test_a_reset_that_fails_half_way_leaves_the_last_rows_observation() -> None:
    """Of an observation a part is written, before the rest is found to be no number."""

    class Half(Counter):
        def _obs(self) -> Any:
            seen = super()._obs()
            return np.array([77, "x"], object) if (self.episode, self.t) == (1, 0) else seen

    writer = Keeping()
    env = RecordExperience(Half((9,)), writer)
    env.reset()
    env.step(0)
    with pytest.raises(SchemaError):
        env.reset()
    env.reset()
    env.step(0)
    env.close()
    assert_array_equal(writer.rows("obs"), [[0, 0], [2, 0]])
    assert_array_equal(writer.rows("new_obs"), [[0, 1], [2, 1]])


def test_tensors_are_recorded_with_and_without_gradients() -> None:
    import torch

    writer = Keeping()
    with RecordExperience(Counter((9,)), writer) as env:
        env.reset()
        for number in range(3):
            logits = torch.full((2,), float(number), requires_grad=True)
            env.record(action_logp=logits.sum(), logits=logits, action=torch.tensor(number))
            env.step(torch.tensor(number))
    assert_array_equal(writer.rows("action_logp"), [0, 2, 4])
    assert writer.rows("action_logp").dtype == np.float32
    assert_array_equal(writer.rows("logits"), [[0, 0], [1, 1], [2, 2]])
    assert_array_equal(writer.rows("actions"), [0, 1, 2])
    other = RecordExperience(Counter((9,)), Keeping())
    other.reset()
    other.record(action_logp=torch.zeros((), dtype=torch.bfloat16))
    with pytest.raises(SchemaError, match=r"(?i)bfloat16.*action_logp"):
        other.step(0)
    with pytest.raises(OptionError, match="of sequences"):
        other.record(seq_lens=1)


def test_rows_that_could_not_be_written_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.recording.recorder._MOST_SECONDS", 3600.0)
    writer = Keeping()
    env = RecordExperience(Counter((10_000,)), writer)
    env.reset()
    writer.fails = True
    for number in range(255):
        env.step(number)
    for number in (255, 256):
        with pytest.raises(PublishError):
            env.step(number)
    writer.fails = False
    env.step(256)
    env.close()
    check(writer, 257, (10_000,))


def test_one_writer_for_several_environments(tmp_path: Path) -> None:
    writer = ParquetWriter(tmp_path)
    envs = [RecordExperience(Counter((4,)), writer, close_writer=False) for _ in range(3)]
    for env in envs:
        drive(env, 10)
    for env in envs:
        env.close()
    assert not writer.closed
    writer.close()
    assert len(DatasetReader(tmp_path, epochs=1, batch_size=30).sample()) == 30


def test_ids_follow_from_the_seed() -> None:
    ids = []
    for seed in (5, 5, 6):
        writer = Keeping()
        with RecordExperience(Counter(), writer, seed=seed) as env:
            drive(env, 20)
        ids.append(writer.rows("eps_id").tolist())
    assert ids[0] == ids[1] != ids[2]
    drawn = np.random.default_rng(5)
    known = dict.fromkeys(ids[0])
    assert [*known] == [drawn.integers(1 << 63) for _ in known], "ids are those of earlier versions"


def test_an_environment_that_is_dropped_leaves_its_rows() -> None:
    writer = Keeping()
    env = RecordExperience(Counter((9,)), writer)
    drive(env, 4)
    del env
    assert len(writer.rows("t")) == 4


@pytest.mark.further
def test_the_end_of_the_interpreter_writes_the_rest(tmp_path: Path) -> None:
    script = """
        import sys, gymnasium as gym, rlio
        env = rlio.RecordExperience(gym.make("CartPole-v1"), sys.argv[1])
        env.reset(seed=0)
        for number in range(7):
            env.step(number % 2)
        sys.exit(3)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), tmp_path], check=False)
    assert done.returncode == 3
    assert len(DatasetReader(tmp_path, epochs=1, batch_size=7).sample()) == 7


def test_a_forked_child_does_not_write_its_parents_rows(tmp_path: Path) -> None:
    env = RecordExperience(Counter((9,)), ParquetWriter(tmp_path))
    drive(env, 4)

    def child() -> None:
        with pytest.raises(PublishError):
            env.flush()

    assert wait_for(fork(child)) == 0
    env.close()
    assert len(DatasetReader(tmp_path, epochs=1, batch_size=7).sample()) == 4


def test_a_crash_takes_no_more_than_the_last_rows(tmp_path: Path) -> None:
    """256 rows: so many may be in no log yet."""
    env_rows = 1000

    def act() -> None:
        env = RecordExperience(Counter((10_000,)), ParquetWriter(tmp_path))
        drive(env, env_rows)
        import os

        os._exit(9)

    assert wait_for(fork(act)) == 9
    with ParquetWriter(tmp_path):
        pass
    found = DatasetReader(tmp_path, epochs=1, batch_size=env_rows).sample()
    assert isinstance(found, SampleBatch)
    assert env_rows - 256 < len(found) <= env_rows
    check(found, len(found), (10_000,))


# ---- vector environments ----


class Fresh(Counter):
    """Gymnasium's vector environments keep final observations as they got them, and reset at once."""

    def _obs(self) -> Any:
        return super()._obs().copy()


def recorded(root: Path, length: int) -> gym.Env[Any, Any]:
    return RecordExperience(Fresh((length,)), root, infos=True)


@pytest.mark.few(1)
@pytest.mark.each_value_once
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_each_environment_of_a_vector_may_record_for_itself(tmp_path: Path, kind: Any, mode: str) -> None:
    """With a writer of its own, in the process where it is made; gymnasium's close() writes the rest."""
    lengths = [3, 4, 50]
    envs = kind(
        [partial(recorded, tmp_path, length) for length in lengths], autoreset_mode=AutoresetMode[mode]
    )
    envs.reset(seed=1)
    for number in range(100):
        envs.step(np.full(3, number))
    envs.close()
    batch = DatasetReader(tmp_path, epochs=1, batch_size=1000).sample()
    assert isinstance(batch, SampleBatch)
    steps = [100 - (100 // (n + 1) if mode == "NEXT_STEP" else 0) for n in lengths]
    assert len(batch) == sum(steps)
    assert_array_equal(batch["new_obs"] - batch["obs"], np.tile([0, 1], (len(batch), 1)))
    assert_array_equal(batch["t"], batch["obs"][:, 1])
    assert_array_equal(batch["rewards"], batch["actions"])
    assert [info["t"] for info in batch["infos"]] == batch["new_obs"][:, 1].tolist()
    for part in batch.split_by_episode():
        assert_array_equal(part["t"], range(len(part)))


def test_a_vector_step_that_fails_makes_up_no_row() -> None:
    writer = Keeping()
    envs = RecordVectorExperience(SyncVectorEnv([partial(Fragile, (9,))] * 2), writer)
    envs.reset()
    for number in range(2):
        envs.step(np.full(2, number))
    with pytest.raises(ConnectionError):
        envs.step(np.full(2, 2))
    with pytest.raises(OptionError, match="the last step failed"):
        envs.step(np.full(2, 3))
    envs.reset()
    envs.record(action_logp=np.zeros(2, np.float32))
    envs.close()
    assert_array_equal(writer.rows("new_obs") - writer.rows("obs"), [[0, 1]] * 4)


MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def vector(
    mode: AutoresetMode, lengths: list[tuple[int, ...]], **options: Any
) -> gym.vector.VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([partial(Fresh, length) for length in lengths], autoreset_mode=mode, **options)


def drive_all(envs: RecordVectorExperience, steps: int, *, also: bool = False) -> None:
    envs.reset(seed=1)
    for number in range(steps):
        if also:
            envs.record(action_logp=np.full(envs.num_envs, number, np.float32))
        _, _, terminated, truncated, _ = envs.step(np.full(envs.num_envs, number % 1000))
        ended = terminated | truncated
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
            envs.reset(options={"reset_mask": ended})


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.each_value_once
def test_vector_environments_in_all_modes(mode: AutoresetMode, copy: bool) -> None:
    lengths = [(3, 5, 1), (1,), (40, 2)]
    writer = Keeping()
    envs = RecordVectorExperience(vector(mode, lengths, copy=copy), writer, infos=True)
    drive_all(envs, 500, also=True)
    envs.close()
    rows = {name: writer.rows(name) for name in writer.batches[0]}
    assert len(rows["t"]) == writer.rows_received
    for env, own in enumerate(lengths):
        mine = {name: values[rows["env_id"] == env] for name, values in rows.items()}
        obs, new_obs = mine["obs"], mine["new_obs"]
        assert_array_equal(new_obs[:, 0], obs[:, 0])
        assert_array_equal(new_obs[:, 1], obs[:, 1] + 1)
        assert_array_equal(mine["t"], obs[:, 1])
        ends = new_obs[:, 1] == np.array(own)[obs[:, 0].astype(int) % len(own)]
        assert_array_equal(mine["terminateds"], ends & (obs[:, 0] % 2 == 0))
        assert_array_equal(mine["truncateds"], ends & (obs[:, 0] % 2 == 1))
        # One after the other, from the first step on; NEXT_STEP spends one on each reset.
        resets = int(ends[:-1].sum()) + int(ends[-1]) * (mine["actions"][-1] < 499)
        assert len(obs) == 500 - (resets if mode is AutoresetMode.NEXT_STEP else 0)
        assert_array_equal(np.diff(obs[:, 0]), ends[:-1])
        assert_array_equal(obs[0], [0, 0])
        assert_array_equal(mine["rewards"], mine["actions"])
        assert_array_equal(mine["action_logp"], mine["actions"])
        assert [info["t"] for info in mine["infos"]] == new_obs[:, 1].tolist()
        assert_array_equal(np.diff(mine["eps_id"]) != 0, np.diff(obs[:, 0]) != 0)


@pytest.mark.parametrize("mode", MODES)
def test_vector_environments_come_back_from_files(tmp_path: Path, mode: AutoresetMode) -> None:
    envs = RecordVectorExperience(vector(mode, [(3,), (4,)]), tmp_path, seed=0)
    drive_all(envs, 300)
    envs.close()
    batch = DatasetReader(tmp_path, epochs=1, batch_size=600).sample()
    assert isinstance(batch, SampleBatch)
    assert_array_equal(batch["new_obs"][:, 1], batch["obs"][:, 1] + 1)
    assert_array_equal(batch["new_obs"][:, 0], batch["obs"][:, 0])
    assert len(batch) == (600 if mode is not AutoresetMode.NEXT_STEP else 225 + 240)


def test_environments_that_are_left_have_no_end() -> None:
    writer = Keeping()
    envs = RecordVectorExperience(vector(AutoresetMode.DISABLED, [(9,), (9,)]), writer)
    envs.reset()
    envs.step(np.zeros(2, np.int64))
    envs.reset(options={"reset_mask": np.array([True, False])})
    envs.step(np.zeros(2, np.int64))
    envs.reset()
    envs.step(np.zeros(2, np.int64))
    envs.close()
    assert_array_equal(writer.rows("obs"), [[0, 0], [1, 0], [2, 0], [0, 0], [0, 1], [1, 0]])
    assert_array_equal(writer.rows("new_obs"), [[0, 1], [1, 1], [2, 1], [0, 1], [0, 2], [1, 1]])
    assert not writer.rows("truncateds").any()


def test_a_vector_step_without_an_episode_is_refused() -> None:
    envs = RecordVectorExperience(vector(AutoresetMode.DISABLED, [(1,), (2,)]), Keeping())
    with pytest.raises(OptionError, match=r"environments \[0, 1\]"):
        envs.step(np.zeros(2, np.int64))
    envs.reset()
    envs.step(np.zeros(2, np.int64))
    with pytest.raises(OptionError, match=r"environments \[0\].*reset_mask"):
        envs.step(np.zeros(2, np.int64))


def test_vector_rows_that_could_not_be_written_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.recording.recorder._MOST_SECONDS", 3600.0)
    writer = Keeping()
    envs = RecordVectorExperience(vector(AutoresetMode.SAME_STEP, [(9000,)] * 2), writer)
    envs.reset()
    writer.fails = True
    for number in range(127):
        envs.step(np.full(2, number))
    with pytest.raises(PublishError):
        envs.step(np.full(2, 127))  # Which was taken: 128 steps of two wait in vain, and there is room again.
    for number in range(128, 255):
        envs.step(np.full(2, number))
    for _ in range(2):
        with pytest.raises(PublishError):
            envs.step(np.full(2, 255))
    writer.fails = False
    envs.step(np.full(2, 256))
    envs.close()
    for env in range(2):
        assert_array_equal(writer.rows("t")[writer.rows("env_id") == env], np.arange(257))


def test_seeds_are_those_that_reset_was_given() -> None:
    writer = Keeping()
    with RecordExperience(Counter((2,)), writer, seeds=True) as env:
        for seed in (7, None, 9):
            env.reset(seed=seed)
            env.step(0)
            env.step(0)
    assert writer.rows("env_seed").tolist() == [7, 7, -1, -1, 9, 9]
    assert writer.rows("env_seed").dtype == np.int64


@pytest.mark.parametrize(("seed", "first"), [(5, [5, 6]), ([8, None], [8, -1]), (None, [-1, -1])])
def test_seeds_of_vector_environments_are_those_of_each(seed: Any, first: list[int]) -> None:
    writer = Keeping()
    envs = RecordVectorExperience(vector(AutoresetMode.SAME_STEP, [(2,), (2,)]), writer, seeds=True)
    envs.reset(seed=seed)
    for _ in range(3):
        envs.step(np.zeros(2, np.int64))
    envs.close()
    for env in range(2):
        assert writer.rows("env_seed")[writer.rows("env_id") == env].tolist() == [first[env]] * 2 + [-1]


@pytest.mark.parametrize("several", [False, True], ids=["one", "vector"])
def test_a_seed_given_to_record_does_not_overwrite_that_of_the_reset(several: bool) -> None:
    """``record(env_seed=99)`` replaced the seeds of all rows in silence."""

    def made(writer: Any, **options: Any) -> Any:
        if several:
            envs = vector(AutoresetMode.SAME_STEP, [(2,), (2,)])
            return RecordVectorExperience(envs, writer, **options), np.zeros(2, np.int64), np.array([99, 99])
        return RecordExperience(Counter((2,)), writer, **options), 0, 99

    writer = Keeping()
    env, action, given = made(writer, seeds=True)
    env.reset(seed=7)
    with pytest.raises(OptionError):
        env.record(env_seed=given)
    env.step(action)
    env.close()
    assert writer.rows("env_seed")[0] == 7
    other = Keeping()
    env, action, given = made(other)  # No seeds are recorded: the column is the caller's.
    env.reset(seed=7)
    env.record(env_seed=given)
    env.step(action)
    env.close()
    assert set(other.rows("env_seed").tolist()) == {99}


def test_storage_options_reach_the_filesystem_and_are_refused_beside_a_writer(tmp_path: Path) -> None:
    options = {"rlio_retries": 2}
    one = partial(gym.make, "CartPole-v1")
    for wrap in (
        lambda **given: rlio.RecordExperience(one(), **given),
        lambda **given: rlio.RecordVectorExperience(SyncVectorEnv([one]), **given),
    ):
        with pytest.raises(OptionError):
            wrap(writer=str(tmp_path / "a"), storage_options={"no_such_option_of_a_local_disk": 1})
        env = wrap(writer=str(tmp_path / "b"), storage_options=options)
        env.reset(seed=0)
        env.step(env.action_space.sample())
        env.close()
        with rlio.ParquetWriter(tmp_path / "c") as writer, pytest.raises(OptionError):
            wrap(writer=writer, storage_options=options)
    assert len(rlio.open_dataset(tmp_path / "b")) == 2


# ---- flush, close, and the root ----


def test_flush_publishes(tmp_path: Path) -> None:
    env = RecordExperience(Counter((9,)), tmp_path)
    drive(env, 4)
    env.flush()
    assert len(open_dataset(tmp_path)) == 4
    vector = RecordVectorExperience(SyncVectorEnv([Counter, Counter]), tmp_path)
    vector.reset()
    vector.step(np.zeros(2, int))
    vector.flush()
    assert len(open_dataset(tmp_path)) == 6
    env.close()
    vector.close()


def test_a_vector_recorder_closes_at_the_end_of_its_with_block(tmp_path: Path) -> None:
    with RecordVectorExperience(SyncVectorEnv([Counter, Counter]), tmp_path) as envs:
        envs.reset()
        envs.step(np.zeros(2, int))
    assert envs.writer.closed
    assert len(open_dataset(tmp_path)) == 2

    def fails() -> None:
        with RecordVectorExperience(SyncVectorEnv([Counter]), tmp_path) as envs:
            envs.reset()
            envs.step(np.zeros(1, int))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(open_dataset(tmp_path)) == 3


class Stubborn(Counter):
    def close(self) -> None:
        raise ConnectionError("the robot does not answer")


@pytest.mark.parametrize("several", [False, True])
def test_close_closes_the_writer_whatever_happened_before(tmp_path: Path, several: bool) -> None:
    writer = Keeping()
    env: Any
    if several:
        env = RecordVectorExperience(SyncVectorEnv([Counter]), writer)
    else:
        env = RecordExperience(Stubborn((9,)), writer)
    env.reset()
    env.step(np.zeros(1, int) if several else 0)
    writer.fails = True
    with pytest.raises(PublishError, match="no room") as raised:
        env.close()
    assert writer.closed
    if not several:
        assert "the robot" in raised.value.__notes__[0]
    # With the writer closed, nothing is written any more.
    with pytest.raises(ConnectionError) if not several else nullcontext():
        env.close()


def test_a_root_that_vanished_is_an_error_and_is_not_made_again(tmp_path: Path) -> None:
    for before in (0, 300):
        root = tmp_path / f"run{before}"
        env = RecordExperience(Counter((100,)), root)
        drive(env, before + 5)
        if before:
            env.flush()
        shutil.rmtree(root)
        # (A step writes rows to the log, which is gone with the root.)
        with suppress(PublishError):
            drive(env, 300)
        with pytest.raises(PublishError):
            env.close()
        assert not root.exists()
        env.writer._closed = True  # Else it is tried again at exit.


def test_a_root_that_is_mounted_again_gets_the_rows(tmp_path: Path) -> None:
    root, away = tmp_path / "run", tmp_path / "away"
    env = RecordExperience(Counter((9,)), root)
    drive(env, 9)
    root.rename(away)
    with pytest.raises(PublishError):
        env.flush()
    assert not root.exists()
    away.rename(root)
    env.close()
    assert len(open_dataset(root)) == 9


def test_a_new_recording_refuses_a_root_with_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def write() -> None:
        with rlio.ParquetWriter(tmp_path) as writer:
            writer.write(rlio.SampleBatch(t=[0, 1]))

    assert wait_for(fork(write)) == 0  # Another process has written there.
    with pytest.raises(OptionError, match=r"mode='new'.*holds 2 rows.*mode='append'"):
        RecordExperience(Counter(), tmp_path, mode="new")
    with pytest.raises(OptionError, match="holds 2 rows"):
        RecordVectorExperience(SyncVectorEnv([Counter]), tmp_path, mode="new")
    assert [path.name for path in (tmp_path / "data").iterdir()] == [
        path.name for path in (tmp_path / "data").iterdir() if list(path.iterdir())
    ], "a refused recorder leaves no writer"
    caplog.clear()
    for _ in range(2):
        RecordExperience(Counter(), tmp_path).close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} holds 2 rows: new rows are added to them (mode='append')"
    ]


def test_a_new_recording_may_have_several_recorders_in_one_process(tmp_path: Path) -> None:
    for _ in range(3):
        with RecordExperience(Counter((9,)), tmp_path / "run", mode="new") as env:
            drive(env, 4)
    assert len(open_dataset(tmp_path / "run")) == 12


@pytest.mark.parametrize(
    ("mode", "writer", "message"),
    [("neu", "run", "expected 'append' or 'new'"), ("new", Keeping(), "pass the path or URL")],
)
def test_modes_are_those_of_roots(tmp_path: Path, mode: Any, writer: Any, message: str) -> None:
    given = tmp_path / writer if isinstance(writer, str) else writer
    with pytest.raises(OptionError, match=message):
        RecordExperience(Counter(), given, mode=mode)


def test_a_new_recording_refuses_rows_that_wait_in_a_log(tmp_path: Path) -> None:
    def die() -> None:
        rlio.ParquetWriter(tmp_path).write(rlio.SampleBatch(t=[0, 1]))
        os._exit(5)

    assert wait_for(fork(die)) == 5
    with pytest.raises(OptionError, match="no rows, but rows wait in one log"):
        RecordExperience(Counter(), tmp_path, mode="new")


@pytest.mark.parametrize(
    ("env", "advice"),
    [
        (lambda: SyncVectorEnv([Counter]), "RecordVectorExperience"),
        (lambda: pistonball_like(), "RecordParallelEnv"),
        (lambda: parallel_to_aec(pistonball_like()), "RecordAECEnv"),
        (lambda: object(), "expected a gymnasium environment"),
    ],
    ids=["vector", "parallel", "AEC", "other"],
)
def test_an_environment_of_another_kind_is_sent_to_its_recorder(env: Any, advice: str) -> None:
    with pytest.raises(OptionError, match=advice):
        RecordExperience(env(), Keeping())


def test_a_vector_recorder_refuses_one_environment() -> None:
    with pytest.raises(OptionError, match=r"rlio\.RecordExperience"):
        RecordVectorExperience(Counter(), Keeping())  # type: ignore[arg-type]


def pistonball_like() -> Any:
    class Pistons(ParallelEnv):  # type: ignore[misc,type-arg]
        metadata = {"name": "pistons_v0"}  # noqa: RUF012
        possible_agents = ["a"]  # noqa: RUF012

        def observation_space(self, agent: str) -> Any:
            return gym.spaces.Discrete(3)

        action_space = observation_space

    return Pistons()


# ---- vector environments ----


def test_the_autoreset_mode_is_that_of_this_environment() -> None:
    """Up to gymnasium 1.2, a newer environment of the class writes its mode into shared metadata."""
    for mode, other in ((AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP), (AutoresetMode.NEXT_STEP, None)):
        writer = Keeping()
        envs = SyncVectorEnv([lambda: Fresh((3,))], autoreset_mode=mode)
        newer = SyncVectorEnv([Counter], autoreset_mode=other or AutoresetMode.SAME_STEP)
        envs.metadata = newer.metadata
        with RecordVectorExperience(envs, writer) as recorder:
            recorder.reset()
            for _ in range(8):
                recorder.step(np.zeros(1, int))
        rows = np.column_stack([writer.rows("obs"), writer.rows("new_obs")]).astype(int).tolist()
        assert rows == [[e, t, e, t + 1] for e in range(3) for t in range(3)][: len(rows)]
        assert len(rows) == (8 if mode is AutoresetMode.SAME_STEP else 6)


WAYS_TO_KEEP_INFOS: dict[str, Any] = {
    "recorder": lambda envs: recorded_infos(envs),
    "runner": lambda envs: runner_infos(envs),
}


def recorded_infos(envs: Any) -> list[dict[str, Any]]:
    writer = Keeping()
    with RecordVectorExperience(envs, writer, infos=True) as recorder:
        recorder.reset()
        for _ in range(8):
            recorder.step(np.zeros(2, int))
            if recorder._stepper.is_reset_by_caller and not recorder._running.all():
                recorder.reset(options={"reset_mask": ~recorder._running})
    ends = writer.rows("terminateds") | writer.rows("truncateds")
    return list(writer.rows("infos")[ends])


def runner_infos(envs: Any) -> list[dict[str, Any]]:
    config = rlio.RolloutConfig(rollout_fragment_length=8, record_infos=True)
    runner = rlio.EnvRunner(envs, rlio.RandomPolicy(), config=config, seed=0)
    batch = runner.run()
    runner.stop()
    return list(batch["infos"][batch["dones"]])


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("way", WAYS_TO_KEEP_INFOS)
@pytest.mark.parametrize("around", ["each environment", "all environments", "a list of infos"])
def test_the_infos_of_the_last_step_are_kept(mode: AutoresetMode, way: str, around: str) -> None:
    """`RecordEpisodeStatistics` adds the totals of an episode to them."""
    each = (lambda: RecordEpisodeStatistics(Counter((3,)))) if around == "each environment" else partial(
        Counter, (3,)
    )  # fmt: skip
    envs: Any = SyncVectorEnv([each, each], autoreset_mode=mode)
    if around != "each environment":
        envs = VectorStatistics(envs)
    if around == "a list of infos":
        envs = DictInfoToList(envs)
    found = WAYS_TO_KEEP_INFOS[way](envs)
    assert len(found) >= 4
    # Gymnasium 1.2 does not count the first step of the later episodes.
    counts_less = gym.__version__.startswith("1.2.") and around != "each environment"
    shortest = 2 if counts_less and mode is AutoresetMode.SAME_STEP else 3
    for info in found:
        assert info["t"] == 3, "of the step, not of the reset"
        assert "begins" not in info
        assert shortest <= info["episode"]["l"] <= 3


class Tensor(torch.Tensor):
    """A tensor that counts its transfers to the host."""

    transfers = 0

    @staticmethod
    def of(value: Any) -> Tensor:
        made = torch.as_tensor(np.array(value)).as_subclass(Tensor)
        assert isinstance(made, Tensor)
        return made

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        Tensor.transfers += 1
        return super().cpu(*args, **kwargs).as_subclass(torch.Tensor)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a device tensor to numpy: use Tensor.cpu() first")

    __array__ = numpy


class Foreign:
    """An array of another library, such as JAX, which NumPy converts."""

    def __init__(self, value: Any) -> None:
        self.value, self.transfers = np.array(value), 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        Tensor.transfers += 1
        return self.value if dtype is None else self.value.astype(dtype)


@pytest.mark.parametrize("kind", [Tensor.of, Foreign], ids=["torch", "another library"])
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_arrays_of_a_device_are_copied_once_a_step_and_column(mode: AutoresetMode, kind: Any) -> None:
    class Device(VectorWrapper):
        def reset(self, **options: Any) -> Any:
            obs, infos = self.env.reset(**options)
            return {"a": kind(obs), "b": (kind(obs[:, 0]),)}, infos

        def step(self, actions: Any) -> Any:
            obs, *flags, infos = self.env.step(np.asarray(actions.detach().clone().as_subclass(torch.Tensor)))
            if "final_obs" in infos:
                finals = np.array([[0, 0] if row is None else row for row in infos["final_obs"]], np.float32)
                infos["final_obs"] = {"a": kind(finals), "b": (kind(finals[:, 0]),)}
            infos = {**infos, "speed": kind(obs[:, 1])}
            return {"a": kind(obs), "b": (kind(obs[:, 0]),)}, *map(kind, flags), infos

    box = gym.spaces.Box(-1, 1e6, (2,), np.float32)
    single = gym.spaces.Dict(a=box, b=gym.spaces.Tuple((gym.spaces.Box(-1, 1e6, (), np.float32),)))
    envs = Device(SyncVectorEnv([lambda: Fresh((3,))] * 2, autoreset_mode=mode))
    envs.single_observation_space = single
    envs.observation_space = batch_space(single, 2)
    writer = Keeping()
    with RecordVectorExperience(envs, writer, infos=True) as recorder:
        recorder.reset()
        for number in range(9):
            Tensor.transfers = 0
            recorder.step(torch.tensor([number, number]))
            # Two leaves, rewards, two flags, one key of the infos; two leaves of final observations.
            ends = mode is AutoresetMode.SAME_STEP and number % 3 == 2
            assert Tensor.transfers == (8 if ends else 6)
            if recorder._stepper.is_reset_by_caller and not recorder._running.all():
                recorder.reset(options={"reset_mask": ~recorder._running})
    batch = rlio.concat_samples(writer.batches)
    assert type(batch["obs"]["a"]) is np.ndarray
    assert_array_equal(batch["new_obs"]["a"][:, 1], batch["t"] + 1)
    assert_array_equal(batch["new_obs"]["b"][0], batch["obs"]["a"][:, 0])
    assert_array_equal(batch["rewards"], batch["actions"])
    if mode is not AutoresetMode.SAME_STEP:
        assert [info["speed"] for info in batch["infos"]] == (batch["t"] + 1).tolist()
