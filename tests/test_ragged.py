"""Columns whose rows differ in length: lists in shards, stores and logs, and `rlio.Ragged` of a batch."""

from __future__ import annotations

import io
import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import assert_identical, files, fresh_root, group_bytes, load, same_objects, store

import rlio
from rlio import MultiAgentBatch, Ragged, SampleBatch
from rlio.batch.arrays import object_column
from rlio.errors import CorruptData, OptionError, RlioError, SchemaConflict, SchemaError
from rlio.replay import texts
from rlio.replay.memory import RamArrays
from rlio.replay.texts import TextHeap
from rlio.schemas.arrow import from_arrow
from rlio.schemas.column import ColumnSpec
from rlio.schemas.log_frames import LogFrames
from rlio.schemas.row_groups import pieces_of
from rlio.schemas.schema import Schema

TOKENS = ColumnSpec("|O", (), "ragged", items=ColumnSpec("<i4", (), "scalar"))


def lists(*rows: list[Any], dtype: str = "<i4") -> np.ndarray:
    return object_column(np.array(row, dtype) for row in rows)


def prompts(rows: int, first: int = 0, **more: Any) -> SampleBatch:
    """Rows whose row ``n`` has ``n % 5`` tokens ``n``."""
    t = np.arange(first, first + rows)
    tokens = object_column(np.full(n % 5, n, np.int32) for n in t)
    return SampleBatch({"t": t, "tokens": tokens, "rewards": t.astype(np.float32), **more})


def trajectories(
    rng: np.random.Generator, lengths: list[int], *, item: tuple[int, ...] = (2,)
) -> SampleBatch:
    """Episodes whose observations are sets of objects; each is the next one's predecessor."""
    sets = [
        object_column(rng.normal(size=(rng.integers(0, 4), *item)) for _ in range(n + 1)) for n in lengths
    ]
    return SampleBatch(
        obs=np.concatenate([each[:-1] for each in sets]),
        new_obs=np.concatenate([each[1:] for each in sets]),
        eps_id=np.repeat(np.arange(len(lengths)), lengths),
        t=np.concatenate([np.arange(n) for n in lengths]),
    )


def read(*batches: SampleBatch) -> SampleBatch:
    """What the reader of stored rows gives as one batch."""
    root = store(*batches)
    with rlio.DatasetReader(root, epochs=1, batch_size=1000) as reader:
        batch = reader.sample()
    assert isinstance(batch, SampleBatch)
    return batch


def stored(root: str) -> pa.Table:
    (data,) = (data for path, data in files(root).items() if path.endswith(".parquet"))
    return pq.read_table(io.BytesIO(data))


