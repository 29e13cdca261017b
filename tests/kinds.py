"""Files of kinds that rlio only reads, as other libraries write them by their documented layouts.

Rows are whole episodes in their order, with obs, new_obs, actions, rewards, terminateds and truncateds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.ipc

import rlio

Rows = rlio.SampleBatch


def episodes_of(rows: Rows) -> list[Rows]:
    """The rows of each episode."""
    cuts = np.flatnonzero(np.diff(rows["eps_id"])) + 1
    bounds = [0, *cuts.tolist(), len(rows)]
    return [rows[start:stop] for start, stop in pairwise(bounds)]


def with_final(episode: Rows) -> np.ndarray:
    """The N+1 observations."""
    found: np.ndarray = np.concatenate([episode["obs"], episode["new_obs"][-1:]])
    return found


def d4rl_arrays(rows: Rows) -> dict[str, Any]:
    """The rows under D4RL's names."""
    names = {
        "observations": "obs", "next_observations": "new_obs", "actions": "actions", "rewards": "rewards",
        "terminals": "terminateds", "timeouts": "truncateds",
    }  # fmt: skip
    return {name: rows[column] for name, column in names.items()}


def d4rl_npz(rows: Rows, path: Path) -> None:
    """NPZ with D4RL's names."""
    np.savez(path, **d4rl_arrays(rows))


def ogbench(rows: Rows, path: Path, **more: Any) -> None:
    """OGBench: a row more in each trajectory, with its final observation and an action that leads nowhere."""
    found: dict[str, list[Any]] = {"observations": [], "actions": [], "terminals": []}
    for episode in episodes_of(rows):
        found["observations"].append(with_final(episode))
        found["actions"].append(np.concatenate([episode["actions"], episode["actions"][-1:] + 99]))
        found["terminals"].append(np.arange(len(episode) + 1) == len(episode))
    arrays = {name: np.concatenate(parts) for name, parts in found.items()}
    arrays |= {"qpos": arrays["observations"] + 1, "qvel": arrays["observations"] + 2, **more}
    np.savez(path, **arrays)


def maniskill(rows: Rows, path: Path) -> None:
    """ManiSkill: a group a trajectory, and the JSON file beside it."""
    about: list[dict[str, Any]] = []
    with h5py.File(path, "w") as file:
        for number, episode in enumerate(episodes_of(rows)):
            group = file.create_group(f"traj_{number}", track_order=True)
            group["obs"], group["env_states/actors/cube"] = with_final(episode), with_final(episode) + 7
            group["actions"], group["rewards"] = episode["actions"], episode["rewards"]
            group["terminated"], group["truncated"] = episode["terminateds"], episode["truncateds"]
            group["success"] = episode["terminateds"]
            about.append({"episode_id": number, "elapsed_steps": len(episode), "episode_seed": number})
    info = {"env_info": {"env_id": "PickCube-v1", "env_kwargs": {}}, "episodes": about}
    path.with_suffix(".json").write_text(json.dumps(info))


def aloha(rows: Rows, path: Path) -> None:
    """ALOHA: a folder with a file an episode."""
    path.mkdir()
    for number, episode in enumerate(episodes_of(rows)):
        with h5py.File(path / f"episode_{number}.hdf5", "w") as file:
            file.attrs["sim"] = True
            file["observations/qpos"], file["observations/qvel"] = episode["obs"], episode["obs"] + 1
            pictures = np.zeros((len(episode), 4, 5, 3), np.uint8) + (np.arange(len(episode)) % 256)[
                :, None, None, None
            ].astype(np.uint8)
            file.create_dataset("observations/images/top", data=pictures, chunks=(1, 4, 5, 3))
            file["action"] = np.asarray(episode["actions"])[:, None] + np.zeros((1, 14), np.float32)


def zarr_buffer(rows: Rows, path: Path, *, version: int = 2, **more: Any) -> None:
    """A replay buffer of Diffusion Policy; version 3 of zarr with shards."""
    import zarr  # Most test processes need it never.

    root = zarr.open_group(path, mode="w", zarr_format=version)
    data, meta = root.create_group("data"), root.create_group("meta")
    arrays = {"state": rows["obs"], "action": rows["actions"], "reward": rows["rewards"], **more}
    for name, values in arrays.items():
        shards: Any = {"shards": (6, *values.shape[1:])} if version == 3 else {}
        data.create_array(name, data=np.asarray(values), chunks=(3, *values.shape[1:]), **shards)
    ends = np.cumsum([len(episode) for episode in episodes_of(rows)])
    meta.create_array("episode_ends", data=ends, chunks=(len(ends),))


def imitation(rows: Rows, path: Path) -> None:
    """imitation: a folder of `save_to_disk`, one row an episode, whose infos state time limits."""
    episodes = episodes_of(rows)
    table = pa.table(
        {
            "obs": [with_final(episode).tolist() for episode in episodes],
            "acts": [episode["actions"].tolist() for episode in episodes],
            "infos": [
                [json.dumps({"TimeLimit.truncated": True} if cut else {}) for cut in episode["truncateds"]]
                for episode in episodes
            ],
            "terminal": [bool(one["terminateds"][-1] or one["truncateds"][-1]) for one in episodes],
            "rews": [episode["rewards"].tolist() for episode in episodes],
        }
    )
    path.mkdir()
    for number in range(2):  # Two files, of several record batches.
        half = table.slice(number * (len(table) // 2), len(table) // 2 + number)
        with pa.ipc.new_stream(path / f"data-{number:05}-of-00002.arrow", table.schema) as file:
            file.write_table(half, max_chunksize=2)
    files = [{"filename": f"data-{number:05}-of-00002.arrow"} for number in range(2)]
    (path / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "0"}))
    features = {key: {"_type": "List"} for key in table.schema.names}
    about = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    (path / "dataset_info.json").write_text(json.dumps(about))


#: Name of the format -> how its files are made, and their ending.
KINDS: dict[str, tuple[Callable[[Rows, Path], None], str]] = {
    "d4rl-npz": (d4rl_npz, ".npz"),
    "ogbench": (ogbench, ".npz"),
    "maniskill": (maniskill, ".h5"),
    "aloha": (aloha, ""),
    "zarr": (zarr_buffer, ".zarr"),
    "imitation": (imitation, ""),
}
#: Those that have rewards and all observations, and so give the rows that were written.
WHOLE = ("d4rl-npz", "maniskill", "imitation")


def made(name: str, rows: Rows, folder: Path) -> Path:
    """The files of a kind, in a folder."""
    make, ending = KINDS[name]
    path = folder / f"{name}{ending}"
    make(rows, path)
    return path
