"""Compaction: fewer and larger shards, and every row, batch and episode what and where it was."""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import further
from golden_data import cartpole_like, frames, sequences, two_policies
from growing_data import encode, publish, publish_shard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stored_batches import (
    assert_identical,
    files,
    fresh_root,
    group_bytes,
    load,
    numbered,
    put,
    remove,
    with_other_ids,
)
from test_round_trips import DTYPES, columns, interleaved, make

import rlio
from rlio import DatasetReader, JsonWriter, MultiAgentBatch, ParquetWriter, Roll, SampleBatch, concat_samples
from rlio.batch import Batch
from rlio.catalog.listing import list_shards
from rlio.catalog.names import ShardName
from rlio.errors import CorruptData, OptionError
from rlio.maintenance.compact import compact as compact_function
from rlio.maintenance.merging import open_whole
from rlio.schemas.provenance import Provenance
from rlio.storage.filesystem import Storage

WRITERS: dict[str, Any] = {
    "parquet": ParquetWriter,
    "jsonl": JsonWriter,
    "jsonl.zst": lambda root, **options: JsonWriter(root, compression="zstd", **options),
}


def store_small(*batches: Batch, root: str | None = None, kind: str = "parquet", **options: Any) -> str:
    """Write each batch into a shard of its own, and give the root."""
    root = root or fresh_root()
    options.setdefault("writer_id", "w0")
    with WRITERS[kind](root, roll=Roll(max_seconds=None), **options) as writer:
        for batch in batches:
            writer.write(batch)
            writer.flush()
    return root


def pieces(batch: SampleBatch, rows: int) -> list[SampleBatch]:
    return [batch[start : start + rows] for start in range(0, len(batch), rows)]


def served(root: str, size: int) -> list[Batch]:
    with DatasetReader(root, epochs=1, batch_size=size) as reader:
        return list(reader)


def episodes(root: str) -> dict[Any, list[Any]]:
    """(writer, policy, ids) -> rows, first t, end and reward of each episode, parts in shards joined."""
    found: dict[Any, list[Any]] = {}
    for part in rlio.open_dataset(root).episode_parts():
        key = (part.writer, part.policy, part.eps_id, part.agent_index, part.env_id)
        reward = math.nan if part.reward is None else part.reward
        if key in found:
            found[key][0] += part.rows
            found[key][2] = part.end
            found[key][3] += reward
        else:
            found[key] = [part.rows, part.t0, part.end, reward]
    return found


def assert_same_episodes(found: dict[Any, list[Any]], expected: dict[Any, list[Any]]) -> None:
    assert found.keys() == expected.keys()
    for key, (rows, t0, end, reward) in expected.items():
        assert found[key][:3] == [rows, t0, end], key
        assert found[key][3] == pytest.approx(reward, nan_ok=True), key


def written_batches(root: str) -> list[Any]:
    """(writer, row, attributes) of each write(), and the provenance of the row's shard."""
    storage = Storage.open(root)
    found: list[Any] = []
    for segment in rlio.open_dataset(root).segments:
        row, writer = segment.ref.name.first, segment.ref.writer
        file = open_whole(storage, segment.ref)
        for index, info in enumerate(file.groups):
            group = file.read_group(index, batches=True)
            for begin, text in zip(group.begins.tolist(), group.batches, strict=True):
                found.append((writer, row + begin, json.loads(text), file.provenance))
            row += info.rows
    return found


def joint_steps(root: str) -> list[Batch]:
    """The joint steps of each row group, numbered as a whole, in order."""
    data = rlio.open_dataset(root)
    shards = [data.open_shard(segment) for segment in data.segments]
    groups = [shard.read(index) for shard in shards for index in range(len(shard.rows))]
    return [step for group in groups for step in group.timeslices(1)]


