"""Following: every row once, in order within each writer, whatever happens to the shards meanwhile."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from further import further
from growing_data import (
    A,
    B,
    C,
    drain,
    encode,
    follow,
    grow,
    labelled,
    logged,
    publish,
    remove_shard,
    seal,
    tail_rows,
    trim,
    write_rows,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stored_batches import assert_identical, files, fresh_root, load, numbered, put

from rlio import (
    AsyncInput,
    DatasetReader,
    FollowReader,
    IOContext,
    JsonWriter,
    MultiAgentBatch,
    Roll,
    SampleBatch,
    concat_samples,
    read,
)
from rlio.catalog import listing
from rlio.catalog.listing import HoleCheck, list_shards
from rlio.errors import (
    ClosedError,
    CorruptData,
    DataNotFound,
    EndOfData,
    HoleError,
    OptionError,
    SchemaConflict,
    StateError,
)
from rlio.resolve import resolve_input
from rlio.storage.filesystem import Storage
from rlio.testing import ReaderTests, assert_resumes


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "HOLE_CHECK", HoleCheck(seconds=0))


@pytest.fixture(scope="module")
def finished() -> str:
    """61 rows of two writers, closed for good, in shards of 13 rows and row groups of few."""
    root = fresh_root()
    for writer, first, rows in ((A, 0, 40), (B, 40, 21)):
        for start in range(0, rows, 13):
            encoded = encode(numbered(min(13, rows - start), first + start), limit=100)
            publish(root, writer, start, encoded)
        seal(root, writer, rows)
    return root


class TestFinished(ReaderTests):
    """A follower is a reader like any other."""

    @pytest.fixture(autouse=True)
    def _root(self, finished: str) -> None:
        self.root = finished

    def make_reader(self) -> FollowReader:
        return FollowReader(self.root)

    def expected_rows(self) -> SampleBatch:
        return numbered(61)


@pytest.mark.further
class TestFinishedInBatches(TestFinished):
    def make_reader(self) -> FollowReader:
        return FollowReader(self.root, batch_size=9)


@pytest.mark.further
class TestSequences(ReaderTests):
    def make_reader(self) -> FollowReader:
        if not hasattr(type(self), "root"):
            type(self).root = fresh_root()
            publish(type(self).root, A, 0, encode(self.expected_rows(), limit=150))
            seal(type(self).root, A, 55)
        return FollowReader(type(self).root, batch_size=3)

    def expected_rows(self) -> SampleBatch:
        return numbered(55, seq_lens=np.arange(1, 11, dtype=np.int32), state_in_0=np.arange(10.0)[:, None])


def joint(rows: int, first: int = 0) -> MultiAgentBatch:
    """Steps of two agents, of whom one joins late, in episodes that are interleaved."""
    t = np.arange(first, first + rows)
    a = SampleBatch(t=t, eps_id=t % 2, mark=t)
    late = t % 5 > 0
    return MultiAgentBatch({"a": a, "b": a[np.flatnonzero(late)]}, rows)


@pytest.mark.further
class TestJointSteps(ReaderTests):
    def make_reader(self) -> FollowReader:
        if not hasattr(type(self), "root"):
            type(self).root = fresh_root()
            encoded = encode(*(joint(5, first) for first in range(0, 30, 5)), limit=150)
            publish(type(self).root, A, 0, encoded)
            seal(type(self).root, A, 54)
        return FollowReader(type(self).root, batch_size=3)

    def expected_rows(self) -> MultiAgentBatch:
        return concat_samples([joint(5, first) for first in range(0, 30, 5)])


# ---- growing ----


def test_rows_come_as_they_are_stored_and_new_writers_are_taken_up() -> None:
    root = fresh_root()
    grow(root, B, 0, 5)
    with follow(root, idle_timeout=5) as reader:
        assert reader.sample(3)["t"].tolist() == [0, 1, 2]
        grow(root, B, 5, 5)
        assert reader.sample(6)["t"].tolist() == [3, 4, 5, 6, 7, 8]
        grow(root, A, 0, 4)
        grow(root, C, 0, 2)
        assert sorted(reader.sample(7)["t"].tolist()) == sorted([9, *range(4), *range(2)])
        for writer, rows in ((A, 4), (B, 10), (C, 2)):
            seal(root, writer, rows)
        with pytest.raises(EndOfData):
            reader.sample()


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_root_that_is_not_there_yet_is_waited_for(kind: str, tmp_path: Path) -> None:
    root = str(tmp_path / "not" / "yet") if kind == "local" else fresh_root()
    with follow(root, idle_timeout=30, batch_size=8) as reader:
        with pytest.raises(DataNotFound):
            _ = reader.dataset

        def write() -> None:
            for first in (0, 5):
                grow(root, A, first, 5)
                time.sleep(0.05)
            seal(root, A, 10)

        thread = threading.Thread(target=write)
        thread.start()
        batches = [batch["t"].tolist() for batch in reader]
        thread.join()
        assert batches == [list(range(8)), [8, 9]]
        assert len(reader) == len(reader.dataset) == 10


def test_it_does_not_end_while_one_writer_is_open() -> None:
    root = fresh_root()
    for writer in (A, B):
        grow(root, writer, 0, 5)
    seal(root, A, 5)
    with follow(root, idle_timeout=0.2) as reader:
        assert len(drain(reader)) == 10
        assert drain(reader) == [], "the end is final"
    with follow(root, idle_timeout=None) as reader:
        assert len(reader.sample(10)) == 10

        def go_on() -> None:
            grow(root, B, 5, 5)
            seal(root, B, 10)

        threading.Timer(0.2, go_on).start()
        assert drain(reader) == list(range(5, 10))


def test_a_writer_that_was_closed_without_rows_is_served() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    seal(root, A, 5)
    seal(root, B, 0)
    with follow(root, idle_timeout=None) as reader:
        assert len(drain(reader)) == 5


def test_the_idle_time_begins_with_the_wait_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that takes its time between two batches is not told that the data is at its end."""
    root = fresh_root()
    grow(root, A, 0, 5)
    looks, real = itertools.count(), Storage.list

    def rows_at_the_second_look(self: Storage, prefix: str = "", **options: Any) -> Any:
        if prefix == "data" and next(looks) == 1:
            grow(root, A, 5, 5)
        return real(self, prefix, **options)

    with follow(root, idle_timeout=0.5) as reader:
        reader.sample(5)
        time.sleep(0.7)
        monkeypatch.setattr(Storage, "list", rows_at_the_second_look)
        assert reader.sample(5)["t"].tolist() == [5, 6, 7, 8, 9]
    assert next(looks) > 1


