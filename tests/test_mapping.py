"""Tables whose columns the user names: every kind of file and frame, ends of episodes, and wrong mappings.

Numbers say where they belong: row t of episode e has x = 100 e + t, y = -x, reward 1000 e + t, action t % 3.
"""

from __future__ import annotations

import csv
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from further import further
from typer.testing import CliRunner

import rlio
from rlio.cli.main import app
from rlio.errors import (
    CorruptData,
    DataNotFound,
    MissingColumn,
    OptionError,
    RlioError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
)
from rlio.formats.format import recognise
from rlio.formats.tables import table as tables
from rlio.formats.tables import text_table
from rlio.resolve import resolve_input
from rlio.storage import Storage

LENGTHS = (3, 1, 5)
COLUMNS = {"obs": ["x", "y"], "actions": "a", "rewards": "r"}
FIELDS: dict[str, Any] = {
    "columns": COLUMNS,
    "episode": "trip",
    "terminated": "done",
    "next_obs": "derive",
    "dtypes": {"obs": "float32"},
}
MAPPING = rlio.Mapping(**FIELDS)


def mapped(**fields: Any) -> rlio.Mapping:
    """`MAPPING` with other fields."""
    return rlio.Mapping(**{**FIELDS, **fields})


#: That of a table with the columns e, x and a.
SHORT = rlio.Mapping({"obs": ["x"], "actions": "a"}, episode="e")


def log(lengths: tuple[int, ...] = LENGTHS, first: int = 1) -> dict[str, list[Any]]:
    """Columns of episodes whose ids are 10 times their number; the odd ones are terminated."""
    rows = [(e, t, steps) for e, steps in enumerate(lengths, first) for t in range(steps)]
    return {
        "trip": [10 * e for e, _, _ in rows],
        "step": [t for _, t, _ in rows],
        "x": [100.0 * e + t for e, t, _ in rows],
        "y": [-(100 * e + t) for e, t, _ in rows],
        "a": [t % 3 for _, t, _ in rows],
        "r": [1000 * e + t for e, t, _ in rows],
        "done": [e % 2 == 1 and t == steps - 1 for e, t, steps in rows],
        "note": [f"{e}/{t}" for e, t, _ in rows],
    }


def rows_of(source: Any, **options: Any) -> rlio.SampleBatch:
    with rlio.read(source, epochs=1, **options) as reader:
        return rlio.concat_samples(list(reader))


def all_rows(reader: Any) -> rlio.SampleBatch:
    with reader:
        return rlio.concat_samples(list(reader))


def check(
    rows: rlio.SampleBatch, lengths: tuple[int, ...] = LENGTHS, *, ids: list[int] | None = None
) -> None:
    """Every number is where it belongs."""
    where = [(e, t) for e, steps in enumerate(lengths, 1) for t in range(steps)]
    last = np.array([t == lengths[e - 1] - 1 for e, t in where])
    x = np.array([100 * e + t for e, t in where], np.float32)
    assert rows["obs"].dtype == np.float32
    assert rows["obs"].tolist() == np.stack([x, -x], 1).tolist()
    follow = np.where(last, 0, x + 1)
    assert rows["new_obs"].dtype == np.float32
    assert rows["new_obs"].tolist() == np.stack([follow, -follow], 1).tolist()
    assert rows["new_obs_valid"].tolist() == (~last).tolist()
    assert rows["actions"].tolist() == [t % 3 for _, t in where]
    assert rows["rewards"].dtype == np.float64
    assert rows["rewards"].tolist() == [1000 * e + t for e, t in where]
    assert rows["terminateds"].tolist() == [
        bool(end) and e % 2 == 1 for (e, _), end in zip(where, last, strict=True)
    ]
    assert rows["truncateds"].tolist() == [
        bool(end) and e % 2 == 0 for (e, _), end in zip(where, last, strict=True)
    ]
    assert rows["eps_id"].tolist() == [(ids or [10 * n for n in range(1, 999)])[e - 1] for e, _ in where]
    assert rows["t"].tolist() == [t for _, t in where]


def write_csv(columns: dict[str, Any], path: Path, delimiter: str = ",") -> Path:
    path = path.with_suffix(".csv" if delimiter == "," else ".tsv")
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerows([columns, *zip(*columns.values(), strict=True)])
    return path


def write_tsv(columns: dict[str, Any], path: Path) -> Path:
    return write_csv(columns, path, "\t")


def write_jsonl(columns: dict[str, Any], path: Path) -> Path:
    names = list(columns)
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    path.with_suffix(".jsonl").write_text("\n".join(lines))
    return path.with_suffix(".jsonl")


def write_parquet(columns: dict[str, Any], path: Path) -> Path:
    pq.write_table(pa.table(columns), path.with_suffix(".parquet"), row_group_size=2)
    return path.with_suffix(".parquet")


def write_npz(columns: dict[str, Any], path: Path) -> Path:
    np.savez_compressed(
        path.with_suffix(".npz"), **{name: np.array(value) for name, value in columns.items()}
    )
    return path.with_suffix(".npz")


def write_feather(columns: dict[str, Any], path: Path) -> Path:
    feather.write_feather(pa.table(columns), path.with_suffix(".feather"), compression="zstd", chunksize=4)
    return path.with_suffix(".feather")


def write_polars(columns: dict[str, Any], path: Path) -> Path:
    frame = pl.DataFrame(columns)
    pieces = pl.concat([frame[:3], frame[3:]], rechunk=False)  # Several record batches.
    pieces.write_ipc(path.with_suffix(".ipc"), compression="zstd")
    return path.with_suffix(".ipc")


def write_stream(columns: dict[str, Any], path: Path) -> Path:
    table = pa.table(columns)
    with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    return path.with_suffix(".arrow")


FILES = (
    write_csv,
    write_tsv,
    write_jsonl,
    write_parquet,
    write_npz,
    write_feather,
    write_polars,
    write_stream,
)
FRAMES: tuple[Callable[[dict[str, Any]], Any], ...] = (pd.DataFrame, pl.DataFrame, pa.table)


def sources(tmp_path: Path, columns: dict[str, Any]) -> list[Any]:
    return [*(write(columns, tmp_path / "log") for write in FILES), *(make(columns) for make in FRAMES)]


def test_every_kind_of_file_and_frame_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_table, "_BLOCK_BYTES", 50)
    monkeypatch.setattr(tables, "_PIECE_ROWS", 2)
    monkeypatch.setattr("rlio.formats.tables.table.SCAN_ROWS", 2)
    for source in sources(tmp_path, log()):
        check(rows_of(source, mapping=MAPPING))
        check(rows_of(source, batch_size=None, mapping=mapped(columns={**COLUMNS, "t": "step"})))
    check(all_rows(rlio.from_arrays(log(), epochs=1, mapping=MAPPING)))


def test_batches_of_any_size_and_shards_have_every_row_once(tmp_path: Path) -> None:
    lengths = (3, 1, 5) * 40
    path = write_csv(log(lengths), tmp_path / "log")
    with rlio.read(path, epochs=1, batch_size=7, mapping=MAPPING) as reader:
        batches = list(reader)
    assert {len(batch) for batch in batches[:-1]} == {7}
    check(rlio.concat_samples(batches), lengths)
    parts = [rows_of(path, shuffle=True, seed=3, shard=(rank, 3), mapping=MAPPING) for rank in range(3)]
    joined = rlio.concat_samples(parts)
    assert sorted(joined["rewards"].tolist()) == log(lengths)["r"]
    valid = joined["new_obs_valid"]
    assert (joined["new_obs"][valid][:, 0] == joined["obs"][valid][:, 0] + 1).all()


def test_a_saved_position_continues_and_other_data_or_another_mapping_refuses_it(tmp_path: Path) -> None:
    path = write_csv(log(), tmp_path / "log")
    for source, other in ((path, None), (pd.DataFrame(log()), pd.DataFrame({**log(), "a": [2] * 9}))):
        with rlio.read(source, batch_size=4, epochs=1, mapping=MAPPING) as reader:
            reader.sample()
            state = reader.state_dict()
            rest = [row for batch in reader for row in batch["rewards"].tolist()]
        with rlio.read(source, batch_size=4, epochs=1, mapping=MAPPING) as reader:
            reader.load_state_dict(state)
            assert [row for batch in reader for row in batch["rewards"].tolist()] == rest == log()["r"][4:]
        wrong = rlio.read(source, batch_size=4, epochs=1, mapping=mapped(terminated=None))
        with wrong, pytest.raises(rlio.errors.StateError):
            wrong.load_state_dict(state)
        if other is not None:
            with (
                rlio.read(other, batch_size=4, epochs=1, mapping=MAPPING) as reader,
                pytest.raises(rlio.errors.StateError),
            ):
                reader.load_state_dict(state)


# ---- columns ----


