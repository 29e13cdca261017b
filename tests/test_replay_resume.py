"""Stopped at any batch and resumed with another number of ranks or workers: each unit once, in one order.

Workers are those of a DataLoader: batch i of a rank is read by worker i modulo their number, which steps over
the others' with `DatasetReader.skip` (`rlio.torch` has tests with real ones).
"""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from counter_env import decode
from counter_world import World, record_world
from further import further

import rlio
from rlio import Dataset, DatasetReader, ParquetWriter, Roll, SampleBatch, open_dataset
from rlio.errors import EndOfData, StateError
from rlio.maintenance import compact
from rlio.query.order import Permutation
from rlio.read_options import ReadOptions
from rlio.reader import JsonState
from rlio.replay.draws import Draw, Units
from rlio.replay.epochs import StorePass

Key = tuple[int, ...]

KINDS: dict[str, dict[str, Any]] = {
    "transitions": {},
    "recorded": {"shuffle": False},
    "n-step": {"draw": rlio.NStep(3, gamma=0.9)},
    "sequences": {"draw": rlio.Sequences(5, burn_in=2, overlap=1)},
    "episodes": {"draw": rlio.WholeEpisodes()},
    "filtered": {"filter": "rewards > 3 and obs[0] < 9"},
    "filtered sequences": {"draw": rlio.Sequences(4), "filter": "env_id == 1"},
    "cold windows": {"cache": "none"},
    "cold, recorded": {"cache": "none", "shuffle": False},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return record_world(tmp_path_factory.mktemp("world") / "data", episodes=4)


@pytest.fixture(scope="module")
def dataset(world: World) -> Dataset:
    return open_dataset(world.root)


def keys(batch: Any) -> list[Key]:
    """What each unit begins with: (env, episode, t)."""
    assert isinstance(batch, SampleBatch)
    rows = decode(batch["obs"])
    if "seq_lens" in batch:
        sizes = np.asarray(batch["seq_lens"], np.int64)
        begins = np.arange(len(sizes)) * batch.max_seq_len if batch.zero_padded else np.cumsum(sizes) - sizes
        rows = np.column_stack([rows[begins], sizes])
    return [tuple(row) for row in rows.tolist()]


class Rank:
    """What a DataLoader of one rank delivers."""

    def __init__(self, dataset: Dataset, state: JsonState | None, workers: int, **options: Any) -> None:
        self.readers = [DatasetReader(dataset, **options) for _ in range(max(workers, 1))]
        self.state = state
        self.turn = 0
        self.over = False
        for number, reader in enumerate(self.readers):
            if state is not None:
                reader.load_state_dict(state)
            self.begin = reader.state_dict()
            self._skip(reader, number)
        self.state = self.begin

    def _skip(self, reader: DatasetReader, n: int) -> None:
        with contextlib.suppress(EndOfData):
            reader.skip(n)

    def next(self) -> list[Key] | None:
        """The next batch; None at the end."""
        reader = self.readers[self.turn % len(self.readers)]
        try:
            found = keys(reader.sample())
        except EndOfData:
            found = None
        # What the main process knows once the batch was delivered.
        self.state = reader.state_dict()
        self._skip(reader, len(self.readers) - 1)
        self.turn += 1
        return found

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


class Ranks:
    """All ranks, which take their batches together."""

    def __init__(
        self, dataset: Dataset, state: JsonState | None, *, world: int, workers: int, **options: Any
    ) -> None:
        self.ranks = [Rank(dataset, state, workers, shard=(rank, world), **options) for rank in range(world)]

    def step(self) -> list[Key] | None:
        """The units of the next global step; None at the end."""
        found = [rank.next() for rank in self.ranks]
        return None if all(part is None for part in found) else list(chain(*(part or [] for part in found)))

    def state(self) -> JsonState:
        states = [rank.state for rank in self.ranks]
        assert all(state == states[0] for state in states), "states are equal after equal calls"
        text = json.dumps(states[0])
        assert len(text) < 1024, f"a state of {len(text)} bytes"
        return json.loads(text)  # type: ignore[no-any-return]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def options_of(kind: str, rng: random.Random) -> dict[str, Any]:
    """Those that a resumed reader must have too; where it keeps its rows is its own affair."""
    options = {"shuffle": True, **KINDS[kind]}
    if options["shuffle"]:
        options["seed"] = 5
    return {"cache": rng.choice(["memory", "disk"]), **options}


@pytest.mark.few(1)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "transitions",
        "sequences",
        "recorded",
        "cold windows",
        *further("n-step", "episodes", "filtered", "filtered sequences", "cold, recorded"),
    ],
)
@pytest.mark.each_value_once
def test_any_ranks_and_workers_go_on_where_any_others_stopped(
    dataset: Dataset, kind: str, drop_last: bool
) -> None:
    """All 9 combinations in turn, each going on where another one was stopped, over two epochs.

    Without a store the order is that of the lanes of an epoch, and each unit is served once in each.
    """
    rng = random.Random(f"{kind} {drop_last}")
    with DatasetReader(dataset, batch_size=10, epochs=1, **options_of(kind, rng)) as reader:
        total = len(reader)
    turns = [(world, workers) for world in (1, 2, 5) for workers in (0, 1, 3)]
    rng.shuffle(turns)
    epochs = 2
    with DatasetReader(dataset, batch_size=10, epochs=epochs, **options_of(kind, rng)) as reader:
        expected = list(chain.from_iterable(keys(batch) for batch in reader))
    assert len(expected) == epochs * total
    found: list[Key] = []
    state: JsonState | None = None
    for turn, (world, workers) in enumerate(turns):
        last = turn == len(turns) - 1
        left = (epochs * total - len(found)) / (len(turns) - turn)
        size = rng.randint(1, max(int(left / world), 1))
        options = {"batch_size": size, "epochs": epochs, "drop_last": drop_last, **options_of(kind, rng)}
        ranks = Ranks(dataset, state, world=world, workers=workers, **options)
        steps = 10**6 if last else rng.randint(0, max(round(left / (world * size)), 1))
        for _ in range(steps):
            units = ranks.step()
            if units is None:
                break
            found += units
        state = ranks.state()
        ranks.close()
    if KINDS[kind].get("cache") == "none":
        whole, rest = divmod(len(found), total)
        assert sorted(Counter(found).values()) == [whole] * (total - rest) + [whole + 1] * rest
        assert set(found) == set(expected)
    else:
        assert found == expected[: len(found)]
    # The last group of ranks went on to the end, but for what does not fill their batches.
    assert 0 <= len(expected) - len(found) < (world * size if drop_last else 1)


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_has_each_unit_once_in_an_order_of_its_own(dataset: Dataset, kind: str) -> None:
    rng = random.Random(kind)
    with DatasetReader(dataset, batch_size=7, epochs=2, **options_of(kind, rng)) as reader:
        served = list(chain.from_iterable(keys(batch) for batch in reader))
        total = len(reader)
    first, second = served[:total], served[total:]
    assert len(set(first)) == total
    assert sorted(first) == sorted(second)
    shuffled = KINDS[kind].get("shuffle", True)
    assert (first != second) == shuffled


