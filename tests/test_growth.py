"""``DatasetReader(grow=True)``: each epoch reads what is there when it begins, and a state resumes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import further
from growing_data import A, B, C, drain, encode, publish, remove_shard, trim
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import assert_identical, files, fresh_root, numbered, put, store

import rlio
from rlio import DatasetReader, ReplayStore, SampleBatch
from rlio.batch import Batch
from rlio.errors import CorruptData, EndOfData, HoleError, OptionError, StateError
from rlio.readers import growing_pass, stored_pass
from rlio.testing import ReaderTests

# Every way to read: recorded order or shuffled, decoded or from a store, with a filter or without.
WAYS: dict[str, dict[str, Any]] = {
    "recorded": {"cache": "none"},
    "windows": {"cache": "none", "shuffle": True},
    "filtered": {"cache": "none", "shuffle": True, "filter": "t != 3"},
    "skipping": {"cache": "none", "shuffle": True, "on_error": "skip"},
    "memory": {"cache": "memory", "shuffle": True},
    "disk": {"cache": "disk", "shuffle": True, "filter": "t != 3"},
    "n_step": {"cache": "memory", "draw": rlio.NStep(2), "columns": ["t"]},
}
#: For what takes long: of a reader as it reads, of one that filters, and of one with a store.
FEW = ["recorded", "filtered", "memory", *further("windows", "skipping", "disk", "n_step")]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


def open_reader(root: str, **options: Any) -> DatasetReader:
    options.setdefault("seed", 5 if options.get("shuffle") else None)
    return DatasetReader(root, **{"grow": True, "batch_size": 4, **options})


def add(root: str, writer: str, first: int, rows: int, *, t0: int | None = None) -> Any:
    """Rows ``first`` and on of a writer, counted in ``t`` from ``t0``."""
    t = np.arange(rows) + (first if t0 is None else t0)
    flags = np.zeros(rows, bool)
    batch = SampleBatch(
        t=t, obs=np.zeros((rows, 3), np.float32), rewards=t.astype(np.float32),
        terminateds=flags, truncateds=flags,
    )  # fmt: skip
    return publish(root, writer, first, encode(batch, limit=200))


def passing(ts: list[int], options: dict[str, Any]) -> list[int]:
    return sorted(t for t in ts if t != 3 or "filter" not in options)


class TestGrowing(ReaderTests):
    """The contract of all readers; its data does not grow."""

    def make_reader(self) -> DatasetReader:
        if not hasattr(type(self), "root"):
            type(self).root = store(numbered(31))
        return open_reader(type(self).root, batch_size=9, epochs=1, cache="none")

    def expected_rows(self) -> SampleBatch:
        return numbered(31)


class TestGrowingStore(TestGrowing):
    ordered = False

    def make_reader(self) -> DatasetReader:
        super().make_reader().close()
        return open_reader(type(self).root, batch_size=9, epochs=1, cache="memory", shuffle=True)


class TestEndless(TestGrowing):
    finite = False
    batches = 9

    def make_reader(self) -> DatasetReader:
        super().make_reader().close()
        return open_reader(type(self).root, batch_size=9)


# ---- what an epoch reads ----


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_reads_what_is_there_when_it_begins(way: str) -> None:
    options, root = WAYS[way], fresh_root()
    add(root, A, 0, 10)
    with open_reader(root, epochs=3, batch_size=1, **options) as reader:
        sizes, epochs = [], []
        for number in range(3):
            first = reader.sample()["t"].tolist()
            if number == 0:
                add(root, A, 10, 5)  # In the middle of epoch 0: for epoch 1.
            elif number == 1:
                add(root, B, 0, 7, t0=100)
            sizes.append(len(reader))
            epochs.append(first + [reader.sample()["t"].item() for _ in range(len(reader) - 1)])
            assert reader.epoch == number + 1
        with pytest.raises(EndOfData):
            reader.sample()
        rows = [list(range(10)), list(range(15)), [*range(15), *range(100, 107)]]
        assert [sorted(epoch) for epoch in epochs] == [passing(found, options) for found in rows]
        assert sizes == [len(passing(found, options)) for found in rows]


@pytest.mark.each_value_once
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_go_on_from_epoch_to_epoch(way: str, drop_last: bool) -> None:
    """Only the last one is short, or dropped."""
    options, root = WAYS[way], fresh_root()
    add(root, A, 0, 9)
    with open_reader(root, epochs=2, drop_last=drop_last, **options) as reader:
        sizes = [len(reader.sample())]
        add(root, A, 9, 9)
        first = len(reader)
        sizes += [len(batch) for batch in reader]
        total = first + len(reader)
        rest = total % 4
        assert rest
        assert sizes == [4] * (total // 4) + ([] if drop_last else [rest])
        with pytest.raises(EndOfData):
            reader.sample()


def test_a_batch_larger_than_an_epoch_has_several() -> None:
    root = fresh_root()
    add(root, A, 0, 3)
    with open_reader(root, epochs=9, cache="none") as reader:
        assert reader.sample(8)["t"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
        add(root, A, 3, 1)
        assert reader.sample(8)["t"].tolist() == [2, 0, 1, 2, 3, 0, 1, 2]
        assert reader.epoch == 4


def test_a_batch_of_an_endless_reader_that_is_larger_than_an_epoch_is_refused() -> None:
    root = fresh_root()
    add(root, A, 0, 3)
    with open_reader(root, epochs=None, cache="none") as reader:
        reader.sample(2)
        for _ in range(2):
            with pytest.raises(OptionError):
                reader.sample(5)
        add(root, A, 3, 1)
        assert reader.sample(5)["t"].tolist() == [2, 0, 1, 2, 3]
        assert reader.epoch == 2


def test_the_order_of_an_epoch_is_that_of_a_reader_of_its_snapshot() -> None:
    """And of its number: growth does not begin to count again."""
    root = fresh_root()
    add(root, A, 0, 10)
    for way in ("windows", "memory"):
        with open_reader(root, batch_size=1, **WAYS[way]) as reader:
            for _ in range(10):
                reader.sample()
            found = [reader.sample()["t"].item() for _ in range(len(reader))]
        with DatasetReader(root, batch_size=1, epochs=2, seed=5, **WAYS[way]) as plain:
            assert found == drain(plain)[10:]


def test_where_nothing_has_been_added_nothing_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    root = fresh_root()
    add(root, A, 0, 10)
    opened: list[Any] = []
    real = ReplayStore.of.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, *args: Any, **options: Any) -> ReplayStore:
        opened.append(1)
        return real(cls, *args, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(ReplayStore, "of", classmethod(counted))
    with open_reader(root, epochs=4, cache="memory", shuffle=True) as reader:
        assert len(drain(reader)) == 40
    assert len(opened) == 1


def test_rows_that_are_trimmed_go_with_the_next_epoch() -> None:
    root = fresh_root()
    add(root, A, 0, 4)
    add(root, A, 4, 4)
    with open_reader(root, epochs=2, cache="none") as reader:
        found = reader.sample()["t"].tolist()
        trim(root, A, 4, delete=False)
        assert found + drain(reader) == [*range(8), 4, 5, 6, 7]


def test_a_new_epoch_takes_what_was_compacted_as_it_lies_now() -> None:
    """Without growth, the order could not go on over other row groups."""
    root = fresh_root()
    refs = [add(root, A, first, 10) for first in (0, 10)]
    with open_reader(root, epochs=2, cache="none", shuffle=True, batch_size=20) as reader:
        assert sorted(reader.sample()["t"].tolist()) == list(range(20))
        add(root, A, 0, 20)
        for ref in refs:
            remove_shard(root, ref)
        assert sorted(reader.sample()["t"].tolist()) == list(range(20))


def test_auto_chooses_for_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    root = fresh_root()
    add(root, A, 0, 10)
    with open_reader(root, epochs=2, shuffle=True) as reader:
        assert reader.cache == "memory"
        reader.sample()
        monkeypatch.setattr(stored_pass, "_MEMORY_BYTES", 600)
        add(root, B, 0, 30, t0=10)
        assert len(drain(reader)) == 46
        assert reader.cache == "disk"


def test_where_nothing_is_there_it_ends_and_looks_again_at_the_next_call() -> None:
    for way in ("recorded", "memory"):
        root = fresh_root()
        rlio.ParquetWriter(root).close()
        with open_reader(root, epochs=1, **WAYS[way]) as reader:
            for _ in range(2):
                with pytest.raises(EndOfData, match="no"):
                    reader.sample()
            state = reader.state_dict()
            add(root, A, 0, 5)
            assert sorted(drain(reader)) == list(range(5))
        with open_reader(root, epochs=1, **WAYS[way]) as reader:
            reader.load_state_dict(state)
            assert sorted(drain(reader)) == list(range(5))


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_columns_of_later_writers_follow_the_rule(cache: Any) -> None:
    for missing, last in (("fill", ["t", "obs", "speed"]), ("drop", ["t", "obs"])):
        root = store(numbered(5), writer_id=A)
        with open_reader(root, epochs=2, cache=cache, missing=missing) as reader:
            assert list(reader.sample()) == ["t", "obs"]
            store(numbered(5, 5, speed=np.ones(5)), root=root, writer_id=B)
            batches = list(reader)
        assert [len(batch) for batch in batches] == [4, 4, 3]
        assert all(sorted(batch) == sorted(last) for batch in batches)
        assert np.concatenate([batch["t"] for batch in batches]).tolist() == [4, *range(10)]
    root = store(numbered(5, new_obs=np.zeros((5, 3), np.float32)), writer_id=A)
    with open_reader(root, epochs=2, cache=cache, missing="error") as reader:
        reader.sample()
        rows = numbered(5, 5, new_obs=np.zeros((5, 3), np.float32), new_obs_valid=np.zeros(5, bool))
        store(rows, root=root, writer_id=B)
        assert (
            np.concatenate([batch["new_obs_valid"] for batch in reader]).tolist() == [True] * 6 + [False] * 5
        )


# ---- resuming ----

Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.just("sample"), st.integers(1, 13))
    | st.tuples(st.just("grow"), st.integers(1, 6))
    | st.tuples(st.just("restore"), st.just(0)),
    min_size=3,
    max_size=12,
)


@pytest.mark.parametrize("way", FEW)
@settings(max_examples=3, deadline=None)
@given(steps=STEPS, epochs=st.sampled_from([None, 3]))
def test_a_restored_reader_goes_on_like_the_one_that_was_saved_whatever_was_added(
    way: str, steps: list[Step], epochs: int | None
) -> None:
    """Two readers in step, of which one is thrown away and recreated from its state again and again."""
    options, root = WAYS[way], fresh_root()
    ends = {A: 5, B: 0, C: 0}
    add(root, A, 0, 5)
    readers = [open_reader(root, epochs=epochs, **options) for _ in range(2)]
    for index, (what, n) in enumerate(steps):
        if what == "grow":
            writer = (A, B, C)[index % 3]
            add(root, writer, ends[writer], n)
            ends[writer] += n
        elif what == "restore":
            state = json.loads(json.dumps(readers[1].state_dict()))
            readers[1].close()
            readers[1] = open_reader(root, epochs=epochs, **options)
            readers[1].load_state_dict(state)
        else:
            found = [sampled(reader, n) for reader in readers]
            assert (found[0] is None) == (found[1] is None)
            if found[0] is not None:
                assert_identical(found[1], found[0])
        assert readers[0].state_dict() == readers[1].state_dict()
        assert (readers[0].epoch, len(readers[0])) == (readers[1].epoch, len(readers[1]))
    for reader in readers:
        reader.close()


def sampled(reader: DatasetReader, n: int | None = None) -> Batch | None:
    """The next batch; None at the end, or where an endless reader has too few rows."""
    try:
        return reader.sample(n)
    except (EndOfData, OptionError):
        return None


@pytest.mark.parametrize("way", ["skipping", "memory", *further("recorded", "windows")])
@settings(max_examples=3, deadline=None)
@given(
    steps=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    drop_last=st.booleans(),
    epochs=st.sampled_from([None, 2, 5]),
)
def test_skipping_leads_where_reading_leads(
    way: str, steps: list[int], drop_last: bool, epochs: int | None
) -> None:
    options, root = WAYS[way] | {"drop_last": drop_last, "epochs": epochs}, fresh_root()
    add(root, A, 0, 6)
    with open_reader(root, **options) as one, open_reader(root, **options) as other:
        for index, n in enumerate(steps):
            read = [sampled(other) for _ in range(n)]
            try:
                one.skip(n)
                assert None not in read
            except EndOfData:
                assert None in read
            assert one.state_dict() == other.state_dict()
            ours, theirs = sampled(one), sampled(other)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert_identical(ours, theirs)
            add(root, B, index * 3, 3)


@pytest.mark.parametrize("way", ["windows", "memory"])
def test_a_seed_that_was_drawn_stays_the_seed(way: str) -> None:
    root = fresh_root()
    add(root, A, 0, 10)
    with open_reader(root, seed=None, **WAYS[way]) as reader:
        seed = reader.seed
        reader.sample(8)
        state = reader.state_dict()
        add(root, B, 0, 5, t0=50)
        found = reader.sample(16)
        assert reader.seed == seed is not None
    with open_reader(root, seed=None, **WAYS[way]) as other:
        assert other.seed != seed
        other.load_state_dict(state)
        assert_identical(other.sample(16), found)
        assert other.seed == seed


@pytest.mark.parametrize("way", ["windows", "memory"])
def test_a_reader_goes_back_to_its_own_state_also_over_epochs_without_growth(way: str) -> None:
    root = fresh_root()
    add(root, A, 0, 10)
    with open_reader(root, epochs=3, **WAYS[way]) as reader:
        start = reader.state_dict()
        first = reader.sample(12)
        state = reader.state_dict()
        rest = reader.sample(15)
        reader.load_state_dict(state)
        assert_identical(reader.sample(15), rest)
        reader.load_state_dict(start)
        assert_identical(reader.sample(12), first)
        assert len(reader.sample(30)["t"]) == 18


def test_the_state_holds_the_snapshot_of_its_epoch() -> None:
    root = fresh_root()
    add(root, A, 0, 6)
    with open_reader(root, cache="none") as reader:
        at_first = reader.dataset.snapshot()
        reader.sample()
        add(root, B, 0, 6)
        assert reader.state_dict()["position"]["at"] == at_first == {A: 6}
        reader.sample()
        assert reader.state_dict()["position"]["at"] == {A: 6, B: 6}
        assert reader.dataset.snapshot() == {A: 6, B: 6}


def test_after_states_that_do_not_fit_a_reader_goes_on_from_one_that_does() -> None:
    root = fresh_root()
    add(root, A, 0, 6)
    with open_reader(root, cache="none", epochs=2) as reader, DatasetReader(root, cache="none") as plain:
        found = reader.sample()["t"].tolist()
        state = reader.state_dict()
        position = state["position"]
        for change, why in (
            (plain.state_dict()["position"], "without grow"),
            (position | {"at": {"no/writer": 3}}, "not a snapshot"),
            (position | {"at": {A: "6"}}, "not a snapshot"),
            (position | {"at": {A: 5}}, "snapshot"),
            (position | {"epoch": 3}, "epoch"),
            (position | {"options": position["options"] | {"epochs": "3"}}, "epochs"),
            (position | {"options": position["options"] | {"on_error": "skip"}}, "on_error"),
        ):
            with pytest.raises(StateError, match=why):
                reader.load_state_dict(state | {"position": change})
            with pytest.raises(StateError):
                reader.sample()
            reader.load_state_dict(state)
            assert reader.state_dict() == state
        assert found + drain(reader) == [*range(6), *range(6)]


def test_a_snapshot_whose_rows_are_gone_is_an_error_that_says_so() -> None:
    root = fresh_root()
    add(root, A, 0, 6)
    add(root, A, 6, 6)
    with open_reader(root, cache="none") as reader:
        reader.sample()
        state = reader.state_dict()
    trim(root, A, 6)
    with open_reader(root, cache="none") as reader, pytest.raises(HoleError, match="trimmed since"):
        reader.load_state_dict(state)


# ---- failures ----


@pytest.mark.parametrize("way", ["recorded", "windows", "memory"])
def test_a_failure_between_two_epochs_loses_no_rows(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the epoch that has ended were taken for the batch that failed."""
    root = fresh_root()
    add(root, A, 0, 6)
    add(root, B, 0, 5, t0=50)

    def away(*args: Any, **options: Any) -> Any:
        raise ConnectionError("the store is away")

    with open_reader(root, epochs=2, **WAYS[way]) as reader:
        found = reader.sample()["t"].tolist() + reader.sample()["t"].tolist()
        state = reader.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(growing_pass, "dataset_on", away)
            for _ in range(2):
                with pytest.raises(ConnectionError):
                    reader.sample()
                assert reader.state_dict() == state
        found += drain(reader)
        assert sorted(found[:11]) == sorted(found[11:]) == [*range(6), *range(50, 55)]


