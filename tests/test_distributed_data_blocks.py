"""Batches as blocks and back, parts of a data set, and attempts at writing one: what needs no cluster."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from further import first
from golden_data import cartpole_like, frames, sequences, two_policies
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import assert_identical, fresh_root, group_bytes, load, numbered, store

import rlio
import rlio.distributed
from rlio.catalog.commit import put_header
from rlio.catalog.listing import list_shards
from rlio.catalog.markers import seal
from rlio.catalog.names import part_id, part_of, writer_dir
from rlio.dataset.part_reader import PartReader, plan_of, split
from rlio.distributed.ray_data.blocks import Assembler, block_arrays, ray_tensors
from rlio.distributed.ray_data.part_writer import PartOptions, PartWriter
from rlio.distributed.ray_data.row_digest import RowDigest
from rlio.errors import HoleError, MissingColumn, OptionError, PublishError, SchemaConflict, SchemaError
from rlio.query.filters import RowFilter
from rlio.read_options import ReadOptions
from rlio.schemas.arrow_tables import POLICY_ID, Layout, to_table
from rlio.storage.filesystem import Storage

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlio[ray]'")


def alike() -> rlio.MultiAgentBatch:
    """Two policies with the same columns; an agent dies early, another comes late."""
    left = rlio.SampleBatch(
        obs=np.arange(10, dtype=np.float32).reshape(5, 2), eps_id=np.full(5, 7), t=np.arange(5)
    )
    right = rlio.SampleBatch(
        obs=np.arange(8, dtype=np.float32).reshape(4, 2) - 9, eps_id=np.array([7, 7, 8, 8]), t=[1, 2, 0, 1]
    )
    return rlio.MultiAgentBatch({"left": left, "right": right}, 7)


def with_types() -> rlio.SampleBatch:
    """One column of each type that Arrow has."""
    return rlio.SampleBatch(
        f2=np.arange(6, dtype=np.float16).reshape(3, 2),
        half=np.arange(3, dtype=np.float16),
        f4=np.array([0.5, np.nan, -np.inf], np.float32),
        big=np.arange(3, dtype=">f8"),
        u8=np.arange(3, dtype=np.uint64) + 2**63,
        i1=np.arange(6, dtype=np.int8).reshape(3, 2, 1),
        flag=np.array([True, False, True]),
        mask=np.arange(15).reshape(3, 5) % 2 == 0,
        nothing=np.zeros((3, 0), np.float32),
        text=np.array(["a", "", "žluťoučký"]),
        texts=np.array(["a", "b", "c" * 100], object),
        raw=np.array([b"a", b"bc", b""]),
        day=np.array(["2026-11-22"] * 3, "datetime64[ns]"),
        infos=np.array([{}, {"a": np.float32([1])}, {"b": (1, 2)}], object),
        nested={"x": np.arange(3), "y": ({"z/~": np.zeros((3, 1))}, np.ones(3))},
    )


MADE = {
    "cartpole_like": cartpole_like,
    "frames": frames,
    "sequences": sequences,
    "alike": alike,
    "with_types": with_types,
}


def reader_of(root: Any, part: int | None = None, **options: Any) -> list[PartReader]:
    """The readers of a data set's parts."""
    tasks = options.pop("tasks", None)
    chosen = ReadOptions(columns=options.pop("columns", None), on_error=options.pop("on_error", "raise"))
    dataset = rlio.open_dataset(root, at=options.pop("at", None))
    given: dict[str, Any] = {"missing": "error", "policy": None, "filter": None, "writers": False, **options}
    plan = plan_of(dataset, chosen, **given)
    plan = replace(plan, layout=replace(plan.layout, tensors=ray_tensors))
    return [PartReader(dataset.storage, plan, rows) for rows in split(dataset, tasks=tasks)]


def tables_of(root: Any, **options: Any) -> list[pa.Table]:
    return [table for part in reader_of(root, **options) for table in part.tables()]


