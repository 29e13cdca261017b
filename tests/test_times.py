"""Each episode has its start, and each written stream its time of writing, through all that moves rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from test_pettingzoo import Falls

import rlio
from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.errors import CorruptData
from rlio.log import Spool
from rlio.schemas.streams import Streams
from rlio.source.source import EpisodeInfo

WRITERS: dict[str, Callable[..., rlio.OutputWriter]] = {
    "parquet": rlio.ParquetWriter,
    "json": rlio.JsonWriter,
    "json.zst": lambda root, **more: rlio.JsonWriter(root, compression="zstd", **more),
}
BEGAN = 1_764_320_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def at(milliseconds: int) -> datetime:
    return EPOCH + timedelta(milliseconds=milliseconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of the next `write()`, in milliseconds."""
    now = [BEGAN + 10_000]
    monkeypatch.setattr("rlio.schemas.row_groups.utc_ms", lambda: now[0])
    return now


def rows(eps_id: int | str, first: int, count: int, *, ends: bool = False) -> SampleBatch:
    t = np.arange(first, first + count)
    return SampleBatch(
        obs=t.astype(np.float32)[:, None],
        actions=np.zeros(count, np.int64),
        rewards=np.ones(count, np.float32),
        new_obs=t.astype(np.float32)[:, None] + 1,
        terminateds=(t == first + count - 1) & ends,
        t=t,
        eps_id=np.array([eps_id] * count),
        episode_starts={eps_id: BEGAN + int(eps_id)},
    )


def write(writer: rlio.OutputWriter, clock: list[int], ids: tuple[Any, Any] = (1, 2)) -> None:
    """Two episodes, whose rows take turns, in four writes, one a second."""
    for batch in (
        rows(ids[0], 0, 4),
        rows(ids[1], 0, 3),
        rows(ids[0], 4, 2, ends=True),
        rows(ids[1], 3, 5, ends=True),
    ):
        clock[0] += 1000
        writer.write(batch)


def found(root: Path) -> list[tuple[Any, Any, Any]]:
    infos = sorted(rlio.open_dataset(root).episode_parts(), key=lambda info: (str(info.eps_id), info.t0))
    return [(info.eps_id, info.began, info.written) for info in infos]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("ids", [(1, 2), ("1", "2")])
@pytest.mark.each_value_once
def test_an_episode_has_its_start_and_its_time_of_writing(
    kind: str, ids: tuple[Any, Any], clock: list[int], tmp_path: Path
) -> None:
    with WRITERS[kind](tmp_path) as writer:
        write(writer, clock, ids)
    assert found(tmp_path) == [
        (ids[0], at(BEGAN + 1), at(BEGAN + 11_000)),
        (ids[1], at(BEGAN + 2), at(BEGAN + 12_000)),
    ]
    data = rlio.open_dataset(tmp_path)
    assert [data.episode(number).start_time for number in range(2)] == [at(BEGAN + 1), at(BEGAN + 2)]
    episode = data.episode(0)
    assert episode.to_batch().episode_starts == {ids[0]: BEGAN + 1}
    assert rlio.Episode.from_batch(episode.to_batch()).start_time == at(BEGAN + 1)
    assert rlio.verify(tmp_path).ok


@pytest.mark.parametrize("kind", WRITERS)
def test_a_later_shard_of_an_episode_has_its_own_time_of_writing(
    kind: str, clock: list[int], tmp_path: Path
) -> None:
    with WRITERS[kind](tmp_path, roll=rlio.Roll(max_rows=7)) as writer:
        write(writer, clock)
    assert found(tmp_path) == [
        (1, at(BEGAN + 1), at(BEGAN + 11_000)),
        (1, at(BEGAN + 1), at(BEGAN + 13_000)),
        (2, at(BEGAN + 2), at(BEGAN + 12_000)),
        (2, at(BEGAN + 2), at(BEGAN + 14_000)),
    ]


def test_each_shard_of_one_large_write_has_its_times(clock: list[int], tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path, roll=rlio.Roll(max_rows=10)) as writer:
        writer.write(rows(1, 0, 35))
    assert found(tmp_path) == [(1, at(BEGAN + 1), at(BEGAN + 10_000))] * 4


