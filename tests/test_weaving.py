"""Stacks of a last axis, woven into C order: the same values and dtype, whatever lies how."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlio.batch import in_c_order


@given(
    st.integers(0, 40),
    st.sampled_from([1, 2, 3, 4, 9, 130]),
    st.sampled_from(["u1", "i1", "?", "<u2", ">u2", "<f2", "<f4", ">i4", "<f8", "S1"]),
    st.sampled_from([(3,), (4, 5), (2, 3, 4)]),
    st.sampled_from([1, 2]),
    st.integers(0, 2**31),
)
def test_any_stack_is_what_numpy_makes_of_it(
    rows: int, depth: int, dtype: str, frame: tuple[int, ...], every: int, seed: int
) -> None:
    raw = np.random.default_rng(seed).bytes(rows * depth * int(np.prod(frame)) * np.dtype(dtype).itemsize)
    if dtype == "?":
        raw = bytes(byte & 1 for byte in raw)
    frames = np.frombuffer(raw, dtype).reshape(rows, depth, *frame)
    for stacks in (np.moveaxis(frames, 1, -1)[::every], np.moveaxis(frames, -1, 1)):
        found = in_c_order(stacks)
        assert found.flags.c_contiguous
        assert found.dtype == stacks.dtype
        assert found.shape == stacks.shape
        assert found.tobytes() == stacks.tobytes()


@pytest.mark.parametrize("installed", [False, True])
def test_stacks_are_woven_with_opencv_and_without(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cv2 = pytest.importorskip("cv2")
    called = []
    merge = cv2.merge
    monkeypatch.setattr(cv2, "merge", lambda *args: called.append(args) or merge(*args))
    if not installed:
        monkeypatch.setitem(sys.modules, "cv2", None)
    frames = np.random.default_rng(0).integers(0, 256, (25, 4, 84, 84), np.uint8)
    stacks = np.moveaxis(frames, 1, -1)
    assert in_c_order(stacks).tobytes() == stacks.tobytes()
    assert len(called) == installed


def test_windows_that_overlap_and_rows_that_are_one_are_woven() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (12, 5, 7), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0)
    for stacks in (windows, windows[::-1], np.broadcast_to(windows[3], (6, 5, 7, 4))):
        assert in_c_order(stacks).tobytes() == stacks.tobytes()


def test_what_is_in_c_order_comes_back_itself_and_is_written_to_by_nobody() -> None:
    values = np.zeros((4, 3, 3, 4), np.uint8)
    assert in_c_order(values) is values
    frames = np.zeros((4, 4, 3, 3), np.uint8)
    frames.flags.writeable = False
    woven = in_c_order(np.moveaxis(frames, 1, -1))
    woven[:] = 1
    assert not frames.any()
