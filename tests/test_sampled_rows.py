"""Runners and recorders give the rows of `sampled_rows` bit for bit, from fixed seeds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from sampled_rows import GOLDEN, WALKS, WAYS, Loop, RemembersAgents, Walk, described, digest

from rlio.connectors.connector import Connector
from rlio.connectors.frame_stack import FrameStack
from rlio.connectors.mean_std import MeanStdFilter
from rlio.errors import OptionError, SchemaError
from rlio.policies.random_policy import RandomPolicy
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner


def test_each_way_to_sample_gives_the_rows_of_its_golden_hash() -> None:
    """After a change of rows that is meant: ``python tests/sampled_rows.py --write``, and CHANGELOG.md."""
    golden = json.loads(GOLDEN.read_text())
    assert golden.keys() == WAYS.keys()
    assert [way for way in WAYS if digest(way) != golden[way]] == []


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", [RandomPolicy, RemembersAgents])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_mode": "complete_episodes", "record_infos": True},
        {"horizon": 5, "clip_rewards": True, "record_env_seeds": True},
        {"horizon": 4, "soft_horizon": True},
        {"observation_connectors": [MeanStdFilter(), FrameStack(2)]},
    ],
    ids=["", "complete", "horizon", "soft", "connectors"],
)
@pytest.mark.each_value_once
def test_one_agent_gives_the_same_rows_through_either_runner(policy: Any, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"num_envs": 3, "rollout_fragment_length": 20} | options
    single = EnvRunner(Walk, policy(), config=RolloutConfig(**given), seed=5)
    config = RolloutConfig(**given, env_config={"num_agents": 1})
    several = MultiAgentEnvRunner(WALKS, {"default_policy": policy()}, config=config, seed=5)
    for _ in range(3):
        assert described(single.run()) == described(several.run()["default_policy"])
    # Chunks lie environment by environment, or in the order of their ends; unroll ids are of batches.
    one = single.sample(num_episodes=3, random_actions=True)
    each = [chunk.agent_episodes[0] for chunk in several.sample(num_episodes=3, random_actions=True)]
    for mine, other in zip(sorted(one, key=_id), sorted(each, key=_id), strict=True):
        rows = mine.to_batch()
        del rows["unroll_id"]
        assert described(rows) == described(other.to_batch())


def _id(episode: Any) -> Any:
    return episode.id_


class Sees(Connector):
    """Keeps which rows it was told to begin an episode."""

    def __init__(self) -> None:
        self.starts: list[bool] = []

    def __call__(self, values: Any, streams: Any) -> Any:
        self.starts += streams.starts.tolist()
        return values


def test_action_connectors_are_told_of_starts_by_either_runner() -> None:
    config: dict[str, Any] = {"action_connectors": [Sees()], "num_envs": 1, "rollout_fragment_length": 60}
    single = EnvRunner(Walk, RandomPolicy(), config=RolloutConfig(**config), seed=5)
    batch = single.run()
    several = MultiAgentEnvRunner(
        WALKS,
        {"default_policy": RandomPolicy()},
        config=RolloutConfig(**config, env_config={"num_agents": 1}),
        seed=5,
    )
    several.run()
    for actor in (*single._actors.values(), *several._actors.values()):
        (sees,) = actor.actions.connectors
        assert isinstance(sees, Sees)
        assert sees.starts == (batch["t"] == 0).tolist()


def test_a_state_of_another_shape_is_refused_by_name() -> None:
    class Grows(RandomPolicy):
        def initial_state(self, batch_size: int) -> Any:
            return (np.zeros((batch_size, 2)),)

        def compute_actions(self, obs: Any, state: Any = (), **given: Any) -> Any:
            actions, _, extras = super().compute_actions(obs, (), **given)
            return actions, (np.zeros((len(obs), 3)),), extras

    for runner in (
        EnvRunner(Walk, Grows()),
        MultiAgentEnvRunner(WALKS, {"default_policy": Grows()}),
        ExternalRunner(Loop(), Grows()),
    ):
        with pytest.raises(SchemaError) as caught:
            runner.run()
        assert caught.value.column == "state_out_0"
        runner.stop()


def test_metrics_count_the_steps_of_each_agent() -> None:
    config = RolloutConfig(num_envs=2, rollout_fragment_length=20, env_config={"num_agents": 3})
    runner = MultiAgentEnvRunner(WALKS, {"default_policy": RandomPolicy()}, config=config, seed=5)
    index = np.concatenate([runner.run()["default_policy"]["agent_index"] for _ in range(2)])
    metrics = runner.get_metrics()
    counts = {str(agent): int((index == agent).sum()) for agent in range(3)}
    assert metrics.summarise()["num_agent_steps_sampled"] == counts
    twice = type(metrics).merge([metrics, metrics]).summarise()
    assert twice["num_agent_steps_sampled"] == {agent: 2 * steps for agent, steps in counts.items()}


def test_an_external_runner_saves_all_of_itself_and_tells_callbacks_of_samples() -> None:
    class Told(Callbacks):
        samples: Any = None

        def on_sample_end(self, *, samples: Any, **given: Any) -> None:
            self.samples = samples

    told = Told()
    first = ExternalRunner(Loop(), RemembersAgents(), callbacks=told, seed=5)
    chunks = first.sample(num_timesteps=25, explore=False)
    assert told.samples is chunks
    assert not any(chunk.extra_outputs["explored"].any() for chunk in chunks)
    assert first.sample(num_timesteps=10)[-1].extra_outputs["explored"][-1]
    for option in ({"random_actions": True}, {"force_reset": True}):
        with pytest.raises(OptionError):
            first.sample(num_timesteps=1, **option)
    first.policy.weights_seq_no = 7
    state = first.get_state()
    assert state.keys() == {"policies", "connectors", "runner", "metrics"}
    second = ExternalRunner(Loop(), RemembersAgents(), seed=1)
    second.set_state(state)
    assert second.timesteps >= state["runner"]["timesteps"] >= 35
    assert (second.seeds, second.policy.weights_seq_no) == (first.seeds, 7)
    for runner in (first, second):
        runner.stop()
