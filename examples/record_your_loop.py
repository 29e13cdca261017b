"""Record your own loop around a gymnasium environment, with your policy's log-probabilities.

Run:  python examples/record_your_loop.py [FOLDER]
"""

import sys
import tempfile

import gymnasium as gym
import numpy as np

import rlio


def main(folder: str) -> None:
    """Play 20 episodes, then read them back."""
    rng = np.random.default_rng(0)
    with rlio.RecordExperience(gym.make("CartPole-v1"), folder) as env:
        for episode in range(20):
            obs, _ = env.reset(seed=episode)
            ended = False
            while not ended:
                # Your policy: leans with the pole nine times out of ten.
                leans = int(obs[2] > 0)
                action = leans if rng.random() < 0.9 else 1 - leans
                env.record(action_logp=np.log(0.9 if action == leans else 0.1))
                obs, _, terminated, truncated, _ = env.step(action)
                ended = terminated or truncated

    returns = [
        episode["rewards"].sum()
        for batch in rlio.DatasetReader(folder, batch_size=100_000, epochs=1)
        for episode in batch.split_by_episode()
    ]
    print(f"{len(returns)} episodes in {folder}, mean return {np.mean(returns):.1f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
