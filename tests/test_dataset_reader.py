"""DatasetReader: every row once, whatever the order, ranks and restarts; batches that are the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import further
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import (
    assert_identical,
    files,
    fresh_root,
    group_bytes,
    load,
    numbered,
    put,
    remove,
    store,
)

from rlio import (
    DatasetReader,
    FollowReader,
    Limits,
    MixedInput,
    MultiAgentBatch,
    ParquetWriter,
    ReplayStore,
    Roll,
    SampleBatch,
    concat_samples,
    open_dataset,
)
from rlio.errors import (
    CorruptData,
    DataNotFound,
    EndOfData,
    HoleError,
    MissingColumn,
    OptionError,
    SchemaConflict,
    StateError,
)
from rlio.schemas.parquet import GroupInfo
from rlio.testing import ReaderTests, assert_resumes

ROWS = 61


@pytest.fixture(scope="module")
def root() -> str:
    """61 rows of two writers, in shards of 13 rows and row groups of 4."""
    root = fresh_root()
    for writer, (first, rows) in enumerate([(0, 40), (40, 21)]):
        options = {"roll": Roll(max_rows=13, max_seconds=None), "writer_id": f"w0000{writer}-00000000"}
        with group_bytes(100):
            store(numbered(rows, first), root=root, **options)
    return root


def numbers(reader: DatasetReader, sizes: Iterator[int] | None = None) -> list[list[int]]:
    """The row numbers of every batch until the end."""
    found = []
    while True:
        try:
            found.append(reader.sample(next(sizes) if sizes else None)["t"].tolist())
        except EndOfData:
            return found


def flat(batches: list[list[int]]) -> list[int]:
    return [t for batch in batches for t in batch]


class TestRecorded(ReaderTests):
    @pytest.fixture(autouse=True)
    def _root(self, root: str) -> None:
        self.root = root

    def make_reader(self) -> DatasetReader:
        return DatasetReader(self.root, batch_size=9, epochs=1)

    def expected_rows(self) -> SampleBatch:
        return numbered(ROWS)


class TestShuffled(TestRecorded):
    ordered = False
    sizes = (None, 3)

    def make_reader(self) -> DatasetReader:
        return DatasetReader(self.root, batch_size=9, epochs=1, shuffle=True, seed=3)


@pytest.mark.further
class TestEndless(TestRecorded):
    finite = False
    batches = 9

    def make_reader(self) -> DatasetReader:
        return DatasetReader(self.root, batch_size=9)


class TestSequences(ReaderTests):
    def make_reader(self) -> DatasetReader:
        if not hasattr(type(self), "root"):
            with group_bytes(150):
                type(self).root = store(self.expected_rows(), roll=Roll(max_rows=20, max_seconds=None))
        return DatasetReader(type(self).root, batch_size=3, epochs=1)

    def expected_rows(self) -> SampleBatch:
        return numbered(55, seq_lens=np.arange(1, 11, dtype=np.int32), state_in_0=np.arange(10.0)[:, None])


@pytest.mark.further
class TestJointSteps(ReaderTests):
    ordered = True
    sizes = (None, 1, 3, 7)

    def make_reader(self) -> DatasetReader:
        if not hasattr(type(self), "root"):
            with group_bytes(100):
                type(self).root = store(*self.expected_rows().timeslices(4))
        return DatasetReader(type(self).root, batch_size=3, epochs=1)

    def expected_rows(self) -> MultiAgentBatch:
        ids = np.zeros(30, int)
        return MultiAgentBatch(
            {"a": numbered(30, eps_id=ids), "b": numbered(30, other=np.arange(30.0), eps_id=ids)}, 30
        )


# ---- options that would do nothing ----


@pytest.mark.parametrize(
    "options", [{"storage_options": {"anon": True}}, {"storage_options": {}}, {"limits": Limits(columns=7)}]
)
def test_options_of_opening_are_refused_with_a_data_set_that_is_open(
    root: str, options: dict[str, Any]
) -> None:
    """They were ignored: the data set has its own."""
    for make in (
        lambda dataset: DatasetReader(dataset, **options),
        lambda dataset: FollowReader(dataset, **options),
        lambda dataset: ReplayStore.open(dataset, **options),
    ):
        with pytest.raises(OptionError, match=next(iter(options))):
            make(open_dataset(root))


def test_options_of_a_store_are_refused_without_one(root: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cache_folder"):
        ReplayStore.open(root, cache_folder=tmp_path)


# ---- the law of resuming ----


@pytest.mark.few(1)
@pytest.mark.parametrize("epochs", [1, 2, None])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("batch_size", "n"), [(9, None), (100, None), (13, 5)])
@pytest.mark.each_value_once
def test_a_restored_reader_gives_the_remainder(
    root: str, epochs: int | None, shuffle: bool, batch_size: int, n: int | None
) -> None:
    if epochs is None:
        batch_size = min(batch_size, ROWS)  # Endless readers have no larger ones.
    options: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "shuffle": shuffle}
    assert_resumes(lambda: DatasetReader(root, seed=4 if shuffle else None, **options), n, batches=5)


@pytest.mark.further
@pytest.mark.parametrize("shuffle", [True, *further(False)])
def test_a_restored_reader_drops_the_same_last_batch(root: str, shuffle: bool) -> None:
    def make() -> DatasetReader:
        return DatasetReader(
            root, batch_size=8, epochs=2, drop_last=True, shuffle=shuffle, seed=4 if shuffle else None
        )

    assert_resumes(make)
    assert [len(batch) for batch in make()] == [8] * 15


@pytest.mark.further
@settings(max_examples=6, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    stop=st.integers(0, 20),
    shuffle=st.booleans(),
    rank=st.integers(0, 2),
)
def test_a_restored_reader_gives_the_remainder_in_batches_of_varying_size(
    root: str, sizes: list[int], stop: int, shuffle: bool, rank: int
) -> None:
    options: dict[str, Any] = {
        "epochs": 2,
        "shuffle": shuffle,
        "seed": 1 if shuffle else None,
        "shard": (rank, 3),
    }
    one, other = DatasetReader(root, **options), DatasetReader(root, **options)
    draws = [sizes[i % len(sizes)] for i in range(200)]
    found = []
    for n in draws[:stop]:
        try:
            one.sample(n)
        except EndOfData:
            break
        found.append(n)
    other.load_state_dict(one.state_dict())
    rest = draws[len(found) :]
    assert numbers(one, iter(rest)) == numbers(other, iter(rest))
    one.close()
    other.close()


def test_a_reader_without_a_seed_resumes_by_the_one_it_drew(root: str) -> None:
    with DatasetReader(root, batch_size=9, epochs=1, shuffle=True) as one:
        one.sample()
        state = one.state_dict()
        expected = numbers(one)
    with DatasetReader(root, batch_size=9, epochs=1, shuffle=True) as other:
        other.sample()
        other.load_state_dict(state)
        assert numbers(other) == expected


@pytest.mark.further
def test_damage_that_is_skipped_is_skipped_again_after_a_restart(root: str) -> None:
    copy = fresh_root()
    for path, data in files(root, "").items():
        put(copy.removeprefix("memory:/") + path.removeprefix(root.removeprefix("memory:/")), data)
    path = list(files(copy))[2]
    data = bytearray(files(copy)[path])
    data[10] ^= 1
    put(path, bytes(data))
    for shuffle in (False, True):
        options: dict[str, Any] = {"shuffle": shuffle, "seed": 1 if shuffle else None, "on_error": "skip"}
        assert_resumes(lambda options=options: DatasetReader(copy, batch_size=5, epochs=2, **options))


@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
def test_the_count_of_lost_rows_can_be_read_after_a_sample_has_raised(cache: Any, tmp_path: Path) -> None:
    """A store that could not be built raised its error from ``skipped``, also from that of a mix."""
    with ParquetWriter(tmp_path / "a", roll=Roll(max_rows=10), spool=None) as writer:
        writer.write(numbered(20))
    shard = min((tmp_path / "a").rglob("*.parquet"))
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(bytes(data))
    reader = DatasetReader(tmp_path / "a", batch_size=5, cache=cache)
    with MixedInput({"a": reader}, batch_size=5) as mixed:
        for _ in range(2):
            with pytest.raises(CorruptData):
                mixed.sample()
            assert (reader.skipped, mixed.skipped) == (0, 0)
    with DatasetReader(tmp_path / "a", batch_size=5, cache=cache, on_error="skip", epochs=1) as reader:
        assert sum(map(len, reader)) == 10
        assert reader.skipped == 10


# ---- states that do not fit ----


def test_a_state_of_other_data_or_options_is_refused_by_name(root: str) -> None:
    with DatasetReader(root, shuffle=True, seed=1) as reader:
        reader.sample(5)
        state = reader.state_dict()
    for key, options in {
        "order": {},
        "seed": {"shuffle": True, "seed": 2},
        "options 'columns'": {"shuffle": True, "seed": 1, "columns": ["t"]},
        "options 'on_error', 'missing'": {"shuffle": True, "seed": 1, "on_error": "skip", "missing": "fill"},
    }.items():
        with DatasetReader(root, **options) as reader, pytest.raises(StateError, match=key):  # type: ignore[arg-type]
            reader.load_state_dict(state)
    grown = store(numbered(5))
    with DatasetReader(grown) as reader:
        state = reader.state_dict()
    store(numbered(5), root=grown)
    with DatasetReader(grown) as reader, pytest.raises(StateError, match="snapshot"):
        reader.load_state_dict(state)


def test_a_state_is_refused_where_the_same_rows_lie_in_other_row_groups() -> None:
    """As after compaction: the snapshot is the same, and the shuffled order is not."""
    states = []
    for limit in (100, 1000):
        with group_bytes(limit):
            other = store(numbered(60), writer_id="w00000-00000000")
        with DatasetReader(other, shuffle=True, seed=1, cache="none") as reader:
            own = reader.state_dict()
            for state in states:
                with pytest.raises(StateError, match="layout"):
                    reader.load_state_dict(state)
            states.append(own)


@pytest.mark.parametrize(
    "change",
    [{"epoch": -1}, {"epoch": 2}, {"position": ROWS}, {"position": -1}, {"position": "x"}, {"options": None}],
)
def test_positions_outside_of_the_data_are_refused(root: str, change: dict[str, Any]) -> None:
    with DatasetReader(root, epochs=1) as reader:
        state = reader.state_dict()
        state["position"] = state["position"] | change
        with pytest.raises(StateError):
            reader.load_state_dict(state)


# ---- ranks ----


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2, 5, *further(3, 4, 70)])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.each_value_once
def test_ranks_read_each_row_once_an_epoch_together(root: str, world: int, shuffle: bool) -> None:
    per_rank, states = [], []
    for rank in range(world):
        options: dict[str, Any] = {"shuffle": shuffle, "seed": 2 if shuffle else None, "shard": (rank, world)}
        with DatasetReader(root, batch_size=4, epochs=2, **options) as reader:
            if 4 * world <= ROWS:
                reader.sample()
                states.append(reader.state_dict())
        with DatasetReader(root, batch_size=4, epochs=2, **options) as reader:
            per_rank.append(flat(numbers(reader)))
    assert sorted(flat(per_rank)) == sorted([*range(ROWS), *range(ROWS)])
    assert max(map(len, per_rank)) - min(map(len, per_rank)) <= 1
    assert all(state == states[0] for state in states)


@pytest.mark.further
@settings(max_examples=6, deadline=None)
@given(
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    calls=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    shuffle=st.booleans(),
)
def test_the_number_of_ranks_may_change_in_the_middle_of_an_epoch(
    root: str, worlds: list[int], calls: list[int], shuffle: bool
) -> None:
    state, served = None, []
    for number, world in enumerate(worlds):
        last = number == len(worlds) - 1
        states = []
        for rank in range(world):
            options: dict[str, Any] = {"shuffle": shuffle, "seed": 2 if shuffle else None}
            with DatasetReader(root, batch_size=3, epochs=1, shard=(rank, world), **options) as reader:
                if state is not None:
                    reader.load_state_dict(state)
                if last:
                    served += flat(numbers(reader))
                    continue
                for _ in range(calls[number]):
                    try:
                        served += reader.sample()["t"].tolist()
                    except EndOfData:
                        break
                states.append(reader.state_dict())
        state = states[0] if states else None
    assert sorted(served) == list(range(ROWS))


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_drop_the_last_batch_where_one_of_them_would_be_short(root: str, world: int) -> None:
    """61 rows: in the last step of both worlds one rank lacks rows, and the others do not."""
    size = {2: 31, 3: 7}[world]
    assert 0 < -ROWS % (size * world) < world
    counts = []
    for rank in range(world):
        with DatasetReader(root, batch_size=size, epochs=1, drop_last=True, shard=(rank, world)) as reader:
            counts.append([len(batch) for batch in reader])
    assert counts == [[size] * (ROWS // (size * world))] * world


def damaged_groups(rows: int, groups: list[int], **more: Any) -> str:
    """A root of one shard, some of whose small row groups are damaged."""
    with group_bytes(100):
        root = store(numbered(rows, **more))
    ((path, data),) = files(root).items()
    with DatasetReader(root) as reader:
        shard = reader.dataset.open_shard(reader.dataset.segments[0])
    content = bytearray(data)
    for info in {group % len(shard.rows): None for group in groups}:
        content[shard.groups[info].start + 20] ^= 1  # type: ignore[attr-defined]
    put(path, bytes(content))
    return root


@pytest.mark.further
@settings(max_examples=5, deadline=None)
@given(
    damage=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    world=st.integers(2, 4),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    sequences=st.booleans(),
)
def test_ranks_stay_in_step_where_whole_parts_of_theirs_are_damaged(
    damage: list[int], world: int, size: int, shuffle: bool, drop_last: bool, sequences: bool
) -> None:
    """Each step is what one reader would read, cut in as many parts, and all ranks know where it ends."""
    more = {"seq_lens": np.full(30, 2, np.int32)} if sequences else {}
    root = damaged_groups(60, damage, **more)
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 2 if shuffle else None, "drop_last": drop_last}
    options |= {"on_error": "skip", "epochs": 2}
    alone = DatasetReader(root, batch_size=world * size, **options)
    ranks = [DatasetReader(root, batch_size=size, shard=(rank, world), **options) for rank in range(world)]
    while True:
        try:
            expected = alone.sample()["t"].tolist()
        except EndOfData:
            break
        found, short = [], 0
        for reader in ranks:
            try:
                found.append(reader.sample())
            except EndOfData:
                short += 1
        units = len(expected) // (2 if sequences else 1)
        assert [t for batch in found for t in batch["t"].tolist()] == expected
        assert short == max(world - units, 0)
        assert all(reader.state_dict() == ranks[0].state_dict() for reader in ranks)
        assert ranks[0].state_dict() == alone.state_dict()
    for reader in ranks:
        with pytest.raises(EndOfData):
            reader.sample()
    assert {reader.skipped for reader in ranks} == {alone.skipped}
    for reader in (alone, *ranks):
        reader.close()


# ---- what a batch is ----


def test_without_a_size_a_batch_is_no_larger_than_a_row_group_of_wide_rows() -> None:
    with group_bytes(1000):
        wide = store(SampleBatch(obs=np.zeros((100, 10), np.float64)))
        with DatasetReader(wide, epochs=1) as reader:
            (rows,) = {schema.group_rows for schema in reader.dataset.schemas.values()}
            assert rows < 100
            assert [len(batch) for batch in reader] == [rows] * (100 // rows) + [100 % rows] * (
                100 % rows > 0
            )


@pytest.mark.few(2)
@pytest.mark.parametrize("batch_size", [1, 5, 40])
def test_shuffled_joint_steps_come_whole_and_once_though_writers_repeat_their_ids(batch_size: int) -> None:
    """One window holds groups of both writers, whose (eps_id, t) are the same."""
    shared = None
    for writer in range(2):
        t = np.arange(16)
        mark = 100 * writer + t
        late = slice(4, None)  # Agent b joins late: steps differ in their rows.
        batch = MultiAgentBatch(
            {
                "a": SampleBatch(t=t, eps_id=t * 0, mark=mark),
                "b": SampleBatch(t=t[late], eps_id=t[late] * 0, mark=mark[late]),
            },
            16,
        )
        with group_bytes(120):
            shared = store(*batch.timeslices(4), root=shared, writer_id=f"w{writer}")
    assert shared is not None
    with DatasetReader(shared, batch_size=batch_size, epochs=2, shuffle=True, seed=3) as reader:
        assert len(reader) == 32
        batches = list(reader)
    for part in batches[:-1]:
        assert part.env_steps() == batch_size
    marks: dict[str, list[int]] = {"a": [], "b": []}
    for part in batches:
        assert isinstance(part, MultiAgentBatch)
        for pid, rows in part.items():
            marks[pid] += rows["mark"].tolist()
        if "b" in part:  # In the step of its own a, at the same place among those.
            mine = [mark for mark in part["a"]["mark"].tolist() if mark % 100 >= 4]
            assert mine == part["b"]["mark"].tolist()
    everything = [100 * writer + t for writer in range(2) for t in range(16)]
    assert sorted(marks["a"]) == sorted(everything * 2)
    assert sorted(marks["b"]) == sorted([mark for mark in everything if mark % 100 >= 4] * 2)
    assert marks["a"][:32] != sorted(marks["a"][:32])


@pytest.mark.parametrize("ids", [{}, {"eps_id": np.zeros(5, int)}, {"t": np.zeros(5, int)}])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_is_a_joint_step_where_one_policy_has_no_ids(ids: dict[str, Any], shuffle: bool) -> None:
    alone = store(MultiAgentBatch({"a": SampleBatch(ids, mark=np.arange(5))}, 5))
    with DatasetReader(alone, batch_size=2, epochs=1, shuffle=shuffle, seed=1 if shuffle else None) as reader:
        batches = list(reader)
    assert [batch.env_steps() for batch in batches] == [2, 2, 1]
    assert sorted(mark for batch in batches for mark in batch["a"]["mark"].tolist()) == list(range(5))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_shard_that_miscounts_its_sequences_is_refused(
    shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions would stand for other sequences than those that were saved."""

    def miscounted(*values: int) -> GroupInfo:
        info = GroupInfo(*values)
        return info._replace(units=info.units - 1)

    with monkeypatch.context() as patch:
        patch.setattr("rlio.schemas.parquet.GroupInfo", miscounted)
        forged = store(numbered(6, seq_lens=np.array([1, 2, 3], np.int32)))
    with pytest.raises(CorruptData, match="3 sequences and its shard says 2"):
        load(forged, shuffle=shuffle, seed=1 if shuffle else None)


