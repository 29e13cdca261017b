"""Recycled memory: never in two hands, used again, and no more of it kept than is said."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from crash_child import fork, wait_for
from hypothesis import given
from hypothesis import strategies as st

from rlio.replay.buffers import Buffers, _rounded


def held(array: np.ndarray) -> tuple[int, int]:
    """Where the memory of an array begins and ends."""
    return array.ctypes.data, array.ctypes.data + array.nbytes


def kept_of(array: np.ndarray, how: str) -> Any:
    """What a user may keep of an array after it is gone."""
    if how == "view":
        return array[1:2]
    if how == "bytes":
        return memoryview(array.view(np.uint8).reshape(-1))[8:]
    if how == "tensor":
        return torch.from_numpy(array)[3:]
    if how == "reshaped":
        return torch.from_numpy(array.view(np.int32)).reshape(2, -1)[1]
    return array.T.astype(array.dtype, copy=False).view()


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([600, 640, 1000, 5000]),
            st.sampled_from(["view", "bytes", "tensor", "reshaped", "array"]),
            st.integers(0, 5),
        ),
        max_size=60,
    ),
    most=st.sampled_from([1, 30_000, 1 << 20]),
)
def test_memory_is_in_one_hand_at_a_time(steps: list[tuple[int, str, int]], most: int) -> None:
    """Each array is filled with its number; what is kept of it in any way must go on showing that."""
    buffers, hands = Buffers(keep=3, most=most), []
    for number, (size, how, drop) in enumerate(steps):
        array = buffers.empty((size,), np.int64)
        array[:] = number
        hands.append((number, kept_of(array, how)))
        del array
        if drop < len(hands):
            hands.pop(drop)
        for expected, kept in hands:
            kind = np.int32 if isinstance(kept, torch.Tensor) and kept.dtype == torch.int32 else np.int64
            values = np.frombuffer(kept, np.int64) if isinstance(kept, memoryview) else np.asarray(kept)
            whole = np.frombuffer(values.tobytes(), kind)
            assert set(whole.tolist()) <= ({expected} if kind is np.int64 else {expected, 0})


@pytest.mark.parametrize("size", [4096, 4097, 70_000, 1 << 20, (1 << 20) + 1])
def test_what_is_dropped_is_given_again(size: int) -> None:
    buffers = Buffers()
    first = buffers.empty((size,), np.uint8)
    where = held(first)
    del first
    for _ in range(5):
        assert held(buffers.empty((size,), np.uint8)) == where


def test_batches_of_ever_other_sizes_leave_nothing_behind() -> None:
    """Whole episodes make batches of thousands of sizes, each of which would keep an array for itself."""
    buffers, rng = Buffers(most=1 << 20), np.random.default_rng(0)
    for size in rng.integers(4096, 200_000, 3000).tolist():
        assert buffers.empty((size,), np.uint8).nbytes == size
        kept = sum(len(owner) for owners in buffers._owners.values() for owner in owners)
        assert kept == buffers._bytes <= 1 << 20
    assert len(buffers._owners) < 60


def test_a_size_that_is_asked_for_again_and_again_is_not_forgotten_for_others() -> None:
    buffers = Buffers(most=100_000)
    where = held(buffers.empty((20_000,), np.uint8))
    for size in range(5_000, 50_000, 500):
        buffers.empty((size,), np.uint8)
        assert held(buffers.empty((20_000,), np.uint8)) == where


def test_of_one_size_four_are_kept_however_large() -> None:
    buffers = Buffers(most=1)
    hands = [buffers.empty((1 << 20,), np.uint8) for _ in range(6)]
    places = {held(array) for array in hands}
    assert len(places) == 6
    assert buffers._bytes == 4 << 20
    del hands
    assert {held(buffers.empty((1 << 20,), np.uint8)) for _ in range(4)} <= places


def test_sizes_are_rounded_up_by_an_eighth_at_most() -> None:
    for size in [*range(4096, 20_000), 10**6 + 1, 10**9 + 7]:
        assert size <= _rounded(size) <= size * 9 / 8 + 64


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_does_not_wait_for_a_thread_that_it_left_behind() -> None:
    buffers = Buffers()
    inside, over = threading.Event(), threading.Event()

    def hold() -> None:
        with buffers._lock:
            inside.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = fork(lambda: buffers.empty((10_000,), np.uint8).fill(1))
    try:
        status = wait_for(child)
    finally:
        over.set()
        thread.join()
    assert status == 0