def assert_unchanged_by_compaction(
    root: str, *, batch_size: int = 5, read: Callable[[str], list[Batch]] | None = None, **options: Any
) -> Any:
    """Compact, and check that nothing but the shards changed; the report."""
    read = read or (lambda root: served(root, batch_size))
    before = read(root), episodes(root), written_batches(root)
    snapshot, stored = rlio.open_dataset(root).snapshot(), files(root)
    report = rlio.maintenance.compact(root, **options)
    assert rlio.open_dataset(root).snapshot() == snapshot
    assert files(root).items() >= stored.items(), "compaction took or changed an object"
    after = read(root)
    assert len(after) == len(before[0])
    for found, expected in zip(after, before[0], strict=True):
        assert_identical(found, expected)
        assert found.env_steps() == expected.env_steps()
    assert_same_episodes(episodes(root), before[1])
    assert written_batches(root) == before[2]
    return report


def shard_files(root: str) -> dict[str, bytes]:
    """Path -> bytes of the shards of a root in memory, in order."""
    found = files(root)
    return {path: found[path] for path in sorted(found) if ShardName.parse(path.rsplit("/", 1)[1])}


def shards(root: str) -> list[Any]:
    return [segment.ref for segment in rlio.open_dataset(root).segments]


# ---- every row, batch and episode survives ----


@pytest.mark.few(1)
@pytest.mark.parametrize("make_batch", [cartpole_like, frames, sequences])
@pytest.mark.parametrize("limit", [1 << 23, 900], ids=["one group", "small groups"])
@pytest.mark.each_value_once
def test_compacted_shards_serve_what_the_small_ones_did(make_batch: Any, limit: int) -> None:
    batch = make_batch()
    has_sequences = "seq_lens" in batch
    count = len(batch["seq_lens"]) if has_sequences else len(batch)
    parts = [
        batch.sequences(i, min(i + 2, count)) if has_sequences else batch[i : i + 7]
        for i in range(0, count, 2 if has_sequences else 7)
    ]
    with group_bytes(limit):
        root = store_small(*parts, provenance=Provenance(env="Golden-v0", seed=3))
        report = assert_unchanged_by_compaction(root)
        assert (report.shards_before, report.shards_after) == (len(parts), 1)
        assert assert_unchanged_by_compaction(root).runs == ()


def test_joint_steps_of_several_agents_survive() -> None:
    batch = two_policies()
    root = store_small(*[batch] * 4)
    assert assert_unchanged_by_compaction(root, batch_size=3).shards_after == 1


def agents(steps: dict[str, list[tuple[int, int]]]) -> MultiAgentBatch:
    """Policies with rows at the given (eps_id, t)."""
    return MultiAgentBatch(
        {
            pid: SampleBatch(
                eps_id=np.array([e for e, _ in at], np.int64),
                t=np.array([t for _, t in at], np.int64),
                obs=np.arange(len(at), dtype=np.float32)[:, None] + ord(pid),
            )
            for pid, at in steps.items()
            if at
        },
        len({step for at in steps.values() for step in at}),
    )


STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=4, unique=True)
# The first shares a step with the shard before, and so begins a row group, with the policy named last.
LATE_FIRST = [
    {"a": [], "b": [(9, 0), (1, 0)]},
    {"a": [(2, 0)], "b": [(2, 1)]},
    {"a": [(0, 1)], "b": [(1, 3)]},
]


@example(LATE_FIRST)
@settings(max_examples=6)
@given(st.lists(st.fixed_dictionaries({"a": STEPS, "b": STEPS}), min_size=2, max_size=8))
def test_joint_steps_keep_their_number_and_order_whatever_shares_them(
    written: list[dict[str, list[tuple[int, int]]]],
) -> None:
    """Readers number the joint steps of a row group: groups that would number otherwise are not joined."""
    batches = [agents(steps) for steps in written if any(steps.values())]
    first = agents({"a": [(9, 0)], "b": [(9, 0)]})  # Both policies are known from the first shard on.
    with group_bytes(400):
        root = store_small(first, *batches)
        assert_unchanged_by_compaction(root, read=joint_steps)