def test_a_state_fits_no_other_data_and_no_other_draw(dataset: Dataset, tmp_path: Path) -> None:
    rng = random.Random(0)
    states = {}
    for kind in KINDS:
        with DatasetReader(dataset, batch_size=7, epochs=2, **options_of(kind, rng)) as reader:
            reader.sample()
            states[kind] = reader.state_dict()
    for kind in KINDS:
        with DatasetReader(dataset, batch_size=7, epochs=2, **options_of(kind, rng)) as reader:
            for other, state in states.items():
                if other == kind:
                    reader.load_state_dict(state)
                else:
                    with pytest.raises(StateError):
                        reader.load_state_dict(state)
    another = record_world(tmp_path, episodes=6, seed=1)
    with (
        DatasetReader(another.root, batch_size=7, epochs=2, **options_of("n-step", rng)) as reader,
        pytest.raises(StateError, match="snapshot"),
    ):
        reader.load_state_dict(states["n-step"])


def test_a_data_set_that_was_compacted_meanwhile_goes_on_in_the_same_order(tmp_path: Path) -> None:
    world = record_world(tmp_path, episodes=6)
    options = {"shuffle": True, "seed": 3, "epochs": 2, "batch_size": 50}
    with DatasetReader(world.root, cache="memory", **options) as reader:
        expected = [keys(batch) for batch in reader]
    with DatasetReader(world.root, cache="disk", **options) as reader:
        found = [keys(reader.sample()) for _ in range(9)]
        state = reader.state_dict()
    before = len(open_dataset(world.root).files())
    compact(world.root)
    assert len(open_dataset(world.root).files()) < before
    with DatasetReader(world.root, cache="disk", **options) as reader:
        reader.load_state_dict(state)
        found += [keys(batch) for batch in reader]
    assert found == expected


