"""What a mapping would read wrongly without a word, or refused without help: of files of strangers."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from further import further

import rlio
from rlio.errors import CorruptData, MissingColumn, OptionError, RlioError, SchemaError, UnknownLayout
from rlio.formats.files.json_files import whole_number
from rlio.formats.files.value_arrays import one_a_row
from rlio.source.damage import damage_named

SHORT = {"obs": ["x"], "actions": "a"}


def all_rows(reader: Any) -> rlio.SampleBatch:
    with reader:
        return rlio.concat_samples(list(reader))


def rows_of(source: Any, columns: Any = SHORT, options: Any = None, **fields: Any) -> rlio.SampleBatch:
    """All rows by a mapping with these fields, from a path, a list of paths or a dict of arrays."""
    given = rlio.Mapping(columns, **fields)
    if isinstance(source, dict):
        return all_rows(rlio.from_arrays(source, mapping=given, epochs=1))
    return all_rows(
        rlio.read(source, mapping=given, epochs=1, **({"format_options": options} if options else {}))
    )


def message_of(source: Any, error: type[RlioError] = SchemaError, **fields: Any) -> str:
    """The error that these fields cause."""
    with pytest.raises(error) as caught:
        rows_of(source, **fields)
    return str(caught.value)


# ---- ids of text files ----


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0012", "12"),
        ("1e3", "1000"),
        ("2020-01-01", "2020-01-01 00:00:00"),
        *further(
            ("1.0", "1"),
            ("+7", "7"),
            ("0x1F", "31"),
            ("true", "True"),
            ("3.1", "3.10"),
            ("18446744073709551617", "18446744073709551618"),
        ),
    ],
)
def test_ids_of_csv_that_are_one_number_and_two_texts_are_two_episodes(
    one: str, other: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"id,x,a\n{one},0,0\n{one},1,1\n{other},2,0\n")
    for id_columns in ("id", ["id", "id"]):
        assert rows_of(path, episode=id_columns)["eps_id"].tolist() == [0, 0, 1]
    path.write_text(f"eps_id,obs,actions,rewards\n{one},0,0,0\n{one},1,1,0\n{other},2,0,0\n")
    assert all_rows(rlio.read(path, epochs=1))["eps_id"].tolist() == [0, 0, 1]


def test_ids_of_csv_that_only_a_later_file_spells_otherwise_are_two_episodes(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("id,x,a\n12,0,0\n12,1,1\n")
    (tmp_path / "2.csv").write_text("id,x,a\n012,0,0\n012,1,1\n")
    assert rows_of(tmp_path, episode="id", per_file=False)["eps_id"].tolist() == [0, 0, 1, 1]


def test_ids_of_csv_that_are_spelled_as_whole_numbers_stay_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,x,a\n12,0,0\n-3,1,1\n0,1,1\n")
    assert rows_of(tmp_path / "a.csv", episode="id")["eps_id"].tolist() == [12, -3, 0]


def test_ids_of_json_that_look_like_times_are_two_episodes(tmp_path: Path) -> None:
    ids = ["2020-01-01", "2020-01-01", "2020-01-01T00:00:00"]
    lines = [json.dumps({"id": one, "x": n, "a": n}) for n, one in enumerate(ids)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert rows_of(tmp_path / "a.jsonl", episode="id")["eps_id"].tolist() == [0, 0, 1]


def test_categories_of_csv_that_are_one_number_and_two_texts_are_two_codes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,x,a\n1,0,01\n1,1,1\n1,2,01\n")
    for codes in ("a", {"a": ["01", "1"]}):
        assert rows_of(tmp_path / "a.csv", episode="id", codes=codes)["actions"].tolist() == [0, 1, 0]


# ---- the order of files ----


def test_a_list_of_files_is_read_in_its_order(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        (tmp_path / f"{number}.csv").write_text(f"x,a\n{number},0\n")
    names = [tmp_path / f"{number}.csv" for number in (10, 1, 2)]
    assert rows_of(names, per_file=True)["obs"].ravel().tolist() == [10, 1, 2]
    assert rows_of(tmp_path, per_file=True)["obs"].ravel().tolist() == [1, 2, 10]


# ---- ends that new_obs contradicts ----


def chained(lengths: tuple[int, ...] = (4, 3, 5), *, resets: bool) -> dict[str, np.ndarray]:
    """Episodes one after the other; ``resets``: the last new_obs is the first obs of the next episode."""
    x = np.concatenate([100.0 * e + np.arange(steps) for e, steps in enumerate(lengths)])
    after, last = x + 1, np.cumsum(lengths) - 1
    if resets:
        after[last[:-1]] = x[last[:-1] + 1]
    done = np.isin(np.arange(len(x)), last)
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return {
        "x": x,
        "x2": after,
        "a": np.zeros(len(x), int),
        "done": done,
        "id": ids,
        "len": np.array(lengths),
    }


@pytest.mark.parametrize(
    "ends",
    [
        {"terminated": "done"},
        {"truncated": "done"},
        {"episode": "id"},
        *further(
            {"episode": "id", "terminated": "done"},
            {"lengths": "len"},
            {"ends": "until", "terminated": True},
            {"starts": "first"},
        ),
    ],
)
def test_final_observations_that_are_those_of_the_next_episode_are_refused(ends: dict[str, Any]) -> None:
    for resets in (True, False):
        table = chained(resets=resets)
        table["until"], table["first"] = np.cumsum(table["len"]), np.roll(table["done"], 1)
        if resets:
            said = message_of(table, next_obs=["x2"], **ends)
            assert "next_obs='derive'" in said
            assert "final_obs" in said
            assert not rows_of(table, next_obs="derive", **ends)["new_obs_valid"].all()
        else:
            assert rows_of(table, next_obs=["x2"], **ends)["new_obs"].ravel().tolist() == table["x2"].tolist()


def test_ends_of_what_goes_on_without_a_jump_are_read_and_noted() -> None:
    x = np.cumsum(np.random.default_rng(0).uniform(0.5, 1.5, 101))
    table = {"x": x[:-1], "x2": x[1:], "a": np.zeros(100), "cut": np.arange(100) % 4 == 3}
    for ends in ({"truncated": "cut"}, {"terminated": "cut"}):
        given = rlio.Mapping(SHORT, next_obs=["x2"], **ends)
        with rlio.from_arrays(table, mapping=given, epochs=1) as reader:
            assert any("first obs of the next one" in note for note in reader.source.notes)


def test_terminal_rows_are_refused_if_observations_may_move_anywhere() -> None:
    x = np.random.default_rng(0).normal(size=101)
    table = {"x": x[:-1], "x2": x[1:], "a": np.zeros(100), "cut": np.arange(100) % 4 == 3}
    assert "final observations are lost" in message_of(table, terminated="cut", next_obs=["x2"])


@pytest.mark.parametrize(("by", "way"), [(1, "starts='done'"), (-1, r".shift(1)")])
@pytest.mark.parametrize("kind", ["done", "masks"])
def test_flags_that_are_a_row_late_or_early_are_refused_with_the_shift(by: int, way: str, kind: str) -> None:
    table = chained(resets=False)
    table["done"] = np.roll(table["done"], by)
    table["done"][0] = False
    table["masks"] = ~table["done"]
    way = way if kind == "done" else way.replace("done", "not masks")
    assert way in message_of(table, next_obs=["x2"], terminated={"done": "done", "masks": "not masks"}[kind])


@pytest.mark.parametrize(
    "wrong", [{"terminated": "not masks"}, {"starts": "masks"}, {"truncated": "not masks"}]
)
def test_masks_that_are_0_in_first_rows_are_refused_with_their_spelling(wrong: dict[str, str]) -> None:
    table = {"x": np.arange(7.0), "a": np.arange(7), "masks": [0, 1, 1, 0, 1, 1, 1]}
    assert "starts='not masks'" in message_of(table, **wrong)
    assert rows_of(table, starts="not masks")["eps_id"].tolist() == [0, 0, 0, 1, 1, 1, 1]
    with_ids = {**table, "id": [1, 1, 1, 2, 2, 2, 2]}
    if "starts" not in wrong:
        assert "starts='not masks'" in message_of(with_ids, episode="id", **wrong)


# ---- rows of several environments in turn ----


def interleaved() -> pd.DataFrame:
    """Two environments in turn, whose episodes have 6 and 4 steps; 12 steps of each."""
    rows = [(t, env, t % (6, 4)[env]) for t in range(12) for env in range(2)]
    return pd.DataFrame(
        {
            "env_id": [env for _, env, _ in rows],
            "time": range(len(rows)),
            "step": [step for _, _, step in rows],
            "x": [100.0 * env + t for t, env, _ in rows],
            "x2": [100.0 * env + t + (0.5 if step == (5, 3)[env] else 1) for t, env, step in rows],
            "a": [env for _, env, _ in rows],
            "done": [step == (5, 3)[env] for _, env, step in rows],
        }
    )


@pytest.mark.parametrize(
    ("without", "fields"),
    [
        ([], {}),
        ([], {"next_obs": "derive"}),
        (["env_id"], {"next_obs": "derive"}),
        (["env_id", "step"], {"next_obs": ["x2"]}),
    ],
)
def test_rows_of_several_environments_in_turn_are_refused(without: list[str], fields: dict[str, Any]) -> None:
    log = interleaved()
    assert "interleaved" in message_of(log.drop(columns=without), terminated="done", **fields)
    done = log["done"].astype(int)
    log["part"] = done.groupby(log["env_id"]).cumsum() - done
    rows = rows_of(log, terminated="done", episode=["env_id", "part"], sort="time", **fields)
    assert np.bincount(rows["eps_id"]).tolist() == [6, 4, 4, 6, 4]
    assert "name both in episode=" in message_of(log, terminated="done", episode="env_id", sort="time")


def test_rows_that_do_not_follow_each_other_are_noted() -> None:
    x = np.random.default_rng(0).normal(size=(20, 1))
    given = rlio.Mapping({"obs": "x", "actions": "a"}, terminated="done", next_obs="x2")
    table = {"x": x, "x2": x + 1, "a": np.zeros(20), "done": np.arange(20) % 10 == 9}
    with rlio.from_arrays(table, mapping=given, epochs=1) as reader:
        assert any("rows seem to be missing" in note for note in reader.source.notes)


def cut_by_time_limits() -> dict[str, Any]:
    """Episodes of 5 rows; only every second one ends by its flag, as in `d4rl.qlearning_dataset`."""
    x = np.concatenate([np.arange(5.0) + 100 * n for n in range(4)])[:, None]
    rows = np.arange(20)
    return {"x": x, "x2": x + 1, "a": np.zeros(20), "done": rows % 10 == 9, "cut": rows % 10 == 4}


def test_episodes_that_only_new_obs_tells_apart_are_refused_with_the_flag_that_is_missing() -> None:
    fields: dict[str, Any] = {"terminated": "done", "next_obs": "x2"}
    arrays = cut_by_time_limits()
    text = message_of({name: array for name, array in arrays.items() if name != "cut"}, **fields)
    assert "new_obs of row 4 is not the obs of row 5" in text
    made = np.append((arrays["x2"][:-1] != arrays["x"][1:]).any(axis=1), True) & ~arrays["done"]
    np.testing.assert_array_equal(made, arrays["cut"])
    found = rows_of(arrays, truncated="cut", **fields)
    assert found["eps_id"].tolist() == np.repeat(np.arange(4), 5).tolist()


def test_arrays_of_steps_and_environments_are_refused_with_the_way_out() -> None:
    table = {
        "x": np.zeros((16, 4, 3)),
        "a": np.zeros((16, 4, 2)),
        "r": np.zeros((16, 4)),
        "d": np.zeros((16, 4)),
    }
    for fields in ({"terminated": "d"}, {"per_file": True}):
        assert "swapaxes(0, 1)" in message_of(table, columns=PADDED, **fields)


# ---- values ----


def test_bytes_are_categories_and_parts_of_structured_arrays_are_named(tmp_path: Path) -> None:
    x = np.zeros(3, [("pos", ">f4", (2,)), ("vel", "f4")])
    np.savez(tmp_path / "a.npz", x=x, a=np.array([b"r", b"l", b"r"]), done=[0, 0, 1])
    rows = rows_of(
        tmp_path / "a.npz",
        {"obs": {"p": "x.pos", "v": "x.vel"}, "actions": "a"},
        terminated="done",
        codes="a",
    )
    assert rows["actions"].tolist() == [1, 0, 1]
    assert rows["obs"]["p"].dtype == np.dtype("f4")  # In the byte order of this machine.


@pytest.mark.parametrize(
    ("text", "way"),
    [
        (b"id,x,a\n1,1.5,0,7,8\n", "one list a row"),
        ("id,x,a\n1,1.5,0\n".encode("utf-16"), "encoding="),
        ("id,x,\xe4\n1,1.5,0\n".encode("latin-1"), "encoding="),
        (b'id,x,a\n1,"1,234.5",0\n', "thousands=','"),
        (b"id,x,a\n1,None,0\n1,2.5,0\n", "missing values"),
        (b"id,x,a\n1,2.5,NaN\n1,2.5,0\n", "drop or fill"),
    ],
)
def test_text_that_is_refused_says_the_way_out(text: bytes, way: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    assert way in message_of(tmp_path / "a.csv", RlioError, episode="id")


def test_the_separator_that_excel_writes_above_the_names_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sep=;\nid;x;a\n1;1.5;0\n")
    assert rows_of(tmp_path / "a.csv", episode="id")["obs"].tolist() == [[1.5]]


def test_files_of_one_step_are_refused_with_the_way_out(tmp_path: Path) -> None:
    for number in range(2):
        np.savez(tmp_path / f"{number}.npz", x=np.zeros(15), a=np.zeros(7))
    said = message_of(tmp_path, columns={"obs": "x", "actions": "a"}, per_file=True, next_obs="derive")
    assert "each file is one step" in said


# ---- bugs of ours are no damage ----


def test_an_error_that_only_a_bug_raises_is_no_damage() -> None:
    for error in (AttributeError("x"), AssertionError()):
        with pytest.raises(type(error)), damage_named("CSV", uri=None):
            raise error


def test_columns_of_another_kind_than_their_meaning_are_refused() -> None:
    for column in ({"a": np.zeros(3)}, None):
        with pytest.raises(SchemaError, match="one value a row"):
            one_a_row("rewards", column)  # type: ignore[arg-type]
    with pytest.raises(CorruptData, match="expected a JSON object"):
        whole_number(3, "task_index", uri="tasks.jsonl")


# ---- padding that is not stated ----

LENGTHS = np.array([8, 3, 5, 2])
PADDED = {"obs": "x", "actions": "a", "rewards": "r"}


def padded(value: float, *, left: bool) -> dict[str, np.ndarray]:
    """Arrays (episodes, 8, ...) in which padding has a value; actions of steps are above 0."""
    time = np.arange(8)
    mask = time >= 8 - LENGTHS[:, None] if left else time < LENGTHS[:, None]
    x = np.random.default_rng(0).normal(size=(4, 8, 2))
    return {
        "x": np.where(mask[:, :, None], x, value),
        "a": np.where(mask, time + 1, 0),
        "r": np.where(mask, 0.5, value),
        "n": LENGTHS,
        "mask": mask,
        "is_pad": ~mask,
    }


@pytest.mark.few(3)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("value", [np.nan, 0.0, -1.0])
def test_padding_is_left_out_on_either_side(value: float, left: bool) -> None:
    table = padded(value, left=left)
    for fields in ({"valid": "mask"}, {"valid": "not is_pad"}, *([] if left else [{"lengths": "n"}])):
        rows = rows_of(table, columns=PADDED, per_row=True, **fields)
        assert np.bincount(rows["eps_id"]).tolist() == LENGTHS.tolist()
        assert (rows["actions"] > 0).all()
        assert not np.isin(rows["obs"], value).any()
    if left:
        assert "valid='mask'" in message_of(table, columns=PADDED, per_row=True, lengths="n")
    for opposite in ("is_pad", "not mask"):
        said = message_of(table, columns=PADDED, per_row=True, valid=opposite)
        assert f"valid={'not is_pad' if opposite == 'is_pad' else 'mask'!r}" in said


@pytest.mark.parametrize(("value", "left"), [(np.nan, False), (np.nan, True), (0.0, False)])
def test_padding_without_lengths_is_refused(value: float, left: bool, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **padded(value, left=left))
    for source in (padded(value, left=left), tmp_path / "a.npz"):
        said = message_of(source, columns=PADDED, per_row=True)
        assert "lengths=" in said
        assert "valid=" in said


def test_padding_far_from_the_first_episodes_is_refused_when_it_is_read() -> None:
    x = np.random.default_rng(0).normal(size=(100, 4, 2))
    x[99, 2:] = np.nan
    said = message_of({"x": x, "a": np.zeros((100, 4))}, columns={"obs": "x", "actions": "a"}, per_row=True)
    assert "row 99" in said


def test_values_that_only_some_columns_lack_are_no_padding() -> None:
    x = np.random.default_rng(0).normal(size=(4, 8, 2))
    force = np.full((4, 8, 1), np.nan)
    force[:, 0] = 1
    table = {"x": x, "force": force, "a": np.zeros((4, 8)), "r": np.zeros((4, 8))}
    columns = {**PADDED, "obs": {"x": "x", "force": "force"}}
    assert len(rows_of(table, columns=columns, per_row=True)) == 32


def test_padding_between_steps_is_refused() -> None:
    table = padded(0.0, left=False)
    table["mask"][0, 3] = False
    assert "row 0 follow padding" in message_of(table, columns=PADDED, per_row=True, valid="mask")


def test_one_reward_an_episode_is_refused_with_the_way_out() -> None:
    table = {"x": np.ones((2, 3, 2)), "a": np.ones((2, 3)), "r": np.ones(2)}
    assert "the return of the episode" in message_of(table, columns=PADDED, per_row=True)


# ---- keys with dots ----


def test_keys_with_dots_are_named_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"x": n, "a": n, "done": n in (2, 4), "info": {"TimeLimit.truncated": n == 2, "b.c": {"d.e": n}}}
        for n in range(5)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = {"obs": ["info.b.c.d.e"], "actions": "a"}
    for source in (
        tmp_path / "a.jsonl",
        tmp_path / "a.parquet",
        pa.Table.from_pylist(rows),
        pd.DataFrame(rows),
    ):
        found = rows_of(source, columns, terminated="done", truncated="info.TimeLimit.truncated")
        assert found["obs"].ravel().tolist() == [0, 1, 2, 3, 4]
        assert found["truncateds"].tolist() == [False, False, True, False, False]
    said = message_of(tmp_path / "a.jsonl", MissingColumn, columns={"obs": "info.b.q"}, per_file=True)
    assert "no part 'b'" in said
    sparse = [{**row, "info": row["info"] if row["done"] else {}} for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, sparse)))
    said = message_of(tmp_path / "a.jsonl", columns={"obs": "info.b.c.d.e"}, per_file=True)
    assert "only some objects have a key" in said


# ---- flags of episodes that are single values ----


def put_episodes(root: Path, shape: tuple[int, ...]) -> dict[Path, dict[str, Any]]:
    """Episodes of 3, 1 and 4 steps, each a file or group with one flag; the second does not terminate."""
    found: dict[Path, dict[str, Any]] = {root / name: {"per_file": True} for name in ("npz", "hdf5")}
    for path in found:
        path.mkdir(parents=True)
    with h5py.File(root / "groups.hdf5", "w") as groups:
        for number, steps in enumerate((3, 1, 4)):
            arrays = {
                "x": np.full((steps, 1), number),
                "a": np.arange(steps),
                "ok": np.full(shape, number != 1),
            }
            np.savez(root / "npz" / f"{number}.npz", **arrays)
            with h5py.File(root / "hdf5" / f"{number}.h5", "w") as file:
                for name, array in arrays.items():
                    file[name] = array
                    groups[f"data/demo_{number}/{name}"] = array
    return {**found, root / "groups.hdf5": {"episode": "data/demo_*"}}


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_flag_in_each_file_or_group_is_that_of_its_episode(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    columns = {"obs": "x", "actions": "a"}
    for path, fields in put_episodes(tmp_path, shape).items():
        rows = rows_of(path, columns, terminated="ok", **fields)
        assert np.flatnonzero(rows["terminateds"]).tolist() == [2, 7]
        assert np.flatnonzero(rows["truncateds"]).tolist() == [3]
        rows = rows_of(path, columns, truncated="not ok", next_obs="derive", **fields)
        assert np.flatnonzero(rows["truncateds"]).tolist() == [3]
        if path.is_dir():
            said = message_of(path, columns=columns, terminated="ok")
            assert "per_file=True" in said


def test_one_flag_beside_longer_observations_is_that_of_the_episode(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for number in range(2):
            for name, array in (("x", np.zeros((4, 2))), ("a", np.zeros(3)), ("ok", np.bool_(number))):
                file[f"traj_{number}/{name}"] = array
    rows = rows_of(tmp_path / "a.hdf5", {"obs": "x", "actions": "a"}, episode="traj_*", terminated="ok")
    assert (len(rows), np.flatnonzero(rows["terminateds"]).tolist()) == (6, [5])


def test_a_flag_of_another_shape_in_a_later_group_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for number, ok in enumerate((np.zeros(()), np.zeros(2))):
            for name, array in (("x", np.zeros((3, 2))), ("a", np.zeros(3)), ("ok", ok)):
                file[f"traj_{number}/{name}"] = array
    said = message_of(
        tmp_path / "a.hdf5", columns={"obs": "x", "actions": "a"}, episode="traj_*", terminated="ok"
    )
    assert "expected one number or flag" in said


# ---- separators that are not found ----


@pytest.mark.parametrize("separator", ["::", " ", *further("   ", "||", "\t\t", ":", "~", "\x01")])
def test_separators_that_are_not_found_by_looking_are_named(separator: str, tmp_path: Path) -> None:
    path, names = tmp_path / "a.csv", ["id", "x", "a"]
    path.write_text(
        "".join(separator.join(row) + "\n" for row in (names, ["1", "2.5", "3"], ["1", "3", "4"]))
    )
    said = message_of(path, UnknownLayout, columns=SHORT, episode="id")
    assert "pandas.read_csv" in said
    if len(separator) == 1:
        assert rows_of(path, options={"delimiter": separator}, episode="id")["actions"].tolist() == [3, 4]
    else:
        with pytest.raises(OptionError, match="engine='python'"):
            rows_of(path, options={"delimiter": separator}, episode="id")
        pattern = ast.literal_eval(said.partition("sep=")[2].partition(", engine")[0])
        frame = pd.read_csv(path, sep=pattern, engine="python")
        assert rows_of(frame, episode="id")["actions"].tolist() == [3, 4]


def test_a_column_whose_name_has_a_blank_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("first x,a,id\n1,2,3\n")
    assert rows_of(tmp_path / "a.csv", {"obs": ["first x"], "actions": "a"}, episode="id")[
        "obs"
    ].tolist() == [[1]]


# ---- flags that the mapping does not name ----

SHORT_ROWS = {"x": np.arange(5.0), "a": np.arange(5)}
# Two episodes, of three rows and of two: the first one was cut off, the second one terminated.
UNNAMED = {
    "x": np.arange(5.0),
    "a": np.arange(5),
    "ok": np.array([0, 0, 0, 0, 1], np.bool_),
    "is_first": np.array([1, 0, 0, 1, 0], np.bool_),
    "timeouts": np.array([0, 0, 1, 0, 0], np.uint8),
    "TimeLimit.truncated": np.array([0, 0, 1, 0, 0], np.float32),
    "done": np.array(["no", "no", "yes", "no", "yes"]),
    "run": np.array([7, 7, 7, 7, 7]),
}


@pytest.mark.parametrize(
    ("name", "row", "fields", "way"),
    [
        ("timeouts", 2, {"terminated": "ok"}, "pass truncated='timeouts'"),
        ("is_first", 3, {"per_file": True}, "pass starts='is_first'"),
        ("done", 2, {"episode": "run"}, "name the columns in episode="),
        *further(
            ("is_first", 3, {"terminated": "ok"}, "pass starts='is_first'"),
            ("TimeLimit.truncated", 2, {"terminated": "ok"}, "pass truncated='TimeLimit.truncated'"),
            ("done", 2, {"per_file": True}, "pass terminated='done'"),
        ),
    ],
)
def test_a_flag_that_is_not_named_and_true_within_an_episode_is_refused_with_the_field_for_it(
    name: str, row: int, fields: Any, way: str, tmp_path: Path
) -> None:
    arrays = {one: UNNAMED[one] for one in ("x", "a", "ok", "run", name)}
    np.savez(tmp_path / "a.npz", **arrays)
    for source in (arrays, tmp_path / "a.npz"):
        text = message_of(source, **fields)
        assert f"row {row}: {name!r}, which the mapping does not name" in text
        assert way in text
        assert f"columns={{..., 'also_{name}': {name!r}}}" in text


@pytest.mark.parametrize(
    "fields",
    [
        {"starts": "is_first"},
        {"ends": "cuts"},
        {"terminated": "ok", "truncated": "timeouts"},
        {"truncated": "done"},
        *further({"lengths": "counts"}, {"starts": "is_first", "terminated": "ok"}),
    ],
)
def test_flags_that_are_not_named_and_agree_with_the_episodes_are_read_over(fields: Any) -> None:
    arrays = {**UNNAMED, "cuts": np.array([3, 5]), "counts": np.array([3, 2])}
    assert rows_of(arrays, **fields)["eps_id"].tolist() == [0, 0, 0, 1, 1]


def test_a_flag_with_another_meaning_is_taken_along_as_a_column() -> None:
    arrays = {name: UNNAMED[name] for name in ("x", "a", "timeouts")}
    rows = rows_of(arrays, columns={**SHORT, "also_timeouts": "timeouts"}, per_file=True)
    assert rows["eps_id"].tolist() == [0] * 5
    assert rows["also_timeouts"].tolist() == [0, 0, 1, 0, 0]
    # What only has the name of a flag is none.
    assert len(rows_of({**arrays, "timeouts": np.array([0.5, 30.0, 30.0, 2.0, 1.0])}, per_file=True)) == 5


# ---- time limits that count as terminal states ----


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("timeouts", {"terminated": "done"}),
        ("TimeLimit.truncated", {"episode": "id", "terminated": True}),
        ("infos/TimeLimit.truncated", {"lengths": "counts", "terminated": "ends"}),
        *further(
            ("Truncated", {"episode": "id", "terminated": "not go_on"}),
            ("time_limit", {"starts": "is_first", "terminated": "done"}),
        ),
    ],
)
def test_a_time_limit_that_the_mapping_calls_terminal_is_refused(
    name: str, fields: Any, tmp_path: Path
) -> None:
    cut = np.array([0, 0, 1, 0, 0], np.uint8)
    done = np.array([0, 0, 1, 0, 1], np.bool_)
    arrays = {**SHORT_ROWS, "done": done, "go_on": ~done, "id": np.array([4, 4, 4, 9, 9]), name: cut}
    arrays |= {"counts": np.array([3, 2]), "ends": np.array([True, True]), "is_first": np.roll(done, 1)}
    text = message_of(arrays, **fields)
    assert f"row 2: {name!r}, which the mapping does not name" in text
    assert f"truncated={name!r}" in text
    # Where another flag terminates, or the column is one of the user's, it is read.
    assert len(rows_of({**arrays, name: cut * 0}, **fields)) == 5
    assert len(rows_of(arrays, columns={**SHORT, f"also_{name}": name}, **fields)) == 5
    assert len(rows_of({**arrays, "ended": done & (cut == 0)}, episode="id", terminated="ended")) == 5


CUT: dict[str, Any] = {"TimeLimit.truncated": True, "episode": {"r": 1.5}, "terminal_observation": [0.5]}
#: The info of the row at which the time limit was reached, and that of the others.
INFOS: list[tuple[Any, Any]] = [
    ({"TimeLimit.truncated": True}, {"TimeLimit.truncated": False}),
    (CUT, {}),
    *further(
        (CUT, None), ({"TimeLimit": {"truncated": True}}, {"v": 0.5}), (CUT, {"TimeLimit.truncated": None})
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("cut", "other"), INFOS)
@pytest.mark.parametrize("top", ["info", *further("infos", "env_infos")])
def test_a_time_limit_in_nested_infos_is_no_terminal_state_also_where_other_infos_lack_it(
    top: str, cut: Any, other: Any, tmp_path: Path
) -> None:
    """Gym writes the key where the limit was reached. Sparse infos were passed over, or refused."""
    rows = [
        {"x": float(n), "a": n, "done": n in (2, 4), "id": int(n > 2), top: cut if n == 2 else other}
        for n in range(5)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "two").mkdir()
    for file, part in enumerate((rows[3:], rows[:3])):  # The key is in the second file only.
        feather.write_feather(pa.Table.from_pylist(part), str(tmp_path / "two" / f"{file}.arrow"))
    name = f"{top}.TimeLimit.truncated"
    for source, at, more in (
        (tmp_path / "a.jsonl", 2, {}),
        (pa.Table.from_pylist(rows), 2, {}),
        (pd.DataFrame(rows), 2, {}),
        (tmp_path / "two", 4, {}),
        (pa.Table.from_pylist(rows[::-1]), 2, {"episode": "id", "sort": "x"}),
    ):
        text = message_of(source, terminated="done", **more)  # type: ignore[arg-type]
        assert f"row {4 if 'sort' in more else at}: {name!r}, which the mapping does not name" in text
        assert f"truncated={name!r}; with it, rows that have both flags are truncated" in text
        found = rows_of(source, terminated="done", truncated=name, **more)  # type: ignore[arg-type]
        assert np.flatnonzero(found["truncateds"]).tolist() == [4 if "sort" in more else at]
        assert found["terminateds"].sum() == 1
        assert not (found["terminateds"] & found["truncateds"]).any()


@pytest.mark.parametrize("top", ["info", "infos"])
@pytest.mark.parametrize(
    "infos",
    [
        [{"TimeLimit.truncated": [False, False, True], "v": None}, {"TimeLimit.truncated": [False, False]}],
        [{"TimeLimit.truncated": True, "v": None}, None],
    ],
)
def test_a_time_limit_in_rows_that_are_episodes_is_no_terminal_state(top: str, infos: list[Any]) -> None:
    rows = [{"x": [0.0, 1, 2], "a": [0, 1, 2], "done": [False, False, True], top: infos[0]}]
    rows += [{"x": [3.0, 4], "a": [3, 4], "done": [False, True], top: infos[1]}]
    text = message_of(pa.Table.from_pylist(rows), terminated="done", per_row=True)
    assert f"'{top}.TimeLimit.truncated', which the mapping does not name" in text


def test_infos_that_became_columns_may_lack_a_time_limit(tmp_path: Path) -> None:
    rows = [{"x": n, "a": n, "done": n in (2, 4), "info": CUT if n == 2 else {}} for n in range(5)]
    frame = pd.json_normalize(rows)[["x", "a", "done", "info.TimeLimit.truncated"]]
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    for source in (frame, tmp_path / "a.csv", tmp_path / "a.parquet"):
        assert "which the mapping does not name" in message_of(source, terminated="done")
        found = rows_of(source, terminated="done", truncated="info.TimeLimit.truncated")
        assert np.flatnonzero(found["truncateds"]).tolist() == [2]
        assert np.flatnonzero(found["terminateds"]).tolist() == [4]


@pytest.mark.few(1)
@pytest.mark.parametrize("write", [json.dumps, repr, *further(lambda info: json.dumps(info, indent=1))])
@pytest.mark.parametrize("above", ["info", *further("info.final_info")])
def test_a_time_limit_in_infos_that_are_texts_is_no_terminal_state(
    write: Callable[[Any], str], above: str, tmp_path: Path
) -> None:
    """pandas writes infos so into CSV. A mapping that named the flag found it in no row, and said nothing."""
    cut: Any = {"x": "é", "TimeLimit.truncated": True}
    infos = [cut if above == "info" else {"final_info": cut}, {"TimeLimit.truncated": False}, {}]
    rows = {"x": np.arange(6.0), "a": np.arange(6), "done": np.arange(6) % 2 == 1}
    texts = [write(infos[0 if n == 3 else 1 if n == 1 else 2]) for n in range(6)]
    frame = pd.DataFrame({**rows, "info": texts})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.assign(info=frame["info"].astype("category")).to_parquet(tmp_path / "categories.parquet")
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    files = ("a.csv", "a.parquet", "categories.parquet", "a.jsonl")
    for source in (frame, {**rows, "info": np.array(texts)}, *(tmp_path / file for file in files)):
        assert "row 3: 'info" in (text := message_of(source, terminated="done"))
        assert "which the mapping does not name, says that a time limit ended the episode" in text
        found = rows_of(source, terminated="done", truncated=f"{above}.TimeLimit.truncated")
        assert np.flatnonzero(found["truncateds"]).tolist() == [3]
        assert np.flatnonzero(found["terminateds"]).tolist() == [1, 5]


# ---- rows that are missing, twice, or without an action ----


@pytest.mark.parametrize("steps", [[0, 1, 1, 2], [0, 1, 3, 4], [1, 0, 2, 3], [0, 4, 8, 8]])
def test_rows_that_are_missing_or_twice_by_their_step_are_refused_if_new_obs_is_derived(
    steps: list[int],
) -> None:
    log = pd.DataFrame({"x": [*range(4), *range(4)], "a": 0, "id": [1] * 4 + [2] * 4})
    log["step"] = [*np.arange(4) * (steps[1] - steps[0]), *steps]
    if steps == [1, 0, 2, 3]:
        log["step"] = [*range(4), *steps]
    fields: dict[str, Any] = {"episode": "id", "next_obs": "derive"}
    text = message_of(log, **fields)
    assert "from row" in text
    assert "'step'" in text
    # Where new_obs is stated, it is right, and the missing rows are a note.
    noted = rlio.read(log, mapping=rlio.Mapping(SHORT, episode="id", next_obs=["x"]), epochs=1)
    with noted:
        assert any("rows seem to be missing" in note for note in noted.source.notes)  # type: ignore[attr-defined]
    own = {**SHORT, "phase": "step"}
    assert rows_of(log, own, **fields)["phase"].tolist() == log["step"].tolist()


@pytest.mark.parametrize(
    "steps",
    [[0, 1, 2, 3], [3, 2, 1, 0], [0, 4, 8, 10], [7.25, 7.5, 8.5, 8.75], [0, 3, 4, 9]],
)
def test_steps_that_go_on_evenly_or_are_times_are_read(steps: list[float]) -> None:
    log = pd.DataFrame({"x": range(4), "a": 0, "id": 1, "t": steps})
    assert len(rows_of(log, episode="id", next_obs="derive")) == 4


@pytest.mark.parametrize("is_date", [False, True])
def test_rows_in_another_order_than_their_times_are_refused_if_new_obs_is_derived(
    is_date: bool, tmp_path: Path
) -> None:
    times = np.array([20, 10, 30, 40, 10, 30, 20, 40])
    log = pd.DataFrame({"x": range(8), "a": 0, "id": [1] * 4 + [2] * 4, "Time": times})
    if is_date:
        log["Time"] = pd.Timestamp("2024-05-01") + pd.to_timedelta(times, unit="s")
    log.to_csv(tmp_path / "a.csv", index=False)
    fields: dict[str, Any] = {"episode": "id", "next_obs": "derive"}
    for source in (log, tmp_path / "a.csv"):
        text = message_of(source, **fields)
        assert "'Time' goes back in 2 rows of an episode (first in row 1)" in text
        assert "sort='Time'" in text
        assert rows_of(source, sort="Time", **fields)["obs"][:, 0].tolist() == [1, 0, 2, 3, 4, 6, 5, 7]
    with rlio.read(log, mapping=rlio.Mapping(SHORT, episode="id"), epochs=1) as noted:
        assert any("'Time' goes back" in note for note in noted.source.notes)  # type: ignore[attr-defined]
    # A time of a day goes back once; what remains goes back always.
    for values in ([*range(80, 100), *range(20)], range(40, 0, -1)):
        log = pd.DataFrame({"x": range(40), "a": 0, "id": 1, "time": values})
        assert len(rows_of(log, **fields)) == 40


@pytest.mark.parametrize(("edge", "way"), [(0, "shifted=("), (-1, "final_row=True")])
def test_actions_that_are_nan_at_an_edge_of_each_episode_are_refused(edge: int, way: str) -> None:
    log = pd.DataFrame({"x": range(7), "a": 0.5, "r": 1.0, "id": [1] * 3 + [2] * 4})
    rows = log.groupby("id", group_keys=False).nth(edge).index
    log.loc[rows, "a"] = np.nan
    assert way in message_of(log, episode="id")
    log.loc[1, "a"] = np.nan  # Also elsewhere: a value that the log lacks.
    assert len(rows_of(log, episode="id")) == 7


def test_lengths_that_are_passed_as_ends_are_refused(tmp_path: Path) -> None:
    arrays = {"x": np.arange(7.0), "a": np.arange(7), "lens": np.array([3, 4]), "firsts": np.array([0, 3, 4])}
    assert "pass lengths= instead" in message_of(arrays, ends="lens")
    assert rows_of(arrays, lengths="lens")["eps_id"].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert rows_of(arrays, ends="firsts")["eps_id"].tolist() == [0, 0, 0, 1, 2, 2, 2]


def test_a_chunk_of_a_replay_that_begins_within_an_episode_says_how_chunks_are_joined(tmp_path: Path) -> None:
    first = np.array([1, 0, 0, 0, 1, 0, 0, 0], np.bool_)
    arrays = {"x": np.arange(8.0), "a": np.arange(8), "is_first": first}
    for number, part in enumerate((slice(0, 3), slice(3, 8))):
        np.savez(tmp_path / f"{number}.npz", **{name: array[part] for name, array in arrays.items()})
    fields: dict[str, Any] = {"starts": "is_first", "next_obs": "derive"}
    assert "if it goes on from the file before, pass per_file=False" in message_of(
        tmp_path, per_file=True, **fields
    )
    rows = rows_of(tmp_path, per_file=False, **fields)
    assert rows["eps_id"].tolist() == [0] * 4 + [1] * 4
    assert rows["new_obs_valid"].tolist() == [True, True, True, False] * 2


def test_episodes_without_rewards_are_refused_with_the_mapping_that_reads_them() -> None:
    episodes = [{"obs": np.zeros((3, 2)), "actions": np.zeros(3)}]
    with pytest.raises(UnknownLayout) as caught:
        rlio.from_episodes(episodes, epochs=1)
    assert "mapping=rlio.Mapping(columns={'obs': 'obs', 'actions': 'actions'}) (docs" in str(caught.value)
    given = rlio.Mapping({"obs": "obs", "actions": "actions"})
    assert len(all_rows(rlio.from_episodes(episodes, mapping=given, epochs=1))) == 3


@pytest.mark.parametrize("name", ["terminations", "done"])
def test_a_flag_of_last_rows_that_is_not_named_is_told_where_no_episode_counts_as_terminated(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was dropped, and the report said that no column states how episodes end."""
    table = {"e": [1, 1, 2, 2], "x": [0.0, 1.0, 2.0, 3.0], "a": [0] * 4, name: [False, True, False, True]}
    given = {"columns": {"obs": ["x"], "actions": "a"}, "episode": "e"}
    with rlio.read(pd.DataFrame(table), mapping=rlio.Mapping(**given), epochs=1) as reader:
        (note,) = [note for note in reader.source.notes if name in note]
        assert reader.sample()["truncateds"].tolist() == [False, True, False, True]
    assert f"pass terminated={name!r}" in note
    assert note.rstrip(".") in caplog.text
    caplog.clear()
    for more in ({"terminated": name}, {"columns": {**given["columns"], "also": name}}):
        rlio.read(pd.DataFrame(table), mapping=rlio.Mapping(**given | more), epochs=1).close()
    table[name] = [False] * 4
    rlio.read(pd.DataFrame(table), mapping=rlio.Mapping(**given), epochs=1).close()
    assert not caplog.text


def test_the_mapping_that_a_message_suggests_names_the_flag_of_terminal_states() -> None:
    """The one of Minari's names read every episode as truncated."""
    flags = {"terminations": [False, True], "truncations": [False, False]}
    minari: Any = {"observations": [[0.0], [1.0], [2.0]], "actions": [0, 1], "rewards": [0.0, 1.0], **flags}
    with pytest.raises(UnknownLayout, match=r"terminated='terminations'\)"):
        rlio.from_episodes([minari])
    with pytest.raises(UnknownLayout, match=r"episode='traj', terminated='terminal'\)"):
        rlio.read(pd.DataFrame({"state": [0.0], "action": [0], "terminal": [True], "traj": [0]}))
