"""Snapshots: exactly the rows that were there, whatever was appended, compacted or trimmed since."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from growing_data import A, B, C, encode, grow, labelled, publish, remove_shard, seal, trim
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import assert_identical, fresh_root, group_bytes, load, numbered

from rlio import (
    DatasetReader,
    FollowReader,
    JsonWriter,
    MultiAgentBatch,
    ParquetWriter,
    Roll,
    SampleBatch,
    concat_samples,
    open_dataset,
)
from rlio.batch.arrays import object_column
from rlio.catalog import listing
from rlio.catalog.listing import HoleCheck
from rlio.errors import CorruptData, DataNotFound, HoleError, OptionError, SchemaConflict
from rlio.source.shards import ParquetShard
from rlio.storage.filesystem import Storage
from rlio.testing import assert_resumes


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "HOLE_CHECK", HoleCheck(seconds=0))


def rows_of(root: Any, **options: Any) -> list[int]:
    with DatasetReader(root, epochs=1, **options) as reader:
        return [t for batch in reader for t in batch["t"].tolist()]


# ---- what was there ----


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_snapshot_shows_its_rows_after_growth_compaction_and_new_writers(shuffle: bool) -> None:
    root = fresh_root()
    small = [grow(root, A, first, 5) for first in range(0, 20, 5)]
    snapshot = json.loads(json.dumps(open_dataset(root).snapshot()))
    assert snapshot == {A: 20}
    small.append(grow(root, A, 20, 5))
    grow(root, A, 0, 25, limit=1000)
    for ref in small:
        remove_shard(root, ref)
    grow(root, B, 0, 3)
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None, "batch_size": 3}
    data = open_dataset(root, at=snapshot)
    assert (len(data), data.snapshot(), data.lost_rows()) == (20, snapshot, [])
    assert sorted(rows_of(root, at=snapshot, **options)) == list(range(20))
    assert sorted(rows_of(data, **options)) == list(range(20))
    assert sorted(rows_of(open_dataset(root), at=snapshot, **options)) == list(range(20))
    assert len(rows_of(root)) == 28
    assert data.digest == open_dataset(root, at=snapshot).digest != open_dataset(root).digest


def test_a_state_of_recorded_order_loads_at_its_snapshot_after_compaction() -> None:
    root = fresh_root()
    small = [grow(root, A, first, 5) for first in range(0, 20, 5)]
    with DatasetReader(root, batch_size=7, epochs=1) as reader:
        head = reader.sample()["t"].tolist()
        state = reader.state_dict()
        snapshot = reader.dataset.snapshot()
    grow(root, A, 0, 30, limit=1000)
    for ref in small:
        remove_shard(root, ref)
    with DatasetReader(root, at=snapshot, batch_size=7, epochs=1) as reader:
        reader.load_state_dict(state)
        assert head + [t for batch in reader for t in batch["t"].tolist()] == list(range(20))


def test_a_snapshot_in_the_middle_of_a_shard_cuts_sequences_where_they_were_written() -> None:
    lens = np.array([1, 2, 3, 4], np.int32)
    parts = [numbered(10, first, seq_lens=lens) for first in (0, 10, 20)]
    root = fresh_root()
    publish(root, A, 0, encode(*parts))
    for shuffle in (False, True):
        seed = 1 if shuffle else None
        with DatasetReader(root, at={A: 20}, epochs=1, shuffle=shuffle, seed=seed, batch_size=3) as reader:
            assert len(reader) == 8
            assert sorted(t for batch in reader for t in batch["t"].tolist()) == list(range(20))
    with pytest.raises(CorruptData, match="a sequence lies across the cut"):
        rows_of(root, at={A: 15})
    assert_resumes(lambda: DatasetReader(root, at={A: 20}, batch_size=3, epochs=2))


def agents(rows: int, first: int) -> MultiAgentBatch:
    t = np.arange(first, first + rows)
    part = SampleBatch(t=t, eps_id=t * 0, mark=t)
    return MultiAgentBatch({"a": part, "b": part[2:]}, rows)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_snapshot_in_the_middle_of_a_shard_cuts_joint_steps_where_they_were_written(shuffle: bool) -> None:
    root = fresh_root()
    publish(root, A, 0, encode(agents(6, 0), agents(6, 6), agents(6, 12)))
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None, "epochs": 1}
    for steps, rows in ((6, 10), (12, 20), (18, 30)):
        with DatasetReader(root, at={A: rows}, batch_size=4, **options) as reader:
            assert len(reader) == steps
            batches = list(reader)
        assert sum(batch.agent_steps() for batch in batches) == rows
        found = concat_samples(batches)
        assert isinstance(found, MultiAgentBatch)
        assert sorted(found["a"]["mark"].tolist()) == list(range(steps))
        assert sorted(found["b"]["mark"].tolist()) == [m for m in range(steps) if m % 6 >= 2]


def test_json_shards_are_cut_at_a_snapshot_too() -> None:
    root = fresh_root()
    encoded = encode(*(labelled(first, 4) for first in range(0, 12, 4)), kind=JsonWriter)
    publish(root, A, 0, encoded)
    assert rows_of(root, at={A: 6}) == list(range(6))
    joint = fresh_root()
    publish(joint, A, 0, encode(agents(6, 0), agents(6, 6), kind=JsonWriter))
    with DatasetReader(joint, at={A: 10}, epochs=1) as reader:
        assert_identical(concat_samples(list(reader)), agents(6, 0))


def test_columns_that_a_later_writer_brought_do_not_change_a_snapshot() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    snapshot = open_dataset(root).snapshot()
    publish(root, B, 0, encode(SampleBatch(labelled(0, 5), rewards=np.ones(5))))
    publish(root, C, 0, encode(labelled(0, 5)))
    with pytest.raises(SchemaConflict):
        rows_of(root)
    assert open_dataset(root, at=snapshot).columns == {"default_policy": ["t", "obs", "label"]}
    assert rows_of(root, at=snapshot) == list(range(5))
    assert list(load(root, at=snapshot, missing="fill")) == ["t", "obs", "label"]


def opened_footers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose footers are read from now on."""
    opened: list[str] = []
    init = ParquetShard.__init__
    monkeypatch.setattr(
        ParquetShard,
        "__init__",
        lambda self, storage, ref, **options: (opened.append(ref.path), init(self, storage, ref, **options))[
            1
        ],
    )
    return opened