class TestRagged:
    def test_rows_that_were_read_are_views_of_one_array(self) -> None:
        batch = read(prompts(20))
        found = Ragged.of(batch["tokens"])
        assert found.values.tolist() == [n for n in range(20) for _ in range(n % 5)]
        assert found.lengths.tolist() == [n % 5 for n in range(20)]
        assert all(np.shares_memory(row, found.values) for row in batch["tokens"] if len(row))
        part = Ragged.of(batch[5:9]["tokens"])
        assert np.shares_memory(part.values, found.values)
        assert part.values.tolist() == [6, 7, 7, 8, 8, 8]
        assert part.offsets.tolist() == [0, 0, 1, 3, 6]

    @pytest.mark.parametrize(
        "change",
        [
            lambda column: column.__setitem__(1, np.array([7, 7], np.int32)),
            lambda column: np.copyto(column[2:3], object_column([np.array([7, 7], np.int32)])),
            lambda column: column.__setitem__(slice(0, 2), column[1::-1].copy()),
        ],
        ids=["item", "copyto", "swapped"],
    )
    def test_a_row_that_was_replaced_is_that_of_the_column(self, change: Any) -> None:
        column = read(prompts(6))["tokens"]
        change(column)
        assert [row.tolist() for row in Ragged.of(column)] == [row.tolist() for row in column]

    def test_a_row_at_the_address_of_a_replaced_one_is_that_of_the_column(self) -> None:
        for _ in range(100):
            column = Ragged(np.arange(6), np.array([0, 3, 4, 6])).rows()
            column[0] = None  # The next array takes its place.
            column[0] = np.array([9, 9])
            assert Ragged.of(column)[0].tolist() == [9, 9]

    def test_values_that_change_in_place_change_in_both(self) -> None:
        column = read(prompts(6))["tokens"]
        column[3][:] = 90
        assert Ragged.of(column)[3].tolist() == [90, 90, 90]
        Ragged.of(column).values[0] = 17
        assert column[1].tolist() == [17]

    def test_their_bytes_count_in_the_size_of_a_batch(self) -> None:
        batch = read(SampleBatch(tokens=object_column([np.zeros(100_000, np.int32)] * 3)))
        assert not batch["tokens"][0].flags.owndata
        assert batch.size_bytes() >= 3 * 400_000

    def test_rows_in_another_order_are_copied(self) -> None:
        column = read(prompts(6))["tokens"]
        for rows in (column[::-1], column[::2], column[[4, 1, 1]], column.copy()):
            assert [row.tolist() for row in Ragged.of(rows)] == [row.tolist() for row in rows]

    def test_padded_rows_have_a_mask(self) -> None:
        values, mask = Ragged.of(lists([1, 2, 3], [], [4])).to_padded(fill=-1)
        assert values.tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]
        assert mask.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
        values, mask = Ragged.of(object_column([np.ones((1, 2)), np.ones((2, 2))])).to_padded(length=4)
        assert values.shape == (2, 4, 2)
        assert mask.sum(axis=1).tolist() == [1, 2]

    def test_padded_rows_become_rows_of_their_items(self) -> None:
        rows = Ragged.of(object_column([np.ones((n, 2), np.float32) * n for n in (3, 0, 1)]))
        found = Ragged.from_padded(*rows.to_padded(length=5, fill=9))
        assert [row.tolist() for row in found] == [row.tolist() for row in rows]
        assert (found.values.dtype, found.offsets.tolist()) == (rows.values.dtype, [0, 3, 3, 4])
        left = np.array([[0, 0, 7], [1, 2, 3]])
        found = Ragged.from_padded(left, np.array([[False, False, True], [True, True, True]]))
        assert [row.tolist() for row in found] == [[7], [1, 2, 3]]

    @pytest.mark.parametrize(
        "mask", [np.ones((3, 2), bool), np.ones(2, bool), np.ones((2, 3, 1), bool), np.ones((2, 3), int)]
    )
    def test_a_mask_that_does_not_fit_padded_rows_is_refused(self, mask: np.ndarray) -> None:
        with pytest.raises(SchemaError, match=r"expected shapes \(rows, length"):
            Ragged.from_padded(np.zeros((2, 3)), mask)

    def test_a_batch_takes_ragged_rows_as_a_column(self) -> None:
        rows = Ragged(np.arange(3, dtype=np.int32), np.array([0, 2, 3]))
        batch = SampleBatch(tokens=rows, rewards=[0.0, 1.0])
        assert [row.tolist() for row in batch["tokens"]] == [[0, 1], [2]]
        assert np.shares_memory(Ragged.of(batch["tokens"]).values, rows.values)
        batch["more"] = rows
        assert_identical(load(store(batch)), batch)

    @pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["arrays", "tensors"])
    def test_a_list_of_rows_of_different_lengths_says_what_to_pass(self, make: Any) -> None:
        with pytest.raises(SchemaError, match=r"object_column\(rows\) or rlio\.Ragged"):
            SampleBatch(tokens=[make([1, 2]), make([3])])

    def test_a_row_longer_than_the_length_is_refused_and_not_cut(self) -> None:
        with pytest.raises(OptionError, match=r"length=2: row 0 has 3 items"):
            Ragged.of(lists([1, 2, 3], [4])).to_padded(length=2)

    @pytest.mark.parametrize("fill", [1.5, np.nan, 1e30, 2**40, "x", None])
    def test_a_fill_that_the_items_do_not_hold_is_refused(self, fill: Any) -> None:
        with pytest.raises(OptionError, match=r"fill=.*: items of int32 do not hold it"):
            Ragged.of(lists([1], [])).to_padded(fill=fill)

    @pytest.mark.parametrize("fill", [1e300, "1.5", None, True])
    def test_a_fill_that_floats_do_not_hold_is_refused(self, fill: Any) -> None:
        with pytest.raises(OptionError, match=r"fill=.*: items of float32 do not hold it"):
            Ragged(np.ones(1, np.float32), np.array([0, 1, 1])).to_padded(fill=fill)

    def test_a_fill_that_the_items_hold_is_behind_them(self) -> None:
        assert Ragged.of(lists([1], [])).to_padded(fill=-100)[0].tolist() == [[1], [-100]]
        floats = Ragged(np.ones(1, np.float32), np.array([0, 1, 1]))
        assert np.isnan(floats.to_padded(fill=np.nan)[0][1, 0])

    def test_rows_become_a_nested_tensor_over_the_same_memory(self) -> None:
        found = Ragged.of(read(prompts(7))["tokens"])
        tensor = found.to_torch()
        assert [row.tolist() for row in tensor.unbind()] == [row.tolist() for row in found]
        assert tensor.layout == torch.jagged
        found.values[0] = 55
        assert tensor.unbind()[1].tolist() == [55]

    @pytest.mark.parametrize(
        ("column", "what"),
        [
            (object_column([np.zeros(2), [1.0]]), "float64 of shape .2,., list"),
            (object_column([np.zeros(2), np.zeros(2, int)]), "float64 of shape"),
            (object_column([np.zeros((2, 1)), np.zeros((2, 2))]), "shape"),
            (object_column([np.array(1.0), np.array(2.0)]), r"of shape \(\)"),
            (object_column([]), "no rows"),
            (np.zeros((2, 3)), "expected an object array"),
        ],
        ids=["lists", "dtypes", "shapes", "scalars", "none", "dense"],
    )
    def test_other_columns_are_refused(self, column: np.ndarray, what: str) -> None:
        with pytest.raises(SchemaError, match=what):
            Ragged.of(column)

    def test_offsets_that_do_not_fit_are_refused(self) -> None:
        for offsets in ([], [0, 2], [1, 3], [0, 2, 1, 3]):
            with pytest.raises(SchemaError, match="offsets"):
                Ragged(np.arange(3), np.array(offsets, np.int64))

    @pytest.mark.parametrize("offsets", [[0, 1.5, 3], [[0, 3]], None, ["0", "3"]])
    def test_offsets_that_are_no_whole_numbers_are_refused(self, offsets: Any) -> None:
        with pytest.raises(SchemaError, match="expected whole numbers, as an array of shape"):
            Ragged(np.arange(3), offsets)

    @pytest.mark.parametrize("values", [[1, 2, 3], np.array(3)])
    def test_values_that_are_no_array_of_items_are_refused(self, values: Any) -> None:
        with pytest.raises(SchemaError, match="expected an array of shape"):
            Ragged(values, np.array([0, 3]))

    @pytest.mark.parametrize("column", [[np.arange(2)], None, np.array(3, object)])
    def test_ragged_refuses_a_value_that_is_no_column_by_name(self, column: Any) -> None:
        with pytest.raises(SchemaError, match="expected an object array"):
            Ragged.of(column)

    def test_columns_that_are_gone_are_forgotten(self) -> None:
        from rlio.batch import ragged

        column = Ragged.of(lists([1], [2])).rows()
        before = len(ragged._KNOWN)
        del column
        assert len(ragged._KNOWN) == before - 1

    def test_padding_is_on_either_side(self) -> None:
        ragged = Ragged.of(object_column([np.array([1, 2, 3]), np.array([4]), np.array([], int)]))
        values, mask = ragged.to_padded(side="left", fill=9)
        assert values.tolist() == [[1, 2, 3], [9, 9, 4], [9, 9, 9]]
        assert mask.tolist() == [[True] * 3, [False, False, True], [False] * 3]
        assert mask.flags.c_contiguous
        again = rlio.Ragged.from_padded(values, mask)
        assert [row.tolist() for row in again] == [[1, 2, 3], [4], []]
        right, _ = ragged.to_padded(side="right", fill=9)
        assert right.tolist() == ragged.to_padded(fill=9)[0].tolist()
        longer, _ = ragged.to_padded(side="left", length=4)
        assert longer[0].tolist() == [0, 1, 2, 3]
        with pytest.raises(OptionError, match="side='both'"):
            ragged.to_padded(side="both")  # type: ignore[arg-type]

    def test_a_slice_is_rows_without_a_copy(self) -> None:
        ragged = rlio.Ragged.of(object_column([np.arange(n) for n in (3, 1, 0, 2)]))
        for start in range(-5, 6):
            for stop in (*range(-5, 6), None):
                found = ragged[start:stop]
                assert [row.tolist() for row in found] == [row.tolist() for row in [*ragged][start:stop]], (
                    start,
                    stop,
                )
        assert np.shares_memory(ragged[1:].values, ragged.values)
        assert ragged[-1].tolist() == [0, 1]

    @pytest.mark.parametrize("key", [np.array([1]), "a", 1.0, True, None, (0, 1), slice(None, None, 2), [0]])
    def test_other_keys_are_refused_with_a_way_out(self, key: Any) -> None:
        ragged = rlio.Ragged.of(object_column([np.arange(n) for n in (3, 1)]))
        with pytest.raises(OptionError, match="expected the number of a row, or a slice"):
            ragged[key]

    @pytest.mark.parametrize("row", [2, -3, 99])
    def test_a_row_that_there_is_not_is_named(self, row: int) -> None:
        with pytest.raises(IndexError, match=rf"no row {row} in a Ragged of 2 rows"):
            rlio.Ragged.of(object_column([np.arange(n) for n in (3, 1)]))[row]


