"""Writes the fixtures of Tianshou: `python make.py` with tianshou 0.5.1 installed.

Observation, action and reward of a step say its number; the buffers are full and have wrapped around.
"""

from pathlib import Path

import numpy as np
from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer, VectorReplayBuffer

FOLDER = Path(__file__).parent


def step(number: int, t: int, *, terminated: bool, truncated: bool, info: dict) -> Batch:
    return Batch(
        obs=np.array([number, t], np.float32),
        act=np.array([number / 10], np.float32),
        rew=float(number),
        terminated=terminated,
        truncated=truncated,
        obs_next=np.array([number + 0.5, t + 1], np.float32),
        info=info,
    )


# Three episodes of 4, 5 and 3 steps in a ring of 8: the oldest four steps are gone.
for name, make in (
    ("ring", lambda: ReplayBuffer(8)),
    ("without_next", lambda: ReplayBuffer(8, ignore_obs_next=True)),
    ("prioritized", lambda: PrioritizedReplayBuffer(8, alpha=0.6, beta=0.4)),
):
    buffer, number = make(), 0
    for episode, steps in enumerate((4, 5, 3)):
        for t in range(steps):
            last = t == steps - 1
            buffer.add(
                step(number, t, terminated=last and episode != 1, truncated=last and episode == 1, info={})
            )
            number += 1
    buffer.save_hdf5(str(FOLDER / f"{name}.hdf5"))

# Two environments of 4 rows each; the second is not full, and its episode has not ended.
vector = VectorReplayBuffer(8, 2)
for t in range(6):
    ids = [0, 1] if t < 3 else [0]
    rows = [
        step(100 * i + t, t, terminated=i == 0 and t == 2, truncated=False, info={"speed": float(t)})
        for i in ids
    ]
    vector.add(Batch.stack(rows), buffer_ids=ids)
vector.save_hdf5(str(FOLDER / "vector.hdf5"))

# An info that is no number is pickled into the file.
pickled = ReplayBuffer(4)
for t in range(3):
    pickled.add(step(t, t, terminated=t == 2, truncated=False, info={"tag": "text"}))
pickled.save_hdf5(str(FOLDER / "pickled.hdf5"))
