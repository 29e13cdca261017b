"""A reader that is dropped without `close` is freed at once: nothing of it waits for the collector."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import kinds
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_known_kinds import rows_of

import rlio
import rlio.torch
from rlio import ParquetWriter, ReplayStore, Roll, SampleBatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    t = np.arange(100)
    with ParquetWriter(folder / "set", roll=Roll(max_rows=20, max_seconds=None)) as writer:
        writer.write(SampleBatch(t=t % 10, eps_id=t // 10, obs=np.eye(100), rewards=t / 2))
    pq.write_table(pa.table({"obs": t / 7, "rewards": t / 3, "episode": t // 10}), folder / "table.parquet")
    with h5py.File(folder / "d4rl.hdf5", "w") as file:
        for name, values in kinds.d4rl_arrays(rows_of()).items():
            file[name] = values
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))


def own(folder: Path, cache: str = "none", **how: Any) -> Any:
    return rlio.read(folder / "set", **{"batch_size": 5, "shuffle": True, "seed": 0, "cache": cache, **how})


def others(folder: Path, name: str, **how: Any) -> Any:
    return rlio.read(folder / name, batch_size=5, shuffle=True, seed=0, **how)


def tensors(folder: Path) -> Any:
    return rlio.torch.ReplayDataset(folder / "set", batch_size=5, cache="memory", shuffle=True, seed=0)


TABLE: dict[str, Any] = {
    "mapping": rlio.Mapping({"obs": "obs", "rewards": "rewards"}, episode="episode"),
}

READERS: dict[str, Callable[[Path], Any]] = {
    "shuffled": own,
    "in order": lambda folder: own(folder, shuffle=False),
    "filtered": lambda folder: own(folder, filter="rewards > 10"),
    "filtered, in order": lambda folder: own(folder, filter="rewards > 10", shuffle=False),
    "skipping": lambda folder: own(folder, on_error="skip"),
    "in memory": lambda folder: own(folder, "memory"),
    "on disk": lambda folder: own(folder, "disk"),
    "uniform": lambda folder: ReplayStore.open(folder / "set").uniform(batch_size=5, seed=0),
    "prioritised": lambda folder: ReplayStore.open(folder / "set").prioritised(batch_size=5, seed=0),
    "epochs": lambda folder: ReplayStore.open(folder / "set").epochs(batch_size=5, seed=0),
    "a table": lambda folder: others(folder, "table.parquet", cache="none", **TABLE),
    "a table in memory": lambda folder: others(folder, "table.parquet", cache="memory", **TABLE),
    "episodes": lambda folder: others(folder, "d4rl.hdf5", cache="none"),
    "episodes in memory": lambda folder: others(folder, "d4rl.hdf5", cache="memory"),
    "following": lambda folder: rlio.FollowReader(folder / "set", batch_size=5, idle_timeout=0),
    "a mixture": lambda folder: rlio.MixedInput([(own(folder), 1), (own(folder, "memory"), 2)], batch_size=6),
    "a shuffle": lambda folder: rlio.ShuffledInput(own(folder), 4, seed=0),
    "asynchronous": lambda folder: rlio.AsyncInput(own(folder)),
    "tensors": lambda folder: iter(tensors(folder)),
    "a loader": lambda folder: tensors(folder).loader(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_that_is_dropped_is_freed_without_the_garbage_collector(name: str, folder: Path) -> None:
    def use() -> weakref.ref[Any]:
        reader = READERS[name](folder)
        for _ in range(3):
            batch = reader.sample() if hasattr(reader, "sample") else next(reader)
            assert len(batch)
        return weakref.ref(reader)

    use()  # What is imported, and made once, stays.
    gc.collect()
    gc.disable()
    try:
        reader = use()
        until = time.monotonic() + 60
        while reader() is not None and time.monotonic() < until:
            time.sleep(0.001)  # Its threads end.
        assert reader() is None
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("rlio.")}
        left -= {"PolicySchema", "Leaf", "ColumnSpec"}  # Of the filter's columns: they hold no rows.
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left