def columns_of(root: Any, **options: Any) -> dict[str, np.ndarray]:
    """All rows as arrays, as Ray gives them."""
    parts = [block_arrays(table, None)[0] for table in tables_of(root, **options)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def batch_of(tables: Any, like: Layout | None = None) -> Any:
    return rlio.concat_samples(list(Assembler(like).batches(tables)))


# ---- blocks ----


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MADE)
def test_blocks_of_a_data_set_are_its_rows_again(name: str) -> None:
    root = store(MADE[name]())
    assert_identical(batch_of(tables_of(root)), load(root))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", first(2, MADE))
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_wherever_blocks_are_cut_sequences_and_joint_steps_stay_whole(name: str, data: Any) -> None:
    batch = MADE[name]()
    (table,) = tables_of(store(batch))
    cuts = sorted(data.draw(st.lists(st.integers(0, table.num_rows), max_size=4)))
    bounds = [0, *cuts, table.num_rows]
    pieces = [table.slice(a, b - a) for a, b in pairwise(bounds)]
    batches = list(Assembler().batches(pieces))
    assert_identical(rlio.concat_samples(batches), load(store(batch)))
    assert sum(part.env_steps() for part in batches) == load(store(batch)).env_steps()


def test_columns_come_as_arrays_of_their_shape_and_dtype() -> None:
    batch = frames()
    found = columns_of(store(batch))
    assert found["obs"].dtype == np.uint8
    assert found["obs"].shape == (24, 6, 6, 4)
    assert np.array_equal(found["obs"], batch["obs"])
    assert np.array_equal(found["new_obs"], batch["new_obs"])
    assert found["actions/aim/0"].shape == (24, 1)
    assert np.array_equal(found["actions/aim/1"], batch["actions"]["aim"][1])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "values",
    [
        np.array(["NaT", "2026-11-22"], "datetime64[D]"),
        np.array([["NaT", "2026-11-22"]], "datetime64[D]"),
        np.array(["NaT", "2026-11-22T01:02"], "datetime64[us]"),
        np.array([[1, 2], [3, 4]], "timedelta64[s]"),
        np.array(["NaT", 3], "timedelta64[ms]"),
        np.array(["a\0b", "c\0", "\0"], object),
        np.array(["a\0b", "c"]),
    ],
    ids=lambda values: f"{values.dtype}-{values.ndim}",
)
def test_no_value_is_cut_or_lost(values: np.ndarray) -> None:
    root = store(rlio.SampleBatch(x=values))
    found = batch_of(tables_of(root))["x"]
    assert found.dtype == load(root)["x"].dtype
    np.testing.assert_array_equal(found, load(root)["x"])


def test_a_time_that_does_not_fit_the_type_in_the_metadata_stays_as_it_is() -> None:
    (table,) = tables_of(store(rlio.SampleBatch(x=np.array([["2026-11-22"]], "datetime64[D]"))))
    from ray.data.extensions import ArrowTensorArray

    hours = ArrowTensorArray.from_numpy(np.array([["2026-11-22T05"]], "datetime64[s]"))
    other = table.set_column(0, table.schema.field(0), hours)
    assert batch_of([other])["x"] == np.datetime64("2026-11-22T05", "s")


def test_texts_are_objects_and_objects_are_json() -> None:
    found = columns_of(store(with_types()))
    assert found["text"].tolist() == ["a", "", "žluťoučký"]
    assert found["infos"].tolist()[0] == "{}"
    assert '"$array"' in found["infos"].tolist()[1]
    assert found["big"].dtype == np.dtype("<f8")


def test_sequences_stand_on_their_first_rows() -> None:
    found = columns_of(store(sequences()))
    assert found["seq_lens"].tolist() == [2, 0, 3, 0, 0, 1]
    assert found["state_in_0"][[0, 2, 5]].tolist() == sequences()["state_in_0"].tolist()
    assert not found["state_in_0"][[1, 3, 4]].any()


def test_cut_sequences_are_an_error() -> None:
    (table,) = tables_of(store(sequences()))
    with pytest.raises(SchemaError, match="sequence are no longer"):
        batch_of([table.filter(pa.array([True, False, True, True, True, True]))])


