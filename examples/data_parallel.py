"""Train with several processes, stop in the middle of an epoch, and continue with another number of them.

Run:  python examples/data_parallel.py [--ranks 2] [--then 1]

Each process reads its part of every batch. The position is one number, the same in all of them, so another
number of processes can read the remaining rows in the same order. A checkpoint is arrays and JSON.
"""

import argparse
import sys
import tempfile
from itertools import islice
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

import rlio
from rlio.policies.checkpoint import load_state, save_state
from rlio.policies.data_parallel import in_step, setup_torch_data_parallel

# Forked processes share all imports. Processes that use CUDA must be spawned.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
BATCH_SIZE = 60  # Rows of a step, over all processes: the result does not depend on their number.


def record(folder: Path) -> None:
    """Record a data set to learn from: 1500 steps of a policy that balances the pole."""

    class Lean(rlio.Policy):
        def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
            return (obs[:, 2] + 0.5 * obs[:, 3] > 0).astype("int64"), state, {}

    with rlio.RolloutWorker("CartPole-v1", Lean(), output=folder / "data", seed=0) as worker:
        rows = 0
        while rows < 1500:
            rows += len(worker.sample())


def train(rank: int, world: int, folder: Path, steps: int | None) -> None:
    """Run one process of ``world``: take ``steps`` steps, or all remaining ones, and save a checkpoint."""
    env = gym.make("CartPole-v1")  # Only for its spaces.
    policy = rlio.policies.BehaviourCloning(hidden=(32,))
    policy.bind(env.observation_space, env.action_space, seed=0)
    setup_torch_data_parallel([policy], f"file://{folder}/meeting-{world}", rank, world)
    served = []
    with rlio.DatasetReader(
        folder / "data", batch_size=BATCH_SIZE // world, shard=(rank, world), epochs=1, shuffle=True, seed=0
    ) as reader:
        if (folder / "checkpoint").exists():
            state = load_state(folder / "checkpoint")
            policy.set_state(state["policy"])
            reader.load_state_dict(state["reader"])
        for batch in islice(in_step(reader), steps):
            policy.learn_on_batch(batch)
            if batch:  # At the end, a process may have no rows left while others have.
                served.append(np.stack([batch["eps_id"], batch["t"]], axis=1))
        if rank == 0:
            save_state(folder / "checkpoint", {"policy": policy.get_state(), "reader": reader.state_dict()})
    torch.distributed.destroy_process_group()
    np.save(folder / f"served-by-{rank}-of-{world}.npy", np.concatenate(served))
    print(f"rank {rank} of {world}: {len(served)} batches, {policy.updates} updates in all")


def main(folder: Path, ranks: int, then: int) -> None:
    """Train with ``ranks`` processes for half of an epoch, then with ``then`` processes."""
    record(folder)
    for world, steps in ((ranks, 12), (then, None)):
        torch.multiprocessing.start_processes(
            train, args=(world, folder, steps), nprocs=world, start_method=START_METHOD
        )
    served = np.concatenate([np.load(file) for file in folder.glob("served-by-*.npy")])
    total = len(rlio.open_dataset(folder / "data"))
    assert len(served) == len(np.unique(served, axis=0)) == total
    print(f"each of {total} rows was served once: to {ranks}, and then to {then} processes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--then", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary), options.ranks, options.then)