def test_a_joint_step_that_two_shards_share_is_served_twice_as_it_was() -> None:
    first = agents({"a": [(9, 0)], "b": [(9, 0)]})
    root = store_small(first, agents({"a": [(0, 0)]}), agents({"b": [(0, 0)]}), agents({"a": [(0, 1)]}))
    assert_unchanged_by_compaction(root, batch_size=1)
    assert len(served(root, 1)) == 4
    assert [info.units for info in open_whole(Storage.open(root), shards(root)[0]).groups] == [2, 2]


@pytest.mark.further
@settings(max_examples=4)
@given(
    specs=columns(),
    sizes=st.lists(st.integers(1, 15), min_size=2, max_size=4),
    limit=st.sampled_from([1, 200, 5000, 1 << 23]),
    max_rows=st.sampled_from([3, 7, 20]),
    seed=st.integers(0, 2**31),
)
def test_columns_of_every_kind_survive_to_the_bit(
    specs: dict[str, Any], sizes: list[int], limit: int, max_rows: int, seed: int
) -> None:
    batches = [
        SampleBatch({name: make(spec, rows, seed + 97 * i) for name, spec in specs.items()})
        for i, rows in enumerate(sizes)
    ]
    with group_bytes(limit):
        root = fresh_root()
        with ParquetWriter(root, roll=Roll(max_rows=max_rows, max_seconds=None)) as writer:
            for batch in batches:
                writer.write(batch)
        assert_unchanged_by_compaction(root, batch_size=13)
        assert len(shards(root)) == 1
    assert_identical(load(root), concat_samples(batches))


