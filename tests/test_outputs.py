"""Writers that keep nothing, and writers that pass on to several."""

from __future__ import annotations

from typing import Any

import pytest
from counting import Agents, Keeping, rows_of

from rlio.batch import Batch
from rlio.errors import ClosedError, OptionError, SchemaError
from rlio.testing import WriterTests, assert_same
from rlio.writer import OutputWriter
from rlio.writers.noop_output import NoopOutput
from rlio.writers.tee_writer import TeeWriter


class TestTee(WriterTests):
    checks_schema = False

    def make_writer(self, root: Any) -> OutputWriter:
        first, second = Keeping(), Keeping()
        self.__dict__.setdefault("kept", []).append((first, second))
        return TeeWriter(first, second)

    def read_back(self, root: Any) -> Batch:
        from rlio.batch import concat_samples

        for first, second in self.__dict__["kept"]:
            assert_same(first.rows, second.rows, "the two writers")
        return concat_samples([first.rows for first, _ in self.__dict__["kept"]])


def test_a_noop_output_counts_and_keeps_nothing() -> None:
    with NoopOutput() as writer:
        writer.write(rows_of(0, 3))
        writer.write(Agents(4, (4,)).sample())
        assert writer.rows_received == 11
        assert not writer.durable
    with pytest.raises(ClosedError):
        writer.write(rows_of(0, 1))


def test_a_writer_that_fails_does_not_keep_the_others_from_receiving() -> None:
    first, second, third = Keeping(), Keeping(), Keeping()
    tee = TeeWriter(first, second, third)
    first.fail, second.fail = OSError("disk full"), SchemaError("unlike")
    with pytest.raises(OSError, match="disk full") as caught:
        tee.write(rows_of(0, 3))
    assert caught.value.__notes__ == [
        "raised by writer 0 of 3, Keeping",
        "writer 1 of 3, Keeping failed too: SchemaError('unlike')",
    ]
    assert_same(third.rows, rows_of(0, 3))
    assert tee.rows_received == 0
    tee.write(rows_of(3, 5))
    assert (tee.rows_received, first.rows_received, third.rows_received) == (2, 2, 5)


def test_closing_flushes_all_even_if_one_fails_and_can_be_tried_again() -> None:
    first, second = Keeping(), Keeping()
    tee = TeeWriter(first, second)
    first.fail = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        tee.close()
    assert second.flushes >= 1
    first.fail = None
    tee.close()
    assert (first.closes, second.closes) == (1, 1)


def test_a_tee_is_durable_only_if_every_writer_is() -> None:
    class Durable(Keeping):
        durable = True

    assert TeeWriter(Durable(), Durable()).durable
    assert not TeeWriter(Durable(), Keeping()).durable


SAME = Keeping()


@pytest.mark.parametrize("writers", [(), (SAME, SAME), (SAME, "path"), (None,)])
def test_a_tee_of_nothing_of_one_twice_or_of_a_path_raises(writers: Any) -> None:
    with pytest.raises(OptionError, match="TeeWriter takes"):
        TeeWriter(*writers)
