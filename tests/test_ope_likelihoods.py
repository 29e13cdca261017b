"""compute_log_likelihoods: how likely an action is, as policies say it, is what they recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from rlio.errors import OptionError
from rlio.policies.dqn import DQN
from rlio.policies.networks import gru
from rlio.policies.policy import Policy
from rlio.policies.random_policy import RandomPolicy
from rlio.policies.torch_policy import TorchPolicy

OBS = Box(-1.0, 1.0, (3,), np.float32)
SPACES: list[Space[Any]] = [
    Discrete(4, start=2),
    MultiDiscrete([2, 3], start=[1, 0]),
    MultiBinary(3),
    Box(-2.0, 1.0, (2,), np.float32),
    Dict(gear=Discrete(3), wheel=Box(-np.inf, np.inf, (2,), np.float32)),
    Tuple((Discrete(2), MultiBinary(2))),
]


def observations(rows: int = 200) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)


@pytest.mark.parametrize("make", [RandomPolicy, TorchPolicy])
@pytest.mark.parametrize("space", SPACES, ids=lambda space: type(space).__name__)
def test_the_likelihood_of_what_was_drawn_is_the_recorded_one(make: type[Policy], space: Space[Any]) -> None:
    policy = make()
    policy.bind(OBS, space, seed=0)
    actions, _, extras = policy.compute_actions(observations())
    found = policy.compute_log_likelihoods(actions, observations())
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, extras["action_logp"], atol=1e-4)


@pytest.mark.parametrize(("low", "high"), [(0.0, np.inf), (-np.inf, 3.0), (-np.inf, np.inf)])
def test_random_numbers_with_a_bound_or_none_have_the_density_they_were_drawn_with(
    low: float, high: float
) -> None:
    policy = RandomPolicy()
    policy.bind(OBS, Box(low, high, (2,), np.float64), seed=0)
    actions, _, extras = policy.compute_actions(observations())
    np.testing.assert_allclose(
        policy.compute_log_likelihoods(actions, observations()), extras["action_logp"], atol=1e-4
    )


def test_an_action_outside_the_space_is_never_random() -> None:
    policy = RandomPolicy()
    policy.bind(OBS, Discrete(2), seed=0)
    assert policy.compute_log_likelihoods(np.array([0, 2, -1]), observations(3))[1:].tolist() == [-np.inf] * 2


def test_dqn_is_epsilon_greedy_at_the_end_of_its_schedule_unless_asked_for_another_time() -> None:
    policy = DQN(initial_epsilon=1.0, final_epsilon=0.2, epsilon_timesteps=100)
    policy.bind(OBS, Discrete(2, start=5), seed=0)
    greedy, _, _ = policy.compute_actions(observations(), explore=False)
    best = policy.compute_log_likelihoods(greedy, observations())
    other = policy.compute_log_likelihoods(11 - greedy, observations())
    np.testing.assert_allclose(np.exp(best), 0.9, atol=1e-6)
    np.testing.assert_allclose(np.exp(other), 0.1, atol=1e-6)
    early = policy.compute_log_likelihoods(greedy, observations(), timestep=0)
    np.testing.assert_allclose(np.exp(early), 0.5, atol=1e-6)
    assert (policy.compute_log_likelihoods(greedy, observations(), explore=False) == 0).all()


def test_without_exploration_all_probability_is_on_the_most_likely_action() -> None:
    policy = TorchPolicy()
    policy.bind(OBS, MultiDiscrete([2, 2]), seed=0)
    actions, _, _ = policy.compute_actions(observations(), explore=False)
    assert (policy.compute_log_likelihoods(actions, observations(), explore=False) == 0).all()
    actions[:, 1] = 1 - actions[:, 1]
    assert (policy.compute_log_likelihoods(actions, observations(), explore=False) == -np.inf).all()


def test_policies_that_cannot_say_it_refuse() -> None:
    recurrent = TorchPolicy(gru)
    recurrent.bind(OBS, Discrete(2), seed=0)
    with pytest.raises(OptionError, match="state of a recurrent module"):
        recurrent.compute_log_likelihoods(np.zeros(3, np.int64), observations(3))
    continuous = TorchPolicy()
    continuous.bind(OBS, Box(-1.0, 1.0, (2,)), seed=0)
    with pytest.raises(OptionError, match="no density"):
        continuous.compute_log_likelihoods(np.zeros((3, 2)), observations(3), explore=False)

    class Silent(Policy):
        def compute_actions(self, obs: Any, state: Any = (), **_: Any) -> Any:
            return np.zeros(len(obs), np.int64), state, {}

    with pytest.raises(OptionError, match="pass a function"):
        Silent().compute_log_likelihoods(np.zeros(3), observations(3))
