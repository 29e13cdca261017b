"""Mixtures of stores, streams and live samplers: within one row of every share at every step, and resumed so.

`test_mixed_input` has what a mixture does otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import gymnasium
import numpy as np
import pytest
from counter_env import decode, episode
from counting import Counting, Live
from hypothesis import given, settings
from hypothesis import strategies as st

import rlio
from rlio import (
    DatasetReader,
    EnvRunner,
    MixedInput,
    ParquetWriter,
    RandomPolicy,
    ReplayStore,
    RolloutConfig,
    SampleBatch,
    SamplerInput,
)
from rlio.errors import EndOfData
from rlio.reader import InputReader
from rlio.readers.mix_schedule import Schedule
from rlio.testing import assert_resumes

WEIGHT = st.one_of(
    st.integers(1, 1000),
    st.integers(1, 10**15),
    st.floats(0.001, 1000.0).map(lambda x: float(f"{x:.4g}")),
    st.fractions(Fraction(1, 997), 1000, max_denominator=997),
    st.decimals(Decimal("0.01"), 100, places=3),
)


def exact(weights: Sequence[Any]) -> list[Fraction]:
    """Shares of 1, of weights that mean what they print as."""
    found = [Fraction(str(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    return [weight / sum(found) for weight in found]


def assert_exact(shares: Sequence[Fraction], counts: Sequence[int]) -> None:
    total = sum(counts)
    for share, count in zip(shares, counts, strict=True):
        assert abs(share * total - count) < 1, f"{count} of {total} steps, of a share of {share}"


@settings(max_examples=30)
@given(
    weights=st.integers(2, 60).flatmap(lambda n: st.lists(WEIGHT, min_size=n, max_size=n)),
    sizes=st.lists(st.one_of(st.integers(1, 9), st.integers(1, 700)), min_size=1, max_size=25),
    seed=st.none() | st.integers(0, 99),
    source_sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_two_to_sixty_sources_stay_within_one_row_of_any_share_at_every_step(
    weights: list[Any], sizes: list[int], seed: int | None, source_sizes: list[int]
) -> None:
    pairs = [(Counting(None, source_sizes, label=i), weight) for i, weight in enumerate(weights)]
    reader = MixedInput(pairs, batch_size=sizes[0], seed=seed)
    shares, served = exact(weights), np.zeros(len(weights), np.int64)
    for size in sizes:
        batch = reader.sample(size)
        assert isinstance(batch, SampleBatch)
        assert len(batch) == size
        served += np.bincount(batch["label"], minlength=len(weights))
        assert_exact(shares, served.tolist())
    assert list(reader.counts.values()) == served.tolist()


@pytest.mark.further
@settings(max_examples=6)
@given(
    phases=st.integers(2, 60).flatmap(
        lambda n: st.lists(st.lists(st.integers(1, 50), min_size=n, max_size=n), min_size=2, max_size=4)
    ),
    size=st.integers(1, 40),
)
def test_where_weights_change_the_bound_starts_over_with_what_was_owed(
    phases: list[list[int]], size: int
) -> None:
    """Of each phase: within one step of its share and of what was owed, once there were steps to catch up."""
    count = len(phases[0])
    length = 8 * count
    reader = MixedInput(
        {str(i): Counting(None, label=i) for i in range(count)},
        batch_size=size,
        weights=lambda steps: phases[min(steps // length, len(phases) - 1)],
    )
    weights: list[int] = []
    owed, before, began = [Fraction(0)] * count, [0] * count, 0
    while (steps := sum(reader.counts.values())) < length * len(phases):
        now = phases[min(steps // length, len(phases) - 1)]
        if now != weights:
            served = [c - b for c, b in zip(reader.counts.values(), before, strict=True)]
            if weights:
                shares = exact(weights)
                owed = [o + w * (steps - began) - s for o, w, s in zip(owed, shares, served, strict=True)]
            weights, before, began = now, list(reader.counts.values()), steps
        reader.sample()
        total = sum(reader.counts.values()) - began
        if total < 4 * count:
            continue
        for share, more, after, start in zip(
            exact(weights), owed, reader.counts.values(), before, strict=True
        ):
            # Credits are counted in 2**-32 of a step.
            assert abs(share * total + more - (after - start)) < 1 + Fraction(
                count * len(phases), Schedule.UNIT
            )
            assert abs(more) < 1 + Fraction(count * len(phases), Schedule.UNIT)


# ---- sources of all kinds ----


class LiveSteps(Live):
    """A live source of environment 3, in batches of forty steps."""

    def _next(self) -> SampleBatch:
        self.number += 1
        return episode(3, self.number, 40)


class Walk(gymnasium.Env[np.ndarray, int]):
    """The counter environment as a live one: number 3; episodes of nine steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self) -> None:
        self.at = [3, -1, 0]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = [3, self.at[1] + 1, 0]
        return np.array(self.at, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at[2] += 1
        return np.array(self.at, np.float32), float(self.at[2]), self.at[2] == 9, False, {}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three data sets: environment i in the i-th."""
    folder = tmp_path_factory.mktemp("roots")
    for env in range(3):
        with ParquetWriter(folder / str(env)) as writer:
            for number in range(20):
                writer.write(episode(env, number, 25))
    return [str(folder / str(env)) for env in range(3)]


def stored(roots: list[str]) -> dict[str, InputReader]:
    """Draws of a store, epochs of one on disk, and a stream that is decoded as it is read."""
    return {
        "store": ReplayStore.open(roots[0]).uniform(batch_size=64, seed=1, draw=rlio.NStep(1)),
        "disk": DatasetReader(roots[1], cache="disk", shuffle=True, seed=2, batch_size=50),
        "stream": DatasetReader(roots[2], cache="none", shuffle=True, seed=3, batch_size=33),
    }


def live() -> SamplerInput:
    config = RolloutConfig(rollout_fragment_length=17)
    return SamplerInput(EnvRunner(Walk, RandomPolicy(), config=config, seed=0))


WEIGHTS = {"store": 0.55, "disk": 0.2, "stream": 0.15, "live": 0.1}


def test_stores_streams_and_live_samplers_mix_exactly_and_every_row_says_where_it_is_from(
    roots: list[str],
) -> None:
    sources = {**stored(roots), "live": live()}
    names, shares = list(sources), exact(list(WEIGHTS.values()))
    rng = np.random.default_rng(0)
    with MixedInput(
        sources, weights=WEIGHTS, batch_size=100, columns="intersect", source_column=True
    ) as reader:
        served = np.zeros(4, np.int64)
        for _ in range(300):
            batch = reader.sample(int(rng.integers(1, 200)))
            assert isinstance(batch, SampleBatch)
            env, number, t = decode(batch["obs"]).T
            assert batch["source"].tolist() == [names[i] for i in env]
            np.testing.assert_array_equal(decode(batch["new_obs"]), np.stack([env, number, t + 1], 1))
            served += np.bincount(env, minlength=4)
            assert_exact(shares, served.tolist())
        assert list(reader.counts.values()) == served.tolist()


def test_draws_by_priority_mix_exactly_too_and_tell_their_rows(roots: list[str]) -> None:
    sampler = ReplayStore.open(roots[0]).prioritised(batch_size=20, seed=0)
    stream = DatasetReader(roots[1], shuffle=True, seed=0)
    with MixedInput(
        {"one": sampler, "other": stream}, weights=[2, 1], batch_size=30, columns="fill"
    ) as reader:
        for number in range(1, 40):
            batch = reader.sample()
            assert isinstance(batch, SampleBatch)
            env = decode(batch["obs"])[:, 0]
            assert np.bincount(env).tolist() == [20, 10]
            rows = batch["batch_indexes"][env == 0]
            np.testing.assert_array_equal(rows, decode(batch["obs"][env == 0]) @ [0, 25, 1])
            sampler.update_priorities(rows, np.full(len(rows), float(number)))


@pytest.mark.few(1)
@pytest.mark.each_value_once
@pytest.mark.parametrize("n", [None, 1, 77])
@pytest.mark.parametrize("end", ["error", "rewind"])
def test_mixtures_of_stores_and_streams_resume_with_the_carry(
    roots: list[str], n: int | None, end: Any
) -> None:
    def make() -> MixedInput:
        return MixedInput(stored(roots), weights=[5, 3, 2], batch_size=31, source_column=True, end=end,
                          columns="intersect", seed=1)  # fmt: skip

    assert_resumes(make, n, batches=8)


@pytest.mark.further
def test_they_resume_where_weights_follow_a_schedule_and_go_on_exactly(roots: list[str]) -> None:
    def anneal(steps: int) -> dict[str, float]:
        return {"store": 1 + steps / 100, "disk": 3.0, "stream": 2.0}

    def make() -> MixedInput:
        return MixedInput(stored(roots), weights=anneal, batch_size=7, columns="intersect")

    assert_resumes(make, batches=12)


def test_a_restored_mixture_stays_within_one_row_of_shares_of_the_whole(roots: list[str]) -> None:
    """What was served before the state counts: the bound does not start over."""
    weights = {"store": 0.501, "disk": 0.3, "stream": 0.199}
    shares, state, served = exact(list(weights.values())), None, np.zeros(3, np.int64)
    for part in range(12):
        with MixedInput(stored(roots), weights=weights, batch_size=1, columns="intersect", seed=4) as reader:
            if state is not None:
                reader.load_state_dict(json.loads(json.dumps(state)))
            for _ in range(1 + part % 4):
                batch = reader.sample()
                assert isinstance(batch, SampleBatch)
                served += np.bincount(decode(batch["obs"])[:, 0], minlength=3)
                assert_exact(shares, served.tolist())
            state = reader.state_dict()
    assert list(reader.counts.values()) == served.tolist()


def test_with_a_live_source_the_others_resume_exactly_and_what_waited_is_counted(roots: list[str]) -> None:
    def make() -> MixedInput:
        return MixedInput({**stored(roots), "live": LiveSteps(None)}, weights=WEIGHTS, batch_size=60,
                          columns="intersect", source_column=True)  # fmt: skip

    def others(batch: Any) -> list[tuple[int, ...]]:
        return [tuple(row) for row in decode(batch["new_obs"])[batch["source"] != "live"].tolist()]

    with make() as reader, make() as restored:
        for _ in range(5):
            reader.sample()
        state = reader.state_dict()
        # 30 rows of 40 were served.
        assert state["dropped"] == 10
        restored.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(10):
            expected, found = reader.sample(), restored.sample()
            assert others(found) == others(expected)
        assert reader.counts == restored.counts


def test_a_store_that_ends_ends_the_mixture_as_declared(roots: list[str]) -> None:
    def make(end: Any) -> MixedInput:
        epochs = ReplayStore.open(roots[0]).epochs(batch_size=64, epochs=1, seed=0)
        stream = DatasetReader(roots[1], cache="none", epochs=2, shuffle=True, seed=0)
        return MixedInput({"once": epochs, "twice": stream}, weights=[1, 1], batch_size=90, end=end)

    with make("renormalise") as reader:
        rows = [decode(batch["obs"]) for batch in reader]  # type: ignore[call-overload]
        keys, times = np.unique(np.concatenate(rows), axis=0, return_counts=True)
        assert (times == keys[:, 0] + 1).all()
        assert len(keys) == 1000
        with pytest.raises(EndOfData):
            reader.sample()
    with make("rewind") as reader:  # For ever, the one epoch again and again.
        counts = sum(
            np.bincount(decode(reader.sample()["obs"])[:, 0], minlength=2)  # type: ignore[call-overload]
            for _ in range(100)
        )
        assert counts.tolist() == [4500, 4500]


def test_the_bound_is_not_met_by_chance() -> None:
    """Largest remainders, the obvious way to deal steps out, drift past it: the measure sees that."""
    weights = [3, 1, 1, 1, 3, 3, 3, 3, 3]
    shares, counts = exact(weights), [0] * 9
    for total in range(1, 43):
        counts[max(range(9), key=lambda i: (shares[i] * total - counts[i], -i))] += 1
        try:
            assert_exact(shares, counts)
        except AssertionError:
            return
    raise AssertionError("the measure sees no drift")
