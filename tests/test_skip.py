"""DatasetReader.skip: as many batches are stepped over as would have been given, and nothing else changes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growing_data import A, follow
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import assert_identical, files, fresh_root, group_bytes, numbered, put, store

from rlio import DatasetReader, MultiAgentBatch, Roll, SampleBatch
from rlio.batch import Batch
from rlio.errors import ClosedError, CorruptData, EndOfData, OptionError


def _joint() -> list[Batch]:
    t = np.arange(30)
    a = SampleBatch(t=t, eps_id=t * 0)
    return list(MultiAgentBatch({"a": a, "b": a[10:]}, 30).timeslices(3))


KINDS: dict[str, Any] = {
    "rows": lambda: [numbered(61)],
    "sequences": lambda: [numbered(55, seq_lens=np.arange(1, 11, dtype=np.int32))],
    "joint steps": _joint,
}


@pytest.fixture(scope="module", params=KINDS)
def stored(request: pytest.FixtureRequest) -> str:
    with group_bytes(150):
        return store(*KINDS[request.param](), roll=Roll(max_rows=20, max_seconds=None), writer_id=A)


@pytest.fixture(scope="module")
def damaged() -> str:
    """61 rows, with a damaged byte in the second shard."""
    with group_bytes(150):
        root = store(numbered(61), roll=Roll(max_rows=20, max_seconds=None), writer_id=A)
    path, data = list(files(root).items())[1]
    put(path, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    return root


def sampled(reader: DatasetReader) -> Batch | None:
    try:
        return reader.sample()
    except EndOfData:
        return None


def skipped(reader: DatasetReader, n: int) -> bool:
    """Whether there were so many."""
    try:
        reader.skip(n)
    except EndOfData:
        return False
    return True


def check_that_skipping_is_reading(root: str, steps: list[int], **options: Any) -> None:
    """One reader skips and samples in turns; the other reads every batch."""
    with DatasetReader(root, **options) as one, DatasetReader(root, **options) as other:
        for n in steps:
            found = [sampled(other) for _ in range(n)]
            assert skipped(one, n) == (None not in found)
            assert one.state_dict() == other.state_dict()
            ours, theirs = sampled(one), sampled(other)
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert_identical(ours, theirs)
            assert one.state_dict() == other.state_dict()


@pytest.mark.few(1)
@settings(max_examples=3)
@given(
    shuffle=st.booleans(),
    epochs=st.integers(1, 3) | st.none(),
    size=st.integers(1, 25) | st.none(),
    drop_last=st.booleans(),
    shard=st.integers(1, 4).flatmap(lambda world: st.tuples(st.integers(0, world - 1), st.just(world))),
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=8),
)
def test_skipping_leads_where_reading_leads(
    stored: str,
    shuffle: bool,
    epochs: int | None,
    size: int | None,
    drop_last: bool,
    shard: tuple[int, int],
    steps: list[int],
) -> None:
    check_that_skipping_is_reading(
        stored,
        steps,
        shuffle=shuffle,
        seed=1 if shuffle else None,
        epochs=epochs,
        # Endless readers have no batches larger than the data, of 10 sequences at the least.
        batch_size=size if epochs is not None or size is None else min(size, 10),
        drop_last=drop_last and size is not None,
        shard=shard,
    )


@pytest.mark.further
@settings(max_examples=12)
@given(
    shuffle=st.booleans(),
    size=st.integers(1, 25),
    drop_last=st.booleans(),
    world=st.integers(1, 2),
    steps=st.lists(st.integers(0, 6), min_size=1, max_size=8),
)
def test_so_it_does_over_damage_that_is_skipped(
    damaged: str, shuffle: bool, size: int, drop_last: bool, world: int, steps: list[int]
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None, "drop_last": drop_last}
    check_that_skipping_is_reading(
        damaged, steps, epochs=2, batch_size=size, on_error="skip", shard=(0, world), **options
    )


def test_nothing_is_read_of_what_is_skipped(damaged: str) -> None:
    with DatasetReader(damaged, epochs=1, batch_size=20) as reader:
        reader.sample()
        with pytest.raises(CorruptData):
            reader.sample()
        reader.skip(1)
        assert reader.sample()["t"].tolist() == list(range(40, 60))


def rows_of_turns(root: str, readers: int, **options: Any) -> int:
    """Rows of readers of which each reads one batch and skips those of the others."""
    rows = 0
    for number in range(readers):
        with DatasetReader(root, **options) as reader:
            more = skipped(reader, number)
            while more and (batch := sampled(reader)) is not None:
                rows += batch.agent_steps()
                more = skipped(reader, readers - 1)
    return rows


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.each_value_once
def test_the_rows_of_readers_that_take_turns_add_up(stored: str, shuffle: bool) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None, "epochs": 2}
    alone = rows_of_turns(stored, 1, batch_size=4, **options)
    assert rows_of_turns(stored, 3, batch_size=4, **options) == alone > 0


def test_what_drop_last_drops_is_given_to_none_of_them() -> None:
    root = store(numbered(61))
    for readers, cache in itertools.product((1, 2, 3, 20), ("none", "memory")):
        assert rows_of_turns(root, readers, batch_size=4, epochs=1, drop_last=True, cache=cache) == 60


def test_damage_in_what_is_skipped_is_counted(damaged: str) -> None:
    with DatasetReader(damaged, epochs=1, batch_size=10, on_error="skip") as reader:
        reader.skip(4)  # Rows 20 to 39 are a shard of which some are damaged.
        assert reader.skipped > 0
        assert len(reader.sample()) == 10


def test_skip_zero_is_nothing_and_less_is_refused(stored: str, tmp_path: Path) -> None:
    with DatasetReader(stored, epochs=1, batch_size=4) as reader:
        before = reader.state_dict()
        reader.skip(0)
        assert reader.state_dict() == before
        with pytest.raises(OptionError, match="skip"):
            reader.skip(-1)
        with pytest.raises(EndOfData):
            reader.skip(10**9)
    with pytest.raises(ClosedError):
        reader.skip(1)
    with follow(fresh_root(), idle_timeout=0) as reader, pytest.raises(OptionError, match="FollowReader"):
        reader.skip(1)
