"""Ranks read their shares: an epoch is dealt to lanes before it is read, and any number of ranks goes on."""

from __future__ import annotations

import json
import logging
from collections import Counter
from concurrent.futures import wait
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import further
from growing_data import A, grow, remove_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import files, fresh_root, group_bytes, numbered, put, store

import rlio
from rlio import DatasetReader, MultiAgentBatch, Roll, SampleBatch
from rlio.batch import Batch
from rlio.errors import CorruptData, EndOfData, StateError
from rlio.query.lanes import LaneOrder, lane_bounds, lane_parts, lanes_of_rank
from rlio.query.positions import UnitRange, spans_of
from rlio.read_options import ReadOptions
from rlio.readers.group_source import Groups
from rlio.readers.lanes import LanedOrder, Orders
from rlio.source.ahead import Ahead
from rlio.source.selection import group_options
from rlio.storage.filesystem import Storage

WORLDS = (1, 2, 3, 5, 8)
GOLDEN_PIECES = [[(2, 2, 4), (7, 0, 4)], [(3, 0, 4), (1, 0, 3)]]
GOLDEN_ROWS = [5, 3, 2, 4, 1, 0]


# ---- lanes: who gets which unit ----


@given(total=st.integers(1, 300), lanes=st.integers(1, 40))
def test_lanes_follow_each_other_and_differ_by_one_unit(total: int, lanes: int) -> None:
    bounds = [lane_bounds(total, lanes, lane) for lane in range(lanes)]
    assert [bounds[0][0], *(stop for _, stop in bounds)] == [*(first for first, _ in bounds), total]
    assert [stop - first for first, stop in bounds] == [
        len(range(lane, total, lanes)) for lane in range(lanes)
    ]


@given(
    total=st.integers(1, 60),
    lanes=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    world=st.integers(1, 12),
    offset=st.integers(0, 59),
    size=st.integers(1, 12),
)
def test_a_step_gives_each_rank_equally_many_units_and_all_of_them_once(
    total: int, lanes: list[int], world: int, offset: int, size: int
) -> None:
    """Also a step that spans epochs of other numbers of lanes."""
    start = offset % total
    stop = min(start + world * size, 4 * total)
    spans = list(spans_of(0, start, stop, total))
    found: Counter[tuple[int, int]] = Counter()
    counts = []
    for rank in range(world):
        parts = [
            part
            for span in spans
            for part in lane_parts(span, lanes[span.epoch], total=total, shard=(rank, world))
        ]
        units = [
            (p.epoch, place * p.lanes + p.lane) for p in parts for place in range(p.start, p.stop, p.step)
        ]
        found.update(units)
        counts.append(len(units))
    assert found == Counter((span.epoch, n) for span in spans for n in range(span.start, span.stop))
    assert max(counts) - min(counts) <= (stop - start < world * size)


@given(lanes=st.integers(1, 24), world=st.integers(1, 24), epoch=st.integers(0, 3))
def test_ranks_that_divide_the_lanes_have_lanes_of_their_own(lanes: int, world: int, epoch: int) -> None:
    parts = [
        lane_parts(UnitRange(epoch, 0, 1000), lanes, total=1000, shard=(rank, world)) for rank in range(world)
    ]
    assert all(len(own) == lanes_of_rank(lanes, world) for own in parts)
    readers = Counter(part.lane for part in chain(*parts))
    shared = lanes % world != 0
    assert all((count > 1) == shared for count in readers.values())
    assert all(part.step == 1 for part in chain(*parts)) == (not shared)


@given(
    stretches=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    lanes=st.integers(1, 9),
    window=st.integers(1, 20),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 2),
)
def test_the_lanes_of_an_epoch_are_one_permutation(
    stretches: list[int], lanes: int, window: int, seed: int, epoch: int
) -> None:
    units = [(number, n) for number, size in enumerate(stretches) for n in range(size)]
    served = []
    for lane in range(lanes):
        order = LaneOrder(stretches, seed=seed, window_rows=window, lanes=lanes, lane=lane)
        position = 0
        while position < len(order):
            found = order.window_at(epoch, position)
            assert found.start_position == position
            assert found.rows <= window or len(found.groups) == 1
            there = [(p.stretch, n) for p in order.pieces(epoch, found) for n in range(p.start, p.stop)]
            served += [there[row] for row in order.rows_in(epoch, found)]
            position = found.stop_position
        assert position == len(order) == len(range(lane, len(units), lanes))
    assert sorted(served) == units


