"""Draws are as likely as they should be, at the level of the store: chi-square, over fixed seeds.

Each statistic lies within six standard deviations of what chance gives, either way: too even is wrong
as well, except for stratified draws, which are more even than independent ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from counter_env import decode, episode
from counter_world import World, record_world
from further import further
from numpy.typing import NDArray

import rlio
from rlio import DatasetReader, ReplayStore, SampleBatch
from rlio.reader import InputReader

DRAWS = 100_000


def deviation(counts: NDArray[Any], shares: NDArray[Any] | None = None) -> float:
    """How many standard deviations the chi-square statistic of counts lies above its mean."""
    counts = np.asarray(counts, float).reshape(-1)
    expected = counts.sum() * (np.full(len(counts), 1 / len(counts)) if shares is None else shares)
    assert expected.min() >= 5, "too few draws for the test to mean anything"
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def drawn(reader: InputReader, count: int = DRAWS) -> NDArray[np.int64]:
    """(env, episode, t) of the first rows of that many units."""
    found: list[NDArray[np.int64]] = []
    while sum(map(len, found)) < count:
        batch = reader.sample()
        assert isinstance(batch, SampleBatch)
        rows = decode(batch["obs"])
        if "seq_lens" in batch:
            sizes = np.asarray(batch["seq_lens"], np.int64)
            padded = np.arange(len(sizes)) * batch.max_seq_len
            rows = rows[padded if batch.zero_padded else np.cumsum(sizes) - sizes]
        found.append(rows)
    return np.concatenate(found)


def counted(keys: NDArray[np.int64], of: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each of the keys ``of`` comes; none else may."""
    place = {tuple(key): number for number, key in enumerate(of.tolist())}
    return np.bincount([place[tuple(key)] for key in keys.tolist()], minlength=len(of))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return record_world(tmp_path_factory.mktemp("world"), episodes=5)


@pytest.fixture(scope="module", params=["memory", "disk"])
def store(world: World, request: pytest.FixtureRequest) -> ReplayStore:
    return ReplayStore.open(world.root, cache=request.param)


# ---- uniform ----


