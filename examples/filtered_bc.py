"""Filtered behaviour cloning: imitate the best tenth of the episodes, and compare with imitating all.

Run:  python examples/filtered_bc.py [FOLDER]
"""

import sys
import tempfile

import numpy as np
import torch

import rlio
from rlio.sampling.evaluate import evaluate


class Player(rlio.Policy):
    """Balances the pole by its angle and angular velocity; a share of its moves is wrong."""

    def __init__(self, wrong: float, seed: int) -> None:
        self.wrong, self.rng = wrong, np.random.default_rng(seed)

    def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
        right = obs[:, 2] + 0.5 * obs[:, 3] > 0
        wrong = self.rng.random(len(obs)) < self.wrong
        return (right ^ wrong).astype("int64"), state, {}


def record(folder: str) -> rlio.Dataset:
    """Record ten players, from sure to hopeless, into one data set."""
    rollout = rlio.RolloutConfig(batch_mode="complete_episodes", rollout_fragment_length=1_000)
    for number in range(10):
        player = Player(wrong=number / 10, seed=number)
        # A fixed writer id: the order of the rows, and so the training, is the same in each run.
        options = {"output_options": {"writer_id": f"player{number}"}, "rollout": rollout, "seed": number}
        with rlio.RolloutWorker("CartPole-v1", player, output=folder, **options) as worker:
            worker.sample()
    return rlio.open_dataset(folder)


def clone(data: rlio.Dataset, episodes: str | None) -> rlio.Policy:
    """Imitate the training episodes that the filter chooses; the others measure the loss."""
    policy = rlio.policies.BehaviourCloning(learning_rate=3e-3)
    policy.bind(*data.spaces, seed=0)
    options = {"filter": episodes, "batch_size": 256}
    with rlio.DatasetReader(data, split=("train", 0.9), shuffle=True, seed=0, **options) as reader:
        for _ in range(500):
            policy.learn_on_batch(reader.sample())
    with rlio.DatasetReader(data, split=("test", 0.9), epochs=1, **options) as reader:
        logp = [policy.compute_log_likelihoods(batch["actions"], batch["obs"]) for batch in reader]
    mean = np.concatenate(logp).mean()
    print(f"{episodes or 'all episodes'}: log-likelihood of held-out actions {mean:.2f}")
    return policy


def main(folder: str) -> None:
    """Record, clone twice, and compare."""
    torch.set_num_threads(1)
    data = record(folder)
    recorded = np.mean([data.episode(i).total_reward for i in range(data.episode_count)])
    every, best = clone(data, None), clone(data, "episode_return >= quantile(0.9)")
    every, best = (evaluate(policy, "CartPole-v1", episodes=20, seed=1).mean for policy in (every, best))
    print(f"mean return: {recorded:.0f} in the data, {every:.0f} after BC, {best:.0f} of the best tenth")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
