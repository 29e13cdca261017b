"""Frame stacks that are looked up last: readers give what was written, in arrays of the user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stored_batches import fresh_root, group_bytes

import rlio
from rlio import DatasetReader, FollowReader, SampleBatch
from rlio.batch.nested import leaves
from rlio.schemas.column import FrameStack
from rlio.schemas.folded import Folded, join_folded, unfold
from rlio.schemas.frame_pools import Frames

ROWS = 90


def recording(axis: int = -1, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Episodes of 30 rows in stacks of four frames; the final observation of the second is missing."""
    rng = np.random.default_rng(seed)
    obs, new_obs = [], []
    for _ in range(ROWS // 30):
        frames = rng.integers(0, 256, (34, 6, 5), np.uint8)
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
    # Of the stacks of a row, one frame of thirty bytes is counted.
    with group_bytes(row_groups_of * (row - 7 * 30)), rlio.ParquetWriter(root) as writer:
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
