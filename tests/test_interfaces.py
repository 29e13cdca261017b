"""The bases of readers and writers: exact sizes, left-over rows, state, closing; and the contexts."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from typing import Any

import pytest
from counting import Agents, Counting, Keeping, Live, numbers, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.errors import (
    ClosedError,
    CorruptData,
    EndOfData,
    MissingColumn,
    OptionError,
    SchemaError,
    StateError,
)
from rlio.read_options import ReadOptions
from rlio.reader import InputReader, JsonState
from rlio.readers.sampler_input import Runner
from rlio.resolve import IOContext
from rlio.testing import ReaderTests, WriterTests, assert_resumes, assert_same
from rlio.writer import OutputWriter

SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any)


class TestCountingReader(ReaderTests):
    def make_reader(self) -> InputReader:
        return Counting(31, (4, 0, 1, 6))

    def expected_rows(self) -> Batch:
        return rows_of(0, 31)


class TestEndlessReader(ReaderTests):
    finite = False

    def make_reader(self) -> InputReader:
        return Counting(None, (4, 1, 6))

    def expected_rows(self) -> Batch:
        return rows_of(0, 1000)


class TestMultiAgentReader(ReaderTests):
    def make_reader(self) -> InputReader:
        return Agents(23, (4, 1, 6))

    def expected_rows(self) -> Batch:
        return Agents(23, (23,)).sample()


class TestKeepingWriter(WriterTests):
    checks_schema = False

    def make_writer(self, root: Any) -> OutputWriter:
        writer = Keeping()
        self.__dict__.setdefault("writers", []).append(writer)
        return writer

    def read_back(self, root: Any) -> Batch:
        from rlio.batch import concat_samples

        return concat_samples([writer.rows for writer in self.__dict__["writers"]])


# ---- sizes ----


@given(
    total=st.integers(0, 40),
    sizes=SIZES,
    asked=st.lists(st.integers(1, 9) | st.none(), min_size=1, max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_any_sequence_of_sizes_gives_every_row_once_in_order(
    total: int, sizes: list[int], asked: list[int | None]
) -> None:
    reader, got, number = Counting(total, sizes), [], 0
    try:
        while True:
            n = asked[number % len(asked)]
            number += 1
            batch = reader.sample(n)
            if n is not None:
                assert len(batch) == n or reader.row == total
            got.append(batch)
    except EndOfData:
        pass
    assert numbers(got) == list(range(total))


@given(
    total=st.integers(1, 30),
    sizes=SIZES,
    asked=st.lists(st.integers(1, 9) | st.none(), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_a_state_taken_between_any_two_samples_resumes(
    total: int, sizes: list[int], asked: list[int | None]
) -> None:
    reader = Counting(total, sizes)
    try:
        for n in asked:
            reader.sample(n)
    except EndOfData:
        pass
    restored = Counting(total, sizes)
    restored.load_state_dict(json.loads(json.dumps(reader.state_dict())))
    assert numbers(list(restored)) == numbers(list(reader))


def test_the_last_batch_is_short_unless_it_is_dropped() -> None:
    assert [len(batch) for batch in (Counting(7).sample(5), Counting(7, (7,)).sample(9))] == [5, 7]
    reader = Counting(7)
    assert [len(reader.sample(5)), len(reader.sample(5))] == [5, 2]
    reader = Counting(7)
    reader.drop_last = True
    reader.sample(5)
    for _ in range(2):
        with pytest.raises(EndOfData):
            reader.sample(5)


def test_rows_that_are_left_over_are_served_as_a_batch_of_their_own() -> None:
    reader = Counting(None, (5,))
    assert [len(reader.sample(n)) for n in (3, None, None, 7, None)] == [3, 2, 5, 7, 3]


def test_a_whole_batch_of_the_asked_size_is_passed_on_without_a_copy() -> None:
    class Same(Counting):
        def _next(self) -> Batch:
            self.last = super()._next()
            return self.last

    reader = Same(None, (4,))
    assert reader.sample(4) is reader.last


@pytest.mark.parametrize("n", [0, -3])
def test_a_size_below_one_raises_and_takes_nothing(n: int) -> None:
    reader = Counting(5)
    with pytest.raises(OptionError, match=f"n={n}"):
        reader.sample(n)
    assert numbers(list(reader)) == list(range(5))


def test_a_size_that_is_no_whole_number_raises() -> None:
    with pytest.raises(TypeError):
        Counting(5).sample(2.5)  # type: ignore[arg-type]  # on purpose


def test_out_is_overwritten_and_returned() -> None:
    reader = Counting(None, (5,))
    out = rows_of(100, 104)
    arrays = {name: out[name] for name in out}
    assert reader.sample(4, out=out) is out
    assert out["t"].tolist() == [0, 1, 2, 3]
    assert all(out[name] is array for name, array in arrays.items())
    assert reader.sample(4)["t"].tolist() == [4, 5, 6, 7]


def test_an_out_that_does_not_fit_raises() -> None:
    with pytest.raises((SchemaError, OptionError)):
        Counting(None, (5,)).sample(4, out=SampleBatch(t=[1, 2, 3, 4]))


# ---- failing ----


class Failing(Counting):
    """Raises once, at its third batch."""

    failed = False

    def _next(self) -> Batch:
        if self.number == 2 and not self.failed:
            self.failed = True
            raise CorruptData("a bad record", uri="file", record=2)
        return super()._next()


def test_a_reader_that_fails_in_the_middle_of_a_batch_takes_no_rows_with_it() -> None:
    reader = Failing(20, (3,))
    first = reader.sample(2)
    with pytest.raises(CorruptData, match="record 2"):
        reader.sample(10)
    state = json.loads(json.dumps(reader.state_dict()))
    assert numbers([first, reader.sample(10), *reader]) == list(range(20))
    restored = Counting(20, (3,))
    restored.load_state_dict({**state, "reader": "Counting"})
    assert numbers(list(restored)) == list(range(2, 20))


def test_batches_that_do_not_fit_together_stay_with_the_reader() -> None:
    class Unlike(Counting):
        def _next(self) -> Batch:
            batch = super()._next()
            if self.number % 2:
                del batch["label"]  # type: ignore[union-attr]  # it is a SampleBatch
            return batch

    reader = Unlike(12, (3,))
    with pytest.raises(MissingColumn, match="label"):
        reader.sample(5)
    assert [len(batch) for batch in reader] == [3, 3, 3, 3]


# ---- state ----


def test_the_state_of_a_reader_is_exact_in_the_middle_of_a_record() -> None:
    for n in (None, 1, 2, 5):
        assert_resumes(lambda: Counting(30, (4, 7)), n)
        assert_resumes(lambda: Agents(30, (4, 7)), n)


def test_left_over_rows_of_a_live_source_are_dropped_and_counted_on_restoring() -> None:
    reader = Live(None, (10,))
    reader.sample(4)
    state = json.loads(json.dumps(reader.state_dict()))
    restored = Live(None, (10,))
    restored.load_state_dict(state)
    assert restored.dropped == 6
    assert restored.sample()["t"][0] == 10
    assert reader.dropped == 0
    # Saved and restored once more, the count goes on.
    restored.sample(1)
    again = Live(None, (10,))
    again.load_state_dict(restored.state_dict())
    assert again.dropped == 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version.*99"),
        ({"reader": "Other"}, "reader.*Other"),
        ({"skip": "x"}, "whole numbers"),
        ({"position": {"number": 1}}, "row"),
        ({"position": None}, "position"),
        ({"skip": 4}, "skip.*4.*4 steps"),
        ({"skip": -1}, "skip"),
        ({"position": {"number": 0, "row": 9}, "skip": 1}, "no data is left"),
    ],
)
def test_a_state_that_does_not_fit_raises_and_names_the_key(change: JsonState, message: str) -> None:
    state = Counting(9, (4,)).state_dict()
    with pytest.raises(StateError, match=message):
        Counting(9, (4,)).load_state_dict({**state, **change})


def test_a_position_that_is_no_number_raises() -> None:
    class Numbered(Counting):
        def _seek(self, position: JsonState) -> None:
            self.row = int(position["row"])

    state = Numbered(9, (4,)).state_dict()
    with pytest.raises(StateError, match=r"position.*'x'"):
        Numbered(9, (4,)).load_state_dict({**state, "position": {"row": "x"}})


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_a_state_that_is_no_dict_raises(state: Any) -> None:
    with pytest.raises(StateError, match="expected the dict"):
        Counting(9).load_state_dict(state)


def test_a_state_without_a_key_raises() -> None:
    state = Counting(9).state_dict()
    del state["skip"]
    with pytest.raises(StateError, match="skip"):
        Counting(9).load_state_dict(state)


def test_a_reader_that_failed_in_the_middle_of_a_load_gives_nothing_and_can_be_closed() -> None:
    """It went on from wherever the load had left it, and its `close` complained of rows that were lost."""
    for change in ({"skip": 4}, {"position": {"number": 1}}, {"version": 99}, {"position": None}):
        with Counting(9, (4,)) as reader:
            reader.sample(3)
            state = reader.state_dict()
            with pytest.raises(StateError):
                reader.load_state_dict({**state, **change})
            for call in (reader.sample, reader.next, reader.state_dict, lambda: next(iter(reader))):
                with pytest.raises(StateError):
                    call()
        with Counting(9, (4,)) as reader:
            with pytest.raises(StateError):
                reader.load_state_dict({**state, **change})
            reader.load_state_dict(state)
            assert reader.sample(2)["t"].tolist() == [3, 4]


# ---- closing ----


def test_closing_a_reader_calls_its_hook_once_and_refuses_further_use() -> None:
    reader = Counting(9, (4,))
    reader.sample(1)
    state = reader.state_dict()
    with reader:
        pass
    reader.close()
    assert reader.closed == 1
    for call in (
        reader.sample,
        reader.next,
        lambda: next(iter(reader)),
        lambda: reader.load_state_dict(state),
    ):
        with pytest.raises(ClosedError, match="Counting is closed"):
            call()


def test_a_writer_flushes_once_as_it_closes() -> None:
    writer = Keeping()
    writer.write(rows_of(0, 3))
    writer.close()
    writer.close()
    writer.flush()
    assert (writer.flushes, writer.closes, writer.rows_received) == (1, 1, 3)
    with pytest.raises(ClosedError, match="Keeping is closed"):
        writer.write(rows_of(0, 1))


@pytest.mark.parametrize("batch", [{"obs": [1]}, None, [[1.0]]])
def test_what_is_no_batch_is_refused_before_the_writer_sees_it(batch: Any) -> None:
    with Keeping() as writer:
        with pytest.raises(SchemaError, match="expected a SampleBatch"):
            writer.write(batch)
        assert writer.rows_received == 0


def test_a_batch_that_the_writer_refused_is_not_counted() -> None:
    writer = Keeping()
    writer.fail = SchemaError("no")
    with pytest.raises(SchemaError):
        writer.write(rows_of(0, 3))
    writer.write(Agents(4, (4,)).sample())
    assert writer.rows_received == 8


def test_a_failing_close_raises_and_keeps_the_rows_for_another_try() -> None:
    writer = Keeping()
    writer.fail = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    assert writer.closes == 0
    writer.fail = None
    writer.close()
    writer.close()
    assert writer.closes == 1


def test_a_failing_close_never_replaces_the_exception_of_the_block() -> None:
    writer = Keeping()
    writer.fail = OSError("disk full")
    with pytest.raises(ZeroDivisionError) as caught, writer:
        raise ZeroDivisionError
    assert any("disk full" in note for note in caught.value.__notes__)


def test_a_failing_close_is_the_exception_of_a_block_that_had_none() -> None:
    writer = Keeping()
    writer.fail = OSError("disk full")
    with pytest.raises(OSError, match="disk full"), writer:
        pass


def test_open_writers_are_closed_when_the_interpreter_exits() -> None:
    code = """
