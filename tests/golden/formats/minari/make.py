"""Writes the data sets beside this file with Minari itself (0.5.4): `python make.py`.

Observation t of episode e holds 100 e + t, action and reward t of it 100 e + t + 0.5. `cart` is CartPole.
"""

import os
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np

HERE = Path(__file__).parent
os.environ["MINARI_DATASETS_PATH"] = str(HERE)

import minari  # noqa: E402
from minari.data_collector import EpisodeBuffer  # noqa: E402

LENGTHS, SEEDS = (3, 2), (7, None)
spaces = gym.spaces
NESTED = (
    spaces.Dict(
        position=spaces.Box(-np.inf, np.inf, (2,), np.float32),
        mode=spaces.Discrete(5, start=-1),
        name=spaces.Text(8),
        pair=spaces.Tuple((spaces.Box(0, 1000, (1, 2), np.float64), spaces.MultiBinary(2))),
    ),
    spaces.Tuple((spaces.Box(-1000, 1000, (), np.float32), spaces.MultiDiscrete([3, 4]))),
)
IMAGES = (spaces.Box(0, 255, (32, 40, 3), np.uint8), spaces.Discrete(9))


def nested(first, steps):
    obs = np.arange(first, first + steps + 1)
    act = obs[:-1] + 0.5
    observations = {
        "position": np.stack([obs, -obs], 1).astype(np.float32),
        "mode": obs % 4 - 1,
        "name": [f"at{n}" for n in obs],
        "pair": (
            np.stack([obs, obs + 0.25], 1)[:, None],
            np.stack([obs % 2, 1 - obs % 2], 1).astype(np.int8),
        ),
    }
    return observations, (act.astype(np.float32), np.stack([obs[:-1] % 3, obs[:-1] % 4], 1))


def images(first, steps):
    rows = np.arange(first, first + steps + 1, dtype=np.uint8)
    flat = np.ones((steps + 1, 32, 40, 3), np.uint8) * rows[:, None, None, None]
    return flat, np.arange(steps)


def write(name, pair, make, data_format, **options):
    buffers = []
    for episode, (steps, seed) in enumerate(zip(LENGTHS, SEEDS, strict=True)):
        first = 100 * episode
        observations, actions = make(first, steps)
        ends = np.zeros((2, steps), bool)
        ends[episode % 2, -1] = True
        buffers.append(
            EpisodeBuffer(
                id=None,
                seed=seed,
                options={"level": episode},
                observations=observations,
                actions=actions,
                rewards=np.arange(first, first + steps) + 0.5,
                terminations=ends[0],
                truncations=ends[1],
                infos={"near": np.ones((steps + 1, 2))} if make is images else {},
            )
        )
    shutil.rmtree(HERE / name, ignore_errors=True)
    minari.create_dataset_from_buffers(
        name,
        buffers,
        env=gym.spec("CartPole-v1"),
        algorithm_name="counting",
        author="rlio",
        author_email="rlio@example.org",
        code_permalink="https://example.org",
        description="counts",
        observation_space=pair[0],
        action_space=pair[1],
        data_format=data_format,
        **options,
    )


def collect(name):
    env = minari.DataCollector(gym.make("CartPole-v1", max_episode_steps=6))
    for seed in (3, 4):
        env.reset(seed=seed)
        end = False
        while not end:
            _, _, *ends, _ = env.step(seed % 2)
            end = any(ends)
    shutil.rmtree(HERE / name, ignore_errors=True)
    env.create_dataset(name)


if __name__ == "__main__":
    collect("cart/collected-v0")
    for kind in ("hdf5", "arrow", "parquet"):
        write(f"nested/{kind}-v0", NESTED, nested, kind)
    write("images/jpeg-v0", IMAGES, images, "hdf5")
    write("images/jpeg-arrow-v0", IMAGES, images, "arrow")
    write("images/raw-v0", IMAGES, images, "hdf5", jpeg_encoding=False)
