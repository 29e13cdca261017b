"""MultiAgentEnvRunner: true transitions of agents that come and go, sizes, policies, callbacks, failures."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from counter_agents import AgentCounter, Chosen, by_agent, check_stream, map_agent, plan, reward
from further import further
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.connectors.connector import Connector, Streams
from rlio.connectors.frame_stack import FrameStack
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.multi_agent import MultiAgentEnv, make_multi_agent
from rlio.errors import ClosedError, EnvError, OptionError, SchemaError, StateError
from rlio.policies.actor_critic import ActorCritic
from rlio.policies.networks import gru
from rlio.policies.policy import Policy
from rlio.policies.policy_map import PolicyMap
from rlio.policies.policy_spec import PolicySpec
from rlio.policies.random_policy import RandomPolicy
from rlio.policies.torch_policy import TorchPolicy
from rlio.readers.sampler_input import Runner, SamplerInput
from rlio.sampling.agent_parts import cut, joined
from rlio.sampling.agent_rows import EPISODE
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.config import RolloutConfig
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.testing import assert_same

TRUNCATE, COMPLETE = "truncate_episodes", "complete_episodes"


def counting(
    *, late: bool = False, repeats: bool = False, seed: int = 1, **config: Any
) -> MultiAgentEnvRunner:
    return MultiAgentEnvRunner(
        lambda: AgentCounter(late=late, repeats=repeats),
        {"even": Chosen(), "odd": Chosen()},
        map_agent,
        config=RolloutConfig(**config),
        seed=seed,
    )


# ---- true transitions ----


@pytest.mark.few(1)
@pytest.mark.each_value_once
@pytest.mark.parametrize("mode", [TRUNCATE, COMPLETE])
@pytest.mark.parametrize("repeats", [False, True], ids=["once", "repeated"])
@pytest.mark.parametrize("least", [6_000, *further(60_000), pytest.param(250_000, marks=pytest.mark.soak)])
def test_every_row_is_a_true_transition_of_its_agent(mode: Any, repeats: bool, least: int) -> None:
    """Agents join late, leave early, act in turns, are born done, terminate, are cut off, and end unseen.

    These environments have no autoreset: the runner resets them, as with DISABLED.
    """
    runner = counting(repeats=repeats, num_envs=16, rollout_fragment_length=200, batch_mode=mode)
    batches: list[MultiAgentBatch] = []
    rows = 0
    while rows < least:
        batches.append(runner.run())
        assert batches[-1].agent_steps(), "a batch without rows: the loop would not end"
        rows += batches[-1].agent_steps()
    assert check_stream(batches, whole=mode == COMPLETE) == rows
    steps = [batch.env_steps() for batch in batches]
    assert all(n == 3200 if mode == TRUNCATE else 3200 <= n < 3200 + 30 for n in steps)
    assert runner.steps_dropped == 0
    assert runner.late_rewards == 0
    runner.stop()


def test_rewards_after_an_agents_end_are_in_its_last_row() -> None:
    runner = counting(late=True, num_envs=8, batch_mode=COMPLETE)
    batches = [runner.run(300) for _ in range(2)]
    assert check_stream(batches, whole=True, late=True) > 900
    assert runner.late_rewards == 0
    total = sum(float(rows["rewards"].sum()) for batch in batches for rows in batch.values())
    summary = runner.get_metrics()
    # The metrics may know of episodes that were not handed out, but here all are.
    assert total == summary.summarise()["episode_return_mean"] * summary.counts.episodes


@pytest.mark.further
def test_rewards_that_come_when_the_row_is_gone_are_counted_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = counting(late=True, num_envs=4)
    with caplog.at_level(logging.WARNING, "rlio"):
        batches = [runner.run(5) for _ in range(100)]
    assert [message.count("late_rewards") for message in caplog.messages] == [1]
    assert runner.late_rewards > 0
    assert sum(batch.env_steps() for batch in batches) == 2000
    recorded = sum(float(rows["rewards"].sum()) for batch in batches for rows in batch.values())
    seeds = {seed for seed, _ in by_agent(batches)}
    given = 0.0
    for seed in seeds:
        episode = plan(seed)
        for i, part in enumerate(episode.parts):
            if part.acts:
                first = 0 if part.early else part.acts[0]
                given += sum(reward(i, s) for s in range(first + 1, episode.length + 1))
    # Episodes that still run have not given all of theirs.
    assert 0 <= given - recorded - runner.late_rewards < 4 * 30 * 5 * 500


class Tallied(AgentCounter):
    """Sums up the rewards that it gives. All agents that get some act in the first steps."""

    given = 0.0

    def step(self, actions: Any) -> Any:
        _, rewards, *_ = result = super().step(actions)
        self.given += sum(rewards.values())
        return result


def test_after_a_soft_horizon_a_reward_is_in_a_row_or_in_late_rewards_and_always_in_the_metrics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rewards of agents that are not seen again before the end are in no row."""
    for late in (False, True):
        env = Tallied(late=late)
        config = RolloutConfig(batch_mode=COMPLETE, horizon=5, soft_horizon=True)
        policies = {"even": Chosen(), "odd": Chosen()}
        runner = MultiAgentEnvRunner(env, policies, map_agent, config=config, seed=1)
        recorded, ends = 0.0, []
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rlio"):
            for _ in range(25):
                batch = runner.run(20)
                recorded += sum(float(rows["rewards"].sum()) for rows in batch.values())
                ends += runner.get_metrics().episodes
                assert recorded + runner.late_rewards == env.given
                assert sum(each.total_reward for each in ends) == env.given
                assert sum(sum(each.agent_rewards.values()) for each in ends) == env.given
        assert runner.late_rewards > 0
        assert [message.count("late_rewards") for message in caplog.messages] == [1]
        runner.stop()


def test_after_a_soft_horizon_an_environment_may_end_before_an_agent_acts() -> None:
    class Seldom(Turns):
        """Its agents act in steps 0 to 2, and in none of the 4 steps after."""

        def step(self, actions: Any) -> Any:
            obs, *others = super().step(actions)
            return (obs if self._t < 3 else {}), *others

    config = RolloutConfig(batch_mode=COMPLETE, horizon=3, soft_horizon=True)
    runner = MultiAgentEnvRunner(lambda: Seldom(3, 7), {"p": Steps()}, config=config, seed=0)
    batch = runner.run(7)
    assert (batch.env_steps(), batch["p"]["t"].tolist()) == (7, [0, 1, 2])
    assert [(each.length, each.total_reward) for each in runner.get_metrics().episodes] == [
        (3, 6.0), (3, 9.0), (1, 3.0)
    ]  # fmt: skip
    assert runner.late_rewards == 12.0
    runner.stop()