def test_the_rows_of_a_joint_step_follow_each_other() -> None:
    found = columns_of(store(alike()))
    steps = list(zip(found["eps_id"], found["t"], strict=True))
    assert len(set(steps)) == 7
    assert sum(a != b for a, b in pairwise(steps)) == 6
    assert sorted(found[POLICY_ID]) == ["left"] * 5 + ["right"] * 4


def test_without_metadata_names_tell_and_like_tells_the_rest() -> None:
    root = store(with_types())
    bare = [table.replace_schema_metadata() for table in tables_of(root)]
    bare = [t.cast(pa.schema([f.remove_metadata() for f in t.schema])) for t in bare]
    by_name = batch_of(bare)
    assert by_name["nested"]["y"][0]["z/~"].shape == (3, 1)
    assert by_name["infos"][2] == {"b": (1, 2)}
    assert by_name["text"].dtype == object
    (schema,) = rlio.open_dataset(root).schemas.values()
    assert_identical(batch_of(bare, Layout.of_leaves(schema.policies["default_policy"].columns)), load(root))


def test_a_renamed_column_is_another_one() -> None:
    (table,) = tables_of(store(numbered(3)))
    assert list(batch_of([table.rename_columns(["step", "obs"])])) == ["step", "obs"]


def test_what_has_no_type_in_arrow_is_refused_with_its_name() -> None:
    root = store(numbered(3, wave=np.zeros(3, np.complex64)))
    with pytest.raises(SchemaError, match=r"complex64.*wave"):
        tables_of(root)
    assert set(columns_of(root, columns=["t", "obs"])) == {"t", "obs"}


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (pa.table({"a": [1, None]}), "1 of 2 rows have no value"),
        (pa.table({"a": [[1], [1, 2]]}), "rows have the shapes"),
        (pa.table({"a": pa.nulls(2), "b": pa.array([None, None], pa.string())}), "none of 2 rows has"),
    ],
)
def test_rows_that_are_no_array_are_refused(table: pa.Table, match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        batch_of([table])


def test_columns_without_a_value_are_left_out_in_all_blocks_or_in_none() -> None:
    full, empty = pa.table({"a": [1], "b": [2]}), pa.table({"a": [3], "b": pa.nulls(1)})
    assembler = Assembler()
    batches = list(assembler.batches([empty, empty.to_pandas(), empty.slice(1)]))
    assert_identical(rlio.concat_samples(batches), rlio.SampleBatch(a=[3, 3]))
    assert (assembler.left_out, assembler.names) == ({"b"}, {"a"})
    for tables in ([full, empty], [empty, full]):
        with pytest.raises(SchemaError):
            batch_of(tables)


def test_blocks_have_the_same_columns_in_any_order() -> None:
    blocks = [pa.table({"a": [1], "b": [2]}), pa.table({"b": [4], "a": [3]})]
    assert_identical(batch_of(blocks), rlio.SampleBatch(a=[1, 3], b=[2, 4]))
    with pytest.raises(SchemaError, match="give all rows the same columns"):
        batch_of([*blocks, pa.table({"a": [5]})])


def test_lists_and_data_frames_of_others_are_taken() -> None:
    table = pa.table({"obs": [[1.0, 2.0], [3.0, 4.0]], "t": [0, 1]})
    for block in (table, table.to_pandas()):
        assert batch_of([block])["obs"].shape == (2, 2)


# ---- parts ----


def data_set(**options: Any) -> str:
    """Three writers with several shards each."""
    root = fresh_root()
    for n in range(3):
        batches = [numbered(10, first=100 * n + 10 * k, rewards=np.arange(10.0)) for k in range(4)]
        store(
            *batches, root=root, writer_id=f"w{n}", roll=rlio.Roll(max_rows=10, max_seconds=None), **options
        )
    return root


@pytest.mark.few(1)
@pytest.mark.parametrize("tasks", first(4, [None, 1, 3, 100, 2, 5, 12]))
def test_parts_are_the_data_set_in_its_order(tasks: int | None) -> None:
    root = data_set()
    parts = reader_of(root, tasks=tasks)
    assert len(parts) == min(tasks or 1, 12)
    found = [batch_of(part.tables())["t"] for part in parts]
    assert np.array_equal(np.concatenate(found), load(root)["t"])
    if tasks is not None and tasks > 1:
        assert max(map(len, found)) <= 2 * 120 // tasks + 10


def test_a_shard_is_never_in_two_parts() -> None:
    dataset = rlio.open_dataset(data_set())
    parts = split(dataset, tasks=5)
    paths = [ref.path for part in parts for rows in part for ref in rows.shards]
    assert sorted(paths) == sorted(segment.ref.path for segment in dataset.segments)


def test_parts_are_the_same_rows_whatever_is_added_compacted_or_collected(tmp_path: Path) -> None:
    root = str(tmp_path)
    store(*[numbered(10, first=10 * k) for k in range(6)], root=root, roll=rlio.Roll(max_rows=10), spool=None)
    parts = reader_of(root, tasks=3)
    halfway = parts[1].tables()
    first = next(halfway)
    rlio.maintenance.compact(root)
    rlio.maintenance.gc(root, grace=0)
    store(numbered(5, first=1000), root=root, writer_id="zz", spool=None)
    rest = [*parts[0].tables(), first, *halfway, *parts[2].tables()]
    assert batch_of(rest)["t"].tolist() == list(range(60))


def test_a_shard_that_is_gone_for_good_is_an_error_and_can_be_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path)
    store(*[numbered(10, first=10 * k) for k in range(3)], root=root, roll=rlio.Roll(max_rows=10), spool=None)
    raising, skipping = reader_of(root), reader_of(root, on_error="skip")
    Path(rlio.open_dataset(root).files()[1]).unlink()
    with pytest.raises(HoleError):
        list(raising[0].tables())
    with caplog.at_level(logging.WARNING, logger="rlio"):
        found = batch_of(skipping[0].tables())
    assert found["t"].tolist() == [*range(10), *range(20, 30)]
    assert any("10 rows" in record.message for record in caplog.records)


