"""Mappings of the layouts that other projects write: where episodes begin, and what a row is.

Numbers say where they belong, as in tests/test_mapping.py: row t of episode e has x = 100 e + t.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from further import first, further
from typer.main import get_command
from typer.testing import CliRunner

import rlio
from rlio.cli.data import flag_of
from rlio.cli.main import app
from rlio.errors import (
    CorruptData,
    MissingColumn,
    OptionError,
    RlioError,
    SchemaError,
    StateError,
    UnknownLayout,
    UnsafeData,
)
from rlio.formats.files.arrow_columns import to_column
from rlio.formats.tables import table as table_module
from rlio.formats.tables import table as tables
from rlio.formats.tables import text_table
from rlio.source import episodes as episodes_module

LENGTHS = (3, 1, 5)
COLUMNS = {"obs": ["x"], "actions": "a", "rewards": "r"}


def steps(lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[Any]]:
    """A table whose episodes are marked in every way that a column may mark them; the odd ones terminate."""
    rows = [(e, t, count) for e, count in enumerate(lengths, 1) for t in range(count)]
    return {
        "x": [100.0 * e + t for e, t, _ in rows],
        "a": [t % 3 for _, t, _ in rows],
        "r": [1000.0 * e + t for e, t, _ in rows],
        "first": [t == 0 for _, t, _ in rows],
        "done": [e % 2 == 1 and t == count - 1 for e, t, count in rows],
        "masks": [float(e % 2 == 0 or t < count - 1) for e, t, count in rows],
    }


def all_rows(reader: Any) -> rlio.SampleBatch:
    with reader:
        return rlio.concat_samples(list(reader))


def rows_of(source: Any, **fields: Any) -> rlio.SampleBatch:
    """All rows by a mapping with these fields, from a path, a table or a dict of arrays."""
    given = rlio.Mapping(**{"columns": COLUMNS, **fields})
    read = rlio.from_arrays if isinstance(source, dict) else rlio.read
    return all_rows(read(source, mapping=given, epochs=1))


def message_of(source: Any, error: type[RlioError] = SchemaError, **fields: Any) -> str:
    """The error that these fields cause."""
    with pytest.raises(error) as caught:
        rows_of(source, **fields)
    return str(caught.value)


def ends_of(rows: rlio.SampleBatch) -> tuple[list[int], list[int], list[int]]:
    """Lengths of the episodes, rows that terminate one, rows that truncate one."""
    return (
        np.bincount(rows["eps_id"]).tolist(),
        np.flatnonzero(rows["terminateds"]).tolist(),
        np.flatnonzero(rows["truncateds"]).tolist(),
    )


# ---- starts=, and "not masks" ----


@pytest.fixture(params=[2, *further(65_536)])
def scanned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans of few and of many rows."""
    monkeypatch.setattr(tables, "SCAN_ROWS", request.param)


@pytest.mark.parametrize("kind", [str, *further(bool, int, float)])
@pytest.mark.usefixtures("scanned")
def test_a_flag_of_first_rows_begins_episodes(kind: type) -> None:
    table = pd.DataFrame({**steps(), "first": [kind(flag) for flag in steps()["first"]]})
    assert ends_of(rows_of(table, starts="first")) == ([3, 1, 5], [], [2, 3])  # The last may go on.
    assert ends_of(rows_of(table, starts="first", terminated="done")) == ([3, 1, 5], [2, 8], [3])
    assert ends_of(rows_of(table, starts="first", per_file=True)) == ([3, 1, 5], [], [2, 3, 8])
    rows = rows_of(table, starts="first", next_obs="derive")
    assert rows["new_obs"][:, 0].tolist() == [101, 102, 0, 0, 301, 302, 303, 304, 0]
    assert rows["t"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]


def test_a_flag_of_first_rows_shows_where_final_rows_are() -> None:
    rows = rows_of(pd.DataFrame(steps((3, 2, 5))), starts="first", next_obs="derive", final_row=True)
    assert rows["obs"][:, 0].tolist() == [100, 101, 200, 300, 301, 302, 303]
    assert rows["new_obs"][:, 0].tolist() == [101, 102, 201, 301, 302, 303, 304]


def test_files_whose_first_row_is_no_start_are_refused_unless_they_are_said_to_go_on(tmp_path: Path) -> None:
    table = pd.DataFrame(steps())
    table[:2].to_csv(tmp_path / "0.csv", index=False)
    table[2:].to_csv(tmp_path / "1.csv", index=False)
    assert "per_file=False" in message_of(tmp_path, starts="first")
    assert "row 2 begins an episode" in message_of(tmp_path, starts="first", per_file=True)
    assert ends_of(rows_of(tmp_path, starts="first", per_file=False))[0] == [3, 1, 5]


def test_a_flag_that_does_not_mark_first_rows_is_refused_as_starts() -> None:
    table = pd.DataFrame({**steps((3, 2, 5)), "masks": [1.0] * 2 + [0.0] + [1.0] * 7})
    assert "terminated='done'" in message_of(table, starts="done")
    assert "terminated='not masks'" in message_of(table, starts="masks")
    assert "row 0" in message_of(table[1:].reset_index(drop=True), starts="first")
    more = {**steps((3, 2, 5)), "x2": [x + 1 for x in steps((3, 2, 5))["x"]]}
    shifted = pd.DataFrame(
        {**more, "first": [True, True, False, False, True, False, False, False, False, False]}
    )
    assert "its new_obs is the obs of row" in message_of(shifted, starts="first", next_obs=["x2"])


@pytest.mark.parametrize("kind", [str, *further(bool, int, float)])
@pytest.mark.usefixtures("scanned")
def test_a_mask_ends_an_episode_where_it_is_0(kind: type) -> None:
    table = {**steps((3, 5)), "masks": [kind(t != 2) for t in range(8)]}
    for source in (pd.DataFrame(table), pa.table(table)):
        assert ends_of(rows_of(source, terminated="not masks")) == ([3, 5], [2], [])
        assert ends_of(rows_of(source, truncated="not masks", terminated="done"))[1:] == ([2], [2])
        named = source if isinstance(source, pa.Table) else pa.table(table)
    spelled = named.rename_columns([name if name != "masks" else "not masks" for name in named.column_names])
    inverted = {**table, "not masks": [kind(t == 2) for t in range(8)]}
    assert ends_of(rows_of(pd.DataFrame(inverted), terminated="not masks"))[1] == [2]
    assert "row 0" in message_of(spelled, terminated="not masks")  # It is the name of a column.


def test_a_discount_below_1_goes_on_and_other_numbers_are_no_mask() -> None:
    table = {**steps((3, 5)), "discount": [0.99] * 2 + [0.0] + [0.99] * 5}
    assert ends_of(rows_of(table, terminated="not discount")) == ([3, 5], [2], [])
    assert "0 where an episode ends" in message_of(table, terminated="not r")
    assert "0 where an episode ends" in message_of(
        {**table, "discount": [np.nan] * 8}, terminated="not discount"
    )


def test_a_mask_that_is_missing_in_final_rows_is_no_end() -> None:
    table = pa.table({**steps((3, 5)), "masks": pa.array([1, 0, None, 1, 1, 1, 1, None], pa.float64())})
    fields: dict[str, Any] = {"starts": "first", "next_obs": "derive", "final_row": True}
    assert ends_of(rows_of(table, terminated="not masks", **fields)) == ([2, 4], [1], [5])
    whole = table.set_column(table.column_names.index("masks"), "masks", table["masks"].cast(pa.int64()))
    assert "null" in message_of(whole, terminated="not masks", **fields)


@pytest.mark.parametrize("text", ["~masks", "masks == 0", "1 - masks", "not masks and done", "NOT masks"])
def test_expressions_other_than_not_are_refused(text: str) -> None:
    with pytest.raises(MissingColumn, match="no column"):
        rows_of(steps(), terminated=text)
    if text != "NOT masks":
        assert "only expression" in message_of(steps(), MissingColumn, terminated=text)


# ---- lengths= and ends= ----


def arrays(**more: Any) -> dict[str, Any]:
    return {**{name: np.array(values) for name, values in steps().items()}, **more}


def places(tmp_path: Path, **more: Any) -> list[Any]:
    """NPZ, and arrays in memory."""
    np.savez(tmp_path / "log.npz", **arrays(**more))
    return [tmp_path / "log.npz", arrays(**more)]