class BornDone(MultiAgentEnv):
    """Agent ``a`` plays 5 steps for 1 each; ``b`` has rewards from step 1 on, and is born done in step 3."""

    possible_agents = ("a", "b", "c")
    observation_spaces = dict.fromkeys("abc", Box(0, 9, (1,), np.float32))
    action_spaces = dict.fromkeys("abc", Discrete(2))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return {"a": np.zeros(1, np.float32)}, {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        obs = {"a": np.full(1, self.t, np.float32)}
        rewards = {"a": 1.0, "b": 100.0, "c": 1000.0}  # ``c`` never appears.
        ended = {"__all__": self.t == 5}
        infos: dict[str, Any] = {"a": {}}
        if self.t == 3:
            obs["b"], ended["b"], infos["b"] = np.full(1, 8, np.float32), True, {}
        return obs, rewards, ended, {"__all__": False}, infos


def test_an_agent_that_is_born_done_is_neither_in_the_metrics_nor_in_the_episode() -> None:
    """Its rewards were in the episode's return, and in no row."""
    seen: list[Any] = []

    class Sees(Callbacks):
        def on_episode_step(self, *, episode: Any, **_: Any) -> None:
            seen.append((set(episode.last_observation), set(episode.last_info), dict(episode.agent_rewards)))

        def on_episode_end(self, *, episode: Any, **_: Any) -> None:
            seen.append(episode.total_reward)

    config = RolloutConfig(batch_mode="complete_episodes")
    runner = MultiAgentEnvRunner(BornDone, {"p": Steps()}, config=config, callbacks=Sees)
    (episode,) = runner.sample(num_episodes=1)
    assert set(episode.agent_episodes) == {"a"}
    assert episode.get_return() == 5.0
    summary = runner.get_metrics().summarise()
    assert summary["episode_return_mean"] == 5.0
    assert summary["agent_episode_returns_mean"] == {"a": 5.0}
    assert seen[-1] == 5.0
    for observed, told, rewards in seen[:-1]:
        assert observed == told == {"a"}
        assert set(rewards) == {("a", "p")}
    runner.stop()


def test_an_agent_that_waits_for_its_turn_has_its_row_in_the_next_batch() -> None:
    runner = MultiAgentEnvRunner(lambda: Turns(3), {"p": Steps()}, seed=0)
    first, second = runner.run(4), runner.run(4)
    assert (first.env_steps(), second.env_steps()) == (4, 4)
    assert first["p"]["t"].tolist() == [0, 1], "after 4 steps, the actions of steps 2 and 3 have no outcome"
    assert second["p"]["t"].tolist() == [3, 4, 2, 5]
    assert second["p"]["agent_index"].tolist() == [0, 1, 2, 2]
    both = concat_samples([first, second])["p"]
    assert np.array_equal(both["new_obs"][:, 1], both["t"] + 3)
    assert both["rewards"].tolist() == [3.0] * 6, "of all steps until it is its turn again"
    assert "new_obs_valid" not in both


class Turns(MultiAgentEnv):
    """Agents act one after the other; each is paid 1 for every step of anybody. They see [agent, step]."""

    def __init__(self, agents: int, length: int = 1000) -> None:
        self.possible_agents = list(range(agents))
        self.observation_spaces = {i: Box(0, np.inf, (2,), np.float64) for i in range(agents)}
        self.action_spaces = {i: Discrete(5) for i in range(agents)}
        self._length = length

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._t = 0
        return {0: np.array([0.0, 0.0])}, {}

    def step(self, actions: Any) -> Any:
        self._t += 1
        agent = self._t % len(self.possible_agents)
        return (
            {agent: np.array([agent, self._t], np.float64)},
            dict.fromkeys(self.possible_agents[: self._t], 1.0),
            {"__all__": self._t >= self._length},
            {"__all__": False},
            {},
        )


class Steps(Policy):
    """Acts as the step that it sees, and keeps the sizes of the batches that it got."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        self.sizes.append(len(obs))
        return (
            obs.reshape(len(obs), -1)[:, -1].astype(np.int64) % 5,
            state,
            {"explored": np.full(len(obs), explore)},
        )


class Both(MultiAgentEnv):
    """Two agents that act in every step, for ``length`` steps; they see [agent, step]."""

    possible_agents = ("l", "r")
    observation_spaces = {agent: Box(0, np.inf, (2,), np.float64) for agent in "lr"}  # noqa: RUF012
    action_spaces = {agent: Discrete(5) for agent in "lr"}  # noqa: RUF012

    def __init__(self, length: int = 25, *, truncates: bool = False) -> None:
        self._length, self._truncates = length, truncates

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seed, self._t = seed, 0
        return self._obs(), {"l": {"seed": seed}}

    def _obs(self) -> Any:
        return {agent: np.array([i, self._t], np.float64) for i, agent in enumerate("lr")}

    def step(self, actions: Any) -> Any:
        self._t += 1
        over = self._t >= self._length
        flags = {"__all__": over and not self._truncates}, {"__all__": over and self._truncates}
        infos = {"l": {"t": self._t}, "__common__": {"score": 10 * self._t}}
        return self._obs(), {"l": 7.0, "r": -7.0}, *flags, infos


def both(**config: Any) -> MultiAgentEnvRunner:
    callbacks, policies = config.pop("callbacks", None), config.pop("policies", None)
    env, mapping = config.pop("env", Both), config.pop("mapping", None)
    return MultiAgentEnvRunner(
        env,
        policies or {"l": Steps(), "r": Steps()},
        mapping,
        config=RolloutConfig(**config),
        callbacks=callbacks,
        seed=3,
    )


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# ---- what RLlib's tests assert of its runners ----


def test_200_env_steps_are_400_agent_steps_grouped_by_policy() -> None:
    """Reference 6.2, test_env_runner_v2: 200 env / 400 agent steps; grouping by policy."""
    batch = both(rollout_fragment_length=200).run()
    assert (len(batch), batch.env_steps(), batch.agent_steps()) == (200, 200, 400)
    assert {policy_id: len(rows) for policy_id, rows in batch.items()} == {"l": 200, "r": 200}
    shared = both(rollout_fragment_length=200, policies={"one": Steps()}).run()
    assert {policy_id: len(rows) for policy_id, rows in shared.items()} == {"one": 400}
    for rows, agent in ((batch["l"], 0), (batch["r"], 1)):
        assert (rows["obs"][:, 0] == agent).all()
        assert (rows["agent_index"] == agent).all()
        assert (rows["rewards"] == (7.0, -7.0)[agent]).all()


def test_inference_is_one_batch_a_policy_over_all_environments_and_agents() -> None:
    """Reference 6.2, test_env_runner_v2: inference batches across envs."""
    one = Steps()
    both(num_envs=3, policies={"one": one}).run(10)
    assert one.sizes == [6] * 10
    left, right = Steps(), Steps()
    both(num_envs=3, policies={"l": left, "r": right}).run(10)
    assert left.sizes == right.sizes == [3] * 10


def test_the_rewards_of_a_guessing_game_are_those_of_the_guesser_and_the_asker() -> None:
    """Reference 6.2, test_env_runner_v2: guess-number env rewards."""

    class Guess(MultiAgentEnv):
        """The asker shows a number, the guesser says one: 1 to who is right, -1 to the other."""

        possible_agents = ("asker", "guesser")
        observation_spaces = {agent: Box(0, 9, (1,), np.float32) for agent in possible_agents}  # noqa: RUF012
        action_spaces = {agent: Discrete(10) for agent in possible_agents}  # noqa: RUF012

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self._rounds = 0
            return {"asker": np.array([4], np.float32)}, {}

        def step(self, actions: Any) -> Any:
            going = {"__all__": False}
            if "asker" in actions:
                self._number = actions["asker"]
                return {"guesser": np.array([self._number], np.float32)}, {}, going, going, {}
            self._rounds += 1
            hit = 1.0 if actions["guesser"] == self._number else -1.0
            over = {"__all__": self._rounds == 3}
            return {"asker": np.array([4], np.float32)}, {"guesser": hit, "asker": -hit}, over, going, {}

    class Cycle(Policy):
        """Guesses right every other time."""

        n = 0

        def compute_actions(
            self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
        ) -> Any:
            self.n += 1
            return obs[:, 0].astype(np.int64) + self.n % 2, state, {}

    runner = MultiAgentEnvRunner(
        Guess,
        {"asker": Cycle(), "guesser": Cycle()},
        config=RolloutConfig(batch_mode=COMPLETE),
        seed=0,
    )
    batch = runner.run(1)
    assert batch.env_steps() == 6
    assert batch["guesser"]["rewards"].tolist() == [-1.0, 1.0, -1.0]
    assert batch["asker"]["rewards"].tolist() == [1.0, -1.0, 1.0]
    assert batch["asker"]["t"].tolist() == [0, 2, 4]
    assert batch["guesser"]["t"].tolist() == [1, 3, 5]
    assert batch["asker"]["terminateds"].tolist() == [False, False, True]
    # The guesser saw nothing after its last guess, and nothing is made up.
    assert batch["guesser"]["new_obs_valid"].tolist() == [True, True, False]
    assert batch["guesser"]["new_obs"][-1] == 0
    assert batch["asker"].get("new_obs_valid") is None


def test_steps_may_be_counted_by_agents() -> None:
    """Reference 6.2, test_rollout_worker: count_steps_by agent_steps >= 301."""
    runner = both(rollout_fragment_length=301, count_steps_by="agent_steps")
    assert [runner.run().agent_steps() for _ in range(3)] == [302, 302, 302]
    runner = both(rollout_fragment_length=301, count_steps_by="agent_steps", batch_mode=COMPLETE)
    assert runner.run().agent_steps() == 350, "whole episodes of 50"
    runner = both(rollout_fragment_length=301, batch_mode=COMPLETE)
    assert runner.run().env_steps() == 325


def test_ids_are_those_of_episodes_and_unrolls_those_of_agents_in_batches() -> None:
    """Reference 6.2: episode ids; unroll_ids disjoint."""
    runner = both(num_envs=2, rollout_fragment_length=30)
    batches = [runner.run() for _ in range(4)]
    left, right = (concat_samples([batch[name] for batch in batches]) for name in "lr")
    assert np.array_equal(left["eps_id"], right["eps_id"])
    assert len(set(left["eps_id"].tolist())) == 2 * 5
    assert (left["eps_id"] >= 0).all()
    unrolls = [set(batch[name]["unroll_id"].tolist()) for batch in batches for name in "lr"]
    assert len(set().union(*unrolls)) == sum(map(len, unrolls)), "disjoint"
    for batch in batches:
        for rows in batch.values():
            change = rows["unroll_id"][1:] != rows["unroll_id"][:-1]
            assert np.array_equal(change, rows["eps_id"][1:] != rows["eps_id"][:-1])
    other = MultiAgentEnvRunner(Both, {"one": Steps()}, seed=3, worker_index=1)
    batch = other.run(30)
    assert not set(batch["one"]["eps_id"].tolist()) & set(left["eps_id"].tolist())
    assert not set(batch["one"]["unroll_id"].tolist()) & set().union(*unrolls)


def test_an_episode_in_which_nobody_acts_is_an_error() -> None:
    """Reference 2.3: zero-agent episode: ValueError."""

    class Empty(Both):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset()
            return {}, {}

        def step(self, actions: Any) -> Any:
            return {}, {}, {"__all__": True}, {"__all__": False}, {}

    runner = both(env=Empty)
    with pytest.raises(ValueError, match="no agent acted"):
        runner.run(5)


def test_two_runners_with_a_seed_do_the_same_and_other_workers_something_else() -> None:
    """Reference 2.1 / 6.2: seeds [1, 2, 3] of workers are distinct."""

    def made(worker_index: int) -> MultiAgentBatch:
        policies = {"even": RandomPolicy(), "odd": RandomPolicy()}
        runner = MultiAgentEnvRunner(
            make_multi_agent("CartPole-v1"),
            policies,
            lambda agent_id, episode: ("even", "odd")[agent_id % 2],
            config=RolloutConfig(num_envs=2, env_config={"num_agents": 3}, record_env_seeds=True),
            seed=9,
            worker_index=worker_index,
        )
        return runner.run(50)

    first, again, *others = made(1), made(1), made(2), made(3)
    assert_same(first, again)
    seeds = [set(batch["even"]["env_seed"].tolist()) for batch in (first, *others)]
    assert len(set().union(*seeds)) == sum(map(len, seeds))
    actions = {batch["odd"]["actions"].tobytes() for batch in (first, *others)}
    assert len(actions) == 3
    # Policies of one runner draw apart.
    assert first["even"]["actions"][:50].tolist() != first["odd"]["actions"][:50].tolist()


# ---- policies ----


def test_the_mapping_is_asked_once_an_agent_and_episode_and_sees_the_episode() -> None:
    asked: list[tuple[Any, int, int]] = []

    def mapping(agent_id: Any, episode: Any, worker: Any, **kwargs: Any) -> str:
        asked.append((agent_id, episode.eps_id, worker.worker_index))
        return "l"

    runner = both(mapping=mapping, rollout_fragment_length=30)
    batch = runner.run()
    assert list(batch) == ["l"]
    assert [(agent, index) for agent, _, index in asked] == [("l", 0), ("r", 0)] * 2
    assert len({eps_id for _, eps_id, _ in asked}) == 2


def test_another_mapping_counts_from_the_next_episode_on() -> None:
    runner = both(mapping=lambda agent_id, episode: "l")
    assert list(runner.run(10)) == ["l"]
    runner.set_policy_mapping_fn(lambda agent_id, episode: "r")
    batch = runner.run(20)
    assert {policy_id: sorted(set(rows["t"].tolist())) for policy_id, rows in batch.items()} == {
        "l": list(range(10, 25)),
        "r": list(range(5)),
    }


def test_a_policy_that_is_removed_acts_no_more_and_another_takes_over() -> None:
    """Reference 2.3, policy re-lookup; section 5.31: nothing keeps the removed id."""
    policies: dict[str, Policy] = {"a": Steps(), "b": Steps()}
    runner = both(policies=policies, mapping=lambda agent_id, episode: "a")
    assert list(runner.run(10)) == ["a"]
    policies["c"] = Steps()
    runner.set_policy_mapping_fn(lambda agent_id, episode: "c")
    del policies["a"]
    batch = runner.run(10)
    assert list(batch) == ["c"]
    assert sorted(batch["c"]["t"].tolist()) == sorted(2 * list(range(10, 20)))
    assert batch["c"]["rewards"].sum() == 0
    assert runner.get_spaces().keys() == {"__env__", "b", "c"}
    runner.set_policy_mapping_fn(lambda agent_id, episode: "gone")
    with pytest.raises(OptionError, match="expected one of"):
        runner.run(30)


def test_another_policy_under_the_same_id_acts_at_once() -> None:
    policies: dict[str, Policy] = {"one": Steps()}
    runner = both(policies=policies)
    assert "explored" in runner.run(5)["one"]
    policies["one"] = Remembers()
    rows = runner.run(5)["one"]
    assert rows["t"].tolist() == 2 * [5, 6, 7, 8, 9]
    assert rows["state_out_0"][:5, 0].tolist() == [101.0, 102.0, 103.0, 104.0, 105.0]
    assert "explored" not in rows
    policies["one"] = RandomPolicy()
    assert "action_logp" in runner.run(5)["one"]
    wrong = RandomPolicy()
    wrong.bind(Box(0, 1, (9,)), Discrete(5), 0)
    policies["one"] = wrong
    with pytest.raises(OptionError, match="make another policy"):
        runner.run(5)


def test_a_policy_map_may_put_away_policies_that_act() -> None:
    """Reference 2.6, policy map: LRU capacity."""
    spec = PolicySpec(
        "rlio.policies.random_policy:RandomPolicy", *(Both.observation_spaces["l"], Discrete(5))
    )
    with PolicyMap({"l": spec, "r": spec}, capacity=1, seed=0) as policies:
        batch = both(policies=policies, num_envs=2).run(30)
    assert batch.agent_steps() == 120
    assert set(batch["l"]["actions"].tolist()) == set(range(5))


def test_policies_have_spaces_of_their_own() -> None:
    """Issue 5.1: several policies with their own spaces."""

    class Unlike(Both):
        observation_spaces = {  # noqa: RUF012
            "l": Dict(x=Box(0, np.inf, (2,), np.float32), gear=Discrete(50)),
            "r": Box(0, 255, (4, 4), np.uint8),
        }
        action_spaces = {"l": Box(-1, 1, (3,), np.float32), "r": Tuple([Discrete(2), Discrete(3)])}  # noqa: RUF012

        def _obs(self) -> Any:
            return {
                "l": {"x": np.array([1, self._t], np.float32), "gear": self._t},
                "r": np.full((4, 4), self._t, np.uint8),
            }

        def step(self, actions: Any) -> Any:
            assert actions["l"].shape == (3,)
            assert isinstance(actions["r"], tuple)
            return super().step(actions)

    policies = {"l": RandomPolicy(), "r": RandomPolicy()}
    runner = both(env=Unlike, policies=policies, num_envs=2)
    spaces = runner.get_spaces()
    assert spaces["l"] == (Unlike.observation_spaces["l"], Unlike.action_spaces["l"])
    assert spaces["__env__"][1]["r"] == Unlike.action_spaces["r"]
    batch = runner.run(30)
    assert batch["l"]["obs"]["x"].dtype == np.float32
    assert np.array_equal(batch["l"]["obs"]["gear"], batch["l"]["t"])
    assert np.array_equal(batch["l"]["new_obs"]["gear"], batch["l"]["t"] + 1)
    assert batch["r"]["obs"].shape == (60, 4, 4)
    assert batch["r"]["actions"][1].max() == 2
    with pytest.raises(OptionError, match="map the agent to another policy"):
        both(env=Unlike, policies={"one": RandomPolicy()}, num_envs=2).run(1)


def test_every_extra_column_and_the_version_of_the_weights_are_recorded() -> None:
    runner = both(policies={"l": TorchPolicy(), "r": RandomPolicy()})
    runner.policies["l"].weights_seq_no = 4
    batch = runner.run(10)
    assert {"action_logp", "action_dist_inputs"} <= batch["l"].keys()
    assert {"action_logp", "action_prob"} <= batch["r"].keys()
    assert batch["l"]["weights_seq_no"].tolist() == [4] * 10
    runner.policies["l"].weights_seq_no = 5
    assert runner.run(10)["l"]["weights_seq_no"].tolist() == [5] * 10


class Remembers(Policy):
    """A recurrent policy: its state counts the steps of the episode, and is what it acts by."""

    input_columns = ("prev_actions", "prev_rewards", "t", "agent_index")
    max_seq_len = 4

    def initial_state(self, batch_size: int) -> Any:
        return (np.full((batch_size, 1), 100.0, np.float32),)

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        (count,) = state
        seen = {f"saw_{name}": np.array(inputs[name]) for name in self.input_columns}
        return count[:, 0].astype(np.int64) % 5, (count + 1,), seen


def test_recurrent_state_belongs_to_agents_and_is_recorded() -> None:
    """Issue 5.5: recurrent state; sequences of at most max_seq_len within an agent's rows of an episode."""
    runner = both(policies={"one": Remembers()}, num_envs=2, rollout_fragment_length=30)
    rows = runner.run()["one"]
    assert np.array_equal(rows["state_out_0"][:, 0], 101 + rows["t"])
    assert np.array_equal(rows["actions"], rows["t"] % 5)
    starts = np.concatenate([[0], np.cumsum(rows["seq_lens"])[:-1]])
    assert np.array_equal(rows["state_in_0"][:, 0], 100 + rows["t"][starts])
    assert rows["seq_lens"].max() == 4
    assert rows["seq_lens"].sum() == 120
    key = np.stack([rows["eps_id"], rows["agent_index"]])
    ends = np.cumsum(rows["seq_lens"])[:-1]
    change = np.flatnonzero((key[:, 1:] != key[:, :-1]).any(axis=0)) + 1
    assert set(change) <= set(ends), "no sequence goes over the end of an agent's rows"
    first = rows["t"] == 0
    assert np.array_equal(rows["saw_t"], rows["t"])
    assert np.array_equal(rows["saw_agent_index"], rows["agent_index"])
    assert np.array_equal(rows["saw_prev_actions"], np.where(first, 0, (rows["t"] - 1) % 5))
    paid = np.where(rows["agent_index"] == 0, 7.0, -7.0)
    assert np.array_equal(rows["saw_prev_rewards"], np.where(first, 0, paid))
    again = runner.run()["one"]
    assert np.array_equal(again["state_out_0"][:, 0], 101 + again["t"]), "the state goes on over fragments"


def test_connectors_keep_state_for_each_agent_of_each_environment() -> None:
    """Design, connectors: `streams.slots` is a number for each agent of each environment."""
    runner = both(num_envs=2, rollout_fragment_length=40, observation_connectors=[FrameStack(3)])
    for _ in range(2):
        batch = runner.run()
        for agent, rows in enumerate(batch.values()):
            assert rows["obs"].shape[1:] == (3, 2)
            assert (rows["obs"][:, :, 0] == agent).all()
            shown = np.maximum(rows["t"][:, None] - np.arange(2, -1, -1), 0)
            assert np.array_equal(rows["obs"][:, :, 1], shown)
            # The final observation is stacked on its own episode, not on the next.
            after = np.maximum(rows["t"][:, None] + 1 - np.arange(2, -1, -1), 0)
            assert np.array_equal(rows["new_obs"][:, :, 1], after)
    assert runner.policies["l"].observation_space.shape == (3, 2)


def test_a_connector_may_be_for_some_policies_only() -> None:
    """Row 2.1, observation_filter: per policy; a connector knows whose it is."""

    class Doubles(Connector):
        def bind(self, space: Any, policy: Policy | None = None) -> Any:
            self.factor = 2 if policy is policies["r"] else 1
            return space

        def __call__(self, values: Any, streams: Streams) -> Any:
            return values * np.float32(self.factor)

    policies: dict[str, Policy] = {"l": RandomPolicy(), "r": RandomPolicy()}
    config = RolloutConfig(rollout_fragment_length=4, observation_connectors=[Doubles()])
    seen = {}
    for name, options in (("plain", RolloutConfig(rollout_fragment_length=4)), ("doubled", config)):
        runner = MultiAgentEnvRunner(
            Both, policies, lambda agent_id, _: str(agent_id), config=options, seed=0
        )
        seen[name] = runner.run()
        runner.stop()
    for policy_id, factor in (("l", 1), ("r", 2)):
        plain, doubled = (seen[name][policy_id]["obs"] for name in ("plain", "doubled"))
        assert plain.any()
        np.testing.assert_array_equal(doubled, plain * factor)


def test_filters_are_those_of_policies_and_are_synced() -> None:
    """Reference 6.2, test_rollout_worker: filters sync."""
    runner = both(observation_connectors=[MeanStdFilter()])
    runner.run(20)
    filters = runner.get_filters(flush_after=True)
    assert filters.keys() == {"l", "r"}
    assert filters["l"][0].running_stats.mean[0] == 0
    assert filters["r"][0].running_stats.mean[0] == 1
    other = both(observation_connectors=[MeanStdFilter()])
    other.run(1)
    other.sync_filters(filters)
    assert np.array_equal(other.get_filters()["r"][0].running_stats.mean, filters["r"][0].running_stats.mean)
    with pytest.raises(StateError, match="found 0 filters, expected 1"):
        other.sync_filters({"l": []})
    state = runner.get_state(["connectors"])
    third = both(observation_connectors=[MeanStdFilter()])
    third.set_state(json.loads(json.dumps(state)))
    assert np.array_equal(third.get_filters()["r"][0].running_stats.mean, filters["r"][0].running_stats.mean)


def test_actions_are_recorded_as_the_policy_gave_them_and_sent_as_they_were_changed() -> None:
    """Reference 2.3: raw vs sent action."""
    sent: list[Any] = []

    class Listens(Both):
        action_spaces = {agent: Box(0.0, 10.0, (1,), np.float32) for agent in "lr"}  # noqa: RUF012

        def step(self, actions: Any) -> Any:
            sent.append({agent: float(action[0]) for agent, action in actions.items()})
            return super().step(actions)

    class Far(Policy):
        def compute_actions(
            self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
        ) -> Any:
            return np.full((len(obs), 1), 2.0, np.float32), state, {}

    options: dict[str, Any] = {"env": Listens, "policies": {"l": Far(), "r": Far()}}
    batch = both(**options, normalize_actions=True, clip_actions=True).run(1)
    assert sent.pop() == {"l": 10.0, "r": 10.0}
    assert batch["l"]["actions"].tolist() == [[2.0]]
    batch = both(**options, action_connectors=[lambda actions: actions * 3]).run(1)
    assert sent.pop() == {"l": 6.0, "r": 6.0}
    assert batch["l"]["actions"].tolist() == [[2.0]]


def test_postprocessing_sees_the_other_agents_and_changes_its_own_rows_only() -> None:
    """Reference 2.3, postprocess_episode: policy.postprocess_trajectory with other agents' batches."""
    seen: list[Any] = []

    class Looks(Steps):
        def postprocess_trajectory(
            self, batch: SampleBatch, other_agent_batches: Any = None, episode: Any = None
        ) -> SampleBatch:
            ((other, (policy_id, rows)),) = other_agent_batches.items()
            seen.append((other, policy_id, rows["rewards"].tolist(), episode.eps_id))
            batch["rewards"] += 100
            batch["other_reward"] = rows["rewards"].copy()
            return batch

    original: list[Any] = []

    class Hook(Callbacks):
        def on_postprocess_trajectory(
            self,
            *,
            agent_id: Any,
            policy_id: str,
            postprocessed_batch: Any,
            original_batches: Any,
            **more: Any,
        ) -> None:
            original.append((agent_id, original_batches[agent_id][1]["rewards"].tolist()))
            postprocessed_batch["touched"] = np.ones(len(postprocessed_batch))

    runner = both(policies={"l": Looks(), "r": Looks()}, callbacks=Hook)
    batch = runner.run(2)
    eps_id = int(batch["l"]["eps_id"][0])
    assert seen == [("r", "r", [-7.0, -7.0], eps_id), ("l", "l", [7.0, 7.0], eps_id)]
    assert original == [("l", [7.0, 7.0]), ("r", [-7.0, -7.0])]
    assert batch["l"]["rewards"].tolist() == [107.0, 107.0]
    assert batch["r"]["other_reward"].tolist() == [7.0, 7.0]
    assert batch["r"]["touched"].tolist() == [1.0, 1.0]


# ---- episodes ----


def test_parts_that_nothing_replaced_are_joined_without_a_copy() -> None:
    obs = np.zeros((4, 2))
    columns = {EPISODE: np.array([0, 0, 1, 1]), "agent_index": np.zeros(4, int), "obs": obs}
    assert np.shares_memory(joined(cut("one", columns), unrolls=0)["obs"], obs)
    parts = cut("one", columns)
    parts[1].rows, parts[1].whole = SampleBatch(agent_index=[0], obs=np.ones((1, 2))), None
    batch = joined(parts, unrolls=5)
    assert batch["unroll_id"].tolist() == [5, 5, 6]
    assert batch["obs"][:, 0].tolist() == [0, 0, 1]


def test_infos_are_those_of_the_agent_and_the_common_ones() -> None:
    """Reference 2.3, common info; section 5.32: not the dict of all agents."""
    batch = both(record_infos=True).run(2)
    assert batch["l"]["infos"].tolist() == [
        {"t": 1, "__common__": {"score": 10}},
        {"t": 2, "__common__": {"score": 20}},
    ]
    assert batch["r"]["infos"].tolist() == [{"__common__": {"score": 10}}, {"__common__": {"score": 20}}]


def test_what_an_environment_writes_over_is_not_what_was_recorded() -> None:
    class Reuses(Both):
        def __init__(self) -> None:
            super().__init__()
            self._shared: Any = {agent: np.zeros(2) for agent in "lr"}
            self._infos: Any = {"l": {"t": 0}, "__common__": {"score": 0}}

        def _obs(self) -> Any:
            for i, agent in enumerate("lr"):
                self._shared[agent][:] = i, self._t
            return self._shared

        def step(self, actions: Any) -> Any:
            *made, infos = super().step(actions)
            for name, info in infos.items():
                self._infos[name].update(info)
            return *made, self._infos

    batch = both(env=Reuses, record_infos=True).run(30)
    for rows in batch.values():
        assert np.array_equal(rows["obs"][:, 1], rows["t"])
        assert np.array_equal(rows["new_obs"][:, 1], rows["t"] + 1)
        assert [info["__common__"]["score"] for info in rows["infos"]] == (10 * (rows["t"] + 1)).tolist()
    assert [info["t"] for info in batch["l"]["infos"]] == (batch["l"]["t"] + 1).tolist()


def test_clipped_rewards_are_in_batches_and_true_ones_in_metrics() -> None:
    """Reference 2.1, clip_rewards: metrics stay unclipped."""
    for how, expected in ((True, 1.0), (2.5, 2.5), (None, 7.0), (False, 7.0)):
        runner = both(clip_rewards=how, batch_mode=COMPLETE)
        batch = runner.run(25)
        assert batch["l"]["rewards"].tolist() == [expected] * 25
        assert batch["r"]["rewards"].tolist() == [-expected] * 25
        (episode,) = runner.get_metrics().episodes
        assert episode.agent_rewards == {("l", "l"): 175.0, ("r", "r"): -175.0}


def test_what_a_callback_does_not_want_trained_on_is_in_no_batch() -> None:
    """Reference 6.2, test_rollout_worker: training_enabled=False yields empty batches."""

    class Never(Callbacks):
        def on_episode_start(self, *, episode: Any, **more: Any) -> None:
            episode.training_enabled = False

    runner = both(callbacks=Never())
    batch = runner.run(60)
    assert (batch.env_steps(), batch.agent_steps(), list(batch)) == (0, 0, [])
    assert runner.steps_dropped == 120
    counts = runner.get_metrics().counts
    assert (counts.rows_dropped, counts.episodes) == (120, 2)
    assert runner.sample(num_episodes=1) == []


def test_callbacks_get_to_know_the_episodes_and_metrics_what_they_left() -> None:
    """Reference 2.4, callbacks: created, start, step, end; on_sub_environment_created."""
    told: list[Any] = []

    class Tells(Callbacks):
        def on_sub_environment_created(self, *, env: Any, env_index: int, context: Any, **more: Any) -> None:
            told.append(("made", type(env).__name__, env_index, context.worker_index))

        def on_environment_created(self, *, runner: Any, env: Any, **more: Any) -> None:
            told.append(("all", len(env)))

        def on_episode_created(self, *, episode: Any, **more: Any) -> None:
            told.append(("created", episode.length))

        def on_episode_start(self, *, episode: Any, env: Any, **more: Any) -> None:
            told.append(("start", sorted(episode.last_observation), episode.last_info))

        def on_episode_step(self, *, episode: Any, **more: Any) -> None:
            told.append(("step", episode.length, episode.last_action, episode.agent_rewards["r", "r"]))
            episode.user_data["n"] = episode.user_data.get("n", 0) + 1

        def on_episode_end(self, *, episode: Any, error: Any, **more: Any) -> None:
            told.append(
                ("end", episode.length, episode.last_info["__common__"], episode.policy_for("r"), error)
            )
            episode.custom_metrics["n"] = episode.user_data["n"]

        def on_sample_end(self, *, samples: Any, **more: Any) -> None:
            told.append(("sampled", len(samples)))

    runner = both(env=lambda: Both(3), callbacks=Tells, batch_mode=COMPLETE)
    runner.sample(num_episodes=1)
    assert told == [
        ("made", "Both", 0, 0),
        ("all", 1),
        ("created", 0),
        told[3],
        ("step", 1, {"l": 0, "r": 0}, -7.0),
        ("step", 2, {"l": 1, "r": 1}, -14.0),
        ("step", 3, {"l": 2, "r": 2}, -21.0),
        ("end", 3, {"score": 30}, "r", None),
        ("created", 0),
        told[9],
        ("sampled", 1),
    ]
    assert told[3][:2] == told[9][:2] == ("start", ["l", "r"])
    (episode,) = runner.get_metrics().episodes
    assert (episode.length, episode.total_reward, episode.custom_metrics) == (3, 0.0, {"n": 3})


def test_metrics_count_steps_of_environments_agents_and_policies() -> None:
    """Reference 2.5, metrics: per agent and module returns, num env/agent/module steps (lifetime)."""
    runner = both(num_envs=2)
    runner.run(50)
    summary = runner.get_metrics().summarise()
    assert summary["num_env_steps_sampled"] == 100
    assert summary["num_agent_steps_sampled"] == {"l": 100, "r": 100}
    assert summary["num_module_steps_sampled"] == {"l": 100, "r": 100}
    assert summary["policy_reward_mean"] == {"l": 175.0, "r": -175.0}
    assert summary["agent_episode_returns_mean"] == {"l": 175.0, "r": -175.0}
    assert summary["num_episodes"] == 4
    assert summary["sampler_perf"].keys() >= {"mean_inference_ms", "mean_env_wait_ms"}
    runner.run(50)
    assert runner.get_metrics().summarise()["num_env_steps_sampled_lifetime"] == 200


def test_what_environments_show_goes_into_the_media_of_their_episodes() -> None:
    """Reference 2.1, render_env: only in the local or first worker."""

    class Shows(Both):
        render_mode = "rgb_array"

        def render(self) -> Any:
            return np.full((2, 2, 3), self._t, np.uint8)

    runner = both(env=lambda: Shows(3), num_envs=2, render_env=True)
    runner.run(3)
    for episode in runner.get_metrics().episodes:
        assert [int(frame[0, 0, 0]) for frame in episode.media["frames"]] == [0, 1, 2]
    second = MultiAgentEnvRunner(
        lambda: Shows(3), {"one": Steps()}, config=RolloutConfig(render_env=True), seed=0, worker_index=2
    )
    second.run(3)
    assert [episode.media for episode in second.get_metrics().episodes] == [{}]
    with pytest.raises(OptionError, match="Both has no render_mode"):
        both(render_env=True)


def test_policies_are_told_of_episodes_in_which_they_act() -> None:
    """Reference 2.3: exploration hooks."""
    told: list[Any] = []

    class Told(Steps):
        def on_episode_start(self, env_ids: Any) -> None:
            told.append(("start", env_ids.tolist()))

        def on_episode_end(self, env_ids: Any) -> None:
            told.append(("end", env_ids.tolist()))

    both(policies={"one": Told()}, env=lambda: Both(3), num_envs=2).run(4)
    assert told == [
        ("start", [0]),
        ("start", [1]),
        ("end", [0]),
        ("start", [0]),
        ("end", [1]),
        ("start", [1]),
    ]


def test_a_horizon_truncates_a_soft_one_goes_on_and_no_done_says_nothing() -> None:
    """Reference 2.3: horizon / soft_horizon / no_done_at_end."""
    batch = both(horizon=10).run(30)
    for rows in batch.values():
        assert rows["t"].tolist() == 3 * list(range(10))
        assert rows["truncateds"].tolist() == 3 * ([False] * 9 + [True])
        assert not rows["terminateds"].any()
        assert np.array_equal(rows["new_obs"][:, 1], rows["t"] + 1)
        assert len(set(rows["eps_id"].tolist())) == 3
    runner = both(horizon=10, soft_horizon=True)
    rows = runner.run(30)["l"]
    assert rows["t"].tolist() == [*range(10), *range(10), *range(5), *range(5)], "the environment ends at 25"
    assert rows["obs"][:, 1].tolist() == [*range(25), *range(5)]
    assert rows["new_obs"][:, 1].tolist() == [*range(1, 26), *range(1, 6)]
    assert np.flatnonzero(rows["terminateds"] | rows["truncateds"]).tolist() == [24]
    assert len(set(rows["eps_id"].tolist())) == 4
    assert [episode.length for episode in runner.get_metrics().episodes] == [10, 10, 5]
    rows = both(no_done_at_end=True).run(30)["r"]
    assert not (rows["terminateds"] | rows["truncateds"]).any()
    assert len(set(rows["eps_id"].tolist())) == 2


@pytest.mark.further
def test_episodes_that_never_end_are_told_of_in_complete_mode(caplog: pytest.LogCaptureFixture) -> None:
    """Reference 2.3: large batch warning, once."""
    runner = both(env=lambda: Both(1500), batch_mode=COMPLETE)
    with caplog.at_level(logging.WARNING, "rlio"):
        runner.run(1)
        runner.run(1)
    assert [text.count("If episodes do not end") for text in caplog.messages] == [1]


def test_agents_that_nobody_named_before_come_and_leave_nothing_behind() -> None:
    class Guests(Both):
        """Each episode has a guest of a name of its own from step 1 to 3; it sees what "l" does."""

        visits = 0

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.visits += 1
            return super().reset(seed=seed)

        def get_observation_space(self, agent_id: Any) -> Any:
            return self.observation_spaces["l"]

        def get_action_space(self, agent_id: Any) -> Any:
            return self.action_spaces["l"]

        def step(self, actions: Any) -> Any:
            obs, rewards, *flags, infos = super().step(actions)
            guest = f"guest {self.visits}"
            if 1 <= self._t <= 3:
                obs[guest] = np.array([2, self._t], np.float64)
            flags[0][guest] = self._t == 3
            return obs, rewards, *flags, infos

    runner = both(
        env=lambda: Guests(4),
        mapping=lambda agent_id, episode: agent_id if agent_id in ("l", "r") else "guests",
        policies={"l": Steps(), "r": Steps(), "guests": Remembers()},
        num_envs=2,
        batch_mode=COMPLETE,
    )
    episodes = runner.sample(num_episodes=20)
    assert sorted(episode.agent_ids[-1] for episode in episodes) == sorted(
        2 * [f"guest {i}" for i in range(1, 11)]
    )
    for episode in episodes:
        assert episode.agent_indexes[episode.agent_ids[-1]] == 2
        guest = episode.agent_episodes[episode.agent_ids[-1]]
        assert guest.observations[:, 1].tolist() == [1, 2, 3]
        assert guest.extra_outputs["state_out_0"][:, 0].tolist() == [101, 102], "each starts over"
    assert runner._loop.groups["guests"].actor._slots <= 4
    assert len(runner._envs._steppers[0]._known) <= 3


# ---- failures ----


class Fails(Both):
    """Fails in its ``when``-th step."""

    def __init__(self, when: set[int]) -> None:
        super().__init__()
        self._when, self._steps = when, 0

    def step(self, actions: Any) -> Any:
        self._steps += 1
        if self._steps in self._when:
            raise RuntimeError(f"no step {self._steps}")
        return super().step(actions)


def test_a_failure_is_raised_with_the_place_and_the_next_call_starts_over() -> None:
    """Reference 6.2, test_envs_that_crash: without restart."""
    runner = both(env=lambda: Fails({7}))
    with pytest.raises(
        EnvError, match=r"environment 0 failed in step\(\), step 6, episode 0 .*no step 7"
    ) as caught:
        runner.run(10)
    assert caught.value.seed == runner._envs.seeds.current[0]
    assert isinstance(caught.value.__cause__, RuntimeError)
    batch = runner.run(5)
    assert batch["l"]["t"].tolist() == list(range(5))
    assert runner.steps_dropped == 14


@pytest.mark.parametrize("mode", [TRUNCATE, COMPLETE])
def test_a_failed_environment_is_recreated_and_the_others_make_up_for_it(mode: Any) -> None:
    """Reference 2.1, 6.2, crashing envs with restart: discarded, counted; on_episode_end gets the error."""
    ends: list[Any] = []

    class Ends(Callbacks):
        def on_episode_end(self, *, episode: Any, error: Any, **more: Any) -> None:
            ends.append((episode.env_index, episode.length, error))

    made: list[int] = []

    def make(context: Any) -> Any:
        made.append(context.vector_index)
        # Its second episode fails in its last step.
        return Fails({50}) if len(made) == 1 else Both()

    runner = both(env=make, callbacks=Ends, num_envs=3, batch_mode=mode, restart_failed_sub_environments=True)
    batches = [runner.run(60 if mode == TRUNCATE else 20) for _ in range(2)]
    for batch in batches:
        for rows in batch.values():
            assert len(rows) == batch.env_steps()
            for part in rows.split_by_episode():
                assert np.array_equal(np.diff(part["t"]), np.ones(len(part) - 1))
                assert mode == TRUNCATE or len(part) == 25
    # All episodes end at the same time: 3 of them, then 2, then 3 without the one that started over; 2 wait.
    assert [batch.env_steps() for batch in batches] == ([180, 180] if mode == TRUNCATE else [75, 75])
    counts = runner.get_metrics().counts
    errors = [(env_index, length, str(error)) for env_index, length, error in ends if error is not None]
    assert errors == [(0, 24, "no step 50")]
    assert made == [0, 1, 2, 0]
    assert (counts.faulty_episodes, counts.env_restarts) == (1, 1)
    assert counts.rows_dropped == runner.steps_dropped == 2 * 25, "the last of them have no outcome"
    assert counts.env_steps == sum(batch.env_steps() for batch in batches)


def test_resets_that_fail_are_tried_again_and_not_for_ever() -> None:
    """Reference 2.3, endless reset retry: one faulty metric per attempt, but bounded."""
    failures = iter([True, True, False, False])

    class Late(Both):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            if next(failures):
                raise RuntimeError("not yet")
            return super().reset(seed=seed)

    runner = both(env=Late, restart_failed_sub_environments=True, max_env_restarts=3)
    assert runner.run(30).env_steps() == 30
    counts = runner.get_metrics().counts
    assert (counts.faulty_episodes, counts.env_restarts, counts.rows_dropped) == (2, 2, 0)

    class Broken(Both):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            raise RuntimeError("never")

    runner = both(env=Broken, restart_failed_sub_environments=True, max_env_restarts=2)
    with pytest.raises(EnvError, match="2 times in a row"):
        runner.run(5)
    assert runner.get_metrics().counts.faulty_episodes == 2


def test_an_environment_that_talks_nonsense_is_no_failure_to_restart_from() -> None:
    class Nonsense(Both):
        def step(self, actions: Any) -> Any:
            return {}, {}, {}, {}, {}

    runner = both(env=Nonsense, restart_failed_sub_environments=True)
    with pytest.raises(SchemaError, match="without '__all__'"):
        runner.run(5)


def test_an_observation_that_does_not_fit_is_told_with_agent_and_environment() -> None:
    class Wide(Both):
        def _obs(self) -> Any:
            wrong = {"r": np.zeros(3)} if self._t == 3 else {}
            return super()._obs() | wrong

    with pytest.raises(SchemaError, match=r"agent 'r' in environment 0: the environment gave float64 \(3,\)"):
        both(env=Wide).run(5)

    class Ends(Both):
        def _obs(self) -> Any:
            return super()._obs() | ({"r": None} if self._t == self._length else {})

    with pytest.raises(SchemaError, match=r"agent 'r' in environment 0: the environment gave None"):
        both(env=Ends).run(30)


# ---- the runner itself ----


def test_it_is_a_runner_and_its_sampler_a_reader() -> None:
    runner = both(rollout_fragment_length=10)
    assert isinstance(runner, Runner)
    with SamplerInput(runner) as reader:
        batch = reader.sample()
        assert isinstance(batch, MultiAgentBatch)
        assert len(batch) == 10
        assert len(reader.sample(7)) == 7
        state = json.loads(json.dumps(reader.state_dict()))
    other = SamplerInput(both(rollout_fragment_length=10))
    other.load_state_dict(state)
    assert other.dropped == 3
    batch = other.sample()
    assert isinstance(batch, MultiAgentBatch)
    assert batch["l"]["t"][0] == 0
    with pytest.raises(ClosedError):
        runner.run()


def test_a_state_goes_on_counting_at_the_start_of_new_episodes() -> None:
    runner = both(num_envs=2)
    first = runner.run(10)
    state = json.loads(json.dumps(runner.state_dict()))
    resumed = [both(num_envs=2) for _ in range(2)]
    for each in resumed:
        each.load_state_dict(state)
        assert each.timesteps == 40
    one, other = (each.run(10) for each in resumed)
    assert_same(one, other)
    assert one["l"]["t"][0] == 0
    assert not set(one["l"]["eps_id"].tolist()) & set(first["l"]["eps_id"].tolist())
    assert one["l"]["unroll_id"].min() > first["r"]["unroll_id"].max()
    with pytest.raises(StateError, match="'unrolls'"):
        runner.load_state_dict({**state, "unrolls": "x"})


def test_states_are_got_and_set_by_components() -> None:
    """Reference 2.5, state: components, weights only if newer or 0."""
    runner = both(policies={"l": TorchPolicy(hidden=(4,)), "r": RandomPolicy()})
    runner.run(10)
    runner.policies["l"].weights_seq_no = 3
    state = runner.get_state(not_components=["metrics"])
    assert state.keys() == {"policies", "connectors", "runner"}
    other = both(policies={"l": TorchPolicy(hidden=(4,)), "r": RandomPolicy()})
    other.policies["l"].weights_seq_no = 4
    weights = other.policies["l"].get_weights()
    other.set_state(state)
    assert same(other.policies["l"].get_weights(), weights), "it is newer"
    other.policies["l"].weights_seq_no = 2
    other.set_state({"policies": state["policies"] | {"unknown": {}}})
    assert same(other.policies["l"].get_weights(), runner.policies["l"].get_weights())
    assert other.timesteps == 20
    with pytest.raises(OptionError, match="no components"):
        runner.get_state(["weights"])


def test_a_class_with_a_default_for_its_config_gets_the_context_without_an_env_config() -> None:
    """It got None, unless there was an ``env_config``."""
    told: list[Any] = []

    class Configured(Both):
        def __init__(self, config: Any = None) -> None:
            super().__init__()
            told.append(config)

    runner = MultiAgentEnvRunner(
        Configured, {"l": Steps(), "r": Steps()}, config=RolloutConfig(num_envs=2), worker_index=3
    )
    assert [(context.worker_index, context.vector_index) for context in told] == [(3, 0), (3, 1)]
    runner.stop()

    def other(size: int = 3) -> Both:
        return Both(size)

    with pytest.raises(OptionError):
        both(env=other, env_config={"size": 4})


def test_environments_can_be_recreated() -> None:
    """Reference 2.5: make_env, make_module, assert_healthy, stop."""
    closed: list[int] = []

    class Closes(Both):
        def close(self) -> None:
            closed.append(1)

    runner = both(env=Closes, num_envs=2)
    runner.run(5)
    runner.make_env()
    runner.make_module()
    assert closed == [1, 1]
    assert runner.steps_dropped == 0
    assert runner.run(5)["l"]["t"].tolist() == [*range(5), *range(5)]
    runner.assert_healthy()
    assert (runner.num_envs, len(runner.envs), runner.env_id) == (2, 2, "Closes")
    runner.stop()
    runner.stop()
    assert closed == [1] * 4
    with pytest.raises(ClosedError):
        runner.assert_healthy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": "CartPole-v1"}, "expected a MultiAgentEnv"),
        ({"env": Both(), "num_envs": 2}, "pass a function"),
        ({"env": Both(), "restart_failed_sub_environments": True}, "pass a function"),
        ({"vectorize_mode": "native"}, "stepped in this process"),
        ({"policies": {"l": "me"}}, "expected a Policy"),
        ({"mapping": 3}, "a function of agent id"),
        ({"env_config": {"a": 1}, "env": lambda: Both()}, "takes no argument"),
        ({"env_config": {"a": 1}, "env": Both()}, "pass a function"),
        ({"env": lambda: 1 / 0}, "cannot be made: ZeroDivisionError"),
    ],
    # The message alone: arguments have addresses in their texts, which processes do not agree on.
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_make_no_sense_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        both(**arguments)