@settings(max_examples=3)
@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=8),
    count=st.integers(1, 3),
    keyed=st.sampled_from(["eps_id", "env_id", "agent_index", "done"]),
    missing=st.booleans(),
    rows=st.integers(3, 9),
    limit=st.sampled_from([1, 300, 1 << 23]),
    seed=st.integers(0, 2**31),
)
def test_observations_stored_once_stay_equal_and_are_stored_once_across_old_shards(
    dtype: str, lengths: list[int], count: int, keyed: str, missing: bool, rows: int, limit: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    batch = interleaved(rng, dtype, (3,), lengths, count, keyed)
    if missing:
        valid = rng.random(len(batch)) > 0.2
        batch["new_obs"]["a"][~valid] = np.zeros((), np.dtype(dtype))
        batch["new_obs"]["b"][0][~valid] = 0
        batch["new_obs_valid"] = valid
    with group_bytes(limit):
        root = store_small(*pieces(batch, rows))
        assert_unchanged_by_compaction(root)
    assert_identical(load(root), batch)


def test_row_groups_become_full_ones() -> None:
    with group_bytes(100):
        root = store_small(*pieces(numbered(100), 3))
        rlio.maintenance.compact(root)
    (ref,) = shards(root)
    sizes = [info.rows for info in open_whole(Storage.open(root), ref).groups]
    full = open_whole(Storage.open(root), ref).schema.group_rows
    assert full > 3
    assert sizes[:-1] == [full] * (len(sizes) - 1)


def test_a_sequence_longer_than_a_row_group_stays_whole() -> None:
    parts = [
        SampleBatch(obs=np.arange(n, dtype=np.float32)[:, None], seq_lens=[n], state_in_0=[[float(n)]])
        for n in (3, 40, 2, 5, 60)
    ]
    with group_bytes(100):
        root = store_small(*parts)
        before = [part["seq_lens"].tolist() for part in served(root, 1)]
        rlio.maintenance.compact(root)
        assert (
            [part["seq_lens"].tolist() for part in served(root, 1)] == before == [[3], [40], [2], [5], [60]]
        )


# ---- what is merged, and what is not ----


def test_the_size_of_what_is_made_is_bounded() -> None:
    rng = np.random.default_rng(0)
    root = store_small(*(SampleBatch(obs=rng.integers(0, 256, (64, 64), np.uint8)) for _ in range(20)))
    size = max(ref.name.size for ref in shards(root))
    report = assert_unchanged_by_compaction(root, max_bytes=5 * size)
    assert 4 <= report.shards_after <= 6
    assert max(ref.name.size for ref in shards(root)) <= 5 * size


def test_shards_of_more_than_half_the_size_and_those_between_them_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    large, small = (SampleBatch(obs=rng.random((rows, 8))) for rows in (2000, 5))
    root = store_small(large, small, large, small, small, large)
    size = max(ref.name.size for ref in shards(root))
    report = assert_unchanged_by_compaction(root, max_bytes=size + 20_000)
    assert [(run.first, run.rows) for run in report.runs] == [(4005, 10)]


def test_too_few_shards_are_not_worth_it() -> None:
    root = store_small(*pieces(numbered(12), 4))
    assert rlio.maintenance.compact(root, min_shards=4).runs == ()
    assert rlio.maintenance.compact(root, min_shards=3).rows == 12


def test_shards_of_another_schema_or_provenance_are_not_merged() -> None:
    root = fresh_root()
    one, other = agents({"a": [(0, 0)]}), agents({"a": [(0, 1)], "b": [(0, 1)]})
    store_small(one, one, other, other, root=root)
    report = rlio.maintenance.compact(root)
    assert [run.rows for run in report.runs] == [2, 4]
    storage = Storage.open(root)
    first, second = (open_whole(storage, ref) for ref in shards(root))
    assert first.schema.hash != second.schema.hash

    root, elsewhere = fresh_root(), fresh_root()
    store_small(*pieces(numbered(4), 2), root=root, provenance=Provenance(seed=1))
    store_small(*pieces(numbered(4, 4), 2), root=elsewhere, provenance=Provenance(seed=2))
    for path, data in shard_files(elsewhere).items():  # The same writer, with another seed.
        name = ShardName.parse(path.rsplit("/", 1)[1])
        publish_shard(
            Storage.open(root), "w0", data, first=name.first + 4, rows=name.rows, suffix="parquet",
            footer_crc32=name.footer_crc32,
        )  # fmt: skip
    assert_unchanged_by_compaction(root)
    assert [open_whole(Storage.open(root), ref).provenance["seed"] for ref in shards(root)] == [1, 2]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst"])
def test_a_data_set_with_json_shards_is_refused_and_a_copy_in_parquet_has_its_rows(kind: str) -> None:
    root = store_small(*pieces(numbered(9), 3), writer_id="w0")
    store_small(*pieces(numbered(9, 9), 3), root=root, kind=kind, writer_id="w1")
    before = files(root, "")
    for options in ({}, {"into": fresh_root()}, {"dry_run": True}, {"on_error": "skip"}):
        with pytest.raises(OptionError) as caught:
            rlio.maintenance.compact(root, **options)
        assert caught.value.uri == Storage.open(root).uri
        assert files(root, "") == before
    new = fresh_root()
    with DatasetReader(root, epochs=1) as reader, ParquetWriter(new) as writer:
        for batch in reader:
            writer.write(batch)
    assert rlio.maintenance.compact(new).shards_after == 1
    assert_identical(load(new), load(root))


def test_a_hole_is_never_closed() -> None:
    root = store_small(*pieces(numbered(20), 4))
    remove(list(shard_files(root))[2])
    rlio.maintenance.compact(root)
    data = rlio.open_dataset(root)
    assert data.holes == {"w0": [range(8, 12)]}
    assert [(s.first, s.rows) for s in data.segments] == [(0, 8), (12, 8)]


def two_that_overlap() -> str:
    """A root with rows 0 to 7 in one shard and 4 to 11 in another, and nothing else."""
    root, small = fresh_root(), pieces(numbered(12), 2)
    for first in (0, 4):
        publish(root, "w0", first, encode(*small[first // 2 : first // 2 + 4]))
    return root


def test_shards_that_overlap_in_part_become_one_of_their_rows() -> None:
    """Two compactors that began at different moments leave such shards."""
    root = two_that_overlap()
    assert [(s.first, s.skip, s.rows) for s in rlio.open_dataset(root).segments] == [(0, 0, 8), (8, 4, 4)]
    rlio.maintenance.compact(root)
    assert [(s.first, s.skip, s.rows) for s in rlio.open_dataset(root).segments] == [(0, 0, 12)]
    assert_identical(load(root), numbered(12))


def test_rows_below_a_trim_are_left_out() -> None:
    root = store_small(*pieces(numbered(40), 8))
    rlio.maintenance.trim(root, before={"w0": 11})
    rlio.maintenance.compact(root)
    assert load(root)["t"].tolist() == list(range(11, 40))
    (segment,) = rlio.open_dataset(root).segments
    assert segment.ref.name.first == 11


def test_a_dry_run_says_what_would_be_done_and_writes_nothing() -> None:
    root = store_small(*pieces(numbered(12), 3))
    before = files(root, "")
    plan = rlio.maintenance.compact(root, dry_run=True)
    assert files(root, "") == before
    done = rlio.maintenance.compact(root)
    assert [(run.first, run.rows, run.sources) for run in plan.runs] == [
        (run.first, run.rows, run.sources) for run in done.runs
    ]
    assert (plan.shards_before, plan.shards_after) == (done.shards_before, done.shards_after) == (4, 1)
    assert json.loads(json.dumps(done.to_json()))["rows"] == 12


@pytest.mark.parametrize(
    "options",
    [{"max_bytes": 0}, {"max_bytes": 1 << 40}, {"min_shards": 1}, {"on_error": "ignore"},
     {"into": "memory://elsewhere", "min_shards": 3}, {"into": "memory://elsewhere", "on_error": "skip"}],
)  # fmt: skip
def test_illegal_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        rlio.maintenance.compact(store_small(numbered(3)), **options)


def test_a_root_without_a_data_set_is_named() -> None:
    with pytest.raises(rlio.errors.DataNotFound, match="memory://"):
        rlio.maintenance.compact(fresh_root())


# ---- damage ----


def test_a_damaged_shard_raises_and_all_stays_as_it_was() -> None:
    root = store_small(*pieces(numbered(12), 3))
    path = list(shard_files(root))[1]
    for place in range(0, len(files(root)[path]), 41):
        data = bytearray(files(root)[path])
        data[place] ^= 1
        put(path, bytes(data))
        before = files(root, "")
        with pytest.raises(CorruptData, match=path.rsplit("/", 1)[1]):
            rlio.maintenance.compact(root)
        assert files(root, "") == before
        data[place] ^= 1
        put(path, bytes(data))


def test_runs_around_a_damaged_shard_are_compacted_if_that_is_wanted() -> None:
    root = store_small(*pieces(numbered(12), 3), writer_id="w0")
    store_small(*pieces(numbered(12), 3), root=root, writer_id="w1")
    path = list(shard_files(root))[1]
    put(path, files(root)[path][:-1] + b"?")
    report = rlio.maintenance.compact(root, on_error="skip")
    assert [run.writer for run in report.runs] == ["w0", "w1"]
    assert len(report.skipped) == 1
    assert len(shards(root)) == 4


def test_a_shard_that_is_damaged_where_only_its_rows_are_is_skipped_with_its_run() -> None:
    root = store_small(*pieces(numbered(12), 3))
    path = list(shard_files(root))[1]
    data = bytearray(files(root)[path])
    data[20] ^= 1
    put(path, bytes(data))
    report = rlio.maintenance.compact(root, on_error="skip")
    assert report.runs == ()
    assert "CRC-32" in report.skipped[0]


# ---- others at work ----


@pytest.mark.further
def test_racing_compactors_and_a_writer_and_a_reader_do_no_harm(tmp_path: Path) -> None:
    root = str(tmp_path)
    store_small(numbered(4), root=root, writer_id="w9")
    failures: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Any) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=run)

    def write() -> None:
        for first in range(0, 100, 2):
            writer.write(numbered(2, first))
            writer.flush()
        done.set()

    def keep_compacting() -> None:
        while not done.is_set():
            compact_function(root)
        compact_function(root)

    def keep_reading() -> None:
        while not done.is_set():
            t = load(root)["t"].tolist()
            assert t == [*range(len(t) - 4), *range(4)]

    with ParquetWriter(root, writer_id="w0", roll=Roll(max_seconds=None)) as writer:
        threads = [guarded(work) for work in (write, keep_compacting, keep_compacting, keep_reading)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    compact_function(root)
    assert load(root)["t"].tolist() == [*range(100), *range(4)]
    assert len(rlio.open_dataset(root).segments) == 2


def test_a_compactor_whose_shards_go_lists_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another compactor was quicker, and gc came after it."""
    root = store_small(*pieces(numbered(12), 3))
    original, calls = Storage.read_range, list[str]()

    def late(self: Storage, path: str, start: int, stop: int) -> bytes:
        if len({*calls, path}) == 3 and path not in calls:
            calls.append(path)
            compact_function(root)
            rlio.maintenance.gc(root, grace=0)
        calls.append(path)
        return original(self, path, start, stop)

    monkeypatch.setattr(Storage, "read_range", late)
    report = rlio.maintenance.compact(root)
    assert report.runs == ()
    assert load(root)["t"].tolist() == list(range(12))


def test_rows_that_are_trimmed_meanwhile_stay_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    root = store_small(*pieces(numbered(12), 3))
    from rlio.maintenance import compaction as module

    original, calls = module.open_whole, []

    def late(*args: Any) -> Any:
        file = original(*args)
        if not calls:
            calls.append(args)
            rlio.maintenance.trim(root, before={"w0": 7})
        return file

    monkeypatch.setattr(module, "open_whole", late)
    rlio.maintenance.compact(root)
    assert load(root)["t"].tolist() == list(range(7, 12))
    assert rlio.open_dataset(root).segments[0].ref.name.first == 7


def test_duckdb_counts_each_row_once_while_covered_shards_wait_for_gc(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    root = str(tmp_path)
    store_small(*pieces(numbered(50), 3), root=root, writer_id="w0")
    store_small(*pieces(numbered(50), 7), root=root, writer_id="w1")
    rlio.maintenance.compact(root)
    live = rlio.open_dataset(root).files()
    everything = [str(path) for path in tmp_path.glob("data/*/*.parquet")]
    with duckdb.connect() as connection:

        def rows(names: list[str]) -> int:
            ((count,),) = connection.execute("SELECT count(*) FROM read_parquet(?)", [names]).fetchall()
            return int(count)

        assert rows(live) == 100
        assert rows(everything) == 200
        rlio.maintenance.gc(root, grace=0)
        assert rows(live) == 100
    assert len(list(tmp_path.glob("data/*/*.parquet"))) == 2


# ---- into a new root ----


@pytest.mark.few(1)
@pytest.mark.parametrize("make_batch", [frames, two_policies, *further(cartpole_like, sequences)])
def test_a_copy_of_many_writers_has_all_rows_in_their_order_under_one(make_batch: Any) -> None:
    root, batch = fresh_root(), make_batch()
    for number in range(5):
        # Ids that repeat from writer to writer stay apart.
        batches = batch, with_other_ids(batch)
        store_small(*batches, root=root, writer_id=f"w{number}", provenance=Provenance(seed=number))
    new = fresh_root()
    report = rlio.maintenance.compact(root, into=new)
    assert report.rows == len(rlio.open_dataset(root)) == len(rlio.open_dataset(new))
    assert (report.shards_before, report.shards_after) == (10, 1)
    before, after = served(root, 4), served(new, 4)
    for found, expected in zip(after, before, strict=True):
        parts = found.policy_batches if isinstance(found, MultiAgentBatch) else {"": found}
        for part in parts.values():
            del part["_writer"]
        assert_identical(found, expected)
    assert_same_episodes(episodes(new), episodes(root))
    (ref,) = shards(new)
    storage = Storage.open(new)
    assert list_shards(storage).sealed == {ref.writer: report.rows}
    merged = written_batches(new)[0][3]["merged"]
    assert {writer: made["seed"] for writer, made in merged.items()} == {f"w{i}": i for i in range(5)}


def test_the_column_says_whose_rows_they_were_and_survives_another_copy() -> None:
    root = fresh_root()
    for number in range(3):
        store_small(numbered(2, 2 * number), root=root, writer_id=f"w{number}")
    first, second = fresh_root(), fresh_root()
    rlio.maintenance.compact(root, into=first)
    rlio.maintenance.compact(first, into=second)
    for copy in (first, second):
        batch = load(copy)
        assert batch["t"].tolist() == list(range(6))
        assert batch["_writer"].tolist() == ["w0", "w0", "w1", "w1", "w2", "w2"]
    third = fresh_root()
    with ParquetWriter(third) as writer, DatasetReader(first, epochs=1) as reader:
        for batch in reader:
            writer.write(batch)
    assert load(third)["_writer"].tolist() == ["w0", "w0", "w1", "w1", "w2", "w2"]


def test_a_copy_that_was_interrupted_is_completed_by_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    root = fresh_root()
    rng = np.random.default_rng(0)
    for number in range(4):
        store_small(SampleBatch(obs=rng.random((50, 4))), root=root, writer_id=f"w{number}")
    size = max(ref.name.size for ref in shards(root))
    whole, new = fresh_root(), fresh_root()
    rlio.maintenance.compact(root, into=whole, max_bytes=2 * size)
    from rlio.maintenance import compaction

    original, calls = compaction.put_shard, []

    def fail_second(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise rlio.errors.PublishError("the store is gone")
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(compaction, "put_shard", fail_second)
        with pytest.raises(rlio.errors.PublishError):
            rlio.maintenance.compact(root, into=new, max_bytes=2 * size)
    assert len(shards(new)) == 1
    rlio.maintenance.compact(root, into=new, max_bytes=2 * size)
    ours, theirs = ({p.split("/", 2)[2]: data for p, data in files(r).items()} for r in (new, whole))
    assert ours == theirs
    assert_identical(load(new), load(whole))


def test_a_copy_into_a_root_of_others_or_itself_is_refused() -> None:
    root, other = store_small(numbered(3)), store_small(numbered(3), writer_id="w7")
    with pytest.raises(OptionError, match="w7"):
        rlio.maintenance.compact(root, into=other)
    with pytest.raises(OptionError, match="itself"):
        rlio.maintenance.compact(root, into=root)


def test_a_copy_of_what_is_incomplete_is_refused() -> None:
    root = store_small(*pieces(numbered(12), 3))
    remove(list(shard_files(root))[1])
    new = fresh_root()
    with pytest.raises(CorruptData, match="3 to 5"):
        rlio.maintenance.compact(root, into=new)
    assert files(new, "") == {}


def test_a_copy_leaves_out_what_was_trimmed() -> None:
    root = store_small(*pieces(numbered(12), 5), writer_id="w0")
    store_small(*pieces(numbered(12), 5), root=root, writer_id="w1")
    rlio.maintenance.trim(root, before={"w0": 7, "w1": 3})
    new = fresh_root()
    rlio.maintenance.compact(root, into=new)
    assert load(new)["t"].tolist() == [*range(7, 12), *range(3, 12)]
    rows: dict[str, int] = defaultdict(int)
    for part in rlio.open_dataset(new).episode_parts():
        rows[part.writer] += part.rows
    assert rows == {"w0": 5, "w1": 9}
