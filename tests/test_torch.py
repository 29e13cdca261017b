"""Tensors of batches: memory is shared where it is safe, copied once where it is not, and reused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlio import MultiAgentBatch, SampleBatch
from rlio.batch import tensors
from rlio.errors import OptionError
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
    """Stands in for the copies to a device: each is kept."""

    made: list[torch.Tensor] = field(default_factory=list)

    def copy(self, flat: torch.Tensor, target: torch.device, non_blocking: bool) -> torch.Tensor:
        assert target.type == "meta"
        self.made.append(flat.clone())
        return self.made[-1]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Copies to the device "meta" are made on the CPU, where they can be looked at and counted."""
    found = Copies()
    monkeypatch.setattr(tensors, "_copy", found.copy)
    return found


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plain memory in the place of pinned memory; gives the sizes that were asked for."""
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(tensors, "_pinned_memory", allocate)
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
        assert len(unlocked) == 5

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
