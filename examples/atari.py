"""Record Pong with stacks of four frames and store each frame once. Needs the extra rlio[atari].

Run:  python examples/atari.py [FOLDER]
"""

import sys
import tempfile
from functools import partial

import rlio
from rlio.envs.atari import make_atari


def main(folder: str) -> None:
    """Record 400 steps of two games, and read a batch of stacks."""
    config = rlio.RolloutConfig(num_envs=2, rollout_fragment_length=200)
    with rlio.RolloutWorker(
        partial(make_atari, "ALE/Pong-v5"), rlio.RandomPolicy(), rollout=config, output=folder, seed=0
    ) as worker:
        batch = worker.sample()
        in_memory = batch.size_bytes() / len(batch)

    data = rlio.open_dataset(folder)
    print(f"{len(data)} steps, {in_memory:,.0f} bytes each in memory, {data.bytes() / len(data):,.0f} stored")
    batch = rlio.DatasetReader(folder, batch_size=32, shuffle=True, seed=0).sample()
    print("a batch:", batch["obs"].dtype, batch["obs"].shape)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
