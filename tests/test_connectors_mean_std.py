"""Running means and standard deviations: exact for whole batches, merged by deltas (rows 2.1 and 2.6)."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from hypothesis import given
from hypothesis import strategies as st

from rlio.connectors.mean_std import MeanStdFilter, RunningStat
from rlio.errors import SchemaError, StateError

SHAPES = [(), (3,), (3, 4, 4)]


def bound(shape: tuple[int, ...], **options: Any) -> MeanStdFilter:
    made = MeanStdFilter(**options)
    made.bind(Box(-np.inf, np.inf, shape, np.float32))
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_are_those_of_all_values_so_far(shape: tuple[int, ...]) -> None:
    """Upstream's test_running_stat: mean and sample variance; of one value, the square of the mean."""
    rng, stat, values = np.random.default_rng(0), RunningStat(shape), []
    for _ in range(5):
        values.append(rng.standard_normal(shape))
        stat.push(values[-1])
        mean = np.mean(values, axis=0)
        np.testing.assert_allclose(stat.mean, mean)
        np.testing.assert_allclose(
            stat.var, np.square(mean) if len(values) == 1 else np.var(values, ddof=1, axis=0)
        )
        np.testing.assert_allclose(stat.std, np.sqrt(stat.var))
    assert stat.n == 5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_combined_statistics_are_those_of_both(shape: tuple[int, ...]) -> None:
    """Upstream's test_combining_stat."""
    rng = np.random.default_rng(1)
    first, second, both = RunningStat(shape), RunningStat(shape), RunningStat(shape)
    for stat, n in ((first, 5), (second, 9)):
        for _ in range(n):
            value = rng.standard_normal(shape)
            stat.push(value)
            both.push(value)
    first.update(second)
    assert first.n == both.n == 14
    np.testing.assert_allclose(first.mean, both.mean)
    np.testing.assert_allclose(first.std, both.std)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_batches_of_any_size_give_what_single_values_give(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Far from 0, where a sum of squares would lose everything.
    values = [1e7 + rng.standard_normal((n, 2)) for n in sizes]
    batched = RunningStat((2,))
    for each in values:
        batched.update(RunningStat.of(each, batched.shape))
    everything = np.concatenate(values)
    assert batched.n == len(everything)
    np.testing.assert_allclose(batched.mean, everything.mean(0), rtol=1e-14)
    if len(everything) > 1:
        np.testing.assert_allclose(batched.var, everything.var(0, ddof=1), rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_filter_counts_into_statistics_and_buffer(shape: tuple[int, ...]) -> None:
    """Upstream's test_basic and test_copy_sync."""
    filter_ = bound(shape)
    for _ in range(5):
        filter_(np.ones((1, *shape)))
    assert filter_.running_stats.n == filter_.buffer.n == 5
    np.testing.assert_array_equal(filter_.running_stats.mean, np.ones(shape))
    np.testing.assert_array_equal(filter_.running_stats.var, np.zeros(shape))
    filter_.reset_buffer()
    assert (filter_.running_stats.n, filter_.buffer.n) == (5, 0)
    copy = filter_.copy()
    copy(np.zeros((2, *shape)))
    assert (filter_.running_stats.n, copy.running_stats.n, copy.buffer.n) == (5, 7, 2)
    filter_.sync(copy)
    assert (filter_.running_stats.n, filter_.buffer.n) == (7, 2)
    filter_(np.zeros((1, *shape)))
    assert copy.running_stats.n == 7


def test_workers_put_their_shares_together_and_each_counts_once() -> None:
    rng = np.random.default_rng(0)
    central, workers = bound((2,)), [bound((2,)) for _ in range(3)]
    seen = []
    for _ in range(4):
        for worker in workers:
            values = rng.standard_normal((5, 2))
            worker(values)
            seen.append(values)
        for worker in workers:
            central.apply_changes(worker)
            worker.reset_buffer()
        for worker in workers:
            worker.sync(central)
            worker.reset_buffer()
    everything = np.concatenate(seen)
    assert central.running_stats.n == len(everything) == 60
    np.testing.assert_allclose(central.running_stats.mean, everything.mean(0))
    np.testing.assert_allclose(central.running_stats.std, everything.std(0, ddof=1))
    assert central.buffer.n == 0
    central.apply_changes(workers[0], with_buffer=True)
    assert central.running_stats.n == 60


def test_a_batch_is_filtered_by_statistics_that_have_seen_it() -> None:
    """Section 5 item 35: several rows at once."""
    filter_ = bound((2,), clip=None)
    values = np.array([[1.0, 10.0], [3.0, 10.0], [5.0, 10.0]], np.float32)
    filtered = filter_(values)
    np.testing.assert_allclose(filtered[:, 0], [-1, 0, 1], rtol=1e-6)
    np.testing.assert_array_equal(filtered[:, 1], 0)
    assert filtered.dtype == np.float32
    np.testing.assert_allclose(filter_.final(np.array([[7.0, 10.0]]))[0], [2, 0], rtol=1e-6)
    assert filter_.running_stats.n == 3
    filter_.update = False
    filter_(values)
    assert filter_.running_stats.n == 3


def test_what_comes_out_is_clipped_and_in_the_space() -> None:
    filter_ = MeanStdFilter(clip=0.5)
    space = filter_.bind(Box(-np.inf, np.inf, (1,), np.float32))
    out = filter_(np.random.default_rng(0).standard_normal((100, 1)))
    assert abs(out).max() == 0.5
    assert all(space.contains(row) for row in out)
    assert bound((1,), demean=False, destd=False)(np.array([[3.0]])).item() == 3.0
    assert bound((1,), destd=False)(np.array([[3.0], [5.0]])).ravel().tolist() == [-1.0, 1.0]


def test_boxes_are_filtered_leaf_by_leaf_and_other_leaves_stay() -> None:
    filter_ = MeanStdFilter()
    space = filter_.bind(Dict(frame=Box(0, 255, (2,), np.uint8), gear=Discrete(3)))
    assert space == Dict(frame=Box(-10.0, 10.0, (2,)), gear=Discrete(3))
    gear = np.array([0, 2])
    out = filter_({"frame": np.array([[0, 9], [4, 9]], np.uint8), "gear": gear})
    assert out["gear"] is gear
    np.testing.assert_allclose(out["frame"], [[-(0.5**0.5), 0], [0.5**0.5, 0]], rtol=1e-6)
    assert filter_.running_stats["gear"] is None
    assert filter_.running_stats["frame"].n == 2


def test_the_state_is_json_and_exact() -> None:
    filter_ = bound((2,))
    filter_(np.random.default_rng(0).standard_normal((7, 2)) / 3)
    again = bound((2,))
    again.load_state_dict(json.loads(json.dumps(filter_.state_dict())))
    value = np.array([[0.1, 0.7]])
    assert again.running_stats.state_dict() == filter_.running_stats.state_dict()
    np.testing.assert_array_equal(again(value), filter_(value))
    assert again.buffer.n == 8
    for state in ({}, {"running": [], "buffer": []}, {"running": [{"n": 1}], "buffer": [{"n": 1}]}):
        with pytest.raises(StateError):
            again.load_state_dict(state)
    with pytest.raises(StateError, match="expected shape"):
        bound((3,)).load_state_dict(filter_.state_dict())
    with pytest.raises(SchemaError, match="same space"):
        bound((3,)).sync(filter_)


def test_threads_may_share_a_filter() -> None:
    """Row 2.1: what RLlib calls ConcurrentMeanStdFilter."""
    filter_ = bound((4,))
    threads = [
        threading.Thread(target=lambda: [filter_(np.ones((3, 4))) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert filter_.running_stats.n == filter_.buffer.n == 2400


def test_values_that_are_not_finite_do_not_enter_the_statistics() -> None:
    filter_ = MeanStdFilter(clip=None)
    filter_.bind(Box(-10.0, 10.0, (2,)))
    rows = np.random.default_rng(0).normal(3.0, 2.0, (1000, 2)).astype(np.float32)
    broken = rows.copy()
    broken[[7, 300, 999]] = [[np.nan, 1.0], [1.0, np.inf], [-np.inf, np.nan]]
    made = np.concatenate([filter_(broken[at : at + 10]) for at in range(0, 1000, 10)])
    assert np.flatnonzero(~np.isfinite(made).all(axis=1)).tolist() == [7, 300, 999]
    whole = np.delete(rows, [7, 300, 999], axis=0).astype(np.float64)
    assert filter_.running_stats.n == filter_.buffer.n == 997
    np.testing.assert_allclose(filter_.running_stats.mean, whole.mean(axis=0))
    np.testing.assert_allclose(filter_.running_stats.std, whole.std(axis=0, ddof=1))
    single = RunningStat((2,))
    single.push(np.array([np.nan, 0.0]))
    assert single.n == 0