def test_without_a_mapping_policies_are_those_of_their_names() -> None:
    with pytest.raises(OptionError, match="pass a policy_mapping_fn"):
        both(policies={"x": Steps(), "y": Steps()}).run(1)
    policies: Mapping[str, Policy] = {}
    with pytest.raises(OptionError, match="expected policies by id"):
        MultiAgentEnvRunner(Both, policies)
    runner = both()
    with pytest.raises(OptionError, match="at least 1"):
        runner.run(0)


# ---- chunks ----


def test_chunks_put_together_are_the_episodes_with_their_ids() -> None:
    """Reference 2.5, chunking: ids preserved; look-back."""
    runner = counting(num_envs=2, episode_lookback_horizon=2)
    reference = counting(num_envs=2).run(60)
    chunks = [chunk for _ in range(12) for chunk in runner.sample(num_timesteps=10)]
    assert sum(chunk.env_steps() for chunk in chunks) == 120
    whole: dict[Any, Any] = {}
    for chunk in chunks:
        if chunk.id_ in whole:
            before = whole[chunk.id_]
            assert chunk.lookback is not None
            assert chunk.lookback.env_t == chunk.env_t_started == before.env_t
            for agent, episode in chunk.lookback.agent_episodes.items():
                known = before.agent_episodes[agent]
                assert len(episode) == min(2, len(known))
                assert np.array_equal(episode.rewards, known.rewards[-len(episode) :])
            whole[chunk.id_] = before.concat(chunk)
        else:
            assert chunk.lookback is None
            assert chunk.env_t_started == 0
            whole[chunk.id_] = chunk
    batches = [chunk.to_batch() for chunk in whole.values()]
    for name in ("even", "odd"):
        ours = concat_samples([batch[name] for batch in batches if name in batch])
        theirs = reference[name]
        assert len(ours) == len(theirs)
        for column in ("obs", "rewards", "actions", "t", "eps_id", "agent_index", "new_obs", "seen"):
            order, other = (np.lexsort((b["t"], b["agent_index"], b["eps_id"])) for b in (ours, theirs))
            assert np.array_equal(ours[column][order], theirs[column][other])
    assert sum(chunk.is_done for chunk in chunks) == len([e for e in whole.values() if e.is_done]) > 3