class TestShards:
    def test_lists_are_lists_of_arrow(self) -> None:
        more = {
            "boxes": object_column(np.zeros((n % 3, 4), np.float32) for n in range(6)),
            "crops": object_column(np.zeros((n % 3, 8, 8), np.uint8) for n in range(6)),
        }
        table = stored(store(prompts(6, **more)))
        types = {name: table.schema.field(name).type for name in ("tokens", *more)}
        assert types["tokens"].value_type == pa.int32()
        assert types["boxes"].value_type.value_type == pa.float32()
        assert types["crops"].value_type == pa.binary(64)
        assert table["tokens"].to_pylist() == [[n] * (n % 5) for n in range(6)]

    @settings(max_examples=10, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
        limit=st.sampled_from([1, 300, 1 << 23]),
        item=st.sampled_from([(), (2,), (2, 2)]),
        cut=st.integers(0, 48),
        seed=st.integers(0, 2**31),
    )
    def test_observations_are_stored_once_and_come_back(
        self, lengths: list[int], limit: int, item: tuple[int, ...], cut: int, seed: int
    ) -> None:
        batch = trajectories(np.random.default_rng(seed), lengths, item=item)
        with group_bytes(limit):
            root = store(*(part for part in (batch[:cut], batch[cut:]) if len(part)))
        assert_identical(load(root, batch_size=5), batch)
        assert_identical(load(root, columns=["new_obs"]), SampleBatch(new_obs=batch["new_obs"]))

    def test_each_observation_is_stored_once(self) -> None:
        root = store(trajectories(np.random.default_rng(0), [10, 20]))
        assert stored(root)["_new_obs"].null_count == 28

    def test_observations_of_policies_that_are_changed_in_place_change_no_others(self) -> None:
        obs = object_column(np.full(1 + t % 2, t, np.int32) for t in range(7))
        rows = SampleBatch(obs=obs[:-1], new_obs=obs[1:], eps_id=np.zeros(6, int), t=np.arange(6))
        root = store(rlio.MultiAgentBatch({"a": rows, "b": rows}, 6))
        with rlio.DatasetReader(root, epochs=1, batch_size=4) as reader:
            for batch in reader:
                for part in batch.values():
                    for row, t in zip(part["obs"], part["t"], strict=True):
                        assert row[0] == t
                        row += 100
                    assert [row[0] for row in part["new_obs"]] == [t + 1 for t in part["t"]]

    def test_a_missing_final_observation_has_no_items(self) -> None:
        batch = trajectories(np.random.default_rng(0), [3, 4])
        batch["new_obs_valid"] = np.arange(7) != 2
        batch["new_obs"][2] = None
        found = load(store(batch, batch[:0]))
        assert found["new_obs"][2].shape == (0, 2)
        assert not found["new_obs_valid"][2]
        kept = np.arange(7) != 2
        assert same_objects(list(found["new_obs"][kept]), list(batch["new_obs"][kept]))

    def test_policies_may_have_their_own(self) -> None:
        ids = np.zeros(4, np.int64)
        other = SampleBatch(t=np.arange(4), x=np.zeros((4, 2)), eps_id=ids)
        both = MultiAgentBatch({"a": prompts(4, eps_id=ids), "b": other}, 4)
        assert_identical(load(store(both)), both)

    def test_a_write_copies_the_rows_of_its_caller(self, tmp_path: Path) -> None:
        batch = prompts(6)
        with rlio.ParquetWriter(str(tmp_path), spool=None) as writer:
            writer.write(batch)
            batch["tokens"][4][:] = 99
        assert load(str(tmp_path))["tokens"][4].tolist() == [4] * 4

    def test_rows_of_one_length_are_rows_like_others(self) -> None:
        found = load(store(prompts(3), prompts(2, 3, tokens=np.array([[1, 2], [3, 4]], np.int32))))
        assert [row.tolist() for row in found["tokens"]] == [[], [1], [2, 2], [1, 2], [3, 4]]

    @pytest.mark.parametrize(
        ("row", "what"),
        [
            ([1, 2], "list in row 1, but the column has arrays, <i4 of shape"),
            (None, "NoneType in row 1"),
            (np.zeros(2), "<f8 of shape .2,. in row 1"),
            (np.zeros((2, 2), np.int32), r"<i4 of shape \(2, 2\) in row 1"),
            (np.int32(4), "int32 in row 1"),
        ],
        ids=["list", "none", "dtype", "axes", "scalar"],
    )
    def test_a_row_of_another_kind_is_refused_by_its_number(self, row: Any, what: str) -> None:
        tokens = object_column([np.zeros(2, np.int32), row, np.zeros(1, np.int32)])
        root = fresh_root()
        with rlio.ParquetWriter(root, spool=None) as writer:
            writer.write(prompts(3))
            with pytest.raises(SchemaConflict, match=what):
                writer.write(prompts(3, 3, tokens=tokens))
            writer.write(prompts(3, 3))
        assert len(load(root)) == 6

    def test_a_column_whose_first_rows_had_one_length_says_why_it_takes_no_others(self) -> None:
        with rlio.ParquetWriter(fresh_root(), spool=None) as writer:
            writer.write(SampleBatch(tokens=[np.arange(2), np.arange(2)]))
            with pytest.raises(SchemaConflict, match=r"first batch of a writer decides.*object_column"):
                writer.write(SampleBatch(tokens=object_column([np.arange(2), np.arange(3)])))

    def test_writers_of_other_kinds_share_a_root(self) -> None:
        """As those of earlier versions, which stored arrays as JSON."""
        others = [
            object_column([np.zeros(2), [1, 2], {"a": 1}]),
            object_column([np.zeros((1, 2), np.float32)] * 3),
        ]
        for other in others:
            root = store(prompts(3))
            store(prompts(3, tokens=other), root=root)
            with rlio.DatasetReader(root, epochs=1, batch_size=6, cache="none") as reader:
                rows = list(reader.sample()["tokens"])
            expected = [*prompts(3)["tokens"], *other]
            for row in expected:
                assert any(same_objects(row, each) for each in rows)
            with rlio.ReplayStore.open(root) as stock:
                drawn = stock.uniform(batch_size=64, seed=0).sample()["tokens"]
            for row in expected:
                assert any(same_objects(row, each) for each in drawn)

    def test_columns_that_a_shard_lacks_are_filled_with_empty_rows(self) -> None:
        root = store(prompts(3))
        store(SampleBatch(t=np.arange(2), rewards=np.zeros(2, np.float32)), root=root)
        found = load(root, missing="fill", batch_size=5)
        assert sorted(map(len, found["tokens"])) == [0, 0, 0, 1, 2]
        assert {row.dtype.str for row in found["tokens"]} == {"<i4"}

    def test_compaction_keeps_them(self, tmp_path: Path) -> None:
        parts = [prompts(5, 5 * number) for number in range(4)]
        root = store(*parts, root=str(tmp_path), roll=rlio.Roll(max_rows=5, max_seconds=None))
        before = load(root)
        assert rlio.maintenance.compact(root, min_shards=2).shards_after == 1
        assert_identical(load(root), before)

    def test_lists_with_nulls_or_of_another_shape_are_damage(self) -> None:
        boxes = ColumnSpec("|O", (), "ragged", items=ColumnSpec("<f4", (2,), "list"))
        for array, spec in (
            (pa.array([[1, None]], pa.list_(pa.int32())), TOKENS),
            (pa.array([[[1.0, 2.0], [1.0]]], pa.list_(pa.list_(pa.float32()))), boxes),
        ):
            with pytest.raises(CorruptData):
                from_arrow(array, spec)

    def test_lists_whose_offsets_lie_are_damage(self) -> None:
        items = pa.array([1, 2, 3], pa.int32())
        for offsets in ([0, 2, 1], [0, 3, 2], [0, 2, 7], [-1, 1, 2], [0, 1, -(2**31)]):
            buffers = [None, pa.py_buffer(np.array(offsets, np.int32))]
            with pytest.raises((CorruptData, pa.ArrowInvalid)):
                from_arrow(
                    pa.ListArray.from_buffers(pa.list_(pa.int32()), 2, buffers, children=[items]), TOKENS
                )

    def test_rows_of_a_store_that_are_not_made_of_items_are_damage(self) -> None:
        heap = TextHeap(TOKENS, arrays=RamArrays(), name="x", capacity=4, ring=False)
        heap.append(np.arange(2), Ragged(np.zeros(10, np.uint8), np.array([0, 4, 10])))
        with pytest.raises(CorruptData, match="items of 4 bytes"):
            heap.gather(np.arange(2))


