"""Rows that a filter lets pass are the same with and without bounds; what bounds rule out stays unread."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from growing_data import A, B, grow
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from stored_batches import files, fresh_root, group_bytes, put, remove, store

import rlio
from rlio import JsonWriter, MultiAgentBatch, ParquetWriter, Roll, SampleBatch
from rlio.catalog.names import ShardName
from rlio.errors import (
    CorruptData,
    HoleError,
    MissingColumn,
    OptionError,
    SchemaConflict,
)
from rlio.query.filter_pushdown import is_ruled_out, matches
from rlio.query.filters import RowFilter
from rlio.schemas.shard_file import ShardFile
from rlio.source.span_reader import SegmentGone, SpanReader


class Reads:
    """Counts the row groups that are read, and remembers of which columns."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.groups: list[int] = []
        self.columns: list[list[str] | None] = []
        original = ShardFile.read_group

        def read_group(file: ShardFile, index: int, *, columns: Any = None, batches: bool = False) -> Any:
            self.groups.append(index)
            self.columns.append(None if columns is None else list(columns))
            return original(file, index, columns=columns, batches=batches)

        patch.setattr(ShardFile, "read_group", read_group)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def steps(rows: int, first: int = 0, **more: Any) -> SampleBatch:
    """Rows that count up in ``t``."""
    t = np.arange(first, first + rows)
    return SampleBatch(
        obs=np.stack([t, -t], 1).astype(np.float32), t=t, rewards=(t % 3).astype(np.float32), **more
    )


def in_groups(*batches: Any, bytes_: int = 256, **options: Any) -> str:
    """A root whose row groups have few rows."""
    with group_bytes(bytes_):
        return store(*batches, **options)


class Found:
    """All that a filter lets pass of a data set: the sums of what `matches` gives."""

    def __init__(self, data: rlio.Dataset, row_filter: RowFilter, **options: Any) -> None:
        read: list[Any] = []
        original = SpanReader.read
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SpanReader, "read", lambda *args: (read.append(args), original(*args))[1])
            parts = list(matches(data, row_filter, **options))
        self.positions = np.concatenate([np.empty(0, np.int64), *(part.positions for part in parts)])
        self.total = sum(part.rows for part in parts)
        self.lost = sum(part.lost for part in parts) + sum(rows for _, rows in data.lost_rows())
        self.groups_read = len(read)
        self.groups_passed_over = sum(len(part.spans) for part in parts) - len(read)


def positions(root: str, text: str, **options: Any) -> list[int]:
    return Found(rlio.open_dataset(root), RowFilter.parse(text), **options).positions.tolist()


# ---- what is found, and what is not read ----


def test_only_groups_that_may_match_are_read_and_of_those_only_the_filters_columns(reads: Reads) -> None:
    root = in_groups(steps(64))
    data = rlio.open_dataset(root)
    groups = len(data.open_shard(data.segments[0]).rows)
    assert groups >= 4
    found = Found(data, RowFilter.parse("t >= 60 and rewards > 0"))
    assert found.positions.tolist() == [61, 62]
    assert found.positions.dtype == np.int64
    assert (found.total, found.lost) == (64, 0)
    assert (found.groups_read, found.groups_passed_over) == (1, groups - 1)
    assert reads.groups == [groups - 1]
    assert reads.columns == [["t", "rewards"]]


def test_nothing_is_read_where_no_group_may_match(reads: Reads) -> None:
    found = Found(rlio.open_dataset(in_groups(steps(64))), RowFilter.parse("rewards > 2 or t < 0"))
    assert (found.positions.tolist(), found.total, found.groups_read) == ([], 64, 0)
    assert reads.groups == []


@pytest.mark.parametrize("text", ["obs[0] >= 60", "t >= 60 or isnan(rewards)", "not rewards < 5 or t >= 60"])
def test_what_bounds_do_not_tell_is_read(text: str, reads: Reads) -> None:
    found = Found(rlio.open_dataset(in_groups(steps(64))), RowFilter.parse(text))
    assert found.positions.tolist() == [60, 61, 62, 63]
    assert found.groups_passed_over == 0
    assert len(reads.groups) == found.groups_read > 1


