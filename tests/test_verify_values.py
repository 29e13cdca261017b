"""What verify says of values and time: spaces, NaN, gaps, repeats, ends; of honest oddities, nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from stored_batches import fresh_root, group_bytes

import rlio
import rlio.maintenance.time_check as time_check
from rlio import JsonWriter, MultiAgentBatch, ParquetWriter, Roll, SampleBatch
from rlio.interfaces import Batch
from rlio.maintenance import Finding
from rlio.maintenance.space_check import Misfit, rows_outside
from rlio.schemas.provenance import Provenance
from rlio.storage import Storage
from rlio.storage.markers import seal

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


def findings(*batches: Batch, writer: Any = ParquetWriter, **options: Any) -> list[Finding]:
    """What verify finds in the batches, each of which is a shard of its own; open ends left out."""
    root = fresh_root()
    with group_bytes(400), writer(root, roll=Roll(max_seconds=None), **options) as stored:
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
    "an episode twice": ([steps(range(10), done=[9]), steps(range(10), done=[9])], [("time-overlap", 10)]),
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


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", TIME)
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


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("column", ["obs", "new_obs", "actions", "rewards"])
@pytest.mark.parametrize(("value", "code"), [(np.nan, "nan"), (np.inf, "infinite"), (-np.inf, "infinite")])
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


BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
SPACES: dict[str, tuple[Any, Any, Any, list[bool]]] = {
    # space, values inside, values of which some are outside, which of those are
    "Box": (BOX, np.ones((2, 2)), np.array([[0, 0], [0, 1.5], [-2, 0]]), [False, True, True]),
    "unbounded Box": (
        gym.spaces.Box(-np.inf, np.inf, (1,)),
        np.array([[1e30]]),
        np.array([[np.nan]]),
        [True],
    ),
    "Discrete": (gym.spaces.Discrete(3, start=1), np.array([1, 3]), np.array([0, 1, 4]), [True, False, True]),
    "floats for Discrete": (
        gym.spaces.Discrete(3),
        np.array([0.0, 2.0]),
        np.array([0.5, 1.0]),
        [True, False],
    ),
    "MultiDiscrete": (
        gym.spaces.MultiDiscrete([2, 3]),
        np.array([[1, 2]]),
        np.array([[1, 2], [2, 0]]),
        [False, True],
    ),
    "MultiBinary": (gym.spaces.MultiBinary(2), np.array([[0, 1]]), np.array([[0, 2], [1, 1]]), [True, False]),
    "Dict": (
        gym.spaces.Dict(a=BOX, b=gym.spaces.Discrete(2)),
        {"a": np.zeros((1, 2)), "b": np.array([1])},
        {"a": np.array([[0, 0], [9, 0], [0, 0]]), "b": np.array([2, 1, 1])},
        [True, True, False],
    ),
    "Tuple": (
        gym.spaces.Tuple([BOX, gym.spaces.Discrete(2)]),
        (np.zeros((1, 2)), np.array([0])),
        (np.array([[0, 0], [9, 0]]), np.array([1, 1])),
        [False, True],
    ),
    "Text": (
        gym.spaces.Text(3, charset="ab"),
        np.array(["a", "bab"]),
        np.array(["a", "c", "aaaa"]),
        [False, True, True],
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_rows_outside_of_a_space_are_told_for_all_rows_at_once(name: str) -> None:
    space, inside, mixed, expected = SPACES[name]
    assert not rows_outside(space, inside).rows.any()
    assert rows_outside(space, mixed).rows.tolist() == expected


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Sequence(gym.spaces.Box(0, 1, (2,))),
        gym.spaces.OneOf([gym.spaces.Discrete(3), gym.spaces.Box(0, 1, (2,))]),
        gym.spaces.Graph(gym.spaces.Box(0, 1, (2,)), gym.spaces.Discrete(3)),
    ],
    ids=lambda space: type(space).__name__,
)
@pytest.mark.parametrize("writer", WRITERS)
def test_objects_of_a_space_are_inside_also_after_they_were_stored(space: Any, writer: Any) -> None:
    space.seed(0)
    objects = np.empty(12, object)
    objects[:] = [space.sample() for _ in range(12)]
    spaces = {"default_policy": (space, gym.spaces.Discrete(2))}
    assert codes(steps(range(12), obs=objects), spaces=spaces, writer=writer) == []
    objects[5] = "no such thing"
    assert codes(steps(range(12), obs=objects), spaces=spaces, writer=writer) == [("outside-space", 1)]


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (BOX, np.zeros((3, 4))),
        (BOX, {"a": np.zeros((3, 2))}),
        (BOX, np.array(["a", "b", "c"])),
        (gym.spaces.Dict(a=BOX), np.zeros((3, 2))),
        (gym.spaces.Dict(a=BOX), {"b": np.zeros((3, 2))}),
        (gym.spaces.Tuple([BOX]), (np.zeros((3, 2)), np.zeros(3))),
        (gym.spaces.Text(3), np.zeros(3)),
    ],
)
def test_a_column_of_another_structure_is_no_part_of_a_space(space: Any, value: Any) -> None:
    with pytest.raises(Misfit):
        rows_outside(space, value)


def spaced(**columns: Any) -> Callable[..., list[tuple[str, str | None, int]]]:
    """Findings of a batch of a Box observation and a given action space."""

    def found(action_space: Any, **provenance: Any) -> list[tuple[str, str | None, int]]:
        count = len(next(iter(columns.values())))
        options: dict[str, Any] = {"spaces": {"default_policy": (BOX, action_space)}}
        if provenance:
            options["provenance"] = Provenance(**provenance)
        return [(f.code, f.column, f.rows) for f in findings(steps(range(count), **columns), **options)]

    return found


OBS = np.zeros((4, 2), np.float32)
WIDE = np.array([[0, 0], [0, 3], [5, 0], [0, 0]], np.float32)


def test_observations_outside_of_their_space_are_found() -> None:
    assert spaced(obs=WIDE)(gym.spaces.Discrete(2)) == [("outside-space", "obs", 2)]
    assert spaced(obs=OBS, new_obs=WIDE)(gym.spaces.Discrete(2)) == [("outside-space", "new_obs", 2)]


def test_a_missing_final_observation_is_not_outside_of_a_space_without_zero() -> None:
    space = gym.spaces.Box(1, 2, (2,), np.float32)
    valid = np.array([True, True, True, False])
    columns = {
        "obs": OBS + 1,
        "new_obs": (OBS + 1) * valid[:, None].astype(np.float32),
        "new_obs_valid": valid,
    }
    spaces = {"default_policy": (space, gym.spaces.Discrete(2))}
    assert codes(steps(range(4), **columns), spaces=spaces) == []


def test_what_a_preprocessor_made_is_not_held_against_the_environments_space() -> None:
    assert spaced(obs=np.full((4, 9), 9.0))(gym.spaces.Discrete(2), observations="preprocessed") == []


def test_a_policys_own_actions_may_exceed_a_box_and_nothing_else() -> None:
    actions = np.array([[0, 0], [0, 3], [0, 0], [0, 0]], np.float32)
    assert spaced(actions=actions)(BOX) == [("raw-action-outside", "actions", 1)]
    assert spaced(actions=actions)(BOX, actions="sent") == [("outside-space", "actions", 1)]
    assert spaced(actions=np.array([0, 1, 2, 1]))(gym.spaces.Discrete(2)) == [("outside-space", "actions", 1)]


def test_columns_that_cannot_be_in_their_space_are_told_once_and_not_row_by_row() -> None:
    assert spaced(obs=np.zeros((4, 3)))(gym.spaces.Discrete(2)) == [("space-mismatch", "obs", 0)]


def test_a_nan_is_found_as_one_and_not_as_outside_too() -> None:
    odd = OBS.copy()
    odd[1, 0] = np.nan
    assert spaced(obs=odd)(gym.spaces.Discrete(2)) == [("nan", "obs", 1)]
