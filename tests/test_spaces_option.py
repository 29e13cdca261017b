"""`spaces=`: data whose files state no spaces gets them from the caller, and names it where it lacks them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest

import rlio
from rlio.errors import OptionError, SchemaError

FORMATS = Path(__file__).parent / "golden/formats"
OBS, ACTION = gym.spaces.Box(-10, 10, (2,), np.float64), gym.spaces.Discrete(2)
PAIR = (OBS, ACTION)
FRAME = pd.DataFrame(
    {"x": [0.0, 1.0, 2.0], "y": [0.0, 1.0, 2.0], "a": [0, 1, 0], "r": [1.0, 1.0, 1.0], "trip": [0, 0, 1]}
)
COLUMNS = {"obs": ["x", "y"], "actions": "a", "rewards": "r"}
MAPPING = rlio.Mapping(COLUMNS, episode="trip")


@pytest.fixture
def csv(tmp_path: Path) -> str:
    FRAME.to_csv(tmp_path / "log.csv", index=False)
    return str(tmp_path / "log.csv")


def test_the_spaces_of_a_table_raise_with_the_remedy(csv: str) -> None:
    for source in (csv, FRAME):
        with pytest.raises(SchemaError) as raised:
            _ = rlio.open_dataset(source, mapping=MAPPING).spaces
        for words in ("rlio.open_dataset(..., spaces=", "rlio.Mapping", "rlio.convert"):
            assert words in str(raised.value)
    with pytest.raises(SchemaError, match="spaces="):
        _ = rlio.open_dataset(str(FORMATS / "d3rlpy/buffer.h5")).spaces


def test_the_remedy_works_for_tables_and_mappings(csv: str) -> None:
    stated = rlio.Mapping(COLUMNS, episode="trip", spaces=PAIR)
    for source in (csv, FRAME):
        assert rlio.open_dataset(source, mapping=MAPPING, spaces=PAIR).spaces == PAIR
        assert rlio.open_dataset(source, mapping=stated).spaces == PAIR
    for reader in (
        rlio.read(csv, mapping=MAPPING, spaces=PAIR),
        rlio.read(csv, mapping=stated),
        rlio.from_arrays(dict(FRAME), mapping=stated),
        rlio.from_arrays(dict(FRAME), mapping=MAPPING, spaces=PAIR),
        rlio.from_episodes([dict(FRAME[:2]), dict(FRAME[2:])], mapping=rlio.Mapping(COLUMNS), spaces=PAIR),
    ):
        with reader:
            assert reader.spaces == PAIR  # type: ignore[attr-defined]  # An EpisodeReader.


def test_spaces_change_no_state(csv: str) -> None:
    stated = rlio.Mapping(COLUMNS, episode="trip", spaces=PAIR)
    with rlio.read(csv, mapping=MAPPING, batch_size=1) as plain, rlio.read(csv, mapping=stated) as other:
        plain.sample()
        other.load_state_dict(plain.state_dict())
        assert other.sample(1)["rewards"].tolist() == [1.0]


def own_without_spaces(folder: Path) -> Path:
    with rlio.ParquetWriter(folder) as writer:
        writer.write(
            rlio.SampleBatch(
                obs=np.zeros((3, 2)),
                actions=np.zeros(3, np.int64),
                rewards=np.ones(3),
                terminateds=[False, False, True],
                eps_id=np.zeros(3, np.int64),
                t=np.arange(3),
            )
        )
    return folder


SOURCES: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "table": lambda folder: (FRAME, {"mapping": MAPPING}),
    "reader": lambda folder: (rlio.from_arrays(dict(FRAME), mapping=MAPPING), {}),
    "data set of a table": lambda folder: (rlio.open_dataset(FRAME, mapping=MAPPING), {}),
    "own path": lambda folder: (own_without_spaces(folder / "own"), {}),
    "own data set": lambda folder: (rlio.open_dataset(own_without_spaces(folder / "own")), {}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("source", SOURCES)
def test_a_conversion_takes_spaces_and_stores_them(source: str, tmp_path: Path) -> None:
    src, options = SOURCES[source](tmp_path)
    rlio.convert(src, tmp_path / "to", spaces=PAIR, prove=True, **options)
    assert rlio.open_dataset(tmp_path / "to").spaces == PAIR
    with pytest.raises(OptionError, match="leave it out"):
        rlio.convert(tmp_path / "to", tmp_path / "again", spaces=PAIR)


@pytest.mark.few(1)
@pytest.mark.parametrize("file", ["d3rlpy/buffer.h5", "lerobot/v3.0", "tianshou/ring.hdf5"])
def test_other_libraries_files_that_state_no_spaces_take_them(file: str) -> None:
    path = str(FORMATS / file)
    with rlio.read(path, epochs=1) as first:
        batch = first.sample()

    def box(column: Any) -> Any:
        if isinstance(column, dict):
            return gym.spaces.Dict({key: box(part) for key, part in column.items()})
        return gym.spaces.Box(-1e9, 1e9, column.shape[1:], np.float64)

    pair = (box(batch["obs"]), box(batch["actions"]))
    data = rlio.open_dataset(path, spaces=pair)
    assert data.spaces == pair
    with rlio.ReplayStore.open(data) as store:
        assert len(store) == len(data)
    with rlio.read(path, spaces=pair, epochs=1) as reader:
        assert reader.spaces == pair  # type: ignore[attr-defined]


def test_rllibs_records_state_the_spaces_that_shaped_them() -> None:
    path = str(FORMATS / "rllib-2019/output-2019-10-28_00-00-00_worker-0_0.json")
    batch = rlio.read(path, epochs=1).sample()
    pair = (
        gym.spaces.Box(-100, 100, batch["obs"].shape[1:], np.float32),
        gym.spaces.Box(-100, 100, batch["actions"].shape[1:], np.float32),
    )
    assert rlio.open_dataset(path, spaces=pair).spaces == pair


def test_spaces_that_do_not_fit_are_refused(csv: str) -> None:
    wide = (gym.spaces.Box(-1, 1, (3,)), ACTION)
    with pytest.raises(SchemaError, match=r"found rows of the shapes .*\(2,\).*expected .*\(3,\)"):
        rlio.open_dataset(csv, mapping=MAPPING, spaces=wide)
    with pytest.raises(SchemaError, match="expected"):
        rlio.open_dataset(csv, mapping=MAPPING, spaces=(gym.spaces.Dict(x=OBS), ACTION))
    with pytest.raises(OptionError, match="expected \\(observation_space"):
        rlio.Mapping(COLUMNS, spaces=(OBS,))  # type: ignore[arg-type]
    stated = rlio.Mapping(COLUMNS, episode="trip", spaces=PAIR)
    with pytest.raises(OptionError, match="one option"):
        rlio.open_dataset(csv, mapping=stated, spaces=PAIR)
    minari = str(FORMATS / "minari/cart/collected-v0")
    with pytest.raises(OptionError, match="states its spaces"):
        rlio.open_dataset(minari, spaces=PAIR)