def test_rows_are_in_recorded_order_of_writers_and_count_through_segments() -> None:
    root = fresh_root()
    with group_bytes(256):
        store(steps(40, 100), root=root, writer_id=B)
        store(steps(30), root=root, writer_id=A, roll=Roll(max_rows=16, max_seconds=None))
    assert positions(root, "t in (0, 17, 29, 100, 139)") == [0, 17, 29, 30, 69]
    data = rlio.open_dataset(root)
    parts = list(matches(data, RowFilter.parse("t in (0, 17, 29, 100, 139)")))
    assert [part.segment for part in parts] == data.segments
    assert [part.start for part in parts] == [0, *np.cumsum([s.rows for s in data.segments])[:-1]]
    assert [x for part in parts for x in part.positions.tolist()] == [0, 17, 29, 30, 69]
    assert sum(part.rows for part in parts) == 70


def test_a_snapshot_cuts_groups_and_positions_begin_at_its_rows() -> None:
    root = in_groups(steps(64), writer_id=A)
    for at, wanted, found in (({A: 30}, "t > 26", [27, 28, 29]), ({A: [10, 30]}, "t > 26", [17, 18, 19])):
        data = rlio.open_dataset(root, at=at)
        got = Found(data, RowFilter.parse(wanted))
        assert (got.positions.tolist(), got.total) == (found, len(data))


def test_larger_shards_and_overlaps_serve_each_row_once() -> None:
    root = fresh_root()
    grow(root, A, 0, 10)
    grow(root, A, 5, 20)
    grow(root, A, 0, 12)
    assert positions(root, "t > 8 and t < 14") == [9, 10, 11, 12, 13]


def test_an_empty_data_set_has_no_rows_that_match() -> None:
    root = fresh_root()
    with ParquetWriter(root):
        pass
    found = Found(rlio.open_dataset(root), RowFilter.parse("t > 1"))
    assert (found.positions.tolist(), found.positions.dtype, found.total) == ([], np.int64, 0)


def test_json_shards_have_no_bounds_and_give_the_same_rows() -> None:
    root = fresh_root()
    with JsonWriter(root, roll=Roll(max_seconds=None)) as writer:
        for first in range(0, 60, 10):
            writer.write(steps(10, first))
    found = Found(rlio.open_dataset(root), RowFilter.parse("t >= 58 or t == 3"))
    assert (found.positions.tolist(), found.total) == ([3, 58, 59], 60)
    assert (found.groups_read, found.groups_passed_over) == (6, 0)


def test_a_function_is_given_all_columns_or_those_it_asked_for(reads: Reads) -> None:
    root = in_groups(steps(20))
    chosen = RowFilter.of(lambda batch: batch["t"] > 17, columns=["t"], name="late")
    assert Found(rlio.open_dataset(root), chosen).positions.tolist() == [18, 19]
    assert {tuple(columns or ()) for columns in reads.columns} == {("t",)}
    everything = RowFilter.of(lambda batch: (batch["t"] > 17) & (batch["obs"][:, 0] > 18), name="late")
    assert Found(rlio.open_dataset(root), everything).positions.tolist() == [19]


def test_a_group_is_ruled_out_by_its_own_bounds() -> None:
    data = rlio.open_dataset(in_groups(steps(64)))
    shard = data.open_shard(data.segments[0])
    per_group = shard.rows[0]
    chosen = RowFilter.parse(f"t == {per_group + 2} or t == {per_group + 3}")
    assert is_ruled_out(shard, 0, chosen)
    assert not is_ruled_out(shard, 1, chosen)
    assert is_ruled_out(shard, 1, chosen, policy="nobody")


# ---- new_obs, nested columns, several policies, sequences ----


def test_new_obs_has_no_bounds_since_most_of_it_is_not_stored() -> None:
    t = np.arange(64)
    batch = SampleBatch(obs=t, new_obs=t + 1, t=t, truncateds=t == 63, eps_id=np.zeros(64, int))
    root = in_groups(batch)
    data = rlio.open_dataset(root)
    known = data.open_shard(data.segments[0]).bounds(0)
    assert "obs" in known
    assert "new_obs" not in known
    assert positions(root, "new_obs == 5") == [4]
    assert positions(root, "new_obs == 64") == [63]


def test_scalar_leaves_of_nested_columns_are_ruled_out_by_their_own_bounds(reads: Reads) -> None:
    t = np.arange(64)
    root = in_groups(SampleBatch(obs={"a/b": t, "v": np.stack([t, t], 1), "w": (t * 2.0, t % 2 == 0)}))
    found = Found(rlio.open_dataset(root), RowFilter.parse("obs['a/b'] > 60 and obs.w[1]"))
    assert found.positions.tolist() == [62]
    assert found.groups_read == len(reads.groups) == 1
    assert positions(root, "obs.w[0] >= 124 and obs.v[1] != 63") == [62]


