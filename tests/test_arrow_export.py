"""`Dataset.to_arrow` and others give the rows that readers serve, to pandas, Polars and DuckDB too."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest
from golden_data import cartpole_like, frames, sequences
from stored_batches import (
    files,
    fresh_root,
    group_bytes,
    load,
    numbered,
    put,
    remove,
    store,
    with_other_ids,
)

import rlio
from rlio import Roll
from rlio.batch.nested import leaves
from rlio.catalog.listing import HoleCheck
from rlio.errors import (
    CorruptData,
    HoleError,
    MissingColumn,
    MissingExtra,
    OptionError,
    SchemaConflict,
    SchemaError,
)
from rlio.maintenance.compact import compact
from rlio.maintenance.gc import gc
from rlio.query.filters import RowFilter
from rlio.schemas.json_values import dump_value
from rlio.storage.filesystem import Storage


def agents() -> rlio.MultiAgentBatch:
    """Two policies with the same columns; an agent dies early, another comes late."""
    left, right = (
        rlio.SampleBatch(
            obs=(t[:, None] + [sign, 0.5]).astype(np.float32),
            new_obs=(t[:, None] + [sign + 1, 1.5]).astype(np.float32),
            eps_id=np.full(len(t), 7),
            t=t,
        )
        for sign, t in ((1, np.arange(5)), (-1, np.arange(1, 7)))
    )
    return rlio.MultiAgentBatch({"left": left, "right": right}, 7)


def with_types() -> rlio.SampleBatch:
    """One column of each type that Arrow has."""
    return rlio.SampleBatch(
        half=np.arange(6, dtype=np.float16).reshape(3, 2),
        f4=np.array([0.5, np.nan, -np.inf], np.float32),
        big=np.arange(6, dtype=">f8").reshape(3, 2),
        u8=np.arange(3, dtype=np.uint64) + 2**63,
        i1=np.arange(12, dtype=np.int8).reshape(3, 2, 2),
        mask=np.arange(18).reshape(3, 2, 3) % 2 == 0,
        nothing=np.zeros((3, 2, 0), np.float32),
        none=np.zeros((3, 0, 2), np.float32),
        text=np.array(["a", "", "žluťoučký"]),
        texts=np.array(["a", "b", "c" * 100], object),
        raw=np.array([b"a", b"bc", b""]),
        day=np.array(["2026-11-22"] * 3, "datetime64[ns]"),
        infos=np.array([{}, {"a": np.float32([1])}, {"b": (1, 2)}], object),
        nested={"x": np.arange(3), "y": ({"z/~": np.zeros((3, 1))}, np.ones(3))},
    )


MADE = {"cartpole_like": cartpole_like, "frames": frames, "with_types": with_types}


def flat(batch: rlio.SampleBatch) -> dict[str, np.ndarray]:
    """The leaves of a batch by name, objects as their JSON text."""
    found = {}
    for column, value in batch.items():
        for path, array in leaves(value):
            name = "/".join(str(token).replace("~", "~0").replace("/", "~1") for token in (column, *path))
            if column == "infos":
                array = np.array([dump_value(info) for info in array], object)
            found[name] = np.asarray(array)
    return found


def many_shards(root: str, writer: int = 0, shards: int = 4) -> str:
    """Shards of ten rows each."""
    roll = Roll(max_rows=10, max_seconds=None)
    return store(numbered(10 * shards), root=root, writer_id=f"w{writer:05}-00000000", roll=roll)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MADE)
def test_pandas_gets_the_values_of_the_reader_with_their_shapes_and_dtypes(name: str) -> None:
    root = store(MADE[name]())
    expected = flat(load(root))
    frame = rlio.open_dataset(root).to_pandas()
    assert list(frame.columns) == list(expected)
    for column, values in expected.items():
        found = np.stack(frame[column]) if values.ndim > 1 and values.size else frame[column].to_numpy()
        if values.dtype.kind in "OUSM" or not values.size:
            assert len(found) == len(values)
            assert not values.size or found.tolist() == values.tolist(), column
            continue
        assert found.dtype == values.dtype.newbyteorder("="), column
        np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("name", MADE)
def test_polars_gets_the_values_of_the_reader(name: str) -> None:
    root = store(MADE[name]())
    frame = rlio.open_dataset(root).to_polars()
    for column, values in flat(load(root)).items():
        if values.dtype.kind == "M":
            assert frame[column].to_numpy().tolist() == values.tolist()
        elif values.dtype.kind == "S":
            assert frame[column].to_list() == values.tolist()
        elif values.size:
            np.testing.assert_array_equal(np.array(frame[column].to_list()), values, err_msg=column)


def test_arrow_has_types_that_other_tools_can_index() -> None:
    table = rlio.open_dataset(store(frames())).to_arrow()
    image = pa.uint8()
    for size in (4, 6, 6):
        image = pa.list_(image, size)
    assert table.schema.field("new_obs").type == image
    assert table.schema.field("actions/aim/0").type == pa.list_(pa.float64(), 1)
    data = rlio.open_dataset(store(cartpole_like()))
    steps = data.to_arrow()
    assert steps.schema.field("obs").type == pa.list_(pa.float32(), 4)
    assert steps.schema.field("infos").type == steps.schema.field("language").type == pa.string()
    batch = cartpole_like()
    assert data.to_polars()["obs"].arr.get(1).to_list() == batch["obs"][:, 1].tolist()
    assert duckdb.sql("SELECT sum(new_obs[1] - obs[1]) FROM steps").fetchall() == [
        (pytest.approx(float((batch["new_obs"] - batch["obs"])[:, 0].sum())),)
    ]


def test_no_new_obs_is_null_and_a_missing_one_is_told() -> None:
    table = rlio.open_dataset(store(cartpole_like())).to_arrow()
    assert [column.null_count for column in table.columns] == [0] * table.num_columns
    frame = rlio.open_dataset(store(cartpole_like())).to_pandas()
    assert frame["new_obs_valid"].tolist() == [True] * 59 + [False]
    assert frame["new_obs"].iloc[-1].tolist() == [0.0] * 4


def test_new_obs_is_filled_although_obs_is_not_asked_for() -> None:
    table = rlio.open_dataset(store(cartpole_like())).to_arrow(columns=["new_obs"])
    assert table.column_names == ["new_obs", "new_obs_valid"]  # The last one is missing.
    assert np.array_equal(np.array(table["new_obs"].to_pylist(), np.float32), cartpole_like()["new_obs"])


def test_rows_of_sequences_have_their_states_on_the_first_row() -> None:
    frame = rlio.open_dataset(store(sequences())).to_pandas()
    assert frame["seq_lens"].tolist() == [2, 0, 3, 0, 0, 1]
    assert frame["state_in_0"].iloc[2].tolist() == sequences()["state_in_0"][1].tolist()


def test_rows_of_several_policies_come_together_where_their_columns_agree_or_one_by_one() -> None:
    data = rlio.open_dataset(store(agents()))
    frame = data.to_pandas()
    assert frame["t"].tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6]
    for pid, batch in agents().policy_batches.items():
        for part in (frame[frame["policy_id"] == pid], data.to_pandas(policy=pid)):
            assert np.array_equal(np.stack(part["new_obs"]), batch["new_obs"])
    assert "policy_id" not in data.to_arrow(policy="left").column_names
    assert data.to_arrow(policy="left", filter="t > 2")["t"].to_pylist() == [3, 4]
    unlike = agents()
    unlike["left"]["extra"] = np.zeros(5)
    data = rlio.open_dataset(store(unlike))
    with pytest.raises(SchemaError):
        data.to_arrow()
    assert data.to_arrow(policy="left").num_rows == 5
    assert data.to_arrow(columns=["obs"]).column_names == ["policy_id", "obs"]
    with pytest.raises(OptionError):
        data.to_arrow(policy="nobody")


def two_writers() -> str:
    """A root of two writers, four row groups each; one has a column more."""
    root = fresh_root()
    with group_bytes(200):
        store(numbered(20), root=root, writer_id="w00000-00000000")
        store(numbered(20, 100, extra=np.ones(20)), root=root, writer_id="w00001-00000000")
    return root


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["to_arrow", "to_arrow_batches", "to_pandas", "to_polars"])
def test_every_form_takes_every_option(method: str) -> None:
    data = rlio.open_dataset(two_writers())

    def rows(**options: Any) -> dict[str, list[Any]]:
        found = getattr(data, method)(**options)
        table = found.read_all() if isinstance(found, pa.RecordBatchReader) else found
        return pa.table(table).to_pydict()

    assert set(rows(missing="fill")) == {*rows(missing="drop"), "extra"}
    assert rows(missing="fill")["extra"] == [0.0] * 20 + [1.0] * 20
    assert rows(columns=["t"]) == {"t": [*range(20), *range(100, 120)]}
    assert rows(columns=["t"], filter="t >= 118 or t == 3") == {"t": [3, 118, 119]}
    by_function = RowFilter.of(lambda batch: batch["t"] % 50 == 0, name="every 50th")
    assert rows(columns=["t"], filter=by_function, missing="fill") == {"t": [0, 100]}
    assert rows(columns=["t"], filter="t >= 118", writers=True)["_writer"] == ["w00001-00000000"] * 2
    for options, error in (
        ({}, SchemaConflict),
        ({"columns": ["nothing"]}, MissingColumn),
        ({"filter": "nothing > 1", "missing": "drop"}, MissingColumn),
        ({"on_error": "ignore", "missing": "drop"}, OptionError),
        ({"missing": "ignore"}, OptionError),
    ):
        with pytest.raises(error):
            rows(**options)


def test_a_table_has_the_rows_that_were_listed_whatever_became_of_their_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.catalog.listing.HOLE_CHECK", HoleCheck(seconds=0))
    many_shards(str(tmp_path))
    data = rlio.open_dataset(tmp_path)
    pinned = rlio.open_dataset(tmp_path, at={"w00000-00000000": 25})
    reader = data.to_arrow_batches(columns=["t"])
    first = reader.read_next_batch()
    many_shards(str(tmp_path), writer=1, shards=1)
    assert compact(tmp_path).shards_after == 2
    assert gc(tmp_path, grace=0).removed
    assert [*first["t"].to_pylist(), *reader.read_all()["t"].to_pylist()] == list(range(40))
    assert data.to_arrow()["t"].to_pylist() == list(range(40))
    assert pinned.to_arrow()["t"].to_pylist() == list(range(25))
    assert len(rlio.open_dataset(tmp_path).to_pandas()) == 50


def test_damaged_rows_are_an_error_of_the_table_and_of_the_stream_or_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with group_bytes(200):
        root = store(numbered(40))
    ((path, data),) = files(root).items()
    at = len(data) // 3
    put(path, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(CorruptData) as info:
        rlio.open_dataset(root).to_arrow()
    assert info.value.uri is not None
    with pytest.raises(CorruptData):
        for _ in rlio.open_dataset(root).to_arrow_batches():
            pass
    with caplog.at_level(logging.WARNING, logger="rlio"):
        left = rlio.open_dataset(root).to_arrow(on_error="skip")["t"].to_pylist()
    assert 0 < len(left) < 40
    assert any(f"{40 - len(left)} rows" in record.getMessage() for record in caplog.records)


def test_missing_rows_are_an_error_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.catalog.listing.HOLE_CHECK", HoleCheck(seconds=0))
    root = many_shards(fresh_root(), shards=3)
    remove(sorted(files(root))[1])
    data = rlio.open_dataset(root)
    with pytest.raises(HoleError):
        data.to_arrow_batches()
    assert data.to_arrow(on_error="skip")["t"].to_pylist() == [*range(10), *range(20, 30)]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the requests to stores."""
    counts: Counter[str] = Counter()
    for name in ("list", "read", "read_range"):
        real = getattr(Storage, name)

        def counted(self: Storage, *args: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
            counts[_name] += 1
            return _real(self, *args, **options)

        monkeypatch.setattr(Storage, name, counted)
    return counts


def test_only_what_is_needed_is_asked_for(requests: Counter[str]) -> None:
    """Eight small shards of one row group: a request for each, with its footer."""
    root = many_shards(fresh_root(), shards=8)
    requests.clear()
    data = rlio.open_dataset(root)
    assert requests == {"list": 2, "read": 2}, "the rows and the schemas of one moment"
    assert len(data.files()) == 8
    assert data.cut_files() == []
    requests.clear()
    reader = data.to_arrow_batches(columns=["t"])
    assert requests == {}
    reader.read_next_batch()
    assert requests == {"read_range": 1}, "memory is bounded: nothing is read ahead"
    reader.read_all()
    assert requests == {"read_range": 8}
    requests.clear()
    assert data.to_arrow(filter="t == 35").num_rows == 1
    assert requests == {"read_range": 8 + 1}, "each shard with its footer, and again for the rows that pass"
    requests.clear()
    assert data.to_arrow(filter="t >= 0").num_rows == 80
    assert requests == {"read_range": 8 + 8}, "for the filter, and for the rows"


def test_a_stream_is_of_small_batches_where_rows_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.dataset.part_reader._TABLE_BYTES", 4 * 2 * 6 * 6 * 4)
    root = store(frames())
    data = rlio.open_dataset(root)
    assert max(batch.num_rows for batch in data.to_arrow_batches()) <= 4
    found = data.to_pandas()
    assert np.array_equal(np.stack(found["obs"]), frames()["obs"])
    assert np.array_equal(np.stack(found["new_obs"]), frames()["new_obs"])


def test_duckdb_reads_a_stream() -> None:
    reader = rlio.open_dataset(store(cartpole_like(), with_other_ids(cartpole_like()))).to_arrow_batches()
    assert reader.schema.names[0] == "obs"
    assert duckdb.sql("SELECT count(*), count(new_obs), sum(t) FROM reader").fetchall() == [
        (120, 120, 2 * int(cartpole_like()["t"].sum()))
    ]


def test_a_stream_becomes_ordinary_parquet_files_of_which_each_row_has_its_new_obs(tmp_path: Path) -> None:
    for make in (cartpole_like, frames):
        data = rlio.open_dataset(store(make()))
        folder = tmp_path / make.__name__
        pyarrow.dataset.write_dataset(data.to_arrow_batches(), folder, format="parquet")
        column = pyarrow.dataset.dataset(folder).to_table()["new_obs"]
        assert column.to_pylist() == make()["new_obs"].tolist()


def test_without_rows_there_are_columns_and_without_writers_none() -> None:
    root = store(numbered(3)[0:0], numbered(3))
    data = rlio.open_dataset(root)
    assert data.to_arrow(filter="t > 5").schema == data.to_arrow().schema
    assert list(data.to_pandas(filter="t > 5").columns) == ["t", "obs"]
    with rlio.ParquetWriter(empty := fresh_root()):
        pass
    assert rlio.open_dataset(empty).to_arrow().shape == (0, 0)
    assert rlio.open_dataset(empty).to_polars().shape == (0, 0)
    assert rlio.open_dataset(empty).to_pandas().shape == (0, 0)


@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", ["M8[25s]", ">M8[h]", "M8[m]", "M8[7D]", "m8[25us]", "m8[D]", "m8[W]"])
def test_times_of_any_unit_are_the_same_times_in_a_table(dtype: str) -> None:
    times = np.array([1, 0, -7, np.iinfo(np.int64).min]).view(dtype.strip(">")).astype(dtype)
    table = rlio.open_dataset(store(rlio.SampleBatch(at=times, both=np.stack([times, times], 1)))).to_arrow()
    found = table["at"].combine_chunks()
    assert found.is_null().to_pylist() == [False, False, False, True]
    number = pa.int32() if pa.types.is_date32(found.type) else pa.int64()
    unit = "D" if number == pa.int32() else found.type.unit
    for column in (found, table["both"].combine_chunks().flatten()[::2]):
        counts = column.cast(number).drop_null().to_numpy().astype(np.int64)
        assert (counts.view(f"{times.dtype.kind}8[{unit}]") == times[:3]).all()


@pytest.mark.parametrize(("dtype", "count"), [("M8[D]", 2**32 + 5), ("M8[h]", 2**62), ("m8[D]", -(2**60))])
def test_a_time_beyond_those_of_arrow_is_refused_with_its_name(dtype: str, count: int) -> None:
    rows = np.array([[0, count]]).view(dtype)
    with pytest.raises(SchemaError, match="too far away") as info:
        rlio.open_dataset(store(rlio.SampleBatch(at=rows))).to_arrow()
    assert info.value.column == "at"


@pytest.mark.parametrize("dtype", ["M8[M]", "m8[Y]", "M8[ps]", "m8"])
def test_units_without_a_form_in_arrow_are_refused(dtype: str) -> None:
    with pytest.raises(SchemaError, match="no type"):
        rlio.open_dataset(store(rlio.SampleBatch(at=np.zeros(2, np.int64).view(dtype)))).to_arrow()


def test_what_has_no_type_in_arrow_is_refused_with_its_name() -> None:
    data = rlio.open_dataset(store(rlio.SampleBatch(z=np.zeros(3, complex), obs=np.zeros(3))))
    with pytest.raises(SchemaError) as info:
        data.to_arrow()
    assert info.value.column == "z"
    assert data.to_arrow(columns=["obs"]).num_rows == 3


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_without_the_package_the_pip_line_is_told(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rlio.open_dataset(store(numbered(3)))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=f"rlio\\[{package}\\]"):
        getattr(data, f"to_{package}")()
    assert data.to_arrow().num_rows == 3


def test_data_frames_are_of_their_libraries() -> None:
    data = rlio.open_dataset(store(numbered(3)))
    assert isinstance(data.to_pandas(), pd.DataFrame)
    assert isinstance(data.to_polars(), pl.DataFrame)
    assert isinstance(data.to_arrow(), pa.Table)


@pytest.mark.parametrize(
    ("method", "package"), [("to_pandas", "pandas"), ("to_polars", "polars"), ("to_hf", "datasets")]
)
def test_a_frame_without_its_library_is_refused_before_the_rows_are_read(
    method: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows were read first, which may take minutes."""
    data = rlio.open_dataset(store(cartpole_like()))
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(type(data), "to_arrow", lambda *_, **__: pytest.fail("the rows were read"))
    with pytest.raises(MissingExtra, match="pip install"):
        getattr(data, method)()
