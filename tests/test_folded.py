"""Frame stacks that are looked up last: readers give what was written, in arrays of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from stored_batches import fresh_root, group_bytes

import rlio
from rlio import DatasetReader, FollowReader, SampleBatch
from rlio.batch.nested import leaves
from rlio.replay.frames import FramePool
from rlio.replay.memory import RamArrays
from rlio.schemas.column import FrameStack
from rlio.schemas.folded import Folded, join_folded, unfold
from rlio.schemas.frame_pools import Frames, Stacks

ROWS = 90


def recording(axis: int = -1, *, seed: int = 0, frame: tuple[int, int] = (6, 5)) -> dict[str, NDArray[Any]]:
    """Episodes of 30 rows in stacks of four frames; the final observation of the second is missing."""
    rng = np.random.default_rng(seed)
    obs, new_obs = [], []
    for _ in range(ROWS // 30):
        frames = rng.integers(0, 256, (34, *frame), np.uint8)
        stacks = np.stack([frames[i : i + 4] for i in range(31)])
        obs.append(stacks[:-1])
        new_obs.append(stacks[1:].copy())
    new_obs[1][-1] = 0
    valid = np.ones(ROWS, bool)
    valid[59] = False
    return {
        "obs": np.ascontiguousarray(np.moveaxis(np.concatenate(obs), 1, axis)),
        "new_obs": np.ascontiguousarray(np.moveaxis(np.concatenate(new_obs), 1, axis)),
        "new_obs_valid": valid,
        "eps_id": np.arange(ROWS) // 30,
        "t": np.arange(ROWS) % 30,
    }


def stored(columns: dict[str, Any], *, row_groups_of: int = 16) -> str:
    root = fresh_root()
    row = sum(leaf[0].nbytes for _, leaf in leaves(columns))
    # Of the stacks of a row, one of eight frames is counted.
    stacks = sum(leaf[0].nbytes for _, leaf in leaves(columns) if leaf.ndim == 4)
    with group_bytes(row_groups_of * (row - stacks // 8 * 7)), rlio.ParquetWriter(root) as writer:
        writer.write(SampleBatch(columns))
    (schema,) = rlio.open_dataset(root).schemas.values()
    assert schema.stacked, "these are stacks"
    assert schema.group_rows == row_groups_of
    return root


def assert_rows(batch: Any, columns: dict[str, Any]) -> None:
    rows = batch["eps_id"] * 30 + batch["t"]
    for name, values in columns.items():
        assert batch[name].dtype == values.dtype
        assert batch[name].tobytes() == values[rows].tobytes(), name


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [7, 64])
@pytest.mark.each_value_once
def test_batches_across_row_groups_are_what_was_written(axis: int, shuffle: bool, size: int) -> None:
    columns = recording(axis)
    root = stored(columns)
    with DatasetReader(root, batch_size=size, epochs=1, shuffle=shuffle, seed=0, cache="none") as reader:
        batches = list(reader)
    for batch in batches:
        assert_rows(batch, columns)
    assert sorted(np.concatenate([b["eps_id"] * 30 + b["t"] for b in batches])) == list(range(ROWS))


def test_a_batch_is_writable_and_nobody_elses() -> None:
    columns = recording()
    root = stored(columns)
    with DatasetReader(root, batch_size=10, epochs=2) as reader:
        kept = [reader.sample() for _ in range(9)]
        for batch in kept:
            for name in ("obs", "new_obs"):
                batch[name][:] = 7
        for _ in range(9):
            assert_rows(reader.sample(), columns)
        assert all((batch[name] == 7).all() for batch in kept for name in ("obs", "new_obs"))


def test_single_columns_and_filtered_rows_are_what_was_written() -> None:
    columns = recording()
    root = stored(columns)
    for name in ("obs", "new_obs"):
        with DatasetReader(root, columns=[name], batch_size=50, epochs=1) as reader:
            assert np.concatenate([batch[name] for batch in reader]).tobytes() == columns[name].tobytes()
    with DatasetReader(root, filter="t > 6 and t < 14", batch_size=9, epochs=1, cache="none") as reader:
        batches = list(reader)
    assert sum(map(len, batches)) == ROWS // 30 * 7
    for batch in batches:
        assert_rows(batch, columns)


def test_nested_stacks_beside_other_leaves_come_back() -> None:
    columns = recording()
    vector = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
    nested = columns | {
        name: {"camera": columns[name], "joints": (vector + number, vector)}
        for number, name in enumerate(("obs", "new_obs"))
    }
    del nested["new_obs_valid"]
    root = stored(nested, row_groups_of=8)
    for shuffle in (False, True):
        with DatasetReader(root, batch_size=33, epochs=1, shuffle=shuffle, seed=0, cache="none") as reader:
            for batch in reader:
                rows = batch["eps_id"] * 30 + batch["t"]
                for number, name in enumerate(("obs", "new_obs")):
                    assert batch[name]["camera"].tobytes() == columns[name][rows].tobytes()
                    assert np.array_equal(batch[name]["joints"][0], vector[rows] + number)
                    assert np.array_equal(batch[name]["joints"][1], vector[rows])


def test_a_follower_and_a_store_give_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = recording()
    root = stored(columns, row_groups_of=32)
    with FollowReader(root, batch_size=7, idle_timeout=0) as reader:
        batches = list(reader)
    assert sum(map(len, batches)) == ROWS
    monkeypatch.setattr("rlio.replay.build.own_size", lambda dataset: 2)  # Row groups in parts of two rows.
    with DatasetReader(root, batch_size=7, epochs=1, shuffle=True, seed=0, cache="memory") as reader:
        batches += list(reader)
    assert sum(map(len, batches)) == 2 * ROWS
    for batch in batches:
        assert_rows(batch, columns)


#: Frames of which a store keeps each once: stacks of four have more than a kibibyte.
LARGE = (20, 16)


@pytest.mark.parametrize("axis", [1, -1])
def test_a_store_gives_the_stacks_that_were_written_and_never_looks_them_up(
    axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = recording(axis, frame=LARGE)
    root = stored(columns, row_groups_of=32)

    def look_up(parts: Sequence[Folded]) -> None:
        assert not any(part.frames for part in parts)

    monkeypatch.setattr("rlio.replay.build.unfold", look_up)
    monkeypatch.setattr(
        "rlio.replay.build.own_size", lambda dataset: 2
    )  # Parts of stacks that are looked up.
    with rlio.ReplayStore.open(root) as store:
        assert store._rows is not None
        (table,) = store._rows.tables.values()
        (pool,) = table._pools.values()
        # One frame a row, three more where an episode or a row group begins, and those of the missing row.
        assert ROWS < pool.head < ROWS + 4 * 8
        with store.uniform(batch_size=64, seed=0) as sampler:
            for _ in range(3):
                assert_rows(sampler.sample(), columns)


@pytest.mark.parametrize("columns", [["obs"], ["new_obs"], ["t", "eps_id"], None])
@pytest.mark.each_value_once
def test_a_store_of_some_columns_gives_their_stacks(columns: list[str] | None) -> None:
    written = recording(frame=LARGE)
    root = stored(written, row_groups_of=32)
    kept = None if columns is None else [*columns, *(n for n in ("eps_id", "t") if n not in columns)]
    with rlio.ReplayStore.open(root, columns=kept) as store, store.uniform(batch_size=64, seed=0) as sampler:
        batch = sampler.sample()
    assert_rows(batch, {name: written[name] for name in kept or written})


@pytest.mark.few(1)
@pytest.mark.parametrize(("width", "stacks"), [(16, True), (17, False)])
def test_a_store_of_writers_with_and_without_stacks_gives_both(width: int, stacks: bool) -> None:
    """Too few rows show no stacks: those are stored whole. The first schema, by digest, decides."""
    columns = recording(frame=(20, width))
    root = stored(columns)
    with rlio.ParquetWriter(root) as few:
        few.write(SampleBatch({name: values[:3] for name, values in columns.items()}))
    with rlio.ReplayStore.open(root) as store, store.uniform(batch_size=200, seed=0) as sampler:
        assert store._rows is not None
        (table,) = store._rows.tables.values()
        (pool,) = table._pools.values()
        assert (pool.stack is not None) == stacks
        assert_rows(sampler.sample(), columns)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_pool_takes_the_same_frames_of_stacks_that_are_not_looked_up(data: st.DataObject) -> None:
    """Also of frames that are there twice, and of next observations that have frames of their own."""
    depth, rows = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    # Two kinds of frames, many of each: most are equal to others.
    frames = [
        Frames(rng.integers(0, 2, (9, 1, 1), np.uint8).repeat(3, 2), FrameStack(0, depth)) for _ in "ab"
    ]
    runs = np.minimum(np.arange(rows)[:, None] + np.arange(depth), 8).astype(np.int32)
    places = [
        runs if data.draw(st.booleans()) else rng.integers(0, 9, runs.shape).astype(np.int32) for _ in "ab"
    ]
    there = frames[data.draw(st.integers(0, 1))]
    obs, new_obs = Stacks(frames[0], places[0]), Stacks(there, np.minimum(places[1] + 1, 8))
    after = np.append(np.arange(1, rows), -1)
    after[rng.random(rows) < 0.2] = -1
    pool = FramePool(
        arrays=RamArrays(),
        name="obs",
        shape=(depth, 1, 3),
        dtype=np.dtype("u1"),
        stack=FrameStack(0, depth),
        capacity=100,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.schemas.frame_pools._BLOCK_BYTES", 6)  # Two frames are compared at once.
        found = pool.prepare_stacks(obs, new_obs, after)
    expected = pool.prepare(frames[0].at(obs.places), there.at(new_obs.places), after)
    assert found.rows == expected.rows == rows
    for one, other in zip(found.chains, expected.chains, strict=True):
        assert one.rows.tolist() == other.rows.tolist()
        assert one.fresh.tolist() == other.fresh.tolist()
        assert one.frames.dtype == other.frames.dtype
        assert one.frames.tobytes() == other.frames.tobytes()


def test_a_writer_without_stacks_is_read_beside_one_with_them() -> None:
    """Too few rows show no stacks: those observations are stored whole."""
    columns = recording()
    root = stored(columns)
    few = {name: values[:3] for name, values in columns.items()}
    with rlio.ParquetWriter(root, writer_id="w99999-00000000") as writer:
        writer.write(SampleBatch(few))
    assert len(rlio.open_dataset(root).schemas) == 2
    for shuffle in (False, True):
        with DatasetReader(root, batch_size=93, epochs=1, shuffle=shuffle, seed=0, cache="none") as reader:
            batch = reader.sample()
        assert len(batch) == 93
        assert_rows(batch, columns)


def test_the_places_of_joined_batches_lead_to_the_frames_of_each() -> None:
    def folded(first: int, places: list[list[int]]) -> Folded:
        table = Frames(np.arange(first, first + 6, dtype=np.uint8).reshape(6, 1), FrameStack(0, 2))
        batch = SampleBatch(obs=np.array(places, np.int32), t=np.arange(len(places)))
        return Folded(batch, {("obs", ()): table})

    parts = [folded(10, [[0, 5], [4, 1]]), folded(20, [[3, 2]])]
    expected = [[[10], [15]], [[14], [11]], [[23], [22]]]
    assert unfold(parts)["obs"].tolist() == expected
    joined = join_folded(parts)
    assert joined.frames
    assert unfold([joined])["obs"].tolist() == expected
    whole = join_folded([parts[0], Folded(unfold(parts[1:]))])
    assert not whole.frames
    assert unfold([whole])["obs"].tolist() == expected
