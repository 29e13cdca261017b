"""Listing: which shards count, and which of their rows serve, each exactly once."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
from growing_data import publish_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.catalog.listing import (
    Coverage,
    HoleCheck,
    Listing,
    Rejected,
    Segment,
    ShardRef,
    cover_rows,
    list_settled,
    list_shards,
    load_shard,
)
from rlio.catalog.names import ShardName, shard_path
from rlio.errors import CorruptData, DataNotFound, UnsafeData
from rlio.storage.filesystem import Storage


def shard(first: int, rows: int, *, crc32: int = 0) -> ShardRef:
    name = ShardName(first=first, rows=rows, size=1, crc32=crc32, footer_crc32=0)
    return ShardRef("w", name, shard_path("w", name))


# Small numbers, so that ranges meet, nest, repeat and leave gaps.
shards = st.lists(
    st.builds(shard, st.integers(0, 20), st.integers(1, 8), crc32=st.integers(0, 2)), max_size=15
)


def rows_of(refs: list[ShardRef]) -> set[int]:
    return {row for ref in refs for row in range(ref.name.first, ref.name.end)}


@settings(max_examples=300, deadline=None)
@given(shards, st.integers(0, 60), st.none() | st.integers(0, 70))
def test_every_row_is_served_exactly_once_or_is_in_a_hole(
    refs: list[ShardRef], trim: int, sealed: int | None
) -> None:
    segments, holes = cover_rows(refs, trim=trim, sealed=sealed)
    served = [row for part in segments for row in range(part.first, part.end)]
    missing = [row for hole in holes for row in hole]
    wanted = {row for row in rows_of(refs) if row >= trim}
    assert served == sorted(set(served)), "in order, none twice"
    assert set(served) == wanted
    end = max([*(row + 1 for row in wanted), sealed or 0, trim])
    assert set(missing) == set(range(trim, end)) - wanted
    assert all(part.rows > 0 for part in segments)
    assert all(len(hole) > 0 for hole in holes)
    for part in segments:
        assert 0 <= part.skip < part.skip + part.rows <= part.ref.name.rows
        assert part.first == part.ref.name.first + part.skip


@settings(max_examples=200, deadline=None)
@given(shards, st.integers(0, 60))
def test_the_rule_is_the_documented_one(refs: list[ShardRef], trim: int) -> None:
    expected: list[Segment] = []
    cursor = trim
    end = max((ref.name.end for ref in refs), default=0)
    while cursor < end:
        covering = [ref for ref in refs if ref.name.first <= cursor < ref.name.end]
        if not covering:
            cursor += 1
            continue
        largest = max(ref.name.end for ref in covering)
        chosen = min((ref for ref in covering if ref.name.end == largest), key=lambda ref: ref.path)
        expected.append(Segment(chosen, cursor - chosen.name.first, largest - cursor))
        cursor = largest
    assert cover_rows(refs, trim=trim).segments == expected


@pytest.mark.further
@settings(max_examples=100, deadline=None)
@given(shards, st.randoms(use_true_random=False))
def test_the_order_in_which_shards_are_listed_does_not_matter(refs: list[ShardRef], random: object) -> None:
    shuffled = list(refs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives random.Random no type
    assert cover_rows(shuffled) == cover_rows(refs)


@settings(max_examples=100, deadline=None)
@given(shards, st.integers(1, 5))
def test_a_reader_that_stops_and_goes_on_at_its_cursor_serves_what_one_that_stays_serves(
    refs: list[ShardRef], steps: int
) -> None:
    whole = [row for part in cover_rows(refs).segments for row in range(part.first, part.end)]
    resumed: list[int] = []
    cursor = 0
    while parts := cover_rows(refs, trim=cursor).segments[:steps]:
        resumed += [row for part in parts for row in range(part.first, part.end)]
        cursor = parts[-1].end
    assert resumed == whole


@settings(max_examples=100, deadline=None)
@given(shards, st.integers(1, 6))
def test_compaction_and_then_removal_of_what_is_covered_change_no_row(refs: list[ShardRef], k: int) -> None:
    parts = cover_rows(refs).segments[:k]
    run = [part for i, part in enumerate(parts) if i == 0 or parts[i - 1].end == part.first]
    if not run or run != parts:
        return
    compacted = shard(run[0].first, run[-1].end - run[0].first)
    covered = [r for r in refs if compacted.name.first <= r.name.first and r.name.end <= compacted.name.end]
    before = rows_of(refs)
    for after in ([*refs, compacted], [*(ref for ref in refs if ref not in covered), compacted]):
        segments, _ = cover_rows(after)
        assert {row for part in segments for row in range(part.first, part.end)} == before


def test_holes_are_ranges_of_missing_rows() -> None:
    refs = [shard(10, 5), shard(20, 5), shard(30, 5)]
    assert cover_rows(refs).holes == [range(10), range(15, 20), range(25, 30)]
    assert cover_rows(refs, trim=10).holes == [range(15, 20), range(25, 30)]
    assert cover_rows(refs, trim=22).holes == [range(25, 30)]
    assert cover_rows(refs, trim=50).holes == []
    assert cover_rows(refs, trim=30, sealed=40).holes == [range(35, 40)]
    assert cover_rows([]) == Coverage([], [])
    assert cover_rows([], sealed=3).holes == [range(3)]


def test_of_equal_ranges_the_smallest_name_serves() -> None:
    twins = [shard(0, 5, crc32=2), shard(0, 5, crc32=1), shard(0, 5, crc32=3)]
    assert cover_rows(twins).segments == [Segment(twins[1], 0, 5)]


def test_rows_far_out_are_counted_exactly() -> None:
    refs = [shard(10**18, 2**48), shard(10**18 + 2**48, 1)]
    assert [part.rows for part in cover_rows(refs, trim=10**18 + 1).segments] == [2**48 - 1, 1]


# ---- listings ----


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return Storage.open(tmp_path / "run", sync=False)
    return Storage.open(f"memory://{uuid.uuid4().hex}")


def publish(storage: Storage, writer: str, first: int, rows: int, data: bytes = b"rows") -> ShardRef:
    return publish_shard(storage, writer, data, first=first, rows=rows, suffix="jsonl", footer_crc32=0)


def test_shards_are_found_by_writer_and_sorted_by_first_row(storage: Storage) -> None:
    late = publish(storage, "wb", 10**13, 5)  # one digit more than the padding: sorts first as text
    early = publish(storage, "wb", 2 * 10**12, 5)
    other = publish(storage, "wa", 0, 5)
    listing = list_shards(storage)
    assert listing == Listing(shards={"wa": [other], "wb": [early, late]})
    assert list(listing.shards) == ["wa", "wb"]


def test_nothing_there_is_an_empty_listing(storage: Storage) -> None:
    assert list_shards(storage) == Listing()
    assert Listing().cover("w") == Coverage([], [])


def test_a_shard_cut_at_any_byte_or_grown_is_rejected_with_both_sizes(storage: Storage) -> None:
    data = b"0123456789"
    ref = publish(storage, "w", 0, 5, data)
    for size in (*range(len(data)), len(data) + 1):
        storage.put(ref.path, (data + b"x")[:size])
        listing = list_shards(storage)
        assert listing.shards == {}
        reason = f"has {size} bytes and its name says 10: torn, or not uploaded yet"
        assert listing.rejected == [Rejected(ref.path, reason)]
        with pytest.raises(CorruptData, match="bytes and its name says 10") as caught:
            load_shard(storage, ref)
        assert caught.value.uri == storage.uri_of(ref.path)


def test_a_shard_whose_listing_has_no_size_is_checked_when_it_is_read(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = publish(storage, "w", 0, 5, b"0123456789")
    listed = [entry._replace(size=None) for entry in storage.list("data")]
    monkeypatch.setattr(storage, "list", lambda *args, **kwargs: listed)
    assert list_shards(storage).shards == {"w": [ref]}
    storage.put(ref.path, b"0123")
    with pytest.raises(CorruptData, match="has 4 bytes"):
        load_shard(storage, ref)


def test_a_shard_swapped_for_a_huge_one_is_not_read_whole(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = publish(storage, "w", 0, 5, b"0123456789")
    storage.put(ref.path, bytes(1_000_000))
    asked: list[tuple[int, int]] = []
    read_range = storage.read_range
    monkeypatch.setattr(
        storage, "read_range", lambda path, i, j: (asked.append((i, j)), read_range(path, i, j))[1]
    )
    with pytest.raises(CorruptData, match="more than 10 bytes"):
        load_shard(storage, ref)
    assert asked == [(0, 11)]


def test_a_shard_that_is_gone_is_not_found(storage: Storage) -> None:
    ref = publish(storage, "w", 0, 5)
    storage.remove(ref.path)
    with pytest.raises(DataNotFound, match="nothing is stored there"):
        load_shard(storage, ref)


STRANGE = [
    "data/README",
    "data/w/notes.txt",
    "data/w/_sealed-x",
    "data/w/000000000000-1-4-00000000-00000000.parquet.tmp",
    "data/w/deeper/000000000000-1-4-00000000-00000000.parquet",
    "data/W/000000000000-1-4-00000000-00000000.parquet",
    "data/w w/000000000000-1-4-00000000-00000000.parquet",
]


def test_what_is_neither_shard_nor_marker_is_reported_and_not_served(storage: Storage) -> None:
    for path in STRANGE:
        storage.put(path, b"rows")
    ref = publish(storage, "w", 0, 5)
    for path in ("_tmp/x.tmp", "_schema/00000000.json", "data2/w/x", "000000000000-1-4-0-0.parquet"):
        storage.put(path, b"rows")
    listing = list_shards(storage)
    assert listing.shards == {"w": [ref]}
    assert sorted(rejected.path for rejected in listing.rejected) == sorted(STRANGE)
    assert all(rejected.reason for rejected in listing.rejected)


def test_the_shards_around_a_folder_within_a_writer_s_are_served(storage: Storage) -> None:
    refs = [publish(storage, "w", first, 5) for first in (0, 5)]
    between = refs[0].path + "-x"  # sorts between the two
    storage.put(f"{between}/{refs[0].name.format()}", b"rows")
    other = publish(storage, "w-1", 0, 5)  # the folder sorts before data/w/
    listing = list_shards(storage)
    assert listing.shards == {"w": refs, "w-1": [other]}
    assert [rejected.path for rejected in listing.rejected] == [f"{between}/{refs[0].name.format()}"]


def test_markers_bound_what_is_wanted(storage: Storage) -> None:
    refs = [publish(storage, "w", first, 5) for first in (0, 5, 10)]
    for marker in ("_trim-3", "_trim-10", "_trim-7", "_sealed-9", "_sealed-20"):
        storage.put(f"data/w/{marker}", b"")
    listing = list_shards(storage)
    assert (listing.trimmed, listing.sealed, listing.rejected) == ({"w": 10}, {"w": 20}, [])
    segments, holes = listing.cover("w")
    assert segments == [Segment(refs[2], 0, 5)]
    assert holes == [range(15, 20)]


def test_equal_numbers_in_another_width_serve_once(storage: Storage) -> None:
    ref = publish(storage, "w", 0, 5)
    twin = ref.path.replace("000000000000-", "0-")
    storage.put(twin, b"rows")
    listing = list_shards(storage)
    assert [found.path for found in listing.shards["w"]] == sorted([twin, ref.path])
    assert len(listing.cover("w").segments) == 1
    assert load_shard(storage, listing.shards["w"][1]) == b"rows"


def test_too_many_names_are_refused(storage: Storage) -> None:
    for first in range(5):
        publish(storage, "w", first, 1)
    with pytest.raises(UnsafeData, match="more than 3 names"):
        list_shards(storage, limit=3)


def test_folders_pipes_and_links_named_like_shards_are_not_served(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path / "run")
    good = publish(storage, "w", 100, 5)
    folder = tmp_path / "run" / "data" / "w"
    names = [os.path.basename(shard(first, 1).path) for first in range(4)]
    (folder / names[0]).mkdir()
    os.mkfifo(folder / names[1])
    (tmp_path / "outside.bin").write_bytes(b"x")
    (folder / names[2]).symlink_to(tmp_path / "outside.bin")
    (folder / names[3]).symlink_to(folder / names[3])
    assert list_shards(storage).shards == {"w": [good]}
    for name in names:
        with pytest.raises(UnsafeData):
            load_shard(storage, ShardRef("w", shard(0, 1).name, f"data/w/{name}"))


def test_a_listing_is_one_request(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(storage, "w", 0, 5)
    calls: list[str] = []
    listed = storage.list
    monkeypatch.setattr(
        storage, "list", lambda prefix="", **options: (calls.append(prefix), listed(prefix, **options))[1]
    )
    list_shards(storage)
    assert calls == ["data"]


# ---- up to a snapshot's row; several listings ----


@pytest.mark.further
@settings(max_examples=200, deadline=None)
@given(shards, st.integers(0, 30), st.integers(0, 40), st.none() | st.integers(0, 40))
def test_up_to_an_end_every_row_is_served_once_or_is_in_a_hole(
    refs: list[ShardRef], trim: int, end: int, sealed: int | None
) -> None:
    segments, holes = cover_rows(refs, trim=trim, sealed=sealed, end=end)
    served = [row for part in segments for row in range(part.first, part.end)]
    missing = [row for hole in holes for row in hole]
    assert served == sorted(set(served))
    assert sorted(served + missing) == list(range(trim, end))
    assert set(served) == {row for row in rows_of(refs) if trim <= row < end}
    # The same shards as without an end, the last one cut.
    assert [part.ref for part in segments] == [
        part.ref for part in cover_rows(refs, trim=trim).segments if part.first < end
    ]


def test_listings_together_know_what_either_saw(storage: Storage) -> None:
    first = publish(storage, "wa", 0, 5)
    storage.put("data/wa/_trim-3", b"")
    storage.put("data/wb/_sealed-7", b"")
    early = list_shards(storage)
    storage.remove(first.path)
    later = [publish(storage, "wa", 5, 5), publish(storage, "wb", 0, 2)]
    storage.put("data/wa/_trim-4", b"")
    storage.put("data/wa/strange", b"")
    both = early.joined(list_shards(storage))
    assert both.shards == {"wa": [first, later[0]], "wb": [later[1]]}
    assert (both.trimmed, both.sealed) == ({"wa": 4}, {"wb": 7})
    assert [rejected.path for rejected in both.rejected] == ["data/wa/strange"]
    assert both.writers == ["wa", "wb"]


@pytest.mark.parametrize(
    ("misses", "waits", "found"), [(0, 0, True), (1, 1, True), (2, 2, True), (9, 2, False)]
)
def test_what_is_lacking_is_listed_again_a_bounded_number_of_times(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, misses: int, waits: int, found: bool
) -> None:
    publish(storage, "w", 5, 5)
    late = publish(storage, "w", 0, 5)
    slept: list[float] = []
    listed = storage.list

    def listing(prefix: str = "", **options: object) -> object:
        hidden = len(slept) < misses
        return [e for e in listed(prefix) if not (hidden and e.path == late.path)]

    monkeypatch.setattr(storage, "list", listing)
    monkeypatch.setattr("rlio.catalog.listing.HOLE_CHECK", HoleCheck(seconds=0.5, sleep=slept.append))
    settled = list_settled(storage, lacks=lambda seen: bool(seen.cover("w").holes))
    assert slept == [0.5] * waits
    assert (late in settled.shards["w"]) == found


def test_torn_shards_are_told_by_writer(storage: Storage) -> None:
    ref = publish(storage, "w", 0, 5)
    storage.put(ref.path, b"x")
    storage.put("data/w/notes", b"x")
    ((rejected, name),) = list_shards(storage).torn()["w"]
    assert (rejected.path, name) == (ref.path, ref.name)
