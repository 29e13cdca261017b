"""Links and stacks as functions: equal to the plain rule, and damage in them is seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch.ragged import Ragged
from rlio.errors import CorruptData
from rlio.schemas.column import FrameStack
from rlio.schemas.frame_pools import StackPool, pool_stacks
from rlio.schemas.observations import (
    MISSING,
    STORED,
    SplitStack,
    detect_stack,
    link,
    previous_rows,
    resolve_links,
    stack_places,
    successors,
)

streams = st.lists(st.integers(0, 3), max_size=30).map(lambda s: np.array(s, np.int32))


@given(streams)
def test_the_successor_is_the_next_row_of_the_same_stream(stream: np.ndarray) -> None:
    following = successors(stream)
    for i, number in enumerate(stream.tolist()):
        later = [j for j in range(i + 1, len(stream)) if stream[j] == number]
        assert following[i] == (later[0] if later else -1)


@given(streams, st.integers(0, 2**31), st.sampled_from([np.uint8, np.float32, np.float64, np.bool_]))
@settings(max_examples=60, deadline=None)
def test_links_lead_to_equal_bytes_and_give_new_obs_back(stream: np.ndarray, seed: int, dtype: type) -> None:
    rng = np.random.default_rng(seed)
    rows = len(stream)
    obs = rng.integers(0, 2, (rows, 3)).astype(dtype)
    new_obs = rng.integers(0, 2, (rows, 3)).astype(dtype)
    following = successors(stream)
    repeat = (following >= 0) & (rng.random(rows) < 0.7)
    new_obs[repeat] = obs[following[repeat]]
    missing = rng.random(rows) < 0.1
    new_obs[missing] = 0
    distance = link([(obs, new_obs)], following, missing)
    assert (distance[repeat & ~missing] == (following - np.arange(rows))[repeat & ~missing]).all()
    assert (distance[missing] == MISSING).all()
    back = resolve_links(distance, obs, new_obs[distance == STORED])
    assert back.tobytes() == new_obs.tobytes()


@given(streams, st.integers(0, 2**31), st.sampled_from([(), (2,)]))
@settings(max_examples=60, deadline=None)
def test_linked_rows_of_any_length_are_copies_in_one_array(
    stream: np.ndarray, seed: int, item: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(seed)
    rows = len(stream)
    following = successors(stream)
    linked = (following >= 0) & (rng.random(rows) < 0.7)
    distance = np.where(linked, following - np.arange(rows), STORED)
    distance[rng.random(rows) < 0.1] = MISSING

    def column(count: int) -> np.ndarray:
        ends = np.concatenate([[0], np.cumsum(rng.integers(0, 4, count))]).astype(np.int64)
        return Ragged(rng.integers(0, 99, (ends[-1], *item)), ends).rows()

    obs, stored = column(rows), column(int((distance == STORED).sum()))
    left = iter(stored.tolist())
    expected = [
        np.empty((0, *item), np.int64) if k == MISSING else next(left) if k == STORED else obs[row + k]
        for row, k in enumerate(distance.tolist())
    ]
    back = resolve_links(distance.astype(np.int32), obs, stored)
    assert all(map(np.array_equal, back, expected))
    assert len(back) == rows
    assert {row.shape[1:] for row in back} <= {item}
    if rows:
        items = Ragged.of(back)
        assert not np.shares_memory(items.values, Ragged.of(obs).values)
        assert all(np.shares_memory(items.values, row) for row in back if len(row))


def test_a_link_needs_all_leaves_to_be_equal() -> None:
    a, b = np.arange(4.0), np.arange(4.0)
    distance = link([(a, a + 1), (b, b + 2)], successors(np.zeros(4, np.int32)), None)
    assert distance.tolist() == [0, 0, 0, 0]
    assert link([(a, a + 1)], successors(np.zeros(4, np.int32)), None).tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("distance", "stored"), [([1, 3, 0], 1), ([1, -2, 0], 1), ([1, 1, 0], 2), ([0, 0, 0], 1)]
)
def test_links_that_lead_nowhere_are_damage(distance: list[int], stored: int) -> None:
    with pytest.raises(CorruptData):
        resolve_links(np.array(distance, np.int32), np.zeros((3, 2)), np.zeros((stored, 2)))


@given(
    streams,
    st.integers(2, 5),
    st.sampled_from([0, 2]),
    st.sampled_from([np.uint8, np.float16, np.float32, ">i2"]),
    st.booleans(),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_stacks_come_back_from_frames(
    stream: np.ndarray, depth: int, axis: int, dtype: str, lies: bool, seed: int
) -> None:
    """What is stored is what the bytes say, however the arrays lie and whatever rows were pooled together."""
    rng = np.random.default_rng(seed)
    rows, following = len(stream), successors(stream)
    obs, new_obs = (rng.integers(0, 4, (rows, depth, 2, 3)).astype(dtype) for _ in range(2))
    for i in range(rows):
        if rng.random() < 0.8:
            new_obs[i, :-1] = obs[i, 1:]
        if following[i] >= 0 and rng.random() < 0.8:
            obs[following[i]] = new_obs[i]
    if axis:
        obs, new_obs = np.moveaxis(obs, 1, 3), np.moveaxis(new_obs, 1, 3)
    if not lies:
        obs, new_obs = np.ascontiguousarray(obs), np.ascontiguousarray(new_obs)
    known = np.where(rng.random(rows) < 0.9, following, -1)  # As where pieces end.
    pool = pool_stacks(obs, new_obs, FrameStack(axis, depth), known)
    for values, places in ((obs, pool.obs), (new_obs, pool.new_obs)):
        assert np.moveaxis(pool.frames.at(places), 1, axis + 1).tobytes() == values.tobytes()
    split = pool.split_obs(previous_rows(following))
    frames = np.moveaxis(obs, axis + 1, 1)
    leans = [
        before >= 0 and frames[before, 1:].tobytes() == frames[row, :-1].tobytes()
        for row, before in enumerate(previous_rows(following).tolist())
    ]
    assert split.full.tolist() == [not lean for lean in leans]
    chosen = np.flatnonzero(rng.random(rows) < 0.5)
    newer = pool.split_new_obs(chosen)
    stack = FrameStack(axis, depth)
    read = StackPool.of_split(split, newer, stack=stack, following=following, stored=chosen)
    for values, places in ((obs, read.obs), (new_obs[chosen], read.new_obs)):
        back = np.moveaxis(read.frames.at(places), 1, axis + 1)
        assert back.dtype == obs.dtype
        assert back.tobytes() == values.tobytes()
    split = newer
    theirs = np.moveaxis(new_obs, axis + 1, 1)[chosen]
    assert split.newest.tobytes() == theirs[:, -1].tobytes()
    assert split.older.tobytes() == theirs[split.full, :-1].tobytes()
    own = [theirs[i, :-1].tobytes() == frames[row, 1:].tobytes() for i, row in enumerate(chosen.tolist())]
    assert split.full.tolist() == [not same for same in own]


def test_frames_of_rows_that_follow_each_other_are_kept_once() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (24, 6, 5), np.uint8)
    first = np.stack([frames[i : i + 4] for i in range(21)])
    for stacks, axis in ((first, 0), (np.ascontiguousarray(np.moveaxis(first, 1, 3)), 2)):
        along = successors(np.zeros(20, np.int32))
        assert len(pool_stacks(stacks[:-1], stacks[1:], FrameStack(axis, 4), along).frames) == 24
        two = np.concatenate(
            [np.arange(2, 20), [-1, -1]]
        )  # Two streams in turn: nothing but each row itself fits.
        assert len(pool_stacks(stacks[:-1], stacks[1:], FrameStack(axis, 4), two).frames) > 24


def test_a_stack_that_leans_on_no_row_is_damage() -> None:
    split = SplitStack(np.zeros((2, 3, 3), np.uint8), np.zeros((0, 1, 3, 3), np.uint8), np.zeros(2, bool))
    with pytest.raises(CorruptData, match="stack"):
        stack_places(split.full, np.array([1, -1]), 2)
    split = SplitStack(split.newest, split.older, np.array([True, False]))
    with pytest.raises(CorruptData, match="stack"):
        StackPool.of_split(
            split, None, stack=FrameStack(0, 2), following=np.array([1, -1]), stored=np.arange(2)
        )


def test_stacks_are_found_by_their_overlap_and_nothing_else_is() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (20, 6, 5), np.uint8)
    first = np.stack([frames[i : i + 4] for i in range(16)])
    last = np.moveaxis(first, 1, 3)
    assert detect_stack(first[:-1], first[1:]) == FrameStack(0, 4)
    assert detect_stack(last[:-1], last[1:]) == FrameStack(2, 4)
    assert detect_stack(first[:4], first[1:5]) is None  # Too few to tell.
    assert detect_stack(first[:-1], first[:0:-1]) is None
    assert detect_stack(frames[:-1], frames[1:]) is None
