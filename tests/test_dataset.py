"""Dataset: what one listing says about the rows under a root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_child import fork, wait_for
from gymnasium.spaces import Box, Discrete
from stored_batches import files, fresh_root, load, numbered, put, remove, store

import rlio
from rlio import (
    DatasetReader,
    FollowingReplay,
    FollowReader,
    MixedInput,
    MultiAgentBatch,
    ParquetWriter,
    ReplayStore,
    Roll,
    SampleBatch,
    ShuffledInput,
    open_dataset,
)
from rlio.catalog import listing
from rlio.catalog.listing import HoleCheck
from rlio.catalog.names import DATA_DIR
from rlio.errors import (
    CorruptData,
    DataNotFound,
    EndOfData,
    OptionError,
    SchemaConflict,
    SchemaError,
    WaitTimeout,
)
from rlio.schemas.provenance import Provenance
from rlio.storage.filesystem import Storage


def two_writers() -> str:
    root = fresh_root()
    roll = Roll(max_rows=4, max_seconds=None)
    store(numbered(10, eps_id=np.arange(10) // 5), root=root, roll=roll, writer_id="w00001-00000000")
    store(numbered(3, eps_id=[7] * 3), root=root, roll=roll, writer_id="w00000-00000000")
    return root


def test_the_order_is_writers_by_id_and_rows_ascending() -> None:
    data = open_dataset(two_writers())
    assert len(data) == 13
    assert data.snapshot() == {"w00000-00000000": 3, "w00001-00000000": 10}
    assert [(segment.ref.writer[5], segment.first, segment.rows) for segment in data.segments] == [
        ("0", 0, 3), ("1", 0, 4), ("1", 4, 4), ("1", 8, 2),
    ]  # fmt: skip
    assert repr(data) == f"Dataset({data.uri!r}, 13 rows, 4 shards, 2 writers)"
    assert data.columns == {"default_policy": ["t", "obs", "eps_id"]}


def test_a_data_set_reads_what_it_lists_with_the_options_of_read(tmp_path: Path) -> None:
    data = open_dataset(two_writers())
    store(SampleBatch(other=np.zeros(4)), root=data.uri, writer_id="w00002-00000000")
    options: dict[str, Any] = {"batch_size": 5, "epochs": 1, "shuffle": True, "seed": 3}
    with data.read(**options) as reader, rlio.read(data, **options) as other:
        rows = [batch["obs"].tolist() for batch in reader]
        assert rows == [batch["obs"].tolist() for batch in other]
        assert sum(map(len, rows)) == 13
    (tmp_path / "a.csv").write_text("x,y,reward,run\n1,0,1,0\n2,1,2,0\n3,0,3,1\n")
    how = rlio.Mapping({"obs": "x", "actions": "y", "rewards": "reward"}, episode="run")
    with open_dataset(tmp_path / "a.csv", mapping=how).read(epochs=1, cache="none") as reader:
        assert np.concatenate([batch["rewards"] for batch in reader]).tolist() == [1, 2, 3]
    with pytest.raises(OptionError, match="colums"):
        data.read(colums=["obs"])


def test_the_digest_names_the_snapshot() -> None:
    one, other = two_writers(), two_writers()
    assert open_dataset(one).digest == open_dataset(other).digest
    store(numbered(1, eps_id=[1]), root=one)
    assert open_dataset(one).digest != open_dataset(other).digest


def test_files_and_bytes_are_those_of_the_live_shards(tmp_path: Path) -> None:
    store(numbered(10), root=str(tmp_path), roll=Roll(max_rows=4, max_seconds=None))
    data = open_dataset(tmp_path)
    paths = [Path(uri.removeprefix("file://")) for uri in data.files()]
    assert len(paths) == 3
    assert data.bytes() == sum(path.stat().st_size for path in paths)


def test_episodes_are_told_shard_by_shard() -> None:
    episodes = list(open_dataset(two_writers()).episode_parts())
    assert [(e.writer[5], e.eps_id, e.rows, e.t0) for e in episodes] == [
        ("0", 7, 3, 0), ("1", 0, 4, 0), ("1", 0, 1, 4), ("1", 1, 3, 5), ("1", 1, 2, 8),
    ]  # fmt: skip


def test_episodes_say_how_they_ended_and_what_they_earned() -> None:
    batch = SampleBatch(
        rewards=np.array([1.0, 2, 4, 8, 16]),
        terminateds=np.array([False, True, False, False, False]),
        truncateds=np.array([False, False, False, True, False]),
    )
    found = list(open_dataset(store(batch)).episode_parts())
    assert [(e.rows, e.end, e.reward) for e in found] == [
        (2, "terminated", 3.0), (2, "truncated", 12.0), (1, "open", 16.0),
    ]  # fmt: skip


def test_episodes_without_ids_go_on_over_writes_and_are_told_apart_by_environment() -> None:
    def write(ends: list[bool]) -> SampleBatch:
        return SampleBatch(env_id=[0, 1], terminateds=np.array(ends))

    root = store(write([False, False]), write([True, False]), write([False, False]))
    found = {(e.env_id, e.rows, e.end) for e in open_dataset(root).episode_parts()}
    assert found == {(0, 2, "terminated"), (0, 1, "open"), (1, 3, "open")}


def test_episodes_of_several_agents_are_told_by_policy_and_agent() -> None:
    batch = MultiAgentBatch(
        {
            "a": numbered(4, eps_id=["x"] * 4, agent_index=np.array([0, 1, 0, 1])),
            "b": numbered(2, eps_id=["x"] * 2, agent_index=np.array([2, 2])),
        },
        4,
    )
    found = {(e.policy, e.eps_id, e.agent_index, e.rows) for e in open_dataset(store(batch)).episode_parts()}
    assert found == {("a", "x", 0, 2), ("a", "x", 1, 2), ("b", "x", 2, 2)}


def test_no_data_set_another_format_and_a_damaged_header_are_told_apart() -> None:
    with pytest.raises(DataNotFound, match="empty or does not exist"):
        open_dataset(fresh_root())
    root = store(numbered(3))
    header = root.removeprefix("memory:/") + "/_rlio.json"
    put(header, b'{"format": 99}\n')
    with pytest.raises(OptionError, match="format 99"):
        open_dataset(root)
    put(header, b"{")
    with pytest.raises(CorruptData, match="header"):
        open_dataset(root)


class _Uploading:
    """Puts the rest of a half-uploaded schema file after so many waits."""

    def __init__(self, root: str, waits: int) -> None:
        self.waits = waits
        ((self._path, self._text),) = files(root, "_schema").items()
        put(self._path, self._text[: len(self._text) // 2])

    def sleep(self, seconds: float) -> None:
        self.waits -= 1
        if self.waits == 0:
            put(self._path, self._text)


def test_a_schema_that_another_writer_is_uploading_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    root = store(numbered(3))
    upload = _Uploading(root, 2)
    monkeypatch.setattr(listing, "HOLE_CHECK", HoleCheck(listings=3, sleep=upload.sleep))
    assert len(load(root)) == 3
    assert upload.waits == 0


def test_a_schema_that_stays_half_uploaded_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    root = store(numbered(3))
    upload = _Uploading(root, 99)
    monkeypatch.setattr(listing, "HOLE_CHECK", HoleCheck(listings=3, sleep=upload.sleep))
    with pytest.raises(CorruptData, match=r"it ends after \d+ bytes.*rlio recover"):
        load(root)
    assert upload.waits == 97


def test_a_schema_that_is_damaged_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    root = store(numbered(3))
    ((path, text),) = files(root, "_schema").items()
    put(path, text[:9] + b"!" + text[10:])
    waits: list[float] = []
    monkeypatch.setattr(listing, "HOLE_CHECK", HoleCheck(sleep=waits.append))
    with pytest.raises(CorruptData, match="not a schema"):
        _ = open_dataset(root).schemas
    assert waits == []


needs_logs = pytest.mark.skipif(not hasattr(os, "fork"), reason="no logs without flock")


def _logged(root: Path, rows: int) -> None:
    """What a writer leaves that is killed before it has stored a row."""

    def run() -> None:
        writer = ParquetWriter(root)
        if rows:
            writer.write(numbered(rows))
        os._exit(5)

    assert wait_for(fork(run)) == 5


@needs_logs
def test_that_rows_wait_in_a_log_is_said_of_a_data_set_without_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _logged(tmp_path, 3)
    data = open_dataset(tmp_path)
    assert len(data) == 0
    said = f"rows wait in one log in {tmp_path / '_wal'}"
    assert said in data.why_empty()
    assert f"`rlio recover {data.uri}`" in data.why_empty()
    assert said in caplog.text
    with pytest.raises(EndOfData, match="rlio recover"), DatasetReader(tmp_path) as reader:
        reader.sample()
    for make in (
        lambda: DatasetReader(data, cache="memory"),
        lambda: DatasetReader(data, cache="none", epochs=1),
        lambda: DatasetReader(data, filter="t > 3"),
        lambda: DatasetReader(data, draw=rlio.NStep(3)),
        lambda: DatasetReader(data, draw=rlio.Sequences(3)),
        lambda: FollowReader(data, idle_timeout=0),
        lambda: ReplayStore.open(data).uniform(),
        lambda: ReplayStore.open(data).prioritised(),
        lambda: ReplayStore.open(data).epochs(),
        lambda: ShuffledInput(DatasetReader(data), 3, seed=0),
    ):
        with pytest.raises(EndOfData, match="rlio recover"), make() as reader:
            reader.sample()
    mix = MixedInput(
        {"logged": DatasetReader(data), "other": DatasetReader(store(numbered(3)))}, batch_size=2
    )
    with pytest.raises(OptionError, match="rlio recover"), mix:
        mix.sample()
    following = FollowingReplay(tmp_path, capacity=10, batch_size=1, timeout=0)
    with pytest.raises(WaitTimeout, match="rlio recover"), following:
        following.sample()
    (tmp_path / "_rlio.json").unlink()
    with pytest.raises(DataNotFound, match="rlio recover"):
        open_dataset(tmp_path)


@needs_logs
def test_nothing_is_said_of_logs_that_have_no_rows_or_where_rows_are_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _logged(tmp_path / "begun", 0)
    assert open_dataset(tmp_path / "begun").why_empty() == "the data set has no rows"
    store(numbered(3), root=str(tmp_path / "stored"))
    with ParquetWriter(tmp_path / "stored") as writer:
        writer.write(numbered(3))
        assert len(open_dataset(tmp_path / "stored")) == 3
    assert "rows wait" not in caplog.text


def test_a_data_set_that_was_listed_again_reads_the_columns_that_were_there_then() -> None:
    root = two_writers()
    data = open_dataset(root).refresh()
    store(SampleBatch(other=np.zeros(4)), root=root, writer_id="w00002-00000000")
    assert sum(len(batch) for batch in data.read(epochs=1)) == 13


@pytest.mark.parametrize("left", [20, -20])
def test_a_data_set_with_a_damaged_schema_file_is_opened_and_its_rows_are_not_read(left: int) -> None:
    root = two_writers()
    snapshot, shards = open_dataset(root).snapshot(), open_dataset(root).files()
    ((path, text),) = files(root, "_schema").items()
    put(path, text[:left])
    data = open_dataset(root)
    assert (data.snapshot(), data.files(), len(data)) == (snapshot, shards, 13)
    for call in (data.info, lambda: next(data.read(epochs=1))):
        with pytest.raises(CorruptData, match="it ends after"):
            call()
    put(path, text)
    assert data.info().rows == 13


def test_a_snapshot_is_opened_without_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Footers say which schemas its rows have: all were read at opening, if a schema was not used."""
    root = two_writers()
    snapshot = open_dataset(root).snapshot()
    store(SampleBatch(other=np.zeros(4)), root=root, writer_id="w00002-00000000")
    paths, real = [], Storage._read

    def recorded(self: Storage, path: str, start: int, stop: int | None) -> bytes:
        paths.append(path)
        return real(self, path, start, stop)

    monkeypatch.setattr(Storage, "_read", recorded)
    data = open_dataset(root, at=snapshot)
    assert not [path for path in paths if path.endswith(".parquet")]
    assert sum(len(batch) for batch in data.read(epochs=1, cache="none")) == 13