def test_a_snapshot_goes_on_while_the_data_set_grows(tmp_path: Path) -> None:
    world = record_world(tmp_path, episodes=6)
    snapshot = open_dataset(world.root).snapshot()
    options: dict[str, Any] = {
        "shuffle": True,
        "seed": 3,
        "epochs": 2,
        "batch_size": 50,
        "draw": rlio.NStep(3),
    }
    with DatasetReader(world.root, cache="memory", **options) as reader:
        expected = list(reader)
    with DatasetReader(world.root, cache="disk", **options) as reader:
        found = [reader.sample() for _ in range(9)]
        state = reader.state_dict()
    with ParquetWriter(world.root, writer_id="w00009-00000000", roll=Roll(max_rows=50)) as writer:
        rows = next(iter(DatasetReader(world.root, cache="none", epochs=1, batch_size=300)))
        writer.write(rows)
    for cache in ("disk", "memory"):
        with (
            DatasetReader(world.root, cache=cache, **options) as reader,
            pytest.raises(StateError, match="snap"),
        ):
            reader.load_state_dict(state)
        with DatasetReader(world.root, at=snapshot, cache=cache, **options) as reader:
            reader.load_state_dict(state)
            rest = list(reader)
        assert len(found) + len(rest) == len(expected)
        for ours, theirs in zip(found + rest, expected, strict=True):
            assert ours.equals(theirs)


# ---- large ----


class Numbers(Units):
    """Units that are nothing but their numbers."""

    sliceable = True

    def __init__(self, count: int) -> None:
        self._count = count

    @property
    def count(self) -> int:
        return self._count

    def batch(self, numbers: np.ndarray, also: Any = None) -> SampleBatch:
        return SampleBatch(number=numbers)


def pass_over(count: int, **options: Any) -> StorePass:
    store: Any = SimpleNamespace(
        units=lambda draw: Numbers(count),
        wait_unless=lambda given_up: True,
        row_bytes=8,
        digest="0" * 64,
        uri="memory://large",
    )
    return StorePass(store, Draw(), ReadOptions(shuffle=True, seed=7, **options))


@pytest.mark.parametrize("count", [10**8, 10**8 + 7, 5 * 10**9])
def test_a_hundred_million_rows_resume_at_once_with_other_ranks(count: int) -> None:
    """No row is calculated but those that are served: the state is a position."""
    order = Permutation(count, seed=7, epoch=1, key=(2,))
    one = pass_over(count, epochs=2, batch_size=1000, shard=(1, 3))
    one.skip((count + count // 2) // 3000)
    at = one.position()
    assert len(json.dumps(at)) < 1024
    assert at["epoch"] == 1
    start = at["position"]
    served = one.take(None)["number"]
    np.testing.assert_array_equal(served, order.take(start + 1000, start + 2000))
    for rank in range(8):
        other = pass_over(count, epochs=2, batch_size=64, shard=(rank, 8))
        other.seek(json.loads(json.dumps(at)))
        for step in range(3):
            first = start + step * 8 * 64 + rank * 64
            np.testing.assert_array_equal(other.take(None)["number"], order.take(first, first + 64))


def test_the_last_rows_of_a_hundred_million_are_dealt_to_all_ranks() -> None:
    count, world = 10**8 + 1007, 8
    order = Permutation(count, seed=7, epoch=0, key=(2,))
    found = []
    for rank in range(world):
        reader = pass_over(count, epochs=1, batch_size=1000, shard=(rank, world))
        reader.skip(count // (1000 * world))
        found.append(reader.take(None)["number"])
        with pytest.raises(EndOfData):
            reader.take(None)
    assert {len(part) for part in found} <= {count % 8000 // 8, count % 8000 // 8 + 1}
    np.testing.assert_array_equal(np.concatenate(found), order.take(count - count % 8000, count))