@pytest.mark.parametrize("kind", WRITERS)
def test_recovered_rows_have_the_times_of_their_writes(kind: str, clock: list[int], tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    with WRITERS[kind](root, roll=rlio.Roll(max_seconds=None), spool=Spool(sync="never")) as writer:
        write(writer, clock)
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns("*.tmp"))
    clock[0] += 3_600_000
    assert rlio.maintenance.recover(copy, all_hosts=True).is_clean
    assert found(copy) == found(root) != []


def test_compacted_rows_have_the_times_of_their_first_write(clock: list[int], tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for _ in range(2):
        with rlio.ParquetWriter(root, roll=rlio.Roll(max_rows=7)) as writer:
            write(writer, clock)
        clock[0] += 56_000
    assert len(found(root)) == 8
    assert rlio.maintenance.compact(root).shards_after == 2
    expected = [
        (1, at(BEGAN + 1), at(BEGAN + 11_000)),
        (1, at(BEGAN + 1), at(BEGAN + 71_000)),
        (2, at(BEGAN + 2), at(BEGAN + 12_000)),
        (2, at(BEGAN + 2), at(BEGAN + 72_000)),
    ]
    assert sorted(found(root)) == expected
    rlio.maintenance.compact(root, into=other)
    assert sorted(found(other)) == expected
    assert rlio.verify(other).ok


def test_compacted_rows_of_agents_have_the_times_of_their_first_write(
    clock: list[int], tmp_path: Path
) -> None:
    for _ in range(2):
        with rlio.ParquetWriter(tmp_path, roll=rlio.Roll(max_rows=3)) as writer:
            for first in (0, 3):
                writer.write(MultiAgentBatch({"a": rows(1, first, 3), "b": rows(2, first, 3)}, 6))
                clock[0] += 1000
    rlio.maintenance.compact(tmp_path)
    assert sorted({(info.policy, info.eps_id, info.began, info.written) for info in by_policy(tmp_path)}) == [
        ("a", 1, at(BEGAN + 1), at(BEGAN + 10_000)),
        ("a", 1, at(BEGAN + 1), at(BEGAN + 12_000)),
        ("b", 2, at(BEGAN + 2), at(BEGAN + 10_000)),
        ("b", 2, at(BEGAN + 2), at(BEGAN + 12_000)),
    ]


@pytest.mark.parametrize("kind", WRITERS)
def test_agents_have_the_times_of_their_episode(kind: str, clock: list[int], tmp_path: Path) -> None:
    with WRITERS[kind](tmp_path) as writer:
        writer.write(MultiAgentBatch({"a": rows(1, 0, 3), "b": rows(1, 0, 3)}, 3))
        clock[0] += 1000
        writer.write(MultiAgentBatch({"a": rows(1, 3, 2), "b": rows(2, 0, 2)}, 4))
    assert [(info.policy, info.eps_id, info.began, info.written) for info in by_policy(tmp_path)] == [
        ("a", 1, at(BEGAN + 1), at(BEGAN + 10_000)),
        ("b", 1, at(BEGAN + 1), at(BEGAN + 10_000)),
        ("b", 2, at(BEGAN + 2), at(BEGAN + 11_000)),
    ]


def by_policy(root: Path) -> list[EpisodeInfo]:
    return sorted(rlio.open_dataset(root).episode_parts(), key=lambda info: (info.policy, info.eps_id))


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_without_starts_have_only_their_time_of_writing(
    kind: str, clock: list[int], tmp_path: Path
) -> None:
    batch = rows(1, 0, 3)
    batch.episode_starts = None
    with WRITERS[kind](tmp_path) as writer:
        writer.write(batch)
    assert found(tmp_path) == [(1, None, at(BEGAN + 10_000))]
    assert rlio.open_dataset(tmp_path).episode(0).start_time is None


def test_the_times_of_other_episodes_are_not_stored(tmp_path: Path) -> None:
    batch = rows(1, 0, 3)
    batch.episode_starts = dict.fromkeys(range(100000), BEGAN)
    with rlio.JsonWriter(tmp_path) as writer:
        writer.write(batch)
    (shard,) = tmp_path.glob("data/*/*.jsonl")
    assert shard.stat().st_size < 10_000


def play(recorder: Any, env: Any, root: Path) -> list[datetime]:
    """Play two episodes; returns the times before, between and after."""
    times = [datetime.now(UTC)]
    with recorder(env, root) as recorded:
        for _ in range(2):
            recorded.reset()
            if hasattr(recorded, "agents"):
                while recorded.agents:
                    recorded.step(dict.fromkeys(recorded.agents, 0))
            else:
                over = False
                while not over:
                    _, _, terminated, truncated, _ = recorded.step(0)
                    over = terminated or truncated
            times.append(datetime.now(UTC))
    return times


@pytest.mark.parametrize("agents", [False, True])
def test_recorders_store_when_each_episode_began(agents: bool, tmp_path: Path) -> None:
    made: Any = Falls() if agents else gym.make("CartPole-v1", max_episode_steps=5)
    first, second, last = play(rlio.RecordParallelEnv if agents else rlio.RecordExperience, made, tmp_path)
    data = rlio.open_dataset(tmp_path)
    episodes = [data.episode(number) for number in range(data.episode_count)]
    starts = sorted({episode.id_: episode.start_time for episode in episodes}.values())
    slack = timedelta(milliseconds=1)  # Stored times are cut to milliseconds.
    assert len(starts) == 2
    assert first - slack <= starts[0] <= second
    assert second - slack <= starts[1] <= last
    for info in data.episode_parts():
        assert info.began <= info.written <= datetime.now(UTC)


def test_workers_store_when_each_episode_began(tmp_path: Path) -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    config = rlio.RolloutConfig(num_envs=2, rollout_fragment_length=40)
    worker = rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), rollout=config, output=str(tmp_path))
    for _ in range(3):
        worker.sample()
    worker.stop()
    infos = list(rlio.open_dataset(tmp_path).episode_parts())
    assert len(infos) > 4
    assert all(before <= info.began <= info.written for info in infos)


