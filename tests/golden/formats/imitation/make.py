"""Writes the fixture of imitation: `python make.py` with datasets 5.2.0 and jsonpickle installed.

The columns are those of `imitation.data.huggingface_utils.trajectories_to_dict` (imitation 1.0), which needs
an older Gymnasium than rlio. Observation t of episode e is [100 e + t, t], action t is t % 3, reward t is
1000 e + t. The first episode terminated, the second was cut by a time limit, the third has not ended.
"""

from pathlib import Path

import jsonpickle
import numpy as np
from datasets import Dataset

LENGTHS = (3, 1, 5)


def info(episode: int, step: int) -> dict:
    if episode == 1:
        return {"TimeLimit.truncated": True}
    return {"speed": step / 2, "position": np.float32(step)} if step == 1 else {}


def obs(episode: int, steps: int) -> np.ndarray:
    at = np.arange(steps + 1, dtype=np.float32)
    return np.stack([100 * episode + at, at], 1)


Dataset.from_dict(
    {
        "obs": [obs(e, n) for e, n in enumerate(LENGTHS)],
        "acts": [np.arange(n) % 3 for n in LENGTHS],
        "infos": [[jsonpickle.encode(info(e, t)) for t in range(n)] for e, n in enumerate(LENGTHS)],
        "terminal": [True, True, False],
        "rews": [1000.0 * e + np.arange(n) for e, n in enumerate(LENGTHS)],
    }
).save_to_disk(Path(__file__).parent / "saved")