def test_nested_columns_and_parts_of_them_are_read(tmp_path: Path) -> None:
    columns = log()
    nested = {
        **{name: columns[name] for name in ("trip", "r", "done")},
        "info": [
            {"speed": float(x), "deep": {"a": a}, "pos": [x, -x]}
            for x, a in zip(columns["x"], columns["a"], strict=True)
        ],
        "state.x": columns["x"],
    }
    mapping: dict[str, Any] = {
        "columns": {
            "obs": {"pos": "info.pos", "both": ["info.speed", "state.x"]},
            "actions": "info.deep.a",
            "rewards": "r",
            "whole": "info.deep",
        },
        "episode": "trip",
        "next_obs": {"pos": "info.pos", "both": ["state.x", "info.speed"]},
        "dtypes": {"obs.pos": "float32"},
    }
    found = [write_jsonl(nested, tmp_path / "log"), write_parquet(nested, tmp_path / "log"), pa.table(nested)]
    for source in [*found, pl.DataFrame(nested), pd.DataFrame(nested)]:
        if isinstance(source, pd.DataFrame):
            mapping["columns"].pop("whole")  # There, it is a column of dicts.
            mapping["columns"]["obs"] = {"both": ["info.speed", "state.x"]}
            mapping |= {"dtypes": {}, "next_obs": None}
        rows = rows_of(source, mapping=rlio.Mapping(**mapping))
        assert rows["obs"]["both"].tolist() == [[x, x] for x in columns["x"]]
        assert rows["actions"].tolist() == columns["a"]
        if "pos" in rows["obs"]:
            assert rows["obs"]["pos"].dtype == rows["new_obs"]["pos"].dtype == np.float32
            assert rows["obs"]["pos"].tolist() == [[x, -x] for x in columns["x"]]
            assert rows["whole"]["a"].tolist() == columns["a"]


def test_arrays_of_several_axes_are_columns(tmp_path: Path) -> None:
    image = np.arange(9 * 4, dtype=np.uint8).reshape(9, 2, 2)
    columns = {**log(), "image": image, "part/left": image[:, 0], "part/right": image[:, 1]}
    mapping = mapped(dtypes=None, columns={"obs": {"eye": "image", "left": "part/left"}, "actions": "a"})
    for rows in (
        rows_of(write_npz(columns, tmp_path / "log"), mapping=mapping),
        all_rows(rlio.from_arrays(columns, epochs=1, mapping=mapping)),
    ):
        assert rows["obs"]["eye"].tolist() == image.tolist()
        assert rows["obs"]["eye"].dtype == np.uint8
        assert rows["new_obs"]["left"].tolist()[:2] == image[1:3, 0].tolist()
        assert not rows["new_obs"]["eye"][2].any()


def test_nested_arrays_and_names_that_are_no_text() -> None:
    nested = {"obs": {"x": log()["x"]}, "actions": log()["a"]}
    mapping: dict[str, Any] = {"columns": {"obs": {"x": "obs.x"}, "actions": "actions"}, "terminated": True}
    by_id = rlio.Mapping(episode="trip", **mapping)
    with rlio.from_arrays({**nested, "trip": log()["trip"]}, epochs=1, mapping=by_id) as reader:
        assert reader.sample()["obs"]["x"].tolist() == log()["x"]
    whole = rlio.Mapping(**{**mapping, "terminated": None, "per_file": True})
    with rlio.from_arrays(nested, epochs=1, mapping=whole) as reader:
        assert reader.sample()["truncateds"].tolist() == [False] * 8 + [True]
    with pytest.raises(SchemaError):
        rlio.read(pd.DataFrame([[0, 1], [0, 2]]), mapping=MAPPING)


def test_a_dtype_that_would_change_whole_numbers_is_refused() -> None:
    frame = pd.DataFrame({**log(), "x": [0.5] * 9})
    assert (
        rows_of(frame, mapping=mapped(dtypes={"actions": "uint8", "rewards": "float32"}))["actions"].dtype
        == np.uint8
    )
    for dtypes in ({"obs": "int64"}, {"obs": "uint8"}, {"obs": "nothing"}, {"other": "int8"}):
        with pytest.raises((SchemaError, OptionError)):
            rlio.read(frame, mapping=mapped(dtypes=dtypes))
    for value, dtype in ((2**24 + 1, "float32"), (2**53 + 1, "float64"), (70_000, "float16")):
        with pytest.raises(SchemaError, match="does not hold all values"):
            rlio.read(pd.DataFrame({**log(), "r": [value] * 9}), mapping=mapped(dtypes={"rewards": dtype}))


def test_new_obs_of_another_shape_than_obs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="shapes") as caught:
        rlio.read(write_csv(log(), tmp_path / "log"), mapping=mapped(next_obs=["x"]))
    assert caught.value.column == "new_obs"


# ---- ends of episodes ----


def test_flags_alone_end_episodes_and_an_unfinished_tail_stays_unfinished(tmp_path: Path) -> None:
    columns = log((2, 3, 4))
    columns["done"] = [False, True, False, False, False, False, False, False, False]
    columns["stop"] = [False] * 4 + [True] + [False] * 4
    del columns["step"]  # It would show that an end is missing.
    for source in sources(tmp_path, columns):
        ends = rlio.Mapping(COLUMNS, terminated="done", truncated="stop", next_obs="derive")
        rows = rows_of(source, mapping=ends)
        assert rows["eps_id"].tolist() == [0] * 2 + [1] * 3 + [2] * 4
        assert np.flatnonzero(rows["terminateds"]).tolist() == [1]
        assert np.flatnonzero(rows["truncateds"]).tolist() == [4]
        assert np.flatnonzero(~rows["new_obs_valid"]).tolist() == [1, 4, 8]
        rows = rows_of(source, mapping=rlio.Mapping(COLUMNS, terminated="done"))
        assert np.flatnonzero(rows["terminateds"] | rows["truncateds"]).tolist() == [1]
        assert "new_obs" not in rows


def test_an_end_is_what_the_mapping_says(tmp_path: Path) -> None:
    frame = pd.DataFrame(log())
    last = [2, 3, 8]

    def ends(**options: Any) -> tuple[list[int], list[int]]:
        rows = rows_of(frame, mapping=rlio.Mapping(COLUMNS, episode="trip", **options))
        return np.flatnonzero(rows["terminateds"]).tolist(), np.flatnonzero(rows["truncateds"]).tolist()

    assert ends() == ([], last)
    assert ends(terminated=True) == (last, [])
    assert ends(terminated="done", truncated=False) == ([2, 8], [])
    assert ends(terminated="done", truncated=True) == ends(terminated="done") == ([2, 8], [3])
    with rlio.read(frame, mapping=rlio.Mapping(COLUMNS, episode="trip")) as reader:
        assert any("truncations" in note for note in reader.source.notes)  # type: ignore[attr-defined]


