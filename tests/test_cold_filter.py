"""`DatasetReader` with a filter and no store: each row that passes once, in any order, for any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growing_data import A, B, grow, remove_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import assert_identical, files, fresh_root, group_bytes, load, numbered, put, store
from test_order import rows_of
from test_skip import check_that_skipping_is_reading

import rlio
from rlio import DatasetReader, JsonWriter, MultiAgentBatch, ParquetWriter, Roll, SampleBatch
from rlio.errors import CorruptData, EndOfData, MissingColumn, OptionError, SchemaConflict, StateError
from rlio.query.filters import RowFilter
from rlio.query.order import WindowOrder
from rlio.readers import stored_pass
from rlio.readers.group_source import _Chosen
from rlio.testing import ReaderTests, assert_resumes

ROWS = 90


def rewards(rows: int, first: int = 0) -> SampleBatch:
    """Numbered rows, whose rewards are in no order; some row groups have none above 0."""
    t = np.arange(first, first + rows)
    return numbered(rows, first, rewards=np.where(t % 30 < 12, 0, t * 7 % 10 - 4).astype(np.float32))


PASSING = [int(t) for t, reward in enumerate(rewards(ROWS)["rewards"]) if reward > 0]


@pytest.fixture(scope="module", params=[ParquetWriter, JsonWriter])
def root(request: pytest.FixtureRequest) -> str:
    """90 rows of two writers, in shards of 20 rows with row groups of some 4."""
    root = fresh_root()
    for writer_id, (first, rows) in zip((A, B), [(0, 50), (50, 40)], strict=True):
        with (
            group_bytes(100),
            request.param(root, writer_id=writer_id, roll=Roll(max_rows=20, max_seconds=None)) as writer,
        ):
            writer.write(rewards(rows, first))
    return root


def cold(root: Any, filter: Any = "rewards > 0", **options: Any) -> DatasetReader:
    if options.get("shuffle"):
        options.setdefault("seed", 3)
    return DatasetReader(root, cache="none", filter=filter, **options)


def numbers(reader: DatasetReader) -> list[int]:
    return [t for batch in reader for t in batch["t"].tolist()]


@pytest.mark.further
class TestRecorded(ReaderTests):
    def make_reader(self) -> DatasetReader:
        if not hasattr(type(self), "root"):
            with group_bytes(100):
                type(self).root = store(rewards(ROWS), roll=Roll(max_rows=20, max_seconds=None))
        return cold(type(self).root, batch_size=8, epochs=1)

    def expected_rows(self) -> SampleBatch:
        return rewards(ROWS)[np.array(PASSING)]


@pytest.mark.further  # A shuffled order that is filtered resumes below, too.
class TestShuffled(TestRecorded):
    ordered = False
    sizes = (None, 3)

    def make_reader(self) -> DatasetReader:
        super().make_reader().close()
        return cold(type(self).root, batch_size=8, epochs=1, shuffle=True)


# ---- which rows ----


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("rewards > 0", lambda rows: rows["rewards"] > 0),
        ("rewards <= 0", lambda rows: rows["rewards"] <= 0),
        ("t >= 0", lambda rows: rows["t"] >= 0),
        ("t in (0, 19, 20, 89) or obs[2] == 40", lambda rows: np.isin(rows["t"], [0, 19, 20, 40, 89])),
    ],
)
@pytest.mark.each_value_once
def test_the_rows_are_those_that_pass_each_once_an_epoch(
    root: str, shuffle: bool, text: str, condition: Any
) -> None:
    rows = rewards(ROWS)
    expected = np.flatnonzero(condition(rows)).tolist()
    with cold(root, text, shuffle=shuffle, epochs=2, batch_size=7) as reader:
        found = numbers(reader)
        assert len(reader) == len(expected)
        assert len(found) == 2 * len(expected)
    for epoch in (found[: len(expected)], found[len(expected) :]):
        assert (sorted(epoch) if shuffle else epoch) == expected


@pytest.mark.few(1)
def test_recorded_order_is_that_of_a_store(root: str) -> None:
    """To the bit, the columns in the same order, without those that only the filter reads."""
    for columns in (None, ["obs", "t"], ["rewards"]):
        found = load(root, cache="none", filter="rewards > 0", columns=columns, batch_size=5)
        stored = load(root, cache="memory", filter="rewards > 0", columns=columns, batch_size=5)
        assert_identical(found, stored)
        assert columns is None or set(found) == set(columns)


def above_two(batch: SampleBatch) -> Any:
    return np.asarray(batch["rewards"]) > 2


def test_a_function_filters_too(root: str) -> None:
    for row_filter in (above_two, RowFilter.of(above_two, columns=["rewards"])):
        with cold(root, row_filter, columns=["t"], epochs=1) as reader:
            assert numbers(reader) == np.flatnonzero(rewards(ROWS)["rewards"] > 2).tolist()


def test_windows_are_made_of_row_groups_and_positions_count_the_rows_that_pass() -> None:
    """The order is a pure function of how many rows pass in each group."""
    with group_bytes(100):
        root = store(rewards(ROWS), roll=Roll(max_rows=20, max_seconds=None), writer_id=A)
    data = rlio.open_dataset(root)
    counts, at = [], 0
    for segment in data.segments:
        for size in data.open_shard(segment).rows:
            counts.append(sum(at <= t < at + size for t in PASSING))
            at += size
    assert 0 in counts
    assert max(counts) > min(count for count in counts if count)
    order = WindowOrder([count for count in counts if count], seed=3)
    for epoch in range(2):
        expected = [PASSING[i] for i in rows_of(order, epoch, 0, len(PASSING))]
        with cold(root, shuffle=True, epochs=2, batch_size=3) as reader:
            assert numbers(reader)[epoch * len(PASSING) :][: len(PASSING)] == expected


@settings(max_examples=30)
@given(passes=st.lists(st.booleans(), min_size=1, max_size=200), data=st.data())
def test_chosen_rows_are_found_again_in_any_part(passes: list[bool], data: st.DataObject) -> None:
    passes = passes * data.draw(st.sampled_from([1, 40]))
    if data.draw(st.booleans()):  # Few of many, which are kept as numbers.
        passes = [here and i % 97 == 0 for i, here in enumerate(passes)]
    chosen = _Chosen(np.flatnonzero(passes), len(passes))
    start = data.draw(st.integers(0, len(passes)))
    stop = data.draw(st.integers(start, len(passes)))
    assert chosen.within(start, stop).tolist() == np.flatnonzero(passes[start:stop]).tolist()
    assert chosen.count == sum(passes)


def test_row_groups_without_such_rows_are_never_read() -> None:
    """Who read them would find the damage."""
    with group_bytes(100):
        root = store(rewards(30), writer_id=A)
    ((path, content),) = files(root).items()
    put(path, content[:12] + bytes([content[12] ^ 1]) + content[13:])
    with pytest.raises(CorruptData):
        load(root)
    for shuffle in (False, True):
        with cold(root, shuffle=shuffle, epochs=1) as reader:
            assert sorted(numbers(reader)) == [t for t in PASSING if t < 30]


def test_where_nothing_passes_the_end_says_so(root: str) -> None:
    for shuffle in (False, True):
        with (
            cold(root, "rewards > 1000", shuffle=shuffle) as reader,
            pytest.raises(EndOfData, match=r"no row .* passes the filter 'rewards > 1000'"),
        ):
            reader.sample()
        assert len(reader) == 0


def test_columns_of_some_writers_only_follow_the_rule_for_missing_ones() -> None:
    root = store(numbered(10), writer_id=A)
    store(numbered(10, 10, speed=np.arange(10.0)), root=root, writer_id=B)
    with pytest.raises(SchemaConflict):
        cold(root, "speed > 4")
    with pytest.raises(OptionError, match="speed"):
        cold(root, "speed > 4", missing="drop")
    with pytest.raises(MissingColumn, match="haste"):
        cold(root, "haste > 4", missing="fill")
    for columns in (None, ["t"]):
        with cold(root, "speed < 2", missing="fill", columns=columns, epochs=1) as reader:
            assert numbers(reader) == [*range(10), 10, 11]
        with cold(root, "t > 7", missing="drop", columns=columns, epochs=1) as reader:
            assert numbers(reader) == [8, 9, *range(10, 20)]


# ---- ranks, resuming, skipping ----


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.each_value_once
def test_a_restored_reader_gives_the_remainder(root: str, shuffle: bool, drop_last: bool) -> None:
    assert_resumes(
        lambda: cold(root, shuffle=shuffle, drop_last=drop_last, epochs=2, batch_size=5), batches=9
    )
    if not drop_last:
        assert_resumes(lambda: cold(root, shuffle=shuffle, epochs=2, batch_size=5), 3, batches=9)


@pytest.mark.few(1)
@settings(max_examples=4, deadline=None)
@given(
    shuffle=st.booleans(),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    calls=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_ranks_share_the_rows_that_pass_also_where_their_number_changes(
    root: str, shuffle: bool, worlds: list[int], calls: list[int]
) -> None:
    state, served = None, []
    for number, world in enumerate(worlds):
        states = []
        for rank in range(world):
            with cold(root, shuffle=shuffle, shard=(rank, world), batch_size=2, epochs=1) as reader:
                if state is not None:
                    reader.load_state_dict(state)
                if number == len(worlds) - 1:
                    served += numbers(reader)
                    continue
                for _ in range(calls[number]):
                    try:
                        served += reader.sample()["t"].tolist()
                    except EndOfData:
                        break
                states.append(reader.state_dict())
        assert all(other == states[0] for other in states)
        state = states[0] if states else None
    assert sorted(served) == PASSING


@pytest.mark.few(1)
@settings(max_examples=4, deadline=None)
@given(
    shuffle=st.booleans(),
    epochs=st.integers(1, 3) | st.none(),
    drop_last=st.booleans(),
    shard=st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]),
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
def test_skipping_leads_where_reading_leads(
    root: str, shuffle: bool, epochs: int | None, drop_last: bool, shard: tuple[int, int], steps: list[int]
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 3 if shuffle else None, "drop_last": drop_last}
    check_that_skipping_is_reading(
        root, steps, cache="none", filter="rewards > 0", epochs=epochs, batch_size=3, shard=shard, **options
    )


@pytest.mark.few(1)
def test_a_state_fits_only_the_same_filter(root: str) -> None:
    with cold(root, "rewards > 0", shuffle=True) as reader:
        reader.sample(5)
        state = reader.state_dict()
    with cold(root, "(rewards>0)", shuffle=True) as reader:
        reader.load_state_dict(state)
    others: list[dict[str, Any]] = [{"filter": "rewards > 1"}, {"filter": "not rewards <= 0"}, {}]
    for options in others:
        with (
            DatasetReader(root, cache="none", shuffle=True, seed=3, **options) as reader,
            pytest.raises(StateError, match=r"layout|filter"),
        ):
            reader.load_state_dict(state)
    with DatasetReader(root) as plain:
        state = plain.state_dict()
    with cold(root, "t >= 0") as reader, pytest.raises(StateError, match="filter"):
        reader.load_state_dict(state)  # The same rows, and yet.


# ---- damage ----


def broken_on_the_way(reader: DatasetReader, root: str, group: int) -> list[int]:
    """Damage a row group that the reader has resolved its filter in; gives the rows of it that pass."""
    dataset = reader.dataset
    shard = dataset.open_shard(dataset.segments[0])
    info = shard.groups[group]  # type: ignore[attr-defined]
    path, content = next(
        (path, data) for path, data in files(root).items() if dataset.segments[0].ref.path in path
    )
    at = (info.start + info.stop) // 2
    put(path, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    first = sum(shard.rows[:group])
    return [t for t in PASSING if first <= t < first + shard.rows[group]]


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.each_value_once
def test_damage_that_comes_later_loses_the_rows_that_would_have_been_served(
    shuffle: bool, world: int
) -> None:
    with group_bytes(100):
        root = store(rewards(ROWS), writer_id=A)
    options: dict[str, Any] = {"shuffle": shuffle, "epochs": 2, "batch_size": 3, "on_error": "skip"}
    readers = [cold(root, shard=(rank, world), **options) for rank in range(world)]
    with cold(root, epochs=1) as strict:
        lost = broken_on_the_way(readers[0], root, 5)
        assert lost
        with pytest.raises(CorruptData):
            numbers(strict)
    found = [t for reader in readers for t in numbers(reader)]
    assert sorted(found) == sorted(2 * [t for t in PASSING if t not in lost])
    assert [reader.skipped for reader in readers] == [len(lost)] * world
    for reader in readers:
        reader.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.each_value_once
def test_damage_that_is_there_before_may_have_held_such_rows_and_is_counted_in_full(
    shuffle: bool, world: int
) -> None:
    with group_bytes(100):
        root = store(rewards(ROWS), writer_id=A)
    with cold(root) as reader:
        lost = broken_on_the_way(reader, root, 5)
        rows = reader.dataset.open_shard(reader.dataset.segments[0]).rows[5]
    with pytest.raises(CorruptData):
        cold(root, shuffle=shuffle)
    options: dict[str, Any] = {"shuffle": shuffle, "epochs": 2, "batch_size": 3, "on_error": "skip"}
    readers = [cold(root, shard=(rank, world), **options) for rank in range(world)]
    left = [t for t in PASSING if t not in lost]
    assert sorted(t for reader in readers for t in numbers(reader)) == sorted(2 * left)
    assert [reader.skipped for reader in readers] == [rows] * world
    assert_resumes(lambda: cold(root, **options), batches=9)
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_that_are_missing_are_an_error_or_counted(shuffle: bool) -> None:
    root = fresh_root()
    grow(root, A, 0, 10)
    grow(root, A, 15, 5)
    with pytest.raises(CorruptData):
        cold(root, "t > 8", shuffle=shuffle)
    with cold(root, "t > 8", shuffle=shuffle, on_error="skip", epochs=2, batch_size=2) as reader:
        assert sorted(numbers(reader)) == sorted(2 * [9, *range(15, 20)])
        assert reader.skipped == 5


def test_recorded_order_goes_on_where_a_shard_was_compacted_and_removed() -> None:
    root = fresh_root()
    refs = [grow(root, A, first, 10) for first in (0, 10, 20)]
    with cold(root, "t in (3, 8, 14, 19, 21, 27)", epochs=1, batch_size=2) as reader:
        found = reader.sample()["t"].tolist()
        grow(root, A, 0, 30, limit=10**6)
        for ref in refs:
            remove_shard(root, ref)
        assert found + numbers(reader) == [3, 8, 14, 19, 21, 27]


# ---- what is chosen, and refused ----


def test_auto_needs_no_store_for_a_filter_where_it_would_be_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))
    root = store(rewards(20))

    def chosen(**options: Any) -> str:
        with DatasetReader(root, filter="rewards > 0", **options) as reader:
            return reader.cache

    assert chosen() == "memory"
    monkeypatch.setattr(stored_pass, "_MEMORY_BYTES", 100)
    assert chosen() == "disk"
    monkeypatch.setattr(stored_pass, "_DISK_BYTES", 200)
    assert chosen() == chosen(shuffle=True) == "none"
    assert chosen(indexes=True) == "disk"


def test_what_has_no_single_rows_is_refused_and_told_what_to_do() -> None:
    t = np.arange(6)
    joint = store(
        MultiAgentBatch({"a": SampleBatch(t=t, eps_id=t * 0), "b": SampleBatch(t=t, eps_id=t * 0)}, 6)
    )
    with pytest.raises(OptionError, match=r"several agents .* cache='memory' or 'disk'"):
        cold(joint, "t > 2")
    with DatasetReader(joint, filter="t > 2", epochs=1) as reader:
        assert reader.cache == "memory"
        assert reader.sample(9).env_steps() == 3
    sequences = store(numbered(6, seq_lens=np.array([2, 4], np.int32)))
    for cache in ("auto", "none", "memory"):
        with pytest.raises(OptionError, match="seq_lens"):
            DatasetReader(sequences, cache=cache, filter="t > 2")
    root = store(rewards(20))
    for draw in (
        {"draw": rlio.NStep(2)},
        {"draw": rlio.WholeEpisodes()},
        {"indexes": True},
        {"policy": "default_policy"},
    ):
        with pytest.raises(OptionError, match="need a store"):
            cold(root, **draw)
    with DatasetReader(root, cache="none", draw=None, filter=None, epochs=1) as reader:  # None is none.
        assert numbers(reader) == list(range(20))
