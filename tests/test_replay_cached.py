"""Stores on disk: what memory holds, shared, extended when the data grows, rebuilt when it changed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_env import check_transitions, decode, episode
from further import further
from test_replay_store import LENGTHS, agents, record

import rlio
from rlio import DatasetReader, ParquetWriter, ReplayStore, Roll, SampleBatch, open_dataset
from rlio.errors import CacheError, OptionError, StateError
from rlio.maintenance import compact
from rlio.replay import build as building


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every row group that is decoded for a store."""
    rows: list[int] = []
    plain = building.batches_of

    def counted(*args: Any) -> Any:
        for found in plain(*args):
            rows.append(found.rows)
            yield found

    monkeypatch.setattr(building, "batches_of", counted)
    return rows


def in_order(store: ReplayStore, **options: Any) -> dict[str, np.ndarray]:
    found = list(store.epochs(batch_size=50, epochs=1, shuffle=False, **options))
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}


def add(root: Path, writer: str, *parts: SampleBatch, rows: int = 30) -> None:
    with ParquetWriter(root, writer_id=writer, roll=Roll(max_rows=rows)) as out:
        for part in parts:
            out.write(part)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["vector", "image", "stack"])
def test_what_lies_on_disk_is_what_lies_in_memory(tmp_path: Path, cache: Path, kind: str) -> None:
    root = record(tmp_path / "data", kind=kind)
    expected = in_order(ReplayStore.open(root))
    for _ in range(2):
        with ReplayStore.open(root, cache="disk") as store:
            found = in_order(store)
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values)
                assert found[name].dtype == values.dtype
            check_transitions(store.uniform(batch_size=99).sample(), lengths=LENGTHS)
    assert (cache.stat().st_mode & 0o777) == 0o700


def test_a_store_is_built_once_and_used_by_everybody(tmp_path: Path, cache: Path, decoded: list[int]) -> None:
    root = record(tmp_path / "data")
    ReplayStore.open(root, cache="disk").close()
    built = sum(decoded)
    assert built == sum(LENGTHS.values())
    with DatasetReader(root, cache="disk", columns=["obs"], shuffle=True, epochs=1, seed=0) as reader:
        assert reader.cache == "disk"
        assert sum(len(batch) for batch in reader) == built
    assert sum(decoded) == built


def test_texts_and_objects_lie_on_disk_too(tmp_path: Path, cache: Path) -> None:
    rows = episode(0, 0, 20)
    rows["infos"] = np.array([{"lives": (3, int(t))} for t in rows["t"]] + [None], object)[:-1]
    rows["note"] = np.array([f"step {t}" for t in rows["t"]])
    add(tmp_path / "data", "w00000-00000000", rows)
    for _ in range(2):
        found = in_order(ReplayStore.open(tmp_path / "data", cache="disk"))
        assert found["infos"].tolist() == rows["infos"].tolist()
        assert found["note"].tolist() == rows["note"].tolist()
    store = ReplayStore.open(tmp_path / "data", cache="disk")
    first, again = (store.epochs(epochs=1, shuffle=False).sample() for _ in range(2))
    first["infos"][0]["lives"] = None
    assert again["infos"][0] == {"lives": (3, 0)}


@pytest.mark.parametrize("kind", ["stack", *further("vector")])
def test_a_data_set_that_grew_is_extended_and_read_in_its_own_order(
    tmp_path: Path, cache: Path, decoded: list[int], kind: str
) -> None:
    root = tmp_path / "data"
    lengths = {(env, number): 20 for env in range(3) for number in range(4)}
    with (
        ParquetWriter(root, writer_id="w00000-00000000", roll=Roll(max_rows=25)) as first,
        ParquetWriter(root, writer_id="w00001-00000000", roll=Roll(max_rows=25)) as second,
    ):
        for number in range(4):
            for env, writer in ((0, first), (1, second)):
                writer.write(episode(env, number, 20, stop=11, kind=kind))
                writer.flush()
                with ReplayStore.open(root, cache="disk") as store:
                    plain, kept = in_order(ReplayStore.open(root)), in_order(store)
                    for name, values in plain.items():
                        np.testing.assert_array_equal(kept[name], values)
                writer.write(episode(env, number, 20, start=11, kind=kind))
                writer.flush()
        old = ReplayStore.open(root, cache="disk")
        before = in_order(old, draw=rlio.NStep(30, gamma=1.0))
        add(root, "w00002-00000000", *(episode(2, number, 20, kind=kind) for number in range(4)))
        rows = sum(decoded)
        with ReplayStore.open(root, cache="disk") as store:
            assert sum(decoded) == rows + 80  # Only what is new.
            check_transitions(
                store.uniform(batch_size=300, draw=rlio.NStep(5, gamma=0.5)).sample(),
                lengths=lengths,
                n_step=5,
                gamma=0.5,
            )
        # Whoever had it open sees what it had.
        after = in_order(old, draw=rlio.NStep(30, gamma=1.0))
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values)


