"""`Dataset.info`: what a data set is and holds, of every source, compared with plain NumPy on all rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from test_html import check
from test_options_page import EPISODES, LENGTHS, RECORDED, ROWS, sources

import rlio
from rlio.look.info import Quantiles

GOLDEN = Path(__file__).with_name("golden")
TITLES = {
    "rlio (Parquet)": "rlio", "rlio (JSON)": "rlio", "minari": "Minari", "d4rl": "D4RL", "d3rlpy": "d3rlpy",
    "robomimic": "Robomimic", "table (csv)": "CSV", "table (DataFrame)": "table",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, dict[str, Any]]]:
    return sources(tmp_path_factory.mktemp("sources"))


def check_quantiles(found: Quantiles | None, values: np.ndarray) -> None:
    """Compare with NumPy over all values."""
    assert found is not None
    known = values[~np.isnan(values)]
    assert found.count == len(known)
    wanted = np.quantile(known, [0, 0.1, 0.5, 0.9, 1])
    np.testing.assert_allclose([found.min, found.q10, found.median, found.q90, found.max], wanted)
    np.testing.assert_allclose(found.mean, known.mean())


def column(info: rlio.DatasetInfo, name: str) -> Any:
    (found,) = [one for one in info.columns if one.name == name]
    return found


NAMES = [
    "rlio (Parquet)", "rlio (JSON)", "minari", "d4rl", "d3rlpy", "robomimic", "npz", "parquet", "rllib-json",
    "rllib-episodes", "table (csv)", "table (jsonl)", "table (parquet)", "table (DataFrame)",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_info_of_every_source_has_the_numbers_of_plain_numpy(
    name: str, written: dict[str, tuple[Any, dict[str, Any]]]
) -> None:
    where, options = written[name]
    data = rlio.open_dataset(where, **options)
    info = data.info()
    assert TITLES.get(name, "") in info.title
    assert (info.uri, info.rows, info.episodes) == (data.uri, ROWS, len(LENGTHS))
    check_quantiles(info.returns, np.bincount(EPISODES, RECORDED["rewards"]))
    check_quantiles(info.lengths, LENGTHS.astype(float))
    assert (info.terminated, info.truncated, info.unfinished) == (len(LENGTHS), 0, 0)
    assert len(info.writers) == (1 if name.startswith("rlio") else 0)
    assert column(info, "rewards").nan == 0
    if isinstance(where, pd.DataFrame):
        assert info.bytes is info.files is None
    else:
        files = [file for file in Path(where).rglob("*") if file.is_file()] or [Path(where)]
        assert info.files is not None
        assert 1 <= info.files <= len(files)
        assert 0 < (info.bytes or 0) <= sum(file.stat().st_size for file in files)
    assert len(repr(info).splitlines()) <= 10
    assert max(map(len, repr(info).splitlines())) <= 118
    json.dumps(info.as_dict(), allow_nan=False)
    check(info._repr_html_())

    read = data.info(ranges=True)
    for one, values in (("rewards", RECORDED["rewards"]), ("actions", RECORDED["actions"])):
        found = column(read, one)
        assert (found.min, found.max, found.nan) == (values.min(), values.max(), 0), one
    obs = column(read, "obs")
    dtype = "float64" if name == "rllib-json" else "float32"  # JSON has no dtypes.
    assert (obs.dtype, obs.shape, obs.min, obs.max) == (dtype, (2,), 0, ROWS - 1)
    again = rlio.open_dataset(where, **options).info()  # What was read is known to later calls.
    assert again == read


#: Fixtures of other libraries -> (path, options, title, version, environment).
FIXTURES: dict[str, tuple[str, dict[str, Any], str, str | None, str | None]] = {
    "minari": ("formats/minari/cart/collected-v0", {}, "Minari", "0.5.4", "CartPole-v1"),
    "minari, nested": ("formats/minari/nested/parquet-v0", {}, "Minari", "0.5.4", "CartPole-v1"),
    "minari, pictures": ("formats/minari/images/raw-v0", {}, "Minari", "0.5.4", "CartPole-v1"),
    "lerobot 2": ("formats/lerobot/v2.1", {}, "LeRobot", "v2.1", None),
    "lerobot 3": ("formats/lerobot/v3.0", {}, "LeRobot", "v3.0", None),
    "lerobot, pictures": ("formats/lerobot/v3.0-image", {}, "LeRobot", "v3.0", None),
    "rllib": ("formats/rllib/cartpole", {}, "RLlib", None, None),
    "rllib, nested": ("formats/rllib/nested", {}, "RLlib", None, None),
    "rllib of 2019": ("formats/rllib-2019/*.json", {}, "RLlib", None, None),
    "d3rlpy": ("formats/d3rlpy/buffer.h5", {}, "d3rlpy", "2.1", None),
    "tianshou": ("formats/tianshou/ring.hdf5", {}, "Tianshou", None, None),
    "tianshou, vector": ("formats/tianshou/vector.hdf5", {}, "Tianshou", None, None),
    "rlds": ("formats/rlds/counts/1.0.0", {}, "RLDS", None, None),
    "torchrl": ("formats/torchrl/ring", {}, "TorchRL", None, None),
}


@pytest.mark.parametrize("name", FIXTURES)
def test_info_of_fixtures_of_other_libraries_has_the_numbers_of_plain_numpy(name: str) -> None:
    path, options, title, version, environment = FIXTURES[name]
    with rlio.read(GOLDEN / path, epochs=1, batch_size=10**6, **options) as reader:
        rows = reader.sample()
    ids, of = np.unique(rows["eps_id"], return_inverse=True)
    info = rlio.open_dataset(GOLDEN / path, **options).info()
    assert (info.rows, info.episodes) == (len(rows), len(ids))
    check_quantiles(info.returns, np.bincount(of, rows["rewards"].astype(float)))
    check_quantiles(info.lengths, np.bincount(of).astype(float))
    last = len(rows) - 1 - np.unique(rows["eps_id"][::-1], return_index=True)[1]
    terminated = rows["terminateds"][last]
    truncated = rows["truncateds"][last] if "truncateds" in rows else np.zeros_like(terminated)
    assert info.terminated == terminated.sum()
    assert info.truncated == (truncated & ~terminated).sum()
    assert info.unfinished == (~terminated & ~truncated).sum()
    assert title in info.title
    assert info.version == version
    assert info.environments == (() if environment is None else (environment,))
    assert not info.writers
    assert {one.name.split("/")[0] for one in info.columns} >= {"actions", "rewards"}
    json.dumps(info.as_dict(), allow_nan=False)
    check(info._repr_html_())
