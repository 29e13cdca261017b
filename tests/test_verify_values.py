"""What verify says of values and time: spaces, NaN, gaps, repeats, ends; of honest oddities, nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stored_batches import fresh_root, group_bytes

import rlio
import rlio.maintenance.time_check as time_check
from rlio import JsonWriter, MultiAgentBatch, ParquetWriter, Roll, SampleBatch
from rlio.batch import Batch
from rlio.catalog.markers import seal
from rlio.maintenance import Finding
from rlio.storage import Storage

WRITERS = [ParquetWriter, JsonWriter]


def steps(t: Any, *, eps_id: Any = 0, done: Any = (), **more: Any) -> SampleBatch:
    """Rows with the given ``t``; those in ``done`` end their episode."""
    t = np.asarray(t)
    rewards = more.pop("rewards", np.zeros(len(t)))
    ends = np.isin(np.arange(len(t)), done)
    return SampleBatch(
        {
            "t": t,
            "eps_id": np.broadcast_to(eps_id, t.shape).copy(),
            "terminateds": ends,
            "rewards": rewards,
            **more,
        }
    )


def without_t(batch: SampleBatch) -> SampleBatch:
    return SampleBatch({name: batch[name] for name in batch if name != "t"})


def findings(*batches: Batch, writer: Any = ParquetWriter, **options: Any) -> list[Finding]:
    """What verify finds in the batches, each of which is a shard of its own; open ends left out."""
    root = fresh_root()
    with pytest.MonkeyPatch.context() as patch, group_bytes(400):
        # Writers refuse the newest episodes again; these stand for older ones.
        patch.setattr("rlio.writers.ended_episodes.EndedEpisodes.check", lambda *_: {})
        with writer(root, roll=Roll(max_seconds=None), **options) as stored:
            for batch in batches:
                stored.write(batch)
                stored.flush()
    return [f for f in rlio.verify(root).findings if f.code != "left-open"]


def codes(*batches: Batch, **options: Any) -> list[tuple[str, int]]:
    """(code, rows) of what is found."""
    return [(finding.code, finding.rows) for finding in findings(*batches, **options)]


# ---- time ----

TIME: dict[str, tuple[list[SampleBatch], list[tuple[str, int]]]] = {
    "an episode in one piece": ([steps(range(50), done=[49])], []),
    "an episode over three shards": (
        [steps(range(20)), steps(range(20, 40)), steps(range(40, 50), done=[9])],
        [],
    ),
    "an episode whose beginning was not recorded": ([steps(range(7, 20))], []),
    "shards in another order than their steps": ([steps(range(20, 40)), steps(range(20))], []),
    "two episodes step by step": ([steps(np.arange(40) // 2, eps_id=np.arange(40) % 2)], []),
    "a gap within a shard": ([steps([0, 1, 2, 5, 6])], [("time-gap", 2)]),
    "a gap between shards": ([steps(range(20)), steps(range(23, 30))], [("time-gap", 3)]),
    "two gaps": ([steps([0, 2, 4])], [("time-gap", 2)]),
    "steps twice in one shard": ([steps([0, 1, 2, 1, 2, 3])], [("time-overlap", 2)]),
    "an episode twice": ([steps(range(10), done=[9]), steps(range(10), done=[9])], [("episode-again", 10)]),
    "an episode again in part": ([steps(range(10), done=[9]), steps(range(3, 5))], [("episode-again", 2)]),
    "an id again behind a gap": (
        [steps(range(5), done=[4]), steps(range(100, 103), done=[2])],
        [("episode-again", 3), ("time-gap", 95)],
    ),
    "an id again without t": (
        [without_t(steps(range(5), done=[4])), without_t(steps(range(5), done=[4]))],
        [("episode-again", 5), ("time-unchecked", 0)],
    ),
    "episodes that overlap": ([steps(range(10)), steps(range(6, 15))], [("time-overlap", 4)]),
    "rows after the end": ([steps(range(10), done=[6])], [("after-the-end", 3)]),
    "rows after the end in a later shard": (
        [steps(range(10), done=[9]), steps(range(10, 12))],
        [("after-the-end", 2)],
    ),
    "no t": ([SampleBatch(eps_id=np.zeros(3, int), rewards=np.zeros(3))], [("time-unchecked", 0)]),
    "no eps_id": ([SampleBatch(t=np.arange(3), rewards=np.zeros(3))], [("time-unchecked", 0)]),
    "texts as ids": (
        [steps(range(5), eps_id=np.array(["a"] * 5)), steps(range(7, 9), eps_id=np.array(["a"] * 2))],
        [("time-gap", 2)],
    ),
    "agents side by side": ([steps([0, 0, 1, 1], agent_index=np.array([0, 1, 0, 1]))], []),
    "environments with equal ids": ([steps([0, 0, 1, 1], env_id=np.array([0, 1, 0, 1]))], []),
}


@pytest.mark.few(11)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", TIME)
@pytest.mark.each_value_once
def test_the_steps_of_episodes_are_checked(name: str, writer: Any) -> None:
    batches, expected = TIME[name]
    assert codes(*batches, writer=writer) == expected


def test_a_finding_about_time_says_which_episode_and_where() -> None:
    (found,) = findings(steps(range(20), eps_id=77), steps(range(23, 30), eps_id=77))
    assert found.severity == "warning"
    assert found.column == "t"
    assert "/000000000020-" in found.uri
    assert "77" in found.message
    assert "t=19 to t=23" in found.message


def test_agents_that_cannot_be_told_apart_are_not_accused() -> None:
    rows = SampleBatch(t=[0, 0, 1, 1], eps_id=[5] * 4, obs=np.zeros((4, 2)))
    assert codes(MultiAgentBatch({"shared": rows}, 2)) == [("time-unchecked", 0)]


def test_agents_of_two_policies_have_times_of_their_own() -> None:
    def part(agent: int, t: list[int]) -> SampleBatch:
        return SampleBatch(t=t, eps_id=[5] * len(t), agent_index=[agent] * len(t))

    assert codes(MultiAgentBatch({"a": part(0, [0, 1, 2]), "b": part(1, [0, 1, 2])}, 3)) == []
    assert codes(MultiAgentBatch({"a": part(0, [0, 1, 2]), "b": part(1, [0, 2])}, 3)) == [("time-gap", 1)]


def test_episodes_of_two_writers_are_two_episodes() -> None:
    root = fresh_root()
    for _ in range(2):
        with ParquetWriter(root) as writer:
            writer.write(steps(range(10), done=[9]))
    assert rlio.verify(root).findings == ()


def test_steps_that_are_lost_with_a_shard_are_no_gap_of_the_recording() -> None:
    root = fresh_root()
    with ParquetWriter(root, writer_id="w0", roll=Roll(max_seconds=None)) as writer:
        for first in (0, 10, 20):
            writer.write(steps(range(first, first + 10)))
            writer.flush()
    storage = Storage.open(root)
    (middle,) = [entry.path for entry in storage.list("data") if "/000000000010-" in entry.path]
    storage.remove(middle)
    assert [f.code for f in rlio.verify(root).findings if f.severity == "error"] == ["hole"]
    assert "time-gap" not in {f.code for f in rlio.verify(root).findings}


def test_an_episode_that_a_sealed_writer_left_open_is_a_note() -> None:
    root = fresh_root()
    with ParquetWriter(root, writer_id="w0") as writer:
        writer.write(steps(range(10)))
        writer.write(steps(range(5), eps_id=1, done=[4]))
    seal(Storage.open(root), "w0", 15)
    (found,) = rlio.verify(root).findings
    assert (found.severity, found.code) == ("note", "left-open")
    assert "1 of its episodes" in found.message


def test_more_episodes_than_memory_should_hold_are_forgotten_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_check, "MAX_EPISODES", 100)
    root = fresh_root()
    with group_bytes(400), ParquetWriter(root) as writer:
        writer.write(steps(np.zeros(500, int), eps_id=np.arange(500), done=range(500)))
    (found,) = rlio.verify(root).findings
    assert found.code == "time-unchecked"
    assert "forgotten" in found.message


# ---- values ----


@pytest.mark.few(2)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("column", ["obs", "new_obs", "actions", "rewards"])
@pytest.mark.parametrize(("value", "code"), [(np.nan, "nan"), (np.inf, "infinite"), (-np.inf, "infinite")])
@pytest.mark.each_value_once
def test_values_that_are_not_finite_are_found_with_their_column(
    column: str, value: float, code: str, writer: Any
) -> None:
    columns = {name: np.zeros((30, 2)) for name in ("obs", "new_obs", "actions")} | {"rewards": np.zeros(30)}
    columns[column][[7, 21]] = value
    found = findings(steps(range(30), **columns), writer=writer)
    assert [(f.code, f.column, f.rows, f.severity) for f in found] == [(code, column, 2, "warning")]
    assert "row 7 " in found[0].message


def test_nan_in_other_columns_is_the_users_business() -> None:
    assert codes(steps(range(5), vf_preds=np.full(5, np.nan))) == []


def test_terminated_and_truncated_at_once_is_a_note() -> None:
    batch = steps(range(5), done=[4], truncateds=np.arange(5) == 4)
    (found,) = findings(batch)
    assert (found.severity, found.code, found.rows) == ("note", "terminated-and-truncated", 1)
