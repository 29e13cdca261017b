"""Learn online from a live replay store: a ring of the newest steps, sampled by priority.

Run:  python examples/online_dqn.py
"""

import rlio


def main() -> None:
    """Sample, append, learn: 200 updates here; to balance the pole, use some thousands."""
    policy = rlio.policies.DQN(hidden=(64,), epsilon_timesteps=2_000, target_update_every=50)
    store = rlio.ReplayStore(capacity=20_000)
    config = rlio.RolloutConfig(num_envs=4, rollout_fragment_length=8)
    with rlio.RolloutWorker("CartPole-v1", policy, rollout=config, seed=0) as worker:
        replay = store.prioritised(batch_size=32, alpha=0.6, beta=0.4, seed=0, draw=rlio.NStep(3, gamma=0.99))
        while policy.weights_seq_no < 200:
            store.append(worker.sample())
            if len(store) >= 200:
                for _ in range(4):
                    batch = replay.sample()
                    stats = policy.learn_on_batch(batch)
                    replay.update_priorities(batch["batch_indexes"], policy.td_errors(batch))
        metrics = worker.get_metrics().summarise()
    steps = metrics["num_env_steps_sampled"]
    print(f"{policy.weights_seq_no} updates after {steps} steps, {len(store)} of them in the store,")
    print(f"mean return {metrics['episode_return_mean']:.1f}, last loss {stats['loss']:.3f}")


if __name__ == "__main__":
    main()
