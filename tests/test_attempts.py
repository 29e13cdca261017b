"""Attempts at a part of a job: each reader takes the first sealed one, and nothing of any other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlio
from rlio.catalog.listing import Listing, list_shards
from rlio.catalog.markers import claim, seal
from rlio.catalog.names import (
    is_writer_id,
    make_attempt_id,
    make_writer_id,
    part_id,
    part_of,
    writer_dir,
)
from rlio.errors import EndOfData, HoleError, OptionError
from rlio.storage.filesystem import Storage

PART = part_id("job", 0)
FIRST, SECOND, THIRD = (f"{PART}~000{n}-0000000{n}" for n in range(3))


def rows(t: range) -> rlio.SampleBatch:
    """Steps of one episode."""
    return rlio.SampleBatch(t=np.array(t), eps_id=np.full(len(t), t.start // 50))


def attempt(root: str, writer: str, t: range, *, sealed: bool = True) -> None:
    """Write rows as an attempt that was sealed, or killed before it was."""
    with rlio.ParquetWriter(root, writer_id=writer, spool=None) as output:
        output.write(rows(t))
    if not sealed:
        storage = Storage.open(root)
        claim(storage, writer)
        for entry in storage.list(writer_dir(writer)):
            if "_sealed" in entry.path:
                storage.remove(entry.path)


def values_of(root: Any, **options: Any) -> list[int]:
    with rlio.DatasetReader(root, epochs=1, **options) as reader:
        return [int(t) for batch in reader for t in batch["t"]]


def codes(root: str) -> list[str]:
    """Errors, and what is said of attempts."""
    return [f.code for f in rlio.verify(root).findings if f.severity == "error" or f.code == "attempt"]


# ---- names ----


@pytest.mark.parametrize(
    "text",
    [
        "xjob-000000~0000-0000000",
        "xjob-000000~0000-0000000g",
        "xjob-000000~000-00000000",
        "xjob-00000~0000-00000000",
        "xjob-0000000~0000-00000000",
        "job-000000~0000-00000000",
        "x-000000~0000-00000000",
        "xJob-000000~0000-00000000",
        "xjob-000000~0000-00000000~0000-00000000",
        "xjob-000000~",
        "a~b",
        "~",
        "xjob-000000~0000-00000000\n",
        "x" + "j" * 32 + "-000000~0000-00000000",
        "xjob-\u0660\u0660\u0660\u0660\u0660\u0660~0000-00000000",
    ],
)
def test_a_tilde_is_in_no_id_but_an_attempt_s(text: str) -> None:
    assert part_of(text) is None
    assert not is_writer_id(text)


@pytest.mark.parametrize("job", ["a", "nightly-2026-11-22", "9", "j" * 31])
@pytest.mark.parametrize("number", [0, 7, 999_999])
def test_an_attempt_s_id_says_its_part(job: str, number: int) -> None:
    part = part_id(job, number)
    made = [make_attempt_id(part, n) for n in (0, 1, 9999)]
    assert [part_of(writer) for writer in made] == [part] * 3
    assert all(map(is_writer_id, made))
    assert made == sorted(made)
    assert len({make_attempt_id(part, 3) for _ in range(100)}) == 100


def test_plain_ids_are_no_attempts() -> None:
    assert part_of(make_writer_id(3)) is None
    assert part_of(PART) is None
    assert is_writer_id(PART)


@pytest.mark.parametrize("job", ["", "-a", "A", "a~b", "j" * 32, "a/b", "..", 3, None])
def test_a_job_has_a_plain_name(job: Any) -> None:
    with pytest.raises(OptionError, match="job="):
        part_id(job, 0)


def test_numbers_have_bounds() -> None:
    with pytest.raises(OptionError, match="part 1000000"):
        part_id("job", 1_000_000)
    with pytest.raises(OptionError, match="another name"):
        make_attempt_id(PART, 10_000)


# ---- the rule ----


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "data")


def test_of_sealed_attempts_the_one_with_the_smallest_id_is_read_and_nothing_else(root: str) -> None:
    attempt(root, SECOND, range(100, 105))
    attempt(root, FIRST, range(5))
    attempt(root, "w0", range(10, 12))
    assert values_of(root) == [10, 11, 0, 1, 2, 3, 4]
    assert rlio.open_dataset(root).snapshot() == {"w0": 2, FIRST: 5}
    assert [Path(uri).parent.name for uri in rlio.open_dataset(root).files()] == ["w0", FIRST]


def test_an_attempt_that_is_not_sealed_has_no_rows_even_where_a_snapshot_names_it(root: str) -> None:
    attempt(root, FIRST, range(5), sealed=False)
    attempt(root, "w0", range(2))
    assert values_of(root) == [0, 1]
    with pytest.raises(HoleError):
        rlio.open_dataset(root, at={FIRST: 5})
    attempt(root, SECOND, range(7, 9))
    assert values_of(root) == [0, 1, 7, 8]


def test_every_part_has_an_attempt_of_its_own(root: str) -> None:
    others = [f"{part_id('job', 1)}~0000-00000000", f"{part_id('other', 0)}~0000-00000000"]
    for n, writer in enumerate([FIRST, *others]):
        attempt(root, writer, range(n, n + 1))
    assert sorted(values_of(root)) == [0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 3)), st.booleans(), min_size=1, max_size=10),
    st.randoms(use_true_random=False),
)
def test_all_listings_agree_whatever_their_order(
    attempts: dict[tuple[int, int], bool], shuffle: random.Random
) -> None:
    raw = Listing()
    for (part, number), is_sealed in attempts.items():
        writer = f"{part_id('job', part)}~{number:04d}-00000000"
        raw.trimmed[writer] = 0
        if is_sealed:
            raw.sealed[writer] = 1
    expected = {min(w for w in raw.sealed if part_of(w) == part) for part in {part_of(w) for w in raw.sealed}}
    # Half of it is seen by one listing and half by the next.
    one, other = Listing(), Listing()
    for writer in shuffle.sample(sorted(raw.trimmed), len(raw.trimmed)):
        seen = shuffle.choice([one, other])
        seen.trimmed[writer] = 0
        if writer in raw.sealed:
            seen.sealed[writer] = 1
    for joined in (one._chosen().joined(other._chosen()), other._chosen().joined(one._chosen())):
        assert set(joined.sealed) == expected == set(joined.writers)
        assert joined == raw._chosen()
        open_parts = {part_of(w) for w in raw.trimmed} - {part_of(w) for w in raw.sealed}
        assert {part_of(w) for w in joined.trimmed if w not in joined.sealed} == open_parts


# ---- who began with an attempt stays with it ----


def test_a_snapshot_stays_with_the_attempt_that_it_names(root: str) -> None:
    attempt(root, SECOND, range(100, 105))
    snapshot = rlio.open_dataset(root).snapshot()
    attempt(root, FIRST, range(5))
    assert values_of(root) == [0, 1, 2, 3, 4]
    assert values_of(root, at=snapshot) == [100, 101, 102, 103, 104]


def test_a_snapshot_tells_what_was_trimmed_of_its_attempt_also_once_another_is_taken(root: str) -> None:
    attempt(root, SECOND, range(100, 105))
    snapshot = rlio.open_dataset(root).snapshot()
    rlio.maintenance.trim(root, before={SECOND: 3})
    attempt(root, FIRST, range(5))
    with pytest.raises(HoleError, match="trimmed since"):
        rlio.open_dataset(root, at=snapshot)
    left = rlio.open_dataset(root, at=snapshot, on_error="skip")
    assert left.trimmed_since == {SECOND: range(3)}
    assert values_of(root, at=snapshot, on_error="skip") == [103, 104]


def test_a_follower_stays_with_the_attempt_that_it_began_with(root: str) -> None:
    attempt(root, SECOND, range(100, 105))
    with rlio.FollowReader(root, idle_timeout=0, batch_size=2) as reader:
        served = [*reader.sample()["t"]]
        state = reader.state_dict()
        attempt(root, FIRST, range(5))
        attempt(root, "zz", range(7, 8))
        served += [t for batch in reader for t in batch["t"]]
    assert served == [100, 101, 102, 103, 104, 7]
    with rlio.FollowReader(root, idle_timeout=0, batch_size=2) as restored:
        restored.load_state_dict(state)
        assert [t for batch in restored for t in batch["t"]] == served[2:]
    with rlio.FollowReader(root, idle_timeout=0, batch_size=2) as fresh:
        assert [t for batch in fresh for t in batch["t"]] == [0, 1, 2, 3, 4, 7]


def test_a_follower_waits_for_a_part_that_was_begun_and_for_no_attempt_that_is_not_taken(root: str) -> None:
    attempt(root, "w0", range(2))
    attempt(root, FIRST, range(10, 15), sealed=False)
    with rlio.FollowReader(root, idle_timeout=60, poll_seconds=0.01) as reader:
        assert reader.sample()["t"].tolist() == [0, 1]
        assert reader._pass._is_complete() is False  # type: ignore[attr-defined]  # Else it would wait.
        attempt(root, SECOND, range(20, 22))
        assert reader.sample()["t"].tolist() == [20, 21]
        with pytest.raises(EndOfData):
            reader.sample()


def test_a_file_in_an_attempt_s_folder_is_no_attempt(root: str) -> None:
    """A file browser leaves notes in folders; nobody waits for rows of them, and gc removes only ours."""
    attempt(root, "w0", range(2))
    attempt(root, FIRST, range(10, 15), sealed=False)
    (Path(root) / writer_dir(FIRST) / ".DS_Store").write_bytes(b"?")
    rlio.maintenance.gc(root, grace=0)
    assert list_shards(Storage.open(root)).passed_over == {}
    with rlio.FollowReader(root, idle_timeout=60, poll_seconds=0.01) as reader:
        assert reader.sample()["t"].tolist() == [0, 1]
        assert reader._pass._is_complete()  # type: ignore[attr-defined]  # Else it would wait.


def test_all_attempts_at_a_part_are_one_rank_s(root: str) -> None:
    parts = [f"{part_id('job', n)}~{{}}-00000000" for n in range(6)]
    for n, part in enumerate(parts):
        attempt(root, part.format("0001"), range(n, n + 1))
    readers = [rlio.FollowReader(root, idle_timeout=0, shard=(rank, 3)) for rank in range(3)]
    served = [[int(t) for batch in reader for t in batch["t"]] for reader in readers]
    for n, part in enumerate(parts):
        attempt(root, part.format("0000"), range(n, n + 1))
    again = [rlio.FollowReader(root, idle_timeout=0, shard=(rank, 3)) for rank in range(3)]
    assert [[int(t) for batch in reader for t in batch["t"]] for reader in again] == served
    assert sorted(t for rank in served for t in rank) == list(range(6))


# ---- maintenance ----


def test_verify_tells_of_other_attempts_as_notes_and_of_their_damage_not_at_all(root: str) -> None:
    attempt(root, FIRST, range(5))
    attempt(root, SECOND, range(5))
    attempt(root, THIRD, range(5), sealed=False)
    for writer in (SECOND, THIRD):
        (shard,) = (Path(root) / writer_dir(writer)).glob("*.parquet")
        shard.write_bytes(b"torn")
    report = rlio.verify(root)
    assert codes(root) == ["attempt", "attempt"]
    assert report.ok
    assert [entry.writer for entry in report.ledger] == [FIRST]
    assert values_of(root) == [0, 1, 2, 3, 4]


def test_verify_tells_what_is_missing_of_the_attempt_that_is_taken(root: str) -> None:
    attempt(root, FIRST, range(5))
    attempt(root, SECOND, range(5))
    (shard,) = (Path(root) / writer_dir(FIRST)).glob("*.parquet")
    shard.unlink()
    assert "hole" in codes(root)
    with pytest.raises(HoleError):
        values_of(root)


def test_gc_removes_other_attempts_after_the_grace_and_keeps_their_seals(root: str) -> None:
    attempt(root, FIRST, range(5))
    attempt(root, SECOND, range(100, 105))
    attempt(root, THIRD, range(5), sealed=False)
    abandoned = f"{part_id('job', 1)}~0000-00000000"
    attempt(root, abandoned, range(5), sealed=False)
    assert rlio.maintenance.gc(root).waiting == 5
    report = rlio.maintenance.gc(root, grace=0)
    assert {entry.kind for entry in report.removed} == {"attempt"}
    assert len(report.removed) == 5
    left = {writer: len(Storage.open(root).list(writer_dir(writer))) for writer in (FIRST, SECOND, THIRD)}
    assert left == {FIRST: 2, SECOND: 1, THIRD: 0}
    assert values_of(root) == [0, 1, 2, 3, 4]
    with pytest.raises(HoleError):  # Never other rows than those that the snapshot names.
        rlio.open_dataset(root, at={SECOND: 5})
    assert rlio.maintenance.gc(root, grace=0).removed == ()


def test_a_follower_that_had_an_attempt_which_was_collected_repeats_nothing(root: str) -> None:
    attempt(root, SECOND, range(100, 105))
    with rlio.FollowReader(root, idle_timeout=0) as reader:
        assert len(reader.sample()["t"]) == 5
        state = reader.state_dict()
    attempt(root, FIRST, range(5))
    rlio.maintenance.gc(root, grace=0)
    with rlio.FollowReader(root, idle_timeout=0) as reader:
        reader.load_state_dict(state)
        assert list(reader) == []


def test_compact_and_trim_see_the_attempt_that_is_taken(root: str) -> None:
    for writer in (FIRST, SECOND):
        with rlio.ParquetWriter(root, writer_id=writer, spool=None) as output:
            for t in range(4):
                output.write(rlio.SampleBatch(t=np.array([t])))
                output.flush()
    report = rlio.maintenance.compact(root)
    assert [run.writer for run in report.runs] == [FIRST]
    assert values_of(root) == [0, 1, 2, 3]
    assert rlio.maintenance.trim(root, keep_rows=2).rows_left == 2
    assert values_of(root) == [2, 3]
    assert codes(root) == ["attempt"]


def test_a_copy_into_another_root_has_each_row_once(root: str, tmp_path: Path) -> None:
    attempt(root, FIRST, range(5))
    attempt(root, SECOND, range(5))
    rlio.maintenance.compact(root, into=str(tmp_path / "copy"))
    assert values_of(str(tmp_path / "copy")) == [0, 1, 2, 3, 4]


def test_data_sets_without_attempts_are_listed_as_ever() -> None:
    storage = Storage.open("memory://no-attempts")
    seal(storage, "w0", 3)
    listing = list_shards(storage)
    assert listing.passed_over == {}
    assert listing.staying_with(["w0", "w1"]) is listing


def test_compaction_between_two_seals_changes_nothing(root: str) -> None:
    attempt(root, SECOND, range(100, 105))
    snapshot = rlio.open_dataset(root).snapshot()
    for n in range(4):
        with rlio.ParquetWriter(root, writer_id=f"w{n}", spool=None) as output:
            output.write(rows(range(n, n + 1)))
            output.flush()
            output.write(rows(range(n, n + 1)))
    rlio.maintenance.compact(root)
    attempt(root, FIRST, range(5))
    attempt(root, THIRD, range(5), sealed=False)
    for _ in range(2):
        assert values_of(root)[-5:] == [0, 1, 2, 3, 4]
        assert values_of(root, at=snapshot) == [100, 101, 102, 103, 104]
        assert len(rlio.open_dataset(root)) == 13
        rlio.maintenance.compact(root)
    assert codes(root) == ["attempt", "attempt"]