def record_keys(root: Path, recordings: int) -> None:
    """Writers whose infos get a key while their rows wait: no shard has the first schema, which is stored."""
    with group_bytes(2000):
        for number in range(recordings):
            with ParquetWriter(root, roll=Roll(max_seconds=None)) as writer:
                for first in range(0, 60, 4):
                    key = {"x": np.full(20, 1.0)} if first else {}
                    writer.write(numbered(4, 60 * number + first, infos=object_column([key] * 4)))


def test_a_schema_that_the_infos_have_outgrown_costs_a_snapshot_no_footers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_keys(tmp_path, 6)
    snapshot = open_dataset(tmp_path).snapshot()
    publish(tmp_path, B, 0, encode(SampleBatch(labelled(0, 5), rewards=np.ones(5))))
    opened = opened_footers(monkeypatch)
    # All are looked at for the schema of a later writer, which none has.
    assert len(open_dataset(tmp_path, at=snapshot).schemas) == 2
    assert len(opened) == 6
    (tmp_path / "_schema").joinpath(f"{next(iter(open_dataset(tmp_path, at={B: 5}).schemas))}.json").unlink()
    opened.clear()
    assert len(open_dataset(tmp_path, at=snapshot).schemas) == 2
    assert len(opened) == 1


def test_a_state_of_several_ranks_loads_at_its_snapshot_if_infos_have_outgrown_a_schema(
    tmp_path: Path,
) -> None:
    record_keys(tmp_path, 3)
    data = open_dataset(tmp_path)
    assert len({schema.group_rows for schema in data.schemas.values()}) == 2
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 0, "shard": (0, 2), "epochs": 1}
    with DatasetReader(data, **options) as reader:
        reader.sample()
        state = reader.state_dict()
        left = [t for batch in reader for t in batch["t"].tolist()]
    with DatasetReader(tmp_path, at=data.snapshot(), **options) as reader:
        reader.load_state_dict(state)
        assert [t for batch in reader for t in batch["t"].tolist()] == left


def test_schemas_are_told_apart_from_few_footers_where_all_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    root = fresh_root()
    for first in range(0, 50, 5):
        grow(root, A, first, 5)
    publish(root, B, 0, encode(SampleBatch(labelled(0, 5), rewards=np.ones(5))))
    opened = opened_footers(monkeypatch)
    assert len(open_dataset(root, at={A: 50, B: 5}).schemas) == 2
    assert len(opened) <= 3
    assert len(open_dataset(root, at={A: 50}).schemas) == 1
    assert len(open_dataset(root, at={}).schemas) == 0


@settings(max_examples=20, deadline=None)
@given(
    ends=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    at=st.integers(0, 60),
    covers=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=4),
    batch_size=st.integers(1, 20),
)
def test_any_cut_of_any_cover_is_the_rows_below_it(
    ends: list[int], at: int, covers: list[tuple[int, int]], batch_size: int
) -> None:
    root, total = fresh_root(), 0
    for rows in ends:
        grow(root, A, total, rows)
        total += rows
    for first, rows in covers:
        if min(first + rows, total) > first:
            grow(root, A, first, min(first + rows, total) - first, limit=1000)
    at = min(at, total)
    assert rows_of(root, at={A: at} if at else {}, batch_size=batch_size) == list(range(at))


