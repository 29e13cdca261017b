"""What LeRobot says of the data sets that rlio writes: `make test-integrations`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

try:
    # LeRobot takes transforms from it.
    importlib.import_module("torchvision")
except RuntimeError:
    # Its wheel is compiled for torch with CUDA; beside torch without, its import asks for these operators.
    operators = importlib.import_module("torch").library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except ImportError:
    pass  # No LeRobot either.

lerobot_dataset = pytest.importorskip(
    "lerobot.datasets.lerobot_dataset", reason="LeRobot is not installed: make test-integrations"
)
if not lerobot_dataset.CODEBASE_VERSION.startswith("v3"):
    pytest.skip("this LeRobot does not read version 3", allow_module_level=True)

import rlio  # noqa: E402
from benchmarks.pictures import with_video_reader  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden/formats/lerobot"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def loaded(root: Path) -> Any:
    return lerobot_dataset.LeRobotDataset("rlio/x", root=root)


@pytest.mark.parametrize("name", ["v3.0", "v3.0-image"])
def test_lerobot_loads_what_rlio_made_of_its_data_as_the_same_data(name: str, tmp_path: Path) -> None:
    rlio.convert(GOLDEN / name, tmp_path / "a", to="lerobot", prove=True)
    before, after = loaded(GOLDEN / name), loaded(tmp_path / "a")
    assert (after.num_episodes, after.num_frames, after.fps) == (3, 9, 10)
    assert after.meta.tasks.equals(before.meta.tasks)
    for feature, about in before.features.items():
        assert after.features[feature] == about, feature
    for row in range(9):
        one, other = before[row], after[row]
        assert set(other) - set(one) == {"next.terminated", "next.truncated"}
        for feature, value in one.items():
            if feature == "next.done" and row == 4:  # Truncated, which LeRobot did not say.
                assert (bool(other[feature]), bool(value)) == (True, False)
                continue
            np.testing.assert_equal(np.asarray(other[feature]), np.asarray(value), err_msg=feature)
    for feature, found in before.meta.stats.items():
        if feature == "next.done":
            continue
        # LeRobot 0.4.4 squares the bytes of pictures as bytes: its deviation of them is too small.
        for statistic in ("min", "max", "mean", *["std"] * (feature != "observation.images.top")):
            np.testing.assert_allclose(
                after.meta.stats[feature][statistic], found[statistic], rtol=1e-4, atol=1e-6
            )


def test_lerobot_goes_along_an_episode_with_a_final_observation(tmp_path: Path) -> None:
    near = np.arange(5.0)[:, None]
    episode = {
        "obs": {"near": near, "far": np.ones((5, 2, 2), np.float32)},
        "actions": np.arange(4),
        "rewards": np.ones(4),
        "terminateds": True,
        "index": np.arange(4),
        "words": ["a", "bc", "d", ""],
    }
    rlio.convert(
        rlio.from_episodes([episode] * 2), tmp_path / "a", to="lerobot", options={"task": "walk"}, prove=True
    )
    data = lerobot_dataset.LeRobotDataset(
        "rlio/x", root=tmp_path / "a", delta_timestamps={"observation.near": [-1.0, 0.0]}
    )
    item = data[3]
    assert np.asarray(item["observation.near"]).reshape(-1).tolist() == [2, 3]
    assert float(item["next.observation.final.near"]) == 4
    assert bool(item["next.done"])
    assert item["task"] == "walk"
    assert (int(item["index"]), int(item["index_"]), item["words"]) == (3, 3, "")
    assert bool(item["next.observation.final_known"])


@pytest.mark.parametrize("name", ["v3.0-video", "v2.1-video"])
def test_lerobot_shows_the_frames_of_videos_that_rlio_kept(name: str, tmp_path: Path) -> None:
    with_video_reader(importlib.import_module("torchvision"))
    rlio.convert(GOLDEN / name, tmp_path / "a", prove=True)
    rlio.convert(tmp_path / "a", tmp_path / "b", to="lerobot", prove=True)
    with rlio.read(GOLDEN / name, epochs=1) as reader:
        expected = rlio.concat_samples(list(reader))["obs"]["images.top"]
    data = loaded(tmp_path / "b")
    for row in range(len(expected)):
        found = np.asarray(data[row]["observation.images.top"]).transpose(1, 2, 0) * 255
        assert np.array_equal(np.round(found), expected[row])
    assert data.meta.features["observation.images.top"]["info"]["video.codec"] == "av1"
