"""Mixtures of stores: gathered together, they are what they would be one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_env import check_transitions
from further import further
from test_replay_store import LENGTHS, record

import rlio
from rlio import DatasetReader, MixedInput, ReplayStore, SampleBatch
from rlio.errors import EndOfData
from rlio.reader import InputReader
from rlio.testing import assert_resumes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def store(root: str) -> ReplayStore:
    return ReplayStore.open(root)


def sources(root: str, store: ReplayStore, **options: Any) -> list[tuple[InputReader, float]]:
    return [
        (DatasetReader(root, cache="memory", shuffle=True, seed=1, batch_size=10, **options), 0.5),
        (store.epochs(seed=2, batch_size=7, filter="t > 1", **options), 0.3),
        (store.uniform(seed=3, batch_size=9), 0.2),
    ]


def one_by_one(pairs: list[tuple[InputReader, float]], **options: Any) -> MixedInput:
    """The same mixture, whose batches are joined one by one, as its weights might change at any of them."""
    named = {f"source_{number}": reader for number, (reader, _) in enumerate(pairs)}
    weights = [weight for _, weight in pairs]
    return MixedInput(named, weights=lambda steps: weights, **options)


@pytest.mark.parametrize("marked", [True, *further(False)])
def test_they_are_what_they_would_be_one_by_one(root: str, store: ReplayStore, marked: bool) -> None:
    ahead = MixedInput(sources(root, store), batch_size=16, seed=5, source_column=marked)
    plain = one_by_one(sources(root, store), batch_size=16, seed=5, source_column=marked)
    for number in range(600):  # Several epochs, and blocks of 256 batches.
        one, other = ahead.sample(), plain.sample()
        assert ahead._block is not None or number % 256 == 255
        assert one.equals(other)
        if number % 7 == 0:  # Whoever asks sees what was given, and no more.
            assert ahead.counts == plain.counts
        check_transitions(one, lengths=LENGTHS)
    assert plain._block is None


def test_they_resume_before_any_batch(root: str, store: ReplayStore) -> None:
    def mix() -> MixedInput:
        return MixedInput(sources(root, store), batch_size=300, seed=5)

    assert_resumes(mix, batches=12)
    reader = mix()
    for _ in range(5):
        reader.sample()
    state = reader.state_dict()
    expected = [reader.sample() for _ in range(20)]
    other = one_by_one(sources(root, store), batch_size=300, seed=5)
    other.load_state_dict(state)
    for batch in expected:
        assert other.sample().equals(batch)


def test_other_sizes_in_between_take_what_comes_next(root: str, store: ReplayStore) -> None:
    ahead = MixedInput(sources(root, store), batch_size=16, seed=5)
    plain = one_by_one(sources(root, store), batch_size=16, seed=5)
    for size in (None, None, 5, None, 40, 1, None, None):
        assert ahead.sample(size).equals(plain.sample(size))


@pytest.mark.few(1)
@pytest.mark.parametrize("end", ["error", "rewind", "renormalise"])
def test_a_source_that_ends_ends_as_ever(root: str, store: ReplayStore, end: Any) -> None:
    def drained(make: Any) -> tuple[list[Any], str]:
        mix = make(sources(root, store, epochs=2)[:2], batch_size=16, end=end)
        found: list[Any] = []
        try:
            while len(found) < 300:
                found.append(mix.sample())
        except (EndOfData, ValueError) as error:
            return found, type(error).__name__
        return found, ""

    (one, why), (other, reason) = drained(MixedInput), drained(one_by_one)
    assert why == reason
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.equals(b)


@pytest.mark.parametrize(
    "options",
    [{"draw": rlio.NStep(2)}, {"columns": ["t"]}, {"indexes": True}, {"views": True}, {"shard": (0, 2)}],
)
def test_what_cannot_be_gathered_together_is_joined(
    root: str, store: ReplayStore, options: dict[str, Any]
) -> None:
    others = [(store.epochs(seed=4, batch_size=8, **options), 0.5), (store.epochs(seed=6, batch_size=8), 0.5)]
    mix = MixedInput(others, batch_size=8, columns="intersect")
    assert len(mix.sample()) == 8
    assert mix._block is None


def test_stores_of_other_rows_are_joined(tmp_path: Path, store: ReplayStore) -> None:
    other = ReplayStore.open(record(tmp_path, kind="stack"), columns=["t", "rewards"])
    mix = MixedInput(
        [(store.epochs(seed=1), 0.5), (other.epochs(seed=1), 0.5)], batch_size=8, columns="intersect"
    )
    assert set(mix.sample()) == {"t", "rewards"}
    assert mix._block is None
    live = ReplayStore(100)
    live.append(store.epochs(seed=0, batch_size=50).sample())
    mix = MixedInput([(store.epochs(seed=1), 0.5), (live.uniform(seed=1), 0.5)], batch_size=8)
    np.testing.assert_array_equal([len(mix.sample()) for _ in range(5)], 8)
    assert mix._block is None


def test_columns_of_any_shape_come_whole_in_batches_of_any_size() -> None:
    """Long batches are copied vector by vector, short ones number by number."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"one": (), "many": (5,), "single": (1,), "matrix": (2, 3)}
    columns = {
        f"{name} {kind}": rng.integers(0, 2, (2000, *shape)).astype(kind)
        for name, shape in shapes.items()
        for kind in ("f4", "?", "u1", "i8", "f2")
    }
    columns = {
        name: values * rng.integers(1, 100, values.shape).astype(values.dtype)
        for name, values in columns.items()
    }
    live = ReplayStore(2000)
    live.append(SampleBatch(columns, t=np.arange(2000)))
    for size in (1, 300, 1900):
        batch = live.uniform(batch_size=size, seed=size).sample()
        assert isinstance(batch, SampleBatch)
        for name, values in columns.items():
            assert batch[name].dtype == values.dtype
            np.testing.assert_array_equal(batch[name], values[batch["t"]])
