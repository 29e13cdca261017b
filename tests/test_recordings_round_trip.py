"""RLlib's real recordings become data sets of ours and come back equal in every column and dtype."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlio

FILES = ["cartpole/small.json", "cartpole/large.json", "pendulum/small.json", "pendulum/large.json"]
WRITERS: dict[str, Callable[[Path], rlio.OutputWriter]] = {
    "parquet": rlio.ParquetWriter,
    "parquet, shards of 100 rows": lambda root: rlio.ParquetWriter(root, roll=rlio.Roll(max_rows=100)),
    "json": rlio.JsonWriter,
    "json, zstd, packed obs": lambda root: rlio.JsonWriter(
        root, compression="zstd", compress_columns=("obs", "new_obs")
    ),
}


def copied(source: rlio.InputReader, writer: rlio.OutputWriter) -> list[Any]:
    """Write everything that ``source`` serves, and return it."""
    with rlio.RecordingInput(source, writer) as recording:
        return list(recording)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.each_value_once
def test_json_recordings_come_back_equal(
    recordings: Path, tmp_path: Path, file: str, make: Callable[[Path], rlio.OutputWriter]
) -> None:
    served = copied(rlio.JsonReader(recordings / file, epochs=1), make(tmp_path / "copy"))
    original = rlio.concat_samples(served)
    with rlio.DatasetReader(tmp_path / "copy", batch_size=len(original), epochs=1) as reader:
        (copy,) = reader
    assert copy.equals(original), f"{copy} is not {original}"


@pytest.mark.few(2)
@pytest.mark.parametrize("make", WRITERS.values(), ids=WRITERS)
def test_the_parquet_recording_comes_back_equal(
    recordings: Path, tmp_path: Path, make: Callable[[Path], rlio.OutputWriter]
) -> None:
    source = rlio.ForeignParquetReader(recordings / "parquet" / "cartpole-v1_large", epochs=1)
    original = rlio.concat_samples(copied(source, make(tmp_path / "copy")))
    with rlio.DatasetReader(tmp_path / "copy", batch_size=len(original), epochs=1) as reader:
        (copy,) = reader
    assert copy.equals(original)
