"""`Dataset.episodes`, `returns` and `lengths`: one row an episode, equal to NumPy over all rows."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlio
from rlio.errors import CorruptData, MissingColumn, OptionError
from rlio.look.kept import keep
from rlio.schemas.shard_file import ShardFile
from rlio.schemas.streams import STREAM_COLUMNS
from rlio.writers.roll import Roll

ENDS = ("terminated", "truncated", "open")
NAMES = (f"memory://episode-table-{number}" for number in itertools.count())
# Sums of these are exact in any order.
REWARDS = st.sampled_from([0.0, 1.0, -2.5, 0.25, 8.0] * 3 + [math.nan, math.inf, -math.inf])


class Drawn(NamedTuple):
    """An episode that is recorded."""

    agent: int
    end: str
    rewards: list[float]


def rows_of(
    drawn: Drawn, number: int, *, ids: bool, agents: str, first: int = 0, stop: int | None = None
) -> rlio.SampleBatch:
    """The rows of an episode, or a part of them."""
    n = len(drawn.rewards)
    t = np.arange(n)
    columns: dict[str, Any] = {
        "obs": (100.0 * number + t)[:, None] * np.ones(3),
        "actions": t,
        "rewards": np.array(drawn.rewards),
        "terminateds": (t == n - 1) & (drawn.end == "terminated"),
        "truncateds": (t == n - 1) & (drawn.end == "truncated"),
    }
    if ids:
        columns |= {"eps_id": np.full(n, number), "t": t}
    if agents == "column":
        columns["agent_index"] = np.full(n, drawn.agent)
    part: rlio.SampleBatch = rlio.SampleBatch(columns)[first:stop]
    return part


def interleaved(
    writer: list[Drawn], choice: random.Random, *, ids: bool, agents: str
) -> Iterator[rlio.SampleBatch | rlio.MultiAgentBatch]:
    """The rows of a writer's episodes in pieces, of which each episode's come in order."""
    counts = [0, 0]
    waiting: list[list[rlio.SampleBatch]] = []
    for drawn in writer:
        number, n = counts[drawn.agent], len(drawn.rewards)
        counts[drawn.agent] += 1
        cuts = sorted({0, n, *(choice.randrange(n) for _ in range(2))})
        parts = [
            rows_of(drawn, number, ids=ids, agents=agents, first=a, stop=b)
            for a, b in itertools.pairwise(cuts)
        ]
        if agents == "policies":
            policy = "ab"[drawn.agent]
            waiting.append([rlio.MultiAgentBatch({policy: part}, len(part)) for part in parts])
        else:
            waiting.append(parts)
    while waiting:
        # Without ids, the episodes of an agent follow each other.
        at = choice.randrange(len(waiting)) if ids else 0
        yield waiting[at].pop(0)
        if not waiting[at]:
            waiting.pop(at)


def expected(data: rlio.Dataset) -> list[tuple[Any, ...]]:
    """(writer, policy, agent, length, return, end, finished) of each episode, by a loop over all rows."""
    names = {name for columns in data.columns.values() for name in columns}
    frame = data.to_pandas(writers="_writer" not in names).to_dict("records")
    found: dict[Any, list[dict[str, Any]]] = {}
    turns: dict[Any, int] = {}
    for row in frame:
        stream = (row["_writer"], row.get("policy_id", "default_policy"), row.get("agent_index"))
        episode = row.get("eps_id", turns.setdefault(stream, 0))
        found.setdefault((*stream, episode), []).append(row)
        turns[stream] = turns.get(stream, 0) + bool(row["terminateds"] or row["truncateds"])
    ends = {
        key: "terminated" if rows[-1]["terminateds"] else "truncated" if rows[-1]["truncateds"] else "open"
        for key, rows in found.items()
    }
    trimmed = data.snapshot()
    starts = {
        key: rows[0]["t"] == 0 if "t" in rows[0] else not isinstance(trimmed.get(key[0]), list)
        for key, rows in found.items()
    }
    with np.errstate(invalid="ignore"):
        return [
            (
                *(*key[:3], len(rows), float(np.sum([row["rewards"] for row in rows])), ends[key]),
                starts[key] and ends[key] != "open",
            )
            for key, rows in found.items()
        ]


def check(data: rlio.Dataset) -> None:
    """Compare the table with NumPy over all rows, and with `data.episode`."""
    table, wanted = data.episodes, expected(data)
    count = len(table)
    writers = table["writer"]
    policies = table["policy"] if "policy" in table.columns else ["default_policy"] * count
    agents = table["agent"].tolist() if "agent" in table.columns else [None] * count
    end = np.where(
        table["terminated"], "terminated", np.where(table["truncated"], "truncated", "open")
    ).tolist()
    values = (data.lengths().tolist(), data.returns().tolist(), end, table["finished"].tolist())
    found = list(zip(writers, policies, agents, *values, strict=True))
    if "policy" not in table.columns:  # There may be one alone, with another name.
        wanted = [(w, "default_policy", *rest) for w, _, *rest in wanted]
    if "agent" not in table.columns:
        wanted = [(w, p, None, *rest) for w, p, _, *rest in wanted]
    if "policy" in table.columns:  # The rows of a joint step have no order.
        found, wanted = sorted(found, key=repr), sorted(wanted, key=repr)
    assert list(map(repr, found)) == list(map(repr, wanted))
    assert table["episode"].tolist() == list(range(count))
    assert (data.returns().dtype, data.lengths().dtype) == (np.float64, np.int64)
    assert data.episode_count == count
    assert int(data.lengths().sum()) == sum(one[3] for one in wanted)
    for row in table:
        episode = data.episode(row["episode"])
        assert (episode.id_, len(episode), episode.terminated, episode.truncated) == (
            row["eps_id"],
            row["length"],
            row["terminated"],
            row["truncated"],
        )
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(episode.total_reward, row["return"])


EPISODES = st.builds(
    Drawn,
    agent=st.integers(0, 1),
    end=st.sampled_from(ENDS),
    rewards=st.lists(REWARDS, min_size=1, max_size=6),
)


@given(
    writers=st.lists(st.lists(EPISODES, min_size=1, max_size=4), min_size=1, max_size=3),
    kind=st.sampled_from([rlio.ParquetWriter, rlio.JsonWriter]),
    ids=st.booleans(),
    agents=st.sampled_from(["one", "column", "policies"]),
    shard_rows=st.integers(2, 9),
    choice=st.randoms(use_true_random=False),
    change=st.sampled_from(["none", "compact", "trim", "snapshot", "merge", "compact and trim"]),
)
def test_returns_and_lengths_are_those_of_numpy_over_all_rows(
    writers: list[list[Drawn]],
    kind: type[rlio.ParquetWriter] | type[rlio.JsonWriter],
    ids: bool,
    agents: str,
    shard_rows: int,
    choice: random.Random,
    change: str,
) -> None:
    ids = ids or agents == "policies"  # Joint steps are told apart by eps_id and t.
    if agents == "one":
        writers = [[drawn._replace(agent=0) for drawn in own] for own in writers]
    root = next(NAMES)
    for number, own in enumerate(writers):
        with kind(root, writer_id=f"w{number}", roll=Roll(max_rows=shard_rows), spool=None) as writer:
            for batch in interleaved(own, choice, ids=ids, agents=agents):
                writer.write(batch)
    data = rlio.open_dataset(root)
    if "compact" in change and kind is rlio.ParquetWriter:
        rlio.maintenance.compact(root)
    if "trim" in change:
        rlio.maintenance.trim(root, before={"w0": choice.randrange(int(str(data.snapshot()["w0"])))})
    if change == "merge" and kind is rlio.ParquetWriter:
        root = next(NAMES)
        rlio.maintenance.compact(data.uri, into=root)
    at = None
    if change == "snapshot" and agents != "policies":
        at = {name: choice.randrange(1, int(str(rows)) + 1) for name, rows in data.snapshot().items()}
    check(rlio.open_dataset(root, at=at))


def recorded(
    root: Path | str, *episodes: Drawn, ids: bool = True, rows: int = 4, **options: Any
) -> rlio.Dataset:
    """A data set of these episodes, in shards of a few rows."""
    with rlio.ParquetWriter(root, roll=Roll(max_rows=rows), spool=None, **options) as writer:
        for number, drawn in enumerate(episodes):
            writer.write(rows_of(drawn, number, ids=True, agents="one"))
    return rlio.open_dataset(root)


def test_equal_ids_of_two_writers_are_two_episodes_also_once_the_writers_are_merged(tmp_path: Path) -> None:
    for name, drawn in (("w0", Drawn(0, "open", [1.0, 2.0])), ("w1", Drawn(0, "terminated", [4.0]))):
        recorded(tmp_path / "root", drawn, writer_id=name)
    rlio.maintenance.compact(tmp_path / "root", into=tmp_path / "merged")
    for root in ("root", "merged"):
        data = rlio.open_dataset(tmp_path / root)
        check(data)
        table = data.episodes
        assert (table["writer"].tolist(), table["return"].tolist()) == (["w0", "w1"], [3.0, 4.0])
        assert table["finished"].tolist() == [False, True]


FOUR = (
    Drawn(0, "terminated", [1.0, 2.0, 3.0]),
    Drawn(0, "truncated", [4.0] * 5),
    Drawn(0, "terminated", [math.nan, 1.0]),
    Drawn(0, "open", [1.0]),
)


def test_a_table_has_a_row_an_episode_and_numpy_columns() -> None:
    data = recorded(next(NAMES), *FOUR, writer_id="w0")
    table = data.episodes
    assert isinstance(table, rlio.EpisodeTable)
    assert table is data.episodes
    assert len(data.files()) > 1
    assert table.columns == [
        *(
            "episode",
            "writer",
            "eps_id",
            "length",
            "return",
            "terminated",
            "truncated",
            "finished",
            "start_time",
        )
    ]
    assert table["length"].tolist() == [3, 5, 2, 1]
    np.testing.assert_array_equal(table["return"], [6.0, 20.0, math.nan, 1.0])
    assert table["finished"].tolist() == [True, True, True, False]
    assert [table[name].dtype for name in ("eps_id", "length", "return", "start_time")] == [
        *(np.int64, np.int64, np.float64, np.dtype("datetime64[ms]"))
    ]
    assert table[-1] == {
        "episode": 3,
        "writer": "w0",
        "eps_id": 3,
        "length": 1,
        "return": 1.0,
        "terminated": False,
        "truncated": False,
        "finished": False,
        "start_time": None,
    }
    assert [row["episode"] for row in table] == [0, 1, 2, 3]
    with pytest.raises(MissingColumn, match="length"):
        table["reward"]
    with pytest.raises(IndexError):
        table[4]
    with pytest.raises(OptionError):
        table[1.5]


def test_the_columns_of_a_table_cannot_be_changed_and_those_of_a_data_set_are_the_callers() -> None:
    data = recorded(next(NAMES), *FOUR)
    for table in (data.episodes, data.episodes[1:], data.episodes.sort("length")):
        with pytest.raises(ValueError, match="read-only"):
            table["length"][0] = 0
    data.lengths()[:] = 0
    data.returns()[:] = 0
    frame = data.episodes.to_pandas()
    frame.loc[0, "length"] = 0
    assert data.lengths().tolist() == [3, 5, 2, 1]


def test_a_table_is_sorted_stably_with_unknown_values_last() -> None:
    table = recorded(next(NAMES), *FOUR, Drawn(0, "open", [6.0]), Drawn(0, "open", [0.0])).episodes
    for descending, wanted in ((False, [5, 3, 0, 4, 1, 2]), (True, [1, 0, 4, 3, 5, 2])):
        assert table.sort("return", descending=descending)["episode"].tolist() == wanted
    assert table.sort("finished", descending=True)["episode"].tolist() == [0, 1, 2, 3, 4, 5]
    assert table.sort("eps_id", descending=True)[0]["eps_id"] == 5
    assert table.sort("start_time")["episode"].tolist() == [0, 1, 2, 3, 4, 5]
    assert table.sort("writer", descending=True)["episode"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("return > 5", [0, 1]),
        ("not (return > 5)", [2, 3]),
        ("finished and length < 5", [0, 2]),
        ("episode_return > 5 and episode_length == 3", [0]),
        ("return >= quantile(0.5)", [0, 1]),
        ("truncated or eps_id in (0, 3)", [0, 1, 3]),
        ("isnan(return)", [2]),
        ("column('return') > 5", [0, 1]),
        ("writer == 'w0'", [0, 1, 2, 3]),
        ("writer == 'return > length'", []),
    ],
)
def test_a_text_chooses_episodes(text: str, wanted: list[int]) -> None:
    table = recorded(next(NAMES), *FOUR, writer_id="w0").episodes
    assert table.filter(text)["episode"].tolist() == wanted


def test_masks_slices_and_numbers_choose_episodes() -> None:
    table = recorded(next(NAMES), *FOUR).episodes
    assert table[table["length"] > 2]["episode"].tolist() == [0, 1]
    assert table.filter(table["length"] > 2)["episode"].tolist() == [0, 1]
    assert table[::-2]["episode"].tolist() == [3, 1]
    assert table[[3, -4]]["episode"].tolist() == [3, 0]
    assert len(table[[]]) == len(table.filter("length > 9")) == 0
    for wrong in (np.ones(3, bool), np.ones(4), 3):
        with pytest.raises(OptionError):
            table.filter(wrong)  # type: ignore[arg-type]  # The test.
    with pytest.raises(OptionError, match="datetime64"):
        table.filter("start_time > '2026'")
    with pytest.raises(MissingColumn, match=r"did you mean 'length'.*lenght"):
        table.filter("lenght > 2")
    for derived_of_rows in ("mc_return > 3", "returns_to_go > 3", "rewards > 3"):
        with pytest.raises(MissingColumn, match="the table has the columns episode, writer, "):
            table.filter(derived_of_rows)


def test_a_table_becomes_a_frame() -> None:
    table = recorded(next(NAMES), *FOUR).episodes
    frame = table.to_pandas()
    assert list(frame.columns) == table.columns
    assert frame["return"].mean() == 9.0  # pandas leaves NaN out.
    assert frame["start_time"].isna().all()
    arrow = table.to_arrow()
    assert arrow.column_names == table.columns
    assert arrow["length"].to_pylist() == [3, 5, 2, 1]
    assert math.isnan(arrow["return"].to_pylist()[2])
    assert str(arrow.schema.field("start_time").type) == "timestamp[ms]"


def test_a_table_shows_its_first_and_last_rows() -> None:
    table = recorded(next(NAMES), *FOUR).episodes
    lines = repr(table).splitlines()
    assert lines[0] == "EpisodeTable(4 episodes, 1 unfinished)"
    assert lines[1].split() == table.columns
    assert len(lines) == 6
    assert lines[3].split()[3:5] == ["5", "20"]
    many = table[np.arange(100) % 4]
    assert len(repr(many).splitlines()) == 11
    assert "..." in repr(many)
    assert repr(table[:0]).splitlines()[0] == "EpisodeTable(0 episodes)"
    assert repr(table[:1]).splitlines()[0] == "EpisodeTable(1 episode)"


def test_ids_of_strangers_cannot_break_the_lines_of_a_shown_table(tmp_path: Path) -> None:
    ids = np.array(["a\nb", "\x1b[2J", "x" * 1000], object)
    with rlio.ParquetWriter(tmp_path, spool=None) as writer:
        writer.write(rlio.SampleBatch(rewards=np.ones(3), eps_id=ids))
    shown = repr(rlio.open_dataset(tmp_path).episodes)
    assert len(shown.splitlines()) == 5
    assert all(line.isprintable() for line in shown.splitlines())
    assert max(map(len, shown.splitlines())) < 200


def test_episodes_have_the_time_of_their_start_in_every_shard(tmp_path: Path) -> None:
    start = datetime(2026, 1, 31, 12, tzinfo=UTC)
    batch = rows_of(FOUR[1], 1, ids=True, agents="one")
    batch.episode_starts = {1: int(start.timestamp() * 1000)}
    with rlio.ParquetWriter(tmp_path, roll=Roll(max_rows=2), spool=None) as writer:
        writer.write(rows_of(FOUR[0], 0, ids=True, agents="one"))
        writer.write(batch)
    data = rlio.open_dataset(tmp_path)
    assert [row["start_time"] for row in data.episodes] == [None, start]
    assert data.episodes["start_time"][1] == np.datetime64("2026-01-31T12:00")
    assert data.episode(1).start_time == start
    assert data.episodes.sort("start_time")["episode"].tolist() == [1, 0]
    assert data.episodes[data.episodes["start_time"] > np.datetime64("2026-01-01")]["eps_id"].tolist() == [1]


def test_data_without_rewards_has_lengths_and_refuses_returns(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path, spool=None) as writer:
        writer.write(rlio.SampleBatch(obs=np.zeros(3), eps_id=[0, 0, 1], t=[0, 1, 0]))
    data = rlio.open_dataset(tmp_path)
    assert data.lengths().tolist() == [2, 1]
    assert np.isnan(data.episodes["return"]).all()
    with pytest.raises(MissingColumn, match="rewards"):
        data.returns()


def test_writers_with_other_columns_share_a_table(tmp_path: Path) -> None:
    recorded(tmp_path, *FOUR, writer_id="w0")
    with rlio.ParquetWriter(tmp_path, spool=None, writer_id="w1") as writer:
        writer.write(rlio.SampleBatch(obs=np.zeros((3, 3)), eps_id=[0, 0, 1], t=[0, 1, 0]))
    with rlio.ParquetWriter(tmp_path, spool=None, writer_id="w2") as writer:
        writer.write(rlio.SampleBatch(obs=np.zeros((1, 3)), rewards=[5.0], eps_id=[0], extra=[1]))
    data = rlio.open_dataset(tmp_path)
    assert data.lengths().tolist() == [3, 5, 2, 1, 2, 1, 1]
    np.testing.assert_array_equal(data.returns()[[0, 4, 5, 6]], [6.0, math.nan, math.nan, 5.0])


def test_an_empty_data_set_has_an_empty_table(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path, spool=None):
        pass
    data = rlio.open_dataset(tmp_path)
    assert len(data.episodes) == len(data.lengths()) == len(data.returns()) == 0
    assert data.episodes["return"].dtype == np.float64


def test_ids_may_be_texts_and_numbers(tmp_path: Path) -> None:
    for number, ids in enumerate((np.array(["b", "a"]), np.array([2, 1]))):
        with rlio.ParquetWriter(f"{tmp_path}/{number}", spool=None) as writer:
            writer.write(rlio.SampleBatch(obs=np.zeros(2), rewards=[1.0, 2.0], eps_id=ids, t=[0, 0]))
    texts = rlio.open_dataset(f"{tmp_path}/0").episodes
    assert texts["eps_id"].tolist() == ["b", "a"]
    assert texts.sort("eps_id")["episode"].tolist() == [1, 0]
    assert texts.filter("eps_id == 'a'")["episode"].tolist() == [1]
    assert texts.to_arrow()["eps_id"].to_pylist() == ["b", "a"]
    mixed = rlio.EpisodeTable({"episode": np.arange(3), "eps_id": np.array(["b", 2, "a"], object)})
    assert mixed.sort("eps_id")["eps_id"].tolist() == [2, "a", "b"]


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    data = recorded(tmp_path, *FOUR)
    shard = Path(data.files()[1].removeprefix("file://"))
    shard.write_bytes(shard.read_bytes()[:-20] + bytes(20))
    with pytest.raises(CorruptData):
        rlio.open_dataset(tmp_path).episodes  # noqa: B018
    with pytest.raises(CorruptData):
        rlio.open_dataset(tmp_path).returns()


def test_shards_that_were_compacted_and_removed_are_looked_for(tmp_path: Path) -> None:
    data = recorded(tmp_path, *FOUR)
    rlio.maintenance.compact(tmp_path)
    rlio.maintenance.gc(tmp_path, grace=0)
    assert data.lengths().tolist() == [3, 5, 2, 1]


@pytest.mark.parametrize("kind", [rlio.ParquetWriter, rlio.JsonWriter])
def test_data_in_sequences_has_a_row_an_episode(tmp_path: Path, kind: Any) -> None:
    """Sequences are no episodes: an episode has several."""
    with kind(tmp_path, spool=None, roll=Roll(max_rows=4), writer_id="w0") as writer:
        for first in (0, 4):
            batch = rlio.SampleBatch(
                obs=np.zeros((4, 2)), actions=np.zeros(4), rewards=np.arange(first, first + 4.0),
                terminateds=[False, False, first > 0, False], eps_id=[0, 0, 0, 1],
                t=[first, first + 1, first + 2, first], seq_lens=[2, 1, 1], state_in_0=np.zeros((3, 5)),
            )  # fmt: skip
            writer.write(batch)
    data = rlio.open_dataset(tmp_path)
    assert (data.lengths().tolist(), data.returns().tolist()) == ([6, 2], [18.0, 10.0])
    assert data.episodes["finished"].tolist() == [True, False]
    assert rlio.open_dataset(tmp_path, at={"w0": 6}).lengths().tolist() == [5, 1]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "text",
    [
        "return >",
        "return > 'a'",
        "f(length) > 1",
        "return",
        "return[0] > 1",
        "length.x > 1",
        "return == 'length >' or",
    ],
)
def test_an_error_of_a_filter_quotes_the_names_that_were_typed(text: str) -> None:
    table = recorded(next(NAMES), *FOUR, writer_id="w0").episodes
    with pytest.raises((OptionError, MissingColumn)) as caught:
        table.filter(text)
    said = str(caught.value)
    assert "episode_" not in said
    assert text in said or text.partition(" ")[0].partition(".")[0] in said
    assert caught.value.column in (None, "return", "length")
    with pytest.raises(OptionError, match="episode_return >"):
        table.filter("episode_return >")


@pytest.mark.parametrize(
    ("first", "finished"),
    [((0, 0), [True, True]), ((1, 1), [True, True]), ((0, 1), [True, False]), ((2, 2), [False, False])],
)
def test_steps_may_count_from_1(tmp_path: Path, first: tuple[int, int], finished: list[bool]) -> None:
    t = np.concatenate([np.arange(start, start + 3) for start in first])
    rows = {"eps_id": np.arange(6) // 3, "t": t, "rewards": np.ones(6), "truncateds": np.arange(6) % 3 == 2}
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(rlio.SampleBatch(rows))
    data = rlio.open_dataset(tmp_path)
    assert data.episodes["finished"].tolist() == finished
    assert data.info().unfinished == 2 - sum(finished)


@pytest.mark.few(2)
@pytest.mark.parametrize("has_t", [True, False])
@pytest.mark.parametrize("change", ["trim", "trim and compact", "trim and collect"])
@pytest.mark.each_value_once
def test_an_episode_whose_first_rows_were_trimmed_is_not_finished(
    tmp_path: Path, change: str, has_t: bool
) -> None:
    """Its return was among those of the finished ones, which are sums of whole episodes."""
    for name in ("w0", "w1"):
        with rlio.ParquetWriter(tmp_path, roll=Roll(max_rows=4), spool=None, writer_id=name) as writer:
            for number, drawn in enumerate(FOUR):
                rows = rows_of(drawn, number, ids=True, agents="one")
                if not has_t:
                    del rows["t"]
                writer.write(rows)
    rlio.maintenance.trim(tmp_path, before={"w0": 4})
    if "compact" in change:
        rlio.maintenance.compact(tmp_path)
    if "collect" in change:
        rlio.maintenance.gc(tmp_path, grace=0)
    data = rlio.open_dataset(tmp_path)
    # Without t, nothing shows where an episode of a trimmed writer began.
    finished = [False, has_t, False, True, True, True, False]
    assert data.episodes["finished"].tolist() == finished
    assert data.episodes["truncated"][0]
    assert data.lengths().tolist() == [4, 2, 1, 3, 5, 2, 1]
    info = data.info()
    assert (info.terminated, info.truncated, info.unfinished) == (2 + has_t, 1, 4 - has_t)
    ended = "1 episode" if has_t else "2 episodes"
    assert [note for note in info.notes if note.startswith(f"{ended} that ended without the first rows")]
    whole = rlio.read(tmp_path, derive=["episode_return"], cache="memory", epochs=1)
    with whole:  # The derived columns know the same episodes.
        rows = rlio.concat_samples(list(whole))
    known = {
        (eps, ret) for eps, ret in zip(rows["eps_id"], rows["episode_return"], strict=True) if ret == ret
    }
    table = data.episodes.filter("finished")
    assert known == {
        pair for pair in zip(table["eps_id"], table["return"], strict=True) if pair[1] == pair[1]
    }


@pytest.mark.parametrize("kind", [rlio.ParquetWriter, rlio.JsonWriter])
def test_episodes_have_the_version_of_the_policy_at_their_first_step(tmp_path: Path, kind: Any) -> None:
    episodes = [rows_of(drawn, number, ids=True, agents="one") for number, drawn in enumerate(FOUR)]
    batch = rlio.concat_samples(episodes)
    batch["weights_seq_no"] = np.arange(len(batch)) // 2
    with kind(tmp_path, roll=Roll(max_rows=4), spool=None, writer_id="w0") as writer:
        writer.write(batch)
    data = rlio.open_dataset(tmp_path)
    assert data.episodes["policy_version"].tolist() == [0, 1, 4, 5]
    assert data.episodes.columns[-1] == "policy_version"
    assert data.episodes.filter("policy_version > 3")["episode"].tolist() == [2, 3]
    rlio.maintenance.trim(tmp_path, before={"w0": 6})
    assert rlio.open_dataset(tmp_path).episodes["policy_version"].tolist() == [3, 4, 5]
    if kind is rlio.ParquetWriter:
        rlio.maintenance.compact(tmp_path)
        assert rlio.open_dataset(tmp_path).episodes["policy_version"].tolist() == [3, 4, 5]


def test_the_version_of_a_policy_is_unknown_in_earlier_shards_unless_it_is_constant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.schemas.group_arrays.TABLE_COLUMNS", STREAM_COLUMNS)  # As they were written.
    for number, versions in enumerate(([7] * 4, [7, 7, 8, 9])):
        batch = rlio.SampleBatch(obs=np.zeros(4), rewards=np.ones(4), eps_id=[0, 0, 1, 1], t=[0, 1, 0, 1])
        batch["weights_seq_no"] = np.array(versions)
        with rlio.ParquetWriter(tmp_path, spool=None, writer_id=f"w{number}") as writer:
            writer.write(batch)
    assert rlio.open_dataset(tmp_path).episodes["policy_version"].tolist() == [7, 7, -1, -1]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlio" / "episodes"


def fails(*_: object) -> NoReturn:
    raise AssertionError("footers were read")


def equal(found: rlio.EpisodeTable, wanted: rlio.EpisodeTable) -> None:
    assert found.columns == wanted.columns
    for name in found.columns:
        assert found[name].dtype == wanted[name].dtype
        np.testing.assert_array_equal(found[name], wanted[name])


def test_a_table_is_read_from_its_file_until_rows_change(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    before = sorted(root.rglob("*"))
    wanted = recorded(root, *FOUR, writer_id="w0").episodes
    files = sorted(root.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr("rlio.look.episode_index.join_episodes", fails)
        data = rlio.open_dataset(root)
        equal(data.episodes, wanted)
        assert data.returns()[1] == 20
        with pytest.raises(ValueError, match="read-only"):
            data.episodes["return"][0] = 1
    assert [file.suffix for file in own_cache.iterdir()] == [".episodes"]
    assert before == []
    assert sorted(root.rglob("*")) == files  # Nothing is written below the root.
    recorded(root, FOUR[1], writer_id="w1")
    assert rlio.open_dataset(root).lengths().tolist() == [3, 5, 2, 1, 5]
    assert rlio.open_dataset(root, at={"w0": 4}).lengths().tolist() == [3, 1]
    rlio.maintenance.trim(root, before={"w0": 2})
    assert rlio.open_dataset(root).lengths().tolist() == [1, 5, 2, 1, 5]


def test_ids_agents_and_times_come_back_from_the_file(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = {
        policy: rlio.SampleBatch(
            obs=np.zeros(2), rewards=[1.0, math.inf], eps_id=["x", "y"], t=[0, 0], agent_id=["left", "right"]
        )
        for policy in "ab"
    }
    for rows in joint.values():
        rows.episode_starts = {"x": 1_764_320_000_123}
    with rlio.ParquetWriter(tmp_path / "root", spool=None) as writer:
        writer.write(rlio.MultiAgentBatch(joint, 2))
    wanted = rlio.open_dataset(tmp_path / "root").episodes
    assert wanted["agent"].tolist() == ["left", "right"] * 2
    assert len(list(own_cache.iterdir())) == 1
    monkeypatch.setattr("rlio.look.episode_index.join_episodes", fails)
    equal(rlio.open_dataset(tmp_path / "root").episodes, wanted)


def test_a_damaged_file_of_a_table_is_replaced(tmp_path: Path, own_cache: Path) -> None:
    wanted = recorded(tmp_path / "root", *FOUR).episodes
    (file,) = own_cache.iterdir()
    whole = file.read_bytes()
    for content in (b"", b"ARROW1", whole[:-40], whole[:60] + bytes(2) + whole[62:], whole):
        file.write_bytes(content)
        equal(rlio.open_dataset(tmp_path / "root").episodes, wanted)
        assert file.read_bytes() == whole


def test_a_table_needs_no_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert recorded(tmp_path / "root", *FOUR).lengths().tolist() == [3, 5, 2, 1]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")
    assert rlio.open_dataset(tmp_path / "root").lengths().tolist() == [3, 5, 2, 1]


def test_the_oldest_kept_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.look.kept.MAX_BYTES", 250)
    (tmp_path / "other.txt").write_bytes(bytes(1000))
    for number in range(4):
        keep(str(tmp_path / f"{number}.arrow"), bytes(100))
        os.utime(tmp_path / f"{number}.arrow", (number, number))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["2.arrow", "3.arrow", "other.txt"]


def test_what_needs_no_table_makes_none(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = recorded(tmp_path / "root", *FOUR)
    monkeypatch.setattr("rlio.look.episode_index.read_episodes", fails)
    assert (len(data), repr(data)[:8], len(data.episode(1)), data.episode_count) == (11, "Dataset(", 5, 4)
    assert not own_cache.exists()


def test_wide_columns_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole shards, no row group is."""
    data = recorded(tmp_path, *FOUR[:2], Drawn(0, "open", [math.nan, 1.0]), writer_id="w0")
    monkeypatch.setattr("rlio.schemas.shard_file.ShardFile.read_group", fails)
    np.testing.assert_array_equal(data.returns(), [6.0, 20.0, math.nan])
    monkeypatch.undo()
    read = []
    whole = ShardFile.read_group

    def noted(self: Any, index: int, *, columns: Any = None, **options: Any) -> Any:
        read.append(columns)
        return whole(self, index, columns=columns, **options)

    monkeypatch.setattr("rlio.schemas.shard_file.ShardFile.read_group", noted)
    assert rlio.open_dataset(tmp_path, at={"w0": 2}).lengths().tolist() == [2]
    assert len(read) == 1
    assert "obs" not in read[0]
    assert "actions" not in read[0]