@pytest.mark.further
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 1000}, {"draw": rlio.NStep(3, gamma=0.9)},
        {"draw": rlio.Sequences(3), "batch_size": 300},
        *further({"batch_size": 100}, {"filter": "env_id == 2"}),
        *further({"draw": rlio.WholeEpisodes(), "batch_size": 50}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.each_value_once
def test_uniform_draws_take_every_unit_equally_often(store: ReplayStore, options: dict[str, Any]) -> None:
    narrow = {name: value for name, value in options.items() if name != "batch_size"}
    units = np.concatenate([
        _first_keys(batch) for batch in store.epochs(epochs=1, shuffle=False, **narrow)
    ])  # fmt: skip
    several = isinstance(options.get("draw"), rlio.Sequences | rlio.WholeEpisodes)
    keys = drawn(store.uniform(seed=11, **options), DRAWS // (4 if several else 1))
    assert abs(deviation(counted(keys, units))) < 6


def _first_keys(batch: Any) -> NDArray[np.int64]:
    class Once(InputReader):
        def _next(self) -> SampleBatch:
            return batch  # type: ignore[no-any-return]

    return drawn(Once(), 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("apart", [1, 2, 256])
def test_uniform_draws_do_not_depend_on_those_before(store: ReplayStore, apart: int) -> None:
    reader = store.uniform(seed=3, batch_size=512, indexes=True, columns=["t"])
    rows = np.concatenate([reader.sample()["batch_indexes"] for _ in range(DRAWS // 512)])  # type: ignore[call-overload]
    cells = rows * 30 // (rows.max() + 1)
    table = np.bincount(cells[:-apart] * 30 + cells[apart:], minlength=900)
    shares = np.bincount(cells, minlength=30) / len(cells)
    assert abs(deviation(table, np.outer(shares, shares).reshape(-1))) < 6


def test_uniform_draws_of_a_live_store_take_what_there_is_equally_often() -> None:
    live = ReplayStore(capacity=400)
    sampler = live.uniform(batch_size=100, seed=4, indexes=True)
    counts = np.zeros(400)
    for number in range(60):
        live.append(episode(0, number, 50))
        if number < 8:
            continue
        for _ in range(8):
            age = (number + 1) * 50 - 1 - sampler.sample()["batch_indexes"]  # type: ignore[call-overload]
            counts += np.bincount(age, minlength=400)
    assert abs(deviation(counts)) < 6


# ---- epochs ----


@pytest.mark.further
def test_any_row_may_come_first_and_any_row_may_come_anywhere(world: World) -> None:
    """Over the epochs of one seed, by unit and position; units few enough for each cell to have some."""
    with ReplayStore.open(world.root) as store:
        reader = store.epochs(seed=2, filter="obs[0] == 5 and obs[1] == 1", columns=["obs"], batch_size=1)
        total = len(reader)
        assert 20 <= total <= 60
        table = np.zeros((total, total))
        place = np.arange(total)
        times = np.flatnonzero(world.until[5, 1])
        for _ in range(20_000 // total * 4):
            t = np.asarray(reader.sample(total)["obs"])[:, 2].astype(int)
            table[place, np.searchsorted(times, t)] += 1
    assert abs(deviation(table)) < 6
    assert abs(deviation(table[0])) < 6
    assert abs(deviation(table[-1])) < 6


@pytest.mark.further
@pytest.mark.parametrize("cache", ["memory", *further("none")])
def test_the_first_rows_of_seeds_and_epochs_are_any(world: World, cache: Any) -> None:
    """More rows than a table of sorted keys has: by blocks of rows. Cold, by windows of row groups."""
    counts = np.zeros(world.rows, int)
    index = {tuple(key): number for number, key in enumerate(world.keys.tolist())}
    assert world.rows > 1024
    dataset = DatasetReader(world.root, cache="none").dataset
    for seed in range(20):
        with DatasetReader(
            dataset, cache=cache, shuffle=True, seed=seed, columns=["obs"], batch_size=3
        ) as reader:
            for epoch in range(15):
                state = reader.state_dict()
                if epoch:
                    state["position"] |= {"epoch": epoch, "position": 0}
                    reader.load_state_dict(state)
                first = decode(np.asarray(reader.sample(3)["obs"]))  # type: ignore[call-overload]
                counts[[index[tuple(key)] for key in first.tolist()]] += 1
    blocks = np.add.reduceat(counts, np.arange(0, world.rows, world.rows // 30))
    sizes = np.diff(np.append(np.arange(0, world.rows, world.rows // 30), world.rows))
    keep = sizes == sizes[0]
    limit = 6 if cache == "memory" else 12  # Three rows of one window are near each other.
    assert abs(deviation(blocks[keep])) < limit


# ---- priorities ----


@pytest.mark.few(1)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"draw": rlio.Sequences(4)}, *further({"draw": rlio.NStep(3)}, {"filter": "t > 2"})],
    ids=str,
)
@pytest.mark.each_value_once
def test_prioritised_draws_follow_the_priorities(
    store: ReplayStore, alpha: float, options: dict[str, Any]
) -> None:
    sampler = store.prioritised(
        batch_size=1, alpha=alpha, beta=1.0, epsilon=0.01, seed=8, columns=["t"], **options
    )
    count = len(store.epochs(**options))
    errors = np.random.default_rng(1).exponential(1.0, count)
    sampler.update_priorities(np.arange(count), -errors)
    shares = (errors + 0.01) ** alpha
    shares /= shares.sum()
    # One at a time: independent draws.
    rows = [int(sampler.sample()["batch_indexes"][0]) for _ in range(4_000)]  # type: ignore[call-overload]
    order = np.argsort(shares)
    cells = np.empty(count, int)
    cells[order] = np.minimum((np.cumsum(shares[order]) * 40).astype(int), 39)
    assert abs(deviation(np.bincount(cells[rows]), np.bincount(cells, weights=shares))) < 6
    # Many at a time: stratified, each unit within a few draws of its share.
    counts = np.zeros(count)
    for _ in range(100):
        batch = sampler.sample(1000)
        assert isinstance(batch, SampleBatch)
        every = batch.max_seq_len if "seq_lens" in batch else 1
        units = np.asarray(batch["batch_indexes"])[::every]
        counts += np.bincount(units, minlength=count)
        weights = np.asarray(batch["weights"])[::every]
        np.testing.assert_allclose(weights, shares.min() / shares[units], rtol=1e-5)
    expected = shares * counts.sum()
    assert (np.abs(counts - expected) <= 5.0 * np.sqrt(expected) + 1.0).all()
    assert ((counts - expected) ** 2 / expected).sum() < count + 6 * math.sqrt(2 * count)


def test_priorities_of_a_live_store_are_those_of_the_rows_that_it_has() -> None:
    live = ReplayStore(capacity=200)
    sampler = live.prioritised(batch_size=400, alpha=1.0, beta=0.0, epsilon=1e-9, seed=0)
    counts, expected = np.zeros(200), np.zeros(200)
    for number in range(30):
        live.append(episode(0, number, 20))
        head = (number + 1) * 20
        rows = np.arange(max(head - 200, 0), head)
        sampler.update_priorities(rows, 1.0 + rows % 7)
        if number < 10:
            continue
        for _ in range(10):
            batch = sampler.sample()
            assert isinstance(batch, SampleBatch)
            np.testing.assert_array_equal(batch["batch_indexes"], decode(batch["obs"]) @ [0, 20, 1])
            counts += np.bincount(head - 1 - batch["batch_indexes"], minlength=200)
        expected += ((1.0 + rows % 7) / (1.0 + rows % 7).sum())[::-1]
    assert deviation(counts, expected / expected.sum()) < 6


def test_new_rows_are_drawn_as_often_as_the_most_important_old_one() -> None:
    live = ReplayStore(capacity=100)
    sampler = live.prioritised(batch_size=500, alpha=1.0, epsilon=1e-9, seed=0)
    live.append(episode(0, 0, 90))
    sampler.update_priorities(np.arange(90), np.where(np.arange(90) == 7, 9.0, 1.0))
    live.append(episode(0, 1, 10))
    shares = np.where(np.isin(np.arange(100), [7, *range(90, 100)]), 9.0, 1.0)
    counts = sum(
        np.bincount(sampler.sample()["batch_indexes"], minlength=100)  # type: ignore[call-overload]
        for _ in range(40)
    )
    assert deviation(counts, shares / shares.sum()) < 6
    assert (np.abs(counts - 20_000 * shares / shares.sum()) < 40 * 2).all()


def test_the_measure_sees_what_is_uneven_and_what_is_too_even() -> None:
    rng = np.random.default_rng(0)
    assert abs(deviation(np.bincount(rng.integers(0, 500, DRAWS)))) < 6
    tilted = (rng.random(DRAWS) ** 1.06 * 500).astype(int)
    assert deviation(np.bincount(tilted, minlength=500)) > 6
    assert deviation(np.full(500, DRAWS // 500)) < -6
