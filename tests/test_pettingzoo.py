"""PettingZoo's environments, parallel and AEC, as MultiAgentEnv: the rows that their own loops would see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.test import api_test, parallel_api_test
from pettingzoo.utils.conversions import parallel_to_aec
from pettingzoo.utils.wrappers import OrderEnforcingWrapper

from rlio.envs.multi_agent_stepping import MultiAgentStepper, check_multi_agent_env
from rlio.envs.pettingzoo import (
    PettingZooAEC,
    PettingZooParallel,
    as_multi_agent_env,
    from_pettingzoo,
    is_pettingzoo,
)
from rlio.errors import OptionError, SchemaError
from rlio.policies.policy import Policy
from rlio.policies.random_policy import RandomPolicy
from rlio.sampling.config import RolloutConfig
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner

SPACE = Box(0, np.inf, (2,), np.float32)
# One object for each agent, which PettingZoo insists on.
ACTIONS = {f"p{i}": Discrete(3) for i in range(5)} | {agent: Discrete(2) for agent in "xyz"}
HEAP = Dict(observation=Box(-9, 999, (1,), np.float32), action_mask=Box(0, 1, (2,), np.int8))


class Falls(ParallelEnv):  # type: ignore[misc,type-arg]
    """Agent i falls after i + 2 steps; the last two are cut off together at step 5. They see who and when."""

    metadata = {"name": "falls_v0", "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = [f"p{i}" for i in range(5)]
        self.closed = False

    def observation_space(self, agent: str) -> Any:
        return SPACE

    def action_space(self, agent: str) -> Any:
        return ACTIONS[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self._t = list(self.possible_agents), 0
        return self._obs(), {agent: {} for agent in self.agents}

    def _obs(self) -> Any:
        return {agent: np.array([int(agent[1:]), self._t], np.float32) for agent in self.agents}

    def step(self, actions: Any) -> Any:
        assert set(actions) == set(self.agents)
        self._t += 1
        obs = self._obs()
        rewards = {agent: float(self._t) for agent in self.agents}
        cut = self._t == 5
        terminations = {agent: not cut and int(agent[1:]) + 2 == self._t for agent in self.agents}
        truncations = dict.fromkeys(self.agents, cut)
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agents = [a for a in self.agents if not (terminations[a] or truncations[a])]
        return obs, rewards, terminations, truncations, infos

    def close(self) -> None:
        self.closed = True


class Countdown(AECEnv):  # type: ignore[misc,type-arg]
    """Three players take from a heap in turns; who takes the last piece gets 1, the others -1 each.

    Player 2 leaves the game when 3 or fewer are left, at somebody else's turn.
    """

    metadata = {"name": "countdown_v0", "is_parallelizable": False, "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self, heap: int = 9) -> None:
        super().__init__()
        self.possible_agents = ["x", "y", "z"]
        self._heap = heap
        self._shown = {"observation": np.zeros(1, np.float32), "action_mask": np.zeros(2, np.int8)}

    def observation_space(self, agent: str) -> Any:
        return HEAP

    def action_space(self, agent: str) -> Any:
        return ACTIONS[agent]

    def observe(self, agent: str) -> Any:
        # Always the same arrays, as some environments have it.
        self._shown["observation"][:] = self.left + 100 * "xyz".index(agent)
        self._shown["action_mask"][:] = 1, self.left > 1
        return self._shown

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.left = self._heap
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self._order = ["x", "y", "z"]
        self.agent_selection = "x"

    def step(self, action: Any) -> None:
        if self.terminations[self.agent_selection] or self.truncations[self.agent_selection]:
            self._was_dead_step(action)
            return
        agent = self.agent_selection
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.left -= int(action) + 1
        if self.left <= 0:
            for each in self.agents:
                self.rewards[each] = 1.0 if each == agent else -1.0
            self.terminations = dict.fromkeys(self.agents, True)
        else:
            self.rewards[agent] = 0.25
            at = self._order.index(agent)
            following = self._order[(at + 1) % len(self._order)]
            if self.left <= 3 and "z" in self._order and agent != "z":
                self.truncations["z"] = True
                self.rewards["z"] = -0.5
                self._order.remove("z")
                following = self._order[(self._order.index(agent) + 1) % 2]
            self.agent_selection = following
        self._accumulate_rewards()
        self._deads_step_first()


class One(Policy):
    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        leaf = obs["observation"] if isinstance(obs, dict) else obs
        return np.zeros(len(leaf), np.int64), state, {}


def test_the_environments_here_are_what_pettingzoo_takes_for_correct() -> None:
    parallel_api_test(Falls(), num_cycles=20)
    api_test(Countdown(), num_cycles=20)


def test_which_kind_it_is_is_seen_by_its_methods() -> None:
    for env, kind in ((Falls(), PettingZooParallel), (Countdown(), PettingZooAEC)):
        assert is_pettingzoo(env)
        assert type(as_multi_agent_env(env)) is kind
    wrapped = as_multi_agent_env(OrderEnforcingWrapper(Countdown()))
    assert isinstance(wrapped, PettingZooAEC)
    assert isinstance(wrapped.unwrapped, Countdown)
    assert not is_pettingzoo(object())
    with pytest.raises(OptionError, match="methods of a PettingZoo"):
        from_pettingzoo(object())


def test_agents_of_a_parallel_environment_end_each_for_itself() -> None:
    """Issue 5.1: PettingZoo parallel; flags of their own are kept where the episode is over for others."""
    env = Falls()
    check_multi_agent_env(from_pettingzoo(env))
    runner = MultiAgentEnvRunner(env, {"one": One()}, config=RolloutConfig(batch_mode="complete_episodes"))
    batch = runner.run(10)
    rows = batch["one"]
    assert batch.env_steps() == 10
    for episode in range(2):
        part = rows[np.flatnonzero(rows["eps_id"] == sorted(set(rows["eps_id"].tolist()))[episode])]
        lengths = [int((part["agent_index"] == i).sum()) for i in range(5)]
        assert lengths == [2, 3, 4, 5, 5]
    assert np.array_equal(rows["obs"][:, 1], rows["t"])
    assert np.array_equal(rows["new_obs"][:, 1], rows["t"] + 1)
    assert np.array_equal(rows["obs"][:, 0], rows["agent_index"])
    last = np.flatnonzero(rows["dones"])
    assert rows["terminateds"][last].tolist() == [True, True, True, False, False] * 2
    assert rows["truncateds"][last].tolist() == [False, False, False, True, True] * 2
    assert "new_obs_valid" not in rows
    assert runner.env_id == "falls_v0"
    runner.stop()
    assert env.closed


def played(env: Any) -> dict[str, list[tuple[float, float]]]:
    """What PettingZoo's own loop sees: agent -> (observation acted on, reward until its next turn)."""
    env.reset(seed=0)
    seen: dict[str, list[Any]] = {}
    for agent in env.agent_iter():
        obs, reward, terminated, truncated, _ = env.last()
        if seen.get(agent):
            seen[agent][-1] = (seen[agent][-1][0], float(reward))
        over = terminated or truncated
        if not over:
            seen.setdefault(agent, []).append((float(obs["observation"][0]), 0.0))
        env.step(None if over else 0)
    return seen


