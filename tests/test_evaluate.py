"""evaluate: measured is what environments give, and nobody learns meanwhile."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from linear_policy import LinearPolicy

from rlio.connectors.mean_std import MeanStdFilter
from rlio.errors import StateError
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.evaluate import evaluate


class Fives(gym.Env[Any, Any]):
    """Four steps with a reward of 5 each; observations count steps."""

    observation_space = Box(0.0, 9.0, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(1, self.t, np.float32), 5.0, self.t == 4, False, {}


class Watches(LinearPolicy):
    def __init__(self) -> None:
        super().__init__()
        self.observed: list[float] = []

    def compute_actions(self, obs: Any, *args: Any, **kwargs: Any) -> Any:
        self.observed += obs.ravel().tolist()
        return super().compute_actions(obs, *args, **kwargs)


def test_callbacks_hear_of_an_evaluation_and_its_episodes() -> None:
    """Row "on_evaluate_start/end" of 2.4."""
    log: list[Any] = []

    class Tells(Callbacks):
        def on_evaluate_start(self, **kwargs: Any) -> None:
            log.append("start")

        def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
            log.append(episode.total_reward)

        def on_evaluate_end(self, *, evaluation_metrics: Any, **kwargs: Any) -> None:
            log.append(evaluation_metrics.mean)

    result = evaluate(LinearPolicy(), Fives, episodes=3, num_envs=1, seed=0, callbacks=Tells)
    assert log == ["start", 20.0, 20.0, 20.0, 20.0]
    assert result.lengths.tolist() == [4, 4, 4]


def test_filters_are_those_of_training_and_stay_as_they_are() -> None:
    config = RolloutConfig(rollout_fragment_length=40, observation_connectors=[MeanStdFilter()])
    runner = EnvRunner(Fives, LinearPolicy(), config=config, seed=0)
    runner.run()
    filters = runner.get_filters()
    (trained,) = filters["default_policy"]
    policy = Watches()
    evaluate(
        policy,
        Fives,
        episodes=2,
        num_envs=1,
        rollout=config,
        filters=filters,
    )
    stat = trained.running_stats
    expected = (np.arange(4) - stat.mean[0]) / (stat.std[0] + 1e-8)
    assert policy.observed[:4] == pytest.approx(expected.tolist(), abs=1e-5)
    assert policy.observed[4:8] == policy.observed[:4]
    assert trained.running_stats.n == stat.n
    runner.stop()
    with pytest.raises(StateError, match="0 filters"):
        evaluate(policy, Fives, episodes=1, rollout=config, filters={})


def test_an_action_connector_stands_between_policy_and_environment() -> None:
    sent = []

    class Keeps(Fives):
        def step(self, action: Any) -> Any:
            sent.append(int(action))
            return super().step(action)

    rollout = RolloutConfig(action_connectors=[lambda actions: actions + 1])
    evaluate(LinearPolicy(), Keeps, episodes=1, rollout=rollout)
    assert sent == [1] * 4


def test_a_config_of_training_is_taken_but_for_what_training_alone_needs() -> None:
    """Episodes are whole, rewards are the environment's, and nothing explores unless it is asked to."""
    explored = []

    class Tells(LinearPolicy):
        def compute_actions(self, obs: Any, state: Any = (), *, explore: bool = True, **kwargs: Any) -> Any:
            explored.append(explore)
            return super().compute_actions(obs, state, explore=explore, **kwargs)

    rollout = RolloutConfig(
        rollout_fragment_length="auto",
        train_batch_size=64,
        num_envs=5,
        clip_rewards=True,
        horizon=3,
        input_evaluation=["wis"],
        input_evaluation_gamma=0.9,
    )
    result = evaluate(Tells(), Fives, episodes=3, num_envs=2, rollout=rollout)
    assert result.returns.tolist() == [15.0] * 3
    assert not any(explored)
    evaluate(Tells(), Fives, episodes=1, explore=True, rollout=rollout)
    assert explored[-1]
