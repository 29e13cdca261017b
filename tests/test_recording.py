"""`RecordExperience`: your own loop, written down as it was."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from crash_child import fork, wait_for
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import Autoreset
from numpy.testing import assert_array_equal

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


def test_rows_that_could_not_be_written_are_kept() -> None:
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


def test_an_environment_that_is_dropped_leaves_its_rows() -> None:
    writer = Keeping()
    env = RecordExperience(Counter((9,)), writer)
    drive(env, 4)
    del env
    assert len(writer.rows("t")) == 4


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


def test_vector_rows_that_could_not_be_written_are_kept() -> None:
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
