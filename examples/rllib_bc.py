"""RLlib's BC on the best tenth of the episodes that rlio has recorded.

Run:  pip install 'rlio[rllib]' torch && python examples/rllib_bc.py [FOLDER]
"""

import sys
import tempfile

import numpy as np
import ray
from ray.rllib.algorithms.bc import BCConfig

import rlio
from rlio.integrations.rllib import RlioOfflineData


class Player(rlio.Policy):
    """Balances the pole by its angle and angular velocity; a share of its moves is wrong."""

    def __init__(self, wrong: float, seed: int) -> None:
        self.wrong, self.rng = wrong, np.random.default_rng(seed)

    def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
        right = obs[:, 2] + 0.5 * obs[:, 3] > 0
        wrong = self.rng.random(len(obs)) < self.wrong
        return (right ^ wrong).astype("int64"), state, {}


def main(folder: str) -> None:
    """Record ten players, from sure to hopeless; train; compare."""
    rollout = rlio.RolloutConfig(batch_mode="complete_episodes", rollout_fragment_length=1_000)
    for number in range(10):
        player = Player(wrong=number / 10, seed=number)
        # A fixed writer id: the order of the rows, and so the training, is the same in each run.
        options = {"output_options": {"writer_id": f"player{number}"}, "rollout": rollout, "seed": number}
        with rlio.RolloutWorker("CartPole-v1", player, output=folder, **options) as worker:
            worker.sample()
    data = rlio.open_dataset(folder)
    returns = [data.episode(i).total_reward for i in range(data.episode_count)]

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    config = (
        BCConfig()
        .environment("CartPole-v1")
        .training(lr=1e-3, train_batch_size_per_learner=512)
        .offline_data(
            input_=[folder],
            input_config={"filter": f"episode_return >= {np.quantile(returns, 0.9)}"},
            offline_data_class=RlioOfflineData,
            dataset_num_iters_per_learner=20,
        )
        .evaluation(
            evaluation_interval=10,
            evaluation_duration=20,
            evaluation_config=BCConfig.overrides(explore=False),
        )
        .debugging(seed=0)
    )
    algo = config.build_algo()
    for _ in range(10):
        result = algo.train()
    trained = result["evaluation"]["env_runners"]["episode_return_mean"]
    print(f"BC was trained on {algo.offline_data.rows} rows of {algo.offline_data.episodes} episodes")
    print(f"mean return: {np.mean(returns):.0f} in the data, {trained:.0f} after BC")
    algo.stop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
