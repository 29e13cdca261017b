"""LeRobot data sets whose cameras are MP4 videos, made by hand: version 2.1 (a video an episode) and 3.0."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

FPS = 10
SHAPE = (32, 48, 3)
CAMERAS = ("left", "right")


def frame_of(episode: int, t: int, camera: str, shape: tuple[int, ...] = SHAPE) -> NDArray[np.uint8]:
    """A frame that no other one is like."""
    height, width, _ = shape
    frame = np.zeros(shape, np.uint8)
    frame[..., 0] = 60 * episode % 236 + 20
    frame[:, : (t + 1) * width // 16, 1] = 220
    frame[: height // 2, :, 2] = 200 if camera == "left" else 30
    return frame


def encode(
    path: Path,
    frames: Sequence[NDArray[np.uint8]],
    *,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    fps: int = FPS,
    skip: Sequence[int] = (),
) -> None:
    """Encode a video; ``skip``: numbers of frames that it lacks, whose times stay empty."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=fps, options=options or {"g": "4", "bf": "2"})
        stream.pix_fmt = "yuv420p"
        stream.height, stream.width = frames[0].shape[:2]
        for number, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts = number
            if number not in skip:
                container.mux(stream.encode(picture))
        container.mux(stream.encode())


def decoded(path: Path) -> NDArray[np.uint8]:
    """All frames of a video, in order, without rlio."""
    import av

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def video_set(
    root: Path,
    version: str = "v3.0",
    *,
    lengths: Sequence[int] = (5, 3, 7),
    cameras: Sequence[str] = CAMERAS,
    shape: tuple[int, ...] = SHAPE,
    make: Callable[[int, int, str, tuple[int, ...]], NDArray[np.uint8]] = frame_of,
    **encoding: Any,
) -> Path:
    """A data set; ``make``: its frames; ``encoding``: see `encode`."""
    about: dict[str, Any] = {name: [] for name in ("state", "action", "frame", "episode")}
    for episode, steps in enumerate(lengths):
        about["state"] += [[float(episode), float(t)] for t in range(steps)]
        about["action"] += [[float(t), -float(t)] for t in range(steps)]
        about["frame"] += range(steps)
        about["episode"] += [episode] * steps
    table = pa.table(
        {
            "observation.state": pa.array(about["state"], pa.list_(pa.float32(), 2)),
            "action": pa.array(about["action"], pa.list_(pa.float32(), 2)),
            "next.reward": pa.array(np.array(about["frame"], np.float32)),
            "timestamp": pa.array(np.array(about["frame"], np.float32) / FPS),
            "frame_index": pa.array(about["frame"], pa.int64()),
            "episode_index": pa.array(about["episode"], pa.int64()),
            "index": pa.array(range(sum(lengths)), pa.int64()),
            "task_index": pa.array([0] * sum(lengths), pa.int64()),
        }
    )
    frames = {
        camera: [[make(episode, t, camera, shape) for t in range(n)] for episode, n in enumerate(lengths)]
        for camera in cameras
    }
    (root / "meta").mkdir(parents=True)
    layout = _write_3 if version.startswith("v3") else _write_2
    paths = layout(root, table, lengths, frames, **encoding)
    whole = {"dtype": "int64", "shape": [1], "names": None}
    info = {
        "codebase_version": version,
        "robot_type": None,
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "total_tasks": 1,
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{len(lengths)}"},
        **paths,
        "features": {
            "observation.state": {"dtype": "float32", "shape": [2], "names": None},
            **{
                f"observation.{camera}": {
                    "dtype": "video",
                    "shape": list(shape),
                    "names": ["height", "width", "channels"],
                }
                for camera in cameras
            },
            "action": {"dtype": "float32", "shape": [2], "names": None},
            "next.reward": {"dtype": "float32", "shape": [1], "names": None},
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
            **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), whole),
        },
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def _write_2(root: Path, table: Any, lengths: Sequence[int], frames: Any, **encoding: Any) -> dict[str, str]:
    (root / "data/chunk-000").mkdir(parents=True)
    start = 0
    lines = []
    for episode, steps in enumerate(lengths):
        pq.write_table(table.slice(start, steps), root / f"data/chunk-000/episode_{episode:06d}.parquet")
        start += steps
        lines.append(json.dumps({"episode_index": episode, "tasks": ["look"], "length": steps}))
        for camera, made in frames.items():
            path = root / f"videos/chunk-000/observation.{camera}/episode_{episode:06d}.mp4"
            encode(path, made[episode], **encoding)
    (root / "meta/episodes.jsonl").write_text("\n".join(lines) + "\n")
    (root / "meta/tasks.jsonl").write_text('{"task_index": 0, "task": "look"}\n')
    return {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }


def _write_3(root: Path, table: Any, lengths: Sequence[int], frames: Any, **encoding: Any) -> dict[str, str]:
    (root / "data/chunk-000").mkdir(parents=True)
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    pq.write_table(table, root / "data/chunk-000/file-000.parquet")
    rows, start = [], 0
    for episode, steps in enumerate(lengths):
        row = {
            "episode_index": episode,
            "tasks": ["look"],
            "length": steps,
            "data/chunk_index": 0,
            "data/file_index": 0,
            "dataset_from_index": start,
            "dataset_to_index": start + steps,
        }
        for camera in frames:
            key = f"videos/observation.{camera}"
            row |= {f"{key}/chunk_index": 0, f"{key}/file_index": 0}
            row |= {f"{key}/from_timestamp": start / FPS, f"{key}/to_timestamp": (start + steps) / FPS}
        rows.append(row)
        start += steps
    for camera, made in frames.items():
        path = root / f"videos/observation.{camera}/chunk-000/file-000.mp4"
        encode(path, [frame for episode in made for frame in episode], **encoding)
    pq.write_table(pa.Table.from_pylist(rows), root / "meta/episodes/chunk-000/file-000.parquet")
    tasks = pa.table({"task_index": pa.array([0], pa.int64()), "__index_level_0__": ["look"]})
    text = {"name": None, "field_name": "__index_level_0__", "pandas_type": "unicode", "numpy_type": "object"}
    pandas = {"index_columns": ["__index_level_0__"], "columns": [text], "column_indexes": []}
    tasks = tasks.replace_schema_metadata({"pandas": json.dumps({**pandas, "pandas_version": "2.0.0"})})
    pq.write_table(tasks, root / "meta/tasks.parquet")
    return {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
