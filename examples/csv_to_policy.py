"""Clone a policy from a CSV log, whose columns have names of their own.

Run:  python examples/csv_to_policy.py [FOLDER]
"""

import csv
import sys
import tempfile

import gymnasium as gym

import rlio
from rlio.sampling.evaluate import evaluate


def write_log(path: str, trips: int = 6) -> None:
    """The log of a controller: each row is a step, each trip an episode."""
    env = gym.make("CartPole-v1")
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["trip", "x", "v", "angle", "turn", "push", "score", "fell"])
        for trip in range(trips):
            obs, _ = env.reset(seed=trip)
            ended = fell = False
            while not ended:
                push = int(obs[2] + 0.5 * obs[3] > 0)
                follow, score, fell, timeout, _ = env.step(push)
                writer.writerow([trip, *obs, push, score, fell])
                obs, ended = follow, fell or timeout


def main(folder: str) -> None:
    """Log, read, clone, evaluate."""
    write_log(f"{folder}/log.csv")
    env = gym.make("CartPole-v1")
    policy = rlio.policies.BehaviourCloning(learning_rate=3e-3)
    policy.bind(env.observation_space, env.action_space)
    columns = {"obs": ["x", "v", "angle", "turn"], "actions": "push", "rewards": "score"}
    options = {"batch_size": 128, "shuffle": True, "seed": 0, "epochs": 10}
    mapping = rlio.Mapping(columns, episode="trip", terminated="fell", dtypes={"obs": "float32"})
    with rlio.read(f"{folder}/log.csv", mapping=mapping, **options) as reader:
        for batch in reader:
            stats = policy.learn_on_batch(batch)
    print("last batch:", {name: round(value, 3) for name, value in stats.items()})
    print("from log.csv:", evaluate(policy, "CartPole-v1", episodes=5, seed=1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
