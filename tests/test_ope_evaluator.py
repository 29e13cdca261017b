"""Evaluating rows as they come: cut into batches, of several agents, incomplete, or with wrong columns."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from further import further
from gymnasium.spaces import Box, Discrete
from tabular_problems import PROBLEMS
from typer.testing import CliRunner

import rlio
from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.errors import MissingColumn, OptionError, SchemaError
from rlio.evaluation import (
    Estimation,
    FittedQ,
    IntervalOptions,
    OffPolicyEvaluator,
    Target,
    evaluate_offline,
    feature_importance,
    fitted_q,
)
from rlio.policies.torch_policy import TorchPolicy

CHAIN = PROBLEMS["chain"]
FIT = FittedQ(hidden=(), iterations=400, learning_rate=0.05, tau=0.1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small networks are slower with threads, and much slower where other processes are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def value_of(batches: Any, name: str = "wpdis", **options: Any) -> float:
    found = evaluate_offline(batches, CHAIN.target, gamma=CHAIN.gamma, estimators=[name], **options)
    return found[name].v_target.value


def likelihoods(probability: float) -> Any:
    return lambda obs, actions: np.log(np.where(actions == 1, probability, 1 - probability))


def logged(**columns: Any) -> SampleBatch:
    """Ten episodes of one step."""
    return SampleBatch(
        {
            "obs": np.zeros(10),
            "actions": np.arange(10) % 2,
            "rewards": np.arange(10.0),
            "action_prob": np.full(10, 0.5),
            "terminateds": np.ones(10, bool),
            "eps_id": np.arange(10),
            "t": np.zeros(10, np.int64),
        }
        | columns
    )


def without(name: str) -> SampleBatch:
    batch = logged()
    return SampleBatch({key: column for key, column in batch.items() if key != name})


# ---- how rows come ----


def test_rows_in_any_cut_and_order_give_the_same_estimate() -> None:
    """Of fragments in order, of environments side by side, and of rows in no order at all."""
    batch = CHAIN.simulate(200, seed=0)
    whole = evaluate_offline(batch, CHAIN.target, gamma=CHAIN.gamma)
    assert list(whole) == ["is", "pdis", "wis", "wpdis"]
    side_by_side = batch[np.lexsort((batch["eps_id"], batch["t"]))]
    for rows in (batch.timeslices(7), side_by_side.timeslices(50), [batch.shuffle(seed=1)]):
        found = evaluate_offline(rows, CHAIN.target, gamma=CHAIN.gamma)
        for name, estimate in whole.items():
            assert found[name].v_target.value == pytest.approx(estimate.v_target.value), name


@pytest.mark.further
def test_a_data_set_of_many_shards_and_a_reader_give_the_same_as_the_batch(tmp_path: Path) -> None:
    batch = CHAIN.simulate(300, seed=0)
    with rlio.ParquetWriter(tmp_path, roll=rlio.Roll(max_rows=64)) as writer:
        for part in batch.timeslices(37):
            writer.write(part)
    assert len(rlio.open_dataset(tmp_path).files()) > 5
    expected = value_of(batch)
    assert value_of(tmp_path) == pytest.approx(expected)
    assert value_of(rlio.open_dataset(tmp_path)) == pytest.approx(expected)
    with rlio.DatasetReader(tmp_path, epochs=1, batch_size=10) as reader:
        assert value_of(reader) == pytest.approx(expected)
    with rlio.DatasetReader(tmp_path) as endless, pytest.raises(OptionError, match="never ends"):
        value_of(endless)


def test_readers_of_other_files_that_never_end_are_refused(tmp_path: Path) -> None:
    batch = CHAIN.simulate(30, seed=0)
    record = {name: np.asarray(batch[name]).tolist() for name in batch}
    (tmp_path / "rows.json").write_text(json.dumps({"type": "SampleBatch", **record}) + "\n")
    pq.write_table(pa.table(dict(batch)), tmp_path / "rows.parquet")
    for kind, source in ((rlio.JsonReader, "rows.json"), (rlio.ForeignParquetReader, "rows.parquet")):
        with kind(tmp_path / source, epochs=1) as reader:
            assert value_of(reader) == pytest.approx(value_of(batch))
        with kind(tmp_path / source) as endless, pytest.raises(OptionError, match="never ends"):
            value_of(endless)


def test_rows_that_do_not_number_their_steps_are_numbered_in_the_order_in_which_they_come(
    tmp_path: Path,
) -> None:
    """RLlib's recordings have ``eps_id`` and no ``t``: they were refused."""
    batch = CHAIN.simulate(100, seed=0)
    agents = batch.copy()
    agents["agent_index"] = agents["eps_id"] % 2
    agents["eps_id"] = agents["eps_id"] // 2
    side_by_side = agents[np.lexsort((agents["agent_index"], agents["eps_id"] % 7, agents["t"]))]
    for rows in (batch, agents, side_by_side):
        unnumbered = SampleBatch({name: column for name, column in rows.items() if name != "t"})
        for parts in (unnumbered, unnumbered.timeslices(7), [unnumbered, unnumbered]):
            found = evaluate_offline(parts, CHAIN.target, gamma=CHAIN.gamma)
            assert found["wpdis"].v_target.value == pytest.approx(value_of(batch))
            assert found["wpdis"].steps in (len(batch), 2 * len(batch))
    unnumbered = SampleBatch({name: column for name, column in batch.items() if name != "t"})
    with rlio.ParquetWriter(tmp_path, roll=rlio.Roll(max_rows=64)) as writer:
        writer.write(unnumbered)
    assert value_of(tmp_path) == pytest.approx(value_of(batch))
    with rlio.DatasetReader(tmp_path, epochs=1, batch_size=10) as reader:
        assert value_of(reader) == pytest.approx(value_of(batch))
    options: dict[str, Any]
    for options in (
        {"shuffle": True, "seed": 0},
        {"shard": (0, 2)},
        {"on_error": "skip"},
        {"filter": "rewards > 0"},
    ):
        with rlio.DatasetReader(tmp_path, epochs=1, **options) as reader:
            with pytest.raises(MissingColumn) as raised:
                value_of(reader)
            assert raised.value.column == "t"
    with (
        rlio.ShuffledInput(rlio.DatasetReader(tmp_path, epochs=1), 5, seed=0) as shuffled,
        pytest.raises(MissingColumn),
    ):
        value_of(shuffled)
    evaluator = OffPolicyEvaluator(CHAIN.target, Estimation(gamma=0.9))
    evaluator.add(batch[:5])
    with pytest.raises(SchemaError):
        evaluator.add(unnumbered[5:9])