def test_an_array_of_lengths_under_any_name_says_where_episodes_end(tmp_path: Path) -> None:
    for source in places(tmp_path, traj_lens=[3, 1, 0, 5], as_floats=np.array([3.0, 1, 5])):
        assert ends_of(rows_of(source, lengths="traj_lens")) == ([3, 1, 5], [], [2, 3, 8])
        assert ends_of(rows_of(source, lengths="as_floats", terminated="done")) == ([3, 1, 5], [2, 8], [3])
    np.savez(tmp_path / "log.npz", **arrays(lengths=[3, 1, 5]))
    assert ends_of(rows_of(tmp_path / "log.npz", lengths="lengths"))[0] == [3, 1, 5]


@pytest.mark.parametrize("ends", [[3, 4, 9], [3, 4], [0, 3, 4], [0, 3, 4, 9]])
def test_ends_are_cumulative_lengths_split_points_or_first_rows(ends: list[int], tmp_path: Path) -> None:
    for source in places(tmp_path, indices=ends):
        assert ends_of(rows_of(source, ends="indices")) == ([3, 1, 5], [], [2, 3, 8])


def test_lengths_and_ends_are_those_of_each_file(tmp_path: Path) -> None:
    for number in range(2):
        np.savez(tmp_path / f"{number}.npz", **arrays(lens=[3, 1, 5], ends=[3, 4, 9]))
    for fields in ({"lengths": "lens"}, {"ends": "ends"}, {"lengths": "lens", "per_file": True}):
        assert ends_of(rows_of(tmp_path, **fields))[0] == [3, 1, 5] * 2
    with pytest.raises(OptionError, match="per_file=False and lengths="):
        rows_of(tmp_path, lengths="lens", per_file=False)


def test_lengths_may_count_the_final_row_or_not(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"next_obs": "derive", "final_row": True}
    for lengths in ([3, 1, 5], [2, 0, 4]):
        for source in places(tmp_path, lens=lengths):
            rows = rows_of(source, lengths="lens", **fields)
            assert rows["new_obs"][:, 0].tolist() == [101, 102, 301, 302, 303, 304]
            if lengths == [2, 0, 4]:
                assert "final_row=True" in message_of(source, lengths="lens")


def test_a_flag_may_be_one_an_episode_where_lengths_are_stated(tmp_path: Path) -> None:
    for source in places(tmp_path, lens=[3, 0, 1, 5], terminal=[True, True, False, True], few=[True, False]):
        assert ends_of(rows_of(source, lengths="lens", terminated="terminal")) == ([3, 1, 5], [2, 8], [3])
        assert ends_of(rows_of(source, lengths="lens", terminated="not terminal"))[1] == [3]
        assert "2 flags of 4 episodes" in message_of(source, lengths="lens", terminated="few")


def test_lengths_and_ends_that_do_not_fit_the_rows_are_refused_with_the_right_option(tmp_path: Path) -> None:
    given = {"lens": [3, 1, 5], "cut": [3, 1], "ends": [3, 4, 9], "last": [2, 3, 8], "minus": [4, -1, 6]}
    for source in places(tmp_path, **given):
        assert "add up to 4, expected 9" in message_of(source, lengths="cut")
        assert "pass ends= instead" in message_of(source, lengths="ends")
        assert "pass lengths= instead" in message_of(source, ends="lens")
        assert "number of the last row" in message_of(source, ends="last")
        assert "whole numbers" in message_of(source, lengths="minus")
        assert "did you mean 'lens'" in message_of(source, MissingColumn, lengths="len")
    assert "episode=" in message_of(pd.DataFrame(steps()), lengths="a")


# ---- rows that are episodes ----


def episodes(lengths: tuple[int, ...] = LENGTHS, *, final: bool = False) -> list[dict[str, Any]]:
    """Rows that are episodes, the odd ones of which terminate."""
    return [
        {
            "user": 70 + e,
            "x": [[100.0 * e + t] for t in range(count + final)],
            "a": [t % 3 for t in range(count)],
            "r": [1000.0 * e + t for t in range(count)],
            "done": [e % 2 == 1 and t == count - 1 for t in range(count)],
            "won": e % 2 == 1,
        }
        for e, count in enumerate(lengths, 1)
    ]


def lists_in(tmp_path: Path, rows: list[dict[str, Any]]) -> list[Any]:
    """JSON lines, Parquet, Arrow, and every table in memory."""
    table = pa.Table.from_pylist(rows)
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=2)
    feather.write_feather(table, tmp_path / "log.feather", chunksize=2)
    large = {"x": pa.large_list(pa.list_(pa.float64(), 1)), "a": pa.large_list(pa.int8())}
    other = pa.table(
        {name: table[name].cast(large.get(name, table[name].type)) for name in table.column_names}
    )
    frames = [
        table,
        other,
        pd.DataFrame(rows),
        pl.DataFrame(rows),
        {name: [row[name] for row in rows] for name in rows[0]},
    ]
    return [tmp_path / "log.jsonl", tmp_path / "log.parquet", tmp_path / "log.feather", *frames]


PLAIN = {"obs": "x", "actions": "a", "rewards": "r"}


def check_steps(rows: rlio.SampleBatch) -> None:
    assert rows["obs"].tolist() == [[x] for x in steps()["x"]]
    assert rows["actions"].tolist() == steps()["a"]
    assert rows["rewards"].tolist() == steps()["r"]
    assert rows["t"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]


@pytest.mark.usefixtures("scanned")
def test_rows_of_lists_are_episodes(tmp_path: Path) -> None:
    for source in lists_in(tmp_path, episodes()):
        for fields in (
            {"terminated": "done"},
            {"terminated": "won"},
            {"terminated": "won", "episode": "user"},
        ):
            rows = rows_of(source, columns=PLAIN, per_row=True, **fields)
            check_steps(rows)
            assert ends_of(rows)[1:] == ([2, 8], [3])
            ids = [71] * 3 + [72] + [73] * 5 if "episode" in fields else [0] * 3 + [1] + [2] * 5
            assert rows["eps_id"].tolist() == ids
        columns = {**PLAIN, "user": "user", "won": "won"}
        rows = rows_of(source, columns=columns, per_row=True, next_obs="derive")
        assert rows["user"].tolist() == [71] * 3 + [72] + [73] * 5
        assert rows["won"].tolist() == [True] * 3 + [False] + [True] * 5
        assert rows["new_obs_valid"].tolist() == [True, True, False, False, *[True] * 4, False]


def test_lists_of_obs_that_are_longer_have_the_final_observation(tmp_path: Path) -> None:
    for source in lists_in(tmp_path, episodes(final=True)):
        rows = rows_of(source, columns=PLAIN, per_row=True, terminated="won")
        check_steps(rows)
        assert rows["new_obs"].tolist() == [[x + 1] for x in steps()["x"]]
        assert "new_obs_valid" not in rows
        assert ends_of(rows)[1:] == ([2, 8], [3])
        with pytest.raises(OptionError, match="already give it"):
            rows_of(source, columns=PLAIN, per_row=True, next_obs="x")


def test_a_list_of_steps_in_a_row_is_an_episode(tmp_path: Path) -> None:
    table = steps()
    names, flat = list(table), list(zip(*table.values(), strict=True))
    cut = [flat[:3], flat[3:4], flat[4:]]
    rows = [
        {"user": n, "steps": [dict(zip(names, step, strict=True)) for step in part]}
        for n, part in enumerate(cut)
    ]
    columns = {"obs": ["steps.x"], "actions": "steps.a", "rewards": "steps.r", "user": "user"}
    for source in lists_in(tmp_path, [{**row, "x": [[0]], "a": [0]} for row in rows])[:3]:
        found = rows_of(source, columns=columns, per_row=True, terminated="steps.done")
        check_steps(found)
        assert ends_of(found)[1:] == ([2, 8], [3])
        assert found["user"].tolist() == [0] * 3 + [1] + [2] * 5


