"""A replay buffer that follows: committed rows, each once, drawn as often as limits allow."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_child import fork, wait_for
from followed_rows import every_row, finished, in_ring, replay_of, room, settle, until
from growing_data import A, B, C, encode, grow, publish, seal, trim
from stored_batches import fresh_root
from test_verify import flip, multi_agent, sequences, shards

import rlio
from rlio import (
    EndOfData,
    FollowingReplay,
    FollowReader,
    Markers,
    ParquetWriter,
    Roll,
    SampleBatch,
    SamplesPerInsert,
)
from rlio.errors import ClosedError, CorruptData, OptionError, StateError, WaitTimeout
from rlio.following.follow import FollowPass
from rlio.following.marks import list_marks, newest
from rlio.replay.priorities import Prioritised
from rlio.storage.filesystem import Storage

ROWS = {A: 60, B: 35, C: 80}


def labelled(rows: int, first: int = 0) -> SampleBatch:
    return SampleBatch(t=np.arange(first, first + rows), label=np.zeros(rows, np.int8))


# ---- rows and draws ----


def test_what_is_not_committed_is_not_seen() -> None:
    root = fresh_root()
    with replay_of(root) as replay, ParquetWriter(root, roll=Roll(max_seconds=None)) as writer:
        writer.write(labelled(40))
        settle(replay, 0)
        writer.flush()
        settle(replay, 40)
        writer.write(labelled(30, 40))
        settle(replay, 40)
        drawn = [replay.sample()["t"].max() for _ in range(50)]
        assert 30 < max(drawn) < 40


def test_who_waits_for_long_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlio.following.replay._SILENT_SECONDS", 0.01)
    caplog.set_level("INFO", "rlio")
    with replay_of(fresh_root(), timeout=0.1) as replay, pytest.raises(WaitTimeout):
        replay.sample()
    assert "waits, as 0 rows may be drawn: 0 were put in" in caplog.text


def test_the_ring_keeps_the_newest_rows_and_draws_come_from_all_of_them() -> None:
    root = fresh_root()
    with replay_of(root, capacity=50) as replay:
        grow(root, A, 0, 30)
        settle(replay, 30)
        grow(root, A, 30, 45)
        settle(replay, 75)
        assert in_ring(replay) == Counter((0, t) for t in range(25, 75))
        drawn = {t for _ in range(100) for t in replay.sample()["t"].tolist()}
        assert drawn == set(range(25, 75))
        assert replay.counters == rlio.following.replay.FollowCounters(75, 1000, 50)


def test_a_ring_on_disk_holds_the_same_and_leaves_nothing_there(tmp_path: Path) -> None:
    found = []
    for folder in (None, tmp_path / "rings"):
        with replay_of(finished(ROWS), capacity=100, folder=folder) as replay:
            settle(replay, 175)
            found.append((in_ring(replay), [replay.sample()["t"].tolist() for _ in range(5)]))
            state = replay.state_dict()
            replay.load_state_dict(state)
            assert in_ring(replay) == found[0][0]
            assert (tmp_path / "rings").is_dir() == (folder is not None)
            assert list(tmp_path.rglob("*.array")) == []
    assert found[0] == found[1]
    assert list((tmp_path / "rings").iterdir()) == []


def test_the_first_draw_waits_for_the_least_size() -> None:
    root = fresh_root()
    grow(root, A, 0, 19)
    with replay_of(root, ratio=SamplesPerInsert(min_size=20), timeout=0) as replay:
        settle(replay, 19)
        with pytest.raises(WaitTimeout, match="19 were put in and 0 drawn"):
            replay.sample()
        grow(root, A, 19, 1)
        settle(replay, 20)
        assert len(replay.sample(7)) == 7


def test_draws_wait_where_they_would_be_too_many() -> None:
    root = fresh_root()
    grow(root, A, 0, 30)
    limits = SamplesPerInsert(max=2, min_size=10, error_buffer=5)
    with replay_of(root, ratio=limits, timeout=0) as replay:
        settle(replay, 30)
        for _ in range(4):
            replay.sample()
        with pytest.raises(WaitTimeout, match="5 rows may be drawn"):
            replay.sample()
        assert len(replay.sample(5)) == 5, "a smaller one may be drawn"
        replay.timeout = 30
        thread = threading.Thread(target=grow, args=(root, A, 30, 5))
        thread.start()
        assert len(replay.sample()) == 10, "it waits for the rows"
        thread.join()
        assert replay.counters.drawn == limits.most_drawn(35) == 55


def test_rows_are_taken_no_faster_than_they_are_drawn() -> None:
    root = finished(ROWS)
    limits = SamplesPerInsert(min=0.5, error_buffer=4, min_size=10)
    with replay_of(root, ratio=limits, markers=Markers("learner")) as replay:
        settle(replay, 18)
        replay.sample()
        settle(replay, 38)
        replay.sample(1)
        settle(replay, 40)


@pytest.mark.parametrize("drop_last", [False, True])
def test_it_ends_when_all_is_closed_and_drawn(drop_last: bool) -> None:
    root = finished(ROWS)
    with replay_of(
        root, ratio=SamplesPerInsert(max=1, min_size=3), batch_size=50, drop_last=drop_last
    ) as replay:
        sizes = [len(batch) for batch in replay]
        assert sizes == [50, 50, 50] + [22] * (not drop_last)
        assert replay.counters.inserted == 175
        with pytest.raises(EndOfData):
            replay.sample()


def test_it_ends_where_nothing_can_be_drawn() -> None:
    with replay_of(finished({A: 10}), ratio=SamplesPerInsert(min_size=11)) as replay:
        assert list(replay) == []
    with replay_of(finished({A: 10}), filter="t > 100") as replay:
        assert list(replay) == []


def test_without_a_largest_ratio_it_never_ends() -> None:
    with replay_of(finished({A: 10})) as replay:
        assert sum(len(replay.sample()) for _ in range(100)) == 1000


def test_it_does_not_end_while_a_writer_is_open() -> None:
    root = finished(ROWS)
    grow(root, "w00003-0000000d", 0, 1)
    with replay_of(root, ratio=SamplesPerInsert(max=1), timeout=0) as replay:
        settle(replay, 176)
        replay.sample(175)
        with pytest.raises(WaitTimeout):
            replay.sample()
        seal(root, "w00003-0000000d", 1)
        replay.timeout = 30
        with pytest.raises(EndOfData):
            replay.sample()


def test_transitions_count_once_and_sequences_with_all_their_rows() -> None:
    root = fresh_root()
    rows = {"obs": np.zeros((40, 2)), "new_obs": np.zeros((40, 2)), "rewards": np.ones(40)}
    ends = {"terminateds": np.zeros(40, bool), "truncateds": np.zeros(40, bool), "t": np.arange(40)}
    publish(root, A, 0, encode(SampleBatch(**rows, **ends)))
    with replay_of(root, draw=rlio.NStep(3), ratio=SamplesPerInsert(max=1), timeout=0) as replay:
        settle(replay, 40)
        assert (replay.sample(20)["rewards"] > 2).any()
        assert replay.counters.drawn == 20
    with replay_of(
        root, draw=rlio.Sequences(4), batch_size=5, ratio=SamplesPerInsert(max=1), timeout=0
    ) as replay:
        settle(replay, 40)
        assert replay.unit == "sequences"
        batch = replay.sample()
        assert len(batch["seq_lens"]) == 5
        assert replay.counters.drawn == 20
        with pytest.raises(WaitTimeout):
            replay.sample()
        replay.sample(4)


def test_draws_by_priority_follow_their_updates() -> None:
    root = fresh_root()
    grow(root, A, 0, 40)
    with replay_of(root, prioritised=Prioritised(alpha=1.0, epsilon=1e-9)) as replay:
        settle(replay, 40)
        batch = replay.sample(200)
        replay.sampler.update_priorities(batch["batch_indexes"], (batch["t"] == 7).astype(float))
        assert (replay.sample(200)["t"] == 7).mean() > 0.9
        assert replay.counters.drawn == 400


def test_the_same_rows_and_seed_give_the_same_draws_and_ranks_others() -> None:
    root = finished({A: 50})
    found = []
    for shard, seed in (((0, 1), 3), ((0, 1), 3), ((0, 1), 4)):
        with replay_of(root, shard=shard, seed=seed) as replay:
            settle(replay, 50)
            found.append([replay.sample()["t"].tolist() for _ in range(3)])
    assert found[0] == found[1] != found[2]


def test_compacted_and_collected_shards_are_no_matter() -> None:
    root = fresh_root()
    with ParquetWriter(root, writer_id=A, roll=Roll(max_seconds=None)) as writer:
        with replay_of(root, ratio=SamplesPerInsert(max=1, error_buffer=200)) as replay:
            for first in range(0, 200, 10):
                writer.write(labelled(10, first))
                writer.flush()
                if first % 50 == 40:
                    settle(replay, first + 10)
                    rlio.maintenance.compact(root)
                    rlio.maintenance.gc(root, grace=0)
                    state = json.loads(json.dumps(replay.state_dict()))
            settle(replay, 200)
            assert in_ring(replay) == Counter((0, t) for t in range(200))
        with replay_of(root, ratio=SamplesPerInsert(max=1, error_buffer=200)) as replay:
            replay.load_state_dict(state)
            settle(replay, 200)
            assert in_ring(replay) == Counter((0, t) for t in range(200))


def test_a_final_observation_that_is_missing_later_is_told_from_then_on() -> None:
    """Batches have `new_obs_valid` only where one is missing: so does what is drawn, in a ring too."""

    def rows(first: int, missing: int | None = None) -> SampleBatch:
        t = np.arange(first, first + 10)
        batch = SampleBatch(t=t, label=0 * t, obs=1.0 * t, new_obs=t + 1.0, eps_id=t // 10)
        if missing is not None:
            batch["new_obs"][missing] = 0.0
            batch["new_obs_valid"] = np.arange(10) != missing
        return batch

    root = fresh_root()
    with ParquetWriter(root, roll=Roll(max_seconds=None)) as writer, replay_of(root) as replay:
        writer.write(rows(0))
        writer.flush()
        settle(replay, 10)
        assert "new_obs_valid" not in replay.sample()
        writer.write(rows(10, missing=9))
        writer.write(rows(20))
        writer.flush()
        settle(replay, 30)
        batch = replay.sample(200)
        np.testing.assert_array_equal(batch["new_obs_valid"], batch["t"] != 19)
        assert not batch["new_obs_valid"].all()
        np.testing.assert_array_equal(batch["new_obs"], np.where(batch["t"] == 19, 0, batch["t"] + 1))


def test_rows_that_were_trimmed_before_they_were_read_count_for_no_draw() -> None:
    root = fresh_root()
    grow(root, A, 0, 30)
    trim(root, A, 20)
    with replay_of(root, ratio=SamplesPerInsert(max=1), timeout=0) as replay:
        settle(replay, 10)
        assert replay.counters.inserted == 10
        replay.sample(9)
        with pytest.raises(WaitTimeout):
            replay.sample(1)


def test_a_restart_whose_rows_were_all_trimmed_draws_from_those_that_follow() -> None:
    """It drew from its ring, which was empty then, and never looked again."""
    root = fresh_root()
    grow(root, A, 0, 30)
    with replay_of(root) as replay:
        settle(replay, 30)
        replay.sample()
        state = replay.state_dict()
    trim(root, A, 30)
    with replay_of(root, timeout=0) as replay:
        replay.load_state_dict(state)
        with pytest.raises(WaitTimeout):
            replay.sample()
        grow(root, B, 0, 20)
        settle(replay, 50)
        assert len(replay.sample()) == 10


def test_the_end_of_data_of_a_ring_without_rows_says_so() -> None:
    root = fresh_root()
    grow(root, A, 0, 30)
    seal(root, A, 30)
    with replay_of(root, filter="t > 40") as replay:
        settle(replay, 30)
        with pytest.raises(EndOfData, match="none of the 30 rows in the ring can be drawn"):
            replay.sample()


@pytest.mark.parametrize("gone", ["trimmed", "trimmed and deleted", "damaged"])
def test_a_writer_whose_last_rows_cannot_be_taken_is_not_made_to_wait_for_ever(gone: str) -> None:
    root = fresh_root()
    grow(root, A, 0, 60, limit=None)
    if gone == "damaged":
        flip(*shards(root), 100)
    else:
        trim(root, A, 60, delete=gone == "trimmed and deleted")
    limits = SamplesPerInsert(min=1, error_buffer=20, min_size=10)
    markers = Markers("learner", every_seconds=0.002)
    with replay_of(root, ratio=limits, markers=markers, on_error="skip") as replay:
        replay._feed.start()
        until(lambda: ceilings(root) == {A: 60 + 30})
        grow(root, A, 60, 30)
        settle(replay, 30)
        assert replay.state_dict()["position"]["writers"] == {A: [90, 60, 60]}


def test_a_ring_of_which_nothing_can_be_drawn_is_an_error_where_limits_let_no_more_in() -> None:
    root = fresh_root()
    grow(root, A, 0, 60)

    def picky(error_buffer: int) -> FollowingReplay:
        ratio = SamplesPerInsert(min=1, error_buffer=error_buffer)
        return replay_of(root, ratio=ratio, markers=Markers("learner"), filter="t > 40")

    with picky(20) as replay:
        for _ in range(2):
            with pytest.raises(OptionError, match=r"none of the 21 rows .* error_buffer or min_size"):
                replay.sample()
    with picky(50) as replay:
        assert len(replay.sample()) == 10


def ceilings(root: str) -> dict[str, int]:
    """Writer -> what its newest mark allows it."""
    listed = list_marks(Storage.open(root))
    return {
        writer: found.ceiling for writer, marks in listed.items() for found in newest(marks.values()).values()
    }


@pytest.mark.few(1)
@pytest.mark.each_value_once
@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("columns", [{}, {"eps_id": np.full(8, 1)}])
def test_rows_of_two_writers_are_in_no_sequence_together(columns: Any, reload: bool) -> None:
    root = fresh_root()
    with replay_of(root, draw=rlio.Sequences(12)) as replay:
        for first in range(0, 32, 8):
            for label, writer in enumerate((A, B)):
                t = np.arange(first, first + 8)
                publish(root, writer, first, encode(SampleBatch(t=t, label=0 * t + label, **columns)))
                settle(replay, 2 * first + 8 * (label + 1))
                if reload:
                    replay.load_state_dict(replay.state_dict())
        for _ in range(10):
            batch = replay.sample()
            for label, t in zip(batch["label"].reshape(-1, 12), batch["t"].reshape(-1, 12), strict=True):
                real = t > 0
                assert len(set(label[real].tolist())) < 2
                assert (np.diff(t[real]) == 1).all()


# ---- what goes wrong ----


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """Whoever feeds a ring cannot list while an error is in here."""
    listed = Storage.list
    errors: list[OSError] = []

    def list_or_fail(self: Storage, *args: Any, **options: Any) -> Any:
        if errors and threading.current_thread().name == "rlio-feed":
            raise errors[0]
        return listed(self, *args, **options)

    monkeypatch.setattr(Storage, "list", list_or_fail)
    return errors


def test_a_store_that_is_down_is_waited_for_and_draws_go_on(failing: list[OSError]) -> None:
    root = fresh_root()
    grow(root, A, 0, 30)
    with replay_of(root, ratio=SamplesPerInsert(max=1), timeout=0) as replay:
        settle(replay, 30)
        failing.append(TimeoutError("no answer"))
        grow(root, A, 30, 10)
        until(lambda: replay._feed.outage is not None)
        replay.sample(20)
        with pytest.raises(WaitTimeout, match="no answer") as raised:
            replay.sample(20)
        assert isinstance(raised.value.__cause__, TimeoutError)
        failing.clear()
        replay.timeout = 30
        assert len(replay.sample(19)) == 19
        until(lambda: replay._feed.outage is None)


def test_what_repeating_does_not_change_is_raised_by_each_call(failing: list[OSError]) -> None:
    root = fresh_root()
    grow(root, A, 0, 30)
    with replay_of(root) as replay:
        settle(replay, 30)
        failing.append(PermissionError(13, "denied"))
        for _ in range(2):
            until(lambda: replay._feed.failure is not None)
            with pytest.raises(PermissionError):
                replay.sample()
        until(lambda: replay._feed.failure is not None)
        failing.clear()
        grow(root, A, 30, 10)
        with pytest.raises(PermissionError):
            replay.sample()
        settle(replay, 40)
        replay.sample()


def test_damage_is_an_error_or_counted() -> None:
    root = fresh_root()
    grow(root, A, 0, 30)
    (path,) = shards(root)
    flip(path, 100)
    seal(root, A, 30)
    grow(root, B, 0, 20)
    seal(root, B, 20)
    with replay_of(root) as replay:
        for _ in range(2):
            with pytest.raises(CorruptData):
                list(replay)
    with replay_of(root, on_error="skip", ratio=SamplesPerInsert(max=1)) as replay:
        drawn = sum(len(batch) for batch in replay)
        assert replay.skipped == 8
        assert replay.counters.inserted == 50 - replay.skipped
        assert drawn == replay.counters.inserted - 1


@pytest.mark.parametrize("batch", [multi_agent(), sequences()], ids=["agents", "sequences"])
def test_what_does_not_count_in_rows_is_refused(batch: Any) -> None:
    root = fresh_root()
    with ParquetWriter(root) as writer:
        writer.write(batch)
    with replay_of(root) as replay, pytest.raises(OptionError, match="FollowReader"):
        replay.sample()


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity": 0},
        {"capacity": 5, "ratio": SamplesPerInsert(min_size=6)},
        {"slots": 1, "shard": (0, 2)},
        {"timeout": -1},
        {"batch_size": 0},
        {"draw": rlio.WholeEpisodes()},
        {"ratio": SamplesPerInsert(min=1)},
        {"ratio": SamplesPerInsert(min=1, max=1), "markers": Markers("learner")},
        {"draw": rlio.Sequences(2000)},
        {"nonsense": 1},
        {"shard": (2, 2)},
        {"missing": "drop"},
        {"prioritised": True},
    ],
)
def test_what_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        replay_of(fresh_root(), **wrong)


def test_a_batch_for_which_limits_never_leave_room_is_refused() -> None:
    limits = SamplesPerInsert(min=1, max=1, error_buffer=6)
    with replay_of(finished({A: 50}), ratio=limits, markers=Markers("learner")) as replay:
        assert len(replay.sample()) == 10
        with pytest.raises(OptionError, match="error_buffer=26"):
            replay.sample(50)


# ---- threads and processes ----


@pytest.mark.parametrize("end", [FollowingReplay.close, FollowingReplay.interrupt])
def test_closing_and_interrupting_end_a_wait(end: Any) -> None:
    replay = replay_of(fresh_root(), timeout=None)
    found: list[type[BaseException]] = []

    def sample() -> None:
        try:
            replay.sample()
        except BaseException as error:
            found.append(type(error))

    thread = threading.Thread(target=sample)
    thread.start()
    until(lambda: replay._feed._look_at > 0)
    end(replay)
    thread.join(60)
    assert found == [ClosedError]
    replay.close()
    with pytest.raises(ClosedError):
        replay.sample()


def test_no_thread_is_left_behind_not_even_by_a_reader_that_nobody_closed() -> None:
    others = set(threading.enumerate())

    def feeding() -> list[threading.Thread]:
        return [one for one in set(threading.enumerate()) - others if one.name == "rlio-feed"]

    replay = replay_of(finished({A: 50}))
    replay.sample()
    assert len(feeding()) == 1
    replay.close()
    assert not feeding()
    replay = replay_of(fresh_root(), timeout=0, markers=Markers("learner"))
    with pytest.raises(WaitTimeout):
        replay.sample()
    assert len(feeding()) == 1
    del replay
    gc.collect()
    until(lambda: not feeding())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_opens_its_own() -> None:
    with replay_of(finished({A: 50})) as replay:
        replay.sample()

        def act() -> None:
            with pytest.raises(ClosedError, match="process"):
                replay.sample()

        assert wait_for(fork(act)) == 0


# ---- states ----


@pytest.mark.further
def test_a_state_resumes_at_every_batch_with_each_row_once() -> None:
    root = finished(ROWS)
    limits = SamplesPerInsert(min=1, max=2, error_buffer=20, min_size=5)
    options = {"ratio": limits, "markers": Markers("learner", every_seconds=0)}
    states = []
    with replay_of(root, **options) as replay:
        for _ in replay:
            with replay._feed.changed:  # All three of one moment: rows are put in meanwhile.
                states.append((json.dumps(replay.state_dict()), in_ring(replay), replay.counters))
        end = replay.counters
        assert in_ring(replay) == every_row(ROWS)
    assert len(states) > 30
    assert max(len(text) for text, _, _ in states) < 500
    for text, rows, counters in states[::5]:
        with replay_of(root, **options) as replay:
            replay.load_state_dict(json.loads(text))
            assert in_ring(replay) == rows
            assert replay.counters == counters
            assert json.loads(json.dumps(replay.state_dict())) == json.loads(text)
            for _ in replay:
                pass
            assert in_ring(replay) == every_row(ROWS)
            assert replay.counters == end


def test_a_state_brings_back_what_was_in_a_ring_that_forgets() -> None:
    root = fresh_root()
    with replay_of(root, capacity=40) as replay:
        for first in range(3):
            grow(root, A, 20 * first, 20, label=0)
            settle(replay, 30 * first + 20)
            grow(root, B, 10 * first, 10, label=1)
            settle(replay, 30 * first + 30)
        rows = in_ring(replay)
        assert sum(rows.values()) == 40
        state = replay.state_dict()
    with replay_of(root, capacity=40) as replay:
        replay.load_state_dict(state)
        assert in_ring(replay) == rows
        assert replay.lost == 0
    with replay_of(root, capacity=20) as replay:
        replay.load_state_dict(state)
        smaller = in_ring(replay)
        assert sum(smaller.values()) == 20
        assert smaller.keys() < rows.keys()
    trim(root, A, 50)
    with replay_of(root, capacity=40) as replay:
        replay.load_state_dict(state)
        assert replay.lost == sum(label == 0 and t < 50 for label, t in rows)
        assert in_ring(replay) == Counter(row for row in rows if row[0] == 1 or row[1] >= 50)


def test_a_state_has_no_row_that_is_taken_and_not_in_the_ring_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    take = FollowPass.take_now
    states: list[tuple[Any, int]] = []

    def take_and_save(self: FollowPass, n: int) -> Any:
        taken = take(self, n)
        states.append((replay.state_dict()["position"]["writers"], replay.counters.inserted))
        return taken

    monkeypatch.setattr(FollowPass, "take_now", take_and_save)
    with replay_of(finished(ROWS)) as replay:
        settle(replay, 175)
    assert [inserted for _, inserted in states[:3]] == [0, 8, 16]
    for writers, inserted in states:
        assert sum(row for row, _, _ in writers.values()) == inserted


def test_random_numbers_are_not_used_twice() -> None:
    root = finished({A: 50})
    with replay_of(root, seed=None) as replay:
        settle(replay, 50)
        replay.sample()
        state = replay.state_dict()
        following = replay.sample()["t"].tolist()
    with replay_of(root, seed=None) as replay:
        replay.load_state_dict(state)
        settle(replay, 50)
        assert replay.sample()["t"].tolist() == following


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "change",
    [
        {"version": ["following-replay", 0]},
        {"slots": 32},
        {"seed": 1},
        {"seed": -1},
        {"world": 2},
        {"drawn": "many"},
        {"writers": {"../w": [1, 0, None]}},
        {"writers": {A: [1, 2, None]}},
        {"writers": {A: [5, 0, 6]}},
        {"writers": {A: [2**63, 0, 0]}},
        {"writers": {A: [5]}},
        {"writers": None},
        {"ranks": None},
    ],
)
def test_states_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with replay_of(finished({A: 50})) as replay:
        replay.sample()
        state = replay.state_dict()
        state["position"].update(change)
        with pytest.raises(StateError):
            replay.load_state_dict(state)


def test_a_state_of_another_draw_is_refused() -> None:
    """It drew other units, and counted them as those of the state."""
    root = finished({A: 60})
    with replay_of(root, filter="t > 4") as replay:
        replay.sample()
        state = json.loads(json.dumps(replay.state_dict()))
    for other in ({}, {"filter": "t > 5"}, {"draw": rlio.Sequences(4)}):
        with replay_of(root, **other) as replay, pytest.raises(StateError, match="draw"):
            replay.load_state_dict(state)
    del state["position"]["draw"]  # Earlier states do not hold it.
    with replay_of(root, filter="t > 4") as replay:
        replay.load_state_dict(state)
        assert replay.state_dict()["position"]["draw"]["filter"] == "t > 4"


def test_states_of_other_draws_are_not_merged() -> None:
    root, states = finished({A: 60, B: 60}), []
    for rank, options in ((0, {}), (1, {"filter": "t > 4"})):
        with replay_of(root, shard=(rank, 2), **options) as replay:
            states.append(replay.state_dict())
    with pytest.raises(StateError, match="draw differently"):
        FollowingReplay.merge_states(states)


# ---- marks ----


def test_a_follower_without_a_state_goes_on_where_its_marks_say_if_it_is_told_to() -> None:
    root = fresh_root()
    markers = Markers("learner", every_seconds=0)
    grow(root, A, 0, 30)
    with replay_of(root, markers=markers) as replay:
        settle(replay, 30)
    grow(root, A, 30, 10)
    resumed = Markers("learner", every_seconds=0, resume=True)
    with replay_of(root, markers=resumed) as replay:
        settle(replay, 10)
        assert in_ring(replay) == Counter((0, t) for t in range(30, 40))
        assert replay.counters.inserted == 10
        state = replay.state_dict()
    with replay_of(root, markers=markers) as replay:
        settle(replay, 40)
    with replay_of(root, markers=resumed) as replay:
        replay.load_state_dict(state)
        settle(replay, 10)
        assert replay.counters.inserted == 10


def test_followers_of_other_names_do_not_disturb_each_other() -> None:
    root = finished({A: 30})
    with replay_of(root, markers=Markers("one", every_seconds=0)) as replay:
        settle(replay, 30)
    with replay_of(root, markers=Markers("two", resume=True)) as replay:
        settle(replay, 30)
        assert room(replay) == 0 or replay._feed.complete is False
    with FollowReader(root, idle_timeout=0) as reader:
        assert sum(len(batch) for batch in reader) == 30
