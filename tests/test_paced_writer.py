"""A writer that waits for its followers: until they let it go on, and not for ever."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growing_data import A, B
from stored_batches import fresh_root

import rlio
from rlio import (
    JsonWriter,
    NoopOutput,
    OutputWriter,
    Pace,
    PacedWriter,
    ParquetWriter,
    Roll,
    SampleBatch,
    TeeWriter,
    concat_samples,
)
from rlio.batch import Batch
from rlio.catalog.listing import list_shards
from rlio.catalog.names import MAX_ROW
from rlio.errors import ClosedError, OptionError
from rlio.following.marks import Mark, put_mark
from rlio.storage.filesystem import Storage
from rlio.testing import WriterTests


class Clock:
    """A second passes with every look at it, and ``on`` says what happens meanwhile."""

    def __init__(self, **on: Any) -> None:
        self.now = 0
        self.on = {int(at[1:]): act for at, act in on.items()}

    def __call__(self) -> float:
        self.now += 1
        assert self.now < 10_000, "it waits for ever"
        if self.now in self.on:
            self.on.pop(self.now)()
        return float(self.now)


def batch(rows: int = 10) -> SampleBatch:
    return SampleBatch(t=np.arange(rows))


def paced(root: str, clock: Clock | None = None, **options: Any) -> PacedWriter:
    """A writer that polls without delay."""
    stored = ParquetWriter(root, writer_id=A, roll=Roll(max_seconds=None))
    pace = Pace(**{"poll_seconds": 0.001, "stale_seconds": 30, **options})
    return PacedWriter(stored, pace=pace, clock=clock or Clock())


def mark(root: str, number: int, ceiling: int, *, follower: str = "learner", writer: str = A) -> None:
    put_mark(Storage.open(root), writer, Mark(follower=follower, number=number, row=0, ceiling=ceiling))


def committed(root: str) -> int:
    return sum(ref.name.rows for refs in list_shards(Storage.open(root)).shards.values() for ref in refs)


def test_rows_below_the_ceiling_are_written_without_a_wait_or_a_look() -> None:
    root = fresh_root()
    mark(root, 0, 30)
    with paced(root) as writer:
        for _ in range(3):
            writer.write(batch())
        assert writer.waits == 0
        assert writer.rows_received == 30
        assert committed(root) == 0, "nothing was flushed"


def test_at_the_ceiling_it_shows_what_it_has_and_waits_for_a_higher_one() -> None:
    root = fresh_root()
    mark(root, 0, 10)
    seen = []

    def let_go() -> None:
        seen.append((committed(root), writer.rows_received))
        mark(root, 1, 25)

    writer = paced(root)
    writer.write(batch())
    writer._clock = Clock(_9=let_go)
    with writer:
        writer.write(batch())
        assert seen == [(10, 10)]
        assert (writer.waits, writer.unheeded) == (1, 0)
        writer.write(batch())
        assert writer.rows_received == 30, "a batch is not cut: 25 were allowed"
        writer._clock = Clock(_9=lambda: mark(root, 2, 31))
        writer.write(batch())
        assert writer.waits == 2
        assert writer.seconds_waited > 0


def test_the_strictest_of_several_followers_counts() -> None:
    """Format 10.2, 10.3 and 10.5."""
    root = fresh_root()
    mark(root, 0, MAX_ROW, follower="one")
    mark(root, 5, 10, follower="other")
    mark(root, 4, 50, follower="other")
    mark(root, 9, 0, writer=B)
    with paced(root, Clock(_9=lambda: mark(root, 6, 20, follower="other"))) as writer:
        writer.write(batch())
        assert writer.waits == 0
        writer.write(batch())
        assert writer.waits == 1
        assert writer.unheeded == 0


def test_a_follower_that_is_silent_counts_as_dead_until_it_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = fresh_root()
    mark(root, 3, 10)
    clock = Clock()
    with paced(root, clock) as writer, caplog.at_level(logging.WARNING, "rlio"):
        for _ in range(6):
            writer.write(batch())
        assert (writer.waits, writer.unheeded) == (1, 1)
        assert writer.rows_received == 60
        assert caplog.text.count("continues without it") == 1
        assert "learner" in caplog.text
        # It lives after all: from the next look on, it is waited for again.
        mark(root, 4, 70)
        clock.now += 30
        writer.write(batch())
        clock.on = {clock.now + 9: lambda: mark(root, 5, 80)}
        writer.write(batch())
        assert (writer.waits, writer.unheeded) == (2, 1)


def test_a_heartbeat_keeps_it_waiting() -> None:
    root = fresh_root()
    mark(root, 0, 10)
    beats = {f"_{second}": lambda second=second: mark(root, second, 10) for second in range(20, 200, 20)}
    clock = Clock(**beats, _201=lambda: mark(root, 201, 11))
    with paced(root, clock) as writer:
        writer.write(batch())
        writer.write(batch())
        assert clock.now > 201
        assert writer.unheeded == 0


def test_where_nobody_follows_it_waits_once_and_goes_on() -> None:
    root = fresh_root()
    clock = Clock()
    with paced(root, clock) as writer:
        writer.write(batch())
        assert clock.now >= 30
        assert (writer.waits, writer.unheeded) == (1, 1)
        for _ in range(5):
            writer.write(batch())
        assert (writer.waits, writer.unheeded) == (1, 1)
        mark(root, 0, 65)
        clock.now += 30
        writer.write(batch())
        clock.on = {clock.now + 9: lambda: mark(root, 1, 80)}
        writer.write(batch())
        assert writer.waits == 2, "one came"


def test_some_rows_may_go_ahead_of_the_first_follower() -> None:
    root = fresh_root()
    with paced(root, Clock(_9=lambda: mark(root, 0, 100)), ahead=20) as writer:
        writer.write(batch())
        writer.write(batch())
        assert writer.waits == 0
        writer.write(batch())
        assert (writer.waits, writer.unheeded) == (1, 0)


@pytest.mark.parametrize(
    "error", [OSError(5, "down"), rlio.errors.PublishError("down"), TimeoutError("down")]
)
def test_a_store_that_is_down_is_a_silent_follower_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    root = str(tmp_path / "run")
    mark(root, 0, 10)
    listed, put = Storage.list, Storage.put
    with paced(root) as writer:
        assert writer.durable
        writer.write(batch())
        with monkeypatch.context() as patch:
            failed: list[str] = []

            def fail(self: Storage, *args: Any, **options: Any) -> Any:
                failed.append(args[0])
                raise error

            patch.setattr(Storage, "list", fail)
            patch.setattr(
                Storage, "put", lambda self, *args: put(self, *args) if "_wal" in args[0] else fail(self)
            )
            writer.write(batch())
        assert Storage.list is listed
        assert writer.unheeded == 1
        assert len(failed) > 3
        writer.write(batch())
    assert committed(root) == 30


def test_closing_lets_a_write_that_waits_go_and_publishes_what_was_taken() -> None:
    root = fresh_root()
    mark(root, 0, 10)
    waits = threading.Event()

    class Telling(Clock):
        def __call__(self) -> float:
            if threading.current_thread() is not threading.main_thread():
                waits.set()
            return 0.0

    writer = paced(root, Telling())
    writer.write(batch())
    found: list[BaseException] = []

    def write() -> None:
        try:
            writer.write(batch())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert waits.wait(60)
    writer.close()
    thread.join(60)
    (error,) = found
    assert isinstance(error, ClosedError)
    assert "not taken" in str(error)
    assert committed(root) == writer.rows_received == 10
    with pytest.raises(ClosedError):
        writer.write(batch())


def test_threads_take_turns_so_that_no_two_go_over_at_once() -> None:
    root = fresh_root()
    mark(root, 0, 1)
    writer = paced(root, Clock(), stale_seconds=10_000)
    threads = [threading.Thread(target=writer.write, args=(batch(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, 4):
        while writer.waits < number:
            time.sleep(0.001)
        assert writer.rows_received == 10 * number
        mark(root, number, 10 * number + 1)
    for thread in threads:
        thread.join(60)
    writer.close()
    assert committed(root) == 40


def test_it_wraps_writers_of_data_sets_alone() -> None:
    for wrong in (NoopOutput(), TeeWriter(NoopOutput()), "run"):
        with pytest.raises(OptionError, match="ParquetWriter"):
            PacedWriter(wrong)


@pytest.mark.parametrize("wrong", [{"stale_seconds": -1}, {"poll_seconds": 0}, {"ahead": -1}, {"ahead": 1.5}])
def test_illegal_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Pace(**wrong)


class TestPacedWriterThatNobodyFollows(WriterTests):
    def make_writer(self, root: Path) -> OutputWriter:
        return PacedWriter(JsonWriter(root), pace=Pace(stale_seconds=0))

    def read_back(self, root: Path) -> Batch:
        with rlio.DatasetReader(root, epochs=1) as reader:
            return concat_samples(list(reader))
