"""The loop over snapshots of docs/replay.md: each epoch reads what exists when it begins, and resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from growing_data import A, B, C, encode, publish, remove_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import fresh_root

import rlio
from rlio import DatasetReader, SampleBatch
from rlio.errors import OptionError, StateError
from rlio.reader import JsonState

# Every way to read: recorded order or shuffled, decoded or from a store, with a filter or without.
WAYS: dict[str, dict[str, Any]] = {
    "recorded": {"cache": "none"},
    "windows": {"cache": "none", "shuffle": True},
    "filtered": {"cache": "none", "shuffle": True, "filter": "t != 3"},
    "skipping": {"cache": "none", "shuffle": True, "on_error": "skip"},
    "memory": {"cache": "memory", "shuffle": True},
    "disk": {"cache": "disk", "shuffle": True, "filter": "t != 3"},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


def epochs_of_growing(
    root: str, epochs: int, state: JsonState | None = None, **options: Any
) -> Iterator[tuple[SampleBatch, JsonState]]:
    """The loop of docs/replay.md: batches, each with the state from which another call continues."""
    saved = state or {"epoch": 0}
    for epoch in range(saved["epoch"], epochs):
        at = saved["at"] if "at" in saved else rlio.open_dataset(root).snapshot()
        seed = epoch if options.get("shuffle") else None
        with DatasetReader(root, at=at, epochs=1, seed=seed, batch_size=4, **options) as reader:
            if "reader" in saved:
                reader.load_state_dict(saved["reader"])
            for batch in reader:
                assert isinstance(batch, SampleBatch)
                yield batch, {"epoch": epoch, "at": at, "reader": reader.state_dict()}
        saved = {"epoch": epoch + 1}


def add(root: str, writer: str, first: int, rows: int, *, t0: int | None = None) -> Any:
    """Rows ``first`` and on of a writer, counted in ``t`` from ``t0``."""
    t = np.arange(rows) + (first if t0 is None else t0)
    return publish(root, writer, first, encode(SampleBatch(t=t, rewards=t.astype(np.float32)), limit=200))


def passing(ts: list[int], options: dict[str, Any]) -> list[int]:
    return sorted(t for t in ts if t != 3 or "filter" not in options)


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_reads_what_is_there_when_it_begins(way: str) -> None:
    options, root = WAYS[way], fresh_root()
    add(root, A, 0, 10)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for batch, state in epochs_of_growing(root, 3, **options):
        if not found[state["epoch"]]:  # In the middle of an epoch: for the next one.
            if state["epoch"] == 0:
                add(root, A, 10, 5)
            elif state["epoch"] == 1:
                add(root, B, 0, 7, t0=100)
        found[state["epoch"]] += batch["t"].tolist()
    rows = [list(range(10)), list(range(15)), [*range(15), *range(100, 107)]]
    assert [sorted(epoch) for epoch in found.values()] == [passing(epoch, options) for epoch in rows]


STEPS = st.lists(
    st.tuples(st.sampled_from(["sample", "grow", "restore"]), st.integers(1, 6)),
    min_size=4,
    max_size=14,
)


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=3, deadline=None)
@given(steps=STEPS)
def test_a_restored_loop_gives_every_row_of_each_snapshot_once_whatever_was_added(
    way: str, steps: list[tuple[str, int]]
) -> None:
    options, root = WAYS[way], fresh_root()
    add(root, A, 0, 5)
    ends = {A: 5, B: 0, C: 0}
    found: dict[int, list[int]] = {}
    snapshots: dict[int, dict[str, int]] = {}
    state: JsonState | None = None
    loop = epochs_of_growing(root, 3, **options)
    for index, (what, n) in enumerate([*steps, *[("sample", 1)] * 200]):
        writer = (A, B, C)[index % 3]
        if what == "grow":
            add(root, writer, ends[writer], n, t0=1000 * (index + 1))
            ends[writer] += n
        elif what == "restore":
            loop.close()  # type: ignore[attr-defined]  # A generator.
            loop = epochs_of_growing(root, 3, json.loads(json.dumps(state)), **options)
        elif what == "sample":
            try:
                batch, state = next(loop)
            except StopIteration:
                break
            found.setdefault(state["epoch"], []).extend(batch["t"].tolist())
            snapshots[state["epoch"]] = state["at"]
    assert [*found] == [0, 1, 2]
    for epoch, rows in found.items():
        with DatasetReader(root, at=snapshots[epoch], epochs=1) as whole:
            there = [t for batch in whole for t in batch["t"].tolist()]
        assert sorted(rows) == passing(there, options)


def test_an_epoch_reads_the_shards_of_a_compaction_before_it() -> None:
    root = fresh_root()
    refs = [add(root, A, first, 10) for first in (0, 10)]
    found: list[int] = []
    for batch, state in epochs_of_growing(root, 2, cache="none", shuffle=True):
        if len(found) == 19 and state["epoch"] == 0:
            raise AssertionError("an epoch has 20 rows")
        found += batch["t"].tolist()
        if len(found) == 20:
            add(root, A, 0, 20)
            for ref in refs:
                remove_shard(root, ref)
    assert sorted(found[:20]) == sorted(found[20:]) == list(range(20))


def test_ranks_share_the_snapshot_of_one_of_them() -> None:
    root = fresh_root()
    add(root, A, 0, 10)
    at = rlio.open_dataset(root).snapshot()
    found: list[int] = []
    for rank in range(2):
        with DatasetReader(
            root, at=at, epochs=1, shuffle=True, seed=3, shard=(rank, 2), batch_size=2
        ) as reader:
            found += [t for batch in reader for t in batch["t"].tolist()]
        add(root, A, 10 + 5 * rank, 5)
    assert sorted(found) == list(range(10))


def test_a_state_of_an_epoch_of_a_reader_that_grew_loads_over_its_snapshot() -> None:
    """Earlier versions had such readers; their states hold the snapshot."""
    root = fresh_root()
    add(root, A, 0, 10)
    at = rlio.open_dataset(root).snapshot()
    with DatasetReader(root, at=at, batch_size=4, epochs=3) as reader:
        reader.sample()
        state = reader.state_dict()
        rest = [batch["t"].tolist() for batch in reader]
    state["position"]["at"] = at
    add(root, A, 10, 5)
    with DatasetReader(root, batch_size=4) as now, pytest.raises(StateError, match=r"at=state\['position'\]"):
        now.load_state_dict(state)
    with DatasetReader(root, at=state["position"]["at"], batch_size=4, epochs=3) as reader:
        reader.load_state_dict(state)
        assert [batch["t"].tolist() for batch in reader] == rest


def test_a_reader_that_was_asked_to_grow_says_what_to_write_now() -> None:
    root = fresh_root()
    add(root, A, 0, 6)
    torch = pytest.importorskip("rlio.torch")
    for opens in (DatasetReader, rlio.read, lambda root, **options: rlio.read({root: 1.0}, **options)):
        with pytest.raises(OptionError, match=r"at=rlio\.open_dataset\(root\)\.snapshot\(\)"):
            opens(root, grow=True)
    with pytest.raises(OptionError, match="snapshot"):
        torch.ReplayDataset(root, batch_size=2, grow=True)