@pytest.mark.few(2)
@pytest.mark.parametrize("write", FILES)
def test_files_are_episodes_or_tables_in_pieces_as_the_user_says(
    write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        path = write(log((LENGTHS[number - 1],), number), tmp_path / f"{number}")
    folder = path.parent
    check(rows_of(folder, mapping=mapped(episode=None, per_file=True)), ids=[0, 1, 2])
    check(rows_of(folder, mapping=MAPPING))
    # Ids that begin again with each file.
    for number in (1, 2, 3):
        write(
            {**log((LENGTHS[number - 1],), number), "trip": [7] * LENGTHS[number - 1]}, tmp_path / f"{number}"
        )
    check(rows_of(folder, mapping=mapped(per_file=True)), ids=[0, 1, 2])
    with pytest.raises(SchemaError, match="per_file"):
        rlio.read(folder, mapping=MAPPING)
    # One episode over three files.
    columns = log((9,))
    for number in (0, 1, 2):
        part = {name: values[3 * number : 3 * number + 3] for name, values in columns.items()}
        write(part, tmp_path / f"{number + 1}")
    check(rows_of(folder, mapping=mapped(per_file=False)), (9,))
    with pytest.raises(SchemaError, match="per_file"):
        rlio.read(folder, mapping=MAPPING)


def test_an_id_that_comes_back_is_refused_and_several_columns_are_one_id(tmp_path: Path) -> None:
    columns = {**log(), "trip": [1, 1, 1, 2, 1, 1, 1, 1, 1], "run": [0, 0, 0, 0, 5, 5, 5, 5, 5]}
    for source in sources(tmp_path, columns):
        with pytest.raises(SchemaError, match="row 4") as caught:
            rlio.read(source, mapping=MAPPING)
        assert caught.value.column == "trip"
        check(rows_of(source, mapping=mapped(episode=["run", "trip"])), ids=[0, 1, 2])
    text = pd.DataFrame({**log(), "trip": ["a", "a", "a", "b", "c", "c", "c", "c", "c"]})
    with rlio.read(text, epochs=1, mapping=MAPPING) as reader:
        assert any("trip" in note for note in reader.source.notes)  # type: ignore[attr-defined]
        check(rlio.concat_samples(list(reader)), ids=[0, 1, 2])


def test_ids_from_2_to_the_63_stay_apart_or_are_refused(tmp_path: Path) -> None:
    large = [2**63 + 1 + e for e, steps in enumerate(LENGTHS) for _ in range(steps)]
    columns: dict[str, Any] = {**log(), "trip": np.array(large, np.uint64)}
    np.savez(tmp_path / "a.npz", **columns)
    for source in (tmp_path / "a.npz", pd.DataFrame(columns), pa.table(columns)):
        check(rows_of(source, mapping=MAPPING), ids=[0, 1, 2])
    pd.DataFrame(columns).to_csv(tmp_path / "a.csv", index=False)
    check(rows_of(tmp_path / "a.csv", mapping=MAPPING), ids=[0, 1, 2])
    # Parsed as floats, the three ids are one.
    pd.DataFrame(columns).to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    with pytest.raises(SchemaError, match="two ids may have become one") as caught:
        rlio.read(tmp_path / "a.jsonl", mapping=MAPPING)
    assert caught.value.column == "trip"
    exact = {**log(), "trip": [number - 2**62 for number in large]}  # Floats do not hold these.
    pd.DataFrame(exact).to_csv(tmp_path / "b.csv", index=False)
    check(rows_of(tmp_path / "b.csv", mapping=MAPPING), ids=[2**62 + 1, 2**62 + 2, 2**62 + 3])


def test_a_flag_in_the_middle_and_a_step_that_is_missing_are_refused(tmp_path: Path) -> None:
    columns = log()
    done, step = [False] * 9, [0, 1, 2, 0, 0, 1, 3, 4, 5]
    done[1] = True
    for source in sources(tmp_path, {**columns, "done": done}):
        with pytest.raises(SchemaError, match="row 1"):
            rlio.read(source, mapping=MAPPING)
    frame = pd.DataFrame({**columns, "step": step})
    with pytest.raises(SchemaError, match="step 3") as caught:
        rows_of(frame, mapping=mapped(columns={**COLUMNS, "t": "step"}))
    assert caught.value.column == "t"


def test_a_final_row_gives_the_last_new_obs(tmp_path: Path) -> None:
    columns = log()
    ends = [3, 4, 9]
    for name, values in columns.items():
        for number, at in enumerate(reversed(ends)):
            e = 3 - number
            final: Any = {"trip": 10 * e, "x": 100.0 * e + 50, "y": -(100 * e + 50)}.get(name)
            values.insert(at, final)
    mapping = mapped(final_row=True)
    found = [write(columns, tmp_path / "log") for write in FILES if write is not write_npz]
    for source in [*found, pl.DataFrame(columns), pa.table(columns)]:
        rows = rows_of(source, mapping=mapping)
        assert rows["obs"][:, 0].tolist() == log()["x"]
        assert rows["actions"].tolist() == log()["a"]
        assert rows["actions"].dtype == np.int64
        assert rows["new_obs"][:, 0].tolist() == [101, 102, 150, 250, 301, 302, 303, 304, 350]
        assert "new_obs_valid" not in rows
        assert rows["t"].tolist() == log()["step"]
        assert np.flatnonzero(rows["terminateds"]).tolist() == [2, 8]
        assert np.flatnonzero(rows["truncateds"]).tolist() == [3]
        # The flag may be on the final row.
    moved = pa.table({**columns, "done": [at in (3, 11) for at in range(12)]})
    assert np.flatnonzero(rows_of(moved, mapping=mapping)["terminateds"]).tolist() == [2, 8]
    with pytest.raises(OptionError):
        rlio.read(moved, mapping=mapped(episode=None, final_row=True))
    with pytest.raises(OptionError):
        mapped(final_row=True, next_obs=["x", "y"])


# ---- wrong mappings ----

WRONG: list[tuple[type[RlioError], dict[str, Any]]] = [
    (MissingColumn, {"columns": {**COLUMNS, "actions": "b"}}),
    (MissingColumn, {"episode": "journey"}),
    (MissingColumn, {"terminated": "dones"}),
    (MissingColumn, {"next_obs": ["x", "z"]}),
    (SchemaError, {"columns": {**COLUMNS, "actions": "note"}}),
    (SchemaError, {"columns": {**COLUMNS, "obs": ["x", "note"]}}),
    (SchemaError, {"terminated": "r"}),
    (SchemaError, {"terminated": "note"}),
    (OptionError, {"episode": None, "terminated": None}),
]


def test_a_wrong_mapping_shows_every_column_with_dtype_and_three_values(tmp_path: Path) -> None:
    for source in sources(tmp_path, log()):
        for error, change in WRONG:
            with pytest.raises(error) as caught:
                rlio.read(source, mapping=mapped(**change))
            text = str(caught.value)
            assert "trip (int64: 10, 10, 10)" in text, text
            assert "x (float64: 100.0, 101.0, 102.0)" in text
            assert "done (bool: False, False, True)" in text
            assert "1/1" in text
            assert not isinstance(caught.value, CorruptData)


def test_columns_of_unlike_length_and_unlike_rows_are_refused(tmp_path: Path) -> None:
    columns: dict[str, Any] = {**log(), "a": [0] * 8}
    for make in (
        lambda: rlio.from_arrays(columns, mapping=MAPPING),
        lambda: rlio.read(write_npz(columns, tmp_path / "a"), mapping=MAPPING),
    ):
        with pytest.raises(SchemaError, match="8 rows") as caught:
            make()
        assert caught.value.column == "a"
        assert "x (float64: 100.0" in str(caught.value)
    ragged = write_jsonl({**log(), "a": [[0]] * 2 + [[0, 1]] * 7}, tmp_path / "b")
    with pytest.raises(SchemaError):
        rlio.read(ragged, mapping=MAPPING)


def test_illegal_options_are_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame(log())
    for change in (
        {"columns": {**COLUMNS, "eps_id": "trip"}},
        {"columns": {**COLUMNS, "new_obs": "x"}},
        {"columns": {}},
        {"columns": {**COLUMNS, "obs": []}},
        {"columns": {**COLUMNS, "obs": 3}},
        {"columns": None},
        {"per_file": "yes"},
        {"terminated": 1},
        {"final_row": True, "next_obs": None},
        {"columns": {"actions": "a"}},
    ):
        with pytest.raises(OptionError):
            mapped(**change)
    for options in ({"format": "csv"}, {"mapping": FIELDS}, {"columns": COLUMNS}, {"epizode": "trip"}):
        with pytest.raises(OptionError):
            rlio.read(frame, **{"mapping": MAPPING, **options})
    path = write_csv(log(), tmp_path / "log")
    for options in (
        {"format": "minari"},
        {"format_options": {"split": "train"}},
        {"format_options": {"delimiter": "::"}},
    ):
        with pytest.raises(OptionError):
            rlio.read(path, mapping=MAPPING, **options)
    with pytest.raises(DataNotFound):
        rlio.read(tmp_path / "nothing.csv", mapping=MAPPING)
    write_parquet(log(), tmp_path / "log")
    with pytest.raises(UnknownLayout):
        rlio.read(tmp_path, mapping=MAPPING)
    check(rows_of(tmp_path, format="csv", mapping=MAPPING))
    with pytest.raises(OptionError):
        rlio.read(pl.LazyFrame(log()), mapping=MAPPING)


def test_the_former_keywords_of_a_mapping_raise_with_the_new_spelling(tmp_path: Path) -> None:
    path = write_csv(log(), tmp_path / "log")
    frame = pd.DataFrame(log())
    places: list[Callable[..., Any]] = [
        lambda **old: rlio.read(path, **old),
        lambda **old: rlio.read(frame, **old),
        lambda **old: rlio.read([path, path], **old),
        lambda **old: rlio.from_arrays(log(), **old),
        lambda **old: rlio.from_episodes(episodes(), **old),
        lambda **old: rlio.ReplayStore.open(path, **old),
        lambda **old: rlio.convert(path, tmp_path / "out", read_options=old),
        lambda **old: resolve_input(path, rlio.IOContext(options=old, worker_index=1, num_workers=2)),
        lambda **old: rlio.read({path: 1.0}, **old),
        lambda **old: rlio.read(tmp_path / "later", **old),
    ]
    for place in places:
        for name, value in FIELDS.items():
            with pytest.raises(OptionError, match=r"mapping=rlio\.Mapping\(columns=\{...\}"):
                place(**{name: value})
    for name, flag in (("per_file", "--per-file"), ("dtypes", "--dtype")):
        done = CliRunner().invoke(app, ["convert", str(path), "x", "--read-option", f"{name}=true"])
        assert (done.exit_code, flag in done.output) == (2, True)
    done = CliRunner().invoke(app, ["convert", str(path), "x", "--episode", "trip"])
    assert (done.exit_code, "--map" in done.output) == (2, True)


def test_columns_select_mapped_columns_by_rlios_names(tmp_path: Path) -> None:
    for source in sources(tmp_path, log()):
        rows = rows_of(
            source, mapping=mapped(columns={**COLUMNS, "extra": "note"}), columns=["extra", "rewards"]
        )
        assert set(rows) == {"extra", "rewards"}
        assert rows["extra"].tolist() == log()["note"]
        with pytest.raises(MissingColumn, match="trip"):
            rlio.read(source, mapping=MAPPING, columns=["trip"])


def test_a_mapping_is_checked_and_copied_when_it_is_made() -> None:
    columns: dict[str, Any] = {"obs": ["x", "y"], "actions": "a"}
    made = rlio.Mapping(columns, episode="trip")
    columns["obs"].append("z")
    columns["rewards"] = "r"
    assert made == rlio.Mapping({"obs": ["x", "y"], "actions": "a"}, episode=["trip"])
    with pytest.raises(AttributeError):
        made.episode = "x"  # type: ignore[misc]
    wrong: tuple[dict[str, Any], ...] = (
        {"columns": [("obs", "x")]},
        {"columns": {1: "x"}},
        {"columns": {"obs": {}}},
        {"columns": {"obs": {"a": 1}}},
        {"columns": {"obs": ["x", 1]}},
        {"columns": {"obs": "x", "obs/a": "y"}},
        {"columns": {"dones": "x", "obs": "x"}},
        {"episode": 3},
        {"episode": ["trip", 3]},
        {"truncated": 1.0},
        {"terminated": True, "truncated": "stop"},
        {"next_obs": 3},
        {"dtypes": ["obs"]},
        {"dtypes": {"obs": "flaot32"}},
        {"dtypes": {"obs": None}},
        {"dtypes": {"speed": "float32"}},
        {"final_row": 1},
        {"per_file": 0},
    )
    for fields in wrong:
        with pytest.raises(OptionError):
            mapped(**fields)


def test_a_data_set_of_rlio_needs_no_mapping(tmp_path: Path) -> None:
    rlio.convert(pd.DataFrame(log()), tmp_path / "out", mapping=MAPPING)
    for opens in (rlio.read, rlio.ReplayStore.open):
        with pytest.raises(OptionError, match="no mapping"):
            opens(tmp_path / "out", mapping=MAPPING)


def test_files_on_any_filesystem_are_read(tmp_path: Path) -> None:
    for write in FILES:
        path = write(log(), tmp_path / "log")
        Storage.open("memory://mapping").put(path.name, path.read_bytes())
        check(rows_of(f"memory://mapping/{path.name}", mapping=MAPPING))


# ---- text ----


def test_types_that_show_late_in_a_text_file_hold_for_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_table, "_BLOCK_BYTES", 40)
    columns = {**log(), "a": [0, 1, 2, 0, 0, 1, 2, 0, 0.5]}
    for write in (write_csv, write_jsonl):
        rows = rows_of(write(columns, tmp_path / "log"), mapping=MAPPING)
        assert rows["actions"].dtype == np.float64
        assert rows["actions"].tolist() == columns["a"]
        with pytest.raises((SchemaError, CorruptData), match="a"):
            rlio.read(write({**log(), "a": [0] * 8 + ["left"]}, tmp_path / "log"), mapping=MAPPING)


