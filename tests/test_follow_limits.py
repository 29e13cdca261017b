"""Writers and followers of one growing data set together: limits on both sides, kills, resizing."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_child import Tally, fork, wait_for
from followed_rows import every_row, in_ring, replay_of, settle, until
from further import further
from growing_data import grow, seal
from stored_batches import fresh_root
from test_real_servers_data import NO_SERVER_FIRST, Place, place

from rlio import (
    DatasetReader,
    FollowingReplay,
    Markers,
    Pace,
    PacedWriter,
    ParquetWriter,
    Roll,
    SampleBatch,
    SamplesPerInsert,
)
from rlio.errors import StateError
from rlio.following.marks import list_marks, newest
from rlio.following.samples_per_insert import Account
from rlio.query.order import rank_of
from rlio.storage.filesystem import Storage

__all__ = ["place"]  # The fixture, of which tests take the name.

LIMITS = SamplesPerInsert(min=2, max=4, error_buffer=200, min_size=40)
MARKERS = Markers("learner", every_seconds=0.002)
PACE = Pace(poll_seconds=0.002, stale_seconds=60)


def labelled(label: int, first: int, rows: int) -> SampleBatch:
    return SampleBatch(t=np.arange(first, first + rows), label=np.full(rows, label, np.int16))


# ---- limits at every step ----


@pytest.mark.further
@pytest.mark.parametrize("slow", ["the learner", *further("nobody", "a writer")])
def test_four_writers_and_a_follower_keep_to_the_limits_at_every_step(
    monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Rows put in and drawn after each change of either; rows written after each write."""
    root, rows, size = fresh_root(), 300, 15
    steps: list[tuple[int, int]] = []
    for name in ("insert", "draw"):
        change = getattr(Account, name)

        def counted(self: Account, count: int, change: Callable[..., None] = change) -> None:
            change(self, count)
            steps.append((self.inserted, self.drawn))

        monkeypatch.setattr(Account, name, counted)
    opened = [
        PacedWriter(ParquetWriter(root, worker_index=label, roll=Roll(max_seconds=None)), pace=PACE)
        for label in range(4)
    ]
    written: list[tuple[int, int]] = []

    def write(label: int) -> None:
        with opened[label] as writer:
            for first in range(0, rows, size):
                writer.write(labelled(label, first, size))
                total = sum(one.rows_received for one in opened)
                written.append((total, steps[-1][1] if steps else 0))
                if slow == "a writer" and label == 0:
                    time.sleep(0.01)

    threads = [threading.Thread(target=write, args=(label,)) for label in range(4)]
    for thread in threads:
        thread.start()
    with replay_of(root, capacity=2000, batch_size=32, ratio=LIMITS, markers=MARKERS) as replay:
        for _ in replay:
            # Nothing is drawn, nor put in, that was not written.
            assert replay.counters.inserted <= sum(one.rows_received for one in opened)
            if slow == "the learner":
                time.sleep(0.003)
        for thread in threads:
            thread.join()
        assert in_ring(replay) == Counter((label, t) for label in range(4) for t in range(rows))
        counters = replay.counters
    assert counters.inserted == 4 * rows
    assert counters.drawn == LIMITS.most_drawn(4 * rows)
    assert len(steps) > 150
    assert all(drawn <= LIMITS.most_drawn(inserted) for inserted, drawn in steps)
    assert all(inserted <= LIMITS.most_inserted(drawn) for inserted, drawn in steps)
    # Each of the four may go over by less than a batch, as none is cut.
    assert all(total <= LIMITS.most_inserted(drawn) + 4 * (size - 1) for total, drawn in written)
    assert sum(one.waits for one in opened) > 0, "the limits were felt"
    assert sum(one.unheeded for one in opened) == 0


@NO_SERVER_FIRST
def test_limits_and_restarts_work_on_every_kind_of_store(place: Place) -> None:
    root, options = place
    writer = PacedWriter(
        ParquetWriter(root, storage_options=options, roll=Roll(max_seconds=None)),
        pace=Pace(poll_seconds=0.01, stale_seconds=60),
    )

    def write() -> None:
        with writer:
            for first in range(0, 300, 20):
                writer.write(labelled(0, first, 20))

    thread = threading.Thread(target=write)
    thread.start()
    markers = Markers("learner", every_seconds=0.02)
    kept: dict[str, Any] = {"ratio": LIMITS, "markers": markers, "storage_options": options, "batch_size": 50}
    with replay_of(root, **kept) as replay:
        for _ in range(3):
            replay.sample()
        state = json.loads(json.dumps(replay.state_dict()))
    with replay_of(root, **kept) as replay:
        replay.load_state_dict(state)
        assert sum(len(batch) for batch in replay) == LIMITS.most_drawn(300) - 150
        assert in_ring(replay) == Counter((0, t) for t in range(300))
    thread.join()
    assert writer.waits > 0
    assert writer.unheeded == 0
    assert [mark.row for mark in list_marks(place.open())[writer.writer_id].values()] == [300]