# ---- what is gone ----


def test_rows_of_a_snapshot_that_are_not_there_are_named() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    for at, what in (
        ({A: 9}, r"rows 5 to 8 of writer '.*a' are missing of the 9 rows that the snapshot has"),
        ({A: 5, B: 3}, r"rows 0 to 2 of writer '.*b' are missing .*everything else of that writer"),
    ):
        with pytest.raises(HoleError, match=what):
            open_dataset(root, at=at)
        with pytest.raises(HoleError, match=what):
            DatasetReader(root, at=at)
        with pytest.raises(HoleError, match=what):
            DatasetReader(open_dataset(root), at=at)
        lost = sum(at.values()) - 5
        data = open_dataset(root, at=at, on_error="skip")
        assert (len(data), sum(rows for _, rows in data.lost_rows())) == (5, lost)
        with DatasetReader(root, at=at, on_error="skip", epochs=2) as reader:
            assert len(concat_samples(list(reader))) == 10
            assert reader.skipped == lost


def test_a_torn_shard_beyond_a_snapshot_does_not_concern_it() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    torn = grow(root, A, 5, 5)
    Storage.open(root).put(torn.path, b"torn")
    assert rows_of(root, at={A: 5}) == list(range(5))
    with pytest.raises(CorruptData, match="torn"):
        open_dataset(root, at={A: 6})


def test_a_snapshot_before_a_trim_says_what_is_gone_and_one_after_it_is_whole() -> None:
    root = fresh_root()
    for first in range(0, 20, 5):
        grow(root, A, first, 5)
    grow(root, B, 0, 3)
    before = open_dataset(root).snapshot()
    trim(root, A, 10)
    after = json.loads(json.dumps(open_dataset(root).snapshot()))
    assert (before, after) == ({A: 20, B: 3}, {A: [10, 20], B: 3})
    with pytest.raises(HoleError, match=r"rows 0 to 9 of writer .* were trimmed since the snapshot"):
        DatasetReader(root, at=before)
    with DatasetReader(root, at=before, on_error="skip", epochs=1) as reader:
        assert concat_samples(list(reader))["t"].tolist() == [*range(10, 20), *range(3)]
        assert reader.skipped == 10
        assert reader.dataset.snapshot() == before
    grow(root, A, 20, 5)
    with DatasetReader(root, at=after, epochs=1) as reader:
        assert concat_samples(list(reader))["t"].tolist() == [*range(10, 20), *range(3)]
        assert reader.skipped == 0
    trim(root, A, 12)
    with pytest.raises(HoleError, match="rows 10 to 11 of writer"):
        DatasetReader(root, at=after)
    trim(root, A, 30)
    data = open_dataset(root, at=after, on_error="skip")
    assert (len(data), data.lost_rows()) == (3, [(f"{A}: rows 10 to 19, trimmed", 10)])
    assert open_dataset(root).snapshot() == {B: 3}


@pytest.mark.parametrize(
    "at",
    [3, [A], {A: "5"}, {A: 5.0}, {A: True}, {A: -1}, {A: [5, 3]}, {A: [1]}, {A: [1, 2, 3]}, {A: 2**63},
     {"../x": 3}, {"": 3}, {3: 3}, {A: None}],
)  # fmt: skip
def test_what_is_no_snapshot_is_refused(at: Any) -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    with pytest.raises(OptionError, match="at"):
        open_dataset(root, at=at)
    with pytest.raises(OptionError, match="on_error"):
        open_dataset(root, at={A: 5}, on_error="ignore")  # type: ignore[arg-type]


def test_a_data_set_that_is_sealed_short_lacks_rows_and_says_so() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    seal(root, A, 8)
    seal(root, B, 4)
    data = open_dataset(root)
    assert data.holes == {A: [range(5, 8)], B: [range(4)]}
    with pytest.raises(HoleError, match=r"rows 5 to 7 of writer .* of the 8 rows with which it was closed"):
        data.check_complete()


# ---- copies, refresh, other tools ----


