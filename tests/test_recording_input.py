"""A recording writes exactly what is served, and is otherwise the reader that it wraps."""

from __future__ import annotations

from typing import Any

import pytest
from counting import Counting, Keeping, Live, numbers, rows_of

from rlio.batch import Batch
from rlio.errors import OptionError
from rlio.reader import InputReader
from rlio.readers.recording_input import RecordingInput
from rlio.testing import ReaderTests, assert_same


class TestRecording(ReaderTests):
    def make_reader(self) -> InputReader:
        return RecordingInput(Counting(31, (4, 1, 6)), Keeping())

    def expected_rows(self) -> Batch:
        return rows_of(0, 31)


@pytest.mark.parametrize("n", [None, 1, 5, 40])
def test_what_is_written_is_what_was_served(n: int | None) -> None:
    writer = Keeping()
    with RecordingInput(Counting(31, (4, 6)), writer) as reader:
        for number in range(1, 4):
            batch = reader.sample(n)
            assert len(writer.batches) == number
            assert_same(writer.batches[-1], batch)
            assert numbers(writer.batches)[-1] == batch["t"][-1]
            if n == 40:
                break


def test_left_over_rows_are_not_written_before_they_are_served() -> None:
    writer = Keeping()
    reader = RecordingInput(Live(None, (10,)), writer)
    reader.sample(3)
    assert writer.rows_received == 3
    reader.sample()
    assert writer.rows_received == 10


def test_a_batch_that_cannot_be_written_is_not_served_and_the_error_says_so() -> None:
    writer = Keeping()
    reader = RecordingInput(Counting(None, (4,)), writer)
    writer.fail = OSError("disk full")
    with pytest.raises(OSError, match="disk full") as caught:
        reader.sample()
    assert caught.value.__notes__ == ["4 steps of Counting were not written and are not served"]
    assert numbers([reader.sample()]) == numbers(writer.batches) == [4, 5, 6, 7]


def test_it_is_replayable_and_counts_as_its_child_does() -> None:
    child = Live(None)
    child.unit = "episodes"
    reader = RecordingInput(child, Keeping())
    assert not reader.replayable
    assert reader.unit == "episodes"


def test_closing_closes_reader_and_writer_even_if_one_fails() -> None:
    class Stuck(Counting):
        def _close(self) -> None:
            raise OSError("stuck")

    writer = Keeping()
    with pytest.raises(OSError, match="stuck"):
        RecordingInput(Stuck(3), writer).close()
    assert writer.closes == 1
    child = Counting(3)
    RecordingInput(child, Keeping()).close()
    assert child.closed == 1


@pytest.mark.parametrize(("child", "writer"), [("path", Keeping()), (Counting(3), "path")])
def test_a_path_in_place_of_a_reader_or_writer_raises(child: Any, writer: Any) -> None:
    with pytest.raises(OptionError, match="RecordingInput takes a"):
        RecordingInput(child, writer)