def test_damage_is_an_error_and_can_be_skipped(tmp_path: Path) -> None:
    root = str(tmp_path)
    store(*[numbered(10, first=10 * k) for k in range(3)], root=root, roll=rlio.Roll(max_rows=10), spool=None)
    path = Path(rlio.open_dataset(root).files()[1])
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(rlio.errors.CorruptData):
        tables_of(root)
    found = batch_of(tables_of(root, on_error="skip"))
    assert found["t"].tolist() == [*range(10), *range(20, 30)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "text", first(2, ["obs[1] > 200", "t == 105", "t < 0", "rewards >= 0", "rewards > 7"])
)
def test_a_filter_lets_the_reader_s_rows_pass(text: str) -> None:
    root = data_set()
    try:
        expected = load(root, filter=text, cache="none")["t"].tolist()
    except (SchemaError, ValueError):
        expected = []
    for columns in (None, ["t"], ["t", "rewards"]):
        assert columns_of(root, filter=text, columns=columns)["t"].tolist() == expected
    assert all(table.num_columns == 3 for table in tables_of(root, filter=text))


def test_what_bounds_rule_out_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlio.source.shards import ParquetShard

    root = data_set()
    read: list[int] = []
    real = ParquetShard.read_folded
    monkeypatch.setattr(
        ParquetShard,
        "read_folded",
        lambda self, index, **more: (read.append(index), real(self, index, **more))[1],
    )
    assert columns_of(root, filter="t == 105", columns=["obs"])["obs"].shape == (1, 3)
    assert len(read) == 2, "one group, for the filter and for the rows"


def test_a_function_is_a_filter() -> None:
    def odd(batch: rlio.SampleBatch) -> Any:
        return batch["t"] % 2 == 1

    chosen = RowFilter.of(odd, name="odd")
    assert columns_of(data_set(), filter=chosen)["t"].tolist()[:3] == [1, 3, 5]