def test_what_is_empty_in_a_csv_is_nan_among_numbers_with_a_point_and_refused_among_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("e,x,a\n1,0.5,1\n1,,2\n2,1.5,3\n")
    rows = rows_of(path, mapping=SHORT)
    assert np.isnan(rows["obs"][:, 0]).tolist() == [False, True, False]
    path.write_text("e,x,a\n1,0.5,1\n1,1.0,\n2,1.5,3\n")
    with pytest.raises(SchemaError) as caught:
        rows_of(path, mapping=SHORT)
    assert caught.value.column == "a"
    path.write_text("e,x,a\n1,0.5,1\n,1.0,2\n2,1.5,3\n")
    with pytest.raises(SchemaError):
        rlio.read(path, mapping=SHORT)


def test_an_id_or_a_flag_that_is_empty_is_refused_whatever_its_type(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text in ("e,x,a\nu,0,1\n,1,2\nv,2,3\n", "e,x,a\n0.5,0,1\n,1,2\n1.5,2,3\n"):
        path.write_text(text)
        with pytest.raises(SchemaError, match="missing") as caught:
            rlio.read(path, mapping=SHORT)
        assert caught.value.column == "e"
    path.write_text("e,x,a\n0.0,0,1\n,1,2\n1.0,2,3\n")
    with pytest.raises(SchemaError, match="nan"):
        rlio.read(path, mapping=rlio.Mapping(SHORT.columns, terminated="e"))


def test_ids_that_int64_cannot_hold_are_numbered_and_those_that_json_rounds_are_refused(
    tmp_path: Path,
) -> None:
    columns = {"e": [2**63 + 5, 2**63 + 5, 2**63 + 6], "x": [0.0, 1.0, 2.0], "a": [0, 1, 2]}
    table = pa.table({**columns, "e": np.array(columns["e"], np.uint64)})
    assert rows_of(table, mapping=SHORT)["eps_id"].tolist() == [0, 0, 1]
    assert rows_of(write_csv(columns, tmp_path / "a"), mapping=SHORT)["eps_id"].tolist() == [0, 0, 1]
    with pytest.raises(SchemaError, match=r"2\*\*53"):
        rlio.read(write_jsonl(columns, tmp_path / "a"), mapping=SHORT)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "size", [*range(7, 60, 10), 1 << 20, *further(*(size for size in range(5, 60) if size % 10 != 7))]
)
def test_quoted_text_with_line_ends_does_not_part_rows_wherever_a_block_ends(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_table, "_BLOCK_BYTES", size)
    # The second line of each of these values looks like a row, or ends and begins further values.
    notes = ["1\n10,2", '"\n10,2', "\n\n", 'u"\n",v\n', "plain", '6" wide', "", '"""', "\r\n"]
    columns = {"trip": log()["trip"], "note": notes, **log()}
    columns["note"] = notes
    check(rows_of(write_csv(columns, tmp_path / "log"), mapping=MAPPING))
    rows = rows_of(tmp_path / "log.csv", mapping=mapped(columns={**COLUMNS, "note": "note"}))
    assert rows["note"].tolist() == notes


def test_text_of_which_rows_would_be_lost_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text in ('e,x,a,n\n1,2,3,"open\n1,3,4,b\n1,4,5,c\n', "e,x,a\r1,2,3\n1,3,4\n"):
        path.write_bytes(text.encode())
        with pytest.raises(CorruptData):
            rlio.read(path, mapping=SHORT)
    path.write_text('e,x,a,n\n1,2,3,6" wide\n1,3,4,b\n')  # Within a value, a quote is a character.
    assert len(rows_of(path, mapping=SHORT)) == 2


def test_a_file_of_lines_that_is_empty_names_no_column(tmp_path: Path) -> None:
    write_jsonl(log(), tmp_path / "b")
    for name in ("a.jsonl", "c.jsonl"):
        (tmp_path / name).write_text("")
    check(rows_of(tmp_path, mapping=MAPPING))


def test_a_parquet_file_without_columns_and_rows_changes_nothing(tmp_path: Path) -> None:
    write_parquet(log(), tmp_path / "a")
    pq.write_table(pa.table({}), tmp_path / "b.parquet")
    check(rows_of(tmp_path, mapping=MAPPING))


