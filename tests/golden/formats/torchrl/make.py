"""Writes the fixtures of TorchRL: `python make.py` with torchrl 0.14.1, tensordict 0.14.3 and torch 2.13.0.

Step number n holds n in its observation, n / 10 in its action, n + 0.5 in its reward, and n + 0.25 in its
next observation.
"""

import shutil
from pathlib import Path

import torch
from tensordict import NonTensorData, TensorDict
from torchrl.data import LazyMemmapStorage, ReplayBuffer, TensorDictReplayBuffer

FOLDER = Path(__file__).parent


def steps(numbers, ends, *, trajectories=None, **more):
    """Steps in TorchRL's episode data format; ``ends`` has "t", "c" (cut) or "." for each."""
    values = torch.tensor(numbers, dtype=torch.float32)
    rows = len(numbers)

    def flags(letters):
        return torch.tensor([[end in letters] for end in ends])

    data = TensorDict(
        {
            "observation": torch.stack([values, -values], 1),
            "action": values[:, None] / 10,
            **{name: torch.zeros(rows, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")},
            "next": {
                "observation": torch.stack([values + 0.25, -values], 1),
                "reward": values[:, None] + 0.5,
                "done": flags("tc"),
                "terminated": flags("t"),
                "truncated": flags("c"),
            },
            **more,
        },
        batch_size=[rows],
    )
    if trajectories is not None:
        data["collector", "traj_ids"] = torch.tensor(trajectories)
    return data


def fresh(name):
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    return FOLDER / name


# A ring of 10 rows into which 14 were written: 4 to 13 are left, in three episodes.
ring = ReplayBuffer(storage=LazyMemmapStorage(10))
for start in (0, 7):
    ring.extend(steps(range(start, start + 7), "...t..c"[:7] if start == 0 else "..t...."))
ring.dumps(fresh("ring"))

# A buffer that is not full, whose rows of two environments alternate. Each row has two observations.
woven = TensorDictReplayBuffer(storage=LazyMemmapStorage(20), priority_key="td_error")
for t in range(4):
    numbers = [t, 100 + t]
    data = steps(numbers, "tc" if t == 3 else "..", trajectories=[5, 3])
    pixels = torch.tensor(numbers, dtype=torch.uint8)[:, None, None].expand(2, 3, 2)
    data["pixels"], data["next", "pixels"] = pixels, pixels + 1
    data["sample_log_prob"] = torch.tensor(numbers, dtype=torch.float64)
    woven.extend(data)
woven.dumps(fresh("woven"))

# A data set of its own, by environment and time, with a text.
tensors = steps(range(6), "..t..c").reshape(2, 3)
tensors["note"] = NonTensorData("a text", batch_size=[2, 3])
tensors.memmap(fresh("tensors"))