def test_without_a_size_a_batch_is_what_is_there() -> None:
    root = fresh_root()
    grow(root, A, 0, 5, limit=None)
    with follow(root, idle_timeout=None) as reader:
        assert len(reader.sample()) == 5


def test_drop_last_drops_a_short_end_and_leaves_it_to_the_next_reader() -> None:
    root = fresh_root()
    grow(root, A, 0, 10)
    with follow(root, batch_size=4, drop_last=True) as reader:
        assert drain(reader) == list(range(8))
        state = reader.state_dict()
    grow(root, A, 10, 2)
    with follow(root, batch_size=4, drop_last=True) as reader:
        reader.load_state_dict(state)
        assert drain(reader) == [8, 9, 10, 11]


def test_columns_and_read_work() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    with read(FollowReader, root=root, idle_timeout=0, columns=["t"]) as reader:
        assert list(reader.sample()) == ["t"]
    with read(FollowReader, root=fresh_root(), idle_timeout=0) as reader, pytest.raises(EndOfData):
        reader.sample()


def test_json_shards_are_followed() -> None:
    root = fresh_root()
    with JsonWriter(root, writer_id=A, roll=Roll(max_rows=7, max_seconds=None)) as writer:
        for first in range(0, 30, 3):
            writer.write(labelled(first, 3))
    with follow(root) as reader:
        assert drain(reader, 4) == list(range(30))
    assert_resumes(lambda: follow(root), 4)