def test_shuffled_sequences_come_whole_and_once() -> None:
    rows = numbered(55, seq_lens=np.arange(1, 11, dtype=np.int32), state_in_0=np.arange(10.0)[:, None])
    with group_bytes(150):
        sequences = store(rows)
    with DatasetReader(sequences, batch_size=3, epochs=1, shuffle=True, seed=3) as reader:
        batches = list(reader)
    assert [len(batch["seq_lens"]) for batch in batches] == [3, 3, 3, 1]
    found = []
    for batch in batches:
        ends = np.cumsum(batch["seq_lens"])
        for state, start, stop in zip(batch["state_in_0"][:, 0], ends - batch["seq_lens"], ends, strict=True):
            found.append((int(state), batch["t"][start:stop].tolist()))
    ends = np.cumsum(np.arange(1, 11))
    assert sorted(found) == [(i, list(range(end - i - 1, end))) for i, end in enumerate(ends.tolist())]
    assert found != sorted(found)


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_the_caller_does_to_a_batch_reaches_no_other(root: str, shuffle: bool) -> None:
    """Also where one row group is read again in the next epoch, or after a step back."""
    single = store(numbered(10, infos=[{"n": [i]} for i in range(10)]))
    options: dict[str, Any] = {
        "shuffle": shuffle,
        "seed": 1 if shuffle else None,
        "epochs": 3,
        "batch_size": 4,
    }
    with DatasetReader(single, **options) as reader:
        state, served = reader.state_dict(), []
        for step in range(10):
            if step == 5:
                reader.load_state_dict(state)
                served.clear()
            try:
                batch = reader.sample()
            except EndOfData:
                break
            served += batch["t"].tolist()
            assert [info["n"][0] for info in batch["infos"]] == batch["t"].tolist()
            batch["t"][:] = -1
            batch["obs"][:] = -1
            for info in batch["infos"]:
                info["n"][0] = -1
    assert sorted(served[:10]) == list(range(10))


