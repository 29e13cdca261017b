"""Videos: bytes and speed of kept videos, beside raw frames and LeRobot's own loader.

    python -m benchmarks.videos [--loader]

Needs PyAV; ``--loader`` needs LeRobot (tests/integrations/requirements-lerobot.txt). Wall-clock time, because
decoders have threads of their own: the median of five passes, each of which takes its turn with the others.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rlio
from benchmarks.pictures import EPISODES, STEPS, frames_of, lerobot_reads, read, size, timed

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

CODECS: dict[str, dict[str, str]] = {
    "libsvtav1": {"g": "2", "crf": "30", "preset": "8"},  # LeRobot's defaults, but for the preset.
    "libx264": {"g": "250"},
}


def main() -> None:
    """Print the tables."""
    from video_sets import video_set

    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", action="store_true")
    loader = parser.parse_args().loader
    shape, rows = (240, 320, 3), EPISODES * STEPS
    frames = [frames_of(episode, shape) for episode in range(EPISODES)]
    for codec, options in CODECS.items():
        for version in ("v3.0", "v2.1"):
            folder = Path(tempfile.mkdtemp(prefix="rlio-videos-"))
            video_set(
                folder / "lerobot",
                version,
                lengths=[STEPS] * EPISODES,
                cameras=["camera"],
                shape=shape,
                make=lambda episode, t, *_: frames[episode][t],
                codec=codec,
                options=options,
            )
            print(f"\n{codec}, LeRobot {version}, {shape}: {rows} rows in {EPISODES} episodes")
            for name, given in (("kept", {}), ("frames", {"options": {"pictures": "frames"}})):
                start = time.perf_counter()
                rlio.convert(folder / "lerobot", folder / name, **given)
                print(f"convert, {name:18} {time.perf_counter() - start:8.2f} s")
            start = time.perf_counter()
            assert rlio.convert(folder / "kept", folder / "back", to="lerobot", prove=True).proved
            print(f"back, with a proof          {time.perf_counter() - start:8.2f} s")
            for name in ("lerobot", "kept", "frames", "back"):
                print(f"{name:27} {size(folder / name) / 1e6:8.2f} MB")
            for name, (_, wall) in timed(_reads(folder, loader)).items():
                print(f"{name:27} {rows / wall:8.0f} rows/s")
            shutil.rmtree(folder)


def _reads(folder: Path, loader: bool) -> dict[str, Callable[[], object]]:
    data = rlio.open_dataset(folder / "kept")
    order = np.random.default_rng(0).permutation(len(data))
    obs: Any = {"cache": "none", "columns": ["obs", "actions"]}
    reads: dict[str, Callable[[], object]] = {
        "in order, raw frames": lambda: read(folder / "frames", cache="none"),
        "in order, kept": lambda: read(folder / "kept", cache="none"),
        "in order, kept, obs alone": lambda: read(folder / "kept", **obs),
        "in order, LeRobot's files": lambda: read(folder / "lerobot", cache="none"),
        "shuffled, raw frames": lambda: read(folder / "frames", cache="none", shuffle=True, seed=0),
        "shuffled, kept": lambda: read(folder / "kept", cache="none", shuffle=True, seed=0),
        "data[i], any order": lambda: [data[int(row)] for row in order],
    }
    if loader:
        reads["LeRobotDataset[i], in order"] = lerobot_reads(folder / "back")
        reads["LeRobotDataset[i], any"] = lerobot_reads(folder / "back", order.tolist())
    return reads


if __name__ == "__main__":
    main()
