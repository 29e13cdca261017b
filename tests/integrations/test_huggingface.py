"""rlio reads a `datasets.Dataset`, in memory, chosen from and saved, as the data set itself gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

MAPPING = rlio.Mapping(
    {"obs": ["x", "info.y"], "actions": "a", "rewards": "r"}, episode="trip", next_obs="derive"
)


def made(rows: int = 50_000) -> Any:
    number = np.arange(rows)
    return datasets.Dataset.from_dict(
        {
            "trip": number // 7,
            "x": number.astype(np.float64),
            "info": [{"y": -float(n)} for n in number],
            "a": number % 3,
            "r": number / 2,
            "done": number % 7 == 6,
        }
    )


def rows_of(source: Any, **options: Any) -> rlio.SampleBatch:
    with rlio.read(source, epochs=1, **{"mapping": MAPPING, **options}) as reader:
        return rlio.concat_samples(list(reader))


def test_rows_of_a_data_set_in_memory_filtered_and_saved_are_its_rows(tmp_path: Path) -> None:
    whole = made()
    some = whole.filter(lambda row: row["trip"] % 2 == 0)
    some.save_to_disk(tmp_path / "saved", num_shards=3)
    for source, expected in ((whole, whole), (some, some), (tmp_path / "saved", some)):
        rows = rows_of(source)
        assert rows["obs"][:, 0].tolist() == list(expected["x"])
        assert rows["obs"][:, 1].tolist() == [-x for x in expected["x"]]
        assert rows["eps_id"].tolist() == list(expected["trip"])
        valid = rows["new_obs_valid"]
        assert (rows["new_obs"][valid] == rows["obs"][valid] + [1, -1]).all()
    report = rlio.convert(some, tmp_path / "out", mapping=MAPPING, prove=True)
    assert report.rows == len(some)


def test_data_sets_without_rows_to_choose_from_are_refused() -> None:
    whole = made(70)
    for source in (datasets.DatasetDict({"a": whole, "b": whole}), whole.to_iterable_dataset()):
        with pytest.raises(rlio.errors.OptionError):
            rows_of(source)
    with pytest.raises(rlio.errors.MissingColumn, match=r"a \(int64: 0, 1, 2\)"):
        rows_of(whole, mapping=rlio.Mapping({"obs": "z"}, episode="trip"))
