"""Shuffling loses and repeats nothing, is a function of the seed, and resumes in the middle of a window."""

from __future__ import annotations

import json
import logging
from collections import Counter

import pytest
from counting import Counting, Live, numbers, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch import Batch, MultiAgentBatch
from rlio.errors import CorruptData, EndOfData, OptionError, StateError
from rlio.reader import InputReader
from rlio.readers.shuffled_input import ShuffledInput
from rlio.testing import ReaderTests, assert_resumes


class TestShuffledReader(ReaderTests):
    ordered = False

    def make_reader(self) -> InputReader:
        return ShuffledInput(Counting(41, (4, 1, 6)), 5, seed=3)

    def expected_rows(self) -> Batch:
        return rows_of(0, 41)


class TestEndlessShuffledReader(ReaderTests):
    finite = False

    def make_reader(self) -> InputReader:
        return ShuffledInput(Counting(None, (4, 1, 6)), 5, seed=3)

    def expected_rows(self) -> None:
        """An endless shuffle has no pass to compare; the laws below look at windows."""


@pytest.mark.few(2)
@pytest.mark.parametrize("n", [0, 1, 2, 10, 1000])
def test_one_pass_gives_exactly_the_childs_batches_for_any_window(n: int) -> None:
    batches = list(ShuffledInput(Counting(2004, (2,)), n, seed=5))
    firsts = [int(batch["t"][0]) for batch in batches]
    assert Counter(firsts) == Counter(range(0, 2004, 2))
    assert all(len(batch) == 2 for batch in batches)


@given(total=st.integers(0, 60), n=st.integers(0, 20), seed=st.integers(0, 2**64))
@settings(max_examples=100, deadline=None)
def test_every_window_is_a_permutation_of_its_batches(total: int, n: int, seed: int) -> None:
    order = numbers(list(ShuffledInput(Counting(total, (1,)), n, seed=seed)))
    size = max(n, 1)
    for start in range(0, total, size):
        assert sorted(order[start : start + size]) == list(range(start, min(start + size, total)))


def test_windows_of_0_and_1_keep_the_order_and_pass_sizes_on() -> None:
    for n in (0, 1):
        reader = ShuffledInput(Counting(20, (5,)), n, seed=0)
        assert numbers(list(reader)) == list(range(20))


def test_the_order_depends_on_the_seed_and_on_the_window() -> None:
    def order(seed: int) -> list[int]:
        return numbers(list(ShuffledInput(Counting(60, (1,)), 20, seed=seed)))

    assert order(1) == order(1)
    assert order(1) != order(2)
    windows = [[number - start for number in order(1)[start : start + 20]] for start in (0, 20, 40)]
    assert len({tuple(window) for window in windows}) == 3


