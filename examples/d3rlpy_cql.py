"""CQL of d3rlpy: record players of different skill, and train on their record.

Kumar et al., "Conservative Q-Learning for Offline Reinforcement Learning", 2020.

Run:  pip install 'rlio[d3rlpy]' && python examples/d3rlpy_cql.py [FOLDER]
"""

import sys
import tempfile

import d3rlpy
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


class Trained(rlio.Policy):
    """The algorithm as a policy, for environments."""

    def __init__(self, algo):
        self.algo = algo

    def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
        return self.algo.predict(obs), state, {}


def main(folder: str) -> None:
    """Record ten players, from sure to hopeless; train; compare."""
    torch.set_num_threads(1)
    d3rlpy.seed(0)
    rollout = rlio.RolloutConfig(batch_mode="complete_episodes", rollout_fragment_length=1_000)
    for number in range(10):
        player = Player(wrong=number / 10, seed=number)
        # A fixed writer id: the order of the rows, and so the training, is the same in each run.
        options = {"output_options": {"writer_id": f"player{number}"}, "rollout": rollout, "seed": number}
        with rlio.RolloutWorker("CartPole-v1", player, output=folder, **options) as worker:
            worker.sample()
    buffer = rlio.bridges.to_d3rlpy(rlio.open_dataset(folder))
    recorded = np.mean([episode.compute_return() for episode in buffer.episodes])

    algo = d3rlpy.algos.DiscreteCQLConfig(
        batch_size=64, learning_rate=1e-3, target_update_interval=100, alpha=0.5
    ).create()
    algo.fit(
        buffer,
        n_steps=1_500,
        n_steps_per_epoch=1_500,
        show_progress=False,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
    )
    trained = evaluate(Trained(algo), "CartPole-v1", episodes=20, seed=1)
    print(f"CQL was trained on {buffer.transition_count} transitions of {len(buffer.episodes)} episodes")
    print(f"mean return: {recorded:.0f} in the data, {trained.mean:.0f} after CQL")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
