"""Atari games: prepared as DQN's paper has it, recorded with each frame once, and counted as whole games.

Rows of RLlib's tables: "preprocessor_pref" ("deepmind"), "Atari metrics".
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TransformReward

from rlio import DatasetReader, ParquetWriter, RandomPolicy, RolloutConfig, SampleBatch, concat_samples
from rlio.envs import atari
from rlio.envs.atari import AtariOptions, make_atari
from rlio.envs.games import GAME
from rlio.errors import MissingExtra, OptionError
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.env_runner import EnvRunner

pytest.importorskip("ale_py")
pytest.importorskip("cv2")


class Lives(gym.Env[Any, Any]):
    """A game of ``lives`` lives of ``length`` steps; each step is worth 10 points, the last of a life 100."""

    observation_space = Box(0, 255, (2,), np.uint8)
    action_space = Discrete(3)

    def __init__(self, lives: int = 3, length: int = 4, limit: int = 10**9) -> None:
        self._start, self._length, self._limit = lives, length, limit
        self.ale, self.games, self.left = self, 0, lives

    def lives(self) -> int:
        return self.left

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE", "UP"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.games, self.left, self.t, self.steps = self.games + 1, self._start, 0, 0
        return np.array([self.left, 0], np.uint8), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.steps += 1
        reward = 10.0
        if self.t == self._length:
            self.left, self.t, reward = self.left - 1, 0, 100.0
        obs = np.array([self.left, self.t], np.uint8)
        return obs, reward, self.left == 0, self.steps >= self._limit, {}


def lives_and_games(**options: Any) -> gym.Env[Any, Any]:
    made = atari._EpisodicLife(atari._CountGames(Lives(**options)))
    return TransformReward(made, lambda reward: float(np.sign(reward)))


def test_a_lost_life_ends_an_episode_and_the_game_goes_on() -> None:
    env = lives_and_games()
    env.reset(seed=0)
    ends, told = [], []
    for steps in range(1, 13):
        obs, reward, terminated, truncated, info = env.step(2)
        assert reward == 1.0
        assert not truncated
        if terminated:
            ends.append((steps, int(obs[0])))
            told.append(info[GAME])
            env.reset()
    game: Any = env.unwrapped
    # The second and third life begin with a step without action.
    assert ends == [(4, 2), (7, 1), (10, 0)]
    assert told == [None, None, (9 * 10 + 3 * 100, 12)]
    assert game.games == 2


def test_a_game_that_ends_between_two_lives_is_told_with_the_next() -> None:
    env = lives_and_games(limit=5)
    env.reset()
    told = []
    for _ in range(8):
        *_, terminated, truncated, info = env.step(2)
        if terminated or truncated:
            told.append(info[GAME])
            env.reset()
    # Four steps, a step without action at which time is up, and the first life of the next game.
    assert told == [None, (140.0, 5)]


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["sync", "async", "given"])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.each_value_once
def test_metrics_are_of_whole_games_and_not_of_lives_or_clipped_rewards(mode: Any, hooked: bool) -> None:
    """Row "Atari metrics": returns and lengths of games; custom metrics come with them."""

    class Custom(Callbacks):
        def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
            episode.custom_metrics["length_of_life"] = episode.length

    env: Any = lives_and_games
    if mode == "given":
        env = SyncVectorEnv([lives_and_games] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    config = RolloutConfig(
        num_envs=2, rollout_fragment_length=20, vectorize_mode=mode.replace("given", "sync")
    )
    runner = EnvRunner(env, RandomPolicy(), config=config, callbacks=Custom() if hooked else None, seed=0)
    batch = runner.run()
    summary = runner.get_metrics().summarise()
    runner.stop()
    assert set(batch["rewards"].tolist()) == {1.0}
    assert batch["terminateds"].sum() == 12
    assert summary["episodes_this_iter"] == 4
    assert summary["episode_return_min"] == summary["episode_return_max"] == 390.0
    assert summary["episode_len_mean"] == 12
    if hooked:
        assert summary["custom_metrics"]["length_of_life_mean"] == 3


def test_fire_begins_each_life() -> None:
    pressed: list[int] = []

    class Watched(Lives):
        def step(self, action: Any) -> Any:
            pressed.append(int(action))
            return super().step(action)

    env = atari._FireReset(atari._EpisodicLife(atari._CountGames(Watched())))
    env.reset()
    for _ in range(3):
        env.step(2)
    env.reset()
    assert pressed == [1, 2, 2, 2, 0, 1]


def test_pong_is_prepared_as_usual() -> None:
    env = make_atari("ALE/Pong-v5", render_mode="rgb_array")
    assert env.observation_space == Box(0, 255, (4, 84, 84), np.uint8)
    first, _ = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    assert (first == again).all()
    assert (first == first[:1]).all()
    second, *_ = env.step(0)
    assert (second[:3] == first[1:]).all()
    assert env.render().shape == (210, 160, 3)  # type: ignore[union-attr]
    env.close()
    plain = make_atari("ALE/Pong-v5", AtariOptions(frame_stack=1, grayscale=False, screen_size=32))
    assert plain.observation_space.shape == (32, 32, 3)
    plain.close()


@pytest.mark.further
def test_breakout_loses_lives() -> None:
    env = make_atari("ALE/Breakout-v5", AtariOptions(sticky=0.0, noop_max=0))
    env.reset(seed=0)
    told = []
    for _ in range(400):
        *_, terminated, truncated, info = env.step(0)
        if terminated or truncated:
            told.append(info[GAME])
            env.reset()
            if told[-1] is not None:
                break
    assert told[:4] == [None] * 4
    assert told[4].length >= 5
    env.close()


@pytest.mark.further
def test_stacks_of_pong_are_recorded_with_each_frame_once(tmp_path: Path) -> None:
    config = RolloutConfig(num_envs=2, rollout_fragment_length=50)
    runner = EnvRunner(partial(make_atari, "ALE/Pong-v5"), RandomPolicy(), config=config, seed=1)
    sampled = []
    with ParquetWriter(tmp_path / "out", spool=None) as writer:
        for _ in range(4):
            batch = runner.run()
            writer.write(batch)
            sampled.append(batch)
    runner.stop()
    batch = concat_samples(sampled)
    assert len(batch) == 400
    assert_stacked(batch)
    stored = concat_samples(list(DatasetReader(tmp_path / "out", epochs=1)))
    for name in ("obs", "new_obs", "actions", "rewards", "terminateds", "t"):
        assert np.array_equal(stored[name], batch[name]), name
    # Of the 8 frames of a row, those of obs and new_obs, one is stored; others where an episode is cut.
    tables = [pq.read_table(file) for file in (tmp_path / "out").rglob("*.parquet")]
    assert sum(table.num_rows for table in tables) == 400
    older = sum(len(table["obs#older"]) - table["obs#older"].null_count for table in tables)
    assert 1 <= older <= 8
    assert sum(file.stat().st_size for file in (tmp_path / "out").rglob("*.parquet")) < 84 * 84 * 400


def assert_stacked(batch: SampleBatch) -> None:
    """Consecutive rows share all frames but one."""
    obs, new_obs = batch["obs"], batch["new_obs"]
    assert obs.dtype == np.uint8
    assert obs.shape[1:] == (4, 84, 84)
    assert (new_obs[:, :3] == obs[:, 1:]).all()
    follows = (batch["eps_id"][1:] == batch["eps_id"][:-1]) & (batch["env_id"][1:] == batch["env_id"][:-1])
    assert follows.sum() > 300
    assert (obs[1:][follows] == new_obs[:-1][follows]).all()


def test_what_is_missing_is_said_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ale_py", "cv2"):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, module, None)
            with pytest.raises(MissingExtra, match=r"rlio\[atari\]"):
                make_atari("ALE/Pong-v5")


def test_options_say_what_is_wrong_with_them() -> None:
    for options, message in (({"frame_stack": 0}, "frame_stack=0"), ({"sticky": 1.0}, "sticky=1.0")):
        with pytest.raises(OptionError, match=message):
            AtariOptions(**options)  # type: ignore[arg-type]