# ---- kills ----


def write_for_long(root: str, label: int, rows: int, tally: Tally) -> None:
    """A process that writes batches of odd sizes."""
    sizes = random.Random(label)
    writer = ParquetWriter(root, worker_index=label, roll=Roll(max_rows=70, max_seconds=0.2))
    with PacedWriter(writer, pace=PACE) as paced:
        while tally.acked < rows:
            count = sizes.randint(1, 20)
            tally.attempted = tally.acked + count
            paced.write(labelled(label, tally.acked, count))
            tally.acked = tally.attempted


def learn(root: str, folder: Path) -> None:
    """A process that draws, saves its state now and then, and at the end what it has seen."""
    with replay_of(root, capacity=100_000, batch_size=32, ratio=LIMITS, markers=MARKERS) as replay:
        if (folder / "state").exists():
            replay.load_state_dict(json.loads((folder / "state").read_text()))
        for number, _ in enumerate(replay):
            if number % 7 == 0:
                (folder / "new").write_text(json.dumps(replay.state_dict()))
                os.replace(folder / "new", folder / "state")
        found = [[label, t, count] for (label, t), count in sorted(in_ring(replay).items())]
        counters = replay.counters
        seen = {"rows": found, "inserted": counters.inserted, "drawn": counters.drawn}
        (folder / "seen").write_text(json.dumps(seen))


def kill(pid: int, *, may_have_ended: bool = False) -> None:
    os.kill(pid, signal.SIGKILL)
    assert wait_for(pid) in ((-signal.SIGKILL, 0) if may_have_ended else (-signal.SIGKILL,))


