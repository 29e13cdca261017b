"""Links and stacks as functions: equal to the plain rule, and damage in them is seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.errors import CorruptData
from rlio.schemas.column import FrameStack
from rlio.schemas.observations import (
    MISSING,
    STORED,
    SplitStack,
    detect_stack,
    join_stack,
    link,
    resolve_links,
    split_stack,
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


@given(streams, st.integers(2, 5), st.sampled_from([0, 2]), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_stacks_come_back_from_frames(stream: np.ndarray, depth: int, axis: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, following = len(stream), successors(stream)
    values = rng.integers(0, 256, (rows, depth, 2, 3), np.uint8)
    for i in np.flatnonzero(following >= 0).tolist():
        if rng.random() < 0.8:
            values[following[i], :-1] = values[i, 1:]
    if axis:
        values = np.ascontiguousarray(np.moveaxis(values, 1, 3))
    stack = FrameStack(axis, depth)
    before = np.flatnonzero(following >= 0)
    split = split_stack(values, stack, values[before], following[before])
    assert len(split.older) == split.full.sum()
    back = join_stack(split, stack, following)
    assert back.dtype == values.dtype
    assert back.tobytes() == values.tobytes()


def test_a_stack_that_leans_on_no_row_is_damage() -> None:
    split = SplitStack(np.zeros((2, 3, 3), np.uint8), np.zeros((0, 1, 3, 3), np.uint8), np.zeros(2, bool))
    with pytest.raises(CorruptData, match="stack"):
        join_stack(split, FrameStack(0, 2), np.array([1, -1]))
    split = SplitStack(split.newest, split.older, np.array([True, False]))
    with pytest.raises(CorruptData, match="stack"):
        join_stack(split, FrameStack(0, 2), np.array([1, -1]))


def test_stacks_are_found_by_their_overlap_and_nothing_else_is() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (20, 6, 5), np.uint8)
    first = np.stack([frames[i : i + 4] for i in range(16)])
    last = np.moveaxis(first, 1, 3)
    assert detect_stack(first[:-1], first[1:]) == FrameStack(0, 4)
    assert detect_stack(last[:-1], last[1:]) == FrameStack(2, 4)
    assert detect_stack(first[:4], first[1:5]) is None  # Too few to tell.
    assert detect_stack(first[:-1], first[:0:-1]) is None
    assert detect_stack(frames[:-1], frames[1:]) is None
