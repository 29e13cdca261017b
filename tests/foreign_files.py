"""Files in the layouts of other libraries, written by their documented layout: two episodes of three steps.

The Minari files of `tests/golden/minari` were written by minari 0.5.4 itself (two episodes of 13 steps).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

GOLDEN_MINARI = Path(__file__).with_name("golden") / "minari"

STEPS = 3
_OBS = np.arange(8, dtype=np.float32).reshape(2, STEPS + 1)[..., None]


def _table(**columns: Any) -> pa.Table:
    return pa.table({name: np.asarray(c).tolist() for name, c in columns.items()})


def _parquet(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def _json(path: Path, *lines: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, lines)))


def _minari_metadata(root: Path, form: str) -> None:
    _json(root / "data/metadata.json", {"total_episodes": 2, "total_steps": 6, "data_format": form})


def minari_arrow(root: Path) -> None:
    """Minari, one folder an episode, with Arrow files."""
    _minari_metadata(root, "arrow")
    for episode in range(2):
        table = _minari_episode(episode)
        folder = root / f"data/{episode}"
        _minari_episode_metadata(folder, episode)
        with (
            pa.OSFile(str(folder / "part-0.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, table.schema) as file,
        ):
            file.write_table(table)


def _minari_episode_metadata(folder: Path, episode: int) -> None:
    about = {"id": episode, "total_steps": 3, "rewards_sum": 3, "rewards_mean": 1}
    _json(folder / "metadata.json", about)


def _minari_episode(episode: int) -> pa.Table:
    """N + 1 rows: all columns but the observations end in a row of padding."""
    return _table(
        observations=_OBS[episode],
        actions=[1, 1, 1, 0],
        rewards=[1.0, 1.0, 1.0, 0.0],
        terminations=[False, False, True, False],
        truncations=[False] * 4,
    )


def minari_parquet(root: Path) -> None:
    """Minari, one folder an episode, with Parquet files."""
    _minari_metadata(root, "parquet")
    for episode in range(2):
        _parquet(root / f"data/{episode}/part-0.parquet", _minari_episode(episode))
        _minari_episode_metadata(root / f"data/{episode}", episode)


def minari_hdf5(root: Path) -> None:
    """Minari, all episodes in one HDF5 file."""
    _minari_metadata(root, "hdf5")
    with h5py.File(root / "data/main_data.hdf5", "w") as file:
        for episode in range(2):
            group = file.create_group(f"episode_{episode}")
            group.attrs.update(id=episode, total_steps=3)
            group["observations"], group["actions"] = _OBS[episode], [1, 1, 1]
            group["rewards"] = np.ones(3)
            group["terminations"], group["truncations"] = [False, False, True], [False] * 3


def lerobot_3(root: Path) -> None:
    """LeRobot 3: all episodes in one Parquet file."""
    info = {"codebase_version": "v3.0", "total_episodes": 2, "total_frames": 6, "fps": 10, "features": {}}
    _json(root / "meta/info.json", info)
    _parquet(root / "data/chunk-000/file-000.parquet", _lerobot_frames(6))
    episodes = _table(episode_index=[0, 1], length=[3, 3], dataset_from_index=[0, 3])
    _parquet(root / "meta/episodes/chunk-000/file-000.parquet", episodes)


def _lerobot_frames(rows: int) -> pa.Table:
    return pa.table(
        {
            "observation.state": np.arange(rows * 2.0).reshape(rows, 2).tolist(),
            "action": [[0.5]] * rows,
            "next.reward": [1.0] * rows,
            "timestamp": (np.arange(rows) % 3 / 10).tolist(),
            "frame_index": (np.arange(rows) % 3).tolist(),
            "episode_index": (np.arange(rows) // 3).tolist(),
            "index": list(range(rows)),
            "task_index": [0] * rows,
        }
    )


def lerobot_2(root: Path) -> None:
    """LeRobot 2.1: a Parquet file an episode, and JSON lines about them."""
    info = {"codebase_version": "v2.1", "total_episodes": 1, "total_frames": 3, "fps": 10, "features": {}}
    _json(root / "meta/info.json", info)
    _json(root / "meta/episodes.jsonl", {"episode_index": 0, "tasks": ["reach"], "length": 3})
    _parquet(root / "data/chunk-000/episode_000000.parquet", _lerobot_frames(3))


def d3rlpy_1(root: Path) -> None:
    """d3rlpy 1: flat like D4RL, but with ``episode_terminals``. The first episode is cut, not terminated."""
    with h5py.File(root / "dataset.h5", "w") as file:
        file["observations"] = _OBS[:, :STEPS].reshape(6, 1)
        file["actions"], file["rewards"] = np.zeros((6, 1), np.float32), np.ones(6, np.float32)
        file["terminals"] = np.array([0, 0, 0, 0, 0, 1], np.float32)
        file["episode_terminals"] = np.array([0, 0, 1, 0, 0, 1], np.float32)
        file["discrete_action"], file["version"] = False, "1.0"


def d3rlpy_2(root: Path) -> None:
    """d3rlpy 2: a dataset for each column of each episode."""
    columns = ("observations", "actions", "rewards", "terminated")
    with h5py.File(root / "dataset.h5", "w") as file:
        file["columns"], file["num_episodes"], file["version"] = list(columns), 2, "2.1"
        for episode in range(2):
            file[f"observations_{episode}"] = _OBS[episode, :STEPS]
            file[f"actions_{episode}"], file[f"rewards_{episode}"] = np.zeros((3, 1)), np.ones((3, 1))
            file[f"terminated_{episode}"] = True


def robomimic(root: Path) -> None:
    """Robomimic: a group a demonstration."""
    with h5py.File(root / "low_dim.hdf5", "w") as file:
        data = file.create_group("data")
        data.attrs.update(total=6, env_args="{}")
        for demo in range(2):
            group = data.create_group(f"demo_{demo}")
            group["obs/state"], group["next_obs/state"] = _OBS[demo, :STEPS], _OBS[demo, 1:]
            group["actions"], group["rewards"], group["dones"] = np.zeros((3, 1)), np.ones(3), [0, 0, 1]


def vault(root: Path) -> None:
    """Flashbax's vault."""
    _json(root / "metadata.json", {"version": "1.2", "structure_shape": "{}", "structure_dtype": "{}"})


#: What no reader takes: name of the layout -> makers of it.
UNREAD: dict[str, tuple[Callable[[Path], None], ...]] = {
    "Flashbax Vault": (vault,),
}