def test_a_schema_file_whose_bytes_are_not_its_name_is_refused() -> None:
    root = store(numbered(3))
    ((path, text),) = files(root, "_schema").items()
    put(path, text.replace(b'"actions":"raw"', b'"actions":"sent"'))
    with pytest.raises(CorruptData, match="hash"):
        _ = open_dataset(root).schemas
    put(path, text[:-1])
    with pytest.raises(CorruptData, match="not a schema"):
        _ = open_dataset(root).schemas


def test_writers_that_give_a_column_other_types_conflict() -> None:
    root = store(numbered(3, x=np.zeros(3)))
    with pytest.raises(SchemaConflict, match=r"<f. \(\).*<f. \(\).*column x\]"):
        store(numbered(3, x=np.zeros(3, np.float32)), root=root)


def test_lost_rows_are_counted_from_the_names() -> None:
    root = store(numbered(30), roll=Roll(max_rows=5, max_seconds=None), writer_id="w00000-00000000")
    paths = list(files(root))
    remove(paths[1])
    put(paths[3], b"torn")
    put(paths[5], b"torn")
    data = open_dataset(root)
    assert sum(rows for _, rows in data.lost_rows()) == 15
    assert data.holes == {"w00000-00000000": [range(5, 10), range(15, 20), range(25, 30)]}
    assert sorted(rows for _, _, rows in data.missing_shards()) == [5, 5]
    with pytest.raises(CorruptData):
        data.check_complete()