@pytest.mark.further
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("seed", [0, *further(1), pytest.param(2, marks=pytest.mark.soak)])
def test_killed_writers_and_followers_go_on_with_each_row_once(tmp_path: Path, seed: int) -> None:
    """The follower from its last saved state; of a killed writer, the next one brings the rows."""
    root, order = str(tmp_path / "run"), random.Random(seed)
    tallies: dict[int, Tally] = {}
    alive: dict[int, int] = {}

    def start(label: int, rows: int) -> None:
        tallies[label] = Tally()
        alive[label] = fork(write_for_long, root, label, rows, tallies[label])

    learner = fork(learn, root, tmp_path)
    try:
        for label, rows in enumerate((100_000, 100_000, 400)):  # However slow this is, two are there to kill.
            start(label, rows)
        for label in (0, 1):
            until(lambda label=label: tallies[label].acked > order.randint(20, 250))
            kill(alive.pop(label))
            start(label + 10, 150)
            # It has recovered the one, and not the next; else the learner may find every writer closed.
            until(lambda label=label: tallies[label + 10].attempted > 0)
            until((tmp_path / "state").exists)
            time.sleep(order.uniform(0, 0.1))
            # Behind the second kill every writer may have closed: then the next learner ends once more.
            kill(learner, may_have_ended=label == 1)
            learner = fork(learn, root, tmp_path)
        for pid in alive.values():
            assert wait_for(pid) == 0
        alive.clear()
        assert wait_for(learner) == 0
    finally:
        for pid in (*alive.values(), learner):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    seen = json.loads((tmp_path / "seen").read_text())
    assert all(count == 1 for _, _, count in seen["rows"])
    by_label: dict[int, list[int]] = {}
    for label, t, _ in seen["rows"]:
        by_label.setdefault(label, []).append(t)
    assert by_label.keys() == tallies.keys()
    for label, tally in tallies.items():
        assert by_label[label] == list(range(len(by_label[label])))
        assert tally.acked <= len(by_label[label]) <= tally.attempted
    assert seen["inserted"] == len(seen["rows"])
    assert seen["drawn"] == LIMITS.most_drawn(seen["inserted"])
    with DatasetReader(root, epochs=1) as reader:
        assert sum(len(batch) for batch in reader) == seen["inserted"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_killed_follower_without_a_state_repeats_only_what_came_after_its_marks(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    tally = Tally()
    learner = fork(learn, root, tmp_path)
    writer = fork(write_for_long, root, 0, 600, tally)
    until(lambda: tally.acked > 200)
    kill(learner)
    marks = {
        writer: newest(found.values())["learner"].row
        for writer, found in list_marks(Storage.open(root)).items()
    }
    (tmp_path / "state").unlink()
    (row,) = marks.values()
    assert row > 0
    learner = fork(lambda: learn_from_marks(root, tmp_path))
    assert wait_for(writer) == 0
    assert wait_for(learner) == 0
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["rows"] == [[0, t, 1] for t in range(row, tally.acked)]


def learn_from_marks(root: str, folder: Path) -> None:
    markers = Markers("learner", every_seconds=0.002, resume=True)
    with replay_of(root, capacity=100_000, batch_size=32, ratio=LIMITS, markers=markers) as replay:
        for _ in replay:
            pass
        found = [[label, t, count] for (label, t), count in sorted(in_ring(replay).items())]
    (folder / "seen").write_text(json.dumps({"rows": found}))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_writers_go_on_without_a_follower_that_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path / "run")
    learner = fork(learn, root, tmp_path)
    pace = Pace(poll_seconds=0.002, stale_seconds=0.5)
    writer = PacedWriter(ParquetWriter(root, roll=Roll(max_seconds=None)), pace=Pace(poll_seconds=0.002))
    with writer:
        writer.write(labelled(0, 0, 150))
        until(lambda: list_marks(Storage.open(root)) != {})
        kill(learner)
        writer.pace = pace
        for first in range(150, 3000, 150):
            writer.write(labelled(0, first, 150))
    assert writer.unheeded == 1
    assert "continues without it" in caplog.text
    with DatasetReader(root, epochs=1) as reader:
        assert sum(len(batch) for batch in reader) == 3000


# ---- resizing ----

WRITERS = [f"w{number:05d}-0000000a" for number in range(12)]


def drain(replays: list[FollowingReplay], inserted: int) -> None:
    """Draw in turns until so many rows are put in, in all."""
    until(lambda: all(len(replay.sample()) for replay in replays) and total(replays) == inserted)


def total(replays: list[FollowingReplay]) -> int:
    return sum(replay.counters.inserted for replay in replays)


def joined(replays: list[FollowingReplay]) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for replay in replays:
        found += in_ring(replay)
    return found


def test_a_writer_is_of_one_slot_and_a_slot_of_one_follower() -> None:
    for writer in (*WRITERS, "x1-000001~0001-0000000a"):
        slot = zlib.crc32(writer.partition("~")[0].encode()) % 64
        for world in (1, 2, 3, 5, 64):
            assert rank_of(writer, world=world, slots=64) == slot % world


def test_followers_share_by_slots_and_are_resized_with_each_row_once() -> None:
    """Two followers, then three, then one, while the data set grows."""
    root = fresh_root()
    rows = dict.fromkeys(WRITERS, 0)
    state: Any = None
    drawn = 0
    for world, step in ((2, 20), (3, 11), (1, 13)):
        for label, writer in enumerate(WRITERS):
            grow(root, writer, rows[writer], step + label, label=label)
            rows[writer] += step + label
        replays = [replay_of(root, shard=(rank, world), seed=None) for rank in range(world)]
        try:
            if state is not None:
                for replay in replays:
                    replay.load_state_dict(json.loads(json.dumps(state)))
                assert sum(replay.counters.drawn for replay in replays) == drawn
                assert total(replays) == sum(rows.values()) - sum(step + label for label in range(12))
            drain(replays, sum(rows.values()))
            assert joined(replays) == every_row(rows)
            if world > 1:
                assert all(in_ring(replay) for replay in replays), "each has its part"
            drawn = sum(replay.counters.drawn for replay in replays)
            state = FollowingReplay.merge_states([replay.state_dict() for replay in replays])
        finally:
            for replay in replays:
                replay.close()
    assert len(json.dumps(state)) < 1000


def test_states_of_ranks_are_merged_before_others_load_them() -> None:
    root = fresh_root()
    for label, writer in enumerate(WRITERS):
        grow(root, writer, 0, 10, label=label)
        seal(root, writer, 10)
    states = []
    for rank in range(3):
        with replay_of(root, shard=(rank, 3)) as replay:
            replay.sample()
            states.append(replay.state_dict())
    with replay_of(root, shard=(0, 2)) as replay, pytest.raises(StateError, match="merge_states"):
        replay.load_state_dict(states[0])
    with replay_of(root, shard=(1, 3)) as replay, pytest.raises(StateError, match="rank 0 of 3"):
        replay.load_state_dict(states[0])
    for wrong in (
        states[:2],
        [*states, states[0]],
        [],
        [{}],
        [states[0], 3],
        [{**states[0], "position": {}}],
    ):
        with pytest.raises(StateError):
            FollowingReplay.merge_states(wrong)
    merged = FollowingReplay.merge_states(states[::-1])
    with replay_of(root) as replay:
        replay.load_state_dict(merged)
        settle(replay, 120)
        assert in_ring(replay) == every_row(dict.fromkeys(WRITERS, 10))