def test_the_rows_of_one_policy_are_read_and_filtered() -> None:
    root = store(two_policies(), two_policies())
    found = columns_of(root, policy="walker")
    assert found["obs"].shape == (6, 2)
    assert found["obs"].dtype == np.float32
    assert POLICY_ID not in found
    assert (
        columns_of(root, policy="flyer", filter="t > 0", columns=["actions"])["actions"].tolist()
        == [[-0.5]] * 2
    )
    with pytest.raises(MissingColumn):
        reader_of(root, policy="walker", columns=["rewards"])
    with pytest.raises(OptionError, match="the data set has"):
        reader_of(root, policy="swimmer")


def test_unlike_policies_do_not_fit_one_block() -> None:
    root = store(two_policies())
    with pytest.raises(SchemaError, match="name one policy="):
        reader_of(root)
    found = columns_of(root, columns=["t"])
    assert set(found) == {"t", POLICY_ID}
    assert found["t"].tolist() == [0, 0, 1, 1, 2]
    with pytest.raises(OptionError, match="joint steps"):
        reader_of(root, columns=["t"], filter="t > 0")


def test_a_column_says_whose_rows_they_are() -> None:
    root = data_set()
    found = columns_of(root, writers=True, columns=["t"])
    assert found["_writer"].tolist() == ["w0"] * 40 + ["w1"] * 40 + ["w2"] * 40
    copy = store(batch_of(tables_of(root, writers=True)))
    assert load(copy)["_writer"].tolist() == found["_writer"].tolist()
    with pytest.raises(OptionError, match="already"):
        reader_of(copy, writers=True)


@pytest.mark.parametrize(("missing", "columns"), [("fill", {"t", "obs", "extra"}), ("drop", {"t", "obs"})])
def test_columns_that_some_writers_lack_are_the_same_in_all_parts(missing: str, columns: set[str]) -> None:
    root = store(numbered(3), writer_id="w0")
    store(numbered(3, first=3, extra=np.ones(3)), root=root, writer_id="w1")
    with pytest.raises(SchemaConflict):
        reader_of(root)
    tables = tables_of(root, missing=missing, tasks=2)
    assert [set(table.column_names) for table in tables] == [columns] * 2
    assert tables[0].schema.equals(tables[1].schema, check_metadata=True)


def test_a_missing_final_observation_is_told_in_all_parts() -> None:
    valid = numbered(
        3, first=3, new_obs=np.zeros((3, 3), np.float32), new_obs_valid=np.array([True, True, False])
    )
    root = store(numbered(3, new_obs=np.zeros((3, 3), np.float32)), writer_id="w0")
    store(valid, root=root, writer_id="w1")
    assert columns_of(root, tasks=2)["new_obs_valid"].tolist() == [True] * 5 + [False]


def test_a_snapshot_is_read_and_row_groups_are_cut() -> None:
    root = store(numbered(10), writer_id="w0")
    store(numbered(5, first=10), root=root, writer_id="w1")
    assert columns_of(root, at={"w0": 7})["t"].tolist() == list(range(7))


def test_blocks_are_small_where_rows_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.dataset.part_reader._TABLE_BYTES", 4 * 2 * 6 * 6 * 4)
    tables = tables_of(store(frames()))
    assert max(table.num_rows for table in tables) <= 4
    assert_identical(batch_of(tables), load(store(frames())))


def test_without_rows_there_are_columns() -> None:
    root = store(numbered(3))
    (table,) = tables_of(root, filter="t > 5")
    assert table.num_rows == 0
    (other,) = tables_of(root)
    assert table.schema.equals(other.schema, check_metadata=True)


def test_a_column_that_is_chosen_is_one_that_blocks_have() -> None:
    (reader,) = reader_of(store(numbered(3)))
    assert reader.plan.only(["t"]).layout.names == ["t"]
    assert reader.plan.only([]).layout.names == ["t"]  # For what only counts rows.
    with pytest.raises(MissingColumn, match=r"only t, obs .*column nope"):
        reader.plan.only(["t", "nope"])


