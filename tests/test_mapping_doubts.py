"""What a mapping would read wrongly without a word, or refused without help: of files of strangers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rlio
from rlio.errors import CorruptData, MissingColumn, OptionError, RlioError, SchemaError
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
        ("1.0", "1"),
        ("+7", "7"),
        ("0x1F", "31"),
        ("true", "True"),
        ("3.1", "3.10"),
        ("18446744073709551617", "18446744073709551618"),
        ("2020-01-01", "2020-01-01 00:00:00"),
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
        {"episode": "id", "terminated": "done"},
        {"lengths": "len"},
        {"ends": "until", "terminated": True},
        {"starts": "first"},
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


def test_truncations_of_what_goes_on_without_a_jump_are_read_and_noted() -> None:
    x = np.sin(np.arange(13.0))
    table = {"x": x[:-1], "x2": x[1:], "a": np.zeros(12), "cut": np.arange(12) % 4 == 3}
    given = rlio.Mapping(SHORT, truncated="cut", next_obs=["x2"])
    with rlio.from_arrays(table, mapping=given, epochs=1) as reader:
        assert any("first obs of the next one" in note for note in reader.source.notes)
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
