"""Start Stable-Baselines3's DQN from a record, and compare it with a DQN that starts without.

Run:  pip install 'rlio[sb3]' && python examples/sb3_warm_start.py [FOLDER]
"""

import sys
import tempfile

import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import polyak_update

import rlio


class Player(rlio.Policy):
    """Balances the pole by its angle and angular velocity; a share of its moves is wrong."""

    def __init__(self, wrong: float, seed: int) -> None:
        self.wrong, self.rng = wrong, np.random.default_rng(seed)

    def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
        right = obs[:, 2] + 0.5 * obs[:, 3] > 0
        wrong = self.rng.random(len(obs)) < self.wrong
        return (right ^ wrong).astype("int64"), state, {}


def make_model() -> DQN:
    """A DQN that explores little."""
    return DQN(
        "MlpPolicy", "CartPole-v1", learning_rate=1e-3, buffer_size=20_000, batch_size=64, train_freq=1,
        target_update_interval=100, exploration_initial_eps=0.1, exploration_final_eps=0.02, seed=0,
        device="cpu",
    )  # fmt: skip


def main(folder: str) -> None:
    """Record ten players, from sure to hopeless; train on the record, then live."""
    torch.set_num_threads(1)
    rollout = rlio.RolloutConfig(batch_mode="complete_episodes", rollout_fragment_length=1_000)
    for number in range(10):
        player = Player(wrong=number / 10, seed=number)
        # A fixed writer id: the order of the rows, and so the training, is the same in each run.
        options = {"output_options": {"writer_id": f"player{number}"}, "rollout": rollout, "seed": number}
        with rlio.RolloutWorker("CartPole-v1", player, output=folder, **options) as worker:
            worker.sample()
    data = rlio.open_dataset(folder)
    recorded = np.mean([data.episode(i).total_reward for i in range(data.episode_count)])

    cold, warm = make_model(), make_model()
    filled = rlio.bridges.fill_sb3(warm.replay_buffer, data)
    warm.set_logger(configure(None, []))  # train() writes to it
    for _ in range(15):
        warm.train(gradient_steps=100, batch_size=64)
        # Only learn() updates the target network.
        polyak_update(warm.q_net.parameters(), warm.q_net_target.parameters(), 1.0)
    print(f"DQN was trained on {filled.rows} recorded rows")
    for model in (cold, warm):
        model.learn(1_000)
    alone, after = (evaluate_policy(model, model.get_env(), n_eval_episodes=20)[0] for model in (cold, warm))
    print(
        f"mean return: {recorded:.0f} in the data, {alone:.0f} after live steps alone, {after:.0f} after both"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
