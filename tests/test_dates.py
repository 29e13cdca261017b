"""Columns of dates, times and durations: what other tools read in the files, and what comes back."""

from __future__ import annotations

import datetime
import decimal
import enum
import io
import shutil
import uuid
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from golden_data import DATA_SETS
from stored_batches import assert_identical, files, fresh_root, load, store

import rlio
from rlio.batch.arrays import object_column
from rlio.errors import CorruptData, OptionError, SchemaError
from rlio.maintenance.compact import compact
from rlio.schemas.column import ColumnSpec
from rlio.schemas.number_arrays import numbers_from_arrow
from rlio.schemas.times import time_of

OLD = Path(__file__).with_name("golden") / "format-0" / "data" / "times.parquet"


class Mode(enum.Enum):
    FAST = 1


def shard_of(root: str) -> bytes:
    (data,) = (data for path, data in files(root).items() if path.endswith(".parquet"))
    return data


def test_other_tools_see_dates_times_and_null_for_nat(tmp_path: Path) -> None:
    root = fresh_root()
    store(DATA_SETS["times"](), root=root)
    (tmp_path / "times.parquet").write_bytes(shard_of(root))
    query = f"SELECT at_D, at_s, at_us, lasts, at_M FROM '{tmp_path}/times.parquet' ORDER BY t"
    kinds = [kind for _, kind, *_ in duckdb.sql(f"DESCRIBE {query}").fetchall()]
    assert kinds == ["DATE", "TIMESTAMP", "TIMESTAMP", "BIGINT", "BLOB"]
    third, fourth = duckdb.sql(query).fetchall()[2:4]
    moment = datetime.datetime(1970, 1, 1, 5, 28, 20)
    first = datetime.datetime(1970, 1, 1, microsecond=19_700)
    assert third[:4] == (datetime.date(2023, 12, 9), moment, first, 19_700)
    assert fourth[:4] == (None,) * 4


def test_other_tools_see_dates_of_python() -> None:
    root = fresh_root()
    store(DATA_SETS["dates"](), root=root)
    table = pq.read_table(io.BytesIO(shard_of(root)))
    kinds = {name: table.schema.field(name).type for name in ("moments", "utc", "days")}
    assert kinds == {"moments": pa.timestamp("us"), "utc": pa.timestamp("us", "UTC"), "days": pa.date32()}
    assert table.column("moments").to_pylist() == DATA_SETS["dates"]()["moments"].tolist()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["times", "dates"])
@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
@pytest.mark.each_value_once
def test_stores_and_rings_keep_times(name: str, cache: Any, tmp_path: Path) -> None:
    rows = DATA_SETS[name]()
    store(rows, root=str(tmp_path))
    assert_identical(load(str(tmp_path), batch_size=2, cache=cache), rows)
    with rlio.ReplayStore(capacity=len(rows)) as ring:
        ring.append(rows)
        drawn = ring.uniform(batch_size=20, seed=0).sample()
    assert_identical(drawn, rows[drawn["t"]])


def test_nat_in_rows_of_one_policy_is_not_a_missing_row() -> None:
    rows = DATA_SETS["times"]()
    other = rlio.SampleBatch(eps_id=np.full(5, 4), t=np.arange(5), obs=np.arange(5), new_obs=np.arange(1, 6))
    both = rlio.MultiAgentBatch({"a": rows, "b": other}, env_steps=5)
    root = fresh_root()
    store(both, root=root)
    assert_identical(load(root, batch_size=100), both)


def test_files_of_before_are_read_appended_to_and_compacted_beside_new_ones(tmp_path: Path) -> None:
    rows, root = DATA_SETS["times"](), tmp_path / "root"
    shutil.copytree(OLD, root)
    later = rlio.SampleBatch({**{name: rows[name] for name in rows}, "eps_id": rows["eps_id"] + 1})
    store(later, root=str(root), writer_id="w00001-00000000")
    both = rlio.concat_samples([rows, later])
    assert_identical(load(str(root), batch_size=100), both)
    compact(root, into=tmp_path / "again")
    found = load(str(tmp_path / "again"), batch_size=100)
    del found["_writer"]
    assert_identical(found, both)