def test_whole_episodes_are_as_many_as_asked_for() -> None:
    runner = counting(num_envs=3)
    runner.run(5)
    for wanted in (1, 7):
        episodes = runner.sample(num_episodes=wanted)
        assert len(episodes) == wanted
        for episode in episodes:
            (seed,) = {int(each.observations[0, 0]) for each in episode.agent_episodes.values()}
            played = plan(seed)
            assert (episode.env_t_started, episode.env_t) == (0, played.length)
            assert (episode.terminated, episode.truncated) == played.flags
            assert episode.is_done
            assert {agent: len(each) for agent, each in episode.agent_episodes.items()} == {
                f"a{i}": len(part.acts) for i, part in enumerate(played.parts) if part.acts
            }
    assert runner.steps_dropped > 0
    with pytest.raises(OptionError, match="pass only one of them"):
        runner.sample(num_timesteps=1, num_episodes=1)
    with pytest.raises(OptionError, match="at least 1"):
        runner.sample(num_episodes=0)


def test_random_actions_need_no_policy_and_begin_new_episodes() -> None:
    """Section 5.34: random actions in whole episodes."""
    runner = both(policies={"l": Steps(), "r": Steps()})
    runner.sample(num_timesteps=10)
    (chunk,) = runner.sample(num_timesteps=20, random_actions=True)
    assert chunk.env_t_started == 0
    assert len(set(chunk.get_actions()["l"].tolist())) > 3
    assert "explored" not in chunk.agent_episodes["l"].extra_outputs
    assert len(runner.sample(num_episodes=2, random_actions=True)) == 2
    (chunk,) = runner.sample(num_timesteps=20)
    assert chunk.get_actions()["l"].tolist() == [t % 5 for t in range(20)]
    assert runner.policies["l"].sizes == [1] * 30  # type: ignore[attr-defined]