def test_epochs_are_shuffled_each_in_its_own_way_and_equal_seeds_alike(root: str) -> None:
    def epochs(seed: int) -> list[list[int]]:
        with DatasetReader(root, batch_size=ROWS, epochs=3, shuffle=True, seed=seed) as reader:
            return numbers(reader)

    one, again, other = epochs(1), epochs(1), epochs(2)
    assert one == again
    assert one != other
    assert one[0] != one[1] != one[2]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in one)


def test_the_order_does_not_depend_on_the_batch_size_or_the_columns(root: str) -> None:
    orders = []
    for size, columns in ((1, None), (7, ["t"]), (100, ["obs", "t"])):
        with DatasetReader(root, batch_size=size, epochs=2, shuffle=True, seed=1, columns=columns) as reader:
            orders.append(flat(numbers(reader)))
    assert orders[0] == orders[1] == orders[2]


def test_columns_come_in_the_order_of_the_data(root: str) -> None:
    assert list(load(root, columns=["obs", "t"])) == ["t", "obs"]


def test_columns_that_nobody_wrote_are_missing_by_name(root: str) -> None:
    with pytest.raises(MissingColumn, match="'rewards'; the data set has obs, t"):
        DatasetReader(root, columns=["t", "rewards"])


@pytest.mark.parametrize(
    "options",
    [{"columns": []}, {"batch_size": 0}, {"epochs": 0}, {"shard": (3, 3)}, {"cache": "ram"},
     {"missing": "no"}, {"on_error": "ignore"}, {"drop_last": True}, {"bath_size": 3}],
)  # fmt: skip
def test_illegal_options_are_refused(root: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        DatasetReader(root, **options)


def test_columns_by_which_units_are_told_apart_may_not_be_left_out() -> None:
    sequences = store(numbered(9, seq_lens=[3] * 3, state_in_0=np.zeros((3, 1))))
    with pytest.raises(OptionError, match="add 'seq_lens'"):
        DatasetReader(sequences, columns=["obs", "state_in_0"])
    agents = store(MultiAgentBatch({"a": numbered(3, eps_id=[1] * 3), "b": numbered(3, eps_id=[1] * 3)}, 3))
    with pytest.raises(OptionError, match="add 'eps_id'"):
        DatasetReader(agents, columns=["obs", "t"])


def test_no_data_set_is_an_error_that_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataNotFound, match=r"notes\.txt"):
        DatasetReader(tmp_path)