class Loop(rlio.ExternalEnv):
    """Plays episodes of three steps."""

    def __init__(self) -> None:
        super().__init__(gym.spaces.Box(0, 9, (1,), np.float32), gym.spaces.Discrete(2))

    def run(self) -> None:
        while True:
            name = self.start_episode()
            for t in range(3):
                self.get_action(name, [float(t)])
                self.log_returns(name, 1.0)
            self.end_episode(name, [3.0])


def test_loops_elsewhere_store_when_each_episode_began(tmp_path: Path) -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    config = rlio.RolloutConfig(rollout_fragment_length=10)
    with rlio.RolloutWorker(
        lambda _: Loop(), rlio.RandomPolicy(), output=str(tmp_path), rollout=config
    ) as worker:
        worker.sample()
        worker.sample()
    infos = list(rlio.open_dataset(tmp_path).episode_parts())
    assert len(infos) > 4
    assert all(before <= info.began <= info.written for info in infos)


def test_a_table_of_streams_with_impossible_times_is_refused() -> None:
    table = Streams.from_json(
        {"policy": ["p"], "eps_id": [1], "agent_index": [None], "env_id": [None], "rows": [1], "t0": [0],
         "end": ["open"], "reward": [0.0], "began": [BEGAN]}
    )  # fmt: skip
    assert (table.began, table.written, table.writer) == ([BEGAN], [None], [None])
    for wrong in ("x", 1.5, True, [1]):
        with pytest.raises(CorruptData, match="began"):
            Streams.from_json({**table.to_json(), "began": [wrong]})
    with pytest.raises(CorruptData, match="length"):
        Streams.from_json({**table.to_json(), "began": []})


def test_a_time_beyond_the_calendar_is_unknown(tmp_path: Path) -> None:
    batch = rows(1, 0, 3)
    batch.episode_starts = {1: 2**62}
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(batch)
    assert [info.began for info in rlio.open_dataset(tmp_path).episode_parts()] == [None]
