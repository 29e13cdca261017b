"""Writes the files beside it: `python make.py`, with ray[rllib]==2.60.0, torch and msgpack-numpy.

`cartpole/`: RLlib's recorder runs CartPole with random actions. Its `sample()` is called twice; in the folder
of the second call it writes the episodes of the first call again. `nested/` and `chunks/` hold states of
`SingleAgentEpisode` that were packed as the recorder packs them: observations that are a Dict with a Tuple in
it, and the two chunks of one episode that was cut.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import gymnasium as gym
import msgpack
import msgpack_numpy
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.offline.offline_env_runner import OfflineSingleAgentEnvRunner

HERE = Path(__file__).resolve().parent


class Parts(gym.Env):
    """Counts steps in nested observations, and ends by truncation after four."""

    def __init__(self, config: object = None) -> None:
        spaces = gym.spaces
        self.observation_space = spaces.Dict(
            at=spaces.Box(-100, 100, (2,), np.float32),
            both=spaces.Tuple((spaces.Discrete(50), spaces.MultiBinary(3))),
        )
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def _observation(self) -> dict:
        at = np.array([self.t, -self.t], np.float32)
        return {"at": at, "both": (np.int64(self.t), np.array([1, 0, self.t % 2], np.int8))}

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple:
        self.t = 0
        return self._observation(), {"at": 0}

    def step(self, action: object) -> tuple:
        self.t += 1
        return self._observation(), float(self.t), False, self.t == 4, {"at": self.t}


def record_cartpole() -> None:
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, batch_mode="complete_episodes")
        .offline_data(output=str(HERE / "cartpole"), output_write_episodes=True)
        .debugging(seed=3)
    )
    runner = OfflineSingleAgentEnvRunner(config=config, worker_index=1)
    for _ in range(2):
        runner.sample(num_episodes=2, random_actions=True)
    runner.stop()


def write(folder: str, episodes: list[SingleAgentEpisode]) -> None:
    packed = [msgpack.packb(one.get_state(), default=msgpack_numpy.encode) for one in episodes]
    (HERE / folder).mkdir()
    pq.write_table(pa.table({"item": pa.array(packed, pa.binary())}), HERE / folder / "episodes.parquet")


def nested_episodes() -> None:
    env, episodes = Parts(), []
    for number in range(2):
        episode = SingleAgentEpisode(
            id_=f"nested-{number}", observation_space=env.observation_space, action_space=env.action_space
        )
        episode.add_env_reset(*env.reset())
        while not episode.is_done:
            action = np.array([episode.t / 10], np.float32)
            observation, reward, terminated, truncated, info = env.step(action)
            episode.add_env_step(
                observation,
                action,
                reward,
                info,
                terminated=terminated,
                truncated=truncated,
                extra_model_outputs={"action_logp": np.float32(-episode.t)},
            )
        episodes.append(episode)
    write("nested", episodes)


def cut_episode() -> None:
    episode = SingleAgentEpisode(
        id_="cut", observation_space=gym.spaces.Discrete(99), action_space=gym.spaces.Discrete(99)
    )
    episode.add_env_reset(0)
    chunks = []
    for t in range(7):
        episode.add_env_step(t + 1, t, float(t), terminated=t == 6)
        if t == 2 or t == 6:
            following = episode.cut(len_lookback_buffer=2) if t == 2 else None
            # As numpy arrays, and as the lists that the recorder leaves.
            chunks.append(episode.to_numpy() if t == 2 else episode)
            episode = following
    write("chunks", chunks)


if __name__ == "__main__":
    for name in ("cartpole", "nested", "chunks"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    ray.init(num_cpus=2, include_dashboard=False)
    record_cartpole()
    nested_episodes()
    cut_episode()
