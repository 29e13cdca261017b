"""What a WorkerGroup is made of, without Ray: recipes, actors as plain objects, options, sums."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from group_envs import make_known
from linear_policy import LinearPolicy, even_odd

import rlio
from rlio import RolloutWorker
from rlio.connectors.mean_std import MeanStdFilter
from rlio.distributed import FaultTolerance, WorkerGroup
from rlio.distributed.group.actor_pool import _OURS
from rlio.distributed.group.actors import Broadcast, WorkerActor
from rlio.distributed.group.broadcasts import Broadcasts
from rlio.distributed.group.joint import JointFilters, JointMetrics
from rlio.distributed.group.worker_spec import WorkerId, WorkerKeywords, WorkerSpec, portable
from rlio.envs.multi_agent import make_multi_agent
from rlio.errors import ClosedError, MissingExtra, OptionError, StateError, WorkerError, WorkerLost
from rlio.sampling.config import RolloutConfig
from rlio.sampling.metrics import Counts, RolloutMetrics


def recipe_of(**keywords: Any) -> WorkerSpec:
    rollout = RolloutConfig(rollout_fragment_length=10)
    given = portable(make_known, LinearPolicy, {"rollout": rollout, **keywords})
    return WorkerSpec(make_known, LinearPolicy, given, num_workers=2, seed=7)


# ---- seeds ----


def test_no_two_workers_have_the_same_seed_whoever_takes_whose_place() -> None:
    spec = recipe_of()
    seats = [WorkerId(index, incarnation) for index in range(1, 40) for incarnation in range(40)]
    seeds = {spec.seed_of(worker_id) for worker_id in seats}
    assert len(seeds) == len(seats)
    assert max(seeds) < 2**53
    assert spec.seed_of(WorkerId(3, 1)) == recipe_of().seed_of(WorkerId(3, 1))


def test_who_takes_anothers_place_records_other_episodes_under_other_ids(tmp_path: Path) -> None:
    spec = recipe_of(output=tmp_path)
    found, writers = [], set()
    for incarnation in (0, 1):
        with spec.make(WorkerId(1, incarnation)) as worker:
            found.append(worker.sample())
            writers.add(worker.writer.writer_id)  # type: ignore[attr-defined]  # of a ParquetWriter
    assert not set(found[0]["eps_id"]) & set(found[1]["eps_id"])
    assert found[0]["obs"][0, 0] != found[1]["obs"][0, 0]
    assert len(writers) == 2


# ---- what travels ----


def test_a_group_takes_the_keywords_of_a_worker_but_those_that_it_gives_itself() -> None:
    of_worker = set(signature(rlio.RolloutWorker.__init__).parameters)
    own = {"self", "env", "policy", "seed", "place"}
    assert set(WorkerKeywords.__annotations__) - {"log_dir"} == of_worker - own


def test_paths_and_names_mean_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "input": {"sampler": 0.5, "old/*.json": 0.25, "s3://bucket/rows": 0.25},
        "output": "rows",
        "log_dir": Path("logs"),
    }
    made = portable("CartPole-v1", LinearPolicy, given)
    assert made["input"] == [
        ("sampler", 0.5),
        (str(tmp_path / "old/*.json"), 0.25),
        ("s3://bucket/rows", 0.25),
    ]
    assert made["output"] == str(tmp_path / "rows")
    assert made["log_dir"] == str(tmp_path / "logs")
    rlio.register_output("only-here", rlio.NoopOutput)
    rlio.register_input("from-here", rlio.JsonReader)
    made = portable("CartPole-v1", LinearPolicy, {"output": "only-here", "input": ["from-here", "b.json"]})
    assert made["output"] is rlio.NoopOutput
    assert made["input"] == [rlio.JsonReader, str(tmp_path / "b.json")]
    assert portable("CartPole-v1", LinearPolicy, {"output": "logdir"})["output"] == "logdir"


def bound() -> LinearPolicy:
    policy = LinearPolicy()
    env = gym.make("CartPole-v1")
    policy.bind(env.observation_space, env.action_space, 0)
    return policy


@pytest.mark.parametrize(
    ("env", "policy", "keywords", "said"),
    [
        (gym.make("CartPole-v1"), LinearPolicy, {}, "each worker needs its own"),
        ("CartPole-v1", bound(), {}, "already acts"),
        ("CartPole-v1", {"a": LinearPolicy, "b": bound()}, {}, "b=.*already acts"),
        ("CartPole-v1", LinearPolicy, {"output": rlio.NoopOutput()}, "open in this process"),
        ("CartPole-v1", LinearPolicy, {"worker_index": 3}, "no option 'worker_index'"),
        ("CartPole-v1", LinearPolicy, {"record": "all", "input": "rows", "output": "rows"}, "read again"),
    ],
    ids=["env", "policy", "one of several", "output", "keyword", "same root"],
)
def test_what_cannot_be_in_several_processes_is_refused(
    env: Any, policy: Any, keywords: Any, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        WorkerGroup(env, policy, num_workers=2, **keywords)


def test_an_open_reader_is_refused(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(rlio.SampleBatch(rewards=[1.0]))
    with rlio.DatasetReader(tmp_path) as reader, pytest.raises(OptionError, match="open in this process"):
        WorkerGroup("CartPole-v1", LinearPolicy, num_workers=2, input={"sampler": 1, reader: 1})


def test_there_are_workers() -> None:
    with pytest.raises(OptionError, match="num_workers=0"):
        WorkerGroup("CartPole-v1", LinearPolicy, num_workers=0)


@pytest.mark.parametrize("name", _OURS)
def test_how_workers_are_restarted_is_the_groups_affair(name: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(OptionError, match=name):
        WorkerGroup("CartPole-v1", LinearPolicy, num_workers=1, actor_options={name: 2})


@pytest.mark.parametrize(
    "options",
    [
        {"max_restarts": -1},
        {"max_restarts_in_a_row": 1.5},
        {"lost_workers": "ignore"},
        {"start_timeout_s": None},
        {"request_timeout_s": 0},
        {"probe_timeout_s": True},
        {"restart_window_s": 0},
        {"restart_pause_s": -1},
        {"max_restart_pause_s": None},
    ],
)
def test_a_tolerance_that_means_nothing_is_refused(options: Any) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        FaultTolerance(**options)


def test_restarts_count_against_the_limit_within_a_window_and_wait_with_growing_pauses() -> None:
    tolerance = FaultTolerance(max_restarts=3, restart_window_s=100.0, max_restarts_in_a_row=2)
    restarted = [0.0, 40.0, 60.0]
    assert not tolerance.allows(restarted=restarted, now=99.0, in_a_row=0)
    assert tolerance.allows(restarted=restarted, now=101.0, in_a_row=1)
    assert not tolerance.allows(restarted=restarted, now=101.0, in_a_row=2)
    for_ever = FaultTolerance(max_restarts=3, restart_window_s=None)
    assert not for_ever.allows(restarted=restarted, now=1e9, in_a_row=0)
    # An outage of two minutes uses up no more than what one worker may use in a row.
    tolerance = FaultTolerance()
    shortest = [tolerance.pause_s(in_a_row=n, spread=0.0) for n in range(tolerance.max_restarts_in_a_row)]
    longest = [tolerance.pause_s(in_a_row=n, spread=1.0) for n in range(tolerance.max_restarts_in_a_row)]
    assert shortest[0] == longest[0] == 0.0
    assert all(2 * short == long for short, long in zip(shortest, longest, strict=True))
    assert sorted(longest) == longest
    assert max(longest) == tolerance.max_restart_pause_s
    assert sum(longest) > 120.0
    assert FaultTolerance(restart_pause_s=0.0).pause_s(in_a_row=500, spread=1.0) == 0.0


@pytest.mark.further
def test_ray_is_imported_by_what_uses_it_and_missed_with_the_line_that_installs_it() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import rlio, rlio.distributed\n"
        "from rlio.distributed import FaultTolerance, WorkerGroup\n"
        "try:\n    WorkerGroup('CartPole-v1', rlio.RandomPolicy, num_workers=1)\n"
        "except rlio.errors.MissingExtra as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'rlio[ray]'" in done.stdout
    assert issubclass(MissingExtra, ImportError)


# ---- the actor, as a plain object ----


def test_an_actor_gives_its_worker_what_came_since_and_older_weights_change_nothing() -> None:
    actor = WorkerActor()
    with pytest.raises(ClosedError):
        actor.sample()
    frozen = np.array([3.0])
    frozen.flags.writeable = False
    opened = actor.open(recipe_of(), WorkerId(2, 1), None, None, Broadcast({"w": frozen}, 4))
    assert opened.pid == os.getpid()
    assert opened.writer_id is None
    actor.apply(lambda worker: worker.policy.get_weights()["w"])
    first = actor.sample()
    assert first.batch is not None
    assert set(first.batch["w_then"]) == {3.0}
    assert set(first.batch["weights_seq_no"]) == {4}
    second = actor.sample(Broadcast({"w": np.array([9.0])}, 4), Broadcast({"w": np.array([5.0])}, 5))
    assert second.batch is not None
    assert set(second.batch["w_then"]) == {5.0}
    assert second.metrics.counts.env_steps == 10
    assert second.position is None  # Live experience cannot be sampled again.
    actor.apply(RolloutWorker.assert_healthy)
    actor.close()
    actor.close()
    with pytest.raises(ClosedError):
        actor.apply(RolloutWorker.assert_healthy)


class Keeps(LinearPolicy):
    """Keeps the very arrays that it is given."""

    def set_weights(self, weights: Any) -> None:
        self.w = weights["w"]


def test_a_policy_may_keep_and_change_the_weights_that_it_is_given() -> None:
    actor = WorkerActor()
    actor.open(WorkerSpec("CartPole-v1", Keeps, {}, num_workers=1, seed=0), WorkerId(1), None, None)
    frozen = np.array([3.0])
    frozen.flags.writeable = False
    assert actor.apply(lambda worker: worker.policy.w.flags.writeable, Broadcast({"w": frozen}, 1))
    actor.close()


def test_what_a_worker_sees_while_statistics_are_summed_is_counted_the_next_time() -> None:
    rollout = RolloutConfig(rollout_fragment_length=10, observation_connectors=[MeanStdFilter()])
    spec = recipe_of(rollout=rollout)
    actors = [WorkerActor(), WorkerActor()]
    for index, actor in enumerate(actors, 1):
        actor.open(spec, WorkerId(index), None, None)
        actor.sample()
    joint, total = JointFilters(), 0
    for _ in range(3):
        parts = [actor.apply(partial(RolloutWorker.get_filters, flush_after=True)) for actor in actors]
        total += sum(part["default_policy"][0].buffer.n for part in parts)
        joint.add(parts)
        for actor in actors:
            actor.sample()  # Between the two halves.
            actor.adopt_filters(joint.filters)
        assert joint.filters["default_policy"][0].running_stats.n == total
        for actor in actors:
            own = actor.apply(lambda worker: worker.get_filters()["default_policy"][0])
            assert own.running_stats.n == total + own.buffer.n
            assert own.buffer.n >= 10
    for actor in actors:
        actor.close()


def test_statistics_of_several_policies_are_summed_policy_by_policy() -> None:
    rollout = RolloutConfig(rollout_fragment_length=30, observation_connectors=[MeanStdFilter()])
    keywords = {"rollout": rollout, "policy_setup": rlio.sampling.PolicySetup(policy_mapping_fn=even_odd)}
    policies = {"even": rlio.RandomPolicy, "odd": rlio.RandomPolicy}
    env = make_multi_agent("CartPole-v1")(num_agents=3)
    spec = WorkerSpec(env, policies, keywords, num_workers=2, seed=0)
    actors = [WorkerActor(), WorkerActor()]
    for index, actor in enumerate(actors, 1):
        actor.open(spec, WorkerId(index), None, None)
        actor.sample()
    parts = [actor.apply(partial(RolloutWorker.get_filters, flush_after=True)) for actor in actors]
    joint = JointFilters()
    joint.add(parts)
    counts = {policy_id: own[0].running_stats.n for policy_id, own in joint.filters.items()}
    assert counts == {policy_id: sum(part[policy_id][0].buffer.n for part in parts) for policy_id in policies}
    assert counts["even"] > counts["odd"] > 30
    other = JointFilters()
    other.load_state_dict(json.loads(json.dumps(joint.state_dict())), joint.filters)
    assert {policy_id: own[0].running_stats.n for policy_id, own in other.filters.items()} == counts
    for actor in actors:
        actor.close()


def test_filters_of_unlike_workers_are_not_summed() -> None:
    joint = JointFilters()
    with pytest.raises(StateError, match="made alike"):
        joint.add([{"a": []}, {"b": []}])
    joint.load_state_dict({}, {})
    with pytest.raises(StateError, match="filters"):
        joint.load_state_dict({"a": []}, {"b": []})


# ---- sums ----


def test_weights_that_others_replace_are_let_go() -> None:
    held = Broadcasts()
    held.add("both", frozenset("ab"), seq_no=held.next_seq_no())
    held.add("a", frozenset("a"), seq_no=held.next_seq_no())
    assert held.since(0) == ["both", "a"]
    held.add("both again", frozenset("ab"), seq_no=held.next_seq_no())
    assert held.since(0) == ["both again"]
    assert held.since(held.count) == []
    assert not held.add("late", frozenset("a"), seq_no=2)
    assert held.add("forced", frozenset("ab"), seq_no=0)
    # It has no version of its own: workers keep the one before, and so does what is compared with.
    assert not held.add("late", frozenset("ab"), seq_no=3)
    assert held.newest == 3
    # Whoever comes later gets the version that the forced weights stand for, too.
    assert held.since(0) == ["both again", "forced"]
    assert held.add("forced again", frozenset("ab"), seq_no=0)
    assert held.since(0) == ["both again", "forced again"]


def test_weights_that_come_late_do_not_replace_newer_ones_of_a_part_of_the_policies() -> None:
    held = Broadcasts()
    held.add("a, fifth", frozenset("a"), seq_no=5)
    assert held.add("both, third", frozenset("ab"), seq_no=3)  # b has none that are newer.
    assert held.since(0) == ["a, fifth", "both, third"]


def test_sums_do_not_grow_with_what_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = JointMetrics()
    monkeypatch.setattr("rlio.distributed.group.joint._MOST_EPISODES", 100)
    for number in range(1, 1001):
        part = RolloutMetrics(returns=np.array([number]), lifetime=Counts(episodes=number))
        part.counts.episodes = 1
        joint.add("worker", part)
        assert len(joint._parts) <= 256
    taken = joint.take()
    assert taken.returns.tolist() == list(range(901, 1001))
    assert taken.counts.episodes == taken.lifetime.episodes == 1000
    other = JointMetrics()
    other.load_state_dict(joint.state_dict())
    other.add("worker", RolloutMetrics(lifetime=Counts(episodes=5)))
    assert other.lifetime.episodes == 1005
    with pytest.raises(StateError):
        other.load_state_dict({"episodes": 1})


@pytest.mark.parametrize("kind", [WorkerError, WorkerLost])
def test_errors_of_workers_travel_between_processes(kind: type[WorkerError]) -> None:
    error = pickle.loads(pickle.dumps(kind("it broke", worker_index=3, incarnation=1)))
    assert type(error) is kind
    assert (str(error), error.worker_index, error.incarnation) == ("it broke", 3, 1)
