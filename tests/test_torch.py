"""Tensors of batches: memory is shared where it is safe, copied once where it is not, and reused."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlio import MultiAgentBatch, SampleBatch, pinned, tensors
from rlio.errors import OptionError
from rlio.pinned import PinnedPool
from rlio.replay.buffers import Buffers, batch_dtype

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

COLUMNS = {
    "obs": (np.dtype("f4"), (3,)),
    "actions": (np.dtype("i8"), ()),
    "terminateds": (np.dtype("?"), ()),
    "frame": (np.dtype("u1"), (5, 5)),
    "half": (np.dtype("f2"), (2,)),
    "phase": (np.dtype("c16"), ()),
    "word": (np.dtype("u2"), ()),
}


def filled(columns: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    for column in columns.values():
        column[...] = rng.integers(0, 2 if column.dtype == bool else 100, column.shape)
    return columns


def replayed(rows: int = 6) -> SampleBatch:
    """A batch as the replay engine makes them: columns side by side in one piece of memory."""
    return SampleBatch(filled(Buffers().columns(batch_dtype(rows, COLUMNS))))


def apart(rows: int = 6) -> SampleBatch:
    return SampleBatch(filled({name: np.empty((rows, *shape), d) for name, (d, shape) in COLUMNS.items()}))


def assert_equal(found: dict[str, Any], batch: SampleBatch) -> None:
    assert list(found) == list(batch)
    for name, tensor in found.items():
        assert isinstance(tensor, torch.Tensor)
        array = np.asarray(batch[name])
        assert tensor.shape == array.shape
        assert tensor.cpu().numpy().dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(tensor.cpu().numpy(), array)


@dataclass
class Copies:
    """Stands in for the copies to a device: each is kept, and none ends by itself."""

    made: list[torch.Tensor] = field(default_factory=list)
    events: list[FakeEvent] = field(default_factory=list)

    def copy(self, flat: torch.Tensor, target: torch.device, non_blocking: bool) -> torch.Tensor:
        assert target.type == "meta"
        self.made.append(flat.clone())
        return self.made[-1]

    def event(self, copied: torch.Tensor) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]


class FakeEvent:
    """An event that happens when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.done = False
        self.waited = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.waited = True


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Copies to the device "meta" are made on the CPU, where they can be looked at and counted."""
    found = Copies()
    monkeypatch.setattr(tensors, "_copy", found.copy)
    monkeypatch.setattr(tensors, "_event_after", found.event)
    return found


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plain memory in the place of pinned memory; gives the sizes that were asked for."""
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    pool = PinnedPool(allocate)
    monkeypatch.setattr(pinned, "pinned_memory", allocate)
    monkeypatch.setattr(pinned, "staging", lambda: pool)
    return sizes


