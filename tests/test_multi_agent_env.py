"""MultiAgentEnv: copies of one environment, and what is refused of environments that make no sense."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlio.envs.multi_agent import MultiAgentEnv, make_multi_agent
from rlio.envs.multi_agent_stepping import MultiAgentStepper, check_multi_agent_env
from rlio.envs.pettingzoo import as_multi_agent_env
from rlio.errors import EnvError, OptionError, SchemaError

NO_FLAGS = {"__all__": False}


class Scripted(MultiAgentEnv):
    """Gives what it is told to."""

    possible_agents = ("a", "b", "c")
    observation_spaces = {agent: Box(0, 9, (1,), np.float32) for agent in "abc"}  # noqa: RUF012
    action_spaces = {agent: Discrete(3) for agent in "abc"}  # noqa: RUF012

    def __init__(self, *steps: Any, start: Any = None) -> None:
        self._script = list(steps)
        self._start = ({"a": obs(0)}, {}) if start is None else start

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._start

    def step(self, actions: Any) -> Any:
        return self._script.pop(0)


def obs(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def made(
    observations: Any = (), rewards: Any = (), terminateds: Any = (), truncateds: Any = (), infos: Any = ()
) -> Any:
    """Five dicts of a step."""
    return (
        dict(observations),
        dict(rewards),
        NO_FLAGS | dict(terminateds),
        NO_FLAGS | dict(truncateds),
        dict(infos),
    )


def begun(*steps: Any, **options: Any) -> MultiAgentStepper:
    stepper = MultiAgentStepper(Scripted(*steps, **options))
    stepper.reset()
    return stepper


# ---- copies ----


def test_copies_are_independent_seeded_apart_and_over_when_the_last_one_is() -> None:
    """Reference 2.4 / 6.2: `make_multi_agent` gives each agent a copy of the environment."""
    env = make_multi_agent("CartPole-v1")({"num_agents": 3})
    assert env.possible_agents == [0, 1, 2]
    first, _ = env.reset(seed=7)
    alone = gym.make("CartPole-v1")
    assert all(np.array_equal(first[i], alone.reset(seed=7 + i)[0]) for i in range(3))
    stepper = MultiAgentStepper(env)
    step = stepper.reset(seed=7)
    lengths = dict.fromkeys(range(3), 0)
    while not step.is_over:
        for agent in step.observations:
            lengths[agent] += 1
        step = stepper.step({agent: int(agent == 0) for agent in step.observations})
    assert stepper.steps == max(lengths.values())
    assert step.terminated
    assert not step.truncated
    assert len(set(lengths.values())) > 1, "they die at different times"
    check_multi_agent_env(env)
    env.close()


def test_copies_of_which_one_was_cut_off_are_cut_off() -> None:
    env = make_multi_agent(lambda: gym.wrappers.TimeLimit(gym.make("CartPole-v1").unwrapped, 3))(num_agents=2)
    stepper = MultiAgentStepper(env)
    step = stepper.reset(seed=0)
    for _ in range(3):
        step = stepper.step(dict.fromkeys(step.observations, 0))
    assert (step.terminated, step.truncated, step.is_over) == (False, True, True)
    assert step.ended == {0: (False, True), 1: (False, True)}
    assert step.finals.keys() == {0, 1}
    assert not step.observations
    with pytest.raises(OptionError, match="at least 1"):
        make_multi_agent("CartPole-v1")(num_agents=0)
    with pytest.raises(OptionError, match="a gymnasium id"):
        make_multi_agent(3)  # type: ignore[arg-type]


def test_an_environment_with_one_agent_is_refused_with_advice() -> None:
    """Reference 2.1, multi-agent validation: a ValueError."""
    with pytest.raises(ValueError, match="make_multi_agent"):
        as_multi_agent_env(gym.make("CartPole-v1"))
    with pytest.raises(OptionError, match="expected a MultiAgentEnv"):
        as_multi_agent_env(object())
    env = Scripted()
    assert as_multi_agent_env(env) is env


def test_an_environment_with_the_methods_of_rllibs_is_taken_as_it_is() -> None:
    class Theirs:
        possible_agents = ("x",)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any: ...
        def step(self, actions: Any) -> Any: ...
        def close(self) -> None: ...
        def get_observation_space(self, agent: Any) -> Any: ...
        def get_action_space(self, agent: Any) -> Any: ...

    env = Theirs()
    assert as_multi_agent_env(env) is env  # type: ignore[comparison-overlap]


# ---- who ends when ----


def test_who_has_no_flag_of_its_own_gets_that_of_all() -> None:
    stepper = begun(
        made({"a": obs(1), "b": obs(1)}),
        made({"a": obs(2)}, terminateds={"__all__": True}, truncateds={"a": True}),
    )
    stepper.step({"a": 0})
    step = stepper.step({"a": 0, "b": 0})
    assert step.ended == {"a": (False, True), "b": (True, False)}
    assert step.finals.keys() == {"a"}
    assert step.is_over
    assert step.terminated


def test_an_agent_born_done_never_acts() -> None:
    """Reference 2.3: agent born done."""
    stepper = begun(made({"a": obs(1), "b": obs(1)}, {"b": 5.0}, {"b": True}), made({"a": obs(2)}))
    step = stepper.step({"a": 0})
    assert step.observations.keys() == {"a"}
    assert step.ended.keys() == {"b"}
    assert stepper._seen - stepper._gone == {"a"}
    stepper.step({"a": 0})


def test_what_is_repeated_of_the_dead_is_passed_over_but_for_rewards() -> None:
    stepper = begun(
        made({"a": obs(1), "b": obs(1)}),
        made({"a": obs(2), "b": obs(2)}, terminateds={"b": True}),
        made({"a": obs(3), "b": obs(2)}, {"b": 4.0}, {"b": True}),
        made({"a": obs(3), "b": obs(3)}),
    )
    stepper.step({"a": 0})
    step = stepper.step({"a": 0, "b": 0})
    assert step.ended == {"b": (True, False)}
    step = stepper.step({"a": 0})
    assert not step.ended
    assert step.observations.keys() == {"a"}
    assert step.rewards == {"b": 4.0}
    with pytest.raises(SchemaError, match="'b', which has ended before"):
        stepper.step({"a": 0})


def test_a_horizon_truncates_and_keeps_the_observations_as_final() -> None:
    stepper = MultiAgentStepper(Scripted(made({"a": obs(1)}), made({"a": obs(2)})), horizon=2)
    stepper.reset()
    assert not stepper.step({"a": 0}).is_over
    step = stepper.step({"a": 0})
    assert (step.truncated, step.terminated) == (True, False)
    assert step.ended == {"a": (False, True)}
    assert step.finals["a"] == 2


def test_common_infos_are_told_apart() -> None:
    """Reference 2.3: common info."""
    stepper = MultiAgentStepper(
        Scripted(
            made({"a": obs(1)}, infos={"__common__": {"score": 3}, "a": {"x": 1}}),
            start=({"a": obs(0)}, {"__common__": {"score": 0}}),
        )
    )
    assert stepper.reset().common == {"score": 0}
    step = stepper.step({"a": 0})
    assert (step.common, step.infos) == ({"score": 3}, {"a": {"x": 1}})


# ---- what is refused ----


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (({}, {}, {}, NO_FLAGS, {}), "terminateds without '__all__'"),
        (({}, {}, NO_FLAGS, {"a": True}, {}), "truncateds without '__all__'"),
        (({}, {}, NO_FLAGS, {}), "expected|observations, rewards"),
        (([], {}, NO_FLAGS, NO_FLAGS, {}), "observations of type list"),
        (({}, 1.0, NO_FLAGS, NO_FLAGS, {}), "rewards of type float"),
        (made({"nobody": obs(1)}), "agent 'nobody', which it does not know"),
        (made({}, {"nobody": 1.0}), "reward for agent 'nobody'"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(step: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message) as caught:
        begun(step).step({"a": 0})
    assert "Scripted.step()" in str(caught.value)


def test_actions_are_of_those_who_have_an_observation() -> None:
    """Reference 2.5: an agent acted that has no observation."""
    stepper = begun(made({"b": obs(1)}), made())
    with pytest.raises(SchemaError, match="agent 'b', which has no observation to act on"):
        stepper.step({"a": 0, "b": 1})
    stepper.step({"a": 0})
    with pytest.raises(SchemaError, match="no action of agent 'b', which must act"):
        stepper.step({})


def test_a_reset_that_makes_no_sense_is_refused() -> None:
    for start, message in (
        (({"a": obs(0)},), "expected"),
        ((obs(0), {}), "observations of type ndarray"),
        (({"z": obs(0)}, {}), "agent 'z'"),
    ):
        with pytest.raises(SchemaError, match=message):
            MultiAgentStepper(Scripted(start=start)).reset()


def test_ids_are_int_or_str_and_not_those_with_a_meaning() -> None:
    for agent in ("__all__", "__common__", 1.5, True, ("a", 1)):
        env = Scripted()
        env.possible_agents = (agent,)  # type: ignore[assignment]
        with pytest.raises(OptionError, match="agent id"):
            MultiAgentStepper(env)


def test_an_episode_in_which_nobody_ever_acts_again_is_an_error() -> None:
    class Dead(Scripted):
        def step(self, actions: Any) -> Any:
            return made()

    stepper = MultiAgentStepper(Dead())
    stepper.reset()
    stepper.step({"a": 0})
    for _ in range(10_000):
        stepper.step({})
    with pytest.raises(SchemaError, match="no agent to act"):
        stepper.step({})


def test_the_check_looks_into_spaces_and_rewards() -> None:
    with pytest.raises(EnvError, match=r"agent 'a': the observation is 11\.0 at index"):
        check_multi_agent_env(Scripted(made({"a": obs(11)})), steps=1)
    with pytest.raises(SchemaError, match="the reward 'much'"):
        check_multi_agent_env(Scripted(made({"a": obs(1)}, {"a": "much"})), steps=1)
    env = Scripted()
    env.action_spaces = {}
    with pytest.raises(OptionError, match="action_spaces has no agent 'a'"):
        check_multi_agent_env(env)
    check_multi_agent_env(Scripted(*[made({"a": obs(1)}, {"a": 1})] * 9), steps=9)


def test_an_agent_that_only_the_methods_know_may_appear() -> None:
    class Open(Scripted):
        def get_observation_space(self, agent_id: Any) -> Any:
            return Box(0, 9, (1,), np.float32)

    stepper = MultiAgentStepper(Open(made({"guest7": obs(1)})))
    stepper.reset()
    assert stepper.step({"a": 0}).observations.keys() == {"guest7"}
