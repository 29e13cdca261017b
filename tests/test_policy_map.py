"""PolicyMap and PolicySpec: least recently used policies lie on disk, and nobody notices."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from rlio.batch import SampleBatch
from rlio.errors import ClosedError, OptionError, StateError
from rlio.policies.checkpoint import load_state, save_state
from rlio.policies.dqn import DQN
from rlio.policies.policy_map import PolicyMap
from rlio.policies.policy_spec import PolicySpec, as_specs, callable_name, load_callable
from rlio.policies.random_policy import RandomPolicy
from rlio.policies.torch_policy import TorchPolicy

OBS = Box(-1.0, 1.0, (4,), np.float32)
ACTIONS = Discrete(2)
ROW = np.linspace(-1, 1, 4, dtype=np.float32)


def spec(**config: Any) -> PolicySpec:
    return PolicySpec(TorchPolicy, OBS, ACTIONS, {"hidden": (8,), **config})


def logits(policy: Any) -> Any:
    return policy.compute_single_action(ROW)[2]["action_dist_inputs"]


@pytest.mark.few(1)
@pytest.mark.parametrize("swapping", [False, True])
def test_upstreams_policy_map_row_capacity_two_of_six(swapping: bool, tmp_path: Path) -> None:
    """Row "policy map" (2.6), "policy map capacity, policy_states_are_swappable" (2.1) and test_policy_map of
    6.2: the order of use, the number in memory, and the outputs of each over 50 accesses.
    """
    policies = PolicyMap(capacity=2, policy_states_are_swappable=swapping, folder=tmp_path)
    for i in range(6):
        policies[f"pol{i}"] = spec().make(seed=i)
        assert policies.loaded == tuple(f"pol{j}" for j in range(max(i - 1, 0), i + 1))
        assert set(policies) == {f"pol{j}" for j in range(i + 1)}
    expected = {policy_id: logits(policy) for policy_id, policy in policies.items()}
    assert len({value.tobytes() for value in expected.values()}) == 6
    objects = set()
    for i in range(50):
        policy_id = f"pol{i % 6}"
        policy = policies[policy_id]
        objects.add(id(policy))
        assert policies.loaded[-1] == policy_id
        assert len(policies.loaded) == 2
        assert np.array_equal(logits(policy), expected[policy_id])
    if swapping:
        assert len(objects) <= 3, "no policy is made again"
    assert {file.suffix for file in tmp_path.rglob("*") if file.is_file()} == {".json", ".npz"}
    policies.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("swapping", [False, True])
def test_what_was_learned_and_drawn_survives_the_disk(swapping: bool) -> None:
    """A policy that was put away acts and learns on as one that was not, schedules included."""
    rng = np.random.default_rng(0)
    rows = SampleBatch(
        obs=rng.normal(size=(8, 4)).astype(np.float32),
        new_obs=rng.normal(size=(8, 4)).astype(np.float32),
        actions=rng.integers(0, 2, 8),
        rewards=np.ones(8, np.float32),
        terminateds=np.zeros(8, bool),
    )
    made = PolicySpec(DQN, OBS, ACTIONS, {"hidden": (8,), "target_update_every": 2})
    alone = {name: made.make(seed=i) for i, name in enumerate("abc")}
    with PolicyMap(capacity=1, policy_states_are_swappable=swapping) as policies:
        for i, name in enumerate("abc"):
            policies[name] = made.make(seed=i)
        for _ in range(3):
            for name, other in alone.items():
                assert policies[name].learn_on_batch(rows) == other.learn_on_batch(rows)
                for policy in (policies[name], other):
                    policy.weights_seq_no += 1
                drawn = policies[name].compute_actions(rows["obs"], timestep=5000)[0]
                assert np.array_equal(drawn, other.compute_actions(rows["obs"], timestep=5000)[0])
        assert policies["a"].weights_seq_no == 6


def test_iteration_includes_what_is_on_disk() -> None:
    with PolicyMap({name: spec() for name in "abc"}, capacity=1, seed=0) as policies:
        assert list(policies) == ["a", "b", "c"]
        assert len(policies) == 3
        assert "a" in policies
        assert "d" not in policies
        assert [name for name, _ in policies.items()] == ["a", "b", "c"]
        assert [type(policy) for policy in policies.values()] == [TorchPolicy] * 3
        with pytest.raises(KeyError):
            _ = policies["d"]


def test_what_is_learned_while_a_policy_is_held_stays() -> None:
    with PolicyMap({name: spec() for name in "ab"}, capacity=1, seed=0) as policies:
        with policies.held("a") as a, policies.held("b") as b:
            assert policies.loaded == ("a", "b"), "held policies stay"
            a.weights_seq_no, b.weights_seq_no = 17, 3
        assert policies.loaded == ("a",)
        assert [policy.weights_seq_no for policy in policies.values()] == [17, 3]


@pytest.mark.parametrize("swapping", [False, True])
def test_a_policy_that_learns_with_other_processes_still_does_when_it_comes_back(swapping: bool) -> None:
    with PolicyMap({"a": spec(), "b": spec()}, policy_states_are_swappable=swapping) as policies:
        policies["a"].distributed_world_size = 3
        policies.capacity = 1
        policies["c"] = spec()
        assert policies.loaded == ("c",)
        for _ in range(2):
            assert [policies[name].distributed_world_size for name in "ab"] == [3, 1]


def test_policies_are_added_replaced_and_removed_on_the_fly(tmp_path: Path) -> None:
    with PolicyMap({name: spec() for name in "abc"}, capacity=1, folder=tmp_path, seed=1) as policies:
        del policies["a"]
        assert list(policies) == ["b", "c"]
        with pytest.raises(KeyError):
            del policies["a"]
        with pytest.raises(KeyError):
            _ = policies["a"]
        policies["b"] = RandomPolicy()
        assert isinstance(policies["b"], RandomPolicy)
        policies["b"] = spec()
        policies["a"] = spec()
        assert list(policies) == ["b", "c", "a"]
        assert [type(each) for each in policies.values()] == [TorchPolicy] * 3
        assert policies.pop("c")
        assert len(policies) == 2


def test_seeds_are_by_id_whatever_the_order() -> None:
    one = PolicyMap({name: spec() for name in "ab"}, seed=3)
    two = PolicyMap({name: spec() for name in "ba"}, seed=3)
    other = PolicyMap({"a": spec()}, seed=4)
    assert np.array_equal(logits(one["a"]), logits(two["a"]))
    assert not np.array_equal(logits(one["a"]), logits(one["b"]))
    assert not np.array_equal(logits(one["a"]), logits(other["a"]))


def test_a_policy_bound_after_it_was_made_comes_back_in_its_spaces() -> None:
    with PolicyMap({name: PolicySpec(RandomPolicy) for name in "ab"}, capacity=1) as policies:
        policies["a"].bind(OBS, Discrete(7), 0)
        _ = policies["b"]
        assert policies["a"].action_space == Discrete(7)
        assert not policies["b"].is_bound


def test_what_cannot_be_put_away_is_said_at_once() -> None:
    policies = PolicyMap(capacity=2)
    policies["a"], policies["b"] = RandomPolicy(), RandomPolicy()
    with pytest.raises(OptionError, match="without a PolicySpec"):
        policies["c"] = RandomPolicy()
    assert list(policies) == ["a", "b"]
    with pytest.raises(OptionError, match="capacity=0"):
        PolicyMap(capacity=0)
    with pytest.raises(OptionError, match="expected a Policy"):
        policies["c"] = "random"  # type: ignore[assignment]
    with pytest.raises(OptionError, match="not a policy id"):
        policies[""] = RandomPolicy()
    swapping = PolicyMap({"a": spec().make()}, policy_states_are_swappable=True)
    with pytest.raises(OptionError, match="one class with the same spaces"):
        swapping["b"] = PolicySpec(RandomPolicy, OBS, ACTIONS).make()


def test_a_closed_map_says_so_for_what_lay_on_its_disk() -> None:
    policies = PolicyMap({name: spec() for name in "ab"}, capacity=1)
    policies.close()
    policies.close()
    assert logits(policies["b"]).shape == (2,)
    with pytest.raises(ClosedError):
        _ = policies["a"]
    unbound = PolicyMap({name: PolicySpec(RandomPolicy) for name in "ab"}, capacity=1)
    unbound.close()
    with pytest.raises(ClosedError):
        _ = unbound["a"]
    assert unbound.loaded == ("b",), "what was in memory still is"


def test_a_forked_child_that_closes_the_map_leaves_the_states_to_its_parent() -> None:
    with PolicyMap({name: PolicySpec(RandomPolicy, OBS, ACTIONS) for name in "ab"}, capacity=1) as policies:
        child = multiprocessing.get_context("fork").Process(target=policies.close)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert [policy.is_bound for policy in policies.values()] == [True, True]


@pytest.mark.further
def test_many_threads_see_each_policy_as_it_is() -> None:
    names = "abcdef"
    with PolicyMap({name: spec() for name in names}, capacity=2, seed=0) as policies:
        expected = {name: logits(policy) for name, policy in policies.items()}
        wrong: list[str] = []

        def use(start: int) -> None:
            for i in range(40):
                name = names[(start + i * (start + 1)) % 6]
                with policies.held(name) as policy:
                    policy.weights_seq_no += 1
                    if not np.array_equal(logits(policy), expected[name]):
                        wrong.append(name)

        threads = [threading.Thread(target=use, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert sum(policy.weights_seq_no for policy in policies.values()) <= 160
        assert len(policies.loaded) == 2


# ---- specs ----


@dataclass(frozen=True)
class Options:
    rate: float
    sizes: tuple[int, ...] = ()


def make_module(space: Any, outputs: int, generator: torch.Generator) -> torch.nn.Module:
    return torch.nn.Linear(4, outputs)


def make_policy(hidden: Any, options: Options | None = None, **rest: Any) -> TorchPolicy:
    return TorchPolicy(hidden=hidden, **rest)


def test_a_spec_goes_through_a_checkpoint_with_its_functions_and_options_by_name(tmp_path: Path) -> None:
    """Row "policy spec" (2.1); callables travel as module:name."""
    config = {"hidden": [4], "options": Options(0.5, (1, 2)), "optimizer": torch.optim.SGD}
    one = PolicySpec(make_policy, Dict(a=OBS), ACTIONS, config)
    save_state(tmp_path, one.to_state())
    text = (tmp_path / "state.json").read_text()
    assert f"{__name__}:make_policy" in text
    two = PolicySpec.from_state(load_state(tmp_path))
    assert two.observation_space == one.observation_space
    assert two.action_space == one.action_space
    assert two.policy_class == f"{__name__}:make_policy"
    assert two.config["options"] == Options(0.5, [1, 2])  # type: ignore[arg-type] # JSON has lists only
    assert two.config["optimizer"] is torch.optim.SGD
    assert isinstance(PolicySpec(make_policy, OBS, ACTIONS, {"hidden": [3]}).make(seed=0), TorchPolicy)


def make_something(hidden: Any) -> Any:
    return TorchPolicy(hidden=hidden)


def test_a_stored_spec_calls_nothing_but_what_makes_policies(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in ("subprocess:call", "subprocess:Popen", "os:system", f"{__name__}:make_something"):
        stored = {"policy_class": name, "spaces": [None, None], "config": {"args": ["touch", str(mark)]}}
        with pytest.raises(OptionError, match="not a policy class"):
            PolicySpec.from_state(stored).make()
    assert not mark.exists()
    with pytest.raises(OptionError, match="annotate the function"):
        PolicySpec(make_something).to_state()
    assert isinstance(PolicySpec(make_something, config={"hidden": [3]}).make(), TorchPolicy)
    assert isinstance(PolicySpec(f"{__name__}:make_policy", config={"hidden": [3]}).make(), TorchPolicy)


def test_a_spec_that_cannot_be_made_or_stored_says_why() -> None:
    for wrong, message in (
        (lambda: PolicySpec(3), "policy_class=3"),
        (lambda: PolicySpec(TorchPolicy, config=[1]), "keywords"),
        (lambda: PolicySpec().make(), "no policy_class"),
        (lambda: PolicySpec("nowhere.at_all:It").make(), "there is no nowhere"),
        (lambda: PolicySpec("rlio.policies").make(), "expected 'module:name'"),
        (lambda: PolicySpec(dict).make(), "expected a Policy"),
        (lambda: PolicySpec(TorchPolicy, config={"no": 1}).make(), "cannot be called"),
        (lambda: PolicySpec(lambda: None).to_state(), "define it at the top"),
        (lambda: PolicySpec(config={"m": torch.nn.Linear(1, 1)}).to_state(), "cannot be stored"),
        (lambda: load_callable("rlio.batch.columns:DEFAULT_POLICY_ID"), "expected a function"),
    ):
        with pytest.raises(OptionError, match=message):
            wrong()
    for state in ({}, {"policy_class": 3, "spaces": [None, None], "config": {}}):
        with pytest.raises(StateError):
            PolicySpec.from_state(state)
    with pytest.raises(StateError, match="not a dataclass"):
        PolicySpec.from_state(
            {
                "policy_class": None,
                "spaces": [None, None],
                "config": {"a": {"$options": "subprocess:Popen", "fields": {"args": ["true"]}}},
            }
        )
    assert callable_name(Path.exists).endswith("Path.exists")


def test_a_specs_own_spaces_win_over_the_environments() -> None:
    one = PolicySpec(RandomPolicy, action_space=Discrete(3)).with_spaces(OBS, ACTIONS)
    assert (one.observation_space, one.action_space) == (OBS, Discrete(3))


def test_policies_are_given_in_many_forms() -> None:
    policy = RandomPolicy()
    made = as_specs(
        {
            "a": policy,
            "b": RandomPolicy,
            "c": "x:Y",
            "d": None,
            "e": (DQN, OBS, ACTIONS, {}),
            "f": PolicySpec(),
        }
    )
    assert made["a"] is policy
    assert made["b"] == PolicySpec(RandomPolicy)
    assert made["c"] == PolicySpec("x:Y")
    assert made["d"] == made["f"] == PolicySpec()
    assert made["e"] == PolicySpec(DQN, OBS, ACTIONS)
    assert as_specs(["a", "b"]) == {"a": PolicySpec(), "b": PolicySpec()}
    for wrong in ({}, 3, "a", {"a": 3}, {1: policy}):
        with pytest.raises(OptionError):
            as_specs(wrong)
