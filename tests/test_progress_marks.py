"""Progress marks: what their names say, what writers are told, and what others make of the folder."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
from growing_data import A, B, C, grow, seal
from hypothesis import example, given
from hypothesis import strategies as st
from stored_batches import fresh_root

import rlio
from rlio import Markers, SampleBatch
from rlio.catalog.listing import list_shards
from rlio.catalog.names import MAX_ROW
from rlio.errors import OptionError, UnsafeData
from rlio.following.markers import Growing, MarkKeeper, share_out
from rlio.following.marks import (
    Mark,
    list_marks,
    mark_path,
    newest,
    parse_mark_path,
    put_mark,
)
from rlio.storage.filesystem import Storage

# ---- names ----

numbers = st.integers(0, MAX_ROW)
names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,63}", fullmatch=True)


@given(names, numbers, numbers, numbers)
def test_a_name_says_what_the_mark_was_made_of(name: str, number: int, row: int, ceiling: int) -> None:
    """Format 10.1."""
    mark = Mark(follower=name, number=number, row=row, ceiling=ceiling)
    assert Mark.parse(mark.format()) == mark
    assert parse_mark_path(mark_path(A, mark)) == (A, mark)
    assert pickle.loads(pickle.dumps(mark)) == mark


@pytest.mark.parametrize(
    "name",
    [
        "learner_1_2",
        "learner_1_2_3_4",
        "Learner_1_2_3",
        "-learner_1_2_3",
        "learner_-1_2_3",
        "learner_1_2_3\n",
        "learner_1_2_٣",
        "learner_1_2_5000000000000000000",
        "learner_1_2_99999999999999999999",
        "_1_2_3",
        f"{'l' * 65}_1_2_3",
        "learner_1_2_3.tmp",
    ],
)
def test_what_is_no_name_of_a_mark_is_none(name: str) -> None:
    """Format 10.1."""
    assert Mark.parse(name) is None
    assert parse_mark_path(f"_progress/{A}/{name}") is None


@pytest.mark.parametrize("path", [f"_progress/{A}", "_progress/../learner_1_2_3", f"data/{A}/learner_1_2_3"])
def test_marks_lie_nowhere_else(path: str) -> None:
    assert parse_mark_path(path) is None


def test_illegal_marks_are_not_made() -> None:
    for wrong in ({"follower": "a_b"}, {"number": -1}, {"ceiling": MAX_ROW + 1}):
        with pytest.raises(OptionError):
            Mark(**{"follower": "learner", "number": 0, "row": 0, "ceiling": 0, **wrong})


def test_the_mark_with_the_largest_number_counts_and_of_two_the_stricter() -> None:
    """Format 10.3."""

    def mark(follower: str, number: int, ceiling: int) -> Mark:
        return Mark(follower=follower, number=number, row=0, ceiling=ceiling)

    marks = [mark("a", 9, 5), mark("a", 10, 3), mark("b", 2, 7), mark("b", 2, 6), mark("a", 8, 99)]
    assert newest(marks) == {"a": mark("a", 10, 3), "b": mark("b", 2, 6)}


# ---- what is dealt out ----

small = st.builds(Growing, rows=st.integers(0, 9), ceiling=st.integers(0, 9))
growing = st.builds(
    Growing,
    rows=st.integers(0, 1000),
    ceiling=st.integers(0, 1200),
    is_open=st.booleans(),
    is_idle=st.booleans(),
)


@given(
    st.integers(-50, 60) | st.integers(0, 8000),
    st.dictionaries(st.sampled_from("abcdefgh"), small)
    | st.dictionaries(st.sampled_from("abcdefgh"), growing),
)
@example(free=10, writers={"a": Growing(rows=10, ceiling=20), "b": Growing(rows=100, ceiling=100)})
def test_ceilings_never_allow_more_than_there_is_in_all(free: int, writers: dict[str, Growing]) -> None:
    total = sum(found.held for found in writers.values()) + free
    ceilings = share_out(total, writers)
    assert ceilings.keys() == writers.keys()
    for writer, found in writers.items():
        assert ceilings[writer] >= found.ceiling  # Nothing is taken back.
    held = {writer: found.held for writer, found in writers.items()}
    # What a writer that sleeps was told once is not reckoned with, unless it uses it.
    reckoned = sum(
        ceilings[writer] if found.is_open and not found.is_idle else held[writer]
        for writer, found in writers.items()
    )
    active = [writer for writer, found in writers.items() if found.is_open and not found.is_idle]
    assert reckoned <= max(total, sum(held.values()))
    if active and total >= sum(held.values()):
        assert reckoned == total  # And nothing is left over.
        left = {writer: ceilings[writer] - writers[writer].rows for writer in active}
        got = [writer for writer in active if ceilings[writer] > held[writer]]
        # Who got something has no more left than anybody else, but for one row.
        assert all(left[writer] <= min(left.values()) + 1 for writer in got)


# ---- the keeper ----


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def keeper_of(root: str, clock: Clock, **options: float) -> MarkKeeper:
    return MarkKeeper(
        Storage.open(root), Markers("learner", **options), lambda writer: writer != C, clock=clock
    )


def told(root: str) -> dict[str, list[str]]:
    return {
        writer: [mark.format() for mark in marks.values()]
        for writer, marks in list_marks(Storage.open(root)).items()
    }


def test_each_writer_of_the_follower_is_told_its_share_and_old_marks_go() -> None:
    """Format 10.2 and 10.4."""
    root, clock = fresh_root(), Clock()
    storage = Storage.open(root)
    for writer, rows in ((A, 10), (B, 40), (C, 10)):
        grow(root, writer, 0, rows)
    keeper = keeper_of(root, clock, every_seconds=1.0)
    keeper.tell({A: 5}, list_shards(storage), 110)
    assert told(root) == {A: ["learner_0_5_40"], B: ["learner_0_0_70"]}
    keeper.tell({A: 10, B: 40}, list_shards(storage), 130)
    assert told(root) == {A: ["learner_0_5_40"], B: ["learner_0_0_70"]}, "too early for another round"
    clock.now += 1
    keeper.tell({A: 10, B: 40}, list_shards(storage), 130)
    assert told(root) == {A: ["learner_1_10_50"], B: ["learner_1_40_80"]}
    assert keeper.put == 4


def test_a_writer_at_its_ceiling_hears_a_heartbeat_and_others_nothing() -> None:
    root, clock = fresh_root(), Clock()
    grow(root, A, 0, 30)
    grow(root, B, 0, 10)
    keeper = keeper_of(root, clock, heartbeat_seconds=10.0)
    listing = list_shards(Storage.open(root))
    keeper.tell({}, listing, 50)
    assert told(root) == {A: ["learner_0_0_35"], B: ["learner_0_0_15"]}
    grow(root, A, 30, 10)
    listing = list_shards(Storage.open(root))
    for _ in range(3):
        clock.now += 5
        keeper.tell({}, listing, 50)
    assert told(root) == {A: ["learner_1_0_35"], B: ["learner_0_0_15"]}


def test_marks_come_by_count_and_at_once_for_who_waits() -> None:
    root, clock = fresh_root(), Clock()
    grow(root, A, 0, 10)
    grow(root, B, 0, 90)
    keeper = keeper_of(root, clock, every_rows=20)
    keeper.tell({}, list_shards(Storage.open(root)), 120)
    assert told(root) == {A: ["learner_0_0_20"], B: ["learner_0_0_100"]}
    grow(root, B, 90, 10)
    clock.now += 1
    keeper.tell({}, list_shards(Storage.open(root)), 130)
    assert told(root) == {A: ["learner_0_0_20"], B: ["learner_1_0_110"]}


def test_what_a_silent_writer_may_write_goes_to_others_after_a_while() -> None:
    root, clock = fresh_root(), Clock()
    grow(root, A, 0, 10)
    grow(root, B, 0, 10)
    keeper = keeper_of(root, clock, idle_seconds=60.0)
    keeper.tell({}, list_shards(Storage.open(root)), 100)
    assert told(root) == {A: ["learner_0_0_50"], B: ["learner_0_0_50"]}
    grow(root, B, 10, 40)
    clock.now += 59
    keeper.tell({}, list_shards(Storage.open(root)), 100)
    assert told(root)[B] == ["learner_1_0_50"], "a heartbeat"
    clock.now += 2
    keeper.tell({}, list_shards(Storage.open(root)), 100)
    assert told(root)[B] == ["learner_2_0_90"]
    assert told(root)[A] == ["learner_0_0_50"]


def test_a_sealed_writer_keeps_nothing_and_its_last_row_is_marked() -> None:
    root, clock = fresh_root(), Clock()
    grow(root, A, 0, 10)
    grow(root, B, 0, 10)
    keeper = keeper_of(root, clock)
    keeper.tell({}, list_shards(Storage.open(root)), 100)
    seal(root, A, 10)
    clock.now += 1
    keeper.tell({A: 10}, list_shards(Storage.open(root)), 100)
    assert told(root) == {A: ["learner_1_10_50"], B: ["learner_1_0_90"]}


def test_a_new_follower_of_a_name_goes_on_with_its_numbers_and_grants() -> None:
    """Format 10.3."""
    root, clock = fresh_root(), Clock()
    grow(root, A, 0, 10)
    grow(root, B, 0, 10)
    storage = Storage.open(root)
    for mark in (
        Mark(follower="learner", number=7, row=4, ceiling=80),
        Mark(follower="learner", number=6, row=2, ceiling=90),
        Mark(follower="other", number=60, row=9, ceiling=20),
    ):
        put_mark(storage, A, mark)
    keeper = keeper_of(root, clock)
    assert keeper.found() == {A: 4}
    keeper.tell({}, list_shards(storage), 100)
    # The row went back, so that the mark is put again; 80 of the 100 rows are given away already.
    assert told(root) == {A: ["learner_8_0_80", "other_60_9_20"], B: ["learner_0_0_20"]}


def test_a_mark_that_no_other_could_follow_is_refused_by_its_path() -> None:
    storage = Storage.open(fresh_root())
    path = put_mark(storage, A, Mark(follower="learner", number=MAX_ROW, row=0, ceiling=0))
    keeper = MarkKeeper(storage, Markers("learner"), lambda _: True)
    with pytest.raises(UnsafeData, match=f"remove the mark.*{path}"):
        keeper.found()


def test_without_a_limit_writers_are_told_that_there_is_none() -> None:
    root = fresh_root()
    grow(root, A, 0, 10)
    keeper_of(root, Clock()).tell({A: 10}, list_shards(Storage.open(root)), None)
    assert told(root) == {A: [f"learner_0_10_{MAX_ROW}"]}


def test_at_the_end_every_cursor_that_moved_is_put() -> None:
    root, clock = fresh_root(), Clock()
    grow(root, A, 0, 10)
    grow(root, B, 0, 10)
    keeper = keeper_of(root, clock, every_rows=100)
    keeper.tell({}, list_shards(Storage.open(root)), 20)
    keeper.tell_all({A: 7})
    assert told(root) == {A: ["learner_1_7_10"], B: ["learner_0_0_10"]}


def test_a_store_that_takes_no_marks_is_counted_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root, clock = fresh_root(), Clock()
    grow(root, A, 0, 10)
    keeper = keeper_of(root, clock)
    listing = list_shards(Storage.open(root))
    put = Storage.put

    def fail_after(self: Storage, path: str, data: bytes) -> None:
        put(self, path, data)
        raise rlio.errors.PublishError("the response was lost")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "rlio"):
        patch.setattr(Storage, "put", fail_after)
        keeper.tell({}, listing, 20)
    assert (keeper.put, keeper.failed) == (0, 1)
    assert A in caplog.text
    clock.now += 1
    keeper.tell({}, listing, 30)
    assert told(root) == {A: ["learner_1_0_30"]}, "the one that landed is gone too"


@pytest.mark.parametrize(
    "wrong",
    [{"every_seconds": -1}, {"every_rows": 0}, {"every_rows": 1.5}, {"heartbeat_seconds": float("inf")}],
)
def test_illegal_times_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Markers("learner", **wrong)


@pytest.mark.parametrize("name", ["", "A", "a_b", "a/b", "../a", None])
def test_illegal_names_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match="name"):
        Markers(name)


# ---- what others make of them ----


def test_marks_are_no_part_of_the_data_and_nobody_minds_them() -> None:
    root = fresh_root()
    with rlio.ParquetWriter(root, writer_id=A) as writer:
        for first in (0, 10):
            writer.write(SampleBatch(t=np.arange(first, first + 10)))
            writer.flush()
    digest = rlio.open_dataset(root).digest
    storage = Storage.open(root)
    put_mark(storage, A, Mark(follower="learner", number=1, row=5, ceiling=20))
    assert rlio.open_dataset(root).digest == digest
    assert list_shards(storage).rejected == []
    assert {finding.code for finding in rlio.verify(root).findings} <= {"time-unchecked"}
    rlio.maintenance.compact(root)
    rlio.maintenance.gc(root, grace=0)
    assert told(root) == {A: ["learner_1_5_20"]}
    with rlio.DatasetReader(root, epochs=1) as reader:
        assert sum(len(batch) for batch in reader) == 20


def test_what_is_no_mark_is_a_finding() -> None:
    root = fresh_root()
    grow(root, A, 0, 10)
    Storage.open(root).put(f"_progress/{A}/learner", b"?\n")
    (finding,) = (found for found in rlio.verify(root).findings if found.code == "stray")
    assert "progress mark" in finding.message
