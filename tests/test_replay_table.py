"""Packed rows: what goes in comes out, rings forget the oldest, links follow episodes, memory is reused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlio import SampleBatch, concat_samples
from rlio.errors import OptionError
from rlio.replay.buffers import Buffers, batch_dtype
from rlio.replay.ingest import Ingest
from rlio.replay.layout import RowLayout
from rlio.replay.memory import RamArrays
from rlio.replay.n_step import NStep, windows
from rlio.replay.table import ROW_VERSION, RowTable
from rlio.schemas.leaves import STORED_NEXT_OBS
from rlio.schemas.schema import Schema


def steps(
    episode: int, t: range, *, width: int = 3, ends: bool = False, stacked: bool = False
) -> SampleBatch:
    """Steps of an environment whose observation encodes (episode, t)."""

    def obs(times: NDArray[np.int64]) -> NDArray[Any]:
        if stacked:  # The last four frames, the first one repeated.
            frames = np.maximum(times[:, None] - np.arange(3, -1, -1), 0)
            return np.broadcast_to(
                (frames + 1000 * episode)[:, :, None, None], (len(times), 4, 20, 20)
            ).astype(np.float32)
        return np.stack([np.full(len(times), episode), times, *[times * 0] * (width - 2)], 1).astype(
            np.float32
        )

    times = np.arange(t.start, t.stop)
    last = np.zeros(len(times), bool)
    last[-1:] = ends
    return SampleBatch(
        obs=obs(times),
        new_obs=obs(times + 1),
        rewards=(times + 1).astype(np.float32),
        terminateds=last,
        truncateds=np.zeros(len(times), bool),
        eps_id=np.full(len(times), episode),
        t=times,
        infos=np.array([{"at": [episode, int(i)]} for i in times] + [None], object)[:-1],
    )


def stored(name: str) -> str:
    """The physical name of a column."""
    return {"new_obs": STORED_NEXT_OBS}.get(name, name)


def table_of(batch: SampleBatch, capacity: int, **options: Any) -> tuple[RowTable, Ingest]:
    policy = Schema.of(batch).policies["default_policy"]
    table = RowTable(RowLayout.of(policy), capacity=capacity, arrays=RamArrays(), ring=True, **options)
    return table, Ingest(table, policy, name="default_policy")


@pytest.mark.parametrize("width", [3, 400])
@pytest.mark.parametrize("stacked", [False, True])
def test_rows_come_back_as_they_went_in(width: int, stacked: bool) -> None:
    """Small columns, wide ones, stacks of frames, and objects."""
    parts = [steps(e, range(10), width=width, ends=True, stacked=stacked) for e in range(5)]
    table, ingest = table_of(parts[0], 50)
    for part in parts:
        ingest.add(part)
    rows = np.random.default_rng(0).integers(0, 50, 200)
    found = table.gather(rows, table.plan())
    for name in ("obs", "new_obs", "rewards", "terminateds", "eps_id", "t"):
        expected = np.concatenate([part[name] for part in parts])[rows]
        values = found[stored(name)]
        assert values.dtype == expected.dtype
        np.testing.assert_array_equal(values, expected)
        assert values.flags.c_contiguous
        assert values.flags.writeable


def test_a_wide_observation_is_kept_once() -> None:
    table, ingest = table_of(steps(0, range(1), width=400), 100)
    ingest.add(steps(0, range(100), width=400))
    (pool,) = table._pools.values()
    assert 101 <= pool.head <= 110  # One more for each part that they come in.


def test_a_stack_keeps_one_frame_a_step() -> None:
    # Schema.of() finds stacks in eight rows or more.
    table, ingest = table_of(steps(0, range(20), stacked=True), 200)
    ingest.add(steps(0, range(100), stacked=True))
    (pool,) = table._pools.values()
    assert pool.depth == 4
    assert 104 <= pool.head <= 120  # Of four hundred.


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_ring_holds_the_newest_rows_whatever_was_appended(data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([3, 400]))
    capacity = data.draw(st.integers(1, 40))
    frames = data.draw(st.sampled_from([None, 2 * capacity + 2]))
    table, ingest = table_of(steps(0, range(1), width=width), capacity, frames=frames)
    written: list[SampleBatch] = []
    for episode in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(1, 30))
        cut = data.draw(st.integers(0, length))
        for part in (range(cut), range(cut, length)):
            if len(part):
                written.append(steps(episode, part, width=width, ends=part.stop == length))
                ingest.add(written[-1])
    everything = {
        name: np.concatenate([w[name] for w in written]) for name in ("obs", "new_obs", "eps_id", "t")
    }
    assert table.head == len(everything["t"])
    assert len(table) <= capacity
    if table.head <= capacity and frames is None:
        assert table.tail == 0
    rows = np.arange(table.tail, table.head)
    found = table.gather(rows, table.plan())
    for name, values in everything.items():
        np.testing.assert_array_equal(found[stored(name)], values[rows])
    following = table.successors(rows)
    for row, successor in zip(rows.tolist(), following.tolist(), strict=True):
        here = everything["eps_id"][row], everything["t"][row]
        same = np.flatnonzero((everything["eps_id"] == here[0]) & (everything["t"] == here[1] + 1))
        assert successor == (same[0] if len(same) else -1)


def test_episodes_are_followed_over_fragments_and_between_environments_that_alternate() -> None:
    parts = [steps(e, range(first, first + 3), ends=first == 6) for first in (0, 3, 6) for e in (7, 8)]
    table, ingest = table_of(parts[0], 100)
    for part in parts:
        ingest.add(part)
    row = np.array([0])
    seen = []
    while row[0] >= 0:
        seen.append(table.gather(row, table.plan())["obs"][0, :2].tolist())
        row = table.successors(row)
    assert seen == [[7, t] for t in range(9)]


def test_a_gap_in_time_ends_what_can_be_followed() -> None:
    table, ingest = table_of(steps(0, range(1)), 100)
    ingest.add(steps(0, range(3)))
    ingest.add(steps(0, range(5, 8)))
    assert table.successors(np.arange(6)).tolist() == [1, 2, -1, 4, 5, -1]


@given(st.integers(1, 6), st.floats(0, 1), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_n_step_windows_never_cross_an_end(n: int, gamma: float, lengths: list[int]) -> None:
    table, ingest = table_of(steps(0, range(1)), 100)
    for episode, length in enumerate(lengths):
        ingest.add(steps(episode, range(length), ends=True))
    rows = np.arange(table.head)
    found = windows(table, rows, NStep(n, gamma), rewards="rewards")
    start = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    for row in rows.tolist():
        t, length = row - start[row], lengths[int(np.searchsorted(np.cumsum(lengths), row, side="right"))]
        k = min(n, length - t)
        assert found.steps[row] == k
        assert found.last[row] == row + k - 1
        expected = sum(gamma**i * (t + i + 1) for i in range(k))
        assert found.rewards[row] == pytest.approx(expected, rel=1e-5)
        assert found.discount[row] == pytest.approx(gamma**k, rel=1e-5)


def test_memory_is_used_again_as_soon_and_only_when_no_view_of_it_is_alive() -> None:
    buffers = Buffers()
    columns = batch_dtype(500, {"obs": (np.dtype("f4"), (3,)), "t": (np.dtype("i8"), ())})

    def address(batch: dict[str, NDArray[Any]]) -> int:
        return int(batch["obs"].ctypes.data)

    first = buffers.columns(columns)
    where, kept = address(first), first["t"][10:20]
    del first
    second = buffers.columns(columns)
    assert address(second) != where
    del kept
    third = buffers.columns(columns)
    assert address(third) == where
    view = memoryview(third["obs"])
    del third
    assert address(buffers.columns(columns)) != where
    assert view.nbytes == 6000


def test_memory_is_reserved_before_it_is_written() -> None:
    """Of files, what was not reserved may have no room on the disk: writing it ends the process."""

    class Careful(RamArrays):
        def __init__(self) -> None:
            super().__init__()
            self.given: dict[str, NDArray[Any]] = {}
            self.reserved: dict[str, int] = {}

        def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
            self.given[name] = found = super().array(name, shape, dtype)
            return found

        def reserve(self, name: str, rows: int) -> None:
            super().reserve(name, rows)
            self.reserved[name] = max(self.reserved.get(name, 0), rows)

    arrays = Careful()
    policy = Schema.of(steps(0, range(20), stacked=True)).policies["default_policy"]
    table = RowTable(RowLayout.of(policy), capacity=1600, arrays=arrays, ring=True, frames=100)
    ingest = Ingest(table, policy, name="default_policy")
    # Of 60, 50 and 45 frames, the second ones begin at slot 0 again: they do not wrap.
    first = [steps(number, range(rows), stacked=True) for number, rows in ((1, 56), (2, 46), (3, 41))]
    for part in (concat_samples(first), *(steps(number, range(29), stacked=True) for number in range(4, 9))):
        ingest.add(part)
        for name, values in arrays.given.items():
            raw = np.frombuffer(values.tobytes(), np.uint8).reshape(len(values), -1)
            assert raw.any()
            assert np.flatnonzero(raw.any(axis=1))[-1] < arrays.reserved[name]


def test_a_layout_has_the_columns_that_are_wanted() -> None:
    policy = Schema.of(steps(0, range(3))).policies["default_policy"]
    assert [leaf.physical for leaf in RowLayout.of(policy, columns=["t"]).packed] == ["t"]


@pytest.mark.parametrize(("n", "gamma"), [(0, 0.9), (True, 0.9), (1, 1.5), (1, -0.1)])
def test_steps_and_discounts_that_are_none_are_refused(n: int, gamma: float) -> None:
    with pytest.raises(OptionError, match=r"NStep\.(n|gamma)="):
        NStep(n, gamma)


class NotedArrays(RamArrays):
    """Arrays that say which there are: name -> (rows, dtype, shape of a row)."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, Any] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        found = super().array(name, shape, dtype)
        self.made[name] = len(found), found.dtype.str, found.shape[1:]
        return found


