"""A simulator drives its own loop and asks a policy server for actions; the server learns from its steps.

Run:  python examples/external_client.py

Here both are in one process. Elsewhere the simulator needs only the server's URL and token; other languages
use the protocol of `rlio.serving.policy_protocol`: JSON over HTTP.
"""

import threading

import gymnasium as gym

import rlio


def simulate(url: str, token: str, *, episodes: int) -> None:
    """Run the simulator, which decides when to ask for actions, and what to report."""
    env = gym.make("CartPole-v1")
    with rlio.serving.PolicyClient(url, token) as client:
        for number in range(episodes):
            obs, _ = env.reset(seed=number)
            episode = client.start_episode()
            ended = False
            while not ended:
                action = client.get_action(episode, obs)
                obs, reward, terminated, truncated, _ = env.step(action)
                client.log_returns(episode, float(reward))
                ended = terminated or truncated
            client.end_episode(episode, obs, truncated=truncated and not terminated)


def main() -> None:
    """Serve, and learn until the simulator has played its episodes."""
    policy = rlio.policies.DQN(hidden=(32,))
    env = gym.make("CartPole-v1")
    policy.bind(env.observation_space, env.action_space, seed=0)
    config = rlio.RolloutConfig(rollout_fragment_length=32)
    with rlio.serving.PolicyServerInput(policy, config=config, idle_timeout=1.0) as server:
        simulator = threading.Thread(target=simulate, args=(server.url, server.token), kwargs={"episodes": 8})
        simulator.start()
        for batch in server:  # Ends a second after the simulator's last request.
            policy.learn_on_batch(batch)
        simulator.join()
    print("the server's policy has learned", policy.weights_seq_no, "times")


if __name__ == "__main__":
    main()
