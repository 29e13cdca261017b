"""The contract of policies, and the random one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple

from rlio.batch import SampleBatch
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.errors import OptionError, StateError
from rlio.policies.policy import Policy
from rlio.policies.random_policy import RandomPolicy
from rlio.sampling.evaluate import evaluate

OBS = Box(-1.0, 1.0, (3,))
SPACES = [
    Discrete(4),
    Discrete(4, start=-2),
    MultiDiscrete([3, 5]),
    MultiDiscrete(np.array([[3, 5], [2, 2]]), start=np.array([[1, 0], [0, -1]])),
    MultiBinary(6),
    MultiBinary((2, 3)),
    Box(-3.0, 5.0, (2, 2), np.float32),
    Box(0, 255, (4,), np.uint8),
    Box(-np.inf, np.inf, (3,), np.float64),
    Box(np.array([0.0, -np.inf, -1.0]), np.array([np.inf, 2.0, 1.0]), dtype=np.float64),
    Dict(a=Discrete(3), b=Tuple([Box(-1.0, 1.0, (2,)), MultiBinary(2)])),
]


def bound(space: Any, seed: int = 0) -> RandomPolicy:
    policy = RandomPolicy()
    policy.bind(OBS, space, seed)
    return policy


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_random_actions_lie_in_their_space_and_are_reproducible(space: Any) -> None:
    obs = np.zeros((200, 3), np.float32)
    actions, state, extras = bound(space).compute_actions(obs)
    again, _, _ = bound(space).compute_actions(obs)
    other, _, _ = bound(space, seed=1).compute_actions(obs)
    differs = False
    for leaf in leaves_of(space):
        values, same = leaf_of(actions, leaf.path), leaf_of(again, leaf.path)
        assert values.dtype == leaf.dtype
        assert values.shape == (200, *leaf.shape)
        assert all(leaf.space.contains(value) for value in values)
        assert np.array_equal(values, same)
        differs |= not np.array_equal(values, leaf_of(other, leaf.path))
    assert differs
    assert state == ()
    assert extras["action_logp"].shape == (200,)
    assert np.allclose(np.exp(extras["action_logp"]), extras["action_prob"])


@pytest.mark.parametrize(
    ("space", "probability"),
    [
        (Discrete(4), 1 / 4),
        (MultiDiscrete([3, 5]), 1 / 15),
        (MultiBinary(3), 1 / 8),
        (Box(-1.0, 3.0, (2,), np.float32), 1 / 16),
        (Dict(a=Discrete(2), b=Tuple([Discrete(3)])), 1 / 6),
    ],
    ids=str,
)
def test_the_probability_of_uniform_actions_is_exact(space: Any, probability: float) -> None:
    _, _, extras = bound(space).compute_actions(np.zeros((5, 3)))
    assert np.allclose(extras["action_prob"], probability)


def test_random_choices_are_uniform() -> None:
    actions, _, _ = bound(Discrete(5, start=10)).compute_actions(np.zeros((5000, 1)))
    counts = np.bincount(actions - 10, minlength=5)
    assert ((counts - 1000) ** 2 / 1000).sum() < 25  # chi-square, 4 degrees of freedom: p = 5e-5


def test_a_restored_random_policy_goes_on_with_the_same_actions() -> None:
    policy, other = bound(Discrete(1000)), bound(Discrete(1000), seed=9)
    policy.compute_actions(np.zeros((3, 1)))
    other.set_state(policy.get_state())
    obs = np.zeros((50, 1))
    assert np.array_equal(policy.compute_actions(obs)[0], other.compute_actions(obs)[0])
    with pytest.raises(StateError, match="'rng'"):
        other.set_state({"weights": {}, "weights_seq_no": 0})


def test_observations_may_be_nested() -> None:
    policy = RandomPolicy()
    policy.bind(Dict(a=OBS, b=Tuple([Discrete(2)])), Discrete(2), 0)
    actions, _, _ = policy.compute_actions({"a": np.zeros((7, 3)), "b": (np.zeros(7),)})
    assert actions.shape == (7,)


@pytest.mark.parametrize("space", [Text(3), Sequence(Discrete(2))], ids=str)
def test_a_space_without_uniform_actions_is_refused_when_bound(space: Any) -> None:
    policy = RandomPolicy()
    with pytest.raises(OptionError, match="cannot act in"):
        policy.bind(OBS, space, 0)
    assert not policy.is_bound


def test_binding_again_checks_the_spaces_and_keeps_the_random_numbers() -> None:
    policy, other = bound(Discrete(1000)), bound(Discrete(1000))
    obs = np.zeros((20, 1))
    policy.compute_actions(obs)
    policy.bind(OBS, Discrete(1000), seed=0)
    other.compute_actions(obs)
    assert np.array_equal(policy.compute_actions(obs)[0], other.compute_actions(obs)[0])
    with pytest.raises(OptionError, match=r"action space .Discrete\(1000\).*Discrete\(2\)"):
        policy.bind(OBS, Discrete(2))


class Plain(Policy):
    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        return (obs[:, 2] > 0).astype(np.int64), state, {}


def test_what_a_policy_does_not_do_is_an_error_that_says_so() -> None:
    policy = Plain()
    with pytest.raises(OptionError, match="no spaces yet"):
        _ = policy.action_space
    with pytest.raises(OptionError, match="does not learn"):
        policy.learn_on_batch(SampleBatch(obs=[1]))
    with pytest.raises(StateError, match="has no weights"):
        policy.set_weights({"w": np.zeros(1)})
    assert policy.get_weights() == {}
    assert policy.initial_state(3) == ()
    batch = SampleBatch(obs=[1])
    assert policy.postprocess_trajectory(batch) is batch


def test_evaluation_gives_each_environment_its_share() -> None:
    result = evaluate(Plain(), "CartPole-v1", episodes=11, seed=3, num_envs=4)
    assert result.returns.shape == result.lengths.shape == (11,)
    assert np.array_equal(result.returns, result.lengths)  # CartPole pays 1 a step
    assert result.steps == result.lengths.sum()
    assert np.isclose(result.standard_error, result.returns.std(ddof=1) / np.sqrt(11))
    again = evaluate(Plain(), "CartPole-v1", episodes=11, seed=3, num_envs=4)
    assert np.array_equal(result.returns, again.returns)
    # the first environment's episodes are the same whatever the others do
    alone = evaluate(Plain(), "CartPole-v1", episodes=3, seed=3, num_envs=1)
    assert np.array_equal(alone.returns, result.returns[:3])


def test_one_episode_has_no_standard_error_and_none_are_refused() -> None:
    assert np.isnan(evaluate(Plain(), "CartPole-v1", episodes=1, seed=0).standard_error)
    with pytest.raises(OptionError, match="episodes=0"):
        evaluate(Plain(), "CartPole-v1", episodes=0)


def test_evaluation_draws_nothing_from_a_policy_that_does_not_explore() -> None:
    from rlio.policies.dqn import DQN
    from rlio.sampling.env_runner import EnvRunner

    policy, other = DQN(), DQN()
    first, second = (EnvRunner("CartPole-v1", each, seed=0) for each in (policy, other))
    evaluate(policy, "CartPole-v1", episodes=3, seed=0)
    assert first.run().equals(second.run())