class TestOnTheCpu:
    @pytest.mark.parametrize("make", [replayed, apart])
    def test_tensors_share_the_memory_of_their_arrays(self, make: Any) -> None:
        batch = make()
        found = batch.to_torch()
        assert_equal(found, batch)
        for name, tensor in found.items():
            assert tensor.data_ptr() == batch[name].__array_interface__["data"][0]

    def test_a_read_only_array_is_copied_and_its_rows_stay(self) -> None:
        rows = np.arange(4.0)
        rows.flags.writeable = False
        found = SampleBatch(a=rows, b=rows[1:3].repeat(2)).to_torch("cpu")
        found["a"][:] = -1
        assert rows.tolist() == [0, 1, 2, 3]

    def test_pinned_memory_where_there_is_none_is_refused_with_the_reason(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
        with pytest.raises(OptionError, match=r"pin_memory=True: .* accelerator"):
            apart().to_torch(pin_memory=True)

    @pytest.mark.parametrize("make", [replayed, apart])
    def test_pinned_tensors_lie_in_one_piece(self, make: Any, unlocked: list[int]) -> None:
        batch = make()
        found = batch.to_torch(pin_memory=True)
        assert_equal(found, batch)
        assert len(unlocked) == 1
        assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
        found["obs"][:] = -1
        assert (batch["obs"] >= 0).all()

    def test_any_layout_is_pinned_as_it_reads(self, unlocked: list[int]) -> None:
        locked = np.arange(6)
        locked.flags.writeable = False
        batch = SampleBatch(
            obs={"back": np.arange(6)[::-1], "pair": (locked, np.arange(6, dtype=">i4"))},
            column=np.arange(12.0).reshape(6, 2)[:, 1],
            none=np.zeros((6, 0), np.float32),
            infos=[{} for _ in range(6)],
        )
        found = batch.to_torch(pin_memory=True)
        assert found["obs"]["back"].tolist() == [5, 4, 3, 2, 1, 0]
        assert found["obs"]["pair"][0].tolist() == found["obs"]["pair"][1].tolist() == list(range(6))
        assert found["column"].tolist() == [1, 3, 5, 7, 9, 11]
        assert found["none"].shape == (6, 0)
        assert found["infos"] is batch["infos"]


class TestToADevice:
    def test_columns_side_by_side_go_in_one_copy(self, copies: Copies) -> None:
        batch = replayed()
        assert_equal(batch.to_torch("meta"), batch)
        assert len(copies.made) == 1

    def test_columns_apart_go_one_by_one(self, copies: Copies) -> None:
        batch = apart()
        assert_equal(batch.to_torch("meta"), batch)
        assert len(copies.made) == len(COLUMNS)

    def test_columns_that_overlap_stay_apart(self, copies: Copies) -> None:
        frames = np.arange(20, dtype=np.uint8).reshape(5, 4)
        batch = SampleBatch(obs=frames[:-1], new_obs=frames[1:])
        found = batch.to_torch("meta")
        assert_equal(found, batch)
        found["new_obs"][:] = 0
        assert found["obs"].tolist() == frames[:-1].tolist()

    def test_slices_of_longer_columns_do_not_bring_these_along(self, copies: Copies) -> None:
        batch = replayed(6000)[64:80]
        assert_equal(batch.to_torch("meta"), batch)
        assert sum(made.nbytes for made in copies.made) == batch.size_bytes()

    @settings(max_examples=60)
    @given(
        names=st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4, unique=True),
        rows=st.integers(0, 9),
        cut=st.integers(0, 3),
        locked=st.booleans(),
        turned=st.integers(-1, 3),
    )
    @example(names=["obs", "actions"], rows=3, cut=0, locked=False, turned=1)
    def test_the_values_arrive_whatever_lies_where(
        self, names: list[str], rows: int, cut: int, locked: bool, turned: int
    ) -> None:
        columns = {name: COLUMNS[name] for name in names}
        batch = SampleBatch(filled(Buffers().columns(batch_dtype(rows, columns))))[cut:]
        if 0 <= turned < len(names):
            batch[names[turned]] = batch[names[turned]][::-1]
        if locked:
            batch[names[-1]].flags.writeable = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensors, "_copy", Copies().copy)
            assert_equal(batch.to_torch("meta"), batch)

    def test_a_pinned_batch_goes_in_one_copy(self, copies: Copies, unlocked: list[int]) -> None:
        batch = apart()
        for _ in range(5):
            assert_equal(batch.to_torch("meta", pin_memory=True), batch)
        assert len(copies.made) == 5
        assert len(unlocked) == 1, "a copy that waits gives its buffer back at once"

    def test_a_pinned_buffer_is_not_used_before_its_copy_is_over(
        self, copies: Copies, unlocked: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late: list[torch.Tensor] = []
        monkeypatch.setattr(tensors, "_copy", lambda flat, target, non_blocking: late.append(flat) or flat)
        one, two = SampleBatch(a=np.zeros(100)), SampleBatch(a=np.ones(100))
        first = one.to_torch("meta", pin_memory=True, non_blocking=True)["a"]
        second = two.to_torch("meta", pin_memory=True, non_blocking=True)["a"]
        assert len(unlocked) == 2
        assert first.sum() == 0
        copies.events[0].done = True
        two.to_torch("meta", pin_memory=True, non_blocking=True)
        assert len(unlocked) == 2
        assert first.sum() == 100, "the buffer whose copy is over is the one that was used again"
        assert second.sum() == 100

    def test_shapes_dtypes_and_policies_of_a_real_foreign_device(self) -> None:
        batch = MultiAgentBatch({"a": replayed(4), "b": apart(2)}, 4)
        found = batch.to_torch("meta")
        for policy, rows in (("a", 4), ("b", 2)):
            for name, (dtype, shape) in COLUMNS.items():
                tensor = found[policy][name]
                assert tensor.device.type == "meta"
                assert tensor.shape == (rows, *shape)
                assert torch.empty_like(tensor, device="cpu").numpy().dtype == dtype
        assert batch.to_device("meta")["a"]["obs"].device.type == "meta"


class TestThePool:
    def allocate(self, size: int) -> torch.Tensor:
        self.sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    @pytest.fixture(autouse=True)
    def _pool(self) -> None:
        self.sizes: list[int] = []
        self.pool = PinnedPool(self.allocate, keep=3)

    def test_a_buffer_comes_back_when_its_copy_is_over(self) -> None:
        buffer, done = self.pool.take(100_000), FakeEvent()
        self.pool.give_back(buffer, done)
        other = self.pool.take(100_000)
        assert other is not buffer
        done.done = True
        assert self.pool.take(100_000) is buffer
        assert not done.waited

    def test_copies_may_end_in_any_order(self) -> None:
        buffers, events = [self.pool.take(10) for _ in range(3)], [FakeEvent() for _ in range(3)]
        for buffer, event in zip(buffers, events, strict=True):
            self.pool.give_back(buffer, event)
        events[1].done = True
        assert self.pool.take(10) is buffers[1]

    def test_so_many_copies_are_under_way_and_no_more(self) -> None:
        events = [FakeEvent() for _ in range(10)]
        for event in events:
            self.pool.give_back(self.pool.take(10), event)
        assert len(self.sizes) == 3
        assert [event.waited for event in events] == [True] * 7 + [False] * 3

    def test_the_smallest_that_fits_is_taken(self) -> None:
        large, small = self.pool.take(1 << 20), self.pool.take(1 << 17)
        self.pool.give_back(large)
        self.pool.give_back(small)
        assert self.pool.take(1 << 17) is small
        assert self.pool.take(1 << 17) is large

    def test_buffers_that_batches_have_outgrown_are_forgotten(self) -> None:
        for size in range(17, 27):
            self.pool.give_back(self.pool.take(1 << size))
        assert len(self.pool._free) == 3
        assert max(buffer.numel() for buffer in self.pool._free) == 1 << 26

    def test_sizes_are_rounded_so_that_batches_of_like_sizes_share(self) -> None:
        for size in (0, 1, 70_000, 100_000, 131_072):
            self.pool.give_back(self.pool.take(size))
        assert self.sizes == [1 << 16, 1 << 17]

    def test_threads_never_hold_one_buffer_together(self) -> None:
        held: set[int] = set()
        lock = threading.Lock()
        shared: list[int] = []

        def work() -> None:
            for _ in range(300):
                buffer = self.pool.take(10)
                with lock:
                    shared.extend({id(buffer)} & held)
                    held.add(id(buffer))
                with lock:
                    held.discard(id(buffer))
                self.pool.give_back(buffer, FakeEvent())

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shared == []


@needs_gpu
class TestOnAGpu:
    @pytest.mark.parametrize("make", [replayed, apart])
    @pytest.mark.parametrize("pin", [False, True])
    def test_the_values_arrive(self, make: Any, pin: bool) -> None:
        for rows in (1, 6, 5000):
            batch = make(rows)
            assert_equal(batch.to_torch("cuda", pin_memory=pin), batch)
            assert_equal(batch.to_torch("cuda", pin_memory=pin, non_blocking=pin), batch)

    def test_pinned_tensors_are_pinned(self) -> None:
        assert all(tensor.is_pinned() for tensor in apart().to_torch(pin_memory=True).values())

    def test_a_thousand_copies_under_way_mix_no_batches(self) -> None:
        stream = torch.cuda.Stream()
        found = []
        for number in range(1000):
            batch = SampleBatch(a=np.full(10_000, number), b=np.full(10_000, -number))
            found.append(batch.to_device("cuda", pin_memory=True, non_blocking=True, stream=stream))
        stream.synchronize()
        for number, batch in enumerate(found):
            assert (batch["a"] == number).all()
            assert (batch["b"] == -number).all()
