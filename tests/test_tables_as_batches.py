"""Data frames and Arrow tables are mappings of columns: `SampleBatch` takes them, with their dtypes."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from rlio import ParquetWriter, ReplayStore, SampleBatch
from rlio.errors import RlioError, SchemaError

OBS = np.arange(6, dtype=np.float32).reshape(3, 2)
FRAMES = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)


def pandas_frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "obs": list(OBS),
            "actions": np.arange(3, dtype=np.int64),
            "rewards": np.ones(3, np.float32),
            "terminateds": [False, False, True],
            "name": ["a", "b", "c"],
        },
        index=[7, 8, 9],
    )


def polars_frame() -> pl.DataFrame:
    return pl.DataFrame(
        {
            "obs": pl.Series(OBS, dtype=pl.Array(pl.Float32, 2)),
            "actions": np.arange(3, dtype=np.int64),
            "rewards": np.ones(3, np.float32),
            "terminateds": [False, False, True],
            "name": ["a", "b", "c"],
        }
    )


def arrow_table() -> pa.Table:
    return pa.table(
        {
            "obs": pa.array(OBS.tolist(), pa.list_(pa.float32())),
            "actions": np.arange(3, dtype=np.int64),
            "rewards": np.ones(3, np.float32),
            "terminateds": [False, False, True],
            "name": ["a", "b", "c"],
        }
    )


@pytest.mark.parametrize("make", [pandas_frame, polars_frame, arrow_table])
def test_a_table_becomes_a_batch_with_its_dtypes(make: Any) -> None:
    table = make()
    for batch in (SampleBatch(table), SampleBatch({name: table[name] for name in table_names(table)})):
        assert list(batch) == ["obs", "actions", "rewards", "terminateds", "name"]
        kinds = [batch[name].dtype for name in ("obs", "actions", "rewards", "terminateds")]
        assert kinds == [np.float32, np.int64, np.float32, bool]
        assert batch["obs"].tolist() == OBS.tolist()
        assert batch["name"].tolist() == ["a", "b", "c"]
        assert batch["name"].dtype.kind in "OU"


def table_names(table: Any) -> list[str]:
    return list(table.column_names if isinstance(table, pa.Table) else table.columns)


def test_a_series_is_a_column_of_its_dtype_and_keeps_no_index() -> None:
    frame = pandas_frame()
    batch = SampleBatch(obs=frame.obs, rewards=frame.rewards, actions=frame["actions"])
    assert (batch["obs"].dtype, batch["obs"].shape) == (np.float32, (3, 2))
    assert type(batch["rewards"]) is np.ndarray
    assert batch[1:]["rewards"].tolist() == [1.0, 1.0]


def test_columns_of_nested_lists_become_one_array() -> None:
    cells = [np.array([row[0], row[1], None], object)[:2] for row in FRAMES]  # arrays within arrays
    assert SampleBatch(obs=pd.Series(cells))["obs"].shape == (3, 2, 2)
    assert SampleBatch(obs=pd.Series(cells))["obs"].dtype == np.uint8
    nested = pa.array(FRAMES.tolist(), pa.list_(pa.list_(pa.uint8())))
    assert SampleBatch(obs=nested)["obs"].tolist() == FRAMES.tolist()
    assert SampleBatch(obs=nested)["obs"].dtype == np.uint8


def test_several_columns_of_a_frame_are_one_column() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})
    assert SampleBatch(obs=frame[["x", "y"]])["obs"].tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_a_frame_and_columns_beside_it() -> None:
    batch = SampleBatch(pd.DataFrame({"rewards": [1.0, 2.0]}), t=np.arange(2))
    assert list(batch) == ["rewards", "t"]
    assert len(SampleBatch(pd.DataFrame())) == 0


def test_nulls_ragged_lists_and_names_that_are_there_twice_are_refused() -> None:
    for column in (
        pd.Series([1, None], dtype="Int64"),
        pd.Series([True, None], dtype="boolean"),
        pl.Series([1, None]),
        pa.array([1, None]),
        pa.chunked_array([[1], [None]]),
        pd.Series([np.zeros(2), np.zeros(3)]),
        pa.array([[1.0], [1.0, 2.0]]),
        pd.Series([np.zeros(2), None]),
    ):
        with pytest.raises(SchemaError) as found:
            SampleBatch(rewards=column)
        assert found.value.column == "rewards"
    twice = pd.DataFrame([[1, 2]], columns=["a", "a"])
    for table in (twice, pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), pd.DataFrame({0: [1]})):
        with pytest.raises(SchemaError):
            SampleBatch(table)


def test_nan_in_a_float_column_is_a_value() -> None:
    assert np.isnan(SampleBatch(rewards=pd.Series([np.nan, 1.0]))["rewards"][0])


def test_other_sequences_are_columns_as_before() -> None:
    assert SampleBatch(t=deque([1, 2]))["t"].tolist() == [1, 2]
    assert SampleBatch(t=range(3))["t"].dtype == np.int64
    infos = pd.Series([{"a": 1}, {"b": 2}])
    assert SampleBatch(infos=infos)["infos"].tolist() == [{"a": 1}, {"b": 2}]


def test_a_frame_where_a_batch_is_meant_is_an_error_of_ours(tmp_path: Any) -> None:
    frame: Any = pandas_frame()
    with ReplayStore(capacity=10) as store, ParquetWriter(tmp_path) as writer:
        for take in (store.append, writer.write):
            with pytest.raises(RlioError):
                take(frame)
