"""Pictures: bytes and speed of encoded columns, beside raw frames and LeRobot's own loader.

    python -m benchmarks.pictures [--loader]

``--loader`` needs LeRobot (tests/integrations/requirements-lerobot.txt). Processor time of one process, the
median of five passes, each of which takes its turn with the others.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rlio

EPISODES, STEPS = 10, 60
SHAPES = ((84, 84, 3), (240, 320, 3))
PASSES = 5


def frames_of(episode: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """A square that moves over a room, with the noise of a sensor."""
    height, width, _ = shape
    rng = np.random.default_rng(episode)
    y, x = np.mgrid[:height, :width]
    room = np.stack([np.sin(x / 37 + k) + np.cos(y / 29 + k) for k in range(3)], -1) * 50 + 120
    frames = np.repeat(room[None], STEPS + 1, 0)
    for step, frame in enumerate(frames):
        at = (step * 3) % (width - 16)
        frame[height // 2 : height // 2 + 16, at : at + 16] = 240
    noise = rng.normal(0, 1.5, (STEPS + 1, height, width, 1))
    return np.clip(frames + noise, 0, 255).astype(np.uint8)


def batches(shape: tuple[int, ...]) -> list[rlio.SampleBatch]:
    """A batch an episode."""
    found = []
    for episode in range(EPISODES):
        frames = frames_of(episode, shape)
        state = np.random.default_rng(episode).normal(size=(STEPS + 1, 7)).astype(np.float32)
        found.append(
            rlio.SampleBatch(
                obs={"camera": frames[:-1], "joints": state[:-1]},
                new_obs={"camera": frames[1:], "joints": state[1:]},
                actions=state[:-1],
                rewards=np.zeros(STEPS, np.float32),
                terminateds=np.arange(STEPS) == STEPS - 1,
                eps_id=np.full(STEPS, episode),
                t=np.arange(STEPS),
            )
        )
    return found


def write(root: Path, rows: list[rlio.SampleBatch], pictures: Any) -> None:
    """Write a data set again."""
    shutil.rmtree(root, ignore_errors=True)
    with rlio.ParquetWriter(root, pictures=pictures, spool=None) as writer:
        for batch in rows:
            writer.write(batch)


def read(root: Path, **options: Any) -> None:
    """Read all rows."""
    with rlio.read(root, epochs=1, batch_size=32, **options) as reader:
        for _ in reader:
            pass


def size(root: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def timed(actions: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """(processor seconds, seconds) of each action."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(PASSES):
        for name, action in actions.items():
            start = time.process_time(), time.perf_counter()
            action()
            found[name].append((time.process_time() - start[0], time.perf_counter() - start[1]))
    return {
        name: (statistics.median(cpu for cpu, _ in times), statistics.median(wall for _, wall in times))
        for name, times in found.items()
    }


def lerobot_reads(root: Path, rows: list[int] | None = None) -> Callable[[], object]:
    """Reads rows with LeRobot; None: all rows in order."""
    import importlib

    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # See tests/integrations/test_lerobot.py.
        operators = importlib.import_module("torch").library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    with_video_reader(importlib.import_module("torchvision"))
    module = importlib.import_module("lerobot.datasets.lerobot_dataset")
    data = module.LeRobotDataset("rlio/x", root=root)
    return lambda: [data[row] for row in (range(len(data)) if rows is None else rows)]


def with_video_reader(torchvision: Any) -> None:
    """Give torchvision the class with which LeRobot 0.4.4 decodes, and which torchvision 0.28 has no more."""
    import av
    import torch

    class VideoReader:
        def __init__(self, path: str, stream: str) -> None:
            self.container = av.open(path)
            self._video = self.container.streams.video[0]

        def seek(self, seconds: float, keyframes_only: bool = False) -> None:
            self.container.seek(int(seconds * 1e6), backward=True, any_frame=not keyframes_only)

        def __iter__(self) -> Any:
            for frame in self.container.decode(self._video):
                data = torch.as_tensor(frame.to_rgb().to_ndarray()).permute(2, 0, 1)
                yield {"data": data, "pts": frame.time}

    if not hasattr(torchvision.io, "VideoReader"):
        torchvision.io.VideoReader = VideoReader
        torchvision.set_video_backend = lambda backend: None


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", action="store_true")
    loader = parser.parse_args().loader
    rows = EPISODES * STEPS
    for shape in SHAPES:
        folder = Path(tempfile.mkdtemp())
        made = batches(shape)
        png: Any = {"obs/camera": "png"}
        print(f"\n{shape}: {rows} rows, {rows * int(np.prod(shape)) / 1e6:.1f} MB of frames")
        writes = timed(
            {
                "write raw": lambda: write(folder / "raw", made, None),  # noqa: B023
                "write png": lambda: write(folder / "png", made, png),  # noqa: B023
            }
        )
        rlio.convert(folder / "png", folder / "lerobot", to="lerobot")
        rlio.convert(folder / "lerobot", folder / "kept")
        rlio.convert(folder / "lerobot", folder / "frames", options={"pictures": "frames"})
        reads: dict[str, Callable[[], object]] = {
            "read raw": lambda: read(folder / "raw", cache="none"),  # noqa: B023
            "read png": lambda: read(folder / "png", cache="none"),  # noqa: B023
            "read lerobot": lambda: read(folder / "lerobot", cache="none"),  # noqa: B023
            "obs alone": lambda: read(folder / "kept", cache="none", columns=["obs", "actions"]),  # noqa: B023
            "shuffled, stored": lambda: read(folder / "kept", cache="memory", shuffle=True, seed=0),  # noqa: B023
            "shuffled, cold": lambda: read(folder / "kept", cache="none", shuffle=True, seed=0),  # noqa: B023
        }
        if loader:
            reads["LeRobotDataset[i]"] = lerobot_reads(folder / "lerobot")
        for name, (cpu, wall) in {**writes, **timed(reads)}.items():
            print(f"{name:18} {rows / cpu:8.0f} rows/s of processor time {rows / wall:8.0f} rows/s")
        for name in ("raw", "png", "lerobot", "kept", "frames"):
            print(f"{name:18} {size(folder / name) / 1e6:8.2f} MB")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
