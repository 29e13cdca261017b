"""RolloutWorker with several agents and policies: what it samples, learns, records, changes and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from linear_policy import LinearPolicy, even_odd, only_even, worker_options

import rlio
from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.multi_agent import MultiAgentEnv, make_multi_agent
from rlio.errors import OptionError, StateError
from rlio.policies.networks import gru
from rlio.policies.torch_policy import TorchPolicy
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.config import RolloutConfig
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.sampling.policy_setup import PolicySetup
from rlio.testing import ReaderTests
from rlio.worker import RolloutWorker


class Team(MultiAgentEnv):
    """Agents 0 and 1 act together for 5 steps; agent i gets i + 1 each step."""

    possible_agents = (0, 1)
    observation_spaces = dict.fromkeys((0, 1), Box(0.0, 9.0, (1,), np.float32))
    action_spaces = dict.fromkeys((0, 1), Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._each(np.zeros(1, np.float32)), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        over = self.t == 5
        rewards = {agent: agent + 1.0 for agent in self.possible_agents}
        ended = {**self._each(over), "__all__": over}
        return self._each(np.full(1, self.t, np.float32)), rewards, ended, {"__all__": False}, {}

    def _each(self, value: Any) -> Any:
        return dict.fromkeys(self.possible_agents, value)


def team(env: Any = Team, policies: Any = None, **options: Any) -> RolloutWorker:
    rollout = RolloutConfig(**{"rollout_fragment_length": 10} | options.pop("rollout", {}))
    given = {"even": LinearPolicy, "odd": LinearPolicy} if policies is None else policies
    defaults = {"seed": 0, "policy_mapping_fn": even_odd}
    return RolloutWorker(env, given, rollout=rollout, **worker_options(**defaults | options))


def ma(batch: Any) -> MultiAgentBatch:
    assert isinstance(batch, MultiAgentBatch)
    return batch


def weights(worker: RolloutWorker) -> dict[str, float]:
    found = worker.get_weights(list(worker.group.policies))
    return {policy_id: float(own["w"][0]) for policy_id, own in found.items()}


class TestMultiAgentWorker(ReaderTests):
    finite = False

    def make_reader(self) -> RolloutWorker:
        return team()

    def expected_rows(self) -> MultiAgentBatch:
        runner = team().runner
        assert isinstance(runner, MultiAgentEnvRunner)
        return ma(concat_samples([runner.run() for _ in range(12)]))


# ---- sampling ----


def test_steps_of_environments_and_of_agents_are_counted_apart() -> None:
    """Upstream, env_runner_v2 and rollout worker: 200 env / 400 agent steps; agent_steps >= 301."""
    with team(rollout={"rollout_fragment_length": 200}) as worker:
        batch, count = worker.sample_with_count()
        assert (count, batch.env_steps(), batch.agent_steps()) == (200, 200, 400)
        assert {policy_id: len(rows) for policy_id, rows in ma(batch).items()} == {"even": 200, "odd": 200}
    config = {"rollout_fragment_length": 301, "count_steps_by": "agent_steps"}
    with team(rollout=config) as worker:
        assert 301 <= worker.sample().agent_steps() < 310


def test_one_policy_acts_for_all_agents_of_an_environment_that_is_seen_to_have_several() -> None:
    for env in (Team, Team()):
        with RolloutWorker(env, LinearPolicy(), rollout=RolloutConfig(rollout_fragment_length=5)) as worker:
            batch = ma(worker.sample())
            assert list(batch) == ["default_policy"]
            assert sorted(batch["default_policy"]["agent_index"].tolist()) == [0] * 5 + [1] * 5


def test_copies_of_an_environment_are_agents() -> None:
    config = {"env_config": {"num_agents": 4}, "num_envs": 2}
    with team(make_multi_agent("CartPole-v1"), rollout=config) as worker:
        batch = ma(worker.sample())
        assert batch.env_steps() == 20
        assert set(batch["odd"]["agent_index"].tolist()) == {1, 3}
        assert len(worker.foreach_env(lambda env: env.possible_agents)) == 2
        assert [c.vector_index for c in worker.foreach_env_with_context(lambda _, context: context)] == [0, 1]


def test_policies_and_environments_that_do_not_go_together_are_refused() -> None:
    """Row "multi-agent validation" of 2.1."""
    with pytest.raises(OptionError, match="expected a MultiAgentEnv"):
        team("CartPole-v1")
    with pytest.raises(OptionError, match="expected a MultiAgentEnv"):
        RolloutWorker("CartPole-v1", {"a": LinearPolicy, "b": LinearPolicy})
    with RolloutWorker("CartPole-v1", LinearPolicy) as worker, pytest.raises(OptionError, match="one agent"):
        worker.set_policy_mapping_fn(even_odd)
    swappable = PolicySetup(policy_states_are_swappable=True)
    with pytest.raises(OptionError, match="with one agent"):
        RolloutWorker("CartPole-v1", LinearPolicy, policy_setup=swappable)


def test_spaces_are_those_of_policies_and_of_agents() -> None:
    with team() as worker:
        spaces = worker.get_spaces()
        assert set(spaces) == {"even", "odd", "__env__"}
        assert spaces["odd"] == (Team.observation_spaces[1], Team.action_spaces[1])
        assert spaces["__env__"] == (Team.observation_spaces, Team.action_spaces)


def test_a_data_set_of_several_policies_reads_back_as_it_was_served(tmp_path: Path) -> None:
    with team(output=tmp_path / "set") as worker:
        served = ma(concat_samples([worker.sample(7) for _ in range(5)]))
    data = rlio.open_dataset(tmp_path / "set")
    assert data.open_shard(data.segments[0]).provenance["policy"] == "even: LinearPolicy, odd: LinearPolicy"
    with rlio.read(str(tmp_path / "set"), epochs=1) as reader:
        rows = ma(concat_samples(list(reader)))
    for policy_id, own in served.items():
        for name in own:
            assert np.array_equal(rows[policy_id][name], own[name]), (policy_id, name)
    with team(input=str(tmp_path / "set"), input_options={"batch_size": 10}) as again:
        assert ma(again.sample()).env_steps() == 10


# ---- learning ----


def test_each_policy_learns_on_its_agents() -> None:
    with team(policies_to_train=only_even) as worker:
        batch = worker.sample()
        assert list(worker.learn_on_batch(batch)) == ["even"]
        assert weights(worker) == {"even": 1.0, "odd": 0.0}
        worker.set_is_policy_to_train(None)
        gradients, stats = worker.compute_gradients(batch)
        assert stats["odd"]["batch_count"] == 10
        worker.apply_gradients(gradients)
        assert weights(worker) == {"even": 1.0, "odd": 2.0}
        stats, count = worker.sample_and_learn(20, num_sgd_iter=2, sgd_minibatch_size=5)
        assert count == 20
        assert {policy_id: own["num_grad_updates_lifetime"] for policy_id, own in stats.items()} == {
            "even": 10,
            "odd": 9,
        }


def test_weights_of_some_policies_are_set_and_recorded_with_their_version() -> None:
    with team() as worker:
        worker.set_weights({"odd": {"w": np.array([4.0])}}, weights_seq_no=3)
        batch = ma(worker.sample())
        assert set(batch["odd"]["weights_seq_no"]) == {3}
        assert set(batch["odd"]["w_then"]) == {4.0}
        assert set(batch["even"]["weights_seq_no"]) == {0}


@pytest.mark.further
@pytest.mark.parametrize("swappable", [False, True])
def test_policies_that_do_not_fit_into_memory_act_and_learn_all_the_same(swappable: bool) -> None:
    """Row "policy map capacity, policy_states_are_swappable" of 2.1."""
    setup = PolicySetup(
        capacity=1,
        policy_states_are_swappable=swappable,
        spaces=dict.fromkeys(("even", "odd"), (Team.observation_spaces[0], Team.action_spaces[0])),
    )
    with team(policy_setup=setup) as worker:
        for _ in range(3):
            batch = worker.sample()
            worker.learn_on_batch(batch)
        assert weights(worker) == {"even": 1.0, "odd": 2.0}
        batch = ma(worker.sample())
        assert {policy_id: set(rows["w_then"]) for policy_id, rows in batch.items()} == {
            "even": {1.0},
            "odd": {2.0},
        }
        assert len(worker.group.policies.loaded) == 1


# ---- changes on the fly ----


def test_added_policies_act_when_they_are_mapped_to_and_removed_ones_are_forgotten() -> None:
    """Rows "add_policy / remove_policy" and "policy re-lookup" of 2.3; error 31 of 5.3."""
    config = {"observation_connectors": [MeanStdFilter()], "batch_mode": "complete_episodes"}
    with team(rollout=config) as worker:
        worker.sample()
        assert set(worker.get_filters()) == {"even", "odd"}
        worker.add_policy("third", LinearPolicy, policy_mapping_fn=lambda agent, episode: "third")
        worker.sample()
        assert list(ma(worker.sample())) == ["third"]
        for policy_id in ("even", "odd"):
            worker.remove_policy(policy_id)
        batch = ma(worker.sample())
        assert list(batch) == ["third"]
        assert set(worker.get_spaces()) == {"third", "__env__"}
        assert set(worker.get_filters()) == {"third"}
        assert list(worker.get_weights()) == ["third"]
        assert "odd" not in json.dumps(worker.state_dict())
        assert worker.get_policies_to_train() == {"third"}
        with pytest.raises(OptionError, match="last policy"):
            worker.remove_policy("third")


def test_a_new_policy_without_spaces_takes_the_agents_if_they_agree() -> None:
    class Unlike(Team):
        action_spaces = {0: Discrete(2), 1: Discrete(3)}  # noqa: RUF012 - as authors of environments write it

    with team() as worker:
        assert worker.add_policy("new", LinearPolicy).action_space == Discrete(2)
    with team(Unlike) as worker:
        with pytest.raises(OptionError, match="has no spaces"):
            worker.add_policy("new", LinearPolicy)
        spec = (LinearPolicy, Unlike.observation_spaces[1], Unlike.action_spaces[1])
        assert worker.add_policy("new", spec).action_space == Discrete(3)
        assert "new" in worker.get_spaces()


# ---- metrics and callbacks ----


def test_metrics_are_by_policy_and_agent() -> None:
    with team() as worker:
        worker.sample()
        summary = worker.get_metrics().summarise()
    assert summary["policy_reward_mean"] == {"even": 5.0, "odd": 10.0}
    assert summary["agent_episode_returns_mean"] == {"0": 5.0, "1": 10.0}
    assert summary["episode_return_mean"] == 15.0
    assert summary["num_env_steps_sampled"] == 10
    assert sum(summary["num_agent_steps_sampled"].values()) == 20
    assert summary["num_module_steps_sampled"] == {"even": 10, "odd": 10}


def test_callbacks_know_agents_and_policies() -> None:
    seen: list[Any] = []

    class Tells(Callbacks):
        def on_create_policy(self, *, policy_id: str, policy: Any, **kwargs: Any) -> None:
            seen.append((policy_id, policy.is_bound))

        def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
            seen.append((episode.policy_for(0), episode.policy_for(1), episode.agent_rewards))

        def on_postprocess_trajectory(self, *, agent_id: Any, policy_id: str, **kwargs: Any) -> None:
            seen.append((agent_id, policy_id, sorted(kwargs["original_batches"])))

        def on_sample_end(self, *, samples: Any, **kwargs: Any) -> None:
            seen.append(samples.env_steps())

    with team(callbacks=Tells, rollout={"rollout_fragment_length": 5}) as worker:
        worker.sample()
    assert seen == [
        ("even", True),
        ("odd", True),
        (0, "even", [0, 1]),
        (1, "odd", [0, 1]),
        ("even", "odd", {(0, "even"): 5.0, (1, "odd"): 10.0}),
        5,
    ]


# ---- logged rows of several policies ----


class Centralised(LinearPolicy):
    """Adds the rewards of the others to its rows."""

    def postprocess_trajectory(
        self, batch: SampleBatch, other_agent_batches: Any = None, episode: Any = None
    ) -> SampleBatch:
        others = [rows["rewards"] for _, rows in (other_agent_batches or {}).values()]
        batch["others"] = np.sum(others, axis=0) if others else np.zeros(len(batch))
        return batch


def test_logged_trajectories_are_postprocessed_with_those_of_the_other_agents(tmp_path: Path) -> None:
    with team(output=tmp_path) as worker:
        worker.sample()
    given: dict[str, Any] = {"input": tmp_path, "input_options": {"batch_size": 10}}
    given["rollout"] = {"postprocess_inputs": True}
    with team(Team, {"even": Centralised, "odd": Centralised}, **given) as worker:
        batch = ma(worker.sample())
        assert {policy_id: len(rows) for policy_id, rows in batch.items()} == {"even": 10, "odd": 10}
        assert {policy_id: set(rows["others"]) for policy_id, rows in batch.items()} == {
            "even": {2.0},
            "odd": {1.0},
        }
    lacking = team(Team, {"even": Centralised}, policy_mapping_fn=None, **given)
    with lacking, pytest.raises(OptionError, match="rows of the unknown policy 'odd'"):
        lacking.sample()


def test_agents_of_one_policy_are_postprocessed_one_by_one(tmp_path: Path) -> None:
    with team(policies=LinearPolicy(), policy_mapping_fn=None, output=tmp_path) as worker:
        worker.sample()
    given: dict[str, Any] = {"input": tmp_path, "input_options": {"batch_size": 10}}
    given["rollout"] = {"postprocess_inputs": True}
    with team(policies=Centralised(), policy_mapping_fn=None, **given) as worker:
        rows = ma(worker.sample().as_multi_agent())["default_policy"]
        assert set(rows["others"][rows["agent_index"] == 0]) == {2.0}
        assert set(rows["others"][rows["agent_index"] == 1]) == {1.0}


# ---- state ----


def test_a_restored_worker_has_the_policies_and_the_mapping_and_goes_on(tmp_path: Path) -> None:
    with team(policies_to_train=["even"]) as worker:
        worker.sample_and_learn()
        nine = {"weights": {"w": np.array([9.0])}, "weights_seq_no": 2}
        worker.add_policy("third", LinearPolicy, state=nine)
        worker.save(tmp_path)
        expected = weights(worker)
    with team(policy_mapping_fn=lambda agent_id, episode: "even") as other:
        other.restore(tmp_path)
        assert weights(other) == expected == {"even": 1.0, "odd": 0.0, "third": 9.0}
        assert set(ma(other.sample())) == {"even", "odd"}
        assert other.get_policies_to_train() == {"even"}
        assert other.get_metrics().lifetime.env_steps == 20


def test_save_and_restore_keep_the_filter_statistics_of_every_policy(tmp_path: Path) -> None:
    """They came back as new filters: 41 observations of each agent, and 0 after the restore."""
    options = {"observation_connectors": [MeanStdFilter()]}
    with team(rollout=options) as worker:
        worker.sample(35)
        worker.save(tmp_path)
        expected = worker.get_filters()
        assert {own[0].running_stats.n for own in expected.values()} == {41}
    for components in (None, ["position"], ["connectors"]):
        with team(rollout=options) as restored:
            restored.restore(tmp_path, components=components)
            found = restored.get_filters()
            assert found.keys() == expected.keys()
            for policy_id, (each,) in found.items():
                assert each.state_dict() == expected[policy_id][0].state_dict()
    with team(rollout=options) as other:
        other.sample()
        other.restore(tmp_path, not_components=["position", "connectors"])
        assert {own[0].running_stats.n for own in other.get_filters().values()} == {11}
        with pytest.raises(StateError):
            other.load_state_dict(_with_other_filters(worker.state_dict()))
        assert {own[0].running_stats.n for own in other.get_filters().values()} == {11}


def _with_other_filters(state: Any) -> Any:
    """The state of a worker in which the policy ``odd``, which is looked at last, has no filter."""
    text = json.loads(json.dumps(state))
    text["position"]["reader"]["position"]["runner"]["connectors"]["odd"]["observation"] = {"7": {}}
    return text


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_steps_of_recurrent_policies_are_cut_with_the_states_that_are_there(mode: Any) -> None:
    """``sample(n)`` was refused where n steps of the environment end in the middle of a sequence."""
    config = RolloutConfig(num_envs=2, rollout_fragment_length=25, batch_mode=mode)
    make, policies = make_multi_agent("CartPole-v1"), {"even": TorchPolicy(gru), "odd": TorchPolicy(gru)}
    with RolloutWorker(
        lambda: make(num_agents=3),
        policies,
        policy_setup=PolicySetup(policy_mapping_fn=even_odd),
        rollout=config,
        seed=0,
    ) as worker:
        parts = [worker.sample(n) for n in (37, 1, 5, 100, 2)]
    assert [part.count for part in parts] == [37, 1, 5, 100, 2]
    keys: list[Any] = []
    for part in parts:
        assert isinstance(part, MultiAgentBatch)
        for policy_id, rows in part.items():
            assert_each_sequence_is_what_its_state_makes_of_it(policies[policy_id], rows)
            keys += zip(rows["eps_id"], rows["agent_index"], rows["t"], strict=True)
    assert len(set(keys)) == len(keys)


def assert_each_sequence_is_what_its_state_makes_of_it(policy: TorchPolicy, rows: SampleBatch) -> None:
    assert rows["seq_lens"].sum() == len(rows)
    for i, state in enumerate(rows["state_in_0"]):
        sequence = rows.sequences(i, i + 1)
        assert (np.diff(sequence["t"]) == 1).all()
        assert len(set(zip(sequence["eps_id"], sequence["agent_index"], strict=True))) == 1
        states = (state[None],)
        for obs, outputs in zip(sequence["obs"], sequence["action_dist_inputs"], strict=True):
            _, states, extras = policy.compute_actions(obs[None], states)
            np.testing.assert_allclose(extras["action_dist_inputs"][0], outputs, atol=1e-5)
