"""Real recordings of RLlib's read whole: rows, episodes, first and last row as the files themselves say."""

import base64
import json
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pyarrow.parquet as pq
import pytest

from rlio.batch import SampleBatch, concat_samples
from rlio.errors import SchemaError
from rlio.readers.foreign_parquet import ForeignParquetReader
from rlio.readers.json_reader import JsonReader

DATA = Path(__file__).resolve().parents[1].parent / "shared/data/rllib"
JSON_FILES = ["cartpole/small.json", "cartpole/large.json", "pendulum/small.json", "pendulum/large.json"]
PARQUET = DATA / "parquet/cartpole-v1_large"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the recordings are not in this checkout")


def own_unpack(text: str) -> np.ndarray:
    """The array in a packed column of these files: float32, its bytes right behind their opcode."""
    stream = lz4.frame.decompress(base64.b64decode(text))
    at = stream.index(b"(\x96") + 2
    size = int.from_bytes(stream[at : at + 8], "little")
    assert b"\x8c\x02f4" in stream
    return np.frombuffer(stream[at + 8 : at + 8 + size], np.float32).reshape(-1, 3)


def own_rows(path: Path) -> dict[str, list[Any]]:
    """Column -> its rows, by the JSON module alone."""
    columns: dict[str, list[Any]] = {}
    for line in path.read_text().splitlines():
        for name, value in json.loads(line).items():
            if name != "type":
                columns.setdefault(name, []).extend(
                    own_unpack(value).tolist() if isinstance(value, str) else value
                )
    return columns


def assert_rows(batch: SampleBatch, expected: dict[str, list[Any]]) -> None:
    renamed = {("terminateds" if name == "dones" else name): rows for name, rows in expected.items()}
    if "infos" in expected:
        renamed["truncateds"] = [False] * len(expected["dones"])
    assert set(batch) == set(renamed)
    for name, rows in renamed.items():
        assert len(batch[name]) == len(rows)
        assert batch[name][0].tolist() == rows[0] if name != "infos" else batch[name][0] == rows[0]
        assert batch[name].tolist() == rows
    episodes = len(set(renamed["eps_id"]))
    assert len({tuple(part["eps_id"].tolist()[:1]) for part in batch.split_by_episode()}) == episodes


ROWS = {
    "cartpole/small.json": (3, 102),
    "cartpole/large.json": (20, 4137),
    "pendulum/small.json": (40, 40),
    "pendulum/large.json": (10, 6000),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", JSON_FILES)
def test_a_json_recording_is_read_whole(name: str) -> None:
    with JsonReader(DATA / name, epochs=1) as reader:
        batches = list(reader)
    assert (len(batches), sum(map(len, batches))) == ROWS[name]
    assert_rows(concat_samples(batches), own_rows(DATA / name))
    assert reader.skipped == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("name", JSON_FILES)
def test_batches_of_any_size_hold_the_same_rows(name: str) -> None:
    expected = own_rows(DATA / name)
    with JsonReader(DATA / name, epochs=1, batch_size=97) as reader:
        batches = list(reader)
    assert {len(batch) for batch in batches[:-1]} <= {97}
    assert_rows(concat_samples(batches), expected)


def test_two_records_of_600_rows_make_a_batch_of_1200() -> None:
    with JsonReader(DATA / "pendulum/large.json", batch_size=1200) as reader:
        assert len(reader.next()) == 1200


def test_packed_and_plain_columns_keep_their_dtypes() -> None:
    with JsonReader(DATA / "pendulum/large.json") as reader:
        batch = reader.sample()
    assert batch["obs"].dtype == batch["new_obs"].dtype == np.float32
    assert batch["actions"].dtype == np.float64
    assert batch["terminateds"].dtype == bool
    assert batch["eps_id"].dtype == np.int64


def test_spaces_give_the_dtypes_that_json_lost() -> None:
    import gymnasium as gym

    spaces = (gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2))
    with JsonReader(DATA / "cartpole/large.json", spaces=spaces) as reader:
        batch = reader.sample()
    assert batch["obs"].dtype == np.float32
    assert batch["actions"].dtype == np.int64


def test_actions_outside_of_their_space_are_kept() -> None:
    with JsonReader(DATA / "pendulum/large.json", epochs=1, columns=["actions"]) as reader:
        actions = np.concatenate([batch["actions"] for batch in reader])
    assert np.abs(actions).max() > 2.0


def test_a_parquet_recording_is_read_whole() -> None:
    tables = [pq.read_table(path) for path in sorted(PARQUET.glob("*.parquet"))]
    expected: dict[str, list[Any]] = {}
    for table in tables:
        for name, rows in table.to_pydict().items():
            expected.setdefault(name, []).extend(rows)
    with ForeignParquetReader(PARQUET, epochs=1) as reader:
        batches = list(reader)
    assert [len(batch) for batch in batches] == [sum(table.num_rows for table in tables)] == [126]
    assert_rows(concat_samples(batches), expected)
    assert batches[0]["obs"].shape == (126, 4)


def test_a_folder_of_unlike_recordings_is_an_error_that_names_the_file() -> None:
    files = [DATA / "cartpole/large.json", DATA / "pendulum/large.json"]
    with pytest.raises(SchemaError) as caught:
        JsonReader(files, epochs=1)
    assert caught.value.uri == str(files[1])
    with JsonReader(files, epochs=1, columns=["rewards", "eps_id", "dones"]) as reader:
        assert sum(map(len, reader)) == 4137 + 6000
