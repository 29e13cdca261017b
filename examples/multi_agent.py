"""Two policies act for three agents; record their steps, and read them back policy by policy.

Run:  python examples/multi_agent.py [FOLDER]
"""

import sys
import tempfile

import rlio
from rlio.envs.multi_agent import make_multi_agent


def main(folder: str) -> None:
    """Record 200 steps of three CartPoles, one of them under a policy that leans with its pole."""

    class Lean(rlio.Policy):
        def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
            return (obs[:, 2] > 0).astype("int64"), state, {}

    def policy_of(agent_id, episode):
        return "lean" if agent_id == 0 else "random"

    with rlio.RolloutWorker(
        make_multi_agent("CartPole-v1")(num_agents=3),
        {"lean": Lean(), "random": rlio.RandomPolicy()},
        policy_setup=rlio.sampling.PolicySetup(policy_mapping_fn=policy_of),
        rollout=rlio.RolloutConfig(rollout_fragment_length=100),
        output=folder,
        seed=0,
    ) as worker:
        for _ in range(2):
            worker.sample()
        returns = worker.get_metrics().summarise()["policy_reward_mean"]
        print("mean returns:", {policy_id: round(mean, 1) for policy_id, mean in returns.items()})

    batch = rlio.DatasetReader(folder, batch_size=200, epochs=1).sample()
    print(batch.env_steps(), "steps,", {policy_id: len(rows) for policy_id, rows in batch.items()})
    # One policy's rows, shuffled, as for an environment with one agent.
    alone = rlio.DatasetReader(folder, policy="lean", batch_size=64, shuffle=True, seed=0)
    print(alone.sample())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
