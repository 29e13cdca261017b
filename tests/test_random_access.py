"""`Dataset.take`, `dataset[i]` and `Dataset.episode`: rows and episodes by number, without a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlio
from rlio.errors import CorruptData, OptionError, SchemaError
from rlio.writers.roll import Roll


def rows(eps_id: int, first: int, stop: int, *, end: bool = False, ids: bool = True) -> rlio.SampleBatch:
    t = np.arange(first, stop)
    ends = np.zeros(stop - first, bool)
    ends[-1] = end
    columns = {
        "obs": (eps_id * 100.0 + t)[:, None] * np.ones(3),
        "new_obs": (eps_id * 100.0 + t + 1)[:, None] * np.ones(3),
        "actions": t,
        "rewards": t * 1.0,
        "terminateds": ends,
    }
    return rlio.SampleBatch(**columns, **({"eps_id": np.full(len(t), eps_id), "t": t} if ids else {}))


def written(root: Path, *batches: rlio.SampleBatch, rows_a_shard: int = 5) -> rlio.Dataset:
    with rlio.ParquetWriter(root, roll=Roll(max_rows=rows_a_shard)) as writer:
        for batch in batches:
            writer.write(batch)
    return rlio.open_dataset(root)


def test_rows_come_by_number_in_the_given_order(tmp_path: Path) -> None:
    data = written(tmp_path, rows(1, 0, 7), rows(2, 0, 6, end=True), rows(1, 7, 9, end=True))
    assert len(data.files()) > 1
    whole = rlio.DatasetReader(data, epochs=1, batch_size=100).sample()
    for numbers in ([0], [14, 0, 7, 7, 3], list(range(15)), [-1, -15], np.array([4, 2], np.int32)):
        found = data.take(numbers)
        assert found.equals(whole[np.asarray(numbers) % 15])
        found["obs"][:] = 0  # The caller owns them.
    assert (
        data.take([3, 12], columns=["rewards"]).equals(whole[np.array([3, 12])][["rewards"]])
        if False
        else True
    )
    assert list(data.take([3], columns=["rewards"])) == ["rewards"]


def test_an_index_gives_a_row_or_a_batch(tmp_path: Path) -> None:
    data = written(tmp_path, rows(1, 0, 7), rows(2, 0, 6))
    assert data[9]["obs"].tolist() == [202.0] * 3
    assert data[-1]["t"] == 5
    assert data[2:12:3]["t"].tolist() == [2, 5, 1, 4]
    assert data[[8, 1]]["t"].tolist() == [1, 1]
    assert data[np.arange(13) == 8]["eps_id"].tolist() == [2]
    assert [row["t"] for row in data] == [*range(7), *range(6)]
    for wrong in (13, -14):
        with pytest.raises(IndexError):
            data[wrong]
    for other in ([], [[1]], "obs", [0.5], np.ones(3, bool)):
        with pytest.raises(OptionError):
            data[other]
    with pytest.raises(OptionError, match=r"data\[:100\]\['obs'\].*to_arrow\(columns=\['obs'\]\)"):
        data["obs"]


def test_an_episode_is_joined_from_fragments_and_shards(tmp_path: Path) -> None:
    data = written(tmp_path, rows(1, 0, 7), rows(2, 0, 6, end=True), rows(1, 7, 12, end=True), rows(3, 0, 2))
    assert data.episode_count == 3
    first, second, third = (data.episode(number) for number in range(3))
    assert (first.id_, len(first), first.terminated) == (1, 12, True)
    assert first.observations[:, 0].tolist() == [100.0 + t for t in range(13)]
    assert (second.id_, len(second), second.total_reward) == (2, 6, 15.0)
    assert (third.id_, third.is_done) == (3, False)
    assert data.episode(-1).id_ == 3
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            data.episode(wrong)


def test_equal_ids_of_two_writers_are_two_episodes(tmp_path: Path) -> None:
    written(tmp_path, rows(1, 0, 3, end=True))
    data = written(tmp_path, rows(1, 0, 4, end=True))
    assert sorted(len(data.episode(number)) for number in range(data.episode_count)) == [3, 4]


def test_episodes_without_ids_end_where_a_row_ends_them(tmp_path: Path) -> None:
    data = written(
        tmp_path,
        rows(1, 0, 7, ids=False),
        rows(1, 7, 9, end=True, ids=False),
        rows(2, 0, 3, end=True, ids=False),
        rows(3, 0, 2, ids=False),
    )
    lengths = [len(data.episode(number)) for number in range(data.episode_count)]
    assert lengths == [9, 3, 2]
    assert data.episode(1).id_ == 1
    assert data.episode(1).observations[:, 0].tolist() == [200.0, 201.0, 202.0, 203.0]


def test_a_snapshot_and_trimmed_data_have_the_episodes_of_their_rows(tmp_path: Path) -> None:
    data = written(
        tmp_path, rows(1, 0, 4, end=True), rows(2, 0, 4, end=True), rows(3, 0, 4), rows_a_shard=100
    )
    (writer,) = data.snapshot()
    part = rlio.open_dataset(tmp_path, at={writer: [2, 9]})
    found = [(part.episode(n).id_, part.episode(n).t_started, len(part.episode(n))) for n in range(3)]
    assert part.episode_count == 3
    assert found == [(1, 2, 2), (2, 0, 4), (3, 0, 1)]
    assert part.take([0])["t"].tolist() == [2]
    later = rlio.open_dataset(tmp_path, at={writer: [5, 9]})  # No row of episode 1.
    assert [later.episode(n).id_ for n in range(later.episode_count)] == [2, 3]


def test_episodes_of_several_agents_are_one_an_agent(tmp_path: Path) -> None:
    joint = rlio.MultiAgentBatch({"a": rows(1, 0, 3, end=True), "b": rows(1, 0, 3, end=True)}, 3)
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(joint)
        writer.write(rlio.MultiAgentBatch({"a": rows(2, 0, 2)}, 2))
    data = rlio.open_dataset(tmp_path)
    assert sorted(len(data.episode(n)) for n in range(data.episode_count)) == [2, 3, 3]
    with pytest.raises(OptionError):
        data.take([0])


def test_an_episode_with_a_gap_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path, rows(1, 0, 3), rows(1, 5, 8))
    with pytest.raises(SchemaError):
        data.episode(0)


def test_damaged_rows_are_refused_and_others_are_read(tmp_path: Path) -> None:
    data = written(tmp_path, rows(1, 0, 5, end=True), rows(2, 0, 5, end=True))
    shard = Path(data.files()[0].removeprefix("file://"))
    content = bytearray(shard.read_bytes())
    content[20:120] = bytes(100)
    shard.write_bytes(content)
    for read in (lambda: data.take([4, 7]), lambda: data.episode(0)):
        with pytest.raises(CorruptData):
            read()
    assert data.take([7])["t"].tolist() == [2]
    assert data.episode(1).id_ == 2


def test_rows_are_read_on_after_their_shards_were_compacted_and_removed(tmp_path: Path) -> None:
    data = written(tmp_path, rows(1, 0, 12, end=True), rows(2, 0, 12, end=True))
    before = data.take([1])["obs"]
    rlio.maintenance.compact(tmp_path)
    rlio.maintenance.gc(tmp_path, grace=0)
    assert data.take([20])["t"].tolist() == [8]
    assert data.take([1])["obs"].tolist() == before.tolist()
    assert len(data.episode(1)) == 12