# ---- columns that only some writers have ----


@pytest.fixture(scope="module")
def uneven() -> str:
    """One writer has rewards and names, another has not."""
    root = fresh_root()
    more = {"rewards": np.ones(4, np.float32), "name": np.array(["a"] * 4, object)}
    store(numbered(4, **more), root=root, writer_id="w00000-00000000")
    store(numbered(4, 4), root=root, writer_id="w00001-00000000")
    return root


def test_columns_that_some_writers_lack_are_an_error_dropped_or_filled(uneven: str) -> None:
    with pytest.raises(SchemaConflict, match=r"lacks \['name', 'rewards'\].*missing='drop'"):
        DatasetReader(uneven)
    assert list(load(uneven, missing="drop")) == ["t", "obs"]
    filled = load(uneven, missing="fill")
    assert filled["rewards"].dtype == np.float32
    assert filled["rewards"].tolist() == [1] * 4 + [0] * 4
    assert filled["name"].tolist() == ["a"] * 4 + [""] * 4
    assert load(uneven, columns=["t"])["t"].tolist() == list(range(8))
    assert load(uneven, missing="fill", columns=["rewards"])["rewards"].tolist() == [1] * 4 + [0] * 4
    with pytest.raises(OptionError, match="leaves no column"):
        DatasetReader(uneven, missing="drop", columns=["rewards"])


