"""What a mapping would read wrongly without a word, or refused without help: of files of strangers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlio
from rlio.errors import RlioError, SchemaError

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
