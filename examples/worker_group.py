"""Two rollout workers on a Ray cluster write one data set while a third process learns.

Run:  python examples/worker_group.py [FOLDER]      (pip install 'rlio[ray]')

With RAY_ADDRESS set, or after `ray start`, the workers run on that cluster; otherwise Ray starts on this
machine.
"""

import sys
import tempfile

import ray

import rlio
from rlio.distributed import FaultTolerance, WorkerGroup


def main(folder: str) -> None:
    """Make ten updates of an actor-critic in CartPole, each on one fragment from each worker."""
    with WorkerGroup(
        "CartPole-v1",
        rlio.policies.ActorCritic(hidden=(32,), learning_rate=0.01),
        num_workers=2,
        local_worker=True,  # worker 0 in this process: it learns
        rollout=rlio.RolloutConfig(num_envs=2, rollout_fragment_length=50),
        output=folder,
        seed=0,
        fault_tolerance=FaultTolerance(max_restarts=10),
    ) as group:
        for _ in range(10):
            batch = group.sample()
            group.local_worker.learn_on_batch(batch)
            group.sync_weights()  # before their next fragment
        summary = group.get_metrics().summarise()
        print(f"{summary['num_episodes']} episodes, mean return {summary['episode_return_mean']:.1f}")
        versions = sorted({int(version) for version in group.sample()["weights_seq_no"]})
        print(f"the last fragments are of the weights {versions}, {group.restarts} workers were replaced")

    dataset = rlio.open_dataset(folder)
    print(f"{len(dataset)} steps by {len(dataset.snapshot())} writers")


if __name__ == "__main__":
    ray.init()
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