@pytest.mark.further
def test_damaged_files_and_those_that_ask_for_too_much_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text in ("", "\n", "e,x,a\n1,2\n", "e,x,x,a\n1,2,3,4\n", 'e,x,a\n1,"2\n3",4\n', "e,x,a\n"):
        path.write_text(text)
        with pytest.raises((CorruptData, SchemaError, DataNotFound)):
            rows_of(path, mapping=SHORT)
    path.write_text("e,x,a\n" + "1,2,3\n" * 100)
    with pytest.raises(UnsafeData):
        rlio.read(path, limits=rlio.Limits(columns=2), mapping=SHORT)
    path.write_text("e,x,a\n1,2," + "3" * 3_000_000 + "\n")
    with pytest.raises(UnsafeData):
        rlio.read(path, limits=rlio.Limits(line_bytes=1000), mapping=SHORT)
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"e": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + ', "a": 1}\n')
    with pytest.raises(UnsafeData):
        rlio.read(lines, mapping=SHORT)
    lines.write_text("".join(f'{{"k{n}": 1}}\n' for n in range(3000)))
    with pytest.raises(UnsafeData):
        rlio.read(lines, mapping=SHORT)
    for write in (write_feather, write_polars, write_stream):
        stored = write(log((3, 90)), tmp_path / "b")
        whole = stored.read_bytes()
        for size in (len(whole) // 2, 40, 7):
            stored.write_bytes(whole[:size])
            with pytest.raises(CorruptData):
                rows_of(stored, mapping=MAPPING)
        stored.write_bytes(whole)
        with pytest.raises(UnsafeData):
            rows_of(stored, limits=rlio.Limits(group_bytes=40), mapping=MAPPING)
        generator = np.random.default_rng(5)
        for _ in range(40):
            flipped = bytearray(whole)
            for at in generator.integers(0, min(len(whole), 3000), 3):
                flipped[at] ^= int(generator.integers(1, 256))
            stored.write_bytes(flipped)
            try:
                rows_of(stored, mapping=MAPPING)
            except RlioError:
                continue
    categories = tmp_path / "c.arrow"
    feather.write_feather(pa.table({"e": pa.array(["a", "b"]).dictionary_encode()}), categories)
    with pytest.raises(UnknownLayout, match=r"c\.arrow"):
        rlio.read(categories, mapping=SHORT)
    stream = write_stream(log(), tmp_path / "d")
    stream.write_bytes(stream.read_bytes() * 2)
    with pytest.raises(CorruptData, match="end of the stream"):
        rlio.read(stream, mapping=MAPPING)


# ---- without a mapping ----


def own() -> dict[str, Any]:
    columns = log()
    return {
        "obs_0": columns["x"],
        "obs_1": columns["y"],
        "actions": columns["a"],
        "rewards": columns["r"],
        "terminateds": columns["done"],
        "eps_id": columns["trip"],
        "t": columns["step"],
        "speed": columns["x"],
    }


def test_columns_by_rlios_names_need_no_mapping(tmp_path: Path) -> None:
    columns = own()
    written = [
        write(columns, tmp_path / "own") for write in (write_csv, write_npz, write_feather, write_stream)
    ]
    for source in [*written, *(make(columns) for make in FRAMES)]:
        rows = rows_of(source)
        assert rows["obs"].tolist() == [[x, -x] for x in log()["x"]]
        assert rows["eps_id"].tolist() == log()["trip"]
        assert np.flatnonzero(rows["terminateds"]).tolist() == [2, 8]
        assert np.flatnonzero(rows["truncateds"]).tolist() == [3]
        assert rows["speed"].tolist() == log()["x"]


def test_a_list_column_obs_in_an_arrow_file_is_no_file_of_rllib(tmp_path: Path) -> None:
    columns = {**own(), "obs": [[x, -x] for x in log()["x"]]}
    del columns["obs_0"], columns["obs_1"]
    assert rows_of(write_stream(columns, tmp_path / "own"))["obs"].tolist() == columns["obs"]


@pytest.mark.few(3)
@pytest.mark.parametrize("write", [write_csv, write_npz, write_stream])
@pytest.mark.parametrize("name", ["terminateds", "obs_1", "eps_id", "speed"])
@pytest.mark.each_value_once
def test_a_column_that_only_one_file_has_is_refused_by_name(
    write: Callable[[dict[str, Any], Path], Path], name: str, tmp_path: Path
) -> None:
    others = {column: values for column, values in own().items() if column != name}
    for first, second in ((own(), others), (others, own())):
        write(first, tmp_path / "a")
        write(second, tmp_path / "b")
        with pytest.raises(UnknownLayout, match=rf"only some of the files have the columns \['{name}'\]"):
            rlio.read(tmp_path)
    with pytest.raises(MissingColumn, match="only some of the files"):
        rlio.read(tmp_path, mapping=rlio.Mapping({"obs": name, "actions": "actions"}, per_file=True))


def test_episodes_of_npz_files_that_share_an_id_are_numbered(tmp_path: Path) -> None:
    columns = {**own(), "lengths": list(LENGTHS)}
    source = tmp_path / "source"
    source.mkdir()
    for name in "ab":
        np.savez(source / f"{name}.npz", **{column: np.array(value) for column, value in columns.items()})
    numbers = np.repeat(range(6), LENGTHS * 2).tolist()
    assert rows_of(source / "a.npz")["eps_id"].tolist() == log()["trip"]
    assert rows_of(source)["eps_id"].tolist() == numbers
    report = rlio.convert(source, tmp_path / "out")
    assert ["same stored id" in f.text for f in report.findings if f.kind == "note"] == [True]


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write_npz(own(), tmp_path / "own")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("speed.npy", archive.read("t.npy"))
    with pytest.raises(SchemaError, match="two arrays"):
        rlio.read(path)


def test_a_table_that_may_mean_something_else_is_refused_with_its_columns(tmp_path: Path) -> None:
    for change in (
        {"eps_id": None, "terminateds": None},
        {"eps_id": None, "episode": log()["trip"]},
        {"rewards": None, "reward": log()["r"]},
        {"obs_1": None, "obs_2": log()["y"]},
        {"obs": log()["y"]},
        {"obs_01": log()["y"]},
        {"dones": log()["done"]},
        {"state_in_0": log()["x"]},
        {"actions": None},
        {"timeouts": log()["done"]},
    ):
        columns = {name: values for name, values in {**own(), **change}.items() if values is not None}
        for write in (write_csv, write_npz):
            with pytest.raises(
                UnknownLayout, match=r"rlio\.Mapping\(columns=\{.*speed \(float64: 100\.0, 101\.0, 102\.0\)"
            ):
                rlio.read(write(columns, tmp_path / "own"))


# ---- Hugging Face ----

SAVED = Path(__file__).with_name("golden") / "formats" / "huggingface" / "saved"
LEROBOT = rlio.Mapping(
    {
        "obs": {"state": "observation.state", "image": "image"},
        "actions": "action",
        "rewards": "next.reward",
    },
    episode="episode_index",
    terminated="next.done",
    next_obs="derive",
)


def test_a_saved_folder_of_hugging_face_is_read_across_its_files() -> None:
    rows = rows_of(SAVED / "train", mapping=LEROBOT)
    assert rows["obs"]["state"].tolist() == [
        [100 * e + t, e] for e, n in enumerate(LENGTHS, 1) for t in range(n)
    ]
    assert rows["obs"]["image"][4].tolist() == [[3, 0], [0, 3]]
    assert rows["rewards"].tolist() == log()["r"]
    assert rows["eps_id"].tolist() == [1, 1, 1, 2, 3, 3, 3, 3, 3]
    assert np.flatnonzero(~rows["new_obs_valid"]).tolist() == [2, 3, 8]
    assert rows["new_obs"]["state"][4].tolist() == [301, 3]
    assert np.flatnonzero(rows["terminateds"]).tolist() == [3]
    with pytest.raises(OptionError, match="train"):
        rlio.read(SAVED, mapping=LEROBOT)
    one = rows_of(SAVED, format_options={"split": "test"}, mapping=LEROBOT)
    assert one["rewards"].tolist() == [1000, 1001]
    with pytest.raises(UnknownLayout, match=r"action \(int32: 0, 1, 2\)"):
        rlio.read(SAVED / "train")
    found = recognise(SAVED)
    assert found is not None
    assert found.format.name == "huggingface"


def test_a_folder_of_hugging_face_names_no_file_outside_and_stored_indices_are_refused(
    tmp_path: Path,
) -> None:
    shutil.copytree(SAVED / "test", tmp_path / "a")
    (tmp_path / "secret.arrow").write_bytes((SAVED / "test/data-00000-of-00001.arrow").read_bytes())
    state = json.loads((tmp_path / "a/state.json").read_text())
    for change, error in (
        ({"_data_files": [{"filename": "../secret.arrow"}]}, CorruptData),
        ({"_data_files": []}, CorruptData),
        ({"_data_files": [{"filename": "other.arrow"}]}, DataNotFound),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, UnknownLayout),
    ):
        (tmp_path / "a/state.json").write_text(json.dumps({**state, **change}))
        with pytest.raises(error):
            rlio.read(tmp_path / "a", mapping=LEROBOT)


# ---- episodes in memory, conversion ----


def episodes(**more: Any) -> list[dict[str, Any]]:
    columns = log()
    ends = np.cumsum(LENGTHS)
    return [
        {
            **{
                name: np.array(values[stop - steps : stop])
                for name, values in columns.items()
                if name != "note"
            },
            "seed": number,
            **{name: value(number, steps) for name, value in more.items()},
        }
        for number, (stop, steps) in enumerate(zip(ends, LENGTHS, strict=True), 1)
    ]


def test_episodes_from_dicts_have_the_same_rows() -> None:
    with_seed = {**COLUMNS, "seed": "seed"}
    check(all_rows(rlio.from_episodes(iter(episodes()), epochs=1, mapping=mapped(columns=with_seed))))
    rows = all_rows(rlio.from_episodes(episodes(), epochs=1, mapping=mapped(columns=with_seed, episode=None)))
    check(rows, ids=[0, 1, 2])
    assert rows["seed"].tolist() == [1] * 3 + [2] + [3] * 5
    single = [{**episode, "done": number % 2 == 1} for number, episode in enumerate(episodes(), 1)]
    check(all_rows(rlio.from_episodes(single, epochs=1, mapping=mapped(columns=with_seed))))