def test_a_copy_serves_the_same_rows_and_takes_the_same_snapshots_and_states(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    for first in range(0, 20, 5):
        grow(root, A, first, 5)
    trim(root, A, 5)
    with DatasetReader(root, batch_size=4, epochs=1) as reader:
        head = reader.sample()["t"].tolist()
        state, snapshot = reader.state_dict(), reader.dataset.snapshot()
    with FollowReader(root, batch_size=4, idle_timeout=0) as reader:
        assert reader.sample()["t"].tolist() == head
        followed = reader.state_dict()
    copy = str(tmp_path / "copy")
    shutil.copytree(root, copy)
    memory = fresh_root()
    for entry in Storage.open(root).list():
        Storage.open(memory).put(entry.path, Storage.open(root).read(entry.path))
    for place in (copy, memory):
        readers: tuple[tuple[Any, Any], ...] = (
            (DatasetReader(place, batch_size=4, epochs=1, at=snapshot), state),
            (FollowReader(place, batch_size=4, idle_timeout=0), followed),
        )
        for opened, saved in readers:
            with opened as reader:
                reader.load_state_dict(saved)
                assert head + [t for b in reader for t in b["t"].tolist()] == list(range(5, 20))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_pickled_data_set_requests_nothing_but_its_rows(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    grow(root, B, 0, 4)
    data = open_dataset(root)
    if pinned:
        data = data.refresh(at=data.snapshot())
    schemas = data.schemas
    text = pickle.dumps(data)
    expected = rows_of(root)
    grow(root, A, 5, 2)
    asked: list[str] = []
    for name in ("list", "read"):
        monkeypatch.setattr(Storage, name, lambda self, path="", **_: asked.append(path))
    again = pickle.loads(text)
    assert rows_of(again, shuffle=False) == expected
    assert again.schemas == schemas
    assert again.pinned is pinned
    assert asked == []


def test_refresh_lists_again_and_keeps_a_snapshot() -> None:
    root = fresh_root()
    grow(root, A, 0, 5)
    data = open_dataset(root)
    at = open_dataset(root, at=data.snapshot())
    grow(root, A, 5, 5)
    assert [len(x) for x in (data, data.refresh(), at.refresh(), at.refresh(at={A: 7}))] == [5, 10, 5, 7]


def test_duckdb_counts_each_row_once_while_covered_shards_await_gc(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    for first in range(0, 20, 5):
        grow(root, A, first, 5)
    grow(root, A, 0, 15)
    grow(root, A, 20, 4)
    data = open_dataset(root)
    assert data.cut_files() == []
    query = f"SELECT count(*), count(DISTINCT t), sum(t) FROM read_parquet({data.files()})"
    assert duckdb.sql(query).fetchall() == [(24, 24, sum(range(24)))]
    grow(root, A, 2, 10)
    assert open_dataset(root).files() == data.files()


def test_files_of_which_only_a_part_is_live_are_named() -> None:
    root = fresh_root()
    grow(root, A, 0, 10)
    late = grow(root, A, 5, 10)
    data = open_dataset(root)
    assert len(data.files()) == 2
    assert [uri.rsplit("/", 1)[1] for uri in data.cut_files()] == [late.path.rsplit("/", 1)[1]]
    assert len(open_dataset(root, at={A: 7}).cut_files()) == 1


# ---- shards that go while they are read ----


def test_recorded_order_goes_on_in_the_shards_that_hold_the_rows_now() -> None:
    root = fresh_root()
    small = [grow(root, A, first, 5, limit=60) for first in range(0, 20, 5)]
    with DatasetReader(root, batch_size=4, epochs=2) as reader:
        served = reader.sample()["t"].tolist()
        grow(root, A, 0, 20, limit=1000)
        for ref in small:
            remove_shard(root, ref)
        grow(root, A, 20, 5)
        served += [t for batch in reader for t in batch["t"].tolist()]
        assert served == [*range(20), *range(20)]


def test_a_shuffled_order_cannot_go_on_and_says_why() -> None:
    root = fresh_root()
    small = [grow(root, A, first, 50, limit=60) for first in range(0, 200, 50)]
    with DatasetReader(root, batch_size=4, epochs=1, shuffle=True, seed=1, cache="none") as reader:
        reader.sample()
        grow(root, A, 0, 200, limit=1000)
        for ref in small:
            remove_shard(root, ref)
        with pytest.raises(DataNotFound, match="compacted"):
            list(reader)


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_shard_that_is_gone_for_good_is_an_error_or_counted(shuffle: bool) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None, "epochs": 1}
    options["cache"] = "none"
    for on_error in ("raise", "skip"):
        root = fresh_root()
        small = [grow(root, A, first, 50, limit=60) for first in range(0, 200, 50)]
        with DatasetReader(root, batch_size=4, on_error=on_error, **options) as reader:
            remove_shard(root, small[2])
            if on_error == "raise":
                with pytest.raises(HoleError, match="rows 100 to 149"):
                    list(reader)
                continue
            served = sorted(t for batch in reader for t in batch["t"].tolist())
            assert set(served) <= set(range(200))
            assert len(served) == len(set(served)) >= 150
            assert reader.skipped == 200 - len(served)
