"""Frames of episodes: `Episode.frames`, `frames_of` and `write_frames`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import rlio
from rlio.errors import MissingColumn, MissingExtra, OptionError, SchemaError

STEPS = 6
PICTURES = np.random.default_rng(0).integers(0, 256, (STEPS + 1, 12, 10, 3), np.uint8)
GREY = PICTURES[..., 0]


def episode(observations: Any, **more: Any) -> rlio.Episode:
    return rlio.Episode(
        7, observations=observations, actions=np.arange(STEPS), rewards=np.ones(STEPS), **more
    )


def stacks_of(frames: np.ndarray, depth: int, axis: int) -> np.ndarray:
    """Row t holds frames t - depth + 1 to t, the first repeated, along an axis of the row."""
    rows = np.arange(len(frames))[:, None] + np.arange(1 - depth, 1)
    return np.moveaxis(frames[np.maximum(rows, 0)], 1, 1 + axis)


RGBA = np.concatenate([PICTURES, np.full((STEPS + 1, 12, 10, 1), 255, np.uint8)], -1)
#: Form of the observations -> (observations, frames).
FORMS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "channels last": (PICTURES, PICTURES),
    "channels first": (np.moveaxis(PICTURES, -1, 1), PICTURES),
    "grey": (GREY, GREY[..., None]),
    "grey with a channel": (GREY[..., None], GREY[..., None]),
    "grey with a channel first": (GREY[:, None], GREY[..., None]),
    "RGBA": (RGBA, RGBA),
    "stack of 4, last": (stacks_of(GREY, 4, 2), GREY[..., None]),
    "stack of 4, first": (stacks_of(GREY, 4, 0), GREY[..., None]),
    "stack of 3 that looks like RGB": (stacks_of(GREY, 3, 2), GREY[..., None]),
    "stack of 2": (stacks_of(GREY, 2, 2), GREY[..., None]),
    "stack of RGB, first": (stacks_of(PICTURES, 4, 0), PICTURES),
    "stack of RGB, last": (stacks_of(PICTURES, 4, 3), PICTURES),
    "stack of RGB with channels first": (stacks_of(np.moveaxis(PICTURES, -1, 1), 4, 0), PICTURES),
    "RGB that never changes": (np.full_like(PICTURES, 9), np.full_like(PICTURES, 9)),
    "small RGB": (PICTURES[:, :4, :5], PICTURES[:, :4, :5]),
}


@pytest.mark.parametrize("form", FORMS)
def test_frames_are_the_newest_picture_of_each_step_with_channels_last(form: str) -> None:
    observations, frames = FORMS[form]
    found = episode(observations).frames
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, frames[:STEPS])
    np.testing.assert_array_equal(episode(observations[:STEPS]).frames, frames[:STEPS])


def test_an_episode_of_one_step_has_frames() -> None:
    one = rlio.Episode(0, observations=PICTURES[:2], actions=[0], rewards=[1.0])
    np.testing.assert_array_equal(one.frames, PICTURES[:1])


NOT_PICTURES: dict[str, Any] = {
    "floats": np.zeros((STEPS + 1, 12, 10, 3), np.float32),
    "numbers": np.zeros((STEPS + 1, 4), np.uint8),
    "small tables": np.zeros((STEPS + 1, 3, 4), np.uint8),
    "volumes": np.zeros((STEPS + 1, 20, 20, 20), np.uint8),
    "texts": np.array(["a"] * (STEPS + 1), object),
}


@pytest.mark.parametrize("kind", NOT_PICTURES)
def test_an_episode_without_pictures_says_what_its_observations_are(kind: str) -> None:
    observations = NOT_PICTURES[kind]
    with pytest.raises(MissingColumn, match="no observation is a picture, and no other column has any") as at:
        episode(observations).frames  # noqa: B018
    assert f"obs {observations.dtype} {observations.shape[1:]}" in str(at.value)


def test_an_episode_with_pictures_elsewhere_names_the_columns_that_could_be_frames() -> None:
    found = episode(np.zeros(STEPS + 1), extra_outputs={"pixels": PICTURES[:STEPS], "logp": np.zeros(STEPS)})
    with pytest.raises(MissingColumn, match=r"pictures are in pixels, frames_of\('pixels'\)"):
        found.frames  # noqa: B018
    with pytest.raises(MissingColumn, match=r"'logp' has no pictures: pictures are in pixels"):
        found.frames_of("logp")
    np.testing.assert_array_equal(found.frames_of("pixels"), PICTURES[:STEPS])


def test_an_episode_with_two_cameras_asks_for_one() -> None:
    found = episode({"left": PICTURES, "right": PICTURES[:, ::-1], "arm": np.zeros((STEPS + 1, 3))})
    with pytest.raises(SchemaError, match=r"2 observations are pictures: name one, frames_of\('obs/left'\)"):
        found.frames  # noqa: B018
    np.testing.assert_array_equal(found.frames_of("obs/right"), PICTURES[:STEPS, ::-1])
    one = episode({"camera": PICTURES, "arm": np.zeros((STEPS + 1, 3))})
    np.testing.assert_array_equal(one.frames, PICTURES[:STEPS])


@pytest.mark.parametrize("write", [rlio.ParquetWriter, rlio.JsonWriter])
@pytest.mark.parametrize("form", ["channels last", "stack of 4, last", "stack of 4, first"])
def test_frames_of_a_stored_episode_are_those_that_were_recorded(
    write: Callable[..., Any], form: str, tmp_path: Path
) -> None:
    observations, frames = FORMS[form]
    with write(tmp_path) as writer:
        writer.write(episode(observations, terminated=True).to_batch())
    np.testing.assert_array_equal(rlio.open_dataset(tmp_path).episode(0).frames, frames[:STEPS])


def test_write_frames_writes_png_files_that_hold_the_frames(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "frames"
    paths = episode(PICTURES, t_started=4).write_frames(folder)
    assert [Path(path).name for path in paths] == [f"episode-7-step-{4 + t:06d}.png" for t in range(STEPS)]
    for path, frame in zip(paths, PICTURES, strict=False):
        np.testing.assert_array_equal(np.asarray(Image.open(path)), frame)
    some = episode(GREY).write_frames(tmp_path / "some", 3)
    assert [int(path[-8:-4]) for path in some] == [0, 2, 5]
    np.testing.assert_array_equal(np.asarray(Image.open(some[1])), GREY[2])


def test_write_frames_spreads_its_files_and_stays_in_its_folder(tmp_path: Path) -> None:
    found = rlio.Episode(
        "../../a/b\n", observations=PICTURES[:STEPS], actions=np.arange(STEPS), rewards=np.ones(STEPS),
        extra_outputs={"pixels": GREY[:STEPS]},
    )  # fmt: skip
    paths = found.write_frames(tmp_path, 100, column="pixels")
    assert len(paths) == STEPS
    assert {Path(path).parent for path in paths} == {tmp_path}
    assert sorted(tmp_path.iterdir()) == sorted(map(Path, paths))
    with pytest.raises(OptionError, match="count=0"):
        found.write_frames(tmp_path, 0)
    with pytest.raises(MissingColumn):
        found.write_frames(tmp_path / "none", column="absent")
    assert not (tmp_path / "none").exists()


def test_an_episode_shows_thumbnails_of_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    import base64
    import re

    wide = np.repeat(np.repeat(PICTURES, 30, 1), 30, 2)
    text = episode(wide)._repr_html_()
    files = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]*)"', text)]
    assert len(files) == STEPS
    for file, frame in zip(files, wide, strict=False):
        shown = np.asarray(Image.open(io.BytesIO(file)))
        assert max(shown.shape[:2]) <= 128
        np.testing.assert_array_equal(shown, frame[::3, ::3])
    assert "<img" not in episode(np.zeros((STEPS + 1, 4)))._repr_html_()
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install &#x27;rlio[images]&#x27;" in episode(wide)._repr_html_()
    with pytest.raises(MissingExtra, match="Pillow"):
        episode(wide).write_frames("never-made")
    assert not Path("never-made").exists()