@pytest.mark.parametrize("names", [["obs"], ["policy_id"], ["t", "policy_id"]])
def test_of_joint_steps_no_other_column_comes_than_those_that_are_chosen(names: list[str]) -> None:
    (reader,) = reader_of(store(alike()))
    (whole,), (found,) = reader.tables(), replace(reader, plan=reader.plan.only(names)).tables()
    assert sorted(found.column_names) == sorted(names)
    assert found.equals(whole.select(found.column_names))


def test_a_filter_is_for_whatever_columns_will_come(tmp_path: Path) -> None:
    """A data set that nobody has written to yet has no columns, and no rows to choose among."""
    put_header(Storage.open(tmp_path))
    assert reader_of(tmp_path, filter="t > 5") == []


# ---- attempts at writing a part ----


PART = part_id("job", 0)


def write_part(storage: Storage, *batches: Any, **options: Any) -> PartWriter:
    writer = PartWriter(storage, PART, PartOptions(**options))
    for batch in batches:
        writer.write(batch)
    return writer


def test_options_that_an_open_data_set_has_already_are_refused() -> None:
    data = rlio.open_dataset(store(numbered(4)))
    for options in ({"storage_options": {}}, {"limits": rlio.Limits(group_rows=100)}):
        for opened in (rlio.distributed.read_dataset, rlio.DatasetReader, rlio.ReplayStore.open):
            with pytest.raises(OptionError):
                opened(data, **options)