def test_rows_that_were_trimmed_are_not_lost() -> None:
    """What is torn below the mark is gone on purpose; above it, only what lies above."""
    root = store(numbered(10), roll=Roll(max_rows=4, max_seconds=None), writer_id="w00000-00000000")
    for path, data in files(root).items():
        put(path, data[:-1])
    put(f"{root}/data/w00000-00000000/_trim-6", b"")
    data = open_dataset(root)
    assert data.lost_rows() == [("w00000-00000000: rows 6 to 9", 4)]
    assert [rows for _, _, rows in data.missing_shards()] == [4, 2]
    with pytest.raises(CorruptData, match="torn"):
        data.check_complete()
    put(f"{root}/data/w00000-00000000/_trim-10", b"")
    data = open_dataset(root)
    assert (data.lost_rows(), data.missing_shards()) == ([], [])
    data.check_complete()


@pytest.mark.parametrize(("misses", "holes"), [(1, 0), (2, 0), (3, 1)])
def test_a_hole_is_believed_once_three_listings_have_it(
    misses: int, holes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it was listed, the writer may have stored a shard whose place was passed, and then another."""
    root = store(numbered(12), roll=Roll(max_rows=4, max_seconds=None), writer_id="w00000-00000000")
    late = list(files(root))[1].rsplit("/", 1)[1]
    listed = 0
    real = Storage.list

    def listing(self: Storage, *args: Any, **options: Any) -> Any:
        nonlocal listed
        listed += args == (DATA_DIR,)
        found = real(self, *args, **options)
        return [entry for entry in found if listed > misses or not entry.path.endswith(late)]

    monkeypatch.setattr(Storage, "list", listing)
    data = open_dataset(root)
    assert sum(map(len, data.holes.values())) == holes
    assert len(data) == (12 if not holes else 8)


def test_a_whole_data_set_loses_nothing() -> None:
    data = open_dataset(two_writers())
    assert (data.lost_rows(), data.missing_shards(), data.holes) == ([], [], {})
    data.check_complete()


def test_the_schema_keeps_spaces_and_how_the_data_was_made() -> None:
    import gymnasium as gym

    box, discrete = gym.spaces.Box(-np.inf, np.inf, (3,)), gym.spaces.Discrete(4)
    root = fresh_root()
    provenance = Provenance(env="CartPole-v1", actions="sent", seed=3)
    spaces = {"default_policy": (box, discrete)}
    with ParquetWriter(root, spaces=spaces, provenance=provenance) as writer:
        writer.write(numbered(3))
    (schema,) = open_dataset(root).schemas.values()
    assert schema.stored == {"actions": "sent", "observations": "raw"}
    assert set(schema.policies["default_policy"].spaces or {}) == {"observation", "action"}
    data = open_dataset(root)
    shard = data.open_shard(data.segments[0])
    assert shard.provenance["env"] == "CartPole-v1"  # type: ignore[attr-defined]  # Of Parquet shards.
    assert load(root)["t"].tolist() == [0, 1, 2]


def test_a_policy_is_bound_to_the_spaces_of_a_data_set_and_needs_no_environment(tmp_path: Path) -> None:
    spaces = Box(-1.0, 1.0, (3,)), Discrete(4)
    with ParquetWriter(tmp_path, spaces={"default_policy": spaces}) as writer:
        writer.write(SampleBatch(obs=np.zeros((2, 3), np.float32), actions=np.zeros(2, np.int64)))
    data = open_dataset(tmp_path)
    assert data.spaces == spaces
    assert data.policy_spaces == {"default_policy": spaces}
    policy = rlio.RandomPolicy()
    policy.bind(*data.spaces)
    assert policy.action_space == spaces[1]


def test_spaces_that_are_not_known_or_not_one_are_errors(tmp_path: Path) -> None:
    rows = SampleBatch(
        obs=np.zeros((2, 3), np.float32),
        actions=np.zeros(2, np.int64),
        eps_id=np.zeros(2, np.int64),
        t=np.arange(2),
    )
    wide, narrow = (Box(-1.0, 1.0, (3,)), Discrete(4)), (Box(-1.0, 1.0, (3,)), Discrete(2))
    for name in ("none", "unlike"):
        with ParquetWriter(tmp_path / name) as writer:
            writer.write(rows)
    for spaces in (wide, narrow):
        with ParquetWriter(tmp_path / "unlike", spaces={"default_policy": spaces}) as writer:
            writer.write(rows)
    with ParquetWriter(tmp_path / "two", spaces={"a": wide, "b": narrow}) as writer:
        writer.write(MultiAgentBatch({"a": rows, "b": rows}, 2))
    for name, error in (("none", SchemaError), ("unlike", SchemaConflict), ("two", OptionError)):
        with pytest.raises(error):
            _ = open_dataset(tmp_path / name).spaces
    assert open_dataset(tmp_path / "none").policy_spaces == {}
    assert open_dataset(tmp_path / "two").policy_spaces == {"a": wide, "b": narrow}