def test_lanes_are_dealt_again_in_each_epoch_and_have_golden_pieces() -> None:
    order = LaneOrder([4] * 10, seed=7, window_rows=8, lanes=3, lane=1)

    def windows(epoch: int) -> list[list[tuple[int, int, int]]]:
        found, position = [], 0
        while position < len(order):
            window = order.window_at(epoch, position)
            found.append([(p.stretch, p.start, p.stop) for p in order.pieces(epoch, window)])
            position = window.stop_position
        return found

    assert windows(0) == GOLDEN_PIECES
    assert windows(1) != windows(0) == windows(0)
    assert order.rows_in(0, order.window_at(0, 0)).tolist() == GOLDEN_ROWS


# ---- readers ----


def _joint() -> list[Batch]:
    t = np.arange(60)
    a = SampleBatch(t=t, eps_id=t * 0)
    return list(MultiAgentBatch({"a": a, "b": a[10:]}, 60).timeslices(3))


KINDS: dict[str, Any] = {
    "rows": lambda: [numbered(121)],
    "sequences": lambda: [numbered(120, seq_lens=np.tile(np.arange(1, 6, dtype=np.int32), 8))],
    "joint steps": _joint,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True, "seed": 3},
    "filtered": {"shuffle": True, "seed": 3, "filter": "t != 50"},
    "filtered in order": {"filter": "t > 30"},
}


@pytest.fixture(scope="module")
def roots() -> dict[str, str]:
    with group_bytes(150):
        return {
            kind: store(*make(), roll=Roll(max_rows=25, max_seconds=None)) for kind, make in KINDS.items()
        }


def reader_of(root: str, **options: Any) -> DatasetReader:
    return DatasetReader(root, **{"cache": "none", "batch_size": 3, "epochs": 3, **options})


def units_of(batch: Batch) -> list[Any]:
    if isinstance(batch, MultiAgentBatch):  # "a" has every step.
        assert set(batch["b"]["t"].tolist() if "b" in batch else ()) == {
            t for t in batch["a"]["t"].tolist() if t >= 10
        }
        return batch["a"]["t"].tolist()  # type: ignore[no-any-return]
    if "seq_lens" not in batch:
        return batch["t"].tolist()  # type: ignore[no-any-return]
    lens = batch["seq_lens"]
    rows = np.split(batch["t"], np.cumsum(lens)[:-1])
    return [tuple(each.tolist()) for each in rows]