def test_estimators_of_episodes_keep_rows_of_running_episodes_only() -> None:
    evaluator = OffPolicyEvaluator(CHAIN.target, Estimation(gamma=0.9, estimators=["is", "wis"]))
    for part in CHAIN.simulate(2000, seed=0).timeslices(100):
        evaluator.add(part)
        assert evaluator.evidence.incomplete <= 1
        assert evaluator.evidence.joined()[1] is None


def test_counting_episodes_does_not_visit_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`keep_last` is called for every batch."""
    evaluator = OffPolicyEvaluator(CHAIN.target, Estimation(gamma=0.9, estimators=["is"]))
    for i in range(10):
        evaluator.add(logged(obs=np.zeros(10, int), eps_id=np.arange(10) + 10 * i))
    evidence = evaluator.evidence
    with monkeypatch.context() as hidden:
        hidden.setattr(evidence, "_judged", None)
        evidence.keep_last(100)
        assert evidence.episodes == 100
    evidence.keep_last(50)
    taken = evidence.taken()
    assert (taken.episodes, evidence.episodes) == (20, 0)
    evidence.absorb(taken)
    assert evidence.episodes == len(evidence.joined()[0].lengths) == 20


def test_agents_of_one_episode_are_episodes_each() -> None:
    batch = CHAIN.simulate(100, seed=0)
    both = batch.copy()
    both["agent_index"] = both["eps_id"] % 2
    both["eps_id"] = both["eps_id"] // 2
    assert value_of(both[np.lexsort((both["t"], both["eps_id"]))].timeslices(9)) == pytest.approx(
        value_of(batch)
    )
    joint = MultiAgentBatch({"a": batch, "b": batch[:3]}, len(batch))
    assert value_of(joint, policy_id="a") == pytest.approx(value_of(batch))
    with pytest.raises(OptionError, match="policy_id"):
        value_of(joint)


def test_one_step_episodes_are_the_same_with_and_without_bandit() -> None:
    """Row test_ope_math of 6.2: single-step mode equals episode mode."""
    steps = {"gamma": 1.0, "estimators": ["is", "wis", "wpdis"]}
    whole = evaluate_offline(logged(), likelihoods(0.8), **steps)
    bare = SampleBatch({name: logged()[name] for name in ("obs", "actions", "rewards", "action_prob")})
    rows = evaluate_offline(bare, likelihoods(0.8), bandit=True, **steps)
    for name in steps["estimators"]:  # type: ignore[attr-defined] # a list
        assert rows[name].v_target == whole[name].v_target
        assert rows[name].overlap == whole[name].overlap


@pytest.mark.further
def test_importance_sampling_over_a_million_transitions_counts_each() -> None:
    rows, length = 1_000_000, 20
    rng = np.random.default_rng(0)
    batch = SampleBatch(
        obs=np.zeros(rows, np.float32),
        actions=rng.integers(0, 2, rows),
        rewards=rng.normal(size=rows),
        action_prob=np.full(rows, 0.5),
        terminateds=np.arange(rows) % length == length - 1,
        eps_id=np.arange(rows) // length,
        t=np.arange(rows) % length,
    )
    parts = list(batch.timeslices(4096))
    found = evaluate_offline(parts, likelihoods(0.51), gamma=0.99, estimators=["is"])["is"]
    assert found.steps == rows
    assert found.episodes == rows // length


# ---- what is refused ----


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (without("action_prob"), MissingColumn, "how likely"),
        (without("eps_id"), MissingColumn, "which episode"),
        (without("terminateds"), MissingColumn, "where episodes end"),
        (without("rewards"), MissingColumn, "no rewards"),
        (logged(action_prob=np.full(10, 1.7)), SchemaError, "densities"),
        (logged(action_logp=np.full(10, 0.3)), SchemaError, "densities"),
        (logged(action_prob=np.arange(10) / 10), SchemaError, "row 0 of the batch .* is zero"),
        (logged(action_prob=np.full(10, -0.7)), SchemaError, "action_logp"),
        (logged(action_prob=np.full(10, np.nan)), SchemaError, "is NaN"),
        (logged(rewards=np.full(10, np.nan)), SchemaError, "is nan"),
        (logged(terminateds=np.arange(10) < 9), SchemaError, "episode 9 has the steps 0 to 0, and no end"),
        (logged(t=np.array([*[0] * 9, 3])), SchemaError, "its end is step 3"),
        (logged(eps_id=np.zeros(10), terminateds=np.zeros(10, bool)), SchemaError, "came twice"),
    ],
)
def test_rows_that_say_nothing_of_another_policy_are_refused(
    batch: SampleBatch, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        evaluate_offline(batch, likelihoods(0.8), gamma=1.0)


HALF = {"action_logp": np.log(np.full(10, 0.5))}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        # What RLlib has recorded (ray-project/ray#37447): every logp is 0, that is probability 1.
        ({"action_logp": np.zeros(10)}, r"in 10 of 10 rows.*row 0 of the batch \(eps_id 0, t 0\)"),
        ({"action_logp": np.zeros(10)}, r"action_logp is 0, but the log of action_prob 0\.5 is -0\.69"),
        ({"action_logp": np.where(np.arange(10) == 7, -0.7, np.log(0.5))}, "in 1 of 10 rows.*row 7"),
        ({"action_logp": np.log(0.5) + np.float32([0, 0, 3e-3, 0, 0, 0, 0, 0, 0, 0])}, "row 2"),
        ({"action_logp": np.where(np.arange(10) == 3, -50.0, np.log(0.5))}, "row 3"),
        ({"action_logp": np.full(10, -1.0), "action_prob": np.zeros(10, np.float32)}, "contradict"),
        ({"action_logp": np.full(10, -20.0), "action_prob": np.zeros(10, np.float32)}, "contradict"),
        # The second column is checked as well.
        (HALF | {"action_prob": np.full(10, np.nan)}, "row 0.* is NaN"),
        (HALF | {"action_prob": np.full(10, 1.5)}, "densities"),
        (HALF | {"action_prob": np.full(10, -0.5)}, "not a probability"),
        (HALF | {"action_prob": np.full((10, 2), 0.5)}, "one number per row"),
        (HALF | {"action_prob": np.array(["0.5"] * 10)}, "numbers"),
        ({"action_prob": np.full(10, 0.5, complex)}, "numbers"),
        ({"action_prob": {"a": np.full(10, 0.5)}}, "nested"),
    ],
)
def test_evaluation_refuses_logs_that_contradict_the_probabilities(
    columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        evaluate_offline(logged(**columns), likelihoods(0.8), gamma=1.0)


@pytest.mark.parametrize(
    ("logp", "prob"),
    [
        (np.log(np.float32(0.3)), np.float32(0.3)),
        (np.float32(-80.3), np.exp(np.float32(-80.3))),
        (-100.0, np.exp(np.float32(-100.0))),  # a subnormal number has few digits
        (-120.0, np.float32(0.0)),  # underflow
        (np.float32(-90.0), np.float32(0.0)),  # where subnormal numbers are flushed to 0, as on a GPU
        (np.float16(-8.5), np.float16(np.exp(-8.5))),
        (np.float16(-11.0), np.float16(0)),
        (-800.0, 0.0),
    ],
)
def test_evaluation_takes_logs_and_probabilities_that_differ_by_rounding(logp: Any, prob: Any) -> None:
    """The log counts: a probability may have been rounded to 0, and its log not."""
    columns = {"action_logp": np.full(10, logp), "action_prob": np.full(10, prob)}
    found = evaluate_offline(logged(**columns), likelihoods(0.5), gamma=1.0, estimators=["wis"], bandit=True)
    assert found["wis"].v_target.value == pytest.approx(4.5)


def test_densities_beside_their_logs_may_overflow_and_be_above_1() -> None:
    target = Target(lambda obs, actions: np.zeros(10), action_space=Box(0, 1e-40, (1,), np.float64))
    for logp, prob in ((np.float32(0.5), np.exp(np.float32(0.5))), (np.float32(92.0), np.float32(np.inf))):
        rows = logged(actions=np.zeros(10), action_logp=np.full(10, logp), action_prob=np.full(10, prob))
        evaluate_offline(rows, target, gamma=1.0, bandit=True)
    for logp, prob in ((0.5, 0.5), (80.0, np.float32(np.inf))):
        rows = logged(actions=np.zeros(10), action_logp=np.full(10, logp), action_prob=np.full(10, prob))
        with pytest.raises(SchemaError, match="contradict"):
            evaluate_offline(rows, target, gamma=1.0, bandit=True)


def test_probabilities_of_nested_discrete_actions_are_at_most_1() -> None:
    rows = logged(actions=(np.arange(10) % 2, np.zeros(10, np.int64)), action_prob=np.full(10, 1.5))
    with pytest.raises(SchemaError, match="densities"):
        evaluate_offline(rows, lambda obs, actions: np.zeros(10), gamma=1.0)


def test_a_step_that_came_twice_does_not_stand_for_one_that_is_missing() -> None:
    """Steps 0 1, 1 2 and 4, the end: five rows of an episode of five steps, and not that episode."""
    evaluator = OffPolicyEvaluator(likelihoods(0.5), Estimation(gamma=1.0))
    rows = logged(eps_id=np.zeros(10, np.int64), t=np.array([0, 1, 1, 2, 4, 5, 6, 7, 8, 9]))
    rows["terminateds"] = rows["t"] == 4
    evaluator.add(rows[:2])
    evaluator.add(rows[2:4])
    with pytest.raises(SchemaError, match="step 1 of episode 0 came twice"):
        evaluator.add(rows[4:5])


def test_policies_that_are_no_policies_are_refused() -> None:
    for function, message in (
        (lambda obs, actions: np.full(len(actions), 0.5), "not probabilities"),
        (lambda obs, actions: np.full(len(actions), np.nan), "gave nan"),
        (lambda obs, actions: np.zeros((len(actions), 1)), "shape"),
    ):
        with pytest.raises(OptionError, match=message):
            evaluate_offline(logged(), function, gamma=1.0)
    with pytest.raises(OptionError, match="no spaces yet"):
        Target(TorchPolicy())
    with pytest.raises(OptionError, match=r"TorchPolicy is a class: .*bind"):
        Target(TorchPolicy)  # type: ignore[arg-type] # it can be called, as a function can
    with pytest.raises(OptionError, match="Discrete"):
        Target(likelihoods(0.5), epsilon_greedy=0.1)
    two_actions = Target(likelihoods(0.5), action_space=Discrete(2))
    with pytest.raises(SchemaError, match="same action space"):
        evaluate_offline(logged(actions=np.arange(10)), two_actions, gamma=1.0)
    with pytest.raises(OptionError, match="estimators"):
        Estimation(gamma=1.0, estimators=["magic"])


def test_incomplete_episodes_can_be_left_out_and_are_counted() -> None:
    batch = logged(terminateds=np.arange(10) < 8)
    found = evaluate_offline(batch, likelihoods(0.5), gamma=1.0, estimators=["is"], incomplete="drop")["is"]
    assert (found.episodes, found.left_out, found.v_behavior.value) == (8, 2, 3.5)


# ---- what is found ----


def test_a_better_policy_gains_and_a_worse_one_loses_also_where_returns_are_negative() -> None:
    """Rows test_ope_math and test_ope of 6.2; v_gain is a difference, a ratio only of returns above 0."""
    for offset in (0.0, -20.0):
        batch = logged(rewards=np.arange(10) % 2 + offset)
        for probability, sign in ((0.9, 1), (0.5, 0), (0.1, -1)):
            found = evaluate_offline(batch, likelihoods(probability), gamma=1.0)
            for name in ("wis", "wpdis"):
                assert found[name].v_gain.value == pytest.approx(sign * 0.4, abs=1e-9)
                ratio = found[name].v_gain_ratio
                assert (ratio is None) == (offset < 0)
                assert ratio is None or np.sign(round(ratio - 1, 9)) == sign


def test_epsilon_greedy_targets_are_mixed_with_random_actions() -> None:
    batch = logged(rewards=np.arange(10) % 2)
    target = Target(likelihoods(1.0 - 1e-12), epsilon_greedy=0.4, action_space=Discrete(2))
    found = evaluate_offline(batch, target, gamma=1.0, estimators=["is"])["is"]
    assert found.v_target.value == pytest.approx(0.8)


def test_a_result_says_all_of_it_in_words_and_in_json() -> None:
    options = IntervalOptions(value_bounds=(0.0, 20.0))
    found = evaluate_offline(logged(), likelihoods(0.8), gamma=1.0, estimators=["is"], intervals=options)[
        "is"
    ]
    text = str(found)
    for part in (
        "is: 10 episodes, 10 steps",
        "v_behavior  4.5",
        "v_gain",
        "effective sample size",
        "for sure in",
        "not reliable",
    ):
        assert part in text
    assert json.loads(json.dumps(found.to_json()))["overlap"]["log_weight_quantiles"]["0.5"] < 1
    with pytest.raises(OptionError, match="found weighted returns"):
        evaluate_offline(
            logged(),
            likelihoods(0.8),
            gamma=1.0,
            estimators=["is"],
            intervals=IntervalOptions(value_bounds=(0.0, 2.0)),
        )


# ---- models ----


class Remembers:
    """A model that gives 1 for what it was fitted to, and 0 for all else."""

    def fit(self, transitions: Any, target: Target, *, gamma: float) -> Any:
        model = Remembers()
        model.seen = set(transitions.obs.tolist())
        return model

    def state_values(self, obs: Any) -> Any:
        return np.array([float(number in self.seen) for number in obs.tolist()])

    def action_values(self, obs: Any, actions: Any) -> Any:
        return self.state_values(obs)

    seen: set[float]


@pytest.mark.parametrize(("folds", "value"), [(1, 1.0), (2, 0.0), (5, 0.0)])
def test_an_episode_is_judged_by_models_that_were_fitted_to_others(folds: int, value: float) -> None:
    batch = logged(obs=np.arange(10.0))
    evaluator = OffPolicyEvaluator(
        likelihoods(0.5), Estimation(gamma=1.0, estimators=["dm"], q_model=Remembers(), folds=folds)
    )
    evaluator.add(batch)
    batch["obs"][:] = 99.0
    assert evaluator.estimate()["dm"].v_target.value == value
    with pytest.raises(OptionError, match="folds=11"):
        evaluate_offline(batch, likelihoods(0.5), gamma=1.0, estimators=["dm"], folds=11)


@pytest.mark.further
def test_actions_that_alternate_are_in_all_folds_and_epsilon_greedy_targets_are_those_of_models_too() -> None:
    """Two arms in turns; the second, which alone earns, is taken but for 2 in 5 random actions."""
    actions = 5 + np.arange(2000) % 2
    batch = SampleBatch(
        obs=np.zeros(2000, np.int64),
        actions=actions,
        rewards=actions - 5.0,
        action_prob=np.full(2000, 0.5),
    )

    def second(obs: Any, actions: Any) -> Any:
        return np.where(actions == 6, 0.0, -np.inf)

    target = Target(
        second, epsilon_greedy=0.4, observation_space=Discrete(1), action_space=Discrete(2, start=5)
    )
    names = rlio.evaluation.ESTIMATORS
    found = evaluate_offline(batch, target, gamma=1.0, bandit=True, estimators=names, q_model=FIT)
    assert set(found) == set(names)
    for name, estimate in found.items():
        assert estimate.v_target.value == pytest.approx(0.8, abs=0.01), name


def test_a_policy_is_judged_with_its_own_probabilities_and_those_of_random_actions() -> None:
    policy = TorchPolicy(hidden=(8,))
    policy.bind(Box(-1.0, 1.0, (3,)), Discrete(3), seed=0)
    obs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    own = Target(policy).action_probabilities(obs)
    mixed = Target(policy, epsilon_greedy=0.3).action_probabilities(obs)
    np.testing.assert_allclose(mixed, 0.7 * own + 0.1, atol=1e-6)
    greedy = Target(policy, explore=False, epsilon_greedy=0.3).action_probabilities(obs)
    assert (greedy.argmax(-1) == own.argmax(-1)).all()
    np.testing.assert_allclose(np.sort(greedy), np.tile([0.1, 0.1, 0.8], (50, 1)), atol=1e-6)


@pytest.mark.further
def test_the_direct_method_needs_no_probabilities_and_finds_new_obs_itself() -> None:
    batch = CHAIN.simulate(200, seed=0)
    kept = SampleBatch(
        {name: column for name, column in batch.items() if name not in ("action_prob", "new_obs")}
    )
    assert value_of(kept, "dm", q_model=FIT) == pytest.approx(value_of(batch, "dm", q_model=FIT), abs=0.02)


@pytest.mark.further
def test_a_truncated_episode_goes_on_in_a_model() -> None:
    """Reward 1 a step for ever, cut after five steps: worth 1 / (1 - 0.8), and not what was seen of it."""
    rows = 500
    batch = SampleBatch(
        obs=np.zeros(rows, np.int64),
        new_obs=np.zeros(rows, np.int64),
        actions=np.arange(rows) % 2,
        rewards=np.ones(rows),
        action_prob=np.full(rows, 0.5),
        terminateds=np.zeros(rows, bool),
        truncateds=np.arange(rows) % 5 == 4,
        eps_id=np.arange(rows) // 5,
        t=np.arange(rows) % 5,
    )
    target = Target(likelihoods(0.5), observation_space=Discrete(1), action_space=Discrete(2))
    fit = FittedQ(hidden=(), iterations=600, learning_rate=0.05, tau=0.2)
    found = evaluate_offline(batch, target, gamma=0.8, estimators=["dm", "dr", "wdr", "pdis"], q_model=fit)
    for name in ("dm", "dr", "wdr"):
        assert found[name].v_target.value == pytest.approx(5.0, abs=0.1)
    assert found["pdis"].v_target.value == pytest.approx(sum(0.8**t for t in range(5)))


@pytest.mark.further
def test_continuous_actions_have_densities_and_are_drawn_for_a_model() -> None:
    """Reward -(a - 1)^2, a with deviation 0.5 around 0, judged around 0.5: worth -(0.5^2 + 0.5^2)."""
    rng = np.random.default_rng(0)
    actions = rng.normal(0.0, 0.5, (4000, 1)).astype(np.float32)

    def density(mean: float, values: Any) -> Any:
        return -0.5 * ((values[:, 0] - mean) / 0.5) ** 2 - np.log(0.5 * np.sqrt(2 * np.pi))

    batch = SampleBatch(
        obs=np.zeros((4000, 1), np.float32),
        actions=actions,
        rewards=-((actions[:, 0] - 1.0) ** 2),
        action_prob=np.exp(density(0.0, actions)),
    )
    target = Target(
        lambda obs, a: density(0.5, a),
        observation_space=Box(-1.0, 1.0, (1,)),
        action_space=Box(-np.inf, np.inf, (1,)),
        draw=lambda obs, rng: rng.normal(0.5, 0.5, (len(obs), 1)).astype(np.float32),
    )
    fit = FittedQ(hidden=(32,), iterations=500, learning_rate=0.02, action_samples=16)
    found = evaluate_offline(
        batch, target, gamma=1.0, estimators=["is", "wis", "dm", "dr"], bandit=True, q_model=fit
    )
    for estimate in found.values():
        assert estimate.v_target.value == pytest.approx(-0.5, abs=0.1), estimate


# ---- upstream ----


@pytest.mark.further
@pytest.mark.parametrize("better", [True, *further(False)])
def test_every_estimator_knows_a_better_policy_from_a_worse_one(better: bool) -> None:
    """Rows test_ope_math and test_ope of 6.2: v_gain says so, for IS, WIS, DM and DR; and its interval."""
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 2, 600)
    batch = SampleBatch(
        obs=np.zeros(600, np.int64),
        actions=actions,
        rewards=1.0 + actions + 0.1 * rng.normal(size=600),
        action_prob=np.full(600, 0.5),
    )
    target = Target(
        likelihoods(0.9 if better else 0.1), observation_space=Discrete(1), action_space=Discrete(2)
    )
    found = evaluate_offline(
        batch, target, gamma=1.0, bandit=True, q_model=FIT, folds=1, estimators=rlio.evaluation.ESTIMATORS
    )
    assert len(found) == 8
    for estimate in found.values():
        low, high = estimate.v_gain.interval
        assert (low > 0) if better else (high < 0), estimate
        assert estimate.v_gain_ratio is not None
        assert (estimate.v_gain_ratio > 1) == better
        assert estimate.v_target.value == pytest.approx(1.9 if better else 1.1, abs=0.15)


def test_a_recording_of_rllib_gives_what_its_formulas_say(recordings: Path) -> None:
    """Rows IS and WIS of 2.7, per decision both: three episodes of CartPole, step by step in a loop."""
    gamma, judged = 0.99, likelihoods(0.6)
    path = recordings / "cartpole" / "small.json"
    episodes = []
    for batch in rlio.JsonReader(path, epochs=1):
        for rows in batch.split_by_episode():
            ratios = np.exp(judged(None, rows["actions"])) / rows["action_prob"]
            episodes.append((np.cumprod(ratios), rows["rewards"] * gamma ** np.arange(len(rows))))
    by_step = np.mean([(weights * rewards).sum() for weights, rewards in episodes])
    weighted = 0.0
    for t in range(max(len(rewards) for _, rewards in episodes)):
        # Here, episodes that are over keep their weight; RLlib's mean is of those that last.
        weights = [w[min(t, len(w) - 1)] for w, _ in episodes]
        weighted += sum(w[t] * r[t] for w, r in episodes if t < len(r)) / sum(weights)
    found = evaluate_offline(path, judged, gamma=gamma, incomplete="drop")
    assert found["pdis"].v_target.value == pytest.approx(by_step)
    assert found["wpdis"].v_target.value == pytest.approx(weighted)
    assert found["is"].episodes == len(episodes) == 3


# ---- policies and commands ----


def run_command(*arguments: str) -> Any:
    from rlio.cli.main import app

    return CliRunner().invoke(app, ["evaluate", *arguments])


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchPolicy:
    """600 steps of CartPole in ./data, by a network whose state is in ./checkpoint; modules of policies."""
    policy = TorchPolicy(hidden=(8,))
    with rlio.RolloutWorker("CartPole-v1", policy, output=str(tmp_path / "data"), seed=3) as worker:
        for _ in range(3):
            worker.sample()
    policy.save(tmp_path / "checkpoint")
    (tmp_path / "ope_judged.py").write_text(
        "import numpy as np\nfrom rlio import RandomPolicy, TorchPolicy\nfrom rlio.policies import DQN\n"
        "def leans(obs, actions):\n    return np.log(np.where(actions == 1, 0.6, 0.4))\n"
        "def network():\n    return TorchPolicy(hidden=(8,))\n"
        "class Same(TorchPolicy):\n    def __init__(self):\n        super().__init__(hidden=(8,))\n"
    )
    monkeypatch.chdir(tmp_path)
    return policy


COMMAND = ["data", "--gamma", "1", "--drop-incomplete", "--policy"]


def test_a_command_judges_the_checkpoint_of_a_policy(recorded: TorchPolicy) -> None:
    """What recorded the data is worth what it earned; the same network with other weights is not."""
    same = run_command(*COMMAND, "ope_judged:Same", "--checkpoint", "checkpoint", "--json")
    assert same.exit_code == 0, same.output
    found = json.loads(same.output)
    assert list(found) == ["is", "pdis", "wis", "wpdis"]
    for estimate in found.values():
        assert estimate["v_gain"]["value"] == pytest.approx(0.0, abs=1e-3)
        assert estimate["overlap"]["effective_sample_size"] == pytest.approx(estimate["episodes"], rel=1e-3)
    other = run_command(*COMMAND, "ope_judged:Same", "--seed", "9", "--json")
    assert (
        json.loads(other.output)["wis"]["overlap"]["effective_sample_size"] < found["wis"]["episodes"] - 0.1
    )
    greedy = run_command(
        *COMMAND, "ope_judged:Same", "--checkpoint", "checkpoint", "--epsilon-greedy", "1", "--json"
    )
    random = run_command(*COMMAND, "ope_judged:RandomPolicy", "--json")
    assert json.loads(greedy.output)["is"]["v_target"]["value"] == pytest.approx(
        json.loads(random.output)["is"]["v_target"]["value"], rel=1e-4
    )


@pytest.mark.parametrize(
    "names", [["is", "pdis", "wis", "wpdis", "dm"], *further(list(rlio.evaluation.ESTIMATORS))], ids=len
)
def test_a_command_prints_a_table_of_all_estimators_and_draws_the_intervals(
    recorded: TorchPolicy, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of `evaluate_offline`; models are fitted where they are asked for."""
    # A model that is worse than the command's, after a tenth of the time: its numbers are not looked at.
    monkeypatch.setattr(fitted_q, "FittedQ", partial(fitted_q.FittedQ, iterations=50))
    every = [part for name in names for part in ("--estimator", name)]
    table = run_command(*COMMAND, "ope_judged:leans", *every, "--plot", "intervals.png")
    assert table.exit_code == 0, table.output
    module: Any = __import__("ope_judged")
    found = evaluate_offline("data", module.leans, gamma=1.0, incomplete="drop")
    for name in names:
        assert f" {name} " in table.output
    for name in ("is", "pdis", "wis", "wpdis"):
        target, gain = found[name].v_target, found[name].v_gain
        assert f"{target.value:.6g}" in table.output
        assert f"{target.interval[0]:.6g} to {target.interval[1]:.6g}" in table.output
        assert f"{gain.interval[0]:.6g} to {gain.interval[1]:.6g}" in table.output
    assert "effective sample size" in table.output
    picture = Path("intervals.png").read_bytes()
    assert picture[:4] == b"\x89PNG"
    assert len(picture) > 10_000


