"""Writes the fixture of d3rlpy: `python make.py` with d3rlpy 2.8.0 installed."""

from pathlib import Path

import numpy as np
from d3rlpy.dataset import Episode, InfiniteBuffer, ReplayBuffer

FOLDER = Path(__file__).parent
episodes = []
first = 0
for number, steps in enumerate((3, 2, 5)):
    rows = np.arange(first, first + steps, dtype=np.float32)
    episodes.append(
        Episode(
            observations=np.stack([rows, -rows], 1),
            actions=(rows[:, None] / 10),
            rewards=rows[:, None],
            terminated=number != 1,
        )
    )
    first += steps
buffer = ReplayBuffer(InfiniteBuffer(), episodes=episodes)
with open(FOLDER / "buffer.h5", "w+b") as file:
    buffer.dump(file)
