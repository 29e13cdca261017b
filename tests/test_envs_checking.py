"""What is wrong with an environment is told when it is first reset and stepped, with the place.

Row of RLlib's tables: environment checking that can be turned off.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from further import further
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import SyncVectorEnv

from rlio.envs.checking import EnvCheck
from rlio.errors import EnvError
from rlio.policies.random_policy import RandomPolicy
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.make_env import make_stepper

NESTED = Dict(a=Box(-1, 1, (2,), np.float32), b=Tuple([Discrete(3), Box(0, 9, (), np.float64)]))


class Plain(gym.Env[Any, Any]):
    """Does as it should, unless a subclass says otherwise."""

    observation_space: Any = Box(-1, 1, (2,), np.float32)
    action_space: Any = Discrete(2)
    obs: Any = np.zeros(2, np.float32)
    next_obs: Any = np.zeros(2, np.float32)
    rest: Any = (0.5, False, False, {})
    info: Any = {}  # noqa: RUF012 - what reset gives, whatever it is

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.obs, self.info

    def step(self, action: Any) -> Any:
        return self.next_obs, *self.rest


def kind(**attributes: Any) -> Any:
    return type("Wrong", (Plain,), attributes)


WRONG = {
    "a space of another library": (
        {"observation_space": "box"},
        r"environment 0 \(Wrong\): observation_space is 'box': expected a gymnasium space",
    ),
    "no info in reset": (
        {"reset": lambda self, seed=None: self.obs},
        r"reset\(\): returned ndarray array.*: expected \(observation, info\)",
    ),
    "the old interface": (
        {"step": lambda self, action: (self.obs, 0.0, False, {})},
        r"step\(\): returned a tuple of 4: expected \(observation, reward, terminated, truncated, info\)",
    ),
    "a shape": (
        {"obs": np.zeros(3, np.float32)},
        r"reset\(\) gave float32 \(3,\): expected float32 \(2,\)",
    ),
    "a dtype that does not fit": (
        {"observation_space": Box(0, 9, (2,), np.uint8), "obs": np.zeros(2, np.float32)},
        r"gave float32 \(2,\): expected uint8 \(2,\)",
    ),
    "out of bounds in a step": (
        {"next_obs": np.array([0.0, 1.5], np.float32)},
        r"environment 0 \(Wrong\), step\(\): the observation is 1.5 at index \[1\], which is not in its",
    ),
    "not a number": (
        {"obs": np.array([np.nan, 0.0], np.float32)},
        r"reset\(\): the observation is nan at index \[0\]",
    ),
    "a part is missing": (
        {"observation_space": NESTED, "obs": {"a": np.zeros(2, np.float32)}},
        r"reset\(\): the observation has no value at b/0: a dict with the keys \['a'\]",
    ),
    "a part is wrong": (
        {"observation_space": NESTED, "obs": {"a": np.zeros(2, np.float32), "b": (3, np.float64(1))}},
        r"reset\(\): the observation at b/0 is 3, which is not in its space Discrete\(3\)",
    ),
    "a reward": ({"rest": (np.zeros(3), False, False, {})}, r"step\(\): the reward is array.*a number"),
    "an endless reward": ({"rest": (np.inf, False, False, {})}, r"step\(\): the reward is inf: .*finite"),
    "a flag": ({"rest": (0.0, 0, False, {})}, r"step\(\): terminated is 0: expected True or False"),
    "another flag": ({"rest": (0.0, False, None, {})}, r"step\(\): truncated is None"),
    "an info": ({"rest": (0.0, False, False, None)}, r"step\(\): the info is None: expected a dict"),
    "an info of reset": ({"info": []}, r"reset\(\): the info is \[\]: expected a dict"),
    "a step without action": (
        {"step": lambda self: None},
        r"step\(\) cannot be called: too many positional arguments",
    ),
    "a reset with an argument": (
        {"reset": lambda self, level: None},
        r"reset\(level\) cannot be called: missing a required argument: 'level'",
    ),
}


def first_steps(env: Any, mode: str = "sync", **options: Any) -> None:
    stepper = make_stepper(env, RolloutConfig(num_envs=2, vectorize_mode=mode, **options))
    try:
        stepper.reset()
        stepper.step(np.zeros(2, int))
    finally:
        stepper.close()


@pytest.mark.parametrize(("attributes", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told_with_the_place(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message) as caught:
        first_steps(kind(**attributes))
    assert "check_env=False skips this check" in str(caught.value)


@pytest.mark.parametrize("name", ["a step without action", *further("a shape", "out of bounds in a step")])
def test_it_is_told_from_other_processes_too(name: str) -> None:
    attributes, message = WRONG[name]
    # Both are wrong, and either may be the first to say so.
    with pytest.raises(EnvError, match=message.replace("environment 0", r"environment \d")):
        first_steps(kind(**attributes), "async")


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarting"])
@pytest.mark.each_value_once
def test_it_is_told_once_and_no_restart_is_tried(mode: str, restarts: bool) -> None:
    """It was an EnvError within an EnvError, with the advice to make such environments again."""
    with pytest.raises(EnvError, match=r"7\.0 at index") as caught:
        first_steps(
            kind(next_obs=np.array([0.0, 7.0], np.float32)), mode, restart_failed_sub_environments=restarts
        )
    assert "EnvError" not in str(caught.value)
    assert "restart_failed_sub_environments" not in str(caught.value)
    assert len(re.findall(r"environment \d", str(caught.value))) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_without_checks_only_what_cannot_be_stored_is_an_error(mode: str) -> None:
    first_steps(kind(next_obs=np.array([0.0, 1.5], np.float32)), mode, check_env=False)
    first_steps(kind(rest=(0.0, 0, False, {})), mode, check_env=False)
    with pytest.raises(EnvError, match=r"gave float32 \(3,\): expected float32 \(2,\)"):
        first_steps(kind(obs=np.zeros(3, np.float32)), mode, check_env=False)
    three = kind(reset=lambda self, seed=None, options=None: (self.obs, {}, 3))
    with pytest.raises(EnvError) as caught:
        first_steps(three, mode, check_env=False)
    assert isinstance(caught.value.__cause__, ValueError)


def test_checks_look_once_and_step_nothing() -> None:
    calls: list[str] = []

    class Counting(Plain):
        def reset(self, **options: Any) -> Any:
            calls.append("reset")
            return super().reset(**options)

        def step(self, action: Any) -> Any:
            calls.append("step")
            return super().step(action)

    stepper = make_stepper(Counting)
    stepper.reset()
    stepper.step(np.zeros(1, int))
    assert calls == ["reset", "step"]
    # From here on nobody looks.
    stepper.envs.envs[0].next_obs = np.array([0.0, 7.0], np.float32)
    stepper.step(np.zeros(1, int))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Blackjack-v1", "Taxi-v4", "FrozenLake-v1"])
def test_gymnasiums_own_environments_are_legal(env_id: str) -> None:
    if env_id not in gym.registry:
        pytest.skip(f"this gymnasium has no {env_id}")
    setup = RolloutConfig(num_envs=2)
    stepper = make_stepper(env_id, setup)
    stepper.reset()
    stepper.action_space.seed(0)
    for _ in range(3):
        stepper.step(np.stack([stepper.action_space.sample() for _ in range(2)]))
    stepper.close()


def test_a_runner_checks_unless_told_not_to() -> None:
    wrong = kind(next_obs=np.array([0.0, 1.5], np.float32))
    with pytest.raises(EnvError, match=r"1.5 at index \[1\]"):
        EnvRunner(wrong, RandomPolicy(), seed=0).run()
    runner = EnvRunner(wrong, RandomPolicy(), config=RolloutConfig(check_env=False), seed=0)
    assert runner.run()["new_obs"][0, 1] == 1.5
    runner.stop()


def test_vector_environments_are_checked_too() -> None:
    class Odd(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            obs, rewards, *rest = super().step(actions)
            return obs, rewards[:1], *rest

    stepper = make_stepper(lambda: Odd([Plain, Plain], autoreset_mode="SameStep"), RolloutConfig(num_envs=2))
    stepper.reset()
    with pytest.raises(
        EnvError, match=r"Odd, step\(\) gave the rewards array\(\[0\.5\]\): expected 2 numbers"
    ):
        stepper.step(np.zeros(2, int))


def test_an_environment_without_a_seed_is_refused() -> None:
    class Old(Plain):
        def reset(self) -> Any:  # type: ignore[override]
            return self.obs, {}

    for mode in ("sync", "async"):
        with pytest.raises(EnvError, match=r"reset\(\).* cannot be called.*seed"):
            make_stepper(Old, RolloutConfig(vectorize_mode=mode))


def test_a_check_alone() -> None:
    check = EnvCheck(Plain(), "the environment")
    check.reset((np.zeros(2, np.float32), {}))
    check.step((np.zeros(2), np.float32(1), np.bool_(True), False, {}))
    with pytest.raises(EnvError, match=r"the environment \(Plain\), step"):
        check.step(None)