@pytest.mark.further
def test_the_picture_has_the_interval_and_the_bound_of_each_estimate(
    recorded: TorchPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[Any, Any]] = []
    plot = Axes.plot

    def seen(self: Any, x: Any, y: Any, *args: Any, **options: Any) -> Any:
        drawn.append((list(x), tuple(y)))
        return plot(self, x, y, *args, **options)

    monkeypatch.setattr(Axes, "plot", seen)
    bounds = ("--confidence", "0.8", "--value-bounds", "-900", "900")
    done = run_command(*COMMAND, "ope_judged:leans", *bounds, "--plot", "intervals.svg")
    assert done.exit_code == 0, done.output
    module: Any = __import__("ope_judged")
    intervals = IntervalOptions(confidence=0.8, value_bounds=(-900.0, 900.0))
    found = evaluate_offline("data", module.leans, gamma=1.0, incomplete="drop", intervals=intervals)
    for place, (name, estimate) in enumerate(found.items()):
        assert ([place, place], estimate.v_target.interval) in drawn
        assert ([place], (estimate.v_target.value,)) in drawn
        bound = estimate.v_target.concentration
        assert (bound is not None) == (name in ("is", "pdis"))
        assert bound is None or ([place, place], bound) in drawn
    assert "80% interval" in done.output
    assert "for sure" in done.output


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("picture.foo", "expected one of the endings"),
        ("nowhere/picture.png", "there is no folder"),
        (".", "it is a folder"),
        ("picture.png", "matplotlib is not installed: run  pip install 'rlio[plot]'"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_judged(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said after the estimates, which may take long, and instead of them."""
    if "installed" in message:
        for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)  # There is no data set, and no policy: nothing was opened.
    done = run_command("data", "--gamma", "1", "--policy", "nothing:there", "--plot", path)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.further
def test_a_command_takes_rows_as_episodes_and_policies_without_exploration(recorded: TorchPolicy) -> None:
    bandit = run_command("data", "--gamma", "1", "--bandit", "--policy", "ope_judged:leans", "--json")
    assert json.loads(bandit.output)["is"]["episodes"] == 600
    assert json.loads(bandit.output)["wis"]["v_behavior"]["value"] == 1.0
    greedy = run_command(*COMMAND, "ope_judged:Same", "--checkpoint", "checkpoint", "--no-explore")
    assert "all weights are 0" in greedy.stderr
    cut = run_command("data", "--gamma", "1", "--policy", "ope_judged:leans")
    assert cut.exit_code == 1
    assert cut.stderr.startswith("rlio: SchemaError: 1 episode is incomplete")
    missing = run_command(*COMMAND, "ope_judged:leans", "--policy-id", "nobody")
    assert "policy_id='nobody'" in missing.stderr


@pytest.mark.further
def test_the_code_of_the_page_runs(
    recorded: TorchPolicy, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (checkout / "docs" / "evaluation.md").read_text(encoding="utf-8")
    monkeypatch.setattr("rlio.evaluation.estimation.FittedQ", partial(FittedQ, iterations=20))
    with rlio.RolloutWorker(
        "CartPole-v1",
        recorded,
        output="runs/cartpole",
        rollout=rlio.RolloutConfig(rollout_fragment_length=150),  # as README records: the last one is cut
    ) as worker:
        worker.sample()
    scope: dict[str, Any] = {"policy": recorded, "rlio": rlio}
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "evaluation.md", "exec"), scope)
    assert rlio.evaluation.evaluate_offline("runs/cartpole", scope["leans"], gamma=0.99, incomplete="drop")
    scope["worker"].sample()
    assert scope["worker"].get_metrics().summarise()["episode_return_mean"] > 0  # of "simulation"
    scope["worker"].close()


def test_a_command_says_what_is_wrong_with_a_policy(recorded: TorchPolicy) -> None:
    for name, message in (
        ("ope_judged:missing", "--policy: there is no ope_judged:missing"),
        ("nowhere:at_all", "--policy: there is no nowhere:at_all"),
        ("no name", "--policy: 'no name' is not the name of an object: expected 'module:name', such as"),
        ("ope_judged:np", "expected a Policy or a function"),
    ):
        failed = run_command(*COMMAND, name)
        assert failed.exit_code == 2
        assert failed.stderr.startswith("rlio: OptionError: ")
        assert message in failed.stderr
    failed = run_command(*COMMAND, "ope_judged:leans", "--checkpoint", "checkpoint")
    assert "--checkpoint needs a policy" in failed.stderr


def test_importance_is_of_the_features_that_actions_depend_on() -> None:
    """Row FeatureImportance of 2.7."""
    policy = TorchPolicy(hidden=())
    policy.bind(Box(-1.0, 1.0, (3,)), Discrete(2), seed=0)
    with torch.no_grad():
        next(policy.module.parameters()).copy_(torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, 0.1]]))
    batch = SampleBatch(obs=np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32))
    before = batch["obs"].copy()
    found = feature_importance(policy, batch, repeat=3, seed=0)
    assert found[0] == 0.0
    assert found[1] > 0.4 > found[2] > 0.0
    zeros = feature_importance(policy, batch, perturb=lambda values, rng: values, limit_fraction=0.5, seed=0)
    assert zeros.tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_array_equal(batch["obs"], before)
    with pytest.raises(MissingColumn):
        feature_importance(policy, SampleBatch(rewards=[1.0]))
    with pytest.raises(OptionError):
        feature_importance(policy, concat_samples([batch]), repeat=0)
