"""Behaviour cloning: it finds the policy that made the data, in discrete and continuous spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from rlio.batch import SampleBatch
from rlio.errors import MissingColumn
from rlio.policies.behaviour_cloning import BehaviourCloning
from rlio.policies.policy import Policy
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.evaluate import evaluate

OBS = Box(-1.0, 1.0, (2,), np.float32)


def bound(space: Any, **options: Any) -> BehaviourCloning:
    policy = BehaviourCloning(**options)
    policy.bind(OBS, space, 0)
    return policy


def observations(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (n, 2)).astype(np.float32)


def test_the_loss_is_the_negative_log_likelihood() -> None:
    policy = bound(Discrete(3))
    obs, actions = observations(20), np.arange(20) % 3
    outputs = policy.forward(obs).detach().numpy().astype(np.float64)
    logs = outputs - np.log(np.exp(outputs).sum(1, keepdims=True))
    stats = policy.learn_on_batch(SampleBatch(obs=obs, actions=actions))
    assert np.isclose(stats["loss"], -logs[np.arange(20), actions].mean(), atol=1e-5)
    assert np.isclose(stats["entropy"], -(np.exp(logs) * logs).sum(1).mean(), atol=1e-5)
    assert np.isclose(stats["accuracy"], (outputs.argmax(1) == actions).mean())


def test_rows_count_by_their_weights() -> None:
    obs, actions = observations(4), np.array([0, 1, 2, 0])
    weighted = SampleBatch(obs=obs, actions=actions, weights=[0.0, 2.0, 1.0, 0.0])
    repeated = SampleBatch(obs=obs, actions=actions)[np.array([1, 1, 2])]
    losses = [bound(Discrete(3)).learn_on_batch(batch)["loss"] for batch in (weighted, repeated)]
    assert np.isclose(*losses, atol=1e-6)


@pytest.mark.further
def test_it_finds_a_continuous_policy_and_its_spread() -> None:
    rng = np.random.default_rng(0)
    obs = observations(4000)
    actions = (obs * [2.0, -1.0] + 0.3 * rng.standard_normal(obs.shape)).astype(np.float32)
    policy = bound(Box(-4.0, 4.0, (2,), np.float32), learning_rate=5e-3)
    data = SampleBatch(obs=obs, actions=actions)
    for _ in range(12):
        for part in data.shuffle(rng).timeslices(128):
            stats = policy.learn_on_batch(part)
    assert "accuracy" not in stats
    fresh = observations(500, seed=1)
    means, _, extras = policy.compute_actions(fresh, explore=False)
    assert np.abs(means - fresh * [2.0, -1.0]).mean() < 0.1
    assert np.abs(np.exp(extras["action_dist_inputs"][:, 2:]) - 0.3).mean() < 0.05


def test_accuracy_in_a_nested_space_asks_for_all_parts() -> None:
    space = Dict(a=Discrete(2), b=MultiBinary(2))
    policy = bound(space)
    obs = observations(50)
    actions, _, _ = policy.compute_actions(obs, explore=False)
    assert policy.learn_on_batch(SampleBatch(obs=obs, actions=actions))["accuracy"] == 1.0
    policy = bound(space)
    actions["b"][:25, 1] ^= 1
    assert policy.learn_on_batch(SampleBatch(obs=obs, actions=actions))["accuracy"] == 0.5


def test_without_actions_there_is_nothing_to_clone() -> None:
    with pytest.raises(MissingColumn, match="column actions"):
        bound(Discrete(2)).learn_on_batch(SampleBatch(obs=observations(2)))


class Balance(Policy):
    """Balances CartPole by hand, for some 200 to 500 steps."""

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        return (obs[:, 2] + 0.5 * obs[:, 3] > 0).astype(np.int64), state, {}


@pytest.mark.further
def test_it_learns_cartpole_from_recorded_steps_alone() -> None:
    config = RolloutConfig(num_envs=8, rollout_fragment_length=250)
    data = EnvRunner("CartPole-v1", Balance(), config=config, seed=0).run()
    policy = BehaviourCloning(learning_rate=5e-3)
    teacher = evaluate(Balance(), "CartPole-v1", episodes=20, seed=7).mean
    evaluate(policy, "CartPole-v1", episodes=1, seed=0)  # binds it
    rng = np.random.default_rng(0)
    for _ in range(25):
        for part in data.shuffle(rng).timeslices(100):
            policy.learn_on_batch(part)
    assert teacher > 150
    assert evaluate(policy, "CartPole-v1", episodes=20, seed=7).mean > 0.6 * teacher