def padded(values: list[list[Any]], size: int = 7) -> np.ndarray:
    return np.stack(
        [np.concatenate([one, np.zeros((size - len(one), *np.shape(one)[1:]))]) for one in values]
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("final", [False, True])
def test_arrays_of_episodes_and_steps_are_read_without_their_padding(final: bool, tmp_path: Path) -> None:
    rows, counts = episodes(final=final), np.array(LENGTHS)
    table = {name: padded([row[name] for row in rows]) for name in ("a", "r")}
    table |= {"x": padded([row["x"] for row in rows], 7 + final), "won": np.array([True, False, True])}
    table |= {"n": counts, "real": np.arange(7) < counts[:, None], "is_pad": np.arange(7) >= counts[:, None]}
    np.savez(tmp_path / "log.npz", **table)
    for source in (tmp_path / "log.npz", table):
        for fields in ({"lengths": "n"}, {"valid": "real"}, {"valid": "not is_pad"}):
            found = rows_of(source, columns=PLAIN, per_row=True, terminated="won", **fields)
            check_steps(found)
            assert ends_of(found)[1:] == ([2, 8], [3])
            assert ("new_obs" in found) == final
        assert len(rows_of(source, columns=PLAIN, per_row=True)) == 21
        text = message_of(source, columns=PLAIN, per_row=True, valid="is_pad")
        assert "row 0 follow padding" in text
        assert "valid='not is_pad'" in text


def test_lists_that_do_not_fit_are_refused_by_row(tmp_path: Path) -> None:
    rows = episodes()
    rows[1]["r"] = [0.0, 1.0]
    for source in lists_in(tmp_path, rows):
        assert "row 1, expected 1" in message_of(source, columns=PLAIN, per_row=True)
    rows = [{**row, "goal": [1.0, 2.0]} for row in episodes()]
    for source in lists_in(tmp_path, rows):
        assert "one value, not a list" in message_of(source, columns={**PLAIN, "goal": "goal"}, per_row=True)
        assert "leave out per_row=" in message_of(source, columns={"obs": "user"}, per_row=True)
    for count, reason in ((9, "found 9 in row 0"), (-1, "found -1"), (0.5, "found 0.5")):
        source = {
            "x": np.zeros((2, 3, 1)),
            "a": np.zeros((2, 3)),
            "r": np.zeros((2, 3)),
            "n": np.array([count, 1]),
        }
        assert reason in message_of(source, columns=PLAIN, per_row=True, lengths="n")


def test_an_error_of_an_unreadable_layout_says_the_way_out(tmp_path: Path) -> None:
    ragged = np.empty(2, object)
    ragged[:] = [np.zeros((3, 1)), np.zeros((2, 1))]
    np.savez(tmp_path / "log.npz", x=ragged, a=ragged, r=ragged)
    text = message_of(tmp_path / "log.npz", UnsafeData, columns=PLAIN, per_row=True)
    assert "allow_pickle=True), and pass its arrays to rlio.from_arrays" in text
    loaded = dict(np.load(tmp_path / "log.npz", allow_pickle=True))
    assert ends_of(rows_of(loaded, columns=PLAIN, per_row=True))[0] == [3, 2]
    lists = pd.DataFrame({"x": ["[0.5, 1.0]", "[1.0, 2.0]"], "a": [0, 1], "r": [0.0, 1.0]})
    assert "log['x'].map(json.loads)" in message_of(lists, columns=PLAIN, per_file=True)
    deep = [{"steps": [[{"x": 0.0, "a": 1}, {"x": 1.0, "a": 0}]] * 3}]
    (tmp_path / "log.json").write_text(json.dumps(deep[0]))
    columns = {"obs": ["steps.x"], "actions": "steps.a"}
    assert "rlio.from_episodes" in message_of(
        tmp_path / "log.json", MissingColumn, columns=columns, per_row=True
    )
    many = {
        "x": np.zeros((4, 6, 1)),
        "a": np.zeros((4, 6)),
        "r": np.zeros((4, 6)),
        "done": np.arange(24).reshape(4, 6) % 3 == 2,
    }
    assert "swapaxes(0, 1)" in message_of(many, columns=PLAIN, per_row=True, terminated="done")


def test_rows_of_lists_are_refused_with_the_right_option_and_are_described(tmp_path: Path) -> None:
    for source in lists_in(tmp_path, episodes()):
        for fields in ({"terminated": "won"}, {"episode": "user"}, {"per_file": True}):
            text = message_of(source, columns=PLAIN, **fields)
            assert "pass per_row=True" in text, text
            assert "x (lists of 3, 1, 5 items" in text, text


def test_rows_without_lists_are_episodes_of_one_step(tmp_path: Path) -> None:
    rows = [{"context": [1.0 * n, 2.0 * n], "item": n % 3, "click": n % 2, "user": 70 + n} for n in range(5)]
    columns = {"obs": "context", "actions": "item", "rewards": "click"}
    for source in lists_in(tmp_path, [{**row, "x": [[0]], "a": [0]} for row in rows]):
        found = rows_of(source, columns=columns, per_row=True, terminated=True)
        assert ends_of(found) == ([1] * 5, [0, 1, 2, 3, 4], [])
        assert found["obs"].tolist() == [row["context"] for row in rows]
        assert found["actions"].tolist() == [0, 1, 2, 0, 1]
        text = message_of(source, columns={**columns, "actions": "context"}, per_row=True)
        assert "one value a row in ['rewards']" in text  # Is a list of actions a vector, or an episode?
        assert "one value a row" in message_of(source, columns=columns, per_row=True, lengths="item")


FINAL_FIELDS: list[dict[str, Any]] = [
    {"ends": "indices"},
    {"ends": "all_ends"},
    {"ends": "ends_with_final"},
    {"lengths": "lens"},
    {"lengths": "lens_with_final"},
    {"lengths": "lens", "terminated": "terminal"},
    {"lengths": "lens", "terminated": "done", "final_row": True, "next_obs": "derive"},
]


@pytest.mark.parametrize("fields", first(2, FINAL_FIELDS))
def test_observations_with_a_row_more_an_episode_have_the_final_ones(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """As imitation stores trajectories."""
    counts = np.array(LENGTHS)
    beside = {
        "indices": np.cumsum(counts)[:-1],
        "all_ends": np.cumsum(counts),
        "ends_with_final": np.cumsum(counts + 1),
        "lens": counts,
        "lens_with_final": counts + 1,
        "terminal": np.array([True, False, True]),
    }
    longer = np.concatenate([100.0 * e + np.arange(count + 1) for e, count in enumerate(LENGTHS, 1)])
    table = arrays(**beside) | {"x": longer[:, None]}
    np.savez(tmp_path / "log.npz", **table)
    for source in (tmp_path / "log.npz", table):
        rows = rows_of(source, columns=PLAIN, **fields)
        check_steps(rows)
        assert rows["new_obs"].tolist() == [[x + 1] for x in steps()["x"]]
        assert "new_obs_valid" not in rows
        terminated = "terminated" in fields
        assert ends_of(rows) == ([3, 1, 5], [2, 8] * terminated, [3] if terminated else [2, 3, 8])


def test_final_rows_of_longer_observations_are_not_sorted() -> None:
    table = {
        "x": np.arange(5.0)[:, None],
        "a": np.zeros(4, int),
        "r": np.zeros(4),
        "step": np.array([2, 1, 0, 3]),
    }
    with pytest.raises(OptionError, match=r"sort=.*a row more"):
        rows_of(table, columns=PLAIN, per_file=True, sort="step")


def test_an_end_of_an_episode_of_one_step_is_not_that_of_the_episode_before() -> None:
    longer = np.concatenate([100.0 * e + np.arange(count + 1) for e, count in enumerate(LENGTHS, 1)])
    table = arrays(lens=[3, 1, 5], done=np.arange(9) == 3) | {"x": longer[:, None]}
    rows = rows_of(table, columns=PLAIN, lengths="lens", terminated="done")
    assert ends_of(rows) == ([3, 1, 5], [3], [2, 8])


def test_files_of_episodes_whose_observations_have_a_row_more(tmp_path: Path) -> None:
    """As MineRL stores demonstrations."""
    for number, row in enumerate(episodes(final=True)):
        folder = tmp_path / f"demo_{number}"
        folder.mkdir()
        obs = np.array(row["x"])
        np.savez(
            folder / "rendered.npz",
            reward=row["r"],
            **{"action$move": row["a"], "observation$x": obs, "observation$y": -obs},
        )
    columns = {
        "obs/x": "observation$x",
        "obs/y": "observation$y",
        "actions/move": "action$move",
        "rewards": "reward",
    }
    rows = rows_of(f"{tmp_path}/*/rendered.npz", columns=columns, per_file=True, terminated=True)
    assert rows["obs"]["x"][:, 0].tolist() == steps()["x"]
    assert (rows["new_obs"]["y"] == rows["obs"]["y"] - 1).all()
    assert rows["actions"]["move"].tolist() == steps()["a"]
    assert ends_of(rows) == ([3, 1, 5], [2, 3, 8], [])


def test_an_episode_without_steps_is_none(tmp_path: Path) -> None:
    for source in lists_in(tmp_path, episodes((3, 0, 5)))[:3]:
        rows = rows_of(source, columns=PLAIN, per_row=True, terminated="won")
        assert ends_of(rows) == ([3, 5], [2, 7], [])


# ---- columns that are stored a row later ----


def later(lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[Any]]:
    """As DreamerV3 stores: a row has the action and the reward that led to its image, and 0 at first."""
    rows = [(e, t, count) for e, count in enumerate(lengths, 1) for t in range(count + 1)]
    return {
        "x": [100.0 * e + t for e, t, _ in rows],
        "a": [None if t == 0 else (t - 1) % 3 for _, t, _ in rows],
        "r": [0.0 if t == 0 else 1000.0 * e + t - 1 for e, t, _ in rows],
        "logp": [-1.0 * e - t for e, t, _ in rows],
        "is_first": [t == 0 for _, t, _ in rows],
        "is_last": [t == count for _, t, count in rows],
        "is_terminal": [e % 2 == 1 and t == count for e, t, count in rows],
        "discount": [float(e % 2 == 0 or t < count) for e, t, count in rows],
        "ep": [e for e, _, _ in rows],
    }


SHIFTED: dict[str, Any] = {"next_obs": "derive", "shifted": ("actions", "rewards")}


@pytest.mark.usefixtures("scanned")
def test_actions_and_rewards_that_are_stored_a_row_later_come_back_to_their_step(tmp_path: Path) -> None:
    table = pa.table(later())
    pacsv.write_csv(table, tmp_path / "log.csv")
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=4)
    whole = {name: [0 if value is None else value for value in values] for name, values in later().items()}
    for source in (table, pl.DataFrame(later()), whole, tmp_path / "log.csv", tmp_path / "log.parquet"):
        for fields in (
            {"starts": "is_first", "terminated": "is_terminal", "per_file": True},
            {"episode": "ep", "terminated": "not discount"},
            {"terminated": "is_terminal", "truncated": "is_last"},
        ):
            columns = {**COLUMNS, "logp": "logp"}
            rows = rows_of(source, columns=columns, **SHIFTED, **fields)
            assert rows["obs"][:, 0].tolist() == steps()["x"]
            assert rows["new_obs"][:, 0].tolist() == [x + 1 for x in steps()["x"]]
            assert rows["actions"].tolist() == steps()["a"]
            assert rows["rewards"].tolist() == steps()["r"]
            assert rows["logp"].tolist() == [-1, -2, -3, -2, -3, -4, -5, -6, -7]  # It is not shifted.
            assert rows["t"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
            assert ends_of(rows)[0][-3:] == [3, 1, 5]
            assert np.flatnonzero(rows["terminateds"]).tolist() == [2, 8]
            assert 3 in np.flatnonzero(rows["truncateds"])


def test_only_the_columns_that_are_named_are_shifted() -> None:
    fields: dict[str, Any] = {"starts": "is_first", "next_obs": "derive"}
    whole = {name: [0 if value is None else value for value in values] for name, values in later().items()}
    rows = rows_of(whole, shifted="rewards", **fields)
    assert rows["rewards"].tolist() == steps()["r"]
    assert rows["actions"].tolist() == [0, 0, 1, 0, 0, 0, 1, 2, 0]
    with rlio.from_arrays(
        whole, mapping=rlio.Mapping(COLUMNS, **SHIFTED, starts="is_first"), columns=["rewards"]
    ) as some:
        assert some.sample(9)["rewards"].tolist() == steps()["r"]


def test_an_episode_without_a_step_has_a_final_row_only() -> None:
    whole = {
        name: [0 if value is None else value for value in values] for name, values in later((3, 0, 5)).items()
    }
    rows = rows_of(whole, starts="is_first", **SHIFTED)
    assert np.bincount(rows["eps_id"]).tolist() == [3, 0, 5]
    assert rows["rewards"].tolist() == [1000, 1001, 1002, 3000, 3001, 3002, 3003, 3004]


@pytest.mark.parametrize("names", ["obs", "t", "logp", "terminated", "terminateds", ["actions", "new_obs"]])
def test_columns_that_cannot_be_shifted_are_refused(names: Any) -> None:
    with pytest.raises(OptionError, match="shifted="):
        rlio.Mapping(COLUMNS, starts="is_first", next_obs="derive", shifted=names)
    with pytest.raises(OptionError, match="needs next_obs='derive'"):
        rlio.Mapping(COLUMNS, starts="is_first", shifted="rewards")


# ---- text: separators, decimal commas, comments, compressed files ----


def csv_of(table: dict[str, list[Any]], separator: str = ",", decimal: str = ".") -> str:
    lines = [[*table], *([*map(str, row)] for row in zip(*table.values(), strict=True))]
    shown = [[cell.replace(".", decimal) for cell in line] for line in lines]
    return "".join(separator.join(line) + "\n" for line in shown)


ENDED: dict[str, Any] = {"starts": "first", "terminated": "done", "per_file": True}


@pytest.fixture(params=[60, *further(1 << 20)])
def in_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text in blocks of few and of many lines."""
    monkeypatch.setattr(text_table, "_BLOCK_BYTES", request.param)


@pytest.mark.few(2)
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.each_value_once
@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz", ".TSV.GZ"])
@pytest.mark.usefixtures("in_blocks")
def test_separators_are_found_by_looking(separator: str, ending: str, tmp_path: Path) -> None:
    table = {**steps(), "note": [f"'{n}, {n};' a|b" for n in range(9)]}
    text = csv_of({**steps(), "note": [f'"{note}"' for note in table["note"]]}, separator).encode()
    path = tmp_path / f"log{ending}"
    path.write_bytes(gzip.compress(text) if ending.lower().endswith(".gz") else text)
    rows = rows_of(path, columns={**COLUMNS, "note": "note"}, **ENDED)
    assert rows["obs"][:, 0].tolist() == steps()["x"]
    assert rows["note"].tolist() == table["note"]
    assert ends_of(rows) == ([3, 1, 5], [2, 8], [3])
    shuffled = rlio.read(path, mapping=rlio.Mapping(COLUMNS, **ENDED), epochs=1, shuffle=True, seed=1)
    assert sorted(all_rows(shuffled)["rewards"].tolist()) == sorted(steps()["r"])


def test_separators_that_are_not_certain_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("x;y,a;b\n1;2,5;3\n4;5,6;7\n")
    with pytest.raises(OptionError, match=r"each of \[',', ';'\].*'delimiter'"):
        rlio.read(path, mapping=rlio.Mapping({"obs": ["x"]}, per_file=True))
    chosen = {
        "format_options": {"delimiter": ";"},
        "mapping": rlio.Mapping({"obs": ["x", "b"]}, per_file=True),
    }
    assert rlio.read(path, **chosen).sample(2)["obs"].tolist() == [[1, 3], [4, 7]]
    path.write_text("x;note,a\n1,2\n4,5\n")  # The name of a column.
    assert rlio.read(path, mapping=rlio.Mapping({"obs": ["x;note"]}, per_file=True)).sample(2)[
        "obs"
    ].tolist() == [[1], [4]]
    path.write_text("speed (m;s)\n1\n4\n")
    assert len(rlio.read(path, mapping=rlio.Mapping({"obs": "speed (m;s)"}, per_file=True)).sample(2)) == 2


@pytest.mark.usefixtures("in_blocks")
def test_decimal_commas_are_named_in_the_error_and_read_by_an_option(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(csv_of(steps(), ";", ","))
    assert "format_options={'decimal': ','}" in message_of(tmp_path / "log.csv", **ENDED)
    given = rlio.Mapping(COLUMNS, **ENDED)
    rows = all_rows(rlio.read(tmp_path / "log.csv", mapping=given, epochs=1, format_options={"decimal": ","}))
    assert rows["obs"][:, 0].tolist() == steps()["x"]
    (tmp_path / "point.csv").write_text(csv_of(steps(), ";"))
    with pytest.raises(SchemaError, match="needs numbers"):  # A point is no decimal comma.
        rlio.read(tmp_path / "point.csv", mapping=given, format_options={"decimal": ","})
    for options in ({"decimal": "x"}, {"delimiter": ";;"}, {"comment": ""}):
        with pytest.raises(OptionError, match=f"{next(iter(options))}="):
            rlio.read(tmp_path / "log.csv", mapping=given, format_options=options)


@pytest.mark.parametrize(
    "head",
    [
        "# made by a program\n# x, y: metres\n{names}\n",
        "#\n#x;y\n\ufeff{names}\n".replace("\ufeff", ""),
        "\ufeff# made\n{names}\n",
        "# {names}\n",  # numpy.savetxt
        "# made by a program\n#{names}\n",
    ],
)
@pytest.mark.usefixtures("in_blocks")
def test_comments_before_the_names_are_left_out(head: str, tmp_path: Path) -> None:
    names, _, body = csv_of(steps()).partition("\n")
    (tmp_path / "log.csv").write_text(head.format(names=names) + body, encoding="utf-8")
    rows = rows_of(tmp_path / "log.csv", **ENDED)
    assert rows["obs"][:, 0].tolist() == steps()["x"]


@pytest.mark.parametrize("head", ["", "# made\n", "# made\n# so\n"])
@pytest.mark.each_value_once
@pytest.mark.parametrize("separator", [",", "\t"])
def test_names_may_be_given_for_text_without_them(head: str, separator: str, tmp_path: Path) -> None:
    body = csv_of(steps(), separator).partition("\n")[2]
    (tmp_path / "log.csv").write_text(head + body)
    named = {"format_options": {"names": [*steps()]}, "mapping": rlio.Mapping(COLUMNS, **ENDED), "epochs": 1}
    rows = all_rows(rlio.read(tmp_path / "log.csv", **named))
    assert rows["obs"][:, 0].tolist() == steps()["x"]
    with pytest.raises(OptionError, match="names="):
        rlio.read(tmp_path / "log.csv", **{**named, "format_options": {"names": "x,y"}})
    (tmp_path / "log.csv").write_text(head + "".join(f"{n}.5{separator}{n}\n" for n in range(4)))
    text = message_of(tmp_path / "log.csv", UnknownLayout, **ENDED)
    assert "format_options={'names': ['x', 'y', ...]}" in text
    (tmp_path / "log.csv").write_text("0,1\n2.5,3\n")  # As pandas names columns without names.
    assert rows_of(tmp_path / "log.csv", columns={"obs": ["0", "1"]}, per_file=True)["obs"].tolist() == [
        [2.5, 3.0]
    ]


@pytest.mark.usefixtures("in_blocks")
def test_comments_among_rows_are_refused_unless_their_mark_is_named(tmp_path: Path) -> None:
    table = {**steps(), "note": [f'"{n}\n# no comment\n"' for n in range(9)]}
    lines = csv_of(table).split('"\n')
    text = '"\n# a "comment\n'.join(lines) + "# the end\n"
    (tmp_path / "log.csv").write_text(text)
    assert "format_options={'comment': '#'}" in message_of(tmp_path / "log.csv", CorruptData, **ENDED)
    given = rlio.Mapping({**COLUMNS, "note": "note"}, **ENDED)
    rows = all_rows(rlio.read(tmp_path / "log.csv", mapping=given, epochs=1, format_options={"comment": "#"}))
    assert rows["obs"][:, 0].tolist() == steps()["x"]
    assert rows["note"].tolist() == [f"{n}\n# no comment\n" for n in range(9)]
    (tmp_path / "percent.csv").write_text("% made\n" + csv_of(steps()).replace("\n", "\n% so\n"))
    rows = all_rows(
        rlio.read(
            tmp_path / "percent.csv",
            mapping=rlio.Mapping(COLUMNS, **ENDED),
            epochs=1,
            format_options={"comment": "%"},
        )
    )
    assert rows["obs"][:, 0].tolist() == steps()["x"]


@pytest.mark.usefixtures("in_blocks")
def test_compressed_json_lines_are_read_and_damaged_ones_are_named(tmp_path: Path) -> None:
    lines = pd.DataFrame(steps()).to_json(orient="records", lines=True).encode()
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(lines[: len(lines) // 2]) + gzip.compress(lines[len(lines) // 2 :]))
    assert rows_of(path, **ENDED)["obs"][:, 0].tolist() == steps()["x"]
    whole = path.read_bytes()
    for data in (whole[:-20], whole[:40] + b"xxxx" + whole[44:], b"no gzip", whole + b"tail"):
        path.write_bytes(data)
        assert "log.jsonl.gz" in message_of(path, CorruptData, **ENDED)


def test_a_compressed_file_that_inflates_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(csv_of(steps()).encode() + b"\n" * (8 << 20)))
    few = rlio.Limits(free_bytes=1 << 20, inflation=10)
    with pytest.raises(UnsafeData, match="would inflate"):
        rlio.read(tmp_path / "log.csv.gz", mapping=rlio.Mapping(COLUMNS, **ENDED), limits=few)


def test_the_command_takes_options_of_text(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(csv_of(steps(), ";", ","))
    given = ["--map", "obs=x,", "--map", "actions=a", "--map", "rewards=r", "--starts", "first"]
    made = CliRunner().invoke(
        app,
        [
            "convert",
            str(tmp_path / "log.csv"),
            str(tmp_path / "own"),
            *given,
            "--read-option",
            'format_options={"decimal": ","}',
        ],
    )
    assert made.exit_code == 0, made.output
    shown = CliRunner().invoke(
        app, ["info", str(tmp_path / "log.csv"), *given, "--format-option", "decimal=,"]
    )
    assert shown.exit_code == 0, shown.output


# ---- sort= ----


def shuffled_steps(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[Any]]:
    """The rows of `steps` in any order, with ids and times."""
    table = steps(lengths)
    ids = [e for e, count in enumerate(lengths, 1) for _ in range(count)]
    times = [t for count in lengths for t in range(count)]
    stamps = [f"2024-01-{e:02d}T10:00:{t:02d}" for e, t in zip(ids, times, strict=True)]
    names = [f"user {e}" for e in ids]
    table |= {
        "ep": ids,
        "user": names,
        "step": times,
        "stamp": stamps,
        "part": [t // 2 for t in times],
        "odd": [t % 2 for t in times],
    }
    order = np.random.default_rng(seed).permutation(len(ids))
    return {name: [values[n] for n in order] for name, values in table.items()}


SORTED = [
    {"episode": "ep", "sort": "step"},
    {"episode": ["user"], "sort": "stamp"},
    {"episode": "ep", "sort": ["part", "odd"]},
]


@pytest.mark.parametrize("fields", first(1, SORTED))
@pytest.mark.usefixtures("scanned")
def test_rows_in_any_order_are_sorted_within_their_episode(fields: dict[str, Any], tmp_path: Path) -> None:
    table = pa.table(shuffled_steps())
    (tmp_path / "files").mkdir()
    pacsv.write_csv(table, tmp_path / "log.csv")
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=2)
    for number in range(3):
        pq.write_table(table.slice(3 * number, 3), tmp_path / "files" / f"{number}.parquet", row_group_size=2)
    arrays = {name: np.array(values) for name, values in shuffled_steps().items()}
    np.savez(tmp_path / "log.npz", **arrays)
    for source in (
        table,
        arrays,
        *(tmp_path / name for name in ("log.csv", "log.parquet", "log.npz", "files")),
    ):
        rows = rows_of(
            source, terminated="done", next_obs="derive", columns={**COLUMNS, "t": "step"}, **fields
        )
        firsts = list(dict.fromkeys(shuffled_steps()["ep"]))
        assert rows["obs"][:, 0].tolist() == [100 * e + t for e in firsts for t in range(LENGTHS[e - 1])]
        assert rows["t"].tolist() == [t for e in firsts for t in range(LENGTHS[e - 1])]
        assert rows["rewards"].tolist() == [1000 * e + t for e in firsts for t in range(LENGTHS[e - 1])]
        assert sorted(np.bincount(rows["eps_id"])[-3:].tolist()) == [1, 3, 5]
        assert (
            rows["new_obs"][rows["new_obs_valid"]].tolist()
            == (rows["obs"][rows["new_obs_valid"]] + 1).tolist()
        )


def test_rows_are_sorted_within_each_file_if_episodes_end_with_it(tmp_path: Path) -> None:
    frame = pd.DataFrame({**shuffled_steps(), "done": False})
    for number, (_, part) in enumerate(frame.groupby("ep")):
        part.to_csv(tmp_path / f"{number}.csv", index=False)
    for more in ({}, {"episode": "ep"}):
        rows = rows_of(tmp_path, per_file=True, sort="step", **more)
        assert rows["obs"][:, 0].tolist() == steps()["x"]
        assert rows["eps_id"].tolist() == [0] * 3 + [1] + [2] * 5


@pytest.mark.further
def test_many_rows_that_are_far_apart_are_read_from_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (40,) * 50
    table = pa.table(shuffled_steps(1, lengths)).sort_by([("step", "ascending"), ("ep", "ascending")])
    table = table.set_column(table.column_names.index("done"), "done", pa.array([False] * len(table)))
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=50)  # All users of one time.
    monkeypatch.setattr(table_module, "KEPT_BYTES", 20_000)
    rows = rows_of(tmp_path / "log.parquet", episode="ep", sort="step")
    assert rows["obs"][:, 0].tolist() == [100 * e + t for e in range(1, 51) for t in range(40)]


def test_rows_that_sort_alike_keep_their_order_and_are_reported() -> None:
    table = pd.DataFrame({**steps(), "ep": [1] * 3 + [2] + [3] * 5, "second": [0, 0, 1, 0, 5, 4, 4, 4, 3]})
    del table["done"]  # It marks the last rows of another order.
    given = rlio.Mapping(COLUMNS, episode="ep", sort="second")
    with rlio.read(table, mapping=given, epochs=1) as reader:
        assert any("5 rows have the same second" in note for note in reader.source.notes)  # type: ignore[attr-defined]
        assert reader.sample()["obs"][:, 0].tolist() == [100, 101, 102, 200, 304, 301, 302, 303, 300]


@pytest.mark.parametrize("values", [[0.0, None, 1.0], ["a", None, "b"], ["a", "", "b"], [float("nan")] * 3])
def test_a_row_that_cannot_be_sorted_is_refused(values: list[Any]) -> None:
    table = pa.table({"ep": [1, 1, 1], "x": [0.0, 1.0, 2.0], "when": pa.array(values)})
    text = message_of(table, columns={"obs": ["x"]}, episode="ep", sort="when")
    assert "has no value by which" in text
    assert "did you mean 'when'" in message_of(
        table, MissingColumn, columns={"obs": ["x"]}, episode="ep", sort="whens"
    )


# ---- codes= ----

MOVES = ["left", "right", "left", "stay", "right", "right", "left", "stay", "left"]


@pytest.mark.usefixtures("scanned")
def test_categories_become_the_codes_that_are_given_or_found(tmp_path: Path) -> None:
    table = pa.table(
        {**steps(), "a": MOVES, "state": ["on", "on", "off"] * 3, "deep": [{"move": move} for move in MOVES]}
    )
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=2)
    table.to_pandas().to_json(tmp_path / "log.jsonl", orient="records", lines=True)
    categories = table.set_column(1, "a", table["a"].dictionary_encode())
    frame = table.to_pandas().astype({"a": "category"})
    for source in (
        table,
        categories,
        frame,
        pl.from_arrow(table),
        tmp_path / "log.parquet",
        tmp_path / "log.jsonl",
    ):
        for codes, order in (
            ({"a": ["right", "stay", "left"]}, ["right", "stay", "left"]),
            ("a", ["left", "right", "stay"]),
            (["a"], ["left", "right", "stay"]),
            ({"a": None}, ["left", "right", "stay"]),
        ):
            rows = rows_of(source, starts="first", codes=codes)
            assert rows["actions"].dtype == np.int64
            assert rows["actions"].tolist() == [order.index(move) for move in MOVES]
        if not isinstance(source, pd.DataFrame):
            rows = rows_of(
                source, columns={"obs": ["x"], "actions": "deep.move"}, starts="first", codes="deep.move"
            )
            assert rows["actions"].tolist() == [["left", "right", "stay"].index(move) for move in MOVES]
        flagged = rows_of(source, terminated="state", codes={"a": None, "state": ["on", "off"]})
        assert ends_of(flagged) == ([3, 3, 3], [2, 5, 8], [])
    both = rows_of(table, columns={"obs": ["x", "a"], "rewards": "r"}, starts="first", codes="a")
    assert both["obs"][:, 1].tolist() == [["left", "right", "stay"].index(move) for move in MOVES]
    numbers = rows_of({**steps(), "a": [10, 20, 10] * 3}, starts="first", codes={"a": [20, 10]})
    assert numbers["actions"].tolist() == [1, 0, 1] * 3


def test_the_report_has_the_codes(tmp_path: Path) -> None:
    table = pa.table({**steps(), "a": MOVES})
    report = rlio.convert(
        table, tmp_path / "own", mapping=rlio.Mapping(COLUMNS, starts="first", codes="a"), prove=True
    )
    assert any(
        "Codes of a: 0 = 'left', 1 = 'right', 2 = 'stay'." in finding.text for finding in report.findings
    )


def test_categories_are_never_guessed_and_others_are_refused() -> None:
    table = pa.table({**steps(), "a": MOVES})
    assert "'left': if these are categories, pass codes='a'" in message_of(table, starts="first")
    assert "found 'left', expected one of ['right', 'stay']" in message_of(
        table, starts="first", codes={"a": ["right", "stay"]}
    )
    some = pa.table({**steps(), "a": [None, *MOVES[1:]]})
    assert "found None" in message_of(some, starts="first", codes="a")
    many = pa.table({**steps((5000,)), "a": [f"text {n}" for n in range(5000)]})
    assert "more than 4096 categories" in message_of(many, starts="first", codes="a")
    assert "codes: the table has no column 'b'" in message_of(table, MissingColumn, starts="first", codes="b")
    with pytest.raises(OptionError, match=r"codes=.'done'."):
        rows_of(table, starts="first", codes={"a": None, "done": None})
    for wrong in (
        {"a": []},
        {"a": "left"},
        {"a": ["left", "left"]},
        {"a": [0.5]},
        {"a": [None]},
        3,
        {1: None},
    ):
        with pytest.raises(OptionError, match="codes="):
            rlio.Mapping(COLUMNS, starts="first", codes=wrong)


def test_a_final_row_needs_no_category() -> None:
    table = pa.table({**later(), "a": [None, *MOVES[:3], None, MOVES[3], None, *MOVES[4:]]})
    rows = rows_of(table, starts="is_first", codes="a", **SHIFTED)
    assert rows["actions"].tolist() == [["left", "right", "stay"].index(move) for move in MOVES]


# ---- long episodes, and HDF5 ----


@pytest.mark.parametrize("most", [16, *further(8, 24, 40)])
def test_long_episodes_of_every_layout_are_read_in_parts(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes_module, "_GROUP_BYTES", most)  # One, two, three and five steps.
    lengths = (9, 2, 7)
    rows = [*steps(lengths)["x"]], steps(lengths)
    whole = {
        name: [0 if value is None else value for value in values] for name, values in later(lengths).items()
    }
    lists = {name: [row[name] for row in episodes(lengths, final=True)] for name in episodes()[0]}
    longer = np.concatenate([100.0 * e + np.arange(count + 1) for e, count in enumerate(lengths, 1)])
    table = {name: np.array(values) for name, values in steps(lengths).items()}
    beside = {"lens": np.array(lengths), "terminal": np.array([True, False, True])}
    cases: list[tuple[Any, dict[str, Any]]] = [
        (whole, {"starts": "is_first", "terminated": "is_terminal", "per_file": True, **SHIFTED}),
        (lists, {"columns": PLAIN, "per_row": True, "terminated": "won"}),
        ({**table, **beside}, {"lengths": "lens", "terminated": "terminal", "next_obs": "derive"}),
        (
            {**table, **beside, "x": longer[:, None]},
            {"columns": PLAIN, "lengths": "lens", "terminated": "terminal"},
        ),
        (
            pa.table(shuffled_steps(0, lengths)),
            {"episode": "ep", "sort": "step", "terminated": "done", "next_obs": "derive"},
        ),
    ]
    for source, fields in cases:
        found = rows_of(source, **fields)
        order = np.argsort(found["rewards"], kind="stable")
        assert found["obs"][order, 0].tolist() == rows[0]
        assert found["rewards"][order].tolist() == rows[1]["r"]
        assert found["actions"][order].tolist() == rows[1]["a"]
        assert np.flatnonzero(found["terminateds"][order]).tolist() == [8, 17]
        assert np.flatnonzero(found["truncateds"][order]).tolist() == [10]
        valid = found["new_obs_valid"] if "new_obs_valid" in found else np.ones(18, bool)
        assert (found["new_obs"][valid] == found["obs"][valid] + 1).all()


def test_arrays_of_hdf5_say_where_episodes_end(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "log.hdf5", "w") as file:
        for name, values in arrays(
            lens=[3, 1, 5], ends=[3, 4, 9], terminal=np.array([True, False, True])
        ).items():
            file[f"data/{name}"] = values
    columns = {"obs": "data/x", "actions": "data/a", "rewards": "data/r"}
    for fields in (
        {"starts": "data/first", "terminated": "data/done", "per_file": True},
        {"lengths": "data/lens", "terminated": "data/terminal"},
        {"ends": "data/ends", "terminated": "data/done"},
    ):
        rows = rows_of(tmp_path / "log.hdf5", columns=columns, **fields)
        assert rows["obs"].tolist() == steps()["x"]
        assert ends_of(rows) == ([3, 1, 5], [2, 8], [3])
    with pytest.raises(MissingColumn, match="data/lens"):
        rows_of(tmp_path / "log.hdf5", columns=columns, lengths="data/len")


def test_arrays_of_hdf5_may_have_an_axis_of_episodes(tmp_path: Path) -> None:
    rows, counts = episodes(), np.array(LENGTHS)
    with h5py.File(tmp_path / "log.hdf5", "w") as file:
        for name in ("x", "a", "r"):
            file[name] = padded([row[name] for row in rows])
        file["is_pad"], file["n"] = np.arange(7) >= counts[:, None], counts
    for fields in ({"lengths": "n"}, {"valid": "not is_pad"}):
        check_steps(rows_of(tmp_path / "log.hdf5", columns=PLAIN, per_row=True, **fields))


# ---- wrong mappings ----


@pytest.mark.parametrize(
    ("names", "way"),
    [
        (["obs", "actions", "rewards", "episode_returns", "episode_starts"], "starts='episode_starts'"),
        (["states", "actions", "rewards", "traj_lengths"], "lengths='traj_lengths'"),
        (["observations", "actions", "episode_ends"], "ends='episode_ends'"),
        (["observations", "actions", "rewards", "masks", "next_observations"], "terminated='not masks'"),
        (["state", "action", "reward", "done", "discount"], "terminated='done'"),
        (["image", "action", "reward", "is_first", "is_last"], "starts='is_first'"),
        (["state", "action", "reward", "episode_id", "is_first"], "episode='episode_id'"),
    ],
)
def test_a_wrong_mapping_suggests_what_says_where_episodes_end(names: list[str], way: str) -> None:
    table = {name: np.zeros(4) for name in names}
    for given in ({"obs": "obsx"}, {"obs": names[0]}):
        with pytest.raises((MissingColumn, OptionError)) as caught:
            rlio.from_arrays(table, mapping=rlio.Mapping(given))
        text = str(caught.value)
        assert f"it may need mapping=rlio.Mapping(columns={{'obs': '{names[0]}'" in text
        assert way in text, text


def test_a_wrong_mapping_shows_20_columns() -> None:
    table = {f"x{n}": [n, n + 0.5, n + 1, n + 2] for n in range(25)}
    text = message_of(table, MissingColumn, columns={"obs": "y"}, per_file=True)
    assert "x19 (float64: 19.0, 19.5, 20.0), and 5 more" in text
    assert "x20" not in text.partition("it may need")[0]


# ---- every way to pass a mapping ----

CONTRADICTIONS: list[dict[str, Any]] = [
    {"sort": "step", "starts": "first"},
    {"sort": "step", "per_row": True},
    {"sort": "step"},
    {"per_row": True, "starts": "first"},
    {"per_row": True, "ends": "ends"},
    {"per_row": True, "per_file": False},
    {"per_row": True, "lengths": "lens", "valid": "mask"},
    {"valid": "mask"},
    {"starts": "first", "episode": "ep"},
    {"starts": "first", "lengths": "lens"},
    {"ends": "ends", "lengths": "lens"},
    {"episode": "ep", "ends": "ends"},
    {"per_file": False, "ends": "ends"},
]


@pytest.mark.parametrize("fields", CONTRADICTIONS)
def test_fields_that_contradict_each_other_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        rlio.Mapping(COLUMNS, **fields)
    named = [name for name in fields if f"{name}=" in str(caught.value)]
    assert len(named) >= min(2, len(fields))


@pytest.mark.parametrize("change", [{"lens": [4, 5]}, {"terminal": np.array([False, False])}])
def test_a_state_of_arrays_with_other_lengths_or_flags_is_refused(change: dict[str, Any]) -> None:
    table = arrays(lens=[3, 6], terminal=np.array([False, True]))
    given = rlio.Mapping(COLUMNS, lengths="lens", terminated="terminal")
    with rlio.from_arrays(table, mapping=given, epochs=1, batch_size=4) as reader:
        reader.sample()
        state = reader.state_dict()
    with rlio.from_arrays({**table}, mapping=given, epochs=1, batch_size=4) as reader:
        reader.load_state_dict(state)
        assert reader.sample()["obs"][:, 0].tolist() == steps()["x"][4:8]
    other = rlio.from_arrays({**table, **change}, mapping=given, epochs=1, batch_size=4)
    with other, pytest.raises(StateError):
        other.load_state_dict(state)


def test_episodes_in_memory_have_their_own_ends() -> None:
    episodes = [{"x": [0.0, 1.0], "a": [0, 1], "r": [0.0, 1.0], "first": [True, False]}]
    with pytest.raises(OptionError, match=r"starts=.*each dict is an episode"):
        rlio.from_episodes(episodes, mapping=rlio.Mapping(COLUMNS, starts="first"))


#: Fields, and how the command spells them.
SPELLINGS: list[tuple[dict[str, Any], list[str]]] = [
    ({"starts": "first", "terminated": "not masks"}, ["--starts", "first", "--terminated", "not masks"]),
    ({"lengths": "lens"}, ["--lengths", "lens"]),
    ({"ends": "ends", "terminated": "done"}, ["--ends", "ends", "--terminated", "done"]),
    (
        {"starts": "first", "next_obs": "derive", "shifted": ("actions", "rewards")},
        ["--starts", "first", "--next-obs", "derive", "--shifted", "actions", "--shifted", "rewards"],
    ),
    ({"per_file": True, "codes": {"a": [2, 1, 0]}}, ["--per-file", "--codes", "a=2,1,0"]),
    ({"per_file": True, "sort": "r"}, ["--per-file", "--sort-rows", "r"]),
    (
        {"columns": PLAIN, "per_row": True, "valid": "not is_pad"},
        [
            *("--map", "obs=x", "--map", "actions=a", "--map", "rewards=r"),
            "--per-row",
            "--valid",
            "not is_pad",
        ],
    ),
]


def test_the_commands_have_an_option_for_every_field() -> None:
    for command in ("info", "convert"):
        options = {each for one in get_command(app).commands[command].params for each in one.opts}
        # Spaces are objects of Gymnasium.
        fields = {field.name for field in dataclasses.fields(rlio.Mapping)} - {"spaces"}
        assert {f"--{flag_of(name)}" for name in fields} <= options


def test_the_command_takes_lists_of_any_number_of_items(tmp_path: Path) -> None:
    lines = [{"x": [0.0] * (1 + n % 3), "a": n, "r": 0.5, "ep": n // 4} for n in range(8)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = ["--map", "obs=x", "--map", "actions=a", "--map", "rewards=r", "--episode", "ep"]
    arguments = ["head", str(tmp_path / "log.jsonl"), *columns, "-n", "8", "--json"]
    assert CliRunner().invoke(app, arguments).exit_code != 0
    shown = json.loads(CliRunner().invoke(app, [*arguments, "--ragged", "x"]).stdout)
    assert [row["obs"] for row in shown["rows"]] == [line["x"] for line in lines]


@pytest.mark.few(1)
@pytest.mark.parametrize(("fields", "spelled"), first(3, SPELLINGS))
def test_every_field_reaches_readers_conversions_data_sets_states_and_the_command(
    fields: dict[str, Any], spelled: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "log.npz"
    more: dict[str, Any] = {name: padded([row[name] for row in episodes()]) for name in "xar"}
    more["is_pad"] = np.arange(7) >= np.array(LENGTHS)[:, None]
    if fields.get("per_row"):
        np.savez(path, **more, ep=[1, 2, 3])
    else:
        table = arrays(lens=[3, 1, 5], ends=[3, 4, 9], ep=[1] * 3 + [2] + [3] * 5)
        if fields.get("per_file"):  # Within the one episode, these would be ends.
            del table["done"]
        np.savez(path, **table)
    given = rlio.Mapping(**{"columns": COLUMNS, **fields})
    expected = ends_of(rows_of(path, **fields))
    assert len(rlio.open_dataset(path, mapping=given).episode(0)) == expected[0][0]
    rlio.convert(path, tmp_path / "own", mapping=given, prove=True)
    assert ends_of(all_rows(rlio.read(tmp_path / "own", epochs=1, shuffle=False))) == expected
    columns = [] if "columns" in fields else ["--map", "obs=x,", "--map", "actions=a", "--map", "rewards=r"]
    made = CliRunner().invoke(app, ["convert", str(path), str(tmp_path / "cli"), *columns, *spelled])
    assert made.exit_code == 0, made.output
    assert ends_of(all_rows(rlio.read(tmp_path / "cli", epochs=1, shuffle=False))) == expected
    shown = CliRunner().invoke(app, ["info", str(path), *columns, *spelled, "--json"])
    assert shown.exit_code == 0, shown.output
    with rlio.read(path, mapping=given, epochs=1, batch_size=4) as reader:
        reader.sample()
        state, rest = reader.state_dict(), reader.sample()
    with rlio.read(path, mapping=given, epochs=1, batch_size=4) as reader:
        reader.load_state_dict(state)
        assert reader.sample()["obs"].tolist() == rest["obs"].tolist()
    other = rlio.Mapping(**{"columns": COLUMNS, **fields, "terminated": True})
    with rlio.read(path, mapping=other, epochs=1, batch_size=4) as reader, pytest.raises(StateError):
        reader.load_state_dict(state)


# ---- reading ----


@pytest.mark.further
@pytest.mark.parametrize("name", ["log.csv", *further("log.parquet")])
def test_a_table_is_read_without_pandas(name: str, tmp_path: Path) -> None:
    """Arrow's ``to_numpy`` imports pandas if it is there: 0.5 s in each process."""
    table = pa.table(steps())
    write = pacsv.write_csv if name.endswith(".csv") else pq.write_table
    write(table, tmp_path / name)
    code = (
        "import sys, rlio\n"
        f"given = rlio.Mapping({COLUMNS}, starts='first', terminated='done')\n"
        f"rows = rlio.read({str(tmp_path / name)!r}, mapping=given, epochs=1).sample()\n"
        "x, ends = rows['obs'][:, 0].astype(float), rows['terminateds']\n"
        "print(x.tolist(), ends.tolist(), 'pandas' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"{steps()['x']} {steps()['done']} False"


@pytest.mark.parametrize(
    "kind", [pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()]
)
def test_slices_of_numbers_and_flags_become_arrays(kind: pa.DataType) -> None:
    values = np.arange(40) % 2 if kind == pa.bool_() else np.arange(40)
    array = pa.array(values.astype(kind.to_pandas_dtype()), kind)
    for start, stop in ((0, 40), (3, 21), (8, 8), (13, 40)):
        found = to_column("x", array[start:stop], {})
        assert found.dtype == array.to_numpy(zero_copy_only=False).dtype
        assert found.tolist() == array[start:stop].to_pylist()
        assert found.flags.writeable
        assert found.flags.owndata
    lists = pa.array([[True, False, True]] * 5)
    assert to_column("x", lists[2:4], {}).tolist() == lists[2:4].to_pylist()


@pytest.mark.parametrize(
    "times",
    [
        ["8:05", "9:30", "10:00"],
        ["30.01.2024", "31.01.2024", "01.02.2024"],
        ["9/30/2023", "10/01/2023", "10/02/2023"],
        ["11:30 AM", "01:00 PM", "02:00 PM"],
        ["step_8", "step_9", "step_10"],
        ["8,5", "9,5", "10,25"],
    ],
    ids=str,
)
def test_texts_whose_characters_have_another_order_are_not_sorted_by(
    tmp_path: Path, times: list[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"u": 1, "when": at, "x": n}) + "\n" for n, at in enumerate(times))
    )
    with pytest.raises(SchemaError, match="may mean another order"):
        rlio.read(tmp_path / "a.jsonl", mapping=rlio.Mapping({"obs": "x"}, episode="u", sort="when"))


@pytest.mark.parametrize(
    "times",
    [
        ["2024-01-09", "2024-01-10", "2024-02-01"],
        ["2024-01-09T08:05:00Z", "2024-01-09T09:05:00Z", "2024-01-10T00:00:00Z"],
        ["2024-11-03T01:30:00-04:00", "2024-11-03T01:10:00-05:00", "2024-11-03T01:20:00-05:00"],
        ["08:05", "09:30", "10:00"],
        ["step_08", "step_09", "step_10"],
    ],
    ids=str,
)
def test_texts_of_one_width_are_sorted_by(tmp_path: Path, times: list[str]) -> None:
    rows = [{"u": 1, "when": at, "x": n} for n, at in enumerate(times)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    mapping = rlio.Mapping({"obs": "x"}, episode="u", sort="when")
    with rlio.read(tmp_path / "a.jsonl", mapping=mapping, epochs=1, shuffle=False) as reader:
        assert [n for batch in reader for n in batch["obs"].tolist()] == [*range(len(times))]


def test_fractions_are_no_ids() -> None:
    """Texts that differ were one number: 3.1 and 3.10 became one episode."""
    table = {"run": [3.1, 3.1, 3.10, 3.10], "x": [0, 1, 2, 3]}
    for sort in (None, "x"):
        assert "3.1 and 3.10 are one number" in message_of(
            table, columns={"obs": "x"}, episode="run", sort=sort
        )


def test_episodes_with_both_flags_are_terminated_as_in_gymnasium_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    columns = {"x": np.arange(4), "done": [0, 1, 0, 1], "limit": [0, 0, 0, 1]}
    of_episodes = {"x": np.arange(4), "done": [1, 1], "limit": [0, 1], "counts": [2, 2]}
    for given, fields in ((columns, {}), (of_episodes, {"lengths": "counts"})):
        caplog.clear()
        mapping = rlio.Mapping({"obs": "x"}, terminated="done", truncated="limit", **fields)  # type: ignore[arg-type]
        with rlio.from_arrays(given, mapping=mapping, epochs=1) as reader:
            found = "done and limit are both true at the end of 1 of 2 episodes, which count as terminated"
            assert any(found in note for note in reader.source.notes)
            assert found in caplog.text
            rows = reader.sample()
        assert np.flatnonzero(rows["terminateds"]).tolist() == [1, 3]
        assert np.flatnonzero(rows["truncateds"]).tolist() == [3]
    caplog.clear()
    own = {"obs": np.arange(4.0), "actions": [0] * 4, "rewards": [0.0] * 4}
    own |= {"terminateds": [0, 1, 0, 1], "truncateds": [0, 0, 0, 1]}
    with rlio.from_arrays(own, epochs=1) as reader:
        assert reader.sample()["terminateds"].tolist() == [False, True, False, True]
    assert not caplog.text  # These names are Gymnasium's, whose meaning is known.


# ---- damaged files among whole ones ----


def put_files(root: Path, ending: str) -> list[Path]:
    """Four files, each an episode of three rows, of which the second one is damaged."""
    root.mkdir()
    paths = [root / f"{number}.{ending}" for number in range(4)]
    for number, path in enumerate(paths):
        columns = {"x": np.arange(3.0) + 10 * number, "a": np.arange(3)}
        if ending == "npz":
            np.savez(path, **columns)
        elif ending == "hdf5":
            with h5py.File(path, "w") as file:
                for name, values in columns.items():
                    file[name] = values
        elif ending == "csv":
            pd.DataFrame(columns).to_csv(path, index=False)
        elif ending == "jsonl":
            pd.DataFrame(columns).to_json(path, orient="records", lines=True)
        else:
            pq.write_table(pa.table(columns), path)
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[: len(data) // 2] if ending != "csv" else b"x,a\n0.0,0\n1.0,1,7,7\n")
    return paths


@pytest.mark.parametrize("ending", ["parquet", "csv", *further("npz", "hdf5", "jsonl")])
def test_a_damaged_file_of_several_is_skipped_alone_if_files_are_episodes(
    ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It raised at opening, for all of them."""
    paths = put_files(tmp_path / "in", ending)
    fields = {"columns": {"obs": "x", "actions": "a"}, "next_obs": "derive"}
    whole = rlio.Mapping(**fields, per_file=True)  # type: ignore[arg-type]
    with pytest.raises(CorruptData):
        rlio.read(tmp_path / "in", mapping=whole, epochs=1)
    with rlio.read(tmp_path / "in", mapping=whole, epochs=1, on_error="skip") as reader:
        rows = rlio.concat_samples(list(reader))
        assert reader.skipped == 1
        assert [error.uri for error in reader.errors] == [str(paths[1])]
        assert any(str(paths[1]) in note for note in reader.source.notes)  # type: ignore[attr-defined]
    assert str(paths[1]) in caplog.text
    assert rows["obs"].tolist() == [0, 1, 2, 20, 21, 22, 30, 31, 32]
    assert rows["eps_id"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    # An episode could go on behind the gap.
    for more in ({"episode": "a"}, {"per_file": False, "truncated": "a"}):
        with pytest.raises(CorruptData):
            rlio.read(tmp_path / "in", mapping=rlio.Mapping(**fields, **more), epochs=1, on_error="skip")  # type: ignore[arg-type]
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(rlio.RlioError):
        rlio.read(tmp_path / "in", mapping=whole, epochs=1, on_error="skip")