@pytest.mark.parametrize("wrap", [lambda env: env, OrderEnforcingWrapper], ids=["bare", "wrapped"])
@pytest.mark.parametrize("heap", [1, 4, 9, 10])
def test_an_aec_environment_gives_the_rows_that_its_own_loop_sees(wrap: Any, heap: int) -> None:
    """Issue 5.1: PettingZoo AEC: turns, rewards since the last turn, agents that leave at another's turn."""
    expected = played(Countdown(heap))
    runner = MultiAgentEnvRunner(
        lambda: wrap(Countdown(heap)),
        {"one": One()},
        config=RolloutConfig(batch_mode="complete_episodes"),
        seed=0,
    )
    rows = runner.run(1)["one"]
    for i, agent in enumerate("xyz"):
        own = rows[np.flatnonzero(rows["agent_index"] == i)]
        found = list(zip(own["obs"]["observation"][:, 0].tolist(), own["rewards"].tolist(), strict=True))
        assert found == expected.get(agent, [])
    assert rows["dones"].sum() == len(expected)
    assert np.array_equal(rows["new_obs"]["observation"][:, 0] // 100, rows["agent_index"])
    assert "new_obs_valid" not in rows, "dead agents are asked for their final observation"
    assert bool(rows["truncateds"].any()) == ("z" in expected)
    assert rows["obs"]["action_mask"].dtype == np.int8


def test_a_parallel_environment_as_aec_gives_the_same_episodes() -> None:
    def rows_of(env: Any) -> Any:
        config = RolloutConfig(batch_mode="complete_episodes")
        return MultiAgentEnvRunner(env, {"one": One()}, config=config, seed=0).run(1)["one"]

    parallel, turns = rows_of(Falls), rows_of(lambda: parallel_to_aec(Falls()))
    for name in ("obs", "agent_index", "actions", "rewards", "terminateds", "truncateds"):
        assert np.array_equal(parallel[name], turns[name]), name


def test_whose_turn_it_is_decides_who_acts() -> None:
    env = from_pettingzoo(Countdown())
    stepper = MultiAgentStepper(env)
    step = stepper.reset(seed=1)
    assert list(step.observations) == ["x"]
    with pytest.raises(SchemaError, match="no observation to act on"):
        stepper.step({"y": 0})
    env.reset()
    with pytest.raises(SchemaError, match="it is the turn of agent 'x'"):
        env.step({"y": 0})


def test_policies_by_agents_and_random_play_end_all_episodes() -> None:
    policies = {agent: RandomPolicy() for agent in "xyz"}
    runner = MultiAgentEnvRunner(Countdown, policies, config=RolloutConfig(num_envs=3), seed=4)
    batch = runner.run(50)
    assert batch.env_steps() == 150
    assert set(batch) == {"x", "y", "z"}
    assert runner.get_metrics().counts.episodes > 10


def test_without_possible_agents_nothing_is_known() -> None:
    env = Countdown()
    del env.possible_agents
    with pytest.raises(OptionError, match="no possible_agents"):
        from_pettingzoo(env)