@pytest.mark.parametrize("missing", ["error", "drop", "fill"])
def test_final_observations_are_there_where_a_writer_says_nothing_of_them(missing: Any) -> None:
    """new_obs_valid is written only where one is missing: absent, it is True for every row."""
    root = fresh_root()
    obs = np.arange(4.0)
    valid = np.array([True, True, True, False])
    store(
        SampleBatch(obs=obs, new_obs=(obs + 1) * valid, new_obs_valid=valid),
        root=root,
        writer_id="w00000-00000000",
    )
    store(SampleBatch(obs=obs, new_obs=obs + 1), root=root, writer_id="w00001-00000000")
    for size in (3, 4, 8):
        with DatasetReader(root, missing=missing, epochs=1, batch_size=size) as reader:
            batches = list(reader)
        assert all("new_obs_valid" in batch for batch in batches)
        assert concat_samples(batches)["new_obs_valid"].tolist() == [True] * 3 + [False] + [True] * 4


def test_a_filled_observation_is_not_valid() -> None:
    root = fresh_root()
    store(SampleBatch(obs=np.ones(2), new_obs=np.ones(2)), root=root, writer_id="w00000-00000000")
    store(SampleBatch(obs=np.ones(2)), root=root, writer_id="w00001-00000000")
    found = load(root, missing="fill")
    assert found["new_obs"].tolist() == [1, 1, 0, 0]
    assert found["new_obs_valid"].tolist() == [True, True, False, False]


