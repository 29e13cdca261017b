"""The table of streams: which rows belong together, told by the plain rule."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.errors import CorruptData
from rlio.schemas.streams import Streams, StreamTable, Times


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans(), st.floats(-1e6, 1e6)), max_size=40
    ),
    keyed=st.booleans(),
    texts=st.booleans(),
    cut=st.integers(0, 40),
)
@settings(max_examples=80, deadline=None)
def test_a_stream_is_an_episode_of_an_agent(rows: list[Any], keyed: bool, texts: bool, cut: int) -> None:
    """By eps_id and env_id; without eps_id, by env_id and the ends of episodes; over two writes."""
    table = StreamTable()
    found: list[int] = []
    for part in (rows[:cut], rows[cut:]):
        eps = [f"e{row[0]}" if texts else row[0] for row in part]
        columns: dict[str, np.ndarray] = {
            "env_id": np.array([row[1] for row in part], int),
            "terminateds": np.array([row[2] for row in part], bool),
            "rewards": np.array([row[3] for row in part], float),
            "t": np.arange(len(part)),
        }
        if keyed:
            columns["eps_id"] = np.array(eps, object if texts else int)
        found += table.assign("p", columns, len(part)).tolist()
    number: dict[Any, int] = {}
    episode = {0: 0, 1: 0}
    expected, sums = [], [0.0] * 100
    for eps_id, env, end, reward in rows:
        key = (eps_id, env) if keyed else (env, episode[env])
        expected.append(number.setdefault(key, len(number)))
        sums[expected[-1]] += reward
        episode[env] += end
    assert found == expected
    streams = table.streams
    assert len(streams) == len(number)
    assert streams.rows == [expected.count(i) for i in range(len(number))]
    assert np.allclose(streams.reward, sums[: len(number)])
    ends = {i: "terminated" if row[2] else "open" for i, row in zip(expected, rows, strict=True)}
    assert streams.end == [ends[i] for i in range(len(number))]
    again = Streams.from_json(json.loads(json.dumps(streams.to_json(), allow_nan=False)))
    assert again == streams


def test_a_stream_begins_where_its_first_row_does_and_ends_as_its_last_one_says() -> None:
    """Over the runs of interleaved episodes and over two writes."""
    table = StreamTable()
    for first in (5, 9):
        columns = {
            "eps_id": np.array([7, 8, 7, 8]),
            "t": np.array([first, first + 10, first + 1, first + 11]),
            "truncateds": np.array([False, False, first == 9, False]),
            "terminateds": np.array([False, False, False, first == 5]),
        }
        table.assign("p", columns, 4)
    assert table.streams.rows == [4, 4]
    assert table.streams.t0 == [5, 15]
    assert table.streams.end == ["truncated", "open"]


@pytest.mark.few(3)
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("environments", [1, 7])
def test_many_runs_are_entered_as_their_rows_one_by_one(environments: int, ids: bool) -> None:
    """Environments that take turns make each row a run; short episodes make many, too."""
    step, env = np.divmod(np.arange(300), environments)
    columns: dict[str, Any] = {
        "env_id": env,
        "t": step % 3,
        "rewards": np.arange(300) % 5,
        "terminateds": (step % 3 == 2) & (env % 2 == 0),
        "truncateds": (step % 3 == 2) & (env % 2 == 1),
        "weights_seq_no": step,
    }
    if ids:
        columns["eps_id"] = step // 3 * environments + env
    times = [(0, Times(10)), (100, Times(20, {5: 7})), (250, Times(30))]
    together, alone = StreamTable(), StreamTable()
    found = together.assign("p", columns, 300, times=times)
    expected = []
    for row in range(300):
        own = [(0, of) for first, of in times if first <= row][-1:]
        expected += alone.assign(
            "p", {name: values[row : row + 1] for name, values in columns.items()}, 1, times=own
        ).tolist()
    assert found.tolist() == expected
    assert together.streams == alone.streams
    assert len(together.streams) >= 100


def test_policies_agents_and_kinds_of_ids_are_told_apart() -> None:
    table = StreamTable()
    ids = {"eps_id": np.array([1, "1", 1], object), "agent_index": np.array([0, 0, 1])}
    assert table.assign("a", ids, 3).tolist() == [0, 1, 2]
    assert table.assign("b", ids, 3).tolist() == [3, 4, 5]
    assert table.streams.eps_id == [1, "1", 1] * 2


def test_columns_that_cannot_name_streams_are_passed_over() -> None:
    table = StreamTable()
    columns = {"eps_id": np.zeros((3, 2)), "env_id": np.array([0.5, 1.5, 2.5]), "rewards": np.zeros((3, 2))}
    assert table.assign("p", columns, 3).tolist() == [0, 0, 0]
    assert table.streams.eps_id == [None]
    assert table.assign("p", {}, 0).tolist() == []


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_rewards_without_a_finite_sum_are_null(reward: float) -> None:
    table = StreamTable()
    table.assign("p", {"rewards": np.array([1.0, reward])}, 2)
    assert table.streams.to_json()["reward"] == [None]


@pytest.mark.parametrize(
    "written",
    [None, [], {}, {"policy": []}, dict.fromkeys(vars(Streams()), 7),
     {name: [1] for name in vars(Streams())},
     {**vars(Streams()), "rows": [1]}, {**vars(Streams()), "more": []}],
)  # fmt: skip
def test_tables_from_strangers_are_checked(written: Any) -> None:
    with pytest.raises(CorruptData):
        Streams.from_json(written)
