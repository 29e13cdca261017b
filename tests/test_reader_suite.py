"""The conformance suite of readers, on rows that are hard to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rlio import NoopOutput
from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.errors import EndOfData, SchemaError
from rlio.reader import InputReader, JsonState
from rlio.testing import ReaderTests, WriterTests, assert_resumes, assert_same


def rows() -> SampleBatch:
    """Rows of which only the objects differ, and these cannot be ordered."""
    infos = np.empty(5, object)
    infos[:] = [{"x": np.float32([3])}, None, "text", {"x": 1}, 2.5]
    return SampleBatch(obs={"a": np.zeros((5, 2, 2))}, infos=infos)


class Backwards(InputReader):
    """Serves `rows` from the last to the first, and forgets ``lost`` of them."""

    def __init__(self, lost: int = 0) -> None:
        self.at = 5
        self.lost = lost

    def _next(self) -> SampleBatch:
        if self.at == self.lost:
            raise EndOfData("all rows were read")
        self.at -= 1
        row: SampleBatch = rows()[self.at : self.at + 1]
        return row

    def _position(self) -> JsonState:
        return {"at": self.at}

    def _seek(self, position: JsonState) -> None:
        self.at = position["at"]


class TestBackwards(ReaderTests):
    """Rows in any order are compared whatever their objects are."""

    ordered: ClassVar[bool] = False

    def make_reader(self) -> Backwards:
        return Backwards()

    def expected_rows(self) -> SampleBatch:
        return rows()


def test_a_lost_row_of_objects_is_noticed() -> None:
    class Losing(TestBackwards):
        def make_reader(self) -> Backwards:
            return Backwards(lost=1)

    with pytest.raises(AssertionError, match="the rows of one pass"):
        Losing().test_one_pass_gives_the_expected_rows()


def test_rows_in_another_order_are_noticed_where_order_counts() -> None:
    class Ordered(TestBackwards):
        ordered: ClassVar[bool] = True

    with pytest.raises(AssertionError, match="column 'infos'"):
        Ordered().test_one_pass_gives_the_expected_rows()


def test_an_endless_reader_that_is_said_to_end_fails_and_does_not_hang() -> None:
    class Ones(InputReader):
        def _next(self) -> SampleBatch:
            return SampleBatch(rewards=[1.0])

    class Suite(ReaderTests):
        def make_reader(self, **options: Any) -> InputReader:
            return Ones()

        def expected_rows(self) -> None:
            return None

    with pytest.raises(AssertionError, match="set finite = False"):
        Suite().test_iteration_stops_and_the_end_stays_the_end()


def test_a_state_that_is_saved_right_after_it_was_loaded_has_to_be_good() -> None:
    class Forgetting(Backwards):
        """Loads every state, and until it has read on, saves the first one again."""

        read_on = True

        def _next(self) -> SampleBatch:
            self.read_on = True
            return super()._next()

        def _position(self) -> JsonState:
            return super()._position() if self.read_on else {"at": 5}

        def _seek(self, position: JsonState) -> None:
            super()._seek(position)
            self.read_on = False

    with pytest.raises(AssertionError, match="saved again"):
        assert_resumes(Forgetting)


def test_every_state_is_restored_and_every_fourth_remainder_followed_to_its_end() -> None:
    class Misled(InputReader):
        """Restored before batch ``wrong_from``, gives a wrong row as batch ``wrong_at``, of 14."""

        def __init__(self, wrong_from: int, wrong_at: int) -> None:
            self.wrong_from, self.wrong_at = wrong_from, wrong_at
            self.at, self.restored = 0, -1

        def _next(self) -> SampleBatch:
            if self.at == 14:
                raise EndOfData("fourteen batches")
            self.at += 1
            wrong = self.restored == self.wrong_from and self.at - 1 == self.wrong_at
            return SampleBatch(t=[-1 if wrong else self.at])

        def _position(self) -> JsonState:
            return {"at": self.at}

        def _seek(self, position: JsonState) -> None:
            self.at = self.restored = position["at"]

    for wrong_from in range(14):
        for wrong_at in {wrong_from, min(wrong_from + 2, 13), 13 if wrong_from % 4 == 0 else wrong_from}:
            with pytest.raises(
                AssertionError, match=f"number {wrong_at}, restored before number {wrong_from}"
            ):
                assert_resumes(lambda wrong=(wrong_from, wrong_at): Misled(*wrong))


ONE = SampleBatch(x=[1])


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (None, ONE, "the batch: a NoneType, expected a SampleBatch"),
        (ONE, MultiAgentBatch({"p": ONE}, 1), "the batch: a SampleBatch, expected a MultiAgentBatch"),
        (SampleBatch(x=[1, 2]), ONE, "the batch: column 'x': its values are int64 (2,), expected int64 (1,)"),
        (SampleBatch(x=[3]), ONE, "the batch: column 'x': rows [0] of 1 differ: [3], expected [1]"),
        (SampleBatch(x={"a": [1]}), ONE, "the batch: column 'x': its leaves are ['a'], expected ['']"),
        (
            MultiAgentBatch({"p": ONE}, 1),
            MultiAgentBatch({"p": SampleBatch(x={"a": [1]})}, 1),
            "the batch: policy 'p': column 'x': its leaves are [''], expected ['a']",
        ),
        (
            MultiAgentBatch({"p": ONE}, 1),
            MultiAgentBatch({"p": ONE}, 2),
            "the batch: its env steps are 1, expected 2",
        ),
    ],
)
def test_a_difference_is_told_in_words(found: Any, expected: Batch, message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_same(found, expected)
    assert str(caught.value) == message


def test_a_writer_that_takes_what_does_not_fit_is_told_what_it_took(tmp_path: Path) -> None:
    class Taking(WriterTests):
        def make_writer(self, root: Path) -> NoopOutput:
            return NoopOutput()

    with pytest.raises(AssertionError, match=r"write\(\) of another dtype must raise SchemaError"):
        Taking().test_a_batch_that_does_not_fit_is_refused_and_nothing_is_lost(tmp_path)


def test_tests_keep_their_names() -> None:
    """Subclasses override and deselect them by name."""
    assert hasattr(ReaderTests, "test_a_foreign_state_raises")


@pytest.mark.parametrize("given", [{"t": [0, 1]}, None, [SampleBatch(t=[0])]])
def test_a_reader_that_gives_no_batch_is_refused(given: Any) -> None:
    """A dict came out of `sample()`, and was an AttributeError in `sample(3)`."""
    with type("Mine", (InputReader,), {"_next": lambda self: given})() as reader:
        for size in (None, 3):
            with pytest.raises(SchemaError, match=r"Mine\._next\(\) gave .*: expected a SampleBatch"):
                reader.sample(size)


@pytest.mark.parametrize(
    "more", [{}, {"_position": dict, "_seek": lambda self, position: None}, {"replayable": False}]
)
def test_a_reader_without_a_position_says_that_it_begins_anew(
    more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows were given a second time, in silence."""
    kind = type("Mine", (InputReader,), {"_next": lambda self: SampleBatch(t=[0, 1]), **more})
    with kind() as one, kind() as other:
        one.sample()
        other.load_state_dict(one.state_dict())
    assert ("Mine has no _position and _seek: it begins anew" in caplog.text) is (not more)