def test_a_seed_from_the_os_is_logged_and_kept_in_the_state(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rlio"):
        reader = ShuffledInput(Counting(50, (1,)), 10, seed=None)
    assert f"seed={reader.seed}" in caplog.text
    reader.sample()
    restored = ShuffledInput(Counting(50, (1,)), 10, seed=None)
    assert restored.seed != reader.seed
    restored.load_state_dict(json.loads(json.dumps(reader.state_dict())))
    assert numbers(list(restored)) == numbers(list(reader))


@pytest.mark.few(2)
@pytest.mark.parametrize("n", [0, 1, 2, 5, 1000])
def test_a_shuffle_resumes_before_every_batch(n: int) -> None:
    for asked in (None, 1, 7):
        assert_resumes(lambda: ShuffledInput(Counting(45, (4, 1, 6)), n, seed=9), asked)


def test_a_shuffle_of_a_shuffle_resumes() -> None:
    assert_resumes(lambda: ShuffledInput(ShuffledInput(Counting(45), 3, seed=9), 4, seed=1), 5)


def test_the_state_is_the_childs_at_the_windows_start_and_an_index() -> None:
    child = Counting(40, (4,))
    reader = ShuffledInput(child, 4, seed=0)
    before = child.state_dict()
    reader.sample()
    position = reader.state_dict()["position"]
    assert (position["window"], position["index"], position["child"]) == (0, 1, before)
    for _ in range(3):
        reader.sample()
    position = reader.state_dict()["position"]
    assert (position["window"], position["index"], position["child"]) == (1, 0, child.state_dict())


def test_live_batches_that_wait_are_dropped_and_counted_on_restoring() -> None:
    reader = ShuffledInput(Live(None, (3,)), 4, seed=0)
    reader.sample()
    restored = ShuffledInput(Live(None, (3,)), 4, seed=0)
    restored.load_state_dict(json.loads(json.dumps(reader.state_dict())))
    assert restored.dropped == 9
    assert sorted(numbers([restored.sample() for _ in range(4)])) == list(range(12, 24))
    assert reader.dropped == 0


def test_batches_that_were_read_before_an_error_are_served_after_it() -> None:
    class Flaky(Counting):
        failed = False

        def _next(self) -> Batch:
            if self.number == 2 and not self.failed:
                self.failed = True
                raise CorruptData("bad", record=2)
            return super()._next()

    reader = ShuffledInput(Flaky(15, (3,)), 4, seed=0)
    with pytest.raises(CorruptData):
        reader.sample()
    state = json.loads(json.dumps(reader.state_dict()))
    assert sorted(numbers(list(reader))) == list(range(15))
    restored = ShuffledInput(Counting(15, (3,)), 4, seed=0)
    state["position"]["child"]["reader"] = "Counting"
    restored.load_state_dict(state)
    assert sorted(numbers(list(restored))) == list(range(15))


def test_data_that_shrank_under_a_state_raises() -> None:
    reader = ShuffledInput(Counting(12, (3,)), 4, seed=0)
    for _ in range(3):
        reader.sample()
    state = reader.state_dict()
    shrunk = ShuffledInput(Counting(6, (3,)), 4, seed=0)
    shrunk.load_state_dict(state)
    with pytest.raises(StateError, match="after 3 batches of window 0, but the window has 2"):
        shrunk.sample()
    state["position"]["order"] = 99
    with pytest.raises(StateError, match=r"order.*99"):
        shrunk.load_state_dict(state)


def test_an_empty_child_ends_at_once_and_again() -> None:
    reader = ShuffledInput(Counting(0), 4, seed=0)
    for _ in range(2):
        with pytest.raises(EndOfData):
            reader.sample()


def test_illegal_arguments_raise() -> None:
    with pytest.raises(OptionError, match="n=-1"):
        ShuffledInput(Counting(3), -1, seed=0)
    with pytest.raises(OptionError, match=r"rlio\.read"):
        ShuffledInput("path", 1, seed=0)  # type: ignore[arg-type]  # on purpose


def test_closing_closes_the_child() -> None:
    child = Counting(30)
    reader = ShuffledInput(child, 4, seed=0)
    reader.sample()
    reader.close()
    assert child.closed == 1


def test_batches_of_agents_are_shuffled_like_any_other() -> None:
    from counting import Agents

    batches = list(ShuffledInput(Agents(30, (3,)), 4, seed=0))
    assert all(isinstance(batch, MultiAgentBatch) for batch in batches)
    assert sorted(int(batch["even"]["t"][0]) for batch in batches) == list(range(0, 30, 3))


@pytest.mark.parametrize("other", [1, 3, 5])
def test_a_state_of_another_window_is_refused(other: int) -> None:
    """Batches were served twice, and others never: the rest of the window was that of another permutation."""
    reader = ShuffledInput(Counting(40, (1,)), 4, seed=3)
    for _ in range(6):
        reader.sample()
    state = json.loads(json.dumps(reader.state_dict()))
    with pytest.raises(StateError, match="'n'"):
        ShuffledInput(Counting(40, (1,)), other, seed=3).load_state_dict(state)
    del state["position"]["n"]  # Earlier states do not hold it.
    again = ShuffledInput(Counting(40, (1,)), 4, seed=3)
    again.load_state_dict(state)
    assert numbers(list(again)) == numbers(list(reader))