def test_a_window_does_not_depend_on_what_others_have_added_meanwhile(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "data"
    with ParquetWriter(root, writer_id="w00000-00000000") as writer:
        writer.write(episode(0, 0, 20, stop=10))
        writer.flush()
        snapshot = open_dataset(root).snapshot()
        old = ReplayStore.open(root, cache="disk")
        writer.write(episode(0, 0, 20, start=10))
    new = ReplayStore.open(root, cache="disk")
    assert decode(in_order(new, draw=rlio.NStep(4))["new_obs"])[8, 2] == 12
    for store in (old, ReplayStore.open(root, at=snapshot, cache="disk")):
        assert decode(in_order(store, draw=rlio.NStep(4))["new_obs"])[:, 2].tolist() == [
            *range(4, 11),
            10,
            10,
            10,
        ]


def test_a_data_set_that_was_replaced_or_compacted_is_rebuilt(
    tmp_path: Path, cache: Path, decoded: list[int]
) -> None:
    root = tmp_path / "data"
    add(root, "w00000-00000000", episode(0, 0, 40), rows=10)
    ReplayStore.open(root, cache="disk").close()
    compact(str(root))
    with ReplayStore.open(root, cache="disk") as store:
        check_transitions(store.uniform(batch_size=50).sample(), lengths={(0, 0): 40})
    for path in sorted(root.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    add(root, "w00000-00000000", episode(1, 3, 40), rows=10)
    with ReplayStore.open(root, cache="disk") as store:
        found = in_order(store)
    assert (decode(found["obs"])[:, :2] == [1, 3]).all()


def test_a_deleted_original_leaves_a_clear_error(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "data"
    add(root, "w00000-00000000", episode(0, 0, 40), rows=10)
    data = open_dataset(root)
    Path(data.files()[2]).unlink()
    with pytest.raises(Exception, match="rows 20 to 29"):
        ReplayStore.open(data, cache="disk")
    with ReplayStore.open(data, cache="disk", on_error="skip") as store:
        assert (len(store), store.skipped) == (30, 10)


def damaged_in(path: Path, part: str) -> bytes:
    """The bytes of a shard with some of a row group, or of its footer, overwritten."""
    data, at = path.read_bytes(), {"a row group": 40, "the footer": -60}[part]
    return data[:at] + bytes(20) + data[at + 20 :]


@pytest.mark.parametrize("part", ["a row group", "the footer"])
def test_rows_that_were_restored_are_no_longer_left_out(tmp_path: Path, cache: Path, part: str) -> None:
    """The store on disk left them out for ever; a reader in memory did not."""
    add(root := tmp_path / "data", "w00000-00000000", episode(0, 0, 40), rows=10)
    whole = in_order(ReplayStore.open(root))
    shards = [Path(file) for file in open_dataset(root).files()]
    kept = [path.read_bytes() for path in shards]
    for lost in (1, 3, None):
        for path, data in zip(shards, kept, strict=True):
            path.write_bytes(data)
        if lost is not None:
            shards[lost].write_bytes(damaged_in(shards[lost], part))
        rows = [row for row in range(40) if row // 10 != lost]
        for _ in range(2):
            with ReplayStore.open(root, cache="disk", on_error="skip") as store:
                assert (len(store), store.skipped) == (len(rows), 40 - len(rows))
                np.testing.assert_array_equal(in_order(store)["obs"], whole["obs"][rows])


@pytest.mark.parametrize("kept", ["memory", "disk"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_is_refused_where_other_rows_are_damaged_than_when_it_was_saved(
    tmp_path: Path, cache: Path, kept: str, shuffle: bool
) -> None:
    """It was loaded, and the reader served some rows twice and others never."""
    add(root := tmp_path / "data", "w00000-00000000", episode(0, 0, 40), rows=10)
    path, other = (Path(file) for file in open_dataset(root).files()[1:3])
    whole, damaged = path.read_bytes(), damaged_in(path, "a row group")
    options: Any = {"cache": kept, "on_error": "skip", "epochs": 1, "shuffle": shuffle, "seed": 3}
    path.write_bytes(damaged)
    with DatasetReader(root, batch_size=4, **options) as reader:
        reader.sample()
        state = reader.state_dict()
        rest = list(reader)
    with DatasetReader(root, batch_size=4, **options) as reader:
        reader.load_state_dict(state)
        assert all(one.equals(two) for one, two in zip(reader, rest, strict=True))
    path.write_bytes(whole)
    for _ in range(2):
        with DatasetReader(root, **options) as reader, pytest.raises(StateError, match=r"rows .* damaged"):
            reader.load_state_dict(state)
        if kept == "disk":
            break  # A store on disk keeps what it has.
        other.write_bytes(damaged_in(other, "a row group"))


def test_damage_is_not_decoded_more_than_once_an_opening(
    tmp_path: Path, cache: Path, decoded: list[int]
) -> None:
    add(root := tmp_path / "data", "w00000-00000000", episode(0, 0, 40), rows=10)
    path = Path(open_dataset(root).files()[1])
    path.write_bytes(damaged_in(path, "a row group"))
    for _ in range(3):
        decoded.clear()
        with ReplayStore.open(root, cache="disk", on_error="skip") as store:
            assert len(store) == 30
    assert decoded == [10]


def test_a_store_on_disk_serves_what_is_left_after_its_last_rows_were_lost(
    tmp_path: Path, cache: Path
) -> None:
    """A reader called it a bug of rlio, and the store counted the lost rows as its own."""
    add(root := tmp_path / "data", "w00000-00000000", episode(0, 0, 40), rows=10)
    options: dict[str, Any] = {"cache": "disk", "on_error": "skip"}
    with ReplayStore.open(root, **options) as store:
        assert len(store) == 40
    Path(open_dataset(root).files()[3]).unlink()
    with ReplayStore.open(root, **options) as store:
        assert (len(store), store.skipped) == (30, 10)
    with DatasetReader(root, epochs=1, batch_size=40, **options) as reader:
        assert (len(reader.sample()), reader.skipped) == (30, 10)


def test_joint_steps_lie_on_disk_too(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "data"
    with ParquetWriter(root, writer_id="w00000-00000000") as writer:
        for start in range(0, 20, 5):
            writer.write(agents(range(start, start + 5)))
            writer.flush()
            for _ in range(2):
                with ReplayStore.open(root, cache="disk") as store:
                    found = list(store.epochs(batch_size=7, epochs=1, seed=3))
                other = list(ReplayStore.open(root).epochs(batch_size=7, epochs=1, seed=3))
                assert all(a.equals(b) for a, b in zip(found, other, strict=True))
    assert sum(batch.env_steps() for batch in found) == 120


def _open(root: str, cache: str, barrier: Any, results: Any) -> None:
    os.environ["RLIO_CACHE"] = cache
    barrier.wait()
    with ReplayStore.open(root, cache="disk") as store:
        results.put(int(in_order(store)["t"].sum()))


@pytest.mark.further
def test_two_processes_that_build_the_same_store_at_once(tmp_path: Path) -> None:
    root = record(tmp_path / "data")
    expected = int(in_order(ReplayStore.open(root))["t"].sum())
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    children = [
        context.Process(target=_open, args=(root, str(tmp_path / "cache"), barrier, results))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    assert [results.get(timeout=240) for _ in children] == [expected] * 2
    for child in children:
        child.join()


def _build_slowly(root: str, cache: str) -> None:
    os.environ["RLIO_CACHE"] = cache
    plain = building.batches_of

    def slowly(*args: Any) -> Any:
        for found in plain(*args):
            yield found
            time.sleep(0.2)

    building.batches_of = slowly
    ReplayStore.open(root, cache="disk")


@pytest.mark.further
def test_a_build_that_was_killed_half_way_is_rebuilt(tmp_path: Path, cache: Path) -> None:
    root = record(tmp_path / "data")
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_build_slowly, args=(root, str(cache)))
    child.start()
    deadline = time.monotonic() + 60
    while not any(cache.rglob("*.array")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    with ReplayStore.open(root, cache="disk") as store:
        expected = in_order(ReplayStore.open(root))
        for name, values in in_order(store).items():
            np.testing.assert_array_equal(values, expected[name])


def test_a_cache_without_room_says_so(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = record(tmp_path / "data")
    monkeypatch.setenv("RLIO_CACHE_BYTES", "1000")
    with pytest.raises(CacheError, match="RLIO_CACHE_BYTES"):
        ReplayStore.open(root, cache="disk")
    with pytest.raises(OptionError, match="columns"):
        ReplayStore.open(root, cache="disk", columns=["obs"])


def test_a_damaged_store_is_rebuilt(tmp_path: Path, cache: Path) -> None:
    root = record(tmp_path / "data")
    ReplayStore.open(root, cache="disk").close()
    (rows,) = cache.rglob("*rows*.array")
    os.truncate(rows, rows.stat().st_size // 2)
    with ReplayStore.open(root, cache="disk") as store:
        check_transitions(store.uniform(batch_size=99).sample(), lengths=LENGTHS)