import rlio
class Loud(rlio.OutputWriter):
    def _write(self, batch): pass
    def _close(self): print("closed", self.rows_received)
writer = Loud()
writer.write(rlio.SampleBatch(t=[1, 2]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "closed 2\n"


def test_a_forgotten_writer_is_not_kept_alive_for_the_exit() -> None:
    writer = Keeping()
    alive = weakref.ref(writer)
    del writer
    gc.collect()
    assert alive() is None


# ---- contexts and options ----


@pytest.mark.parametrize(
    ("index", "number", "rank", "world"),
    [(0, 0, 0, 1), (0, 4, 0, 1), (1, 4, 0, 4), (4, 4, 3, 4), (1, 1, 0, 1), (3, 0, 0, 1)],
)
def test_a_local_worker_reads_alone_and_others_share(index: int, number: int, rank: int, world: int) -> None:
    context = IOContext(worker_index=index, num_workers=number)
    assert (context.rank, context.world) == (rank, world)


@pytest.mark.parametrize(("index", "number"), [(-1, 0), (0, -1), (5, 4)])
def test_a_worker_that_cannot_be_raises(index: int, number: int) -> None:
    with pytest.raises(OptionError, match=f"worker_index={index}"):
        IOContext(worker_index=index, num_workers=number)


def test_a_context_is_frozen() -> None:
    context = IOContext()
    with pytest.raises(AttributeError):
        context.seed = 3  # type: ignore[misc]  # on purpose
    with pytest.raises(TypeError):
        context.options["x"] = 1  # type: ignore[index]  # on purpose


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"batch_size": "3"},
        {"batch_size": True},
        {"epochs": 0},
        {"epochs": 1.5},
        {"seed": -1},
        {"seed": "a"},
        {"shuffle": "windows"},
        {"columns": "obs"},
        {"columns": [1]},
        {"shard": (2, 2)},
        {"shard": (-1, 2)},
        {"shard": 3},
        {"shard": (0.0, 2)},
        {"on_error": "ignore"},
        {"drop_last": True},
    ],
)
def test_an_illegal_read_option_raises_and_is_named(options: Any) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        ReadOptions.of(options)


def test_runner_is_a_protocol_that_classes_meet_by_their_methods() -> None:
    class Mine:
        def sample(self, *, num_timesteps: int | None = None, num_episodes: int | None = None) -> list[Any]:
            return []

        def stop(self) -> None:
            """Nothing is open."""

    assert isinstance(Mine(), Runner)
    assert not isinstance(object(), Runner)


def test_a_step_of_a_multi_agent_batch_is_all_rows_of_its_time() -> None:
    reader = Agents(20, (6,))
    batch = reader.sample(4)
    assert isinstance(batch, MultiAgentBatch)
    assert (batch.env_steps(), batch.agent_steps()) == (4, 8)
    assert_same(reader.sample(), Agents(20, (6,)).sample().timeslices(4)[1], "the left-over steps")