# ---- rows that are not there ----


def broken(root: str, number: int, change: str) -> str:
    """A copy of the data set in which one shard is gone or torn."""
    copy = store(numbered(60), roll=Roll(max_rows=20, max_seconds=None))
    path = list(files(copy))[number]
    data = files(copy)[path]
    remove(path)
    if change == "torn":
        put(path, data[: len(data) // 2])
    return copy


@pytest.mark.parametrize(
    ("number", "change", "lost"),
    [(0, "gone", 20), (1, "gone", 20), (0, "torn", 20), (1, "torn", 20), (2, "torn", 20)],
)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.each_value_once
def test_shards_that_are_missing_or_torn_are_an_error_or_counted(
    root: str, number: int, change: str, lost: int, shuffle: bool
) -> None:
    copy = broken(root, number, change)
    seed = 1 if shuffle else None
    with pytest.raises(CorruptData, match="rows"):
        DatasetReader(copy, shuffle=shuffle, seed=seed)
    with DatasetReader(copy, epochs=2, on_error="skip", shuffle=shuffle, seed=seed) as reader:
        served = flat(numbers(reader))
        assert reader.skipped == lost
    expected = [t for t in range(60) if t // 20 != number]
    assert sorted(served) == sorted(expected * 2)


def test_torn_copies_of_one_range_are_counted_once(root: str) -> None:
    copy = broken(root, 1, "torn")
    path = next(path for path in files(copy) if "000000000020-" in path)
    put(path.replace("-20-", "-15-"), b"torn too")
    with DatasetReader(copy, epochs=1, on_error="skip") as reader:
        list(reader)
        assert reader.skipped == 20


def test_a_lost_schema_file_is_an_error_that_says_what_to_restore() -> None:
    """Without it nobody would know that rows belong to sequences."""
    root = store(numbered(9, seq_lens=[3] * 3))
    (path,) = files(root, "_schema")
    data = files(root, "_schema")[path]
    remove(path)
    with DatasetReader(root, epochs=1) as reader, pytest.raises(CorruptData, match=r"restore _schema/"):
        reader.sample()
    put(path, data[:-9] + b"x" + data[-8:])
    with pytest.raises(CorruptData, match="schema"):
        DatasetReader(root)


def test_foreign_files_are_passed_over() -> None:
    root = store(numbered(9))
    place = root.removeprefix("memory:/")
    writer = next(iter(files(root))).rsplit("/", 1)[0]
    for path in (
        f"{place}/_schema/.DS_Store", f"{place}/_schema/readme.json", f"{place}/data/.DS_Store",
        f"{place}/data/notes.parquet", f"{writer}/part-0.parquet", f"{writer}/.nfs000",
        f"{place}/x/y.parquet",
        f"{place}/data/not a writer/000000000000-5-10-00000000-00000000.parquet",
    ):  # fmt: skip
        put(path, b"not ours")
    found = load(root)
    assert_identical(found, numbered(9))


def test_overlapping_shards_are_read_once() -> None:
    """As after a retry under another size of shard: any cover of the rows will do."""
    root, other = fresh_root(), fresh_root()
    with group_bytes(100):
        store(numbered(30), root=root, roll=Roll(max_rows=10, max_seconds=None), writer_id="w00000-00000000")
        store(numbered(17), root=other, roll=Roll(max_rows=17, max_seconds=None), writer_id="w00000-00000000")
    ((path, data),) = files(other).items()
    put(path.replace(other.removeprefix("memory:/"), root.removeprefix("memory:/")), data)
    for shuffle in (False, True):
        with DatasetReader(
            root, epochs=1, batch_size=4, shuffle=shuffle, seed=1 if shuffle else None
        ) as reader:
            assert len(reader) == 30
            assert sorted(flat(numbers(reader))) == list(range(30))


def test_rows_written_after_opening_are_not_in_the_snapshot() -> None:
    root = fresh_root()
    with ParquetWriter(root) as writer:
        writer.write(numbered(5))
        writer.flush()
        with DatasetReader(root, batch_size=3, epochs=2) as reader:
            found = reader.sample()["t"].tolist()
            writer.write(numbered(5, 5))
            writer.flush()
            found += flat(numbers(reader))
    assert found == [*range(5), *range(5)]


def test_an_endless_reader_of_no_rows_ends() -> None:
    root = fresh_root()
    ParquetWriter(root).close()
    with DatasetReader(root) as reader, pytest.raises(EndOfData):
        reader.sample()


def test_rows_that_are_gone_from_a_closed_writer_are_missed() -> None:
    root = store(numbered(5))
    for path in files(root):
        remove(path)
    with pytest.raises(HoleError, match=r"rows 0 to 4 .* of the 5 rows with which it was closed"):
        DatasetReader(root)
    with DatasetReader(root, on_error="skip") as reader, pytest.raises(EndOfData):
        reader.sample()
    assert reader.skipped == 5


def test_readers_leave_no_thread_behind(root: str) -> None:
    import threading

    before = set(threading.enumerate())
    with DatasetReader(root, batch_size=3) as reader:
        reader.sample(20)
    assert set(threading.enumerate()) <= before


def test_joint_steps_in_any_order_resume_after_each_of_them() -> None:
    """No policy takes part in all of them, and one does in those that are left."""
    steps = {"a": [(9, 0), (2, 1), (0, 2), (0, 0), (1, 2)], "b": [(9, 0), (1, 1), (2, 3), (0, 2)]}
    parts = {
        pid: SampleBatch(eps_id=[e for e, _ in own], t=[t for _, t in own], obs=np.arange(float(len(own))))
        for pid, own in steps.items()
    }
    root = fresh_root()
    with ParquetWriter(root) as writer:
        writer.write(MultiAgentBatch(parts, len({*steps["a"], *steps["b"]})))
    assert_resumes(lambda: DatasetReader(root, batch_size=1, epochs=1))
