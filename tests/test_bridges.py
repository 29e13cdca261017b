"""Trajectories of a batch, and bridges to libraries that are not installed."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import rlio
from rlio import bridges
from rlio.errors import MissingColumn, MissingExtra, OptionError, SchemaError


def rows(**columns) -> rlio.SampleBatch:
    return rlio.SampleBatch({"obs": np.arange(4.0), "t": [0, 1, 0, 1], "eps_id": [1, 1, 2, 2], **columns})


def test_a_trajectory_ends_at_a_flag_another_episode_or_a_gap() -> None:
    assert bridges.trajectories(rows()).stops.tolist() == [2, 4]
    ended = rows(t=[0, 1, 5, 6], eps_id=[1, 1, 1, 1], terminateds=[False, False, False, True])
    assert bridges.trajectories(ended).stops.tolist() == [2, 4]
    assert bridges.trajectories(ended).terminated.tolist() == [False, True]


def test_rows_whose_order_is_not_proven_are_refused() -> None:
    with pytest.raises(MissingColumn):
        bridges.trajectories(rlio.SampleBatch(obs=np.arange(4.0)))
    with pytest.raises(SchemaError):
        bridges.trajectories(rlio.SampleBatch(obs=np.arange(4.0), new_obs=np.arange(4.0)))
    with pytest.raises(SchemaError):
        bridges.trajectories(rows(t=[0, 0, 1, 1], eps_id=[1, 2, 1, 2]))


@pytest.mark.parametrize("module", ["d3rlpy", "tensordict", "stable_baselines3", "datasets", "minari"])
def test_an_absent_library_is_named_with_its_pip_line(
    module: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with rlio.ParquetWriter(tmp_path / "root") as writer:
        writer.write(rows())
    calls = {
        "d3rlpy": lambda: bridges.to_d3rlpy(rows()),
        "tensordict": lambda: rlio.torch.to_tensordict(rows()),
        "stable_baselines3": lambda: bridges.fill_sb3(None, rows()),
        "datasets": lambda: rlio.open_dataset(tmp_path / "root").to_hf(),
        "minari": lambda: bridges.to_minari(rlio.open_dataset(tmp_path / "root")),
    }
    with pytest.raises(MissingExtra, match="pip install 'rlio"):
        calls[module]()


def test_a_live_store_is_no_storage_for_torchrl() -> None:
    with pytest.raises(OptionError):
        bridges.torchrl_storage(rlio.ReplayStore(capacity=3))