class TestOtherForms:
    @pytest.mark.parametrize("compress", [[], ["tokens", "boxes"]], ids=["plain", "compressed"])
    def test_json_shards_hold_lists(self, tmp_path: Path, compress: list[str]) -> None:
        boxes = object_column(
            np.array([[0.1, -0.0], [np.nan, np.inf]], np.float32)[: n % 3] for n in range(8)
        )
        batch = prompts(8, boxes=boxes)
        with rlio.JsonWriter(str(tmp_path), spool=None, compress_columns=compress) as writer:
            writer.write(batch)
        assert_identical(load(str(tmp_path)), batch)

    @pytest.mark.parametrize(
        "text", ["[[1,2],3]", "[[1],[[2]]]", '[[1],["2"]]', "[[1],[1.5]]", "[[1],[3000000000]]", "[[1]]", "7"]
    )
    def test_json_that_is_no_such_column_is_refused(self, text: str) -> None:
        from rlio.schemas.json_columns import load_column, parse_json

        with pytest.raises((ValueError, RlioError)):
            load_column(parse_json(text.encode()), TOKENS, rows=2)

    def test_the_log_keeps_them(self, tmp_path: Path) -> None:
        root, spool = str(tmp_path / "data"), str(tmp_path / "spool")
        batch = prompts(8, boxes=object_column(np.zeros((n % 3, 4), np.float32) for n in range(8)))
        writer = rlio.ParquetWriter(root, spool=spool)
        writer.write(batch)
        frames = LogFrames(Schema.of(batch))
        pieces = pieces_of(batch, frames.schema, rooms=iter([100]), limit=100)[0]
        again = frames.decode(b"".join(frames.encode(pieces)))[0]
        assert same_objects(list(again.arrays["boxes"]), list(batch["boxes"]))
        writer.close()
        assert_identical(load(root), batch)

    def test_offsets_that_lie_in_a_log_are_damage(self) -> None:
        batch = SampleBatch(tokens=lists([1, 2, 3], [4], [5, 6]))
        frames = LogFrames(Schema.of(batch))
        payload = b"".join(frames.encode(pieces_of(batch, frames.schema, rooms=iter([9]), limit=9)[0]))
        ends = np.array([0, 3, 4, 6], "<i4").tobytes()
        assert payload.count(ends) == 1
        for forged in ([0, 3, 4, 60], [0, 4, 3, 6], [0, 3, -4, 6]):
            with pytest.raises(CorruptData):
                frames.decode(payload.replace(ends, np.array(forged, "<i4").tobytes()))

    @pytest.mark.few(2)
    @pytest.mark.parametrize("cache", ["memory", "disk", "none"])
    def test_rows_are_drawn_from_every_store(self, cache: Any, tmp_path: Path) -> None:
        root = str(tmp_path)
        store(
            prompts(200, boxes=object_column(np.full((n % 3, 2), n, np.uint8) for n in range(200))), root=root
        )
        with rlio.DatasetReader(root, cache=cache, shuffle=True, seed=0, epochs=1, batch_size=32) as reader:
            seen = []
            for batch in reader:
                for t, tokens, boxes in zip(batch["t"], batch["tokens"], batch["boxes"], strict=True):
                    seen.append(int(t))
                    assert same_objects(tokens, np.full(t % 5, t, np.int32))
                    assert same_objects(boxes, np.full((t % 3, 2), t, np.uint8))
                assert Ragged.of(batch["tokens"]).lengths.tolist() == [t % 5 for t in batch["t"]]
        assert sorted(seen) == list(range(200))

    @pytest.mark.parametrize("chunk", [1, 7, 64])
    def test_a_store_holds_them_in_chunks_of_any_size(self, chunk: int, monkeypatch: Any) -> None:
        monkeypatch.setattr(texts, "_CHUNK", chunk)
        batch = prompts(60, notes=object_column("n" * (n % 4) for n in range(60)))
        with rlio.ReplayStore.open(store(batch)) as stock:
            assert_identical(stock.epochs(batch_size=60, shuffle=False, epochs=1).sample(), batch)
            drawn = stock.uniform(batch_size=200, seed=0).sample()
        for t, row, note in zip(drawn["t"], drawn["tokens"], drawn["notes"], strict=True):
            assert same_objects(row, np.full(t % 5, t, np.int32))
            assert note == "n" * (t % 4)

    @pytest.mark.few(1)
    @pytest.mark.parametrize("cache", ["none", "memory"])
    def test_reading_them_calls_no_function_for_a_row(self, cache: Any) -> None:
        counts = []
        for rows in (500, 10_000):
            ends = np.arange(rows + 1)
            column = Ragged(np.arange(rows, dtype=np.int32), ends)
            root = store(SampleBatch(tokens=column, logps=Ragged(np.ones(rows, np.float32), ends)))
            calls = itertools.count()
            threading.setprofile(count := lambda *_, calls=calls: next(calls) and None)
            sys.setprofile(count)
            try:
                with rlio.DatasetReader(root, epochs=1, batch_size=rows, cache=cache) as reader:
                    found = Ragged.of(reader.sample()["tokens"])
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
            assert found.values.tolist() == list(range(rows))
            counts.append(next(calls))
        assert counts[1] - counts[0] < 1000

    def test_rows_that_fill_up_sequences_have_no_items(self) -> None:
        ids = {"eps_id": np.repeat([0, 1], [2, 4]), "notes": object_column(list("abcdef"))}
        with rlio.ReplayStore.open(store(prompts(6, **ids))) as stock:
            batch = stock.epochs(batch_size=2, shuffle=False, epochs=1, draw=rlio.Sequences(4)).sample()
        assert Ragged.of(batch["tokens"]).lengths.tolist() == [0, 1, 0, 0, 2, 3, 4, 0]
        assert batch["notes"].tolist() == ["a", "b", "", "", "c", "d", "e", "f"]

    def test_a_live_ring_overwrites_them(self) -> None:
        with rlio.ReplayStore(capacity=50) as ring:
            for first in range(0, 300, 10):
                ring.append(prompts(10, first))
            batch = ring.uniform(batch_size=200, seed=0).sample()
        assert set(batch["t"].tolist()) <= set(range(250, 300))
        assert all(
            same_objects(row, np.full(t % 5, t, np.int32))
            for t, row in zip(batch["t"], batch["tokens"], strict=True)
        )

    def test_tables_have_lists(self) -> None:
        boxes = object_column(np.full((n % 3, 2), n, np.float32) for n in range(6))
        table = rlio.open_dataset(store(prompts(6, boxes=boxes))).to_arrow()
        assert table["tokens"].to_pylist() == [[n] * (n % 5) for n in range(6)]
        assert table["boxes"].to_pylist() == [[[n, n]] * (n % 3) for n in range(6)]

    def test_blocks_of_ray_give_the_rows_back(self) -> None:
        from rlio.distributed.ray_data.blocks import block_arrays

        boxes = object_column(np.full((n % 3, 2), n, np.float32) for n in range(6))
        batch = prompts(6, boxes=boxes)
        table = rlio.open_dataset(store(batch)).to_arrow()
        arrays, _, _ = block_arrays(pa.concat_tables([table[:2], table[2:]]), None)
        for name in ("tokens", "boxes"):
            assert same_objects(list(arrays[name]), list(batch[name]))

    def test_a_filter_reads_their_length(self) -> None:
        root = store(prompts(20, infos=object_column([{"a": "x" * n} for n in range(20)])))
        for text, expected in (
            ("len(tokens) > 2", [n for n in range(20) if n % 5 > 2]),
            ("len(infos['a']) == 7", [7]),
            ("not len(tokens)", None),
        ):
            if expected is None:
                with pytest.raises(OptionError, match="condition"):
                    load(root, filter=text)
            else:
                assert load(root, filter=text)["t"].tolist() == expected

    def test_info_shows_the_type_of_their_items(self) -> None:
        found = rlio.open_dataset(store(prompts(4, boxes=object_column([np.zeros((1, 2))] * 4)))).info()
        kinds = {column.name: column.dtype for column in found.columns}
        assert kinds["tokens"] == "int32[n]"
        assert kinds["boxes"] == "float64[n, 2]"

    def test_observations_of_a_sequence_space_are_recorded_as_lists(self) -> None:
        class Objects(gym.Env[Any, Any]):
            observation_space = gym.spaces.Sequence(gym.spaces.Box(0, 9, (2,), np.float32), stack=True)
            action_space = gym.spaces.Discrete(2)

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                super().reset(seed=seed)
                self.steps = 0
                return self.seen(), {}

            def seen(self) -> np.ndarray:
                return np.full((self.steps % 3, 2), self.steps, np.float32)

            def step(self, action: Any) -> Any:
                self.steps += 1
                return self.seen(), 1.0, self.steps == 7, False, {}

        root = fresh_root()
        with rlio.RecordExperience(Objects(), root) as env:
            env.reset(seed=0)
            for _ in range(7):
                env.step(0)
        found = load(root)
        assert [row.tolist() for row in found["obs"]] == [[[n, n]] * (n % 3) for n in range(7)]
        assert pa.types.is_list(stored(root).schema.field("obs").type)