@pytest.mark.parametrize("far", [np.datetime64(2**31, "D"), np.datetime64(-(2**60), "s")])
def test_a_date_too_far_for_files_is_refused(far: np.datetime64) -> None:
    with (
        rlio.ParquetWriter(fresh_root()) as writer,
        pytest.raises(SchemaError, match=r"too far from 1970.*\[column when"),
    ):
        writer.write(rlio.SampleBatch(when=np.array([far])))


def test_a_timestamp_within_a_second_is_damage_where_seconds_are_stored() -> None:
    spec = ColumnSpec.of(np.zeros(1, "M8[s]"))
    with pytest.raises(CorruptData, match="no whole number"):
        numbers_from_arrow(pa.array([1500], pa.timestamp("ms")), spec)


@pytest.mark.parametrize(
    "text", ["2026-01-31T12:00:00+02:00", "2026-01-31T12", "20260131", "x", "2026-01-31"]
)
def test_texts_of_other_times_are_no_datetimes(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a|[Ii]nvalid"):
        time_of(text, "datetime")


@pytest.mark.parametrize("column", ["at_us", "at_D", "lasts"])
def test_a_filter_refuses_times_and_says_to_use_a_function(column: str) -> None:
    root, rows = fresh_root(), DATA_SETS["times"]()
    store(rows, root=root)
    with pytest.raises(OptionError, match=rf"function, such as lambda rows: rows\['{column}'\] >"):
        load(root, filter=f"{column} > 3")
    least = rows[column][0]
    found = load(root, filter=lambda batch: batch[column] > least)
    assert found["t"].tolist() == np.flatnonzero(rows[column] > least).tolist() == [2]


def test_a_filter_refuses_dates_of_python() -> None:
    root = fresh_root()
    store(DATA_SETS["dates"](), root=root)
    with pytest.raises(OptionError, match=r"objects of time.*function"):
        load(root, filter="days > 3")


@pytest.mark.parametrize(
    "value", [decimal.Decimal("1.5"), uuid.UUID(int=1), Mode.FAST, {1}, [Mode.FAST]], ids=repr
)
@pytest.mark.parametrize("name", ["x", "infos"])
def test_a_builder_refuses_a_value_without_a_stored_form_when_it_is_added(value: Any, name: str) -> None:
    builder = rlio.BatchBuilder()
    builder.add_values(t=0, **{name: {"a": 1}})
    with pytest.raises(SchemaError, match=rf"cannot be stored.*store .*\[column {name}/a"):
        builder.add_values(t=1, **{name: {"a": value}})
    assert len(builder) == 1
    agents = rlio.MultiAgentBatchBuilder()
    with pytest.raises(SchemaError, match="cannot be stored"):
        agents.add_values("agent", "policy", t=1, **{name: value})


def test_a_builder_takes_times_and_bytes() -> None:
    builder, moment = rlio.BatchBuilder(), datetime.datetime(2026, 1, 31)
    builder.add_values(
        a=moment, b=np.datetime64(moment), c=b"\0\1", d=[1j], e=1j, infos={"day": moment.date()}
    )
    batch = builder.build_and_reset()
    root = fresh_root()
    store(batch, root=root)
    assert_identical(load(root), batch)
    assert batch["b"].dtype == "M8[us]"
    assert batch["a"].tolist() == [moment]


def test_bytes_are_binary_in_files() -> None:
    root = fresh_root()
    store(rlio.SampleBatch(a=object_column([b"\0a", b""]), b=np.array([b"a", b"bc"])), root=root)
    table = pq.read_table(io.BytesIO(shard_of(root)))
    assert table.column("a").to_pylist() == [b"\0a", b""]
    assert table.schema.field("b").type == pa.binary()
