"""Record a trained policy, clone it from the log alone, and compare the two.

Run:  python examples/clone_from_log.py [FOLDER]
"""

import sys
import tempfile

import rlio
from rlio.sampling.evaluate import evaluate


def main(folder: str) -> None:
    """Teach, record, clone, evaluate."""

    # A teacher that balances the pole by its angle and angular velocity.
    class Lean(rlio.Policy):
        def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
            return (obs[:, 2] + 0.5 * obs[:, 3] > 0).astype("int64"), state, {}

    config = rlio.RolloutConfig(num_envs=4, rollout_fragment_length=250)
    with rlio.RolloutWorker("CartPole-v1", Lean(), output=folder, rollout=config, seed=0) as worker:
        for _ in range(10):
            worker.sample()
    data = rlio.open_dataset(folder)
    print(f"{data}: {data.bytes() / len(data):.1f} bytes a step")

    # The environment only gives the policy its spaces: the input has no sampler, so it is never stepped.
    student = rlio.policies.BehaviourCloning(learning_rate=3e-3)
    with rlio.RolloutWorker(
        "CartPole-v1",
        student,
        input=folder,
        input_options={"batch_size": 128, "shuffle": True, "seed": 0, "epochs": 6},
        seed=0,
    ) as worker:
        for batch in worker:
            stats = student.learn_on_batch(batch)
    print("last batch:", {name: round(value, 3) for name, value in stats.items()})
    for name, policy in (("teacher", Lean()), ("student", student)):
        print(name, evaluate(policy, "CartPole-v1", episodes=20, seed=1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
