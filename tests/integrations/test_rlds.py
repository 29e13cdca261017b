"""What rlio reads of a data set that TensorFlow Datasets stores is what TensorFlow Datasets reads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio

tfds: Any = pytest.importorskip("tensorflow_datasets", reason="tensorflow-datasets is not installed")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


def test_steps_are_those_of_the_data_set(tmp_path: Path) -> None:
    feature = tfds.features
    step = {
        "observation": {
            "image": feature.Image(shape=(12, 10, 3), encoding_format="png"),
            "joints": feature.Tensor(shape=(3, 2), dtype=np.float32),
        },
        "action": feature.Tensor(shape=(4,), dtype=np.int16),
        "reward": feature.Scalar(dtype=np.float32),
        **{name: feature.Scalar(dtype=np.bool_) for name in ("is_first", "is_last", "is_terminal")},
        "language_instruction": feature.Text(),
    }
    random = np.random.default_rng(0)

    def one(t: int, steps: int) -> dict[str, Any]:
        return {
            "observation": {
                "image": random.integers(0, 256, (12, 10, 3), np.uint8),
                "joints": random.standard_normal((3, 2), np.float32),
            },
            "action": random.integers(-(2**15), 2**15, 4).astype(np.int16),
            "reward": random.standard_normal(dtype=np.float32),
            "is_first": t == 0,
            "is_last": t == steps - 1,
            "is_terminal": t == steps - 1 and steps % 2 == 0,
            "language_instruction": f"später {t}",
        }

    class Made(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc]
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(
                builder=self, features=feature.FeaturesDict({"steps": feature.Dataset(step)})
            )

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for number in range(12):
                yield number, {"steps": [one(t, 2 + number) for t in range(2 + number)]}

    builder = Made(data_dir=tmp_path / "data")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=3))
    read = tfds.ReadConfig(interleave_cycle_length=1)
    expected = [
        list(tfds.as_numpy(episode["steps"]))
        for episode in builder.as_dataset(split="train", read_config=read)
    ]
    with rlio.read(tmp_path / "data", epochs=1) as reader:
        rows: Any = rlio.concat_samples(list(reader))
    for number, steps in enumerate(expected):
        found = rows[rows["eps_id"] == number]
        assert len(found) == len(steps) - 1
        for t, (now, after) in enumerate(pairwise(steps)):
            for name in ("image", "joints"):
                assert (found["obs"][name][t] == now["observation"][name]).all()
                assert (found["new_obs"][name][t] == after["observation"][name]).all()
            assert (found["actions"][t] == now["action"]).all()
            assert found["rewards"][t] == now["reward"]
            assert found["language_instruction"][t] == now["language_instruction"].decode()
            assert found["terminateds"][t] == after["is_terminal"]
            assert found["truncateds"][t] == (after["is_last"] and not after["is_terminal"])
