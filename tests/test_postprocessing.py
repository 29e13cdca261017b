"""Advantages, n-step transitions and minibatches, against loops that are plain to read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.errors import MissingColumn, OptionError, SchemaError
from rlio.policies.postprocessing import (
    GAE,
    NStep,
    adjust_nstep,
    compute_gae,
    discount_cumsum,
    standardize_fields,
    trajectory_lengths,
)
from rlio.policies.sgd import do_minibatch_sgd, mean_stats, minibatches

DISCOUNTS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
#: (Steps, how it ended) of each trajectory.
TRAJECTORIES = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from(["terminated", "truncated", "cut", "missing"])),
    min_size=1,
    max_size=6,
)


def batch_of(trajectories: list[tuple[int, str]], seed: int) -> SampleBatch:
    """Trajectories one after the other; the observation is its own value, so that it can be seen."""
    rng = np.random.default_rng(seed)
    parts = []
    for i, (steps, end) in enumerate(trajectories):
        obs = rng.normal(size=(steps + 1, 1)).astype(np.float32)
        flags = np.zeros((3, steps), bool)
        flags[0, -1], flags[1, -1], flags[2, -1] = end == "terminated", end == "truncated", end == "missing"
        new_obs = obs[1:].copy()
        new_obs[flags[2]] = 0
        parts.append(
            {
                "obs": obs[:-1],
                "new_obs": new_obs,
                "new_obs_valid": ~flags[2],
                "rewards": rng.normal(size=steps).astype(np.float32),
                "terminateds": flags[0],
                "truncateds": flags[1],
                "eps_id": np.full(steps, i),
                "t": np.arange(steps) + 3,
                "vf_preds": obs[:-1, 0] * 2,
            }
        )
    return SampleBatch({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def value_after(batch: SampleBatch) -> Any:
    return lambda rows: batch["new_obs"][rows, 0] * 2


def by_loop(
    rows: dict[str, Any], steps: int, end: str, gae: GAE
) -> tuple[list[float], list[float], list[float]]:
    """(Bootstrapped values, advantages, targets) of one trajectory, step by step from its end."""
    after = 0.0 if end in ("terminated", "missing") else 2 * float(rows["new_obs"][steps - 1, 0])
    advantage = 0.0
    found = []
    for t in reversed(range(steps)):
        value, reward = float(rows["vf_preds"][t]), float(rows["rewards"][t])
        advantage = reward + gae.gamma * after - value + gae.gamma * gae.lambda_ * advantage
        found.append((after, advantage, advantage + value))
        after = value
    values, advantages, targets = zip(*found[::-1], strict=True)
    return list(values), list(advantages), list(targets)


@given(TRAJECTORIES, DISCOUNTS, DISCOUNTS, st.integers(0, 99))
def test_gae_over_all_trajectories_at_once_is_what_a_loop_over_each_gives(
    trajectories: list[tuple[int, str]], gamma: float, lambda_: float, seed: int
) -> None:
    """Row "postprocessing" (2.3): compute_advantages, compute_gae_for_..., compute_bootstrap_value."""
    batch = batch_of(trajectories, seed)
    gae = GAE(gamma=gamma, lambda_=lambda_)
    made = compute_gae(batch, gae, value_after(batch))
    expected: list[list[float]] = [[], [], []]
    parts = batch.split_by_episode("eps_id")
    for part, (steps, end) in zip(parts, trajectories, strict=True):
        for column, values in zip(expected, by_loop(dict(part), steps, end, gae), strict=True):
            column.extend(values)
    for name, values in zip(("values_bootstrapped", "advantages", "value_targets"), expected, strict=True):
        assert made[name].dtype == np.float32
        np.testing.assert_allclose(made[name], values, rtol=1e-4, atol=1e-5)
    assert "advantages" not in batch, "the batch that was given stays as it is"


@given(TRAJECTORIES, DISCOUNTS, st.integers(0, 99))
def test_without_a_critic_advantages_are_the_discounted_rewards_to_come(
    trajectories: list[tuple[int, str]], gamma: float, seed: int
) -> None:
    batch = batch_of(trajectories, seed)
    del batch["vf_preds"], batch["new_obs"]
    made = compute_gae(batch, GAE(gamma=gamma, use_critic=False))
    expected = []
    for part in batch.split_by_episode("eps_id"):
        rewards = part["rewards"].astype(float)
        expected += [sum(gamma**i * r for i, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    np.testing.assert_allclose(made["advantages"], expected, rtol=1e-4, atol=1e-5)
    assert "value_targets" not in made


@given(TRAJECTORIES, DISCOUNTS, st.integers(1, 15), st.integers(0, 99))
def test_n_step_transitions_over_all_trajectories_are_what_a_loop_over_each_gives(
    trajectories: list[tuple[int, str]], gamma: float, n: int, seed: int
) -> None:
    """Row "postprocessing" (2.3): adjust_nstep."""
    batch = batch_of(trajectories, seed)
    made = adjust_nstep(batch, NStep(n, gamma))
    row = 0
    for steps, end in trajectories:
        start, stop = row, row + steps
        for t in range(start, stop):
            window = range(t, min(t + n, stop))
            last = window[-1]
            total = sum(gamma ** (i - t) * float(batch["rewards"][i]) for i in window)
            assert np.isclose(made["rewards"][t], total, atol=1e-5)
            assert np.isclose(made["n_step_discount"][t], gamma ** len(window))
            for name in ("new_obs", "terminateds", "truncateds", "new_obs_valid"):
                assert np.array_equal(made[name][t], batch[name][last])
            ends_here = last == stop - 1 and end in ("terminated", "missing")
            assert made["bootstrap_mask"][t] == (0.0 if ends_here else 1.0)
            assert np.array_equal(made["obs"][t], batch["obs"][t])
        row = stop
    with pytest.raises(SchemaError, match="n-step transitions already"):
        adjust_nstep(made, NStep(n, gamma))


def test_one_step_transitions_are_the_transitions() -> None:
    batch = batch_of([(5, "terminated"), (3, "cut")], 0)
    made = adjust_nstep(batch, NStep(1, 0.9))
    assert all(np.array_equal(made[name], batch[name]) for name in batch)


def test_whole_numbers_as_rewards_become_fractions_not_whole_numbers_again() -> None:
    batch = batch_of([(3, "cut")], 0)
    batch["rewards"] = np.array([1, 1, 1])
    assert adjust_nstep(batch, NStep(3, 0.5))["rewards"].tolist() == [1.75, 1.5, 1.0]


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.one_of(DISCOUNTS, st.floats(0, 1)),
    st.integers(0, 99),
)
def test_discounted_sums_stay_in_their_trajectory(lengths: list[int], gamma: float, seed: int) -> None:
    """Row "postprocessing" (2.3): discount_cumsum."""
    values = np.random.default_rng(seed).normal(size=sum(lengths))
    expected = values.copy()
    ends = set(np.cumsum(lengths) - 1)
    for t in reversed(range(len(values))):
        if t not in ends:
            expected[t] += gamma * expected[t + 1]
    before = values.copy()
    made = discount_cumsum(values, gamma, lengths=np.array(lengths))
    np.testing.assert_allclose(made, expected, rtol=1e-9, atol=1e-9)
    assert np.array_equal(values, before)
    assert np.allclose(discount_cumsum(values[: lengths[0]], gamma), expected[: lengths[0]])


def test_what_one_trajectory_holds_never_reaches_another() -> None:
    values = np.array([1.0, np.nan, 2.0, np.inf, 3.0])
    made = discount_cumsum(values, 0.5, lengths=np.array([1, 1, 1, 1, 1]))
    assert np.array_equal(made, values, equal_nan=True)
    assert len(discount_cumsum(np.zeros(0), 0.9)) == 0
    with pytest.raises(SchemaError, match="3 rows in all"):
        discount_cumsum(np.zeros(4), 0.9, lengths=np.array([3]))


def test_trajectories_end_at_flags_ids_agents_and_steps_back_in_time() -> None:
    def lengths(**columns: Any) -> list[int]:
        return trajectory_lengths(SampleBatch(columns)).tolist()

    assert lengths(terminateds=[False, True, False, False]) == [2, 2]
    assert lengths(truncateds=[True, False, False, True]) == [1, 3]
    assert lengths(eps_id=[1, 1, 2, 2, 1]) == [2, 2, 1]
    assert lengths(eps_id=[1, 1, 1], unroll_id=[1, 2, 2]) == [3], "fragments that go on are one"
    assert lengths(unroll_id=[1, 2, 2]) == [1, 2]
    assert lengths(eps_id=[1, 1, 1], agent_index=[0, 1, 1]) == [1, 2]
    assert lengths(agent_id=np.array(["a", "b"], object)) == [1, 1]
    assert lengths(t=[0, 2, 4, 1, 2]) == [3, 2], "agents that act in turns skip steps"
    assert lengths(eps_id=np.zeros(0)) == []
    padded = SampleBatch(obs=np.zeros(3), seq_lens=[1, 2]).right_zero_pad(2)
    with pytest.raises(SchemaError, match="unpad"):
        trajectory_lengths(padded)


def test_values_are_asked_for_once_and_only_where_a_trajectory_goes_on() -> None:
    batch = batch_of([(2, "terminated"), (3, "truncated"), (1, "cut"), (2, "missing")], 0)
    asked = []

    def value(rows: Any) -> Any:
        asked.append(rows.tolist())
        return np.zeros(len(rows))

    compute_gae(batch, GAE(), value)
    assert asked == [[4, 5]]
    ended = batch_of([(2, "terminated")], 0)
    del ended["new_obs"]
    compute_gae(ended, GAE(), value)
    assert len(asked) == 1, "nothing to bootstrap: nobody is asked"


def test_a_column_that_is_needed_is_named() -> None:
    for name in ("rewards", "vf_preds", "terminateds", "new_obs"):
        batch = batch_of([(2, "cut")], 0)
        del batch[name]
        with pytest.raises(MissingColumn, match=name):
            compute_gae(batch, GAE(), lambda rows: np.zeros(len(rows)))
    with pytest.raises(OptionError, match="value_after"):
        compute_gae(batch_of([(2, "cut")], 0), GAE())
    for wrong in ({"gamma": 1.1}, {"lambda_": -0.1}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            GAE(**wrong)  # type: ignore[arg-type]
    assert len(compute_gae(SampleBatch(rewards=np.zeros(0)), GAE())) == 0


def test_fields_are_standardised_for_each_policy_by_itself() -> None:
    """Row "aggregate sampling" (2.3): standardize_fields."""
    one = SampleBatch(advantages=np.array([1.0, 2.0, 3.0]), obs=np.zeros(3))
    two = SampleBatch(advantages=np.array([5.0, 5.0]))
    made = standardize_fields(MultiAgentBatch({"a": one, "b": two}, 3), ["advantages"])
    assert np.allclose(made["a"]["advantages"], [-1.2247449, 0, 1.2247449])
    assert made["b"]["advantages"].tolist() == [0.0, 0.0], "no spread: no division by nothing"
    assert made.env_steps() == 3
    assert one["advantages"].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(MissingColumn, match="advantages"):
        standardize_fields(SampleBatch(obs=np.zeros(2)), ["advantages"])


def test_minibatches_hold_each_row_once_a_pass_in_another_order_each() -> None:
    """Row "sample_and_learn(expected_batch_size, num_sgd_iter, sgd_minibatch_size, standardize_fields)"
    (2.2).
    """
    batch = SampleBatch(rewards=np.arange(10.0))
    passes: list[list[float]] = [[]]

    def learn(part: SampleBatch) -> dict[str, float]:
        if len(passes[-1]) == 10:
            passes.append([])
        passes[-1].extend(part["rewards"])
        return {"loss": float(len(part))}

    stats = do_minibatch_sgd(learn, batch, num_sgd_iter=3, sgd_minibatch_size=4, seed=0)
    assert [sorted(values) for values in passes] == [list(range(10))] * 3
    assert len({tuple(values) for values in passes}) == 3
    assert stats == {"loss": 10 / 3}
    again = do_minibatch_sgd(learn, batch, num_sgd_iter=3, sgd_minibatch_size=4, seed=0)
    assert passes[:3] == passes[3:]
    assert again == stats
    whole = do_minibatch_sgd(learn, batch, standardize_fields=["rewards"])
    assert whole == {"loss": 10.0}
    assert np.isclose(np.mean(passes[-1]), 0, atol=1e-6)


def test_sequences_are_never_cut_by_minibatches() -> None:
    batch = SampleBatch(
        obs=np.arange(9), seq_lens=np.array([2, 3, 4]), state_in_0=np.arange(3)[:, None], max_seq_len=4
    )
    parts = list(minibatches(batch, 4, seed=1))
    assert sorted(len(part) for part in parts) == [2, 3, 4]
    for part in parts:
        assert part["obs"][0] == [0, 2, 5][int(part["state_in_0"][0, 0])]


def test_means_leave_out_what_is_not_known() -> None:
    nan = float("nan")
    made = mean_stats([{"a": 1.0, "b": nan, "c": "x"}, {"a": nan, "b": nan, "c": "y", "d": 4}])
    assert made["a"] == 1.0
    assert np.isnan(made["b"])
    assert (made["c"], made["d"]) == ("y", 4.0)
    for wrong in ({"num_sgd_iter": 0}, {"sgd_minibatch_size": -1}):
        with pytest.raises(OptionError):
            do_minibatch_sgd(lambda part: {}, SampleBatch(obs=[1]), **wrong)