def agents(rows: int) -> MultiAgentBatch:
    t = np.arange(rows)
    own = {
        name: SampleBatch(t=t, eps_id=np.zeros(rows, int), rewards=t * scale)
        for name, scale in (("a", 1.0), ("b", -1.0))
    }
    return MultiAgentBatch({"a": own["a"], "b": own["b"][: rows // 2]}, rows)


def test_several_policies_are_refused() -> None:
    root = in_groups(agents(10))
    with pytest.raises(OptionError):
        positions(root, "rewards > 0")


def test_rows_within_sequences_are_rows() -> None:
    batch = SampleBatch(
        t=np.arange(12), seq_lens=np.array([4, 3, 5]), state_in_0=np.zeros((3, 2)), rewards=np.arange(12.0)
    )
    root = in_groups(batch, batch)
    assert positions(root, "rewards > 9") == [10, 11, 22, 23]
    counted = RowFilter.of(lambda batch: np.asarray(batch["rewards"]) > 9, name="late")
    assert Found(rlio.open_dataset(root), counted).positions.tolist() == [10, 11, 22, 23]
    with pytest.raises(OptionError, match="a row a sequence"):
        positions(root, "seq_lens > 1")


# ---- columns that only some writers have ----


def test_columns_that_only_some_writers_have() -> None:
    root = fresh_root()
    store(steps(5), root=root, writer_id=A)
    store(steps(5, 5, score=np.arange(5.0)), root=root, writer_id=B)
    with pytest.raises(SchemaConflict, match="score"):
        positions(root, "score < 1")
    assert positions(root, "score < 1", missing="fill") == [0, 1, 2, 3, 4, 5]
    assert positions(root, "score > 2 or t == 1", missing="fill") == [1, 8, 9]
    with pytest.raises((MissingColumn, OptionError)):
        positions(root, "score < 1", missing="drop")
    with pytest.raises(MissingColumn, match="'score'"):
        positions(root, "score < 1 and t > 1", missing="drop")
    with pytest.raises(MissingColumn, match="nothing"):
        positions(root, "nothing > 1", missing="fill")
    with pytest.raises(OptionError):
        positions(root, "obs > 1")


# ---- damage ----


def damaged(root: str, group: int) -> None:
    """Flip a byte in a row group of the only shard."""
    data = rlio.open_dataset(root)
    shard: Any = data.open_shard(data.segments[0])
    info = shard.groups[group]
    ((path, content),) = files(root).items()
    at = (info.start + info.stop) // 2
    put(path, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def test_a_damaged_group_is_an_error_or_counted_and_keeps_its_positions() -> None:
    root = in_groups(steps(64))
    damaged(root, 1)
    data = rlio.open_dataset(root)
    rows = data.open_shard(data.segments[0]).rows
    with pytest.raises(CorruptData, match="CRC-32"):
        Found(data, RowFilter.parse("t >= 0"))
    found = Found(data, RowFilter.parse("t >= 0"), on_error="skip")
    assert found.positions.tolist() == [*range(rows[0]), *range(rows[0] + rows[1], 64)]
    assert (found.total, found.lost) == (64, rows[1])


def test_a_damaged_group_that_is_ruled_out_is_not_looked_at() -> None:
    root = in_groups(steps(64))
    damaged(root, 1)
    assert positions(root, "t > 60") == [61, 62, 63]


def test_a_shard_that_is_damaged_as_a_whole_is_counted() -> None:
    root = in_groups(steps(20), writer_id=A)
    in_groups(steps(10, 20), root=root, writer_id=B)
    path = next(path for path in files(root) if A in path)
    content = files(root)[path]
    put(path, content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    found = Found(rlio.open_dataset(root), RowFilter.parse("t > 10 and t < 23"), on_error="skip")
    assert (found.positions.tolist(), found.total, found.lost) == ([20, 21, 22], 30, 20)


def test_missing_rows_are_an_error_or_counted_and_have_no_positions() -> None:
    root = fresh_root()
    grow(root, A, 0, 10)
    grow(root, A, 15, 5)
    data = rlio.open_dataset(root)
    with pytest.raises(HoleError):
        Found(data, RowFilter.parse("t > 8"))
    found = Found(data, RowFilter.parse("t > 8"), on_error="skip")
    assert (found.positions.tolist(), found.total, found.lost) == ([9, 10, 11, 12, 13, 14], 15, 5)


def test_a_shard_that_is_gone_asks_for_another_listing() -> None:
    root = in_groups(steps(20))
    data = rlio.open_dataset(root)
    ((path, _),) = files(root).items()
    remove(path)
    with pytest.raises(SegmentGone):
        Found(data, RowFilter.parse("t > 8"))
    gone = {data.segments[0].ref.path}
    found = Found(data, RowFilter.parse("t > 8"), on_error="skip", given_up=gone)
    assert (found.positions.tolist(), found.lost) == ([], 20)


# ---- bounds as they are stored ----

COLUMNS: dict[str, np.ndarray] = {
    "b": np.array([False, False]),
    "i1": np.array([-128, 127], np.int8),
    "u1": np.array([3, 255], np.uint8),
    "i2": np.array([-(2**15), 2**15 - 1], np.int16),
    "u2": np.array([1, 2**16 - 1], np.uint16),
    "i4": np.array([-(2**31), 2**31 - 1], np.int32),
    "u4": np.array([7, 2**32 - 1], np.uint32),
    "i8": np.array([-(2**63), 2**63 - 1]),
    "u8": np.array([2**63 + 1, 2**64 - 1], np.uint64),
    "f4": np.array([-1.5, 0.1], np.float32),
    "f8": np.array([-np.inf, 0.1]),
    "be": np.array([1, 258], ">i4"),
}


def test_bounds_are_those_of_the_values_in_their_dtype() -> None:
    data = rlio.open_dataset(store(SampleBatch(COLUMNS)))
    known = data.open_shard(data.segments[0]).bounds(0)
    for name, values in COLUMNS.items():
        low, high = known[name]
        assert (int(low) if low.dtype.kind == "b" else low) == values[0], name
        assert high == values[1], name
        assert low.dtype == high.dtype == values.dtype.newbyteorder("="), name
    assert set(known) == set(COLUMNS)


def test_what_is_no_scalar_or_has_no_order_has_no_bounds() -> None:
    batch = SampleBatch(
        nan=np.full(2, np.nan),
        half=np.zeros(2, np.float16),
        name=np.array(["a", "b"]),
        vector=np.zeros((2, 2)),
        infos=np.array([{}, {}], object),
        t=np.arange(2),
    )
    data = rlio.open_dataset(store(batch))
    assert set(data.open_shard(data.segments[0]).bounds(0)) == {"t"}


def restated(root: str, old: bytes, new: bytes) -> None:
    """Replace bytes of the only shard's footer, and give the shard the name that certifies them."""
    ((path, content),) = files(root).items()
    length = int.from_bytes(content[-8:-4], "little") + 8
    footer = content[-length:]
    assert old in footer
    body = footer[:-8].replace(old, new)
    footer = body + struct.pack("<I", len(body)) + b"PAR1"
    changed = content[:-length] + footer
    name = ShardName.parse(path.rsplit("/", 1)[1])
    assert name is not None
    other = ShardName(
        first=name.first,
        rows=name.rows,
        size=len(changed),
        crc32=zlib.crc32(changed),
        footer_crc32=zlib.crc32(footer),
        suffix=name.suffix,
    )
    remove(path)
    put(path.rsplit("/", 1)[0] + "/" + other.format(), changed)


LOW = struct.pack("<q", 0x0102030405060708)
STATISTICS = {
    "another, a lie": (b"\x08" + LOW, b"\x08" + struct.pack("<q", 0x0102030405060709), False),
    "greater than the greatest": (b"\x08" + LOW, b"\x08" + struct.pack("<q", 2**62), True),
}


@pytest.mark.parametrize(("old", "new", "is_found"), STATISTICS.values(), ids=STATISTICS.keys())
def test_statistics_of_a_stranger_say_nothing_or_hide_his_rows_and_harm_nobody(
    old: bytes, new: bytes, is_found: bool
) -> None:
    first = int.from_bytes(LOW, "little")
    root = store(SampleBatch(t=np.arange(first, first + 5), obs=np.zeros((5, 2))))
    restated(root, old, new)
    data = rlio.open_dataset(root)
    assert ("t" in data.open_shard(data.segments[0]).bounds(0)) != is_found
    assert positions(root, f"t == {first}") == ([0] if is_found else [])
    assert positions(root, "t > 0") == [0, 1, 2, 3, 4]


# ---- against all rows read and masked ----


@st.composite
def tables(draw: st.DrawFn) -> SampleBatch:
    """Columns of every scalar kind with hard values, sorted or not."""
    rows = draw(st.integers(1, 40))

    def column(values: Any, dtype: str) -> np.ndarray:
        found = np.array(draw(st.lists(values, min_size=rows, max_size=rows)), dtype)
        return np.sort(found) if draw(st.booleans()) else found

    edges = st.sampled_from([0, 1, -1, 2**53, 2**53 + 1, -(2**63), 2**63 - 1])
    return SampleBatch(
        i=column(st.one_of(edges, st.integers(-5, 5)), "i8"),
        u=column(st.sampled_from([0, 1, 2**53 + 1, 2**63, 2**64 - 1]), "u8"),
        f=column(st.sampled_from([0.0, -0.0, 0.1, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e30]), "f4"),
        d=column(st.one_of(st.floats(), st.sampled_from([0.1, np.nan, 2.0**53])), "f8"),
        b=column(st.booleans(), "?"),
        s=column(st.sampled_from(["", "a", "b", "é"]), "U1"),
        v=np.arange(2 * rows).reshape(rows, 2),
    )


TEXTS = [
    "i > 0", "i == 9007199254740992", "i == 9007199254740992.0", "i in (1, -9223372036854775808)",
    "not i < 2", "i - 1 < -9223372036854775807", "i * i > 9223372036854775807", "u > 9223372036854775807",
    "u == i", "u - i > 0", "abs(i) > 5", "f > 0", "f == 0.1", "f <= 0", "not f > 0", "f != f", "isnan(f)",
    "f in (0.1, 1)", "isinf(f) or b", "f * f > 1", "1 / f > 0", "d == 0.1", "d == f", "d - f > 0",
    "d == i", "0 < d < 1", "b", "not b", "b and i > 0", "b == 1", "s == 'a'", "s > 'a' and i != 0",
    "s in ('', 'b') or u == 1", "v[1] > 10 and not b", "i / 2 > 1", "f + i > 1e29", "-f > 0", "abs(f) < 0.5",
    "not (f > 0 and d > 0)", "i > f", "u < d",
]  # fmt: skip


@settings(max_examples=12)
@given(st.lists(tables(), min_size=1, max_size=3), st.sampled_from(TEXTS), st.sampled_from([64, 256, 4096]))
def test_the_rows_are_those_of_a_mask_over_everything(
    batches: list[SampleBatch], text: str, bytes_: int
) -> None:
    root = in_groups(*batches, bytes_=bytes_)
    chosen = RowFilter.parse(text)
    everything = rlio.concat_samples(batches)
    try:
        expected = np.flatnonzero(chosen.mask(everything)).tolist()
    except OptionError:  # Integers beyond 64 bits.
        assume(False)
    found = Found(rlio.open_dataset(root), chosen)
    assert found.positions.tolist() == expected
    assert found.total == len(everything)
    # And without bounds.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.source.shards.ParquetShard.bounds", lambda *_: {})
        plain = Found(rlio.open_dataset(root), chosen)
    assert plain.positions.tolist() == expected
    assert plain.groups_passed_over == 0
    assert plain.groups_read == found.groups_read + found.groups_passed_over


@pytest.mark.further
def test_texts_of_the_law_rule_some_groups_out() -> None:
    """So that the law above compares something: many texts must skip a group of suitable data."""
    low = SampleBatch(
        i=[5] * 4,
        u=np.full(4, 6, "u8"),
        f=np.full(4, -3, "f4"),
        d=[9.0] * 4,
        b=[False] * 4,
        s=["a"] * 4,
        v=np.zeros((4, 2), int),
    )
    high = SampleBatch(
        i=[-5] * 4,
        u=np.full(4, 2**62, "u8"),
        f=np.full(4, 4, "f4"),
        d=[-9.0] * 4,
        b=[True] * 4,
        s=["b"] * 4,
        v=np.zeros((4, 2), int),
    )
    passed = []
    for batch in (low, high):
        data = rlio.open_dataset(store(batch))
        passed += [text for text in TEXTS if Found(data, RowFilter.parse(text)).groups_passed_over]
    assert len(set(passed)) > len(TEXTS) // 3