CASES = [
    ("joint steps", "shuffled"),
    ("rows", "in order"),
    *further(
        ("rows", "shuffled"),
        ("rows", "filtered"),
        ("rows", "filtered in order"),
        ("joint steps", "in order"),
        ("sequences", "in order"),
        ("sequences", "shuffled"),
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "order"), CASES)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_each_unit_is_served_once_an_epoch_also_where_the_number_of_ranks_changes(
    roots: dict[str, str], kind: str, order: str, data: st.DataObject
) -> None:
    root, options = roots[kind], OPTIONS[order]
    with reader_of(root, **options, epochs=1) as alone:
        every = sorted(chain.from_iterable(map(units_of, alone)))
    worlds = data.draw(st.lists(st.sampled_from(WORLDS), min_size=1, max_size=5))
    served: list[Any] = []
    state: Any = None
    for number, world in enumerate(worlds):
        size = data.draw(st.integers(1, 6))
        steps = data.draw(st.integers(0, 9)) if number < len(worlds) - 1 else None
        found: list[list[list[Any]]] = []
        states = []
        for rank in range(world):
            with reader_of(root, **options, shard=(rank, world), batch_size=size) as reader:
                if state is not None:
                    reader.load_state_dict(state)
                found.append([])
                while steps is None or len(found[-1]) < steps:
                    try:
                        found[-1].append(units_of(reader.sample()))
                    except EndOfData:
                        break
                states.append(reader.state_dict())
        assert all(other == states[0] for other in states)
        lengths = [sum(map(len, batches)) for batches in found]
        assert max(lengths) - min(lengths) <= 1
        served += chain.from_iterable(chain.from_iterable(found))
        state = json.loads(json.dumps(states[0]))
        assert len(json.dumps(state)) < 1024
        # What was served so far is whole epochs, and a part of the next.
        whole, rest = divmod(len(served), len(every))
        counts = Counter(served)
        assert set(counts.values()) <= {whole, whole + 1}
        assert sum(count == whole + 1 for count in counts.values()) == rest
    assert sorted(served) == sorted(every * 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_joint_steps_of_lanes_that_ranks_share_are_served_once(roots: dict[str, str], order: str) -> None:
    """Three ranks begin, and five end: the steps of a shuffled batch have other numbers than places."""
    options = {**OPTIONS[order], "epochs": 1}
    served: list[Any] = []
    for rank in range(3):
        with reader_of(roots["joint steps"], **options, shard=(rank, 3), batch_size=2) as reader:
            served += chain.from_iterable(units_of(reader.sample()) for _ in range(3))
            state = reader.state_dict()
    for rank in range(5):
        with reader_of(roots["joint steps"], **options, shard=(rank, 5), batch_size=6) as reader:
            reader.load_state_dict(state)
            served += chain.from_iterable(map(units_of, reader))
    assert sorted(served) == list(range(60))


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.parametrize(("lanes", "world"), [(8, 3), *further((8, 8), (8, 2), (5, 1), (1, 3))])
def test_a_restored_rank_gives_what_it_would_have_given(
    roots: dict[str, str], order: str, lanes: int, world: int
) -> None:
    """Of lanes of its own, of several, and of parts of all."""
    options = {**OPTIONS[order], "shard": (world - 1, world)}
    with reader_of(roots["rows"], **OPTIONS[order], shard=(0, lanes)) as begun:
        begun.sample(2)
        state = begun.state_dict()
    for steps in (0, 4, 11):
        with reader_of(roots["rows"], **options) as one:
            one.load_state_dict(state)
            for _ in range(steps):
                one.sample()
            middle = one.state_dict()
            rest = [units_of(batch) for batch in one]
        with reader_of(roots["rows"], **options) as other:
            other.load_state_dict(middle)
            assert [units_of(batch) for batch in other] == rest
        with reader_of(roots["rows"], **options) as skipping:
            skipping.load_state_dict(state)
            skipping.skip(steps)
            assert [units_of(batch) for batch in skipping] == rest


@pytest.mark.few(2)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.each_value_once
def test_in_order_each_rank_reads_its_share_in_stored_order(roots: dict[str, str], world: int) -> None:
    shares = []
    for rank in range(world):
        with reader_of(roots["rows"], shard=(rank, world), epochs=1) as reader:
            shares.append(list(chain.from_iterable(map(units_of, reader))))
    assert list(chain(*shares)) == list(range(121))


def test_one_reader_finishes_an_epoch_of_eight_and_is_in_stored_order_again(roots: dict[str, str]) -> None:
    served = []
    for rank in range(8):
        with reader_of(roots["rows"], shard=(rank, 8)) as reader:
            served += units_of(reader.sample())
            state = reader.state_dict()
    with reader_of(roots["rows"]) as alone:
        alone.load_state_dict(state)
        rest = list(chain.from_iterable(map(units_of, alone)))
    left = 121 - len(served)
    assert sorted(served + rest[:left]) == list(range(121))
    assert rest[left:] == [*range(121)] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_ranks_go_on_where_one_reader_stopped_and_have_shares_in_the_next_epoch(
    roots: dict[str, str], order: str, caplog: pytest.LogCaptureFixture
) -> None:
    with reader_of(roots["rows"], **OPTIONS[order]) as alone:
        state, begun = alone.state_dict(), units_of(alone.sample(50))
        middle = alone.state_dict()
    for at, says in ((state, False), (middle, True)):
        served = [] if at is state else list(begun)
        caplog.clear()
        for rank in range(2):
            with reader_of(roots["rows"], **OPTIONS[order], shard=(rank, 2)) as reader:
                with caplog.at_level(logging.WARNING):
                    reader.load_state_dict(at)
                assert ("reads more than its share, because 1 began epoch 0" in caplog.text) == says
                served += chain.from_iterable(map(units_of, reader))
                assert reader.state_dict()["position"]["lanes"] == 2
        assert sorted(served) == sorted([*range(121)] * 3)


def test_ranks_in_order_go_on_where_shards_were_compacted_and_removed() -> None:
    root = fresh_root()
    refs = [grow(root, A, first, 10) for first in (0, 10, 20)]
    ranks = [reader_of(root, epochs=1, batch_size=2, shard=(rank, 2)) for rank in range(2)]
    served = [units_of(rank.sample()) for rank in ranks]
    grow(root, A, 0, 30, limit=10**6)
    for ref in refs:
        remove_shard(root, ref)
    for rank, own in zip(ranks, served, strict=True):
        with rank:
            own += chain.from_iterable(map(units_of, rank))
    assert served == [[*range(15)], [*range(15, 30)]]


def test_a_lane_keeps_its_rows_where_its_order_is_opened_for_it(
    roots: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After shards were listed again, the next epoch may be the first that is dealt."""
    load, loaded = LanedOrder._load, []

    def counted(self: LanedOrder, wanted: Any) -> Any:
        window = load(self, wanted)
        loaded.extend((wanted[0], each.index) for each in wanted[1][: window.count])
        return window

    monkeypatch.setattr(LanedOrder, "_load", counted)
    source = rlio.open_dataset(roots["rows"])
    options = group_options(source, ReadOptions(), "error")
    orders = Orders(lambda: Groups(source, options, set()), seed=3, world=2)
    with closing(orders):
        parts = [UnitRange(1, start, start + 1, 0, 2) for start in range(4)]
        served = [each.batch.agent_steps() for part in parts for each in orders.units(part)]
    assert served == [1, 1, 1, 1]
    assert len(set(loaded)) == len(loaded)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_damaged_shard_is_an_error_of_the_rank_that_has_it_until_it_is_mended(shuffle: bool) -> None:
    root = store(numbered(100), roll=Roll(max_rows=10, max_seconds=None))
    path, data = list(files(root).items())[4]
    put(path, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None, "epochs": 1}
    served, failed = [], 0
    for rank in range(3):
        with reader_of(root, **options, shard=(rank, 3)) as reader:
            while True:
                try:
                    served += units_of(reader.sample())
                except EndOfData:
                    break
                except CorruptData:
                    failed += 1
                    put(path, data)
            put(path, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    assert sorted(served) == list(range(100))
    assert failed in (1, 2)  # A lane may end within the shard.


def test_states_of_other_versions_and_forged_lanes_are_refused(roots: dict[str, str]) -> None:
    for options in (OPTIONS["in order"], OPTIONS["shuffled"]):
        with reader_of(roots["rows"], **options, shard=(0, 2)) as reader:
            reader.sample()
            state = reader.state_dict()
            for lanes in (1, 0, -1, "2", 2.0, None, 2**70):
                forged = {**state, "position": {**state["position"], "lanes": lanes}}
                with pytest.raises(StateError, match=r"order|lanes"):
                    reader.load_state_dict(forged)
            more = {**state, "position": {**state["position"], "lanes": 2**40}}
            reader.load_state_dict(more)  # It takes no memory, and no time.
            assert len(reader.sample()["t"]) == 3


# ---- what is fetched ----


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    with rlio.ParquetWriter(root, roll=Roll(max_rows=300, max_seconds=None)) as writer:
        for first in range(0, 24_000, 300):
            obs = rng.normal(size=(300, 60)).astype(np.float32)
            writer.write(SampleBatch(obs=obs, t=np.arange(first, first + 300)))
    return root


def fetched(monkeypatch: pytest.MonkeyPatch, root: Any, **options: Any) -> tuple[int, int, list[int]]:
    """Requests for shards, their bytes, and the rows of a reader."""
    calls: list[int] = []
    real = Storage._read

    def counted(self: Storage, path: str, start: int, stop: int | None) -> bytes:
        found = real(self, path, start, stop)
        if path.endswith(".parquet"):
            calls.append(len(found))
        return found

    announce = Ahead.announce

    def finished(self: Ahead[Any], key: Any, load: Any) -> None:
        """Read ahead at once: otherwise the thread may not have begun when the reader is closed."""
        announce(self, key, load)
        assert self._announced is not None
        wait([self._announced[1]])

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "_read", counted)
        patch.setattr(Ahead, "announce", finished)
        with rlio.read(root, cache="none", batch_size=50, epochs=1, **options) as reader:
            rows = [t for batch in reader for t in batch["t"].tolist()]
    return len(calls), sum(calls), rows


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [8, *further(2, 3, 5)])
@pytest.mark.each_value_once
def test_a_rank_fetches_its_share(
    shards: Path, monkeypatch: pytest.MonkeyPatch, world: int, shuffle: bool
) -> None:
    """Eight ranks fetched 13 times what one reader fetches, in recorded order, and 8 times shuffled."""
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None}
    requests, size, rows = fetched(monkeypatch, shards, **options)
    each = [fetched(monkeypatch, shards, **options, shard=(rank, world)) for rank in range(world)]
    assert sorted(chain(*(own for _, _, own in each))) == sorted(rows) == list(range(24_000))
    assert max(own for _, own, _ in each) <= 1.2 * size / world
    assert max(own for own, _, _ in each) <= 1.2 * requests / world
    if not shuffle and 80 % world == 0:  # Lanes end where shards end, and nothing beyond is read ahead.
        assert sum(own for own, _, _ in each) == requests


@pytest.mark.further
def test_a_rank_fetches_its_share_of_several_roots(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    with rlio.ParquetWriter(other, roll=Roll(max_rows=300, max_seconds=None)) as writer:
        rows = np.arange(24_000, 30_000)
        writer.write(SampleBatch(obs=np.zeros((6000, 60), np.float32), t=rows))
    roots, options = [shards, other], {"shuffle": True, "seed": 1}
    _, size, _ = fetched(monkeypatch, roots, **options)
    each = [fetched(monkeypatch, roots, **options, shard=(rank, 4)) for rank in range(4)]
    assert sorted(chain(*(own for _, _, own in each))) == list(range(30_000))
    assert sum(own for _, own, _ in each) <= 1.2 * size