def test_an_observation_more_than_actions_is_the_final_one() -> None:
    def position(number: int, steps: int) -> Any:
        return {"x": 100 * number + np.arange(steps + 1.0), "y": np.zeros((steps + 1, 2))}

    found = [
        {
            "obs": position(number, steps),
            "actions": np.arange(steps),
            "rewards": [0.5] * steps,
            "terminateds": number == 2,
        }
        for number, steps in enumerate(LENGTHS, 1)
    ]
    rows = all_rows(rlio.from_episodes(found, epochs=1))
    assert rows["obs"]["x"].tolist() == log()["x"]
    assert rows["new_obs"]["x"].tolist() == [x + 1 for x in log()["x"]]
    assert "new_obs_valid" not in rows
    assert rows["actions"].tolist() == log()["step"]
    assert np.flatnonzero(rows["terminateds"]).tolist() == [3]
    found[1] = {**found[1], "obs": position(2, 0)}
    for wrong in (found, [], [1], [found[0], {"obs": [0.0]}], [{**found[0], "rewards": [0.5]}]):
        with pytest.raises((SchemaError, OptionError)):
            rlio.from_episodes(wrong)  # type: ignore[arg-type]


@pytest.mark.further
def test_everything_that_a_mapping_reads_converts(tmp_path: Path) -> None:
    made: list[tuple[Any, Any]] = [(source, MAPPING) for source in sources(tmp_path, log())]
    made += [(rlio.from_arrays(log(), mapping=MAPPING), None)]
    made += [(rlio.from_episodes(episodes(), mapping=MAPPING), None)]
    for number, (source, meaning) in enumerate(made):
        report = rlio.convert(source, tmp_path / f"out{number}", mapping=meaning, prove=True)
        assert (report.episodes, report.rows) == (3, 9)
        check(rows_of(tmp_path / f"out{number}"))
    missing = next(finding for finding in report.findings if finding.kind == "no_final_obs")
    assert missing.count == 3


