"""Writes the data sets beside this file with LeRobot: `python make.py` with 0.4.4 (v3.0) and 0.3.2 (v2.1).

Frame t of episode e holds 100 e + t, and its action and reward 100 e + t + 0.5.
"""

import shutil
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import CODEBASE_VERSION, LeRobotDataset

HERE = Path(__file__).parent
LENGTHS = (3, 2, 4)


def features(kind):
    image = {"dtype": kind, "shape": (64, 80, 3), "names": ["height", "width", "channels"]}
    return {
        "observation.state": {"dtype": "float32", "shape": (2,), "names": None},
        **({"observation.images.top": image} if kind else {}),
        "observation.grid": {"dtype": "float32", "shape": (2, 3), "names": None},
        "action": {"dtype": "float32", "shape": (1,), "names": None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    }


def write(name, kind):
    root = HERE / name
    shutil.rmtree(root, ignore_errors=True)
    data = LeRobotDataset.create("rlio/counts", fps=10, root=root, features=features(kind))
    for episode, steps in enumerate(LENGTHS):
        for t in range(steps):
            at = 100 * episode + t
            frame = {
                "observation.state": np.array([at, -at], np.float32),
                "observation.grid": np.full((2, 3), at, np.float32),
                "action": np.array([at + 0.5], np.float32),
                "next.reward": np.array([at + 0.5], np.float32),
                "next.done": np.array([t == steps - 1 and episode != 1]),
                "next.success": np.array([t == 1]),
            }
            if kind:
                frame["observation.images.top"] = np.full((64, 80, 3), at % 100 * 50, np.uint8)
            if CODEBASE_VERSION.startswith("v2"):
                data.add_frame(frame, task=f"count {episode % 2}")
            else:
                data.add_frame({**frame, "task": f"count {episode % 2}"})
        data.save_episode()
    if hasattr(data, "finalize"):
        data.finalize()
    shutil.rmtree(root / "images", ignore_errors=True)


if __name__ == "__main__":
    for kind, ending in (("", ""), ("image", "-image"), ("video", "-video")):
        write(f"{CODEBASE_VERSION}{ending}", kind)
