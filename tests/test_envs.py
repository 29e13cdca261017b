"""Making and stepping vector environments, and the leaves of spaces."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Text, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlio.envs.leaves import leaf_of, leaves_of
from rlio.envs.vector import VectorStepper
from rlio.errors import SchemaError
from rlio.sampling.config import RolloutConfig
from rlio.sampling.make_env import make_stepper


class Short(gym.Env):
    """Ends after two steps; its info is nested and changes its keys."""

    observation_space = Box(0, 10, (), np.float32)
    action_space = Discrete(2)
    closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.float32(0), {"where": {"start": True}}

    def step(self, action: Any) -> Any:
        self.t += 1
        info = {"where": {"t": self.t}, "name": "x" * self.t, "place": np.array([self.t, 0])}
        return np.float32(self.t), 1.0, self.t == 2, False, info

    def close(self) -> None:
        type(self).closed += 1


def test_leaves_are_found_in_the_order_of_the_space_and_text_is_an_object() -> None:
    space = Dict(b=Tuple([Discrete(3, start=-1), MultiBinary(4)]), a=Text(5))
    found = leaves_of(space)
    value = space.sample()
    assert {leaf.path for leaf in found} == {("a",), ("b", 0), ("b", 1)}
    for leaf in found:
        assert leaf_of(value, leaf.path) is not None
        assert leaf.is_object == (leaf.path == ("a",))
    assert leaves_of(Discrete(2))[0].path == ()


def test_a_value_that_is_not_nested_as_its_space_names_the_place() -> None:
    with pytest.raises(SchemaError, match="nothing at b/1"):
        leaf_of({"b": (1,)}, ("b", 1))


def test_keys_that_are_no_strings_are_refused() -> None:
    with pytest.raises(SchemaError, match="str keys"):
        leaves_of(Dict({1: Discrete(2)}))  # type: ignore[dict-item]


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_the_info_of_an_episodes_last_step_is_that_of_the_step(mode: AutoresetMode) -> None:
    stepper = VectorStepper(SyncVectorEnv([Short, Short], autoreset_mode=mode))
    stepper.reset(seed=0)
    for t in (1, 2):
        step = stepper.step(np.array([0, 1]))
        infos = stepper.env_infos(step)
        assert [info["where"] for info in infos] == [{"t": t}] * 2
        assert [info["name"] for info in infos] == ["x" * t] * 2
        assert [info["place"].tolist() for info in infos] == [[t, 0]] * 2
        assert all(type(info["where"]["t"]) is int for info in infos)


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_every_mode_gives_the_final_observation_and_the_next_first_one(mode: AutoresetMode) -> None:
    stepper = VectorStepper(SyncVectorEnv([Short], autoreset_mode=mode))
    seen = [float(stepper.reset(seed=0)[0])]
    transitions = []
    for _ in range(6):
        step = stepper.step(np.array([0]))
        after = float(step.finals[0][1][0]) if step.finals else float(step.obs[0])
        if step.valid is None or step.valid[0]:
            transitions.append((seen[-1], after, bool(step.terminateds[0])))
        seen.append(float(step.obs[0]))
    assert transitions[:4] == [(0.0, 1.0, False), (1.0, 2.0, True), (0.0, 1.0, False), (1.0, 2.0, True)]


def test_environments_that_are_made_here_are_closed_with_the_stepper() -> None:
    Short.closed = 0
    make_stepper(Short, RolloutConfig(num_envs=3)).close()
    assert Short.closed == 3


def test_environments_are_seeded_one_after_the_other() -> None:
    stepper = VectorStepper(SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3))
    together = np.array(stepper.reset(seed=5))
    for i in range(3):
        alone = VectorStepper(SyncVectorEnv([lambda: gym.make("CartPole-v1")]))
        assert np.array_equal(alone.reset(seed=5 + i)[0], together[i])


def test_a_function_may_make_a_vector_environment() -> None:
    for setup in (RolloutConfig(), RolloutConfig(num_envs=4, vectorize_mode="native")):
        stepper = make_stepper(lambda: SyncVectorEnv([Short] * 4), setup)
        assert stepper.num_envs == 4
        stepper.close()