def test_rows_look_as_their_version_says() -> None:
    """Whoever changes this raises ROW_VERSION: stores on disk are read by what it says."""
    batch = steps(0, range(20), stacked=True)
    batch["wide"] = np.zeros((20, 300), np.float32)
    arrays = NotedArrays()
    policy = Schema.of(batch).policies["default_policy"]
    table = RowTable(RowLayout.of(policy), capacity=40, arrays=arrays)
    Ingest(table, policy, name="default_policy").add(batch)
    rows = {name: (str(kind[0]), kind[1]) for name, kind in (table.row.fields or {}).items()}
    assert ROW_VERSION == 1
    assert rows == {
        "eps_id": ("int64", 0), "t": ("int64", 8), "rewards": ("float32", 16), "terminateds": ("bool", 20),
        "truncateds": ("bool", 21), "@next": ("int32", 24), "@prev": ("int32", 28), "@at": ("int64", 32),
        "@obs obs": ("int64", 40), "@new_obs obs": ("int64", 48),
    }  # fmt: skip
    assert arrays.made == {
        "rows": (40, table.row.str, ()),
        "frames obs": (320, "|V1600", ()),
        "wide wide": (40, "<f4", (300,)),
        "texts infos places": (40, "|V16", ()),
        "texts infos 0": (16 << 20, "|u1", ()),
    }
    assert table.used == {
        "rows": 20, "frames obs": 24, "wide wide": 20, "texts infos places": 20,
        "texts infos 0": sum(len(f'{{"at":[0,{t}]}}') for t in range(20)),
    }  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_ring_forgets_the_rows_whose_frames_are_overwritten(rows: int) -> None:
    """Each append is an episode: the pool of frames is full before the ring has 40 rows."""
    table, ingest = table_of(steps(0, range(1), width=400), 40, frames=20)
    written = [steps(episode, range(rows), width=400, ends=True) for episode in range(30)]
    for batch in written:
        ingest.add(batch)
        kept = np.arange(table.tail, table.head)
        assert 0 < len(kept) < 20
        found = table.gather(kept, table.plan())
        for name in ("obs", "new_obs"):
            values = np.concatenate([each[name] for each in written])
            np.testing.assert_array_equal(found[stored(name)], values[kept])