@pytest.mark.parametrize("way", ["recorded", "windows", "memory"])
def test_damage_in_what_was_added_is_raised_until_it_is_mended(way: str) -> None:
    root = fresh_root()
    add(root, A, 0, 6)
    with open_reader(root, epochs=2, **WAYS[way]) as reader:
        found = reader.sample()["t"].tolist()
        add(root, B, 0, 5, t0=50)
        path, content = next((path, data) for path, data in files(root).items() if B in path)
        put(path, content[:12] + bytes([content[12] ^ 1]) + content[13:])
        state = reader.state_dict()
        for _ in range(2):
            with pytest.raises(CorruptData):
                reader.sample(13)
            assert reader.state_dict() == state
        put(path, content)
        found += drain(reader)
        assert sorted(found[:6]) == list(range(6))
        assert sorted(found[6:]) == [*range(6), *range(50, 55)]


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_damage_that_is_skipped_is_counted_once(cache: Any) -> None:
    root = fresh_root()
    add(root, A, 0, 6)
    with open_reader(root, epochs=3, cache=cache, on_error="skip") as reader:
        found = reader.sample()["t"].tolist()
        add(root, B, 0, 5, t0=50)
        path, content = next((path, data) for path, data in files(root).items() if B in path)
        put(path, content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        assert sorted(found + drain(reader)) == sorted([*range(6)] * 3)
        assert reader.skipped == 5


def test_where_all_is_damaged_it_does_not_go_round_for_ever() -> None:
    root = fresh_root()
    add(root, A, 0, 6)
    ((path, content),) = files(root).items()
    put(path, content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with (
        open_reader(root, cache="none", on_error="skip") as reader,
        pytest.raises(CorruptData, match="every row of an epoch is damaged"),
    ):
        reader.sample()


# ---- what it does not go with ----


def test_growth_is_refused_where_readers_could_not_agree_on_it(tmp_path: Path) -> None:
    root = fresh_root()
    add(root, A, 0, 6)
    data = rlio.open_dataset(root)
    options: list[dict[str, Any]] = [
        {"at": data.snapshot()}, {"follow": True}, {"shard": (1, 2)}, {"batch_size": 2, "shard": (0, 2)},
    ]  # fmt: skip
    for more in options:
        with pytest.raises(OptionError, match=r"grow|snapshot"):
            DatasetReader(root, grow=True, **more)
    with pytest.raises(OptionError, match="snapshot"):
        DatasetReader(data.refresh(at=data.snapshot()), grow=True)
    with pytest.raises(OptionError, match=r"as at="):
        DatasetReader(data, grow=True, shard=(0, 2))
    with DatasetReader(data, grow=True, epochs=2, batch_size=6) as reader:
        add(root, B, 0, 1, t0=50)
        assert drain(reader) == [*range(6), *range(6), 50]
    torch = pytest.importorskip("rlio.torch")
    with pytest.raises(OptionError, match="grow"):
        torch.ReplayDataset(root, batch_size=2, grow=True)