def test_a_part_is_seen_whole_once_it_is_finished(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    writer = write_part(storage, numbered(5), numbered(5, first=5), roll=rlio.Roll(max_rows=3))
    assert len(rlio.open_dataset(tmp_path)) == 0
    sealed = writer.finish()
    assert sealed.rows == 10
    assert part_of(str(sealed.writer)) == PART
    assert load(str(tmp_path))["t"].tolist() == list(range(10))
    assert rlio.verify(tmp_path).ok


def test_a_part_that_is_sealed_is_not_written_again(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    sealed = write_part(storage, numbered(5)).finish()
    again = write_part(storage)
    assert again.taken == sealed
    with pytest.raises(OptionError, match="is sealed"):
        again.write(numbered(5))
    assert again.finish() == sealed


def test_an_attempt_after_one_that_was_killed_is_a_later_one(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    killed = write_part(storage, numbered(5), roll=rlio.Roll(max_rows=2))
    killed._encoder.store()  # type: ignore[union-attr]
    later = write_part(storage, numbered(5, first=50))
    sealed = later.finish()
    assert str(killed.writer_id) < str(sealed.writer)
    assert load(str(tmp_path))["t"].tolist() == list(range(50, 55))


@pytest.mark.parametrize("name", [f"{PART}~copy", f"{PART}~", f"{PART}~9999-00000000 copy"])
def test_other_folders_that_are_named_like_attempts_do_not_matter(name: str, tmp_path: Path) -> None:
    (tmp_path / "data" / name).mkdir(parents=True)
    sealed = write_part(Storage.open(tmp_path), numbered(5)).finish()
    assert str(sealed.writer).startswith(f"{PART}~0000-")
    assert write_part(Storage.open(tmp_path)).taken == sealed
    assert len(rlio.open_dataset(tmp_path)) == 5


def test_an_attempt_that_was_overtaken_is_dropped_with_all_it_stored(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    slow = write_part(storage, numbered(5), roll=rlio.Roll(max_rows=2))
    sealed = write_part(storage, numbered(5, first=50)).finish()
    assert slow.finish() == sealed
    assert storage.list(writer_dir(str(slow.writer_id))) == []
    assert load(str(tmp_path))["t"].tolist() == list(range(50, 55))
    assert list_shards(storage).passed_over == {}


def test_two_seals_in_one_moment_are_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage.open(tmp_path)
    one, other = write_part(storage, numbered(5)), write_part(storage, numbered(5))
    monkeypatch.setattr("rlio.distributed.ray_data.part_writer.sealed_attempt", lambda *_: (None, 1))
    sealed = {one.finish().writer, other.finish().writer}
    assert len(sealed) == 2
    assert rlio.open_dataset(tmp_path).snapshot() == {min(map(str, sealed)): 5}
    assert load(str(tmp_path))["t"].tolist() == list(range(5))


def test_an_attempt_whose_shards_were_collected_does_not_seal_itself(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    writer = write_part(storage, numbered(5), roll=rlio.Roll(max_rows=2))
    writer._encoder.store()  # type: ignore[union-attr]
    rlio.maintenance.gc(tmp_path, grace=0)
    with pytest.raises(rlio.errors.PublishError, match="are gone"):
        writer.finish()
    assert list_shards(storage).sealed == {}


def test_an_attempt_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    writer = write_part(storage, numbered(5), roll=rlio.Roll(max_rows=2))
    writer.abandon()
    writer.abandon()
    assert storage.list("data") == []


def test_an_attempt_that_may_be_sealed_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seal is stored, and the store's answer is lost."""
    writer = write_part(Storage.open(tmp_path), numbered(5))

    def lost(storage: Storage, writer_id: str, rows: int) -> None:
        seal(storage, writer_id, rows)
        raise PublishError("no answer")

    monkeypatch.setattr("rlio.log.publisher.seal", lost)
    with pytest.raises(PublishError):
        writer.finish()
    writer.abandon()
    assert load(str(tmp_path))["t"].tolist() == list(range(5))


def test_a_part_without_rows_is_nothing(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    writer = write_part(storage, numbered(0))
    assert writer.finish() == (None, 0)
    assert storage.list() == []


def test_rows_that_do_not_fit_the_data_set_are_refused(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    store(numbered(3), root=str(tmp_path), spool=None)
    with pytest.raises(SchemaConflict):
        write_part(storage, rlio.SampleBatch(t=np.zeros(3, np.float32), obs=np.zeros((3, 3), np.float32)))


# ---- digests ----


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=4))
def test_a_digest_does_not_depend_on_how_rows_are_cut(cuts: list[int]) -> None:
    whole, parts = RowDigest(), RowDigest()
    batch = cartpole_like()
    whole.add(batch)
    bounds = [0, *sorted(cuts), 60]
    for a, b in pairwise(bounds):
        parts.add(batch[a:b])
    assert parts.unlike(whole) == []


@pytest.mark.parametrize("column", ["obs", "infos", "language", "t", "rewards"])
def test_a_digest_tells_which_column_differs(column: str) -> None:
    one, other = RowDigest(), RowDigest()
    one.add(cartpole_like())
    changed = cartpole_like()
    values = changed[column].copy()
    values[[0, 2]] = values[[2, 0]] if column != "rewards" else 9
    changed[column] = values
    other.add(changed)
    assert one.unlike(other) == [column]


def test_dtypes_and_numbers_of_rows_count() -> None:
    one, other, third = RowDigest(), RowDigest(), RowDigest()
    one.add(rlio.SampleBatch(t=np.zeros(2, np.int64)))
    other.add(rlio.SampleBatch(t=np.zeros(2, np.float64)))
    third.add(rlio.SampleBatch(t=np.zeros(4, np.int32)))
    assert one.unlike(other) == one.unlike(third) == ["t"]


def test_row_groups_become_blocks_of_one_kind() -> None:
    with group_bytes(256):
        root = store(numbered(100))
    tables = tables_of(root)
    assert len(tables) > 3
    assert len({str(table.schema) for table in tables}) == 1
    assert to_table(load(root), reader_of(root)[0].plan.layout).num_rows == 100


@pytest.mark.parametrize("name", ["read_dataset", "write_dataset"])
def test_without_ray_the_pip_line_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(rlio.distributed, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(rlio.errors.MissingExtra, match=r"pip install 'rlio\[ray\]'"):
        function(*["memory://nowhere"] * (1 if name == "read_dataset" else 2))
