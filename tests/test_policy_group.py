"""PolicyGroup: policies come and go, learn or do not, and travel in states without pickle."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from linear_policy import LinearPolicy, even_odd, only_even, unnamed

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.errors import OptionError, StateError
from rlio.policies.checkpoint import load_state, save_state
from rlio.policies.policy_map import PolicyMap
from rlio.policies.policy_spec import PolicySpec
from rlio.policies.weights import GlobalVars
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.policy_group import PolicyGroup

SPACES = (Box(-1.0, 1.0, (2,), np.float32), Discrete(2))
SPEC = PolicySpec("linear_policy:LinearPolicy", *SPACES)


def rows_of(reward: float, rows: int = 3) -> SampleBatch:
    return SampleBatch(
        eps_id=np.zeros(rows, np.int64), t=np.arange(rows), rewards=np.full(rows, reward), obs=np.zeros(rows)
    )


def group_of(*policy_ids: str, capacity: int = 100, **options: Any) -> PolicyGroup:
    names = policy_ids or ("even", "odd")
    return PolicyGroup(PolicyMap(dict.fromkeys(names, SPEC), capacity=capacity), **options)


def single() -> PolicyGroup:
    return group_of("default_policy")


BOTH = MultiAgentBatch({"even": rows_of(2.0), "odd": rows_of(5.0)}, 3)


def weight(group: PolicyGroup, policy_id: str) -> float:
    policy = group.get(policy_id)
    assert isinstance(policy, LinearPolicy)
    return float(policy.w[0])


# ---- learning ----


def test_each_policy_learns_on_its_rows() -> None:
    """Row "learn_on_batch" of 2.2."""
    group = group_of()
    results = group.learn_on_batch(BOTH)
    assert results == {
        "even": {"loss": 4.0, "num_grad_updates_lifetime": 1},
        "odd": {"loss": 25.0, "num_grad_updates_lifetime": 1},
    }
    assert (weight(group, "even"), weight(group, "odd")) == (2.0, 5.0)
    assert group.learn_on_batch(BOTH)["even"]["num_grad_updates_lifetime"] == 2


def test_the_results_of_the_only_policy_are_its_own() -> None:
    group = single()
    assert group.learn_on_batch(rows_of(3.0)) == {"loss": 9.0, "num_grad_updates_lifetime": 1}
    assert list(group.get_weights()) == ["w"]
    group.set_weights({"w": np.array([7.0])})
    assert weight(group, "default_policy") == 7.0


@pytest.mark.parametrize("given", [rows_of(3.0), MultiAgentBatch({"default_policy": rows_of(3.0)}, 3)])
def test_results_are_by_policy_unless_the_default_policy_is_the_only_one(given: Any) -> None:
    """Whatever the form of the batch: results went by that, and weights by whether policies were named."""
    alone, two = single(), group_of("default_policy", "other")
    learned = {"loss": 9.0, "num_grad_updates_lifetime": 1}
    assert alone.learn_on_batch(given) == learned
    assert two.learn_on_batch(given) == {"default_policy": learned}
    assert alone.do_minibatch_sgd(given, seed=0)["loss"] == 0.0
    assert list(two.do_minibatch_sgd(given, seed=0)) == ["default_policy"]
    for group, own in ((alone, lambda found: found), (two, lambda found: found["default_policy"])):
        gradients, stats = group.compute_gradients(given)
        assert list(own(gradients)) == ["w"]
        assert own(stats)["batch_count"] == 3
        group.apply_gradients(gradients)
        assert list(own(group.get_weights(["default_policy"]))) == ["w"]
        assert list(own(group.get_weights())) == ["w"]
        group.set_weights(group.get_weights())
    assert list(two.get_weights()) == ["default_policy", "other"]


def test_of_an_only_policy_that_does_not_learn_nothing_is_given_and_nothing_is_taken() -> None:
    """Where no policies are named, the weights are those of the policies that learn."""
    group = group_of("default_policy", policies_to_train=[])
    group.set_weights({"w": np.array([7.0])})
    assert group.get_weights() == {}
    assert group.learn_on_batch(rows_of(3.0)) == {}
    assert group.compute_gradients(rows_of(3.0)) == ({}, {})
    assert list(group.get_weights(["default_policy"])) == ["w"]
    assert not group.set_weights(group.get_weights(), 3)
    group.apply_gradients({})
    assert weight(group, "default_policy") == 7.0


@pytest.mark.parametrize("chosen", [["even"], {"even"}, only_even, lambda pid, batch: pid == "even"])
def test_only_policies_to_train_learn(chosen: Any) -> None:
    """Rows "set_is_policy_to_train" and "get_policies_to_train(batch)"."""
    group = group_of(policies_to_train=chosen)
    assert group.get_policies_to_train() == {"even"}
    assert list(group.learn_on_batch(BOTH)) == ["even"]
    assert weight(group, "odd") == 0.0
    gradients, _ = group.compute_gradients(BOTH)
    assert list(gradients) == ["even"]
    group.apply_gradients({"odd": {"w": np.ones(1)}})
    assert weight(group, "odd") == 0.0
    assert list(group.get_weights()) == ["even"]
    assert list(group.get_weights(["odd", "even"])) == ["even", "odd"]
    assert group.foreach_policy_to_train(lambda policy, policy_id: policy_id) == ["even"]


def test_the_batch_may_decide_who_learns() -> None:
    seen = []

    def choose(policy_id: str, batch: Any) -> bool:
        seen.append(batch)
        return batch is None or len(batch) > 3

    group = group_of(policies_to_train=choose)
    assert group.learn_on_batch(BOTH) == {}
    assert seen == [BOTH, BOTH]


def test_a_policy_without_rows_does_not_learn() -> None:
    batch = MultiAgentBatch({"even": rows_of(1.0), "odd": rows_of(1.0, rows=0)}, 3)
    assert list(group_of().learn_on_batch(batch)) == ["even"]


def test_gradients_have_a_batch_count_and_can_be_applied_elsewhere() -> None:
    """Rows "compute_gradients(samples, single_agent) / apply_gradients(grads)", "batch_count"."""
    here, there = group_of(), group_of()
    gradients, stats = here.compute_gradients(BOTH)
    assert stats["odd"] == {"loss": 25.0, "batch_count": 3}
    wider = MultiAgentBatch({"even": rows_of(2.0, 2), "odd": rows_of(5.0, 3)}, 4)
    counts = here.compute_gradients(wider)[1]
    assert (counts["even"]["batch_count"], counts["odd"]["batch_count"], counts["batch_count"]) == (2, 3, 4)
    assert weight(here, "odd") == 0.0
    there.apply_gradients(gradients)
    assert (weight(there, "even"), weight(there, "odd")) == (2.0, 5.0)
    assert there.num_grad_updates == {"even": 1, "odd": 1}
    own, own_stats = single().compute_gradients(rows_of(2.0))
    assert (list(own), own_stats["batch_count"]) == (["w"], 3)
    alone = single()
    alone.apply_gradients(own)
    assert weight(alone, "default_policy") == 2.0


def test_callbacks_see_batches_before_they_are_learned_on_and_may_add_to_the_results() -> None:
    """Row "on_learn_on_batch" of 2.4."""

    class Doubles(Callbacks):
        def on_learn_on_batch(self, *, policy: Any, train_batch: Any, result: Any, **kwargs: Any) -> None:
            train_batch["rewards"] = train_batch["rewards"] * 2
            result["rows"] = len(train_batch)

    group = group_of(callbacks=Doubles())
    assert group.learn_on_batch(MultiAgentBatch({"odd": rows_of(1.0)}, 3))["odd"]["rows"] == 3
    assert weight(group, "odd") == 2.0


def test_policies_that_are_swapped_out_learn_and_keep_what_they_learned() -> None:
    """Row "policy map capacity": with room for one of three."""
    group = group_of("a", "b", "c", capacity=1)
    for _ in range(2):
        group.learn_on_batch(MultiAgentBatch({name: rows_of(i + 1.0) for i, name in enumerate("abc")}, 3))
    assert [weight(group, name) for name in "abc"] == [1.0, 2.0, 3.0]
    group.set_weights({name: {"w": np.array([9.0])} for name in "abc"})
    assert [weight(group, name) for name in "cba"] == [9.0] * 3


# ---- coming and going ----


def test_a_policy_is_added_by_spec_or_object_with_spaces_and_state() -> None:
    """Row "get_policy / add_policy / remove_policy"."""
    group = group_of("even")
    added = group.add("odd", PolicySpec(LinearPolicy, config={"rate": 0.5}), spaces=SPACES)
    assert group.get("odd") is added
    assert added.is_bound
    own = LinearPolicy()
    state = {"weights": {"w": np.array([4.0])}, "weights_seq_no": 3}
    assert group.add("third", own, spaces=SPACES, state=state) is own
    assert (own.w[0], own.weights_seq_no) == (4.0, 3)
    assert list(group.policies) == ["even", "odd", "third"]


def test_what_cannot_be_added_leaves_nothing_behind() -> None:
    group = group_of("even")
    with pytest.raises(OptionError, match="the policy 'even' exists already"):
        group.add("even", SPEC)
    with pytest.raises(OptionError, match="has no spaces"):
        group.add("odd", LinearPolicy())
    with pytest.raises(StateError):
        group.add("odd", SPEC, state={"weights": 3})
    assert list(group.policies) == ["even"]


def test_nobody_knows_a_policy_that_was_removed() -> None:
    """Error 31 of 5.3: RLlib keeps its filters, specs and policies to train."""
    group = group_of(policies_to_train=["even", "odd"], policy_mapping_fn=even_odd)
    group.learn_on_batch(BOTH)
    removed = group.remove("odd")
    assert isinstance(removed, LinearPolicy)
    assert "odd" not in group.policies
    assert group.get_policies_to_train() == {"even"}
    assert not group.is_policy_to_train("odd")
    assert "odd" not in group.num_grad_updates
    assert "'odd'" not in repr(group.get_state())
    for ask in (group.get, group.remove, lambda pid: group.for_policy(print, pid)):
        with pytest.raises(OptionError, match="unknown policy 'odd'"):
            ask("odd")
    with pytest.raises(OptionError, match="unknown policy 'odd'"):
        group.learn_on_batch(BOTH)
    group.add("odd", SPEC)
    assert weight(group, "odd") == 0.0
    assert group.get_global_vars().num_grad_updates_per_policy["odd"] == 0
    with pytest.raises(OptionError, match="the last policy"):
        single().remove("default_policy")


def test_policies_are_announced_when_they_have_their_spaces() -> None:
    """Row "on_create_policy" of 2.4."""
    log = []

    class Tells(Callbacks):
        def on_create_policy(self, *, policy_id: str, policy: Any, **kwargs: Any) -> None:
            log.append((policy_id, policy.is_bound))

    group = group_of(callbacks=Tells())
    group.announce()
    group.add("new", SPEC)
    assert log == [("even", True), ("odd", True), ("new", True)]


def test_functions_are_called_for_policies_with_their_ids() -> None:
    """Row "for_policy / foreach_policy / foreach_policy_to_train"."""
    group = group_of()
    assert group.for_policy(lambda policy, add: policy.rate + add, "odd", add=1) == 2.0
    assert group.foreach_policy(lambda policy, policy_id, x: (policy_id, x), x=3) == [("even", 3), ("odd", 3)]


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies_to_train": ["unknown"]}, "unknown policy 'unknown'"),
        ({"policies_to_train": "even"}, "a list of policy ids"),
        ({"policies_to_train": 3}, "a list of policy ids"),
        ({"policy_mapping_fn": {"a": "even"}}, "a function of agent id"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        group_of(**options)


def test_the_mapping_may_change() -> None:
    """Row "set_policy_mapping_fn"."""
    group = group_of(policy_mapping_fn=even_odd)
    assert group.policy_mapping_fn is even_odd
    group.set_policy_mapping_fn(only_even)
    assert group.policy_mapping_fn is only_even
    state = group.get_state()
    group.set_policy_mapping_fn(None)
    default = group.get_state()
    group.set_state(state)
    assert group.policy_mapping_fn is only_even
    group.set_state(default)
    assert group.policy_mapping_fn is None


# ---- weights and numbers that are shared ----


def test_weights_are_taken_if_they_are_newer() -> None:
    """Row "weights_seq_no" of 2.6: newer only, 0 forces."""
    group = group_of()
    weights = {name: {"w": np.array([1.0])} for name in ("even", "odd")}
    assert group.set_weights(weights, 5)
    older = {name: {"w": np.array([2.0])} for name in ("even", "odd")}
    assert not group.set_weights(older, 5)
    assert not group.set_weights(older, 4)
    assert weight(group, "odd") == 1.0
    assert group.set_weights(older, 0)
    assert weight(group, "odd") == 2.0
    assert group.get("odd").weights_seq_no == 5
    with pytest.raises(OptionError, match="unknown policy 'unknown'"):
        group.set_weights({"unknown": {}}, 9)


def test_weights_of_policies_that_are_not_here_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """RLlib: a learner may have policies that a worker lacks."""
    group = group_of("even")
    weights = {name: {"w": np.array([4.0])} for name in ("even", "gone")}
    with caplog.at_level(logging.WARNING, "rlio"):
        assert group.set_weights(weights)
        assert group.set_weights(weights)
    assert weight(group, "even") == 4.0
    assert [record.message for record in caplog.records] == [
        "weights of the policy 'gone' are left out: it is not here"
    ]


def test_global_vars_reach_every_policy() -> None:
    """Row "get/set_global_vars"."""
    group = group_of()
    given = GlobalVars(1000, {"even": 7, "gone": 3})
    group.set_global_vars(given)
    assert group.get_global_vars() == GlobalVars(1000, {"even": 7, "odd": 0})
    odd = group.get("odd")
    assert isinstance(odd, LinearPolicy)
    assert odd.global_updates == [given]
    group.set_global_vars(given, ["even"])
    assert len(odd.global_updates) == 1


# ---- state ----


def test_a_state_makes_the_policies_that_are_missing(tmp_path: Path) -> None:
    """Row "get_state / set_state": specs, functions by name, no pickle."""
    group = group_of(policy_mapping_fn=even_odd, policies_to_train=only_even)
    group.learn_on_batch(MultiAgentBatch({"even": rows_of(2.0)}, 3))
    group.set_weights({"odd": {"w": np.array([5.0])}})
    save_state(tmp_path, group.get_state())
    other = group_of("even")
    other.set_state(load_state(tmp_path))
    assert [weight(other, name) for name in ("even", "odd")] == [2.0, 5.0]
    assert other.policy_mapping_fn is even_odd
    assert other.get_policies_to_train() == {"even"}
    assert other.num_grad_updates["even"] == 1
    assert other.get("even").weights_seq_no == 1


def test_lists_of_policies_to_train_and_all_travel_too() -> None:
    for chosen, expected in ((["odd"], {"odd"}), (None, {"even", "odd"})):
        state = group_of(policies_to_train=chosen).get_state()
        other = group_of(policies_to_train=["even"])
        other.set_state(state)
        assert other.get_policies_to_train() == expected


def test_a_state_of_the_policies_that_learn_leaves_the_others_as_they_are() -> None:
    """Row "trainable-only checkpoints"."""
    group = group_of(policies_to_train=["even"])
    group.set_weights({name: {"w": np.array([3.0])} for name in ("even", "odd")})
    state = group.get_state(trainable_only=True)
    assert list(state["policies"]) == ["even"]
    other = group_of()
    other.set_state(state)
    assert (weight(other, "even"), weight(other, "odd")) == (3.0, 0.0)


def unnamed_class() -> Any:
    """A class that no other process can import."""

    class Unnamed(LinearPolicy):
        pass

    return Unnamed


Unnamed = unnamed_class()


def test_what_has_no_name_is_left_out_of_a_state_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    group = group_of("even", policy_mapping_fn=unnamed())
    group.add("object", Unnamed(), spaces=SPACES)
    group.add("inner", PolicySpec(lambda: LinearPolicy(), *SPACES))
    with caplog.at_level(logging.WARNING, "rlio"):
        state = group.get_state()
    assert "policy_mapping_fn is not in the state" in caplog.text
    assert "the spec of the policy 'inner'" in caplog.text
    other = group_of("even", policy_mapping_fn=even_odd)
    with pytest.raises(StateError, match="has no spec"):
        other.set_state(state)
    other.add("object", Unnamed(), spaces=SPACES)
    other.add("inner", SPEC)
    other.set_state(state)
    assert other.policy_mapping_fn is even_odd


@pytest.mark.parametrize(
    "state",
    [{"policies": 3}, {"policies": {"even": 3}}, {"policies": {"even": {"state": 3}}}, {"global_vars": {}}],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(StateError):
        group_of().set_state(state)