def test_the_command_converts_a_table(tmp_path: Path) -> None:
    source, target = write_csv(log(), tmp_path / "log"), tmp_path / "out"
    mapped = "--map obs=x,y --map actions=a --map rewards=r --map part=x, --episode trip --terminated done"
    mapped += " --next-obs derive"
    command = ["convert", str(source), str(target), *mapped.split(), "--dtype", "obs=float32", "--prove"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = rows_of(target)
    check(rows)
    assert rows["part"].tolist() == [[x] for x in log()["x"]]
    command = ["convert", str(source), str(tmp_path / "two"), "--map", "obs", "--episode", "trip"]
    assert CliRunner().invoke(app, command).exit_code == 2


# ---- what would be wrong in silence ----


def as_column_vectors(columns: dict[str, Any], *names: str) -> dict[str, Any]:
    """The named columns in the shape (N, 1)."""
    return {name: [[v] for v in values] if name in names else values for name, values in columns.items()}


def test_rewards_flags_and_ids_of_the_shape_n_1_are_one_value_a_row(tmp_path: Path) -> None:
    for names in (("r",), ("r", "done"), ("r", "done", "trip", "x", "y", "step")):
        nested = as_column_vectors(log(), *names)
        for write in (write_jsonl, write_parquet, write_feather, write_stream):
            check(rows_of(write(nested, tmp_path / "log"), mapping=MAPPING))
        arrays = {name: np.array(values) for name, values in nested.items()}
        check(rows_of(write_npz(arrays, tmp_path / "log"), mapping=MAPPING))
        short = {**FIELDS["dtypes"], "rewards": "float64"}
        check(all_rows(rlio.from_arrays(arrays, mapping=mapped(dtypes=short), epochs=1)))


def test_rewards_of_the_shape_n_1_are_one_number_a_row_without_a_mapping(tmp_path: Path) -> None:
    columns = as_column_vectors(own(), "rewards", "terminateds", "t")
    columns["obs"] = [list(pair) for pair in zip(columns.pop("obs_0"), columns.pop("obs_1"), strict=True)]
    arrays = {name: np.array(values) for name, values in columns.items()}
    for source in (
        write_parquet(columns, tmp_path / "own"),
        write_jsonl(columns, tmp_path / "own"),
        write_stream(columns, tmp_path / "own"),
        write_npz(arrays, tmp_path / "own"),
    ):
        rows = rows_of(source)
        assert rows["rewards"].shape == rows["terminateds"].shape == rows["t"].shape == (9,), source
        assert rows["rewards"].tolist() == log()["r"]


def test_rewards_of_several_objectives_keep_their_axis(tmp_path: Path) -> None:
    rewards = [[1.0, 2.0]] * 9
    rows = rows_of(write_parquet({**log(), "r": rewards}, tmp_path / "log"), mapping=MAPPING)
    assert rows["rewards"].tolist() == rewards


@pytest.mark.few(1)
@pytest.mark.parametrize("words", [("False", "True"), ("0", "1"), ("no", "YES"), ("f", " t")])
@pytest.mark.each_value_once
def test_flags_that_are_text_are_parsed_by_their_value(words: tuple[str, str], tmp_path: Path) -> None:
    columns = {**log(), "done": [words[flag] for flag in log()["done"]]}
    for source in (*sources(tmp_path, columns), pd.DataFrame(columns).astype({"done": "category"})):
        check(rows_of(source, mapping=MAPPING))
    named = {**own(), "terminateds": columns["done"], "truncateds": [words[0]] * 9}
    named["obs"] = [[x] for x in named.pop("obs_0")]
    del named["obs_1"]
    for source in (write_parquet(named, tmp_path / "own"), write_jsonl(named, tmp_path / "own")):
        rows = rows_of(source)
        assert rows["terminateds"].dtype == np.bool_
        assert rows["terminateds"].tolist() == log()["done"]
        assert rows["dones"].tolist() == log()["done"]


@pytest.mark.few(2)
@pytest.mark.parametrize("word", ["maybe", "", "2", None])
@pytest.mark.each_value_once
def test_flags_that_are_text_of_another_meaning_are_refused(word: str | None, tmp_path: Path) -> None:
    flags = ["True" if flag else "False" for flag in log()["done"]]
    columns = {**log(), "done": [word, *flags[1:]]}
    for write in (write_parquet, write_jsonl, write_feather):
        with pytest.raises(SchemaError, match="expected true and false"):
            rows_of(write(columns, tmp_path / "log"), mapping=MAPPING)
    named = {**own(), "obs": [[x] for x in log()["x"]], "terminateds": columns["done"]}
    with pytest.raises(SchemaError, match="expected true and false"):
        rows_of(write_parquet(named, tmp_path / "own"))


def sequences(lengths: tuple[int, ...] = (7, 5, 9)) -> dict[str, Any]:
    """A table without ids, whose ends are marked in every way that other libraries have."""
    firsts = [t == 0 for steps in lengths for t in range(steps)]
    lasts = [t == steps - 1 for steps in lengths for t in range(steps)]
    x = [100.0 * e + t for e, steps in enumerate(lengths) for t in range(steps)]
    return {
        "x": x,
        "x2": [value + 1 for value in x],
        "a": [0] * len(x),
        "r": [1.0] * len(x),
        "ep": [e for e, steps in enumerate(lengths) for _ in range(steps)],
        "done": lasts,
        "episode_starts": firsts,
        "is_first": np.array(firsts, np.float32).tolist(),
        "new": [int(first) for first in firsts],
        "masks": [float(not last) for last in lasts],
        "discount": [float(not last) for last in lasts],
        "not_done": [not last for last in lasts],
    }


OTHER_FLAGS = ["episode_starts", "is_first", "new", "masks", "discount", "not_done"]


@pytest.mark.few(6)
@pytest.mark.parametrize("flag", OTHER_FLAGS)
@pytest.mark.parametrize("option", ["terminated", "truncated"])
def test_a_flag_of_first_rows_or_of_rows_that_go_on_is_refused_with_the_right_spelling(
    flag: str, option: str
) -> None:
    columns = {"obs": ["x"], "actions": "a", "rewards": "r"}
    spelling = f"starts='{flag}'" if flag in OTHER_FLAGS[:3] else f"terminated='not {flag}'"
    for more in ({"next_obs": "derive"}, {"next_obs": ["x2"]}, {}, {"episode": "ep"}, {"per_file": True}):
        fields = {**more, option: flag}
        with pytest.raises(SchemaError, match=spelling) as caught:
            rlio.read(pd.DataFrame(sequences()), mapping=rlio.Mapping(columns, **fields))
        assert caught.value.column in (flag, None)
        assert "row" in str(caught.value)


@pytest.mark.parametrize("flag", OTHER_FLAGS)
def test_a_flag_that_marks_no_end_is_seen_by_new_obs_if_the_first_row_has_none(flag: str) -> None:
    table = pd.DataFrame(sequences())
    # The first row of the table is the last of its episode, so both kinds of flag are false there.
    table = table[6 if flag in OTHER_FLAGS[3:] else 1 :].reset_index(drop=True)
    given = rlio.Mapping({"obs": ["x"], "actions": "a", "rewards": "r"}, terminated=flag, next_obs=["x2"])
    with pytest.raises(SchemaError, match="new_obs is the obs of row"):
        rlio.read(table, mapping=given)


def test_flags_of_last_rows_are_read_whatever_new_obs_and_lengths_are() -> None:
    columns = {"obs": ["x"], "actions": "a", "rewards": "r"}
    for lengths in ((7, 5, 9), (1, 3, 4), (3, 1, 1, 4), (2, 2)):
        for more in ({"next_obs": "derive"}, {"next_obs": ["x2"]}, {}):
            given = rlio.Mapping(columns, terminated="done", **more)
            rows = rows_of(pd.DataFrame(sequences(lengths)), mapping=given)
            assert np.bincount(rows["eps_id"]).tolist() == list(lengths)
    alone = sequences((1, 1, 1))
    given = rlio.Mapping(columns, terminated="done", episode="ep", next_obs=["x2"])
    assert rows_of(pd.DataFrame(alone), mapping=given)["terminateds"].all()
    # An environment whose observation never changes.
    still = pd.DataFrame({**sequences(), "x": 0.0, "x2": 0.0})
    rows = rows_of(still, mapping=rlio.Mapping(columns, terminated="done", next_obs=["x2"]))
    assert np.bincount(rows["eps_id"]).tolist() == [7, 5, 9]


def sessions() -> dict[str, Any]:
    """Two sessions with five episodes."""
    steps = [1, 2, 3, 1, 2, 1, 2, 1, 2]
    return {
        "session": ["a"] * 5 + ["b"] * 4,
        "step": steps,
        "x": [10.0 * n for n in range(9)],
        "x2": [10.0 * n + 1 for n in range(9)],
        "a": [0] * 9,
        "part": np.cumsum([0, *(np.diff(steps) < 0)]).tolist(),
        "left": [5, 4, 3, 2, 1, 4, 3, 2, 1],
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["step", "t", "Timestep", "frame_index", "step_idx"])
@pytest.mark.each_value_once
def test_a_step_number_that_begins_again_within_an_id_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.formats.tables.table.SCAN_ROWS", 2)
    table = sessions()
    table[name] = table.pop("step")
    columns = {"obs": ["x"], "actions": "a"}
    for shown in ({}, {"t": name}, {name: name}):
        if name == "t" and shown:
            continue
        for next_obs in ("derive", ["x2"], None):
            given = rlio.Mapping({**columns, **shown}, episode="session", next_obs=next_obs)
            with pytest.raises(SchemaError, match=rf"row 3: '{name}' goes back from 3 to 1.*cumsum"):
                rlio.read(write_csv(table, tmp_path / "log"), mapping=given)
    given = rlio.Mapping(columns, episode=["session", "part"], next_obs="derive")
    rows = rows_of(write_csv(table, tmp_path / "log"), mapping=given)
    assert np.bincount(rows["eps_id"]).tolist() == [3, 2, 2, 2]
    # A column that counts something else.
    given = rlio.Mapping({**columns, "phase": name}, episode="session", next_obs="derive")
    assert len(rows_of(write_csv(table, tmp_path / "log"), mapping=given)) == 9


def test_a_step_number_that_counts_down_or_is_missing_in_the_final_row_is_read() -> None:
    table = sessions()
    table["step"] = table.pop("left")
    given = rlio.Mapping({"obs": ["x"], "actions": "a"}, episode="session", next_obs="derive")
    assert len(rows_of(pd.DataFrame(table), mapping=given)) == 9
    final = {**table, "step": pd.array([0, 1, 2, 3, None, 0, 1, 2, None], dtype="Int64")}
    given = rlio.Mapping({"obs": ["x"], "actions": "a"}, episode="session", next_obs="derive", final_row=True)
    assert len(rows_of(pa.table(final), mapping=given)) == 7


def test_a_row_that_is_a_whole_episode_is_refused_with_the_right_spelling(tmp_path: Path) -> None:
    shapes = {"x": (3, 4, 2), "a": (3, 4), "r": (3, 4)}
    arrays: dict[str, Any] = {name: np.zeros(shape) for name, shape in shapes.items()}
    arrays |= {
        "ep": np.arange(3),
        "flat": np.zeros((3, 4)),
        "all": np.zeros((3, 5, 2)),
        "b": np.zeros((3, 4, 2)),
    }
    listed = {name: values.tolist() for name, values in arrays.items()}
    for source in (write_npz(arrays, tmp_path / "log"), write_parquet(listed, tmp_path / "log")):
        for columns in (
            {"obs": "x", "actions": "a", "rewards": "r"},
            {"obs": "x", "actions": "a"},
            {"obs": "all", "actions": "b", "rewards": "r"},
            {"obs": "flat", "actions": "a", "rewards": "r"},
            {"obs": {"one": "x", "two": "flat"}, "actions": "a", "rewards": "r"},
        ):
            for more in ({"per_file": True}, {"episode": "ep"}):
                with pytest.raises(SchemaError, match=r"episode of 4 steps.*per_row=True"):
                    rlio.read(source, mapping=rlio.Mapping(columns, **more))
    # Pictures, and rewards of several objectives.
    few: dict[str, Any] = {"x": np.zeros((3, 4, 4)), "a": np.zeros(3), "r": np.zeros((3, 2)), "ep": [1, 1, 1]}
    given = rlio.Mapping({"obs": "x", "actions": "a", "rewards": "r"}, episode="ep")
    assert all_rows(rlio.from_arrays(few, mapping=given, epochs=1))["obs"].shape == (3, 4, 4)


def in_partitions(
    write: Callable[[dict[str, Any], Path], Path], table: dict[str, Any], root: Path, name: str
) -> Path:
    """A folder of files; those of each value of a column are in a folder of its name, and lack the column."""
    for value in dict.fromkeys(table[name]):
        rows = [row for row, one in enumerate(table[name]) if one == value]
        folder = root / f"{name}={value}"
        folder.mkdir(parents=True)
        rest = {key: [column[row] for row in rows] for key, column in table.items() if key != name}
        write(rest, folder / "part")
    return root


@pytest.mark.few(2)
@pytest.mark.parametrize("write", [write_csv, write_jsonl, write_parquet, write_feather, write_npz])
def test_the_column_in_the_names_of_folders_is_a_column_by_a_mapping(
    write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    table = log()
    if write is write_npz:
        table.pop("note")
    root = in_partitions(write, table, tmp_path / "in", "trip")
    for source in (root, str(root / "*" / "*"), sorted(root.rglob("part*"))):
        check(rows_of(source, mapping=mapped(per_file=False)))
    only = rows_of(root, mapping=mapped(per_file=False), columns=["eps_id"])
    assert only["eps_id"].tolist() == log()["trip"]
    again = rows_of(root, mapping=mapped(columns={**COLUMNS, "trip": "trip"}, per_file=False))
    assert again["trip"].tolist() == log()["trip"]


def test_folders_may_be_nested_and_state_text_and_the_column_may_be_in_the_file_too(tmp_path: Path) -> None:
    table = {**log(), "trip": ["a b", "a b", "a b", "c", *["d/e"] * 5]}
    for n, value in enumerate(["a b", "c", "d/e"]):
        rows = [row for row, one in enumerate(table["trip"]) if one == value]
        folder = tmp_path / "in" / f"day={n}" / f"trip={value.replace(' ', '%20').replace('/', '%2F')}"
        folder.mkdir(parents=True)
        write_csv({key: [column[row] for row in rows] for key, column in log().items()}, folder / "part")
    given = mapped(columns={**COLUMNS, "day": "day"}, per_file=False)
    rows = rows_of(tmp_path / "in", mapping=given)
    check(rows)  # The files' own column.
    assert rows["day"].tolist() == [0] * 3 + [1] + [2] * 5
    for file in (tmp_path / "in").rglob("*.csv"):
        file.write_text("\n".join(line.partition(",")[2] for line in file.read_text().splitlines()))
    rows = rows_of(tmp_path / "in", mapping=given)
    assert rows["eps_id"].tolist() == [0] * 3 + [1] + [2] * 5
    assert rows["obs"].tolist() == rows_of(pd.DataFrame(log()), mapping=MAPPING)["obs"].tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("write", [write_csv, write_parquet, write_feather, write_npz])
@pytest.mark.parametrize("name", ["eps_id", "speed"])
@pytest.mark.each_value_once
def test_the_column_in_the_names_of_folders_is_a_column_without_a_mapping(
    write: Callable[[dict[str, Any], Path], Path], name: str, tmp_path: Path
) -> None:
    table = {**own(), "obs": [[x] for x in log()["x"]], "truncateds": [False] * 9}
    if write is write_csv:
        table["obs"] = log()["x"]
    del table["obs_0"], table["obs_1"]
    table["speed"] = [7] * 9
    root = in_partitions(write, table, tmp_path / "in", name)
    rows = rows_of(root)
    assert rows[name].tolist() == table[name]
    assert rows["rewards"].tolist() == table["rewards"]
    assert rows_of(root, columns=[name])[name].tolist() == table[name]
    assert rlio.convert(root, tmp_path / "out").episodes == 3


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_tables_in_such_folders_without_known_columns_are_seen_as_those_of_one_folder(
    write: Callable[[dict[str, Any], Path], Path], tmp_path: Path
) -> None:
    """It was "no files found", and "no data set", with a list of the folders."""
    root = in_partitions(
        write, {"day": [1, 1, 2], "x": [0.0, 1.0, 2.0], "reward": [1.0] * 3}, tmp_path, "day"
    )
    for opens in (rlio.read, rlio.open_dataset):
        with pytest.raises(UnknownLayout, match=r"mapping=rlio\.Mapping"):
            opens(root)


def test_messages_about_several_files_do_not_name_the_first_alone(tmp_path: Path) -> None:
    """It said that the first file has row 2, which it has not, and that the rows of all are in it."""
    table = {"e": [0, 1, 0, 2], "x": [0.0] * 4, "a": [0] * 4}
    for n in range(2):
        write_csv({name: column[2 * n : 2 * n + 2] for name, column in table.items()}, tmp_path / f"f{n}")
    columns = {"obs": ["x"], "actions": "a"}
    with pytest.raises(SchemaError, match=r"row 2: the episode 0 begins again.*f0\.csv and 1 more, column e"):
        rlio.read(tmp_path, mapping=rlio.Mapping(columns, episode="e", per_file=False))
    data = rlio.open_dataset(tmp_path, mapping=rlio.Mapping(columns, episode="e", per_file=True))
    assert data.info().uri == data.uri == f"{tmp_path / 'f0.csv'} and 1 more"


def test_a_column_of_ids_in_the_names_of_some_folders_is_refused_and_so_is_one_that_a_reader_ignores(
    tmp_path: Path,
) -> None:
    table = {**own(), "obs": [[x] for x in log()["x"]]}
    root = in_partitions(write_parquet, table, tmp_path / "in", "eps_id")
    write_parquet({key: column for key, column in table.items() if key != "eps_id"}, root / "more")
    with pytest.raises(SchemaError, match="only some of the files"):
        rlio.read(root)
    root = in_partitions(write_jsonl, table, tmp_path / "lines", "eps_id")
    with pytest.raises(UnknownLayout, match=r"eps_id=\.\.\."):
        rlio.JsonReader(root)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-" + "9" * 310, "1e999"])
def test_a_number_beyond_float64_is_refused_and_does_not_become_infinity(number: str, tmp_path: Path) -> None:
    lines = tmp_path / "log.jsonl"
    given = rlio.Mapping({"obs": ["x"], "actions": "a"}, episode="e")
    for value in (number, f"[{number}]"):
        lines.write_text(f'{{"e": 1, "a": 0, "x": {value}}}\n{{"e": 1, "a": 0, "x": {value}}}\n')
        with pytest.raises(CorruptData, match=r"float64|too big"):
            rlio.read(lines, mapping=given)
    path = tmp_path / "log.csv"
    path.write_text(f"e,a,x\n1,0,{number}\n1,0,2\n")
    with pytest.raises(CorruptData, match="float64"):
        rlio.read(path, mapping=given)
    # Infinity that is spelled, and digits that are text.
    path.write_text(f'e,a,x,note\n1,0,inf,"{number}"\n1,0,2,b\n')
    assert rows_of(path, mapping=given)["obs"][:, 0].tolist() == [np.inf, 2]
    lines.write_text('{"e": 1, "a": 0, "x": Infinity}\n{"e": 1, "a": 0, "x": 1e308}\n')
    assert rows_of(lines, mapping=given)["obs"][:, 0].tolist() == [np.inf, 1e308]


def test_flags_that_are_text_in_hdf5_are_parsed_by_their_value(tmp_path: Path) -> None:
    path = tmp_path / "log.h5"
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = np.zeros((4, 2)), np.zeros((4, 1))
        file["rewards"], file["version"], file["discrete_action"] = np.zeros((4, 1)), "1.0", False
        ends = np.array(["False", "True"] * 2, object)
        file.create_dataset("episode_terminals", data=ends, dtype=h5py.string_dtype())
        ends[1] = "no"
        file.create_dataset("terminals", data=ends, dtype=h5py.string_dtype())
    rows = rows_of(path)
    assert rows["eps_id"].tolist() == [0, 0, 1, 1]
    assert rows["terminateds"].tolist() == [False, False, False, True]
    assert rows["truncateds"].tolist() == [False, True, False, False]


# ---- lists of any length ----

RAGGED = mapped(
    columns={**COLUMNS, "tokens": "tokens", "boxes": "boxes"},
    ragged=("tokens", "boxes"),
    dtypes={"tokens": "int32"},
)


def log_of_lists(lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[Any]]:
    """A table whose row has as many tokens as its number, after first rows without any."""
    columns = log(lengths)
    rows = range(len(columns["x"]))
    columns["tokens"] = [[*range(row * (row > 2))] for row in rows]
    columns["boxes"] = [[[float(row), 0.5]] * (row % 3) for row in rows]
    return columns


@pytest.mark.few(2)
@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_feather, write_stream, None])
def test_cells_that_are_lists_of_any_length_are_rows_of_a_ragged_column(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_PIECE_ROWS", 2)
    columns = log_of_lists()
    source = columns if write is None else write(columns, tmp_path / "log")
    read = rlio.from_arrays if write is None else rlio.read
    for options in ({"shuffle": False}, {"seed": 3, "batch_size": 2, "cache": "memory"}):
        found = all_rows(read(source, mapping=RAGGED, epochs=1, **options))
        found = found[np.lexsort((found["t"], found["eps_id"]))]
        assert [row.tolist() for row in found["tokens"]] == columns["tokens"]
        assert {row.dtype.str for row in found["tokens"]} == {"<i4"}
        assert [row.tolist() for row in found["boxes"]] == columns["boxes"]
        assert {(row.dtype.str, row.shape[1:]) for row in found["boxes"]} == {("<f8", (2,))}
    out = tmp_path / "out"
    if write is not None:
        assert rlio.convert(source, out, mapping=RAGGED, prove=True).proved


def test_lists_of_any_length_are_sorted_and_shifted_with_their_rows() -> None:
    columns = log_of_lists()
    mapping = mapped(
        columns={"obs": "boxes", "actions": "a", "rewards": "r"}, ragged="boxes", dtypes={}, sort="step"
    )
    order = [2, 0, 1, 3, 8, 7, 6, 5, 4]
    shuffled = {name: [values[row] for row in order] for name, values in columns.items()}
    found = all_rows(rlio.from_arrays(shuffled, mapping=mapping, epochs=1, shuffle=False))
    assert found["rewards"].tolist() == columns["r"]
    assert [row.tolist() for row in found["obs"]] == columns["boxes"]
    after = [*columns["boxes"][1:], []]
    expected = [row if valid else [] for row, valid in zip(after, found["new_obs_valid"], strict=True)]
    assert [row.tolist() for row in found["new_obs"]] == expected
    assert found["new_obs_valid"].sum() == 6


def test_lists_of_different_lengths_say_what_to_pass(tmp_path: Path) -> None:
    for rows, way in (([1] * 8 + [2], "ragged='n'"), ([1, 2, *[1] * 7], "per_row=True.*ragged='n'")):
        columns = {**log(), "n": [[0] * n for n in rows]}
        with pytest.raises(SchemaError, match=way):
            rows_of(
                write_jsonl(columns, tmp_path / f"{rows[1]}"), mapping=mapped(columns={**COLUMNS, "n": "n"})
            )


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ([0.5] * 9, SchemaError, "found no lists"),
        ([[]] * 9, SchemaError, "no list has an item"),
        ([["a"]] * 9, SchemaError, "other items than numbers"),
        ([[[1], [1, 2]]] + [[[1]]] * 8, SchemaError, "different"),
        ([[1], None] + [[1]] * 7, SchemaError, "null"),
    ],
    ids=["numbers", "no items", "texts", "lists of lists of any length", "null"],
)
def test_ragged_refuses_cells_that_are_no_lists_of_numbers(
    values: list[Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    source = write_jsonl({**log(), "n": values}, tmp_path / "log")
    with pytest.raises(error, match=match):
        rows_of(source, mapping=mapped(columns={**COLUMNS, "n": "n"}, ragged="n"))


def test_ragged_names_columns_that_are_mapped_and_no_rows_that_are_episodes() -> None:
    with pytest.raises(OptionError, match="ragged= and per_row=True contradict"):
        rlio.Mapping(COLUMNS, per_row=True, ragged="tokens")
    with pytest.raises(OptionError, match="ragged='tokens': expected a column"):
        rlio.from_arrays(log_of_lists(), mapping=mapped(ragged="tokens"))


def test_a_state_is_refused_where_items_of_long_rows_have_changed() -> None:
    """The text of an array of over 1,000 items leaves most of them out."""
    rows = rlio.batch.object_column(np.full(2000, row) for row in range(9))
    columns = {**log(), "tokens": rows}
    mapping = mapped(columns={**COLUMNS, "tokens": "tokens"})
    state = rlio.from_arrays(columns, mapping=mapping, seed=0).state_dict()
    rows[4][1000] = 7
    with pytest.raises(rlio.errors.StateError):
        rlio.from_arrays(columns, mapping=mapping, seed=0).load_state_dict(state)