def test_random_actions_are_not_postprocessed_by_a_policy_that_did_not_act() -> None:
    """A recurrent ActorCritic raised MissingColumn: there is no state of it, and no value."""
    policies: dict[str, Policy] = {"l": ActorCritic(gru), "r": ActorCritic(gru)}
    told: list[str] = []

    class Told(Callbacks):
        def on_postprocess_trajectory(self, *, policy_id: str, **_: Any) -> None:
            told.append(policy_id)

    for policy in policies.values():
        policy.weights_seq_no = 7
    runner = both(policies=policies, callbacks=Told)
    (chunk,) = runner.sample(num_timesteps=20, random_actions=True)
    assert told == []
    for episode in chunk.agent_episodes.values():
        columns = set(episode.extra_outputs)
        assert {"action_logp", "action_prob", "weights_seq_no"} <= columns, "as `EnvRunner` records them"
        assert not columns & {"vf_preds", "advantages", "state_out_0"}
        np.testing.assert_allclose(episode.extra_outputs["action_logp"], np.log(1 / 5), rtol=1e-6)
        assert not episode.extra_outputs["weights_seq_no"].any()
    (chunk,) = runner.sample(num_timesteps=20)
    assert told == ["l", "r"]
    for episode in chunk.agent_episodes.values():
        assert {"vf_preds", "advantages", "state_out_0"} <= set(episode.extra_outputs)
        assert set(episode.extra_outputs["weights_seq_no"].tolist()) == {7}


def test_random_actions_after_a_restore_are_others() -> None:
    first, restored = both(), both()
    before = first.sample(num_timesteps=20, random_actions=True)[0].get_actions()["l"].tolist()
    restored.load_state_dict(first.state_dict())
    after = restored.sample(num_timesteps=20, random_actions=True)[0].get_actions()["l"].tolist()
    assert len(before) > 10
    assert before != after


def test_exploring_may_be_said_for_a_call_and_episodes_started_over() -> None:
    """Reference 2.5, sample(): explore, force_reset."""
    runner = both()
    (chunk,) = runner.sample(num_timesteps=5, explore=False)
    assert not chunk.get_extra_outputs("explored")["l"].any()
    (chunk,) = runner.sample(num_timesteps=5)
    assert chunk.get_extra_outputs("explored")["l"].all()
    assert chunk.env_t_started == 5
    (chunk,) = runner.sample(num_timesteps=5, force_reset=True)
    assert chunk.env_t_started == 0
    assert chunk.lookback is None
    runner.run(3)
    (chunk,) = runner.sample(num_timesteps=5)
    assert chunk.env_t_started == 8
    assert chunk.lookback is None, "what is before it was handed out as a batch"
