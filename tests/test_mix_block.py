"""Mixtures of files: read ahead and put together at once, they are what they would be one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import Counting, Live
from further import further
from growing_data import A, B, C
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import files, group_bytes, put, store
from test_joint_gather import one_by_one

from rlio import DatasetReader, FollowReader, MixedInput, ReplayStore, Roll, SampleBatch
from rlio.batch import Batch
from rlio.errors import CorruptData, EndOfData, OptionError, StateError
from rlio.reader import InputReader
from rlio.readers.mix_block import MixBlock, woven
from rlio.readers.mix_schedule import Schedule
from rlio.readers.mix_source import MOST_AHEAD
from rlio.replay.buffers import Buffers
from rlio.testing import assert_resumes

ROWS = (700, 400, 300)


def rows(first: int, count: int, **more: Any) -> SampleBatch:
    t = np.arange(first, first + count)
    obs = (t[:, None] * [1, 2, 3]).astype(np.float32)
    return SampleBatch(obs=obs, t=t, new_obs=obs + 1, rewards=t.astype(np.float32), **more)


@pytest.fixture(scope="module")
def roots() -> list[str]:
    """Three data sets of several shards with several row groups each; rows of source i begin at 10_000 i."""
    with group_bytes(2000):
        return [
            store(rows(10_000 * i, count), roll=Roll(max_rows=150, max_seconds=None), writer_id=writer)
            for i, (count, writer) in enumerate(zip(ROWS, (A, B, C), strict=True))
        ]


def sources(roots: list[str], **options: Any) -> list[tuple[InputReader, float]]:
    """Shuffled files, files in recorded order, and a third kind that cannot be gathered with them."""
    return [
        (DatasetReader(roots[0], cache="none", shuffle=True, seed=1, batch_size=32, **options), 0.6),
        (DatasetReader(roots[1], cache="none", batch_size=20, **options), 0.3),
        (DatasetReader(roots[2], cache="memory", shuffle=True, seed=2, batch_size=9, **options), 0.1),
    ]


def outcome(mix: MixedInput, n: int | None = None) -> Batch | str:
    try:
        return mix.sample(n)
    except (EndOfData, OptionError, CorruptData) as error:
        return type(error).__name__


def assert_alike(one: Batch | str, other: Batch | str) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
    else:
        assert list(one) == list(other)
        assert one.equals(other)


@settings(max_examples=4)
@given(
    batch_size=st.integers(1, 300),
    sizes=st.lists(st.none() | st.integers(1, 400), min_size=1, max_size=12),
    end=st.sampled_from(["error", "rewind", "renormalise"]),
    epochs=st.none() | st.integers(1, 3),
    seed=st.none() | st.integers(0, 9),
    asks=st.integers(1, 9),
    marked=st.booleans(),
)
def test_they_are_what_they_would_be_one_by_one(
    roots: list[str],
    batch_size: int,
    sizes: list[int | None],
    end: Any,
    epochs: int | None,
    seed: int | None,
    asks: int,
    marked: bool,
) -> None:
    """Of any sizes, through epochs and ends; and whoever asks sees what was given, and no more."""
    options: dict[str, Any] = {"batch_size": batch_size, "end": end, "seed": seed, "source_column": marked}
    ahead = MixedInput(sources(roots, epochs=epochs), **options)
    plain = one_by_one(sources(roots, epochs=epochs), **options)
    for number, size in enumerate(sizes):
        for _ in range(1 if size else 6):
            one, other = outcome(ahead, size), outcome(plain, size)
            assert_alike(one, other)
            if number % asks == 0:
                assert ahead.counts == plain.counts
            if one == "OptionError":
                return
    ahead.close()
    plain.close()


@settings(max_examples=40)
@given(
    weights=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any),
    owed=st.integers(0, 5 * Schedule.UNIT),
    sizes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=6),
    seed=st.randoms(),
)
def test_a_plan_is_what_is_dealt(
    weights: list[int], owed: int, sizes: list[tuple[int, int]], seed: Any
) -> None:
    order = seed.sample(range(len(weights)), len(weights))
    credits = [owed, *[0] * (len(weights) - 1)]
    credits[-1] -= owed
    one = Schedule(weights, order=order, credits=credits)
    other = Schedule(weights, order=order, credits=credits)
    for size, times in sizes:
        before = one.counts
        planned = one.plan(size, times)
        assert one.counts == before
        assert one.plan(size, times) == planned
        assert [tuple(one.deal(size)) for _ in range(times)] == planned
        assert [tuple(other.deal(size)) for _ in range(times)] == planned


def ahead_of(mix: MixedInput) -> bool:
    """Whether the mixture has batches at hand, after some."""
    for _ in range(4):
        mix.sample()
    return mix._block is not None


@pytest.mark.further
@pytest.mark.parametrize("end", ["rewind", *further("error")])
def test_they_resume_before_any_batch(roots: list[str], end: Any) -> None:
    def make() -> MixedInput:
        return MixedInput(sources(roots)[:2], batch_size=120, end=end, seed=3)

    with make() as mix:
        assert ahead_of(mix)
    assert_resumes(make, batches=3)


@pytest.mark.further
def test_the_state_within_a_block_fits_a_mixture_that_joins_batches_one_by_one(roots: list[str]) -> None:
    ahead = MixedInput(sources(roots), batch_size=50, seed=3)
    for _ in range(20):
        ahead.sample()
    state = json.loads(json.dumps(ahead.state_dict()))
    assert max(each["served"] for each in state["position"]["sources"].values()) > 300
    plain = one_by_one(sources(roots), batch_size=50, seed=3)
    plain.load_state_dict(state)
    for _ in range(40):
        assert ahead.sample().equals(plain.sample())
    assert ahead.counts == plain.counts


@pytest.mark.few(2)
@pytest.mark.parametrize("served", [-1, MOST_AHEAD, 10**15])
def test_a_state_that_says_more_was_served_than_is_ever_read_ahead_is_refused(
    roots: list[str], served: int
) -> None:
    mix = MixedInput(sources(roots), batch_size=50)
    state = mix.state_dict()
    state["position"]["sources"]["source_1"]["served"] = served
    with pytest.raises(StateError, match="served"):
        mix.load_state_dict(state)


def test_what_a_user_does_to_a_batch_is_seen_in_no_other(roots: list[str]) -> None:
    touched = MixedInput(sources(roots), batch_size=64)
    left = MixedInput(sources(roots), batch_size=64)
    kept = []
    for number in range(60):
        one, other = touched.sample(), left.sample()
        assert one.equals(other)
        kept.append(one)
        for column in one.values():
            column[...] = number % 2
    for number, batch in enumerate(kept):
        assert all((column == number % 2).all() for column in batch.values())


@pytest.mark.parametrize("other", [Live(None), Counting(None)])
def test_beside_a_source_that_is_not_settled_nothing_is_read_ahead(
    roots: list[str], other: InputReader
) -> None:
    pairs = [(DatasetReader(roots[0], batch_size=10, columns=["t"]), 0.5), (other, 0.5)]
    mix = MixedInput(pairs, batch_size=20, columns="intersect")
    assert not ahead_of(mix)


def follower(root: str) -> InputReader:
    return FollowReader(root, idle_timeout=0, batch_size=10)


def a_rank(root: str) -> InputReader:
    return DatasetReader(root, shard=(0, 2), cache="none", batch_size=10)


def dropping(root: str) -> InputReader:
    return DatasetReader(root, drop_last=True, cache="none", batch_size=10)


def drawn_by_priority(root: str) -> InputReader:
    return ReplayStore.open(root).prioritised(batch_size=10, seed=0)


def live_store(root: str) -> InputReader:
    live = ReplayStore(1000)
    live.append(rows(0, 100))
    return live.uniform(batch_size=10, seed=0)


@pytest.mark.few(2)
@pytest.mark.parametrize("make", [follower, a_rank, dropping, drawn_by_priority, live_store])
def test_readers_whose_rows_depend_on_when_they_are_asked_are_not_settled(
    roots: list[str], make: Callable[[str], InputReader]
) -> None:
    with make(roots[0]) as reader:
        assert not reader.can_read_ahead
        pairs = [(DatasetReader(roots[1], cache="none", batch_size=10), 0.5), (reader, 0.5)]
        assert not ahead_of(MixedInput(pairs, batch_size=20, columns="intersect"))


def test_a_reader_that_is_derived_from_one_of_ours_is_asked_as_its_author_meant(roots: list[str]) -> None:
    class Doubled(DatasetReader):
        def _next(self) -> Batch:
            batch = super()._next()
            batch["rewards"] *= 2
            return batch

    mix = MixedInput([(Doubled(roots[0], cache="none", batch_size=10), 1)], batch_size=10)
    for _ in range(30):
        batch = mix.sample()
        np.testing.assert_array_equal(batch["rewards"], 2 * batch["t"])


@pytest.mark.further
def test_no_more_is_read_ahead_than_a_block_of_rows_or_bytes(
    roots: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = sources(roots)
    mix = MixedInput(pairs, batch_size=8)
    most = 0
    for _ in range(500):
        mix.sample()
        assert mix.counts  # What was given of the block does not wait any more.
        most = max(most, sum(source.waiting_units() for source in mix._sources))
    assert MOST_AHEAD // 2 < most <= MOST_AHEAD
    wide = rows(0, 500, image=np.zeros((500, 60, 60), np.uint8))
    monkeypatch.setattr("rlio.readers.mixed_input._AHEAD_BYTES", 1 << 18)
    readers = [(DatasetReader(store(wide), cache="none", batch_size=50), 1) for _ in range(2)]
    mix = MixedInput(readers, batch_size=50)
    assert not ahead_of(mix)


def damaged(count: int, *, shard: int) -> tuple[str, Callable[[], None]]:
    """Rows in six shards, one of them damaged; and what repairs it."""
    root = store(rows(0, count), roll=Roll(max_rows=count // 6, max_seconds=None), writer_id=A)
    path, data = list(files(root).items())[shard]
    put(path, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    return root, lambda: put(path, data)


def test_damage_ahead_is_raised_where_it_is_come_to_and_not_before() -> None:
    root, repair = damaged(6000, shard=4)
    whole = store(rows(10_000, 500))

    def make() -> list[tuple[InputReader, float]]:
        readers = [DatasetReader(each, cache="none", batch_size=16) for each in (root, whole)]
        return [(reader, 0.5) for reader in readers]

    ahead, plain = MixedInput(make(), batch_size=64), one_by_one(make(), batch_size=64)
    given = blocks = 0
    for _ in range(130):
        one, other = outcome(ahead), outcome(plain)
        assert_alike(one, other)
        assert ahead.counts == plain.counts
        given += isinstance(one, SampleBatch)
        blocks += ahead._block is not None
    assert one == "CorruptData"
    assert given == 4000 // 32
    assert blocks > 60
    repair()  # It was the network.
    for _ in range(10):
        assert ahead.sample().equals(plain.sample())


@pytest.mark.further
def test_skipped_damage_is_counted_and_rows_after_it_move_up() -> None:
    root, _ = damaged(600, shard=2)
    whole = store(rows(10_000, 500))

    def make() -> list[tuple[InputReader, float]]:
        broken = DatasetReader(root, cache="none", batch_size=16, on_error="skip")
        return [(broken, 0.5), (DatasetReader(whole, cache="none"), 0.5)]

    ahead, plain = MixedInput(make(), batch_size=16), one_by_one(make(), batch_size=16)
    for _ in range(200):
        assert ahead.sample().equals(plain.sample())
    assert ahead._block is not None
    assert ahead.skipped > 0
    ahead.close()


@pytest.mark.further
def test_unlike_columns_are_joined_as_the_option_says(roots: list[str]) -> None:
    other = store(rows(0, 300, extra=np.zeros(300)))

    def make() -> list[tuple[InputReader, float]]:
        return [
            (DatasetReader(roots[0], cache="none", batch_size=10), 0.5),
            (DatasetReader(other, cache="none", batch_size=10), 0.5),
        ]

    for columns in ("intersect", "fill"):
        ahead = MixedInput(make(), batch_size=20, columns=columns)
        plain = one_by_one(make(), batch_size=20, columns=columns)
        for _ in range(30):
            assert_alike(ahead.sample(), plain.sample())
    with pytest.raises(ValueError, match="extra"):
        MixedInput(make(), batch_size=20).sample()


def test_rows_that_say_where_they_are_from_say_the_rest_of_the_way() -> None:
    root = store(rows(0, 200, source=np.arange(200)))
    for cache in ("none", "memory"):
        readers = [
            DatasetReader(root, cache=cache, shuffle=True, seed=seed, batch_size=10) for seed in (1, 2)
        ]
        mix = MixedInput(dict(zip("ab", readers, strict=True)), batch_size=20, source_column=True)
        for _ in range(30):
            batch = mix.sample()
            assert isinstance(batch, SampleBatch)
            expected = [f"{'ab'[row >= 10]}/{t}" for row, t in enumerate(batch["t"])]
            assert batch["source"].tolist() == expected


def test_one_block_at_a_time_is_kept(tmp_path: Path) -> None:
    """A batch that is dropped before the next block gives its memory back to it."""
    root = store(rows(0, 3000), root=str(tmp_path))
    mix = MixedInput(
        [(DatasetReader(root, cache="none", batch_size=64), 0.5), (DatasetReader(root, cache="none"), 0.5)],
        batch_size=512,
    )
    seen = set()
    for _ in range(60):
        batch = mix.sample()
        seen.add(batch["obs"].__array_interface__["data"][0])
        del batch
    assert len(seen) <= 9


def test_weaving_takes_rows_of_each_source_in_order_across_its_parts() -> None:
    parts = [[rows(0, 3), rows(3, 0), rows(3, 9)], [], [rows(100, 10)]]
    shares = [[2, 0, 1], [0, 0, 4], [7, 0, 0], [1, 0, 0]]
    columns = woven(parts, shares, Buffers())
    assert columns is not None
    assert columns["t"].tolist() == [0, 1, 100, 101, 102, 103, 104, *range(2, 10)]
    block = MixBlock({"t": np.arange(6)}, shares=[[2, 1], [0, 3]], batch_size=3)
    assert block.settle() == []
    assert block.cut()["t"].tolist() == [0, 1, 2]
    assert block.settle() == [2, 1]
    assert block.cut()["t"].tolist() == [3, 4, 5]
    assert block.is_spent
    assert block.settle() == [0, 3]


@pytest.mark.parametrize(
    "odd",
    [
        rows(0, 4, text=np.array(list("abcd"), object)),
        rows(0, 4, extra=np.zeros(4)),
        SampleBatch({**rows(0, 4), "t": np.arange(4, dtype=np.int32)}),
        SampleBatch({**rows(0, 4), "obs": np.zeros((4, 2), np.float32)}),
        SampleBatch({**rows(0, 4), "obs": {"a": np.zeros((4, 2))}}),
        SampleBatch({**rows(0, 4), "seq_lens": np.array([4])}),
    ],
)
def test_what_is_not_plain_rows_of_one_kind_is_not_woven(odd: SampleBatch) -> None:
    assert woven([[rows(0, 4)], [odd]], [[1, 1]], Buffers()) is None
