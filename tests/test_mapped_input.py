"""Functions over batches: applied in order to the child's own batches, in any size asked for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from counting import Counting, Live, numbers, rows_of

from rlio.batch import Batch, SampleBatch
from rlio.errors import OptionError
from rlio.reader import InputReader
from rlio.readers.mapped_input import MappedInput
from rlio.testing import ReaderTests


def add_total(batch: Batch) -> Batch:
    """A column that looks across the rows of a batch."""
    assert isinstance(batch, SampleBatch)
    batch["total"] = np.full(len(batch), batch["t"].sum())
    return batch


def keep_even(batch: Batch) -> Batch:
    assert isinstance(batch, SampleBatch)
    return batch[batch["t"] % 2 == 0]


class TestMapped(ReaderTests):
    def make_reader(self) -> InputReader:
        return MappedInput(Counting(41, (4, 1, 6)), add_total, keep_even)

    def expected_rows(self) -> Batch:
        rows = rows_of(0, 41)
        edges = np.cumsum([0] + [(4, 1, 6)[i % 3] for i in range(12)]).clip(max=41)
        totals = [sum(range(a, b)) for a, b in itertools.pairwise(edges) for _ in range(a, b)]
        rows["total"] = np.asarray(totals)
        return rows[rows["t"] % 2 == 0]


def test_functions_are_applied_in_their_order() -> None:
    batch = MappedInput(Counting(None, (4,)), add_total, keep_even).sample()
    assert batch["total"].tolist() == [6, 6]
    batch = MappedInput(Counting(None, (4,)), keep_even, add_total).sample()
    assert batch["total"].tolist() == [2, 2]


def test_functions_see_whole_batches_whatever_size_is_asked_for() -> None:
    seen = []

    def look(batch: Batch) -> Batch:
        seen.append(len(batch))
        return batch

    reader = MappedInput(Counting(None, (4, 7)), look)
    for n in (1, 5, 2, 9):
        reader.sample(n)
    assert seen == [4, 7, 4, 7]


def test_without_functions_it_is_the_child() -> None:
    assert numbers(list(MappedInput(Counting(10)))) == list(range(10))


def test_a_function_that_returns_no_batch_raises_and_is_named() -> None:
    def forgot(batch: Batch) -> None:
        """Changes the batch in place and returns nothing."""

    with pytest.raises(OptionError, match=r"forgot returned None"):
        MappedInput(Counting(10), forgot).sample()  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("arguments", [("path",), (Counting(3), "clip")])
def test_illegal_arguments_raise(arguments: Any) -> None:
    with pytest.raises(OptionError, match="MappedInput takes"):
        MappedInput(*arguments)


def test_it_is_what_its_child_is_and_closes_it() -> None:
    child = Live(None)
    reader = MappedInput(child, add_total)
    assert not reader.replayable
    reader.close()
    assert child.closed == 1
