"""Callbacks are called in RLlib's order: RLlib wrote the calls in the scenarios of `callback_calls.py`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import count
from typing import Any

import callback_calls
import numpy as np
import pytest
from callback_calls import SCENARIOS, Scenario, Steps, agents_env, golden, policy_of, recorder
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlio import Callbacks, RolloutConfig, RolloutWorker, SampleBatch
from rlio.envs.external import ExternalEnv
from rlio.envs.multi_agent import MultiAgentEnv
from rlio.errors import ClosedError
from rlio.policies.policy import Policy
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.multi_agent_episode import MultiAgentEpisode
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.sampling.policy_setup import PolicySetup

GOLDEN = golden()


class Idle(Policy):
    """Always the same action."""

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        return np.zeros(len(obs), np.int64), state, {}


def calls_of(scenario: Scenario) -> list[Any]:
    """The calls that rlio makes: of RolloutWorker, where RLlib's is the old stack's, else of a runner."""
    callback_calls.Lengths.made = count()
    made = recorder(Callbacks)
    config = RolloutConfig(num_envs=scenario.num_envs, **scenario.config)
    policies = Idle() if scenario.agents is None else {"first": Idle(), "second": Idle()}
    env: Any = Steps if scenario.agents is None else agents_env(MultiAgentEnv, scenario.agents)
    runner: Any
    if scenario.stack == "old":
        setup = PolicySetup() if scenario.agents is None else PolicySetup(policy_mapping_fn=policy_of)
        runner = RolloutWorker(env, policies, rollout=config, callbacks=made, policy_setup=setup, seed=0)
    elif isinstance(policies, Policy):
        # RLlib's runner resets in a step of its own.
        envs = SyncVectorEnv([Steps] * scenario.num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
        runner = EnvRunner(envs, policies, config=config, callbacks=made, seed=0)
    else:
        runner = MultiAgentEnvRunner(
            lambda: env(), policies, policy_of, config=config, callbacks=made, seed=0
        )
    for _ in range(scenario.samples):
        runner.sample()
    (runner.close if scenario.stack == "old" else runner.stop)()
    return made.calls


def comparable(scenario: Scenario, calls: list[Any]) -> list[Any]:
    """The calls without what differs on purpose."""
    first = 2 * scenario.num_envs
    # RLlib's RolloutWorker resets before it creates the first episodes, its other runners after that.
    calls = [*sorted(calls[:first]), *calls[first:]]
    if scenario.stack == "new":
        # It does not postprocess, and its sums are those of a chunk.
        return [
            call if call[0] == "on_sample_end" else call[:4]
            for call in calls
            if call[0] != "on_postprocess_trajectory"
        ]
    if scenario.agents is None:
        return calls
    # For `t` of several agents, see below.
    calls = [call[:-1] if call[0] == "on_postprocess_trajectory" else call for call in calls]
    return _without_repeats(calls) if scenario.agents == "come and go" else calls


def _without_repeats(calls: list[Any]) -> list[Any]:
    """The calls without rows that RLlib repeats: those of an ended agent, until its episode ends."""
    seen, kept = set(), []
    for name, *rest in calls:
        if name == "on_postprocess_trajectory":
            env, number, _, agent, *_, steps, _, _ = rest
            if (env, number, agent, steps[0]) in seen:
                continue
            seen.add((env, number, agent, steps[0]))
            del rest[5]  # The agents with rows.
        # Rows are counted in the other scenarios.
        rest = rest[:1] if name == "on_sample_end" else rest[:4] if name == "on_episode_end" else rest
        kept.append([name, *rest])
    return kept


@pytest.mark.few(22)
@pytest.mark.parametrize("name", SCENARIOS)
def test_callbacks_are_called_in_the_order_of_rllib(name: str) -> None:
    scenario = SCENARIOS[name]
    found, expected = comparable(scenario, calls_of(scenario)), comparable(scenario, GOLDEN[name])
    if scenario.stack == "old" or not (scenario.agents or scenario.num_envs > 1):
        assert found == expected
        return
    # RLlib's runners return the surplus of the last step, and reset several agents in a step of its own: only
    # with one environment are samples the same, and only with one agent the order of several environments.
    samples = [[call for call in each if call[0] == "on_sample_end"] for each in (found, expected)]
    assert samples[0] == samples[1] or scenario.num_envs > 1
    found, expected = ([call for call in each if call[0] != "on_sample_end"] for each in (found, expected))
    for env in range(scenario.num_envs) if scenario.agents else (None,):
        own, theirs = ([call for call in each if env in (None, call[1])] for each in (found, expected))
        fewest = min(len(own), len(theirs))
        assert fewest > 8
        assert own[:fewest] == theirs[:fewest]


def test_t_is_the_step_in_which_an_agent_acted() -> None:
    """RLlib's old stack has the last step before the agent's next observation: [1, 3] for agents in turns.

    Both are the same if agents act in every step.
    """
    name = "old, turns, 1 env, whole episodes"
    pairs = zip(calls_of(SCENARIOS[name]), GOLDEN[name], strict=True)
    found = [pair for pair in pairs if pair[0][0] == "on_postprocess_trajectory"]
    assert len(found) > 3
    for own, theirs in found:
        length, observed = own[3], own[7]
        assert own[-1] == observed, "the step of its own observation"
        assert theirs[-1] == [step - 1 for step in [*observed[1:], length]]


# ---- what callbacks may do then ----


class Measures(Callbacks):
    """Counts postprocessed rows as a metric of the episode."""

    def on_postprocess_trajectory(self, *, episode: Any, postprocessed_batch: Any, **kwargs: Any) -> None:
        metrics = episode.custom_metrics
        metrics["rows"] = metrics.get("rows", 0) + len(postprocessed_batch)
        assert episode.length >= postprocessed_batch["t"][-1] + 1


class MeasuresItself(Idle):
    """Counts the rows that it postprocesses as a metric of the episode."""

    def postprocess_trajectory(
        self, batch: SampleBatch, other_agent_batches: Any = None, episode: Any = None
    ) -> SampleBatch:
        episode.custom_metrics["rows"] = episode.custom_metrics.get("rows", 0) + len(batch)
        return batch


class Watches(Callbacks):
    """Needs to see episodes, which policies then see too."""

    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
        assert episode.custom_metrics["rows"] > 0


class Loop(ExternalEnv):
    """Episodes of five steps."""

    def __init__(self) -> None:
        super().__init__(Steps.observation_space, Steps.action_space)

    def run(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                episode = self.start_episode()
                for t in range(5):
                    self.get_action(episode, np.full(3, t, np.float32))
                    self.log_returns(episode, 1.0)
                self.end_episode(episode, np.full(3, 5, np.float32))


@pytest.mark.each_value_once
@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("kind", ["one agent", "several agents", "external"])
@pytest.mark.parametrize("by", ["callback", "policy"])
def test_metrics_that_postprocessing_sets_are_counted(by: str, kind: str, mode: Any) -> None:
    """They were set after the episode had gone into the metrics. RLlib postprocesses first."""
    made = Idle() if by == "callback" else MeasuresItself()
    callbacks = Measures if by == "callback" else Watches
    config = RolloutConfig(rollout_fragment_length=4, batch_mode=mode)
    runner: Any
    if kind == "one agent":
        runner = EnvRunner(Steps, made, config=replace(config, num_envs=3), callbacks=callbacks, seed=0)
    elif kind == "external":
        runner = ExternalRunner(Loop(), made, config=config, callbacks=callbacks, seed=0)
    else:
        env = agents_env(MultiAgentEnv, "together")
        config = replace(config, num_envs=3)
        runner = MultiAgentEnvRunner(
            env, {"first": made, "second": made}, policy_of, config=config, callbacks=callbacks, seed=0
        )
    for _ in range(5):
        runner.run()
    runner.stop()
    agents = 2 if kind == "several agents" else 1
    episodes = runner.get_metrics().details
    assert len(episodes) > 3
    assert [episode.custom_metrics["rows"] for episode in episodes] == [
        agents * episode.length for episode in episodes
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("several", [False, True])
def test_rows_are_the_same_whether_callbacks_postprocess_them_or_nobody_does(several: bool) -> None:
    """Rows are postprocessed before they are handed out, and each once."""

    class Marks(Callbacks):
        def on_postprocess_trajectory(self, *, postprocessed_batch: Any, **kwargs: Any) -> None:
            assert "mark" not in postprocessed_batch
            postprocessed_batch["mark"] = 10 * postprocessed_batch["t"]

    def rows(callbacks: Any, mode: Any) -> list[Any]:
        callback_calls.Lengths.made = count()
        config = RolloutConfig(num_envs=3, rollout_fragment_length=4, batch_mode=mode, record_infos=True)
        runner: Any
        if several:
            env = agents_env(MultiAgentEnv, "come and go")
            policies = {"first": Idle(), "second": Idle()}
            runner = MultiAgentEnvRunner(env, policies, policy_of, config=config, callbacks=callbacks, seed=0)
        else:
            envs = SyncVectorEnv([Steps] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
            runner = EnvRunner(envs, Idle(), config=config, callbacks=callbacks, seed=0)
        found = []
        for _ in range(6):
            batch = runner.run()
            for part in dict(batch).values() if several else [batch]:
                assert callbacks is None or np.array_equal(part["mark"], 10 * part["t"])
                ids = part["unroll_id"]
                assert np.array_equal(
                    np.diff(ids) != 0, np.diff(part["eps_id"]) + np.diff(part["agent_index"]) != 0
                )
                found.append(
                    {name: part[name].tolist() for name in part if name not in ("mark", "unroll_id")}
                )
        runner.stop()
        return found

    for mode in ("truncate_episodes", "complete_episodes"):
        assert rows(Marks, mode) == rows(None, mode)


class SumsToCome(Idle):
    """Adds the sum of the rewards that follow in the trajectory."""

    def postprocess_trajectory(
        self, batch: SampleBatch, other_agent_batches: Any = None, episode: Any = None
    ) -> SampleBatch:
        batch["to_come"] = np.cumsum(batch["rewards"][::-1])[::-1]
        return batch


def test_a_policy_postprocesses_the_same_trajectories_whether_callbacks_see_them_or_not() -> None:
    """With resets of their own, environments differ in rows, and an episode may end in a surplus row."""

    def rows(callbacks: Any) -> list[list[float]]:
        callback_calls.Lengths.made = count()
        envs = SyncVectorEnv([Steps] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
        config = RolloutConfig(rollout_fragment_length=4)
        runner = EnvRunner(envs, SumsToCome(), config=config, callbacks=callbacks, seed=0)
        found = [runner.run()["to_come"].tolist() for _ in range(12)]
        runner.stop()
        return found

    class Ends(Callbacks):
        def on_episode_end(self, **kwargs: Any) -> None:
            pass

    assert rows(Ends) == rows(None)


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_rows_of_an_episode_that_is_excluded_at_its_end_are_in_no_batch(mode: Any) -> None:
    class Odd(Callbacks):
        """Excludes every other episode, after its rows were postprocessed."""

        ended = postprocessed = 0

        def on_postprocess_trajectory(self, **kwargs: Any) -> None:
            self.postprocessed += 1

        def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
            self.ended += 1
            episode.training_enabled = self.ended % 2 == 0

    odd = Odd()
    config = RolloutConfig(rollout_fragment_length=8, batch_mode=mode)
    callback_calls.Lengths.made = count()
    runner = EnvRunner(lambda: Steps(), Idle(), config=config, callbacks=odd, seed=0)  # 3 and 5 steps
    rows = [len(runner.run()) for _ in range(3)]
    runner.stop()
    assert rows == [5, 5, 5]
    assert odd.postprocessed == odd.ended


# ---- whole episodes ----


@pytest.mark.parametrize("several", [False, True])
def test_a_batch_of_whole_episodes_has_a_fragment_of_each_environment(several: bool) -> None:
    """It had one fragment, whatever the number of environments: 108 rows, where RLlib's have 402."""
    config = RolloutConfig(num_envs=3, rollout_fragment_length=40, batch_mode="complete_episodes")
    callback_calls.Lengths.made = count()
    runner: Any = (
        MultiAgentEnvRunner(agents_env(MultiAgentEnv, "together"), {"first": Idle()}, config=config, seed=0)
        if several
        else EnvRunner(Steps, Idle(), config=config, seed=0)
    )
    for _ in range(4):
        # The longest episode has 5 steps.
        assert 3 * 40 <= runner.run().env_steps() < 3 * 40 + 5
        assert 3 * 7 <= runner.run(7).env_steps() < 3 * 7 + 5
        # A total is not multiplied.
        assert 7 <= sum(map(steps_of, runner.sample(num_timesteps=7))) < 7 + 5
    runner.stop()


def steps_of(episode: Any) -> int:
    return int(episode.env_steps()) if isinstance(episode, MultiAgentEpisode) else len(episode)


@pytest.mark.parametrize("several", [False, True])
def test_ended_episodes_come_before_running_ones(several: bool) -> None:
    """MultiAgentEnvRunner returned running chunks first, EnvRunner all of an environment together."""
    config = RolloutConfig(num_envs=3, rollout_fragment_length=4)
    callback_calls.Lengths.made = count()
    runner: Any = (
        MultiAgentEnvRunner(agents_env(MultiAgentEnv, "together"), {"first": Idle()}, config=config, seed=0)
        if several
        else EnvRunner(Steps, Idle(), config=config, seed=0)
    )
    episodes = runner.sample()
    runner.stop()
    # Environments 0, 1, 2 have episodes of (3, 5), (4, 2, 1), (2, 2) steps.
    assert [(steps_of(each), each.is_done) for each in episodes] == [
        (2, True), (3, True), (4, True), (2, True), (1, False)
    ]  # fmt: skip