def test_an_empty_poll_is_one_listing_and_batches_that_are_there_need_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many shards there are."""
    root = fresh_root()
    for first in range(0, 60, 3):
        grow(root, A, first, 3)
    calls: list[str] = []
    real = Storage.list
    monkeypatch.setattr(
        Storage, "list", lambda self, prefix="", **o: (calls.append(prefix), real(self, prefix, **o))[1]
    )
    with follow(root, batch_size=5) as reader:
        assert drain(reader) == list(range(60))
    assert calls.count("data") == 2, "one that found all, one that found no more"
    assert calls.count("_schema") == 1


def test_listings_that_take_long_are_as_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    root = fresh_root()
    grow(root, A, 0, 3)
    real, now = Storage.list, [0.0]
    monkeypatch.setattr("rlio.following.follow.time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(self: Storage, prefix: str = "", **options: Any) -> Any:
        now[0] += 0.02
        return real(self, prefix, **options)

    with follow(root, idle_timeout=0, poll_seconds=0.01) as reader:
        assert drain(reader) == [0, 1, 2]
        assert reader._pass.pause == 0.01  # type: ignore[attr-defined] # it is not waited for here
        monkeypatch.setattr(Storage, "list", slow)
        reader.load_state_dict(reader.state_dict())
        assert drain(reader) == []
        assert reader._pass.pause >= 0.2  # type: ignore[attr-defined]


# ---- ranks ----


def test_ranks_share_the_writers_out_and_each_row_is_served_once() -> None:
    root = fresh_root()
    writers = [f"w{i:05d}-0000000{i}" for i in range(9)]
    for label, writer in enumerate(writers):
        grow(root, writer, 0, 6, label=label)
        seal(root, writer, 6)
    for world in (1, 2, 3, 4):
        served = []
        for rank in range(world):
            with follow(root, idle_timeout=None, shard=(rank, world), batch_size=4) as reader:
                rows = [(x, y) for batch in reader for x, y in zip(batch["label"], batch["t"], strict=True)]
                served += rows
        assert sorted(served) == [(x, y) for x in range(9) for y in range(6)]


# ---- resuming ----


def test_a_state_is_small_json_and_resumes_at_every_batch_while_the_data_grows() -> None:
    root = fresh_root()
    served: list[int] = []
    state = None
    for first in range(0, 60, 6):
        grow(root, A, first, 6)
        for n in (1, 4):
            with follow(root) as reader:
                if state is not None:
                    reader.load_state_dict(state)
                served += reader.sample(n)["t"].tolist()
                state = reader.state_dict()
                assert len(str(state)) < 500
    with follow(root) as reader:
        reader.load_state_dict(state)
        served += drain(reader)
    assert served == list(range(60))


@pytest.mark.further
def test_rows_left_over_by_the_base_resume_too(finished: str) -> None:
    for n in (None, 1, 7):
        assert_resumes(lambda: FollowReader(finished, batch_size=5), n)


@pytest.mark.parametrize(
    "change",
    [{"rows": {"../x": 1}}, {"rows": {A: -1}}, {"rows": {A: True}}, {"rows": 3}, {"order": ["recorded", 0]},
     {"options": {"shard": [1, 2], "columns": None}}, {"chunk": [3, 1]}, {"chunk": "x"},
     {"turn": None, "chunk": [9, 1]}],
)  # fmt: skip
def test_states_that_do_not_fit_are_refused(finished: str, change: dict[str, Any]) -> None:
    with follow(finished) as reader:
        reader.sample(5)
        state = reader.state_dict()
        state["position"] = state["position"] | change
        with pytest.raises(StateError):
            reader.load_state_dict(state)


def test_states_of_epochs_and_of_following_are_told_apart(finished: str) -> None:
    with follow(finished) as one, DatasetReader(finished) as other:
        for reader, foreign in ((one, other), (other, one)):
            with pytest.raises(StateError, match="order"):
                reader.load_state_dict(foreign.state_dict())


# ---- compaction ----


@pytest.mark.further
def test_rows_are_served_from_a_larger_shard_after_a_restart() -> None:
    root = fresh_root()
    small = [grow(root, A, first, 5) for first in range(0, 20, 5)]
    for stop in range(1, 20):
        with follow(root) as reader:
            served = reader.sample(stop)["t"].tolist()
            state = reader.state_dict()
        big = grow(root, A, 0, 20, limit=1000)
        for ref in small:
            remove_shard(root, ref)
        with follow(root) as reader:
            reader.load_state_dict(state)
            assert served + drain(reader, 3) == list(range(20))
        remove_shard(root, big)
        small = [grow(root, A, first, 5) for first in range(0, 20, 5)]


@pytest.mark.few(2)
@pytest.mark.parametrize("stop", [0, 1, 4, 7, 11, 19])
def test_a_shard_that_disappears_while_it_is_read_is_gone_on_with_in_its_cover(stop: int) -> None:
    root = fresh_root()
    small = [grow(root, A, first, 5, limit=60) for first in range(0, 20, 5)]
    with follow(root, idle_timeout=5) as reader:
        served = reader.sample(stop)["t"].tolist() if stop else []
        grow(root, A, 0, 20, limit=100)
        for ref in small:
            remove_shard(root, ref)
        seal(root, A, 20)
        assert served + drain(reader, 2) == list(range(20))


@pytest.mark.few(1)
@pytest.mark.parametrize("stop", [1, 9, 17, 25, *further(5, 13, 21, 29)])
@pytest.mark.parametrize("limits", [(150, 4000), (4000, 150)])
@pytest.mark.each_value_once
def test_joint_steps_resume_across_compaction(stop: int, limits: tuple[int, int]) -> None:
    """Their rows do not lie step by step, and other row groups hold other steps."""
    parts = [joint(6, first) for first in range(0, 30, 6)]
    marks = [m for part in parts for m in part["a"]["mark"].tolist()]
    root = fresh_root()
    rows, small = 0, []
    for part in parts:
        small.append(publish(root, A, rows, encode(part, limit=limits[0])))
        rows += part.agent_steps()
    seal(root, A, rows)
    with follow(root) as reader:
        head = reader.sample(stop)
        assert isinstance(head, MultiAgentBatch)
        state = reader.state_dict()
    publish(root, A, 0, encode(*parts, limit=limits[1]))
    for ref in small:
        remove_shard(root, ref)
    with follow(root) as reader:
        reader.load_state_dict(state)
        found = list(reader)
    assert sorted([*head["a"]["mark"].tolist(), *(m for b in found for m in b["a"]["mark"])]) == sorted(marks)
    late = sorted(m for part in parts for m in part["b"]["mark"].tolist())
    both = [head, *found]
    assert sorted(m for b in both if "b" in b for m in b["b"]["mark"].tolist()) == late
    assert sum(batch.agent_steps() for batch in both) == rows


@pytest.mark.few(2)
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_sequences_resume_across_compaction(stop: int) -> None:
    lens = np.array([1, 2, 3, 4], np.int32)
    parts = [numbered(10, first, seq_lens=lens) for first in (0, 10)]
    root = fresh_root()
    small = [publish(root, A, first, encode(part)) for first, part in zip((0, 10), parts, strict=True)]
    with follow(root) as reader:
        served = reader.sample(stop)["t"].tolist()
        state = reader.state_dict()
        assert reader.unit == "sequences"
    publish(root, A, 0, encode(*parts))
    for ref in small:
        remove_shard(root, ref)
    with follow(root) as reader:
        reader.load_state_dict(state)
        assert served + drain(reader, 1) == list(range(20))


def test_a_shard_that_is_listed_and_never_there_is_an_error_or_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = fresh_root()
    ghost = [grow(root, A, first, 5) for first in (0, 5, 10)][1]
    real = Storage.list
    listed = real(Storage.open(root), "data")
    monkeypatch.setattr(
        Storage, "list", lambda self, prefix="", **o: listed if prefix == "data" else real(self, prefix, **o)
    )
    remove_shard(root, ghost)
    with follow(root) as reader:
        assert reader.sample(5)["t"].tolist() == list(range(5))
        with pytest.raises(HoleError, match="listed and is not there"):
            reader.sample(5)
    with follow(root, on_error="skip") as reader:
        assert drain(reader) == [*range(5), *range(10, 15)]
        assert reader.skipped == 5


# ---- holes, damage, trims ----


def test_a_hole_is_an_error_that_goes_away_once_it_is_filled() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    with follow(root, idle_timeout=5) as reader:
        assert reader.sample(5)["t"].tolist() == list(range(5))
        grow(root, A, 8, 5)
        for _ in range(2):
            with pytest.raises(HoleError, match=r"rows 5 to 7 of writer '.*a' are not there, in 3 listings"):
                reader.sample(3)
        grow(root, A, 5, 3)
        assert reader.sample(8)["t"].tolist() == list(range(5, 13))


@pytest.mark.parametrize(
    ("misses", "hidden"),
    [(1, "000000000005"), (2, "000000000005"), (2, "000000000010"), (3, "000000000005")],
)
def test_a_hole_that_a_later_listing_fills_is_none(
    misses: int, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fresh_root()
    for first in (0, 5, 10):
        grow(root, A, first, 5)
    seal(root, A, 15)
    listed = 0
    real = Storage.list

    def listing_of(self: Storage, prefix: str = "", **options: Any) -> Any:
        nonlocal listed
        listed += prefix == "data"
        late = prefix == "data" and listed <= misses
        return [e for e in real(self, prefix, **options) if not (late and hidden in e.path)]

    monkeypatch.setattr(Storage, "list", listing_of)
    with follow(root) as reader:
        if misses < 3:
            assert drain(reader) == list(range(15))
        else:
            with pytest.raises(HoleError):
                reader.sample()


def test_holes_are_counted_where_they_are_skipped() -> None:
    root = fresh_root()
    for first in (3, 12):
        grow(root, A, first, 5)
    grow(root, B, 0, 4)
    seal(root, A, 20)
    seal(root, B, 4)
    with follow(root, on_error="skip", idle_timeout=None) as reader:
        assert sorted(drain(reader, 3)) == sorted([*range(3, 8), *range(12, 17), *range(4)])
        assert reader.skipped == 10
    assert_resumes(lambda: follow(root, on_error="skip"), 2)


def test_a_seal_that_promises_more_rows_than_there_are_is_a_hole() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    seal(root, A, 9)
    with follow(root, idle_timeout=None) as reader:
        with pytest.raises(HoleError, match=r"rows 5 to 8 .* closed with 9 rows"):
            drain(reader, 6)
        grow(root, A, 5, 4)
        assert drain(reader) == list(range(9))


def test_damaged_groups_are_an_error_or_counted() -> None:
    root = fresh_root()
    grow(root, A, 0, 30, limit=100)
    ((path, data),) = files(root).items()
    put(path, data[:12] + bytes([data[12] ^ 1]) + data[13:])
    with follow(root) as reader, pytest.raises(CorruptData, match="CRC-32"):
        reader.sample(5)
    with follow(root, on_error="skip") as reader:
        served = drain(reader, 4)
        assert served == list(range(30 - len(served), 30))
        assert 0 < len(served) < 30
        assert reader.skipped == 30 - len(served)
    assert_resumes(lambda: follow(root, on_error="skip"), 4)


def test_a_shard_that_stays_torn_is_not_passed_over_in_silence() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    torn = grow(root, A, 5, 5)
    storage = Storage.open(root)
    data = storage.read(torn.path)
    storage.put(torn.path, data[:-1])
    with follow(root) as reader:
        assert reader.sample(5)["t"].tolist() == list(range(5))
        with pytest.raises(CorruptData, match="torn"):
            reader.sample(5)
        storage.put(torn.path, data)  # It was being uploaded.
        assert reader.sample(5)["t"].tolist() == list(range(5, 10))
    storage.put(torn.path, data[:-1])
    with follow(root, on_error="skip") as reader:
        assert drain(reader) == list(range(5))
        assert reader.skipped == 5


def test_rows_trimmed_before_they_were_read_are_logged_and_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = fresh_root()
    for first in range(0, 20, 5):
        grow(root, A, first, 5)
    with follow(root, idle_timeout=None) as reader:
        assert reader.sample(2)["t"].tolist() == [0, 1]
        state = reader.state_dict()
    trim(root, A, 10)
    seal(root, A, 20)
    with follow(root, idle_timeout=None) as reader:
        reader.load_state_dict(state)
        assert drain(reader, 3) == list(range(10, 20))
        assert "8 rows of writer" in caplog.messages[-1]
    with follow(root, idle_timeout=None) as reader:
        assert drain(reader) == list(range(10, 20))
        assert "10 rows of writer" in caplog.messages[-1]


def test_a_late_retry_of_a_trimmed_shard_brings_no_row_back() -> None:
    root = fresh_root()
    for first in (0, 5, 10):
        grow(root, A, first, 5)
    trim(root, A, 7)
    grow(root, A, 0, 5)
    with follow(root) as reader:
        assert drain(reader) == list(range(7, 15))
    assert load(root)["t"].tolist() == list(range(7, 15))


def test_steps_of_a_chunk_that_was_trimmed_are_never_served_twice(caplog: pytest.LogCaptureFixture) -> None:
    parts = [joint(6, 0), joint(6, 6)]
    root = fresh_root()
    publish(root, A, 0, encode(*parts))
    rows = sum(part.agent_steps() for part in parts)
    with follow(root) as reader:
        reader.sample(2)
        state = reader.state_dict()
    trim(root, A, parts[0].agent_steps())
    with follow(root) as reader:
        reader.load_state_dict(state)
        with pytest.raises(EndOfData):
            reader.sample()
        assert f"{rows} rows of writer" in caplog.messages[-1]


# ---- schemas ----


def test_a_writer_with_other_columns_is_a_conflict_or_filled() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    with follow(root, idle_timeout=5) as plain, follow(root, idle_timeout=5, missing="fill") as filling:
        plain.sample(4)
        filling.sample(4)
        publish(root, B, 0, encode(SampleBatch(labelled(0, 5), rewards=np.ones(5))))
        with pytest.raises(SchemaConflict, match="rewards"):
            plain.sample(6)
        batch = filling.sample(6)
        assert batch["t"].tolist() == [4, 0, 1, 2, 3, 4]
        assert batch["rewards"].tolist() == [0, 1, 1, 1, 1, 1]
    with follow(root, columns=["t"]) as reader:
        assert len(drain(reader)) == 10


def test_a_writer_of_sequences_among_rows_is_refused() -> None:
    root = fresh_root()
    publish(root, A, 0, encode(numbered(5)))
    with follow(root, idle_timeout=5, missing="fill") as reader:
        reader.sample(5)
        publish(root, B, 0, encode(numbered(6, seq_lens=[3, 3])))
        with pytest.raises(SchemaConflict, match="sequences"):
            reader.sample(1)


def test_rows_without_a_header_or_schema_are_an_error() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    storage = Storage.open(root)
    schema = storage.list("_schema")[0].path
    text = storage.read(schema)
    storage.remove(schema)
    with follow(root) as reader, pytest.raises(CorruptData, match="restore _schema"):
        reader.sample()
    storage.put(schema, text)
    storage.remove("_rlio.json")
    with follow(root) as reader, pytest.raises(DataNotFound, match="_rlio"):
        reader.sample()


# ---- options, closing ----


@pytest.mark.parametrize(
    "options",
    [{"epochs": 1}, {"shuffle": True}, {"seed": 1}, {"at": {}}, {"missing": "drop"}, {"idle_timeout": -1},
     {"idle_timeout": "1"}, {"poll_seconds": 0}, {"poll_seconds": None}, {"poll_seconds": float("nan")}],
)  # fmt: skip
def test_what_contradicts_following_is_refused(finished: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        follow(finished, **options)


@pytest.mark.parametrize("options", [{"follow": True}, {"idle_timeout": 1.0}, {"poll_seconds": 2.0}])
def test_a_reader_that_was_asked_to_follow_says_what_to_write_now(
    finished: str, options: dict[str, Any]
) -> None:
    for opens in (DatasetReader, read, lambda root, **more: read({root: 1.0}, **more)):
        for root in (finished, fresh_root()):
            with pytest.raises(OptionError, match=r"rlio\.FollowReader\(root"):
                opens(root, **options)


def test_workers_that_get_the_class_share_the_writers() -> None:
    root = fresh_root()
    for writer in (A, B, C):
        grow(root, writer, 0, 4)
    found = []
    for rank in range(3):
        context = IOContext(worker_index=rank + 1, num_workers=3, options={"root": root, "idle_timeout": 0})
        with resolve_input(FollowReader, context) as reader:
            assert isinstance(reader, FollowReader)
            assert reader.options.shard == (rank, 3)
            found += [(batch["t"].tolist(), rank) for batch in reader]
    assert sorted(t for t, _ in found) == [[0, 1, 2, 3]] * 3
    chosen = IOContext(worker_index=1, num_workers=3, options={"root": root, "shard": (0, 1)})
    with resolve_input(FollowReader, chosen) as reader:
        assert reader.options.shard == (0, 1)  # type: ignore[attr-defined]


def test_a_state_of_a_reader_that_followed_before_it_had_a_class_loads(finished: str) -> None:
    with follow(finished, batch_size=5) as reader:
        reader.sample()
        state = reader.state_dict()
        rest = drain(reader)
    earlier = {**state, "reader": "DatasetReader"}
    for saved in (state, earlier):
        with follow(finished, batch_size=5) as reader:
            reader.load_state_dict(saved)
            assert drain(reader) == rest
    with DatasetReader(finished) as plain:
        with pytest.raises(StateError, match=r"rlio\.FollowReader"):
            plain.load_state_dict(earlier)
        with pytest.raises(StateError, match="FollowReader"):
            plain.load_state_dict(state)
        with follow(finished) as reader, pytest.raises(StateError, match="follows"):
            reader.load_state_dict(
                plain.state_dict() if plain._load_failure is None else {**state, "position": {}}
            )


def test_an_input_in_a_thread_is_closed_while_its_reader_waits_for_rows() -> None:
    reader = AsyncInput(follow(fresh_root(), idle_timeout=None, poll_seconds=60))

    def wait() -> None:
        with pytest.raises(ClosedError):
            reader.sample()

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not reader._ahead.is_running:
        time.sleep(0.001)
    closing = threading.Thread(target=reader.close)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()


def test_closing_ends_a_wait() -> None:
    reader = follow(fresh_root(), idle_timeout=None, poll_seconds=60)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            reader.sample()
        except ClosedError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    reader.close()
    thread.join(60)
    assert len(failures) == 1


def test_no_thread_is_left_behind(finished: str) -> None:
    before = set(threading.enumerate())
    with follow(finished) as reader:
        reader.sample(20)
    assert set(threading.enumerate()) <= before


def test_batches_are_the_callers_own(finished: str) -> None:
    with follow(finished, batch_size=7) as reader:
        found = []
        for batch in reader:
            found.append(batch.copy())
            batch["t"][:] = -1
    assert_identical(concat_samples(found), numbered(61))


# ---- against a model ----


class Following(RuleBasedStateMachine):
    """Two writers whose shards come late, overlap, are compacted, collected and trimmed, and one follower."""

    @initialize()
    def begin(self) -> None:
        self.root = fresh_root()
        self.storage = Storage.open(self.root)
        self.written = {A: 0, B: 0}
        self.late: dict[str, list[tuple[int, int]]] = {A: [], B: []}
        self.trimmed = {A: 0, B: 0}
        self.served: dict[str, list[int]] = {A: [], B: []}
        self.reader = follow(self.root)
        grow(self.root, A, 0, 3, label=0)
        self.written[A] = 3

    writers = st.sampled_from([A, B])

    def put(self, writer: str, first: int, rows: int) -> None:
        grow(self.root, writer, first, rows, label=writer == B, limit=60 if rows % 2 else 1000)

    def is_whole(self, writer: str, first: int, stop: int) -> bool:
        """Whether all these rows are stored, so that somebody could compact them."""
        return not any(a < stop and first < a + n for a, n in self.late[writer])

    @rule(writer=writers, rows=st.integers(1, 6), is_late=st.booleans())
    def write(self, writer: str, rows: int, is_late: bool) -> None:
        first = self.written[writer]
        self.written[writer] += rows
        if is_late:
            self.late[writer].append((first, rows))
        else:
            self.put(writer, first, rows)

    @rule(writer=writers)
    def arrive(self, writer: str) -> None:
        if self.late[writer]:
            self.put(writer, *self.late[writer].pop())

    @rule(writer=writers, first=st.integers(0, 30), rows=st.integers(1, 12))
    def store_again(self, writer: str, first: int, rows: int) -> None:
        """A retry under another size of shard, also of rows that were trimmed."""
        stop = min(first + rows, self.written[writer])
        if first < stop and self.is_whole(writer, first, stop):
            self.put(writer, first, stop - first)

    @rule(writer=writers, first=st.integers(0, 30), rows=st.integers(4, 30))
    def compact(self, writer: str, first: int, rows: int) -> None:
        stop = min(first + rows, self.written[writer])
        if first >= stop or not self.is_whole(writer, first, stop):
            return
        self.put(writer, first, stop - first)
        for ref in list_shards(self.storage).shards.get(writer, []):
            if first <= ref.name.first and ref.name.end <= stop and ref.name.rows < stop - first:
                self.storage.remove(ref.path)

    @rule(writer=writers, row=st.integers(0, 20))
    def trim(self, writer: str, row: int) -> None:
        if row <= self.written[writer] and self.is_whole(writer, 0, row):
            trim(self.root, writer, row)
            self.trimmed[writer] = max(row, self.trimmed[writer])

    @rule(n=st.integers(1, 9), restart=st.booleans())
    def read(self, n: int, restart: bool) -> None:
        if restart:
            self.restart()
        try:
            self.take(self.reader.sample(n))
        except EndOfData:
            self.restart()
        except HoleError:
            assert any(self.late.values()), "a hole where every row was stored"

    def restart(self) -> None:
        state = self.reader.state_dict()
        self.reader.close()
        self.reader = follow(self.root)
        self.reader.load_state_dict(state)

    def take(self, batch: Any) -> None:
        for label, row in zip(batch["label"].tolist(), batch["t"].tolist(), strict=True):
            self.served[B if label else A].append(row)

    @invariant()
    def rows_come_in_order_and_only_trimmed_ones_are_left_out(self) -> None:
        if not hasattr(self, "served"):
            return
        for writer, rows in self.served.items():
            assert rows == sorted(set(rows))
            assert set(range(rows[-1] + 1 if rows else 0)) - set(rows) <= set(range(self.trimmed[writer]))

    def teardown(self) -> None:
        if not hasattr(self, "served"):
            return
        for writer, late in self.late.items():
            while late:
                self.arrive(writer)
            seal(self.root, writer, self.written[writer])
        self.restart()
        for batch in self.reader:
            self.take(batch)
        self.reader.close()
        for writer, rows in self.served.items():
            assert rows == sorted(set(rows))
            missing = set(range(self.written[writer])) - set(rows)
            assert missing <= set(range(self.trimmed[writer])), "rows were lost that nobody trimmed"


TestAgainstAModel = Following.TestCase
TestAgainstAModel.settings = settings(max_examples=6, stateful_step_count=25, deadline=None)


# ---- processes ----


def cover_some(root: str, rows: int) -> Iterator[int]:
    """Compact as shards come: cover whole runs of a writer by one shard, then remove what it covers."""
    storage = Storage.open(root, sync=False)
    while True:
        for writer, refs in list_shards(storage).shards.items():
            label = int(writer[1:6])
            run = list_shards(storage).cover(writer).segments
            if len(run) < 4:
                continue
            end = run[-1].end
            first = run[max(len(run) - 6, 0)].ref.name.first
            grow(root, writer, first, end - first, label=label, limit=20_000)
            for ref in refs:
                if first <= ref.name.first and ref.name.end <= end and ref.name.rows < end - first:
                    storage.remove(ref.path)
            yield end // rows


@pytest.mark.parametrize("shards", [*further(40), pytest.param(400, marks=pytest.mark.soak)])
def test_followers_in_other_processes_see_each_row_once_while_it_is_written_and_compacted(
    tmp_path: Path, shards: int
) -> None:
    """With restarts from saved states, and one of the followers killed and started again."""
    root, rows = str(tmp_path / "run"), 25
    context = multiprocessing.get_context("spawn")
    logs = [str(tmp_path / f"follower-{i}") for i in range(2)]

    def start(i: int) -> Any:
        process = context.Process(target=tail_rows, args=(root, logs[i], i))
        process.start()
        return process

    followers = [start(0), start(1)]
    writers = [context.Process(target=write_rows, args=(root, label, shards, rows)) for label in (1, 2)]
    for process in writers:
        process.start()
    try:
        compactions = cover_some(root, rows)
        deadline, killed, compacted = time.monotonic() + 240, False, 0
        while any(process.is_alive() for process in [*writers, *followers]):
            assert time.monotonic() < deadline
            if any(process.is_alive() for process in writers) and Path(root).exists():
                found = list_shards(Storage.open(root))
                if any(len(found.cover(w).segments) >= 4 for w in found.writers):
                    next(compactions)
                    compacted += 1
            if not killed and Path(logs[0]).exists() and len(Path(logs[0]).read_text()) > 2000:
                followers[0].kill()
                followers[0].join()
                followers[0] = start(0)
                killed = True
            time.sleep(0.02)
    finally:
        for process in [*writers, *followers]:
            process.kill()
            process.join()
    assert [process.exitcode for process in [*writers, *followers]] == [0] * 4
    assert killed
    assert compacted > 2
    for log in logs:
        lines = logged(log)
        assert lines[-1]["end"]
        for label in (1, 2):
            served = [
                t
                for line in lines
                for t, owner in zip(line["t"], line["label"], strict=True)
                if owner == label
            ]
            assert served == list(range(shards * rows))
